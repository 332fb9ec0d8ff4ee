/* Rows of a table chosen by number.
 *
 *     embedding           table (V, D) float, ids (...) i32  ->  table[id]  (..., D), dtype of the table
 *     embedding_gradient  ids (...) i32, dy (..., D)         ->  (V, D): the sum of dy over the rows with each id, wide
 *
 * An id outside [0, V) gives a row of NaN, and its gradient goes nowhere. Gradients are added in the order of the ids
 * whatever the threads: each thread has columns of its own. Each is the other's gradient.
 */
#include "core/ops/convert.h"
#include "core/ops/embedding_cuda.h"
#include "core/ops/op.h"
#include "core/ops/shard.h"
#include "core/ops/simd.h"

#include <math.h>

typedef struct op_embedding_attr {
    int64_t rows; /* V */
} op_embedding_attr;

enum { TASK_ELEMENTS = 32 << 10, COLUMNS = 256, LEAST_COLUMNS = 16 };

static int32_t id_at(const td_arg *ids, int64_t row, int64_t rows)
{
    int32_t id = ((const int32_t *)ids->data)[row];
    return id >= 0 && id < rows ? id : -1;
}

static td_cost embedding_cost(const td_kernel *k)
{
    const td_arg *rows = k->op == &td_op_embedding ? &k->out[0] : &k->in[1];
    td_cost cost = { .bytes = 2 * td_arg_bytes(rows) };
    if (k->op == &td_op_embedding_gradient) {
        cost.flops = td_arg_elements(rows);
        cost.bytes += td_arg_bytes(&k->out[0]);
    }
    return cost;
}

/* ---- embedding ------------------------------------------------------------------------------------------ */

static bool embedding_shape(td_call *call)
{
    td_shape table = call->in[0]->shape, out = call->in[1]->shape;
    td_dtype dtype = (td_dtype)call->in[0]->dtype;
    char text[TD_SHAPE_TEXT];
    if (table.rank != 2)
        return td_call_fail(call, "needs a table (V, D), got shape %s", td_shape_text(table, text));
    if (!td_is_float(dtype) || call->in[1]->dtype != TD_I32)
        return td_call_fail(call, "needs a float table and i32 ids, got %s and %s", td_dtype_name(dtype),
                            td_dtype_name((td_dtype)call->in[1]->dtype));
    if (out.rank == TD_MAX_DIMS)
        return td_call_fail(call, "ids %s have no room for one more dimension", td_shape_text(out, text));
    out.dim[out.rank++] = table.dim[1];
    call->out[0].shape = out;
    call->out[0].dtype = (uint8_t)dtype;
    return true;
}

static void embedding_gradient_rule(const td_gradient_call *g)
{
    if (!g->wanted[0])
        return;
    op_embedding_attr attr = { .rows = td_shape_at(g->in[0]).dim[0] };
    td_tensor dtable = td_record(&td_op_embedding_gradient, g->here, 2, (td_tensor[]){ g->in[1], g->dout[0] }, &attr);
    td_gradient_set(g, 0, td_as(dtable, td_dtype_at(g->in[0]), g->here));
}

/* The table's rows are blocked: any rank may need any of them. */
static void embedding_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    rule->partial = TD_PARTIAL_EACH; /* linear in the table; ids are never a sum */
    int64_t rank = td_value_at(p, td_node_inputs(p, n)[1])->shape.rank;
    for (int i = 0; i < rank; i++)
        rule->in[1][i] = rule->out[0][i] = (int8_t)(i + 1);
    rule->in[0][1] = rule->out[0][rank] = (int8_t)(rank + 1);
}

static void copy_rows(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const td_arg *table = &k->in[0], *y = &k->out[0];
    int64_t columns = td_arg_last(table);
    const double nan = NAN;
    for (int64_t row = begin; row < end; row++) {
        int32_t id = id_at(&k->in[1], row, table->shape.dim[0]);
        void *to = td_arg_at(y, row * columns);
        if (id >= 0)
            memcpy(to, td_arg_at(table, id * columns), (size_t)(columns * td_dtype_size(y->dtype)));
        for (int64_t c = 0; id < 0 && c < columns; c++)
            td_store_f64(td_arg_at(y, row * columns + c), y->dtype, &nan, 1);
    }
}

static void embedding_cpu(const td_kernel *k)
{
    int64_t columns = td_arg_last(&k->in[0]);
    td_parallel_for(k->run, td_arg_elements(&k->in[1]), TASK_ELEMENTS / (columns > 0 ? columns : 1) + 1, copy_rows,
                    (void *)k);
}

static const td_case embedding_cases[] = {
    { .in = { TD_RANDN(7, 5), TD_LABELS(7, 4) } },
    { .in = { TD_RANDN(3, 4), TD_LABELS(3, 2, 12) }, .note = "ids that repeat" },
    { .in = { TD_RANDN(12, 33), TD_LABELS(12, 4, 3) }, .note = "no multiple of any vector width" },
    { .in = { TD_RANDN(4, 6), TD_LABELS(4, 0) }, .note = "no ids" },
    TD_CASES_END
};

const td_op td_op_embedding = {
    .name      = "embedding",
    .inputs    = 2,
    .shape     = embedding_shape,
    .gradient  = embedding_gradient_rule,
    .place     = embedding_place,
    .precision = TD_ANY_DTYPE,
    .cost      = embedding_cost,
    .cpu       = embedding_cpu,
    .cuda      = TD_CUDA(td_embedding_cuda),
    .cases     = embedding_cases,
};

td_tensor td_embedding_at(td_tensor table, td_tensor ids, td_here here)
{
    return td_record(&td_op_embedding, here, 2, (td_tensor[]){ table, ids }, NULL);
}

/* ---- embedding_gradient --------------------------------------------------------------------------------- */

static bool gradient_shape(td_call *call)
{
    const op_embedding_attr *attr = call->attr;
    td_shape ids = call->in[0]->shape, dy = call->in[1]->shape, rows = dy;
    char text[2][TD_SHAPE_TEXT];
    if (rows.rank > 0)
        rows.dim[--rows.rank] = 0;
    if (dy.rank < 1 || !td_shape_equal(rows, ids))
        return td_call_fail(call, "ids %s and rows %s do not fit (...), (..., D)", td_shape_text(ids, text[0]),
                            td_shape_text(dy, text[1]));
    call->out[0].shape = TD_SHAPE(attr->rows, dy.dim[dy.rank - 1]);
    call->out[0].dtype = (uint8_t)td_wide_dtype((td_dtype)call->in[1]->dtype);
    return true;
}

static void gradient_gradient(const td_gradient_call *g)
{
    if (g->wanted[1])
        td_gradient_set(g, 1, td_as(td_embedding_at(g->dout[0], g->in[0], g->here), td_dtype_at(g->in[1]), g->here));
}

static void gradient_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    rule->partial = TD_PARTIAL_EACH;
    int64_t rank = td_value_at(p, td_node_inputs(p, n)[0])->shape.rank;
    for (int i = 0; i < rank; i++)
        rule->in[0][i] = rule->in[1][i] = (int8_t)(i + 1);
    rule->in[1][rank] = rule->out[0][1] = (int8_t)(rank + 1);
}

static void zero_range(void *user, int64_t begin, int64_t end)
{
    const td_arg *y = user;
    memset(td_arg_at(y, begin), 0, (size_t)((end - begin) * td_dtype_size(y->dtype)));
}

/* to += dy[at ... at + count), in dy's own f64 or in f32. */
static void add_row(void *to, const td_arg *dy, int64_t at, int64_t count)
{
    if (dy->dtype == TD_F64) {
        const double *from = td_arg_at(dy, at);
        double *sum = to;
        TD_SIMD
        for (int64_t i = 0; i < count; i++)
            sum[i] += from[i];
        return;
    }
    float tile[COLUMNS], *sum = to;
    const float *from = td_view_f32(dy->dtype, td_arg_at(dy, at), count, tile);
    TD_SIMD
    for (int64_t i = 0; i < count; i++)
        sum[i] += from[i];
}

/* Columns [begin, end) of all rows, COLUMNS at a time. */
static void add_columns(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const td_arg *ids = &k->in[0], *dy = &k->in[1], *y = &k->out[0];
    td_rows rows = td_rows_held(k, ids, (int)ids->shape.rank);
    int64_t columns = td_arg_last(y);
    for (; begin < end; begin += COLUMNS) {
        int64_t count = td_smaller(COLUMNS, end - begin);
        for (int64_t row = 0; row < rows.count; row++) {
            int32_t id = id_at(ids, row, y->shape.dim[0]);
            if (id >= 0 && td_row_exists(&rows, row))
                add_row(td_arg_at(y, id * columns + begin), dy, row * columns + begin, count);
        }
    }
}

static void gradient_cpu(const td_kernel *k)
{
    int64_t rows = td_arg_elements(&k->in[0]);
    int64_t grain = TASK_ELEMENTS / (rows > 0 ? rows : 1) + 1;
    td_parallel_for(k->run, td_arg_elements(&k->out[0]), TASK_ELEMENTS, zero_range, (void *)&k->out[0]);
    td_parallel_for(k->run, td_arg_last(&k->out[0]), grain < LEAST_COLUMNS ? LEAST_COLUMNS : grain, add_columns,
                    (void *)k);
}

#ifdef TANDEM_CUDA
static void gradient_cuda(const td_kernel *k)
{
    td_embedding_gradient_rows(k, td_rows_held(k, &k->in[0], (int)k->in[0].shape.rank));
}
#endif

#define ROWS(rows_) &(const op_embedding_attr){ .rows = (rows_) }

static const td_case gradient_cases[] = {
    { .in = { TD_LABELS(7, 4), TD_RANDN(4, 5) }, .attr = ROWS(7) },
    { .in = { TD_LABELS(3, 2, 12), TD_RANDN(2, 12, 4) }, .attr = ROWS(3), .note = "ids that repeat" },
    { .in = { TD_LABELS(12, 4, 3), TD_RANDN(4, 3, 301) }, .attr = ROWS(12), .note = "several blocks of columns" },
    { .in = { TD_LABELS(4, 0), TD_RANDN(0, 6) }, .attr = ROWS(4), .note = "no ids: zeros" },
    TD_CASES_END
};

const td_op td_op_embedding_gradient = {
    .name       = "embedding_gradient",
    .inputs     = 2,
    .attr_bytes = sizeof(op_embedding_attr),
    .shape      = gradient_shape,
    .gradient   = gradient_gradient,
    .place      = gradient_place,
    .precision  = TD_WIDE,
    .cost       = embedding_cost,
    .cpu        = gradient_cpu,
    .cuda       = TD_CUDA(gradient_cuda, td_embedding_gradient_cuda_prepare),
    .cases      = gradient_cases,
};

/* ---- one-hot -------------------------------------------------------------------------------------------- */

td_tensor td_one_hot_at(td_tensor ids, int64_t classes, td_dtype dtype, td_here here)
{
    if (td_failed(ids))
        return ids;
    td_shape column = td_shape_at(ids);
    if (td_dtype_at(ids) != TD_I32 || column.rank == TD_MAX_DIMS)
        return td_refuse(ids.td, "one_hot", here, "needs i32 ids of fewer than %d dimensions", TD_MAX_DIMS);
    if (classes < 0 || classes > INT32_MAX)
        return td_refuse(ids.td, "one_hot", here, "cannot have %lld classes: ids are i32", (long long)classes);
    column.dim[column.rank++] = 1;
    td_tensor numbers = td_iota_at(ids.td, TD_I32, classes, here);
    return td_as(td_equal_at(td_reshape_at(ids, column, here), numbers, here), dtype, here);
}
