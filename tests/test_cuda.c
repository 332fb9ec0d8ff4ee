/* A GPU gives what the CPU gives: every operation with its cases and gradients, in every float dtype; steps as graphs; models that train.
 * Without a GPU: the error that says so.
 * Labels: gpu
 * Timeout: 600 s
 */
#include <time.h>

#include "tests/cuda_runs.h"

/* False, and the test counts as skipped. */
static bool gpu_for(const char *test)
{
    td_context *td = open_gpu(TD_F32, false);
    bool has = td_error(td) == TD_OK;
    if (!has) check_skip(test, "no CUDA device");
    td_close(td);
    return has;
}

START_TEST(test_what_cannot_be_had_is_said)
{
    static const struct { const char *device; td_dtype dtype; const char *says; } wrong[] = {
        { "gpu", TD_F32, "device 'gpu' is not known" },
        { "cuda:x", TD_F32, "device 'cuda:x'" },
        { "cuda:1000", TD_F32, "device 'cuda:1000'" },
        { "cuda", TD_F64, "f64" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        td_context *td = td_open(&(td_options){ .device = wrong[i].device, .dtype = wrong[i].dtype, .log = check_log_line });
        ck_assert_int_ne(td_error(td), TD_OK);
        ck_assert_str_has(td_error_text(td), wrong[i].says);
        td_close(td);
    }
}
END_TEST

/* ---- Operations */

/* Other inputs each time. */
static uint64_t some_start(void) { return (uint64_t)time(NULL) % 100000 * 1000; }

START_TEST(test_operations_equal_the_cpu_in_poisoned_memory)
{
    if (gpu_for(__func__)) check_operations(true, some_start());
}
END_TEST

START_TEST(test_no_number_is_made_of_what_is_none)
{
    if (gpu_for(__func__)) check_what_is_no_number();
}
END_TEST

START_TEST(test_operations_of_empty_operands_write_all_they_give)
{
    if (!gpu_for(__func__)) return;
    check_empty_operands("cuda", TD_F32);
    check_empty_operands("cuda", TD_BF16);
}
END_TEST

START_TEST(test_operations_equal_the_cpu_as_graphs)
{
    if (gpu_for(__func__)) check_operations(false, some_start());
}
END_TEST

/* ---- Attention at the sizes of models */

static const attention_case attentions[] = {
    { "GPT 10M", 8, 6, 6, 256, 64, { .causal = 1 } },
    { "GPT 10M, dropout", 8, 6, 6, 256, 64, { .causal = 1, .p = 0.2, .key = 5 } },
    { "GPT-2 124M", 1, 12, 12, 1024, 64, { .causal = 1 } },
    { "shared heads of 128", 1, 16, 4, 512, 128, { .causal = 1 } },
    { "shared heads of 128, dropout", 1, 8, 2, 320, 128, { .causal = 1, .p = 0.1, .key = 6 } },
    { "an odd length", 3, 4, 2, 77, 32, { .causal = 1 } },
    { "heads of 64, every key", 3, 4, 4, 256, 64, { .window = 0 } },
    { "short heads, dropout", 9, 4, 4, 128, 64, { .causal = 1, .p = 0.2, .key = 9 } },
    { "short heads of 32, lengths, a window", 5, 4, 4, 203, 32, { .window = 60, .lengths = 1 } },
    { "short heads of 16, positions, dropout", 5, 4, 4, 229, 16, { .causal = 1, .positions = 1, .p = 0.3, .key = 10 } },
    { "an odd length, dropout, every key", 3, 4, 2, 77, 48, { .p = 0.3, .key = 7 } },
    { "a window", 2, 4, 4, 300, 64, { .causal = 1, .window = 100 } },
    { "a window to both sides, dropout", 2, 4, 2, 300, 96, { .window = 50, .p = 0.1, .key = 8 } },
    { "lengths", 5, 4, 2, 200, 64, { .lengths = 1 } },
    { "positions", 5, 4, 2, 150, 80, { .causal = 1, .positions = 1 } },
    { "heads of 256", 1, 2, 2, 100, 256, { .causal = 1 } },
};
enum { ATTENTIONS = sizeof attentions / sizeof *attentions };
static const td_options hows[] = { { .passes = NULL }, { .passes = "-fuse" }, { .deterministic = true } };

START_TEST(test_attention_in_16_bits_is_that_in_f32)
{
    int wrong = 0;
    if (!gpu_for(__func__)) return;
    for (int c = 0; c < ATTENTIONS; c++)
        for (int d = 0; d < 2; d++)
            for (size_t h = 0; h < sizeof hows / sizeof *hows; h++) wrong += check_attention(&attentions[c], dtypes[1 + d], hows[h]);
    ck_assert_int_eq(wrong, 0);
}
END_TEST

START_TEST(test_deterministic_attention_gives_the_same_bits)
{
    if (!gpu_for(__func__)) return;
    for (int c = 0; c < ATTENTIONS; c++) {
        const attention_case *a = &attentions[c];
        int64_t count = a->batch * a->positions * (2 * a->heads + 2 * a->shared) * a->depth;
        td_options same = { .deterministic = true };
        ck_assert_mem_eq(attention_of(a, TD_BF16, false, same), attention_of(a, TD_BF16, false, same), (size_t)count * sizeof(double));
    }
}
END_TEST

/* ---- Models */

START_TEST(test_curves_equal_the_cpu)
{
    if (!gpu_for(__func__)) return;
    check_curves(TD_F32, 2e-5);
    check_curves(TD_BF16, 2e-3);
    check_curves(TD_F16, 2e-3);
}
END_TEST

START_TEST(test_a_rerun_gives_the_same_bits)
{
    if (!gpu_for(__func__)) return;
    for (int model = 0; model < 3; model++) {
        curve first = curve_on(true, TD_F32, model), second = curve_on(true, TD_F32, model);
        ck_assert_mem_eq(first.loss, second.loss, sizeof first.loss);
    }
}
END_TEST

START_TEST(test_a_replayed_step_allocates_nothing_and_is_a_graph)
{
    if (!gpu_for(__func__)) return;
    check_replays();
}
END_TEST

/* ---- What only fuse makes: masks of dropout that chains draw */

START_TEST(test_masks_in_chains_are_the_cpus)
{
    const td_shape shapes[] = { TD_SHAPE(64, 384), TD_SHAPE(33, 77), TD_SHAPE(3, 5, 6), TD_SHAPE(1), TD_SHAPE(129, 4096) };
    if (!gpu_for(__func__)) return;
    check_masks(shapes, 5);
}
END_TEST

/* ---- What only fuse makes: norms of each kernel's lengths, written in 16 bits, their gradients added and written twice */

START_TEST(test_norms_that_add_and_narrow_equal_the_cpu)
{
    if (!gpu_for(__func__)) return;
    static const int64_t columns[] = { 5, 64, 384, 768, 1536, 3072, 6144, 9001 };
    check_norms(columns, sizeof columns / sizeof *columns);
}
END_TEST

/* ---- Products with epilogues: whichever way is the faster, and the kernels of the parts where nothing is timed */

/* Those of GPT-2 124M's block, of rows as few as keep the processor's share at seconds and what tensor cores cut off in a sum below 1e-5 of
 * it; then odd ones, one that is small and one that has no rows. */
static const epilogue_case epilogue_cases[] = {
    { 1024, 768, 3072 }, { 1024, 3072, 768 }, { 1024, 768, 2304 }, { 300, 72, 200 }, { 301, 77, 203 }, { 5, 16, 8 }, { 0, 16, 8 },
};
START_TEST(test_products_with_epilogues_are_the_cpus)
{
    if (gpu_for(__func__)) check_epilogues(epilogue_cases, sizeof epilogue_cases / sizeof *epilogue_cases);
}
END_TEST

/* A GPT of GPT-2's form at widths that epilogues take: fused and not, and again with the choices that were kept. */
static void train_gpt2(const char *passes, double loss[STEPS])
{
    static const gpt_size size = { .layers = 2, .heads = 4, .width = 64, .context = 20, .vocabulary = 67, .has_bias = true, .tanh_gelu = true };
    td_context *td = td_open(&(td_options){ .device = "cuda", .dtype = TD_BF16, .seed = 1, .threads = 2, .passes = passes,
                                            .log = check_log_line });
    curve c = { 0 };
    train_gpt(td, size, &c);
    memcpy(loss, c.loss, sizeof c.loss);
    td_close(td);
}

START_TEST(test_a_gpt_with_epilogues_learns_as_without)
{
    static const char *const passes[] = { "-dbias", "-gelu", "-dbias,-gelu" };
    if (!gpu_for(__func__)) return;
    double all[STEPS], less[STEPS];
    setenv("TANDEM_CACHE", "test_cuda_cache", 1); /* another choice may round otherwise */
    train_gpt2(NULL, all);
    ck_assert(all[STEPS - 1] < all[0]);
    train_gpt2(NULL, less);
    ck_assert_mem_eq(all, less, sizeof all);
    for (size_t i = 0; i < sizeof passes / sizeof *passes; i++) {
        train_gpt2(passes[i], less);
        double error = relative_error(all, less, STEPS);
        ck_assert_msg(error <= 1e-2, "%s: losses are off by %.3g", passes[i], error);
    }
    unsetenv("TANDEM_CACHE");
}
END_TEST

/* The loss that comes with the gradient. */
START_TEST(test_a_loss_with_its_gradient_equals_the_cpu)
{
    if (!gpu_for(__func__)) return;
    static const int64_t classes[] = { 10, 65, 1031, 20000 };
    check_loss(classes, 4);
}
END_TEST

/* Of most there are more rows than multiprocessors. */
START_TEST(test_losses_of_16_bits_equal_the_cpu)
{
    if (!gpu_for(__func__)) return;
    static const loss_case cases[] = { { 410, 20000 }, { 270, 50304 }, { 140, 128256 }, { 4, 256000 }, { 140, 20001 }, { 300, 65 } };
    check_narrow_losses(cases, sizeof cases / sizeof *cases);
}
END_TEST

/* ---- Updates, and what they begin from */

START_TEST(test_rules_update_as_the_cpus)
{
    if (gpu_for(__func__)) check_rules();
}
END_TEST

START_TEST(test_initial_values_are_the_cpus)
{
    if (gpu_for(__func__)) check_initial_values();
}
END_TEST

START_TEST(test_updates_by_rows_equal_the_cpu)
{
    if (!gpu_for(__func__)) return;
    static const int64_t widths[] = { 1, 5, 16, 64, 301, MOST_WIDTH };
    check_updates_by_rows(widths, sizeof widths / sizeof *widths);
}
END_TEST

/* ---- f16: losses are scaled, and a step that overflows is left out */

START_TEST(test_f16_steps_that_overflow_are_left_out_as_on_the_cpu)
{
    if (!gpu_for(__func__)) return;
    check_scaled();
}
END_TEST

TESTS("cuda", test_what_cannot_be_had_is_said, test_operations_equal_the_cpu_in_poisoned_memory,
      test_no_number_is_made_of_what_is_none, test_operations_of_empty_operands_write_all_they_give, test_operations_equal_the_cpu_as_graphs,
      test_masks_in_chains_are_the_cpus, test_norms_that_add_and_narrow_equal_the_cpu, test_products_with_epilogues_are_the_cpus,
      test_a_gpt_with_epilogues_learns_as_without, test_a_loss_with_its_gradient_equals_the_cpu,
      test_losses_of_16_bits_equal_the_cpu, test_attention_in_16_bits_is_that_in_f32, test_deterministic_attention_gives_the_same_bits,
      test_curves_equal_the_cpu, test_a_rerun_gives_the_same_bits, test_a_replayed_step_allocates_nothing_and_is_a_graph,
      test_rules_update_as_the_cpus, test_initial_values_are_the_cpus,
      test_updates_by_rows_equal_the_cpu, test_f16_steps_that_overflow_are_left_out_as_on_the_cpu)
