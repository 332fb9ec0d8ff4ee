/* Operations that give elements another shape.
 *
 *     reshape    the same elements in the same order: a view of its input's memory
 *     broadcast  dimensions of size 1, or missing at the front, stretched; pointwise, so it fuses
 *
 * The attribute is the result's global shape; kernels take theirs from operands.
 */
#include "core/ops/fused.h"
#include "core/ops/op.h"

static void print_shape(const td_program *p, const td_node *n, char *to, size_t room)
{
    char text[TD_SHAPE_TEXT];
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "%s", td_shape_text(*(const td_shape *)td_node_attr(p, n), text));
}

/* ---- reshape -------------------------------------------------------------------------------------------- */

static bool reshape_shape(td_call *call)
{
    const td_shape *to = call->attr;
    char text[2][TD_SHAPE_TEXT];
    if (to->rank < 0)
        return td_call_fail(call, "to more than %d dimensions", TD_MAX_DIMS);
    td_shape from = call->in[0]->shape;
    if (td_shape_elements(*to) != td_shape_elements(from))
        return td_call_fail(call, "shape %s has %lld elements, %s has %lld", td_shape_text(from, text[0]),
                            (long long)td_shape_elements(from), td_shape_text(*to, text[1]),
                            (long long)td_shape_elements(*to));
    call->out[0].shape = *to;
    call->out[0].dtype = call->in[0]->dtype;
    return true;
}

static void reshape_gradient(const td_gradient_call *g)
{
    td_gradient_set(g, 0, td_reshape_at(g->dout[0], td_shape_at(g->in[0]), g->here));
}

static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Dimensions are matched in groups of equal product, from the front. The first of a group's on both sides are the same
 * when cut into parts, if the ranks divide both evenly. */
static void reshape_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    rule->partial = TD_PARTIAL_JOINT;
    td_shape in = td_value_at(p, *td_node_inputs(p, n))->shape, out = p->values[n->output].shape;
    int8_t label = 1;
    for (int i = 0, j = 0; i < in.rank && j < out.rank;) {
        int first_in = i, first_out = j;
        int64_t size_in = in.dim[i++], size_out = out.dim[j++];
        bool single = size_in == size_out;
        while (size_in != size_out && (size_in < size_out ? i < in.rank : j < out.rank)) {
            if (size_in < size_out)
                size_in *= in.dim[i++];
            else
                size_out *= out.dim[j++];
        }
        if (size_in != size_out)
            return;
        if (!single)
            rule->even[label] = common_divisor(in.dim[first_in], out.dim[first_out]);
        rule->in[0][first_in] = label;
        rule->out[0][first_out] = label++;
    }
}

static void reshape_cpu(const td_kernel *k)
{
    if (k->out[0].data != k->in[0].data)
        memcpy(k->out[0].data, k->in[0].data, (size_t)td_arg_bytes(&k->out[0]));
}

#define SHAPE(rank_, ...) &(const td_shape){ .rank = (rank_), .dim = { __VA_ARGS__ } }

static const td_case reshape_cases[] = {
    { .in = { TD_RANDN(4, 6) }, .attr = SHAPE(3, 2, 4, 3) },
    { .in = { TD_RANDN(1) }, .attr = SHAPE(0, 0), .note = "to a scalar" },
    TD_CASES_END
};

const td_op td_op_reshape = {
    .name       = "reshape",
    .inputs     = 1,
    .flags      = TD_OP_VIEW,
    .attr_bytes = sizeof(td_shape),
    .shape      = reshape_shape,
    .gradient   = reshape_gradient,
    .place      = reshape_place,
    .precision  = TD_ANY_DTYPE,
    .cpu        = reshape_cpu,
    .print      = print_shape,
    .cases      = reshape_cases,
};

/* A size of -1 is what the others leave. */
td_tensor td_reshape_at(td_tensor x, td_shape shape, td_here here)
{
    if (td_failed(x))
        return x;
    int64_t unknown = -1, elements = td_shape_elements(td_shape_at(x));
    td_shape given = shape;
    char text[2][TD_SHAPE_TEXT];
    for (int i = 0; i < shape.rank; i++) {
        if (shape.dim[i] == -1 && unknown < 0) {
            unknown = i;
            given.dim[i] = 1;
        } else if (shape.dim[i] < 0) {
            return td_refuse(x.td, "reshape", here, "to %s: only one size may be -1, none less",
                             td_shape_text(shape, text[0]));
        }
    }
    int64_t known = td_shape_elements(given);
    if (unknown >= 0 && (known == 0 || elements % known != 0))
        return td_refuse(x.td, "reshape", here, "shape %s does not divide into %s",
                         td_shape_text(td_shape_at(x), text[0]), td_shape_text(shape, text[1]));
    if (unknown >= 0)
        shape.dim[unknown] = elements / known;
    return td_record(&td_op_reshape, here, 1, &x, &shape);
}

/* ---- broadcast ------------------------------------------------------------------------------------------ */

static bool broadcast_shape(td_call *call)
{
    const td_shape *to = call->attr;
    td_shape shape;
    if (to->rank < 0 || !td_shape_broadcast(&call->in[0]->shape, to, &shape) || !td_shape_equal(shape, *to)) {
        char text[2][TD_SHAPE_TEXT];
        return td_call_fail(call, "shape %s does not stretch to %s", td_shape_text(call->in[0]->shape, text[0]),
                            td_shape_text(*to, text[1]));
    }
    call->out[0].shape = *to;
    call->out[0].dtype = call->in[0]->dtype;
    return true;
}

static void broadcast_gradient(const td_gradient_call *g)
{
    td_gradient_set(g, 0, td_sum_to_as(g->dout[0], g->in[0], g->here));
}

static void broadcast_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    td_rule_broadcast(p, n, rule, TD_PARTIAL_JOINT);
}

static const td_case broadcast_cases[] = {
    { .in = { TD_RANDN(3, 1) }, .attr = SHAPE(3, 2, 3, 5) },
    { .in = { TD_SCALAR_CASE }, .attr = SHAPE(1, 700) },
    TD_CASES_END
};

const td_op td_op_broadcast = {
    .name       = "broadcast",
    .inputs     = 1,
    .flags      = TD_OP_POINTWISE | TD_OP_FREE,
    .attr_bytes = sizeof(td_shape),
    .shape      = broadcast_shape,
    .gradient   = broadcast_gradient,
    .place      = broadcast_place,
    .precision  = TD_ANY_DTYPE,
    .prepare    = td_pointwise_prepare,
    .release    = td_prepared_free,
    .cpu        = td_fused_cpu,
    .cuda       = TD_CUDA(td_fused_cuda, td_fused_cuda_prepare, td_prepared_free),
    .print      = print_shape,
    .cases      = broadcast_cases,
    .expression = "a",
    .pointwise  = TD_POINTWISE_cast,
};

td_tensor td_broadcast_at(td_tensor x, td_shape shape, td_here here)
{
    if (td_failed(x) || td_shape_equal(td_shape_at(x), shape))
        return x;
    return td_record(&td_op_broadcast, here, 1, &x, &shape);
}
