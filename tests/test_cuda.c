/* A GPU gives what the CPU gives: every operation with its cases and gradients, in every float dtype; steps as graphs; models that train.
 * Without a GPU: the error that says so.
 * Labels: gpu
 * Timeout: 600 s
 */
#include <time.h>

#include "core/ops/norm.h"
#include "core/ops/attention.h"
#include "models/gpt/gpt.h"
#include "tests/cases.h"

#include <tandem/nn.h>
#include <tandem/optim.h>

static td_context *open_gpu(td_dtype dtype, bool poison)
{
    return td_open(&(td_options){ .device = "cuda", .dtype = dtype, .seed = 1, .threads = 2, .poison = poison, .log = check_log_line });
}

/* False, and the test counts as skipped. */
static bool gpu_for(const char *test)
{
    td_context *td = open_gpu(TD_F32, false);
    bool has = td_error(td) == TD_OK;
    if (!has) check_skip(test, "no CUDA device");
    td_close(td);
    return has;
}

START_TEST(test_what_cannot_be_had_is_said)
{
    static const struct { const char *device; td_dtype dtype; const char *says; } wrong[] = {
        { "gpu", TD_F32, "device 'gpu' is not known" },
        { "cuda:x", TD_F32, "device 'cuda:x'" },
        { "cuda:1000", TD_F32, "device 'cuda:1000'" },
        { "cuda", TD_F64, "f64" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        td_context *td = td_open(&(td_options){ .device = wrong[i].device, .dtype = wrong[i].dtype, .log = check_log_line });
        ck_assert_int_ne(td_error(td), TD_OK);
        ck_assert_str_has(td_error_text(td), wrong[i].says);
        td_close(td);
    }
}
END_TEST

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

/* Norms of 16-bit rows have weights in f32. */
static bool stays_wide(const td_op *op, const case_data *d, int i)
{
    bool norm = op == &td_op_layer_norm || op == &td_op_rms_norm || op == &td_op_norm_gradient;
    return is_label(d, i) || (norm && i > 0);
}

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

static outcome outcome_of(td_context *td, const td_op *op, const td_case *c, td_dtype dtype, uint64_t start, int runs)
{
    outcome o = { .count = 0 };
    case_data d = data_from(c, start);
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

static void check_operations(bool poison)
{
    uint64_t start = (uint64_t)time(NULL) % 100000 * 1000;
    td_context *gpu = open_gpu(TD_F32, poison), *cpu = open_cpu(TD_F64), *alike = open_cpu(TD_F32);
    int wrong = 0, checked = 0, missing = 0;
    printf("inputs from draw %llu on\n", (unsigned long long)start);
    for (int o = 0; o < OPERATIONS; o++)
        for (int c = 0; c < cases_of(operations[o]); c++)
            for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++) {
                const td_op *op = operations[o];
                outcome want = { .count = 0 };
                if (dtypes[t] != TD_F32) want = outcome_of(alike, op, &op->cases[c], dtypes[t], start, 1);
                if (!want.values) want = outcome_of(cpu, op, &op->cases[c], dtypes[t], start, 1); /* has no products of f16 */
                if (!want.values) continue; /* not of floats */
                outcome got = outcome_of(gpu, op, &op->cases[c], dtypes[t], start, poison ? 1 : 3);
                if (!got.values) {
                    printf("%s, case %d, %s: %s\n", op->name, c, td_dtype_name(dtypes[t]), got.error);
                    missing += got.missing;
                    wrong += !got.missing;
                    continue;
                }
                checked++;
                wrong += compare(op, c, dtypes[t], &got, &want);
            }
    printf("%d cases checked, %d wrong, %d not to be had on a GPU\n", checked, wrong, missing);
    ck_assert_int_eq(wrong, 0);
    ck_assert_int_eq(missing, 0);
    ck_assert_int_gt(checked, 300);
    td_close(gpu);
    td_close(alike);
    td_close(cpu);
}

START_TEST(test_operations_equal_the_cpu_in_poisoned_memory)
{
    if (gpu_for(__func__)) check_operations(true);
}
END_TEST

START_TEST(test_operations_equal_the_cpu_as_graphs)
{
    if (gpu_for(__func__)) check_operations(false);
}
END_TEST

/* ---- Attention at the sizes of models: 16-bit operands against the same numbers in f32 */

typedef struct attention_case {
    const char *note;
    int64_t batch, heads, shared, positions, depth;
    td_attention_attr attr;
} attention_case;

static const attention_case attentions[] = {
    { "GPT 10M", 8, 6, 6, 256, 64, { .causal = 1 } },
    { "GPT 10M, dropout", 8, 6, 6, 256, 64, { .causal = 1, .p = 0.2, .key = 5 } },
    { "GPT-2 124M", 1, 12, 12, 1024, 64, { .causal = 1 } },
    { "shared heads of 128", 1, 16, 4, 512, 128, { .causal = 1 } },
    { "shared heads of 128, dropout", 1, 8, 2, 320, 128, { .causal = 1, .p = 0.1, .key = 6 } },
    { "an odd length", 3, 4, 2, 77, 32, { .causal = 1 } },
    { "an odd length, dropout, every key", 3, 4, 2, 77, 48, { .p = 0.3, .key = 7 } },
    { "a window", 2, 4, 4, 300, 64, { .causal = 1, .window = 100 } },
    { "a window to both sides, dropout", 2, 4, 2, 300, 96, { .window = 50, .p = 0.1, .key = 8 } },
    { "lengths", 5, 4, 2, 200, 64, { .lengths = 1 } },
    { "positions", 5, 4, 2, 150, 80, { .causal = 1, .positions = 1 } },
    { "heads of 256", 1, 2, 2, 100, 256, { .causal = 1 } },
};
enum { ATTENTIONS = sizeof attentions / sizeof *attentions };

/* Heads [begin, end) columns of x (B, T, columns), as a layer cuts them. */
static td_tensor heads_at(td_tensor x, int64_t begin, int64_t heads, int64_t depth)
{
    td_shape shape = td_shape_at(x);
    td_tensor columns = td_slice(x, 2, begin, begin + heads * depth);
    td_tensor cut = td_reshape(columns, shape.dim[0], shape.dim[1], heads, depth);
    return td_transpose(cut, 1, 2);
}

/* o (B, T, H d), then the gradient of the rows that q, k and v are the columns of. Computed in `dtype`, or in f32 from numbers of it. */
static double *attention_of(const attention_case *c, td_dtype dtype, bool wide, bool deterministic)
{
    td_context *td = td_open(
        &(td_options){ .device = "cuda", .dtype = TD_F32, .seed = 1, .threads = 2, .deterministic = deterministic, .log = check_log_line });
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

static int check_attention(const attention_case *c, td_dtype dtype, bool deterministic)
{
    int64_t queries = c->heads * c->depth, keys = c->shared * c->depth, rows = c->batch * c->positions, width = queries + 2 * keys;
    const double *got = attention_of(c, dtype, false, deterministic), *want = attention_of(c, dtype, true, false);
    const double *dx = got + rows * queries, *dx_want = want + rows * queries;
    double errors[] = { relative_error(got, want, rows * queries), column_error(dx, dx_want, rows, width, 0, queries),
                        column_error(dx, dx_want, rows, width, queries, keys),
                        column_error(dx, dx_want, rows, width, queries + keys, keys) };
    printf("%s, %s%s: o %.2g, dq %.2g, dk %.2g, dv %.2g\n", c->note, td_dtype_name(dtype), deterministic ? ", deterministic" : "",
           errors[0], errors[1], errors[2], errors[3]);
    int wrong = 0;
    for (int i = 0; i < 4; i++) wrong += !(errors[i] <= 1e-2);
    return wrong;
}

START_TEST(test_attention_in_16_bits_is_that_in_f32)
{
    int wrong = 0;
    if (!gpu_for(__func__)) return;
    for (int c = 0; c < ATTENTIONS; c++)
        for (int d = 0; d < 2; d++)
            wrong += check_attention(&attentions[c], dtypes[1 + d], false) + check_attention(&attentions[c], dtypes[1 + d], true);
    ck_assert_int_eq(wrong, 0);
}
END_TEST

START_TEST(test_deterministic_attention_gives_the_same_bits)
{
    if (!gpu_for(__func__)) return;
    for (int c = 0; c < ATTENTIONS; c++) {
        const attention_case *a = &attentions[c];
        int64_t count = a->batch * a->positions * (2 * a->heads + 2 * a->shared) * a->depth;
        ck_assert_mem_eq(attention_of(a, TD_BF16, false, true), attention_of(a, TD_BF16, false, true), (size_t)count * sizeof(double));
    }
}
END_TEST

/* ---- Models */

enum { STEPS = 12, ROWS = 24, IN = 37, CLASSES = 5 };

typedef struct curve {
    double loss[STEPS];
    td_device_counts counts, before;          /* at the end, and after the third step */
} curve;

static opt_scaler *scaler_for(td_context *td) { return td_compute_dtype(td) == TD_F16 ? opt_scaler_open(td, NULL) : NULL; }

static void train_mlp(td_context *td, curve *out)
{
    static float x[ROWS * IN];
    static int32_t y[ROWS];
    td_module root = td_root(td);
    nn_linear hidden = nn_linear_make(root, "hidden", IN, 50), last = nn_linear_make(root, "out", 50, CLASSES);
    nn_dropout drop = nn_dropout_make(root, "drop", 0.1);
    opt_scaler *scaler = scaler_for(td);
    opt_optimizer *opt = opt_adamw(root, &(opt_adamw_options){ .decay = 0.01, .max_norm = 1, .scaler = scaler });
    td_tensor losses[STEPS];
    for (int s = 0; s < STEPS; s++) {
        for (int i = 0; i < ROWS * IN; i++) x[i] = (float)check_normal((uint64_t)(s % 2 * ROWS * IN + i + 1));
        for (int i = 0; i < ROWS; i++) y[i] = (i * 7 + s % 2) % CLASSES;
        td_tensor in = td_batch(td, "x", TD_F32, TD_SHAPE(ROWS, IN), x), label = td_batch(td, "y", TD_I32, TD_SHAPE(ROWS), y);
        td_tensor h = nn_dropout_apply(&drop, td_gelu(nn_linear_apply(&hidden, in)));
        losses[s] = td_cross_entropy(nn_linear_apply(&last, h), label);
        if (scaler) td_keep(losses[s]);
        td_backward(opt_scaler_scale(scaler, losses[s]));
        opt_step(opt, 1e-2);
        if (s == 3) out->before = td->device_counts;
        ck_assert_msg(td_step(td), "step %d: %s", s, td_error_text(td));
        out->loss[s] = td_item(losses[s]);
    }
    out->counts = td->device_counts;
    opt_close(opt);
}

static const gpt_size sizes[] = {
    { .layers = 2, .heads = 3, .width = 24, .context = 20, .vocabulary = 67, .dropout = 0.1 },
    { .form = GPT_LLAMA, .layers = 2, .heads = 4, .kv_heads = 2, .width = 32, .hidden = 40, .context = 16, .vocabulary = 29 },
};

static void train_gpt(td_context *td, gpt_size size, curve *out)
{
    static int32_t text[4 * 21];
    gpt g = { 0 };
    gpt_make(&g, td_root(td), size);
    opt_scaler *scaler = scaler_for(td);
    opt_optimizer *opt = opt_adamw(td_root(td), &(opt_adamw_options){ .decay = 0.1, .max_norm = 1, .scaler = scaler });
    for (int s = 0; s < STEPS; s++) {
        for (int i = 0; i < 4 * 21; i++) text[i] = (int32_t)((i * 7 + i / 21 * (s % 5 + 1)) % size.vocabulary);
        td_tensor ids = td_batch(td, "ids", TD_I32, TD_SHAPE(4, size.context), text), next = td_batch(td, "next", TD_I32, TD_SHAPE(4, size.context), text + 1);
        td_tensor loss = td_cross_entropy(gpt_logits(&g, ids), next);
        if (scaler) td_keep(loss);
        td_backward(opt_scaler_scale(scaler, loss));
        opt_step(opt, 3e-3);
        if (s == 3) out->before = td->device_counts;
        ck_assert_msg(td_step(td), "step %d: %s", s, td_error_text(td));
        out->loss[s] = td_item(loss);
    }
    out->counts = td->device_counts;
    opt_close(opt);
}

static curve curve_on(bool gpu, td_dtype dtype, int model)
{
    curve c = { 0 };
    td_context *td = td_open(&(td_options){ .device = gpu ? "cuda" : "cpu", .dtype = dtype, .seed = 1, .threads = 2, .deterministic = true,
                                            .log = check_log_line });
    if (model == 0)
        train_mlp(td, &c);
    else
        train_gpt(td, sizes[model - 1], &c);
    td_close(td);
    return c;
}

/* The largest distance of a loss from the CPU's, of what the CPU's fall by. Beside wider arithmetic the CPU's own losses are off by 2e-6
 * of it in f32 and 6e-4 in bf16, than which f16 is finer; a learning rate that is wrong by a hundredth puts them off by 6e-3 to 9e-3. */
static void check_curves(td_dtype dtype, double allowed)
{
    for (int model = 0; model < 3; model++) {
        curve want = curve_on(false, dtype, model), got = curve_on(true, dtype, model);
        double fall = want.loss[0] - want.loss[STEPS - 1], error = 0;
        for (int s = 0; s < STEPS; s++) error = fmax(error, isnan(got.loss[s]) ? INFINITY : fabs(got.loss[s] - want.loss[s]) / fall);
        printf("model %d, %s: losses %.6f to %.6f, off by %.3g of their fall\n", model, td_dtype_name(dtype), got.loss[0], got.loss[STEPS - 1],
               error);
        ck_assert_double_gt(fall, 0);
        ck_assert_msg(error <= allowed, "model %d: losses are off by %.3g of their fall, allowed %g", model, error, allowed);
    }
}

START_TEST(test_curves_equal_the_cpu)
{
    if (!gpu_for(__func__)) return;
    check_curves(TD_F32, 2e-5);
    check_curves(TD_BF16, 2e-3);
    check_curves(TD_F16, 2e-3);
}
END_TEST

START_TEST(test_a_rerun_gives_the_same_bits)
{
    if (!gpu_for(__func__)) return;
    for (int model = 0; model < 3; model++) {
        curve first = curve_on(true, TD_F32, model), second = curve_on(true, TD_F32, model);
        ck_assert_mem_eq(first.loss, second.loss, sizeof first.loss);
    }
}
END_TEST

START_TEST(test_a_replayed_step_allocates_nothing_and_is_a_graph)
{
    if (!gpu_for(__func__)) return;
    curve c = curve_on(true, TD_F32, 0);
    ck_assert_int_eq(c.counts.allocations, c.before.allocations);
    ck_assert_int_eq(c.counts.calls, c.before.calls);
    ck_assert_int_eq(c.counts.graphs, TD_INPUT_SETS);
    ck_assert_int_eq(c.counts.replays - c.before.replays, STEPS - 3);
    ck_assert_int_eq(c.counts.waits - c.before.waits, STEPS - 3); /* for the losses that are read */
}
END_TEST

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

START_TEST(test_masks_in_chains_are_the_cpus)
{
    const td_shape shapes[] = { TD_SHAPE(64, 384), TD_SHAPE(33, 77), TD_SHAPE(3, 5, 6), TD_SHAPE(1), TD_SHAPE(129, 4096) };
    if (!gpu_for(__func__)) return;
    for (int i = 0; i < 5; i++)
        for (int steps = 1; steps <= 4; steps += 3)
            ck_assert_mem_eq(dropped_values(true, shapes[i], steps), dropped_values(false, shapes[i], steps),
                             (size_t)(2 * td_shape_elements(shapes[i])) * sizeof(double));
}
END_TEST

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

START_TEST(test_norms_that_add_and_narrow_equal_the_cpu)
{
    if (!gpu_for(__func__)) return;
    static const int64_t columns[] = { 5, 64, 384, 768, 1536, 3072, 6144, 9001 };
    static double want[NORM_VALUES * NORM_ROWS * 9001], got[NORM_VALUES * NORM_ROWS * 9001];
    td_context *gpu = open_gpu(TD_F32, true), *cpu = open_cpu(TD_F32);
    for (size_t i = 0; i < 2 * sizeof columns / sizeof *columns; i++) {
        int64_t width = columns[i / 2], count = NORM_ROWS * width;
        td_dtype narrow = i % 2 ? TD_F16 : TD_BF16;
        norm_values(cpu, width, narrow, want);
        norm_values(gpu, width, narrow, got);
        for (int v = 0; v < NORM_VALUES; v++) {
            double error = relative_error(got + v * count, want + v * count, count);
            ck_assert_msg(error <= (v ? 1e-3 : 1e-5), "%lld columns, %s, value %d: off by %.3g", (long long)width, td_dtype_name(narrow), v, error);
        }
    }
    td_close(gpu);
    td_close(cpu);
}
END_TEST

/* ---- Products with epilogues: whichever way is the faster, and the kernels of the parts where nothing is timed */

typedef struct epilogue_case {
    int64_t rows, in, out;                    /* of a layer */
} epilogue_case;

/* Those of GPT-2 124M's block, of rows as few as keep the processor's share at seconds and what tensor cores cut off in a sum below 1e-5 of
 * it; then odd ones, one that is small and one that has no rows. */
static const epilogue_case epilogue_cases[] = {
    { 1024, 768, 3072 }, { 1024, 3072, 768 }, { 1024, 768, 2304 }, { 300, 72, 200 }, { 301, 77, 203 }, { 5, 16, 8 }, { 0, 16, 8 },
};
enum { EPILOGUES = sizeof epilogue_cases / sizeof *epilogue_cases, MOST_VALUES = 3, MOST_ROWS = 1024, MOST_COLUMNS = 3072, OPERANDS = 4 };

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
static void check_epilogue(const char *name, record_epilogue record, double allowed, double beside, way how)
{
    td_context *cpu = open_cpu(TD_F32);
    td_context *gpu = td_open(&(td_options){ .device = "cuda", .dtype = TD_F32, .seed = 1, .threads = 2, .poison = how == POISONED,
                                             .deterministic = how == PARTS, .log = check_log_line });
    for (int i = 0; i < 2 * EPILOGUES; i++) {
        const epilogue_case *c = &epilogue_cases[i / 2];
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

START_TEST(test_a_weight_and_its_bias_have_the_cpus_gradients)
{
    if (!gpu_for(__func__)) return;
    for (way how = 0; how < WAYS; how++) {
        check_epilogue("dbias", record_dbias, 1e-5, 1e-5, how);
        check_epilogue("dbias beside 16 bits", record_dbias_narrow, 1e-2, 1e-5, how);
    }
}
END_TEST

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

START_TEST(test_gelu_in_products_and_back_is_the_cpus)
{
    if (!gpu_for(__func__)) return;
    for (way how = 0; how < WAYS; how++) {
        check_epilogue("gelu, kept", record_gelu, 1e-2, 1e-2, how);
        check_epilogue("gelu", record_gelu_alone, 1e-2, 1e-2, how);
        check_epilogue("dgelu", record_dgelu, 1e-2, 1e-2, how);
    }
}
END_TEST

/* A GPT of GPT-2's form at widths that epilogues take: fused and not, and again with the choices that were kept. */
static void train_gpt2(const char *passes, double loss[STEPS])
{
    static const gpt_size size = { .layers = 2, .heads = 4, .width = 64, .context = 20, .vocabulary = 67, .has_bias = true, .tanh_gelu = true };
    td_context *td = td_open(&(td_options){ .device = "cuda", .dtype = TD_BF16, .seed = 1, .threads = 2, .passes = passes,
                                            .log = check_log_line });
    curve c = { 0 };
    train_gpt(td, size, &c);
    memcpy(loss, c.loss, sizeof c.loss);
    td_close(td);
}

START_TEST(test_a_gpt_with_epilogues_learns_as_without)
{
    static const char *const passes[] = { "-dbias", "-gelu", "-dbias,-gelu" };
    if (!gpu_for(__func__)) return;
    double all[STEPS], less[STEPS];
    setenv("TANDEM_CACHE", "test_cuda_cache", 1); /* another choice may round otherwise */
    train_gpt2(NULL, all);
    ck_assert(all[STEPS - 1] < all[0]);
    train_gpt2(NULL, less);
    ck_assert_mem_eq(all, less, sizeof all);
    for (size_t i = 0; i < sizeof passes / sizeof *passes; i++) {
        train_gpt2(passes[i], less);
        double error = relative_error(all, less, STEPS);
        ck_assert_msg(error <= 1e-2, "%s: losses are off by %.3g", passes[i], error);
    }
    unsetenv("TANDEM_CACHE");
}
END_TEST

/* The loss that comes with the gradient. */
START_TEST(test_a_loss_with_its_gradient_equals_the_cpu)
{
    if (!gpu_for(__func__)) return;
    static const int64_t classes[] = { 10, 65, 1031, 20000 };
    enum { ROWS = 12 };
    static float logits[ROWS * 20000];
    int32_t labels[ROWS];
    for (int i = 0; i < ROWS * 20000; i++) logits[i] = (float)check_normal((uint64_t)i);
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) {
        const double *values[2][2];
        td_context *on[2] = { open_cpu(TD_F32), open_gpu(TD_F32, true) };
        for (int r = 0; r < ROWS; r++) labels[r] = (int32_t)(r * 7919 % classes[i]);
        for (int d = 0; d < 2; d++) {
            td_tensor x = td_input(on[d], "x", TD_F32, TD_SHAPE(ROWS, classes[i]), logits);
            td_tensor loss = td_cross_entropy(x, td_input(on[d], "labels", TD_I32, TD_SHAPE(ROWS), labels)), dx = td_gradient(loss, x);
            td_keep(loss);
            td_keep(dx);
            ck_assert_msg(td_step(on[d]), "%s", td_error_text(on[d]));
            values[d][0] = check_read(loss, "the loss", __FILE__, __LINE__);
            values[d][1] = check_read(dx, "its gradient", __FILE__, __LINE__);
        }
        ck_assert_double_le(relative_error(values[1][0], values[0][0], 1), 1e-5);
        ck_assert_double_le(relative_error(values[1][1], values[0][1], ROWS * classes[i]), 1e-5);
        td_close(on[0]);
        td_close(on[1]);
    }
}
END_TEST

/* ---- Row-sparse gradients, and updates by rows */

enum { TABLE_ROWS = 700, IDS = 333, MORE_IDS = 41, MOST_WIDTH = 1100, TABLE_STEPS = 4 };

typedef struct table_case {
    int64_t width;
    bool sgd, row_wise, sparse;
} table_case;

typedef struct trained_table {
    double table[TABLE_ROWS * MOST_WIDTH], sums[TABLE_ROWS * MOST_WIDTH];
    double norms[TABLE_STEPS], scale;
} trained_table;

static void read_wide(td_state s, double *to)
{
    int64_t count = td_shape_elements(td_state_shape(s));
    float *values = check_alloc((size_t)count * sizeof *values);
    ck_assert_msg(td_state_read(s, 0, count, values), "%s", td_error_text(s.td));
    for (int64_t i = 0; i < count; i++) to[i] = (double)values[i];
}

/* Rows of the table, with literal gradients (never small, so that no sign is a matter of roundings). */
static td_tensor weighed_rows(td_context *td, td_state table, int64_t count, int64_t width, uint64_t seed, double first)
{
    int32_t *ids = check_alloc((size_t)count * sizeof *ids);
    float *g = check_alloc((size_t)(count * width) * sizeof *g);
    for (int64_t i = 0; i < count; i++) /* every third is the same one, a few are none */
        ids[i] = i % 3 == 0 ? 5 : (int32_t)((i * 7919 + (int64_t)seed * 31) % (TABLE_ROWS + 20)) - 10;
    for (int64_t i = 0; i < count * width; i++) g[i] = (float)check_normal(seed * 1000000 + (uint64_t)i);
    g[0] *= (float)first;
    td_tensor y = td_embedding(td_use(table), td_input(td, "ids", TD_I32, TD_SHAPE(count), ids));
    return td_sum(td_mul(y, td_input(td, "g", TD_F32, TD_SHAPE(count, width), g)), TD_ALL, TD_DROP);
}

/* Two uses a step, clipping; the third step's gradient is infinite. */
static void train_table(bool gpu, const table_case *c, trained_table *out)
{
    td_context *td = gpu ? open_gpu(TD_F32, false) : open_cpu(TD_F32);
    td_state table = td_parameter(td_root(td), "table", TD_SHAPE(TABLE_ROWS, c->width), td_init_normal(1));
    if (c->sparse) td_sparse_rows(table);
    opt_scaler *scaler = opt_scaler_open(td, &(opt_scaler_options){ .initial = 16 });
    opt_optimizer *opt = c->sgd ? opt_sgd(td_root(td), &(opt_sgd_options){ .max_norm = 20, .scaler = scaler })
                                : opt_adagrad(td_root(td), &(opt_adagrad_options){ .row_wise = c->row_wise, .rate_decay = 0.1, .max_norm = 20, .scaler = scaler });
    for (int s = 0; s < TABLE_STEPS; s++) {
        td_tensor one = weighed_rows(td, table, IDS, c->width, (uint64_t)s + 1, s == 2 ? (double)INFINITY : 1);
        td_tensor other = weighed_rows(td, table, MORE_IDS, c->width, (uint64_t)s + 11, 1);
        td_backward(opt_scaler_scale(scaler, td_add(one, other)));
        opt_step(opt, 0.3);
        ck_assert_msg(td_step(td), "step %d: %s", s, td_error_text(td));
        out->norms[s] = td_item(opt_gradient_norm(opt));
    }
    read_wide(table, out->table);
    if (!c->sgd) read_wide(td_state_named(td, c->row_wise ? "table.row_sum" : "table.sum"), out->sums);
    read_wide(td_state_named(td, "scaler.scale"), &out->scale);
    td_close(td);
}

START_TEST(test_updates_by_rows_equal_the_cpu)
{
    if (!gpu_for(__func__)) return;
    static const int64_t widths[] = { 1, 5, 16, 64, 301, MOST_WIDTH };
    static const table_case cases[] = { { .sgd = true, .sparse = true }, { .sparse = true }, { .row_wise = true, .sparse = true }, { .row_wise = true } };
    static trained_table want, got, again;
    for (size_t i = 0; i < sizeof widths / sizeof *widths * 4; i++) {
        table_case c = cases[i % 4];
        c.width = widths[i / 4];
        train_table(false, &c, &want);
        train_table(true, &c, &got);
        train_table(true, &c, &again);
        int64_t count = TABLE_ROWS * c.width, sums = c.sgd ? 0 : c.row_wise ? TABLE_ROWS : count;
        double table = relative_error(got.table, want.table, count), moments = relative_error(got.sums, want.sums, sums);
        printf("%s%s, (%d, %lld): table off by %.3g, sums by %.3g\n", c.sgd ? "sgd" : c.row_wise ? "row-wise adagrad" : "adagrad",
               c.sparse ? " on rows" : "", TABLE_ROWS, (long long)c.width, table, moments);
        ck_assert_double_le(table, 1e-5);
        ck_assert_double_le(moments, 1e-5);
        ck_assert_double_le(relative_error(got.norms, want.norms, 2), 1e-5);
        ck_assert(!isfinite(got.norms[2]) && got.scale == 8 && want.scale == 8);
        ck_assert_mem_eq(got.table, again.table, (size_t)count * sizeof *got.table);
        ck_assert_mem_eq(got.sums, again.sums, (size_t)sums * sizeof *got.sums);
    }
}
END_TEST

/* ---- f16: losses are scaled, and a step that overflows is left out */

enum { F16_STEPS = 24 };

typedef struct scaled_run {
    double scale[F16_STEPS], updates[F16_STEPS], loss[F16_STEPS];
    td_device_counts counts, before;
} scaled_run;

/* From a scale at which every gradient is infinite in f16. */
static void train_scaled(bool gpu, bool looks, scaled_run *out)
{
    enum { N = 20, IN_F16 = 24 };
    float x[N * IN_F16];
    int32_t y[N];
    td_context *td = gpu ? open_gpu(TD_F16, false) : open_cpu(TD_F16);
    td_module root = td_root(td);
    nn_linear hidden = nn_linear_make(root, "hidden", IN_F16, 40), last = nn_linear_make(root, "out", 40, 4);
    opt_scaler *scaler = opt_scaler_open(td, &(opt_scaler_options){ .initial = 0x1p28, .interval = 4 });
    opt_optimizer *opt = opt_adamw(root, &(opt_adamw_options){ .max_norm = 1, .scaler = scaler });
    for (int i = 0; i < N * IN_F16; i++) x[i] = (float)check_normal((uint64_t)i + 1);
    for (int i = 0; i < N; i++) y[i] = i % 4;
    td_tensor loss = { 0 };
    for (int s = 0; s < F16_STEPS; s++) {
        td_tensor in = td_input(td, "x", TD_F32, TD_SHAPE(N, IN_F16), x), label = td_input(td, "y", TD_I32, TD_SHAPE(N), y);
        loss = td_cross_entropy(nn_linear_apply(&last, td_gelu(nn_linear_apply(&hidden, in))), label);
        td_keep(loss);
        td_backward(opt_scaler_scale(scaler, loss));
        opt_step(opt, 1e-2);
        if (s == 3) out->before = td->device_counts;
        ck_assert_msg(td_step(td), "step %d: %s", s, td_error_text(td));
        out->loss[s] = td_item(loss);
        if (!looks) continue;
        out->scale[s] = check_state_number(td, "scaler.scale");
        out->updates[s] = check_state_number(td, "optimizer.updates");
    }
    out->counts = td->device_counts;
    ck_assert(isfinite(td_item(loss)));
    td_close(td);
}

START_TEST(test_f16_steps_that_overflow_are_left_out_as_on_the_cpu)
{
    if (!gpu_for(__func__)) return;
    static scaled_run want, got, blind;
    train_scaled(false, true, &want);
    train_scaled(true, true, &got);
    ck_assert(want.scale[0] == 0x1p27 && want.updates[0] == 0);
    ck_assert_double_gt(want.updates[F16_STEPS - 1], 5);
    ck_assert_mem_eq(got.scale, want.scale, sizeof want.scale);
    ck_assert_mem_eq(got.updates, want.updates, sizeof want.updates);
    ck_assert_double_le(relative_error(got.loss, want.loss, F16_STEPS), 1e-2);
    train_scaled(true, false, &blind);
    ck_assert_int_eq(blind.counts.waits - blind.before.waits, F16_STEPS - 3); /* for the losses: skipped or not is not asked */
    ck_assert_int_eq(blind.counts.replays - blind.before.replays, F16_STEPS - 3);
}
END_TEST

TESTS("cuda", test_what_cannot_be_had_is_said, test_operations_equal_the_cpu_in_poisoned_memory, test_operations_equal_the_cpu_as_graphs,
      test_masks_in_chains_are_the_cpus, test_norms_that_add_and_narrow_equal_the_cpu, test_a_weight_and_its_bias_have_the_cpus_gradients,
      test_gelu_in_products_and_back_is_the_cpus, test_a_gpt_with_epilogues_learns_as_without, test_a_loss_with_its_gradient_equals_the_cpu,
      test_attention_in_16_bits_is_that_in_f32, test_deterministic_attention_gives_the_same_bits,
      test_curves_equal_the_cpu, test_a_rerun_gives_the_same_bits, test_a_replayed_step_allocates_nothing_and_is_a_graph,
      test_updates_by_rows_equal_the_cpu, test_f16_steps_that_overflow_are_left_out_as_on_the_cpu)
