/* Losses.
 *
 *     cross_entropy_rows      logits (..., C), labels (...) i32  ->  -log softmax(logits)[label]  (...) f32 or f64
 *     cross_entropy_gradient  logits, labels, d (...)            ->  (softmax(logits) - onehot(label)) d, like logits
 *
 * A label outside [0, C) gives NaN. A row is read once for its loss and twice for its gradient; nothing of its size is
 * kept between. Where both are wanted at once the gradient gives the loss, too, as a second output: fuse makes such nodes.
 * The losses a model calls are means of these whose denominators are those of the global batch:
 *
 *     td_cross_entropy = mean rows, or sum w rows / sum w;    td_mse = mean (y - target)^2
 */
#include "core/ops/convert.h"
#include "core/ops/op.h"
#include "core/ops/rows.h"

#include <math.h>

TD_CUDA_KERNEL(td_cross_entropy_rows_cuda);
TD_CUDA_KERNEL(td_cross_entropy_gradient_cuda);

static bool labels_fit(const td_call *call)
{
    td_shape logits = call->in[0]->shape, labels = call->in[1]->shape;
    td_dtype dtype = (td_dtype)call->in[0]->dtype;
    char text[2][TD_SHAPE_TEXT];
    if (!td_is_float(dtype) || call->in[1]->dtype != TD_I32)
        return td_call_fail(call, "needs float logits and i32 labels, got %s and %s", td_dtype_name(dtype),
                            td_dtype_name((td_dtype)call->in[1]->dtype));
    td_shape rows = logits;
    if (rows.rank > 0)
        rows.dim[--rows.rank] = 0;
    if (logits.rank < 1 || !td_shape_equal(rows, labels))
        return td_call_fail(call, "logits %s and labels %s do not fit (..., C), (...)", td_shape_text(logits, text[0]),
                            td_shape_text(labels, text[1]));
    return true;
}

static int32_t label_at(const td_kernel *k, int64_t row, int64_t classes)
{
    int32_t label = ((const int32_t *)k->in[1].data)[row];
    return label >= 0 && label < classes ? label : -1;
}

/* ---- cross_entropy_rows --------------------------------------------------------------------------------- */

static bool rows_shape(td_call *call)
{
    if (!labels_fit(call))
        return false;
    call->out[0].shape = call->in[1]->shape;
    call->out[0].dtype = (uint8_t)td_wide_dtype((td_dtype)call->in[0]->dtype);
    return true;
}

static td_tensor cross_entropy_slope(td_tensor logits, td_tensor labels, td_tensor d, td_here here)
{
    return td_record(&td_op_cross_entropy_gradient, here, 3, (td_tensor[]){ logits, labels, d }, NULL);
}

static void rows_gradient(const td_gradient_call *g)
{
    if (g->wanted[0])
        td_gradient_set(g, 0, cross_entropy_slope(g->in[0], g->in[1], g->dout[0], g->here));
}

static td_tensor rows_decomposed(const td_gradient_call *call)
{
    td_here here = call->here;
    td_dtype dtype = td_wide_dtype(td_dtype_at(call->in[0]));
    td_tensor x = td_as(call->in[0], dtype, here);
    td_shape shape = td_shape_at(x);
    td_tensor max = td_max_at(x, TD_LAST, TD_KEEP, here);
    td_tensor log_sum = td_log_at(td_sum_at(td_exp_at(td_sub_at(x, max, here), here), TD_LAST, TD_DROP, here), here);
    td_tensor hot = td_one_hot_at(call->in[1], shape.dim[shape.rank - 1], dtype, here);
    td_tensor at_label = td_where_at(hot, td_sub_at(x, max, here), td_constant_like(x, 0, here), here);
    td_tensor chosen = td_sum_at(at_label, TD_LAST, TD_DROP, here);
    return td_sub_at(log_sum, chosen, here);
}

static void rows_range(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const td_arg *x = &k->in[0];
    int64_t classes = td_arg_last(x);
    for (int64_t row = begin; row < end; row++) {
        int32_t label = label_at(k, row, classes);
        double loss = NAN;
        if (label >= 0) {
            td_row_sum s = td_row_sum_exp(x, row * classes, classes);
            td_load_f64(&loss, x->dtype, td_arg_at(x, row * classes + label), 1);
            loss = log(s.sum) - (loss - s.max);
        }
        td_store_f64(td_arg_at(&k->out[0], row), k->out[0].dtype, &loss, 1);
    }
}

static void rows_cpu(const td_kernel *k)
{
    td_for_each_row(k, rows_range);
}

static const td_case rows_cases[] = {
    { .in = { TD_RANDN(6, 10), TD_LABELS(10, 6) } },
    { .in = { TD_RANDN(2, 3, 5), TD_LABELS(5, 2, 3) } },
    { .in = { TD_RANDN(3, 1031), TD_LABELS(1031, 3) }, .note = "several blocks" },
    { .in = { TD_SCALED(1e3, 4, 7), TD_LABELS(7, 4) }, .note = "would overflow without the max" },
    TD_CASES_END
};

const td_op td_op_cross_entropy_rows = {
    .name      = "cross_entropy_rows",
    .inputs    = 2,
    .shape     = rows_shape,
    .gradient  = rows_gradient,
    .decompose = rows_decomposed,
    .place     = td_rule_rows,
    .precision = TD_WIDE,
    .cost      = td_row_sum_cost,
    .cpu       = rows_cpu,
    .cuda      = TD_CUDA(td_cross_entropy_rows_cuda),
    .cases     = rows_cases,
};

/* ---- cross_entropy_gradient ------------------------------------------------------------------------------ */

static bool slope_shape(td_call *call)
{
    if (!labels_fit(call))
        return false;
    if (!td_shape_equal(call->in[2]->shape, call->in[1]->shape))
        return td_call_fail(call, "the rows' gradients and labels differ in shape");
    return td_call_like(call, 0);
}

/* With s = softmax(x), h = onehot, u the gradient that arrives: y = (s - h) d gives
 *     dx = s (u d - sum(u d s)),   dd = sum(u (s - h)), whose (s - h) is this operation with d = 1. */
static void slope_gradient(const td_gradient_call *g)
{
    td_here here = g->here;
    td_tensor x = g->in[0], labels = g->in[1], d = g->in[2], u = g->dout[0];
    td_dtype dtype = td_dtype_at(x);
    td_shape column = td_shape_at(d);
    column.dim[column.rank++] = 1;
    if (g->wanted[0]) {
        td_tensor s = td_softmax_at(x, here);
        td_tensor ud = td_mul_at(u, td_as(td_reshape_at(d, column, here), dtype, here), here);
        td_tensor mean = td_as(td_sum_at(td_mul_at(ud, s, here), TD_LAST, TD_KEEP, here), dtype, here);
        td_gradient_set(g, 0, td_mul_at(s, td_sub_at(ud, mean, here), here));
    }
    if (g->wanted[2]) {
        td_tensor ones = td_fill_at(g->td, td_dtype_at(d), td_shape_at(d), 1, here);
        td_tensor slope = cross_entropy_slope(x, labels, ones, here);
        td_gradient_set(g, 2,
                        td_as(td_sum_at(td_mul_at(u, slope, here), TD_LAST, TD_DROP, here), td_dtype_at(d), here));
    }
}

static td_tensor slope_decomposed(const td_gradient_call *call)
{
    td_here here = call->here;
    td_tensor x = call->in[0], d = call->in[2];
    td_dtype dtype = td_dtype_at(x);
    td_shape shape = td_shape_at(x), column = td_shape_at(d);
    column.dim[column.rank++] = 1;
    td_tensor hot = td_one_hot_at(call->in[1], shape.dim[shape.rank - 1], dtype, here);
    td_tensor slope = td_sub_at(td_softmax_at(x, here), hot, here);
    return td_mul_at(slope, td_as(td_reshape_at(d, column, here), dtype, here), here);
}

static void slope_range(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const td_arg *x = &k->in[0], *y = &k->out[0];
    int64_t classes = td_arg_last(x);
    for (int64_t row = begin; row < end; row++) {
        int32_t label = label_at(k, row, classes);
        double scale, chosen = NAN;
        td_load_f64(&scale, k->in[2].dtype, td_arg_at(&k->in[2], row), 1);
        if (label >= 0)
            td_load_f64(&chosen, x->dtype, td_arg_at(x, row * classes + label), 1);
        td_row_sum s = td_row_sum_exp(x, row * classes, classes);
        td_row_softmax(x, y, row * classes, classes, s, label < 0 ? NAN : scale);
        if (k->outputs > 1) {
            double loss = log(s.sum) - (chosen - s.max);
            td_store_f64(td_arg_at(&k->out[1], row), k->out[1].dtype, &loss, 1);
        }
        if (label < 0)
            continue;
        chosen = (exp(chosen - s.max) / s.sum - 1) * scale; /* not yet rounded: near 1 the difference is all there is */
        td_store_f64(td_arg_at(y, row * classes + label), y->dtype, &chosen, 1);
    }
}

static void slope_cpu(const td_kernel *k)
{
    td_for_each_row(k, slope_range);
}

static const td_case slope_cases[] = {
    { .in = { TD_RANDN(6, 10), TD_LABELS(10, 6), TD_RANDN(6) } },
    { .in = { TD_RANDN(2, 600), TD_LABELS(600, 2), TD_RANDN(2) } },
    TD_CASES_END
};

const td_op td_op_cross_entropy_gradient = {
    .name      = "cross_entropy_gradient",
    .inputs    = 3,
    .flags     = TD_OP_INPLACE,
    .shape     = slope_shape,
    .gradient  = slope_gradient,
    .decompose = slope_decomposed,
    .place     = td_rule_rows,
    .precision = TD_WIDE,
    .cost      = td_row_sum_cost,
    .cpu       = slope_cpu,
    .cuda      = TD_CUDA(td_cross_entropy_gradient_cuda),
    .cases     = slope_cases,
};

/* ---- Losses --------------------------------------------------------------------------------------------- */

/* Over all ranks and rows, since sums are. */
td_tensor td_weighted_mean(td_tensor rows, td_tensor weights, const char *name, td_here here)
{
    if (td_failed(rows) || td_failed(weights))
        return td_failed(rows) ? rows : weights;
    char text[2][TD_SHAPE_TEXT];
    if (!td_shape_equal(td_shape_at(rows), td_shape_at(weights)))
        return td_refuse(rows.td, name, here, "rows %s and weights %s differ",
                         td_shape_text(td_shape_at(rows), text[0]), td_shape_text(td_shape_at(weights), text[1]));
    weights = td_as(weights, td_dtype_at(rows), here);
    td_tensor total = td_sum_at(td_mul_at(rows, weights, here), TD_ALL, TD_DROP, here);
    return td_div_at(total, td_sum_at(weights, TD_ALL, TD_DROP, here), here);
}

/* A divisor is made of few operations on a batch's columns: one that `most` do not exhaust is taken to depend on what trains. */
static bool depends_on_data_alone(const td_program *p, td_id id, int *most)
{
    const td_node *n = td_producer(p, id);
    if (--*most < 0)
        return false;
    if (n->op == &td_op_parameter)
        return !td_state_trains((td_state){ p->td, ((const td_parameter_attr *)td_node_attr(p, n))->state });
    const td_id *in = td_node_inputs(p, n);
    for (uint32_t i = 0; i < n->inputs; i++)
        if (!depends_on_data_alone(p, in[i], most))
            return false;
    return true;
}

bool td_quotient(td_tensor loss, td_tensor *sum, td_tensor *weight)
{
    int most = 256;
    if (!td_is_pending(loss))
        return false;
    const td_program *p = &loss.td->recording;
    const td_node *n = td_producer(p, loss.id);
    if (n->op != &td_op_div)
        return false;
    const td_id *in = td_node_inputs(p, n);
    if (td_value_at(p, in[0])->shape.rank || td_value_at(p, in[1])->shape.rank || !depends_on_data_alone(p, in[1], &most))
        return false;
    *sum = (td_tensor){ loss.td, in[0], loss.generation };
    *weight = (td_tensor){ loss.td, in[1], loss.generation };
    return true;
}

static td_tensor cross_entropy_rows(td_tensor logits, td_tensor labels, td_here here)
{
    return td_record(&td_op_cross_entropy_rows, here, 2, (td_tensor[]){ logits, labels }, NULL);
}

td_tensor td_cross_entropy_at(td_tensor logits, td_tensor labels, td_here here)
{
    return td_mean_at(cross_entropy_rows(logits, labels, here), TD_ALL, TD_DROP, here);
}

td_tensor td_cross_entropy_weighted_at(td_tensor logits, td_tensor labels, td_tensor weights, td_here here)
{
    return td_weighted_mean(cross_entropy_rows(logits, labels, here), weights, "cross_entropy", here);
}

/* (y - target)^2; the shapes are equal, for a broadcast would hide a mistake. */
static td_tensor squared_error(td_tensor y, td_tensor target, td_here here)
{
    if (td_failed(y) || td_failed(target))
        return td_failed(y) ? y : target;
    char text[2][TD_SHAPE_TEXT];
    if (!td_shape_equal(td_shape_at(y), td_shape_at(target)))
        return td_refuse(y.td, "mse", here, "shapes %s and %s differ", td_shape_text(td_shape_at(y), text[0]),
                         td_shape_text(td_shape_at(target), text[1]));
    return td_square_at(td_sub_at(y, target, here), here);
}

td_tensor td_mse_at(td_tensor y, td_tensor target, td_here here)
{
    return td_mean_at(squared_error(y, target, here), TD_ALL, TD_DROP, here);
}

td_tensor td_mse_weighted_at(td_tensor y, td_tensor target, td_tensor weights, td_here here)
{
    td_tensor error = squared_error(y, target, here);
    if (td_failed(error))
        return error;
    td_shape shape = td_shape_at(error);
    if (shape.rank == 0)
        return td_refuse(y.td, "mse", here, "weights need rows, got a scalar");
    td_tensor rows = td_reshape_at(error, TD_SHAPE(shape.dim[0], -1), here);
    return td_weighted_mean(td_mean_at(rows, TD_LAST, TD_DROP, here), weights, "mse", here);
}
