/* log_softmax and logsumexp along the last dimension.
 *
 *     logsumexp    x (..., D) float  ->  max x + log sum exp(x - max x)  (...), f32 or f64
 *     log_softmax  x (..., D) float  ->  x - logsumexp(x)  (..., D), dtype of x
 *
 * Computed in f32 (f64 for f64), a row read twice. A row that is all -inf gives -inf from logsumexp, NaN from
 * log_softmax; one with +inf gives +inf and NaN.
 *     dx = exp(x - logsumexp x) dy,    dx = dy - exp(y) sum dy.
 */
#include "core/ops/convert.h"
#include "core/ops/op.h"
#include "core/ops/rows.h"
#include "core/ops/simd.h"

#include <math.h>

TD_CUDA_KERNEL(td_logsumexp_cuda);
TD_CUDA_KERNEL(td_log_softmax_cuda);

enum { BLOCK = 512 };

static double log_sum(td_row_sum s)
{
    return s.max + log(s.sum);
}

static bool has_nan(const td_arg *x, int64_t at, int64_t count)
{
    double tile[BLOCK];
    for (int64_t done = 0; done < count; done += BLOCK) {
        int64_t n = td_smaller(BLOCK, count - done);
        td_load_f64(tile, x->dtype, td_arg_at(x, at + done), n);
        for (int64_t i = 0; i < n; i++)
            if (isnan(tile[i]))
                return true;
    }
    return false;
}

/* ---- logsumexp ------------------------------------------------------------------------------------------ */

static bool logsumexp_shape(td_call *call)
{
    if (!td_call_float_rows(call))
        return false;
    td_shape shape = call->in[0]->shape;
    shape.dim[--shape.rank] = 0;
    call->out[0].shape = shape;
    call->out[0].dtype = (uint8_t)td_wide_dtype((td_dtype)call->in[0]->dtype);
    return true;
}

static td_tensor as_column(td_tensor y, td_dtype dtype, td_here here)
{
    td_shape column = td_shape_at(y);
    if (td_failed(y))
        return y;
    column.dim[column.rank++] = 1;
    return td_as(td_reshape_at(y, column, here), dtype, here);
}

static void logsumexp_gradient(const td_gradient_call *g)
{
    td_dtype dtype = td_dtype_at(g->out[0]);
    td_tensor x = td_as(g->in[0], dtype, g->here);
    td_tensor share = td_exp_at(td_sub_at(x, as_column(g->out[0], dtype, g->here), g->here), g->here);
    td_tensor dx = td_mul_at(share, as_column(g->dout[0], dtype, g->here), g->here);
    td_gradient_set(g, 0, td_as(dx, td_dtype_at(g->in[0]), g->here));
}

static td_tensor logsumexp_decomposed(const td_gradient_call *call)
{
    td_here here = call->here;
    td_tensor x = td_as(call->in[0], td_wide_dtype(td_dtype_at(call->in[0])), here);
    td_tensor max = td_max_at(x, TD_LAST, TD_KEEP, here);
    td_tensor is_finite = td_less_at(td_abs_at(max, here), td_constant_like(max, INFINITY, here), here);
    max = td_where_at(is_finite, max, td_constant_like(max, 0, here), here);
    td_tensor sum = td_sum_at(td_exp_at(td_sub_at(x, max, here), here), TD_LAST, TD_KEEP, here);
    td_tensor y = td_add_at(max, td_log_at(sum, here), here);
    td_shape shape = td_shape_at(y);
    shape.dim[--shape.rank] = 0;
    return td_reshape_at(y, shape, here);
}

static void logsumexp_rows(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    int64_t columns = td_arg_last(&k->in[0]);
    for (int64_t row = begin; row < end; row++) {
        td_row_sum s = td_row_sum_exp(&k->in[0], row * columns, columns);
        double y = log_sum(s);
        if (s.max == INFINITY && !has_nan(&k->in[0], row * columns, columns))
            y = INFINITY; /* the sum of distances from it is NaN */
        td_store_f64(td_arg_at(&k->out[0], row), k->out[0].dtype, &y, 1);
    }
}

static void logsumexp_cpu(const td_kernel *k)
{
    td_for_each_row(k, logsumexp_rows);
}

static const td_case row_cases[] = {
    { .in = { TD_RANDN(3, 5) } },
    { .in = { TD_RANDN(2, 7, 1) }, .note = "one element a row" },
    { .in = { TD_RANDN(12, 1031) }, .note = "no multiple of any vector width" },
    { .in = { TD_SCALED(1e3, 4, 64) }, .note = "would overflow without the max" },
    { .in = { TD_RANDN(0, 8) }, .note = "no rows" },
    TD_CASES_END
};

const td_op td_op_logsumexp = {
    .name      = "logsumexp",
    .inputs    = 1,
    .shape     = logsumexp_shape,
    .gradient  = logsumexp_gradient,
    .decompose = logsumexp_decomposed,
    .place     = td_rule_rows,
    .precision = TD_WIDE,
    .cost      = td_row_sum_cost,
    .cpu       = logsumexp_cpu,
    .cuda      = TD_CUDA(td_logsumexp_cuda),
    .cases     = row_cases,
};

td_tensor td_logsumexp_at(td_tensor x, td_here here)
{
    return td_record(&td_op_logsumexp, here, 1, &x, NULL);
}

/* ---- log_softmax ---------------------------------------------------------------------------------------- */

static bool log_softmax_shape(td_call *call)
{
    return td_call_float_rows(call) && td_call_like(call, 0);
}

static void log_softmax_gradient(const td_gradient_call *g)
{
    td_tensor y = g->out[0], dy = g->dout[0];
    td_tensor total = td_as(td_sum_at(dy, TD_LAST, TD_KEEP, g->here), td_dtype_at(y), g->here); /* (..., 1) */
    td_gradient_set(g, 0, td_sub_at(dy, td_mul_at(td_exp_at(y, g->here), total, g->here), g->here));
}

static td_tensor log_softmax_decomposed(const td_gradient_call *call)
{
    td_here here = call->here;
    td_tensor x = td_sub_at(call->in[0], td_max_at(call->in[0], TD_LAST, TD_KEEP, here), here);
    td_tensor sum = td_sum_at(td_exp_at(x, here), TD_LAST, TD_KEEP, here);
    return td_sub_at(x, td_as(td_log_at(sum, here), td_dtype_at(x), here), here);
}

static void shift_f64(const double *x, double *y, int64_t count, double by)
{
    TD_SIMD
    for (int64_t i = 0; i < count; i++)
        y[i] = x[i] - by;
}

/* x - max first: the difference of two large numbers would lose what log sum adds. */
static void shift_f32(const td_arg *x, const td_arg *y, int64_t at, int64_t count, td_row_sum s)
{
    float tile[BLOCK], max = (float)s.max, rest = (float)log(s.sum);
    for (int64_t done = 0; done < count; done += BLOCK) {
        int64_t n = td_smaller(BLOCK, count - done);
        const float *from = td_view_f32(x->dtype, td_arg_at(x, at + done), n, tile);
        float *to = y->dtype == TD_F32 ? td_arg_at(y, at + done) : tile;
        TD_SIMD
        for (int64_t i = 0; i < n; i++)
            to[i] = (from[i] - max) - rest;
        if (to == tile)
            td_store_f32(td_arg_at(y, at + done), y->dtype, tile, n);
    }
}

static void log_softmax_rows(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const td_arg *x = &k->in[0], *y = &k->out[0];
    int64_t columns = td_arg_last(x);
    for (int64_t row = begin; row < end; row++) {
        int64_t at = row * columns;
        td_row_sum s = td_row_sum_exp(x, at, columns);
        if (x->dtype == TD_F64)
            shift_f64(td_arg_at(x, at), td_arg_at(y, at), columns, log_sum(s));
        else
            shift_f32(x, y, at, columns, s);
    }
}

static void log_softmax_cpu(const td_kernel *k)
{
    td_for_each_row(k, log_softmax_rows);
}

const td_op td_op_log_softmax = {
    .name      = "log_softmax",
    .inputs    = 1,
    .flags     = TD_OP_INPLACE,
    .shape     = log_softmax_shape,
    .gradient  = log_softmax_gradient,
    .decompose = log_softmax_decomposed,
    .place     = td_rule_rows,
    .precision = TD_ANY_DTYPE,
    .cost      = td_row_sum_cost,
    .cpu       = log_softmax_cpu,
    .cuda      = TD_CUDA(td_log_softmax_cuda),
    .cases     = row_cases,
};

td_tensor td_log_softmax_at(td_tensor x, td_here here)
{
    return td_record(&td_op_log_softmax, here, 1, &x, NULL);
}
