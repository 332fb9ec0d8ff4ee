/* Reductions: sum, max, argmax, and what is made of them: mean, sum_to.
 *
 *     sum     x -> x without (or with size 1 in) a run of adjacent dimensions; f32 for 16-bit floats, else x's dtype
 *     max     the same, in x's dtype; a NaN is the largest
 *     argmax  x (..., D) -> (...) i32
 *
 * Sums are taken in blocks whose bounds depend on the shape alone, so the result does not depend on the number of
 * threads: f32 within a block of at most 512 terms, f64 across blocks; f64 throughout for f64.
 */
#include "core/ops/reduce.h"

#include "core/ops/convert.h"
#include "core/ops/simd.h"

#include <math.h>

TD_CUDA_KERNEL(td_sum_cuda);
TD_CUDA_PREPARE(td_sum_cuda_prepare);
TD_CUDA_KERNEL(td_max_cuda);
TD_CUDA_PREPARE(td_max_cuda_prepare);
TD_CUDA_KERNEL(td_argmax_cuda);

enum {
    BLOCK = TD_REDUCED_BLOCK,
    COLUMNS = 256,        /* columns of a block when the rows are summed */
    ROWS = 32,            /* rows summed in f32 then */
    CHUNK = 64 << 10,     /* elements one task sums, at least */
    CHUNKS = 64,          /* of one sum, at most: each keeps its partial sums in the workspace */
};

/* ---- Shapes --------------------------------------------------------------------------------------------- */

static bool reduce_shape(td_call *call)
{
    const td_reduce_attr *attr = call->attr;
    td_shape in = call->in[0]->shape, out = { 0 };
    uint32_t lowest = attr->axes & -attr->axes;
    if ((attr->axes & (attr->axes + lowest)) != 0)
        return td_call_fail(call, "reduced dimensions must be adjacent");
    for (int i = 0; i < in.rank; i++) {
        bool reduced = attr->axes >> i & 1;
        if (!reduced || attr->keep == TD_KEEP)
            out.dim[out.rank++] = reduced ? 1 : in.dim[i];
    }
    call->out[0].shape = out;
    call->out[0].dtype = call->in[0]->dtype;
    return true;
}

static bool sum_shape(td_call *call)
{
    if (!reduce_shape(call))
        return false;
    call->out[0].dtype = (uint8_t)td_wide_dtype((td_dtype)call->in[0]->dtype);
    return true;
}

static bool max_shape(td_call *call)
{
    const td_reduce_attr *attr = call->attr;
    td_shape in = call->in[0]->shape;
    for (int i = 0; i < in.rank; i++) {
        char text[TD_SHAPE_TEXT];
        if ((attr->axes >> i & 1) && in.dim[i] == 0)
            return td_call_fail(call, "dimension %d of shape %s is empty", i, td_shape_text(in, text));
    }
    return reduce_shape(call);
}

/* Dimensions that stay have label i + 1; reduced ones too where they may be contracted, else they are blocked. */
static void reduce_labels(const td_program *p, const td_node *n, td_place_rule *rule, bool contracted)
{
    const td_reduce_attr *attr = td_node_attr(p, n);
    td_shape in = td_value_at(p, *td_node_inputs(p, n))->shape;
    memset(rule, 0, sizeof *rule);
    int at = 0;
    for (int i = 0; i < in.rank; i++) {
        bool reduced = attr->axes >> i & 1;
        rule->in[0][i] = (int8_t)(reduced && !contracted ? 0 : i + 1);
        if (!reduced)
            rule->out[0][at++] = (int8_t)(i + 1);
        else if (attr->keep == TD_KEEP)
            at++;
    }
}

static void sum_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    reduce_labels(p, n, rule, true);
    rule->partial = TD_PARTIAL_JOINT;
}

static void max_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    reduce_labels(p, n, rule, false);
}

static td_cost reduce_cost(const td_kernel *k)
{
    td_cost cost = td_cost_of(k, 0);
    cost.flops = td_arg_elements(&k->in[0]);
    return cost;
}

static void reduce_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_reduce_attr *attr = td_node_attr(p, n);
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "axes");
    for (int i = 0; i < TD_MAX_DIMS; i++)
        if (attr->axes >> i & 1)
            td_print_add(&line, " %d", i);
    if (attr->keep == TD_KEEP)
        td_print_add(&line, " keep");
}

/* y, which lacks the reduced dimensions of x or has them with size 1, with size 1. */
static td_tensor with_reduced(const td_gradient_call *g, td_tensor y)
{
    const td_reduce_attr *attr = g->attr;
    td_shape shape = td_shape_at(g->in[0]);
    if (attr->keep == TD_KEEP)
        return y;
    for (int i = 0; i < shape.rank; i++)
        if (attr->axes >> i & 1)
            shape.dim[i] = 1;
    return td_reshape_at(y, shape, g->here);
}

/* ---- The operand as (outer, n, inner) ------------------------------------------------------------------- */

typedef struct reduction {
    const td_kernel *k;
    int64_t outer, n, inner; /* n is reduced; `valid` of them exist on this rank */
    int64_t valid;
    int64_t rows, chunks;    /* a chunk is `rows` of the n */
    double *partial;         /* (outer, chunks, inner); NULL with one chunk */
} reduction;

/* n in at most CHUNKS parts of `least` terms or more. */
static int64_t chunk_of(int64_t n, int64_t least)
{
    int64_t part = (n + CHUNKS - 1) / CHUNKS;
    least = td_round_up(least < part ? part : least, ROWS);
    return least < ROWS ? ROWS : least;
}

int64_t td_reduced_chunk(int64_t n)
{
    return chunk_of(n, CHUNK);
}

static reduction reduction_of(const td_kernel *k)
{
    td_reduced of = td_reduced_of(k);
    reduction r = { .k = k, .outer = of.outer, .n = of.n, .inner = of.inner, .valid = of.valid };
    r.rows = chunk_of(r.n, CHUNK / (r.inner > 0 ? r.inner : 1));
    r.chunks = r.n > r.rows ? (r.n + r.rows - 1) / r.rows : 1;
    return r;
}

/* ---- sum ------------------------------------------------------------------------------------------------ */

double td_block_sum_f32(const float *x, int64_t count)
{
    float total = 0;
    TD_SIMD_SUM(total)
    for (int64_t i = 0; i < count; i++)
        total += x[i];
    return total;
}

double td_block_sum_f64(const double *x, int64_t count)
{
    double total = 0;
    TD_SIMD_SUM(total)
    for (int64_t i = 0; i < count; i++)
        total += x[i];
    return total;
}

/* Whether f32 has every value: integers and f64 take f64. */
static bool is_narrow_float(td_dtype dtype)
{
    return dtype == TD_F32 || dtype == TD_BF16 || dtype == TD_F16;
}

/* Elements [at, at + count) of x, adjacent in memory. */
static double sum_run(const td_arg *x, int64_t at, int64_t count)
{
    double total = 0;
    for (int64_t done = 0; done < count; done += BLOCK) {
        int64_t n = td_smaller(BLOCK, count - done);
        const void *from = td_arg_at(x, at + done);
        if (x->dtype == TD_F64) {
            total += td_block_sum_f64(from, n);
        } else if (is_narrow_float(x->dtype)) {
            float tile[BLOCK];
            total += td_block_sum_f32(td_view_f32(x->dtype, from, n, tile), n);
        } else {
            double tile[BLOCK];
            td_load_f64(tile, x->dtype, from, n);
            total += td_block_sum_f64(tile, n);
        }
    }
    return total;
}

/* total[c] = the sum over rows of columns [at + c], rows being `stride` elements apart; count <= COLUMNS. */
static void sum_columns(const td_arg *x, int64_t at, int64_t rows, int64_t stride, int64_t count, double total[COLUMNS])
{
    memset(total, 0, (size_t)count * sizeof *total);
    bool narrow = is_narrow_float(x->dtype);
    for (int64_t begin = 0; begin < rows; begin += ROWS) {
        float part[COLUMNS] = { 0 };
        for (int64_t row = begin; row < begin + ROWS && row < rows; row++) {
            const void *from = td_arg_at(x, at + row * stride);
            if (narrow) {
                float tile[COLUMNS];
                const float *values = td_view_f32(x->dtype, from, count, tile);
                TD_SIMD
                for (int64_t c = 0; c < count; c++)
                    part[c] += values[c];
            } else {
                double tile[COLUMNS];
                td_load_f64(tile, x->dtype, from, count);
                TD_SIMD
                for (int64_t c = 0; c < count; c++)
                    total[c] += tile[c];
            }
        }
        for (int64_t c = 0; narrow && c < count; c++)
            total[c] += part[c];
    }
}

static void sum_store(const reduction *r, int64_t outer, int64_t chunk, int64_t column, int64_t count,
                      const double *total)
{
    if (r->partial)
        memcpy(r->partial + (outer * r->chunks + chunk) * r->inner + column, total, (size_t)count * sizeof *total);
    else
        td_store_f64(td_arg_at(&r->k->out[0], outer * r->inner + column), r->k->out[0].dtype, total, count);
}

/* A task: one chunk of one outer index, COLUMNS of its columns. */
static void sum_tasks(void *user, int64_t begin, int64_t end)
{
    const reduction *r = user;
    int64_t blocks = (r->inner + COLUMNS - 1) / COLUMNS;
    for (int64_t task = begin; task < end; task++) {
        int64_t block = task % blocks, chunk = task / blocks % r->chunks, outer = task / blocks / r->chunks;
        int64_t column = block * COLUMNS, first = chunk * r->rows;
        int64_t count = td_smaller(COLUMNS, r->inner - column);
        int64_t rows = first < r->valid ? td_smaller(r->rows, r->valid - first) : 0;
        int64_t at = (outer * r->n + first) * r->inner + column;
        double total[COLUMNS];
        if (r->inner == 1)
            total[0] = sum_run(&r->k->in[0], at, rows);
        else
            sum_columns(&r->k->in[0], at, rows, r->inner, count, total);
        sum_store(r, outer, chunk, column, count, total);
    }
}

static void sum_join(void *user, int64_t begin, int64_t end)
{
    const reduction *r = user;
    for (int64_t i = begin; i < end; i++) {
        const double *part = r->partial + i / r->inner * r->chunks * r->inner + i % r->inner;
        double total = 0;
        for (int64_t chunk = 0; chunk < r->chunks; chunk++)
            total += part[chunk * r->inner];
        td_store_f64(td_arg_at(&r->k->out[0], i), r->k->out[0].dtype, &total, 1);
    }
}

static bool sum_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)td;
    reduction r = reduction_of(k);
    if (r.chunks > 1)
        out->workspace_bytes = r.outer * r.chunks * r.inner * (int64_t)sizeof *r.partial;
    return true;
}

static void sum_cpu(const td_kernel *k)
{
    reduction r = reduction_of(k);
    r.partial = r.chunks > 1 ? k->workspace : NULL;
    int64_t tasks = r.outer * r.chunks * ((r.inner + COLUMNS - 1) / COLUMNS);
    int64_t size = td_smaller(r.n, r.rows) * td_smaller(r.inner, COLUMNS);
    td_parallel_for(k->run, tasks, CHUNK / 2 / (size > 0 ? size : 1) + 1, sum_tasks, &r);
    if (r.partial)
        td_parallel_for(k->run, r.outer * r.inner, CHUNK / 2 / r.chunks + 1, sum_join, &r);
}

static void sum_gradient(const td_gradient_call *g)
{
    td_tensor spread = td_broadcast_at(with_reduced(g, g->dout[0]), td_shape_at(g->in[0]), g->here);
    td_gradient_set(g, 0, td_as(spread, td_dtype_at(g->in[0]), g->here));
}

#define REDUCE(axes_, keep_) &(const td_reduce_attr){ .axes = (axes_), .keep = (keep_) }

static const td_case sum_cases[] = {
    { .in = { TD_RANDN(3, 5) }, .attr = REDUCE(1, TD_DROP), .note = "columns" },
    { .in = { TD_RANDN(3, 5) }, .attr = REDUCE(2, TD_KEEP), .note = "rows" },
    { .in = { TD_RANDN(3, 5, 2) }, .attr = REDUCE(2, TD_DROP), .note = "between" },
    { .in = { TD_RANDN(7, 1031) }, .attr = REDUCE(3, TD_DROP), .note = "all" },
    { .in = { TD_RANDN(0, 4) }, .attr = REDUCE(1, TD_DROP), .note = "nothing: zeros" },
    TD_CASES_END
};

const td_op td_op_sum = {
    .name       = "sum",
    .inputs     = 1,
    .attr_bytes = sizeof(td_reduce_attr),
    .shape      = sum_shape,
    .gradient   = sum_gradient,
    .place      = sum_place,
    .precision  = TD_WIDE,
    .cost       = reduce_cost,
    .prepare    = sum_prepare,
    .cpu        = sum_cpu,
    .cuda       = TD_CUDA(td_sum_cuda, td_sum_cuda_prepare),
    .print      = reduce_print,
    .cases      = sum_cases,
};

/* ---- max ------------------------------------------------------------------------------------------------ */

/* Elements LANES apart are compared with one another, then lanes: the processor compares many at once. */
#define BLOCK_MAX(T)                                                                             \
    enum { LANES = 16 };                                                                         \
    T most[LANES];                                                                               \
    double total = -INFINITY;                                                                    \
    int64_t whole = count / LANES * LANES;                                                       \
    for (int lane = 0; lane < LANES; lane++)                                                     \
        most[lane] = -INFINITY;                                                                  \
    for (int64_t i = 0; i < whole; i += LANES) {                                                 \
        TD_SIMD                                                                                  \
        for (int lane = 0; lane < LANES; lane++) {                                               \
            T v = x[i + lane];                                                                   \
            most[lane] = v > most[lane] || v != v ? v : most[lane];                              \
        }                                                                                        \
    }                                                                                            \
    for (int lane = 0; lane < LANES; lane++)                                                     \
        total = td_larger(total, most[lane]);                                                    \
    for (int64_t i = whole; i < count; i++)                                                      \
        total = td_larger(total, x[i]);                                                          \
    return total;

double td_block_max_f32(const float *x, int64_t count)
{
    BLOCK_MAX(float)
}

double td_block_max_f64(const double *x, int64_t count)
{
    BLOCK_MAX(double)
}

static void max_rows(void *user, int64_t begin, int64_t end)
{
    const reduction *r = user;
    const td_arg *x = &r->k->in[0];
    for (int64_t i = begin; i < end; i++) {
        double most = -INFINITY;
        for (int64_t done = 0; done < r->n; done += BLOCK) {
            int64_t count = td_smaller(BLOCK, r->n - done);
            const void *from = td_arg_at(x, i * r->n + done);
            if (is_narrow_float(x->dtype)) {
                float tile[BLOCK];
                most = td_larger(most, td_block_max_f32(td_view_f32(x->dtype, from, count, tile), count));
            } else {
                double tile[BLOCK];
                td_load_f64(tile, x->dtype, from, count);
                most = td_larger(most, td_block_max_f64(tile, count));
            }
        }
        td_store_f64(td_arg_at(&r->k->out[0], i), r->k->out[0].dtype, &most, 1);
    }
}

/* Tasks are blocks of columns of one outer index. */
static void max_columns(void *user, int64_t begin, int64_t end)
{
    const reduction *r = user;
    const td_arg *x = &r->k->in[0];
    int64_t blocks = (r->inner + COLUMNS - 1) / COLUMNS;
    for (int64_t task = begin; task < end; task++) {
        int64_t outer = task / blocks, column = task % blocks * COLUMNS, count = td_smaller(COLUMNS, r->inner - column);
        double most[COLUMNS], tile[COLUMNS];
        for (int64_t row = 0; row < r->n; row++) {
            td_load_f64(row ? tile : most, x->dtype, td_arg_at(x, (outer * r->n + row) * r->inner + column), count);
            for (int64_t c = 0; row && c < count; c++)
                most[c] = td_larger(most[c], tile[c]);
        }
        td_store_f64(td_arg_at(&r->k->out[0], outer * r->inner + column), r->k->out[0].dtype, most, count);
    }
}

static void max_cpu(const td_kernel *k)
{
    reduction r = reduction_of(k);
    int64_t size = r.n > 0 ? r.n : 1;
    if (r.inner == 1)
        td_parallel_for(k->run, r.outer, CHUNK / 4 / size + 1, max_rows, &r);
    else
        td_parallel_for(k->run, r.outer * ((r.inner + COLUMNS - 1) / COLUMNS), CHUNK / 4 / COLUMNS / size + 1,
                        max_columns, &r);
}

/* Every element that is the largest gets an equal share. */
static void max_gradient(const td_gradient_call *g)
{
    const td_reduce_attr *attr = g->attr;
    td_reduce_attr kept = { .axes = attr->axes, .keep = TD_KEEP };
    td_tensor x = g->in[0];
    td_tensor is_max = td_equal_at(x, with_reduced(g, g->out[0]), g->here);
    td_tensor ties = td_as(td_record(&td_op_sum, g->here, 1, &is_max, &kept), td_dtype_at(x), g->here);
    td_gradient_set(g, 0, td_mul_at(is_max, td_div_at(with_reduced(g, g->dout[0]), ties, g->here), g->here));
}

static const td_case max_cases[] = {
    { .in = { TD_RANDN(3, 5) }, .attr = REDUCE(1, TD_DROP) },
    { .in = { TD_RANDN(3, 700) }, .attr = REDUCE(2, TD_KEEP) },
    { .in = { TD_RANDN(2, 3, 4) }, .attr = REDUCE(7, TD_DROP) },
    TD_CASES_END
};

const td_op td_op_max = {
    .name       = "max",
    .inputs     = 1,
    .attr_bytes = sizeof(td_reduce_attr),
    .shape      = max_shape,
    .gradient   = max_gradient,
    .place      = max_place,
    .precision  = TD_ANY_DTYPE,
    .cost       = reduce_cost,
    .cpu        = max_cpu,
    .cuda       = TD_CUDA(td_max_cuda, td_max_cuda_prepare),
    .print      = reduce_print,
    .cases      = max_cases,
};

/* ---- argmax --------------------------------------------------------------------------------------------- */

static bool argmax_shape(td_call *call)
{
    td_shape shape = call->in[0]->shape;
    char text[TD_SHAPE_TEXT];
    if (shape.rank == 0 || shape.dim[shape.rank - 1] == 0)
        return td_call_fail(call, "needs a last dimension that is not empty, got shape %s", td_shape_text(shape, text));
    if (shape.dim[shape.rank - 1] > INT32_MAX)
        return td_call_fail(call, "the last dimension of shape %s has more indices than i32", td_shape_text(shape, text));
    shape.dim[--shape.rank] = 0;
    call->out[0].shape = shape;
    call->out[0].dtype = TD_I32;
    return true;
}

static void argmax_gradient(const td_gradient_call *g)
{
    (void)g; /* an index has none */
}

static void argmax_rows(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const td_arg *x = &k->in[0];
    int64_t n = td_arg_last(x);
    for (int64_t row = begin; row < end; row++) {
        double tile[BLOCK], most = -INFINITY;
        int32_t best = 0;
        for (int64_t done = 0; done < n; done += BLOCK) {
            int64_t count = td_smaller(BLOCK, n - done);
            td_load_f64(tile, x->dtype, td_arg_at(x, row * n + done), count);
            for (int64_t i = 0; i < count; i++) {
                if (tile[i] > most || (tile[i] != tile[i] && most == most)) {
                    most = tile[i];
                    best = (int32_t)(done + i);
                }
            }
        }
        ((int32_t *)k->out[0].data)[row] = best;
    }
}

static void argmax_cpu(const td_kernel *k)
{
    td_parallel_for(k->run, td_arg_elements(&k->out[0]), CHUNK / 4 / td_arg_last(&k->in[0]) + 1, argmax_rows,
                    (void *)k);
}

static const td_case argmax_cases[] = {
    { .in = { TD_RANDN(5, 7) }, .no_gradient_check = true },
    { .in = { TD_RANDN(2, 3, 1030) }, .no_gradient_check = true },
    TD_CASES_END
};

const td_op td_op_argmax = {
    .name      = "argmax",
    .inputs    = 1,
    .shape     = argmax_shape,
    .gradient  = argmax_gradient,
    .place     = td_rule_rows,
    .precision = TD_ANY_DTYPE,
    .cost      = reduce_cost,
    .cpu       = argmax_cpu,
    .cuda      = TD_CUDA(td_argmax_cuda),
    .cases     = argmax_cases,
};

/* ---- Recording ------------------------------------------------------------------------------------------ */

static td_tensor reduce(const td_op *op, td_tensor x, int axis, int keep, td_here here)
{
    if (td_failed(x))
        return x;
    td_shape shape = td_shape_at(x);
    td_reduce_attr attr = { .axes = (1u << shape.rank) - 1, .keep = keep };
    if (axis != TD_ALL) {
        char text[TD_SHAPE_TEXT];
        int at = td_axis_of(shape, axis);
        if (at < 0)
            return td_refuse(x.td, op->name, here, "there is no dimension %d in shape %s", axis,
                             td_shape_text(shape, text));
        attr.axes = 1u << at;
    }
    return td_record(op, here, 1, &x, &attr);
}

td_tensor td_sum_at(td_tensor x, int axis, int keep, td_here here)
{
    return reduce(&td_op_sum, x, axis, keep, here);
}

td_tensor td_max_at(td_tensor x, int axis, int keep, td_here here)
{
    return reduce(&td_op_max, x, axis, keep, here);
}

td_tensor td_argmax_at(td_tensor x, td_here here)
{
    return td_record(&td_op_argmax, here, 1, &x, NULL);
}

/* The count is that of the global shape: a mean over a batch in parts is the batch's. */
td_tensor td_mean_at(td_tensor x, int axis, int keep, td_here here)
{
    td_tensor sum = td_sum_at(x, axis, keep, here);
    if (td_failed(sum))
        return sum;
    if (!td_is_float(td_dtype_at(x)))
        return td_refuse(x.td, "mean", here, "needs a float dtype, got %s", td_dtype_name(td_dtype_at(x)));
    td_shape shape = td_shape_at(x);
    int64_t count = axis == TD_ALL ? td_shape_elements(shape) : shape.dim[td_axis_of(shape, axis)];
    return td_mul_at(sum, td_constant_like(sum, 1 / (double)count, here), here);
}

td_tensor td_sum_to_at(td_tensor x, td_shape shape, td_here here)
{
    if (td_failed(x) || td_shape_equal(td_shape_at(x), shape))
        return x;
    td_shape from = td_shape_at(x);
    int64_t missing = from.rank - shape.rank;
    bool possible = shape.rank >= 0 && missing >= 0;
    uint32_t axes = 0, larger_than_one = 0;
    for (int i = 0; possible && i < from.rank; i++) {
        int64_t size = i < missing ? 1 : shape.dim[i - missing];
        possible = size == 1 || size == from.dim[i];
        axes |= size == 1 ? 1u << i : 0;
        larger_than_one |= from.dim[i] != 1 ? 1u << i : 0;
    }
    if (!possible) {
        char text[2][TD_SHAPE_TEXT];
        return td_refuse(x.td, "sum_to", here, "shape %s cannot be summed to %s", td_shape_text(from, text[0]),
                         td_shape_text(shape, text[1]));
    }
    for (int i = 0; i < from.rank; i++) { /* each run of adjacent dimensions by one sum */
        uint32_t run = 0;
        for (; i < from.rank && (axes >> i & 1); i++)
            run |= 1u << i;
        if (run & larger_than_one)
            x = td_record(&td_op_sum, here, 1, &x, &(td_reduce_attr){ .axes = run, .keep = TD_KEEP });
    }
    return td_failed(x) || td_shape_equal(td_shape_at(x), shape) ? x : td_reshape_at(x, shape, here);
}
