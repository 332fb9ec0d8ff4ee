/* What each strategy sends and holds, counted at the transport's calls and in the allocator, against the formulas of section 1 and 2 of
 * the reference of strategies written out here; the order of the schedule; options; a strategy of a program's own. On an MLP with
 * dropout and clipping, ranks 1-4, accumulation 1-3. That every strategy gives one rank's curve: test_curves.c.
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
    bool each_parameter, keep_gathered;       /* zero3: a unit for each, but for biases, which stay whole; fsdp */
    int group;                                /* fsdp: that keeps units after the forward */
    td_dtype reduce;
    const par_strategy *own;
    double losses[STEPS];
    td_report report;                         /* of the step that updates */
    int64_t sent_per_update, calls_per_update, state_bytes, allocated;
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

/* State and steps in bytes, as the allocator is asked for them. */
typedef struct held {
    int64_t now, most;
} held;

static void *held_get(void *user, size_t bytes, const char *kind)
{
    held *h = user;
    if (!strcmp(kind, "state") || !strcmp(kind, "step")) h->now += (int64_t)bytes;
    h->most = h->now > h->most ? h->now : h->most;
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

static void held_put(void *user, void *at, size_t bytes, const char *kind)
{
    held *h = user;
    if (!strcmp(kind, "state") || !strcmp(kind, "step")) h->now -= (int64_t)bytes;
    free(at);
}

static int train(par_world *world, int rank, void *user)
{
    const run_of *r = user;
    const job *j = r->asked;
    job own = *j;
    held memory = { 0 };
    td_allocator allocator = { &memory, held_get, held_put };
    td_context *td = td_open(&(td_options){ .dtype = j->dtype, .seed = 7, .threads = 1, .poison = true, .passes = j->passes,
                                            .allocator = &allocator });
    par_attach(td, world, rank, &(par_options){ .strategy = j->strategy, .own = j->own, .units = j->units, .bucket_bytes = 4096,
                                                .unit_elements = j->each_parameter, .whole_elements = j->each_parameter ? HIDDEN : 0,
                                                .keep_gathered = j->keep_gathered, .keep_group = j->group, .reduce_dtype = j->reduce });
    mlp m = make_mlp(td_root(td));
    opt_optimizer *opt = opt_adamw(td_root(td), &(opt_adamw_options){ .decay = 0.01, .max_norm = j->clip ? 0.5 : 0 });
    int64_t before = 0, calls_before = 0, calls;
    bool good = true;
    for (int s = 0; s < STEPS && good; s++) {
        if (s == 1) before = par_sent(world, rank, &calls_before);
        good = one_update(td, &m, opt, &own, world, rank, &own.losses[s]);
    }
    own.sent_per_update = (par_sent(world, rank, &calls) - before) / (STEPS - 1);
    own.calls_per_update = (calls - calls_before) / (STEPS - 1);
    own.allocated = memory.most;
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

static const struct { const char *strategy; int ranks; } sharing[] = {
    { "ddp", 2 }, { "zero1", 3 }, { "zero2", 2 }, { "zero3", 3 }, { "fsdp", 2 }, { "hsdp:2x2", 4 },
};
enum { SHARING = sizeof sharing / sizeof *sharing };

START_TEST(test_unrolled_accumulation_is_the_same)
{
    make_data();
    for (int i = 0; i < SHARING; i++) {
        job j = { .dtype = TD_F64, .strategy = sharing[i].strategy, .accumulate = 3, .clip = true };
        job steps = run(sharing[i].ranks, j);
        j.unrolled = true;
        job once = run(sharing[i].ranks, j);
        assert_same_curve(&once, &steps, 1e-12, sharing[i].ranks);
        ck_assert_int_eq(once.sent_per_update, steps.sent_per_update);
        ck_assert_int_eq(once.calls_per_update, steps.calls_per_update);
        ck_assert_int_eq(once.report.comm_bytes, once.sent_per_update); /* the plan knows */
        ck_assert_int_eq(once.report.comm_calls, once.calls_per_update);
    }
}
END_TEST

/* Without the schedule gradients are reduced after the whole backward, and units gathered where they are first read. */
START_TEST(test_the_schedule_changes_no_result)
{
    make_data();
    for (int i = 0; i < SHARING; i++) {
        job j = { .dtype = TD_F64, .strategy = sharing[i].strategy, .accumulate = 2, .clip = true };
        job with = run(sharing[i].ranks, j);
        j.passes = "-schedule";
        job without = run(sharing[i].ranks, j);
        assert_same_curve(&without, &with, 0, sharing[i].ranks);
        ck_assert_int_eq(without.sent_per_update, with.sent_per_update);
    }
}
END_TEST

static int64_t padded(int64_t elements, int ranks) { return (elements + 16 * ranks - 1) / (16 * ranks) * (16 * ranks); }
static int64_t all_reduce_bytes(int64_t bytes, int ranks) { return (2 * (ranks - 1) * bytes + ranks - 1) / ranks; }
static int64_t gather_bytes(int64_t bytes, int ranks) { return (ranks - 1) * (bytes / ranks); }


/* The flat units of each layout, in elements: ddp's and zero's buckets of 4096 bytes from the last parameter (out and second.bias;
 * second.weight; first), fsdp's layers, zero3's weights, and its biases together. */
static const int64_t buckets[] = { HIDDEN + HIDDEN * CLASSES + CLASSES, HIDDEN * HIDDEN, IN * HIDDEN + HIDDEN };
static const int64_t weights[] = { IN * HIDDEN, HIDDEN * HIDDEN, HIDDEN * CLASSES };
static const int64_t biases[] = { HIDDEN, HIDDEN, CLASSES };

/* What a rank sends beside parameters and gradients: each micro-batch's loss is one f32 all-reduced, once although it is kept scaled and
 * unscaled; the clipping norm, where gradients are sharded, one f32 an update; each over the mesh axes that it is a sum over. */
static int64_t scalars(int ranks, int count) { return count * all_reduce_bytes(4, ranks); }

typedef struct traffic {
    int64_t bytes, calls;
} traffic;

static void assert_sent(job j, int ranks, traffic want)
{
    job done = run(ranks, j);
    ck_assert_msg(done.sent_per_update == want.bytes && done.calls_per_update == want.calls,
                  "%s, %d ranks, accumulation %d: %lld bytes in %lld calls, expected %lld in %lld", j.strategy, ranks, j.accumulate,
                  (long long)done.sent_per_update, (long long)done.calls_per_update, (long long)want.bytes, (long long)want.calls);
}

/* Reductions of m micro-batches (or of their sum), gathers of the updated parameters. `all`: all-reduced, not scattered. */
static traffic bucket_traffic(int ranks, int m, int64_t reduce_size, bool all)
{
    traffic t = { 0 };
    for (int b = 0; b < 3; b++) {
        int64_t n = padded(buckets[b], ranks);
        t.bytes += all ? all_reduce_bytes(reduce_size * n, ranks) : m * gather_bytes(reduce_size * n, ranks) + gather_bytes(4 * n, ranks);
        t.calls += all ? 1 : m + 1;
    }
    return t;
}

static traffic with_scalars(traffic t, int ranks, int count) { return (traffic){ t.bytes + scalars(ranks, count), t.calls + count }; }

START_TEST(test_bytes_sent_by_ddp_and_zero_1_and_2)
{
    make_data();
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int m = 1; m <= 3; m += 2) {
            job j = { .dtype = TD_F32, .accumulate = m, .clip = true };
            j.strategy = "ddp"; /* 2qPr */
            assert_sent(j, ranks, with_scalars(bucket_traffic(ranks, 1, 4, true), ranks, m));
            j.strategy = "zero1"; /* qP(r + p) */
            assert_sent(j, ranks, with_scalars(bucket_traffic(ranks, 1, 4, false), ranks, m + 1));
            j.strategy = "zero2"; /* qP(mr + p) */
            assert_sent(j, ranks, with_scalars(bucket_traffic(ranks, m, 4, false), ranks, m + 1));
        }
}
END_TEST

/* The gradients' part is half as large; parameters are gathered as they are stored. */
START_TEST(test_gradients_reduced_in_bf16_are_half_the_bytes)
{
    make_data();
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        job j = { .dtype = TD_F32, .accumulate = 3, .clip = true, .reduce = TD_BF16, .strategy = "ddp" };
        assert_sent(j, ranks, with_scalars(bucket_traffic(ranks, 1, 2, true), ranks, 3));
        j.strategy = "zero2";
        assert_sent(j, ranks, with_scalars(bucket_traffic(ranks, 3, 2, false), ranks, 4));
        job narrow = run(ranks, j), wide = run(ranks, (job){ .dtype = TD_F32, .accumulate = 3, .clip = true, .strategy = "zero2" });
        assert_same_curve(&narrow, &wide, 2e-2, ranks); /* sums of few terms to 8 bits */
        ck_assert_double_ne(narrow.losses[STEPS - 1], wide.losses[STEPS - 1]);
    }
}
END_TEST

/* Each unit gathered for the forward, again where the backward reads it (not the first layer's weight: nobody wants its input's
 * gradient), and scattered, each micro-batch. */
START_TEST(test_bytes_sent_by_zero_3_and_fsdp)
{
    make_data();
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int m = 1; m <= 3; m += 2) {
            traffic fsdp = { 0 }, kept = { 0 }, zero3 = { 0 };
            for (int l = 0; l < 3; l++) {
                int64_t layer = gather_bytes(4 * padded((weights[l] + 15) / 16 * 16 + biases[l], ranks), ranks);
                int64_t weight = gather_bytes(4 * padded(weights[l], ranks), ranks);
                fsdp.bytes += m * (l ? 3 : 2) * layer; /* mq(P p + P_backward p + P r) */
                fsdp.calls += m * (l ? 3 : 2);
                kept.bytes += m * 2 * layer; /* mqP(p + r) */
                kept.calls += m * 2;
                zero3.bytes += m * (l ? 3 : 2) * weight;
                zero3.calls += m * (l ? 3 : 2);
                zero3.bytes += (m + 1) * gather_bytes(4 * padded(biases[l], ranks), ranks); /* biases stay whole, as zero2's parameters */
                zero3.calls += m + 1;
            }
            job j = { .dtype = TD_F32, .accumulate = m, .clip = true, .strategy = "fsdp" };
            assert_sent(j, ranks, with_scalars(fsdp, ranks, m + 1));
            j.keep_gathered = true;
            assert_sent(j, ranks, with_scalars(kept, ranks, m + 1));
            j.strategy = "zero3";
            j.each_parameter = true;
            assert_sent(j, ranks, with_scalars(zero3, ranks, m + 1));
        }
}
END_TEST

/* Groups of 2 of 4 ranks keep what was gathered for the forward: the backward gathers a half within the group, the other is there. */
START_TEST(test_bytes_sent_where_groups_keep_units)
{
    make_data();
    for (int m = 1; m <= 3; m += 2) {
        traffic t = { 0 };
        for (int l = 0; l < 3; l++) {
            int64_t unit = 4 * padded((weights[l] + 15) / 16 * 16 + biases[l], 4);
            t.bytes += m * (2 * gather_bytes(unit, 4) + (l ? gather_bytes(unit, 2) : 0));
            t.calls += m * (l ? 3 : 2);
        }
        job j = { .dtype = TD_F32, .accumulate = m, .clip = true, .strategy = "fsdp", .group = 2 };
        assert_sent(j, 4, with_scalars(t, 4, m + 1));
        job grouped = run(4, j);
        j.strategy = "hsdp:4x1";
        ck_assert_int_eq(run(4, j).sent_per_update, grouped.sent_per_update);
        traffic three = { 0 }; /* axes: between copies of the state, between groups, within */
        for (int l = 0; l < 3; l++) {
            int64_t unit = 4 * padded((weights[l] + 15) / 16 * 16 + biases[l], 8);
            three.bytes += m * (2 * gather_bytes(unit, 4) + (l ? gather_bytes(unit, 2) : 0)) + all_reduce_bytes(unit / 4, 2);
            three.calls += m * (l ? 3 : 2) + 1;
        }
        j.strategy = "hsdp:4x2";
        assert_sent(j, 8, with_scalars(with_scalars(three, 8, m), 4, 1));
        static const struct { int group; bool gathered; } same[] = { { 1, true }, { 4, false } };
        for (int i = 0; i < 2; i++) {
            j = (job){ .dtype = TD_F32, .accumulate = m, .clip = true, .strategy = "fsdp", .group = same[i].group };
            job by_number = run(4, j);
            j.group = 0, j.keep_gathered = same[i].gathered;
            job by_name = run(4, j);
            ck_assert_int_eq(by_number.sent_per_update, by_name.sent_per_update);
            ck_assert_int_eq(by_number.calls_per_update, by_name.calls_per_update);
        }
    }
}
END_TEST

/* fsdp within groups of 2; the shards' sums across the 2 groups once an update. */
START_TEST(test_bytes_sent_by_hsdp)
{
    make_data();
    for (int m = 1; m <= 3; m += 2) {
        traffic t = { 0 };
        for (int l = 0; l < 3; l++) {
            int64_t unit = 4 * padded((weights[l] + 15) / 16 * 16 + biases[l], 4);
            t.bytes += m * (l ? 3 : 2) * gather_bytes(unit, 2) + all_reduce_bytes(unit / 2, 2); /* 2(R-1)/R (P/S) r */
            t.calls += m * (l ? 3 : 2) + 1;
        }
        job j = { .dtype = TD_F32, .accumulate = m, .clip = true, .strategy = "hsdp:2x2" };
        assert_sent(j, 4, with_scalars(with_scalars(t, 4, m), 2, 1)); /* losses over both axes at once; the norm in the group */
        j.strategy = "hsdp:4x1"; /* groups that are all: fsdp */
        job one_group = run(4, j);
        j.strategy = "fsdp";
        job fsdp = run(4, j);
        ck_assert_int_eq(one_group.sent_per_update, fsdp.sent_per_update);
        j.strategy = "hsdp:1x4"; /* groups of one: all-reduces alone */
        job alone = run(4, j);
        ck_assert_int_eq(alone.calls_per_update, 3 + m);
    }
}
END_TEST

/* Rows of the batch, so FLOPs of products, are divided; what is left over is each rank's update of what it owns. */
START_TEST(test_each_rank_does_only_its_part)
{
    make_data();
    job one = run(1, (job){ .dtype = TD_F32, .strategy = "single", .accumulate = 1 });
    for (int i = 0; i < SHARING; i++) {
        int ranks = sharing[i].ranks;
        job j = run(ranks, (job){ .dtype = TD_F32, .strategy = sharing[i].strategy, .accumulate = 1 });
        double most = 1.0 / ranks + (strcmp(j.strategy, "ddp") ? 0.03 : 0.08);
        ck_assert_msg((double)j.report.flops / (double)one.report.flops < most, "%s, %d ranks: %lld of %lld FLOPs", j.strategy, ranks,
                      (long long)j.report.flops, (long long)one.report.flops);
    }
}
END_TEST

/* ---- Memory */

/* Section 2 in f32, where the stored parameter is its own master: parameters 4P, moments 8P, the gradients of earlier micro-batches
 * 4P, each whole or divided by the ranks that share it; and the count of updates. */
START_TEST(test_bytes_of_state_are_the_formulas)
{
    static const struct { const char *strategy; int ranks, parameter, moments, accumulator; } rows[] = {
        { "ddp", 4, 1, 1, 1 },  { "zero1", 2, 1, 2, 1 }, { "zero1", 4, 1, 4, 1 },    { "zero2", 4, 1, 4, 4 },
        { "zero3", 4, 4, 4, 4 }, { "fsdp", 3, 3, 3, 3 },  { "hsdp:2x2", 4, 2, 2, 2 },
    };
    make_data();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int m = 1; m <= 3; m += 2) {
            bool named = strstr(rows[i].strategy, "sdp") != NULL, sized = !strcmp(rows[i].strategy, "zero3");
            int64_t p = 0;
            for (int u = 0; u < 3; u++)
                p += named ? padded((weights[u] + 15) / 16 * 16 + biases[u], rows[i].ranks) : padded(buckets[u], rows[i].ranks);
            int64_t want = 4 * p / rows[i].parameter + 8 * p / rows[i].moments + (m > 1 ? 4 * p / rows[i].accumulator : 0) + 4;
            job j = run(rows[i].ranks, (job){ .dtype = TD_F32, .strategy = rows[i].strategy, .accumulate = m });
            if (!sized) ck_assert_int_eq(j.state_bytes, want);
            else ck_assert_int_le(j.state_bytes, want + want / 10); /* other units, other padding */
        }
}
END_TEST

START_TEST(test_fsdp_on_four_ranks_holds_a_third_of_ddps_state)
{
    make_data();
    for (int m = 1; m <= 3; m += 2) {
        job ddp = run(4, (job){ .dtype = TD_F32, .strategy = "ddp", .accumulate = m });
        job fsdp = run(4, (job){ .dtype = TD_F32, .strategy = "fsdp", .accumulate = m });
        ck_assert_msg((double)fsdp.state_bytes < 0.35 * (double)ddp.state_bytes, "%lld against %lld bytes", (long long)fsdp.state_bytes,
                      (long long)ddp.state_bytes);
    }
}
END_TEST

START_TEST(test_the_planned_peak_is_what_was_allocated)
{
    make_data();
    for (int i = 0; i < SHARING; i++)
        for (int m = 1; m <= 3; m += 2) {
            job j = run(sharing[i].ranks, (job){ .dtype = TD_F32, .strategy = sharing[i].strategy, .accumulate = m, .clip = true });
            ck_assert_msg(llabs(j.report.peak_bytes - j.allocated) * 100 <= j.allocated, "%s, accumulation %d: planned %lld, allocated %lld",
                          j.strategy, m, (long long)j.report.peak_bytes, (long long)j.allocated);
        }
}
END_TEST

/* A deep MLP with few rows, so that parameters are most of what a step holds: `DEEP` equal layers, a unit each. */
enum { DEEP = 12, WIDTH = 64, DEEP_ROWS = 8 };

static int train_deep(par_world *world, int rank, void *user)
{
    run_of *r = user;
    td_context *td = td_open(&(td_options){ .seed = 7, .threads = 1, .poison = true });
    par_attach(td, world, rank, &(par_options){ .strategy = r->asked->strategy, .bucket_bytes = 4 * WIDTH * WIDTH,
                                                .keep_gathered = r->asked->keep_gathered, .keep_group = r->asked->group });
    nn_linear layer[DEEP];
    for (int l = 0; l < DEEP; l++) {
        char name[24];
        snprintf(name, sizeof name, "layer.%d", l);
        layer[l] = nn_linear_make(td_root(td), name, WIDTH, WIDTH);
    }
    opt_optimizer *opt = opt_sgd(td_root(td), &(opt_sgd_options){ .momentum = 0.9 });
    static const float in[DEEP_ROWS * WIDTH];
    static const int32_t want[DEEP_ROWS];
    for (int k = 0; k < r->asked->accumulate; k++) {
        td_tensor x = td_batch(td, "x", TD_F32, TD_SHAPE(DEEP_ROWS * par_world_size(world), WIDTH), in);
        for (int l = 0; l < DEEP; l++) x = td_relu(nn_linear_apply(&layer[l], x));
        td_tensor y = td_batch(td, "y", TD_I32, TD_SHAPE(DEEP_ROWS * par_world_size(world)), want);
        td_backward(td_cross_entropy(x, y));
    }
    opt_step(opt, 0.1);
    bool good = td_step(td);
    if (rank == 0) r->done->report = td_last_report(td);
    opt_close(opt);
    td_close(td);
    return good ? 0 : 1;
}

/* On four ranks. */
static int64_t deep_step_bytes(job j)
{
    job done = j;
    ck_assert_int_eq(par_run_threads(4, &(par_world_options){ .timeout_s = 20 }, train_deep, &(run_of){ &j, &done }), 0);
    return done.report.step_bytes;
}

/* Beside state (the shard) a step holds no more than the gradients' shard, three units and the rest: what the forward keeps, a layer's
 * output each, and a few of these in the making. */
START_TEST(test_what_fsdp_gathers_is_three_units_at_most)
{
    int64_t unit = 4 * padded(WIDTH * WIDTH + WIDTH, 4), rest = 4 * (DEEP + 4) * DEEP_ROWS * WIDTH, all = DEEP * unit;
    static const char *const strategies[] = { "fsdp", "zero3", "hsdp:2x2" };
    for (int i = 0; i < 3; i++) {
        int64_t shard = all / (i == 2 ? 2 : 4), bytes = deep_step_bytes((job){ .strategy = strategies[i], .accumulate = 1 });
        int64_t largest = i == 1 ? 2 * unit : unit; /* an eighth of all is between one layer and two */
        ck_assert_msg(bytes <= shard + 3 * largest + rest, "%s: %lld bytes, expected %lld + 3 x %lld + %lld at most", strategies[i],
                      (long long)bytes, (long long)shard, (long long)largest, (long long)rest);
    }
    int64_t kept = deep_step_bytes((job){ .strategy = "fsdp", .accumulate = 1, .keep_gathered = true });
    ck_assert_int_gt(kept, all); /* they are there when the backward begins */
    int64_t half = deep_step_bytes((job){ .strategy = "fsdp", .accumulate = 1, .group = 2 });
    ck_assert_msg(half > all / 2 && half <= all / 2 + all / 4 + 2 * unit, "%lld bytes, units have %lld", (long long)half, (long long)all);
}
END_TEST

/* What zero1 and zero2 hold of gradients in one step: never all of them, as each is scattered when its bucket is full. */
START_TEST(test_zero_1_and_2_scatter_gradients_in_the_backward)
{
    int64_t unit = 4 * padded(WIDTH * WIDTH + WIDTH, 4), rest = 4 * (DEEP + 4) * DEEP_ROWS * WIDTH, all = DEEP * unit;
    static const char *const strategies[] = { "zero1", "zero2" };
    for (int i = 0; i < 2; i++) {
        int64_t bytes = deep_step_bytes((job){ .strategy = strategies[i], .accumulate = 1 });
        ck_assert_msg(bytes <= 2 * all / 4 + 3 * unit + rest, "%s: %lld bytes", strategies[i], (long long)bytes);
    }
    ck_assert_int_gt(deep_step_bytes((job){ .strategy = "ddp", .accumulate = 1 }), all);
}
END_TEST

/* Where all micro-batches are in one step, a bucket's gradient joins the earlier ones' when it exists: beside their sum, whole or each
 * rank's part, there are a few buckets. */
START_TEST(test_gradients_of_micro_batches_do_not_pile_up)
{
    int64_t unit = 4 * padded(WIDTH * WIDTH + WIDTH, 4), rest = 4 * (DEEP + 4) * DEEP_ROWS * WIDTH, all = DEEP * unit;
    static const struct { const char *strategy; int parts; } rows[] = {
        { "ddp", 1 }, { "zero1", 1 }, { "zero2", 4 }, { "fsdp", 4 }, { "hsdp:2x2", 2 },
    };
    for (int i = 0; i < 5; i++) {
        int64_t bytes = deep_step_bytes((job){ .strategy = rows[i].strategy, .accumulate = 3 }), parts = all / rows[i].parts;
        if (rows[i].parts < 4) parts += all / 4; /* the update's parts of it, beside */
        ck_assert_msg(bytes <= parts + 3 * unit + rest, "%s: %lld bytes, expected %lld + 3 x %lld + %lld at most", rows[i].strategy,
                      (long long)bytes, (long long)parts, (long long)unit, (long long)rest);
    }
}
END_TEST

/* ---- Gradients read aside */

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

/* ---- Options, and strategies of a program's own */

static void assert_refused(job j, int ranks, const char *text)
{
    job done = j;
    make_data();
    ck_assert(par_run_threads(ranks, &(par_world_options){ .timeout_s = 5 }, train, &(run_of){ &j, &done }) != 0);
    ck_assert_str_has(done.error, text);
}

START_TEST(test_a_pattern_that_matches_nothing_is_refused)
{
    assert_refused((job){ .strategy = "fsdp", .units = "first,blocks.*", .accumulate = 1 }, 2,
                   "fsdp: the unit pattern 'blocks.*' matches no parameter; the first one is called 'first.weight'");
}
END_TEST

START_TEST(test_strategies_that_cannot_be_are_refused)
{
    static const struct { const char *strategy; int ranks; const char *text; } wrong[] = {
        { "zero4", 2, "strategy 'zero4' is not known; it can be one of single, ddp, zero1, zero2, zero3, fsdp, hsdp:SxR" },
        { "single", 2, "strategy 'single' is for one rank; for 2 choose one of ddp, zero1, zero2, zero3, fsdp, hsdp:SxR" },
        { "hsdp", 4, "strategy 'hsdp' does not say how its ranks are grouped: write hsdp:SxR" },
        { "hsdp:4", 4, "strategy 'hsdp:4' does not say how its ranks are grouped" },
        { "hsdp:2x2x1", 4, "strategy 'hsdp:2x2x1' does not say how its ranks are grouped" },
        { "hsdp:0x4", 4, "strategy 'hsdp:0x4' does not say how its ranks are grouped" },
        { "hsdp:2x3", 4, "strategy 'hsdp:2x3' is for 6 ranks (2 that share one copy of the state x 3 such groups), but there are 4" },
        { "fsdp:2x2", 4, "strategy 'fsdp:2x2': 'fsdp' has no groups; leave ':2x2' out" },
        { "fsdp+ep:2", 2, "strategy 'fsdp+ep:2': '+ep:2' cannot be added to a strategy; +tp:T can, T ranks that share linear layers" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_refused((job){ .strategy = wrong[i].strategy, .accumulate = 1 }, wrong[i].ranks, wrong[i].text);
    assert_refused((job){ .strategy = "fsdp", .accumulate = 1, .group = 3 }, 4,
                   "fsdp: after the forward units cannot be kept by groups of 3 ranks: the 4 that share them cannot be divided so");
    assert_refused((job){ .strategy = "hsdp:2x2", .accumulate = 1, .group = 4 }, 4,
                   "hsdp: after the forward units cannot be kept by groups of 4 ranks: the 2 that share them cannot be divided so");
}
END_TEST

/* zero2 as a table of its own, across pairs of ranks that each have ddp: no built-in strategy. */
START_TEST(test_a_table_is_a_strategy)
{
    enum { R = TD_REPLICATED, S = TD_SHARDED, P = TD_PARTIAL };
    static const par_strategy pairs = { "pairs", PAR_UNITS_BUCKET, { { "across", R, S, S, S, S }, { "pair", R, PAR_AS_IS, R, R, P } } };
    make_data();
    job one = run(1, (job){ .dtype = TD_F64, .strategy = "single", .accumulate = 1, .clip = true });
    job j = run(4, (job){ .dtype = TD_F64, .strategy = "pairs:2x2", .own = &pairs, .accumulate = 3, .clip = true });
    assert_same_curve(&j, &one, 1e-10, 4);
    int64_t p = 0;
    for (int b = 0; b < 3; b++) p += padded(buckets[b], 4);
    ck_assert_int_eq(j.state_bytes, 8 * p + 2 * 8 * p / 2 + 8 * p / 2 + 8); /* moments and accumulators are halves */
    static const par_strategy wrong = { "wrong", PAR_UNITS_BUCKET, { { "data", P, S, S, S, S } } };
    assert_refused((job){ .strategy = "wrong", .own = &wrong, .accumulate = 1 }, 2,
                   "strategy 'wrong': on each axis parameters, moments and the optimizer's gradient are replicated or sharded");
}
END_TEST

TESTS("strategies", test_unrolled_accumulation_is_the_same, test_the_schedule_changes_no_result, test_bytes_sent_by_ddp_and_zero_1_and_2,
      test_gradients_reduced_in_bf16_are_half_the_bytes, test_bytes_sent_by_zero_3_and_fsdp, test_bytes_sent_where_groups_keep_units,
      test_bytes_sent_by_hsdp,
      test_each_rank_does_only_its_part, test_bytes_of_state_are_the_formulas, test_fsdp_on_four_ranks_holds_a_third_of_ddps_state,
      test_the_planned_peak_is_what_was_allocated, test_what_fsdp_gathers_is_three_units_at_most,
      test_zero_1_and_2_scatter_gradients_in_the_backward, test_gradients_of_micro_batches_do_not_pile_up,
      test_a_gradient_can_be_read_beside_its_update,
      test_a_pattern_that_matches_nothing_is_refused, test_strategies_that_cannot_be_are_refused, test_a_table_is_a_strategy)
