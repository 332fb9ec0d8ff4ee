/* The table's f32 loops, gathered in the array that TABLE names: loops_f32.c and loops_f32_avx512.c include this.
 *
 * The table's text calls exp, log, tanh, sigmoid ...: here those of math.h, which vectorise.
 */
#include "core/ops/loops.h"
#include "core/ops/math.h"

#include <math.h>

#define exp(x) td_exp_f32(x)
#define log(x) td_log_f32(x)
#define tanh(x) td_tanh_f32(x)
#define sigmoid(x) td_sigmoid_f32(x)
#define erf(x) td_erf_f32(x)
#define log1p(x) td_log1p_f32(x)
#define expm1(x) td_expm1_f32(x)
#define softplus(x) td_softplus_f32(x)
#define gelu(x) td_gelu_f32(x)
#define gelu_slope(x) td_gelu_slope_f32(x)
#define gelu_tanh(x) td_gelu_tanh_f32(x)
#define gelu_tanh_slope(x) td_gelu_tanh_slope_f32(x)
#define silu(x) td_silu_f32(x)
#define silu_slope(x) td_silu_slope_f32(x)
#define sqrt(x) sqrtf(x)
#define fabs(x) fabsf(x)
#define sin(x) sinf(x)
#define cos(x) cosf(x)
#define pow(x, y) powf((x), (y))

#define T float
#define LOOP_F32(name, inputs, partial, domain, expression, ...) LOOP(f32, name, inputs, expression)
TD_POINTWISE(LOOP_F32)
LOOP(f32, cast, 1, a)

#define ENTRY_F32(name, ...) [TD_POINTWISE_##name] = loop_##name##_f32,
const td_pointwise_f32_loop TABLE[TD_POINTWISE_COUNT] = { TD_POINTWISE(ENTRY_F32) ENTRY_F32(cast) };
