/* Rows of norms in f32, in vectors of sixteen. */
#include "core/ops/norm.h"

#define T float
#define NAME(x) x##_f32
#include "core/ops/norm_rows.h"

const td_norm_kernels td_norm_avx512 = { forward_f32, backward_f32 };
