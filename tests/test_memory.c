/* Memory: what was planned is what was asked for, nothing churns, dead memory is not read, every failure is an error.
 *
 * Labels: valgrind
 * Timeout: 300 s
 */
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

/* An allocator that counts by kind, and fails once when its turn comes. */
typedef struct counter {
    int64_t now, peak;                        /* bytes of state and step memory */
    int64_t calls, live;
    int64_t fail_at;                          /* the call that fails, -1: none */
} counter;

static bool is_planned(const char *kind) { return !strcmp(kind, "state") || !strcmp(kind, "step"); }

static void *counted_get(void *user, size_t bytes, const char *kind)
{
    counter *c = user;
    if (c->calls++ == c->fail_at) return NULL;
    if (is_planned(kind)) c->now += (int64_t)bytes;
    if (c->now > c->peak) c->peak = c->now;
    c->live++;
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

static void counted_put(void *user, void *memory, size_t bytes, const char *kind)
{
    counter *c = user;
    if (is_planned(kind)) c->now -= (int64_t)bytes;
    c->live--;
    free(memory);
}

static void quiet(void *user, td_level level, const char *text) { (void)user, (void)level, (void)text; }

static td_context *open_counted(counter *c, td_dtype dtype, const char *passes, bool poison)
{
    td_allocator allocator = { c, counted_get, counted_put };
    return td_open(&(td_options){ .dtype = dtype, .seed = 1, .threads = 1, .allocator = &allocator, .passes = passes, .poison = poison, .log = quiet });
}

enum { ROWS = 24, IN = 20, HIDDEN = 32, CLASSES = 5 };

typedef struct net {
    nn_linear hidden, out;
    nn_dropout drop;
    opt_optimizer *opt;
} net;

static net make_net(td_context *td, int64_t hidden)
{
    td_module root = td_root(td);
    net n = { nn_linear_make(root, "hidden", IN, hidden), nn_linear_make(root, "out", hidden, CLASSES), nn_dropout_make(root, "drop", 0.1), NULL };
    n.opt = opt_adamw(root, &(opt_adamw_options){ .decay = 0.01, .max_norm = 1 });
    return n;
}

static double step(td_context *td, const net *n, const double *x, const int32_t *labels, int64_t rows)
{
    static float x32[4096 * IN];
    for (int64_t i = 0; i < rows * IN; i++) x32[i] = (float)x[i];
    td_tensor in = td_input(td, "x", td_float(td), TD_SHAPE(rows, IN), td_float(td) == TD_F64 ? (const void *)x : (const void *)x32);
    td_tensor h = nn_dropout_apply(&n->drop, td_relu(nn_linear_apply(&n->hidden, in)));
    td_tensor loss = td_cross_entropy(nn_linear_apply(&n->out, h), td_input(td, "y", TD_I32, TD_SHAPE(rows), labels));
    td_backward(loss);
    opt_step(n->opt, 1e-2);
    if (!td_step(td)) return NAN;
    return td_item(loss);
}

static void make_data(double *x, int32_t *labels, int64_t rows)
{
    for (int64_t i = 0; i < rows * IN; i++) x[i] = check_normal((uint64_t)i);
    for (int64_t r = 0; r < rows; r++) labels[r] = (int32_t)(r % CLASSES);
}

START_TEST(test_the_planned_peak_is_what_was_allocated)
{
    static double x[4096 * IN];
    static int32_t labels[4096];
    make_data(x, labels, 4096);
    static const td_dtype dtypes[] = { TD_F64, TD_F32, TD_BF16 };
    for (int d = 0; d < (has_bf16_products() ? 3 : 2); d++)
        for (int64_t rows = 16; rows <= 4096; rows *= 16) {
            counter c = { .fail_at = -1 };
            td_context *td = open_counted(&c, dtypes[d], NULL, false);
            net n = make_net(td, 128);
            for (int s = 0; s < 3; s++) ck_assert(!isnan(step(td, &n, x, labels, rows)));
            td_report r = td_last_report(td);
            ck_assert_msg(llabs(r.peak_bytes - c.peak) * 100 <= c.peak, "%s, %lld rows: planned %lld, allocated %lld", td_dtype_name(dtypes[d]),
                          (long long)rows, (long long)r.peak_bytes, (long long)c.peak);
            ck_assert_msg(r.step_bytes * 100 <= r.live_bytes * 105, "%s, %lld rows: arena %lld, alive %lld", td_dtype_name(dtypes[d]),
                          (long long)rows, (long long)r.step_bytes, (long long)r.live_bytes);
            opt_close(n.opt);
            td_close(td);
            ck_assert_int_eq(c.live, 0);
        }
}
END_TEST

START_TEST(test_from_the_second_step_the_context_allocates_nothing)
{
    double x[ROWS * IN];
    int32_t labels[ROWS];
    make_data(x, labels, ROWS);
    counter c = { .fail_at = -1 };
    td_context *td = open_counted(&c, TD_F32, NULL, false);
    net n = make_net(td, HIDDEN);
    ck_assert(!isnan(step(td, &n, x, labels, ROWS)));
    int64_t calls = c.calls;
    for (int s = 0; s < 10; s++) ck_assert(!isnan(step(td, &n, x, labels, ROWS)));
    ck_assert_int_eq(c.calls, calls);
    ck_assert_int_eq(td_last_report(td).plans, 1);
    opt_close(n.opt);
    td_close(td);
}
END_TEST

static void curve(const char *passes, bool poison, double out[5], td_report *report)
{
    double x[ROWS * IN];
    int32_t labels[ROWS];
    make_data(x, labels, ROWS);
    counter c = { .fail_at = -1 };
    td_context *td = open_counted(&c, TD_F64, passes, poison);
    net n = make_net(td, HIDDEN);
    for (int s = 0; s < 5; s++) out[s] = step(td, &n, x, labels, ROWS);
    *report = td_last_report(td);
    ck_assert_no_error(td);
    opt_close(n.opt);
    td_close(td);
}

START_TEST(test_poisoned_dead_memory_is_never_read)
{
    double clean[5], poisoned[5];
    td_report report;
    curve(NULL, false, clean, &report);
    curve(NULL, true, poisoned, &report);
    for (int s = 0; s < 5; s++) ck_assert_double_eq(poisoned[s], clean[s]);
}
END_TEST

START_TEST(test_each_rewrite_changes_the_program_and_not_the_result)
{
    double with[5], without[5];
    td_report all, less;
    curve(NULL, false, with, &all);
    static const char *const passes[] = { "-simplify", "-fuse", "-simplify,-fuse" };
    for (int p = 0; p < 3; p++) {
        curve(passes[p], false, without, &less);
        ck_assert_msg(less.calls > all.calls, "%s: %lld calls, %lld with it", passes[p], (long long)less.calls, (long long)all.calls);
        for (int s = 0; s < 5; s++) ck_assert_double_eq_tol(without[s], with[s], 1e-14);
    }
}
END_TEST

/* A whole life of a context in which the call number fail_at of the allocator fails. True if nothing failed. */
static bool live_and_fail(counter *c, td_dtype dtype)
{
    double x[ROWS * IN];
    int32_t labels[ROWS];
    make_data(x, labels, ROWS);
    td_context *td = open_counted(c, dtype, NULL, false);
    net n = make_net(td, HIDDEN);
    for (int s = 0; s < 2; s++) step(td, &n, x, labels, ROWS);
    td_tensor pending = td_sum(td_use(n.hidden.weight), TD_ALL, TD_DROP);
    td_item(pending);
    bool good = td_error(td) == TD_OK;
    if (!good) {
        ck_assert_int_eq(td_error(td), TD_ERROR_MEMORY);
        ck_assert(*td_error_text(td));
    }
    opt_close(n.opt);
    td_close(td);
    return good;
}

/* The same for planning a step of two ranks under fsdp. */
static bool plan_and_fail(counter *c)
{
    double x[ROWS * IN];
    int32_t labels[ROWS];
    make_data(x, labels, ROWS);
    td_context *td = open_counted(c, TD_F32, NULL, false);
    par_world *world = par_world_none(2, 1);
    par_attach(td, world, 1, &(par_options){ .strategy = "fsdp", .units = "hidden,out" });
    net n = make_net(td, HIDDEN);
    td_tensor in = td_batch(td, "x", TD_F32, TD_SHAPE(2 * ROWS, IN), x), y = td_batch(td, "y", TD_I32, TD_SHAPE(2 * ROWS), labels);
    td_backward(td_cross_entropy(nn_linear_apply(&n.out, td_relu(nn_linear_apply(&n.hidden, in))), y));
    opt_step(n.opt, 1e-2);
    bool good = td_plan(td);
    ck_assert_int_eq(td_error(td), good ? TD_OK : TD_ERROR_MEMORY);
    opt_close(n.opt);
    td_close(td);
    par_world_close(world);
    return good;
}

START_TEST(test_every_allocation_that_fails_while_placing_is_an_error)
{
    int64_t failures = 0;
    for (bool good = false; !good; failures++) {
        counter c = { .fail_at = failures };
        good = plan_and_fail(&c);
        ck_assert_msg(c.live == 0, "call %lld failed: %lld allocations are left", (long long)failures, (long long)c.live);
    }
    ck_assert_int_gt(failures, 100);
}
END_TEST

START_TEST(test_every_allocation_that_fails_is_an_error)
{
    static const td_dtype dtypes[] = { TD_F64, TD_BF16 };
    for (int d = 0; d < (has_bf16_products() ? 2 : 1); d++) {
        int64_t failures = 0;
        for (bool good = false; !good; failures++) {
            counter c = { .fail_at = failures };
            good = live_and_fail(&c, dtypes[d]);
            ck_assert_msg(c.live == 0, "call %lld failed: %lld allocations are left", (long long)failures, (long long)c.live);
            ck_assert_msg(good == (c.calls <= failures), "call %lld failed without an error", (long long)failures);
        }
        ck_assert_int_gt(failures, 100);
    }
}
END_TEST

TESTS("memory", test_the_planned_peak_is_what_was_allocated, test_from_the_second_step_the_context_allocates_nothing,
      test_poisoned_dead_memory_is_never_read, test_each_rewrite_changes_the_program_and_not_the_result,
      test_every_allocation_that_fails_is_an_error, test_every_allocation_that_fails_while_placing_is_an_error)
