/* softmax: y = exp(x - max x) / sum exp(x - max x), along the last dimension.
 *
 *     x (..., D) float   ->   y (..., D), dtype of x
 *
 * Computed in f32 (f64 for f64). A row that is all -inf gives NaN, as everywhere.
 * Its gradient needs only y:  dx = y * (dy - sum(dy * y)).
 */
#include "core/ops/op.h"
#include "core/ops/rows.h"

TD_CUDA_KERNEL(td_softmax_cuda);

static bool softmax_shape(td_call *call)
{
    return td_call_float_rows(call) && td_call_like(call, 0);
}

static void softmax_gradient(const td_gradient_call *g)
{
    td_tensor y = g->out[0], dy = g->dout[0];
    td_tensor weighted = td_mul_at(dy, y, g->here);                                    /* (..., D) */
    td_tensor total = td_sum_at(weighted, TD_LAST, TD_KEEP, g->here);                  /* (..., 1) */
    total = td_as(total, td_dtype_at(y), g->here);
    td_gradient_set(g, 0, td_mul_at(y, td_sub_at(dy, total, g->here), g->here));
}

static td_tensor softmax_decomposed(const td_gradient_call *call)
{
    td_tensor x = call->in[0];
    td_tensor e = td_exp_at(td_sub_at(x, td_max_at(x, TD_LAST, TD_KEEP, call->here), call->here), call->here);
    td_tensor total = td_as(td_sum_at(e, TD_LAST, TD_KEEP, call->here), td_dtype_at(x), call->here);
    return td_div_at(e, total, call->here);
}

/* The max, two exponentials, a sum and a product an element. */
static td_cost softmax_cost(const td_kernel *k)
{
    return td_cost_of(k, 5);
}

static void softmax_rows(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    int64_t columns = td_arg_last(&k->in[0]);
    for (int64_t row = begin; row < end; row++) {
        td_row_sum s = td_row_sum_exp(&k->in[0], row * columns, columns);
        td_row_softmax(&k->in[0], &k->out[0], row * columns, columns, s, 1);
    }
}

static void softmax_cpu(const td_kernel *k)
{
    td_for_each_row(k, softmax_rows);
}

static const td_case softmax_cases[] = {
    { .in = { TD_RANDN(3, 5) } },
    { .in = { TD_RANDN(2, 7, 1) }, .note = "one element a row: y = 1, dx = 0" },
    { .in = { TD_RANDN(4, 1031) }, .note = "no multiple of any vector width" },
    { .in = { TD_SCALED(1e4, 4, 64) }, .note = "would overflow without the max" },
    { .in = { TD_RANDN(0, 8) }, .note = "no rows" },
    TD_CASES_END
};

const td_op td_op_softmax = {
    .name      = "softmax",
    .inputs    = 1,
    .flags     = TD_OP_INPLACE,
    .shape     = softmax_shape,
    .gradient  = softmax_gradient,
    .decompose = softmax_decomposed,
    .place     = td_rule_rows,
    .precision = TD_ANY_DTYPE,
    .cost      = softmax_cost,
    .cpu       = softmax_cpu,
    .cuda      = TD_CUDA(td_softmax_cuda),
    .cases     = softmax_cases,
};

td_tensor td_softmax_at(td_tensor x, td_here here)
{
    return td_record(&td_op_softmax, here, 1, &x, NULL);
}
