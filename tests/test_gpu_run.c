/* Runs on a GPU: one that is resumed goes on to the bit, no update waits for the host to have seen the one before, and a model that does not
 * fit is told in a sentence. The first is asked of the CPU too, by the same test.
 * Labels: gpu
 * Timeout: 300 s
 */
#define SMALL_FOLDER "test_gpu_run"
#include "core/internal.h"
#include "tests/shell.h"
#include "tests/small_run.h"

static bool has_gpu(void)
{
    td_context *td = td_open(&(td_options){ .device = "cuda", .log = check_log_line });
    bool has = td_error(td) == TD_OK;
    td_close(td);
    return has;
}

enum { UPDATES = 9, SAVED = 4 };

/* The same updates in one go, and in two runs with a checkpoint between. */
static void check_resumed(const char *device)
{
    char flags[256];
    double whole[UPDATES], parts[UPDATES];
    int64_t updates;
    clean("whole");
    clean("parts");
    snprintf(flags, sizeof flags, "--device %s --deterministic --seed 3 --threads 1 --steps %d --out whole", device, UPDATES);
    ck_assert_int_eq(train(flags, 33, whole, &updates), 0);
    ck_assert_int_eq(updates, UPDATES);
    snprintf(flags, sizeof flags, "--device %s --deterministic --seed 3 --threads 1 --steps %d --out parts", device, SAVED);
    ck_assert_int_eq(train(flags, 33, parts, &updates), 0);
    ck_assert_int_eq(updates, SAVED);
    snprintf(flags, sizeof flags, "--device %s --deterministic --threads 1 --resume --steps %d --out parts", device, UPDATES);
    ck_assert_int_eq(train(flags, 33, parts, &updates), 0);
    ck_assert_int_eq(updates, UPDATES);
    ck_assert_mem_eq(parts, whole, sizeof whole);
    ck_assert(whole[UPDATES - 1] != whole[SAVED]);
}

START_TEST(test_a_resumed_run_goes_on_to_the_bit)
{
    check_resumed("cpu");
    if (has_gpu()) check_resumed("cuda");
    else check_skip(__func__, "no CUDA device");
}
END_TEST

/* ---- Waiting */

enum { WARM = 5, COUNTED = 20, ALL = 30 };

/* Trains; what the GPU was asked for in updates WARM + 1 to WARM + COUNTED, and the loss of each update. */
static td_device_counts train_and_count(const char *flags, double losses[ALL])
{
    td_device_counts before = { 0 }, after = { 0 };
    run_loop *run = open_small(flags);
    td_context *td = run_context(run);
    small_model m = make_small(td, 33);
    opt_optimizer *opt = adamw(td_root(td));
    run_train_on(run, small_set(td));
    for (data_batch b; run_next(run, &b);) {
        if (b.last && td_updates(td) == ALL - 1) keep_loss(run, losses); /* the last step reads its own, too */
        run_step(run, opt, small_loss(&m, &b));
        ck_assert_no_error(td);
        losses[run->read - 1] = run->loss;
        if (td_updates(td) == WARM) before = td->device_counts;
        if (td_updates(td) == WARM + COUNTED) after = td->device_counts;
    }
    ck_assert_int_eq(run->read, ALL);
    ck_assert_int_eq(run_close(run), 0);
    return (td_device_counts){ .allocations = after.allocations - before.allocations, .waits = after.waits - before.waits,
                               .stalls = after.stalls - before.stalls, .calls = after.calls - before.calls,
                               .graphs = after.graphs - before.graphs, .replays = after.replays - before.replays };
}

START_TEST(test_the_host_sees_a_loss_when_the_gpu_has_the_next_update)
{
#define COUNTED_RUN "--device cuda --deterministic --seed 3 --threads 1 --steps 30 "
    if (!has_gpu()) SKIP("no CUDA device");
    double want[ALL], got[ALL];
    clean("each");
    td_device_counts each = train_and_count(COUNTED_RUN "--save-every 1 --out each", want);
    td_device_counts none = train_and_count(COUNTED_RUN "--log-every 1", got);
    ck_assert_int_ge(each.stalls, COUNTED); /* for what is saved */
    ck_assert_mem_eq(got, want, sizeof want);
    ck_assert_int_eq(none.stalls, 0);
    ck_assert_int_eq(none.waits, COUNTED); /* each loss and norm once, behind the next update */
    ck_assert_int_eq(none.replays, COUNTED);
    ck_assert_int_eq(none.calls + none.graphs + none.allocations, 0);
}
END_TEST

/* 48 layers 1600 wide on half a million tokens a step: terabytes. */
START_TEST(test_a_model_that_does_not_fit_is_told_before_it_runs)
{
    if (!has_gpu()) SKIP("no CUDA device");
    ck_assert_sh(1, "$GPT bench --size 1558m --batch 4096 --device cuda --dtype bf16");
    ck_assert_str_has(err_text, "planning: the step needs ");
    ck_assert_str_has(err_text, " and may have ");
    ck_assert_str_has(err_text, "a smaller batch or more ranks that shard would make it fit");
}
END_TEST

TESTS("gpu_run", test_a_resumed_run_goes_on_to_the_bit, test_the_host_sees_a_loss_when_the_gpu_has_the_next_update,
      test_a_model_that_does_not_fit_is_told_before_it_runs)
