/* What single operations promise beyond what test_ops.c asks of all of them: ids out of range, queries that see no key,
 * a cache of keys, ignored and smoothed labels, ties, literal values, error texts.
 * Labels: valgrind
 */
#include "tests/check.h"

#define I32(td, ...) \
    td_input((td), "i32", TD_I32, TD_SHAPE(sizeof((int32_t[]){ __VA_ARGS__ }) / 4), ((int32_t[]){ __VA_ARGS__ }))
#define F64(td, ...) \
    td_input((td), "f64", TD_F64, TD_SHAPE(sizeof((double[]){ __VA_ARGS__ }) / 8), ((double[]){ __VA_ARGS__ }))

/* ---- Chosen by number ----------------------------------------------------------------------------------------- */

START_TEST(test_an_id_out_of_range_gives_nan_and_no_gradient)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor table = td_reshape(F64(td, 1, 2, 3, 4, 5, 6), 3, 2), ids = I32(td, 2, -1, 3, 0);
    td_tensor rows = td_embedding(table, ids), dtable = td_gradient(td_sum(rows, TD_ALL, TD_DROP), table);
    td_tensor chosen = td_gather(F64(td, 7, 8, 9), ids);
    const double *y = check_read(rows, "rows", __FILE__, __LINE__);
    const double *g = check_read(chosen, "chosen", __FILE__, __LINE__);
    ck_assert(y[0] == 5 && y[1] == 6 && isnan(y[2]) && isnan(y[3]) && isnan(y[4]) && y[6] == 1);
    ck_assert(g[0] == 9 && isnan(g[1]) && isnan(g[2]) && g[3] == 7);
    ck_assert_near(check_read(dtable, "dtable", __FILE__, __LINE__), ((double[]){ 1, 1, 0, 0, 1, 1 }), 6, 0);
    td_close(td);
}
END_TEST

START_TEST(test_one_hot_is_one_at_the_id)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor y = td_one_hot(I32(td, 1, 3, 0), 3, TD_F64);
    ck_assert_tensor_near(y, td_reshape(F64(td, 0, 1, 0, 0, 0, 0, 1, 0, 0), 3, 3), 0);
    td_close(td);
}
END_TEST

START_TEST(test_top_k_takes_the_first_of_ties_and_a_nan_as_the_largest)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor at, low_at, x = F64(td, 2, 5, NAN, 5, 1);
    td_keep(td_top_k(x, 4, (&(td_top_k_options){ .indices = &at })));
    td_tensor low = td_sort(x, (&(td_top_k_options){ .smallest = true, .indices = &low_at }));
    int32_t i[4], j[5];
    ck_assert(td_read(at, i) && td_read(low_at, j));
    ck_assert(i[0] == 2 && i[1] == 1 && i[2] == 3 && i[3] == 0);
    ck_assert(j[0] == 4 && j[1] == 0 && j[2] == 1 && j[3] == 3 && j[4] == 2);
    ck_assert_near(check_read(low, "low", __FILE__, __LINE__), ((double[]){ 1, 2, 5, 5 }), 4, 0);
    td_close(td);
}
END_TEST

/* ---- Attention ------------------------------------------------------------------------------------------------ */

enum { B = 2, H = 4, SHARED = 2, KEYS = 70, DEPTH = 5 };

static td_tensor attend(td_tensor q, td_tensor k, td_tensor v, td_attention_options options)
{
    return td_attention(q, k, v, &options);
}

/* One query after another beside a cache of KEYS keys gives the rows of the whole. */
START_TEST(test_attention_beside_a_cache_gives_the_rows_of_the_whole)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor q = randn(td, B, H, KEYS, DEPTH);
    td_tensor k = randn(td, B, SHARED, KEYS, DEPTH), v = randn(td, B, SHARED, KEYS, 3);
    td_tensor whole = attend(q, k, v, (td_attention_options){ .causal = true });
    for (int32_t at = 0; at < KEYS; at += 23) {
        td_tensor one = td_slice(q, 2, at, at + 1), row = td_slice(whole, 2, at, at + 1);
        int32_t *positions = check_alloc(B * sizeof *positions), *lengths = check_alloc(B * sizeof *lengths);
        positions[0] = positions[1] = at;
        lengths[0] = lengths[1] = at + 1;
        td_tensor p = td_input(td, "positions", TD_I32, TD_SHAPE(B), positions);
        td_tensor n = td_input(td, "lengths", TD_I32, TD_SHAPE(B), lengths);
        ck_assert_tensor_near(attend(one, k, v, (td_attention_options){ .causal = true, .positions = p }), row, 1e-14);
        ck_assert_tensor_near(attend(one, k, v, (td_attention_options){ .lengths = n }), row, 1e-14);
    }
    td_close(td);
}
END_TEST

/* Keys past a length are not read, whatever they hold; a query that sees none gives zeros, and no gradient. */
START_TEST(test_attention_does_not_read_padding)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor q = randn(td, B, 1, 3, DEPTH), k = randn(td, B, 1, KEYS, DEPTH);
    td_tensor tail = td_fill(td, TD_F64, TD_SHAPE(B, 1, KEYS - 40, DEPTH), NAN);
    td_tensor holed = td_concat(((td_tensor[]){ td_slice(k, 2, 0, 40), tail }), 2, 2);
    td_attention_options padded = { .lengths = I32(td, 40, 0) };
    td_tensor y = td_attention(q, holed, holed, &padded), dq = td_gradient(td_sum(td_square(y), TD_ALL, TD_DROP), q);
    td_tensor first = td_slice(k, 0, 0, 1);
    td_tensor want = td_attention(td_slice(q, 0, 0, 1), td_slice(first, 2, 0, 40), td_slice(first, 2, 0, 40), NULL);
    ck_assert_tensor_near(td_slice(y, 0, 0, 1), want, 1e-14);
    ck_assert_tensor_near(td_slice(y, 0, 1, 2), td_fill(td, TD_F64, TD_SHAPE(1, 1, 3, DEPTH), 0), 0);
    ck_assert_tensor_near(td_slice(dq, 0, 1, 2), td_fill(td, TD_F64, TD_SHAPE(1, 1, 3, DEPTH), 0), 0);
    td_close(td);
}
END_TEST

START_TEST(test_attention_drops_in_training_only)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor q = randn(td, B, H, 9, DEPTH);
    td_attention_options dropping = { .causal = true, .dropout = 0.5 };
    td_tensor trained = td_attention(q, q, q, &dropping), again = td_attention(q, q, q, &dropping);
    td_set_mode(td, TD_EVAL);
    td_tensor evaluated = td_attention(q, q, q, &dropping);
    dropping.dropout = 0;
    ck_assert_tensor_near(evaluated, td_attention(q, q, q, &dropping), 0);
    ck_assert(td_item(td_max(td_abs(td_sub(trained, evaluated)), TD_ALL, TD_DROP)) > 0.1);
    ck_assert(td_item(td_max(td_abs(td_sub(trained, again)), TD_ALL, TD_DROP)) > 0.1); /* each call draws its own */
    td_close(td);
}
END_TEST

/* Operands have 8 bits of mantissa: less than 1e-4 would mean that f32 was used. */
START_TEST(test_attention_in_bf16_agrees_with_f32)
{
    const double *y[2];
    for (int narrow = 0; narrow < 2; narrow++) {
        td_context *td = open_cpu(narrow ? TD_BF16 : TD_F32);
        check_now.draws = 0;
        td_tensor q = randn(td, B, H, KEYS, 16), k = randn(td, B, H, KEYS, 16);
        td_tensor o = td_attention(q, k, k, (&(td_attention_options){ .causal = true }));
        y[narrow] = check_read(td_add(td_cast(o, TD_F32), td_gradient(td_sum(td_square(o), TD_ALL, TD_DROP), k)), "y",
                               __FILE__, __LINE__);
        td_close(td);
    }
    double error = 0, size = 0;
    for (int i = 0; i < B * H * KEYS * 16; i++) {
        error += (y[1][i] - y[0][i]) * (y[1][i] - y[0][i]);
        size += y[0][i] * y[0][i];
    }
    ck_assert_msg(sqrt(error / size) < 1e-2 && sqrt(error / size) > 1e-4, "off by %.3g", sqrt(error / size));
}
END_TEST

START_TEST(test_rotary_turns_by_position)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor x = randn(td, 1, 2, 150, 8), ones_ = td_broadcast(td_slice(x, 2, 0, 1), TD_SHAPE(1, 2, 150, 8));
    td_tensor all = td_rotary(ones_, NULL);
    td_tensor moved = td_rotary(td_slice(ones_, 2, 0, 50), (&(td_rotary_options){ .positions = I32(td, 100) }));
    ck_assert_tensor_near(moved, td_slice(all, 2, 100, 150), 1e-13);
    td_tensor y = td_rotary(td_reshape(F64(td, 0, 0, 1, 2), 1, 1, 2, 2), NULL); /* (1, 2) turned by 1 radian */
    ck_assert_tensor_near(td_reshape(y, 4), F64(td, 0, 0, cos(1) - 2 * sin(1), 2 * cos(1) + sin(1)), 1e-15);
    td_close(td);
}
END_TEST

/* ---- The same on any number of threads ------------------------------------------------------------------------ */

static const float *model_results(int threads, int64_t *n)
{
    enum { T = 70, D = 48, V = 50 };
    td_context *td = td_open(&(td_options){ .seed = 3, .threads = threads, .log = check_log_line });
    check_now.draws = 0;
    int32_t *ids = check_alloc(B * T * sizeof *ids);
    for (int i = 0; i < B * T; i++)
        ids[i] = i * 37 % V;
    td_tensor id = td_input(td, "ids", TD_I32, TD_SHAPE(B, T), ids);
    td_tensor table = randn(td, V, D), weight = randn(td, D), bias = randn(td, D);
    td_tensor x = td_layer_norm(td_embedding(table, id), weight, bias, 1e-5);
    td_tensor heads = td_rotary(td_transpose(td_reshape(x, B, T, H, D / H), 1, 2), NULL);
    td_tensor o = attend(heads, heads, heads, (td_attention_options){ .causal = true, .dropout = 0.1 });
    x = td_add(x, td_reshape(td_transpose(o, 1, 2), B, T, D));
    x = td_swiglu(td_gelu(td_rms_norm(x, weight, 1e-6)), td_cumsum(x));
    td_tensor loss = td_cross_entropy_with(x, id, (&(td_cross_entropy_options){ .smoothing = 0.1 }));
    td_tensor parts[] = { td_reshape(td_gradient(loss, table), -1), td_gradient(loss, weight), td_gradient(loss, bias),
                          td_reshape(x, -1) };
    td_tensor all = td_concat(parts, 4, 0);
    *n = td_shape_elements(td_shape_at(all));
    float *values = check_alloc((size_t)*n * sizeof *values);
    ck_assert_msg(td_read(all, values), "%s", td_error_text(td));
    td_close(td);
    return values;
}

START_TEST(test_results_do_not_depend_on_threads)
{
    int64_t n;
    const float *one = model_results(1, &n);
    ck_assert_int_eq(memcmp(one, model_results(2, &n), (size_t)n * sizeof *one), 0);
    ck_assert_int_eq(memcmp(one, model_results(5, &n), (size_t)n * sizeof *one), 0);
}
END_TEST

/* ---- Literal values ------------------------------------------------------------------------------------------- */

START_TEST(test_losses_are_their_formulas)
{
    td_context *td = open_cpu(TD_F64);
    const double l3 = log(3), l2 = log(2);
    td_tensor x = td_reshape(F64(td, 0, l3, 0, 0, l3, 0), 3, 2), w = F64(td, 1, 5, 3), none = TD_NO_TENSOR;
    td_tensor labels = I32(td, 1, -100, 1); /* rows log 4/3, ignored, log 4 */
    td_cross_entropy_options ignoring = { .ignores = true, .ignored = -100 };
    ck_assert_double_eq_tol(td_item(td_cross_entropy_with(x, labels, &ignoring)), (log(4.0 / 3) + log(4)) / 2, 1e-15);
    ignoring.weights = w;
    double weighted = (log(4.0 / 3) + 3 * log(4)) / 4;
    ck_assert_double_eq_tol(td_item(td_cross_entropy_with(x, labels, &ignoring)), weighted, 1e-15);
    td_cross_entropy_options smooth = { .smoothing = 0.5 }; /* of log 4/3: and of the mean of log 4/3 and log 4 */
    double mixed = 0.5 * log(4.0 / 3) + 0.25 * (log(4.0 / 3) + log(4));
    ck_assert_double_eq_tol(td_item(td_cross_entropy_with(td_slice(x, 0, 0, 1), I32(td, 1), &smooth)), mixed, 1e-15);
    td_tensor logits = F64(td, 0, l3, -1000), target = F64(td, 1, 0, 0);
    ck_assert_double_eq_tol(td_item(td_bce(logits, target, none)), (l2 + log(4)) / 3, 1e-15);
    ck_assert_double_eq_tol(td_item(td_bce(logits, target, w)), (l2 + 5 * log(4)) / 9, 1e-15);
    td_tensor y = F64(td, 1, -2, 0.5), zero = F64(td, 0, 0, 0);
    ck_assert_double_eq_tol(td_item(td_l1(y, zero, none)), 3.5 / 3, 1e-15);
    ck_assert_double_eq_tol(td_item(td_huber(y, zero, 1, none)), (0.5 + 1.5 + 0.125) / 3, 1e-15);
    td_close(td);
}
END_TEST

START_TEST(test_shapes_are_put_together_and_taken_apart)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor a = F64(td, 1, 2), b = F64(td, 3, 4), parts[2];
    td_tensor rows = td_stack(((td_tensor[]){ a, b }), 2, 0), columns = td_stack(((td_tensor[]){ a, b }), 2, -1);
    ck_assert_tensor_near(rows, td_reshape(F64(td, 1, 2, 3, 4), 2, 2), 0);
    ck_assert_tensor_near(columns, td_reshape(F64(td, 1, 3, 2, 4), 2, 2), 0);
    ck_assert(td_split(rows, 1, 2, parts));
    ck_assert_tensor_near(parts[1], td_reshape(F64(td, 2, 4), 2, 1), 0);
    ck_assert_tensor_near(td_pad(a, 0, 1, 2, 9), F64(td, 9, 1, 2, 9, 9), 0);
    ck_assert_tensor_near(td_tril(rows, 0), td_reshape(F64(td, 1, 0, 3, 4), 2, 2), 0);
    ck_assert_tensor_near(td_tril(rows, -1), td_reshape(F64(td, 0, 0, 3, 0), 2, 2), 0);
    ck_assert_tensor_near(td_cumsum(rows), td_reshape(F64(td, 1, 3, 3, 7), 2, 2), 0);
    ck_assert_tensor_near(td_variance(F64(td, 1, 2, 6), 0, TD_DROP), scalar(td, 14.0 / 3), 1e-15);
    ck_assert_tensor_near(td_clamp(F64(td, -3, 0.5, 3), -1, 2), F64(td, -1, 0.5, 2), 0);
    td_close(td);
}
END_TEST

START_TEST(test_functions_hold_at_the_ends)
{
    td_context *td = open_cpu(TD_F32);
    const float ends[] = { INFINITY, -INFINITY, 0, -100, 100 };
    td_tensor x = td_input(td, "x", TD_F32, TD_SHAPE(5), ends);
    const double *erf_ = check_read(td_erf(x), "erf", __FILE__, __LINE__);
    const double *soft = check_read(td_softplus(x), "softplus", __FILE__, __LINE__);
    const double *gelu = check_read(td_gelu(x), "gelu", __FILE__, __LINE__);
    const double *expm1_ = check_read(td_expm1(x), "expm1", __FILE__, __LINE__);
    ck_assert(erf_[0] == 1 && erf_[1] == -1 && erf_[2] == 0 && erf_[3] == -1 && erf_[4] == 1);
    ck_assert(isinf(soft[0]) && soft[1] == 0 && fabs(soft[2] - 0.693147180559945) < 1e-7 && soft[4] == 100);
    ck_assert(isinf(gelu[0]) && gelu[2] == 0 && gelu[3] == 0 && gelu[4] == 100);
    ck_assert(isinf(expm1_[0]) && expm1_[1] == -1 && expm1_[2] == 0 && expm1_[3] == -1);
    td_close(td);
}
END_TEST

/* gelu within 2.5e-7 |x| and its slope within 4e-7 of x (1 + erf(x / sqrt 2)) / 2 and its derivative in f64: what the error of erf, 4e-7, and
 * its rounding leave. erf itself within three units in the last place, 1.8e-7 of the value. */
START_TEST(test_gelu_and_erf_keep_their_bounds_in_f32)
{
    enum { N = 16001 };
    td_context *td = open_cpu(TD_F32);
    static float at[N];
    for (int i = 0; i < N; i++)
        at[i] = (float)(i - N / 2) / 1000;
    td_tensor x = td_input(td, "x", TD_F32, TD_SHAPE(N), at), y = td_gelu(x);
    const double *erf_ = check_read(td_erf(x), "erf", __FILE__, __LINE__);
    const double *gelu = check_read(y, "gelu", __FILE__, __LINE__);
    const double *slope = check_read(td_gradient(y, x), "slope", __FILE__, __LINE__);
    for (int i = 0; i < N; i++) {
        double t = at[i], half = 0.5 * (1 + erf(t / sqrt(2)));
        ck_assert_msg(fabs(erf_[i] - erf(t)) <= 1.8e-7 * fabs(erf(t)), "erf(%g): %.9g", t, erf_[i]);
        ck_assert_msg(fabs(gelu[i] - t * half) <= 2.5e-7 * fabs(t), "gelu(%g): %.9g", t, gelu[i]);
        ck_assert_msg(fabs(slope[i] - half - t * exp(-t * t / 2) * 0.3989422804014327) <= 4e-7, "slope at %g: %.9g", t, slope[i]);
    }
    td_close(td);
}
END_TEST

/* What is read twice adds up; what is not, does not. */
START_TEST(test_gradients_of_slices_come_together)
{
    static const struct {
        int64_t begin[3], end[3];
        double want[6];
    } cuts[] = {
        { { 0, 2, 4 }, { 2, 4, 6 }, { 1, 1, 10, 10, 100, 100 } }, /* side by side */
        { { 4, 2, 0 }, { 6, 4, 2 }, { 100, 100, 10, 10, 1, 1 } },
        { { 0, 1, 5 }, { 3, 4, 6 }, { 1, 11, 11, 10, 0, 100 } },  /* over one another, a gap */
        { { 0, 2, 2 }, { 2, 6, 3 }, { 1, 1, 110, 10, 10, 10 } },
        { { 1, 4, 3 }, { 3, 5, 4 }, { 0, 1, 1, 100, 10, 0 } },
        { { 2, 0, 3 }, { 5, 4, 4 }, { 10, 10, 11, 111, 1, 0 } },
        { { 1, 1, 3 }, { 3, 3, 6 }, { 0, 11, 11, 100, 100, 100 } }, /* the same twice */
    };
    for (size_t c = 0; c < sizeof cuts / sizeof *cuts; c++) {
        td_context *td = open_cpu(TD_F64);
        td_tensor x = F64(td, 3, 1, 4, 1, 5, 9), y = td_scalar(td, 0), factor = td_scalar(td, 1);
        for (int i = 0; i < 3; i++) {
            td_tensor part = td_sum(td_slice(x, 0, cuts[c].begin[i], cuts[c].end[i]), TD_ALL, TD_DROP);
            y = td_add(y, td_mul(part, factor));
            factor = td_mul(factor, td_scalar(td, 10));
        }
        const double *got = check_read(td_gradient(y, x), "gradient", __FILE__, __LINE__);
        for (int i = 0; i < 6; i++)
            ck_assert_msg(got[i] == cuts[c].want[i], "cut %zu: gradient of element %d is %g, not %g", c, i, got[i], cuts[c].want[i]);
        td_close(td);
    }
}
END_TEST

/* ---- Errors --------------------------------------------------------------------------------------------------- */

#define EXPECT_ERROR(call, text)                                                      \
    do {                                                                              \
        td_context *td = open_cpu(TD_F64);                                            \
        (void)(call);                                                                 \
        ck_assert_str_has(td_error_text(td), text " (tests/test_ops_values.c:");       \
        td_close(td);                                                                 \
    } while (0)

START_TEST(test_wrong_calls_are_refused_by_name)
{
    td_tensor out[2];
    EXPECT_ERROR(td_embedding(ones(td, 6), I32(td, 1)), "embedding: needs a table (V, D), got shape (6)");
    EXPECT_ERROR(td_embedding(ones(td, 6, 2), ones(td, 3)),
                 "embedding: needs a float table and i32 ids, got f64 and f64");
    EXPECT_ERROR(td_gather(ones(td, 2, 3), I32(td, 1)),
                 "gather: values (2, 3) and ids (1) do not fit (..., D), (..., K)");
    EXPECT_ERROR(td_layer_norm(ones(td, 2, 3), ones(td, 2), TD_NO_TENSOR, 1e-5),
                 "layer_norm: x (2, 3) and weight (2) do not fit (..., D), (D)");
    EXPECT_ERROR(td_attention(ones(td, 1, 3, 2, 4), ones(td, 1, 2, 2, 4), ones(td, 1, 2, 2, 4), NULL),
                 "attention: q (1, 3, 2, 4), k (1, 2, 2, 4) and v (1, 2, 2, 4) do not fit (B, H, T, d), (B, Hkv, S, d), "
                 "(B, Hkv, S, e) with H a multiple of Hkv");
    EXPECT_ERROR(td_rotary(ones(td, 1, 1, 2, 3), NULL),
                 "rotary: needs x (B, H, T, d) with an even d, got shape (1, 1, 2, 3)");
    EXPECT_ERROR(td_top_k(ones(td, 3), 4, NULL), "top_k: cannot choose 4 along the last dimension of shape (3)");
    EXPECT_ERROR(td_clamp(ones(td, 3), 2, 1), "clamp: needs low <= high, got 2 and 1");
    EXPECT_ERROR(td_bce(ones(td, 3, 1), ones(td, 3), TD_NO_TENSOR), "bce: shapes (3, 1) and (3) differ");
    EXPECT_ERROR(td_huber(ones(td, 3), ones(td, 3), 0, TD_NO_TENSOR), "huber: delta must be above 0, got 0");
    EXPECT_ERROR(td_split(ones(td, 2, 3), 1, 2, out),
                 "split: dimension 1 of shape (2, 3) cannot be cut into 2 equal parts");
    EXPECT_ERROR(td_pad(ones(td, 3), 1, 1, 1, 0), "pad: there is no dimension 1 in shape (3)");
}
END_TEST

TESTS("ops_values", test_an_id_out_of_range_gives_nan_and_no_gradient, test_one_hot_is_one_at_the_id,
      test_top_k_takes_the_first_of_ties_and_a_nan_as_the_largest,
      test_attention_beside_a_cache_gives_the_rows_of_the_whole, test_attention_does_not_read_padding,
      test_attention_drops_in_training_only, test_attention_in_bf16_agrees_with_f32, test_rotary_turns_by_position,
      test_results_do_not_depend_on_threads, test_losses_are_their_formulas,
      test_shapes_are_put_together_and_taken_apart, test_functions_hold_at_the_ends, test_gelu_and_erf_keep_their_bounds_in_f32,
      test_gradients_of_slices_come_together, test_wrong_calls_are_refused_by_name)
