/* Rules and helpers that operations share; see op.h. */
#include "core/ops/op.h"

#include <stdarg.h>
#include <stdio.h>

/* ---- Recording ------------------------------------------------------------------------------------------ */

static bool refuse_call(td_call *call)
{
    return td_call_fail(call, "%s", (const char *)call->attr);
}

td_tensor td_refuse(td_context *td, const char *name, td_here here, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    td_op op = { .name = name, .shape = refuse_call }; /* its shape rule fails, so no node keeps it */
    td_record_sized(td, &op, here, 0, NULL, text, sizeof text);
    return td_no_tensor(td);
}

int td_axis_of(td_shape shape, int axis)
{
    int64_t at = axis < 0 ? axis + shape.rank : axis;
    return at >= 0 && at < shape.rank ? (int)at : -1;
}

td_tensor td_as(td_tensor x, td_dtype dtype, td_here here)
{
    return td_failed(x) || td_dtype_at(x) == dtype ? x : td_cast_at(x, dtype, here);
}

td_tensor td_constant_like(td_tensor x, double value, td_here here)
{
    if (td_failed(x))
        return x;
    return td_fill_at(td_tensor_context(x), td_dtype_at(x), (td_shape){ 0 }, value, here);
}

td_tensor td_sum_to_as(td_tensor dx, td_tensor x, td_here here)
{
    if (td_failed(dx) || td_failed(x))
        return dx;
    td_shape shape = td_shape_at(x);
    if (!td_shape_equal(td_shape_at(dx), shape))
        dx = td_sum_to_at(dx, shape, here);
    return td_as(dx, td_dtype_at(x), here);
}

td_tensor td_reshape_as(td_tensor x, td_tensor like, td_here here)
{
    if (td_failed(x) || td_failed(like) || td_shape_equal(td_shape_at(x), td_shape_at(like)))
        return x;
    return td_reshape_at(x, td_shape_at(like), here);
}

td_tensor td_rows_of(td_tensor x, td_here here)
{
    td_shape shape = td_shape_at(x);
    if (td_failed(x) || shape.rank == 2)
        return x;
    int64_t last = shape.rank ? shape.dim[shape.rank - 1] : 1;
    return td_reshape_at(x, TD_SHAPE(td_shape_product(shape, 0, (int)shape.rank - 1), last), here);
}

bool td_is_float(td_dtype dtype)
{
    return dtype == TD_F32 || dtype == TD_F64 || dtype == TD_BF16 || dtype == TD_F16;
}

td_dtype td_wide_dtype(td_dtype dtype)
{
    return td_is_narrow(dtype) ? TD_F32 : dtype;
}

void td_print_add(td_print *line, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line->to, line->room, format, arguments);
    va_end(arguments);
    size_t used = length < 0 ? 0 : (size_t)length < line->room ? (size_t)length : line->room ? line->room - 1 : 0;
    line->to += used;
    line->room -= used;
}

/* ---- Shape rules ---------------------------------------------------------------------------------------- */

bool td_call_like(const td_call *call, int i)
{
    call->out[0].shape = call->in[i]->shape;
    call->out[0].dtype = call->in[i]->dtype;
    return true;
}

bool td_call_float_rows(const td_call *call)
{
    td_dtype dtype = (td_dtype)call->in[0]->dtype;
    if (call->in[0]->shape.rank < 1)
        return td_call_fail(call, "needs at least one dimension, got shape ()");
    if (!td_is_float(dtype))
        return td_call_fail(call, "needs a float operand, got %s", td_dtype_name(dtype));
    return true;
}

bool td_call_same_dtype(const td_call *call)
{
    for (int i = 1; i < call->inputs; i++)
        if (call->in[i]->dtype != call->in[0]->dtype)
            return td_call_fail(call, "operands have dtypes %s and %s", td_dtype_name((td_dtype)call->in[0]->dtype),
                                td_dtype_name((td_dtype)call->in[i]->dtype));
    return true;
}

bool td_shape_broadcast(const td_shape *a, const td_shape *b, td_shape *out)
{
    int64_t rank = a->rank >= b->rank ? a->rank : b->rank;
    for (int64_t i = 0; i < rank; i++) {
        int64_t in_a = i + a->rank - rank, in_b = i + b->rank - rank;
        int64_t size_a = in_a >= 0 ? a->dim[in_a] : 1, size_b = in_b >= 0 ? b->dim[in_b] : 1;
        if (size_a != size_b && size_a != 1 && size_b != 1)
            return false;
        out->dim[i] = size_a == 1 ? size_b : size_a;
    }
    out->rank = rank;
    return true;
}

bool td_call_broadcast(const td_call *call, td_shape *out)
{
    td_shape steps[2]; /* taken in turns: the last result and the next */
    const td_shape *so_far = &call->in[0]->shape;
    for (int i = 1; i < call->inputs; i++) {
        td_shape *next = i + 1 == call->inputs ? out : &steps[i % 2];
        if (td_shape_broadcast(so_far, &call->in[i]->shape, next)) {
            so_far = next;
            continue;
        }
        char text[3][TD_SHAPE_TEXT];
        for (int j = 0; j < 3 && j < call->inputs; j++)
            td_shape_text(call->in[j]->shape, text[j]);
        if (call->inputs == 2)
            return td_call_fail(call, "shapes %s and %s cannot be broadcast", text[0], text[1]);
        return td_call_fail(call, "shapes %s, %s and %s cannot be broadcast", text[0], text[1], text[2]);
    }
    if (call->inputs == 1)
        *out = *so_far;
    return true;
}

/* ---- Placement rules ------------------------------------------------------------------------------------ */

void td_rule_broadcast(const td_program *p, const td_node *n, td_place_rule *rule, td_partial_rule partial)
{
    memset(rule, 0, sizeof *rule);
    rule->partial = partial;
    td_shape out = p->values[n->output].shape;
    for (int i = 0; i < out.rank; i++)
        rule->out[0][i] = (int8_t)(i + 1);
    const td_id *inputs = td_node_inputs(p, n);
    for (uint32_t j = 0; j < n->inputs && j < TD_RULE_INPUTS; j++) {
        td_shape in = td_value_at(p, inputs[j])->shape;
        for (int i = 0; i < in.rank; i++) {
            int64_t at = i + out.rank - in.rank;
            rule->in[j][i] = in.dim[i] == out.dim[at] ? (int8_t)(at + 1) : 0;
        }
    }
}

void td_rule_rows(const td_program *p, const td_node *n, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    const td_id *inputs = td_node_inputs(p, n);
    int64_t rows = td_value_at(p, inputs[0])->shape.rank - 1; /* dimensions that count rows */
    for (uint32_t j = 0; j < n->inputs && j < TD_RULE_INPUTS; j++)
        for (int i = 0; i < td_value_at(p, inputs[j])->shape.rank && i < rows; i++)
            rule->in[j][i] = (int8_t)(i + 1);
    for (uint32_t j = 0; j < n->outputs && j < TD_RULE_OUTPUTS; j++)
        for (int i = 0; i < p->values[n->output + j].shape.rank && i < rows; i++)
            rule->out[j][i] = (int8_t)(i + 1);
}

/* ---- Kernels -------------------------------------------------------------------------------------------- */

int64_t td_shape_product(td_shape shape, int from, int to)
{
    int64_t product = 1;
    for (int i = from; i < to; i++)
        product *= shape.dim[i];
    return product;
}

td_extent td_arg_extent(const td_mesh *mesh, const td_arg *arg, int dim)
{
    td_extent e = { .begin = 0, .valid = arg->global.dim[dim] };
    int64_t size = e.valid;
    for (int axis = 0; mesh && axis < mesh->axes; axis++) {
        if (arg->place.kind[axis] != TD_SHARDED || arg->place.dim[axis] != dim)
            continue;
        int64_t chunk = (size + mesh->size[axis] - 1) / mesh->size[axis];
        int64_t begin = mesh->at[axis] * chunk;
        e.begin += begin;
        e.valid = e.valid > begin ? td_smaller(e.valid - begin, chunk) : 0;
        size = chunk;
    }
    return e;
}

td_cost td_cost_of(const td_kernel *k, int64_t flops)
{
    td_cost cost = { .flops = flops * td_arg_elements(&k->out[0]) };
    for (int i = 0; i < k->inputs; i++)
        cost.bytes += td_arg_bytes(&k->in[i]);
    for (int i = 0; i < k->outputs; i++)
        cost.bytes += td_arg_bytes(&k->out[i]);
    return cost;
}

/* What stands before the memory that td_prepared_new gives: how to give it back. Keeps 64-byte alignment. */
typedef union prepared_header {
    struct {
        td_context *td;
        size_t bytes;
    };
    char pad[64];
} prepared_header;

void *td_prepared_new(td_context *td, size_t bytes)
{
    prepared_header *header = td_alloc(td, sizeof *header + bytes, "program");
    if (!header)
        return NULL;
    header->td = td;
    header->bytes = sizeof *header + bytes;
    return memset(header + 1, 0, bytes);
}

void td_prepared_free(void *prepared)
{
    if (!prepared)
        return;
    prepared_header *header = (prepared_header *)prepared - 1;
    td_free(header->td, header, header->bytes, "program");
}
