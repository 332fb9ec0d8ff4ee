/* The kernel of pointwise operations and of chains of them: see fused.h.
 *
 * The outputs' elements, in row-major order, are cut into tiles. For each tile the inputs become registers: an input
 * with the outputs' shape and the dtype computed in is read where it lies, others are converted or stretched into the
 * tile first. Then every instruction runs over the tile, and the outputs are stored. An instruction that makes an
 * output writes it directly where nothing reads that memory any more.
 *
 * Where rows are reduced a task is as many whole rows as a tile holds; of longer ones it is a chunk, as td_op_sum has them, tile by
 * tile of whole blocks, and the chunks' results are joined in their order. So its sums have the bits of td_op_sum's.
 */
#include "core/ops/fused.h"

#include "core/ops/convert.h"
#include "core/ops/drawn.h"
#include "core/ops/reduce.h"

#include <math.h>

enum {
    TILE_MEMORY = 32 << 10, /* bytes of all registers' tiles: they should stay in L1 */
    TILE_MAX = 1024,        /* elements */
    ROW_MEMORY = TD_FUSED_REGISTERS * TD_REDUCED_BLOCK * 8, /* where a tile is a block at least */
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
    td_fused_rows rows;
    int64_t row_count, row;                         /* reduced rows, and elements of each */
    int64_t each;                                   /* whole rows of a task */
    int64_t chunk, chunks;                          /* elements of a row's chunk, and chunks of a row */
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
        if (from < plan->header.inputs)
            plan->in[from].passed = true;
        if (from < plan->header.inputs || o >= td_fused_full_outputs(&plan->header))
            continue;
        int maker = plan->header.instructions - 1;
        while (maker > 0 && plan->code[maker].to != from)
            maker--;
        if (k->out[o].dtype == computed && plan->direct[maker] < 0) {
            plan->direct[maker] = (int8_t)o;
            plan->made_by[o] = (int16_t)maker;
        }
    }
}

/* Tiles of whole blocks, and how rows are shared out. */
static void plan_rows(fused_plan *plan, const td_fused_rows *rows, const td_arg *whole, td_preparation *out)
{
    plan->rows = *rows;
    plan->row = td_fused_row_elements(whole, rows);
    plan->row_count = plan->row ? plan->elements / plan->row : 0;
    plan->tile = plan->tile < TD_REDUCED_BLOCK ? TD_REDUCED_BLOCK : plan->tile / TD_REDUCED_BLOCK * TD_REDUCED_BLOCK;
    plan->each = plan->row && plan->row <= plan->tile ? plan->tile / plan->row : 1;
    plan->chunk = td_reduced_chunk(plan->row);
    plan->chunks = plan->row > plan->chunk ? (plan->row + plan->chunk - 1) / plan->chunk : 1;
    if (plan->chunks > 1)
        out->workspace_bytes = plan->header.reduced * plan->row_count * plan->chunks * (int64_t)sizeof(double);
}

static bool fused_plan_make(td_context *td, const td_kernel *k, const td_fused_code *chain, td_preparation *out)
{
    td_arg whole = td_fused_whole(k, chain->rows);
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
        plan_input(&plan->in[i], &k->in[i], whole.shape);
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
    plan->elements = td_arg_elements(&whole);
    int64_t room = TILE_MEMORY / header.registers / (plan->wide ? 8 : 4);
    plan->tile = room < TILE_MAX ? room & ~(int64_t)15 : TILE_MAX;
    if (chain->rows)
        plan_rows(plan, chain->rows, &whole, out);
    out->prepared = plan;
    return true;
}

bool td_fused_prepare(td_context *td, const td_kernel *k, td_preparation *out)
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
    for (int o = 0; o < td_fused_full_outputs(&plan->header); o++) {
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

/* Registers in a task's memory. */
typedef struct tile_registers {
    char *memory;
    char *at[TD_FUSED_REGISTERS]; /* where each can be read */
    int64_t stride;
    bool scalar[TD_FUSED_INPUTS];
} tile_registers;

static void begin_tiles(const fused_run *r, char *memory, tile_registers *t)
{
    const fused_plan *plan = r->plan;
    t->memory = memory;
    t->stride = plan->tile * (plan->wide ? 8 : 4);
    for (int i = 0; i < plan->header.inputs; i++) {
        const fused_input *in = &plan->in[i];
        t->scalar[i] = !in->dense && in->rank == 1 && in->stride[0] == 0;
        t->at[i] = memory + i * t->stride;
        if (t->scalar[i])
            splat(plan, in->dtype, r->k->in[i].data, plan->tile, t->at[i]);
    }
}

/* Elements [first, first + count), a tile at most. */
static void compute_tile(const fused_run *r, tile_registers *t, int64_t first, int64_t count)
{
    const fused_plan *plan = r->plan;
    for (int i = 0; i < plan->header.inputs; i++)
        if (!t->scalar[i])
            t->at[i] = load_input(r, i, first, count, t->memory + i * t->stride);
    for (int i = 0; i < plan->header.instructions; i++) {
        const td_fused_instruction *op = &plan->code[i];
        char *to = t->memory + op->to * t->stride;
        if (r->direct[i] >= 0)
            to = td_arg_at(&r->k->out[r->direct[i]], first);
        if (op->function == TD_POINTWISE_dropout_mask)
            draw_mask(r, op->from[0], first, count, to);
        else
            apply(plan, op, t->at, to, count);
        round_to(plan, (td_dtype)op->dtype, to, count);
        t->at[op->to] = to;
    }
    store_outputs(r, t->at, first, count);
}

static void fused_tiles(void *user, int64_t begin, int64_t end)
{
    const fused_run *r = user;
    int64_t tile = r->plan->tile;
    _Alignas(64) char memory[TILE_MEMORY];
    tile_registers t;
    begin_tiles(r, memory, &t);
    for (int64_t i = begin; i < end; i++)
        compute_tile(r, &t, i * tile, td_smaller(tile, r->plan->elements - i * tile));
}

static fused_run run_of(const td_kernel *k)
{
    const fused_plan *plan = k->prepared;
    fused_run r = { .plan = plan, .k = k };
    td_arg whole = td_fused_whole(k, plan->header.reduced ? &plan->rows : NULL);
    memcpy(r.direct, plan->direct, sizeof r.direct);
    for (int d = 0; d < plan->header.draws; d++)
        r.drawn[d] = td_drawn_of(k->run, &whole, plan->draw[d].key, plan->draw[d].micro);
    for (int o = 0; o < k->outputs; o++) {
        for (int i = 0; i < k->inputs; i++) {
            if (k->in[i].data != k->out[o].data)
                continue;
            r.copied[i] = r.copied[i] || plan->in[i].passed;
            if (plan->made_by[o] >= 0 && plan->in[i].last_read > plan->made_by[o])
                r.direct[plan->made_by[o]] = -1;
        }
    }
    return r;
}

void td_fused_cpu(const td_kernel *k)
{
    fused_run r = run_of(k);
    const fused_plan *plan = r.plan;
    int64_t tiles = (plan->elements + plan->tile - 1) / plan->tile;
    td_parallel_for(k->run, tiles, (TASK_ELEMENTS + plan->tile - 1) / plan->tile, fused_tiles, &r);
}

/* ---- Rows ----------------------------------------------------------------------------------------------- */

static const double beginning[] = { [TD_FUSED_SUM] = 0, [TD_FUSED_MAX] = -INFINITY };

static double joined(td_fused_reduction how, double a, double b)
{
    return how == TD_FUSED_SUM ? a + b : td_larger(a, b);
}

static double block_of(const fused_plan *plan, td_fused_reduction how, const char *values, int64_t count)
{
    if (plan->wide)
        return how == TD_FUSED_SUM ? td_block_sum_f64((const double *)values, count) : td_block_max_f64((const double *)values, count);
    return how == TD_FUSED_SUM ? td_block_sum_f32((const float *)values, count) : td_block_max_f32((const float *)values, count);
}

/* `total` with `count` values of a tile, which begin at a block's first. */
static double joined_values(const fused_plan *plan, td_fused_reduction how, double total, const char *values, int64_t count)
{
    for (int64_t at = 0; at < count; at += TD_REDUCED_BLOCK) {
        int64_t n = td_smaller(TD_REDUCED_BLOCK, count - at);
        total = joined(how, total, block_of(plan, how, values + at * (plan->wide ? 8 : 4), n));
    }
    return total;
}

static double *partial_of(const fused_run *r, int reduced, int64_t row, int64_t chunk)
{
    const fused_plan *plan = r->plan;
    return (double *)r->k->workspace + (reduced * plan->row_count + row) * plan->chunks + chunk;
}

static void put_total(const fused_run *r, int reduced, int64_t row, int64_t chunk, double total)
{
    const td_arg *out = &r->k->out[td_fused_full_outputs(&r->plan->header) + reduced];
    if (r->plan->chunks > 1)
        *partial_of(r, reduced, row, chunk) = total;
    else
        td_store_f64(td_arg_at(out, row), out->dtype, &total, 1);
}

/* `rows` whole rows, which are a tile, or one chunk of one row. */
static void reduce_rows(const fused_run *r, tile_registers *t, int64_t row, int64_t rows, int64_t chunk)
{
    const fused_plan *plan = r->plan;
    const uint16_t *from = plan->output + td_fused_full_outputs(&plan->header);
    int64_t begin = chunk * plan->chunk, count = td_smaller(plan->chunk, plan->row - begin), width = plan->wide ? 8 : 4;
    int64_t first = row * plan->row + begin, tile = plan->row <= plan->tile ? rows * plan->row : plan->tile;
    double total[TD_FUSED_OUTPUTS];
    for (int o = 0; o < plan->header.reduced; o++)
        total[o] = beginning[plan->rows.reduction[o]];
    for (int64_t at = 0; at < rows * count; at += tile) {
        int64_t here = td_smaller(tile, rows * count - at), part = td_smaller(here, plan->row);
        compute_tile(r, t, first + at, here);
        for (int o = 0; o < plan->header.reduced; o++) {
            td_fused_reduction how = plan->rows.reduction[o];
            for (int64_t i = 0; i < here / part; i++) {
                total[o] = joined_values(plan, how, i ? beginning[how] : total[o], t->at[from[o]] + i * part * width, part);
                if (rows > 1)
                    put_total(r, o, row + i, chunk, total[o]);
            }
        }
    }
    for (int o = 0; rows == 1 && o < plan->header.reduced; o++)
        put_total(r, o, row, chunk, total[o]);
}

static void row_tasks(void *user, int64_t begin, int64_t end)
{
    const fused_run *r = user;
    const fused_plan *plan = r->plan;
    _Alignas(64) char memory[ROW_MEMORY];
    tile_registers t;
    begin_tiles(r, memory, &t);
    for (int64_t task = begin; task < end; task++) {
        int64_t row = task / plan->chunks * plan->each;
        reduce_rows(r, &t, row, td_smaller(plan->each, plan->row_count - row), task % plan->chunks);
    }
}

static void join_chunks(void *user, int64_t begin, int64_t end)
{
    const fused_run *r = user;
    const fused_plan *plan = r->plan;
    for (int64_t i = begin; i < end; i++) {
        int reduced = (int)(i / plan->row_count);
        const td_arg *out = &r->k->out[td_fused_full_outputs(&plan->header) + reduced];
        td_fused_reduction how = plan->rows.reduction[reduced];
        const double *part = partial_of(r, reduced, i % plan->row_count, 0);
        double total = beginning[how];
        for (int64_t chunk = 0; chunk < plan->chunks; chunk++)
            total = joined(how, total, part[chunk]);
        td_store_f64(td_arg_at(out, i % plan->row_count), out->dtype, &total, 1);
    }
}

void td_fused_rows_cpu(const td_kernel *k)
{
    fused_run r = run_of(k);
    const fused_plan *plan = r.plan;
    int64_t tasks = (plan->row_count + plan->each - 1) / plan->each * plan->chunks;
    int64_t size = plan->each * td_smaller(plan->row, plan->chunk);
    td_parallel_for(k->run, tasks, TASK_ELEMENTS / (size ? size : 1) + 1, row_tasks, &r);
    if (plan->chunks > 1)
        td_parallel_for(k->run, plan->header.reduced * plan->row_count, TASK_ELEMENTS / plan->chunks + 1, join_chunks, &r);
}
