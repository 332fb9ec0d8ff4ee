/* Failures of distributed training that others have met, each a test named by its subject; those that have a file of their own
 * (disagreements, dead ranks, clipping, checkpoints) are there.
 *
 * Labels: threads
 * Timeout: 300 s
 */
#include "tests/check.h"

#include <tandem/data.h>
#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

#include <time.h>

enum { ROWS = 24, IN = 5, HIDDEN = 9, CLASSES = 3, MOST = 4, STEPS = 4 };

static const struct { const char *strategy; int ranks; } worlds[] = {
    { "ddp", 2 },   { "ddp", 3 },  { "zero1", 3 }, { "zero2", 4 },    { "zero3", 3 },
    { "fsdp", 3 },  { "fsdp", 4 }, { "zero3", 4 }, { "hsdp:2x2", 4 },
};
enum { WORLDS = sizeof worlds / sizeof *worlds };

/* What a test's ranks share: how they are attached, and what they leave. */
typedef struct job {
    const char *strategy;
    int ranks;
    td_dtype dtype, reduce;
    bool weighted, frozen, paused;
    bool plain;                               /* no moments, no clipping: a factor on the gradient shows */
    double result[64];                        /* of rank 0 */
    int64_t owned[MOST][8][2];                /* of each state, by rank */
    int64_t state_bytes;
    char log[MOST][2048];                     /* messages, by rank */
    char error[512];
} job;

typedef struct rank_log {
    job *j;
    int rank;
} rank_log;

static void keep_message(void *user, td_level level, const char *text)
{
    rank_log *l = user;
    char *to = l->j->log[l->rank];
    size_t at = strlen(to);
    if (level == TD_LOG_WARNING) snprintf(to + at, sizeof l->j->log[0] - at, "%s\n", text);
}

static td_context *open_rank(par_world *world, int rank, job *j, rank_log *log)
{
    *log = (rank_log){ j, rank };
    td_context *td = td_open(&(td_options){ .dtype = j->dtype, .seed = 11, .threads = 1, .poison = true, .log = keep_message,
                                            .log_user = log });
    par_attach(td, world, rank, &(par_options){ .strategy = j->strategy, .bucket_bytes = 400, .unit_elements = 40, .whole_elements = -1,
                                                .reduce_dtype = j->reduce });
    return td;
}

/* Ends the rank; its result of the run. */
static int close_rank(td_context *td, int rank, job *j)
{
    bool good = td_error(td) == TD_OK;
    if (!good && rank == 0) snprintf(j->error, sizeof j->error, "%s", td_error_text(td));
    td_close(td);
    return good ? 0 : 1;
}

static job run(int (*body)(par_world *, int, void *), job j)
{
    if (!j.strategy) j.strategy = "single";
    if (!j.ranks) j.ranks = 1;
    int failed = par_run_threads(j.ranks, &(par_world_options){ .timeout_s = 30 }, body, &j);
    ck_assert_msg(!failed, "%s on %d ranks: %s", j.strategy, j.ranks, j.error);
    return j;
}

static void assert_near(const job *got, const job *want, int count, double tolerance)
{
    for (int i = 0; i < count; i++)
        ck_assert_msg(fabs(got->result[i] - want->result[i]) <= tolerance * fabs(want->result[i]),
                      "%s on %d ranks: result %d is %.17g, one rank's %.17g",
                      got->strategy, got->ranks, i, got->result[i], want->result[i]);
}

static double feature(int row, int i) { return check_normal((uint64_t)(row * IN + i)); }

/* ---- An operation that takes its time, another on each rank and call: what is late elsewhere waits here */

static void pause_gradient(const td_gradient_call *g);
static bool pause_shape(td_call *call)
{
    call->out[0].shape = call->in[0]->shape;
    call->out[0].dtype = call->in[0]->dtype;
    return true;
}

static void pause_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    (void)p, (void)n;
    memset(rule, 0, sizeof *rule);
    for (int8_t d = 0; d < TD_MAX_DIMS; d++) rule->in[0][d] = rule->out[0][d] = (int8_t)(d + 1);
    rule->partial = TD_PARTIAL_JOINT;
}

static void pause_cpu(const td_kernel *k)
{
    int64_t elements = td_shape_elements(k->in[0].shape);
    int rank = k->run->mesh->rank, call = (int)(k->run->update * 7 + (int64_t)k->phase * 5 + elements);
    nanosleep(&(struct timespec){ .tv_nsec = (rank * 3 + call) % 4 * 1000000L }, NULL);
    memcpy(k->out[0].data, k->in[0].data, (size_t)(elements * td_dtype_size(k->in[0].dtype)));
}

static const td_op pause_op = { .name = "pause", .inputs = 1, .shape = pause_shape, .gradient = pause_gradient, .place = pause_place,
                                .cpu = pause_cpu };

static td_tensor pause_at(td_tensor x, td_here here) { return td_record(&pause_op, here, 1, &x, NULL); }
static void pause_gradient(const td_gradient_call *g) { td_gradient_set(g, 0, pause_at(g->dout[0], g->here)); }

/* ---- A small training: losses, then a number for all parameters at the end */

typedef struct net {
    nn_linear first, out;
    td_state scalar, one, none;
} net;

static net make_net(td_context *td, const job *j)
{
    td_module root = td_root(td);
    net n = { .first = nn_linear_make(root, "first", IN, HIDDEN) };
    n.scalar = td_parameter(root, "scalar", (td_shape){ 0 }, td_init_constant(1.25));
    n.one = td_parameter(root, "one", TD_SHAPE(1), td_init_constant(0.5));
    n.none = td_parameter(root, "none", TD_SHAPE(0, 3), td_init_normal(1));
    n.out = nn_linear_make(root, "out", HIDDEN, CLASSES);
    if (j->frozen) td_freeze(n.first.weight);
    return n;
}

static td_tensor logits(const net *n, const job *j, td_tensor x)
{
    x = td_relu(nn_linear_apply(&n->first, x));
    if (j->paused) x = pause_at(x, TD_HERE);
    x = td_add(td_mul(x, td_use(n->scalar)), td_use(n->one));
    x = td_add(x, td_sum(td_use(n->none), TD_ALL, TD_DROP));
    x = nn_linear_apply(&n->out, x);
    return j->paused ? pause_at(x, TD_HERE) : x;
}

/* A third of the rows have labels; ranks have none, some or all of theirs. */
static double weight_of(int row) { return row < ROWS / 4 ? 0 : row % 3 == 0 || row >= 3 * ROWS / 4; }

static int train(par_world *world, int rank, void *user)
{
    job *j = user;
    rank_log log;
    td_context *td = open_rank(world, rank, j, &log);
    net n = make_net(td, j);
    opt_optimizer *opt = j->plain ? opt_sgd(td_root(td), NULL) : opt_adamw(td_root(td), &(opt_adamw_options){ .max_norm = 1 });
    double x[ROWS * IN], w[ROWS];
    float narrow_x[ROWS * IN], narrow_w[ROWS];
    int32_t y[ROWS];
    int own = ROWS / par_world_size(world);
    for (int row = 0; row < own; row++) {
        int global = rank * own + row;
        for (int i = 0; i < IN; i++) narrow_x[row * IN + i] = (float)(x[row * IN + i] = feature(global, i));
        narrow_w[row] = (float)(w[row] = weight_of(global));
        y[row] = global * 5 % CLASSES;
    }
    bool wide = td_float(td) == TD_F64, good = true;
    for (int s = 0; s < STEPS && good; s++) {
        td_tensor in = td_batch(td, "x", td_float(td), TD_SHAPE(ROWS, IN), wide ? (void *)x : (void *)narrow_x);
        td_tensor labels = td_batch(td, "y", TD_I32, TD_SHAPE(ROWS), y), out = logits(&n, j, in), loss;
        const void *weights = wide ? (const void *)w : (const void *)narrow_w;
        if (j->weighted) loss = td_cross_entropy_weighted(out, labels, td_batch(td, "w", td_float(td), TD_SHAPE(ROWS), weights));
        else loss = td_cross_entropy(out, labels);
        td_backward(loss);
        opt_step(opt, j->plain ? 0.1 : 1e-2);
        good = td_step(td);
        if (good && rank == 0) j->result[s] = td_item(loss);
    }
    if (rank == 0) j->state_bytes = td_last_report(td).state_bytes;
    for (int64_t s = 0; s < 7 && good; s++) good = td_state_owned(td_state_at(td, s), &j->owned[rank][s][0], &j->owned[rank][s][1]);
    td_tensor total = td_fill(td, td_float(td), (td_shape){ 0 }, 0);
    for (int64_t s = 0; s < 7; s++)
        total = td_add(total, td_scale(td_sum(td_use(td_state_at(td, s)), TD_ALL, TD_DROP), 1 + 0.25 * (double)s));
    td_keep(total);
    if (td_step(td) && rank == 0) j->result[STEPS] = td_item(total);
    opt_close(opt);
    return close_rank(td, rank, j);
}

/* Where a rank has no element of a unit, or of a parameter, or there are none at all, it takes part all the same. */
START_TEST(test_empty_shards)
{
    static const int64_t elements[7] = { HIDDEN * IN, HIDDEN, 1, 1, 0, CLASSES * HIDDEN, CLASSES };
    job one = run(train, (job){ .dtype = TD_F64 });
    for (int w = 0; w < WORLDS; w++) {
        job got = run(train, (job){ .dtype = TD_F64, .strategy = worlds[w].strategy, .ranks = worlds[w].ranks });
        assert_near(&got, &one, STEPS + 1, 1e-10);
        bool sharded = !strcmp(got.strategy, "fsdp") || !strcmp(got.strategy, "zero3");
        for (int s = 0; s < 7 && sharded; s++) {
            int64_t held = 0;
            for (int r = 0; r < got.ranks; r++) held += got.owned[r][s][1] - got.owned[r][s][0];
            ck_assert_int_eq(held, elements[s]); /* each once */
        }
    }
}
END_TEST

/* The mean is over the rows that count, wherever they are: ranks with few weigh less, and one with none is no NaN. */
START_TEST(test_unequal_token_counts)
{
    job one = run(train, (job){ .dtype = TD_F64, .weighted = true });
    ck_assert(isfinite(one.result[0]));
    for (int w = 0; w < WORLDS; w++) {
        job got = run(train, (job){ .dtype = TD_F64, .weighted = true, .strategy = worlds[w].strategy, .ranks = worlds[w].ranks });
        assert_near(&got, &one, STEPS + 1, 1e-10);
    }
}
END_TEST

/* A gradient and moments are for what trains. */
START_TEST(test_memory_of_frozen_parameters)
{
    for (int w = 0; w < WORLDS; w++) {
        job j = { .dtype = TD_F32, .strategy = worlds[w].strategy, .ranks = worlds[w].ranks };
        job all = run(train, j);
        j.frozen = true;
        job part = run(train, j);
        int64_t weight = 4 * HIDDEN * IN, padding = 3 * 4 * 16 * 7 * worlds[w].ranks;
        bool sharded = !strcmp(j.strategy, "fsdp") || !strcmp(j.strategy, "zero3");
        if (!strcmp(j.strategy, "ddp")) ck_assert_int_le(part.state_bytes, all.state_bytes - 2 * weight + padding / 3);
        if (sharded) ck_assert_int_le(part.state_bytes, all.state_bytes + weight - 3 * weight / j.ranks + padding / j.ranks);
        ck_assert(part.result[STEPS] != all.result[STEPS]);
    }
}
END_TEST

/* Sums over ranks that are no power of two, in bf16: a factor folded into the sum in the wrong dtype would make gradients zero, or wrong by
 * hundredths. The roundings of bf16 themselves come to 2e-4 of these losses. */
START_TEST(test_bf16_sums_over_three_ranks)
{
    for (int w = 0; w < WORLDS; w++) {
        job j = { .dtype = TD_F32, .strategy = worlds[w].strategy, .ranks = worlds[w].ranks, .plain = true };
        job wide = run(train, j);
        j.reduce = TD_BF16;
        job narrow = run(train, j);
        assert_near(&narrow, &wide, STEPS + 1, 5e-4);
        ck_assert(narrow.result[STEPS] != wide.result[STEPS]);
        ck_assert(wide.result[STEPS - 1] < wide.result[0] && narrow.result[STEPS - 1] < narrow.result[0]);
    }
}
END_TEST

/* Ranks that are late by another amount at each call of a step, between collectives: no buffer is used again before all have read it. */
START_TEST(test_delays_between_collectives)
{
    for (int w = 0; w < WORLDS; w++) {
        job j = { .dtype = TD_F32, .strategy = worlds[w].strategy, .ranks = worlds[w].ranks };
        job prompt = run(train, j);
        j.paused = true;
        job late = run(train, j);
        assert_near(&late, &prompt, STEPS + 1, 0);
    }
}
END_TEST

/* ---- Draws ------------------------------------------------------------------------------------------------- */

static int draw(par_world *world, int rank, void *user)
{
    job *j = user;
    rank_log log;
    td_context *td = open_rank(world, rank, j, &log);
    double ones[12 * 4];
    for (int i = 0; i < 12 * 4; i++) ones[i] = 1;
    td_tensor x = td_batch(td, "x", TD_F64, TD_SHAPE(12, 4), ones);
    td_tensor kept = td_dropout(x, 0.5);
    td_keep(kept);
    if (td_step(td)) {
        double all[12 * 4];
        if (td_read(kept, all) && rank == 0) memcpy(j->result, all, sizeof all);
    }
    return close_rank(td, rank, j);
}

/* A mask is drawn by global index: ranks have parts of the one that one rank has, not the same one again and again. */
START_TEST(test_dropout_masks_of_ranks)
{
    job one = run(draw, (job){ .dtype = TD_F64 });
    int same = 0;
    for (int i = 0; i < 12; i++) same += one.result[i] == one.result[12 + i] && one.result[i] == one.result[24 + i];
    ck_assert_int_lt(same, 12);
    for (int w = 0; w < WORLDS; w++) {
        job got = run(draw, (job){ .dtype = TD_F64, .strategy = worlds[w].strategy, .ranks = worlds[w].ranks });
        assert_near(&got, &one, 12 * 4, 0);
    }
}
END_TEST

/* ---- A parameter that is not used ---------------------------------------------------------------------------- */

static int leave_unused(par_world *world, int rank, void *user)
{
    job *j = user;
    rank_log log;
    td_context *td = open_rank(world, rank, j, &log);
    nn_linear used = nn_linear_make(td_root(td), "used", 2, 2), spare = nn_linear_make(td_root(td), "spare", 2, 2);
    opt_optimizer *opt = opt_sgd(td_root(td), &(opt_sgd_options){ .momentum = 0.9 });
    double x[12 * 2] = { 1, 2, 3 };
    td_tensor y = nn_linear_apply(&used, td_batch(td, "x", TD_F64, TD_SHAPE(12, 2), x));
    td_backward(td_sum(td_square(y), TD_ALL, TD_DROP));
    opt_step(opt, 0.01);
    td_step(td);
    td_tensor sum = td_sum(td_use(spare.weight), TD_ALL, TD_DROP);
    td_keep(sum);
    if (td_step(td) && rank == 0) j->result[0] = td_item(sum);
    opt_close(opt);
    return close_rank(td, rank, j);
}

/* It is known from the program that nothing depends on it: no rank waits for its gradient, and each names it. */
START_TEST(test_a_parameter_that_no_loss_depends_on)
{
    job one = run(leave_unused, (job){ .dtype = TD_F64 });
    for (int w = 0; w < WORLDS; w++) {
        job got = run(leave_unused, (job){ .dtype = TD_F64, .strategy = worlds[w].strategy, .ranks = worlds[w].ranks });
        assert_near(&got, &one, 1, 1e-15); /* it stays */
        for (int r = 0; r < got.ranks; r++) {
            ck_assert_str_has(got.log[r], "'spare.weight' got no gradient");
            ck_assert_ptr_null(strstr(got.log[r], "'used.weight'"));
        }
    }
}
END_TEST

/* ---- The end of an epoch --------------------------------------------------------------------------------------- */

enum { SAMPLES = 22, BATCH = 12 };

/* result: batches of an epoch of training, batches and the mean of an evaluation. */
static int go_through(par_world *world, int rank, void *user)
{
    job *j = user;
    rank_log log;
    double values[SAMPLES];
    for (int i = 0; i < SAMPLES; i++) values[i] = feature(i, 0);
    td_context *td = open_rank(world, rank, j, &log);
    data_set *set = data_memory(td, &(data_array){ "v", TD_F64, TD_SHAPE(SAMPLES), values, 0 }, 1);
    double batches[2] = { 0 }, sum = 0, weight = 0;
    for (int evaluates = 0; evaluates < 2; evaluates++) {
        data_loader *loader = data_loader_open(td, set, &(data_loader_options){ .batch = BATCH, .rank = rank,
                                                                                .world = par_world_size(world), .epochs = 1,
                                                                                .threads = 1, .dtype = TD_F64, .shuffle = !evaluates,
                                                                                .tail = evaluates ? DATA_PAD : DATA_DROP });
        for (data_batch b; data_next(loader, &b); batches[evaluates]++) {
            td_tensor w = data_get(&b, "weight"), v = td_sum(td_mul(w, data_get(&b, "v")), TD_ALL, TD_DROP);
            td_tensor all = td_sum(w, TD_ALL, TD_DROP);
            td_keep(v);
            td_keep(all);
            if (!td_step(td)) break;
            if (evaluates) sum += td_item(v), weight += td_item(all);
        }
        data_loader_close(loader);
    }
    data_set_close(set);
    if (rank == 0) j->result[0] = batches[0], j->result[1] = batches[1], j->result[2] = sum / weight;
    return close_rank(td, rank, j);
}

/* 22 samples in batches of 12: ranks take the same steps, none waits for one that has no more, and the mean is that of 22. */
START_TEST(test_an_epoch_that_ends_unevenly)
{
    double mean = 0;
    for (int i = 0; i < SAMPLES; i++) mean += feature(i, 0) / SAMPLES;
    for (int ranks = 1; ranks <= 4; ranks++) {
        job got = run(go_through, (job){ .dtype = TD_F64, .strategy = ranks == 1 ? "single" : "ddp", .ranks = ranks });
        ck_assert(got.result[0] == 1 && got.result[1] == 2);
        ck_assert_double_eq_tol(got.result[2], mean, 1e-14);
    }
}
END_TEST

TESTS("known failures of others", test_empty_shards, test_unequal_token_counts, test_memory_of_frozen_parameters,
      test_bf16_sums_over_three_ranks, test_delays_between_collectives, test_dropout_masks_of_ranks,
      test_a_parameter_that_no_loss_depends_on, test_an_epoch_that_ends_unevenly)
