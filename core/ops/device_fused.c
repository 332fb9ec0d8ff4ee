/* Chains of pointwise operations as kernels of their own: see device_fused.h.
 *
 * What the generated source looks like, for y = bf16(gelu(x + b)) of x (N, D) and b (D), eight elements at once:
 *
 *     typedef float T;
 *     enum { width = 8 };
 *     TD_FUNCTION T op_add(T a, T b) { return (T)(a + b); }
 *     TD_FUNCTION T op_gelu(T a) { return (T)(gelu(a)); }
 *     struct arguments { const void *in[2]; void *out[1]; unsigned number[4]; };
 *     extern "C" __global__ void __launch_bounds__(128) td_chain_kernel(const arguments k)
 *     {
 *         for (unsigned i = blockIdx.x * 128 + threadIdx.x; i < k.number[0]; i += gridDim.x * 128) {
 *             const unsigned q0 = i;
 *             const unsigned q1 = td_quotient(q0, k.number[1], k.number[2]), d0 = q0 - q1 * k.number[3];
 *             T x0[width]; td_load<float>(k.in[0], i, x0);
 *             T x1[width]; td_load<float>(k.in[1], d0, x1);
 *             T y0[width];
 *             for (int v = 0; v < width; v++) {
 *                 const T t0 = op_add(x0[v], x1[v]);
 *                 const T t1 = op_gelu(t0);
 *                 y0[v] = t1;
 *             }
 *             td_store<td_bf16>(k.out[0], i, y0);
 *         }
 *     }
 *
 * Where it draws dropout's mask, the arguments have `const unsigned long long *run, draw[]` before the numbers, the kernel begins with
 *
 *         const td_device_random r0 = td_random_on(k.run[0], k.draw[2], k.run[1]);
 *         const unsigned long long b0 = (k.run[2] + k.draw[3]) * k.draw[0] + k.draw[1];
 *
 * and a group with its index in the global value and its masks, which instructions read as m0[v]:
 *
 *             const unsigned long long e = (unsigned long long)i * width;
 *             T m0[width]; td_mask(r0, b0 + e, (unsigned)k.draw[4], __longlong_as_double(k.draw[5]), m0);
 */
#include "core/ops/device_fused.h"

#include "core/device_nvrtc.h"
#include "core/ops/divisor.h"
#include "core/ops/draw.h"

#include <stddef.h>
#include <stdio.h>

/* ---- The chain ------------------------------------------------------------------------------------------ */

static bool is_wide(td_dtype dtype) { return dtype == TD_F64 || dtype == TD_I32 || dtype == TD_I64; }

/* The size of dimension `back` from the last of an operand; 1 where it has none. */
static int64_t size_at(const td_arg *arg, int64_t back)
{
    return back <= arg->shape.rank ? arg->shape.dim[arg->shape.rank - back] : 1;
}

/* Where this rank's part begins in the global value of its draws. */
static uint64_t first_drawn(const td_kernel *k)
{
    const td_arg *y = &k->out[0];
    uint64_t first = 0, step = 1;
    for (int d = (int)y->shape.rank - 1; d >= 0; d--) {
        first += (uint64_t)td_arg_extent(k->run ? k->run->mesh : NULL, y, d).begin * step;
        step *= (uint64_t)y->global.dim[d];
    }
    return first;
}

static void arrange_dimensions(td_chain *c, const td_kernel *k)
{
    bool stepped[TD_FUSED_INPUTS] = { false }, draws = c->header.draws > 0; /* stepped: along dimension rank - 1 */
    int64_t step[TD_FUSED_INPUTS], drawn = 1; /* drawn: a step of the global value's dimension at hand */
    for (int i = 0; i < k->inputs; i++) step[i] = 1;
    for (int64_t back = 1; back <= k->out[0].shape.rank; back++) {
        int64_t size = size_at(&k->out[0], back), stride = drawn;
        drawn *= k->out[0].global.dim[k->out[0].shape.rank - back];
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

static void arrange_draws(td_chain *c, const td_kernel *k)
{
    c->draw_first = first_drawn(k);
    c->draw_elements = (uint64_t)td_shape_elements(k->out[0].global);
    c->draw_dense = true;
    for (int d = 1; d < c->rank; d++) c->draw_dense = c->draw_dense && c->draw_stride[d] == c->draw_stride[d - 1] * c->size[d - 1];
}

td_chain td_chain_of(const td_kernel *k)
{
    td_chain c = { .header = { .inputs = k->inputs, .outputs = 1, .instructions = 1, .registers = k->inputs + 1 } };
    if (k->op == &td_op_fused) {
        td_fused_code code = td_fused_code_of(k->attr);
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
    c.elements = td_arg_elements(&k->out[0]);
    arrange_dimensions(&c, k);
    arrange_draws(&c, k);
    for (int i = 0; i < k->inputs; i++) c.dense[i] = c.steps[i] == (1 << c.rank) - 1;
    return c;
}

int td_chain_width(const td_chain *c)
{
    enum { ACCESS_BYTES = 16, MOST = 8, REGISTERS = 128 };
    int64_t smallest = 8;
    for (int o = 0; o < c->header.outputs; o++) smallest = td_smaller(smallest, td_dtype_size((td_dtype)c->out_dtype[o]));
    for (int i = 0; i < c->header.inputs; i++)
        if (c->steps[i] & 1) smallest = td_smaller(smallest, td_dtype_size((td_dtype)c->in_dtype[i]));
    int width = c->header.draws ? MOST : (int)td_smaller(ACCESS_BYTES / smallest, MOST); /* a block of draws is of eight */
    while (width > 1 && (c->size[0] % width || c->header.registers * width * (c->wide ? 2 : 1) > REGISTERS)) width /= 2;
    return width;
}

/* ---- Source --------------------------------------------------------------------------------------------- */

#define TD_CODE(...) #__VA_ARGS__ "\n"
static const char in_f64[] =
#include "core/ops/pointwise_f64.h"
    ;
static const char in_cuda[] =
#include "core/ops/pointwise_cuda.h"
    ;
static const char drawing[] =
#include "core/ops/random_cuda.h"
    ;

static const struct {
    const char *name, *expression;
} functions[TD_POINTWISE_COUNT] = {
#define FUNCTION(name, operands, partial, domain, expression, ...) [TD_POINTWISE_##name] = { #name, #expression },
    TD_POINTWISE(FUNCTION)
    [TD_POINTWISE_cast] = { "cast", "a" },
};

static const char *const stored[TD_DTYPES] = {
    [TD_F32] = "float", [TD_F64] = "double", [TD_BF16] = "td_bf16", [TD_F16] = "td_f16",
    [TD_I32] = "int", [TD_I64] = "long long", [TD_U8] = "unsigned char",
};

static void add_functions(td_text *text, const td_chain *c)
{
    static const char *const operands[] = { "", "T a", "T a, T b", "T a, T b, T c" };
    bool done[TD_POINTWISE_COUNT] = { false };
    for (int n = 0; n < c->header.instructions; n++) {
        int f = c->code[n].function;
        if (done[f] || f == TD_POINTWISE_dropout_mask) continue;
        done[f] = true;
        td_text_add(text, "TD_FUNCTION T op_%s(%s) { return (T)(%s); }\n", functions[f].name, operands[td_pointwise_inputs[f]],
                    functions[f].expression);
    }
}

/* Numbers of the argument: 0 counts groups; three to divide by each dimension but the last; then strides, as they are used. */
static int first_stride(const td_chain *c) { return 1 + 3 * (c->rank - 1); }

static int lowest_step(const td_chain *c, int input) { return __builtin_ctz(c->steps[input]); }

/* What dimension each group's index i has, d0 being that of the group along dimension 0. */
static void add_indices(td_text *text, const td_chain *c)
{
    td_text_add(text, "        const unsigned q0 = i;\n");
    for (int d = 0; d < c->rank - 1; d++)
        td_text_add(text, "        const unsigned q%d = td_quotient(q%d, k.number[%d], k.number[%d]), d%d = q%d - q%d * k.number[%d];\n", d + 1, d,
                    1 + 3 * d, 2 + 3 * d, d, d, d + 1, 3 + 3 * d);
    td_text_add(text, "        const unsigned d%d = q%d;\n", c->rank - 1, c->rank - 1);
}

/* T xN[...], loaded from input N: elements one by one where it is stretched along dimension 0. */
static void add_load(td_text *text, const td_chain *c, int input, int *number)
{
    const char *indent = c->steps[input] ? "        " : "    ";
    td_text_add(text, "%sT x%d[%s]; td_load<%s>(k.in[%d], ", indent, input, c->steps[input] & 1 ? "width" : "1", stored[c->in_dtype[input]], input);
    if (c->dense[input] || !c->steps[input]) {
        td_text_add(text, "%s, x%d);\n", c->steps[input] ? "i" : "0", input);
        return;
    }
    int lowest = lowest_step(c, input);
    td_text_add(text, "d%d", lowest);
    for (int d = lowest + 1; d < c->rank; d++)
        if (c->steps[input] >> d & 1) td_text_add(text, " + d%d * k.number[%d]", d, (*number)++);
    td_text_add(text, ", x%d);\n", input);
}

/* Where the group is in the global value, and the masks of its elements. */
static void add_masks(td_text *text, const td_chain *c, int *number)
{
    td_text_add(text, "        const unsigned long long e = (unsigned long long)%s * width", c->draw_dense ? "i" : "d0");
    for (int d = 1; !c->draw_dense && d < c->rank; d++) td_text_add(text, " + (unsigned long long)d%d * k.number[%d]", d, (*number)++);
    td_text_add(text, ";\n");
    for (int n = 0; n < c->header.draws; n++)
        td_text_add(text, "        T m%d[width]; td_mask(r%d, b%d + e, (unsigned)k.draw[%d], __longlong_as_double(k.draw[%d]), m%d);\n", n, n,
                    n, 4 + 4 * n, 5 + 4 * n, n);
}

static void add_generators(td_text *text, const td_chain *c)
{
    for (int n = 0; n < c->header.draws; n++)
        td_text_add(text,
                    "    const td_device_random r%d = td_random_on(k.run[0], k.draw[%d], k.run[1]);\n"
                    "    const unsigned long long b%d = (k.run[2] + k.draw[%d]) * k.draw[0] + k.draw[1];\n",
                    n, 2 + 4 * n, n, 3 + 4 * n);
}

/* Whether an instruction reads what instruction n makes. */
static bool is_read(const td_chain *c, int n)
{
    for (int m = n + 1; m < c->header.instructions; m++) {
        for (int s = 0; s < td_pointwise_inputs[c->code[m].function]; s++)
            if (c->code[m].from[s] == c->code[n].to) return true;
        if (c->code[m].to == c->code[n].to) return false;
    }
    return false;
}

typedef struct value_name {
    char text[24];
} value_name;

/* Results are rounded to their dtype but where storing them does. */
static void add_instruction(td_text *text, const td_chain *c, int n, value_name *registers)
{
    const td_fused_instruction *op = &c->code[n];
    bool rounded = op->dtype != (c->wide ? TD_F64 : TD_F32) && is_read(c, n);
    td_text_add(text, "            const T t%d = ", n);
    if (rounded) td_text_add(text, "td_round<%s>(", stored[op->dtype]);
    if (op->function == TD_POINTWISE_dropout_mask)
        td_text_add(text, "m%d[v]", op->from[0]);
    else
        td_text_add(text, "op_%s(", functions[op->function].name);
    for (int s = 0; s < td_pointwise_inputs[op->function]; s++) td_text_add(text, "%s%s", s ? ", " : "", registers[op->from[s]].text);
    td_text_add(text, "%s%s;\n", op->function == TD_POINTWISE_dropout_mask ? "" : ")", rounded ? ")" : "");
    snprintf(registers[op->to].text, sizeof registers->text, "t%d", n);
}

static void add_body(td_text *text, const td_chain *c)
{
    value_name registers[TD_FUSED_REGISTERS];
    for (int i = 0; i < c->header.inputs; i++)
        snprintf(registers[i].text, sizeof registers->text, "x%d[%s]", i, c->steps[i] & 1 ? "v" : "0");
    for (int o = 0; o < c->header.outputs; o++) td_text_add(text, "        T y%d[width];\n", o);
    td_text_add(text, "        for (int v = 0; v < width; v++) {\n");
    for (int n = 0; n < c->header.instructions; n++) add_instruction(text, c, n, registers);
    for (int o = 0; o < c->header.outputs; o++) td_text_add(text, "            y%d[v] = %s;\n", o, registers[c->output[o]].text);
    td_text_add(text, "        }\n");
    for (int o = 0; o < c->header.outputs; o++)
        td_text_add(text, "        td_store<%s>(k.out[%d], i, y%d);\n", stored[c->out_dtype[o]], o, o);
}

td_text td_chain_source(td_context *td, const td_chain *c, int width)
{
    td_text text = { .td = td };
    td_chain_numbers numbers;
    td_chain_numbers_of(c, width, &numbers);
    td_text_add(&text, "#define TD_FUNCTION static __device__ __forceinline__\n%s%s%s", c->wide ? in_f64 : "", in_cuda,
                c->header.draws ? drawing : "");
    td_text_add(&text, "typedef %s T;\nenum { width = %d };\n", c->wide ? "double" : "float", width);
    add_functions(&text, c);
    td_text_add(&text, "struct arguments { ");
    if (c->header.inputs) td_text_add(&text, "const void *in[%d]; ", c->header.inputs);
    td_text_add(&text, "void *out[%d]; ", c->header.outputs);
    if (c->header.draws) td_text_add(&text, "const unsigned long long *run, draw[%d]; ", 2 + 4 * c->header.draws);
    td_text_add(&text, "unsigned number[%d]; };\n", numbers.count);
    td_text_add(&text, "extern \"C\" __global__ void __launch_bounds__(%d) td_chain_kernel(const arguments k)\n{\n", TD_CHAIN_THREADS);
    int number = first_stride(c);
    for (int i = 0; i < c->header.inputs; i++)
        if (!c->steps[i]) add_load(&text, c, i, &number);
    add_generators(&text, c);
    td_text_add(&text, "    for (unsigned i = blockIdx.x * %d + threadIdx.x; i < k.number[0]; i += gridDim.x * %d) {\n", TD_CHAIN_THREADS,
                TD_CHAIN_THREADS);
    if (c->rank > 1) add_indices(&text, c);
    for (int i = 0; i < c->header.inputs; i++)
        if (c->steps[i]) add_load(&text, c, i, &number);
    if (c->header.draws) add_masks(&text, c, &number);
    add_body(&text, c);
    td_text_add(&text, "    }\n}\n");
    if (td->error == TD_OK) return text;
    td_free(td, text.text, text.room, "host");
    return (td_text){ .td = td };
}

/* ---- Numbers -------------------------------------------------------------------------------------------- */

bool td_chain_numbers_of(const td_chain *c, int width, td_chain_numbers *out)
{
    *out = (td_chain_numbers){ .count = first_stride(c) };
    if (c->elements / width > INT32_MAX) return false;
    out->at[0] = (uint32_t)(c->elements / width);
    for (int d = 0; d < c->rank - 1; d++) {
        td_divisor by = td_divisor_of((uint32_t)(d ? c->size[d] : c->size[d] / width));
        memcpy(out->at + 1 + 3 * d, (uint32_t[]){ by.multiplier, by.shift, by.size }, sizeof by);
    }
    for (int i = 0; i < c->header.inputs; i++) {
        if (c->dense[i] || !c->steps[i]) continue;
        for (int d = lowest_step(c, i) + 1; d < c->rank; d++)
            if (c->steps[i] >> d & 1) out->at[out->count++] = (uint32_t)(c->stride[i][d] / (c->steps[i] & 1 ? width : 1));
    }
    for (int d = 1; c->header.draws && !c->draw_dense && d < c->rank; d++) {
        if (c->draw_stride[d] > UINT32_MAX) return false;
        out->at[out->count++] = (uint32_t)c->draw_stride[d];
    }
    return true;
}

/* How many elements there are and which is this rank's first; of each draw key, micro-batch, bound and what is kept. */
int td_chain_draws_of(const td_chain *c, uint64_t to[TD_CHAIN_DRAWS])
{
    int words = 0;
    if (!c->header.draws) return 0;
    to[words++] = c->draw_elements;
    to[words++] = c->draw_first;
    for (int n = 0; n < c->header.draws; n++) {
        double kept = 1 / (1 - c->draw[n].p);
        to[words++] = c->draw[n].key;
        to[words++] = c->draw[n].micro;
        to[words++] = td_draw_below(c->draw[n].p);
        memcpy(&to[words++], &kept, sizeof kept);
    }
    return words;
}

_Static_assert(offsetof(td_cuda_run, seed) == 0 && offsetof(td_cuda_run, update) == 8 && offsetof(td_cuda_run, micro) == 16,
               "kernels read k.run[0], k.run[1] and k.run[2]");

/* ---- Preparing and running ------------------------------------------------------------------------------ */

typedef struct chain_plan {
    td_chain chain;
    cudaKernel_t kernel;                      /* NULL: interpreted */
    int width;
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
    if (!td->options.gpu && wants_kernel(td, plan)) plan->kernel = kernel_of(td, plan);
    if (td->error != TD_OK) {
        td_prepared_free(plan);
        return false;
    }
    out->prepared = plan;
    return true;
}

/* Whether operands that are read or written by groups begin where groups may. */
static bool is_aligned(const td_kernel *k, const chain_plan *plan)
{
    uintptr_t off = 0;
    for (int i = 0; i < k->inputs; i++)
        if (plan->chain.steps[i] & 1) off |= (uintptr_t)k->in[i].data % (uintptr_t)(plan->width * td_dtype_size(k->in[i].dtype));
    for (int o = 0; o < k->outputs; o++) off |= (uintptr_t)k->out[o].data % (uintptr_t)(plan->width * td_dtype_size(k->out[o].dtype));
    return !off;
}

void td_fused_cuda(const td_kernel *k)
{
    const chain_plan *plan = k->prepared;
    if (!plan->kernel || !is_aligned(k, plan)) {
        td_chain_interpret(k, &plan->chain);
        return;
    }
    uint64_t argument[TD_FUSED_INPUTS + TD_FUSED_OUTPUTS + 1 + TD_CHAIN_DRAWS + (TD_CHAIN_NUMBERS + 1) / 2];
    int words = 0;
    for (int i = 0; i < k->inputs; i++) argument[words++] = (uintptr_t)k->in[i].data;
    for (int o = 0; o < k->outputs; o++) argument[words++] = (uintptr_t)k->out[o].data;
    if (plan->chain.header.draws) argument[words++] = (uintptr_t)k->run->on_device;
    words += td_chain_draws_of(&plan->chain, argument + words);
    memcpy(argument + words, plan->numbers.at, (size_t)plan->numbers.count * sizeof *plan->numbers.at);
    enum { BLOCKS_EACH = 64 }; /* of a multiprocessor, which holds 16 at most: the last ones to run are a small part */
    int64_t most = (int64_t)k->run->td->gpu.multiprocessors * BLOCKS_EACH;
    unsigned blocks = (unsigned)td_smaller(td_blocks_for(plan->numbers.at[0], TD_CHAIN_THREADS, 1), most);
    cudaError_t status = cudaLaunchKernel((const void *)plan->kernel, (dim3){ blocks, 1, 1 }, (dim3){ TD_CHAIN_THREADS, 1, 1 },
                                          (void *[]){ argument }, 0, td_stream(k));
    td_cuda_ok(k->run->td, status, k->op->name);
}
