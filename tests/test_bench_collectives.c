/* build/bin/collectives between ranks on the CPU, started by itself and by variables. */
#define SHELL_FOLDER "test_bench_collectives_files"
#include "core/json.h"
#include "tests/shell.h"

static double number(const td_json *object, const char *name)
{
    double value = td_json_get_number(object, name, (double)NAN);
    ck_assert_msg(!isnan(value), "%s is no number", name);
    return value;
}

/* Bytes over time are what a rank sends in a ring: of all_reduce 2 (N - 1) / N of its buffer, of the others half of that. */
START_TEST(test_rates_are_of_the_bus)
{
    static const struct { const char *name; double sent; } kinds[] = { /* of 6144 bytes among 3 */
        { "all_reduce", 8192 }, { "reduce_scatter", 4096 }, { "all_gather", 4096 }, { "all_to_all", 4096 },
    };
    td_context *td = open_cpu(TD_F32);
    ck_assert_sh(0, "$BIN/collectives --ranks 3 --sizes 6K,1 --calls 4 --rounds 3 --json");
    td_json_document *document = td_json_parse(td, out_text, strlen(out_text), "stdout");
    ck_assert_no_error(td);
    ck_assert_double_eq(number(td_json_root(document), "ranks"), 3);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const td_json *first = td_json_get(td_json_root(document), kinds[i].name)->first;
        ck_assert_double_eq(number(first, "bytes"), 6144);
        ck_assert_double_eq_tol(number(first, "bus_bytes_per_s") * 1e-6 * number(first, "us"), kinds[i].sent, 1e-6);
        ck_assert_double_eq(number(first->next, "bytes"), 3 * 8 * 4); /* the least */
    }
    td_json_close(document);
    td_close(td);
    ck_assert_str_has(err_text, "3 ranks on 1 host, transport local, device cpu, f32, 4 calls a step\n\nall_reduce        us a call   bus GB/s\n");
}
END_TEST

START_TEST(test_ranks_may_have_been_started)
{
    ck_assert_sh(0, "for r in 0 1; do RANK=$r WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29517 $BIN/collectives --sizes 1K --rounds 1 & done; wait");
    ck_assert_int_eq(count_of(out_text, "2 ranks on 1 host"), 1);
    ck_assert_int_eq(count_of(out_text, "all_to_all"), 1);
}
END_TEST

START_TEST(test_mistakes_are_told_in_one_line)
{
    static const struct { int status; const char *flags, *says; } cases[] = {
        { 2, "", "--ranks N is needed" },
        { 2, "--ranks 1", "--ranks N is needed, of 2 or more" },
        { 2, "--ranks", "needs a value" },
        { 2, "--ranks two", "--ranks takes a whole number from 1 to 256" },
        { 2, "--ranks 2 --calls 31", "--calls takes a whole number from 1 to 30" },
        { 2, "--ranks 2 --sizes 1Q", "--sizes takes bytes" },
        { 2, "--ranks 2 --sizes 1K,", "--sizes takes bytes" },
        { 2, "--ranks 2 --dtype fp3", "--dtype takes f32, bf16 or f64, not 'fp3'" },
        { 2, "--ranks 2 --dtype f16", "--dtype takes f32, bf16 or f64, not 'f16'" },
        { 2, "--ranks 2 --size 1K", "'--size' is no flag" },
        { 1, "--ranks 2 --device cuda", "2 ranks have no GPU" },
        { 1, "--ranks 2 --device nowhere --sizes 1K", "nowhere" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ck_assert_sh(cases[i].status, "CUDA_VISIBLE_DEVICES= $BIN/collectives %s", cases[i].flags);
        ck_assert_str_has(err_text, cases[i].says);
        ck_assert_int_eq(count_of(err_text, "\n"), 1);
        ck_assert_str_eq(out_text, "");
    }
    ck_assert_sh(0, "$BIN/collectives --help");
    ck_assert_str_has(out_text, "--rounds");
}
END_TEST

TESTS("bench collectives", test_rates_are_of_the_bus, test_ranks_may_have_been_started, test_mistakes_are_told_in_one_line)
