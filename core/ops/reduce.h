/* What the reductions' descriptors and CPU kernels (reduce.c) and their CUDA kernels (reduce.cu) share. */
#ifndef TANDEM_CORE_OPS_REDUCE_H
#define TANDEM_CORE_OPS_REDUCE_H

#include "core/ops/op.h"

typedef struct td_reduce_attr {
    uint32_t axes; /* bit i: dimension i */
    int32_t keep;
} td_reduce_attr;

/* The operand as (outer, n, inner): n is reduced, and its first `valid` exist on this rank. */
typedef struct td_reduced {
    int64_t outer, n, inner, valid;
} td_reduced;

static inline td_reduced td_reduced_of(const td_kernel *k)
{
    const td_reduce_attr *attr = (const td_reduce_attr *)k->attr;
    const td_arg *x = &k->in[0];
    int rank = (int)x->shape.rank, first = 0;
    while (first < rank && !(attr->axes >> first & 1))
        first++;
    int end = first;
    while (end < rank && (attr->axes >> end & 1))
        end++;
    td_reduced r = { td_shape_product(x->shape, 0, first), td_shape_product(x->shape, first, end),
                     td_shape_product(x->shape, end, rank), 0 };
    r.valid = r.n;
    if (first < end && r.n > 0)
        r.valid = r.n / x->shape.dim[first] * td_arg_extent(k->run ? k->run->mesh : NULL, x, first).valid;
    return r;
}

/* ---- How the CPU reduces elements that are adjacent in memory: in chunks, one after the other, of blocks, whose results are f64 */

enum { TD_REDUCED_BLOCK = 512 };              /* elements, summed in f32 */

/* Elements of a chunk, of which a row of n has one or several: a task each. */
int64_t td_reduced_chunk(int64_t n);
/* Of a block: count <= TD_REDUCED_BLOCK. */
double td_block_sum_f32(const float *x, int64_t count);
double td_block_sum_f64(const double *x, int64_t count);
double td_block_max_f32(const float *x, int64_t count);
double td_block_max_f64(const double *x, int64_t count);

/* The larger of the two; a NaN is larger than anything. */
static inline double td_larger(double a, double b) { return b > a || b != b ? b : a; }

#endif
