/* The step: when values are computed, how long they live, and what assigns do.
 *
 * Labels: valgrind
 */
#include "tests/check.h"

#include <tandem/rewrite.h>

static td_state weight(td_context *td, const char *name, int64_t n, double value)
{
    return td_parameter(td_root(td), name, TD_SHAPE(n), td_init_constant(value));
}

static double element(td_state s, int64_t index)
{
    double value;
    ck_assert_msg(td_state_read(s, index, 1, &value), "%s", td_error_text(s.td));
    return value;
}

START_TEST(test_a_kept_value_is_read_after_the_step)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor y = td_sum(td_square(td_fill(td, TD_F64, TD_SHAPE(3), 2)), TD_ALL, TD_DROP);
    td_keep(y);
    ck_assert(td_step(td));
    ck_assert_double_eq(td_item(y), 12);
    ck_assert_int_eq(td_dtype_at(y), TD_F64);
    ck_assert_int_eq(td_shape_at(y).rank, 0);
    td_close(td);
}
END_TEST

START_TEST(test_a_pending_value_is_computed_and_nothing_is_assigned)
{
    td_context *td = open_cpu(TD_F64);
    td_state w = weight(td, "w", 1, 5);
    td_assign(w, td_scale(td_use(w), 2));
    td_tensor next = td_use(w);
    ck_assert_double_eq(td_item(next), 10);
    ck_assert_double_eq(element(w, 0), 5);
    ck_assert(td_step(td));
    ck_assert_double_eq(element(w, 0), 10);
    td_close(td);
}
END_TEST

START_TEST(test_an_unkept_value_is_refused_by_name)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor a = td_fill(td, TD_F64, TD_SHAPE(2), 1), y = td_sum(a, TD_ALL, TD_DROP);
    td_keep(y);
    ck_assert(td_step(td));
    td_item(a);
    ck_assert_str_eq(td_error_text(td), "td_item: value 0 of the last step was not kept; call td_keep on it before td_step");
    td_close(td);
}
END_TEST

START_TEST(test_a_kept_scalar_is_read_a_step_late)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor kept[4];
    for (int s = 0; s < 4; s++) {
        td_tensor x = td_scalar(td, s + 0.5);
        kept[s] = td_mul(x, x);
        td_keep(kept[s]);
        ck_assert(td_step(td));
        ck_assert_double_eq(td_item(kept[s]), (s + 0.5) * (s + 0.5));
        if (s) ck_assert_double_eq(td_item(kept[s - 1]), (s - 0.5) * (s - 0.5));
    }
    ck_assert(isnan(td_item(kept[1])));
    ck_assert_str_has(td_error_text(td), "of an earlier step, whose results are gone");
    td_close(td);
}
END_TEST

START_TEST(test_a_stale_handle_is_refused_by_name)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor a = td_fill(td, TD_F64, TD_SHAPE(2), 1);
    td_keep(a);
    ck_assert(td_step(td));
    ck_assert(td_failed(td_add(a, a)));
    ck_assert_str_has(td_error_text(td), "add: input 0 was recorded in an earlier step; values live until td_step");
    ck_assert_str_has(td_error_text(td), "tests/test_step.c:");
    td_close(td);
}
END_TEST

START_TEST(test_an_error_names_operation_shapes_module_and_line_once)
{
    td_context *td = open_cpu(TD_F64);
    td_module at = td_child(td_child(td_root(td), "h"), "attn");
    td_enter(at);
    td_tensor a = randn(td, 3, 4), b = randn(td, 5);
    td_tensor c = td_add(a, b); const int line = __LINE__;
    char expected[200];
    snprintf(expected, sizeof expected, "add: shapes (3, 4) and (5) cannot be broadcast (h.attn) (tests/test_step.c:%d)", line);
    ck_assert_str_eq(td_error_text(td), expected);
    ck_assert(td_failed(td_exp(c)));
    ck_assert_str_eq(td_error_text(td), expected); /* the first error stays */
    ck_assert(!td_step(td));
    td_close(td);
}
END_TEST

static bool bare_shape(td_call *call)
{
    call->out[0] = *call->in[0];
    return true;
}

START_TEST(test_an_operation_without_a_kernel_is_told_where_it_goes)
{
    static const td_op bare = { .name = "bare", .inputs = 1, .shape = bare_shape };
    td_context *td = open_cpu(TD_F64);
    td_tensor x = randn(td, 3);
    td_keep(td_record(&bare, TD_HERE, 1, &x, NULL));
    ck_assert(!td_step(td));
    ck_assert_str_has(td_error_text(td), "bare: cannot be run on the CPU: its td_op names no kernel for it, as .cpu (tests/test_step.c:");
    td_close(td);
}
END_TEST

/* 3 elements are packed into a unit of 16, 16 fill one: the value assigned is then the other state itself. */
START_TEST(test_two_states_swap)
{
    for (int64_t n = 3; n <= 16; n += 13) {
        td_context *td = open_cpu(TD_F64);
        td_state a = td_buffer(td_root(td), "a", TD_F64, TD_SHAPE(n), td_init_constant(1));
        td_state b = td_buffer(td_root(td), "b", TD_F64, TD_SHAPE(n), td_init_constant(2));
        for (int i = 0; i < 3; i++) {
            td_tensor x = td_use(a), y = td_use(b);
            td_assign(a, y);
            td_assign(b, x);
            ck_assert(td_step(td));
            ck_assert_double_eq(element(a, 2), i % 2 ? 1 : 2);
            ck_assert_double_eq(element(b, 2), i % 2 ? 2 : 1);
        }
        td_close(td);
    }
}
END_TEST

START_TEST(test_three_states_rotate_with_a_computed_one)
{
    td_context *td = open_cpu(TD_F64);
    td_state s[3];
    for (int i = 0; i < 3; i++) s[i] = td_buffer(td_root(td), (const char *[]){ "a", "b", "c" }[i], TD_F64, TD_SHAPE(16), td_init_constant(i + 1));
    td_tensor a = td_use(s[0]), b = td_use(s[1]), c = td_use(s[2]);
    td_assign(s[0], td_add(b, c)); /* made in a's place only after a has gone to c */
    td_assign(s[1], td_mul(a, c));
    td_assign(s[2], a);
    ck_assert(td_step(td));
    ck_assert_double_eq(element(s[0], 15), 5);
    ck_assert_double_eq(element(s[1], 15), 3);
    ck_assert_double_eq(element(s[2], 15), 1);
    td_close(td);
}
END_TEST

START_TEST(test_an_old_value_can_be_kept)
{
    td_context *td = open_cpu(TD_F64);
    td_state w = weight(td, "w", 3, 1);
    for (int i = 0; i < 3; i++) {
        td_tensor old = td_use(w);
        td_keep(old);
        td_assign(w, td_scale(old, 3));
        ck_assert(td_step(td));
        double kept[3];
        ck_assert(td_read(old, kept));
        ck_assert_double_eq(kept[1], pow(3, i));
        ck_assert_double_eq(element(w, 1), pow(3, i + 1));
    }
    td_close(td);
}
END_TEST

START_TEST(test_an_old_value_read_after_the_assign_is_the_old_one)
{
    td_context *td = open_cpu(TD_F64);
    td_state w = weight(td, "w", 4, 2);
    td_tensor old = td_use(w);
    td_tensor next = td_add(old, td_fill(td, TD_F64, TD_SHAPE(4), 1));
    td_assign(w, next);
    td_tensor both = td_sum(td_mul(td_use(w), td_exp(td_detach(old))), TD_ALL, TD_DROP); /* 4 * 3 * e^2 */
    td_keep(both);
    ck_assert(td_step(td));
    ck_assert_double_eq_tol(td_item(both), 12 * exp(2), 1e-13);
    ck_assert_double_eq(element(w, 3), 3);
    td_close(td);
}
END_TEST

START_TEST(test_one_value_assigned_to_two_states)
{
    td_context *td = open_cpu(TD_F64);
    td_state a = td_buffer(td_root(td), "a", TD_F64, TD_SHAPE(16), td_init_constant(1));
    td_state b = td_buffer(td_root(td), "b", TD_F64, TD_SHAPE(16), td_init_constant(2));
    td_tensor sum = td_add(td_use(a), td_use(b));
    td_assign(a, sum);
    td_assign(b, sum);
    ck_assert(td_step(td));
    ck_assert_double_eq(element(a, 15), 3);
    ck_assert_double_eq(element(b, 15), 3);
    td_close(td);
}
END_TEST

START_TEST(test_assign_if_follows_its_condition)
{
    td_context *td = open_cpu(TD_F64);
    td_state w = weight(td, "w", 2, 1);
    for (int i = 0; i < 2; i++) {
        td_assign_if(w, td_scale(td_use(w), 10), td_scalar(td, i));
        ck_assert(td_step(td));
        ck_assert_double_eq(element(w, 0), i ? 10 : 1);
    }
    ck_assert_int_eq(td_last_report(td).plans, 1);
    td_close(td);
}
END_TEST

START_TEST(test_scalars_and_inputs_change_without_a_new_plan)
{
    td_context *td = open_cpu(TD_F64);
    for (int i = 0; i < 5; i++) {
        double x[2] = { i, i + 1 };
        td_tensor y = td_sum(td_scale(td_input(td, "x", TD_F64, TD_SHAPE(2), x), i), TD_ALL, TD_DROP);
        td_keep(y);
        ck_assert(td_step(td));
        ck_assert_double_eq(td_item(y), i * (2 * i + 1));
    }
    ck_assert_int_eq(td_last_report(td).plans, 1);
    td_close(td);
}
END_TEST

START_TEST(test_a_call_site_that_forces_a_third_plan_is_named)
{
    td_context *td = open_cpu(TD_F64);
    for (int i = 1; i <= 3; i++) {
        td_keep(td_sum(td_fill(td, TD_F64, TD_SHAPE(4), i), TD_ALL, TD_DROP));
        ck_assert(td_step(td));
    }
    ck_assert_str_has(log_text(), "a third plan was made because fill (4) differs from step to step (tests/test_step.c:");
    td_close(td);
}
END_TEST

/* loss = sum (x w)^2 over two halves of x: gradients add up in one step, over steps, and with the loss read in between. */
static void accumulate(int way, double out[3])
{
    td_context *td = open_cpu(TD_F64);
    td_state w = weight(td, "w", 3, 0.5);
    double x[2][3] = { { 1, 2, 3 }, { -1, 4, 0.5 } };
    td_tensor loss = { .td = td, .id = TD_NONE };
    for (int i = 0; i < 2; i++) {
        loss = td_sum(td_square(td_mul(td_input(td, "x", TD_F64, TD_SHAPE(3), x[i]), td_use(w))), TD_ALL, TD_DROP);
        td_backward(loss);
        if (way == 1 && i == 0) ck_assert_msg(td_step(td), "%s", td_error_text(td));
        if (way == 2) ck_assert(td_item(loss) > 0);
    }
    td_tensor norm = td_gradient_norm_at(td_gradients_at(td, &w, 1, TD_HERE), TD_HERE);
    td_keep(norm);
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    out[0] = td_item(norm);
    td_keep(td_fill(td, TD_F64, TD_SHAPE(1), 0));
    ck_assert(td_step(td));
    for (uint32_t u = 0; u < td_unit_count(td); u++) ck_assert(!td_unit_at(td, u)->accumulator_full); /* consumed */
    td_close(td);
}

START_TEST(test_gradients_accumulate_in_one_step_or_over_steps)
{
    double unrolled[3], stepped[3], read[3];
    accumulate(0, unrolled);
    accumulate(1, stepped);
    accumulate(2, read);
    double expected = sqrt(pow(2, 2) + pow(20, 2) + pow(9.25, 2)); /* 2 x^2 w, summed */
    ck_assert_double_eq_tol(unrolled[0], expected, 1e-13);
    ck_assert_double_eq(stepped[0], unrolled[0]);
    ck_assert_double_eq(read[0], unrolled[0]);
}
END_TEST

START_TEST(test_a_backward_without_parameters_is_refused)
{
    td_context *td = open_cpu(TD_F64);
    td_backward(td_sum(randn(td, 3), TD_ALL, TD_DROP));
    ck_assert(!td_step(td));
    ck_assert_str_has(td_error_text(td), "backward: the loss depends on no parameter that trains");
    td_clear_error(td);
    ck_assert(td_step(td));
    td_close(td);
}
END_TEST

START_TEST(test_a_planning_failure_can_be_tried_again)
{
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .memory_bytes = 4096, .log = check_log_line });
    td_keep(td_exp(td_fill(td, TD_F64, TD_SHAPE(4096), 1)));
    ck_assert(!td_step(td));
    ck_assert_int_eq(td_error(td), TD_ERROR_MEMORY);
    ck_assert_str_has(td_error_text(td), "planning: the step needs");
    td_clear_error(td);
    td_tensor y = td_exp(td_fill(td, TD_F64, TD_SHAPE(64), 0));
    td_keep(y);
    ck_assert(td_step(td));
    double out[64];
    ck_assert(td_read(y, out));
    ck_assert_double_eq(out[63], 1);
    td_close(td);
}
END_TEST

START_TEST(test_eager_names_the_operation_that_gave_nan)
{
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .eager = true, .log = check_log_line });
    td_tensor x = td_fill(td, TD_F64, TD_SHAPE(2), -1);
    td_tensor y = td_log(x); const int line = __LINE__;
    ck_assert_int_eq(td_error(td), TD_ERROR_NUMBER); /* at the call, not at the step */
    char expected[100];
    snprintf(expected, sizeof expected, "log: gave NaN (tests/test_step.c:%d)", line);
    ck_assert_str_eq(td_error_text(td), expected);
    ck_assert(td_failed(td_exp(y)));
    td_clear_error(td);

    td_state w = weight(td, "w", 2, 0);
    td_tensor loss = td_sum(td_sqrt(td_use(w)), TD_ALL, TD_DROP); /* 0, with an infinite slope */
    td_backward(td_mul(loss, loss));
    td_gradient_norm_at(td_gradients_at(td, &w, 1, TD_HERE), TD_HERE);
    ck_assert_int_eq(td_error(td), TD_ERROR_NUMBER);
    ck_assert_str_has(td_error_text(td), "(in the backward): gave NaN (tests/test_step.c:");
    td_close(td);
}
END_TEST

START_TEST(test_initial_values_do_not_depend_on_what_else_exists)
{
    double alone[2], beside[2];
    for (int other = 0; other < 2; other++) {
        td_context *td = open_cpu(TD_F64);
        if (other) td_parameter(td_root(td), "a", TD_SHAPE(5), td_init_normal(1));
        td_state w = td_parameter(td_root(td), "w", TD_SHAPE(7), td_init_uniform(1));
        ck_assert(td_state_read(w, 3, 2, other ? beside : alone));
        td_close(td);
    }
    ck_assert_double_eq(alone[0], beside[0]);
    ck_assert_double_eq(alone[1], beside[1]);
    ck_assert(fabs(alone[0]) < 1 && alone[0] != alone[1]);
}
END_TEST

START_TEST(test_a_name_used_twice_is_refused)
{
    td_context *td = open_cpu(TD_F64);
    weight(td, "w", 2, 0);
    weight(td, "w", 2, 0);
    ck_assert_str_eq(td_error_text(td), "state 'w' exists already; every state of a module needs its own name");
    td_close(td);
}
END_TEST

START_TEST(test_an_unknown_stage_or_pass_is_refused)
{
    td_context *td = td_open(&(td_options){ .print = "recrod", .log = check_log_line });
    ck_assert_str_has(td_error_text(td), "TD_PRINT: 'recrod' is not one of record");
    td_close(td);
    td = td_open(&(td_options){ .passes = "-place", .log = check_log_line });
    ck_assert_str_has(td_error_text(td), "only -simplify, -schedule and -fuse can be left out");
    td_close(td);
}
END_TEST

TESTS("step", test_a_kept_value_is_read_after_the_step, test_a_pending_value_is_computed_and_nothing_is_assigned,
      test_an_unkept_value_is_refused_by_name, test_a_kept_scalar_is_read_a_step_late, test_a_stale_handle_is_refused_by_name,
      test_an_error_names_operation_shapes_module_and_line_once, test_an_operation_without_a_kernel_is_told_where_it_goes,
      test_two_states_swap, test_three_states_rotate_with_a_computed_one, test_an_old_value_can_be_kept,
      test_an_old_value_read_after_the_assign_is_the_old_one, test_one_value_assigned_to_two_states,
      test_assign_if_follows_its_condition, test_scalars_and_inputs_change_without_a_new_plan,
      test_a_call_site_that_forces_a_third_plan_is_named, test_gradients_accumulate_in_one_step_or_over_steps,
      test_a_backward_without_parameters_is_refused, test_a_planning_failure_can_be_tried_again,
      test_eager_names_the_operation_that_gave_nan, test_initial_values_do_not_depend_on_what_else_exists,
      test_a_name_used_twice_is_refused, test_an_unknown_stage_or_pass_is_refused)
