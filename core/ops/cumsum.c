/* cumsum: running sums along the last dimension.
 *
 *     x (..., D) float  ->  y_j = x_0 + ... + x_j  (..., D), dtype of x;   in reverse  y_j = x_j + ... + x_{D-1}
 *
 * Summed in f64. The gradient is the sum from the other end.
 */
#include "core/ops/convert.h"
#include "core/ops/op.h"
#include "core/ops/rows.h"

TD_CUDA_KERNEL(td_cumsum_cuda);

enum { BLOCK = 512 };

static bool cumsum_shape(td_call *call)
{
    return td_call_float_rows(call) && td_call_like(call, 0);
}

static td_tensor cumsum(td_tensor x, int64_t reverse, td_here here)
{
    return td_record(&td_op_cumsum, here, 1, &x, &(td_cumsum_attr){ .reverse = reverse });
}

static void cumsum_gradient(const td_gradient_call *g)
{
    td_gradient_set(g, 0, cumsum(g->dout[0], !((const td_cumsum_attr *)g->attr)->reverse, g->here));
}

/* The product with a triangle of ones. */
static td_tensor cumsum_decomposed(const td_gradient_call *call)
{
    td_tensor x = call->in[0];
    td_here here = call->here;
    td_shape shape = td_shape_at(x);
    int64_t n = shape.dim[shape.rank - 1];
    td_tensor triangle = td_tril_at(td_fill_at(call->td, td_dtype_at(x), TD_SHAPE(n, n), 1, here), 0, here);
    int reverse = ((const td_cumsum_attr *)call->attr)->reverse != 0;
    return td_reshape_as(td_matmul_at(td_rows_of(x, here), triangle, 0, !reverse, here), x, here);
}

static void cumsum_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    td_rule_rows(p, n, rule);
    rule->partial = TD_PARTIAL_JOINT;
}

static void cumsum_rows(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const td_arg *x = &k->in[0], *y = &k->out[0];
    bool reverse = ((const td_cumsum_attr *)k->attr)->reverse;
    int64_t columns = td_arg_last(x);
    double tile[BLOCK];
    for (int64_t row = begin; row < end; row++) {
        double total = 0;
        for (int64_t done = 0; done < columns; done += BLOCK) {
            int64_t n = td_smaller(BLOCK, columns - done);
            int64_t at = row * columns + (reverse ? columns - done - n : done);
            td_load_f64(tile, x->dtype, td_arg_at(x, at), n);
            for (int64_t i = 0; i < n; i++) {
                int64_t j = reverse ? n - 1 - i : i;
                tile[j] = total += tile[j];
            }
            td_store_f64(td_arg_at(y, at), y->dtype, tile, n);
        }
    }
}

static void cumsum_cpu(const td_kernel *k)
{
    td_for_each_row(k, cumsum_rows);
}

static td_cost cumsum_cost(const td_kernel *k)
{
    return td_cost_of(k, 1);
}

#define REVERSE(reverse_) &(const td_cumsum_attr){ .reverse = (reverse_) }

static const td_case cumsum_cases[] = {
    { .in = { TD_RANDN(3, 5) }, .attr = REVERSE(0) },
    { .in = { TD_RANDN(12, 2, 7) }, .attr = REVERSE(1), .note = "from the end" },
    { .in = { TD_RANDN(2, 1031) }, .attr = REVERSE(0), .note = "several blocks" },
    { .in = { TD_RANDN(2, 1031) }, .attr = REVERSE(1) },
    TD_CASES_END
};

const td_op td_op_cumsum = {
    .name       = "cumsum",
    .inputs     = 1,
    .flags      = TD_OP_INPLACE,
    .attr_bytes = sizeof(td_cumsum_attr),
    .shape      = cumsum_shape,
    .gradient   = cumsum_gradient,
    .decompose  = cumsum_decomposed,
    .place      = cumsum_place,
    .precision  = TD_ANY_DTYPE,
    .cost       = cumsum_cost,
    .cpu        = cumsum_cpu,
    .cuda       = TD_CUDA(td_cumsum_cuda),
    .cases      = cumsum_cases,
};

td_tensor td_cumsum_at(td_tensor x, td_here here)
{
    return cumsum(x, 0, here);
}
