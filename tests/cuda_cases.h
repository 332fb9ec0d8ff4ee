/* What tests of CUDA's kernels share, on a GPU (test_cuda.c) and with the host as one (test_kernels_on_host.c): every operation with its
 * cases and gradients in every float dtype, and what is made by passes alone, against the CPU. */
#ifndef TANDEM_TESTS_CUDA_CASES_H
#define TANDEM_TESTS_CUDA_CASES_H

#include "core/ops/attention.h"
#include "core/ops/norm.h"
#include "tests/empty.h"

static inline CHECK_UNUSED td_context *open_gpu(td_dtype dtype, bool poison)
{
    return td_open(&(td_options){ .device = "cuda", .dtype = dtype, .seed = 1, .threads = 2, .poison = poison, .log = check_log_line });
}

/* ---- Operations */

/* In 16 bits the CPU computes in them too, where it can: what differs is the GPU, not the roundings of the form.
 *
 * What a case gives: the result, then the gradient of each input that has one, as doubles. */
typedef struct outcome {
    double *values;
    int64_t part[1 + INPUTS];                 /* elements of the result and of each gradient */
    int64_t count;
    bool missing;                             /* the operation cannot be run there */
    char error[300];
} outcome;

static bool has_gradient(const td_op *op, const td_case *c) { return op->gradient && !c->no_gradient_check; }

enum { NOISE = 1 << 24, TRIALS = 12 };

/* The case in `dtype`, with inputs and result as td_float. */
static td_tensor record_case(td_context *td, const td_op *op, const td_case *c, case_data *d, td_dtype dtype, td_tensor keep[1 + INPUTS])
{
    td_tensor in[INPUTS], narrow[INPUTS];
    record_inputs(td, d, in);
    for (int i = 0; i < d->inputs; i++) {
        narrow[i] = stays_wide(op, d, i) || dtype == td_float(td) ? in[i] : td_cast(in[i], dtype);
        if (!stays_wide(op, d, i) && td_float(td) == TD_F64 && dtype != TD_F32) narrow[i] = td_cast(narrow[i], TD_F64); /* rounded, computed in f64 */
    }
    td_tensor y = td_record(op, TD_HERE, d->inputs, narrow, c->attr);
    keep[0] = td_dtype_at(y) == td_float(td) ? y : td_cast(y, td_float(td));
    td_keep(keep[0]);
    for (int i = 0; i < d->inputs; i++) {
        keep[1 + i] = TD_NO_TENSOR;
        if (is_label(d, i) || !has_gradient(op, c)) continue;
        keep[1 + i] = td_gradient(project(y, 0), in[i]);
        td_keep(keep[1 + i]);
    }
    return y;
}

/* What becomes of the inputs' numbers before they are used: noise of each, relative to it; and the middle one of an input is no number. */
typedef struct change {
    double noise;
    int lost;                                 /* the input; from 1 */
} change;

static outcome outcome_changed(td_context *td, const td_op *op, const td_case *c, td_dtype dtype, uint64_t start, int runs, change how)
{
    outcome o = { .count = 0 };
    case_data d = data_from(c, start);
    if (how.lost && d.elements[how.lost - 1]) d.values[how.lost - 1][d.elements[how.lost - 1] / 2] = NAN;
    for (int i = 0; i < d.inputs && how.noise > 0; i++)
        for (int64_t e = 0; e < d.elements[i]; e++) d.values[i][e] *= 1 + how.noise * check_normal(start + NOISE + (uint64_t)e);
    td_tensor keep[1 + INPUTS];
    for (int r = 0; r < runs; r++) {
        record_case(td, op, c, &d, dtype, keep);
        if (td_step(td)) continue;
        snprintf(o.error, sizeof o.error, "%s", td_error_text(td));
        o.missing = strstr(o.error, "cannot be run on a GPU") != NULL;
        td_clear_error(td);
        return o;
    }
    for (int i = 0; i < 1 + d.inputs; i++)
        if (keep[i].td) o.count += o.part[i] = td_shape_elements(td_shape_at(keep[i]));
    o.values = check_alloc((size_t)o.count * sizeof *o.values + 1);
    double *to = o.values;
    for (int i = 0; i < 1 + d.inputs; to += o.part[i], i++)
        if (keep[i].td) memcpy(to, check_read(keep[i], op->name, __FILE__, __LINE__), (size_t)o.part[i] * sizeof *to);
    return o;
}

static outcome outcome_of(td_context *td, const td_op *op, const td_case *c, td_dtype dtype, uint64_t start, int runs)
{
    return outcome_changed(td, op, c, dtype, start, runs, (change){ 0 });
}

/* How much of its norm the result or a gradient changes, at most, where each number of the inputs is off by what f32 rounds. */
static double condition(td_context *f64, const td_op *op, const td_case *c, uint64_t start)
{
    outcome at = outcome_of(f64, op, c, TD_F32, start, 1), near = outcome_changed(f64, op, c, TD_F32, start, 1, (change){ .noise = 0x1p-24 });
    double most = 0;
    if (!at.values) return 0;
    for (int i = 0, from = 0; i < 1 + INPUTS; from += (int)at.part[i], i++)
        most = fmax(most, relative_error(near.values + from, at.values + from, at.part[i]));
    return most;
}

/* Where inputs begin, from `start` on, that say something of a kernel: a sum that comes out near 0 by chance tells only what the numbers
 * were that it got. The first that are good, or the best of a few. */
static uint64_t well_conditioned(td_context *f64, const td_op *op, const td_case *c, uint64_t start)
{
    double least = INFINITY;
    uint64_t best = start;
    for (int trial = 0; trial < TRIALS && least > 2e-7; trial++, start += 2 * NOISE) {
        double now = condition(f64, op, c, start);
        if (now < least) least = now, best = start;
    }
    ck_assert_msg(least <= 1e-6, "%s: no inputs were found that f32 can be held to: %.2g", op->name, least);
    return best;
}

static const td_dtype dtypes[] = { TD_F32, TD_BF16, TD_F16 };

/* Says what differs; the number of cases that do. */
static int compare(const td_op *op, int number, td_dtype dtype, const outcome *got, const outcome *want)
{
    double allowed = dtype == TD_F32 ? 1e-5 : dtype == TD_BF16 ? 1e-2 : 0x1p-9; /* f16: four roundings of 2^-11, a few of which differ */
    const double *a = got->values, *b = want->values;
    int wrong = 0;
    for (int i = 0; i < 1 + INPUTS; a += want->part[i], b += want->part[i], i++) {
        double error = relative_error(a, b, want->part[i]);
        if (error <= allowed) continue;
        wrong = 1;
        printf("%s, case %d, %s: %s is off by %.3g (allowed %g)\n", op->name, number, td_dtype_name(dtype), i ? "a gradient" : "the result", error, allowed);
    }
    return wrong;
}

static CHECK_UNUSED void check_operations(bool poison, uint64_t start)
{
    td_context *gpu = open_gpu(TD_F32, poison), *cpu = open_cpu(TD_F64), *alike = open_cpu(TD_F32);
    int wrong = 0, checked = 0, missing = 0;
    printf("inputs from draw %llu on\n", (unsigned long long)start);
    for (int o = 0; o < OPERATIONS; o++)
        for (int c = 0; c < cases_of(operations[o]); c++) {
            const td_op *op = operations[o];
            uint64_t at = well_conditioned(cpu, op, &op->cases[c], start);
            for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++) {
                outcome want = { .count = 0 };
                if (dtypes[t] != TD_F32) want = outcome_of(alike, op, &op->cases[c], dtypes[t], at, 1);
                if (!want.values) want = outcome_of(cpu, op, &op->cases[c], dtypes[t], at, 1); /* has no products of f16 */
                if (!want.values) continue; /* not of floats */
                outcome got = outcome_of(gpu, op, &op->cases[c], dtypes[t], at, poison ? 1 : 3);
                if (!got.values) {
                    printf("%s, case %d, %s: %s\n", op->name, c, td_dtype_name(dtypes[t]), got.error);
                    missing += got.missing;
                    wrong += !got.missing;
                    continue;
                }
                checked++;
                wrong += compare(op, c, dtypes[t], &got, &want);
            }
        }
    printf("%d cases checked, %d wrong, %d not to be had on a GPU\n", checked, wrong, missing);
    ck_assert_int_eq(wrong, 0);
    ck_assert_int_eq(missing, 0);
    ck_assert_int_gt(checked, 300);
    td_close(gpu);
    td_close(alike);
    td_close(cpu);
}

/* The values that are no number on the CPU and one here; that tiles spread it further is no fault. Of attention, where what is masked is left out
 * or multiplied by 0 as tiles fall, the results and gradients that have any on the CPU and none here. */
static int64_t made_up(const td_op *op, const outcome *got, const outcome *want)
{
    int64_t count = 0;
    for (int64_t i = 0, e = 0; i < 1 + INPUTS; i++) {
        int64_t lost[2] = { 0, 0 }, end = e + want->part[i];
        for (; e < end; e++) {
            bool none = isnan(want->values[e]), here = isnan(got->values[e]);
            lost[0] += none;
            lost[1] += here;
            count += op != &td_op_attention && none && !here;
        }
        count += op == &td_op_attention && lost[0] && !lost[1];
    }
    return count;
}

/* A number of each input in turn is lost: how often results or gradients that it spreads to are numbers nevertheless. */
static int count_made_up(td_context *gpu, td_context *cpu, const td_op *op, int number, td_dtype dtype, int *checked)
{
    const td_case *c = &op->cases[number];
    case_data d = data_of(c);
    int wrong = 0;
    for (int i = 0; i < d.inputs; i++) {
        if (is_label(&d, i)) continue;
        change lost = { .lost = i + 1 };
        outcome want = outcome_changed(cpu, op, c, dtype, 1, 1, lost), got = outcome_changed(gpu, op, c, dtype, 1, 1, lost);
        if (!want.values || !got.values) continue; /* not to be had there */
        int64_t count = made_up(op, &got, &want);
        ++*checked;
        wrong += count > 0;
        if (count) printf("%s, case %d, %s, input %d: %lld values, of %lld, are numbers that are none on the CPU\n", op->name, number,
                          td_dtype_name(dtype), i, (long long)count, (long long)want.count);
    }
    return wrong;
}

/* A run must not go on from what is no number as if it were one. */
static CHECK_UNUSED void check_what_is_no_number(void)
{
    td_context *gpu = open_gpu(TD_F32, false), *cpu = open_cpu(TD_F32);
    int wrong = 0, checked = 0;
    for (int o = 0; o < OPERATIONS; o++)
        for (int c = 0; c < cases_of(operations[o]); c++)
            for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++) wrong += count_made_up(gpu, cpu, operations[o], c, dtypes[t], &checked);
    printf("%d lost numbers followed, %d made up\n", checked, wrong);
    ck_assert_int_eq(wrong, 0);
    ck_assert_int_gt(checked, 300);
    td_close(gpu);
    td_close(cpu);
}

/* ---- Attention: 16-bit operands against the same numbers in f32 */

typedef struct attention_case {
    const char *note;
    int64_t batch, heads, shared, positions, depth;
    td_attention_attr attr;
} attention_case;

/* Heads [begin, end) columns of x (B, T, columns), as a layer cuts them. */
static td_tensor heads_at(td_tensor x, int64_t begin, int64_t heads, int64_t depth)
{
    td_shape shape = td_shape_at(x);
    td_tensor columns = td_slice(x, 2, begin, begin + heads * depth);
    td_tensor cut = td_reshape(columns, shape.dim[0], shape.dim[1], heads, depth);
    return td_transpose(cut, 1, 2);
}

/* o (B, T, H d), then the gradient of the rows that q, k and v are the columns of. Computed in `dtype`, or in f32 from numbers of it; of `how`
 * counts what is the same run after run, and which passes are left out. */
static double *attention_of(const attention_case *c, td_dtype dtype, bool wide, td_options how)
{
    td_context *td = td_open(&(td_options){ .device = "cuda", .dtype = TD_F32, .seed = 1, .threads = 2, .deterministic = how.deterministic,
                                            .passes = how.passes, .log = check_log_line });
    int64_t queries = c->heads * c->depth, keys = c->shared * c->depth, rows = c->batch * c->positions, width = queries + 2 * keys;
    float *numbers = check_alloc((size_t)(rows * width) * sizeof *numbers);
    for (int64_t i = 0; i < rows * width; i++) numbers[i] = (float)check_normal((uint64_t)i + 1);
    int32_t lengths[8], positions[8];
    for (int64_t b = 0; b < c->batch; b++) {
        lengths[b] = (int32_t)(c->positions - b * 37);
        positions[b] = (int32_t)(b * 11 % 3) - 1;
    }
    td_tensor x = td_input(td, "x", TD_F32, TD_SHAPE(c->batch, c->positions, width), numbers), narrow = td_cast(x, dtype);
    if (wide) narrow = td_cast(narrow, TD_F32);
    td_tensor in[5] = { heads_at(narrow, 0, c->heads, c->depth), heads_at(narrow, queries, c->shared, c->depth),
                        heads_at(narrow, queries + keys, c->shared, c->depth) };
    int n = 3;
    if (c->attr.lengths) in[n++] = td_input(td, "lengths", TD_I32, TD_SHAPE(c->batch), lengths);
    if (c->attr.positions) in[n++] = td_input(td, "positions", TD_I32, TD_SHAPE(c->batch), positions);
    td_attention_attr attr = c->attr;
    attr.scale = 1 / sqrt((double)c->depth);
    td_tensor y = td_transpose(td_record(&td_op_attention, TD_HERE, n, in, &attr), 1, 2);
    td_tensor o = td_cast(td_reshape(y, c->batch, c->positions, queries), TD_F32);
    td_tensor dx = td_gradient(project(o, 0), x);
    td_keep(o);
    td_keep(dx);
    ck_assert_msg(td_step(td), "%s: %s", c->note, td_error_text(td));
    double *all = check_alloc((size_t)(rows * (queries + width)) * sizeof *all);
    memcpy(all, check_read(o, c->note, __FILE__, __LINE__), (size_t)(rows * queries) * sizeof *all);
    memcpy(all + rows * queries, check_read(dx, c->note, __FILE__, __LINE__), (size_t)(rows * width) * sizeof *all);
    td_close(td);
    return all;
}

/* As relative_error, over columns [begin, begin + columns) of rows. */
static double column_error(const double *got, const double *want, int64_t rows, int64_t width, int64_t begin, int64_t columns)
{
    double error = 0, size = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = begin; c < begin + columns; c++) {
            double a = got[r * width + c], b = want[r * width + c];
            error += (a - b) * (a - b);
            size += b * b;
        }
    return sqrt(error / size);
}

/* Without fuse, how.passes, the gradients of q, k and v are three outputs in f32, else one in 16 bits. */
static int check_attention(const attention_case *c, td_dtype dtype, td_options how)
{
    int64_t queries = c->heads * c->depth, keys = c->shared * c->depth, rows = c->batch * c->positions, width = queries + 2 * keys;
    const double *got = attention_of(c, dtype, false, how), *want = attention_of(c, dtype, true, (td_options){ .passes = NULL });
    const double *dx = got + rows * queries, *dx_want = want + rows * queries;
    double errors[] = { relative_error(got, want, rows * queries), column_error(dx, dx_want, rows, width, 0, queries),
                        column_error(dx, dx_want, rows, width, queries, keys),
                        column_error(dx, dx_want, rows, width, queries + keys, keys) };
    printf("%s, %s%s%s: o %.2g, dq %.2g, dk %.2g, dv %.2g\n", c->note, td_dtype_name(dtype), how.deterministic ? ", deterministic" : "",
           how.passes ? ", in f32" : "", errors[0], errors[1], errors[2], errors[3]);
    int wrong = 0;
    for (int i = 0; i < 4; i++) wrong += !(errors[i] <= 1e-2);
    return wrong;
}

/* ---- What only fuse makes: masks of dropout that chains draw */

/* r + drop(x) and what of its gradient comes to x, after `steps` steps: as many updates have drawn masks. */
static const double *dropped_values(bool gpu, td_shape shape, int steps)
{
    td_context *td = gpu ? open_gpu(TD_F32, false) : open_cpu(TD_F32);
    int64_t count = td_shape_elements(shape);
    double *values = check_alloc((size_t)(2 * count) * sizeof *values);
    for (int s = 0; s < steps; s++) {
        check_now.draws = 0; /* the same numbers each time */
        td_tensor x = check_randn(td, shape), r = check_randn(td, shape);
        td_tensor y = td_add(r, td_dropout(td_dropout(x, 0.2), 0.5)), dx = td_gradient(td_sum(td_mul(y, r), TD_ALL, TD_DROP), x);
        td_keep(y);
        td_keep(dx);
        ck_assert_msg(td_step(td), "%s", td_error_text(td));
        memcpy(values, check_read(y, "y", __FILE__, __LINE__), (size_t)count * sizeof *values);
        memcpy(values + count, check_read(dx, "dx", __FILE__, __LINE__), (size_t)count * sizeof *values);
    }
    td_close(td);
    return values;
}

static CHECK_UNUSED void check_masks(const td_shape *shapes, int count)
{
    for (int i = 0; i < count; i++)
        for (int steps = 1; steps <= 4; steps += 3)
            ck_assert_mem_eq(dropped_values(true, shapes[i], steps), dropped_values(false, shapes[i], steps),
                             (size_t)(2 * td_shape_elements(shapes[i])) * sizeof(double));
}

/* ---- What only fuse makes: norms of each kernel's lengths, written in 16 bits, their gradients added and written twice */

enum { NORM_ROWS = 37, NORM_VALUES = 3 };

/* dx + r, the narrow dx + r and the narrow norm, widened, (rows, columns) each. */
static void norm_values(td_context *td, int64_t columns, td_dtype narrow, double *to)
{
    static float data[4][NORM_ROWS * 9001];
    td_tensor in[4]; /* x, weight, dy, r */
    for (int i = 0; i < 4; i++) {
        td_shape shape = i == 1 ? TD_SHAPE(columns) : TD_SHAPE(NORM_ROWS, columns);
        for (int64_t e = 0; e < td_shape_elements(shape); e++) data[i][e] = (float)check_normal((uint64_t)(e * 4 + i));
        in[i] = td_input(td, "in", TD_F32, shape, data[i]);
    }
    const td_norm_attr attr = { .eps = 1e-5, .centered = 1, .bias = 1, .narrow = (int32_t)narrow, .adds = 1 };
    td_tensor dx = td_record(&td_op_norm_gradient, TD_HERE, 4, in, &attr);
    td_tensor y = td_record(&td_op_layer_norm, TD_HERE, 2, in, &(td_norm_attr){ .eps = 1e-5, .centered = 1, .narrow = (int32_t)narrow });
    td_tensor values[NORM_VALUES] = { dx, td_cast(td_output(dx, 3), TD_F32), td_cast(y, TD_F32) };
    for (int v = 0; v < NORM_VALUES; v++) td_keep(values[v]);
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    for (int v = 0; v < NORM_VALUES; v++)
        memcpy(to + v * NORM_ROWS * columns, check_read(values[v], "a norm", __FILE__, __LINE__), (size_t)(NORM_ROWS * columns) * sizeof *to);
}

static CHECK_UNUSED void check_norms(const int64_t *columns, int count)
{
    static double want[NORM_VALUES * NORM_ROWS * 9001], got[NORM_VALUES * NORM_ROWS * 9001];
    td_context *gpu = open_gpu(TD_F32, true), *cpu = open_cpu(TD_F32);
    for (int i = 0; i < 2 * count; i++) {
        int64_t width = columns[i / 2], elements = NORM_ROWS * width;
        td_dtype narrow = i % 2 ? TD_F16 : TD_BF16;
        norm_values(cpu, width, narrow, want);
        norm_values(gpu, width, narrow, got);
        for (int v = 0; v < NORM_VALUES; v++) {
            double error = relative_error(got + v * elements, want + v * elements, elements);
            ck_assert_msg(error <= (v ? 1e-3 : 1e-5), "%lld columns, %s, value %d: off by %.3g", (long long)width, td_dtype_name(narrow), v, error);
        }
    }
    td_close(gpu);
    td_close(cpu);
}

/* ---- Products with epilogues */

typedef struct epilogue_case {
    int64_t rows, in, out;                    /* of a layer */
} epilogue_case;

enum { MOST_VALUES = 3, MOST_ROWS = 1024, MOST_COLUMNS = 3072, OPERANDS = 4 };

/* Kept values of each case, as many as there are. */
typedef struct values {
    int count;
    td_tensor value[MOST_VALUES];
} values;

/* Numbers of `dtype`, on a CPU widened to f32 again: those of operand number `which`. */
static td_tensor narrow_numbers(td_context *td, td_dtype dtype, td_shape shape, int which)
{
    static float drawn[MOST_ROWS * MOST_COLUMNS + OPERANDS];
    if (drawn[0] == 0)
        for (int64_t i = 0; i < MOST_ROWS * MOST_COLUMNS + OPERANDS; i++) drawn[i] = (float)check_normal((uint64_t)i + 1);
    td_tensor x = td_cast(td_input(td, "x", TD_F32, shape, drawn + which), dtype);
    return td->device->is_gpu ? x : td_cast(x, TD_F32);
}

/* dw (out, in) in f32 or in `dtype`, db (out), which is in f32 */
static values record_sums(td_context *td, const epilogue_case *c, td_dtype dtype, int32_t result)
{
    td_tensor dy = narrow_numbers(td, dtype, TD_SHAPE(c->rows, c->out), 0), x = narrow_numbers(td, dtype, TD_SHAPE(c->rows, c->in), 1);
    op_matmul_attr attr = { .transpose_a = 1, .out_dtype = result };
    td_tensor dw = td_record(&td_op_matmul_dbias, TD_HERE, 2, (td_tensor[]){ dy, x }, &attr);
    return (values){ 2, { dw, td_output(dw, 1) } };
}

static values record_dbias(td_context *td, const epilogue_case *c, td_dtype dtype) { return record_sums(td, c, dtype, TD_F32); }
static values record_dbias_narrow(td_context *td, const epilogue_case *c, td_dtype dtype) { return record_sums(td, c, dtype, -1); }

typedef values (*record_epilogue)(td_context *td, const epilogue_case *c, td_dtype dtype);

/* How products are made, and what else there is to see: memory that nobody wrote, graphs, the parts by themselves. */
typedef enum way { POISONED, GRAPHS, PARTS, WAYS } way;

/* Three runs: the first chooses, and where memory is not erased between calls the others are graphs. */
static void run_epilogue(td_context *td, record_epilogue record, const epilogue_case *c, td_dtype dtype, const double *to[MOST_VALUES],
                         int64_t counts[MOST_VALUES])
{
    values v = { 0 };
    for (int run = 0; run < (td->device->is_gpu ? 3 : 1); run++) {
        v = record(td, c, dtype);
        for (int i = 0; i < v.count; i++) td_keep(v.value[i] = td_cast(v.value[i], TD_F32));
        ck_assert_msg(td_step(td), "%s", td_error_text(td));
    }
    for (int i = 0; i < v.count; i++) {
        counts[i] = td_shape_elements(td_shape_at(v.value[i]));
        double *copy = check_alloc((size_t)counts[i] * sizeof *copy + 1);
        to[i] = memcpy(copy, check_read(v.value[i], "an epilogue", __FILE__, __LINE__), (size_t)counts[i] * sizeof *copy);
    }
}

/* Against the CPU in f32, and again in the same context: the same bits. `beside`: what the values behind the first may be off by. */
static void check_epilogue(const char *name, record_epilogue record, const epilogue_case *cases, int count, double allowed,
                           double beside, way how)
{
    td_context *cpu = open_cpu(TD_F32);
    td_context *gpu = td_open(&(td_options){ .device = "cuda", .dtype = TD_F32, .seed = 1, .threads = 2, .poison = how == POISONED,
                                             .deterministic = how == PARTS, .log = check_log_line });
    for (int i = 0; i < 2 * count; i++) {
        const epilogue_case *c = &cases[i / 2];
        td_dtype dtype = dtypes[1 + i % 2];
        const double *want[MOST_VALUES] = { NULL }, *got[MOST_VALUES] = { NULL }, *again[MOST_VALUES] = { NULL };
        int64_t counts[MOST_VALUES] = { 0 };
        run_epilogue(cpu, record, c, dtype, want, counts);
        run_epilogue(gpu, record, c, dtype, got, counts);
        run_epilogue(gpu, record, c, dtype, again, counts);
        for (int v = 0; v < MOST_VALUES; v++) {
            if (!want[v]) continue;
            double error = relative_error(got[v], want[v], counts[v]);
            ck_assert_msg(error <= (v ? beside : allowed), "%s of (%lld, %lld, %lld), %s, value %d: off by %.3g", name, (long long)c->rows,
                          (long long)c->in, (long long)c->out, td_dtype_name(dtype), v, error);
            ck_assert_mem_eq(got[v], again[v], (size_t)counts[v] * sizeof(double));
        }
    }
    td_close(gpu);
    td_close(cpu);
}

/* gelu, and what it was of, (rows, out) */
static values record_gelu(td_context *td, const epilogue_case *c, td_dtype dtype)
{
    td_tensor x = narrow_numbers(td, dtype, TD_SHAPE(c->rows, c->in), 0), b = narrow_numbers(td, dtype, TD_SHAPE(c->out), 2);
    td_tensor w = narrow_numbers(td, dtype, TD_SHAPE(c->out, c->in), 1);
    td_tensor g = td_record(&td_op_linear_gelu, TD_HERE, 3, (td_tensor[]){ x, w, b }, &(td_linear_gelu_attr){ .keeps = 1 });
    return (values){ 2, { g, td_output(g, 1) } };
}

/* gelu by itself */
static values record_gelu_alone(td_context *td, const epilogue_case *c, td_dtype dtype)
{
    td_tensor x = narrow_numbers(td, dtype, TD_SHAPE(c->rows, c->in), 0), b = narrow_numbers(td, dtype, TD_SHAPE(c->out), 2);
    td_tensor w = narrow_numbers(td, dtype, TD_SHAPE(c->out, c->in), 1);
    return (values){ 1, { td_record(&td_op_linear_gelu, TD_HERE, 3, (td_tensor[]){ x, w, b }, &(td_linear_gelu_attr){ .keeps = 0 }) } };
}

/* dx (rows, out) of what gelu was of */
static values record_dgelu(td_context *td, const epilogue_case *c, td_dtype dtype)
{
    td_tensor dy = narrow_numbers(td, dtype, TD_SHAPE(c->rows, c->in), 0), w = narrow_numbers(td, dtype, TD_SHAPE(c->in, c->out), 1);
    td_tensor x = narrow_numbers(td, dtype, TD_SHAPE(c->rows, c->out), 2);
    return (values){ 1, { td_record(&td_op_matmul_dgelu, TD_HERE, 3, (td_tensor[]){ dy, w, x }, &(op_matmul_attr){ .out_dtype = -1 }) } };
}

/* x, w and b of a layer whose bias has a first element that is no number: so is the first column of what it gives, and no other. */
static void lost_operands(td_context *td, const epilogue_case *c, td_dtype dtype, td_tensor in[3])
{
    static float bias[MOST_COLUMNS];
    bias[0] = NAN;
    in[0] = narrow_numbers(td, dtype, TD_SHAPE(c->rows, c->in), 0);
    in[1] = narrow_numbers(td, dtype, TD_SHAPE(c->out, c->in), 1);
    in[2] = td_cast(td_input(td, "b", TD_F32, TD_SHAPE(c->out), bias), dtype);
}

static values record_gelu_of_nan(td_context *td, const epilogue_case *c, td_dtype dtype)
{
    td_tensor in[3];
    lost_operands(td, c, dtype, in);
    return (values){ 1, { td_record(&td_op_linear_gelu, TD_HERE, 3, in, &(td_linear_gelu_attr){ .keeps = 0 }) } };
}

/* As a layer with relu is recorded: the library's relu would make 0 of it. */
static values record_relu_of_nan(td_context *td, const epilogue_case *c, td_dtype dtype)
{
    td_tensor in[3];
    lost_operands(td, c, dtype, in);
    return (values){ 1, { td_relu(td_linear(in[0], in[1], in[2])) } };
}

static void check_nan(const char *what, record_epilogue record, const epilogue_case *cases, int count, way how)
{
    td_context *gpu = td_open(&(td_options){ .device = "cuda", .dtype = TD_F32, .seed = 1, .threads = 2, .poison = how == POISONED,
                                             .deterministic = how == PARTS, .log = check_log_line });
    for (int i = 0; i < 2 * count; i++) {
        const epilogue_case *c = &cases[i / 2];
        const double *got[MOST_VALUES] = { NULL };
        int64_t counts[MOST_VALUES] = { 0 };
        run_epilogue(gpu, record, c, dtypes[1 + i % 2], got, counts);
        for (int64_t e = 0; e < counts[0]; e++)
            ck_assert_msg(isnan(got[0][e]) == (e % c->out == 0), "%s of (%lld, %lld, %lld), %s: element %lld is %g", what, (long long)c->rows,
                          (long long)c->in, (long long)c->out, td_dtype_name(dtypes[1 + i % 2]), (long long)e, got[0][e]);
    }
    td_close(gpu);
}

static CHECK_UNUSED void check_epilogues(const epilogue_case *cases, int count)
{
    for (way how = 0; how < WAYS; how++) {
        check_epilogue("dbias", record_dbias, cases, count, 1e-5, 1e-5, how);
        check_epilogue("dbias beside 16 bits", record_dbias_narrow, cases, count, 1e-2, 1e-5, how);
        check_epilogue("gelu, kept", record_gelu, cases, count, 1e-2, 1e-2, how);
        check_epilogue("gelu", record_gelu_alone, cases, count, 1e-2, 1e-2, how);
        check_epilogue("dgelu", record_dgelu, cases, count, 1e-2, 1e-2, how);
    }
    check_nan("gelu", record_gelu_of_nan, cases, count, GRAPHS);
    check_nan("gelu in parts", record_gelu_of_nan, cases, count, PARTS);
    check_nan("relu", record_relu_of_nan, cases, count, GRAPHS);
}

/* ---- A loss that comes with its gradient */

enum { LOSS_ROWS = 12 };

static CHECK_UNUSED void check_loss(const int64_t *classes, int count)
{
    static float logits[LOSS_ROWS * 20000];
    int32_t labels[LOSS_ROWS];
    for (int i = 0; i < LOSS_ROWS * 20000; i++) logits[i] = (float)check_normal((uint64_t)i);
    for (int i = 0; i < count; i++) {
        const double *values[2][2];
        td_context *on[2] = { open_cpu(TD_F32), open_gpu(TD_F32, true) };
        for (int r = 0; r < LOSS_ROWS; r++) labels[r] = (int32_t)(r * 7919 % classes[i]);
        for (int d = 0; d < 2; d++) {
            td_tensor x = td_input(on[d], "x", TD_F32, TD_SHAPE(LOSS_ROWS, classes[i]), logits);
            td_tensor loss = td_cross_entropy(x, td_input(on[d], "labels", TD_I32, TD_SHAPE(LOSS_ROWS), labels)), dx = td_gradient(loss, x);
            td_keep(loss);
            td_keep(dx);
            ck_assert_msg(td_step(on[d]), "%s", td_error_text(on[d]));
            values[d][0] = check_read(loss, "the loss", __FILE__, __LINE__);
            values[d][1] = check_read(dx, "its gradient", __FILE__, __LINE__);
        }
        ck_assert_double_le(relative_error(values[1][0], values[0][0], 1), 1e-5);
        ck_assert_double_le(relative_error(values[1][1], values[0][1], LOSS_ROWS * classes[i]), 1e-5);
        td_close(on[0]);
        td_close(on[1]);
    }
}

/* ---- Losses of rows in 16 bits, as long as a vocabulary */

typedef struct loss_case {
    int64_t rows, classes;
} loss_case;

/* Every row is of one of these kinds, by its number. */
enum { CERTAIN, NO_LABEL, AT_THE_END, MASKED, BEHIND_THE_END, NOT_A_NUMBER, ROW_KINDS };

typedef struct row_losses {
    float *logits, *d;
    int32_t *labels;
    double *loss, *dx;                        /* (rows), (rows, classes) */
} row_losses;

static void draw_rows(const loss_case *c, const row_losses *r)
{
    for (int64_t i = 0; i < c->rows * c->classes; i++) r->logits[i] = (float)check_normal((uint64_t)i);
    for (int64_t row = 0; row < c->rows; row++) {
        float *x = r->logits + row * c->classes;
        int64_t kind = row % ROW_KINDS, last = c->classes - 1, label = row * 7919 % c->classes;
        if (kind == CERTAIN) x[label] = (float)log((double)c->classes) + 9; /* all others are of 0.0002 */
        if (kind == MASKED) x[(label + 5) % c->classes] = -INFINITY;
        if (kind == NOT_A_NUMBER) x[(label + 5) % c->classes] = NAN;
        r->labels[row] = (int32_t)(kind == NO_LABEL ? -1 : kind == AT_THE_END ? last : kind == BEHIND_THE_END ? last + 1 : label);
        r->d[row] = kind == CERTAIN ? 1 << 20 : (float)(64 + row % 7); /* so that no 16-bit gradient is denormal */
    }
}

/* On a CPU of the same logits widened to f32 again. */
static void take_losses(td_context *td, td_dtype dtype, const loss_case *c, const row_losses *r)
{
    td_tensor x = td_cast(td_input(td, "x", TD_F32, TD_SHAPE(c->rows, c->classes), r->logits), dtype);
    td_tensor labels = td_input(td, "labels", TD_I32, TD_SHAPE(c->rows), r->labels), d = td_input(td, "d", TD_F32, TD_SHAPE(c->rows), r->d);
    if (!td->device->is_gpu) x = td_cast(x, TD_F64), d = td_cast(d, TD_F64);
    td_tensor loss = td_record(&td_op_cross_entropy_rows, TD_HERE, 2, (td_tensor[]){ x, labels }, NULL);
    td_tensor dx = td_cast(td_gradient(td_sum(td_mul(loss, d), TD_ALL, TD_DROP), x), TD_F32);
    td_keep(loss);
    td_keep(dx);
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    memcpy(r->loss, check_read(loss, "losses", __FILE__, __LINE__), (size_t)c->rows * sizeof *r->loss);
    memcpy(r->dx, check_read(dx, "their gradients", __FILE__, __LINE__), (size_t)(c->rows * c->classes) * sizeof *r->dx);
}

/* The label's element is larger than all others together: it is looked at by itself. */
static void compare_row(const char *name, const loss_case *c, const row_losses *got, const row_losses *want, int64_t row)
{
    double *a = got->dx + row * c->classes, *b = want->dx + row * c->classes, loss = want->loss[row];
    int32_t label = want->labels[row];
    if (isnan(loss)) {
        ck_assert_msg(isnan(got->loss[row]), "%s, row %lld: the loss should be NaN", name, (long long)row);
        for (int64_t i = 0; i < c->classes; i++)
            ck_assert_msg(isnan(a[i]), "%s, row %lld: element %lld should be NaN", name, (long long)row, (long long)i);
        return;
    }
    ck_assert_msg(fabs(got->loss[row] - loss) <= 1e-5 * (1 + loss), "%s, row %lld: a loss of %g, not %g", name, (long long)row, got->loss[row], loss);
    ck_assert_msg(fabs(a[label] - b[label]) <= 1e-2 * fabs(b[label]), "%s, row %lld: %g at the label, not %g", name, (long long)row, a[label], b[label]);
    a[label] = b[label] = 0;
    double error = relative_error(a, b, c->classes);
    ck_assert_msg(error <= 4e-3, "%s, row %lld: off by %.3g beside the label", name, (long long)row, error);
}

/* Against the CPU in f64: beside the certain an f32 sum loses what is small. */
static CHECK_UNUSED void check_narrow_losses(const loss_case *cases, int count)
{
    td_context *cpu = open_cpu(TD_F64), *gpu = open_gpu(TD_F32, true);
    for (int i = 0; i < 2 * count; i++) {
        const loss_case *c = &cases[i / 2];
        size_t rows = (size_t)c->rows, elements = rows * (size_t)c->classes;
        td_dtype dtype = dtypes[1 + i % 2];
        char name[80];
        row_losses want = { check_alloc(elements * sizeof(float)), check_alloc(rows * sizeof(float)), check_alloc(rows * sizeof(int32_t)),
                            check_alloc(rows * sizeof(double)), check_alloc(elements * sizeof(double)) }, got = want;
        got.loss = check_alloc(rows * sizeof(double)), got.dx = check_alloc(elements * sizeof(double));
        draw_rows(c, &want);
        take_losses(cpu, dtype, c, &want);
        take_losses(gpu, dtype, c, &got);
        snprintf(name, sizeof name, "(%lld, %lld), %s", (long long)c->rows, (long long)c->classes, td_dtype_name(dtype));
        for (int64_t row = 0; row < c->rows; row++) compare_row(name, c, &got, &want, row);
    }
    td_close(gpu);
    td_close(cpu);
}

#endif
