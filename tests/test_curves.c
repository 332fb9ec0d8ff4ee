/* One seed, one curve: every strategy x 2, 3 and 4 ranks, some with layers that ranks share, x {MLP, GPT with tied weights and 67 tokens} x
 * accumulation {1, 3} x clipping {none, 2-norm, inf-norm} x {recomputed, not}, with moments, parameters, both or nothing in host
 * memory, gives the losses and the parameters of one rank (tests/curves.h).
 *
 * By default a selection in which every strategy meets every number of ranks and each of the other choices; TANDEM_TEST_ALL=1: all.
 *
 * Labels: threads
 * Timeout: 600 s
 */
#include "tests/curves.h"

static job run(job j)
{
    job done = j;
    int failed = par_run_threads(j.ranks, &(par_world_options){ .timeout_s = 60 }, train, &(run_of){ &j, &done });
    ck_assert_msg(!failed, "%s on %d ranks: %s", j.strategy, j.ranks, done.error);
    return done;
}

static job one_rank(td_dtype dtype, bool gpt, clip c)
{
    return run((job){ .dtype = dtype, .strategy = "single", .ranks = 1, .accumulate = 1, .gpt = gpt, .clip = c });
}

static void assert_same_curve(const job *got, const job *want, double tolerance)
{
    char text[CURVE_TEXT];
    ck_assert_msg(same_curve(got, want, tolerance, text), "%s", text);
}

/* By default choice c meets a world if it is the world's turn: each of a strategy's rows takes others. */
static bool is_chosen(td_dtype dtype, int world, int choice)
{
    return check_all() || (choice + 5 * world) % CHOICES < (dtype == TD_F64 && !SLOW ? 2 : 1);
}

static void check_matrix(td_dtype dtype, bool gpt, double tolerance)
{
    job one[3];
    for (int c = UNCLIPPED; c <= CLIP_INF; c++) one[c] = one_rank(dtype, gpt, (clip)c);
    ck_assert(one[0].losses[STEPS - 1] < 0.97 * one[0].losses[0]);
    for (int c = CLIP_2; c <= CLIP_INF; c++) ck_assert(!is_near(one[c].losses[STEPS - 1], one[0].losses[STEPS - 1], 1e-4)); /* it clips */
    for (int w = 0; w < WORLDS; w++)
        for (int c = 0; c < CHOICES; c++) {
            if (!is_chosen(dtype, w, c)) continue;
            job j = job_at(dtype, gpt, w, c);
            job done = run(j);
            assert_same_curve(&done, &one[j.clip], tolerance);
        }
}

START_TEST(test_mlp_f64) { check_matrix(TD_F64, false, 1e-10); } END_TEST
START_TEST(test_gpt_f64) { check_matrix(TD_F64, true, 1e-10); } END_TEST
START_TEST(test_mlp_f32) { check_matrix(TD_F32, false, 1e-5); } END_TEST
START_TEST(test_gpt_f32) { check_matrix(TD_F32, true, 1e-5); } END_TEST

/* One micro-batch and no clipping keep the order of sums, so that even f32 has the same bits. hsdp sums in the group first, shared layers
 * sum over their inputs. */
static void check_bits(td_dtype dtype)
{
    for (int gpt = 0; gpt < 2; gpt++) {
        job ddp[5];
        for (int ranks = 2; ranks <= 4; ranks++)
            ddp[ranks] = run((job){ .dtype = dtype, .gpt = gpt, .ranks = ranks, .accumulate = 1, .strategy = "ddp" });
        for (int w = 0; w < WORLDS; w++) {
            if (!strcmp(worlds[w].strategy, "hsdp:2x2") || !strcmp(worlds[w].strategy, "ddp") || strchr(worlds[w].strategy, '+')) continue;
            if (!check_all() && worlds[w].ranks != 3 && w % 3 && !group_of(w)) continue;
            job j = { .dtype = dtype, .gpt = gpt, .ranks = worlds[w].ranks, .accumulate = 1, .strategy = worlds[w].strategy,
                      .group = group_of(w) };
            job done = run(j);
            assert_same_curve(&done, &ddp[j.ranks], 0);
        }
    }
}

START_TEST(test_strategies_are_bit_equal_where_sums_keep_their_order) { check_bits(TD_F32); } END_TEST

/* Parameters are rounded before they are gathered or after, to the same bits; gradients are summed in f32. */
START_TEST(test_strategies_are_bit_equal_in_bf16)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    check_bits(TD_BF16);
}
END_TEST

START_TEST(test_reruns_are_bit_equal)
{
    static const struct { const char *strategy; int ranks; } rerun[] = {
        { "ddp", 3 }, { "zero1", 2 }, { "zero2", 4 }, { "zero3", 3 }, { "fsdp", 4 }, { "hsdp:2x2", 4 },
    };
    for (size_t i = 0; i < sizeof rerun / sizeof *rerun; i++) {
        job j = { .dtype = TD_F32, .gpt = i & 1, .strategy = rerun[i].strategy, .ranks = rerun[i].ranks, .accumulate = 3, .clip = CLIP_2 };
        job first = run(j), second = run(j);
        assert_same_curve(&second, &first, 0);
    }
}
END_TEST

TESTS("curves", test_mlp_f64, test_gpt_f64, test_mlp_f32, test_gpt_f32, test_strategies_are_bit_equal_where_sums_keep_their_order,
      test_strategies_are_bit_equal_in_bf16, test_reruns_are_bit_equal)
