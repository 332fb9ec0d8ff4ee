/* What helps a training along: evaluations of a part of the data, training on one batch, an early stop, the checkpoints
 * that are kept.
 */
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
    ck_assert_int_eq(train("--steps 6 --dtype f64 --seed 3 --overfit-batch", 5, losses, NULL), 0);
    ck_assert_int_eq(train("--steps 6 --dtype f64 --seed 3 --overfit-batch --accumulate 3", 5, micro, NULL), 0);

    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .seed = 3 });
    small_model m = make_small(td, 5);
    opt_optimizer *opt = adamw(td_root(td));
    data_set *set = small_set(td);
    data_loader *loader = data_loader_open(
        td, set, &(data_loader_options){ .batch = 12, .seed = 3, .shuffle = true, .dtype = TD_F64 });
    data_batch b;
    ck_assert(data_next(loader, &b));
    for (int step = 0; step < 6; step++) {
        td_tensor loss = small_loss(&m, &b);
        td_backward(loss);
        opt_step(opt, 0.05);
        td_step(td);
        expected[step] = td_item(loss);
    }
    ck_assert_no_error(td);
    ck_assert_near(losses, expected, 6, 0); /* dropout is on, and draws anew */
    ck_assert_near(micro, expected, 6, 1e-12); /* sums in another order */
    data_loader_close(loader);
    data_set_close(set);
    opt_close(opt);
    td_close(td);
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

TESTS("run_tools", test_an_evaluation_takes_no_more_batches_than_allowed,
      test_overfitting_takes_the_first_batch_again_and_again, test_overfitting_goes_on_to_the_bit,
      test_overfitting_evaluates_on_its_batch)
