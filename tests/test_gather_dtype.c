/* Under bf16 sharded units are gathered in the dtype that products read them in: bytes counted at the transport's calls against the
 * formulas of sections 1 and 2 of the reference of strategies, with p = 2; members that something reads in f32 keep their bits; memory.
 * zero1 and zero2 keep what they gathered up to the next update. That curves are those of ddp, to the bit: test_curves.c.
 *
 * Labels: threads
 */
#include "tests/blocks.h"

enum { AS_STORED = NORM };

/* mq(P p + P_backward p + P r) with p = 2 for blocks, whose norms come beside in f32, all at once; the root, of which the embedding is
 * most, is gathered in f32, once. And each micro-batch's loss, scaled and unscaled. */
static void check_bytes(const char *strategy, int ranks, int group, bool keep)
{
    for (int m = 1; m <= 2; m++) {
        int64_t block = aligned(BLOCK, 16 * ranks), root = aligned(ROOT, 16 * ranks);
        int64_t bytes = BLOCKS * ((keep ? 1 : 2) * bytes_of_parts(2 * block, group) + bytes_of_parts(4 * block, group)) +
                        bytes_of_sum(4 * BLOCKS * AS_STORED, group) + 2 * bytes_of_parts(4 * root, group);
        int64_t calls = BLOCKS * (keep ? 2 : 3) + 3;
        int64_t across = group < ranks ? BLOCKS * bytes_of_sum(4 * block / group, 2) + bytes_of_sum(4 * root / group, 2) : 0; /* once an update */
        int64_t want = m * (bytes + 2 * bytes_of_sum(4, ranks)) + across, want_calls = m * (calls + 2) + (across ? BLOCKS + 1 : 0);
        block_job done = blocks_run((block_job){ .dtype = TD_BF16, .strategy = strategy, .ranks = ranks, .accumulate = m, .keep_gathered = keep });
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

/* What a group of two keeps is in bf16, too: the backward gathers it among these, where it gathers the unit anew among four otherwise. */
START_TEST(test_groups_keep_blocks_in_bf16)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    enum { RANKS = 4, GROUP = 2 };
    int64_t block = 2 * aligned(BLOCK, 16 * RANKS);
    for (int offload = 0; offload <= PAR_OFFLOAD_PARAMETERS; offload += PAR_OFFLOAD_PARAMETERS) {
        block_job j = { .dtype = TD_BF16, .strategy = "fsdp", .ranks = RANKS, .accumulate = 1, .offload = offload };
        block_job anew = blocks_run(j);
        j.keep_group = GROUP;
        block_job kept = blocks_run(j);
        ck_assert_int_eq(anew.copied - kept.copied, offload ? BLOCKS * block / RANKS : 0); /* it is kept on the device */
        ck_assert_int_eq(anew.sent - kept.sent, BLOCKS * (bytes_of_parts(block, RANKS) - bytes_of_parts(block, GROUP)));
        ck_assert_int_eq(kept.calls, anew.calls);
        for (int s = 0; s < STEPS; s++) ck_assert_double_eq(kept.losses[s], anew.losses[s]);
    }
}
END_TEST

/* The blocks' part of a step is what falls: a gathered unit is half as large. */
START_TEST(test_what_is_gathered_takes_half_the_memory)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    block_job narrow = blocks_run((block_job){ .dtype = TD_BF16, .strategy = "fsdp", .ranks = 2, .accumulate = 1, .keep_gathered = true });
    block_job wide = blocks_run((block_job){ .dtype = TD_F32, .strategy = "fsdp", .ranks = 2, .accumulate = 1, .keep_gathered = true });
    int64_t blocks = BLOCKS * aligned(BLOCK, 32);
    ck_assert_int_le(narrow.report.step_bytes, wide.report.step_bytes - 2 * blocks + BLOCKS * 4 * AS_STORED);
}
END_TEST

/* Cast before it is sent or after: the same bits, whatever the strategy, as where nothing is gathered. */
START_TEST(test_members_read_as_stored_keep_their_bits)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    static const char *const strategies[] = { "zero1", "zero2", "zero3", "fsdp", "hsdp:3x1" };
    block_job ddp = blocks_run((block_job){ .dtype = TD_BF16, .strategy = "ddp", .ranks = 3, .accumulate = 1 });
    for (int i = 0; i < 5; i++)
        for (int prefetch = 1; prefetch <= 3; prefetch += 2) {
            block_job done = blocks_run((block_job){ .dtype = TD_BF16, .strategy = strategies[i], .ranks = 3, .accumulate = 1, .prefetch = prefetch });
            for (int s = 0; s < STEPS; s++) ck_assert_double_eq(done.losses[s], ddp.losses[s]);
        }
}
END_TEST

/* ---- zero1 and zero2: copies that are kept */

/* In buckets: the head and the last block; one block and a bias of the first; the rest of that; the table, which is read in f32. */
enum { BUCKET = 4 * (BLOCK + 5 * WIDTH + 5) };
typedef struct bucket_sizes { int64_t narrow, table, all; } bucket_sizes; /* elements */

static bucket_sizes buckets_of(int ranks)
{
    int64_t a = 16 * ranks, table = aligned(TOKENS * WIDTH, a);
    int64_t narrow = aligned(BLOCK + 5 * WIDTH + 5, a) + aligned(BLOCK + WIDTH, a) + aligned(BLOCK - WIDTH, a);
    return (bucket_sizes){ narrow, table, narrow + table };
}

static block_job zero_job(const char *strategy, int ranks, int m)
{
    return (block_job){ .dtype = TD_BF16, .strategy = strategy, .ranks = ranks, .accumulate = m, .bucket_bytes = BUCKET };
}

/* What is gathered, all of it, and in how many calls. */
static int64_t bytes_of_copies(int ranks)
{
    bucket_sizes b = buckets_of(ranks);
    return bytes_of_parts(2 * b.narrow, ranks) + bytes_of_parts(4 * b.table, ranks) + bytes_of_sum(4 * BLOCKS * AS_STORED, ranks);
}
enum { COPY_CALLS = 5 };

/* q P (r + p) and q P (m r + p): gathers once an update, whatever the number of micro-batches. */
START_TEST(test_zero_gathers_in_bf16_once_an_update)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int m = 1; m <= 3; m++)
            for (int stage = 1; stage <= 2 && ROWS / m % ranks == 0; stage++) {
                int scatters = stage == 1 ? 1 : m;
                int64_t scattered = bytes_of_parts(4 * buckets_of(ranks).all, ranks);
                int64_t want = bytes_of_copies(ranks) + scatters * scattered + 2 * m * bytes_of_sum(4, ranks);
                block_job done = blocks_run(zero_job(stage == 1 ? "zero1" : "zero2", ranks, m));
                ck_assert_msg(done.sent == want && done.calls == COPY_CALLS + 4 * scatters + 2 * m,
                              "zero%d, %d ranks, accumulation %d: %lld bytes in %lld calls, expected %lld in %d", stage, ranks, m,
                              (long long)done.sent, (long long)done.calls, (long long)want, COPY_CALLS + 4 * scatters + 2 * m);
            }
}
END_TEST

/* 2 P of copies, 12 P / N of parameters and moments in f32; accumulators 4 P and 4 P / N: the table's copy is in f32, and that of norms. */
START_TEST(test_zero_holds_copies_in_bf16_and_parts_in_f32)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int m = 1; m <= 2; m++) {
            bucket_sizes b = buckets_of(ranks);
            int64_t state = 2 * b.narrow + 4 * b.table + 4 * BLOCKS * AS_STORED + 12 * b.all / ranks + 4;
            block_job one = blocks_run(zero_job("zero1", ranks, m)), two = blocks_run(zero_job("zero2", ranks, m));
            ck_assert_int_eq(one.report.state_bytes, state + (m > 1 ? 4 * b.all : 0));
            ck_assert_int_eq(two.report.state_bytes, state + (m > 1 ? 4 * b.all / ranks : 0));
            int64_t planned = one.report.peak_bytes;
            ck_assert_int_le(llabs(one.most_device - planned) * 100, planned);
        }
}
END_TEST

static const struct { const char *name; block_job job; } variants[] = {
    { "frozen", { .frozen = "h.*.norm.*,h.1.linear.*" } },
    { "averages", { .averages = true } },
    { "moments in host memory", { .offload = PAR_OFFLOAD_OPTIMIZER, .accumulate = 2 } },
    { "parameters in host memory", { .offload = PAR_OFFLOAD_PARAMETERS, .accumulate = 2 } },
    { "sgd", { .sgd = true, .accumulate = 3 } },
};

/* Where gradients are summed in the same order: over micro-batches and then ranks, or over ranks in each micro-batch. */
START_TEST(test_zero_in_bf16_is_ddp_or_fsdp_to_the_bit)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    static const struct { const char *zero, *as; } pairs[] = { { "zero1", "ddp" }, { "zero2", "fsdp" } };
    for (size_t i = 0; i < 2 * sizeof variants / sizeof *variants; i++) {
        block_job j = variants[i / 2].job;
        j.dtype = TD_BF16, j.ranks = 2, j.bucket_bytes = BUCKET;
        if (!j.accumulate) j.accumulate = 1;
        j.strategy = pairs[i % 2].zero;
        block_job zero = blocks_run(j);
        j.strategy = pairs[i % 2].as;
        block_job as = blocks_run(j);
        for (int k = 0; k < STEPS; k++)
            ck_assert_msg(zero.losses[k] == as.losses[k], "%s, %s: loss %d is %.9g, not %.9g", variants[i / 2].name, zero.strategy, k,
                          zero.losses[k], as.losses[k]);
        ck_assert_msg(zero.parameters == as.parameters && zero.averaged == as.averaged, "%s, %s", variants[i / 2].name, zero.strategy);
    }
}
END_TEST

/* ---- What is kept from step to step */

typedef struct kept_run {
    const char *strategy;
    int64_t sent[6];                          /* by each step */
    double loss[6];
} kept_run;

/* Each parameter's elements that this rank holds, halved. */
static bool halve(td_context *td)
{
    for (int64_t s = 0; s < td_state_count(td); s++) {
        td_state state = td_state_at(td, s);
        int64_t begin, end;
        float values[TOKENS * WIDTH];
        if (td_state_kind_of(state) != TD_PARAMETER || !td_state_owned(state, &begin, &end)) continue;
        if (!td_state_read(state, begin, end - begin, values)) return false;
        for (int64_t i = 0; i < end - begin; i++) values[i] /= 2;
        if (!td_state_write(state, begin, end - begin, values)) return false;
    }
    return true;
}

/* An update, an evaluation, another one, an update, an evaluation and, after parameters were written, an update. */
static int keep(par_world *world, int rank, void *user)
{
    static const bool updates[6] = { true, false, false, true, false, true };
    kept_run *r = user;
    td_context *td = td_open(&(td_options){ .dtype = TD_BF16, .seed = 3, .threads = 1, .poison = true });
    par_attach(td, world, rank, &(par_options){ .strategy = r->strategy, .bucket_bytes = BUCKET });
    block_net n = block_net_make(td_root(td));
    opt_optimizer *opt = opt_adamw(td_root(td), NULL);
    int32_t ids[ROWS], labels[ROWS];
    for (int i = 0; i < ROWS / 2; i++) ids[i] = (rank * ROWS + i) * 7 % TOKENS, labels[i] = i % 5;
    bool good = true;
    for (int s = 0; s < 6 && good; s++) {
        int64_t before = par_sent(world, rank, NULL);
        if (s == 5) good = halve(td);
        td_tensor loss = block_loss(td, &n, ids, labels, ROWS);
        td_keep(loss);
        if (updates[s]) td_backward(loss);
        if (updates[s]) opt_step(opt, 1e-2);
        good = good && td_step(td);
        double value = td_item(loss);
        if (rank == 0) r->loss[s] = value, r->sent[s] = par_sent(world, rank, NULL) - before;
    }
    opt_close(opt);
    td_close(td);
    return !good;
}

START_TEST(test_what_zero_gathered_is_kept_up_to_the_next_update)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    enum { RANKS = 2 };
    kept_run ddp = { .strategy = "ddp" }, zero = { .strategy = "zero1" };
    ck_assert_int_eq(par_run_threads(RANKS, &(par_world_options){ .timeout_s = 20 }, keep, &ddp), 0);
    ck_assert_int_eq(par_run_threads(RANKS, &(par_world_options){ .timeout_s = 20 }, keep, &zero), 0);
    int64_t copies = bytes_of_copies(RANKS), scatter = bytes_of_parts(4 * buckets_of(RANKS).all, RANKS), loss = bytes_of_sum(4, RANKS);
    const int64_t want[6] = { copies + scatter + loss, copies + loss, loss, scatter + loss, copies + loss, copies + scatter + loss };
    for (int s = 0; s < 6; s++) {
        ck_assert_msg(zero.sent[s] == want[s], "step %d sends %lld bytes, expected %lld", s, (long long)zero.sent[s], (long long)want[s]);
        ck_assert_double_eq(zero.loss[s], ddp.loss[s]);
    }
}
END_TEST

TESTS("gather_dtype", test_blocks_are_gathered_in_bf16, test_groups_keep_blocks_in_bf16, test_what_is_gathered_takes_half_the_memory,
      test_members_read_as_stored_keep_their_bits, test_zero_gathers_in_bf16_once_an_update, test_zero_holds_copies_in_bf16_and_parts_in_f32,
      test_zero_in_bf16_is_ddp_or_fsdp_to_the_bit, test_what_zero_gathered_is_kept_up_to_the_next_update)
