/* Elements of a row chosen by number, along the last dimension.
 *
 *     gather       x (..., D) float, ids (..., K) i32  ->  x[..., id]  (..., K), dtype of x
 *     scatter_add  ids (..., K) i32, dy (..., K)       ->  (..., D): the sum of dy over the places of each id, wide
 *
 * The leading dimensions of both operands are the same. An id outside [0, D) gives NaN, and its gradient goes nowhere.
 * Each is the other's gradient.
 */
#include "core/ops/convert.h"
#include "core/ops/op.h"

#include <math.h>

typedef struct op_scatter_attr {
    int64_t columns; /* D */
} op_scatter_attr;

enum { TASK_ELEMENTS = 8 << 10 };

TD_CUDA_KERNEL(td_gather_cuda);
TD_CUDA_KERNEL(td_scatter_add_cuda);

static bool same_rows(const td_call *call, const td_value *values, const td_value *ids)
{
    td_shape a = values->shape, b = ids->shape;
    char text[2][TD_SHAPE_TEXT];
    bool same = a.rank >= 1 && a.rank == b.rank;
    for (int i = 0; same && i < a.rank - 1; i++)
        same = a.dim[i] == b.dim[i];
    if (!same)
        return td_call_fail(call, "values %s and ids %s do not fit (..., D), (..., K)", td_shape_text(a, text[0]),
                            td_shape_text(b, text[1]));
    if (!td_is_float((td_dtype)values->dtype) || ids->dtype != TD_I32)
        return td_call_fail(call, "needs float values and i32 ids, got %s and %s",
                            td_dtype_name((td_dtype)values->dtype), td_dtype_name((td_dtype)ids->dtype));
    return true;
}

static void for_each_row(const td_kernel *k, td_range_function body)
{
    const td_arg *ids = &k->in[k->op == &td_op_gather];
    int64_t columns = td_arg_last(&k->in[0]) + td_arg_last(&k->out[0]);
    int64_t rows = td_shape_product(ids->shape, 0, (int)ids->shape.rank - 1);
    td_parallel_for(k->run, rows, TASK_ELEMENTS / (columns + 1) + 1, body, (void *)k);
}

/* ---- gather --------------------------------------------------------------------------------------------- */

static bool gather_shape(td_call *call)
{
    if (!same_rows(call, call->in[0], call->in[1]))
        return false;
    call->out[0].shape = call->in[1]->shape;
    call->out[0].dtype = call->in[0]->dtype;
    return true;
}

static td_tensor scatter_add(td_tensor ids, td_tensor dy, int64_t columns, td_here here)
{
    op_scatter_attr attr = { .columns = columns };
    return td_record(&td_op_scatter_add, here, 2, (td_tensor[]){ ids, dy }, &attr);
}

static void gather_gradient(const td_gradient_call *g)
{
    if (!g->wanted[0])
        return;
    td_shape x = td_shape_at(g->in[0]);
    td_tensor dx = scatter_add(g->in[1], g->dout[0], x.dim[x.rank - 1], g->here);
    td_gradient_set(g, 0, td_as(dx, td_dtype_at(g->in[0]), g->here));
}

static void gather_rows(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const td_arg *x = &k->in[0], *y = &k->out[0];
    int64_t columns = td_arg_last(x), count = td_arg_last(y), size = td_dtype_size(x->dtype);
    const int32_t *ids = k->in[1].data;
    const double nan = NAN;
    for (int64_t i = begin * count; i < end * count; i++) {
        if (ids[i] >= 0 && ids[i] < columns)
            memcpy(td_arg_at(y, i), td_arg_at(x, i / count * columns + ids[i]), (size_t)size);
        else
            td_store_f64(td_arg_at(y, i), y->dtype, &nan, 1);
    }
}

static void gather_cpu(const td_kernel *k)
{
    for_each_row(k, gather_rows);
}

static const td_case gather_cases[] = {
    { .in = { TD_RANDN(4, 9), TD_LABELS(9, 4, 3) } },
    { .in = { TD_RANDN(2, 3, 5), TD_LABELS(5, 2, 3, 12) }, .note = "ids that repeat" },
    { .in = { TD_RANDN(7), TD_LABELS(7, 2) }, .note = "one row" },
    TD_CASES_END
};

const td_op td_op_gather = {
    .name      = "gather",
    .inputs    = 2,
    .shape     = gather_shape,
    .gradient  = gather_gradient,
    .place     = td_rule_rows,
    .precision = TD_ANY_DTYPE,
    .cpu       = gather_cpu,
    .cuda      = TD_CUDA(td_gather_cuda),
    .cases     = gather_cases,
};

td_tensor td_gather_at(td_tensor x, td_tensor ids, td_here here)
{
    return td_record(&td_op_gather, here, 2, (td_tensor[]){ x, ids }, NULL);
}

/* ---- scatter_add ---------------------------------------------------------------------------------------- */

static bool scatter_shape(td_call *call)
{
    const op_scatter_attr *attr = call->attr;
    if (!same_rows(call, call->in[1], call->in[0]))
        return false;
    td_shape shape = call->in[1]->shape;
    bool same = shape.dim[shape.rank - 1] == call->in[0]->shape.dim[shape.rank - 1];
    if (!same || attr->columns < 0)
        return td_call_fail(call, "needs as many values as ids, and a size of at least 0");
    shape.dim[shape.rank - 1] = attr->columns;
    call->out[0].shape = shape;
    call->out[0].dtype = (uint8_t)td_wide_dtype((td_dtype)call->in[1]->dtype);
    return true;
}

static void scatter_gradient(const td_gradient_call *g)
{
    if (g->wanted[1])
        td_gradient_set(g, 1, td_as(td_gather_at(g->dout[0], g->in[0], g->here), td_dtype_at(g->in[1]), g->here));
}

static void scatter_rows(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const td_arg *dy = &k->in[1], *y = &k->out[0];
    int64_t columns = td_arg_last(y), count = td_arg_last(dy);
    const int32_t *ids = k->in[0].data;
    memset(td_arg_at(y, begin * columns), 0, (size_t)((end - begin) * columns * td_dtype_size(y->dtype)));
    for (int64_t i = begin * count; i < end * count; i++) {
        if (ids[i] < 0 || ids[i] >= columns)
            continue;
        void *to = td_arg_at(y, i / count * columns + ids[i]);
        if (y->dtype == TD_F64) {
            *(double *)to += ((const double *)dy->data)[i];
            continue;
        }
        float value;
        td_load_f32(&value, dy->dtype, td_arg_at(dy, i), 1);
        *(float *)to += value;
    }
}

static void scatter_cpu(const td_kernel *k)
{
    for_each_row(k, scatter_rows);
}

#define COLUMNS(columns_) &(const op_scatter_attr){ .columns = (columns_) }

static const td_case scatter_cases[] = {
    { .in = { TD_LABELS(9, 4, 3), TD_RANDN(4, 3) }, .attr = COLUMNS(9) },
    { .in = { TD_LABELS(5, 2, 3, 12), TD_RANDN(2, 3, 12) }, .attr = COLUMNS(5), .note = "ids that repeat" },
    TD_CASES_END
};

const td_op td_op_scatter_add = {
    .name       = "scatter_add",
    .inputs     = 2,
    .attr_bytes = sizeof(op_scatter_attr),
    .shape      = scatter_shape,
    .gradient   = scatter_gradient,
    .place      = td_rule_rows,
    .precision  = TD_WIDE,
    .cpu        = scatter_cpu,
    .cuda       = TD_CUDA(td_scatter_add_cuda),
    .cases      = scatter_cases,
};

td_tensor td_scatter_add_at(td_tensor ids, td_tensor values, int64_t columns, td_here here)
{
    return scatter_add(ids, values, columns, here);
}
