/* What features do together: a table with row-sparse gradients, a frozen layer, attention with dropout, a gradient rule and an
 * expression within a scope of recomputation, micro-batches, a scaled loss, row-wise Adagrad with clipping, averages that are
 * read in the middle of a step, and a cache that training writes and reads. However it is run, the curve is one; a step
 * replays without allocating; any allocation may fail.
 *
 * Timeout: 300 s
 */
#include "tests/memory.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

enum { VOCABULARY = 19, WIDTH = 8, HEADS = 2, BATCH = 4, LENGTH = 3, MICROS = 2, CLASSES = 5, STEPS = 4, ROOM = 5 };

typedef struct network {
    td_context *td;
    nn_embedding table;
    nn_linear frozen, head;
    nn_block block;
    nn_cache cache;                           /* of the block, written at the same positions by every micro-batch */
    opt_optimizer *opt;
    opt_scaler *scaler;
    opt_ema *ema;
} network;

static void straight_through(const td_gradient_call *g) { td_gradient_set(g, 0, g->dout[0]); }
static const td_gradient_rule rounds = { "together_rounds", straight_through };

static network open_network(td_context *td)
{
    td_module root = td_root(td);
    td_rotary_options rotary = { .theta = 100 };
    network n = { .td = td };
    n.table = nn_embedding_make_with(root, "table", VOCABULARY, WIDTH, &(nn_embedding_options){ .sparse = true });
    n.frozen = nn_linear_make(root, "frozen", WIDTH, WIDTH);
    n.block = nn_block_make_with(root, "block", WIDTH, HEADS, 2 * WIDTH,
                                 &(nn_block_options){ .post_norm = true, .dropout = 0.1,
                                                      .attention = { .packed = true, .dropout = 0.1, .rotary = &rotary } });
    n.head = nn_linear_make(root, "head", WIDTH, CLASSES);
    if (td_error(td) == TD_OK) nn_freeze(n.frozen.at, "*");
    if (td_error(td) == TD_OK && td_get_dtype(root) == TD_BF16) td_set_dtype(n.head.at, TD_F32);
    n.cache = nn_cache_make(&n.block.attention, "cache", BATCH, ROOM);
    n.scaler = opt_scaler_open(td, &(opt_scaler_options){ .initial = 1024, .interval = 2 });
    n.opt = opt_adagrad(root, &(opt_adagrad_options){ .row_wise = true, .max_norm = 0.5, .scaler = n.scaler });
    n.ema = opt_ema_open(root, &(opt_ema_options){ .decay = 0.9, .warm_up = true });
    return n;
}

typedef struct batch {
    int32_t ids[BATCH * LENGTH], labels[BATCH * LENGTH], positions[BATCH];
} batch;

/* Micro-batch m of a step; this rank's rows of it come from `first` on. */
static void fill_batch(batch *b, int step, int m)
{
    for (int i = 0; i < BATCH * LENGTH; i++) {
        b->ids[i] = (int32_t)(fabs(check_normal((uint64_t)((step * MICROS + m) * BATCH * LENGTH + i))) * 9) % VOCABULARY;
        b->labels[i] = b->ids[i] % CLASSES;
    }
    for (int r = 0; r < BATCH; r++) b->positions[r] = r % 2;
}

typedef enum how { PLAINLY, RECOMPUTED } how;

static td_tensor loss_of(network *n, const batch *b, int first, how how)
{
    td_context *td = n->td;
    td_tensor ids = td_batch(td, "ids", TD_I32, TD_SHAPE(BATCH, LENGTH), b->ids + first * LENGTH);
    td_tensor labels = td_batch(td, "labels", TD_I32, TD_SHAPE(BATCH, LENGTH), b->labels + first * LENGTH);
    td_tensor positions = td_batch(td, "positions", TD_I32, TD_SHAPE(BATCH), b->positions + first);
    if (how == RECOMPUTED) td_recompute_begin(td);
    td_tensor x = nn_embedding_apply(&n->table, ids);
    x = nn_linear_apply(&n->frozen, x);
    td_tensor steps = td_expression("where(a > 0, 0.5, -0.5) * exp(-abs(a))", 1, &x);
    x = td_add(x, td_with_gradient(steps, &x, 1, &rounds, NULL, 0));
    x = nn_block_apply_to(&n->block, x, &(nn_sequence){ .positions = positions, .cache = &n->cache });
    if (how == RECOMPUTED) td_recompute_end(td);
    return td_cross_entropy(nn_linear_apply(&n->head, x), labels);
}

/* Records the micro-batches, the update and that of the averages; gives the loss of all rows. */
static td_tensor record_training(network *n, batch *b, int step, int first, how how)
{
    td_tensor sum = TD_NO_TENSOR;
    for (int m = 0; m < MICROS; m++) {
        fill_batch(&b[m], step, m);
        td_tensor loss = td_scale(loss_of(n, &b[m], first, how), 1.0 / MICROS);
        td_backward(opt_scaler_scale(n->scaler, loss));
        sum = m ? td_add(sum, loss) : loss;
    }
    td_keep(sum);
    opt_step(n->opt, 0.1);
    opt_ema_update(n->ema);
    return sum;
}

/* Runs one step: losses[0] of training, [1] of the averages in the middle of the step, [2] the norm. */
static bool one_step(network *n, batch *b, int step, int first, how how, double *losses)
{
    td_tensor sum = record_training(n, b, step, first, how);
    opt_ema_begin(n->ema);
    td_set_mode(n->td, TD_EVAL);
    losses[1] = td_item(loss_of(n, &b[0], first, PLAINLY)); /* records what td_step runs again; assigns the cache like the others */
    td_set_mode(n->td, TD_TRAIN);
    opt_ema_end(n->ema);
    if (!td_step(n->td)) return false;
    losses[0] = td_item(sum);
    losses[2] = td_item(opt_gradient_norm(n->opt));
    return true;
}

typedef struct job {
    td_options options;
    const char *strategy;
    how how;
    double curve[STEPS][3];
    int64_t flops, plans;
} job;

static int train(par_world *world, int rank, void *user)
{
    job *j = user;
    td_context *td = td_open(&j->options);
    par_attach(td, world, rank, &(par_options){ .strategy = j->strategy });
    network n = open_network(td);
    batch b[MICROS];
    bool good = true;
    for (int s = 0; s < STEPS && good; s++) {
        double losses[3] = { 0 };
        good = one_step(&n, b, s, rank * BATCH / par_world_size(world), j->how, losses);
        if (rank == 0) memcpy(j->curve[s], losses, sizeof losses);
    }
    if (!good) fprintf(stderr, "rank %d: %s\n", rank, td_error_text(td));
    if (rank == 0) j->flops = td_last_report(td).flops, j->plans = td_last_report(td).plans;
    td_close(td);
    return !good;
}

static void quiet(void *user, td_level level, const char *text) { (void)user, (void)level, (void)text; }

static job run(int ranks, job j)
{
    j.options.seed = 5;
    j.options.log = quiet;
    if (!j.options.threads) j.options.threads = 1;
    if (!j.strategy) j.strategy = "single";
    ck_assert_msg(!par_run_threads(ranks, &(par_world_options){ .timeout_s = 60 }, train, &j), "%s on %d ranks", j.strategy, ranks);
    return j;
}

static void assert_same(const job *got, const job *want, double tolerance)
{
    ck_assert_near(&got->curve[0][0], &want->curve[0][0], STEPS * 3, tolerance);
}

START_TEST(test_the_curve_is_one_however_it_is_run)
{
    job plain = run(1, (job){ .options.dtype = TD_F64 });
    ck_assert_int_eq(plain.plans, 2); /* the step, and the value read within it */
    ck_assert(plain.curve[STEPS - 1][0] < plain.curve[0][0]);
    for (int s = 0; s < STEPS; s++) ck_assert(plain.curve[s][1] != plain.curve[s][0]);
    static const char *const passes[] = { "-simplify", "-fuse", "-simplify,-fuse" };
    for (int p = 0; p < 3; p++) {
        job j = run(1, (job){ .options = { .dtype = TD_F64, .passes = passes[p], .poison = true } });
        assert_same(&j, &plain, 1e-12);
    }
    job again = run(1, (job){ .options = { .dtype = TD_F64, .poison = true, .threads = 2 }, .how = RECOMPUTED });
    assert_same(&again, &plain, 1e-12);
    ck_assert_int_gt(again.flops, plain.flops);
}
END_TEST

START_TEST(test_eager_gives_the_same_curve)
{
    job plain = run(1, (job){ .options.dtype = TD_F64 }), eager = run(1, (job){ .options = { .dtype = TD_F64, .eager = true } });
    assert_same(&eager, &plain, 1e-12);
}
END_TEST

START_TEST(test_ranks_give_the_same_curve)
{
    job plain = run(1, (job){ .options.dtype = TD_F64 });
    static const char *const strategies[] = { "ddp", "fsdp" };
    for (int s = 0; s < 2; s++)
        for (int recomputed = 0; recomputed < 2; recomputed++) {
            job j = run(2, (job){ .options = { .dtype = TD_F64, .poison = true }, .strategy = strategies[s],
                                  .how = recomputed ? RECOMPUTED : PLAINLY });
            assert_same(&j, &plain, 1e-10);
        }
}
END_TEST

START_TEST(test_bf16_is_near_and_recomputes_to_the_bit)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    job wide = run(1, (job){ .options.dtype = TD_F64 }), narrow = run(1, (job){ .options.dtype = TD_BF16 });
    ck_assert_near(narrow.curve[0], wide.curve[0], 1, 2e-2); /* the first loss: 2^-8 an operation */
    job again = run(1, (job){ .options = { .dtype = TD_BF16, .poison = true }, .how = RECOMPUTED });
    assert_same(&again, &narrow, 0);
}
END_TEST

/* ---- Memory ------------------------------------------------------------------------------------------------ */

static td_context *open_allocating(memory_test *memory, td_dtype dtype)
{
    td_allocator allocator = { .user = memory, .get = memory_get, .put = memory_put };
    return td_open(&(td_options){ .dtype = dtype, .seed = 5, .threads = 1, .log = quiet, .allocator = &allocator });
}

START_TEST(test_steps_allocate_nothing_from_the_second_on)
{
    static const td_dtype dtypes[] = { TD_F64, TD_F32, TD_BF16 };
    for (int d = 0; d < (has_bf16_products() ? 3 : 2); d++)
        for (int recomputed = 0; recomputed < 2; recomputed++) {
            memory_test memory = { .refused = -1 };
            network n = open_network(open_allocating(&memory, dtypes[d]));
            batch b[MICROS];
            double losses[3];
            ck_assert(one_step(&n, b, 0, 0, recomputed ? RECOMPUTED : PLAINLY, losses));
            int calls = memory.calls;
            for (int s = 1; s < STEPS; s++) ck_assert(one_step(&n, b, s, 0, recomputed ? RECOMPUTED : PLAINLY, losses));
            ck_assert_int_eq(memory.calls, calls);
            td_close(n.td);
            ck_assert_int_eq(memory.held, 0);
        }
}
END_TEST

/* One step, profiled; false: memory was refused. */
static bool works_with(memory_test *memory)
{
    network n = open_network(open_allocating(memory, TD_F64));
    batch b[MICROS];
    double losses[3];
    td_profile_begin(n.td, 1);
    bool good = one_step(&n, b, 0, 0, RECOMPUTED, losses) && td_error(n.td) == TD_OK;
    ck_assert_int_eq(td_error(n.td), good ? TD_OK : TD_ERROR_MEMORY);
    td_close(n.td);
    return good;
}

/* A step of two ranks under fsdp, planned. */
static bool plans_with(memory_test *memory)
{
    td_context *td = open_allocating(memory, TD_F64);
    par_world *world = par_world_none(2, 1);
    par_attach(td, world, 1, &(par_options){ .strategy = "fsdp" });
    network n = open_network(td);
    batch b[MICROS];
    record_training(&n, b, 0, BATCH / 2, RECOMPUTED);
    bool good = td_plan(td);
    ck_assert_int_eq(td_error(td), good ? TD_OK : TD_ERROR_MEMORY);
    td_close(td);
    par_world_close(world);
    return good;
}

static void refuse_each(bool (*works)(memory_test *memory))
{
    memory_test memory = { .refused = -1 };
    int refused = 0, by = check_all() ? 1 : 3;
    for (memory_refuse(&memory, 0); !works(&memory); memory_refuse(&memory, refused += by)) ck_assert_int_eq(memory.held, 0);
    ck_assert_int_eq(memory.held, 0);
    ck_assert_int_gt(refused, 300);
}

START_TEST(test_every_allocation_may_fail)
{
    refuse_each(works_with);
    refuse_each(plans_with);
}
END_TEST

TESTS("together", test_the_curve_is_one_however_it_is_run, test_eager_gives_the_same_curve, test_ranks_give_the_same_curve,
      test_bf16_is_near_and_recomputes_to_the_bit, test_steps_allocate_nothing_from_the_second_on, test_every_allocation_may_fail)
