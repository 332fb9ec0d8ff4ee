/* build/bin/strategies and collectives on GPUs, the host being the GPU that ranks share (tests/on_host): the way that a host with several goes,
 * but for the library that connects them.
 *
 * Labels: on_host
 * Timeout: 300 s
 */
#include "core/json.h"
#define SHELL_FOLDER "test_bench_on_host_files"
#include "tests/shell.h"

static double number(const td_json *object, const char *name)
{
    double value = td_json_get_number(object, name, (double)NAN);
    ck_assert_msg(!isnan(value), "%s is no number", name);
    return value;
}

static td_json_document *printed(td_context *td)
{
    td_json_document *document = td_json_parse(td, out_text, strlen(out_text), "stdout");
    ck_assert_no_error(td);
    return document;
}

START_TEST(test_strategies_are_measured_on_a_gpu)
{
    td_context *td = open_cpu(TD_F32);
    ck_assert_sh(0, "$BIN/on_host/strategies --model mlp --hidden 16 --rank-batch 8 --steps 3 --device cuda:0 --dtype bf16 --ranks 1,2 "
                    "--strategies ddp,fsdp --json");
    ck_assert_str_has(err_text, "mlp on cuda:0, bf16, 8 rows a rank");
    ck_assert_str_has(err_text, "planned for h200x2");
    td_json_document *document = printed(td);
    const td_json *cells = td_json_get(td_json_root(document), "cells");
    ck_assert_int_eq(cells->count, 3);
    for (const td_json *c = cells->first; c; c = c->next) {
        const td_json *measured = td_json_get(c, "measured"), *planned = td_json_get(c, "planned");
        ck_assert_double_gt(number(measured, "step_ms"), 0);
        ck_assert_double_gt(number(planned, "step_ms"), 0);
        ck_assert_double_gt(number(c, "efficiency"), 0);
        ck_assert_double_eq(number(measured, "comm_bytes_per_step"), number(planned, "comm_bytes_per_step"));
        ck_assert_double_eq_tol(number(c, "own_plan_bytes"), number(measured, "peak_bytes"), 0.01 * number(measured, "peak_bytes"));
        ck_assert_double_ge(number(measured, "exposed_comm_ms"), 0); /* the host makes one call after another */
    }
    td_json_close(document);
    td_close(td);
}
END_TEST

/* In graphs: what a call gives is looked at. */
START_TEST(test_collectives_are_measured_on_a_gpu)
{
    static const struct { const char *name; double sent; } kinds[] = { /* of 4096 bytes among 2 */
        { "all_reduce", 4096 }, { "reduce_scatter", 2048 }, { "all_gather", 2048 }, { "all_to_all", 2048 },
    };
    td_context *td = open_cpu(TD_F32);
    ck_assert_sh(0, "$BIN/on_host/collectives --device cuda:0 --ranks 2 --sizes 4K,1000 --calls 3 --rounds 3 --dtype bf16 --json");
    ck_assert_str_has(err_text, "2 ranks on 1 host, transport staged over local, device cuda:0, bf16");
    td_json_document *document = printed(td);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const td_json *sizes = td_json_get(td_json_root(document), kinds[i].name), *first = sizes->first;
        ck_assert_int_eq(sizes->count, 2);
        ck_assert_double_eq(number(first, "bytes"), 4096);
        ck_assert_double_eq_tol(number(first, "bus_bytes_per_s") * 1e-6 * number(first, "us"), kinds[i].sent, 1e-6);
        ck_assert_double_eq(number(first->next, "bytes"), 1024); /* in equal parts */
        ck_assert_int_eq(td_json_get(first, "bare_us")->kind, TD_JSON_NULL);
    }
    td_json_close(document);
    td_close(td);
}
END_TEST

TESTS("bench on host", test_strategies_are_measured_on_a_gpu, test_collectives_are_measured_on_a_gpu)
