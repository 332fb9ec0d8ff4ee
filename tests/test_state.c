/* State and its units: assigns, gradients through them, accumulators, several updates in a step.
 *
 * Labels: valgrind
 */
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/rewrite.h>

/* a, b and c share a unit. */
typedef struct three {
    td_context *td;
    td_state a, b, c;
} three;

static three open_three(double a, double b, double c)
{
    td_context *td = open_cpu(TD_F64);
    td_module root = td_root(td);
    return (three){ td, td_parameter(root, "a", TD_SHAPE(3), td_init_constant(a)), td_parameter(root, "b", TD_SHAPE(3), td_init_constant(b)),
                    td_parameter(root, "c", TD_SHAPE(3), td_init_constant(c)) };
}

static double element(td_state s)
{
    double value;
    ck_assert_msg(td_state_read(s, 1, 1, &value), "%s", td_error_text(s.td));
    return value;
}

static void expect(const three *t, double a, double b, double c)
{
    ck_assert_no_error(t->td);
    ck_assert_double_eq_tol(element(t->a), a, 1e-14);
    ck_assert_double_eq_tol(element(t->b), b, 1e-14);
    ck_assert_double_eq_tol(element(t->c), c, 1e-14);
}

static td_tensor total(td_tensor x) { return td_sum(x, TD_ALL, TD_DROP); }

START_TEST(test_assigning_one_parameter_leaves_the_gradients_of_others)
{
    three t = open_three(1, 3, 0);
    opt_optimizer *opt = opt_sgd(td_root(t.td), NULL);
    td_tensor y = total(td_mul(td_use(t.a), td_use(t.b)));
    td_assign(t.c, td_scale(td_use(t.c), 2));
    td_backward(td_add(y, total(td_use(t.c))));
    opt_step(opt, 1);
    ck_assert(td_step(t.td));
    expect(&t, 1 - 3, 3 - 1, 0 - 1);
    opt_close(opt);
    td_close(t.td);
}
END_TEST

START_TEST(test_an_assigned_value_is_the_states_own)
{
    three t = open_three(2, 5, 1);
    opt_optimizer *opt = opt_sgd(td_root(t.td), NULL);
    td_assign(t.a, td_use(t.b)); /* a is 5 now, and its gradient is a's, not b's */
    td_backward(total(td_mul(td_use(t.a), td_scale(td_use(t.b), 1))));
    opt_step(opt, 1);
    ck_assert(td_step(t.td));
    expect(&t, 0, 0, 1);
    opt_close(opt);
    td_close(t.td);
}
END_TEST

START_TEST(test_a_gradient_flows_through_an_assigned_value)
{
    three t = open_three(2, 0, 0);
    td_tensor a = td_use(t.a);
    td_assign(t.b, td_mul(a, td_square(a))); /* b = a^3 */
    td_tensor g = td_gradient(total(td_use(t.b)), a);
    td_keep(g);
    ck_assert(td_step(t.td));
    double got[3];
    ck_assert(td_read(g, got));
    ck_assert_double_eq(got[1], 12);
    td_close(t.td);
}
END_TEST

START_TEST(test_an_update_and_an_assign_in_one_step)
{
    three t = open_three(1, 2, 3);
    opt_optimizer *opt = opt_sgd(td_root(t.td), NULL);
    td_tensor old = td_use(t.a), next = td_scale(td_add(td_use(t.b), td_use(t.c)), 4);
    td_keep(old);
    td_backward(total(td_square(td_use(t.a))));
    opt_step(opt, 0.25);
    td_assign(t.b, next);
    ck_assert(td_step(t.td));
    expect(&t, 0.5, 20, 3);
    double kept[3];
    ck_assert(td_read(old, kept));
    ck_assert_double_eq(kept[2], 1);
    opt_close(opt);
    td_close(t.td);
}
END_TEST

static void backward_of(td_state s) { td_backward(total(td_use(s))); }

START_TEST(test_accumulated_gradients_are_consumed_once)
{
    three t = open_three(1, 1, 1);
    opt_optimizer *opt = opt_sgd(td_root(t.td), NULL);
    backward_of(t.a);
    ck_assert(td_step(t.td)); /* left over: 1 */
    opt_step(opt, 1);         /* takes it */
    backward_of(t.a);
    opt_step(opt, 1);         /* the new one alone */
    ck_assert(td_step(t.td));
    expect(&t, -1, 1, 1);
    backward_of(t.b);
    ck_assert(td_step(t.td));
    opt_step(opt, 1);
    backward_of(t.c);         /* after the update: left over again */
    ck_assert(td_step(t.td));
    expect(&t, -1, 0, 1);
    opt_step(opt, 1);
    ck_assert(td_step(t.td));
    expect(&t, -1, 0, 0);
    opt_close(opt);
    td_close(t.td);
}
END_TEST

START_TEST(test_gradients_taken_and_not_read_are_gone)
{
    three t = open_three(1, 1, 1);
    opt_optimizer *opt = opt_sgd(td_root(t.td), NULL);
    backward_of(t.a);
    ck_assert(td_step(t.td));
    td_gradients_at(t.td, (td_state[]){ t.a, t.b, t.c }, 3, TD_HERE);
    ck_assert(td_step(t.td));
    opt_step(opt, 1);
    ck_assert(td_step(t.td));
    expect(&t, 1, 1, 1);
    opt_close(opt);
    td_close(t.td);
}
END_TEST

START_TEST(test_a_moment_read_after_its_update_is_the_new_one)
{
    three t = open_three(1, 1, 1);
    opt_optimizer *opt = opt_sgd(td_root(t.td), &(opt_sgd_options){ .momentum = 0.5 });
    td_state moment = td_moment(t.a, "momentum_buffer");
    td_tensor before = total(td_use(moment));
    td_backward(total(td_scale(td_use(t.a), 7)));
    opt_step(opt, 1);
    td_tensor after = total(td_use(moment));
    td_keep(before);
    td_keep(after);
    ck_assert(td_step(t.td));
    ck_assert_double_eq(td_item(before), 0);
    ck_assert_double_eq(td_item(after), 21);
    opt_close(opt);
    td_close(t.td);
}
END_TEST

/* Two groups of one unit are two updates in a row; all of it happens in the unit. */
START_TEST(test_groups_update_in_place)
{
    int64_t step_bytes[2];
    for (int groups = 0; groups < 2; groups++) {
        td_context *td = open_cpu(TD_F32);
        nn_linear l = nn_linear_make(td_root(td), "l", 512, 512);
        opt_group matrices = { .min_rank = 2, .decay = 0.1 };
        opt_optimizer *opt = opt_adamw(td_root(td), &(opt_adamw_options){ .groups = &matrices, .group_count = groups });
        float *x = check_alloc(512 * sizeof *x);
        td_backward(td_mean(td_square(nn_linear_apply(&l, td_input(td, "x", TD_F32, TD_SHAPE(1, 512), x))), TD_ALL, TD_DROP));
        opt_step(opt, 0.1);
        ck_assert(td_step(td));
        step_bytes[groups] = td_last_report(td).step_bytes;
        opt_close(opt);
        td_close(td);
    }
    ck_assert_int_lt(step_bytes[1], step_bytes[0] + 65536);
}
END_TEST

START_TEST(test_state_declared_later_does_not_plan_again)
{
    three t = open_three(1, 2, 3);
    for (int i = 0; i < 4; i++) {
        char name[24];
        snprintf(name, sizeof name, "later%d", i);
        td_buffer(td_root(t.td), name, TD_F64, TD_SHAPE(2), td_init_constant(0));
        td_keep(total(td_use(t.a)));
        ck_assert(td_step(t.td));
    }
    ck_assert_int_eq(td_last_report(t.td).plans, 1);
    td_close(t.td);
}
END_TEST

START_TEST(test_bf16_differentiates_by_an_intermediate_and_reads_what_it_gives)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    td_context *td = open_cpu(TD_BF16);
    float x[16], got[16];
    for (int i = 0; i < 16; i++) x[i] = (float)(i + 1);
    td_tensor h = td_input(td, "x", TD_F32, TD_SHAPE(1, 16), x), w = td_fill(td, TD_F32, TD_SHAPE(1, 16), 2);
    td_tensor hidden = td_relu(td_matmul_with(h, w, 0, 1));
    td_tensor g = td_gradient(total(td_square(hidden)), hidden), narrow = td_cast(h, TD_BF16);
    td_keep(g);
    td_keep(narrow);
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    ck_assert_double_eq_tol(td_item(g), 2 * 272, 4); /* 2 * 2 * 136, in bf16 */
    memset(got, 0x55, sizeof got);
    ck_assert(td_read(narrow, got));                 /* 16 values of 2 bytes, not of 4 */
    uint32_t beyond;
    memcpy(&beyond, &got[8], sizeof beyond);
    ck_assert_uint_eq(beyond, 0x55555555);
    td_close(td);
}
END_TEST

START_TEST(test_what_cannot_be_is_refused)
{
    three t = open_three(1, 2, 3);
    td_state all[] = { t.a, t.b, t.c };
    td_keep(td_gradients_at(t.td, all, 3, TD_HERE));
    ck_assert_str_has(td_error_text(t.td), "only td_gradient_norm, td_gradient_max and td_update read it");
    td_clear_error(t.td);
    td_parameter(td_root(t.td), "huge", TD_SHAPE(INT64_C(1) << 33, INT64_C(1) << 33), td_init_constant(0));
    ck_assert_str_has(td_error_text(t.td), "state 'huge': f64 (8589934592, 8589934592) cannot be stored");
    td_clear_error(t.td);
    double x[6] = { 0 };
    td_tensor bad = td_input(t.td, "x", TD_F64, TD_SHAPE(-2, 3), x);
    ck_assert_str_has(td_error_text(t.td), "input 'x': shape (-2, 3)");
    td_clear_error(t.td);
    td_exp(bad);
    ck_assert_str_has(td_error_text(t.td), "exp: input 0 failed in a step whose error was cleared");
    td_clear_error(t.td);
    td_fill(t.td, TD_F64, TD_SHAPE(INT64_C(1) << 40, INT64_C(1) << 40), 1);
    ck_assert_str_has(td_error_text(t.td), "cannot be");
    td_clear_error(t.td);
    td_fill(t.td, TD_F64, TD_SHAPE(1, 1, 1, 1, 1, 1, 1), 1);
    ck_assert_str_has(td_error_text(t.td), "fill: has more than 6 dimensions");
    td_clear_error(t.td);
    td_uniform(t.td, TD_SHAPE(2, -1));
    ck_assert_str_has(td_error_text(t.td), "uniform: a value of shape (2, -1) cannot be");
    td_clear_error(t.td);
    ck_assert(!td_state_read(t.a, INT64_MAX, 2, x));
    td_clear_error(t.td);
    td_buffer(td_root(t.td), "half", TD_F16, TD_SHAPE(2), td_init_constant(1));
    ck_assert_str_has(td_error_text(t.td), "states are f32, f64, bf16, i32, i64 or u8");
    td_clear_error(t.td);
    td_assign_if(t.a, td_use(t.b), td_input(t.td, "when", TD_I32, (td_shape){ 0 }, x));
    ck_assert_str_has(td_error_text(t.td), "must be a scalar of the value's dtype");
    td_clear_error(t.td);
    ck_assert(!td_plan(t.td));
    ck_assert_str_eq(td_error_text(t.td), "td_plan: nothing is recorded");
    td_close(t.td);
}
END_TEST

TESTS("state", test_assigning_one_parameter_leaves_the_gradients_of_others, test_an_assigned_value_is_the_states_own,
      test_a_gradient_flows_through_an_assigned_value, test_an_update_and_an_assign_in_one_step, test_accumulated_gradients_are_consumed_once,
      test_gradients_taken_and_not_read_are_gone, test_a_moment_read_after_its_update_is_the_new_one, test_groups_update_in_place,
      test_state_declared_later_does_not_plan_again, test_bf16_differentiates_by_an_intermediate_and_reads_what_it_gives,
      test_what_cannot_be_is_refused)
