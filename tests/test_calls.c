/* The calls of a small step on a GPU, where each costs its time however little it does: which there are, and that those left out change no
 * bit of what is computed. The host is the GPU (tests/on_host).
 *
 * Labels: on_host
 */
#include <stdlib.h>

#include "tests/check.h"

#include "core/internal.h"
#include "core/ops/list.h"

#include <tandem/nn.h>
#include <tandem/optim.h>

enum { STEPS = 6, ROWS = 64, IN = 37, HIDDEN = 48, CLASSES = 5, WEIGHTS = HIDDEN * IN };

typedef struct model {
    td_context *td;
    nn_linear layer[3];
    opt_optimizer *opt;
} model;

static model open_layers(td_dtype dtype, const char *passes, bool poison)
{
    model m = { .td = td_open(&(td_options){ .device = "cuda", .dtype = dtype, .passes = passes, .poison = poison, .seed = 3, .threads = 1,
                                             .log = check_log_line }) };
    td_module root = td_root(m.td);
    m.layer[0] = nn_linear_make(root, "one", IN, HIDDEN);
    m.layer[1] = nn_linear_make(root, "two", HIDDEN, HIDDEN);
    m.layer[2] = nn_linear_make(root, "out", HIDDEN, CLASSES);
    return m;
}

static model open_model(td_dtype dtype, const char *passes)
{
    model m = open_layers(dtype, passes, false);
    m.opt = opt_adamw(td_root(m.td), NULL);
    return m;
}

static void close_model(model *m)
{
    ck_assert_no_error(m->td);
    opt_close(m->opt);
    td_close(m->td);
}

static td_tensor loss_of(const model *m, int s)
{
    static float x[2][ROWS * IN];
    static int32_t y[2][ROWS];
    for (int i = 0; i < ROWS * IN; i++) x[s % 2][i] = (float)check_normal((uint64_t)(s % 2 * ROWS * IN + i + 1));
    for (int i = 0; i < ROWS; i++) y[s % 2][i] = (i * 7 + s % 2) % CLASSES;
    td_tensor h = td_batch(m->td, "x", TD_F32, TD_SHAPE(ROWS, IN), x[s % 2]);
    for (int l = 0; l < 2; l++) h = td_relu(nn_linear_apply(&m->layer[l], h));
    return td_cross_entropy(nn_linear_apply(&m->layer[2], h), td_batch(m->td, "y", TD_I32, TD_SHAPE(ROWS), y[s % 2]));
}

static double update(const model *m, int s)
{
    td_tensor loss = loss_of(m, s);
    td_backward(loss);
    opt_step(m->opt, 1e-2);
    ck_assert_msg(td_step(m->td), "%s", td_error_text(m->td));
    return td_item(loss);
}

static double evaluate(const model *m)
{
    td_tensor loss = loss_of(m, 0);
    td_keep(loss);
    ck_assert_msg(td_step(m->td), "%s", td_error_text(m->td));
    return td_item(loss);
}

static const char *calls_of_the_last_step(const model *m)
{
    static char text[1024];
    size_t at = 0;
    for (uint32_t t = 0; t < m->td->last->task_count; t++)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%s%s", t ? " " : "", m->td->last->tasks[t].kernel.op->name,
                               m->td->last->tasks[t].queue == TD_QUEUE_ASIDE ? "*" : "");
    return text;
}

/* Of the 24 that they were. With a star those aside, which computation does not wait for; what a packing has to do is done in place. */
START_TEST(test_a_step_is_few_calls)
{
    model m = open_model(TD_BF16, NULL);
    for (int s = 0; s < 3; s++) update(&m, s);
    ck_assert_str_eq(calls_of_the_last_step(&m),
                     "add* cast linear relu linear relu linear cross_entropy_gradient sum* matmul matmul_dbias fused matmul matmul_dbias fused "
                     "matmul_dbias pack mul* update_unit");
    close_model(&m);
}
END_TEST

static void losses_with(td_dtype dtype, const char *passes, bool poison, double *to)
{
    model m = open_layers(dtype, passes, poison);
    m.opt = opt_adamw(td_root(m.td), NULL);
    for (int s = 0; s < STEPS; s++) to[s] = update(&m, s);
    close_model(&m);
}

/* With dead memory erased, too, between calls in turn. */
START_TEST(test_each_changes_no_bit)
{
    enum { COUNT = 5 };
    static const char *const passes[COUNT] = { "", "-constants", "-kept", "-aside", "-constants,-kept,-aside" };
    static const td_dtype dtypes[] = { TD_F32, TD_BF16, TD_F16 };
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        double all[STEPS], without[STEPS];
        losses_with(dtypes[d], NULL, false, all);
        ck_assert(all[STEPS - 1] < all[0]);
        for (size_t i = 0; i < 2 * COUNT; i++) {
            losses_with(dtypes[d], passes[i / 2], i % 2, without);
            for (int s = 0; s < STEPS; s++)
                ck_assert_msg(all[s] == without[s], "%s, %s%s, step %d: %.9g, not %.9g", td_dtype_name(dtypes[d]), passes[i / 2],
                              i % 2 ? ", dead memory erased" : "", s, without[s], all[s]);
        }
    }
}
END_TEST

/* A loss that is made aside, and a norm that clipping reads. */
static void losses_and_norms(double to[2 * STEPS])
{
    model m = open_layers(TD_F32, NULL, false);
    m.opt = opt_adamw(td_root(m.td), &(opt_adamw_options){ .max_norm = 0.1 });
    for (int s = 0; s < STEPS; s++) {
        to[2 * s] = update(&m, s);
        to[2 * s + 1] = td_item(opt_gradient_norm(m.opt));
    }
    close_model(&m);
}

/* A graph whose calls run in the orders most unlike the one they were captured in, as far as what waits for what leaves a choice. */
START_TEST(test_what_is_aside_waits_for_what_it_reads)
{
    static const char *const orders[] = { "beginner-first", "beginner-last" };
    double as_captured[2 * STEPS], values[2 * STEPS];
    losses_and_norms(as_captured);
    for (int i = 0; i < 2; i++) {
        setenv("ON_HOST_GRAPHS", orders[i], 1);
        losses_and_norms(values);
        ck_assert_mem_eq(values, as_captured, sizeof values);
    }
    unsetenv("ON_HOST_GRAPHS");
}
END_TEST

/* What a call aside reads lives on to the step's end: a row of something large is not worth that. */
START_TEST(test_what_reads_something_large_is_not_aside)
{
    enum { LARGE_ROWS = 4096, COLUMNS = 256 };
    td_context *td = td_open(&(td_options){ .device = "cuda", .seed = 3, .threads = 1, .log = check_log_line });
    for (int large = 0; large < 2; large++) {
        td_tensor y = td_exp(td_uniform(td, TD_SHAPE(large ? LARGE_ROWS : 4, COLUMNS)));
        td_keep(td_sum(td_slice(y, 0, 0, 1), TD_ALL, TD_DROP));
        ck_assert_msg(td_step(td), "%s", td_error_text(td));
        int slices = 0;
        for (uint32_t t = 0; t < td->last->task_count; t++) {
            const td_task *task = &td->last->tasks[t];
            if (task->kernel.op != &td_op_slice) continue;
            ck_assert_int_eq(task->queue == TD_QUEUE_ASIDE, !large);
            slices++;
        }
        ck_assert_int_eq(slices, 1);
    }
    td_close(td);
}
END_TEST

static int64_t unread_of_the_gradient(const model *m)
{
    for (uint32_t t = 0; t < m->td->last->task_count; t++)
        if (m->td->last->tasks[t].kernel.op == &td_op_pack) return ((const td_pack_attr *)m->td->last->tasks[t].kernel.attr)->unread;
    return -1;
}

/* The unit ends at a multiple of 16 elements, 11 behind the last bias. Norms read them. */
START_TEST(test_what_is_behind_the_last_member_is_cleared_where_it_is_read)
{
    model plain = open_model(TD_BF16, NULL), clipped = open_layers(TD_BF16, NULL, false);
    clipped.opt = opt_adamw(td_root(clipped.td), &(opt_adamw_options){ .max_norm = 1 });
    update(&plain, 0);
    update(&clipped, 0);
    ck_assert_int_eq(unread_of_the_gradient(&plain), 16 - CLASSES);
    ck_assert_int_eq(unread_of_the_gradient(&clipped), 0);
    close_model(&plain);
    close_model(&clipped);
}
END_TEST

/* ---- Copies of parameters that are kept */

static int casts_of_the_last_step(const model *m) { return count_of(calls_of_the_last_step(m), "cast"); }

/* The first step makes the copy, the others find it; so does an evaluation. The cast that is left is the batch's. */
START_TEST(test_a_copy_is_made_once)
{
    model m = open_model(TD_BF16, NULL), plain = open_model(TD_BF16, "-kept");
    for (int s = 0; s < 3; s++) {
        update(&m, s);
        update(&plain, s);
        ck_assert_int_eq(casts_of_the_last_step(&m), s == 0 ? 2 : 1);
        ck_assert_int_eq(casts_of_the_last_step(&plain), 2);
    }
    ck_assert(evaluate(&m) == evaluate(&plain));
    ck_assert_int_eq(casts_of_the_last_step(&m), 1);
    ck_assert_int_eq(casts_of_the_last_step(&plain), 2);
    close_model(&m);
    close_model(&plain);
}
END_TEST

/* An evaluation that comes first leaves the copy it made. */
START_TEST(test_who_comes_first_makes_it)
{
    model m = open_model(TD_BF16, NULL), plain = open_model(TD_BF16, "-kept");
    ck_assert(evaluate(&m) == evaluate(&plain));
    ck_assert_int_eq(casts_of_the_last_step(&m), 2);
    for (int s = 0; s < 3; s++) {
        ck_assert(update(&m, s) == update(&plain, s));
        ck_assert_int_eq(casts_of_the_last_step(&m), 1);
    }
    close_model(&m);
    close_model(&plain);
}
END_TEST

/* What is written, and what a step assigns, the next step reads. */
START_TEST(test_parameters_that_change_otherwise_are_copied_again)
{
    static float zeros[WEIGHTS];
    for (int how = 0; how < 2; how++) {
        model m = open_model(TD_BF16, NULL), plain = open_model(TD_BF16, "-kept");
        for (int s = 0; s < 3; s++) ck_assert(update(&m, s) == update(&plain, s));
        for (int i = 0; i < 2; i++) {
            td_context *td = i ? plain.td : m.td;
            td_state weight = td_state_named(td, "one.weight");
            if (how == 0) ck_assert(td_state_write(weight, 0, WEIGHTS, zeros));
            else td_assign(weight, td_input(td, "zeros", TD_F32, TD_SHAPE(HIDDEN, IN), zeros));
            if (how == 1) ck_assert(td_step(td));
        }
        ck_assert(evaluate(&m) == evaluate(&plain));
        ck_assert_int_eq(casts_of_the_last_step(&m), 2);
        for (int s = 3; s < STEPS; s++) ck_assert(update(&m, s) == update(&plain, s));
        ck_assert_int_eq(casts_of_the_last_step(&m), 1);
        close_model(&m);
        close_model(&plain);
    }
}
END_TEST

/* Micro-batches that are run one by one: only the first of all makes the copy. */
START_TEST(test_micro_batches_read_it)
{
    model m = open_model(TD_BF16, NULL), plain = open_model(TD_BF16, "-kept");
    for (int s = 0; s < STEPS; s++) {
        double loss[2];
        for (int i = 0; i < 2; i++) {
            const model *of = i ? &plain : &m;
            td_tensor part = loss_of(of, s);
            td_backward(part);
            if (s % 3 == 2) opt_step(of->opt, 1e-2);
            ck_assert(td_step(of->td));
            loss[i] = td_item(part);
        }
        ck_assert_msg(loss[0] == loss[1], "step %d: %.9g, not %.9g", s, loss[0], loss[1]);
        ck_assert_int_eq(casts_of_the_last_step(&m), s == 0 ? 2 : 1);
    }
    close_model(&m);
    close_model(&plain);
}
END_TEST

/* Matrices that decay are updated by another call, of the same unit. */
static opt_optimizer *groups_of_two(const model *m)
{
    return opt_adamw(td_root(m->td), &(opt_adamw_options){ .groups = &(opt_group){ .min_rank = 2, .decay = 0.1 }, .group_count = 1 });
}

static opt_optimizer *momentum(const model *m) { return opt_sgd(td_root(m->td), &(opt_sgd_options){ .momentum = 0.9 }); }
static opt_optimizer *lion(const model *m) { return opt_lion(td_root(m->td), NULL); }
static opt_optimizer *adagrad(const model *m) { return opt_adagrad(td_root(m->td), NULL); }
static opt_optimizer *plain_sgd(const model *m) { return opt_sgd(td_root(m->td), NULL); }

START_TEST(test_every_rule_writes_it)
{
    static opt_optimizer *(*const makers[])(const model *m) = { groups_of_two, momentum, lion, adagrad, plain_sgd };
    static const td_dtype dtypes[] = { TD_BF16, TD_F16 };
    for (int i = 0; i < 10; i++) {
        double loss[2];
        for (int kept = 0; kept < 2; kept++) {
            model m = open_layers(dtypes[i % 2], kept ? NULL : "-kept", false);
            m.opt = makers[i / 2](&m);
            for (int s = 0; s < 4; s++) loss[kept] = update(&m, s);
            ck_assert_int_eq(casts_of_the_last_step(&m), kept ? 1 : 2);
            close_model(&m);
        }
        ck_assert_msg(loss[0] == loss[1], "rule %d, %s: %.9g, not %.9g", i / 2, td_dtype_name(dtypes[i % 2]), loss[1], loss[0]);
    }
}
END_TEST

/* Each step assigns the first layer's weight, which is of the same unit as all, besides. */
START_TEST(test_no_copy_is_planned_where_none_is_kept)
{
    int64_t state[2];
    for (int kept = 0; kept < 2; kept++) {
        model m = open_model(TD_BF16, kept ? NULL : "-kept");
        for (int s = 0; s < 3; s++) {
            td_tensor loss = loss_of(&m, s);
            td_backward(loss);
            opt_step(m.opt, 1e-2);
            td_assign(m.layer[0].weight, td_scale(td_use(m.layer[0].weight), 0.5));
            ck_assert_msg(td_step(m.td), "%s", td_error_text(m.td));
        }
        state[kept] = td_last_report(m.td).state_bytes;
        close_model(&m);
    }
    ck_assert_int_eq(state[1], state[0]);
}
END_TEST

TESTS("calls", test_a_step_is_few_calls, test_each_changes_no_bit, test_what_is_aside_waits_for_what_it_reads,
      test_what_reads_something_large_is_not_aside, test_no_copy_is_planned_where_none_is_kept,
      test_what_is_behind_the_last_member_is_cleared_where_it_is_read,
      test_a_copy_is_made_once, test_who_comes_first_makes_it,
      test_parameters_that_change_otherwise_are_copied_again, test_micro_batches_read_it, test_every_rule_writes_it)
