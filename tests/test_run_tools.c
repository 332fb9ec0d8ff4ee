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

TESTS("run_tools", test_an_evaluation_takes_no_more_batches_than_allowed)
