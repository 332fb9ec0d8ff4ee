/* What operations give for infinities, NaN, zeros with a sign, the largest and the smallest numbers; for indices out of
 * range; for integers and sizes that overflow. Expectations are literal: those of C's math.h and NumPy where they have the
 * function, else of its formula.
 * Labels: valgrind
 * Timeout: 300 s
 */
#include "tests/check.h"

#include "core/cpu.h"
#include "core/ops/list.h"
#include "core/ops/pointwise_table.h"

#include <float.h>

#define I INFINITY
#define N NAN

/* ---- One value through one operation -------------------------------------------------------------------------- */

typedef struct row {
    const td_op *op;
    double a, b, c, want;
} row;

static const row functions[] = {
#define AT(name, at_inf, at_minus_inf, at_nan, at_0, at_minus_0) \
    { &td_op_##name, I, 0, 0, at_inf }, { &td_op_##name, -I, 0, 0, at_minus_inf }, { &td_op_##name, N, 0, 0, at_nan }, \
    { &td_op_##name, 0.0, 0, 0, at_0 }, { &td_op_##name, -0.0, 0, 0, at_minus_0 }
    AT(neg, -I, I, N, -0.0, 0.0),
    AT(exp, I, 0.0, N, 1, 1),
    AT(log, I, N, N, -I, -I),
    AT(sqrt, I, N, N, 0.0, -0.0),
    AT(rsqrt, 0.0, N, N, I, -I),
    AT(tanh, 1, -1, N, 0.0, -0.0),
    AT(sigmoid, 1, 0.0, N, 0.5, 0.5),
    AT(relu, I, 0.0, N, 0.0, -0.0),
    AT(abs, I, I, N, 0.0, 0.0),
    AT(square, I, I, N, 0.0, 0.0),
    AT(reciprocal, 0.0, -0.0, N, I, -I),
    AT(sin, N, N, N, 0.0, -0.0),
    AT(cos, N, N, N, 1, 1),
    AT(sign, 1, -1, 0.0, 0.0, 0.0),
    AT(positive, 1, 0.0, 0.0, 0.0, 0.0),
    AT(detach, I, -I, N, 0.0, -0.0),
    AT(erf, 1, -1, N, 0.0, -0.0),
    AT(log1p, I, N, N, 0.0, -0.0),
    AT(expm1, I, -1, N, 0.0, -0.0),
    AT(softplus, I, 0.0, N, 0.69314718055994531, 0.69314718055994531),
    AT(gelu, I, N, N, 0.0, -0.0), /* at -infinity 0 times infinity, as the formula has it */
    AT(gelu_tanh, I, N, N, 0.0, -0.0),
    AT(silu, I, N, N, 0.0, -0.0),
    { &td_op_log, -1, 0, 0, N }, { &td_op_sqrt, -1, 0, 0, N }, { &td_op_log1p, -1, 0, 0, -I }, { &td_op_log1p, -2, 0, 0, N },
    { &td_op_add, I, -I, 0, N }, { &td_op_add, I, 1, 0, I }, { &td_op_add, -0.0, -0.0, 0, -0.0 },
    { &td_op_add, -0.0, 0.0, 0, 0.0 }, { &td_op_add, N, 1, 0, N }, { &td_op_sub, I, I, 0, N },
    { &td_op_mul, I, 0, 0, N }, { &td_op_mul, -0.0, 1, 0, -0.0 }, { &td_op_mul, N, 0, 0, N },
    { &td_op_div, 1, 0.0, 0, I }, { &td_op_div, -1, 0.0, 0, -I }, { &td_op_div, 0, 0, 0, N }, { &td_op_div, 1, I, 0, 0.0 },
    { &td_op_div, I, I, 0, N },
    { &td_op_minimum, N, 1, 0, N }, { &td_op_minimum, 1, N, 0, N }, { &td_op_minimum, -I, 1, 0, -I }, { &td_op_minimum, I, 1, 0, 1 },
    { &td_op_maximum, N, 1, 0, N }, { &td_op_maximum, 1, N, 0, N }, { &td_op_maximum, I, 1, 0, I }, { &td_op_maximum, -I, 1, 0, 1 },
    { &td_op_pow, 0, 0, 0, 1 }, { &td_op_pow, N, 0, 0, 1 }, { &td_op_pow, 1, N, 0, 1 }, { &td_op_pow, 2, N, 0, N },
    { &td_op_pow, -2, 3, 0, -8 }, { &td_op_pow, -2, 0.5, 0, N }, { &td_op_pow, 0.0, -1, 0, I }, { &td_op_pow, -0.0, -1, 0, -I },
    { &td_op_pow, I, -1, 0, 0.0 }, { &td_op_pow, 2, -I, 0, 0.0 }, { &td_op_pow, -I, 3, 0, -I },
    { &td_op_less, N, 1, 0, 0.0 }, { &td_op_less, 1, N, 0, 0.0 }, { &td_op_less, -I, I, 0, 1 }, { &td_op_less, -0.0, 0.0, 0, 0.0 },
    { &td_op_less_equal, I, I, 0, 1 }, { &td_op_less_equal, N, N, 0, 0.0 },
    { &td_op_equal, N, N, 0, 0.0 }, { &td_op_equal, I, I, 0, 1 }, { &td_op_equal, 0.0, -0.0, 0, 1 },
    { &td_op_swiglu, 1, N, 0, N }, { &td_op_swiglu, 0, I, 0, N }, { &td_op_swiglu, I, 1, 0, I },
    { &td_op_where, 1, 2, N, 2 }, { &td_op_where, 0, N, 3, 3 }, { &td_op_where, -0.0, N, 3, 3 }, { &td_op_where, N, 2, 3, 2 },
    { &td_op_where, 1, I, N, I }, { &td_op_where, 1, -0.0, N, -0.0 },
};
enum { FUNCTIONS = sizeof functions / sizeof *functions };

/* The same to `tolerance`, a zero with its sign. */
static bool same(double got, double want, double tolerance)
{
    if (isnan(want))
        return isnan(got);
    if (isinf(want) || want == 0)
        return got == want && signbit(got) == signbit(want);
    return fabs(got - want) <= tolerance * fabs(want);
}

static td_tensor operand(td_context *td, td_dtype dtype, int64_t n, double value, double filler)
{
    double *x = check_alloc((size_t)n * sizeof *x);
    float *narrow = check_alloc((size_t)n * sizeof *narrow);
    for (int64_t i = 0; i < n; i++)
        narrow[i] = (float)(x[i] = i % 3 == 1 ? filler : value); /* a neighbour must not change it */
    td_tensor t = td_float(td) == TD_F64 ? td_input(td, "x", TD_F64, TD_SHAPE(n), x) : td_input(td, "x", TD_F32, TD_SHAPE(n), narrow);
    return dtype == td_float(td) ? t : td_cast(t, dtype);
}

/* Every element of 0 to 66 of them, so in bodies and in tails of any width; alone, or in a chain that undoes itself. */
static void check_functions(td_dtype dtype, const char *passes)
{
    enum { MOST = 67 };
    td_context *td = td_open(&(td_options){ .dtype = dtype == TD_F64 ? TD_F64 : TD_F32, .threads = 1, .passes = passes,
                                            .log = check_log_line });
    for (int f = 0; f < FUNCTIONS; f++) {
        const row *r = &functions[f];
        for (int64_t n = MOST; n > 0; n = n == MOST ? 9 : n - 4) {
            td_tensor in[3] = { operand(td, dtype, n, r->a, 0.5), operand(td, dtype, n, r->b, 0.5),
                                operand(td, dtype, n, r->c, 0.5) };
            td_tensor y = td_neg(td_neg(td_record(r->op, TD_HERE, r->op->inputs, in, NULL)));
            const double *got = check_read(dtype == TD_BF16 ? td_cast(y, TD_F32) : y, r->op->name, __FILE__, __LINE__);
            for (int64_t i = 0; i < n; i++)
                ck_assert_msg(i % 3 == 1 || same(got[i], r->want, dtype == TD_BF16 ? 0x1p-8 : dtype == TD_F32 ? 4e-7 : 1e-15),
                              "%s(%g, %g, %g) is %g, not %g: %s, element %d of %d, passes %s", r->op->name, r->a, r->b, r->c,
                              got[i], r->want, td_dtype_name(dtype), (int)i, (int)n, passes ? passes : "all");
        }
    }
    td_close(td);
}

START_TEST(test_special_values_pass_through_functions)
{
    const td_dtype dtypes[] = { TD_F32, TD_F64, TD_BF16 };
    for (int d = 0; d < 3; d++) {
        check_functions(dtypes[d], NULL);
        check_functions(dtypes[d], "-fuse");
    }
}
END_TEST

/* Each set of f32 loops, whichever of them this processor would choose. */
START_TEST(test_special_values_pass_through_loops_of_every_width)
{
    const td_pointwise_f32_loop *const sets[] = { td_pointwise_f32_plain, td_pointwise_f32_avx512 };
    for (int s = 0; s < (td_cpu_has_avx512() ? 2 : 1); s++)
        for (int f = 0; f < FUNCTIONS; f++)
            for (int n = 1; n <= 35; n++) {
                const row *r = &functions[f];
                float a[35], b[35], c[35], y[35];
                for (int i = 0; i < n; i++)
                    a[i] = (float)r->a, b[i] = (float)r->b, c[i] = (float)r->c;
                sets[s][r->op->pointwise](y, a, b, c, n);
                for (int i = 0; i < n; i++)
                    ck_assert_msg(same((double)y[i], r->want, 4e-7), "%s(%g, %g, %g) is %g, not %g: set %d, element %d of %d",
                                  r->op->name, r->a, r->b, r->c, (double)y[i], r->want, s, i, n);
            }
}
END_TEST

/* At the largest number and its negative, the smallest normal and the smallest of all: values, and for the first two slopes. */
START_TEST(test_the_largest_and_the_smallest_numbers)
{
    const struct {
        const td_op *op;
        double at[4], slope[2];
    } ends[] = {
        { &td_op_exp, { I, 0, 1, 1 }, { I, 0 } },
        { &td_op_tanh, { 1, -1, FLT_MIN, FLT_TRUE_MIN }, { 0, 0 } },
        { &td_op_sigmoid, { 1, 0, 0.5, 0.5 }, { 0, 0 } },
        { &td_op_relu, { FLT_MAX, 0, FLT_MIN, FLT_TRUE_MIN }, { 1, 0 } },
        { &td_op_abs, { FLT_MAX, FLT_MAX, FLT_MIN, FLT_TRUE_MIN }, { 1, -1 } },
        { &td_op_square, { I, I, 0, 0 }, { I, -I } },
        { &td_op_erf, { 1, -1, 1.1283791670955126 * FLT_MIN, FLT_TRUE_MIN }, { 0, 0 } },
        { &td_op_expm1, { I, -1, FLT_MIN, FLT_TRUE_MIN }, { I, 0 } },
        { &td_op_softplus, { FLT_MAX, 0, 0.69314718055994531, 0.69314718055994531 }, { 1, 0 } },
        { &td_op_gelu, { FLT_MAX, -0.0, 0.5 * FLT_MIN, 0 }, { 1, 0 } },
        { &td_op_gelu_tanh, { FLT_MAX, -0.0, 0.5 * FLT_MIN, 0 }, { 1, 0 } },
        { &td_op_silu, { FLT_MAX, -0.0, 0.5 * FLT_MIN, 0 }, { 1, 0 } },
        { &td_op_log1p, { 88.722839111673, N, FLT_MIN, FLT_TRUE_MIN }, { 0, 0 } },
    };
    td_context *td = open_cpu(TD_F32);
    const float x[4] = { FLT_MAX, -FLT_MAX, FLT_MIN, FLT_TRUE_MIN };
    for (size_t e = 0; e < sizeof ends / sizeof *ends; e++) {
        td_tensor in = td_input(td, "x", TD_F32, TD_SHAPE(4), x), y = td_record(ends[e].op, TD_HERE, 1, &in, NULL);
        td_tensor dx = td_gradient(y, in);
        td_keep(dx);
        const double *got = check_read(y, "y", __FILE__, __LINE__), *slope = check_read(dx, "dx", __FILE__, __LINE__);
        for (int i = 0; i < 4; i++)
            ck_assert_msg(same(got[i], ends[e].at[i], 4e-7), "%s(%g) is %g, not %g", ends[e].op->name, (double)x[i], got[i], ends[e].at[i]);
        for (int i = 0; i < 2; i++)
            ck_assert_msg(fabs(slope[i] - ends[e].slope[i]) < 1e-30 || slope[i] == ends[e].slope[i], "the slope of %s at %g is %g, not %g",
                          ends[e].op->name, (double)x[i], slope[i], ends[e].slope[i]);
    }
    td_close(td);
}
END_TEST

/* ---- Rows ----------------------------------------------------------------------------------------------------- */

/* `a`, then `b` up to n elements, the last of them `c`; as dtype. */
static td_tensor row_of(td_context *td, td_dtype dtype, int64_t n, double a, double b, double c)
{
    double *x = check_alloc((size_t)n * sizeof *x);
    float *narrow = check_alloc((size_t)n * sizeof *narrow);
    for (int64_t i = 0; i < n; i++)
        narrow[i] = (float)(x[i] = i == n - 1 ? c : i == 0 ? a : b);
    td_tensor t = td_float(td) == TD_F64 ? td_input(td, "x", TD_F64, TD_SHAPE(1, n), x) : td_input(td, "x", TD_F32, TD_SHAPE(1, n), narrow);
    return dtype == td_float(td) ? t : td_cast(t, dtype);
}

static double first_of(td_tensor t)
{
    td_dtype wide = td_float(t.td);
    t = td_reshape(t, -1);
    return td_item(td_cast(td_slice(t, 0, 0, 1), wide));
}

static double last_of(td_tensor t)
{
    int64_t n = td_shape_elements(td_shape_at(t));
    return first_of(td_slice(td_reshape(t, -1), 0, n - 1, n));
}

/* Rows (a, b ... b, c): what is expected of the log of their sum, and of the first and the last softmax. Rows of 600 take
 * several blocks, of which the first may hold nothing but infinities and a NaN. */
START_TEST(test_rows_with_infinities_and_nan)
{
    static const struct {
        double a, b, c, log_sum, first, last;
    } rows[] = {
        { 0, -I, -I, 0, 1, 0 },   { -I, -I, 3, 3, 0, 1 },  { -I, -I, -I, -I, N, N }, { I, 0, 0, I, N, N }, { 0, -I, I, I, N, N },
        { I, 0, N, N, N, N },     { N, -I, 0, N, N, N },   { N, N, N, N, N, N },     { N, I, 0, N, N, N }, { 0, -I, N, N, N, N },
    };
    const td_dtype dtypes[] = { TD_F32, TD_F64, TD_BF16 };
    for (int d = 0; d < 3; d++)
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
            for (int64_t n = 3; n <= 600; n += 597) {
                td_context *td = open_cpu(dtypes[d] == TD_F64 ? TD_F64 : TD_F32);
                td_tensor x = row_of(td, dtypes[d], n, rows[r].a, rows[r].b, rows[r].c);
                double log_sum = first_of(td_logsumexp(x));
                ck_assert_msg(same(log_sum, rows[r].log_sum, 0), "logsumexp of row %zu of %d is %g", r, (int)n, log_sum);
                td_tensor soft = td_softmax(x), logs = td_log_softmax(x);
                ck_assert_msg(same(first_of(soft), rows[r].first, 0), "softmax of row %zu of %d begins %g", r, (int)n, first_of(soft));
                ck_assert_msg(same(last_of(soft), rows[r].last, 0), "softmax of row %zu of %d ends %g", r, (int)n, last_of(soft));
                ck_assert_msg(same(first_of(logs), log(rows[r].first), 0), "log_softmax of row %zu of %d begins %g", r, (int)n, first_of(logs));
                ck_assert_msg(same(last_of(logs), log(rows[r].last), 0), "log_softmax of row %zu of %d ends %g", r, (int)n, last_of(logs));
                ck_assert_no_error(td);
                td_close(td);
            }
}
END_TEST

#define ROW(td, ...)                                                                                     \
    td_input((td), "x", TD_F64, TD_SHAPE(1, sizeof((double[]){ __VA_ARGS__ }) / sizeof(double)),           \
             memcpy(check_alloc(sizeof((double[]){ __VA_ARGS__ })), (double[]){ __VA_ARGS__ }, sizeof((double[]){ __VA_ARGS__ })))
#define IDS(td, ...)                                                                                     \
    td_input((td), "ids", TD_I32, TD_SHAPE(sizeof((int32_t[]){ __VA_ARGS__ }) / sizeof(int32_t)),          \
             memcpy(check_alloc(sizeof((int32_t[]){ __VA_ARGS__ })), (int32_t[]){ __VA_ARGS__ }, sizeof((int32_t[]){ __VA_ARGS__ })))

#define EXPECT_VALUES(t, ...)                                                                            \
    do {                                                                                                 \
        const double want_[] = { __VA_ARGS__ };                                                          \
        td_tensor t_ = (t);                                                                              \
        const int64_t n_ = (int64_t)(sizeof want_ / sizeof *want_);                                      \
        ck_assert_int_eq(td_shape_elements(td_shape_at(t_)), n_);                                        \
        const double *got_ = check_read(t_, #t, __FILE__, __LINE__);                                     \
        for (int64_t i_ = 0; i_ < n_; i_++)                                                              \
            ck_assert_msg(same(got_[i_], want_[i_], 1e-12), "%s: element %d is %g, not %g", #t, (int)i_, got_[i_], want_[i_]); \
    } while (0)

START_TEST(test_losses_of_infinite_logits)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor masked = ROW(td, 0, -I, -I), dx = td_gradient(td_cross_entropy(masked, IDS(td, 0)), masked);
    EXPECT_VALUES(dx, 0, 0, 0);
    EXPECT_VALUES(td_cross_entropy(ROW(td, 0, -I, 0), IDS(td, 1)), I);
    EXPECT_VALUES(td_cross_entropy(ROW(td, 0, -I, -I), IDS(td, 0)), 0.0);
    EXPECT_VALUES(td_cross_entropy(ROW(td, I, 0), IDS(td, 0)), N);
    EXPECT_VALUES(td_cross_entropy(ROW(td, -I, -I), IDS(td, 0)), N);
    EXPECT_VALUES(td_cross_entropy(ROW(td, 0, N), IDS(td, 0)), N);
    td_gradient_call call = { .td = td, .here = TD_HERE, .inputs = 2, .in = (td_tensor[]){ ROW(td, 0, -I, -I), IDS(td, 0) } };
    EXPECT_VALUES(td_op_cross_entropy_rows.decompose(&call), 0.0);
    call.in = (td_tensor[]){ ROW(td, -I, -I) };
    EXPECT_VALUES(td_op_logsumexp.decompose(&call), -I);
    EXPECT_VALUES(td_huber(ROW(td, I, 0), ROW(td, 0, 0), 1, TD_NO_TENSOR), I);
    EXPECT_VALUES(td_bce(ROW(td, 1e308, -1e308), ROW(td, 1, 0), TD_NO_TENSOR), 0.0);
    td_close(td);
}
END_TEST

START_TEST(test_sums_norms_and_orders_of_special_values)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor weight = td_reshape(ROW(td, 1, 2, 3), 3), bias = td_reshape(ROW(td, 4, 5, 6), 3), flat = ROW(td, 7, 7, 7);
    EXPECT_VALUES(td_layer_norm(flat, weight, bias, 1e-5), 4, 5, 6);
    EXPECT_VALUES(td_layer_norm(flat, weight, bias, 0), N, N, N); /* 0 / 0 */
    EXPECT_VALUES(td_rms_norm(ROW(td, 0, 0, 0), weight, 1e-5), 0, 0, 0);
    EXPECT_VALUES(td_layer_norm(ROW(td, 1, N, 2), weight, bias, 1e-5), N, N, N);
    EXPECT_VALUES(td_cumsum(ROW(td, 1, I, 2, -I, 1)), 1, I, I, N, N);
    EXPECT_VALUES(td_sum(ROW(td, I, 1), 1, TD_DROP), I);
    EXPECT_VALUES(td_sum(ROW(td, I, -I), 1, TD_DROP), N);
    EXPECT_VALUES(td_max(ROW(td, -I, -I), 1, TD_DROP), -I);
    EXPECT_VALUES(td_max(ROW(td, 1, N, 2), 1, TD_DROP), N);
    EXPECT_VALUES(td_max(td_reshape(ROW(td, N, 1, 1, 2, 3, N), 3, 2), 0, TD_DROP), N, N);
    EXPECT_VALUES(td_sort(ROW(td, 0.0, -0.0, I, -I, N), NULL), N, I, 0.0, -0.0, -I);
    EXPECT_VALUES(td_sort(ROW(td, 0.0, -0.0, I, -I, N), (&(td_top_k_options){ .smallest = true })), -I, 0.0, -0.0, I, N);
    EXPECT_VALUES(td_cast(td_argmax(ROW(td, -I, I, N, N)), TD_F64), 2);
    EXPECT_VALUES(td_clamp(ROW(td, N, -I, I), -1, 1), N, -1, 1);
    EXPECT_VALUES(td_mean(td_fill(td, TD_F64, TD_SHAPE(2, 0), 0), 1, TD_DROP), N, N);
    EXPECT_VALUES(td_variance(td_fill(td, TD_F64, TD_SHAPE(2, 0), 0), 1, TD_DROP), N, N);
    EXPECT_VALUES(td_logsumexp(td_fill(td, TD_F64, TD_SHAPE(2, 0), 0)), -I, -I);
    td_tensor x = ROW(td, 3), y = td_where(td_fill(td, TD_F64, TD_SHAPE(1, 1), 1), x, td_log(td_neg(x)));
    EXPECT_VALUES(td_gradient(y, x), 1); /* the NaN of the other branch stays there */
    td_close(td);
}
END_TEST

/* ---- Indices out of range ------------------------------------------------------------------------------------- */

START_TEST(test_indices_out_of_range_reach_nothing)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor far = IDS(td, INT32_MIN, INT32_MAX, -1, 3), row = td_reshape(far, 1, 4), x = ROW(td, 1, 2, 3);
    td_tensor table = td_reshape(x, 3, 1), rows = td_embedding(table, far), chosen = td_gather(x, row);
    EXPECT_VALUES(rows, N, N, N, N);
    EXPECT_VALUES(td_gradient(rows, table), 0, 0, 0);
    EXPECT_VALUES(chosen, N, N, N, N);
    EXPECT_VALUES(td_gradient(chosen, x), 0, 0, 0);
    td_tensor pairs = td_reshape(IDS(td, INT32_MIN, 3, -1, INT32_MAX), 2, 2); /* past the first row lies the second */
    EXPECT_VALUES(td_scatter_add(pairs, td_reshape(ROW(td, 1, 2, 3, 4), 2, 2), 3), 0, 0, 0, 0, 0, 0);
    EXPECT_VALUES(td_one_hot(far, 3, TD_F64), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    td_tensor logits = td_broadcast(x, TD_SHAPE(4, 3));
    EXPECT_VALUES(td_sum(td_cross_entropy(logits, far), TD_ALL, TD_DROP), N);
    td_tensor four = td_reshape(ROW(td, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), 4, 3), two = td_slice(four, 1, 0, 2);
    EXPECT_VALUES(td_slice_read(four, 1, far, 2), 0, 0, 0, 0, 0, 7, 0, 0);
    EXPECT_VALUES(td_slice_write(four, 1, far, two), 1, 2, 3, 4, 5, 6, 8, 8, 9, 10, 11, 12);
    td_tensor turned = td_rotary(td_fill(td, TD_F64, TD_SHAPE(4, 1, 2, 2), 1), (&(td_rotary_options){ .positions = far }));
    EXPECT_VALUES(td_sum(td_square(turned), TD_ALL, TD_DROP), 16); /* a turn keeps lengths */
    td_tensor q = td_fill(td, TD_F64, TD_SHAPE(4, 1, 1, 2), 1), v = td_reshape(td_broadcast(x, TD_SHAPE(4, 3)), 4, 1, 3, 1);
    td_tensor k = td_fill(td, TD_F64, TD_SHAPE(4, 1, 3, 2), 1);
    EXPECT_VALUES(td_attention(q, k, v, (&(td_attention_options){ .causal = true, .positions = far })), 0, 2, 0, 2);
    EXPECT_VALUES(td_attention(q, k, v, (&(td_attention_options){ .lengths = far })), 0, 2, 0, 2);
    EXPECT_VALUES(td_attention(q, k, v, (&(td_attention_options){ .window = INT64_MAX })), 2, 2, 2, 2);
    td_close(td);
}
END_TEST

/* ---- Integers ------------------------------------------------------------------------------------------------- */

/* Computed in f64, cut towards zero and clamped to the range; 0 where there is no number. */
START_TEST(test_integers_are_clamped)
{
    const int32_t a[] = { INT32_MAX, INT32_MIN, INT32_MIN, 7, -7, 0, 7, -7 }, b[] = { 1, 1, -1, 0, 0, 0, 2, 2 };
    const int32_t sum[] = { INT32_MAX, INT32_MIN + 1, INT32_MIN, 7, -7, 0, 9, -5 };
    const int32_t product[] = { INT32_MAX, INT32_MIN, INT32_MAX, 0, 0, 0, 14, -14 };
    const int32_t quotient[] = { INT32_MAX, INT32_MIN, INT32_MAX, INT32_MAX, INT32_MIN, 0, 3, -3 };
    const int64_t large[] = { INT64_MAX, INT64_MIN, (int64_t)1 << 52 }, one[] = { INT64_MAX, -1, 1 };
    const uint8_t bytes[] = { 200, 3 }, other[] = { 100, 5 };
    int32_t got[8];
    int64_t wide[3];
    uint8_t small[2];
    td_context *td = open_cpu(TD_F32);
    td_tensor x = td_input(td, "a", TD_I32, TD_SHAPE(8), a), y = td_input(td, "b", TD_I32, TD_SHAPE(8), b);
    ck_assert(td_read(td_add(x, y), got) && !memcmp(got, sum, sizeof got));
    ck_assert(td_read(td_mul(x, y), got) && !memcmp(got, product, sizeof got));
    ck_assert(td_read(td_div(x, y), got) && !memcmp(got, quotient, sizeof got));
    ck_assert(td_read(td_neg(x), got) && got[1] == INT32_MAX && got[0] == -INT32_MAX);
    ck_assert(td_read(td_sum(td_slice(x, 0, 1, 3), 0, TD_DROP), got) && got[0] == INT32_MIN);
    td_tensor l = td_input(td, "large", TD_I64, TD_SHAPE(3), large), m = td_input(td, "one", TD_I64, TD_SHAPE(3), one);
    ck_assert(td_read(td_add(l, m), wide) && wide[0] == INT64_MAX && wide[1] == INT64_MIN && wide[2] == ((int64_t)1 << 52) + 1);
    ck_assert(td_read(td_neg(l), wide) && wide[1] == INT64_MAX);
    td_tensor u = td_input(td, "bytes", TD_U8, TD_SHAPE(2), bytes), v = td_input(td, "other", TD_U8, TD_SHAPE(2), other);
    ck_assert(td_read(td_add(u, v), small) && small[0] == 255 && small[1] == 8);
    ck_assert(td_read(td_sub(u, v), small) && small[0] == 100 && small[1] == 0);
    td_close(td);
}
END_TEST

/* ---- Sizes that overflow -------------------------------------------------------------------------------------- */

#define BIG ((int64_t)1 << 31)
#define HUGE_ROW td_fill(td, TD_U8, TD_SHAPE(INT64_MAX), 0)
#define TALL td_fill(td, TD_F32, TD_SHAPE(BIG, 1, 1), 0)

/* The error begins with `text`, and nothing is computed. */
#define EXPECT_REFUSAL(call, text)                                                                        \
    do {                                                                                                  \
        td_context *td = open_cpu(TD_F32);                                                                \
        td_tensor t_ = (call);                                                                            \
        const char *said_ = td_error_text(td);                                                            \
        ck_assert(td_failed(t_));                                                                         \
        ck_assert_msg(!strncmp(said_, (text), strlen(text)), "\"%s\" does not begin \"%s\"", said_, (text)); \
        td_close(td);                                                                                     \
    } while (0)

START_TEST(test_sizes_that_overflow_are_refused)
{
    ck_assert_int_eq(td_shape_elements(TD_SHAPE(BIG, BIG, BIG)), INT64_MAX);
    ck_assert_int_eq(td_shape_elements(TD_SHAPE(BIG, BIG, BIG, 0)), 0);
    EXPECT_REFUSAL(td_fill(td, TD_F32, TD_SHAPE(BIG, BIG, BIG), 0), "fill: a value of shape (2147483648, 2147483648, 2147483648) cannot be");
    EXPECT_REFUSAL(td_fill(td, TD_F32, TD_SHAPE(BIG, BIG), 0), "fill: a value of shape (2147483648, 2147483648) cannot be");
    EXPECT_REFUSAL(td_fill(td, TD_F32, TD_SHAPE(2, -1), 0), "fill: a value of shape (2, -1) cannot be");
    EXPECT_REFUSAL(td_input(td, "x", TD_F32, TD_SHAPE(BIG, BIG, BIG), ""), "input");
    EXPECT_REFUSAL(td_uniform(td, TD_SHAPE(BIG, BIG, BIG)), "uniform: a value of shape");
    EXPECT_REFUSAL(td_broadcast(ones(td, 1), TD_SHAPE(BIG, BIG, BIG)), "broadcast: a value of shape");
    EXPECT_REFUSAL(td_add(TALL, td_reshape(TALL, 1, -1, 1)), "add: a value of shape (2147483648, 2147483648, 1) cannot be");
    EXPECT_REFUSAL(td_reshape(ones(td, 4), BIG, BIG, BIG), "reshape: shape (4) has 4 elements");
    EXPECT_REFUSAL(td_reshape(ones(td, 4), BIG, BIG, BIG, -1), "reshape: shape (4) does not divide into");
    EXPECT_REFUSAL(td_reshape(HUGE_ROW, BIG, BIG, 4), "reshape: a value of shape");
    EXPECT_REFUSAL(td_reshape(ones(td, 4), 0, -1), "reshape: shape (4) does not divide into (0, -1)");
    EXPECT_REFUSAL(td_reshape(ones(td, 4), -1, -1), "reshape: to (-1, -1): only one size may be -1, none less");
    EXPECT_REFUSAL(td_reshape(ones(td, 4), 1, 1, 1, 1, 1, 1, 4), "reshape: to more than 6 dimensions");
    EXPECT_REFUSAL(td_concat(((td_tensor[]){ HUGE_ROW, HUGE_ROW }), 2, 0), "concat: dimension 0 of the result does not fit 63 bits");
    EXPECT_REFUSAL(td_pad(td_fill(td, TD_U8, TD_SHAPE(2), 0), 0, INT64_MAX, 1, 0), "concat: dimension 0 of the result does not fit 63 bits");
    EXPECT_REFUSAL(td_pad(ones(td, 2), 0, INT64_MAX, 1, 0), "fill: a value of shape");
    EXPECT_REFUSAL(td_pad(ones(td, 2), 0, -1, 1, 0), "pad: needs at least 0 elements before and after, got -1 and 1");
    EXPECT_REFUSAL(td_stack(((td_tensor[]){ HUGE_ROW, HUGE_ROW }), 2, 0), "concat: a value of shape");
    EXPECT_REFUSAL(td_stack(((td_tensor[]){ ones(td, 1, 1, 1, 1, 1, 1) }), 1, 0), "stack: has no room");
    EXPECT_REFUSAL(td_matmul(td_reshape(TALL, -1, 1), td_reshape(TALL, 1, -1)), "matmul: a value of shape");
    EXPECT_REFUSAL(td_embedding(td_reshape(TALL, 1, -1), td_fill(td, TD_I32, TD_SHAPE(BIG), 0)), "embedding: a value of shape");
    EXPECT_REFUSAL(td_scatter_add(td_fill(td, TD_I32, TD_SHAPE(4, 1), 0), ones(td, 4, 1), INT64_MAX), "scatter_add: a value of shape");
    EXPECT_REFUSAL(td_scatter_add(td_fill(td, TD_I32, TD_SHAPE(4, 1), 0), ones(td, 4, 1), -1), "scatter_add: ");
    EXPECT_REFUSAL(td_one_hot(td_fill(td, TD_I32, TD_SHAPE(4), 0), BIG, TD_F32), "one_hot: cannot have 2147483648 classes: ids are i32");
    EXPECT_REFUSAL(td_one_hot(td_fill(td, TD_I32, TD_SHAPE(4), 0), -1, TD_F32), "one_hot: cannot have -1 classes");
    EXPECT_REFUSAL(td_argmax(td_reshape(TALL, -1)), "argmax: the last dimension of shape (2147483648) has more indices than i32");
    EXPECT_REFUSAL(td_top_k(td_reshape(TALL, -1), 1, NULL), "top_k: the last dimension of shape (2147483648) has more indices than i32");
    EXPECT_REFUSAL(td_top_k(ones(td, 3), -1, NULL), "top_k: cannot choose -1 along");
    EXPECT_REFUSAL(td_slice(ones(td, 3), 0, 2, 1), "slice: [2, 1) is not within dimension 0 of shape (3)");
    EXPECT_REFUSAL(td_slice(ones(td, 3), -2, 0, 1), "slice: there is no dimension -2 in shape (3)");
    EXPECT_REFUSAL(td_slice(ones(td, 3), -1, INT64_MIN, INT64_MAX), "slice: [-9223372036854775808, 9223372036854775807) is not within");
    EXPECT_REFUSAL(td_slice_read(ones(td, 2, 3), 1, td_fill(td, TD_I32, TD_SHAPE(2), 0), INT64_MAX), "slice_read: ");
    EXPECT_REFUSAL(td_sum(scalar(td, 1), 0, TD_DROP), "sum: there is no dimension 0 in shape ()");
    EXPECT_REFUSAL(td_max(ones(td, 2, 0), TD_ALL, TD_DROP), "max: dimension 1 of shape (2, 0) is empty");
    EXPECT_REFUSAL(td_argmax(ones(td, 2, 0)), "argmax: needs a last dimension that is not empty");
    EXPECT_REFUSAL(td_cumsum(scalar(td, 1)), "cumsum: needs at least one dimension");
}
END_TEST

START_TEST(test_what_changes_nothing_is_left_alone)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor x = td_reshape(ROW(td, 1, 2, 3, 4), 2, 2), at, parts[3];
    ck_assert_int_eq(td_transpose(x, 1, -1).id, x.id);
    ck_assert_int_eq(td_slice(x, 0, 0, 2).id, x.id);
    ck_assert_int_eq(td_pad(x, 0, 0, 0, 9).id, x.id);
    td_tensor none = td_top_k(x, 0, (&(td_top_k_options){ .indices = &at }));
    ck_assert(td_shape_equal(td_shape_at(none), TD_SHAPE(2, 0)) && td_shape_equal(td_shape_at(at), TD_SHAPE(2, 0)));
    EXPECT_VALUES(td_gradient(none, x), 0, 0, 0, 0);
    EXPECT_VALUES(td_tril(x, INT64_MAX), 1, 2, 3, 4);
    EXPECT_VALUES(td_tril(x, INT64_MIN), 0, 0, 0, 0);
    EXPECT_VALUES(td_tril(ROW(td, N, N), -1), 0, 0);
    ck_assert_no_error(td);
    ck_assert(!td_split(x, 0, 0, parts));
    ck_assert_str_has(td_error_text(td), "split: dimension 0 of shape (2, 2) cannot be cut into 0 equal parts");
    td_clear_error(td);
    ck_assert(!td_split(ones(td, 2, 2), 0, 3, parts) && td_failed(parts[2]));
    td_clear_error(td);
    ck_assert(td_failed(td_concat(NULL, 0, 0)) && td_failed(td_stack(NULL, 0, 0)));
    td_close(td);
}
END_TEST

TESTS("ops_special", test_special_values_pass_through_functions, test_special_values_pass_through_loops_of_every_width,
      test_the_largest_and_the_smallest_numbers, test_rows_with_infinities_and_nan, test_losses_of_infinite_logits,
      test_sums_norms_and_orders_of_special_values, test_indices_out_of_range_reach_nothing, test_integers_are_clamped,
      test_sizes_that_overflow_are_refused, test_what_changes_nothing_is_left_alone)
