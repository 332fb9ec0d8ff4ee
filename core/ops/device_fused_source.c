/* The source of chains' kernels, and the numbers that these are given: see device_fused.h.
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
 *
 * Where rows are reduced, a warp's each here, rows_cuda.h comes before the functions, the last three numbers say how rows are cut, and for
 * s = sum(x x) of x (N, D) the kernel is
 *
 *         const unsigned lane = threadIdx.x % lanes;
 *         for (unsigned first = blockIdx.x * (128 / lanes); first < k.number[0]; first += gridDim.x * (128 / lanes)) {
 *             const unsigned part = first + threadIdx.x / lanes;
 *             const td_range groups = td_range_of(part, k.number[0], k.number[1], k.number[2], k.number[3]);
 *             T z0[1] = { td_sum::start() };
 *             for (unsigned i = groups.begin + lane; i < groups.end; i += lanes) {
 *                 T x0[width]; td_load<float>(k.in[0], i, x0);
 *                 T s0 = td_sum::start();
 *                 for (int v = 0; v < width; v++) {
 *                     const T t0 = op_mul(x0[v], x0[v]);
 *                     s0 = td_sum::of(s0, t0);
 *                 }
 *                 z0[0] = td_sum::of(z0[0], s0);
 *             }
 *             td_lanes_join<td_sum, lanes>(z0[0]);
 *             if (lane == 0 && part < k.number[0]) td_store<float>(k.out[0], part, z0);
 *         }
 */
#include "core/ops/device_fused.h"

#include "core/ops/divisor.h"
#include "core/ops/draw.h"

#include <stdio.h>

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
static const char in_rows[] =
#include "core/ops/rows_cuda.h"
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

static const char *const reductions[] = { [TD_FUSED_SUM] = "td_sum", [TD_FUSED_MAX] = "td_max" };

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

/* Whether an instruction or a reduction reads what instruction n makes. */
static bool is_read(const td_chain *c, int n)
{
    for (int m = n + 1; m < c->header.instructions; m++) {
        for (int s = 0; s < td_pointwise_inputs[c->code[m].function]; s++)
            if (c->code[m].from[s] == c->code[n].to) return true;
        if (c->code[m].to == c->code[n].to) return false;
    }
    for (int o = td_fused_full_outputs(&c->header); o < c->header.outputs; o++)
        if (c->output[o] == c->code[n].to) return true;
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
    int full = td_fused_full_outputs(&c->header);
    for (int i = 0; i < c->header.inputs; i++)
        snprintf(registers[i].text, sizeof registers->text, "x%d[%s]", i, c->steps[i] & 1 ? "v" : "0");
    for (int o = 0; o < full; o++) td_text_add(text, "        T y%d[width];\n", o);
    for (int o = 0; o < c->header.reduced; o++) td_text_add(text, "        T s%d = %s::start();\n", o, reductions[c->reduction[o]]);
    td_text_add(text, "        for (int v = 0; v < width; v++) {\n");
    for (int n = 0; n < c->header.instructions; n++) add_instruction(text, c, n, registers);
    for (int o = 0; o < full; o++) td_text_add(text, "            y%d[v] = %s;\n", o, registers[c->output[o]].text);
    for (int o = 0; o < c->header.reduced; o++)
        td_text_add(text, "            s%d = %s::of(s%d, %s);\n", o, reductions[c->reduction[o]], o, registers[c->output[full + o]].text);
    td_text_add(text, "        }\n");
    for (int o = 0; o < c->header.reduced; o++)
        td_text_add(text, "        z%d[0] = %s::of(z%d[0], s%d);\n", o, reductions[c->reduction[o]], o, o);
    for (int o = 0; o < full; o++)
        td_text_add(text, "        td_store<%s>(k.out[%d], i, y%d);\n", stored[c->out_dtype[o]], o, o);
}

/* The loop over groups, i: of all elements, or of a part of a row. */
static void add_loop(td_text *text, const td_chain *c, int number)
{
    int input_number = first_stride(c);
    if (c->row) {
        td_text_add(text,
                    "    const unsigned lane = threadIdx.x %% lanes;\n"
                    "    for (unsigned first = blockIdx.x * (%d / lanes); first < k.number[0]; first += gridDim.x * (%d / lanes)) {\n"
                    "    const unsigned part = first + threadIdx.x / lanes;\n"
                    "    const td_range groups = td_range_of(part, k.number[0], k.number[%d], k.number[%d], k.number[%d]);\n",
                    TD_CHAIN_THREADS, TD_CHAIN_THREADS, number, number + 1, number + 2);
        for (int o = 0; o < c->header.reduced; o++) td_text_add(text, "    T z%d[1] = { %s::start() };\n", o, reductions[c->reduction[o]]);
        td_text_add(text, "    for (unsigned i = groups.begin + lane; i < groups.end; i += lanes) {\n");
    } else {
        td_text_add(text, "    for (unsigned i = blockIdx.x * %d + threadIdx.x; i < k.number[0]; i += gridDim.x * %d) {\n", TD_CHAIN_THREADS,
                    TD_CHAIN_THREADS);
    }
    if (c->rank > 1) add_indices(text, c);
    for (int i = 0; i < c->header.inputs; i++)
        if (c->steps[i]) add_load(text, c, i, &input_number);
    if (c->header.draws) add_masks(text, c, &input_number);
    add_body(text, c);
    td_text_add(text, "    }\n");
}

/* What a part's threads have found together, and the end of the loop over parts. */
static void add_joins(td_text *text, const td_chain *c)
{
    int full = td_fused_full_outputs(&c->header);
    for (int o = 0; o < c->header.reduced; o++)
        td_text_add(text, "    td_lanes_join<%s, lanes>(z%d[0]);\n    if (lane == 0 && part < k.number[0]) td_store<%s>(k.out[%d], part, z%d);\n",
                    reductions[c->reduction[o]], o, stored[c->out_dtype[full + o]], full + o, o);
    if (c->row) td_text_add(text, "    }\n");
}

td_text td_chain_source(td_context *td, const td_chain *c, int width)
{
    td_text text = { .td = td };
    td_chain_numbers numbers;
    td_chain_numbers_of(c, width, &numbers);
    td_text_add(&text, "#define TD_FUNCTION static __device__ __forceinline__\n%s%s%s", c->wide ? in_f64 : "", in_cuda,
                c->header.draws ? drawing : "");
    td_text_add(&text, "typedef %s T;\nenum { width = %d };\n", c->wide ? "double" : "float", width);
    if (c->row) td_text_add(&text, "enum { lanes = %d };\n%s", td_chain_rows_of(c, width).lanes, in_rows);
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
    add_loop(&text, c, numbers.count - 3);
    add_joins(&text, c);
    td_text_add(&text, "}\n");
    if (td->error == TD_OK) return text;
    td_free(td, text.text, text.room, "host");
    return (td_text){ .td = td };
}

/* ---- Numbers -------------------------------------------------------------------------------------------- */

/* How many parts there are, instead of groups; last a row's groups, a chunk's, and how many chunks make a row. */
static void add_row_numbers(const td_chain *c, int width, td_chain_numbers *out)
{
    td_chain_rows rows = td_chain_rows_of(c, width);
    out->at[0] = (uint32_t)(rows.rows * rows.chunks);
    out->at[out->count++] = (uint32_t)(c->row / width);
    out->at[out->count++] = (uint32_t)(rows.chunk / width);
    out->at[out->count++] = (uint32_t)rows.chunks;
}

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
    if (c->row) add_row_numbers(c, width, out);
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
