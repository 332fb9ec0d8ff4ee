/* Every strategy gives one rank's curve: an MLP with dropout and clipping, ranks 1-4, accumulation 1-3.
 *
 * Labels: threads
 * Timeout: 300 s
 */
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

enum { ROWS = 144, IN = 20, HIDDEN = 48, CLASSES = 5, STEPS = 20 };

typedef struct job {
    td_dtype dtype;
    const char *strategy, *units, *passes;
    int accumulate;
    bool clip, unrolled;                      /* all micro-batches in one step */
    double losses[STEPS];
    td_report report;                         /* of the step that updates */
    int64_t sent_per_update, state_bytes;
    char error[512];
} job;

static double inputs[ROWS][IN];
static float inputs_f32[ROWS][IN];
static int32_t labels[ROWS];

static void make_data(void)
{
    for (int r = 0; r < ROWS; r++) {
        double score = 0;
        for (int i = 0; i < IN; i++) {
            inputs[r][i] = check_normal((uint64_t)(r * IN + i));
            inputs_f32[r][i] = (float)inputs[r][i];
            score += inputs[r][i] * (i % 3 - 1);
        }
        labels[r] = (int)floor(fabs(score)) % CLASSES;
    }
}

typedef struct mlp {
    nn_linear first, second, out;
    nn_dropout drop;
} mlp;

static mlp make_mlp(td_module root)
{
    return (mlp){ nn_linear_make(root, "first", IN, HIDDEN), nn_linear_make(root, "second", HIDDEN, HIDDEN),
                  nn_linear_make(root, "out", HIDDEN, CLASSES), nn_dropout_make(root, "drop", 0.2) };
}

static td_tensor forward(const mlp *m, td_tensor x)
{
    x = nn_dropout_apply(&m->drop, td_relu(nn_linear_apply(&m->first, x)));
    x = nn_dropout_apply(&m->drop, td_relu(nn_linear_apply(&m->second, x)));
    return nn_linear_apply(&m->out, x);
}

/* Copies of a rank's own rows, no larger, so that reading another's is found by the sanitizer. */
typedef struct own_rows {
    void *x;
    int32_t *y;
} own_rows;

static own_rows rows_of(const job *j, int ranks, int rank, int k)
{
    int micro = ROWS / j->accumulate, own = micro / ranks, first = k * micro + rank * own;
    size_t bytes = (size_t)(own * IN) * (size_t)td_dtype_size(j->dtype);
    own_rows r = { malloc(bytes), malloc((size_t)own * sizeof *r.y) };
    if (!r.x || !r.y) exit(1);
    memcpy(r.x, j->dtype == TD_F64 ? (const void *)inputs[first] : (const void *)inputs_f32[first], bytes);
    memcpy(r.y, labels + first, (size_t)own * sizeof *r.y);
    return r;
}

static void free_rows(own_rows *r, int count)
{
    for (int k = 0; k < count; k++) {
        free(r[k].x);
        free(r[k].y);
    }
}

/* The loss of a micro-batch of which this rank has these rows. */
static td_tensor loss_of(td_context *td, const mlp *m, const job *j, own_rows own)
{
    int rows = ROWS / j->accumulate;
    td_tensor x = td_batch(td, "x", td_float(td), TD_SHAPE(rows, IN), own.x);
    td_tensor y = td_batch(td, "y", TD_I32, TD_SHAPE(rows), own.y);
    return td_cross_entropy(forward(m, x), y);
}

static bool one_update(td_context *td, const mlp *m, opt_optimizer *opt, job *j, par_world *world, int rank, double *mean)
{
    td_tensor loss[3];
    own_rows own[3];
    bool good = true;
    *mean = 0;
    for (int k = 0; k < j->accumulate; k++) own[k] = rows_of(j, par_world_size(world), rank, k);
    for (int k = 0; k < j->accumulate && good; k++) {
        loss[k] = loss_of(td, m, j, own[k]);
        td_keep(loss[k]);
        td_backward(td_scale(loss[k], 1.0 / j->accumulate));
        if (j->unrolled && k + 1 < j->accumulate) continue;
        if (k + 1 == j->accumulate) opt_step(opt, 1e-2);
        good = td_step(td);
        for (int i = j->unrolled ? 0 : k; i <= k && good; i++) *mean += td_item(loss[i]) / j->accumulate;
    }
    free_rows(own, j->accumulate);
    return good;
}

/* What all ranks read, and where rank 0 writes. */
typedef struct run_of {
    const job *asked;
    job *done;
} run_of;

static int train(par_world *world, int rank, void *user)
{
    const run_of *r = user;
    const job *j = r->asked;
    job own = *j;
    td_context *td = td_open(&(td_options){ .dtype = j->dtype, .seed = 7, .threads = 1, .poison = true, .passes = j->passes });
    par_attach(td, world, rank, &(par_options){ .strategy = j->strategy, .units = j->units, .bucket_bytes = 4096 });
    mlp m = make_mlp(td_root(td));
    opt_optimizer *opt = opt_adamw(td_root(td), &(opt_adamw_options){ .decay = 0.01, .max_norm = j->clip ? 0.5 : 0 });
    int64_t before = 0;
    bool good = true;
    for (int s = 0; s < STEPS && good; s++) {
        if (s == 1) before = par_sent(world, rank, NULL);
        good = one_update(td, &m, opt, &own, world, rank, &own.losses[s]);
    }
    own.sent_per_update = (par_sent(world, rank, NULL) - before) / (STEPS - 1);
    own.report = td_last_report(td);
    own.state_bytes = own.report.state_bytes;
    snprintf(own.error, sizeof own.error, "%s", td_error_text(td));
    if (rank == 0) *r->done = own;
    opt_close(opt);
    td_close(td);
    return good ? 0 : 1;
}

static job run(int ranks, job j)
{
    job done = j;
    int failed = par_run_threads(ranks, &(par_world_options){ .timeout_s = 20 }, train, &(run_of){ &j, &done });
    ck_assert_msg(!failed, "%s on %d ranks: %s", j.strategy, ranks, done.error);
    return done;
}

static void assert_same_curve(const job *got, const job *want, double tolerance, int ranks)
{
    for (int s = 0; s < STEPS; s++) {
        double off = fabs(got->losses[s] - want->losses[s]) / fabs(want->losses[s]);
        ck_assert_msg(off <= tolerance, "%s, %d ranks, accumulation %d: loss %d is %.17g, one rank's %.17g", got->strategy, ranks,
                      got->accumulate, s, got->losses[s], want->losses[s]);
    }
}

static void check_matrix(td_dtype dtype, double tolerance)
{
    make_data();
    job one = run(1, (job){ .dtype = dtype, .strategy = "single", .accumulate = 1, .clip = true });
    ck_assert(one.losses[STEPS - 1] < 0.9 * one.losses[0]);
    for (int accumulate = 1; accumulate <= 3; accumulate++)
        for (int ranks = 1; ranks <= 4; ranks++)
            for (int s = 0; s < 2; s++) {
                job j = run(ranks, (job){ .dtype = dtype, .strategy = s ? "fsdp" : "ddp", .accumulate = accumulate, .clip = true });
                assert_same_curve(&j, &one, tolerance, ranks);
            }
}

START_TEST(test_every_strategy_gives_one_ranks_curve_f64) { check_matrix(TD_F64, 1e-10); } END_TEST
START_TEST(test_every_strategy_gives_one_ranks_curve_f32) { check_matrix(TD_F32, 1e-5); } END_TEST

START_TEST(test_unrolled_accumulation_is_the_same)
{
    make_data();
    job one = run(1, (job){ .dtype = TD_F64, .strategy = "single", .accumulate = 1, .clip = true });
    const char *const strategies[] = { "ddp", "fsdp" };
    for (int s = 0; s < 2; s++) {
        job j = run(2, (job){ .dtype = TD_F64, .strategy = strategies[s], .accumulate = 3, .clip = true, .unrolled = true });
        assert_same_curve(&j, &one, 1e-10, 2);
    }
}
END_TEST

/* Without the schedule gradients are reduced after the whole backward, and units gathered where they are first read. */
START_TEST(test_the_schedule_changes_no_result)
{
    make_data();
    const char *const strategies[] = { "ddp", "fsdp" };
    for (int s = 0; s < 2; s++) {
        job with = run(2, (job){ .dtype = TD_F64, .strategy = strategies[s], .accumulate = 2, .clip = true });
        job without = run(2, (job){ .dtype = TD_F64, .strategy = strategies[s], .accumulate = 2, .clip = true, .passes = "-schedule" });
        assert_same_curve(&without, &with, 0, 2);
        ck_assert_int_eq(without.sent_per_update, with.sent_per_update);
    }
}
END_TEST

START_TEST(test_strategies_are_bit_equal_without_clipping)
{
    make_data();
    for (int ranks = 2; ranks <= 4; ranks++) {
        job ddp = run(ranks, (job){ .dtype = TD_F32, .strategy = "ddp", .accumulate = 1 });
        job fsdp = run(ranks, (job){ .dtype = TD_F32, .strategy = "fsdp", .accumulate = 1 });
        assert_same_curve(&fsdp, &ddp, 0, ranks);
    }
}
END_TEST

static int64_t padded(int64_t elements, int ranks) { return (elements + 16 * ranks - 1) / (16 * ranks) * (16 * ranks); }
static int64_t layer(int64_t in, int64_t out) { return (in * out + 15) / 16 * 16 + out; }
static int64_t all_reduce_bytes(int64_t bytes, int ranks) { return (2 * (ranks - 1) * bytes + ranks - 1) / ranks; }
static int64_t gather_bytes(int64_t bytes, int ranks) { return (ranks - 1) * (bytes / ranks); }

/* PARALLEL.md, section 1, on f32: ddp all-reduces every bucket once an update; fsdp gathers every unit for the forward,
 * those the backward reads again (not the first layer's: nobody wants its input's gradient), and reduce-scatters all,
 * each micro-batch. Beside that each micro-batch's loss is one f32 all-reduced, twice as it is kept scaled and unscaled,
 * and under fsdp the clipping norm is one f32 an update. */
START_TEST(test_bytes_sent_are_the_formulas)
{
    make_data();
    int64_t layers[] = { layer(IN, HIDDEN), layer(HIDDEN, HIDDEN), layer(HIDDEN, CLASSES) };
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int accumulate = 1; accumulate <= 3; accumulate += 2) {
            int64_t scalar_bytes = all_reduce_bytes(4, ranks), losses = 2 * accumulate * scalar_bytes;
            job ddp = run(ranks, (job){ .dtype = TD_F32, .strategy = "ddp", .accumulate = accumulate, .clip = true });
            /* buckets of 4096 bytes, from the last parameter: out and second.bias; second.weight; first */
            int64_t buckets[] = { HIDDEN + HIDDEN * CLASSES + CLASSES, HIDDEN * HIDDEN, IN * HIDDEN + HIDDEN };
            int64_t expected = losses;
            for (int b = 0; b < 3; b++) expected += all_reduce_bytes(4 * padded(buckets[b], ranks), ranks);
            ck_assert_int_eq(ddp.sent_per_update, expected);
            job fsdp = run(ranks, (job){ .dtype = TD_F32, .strategy = "fsdp", .accumulate = accumulate, .clip = true });
            expected = losses + scalar_bytes;
            for (int l = 0; l < 3; l++) {
                int64_t bytes = gather_bytes(4 * padded(layers[l], ranks), ranks);
                expected += accumulate * (2 * bytes + (l ? bytes : 0));
            }
            ck_assert_int_eq(fsdp.sent_per_update, expected);
        }
}
END_TEST

START_TEST(test_each_rank_does_only_its_part)
{
    make_data();
    job one = run(1, (job){ .dtype = TD_F32, .strategy = "single", .accumulate = 1 });
    for (int ranks = 2; ranks <= 4; ranks++) {
        job ddp = run(ranks, (job){ .dtype = TD_F32, .strategy = "ddp", .accumulate = 1 });
        job fsdp = run(ranks, (job){ .dtype = TD_F32, .strategy = "fsdp", .accumulate = 1 });
        ck_assert_msg((double)ddp.report.flops / (double)one.report.flops < 1.0 / ranks + 0.08, "%d ranks: %lld of %lld FLOPs", ranks,
                      (long long)ddp.report.flops, (long long)one.report.flops);
        ck_assert_msg((double)fsdp.report.flops / (double)one.report.flops < 1.0 / ranks + 0.08, "%d ranks: %lld of %lld FLOPs", ranks,
                      (long long)fsdp.report.flops, (long long)one.report.flops);
        ck_assert_msg((double)fsdp.state_bytes / (double)one.state_bytes < 1.0 / ranks + 0.03, "%d ranks: %lld of %lld bytes", ranks,
                      (long long)fsdp.state_bytes, (long long)one.state_bytes);
    }
}
END_TEST

/* A gradient read beside the update, after the bucket it is part of has been reduced in place. */
static int read_gradient(par_world *world, int rank, void *user)
{
    double *out = user;
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .seed = 7, .threads = 1, .poison = true });
    par_attach(td, world, rank, NULL);
    mlp m = make_mlp(td_root(td));
    opt_optimizer *opt = opt_sgd(td_root(td), NULL);
    job j = { .dtype = TD_F64, .accumulate = 1 };
    own_rows own = rows_of(&j, par_world_size(world), rank, 0);
    td_tensor loss = loss_of(td, &m, &j, own);
    td_tensor g = td_gradient(loss, td_use(m.first.weight));
    td_backward(loss);
    opt_step(opt, 0.1);
    td_tensor after = td_use(m.first.weight); /* read late: by what needs the updated weight */
    td_tensor y = td_sum(td_mul(g, after), TD_ALL, TD_DROP);
    td_keep(y);
    bool good = td_step(td);
    if (rank == 0) out[0] = td_item(y);
    free_rows(&own, 1);
    opt_close(opt);
    td_close(td);
    return !good;
}

START_TEST(test_a_gradient_can_be_read_beside_its_update)
{
    make_data();
    double one, two;
    ck_assert_int_eq(par_run_threads(1, NULL, read_gradient, &one), 0);
    ck_assert_int_eq(par_run_threads(2, NULL, read_gradient, &two), 0);
    ck_assert_double_eq_tol(two, one, 1e-10 * fabs(one));
}
END_TEST

START_TEST(test_a_pattern_that_matches_nothing_is_refused)
{
    make_data();
    job j = { .dtype = TD_F32, .strategy = "fsdp", .units = "first,blocks.*", .accumulate = 1 };
    job done = j;
    ck_assert(par_run_threads(2, &(par_world_options){ .timeout_s = 5 }, train, &(run_of){ &j, &done }) != 0);
    ck_assert_str_has(done.error, "fsdp: the unit pattern 'blocks.*' matches no parameter; the first one is called 'first.weight'");
}
END_TEST

TESTS("strategies", test_every_strategy_gives_one_ranks_curve_f64, test_every_strategy_gives_one_ranks_curve_f32,
      test_unrolled_accumulation_is_the_same, test_the_schedule_changes_no_result, test_strategies_are_bit_equal_without_clipping, test_bytes_sent_are_the_formulas,
      test_each_rank_does_only_its_part, test_a_gradient_can_be_read_beside_its_update,
      test_a_pattern_that_matches_nothing_is_refused)
