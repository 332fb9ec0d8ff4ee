/* Sums in eight f32 or four f64 lanes that meet pairwise at the end: the compilers' reductions add lane after lane, which takes longer
 * than a short row. The order of additions is the same whatever vectors the processor has.
 */
#ifndef TANDEM_CORE_OPS_LANES_H
#define TANDEM_CORE_OPS_LANES_H

/* No wider: AddressSanitizer's frames keep no alignment above 32 bytes. */
enum { TD_LANES_f32 = 8, TD_LANES_f64 = 4 };
typedef float td_lanes_f32 __attribute__((vector_size(32), aligned(4), may_alias));
typedef double td_lanes_f64 __attribute__((vector_size(32), aligned(8), may_alias));

static inline float td_lanes_total_f32(const td_lanes_f32 *x)
{
    typedef float four __attribute__((vector_size(16)));
    four q = __builtin_shufflevector(*x, *x, 0, 1, 2, 3) + __builtin_shufflevector(*x, *x, 4, 5, 6, 7);
    q += __builtin_shufflevector(q, q, 2, 3, 0, 1);
    return q[0] + q[1];
}

static inline double td_lanes_total_f64(const td_lanes_f64 *x) { return ((*x)[0] + (*x)[2]) + ((*x)[1] + (*x)[3]); }

#endif
