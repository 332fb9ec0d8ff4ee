/* build/bin/strategies: cells measured beside what was planned, curves that must be equal, and models that fail, lie or do not end.
 *
 * Models that misbehave are scripts beside a copy of the binary, which looks for models where it is itself.
 * Timeout: 300 s
 */
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/json.h"
#define SHELL_FOLDER "test_bench_strategies_files"
#include "tests/shell.h"

static char file_text[1 << 15];

/* A script as the model's binary. */
static void put_model(const char *name, const char *script)
{
    char path[128];
    ck_assert_sh(0, "cp \"$STRATEGIES\" strategies");
    snprintf(path, sizeof path, SHELL_FOLDER "/%s", name);
    FILE *to = fopen(path, "w");
    ck_assert_ptr_nonnull(to);
    fprintf(to, "#!/bin/sh\n%s\n", script);
    ck_assert_int_eq(fclose(to), 0);
    ck_assert_int_eq(chmod(path, 0755), 0);
}

static double number(const td_json *cell, const char *object, const char *name)
{
    const td_json *value = td_json_get(object ? td_json_get(cell, object) : cell, name);
    ck_assert_msg(value && value->kind == TD_JSON_NUMBER, "%s.%s is no number", object, name);
    return value->number;
}

START_TEST(test_cells_stand_beside_what_was_planned)
{
    ck_assert_sh(0, "rm -rf out && $STRATEGIES --model mlp --hidden 16 --batch 24 --steps 3 --ranks 1,2 --strategies ddp,fsdp --out out");
    ck_assert_str_has(out_text, "1 single");
    ck_assert_str_has(out_text, "2 fsdp");
    read_text(SHELL_FOLDER "/out/results.json", file_text, sizeof file_text);
    td_context *td = open_cpu(TD_F32);
    td_json_document *document = td_json_parse(td, file_text, strlen(file_text), "results.json");
    ck_assert_no_error(td);
    const td_json *cells = td_json_get(td_json_root(document), "cells");
    ck_assert_int_eq(cells->count, 3);
    for (const td_json *c = cells->first; c; c = c->next) {
        ck_assert_double_gt(number(c, "measured", "items_per_s"), 0);
        ck_assert_double_gt(number(c, "planned", "items_per_s"), 0);
        ck_assert_double_gt(number(c, "measured", "step_ms"), 0);
        double peak = number(c, "planned", "peak_bytes");
        ck_assert_double_eq_tol(number(c, "measured", "peak_bytes"), peak, 0.01 * peak);
        ck_assert_double_eq(number(c, "measured", "comm_bytes_per_step"), number(c, "planned", "comm_bytes_per_step"));
    }
    const td_json *one = cells->first, *ddp = one->next;
    ck_assert_double_eq(number(one, NULL, "efficiency"), 1);
    double faster = number(ddp, "measured", "items_per_s") / number(one, "measured", "items_per_s");
    ck_assert_double_eq_tol(number(ddp, NULL, "efficiency"), faster / 2, 1e-12);
    ck_assert_double_eq(number(one, "measured", "exposed_comm_ms"), 0);
    double exposed = number(ddp, "measured", "exposed_comm_ms");
    ck_assert_msg(exposed > 0 && exposed < number(ddp, "measured", "step_ms"), "%g ms", exposed);
    td_json_close(document);
    td_close(td);
    ck_assert_sh(0, "test -s out/throughput.gnuplot && test -s out/memory.gnuplot && test -s out/efficiency.gnuplot");
    if (system("command -v gnuplot >/dev/null") == 0)
        ck_assert_sh(0, "test -s out/throughput.png && test -s out/memory.png && test -s out/efficiency.png");
}
END_TEST

START_TEST(test_a_batch_can_grow_with_the_ranks)
{
    ck_assert_sh(0, "$STRATEGIES --model mlp --hidden 16 --rank-batch 24 --steps 3 --ranks 1,2 --strategies ddp --json");
    ck_assert_str_has(err_text, "mlp on cpu, 24 rows a rank");
    td_context *td = open_cpu(TD_F32);
    td_json_document *document = td_json_parse(td, out_text, strlen(out_text), "stdout");
    ck_assert_no_error(td);
    const td_json *one = td_json_get(td_json_root(document), "cells")->first, *two = one->next;
    ck_assert_double_eq_tol(number(one, "measured", "items_per_s") * number(one, "measured", "step_ms"), 24e3, 1e-6);
    ck_assert_double_eq_tol(number(two, "measured", "items_per_s") * number(two, "measured", "step_ms"), 48e3, 1e-6);
    ck_assert_double_eq(number(two, NULL, "own_plan_bytes"), number(two, "planned", "peak_bytes"));
    double ratio = number(two, "planned", "step_ms") / number(two, "measured", "step_ms");
    ck_assert_double_eq_tol(number(two, NULL, "planned_per_measured_ms"), ratio, 1e-12);
    ck_assert_double_eq_tol(number(two, NULL, "planned_per_measured_bytes"), 1, 0.01);
    td_json_close(document);
    td_close(td);
}
END_TEST

/* What one rank of four sends and holds, on one; how long that takes beside the links that it is told of. */
START_TEST(test_cells_can_be_rehearsed_by_one_rank)
{
    FILE *to = fopen(SHELL_FOLDER "/slow.json", "w");
    ck_assert_ptr_nonnull(to);
    fputs("{\"flops\": {\"f32\": 1e9}, \"memory_bytes\": 1e12, \"memory_bytes_per_s\": 1e12, \"host_ranks\": 4, \"inside\": {\"bytes_per_s\": 4e6}}", to);
    ck_assert_int_eq(fclose(to), 0);
    ck_assert_sh(0, "$STRATEGIES --model mlp --hidden 16 --batch 24 --steps 3 --ranks 1,4 --strategies ddp,fsdp --rehearse --machine slow.json --json");
    ck_assert_str_has(err_text, "figures of rehearsals (planned for slow.json");
    td_context *td = open_cpu(TD_F32);
    td_json_document *document = td_json_parse(td, out_text, strlen(out_text), "stdout");
    ck_assert_no_error(td);
    ck_assert(td_json_get(td_json_root(document), "rehearsed")->boolean);
    const td_json *cells = td_json_get(td_json_root(document), "cells");
    ck_assert_int_eq(cells->count, 3);
    for (const td_json *c = cells->first->next; c; c = c->next) {
        double peak = number(c, "planned", "peak_bytes"), sent = number(c, "planned", "comm_bytes_per_step");
        ck_assert_double_gt(sent, 0);
        ck_assert_double_eq(number(c, "measured", "comm_bytes_per_step"), sent);
        ck_assert_double_eq_tol(number(c, "measured", "peak_bytes"), peak, 0.01 * peak);
        ck_assert_double_ge(number(c, "measured", "exposed_comm_ms"), sent / 4e3); /* on the CPU all of it is */
        ck_assert_double_ge(number(c, "measured", "step_ms"), number(c, "measured", "exposed_comm_ms"));
    }
    td_json_close(document);
    td_close(td);
}
END_TEST

/* As the GPT that the shapes are of: what it is asked is noted, `bench` takes 10 ms, and `plan` is the real one's. */
#define GPT_OF_10_MS                                                                                                                        \
    "echo \"$@\" >>asked; ranks=1; batch=0; [ $1 = bench ] || exec \"$REAL\" \"$@\"\n"                                                       \
    "while [ $# -gt 0 ]; do case $1 in --ranks) ranks=$2;; --batch) batch=$2;; esac; shift; done\n"                                        \
    "echo \"{\\\"items_per_s\\\": $batch, \\\"step_ms\\\": 10, \\\"peak_bytes\\\": 1048576, \\\"exposed_comm_ms\\\": 0.5}\""

/* One command for the figures that others have of two GPUs. */
START_TEST(test_shapes_are_measured_as_others_measure_them)
{
    static const struct { const char *name, *cell; double tokens; } two[] = {
        { "gpt2-124m", "ddp", 64 * 1024 },     { "gpt-10m", "ddp", 128 * 256 },       { "llama1b", "fsdp", 8 * 2048 },
        { "llama8b", "fsdp", 4 * 4096 },       { "gpt2-1558m", "ddp", 16 * 1024 },
    };
    put_model("gpt", GPT_OF_10_MS);
    ck_assert_sh(0, "rm -rf all asked; REAL=$GPT ./strategies --model all --dtype f32 --ranks 2 --steps 5 --machine h200x2 --out all");
    td_context *td = open_cpu(TD_F32);
    for (size_t i = 0; i < sizeof two / sizeof *two; i++) {
        char path[128];
        snprintf(path, sizeof path, SHELL_FOLDER "/all/%s/results.json", two[i].name);
        td_json_document *document = td_json_read(td, path);
        ck_assert_no_error(td);
        const td_json *cells = td_json_get(td_json_root(document), "cells"), *c = cells->first;
        ck_assert_int_eq(cells->count, i == 4 ? 4 : 1); /* ddp, zero1, zero2, fsdp */
        ck_assert_str_eq(td_json_get_string(c, "strategy"), two[i].cell);
        ck_assert_double_eq(number(c, "measured", "tokens_per_s"), two[i].tokens);
        ck_assert_double_gt(number(c, "planned", "step_ms"), 0); /* its flags are those of a model */
        td_json_close(document);
    }
    td_close(td);
    ck_assert_str_has(out_text, "5.0 %"); /* exposed, of a step */
    /* What they are on GPUs, where nothing else is said. */
    ck_assert_sh(0, "rm -f asked; REAL=true ./strategies --model llama8b --ranks 1,4 --device cuda");
    ck_assert_str_has(out_text, "llama8b on cuda, bf16, 2 rows a rank");
    ck_assert_str_has(out_text, "planned for h200x4");
    ck_assert_sh(0, "grep -x 'bench --clip 0 --size llama8b --context 4096 --batch 8 --device cuda --dtype bf16 --strategy fsdp --ranks 4 "
                    "--threads [0-9]* --json' asked");
    ck_assert_sh(0, "grep -x 'plan .* --strategy single --world 1 .* --machine h200x4' asked");
}
END_TEST

START_TEST(test_a_cell_that_fails_says_why_and_the_others_go_on)
{
    ck_assert_sh(1, "$STRATEGIES --model mlp --hidden 8 --batch 9 --steps 2 --ranks 1,2,3 --strategies ddp,nonsense");
    ck_assert_str_has(out_text, "--batch 9 does not divide by 2 ranks");
    ck_assert_str_has(out_text, "'nonsense' is not known");
    const char *third = strstr(out_text, "3 ddp");
    ck_assert_ptr_nonnull(third);
    ck_assert_msg(strchr(third, '(') && strchr(third, '(') < strchr(third, '\n'), "3 ranks were measured: %s", third);
}
END_TEST

START_TEST(test_curves_of_all_strategies_are_one)
{
    ck_assert_sh(0, "rm -rf out && "
                    "$STRATEGIES --model mlp --task regress --hidden 8 --batch 24 --ranks 2 --strategies ddp,fsdp --check --out out");
    ck_assert_str_has(out_text, "in f64, 20 updates");
    ck_assert_str_has(out_text, "2 fsdp");
    ck_assert_msg(!strstr(out_text, "DIFFERS"), "%s", out_text);
    read_text(SHELL_FOLDER "/out/check.json", file_text, sizeof file_text);
    ck_assert_str_has(file_text, "\"largest_difference\"");
}
END_TEST

/* Losses of 1, but at step 7 on more ranks than one. */
#define LIAR(loss)                                                                                                     \
    "ranks=1; out=; while [ $# -gt 0 ]; do case $1 in --ranks) ranks=$2;; --out) out=$2;; esac; shift; done\n"         \
    "mkdir -p \"$out\"; i=1; while [ $i -le 20 ]; do loss=1; [ $ranks -gt 1 ] && [ $i -eq 7 ] && loss=" loss "\n"      \
    "echo \"{\\\"step\\\":$i,\\\"loss\\\":$loss}\"; i=$((i + 1)); done >\"$out/metrics.jsonl\"; echo '{}'"

START_TEST(test_a_curve_that_differs_fails_the_check)
{
    put_model("liar", LIAR("1.0000000002"));
    ck_assert_sh(1, "./strategies --model liar --ranks 1,2 --strategies ddp --check --out out");
    ck_assert_str_has(out_text, "2e-10 at step 7    DIFFERS");
    ck_assert_sh(0, "./strategies --model liar --ranks 1,2 --strategies ddp --check --dtype f32 --out out");
    put_model("liar", LIAR("1.00000000005"));
    ck_assert_sh(0, "./strategies --model liar --ranks 1,2 --strategies ddp --check --out out");
    put_model("liar", "echo '{}'");
    ck_assert_sh(1, "rm -rf out; ./strategies --model liar --ranks 1,2 --strategies ddp --check --out out");
    ck_assert_str_has(out_text, "0 losses of 20");
}
END_TEST

START_TEST(test_a_signal_ends_it_and_the_child)
{
    time_t begin = time(NULL);
    put_model("sleeper", "echo $$ >child.pid; exec sleep 100");
    ck_assert_sh(1, "rm -f child.pid; ./strategies --model sleeper --ranks 1,2 & P=$!; until test -s child.pid; do sleep 0.1; done; "
                    "kill -TERM $P; wait $P");
    ck_assert_str_has(err_text, "stopped by a signal after 0 of ");
    ck_assert_sh(1, "kill -0 $(cat child.pid)");
    ck_assert_int_lt(time(NULL) - begin, 60);
}
END_TEST

START_TEST(test_mistakes_are_told_in_one_line)
{
    static const struct { int status; const char *flags, *says; } cases[] = {
        { 2, "", "--model NAME is needed" },
        { 2, "--model absent", "no model's binary" },
        { 2, "--model mlp --ranks 1,x", "--ranks takes whole numbers" },
        { 2, "--model mlp --steps 0", "--steps takes" },
        { 2, "--model mlp --check", "--check needs --out" },
        { 2, "--model mlp --check --rehearse --out runs", "a rehearsal's values mean nothing to --check" },
        { 2, "--model mlp --ranks", "needs a value" },
        { 2, "--model mlp --rank-batch 0", "--rank-batch takes" },
        { 2, "--model mlp,absent", "no model's binary" }, /* before any is measured */
        { 1, "--model mlp --out stdout.txt/in", "cannot be made" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ck_assert_sh(cases[i].status, "$STRATEGIES %s", cases[i].flags);
        ck_assert_str_has(err_text, cases[i].says);
    }
    ck_assert_sh(0, "$STRATEGIES --help");
    ck_assert_str_has(out_text, "--check");
    ck_assert_str_has(out_text, "gpt2-1558m");
}
END_TEST

TESTS("bench strategies", test_cells_stand_beside_what_was_planned, test_a_batch_can_grow_with_the_ranks, test_cells_can_be_rehearsed_by_one_rank,
      test_shapes_are_measured_as_others_measure_them, test_a_cell_that_fails_says_why_and_the_others_go_on,
      test_curves_of_all_strategies_are_one, test_a_curve_that_differs_fails_the_check, test_a_signal_ends_it_and_the_child,
      test_mistakes_are_told_in_one_line)
