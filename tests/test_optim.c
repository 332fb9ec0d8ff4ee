/* Optimizers against their formulas written out in doubles, on a quadratic bowl whose gradient is known; groups,
 * clipping, state names, errors; schedules against literal values. */
#include <tandem/optim.h>

#include "tests/check.h"
#include "tests/memory.h"

/* The loss: sum of curvature (w - centre)^2 over two parameters, hidden.weight (2, 3) and hidden.bias (4), from 1. */
enum { WEIGHTS = 6, BIASES = 4, ALL = WEIGHTS + BIASES };
static const double centre[ALL] = { 3, -2, 0.5, 1.25, 10, -7, 0.1, 1, 2, -30 };
static const double curvature[ALL] = { 1, 0.5, 2, 0.125, 0.01, 3, 1, 5, 0.3, 0.02 };

typedef struct bowl {
    td_context *td;
    td_module root, hidden;
    td_state weight, bias;
} bowl;

static bowl bowl_open(td_dtype dtype)
{
    td_context *td = open_cpu(dtype);
    bowl b = { .td = td, .root = td_root(td), .hidden = td_child(td_root(td), "hidden") };
    b.weight = td_parameter(b.hidden, "weight", TD_SHAPE(2, 3), td_init_constant(1));
    b.bias = td_parameter(b.hidden, "bias", TD_SHAPE(4), td_init_constant(1));
    return b;
}

static td_tensor numbers(td_context *td, const double *values, td_shape shape)
{
    int64_t n = td_shape_elements(shape);
    if (td_float(td) == TD_F64) return td_input(td, "numbers", TD_F64, shape, values);
    float *narrow = check_alloc((size_t)n * sizeof *narrow);
    for (int64_t i = 0; i < n; i++) narrow[i] = (float)values[i];
    return td_input(td, "numbers", TD_F32, shape, narrow);
}

static td_tensor bowl_part(td_state w, int first)
{
    td_shape shape = td_state_shape(w);
    td_tensor off = td_sub(td_use(w), numbers(w.td, centre + first, shape));
    return td_sum(td_mul(numbers(w.td, curvature + first, shape), td_square(off)), TD_ALL, TD_DROP);
}

static td_tensor bowl_loss(const bowl *b)
{
    return td_add(bowl_part(b->weight, 0), bowl_part(b->bias, WEIGHTS));
}

static double slope(int i, double w)
{
    return 2 * curvature[i] * (w - centre[i]);
}

static void bowl_step(const bowl *b, opt_optimizer *opt, double rate)
{
    td_backward(bowl_loss(b));
    opt_step(opt, rate);
    td_step(b->td);
    ck_assert_no_error(b->td);
}

static void bowl_read(const bowl *b, double values[ALL])
{
    ck_assert_no_error(b->td);
    if (td_float(b->td) == TD_F64) {
        ck_assert(td_state_read(b->weight, 0, WEIGHTS, values) && td_state_read(b->bias, 0, BIASES, values + WEIGHTS));
        return;
    }
    float narrow[ALL];
    ck_assert(td_state_read(b->weight, 0, WEIGHTS, narrow) && td_state_read(b->bias, 0, BIASES, narrow + WEIGHTS));
    for (int i = 0; i < ALL; i++) values[i] = narrow[i];
}

static void bowl_expect(const bowl *b, const double expected[ALL], double tolerance)
{
    double values[ALL];
    bowl_read(b, values);
    ck_assert_near(values, expected, ALL, tolerance);
}

static void bowl_close(bowl *b, opt_optimizer *opt)
{
    opt_close(opt);
    td_close(b->td);
}

/* ---- Rules ---------------------------------------------------------------------------------------------- */

/* Rounding alone: 25 steps of a few operations each, contracting towards the centre. */
static const double tolerance_f64 = 1e-14, tolerance_f32 = 5e-6;

static void check_adam(td_dtype dtype, bool decoupled, const opt_adam_options *o, double tolerance)
{
    bowl b = bowl_open(dtype);
    opt_optimizer *opt = decoupled ? opt_adamw(b.root, o) : opt_adam(b.root, o);
    double p[ALL], m[ALL] = { 0 }, v[ALL] = { 0 };
    double beta1 = o->beta1 ? o->beta1 : 0.9, beta2 = o->beta2 ? o->beta2 : 0.999, eps = o->eps ? o->eps : 1e-8;
    for (int i = 0; i < ALL; i++) p[i] = 1;
    for (int n = 1; n <= 25; n++) {
        double rate = 0.1 / n;
        bowl_step(&b, opt, rate);
        for (int i = 0; i < ALL; i++) {
            double g = slope(i, p[i]);
            if (decoupled) p[i] *= 1 - rate * o->decay;
            else g += o->decay * p[i];
            m[i] = beta1 * m[i] + (1 - beta1) * g;
            v[i] = beta2 * v[i] + (1 - beta2) * g * g;
            p[i] -= rate * (m[i] / (1 - pow(beta1, n))) / (sqrt(v[i] / (1 - pow(beta2, n))) + eps);
        }
        bowl_expect(&b, p, tolerance);
    }
    bowl_close(&b, opt);
}

static const opt_adam_options unusual = { .beta1 = 0.5, .beta2 = 0.9, .eps = 0.1, .decay = 0.3 };

START_TEST(test_adam_follows_its_formula)
{
    check_adam(TD_F64, false, &(opt_adam_options){ 0 }, tolerance_f64);
    check_adam(TD_F64, false, &unusual, tolerance_f64);
    check_adam(TD_F32, false, &(opt_adam_options){ .decay = 0.3 }, tolerance_f32);
}
END_TEST

START_TEST(test_adamw_follows_its_formula)
{
    check_adam(TD_F64, true, &(opt_adam_options){ 0 }, tolerance_f64);
    check_adam(TD_F64, true, &unusual, tolerance_f64);
    check_adam(TD_F32, true, &(opt_adam_options){ .decay = 0.3 }, tolerance_f32);
}
END_TEST

static void check_sgd(td_dtype dtype, const opt_sgd_options *o, double tolerance)
{
    bowl b = bowl_open(dtype);
    opt_optimizer *opt = opt_sgd(b.root, o);
    double p[ALL], buffer[ALL] = { 0 };
    for (int i = 0; i < ALL; i++) p[i] = 1;
    for (int n = 1; n <= 25; n++) {
        double rate = 0.05 / n;
        bowl_step(&b, opt, rate);
        for (int i = 0; i < ALL; i++) {
            double d = slope(i, p[i]) + o->decay * p[i];
            buffer[i] = n == 1 ? d : o->momentum * buffer[i] + (1 - o->dampening) * d;
            if (o->momentum == 0) p[i] -= rate * d;
            else if (o->nesterov) p[i] -= rate * (d + o->momentum * buffer[i]);
            else p[i] -= rate * buffer[i];
        }
        bowl_expect(&b, p, tolerance);
    }
    bowl_close(&b, opt);
}

START_TEST(test_sgd_follows_its_formula)
{
    check_sgd(TD_F64, &(opt_sgd_options){ 0 }, tolerance_f64);
    check_sgd(TD_F64, &(opt_sgd_options){ .decay = 0.3 }, tolerance_f64);
    check_sgd(TD_F64, &(opt_sgd_options){ .momentum = 0.9 }, tolerance_f64);
    check_sgd(TD_F64, &(opt_sgd_options){ .momentum = 0.9, .dampening = 0.5, .decay = 0.1 }, tolerance_f64);
    check_sgd(TD_F64, &(opt_sgd_options){ .momentum = 0.9, .nesterov = true, .decay = 0.1 }, tolerance_f64);
    check_sgd(TD_F32, &(opt_sgd_options){ .momentum = 0.9, .decay = 0.1 }, tolerance_f32);
}
END_TEST

START_TEST(test_adagrad_follows_its_formula)
{
    opt_adagrad_options o = { .decay = 0.3, .rate_decay = 0.1, .eps = 0.01 };
    bowl b = bowl_open(TD_F64);
    opt_optimizer *opt = opt_adagrad(b.root, &o);
    double p[ALL], s[ALL] = { 0 };
    for (int i = 0; i < ALL; i++) p[i] = 1;
    for (int n = 1; n <= 25; n++) {
        bowl_step(&b, opt, 0.1);
        for (int i = 0; i < ALL; i++) {
            double d = slope(i, p[i]) + o.decay * p[i];
            s[i] += d * d;
            p[i] -= 0.1 / (1 + (n - 1) * o.rate_decay) * d / (sqrt(s[i]) + o.eps);
        }
        bowl_expect(&b, p, tolerance_f64);
    }
    ck_assert_int_ne(td_state_named(b.td, "hidden.weight.sum").id, TD_NONE);
    bowl_close(&b, opt);
}
END_TEST

START_TEST(test_lion_follows_its_formula)
{
    bowl b = bowl_open(TD_F64);
    opt_optimizer *opt = opt_lion(b.root, &(opt_lion_options){ .decay = 0.3 });
    double p[ALL], m[ALL] = { 0 };
    for (int i = 0; i < ALL; i++) p[i] = 1;
    for (int n = 1; n <= 25; n++) {
        bowl_step(&b, opt, 0.01);
        for (int i = 0; i < ALL; i++) {
            double g = slope(i, p[i]), c = 0.9 * m[i] + 0.1 * g;
            p[i] -= 0.01 * ((c > 0) - (c < 0) + 0.3 * p[i]);
            m[i] = 0.99 * m[i] + 0.01 * g;
        }
        bowl_expect(&b, p, tolerance_f64);
    }
    bowl_close(&b, opt);
}
END_TEST

/* ---- Clipping and gathering ----------------------------------------------------------------------------- */

START_TEST(test_clipping_scales_by_the_norm_over_all_parameters)
{
    bowl b = bowl_open(TD_F64);
    opt_optimizer *opt = opt_sgd(b.root, &(opt_sgd_options){ .max_norm = 2 });
    double squares = 0, expected[ALL];
    for (int i = 0; i < ALL; i++) squares += slope(i, 1) * slope(i, 1);
    double norm = sqrt(squares);
    ck_assert_double_gt(norm, 40);
    for (int i = 0; i < ALL; i++) expected[i] = 1 - 0.5 * (2 / (norm + 1e-6)) * slope(i, 1);
    bowl_step(&b, opt, 0.5);
    ck_assert_near(&(double){ td_item(opt_gradient_norm(opt)) }, &norm, 1, 1e-15);
    bowl_expect(&b, expected, 1e-15);
    bowl_close(&b, opt);
}
END_TEST

START_TEST(test_clipping_by_the_inf_norm_scales_by_the_largest_magnitude)
{
    const td_dtype dtypes[] = { TD_F64, TD_F32 };
    for (int d = 0; d < 2; d++) {
        bowl b = bowl_open(dtypes[d]);
        opt_optimizer *opt = opt_sgd(b.root, &(opt_sgd_options){ .max_norm = 2, .clip_inf = true });
        double largest = 0, expected[ALL];
        for (int i = 0; i < ALL; i++) largest = fmax(largest, fabs(slope(i, 1)));
        for (int i = 0; i < ALL; i++) expected[i] = 1 - 0.5 * (2 / (largest + 1e-6)) * slope(i, 1);
        bowl_step(&b, opt, 0.5);
        ck_assert_near(&(double){ td_item(opt_gradient_norm(opt)) }, &largest, 1, d ? 1e-6 : 1e-15);
        bowl_expect(&b, expected, d ? 1e-6 : 1e-15);
        bowl_close(&b, opt);
    }
}
END_TEST

/* Of a gradient that is x; the NaN neither first nor last, so that whatever is compared with it is seen. */
START_TEST(test_the_inf_norm_of_a_nan_is_one)
{
    static const double rows[][4] = { { 1, -5, 2, 0 }, { 1, NAN, 7, 0 }, { -INFINITY, 1, 2, 3 }, { 3, NAN, INFINITY, 1 }, { 0, 0, 0, 0 } };
    static const double largest[] = { 5, NAN, INFINITY, NAN, 0 };
    for (int i = 0; i < 5; i++) {
        td_context *td = open_cpu(TD_F64);
        td_state w = td_parameter(td_root(td), "w", TD_SHAPE(4), td_init_constant(1));
        td_backward(td_sum(td_mul(td_use(w), td_input(td, "x", TD_F64, TD_SHAPE(4), rows[i])), TD_ALL, TD_DROP));
        opt_optimizer *opt = opt_sgd(td_root(td), &(opt_sgd_options){ .clip_inf = true, .track_norm = true });
        opt_step(opt, 0.1);
        ck_assert(td_step(td));
        double got = td_item(opt_gradient_norm(opt));
        ck_assert_msg(isnan(largest[i]) ? isnan(got) : got == largest[i], "row %d: %g, not %g", i, got, largest[i]);
        td_close(td);
    }
}
END_TEST

START_TEST(test_a_gradient_within_the_limit_is_not_touched)
{
    bowl clipped = bowl_open(TD_F64), free_one = bowl_open(TD_F64);
    opt_optimizer *with = opt_sgd(clipped.root, &(opt_sgd_options){ .max_norm = 1e6 });
    opt_optimizer *without = opt_sgd(free_one.root, &(opt_sgd_options){ .track_norm = true });
    double expected[ALL];
    bowl_step(&clipped, with, 0.01);
    bowl_step(&free_one, without, 0.01);
    bowl_read(&free_one, expected);
    bowl_expect(&clipped, expected, 0);
    ck_assert(td_item(opt_gradient_norm(with)) == td_item(opt_gradient_norm(without)));
    bowl_close(&clipped, with);
    bowl_close(&free_one, without);
}
END_TEST

START_TEST(test_gradients_of_several_backwards_add_up)
{
    bowl b = bowl_open(TD_F64);
    opt_optimizer *opt = opt_sgd(b.root, NULL);
    double expected[ALL];
    for (int i = 0; i < ALL; i++) expected[i] = 1 - 0.01 * 3 * slope(i, 1);
    td_backward(bowl_loss(&b));
    td_step(b.td);
    td_backward(bowl_loss(&b));
    td_backward(bowl_loss(&b));
    opt_step(opt, 0.01);
    td_step(b.td);
    bowl_expect(&b, expected, 1e-15);
    bowl_close(&b, opt);
}
END_TEST

/* ---- State ---------------------------------------------------------------------------------------------- */

static void expect_moment(td_context *td, const char *name, td_shape shape)
{
    td_state s = td_state_named(td, name);
    ck_assert_msg(s.id != TD_NONE, "no state is named %s", name);
    ck_assert_int_eq(td_state_kind_of(s), TD_MOMENT);
    ck_assert(td_shape_equal(td_state_shape(s), shape));
    ck_assert(!td_state_trains(s));
}

START_TEST(test_moments_and_counter_have_their_names)
{
    bowl b = bowl_open(TD_F64);
    opt_optimizer *opt = opt_adamw(b.root, NULL);
    for (int n = 0; n < 3; n++) bowl_step(&b, opt, 0.1);
    expect_moment(b.td, "hidden.weight.exp_avg", TD_SHAPE(2, 3));
    expect_moment(b.td, "hidden.weight.exp_avg_sq", TD_SHAPE(2, 3));
    expect_moment(b.td, "hidden.bias.exp_avg", TD_SHAPE(4));
    expect_moment(b.td, "hidden.bias.exp_avg_sq", TD_SHAPE(4));
    ck_assert_int_eq(td_state_count(b.td), 2 + 4 + 1);
    double updates;
    td_state counter = td_state_named(b.td, "optimizer.updates");
    ck_assert_int_eq(td_state_kind_of(counter), TD_BUFFER);
    ck_assert(td_state_read(counter, 0, 1, &updates));
    ck_assert(updates == 3);
    bowl_close(&b, opt);
}
END_TEST

START_TEST(test_only_momentum_has_a_momentum_buffer)
{
    bowl with = bowl_open(TD_F64), without = bowl_open(TD_F64);
    opt_optimizer *momentum = opt_sgd(with.root, &(opt_sgd_options){ .momentum = 0.9 });
    opt_optimizer *plain = opt_sgd(without.root, NULL);
    bowl_step(&with, momentum, 0.1);
    bowl_step(&without, plain, 0.1);
    expect_moment(with.td, "hidden.weight.momentum_buffer", TD_SHAPE(2, 3));
    expect_moment(with.td, "hidden.bias.momentum_buffer", TD_SHAPE(4));
    ck_assert_int_eq(td_state_count(with.td), 2 + 2 + 1);
    ck_assert_int_eq(td_state_count(without.td), 2 + 1);
    bowl_close(&with, momentum);
    bowl_close(&without, plain);
}
END_TEST

START_TEST(test_a_new_rate_needs_no_new_plan)
{
    bowl b = bowl_open(TD_F64);
    opt_optimizer *opt = opt_adamw(b.root, &(opt_adamw_options){ .max_norm = 1 });
    bowl_step(&b, opt, 0.1);
    int64_t plans = td_last_report(b.td).plans;
    for (int n = 1; n < 10; n++) bowl_step(&b, opt, 0.1 / n);
    ck_assert_int_eq(td_last_report(b.td).plans, plans);
    bowl_close(&b, opt);
}
END_TEST

/* ---- Which parameters, and how each -------------------------------------------------------------------- */

/* "hidden2" is not under "hidden". */
START_TEST(test_only_the_module_given_is_trained)
{
    bowl b = bowl_open(TD_F64);
    td_state other = td_parameter(td_child(b.root, "hidden2"), "weight", TD_SHAPE(2, 3), td_init_constant(1));
    td_freeze(other);
    opt_optimizer *opt = opt_sgd(b.hidden, NULL);
    double expected[ALL], others[WEIGHTS];
    for (int i = 0; i < ALL; i++) expected[i] = 1 - 0.1 * slope(i, 1);
    td_backward(td_add(bowl_loss(&b), bowl_part(other, 0)));
    opt_step(opt, 0.1);
    td_step(b.td);
    bowl_expect(&b, expected, 1e-15);
    ck_assert(td_state_read(other, 0, WEIGHTS, others));
    for (int i = 0; i < WEIGHTS; i++) ck_assert(others[i] == 1);
    bowl_close(&b, opt);
}
END_TEST

/* A unit of parameters is updated as one, so none of it may be left out unsaid. */
START_TEST(test_two_optimizers_update_their_own_parameters)
{
    bowl b = bowl_open(TD_F64);
    td_module beside = td_child(b.root, "hidden2");
    td_state other = td_parameter(beside, "weight", TD_SHAPE(2, 3), td_init_constant(1));
    opt_optimizer *opt = opt_sgd(b.hidden, NULL), *second = opt_sgd(beside, &(opt_sgd_options){ .name = "second" });
    td_backward(td_sum(td_square(td_use(b.weight)), TD_ALL, TD_DROP));
    td_backward(td_sum(td_square(td_use(other)), TD_ALL, TD_DROP));
    opt_step(opt, 0.1);
    opt_step(second, 0.2);
    ck_assert_msg(td_step(b.td), "%s", td_error_text(b.td));
    double first[1], last[1];
    ck_assert(td_state_read(b.weight, 0, 1, first) && td_state_read(other, 5, 1, last));
    ck_assert_double_eq_tol(first[0], 0.8, 1e-15);
    ck_assert_double_eq_tol(last[0], 0.6, 1e-15);
    opt_close(second);
    bowl_close(&b, opt);
}
END_TEST

START_TEST(test_what_no_optimizer_has_keeps_its_value)
{
    bowl b = bowl_open(TD_F64);
    td_state other = td_parameter(td_child(b.root, "hidden2"), "weight", TD_SHAPE(2, 3), td_init_constant(1));
    opt_optimizer *opt = opt_sgd(b.hidden, NULL);
    td_backward(td_add(bowl_loss(&b), bowl_part(other, 0)));
    opt_step(opt, 0.1);
    ck_assert_msg(td_step(b.td), "%s", td_error_text(b.td));
    double kept[1];
    ck_assert(td_state_read(other, 5, 1, kept));
    ck_assert_double_eq(kept[0], 1);
    bowl_close(&b, opt);
}
END_TEST

START_TEST(test_frozen_parameters_stay)
{
    bowl b = bowl_open(TD_F64);
    td_freeze(b.bias);
    opt_optimizer *opt = opt_sgd(b.root, NULL);
    double expected[ALL];
    for (int i = 0; i < ALL; i++) expected[i] = i < WEIGHTS ? 1 - 0.1 * slope(i, 1) : 1;
    bowl_step(&b, opt, 0.1);
    bowl_expect(&b, expected, 1e-15);
    bowl_close(&b, opt);
}
END_TEST

START_TEST(test_groups_have_their_own_decay_and_rate)
{
    bowl b = bowl_open(TD_F64);
    const opt_group groups[] = { { .min_rank = 2, .decay = 0.5 }, { .pattern = "*.bias", .rate_scale = 10 } };
    opt_optimizer *opt = opt_sgd(b.root, &(opt_sgd_options){ .decay = 7, .groups = groups, .group_count = 2 });
    double expected[ALL];
    for (int i = 0; i < ALL; i++) expected[i] = i < WEIGHTS ? 1 - 0.01 * (slope(i, 1) + 0.5) : 1 - 0.1 * slope(i, 1);
    bowl_step(&b, opt, 0.01);
    bowl_expect(&b, expected, 1e-15);
    bowl_close(&b, opt);
}
END_TEST

/* What no group fits has the optimizer's own decay and rate. */
START_TEST(test_the_rest_is_a_group_of_its_own)
{
    bowl b = bowl_open(TD_F64);
    const opt_group matrices = { .min_rank = 2, .rate_scale = 3 };
    opt_optimizer *opt = opt_sgd(b.root, &(opt_sgd_options){ .decay = 0.5, .groups = &matrices, .group_count = 1 });
    double expected[ALL];
    for (int i = 0; i < ALL; i++) expected[i] = i < WEIGHTS ? 1 - 0.03 * slope(i, 1) : 1 - 0.01 * (slope(i, 1) + 0.5);
    bowl_step(&b, opt, 0.01);
    bowl_expect(&b, expected, 1e-15);
    bowl_close(&b, opt);
}
END_TEST

/* ---- Errors --------------------------------------------------------------------------------------------- */

static void expect_refused(bowl *b, opt_optimizer *opt, const char *error)
{
    ck_assert_ptr_null(opt);
    ck_assert_str_eq(td_error_text(b->td), error);
    ck_assert_int_eq(td_error(b->td), TD_ERROR_USAGE);
    td_clear_error(b->td);
}

START_TEST(test_options_out_of_range_are_refused)
{
    bowl b = bowl_open(TD_F64);
    const opt_group nothing = { .pattern = "*.gain" }, negative = { .decay = -1 };
    expect_refused(&b, opt_sgd(b.root, &(opt_sgd_options){ .momentum = 1 }),
                   "opt_sgd: momentum is 1, must be from 0 to less than 1");
    expect_refused(&b, opt_sgd(b.root, &(opt_sgd_options){ .nesterov = true }),
                   "opt_sgd: nesterov needs a momentum and no dampening");
    expect_refused(&b, opt_sgd(b.root, &(opt_sgd_options){ .max_norm = NAN }),
                   "opt_sgd: max_norm is nan, must be a finite number from 0");
    expect_refused(&b, opt_adam(b.root, &(opt_adam_options){ .beta2 = 1.5 }),
                   "opt_adam: beta2 is 1.5, must be from 0 to less than 1");
    expect_refused(&b, opt_adamw(b.root, &(opt_adamw_options){ .decay = INFINITY }),
                   "opt_adamw: decay is inf, must be a finite number from 0");
    expect_refused(&b, opt_adamw(b.root, &(opt_adamw_options){ .eps = -1e-8 }),
                   "opt_adamw: eps is -1e-08, must be a finite number from 0");
    expect_refused(&b, opt_sgd(b.root, &(opt_sgd_options){ .groups = &nothing, .group_count = 1 }),
                   "opt_sgd: group 0 (pattern '*.gain', min_rank 0) fits no parameter");
    expect_refused(&b, opt_sgd(b.root, &(opt_sgd_options){ .groups = &negative, .group_count = 1 }),
                   "opt_sgd: a group's decay is -1, must be a finite number from 0");
    expect_refused(&b, opt_sgd(td_child(b.root, "hid"), NULL), "opt_sgd: no parameter under 'hid' trains");
    bowl_close(&b, NULL);
}
END_TEST

START_TEST(test_a_second_optimizer_needs_a_name)
{
    bowl b = bowl_open(TD_F64);
    opt_optimizer *opt = opt_sgd(b.root, NULL);
    expect_refused(&b, opt_sgd(b.root, NULL),
                   "state 'optimizer.updates' exists already; every state of a module needs its own name");
    bowl_close(&b, opt);
}
END_TEST

START_TEST(test_a_rate_that_cannot_be_is_refused)
{
    bowl b = bowl_open(TD_F64);
    opt_optimizer *opt = opt_sgd(b.root, NULL);
    char expected[512];
    td_backward(bowl_loss(&b));
    opt_step(opt, NAN);
    snprintf(expected, sizeof expected, "(%s:%d)", __FILE__, __LINE__ - 1);
    ck_assert_str_has(td_error_text(b.td), "opt_step: the rate is nan, must be a finite number from 0 ");
    ck_assert_str_has(td_error_text(b.td), expected);
    td_clear_error(b.td);
    opt_step(opt, -0.1);
    ck_assert_str_has(td_error_text(b.td), "opt_step: the rate is -0.1, must be a finite number from 0 ");
    bowl_close(&b, opt);
}
END_TEST

START_TEST(test_a_norm_nobody_asked_for_is_an_error)
{
    bowl b = bowl_open(TD_F64);
    opt_optimizer *plain = opt_sgd(b.root, NULL);
    bowl_step(&b, plain, 0.1);
    ck_assert(td_failed(opt_gradient_norm(plain)));
    ck_assert_str_eq(td_error_text(b.td), "opt_gradient_norm: the optimizer has neither max_norm, track_norm nor scaler");
    td_clear_error(b.td);
    opt_optimizer *tracking = opt_sgd(b.root, &(opt_sgd_options){ .track_norm = true, .name = "tracking" });
    ck_assert(td_failed(opt_gradient_norm(tracking)));
    ck_assert_str_eq(td_error_text(b.td), "opt_gradient_norm: no opt_step was recorded yet");
    opt_close(tracking);
    bowl_close(&b, plain);
}
END_TEST

START_TEST(test_making_without_memory_is_an_error_and_can_be_tried_again)
{
    memory_test memory = { .refused = -1 };
    td_context *td = open_with(&memory);
    td_parameter(td_root(td), "weight", TD_SHAPE(2), td_init_constant(1));
    opt_optimizer *opt = NULL;
    int failures = 0;
    for (; !opt; failures++) {
        ck_assert_int_eq(td_error(td), failures ? TD_ERROR_MEMORY : TD_OK);
        td_clear_error(td);
        memory_refuse(&memory, failures);
        opt = opt_adamw(td_root(td), NULL);
    }
    ck_assert_no_error(td);
    ck_assert_int_gt(failures, 3);
    opt_close(opt);
    td_close(td);
    ck_assert_int_eq(memory.held, 0);
}
END_TEST

/* ---- Schedules ------------------------------------------------------------------------------------------ */

static void expect_rates(const opt_schedule *s, int count, const int64_t *steps, const double *expected)
{
    for (int i = 0; i < count; i++) {
        double rate = opt_rate(s, steps[i]);
        ck_assert_near(&rate, &expected[i], 1, 1e-16);
    }
}

START_TEST(test_rates_are_those_of_their_formulas)
{
    const int64_t steps[] = { 0, 1, 3, 4, 9, 14, 24, 25 };
    expect_rates(&(opt_schedule){ OPT_CONSTANT, .rate = 2 }, 8, steps, (double[]){ 2, 2, 2, 2, 2, 2, 2, 2 });
    expect_rates(&(opt_schedule){ OPT_CONSTANT, .rate = 2, .warmup = 4 }, 8, steps,
                 (double[]){ 0.4, 0.8, 1.6, 2, 2, 2, 2, 2 });
    expect_rates(&(opt_schedule){ OPT_LINEAR, .rate = 2, .final_rate = 1, .warmup = 4, .steps = 24 }, 8, steps,
                 (double[]){ 0.4, 0.8, 1.6, 2, 1.75, 1.5, 1, 1 });
    expect_rates(&(opt_schedule){ OPT_COSINE, .rate = 2, .final_rate = 1, .warmup = 4, .steps = 24 }, 8, steps,
                 (double[]){ 0.4, 0.8, 1.6, 2, 1.8535533905932737, 1.5, 1, 1 });
    expect_rates(&(opt_schedule){ OPT_POLYNOMIAL, .rate = 2, .warmup = 4, .steps = 24, .power = 2 }, 8, steps,
                 (double[]){ 0.4, 0.8, 1.6, 2, 1.125, 0.5, 0, 0 });
    expect_rates(&(opt_schedule){ OPT_STEP, .rate = 2, .every = 4, .factor = 0.5 }, 8, steps,
                 (double[]){ 2, 2, 2, 1, 0.5, 0.25, 0.03125, 0.03125 });
}
END_TEST

/* nanoGPT's: 1e-3 (i + 1) / 101 for 100 updates, then a cosine to 1e-4 at 5,000. */
START_TEST(test_a_known_recipe)
{
    const opt_schedule s = { OPT_COSINE, .rate = 1e-3, .final_rate = 1e-4, .warmup = 100, .steps = 5000 };
    const int64_t steps[] = { 0, 99, 100, 2550, 4999, 5000, 6000 };
    const double expected[] = { 1e-3 / 101, 1e-3 * 100 / 101, 1e-3, 5.5e-4, 1.0000009249e-4, 1e-4, 1e-4 };
    for (int i = 0; i < 7; i++) ck_assert_double_eq_tol(opt_rate(&s, steps[i]), expected[i], 1e-13);
}
END_TEST

START_TEST(test_a_schedule_without_length_ends_at_once)
{
    expect_rates(&(opt_schedule){ OPT_COSINE, .rate = 2, .final_rate = 1, .warmup = 4, .steps = 4 }, 2,
                 (int64_t[]){ 3, 4 }, (double[]){ 1.6, 1 });
    expect_rates(&(opt_schedule){ OPT_LINEAR, .rate = 2, .final_rate = 1 }, 1, (int64_t[]){ 0 }, (double[]){ 1 });
    expect_rates(&(opt_schedule){ OPT_STEP, .rate = 2 }, 1, (int64_t[]){ 9 }, (double[]){ 2 });
}
END_TEST

TESTS("optim", test_adam_follows_its_formula, test_adamw_follows_its_formula, test_sgd_follows_its_formula, test_adagrad_follows_its_formula, test_lion_follows_its_formula,
      test_clipping_scales_by_the_norm_over_all_parameters, test_clipping_by_the_inf_norm_scales_by_the_largest_magnitude,
      test_the_inf_norm_of_a_nan_is_one, test_a_gradient_within_the_limit_is_not_touched,
      test_gradients_of_several_backwards_add_up, test_moments_and_counter_have_their_names,
      test_only_momentum_has_a_momentum_buffer, test_a_new_rate_needs_no_new_plan,
      test_only_the_module_given_is_trained, test_two_optimizers_update_their_own_parameters, test_what_no_optimizer_has_keeps_its_value, test_frozen_parameters_stay,
      test_groups_have_their_own_decay_and_rate, test_the_rest_is_a_group_of_its_own,
      test_options_out_of_range_are_refused, test_a_second_optimizer_needs_a_name,
      test_a_rate_that_cannot_be_is_refused, test_a_norm_nobody_asked_for_is_an_error,
      test_making_without_memory_is_an_error_and_can_be_tried_again,
      test_rates_are_those_of_their_formulas, test_a_known_recipe, test_a_schedule_without_length_ends_at_once)
