/* Tensor-parallel layers on the command line: a run that is saved under one layout goes on under any other, a signal to any rank stops
 * all, a plan says what is sent, and flags without use are refused.
 *
 * Labels: threads
 * Timeout: 300 s
 */
#define SHELL_FOLDER "tensor_cli"
#include "tests/shell.h"

#define SIZES "--layers 1 --heads 2 --width 16 --context 8 --batch 4 --dtype f64 --threads 1 --dropout 0.1 --ema 0.5 --tokenizer bytes "
#define CUT " --tensor-columns 'h.*.mlp.c_fc' --tensor-rows 'h.*.mlp.c_proj'"
#define CUT_BACK " --tensor-columns 'h.*.mlp.c_proj' --tensor-rows 'h.*.mlp.c_fc'"

static double final_loss(void)
{
    const char *at = strstr(out_text, "\"final_loss\":");
    ck_assert_ptr_nonnull(at);
    return strtod(at + strlen("\"final_loss\":"), NULL);
}

/* Moments of adamw are cut as their parameters are: a wrong element of any would change the second loss. */
START_TEST(test_a_run_goes_on_under_another_layout)
{
    static const char *const layouts[] = { "--ranks 1 --strategy single", "--ranks 2 --strategy ddp+tp:2" CUT,
                                           "--ranks 4 --strategy fsdp+tp:2" CUT, "--ranks 4 --strategy zero1+tp:4" CUT_BACK };
    enum { LAYOUTS = sizeof layouts / sizeof *layouts };
    ck_assert_sh(0, "rm -rf t* && seq 1 2000 >text");
    for (int from = 0; from < LAYOUTS; from++)
        ck_assert_sh(0, "\"$GPT\" train --data text " SIZES "--steps 2 --out t%d %s", from, layouts[from]);
    double want = 0;
    for (int from = 0; from < LAYOUTS; from++)
        for (int to = 0; to < LAYOUTS; to++) {
            if (!check_all() && from && to != (from + 1) % LAYOUTS) continue;
            ck_assert_sh(0, "rm -rf t && cp -r t%d t && \"$GPT\" train --data text --resume --out t --steps 4 --json %s", from,
                         layouts[to]);
            if (!from && !to) want = final_loss();
            ck_assert_msg(fabs(final_loss() - want) <= 1e-10 * want, "from %s to %s: %.17g, not %.17g", layouts[from], layouts[to],
                          final_loss(), want);
        }
}
END_TEST

START_TEST(test_a_signal_to_one_of_those_that_share_rows_stops_all)
{
    ck_assert_sh(0, "rm -rf s && seq 1 2000 >text");
    ck_assert_sh(0, "\"$GPT\" train --data text " SIZES "--steps 1000000 --out s --ranks 2 --strategy ddp+tp:2" CUT " & "
                    "for i in $(seq 300); do grep -q '\"step\":1,' s/metrics.jsonl 2>/dev/null && break; sleep 0.1; done; "
                    "kill -INT $(pgrep -P $! | tail -1); wait $!");
    ck_assert_sh(0, "ls s/checkpoints/step-*/manifest.json");
}
END_TEST

START_TEST(test_a_plan_says_what_is_sent)
{
    ck_assert_sh(0, "\"$GPT\" plan --layers 2 --heads 2 --width 32 --context 16 --vocabulary 64 --batch 4 --world 4 "
                    "--strategy ddp+tp:2" CUT);
    ck_assert_str_has(out_text, "ddp+tp:2 on 4 ranks, batch 4 (2 rows a rank)");
    ck_assert_str_has(out_text, "all_reduce");
}
END_TEST

START_TEST(test_flags_without_use_are_refused)
{
    ck_assert_sh(2, "\"$GPT\" plan --world 4 --strategy ddp" CUT);
    ck_assert_str_has(err_text, "--tensor-columns has no effect here");
    ck_assert_sh(2, "\"$GPT\" plan --world 4 --strategy ddp+tp:2");
    ck_assert_str_has(err_text, "strategy 'ddp+tp:2' says that 2 ranks share layers, but not which");
    ck_assert_sh(2, "\"$GPT\" plan --world 4 --batch 3 --strategy ddp+tp:2" CUT);
    ck_assert_str_has(err_text, "--batch 3 does not divide by 2 groups x 1 micro-batch: 2 or 4 would");
}
END_TEST

TESTS("tensor_cli", test_a_run_goes_on_under_another_layout, test_a_signal_to_one_of_those_that_share_rows_stops_all,
      test_a_plan_says_what_is_sent, test_flags_without_use_are_refused)
