/* Slices at an index that is a value of the program, one for each row: what a cache of keys and values is made of.
 *
 *     slice_write  x (B, ...), value, at (B) i32  ->  x with value in place of [at[b], at[b] + n) of a dimension of row b
 *     slice_read   x (B, ...), at (B) i32         ->  those n of each row
 *
 * Any dtype: bytes are copied. The part of a slice that lies outside of x is not written, and reads as 0: an index below 0
 * does not count from the end. Each is the other's gradient. A write whose x nobody reads afterwards costs the slice alone.
 */
#include "core/ops/slice_at.h"

typedef struct op_slice_write_attr {
    int64_t axis;
} op_slice_write_attr;

typedef struct op_slice_read_attr {
    int64_t axis, count;
} op_slice_read_attr;

enum { TASK_BYTES = 128 << 10 };

/* ---- What both share -------------------------------------------------------------------------------------- */

static bool index_fits(const td_call *call, const td_value *at)
{
    int64_t rows = call->in[0]->shape.dim[0];
    char text[TD_SHAPE_TEXT];
    if (at->dtype == TD_I32 && td_shape_equal(at->shape, TD_SHAPE(rows)))
        return true;
    return td_call_fail(call, "the index must be (%lld) i32, one for each row of x, got %s %s", (long long)rows,
                        td_shape_text(at->shape, text), td_dtype_name((td_dtype)at->dtype));
}

/* Rows and every dimension but `axis` may be sharded; `at` is input `index`. */
static void slice_at_place(const td_program *p, const td_node *n, int64_t axis, int index, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    for (int i = 0; i < p->values[n->output].shape.rank; i++) {
        rule->out[0][i] = (int8_t)(i == axis ? 0 : i + 1);
        for (int j = 0; j < index; j++)
            rule->in[j][i] = rule->out[0][i];
    }
    for (int j = index; j < TD_RULE_INPUTS; j++)
        rule->in[j][0] = 1;
}

static td_slices slices_of(td_shape whole, int64_t axis, int64_t count, td_dtype dtype)
{
    return (td_slices){ .rows = td_shape_product(whole, 0, (int)axis), .middle = td_shape_product(whole, 1, (int)axis),
                     .size = whole.dim[axis], .count = count,
                     .bytes = td_shape_product(whole, (int)axis + 1, (int)whole.rank) * td_dtype_size(dtype) };
}

/* The part of a slice that lies in x: [begin, begin + count) there, from index `skipped` of the slice on. */
typedef struct part {
    int64_t begin, count, skipped;
} part;

static int64_t clipped(int64_t x, int64_t high)
{
    return x < 0 ? 0 : x > high ? high : x;
}

static part part_of(const td_slices *s, int64_t row)
{
    int64_t at = s->at[row / s->middle], begin = clipped(at, s->size);
    part p = { .begin = begin, .count = clipped(at + s->count, s->size) - begin };
    p.skipped = p.count ? begin - at : 0;
    return p;
}

static int64_t grain_of(int64_t row_bytes)
{
    return TASK_BYTES / (row_bytes > 0 ? row_bytes : 1) + 1;
}

static td_tensor refuse_axis(td_tensor x, const char *name, int axis, td_here here)
{
    char text[TD_SHAPE_TEXT];
    return td_refuse(x.td, name, here, "dimension %d of shape %s cannot be sliced: it must be one after the first, which counts rows",
                     axis, td_shape_text(td_shape_at(x), text));
}

/* ---- slice_write ------------------------------------------------------------------------------------------ */

static bool write_shape(td_call *call)
{
    const op_slice_write_attr *attr = call->attr;
    td_shape x = call->in[0]->shape, value = call->in[1]->shape;
    td_dtype dtype = (td_dtype)call->in[0]->dtype;
    bool fits = x.rank == value.rank;
    for (int i = 0; fits && i < x.rank; i++)
        fits = i == attr->axis ? value.dim[i] <= x.dim[i] : value.dim[i] == x.dim[i];
    char text[2][TD_SHAPE_TEXT];
    if (!fits)
        return td_call_fail(call, "value %s is no slice of x %s along dimension %lld", td_shape_text(value, text[0]),
                            td_shape_text(x, text[1]), (long long)attr->axis);
    if (call->in[1]->dtype != dtype)
        return td_call_fail(call, "x is %s and the value %s; cast the value", td_dtype_name(dtype),
                            td_dtype_name((td_dtype)call->in[1]->dtype));
    return index_fits(call, call->in[2]) && td_call_like(call, 0);
}

static td_tensor record_write(td_tensor x, int64_t axis, td_tensor at, td_tensor value, td_here here)
{
    op_slice_write_attr attr = { .axis = axis };
    return td_record(&td_op_slice_write, here, 3, (td_tensor[]){ x, value, at }, &attr);
}

static td_tensor record_read(td_tensor x, int64_t axis, td_tensor at, int64_t count, td_here here)
{
    op_slice_read_attr attr = { .axis = axis, .count = count };
    return td_record(&td_op_slice_read, here, 2, (td_tensor[]){ x, at }, &attr);
}

static void write_gradient(const td_gradient_call *g)
{
    const op_slice_write_attr *attr = g->attr;
    td_shape value = td_shape_at(g->in[1]);
    if (g->wanted[0]) {
        td_tensor zeros = td_fill_at(g->td, td_dtype_at(g->dout[0]), value, 0, g->here);
        td_gradient_set(g, 0, record_write(g->dout[0], attr->axis, g->in[2], zeros, g->here));
    }
    if (g->wanted[1])
        td_gradient_set(g, 1, record_read(g->dout[0], attr->axis, g->in[2], value.dim[attr->axis], g->here));
}

static void write_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    const op_slice_write_attr *attr = td_node_attr(p, n);
    slice_at_place(p, n, attr->axis, 2, rule);
}

static td_cost write_cost(const td_kernel *k)
{
    const td_arg *moved = k->in_place ? &k->in[1] : &k->out[0];
    return (td_cost){ .bytes = 2 * td_arg_bytes(moved) + td_arg_bytes(&k->in[2]) };
}

/* The value may lie in x itself, so it is moved; that takes place within one row. */
static void write_rows(void *user, int64_t begin, int64_t end)
{
    const td_slices *s = user;
    for (int64_t row = begin; row < end; row++) {
        part p = part_of(s, row);
        const char *x = s->x + row * s->size * s->bytes;
        char *y = s->y + row * s->size * s->bytes;
        int64_t before = p.begin * s->bytes, after = before + p.count * s->bytes;
        if (s->x != s->y) {
            memcpy(y, x, (size_t)before);
            memcpy(y + after, x + after, (size_t)(s->size * s->bytes - after));
        }
        if (p.count)
            memmove(y + before, s->value + (row * s->count + p.skipped) * s->bytes, (size_t)(after - before));
    }
}

static td_slices written_slices(const td_kernel *k)
{
    const op_slice_write_attr *attr = k->attr;
    td_slices s = slices_of(k->out[0].shape, attr->axis, k->in[1].shape.dim[attr->axis], k->out[0].dtype);
    s.x = k->in[0].data;
    s.value = k->in[1].data;
    s.at = k->in[2].data;
    s.y = k->out[0].data;
    return s;
}

static void write_cpu(const td_kernel *k)
{
    td_slices s = written_slices(k);
    if (!td_arg_elements(&k->out[0]))
        return;
    td_parallel_for(k->run, s.rows, grain_of((s.x == s.y ? s.count : s.size) * s.bytes), write_rows, &s);
}

#ifdef TANDEM_CUDA
/* In place, room for a value that lies in x itself. */
static bool write_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)td;
    out->workspace_bytes = k->in_place ? td_arg_bytes(&k->in[1]) : 0;
    return true;
}

static void write_cuda(const td_kernel *k)
{
    if (td_arg_elements(&k->out[0]))
        td_slice_write_on_gpu(k, written_slices(k), k->workspace);
}
#endif

static void write_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const op_slice_write_attr *attr = td_node_attr(p, n);
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "%lld", (long long)attr->axis);
}

#define WRITE(axis_) &(const op_slice_write_attr){ .axis = (axis_) }

static const td_case write_cases[] = {
    { .in = { TD_RANDN(4, 6, 3), TD_RANDN(4, 2, 3), TD_LABELS(5, 4) }, .attr = WRITE(1) },
    { .in = { TD_RANDN(4, 2, 5, 3), TD_RANDN(4, 2, 3, 3), TD_LABELS(8, 4) }, .attr = WRITE(2), .note = "past the end" },
    { .in = { TD_RANDN(2, 5), TD_RANDN(2, 5), TD_LABELS(4, 2) }, .attr = WRITE(1), .note = "as long as x" },
    { .in = { TD_RANDN(2, 5), TD_RANDN(2, 0), TD_LABELS(4, 2) }, .attr = WRITE(1), .note = "nothing" },
    TD_CASES_END
};

const td_op td_op_slice_write = {
    .name       = "slice_write",
    .inputs     = 3,
    .flags      = TD_OP_INPLACE,
    .attr_bytes = sizeof(op_slice_write_attr),
    .shape      = write_shape,
    .gradient   = write_gradient,
    .place      = write_place,
    .precision  = TD_ANY_DTYPE,
    .cost       = write_cost,
    .cpu        = write_cpu,
    .cuda       = TD_CUDA(write_cuda, write_cuda_prepare),
    .print      = write_print,
    .inplace    = { 0 },
    .cases      = write_cases,
};

td_tensor td_slice_write_at(td_tensor x, int axis, td_tensor at, td_tensor value, td_here here)
{
    if (td_failed(x))
        return x;
    int dim = td_axis_of(td_shape_at(x), axis);
    return dim < 1 ? refuse_axis(x, "slice_write", axis, here) : record_write(x, dim, at, value, here);
}

/* ---- slice_read ------------------------------------------------------------------------------------------- */

static bool read_shape(td_call *call)
{
    const op_slice_read_attr *attr = call->attr;
    td_shape x = call->in[0]->shape;
    char text[TD_SHAPE_TEXT];
    if (attr->count < 0 || attr->count > x.dim[attr->axis])
        return td_call_fail(call, "%lld of dimension %lld of shape %s cannot be read: from 0 to %lld can",
                            (long long)attr->count, (long long)attr->axis, td_shape_text(x, text),
                            (long long)x.dim[attr->axis]);
    if (!index_fits(call, call->in[1]))
        return false;
    td_call_like(call, 0);
    call->out[0].shape.dim[attr->axis] = attr->count;
    return true;
}

static void read_gradient(const td_gradient_call *g)
{
    const op_slice_read_attr *attr = g->attr;
    if (!g->wanted[0])
        return;
    td_tensor zeros = td_fill_at(g->td, td_dtype_at(g->dout[0]), td_shape_at(g->in[0]), 0, g->here);
    td_gradient_set(g, 0, record_write(zeros, attr->axis, g->in[1], g->dout[0], g->here));
}

static void read_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    const op_slice_read_attr *attr = td_node_attr(p, n);
    slice_at_place(p, n, attr->axis, 1, rule);
    rule->partial = TD_PARTIAL_EACH; /* linear in x; an index is never a sum */
}

static td_cost read_cost(const td_kernel *k)
{
    return (td_cost){ .bytes = 2 * td_arg_bytes(&k->out[0]) + td_arg_bytes(&k->in[1]) };
}

static void read_rows(void *user, int64_t begin, int64_t end)
{
    const td_slices *s = user;
    for (int64_t row = begin; row < end; row++) {
        part p = part_of(s, row);
        char *y = s->y + row * s->count * s->bytes;
        int64_t before = p.skipped * s->bytes, after = before + p.count * s->bytes;
        memset(y, 0, (size_t)before);
        memcpy(y + before, s->x + (row * s->size + p.begin) * s->bytes, (size_t)(after - before));
        memset(y + after, 0, (size_t)(s->count * s->bytes - after));
    }
}

static td_slices read_slices(const td_kernel *k)
{
    const op_slice_read_attr *attr = k->attr;
    td_slices s = slices_of(k->in[0].shape, attr->axis, attr->count, k->in[0].dtype);
    s.x = k->in[0].data;
    s.at = k->in[1].data;
    s.y = k->out[0].data;
    return s;
}

static void read_cpu(const td_kernel *k)
{
    td_slices s = read_slices(k);
    if (!td_arg_elements(&k->out[0]))
        return;
    td_parallel_for(k->run, s.rows, grain_of(s.count * s.bytes), read_rows, &s);
}

#ifdef TANDEM_CUDA
static void read_cuda(const td_kernel *k)
{
    if (td_arg_elements(&k->out[0]))
        td_slice_read_on_gpu(k, read_slices(k));
}
#endif

static void read_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const op_slice_read_attr *attr = td_node_attr(p, n);
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "%lld, %lld", (long long)attr->axis, (long long)attr->count);
}

#define READ(axis_, count_) &(const op_slice_read_attr){ .axis = (axis_), .count = (count_) }

static const td_case read_cases[] = {
    { .in = { TD_RANDN(4, 6, 3), TD_LABELS(5, 4) }, .attr = READ(1, 2) },
    { .in = { TD_RANDN(4, 2, 5, 3), TD_LABELS(8, 4) }, .attr = READ(2, 3), .note = "past the end" },
    { .in = { TD_RANDN(2, 5), TD_LABELS(4, 2) }, .attr = READ(1, 5), .note = "as long as x" },
    { .in = { TD_RANDN(2, 5), TD_LABELS(4, 2) }, .attr = READ(1, 0), .note = "nothing" },
    TD_CASES_END
};

const td_op td_op_slice_read = {
    .name       = "slice_read",
    .inputs     = 2,
    .attr_bytes = sizeof(op_slice_read_attr),
    .shape      = read_shape,
    .gradient   = read_gradient,
    .place      = read_place,
    .precision  = TD_ANY_DTYPE,
    .cost       = read_cost,
    .cpu        = read_cpu,
    .cuda       = TD_CUDA(read_cuda),
    .print      = read_print,
    .cases      = read_cases,
};

td_tensor td_slice_read_at(td_tensor x, int axis, td_tensor at, int64_t count, td_here here)
{
    if (td_failed(x))
        return x;
    int dim = td_axis_of(td_shape_at(x), axis);
    return dim < 1 ? refuse_axis(x, "slice_read", axis, here) : record_read(x, dim, at, count, here);
}
