/* Every pointwise function: one row is all there is to say about it.
 *
 *     X(name, inputs, partial, domain, expression, da, db, dc)
 *
 * expression   of the operands a, b, c: C and CUDA read the same text. Comparisons give 1 or 0.
 * partial      how a sum over ranks passes through: NONE, JOINT (linear in all operands together), EACH (in each)
 * domain       what its tests draw: ANY, POSITIVE, STEP (constant but for jumps: no gradient, none is checked)
 * da, db, dc   the gradient of each operand as operations on a, b, c, y (the result) and dy; K(x) is the constant x,
 *              ZERO no gradient; BELL(x, h, r) is h exp(r x^2), SLOPE(f, x) the row f_slope of x. Gradients of operands
 *              that were stretched are summed back to their shape afterwards.
 */
#ifndef TANDEM_CORE_OPS_POINTWISE_TABLE_H
#define TANDEM_CORE_OPS_POINTWISE_TABLE_H

#include <stdint.h>

#define TD_POINTWISE(X) \
    X(neg,        1, JOINT, ANY,      -a,                           NEG(dy), ZERO, ZERO) \
    X(exp,        1, NONE,  ANY,      exp(a),                       MUL(dy, y), ZERO, ZERO) \
    X(log,        1, NONE,  POSITIVE, log(a),                       DIV(dy, a), ZERO, ZERO) \
    X(sqrt,       1, NONE,  POSITIVE, sqrt(a),                      DIV(MUL(dy, K(0.5)), y), ZERO, ZERO) \
    X(rsqrt,      1, NONE,  POSITIVE, 1 / sqrt(a),                  MUL(MUL(dy, K(-0.5)), MUL(y, SQUARE(y))), ZERO, ZERO) \
    X(tanh,       1, NONE,  ANY,      tanh(a),                      MUL(dy, SUB(K(1), SQUARE(y))), ZERO, ZERO) \
    X(sigmoid,    1, NONE,  ANY,      sigmoid(a),                   MUL(dy, MUL(y, SUB(K(1), y))), ZERO, ZERO) \
    X(relu,       1, NONE,  ANY,      a < 0 ? 0 : a,                MUL(dy, POSITIVE(y)), ZERO, ZERO) \
    X(abs,        1, NONE,  ANY,      fabs(a),                      MUL(dy, SIGN(a)), ZERO, ZERO) \
    X(square,     1, NONE,  ANY,      a * a,                        MUL(dy, MUL(a, K(2))), ZERO, ZERO) \
    X(reciprocal, 1, NONE,  POSITIVE, 1 / a,                        NEG(MUL(dy, SQUARE(y))), ZERO, ZERO) \
    X(sin,        1, NONE,  ANY,      sin(a),                       MUL(dy, COS(a)), ZERO, ZERO) \
    X(cos,        1, NONE,  ANY,      cos(a),                       NEG(MUL(dy, SIN(a))), ZERO, ZERO) \
    X(sign,       1, NONE,  STEP,     (a > 0) - (a < 0),            ZERO, ZERO, ZERO) \
    X(positive,   1, NONE,  STEP,     a > 0,                        ZERO, ZERO, ZERO) \
    X(detach,     1, JOINT, STEP,     a,                            ZERO, ZERO, ZERO) \
    X(erf,        1, NONE,  ANY,      erf(a),                       MUL(dy, BELL(a, 1.1283791670955126, -1)), ZERO, ZERO) \
    X(log1p,      1, NONE,  POSITIVE, log1p(a),                     DIV(dy, ADD(a, K(1))), ZERO, ZERO) \
    X(expm1,      1, NONE,  ANY,      expm1(a),                     MUL(dy, ADD(y, K(1))), ZERO, ZERO) \
    X(softplus,   1, NONE,  ANY,      softplus(a),                  MUL(dy, SIGMOID(a)), ZERO, ZERO) \
    X(gelu,       1, NONE,  ANY,      gelu(a),                      MUL(dy, SLOPE(gelu, a)), ZERO, ZERO) \
    X(gelu_tanh,  1, NONE,  ANY,      gelu_tanh(a),                 MUL(dy, SLOPE(gelu_tanh, a)), ZERO, ZERO) \
    X(silu,       1, NONE,  ANY,      silu(a),                      MUL(dy, SLOPE(silu, a)), ZERO, ZERO) \
    X(gelu_slope, 1, NONE,  ANY,      gelu_slope(a),                MUL(dy, MUL(BELL(a, 0.3989422804014327, -0.5), SUB(K(2), SQUARE(a)))), ZERO, ZERO) \
    X(gelu_tanh_slope, 1, NONE, ANY,  gelu_tanh_slope(a),           MUL(dy, gelu_tanh_curve(a, here)), ZERO, ZERO) \
    X(silu_slope, 1, NONE,  ANY,      silu_slope(a),                MUL(dy, silu_curve(a, here)), ZERO, ZERO) \
    X(add,        2, JOINT, ANY,      a + b,                        dy, dy, ZERO) \
    X(sub,        2, JOINT, ANY,      a - b,                        dy, NEG(dy), ZERO) \
    X(mul,        2, EACH,  ANY,      a * b,                        MUL(dy, b), MUL(dy, a), ZERO) \
    X(div,        2, NONE,  POSITIVE, a / b,                        DIV(dy, b), NEG(DIV(MUL(dy, y), b)), ZERO) \
    X(swiglu,     2, NONE,  ANY,      silu(a) * b,                  MUL(MUL(dy, b), SLOPE(silu, a)), MUL(dy, td_silu_at(a, here)), ZERO) \
    X(minimum,    2, NONE,  ANY,      a <= b || a != a ? a : b,     MUL(dy, LESS_EQUAL(a, b)), MUL(dy, LESS(b, a)), ZERO) \
    X(maximum,    2, NONE,  ANY,      a >= b || a != a ? a : b,     MUL(dy, LESS_EQUAL(b, a)), MUL(dy, LESS(a, b)), ZERO) \
    X(pow,        2, NONE,  POSITIVE, pow(a, b),                    MUL(dy, MUL(b, POW(a, SUB(b, K(1))))), MUL(dy, MUL(y, LOG(a))), ZERO) \
    X(less,       2, NONE,  STEP,     a < b,                        ZERO, ZERO, ZERO) \
    X(less_equal, 2, NONE,  STEP,     a <= b,                       ZERO, ZERO, ZERO) \
    X(equal,      2, NONE,  STEP,     a == b,                       ZERO, ZERO, ZERO) \
    X(where,      3, NONE,  ANY,      a != 0 ? b : c,               ZERO, WHERE(a, dy, K(0)), WHERE(a, K(0), dy))

/* Index of each row; `cast` has its own descriptor (attributes name the dtype) and the same loops: a copy, after which
 * the value is rounded to its new dtype. `dropout_mask` has neither loops nor operands: chains draw it (fused.h). */
#define TD_POINTWISE_INDEX(name, ...) TD_POINTWISE_##name,
enum { TD_POINTWISE(TD_POINTWISE_INDEX) TD_POINTWISE_cast, TD_POINTWISE_dropout_mask, TD_POINTWISE_COUNT };

/* The loops: out[i] = expression(a[i], b[i], c[i]) for i < count. out may be an operand's memory exactly; operands a
 * function does not have are ignored. */
typedef void (*td_pointwise_f32_loop)(float *out, const float *a, const float *b, const float *c, int64_t count);
typedef void (*td_pointwise_f64_loop)(double *out, const double *a, const double *b, const double *c, int64_t count);
extern const td_pointwise_f32_loop td_pointwise_f32_plain[TD_POINTWISE_COUNT], td_pointwise_f32_avx512[TD_POINTWISE_COUNT];
const td_pointwise_f32_loop *td_pointwise_f32(void); /* those that suit the processor best */
extern const td_pointwise_f64_loop td_pointwise_f64[TD_POINTWISE_COUNT];
extern const signed char td_pointwise_inputs[TD_POINTWISE_COUNT];

#endif
