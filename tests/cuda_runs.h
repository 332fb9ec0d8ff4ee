/* What tests of CUDA share (cuda_cases.h): models that train, tables that are updated by rows, losses that are scaled. */
#ifndef TANDEM_TESTS_CUDA_RUNS_H
#define TANDEM_TESTS_CUDA_RUNS_H

#include "models/gpt/gpt.h"
#include "tests/cuda_cases.h"

#include <tandem/nn.h>
#include <tandem/optim.h>

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

/* A step that is replayed allocates nothing and is a graph. */
static CHECK_UNUSED void check_replays(void)
{
    curve c = curve_on(true, TD_F32, 0);
    ck_assert_int_eq(c.counts.allocations, c.before.allocations);
    ck_assert_int_eq(c.counts.calls, c.before.calls);
    ck_assert_int_eq(c.counts.graphs, TD_INPUT_SETS);
    ck_assert_int_eq(c.counts.replays - c.before.replays, STEPS - 3);
    ck_assert_int_eq(c.counts.waits - c.before.waits, STEPS - 3); /* for the losses that are read */
}

/* ---- Updates by ranges, and initial values */

enum { PIECES = 40, MOST_ELEMENTS = 3 * 24000 };

/* All states there are, one behind the other; how many elements. */
static int64_t read_states(td_context *td, double *to)
{
    static float values[MOST_ELEMENTS];
    int64_t all = 0;
    for (int64_t s = 0; s < td_state_count(td); s++) {
        td_state state = td_state_at(td, s);
        int64_t count = td_shape_elements(td_state_shape(state));
        ck_assert_int_le(all + count, MOST_ELEMENTS);
        ck_assert_msg(td_state_read(state, 0, count, values), "%s", td_error_text(td));
        for (int64_t i = 0; i < count; i++) to[all++] = (double)values[i];
    }
    return all;
}

/* Parameters of few elements and of many, more than one launch takes: each with numbers for its gradient. */
static void update_by(bool gpu, opt_optimizer *(*make)(td_module at), double *to, int64_t *count)
{
    static float g[20011 + PIECES];
    td_context *td = gpu ? open_gpu(TD_F32, false) : open_cpu(TD_F32);
    td_state pieces[PIECES];
    for (int p = 0; p < PIECES; p++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", p);
        pieces[p] = td_parameter(td_root(td), name, TD_SHAPE(p == 7 ? 20011 : 1 + p * p % 41), td_init_normal(1));
    }
    opt_optimizer *opt = make(td_root(td));
    for (int s = 0; s < 3; s++) {
        td_tensor loss = td_scalar(td, 0);
        for (int i = 0; i < 20011 + PIECES; i++) g[i] = (float)check_normal((uint64_t)(s * 20011 + i + 1));
        for (int p = 0; p < PIECES; p++) {
            td_tensor w = td_use(pieces[p]), slope = td_input(td, "g", TD_F32, td_shape_at(w), g + p);
            loss = td_add(loss, td_sum(td_mul(w, slope), TD_ALL, TD_DROP));
        }
        td_backward(loss);
        opt_step(opt, 0.01);
        ck_assert_msg(td_step(td), "step %d: %s", s, td_error_text(td));
    }
    *count = read_states(td, to);
    td_close(td);
}

static opt_optimizer *make_sgd(td_module at) { return opt_sgd(at, &(opt_sgd_options){ .decay = 0.1 }); }
static opt_optimizer *make_momentum(td_module at) { return opt_sgd(at, &(opt_sgd_options){ .momentum = 0.9, .nesterov = true, .max_norm = 1 }); }
static opt_optimizer *make_dampened(td_module at) { return opt_sgd(at, &(opt_sgd_options){ .momentum = 0.9, .dampening = 0.5 }); }
static opt_optimizer *make_adam(td_module at) { return opt_adam(at, &(opt_adam_options){ .decay = 0.1 }); }
static opt_optimizer *make_adamw(td_module at) { return opt_adamw(at, &(opt_adamw_options){ .decay = 0.1, .max_norm = 2, .clip_inf = true }); }
static opt_optimizer *make_adagrad(td_module at) { return opt_adagrad(at, &(opt_adagrad_options){ .rate_decay = 0.1, .decay = 0.1 }); }
static opt_optimizer *make_lion(td_module at) { return opt_lion(at, &(opt_lion_options){ .decay = 0.1 }); }

static CHECK_UNUSED void check_rules(void)
{
    static opt_optimizer *(*const makers[])(td_module at) = { make_sgd, make_momentum, make_dampened, make_adam, make_adamw, make_adagrad, make_lion };
    static double want[MOST_ELEMENTS], got[MOST_ELEMENTS];
    for (size_t m = 0; m < sizeof makers / sizeof *makers; m++) {
        int64_t count, again;
        update_by(false, makers[m], want, &count);
        update_by(true, makers[m], got, &again);
        ck_assert_int_eq(again, count);
        double error = relative_error(got, want, count);
        ck_assert_msg(error <= 1e-6, "rule %zu: off by %.3g", m, error);
    }
}

static void initial_values(bool gpu, double *to, int64_t *count)
{
    const td_init inits[] = { td_init_constant(0.3), td_init_uniform(0.7), td_init_normal(2), td_init_truncated_normal(0.5) };
    td_context *td = gpu ? open_gpu(TD_F32, false) : open_cpu(TD_F32);
    for (int i = 0; i < 12; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", i);
        td_parameter(td_root(td), name, TD_SHAPE(i < 4 ? 1 : i < 8 ? 77 : 3000), inits[i % 4]);
    }
    *count = read_states(td, to);
    td_close(td);
}

/* Drawn by counters, in f64: a value in a hundred million is the neighbour of the CPU's. */
static CHECK_UNUSED void check_initial_values(void)
{
    static double want[MOST_ELEMENTS], got[MOST_ELEMENTS];
    int64_t count, again;
    initial_values(false, want, &count);
    initial_values(true, got, &again);
    ck_assert_int_eq(again, count);
    ck_assert_near(got, want, count, 1e-7);
}

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
static CHECK_UNUSED void train_table(bool gpu, const table_case *c, trained_table *out)
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

/* What the CPU's are, and the same bits again. */
static CHECK_UNUSED void check_updates_by_rows(const int64_t *widths, int count)
{
    static const table_case cases[] = { { .sgd = true, .sparse = true }, { .sparse = true }, { .row_wise = true, .sparse = true }, { .row_wise = true } };
    static trained_table want, got, again;
    for (int i = 0; i < 4 * count; i++) {
        table_case c = cases[i % 4];
        c.width = widths[i / 4];
        train_table(false, &c, &want);
        train_table(true, &c, &got);
        train_table(true, &c, &again);
        int64_t elements = TABLE_ROWS * c.width, sums = c.sgd ? 0 : c.row_wise ? TABLE_ROWS : elements;
        double table = relative_error(got.table, want.table, elements), moments = relative_error(got.sums, want.sums, sums);
        printf("%s%s, (%d, %lld): table off by %.3g, sums by %.3g\n", c.sgd ? "sgd" : c.row_wise ? "row-wise adagrad" : "adagrad",
               c.sparse ? " on rows" : "", TABLE_ROWS, (long long)c.width, table, moments);
        ck_assert_double_le(table, 1e-5);
        ck_assert_double_le(moments, 1e-5);
        ck_assert_double_le(relative_error(got.norms, want.norms, 2), 1e-5);
        ck_assert(!isfinite(got.norms[2]) && got.scale == 8 && want.scale == 8);
        ck_assert_mem_eq(got.table, again.table, (size_t)elements * sizeof *got.table);
        ck_assert_mem_eq(got.sums, again.sums, (size_t)sums * sizeof *got.sums);
    }
}

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

static CHECK_UNUSED void check_scaled(void)
{
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

#endif
