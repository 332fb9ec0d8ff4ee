/* Under bf16 sharded units are gathered in the dtype that products read them in: bytes counted at the transport's calls against the
 * formulas of section 1 of the reference of strategies, with p = 2; members that something reads in f32 keep their bits; memory.
 * That curves are those of ddp, to the bit: test_curves.c.
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

TESTS("gather_dtype", test_blocks_are_gathered_in_bf16, test_groups_keep_blocks_in_bf16, test_what_is_gathered_takes_half_the_memory,
      test_members_read_as_stored_keep_their_bits)
