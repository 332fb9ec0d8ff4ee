/* Values made again for memory: a step that is given less than it needs makes cheap values twice, says so, and computes the same bits; one
 * that has room, or could not be helped, is as it was.
 */
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>

enum { ROWS = 256, WIDTH = 64, LAYERS = 4, STEPS = 3 };
static const int64_t VALUE = 8 * ROWS * WIDTH; /* bytes of a layer's output, which is kept, and of its gelu, which need not be */

typedef struct outcome {
    double losses[STEPS];
    td_report report;
    td_code error;
    char text[512];
} outcome;

typedef enum activation { GELU, TANH } activation; /* whose gradient reads what it is of, or what it gives */

static td_tensor forward(const nn_linear *layers, activation activation, td_tensor x)
{
    for (int l = 0; l < LAYERS; l++) {
        td_tensor h = nn_linear_apply(&layers[l], x);
        x = activation == GELU ? td_gelu(h) : td_tanh(h);
    }
    return td_mean(td_square(x), TD_ALL, TD_DROP);
}

static outcome train_with(activation activation, td_options options)
{
    static double x[ROWS * WIDTH];
    nn_linear layers[LAYERS];
    outcome o = { .error = TD_OK };
    options.dtype = TD_F64;
    options.threads = 1;
    options.log = check_log_line;
    td_context *td = td_open(&options);
    td_module root = td_root(td);
    for (int l = 0; l < LAYERS; l++) {
        char name[16];
        snprintf(name, sizeof name, "fc%d", l);
        layers[l] = nn_linear_make(root, name, WIDTH, WIDTH);
    }
    opt_optimizer *opt = opt_sgd(root, NULL);
    for (int64_t i = 0; i < ROWS * WIDTH; i++) x[i] = check_normal((uint64_t)i);
    for (int s = 0; s < STEPS && td_error(td) == TD_OK; s++) {
        td_tensor loss = forward(layers, activation, td_input(td, "x", TD_F64, TD_SHAPE(ROWS, WIDTH), x));
        td_backward(loss);
        opt_step(opt, 0.1);
        if (td_step(td)) o.losses[s] = td_item(loss);
    }
    o.report = td_last_report(td);
    o.error = td_error(td);
    snprintf(o.text, sizeof o.text, "%.500s", td_error_text(td));
    opt_close(opt);
    td_close(td);
    return o;
}

static outcome train(td_options options) { return train_with(GELU, options); }

static void ck_assert_same_losses(const outcome *a, const outcome *b)
{
    ck_assert_msg(a->error == TD_OK && b->error == TD_OK, "%s%s", a->text, b->text);
    for (int s = 0; s < STEPS; s++) ck_assert_double_eq(a->losses[s], b->losses[s]);
}

START_TEST(test_a_step_that_lacks_a_byte_makes_one_value_twice)
{
    outcome all = train((td_options){ 0 });
    outcome less = train((td_options){ .memory_bytes = all.report.peak_bytes - 1 });
    ck_assert_same_losses(&less, &all);
    ck_assert_int_eq(less.report.calls, all.report.calls + 1);
    ck_assert_int_eq(less.report.peak_bytes, all.report.peak_bytes - VALUE);
    ck_assert_int_eq(less.report.bytes_moved, all.report.bytes_moved + 2 * VALUE);
}
END_TEST

START_TEST(test_a_step_that_lacks_more_makes_more_values_twice)
{
    outcome all = train((td_options){ 0 });
    outcome less = train((td_options){ .memory_bytes = all.report.peak_bytes - VALUE - VALUE / 2 });
    ck_assert_same_losses(&less, &all);
    ck_assert_int_eq(less.report.calls, all.report.calls + 2);
    ck_assert_int_eq(less.report.peak_bytes, all.report.peak_bytes - 2 * VALUE);
}
END_TEST

START_TEST(test_nothing_dead_is_read)
{
    outcome all = train((td_options){ 0 });
    outcome less = train((td_options){ .memory_bytes = all.report.peak_bytes - VALUE - 1, .poison = true });
    ck_assert_same_losses(&less, &all);
}
END_TEST

START_TEST(test_a_step_that_has_room_is_as_it_was)
{
    outcome all = train((td_options){ 0 }), same = train((td_options){ .memory_bytes = all.report.peak_bytes });
    ck_assert_same_losses(&same, &all);
    ck_assert_int_eq(same.report.calls, all.report.calls);
    ck_assert_int_eq(same.report.peak_bytes, all.report.peak_bytes);
}
END_TEST

START_TEST(test_a_step_that_cannot_be_helped_is_refused)
{
    outcome all = train((td_options){ 0 }), refused = train((td_options){ .memory_bytes = all.report.state_bytes + VALUE });
    ck_assert_int_eq(refused.error, TD_ERROR_MEMORY);
    ck_assert_msg(strstr(refused.text, "planning: the step needs") != NULL, "%s", refused.text);
}
END_TEST

START_TEST(test_a_value_whose_operands_are_gone_is_kept)
{
    outcome all = train_with(TANH, (td_options){ 0 });
    outcome refused = train_with(TANH, (td_options){ .memory_bytes = all.report.peak_bytes - 1 });
    ck_assert_int_eq(all.error, TD_OK);
    ck_assert_int_eq(refused.error, TD_ERROR_MEMORY);
}
END_TEST

START_TEST(test_it_is_left_out_with_fuse)
{
    outcome all = train((td_options){ .passes = "-fuse" });
    outcome refused = train((td_options){ .memory_bytes = all.report.peak_bytes - 1, .passes = "-fuse" });
    ck_assert_int_eq(all.error, TD_OK);
    ck_assert_int_eq(refused.error, TD_ERROR_MEMORY);
}
END_TEST

TESTS("again", test_a_step_that_lacks_a_byte_makes_one_value_twice, test_a_step_that_lacks_more_makes_more_values_twice,
      test_nothing_dead_is_read, test_a_step_that_has_room_is_as_it_was, test_a_step_that_cannot_be_helped_is_refused,
      test_a_value_whose_operands_are_gone_is_kept, test_it_is_left_out_with_fuse)
