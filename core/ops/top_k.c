/* top_k: the k largest elements along the last dimension, in falling order, and where they are.
 *
 *     x (..., D)  ->  values (..., k), dtype of x;  indices (..., k) i32
 *
 * Or the smallest, in rising order. Of equal elements the first comes first; a NaN is the largest. k = D sorts. The
 * gradient of the values goes to their places.
 */
#include "core/ops/convert.h"
#include "core/ops/op.h"

#include <math.h>

TD_CUDA_KERNEL(td_top_k_cuda);

enum { TASK_ELEMENTS = 4 << 10 };

static bool top_k_shape(td_call *call)
{
    const td_top_k_attr *attr = call->attr;
    td_shape shape = call->in[0]->shape;
    td_dtype dtype = (td_dtype)call->in[0]->dtype;
    char text[TD_SHAPE_TEXT];
    if (shape.rank < 1 || attr->k < 0 || attr->k > shape.dim[shape.rank - 1])
        return td_call_fail(call, "cannot choose %lld along the last dimension of shape %s", (long long)attr->k,
                            td_shape_text(shape, text));
    if (shape.dim[shape.rank - 1] > INT32_MAX)
        return td_call_fail(call, "the last dimension of shape %s has more indices than i32", td_shape_text(shape, text));
    if (!td_is_float(dtype))
        return td_call_fail(call, "needs a float operand, got %s", td_dtype_name(dtype));
    shape.dim[shape.rank - 1] = attr->k;
    call->outputs = 2;
    call->out[0].shape = shape;
    call->out[0].dtype = (uint8_t)dtype;
    call->out[1] = (td_value){ .shape = shape, .dtype = TD_I32 };
    return true;
}

static void top_k_gradient(const td_gradient_call *g)
{
    td_shape x = td_shape_at(g->in[0]);
    if (td_failed(g->dout[0]))
        return;
    td_tensor dx = td_scatter_add_at(g->out[1], g->dout[0], x.dim[x.rank - 1], g->here);
    td_gradient_set(g, 0, td_as(dx, td_dtype_at(g->in[0]), g->here));
}

/* ---- A row: a heap of k indices whose root is the last of those kept -------------------------------------------- */

typedef struct row {
    const td_arg *x;
    int64_t at;                               /* of the row's first element */
    bool smallest;
} row;

static double element(const row *r, int32_t i)
{
    double value;
    if (r->x->dtype == TD_F32)
        return ((const float *)r->x->data)[r->at + i];
    td_load_f64(&value, r->x->dtype, td_arg_at(r->x, r->at + i), 1);
    return value;
}

/* Whether index a comes before b in the result. */
static bool before(const row *r, int32_t a, int32_t b)
{
    double x = element(r, a), y = element(r, b);
    if (isnan(x) || isnan(y)) {
        if (isnan(x) && isnan(y))
            return a < b;
        return isnan(x) != r->smallest;
    }
    if (x == y)
        return a < b;
    return r->smallest ? x < y : x > y;
}

static void sink(const row *r, int32_t *heap, int64_t count, int64_t i)
{
    for (int64_t child; (child = 2 * i + 1) < count; i = child) {
        if (child + 1 < count && before(r, heap[child], heap[child + 1]))
            child++;
        if (!before(r, heap[i], heap[child]))
            return;
        int32_t moved = heap[i];
        heap[i] = heap[child];
        heap[child] = moved;
    }
}

static void choose(const row *r, int64_t columns, int64_t k, int32_t *heap)
{
    for (int64_t i = 0; i < k; i++)
        heap[i] = (int32_t)i;
    for (int64_t i = k / 2; i-- > 0;)
        sink(r, heap, k, i);
    for (int64_t i = k; i < columns; i++) {
        if (!before(r, (int32_t)i, heap[0]))
            continue;
        heap[0] = (int32_t)i;
        sink(r, heap, k, 0);
    }
    for (int64_t count = k; count-- > 1;) { /* the last of those left goes to the end */
        int32_t last = heap[0];
        heap[0] = heap[count];
        heap[count] = last;
        sink(r, heap, count, 0);
    }
}

static void choose_rows(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const td_top_k_attr *attr = k->attr;
    int64_t columns = td_arg_last(&k->in[0]), size = td_dtype_size(k->in[0].dtype);
    for (int64_t i = begin; i < end && attr->k > 0; i++) {
        row r = { .x = &k->in[0], .at = i * columns, .smallest = attr->smallest };
        int32_t *chosen = td_arg_at(&k->out[1], i * attr->k);
        choose(&r, columns, attr->k, chosen);
        for (int64_t j = 0; j < attr->k; j++)
            memcpy(td_arg_at(&k->out[0], i * attr->k + j), td_arg_at(r.x, r.at + chosen[j]), (size_t)size);
    }
}

static void top_k_cpu(const td_kernel *k)
{
    td_shape shape = k->in[0].shape;
    td_parallel_for(k->run, td_shape_product(shape, 0, (int)shape.rank - 1),
                    TASK_ELEMENTS / (td_arg_last(&k->in[0]) + 1) + 1, choose_rows, (void *)k);
}

static void top_k_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_top_k_attr *attr = td_node_attr(p, n);
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "%lld %s", (long long)attr->k, attr->smallest ? "smallest" : "largest");
}

#define TOP(k_, smallest_) &(const td_top_k_attr){ .k = (k_), .smallest = (smallest_) }

static const td_case top_k_cases[] = {
    { .in = { TD_RANDN(4, 9) }, .attr = TOP(3, 0) },
    { .in = { TD_RANDN(2, 3, 7) }, .attr = TOP(7, 1), .note = "sorted" },
    { .in = { TD_RANDN(12, 301) }, .attr = TOP(20, 0) },
    { .in = { TD_RANDN(5) }, .attr = TOP(0, 0), .note = "none" },
    TD_CASES_END
};

const td_op td_op_top_k = {
    .name       = "top_k",
    .inputs     = 1,
    .attr_bytes = sizeof(td_top_k_attr),
    .shape      = top_k_shape,
    .gradient   = top_k_gradient,
    .place      = td_rule_rows,
    .precision  = TD_ANY_DTYPE,
    .cpu        = top_k_cpu,
    .cuda       = TD_CUDA(td_top_k_cuda),
    .print      = top_k_print,
    .cases      = top_k_cases,
};

td_tensor td_top_k_at(td_tensor x, int64_t k, const td_top_k_options *options, td_here here)
{
    td_top_k_attr attr = { .k = k, .smallest = options && options->smallest };
    td_tensor values = td_record(&td_op_top_k, here, 1, &x, &attr);
    if (options && options->indices)
        *options->indices = td_output(values, 1);
    return values;
}

td_tensor td_sort_at(td_tensor x, const td_top_k_options *options, td_here here)
{
    td_shape shape = td_shape_at(x);
    return td_top_k_at(x, shape.rank ? shape.dim[shape.rank - 1] : 0, options, here);
}
