/* Chains of pointwise operations as kernels of their own: see device_fused.h; their source is made in device_fused_source.c. */
#include "core/ops/device_fused.h"

#include "core/device_nvrtc.h"
#include "core/ops/reduce.h"

#include <stddef.h>

/* ---- The chain ------------------------------------------------------------------------------------------ */

static bool is_wide(td_dtype dtype) { return dtype == TD_F64 || dtype == TD_I32 || dtype == TD_I64; }

/* The size of dimension `back` from the last of an operand; 1 where it has none. */
static int64_t size_at(const td_arg *arg, int64_t back)
{
    return back <= arg->shape.rank ? arg->shape.dim[arg->shape.rank - back] : 1;
}

/* Where this rank's part begins in the global value of its draws. */
static uint64_t first_drawn(const td_kernel *k, const td_arg *y)
{
    uint64_t first = 0, step = 1;
    for (int d = (int)y->shape.rank - 1; d >= 0; d--) {
        first += (uint64_t)td_arg_extent(k->run ? k->run->mesh : NULL, y, d).begin * step;
        step *= (uint64_t)y->global.dim[d];
    }
    return first;
}

static void arrange_dimensions(td_chain *c, const td_kernel *k, const td_arg *whole)
{
    bool stepped[TD_FUSED_INPUTS] = { false }, draws = c->header.draws > 0; /* stepped: along dimension rank - 1 */
    int64_t step[TD_FUSED_INPUTS], drawn = 1; /* drawn: a step of the global value's dimension at hand */
    for (int i = 0; i < k->inputs; i++) step[i] = 1;
    for (int64_t back = 1; back <= whole->shape.rank; back++) {
        int64_t size = size_at(whole, back), stride = drawn;
        drawn *= whole->global.dim[whole->shape.rank - back];
        if (size == 1) continue; /* of the inputs, too */
        if (draws && !c->rank && stride > 1) { /* neighbours are none in the draw: groups of one */
            c->draw_stride[0] = c->size[0] = 1;
            c->rank = 1;
        }
        bool alike = c->rank > 0 && (!draws || stride == c->draw_stride[c->rank - 1] * c->size[c->rank - 1]);
        for (int i = 0; i < k->inputs; i++) alike = alike && stepped[i] == (size_at(&k->in[i], back) == size);
        if (!alike) {
            c->draw_stride[c->rank] = stride;
            c->size[c->rank++] = 1;
        }
        int d = c->rank - 1;
        c->size[d] *= size;
        for (int i = 0; i < k->inputs; i++) {
            int64_t own = size_at(&k->in[i], back);
            stepped[i] = own == size;
            if (stepped[i] && !alike) c->stride[i][d] = step[i];
            if (stepped[i]) c->steps[i] |= (uint8_t)(1 << d);
            step[i] *= own;
        }
    }
    if (c->rank) return;
    c->draw_stride[0] = c->size[c->rank++] = 1; /* one element */
    for (int i = 0; i < k->inputs; i++) c->stride[i][0] = c->steps[i] = 1;
}

static void arrange_draws(td_chain *c, const td_kernel *k, const td_arg *whole)
{
    c->draw_first = first_drawn(k, whole);
    c->draw_elements = (uint64_t)td_shape_elements(whole->global);
    c->draw_dense = true;
    for (int d = 1; d < c->rank; d++) c->draw_dense = c->draw_dense && c->draw_stride[d] == c->draw_stride[d - 1] * c->size[d - 1];
}

td_chain td_chain_of(const td_kernel *k)
{
    td_chain c = { .header = { .inputs = k->inputs, .outputs = 1, .instructions = 1, .registers = k->inputs + 1 } };
    td_arg whole = k->out[0];
    if (k->op == &td_op_fused || k->op == &td_op_fused_rows) {
        td_fused_code code = td_fused_code_of(k->attr);
        whole = td_fused_whole(k, code.rows);
        if (code.rows) {
            c.row = td_fused_row_elements(&whole, code.rows);
            memcpy(c.reduction, code.rows->reduction, sizeof c.reduction);
        }
        c.header = code.header;
        memcpy(c.code, code.instructions, (size_t)c.header.instructions * sizeof *c.code);
        memcpy(c.output, code.outputs, (size_t)c.header.outputs * sizeof *c.output);
        memcpy(c.draw, code.draws, (size_t)c.header.draws * sizeof *c.draw);
    } else {
        c.code[0] = (td_fused_instruction){ .function = (uint16_t)k->op->pointwise,
                                            .to = (uint16_t)k->inputs,
                                            .from = { 0, k->inputs > 1, k->inputs > 2 ? 2 : 0 },
                                            .dtype = (uint16_t)k->out[0].dtype };
        c.output[0] = c.code[0].to;
    }
    for (int i = 0; i < k->inputs; i++) c.wide = c.wide || is_wide(k->in[i].dtype);
    for (int n = 0; n < c.header.instructions; n++) c.wide = c.wide || is_wide((td_dtype)c.code[n].dtype);
    for (int i = 0; i < k->inputs; i++) c.in_dtype[i] = (uint8_t)k->in[i].dtype;
    for (int o = 0; o < k->outputs; o++) c.out_dtype[o] = (uint8_t)k->out[o].dtype;
    c.elements = td_arg_elements(&whole);
    arrange_dimensions(&c, k, &whole);
    arrange_draws(&c, k, &whole);
    for (int i = 0; i < k->inputs; i++) c.dense[i] = c.steps[i] == (1 << c.rank) - 1;
    return c;
}

int td_chain_width(const td_chain *c)
{
    enum { ACCESS_BYTES = 16, MOST = 8, REGISTERS = 128 };
    int64_t smallest = 8;
    for (int o = 0; o < td_fused_full_outputs(&c->header); o++) smallest = td_smaller(smallest, td_dtype_size((td_dtype)c->out_dtype[o]));
    for (int i = 0; i < c->header.inputs; i++)
        if (c->steps[i] & 1) smallest = td_smaller(smallest, td_dtype_size((td_dtype)c->in_dtype[i]));
    int width = c->header.draws ? MOST : (int)td_smaller(ACCESS_BYTES / smallest, MOST); /* a block of draws is of eight */
    while (width > 1 && (c->size[0] % width || c->row % width || c->header.registers * width * (c->wide ? 2 : 1) > REGISTERS)) width /= 2;
    return width;
}

_Static_assert(offsetof(td_cuda_run, seed) == 0 && offsetof(td_cuda_run, update) == 8 && offsetof(td_cuda_run, micro) == 16,
               "kernels read k.run[0], k.run[1] and k.run[2]");

/* ---- Rows ------------------------------------------------------------------------------------------------- */

td_chain_rows td_chain_rows_of(const td_chain *c, int width)
{
    enum {
        PARTS = 2048,                         /* of a launch, where chunks can make as many */
        CHUNK = 4096,                         /* elements, at least: four times 16 bytes a thread */
        UNIT = 8 * TD_CHAIN_THREADS,          /* a chunk's elements are a multiple of it */
        WARP = 32, WARP_GROUPS = 256,         /* more groups of a row than that are a block's */
    };
    td_chain_rows r = { .lanes = 1, .chunk = c->row, .chunks = 1, .rows = c->row ? c->elements / c->row : 0 };
    int64_t chunks = r.rows ? td_smaller(PARTS / r.rows, c->row / CHUNK) : 0;
    if (chunks > 1) {
        r.chunk = td_round_up((c->row + chunks - 1) / chunks, UNIT);
        r.chunks = (c->row + r.chunk - 1) / r.chunk;
    }
    int64_t groups = r.chunk / width;
    while (r.lanes < groups && r.lanes < WARP) r.lanes *= 2;
    bool few = groups > WARP && r.rows * r.chunks < PARTS;
    if (groups > WARP_GROUPS || few) r.lanes = TD_CHAIN_THREADS;
    return r;
}

/* Bytes of the parts' results of a reduced output, which the join reads as operands. */
static int64_t part_bytes(const td_chain *c, const td_chain_rows *r, int output)
{
    return td_round_up(r->rows * r->chunks * td_dtype_size((td_dtype)c->out_dtype[output]), 16);
}

static int64_t parts_bytes(const td_chain *c, const td_chain_rows *r)
{
    int64_t bytes = 0;
    for (int o = td_fused_full_outputs(&c->header); r->chunks > 1 && o < c->header.outputs; o++) bytes += part_bytes(c, r, o);
    return bytes;
}

/* ---- Preparing and running ------------------------------------------------------------------------------ */

typedef struct chain_plan {
    td_chain chain;
    cudaKernel_t kernel;                      /* NULL: interpreted */
    int width;
    td_chain_rows rows;
    td_chain_numbers numbers;
} chain_plan;

/* Whether a kernel is to be made for the chain; false: it is interpreted. */
static bool wants_kernel(const td_context *td, chain_plan *plan)
{
    if (td_stage_off(td, TD_STAGE_FUSE) || td->options.eager || !plan->chain.elements) return false;
    return td_chain_numbers_of(&plan->chain, plan->width, &plan->numbers);
}

static cudaKernel_t kernel_of(td_context *td, const chain_plan *plan)
{
    td_text source = td_chain_source(td, &plan->chain, plan->width);
    cudaKernel_t kernel = source.text ? td_nvrtc_kernel(td, source.text, "td_chain_kernel") : NULL;
    td_free(td, source.text, source.room, "host");
    return kernel;
}

bool td_fused_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    chain_plan *plan = td_prepared_new(td, sizeof *plan);
    if (!plan) return false;
    plan->chain = td_chain_of(k);
    plan->width = td_chain_width(&plan->chain);
    plan->rows = td_chain_rows_of(&plan->chain, plan->width);
    if (!td->options.gpu && wants_kernel(td, plan)) plan->kernel = kernel_of(td, plan);
    if (td->error != TD_OK) {
        td_prepared_free(plan);
        return false;
    }
    out->prepared = plan;
    out->workspace_bytes = parts_bytes(&plan->chain, &plan->rows);
    return true;
}

/* Whether operands that are read or written by groups begin where groups may. */
static bool is_aligned(const td_kernel *k, const chain_plan *plan)
{
    uintptr_t off = 0;
    for (int i = 0; i < k->inputs; i++)
        if (plan->chain.steps[i] & 1) off |= (uintptr_t)k->in[i].data % (uintptr_t)(plan->width * td_dtype_size(k->in[i].dtype));
    for (int o = 0; o < td_fused_full_outputs(&plan->chain.header); o++)
        off |= (uintptr_t)k->out[o].data % (uintptr_t)(plan->width * td_dtype_size(k->out[o].dtype));
    return !off;
}

/* Where the kernel writes each output: of rows in chunks the chunks' results. */
static void find_outputs(const td_kernel *k, const chain_plan *plan, void *to[TD_FUSED_OUTPUTS])
{
    char *parts = k->workspace;
    for (int o = 0; o < k->outputs; o++) {
        to[o] = k->out[o].data;
        if (plan->rows.chunks == 1 || o < td_fused_full_outputs(&plan->chain.header)) continue;
        to[o] = parts;
        parts += part_bytes(&plan->chain, &plan->rows, o);
    }
}

/* Reduces the chunks' results of each row, by the reduction's own kernel. */
static void join_chunks(const td_kernel *k, const chain_plan *plan, void *const *parts)
{
    int full = td_fused_full_outputs(&plan->chain.header);
    td_shape shape = TD_SHAPE(plan->rows.rows, plan->rows.chunks);
    for (int o = full; plan->rows.chunks > 1 && o < k->outputs; o++) {
        const td_op *op = plan->chain.reduction[o - full] == TD_FUSED_SUM ? &td_op_sum : &td_op_max;
        td_arg in = { .data = parts[o], .dtype = k->out[o].dtype, .shape = shape, .global = shape };
        td_kernel join = { .op = op, .attr = &(td_reduce_attr){ .axes = 1u << 1, .keep = TD_DROP }, .attr_bytes = sizeof(td_reduce_attr),
                           .inputs = 1, .outputs = 1, .in = &in, .out = &k->out[o], .run = k->run };
        op->cuda.run(&join);
    }
}

static void launch(const td_kernel *k, const chain_plan *plan, void *const *out)
{
    uint64_t argument[TD_FUSED_INPUTS + TD_FUSED_OUTPUTS + 1 + TD_CHAIN_DRAWS + (TD_CHAIN_NUMBERS + 1) / 2];
    int words = 0;
    for (int i = 0; i < k->inputs; i++) argument[words++] = (uintptr_t)k->in[i].data;
    for (int o = 0; o < k->outputs; o++) argument[words++] = (uintptr_t)out[o];
    if (plan->chain.header.draws) argument[words++] = (uintptr_t)k->run->on_device;
    words += td_chain_draws_of(&plan->chain, argument + words);
    memcpy(argument + words, plan->numbers.at, (size_t)plan->numbers.count * sizeof *plan->numbers.at);
    enum { BLOCKS_EACH = 64 }; /* of a multiprocessor, which holds 16 at most: the last ones to run are a small part */
    int64_t most = (int64_t)k->run->td->gpu.multiprocessors * BLOCKS_EACH, threads = (int64_t)plan->numbers.at[0] * plan->rows.lanes;
    unsigned blocks = (unsigned)td_smaller(td_blocks_for(threads, TD_CHAIN_THREADS, 1), most);
    cudaError_t status = cudaLaunchKernel((const void *)plan->kernel, (dim3){ blocks, 1, 1 }, (dim3){ TD_CHAIN_THREADS, 1, 1 },
                                          (void *[]){ argument }, 0, td_stream(k));
    td_cuda_ok(k->run->td, status, k->op->name);
}

void td_fused_cuda(const td_kernel *k)
{
    const chain_plan *plan = k->prepared;
    void *out[TD_FUSED_OUTPUTS];
    if (!plan->chain.elements) return;
    find_outputs(k, plan, out);
    if (plan->kernel && is_aligned(k, plan)) launch(k, plan, out);
    else td_chain_interpret(k, &plan->chain, &plan->rows, out);
    join_chunks(k, plan, out);
}
