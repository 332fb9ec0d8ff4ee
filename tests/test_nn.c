/* Layers: names, shapes and initial values of their parameters, what apply computes, errors on the caller's line. */
#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

#include "tests/check.h"

/* ---- linear --------------------------------------------------------------------------------------------- */

START_TEST(test_linear_is_x_times_weight_transposed_plus_bias)
{
    const double x[] = { 1, 2, 3, -1, 0.5, 4 }, w[] = { 1, 0, -1, 2, 2, 2, 0.5, -3, 1, 0, 0, 10 };
    const double b[] = { 0.25, -1, 0, 100 };
    const double y[] = { -1.75, 11, -2.5, 130, -4.75, 6, 2, 140 };
    td_context *td = open_cpu(TD_F64);
    nn_linear l = nn_linear_make(td_root(td), "out", 3, 4);
    ck_assert(td_state_write(l.weight, 0, 12, w) && td_state_write(l.bias, 0, 4, b));
    td_tensor in = td_input(td, "x", TD_F64, TD_SHAPE(2, 3), x);
    ck_assert_tensor_near(nn_linear_apply(&l, in), td_input(td, "y", TD_F64, TD_SHAPE(2, 4), y), 1e-15);
    td_close(td);
}
END_TEST

START_TEST(test_linear_without_bias_has_a_weight_only)
{
    const double x[] = { 1, 2 }, w[] = { 3, 4, 5, 6 }, y[] = { 11, 17 };
    td_context *td = open_cpu(TD_F64);
    nn_linear l = nn_linear_make_with(td_root(td), "head", 2, 2, &(nn_linear_options){ .no_bias = true });
    ck_assert_int_eq(td_state_count(td), 1);
    ck_assert_str_eq(td_state_name(td_state_at(td, 0)), "head.weight");
    ck_assert(td_state_write(l.weight, 0, 4, w));
    td_tensor in = td_input(td, "x", TD_F64, TD_SHAPE(1, 2), x);
    ck_assert_tensor_near(nn_linear_apply(&l, in), td_input(td, "y", TD_F64, TD_SHAPE(1, 2), y), 1e-15);
    td_close(td);
}
END_TEST

START_TEST(test_linear_keeps_leading_dimensions)
{
    td_context *td = open_cpu(TD_F64);
    nn_linear with = nn_linear_make(td_root(td), "with", 3, 4);
    nn_linear without = nn_linear_make_with(td_root(td), "without", 3, 4, &(nn_linear_options){ .no_bias = true });
    td_tensor x = randn(td, 2, 5, 3);
    ck_assert(td_shape_equal(td_shape_at(nn_linear_apply(&with, x)), TD_SHAPE(2, 5, 4)));
    ck_assert(td_shape_equal(td_shape_at(nn_linear_apply(&without, x)), TD_SHAPE(2, 5, 4)));
    ck_assert_no_error(td);
    td_close(td);
}
END_TEST

START_TEST(test_linear_starts_uniform_within_one_over_root_in)
{
    enum { IN = 100, OUT = 500 };
    static double w[IN * OUT];
    td_context *td = open_cpu(TD_F64);
    nn_linear l = nn_linear_make(td_root(td), "l", IN, OUT);
    ck_assert(td_state_read(l.weight, 0, IN * OUT, w));
    double least = 0, most = 0, sum = 0, squares = 0;
    for (int i = 0; i < IN * OUT; i++) {
        least = fmin(least, w[i]);
        most = fmax(most, w[i]);
        sum += w[i];
        squares += w[i] * w[i];
    }
    ck_assert(least >= -0.1 && least < -0.0999 && most < 0.1 && most > 0.0999);
    /* Mean 0 and variance 0.01/3 within five standard deviations of their estimates from 50,000 draws. */
    ck_assert_double_eq_tol(sum / (IN * OUT), 0, 5 * 0.1 / sqrt(3.0 * IN * OUT));
    ck_assert_double_eq_tol(squares / (IN * OUT), 0.01 / 3, 5 * 0.01 * sqrt(4.0 / 45 / (IN * OUT)));
    ck_assert(td_state_read(l.bias, 0, OUT, w));
    for (int i = 0; i < OUT; i++) ck_assert(fabs(w[i]) <= 0.1);
    ck_assert(w[0] != w[1]);
    td_close(td);
}
END_TEST

START_TEST(test_initial_values_depend_on_seed_and_name_alone)
{
    double a[12], b[12], other[12];
    td_context *td = open_cpu(TD_F64);
    nn_linear first = nn_linear_make(td_root(td), "l", 3, 4);
    ck_assert(td_state_read(first.weight, 0, 12, a));
    td_close(td);
    td = open_cpu(TD_F64);
    nn_linear before = nn_linear_make(td_root(td), "before", 3, 4), again = nn_linear_make(td_root(td), "l", 3, 4);
    ck_assert(td_state_read(again.weight, 0, 12, b) && td_state_read(before.weight, 0, 12, other));
    ck_assert_mem_eq(a, b, sizeof a);
    ck_assert_mem_ne(a, other, sizeof a);
    td_close(td);
}
END_TEST

/* The regression MLP: 10-64-64-1 with dropout between, its names those of a Sequential. */
START_TEST(test_the_regression_mlp_by_names_and_count)
{
    static const char *const names[] = { "net.0.weight", "net.0.bias", "net.3.weight",
                                         "net.3.bias",   "net.6.weight", "net.6.bias" };
    td_context *td = open_cpu(TD_F32);
    td_module net = td_child(td_root(td), "net");
    nn_linear_make(net, "0", 10, 64);
    nn_dropout_make(net, "2", 0.2);
    nn_linear_make(net, "3", 64, 64);
    nn_dropout_make(net, "5", 0.2);
    nn_linear_make(net, "6", 64, 1);
    ck_assert_no_error(td);
    ck_assert_int_eq(td_state_count(td), 6);
    for (int i = 0; i < 6; i++) ck_assert_str_eq(td_state_name(td_state_at(td, i)), names[i]);
    ck_assert_int_eq(td_parameter_elements(td), 4929);
    td_close(td);
}
END_TEST

START_TEST(test_an_error_names_layer_and_line)
{
    char expected[512];
    td_context *td = open_cpu(TD_F32);
    nn_linear l = nn_linear_make(td_root(td), "hidden", 3, 4);
    td_tensor y = nn_linear_apply(&l, randn(td, 2, 5));
    snprintf(expected, sizeof expected, "(%s:%d)", __FILE__, __LINE__ - 1);
    ck_assert(td_failed(y));
    ck_assert_str_has(td_error_text(td), "hidden");
    ck_assert_str_has(td_error_text(td), "(2, 5)");
    ck_assert_str_has(td_error_text(td), "(4, 3)");
    ck_assert_str_has(td_error_text(td), expected);
    td_close(td);
}
END_TEST

START_TEST(test_sizes_and_probabilities_that_cannot_be_are_refused)
{
    char expected[512];
    td_context *td = open_cpu(TD_F32);
    nn_linear_make(td_root(td), "a", 0, 4);
    snprintf(expected, sizeof expected, "nn_linear: 'a': sizes are 0 and 4, must be at least 1 (%s:%d)", __FILE__,
             __LINE__ - 2);
    ck_assert_str_eq(td_error_text(td), expected);
    td_clear_error(td);
    nn_dropout_make(td_root(td), "b", 1);
    snprintf(expected, sizeof expected, "nn_dropout: 'b': p is 1, must be from 0 to less than 1 (%s:%d)", __FILE__,
             __LINE__ - 2);
    ck_assert_str_eq(td_error_text(td), expected);
    td_clear_error(td);
    nn_dropout_make(td_root(td), "b", NAN);
    ck_assert_str_has(td_error_text(td), "nn_dropout: 'b': p is nan");
    td_clear_error(td);
    nn_linear_make_with(td_root(td), "c", 2, 2, &(nn_linear_options){ .deviation = -1 });
    ck_assert_str_has(td_error_text(td), "nn_linear: 'c': deviation is -1, must not be negative (");
    td_clear_error(td);
    nn_embedding_make_with(td_root(td), "d", 2, 2, &(nn_embedding_options){ .deviation = -1 });
    ck_assert_str_has(td_error_text(td), "embedding 'd': deviation is -1, must not be negative (");
    td_clear_error(td);
    nn_rms_norm_make_with(td_root(td), "e", 2, &(nn_norm_options){ .eps = -1 });
    ck_assert_str_has(td_error_text(td), "norm 'e': eps is -1, must not be negative (");
    td_close(td);
}
END_TEST

/* ---- dropout -------------------------------------------------------------------------------------------- */

START_TEST(test_dropout_zeroes_a_share_and_scales_the_rest)
{
    enum { N = 100000 };
    static double y[N];
    td_context *td = open_cpu(TD_F64);
    nn_dropout d = nn_dropout_make(td_root(td), "drop", 0.2);
    ck_assert(td_read(nn_dropout_apply(&d, ones(td, N)), y));
    int zeros = 0;
    for (int i = 0; i < N; i++) {
        ck_assert(y[i] == 0 || fabs(y[i] - 1.25) < 1e-15);
        zeros += y[i] == 0;
    }
    /* Five standard deviations of a binomial of N and 0.2. */
    ck_assert_int_lt(abs(zeros - N / 5), (int)(5 * sqrt(N * 0.2 * 0.8)));
    td_close(td);
}
END_TEST

START_TEST(test_dropout_gives_x_itself_in_evaluation)
{
    td_context *td = open_cpu(TD_F64);
    nn_dropout d = nn_dropout_make(td_root(td), "drop", 0.2);
    td_set_mode(td, TD_EVAL);
    td_tensor x = randn(td, 50, 7);
    ck_assert_tensor_near(nn_dropout_apply(&d, x), x, 0);
    td_close(td);
}
END_TEST

START_TEST(test_layers_draw_different_masks)
{
    enum { N = 1000 };
    static double a[N], b[N];
    td_context *td = open_cpu(TD_F64);
    nn_dropout one = nn_dropout_make(td_root(td), "one", 0.5), two = nn_dropout_make(td_root(td), "two", 0.5);
    td_tensor first = nn_dropout_apply(&one, ones(td, N)), second = nn_dropout_apply(&two, ones(td, N));
    ck_assert(td_read(first, a) && td_read(second, b));
    int same = 0;
    for (int i = 0; i < N; i++) same += a[i] == b[i];
    ck_assert_int_lt(abs(same - N / 2), (int)(5 * sqrt(N * 0.25)));
    td_close(td);
}
END_TEST

/* ---- freezing ------------------------------------------------------------------------------------------- */

/* h.0, h.1 and h.10, each with ln_1, ln_2 and a linear layer, and a head: 20 parameters, and a buffer. */
static td_module make_blocks(td_context *td)
{
    static const char *const blocks[] = { "0", "1", "10" };
    td_module root = td_root(td), h = td_child(root, "h");
    for (int b = 0; b < 3; b++) {
        td_module block = td_child(h, blocks[b]);
        nn_layer_norm_make(block, "ln_1", 4);
        nn_layer_norm_make(block, "ln_2", 4);
        nn_linear_make(block, "mlp", 4, 4);
    }
    nn_linear_make(root, "head", 4, 2);
    td_buffer(h, "ln_count", TD_F32, TD_SHAPE(1), td_init_constant(0));
    return root;
}

static int64_t training(td_context *td)
{
    int64_t count = 0;
    for (int64_t i = 0; i < td_state_count(td); i++) count += td_state_trains(td_state_at(td, i));
    return count;
}

START_TEST(test_parameters_freeze_by_the_pattern_of_their_names)
{
    td_context *td = open_cpu(TD_F32);
    td_module root = make_blocks(td), h = td_child(root, "h"), one = td_child(h, "1");
    ck_assert_int_eq(training(td), 20);
    ck_assert_int_eq(nn_freeze(root, "h.*.ln_*.weight"), 6);
    ck_assert_int_eq(training(td), 14);
    ck_assert(!td_state_trains(td_state_named(td, "h.10.ln_2.weight")) && td_state_trains(td_state_named(td, "h.10.ln_2.bias")));
    ck_assert_int_eq(nn_freeze(one, "*"), 6); /* below h.1, not h.10; two of them are frozen already */
    ck_assert_int_eq(training(td), 10);
    ck_assert(td_state_trains(td_state_named(td, "h.10.mlp.weight")) && !td_state_trains(td_state_named(td, "h.1.mlp.weight")));
    ck_assert_int_eq(nn_freeze(h, "[0]?mlp.bias"), 1);
    ck_assert_int_eq(nn_freeze(root, "head.bias"), 1);
    ck_assert_int_eq(training(td), 8);
    ck_assert_no_error(td);
    td_close(td);
}
END_TEST

START_TEST(test_a_pattern_that_fits_nothing_is_refused)
{
    char expected[400];
    td_context *td = open_cpu(TD_F32);
    td_module root = make_blocks(td), h = td_child(root, "h");
    ck_assert_int_eq(nn_freeze(root, "ln_*"), 0);
    snprintf(expected, sizeof expected, "nn_freeze: 'ln_*' fits no parameter; there are 'h.0.ln_1.weight', 'h.0.ln_1.bias', 'h.0.ln_2.weight', "
             "'h.0.ln_2.bias' and 16 more (%s:%d)", __FILE__, __LINE__ - 2);
    ck_assert_str_eq(td_error_text(td), expected);
    td_clear_error(td);
    ck_assert_int_eq(nn_freeze(td_child(root, "head"), "head.bias"), 0);
    ck_assert_str_has(td_error_text(td), "nn_freeze: 'head.bias' fits no parameter of 'head'; there are 'weight', 'bias' (");
    td_clear_error(td);
    ck_assert_int_eq(nn_freeze(h, "ln_count"), 0); /* a buffer */
    td_clear_error(td);
    ck_assert_int_eq(nn_freeze(td_child(root, "empty"), "*"), 0);
    ck_assert_str_has(td_error_text(td), "nn_freeze: '*' fits no parameter of 'empty'; there are none (");
    ck_assert_int_eq(training(td), 20);
    td_close(td);
}
END_TEST

START_TEST(test_freezing_comes_before_the_first_step)
{
    float x[4] = { 1, 2, 3, 4 };
    td_context *td = open_cpu(TD_F32);
    nn_linear l = nn_linear_make(td_root(td), "l", 4, 2);
    td_keep(nn_linear_apply(&l, td_input(td, "x", TD_F32, TD_SHAPE(1, 4), x)));
    ck_assert(td_step(td));
    ck_assert_int_eq(nn_freeze(td_root(td), "l.weight"), 0);
    ck_assert_str_eq(td_error_text(td), "td_freeze: 'l.weight' was in a step already; freeze before the first step");
    td_close(td);
}
END_TEST

START_TEST(test_what_freezes_has_no_optimizer_and_is_a_parameter)
{
    td_context *td = open_cpu(TD_F32);
    nn_linear l = nn_linear_make(td_root(td), "l", 4, 2);
    td_freeze(td_buffer(td_root(td), "count", TD_I32, TD_SHAPE(1), td_init_constant(0)));
    ck_assert_str_eq(td_error_text(td), "td_freeze: 'count' is no parameter, and does not train anyway");
    td_clear_error(td);
    opt_group nothing = { .pattern = "nothing" };
    ck_assert_ptr_null(opt_sgd(td_root(td), &(opt_sgd_options){ .groups = &nothing, .group_count = 1 }));
    td_clear_error(td);
    td_freeze(l.bias); /* an optimizer that could not be made has none */
    ck_assert(!td_state_trains(l.bias));
    ck_assert_ptr_nonnull(opt_sgd(td_root(td), NULL));
    ck_assert_int_eq(nn_freeze(td_root(td), "l.weight"), 0);
    ck_assert_str_eq(td_error_text(td), "td_freeze: 'l.weight' has an optimizer already; freeze before it is made");
    td_close(td);
}
END_TEST

/* ---- initial values ------------------------------------------------------------------------------------- */

enum { DRAWS = 200000 };

typedef struct moments { double least, most, mean, variance, fourth; } moments;

static moments draw(td_init init)
{
    static double w[DRAWS];
    td_context *td = open_cpu(TD_F64);
    ck_assert(td_state_read(td_parameter(td_root(td), "w", TD_SHAPE(DRAWS), init), 0, DRAWS, w));
    td_close(td);
    moments m = { w[0], w[0], 0, 0, 0 };
    for (int i = 0; i < DRAWS; i++) {
        m.least = fmin(m.least, w[i]);
        m.most = fmax(m.most, w[i]);
        m.mean += w[i] / DRAWS;
        m.variance += w[i] * w[i] / DRAWS;
        m.fourth += w[i] * w[i] * w[i] * w[i] / DRAWS;
    }
    return m;
}

/* Mean 0, variance v and kurtosis k of 200,000 draws, each within five standard errors: sqrt(v / n) of the mean, sqrt((k - 1) v^2 / n) of
 * the variance. */
static void expect_moments(moments m, double v, double k)
{
    ck_assert_double_eq_tol(m.mean, 0, 5 * sqrt(v / DRAWS));
    ck_assert_double_eq_tol(m.variance, v, 5 * v * sqrt((k - 1) / DRAWS));
}

START_TEST(test_initial_values_by_fan_have_their_moments)
{
    moments m = draw(nn_init_xavier_uniform(300, 100)); /* within sqrt(6 / 400) = 0.12247 */
    expect_moments(m, 0.005, 1.8);
    ck_assert(m.least > -0.122475 && m.least < -0.12245 && m.most < 0.122475 && m.most > 0.12245);
    expect_moments(draw(nn_init_xavier_normal(300, 100)), 0.005, 3);
    m = draw(nn_init_kaiming_uniform(150, sqrt(2))); /* within sqrt(2) sqrt(3 / 150) = 0.2 */
    expect_moments(m, 2.0 / 150, 1.8);
    ck_assert(m.least >= -0.2 && m.least < -0.1999 && m.most < 0.2 && m.most > 0.1999);
    m = draw(nn_init_kaiming_normal(50, 3)); /* deviation 0.424 */
    expect_moments(m, 0.18, 3);
    ck_assert(m.most > 4 * 0.424); /* the tails are there: one in 16,000 is beyond four deviations on a side */
}
END_TEST

/* A normal cut at two deviations has variance 1 - 4 phi(2) / (2 Phi(2) - 1) = 0.7737413 and fourth moment 1.4161891 (kurtosis 2.3655). */
START_TEST(test_a_truncated_normal_ends_at_two_deviations)
{
    moments m = draw(td_init_truncated_normal(0.5));
    ck_assert(m.least > -1 && m.least < -0.999 && m.most < 1 && m.most > 0.999);
    expect_moments(m, 0.7737413 * 0.25, 2.3655);
    ck_assert_double_eq_tol(sqrt(m.variance), 0.8796 * 0.5, 0.002);
    /* The fourth moment within five standard errors: the eighth is 9.7451, so these are sqrt((9.7451 - 1.4162^2) / n). */
    ck_assert_double_eq_tol(m.fourth, 1.4161891 / 16, 5 * sqrt(7.7395 / DRAWS) / 16);
}
END_TEST

START_TEST(test_a_truncated_normal_is_the_normal_with_its_tails_drawn_again)
{
    enum { N = 20000 };
    static double whole[N], cut[N];
    int beyond = 0;
    for (int truncated = 0; truncated < 2; truncated++) {
        td_context *td = open_cpu(TD_F64);
        td_state w = td_parameter(td_root(td), "w", TD_SHAPE(N), truncated ? td_init_truncated_normal(1) : td_init_normal(1));
        ck_assert(td_state_read(w, 0, N, truncated ? cut : whole));
        td_close(td);
    }
    for (int i = 0; i < N; i++) {
        if (fabs(whole[i]) < 2)
            ck_assert(cut[i] == whole[i]);
        else
            beyond++;
    }
    /* 2 (1 - Phi(2)) = 0.0455, within five standard deviations of a binomial. */
    ck_assert_double_eq_tol(beyond, 0.0455 * N, 5 * sqrt(N * 0.0455 * 0.9545));
}
END_TEST

enum { SHARED = 2000 };

/* Each of three ranks makes a third of them. */
static int draw_share(par_world *world, int rank, void *user)
{
    const double *whole = user;
    double share[SHARED];
    int64_t begin, end;
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .seed = 1, .threads = 1 });
    par_attach(td, world, rank, &(par_options){ .strategy = "fsdp" });
    td_state w = td_parameter(td_root(td), "w", TD_SHAPE(SHARED), td_init_truncated_normal(1));
    bool same = td_state_owned(w, &begin, &end) && begin < end && end - begin < SHARED && td_state_read(w, begin, end - begin, share) &&
                memcmp(share, whole + begin, (size_t)(end - begin) * sizeof *share) == 0;
    td_close(td);
    return same ? 0 : 1;
}

START_TEST(test_a_truncated_normal_is_the_same_on_any_number_of_ranks)
{
    static double whole[SHARED];
    td_context *td = open_cpu(TD_F64);
    ck_assert(td_state_read(td_parameter(td_root(td), "w", TD_SHAPE(SHARED), td_init_truncated_normal(1)), 0, SHARED, whole));
    td_close(td);
    ck_assert_int_eq(par_run_threads(3, NULL, draw_share, whole), 0);
}
END_TEST

static double weight_deviation(nn_linear_options options, double *bias)
{
    enum { IN = 80, OUT = 120 };
    static double w[IN * OUT], b[OUT];
    td_context *td = open_cpu(TD_F64);
    nn_linear l = nn_linear_make_with(td_root(td), "l", IN, OUT, &options);
    ck_assert(td_state_read(l.weight, 0, IN * OUT, w) && td_state_read(l.bias, 0, OUT, b));
    td_close(td);
    double squares = 0;
    *bias = 0;
    for (int i = 0; i < IN * OUT; i++) squares += w[i] * w[i];
    for (int i = 0; i < OUT; i++) *bias = fmax(*bias, fabs(b[i]));
    return sqrt(squares / (IN * OUT));
}

START_TEST(test_a_linear_layer_starts_as_asked)
{
    static const struct { nn_linear_options options; double deviation; } asked[] = {
        { { .init = NN_INIT_XAVIER_UNIFORM }, 0.1 },            { { .init = NN_INIT_XAVIER_NORMAL }, 0.1 },
        { { .init = NN_INIT_KAIMING_UNIFORM }, 0.15811388 },    { { .init = NN_INIT_KAIMING_NORMAL }, 0.15811388 },
        { { .init = NN_INIT_TRUNCATED_NORMAL, .deviation = 0.02 }, 0.0175926 }, { { .init = NN_INIT_ZERO }, 0 },
        { { .deviation = 0.02 }, 0.02 },
    };
    double bias;
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        /* Of 9,600 draws of kurtosis 3 at most: five standard errors of the deviation are 5 / sqrt(2 n) of it. */
        ck_assert_double_eq_tol(weight_deviation(asked[i].options, &bias), asked[i].deviation, 0.0361 * asked[i].deviation + 1e-15);
        ck_assert(bias == 0);
    }
    ck_assert_double_eq_tol(weight_deviation((nn_linear_options){ 0 }, &bias), 1 / sqrt(3 * 80.0), 0.0361 / sqrt(3 * 80.0));
    ck_assert(bias > 0.1 && bias < 1 / sqrt(80.0));
}
END_TEST

START_TEST(test_initial_values_that_cannot_be_are_refused)
{
    td_context *td = open_cpu(TD_F32);
    td_module root = td_root(td);
    nn_linear_make_with(root, "a", 2, 2, &(nn_linear_options){ .init = NN_INIT_TRUNCATED_NORMAL });
    ck_assert_str_has(td_error_text(td), "nn_linear: 'a': deviation is 0, a truncated normal needs one above 0 (");
    td_clear_error(td);
    nn_linear_make_with(root, "b", 2, 2, &(nn_linear_options){ .init = NN_INIT_ZERO, .deviation = 0.5 });
    ck_assert_str_has(td_error_text(td), "nn_linear: 'b': deviation is 0.5, which the init asked for has not (");
    td_clear_error(td);
    td_parameter(root, "c", TD_SHAPE(2), nn_init_kaiming_normal(0, 1));
    ck_assert_str_eq(td_error_text(td), "state 'c': initial values cannot be drawn with a = 0 and b = nan");
    td_clear_error(td);
    td_parameter(root, "d", TD_SHAPE(2), nn_init_xavier_uniform(4, -4));
    ck_assert_str_has(td_error_text(td), "state 'd': initial values cannot be drawn with a = ");
    td_clear_error(td);
    td_parameter(root, "e", TD_SHAPE(2), td_init_constant(INFINITY)); /* a least value yet to be found */
    ck_assert_no_error(td);
    td_close(td);
}
END_TEST

TESTS("nn", test_linear_is_x_times_weight_transposed_plus_bias, test_linear_without_bias_has_a_weight_only,
      test_linear_keeps_leading_dimensions, test_linear_starts_uniform_within_one_over_root_in,
      test_initial_values_depend_on_seed_and_name_alone, test_the_regression_mlp_by_names_and_count,
      test_an_error_names_layer_and_line, test_sizes_and_probabilities_that_cannot_be_are_refused,
      test_dropout_zeroes_a_share_and_scales_the_rest, test_dropout_gives_x_itself_in_evaluation,
      test_layers_draw_different_masks, test_parameters_freeze_by_the_pattern_of_their_names,
      test_a_pattern_that_fits_nothing_is_refused, test_freezing_comes_before_the_first_step,
      test_what_freezes_has_no_optimizer_and_is_a_parameter,
      test_initial_values_by_fan_have_their_moments, test_a_truncated_normal_ends_at_two_deviations,
      test_a_truncated_normal_is_the_normal_with_its_tails_drawn_again, test_a_truncated_normal_is_the_same_on_any_number_of_ranks,
      test_a_linear_layer_starts_as_asked,
      test_initial_values_that_cannot_be_are_refused)
