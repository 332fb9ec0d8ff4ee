/* What helps a training along: evaluations of a part of the data, training on one batch, an early stop, the checkpoints
 * that are kept.
 */
#include <signal.h>

#define SMALL_FOLDER "test_run_tools_files"
#include "tests/small_run.h"

/* ---- --eval-batches --------------------------------------------------------------------------------------- */

/* The samples of the evaluations of the test, padding not counted. */
static int64_t samples_seen;

static int measure_and_count(void *model, const data_batch *b, run_metric out[RUN_METRICS])
{
    samples_seen += b->samples;
    return measure_loss(model, b, out);
}

static int64_t samples_of_an_evaluation(const char *flags)
{
    samples_seen = 0;
    ck_assert_int_eq(loop_small(open_small(flags), adamw, 5, NULL, NULL, measure_and_count), 0);
    return samples_seen;
}

START_TEST(test_an_evaluation_takes_no_more_batches_than_allowed)
{
    ck_assert_int_eq(samples_of_an_evaluation("--steps 2"), SAMPLES);
    ck_assert_int_eq(samples_of_an_evaluation("--steps 2 --eval-batches 2"), 24);
    ck_assert_int_eq(samples_of_an_evaluation("--steps 2 --eval-batches 2 --accumulate 3"), 24); /* of an update's rows */
    ck_assert_int_eq(samples_of_an_evaluation("--steps 2 --eval-batches 4"), SAMPLES);
    ck_assert_int_eq(samples_of_an_evaluation("--steps 3 --eval-batches 1 --eval-every 1"), 3 * 12);
    ck_assert_int_eq(train("--steps 2 --eval-batches 1", 5, NULL, NULL), 2); /* there is nothing to evaluate on */
}
END_TEST

/* ---- --overfit-batch -------------------------------------------------------------------------------------- */

START_TEST(test_overfitting_takes_the_first_batch_again_and_again)
{
    double losses[6], micro[6], expected[6];
    ck_assert_int_eq(train("--steps 6 --dtype f64 --seed 3 --threads 1 --overfit-batch", 5, losses, NULL), 0);
    ck_assert_int_eq(train("--steps 6 --dtype f64 --seed 3 --overfit-batch --accumulate 3", 5, micro, NULL), 0);
    train_by_hand(FIRST_BATCH, 1, 6, expected);
    ck_assert_near(losses, expected, 6, 0); /* dropout is on, and draws anew */
    ck_assert_near(micro, expected, 6, 1e-12); /* sums in another order */
}
END_TEST

START_TEST(test_overfitting_goes_on_to_the_bit)
{
    double whole[8], parts[8];
    ck_assert_int_eq(train("--steps 8 --seed 5 --overfit-batch", 5, whole, NULL), 0);
    clean("overfit");
    ck_assert_int_eq(train("--steps 5 --seed 5 --overfit-batch --out overfit", 5, parts, NULL), 0);
    ck_assert_int_eq(train("--steps 8 --resume --overfit-batch=false --out overfit", 5, parts, NULL), 1);
    ck_assert_int_eq(train("--steps 8 --resume --out overfit", 5, parts, NULL), 0);
    ck_assert_near(parts, whole, 8, 0);
}
END_TEST

START_TEST(test_overfitting_evaluates_on_its_batch)
{
    ck_assert_int_eq(samples_of_an_evaluation("--steps 3 --eval-every 1 --overfit-batch"), 3 * 12);
    ck_assert_int_eq(samples_of_an_evaluation("--steps 3 --eval-every 1 --overfit-batch --accumulate 2"), 3 * 12);
}
END_TEST

/* ---- --stop-after ----------------------------------------------------------------------------------------- */

/* Evaluations as they are told here, by step. */
static const double *told;

static int measure_told(void *model, const data_batch *b, run_metric out[RUN_METRICS])
{
    td_tensor weights = data_get(b, "weight"), one = td_scale(td_sum(weights, TD_ALL, TD_DROP), 1.0 / (double)b->samples);
    td_context *td = weights.td;
    (void)model;
    out[0] = (run_metric){ "loss", td_scale(one, told[td_updates(td)]), one };
    return 1;
}

/* Trains; a SIGTERM comes while update `signal_at` is made (0: none). The number of updates. */
static int64_t train_told(const char *flags, const double *evaluations, int64_t signal_at)
{
    run_loop *run = open_small(flags);
    td_context *td = run_context(run);
    small_model m = make_small(td, 5);
    opt_optimizer *opt = adamw(td_root(td));
    bool stepped = false;
    told = evaluations;
    run_train_on(run, small_set(td));
    run_evaluate_on(run, small_set(td), measure_told, &m);
    for (data_batch b; run_next(run, &b); stepped = true) {
        if (td_updates(td) + 1 == signal_at) raise(SIGTERM);
        run_step(run, opt, small_loss(&m, &b));
    }
    ck_assert_no_error(td);
    int64_t updates = td_updates(td);
    if (!stepped) opt_close(opt);
    ck_assert_int_eq(run_close(run), 0);
    return updates;
}

static bool file_holds(const char *path, const char *text)
{
    static char content[1 << 16];
    FILE *from = fopen(path, "r");
    ck_assert_msg(from != NULL, "%s", path);
    content[fread(content, 1, sizeof content - 1, from)] = 0;
    fclose(from);
    return strstr(content, text) != NULL;
}

/* From step 1 on; the first number is no step's. */
static const double falls_twice[] = { 0, 5, 4, 4.5, 4.25, 3.5, 3.5, 4, 3.75, 1, 1, 1 };

START_TEST(test_it_stops_when_evaluations_improve_no_more)
{
    clean("early");
    ck_assert_int_eq(train_told("--steps 11 --eval-every 1 --stop-after 3 --out early", falls_twice, 0), 8);
    ck_assert(file_holds("early/summary.json", "\"stopped_early\":true"));
    ck_assert(file_holds("early/summary.json", "\"eval\":{\"loss\":3.75}"));
    ck_assert(file_holds("early/checkpoints/step-8/manifest.json", "\"best_loss\":3.5,\"best_step\":5"));
    ck_assert_int_eq(train_told("--resume --out early", falls_twice, 0), 8); /* there is nothing to do */
    ck_assert_int_eq(train_told("--resume --out early --stop-after 4", falls_twice, 0), 11);
    ck_assert(file_holds("early/summary.json", "\"stopped_early\":false"));
    ck_assert_int_eq(train_told("--steps 11 --eval-every 1", falls_twice, 0), 11); /* not asked to */
}
END_TEST

/* Wherever it was interrupted: between evaluations, or at one, whose word is saved with the checkpoint. */
START_TEST(test_what_counts_for_an_early_stop_is_saved)
{
    static const double flat[] = { 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2 };
    for (int64_t at = 1; at < 8; at++) {
        clean("count");
        ck_assert_int_eq(train_told("--steps 13 --eval-every 2 --stop-after 3 --out count", flat, at), at);
        ck_assert_int_eq(train_told("--resume --out count", flat, 0), 8);
    }
    clean("count"); /* the last update is saved before it is evaluated */
    ck_assert_int_eq(train_told("--steps 6 --eval-every 2 --stop-after 3 --out count", flat, 0), 6);
    ck_assert_int_eq(train_told("--steps 13 --resume --out count", flat, 0), 8);
}
END_TEST

START_TEST(test_an_evaluation_that_is_nan_is_no_improvement)
{
    static const double broken[] = { 0, NAN, NAN, 7, NAN, 7, 7, 7 };
    ck_assert_int_eq(train_told("--steps 7 --eval-every 1 --stop-after 2", broken, 0), 2);
    ck_assert_int_eq(train_told("--steps 7 --eval-every 1 --stop-after 3", broken, 0), 6);
}
END_TEST

START_TEST(test_an_early_stop_needs_evaluations)
{
    ck_assert_int_eq(train("--steps 2 --stop-after 1", 5, NULL, NULL), 2);
}
END_TEST

/* ---- --keep, --keep-best ---------------------------------------------------------------------------------- */

/* The steps of the checkpoints, as "2 5 6". */
static const char *steps_kept(const char *out)
{
    static char text[256];
    char path[256];
    size_t at = 0;
    text[0] = 0;
    for (int step = 0; step < 32; step++) {
        snprintf(path, sizeof path, "%s/checkpoints/step-%d/manifest.json", out, step);
        if (exists(path)) at += (size_t)snprintf(text + at, sizeof text - at, at ? " %d" : "%d", step);
    }
    return text;
}

START_TEST(test_as_many_checkpoints_are_kept_as_asked_for)
{
    clean("keep");
    ck_assert_int_eq(train("--steps 9 --save-every 1 --keep 5 --out keep", 5, NULL, NULL), 0);
    ck_assert_str_eq(steps_kept("keep"), "5 6 7 8 9");
    ck_assert_int_eq(train("--steps 10 --resume --keep 1 --out keep", 5, NULL, NULL), 0);
    ck_assert_str_eq(steps_kept("keep"), "10");
    ck_assert_int_eq(train("--steps 2 --keep 1", 5, NULL, NULL), 2); /* nothing is saved without --out */
}
END_TEST

START_TEST(test_the_best_checkpoint_outlives_newer_ones)
{
    clean("best");
    ck_assert_int_eq(train_told("--steps 3 --save-every 1 --eval-every 1 --keep 1 --keep-best --out best", falls_twice, 0), 3);
    ck_assert_str_eq(steps_kept("best"), "2 3");
    ck_assert_int_eq(train_told("--steps 4 --resume --out best", falls_twice, 0), 4); /* from 3, not from 2 */
    ck_assert_str_eq(steps_kept("best"), "2 4");
    ck_assert_int_eq(train_told("--steps 8 --resume --out best", falls_twice, 0), 8);
    ck_assert_str_eq(steps_kept("best"), "5 8");
    ck_assert_int_eq(train_told("--steps 10 --resume --out best", falls_twice, 0), 10);
    ck_assert_str_eq(steps_kept("best"), "9 10");
}
END_TEST

/* Where no checkpoint is due, too. */
START_TEST(test_an_evaluation_that_is_the_best_saves)
{
    clean("saves");
    ck_assert_int_eq(train_told("--steps 8 --eval-every 1 --keep 9 --keep-best --out saves", falls_twice, 0), 8);
    ck_assert_str_eq(steps_kept("saves"), "1 2 5 8");
    ck_assert_int_eq(train("--steps 2 --keep-best --out saves", 5, NULL, NULL), 2); /* needs evaluations */
}
END_TEST

TESTS("run_tools", test_an_evaluation_takes_no_more_batches_than_allowed,
      test_overfitting_takes_the_first_batch_again_and_again, test_overfitting_goes_on_to_the_bit,
      test_overfitting_evaluates_on_its_batch, test_it_stops_when_evaluations_improve_no_more,
      test_what_counts_for_an_early_stop_is_saved, test_an_evaluation_that_is_nan_is_no_improvement,
      test_an_early_stop_needs_evaluations, test_as_many_checkpoints_are_kept_as_asked_for,
      test_the_best_checkpoint_outlives_newer_ones, test_an_evaluation_that_is_the_best_saves)
