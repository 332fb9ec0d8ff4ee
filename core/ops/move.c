/* Operations that move elements and compute nothing.
 *
 *     transpose  two dimensions swapped
 *     slice      [begin, end) of one dimension
 *     concat     inputs one after the other along one dimension
 *
 * Kernels work on any dtype: they copy bytes. Sizes in attributes are global ones, kernels take theirs from operands.
 */
#include "core/ops/op.h"

enum { TASK_BYTES = 128 << 10 };

TD_CUDA_KERNEL(td_transpose_cuda);
TD_CUDA_KERNEL(td_slice_cuda);
TD_CUDA_KERNEL(td_concat_cuda);

static int64_t grain_of(int64_t bytes)
{
    return TASK_BYTES / (bytes > 0 ? bytes : 1) + 1;
}

/* ---- transpose ------------------------------------------------------------------------------------------ */

static bool transpose_shape(td_call *call)
{
    const td_transpose_attr *attr = call->attr;
    td_call_like(call, 0);
    call->out[0].shape.dim[attr->a] = call->in[0]->shape.dim[attr->b];
    call->out[0].shape.dim[attr->b] = call->in[0]->shape.dim[attr->a];
    return true;
}

static void transpose_gradient(const td_gradient_call *g)
{
    const td_transpose_attr *attr = g->attr;
    td_gradient_set(g, 0, td_transpose_at(g->dout[0], attr->a, attr->b, g->here));
}

static void transpose_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    const td_transpose_attr *attr = td_node_attr(p, n);
    memset(rule, 0, sizeof *rule);
    rule->partial = TD_PARTIAL_JOINT;
    for (int i = 0; i < p->values[n->output].shape.rank; i++)
        rule->in[0][i] = rule->out[0][i] = (int8_t)(i + 1);
    rule->out[0][attr->a] = (int8_t)(attr->b + 1);
    rule->out[0][attr->b] = (int8_t)(attr->a + 1);
}

/* x (outer, rows, middle, columns, inner) -> y (outer, columns, middle, rows, inner) */
typedef struct transposition {
    const char *x;
    char *y;
    int64_t outer, rows, middle, columns, inner, bytes; /* bytes of one (inner) run */
} transposition;

enum { SQUARE = 32 }; /* rows and columns swapped at a time, so that both sides stay in cache */

#define SWAP_SQUARE(T)                                                                   \
    for (int64_t i = row; i < end_row; i++)                                              \
        for (int64_t j = column; j < end_column; j++)                                    \
            ((T *)y)[j * t->middle * t->rows + i] = ((const T *)x)[i * t->middle * t->columns + j]

static void swap_square(const transposition *t, const char *x, char *y, int64_t row, int64_t column)
{
    int64_t end_row = td_smaller(row + SQUARE, t->rows), end_column = td_smaller(column + SQUARE, t->columns);
    switch (t->inner == 1 ? t->bytes : 0) {
    case 8: SWAP_SQUARE(int64_t); break;
    case 4: SWAP_SQUARE(int32_t); break;
    case 2: SWAP_SQUARE(int16_t); break;
    default:
        for (int64_t i = row; i < end_row; i++)
            for (int64_t j = column; j < end_column; j++)
                memcpy(y + (j * t->middle * t->rows + i) * t->bytes, x + (i * t->middle * t->columns + j) * t->bytes,
                       (size_t)t->bytes);
    }
}

/* Tasks are SQUARE rows of one (outer, middle). */
static void transpose_tasks(void *user, int64_t begin, int64_t end)
{
    const transposition *t = user;
    int64_t bands = (t->rows + SQUARE - 1) / SQUARE;
    for (int64_t task = begin; task < end; task++) {
        int64_t band = task % bands, middle = task / bands % t->middle, outer = task / bands / t->middle;
        int64_t plane = outer * t->rows * t->middle * t->columns;
        const char *x = t->x + (plane + middle * t->columns) * t->bytes;
        char *y = t->y + (plane + middle * t->rows) * t->bytes;
        for (int64_t column = 0; column < t->columns; column += SQUARE)
            swap_square(t, x, y, band * SQUARE, column);
    }
}

static void transpose_cpu(const td_kernel *k)
{
    const td_transpose_attr *attr = k->attr;
    td_shape in = k->in[0].shape;
    int a = attr->a < attr->b ? attr->a : attr->b, b = attr->a < attr->b ? attr->b : attr->a;
    transposition t = { .x = k->in[0].data, .y = k->out[0].data, .outer = td_shape_product(in, 0, a), .rows = in.dim[a],
                        .middle = td_shape_product(in, a + 1, b), .columns = in.dim[b],
                        .inner = td_shape_product(in, b + 1, (int)in.rank) };
    t.bytes = t.inner * td_dtype_size(k->in[0].dtype);
    int64_t bands = (t.rows + SQUARE - 1) / SQUARE;
    td_parallel_for(k->run, t.outer * t.middle * bands, grain_of(SQUARE * t.columns * t.bytes), transpose_tasks, &t);
}

static void transpose_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_transpose_attr *attr = td_node_attr(p, n);
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "%d %d", attr->a, attr->b);
}

#define SWAP(a_, b_) &(const td_transpose_attr){ .a = (a_), .b = (b_) }

static const td_case transpose_cases[] = {
    { .in = { TD_RANDN(3, 5) }, .attr = SWAP(0, 1) },
    { .in = { TD_RANDN(2, 3, 4, 5) }, .attr = SWAP(1, 2), .note = "heads" },
    { .in = { TD_RANDN(2, 40, 3, 33) }, .attr = SWAP(1, 3), .note = "no multiple of the square" },
    TD_CASES_END
};

const td_op td_op_transpose = {
    .name       = "transpose",
    .inputs     = 1,
    .attr_bytes = sizeof(td_transpose_attr),
    .shape      = transpose_shape,
    .gradient   = transpose_gradient,
    .place      = transpose_place,
    .precision  = TD_ANY_DTYPE,
    .cpu        = transpose_cpu,
    .cuda       = TD_CUDA(td_transpose_cuda),
    .print      = transpose_print,
    .cases      = transpose_cases,
};

td_tensor td_transpose_at(td_tensor x, int a, int b, td_here here)
{
    if (td_failed(x))
        return x;
    td_shape shape = td_shape_at(x);
    td_transpose_attr attr = { .a = td_axis_of(shape, a), .b = td_axis_of(shape, b) };
    char text[TD_SHAPE_TEXT];
    if (attr.a < 0 || attr.b < 0)
        return td_refuse(x.td, "transpose", here, "there is no dimension %d in shape %s", attr.a < 0 ? a : b,
                         td_shape_text(shape, text));
    return attr.a == attr.b ? x : td_record(&td_op_transpose, here, 1, &x, &attr);
}

/* ---- slice ---------------------------------------------------------------------------------------------- */

/* Every dimension but `axis` may be sharded. */
static void axis_place(const td_program *p, const td_node *n, int64_t axis, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    rule->partial = TD_PARTIAL_JOINT;
    for (int i = 0; i < p->values[n->output].shape.rank; i++) {
        rule->out[0][i] = (int8_t)(i == axis ? 0 : i + 1);
        for (int j = 0; j < TD_RULE_INPUTS; j++)
            rule->in[j][i] = rule->out[0][i];
    }
}

static bool slice_shape(td_call *call)
{
    const td_slice_attr *attr = call->attr;
    td_shape shape = call->in[0]->shape;
    char text[TD_SHAPE_TEXT];
    if (attr->begin < 0 || attr->end < attr->begin || attr->end > shape.dim[attr->axis])
        return td_call_fail(call, "[%lld, %lld) is not within dimension %lld of shape %s", (long long)attr->begin,
                            (long long)attr->end, (long long)attr->axis, td_shape_text(shape, text));
    td_call_like(call, 0);
    call->out[0].shape.dim[attr->axis] = attr->end - attr->begin;
    return true;
}

static td_tensor zeros(td_tensor like, td_shape shape, int64_t axis, int64_t size, td_here here)
{
    shape.dim[axis] = size;
    return td_fill_at(like.td, td_dtype_at(like), shape, 0, here);
}

static void slice_gradient(const td_gradient_call *g)
{
    const td_slice_attr *attr = g->attr;
    td_shape shape = td_shape_at(g->in[0]);
    int64_t size = shape.dim[attr->axis];
    td_tensor parts[3];
    int count = 0;
    if (attr->begin > 0)
        parts[count++] = zeros(g->dout[0], shape, attr->axis, attr->begin, g->here);
    parts[count++] = g->dout[0];
    if (attr->end < size)
        parts[count++] = zeros(g->dout[0], shape, attr->axis, size - attr->end, g->here);
    td_gradient_set(g, 0, td_concat_at(parts, count, (int)attr->axis, g->here));
}

static void slice_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    const td_slice_attr *attr = td_node_attr(p, n);
    axis_place(p, n, attr->axis, rule);
}

/* Rows of `bytes` at distances of from_step and to_step bytes. */
typedef struct row_copies {
    const char *from;
    char *to;
    int64_t from_step, to_step, bytes;
} row_copies;

static void copy_rows(void *user, int64_t begin, int64_t end)
{
    const row_copies *r = user;
    for (int64_t i = begin; i < end; i++)
        memcpy(r->to + i * r->to_step, r->from + i * r->from_step, (size_t)r->bytes);
}

static void slice_cpu(const td_kernel *k)
{
    const td_slice_attr *attr = k->attr;
    td_shape in = k->in[0].shape;
    int axis = (int)attr->axis;
    int64_t step = td_shape_product(in, axis + 1, (int)in.rank) * td_dtype_size(k->in[0].dtype);
    row_copies r = { .from = (const char *)k->in[0].data + attr->begin * step,
                     .to = k->out[0].data,
                     .from_step = in.dim[axis] * step,
                     .to_step = (attr->end - attr->begin) * step,
                     .bytes = (attr->end - attr->begin) * step };
    td_parallel_for(k->run, td_shape_product(in, 0, axis), grain_of(r.bytes), copy_rows, &r);
}

static void slice_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_slice_attr *attr = td_node_attr(p, n);
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "%lld [%lld, %lld)", (long long)attr->axis, (long long)attr->begin, (long long)attr->end);
}

#define SLICE(axis_, begin_, end_) &(const td_slice_attr){ .axis = (axis_), .begin = (begin_), .end = (end_) }

static const td_case slice_cases[] = {
    { .in = { TD_RANDN(5, 3) }, .attr = SLICE(0, 1, 4) },
    { .in = { TD_RANDN(2, 5, 3) }, .attr = SLICE(1, 0, 2) },
    { .in = { TD_RANDN(2, 5) }, .attr = SLICE(1, 3, 5) },
    TD_CASES_END
};

const td_op td_op_slice = {
    .name       = "slice",
    .inputs     = 1,
    .attr_bytes = sizeof(td_slice_attr),
    .shape      = slice_shape,
    .gradient   = slice_gradient,
    .place      = slice_place,
    .precision  = TD_ANY_DTYPE,
    .cpu        = slice_cpu,
    .cuda       = TD_CUDA(td_slice_cuda),
    .print      = slice_print,
    .cases      = slice_cases,
};

td_tensor td_slice_at(td_tensor x, int axis, int64_t begin, int64_t end, td_here here)
{
    if (td_failed(x))
        return x;
    td_shape shape = td_shape_at(x);
    td_slice_attr attr = { .axis = td_axis_of(shape, axis), .begin = begin, .end = end };
    char text[TD_SHAPE_TEXT];
    if (attr.axis < 0)
        return td_refuse(x.td, "slice", here, "there is no dimension %d in shape %s", axis, td_shape_text(shape, text));
    return begin == 0 && end == shape.dim[attr.axis] ? x : td_record(&td_op_slice, here, 1, &x, &attr);
}

/* ---- concat --------------------------------------------------------------------------------------------- */

static bool concat_shape(td_call *call)
{
    const td_concat_attr *attr = call->attr;
    if (!td_call_same_dtype(call))
        return false;
    td_call_like(call, 0);
    td_shape *out = &call->out[0].shape;
    for (int i = 1; i < call->inputs; i++) {
        td_shape in = call->in[i]->shape;
        bool fits = in.rank == out->rank;
        for (int d = 0; fits && d < out->rank; d++)
            fits = d == attr->axis || in.dim[d] == out->dim[d];
        if (!fits) {
            char text[2][TD_SHAPE_TEXT];
            return td_call_fail(call, "shapes %s and %s differ beside dimension %lld",
                                td_shape_text(call->in[0]->shape, text[0]), td_shape_text(in, text[1]),
                                (long long)attr->axis);
        }
        if (__builtin_add_overflow(out->dim[attr->axis], in.dim[attr->axis], &out->dim[attr->axis]))
            return td_call_fail(call, "dimension %lld of the result does not fit 63 bits", (long long)attr->axis);
    }
    return true;
}

static void concat_gradient(const td_gradient_call *g)
{
    const td_concat_attr *attr = g->attr;
    int64_t begin = 0;
    for (int i = 0; i < g->inputs; i++) {
        int64_t end = begin + td_shape_at(g->in[i]).dim[attr->axis];
        if (g->wanted[i])
            td_gradient_set(g, i, td_slice_at(g->dout[0], (int)attr->axis, begin, end, g->here));
        begin = end;
    }
}

static void concat_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    const td_concat_attr *attr = td_node_attr(p, n);
    axis_place(p, n, attr->axis, rule);
}

static void concat_cpu(const td_kernel *k)
{
    const td_concat_attr *attr = k->attr;
    int axis = (int)attr->axis;
    td_shape out = k->out[0].shape;
    int64_t step = td_shape_product(out, axis + 1, (int)out.rank) * td_dtype_size(k->out[0].dtype);
    int64_t begin = 0;
    for (int i = 0; i < k->inputs; i++) {
        int64_t bytes = k->in[i].shape.dim[axis] * step;
        row_copies r = { .from = k->in[i].data, .to = (char *)k->out[0].data + begin, .from_step = bytes,
                         .to_step = out.dim[axis] * step, .bytes = bytes };
        td_parallel_for(k->run, td_shape_product(out, 0, axis), grain_of(bytes), copy_rows, &r);
        begin += bytes;
    }
}

static void concat_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_concat_attr *attr = td_node_attr(p, n);
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "%lld", (long long)attr->axis);
}

static const td_case concat_cases[] = {
    { .in = { TD_RANDN(2, 3), TD_RANDN(4, 3) }, .attr = &(const td_concat_attr){ .axis = 0 } },
    { .in = { TD_RANDN(2, 3), TD_RANDN(2, 1), TD_RANDN(2, 4) }, .attr = &(const td_concat_attr){ .axis = 1 } },
    TD_CASES_END
};

const td_op td_op_concat = {
    .name       = "concat",
    .inputs     = -1,
    .attr_bytes = sizeof(td_concat_attr),
    .shape      = concat_shape,
    .gradient   = concat_gradient,
    .place      = concat_place,
    .precision  = TD_ANY_DTYPE,
    .cpu        = concat_cpu,
    .cuda       = TD_CUDA(td_concat_cuda),
    .print      = concat_print,
    .cases      = concat_cases,
};

td_tensor td_concat_at(const td_tensor *parts, int count, int axis, td_here here)
{
    if (count < 1)
        return td_no_tensor(NULL);
    for (int i = 0; i < count; i++)
        if (td_failed(parts[i]))
            return parts[i];
    td_shape shape = td_shape_at(parts[0]);
    td_concat_attr attr = { .axis = td_axis_of(shape, axis) };
    char text[TD_SHAPE_TEXT];
    if (attr.axis < 0)
        return td_refuse(parts[0].td, "concat", here, "there is no dimension %d in shape %s", axis,
                         td_shape_text(shape, text));
    return count == 1 ? parts[0] : td_record(&td_op_concat, here, count, parts, &attr);
}
