/* The CPU loops of the pointwise table, in f32 and f64.
 *
 * The table's text calls exp, log, tanh, sigmoid ...: type-generic here, as in <tgmath.h>, with f32 versions that
 * vectorise; f64 takes the C library's.
 */
#include "core/ops/math.h"
#include "core/ops/pointwise_table.h"
#include "core/ops/simd.h"

#include <math.h>

static inline double sigmoid_f64(double x) { return 1 / (1 + exp(-x)); }

static inline double softplus_f64(double x) { return (x > 0 ? x : 0) + log1p(exp(-fabs(x))); }
static inline double gelu_f64(double x) { return x * 0.5 * (1 + erf(x * 0.70710678118654752)); }
static inline double gelu_slope_f64(double x)
{
    return 0.5 * (1 + erf(x * 0.70710678118654752)) + x * 0.3989422804014327 * exp(-0.5 * x * x);
}
static inline double gelu_tanh_f64(double x)
{
    return x * sigmoid_f64(1.5957691216057308 * x * (1 + 0.044715 * x * x));
}
static inline double gelu_tanh_slope_f64(double x)
{
    double s = sigmoid_f64(1.5957691216057308 * x * (1 + 0.044715 * x * x));
    return s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x);
}
static inline double silu_f64(double x) { return x * sigmoid_f64(x); }
static inline double silu_slope_f64(double x)
{
    double s = sigmoid_f64(x);
    return s + x * s * (1 - s);
}

#define exp(x) _Generic((x), float: td_exp_f32, double: (exp))(x)
#define log(x) _Generic((x), float: td_log_f32, double: (log))(x)
#define tanh(x) _Generic((x), float: td_tanh_f32, double: (tanh))(x)
#define sigmoid(x) _Generic((x), float: td_sigmoid_f32, double: sigmoid_f64)(x)
#define erf(x) _Generic((x), float: td_erf_f32, double: (erf))(x)
#define log1p(x) _Generic((x), float: td_log1p_f32, double: (log1p))(x)
#define expm1(x) _Generic((x), float: td_expm1_f32, double: (expm1))(x)
#define softplus(x) _Generic((x), float: td_softplus_f32, double: softplus_f64)(x)
#define gelu(x) _Generic((x), float: td_gelu_f32, double: gelu_f64)(x)
#define gelu_slope(x) _Generic((x), float: td_gelu_slope_f32, double: gelu_slope_f64)(x)
#define gelu_tanh(x) _Generic((x), float: td_gelu_tanh_f32, double: gelu_tanh_f64)(x)
#define gelu_tanh_slope(x) _Generic((x), float: td_gelu_tanh_slope_f32, double: gelu_tanh_slope_f64)(x)
#define silu(x) _Generic((x), float: td_silu_f32, double: silu_f64)(x)
#define silu_slope(x) _Generic((x), float: td_silu_slope_f32, double: silu_slope_f64)(x)
#define sqrt(x) _Generic((x), float: sqrtf, double: (sqrt))(x)
#define fabs(x) _Generic((x), float: fabsf, double: (fabs))(x)
#define sin(x) _Generic((x), float: sinf, double: (sin))(x)
#define cos(x) _Generic((x), float: cosf, double: (cos))(x)
#define pow(x, y) _Generic((x), float: powf, double: (pow))((x), (y))

#define OPERANDS_1 const T a = pa[i];
#define OPERANDS_2 OPERANDS_1 const T b = pb[i];
#define OPERANDS_3 OPERANDS_2 const T c = pc[i];

#define LOOP(suffix, name, inputs, expression)                                                          \
    static void loop_##name##_##suffix(T *out, const T *pa, const T *pb, const T *pc, int64_t count)           \
    {                                                                                                   \
        (void)pa, (void)pb, (void)pc;                                                                   \
        TD_SIMD                                                                                         \
        for (int64_t i = 0; i < count; i++) {                                                           \
            OPERANDS_##inputs                                                                           \
            out[i] = (T)(expression);                                                                   \
        }                                                                                               \
    }

#define LOOP_F32(name, inputs, partial, domain, expression, ...) LOOP(f32, name, inputs, expression)
#define LOOP_F64(name, inputs, partial, domain, expression, ...) LOOP(f64, name, inputs, expression)

#define T float
TD_POINTWISE(LOOP_F32)
LOOP(f32, cast, 1, a)
#undef T
#define T double
TD_POINTWISE(LOOP_F64)
LOOP(f64, cast, 1, a)
#undef T

#define ENTRY_F32(name, ...) [TD_POINTWISE_##name] = loop_##name##_f32,
#define ENTRY_F64(name, ...) [TD_POINTWISE_##name] = loop_##name##_f64,
#define ENTRY_INPUTS(name, inputs, ...) [TD_POINTWISE_##name] = inputs,

const td_pointwise_f32_loop td_pointwise_f32[TD_POINTWISE_COUNT] = { TD_POINTWISE(ENTRY_F32) ENTRY_F32(cast) };
const td_pointwise_f64_loop td_pointwise_f64[TD_POINTWISE_COUNT] = { TD_POINTWISE(ENTRY_F64) ENTRY_F64(cast) };
const signed char td_pointwise_inputs[TD_POINTWISE_COUNT] = { TD_POINTWISE(ENTRY_INPUTS) ENTRY_INPUTS(cast, 1) };
