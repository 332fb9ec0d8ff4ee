/* Norms over the last dimension.
 *
 *     layer_norm     x (..., D) float, weight (D)[, bias (D)]  ->  (x - mean) / sqrt(variance + eps) weight + bias
 *     rms_norm       x (..., D) float, weight (D)              ->  x / sqrt(mean x^2 + eps) weight
 *     norm_gradient  x, weight, dy (..., D)[, r (..., D)]      ->  dx[ + r] (..., D) like x, dweight (D)[, dbias (D)][, dx narrow]
 *
 * Sums, weights and results are f32, or f64 for f64. r and what is narrow (norm.h) go with f32: fuse makes such nodes. A sum dx + r is
 * rounded where the gradient and an addition would. Nothing is kept for the backward but x: the moments of its rows are
 * taken again. dweight and dbias are summed in chunks of rows that depend on the shape alone, so they are the same
 * whatever the number of threads.
 */
#include "core/ops/norm.h"

#include "core/cpu.h"
#include "core/ops/convert.h"
#include "core/ops/derive.h"
#include "core/ops/shard.h"

TD_CUDA_KERNEL(td_norm_cuda);
TD_CUDA_KERNEL(td_norm_gradient_cuda);
TD_CUDA_PREPARE(td_norm_gradient_cuda_prepare);

enum { TASK_ELEMENTS = 8 << 10, CHUNK_ROWS = 32, CHUNKS = 64 };

#define T float
#define NAME(x) x##_f32
#include "core/ops/norm_rows.h"
#undef T
#undef NAME
#define T double
#define NAME(x) x##_f64
#include "core/ops/norm_rows.h"
#undef T
#undef NAME

static const td_norm_kernels plain = { forward_f32, backward_f32 };

static const td_norm_kernels *kernels_f32(void) { return td_cpu_has_avx512() ? &td_norm_avx512 : &plain; }

/* ---- Shapes and rules ------------------------------------------------------------------------------------- */

static bool norm_fits(const td_call *call, int weights)
{
    td_shape x = call->in[0]->shape;
    td_dtype dtype = (td_dtype)call->in[0]->dtype, wide = td_wide_dtype(dtype);
    char text[2][TD_SHAPE_TEXT];
    if (!td_is_float(dtype))
        return td_call_fail(call, "needs a float operand, got %s", td_dtype_name(dtype));
    for (int i = 1; i <= weights; i++) {
        td_shape w = call->in[i]->shape;
        if (x.rank < 1 || w.rank != 1 || w.dim[0] != x.dim[x.rank - 1])
            return td_call_fail(call, "x %s and %s %s do not fit (..., D), (D)", td_shape_text(x, text[0]),
                                i == 1 ? "weight" : "bias", td_shape_text(w, text[1]));
        if (call->in[i]->dtype != wide)
            return td_call_fail(call, "x has dtype %s, so its %s must be %s, not %s", td_dtype_name(dtype),
                                i == 1 ? "weight" : "bias", td_dtype_name(wide),
                                td_dtype_name((td_dtype)call->in[i]->dtype));
    }
    return true;
}

static bool norm_shape(td_call *call)
{
    const td_norm_attr *attr = call->attr;
    if (!norm_fits(call, call->inputs - 1))
        return false;
    call->out[0].shape = call->in[0]->shape;
    call->out[0].dtype = (uint8_t)(attr->narrow ? (td_dtype)attr->narrow : td_wide_dtype((td_dtype)call->in[0]->dtype));
    return true;
}

static void norm_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    int64_t rows = td_value_at(p, td_node_inputs(p, n)[0])->shape.rank - 1;
    for (int i = 0; i < rows; i++)
        rule->in[0][i] = rule->out[0][i] = (int8_t)(i + 1);
}

static void norm_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_norm_attr *attr = td_node_attr(p, n);
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "eps %g", attr->eps);
    if (attr->adds)
        td_print_add(&line, " + r");
    if (attr->narrow)
        td_print_add(&line, " to %s", td_dtype_name((td_dtype)attr->narrow));
}

static void norm_gradient_rule(const td_gradient_call *g)
{
    td_norm_attr attr = *(const td_norm_attr *)g->attr;
    attr.bias = g->inputs > 2;
    td_tensor first = td_record(&td_op_norm_gradient, g->here, 3, (td_tensor[]){ g->in[0], g->in[1], g->dout[0] },
                                &attr);
    for (int i = 0; i < g->inputs; i++)
        if (g->wanted[i])
            td_gradient_set(g, i, td_output(first, i));
}

/* The row without its mean, and the factor that brings its mean square to 1: (..., D) and (..., 1). */
static td_tensor centered_parts(td_tensor x, const td_norm_attr *attr, td_here here, td_tensor *scale)
{
    if (attr->centered)
        x = td_sub_at(x, td_mean_at(x, TD_LAST, TD_KEEP, here), here);
    td_tensor square = td_mean_at(td_square_at(x, here), TD_LAST, TD_KEEP, here);
    *scale = td_rsqrt_at(td_add_at(square, td_constant_like(square, attr->eps, here), here), here);
    return x;
}

static td_tensor norm_decomposed(const td_gradient_call *call)
{
    td_here here = call->here;
    td_tensor scale, x = td_as(call->in[0], td_dtype_at(call->in[1]), here);
    x = centered_parts(x, call->attr, here, &scale);
    td_tensor y = td_mul_at(td_mul_at(x, scale, here), call->in[1], here);
    return call->inputs > 2 ? td_add_at(y, call->in[2], here) : y;
}

static td_cost norm_cost(const td_kernel *k)
{
    return td_cost_of(k, k->op == &td_op_norm_gradient ? 16 : 8);
}

/* ---- Parts: a thread's share of the rows, with room for rows in another dtype --------------------------------- */

enum { ROOMS = 2 }; /* x, and y or dx */

typedef struct norm_work {
    const td_kernel *k;
    const td_norm_kernels *f32;
    int64_t rows, columns, parts;
    int64_t chunk_rows, chunks;               /* of norm_gradient */
    char *sums;                               /* (chunks, 2, D) of the wide dtype */
    char *rooms;                              /* (parts, ROOMS, D) f32, for operands of 16 bits */
} norm_work;

static norm_work work_of(const td_kernel *k)
{
    norm_work w = { .k = k, .f32 = kernels_f32(), .columns = td_arg_last(&k->in[0]) };
    td_shape shape = k->in[0].shape;
    w.rows = td_shape_product(shape, 0, (int)shape.rank - 1);
    w.chunk_rows = (w.rows + CHUNKS - 1) / CHUNKS;
    w.chunk_rows = w.chunk_rows < CHUNK_ROWS ? CHUNK_ROWS : w.chunk_rows;
    w.chunks = (w.rows + w.chunk_rows - 1) / w.chunk_rows;
    int64_t tasks = k->op == &td_op_norm_gradient ? w.chunks : w.rows * w.columns / TASK_ELEMENTS + 1;
    w.parts = td_smaller(k->run ? k->run->threads : 1, tasks);
    return w;
}

static int64_t sums_bytes(const norm_work *w)
{
    return w->chunks * 2 * w->columns * td_dtype_size(td_wide_dtype(w->k->in[0].dtype));
}

static bool norm_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)td;
    norm_work w = work_of(k);
    if (k->op == &td_op_norm_gradient)
        out->workspace_bytes = sums_bytes(&w);
    if (td_wide_dtype(k->in[0].dtype) != k->in[0].dtype || ((const td_norm_attr *)k->attr)->narrow)
        out->workspace_bytes += w.parts * ROOMS * w.columns * (int64_t)sizeof(float);
    return true;
}

static float *room_of(const norm_work *w, int64_t part, int room)
{
    return w->rooms ? (float *)w->rooms + (part * ROOMS + room) * w->columns : NULL; /* rows that are wide already need none */
}

static void forward_part(void *user, int64_t part, int64_t end)
{
    (void)end; /* one part a call */
    const norm_work *w = user;
    const td_arg *in = w->k->in;
    const td_norm_attr *attr = w->k->attr;
    const void *bias = w->k->inputs > 2 ? in[2].data : NULL;
    for (int64_t row = w->rows * part / w->parts; row < w->rows * (part + 1) / w->parts; row++) {
        const void *x = td_arg_at(&in[0], row * w->columns);
        void *y = td_arg_at(&w->k->out[0], row * w->columns), *wide = attr->narrow ? room_of(w, part, 1) : y;
        if (in[0].dtype == TD_F64)
            forward_f64(attr, x, in[1].data, bias, y, w->columns);
        else
            w->f32->forward(attr, td_view_f32(in[0].dtype, x, w->columns, room_of(w, part, 0)), in[1].data, bias, wide,
                        w->columns);
        if (attr->narrow)
            td_store_f32(y, (td_dtype)attr->narrow, wide, w->columns);
    }
}

static void norm_cpu(const td_kernel *k)
{
    norm_work w = work_of(k);
    w.rooms = k->workspace;
    if (w.rows > 0 && w.columns > 0)
        td_parallel_for(k->run, w.parts, 1, forward_part, &w);
}

/* ---- layer_norm and rms_norm ------------------------------------------------------------------------------ */

static const td_norm_attr layer_attr = { .eps = 1e-5, .centered = 1 }, rms_attr = { .eps = 1e-6 };

static const td_case layer_norm_cases[] = {
    { .in = { TD_RANDN(3, 5), TD_RANDN(5), TD_RANDN(5) }, .attr = &layer_attr },
    { .in = { TD_RANDN(2, 6, 7), TD_RANDN(7) }, .attr = &layer_attr, .note = "no bias" },
    { .in = { TD_RANDN(12, 33), TD_RANDN(33), TD_RANDN(33) }, .attr = &layer_attr },
    { .in = { TD_RANDN(2, 1031), TD_RANDN(1031), TD_RANDN(1031) }, .attr = &layer_attr, .note = "several blocks" },
    { .in = { TD_RANDN(5, 64), TD_RANDN(64), TD_RANDN(64) }, .attr = &layer_attr, .note = "whole vectors" },
    { .in = { TD_RANDN(3, 1032), TD_RANDN(1032), TD_RANDN(1032) }, .attr = &layer_attr, .note = "whole vectors, several blocks" },
    { .in = { TD_RANDN(0, 4), TD_RANDN(4), TD_RANDN(4) }, .attr = &layer_attr, .note = "no rows" },
    TD_CASES_END
};

const td_op td_op_layer_norm = {
    .name       = "layer_norm",
    .inputs     = -1,
    .attr_bytes = sizeof(td_norm_attr),
    .shape      = norm_shape,
    .gradient   = norm_gradient_rule,
    .decompose  = norm_decomposed,
    .place      = norm_place,
    .precision  = TD_WIDE,
    .cost       = norm_cost,
    .prepare    = norm_prepare,
    .cpu        = norm_cpu,
    .cuda       = TD_CUDA(td_norm_cuda),
    .print      = norm_print,
    .cases      = layer_norm_cases,
};

td_tensor td_layer_norm_at(td_tensor x, td_tensor weight, td_tensor bias, double eps, td_here here)
{
    td_norm_attr attr = { .eps = eps, .centered = 1 };
    return td_record(&td_op_layer_norm, here, bias.td ? 3 : 2, (td_tensor[]){ x, weight, bias }, &attr);
}

static const td_case rms_norm_cases[] = {
    { .in = { TD_RANDN(3, 5), TD_RANDN(5) }, .attr = &rms_attr },
    { .in = { TD_RANDN(2, 12, 33), TD_RANDN(33) }, .attr = &rms_attr },
    { .in = { TD_RANDN(2, 1031), TD_RANDN(1031) }, .attr = &rms_attr, .note = "several blocks" },
    { .in = { TD_RANDN(5, 768), TD_RANDN(768) }, .attr = &rms_attr, .note = "whole vectors" },
    TD_CASES_END
};

const td_op td_op_rms_norm = {
    .name       = "rms_norm",
    .inputs     = 2,
    .attr_bytes = sizeof(td_norm_attr),
    .shape      = norm_shape,
    .gradient   = norm_gradient_rule,
    .decompose  = norm_decomposed,
    .place      = norm_place,
    .precision  = TD_WIDE,
    .cost       = norm_cost,
    .prepare    = norm_prepare,
    .cpu        = norm_cpu,
    .cuda       = TD_CUDA(td_norm_cuda),
    .print      = norm_print,
    .cases      = rms_norm_cases,
};

td_tensor td_rms_norm_at(td_tensor x, td_tensor weight, double eps, td_here here)
{
    return td_record(&td_op_rms_norm, here, 2, (td_tensor[]){ x, weight }, &(td_norm_attr){ .eps = eps });
}

/* ---- norm_gradient ---------------------------------------------------------------------------------------- */

static bool gradient_shape(td_call *call)
{
    const td_norm_attr *attr = call->attr;
    if (!norm_fits(call, 1))
        return false;
    if (call->inputs != 3 + attr->adds)
        return td_call_fail(call, "needs %d operands, got %d", 3 + attr->adds, call->inputs);
    for (int i = 2; i < call->inputs; i++)
        if (!td_shape_equal(call->in[i]->shape, call->in[0]->shape) || call->in[i]->dtype != call->in[1]->dtype)
            return td_call_fail(call, "the gradient differs from x in shape, or from the weight in dtype");
    if ((attr->adds || attr->narrow) && call->in[0]->dtype != TD_F32)
        return td_call_fail(call, "adds to, and narrows, f32 alone, not %s", td_dtype_name((td_dtype)call->in[0]->dtype));
    td_call_like(call, 0);
    call->outputs = 2 + attr->bias;
    for (int k = 1; k < call->outputs; k++) {
        call->out[k] = (td_value){ .shape = call->in[1]->shape };
        call->out[k].dtype = call->in[1]->dtype;
    }
    if (attr->narrow)
        call->out[call->outputs++] = (td_value){ .shape = call->in[0]->shape, .dtype = (uint8_t)attr->narrow };
    return true;
}

static void gradient_parts(const td_gradient_call *call, td_tensor *out)
{
    td_here here = call->here;
    const td_norm_attr *attr = call->attr;
    td_tensor x = td_as(call->in[0], td_dtype_at(call->in[1]), here), weight = call->in[1], dy = call->in[2], scale;
    td_tensor n = centered_parts(x, attr, here, &scale);
    n = td_mul_at(n, scale, here);
    td_tensor g = td_mul_at(dy, weight, here);
    td_tensor along = td_mul_at(n, td_mean_at(td_mul_at(g, n, here), TD_LAST, TD_KEEP, here), here);
    td_tensor rest = td_sub_at(g, along, here);
    if (attr->centered)
        rest = td_sub_at(rest, td_mean_at(g, TD_LAST, TD_KEEP, here), here);
    out[0] = td_as(td_mul_at(scale, rest, here), td_dtype_at(call->in[0]), here);
    if (attr->adds)
        out[0] = td_add_at(out[0], call->in[3], here);
    out[1] = td_sum_to_at(td_mul_at(dy, n, here), td_shape_at(weight), here);
    if (attr->bias)
        out[2] = td_sum_to_at(dy, td_shape_at(weight), here);
    if (attr->narrow)
        out[2 + attr->bias] = td_as(out[0], (td_dtype)attr->narrow, here);
}

static void gradient_gradient(const td_gradient_call *g)
{
    td_gradient_by_parts(g, gradient_parts);
}

static td_tensor gradient_decomposed(const td_gradient_call *call)
{
    td_tensor out[TD_CALL_OUTPUTS];
    gradient_parts(call, out);
    return out[0];
}

static void gradient_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    const td_norm_attr *attr = td_node_attr(p, n);
    norm_place(p, n, rule); /* the weights' gradients lack the rows: they are sums over ranks */
    memcpy(rule->in[2], rule->in[0], sizeof rule->in[2]);
    memcpy(rule->in[3], rule->in[0], sizeof rule->in[3]);
    if (attr->narrow) /* a last output with rows has no rule: as a whole */
        memset(rule, 0, sizeof *rule);
}

/* What is done to a row of dx that lies where it belongs. */
static void finish_row(const norm_work *w, int64_t row)
{
    const td_kernel *k = w->k;
    const td_norm_attr *attr = k->attr;
    float *dx = td_arg_at(&k->out[0], row * w->columns);
    if (attr->adds) {
        const float *r = td_arg_at(&k->in[3], row * w->columns);
        TD_SIMD
        for (int64_t i = 0; i < w->columns; i++)
            dx[i] = r[i] + dx[i];
    }
    if (attr->narrow)
        td_store_f32(td_arg_at(&k->out[k->outputs - 1], row * w->columns), (td_dtype)attr->narrow, dx, w->columns);
}

/* Row `row`, whose sums go to chunk `chunk`. */
static void backward_row(const norm_work *w, int64_t part, int64_t chunk, int64_t row)
{
    const td_kernel *k = w->k;
    const td_arg *x = &k->in[0], *dx = &k->out[0];
    int64_t at = row * w->columns;
    bool biased = ((const td_norm_attr *)k->attr)->bias;
    if (x->dtype == TD_F64) {
        double *sums = (double *)w->sums + chunk * 2 * w->columns;
        backward_f64(k->attr, td_arg_at(x, at), k->in[1].data, td_arg_at(&k->in[2], at), td_arg_at(dx, at), sums,
                     biased ? sums + w->columns : NULL, w->columns);
        return;
    }
    float *sums = (float *)w->sums + chunk * 2 * w->columns;
    bool narrow = x->dtype != TD_F32;
    float *to = narrow ? room_of(w, part, 1) : td_arg_at(dx, at);
    const float *from = td_view_f32(x->dtype, td_arg_at(x, at), w->columns, narrow ? room_of(w, part, 0) : NULL);
    w->f32->backward(k->attr, from, k->in[1].data, td_arg_at(&k->in[2], at), to, sums,
                     biased ? sums + w->columns : NULL, w->columns);
    if (narrow)
        td_store_f32(td_arg_at(dx, at), dx->dtype, to, w->columns);
}

static void backward_part(void *user, int64_t part, int64_t end)
{
    (void)end; /* one part a call */
    const norm_work *w = user;
    const td_arg *dx = &w->k->out[0];
    td_rows held = td_rows_held(w->k, dx, (int)dx->shape.rank - 1);
    for (int64_t chunk = w->chunks * part / w->parts; chunk < w->chunks * (part + 1) / w->parts; chunk++) {
        int64_t row = chunk * w->chunk_rows, last = td_smaller(row + w->chunk_rows, w->rows);
        for (; row < last; row++) {
            if (td_row_exists(&held, row))
                backward_row(w, part, chunk, row);
            else
                memset(td_arg_at(dx, row * w->columns), 0, (size_t)(w->columns * td_dtype_size(dx->dtype)));
            finish_row(w, row);
        }
    }
}

/* Columns [begin, end) of the weights' gradients: the chunks in order. */
static void join_columns(void *user, int64_t begin, int64_t end)
{
    const norm_work *w = user;
    const td_kernel *k = w->k;
    bool wide = k->in[0].dtype == TD_F64;
    for (int out = 1; out <= 1 + ((const td_norm_attr *)k->attr)->bias; out++) {
        for (int64_t c = begin; c < end; c++) {
            double total = 0;
            for (int64_t chunk = 0; chunk < w->chunks; chunk++) {
                int64_t at = (chunk * 2 + out - 1) * w->columns + c;
                total += wide ? ((const double *)w->sums)[at] : (double)((const float *)w->sums)[at];
            }
            td_store_f64(td_arg_at(&k->out[out], c), k->out[out].dtype, &total, 1);
        }
    }
}

static void gradient_cpu(const td_kernel *k)
{
    norm_work w = work_of(k);
    w.sums = k->workspace;
    w.rooms = w.sums ? w.sums + sums_bytes(&w) : NULL;
    if (w.sums)
        memset(w.sums, 0, (size_t)sums_bytes(&w));
    if (w.rows > 0 && w.columns > 0)
        td_parallel_for(k->run, w.parts, 1, backward_part, &w);
    td_parallel_for(k->run, w.columns, TASK_ELEMENTS / (w.chunks + 1) + 1, join_columns, &w);
}

static const td_norm_attr layer_bias_attr = { .eps = 1e-5, .centered = 1, .bias = 1 };

static const td_case gradient_cases[] = {
    { .in = { TD_RANDN(3, 5), TD_RANDN(5), TD_RANDN(3, 5) }, .attr = &layer_bias_attr },
    { .in = { TD_RANDN(2, 6, 7), TD_RANDN(7), TD_RANDN(2, 6, 7) }, .attr = &layer_attr, .note = "no bias" },
    { .in = { TD_RANDN(12, 33), TD_RANDN(33), TD_RANDN(12, 33) }, .attr = &rms_attr, .note = "no mean" },
    { .in = { TD_RANDN(40, 3, 9), TD_RANDN(9), TD_RANDN(40, 3, 9) }, .attr = &layer_bias_attr,
      .note = "several chunks" },
    { .in = { TD_RANDN(50, 64), TD_RANDN(64), TD_RANDN(50, 64) }, .attr = &layer_bias_attr, .note = "whole vectors" },
    { .in = { TD_RANDN(9, 520), TD_RANDN(520), TD_RANDN(9, 520) }, .attr = &layer_attr, .note = "whole vectors, no bias" },
    { .in = { TD_RANDN(3, 1032), TD_RANDN(1032), TD_RANDN(3, 1032) }, .attr = &rms_attr, .note = "whole vectors, no mean" },
    { .in = { TD_RANDN(0, 4), TD_RANDN(4), TD_RANDN(0, 4) }, .attr = &layer_bias_attr, .note = "no rows" },
    TD_CASES_END
};

const td_op td_op_norm_gradient = {
    .name       = "norm_gradient",
    .inputs     = -1,
    .attr_bytes = sizeof(td_norm_attr),
    .shape      = gradient_shape,
    .gradient   = gradient_gradient,
    .decompose  = gradient_decomposed,
    .place      = gradient_place,
    .precision  = TD_WIDE,
    .cost       = norm_cost,
    .prepare    = norm_prepare,
    .cpu        = gradient_cpu,
    .cuda       = TD_CUDA(td_norm_gradient_cuda, td_norm_gradient_cuda_prepare),
    .print      = norm_print,
    .cases      = gradient_cases,
};
