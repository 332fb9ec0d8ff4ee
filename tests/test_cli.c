/* The command line as a user meets it: build/bin/mlp on small IDX files. Every mistake gives one clear line and the
 * right exit status, and what was saved before is still there.
 * Timeout: 600 s
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/json.h"
#include "tests/shell.h"

/* ---- Data ------------------------------------------------------------------------------------------------- */

enum { SIDE = 4, TRAIN = 240, TEST = 60 };

static void put_header(FILE *to, unsigned magic, const unsigned *sizes, int count)
{
    unsigned words[4] = { magic };
    for (int i = 0; i < count; i++) words[i + 1] = sizes[i];
    for (int i = 0; i <= count; i++)
        for (int shift = 24; shift >= 0; shift -= 8) fputc((int)(words[i] >> shift & 255), to);
}

/* Images of class c have one bright row or column and some noise. */
static void put_images(const char *dir, const char *prefix, unsigned count)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s-images-idx3-ubyte", dir, prefix);
    FILE *images = fopen(path, "w");
    snprintf(path, sizeof path, "%s/%s-labels-idx1-ubyte", dir, prefix);
    FILE *labels = fopen(path, "w");
    ck_assert(images && labels);
    put_header(images, 0x803, (unsigned[]){ count, SIDE, SIDE }, 3);
    put_header(labels, 0x801, (unsigned[]){ count }, 1);
    for (unsigned i = 0; i < count; i++) {
        unsigned class = i % 8;
        fputc((int)class, labels);
        for (unsigned p = 0; p < SIDE * SIDE; p++) {
            bool bright = class < 4 ? p / SIDE == class : p % SIDE == class - 4;
            fputc((int)((bright ? 180 : 20) + (i * 31 + p * 17) % 40), images);
        }
    }
    fclose(images);
    fclose(labels);
}

static void enter(void)
{
    static bool entered;
    if (entered) return;
    mkdir("test_cli_files", 0777);
    ck_assert_int_eq(chdir("test_cli_files"), 0);
    mkdir("data", 0777);
    put_images("data", "train", TRAIN);
    put_images("data", "t10k", TEST);
    entered = true;
}

/* A small model that trains in no time; what every command below begins with. */
#define SMALL "$MLP train --data $DATA --hidden 16 --batch 24 --threads 2 --log-every 1 "

/* A number of DIR/summary.json: "params", or "accuracy" of its "eval". */
static double summary_number(const char *path, const char *group, const char *name)
{
    td_context *td = open_cpu(TD_F32);
    td_json_document *document = td_json_read(td, path);
    ck_assert_no_error(td);
    const td_json *object = td_json_root(document);
    if (group) object = td_json_get(object, group);
    const td_json *number = td_json_get(object, name);
    ck_assert_msg(number && number->kind == TD_JSON_NUMBER, "%s has no number \"%s\"", path, name);
    double value = number->number;
    td_json_close(document);
    td_close(td);
    return value;
}

/* ---- What works ------------------------------------------------------------------------------------------- */

START_TEST(test_training_leaves_its_files)
{
    enter();
    ck_assert_sh(0, SMALL "--steps 3 --optimizer adagrad");
    ck_assert_sh(0, SMALL "--steps 3 --optimizer lion --freeze 'net.0.*,net.3.bias'");
    ck_assert_sh(0, "rm -rf a; " SMALL "--epochs 10 --optimizer adam --lr 0.01 --out a");
    ck_assert(summary_number("a/summary.json", "eval", "accuracy") > 0.9);
    ck_assert(summary_number("a/summary.json", NULL, "final_loss") <
              summary_number("a/summary.json", NULL, "first_loss"));
    ck_assert_double_eq(summary_number("a/summary.json", NULL, "params"), 16 * 16 + 16 + 16 * 10 + 10);
    ck_assert_double_eq(summary_number("a/summary.json", NULL, "steps"), 100);
    ck_assert_double_eq(summary_number("a/summary.json", NULL, "world"), 1);
    double peak = summary_number("a/summary.json", NULL, "peak_bytes"),
           planned = summary_number("a/summary.json", NULL, "planned_peak_bytes");
    ck_assert_msg(fabs(peak - planned) <= 0.01 * planned, "peak %g, planned %g", peak, planned);
    double losses[100];
    ck_assert_int_eq(read_losses("a", losses, 100), 100);
    ck_assert_double_eq(losses[99], summary_number("a/summary.json", NULL, "final_loss"));
    ck_assert_sh(0, "test -s a/config.json && test -s a/loss.gnuplot && test -s a/checkpoints/step-100/manifest.json");
    if (sh("command -v gnuplot") == 0) ck_assert_sh(0, "test -s a/loss.png");
}
END_TEST

START_TEST(test_eval_reads_the_checkpoint_and_its_flags)
{
    enter();
    ck_assert_sh(0, "rm -rf b; " SMALL "--epochs 3 --out b && $MLP eval --out b --json");
    ck_assert_str_has(err_text, "eval at step 30");
    ck_assert_sh(0, "$MLP eval --out b --json >eval.json");
    ck_assert_double_eq(summary_number("eval.json", "eval", "accuracy"),
                        summary_number("b/summary.json", "eval", "accuracy"));
    ck_assert_double_eq(summary_number("eval.json", "eval", "loss"), summary_number("b/summary.json", "eval", "loss"));
    /* of a part of the data: of the same part */
    ck_assert_sh(0, "rm -rf b; " SMALL "--steps 3 --dtype f64 --accumulate 2 --eval-batches 1 --out b && "
                    "$MLP eval --out b --json >eval.json && $MLP eval --out b --eval-batches 2 --json >more.json");
    double part = summary_number("eval.json", "eval", "loss"), trained = summary_number("b/summary.json", "eval", "loss");
    ck_assert_near(&part, &trained, 1, 1e-12); /* sums in another order */
    ck_assert(fabs(summary_number("more.json", "eval", "loss") - part) > 1e-6);
}
END_TEST

START_TEST(test_a_model_that_can_learn_overfits_a_batch)
{
    enter();
    ck_assert_sh(0, "rm -rf over; " SMALL "--ranks 2 --steps 300 --lr 0.01 --overfit-batch --out over");
    ck_assert_str_has(out_text, "batch 24, steps 1 to 300, on the first batch alone (--overfit-batch)");
    ck_assert(summary_number("over/summary.json", NULL, "first_loss") > 1);
    ck_assert(summary_number("over/summary.json", NULL, "final_loss") < 0.01);
    ck_assert(summary_number("over/summary.json", "eval", "loss") < 0.01);
    ck_assert_double_eq(summary_number("over/summary.json", "eval", "accuracy"), 1);
}
END_TEST

START_TEST(test_ranks_stop_early_together)
{
    enter();
    ck_assert_sh(0, "rm -rf early; " SMALL "--ranks 2 --steps 1000 --optimizer sgd --lr 1e-30 --eval-every 2 --stop-after 3 "
                    "--out early");
    ck_assert_str_has(out_text, "stopped early at step 8: the evaluation was best, loss ");
    ck_assert_str_has(out_text, ", at step 2; a larger --stop-after goes on\n");
    ck_assert_sh(0, "grep '\"stopped_early\":true' early/summary.json && test -s early/checkpoints/step-8/manifest.json");
}
END_TEST

/* A rate far too high after 20 updates: the best evaluation is not the last. */
START_TEST(test_eval_reads_the_best_checkpoint)
{
    enter();
    ck_assert_sh(0, "rm -rf best; " SMALL "--steps 20 --lr 0.01 --eval-every 5 --keep 1 --keep-best --out best && "
                    "$MLP train --resume --out best --steps 40 --lr 100 --schedule constant && ls best/checkpoints");
    ck_assert_str_has(out_text, "\nstep-20\nstep-40\n");
    ck_assert_sh(0, "$MLP eval --out best --best --json >eval.json");
    ck_assert_str_has(err_text, "eval at step 20");
    ck_assert(summary_number("eval.json", "eval", "loss") < summary_number("best/summary.json", "eval", "loss"));
    ck_assert_sh(0, "$MLP eval --out best --json >eval.json");
    ck_assert_str_has(err_text, "eval at step 40");
    ck_assert_sh(1, "rm -r best/checkpoints/step-20; $MLP eval --out best --best");
    ck_assert_str_eq(err_text, "mlp: best/checkpoints/step-40: says that step-20 was the best, which is no longer there: "
                               "train with --keep-best\n");
    ck_assert_sh(1, "rm -rf best; " SMALL "--steps 2 --out best && sed -i 's/\"best_step\":2/\"best_step\":-1/' "
                    "best/checkpoints/step-2/manifest.json && $MLP eval --out best --best");
    ck_assert_str_has(err_text, "knows of no evaluation: --best is for a run trained with --eval-every");
}
END_TEST

/* A run with --ema is evaluated by its averages, wherever that is done; the model trained is the same. */
START_TEST(test_eval_takes_the_averages_of_a_run_that_has_them)
{
    enter();
    ck_assert_sh(0, "rm -rf averaged plain; " SMALL "--steps 9 --lr 0.02 --ema 0.9 --out averaged --ranks 2 --strategy fsdp");
    double during = summary_number("averaged/summary.json", "eval", "loss"), without, after;
    ck_assert_sh(0, "$MLP eval --data $DATA --out averaged --json > eval.json");
    after = summary_number("eval.json", "eval", "loss");
    ck_assert(fabs(after - during) < 1e-5 * during);
    ck_assert_sh(0, SMALL "--steps 9 --lr 0.02 --out plain --ranks 2 --strategy fsdp");
    without = summary_number("plain/summary.json", "eval", "loss");
    ck_assert(fabs(without - during) > 1e-3 * during);
    ck_assert(summary_number("plain/summary.json", NULL, "final_loss") == summary_number("averaged/summary.json", NULL, "final_loss"));
}
END_TEST

START_TEST(test_json_is_all_there_is_on_stdout)
{
    enter();
    ck_assert_sh(0, SMALL
                 "--steps 5 --json >train.json && $MLP bench --hidden 16 --batch 8 --steps 3 --json >bench.json && "
                 "$MLP plan --hidden 16 --batch 8 --json >plan.json");
    ck_assert(summary_number("train.json", NULL, "final_loss") > 0);
    ck_assert(summary_number("bench.json", NULL, "step_ms") > 0);
    ck_assert(summary_number("plan.json", NULL, "planned_peak_bytes") > 0);
}
END_TEST

START_TEST(test_ranks_and_accumulation_follow_one_curve)
{
    enter();
    double one[8], other[8];
    ck_assert_sh(0, "rm -rf one; " SMALL "--dtype f64 --dropout 0.2 --clip 1 --steps 8 --out one");
    ck_assert_int_eq(read_losses("one", one, 8), 8);
    static const char *const ways[] = { "--ranks 2 --bucket-bytes 2000", "--ranks 2 --strategy fsdp --accumulate 2 --reshard-after-forward no",
                                        "--ranks 3 --accumulate 2 --strategy zero1", "--ranks 3 --strategy zero2 --accumulate 2",
                                        "--ranks 2 --strategy zero3 --unit-elements 100 --whole-elements 0 --prefetch 2 --accumulate 2",
                                        "--ranks 4 --strategy hsdp:2x2 --accumulate 2", "--offload all",
                                        "--ranks 3 --strategy fsdp --offload all --ema 0.9", "--ranks 2 --strategy zero1 --offload optimizer" };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        ck_assert_sh(0, "rm -rf other; " SMALL "--dtype f64 --dropout 0.2 --clip 1 --steps 8 --out other %s", ways[i]);
        ck_assert_int_eq(read_losses("other", other, 8), 8);
        ck_assert_near(other, one, 8, 1e-10); /* sums in another order */
        ck_assert_sh(0, "test $(ls other | grep -c tfevents) -eq 1"); /* the first rank's */
    }
}
END_TEST

/* A limit that the 2-norm is above in each step and the largest gradient in most. */
START_TEST(test_clipping_by_the_largest_gradient_follows_one_curve)
{
    enter();
    double one[8], other[8], squares[8];
    ck_assert_sh(0, "rm -rf one; " SMALL "--dtype f64 --optimizer sgd --lr 0.1 --clip 0.02 --clip-norm inf --steps 8 --out one");
    ck_assert_sh(0, "rm -rf other; " SMALL "--dtype f64 --optimizer sgd --lr 0.1 --clip 0.02 --clip-norm 2 --steps 8 --out other");
    ck_assert_int_eq(read_losses("one", one, 8), 8);
    ck_assert_int_eq(read_losses("other", squares, 8), 8);
    ck_assert(fabs(one[7] - squares[7]) > 1e-4 * one[7]);
    static const char *const ways[] = { "--ranks 2 --strategy fsdp", "--ranks 3 --strategy zero2 --accumulate 2", "--ranks 4 --strategy hsdp:2x2" };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        ck_assert_sh(0, "rm -rf other; " SMALL "--dtype f64 --optimizer sgd --lr 0.1 --clip 0.02 --clip-norm inf --steps 8 --out other %s", ways[i]);
        ck_assert_int_eq(read_losses("other", other, 8), 8);
        ck_assert_near(other, one, 8, 1e-10);
    }
}
END_TEST

START_TEST(test_a_checkpoint_goes_on_in_any_world)
{
    enter();
    double whole[9], parts[9];
    ck_assert_sh(0, "rm -rf whole parts; " SMALL "--dtype f64 --steps 9 --out whole");
    ck_assert_sh(0, SMALL "--dtype f64 --steps 2 --schedule-steps 9 --out parts --ranks 3 --strategy fsdp");
    static const char *const worlds[] = { "--ranks 2 --strategy ddp --offload optimizer", "--ranks 3 --strategy zero1 --offload all",
                                          "--ranks 4 --strategy hsdp:2x2 --offload none", "--ranks 2 --strategy zero3",
                                          "--ranks 4 --strategy zero2",                   "--ranks 3 --strategy hsdp:1x3 --offload parameters",
                                          "--ranks 1 --strategy single --offload none" };
    for (int i = 0; i < 7; i++) ck_assert_sh(0, "$MLP train --resume --out parts --steps %d %s", 3 + i, worlds[i]);
    ck_assert_int_eq(read_losses("whole", whole, 9), 9);
    ck_assert_int_eq(read_losses("parts", parts, 9), 9);
    ck_assert_near(parts, whole, 9, 1e-10);
}
END_TEST

START_TEST(test_killed_at_any_point_it_resumes_to_the_bit)
{
    enter();
    static double whole[600], parts[600];
    const char *flags = "--dropout 0.1 --accumulate 2 --steps 600 --save-every 7 --seed 4";
    ck_assert_sh(0, "rm -rf whole parts; " SMALL "%s --out whole", flags);
    ck_assert_sh(0,
                 SMALL "%s --out parts & pid=$!; while kill -0 $pid && ! ls parts/checkpoints/step-*/manifest.json; do "
                       "sleep 0.01; done; "
                       "sleep 0.1; kill -9 $pid; wait $pid; test $? -eq 137",
                 flags);
    ck_assert_sh(0, "$MLP train --resume --out parts");
    ck_assert_int_eq(read_losses("whole", whole, 600), 600);
    ck_assert_int_eq(read_losses("parts", parts, 600), 600);
    ck_assert_near(parts, whole, 600, 0);
}
END_TEST

START_TEST(test_a_signal_saves_and_ends_well)
{
    enter();
    static const char *const ways[] = { "", "--ranks 2" };
    for (int i = 0; i < 2; i++) {
        ck_assert_sh(0,
                     "rm -rf stopped; " SMALL "--steps 1000000 --out stopped %s >said.txt & pid=$!; "
                     "while kill -0 $pid && ! test -s stopped/metrics.jsonl; do sleep 0.01; done; sleep 0.2; kill "
                     "-TERM $pid; wait $pid",
                     ways[i]);
        ck_assert_sh(0,
                     "grep 'stopped by a signal after step' said.txt && ls stopped/checkpoints/step-*/manifest.json");
    }
}
END_TEST

/* Waits until DIR/metrics.jsonl has a line: updates are made. */
#define UNTIL_IT_TRAINS(dir) "while kill -0 $pid && ! test -s " dir "/metrics.jsonl; do sleep 0.01; done; "

START_TEST(test_a_signal_saves_and_training_goes_on)
{
    enter();
    static const char *const ways[] = { "", "--ranks 2", "--ranks 3 --strategy fsdp" };
    for (int i = 0; i < 3; i++) {
        ck_assert_sh(0,
                     "rm -rf asked; " SMALL "--steps 1000000 --save-every 1000000 --out asked %s >said.txt & pid=$!; "
                     UNTIL_IT_TRAINS("asked") "kill -USR1 $pid; "
                     "while kill -0 $pid && ! grep 'saved on a signal' said.txt; do sleep 0.01; done; "
                     "cp -r asked/checkpoints asked/then; sleep 0.2; kill -TERM $pid; wait $pid && "
                     "test $(ls asked/checkpoints | wc -l) -eq 2 && test $(grep -c 'saved on a signal' said.txt) -eq 1",
                     ways[i]);
        ck_assert_sh(0, "rm -r asked/checkpoints && mv asked/then asked/checkpoints && $MLP eval --out asked");
    }
    ck_assert_sh(0, "rm said.txt; " SMALL "--steps 1000000 >said.txt & pid=$!; "
                    "while ! test -s said.txt; do sleep 0.01; done; kill -USR1 $pid; "
                    "while kill -0 $pid && ! grep 'nothing is saved without --out' said.txt; do sleep 0.01; done; "
                    "kill -TERM $pid; wait $pid");
}
END_TEST

/* Signals come all the while; the last one in the middle of a save: .step-N is there. The checkpoint is whole. */
START_TEST(test_signals_in_the_middle_of_a_save_leave_it_whole)
{
    enter();
    static const char *const ways[] = { "", "--ranks 2", "--ranks 2 --strategy fsdp" };
    for (int i = 0; i < 3; i++) {
        ck_assert_sh(0,
                     "rm -rf mid; $MLP train --data $DATA --hidden 1024,1024 --batch 24 --threads 2 --steps 1000000 "
                     "--save-every 1 --out mid %s >said.txt & pid=$!; " UNTIL_IT_TRAINS("mid")
                     "for i in 1 2 3 4 5 6 7 8; do kill -USR1 $pid; sleep 0.02; done; "
                     "while kill -0 $pid && ! ls -d mid/checkpoints/.step-*; do :; done; kill -TERM $pid; wait $pid && "
                     "grep 'stopped by a signal after step' said.txt && ! ls -d mid/checkpoints/.step-* && "
                     "$MLP eval --out mid",
                     ways[i]);
        ck_assert_sh(0, "grep 'stopped by a signal after step' said.txt | sed 's/.*step \\([0-9]*\\).*/\\1/' >step.txt && "
                        "test -s mid/checkpoints/step-$(cat step.txt)/manifest.json");
    }
    ck_assert_sh(0, "rm -rf mid");
}
END_TEST

START_TEST(test_an_evaluation_due_when_a_signal_comes_is_made)
{
    enter();
    ck_assert_sh(0,
                 "rm -rf due; " SMALL "--steps 1000000 --eval-every 1 --ranks 2 --out due & pid=$!; "
                 "while kill -0 $pid && ! test -s due/metrics.jsonl; do sleep 0.01; done; kill -TERM $pid; wait $pid; "
                 "tail -n 1 due/metrics.jsonl | grep '\"eval\":{\"loss\"'");
}
END_TEST

START_TEST(test_what_does_not_train_ends_at_a_signal)
{
    enter();
    ck_assert_sh(143, "$MLP bench --hidden 16 --batch 8 --steps 100000000 & pid=$!; "
                      "sleep 0.3; kill -TERM $pid; wait $pid");
}
END_TEST

/* Its process may be killed between the last checkpoint and the summary. */
START_TEST(test_a_run_that_is_done_gets_the_summary_it_lacks)
{
    enter();
    ck_assert_sh(0, "rm -rf sum; " SMALL "--steps 3 --out sum");
    double loss = summary_number("sum/summary.json", NULL, "final_loss"),
           first = summary_number("sum/summary.json", NULL, "first_loss"),
           ms = summary_number("sum/summary.json", NULL, "step_ms");
    ck_assert_sh(0, "cp sum/config.json config.was; $MLP train --resume --out sum --steps 2 && "
                    "cmp config.was sum/config.json");
    ck_assert_str_has(out_text, "nothing to do: step 3 of 2 is done");
    ck_assert_ptr_null(strstr(out_text, "going on"));
    ck_assert_double_eq(summary_number("sum/summary.json", NULL, "step_ms"), ms); /* it stands */
    ck_assert_sh(0, "rm sum/summary.json; $MLP train --resume --out sum");
    ck_assert_double_eq(summary_number("sum/summary.json", NULL, "final_loss"), loss);
    ck_assert_double_eq(summary_number("sum/summary.json", NULL, "first_loss"), first);
    ck_assert(summary_number("sum/summary.json", "eval", "accuracy") >= 0);
}
END_TEST

START_TEST(test_who_reads_the_output_does_not_decide_over_the_run)
{
    enter();
    ck_assert_sh(0, "rm -rf pipe; { " SMALL "--steps 200 --out pipe; echo $? >pipe.status; } | head -n 1");
    ck_assert_sh(0, "test $(cat pipe.status) -eq 0 && test -s pipe/checkpoints/step-200/manifest.json");
    ck_assert_sh(0, SMALL "--steps 5 >/dev/full");
    /* more lines than a pipe holds, and nobody reads for longer than ranks wait */
    ck_assert_sh(0, "{ " SMALL "--steps 2000 --ranks 2 --timeout 1.5; echo $? >pipe.status; } | "
                    "{ sleep 3; tail -n 1; }; test $(cat pipe.status) -eq 0");
}
END_TEST

START_TEST(test_planning_takes_no_memory_for_data)
{
    enter();
    ck_assert_sh(0, "$MLP plan --hidden 4 --batch 100000000 --json >plan.json"); /* 300 GB of images */
    ck_assert_double_eq(summary_number("plan.json", NULL, "batch"), 1e8);
    ck_assert_sh(0, "$MLP plan --task regress --hidden 4 --batch 8192 --accumulate 2 && "
                    "$MLP bench --task regress --hidden 4 --batch 8192 --steps 2 --json >bench.json");
    ck_assert_double_eq(summary_number("bench.json", NULL, "steps"), 2);
}
END_TEST

START_TEST(test_ranks_that_are_only_planned_are_on_no_host)
{
    enter();
    ck_assert_sh(0, "$MLP plan --hidden 16 --world 64 --strategy fsdp --batch 64");
    ck_assert_str_has(out_text, "fsdp on 64 ranks");
    ck_assert(!strstr(out_text, "world:") && !strstr(err_text, "world:"));
}
END_TEST

/* Once, not by each rank, which an error of a rank's would be named after. */
START_TEST(test_ranks_without_gpus_are_not_started)
{
    ck_assert_sh(1, "CUDA_VISIBLE_DEVICES= $MLP bench --device cuda --ranks 2 --hidden 8 --batch 8");
    ck_assert_str_has(err_text, "mlp: 2 ranks have no GPU: td_open: device 'cuda' cannot be had: ");
    ck_assert_int_eq(count_of(err_text, "\n"), 1);
    ck_assert_str_eq(out_text, "");
}
END_TEST

START_TEST(test_an_evaluation_is_told_after_its_update)
{
    enter();
    ck_assert_sh(0, SMALL "--steps 2 --eval-every 1");
    const char *step = strstr(out_text, "step 1/2"), *evaluation = strstr(out_text, "eval at step 1");
    ck_assert(step && evaluation && step < evaluation);
}
END_TEST

START_TEST(test_help_lists_the_flags_of_a_command)
{
    enter();
    ck_assert_sh(0, "$MLP train --help");
    ck_assert_str_has(out_text, "--save-every N");
    ck_assert_str_has(out_text, "--hidden N,N,...");
    ck_assert_sh(0, "$MLP plan --help");
    ck_assert_str_has(out_text, "--world N");
    ck_assert_msg(!strstr(out_text, "--resume"), "plan has no --resume");
    ck_assert_sh(0, "$MLP --help");
}
END_TEST

/* On a terminal one line is redrawn and fits its width. */
START_TEST(test_progress_fits_the_terminal)
{
    enter();
    int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    if (terminal < 0) SKIP("no pseudo terminal can be had here");
    ck_assert_int_eq(grantpt(terminal) | unlockpt(terminal), 0);
    struct winsize size = { .ws_row = 24, .ws_col = 60 };
    ck_assert_int_eq(ioctl(terminal, TIOCSWINSZ, &size), 0);
    int other = open(ptsname(terminal), O_RDWR | O_NOCTTY); /* so that the end of the program does not hang up */
    char command[512];
    snprintf(command, sizeof command, "MLP='%s/mlp'; DATA=data; " SMALL "--steps 400 >'%s' 2>&1", TANDEM_BIN,
             ptsname(terminal));
    pid_t child = fork();
    if (child == 0) {
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    static char text[1 << 16];
    size_t bytes = 0;
    while (bytes < sizeof text - 1 && !memmem(text, bytes, "400/400", 7)) {
        ssize_t n = read(terminal, text + bytes, sizeof text - 1 - bytes);
        if (n <= 0) break;
        bytes += (size_t)n;
    }
    text[bytes] = 0;
    int status;
    kill(child, SIGCONT);
    fcntl(terminal, F_SETFL, O_NONBLOCK);
    while (waitpid(child, &status, WNOHANG) == 0) {
        char rest[512];
        if (read(terminal, rest, sizeof rest) <= 0) usleep(1000);
    }
    close(other);
    close(terminal);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    ck_assert_str_has(text, "items/s");
    for (char *line = strstr(text, "\r\033[K"); line; line = strstr(line + 4, "\r\033[K")) {
        size_t width = strcspn(line + 4, "\r\n");
        ck_assert_msg(width < 60 || line[4 + width] == '\n', "a line of %zu columns", width);
    }
}
END_TEST

/* ---- What does not ---------------------------------------------------------------------------------------- */

typedef struct mistake {
    int status;
    const char *command;
    const char *says;             /* part of the one line on stderr */
} mistake;

static void check_mistakes(const mistake *m, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        int status = sh("%s", m[i].command);
        ck_assert_msg(status == m[i].status, "%s: status %d, not %d: %s", m[i].command, status, m[i].status, err_text);
        ck_assert_msg(strstr(err_text, m[i].says) != NULL, "%s: \"%s\" does not say \"%s\"", m[i].command, err_text,
                      m[i].says);
        char *end = strchr(err_text, '\n');
        ck_assert_msg(end && !end[1], "%s: not one line: \"%s\"", m[i].command, err_text);
    }
}
#define CHECK_MISTAKES(...) \
    check_mistakes((const mistake[]){ __VA_ARGS__ }, sizeof((const mistake[]){ __VA_ARGS__ }) / sizeof(mistake))

/* An optimizer that no step has met is the program's to close; an example that ends at once leaves it to the system. */
#define CLASSIFIER "$EXAMPLES/classifier "

START_TEST(test_wrong_usage_is_one_line_and_status_2)
{
    enter();
    CHECK_MISTAKES(
        { 2, "$MLP", "a command comes first" },
        { 2, "$MLP tarin", "'tarin' is no command" },
        { 2, "$MLP train --data $DATA --stpes 3", "did you mean --steps?" },
        { 2, "$MLP train --data $DATA --steps", "--steps needs a value" },
        { 2, "$MLP train --data $DATA --batch 0", "--batch takes a whole number of at least 1" },
        { 2, "$MLP train --data $DATA --batch -8", "not '-8'" },
        { 2, "$MLP train --data $DATA --lr zero", "--lr takes a number above 0, not 'zero'" },
        { 2, "$MLP train --data $DATA --lr=-1", "not '-1'" },
        { 2, "$MLP train --data $DATA --epochs 1.5", "not '1.5'" },
        { 2, "$MLP train --data $DATA --ranks 1000", "at most 256" },
        { 2, "$MLP train --data $DATA --dtype f31", "--dtype takes one of f32|bf16|f16|fp8|f64" },
        { 2, "$MLP train --data $DATA more", "'more' stands where a flag should" },
        { 2, "$MLP train --data $DATA --steps 1 --epochs 1", "give one of them" },
        { 2, "$MLP train --data $DATA --resume", "--resume needs --out" },
        { 2, "$MLP train", "--data is needed" },
        { 2, "$MLP eval", "eval needs --out" },
        { 2, "$MLP train --data $DATA --batch 10 --accumulate 3", "9 or 12 would" },
        { 2, "$MLP train --data $DATA --batch 10 --ranks 4", "8 or 12 would" },
        { 2, "$MLP train --data $DATA --batch 2 --ranks 2 --accumulate 2", "4 would" },
        { 2, "$MLP train --data $DATA --batch 241", "more than the 240 samples" },
        { 2, "$MLP train --data $DATA --batch 242 --ranks 2", "more than the 240 samples" },
        { 2, "$MLP train --data $DATA --strategy zero9", "zero9" },
        { 2, "$MLP train --data $DATA --batch 24 --ranks 2 --strategy single", "single" },
        { 2, "$MLP train --data $DATA --batch 24 --ranks 2 --strategy fsdp --units 'layer.*'", "layer.*" },
        { 2, "$MLP train --data $DATA --units net --steps 2", "--units has no effect here: it is for --strategy fsdp or hsdp" },
        { 2, "$MLP train --data $DATA --batch 24 --ranks 2 --strategy fsdp --bucket-bytes 100", "it is for --strategy ddp, zero1 or zero2" },
        { 2, "$MLP train --data $DATA --batch 24 --ranks 2 --strategy zero2 --unit-elements 9", "it is for --strategy zero3" },
        { 2, "$MLP train --data $DATA --batch 24 --ranks 2 --strategy hsdp:2x1 --whole-elements 9", "it is for --strategy zero3" },
        { 2, "$MLP train --data $DATA --batch 24 --ranks 2 --reshard-after-forward no", "it is for --strategy fsdp or hsdp" },
        { 2, "$MLP train --data $DATA --batch 24 --ranks 2 --strategy zero1 --prefetch 2", "it is for --strategy zero3, fsdp or hsdp" },
        { 2, "$MLP train --data $DATA --reduce-dtype bf16", "--reduce-dtype has no effect here: it is for --ranks 2 or more" },
        { 2, "$MLP bench --batch 24 --machine h200x8", "--machine has no effect here: it is for --rehearse true" },
        { 2, "$MLP bench --batch 24 --ranks 2 --rehearse", "--rehearse needs --machine NAME" },
        { 2, "$MLP bench --batch 24 --rehearse --machine h200x8", "--rehearse needs --ranks N, 2 or more" },
        { 2, "$MLP bench --batch 24 --ranks 2 --rehearse --machine h3", "--machine 'h3' is not known" },
        { 2, "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=4 $MLP bench --batch 24 --rehearse --machine h200x8",
          "--rehearse runs one rank alone" },
        { 2, "$MLP train --data $DATA --ranks 2 --rehearse", "--rehearse is no flag of 'mlp train'" },
        { 2, "$MLP train --data $DATA --batch 24 --ranks 4 --strategy hsdp:2x3", "strategy 'hsdp:2x3' is for 6 ranks" },
        { 2, "$MLP train --data $DATA --ranks 2 --batch 24 --units net", "--units has no effect here" },
        { 2, "$MLP train --data $DATA --scale 2", "--scale is for a table (CSV)" },
        { 2, "$MLP train --data $DATA --target 1", "--target is for a table (CSV)" },
        { 2, "$MLP train --task regress --data $DATA", "--data has no effect with --task regress" },
        { 2, "$MLP train --task regress --scale 2", "--scale has no effect with --task regress" },
        { 2, "$MLP train --data $DATA --momentum 0.5", "--momentum has no effect here: it is for --optimizer sgd" },
        { 2, "$MLP train --data $DATA --freeze 'nothing.*'", "'nothing.*' fits no parameter" },
        { 2, "$MLP train --data $DATA --schedule constant --final-lr 1", "--final-lr has no effect here" },
        { 2, "$MLP train --data $DATA --steps 5 --warmup 6", "--warmup 6 is more than the 5 updates" },
        { 2, "$MLP train --data $DATA --batch 10 --accumulate 3", "1 rank x 3 micro-batches: 9" },
        { 2, "$MLP eval --out b --overfit-batch", "--overfit-batch is no flag of 'mlp eval'" },
        { 2, "$MLP train --data $DATA --stop-after 3", "--stop-after needs --eval-every" },
        { 2, "$MLP train --data $DATA --keep 2", "--keep needs --out" },
        { 2, "$MLP train --data $DATA --keep-best --out c", "--keep-best needs --eval-every" },
        { 2, "$MLP train --data $DATA --best", "--best is no flag of 'mlp train'" },
        { 2, CLASSIFIER, "--data is needed" },
        { 2, CLASSIFIER "stray --data $DATA", "'stray' stands where a flag should" },
        { 2, CLASSIFIER "--data $DATA --eval-every 2", "--eval-every has nothing to evaluate on" },
        { 2, "$MLP train --config no-such.json", "no-such.json" },
        { 2, "echo '{\"bacth\": 3}' >bad.json; $MLP train --config bad.json", "bad.json: unknown flag --bacth" },
        { 2, "echo '{\"batch\": ' >bad.json; $MLP train --config bad.json", "bad.json" });
}
END_TEST

START_TEST(test_runs_are_compared_in_one_picture)
{
    enter();
    ck_assert_sh(0, "rm -rf r_1 \"it's\" sub new cmp; mkdir sub; " SMALL "--steps 4 --eval-every 2 --out r_1 && " SMALL
                    "--steps 3 --lr 0.25 --hidden 8,8 --out \"it's\" && " SMALL "--steps 2 --keep 2 --out sub/r_1");
    ck_assert_sh(0, "printf '{\"step\": 5, \"lo' >>r_1/metrics.jsonl"); /* as a crash leaves it */
    bool has_gnuplot = sh("command -v gnuplot") == 0;
    ck_assert_sh(has_gnuplot ? 0 : 1, "$MLP plot --plot \"r_1,it's/\" --out cmp && test -s cmp/compare.png");
    ck_assert_sh(0, "cat cmp/compare.gnuplot");
    ck_assert_str_has(out_text, "title 'r_1 (steps 4, lr 0.001, hidden 16)', ");
    ck_assert_str_has(out_text, "title 'r_1: evaluation', ");
    ck_assert_str_has(out_text, "title 'it''s (steps 3, lr 0.25, hidden 8,8)', ");
    ck_assert_sh(0, "sed -n '/^.training0/,/^EOD/p' cmp/compare.gnuplot | grep -c '^[1-4] [0-9.]*$'");
    ck_assert_str_eq(out_text, "4\n");
    ck_assert_sh(0, "sed -n '/^.evaluation0/,/^EOD/p' cmp/compare.gnuplot | cut -d' ' -f1 | tr '\\n' ' '");
    ck_assert_str_eq(out_text, "$evaluation0 2 4 EOD ");
    /* beside one that trains, whose own name is the last; what has the same name is told apart */
    ck_assert_sh(0, SMALL "--steps 3 --out new --plot r_1,sub/r_1 && ! grep plot new/config.json && cat new/compare.gnuplot");
    ck_assert_str_has(out_text, "title 'r_1 (steps 4)', ");
    ck_assert_str_has(out_text, "title 'sub/r_1 (steps 2)', ");
    ck_assert_str_has(out_text, "title 'new (steps 3)', ");
    ck_assert_sh(0, SMALL "--steps 5 --out new --plot new/,r_1 && cat new/compare.gnuplot"); /* no run twice */
    ck_assert_str_has(out_text, "title 'new (steps 5)', ");
    ck_assert_ptr_null(strstr(out_text, "training2"));
    ck_assert_sh(0, "test -s new/previous-1/compare.gnuplot && : >cmp/metrics.jsonl");
    CHECK_MISTAKES(
        { 2, "$MLP plot --plot r_1", "plot needs --plot DIR,DIR,...: the runs to draw, and --out DIR" },
        { 2, "$MLP plot --out cmp", "plot needs --plot DIR,DIR,..." },
        { 2, "$MLP plot --plot r_1 --out cmp --lr 1", "--lr is no flag of 'mlp plot'" },
        { 2, "$MLP plot --plot r_1 --out cmp --seed 1", "--seed is no flag of 'mlp plot'" },
        { 2, "$MLP plot --plot r_1,,new --out cmp", "commas between them, not 'r_1,,new'" },
        { 2, SMALL "--steps 2 --plot r_1", "--plot needs --out DIR" },
        { 1, "$MLP plot --plot r_1,data --out cmp", "--plot: there is no data/metrics.jsonl; it takes directories of runs" },
        { 1, "$MLP plot --plot r_1,cmp --out cmp", "cmp/metrics.jsonl holds no loss; leave it out" },
        { 1, SMALL "--steps 2 --ranks 2 --out never --plot nowhere", "there is no nowhere/metrics.jsonl" },
        { 1, "PATH=/nowhere $MLP plot --plot r_1,new --out cmp", "gnuplot is not installed; with it, cd cmp && gnuplot" });
    ck_assert_sh(0, "! test -e never");
}
END_TEST

START_TEST(test_data_that_is_wrong_is_named)
{
    enter();
    ck_assert_sh(0, "rm -rf bad; mkdir bad; for d in gzip magic counts short; do mkdir bad/$d; cp data/* bad/$d; done; "
                    "gzip -9 bad/gzip/train-images-idx3-ubyte && truncate -s -40 bad/gzip/train-images-idx3-ubyte.gz; "
                    "printf '\\0\\0\\11\\3' | dd of=bad/magic/train-images-idx3-ubyte conv=notrunc status=none; "
                    "cp data/t10k-labels-idx1-ubyte bad/counts/train-labels-idx1-ubyte; truncate -s -1 "
                    "bad/short/train-images-idx3-ubyte; "
                    "echo '1,2,x' >bad/words.csv; for i in 1 2 3 4 5 6 7 8 9; do echo \"$i,2,0\"; done >bad/nine.csv; "
                    "printf '1,2,0\\n1,0\\n' >bad/ragged.csv");
    CHECK_MISTAKES(
        { 1, "$MLP train --data nowhere", "nowhere: No such file or directory" },
        { 1, "$MLP train --data bad", "bad: holds neither train-images-idx3-ubyte" },
        { 1, "$MLP train --data bad/gzip", "bad/gzip/train-images-idx3-ubyte.gz" },
        { 1, "$MLP train --data bad/magic", "bad/magic/train-images-idx3-ubyte" },
        { 1, "$MLP train --data bad/counts", "bad/counts" },
        { 1, "$MLP train --data bad/short", "bad/short/train-images-idx3-ubyte" },
        { 1, "$MLP train --data bad/words.csv", "words.csv" },
        { 1, "$MLP train --data bad/ragged.csv", "ragged.csv" },
        { 1, "$MLP train --data bad/nine.csv --batch 4 --steps 5 --out nine",
          "nine.csv: 9 rows, at least 10 are needed: every tenth is kept for testing" },
        { 1, "$MLP train --data nowhere --batch 24 --ranks 2", "nowhere: No such file or directory" },
        { 2, "$MLP train --data $DATA --device gpu", "device 'gpu' is not known" },
        { 1, "$MLP train --data $DATA --dtype fp8", "--dtype fp8 cannot be had: use f32, bf16 or f16, or f64 on the CPU" });
}
END_TEST

START_TEST(test_output_that_cannot_be_written_is_named)
{
    enter();
    ck_assert_sh(0, "rm -rf full; " SMALL "--steps 3 --out full");
    CHECK_MISTAKES(
        { 1, SMALL "--steps 3 --out /dev/null/x >/dev/null", "/dev/null" },
        { 1, "$MLP plan --hidden 16 --batch 8 --json >/dev/full", "stdout" },
        { 1, "$MLP plan --hidden 16 --batch 8 >/dev/full", "stdout" },
        { 1, "$MLP bench --hidden 16 --batch 8 --steps 2 >/dev/full", "stdout" },
        { 1, "$MLP eval --out full >/dev/full", "stdout" },
        { 1, "$MLP --help >/dev/full", "stdout" },
        { 1, "$MLP train --help >/dev/full", "stdout" },
        { 1, "(ulimit -f 8; " SMALL "--ranks 2 --steps 3 >/dev/null)", "File too large" },
        /* 8 blocks of 512 bytes hold the lines but no checkpoint */
        { 1, "(ulimit -f 8; $MLP train --resume --out full --steps 6 >/dev/null)", "full/checkpoints" });
    ck_assert_sh(0, "$MLP eval --out full && test ! -e full/checkpoints/.step-6");
    ck_assert_str_has(out_text, "eval at step 3");
}
END_TEST

START_TEST(test_a_checkpoint_that_does_not_fit_is_refused)
{
    enter();
    ck_assert_sh(0, "rm -rf c d; " SMALL
                    "--steps 3 --out c && cp -r c d && truncate -s 200 d/checkpoints/step-3/rank-0.safetensors && "
                    "rm -rf e && cp -r c e && sed -i 's/\"mlp\"/\"gpt\"/' e/checkpoints/step-3/manifest.json");
    CHECK_MISTAKES(
        { 1, "$MLP train --resume --out c --hidden 8 --steps 6 >/dev/null",
          "'net.0.weight' has shape (16, 16) there and (8, 16) here" },
        { 1, "$MLP train --resume --out c --dtype f64 --steps 6 >/dev/null", "is f32 there and f64 here" },
        { 1, "$MLP train --resume --out c --optimizer sgd --steps 6 >/dev/null",
          "was trained with --optimizer adamw, not sgd" },
        { 1, "$MLP train --resume --out d --steps 6 >/dev/null", "rank-0.safetensors" },
        { 1, "$MLP eval --out d >/dev/null", "rank-0.safetensors" },
        { 1, "$MLP train --resume --out e --steps 6 >/dev/null", "checkpoint of the model 'gpt', this is 'mlp'" },
        { 1, "$MLP train --resume --out c --batch 12 --steps 6 >/dev/null", "was trained with --batch 24, not 12" },
        { 1, "$MLP train --resume --out c --seed 7 --steps 6 >/dev/null", "was trained with --seed 0, not 7" },
        { 1, "rm -rf f; mkdir -p f/checkpoints; cp c/config.json f; $MLP train --resume --out f >/dev/null",
          "f/checkpoints holds no complete checkpoint" },
        { 1, "echo '{' >f/config.json; $MLP train --resume --out f", "f/config.json: line " },
        { 1, "$MLP train --resume --out none --data $DATA", "none/config.json: No such file or directory" },
        { 1, "$MLP eval --out none", "none/config.json: No such file or directory" });
    ck_assert_sh(0, "$MLP train --resume --out c --steps 6");
}
END_TEST

/* What would load in silence, or not at all. */
START_TEST(test_a_manifest_that_cannot_be_is_refused)
{
    enter();
    static const struct { const char *edit, *says; } cases[] = {
        { "s/\"step\":3/\"step\":4/", "manifest.json is of step 4" },
        { "s/\"schedule_steps\":3/\"schedule_steps\":-3/",
          "\"schedule_steps\" must be a whole number of at least 1" },
        { "s/\"schedule_steps\":3,//", "\"schedule_steps\" must be a whole number of at least 1" },
        { "s/\"best_step\":3/\"best_step\":4/", "the best evaluation is not one before step 3" },
        { "s/epoch 0 batch 3/epoch 0 batch 2/", "\"position\" is before step 3" },
        { "s/epoch 0 batch 3/epoch 9223372036854775807 batch 3/", "\"position\" is before step 3" },
        { "s/{[^{}]*\"key\":\"net.0.bias\",\"begin\"[^}]*}/&,&/", "a piece of 'net.0.bias' cannot be" },
        { "s/\\(\"net.0.bias\",\"begin\":0,\"count\":\\)16/\\115/", "has another shape or dtype" },
        { "s/\\(\"net.0.bias\",\"begin\":\\)0/\\11/", "a piece of 'net.0.bias' cannot be" },
        { "s/\\(\"net.0.bias\",\"begin\":0,\"count\":\\)16/\\10/", "the pieces of 'net.0.bias' hold 0 of its 16" },
    };
    ck_assert_sh(0, "rm -rf m; " SMALL "--steps 3 --out m && cp m/checkpoints/step-3/manifest.json manifest.was");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ck_assert_sh(0, "sed '%s' manifest.was >m/checkpoints/step-3/manifest.json && ! cmp -s manifest.was "
                        "m/checkpoints/step-3/manifest.json", cases[i].edit);
        CHECK_MISTAKES({ 1, "$MLP train --resume --out m --steps 6 >/dev/null", cases[i].says });
    }
    ck_assert_sh(0, "cp manifest.was m/checkpoints/step-3/manifest.json && $MLP train --resume --out m --steps 6");
}
END_TEST

START_TEST(test_nan_stops_and_keeps_the_last_good_checkpoint)
{
    enter();
    ck_assert_sh(0, "rm -rf nan; " SMALL "--steps 2 --optimizer sgd --out nan");
    CHECK_MISTAKES({ 1, "$MLP train --resume --out nan --steps 40 --lr 1e30 --save-every 100 >/dev/null",
                     "TD_EAGER=1 names the operation" });
    ck_assert_str_has(err_text, "step ");
    ck_assert_str_has(err_text, "nan/checkpoints/step-2");
    ck_assert_sh(0, "ls nan/checkpoints");
    ck_assert_str_eq(out_text, "step-2\n");
    CHECK_MISTAKES({ 1, SMALL "--steps 40 --optimizer sgd --lr 1e30 --out nan >/dev/null", "is nan: stopped" });
    ck_assert_ptr_null(strstr(err_text, "last checkpoint saved")); /* that one is of another run */
    ck_assert_sh(0, "test -s nan/previous-1/checkpoints/step-2/manifest.json");
}
END_TEST

TESTS("cli", test_training_leaves_its_files, test_eval_reads_the_checkpoint_and_its_flags,
      test_a_model_that_can_learn_overfits_a_batch, test_ranks_stop_early_together,
      test_eval_reads_the_best_checkpoint,
      test_eval_takes_the_averages_of_a_run_that_has_them, test_json_is_all_there_is_on_stdout, test_ranks_and_accumulation_follow_one_curve,
      test_clipping_by_the_largest_gradient_follows_one_curve,
      test_a_checkpoint_goes_on_in_any_world, test_killed_at_any_point_it_resumes_to_the_bit,
      test_a_signal_saves_and_ends_well, test_a_signal_saves_and_training_goes_on,
      test_signals_in_the_middle_of_a_save_leave_it_whole, test_an_evaluation_due_when_a_signal_comes_is_made,
      test_what_does_not_train_ends_at_a_signal, test_a_run_that_is_done_gets_the_summary_it_lacks,
      test_who_reads_the_output_does_not_decide_over_the_run, test_planning_takes_no_memory_for_data,
      test_ranks_that_are_only_planned_are_on_no_host, test_ranks_without_gpus_are_not_started,
      test_an_evaluation_is_told_after_its_update, test_help_lists_the_flags_of_a_command,
      test_progress_fits_the_terminal,
      test_wrong_usage_is_one_line_and_status_2, test_runs_are_compared_in_one_picture, test_data_that_is_wrong_is_named,
      test_output_that_cannot_be_written_is_named, test_a_checkpoint_that_does_not_fit_is_refused,
      test_a_manifest_that_cannot_be_is_refused, test_nan_stops_and_keeps_the_last_good_checkpoint)
