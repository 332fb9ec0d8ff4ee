/* Runs on a GPU: one that is resumed goes on to the bit, and a model that does not fit is told in a sentence. The first is asked of the CPU
 * too, by the same test.
 * Labels: gpu
 * Timeout: 300 s
 */
#define SMALL_FOLDER "test_gpu_run"
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

TESTS("gpu_run", test_a_resumed_run_goes_on_to_the_bit, test_a_model_that_does_not_fit_is_told_before_it_runs)
