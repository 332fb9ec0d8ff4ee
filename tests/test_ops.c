/* What every operation promises, over the list of all operations and their cases: gradients against central differences
 * in f64, second derivatives, decompositions, f32 and bf16 against f64, results that depend neither on threads nor on
 * fusion. Then what single operations promise beyond: error texts, random draws, conversions, losses.
 * Labels: valgrind
 * Timeout: 600 s
 */
#include "tests/cases.h"

#include "core/random.h"

#include <tandem/rewrite.h>

typedef td_tensor (*apply_function)(const td_op *op, const td_case *c, int n, const td_tensor *in);

static td_tensor apply(const td_op *op, const td_case *c, int n, const td_tensor *in)
{
    return td_record(op, TD_HERE, n, in, c->attr);
}

static td_tensor apply_decomposed(const td_op *op, const td_case *c, int n, const td_tensor *in)
{
    td_gradient_call call = { .td = in[0].td, .here = TD_HERE, .attr = c->attr, .inputs = n, .in = in };
    return op->decompose(&call);
}

/* order 0: sum r y.  order 1: the sum over inputs x of sum r dx, dx being the gradient of sum r y. */
static td_tensor scalar_of(const td_op *op, const td_case *c, const case_data *d, const td_tensor *in, int order)
{
    td_tensor loss = project(apply(op, c, d->inputs, in), 0), total = { 0 };
    if (order == 0)
        return loss;
    for (int i = 0, first = 1; i < d->inputs; i++) {
        if (is_label(d, i))
            continue;
        td_tensor part = project(td_gradient(loss, in[i]), (uint64_t)i + 1);
        total = first ? part : td_add(total, part);
        first = 0;
    }
    return total;
}

static double evaluate(td_context *td, const td_op *op, const td_case *c, case_data *d, int order)
{
    td_tensor in[INPUTS];
    record_inputs(td, d, in);
    td_tensor loss = scalar_of(op, c, d, in, order);
    td_keep(loss);
    ck_assert_msg(td_step(td), "%s: %s", op->name, td_error_text(td));
    return td_item(loss);
}

/* ---- Gradients against central differences ------------------------------------------------------------------ */

/* The derivative of the scalar when input i moves by `step` times the direction v. */
static double central_difference(td_context *td, const td_op *op, const td_case *c, case_data *d, int order, int i,
                                 const double *v)
{
    const double step = 1e-5;
    double *at = d->values[i], *before = check_alloc((size_t)d->elements[i] * sizeof *before);
    memcpy(before, at, (size_t)d->elements[i] * sizeof *before);
    for (int64_t e = 0; e < d->elements[i]; e++)
        at[e] = before[e] + step * v[e];
    double above = evaluate(td, op, c, d, order);
    for (int64_t e = 0; e < d->elements[i]; e++)
        at[e] = before[e] - step * v[e];
    double below = evaluate(td, op, c, d, order);
    memcpy(at, before, (size_t)d->elements[i] * sizeof *before);
    return (above - below) / (2 * step);
}

/* Element by element for up to 40 elements spread over the input, and all at once along a generic direction. */
static void check_gradient_of(td_context *td, const td_op *op, const td_case *c, case_data *d, int order, int i,
                              const double *gradient)
{
    int64_t n = d->elements[i], stride = n / 40 + 1;
    double *v = check_alloc((size_t)n * sizeof *v), error = 0, size = 0;
    for (int64_t e = 0; e < n; e += stride) {
        v[e] = 1;
        double difference = central_difference(td, op, c, d, order, i, v) - gradient[e];
        v[e] = 0;
        error += difference * difference;
        size += gradient[e] * gradient[e];
    }
    double along = 0, along_size = 0;
    for (int64_t e = 0; e < n; e++) {
        v[e] = check_normal((uint64_t)e);
        along += v[e] * gradient[e];
        along_size += fabs(v[e] * gradient[e]);
    }
    double along_error = n ? fabs(central_difference(td, op, c, d, order, i, v) - along) : 0;
    const char *note = c->note ? c->note : "";
    ck_assert_msg(sqrt(error) <= 1e-6 * sqrt(size) + 1e-9,
                  "%s (%s), input %d, order %d: gradients are off by %.3g of %.3g", op->name, note, i, order + 1,
                  sqrt(error), sqrt(size));
    ck_assert_msg(along_error <= 1e-6 * along_size + 1e-9,
                  "%s (%s), input %d, order %d: along a direction off by %.3g of %.3g", op->name, note, i, order + 1,
                  along_error, along_size);
}

static void check_gradients(const td_op *op, const td_case *c, int order)
{
    td_context *td = open_cpu(TD_F64);
    case_data d = data_of(c);
    td_tensor in[INPUTS], dx[INPUTS];
    double *gradient[INPUTS] = { 0 };
    record_inputs(td, &d, in);
    td_tensor loss = scalar_of(op, c, &d, in, order);
    for (int i = 0; i < d.inputs; i++) {
        if (is_label(&d, i))
            continue;
        dx[i] = td_gradient(loss, in[i]);
        td_keep(dx[i]);
    }
    ck_assert_msg(td_step(td), "%s: %s", op->name, td_error_text(td));
    for (int i = 0; i < d.inputs; i++) { /* all are read before the next step */
        if (is_label(&d, i))
            continue;
        gradient[i] = check_alloc((size_t)d.elements[i] * sizeof **gradient);
        ck_assert_msg(td_read(dx[i], gradient[i]), "%s: %s", op->name, td_error_text(td));
    }
    for (int i = 0; i < d.inputs; i++)
        if (!is_label(&d, i))
            check_gradient_of(td, op, c, &d, order, i, gradient[i]);
    ck_assert_no_error(td);
    td_close(td);
}

START_TEST(test_gradients_equal_central_differences)
{
    int checked = 0;
    for (int o = 0; o < OPERATIONS; o++)
        for (int c = 0; c < cases_of(operations[o]); c++)
            if (!operations[o]->cases[c].no_gradient_check) {
                check_gradients(operations[o], &operations[o]->cases[c], 0);
                checked++;
            }
    ck_assert_int_gt(checked, 90);
}
END_TEST

START_TEST(test_second_derivatives_equal_central_differences)
{
    int checked = 0;
    for (int o = 0; o < OPERATIONS; o++) {
        const td_op *op = operations[o];
        bool asked = (op->flags & TD_OP_POINTWISE) || op->decompose || op == &td_op_matmul || op == &td_op_sum ||
                     op == &td_op_max || op == &td_op_embedding || op == &td_op_gather;
        for (int c = 0; asked && c < cases_of(op); c++) {
            int64_t elements = td_shape_elements(td_shape_of(op->cases[c].in[0].rank, op->cases[c].in[0].dim));
            if (op->cases[c].no_gradient_check || elements > 400)
                continue;
            check_gradients(op, &op->cases[c], 1);
            checked++;
        }
    }
    ck_assert_int_gt(checked, 60);
}
END_TEST

/* Every operation of the list that has inputs is differentiated somewhere above, or says that it has no gradient. */
START_TEST(test_every_operation_has_cases_and_a_gradient_rule)
{
    for (int o = 0; o < OPERATIONS; o++) {
        const td_op *op = operations[o];
        if (op->inputs == 0 || op == &td_op_fused || op == &td_op_fused_rows)
            continue;
        ck_assert_msg(cases_of(op) > 0, "%s has no cases", op->name);
        ck_assert_msg(op->gradient, "%s has no gradient rule", op->name);
        ck_assert_msg(op->place, "%s has no placement rule", op->name);
    }
}
END_TEST

/* ---- Decompositions, dtypes, threads, fusion ------------------------------------------------------------------ */

static const double *result_in(td_dtype dtype, const char *passes, const td_op *op, const td_case *c,
                               apply_function how, int64_t *n)
{
    td_context *td = td_open(
        &(td_options){ .dtype = dtype, .seed = 1, .threads = 2, .passes = passes, .log = check_log_line });
    case_data d = data_of(c);
    td_tensor in[INPUTS];
    record_inputs(td, &d, in);
    td_tensor y = how(op, c, d.inputs, in);
    if (td_dtype_at(y) != td_float(td))
        y = td_cast(y, td_float(td));
    *n = td_shape_elements(td_shape_at(y));
    const double *values = check_read(y, op->name, __FILE__, __LINE__);
    td_close(td);
    return values;
}

START_TEST(test_decompositions_equal_their_operation)
{
    int checked = 0;
    for (int o = 0; o < OPERATIONS; o++) {
        const td_op *op = operations[o];
        for (int c = 0; op->decompose && c < cases_of(op); c++, checked++) {
            int64_t n;
            const double *whole = result_in(TD_F64, NULL, op, &op->cases[c], apply, &n);
            const double *parts = result_in(TD_F64, NULL, op, &op->cases[c], apply_decomposed, &n);
            ck_assert_msg(relative_error(whole, parts, n) <= 1e-12, "%s, case %d: off by %.3g", op->name, c,
                          relative_error(whole, parts, n));
        }
    }
    ck_assert_int_ge(checked, 14);
}
END_TEST

START_TEST(test_f32_agrees_with_f64)
{
    for (int o = 0; o < OPERATIONS; o++) {
        const td_op *op = operations[o];
        for (int c = 0; c < cases_of(op); c++) {
            if (op == &td_op_cast)
                continue; /* gives the dtype it is asked for */
            int64_t n;
            const double *wide = result_in(TD_F64, NULL, op, &op->cases[c], apply, &n);
            double error = relative_error(result_in(TD_F32, NULL, op, &op->cases[c], apply, &n), wide, n);
            ck_assert_msg(error <= 2e-6, "%s, case %d: f32 is off by %.3g", op->name, c, error);
        }
    }
}
END_TEST

/* 8 bits of mantissa in the operands and the result: about 2^-9 each. Less than 1e-4 would mean that f32 was used. */
START_TEST(test_bf16_products_agree_with_f64)
{
    const td_op *const products[] = { &td_op_matmul, &td_op_linear };
    if (!has_bf16_products())
        SKIP("this processor has no bf16 matrix products");
    for (int o = 0; o < 2; o++) {
        for (int c = 0; c < cases_of(products[o]); c++) {
            const td_op *op = products[o];
            int64_t n;
            const double *wide = result_in(TD_F64, NULL, op, &op->cases[c], apply, &n);
            double error = relative_error(result_in(TD_BF16, NULL, op, &op->cases[c], apply, &n), wide, n);
            bool empty = n == 0 || op->cases[c].in[0].dim[1] == 0;
            ck_assert_msg(error <= 1e-2, "%s, case %d: bf16 is off by %.3g", op->name, c, error);
            ck_assert_msg(empty || error > 1e-4, "%s, case %d: bf16 is off by only %.3g", op->name, c, error);
        }
    }
}
END_TEST

/* Losses, softmax, sums, random masks and chains over several threads' worth of elements, forward and backward. */
static const float *all_results(int threads, const char *passes, td_dtype dtype, int64_t *n)
{
    enum { ROWS = 301, COLUMNS = 517 };
    td_context *td = td_open(
        &(td_options){ .dtype = dtype, .seed = 4, .threads = threads, .passes = passes, .log = check_log_line });
    check_now.draws = 0;
    td_tensor x = check_randn(td, TD_SHAPE(ROWS, COLUMNS)), bias = check_randn(td, TD_SHAPE(COLUMNS));
    int32_t *labels = check_alloc(ROWS * sizeof *labels);
    for (int i = 0; i < ROWS; i++)
        labels[i] = i * 31 % COLUMNS;
    td_tensor h = td_relu(td_add(td_dropout(x, 0.25), bias));
    td_tensor y = td_mul(td_sigmoid(h), td_softmax(td_tanh(h)));
    td_tensor loss = td_cross_entropy(td_scale(y, 30), td_input(td, "labels", TD_I32, TD_SHAPE(ROWS), labels));
    td_tensor parts[] = { td_reshape(td_gradient(loss, x), -1),
                          td_gradient(loss, bias),
                          td_sum(h, 0, TD_DROP),
                          td_sum(h, 1, TD_DROP),
                          td_max(h, 0, TD_DROP),
                          td_reshape(td_mean(h, TD_ALL, TD_DROP), 1),
                          td_reshape(loss, 1) };
    td_tensor all = td_concat(parts, 7, 0);
    *n = td_shape_elements(td_shape_at(all));
    float *values = check_alloc((size_t)*n * sizeof(double));
    ck_assert_msg(td_read(all, values), "%s", td_error_text(td));
    td_close(td);
    return values;
}

START_TEST(test_results_do_not_depend_on_threads)
{
    int64_t n;
    for (int dtype = TD_F32; dtype <= TD_F64; dtype++) {
        size_t bytes = dtype == TD_F32 ? 4 : 8;
        const float *one = all_results(1, NULL, (td_dtype)dtype, &n);
        ck_assert_int_eq(memcmp(one, all_results(2, NULL, (td_dtype)dtype, &n), (size_t)n * bytes), 0);
        ck_assert_int_eq(memcmp(one, all_results(3, NULL, (td_dtype)dtype, &n), (size_t)n * bytes), 0);
    }
}
END_TEST

START_TEST(test_results_do_not_depend_on_fusion)
{
    int64_t n;
    const float *fused = all_results(2, NULL, TD_F32, &n);
    ck_assert_int_eq(memcmp(fused, all_results(2, "-fuse", TD_F32, &n), (size_t)n * sizeof(float)), 0);
}
END_TEST

/* f64 products of our own: the order of sums depends on k alone. */
START_TEST(test_f64_products_do_not_depend_on_threads)
{
    double *result[2];
    for (int threads = 1; threads <= 2; threads++) {
        td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = threads, .log = check_log_line });
        check_now.draws = 0;
        td_tensor a = randn(td, 201, 530), b = randn(td, 530, 1103);
        result[threads - 1] = check_alloc(201 * 1103 * sizeof(double));
        ck_assert(td_read(td_matmul(a, b), result[threads - 1]));
        td_close(td);
    }
    ck_assert_int_eq(memcmp(result[0], result[1], 201 * 1103 * sizeof(double)), 0);
}
END_TEST

/* A value in bf16 is rounded where it is made, inside a chain too. */
START_TEST(test_16_bit_values_are_rounded_inside_a_chain)
{
    float *result[2];
    for (int fused = 0; fused < 2; fused++) {
        td_context *td = td_open(&(td_options){ .passes = fused ? NULL : "-fuse", .log = check_log_line });
        check_now.draws = 0;
        td_tensor x = td_cast(randn(td, 40, 70), TD_BF16), w = td_cast(randn(td, 70), TD_BF16);
        td_tensor y = td_cast(td_exp(td_cast(td_mul(td_add(x, w), x), TD_F16)), TD_F32);
        result[fused] = check_alloc(40 * 70 * sizeof(float));
        ck_assert_msg(td_read(y, result[fused]), "%s", td_error_text(td));
        td_close(td);
    }
    ck_assert_int_eq(memcmp(result[0], result[1], 40 * 70 * sizeof(float)), 0);
}
END_TEST

/* ---- Shards --------------------------------------------------------------------------------------------------- */

enum { RANKS = 3, ROWS = 7, LOCAL = 3, WIDTH = 4 }; /* the last rank holds one row, and two that do not exist */

/* A rank's part of `rows` (7, 4) along dimension 0; what does not exist is NaN. */
static td_arg shard_of(const double *rows, int rank)
{
    double *local = check_alloc(LOCAL * WIDTH * sizeof *local);
    for (int i = 0; i < LOCAL * WIDTH; i++)
        local[i] = rank * LOCAL * WIDTH + i < ROWS * WIDTH ? rows[rank * LOCAL * WIDTH + i] : NAN;
    return (td_arg){ .data = local, .shape = TD_SHAPE(LOCAL, WIDTH), .global = TD_SHAPE(ROWS, WIDTH), .dtype = TD_F64,
                     .place = { .kind = { TD_SHARDED } } };
}

/* Adds what the kernel gives on one rank to total. */
static void add_partial(td_context *td, const td_op *op, const void *attr, int n, const td_arg *in, int rank,
                        td_shape shape, double *total)
{
    td_mesh mesh = { .axes = 1, .name = { "ranks" }, .size = { RANKS }, .at = { rank }, .rank = rank, .world = RANKS };
    td_run run = { .td = td, .threads = 1, .mesh = &mesh };
    double *result = check_alloc((size_t)td_shape_elements(shape) * sizeof *result);
    td_arg out = {
        .data = result, .shape = shape, .global = shape, .dtype = TD_F64, .place = { .kind = { TD_PARTIAL } }
    };
    td_kernel k = { .op = op,
                    .attr = attr,
                    .attr_bytes = op->attr_bytes,
                    .inputs = n,
                    .outputs = 1,
                    .in = in,
                    .out = &out,
                    .run = &run };
    td_preparation made = { 0 };
    ck_assert(op->prepare(td, &k, &made));
    void *workspace = aligned_alloc(64, (size_t)(made.workspace_bytes + 64) / 64 * 64);
    k.prepared = made.prepared;
    k.workspace = workspace;
    op->cpu(&k);
    free(workspace);
    if (op->release)
        op->release(made.prepared);
    for (int64_t i = 0; i < td_shape_elements(shape); i++)
        total[i] += result[i];
}

START_TEST(test_sums_over_an_uneven_shard_leave_out_what_does_not_exist)
{
    td_context *td = open_cpu(TD_F64);
    double a[ROWS * WIDTH], b[ROWS * WIDTH], sums[WIDTH] = { 0 }, product[WIDTH * WIDTH] = { 0 },
                                             want[WIDTH * WIDTH] = { 0 };
    for (int i = 0; i < ROWS * WIDTH; i++)
        a[i] = check_normal((uint64_t)i), b[i] = check_normal((uint64_t)i + 100);
    for (int rank = 0; rank < RANKS; rank++) {
        td_arg in[2] = { shard_of(a, rank), shard_of(b, rank) };
        add_partial(td, &td_op_sum, td_op_sum.cases[0].attr, 1, in, rank, TD_SHAPE(WIDTH), sums);
        add_partial(td, &td_op_matmul, td_op_matmul.cases[1].attr, 2, in, rank, TD_SHAPE(WIDTH, WIDTH), product);
    }
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < WIDTH; j++)
            want[j] += a[r * WIDTH + j];
    ck_assert_near(sums, want, WIDTH, 1e-15);
    memset(want, 0, sizeof want);
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < WIDTH * WIDTH; i++)
            want[i] += a[r * WIDTH + i / WIDTH] * b[r * WIDTH + i % WIDTH];
    ck_assert_near(product, want, WIDTH * WIDTH, 1e-15);
    td_close(td);
}
END_TEST

/* ---- Errors ------------------------------------------------------------------------------------------------ */

/* The error is `text` and names this line. The whole call must be on it: compilers number longer ones differently. */
#define EXPECT_ERROR(call, text)                                                                     \
    do {                                                                                             \
        td_context *td = open_cpu(TD_F32);                                                           \
        char want_[512];                                                                             \
        td_tensor t_ = (call);                                                                       \
        snprintf(want_, sizeof want_, "%s (%s:%d)", (text), __FILE__, __LINE__);                     \
        ck_assert(td_failed(t_));                                                                    \
        ck_assert_str_eq(td_error_text(td), want_);                                                  \
        td_close(td);                                                                                \
    } while (0)

START_TEST(test_wrong_shapes_are_refused_by_name)
{
    const char *text;
    EXPECT_ERROR(td_add(ones(td, 3, 4), ones(td, 5)), "add: shapes (3, 4) and (5) cannot be broadcast");
    EXPECT_ERROR(td_where(ones(td, 3), ones(td, 3), ones(td, 2)), "where: shapes (3), (3) and (2) cannot be broadcast");
    EXPECT_ERROR(td_matmul(ones(td, 3, 4), ones(td, 5, 6)), "matmul: shapes (3, 4) and (5, 6) do not multiply");
    text = "matmul: shapes (3, 4) and (4, 6) do not multiply, b transposed";
    EXPECT_ERROR(td_matmul_with(ones(td, 3, 4), ones(td, 4, 6), 0, 1), text);
    text = "matmul: shapes (2, 3, 4) and (5, 4, 6) do not multiply";
    EXPECT_ERROR(td_matmul(ones(td, 2, 3, 4), ones(td, 5, 4, 6)), text);
    text = "matmul: needs at least two dimensions, got shapes (3) and (3, 4)";
    EXPECT_ERROR(td_matmul(ones(td, 3), ones(td, 3, 4)), text);
    text = "linear: x (2, 3), weight (5, 4) and bias (5) do not fit (..., in), (out, in), (out)";
    EXPECT_ERROR(td_linear(ones(td, 2, 3), ones(td, 5, 4), ones(td, 5)), text);
    EXPECT_ERROR(td_softmax(scalar(td, 3)), "softmax: needs at least one dimension, got shape ()");
    text = "cross_entropy_rows: logits (4, 10) and labels (5) do not fit (..., C), (...)";
    EXPECT_ERROR(td_cross_entropy(ones(td, 4, 10), td_fill(td, TD_I32, TD_SHAPE(5), 0)), text);
    EXPECT_ERROR(td_mse(ones(td, 4, 1), ones(td, 4)), "mse: shapes (4, 1) and (4) differ");
    EXPECT_ERROR(td_reshape(ones(td, 3, 4), 5, -1), "reshape: shape (3, 4) does not divide into (5, -1)");
    EXPECT_ERROR(td_reshape(ones(td, 3, 4), 13), "reshape: shape (3, 4) has 12 elements, (13) has 13");
    EXPECT_ERROR(td_broadcast(ones(td, 3), TD_SHAPE(3, 4)), "broadcast: shape (3) does not stretch to (3, 4)");
    EXPECT_ERROR(td_sum_to(ones(td, 3, 4), TD_SHAPE(5)), "sum_to: shape (3, 4) cannot be summed to (5)");
    EXPECT_ERROR(td_max(ones(td, 3, 0), 1, TD_DROP), "max: dimension 1 of shape (3, 0) is empty");
    text = "concat: shapes (2, 3) and (2, 4) differ beside dimension 0";
    EXPECT_ERROR(td_concat(((td_tensor[]){ ones(td, 2, 3), ones(td, 2, 4) }), 2, 0), text);
}
END_TEST

START_TEST(test_wrong_arguments_are_refused_by_name)
{
    const char *text;
    EXPECT_ERROR(td_sum(ones(td, 3, 4), 2, TD_DROP), "sum: there is no dimension 2 in shape (3, 4)");
    EXPECT_ERROR(td_transpose(ones(td, 3, 4), 0, -3), "transpose: there is no dimension -3 in shape (3, 4)");
    EXPECT_ERROR(td_slice(ones(td, 3, 4), 1, 2, 5), "slice: [2, 5) is not within dimension 1 of shape (3, 4)");
    EXPECT_ERROR(td_dropout(ones(td, 3), 1), "dropout: p must be at least 0 and below 1, got 1");
    EXPECT_ERROR(td_dropout(ones(td, 3), NAN), "dropout: p must be at least 0 and below 1, got nan");
    EXPECT_ERROR(td_add(ones(td, 3), td_fill(td, TD_I32, TD_SHAPE(3), 1)), "add: operands have dtypes f32 and i32");
    text = "matmul: needs float operands, got i32";
    EXPECT_ERROR(td_matmul(td_fill(td, TD_I32, TD_SHAPE(2, 2), 1), td_fill(td, TD_I32, TD_SHAPE(2, 2), 1)), text);
    EXPECT_ERROR(td_mean(td_fill(td, TD_I32, TD_SHAPE(3), 1), TD_ALL, TD_DROP), "mean: needs a float dtype, got i32");
    text = "cross_entropy_rows: needs float logits and i32 labels, got f32 and f32";
    EXPECT_ERROR(td_cross_entropy(ones(td, 2, 3), ones(td, 2)), text);
}
END_TEST

START_TEST(test_errors_name_the_module_and_come_first)
{
    td_context *td = open_cpu(TD_F32);
    td_module block = td_child(td_child(td_root(td), "h"), "3");
    td_enter(block);
    td_tensor failed = td_slice(ones(td, 3), 0, 2, 1);
    int line = __LINE__ - 1;
    td_leave(block);
    ck_assert(td_failed(td_relu(td_matmul(failed, failed)))); /* failed in, failed out, no second error */
    char want[256];
    snprintf(want, sizeof want, "slice: [2, 1) is not within dimension 0 of shape (3) (h.3) (%s:%d)", __FILE__, line);
    ck_assert_str_eq(td_error_text(td), want);
    td_close(td);
}
END_TEST

/* ---- Random draws -------------------------------------------------------------------------------------------- */

/* Known answers of Random123's kat_vectors. */
START_TEST(test_philox_gives_its_published_values)
{
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } known[] = {
        { { 0 }, { 0 }, { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } },
        { { 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff },
          { 0xffffffff, 0xffffffff },
          { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd } },
        { { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 },
          { 0xa4093822, 0x299f31d0 },
          { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 } },
    };
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        td_philox(known[i].counter, known[i].key, out);
        ck_assert_int_eq(memcmp(out, known[i].out, sizeof out), 0);
    }
}
END_TEST

/* Element i of a draw is word i % 64 / 16 of block i / 64 * 16 + i % 16, whose number is the low half of Philox's counter: also
 * past 32 bits, whichever kernel makes it. */
START_TEST(test_draws_are_blocks_of_philox)
{
    enum { N = 300 };
    const uint64_t begins[] = { 0, 37, ((uint64_t)1 << 34) - 100, (uint64_t)1 << 40 };
    td_random r = { .key = 0x0123456789ABCDEF, .counter = 0xFEDCBA9876543210 };
    uint32_t key[2] = { (uint32_t)r.key, (uint32_t)(r.key >> 32) }, bits[N], block[4];
    for (size_t b = 0; b < sizeof begins / sizeof *begins; b++) {
        td_random_bits(r, begins[b], N, bits);
        for (uint64_t i = 0; i < N; i++) {
            uint64_t at = begins[b] + i, number = at / 64 * 16 + at % 16;
            uint32_t counter[4] = { (uint32_t)number, (uint32_t)(number >> 32), (uint32_t)r.counter, (uint32_t)(r.counter >> 32) };
            td_philox(counter, key, block);
            ck_assert_uint_eq(bits[i], block[at % 64 / 16]);
        }
    }
}
END_TEST

/* A block has eight elements of 16 bits: the low half of each word, then the high one. */
START_TEST(test_draws_of_16_bits_are_halves_of_words)
{
    enum { N = 300 };
    const uint64_t begins[] = { 0, 5, ((uint64_t)1 << 35) - 100, (uint64_t)1 << 40 };
    td_random r = { .key = 0x0123456789ABCDEF, .counter = 0xFEDCBA9876543210 };
    uint32_t key[2] = { (uint32_t)r.key, (uint32_t)(r.key >> 32) }, block[4];
    uint16_t bits[N];
    for (size_t b = 0; b < sizeof begins / sizeof *begins; b++) {
        td_random_halves(r, begins[b], N, bits);
        for (uint64_t i = 0; i < N; i++) {
            uint64_t at = begins[b] + i, number = at / 8;
            uint32_t counter[4] = { (uint32_t)number, (uint32_t)(number >> 32), (uint32_t)r.counter, (uint32_t)(r.counter >> 32) };
            td_philox(counter, key, block);
            ck_assert_uint_eq(bits[i], block[at % 8 / 2] >> (at % 2 ? 16 : 0) & 0xFFFF);
        }
    }
}
END_TEST

START_TEST(test_draws_are_the_same_from_any_start)
{
    enum { N = 400 };
    td_random r = td_random_of(1, 2, 7);
    uint32_t bits[N], some[N];
    double normal[N], few[N], uniform[N];
    td_random_bits(r, 0, N, bits);
    td_random_normal(r, 0, N, normal);
    td_random_uniform(r, 0, N, uniform);
    for (int begin = 0; begin < N; begin += 7) {
        int count = N - begin < 150 ? N - begin : 150;
        td_random_bits(r, (uint64_t)begin, count, some);
        ck_assert_int_eq(memcmp(some, bits + begin, (size_t)count * sizeof *some), 0);
        td_random_normal(r, (uint64_t)begin, count, few);
        ck_assert_int_eq(memcmp(few, normal + begin, (size_t)count * sizeof *few), 0);
        td_random_uniform(r, (uint64_t)begin, count, few);
        ck_assert_int_eq(memcmp(few, uniform + begin, (size_t)count * sizeof *few), 0);
    }
}
END_TEST

/* Means and deviations of 100,000 draws lie within five of their standard errors. */
START_TEST(test_draws_have_their_distribution)
{
    enum { N = 100000 };
    double *x = check_alloc(N * sizeof *x), mean = 0, square = 0, product = 0;
    td_random r = td_random_of(3, 4, 5);
    td_random_normal(r, 0, N, x);
    for (int i = 0; i < N; i++)
        mean += x[i] / N, square += x[i] * x[i] / N, product += i >= 16 ? x[i] * x[i - 16] / N : 0;
    ck_assert_double_le(fabs(mean), 5 / sqrt(N));
    ck_assert_double_le(fabs(square - 1), 5 * sqrt(2.0 / N));
    ck_assert_double_le(fabs(product), 5 / sqrt(N)); /* the two of a pair */
    td_random_uniform(r, 0, N, x);
    mean = 0;
    for (int i = 0; i < N; i++) {
        ck_assert(x[i] >= 0 && x[i] < 1);
        mean += x[i] / N;
    }
    ck_assert_double_le(fabs(mean - 0.5), 5 * sqrt(1.0 / 12 / N));
}
END_TEST

enum { DRAWN = 20000 };

/* dropout(ones), p = 0.3, as the second draw of module `path` at the given update. */
static const float *dropped(uint64_t seed, const char *path, int64_t update)
{
    td_context *td = td_open(&(td_options){ .seed = seed, .log = check_log_line });
    td_set_updates(td, update);
    td_module at = td_child(td_root(td), path);
    td_enter(at);
    td_dropout(ones(td, 8), 0.3);
    td_tensor y = td_dropout(ones(td, 200, DRAWN / 200), 0.3);
    td_leave(at);
    float *values = check_alloc(DRAWN * sizeof *values);
    ck_assert_msg(td_read(y, values), "%s", td_error_text(td));
    td_close(td);
    return values;
}

START_TEST(test_dropout_scales_what_it_keeps)
{
    const float *y = dropped(1, "a", 0);
    int64_t zeros = 0;
    double mean = 0;
    for (int i = 0; i < DRAWN; i++) {
        ck_assert(y[i] == 0 || y[i] == (float)(1 / (1 - 0.3)));
        zeros += y[i] == 0;
        mean += y[i] / DRAWN;
    }
    ck_assert_double_le(fabs((double)zeros / DRAWN - 0.3), 5 * sqrt(0.3 * 0.7 / DRAWN));
    ck_assert_double_le(fabs(mean - 1), 5 * sqrt(0.3 / 0.7 / DRAWN));
}
END_TEST

START_TEST(test_dropout_is_keyed_by_seed_path_and_update)
{
    const float *y = dropped(1, "a", 5);
    size_t bytes = DRAWN * sizeof *y;
    ck_assert_int_eq(memcmp(y, dropped(1, "a", 5), bytes), 0);
    ck_assert_int_ne(memcmp(y, dropped(2, "a", 5), bytes), 0);
    ck_assert_int_ne(memcmp(y, dropped(1, "b", 5), bytes), 0);
    ck_assert_int_ne(memcmp(y, dropped(1, "a", 6), bytes), 0);
}
END_TEST

START_TEST(test_dropout_uses_one_mask_forward_and_backward)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor x = td_add(td_square(randn(td, 50, 50)), ones(td, 1)); /* nowhere 0 */
    td_tensor y = td_dropout(x, 0.5), dx = td_gradient(y, x);
    ck_assert_tensor_near(td_mul(dx, x), y, 1e-15);
    td_close(td);
}
END_TEST

START_TEST(test_dropout_does_nothing_in_evaluation)
{
    td_context *td = open_cpu(TD_F32);
    td_set_mode(td, TD_EVAL);
    td_tensor x = ones(td, 3);
    ck_assert_int_eq(td_dropout(x, 0.5).id, x.id);
    td_set_mode(td, TD_TRAIN);
    ck_assert_int_eq(td_dropout(x, 0).id, x.id);
    ck_assert_int_ne(td_dropout(x, 0.5).id, x.id);
    td_close(td);
}
END_TEST

START_TEST(test_uniform_draws_differ_from_each_other)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor a = td_uniform(td, TD_SHAPE(1000)), b = td_uniform(td, TD_SHAPE(1000));
    double mean = td_item(td_mean(a, TD_ALL, TD_DROP));
    ck_assert_double_le(fabs(mean - 0.5), 5 * sqrt(1.0 / 12 / 1000));
    ck_assert_double_gt(td_item(td_max(td_abs(td_sub(a, b)), TD_ALL, TD_DROP)), 0.5);
    td_close(td);
}
END_TEST

/* ---- Single operations ------------------------------------------------------------------------------------------ */

START_TEST(test_losses_are_their_formulas)
{
    td_context *td = open_cpu(TD_F64);
    const double logits[] = { 0, log(3), 2, 2 }, weights[] = { 1, 3 }; /* softmax: 1/4 3/4, 1/2 1/2 */
    const int32_t labels[] = { 1, 0 };
    const double y[] = { 1, 2, 3, 4 }, target[] = { 1, 1, 1, 1 }; /* squares: 0 1, 4 9 */
    td_tensor x = td_input(td, "logits", TD_F64, TD_SHAPE(2, 2), logits),
              l = td_input(td, "labels", TD_I32, TD_SHAPE(2), labels);
    td_tensor w = td_input(td, "weights", TD_F64, TD_SHAPE(2), weights);
    td_tensor a = td_input(td, "y", TD_F64, TD_SHAPE(2, 2), y),
              b = td_input(td, "target", TD_F64, TD_SHAPE(2, 2), target);
    ck_assert_double_eq_tol(td_item(td_cross_entropy(x, l)), (log(4.0 / 3) + log(2)) / 2, 1e-15);
    ck_assert_double_eq_tol(td_item(td_cross_entropy_weighted(x, l, w)), (log(4.0 / 3) + 3 * log(2)) / 4, 1e-15);
    ck_assert_double_eq_tol(td_item(td_mse(a, b)), 14.0 / 4, 1e-15);
    ck_assert_double_eq_tol(td_item(td_mse_weighted(a, b, w)), (0.5 + 3 * 6.5) / 4, 1e-15);
    td_close(td);
}
END_TEST

START_TEST(test_a_label_out_of_range_gives_nan)
{
    for (int32_t label = -1; label <= 3; label += 4) {
        td_context *td = open_cpu(TD_F32);
        td_tensor x = randn(td, 1, 3);
        td_tensor loss = td_cross_entropy(x, td_input(td, "label", TD_I32, TD_SHAPE(1), &label));
        td_tensor dx = td_sum(td_gradient(loss, x), TD_ALL, TD_DROP);
        ck_assert(isnan(td_item(loss)) && isnan(td_item(dx)));
        td_close(td);
    }
}
END_TEST

START_TEST(test_casts_round_to_nearest_even_and_cut_to_integers)
{
    td_context *td = open_cpu(TD_F32);
    const float x[] = { 1 + 0x1p-8f, 1 + 3 * 0x1p-8f, 65504, 65520, -2.9f, 0x1p-25f, NAN, 3e9f };
    const float bf16[] = { 1, 1 + 4 * 0x1p-8f, 65536, 65536, -2.90625f, 0x1p-25f };
    const float f16[] = { 1 + 0x1p-8f, 1 + 3 * 0x1p-8f, 65504, INFINITY, -2.900390625f, 0 };
    const int32_t i32[] = { 1, 1, 65504, 65520, -2, 0, 0, INT32_MAX };
    float narrow[8];
    int32_t whole[8];
    td_tensor in = td_input(td, "x", TD_F32, TD_SHAPE(8), x);
    ck_assert(td_read(td_cast(td_cast(in, TD_BF16), TD_F32), narrow));
    ck_assert_int_eq(memcmp(narrow, bf16, sizeof bf16), 0);
    ck_assert(isnan(narrow[6]));
    ck_assert(td_read(td_cast(td_cast(in, TD_F16), TD_F32), narrow));
    ck_assert_int_eq(memcmp(narrow, f16, sizeof f16), 0);
    ck_assert(isnan(narrow[6]));
    ck_assert(td_read(td_cast(in, TD_I32), whole));
    ck_assert_int_eq(memcmp(whole, i32, sizeof i32), 0);
    td_close(td);
}
END_TEST

START_TEST(test_argmax_takes_the_first_of_ties)
{
    td_context *td = open_cpu(TD_F32);
    const float x[] = { 1, 3, 3, 2, /**/ NAN, 5, NAN, 1, /**/ -INFINITY, -INFINITY, -INFINITY, -INFINITY };
    int32_t at[3];
    ck_assert(td_read(td_argmax(td_input(td, "x", TD_F32, TD_SHAPE(3, 4), x)), at));
    ck_assert_int_eq(at[0], 1);
    ck_assert_int_eq(at[1], 0); /* a NaN is the largest, as for max */
    ck_assert_int_eq(at[2], 0);
    td_close(td);
}
END_TEST

/* 2^24 + 2^13 ones: a running f32 sum would stop at 2^24. */
START_TEST(test_long_f32_sums_do_not_stall)
{
    td_context *td = open_cpu(TD_F32);
    td_tensor x = ones(td, 4096, 4098);
    ck_assert_double_eq(td_item(td_sum(x, TD_ALL, TD_DROP)), 16785408);
    ck_assert_double_eq(td_item(td_max(td_sum(td_reshape(x, -1, 1), 0, TD_DROP), TD_ALL, TD_DROP)), 16785408);
    td_close(td);
}
END_TEST

START_TEST(test_integers_are_computed_exactly)
{
    td_context *td = open_cpu(TD_F32);
    const int32_t a[] = { 16777217, -7, 2 }, b[] = { 16777216, 2, 1 };
    int32_t less[3], difference[3];
    td_tensor x = td_input(td, "a", TD_I32, TD_SHAPE(3), a), y = td_input(td, "b", TD_I32, TD_SHAPE(3), b);
    ck_assert(td_read(td_less(y, x), less));
    ck_assert(td_read(td_sub(x, y), difference));
    ck_assert(less[0] == 1 && less[1] == 0 && less[2] == 1);
    ck_assert(difference[0] == 1 && difference[1] == -9 && difference[2] == 1);
    td_close(td);
}
END_TEST

TESTS("ops", test_gradients_equal_central_differences, test_second_derivatives_equal_central_differences,
      test_every_operation_has_cases_and_a_gradient_rule, test_decompositions_equal_their_operation,
      test_f32_agrees_with_f64, test_bf16_products_agree_with_f64, test_results_do_not_depend_on_threads,
      test_results_do_not_depend_on_fusion, test_f64_products_do_not_depend_on_threads,
      test_16_bit_values_are_rounded_inside_a_chain, test_sums_over_an_uneven_shard_leave_out_what_does_not_exist,
      test_wrong_shapes_are_refused_by_name, test_wrong_arguments_are_refused_by_name,
      test_errors_name_the_module_and_come_first, test_philox_gives_its_published_values,
      test_draws_are_blocks_of_philox, test_draws_of_16_bits_are_halves_of_words, test_draws_are_the_same_from_any_start, test_draws_have_their_distribution, test_dropout_scales_what_it_keeps,
      test_dropout_is_keyed_by_seed_path_and_update, test_dropout_uses_one_mask_forward_and_backward,
      test_dropout_does_nothing_in_evaluation, test_uniform_draws_differ_from_each_other,
      test_losses_are_their_formulas, test_a_label_out_of_range_gives_nan,
      test_casts_round_to_nearest_even_and_cut_to_integers, test_argmax_takes_the_first_of_ties,
      test_long_f32_sums_do_not_stall, test_integers_are_computed_exactly)
