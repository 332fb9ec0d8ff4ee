/* Plans for a GPU that is only described: a step's memory, calls and traffic are known where there is no GPU, as its own planning has
 * them; nothing runs. Where there is a GPU, what is described is held against it.
 *
 * Labels: cuda gpu
 * Timeout: 300 s
 */
#define SHELL_FOLDER "test_described_files"
#include "tests/printed.h"

#include <tandem/nn.h>
#include <tandem/optim.h>

#include "core/rewrite.h"

static const td_gpu h200 = { .name = "NVIDIA H200", .major = 9, .multiprocessors = 132, .l2_bytes = 60 << 20, .page_bytes = 2 << 20 };
static const int64_t MOST_WORKSPACE = 32 << 20; /* that a product is given */

static bool has_gpu(void)
{
    td_context *td = td_open(&(td_options){ .device = "cuda", .log = check_log_line });
    bool has = td_error(td) == TD_OK;
    td_close(td);
    return has;
}

enum { ROWS = 4096, WIDTH = 256 };

/* Plans a step of two layers in bf16; its report. */
static td_report plan_step(td_context *td)
{
    td_module root = td_root(td);
    nn_linear in = nn_linear_make(root, "h.0.fc", WIDTH, 4 * WIDTH), out = nn_linear_make(root, "h.1.fc", 4 * WIDTH, WIDTH);
    opt_optimizer *opt = opt_adamw(root, NULL);
    td_tensor x = td_input(td, "x", TD_F32, TD_SHAPE(ROWS, WIDTH), check_alloc(4 * ROWS * WIDTH));
    td_tensor y = nn_linear_apply(&out, td_gelu(nn_linear_apply(&in, x)));
    td_backward(td_mean(td_square(y), TD_ALL, TD_DROP));
    opt_step(opt, 1e-3);
    ck_assert_msg(td_plan(td), "%s", td_error_text(td));
    td_report report = td_last_report(td);
    opt_close(opt);
    return report;
}

static td_context *open_described(const td_gpu *gpu)
{
    return td_open(&(td_options){ .device = "cuda", .gpu = gpu, .dtype = TD_BF16, .threads = 1, .log = check_log_line });
}

/* ---- The context ------------------------------------------------------------------------------------------ */

START_TEST(test_memory_is_planned_by_the_pages_described)
{
    td_gpu bytes = h200;
    bytes.page_bytes = 0;
    td_context *paged = open_described(&h200), *exact = open_described(&bytes);
    ck_assert_no_error(paged);
    td_report p = plan_step(paged), e = plan_step(exact);
    ck_assert_int_eq(p.state_bytes % h200.page_bytes, 0);
    ck_assert_int_eq(p.step_bytes % h200.page_bytes, 0);
    ck_assert_int_ge(p.peak_bytes, e.peak_bytes);
    ck_assert_int_lt(p.peak_bytes, e.peak_bytes + 3 * h200.page_bytes); /* state, step and inputs each by themselves */
    ck_assert_int_eq(p.calls, e.calls);
    td_close(paged);
    td_close(exact);
}
END_TEST

START_TEST(test_a_described_gpu_is_known_and_runs_nothing)
{
    td_gpu passing = h200;
    td_context *td = open_described(&passing), *cpu = open_cpu(TD_F32);
    memset(&passing, 0, sizeof passing); /* it was copied */
    ck_assert_str_eq(td_gpu_of(td)->name, "NVIDIA H200");
    ck_assert_int_eq(td_gpu_of(td)->multiprocessors, 132);
    ck_assert_ptr_null(td_gpu_of(cpu));
    td_keep(td_sum(td_fill(td, TD_F32, TD_SHAPE(3), 1), TD_ALL, TD_DROP));
    ck_assert(!td_step(td));
    ck_assert_int_eq(td_error(td), TD_ERROR_USAGE);
    ck_assert_ptr_nonnull(strstr(td_error_text(td), "plans for a GPU that is described, NVIDIA H200, and can run nothing"));
    td_close(td);
    td_close(cpu);
}
END_TEST

START_TEST(test_the_program_is_the_gpus)
{
    td_context *td = td_open(&(td_options){ .device = "cuda", .gpu = &h200, .dtype = TD_BF16, .print = "fuse", .log = check_log_line });
    nn_linear layer = nn_linear_make(td_root(td), "fc", WIDTH, WIDTH);
    td_tensor x = td_input(td, "x", TD_F32, TD_SHAPE(ROWS, WIDTH), check_alloc(4 * ROWS * WIDTH));
    td_keep(td_add(x, nn_linear_apply(&layer, x)));
    ck_assert_msg(td_plan(td), "%s", td_error_text(td));
    fflush(check_now.log_stream);
    ck_assert_ptr_nonnull(strstr(check_now.log, "linear_add")); /* on the CPU an addition follows the product */
    td_close(td);
}
END_TEST

START_TEST(test_a_description_holds_at_least_what_the_gpu_does)
{
    if (!has_gpu()) {
        check_skip(__func__, "no CUDA device");
        return;
    }
    td_context *own = td_open(&(td_options){ .device = "cuda", .dtype = TD_BF16, .threads = 1, .log = check_log_line });
    td_gpu gpu = *td_gpu_of(own);
    td_context *described = open_described(&gpu);
    td_report o = plan_step(own), d = plan_step(described);
    ck_assert_int_eq(d.state_bytes, o.state_bytes);
    ck_assert_int_eq(d.calls, o.calls);
    ck_assert_int_eq(d.bytes_moved, o.bytes_moved);
    ck_assert_int_ge(d.step_bytes, o.step_bytes);
    ck_assert_int_le(d.step_bytes, o.step_bytes + MOST_WORKSPACE + gpu.page_bytes);
    td_close(own);
    td_close(described);
}
END_TEST

/* ---- The command ------------------------------------------------------------------------------------------ */

#define GPT2 "--form gpt2 --head tied --bias yes --gelu tanh --layers 12 --heads 12 --width 768 --context 1024 --vocabulary 50304 --dropout 0 " \
             "--dtype bf16 --clip 0 --threads 1"

/* bench/compare's step, for which an H200 is asked for 14.96 GiB. */
START_TEST(test_gpt2_124m_holds_what_an_h200_is_asked_for)
{
    const double gib = 1 << 30;
    ck_assert_sh(0, "$GPT plan --device cuda " GPT2 " --batch 32 --machine h200x8 --json");
    double peak = printed("planned_peak_bytes") / gib;
    ck_assert_msg(peak <= 15.1 && fabs(peak - 14.96) < 0.01 * 14.96, "%.3f GiB", peak);
    ck_assert_double_eq(printed("estimate.fits"), 1);
    ck_assert_str_has(out_text, "\"largest\":[{\"op\":\"linear_gelu\",\"module\":\"h.*.mlp.c_fc\",\"kind\":\"activations\",\"dtype\":\"bf16\","
                                "\"shape\":[32,1024,3072],\"count\":22,"); /* gelu and what it is of: of 12 blocks one is taken apart */
    ck_assert_str_has(out_text, "{\"op\":\"cross_entropy_gradient\",\"module\":\"\",\"kind\":\"activations\",\"dtype\":\"bf16\",\"shape\":[32,1024,50304],"
                                "\"count\":1,\"bytes\":3296722944}");
}
END_TEST

START_TEST(test_several_ranks_are_planned_each_with_its_part)
{
    ck_assert_sh(0, "$GPT plan --device cuda " GPT2 " --batch 32 --json");
    double state = printed("state_bytes"), params = printed("params");
    ck_assert_sh(0, "$GPT plan --device cuda " GPT2 " --batch 256 --world 8 --strategy fsdp --machine h200x8 --json");
    ck_assert_double_eq(printed("gpu.described"), 1);
    ck_assert_double_lt(printed("state_bytes"), state / 8 + (double)(4 << 20)); /* by pages */
    ck_assert_double_gt(printed("comm_bytes_per_step"), 7.0 / 8 * 2 * 4 * params); /* gathers in bf16 twice, scatters in f32 */
    ck_assert_double_lt(printed("comm_bytes_per_step"), 7.0 / 8 * 2.1 * 4 * params);
    ck_assert_sh(0, "$GPT plan --device cuda " GPT2 " --batch 256 --world 8 --strategy all --machine h200x8");
    ck_assert_str_has(out_text, "\nfsdp ");
    ck_assert_str_has(out_text, "fits, fastest");
    ck_assert_str_has(out_text, "NVIDIA H200, described and not asked");
}
END_TEST

START_TEST(test_the_machine_says_which_gpu)
{
    ck_assert_sh(0, "$MLP plan --device cuda --hidden 16 --batch 8 --world 2 --strategy ddp --machine a100x8 --json");
    ck_assert_str_has(out_text, "\"gpu\":{\"name\":\"NVIDIA A100-SXM4-80GB\",");
    ck_assert_sh(0, "echo '{\"flops\": {\"f32\": 1e12}, \"memory_bytes\": 1e10, \"memory_bytes_per_s\": 1e12, \"host_ranks\": 2, "
                    "\"inside\": {\"bytes_per_s\": 1e9}, \"gpu\": {\"name\": \"NVIDIA X\", \"compute_capability\": 8.9, \"page_bytes\": 1048576}}' >own.json && "
                    "$MLP plan --device cuda --hidden 16 --batch 8 --machine own.json --json");
    ck_assert_str_has(out_text, "\"gpu\":{\"name\":\"NVIDIA X\",");
    ck_assert_double_eq(printed("state_bytes"), 1 << 20);
    ck_assert_sh(1, "sed -i 's/\"name\"/\"title\"/' own.json && $MLP plan --device cuda --hidden 16 --batch 8 --machine own.json");
    ck_assert_str_has(err_text, "\"title\" is not known");
    ck_assert_sh(0, "$MLP plan --device cuda --hidden 16 --batch 8 --dtype bf16 --world 2 --strategy ddp");
    ck_assert_str_has(out_text, "NVIDIA H200, described and not asked: each matrix product has as much workspace as cuBLASLt is ever given");
}
END_TEST

/* What every update but the first finds: a copy of the parameters in 16 bits. */
START_TEST(test_what_is_planned_is_not_the_first_update)
{
    ck_assert_sh(0, "$MLP plan --device cuda --hidden 16 --batch 8 --dtype bf16 --json");
    double calls = printed("calls");
    ck_assert_sh(0, "TD_PASSES=-kept $MLP plan --device cuda --hidden 16 --batch 8 --dtype bf16 --json");
    ck_assert_double_eq(calls, printed("calls") - 1);
}
END_TEST

START_TEST(test_what_runs_needs_a_gpu)
{
    if (has_gpu()) {
        check_skip(__func__, "a GPU is there");
        return;
    }
    ck_assert_sh(1, "$MLP bench --device cuda --hidden 16 --batch 8 --steps 2");
    ck_assert_str_has(err_text, "device 'cuda' cannot be had");
    ck_assert_sh(1, "$MLP bench --device cuda --ranks 2 --strategy ddp --hidden 16 --batch 8 --steps 2");
    ck_assert_str_has(err_text, "device 'cuda' cannot be had");
    ck_assert_sh(1, "$MLP plan --device cuda --dtype f64 --hidden 16 --batch 8");
    ck_assert_str_has(err_text, "dtype f64 cannot be had on a GPU");
    ck_assert_sh(2, "$MLP plan --device cudo --hidden 16 --batch 8");
    ck_assert_str_has(err_text, "device 'cudo' is not known");
    ck_assert_sh(2, "$MLP plan --device cuda --hidden 16 --batch 8 --machine nowhere");
    ck_assert_str_has(err_text, "'nowhere' is not known");
}
END_TEST

TESTS("described", test_memory_is_planned_by_the_pages_described, test_a_described_gpu_is_known_and_runs_nothing, test_the_program_is_the_gpus,
      test_a_description_holds_at_least_what_the_gpu_does, test_gpt2_124m_holds_what_an_h200_is_asked_for,
      test_several_ranks_are_planned_each_with_its_part, test_the_machine_says_which_gpu, test_what_is_planned_is_not_the_first_update,
      test_what_runs_needs_a_gpu)
