/* The kernel of pointwise operations and of chains of them: see fused.h.
 *
 * The outputs' elements, in row-major order, are cut into tiles. For each tile the inputs become registers: an input
 * with the outputs' shape and the dtype computed in is read where it lies, others are converted or stretched into the
 * tile first. Then every instruction runs over the tile, and the outputs are stored. An instruction that makes an
 * output writes it directly where nothing reads that memory any more.
 */
#include "core/ops/fused.h"

#include "core/ops/convert.h"
#include "core/ops/drawn.h"

enum {
    TILE_MEMORY = 32 << 10, /* bytes of all registers' tiles: they should stay in L1 */
    TILE_MAX = 1024,        /* elements */
    TASK_ELEMENTS = 32 << 10,
};

/* An input seen from the outputs' shape: adjacent dimensions that step alike are one; a stretched one has stride 0. */
typedef struct fused_input {
    td_dtype dtype;
    bool dense;             /* the outputs' shape */
    bool passed;            /* is an output as it is */
    int last_read;          /* number of the last instruction that reads it */
    int rank;
    int64_t size[TD_MAX_DIMS], stride[TD_MAX_DIMS];
} fused_input;

typedef struct fused_plan {
    td_fused_header header;
    const td_pointwise_f32_loop *loops;             /* of f32 */
    bool wide;                                      /* computes in f64 */
    int64_t elements, tile;
    fused_input in[TD_FUSED_INPUTS];
    td_fused_instruction code[TD_FUSED_INSTRUCTIONS];
    int8_t direct[TD_FUSED_INSTRUCTIONS];           /* the output it makes, or -1 */
    uint16_t output[TD_FUSED_OUTPUTS];
    int16_t made_by[TD_FUSED_OUTPUTS];              /* instruction that may write it directly, or -1 */
    td_fused_draw draw[TD_FUSED_DRAWS];
} fused_plan;

/* ---- Preparing ------------------------------------------------------------------------------------------ */

static void plan_input(fused_input *in, const td_arg *arg, td_shape out)
{
    in->dtype = arg->dtype;
    in->dense = true;
    in->rank = 0;
    in->last_read = -1;
    int64_t step = 1; /* of the input's dimension at hand */
    for (int64_t back = 1; back <= out.rank; back++) {
        int64_t size = out.dim[out.rank - back];
        int64_t own = back <= arg->shape.rank ? arg->shape.dim[arg->shape.rank - back] : 1;
        int64_t stride = own == size ? step : 0;
        step *= own;
        if (size == 1)
            continue;
        in->dense = in->dense && own == size;
        int last = in->rank - 1;
        if (last >= 0 && stride == in->stride[last] * in->size[last]) {
            in->size[last] *= size;
            continue;
        }
        in->size[in->rank] = size; /* innermost first */
        in->stride[in->rank++] = stride;
    }
}

static bool is_wide(td_dtype dtype)
{
    return dtype == TD_F64 || dtype == TD_I32 || dtype == TD_I64;
}

/* Which instruction each output's value comes from, and may be written by. */
static void plan_outputs(fused_plan *plan, const td_kernel *k)
{
    td_dtype computed = plan->wide ? TD_F64 : TD_F32;
    for (int o = 0; o < plan->header.outputs; o++) {
        int from = plan->output[o];
        plan->made_by[o] = -1;
        if (from < plan->header.inputs) {
            plan->in[from].passed = true;
            continue;
        }
        int maker = plan->header.instructions - 1;
        while (maker > 0 && plan->code[maker].to != from)
            maker--;
        if (k->out[o].dtype == computed && plan->direct[maker] < 0) {
            plan->direct[maker] = (int8_t)o;
            plan->made_by[o] = (int16_t)maker;
        }
    }
}

static bool fused_plan_make(td_context *td, const td_kernel *k, const td_fused_code *chain, td_preparation *out)
{
    td_fused_header header = chain->header;
    const td_fused_instruction *code = chain->instructions;
    fused_plan *plan = td_prepared_new(td, sizeof *plan);
    if (!plan)
        return false;
    plan->header = header;
    plan->loops = td_pointwise_f32();
    memcpy(plan->code, code, (size_t)header.instructions * sizeof *code);
    memcpy(plan->output, chain->outputs, (size_t)header.outputs * sizeof *plan->output);
    memcpy(plan->draw, chain->draws, (size_t)header.draws * sizeof *plan->draw);
    for (int i = 0; i < header.inputs; i++) {
        plan_input(&plan->in[i], &k->in[i], k->out[0].shape);
        plan->wide = plan->wide || is_wide(k->in[i].dtype);
    }
    for (int i = 0; i < header.instructions; i++) {
        plan->direct[i] = -1;
        plan->wide = plan->wide || is_wide((td_dtype)code[i].dtype);
        for (int s = 0; s < td_pointwise_inputs[code[i].function]; s++)
            if (code[i].from[s] < header.inputs)
                plan->in[code[i].from[s]].last_read = i;
    }
    plan_outputs(plan, k);
    plan->elements = td_arg_elements(&k->out[0]);
    int64_t room = TILE_MEMORY / header.registers / (plan->wide ? 8 : 4);
    plan->tile = room < TILE_MAX ? room & ~(int64_t)15 : TILE_MAX;
    out->prepared = plan;
    return true;
}

static bool fused_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    td_fused_code chain = td_fused_code_of(k->attr);
    return fused_plan_make(td, k, &chain, out);
}

bool td_pointwise_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    td_fused_instruction code = { .function = (uint16_t)k->op->pointwise,
                                  .to = (uint16_t)k->inputs,
                                  .from = { 0, k->inputs > 1, k->inputs > 2 ? 2 : 0 },
                                  .dtype = (uint16_t)k->out[0].dtype };
    td_fused_code chain = { .header = { .inputs = k->inputs, .outputs = 1, .instructions = 1, .registers = k->inputs + 1 },
                            .instructions = &code, .outputs = &code.to, .draws = &(td_fused_draw){ .p = 0 } };
    return fused_plan_make(td, k, &chain, out);
}

/* ---- Running -------------------------------------------------------------------------------------------- */

typedef struct fused_run {
    const fused_plan *plan;
    const td_kernel *k;
    int8_t direct[TD_FUSED_INSTRUCTIONS];
    bool copied[TD_FUSED_INPUTS]; /* dense, yet not to be read where it lies */
    td_drawn drawn[TD_FUSED_DRAWS];
} fused_run;

static void load(const fused_plan *plan, td_dtype dtype, const void *from, int64_t count, char *to)
{
    if (plan->wide)
        td_load_f64((double *)to, dtype, from, count);
    else
        td_load_f32((float *)to, dtype, from, count);
}

/* count copies of the one value at `from`. */
static void splat(const fused_plan *plan, td_dtype dtype, const void *from, int64_t count, char *to)
{
    load(plan, dtype, from, 1, to);
    if (plan->wide) {
        double *values = (double *)to, value = values[0];
        for (int64_t i = 1; i < count; i++)
            values[i] = value;
    } else {
        float *values = (float *)to, value = values[0];
        for (int64_t i = 1; i < count; i++)
            values[i] = value;
    }
}

/* Elements [first, first + count) of a stretched input: run by run of its innermost dimension. */
static char *load_stretched(const fused_plan *plan, const fused_input *in, const td_arg *arg, int64_t first,
                            int64_t count, char *to)
{
    int64_t width = plan->wide ? 8 : 4;
    int64_t inner = in->size[0], at = first % inner, outer = first / inner;
    char *end = to;
    while (count > 0) {
        int64_t offset = in->stride[0] * at, rest = outer;
        for (int d = 1; d < in->rank; d++) {
            offset += rest % in->size[d] * in->stride[d];
            rest /= in->size[d];
        }
        int64_t run = td_smaller(inner - at, count);
        const void *from = td_arg_at(arg, offset);
        if (in->stride[0] == 0)
            splat(plan, in->dtype, from, run, end);
        else if (run == count && end == to && in->dtype == (plan->wide ? TD_F64 : TD_F32))
            return (char *)from; /* the tile lies within one run: read it there */
        else
            load(plan, in->dtype, from, run, end);
        end += run * width;
        count -= run;
        at = 0;
        outer++;
    }
    return to;
}

/* Where the tile of input i can be read. */
static char *load_input(const fused_run *r, int i, int64_t first, int64_t count, char *to)
{
    const fused_plan *plan = r->plan;
    const fused_input *in = &plan->in[i];
    const td_arg *arg = &r->k->in[i];
    if (!in->dense)
        return load_stretched(plan, in, arg, first, count, to);
    void *from = td_arg_at(arg, first);
    if (!r->copied[i] && in->dtype == (plan->wide ? TD_F64 : TD_F32))
        return from;
    load(plan, in->dtype, from, count, to);
    return to;
}

/* The mask of elements from `first` on. */
static void draw_mask(const fused_run *r, int number, int64_t first, int64_t count, char *to)
{
    if (r->plan->wide)
        td_mask_f64(&r->drawn[number], r->plan->draw[number].p, first, count, (double *)to);
    else
        td_mask_f32(&r->drawn[number], r->plan->draw[number].p, first, count, (float *)to);
}

static void apply(const fused_plan *plan, const td_fused_instruction *op, char *const *registers, char *to, int64_t count)
{
    const void *a = registers[op->from[0]], *b = registers[op->from[1]], *c = registers[op->from[2]];
    if (plan->wide)
        td_pointwise_f64[op->function]((double *)to, a, b, c, count);
    else
        plan->loops[op->function]((float *)to, a, b, c, count);
}

static void round_to(const fused_plan *plan, td_dtype dtype, char *to, int64_t count)
{
    if (plan->wide && dtype != TD_F64)
        td_round_f64((double *)to, dtype, count);
    if (!plan->wide && dtype != TD_F32)
        td_round_f32((float *)to, dtype, count);
}

static void store_outputs(const fused_run *r, char *const *registers, int64_t first, int64_t count)
{
    const fused_plan *plan = r->plan;
    for (int o = 0; o < plan->header.outputs; o++) {
        const td_arg *arg = &r->k->out[o];
        void *to = td_arg_at(arg, first);
        const void *from = registers[plan->output[o]];
        if (from == to)
            continue;
        if (plan->wide)
            td_store_f64(to, arg->dtype, from, count);
        else
            td_store_f32(to, arg->dtype, from, count);
    }
}

static void fused_tiles(void *user, int64_t begin, int64_t end)
{
    const fused_run *r = user;
    const fused_plan *plan = r->plan;
    _Alignas(64) char memory[TILE_MEMORY];
    char *registers[TD_FUSED_REGISTERS];
    int64_t stride = plan->tile * (plan->wide ? 8 : 4);
    bool scalar[TD_FUSED_INPUTS];
    for (int i = 0; i < plan->header.inputs; i++) {
        const fused_input *in = &plan->in[i];
        scalar[i] = !in->dense && in->rank == 1 && in->stride[0] == 0;
        registers[i] = memory + i * stride;
        if (scalar[i])
            splat(plan, in->dtype, r->k->in[i].data, plan->tile, registers[i]);
    }
    for (int64_t t = begin; t < end; t++) {
        int64_t first = t * plan->tile, count = td_smaller(plan->tile, plan->elements - first);
        for (int i = 0; i < plan->header.inputs; i++)
            if (!scalar[i])
                registers[i] = load_input(r, i, first, count, memory + i * stride);
        for (int i = 0; i < plan->header.instructions; i++) {
            const td_fused_instruction *op = &plan->code[i];
            char *to = memory + op->to * stride;
            if (r->direct[i] >= 0)
                to = td_arg_at(&r->k->out[r->direct[i]], first);
            if (op->function == TD_POINTWISE_dropout_mask)
                draw_mask(r, op->from[0], first, count, to);
            else
                apply(plan, op, registers, to, count);
            round_to(plan, (td_dtype)op->dtype, to, count);
            registers[op->to] = to;
        }
        store_outputs(r, registers, first, count);
    }
}

void td_fused_cpu(const td_kernel *k)
{
    const fused_plan *plan = k->prepared;
    fused_run r = { .plan = plan, .k = k };
    memcpy(r.direct, plan->direct, sizeof r.direct);
    for (int d = 0; d < plan->header.draws; d++)
        r.drawn[d] = td_drawn_of(k->run, &k->out[0], plan->draw[d].key, plan->draw[d].micro);
    for (int o = 0; o < k->outputs; o++) {
        for (int i = 0; i < k->inputs; i++) {
            if (k->in[i].data != k->out[o].data)
                continue;
            r.copied[i] = r.copied[i] || plan->in[i].passed;
            if (plan->made_by[o] >= 0 && plan->in[i].last_read > plan->made_by[o])
                r.direct[plan->made_by[o]] = -1;
        }
    }
    int64_t tiles = (plan->elements + plan->tile - 1) / plan->tile;
    td_parallel_for(k->run, tiles, (TASK_ELEMENTS + plan->tile - 1) / plan->tile, fused_tiles, &r);
}

/* ---- The chain as an operation ---------------------------------------------------------------------------- */

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
    if (!td_call_broadcast(call, &shape))
        return false;
    call->outputs = header.outputs;
    for (int o = 0; o < header.outputs; o++) {
        call->out[o] = (td_value){ .shape = shape,
                                   .dtype = output[o] < header.inputs ? call->in[output[o]]->dtype : 0 };
        for (int i = 0; i < header.instructions; i++)
            if (code[i].to == output[o])
                call->out[o].dtype = (uint8_t)code[i].dtype;
    }
    return true;
}

static td_cost fused_cost(const td_kernel *k)
{
    enum { DRAW = 10 }; /* as random.c has it */
    td_fused_header header = td_fused_code_of(k->attr).header;
    return td_cost_of(k, header.instructions + (DRAW - 1) * header.draws);
}

static const char *const names[TD_POINTWISE_COUNT] = {
#define NAME(name, ...) [TD_POINTWISE_##name] = #name,
    TD_POINTWISE(NAME) NAME(cast) NAME(dropout_mask)
};

void td_fused_parts(const void *attr, char *to, size_t room)
{
    td_fused_code chain = td_fused_code_of(attr);
    td_print line = { .to = to, .room = room };
    *to = 0;
    for (int i = 0; i < chain.header.instructions; i++)
        td_print_add(&line, "%s%s", i ? "+" : "", names[chain.instructions[i].function]);
}

/* Instructions as calls: "r2 = mul(r0, r1), r3 = cast(r2) bf16". */
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
}

const td_op td_op_fused = {
    .name    = "fused",
    .inputs  = -1,
    .flags   = TD_OP_POINTWISE | TD_OP_INPLACE,
    .shape   = fused_shape,
    .cost    = fused_cost,
    .prepare = fused_prepare,
    .release = td_prepared_free,
    .cpu     = td_fused_cpu,
    .cuda    = TD_CUDA(td_fused_cuda, td_fused_cuda_prepare, td_prepared_free),
    .print   = fused_print,
};
