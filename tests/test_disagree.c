/* Ranks that record different steps are told so, in one message that names what differs, instead of hanging.
 *
 * Labels: threads
 */
#include "tests/check.h"

#include <time.h>

#include <tandem/optim.h>
#include <tandem/parallel.h>

typedef enum fault { NONE, ATTRIBUTE, ORDER, SHAPE, OPERATION, OPTION, SEED, EXTRA, PASSES, START } fault;

typedef struct job {
    fault fault;
    int ranks, bad, at;                       /* rank `bad` errs at step `at` */
    char text[4][1024];
    double seconds[4];
} job;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static td_tensor middle(td_tensor x, bool swapped)
{
    return swapped ? td_exp(td_tanh(x)) : td_tanh(td_exp(x));
}

static bool step(td_context *td, int rows, bool errs, fault f)
{
    double x[64] = { 0 };
    td_tensor t = td_batch(td, "x", TD_F64, TD_SHAPE(rows, errs && f == SHAPE ? 3 : 2), x);
    t = middle(t, errs && f == ORDER);
    t = td_dropout(t, errs && f == ATTRIBUTE ? 0.3 : 0.2);
    t = errs && f == OPERATION ? td_square(t) : td_relu(t);
    if (errs && f == EXTRA) t = td_neg(t);
    td_keep(td_sum(t, TD_ALL, TD_DROP));
    return td_step(td);
}

static int run_rank(par_world *world, int rank, void *user)
{
    job *j = user;
    bool bad = rank == j->bad;
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1, .seed = bad && j->fault == SEED ? 2 : 1,
                                            .passes = bad && j->fault == PASSES ? "-schedule" : NULL });
    par_attach(td, world, rank, &(par_options){ .strategy = "ddp", .bucket_bytes = bad && j->fault == OPTION ? 1 << 20 : 0 });
    td_state w = td_parameter(td_root(td), "w", TD_SHAPE(2), td_init_constant(bad && j->fault == START ? 2 : 1));
    bool good = true;
    for (int s = 0; s < 12 && good; s++) {
        double start = now();
        td_keep(td_sum(td_use(w), TD_ALL, TD_DROP));
        good = step(td, 2 * j->ranks, bad && s == j->at, j->fault);
        if (!good) j->seconds[rank] = now() - start;
    }
    snprintf(j->text[rank], sizeof j->text[rank], "%s", td_error_text(td));
    td_close(td);
    return good ? 0 : 1;
}

static void expect(fault f, int ranks, int bad, int at, const char *const *parts)
{
    job j = { .fault = f, .ranks = ranks, .bad = bad, .at = at };
    ck_assert_int_ne(par_run_threads(ranks, &(par_world_options){ .timeout_s = 10 }, run_rank, &j), 0);
    for (int r = 0; r < ranks; r++) {
        ck_assert_msg(j.seconds[r] < 2, "rank %d waited %.1f s", r, j.seconds[r]);
        ck_assert_str_eq(j.text[r], j.text[0]); /* one message */
        for (int p = 0; parts[p]; p++) ck_assert_str_has(j.text[r], parts[p]);
    }
}

START_TEST(test_ranks_that_agree_run)
{
    job j = { .fault = NONE, .ranks = 3 };
    ck_assert_int_eq(par_run_threads(3, NULL, run_rank, &j), 0);
    ck_assert_str_eq(j.text[2], "");
}
END_TEST

/* At the first step, where both plan, and at a later one, where the others replay. */
START_TEST(test_an_attribute_inside_an_operation)
{
    for (int at = 0; at <= 7; at += 7) expect(ATTRIBUTE, 3, 1, at, (const char *const[]){ "disagree", "is dropout", "test_disagree.c:", NULL });
}
END_TEST

START_TEST(test_the_order_of_operations)
{
    for (int at = 0; at <= 7; at += 7) expect(ORDER, 2, 1, at, (const char *const[]){ "disagree", "exp", "tanh", NULL });
}
END_TEST

START_TEST(test_a_shape)
{
    for (int at = 0; at <= 7; at += 7) expect(SHAPE, 4, 3, at, (const char *const[]){ "disagree", "is input", "(8, 2)", "(8, 3)", NULL });
}
END_TEST

START_TEST(test_another_operation_on_rank_0)
{
    for (int at = 0; at <= 7; at += 7) expect(OPERATION, 2, 0, at, (const char *const[]){ "disagree", "square", "relu", NULL });
}
END_TEST

START_TEST(test_one_operation_more)
{
    for (int at = 0; at <= 7; at += 7) expect(EXTRA, 2, 1, at, (const char *const[]){ "disagree", "neg", "sum", NULL });
}
END_TEST

/* Reading a value before its step is a run of its own: all ranks must, or none. */
static int read_early(par_world *world, int rank, void *user)
{
    job *j = user;
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1, .log = NULL });
    par_attach(td, world, rank, NULL);
    bool good = true;
    for (int s = 0; s < 8 && good; s++) {
        double x[2] = { rank, s }, start = now();
        td_tensor sum = td_sum(td_batch(td, "x", TD_F64, TD_SHAPE(2 * j->ranks), x), TD_ALL, TD_DROP);
        bool reads = !(s == j->at && rank == j->bad);
        if (reads && td_item(sum) != j->ranks * s + j->ranks * (j->ranks - 1) / 2) good = false;
        td_keep(td_square(sum));
        good = good && td_step(td);
        j->seconds[rank] = now() - start;
    }
    snprintf(j->text[rank], sizeof j->text[rank], "%s", td_error_text(td));
    td_close(td);
    return good ? 0 : 1;
}

START_TEST(test_a_value_read_early_on_some_ranks_only)
{
    job j = { .ranks = 3, .at = -1 };
    ck_assert_int_eq(par_run_threads(3, NULL, read_early, &j), 0);
    for (int at = 0; at <= 5; at += 5) {
        j = (job){ .ranks = 3, .at = at, .bad = 2 };
        ck_assert_int_ne(par_run_threads(3, &(par_world_options){ .timeout_s = 10 }, read_early, &j), 0);
        for (int r = 0; r < 3; r++) {
            ck_assert_msg(j.seconds[r] < 2, "rank %d waited %.1f s", r, j.seconds[r]);
            ck_assert_str_has(j.text[r], "ranks disagree");
            ck_assert_str_eq(j.text[r], j.text[0]);
        }
    }
}
END_TEST

START_TEST(test_how_a_parameter_starts)
{
    expect(START, 2, 1, 0, (const char *const[]){ "disagree", "parameter (2) f64 w", "other inputs or attributes", NULL });
}
END_TEST

START_TEST(test_an_option)
{
    expect(PASSES, 2, 0, 0, (const char *const[]){ "ranks disagree at step 1: option passes is -schedule on rank 0 but all on rank 1", NULL });
    expect(OPTION, 2, 1, 0, (const char *const[]){ "ranks disagree at step 1: option bucket is 0 on rank 0 but 1048576 on rank 1", NULL });
    expect(SEED, 3, 2, 0, (const char *const[]){ "ranks disagree at step 1: option seed is 1 on rank", " but 2 on rank 2", NULL });
}
END_TEST

/* ---- Which step it was ------------------------------------------------------------------------------------ */

/* Where rank 1 errs in the third update: in its second micro-batch, in a value read before its step, in the evaluation behind it. */
enum { MICRO_BATCH, EARLY, EVALUATION, RESUMED };

static bool part_of_update(td_context *td, td_state w, opt_optimizer *opt, int ranks, bool errs, bool reads)
{
    double x[2] = { 1, 2 };
    td_tensor rows = td_mul(td_batch(td, "x", TD_F64, TD_SHAPE(2 * ranks), x), td_use(w));
    td_tensor loss = td_sum(errs ? td_exp(rows) : td_tanh(rows), TD_ALL, TD_DROP);
    td_backward(loss);
    if (reads && isnan(td_item(loss))) return false;
    if (opt) opt_step(opt, 0.1);
    return td_step(td);
}

static int train_rank(par_world *world, int rank, void *user)
{
    job *j = user;
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1, .log = NULL });
    par_attach(td, world, rank, &(par_options){ .strategy = "ddp" });
    td_state w = td_parameter(td_root(td), "w", (td_shape){ 0 }, td_init_constant(0.5));
    opt_optimizer *opt = opt_sgd(td_root(td), NULL);
    bool good = true;
    if (j->at == RESUMED) td_set_updates(td, rank == 1 ? 8 : 4);
    for (int update = 1; update <= 4 && good; update++) {
        bool errs = rank == 1 && update == 3;
        good = part_of_update(td, w, NULL, j->ranks, false, true) &&
               part_of_update(td, w, NULL, j->ranks, errs && j->at == MICRO_BATCH, false) &&
               part_of_update(td, w, opt, j->ranks, errs && j->at == EARLY, true);
        td_set_mode(td, TD_EVAL);
        td_keep(errs && j->at == EVALUATION ? td_exp(td_use(w)) : td_tanh(td_use(w)));
        good = good && td_step(td);
        td_set_mode(td, TD_TRAIN);
    }
    snprintf(j->text[rank], sizeof j->text[rank], "%s", td_error_text(td));
    opt_close(opt);
    td_close(td);
    return good ? 0 : 1;
}

static void expect_at(int where, const char *text)
{
    job j = { .ranks = 2, .at = where };
    ck_assert_int_ne(par_run_threads(2, &(par_world_options){ .timeout_s = 10 }, train_rank, &j), 0);
    for (int r = 0; r < 2; r++) ck_assert_msg(!strncmp(j.text[r], text, strlen(text)), "%s", j.text[r]);
}

/* It is the update's number, whatever else has run: micro-batches, values read early, evaluations. */
START_TEST(test_the_step_is_the_users)
{
    expect_at(MICRO_BATCH, "ranks disagree at step 3: operation ");
    expect_at(EARLY, "ranks disagree at step 3: operation ");
    expect_at(EVALUATION, "ranks disagree at the evaluation of step 3: operation ");
}
END_TEST

/* Ranks that resume from other checkpoints would draw other masks. */
START_TEST(test_ranks_at_other_steps)
{
    expect_at(RESUMED, "ranks disagree at step 5: rank 0 begins step 5 but rank 1 step 9");
}
END_TEST

TESTS("disagree", test_ranks_that_agree_run, test_an_attribute_inside_an_operation, test_the_order_of_operations, test_a_shape,
      test_another_operation_on_rank_0, test_one_operation_more, test_a_value_read_early_on_some_ranks_only,
      test_how_a_parameter_starts, test_an_option, test_the_step_is_the_users, test_ranks_at_other_steps)
