/* Pointwise operations: descriptors, recording functions and gradient rules of every row of pointwise_table.h, and
 * cast. Operands broadcast against each other and have one dtype, which is the result's.
 *
 * A node runs as a fused chain of one instruction (fused.c); loops.c has the arithmetic.
 */
#include "core/ops/fused.h"
#include "core/ops/op.h"

#include <stdio.h>

static bool pointwise_shape(td_call *call)
{
    if (call->inputs == 1)
        return td_call_like(call, 0);
    call->out[0].dtype = call->in[0]->dtype;
    return td_call_same_dtype(call) && td_call_broadcast(call, &call->out[0].shape);
}

static td_cost pointwise_cost(const td_kernel *k)
{
    return td_cost_of(k, 1);
}

static void place_NONE(const td_program *p, const td_node *n, td_place_rule *rule)
{
    td_rule_broadcast(p, n, rule, TD_PARTIAL_NONE);
}

static void place_JOINT(const td_program *p, const td_node *n, td_place_rule *rule)
{
    td_rule_broadcast(p, n, rule, TD_PARTIAL_JOINT);
}

static void place_EACH(const td_program *p, const td_node *n, td_place_rule *rule)
{
    td_rule_broadcast(p, n, rule, TD_PARTIAL_EACH);
}

/* ---- Gradients: the table's columns as operations --------------------------------------------------------- */

/* dx, which has the result's shape and dtype, as the gradient of input i. */
static void give(const td_gradient_call *g, int i, td_tensor dx)
{
    if (!td_failed(dx))
        td_gradient_set(g, i, td_sum_to_as(dx, g->in[i], g->here));
}

#define NEG(x) td_neg_at(x, here)
#define SQUARE(x) td_square_at(x, here)
#define POSITIVE(x) td_positive_at(x, here)
#define SIGN(x) td_sign_at(x, here)
#define SIN(x) td_sin_at(x, here)
#define COS(x) td_cos_at(x, here)
#define LOG(x) td_log_at(x, here)
#define SUB(x, y) td_sub_at(x, y, here)
#define MUL(x, y) td_mul_at(x, y, here)
#define DIV(x, y) td_div_at(x, y, here)
#define POW(x, y) td_pow_at(x, y, here)
#define LESS(x, y) td_less_at(x, y, here)
#define LESS_EQUAL(x, y) td_less_equal_at(x, y, here)
#define WHERE(x, y, z) td_where_at(x, y, z, here)
#define K(value) td_constant_like(y, value, here)
#define ZERO td_no_tensor(g->td)
#define ADD(x, y) td_add_at(x, y, here)
#define SIGMOID(x) td_sigmoid_at(x, here)
#define SLOPE(name, x) td_record(&td_op_##name##_slope, here, 1, &(x), NULL)
#define BELL(x, height, rate) MUL(K(height), td_exp_at(MUL(SQUARE(x), K(rate)), here))

/* The second derivative of a logistic-weighted x: y = x s with s = sigmoid(w(x)), given w' and w'':
 *     y'' = s (1 - s) (2 w' + x ((1 - 2 s) w'^2 + w'')). */
static td_tensor weighted_curve(td_tensor x, td_tensor s, td_tensor slope, td_tensor curve, td_here here)
{
    td_tensor y = s; /* what K takes its dtype from */
    td_tensor spread = MUL(s, SUB(K(1), s));
    td_tensor inner = ADD(MUL(SUB(K(1), MUL(s, K(2))), SQUARE(slope)), curve);
    return MUL(spread, ADD(MUL(slope, K(2)), MUL(x, inner)));
}

/* w = x. */
static td_tensor silu_curve(td_tensor x, td_here here)
{
    td_tensor y = x;
    return weighted_curve(x, SIGMOID(x), K(1), K(0), here);
}

/* gelu_tanh(x) = x sigmoid(w) with w = c (x + k x^3), c = 2 sqrt(2 / pi), k = 0.044715. */
static td_tensor gelu_tanh_curve(td_tensor x, td_here here)
{
    const double c = 1.5957691216057308, k = 0.044715;
    td_tensor y = x, square = SQUARE(x);
    td_tensor w = MUL(MUL(K(c), x), ADD(K(1), MUL(K(k), square)));
    td_tensor slope = MUL(K(c), ADD(K(1), MUL(K(3 * k), square)));
    return weighted_curve(x, SIGMOID(w), slope, MUL(K(6 * c * k), x), here);
}

#define GRADIENT(name, operands, partial, domain, expression, da, db, dc)                              \
    static void name##_gradient(const td_gradient_call *g)                                             \
    {                                                                                                   \
        const td_here here = g->here;                                                                   \
        const td_tensor y = g->out[0], dy = g->dout[0];                                                 \
        const td_tensor a = g->in[0], b = g->in[operands > 1], c = g->in[operands > 2 ? 2 : 0];         \
        (void)here, (void)y, (void)dy, (void)a, (void)b, (void)c;                                       \
        if (g->wanted[0])                                                                               \
            give(g, 0, da);                                                                             \
        if (operands > 1 && g->wanted[operands > 1])                                                    \
            give(g, 1, db);                                                                             \
        if (operands > 2 && g->wanted[operands > 2 ? 2 : 0])                                            \
            give(g, 2, dc);                                                                             \
    }
TD_POINTWISE(GRADIENT)

/* ---- Cases ---------------------------------------------------------------------------------------------- */

static const td_case cases_1_ANY[] = { { .in = { TD_RANDN(3, 5) } },
                                       { .in = { TD_RANDN(2, 1031) }, .note = "several tiles" },
                                       { .in = { TD_SCALAR_CASE } },
                                       TD_CASES_END };
static const td_case cases_1_POSITIVE[] = { { .in = { TD_POSITIVE(3, 5) } },
                                            { .in = { TD_POSITIVE(2, 1031) } },
                                            TD_CASES_END };
static const td_case cases_1_STEP[] = { { .in = { TD_RANDN(3, 5) }, .no_gradient_check = true }, TD_CASES_END };
static const td_case cases_2_ANY[] = { { .in = { TD_RANDN(3, 5), TD_RANDN(3, 5) } },
                                       { .in = { TD_RANDN(2, 3, 5), TD_RANDN(5) }, .note = "a row against all" },
                                       { .in = { TD_RANDN(4, 1), TD_RANDN(1, 7) }, .note = "both stretch" },
                                       { .in = { TD_SCALAR_CASE, TD_RANDN(600) }, .note = "a scalar against all" },
                                       TD_CASES_END };
static const td_case cases_2_POSITIVE[] = { { .in = { TD_POSITIVE(3, 5), TD_POSITIVE(3, 5) } },
                                            { .in = { TD_POSITIVE(5), TD_POSITIVE(4, 5) } },
                                            { .in = { TD_POSITIVE(2, 3), { TD_CASE_POSITIVE, 0, { 0 }, 1 } } },
                                            TD_CASES_END };
static const td_case cases_2_STEP[] = { { .in = { TD_RANDN(3, 5), TD_RANDN(5) }, .no_gradient_check = true },
                                        TD_CASES_END };
static const td_case cases_3_ANY[] = { { .in = { TD_RANDN(3, 5), TD_RANDN(3, 5), TD_RANDN(5) } }, TD_CASES_END };

/* ---- Descriptors ---------------------------------------------------------------------------------------- */

#define DESCRIPTOR(op, operands, linear, domain, text, da, db, dc) \
    const td_op td_op_##op = {                                     \
        .name       = #op,                                         \
        .inputs     = operands,                                    \
        .flags      = TD_OP_POINTWISE | TD_OP_INPLACE,             \
        .shape      = pointwise_shape,                             \
        .gradient   = op##_gradient,                               \
        .place      = place_##linear,                              \
        .precision  = TD_ANY_DTYPE,                                \
        .cost       = pointwise_cost,                              \
        .prepare    = td_pointwise_prepare,                        \
        .release    = td_prepared_free,                            \
        .cpu        = td_fused_cpu,                                \
        .cuda       = TD_CUDA(td_fused_cuda, td_fused_cuda_prepare, td_prepared_free), \
        .cases      = cases_##operands##_##domain,                 \
        .expression = #text,                                       \
        .pointwise  = TD_POINTWISE_##op,                           \
    };
TD_POINTWISE(DESCRIPTOR)

#define RECORD_UNARY(name)                                                        \
    td_tensor td_##name##_at(td_tensor x, td_here here)                           \
    {                                                                             \
        return td_record(&td_op_##name, here, 1, &x, NULL);                       \
    }
#define RECORD_BINARY(name)                                                       \
    td_tensor td_##name##_at(td_tensor a, td_tensor b, td_here here)              \
    {                                                                             \
        return td_record(&td_op_##name, here, 2, (td_tensor[]){ a, b }, NULL);    \
    }
TD_UNARY(RECORD_UNARY)
TD_BINARY(RECORD_BINARY)

td_tensor td_where_at(td_tensor c, td_tensor a, td_tensor b, td_here here)
{
    return td_record(&td_op_where, here, 3, (td_tensor[]){ c, a, b }, NULL);
}

td_tensor td_clamp_at(td_tensor x, double low, double high, td_here here)
{
    if (td_failed(x))
        return x;
    if (!(low <= high))
        return td_refuse(x.td, "clamp", here, "needs low <= high, got %g and %g", low, high);
    x = td_maximum_at(x, td_constant_like(x, low, here), here);
    return td_minimum_at(x, td_constant_like(x, high, here), here);
}

td_tensor td_scale_at(td_tensor x, double factor, td_here here)
{
    td_tensor scalar = td_scalar_at(td_tensor_context(x), factor, here);
    return td_mul_at(x, td_as(scalar, td_dtype_at(x), here), here);
}

/* ---- Cast: the same values in another dtype --------------------------------------------------------------- */

static bool cast_shape(td_call *call)
{
    const td_cast_attr *attr = call->attr;
    call->out[0].shape = call->in[0]->shape;
    call->out[0].dtype = (uint8_t)attr->dtype;
    return true;
}

static void cast_gradient(const td_gradient_call *g)
{
    td_dtype from = td_dtype_at(g->in[0]);
    if (td_is_float(from) && td_is_float(td_dtype_at(g->out[0])))
        td_gradient_set(g, 0, td_as(g->dout[0], from, g->here));
}

static void cast_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_cast_attr *attr = td_node_attr(p, n);
    snprintf(to, room, "%s", td_dtype_name((td_dtype)attr->dtype));
}

static const td_case cast_cases[] = {
    { .in = { TD_RANDN(3, 5) }, .attr = &(const td_cast_attr){ .dtype = TD_F64 } },
    { .in = { TD_RANDN(700) }, .attr = &(const td_cast_attr){ .dtype = TD_BF16 }, .no_gradient_check = true },
    TD_CASES_END
};

const td_op td_op_cast = {
    .name       = "cast",
    .inputs     = 1,
    .flags      = TD_OP_POINTWISE,
    .attr_bytes = sizeof(td_cast_attr),
    .shape      = cast_shape,
    .gradient   = cast_gradient,
    .place      = place_JOINT,
    .precision  = TD_ANY_DTYPE,
    .cost       = pointwise_cost,
    .prepare    = td_pointwise_prepare,
    .release    = td_prepared_free,
    .cpu        = td_fused_cpu,
    .cuda       = TD_CUDA(td_fused_cuda, td_fused_cuda_prepare, td_prepared_free),
    .print      = cast_print,
    .cases      = cast_cases,
    .expression = "a",
    .pointwise  = TD_POINTWISE_cast,
};

td_tensor td_cast_at(td_tensor x, td_dtype dtype, td_here here)
{
    return td_record(&td_op_cast, here, 1, &x, &(td_cast_attr){ .dtype = (int32_t)dtype });
}
