/* Attention's graphs without a GPU: cuDNN proposes kernels for an H200 that is only described, for the forms that models have and for odd
 * ones; forms are told apart; what has no plan says so once; what is not a graph's is refused.
 *
 * Labels: cuda
 */
#include <dlfcn.h>

#include "core/ops/attention_graph.h"
#include "tests/check.h"

static const char h200[] =
    "{\"deviceName\": \"NVIDIA H200\", \"deviceVer\": 900, \"driverVer\": 13000, \"cudaDeviceId\": 0, \"pciDeviceId\": 0, "
    "\"multiProcessorCount\": 132, "
    "\"maxGridSize\": [2147483647, 65535, 65535], \"maxBlockSize\": [1024, 1024, 64], \"maxThreadsPerBlock\": 1024, \"maxThreadsPerSM\": "
    "2048, "
    "\"maxCtasPerSM\": 32, \"warpSize\": 32, \"regsPerBlock\": 65536, \"maxRegistersPerSM\": 65536, \"maxSharedMemoryPerBlock\": 49152, "
    "\"maxSharedMemoryPerBlockOptin\": 232448, \"reservedSharedMemoryPerBlock\": 1024, \"l2CacheSize\": 62914560, \"smClockRateKHz\": "
    "1980000, "
    "\"memClockRateKHz\": 3201000, \"totalGlobalMem\": 150000000000, \"isTccDriver\": 0, \"supportCoopLaunch\": 1}";

/* cuDNN looks for the driver's functions, though it calls none: without a driver the toolkit's stub has them. */
static bool has_driver(void) { return dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL) || dlopen(TANDEM_CUDA_STUB, RTLD_NOW | RTLD_GLOBAL); }

static int warnings;

static void count_warnings(void *user, td_level level, const char *text)
{
    (void)user, (void)text;
    warnings += level == TD_LOG_WARNING;
}

/* A context with an H200 described; NULL, and the test counts as skipped. */
static td_context *open_described(const char *test)
{
    char reason[TD_CUDNN_REASON] = "";
    td_context *td = td_open(&(td_options){ .dtype = TD_F32, .log = count_warnings });
    ck_assert_no_error(td);
    warnings = 0;
    if (has_driver() && td_cudnn_describe_device(td, h200, reason)) return td;
    ck_assert_msg(!*reason || strstr(reason, "libcudnn"), "%s", reason);
    check_skip(test, "libcudnn or libcuda cannot be loaded");
    td_cudnn_close(td);
    td_close(td);
    return NULL;
}

static void close_all(td_context *td)
{
    td_cudnn_close(td);
    td_close(td);
}

typedef struct sizes {
    int64_t batch, heads, shared, rows, keys, depth;
} sizes;

/* q, k and v in rows of one value, as a layer leaves them. */
static td_attention_form packed(sizes s, td_dtype dtype, bool backward)
{
    int64_t width = (s.heads + 2 * s.shared) * s.depth, o = s.heads * s.depth;
    td_attention_form f = { .dtype = dtype,
                            .causal = true,
                            .backward = backward,
                            .at = { .batch = s.batch,
                                    .heads = s.heads,
                                    .shared = s.shared,
                                    .rows = s.rows,
                                    .keys = s.keys,
                                    .depth = s.depth,
                                    .values = s.depth } };
    f.at.q = f.at.dq = (td_heads){ .batch = s.rows * width, .head = s.depth, .row = width };
    f.at.key = f.at.dk = (td_heads){ .at = o, .batch = s.keys * width, .head = s.depth, .row = width };
    f.at.value = f.at.dv = (td_heads){ .at = o + s.shared * s.depth, .batch = s.keys * width, .head = s.depth, .row = width };
    f.at.o = f.at.dy = (td_heads){ .batch = s.rows * o, .head = s.depth, .row = o };
    return f;
}

static void expect_plan(td_context *td, td_attention_form form)
{
    const td_cudnn_plan *plan = td_attention_plan(td, &form);
    ck_assert_no_error(td);
    ck_assert_ptr_nonnull(plan);
    ck_assert_msg(plan->plan != NULL, "%s of (%lld, %lld, %lld, %lld): no plan", form.backward ? "gradient" : "attention",
                  (long long)form.at.batch, (long long)form.at.heads, (long long)form.at.rows, (long long)form.at.depth);
    ck_assert_ptr_eq(td_attention_plan(td, &form), plan); /* of the next layer */
}

START_TEST(test_forms_of_models_have_plans)
{
    static const sizes models[] = {
        { 64, 6, 6, 256, 256, 64 },           /* GPT 10M */
        { 32, 12, 12, 1024, 1024, 64 },       /* GPT-2 124M */
        { 4, 32, 8, 4096, 4096, 128 },        /* Llama */
        { 3, 4, 2, 77, 77, 32 },
        { 2, 4, 2, 77, 150, 64 },             /* more keys than queries */
        { 2, 4, 4, 128, 128, 72 },
        { 1, 2, 2, 20, 20, 8 },
    };
    td_context *td = open_described(__func__);
    if (!td) return;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        for (int backward = 0; backward < 2; backward++)
            for (int full = 0; full < 2; full++) {
                td_attention_form form = packed(models[i], i % 2 ? TD_F16 : TD_BF16, backward);
                form.causal = !full;
                expect_plan(td, form);
            }
    ck_assert_int_eq(warnings, 0);
    close_all(td);
}
END_TEST

START_TEST(test_forms_are_told_apart)
{
    td_context *td = open_described(__func__);
    if (!td) return;
    const sizes s = { 2, 4, 2, 64, 64, 64 };
    td_attention_form forms[6];
    for (int i = 0; i < 6; i++) forms[i] = packed(s, i == 1 ? TD_F16 : TD_BF16, i == 2);
    forms[3].causal = false;
    forms[4].at.o.row += 8;
    forms[5].at.batch = 3;
    for (int i = 0; i < 6; i++)
        for (int k = 0; k < i; k++) ck_assert_ptr_ne(td_attention_plan(td, &forms[i]), td_attention_plan(td, &forms[k]));
    close_all(td);
}
END_TEST

START_TEST(test_a_form_without_a_plan_is_said_once)
{
    td_context *td = open_described(__func__);
    if (!td) return;
    td_attention_form form = packed((sizes){ 1, 2, 2, 64, 64, 64 }, TD_BF16, false);
    form.at.depth = form.at.values = 12; /* rows of 24 bytes */
    for (int layer = 0; layer < 3; layer++) {
        const td_cudnn_plan *plan = td_attention_plan(td, &form);
        ck_assert_ptr_nonnull(plan);
        ck_assert_ptr_null(plan->plan);
    }
    ck_assert_no_error(td);
    ck_assert_int_eq(warnings, 1);
    close_all(td);
}
END_TEST

/* A call on plain heads. */
static bool serves(td_attention_attr attr, td_dtype dtype, sizes s)
{
    td_shape q = TD_SHAPE(s.batch, s.heads, s.rows, s.depth), k = TD_SHAPE(s.batch, s.shared, s.keys, s.depth),
             sums = TD_SHAPE(s.batch, s.heads, s.rows);
    td_arg in[3] = { { .dtype = dtype, .shape = q, .global = q },
                     { .dtype = dtype, .shape = k, .global = k },
                     { .dtype = dtype, .shape = k, .global = k } };
    td_arg out[2] = { { .dtype = dtype, .shape = q, .global = q }, { .dtype = TD_F32, .shape = sums, .global = sums } };
    td_mesh mesh = { .world = 1 };
    td_run run = { .threads = 1, .mesh = &mesh };
    attr.scale = 1;
    td_kernel call = {
        .op = &td_op_attention, .attr = &attr, .attr_bytes = sizeof attr, .inputs = 3, .outputs = 2, .in = in, .out = out, .run = &run
    };
    return td_attention_graph_serves(&call);
}

START_TEST(test_what_a_graph_serves)
{
    const sizes s = { 2, 4, 2, 64, 64, 64 };
    ck_assert(serves((td_attention_attr){ .causal = 1 }, TD_BF16, s));
    ck_assert(serves((td_attention_attr){ .causal = 0 }, TD_F16, s));
    ck_assert(!serves((td_attention_attr){ .causal = 1 }, TD_F32, s));
    ck_assert(!serves((td_attention_attr){ .p = 0.1 }, TD_BF16, s));
    ck_assert(!serves((td_attention_attr){ .window = 8 }, TD_BF16, s));
    ck_assert(!serves((td_attention_attr){ .causal = 1 }, TD_BF16, (sizes){ 2, 4, 2, 64, 63, 64 })); /* a query that sees no key */
    ck_assert(!serves((td_attention_attr){ .causal = 1 }, TD_BF16, (sizes){ 2, 4, 2, 64, 64, 60 }));
    ck_assert(!serves((td_attention_attr){ .causal = 1 }, TD_BF16, (sizes){ 0, 4, 2, 64, 64, 64 }));
}
END_TEST

TESTS("cudnn", test_forms_of_models_have_plans, test_forms_are_told_apart, test_a_form_without_a_plan_is_said_once,
      test_what_a_graph_serves)
