/* --max-restarts: ranks of which one has died go on from the last checkpoint, as if nothing had been; what a restart cannot mend
 * ends the run, and where there is nothing to start again it is refused.
 */
#define SMALL_FOLDER "restart"
#define SHELL_FOLDER "restart"
#include "tests/fault_run.h"

enum { STEPS = 12 };

/* Rank 1 dies once after 5 and once after 9 updates, of each folder. */
static int start(const char *wanted, const char *flags)
{
    return sh(FAULT_ENVIRONMENT "export FAULT='%s'; timeout 60 '%s' --threads 1 --steps 12 --log-every 1 --timeout 5 %s", wanted,
              own_path(), flags);
}

static void expect_same_curve(const char *a, const char *b)
{
    double x[STEPS], y[STEPS];
    ck_assert_int_eq(read_losses(a, x, STEPS), STEPS);
    ck_assert_int_eq(read_losses(b, y, STEPS), STEPS);
    for (int i = 0; i < STEPS; i++) ck_assert_msg(x[i] == y[i], "step %d: %.17g, not %.17g", i + 1, y[i], x[i]);
    ck_assert_sh(0, "for out in %s %s; do grep -o '\"final_loss\":[^,]*' $out/summary.json; done | uniq | wc -l | grep -x 1", a, b);
}

#define KILLED "small: rank 1 was killed by signal 9 (Killed) * step *"

START_TEST(test_a_run_whose_rank_is_killed_twice_ends_as_one_that_ran_through)
{
    ck_assert_sh(0, "rm -rf one many died-at-*");
    ck_assert_int_eq(start("none none", "--ranks 3 --strategy fsdp --out one --save-every 4"), 0);
    ck_assert_int_eq(start("die forward", "--ranks 3 --strategy fsdp --out many --save-every 4 --max-restarts 2"), 0);
    ck_assert_int_eq(count_errors(KILLED ": restart 1 of 2, from step 4"), 1);
    ck_assert_int_eq(count_errors(KILLED ": restart 2 of 2, from step 8"), 1);
    ck_assert_int_eq(count_errors("small: *"), 2);
    expect_same_curve("one", "many");
}
END_TEST

START_TEST(test_it_is_started_again_so_often_and_no_more)
{
    ck_assert_sh(0, "rm -rf many died-at-*");
    ck_assert_int_eq(start("die forward", "--ranks 2 --out many --save-every 4 --max-restarts 1"), 1);
    ck_assert_int_eq(count_errors(KILLED ": restart 1 of 1, from step 4"), 1);
    ck_assert_int_eq(count_errors("small: *"), 2);
    ck_assert_sh(0, "rm -rf many died-at-*");
    ck_assert_int_eq(start("die forward", "--ranks 2 --out many --save-every 4"), 1);
    ck_assert_int_eq(count_errors("*restart*"), 0);
}
END_TEST

/* Nor does it go on from a checkpoint of another run, which the folder held before. */
START_TEST(test_without_a_checkpoint_it_starts_from_the_beginning)
{
    ck_assert_sh(0, "rm -rf one many died-at-*");
    ck_assert_int_eq(start("none none", "--ranks 2 --out one"), 0);
    ck_assert_int_eq(start("none none", "--ranks 2 --out many --seed 9"), 0);
    ck_assert_int_eq(start("die forward", "--ranks 2 --out many --max-restarts 2"), 0);
    ck_assert_int_eq(count_errors(KILLED ": restart 1 of 2, from the beginning"), 1);
    ck_assert_int_eq(count_errors(KILLED ": restart 2 of 2, from the beginning"), 1);
    expect_same_curve("one", "many");
    ck_assert_int_eq(start("kill start", "--ranks 2 --out many --max-restarts 1"), 1); /* before the other run has been moved aside */
    ck_assert_int_eq(count_errors("small: rank 1 was killed * before its first step: restart 1 of 1, from the beginning"), 1);
}
END_TEST

START_TEST(test_the_same_error_again_ends_it)
{
    ck_assert_sh(0, "rm -rf many");
    ck_assert_int_eq(start("nan data", "--ranks 2 --out many --max-restarts 5"), 1);
    ck_assert_int_eq(count_errors("small: step 1: the loss is nan: * restart 1 of 5, from the beginning"), 1);
    ck_assert_int_eq(count_errors("small: *"), 2);
}
END_TEST

START_TEST(test_a_disagreement_is_no_reason_to_start_again)
{
    ck_assert_sh(0, "rm -rf many");
    ck_assert_int_eq(start("skip start", "--ranks 2 --out many --max-restarts 5"), 1);
    ck_assert_int_eq(count_errors("small: ranks disagree: *"), 1);
    ck_assert_int_eq(count_errors("*restart*"), 0);
}
END_TEST

START_TEST(test_it_is_refused_where_there_is_nothing_to_start_again)
{
    ck_assert_int_eq(start("none none", "--ranks 2 --max-restarts 1"), 2);
    ck_assert_str_has(err_text, "small: --max-restarts needs --out DIR: ranks start again from its checkpoints\n");
    ck_assert_int_eq(start("none none", "--out many --max-restarts 1"), 2);
    ck_assert_str_has(err_text, "small: --max-restarts has no effect here: it is for --ranks 2 or more; leave it out\n");
}
END_TEST

START_TEST(test_it_is_refused_under_mpirun)
{
    NEEDS_MPI;
    int status = sh(FAULT_ENVIRONMENT "export FAULT='none none'; timeout 60 " FAULT_MPIRUN "-n 2 '%s' --out many --max-restarts 1",
                    own_path());
    ck_assert_int_ne(status, 0);
    ck_assert_str_has(err_text, "--max-restarts is for ranks that this program starts: let the launcher start them again, with --resume\n");
}
END_TEST

int main(int argc, char **argv)
{
    if (fault_wanted()) return fault_program(argc, argv);
    const TTest *const tests[] = {
        test_a_run_whose_rank_is_killed_twice_ends_as_one_that_ran_through,
        test_it_is_started_again_so_often_and_no_more,
        test_without_a_checkpoint_it_starts_from_the_beginning,
        test_the_same_error_again_ends_it,
        test_a_disagreement_is_no_reason_to_start_again,
        test_it_is_refused_where_there_is_nothing_to_start_again,
        test_it_is_refused_under_mpirun,
    };
    return check_main("restart", tests, (int)(sizeof tests / sizeof tests[0]));
}
