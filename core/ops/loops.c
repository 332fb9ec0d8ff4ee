/* The CPU loops of the pointwise table in f64, and which of the f32 ones run here.
 *
 * The table's text calls exp, log, tanh ... of the C library; what it lacks is defined here.
 */
#include "core/cpu.h"
#include "core/ops/loops.h"

#include <math.h>

static inline double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static inline double softplus(double x) { return (x > 0 ? x : 0) + log1p(exp(-fabs(x))); }
static inline double gelu(double x) { return x * 0.5 * (1 + erf(x * 0.70710678118654752)); }
static inline double gelu_slope(double x)
{
    return 0.5 * (1 + erf(x * 0.70710678118654752)) + x * 0.3989422804014327 * exp(-0.5 * x * x);
}
static inline double gelu_tanh(double x)
{
    return x * sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x));
}
static inline double gelu_tanh_slope(double x)
{
    double z = fmin(x * x, 1e4); /* where s is 0 or 1: 0 times infinity would be NaN */
    double s = sigmoid(1.5957691216057308 * x * (1 + 0.044715 * z));
    return s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * z);
}
static inline double silu(double x) { return x * sigmoid(x); }
static inline double silu_slope(double x)
{
    double s = sigmoid(x);
    return s + x * s * (1 - s);
}

#define T double
#define LOOP_F64(name, inputs, partial, domain, expression, ...) LOOP(f64, name, inputs, expression)
TD_POINTWISE(LOOP_F64)
LOOP(f64, cast, 1, a)

#define ENTRY_F64(name, ...) [TD_POINTWISE_##name] = loop_##name##_f64,
#define ENTRY_INPUTS(name, inputs, ...) [TD_POINTWISE_##name] = inputs,

const td_pointwise_f64_loop td_pointwise_f64[TD_POINTWISE_COUNT] = { TD_POINTWISE(ENTRY_F64) ENTRY_F64(cast) };
const signed char td_pointwise_inputs[TD_POINTWISE_COUNT] = { TD_POINTWISE(ENTRY_INPUTS) ENTRY_INPUTS(cast, 1) };

const td_pointwise_f32_loop *td_pointwise_f32(void)
{
    return td_cpu_has_avx512() ? td_pointwise_f32_avx512 : td_pointwise_f32_plain;
}
