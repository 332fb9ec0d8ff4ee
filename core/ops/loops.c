/* The CPU loops of the pointwise table in f64, and which of the f32 ones run here.
 *
 * The table's text calls exp, log, tanh ... of the C library; what it lacks is in pointwise_f64.h.
 */
#include "core/cpu.h"
#include "core/ops/loops.h"

#include <math.h>

#define TD_CODE(...) __VA_ARGS__
#define TD_FUNCTION static inline
#include "core/ops/pointwise_f64.h"

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
