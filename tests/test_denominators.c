/* One denominator: where rows of an update count unequally, its loss and gradient are the mean of what counts in the whole batch, into
 * however many micro-batches and over however many ranks it is cut. A micro-batch may have no row that counts.
 *
 * The program is its own subject: with DENOMINATORS="KIND" in the environment it trains as its flags say.
 * Timeout: 300 s
 */
#define SMALL_FOLDER "denominators"
#define SHELL_FOLDER "denominators"
#include "tests/shell.h"
#include "tests/small_run.h"

enum { STEPS = 6, HIDDEN = 7, IGNORED = -100 };

/* Losses whose rows count unequally: labels to ignore, weights, those of rows of several elements, a quotient of one's own. */
typedef enum kind { IGNORING, WEIGHTED, ROWS_OF_MSE, OWN, KINDS } kind;
static const char *const kinds[KINDS] = { "ignoring", "weighted", "mse", "own" };

/* One row in five counts, by a weight of its own. */
static bool counts(int64_t sample) { return sample % 5 == 2; }

static float counted[SAMPLES];

static data_set *uneven_set(td_context *td)
{
    data_set_close(small_set(td)); /* fills features and labels */
    for (int i = 0; i < SAMPLES; i++) {
        counted[i] = counts(i) ? 0.5F + (float)(i % 4) : 0;
        if (!counts(i)) labels[i] = IGNORED;
    }
    data_array arrays[] = {
        { .name = "x", .dtype = TD_F32, .shape = TD_SHAPE(SAMPLES, FEATURES), .data = features },
        { .name = "label", .dtype = TD_I32, .shape = TD_SHAPE(SAMPLES), .data = labels },
        { .name = "counted", .dtype = TD_F32, .shape = TD_SHAPE(SAMPLES), .data = counted },
    };
    return data_memory(td, arrays, 3);
}

static td_tensor uneven_loss(const small_model *m, const data_batch *b, kind k)
{
    td_tensor x = data_get(b, "x"), h = td_relu(td_matmul_with(x, td_use(m->hidden), 0, 1));
    td_tensor y = td_matmul_with(td_dropout(h, 0.25), td_use(m->out), 0, 1), label = data_get(b, "label"); /* (N, CLASSES) */
    if (k == IGNORING) return td_cross_entropy_with(y, label, &(td_cross_entropy_options){ .ignores = true, .ignored = IGNORED });
    td_tensor weights = data_get(b, "counted"), target = td_slice(x, 1, 0, CLASSES);
    if (k == ROWS_OF_MSE) return td_mse_weighted(y, target, weights);
    if (k == WEIGHTED) return td_cross_entropy_weighted(y, td_maximum(label, td_fill(x.td, TD_I32, (td_shape){ 0 }, 0)), weights);
    td_tensor rows = td_sum(td_abs(td_sub(y, target)), TD_LAST, TD_DROP);
    td_tensor sum = td_sum(td_mul(rows, weights), TD_ALL, TD_DROP);
    return td_div(sum, td_sum(weights, TD_ALL, TD_DROP));
}

/* Trains; the losses of the first updates and how many micro-batches had no row that counts. */
static int train_uneven(run_loop *run, kind k, double *losses, int *empty)
{
    td_context *td = run_context(run);
    small_model m = make_small(td, HIDDEN);
    opt_optimizer *opt = opt_sgd(td_root(td), &(opt_sgd_options){ .momentum = 0.9, .max_norm = 0.5 }); /* a factor on gradients shows */
    run_train_on(run, uneven_set(td));
    bool stepped = false;
    for (data_batch b; run_next(run, &b); stepped = true) {
        data_column column;
        const int32_t *own = data_rows(&b, "label", &column);
        int64_t row = 0;
        while (row < b.local_rows && own[row] == IGNORED) row++;
        if (empty) *empty += row == b.local_rows;
        run_step(run, opt, uneven_loss(&m, &b, k));
        if (b.last && losses && td_error(td) == TD_OK) losses[td_updates(td) - 1] = run->loss;
    }
    if (!stepped) opt_close(opt);
    return run_close(run);
}

#define FLAGS "--dtype f64 --threads 1 --steps 6 --lr 0.1 --seed 5 --batch 18 --log-every 1 "

static void assert_same_curve(const double *got, const double *want, const char *what)
{
    for (int s = 0; s < STEPS; s++)
        ck_assert_msg(fabs(got[s] - want[s]) <= 1e-10 * fabs(want[s]), "%s: loss %d is %.17g, not %.17g", what, s, got[s], want[s]);
}

START_TEST(test_micro_batches_are_one_batch)
{
    for (int k = 0; k < KINDS; k++) {
        double one[STEPS], three[STEPS];
        int whole = 0, parts = 0;
        ck_assert_int_eq(train_uneven(open_small(FLAGS), (kind)k, one, &whole), 0);
        ck_assert_int_eq(train_uneven(open_small(FLAGS "--accumulate 3"), (kind)k, three, &parts), 0);
        ck_assert_int_eq(whole, 0);
        ck_assert_int_gt(parts, 0);
        assert_same_curve(three, one, kinds[k]);
    }
}
END_TEST

/* The file of this program. */
static const char *own_path(void)
{
    static char path[4096];
    ssize_t bytes = readlink("/proc/self/exe", path, sizeof path - 1);
    ck_assert_int_gt(bytes, 0);
    path[bytes] = 0;
    return path;
}

/* A wrong use ends in a sentence. */
START_TEST(test_an_update_has_losses_of_one_kind)
{
    run_loop *run = open_small(FLAGS "--accumulate 3");
    td_context *td = run_context(run);
    small_model m = make_small(td, HIDDEN);
    opt_optimizer *opt = opt_sgd(td_root(td), NULL);
    run_train_on(run, uneven_set(td));
    for (data_batch b; run_next(run, &b);) {
        td_tensor loss = uneven_loss(&m, &b, WEIGHTED);
        run_step(run, opt, b.micro < 2 ? loss : td_scale(loss, 1));
    }
    ck_assert_str_eq(td_error_text(td), "run_step: the loss of micro-batch 3 is no mean by weights (td_quotient), those before it in the "
                                        "update are: all of one update must be of one kind");
    ck_assert_int_eq(run_close(run), 1);
}
END_TEST

START_TEST(test_ranks_and_micro_batches_are_one_batch)
{
    static const char *const ways[] = { "--ranks 2 --strategy ddp", "--ranks 2 --strategy fsdp", "--ranks 2 --strategy zero2",
                                        "--ranks 3 --strategy ddp", "--ranks 3 --strategy fsdp", "--ranks 3 --strategy zero2" };
    for (int w = 0; w < 6; w++) {
        for (int k = check_all() ? 0 : w % KINDS; k < (check_all() ? KINDS : w % KINDS + 1); k++) {
            double one[STEPS], cut[STEPS];
            char what[64];
            ck_assert_int_eq(train_uneven(open_small(FLAGS), (kind)k, one, NULL), 0);
            ck_assert_sh(0, "rm -rf cut; DENOMINATORS=%s '%s' " FLAGS "--accumulate 3 %s --out cut", kinds[k], own_path(),
                         ways[w]);
            ck_assert_int_eq(read_losses("cut", cut, STEPS), STEPS);
            snprintf(what, sizeof what, "%s, %s", ways[w], kinds[k]);
            assert_same_curve(cut, one, what);
        }
    }
}
END_TEST

/* bench and plan record the same update. */
static void *make_model(run_loop *run, td_module root, const data_set *set)
{
    (void)set;
    small_model *m = malloc(sizeof *m);
    if (!m) return NULL;
    *m = make_small(run_context(run), HIDDEN);
    run_optimizer(run, root);
    return m;
}

static data_set *model_data(run_loop *run, const char *split)
{
    return strcmp(split, "test") ? uneven_set(run_context(run)) : NULL;
}

static td_tensor model_loss(void *model, const data_batch *b) { return uneven_loss(model, b, WEIGHTED); }

static int model_program(int argc, char **argv)
{
    static const run_flag flags[] = { RUN_OPTIMIZER_FLAGS("sgd"), { 0 } };
    static const run_model model = { .about = "rows that count unequally", .defaults = { .name = "small", .flags = flags },
                                     .data = model_data, .make = make_model, .free = free, .loss = model_loss };
    return run_main(argc, argv, &model);
}

static double number_of(const char *object, const char *key)
{
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *at = strstr(object, quoted);
    ck_assert_msg(at != NULL, "no %s in %s", key, object);
    return strtod(at + strlen(quoted), NULL);
}

START_TEST(test_plans_and_benchmarks_know_weights)
{
#define MODEL "DENOMINATORS=model '%s' %s --dtype f64 --threads 1 --batch 36 --accumulate 3 --json"
    ck_assert_sh(0, MODEL " --steps 2", own_path(), "bench");
    double loss = number_of(out_text, "first_loss");
    ck_assert(loss > 0.5 && loss < 2); /* a mean, near log 3 as the model begins; nine times that would be a sum */
    ck_assert_double_eq(number_of(out_text, "planned_peak_bytes"), number_of(out_text, "peak_bytes"));
    ck_assert_sh(0, "rm -rf trained; " MODEL " --steps 2 --out trained", own_path(), "train");
    double peak = number_of(out_text, "peak_bytes");
    ck_assert_sh(0, MODEL, own_path(), "plan");
    ck_assert_double_eq(number_of(out_text, "planned_peak_bytes"), peak);
}
END_TEST

/* ---- Loops of one's own ------------------------------------------------------------------------------------- */

enum { ROWS = 36, PARTS = 3, UPDATES = 4 };

static const double LIMIT = 0.02; /* of norms */

typedef enum form { MOMENTUM, CLIPPED, CLIPPED_INF, SCALED, FORMS } form;

/* How an update is cut, and what it leaves. */
typedef struct job {
    const char *strategy;
    int ranks, parts;
    form form;
    bool unrolled;                /* all parts in one step */
    double losses[UPDATES], norms[UPDATES];
    char error[512];
} job;

/* Rows that count: few of the first part, none of the second, most of the third. */
static double weight_of(int row) { return row < 12 ? row == 5 : row < 24 ? 0 : row % 4 * 0.75; }

static td_tensor part_loss(const small_model *m, int rank, int ranks, int part, int parts, double *x, double *w, int32_t *y)
{
    td_context *td = m->hidden.td;
    int rows = ROWS / parts, own = rows / ranks, first = part * rows + rank * own;
    for (int r = 0; r < own; r++) {
        for (int f = 0; f < FEATURES; f++) x[r * FEATURES + f] = check_normal((uint64_t)((first + r) * FEATURES + f));
        w[r] = weight_of(first + r);
        y[r] = (first + r) * 5 % CLASSES;
    }
    td_tensor in = td_batch(td, "x", TD_F64, TD_SHAPE(rows, FEATURES), x);
    td_tensor labels = td_batch(td, "y", TD_I32, TD_SHAPE(rows), y), weights = td_batch(td, "w", TD_F64, TD_SHAPE(rows), w);
    td_tensor h = td_relu(td_matmul_with(in, td_use(m->hidden), 0, 1));
    return td_cross_entropy_weighted(td_matmul_with(h, td_use(m->out), 0, 1), labels, weights);
}

/* One update by sums and weights. */
static bool update_by_parts(const small_model *m, opt_optimizer *opt, opt_scaler *scaler, job *j, int rank, int u)
{
    static _Thread_local double x[PARTS][ROWS * FEATURES], w[PARTS][ROWS];
    static _Thread_local int32_t y[PARTS][ROWS];
    td_context *td = m->hidden.td;
    td_tensor sum[PARTS], weight[PARTS];
    double total = 0, weighed = 0;
    for (int k = 0; k < j->parts; k++) {
        if (!td_quotient(part_loss(m, rank, j->ranks, k, j->parts, x[k], w[k], y[k]), &sum[k], &weight[k])) return false;
        td_keep(sum[k]);
        td_keep(weight[k]);
        td_backward(opt_scaler_scale(scaler, sum[k]));
        bool last = k == j->parts - 1;
        if (j->unrolled && !last) continue;
        td_tensor all = td_add(weight[k], td_scalar(td, weighed));
        for (int i = 0; i < k && j->unrolled; i++) all = td_add(all, weight[i]);
        if (last) opt_step_over(opt, 0.2, all);
        if (!td_step(td)) return false;
        for (int i = j->unrolled ? 0 : k; i <= k; i++) total += td_item(sum[i]), weighed += td_item(weight[i]);
    }
    j->losses[u] = total / weighed;
    j->norms[u] = opt_has_norm(opt) ? td_item(opt_gradient_norm(opt)) : 0;
    return true;
}

static int train_by_parts(par_world *world, int rank, void *user)
{
    job own = *(job *)user;
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .seed = 4, .threads = 1, .poison = true });
    par_attach(td, world, rank, &(par_options){ .strategy = own.strategy, .bucket_bytes = 100, .whole_elements = -1 });
    small_model m = make_small(td, HIDDEN);
    opt_scaler *scaler = own.form == SCALED ? opt_scaler_open(td, &(opt_scaler_options){ .initial = 1024 }) : NULL;
    opt_optimizer *opt = opt_sgd(td_root(td), &(opt_sgd_options){ .momentum = 0.9, .max_norm = own.form == MOMENTUM ? 0 : LIMIT,
                                                                  .clip_inf = own.form == CLIPPED_INF, .scaler = scaler });
    bool good = true;
    for (int u = 0; u < UPDATES && good; u++) good = update_by_parts(&m, opt, scaler, &own, rank, u);
    snprintf(own.error, sizeof own.error, "%s", td_error_text(td));
    if (rank == 0) *(job *)user = own;
    opt_close(opt);
    opt_scaler_close(scaler);
    td_close(td);
    return good ? 0 : 1;
}

static job run_by_parts(job j)
{
    int failed = par_run_threads(j.ranks, &(par_world_options){ .timeout_s = 30 }, train_by_parts, &j);
    ck_assert_msg(!failed, "%s on %d ranks: %s", j.strategy, j.ranks, j.error);
    return j;
}

/* The same batch as one, by the mean itself: what all else must come to. */
static job run_as_one(form f)
{
    job j = { .form = f };
    double x[ROWS * FEATURES], w[ROWS];
    int32_t y[ROWS];
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .seed = 4, .threads = 1 });
    small_model m = make_small(td, HIDDEN);
    opt_optimizer *opt = opt_sgd(td_root(td), &(opt_sgd_options){ .momentum = 0.9, .max_norm = f == MOMENTUM ? 0 : LIMIT,
                                                                  .clip_inf = f == CLIPPED_INF });
    for (int u = 0; u < UPDATES; u++) {
        td_tensor loss = part_loss(&m, 0, 1, 0, 1, x, w, y);
        td_backward(loss);
        opt_step(opt, 0.2);
        ck_assert(td_step(td));
        j.losses[u] = td_item(loss);
        j.norms[u] = opt_has_norm(opt) ? td_item(opt_gradient_norm(opt)) : 0;
    }
    ck_assert_no_error(td);
    opt_close(opt);
    td_close(td);
    return j;
}

START_TEST(test_parts_are_divided_once)
{
    static const struct { const char *strategy; int ranks; } worlds[] = {
        { "single", 1 }, { "ddp", 2 }, { "fsdp", 2 }, { "zero2", 2 }, { "zero3", 2 },
        { "ddp", 3 }, { "fsdp", 3 }, { "zero2", 3 }, { "zero1", 3 },
    };
    for (int f = 0; f < FORMS; f++) {
        job one = run_as_one((form)f);
        ck_assert(f == MOMENTUM || one.norms[0] > LIMIT); /* it is clipped */
        for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
            for (int way = 0; way < 3; way++) { /* one part, three steps, three parts in one step */
                job got = run_by_parts((job){ .strategy = worlds[w].strategy, .ranks = worlds[w].ranks, .form = (form)f,
                                              .parts = way ? PARTS : 1, .unrolled = way == 2 });
                for (int u = 0; u < UPDATES; u++) {
                    ck_assert_msg(fabs(got.losses[u] - one.losses[u]) <= 1e-10 * one.losses[u] &&
                                  fabs(got.norms[u] - one.norms[u]) <= 1e-10 * one.norms[u],
                                  "%s on %d ranks, form %d, way %d: loss and norm %d are %.17g and %.17g, not %.17g and %.17g",
                                  got.strategy, got.ranks, f, way, u, got.losses[u], got.norms[u], one.losses[u], one.norms[u]);
                }
            }
    }
}
END_TEST

/* What is taken apart and what is not. */
START_TEST(test_quotients)
{
    td_context *td = open_cpu(TD_F64);
    static const double x[] = { 1, 2, 3, 4 }, w[] = { 0, 0, 0, 0 };
    static const int32_t labels_of_two[] = { IGNORED, IGNORED };
    td_tensor sum, weight, a = td_input(td, "x", TD_F64, TD_SHAPE(2, 2), x), v = td_input(td, "w", TD_F64, TD_SHAPE(2), w);
    td_tensor y = td_input(td, "y", TD_I32, TD_SHAPE(2), labels_of_two);
    td_state p = td_parameter(td_root(td), "p", (td_shape){ 0 }, td_init_constant(2));
    td_state b = td_buffer(td_root(td), "b", TD_F64, (td_shape){ 0 }, td_init_constant(4));
    td_tensor all = td_sum(a, TD_ALL, TD_DROP), rows = td_scalar(td, 5);

    ck_assert(!td_quotient(all, &sum, &weight));
    ck_assert(!td_quotient(td_cross_entropy(a, td_cast(v, TD_I32)), &sum, &weight)); /* its rows count alike */
    ck_assert(!td_quotient(td_div(a, rows), &sum, &weight));                 /* no scalar */
    ck_assert(!td_quotient(td_div(all, td_use(p)), &sum, &weight));          /* the divisor is trained */
    ck_assert(!td_quotient(td_div(all, td_exp(td_mul(rows, td_use(p)))), &sum, &weight));
    ck_assert(td_quotient(td_div(td_mul(all, td_use(p)), td_use(b)), &sum, &weight)); /* a buffer is none that trains */
    ck_assert(td_quotient(td_mse_weighted(a, a, v), &sum, &weight));
    ck_assert(td_quotient(td_bce(a, a, v), &sum, &weight));

    td_tensor loss = td_cross_entropy_with(a, y, &(td_cross_entropy_options){ .ignores = true, .ignored = IGNORED });
    ck_assert(td_quotient(loss, &sum, &weight));
    td_keep(loss);
    td_keep(sum);
    td_keep(weight);
    ck_assert(td_step(td));
    ck_assert(isnan(td_item(loss))); /* nothing counts */
    ck_assert_double_eq(td_item(sum), 0);
    ck_assert_double_eq(td_item(weight), 0);
    ck_assert(!td_quotient(loss, &sum, &weight)); /* of a step gone by */
    ck_assert_no_error(td);
    td_close(td);
}
END_TEST

START_TEST(test_the_weight_is_a_scalar)
{
    td_context *td = open_cpu(TD_F32);
    static const float w[] = { 1, 2 };
    small_model m = make_small(td, HIDDEN);
    opt_optimizer *opt = opt_sgd(td_root(td), NULL);
    td_backward(td_sum(td_use(m.out), TD_ALL, TD_DROP));
    opt_step_over(opt, 0.1, td_input(td, "w", TD_F32, TD_SHAPE(2), w));
    ck_assert(strstr(td_error_text(td), "opt_step_over: the weight must be a scalar of f32") != NULL);
    opt_close(opt);
    td_close(td);
}
END_TEST

static int program(int argc, char **argv)
{
    int k = 0;
    if (!strcmp(getenv("DENOMINATORS"), "model")) return model_program(argc, argv);
    while (k < KINDS - 1 && strcmp(getenv("DENOMINATORS"), kinds[k])) k++;
    return train_uneven(run_open(&argc, &argv, &(run_defaults){ .name = "small" }), (kind)k, NULL, NULL);
}

int main(int argc, char **argv)
{
    if (getenv("DENOMINATORS")) return program(argc, argv);
    const TTest *const tests[] = { test_micro_batches_are_one_batch, test_an_update_has_losses_of_one_kind,
                                   test_ranks_and_micro_batches_are_one_batch, test_plans_and_benchmarks_know_weights,
                                   test_parts_are_divided_once, test_quotients, test_the_weight_is_a_scalar };
    return check_main("denominators", tests, (int)(sizeof tests / sizeof tests[0]));
}
