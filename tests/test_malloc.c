/* From the second step on the library asks the C library for nothing, not even past the context's allocator.
 *
 * malloc and its kin are replaced here: every call is counted, by whether it comes from the program (which holds Tandem
 * whole) or from a shared library under it (oneDNN, OpenMP), which is told apart and only reported.
 *
 * Labels: release
 */
#include "tests/check.h"

#include <errno.h>

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern const char __executable_start, etext;

static struct {
    _Atomic bool on;
    _Atomic int64_t ours, theirs;
} calls;

static void count(const void *caller)
{
    if (!calls.on) return;
    bool ours = (const char *)caller >= &__executable_start && (const char *)caller < &etext;
    if (ours)
        calls.ours++;
    else
        calls.theirs++;
}

void *malloc(size_t bytes)
{
    count(__builtin_return_address(0));
    return __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes)
{
    count(__builtin_return_address(0));
    return __libc_calloc(n, bytes);
}

void *realloc(void *memory, size_t bytes)
{
    count(__builtin_return_address(0));
    return __libc_realloc(memory, bytes);
}

void *aligned_alloc(size_t align, size_t bytes)
{
    count(__builtin_return_address(0));
    return __libc_memalign(align, bytes);
}

int posix_memalign(void **out, size_t align, size_t bytes)
{
    count(__builtin_return_address(0));
    *out = __libc_memalign(align, bytes);
    return *out ? 0 : ENOMEM;
}

enum { ROWS = 16, STEPS = 8 };

typedef struct job {
    td_dtype dtype;
    int accumulate, ranks;
    const char *strategy;
    bool profiled;           /* the steps that are counted */
} job;

static void passed_on(const td_gradient_call *g) { td_gradient_set(g, 0, g->dout[0]); }
static const td_gradient_rule rule = { "passed_on", passed_on };

static int train(par_world *world, int rank, void *user)
{
    const job *j = user;
    td_context *td = td_open(&(td_options){ .dtype = j->dtype, .threads = 1 });
    par_attach(td, world, rank, &(par_options){ .strategy = j->strategy });
    td_module root = td_root(td);
    nn_linear hidden = nn_linear_make(root, "hidden", 20, 32), out = nn_linear_make(root, "out", 32, 4);
    nn_dropout drop = nn_dropout_make(root, "drop", 0.1);
    opt_scaler *scaler = opt_scaler_open(td, NULL);
    opt_optimizer *opt = opt_adamw(root, &(opt_adamw_options){ .decay = 0.01, .max_norm = 1, .scaler = scaler });
    opt_ema *ema = opt_ema_open(root, NULL);
    double x[ROWS * 20] = { 0 };
    int32_t labels[ROWS] = { 0 };
    bool good = true;
    for (int s = 0; s < STEPS && good; s++) {
        if (s == 1 && j->profiled) td_profile_begin(td, j->accumulate * STEPS);
        if (s == 1) calls.on = true;
        for (int k = 0; k < j->accumulate && good; k++) {
            td_tensor in = td_batch(td, "x", td_float(td), TD_SHAPE(ROWS, 20), x), y = td_batch(td, "y", TD_I32, TD_SHAPE(ROWS), labels);
            td_tensor h = nn_linear_apply(&hidden, in);
            h = td_expression("a * sigmoid(1.702 * a)", 1, &h);
            h = nn_dropout_apply(&drop, td_with_gradient(h, &h, 1, &rule, "marked", 6));
            td_tensor loss = td_cross_entropy(nn_linear_apply(&out, h), y);
            td_keep(loss);
            td_backward(opt_scaler_scale(scaler, loss));
            if (k + 1 == j->accumulate) opt_step(opt, 1e-3 / (s + 1));
            if (k + 1 == j->accumulate) opt_ema_update(ema);
            good = td_step(td) && isfinite(td_item(loss));
        }
    }
    calls.on = false;
    int64_t plans = td_last_report(td).plans;
    opt_close(opt);
    td_close(td);
    return good && plans == (j->accumulate > 1 ? j->accumulate : 1) ? 0 : 1;
}

static void expect_none(job j)
{
    calls.ours = calls.theirs = 0;
    ck_assert_int_eq(par_run_threads(j.ranks, NULL, train, &j), 0);
    printf("%s, %s on %d ranks, accumulation %d: %lld allocations of ours, %lld of libraries\n", td_dtype_name(j.dtype), j.strategy, j.ranks,
           j.accumulate, (long long)calls.ours, (long long)calls.theirs);
    ck_assert_int_eq(calls.ours, 0);
    if (j.dtype == TD_F64) ck_assert_int_eq(calls.theirs, 0); /* no library is asked for products */
}

START_TEST(test_the_count_counts)
{
    calls.ours = 0;
    calls.on = true;
    void *volatile memory = malloc(10);
    calls.on = false;
    free(memory);
    ck_assert_int_eq(calls.ours, 1);
}
END_TEST

START_TEST(test_steps_allocate_nothing)
{
    static const td_dtype dtypes[] = { TD_F64, TD_F32, TD_BF16 };
    for (int d = 0; d < (has_bf16_products() ? 3 : 2); d++)
        for (int accumulate = 1; accumulate <= 3; accumulate++)
            expect_none((job){ .dtype = dtypes[d], .accumulate = accumulate, .ranks = 1, .strategy = "single" });
}
END_TEST

/* A rank plans before it meets the others in the step, so when one is in its second step all have planned. */
START_TEST(test_steps_on_ranks_allocate_nothing)
{
    expect_none((job){ .dtype = TD_F64, .accumulate = 2, .ranks = 2, .strategy = "ddp" });
    expect_none((job){ .dtype = TD_F64, .accumulate = 2, .ranks = 2, .strategy = "fsdp" });
}
END_TEST

START_TEST(test_profiled_steps_allocate_nothing)
{
    expect_none((job){ .dtype = TD_F64, .accumulate = 2, .ranks = 1, .strategy = "single", .profiled = true });
}
END_TEST

TESTS("malloc", test_the_count_counts, test_steps_allocate_nothing, test_steps_on_ranks_allocate_nothing, test_profiled_steps_allocate_nothing)
