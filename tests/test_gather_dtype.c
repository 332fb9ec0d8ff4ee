/* Under bf16 sharded units are gathered in the dtype that products read them in: bytes counted at the transport's calls against the
 * formulas of section 1 of the reference of strategies, with p = 2; members that something reads in f32 keep their bits; memory.
 * That curves are those of ddp, to the bit: test_curves.c.
 *
 * Labels: threads
 */
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

enum { TOKENS = 50, WIDTH = 48, BLOCKS = 3, ROWS = 24, STEPS = 4 };

typedef struct job {
    td_dtype dtype;
    const char *strategy;
    int ranks, accumulate, prefetch;
    bool keep_gathered;
    double losses[STEPS];
    td_report report;
    int64_t sent, calls;                      /* of one update */
    char error[512];
} job;

/* Blocks of a norm and a linear layer; an embedding, whose rows are read in f32, and the head are the root's. */
typedef struct net {
    nn_embedding table;
    nn_norm norm[BLOCKS];
    nn_linear block[BLOCKS], head;
} net;

static net make_net(td_module root)
{
    net n = { .table = nn_embedding_make(root, "table", TOKENS, WIDTH) };
    for (int b = 0; b < BLOCKS; b++) {
        char name[16];
        snprintf(name, sizeof name, "h.%d", b);
        td_module at = td_child(root, name);
        n.norm[b] = nn_layer_norm_make(at, "norm", WIDTH);
        n.block[b] = nn_linear_make(at, "linear", WIDTH, WIDTH);
    }
    n.head = nn_linear_make(root, "head", WIDTH, 5);
    return n;
}

static td_tensor loss_of(td_context *td, const net *n, const int32_t *ids, const int32_t *labels, int rows)
{
    td_tensor x = nn_embedding_apply(&n->table, td_batch(td, "ids", TD_I32, TD_SHAPE(rows), ids));
    for (int b = 0; b < BLOCKS; b++) x = td_add(x, td_relu(nn_linear_apply(&n->block[b], nn_norm_apply(&n->norm[b], x))));
    return td_cross_entropy(nn_linear_apply(&n->head, x), td_batch(td, "labels", TD_I32, TD_SHAPE(rows), labels));
}

typedef struct run_of {
    const job *asked;
    job *done;
} run_of;

static int train(par_world *world, int rank, void *user)
{
    const run_of *r = user;
    job own = *r->asked;
    td_context *td = td_open(&(td_options){ .dtype = own.dtype, .seed = 3, .threads = 1, .poison = true });
    par_attach(td, world, rank, &(par_options){ .strategy = own.strategy, .keep_gathered = own.keep_gathered, .prefetch = own.prefetch });
    net n = make_net(td_root(td));
    opt_optimizer *opt = opt_adamw(td_root(td), NULL);
    int micro = ROWS / own.accumulate, rows = micro / own.ranks;
    int32_t ids[ROWS], labels[ROWS];
    int64_t before = 0, calls_before = 0;
    bool good = true;
    for (int s = 0; s < STEPS && good; s++) {
        if (s == 1) before = par_sent(world, rank, &calls_before);
        own.losses[s] = 0;
        for (int k = 0; k < own.accumulate && good; k++) {
            for (int i = 0; i < rows; i++) {
                int row = s * ROWS + k * micro + rank * rows + i;
                ids[i] = row * 7 % TOKENS, labels[i] = row % 5;
            }
            td_tensor loss = loss_of(td, &n, ids, labels, micro);
            td_backward(td_scale(loss, 1.0 / own.accumulate));
            td_keep(loss);
            if (k + 1 == own.accumulate) opt_step(opt, 1e-2);
            good = td_step(td);
            own.losses[s] += td_item(loss);
        }
    }
    int64_t calls, sent = par_sent(world, rank, &calls);
    own.sent = (sent - before) / (STEPS - 1);
    own.calls = (calls - calls_before) / (STEPS - 1);
    own.report = td_last_report(td);
    snprintf(own.error, sizeof own.error, "%s", td_error_text(td));
    if (rank == 0) *r->done = own;
    opt_close(opt);
    td_close(td);
    return good ? 0 : 1;
}

static job run(job j)
{
    job done = j;
    int failed = par_run_threads(j.ranks, &(par_world_options){ .timeout_s = 20 }, train, &(run_of){ &j, &done });
    ck_assert_msg(!failed, "%s on %d ranks: %s", j.strategy, j.ranks, done.error);
    return done;
}

static int64_t aligned(int64_t elements, int64_t to) { return (elements + to - 1) / to * to; }
static int64_t part_of(int64_t bytes, int ranks) { return (ranks - 1) * (bytes / ranks); } /* gather, reduce-scatter */
static int64_t sum_of(int64_t bytes, int ranks) { return (2 * (ranks - 1) * bytes + ranks - 1) / ranks; }

enum {
    BLOCK = 2 * WIDTH + WIDTH * WIDTH + WIDTH,      /* norm.weight, norm.bias, linear.weight, linear.bias */
    AS_STORED = 2 * WIDTH,
    ROOT = TOKENS * WIDTH + 5 * WIDTH + 5,
};

/* mq(P p + P_backward p + P r) with p = 2 for blocks, whose norms come beside in f32, all at once; the root, of which the embedding is
 * most, is gathered in f32, once. And each micro-batch's loss, scaled and unscaled. */
static void check_bytes(const char *strategy, int ranks, int group, bool keep)
{
    for (int m = 1; m <= 2; m++) {
        int64_t block = aligned(BLOCK, 16 * ranks), root = aligned(ROOT, 16 * ranks);
        int64_t bytes = BLOCKS * ((keep ? 1 : 2) * part_of(2 * block, group) + part_of(4 * block, group)) +
                        sum_of(4 * BLOCKS * AS_STORED, group) + 2 * part_of(4 * root, group);
        int64_t calls = BLOCKS * (keep ? 2 : 3) + 3;
        int64_t across = group < ranks ? BLOCKS * sum_of(4 * block / group, 2) + sum_of(4 * root / group, 2) : 0; /* once an update */
        int64_t losses = 2 * (group < ranks ? 2 : 1);
        int64_t want = m * (bytes + losses * sum_of(4, group)) + across, want_calls = m * (calls + losses) + (across ? BLOCKS + 1 : 0);
        job done = run((job){ .dtype = TD_BF16, .strategy = strategy, .ranks = ranks, .accumulate = m, .keep_gathered = keep });
        ck_assert_msg(done.sent == want && done.calls == want_calls, "%s, %d ranks, accumulation %d: %lld bytes in %lld calls, expected %lld in %lld",
                      strategy, ranks, m, (long long)done.sent, (long long)done.calls, (long long)want, (long long)want_calls);
    }
}

START_TEST(test_blocks_are_gathered_in_bf16)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    for (int ranks = 2; ranks <= 4; ranks++) check_bytes("fsdp", ranks, ranks, false);
    check_bytes("fsdp", 3, 3, true);
    check_bytes("hsdp:2x2", 4, 2, false);
}
END_TEST

/* The blocks' part of a step is what falls: a gathered unit is half as large. */
START_TEST(test_what_is_gathered_takes_half_the_memory)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    job narrow = run((job){ .dtype = TD_BF16, .strategy = "fsdp", .ranks = 2, .accumulate = 1, .keep_gathered = true });
    job wide = run((job){ .dtype = TD_F32, .strategy = "fsdp", .ranks = 2, .accumulate = 1, .keep_gathered = true });
    int64_t blocks = BLOCKS * aligned(BLOCK, 32);
    ck_assert_int_le(narrow.report.step_bytes, wide.report.step_bytes - 2 * blocks + BLOCKS * 4 * AS_STORED);
}
END_TEST

/* Cast before it is sent or after: the same bits, whatever the strategy, as where nothing is gathered. */
START_TEST(test_members_read_as_stored_keep_their_bits)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    static const char *const strategies[] = { "zero1", "zero2", "zero3", "fsdp", "hsdp:3x1" };
    job ddp = run((job){ .dtype = TD_BF16, .strategy = "ddp", .ranks = 3, .accumulate = 1 });
    for (int i = 0; i < 5; i++)
        for (int prefetch = 1; prefetch <= 3; prefetch += 2) {
            job done = run((job){ .dtype = TD_BF16, .strategy = strategies[i], .ranks = 3, .accumulate = 1, .prefetch = prefetch });
            for (int s = 0; s < STEPS; s++) ck_assert_double_eq(done.losses[s], ddp.losses[s]);
        }
}
END_TEST

TESTS("gather_dtype", test_blocks_are_gathered_in_bf16, test_what_is_gathered_takes_half_the_memory, test_members_read_as_stored_keep_their_bits)
