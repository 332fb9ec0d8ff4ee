/* Conversion between dtypes and the two in which the CPU computes, f32 and f64.
 *
 * To 16 bits values round to nearest, ties to even; to integers they are cut towards zero and clamped to the range,
 * NaN gives 0. `from` and `to` may be the same memory if the dtypes are as wide.
 */
#ifndef TANDEM_CORE_OPS_CONVERT_H
#define TANDEM_CORE_OPS_CONVERT_H

#include <tandem/core.h>

void td_load_f32(float *to, td_dtype dtype, const void *from, int64_t count);
void td_load_f64(double *to, td_dtype dtype, const void *from, int64_t count);
void td_store_f32(void *to, td_dtype dtype, const float *from, int64_t count);
void td_store_f64(void *to, td_dtype dtype, const double *from, int64_t count);

/* Values to the nearest that `dtype` has; they stay in place. */
void td_round_f32(float *values, td_dtype dtype, int64_t count);
void td_round_f64(double *values, td_dtype dtype, int64_t count);

/* `count` values of dtype `dtype` at `from` as f32: from itself if they are, else converted to `tile`. */
static inline const float *td_view_f32(td_dtype dtype, const void *from, int64_t count, float *tile)
{
    if (dtype == TD_F32)
        return (const float *)from;
    td_load_f32(tile, dtype, from, count);
    return tile;
}

#endif
