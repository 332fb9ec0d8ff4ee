/* Tandem's kernels for GPUs, compiled as C++ and run on the host (on_host/include/on_host.h): each gives what the CPU's gives, in memory
 * that nobody has written before, in graphs and in models that train. What the host finds beside: threads that do not meet.
 *
 * Products are the CPU's, and chains are interpreted: test_generated has the source that is made of them.
 *
 * Labels: on_host
 * Timeout: 300 s
 */
#include "tests/cuda_runs.h"
#include "tests/on_host/faults.h"

/* ---- The host as a GPU */

static const struct {
    fault which;
    const char *says;
} faults[] = {
    { FAULT_ENDED, "shuffles_with_ended_lanes, block (0, 0, 0): thread 0 waits in __shfl_xor_sync for thread 24, which has ended" },
    { FAULT_ELSEWHERE, "shuffles_beside_a_barrier, block (0, 0, 0): thread 0 waits in __shfl_xor_sync for thread 16, which waits at __syncthreads" },
    { FAULT_MASK, "votes_in_the_wrong_mask, block (0, 0, 0): thread 16 comes to a vote, whose mask 0000ffff has not its lane" },
    { FAULT_BARRIER, "meets_few_at_a_barrier, block (0, 0, 0): 32 threads wait at __syncthreads for 32 that have ended" },
    { FAULT_THREADS_TOO_MANY, "sums: a block of too many threads" },
    { FAULT_SHARED, "copies: more shared memory than there is" },
};

START_TEST(test_threads_that_do_not_meet_are_found)
{
    float out[FAULT_THREADS], ones[FAULT_THREADS];
    cudaStream_t stream;
    for (int i = 0; i < FAULT_THREADS; i++) ones[i] = 1;
    ck_assert_int_eq(cudaStreamCreateWithFlags(&stream, 0), cudaSuccess);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        fault_launch(faults[i].which, out, ones, stream);
        cudaStreamSynchronize(stream);
        cudaError_t status = cudaGetLastError();
        ck_assert_int_ne(status, cudaSuccess);
        ck_assert_str_eq(cudaGetErrorString(status), faults[i].says);
        fault_launch(FAULT_NONE, out, ones, stream); /* is none the worse for it */
        ck_assert_int_eq(cudaStreamSynchronize(stream), cudaSuccess);
        ck_assert_int_eq(cudaGetLastError(), cudaSuccess);
        for (int t = 0; t < FAULT_THREADS; t++) ck_assert_float_eq(out[t], FAULT_THREADS * (FAULT_THREADS - 1) / 2);
    }
    cudaStreamDestroy(stream);
}
END_TEST

START_TEST(test_copies_are_there_when_they_were_waited_for)
{
    float out[FAULT_THREADS], ones[FAULT_THREADS];
    cudaStream_t stream;
    for (int i = 0; i < FAULT_THREADS; i++) ones[i] = 1;
    ck_assert_int_eq(cudaStreamCreateWithFlags(&stream, 0), cudaSuccess);
    fault_launch(FAULT_COPY_NONE, out, ones, stream);
    ck_assert_int_eq(cudaStreamSynchronize(stream), cudaSuccess);
    for (int t = 0; t < FAULT_THREADS; t++) ck_assert_float_eq(out[t], 1);
    fault_launch(FAULT_COPY, out, ones, stream);
    ck_assert_int_eq(cudaStreamSynchronize(stream), cudaSuccess);
    for (int t = 0; t < FAULT_THREADS; t++) ck_assert_float_nan(out[t]);
    cudaStreamDestroy(stream);
}
END_TEST

/* ---- Operations */

START_TEST(test_operations_equal_the_cpu_in_poisoned_memory)
{
    check_operations(true, 2001);
}
END_TEST

START_TEST(test_no_number_is_made_of_what_is_none)
{
    check_what_is_no_number();
}
END_TEST

START_TEST(test_operations_of_empty_operands_write_all_they_give)
{
    check_empty_operands("cuda", TD_F32);
    check_empty_operands("cuda", TD_BF16);
}
END_TEST

static const attention_case attentions[] = {
    { "two tiles", 1, 2, 2, 100, 64, { .causal = 1 } },
    { "two tiles, dropout", 1, 2, 2, 128, 64, { .causal = 1, .p = 0.2, .key = 5 } },
    { "shared heads of 128, dropout", 1, 2, 1, 70, 128, { .causal = 1, .p = 0.1, .key = 6 } },
    { "an odd length, dropout, every key", 2, 2, 1, 77, 48, { .p = 0.3, .key = 7 } },
    { "a window", 1, 2, 2, 150, 32, { .causal = 1, .window = 40 } },
    { "a window to both sides, dropout", 1, 2, 1, 150, 96, { .window = 50, .p = 0.1, .key = 8 } },
    { "lengths", 4, 2, 1, 130, 16, { .lengths = 1 } },
    { "positions", 3, 2, 1, 90, 80, { .causal = 1, .positions = 1 } },
    { "heads of 256", 1, 1, 1, 20, 256, { .causal = 1 } },
    { "shared heads of 64", 1, 2, 1, 100, 64, { .causal = 1 } },
    { "whole heads, dropout", 1, 2, 2, 256, 64, { .causal = 1, .p = 0.2, .key = 9 } },
    { "whole heads, every key", 1, 1, 1, 161, 40, { .causal = 0 } },
    { "whole heads of 32, dropout, a window to both sides", 1, 2, 2, 203, 32, { .window = 70, .p = 0.3, .key = 10 } },
    { "whole heads of 16, a window", 1, 1, 1, 229, 16, { .causal = 1, .window = 33 } },
    { "whole heads, lengths", 5, 1, 1, 150, 64, { .lengths = 1 } },
    { "whole heads, lengths, positions, dropout", 3, 2, 2, 100, 24, { .causal = 1, .lengths = 1, .positions = 1, .p = 0.1, .key = 11 } },
    { "whole heads of five rows", 2, 1, 1, 5, 64, { .causal = 1, .p = 0.1, .key = 12 } },
};
enum { ATTENTIONS = sizeof attentions / sizeof *attentions };

START_TEST(test_attention_in_16_bits_is_that_in_f32)
{
    int wrong = 0;
    for (int c = 0; c < ATTENTIONS; c++) {
        wrong += check_attention(&attentions[c], dtypes[1 + c % 2], (td_options){ .passes = NULL });
        wrong += check_attention(&attentions[c], dtypes[2 - c % 2], (td_options){ .passes = "-fuse" });
    }
    ck_assert_int_eq(wrong, 0);
}
END_TEST

START_TEST(test_masks_in_chains_are_the_cpus)
{
    const td_shape shapes[] = { TD_SHAPE(33, 77), TD_SHAPE(3, 5, 6), TD_SHAPE(1) };
    check_masks(shapes, 3);
}
END_TEST

START_TEST(test_norms_that_add_and_narrow_equal_the_cpu)
{
    static const int64_t columns[] = { 5, 384, 1536, 6144, 9001 };
    check_norms(columns, sizeof columns / sizeof *columns);
}
END_TEST

START_TEST(test_products_with_epilogues_are_the_cpus)
{
    static const epilogue_case cases[] = { { 30, 72, 200 }, { 31, 77, 203 }, { 5, 16, 8 }, { 0, 16, 8 } };
    check_epilogues(cases, sizeof cases / sizeof *cases);
}
END_TEST

START_TEST(test_a_loss_with_its_gradient_equals_the_cpu)
{
    static const int64_t classes[] = { 10, 65, 1031, 20000 };
    check_loss(classes, 4);
}
END_TEST

/* Rows that leave a ring whole, that it holds once and a part, whose first packs leave it in some threads, and more of them than stay; the
 * last two lie as no ring takes them. */
START_TEST(test_losses_of_16_bits_equal_the_cpu)
{
    static const loss_case cases[] = { { 13, 16392 }, { 7, 50304 }, { 7, 80000 }, { 6, 120008 }, { 4, 256000 }, { 6, 20001 }, { 6, 65 } };
    check_narrow_losses(cases, sizeof cases / sizeof *cases);
}
END_TEST

/* ---- Steps */

START_TEST(test_curves_equal_the_cpu)
{
    check_curves(TD_BF16, 2e-3);
    if (!check_all()) return;
    check_curves(TD_F32, 2e-5);
    check_curves(TD_F16, 2e-3);
}
END_TEST

START_TEST(test_a_replayed_step_allocates_nothing_and_is_a_graph)
{
    check_replays();
}
END_TEST

START_TEST(test_rules_update_as_the_cpus)
{
    check_rules();
}
END_TEST

START_TEST(test_initial_values_are_the_cpus)
{
    check_initial_values();
}
END_TEST

START_TEST(test_updates_by_rows_equal_the_cpu)
{
    static const int64_t widths[] = { 1, 5, 64, MOST_WIDTH };
    check_updates_by_rows(widths, sizeof widths / sizeof *widths);
}
END_TEST

START_TEST(test_f16_steps_that_overflow_are_left_out_as_on_the_cpu)
{
    check_scaled();
}
END_TEST

TESTS("kernels_on_host", test_threads_that_do_not_meet_are_found, test_copies_are_there_when_they_were_waited_for,
      test_operations_equal_the_cpu_in_poisoned_memory, test_no_number_is_made_of_what_is_none,
      test_operations_of_empty_operands_write_all_they_give, test_attention_in_16_bits_is_that_in_f32, test_masks_in_chains_are_the_cpus,
      test_norms_that_add_and_narrow_equal_the_cpu, test_products_with_epilogues_are_the_cpus,
      test_a_loss_with_its_gradient_equals_the_cpu, test_losses_of_16_bits_equal_the_cpu, test_curves_equal_the_cpu,
      test_a_replayed_step_allocates_nothing_and_is_a_graph,
      test_rules_update_as_the_cpus, test_initial_values_are_the_cpus, test_updates_by_rows_equal_the_cpu,
      test_f16_steps_that_overflow_are_left_out_as_on_the_cpu)
