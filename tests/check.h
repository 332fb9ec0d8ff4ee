/* What every test file shares: Check without forking, a few tensors, comparisons, and main.
 *
 *     #include "tests/check.h"
 *
 *     START_TEST(test_ones_sum_to_their_count)
 *     {
 *         td_context *td = open_cpu(TD_F64);
 *         ck_assert_tensor_near(td_sum(ones(td, 6), TD_ALL, TD_DROP), scalar(td, 6), 1e-15);
 *         td_close(td);
 *     }
 *     END_TEST
 *
 *     TESTS("ones", test_ones_sum_to_their_count)
 *
 * A file is one process and one CTest entry. CK_RUN_CASE=test_name runs one of its tests; one that does not exist is an error. The file's first comment may
 * hold lines for CTest:  "Labels: threads valgrind"  and  "Timeout: 300 s" (120 s otherwise). Tests labelled `release`
 * run in Release builds only and alone (they measure time); those labelled `threads` run under ThreadSanitizer too,
 * those labelled `valgrind` under valgrind (./check.sh --all), where oneDNN has no bf16.
 *
 * TANDEM_BIN is the folder of the binaries, TANDEM_SOURCE the checkout. TANDEM_TEST_ALL=1 asks for the full matrices.
 */
#ifndef TANDEM_TESTS_CHECK_H
#define TANDEM_TESTS_CHECK_H

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tandem/core.h>

#define CHECK_UNUSED __attribute__((unused))

/* ---- The running test ------------------------------------------------------------------------------------- */

typedef struct check_memory {
    struct check_memory *next;
    double at[]; /* f64 or f32 elements */
} check_memory;

/* Begins afresh with every test. */
static struct {
    uint64_t draws;      /* counter of randn */
    check_memory *memory; /* freed when the test ends */
    FILE *log_stream;
    char *log;           /* what contexts opened here said, one message a line */
    size_t log_bytes;
} check_now;

static int check_skipped;

static void check_begin(void)
{
    memset(&check_now, 0, sizeof check_now);
    check_now.log_stream = open_memstream(&check_now.log, &check_now.log_bytes);
    ck_assert_ptr_nonnull(check_now.log_stream);
}

static void check_end(void)
{
    fclose(check_now.log_stream);
    free(check_now.log);
    while (check_now.memory) {
        check_memory *next = check_now.memory->next;
        free(check_now.memory);
        check_now.memory = next;
    }
}

/* Host memory, zeroed, that lives until the test ends. */
static inline CHECK_UNUSED void *check_alloc(size_t bytes)
{
    check_memory *m = calloc(1, sizeof *m + bytes + 1);
    ck_assert_ptr_nonnull(m);
    m->next = check_now.memory;
    check_now.memory = m;
    return m->at;
}

static inline CHECK_UNUSED void check_skip(const char *function, const char *reason)
{
    printf("skipped: %.*s: %s\n", (int)strlen(function) - 3, function, reason); /* Check adds "_fn" to the name */
    check_skipped++;
}

/* Ends the test here, as skipped: a machine lacks what it needs. */
#define SKIP(reason)                   \
    do {                               \
        check_skip(__func__, (reason)); \
        return;                        \
    } while (0)

static inline CHECK_UNUSED bool check_all(void)
{
    const char *all = getenv("TANDEM_TEST_ALL");
    return all && strcmp(all, "1") == 0;
}

/* ---- Contexts and tensors --------------------------------------------------------------------------------- */

static inline CHECK_UNUSED void check_log_line(void *user, td_level level, const char *text)
{
    (void)user;
    (void)level;
    fprintf(check_now.log_stream, "%s\n", text);
}

/* Everything logged by the contexts of this test so far. */
static inline CHECK_UNUSED const char *log_text(void)
{
    fflush(check_now.log_stream);
    return check_now.log;
}

/* A context on the CPU: seed 1, two threads, messages kept for log_text. */
static inline CHECK_UNUSED td_context *open_cpu(td_dtype dtype)
{
    td_context *td = td_open(&(td_options){ .dtype = dtype, .seed = 1, .threads = 2, .log = check_log_line });
    ck_assert_msg(td_error(td) == TD_OK, "td_open: %s", td_error_text(td));
    return td;
}

/* Whether oneDNN has bf16 matrix products on this processor; without, planning says so. */
static inline CHECK_UNUSED bool has_bf16_products(void)
{
    td_context *td = td_open(&(td_options){ .dtype = TD_BF16, .log = check_log_line });
    float x[4] = { 1, 2, 3, 4 };
    td_tensor a = td_input(td, "a", TD_F32, TD_SHAPE(2, 2), x);
    td_keep(td_matmul(a, a));
    bool has = td_step(td);
    if (!has) ck_assert_msg(strstr(td_error_text(td), "bf16 matrix products need a processor with AVX-512"), "%s", td_error_text(td));
    td_close(td);
    return has;
}

/* A number of N(0, 1), the same on every machine for the same counter: splitmix64, then Box and Muller. */
static inline CHECK_UNUSED double check_normal(uint64_t counter)
{
    double uniform[2];
    for (uint64_t i = 0; i < 2; i++) {
        uint64_t z = (2 * counter + i + 1) * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        uniform[i] = ((double)((z ^ (z >> 31)) >> 11) + 0.5) * 0x1p-53;
    }
    return sqrt(-2 * log(uniform[0])) * cos(6.283185307179586 * uniform[1]);
}

static inline CHECK_UNUSED td_tensor check_randn(td_context *td, td_shape shape)
{
    td_dtype dtype = td_float(td);
    int64_t n = td_shape_elements(shape);
    void *data = check_alloc((size_t)(n * td_dtype_size(dtype)));
    for (int64_t i = 0; i < n; i++) {
        double x = check_normal(check_now.draws++);
        if (dtype == TD_F64)
            ((double *)data)[i] = x;
        else
            ((float *)data)[i] = (float)x;
    }
    return td_input(td, "randn", dtype, shape, data);
}

/* randn(td, 6, 33): an input of N(0, 1) numbers in td_float; each call draws others, each test the same. */
#define randn(td, ...) check_randn((td), TD_SHAPE(__VA_ARGS__))
/* ones(td, 6) */
#define ones(td, ...) td_fill((td), td_float(td), TD_SHAPE(__VA_ARGS__), 1)
#define scalar(td, value) td_scalar((td), (value))

/* Sum over parameters of their sum times a number of their own: an element that was updated nowhere, or twice, changes it. One step. */
static inline CHECK_UNUSED double sum_of_parameters(td_context *td)
{
    td_tensor total = td_fill(td, td_float(td), (td_shape){ 0 }, 0);
    for (int64_t s = 0; s < td_state_count(td); s++) {
        td_state state = td_state_at(td, s);
        if (td_state_kind_of(state) != TD_PARAMETER) continue;
        td_tensor sum = td_sum(td_use(state), TD_ALL, TD_DROP);
        total = td_add(total, td_scale(sum, 1 + (double)(s % 7) / 4));
    }
    td_keep(total);
    return td_step(td) ? td_item(total) : (double)NAN;
}

/* ---- Assertions ------------------------------------------------------------------------------------------- */

/* The elements of a f32 or f64 tensor as doubles, alive until the test ends. */
static inline CHECK_UNUSED const double *check_read(td_tensor t, const char *what, const char *file, int line)
{
    td_dtype dtype = td_dtype_at(t);
    int64_t n = td_shape_elements(td_shape_at(t));
    if (td_failed(t)) ck_abort_msg("%s:%d: %s failed: %s", file, line, what, td_error_text(t.td));
    if (dtype != TD_F32 && dtype != TD_F64)
        ck_abort_msg("%s:%d: %s is %s, not f32 or f64", file, line, what, td_dtype_name(dtype));
    double *values = check_alloc((size_t)n * sizeof *values);
    if (!td_read(t, values)) ck_abort_msg("%s:%d: reading %s: %s", file, line, what, td_error_text(t.td));
    if (dtype == TD_F32) /* widened in place, from the end */
        for (int64_t i = n; i-- > 0;) {
            float narrow;
            memcpy(&narrow, (const char *)values + i * (int64_t)sizeof narrow, sizeof narrow);
            values[i] = narrow;
        }
    return values;
}

/* A state of one f32, by its name. */
static inline CHECK_UNUSED double check_state_number(td_context *td, const char *name)
{
    float value;
    ck_assert_msg(td_state_read(td_state_named(td, name), 0, 1, &value), "%s", td_error_text(td));
    return (double)value;
}

/* |got - want| <= tolerance * max(1, |want|) for n numbers; NaN is near nothing. */
static inline CHECK_UNUSED void check_near(const double *got, const double *want, int64_t n, double tolerance,
                                         const char *what, const char *file, int line)
{
    int64_t worst = -1;
    double worst_error = 0;
    for (int64_t i = 0; i < n; i++) {
        double error = got[i] == want[i] ? 0 : fabs(got[i] - want[i]) / fmax(1, fabs(want[i]));
        if (error <= tolerance) continue;
        if (worst >= 0 && !(error > worst_error) && !isnan(error)) continue;
        worst = i;
        worst_error = error;
    }
    if (worst >= 0)
        ck_abort_msg("%s:%d: %s: element %lld is %.17g, not %.17g: off by %.3g, allowed %.3g", file, line, what,
                     (long long)worst, got[worst], want[worst], worst_error, tolerance);
}

static inline CHECK_UNUSED void check_tensor_near(td_tensor a, td_tensor b, double tolerance, const char *what,
                                                const char *file, int line)
{
    td_shape shape = td_shape_at(a);
    const double *got = check_read(a, what, file, line);
    if (!td_shape_equal(shape, td_shape_at(b))) ck_abort_msg("%s:%d: %s: the shapes differ", file, line, what);
    check_near(got, check_read(b, what, file, line), td_shape_elements(shape), tolerance, what, file, line);
}

/* Tensors of one shape, f32 or f64, agree: |a - b| <= tolerance * max(1, |b|) for every element. */
#define ck_assert_tensor_near(a, b, tolerance) check_tensor_near((a), (b), (tolerance), #a " near " #b, __FILE__, __LINE__)
/* The same for n doubles in memory. */
#define ck_assert_near(a, b, n, tolerance) check_near((a), (b), (n), (tolerance), #a " near " #b, __FILE__, __LINE__)

/* How many times the part is in the text. */
static inline CHECK_UNUSED int count_of(const char *text, const char *part)
{
    int count = 0;
    for (const char *at = text; (at = strstr(at, part)); at += strlen(part)) count++;
    return count;
}

#define ck_assert_str_has(text, part)                                                                      \
    do {                                                                                                   \
        const char *text_ = (text), *part_ = (part);                                                       \
        ck_assert_msg(text_ && strstr(text_, part_), "\"%s\" does not hold \"%s\"", text_ ? text_ : "(null)", part_); \
    } while (0)

/* No failure is kept in td; says which one is otherwise. */
#define ck_assert_no_error(td) ck_assert_msg(td_error(td) == TD_OK, "%s", td_error_text(td))

/* ---- main ------------------------------------------------------------------------------------------------- */

enum { CHECK_EXIT_SKIPPED = 77 }; /* CTest's SKIP_RETURN_CODE */

static inline int check_main(const char *name, const TTest *const *tests, int count)
{
    Suite *suite = suite_create(name);
    for (int i = 0; i < count; i++) {
        TCase *one = tcase_create(tests[i]->name);
        tcase_add_checked_fixture(one, check_begin, check_end);
        tcase_add_test(one, tests[i]);
        suite_add_tcase(suite, one);
    }
    SRunner *runner = srunner_create(suite);
    srunner_set_fork_status(runner, CK_NOFORK);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    int run = srunner_ntests_run(runner);
    srunner_free(runner);
    if (failed) return 1;
    if (!run) { /* a name that is mistyped must not pass */
        const char *one = getenv("CK_RUN_CASE");
        fprintf(stderr, "%s: no test ran: CK_RUN_CASE is '%s', which is none of its tests\n", name, one ? one : "");
        return 1;
    }
    return check_skipped == run ? CHECK_EXIT_SKIPPED : 0;
}

/* Defines main, which runs the tests named. */
#define TESTS(name, ...)                                                              \
    int main(void)                                                                    \
    {                                                                                 \
        const TTest *const tests_[] = { __VA_ARGS__ };                                \
        return check_main((name), tests_, (int)(sizeof tests_ / sizeof tests_[0]));    \
    }

#endif
