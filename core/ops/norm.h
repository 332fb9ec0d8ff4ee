/* What the norms' descriptors (norm.c) and the kernels of their rows (norm_rows.h) share. */
#ifndef TANDEM_CORE_OPS_NORM_H
#define TANDEM_CORE_OPS_NORM_H

#include "core/ops/lanes.h"
#include "core/ops/op.h"
#include "core/ops/simd.h"

#include <math.h>

/* Attributes of layer_norm, rms_norm and norm_gradient; bias and adds are norm_gradient's. `narrow` and `adds` are of nodes that the
 * epilogue pass makes, which comes after placement. */
typedef struct td_norm_attr {
    double eps;
    int32_t centered, bias;
    int32_t narrow;                           /* TD_BF16, TD_F16: y's dtype, or of a copy of dx, the last output; 0, TD_F32: neither */
    int32_t adds;                             /* dx is added to a fourth input */
} td_norm_attr;

enum {
    SUMMED = 512,                             /* elements summed before they are added to the rest */
    CHAINS = 4,                               /* of additions at once: each waits for its last one */
};

/* One row of f32, as norm_rows.h has them. */
typedef struct td_norm_kernels {
    void (*forward)(const td_norm_attr *a, const float *x, const float *weight, const float *bias, float *y, int64_t count);
    void (*backward)(const td_norm_attr *a, const float *x, const float *weight, const float *dy, float *dx, float *dweight, float *dbias,
                     int64_t count);
} td_norm_kernels;
extern const td_norm_kernels td_norm_avx512;

#endif
