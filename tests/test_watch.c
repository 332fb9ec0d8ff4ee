/* What is said of ranks while they train: whose number was the first that is not finite, and who is slower than the others; and
 * how long a step waits in collectives, which the summary has.
 */
#define SMALL_FOLDER "watch"
#define SHELL_FOLDER "watch"
#include "tests/fault_run.h"

static int start(const char *by, const char *wanted, const char *flags)
{
    return sh("rm -rf out; " FAULT_ENVIRONMENT "export FAULT='%s'; timeout 60 %s '%s' --threads 1 --log-every 1 --out out %s", wanted,
              by, own_path(), flags);
}

#define FIRST_PART "stopped; rank 1's part was the first not to be finite, in "
#define OF_THE_LOSS "small: step 1: the loss is nan: " FIRST_PART "all_reduce (call * of step 1); TD_EAGER=1 *"

static void expect_named(const char *by, const char *wanted, const char *flags, const char *pattern)
{
    ck_assert_int_eq(start(by, wanted, flags), 1);
    ck_assert_msg(count_errors(pattern) == 1, "%s %s: %.900s, not %s", wanted, flags, err_text, pattern);
    ck_assert_msg(count_errors("small: *") == 1, "%s %s: %.900s", wanted, flags, err_text);
}

/* Its loss is the first number that is summed over ranks in the step. */
START_TEST(test_a_rank_whose_data_is_not_a_number_is_named)
{
    static const char *const strategies[] = { "ddp", "zero2", "fsdp" };
    for (int s = 0; s < 3; s++)
        for (int ranks = 2; ranks <= 4; ranks++) {
            char flags[96];
            snprintf(flags, sizeof flags, "--steps 8 --ranks %d --strategy %s", ranks, strategies[s]);
            expect_named("", "nan data", flags, OF_THE_LOSS);
        }
    expect_named("", "nan data", "--steps 8 --ranks 2 --accumulate 3 --dtype f64", OF_THE_LOSS);
    expect_named("", "nan data", "--steps 8 --ranks 4 --strategy hsdp:2x2", OF_THE_LOSS);
}
END_TEST

/* The loss is finite still: the gradient's sum is the first that is not, in the step of update 4. */
START_TEST(test_a_rank_whose_gradient_is_not_a_number_is_named)
{
    static const char *const cases[][2] = {
        { "--strategy ddp", "all_reduce" }, { "--strategy fsdp", "reduce_scatter" }, { "--strategy zero1", "reduce_scatter" },
        { "--strategy fsdp --reduce-dtype bf16", "reduce_scatter" }, { "--strategy fsdp --dtype f64", "reduce_scatter" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char flags[96], pattern[256];
        snprintf(flags, sizeof flags, "--steps 8 --ranks 3 %s", cases[i][0]);
        snprintf(pattern, sizeof pattern, "small: step 4: the gradient's norm is nan: " FIRST_PART "%s (call * of step 4); *", cases[i][1]);
        expect_named("", "nan backward", flags, pattern);
    }
}
END_TEST

START_TEST(test_it_is_named_under_mpirun)
{
    NEEDS_MPI;
    expect_named(FAULT_MPIRUN "-n 3", "nan data", "--steps 8", OF_THE_LOSS);
    expect_named(FAULT_MPIRUN "-n 3", "nan backward", "--steps 8 --strategy fsdp",
                 "small: step 4: the gradient's norm is nan: " FIRST_PART "reduce_scatter (call * of step 4); *");
}
END_TEST

/* A number of the summary; `index` >= 0: of an array. */
static double summary(const char *name, int index)
{
    td_context *td = open_cpu(TD_F32);
    td_json_document *document = td_json_read(td, SHELL_FOLDER "/out/summary.json");
    ck_assert_no_error(td);
    const td_json *at = td_json_get(td_json_root(document), name);
    ck_assert_ptr_nonnull(at);
    for (at = index >= 0 ? at->first : at; index > 0 && at; index--) at = at->next;
    ck_assert_ptr_nonnull(at);
    double number = at->number;
    td_json_close(document);
    td_close(td);
    return number;
}

/* Rank 1 takes 10 ms longer for each step than it would. */
static void expect_slow(const char *by, const char *flags)
{
    ck_assert_int_eq(start(by, "slow forward", flags), 0);
    static const char warning[] = "small: warning: rank 1 on * computes * times as long as the others' median, * ms a step and not *, "
                                  "over 20 steps: all wait for it";
    ck_assert_msg(count_errors(warning) == 1, "%.900s", err_text);
    ck_assert_double_ge(summary("compute_ms", 1), 10);
    ck_assert_double_lt(summary("compute_ms", 0), 10);
    ck_assert_double_ge(summary("exposed_comm_ms", -1), 5); /* of rank 0, which waits for it */
}

START_TEST(test_a_slow_rank_is_named_once)
{
    expect_slow("", "--steps 70 --ranks 3");
    ck_assert_int_eq(start("", "none none", "--steps 70 --ranks 3"), 0);
    ck_assert_int_eq(count_errors("small: warning: *"), 0);
}
END_TEST

START_TEST(test_a_slow_rank_is_named_under_mpirun)
{
    NEEDS_MPI;
    expect_slow(FAULT_MPIRUN "-n 3", "--steps 70");
}
END_TEST

START_TEST(test_what_collectives_expose_is_in_every_line)
{
    char text[8192];
    ck_assert_int_eq(start("", "none none", "--steps 4 --ranks 2"), 0);
    read_text(SHELL_FOLDER "/out/metrics.jsonl", text, sizeof text);
    int lines = 0;
    for (const char *at = text; (at = strstr(at, "\"exposed_comm_ms\":")); lines++) ck_assert_double_gt(strtod(at += 18, NULL), 0);
    ck_assert_int_eq(lines, 4);
    ck_assert_double_gt(summary("exposed_comm_ms", -1), 0);
    ck_assert_double_lt(summary("exposed_comm_ms", -1), summary("step_ms", -1));
    ck_assert_int_eq(start("", "none none", "--steps 4"), 0);
    ck_assert_double_eq(summary("exposed_comm_ms", -1), 0);
}
END_TEST

int main(int argc, char **argv)
{
    if (fault_wanted()) return fault_program(argc, argv);
    const TTest *const tests[] = {
        test_a_rank_whose_data_is_not_a_number_is_named, test_a_rank_whose_gradient_is_not_a_number_is_named, test_it_is_named_under_mpirun,
        test_a_slow_rank_is_named_once, test_a_slow_rank_is_named_under_mpirun, test_what_collectives_expose_is_in_every_line,
    };
    return check_main("watch", tests, (int)(sizeof tests / sizeof tests[0]));
}
