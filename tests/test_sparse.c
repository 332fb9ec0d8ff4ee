/* Row-sparse gradients of embedding tables, and the optimizers that take them: equal to dense ones, on one rank and on
 * several, at a cost that does not know how many rows the table has; row-wise Adagrad, sparse and dense.
 *
 * Labels: threads
 * Timeout: 300 s
 */
#include "tests/memory.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>
#include <tandem/rewrite.h>

/* ---- Small tables, by hand -------------------------------------------------------------------------------- */

typedef struct small {
    td_context *td;
    td_state table;                           /* (5, 2), from 0 */
} small;

static small small_open(td_dtype dtype, bool sparse)
{
    td_context *td = open_cpu(dtype);
    small s = { td, td_parameter(td_child(td_root(td), "emb"), "weight", TD_SHAPE(5, 2), td_init_constant(0)) };
    if (sparse) td_sparse_rows(s.table);
    return s;
}

static double *small_read(small s)
{
    double *values = check_alloc(10 * sizeof *values);
    ck_assert_msg(td_state_read(s.table, 0, 10, values), "%s", td_error_text(s.td));
    return values;
}

/* Rows with literal gradients: the loss is the sum of y times g. */
static td_tensor weighed(small s, const int32_t *ids, const double *g, int64_t count)
{
    td_tensor y = td_embedding(td_use(s.table), td_input(s.td, "ids", TD_I32, TD_SHAPE(count), ids));
    return td_sum(td_mul(y, td_input(s.td, "g", TD_F64, TD_SHAPE(count, 2), g)), TD_ALL, TD_DROP);
}

START_TEST(test_duplicates_are_summed_and_strangers_left_out)
{
    static const int32_t ids[] = { 3, 1, 5, 3, -1, 1, 3 };
    static const double g[] = { 1, 10, 2, 20, 1000, 1000, 4, 40, 1000, 1000, 8, 80, 16, 160 };
    static const double want[] = { 0, 0, -10, -100, 0, 0, -21, -210, 0, 0 };
    small s = small_open(TD_F64, true);
    opt_optimizer *opt = opt_sgd(td_root(s.td), &(opt_sgd_options){ .track_norm = true });
    td_backward(weighed(s, ids, g, 7));
    opt_step(opt, 1);
    td_step(s.td);
    ck_assert_no_error(s.td);
    ck_assert_near(small_read(s), want, 10, 0);
    ck_assert_double_eq(td_item(opt_gradient_norm(opt)), sqrt(54641)); /* 10^2 + 100^2 + 21^2 + 210^2: row 5 is not there */
    td_close(s.td);
}
END_TEST

/* Ids alike in some of their digits to the base 2048, by which they are sorted. */
START_TEST(test_ids_of_a_large_table)
{
    enum { V = (1 << 22) + 5, IDS = 10 };
    static const int32_t ids[IDS] = { V - 1, 1, 2049, V - 1, 0, 1 << 22, 2048, 1, 2049, 0 };
    static const double g[IDS] = { 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 };
    static const struct { int64_t row; double value; } want[] = {
        { 0, -528 }, { 1, -130 }, { 2, 0 }, { 2048, -64 }, { 2049, -260 }, { 1 << 22, -32 }, { V - 2, 0 }, { V - 1, -9 },
    };
    td_context *td = open_cpu(TD_F64);
    td_state table = td_parameter(td_root(td), "table", TD_SHAPE(V, 1), td_init_constant(0));
    td_sparse_rows(table);
    opt_optimizer *opt = opt_sgd(td_root(td), &(opt_sgd_options){ .track_norm = true });
    td_tensor y = td_embedding(td_use(table), td_input(td, "ids", TD_I32, TD_SHAPE(IDS), ids));
    td_backward(td_sum(td_mul(y, td_input(td, "g", TD_F64, TD_SHAPE(IDS, 1), g)), TD_ALL, TD_DROP));
    opt_step(opt, 1);
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        double value;
        ck_assert(td_state_read(table, want[i].row, 1, &value));
        ck_assert_double_eq(value, want[i].value);
    }
    ck_assert_double_eq(td_item(opt_gradient_norm(opt)), sqrt(368485)); /* each row once: the sum of those squares */
    td_close(td);
}
END_TEST

/* 3^2 + 4^2 of the summed rows, where the rows given have 1 + 4 + 16. */
START_TEST(test_the_norm_is_that_of_summed_rows)
{
    static const int32_t ids[] = { 2, 2, 4 };
    static const double g[] = { 1, 0, 2, 0, 0, 4 };
    small s = small_open(TD_F64, true);
    opt_optimizer *opt = opt_sgd(td_root(s.td), &(opt_sgd_options){ .max_norm = 2.5 });
    td_backward(weighed(s, ids, g, 3));
    opt_step(opt, 1);
    td_step(s.td);
    ck_assert_no_error(s.td);
    ck_assert_double_eq(td_item(opt_gradient_norm(opt)), 5);
    double scale = 2.5 / (5 + 1e-6);
    ck_assert_near(small_read(s), ((double[]){ 0, 0, 0, 0, -3 * scale, 0, 0, 0, 0, -4 * scale }), 10, 1e-16);
    td_close(s.td);
}
END_TEST

/* Row 3: d = (3, 4), then (1, 7): sums 12.5, then 37.5. */
START_TEST(test_row_wise_adagrad_by_hand)
{
    static const int32_t ids[] = { 3 };
    static const double g[2][2] = { { 3, 4 }, { 1, 7 } };
    for (int sparse = 0; sparse < 2; sparse++) {
        small s = small_open(TD_F64, sparse);
        opt_optimizer *opt = opt_adagrad(td_root(s.td), &(opt_adagrad_options){ .row_wise = true });
        for (int step = 0; step < 2; step++) {
            td_backward(weighed(s, ids, g[step], 1));
            opt_step(opt, 0.5);
            ck_assert_msg(td_step(s.td), "%s", td_error_text(s.td));
        }
        td_state sum = td_state_named(s.td, "emb.weight.row_sum");
        ck_assert_int_ne(sum.id, TD_NONE);
        ck_assert(td_shape_equal(td_state_shape(sum), TD_SHAPE(5)));
        double sums[5], first = 0.5 / sqrt(12.5), second = 0.5 / sqrt(37.5);
        ck_assert(td_state_read(sum, 0, 5, sums));
        ck_assert_near(sums, ((double[]){ 0, 0, 0, 37.5, 0 }), 5, 0);
        ck_assert_near(small_read(s), ((double[]){ 0, 0, 0, 0, 0, 0, -3 * first - second, -4 * first - 7 * second, 0, 0 }), 10, 1e-10);
        td_close(s.td);
    }
}
END_TEST

START_TEST(test_no_ids_and_no_use_change_nothing)
{
    static const double none[2] = { 0 };
    small s = small_open(TD_F64, true);
    td_state other = td_parameter(td_root(s.td), "other", TD_SHAPE(2), td_init_constant(1));
    opt_optimizer *opt = opt_adagrad(td_root(s.td), &(opt_adagrad_options){ .max_norm = 1 });
    for (int step = 0; step < 2; step++) {
        td_tensor loss = td_sum(td_square(td_use(other)), TD_ALL, TD_DROP);
        if (step == 0) loss = td_add(loss, weighed(s, (const int32_t[]){ 0 }, none, 0));
        td_backward(loss);
        opt_step(opt, 0.25);
        ck_assert_msg(td_step(s.td), "%s", td_error_text(s.td));
    }
    ck_assert_near(small_read(s), ((double[10]){ 0 }), 10, 0);
    ck_assert_str_has(log_text(), "'emb.weight' got no gradient");
    td_close(s.td);
}
END_TEST

START_TEST(test_a_gradient_asked_for_is_dense)
{
    static const int32_t ids[] = { 1, 4, 1 };
    static const double g[] = { 1, 2, 3, 4, 5, 6 };
    small s = small_open(TD_F64, true);
    td_tensor loss = weighed(s, ids, g, 3), dense = td_gradient(loss, td_use(s.table));
    td_keep(dense);
    opt_optimizer *opt = opt_sgd(td_root(s.td), NULL);
    td_backward(loss);
    opt_step(opt, 1);
    ck_assert_msg(td_step(s.td), "%s", td_error_text(s.td));
    double got[10], want[10] = { 0, 0, 6, 8, 0, 0, 0, 0, 3, 4 };
    ck_assert(td_read(dense, got));
    ck_assert_near(got, want, 10, 0);
    for (int i = 0; i < 10; i++) want[i] = -want[i];
    ck_assert_near(small_read(s), want, 10, 0);
    td_close(s.td);
}
END_TEST

/* The update is done in place, unless somebody keeps the table as it was. */
START_TEST(test_an_old_table_can_be_kept)
{
    static const int32_t ids[] = { 1 };
    static const double g[] = { 1, 2 };
    small s = small_open(TD_F64, true);
    opt_optimizer *opt = opt_sgd(td_root(s.td), NULL);
    td_tensor before = td_use(s.table);
    td_keep(before);
    td_backward(weighed(s, ids, g, 1));
    opt_step(opt, 1);
    td_tensor after = td_use(s.table);
    td_keep(after);
    ck_assert_msg(td_step(s.td), "%s", td_error_text(s.td));
    double got[10];
    ck_assert(td_read(before, got));
    ck_assert_near(got, ((double[10]){ 0 }), 10, 0);
    ck_assert(td_read(after, got));
    ck_assert_near(got, ((double[]){ 0, 0, -1, -2, 0, 0, 0, 0, 0, 0 }), 10, 0);
    ck_assert_near(small_read(s), got, 10, 0);
    td_close(s.td);
}
END_TEST

START_TEST(test_the_norm_can_be_read_before_the_step)
{
    static const int32_t ids[] = { 1, 1 };
    static const double g[] = { 1, 2, 2, 2 };
    small s = small_open(TD_F64, true);
    opt_optimizer *opt = opt_sgd(td_root(s.td), &(opt_sgd_options){ .track_norm = true });
    td_backward(weighed(s, ids, g, 2));
    opt_step(opt, 1);
    ck_assert_double_eq(td_item(opt_gradient_norm(opt)), 5);
    ck_assert_near(small_read(s), ((double[10]){ 0 }), 10, 0);
    ck_assert_msg(td_step(s.td), "%s", td_error_text(s.td));
    ck_assert_near(small_read(s), ((double[]){ 0, 0, -3, -4, 0, 0, 0, 0, 0, 0 }), 10, 0);
    td_close(s.td);
}
END_TEST

/* ---- Sparse against dense --------------------------------------------------------------------------------- */

enum { ROWS = 37, WIDTH = 13, BATCH = 36, BAG = 3, OUT = 4, STEPS = 8 };

typedef struct job {
    bool sparse, row_wise, sgd;
    bool inf;                                 /* max_norm is of the inf-norm */
    td_dtype dtype;
    int lookups;                              /* of the table in a forward: 1 or 2 */
    int micros;                               /* micro-batches of a step, unrolled */
    double max_norm, rate_decay;
    const char *strategy, *passes;
    double losses[STEPS], norms[STEPS];
    double table[ROWS * WIDTH], sums[ROWS * WIDTH];
    char error[512];
} job;

typedef struct network {
    nn_embedding table;
    nn_linear out;
} network;

static int32_t id_of(int step, int row, int k) { return (int32_t)(fabs(check_normal((uint64_t)((step * BATCH + row) * BAG + k))) * 17) % ROWS; }

/* The loss of rows [first, first + count), of which this rank has `own`. */
static td_tensor loss_of(td_context *td, const network *n, const job *j, int count, const int32_t *ids, const void *target)
{
    td_tensor bag = td_batch(td, "ids", TD_I32, TD_SHAPE(count, BAG), ids);
    td_tensor x = td_mean(nn_embedding_apply(&n->table, bag), 1, TD_DROP);
    if (j->lookups == 2) {
        td_tensor again = nn_embedding_apply(&n->table, td_slice(bag, 1, 1, 2));
        x = td_add(x, td_tanh(td_reshape(again, count, WIDTH)));
    }
    return td_mse(nn_linear_apply(&n->out, x), td_batch(td, "target", td_float(td), TD_SHAPE(count, OUT), target));
}

enum { MOST_MICROS = 3 };
typedef struct own_rows {
    int32_t ids[BATCH * BAG];
    double target[BATCH * OUT];
} own_rows;

static void fill_rows(own_rows *to, td_dtype dtype, int step, int first, int count)
{
    for (int r = 0; r < count; r++) {
        for (int k = 0; k < BAG; k++) to->ids[r * BAG + k] = id_of(step, first + r, k);
        for (int o = 0; o < OUT; o++) {
            double t = to->ids[r * BAG] % (o + 2);
            if (dtype == TD_F64) to->target[r * OUT + o] = t;
            else ((float *)to->target)[r * OUT + o] = (float)t;
        }
    }
}

static opt_optimizer *optimizer_of(td_module root, const job *j)
{
    if (j->sgd) return opt_sgd(root, &(opt_sgd_options){ .max_norm = j->max_norm, .clip_inf = j->inf, .track_norm = true });
    return opt_adagrad(root, &(opt_adagrad_options){ .row_wise = j->row_wise, .rate_decay = j->rate_decay, .max_norm = j->max_norm,
                                                     .clip_inf = j->inf, .track_norm = true });
}

static bool read_doubles(td_state s, double *to)
{
    int64_t n = td_shape_elements(td_state_shape(s)), begin, end;
    if (!td_state_owned(s, &begin, &end) || !td_state_read(s, begin, end - begin, to + begin)) return false;
    if (td_state_dtype(s) == TD_F64) return true;
    for (int64_t i = n; i-- > 0;) {
        float narrow;
        memcpy(&narrow, (const char *)to + i * 4, 4);
        to[i] = narrow;
    }
    return true;
}

typedef struct run_of {
    const job *asked;
    job *done;
} run_of;

static int train(par_world *world, int rank, void *user)
{
    const run_of *r = user;
    job own = *r->asked;
    own_rows *rows = malloc(MOST_MICROS * sizeof *rows);
    if (!rows) return 1;
    td_context *td = td_open(&(td_options){ .dtype = own.dtype, .seed = 3, .threads = 2, .poison = true, .passes = own.passes });
    par_attach(td, world, rank, &(par_options){ .strategy = own.strategy });
    td_module root = td_root(td);
    network n = { nn_embedding_make_with(root, "table", ROWS, WIDTH, &(nn_embedding_options){ .sparse = own.sparse }),
                  nn_linear_make(root, "out", WIDTH, OUT) };
    opt_optimizer *opt = optimizer_of(root, &own);
    bool good = true;
    for (int s = 0; s < STEPS && good; s++) {
        td_tensor loss[MOST_MICROS];
        int micro = BATCH / own.micros, mine = micro / par_world_size(world);
        for (int k = 0; k < own.micros; k++) {
            fill_rows(&rows[k], own.dtype, s, k * micro + rank * mine, mine);
            loss[k] = td_scale(loss_of(td, &n, &own, micro, rows[k].ids, rows[k].target), 1.0 / own.micros);
            td_backward(loss[k]);
        }
        opt_step(opt, 0.1);
        good = td_step(td);
        for (int k = 0; k < own.micros && good; k++) own.losses[s] += td_item(loss[k]);
        if (good) own.norms[s] = td_item(opt_gradient_norm(opt));
    }
    td_state sums = td_state_named(td, own.row_wise ? "table.weight.row_sum" : "table.weight.sum");
    good = good && read_doubles(n.table.weight, own.table) && (own.sgd || read_doubles(sums, own.sums));
    snprintf(own.error, sizeof own.error, "%s", td_error_text(td));
    if (rank == 0) *r->done = own;
    td_close(td);
    free(rows);
    return good ? 0 : 1;
}

static job run(int ranks, job j)
{
    if (!j.strategy) j.strategy = ranks == 1 ? "single" : "ddp";
    job done = j;
    int failed = par_run_threads(ranks, &(par_world_options){ .timeout_s = 20 }, train, &(run_of){ &j, &done });
    ck_assert_msg(!failed, "%s on %d ranks: %s", j.strategy, ranks, done.error);
    ck_assert(done.losses[STEPS - 1] < done.losses[0]);
    return done;
}

static void assert_same(const job *got, const job *want, double tolerance)
{
    ck_assert_near(got->losses, want->losses, STEPS, tolerance);
    ck_assert_near(got->norms, want->norms, STEPS, tolerance);
    ck_assert_near(got->table, want->table, ROWS * WIDTH, tolerance);
    ck_assert_near(got->sums, want->sums, ROWS * WIDTH, tolerance);
}

/* One lookup, no clipping: rows are added in the order in which a dense gradient adds them. */
START_TEST(test_one_lookup_equals_dense_to_the_bit)
{
    static const td_dtype dtypes[] = { TD_F64, TD_F32, TD_BF16 };
    for (int sgd = 0; sgd < 2; sgd++)
        for (int d = 0; d < (has_bf16_products() ? 3 : 2); d++) {
            job j = { .dtype = dtypes[d], .lookups = 1, .micros = 1, .sgd = sgd };
            job dense = run(1, j);
            j.sparse = true;
            job sparse = run(1, j);
            ck_assert_near(sparse.table, dense.table, ROWS * WIDTH, 0);
            ck_assert_near(sparse.sums, dense.sums, ROWS * WIDTH, 0);
            ck_assert_near(sparse.losses, dense.losses, STEPS, 0);
        }
}
END_TEST

/* Two lookups, three micro-batches in one step, clipping, a falling rate. */
START_TEST(test_uses_join_and_clipping_counts_them)
{
    for (int kind = 0; kind < 3; kind++) {
        job j = { .dtype = TD_F64, .lookups = 2, .micros = 3, .max_norm = 0.3, .rate_decay = 0.1, .sgd = kind == 1, .row_wise = kind == 2 };
        job dense = run(1, j);
        ck_assert(dense.norms[0] > 0.3);
        j.sparse = true;
        job sparse = run(1, j);
        assert_same(&sparse, &dense, 1e-12);
        j.micros = 1;
        sparse = run(1, j);
        assert_same(&sparse, &dense, 1e-12);
    }
}
END_TEST

START_TEST(test_ranks_equal_one_dense_rank)
{
    static const char *const strategies[] = { "ddp", "zero1", "zero2", "zero3", "fsdp" };
    for (int kind = 0; kind < 3; kind++) {
        job j = { .dtype = TD_F64, .lookups = 2, .micros = 2, .max_norm = kind == 2 ? 0.05 : 0.3, .row_wise = kind == 1, .inf = kind == 2 };
        job dense = run(1, j);
        j.sparse = true;
        for (int ranks = 1; ranks <= 3; ranks++)
            for (int s = 0; s < 5; s++) {
                j.strategy = strategies[s];
                job sparse = run(ranks, j);
                assert_same(&sparse, &dense, 1e-12);
            }
        j.strategy = "hsdp:2x2", j.micros = 3;
        job grouped = run(4, j);
        assert_same(&grouped, &dense, 1e-12);
    }
}
END_TEST

/* The sums of rows are whole on every rank; parameters under fsdp are not, so the curve stands for them. */
START_TEST(test_dense_row_wise_on_ranks)
{
    static const char *const strategies[] = { "ddp", "zero1", "zero2", "zero3", "fsdp" };
    job j = { .dtype = TD_F64, .lookups = 2, .micros = 1, .max_norm = 0.3, .row_wise = true };
    job one = run(1, j);
    for (int ranks = 2; ranks <= 3; ranks++)
        for (int s = 0; s < 5; s++) {
            j.strategy = strategies[s];
            job many = run(ranks, j);
            ck_assert_near(many.losses, one.losses, STEPS, 1e-12);
            ck_assert_near(many.norms, one.norms, STEPS, 1e-12);
            ck_assert_near(many.sums, one.sums, ROWS, 1e-12);
        }
}
END_TEST

/* What nobody reads of the dense gradient is no work even where nothing is simplified, and the order of collectives is free. */
START_TEST(test_passes_change_nothing)
{
    job j = { .dtype = TD_F64, .sparse = true, .lookups = 2, .micros = 2, .max_norm = 0.3 };
    job with = run(2, j);
    j.passes = "-simplify,-fuse,-schedule";
    job without = run(2, j);
    assert_same(&without, &with, 1e-14);
}
END_TEST

/* ---- What a step costs ------------------------------------------------------------------------------------ */

/* The plan of rank 0 of `ranks` for a table of `rows` rows. */
static td_report cost_of(int64_t rows, int ranks, const char *strategy, bool row_wise)
{
    enum { IDS = 60, D = 16 };
    static const int32_t ids[IDS];
    par_world *world = par_world_none(ranks, 0);
    td_context *td = open_cpu(TD_F32);
    par_attach(td, world, 0, &(par_options){ .strategy = strategy });
    nn_embedding table = nn_embedding_make_with(td_root(td), "table", rows, D, &(nn_embedding_options){ .sparse = true });
    opt_optimizer *opt = opt_adagrad(td_root(td), &(opt_adagrad_options){ .row_wise = row_wise, .max_norm = 1 });
    td_tensor y = nn_embedding_apply(&table, td_batch(td, "ids", TD_I32, TD_SHAPE(IDS), ids));
    td_backward(td_mean(td_square(y), TD_ALL, TD_DROP));
    opt_step(opt, 0.1);
    ck_assert_msg(td_plan(td), "%s", td_error_text(td));
    td_report report = td_last_report(td);
    ck_assert_int_ge(report.state_bytes, rows * D * 4 + rows * (row_wise ? 1 : D) * 4);
    td_close(td);
    par_world_close(world);
    return report;
}

START_TEST(test_a_steps_cost_does_not_know_the_rows_of_the_table)
{
    static const struct { int ranks; const char *strategy; } worlds[] = { { 1, "single" }, { 2, "ddp" }, { 3, "ddp" }, { 3, "fsdp" } };
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
        for (int row_wise = 0; row_wise < 2; row_wise++) {
            td_report few = cost_of(100, worlds[w].ranks, worlds[w].strategy, row_wise);
            td_report many = cost_of(100000000, worlds[w].ranks, worlds[w].strategy, row_wise);
            ck_assert_int_eq(many.step_bytes, few.step_bytes);
            ck_assert_int_eq(many.live_bytes, few.live_bytes);
            ck_assert_int_eq(many.flops, few.flops);
            ck_assert_int_eq(many.bytes_moved, few.bytes_moved);
            ck_assert_int_eq(many.comm_bytes, few.comm_bytes);
            ck_assert_int_lt(many.step_bytes, 6 * 60 * 16 * 4);
        }
}
END_TEST

/* Gathered: 60 ids of 4 bytes and 60 rows of 64; the loss, a scalar, is reduced: 2 (r - 1) / r of 4 bytes, rounded up. */
START_TEST(test_ranks_send_ids_and_rows)
{
    ck_assert_int_eq(cost_of(1000, 2, "ddp", false).comm_bytes, 30 * 4 + 30 * 64 + 4);
    ck_assert_int_eq(cost_of(1000, 3, "ddp", false).comm_bytes, 2 * 20 * 4 + 2 * 20 * 64 + 6);
}
END_TEST

/* ---- Errors ------------------------------------------------------------------------------------------------ */

START_TEST(test_rules_that_move_other_rows_are_refused)
{
    small s = small_open(TD_F64, true);
    td_module root = td_root(s.td);
    ck_assert_ptr_null(opt_adamw(root, NULL));
    ck_assert_str_eq(td_error_text(s.td), "adamw: 'emb.weight' has row-sparse gradients, and this rule moves rows without a gradient too; "
                                          "use opt_adagrad, or opt_sgd without momentum, or let the table be dense");
    td_clear_error(s.td);
    ck_assert_ptr_null(opt_sgd(root, &(opt_sgd_options){ .momentum = 0.9 }));
    ck_assert_str_has(td_error_text(s.td), "sgd_momentum: 'emb.weight' has row-sparse gradients");
    td_clear_error(s.td);
    ck_assert_ptr_null(opt_lion(root, NULL));
    ck_assert_str_has(td_error_text(s.td), "lion: 'emb.weight' has row-sparse gradients");
    td_clear_error(s.td);
    ck_assert_ptr_null(opt_adagrad(root, &(opt_adagrad_options){ .decay = 0.5, .name = "a" }));
    ck_assert_str_eq(td_error_text(s.td), "opt_adagrad: 'emb.weight' has row-sparse gradients, which allow no decay (here 0.5); put it in a group "
                                          "with decay 0, or let the table be dense");
    td_clear_error(s.td);
    opt_group group = { .pattern = "emb.*", .decay = 0.25 };
    ck_assert_ptr_null(opt_adagrad(root, &(opt_adagrad_options){ .groups = &group, .group_count = 1, .name = "b" }));
    ck_assert_str_has(td_error_text(s.td), "allow no decay (here 0.25)");
    td_clear_error(s.td);
    group.decay = 0;
    ck_assert_ptr_nonnull(opt_adagrad(root, &(opt_adagrad_options){ .decay = 0.5, .groups = &group, .group_count = 1, .name = "c" }));
    td_close(s.td);
}
END_TEST

/* A rule of a user's own, given to td_update directly. */
START_TEST(test_an_update_by_another_rule_is_refused)
{
    static const td_update_rule rule = { .name = "mine" };
    small s = small_open(TD_F64, true);
    td_tensor one = td_fill(s.td, TD_F64, (td_shape){ 0 }, 1);
    td_update_call call = { .rule = &rule, .gradients = td_gradients_at(s.td, &s.table, 1, TD_HERE), .states = &s.table, .count = 1,
                            .rate = one, .scale = one, .updates = one };
    td_update_at(&call, TD_HERE);
    ck_assert_str_has(td_error_text(s.td), "mine: 'emb.weight' has row-sparse gradients");
    td_close(s.td);
}
END_TEST

START_TEST(test_other_readers_of_the_table_are_named)
{
    static const int32_t ids[] = { 1 };
    static const double g[] = { 1, 2 };
    small s = small_open(TD_F64, true);
    opt_optimizer *opt = opt_sgd(td_root(s.td), NULL);
    td_tensor loss = weighed(s, ids, g, 1);
    td_backward(td_add(loss, td_sum(td_square(td_use(s.table)), TD_ALL, TD_DROP)));
    opt_step(opt, 1);
    ck_assert(!td_step(s.td));
    ck_assert_str_has(td_error_text(s.td), "backward: 'emb.weight' has row-sparse gradients, but mul gives it a dense one; read it by td_embedding "
                                           "alone, or let the table be dense");
    td_close(s.td);
}
END_TEST

START_TEST(test_rows_do_not_outlive_their_step)
{
    static const int32_t ids[] = { 1 };
    static const double g[] = { 1, 2 };
    small s = small_open(TD_F64, true);
    opt_optimizer *opt = opt_sgd(td_root(s.td), NULL);
    td_backward(weighed(s, ids, g, 1));
    ck_assert(!td_step(s.td));
    ck_assert_str_has(td_error_text(s.td), "backward: 'emb.weight' has row-sparse gradients, which no update of this step consumes, and they cannot "
                                           "outlive the step; record all micro-batches and the update in one step, or let the table be dense");
    ck_assert_str_has(td_error_text(s.td), "test_sparse.c:");
    td_clear_error(s.td);
    td_backward(weighed(s, ids, g, 1));
    opt_step(opt, 1);
    ck_assert_msg(td_step(s.td), "%s", td_error_text(s.td));
    ck_assert_near(small_read(s), ((double[]){ 0, 0, -1, -2, 0, 0, 0, 0, 0, 0 }), 10, 0);
    td_close(s.td);
}
END_TEST

START_TEST(test_what_can_ask_for_rows_and_when)
{
    small s = small_open(TD_F64, false);
    td_state flat = td_parameter(td_root(s.td), "flat", TD_SHAPE(4), td_init_constant(0));
    td_state late = td_parameter(td_root(s.td), "late", TD_SHAPE(4, 2), td_init_constant(0));
    td_sparse_rows(flat);
    ck_assert_str_eq(td_error_text(s.td), "td_sparse_rows: 'flat' is no table: only a parameter (V, D) has row-sparse gradients");
    td_clear_error(s.td);
    td_sparse_rows(late);
    ck_assert(td_state_sparse(late));
    td_freeze(late);
    ck_assert(!td_state_sparse(late));
    opt_optimizer *opt = opt_adamw(td_root(s.td), NULL);
    ck_assert_ptr_nonnull(opt);
    td_sparse_rows(s.table);
    ck_assert_str_eq(td_error_text(s.td), "td_sparse_rows: 'emb.weight' has an optimizer already; ask before it is made");
    td_close(s.td);

    s = small_open(TD_F64, false);
    ck_assert_double_eq(td_item(td_sum(td_use(s.table), TD_ALL, TD_DROP)), 0);
    td_sparse_rows(s.table);
    ck_assert_str_eq(td_error_text(s.td), "td_sparse_rows: 'emb.weight' was in a step already; ask before the first step");
    td_close(s.td);
}
END_TEST

START_TEST(test_a_moment_has_one_shape)
{
    small s = small_open(TD_F64, false);
    td_state rows = td_moment_rows(s.table, "sum");
    ck_assert(td_shape_equal(td_state_shape(rows), TD_SHAPE(5)));
    ck_assert_int_eq(td_moment_rows(s.table, "sum").id, rows.id);
    ck_assert_int_eq(td_moment(s.table, "sum").id, TD_NONE);
    ck_assert_str_eq(td_error_text(s.td), "td_moment: 'emb.weight.sum' exists already, with one element a row");
    td_close(s.td);
}
END_TEST

/* ---- Memory ------------------------------------------------------------------------------------------------ */

static bool works_with(memory_test *memory)
{
    static const int32_t ids[] = { 1, 3, 1 };
    td_allocator allocator = { .user = memory, .get = memory_get, .put = memory_put };
    td_context *td = td_open(&(td_options){ .log = check_log_line, .allocator = &allocator, .threads = 1 });
    nn_embedding table = nn_embedding_make_with(td_root(td), "table", 9, 2, &(nn_embedding_options){ .sparse = true });
    nn_linear out = nn_linear_make(td_root(td), "out", 2, 2);
    opt_optimizer *opt = opt_adagrad(td_root(td), &(opt_adagrad_options){ .row_wise = true, .max_norm = 1 });
    td_tensor y = nn_linear_apply(&out, nn_embedding_apply(&table, td_input(td, "ids", TD_I32, TD_SHAPE(3), ids)));
    td_backward(td_sum(td_square(y), TD_ALL, TD_DROP));
    opt_step(opt, 1);
    bool good = td_step(td);
    ck_assert(good || td_error(td) == TD_ERROR_MEMORY);
    td_close(td);
    return good;
}

START_TEST(test_every_allocation_may_fail)
{
    memory_test memory = { .refused = -1 };
    int refused = 0;
    for (memory_refuse(&memory, 0); !works_with(&memory); memory_refuse(&memory, ++refused)) ck_assert_int_eq(memory.held, 0);
    ck_assert_int_eq(memory.held, 0);
    ck_assert_int_gt(refused, 30);
}
END_TEST

TESTS("sparse", test_duplicates_are_summed_and_strangers_left_out, test_ids_of_a_large_table,
      test_the_norm_is_that_of_summed_rows, test_row_wise_adagrad_by_hand, test_no_ids_and_no_use_change_nothing, test_a_gradient_asked_for_is_dense, test_an_old_table_can_be_kept,
      test_the_norm_can_be_read_before_the_step, test_one_lookup_equals_dense_to_the_bit, test_uses_join_and_clipping_counts_them,
      test_ranks_equal_one_dense_rank, test_dense_row_wise_on_ranks, test_passes_change_nothing,
      test_a_steps_cost_does_not_know_the_rows_of_the_table, test_ranks_send_ids_and_rows, test_rules_that_move_other_rows_are_refused,
      test_an_update_by_another_rule_is_refused, test_other_readers_of_the_table_are_named, test_rows_do_not_outlive_their_step,
      test_what_can_ask_for_rows_and_when, test_a_moment_has_one_shape, test_every_allocation_may_fail)
