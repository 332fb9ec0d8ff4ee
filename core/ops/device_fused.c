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
 */
#include "core/ops/device_fused.h"

#include "core/device_nvrtc.h"
#include "core/ops/divisor.h"

#include <stdio.h>

/* ---- The chain ------------------------------------------------------------------------------------------ */

static bool is_wide(td_dtype dtype) { return dtype == TD_F64 || dtype == TD_I32 || dtype == TD_I64; }

/* The size of dimension `back` from the last of an operand; 1 where it has none. */
static int64_t size_at(const td_arg *arg, int64_t back)
{
    return back <= arg->shape.rank ? arg->shape.dim[arg->shape.rank - back] : 1;
}

static void arrange_dimensions(td_chain *c, const td_kernel *k)
{
    bool stepped[TD_FUSED_INPUTS] = { false }; /* along dimension rank - 1 */
    int64_t step[TD_FUSED_INPUTS];
    for (int i = 0; i < k->inputs; i++) step[i] = 1;
    for (int64_t back = 1; back <= k->out[0].shape.rank; back++) {
        int64_t size = size_at(&k->out[0], back);
        if (size == 1) continue; /* of the inputs, too */
        bool alike = c->rank > 0;
        for (int i = 0; i < k->inputs; i++) alike = alike && stepped[i] == (size_at(&k->in[i], back) == size);
        if (!alike) c->size[c->rank++] = 1;
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
    c->size[c->rank++] = 1; /* one element */
    for (int i = 0; i < k->inputs; i++) c->stride[i][0] = c->steps[i] = 1;
}

td_chain td_chain_of(const td_kernel *k)
{
    td_chain c = { .header = { .inputs = k->inputs, .outputs = 1, .instructions = 1, .registers = k->inputs + 1 } };
    if (k->op == &td_op_fused) {
        const char *attr = k->attr;
        memcpy(&c.header, attr, sizeof c.header);
        size_t code_bytes = (size_t)c.header.instructions * sizeof *c.code;
        memcpy(c.code, attr + sizeof c.header, code_bytes);
        memcpy(c.output, attr + sizeof c.header + code_bytes, (size_t)c.header.outputs * sizeof *c.output);
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
    int width = (int)td_smaller(ACCESS_BYTES / smallest, MOST);
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
        if (done[f]) continue;
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
    td_text_add(text, "op_%s(", functions[op->function].name);
    for (int s = 0; s < td_pointwise_inputs[op->function]; s++) td_text_add(text, "%s%s", s ? ", " : "", registers[op->from[s]].text);
    td_text_add(text, ")%s;\n", rounded ? ")" : "");
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
    td_text_add(&text, "#define TD_FUNCTION static __device__ __forceinline__\n%s%s", c->wide ? in_f64 : "", in_cuda);
    td_text_add(&text, "typedef %s T;\nenum { width = %d };\n", c->wide ? "double" : "float", width);
    add_functions(&text, c);
    td_text_add(&text, "struct arguments { const void *in[%d]; void *out[%d]; unsigned number[%d]; };\n", c->header.inputs, c->header.outputs,
                numbers.count);
    td_text_add(&text, "extern \"C\" __global__ void __launch_bounds__(%d) td_chain_kernel(const arguments k)\n{\n", TD_CHAIN_THREADS);
    int number = first_stride(c);
    for (int i = 0; i < c->header.inputs; i++)
        if (!c->steps[i]) add_load(&text, c, i, &number);
    td_text_add(&text, "    for (unsigned i = blockIdx.x * %d + threadIdx.x; i < k.number[0]; i += gridDim.x * %d) {\n", TD_CHAIN_THREADS,
                TD_CHAIN_THREADS);
    if (c->rank > 1) add_indices(&text, c);
    for (int i = 0; i < c->header.inputs; i++)
        if (c->steps[i]) add_load(&text, c, i, &number);
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
    return true;
}

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
    if (wants_kernel(td, plan) && !(plan->kernel = kernel_of(td, plan))) {
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
    uint64_t argument[TD_FUSED_INPUTS + TD_FUSED_OUTPUTS + (TD_CHAIN_NUMBERS + 1) / 2];
    int words = 0;
    for (int i = 0; i < k->inputs; i++) argument[words++] = (uintptr_t)k->in[i].data;
    for (int o = 0; o < k->outputs; o++) argument[words++] = (uintptr_t)k->out[o].data;
    memcpy(argument + words, plan->numbers.at, (size_t)plan->numbers.count * sizeof *plan->numbers.at);
    enum { BLOCKS_EACH = 64 }; /* of a multiprocessor, which holds 16 at most: the last ones to run are a small part */
    int64_t most = (int64_t)td_cuda_limits_of(k->run->td).multiprocessors * BLOCKS_EACH;
    unsigned blocks = (unsigned)td_smaller(td_blocks_for(plan->numbers.at[0], TD_CHAIN_THREADS, 1), most);
    cudaError_t status = cudaLaunchKernel((const void *)plan->kernel, (dim3){ blocks, 1, 1 }, (dim3){ TD_CHAIN_THREADS, 1, 1 },
                                          (void *[]){ argument }, 0, td_stream(k));
    td_cuda_ok(k->run->td, status, k->op->name);
}
