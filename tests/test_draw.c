/* The choice of a token from its logits: by the softmax's probabilities, and cut as published samplers cut. */
#include "models/gpt/draw.h"
#include "tests/check.h"

enum { TOKENS = 6, DRAWS = 40000 };

static gpt_choice choices[TOKENS];

static int32_t draw(const double *logits, gpt_draw_options options, double uniform)
{
    return gpt_draw(logits, TOKENS, &options, uniform, choices);
}

/* Probabilities 0.4, 0.05, 0.25, 0.05, 0.15, 0.1 */
static const double probabilities[TOKENS] = { 0.4, 0.05, 0.25, 0.05, 0.15, 0.1 };

static void fill(double *logits)
{
    for (int i = 0; i < TOKENS; i++) logits[i] = log(probabilities[i]) - 3;
}

/* How often each token comes for uniform numbers spread evenly over [0, 1). */
static void count(gpt_draw_options options, double *share)
{
    double logits[TOKENS];
    fill(logits);
    memset(share, 0, TOKENS * sizeof *share);
    for (int i = 0; i < DRAWS; i++) share[draw(logits, options, (i + 0.5) / DRAWS)] += 1.0 / DRAWS;
}

START_TEST(test_tokens_come_as_often_as_the_softmax_says)
{
    double share[TOKENS];
    count((gpt_draw_options){ .temperature = 1, .top_p = 1 }, share);
    ck_assert_near(share, probabilities, TOKENS, 1.0 / DRAWS);
}
END_TEST

/* Chi-square over random numbers: 5 degrees of freedom pass 20.5 once in a thousand. The numbers are the same each time. */
START_TEST(test_random_draws_follow_the_softmax)
{
    double logits[TOKENS], seen[TOKENS] = { 0 }, chi = 0;
    fill(logits);
    for (uint64_t i = 0; i < DRAWS; i++) {
        double uniform = 0.5 * erfc(-check_normal(i) / sqrt(2));
        seen[draw(logits, (gpt_draw_options){ .temperature = 1, .top_p = 1 }, uniform)]++;
    }
    for (int i = 0; i < TOKENS; i++) {
        double expected = DRAWS * probabilities[i];
        chi += (seen[i] - expected) * (seen[i] - expected) / expected;
    }
    ck_assert_msg(chi < 20.5, "chi-square is %g", chi);
    ck_assert_msg(chi > 0.2, "chi-square is %g: the numbers are not random", chi);
}
END_TEST

START_TEST(test_temperature_sharpens_and_flattens)
{
    double share[TOKENS], want[TOKENS], total = 0;
    for (int i = 0; i < TOKENS; i++) total += want[i] = probabilities[i] * probabilities[i];
    for (int i = 0; i < TOKENS; i++) want[i] /= total;
    count((gpt_draw_options){ .temperature = 0.5, .top_p = 1 }, share);
    ck_assert_near(share, want, TOKENS, 1.0 / DRAWS);
    count((gpt_draw_options){ .temperature = 1e6, .top_p = 1 }, share);
    for (int i = 0; i < TOKENS; i++) ck_assert(fabs(share[i] - 1.0 / TOKENS) < 1e-4);
}
END_TEST

START_TEST(test_top_k_keeps_the_k_likeliest)
{
    double share[TOKENS];
    const double three[TOKENS] = { 0.5, 0, 0.3125, 0, 0.1875, 0 };
    count((gpt_draw_options){ .temperature = 1, .top_k = 3, .top_p = 1 }, share);
    ck_assert_near(share, three, TOKENS, 1.0 / DRAWS);
    count((gpt_draw_options){ .temperature = 1, .top_k = 100, .top_p = 1 }, share);
    ck_assert_near(share, probabilities, TOKENS, 1.0 / DRAWS);
}
END_TEST

/* 0.4 + 0.25 is below 0.7, and 0.15 reaches it. */
START_TEST(test_the_token_that_crosses_top_p_is_kept)
{
    double share[TOKENS];
    const double three[TOKENS] = { 0.5, 0, 0.3125, 0, 0.1875, 0 }, two[TOKENS] = { 0.4 / 0.65, 0, 0.25 / 0.65, 0, 0, 0 };
    count((gpt_draw_options){ .temperature = 1, .top_p = 0.7 }, share);
    ck_assert_near(share, three, TOKENS, 1.0 / DRAWS);
    count((gpt_draw_options){ .temperature = 1, .top_p = 0.64 }, share);
    ck_assert_near(share, two, TOKENS, 1.0 / DRAWS);
    count((gpt_draw_options){ .temperature = 1, .top_p = 0.9999999 }, share);
    ck_assert_near(share, probabilities, TOKENS, 2.0 / DRAWS);
}
END_TEST

/* Of the three likeliest the first has 0.5 and the second 0.3125: 0.8 of them is the first two, 0.8 of all would be three. */
START_TEST(test_top_p_is_a_share_of_the_top_k)
{
    double share[TOKENS];
    const double two[TOKENS] = { 0.4 / 0.65, 0, 0.25 / 0.65, 0, 0, 0 };
    count((gpt_draw_options){ .temperature = 1, .top_k = 3, .top_p = 0.8 }, share);
    ck_assert_near(share, two, TOKENS, 1.0 / DRAWS);
}
END_TEST

START_TEST(test_greedy_top_k_1_and_a_tiny_top_p_are_one)
{
    double logits[TOKENS] = { 1, 5, -2, 5, 4.999, 0 }; /* of equal ones the first */
    for (int i = 0; i < 10; i++) {
        ck_assert_int_eq(draw(logits, (gpt_draw_options){ .temperature = 0, .top_p = 1 }, i / 10.0), 1);
        ck_assert_int_eq(draw(logits, (gpt_draw_options){ .temperature = 2, .top_k = 1, .top_p = 1 }, i / 10.0), 1);
        ck_assert_int_eq(draw(logits, (gpt_draw_options){ .temperature = 2, .top_p = 1e-12 }, i / 10.0), 1);
    }
}
END_TEST

START_TEST(test_what_has_no_probability_never_comes)
{
    double logits[TOKENS] = { -INFINITY, 0, -INFINITY, 0, -1e300, -INFINITY };
    const double ends[] = { 0, 0.4999, 0.5001, 1 - 0x1p-53, 1 };
    for (int i = 0; i < 5; i++) {
        int32_t want = ends[i] < 0.5 ? 1 : 3;
        ck_assert_int_eq(draw(logits, (gpt_draw_options){ .temperature = 1, .top_p = 1 }, ends[i]), want);
        ck_assert_int_eq(draw(logits, (gpt_draw_options){ .temperature = 1, .top_k = 5, .top_p = 1 }, ends[i]), want);
    }
}
END_TEST

START_TEST(test_logits_that_are_no_numbers_are_refused)
{
    const double bad[3][TOKENS] = { { 0, 1, NAN, 0, 0, 0 }, { 0, INFINITY, 0, 0, 0, 0 },
                                    { -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY } };
    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(draw(bad[i], (gpt_draw_options){ .temperature = 1, .top_p = 1 }, 0.5), -1);
        ck_assert_int_eq(draw(bad[i], (gpt_draw_options){ .temperature = 0, .top_p = 1 }, 0.5), -1);
    }
}
END_TEST

TESTS("draw", test_tokens_come_as_often_as_the_softmax_says, test_random_draws_follow_the_softmax, test_temperature_sharpens_and_flattens,
      test_top_k_keeps_the_k_likeliest, test_the_token_that_crosses_top_p_is_kept, test_top_p_is_a_share_of_the_top_k,
      test_greedy_top_k_1_and_a_tiny_top_p_are_one, test_what_has_no_probability_never_comes, test_logits_that_are_no_numbers_are_refused)
