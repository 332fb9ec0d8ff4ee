/* Chains of pointwise operations as operations: td_op_fused, and td_op_fused_rows, which reduces rows, too. See fused.h; their kernels
 * are in fused.c and device_fused.c.
 */
#include "core/ops/fused.h"

/* Reduced dimensions are dropped; passes may keep them. */
static void reduce_value(td_value *value, const td_fused_rows *rows, int reduced)
{
    for (int d = 0; d < rows->dims; d++)
        value->shape.dim[--value->shape.rank] = 0;
    if (rows->reduction[reduced] == TD_FUSED_SUM)
        value->dtype = (uint8_t)td_wide_dtype((td_dtype)value->dtype);
}

/* For a chain that is recorded: passes emit it with the outputs they know. */
static bool fused_shape(td_call *call)
{
    td_fused_code chain = td_fused_code_of(call->attr);
    td_fused_header header = chain.header;
    const td_fused_instruction *code = chain.instructions;
    const uint16_t *output = chain.outputs;
    td_shape shape;
    if (header.inputs != call->inputs)
        return td_call_fail(call, "%d inputs, its attribute has %d", call->inputs, header.inputs);
    if (chain.rows)
        shape = chain.rows->shape;
    else if (!td_call_broadcast(call, &shape))
        return false;
    call->outputs = header.outputs;
    for (int o = 0; o < header.outputs; o++) {
        call->out[o] = (td_value){ .shape = shape,
                                   .dtype = output[o] < header.inputs ? call->in[output[o]]->dtype : 0 };
        for (int i = 0; i < header.instructions; i++)
            if (code[i].to == output[o])
                call->out[o].dtype = (uint8_t)code[i].dtype;
        if (o >= td_fused_full_outputs(&header))
            reduce_value(&call->out[o], chain.rows, o - td_fused_full_outputs(&header));
    }
    return true;
}

static td_cost fused_cost(const td_kernel *k)
{
    enum { DRAW = 10 }; /* as random.c has it */
    td_fused_code chain = td_fused_code_of(k->attr);
    td_fused_header header = chain.header;
    td_arg whole = td_fused_whole(k, chain.rows);
    td_cost cost = td_cost_of(k, 0);
    cost.flops = td_arg_elements(&whole) * (header.instructions + (DRAW - 1) * header.draws + header.reduced);
    return cost;
}

static const char *const names[TD_POINTWISE_COUNT] = {
#define NAME(name, ...) [TD_POINTWISE_##name] = #name,
    TD_POINTWISE(NAME) NAME(cast) NAME(dropout_mask)
};

static const char *const reductions[] = { [TD_FUSED_SUM] = "sum", [TD_FUSED_MAX] = "max" };

void td_fused_parts(const void *attr, char *to, size_t room)
{
    td_fused_code chain = td_fused_code_of(attr);
    td_print line = { .to = to, .room = room };
    *to = 0;
    for (int i = 0; i < chain.header.instructions; i++)
        td_print_add(&line, "%s%s", i ? "+" : "", names[chain.instructions[i].function]);
    for (int o = 0; o < chain.header.reduced; o++)
        td_print_add(&line, "+%s", reductions[chain.rows->reduction[o]]);
}

/* Instructions as calls: "r2 = mul(r0, r1) f32, r3 = cast(r2) bf16"; reductions behind them: "; rows of 64: sum(r2), max(r3)". */
static void fused_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    td_fused_code chain = td_fused_code_of(td_node_attr(p, n));
    td_print line = { .to = to, .room = room };
    for (int i = 0; i < chain.header.instructions; i++) {
        const td_fused_instruction *op = &chain.instructions[i];
        td_print_add(&line, "%sr%d = %s(", i ? ", " : "", op->to, names[op->function]);
        if (op->function == TD_POINTWISE_dropout_mask)
            td_print_add(&line, "p %g", chain.draws[op->from[0]].p);
        for (int s = 0; s < td_pointwise_inputs[op->function]; s++)
            td_print_add(&line, "%sr%d", s ? ", " : "", op->from[s]);
        td_print_add(&line, ") %s", td_dtype_name((td_dtype)op->dtype));
    }
    if (!chain.rows)
        return;
    td_shape shape = chain.rows->shape;
    td_print_add(&line, "; rows of %lld:", (long long)td_shape_product(shape, (int)shape.rank - chain.rows->dims, (int)shape.rank));
    for (int o = 0; o < chain.header.reduced; o++)
        td_print_add(&line, "%s %s(r%d)", o ? "," : "", reductions[chain.rows->reduction[o]],
                     chain.outputs[td_fused_full_outputs(&chain.header) + o]);
}

const td_op td_op_fused = {
    .name    = "fused",
    .inputs  = -1,
    .flags   = TD_OP_POINTWISE | TD_OP_INPLACE,
    .shape   = fused_shape,
    .cost    = fused_cost,
    .prepare = td_fused_prepare,
    .release = td_prepared_free,
    .cpu     = td_fused_cpu,
    .cuda    = TD_CUDA(td_fused_cuda, td_fused_cuda_prepare, td_prepared_free),
    .print   = fused_print,
};

const td_op td_op_fused_rows = {
    .name    = "fused_rows",
    .inputs  = -1,
    .shape   = fused_shape,
    .cost    = fused_cost,
    .prepare = td_fused_prepare,
    .release = td_prepared_free,
    .cpu     = td_fused_rows_cpu,
    .cuda    = TD_CUDA(td_fused_cuda, td_fused_cuda_prepare, td_prepared_free),
    .print   = fused_print,
};
