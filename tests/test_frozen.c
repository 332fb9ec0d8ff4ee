/* Frozen parameters under strategies: stored as the others are, sharded where they are; gathered before use, also for the backward where it
 * reads them; without gradients, moments or reductions. All of a unit is frozen, part of each, all parameters but one.
 *
 * Labels: threads
 */
#include "tests/blocks.h"

static const char unit[] = "h.1.*", part[] = "h.*.norm.*", all_but_one[] = "table.*,h.*,head.weight";

typedef struct cost {
    int64_t state, sent;
} cost;

/* f32 on `ranks`, m micro-batches. parameters and trained: elements of units, padded; the others: bytes a micro-batch. */
static void assert_cost(const char *strategy, const char *frozen, int ranks, int m, cost want)
{
    block_job done = blocks_run((block_job){ .dtype = TD_F32, .strategy = strategy, .ranks = ranks, .accumulate = m, .frozen = frozen });
    ck_assert_msg(done.report.state_bytes == want.state, "%s, %s frozen, %d ranks, accumulation %d: holds %lld bytes of state, expected %lld",
                  strategy, frozen, ranks, m, (long long)done.report.state_bytes, (long long)want.state);
    ck_assert_msg(done.sent == want.sent, "%s, %s frozen, %d ranks, accumulation %d: sends %lld bytes, expected %lld", strategy, frozen, ranks, m,
                  (long long)done.sent, (long long)want.sent);
}

/* What fsdp stores: all parameters; of what trains two moments, and gradients between micro-batches; the count of updates. */
static int64_t fsdp_state(int64_t parameters, int64_t trained, int ranks, int m)
{
    return (4 * parameters + (m > 1 ? 12 : 8) * trained) / ranks + 4;
}

START_TEST(test_fsdp_stores_and_gathers_frozen_parameters_in_parts)
{
    for (int n = 2; n <= 4; n++)
        for (int m = 1; m <= 2; m++) {
            int64_t block = aligned(BLOCK, 16 * n), norm = aligned(NORM, 16 * n), linear = aligned(LINEAR, 16 * n);
            int64_t root = aligned(ROOT, 16 * n), bias = aligned(5, 16 * n), root_but_bias = aligned(ROOT - 5, 16 * n);
            int64_t losses = 2 * bytes_of_sum(4, n);
            /* All of h.1: gathered twice, not scattered. */
            cost want = { fsdp_state(3 * block + root, 2 * block + root, n, m),
                          m * (8 * bytes_of_parts(4 * block, n) + 2 * bytes_of_parts(4 * root, n) + losses) };
            assert_cost("fsdp", unit, n, m, want);
            /* Norms: each block has two units, of which one trains. */
            want = (cost){ fsdp_state(3 * (norm + linear) + root, 3 * linear + root, n, m),
                           m * (6 * bytes_of_parts(4 * norm, n) + 9 * bytes_of_parts(4 * linear, n) + 2 * bytes_of_parts(4 * root, n) + losses) };
            assert_cost("fsdp", part, n, m, want);
            /* All but the head's bias: the backward reads no parameter. */
            want = (cost){ fsdp_state(3 * block + root_but_bias + bias, bias, n, m),
                           m * (3 * bytes_of_parts(4 * block, n) + bytes_of_parts(4 * root_but_bias, n) + 2 * bytes_of_parts(4 * bias, n) + losses) };
            assert_cost("fsdp", all_but_one, n, m, want);
        }
}
END_TEST

/* Where parameters are whole so are frozen ones, without gaps, and nothing is sent for them. */
START_TEST(test_zero_stores_frozen_parameters_whole)
{
    for (int n = 2; n <= 4; n++) {
        int64_t trained = aligned(2 * BLOCK + ROOT, 16 * n);
        assert_cost("zero1", unit, n, 1, (cost){ 4 * (trained + BLOCK) + 8 * trained / n + 4, 2 * bytes_of_parts(4 * trained, n) + 2 * bytes_of_sum(4, n) });
        assert_cost("ddp", unit, n, 1, (cost){ 4 * (trained + BLOCK) + 8 * trained + 4, bytes_of_sum(4 * trained, n) + 2 * bytes_of_sum(4, n) });
    }
}
END_TEST

static void assert_same(const block_job *got, const block_job *want, double tolerance)
{
    for (int s = 0; s < STEPS; s++)
        ck_assert_msg(fabs(got->losses[s] - want->losses[s]) <= tolerance * want->losses[s], "%s, %d ranks, %s frozen: loss %d is %.17g, not %.17g",
                      got->strategy, got->ranks, got->frozen, s, got->losses[s], want->losses[s]);
    ck_assert_msg(fabs(got->parameters - want->parameters) <= tolerance * fabs(want->parameters), "%s, %d ranks, %s frozen: parameters", got->strategy,
                  got->ranks, got->frozen);
}

START_TEST(test_curves_are_one_ranks)
{
    static const struct { const char *strategy; int ranks; } worlds[] = {
        { "ddp", 2 }, { "zero1", 3 }, { "zero2", 2 }, { "zero3", 3 }, { "fsdp", 2 }, { "fsdp", 4 }, { "hsdp:2x2", 4 },
    };
    const char *const patterns[] = { unit, part, all_but_one };
    block_job trained = blocks_run((block_job){ .dtype = TD_F64, .strategy = "single", .ranks = 1, .accumulate = 1, .max_norm = 0.5 });
    for (int p = 0; p < 3; p++) {
        block_job one = { .dtype = TD_F64, .strategy = "single", .ranks = 1, .accumulate = 1, .max_norm = 0.5, .frozen = patterns[p] };
        one = blocks_run(one);
        ck_assert(fabs(one.losses[STEPS - 1] - trained.losses[STEPS - 1]) > 1e-4); /* it is frozen */
        for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
            for (int m = 1; m <= 2; m++) {
                block_job j = { .dtype = TD_F64, .strategy = worlds[w].strategy, .ranks = worlds[w].ranks, .accumulate = m, .max_norm = 0.5,
                                .frozen = patterns[p] };
                j = blocks_run(j);
                assert_same(&j, &one, 1e-10);
            }
    }
}
END_TEST

START_TEST(test_bf16_has_the_bits_of_ddp)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    const char *const patterns[] = { unit, part, all_but_one };
    for (int p = 0; p < 3; p++) {
        block_job ddp = blocks_run((block_job){ .dtype = TD_BF16, .strategy = "ddp", .ranks = 3, .accumulate = 1, .frozen = patterns[p] });
        block_job fsdp = blocks_run((block_job){ .dtype = TD_BF16, .strategy = "fsdp", .ranks = 3, .accumulate = 1, .frozen = patterns[p] });
        assert_same(&fsdp, &ddp, 0);
    }
}
END_TEST

TESTS("frozen", test_fsdp_stores_and_gathers_frozen_parameters_in_parts, test_zero_stores_frozen_parameters_whole, test_curves_are_one_ranks,
      test_bf16_has_the_bits_of_ddp)
