/* rotary: each pair of a row turned by an angle that grows with the row's position (Su et al.: "RoFormer", 2021).
 *
 *     x (B, H, T, d) float[, positions (B) i32]  ->  y (B, H, T, d), dtype of x
 *
 * With p = i, or positions[b] + i, for row i, and f_j = theta^(-2j/d), elements j and j + d/2 are a pair (the halves of a
 * row, as in Hugging Face's files):
 *     y_j = x_j cos(p f_j) - x_{j+d/2} sin(p f_j),    y_{j+d/2} = x_{j+d/2} cos(p f_j) + x_j sin(p f_j)
 *
 * Angles are computed in f64: cosines and sines of one position in RUN by the library, of the others by turning on.
 * The gradient is the turn back.
 */
#include "core/ops/convert.h"
#include "core/ops/op.h"
#include "core/ops/rotary_cuda.h"
#include "core/ops/simd.h"

#include <math.h>

typedef struct op_rotary_attr {
    double theta;
    double factor, low, high;                 /* of stretched wavelengths; factor 0: none */
    int64_t context;
    int32_t back;                             /* 1: turns the other way */
    int32_t positions;                        /* 1: an input */
} op_rotary_attr;

enum { RUN = 64 };

/* Radians a position of pair j. Llama 3.1 stretches wavelengths above context / low by `factor`, leaves those below
 * context / high, and goes from one to the other between. */
static double frequency(const op_rotary_attr *attr, int64_t j, int64_t width)
{
    double f = pow(attr->theta, -2 * (double)j / (double)width);
    if (attr->factor == 0)
        return f;
    double turns = (double)attr->context * f / (2 * M_PI); /* in the context */
    double kept = (turns - attr->low) / (attr->high - attr->low);
    kept = kept < 0 ? 0 : kept > 1 ? 1 : kept;
    return kept * f + (1 - kept) * f / attr->factor;
}

static bool rotary_shape(td_call *call)
{
    td_shape x = call->in[0]->shape;
    td_dtype dtype = (td_dtype)call->in[0]->dtype;
    char text[TD_SHAPE_TEXT];
    if (x.rank != 4 || x.dim[3] % 2 != 0)
        return td_call_fail(call, "needs x (B, H, T, d) with an even d, got shape %s", td_shape_text(x, text));
    if (!td_is_float(dtype))
        return td_call_fail(call, "needs a float operand, got %s", td_dtype_name(dtype));
    if (call->inputs > 1 && (call->in[1]->dtype != TD_I32 || !td_shape_equal(call->in[1]->shape, TD_SHAPE(x.dim[0]))))
        return td_call_fail(call, "positions must be (%lld) i32, got %s %s", (long long)x.dim[0],
                            td_shape_text(call->in[1]->shape, text), td_dtype_name((td_dtype)call->in[1]->dtype));
    return td_call_like(call, 0);
}

static void rotary_gradient(const td_gradient_call *g)
{
    op_rotary_attr attr = *(const op_rotary_attr *)g->attr;
    attr.back = !attr.back;
    td_tensor in[2] = { g->dout[0], g->in[g->inputs - 1] };
    td_gradient_set(g, 0, td_record(&td_op_rotary, g->here, g->inputs, in, &attr));
}

/* (d / 2) */
static td_tensor frequencies(const td_gradient_call *call, td_dtype dtype, int64_t width)
{
    td_tensor *parts = td_alloc(call->td, (size_t)width / 2 * sizeof *parts, "program");
    if (!parts)
        return td_no_tensor(call->td);
    for (int64_t j = 0; j < width / 2; j++)
        parts[j] = td_fill_at(call->td, dtype, TD_SHAPE(1), frequency(call->attr, j, width), call->here);
    td_tensor all = td_concat_at(parts, (int)(width / 2), 0, call->here);
    td_free(call->td, parts, (size_t)width / 2 * sizeof *parts, "program");
    return all;
}

static td_tensor rotary_decomposed(const td_gradient_call *call)
{
    const op_rotary_attr *attr = call->attr;
    td_here here = call->here;
    td_dtype dtype = td_wide_dtype(td_dtype_at(call->in[0]));
    td_shape shape = td_shape_at(call->in[0]);
    int64_t half = shape.dim[3] / 2;
    if (half == 0)
        return call->in[0];
    td_tensor at = td_iota_at(call->td, dtype, shape.dim[2], here);
    at = td_reshape_at(at, TD_SHAPE(1, 1, shape.dim[2], 1), here);
    if (attr->positions)
        at = td_add_at(at, td_reshape_at(td_cast_at(call->in[1], dtype, here), TD_SHAPE(-1, 1, 1, 1), here), here);
    td_tensor angle = td_mul_at(at, frequencies(call, dtype, shape.dim[3]), here); /* (B or 1, 1, T, d / 2) */
    td_tensor c = td_cos_at(angle, here), s = td_sin_at(attr->back ? td_neg_at(angle, here) : angle, here);
    td_tensor x = td_as(call->in[0], dtype, here);
    td_tensor a = td_slice_at(x, 3, 0, half, here), b = td_slice_at(x, 3, half, 2 * half, here);
    td_tensor y[2] = { td_sub_at(td_mul_at(a, c, here), td_mul_at(b, s, here), here),
                       td_add_at(td_mul_at(b, c, here), td_mul_at(a, s, here), here) };
    return td_as(td_concat_at(y, 2, 3, here), td_dtype_at(call->in[0]), here);
}

static void rotary_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    (void)p, (void)n;
    memset(rule, 0, sizeof *rule);
    rule->in[0][0] = rule->in[1][0] = rule->out[0][0] = 1;
    rule->in[0][1] = rule->out[0][1] = 2;
    rule->partial = TD_PARTIAL_EACH; /* linear in x */
}

static td_cost rotary_cost(const td_kernel *k)
{
    return td_cost_of(k, 3);
}

/* ---- Kernel: tasks are RUN positions of one sequence, all heads ----------------------------------------------- */

typedef struct rotation {
    const td_kernel *k;
    int64_t heads, rows, half, runs, parts;
    double *step;                             /* (half, 3): radians, cosine and sine of one position */
    double *rooms;                            /* a part: (RUN, half) cosines, then sines; a turning point (half, 2) */
} rotation;

static rotation rotation_of(const td_kernel *k)
{
    td_shape x = k->in[0].shape;
    rotation r = { .k = k, .heads = x.dim[1], .rows = x.dim[2], .half = x.dim[3] / 2 };
    r.runs = (r.rows + RUN - 1) / RUN;
    r.parts = td_smaller(k->run->threads, x.dim[0] * r.runs);
    r.step = k->workspace;
    r.rooms = r.step ? r.step + 3 * r.half : NULL;
    return r;
}

static bool rotary_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)td;
    rotation r = rotation_of(k);
    out->workspace_bytes = (3 * r.half + r.parts * (2 * RUN + 2) * r.half) * (int64_t)sizeof(double);
    return true;
}

/* Cosines and sines of positions [first, first + count), f32 or f64, in `room` (RUN, half) each. */
static void fill_angles(const rotation *r, double first, int64_t count, bool wide, double *room)
{
    int64_t half = r->half;
    double *cosine = room + 2 * RUN * half, *sine = cosine + half;
    for (int64_t j = 0; j < half; j++) {
        cosine[j] = cos(first * r->step[3 * j]);
        sine[j] = sin(first * r->step[3 * j]);
    }
    for (int64_t i = 0; i < count; i++) {
        for (int64_t j = 0; j < half; j++) {
            double c = cosine[j], s = sine[j];
            if (wide)
                room[i * half + j] = c, room[(RUN + i) * half + j] = s;
            else
                ((float *)room)[i * half + j] = (float)c, ((float *)room)[(RUN + i) * half + j] = (float)s;
            cosine[j] = c * r->step[3 * j + 1] - s * r->step[3 * j + 2];
            sine[j] = s * r->step[3 * j + 1] + c * r->step[3 * j + 2];
        }
    }
}

static void turn_f64(const double *x, double *y, const double *c, const double *s, int64_t half)
{
    TD_SIMD
    for (int64_t j = 0; j < half; j++) {
        double a = x[j], b = x[half + j];
        y[j] = a * c[j] - b * s[j];
        y[half + j] = b * c[j] + a * s[j];
    }
}

static void turn_f32(const float *x, float *y, const float *c, const float *s, int64_t half)
{
    TD_SIMD
    for (int64_t j = 0; j < half; j++) {
        float a = x[j], b = x[half + j];
        y[j] = a * c[j] - b * s[j];
        y[half + j] = b * c[j] + a * s[j];
    }
}

enum { PIECE = 256 }; /* pairs of a 16-bit row turned at a time */

static void turn_16_bit(const td_arg *x, const td_arg *y, int64_t at, const float *c, const float *s, int64_t half)
{
    float from[2 * PIECE], to[2 * PIECE];
    for (int64_t done = 0; done < half; done += PIECE) {
        int64_t n = td_smaller(PIECE, half - done);
        td_load_f32(from, x->dtype, td_arg_at(x, at + done), n);
        td_load_f32(from + n, x->dtype, td_arg_at(x, at + half + done), n);
        turn_f32(from, to, c + done, s + done, n);
        td_store_f32(td_arg_at(y, at + done), y->dtype, to, n);
        td_store_f32(td_arg_at(y, at + half + done), y->dtype, to + n, n);
    }
}

static void turn_row(const rotation *r, int64_t row, int64_t i, const double *room)
{
    const td_arg *x = &r->k->in[0], *y = &r->k->out[0];
    int64_t at = row * 2 * r->half, c = i * r->half, s = (RUN + i) * r->half;
    const float *narrow = (const float *)room;
    if (x->dtype == TD_F64)
        turn_f64(td_arg_at(x, at), td_arg_at(y, at), room + c, room + s, r->half);
    else if (x->dtype == TD_F32)
        turn_f32(td_arg_at(x, at), td_arg_at(y, at), narrow + c, narrow + s, r->half);
    else
        turn_16_bit(x, y, at, narrow + c, narrow + s, r->half);
}

static void turn_part(void *user, int64_t part, int64_t end)
{
    (void)end; /* one part a call */
    const rotation *r = user;
    const td_kernel *k = r->k;
    double *room = r->rooms + part * (2 * RUN + 2) * r->half;
    int64_t tasks = k->in[0].shape.dim[0] * r->runs;
    for (int64_t task = tasks * part / r->parts; task < tasks * (part + 1) / r->parts; task++) {
        int64_t sequence = task / r->runs, first = task % r->runs * RUN, count = td_smaller(RUN, r->rows - first);
        double start = k->inputs > 1 ? ((const int32_t *)k->in[1].data)[sequence] : 0;
        fill_angles(r, start + (double)first, count, k->in[0].dtype == TD_F64, room);
        for (int64_t head = 0; head < r->heads; head++)
            for (int64_t i = 0; i < count; i++)
                turn_row(r, (sequence * r->heads + head) * r->rows + first + i, i, room);
    }
}

static void rotary_cpu(const td_kernel *k)
{
    const op_rotary_attr *attr = k->attr;
    rotation r = rotation_of(k);
    for (int64_t j = 0; j < r.half; j++) {
        double f = frequency(attr, j, 2 * r.half) * (attr->back ? -1 : 1);
        r.step[3 * j] = f;
        r.step[3 * j + 1] = cos(f);
        r.step[3 * j + 2] = sin(f);
    }
    if (td_arg_elements(&k->in[0]) > 0)
        td_parallel_for(k->run, r.parts, 1, turn_part, &r);
}

#ifdef TANDEM_CUDA
static bool rotary_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    const op_rotary_attr *attr = k->attr;
    int64_t half = k->in[0].shape.dim[3] / 2;
    if (half > TD_ROTARY_PAIRS) {
        td_fail(td, TD_ERROR_UNSUPPORTED, "rotary: heads of %lld are too wide for a GPU: %d at most", (long long)(2 * half), 2 * TD_ROTARY_PAIRS);
        return false;
    }
    td_rotary_angles *angles = out->prepared = td_prepared_new(td, sizeof *angles);
    for (int64_t j = 0; angles && j < half; j++)
        angles->step[j] = frequency(attr, j, 2 * half) * (attr->back ? -1 : 1);
    return angles != NULL;
}
#endif

static void rotary_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const op_rotary_attr *attr = td_node_attr(p, n);
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "theta %g%s", attr->theta, attr->back ? " back" : "");
}

#define ROTARY(...) &(const op_rotary_attr){ .theta = 100, __VA_ARGS__ }

static const td_case rotary_cases[] = {
    { .in = { TD_RANDN(2, 3, 5, 6) }, .attr = ROTARY(.back = 0) },
    { .in = { TD_RANDN(4, 2, 3, 8), TD_LABELS(90, 4) }, .attr = ROTARY(.positions = 1), .note = "positions" },
    { .in = { TD_RANDN(12, 1, 7, 34) }, .attr = ROTARY(.back = 1), .note = "back" },
    { .in = { TD_RANDN(1, 2, 150, 4) }, .attr = ROTARY(.back = 0), .note = "several runs" },
    { .in = { TD_RANDN(2, 1, 9, 16) }, .attr = ROTARY(.factor = 8, .low = 1, .high = 4, .context = 64),
      .note = "stretched wavelengths" },
    TD_CASES_END
};

const td_op td_op_rotary = {
    .name       = "rotary",
    .inputs     = -1,
    .flags      = TD_OP_INPLACE,
    .attr_bytes = sizeof(op_rotary_attr),
    .shape      = rotary_shape,
    .gradient   = rotary_gradient,
    .decompose  = rotary_decomposed,
    .place      = rotary_place,
    .precision  = TD_ANY_DTYPE,
    .cost       = rotary_cost,
    .prepare    = rotary_prepare,
    .cpu        = rotary_cpu,
    .cuda       = TD_CUDA(td_rotary_cuda, rotary_cuda_prepare, td_prepared_free),
    .print      = rotary_print,
    .cases      = rotary_cases,
};

td_tensor td_rotary_at(td_tensor x, const td_rotary_options *options, td_here here)
{
    static const td_rotary_options defaults;
    const td_rotary_options *o = options ? options : &defaults;
    if (td_failed(x))
        return x;
    if (o->theta < 0 || (o->factor != 0 && !(o->factor > 0 && o->high > o->low && o->context > 0)))
        return td_refuse(x.td, "rotary", here, "theta must be above 0; a factor needs high > low and a context");
    op_rotary_attr attr = { .theta = o->theta == 0 ? 10000 : o->theta, .factor = o->factor, .low = o->low,
                            .high = o->high, .context = o->context, .positions = o->positions.td != NULL };
    return td_record(&td_op_rotary, here, 1 + attr.positions, (td_tensor[]){ x, o->positions }, &attr);
}
