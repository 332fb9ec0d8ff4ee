/* Random draws: uniform values and dropout's mask, made in whatever placement they are read.
 *
 * An element is a function of (seed, key, update, index): key is the module path and occurrence in the recording,
 * update counts optimizer updates, index is the element's in the global value, micro-batches being consecutive parts of
 * one batch. So a mask is the same on any number of ranks and under any accumulation, and again in the backward.
 */
#include "core/ops/convert.h"
#include "core/ops/draw.h"
#include "core/ops/drawn.h"

enum { BLOCK = 512, TASK_ELEMENTS = 16 << 10 };

TD_CUDA_KERNEL(td_dropout_mask_cuda);
TD_CUDA_KERNEL(td_uniform_cuda);

static bool draw_shape(td_call *call)
{
    const td_draw_attr *attr = call->attr;
    call->out[0].shape = attr->shape;
    call->out[0].dtype = (uint8_t)attr->dtype;
    return true;
}

static void no_gradient(const td_gradient_call *g)
{
    (void)g; /* no inputs */
}

static void draw_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    for (int i = 0; i < p->values[n->output].shape.rank; i++)
        rule->out[0][i] = (int8_t)(i + 1);
}

/* Ten rounds of four operations for four elements, or for eight. */
static td_cost draw_cost(const td_kernel *k)
{
    return td_cost_of(k, 10);
}

static void mask_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_draw_attr *attr = td_node_attr(p, n);
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "p %g", attr->p);
}

/* ---- This rank's part ------------------------------------------------------------------------------------- */

td_drawn td_drawn_of(const td_run *run, const td_arg *y, uint64_t key, uint64_t micro)
{
    micro += (uint64_t)run->micro;
    td_drawn d = { .random = td_random_of(run->seed, key, (uint64_t)run->update),
                   .base = micro * (uint64_t)td_shape_elements(y->global), .rank = (int)y->shape.rank };
    for (int i = 0; i < d.rank; i++) {
        d.begin[i] = td_arg_extent(run->mesh, y, i).begin;
        d.local[i] = y->shape.dim[i];
        d.global[i] = y->global.dim[i];
        if (d.local[i] != d.global[i])
            d.split = i;
    }
    d.run = td_shape_product(y->shape, d.split, d.rank);
    return d;
}

/* Where run number `run` begins in the draw. */
static uint64_t run_begin(const td_drawn *d, int64_t run)
{
    int64_t index = 0, stride = 1;
    for (int i = d->rank - 1; i >= 0; i--) {
        int64_t at = d->begin[i];
        if (i < d->split) {
            at += run % d->local[i];
            run /= d->local[i];
        }
        index += at * stride;
        stride *= d->global[i];
    }
    return d->base + (uint64_t)index;
}

int64_t td_drawn_piece(const td_drawn *d, int64_t at, int64_t count, uint64_t *index)
{
    int64_t within = at % d->run;
    *index = run_begin(d, at / d->run) + (uint64_t)within;
    return td_smaller(d->run - within, count);
}

typedef struct draw {
    const td_kernel *k;
    td_drawn part;
} draw;

static void draw_all(const td_kernel *k, td_range_function write)
{
    const td_draw_attr *attr = k->attr;
    draw d = { .k = k, .part = td_drawn_of(k->run, &k->out[0], attr->key, k->phase / 2) };
    td_parallel_for(k->run, td_arg_elements(&k->out[0]), TASK_ELEMENTS, write, &d);
}

/* ---- The operations ------------------------------------------------------------------------------------- */

/* The elements' 16 bits, a block at most: how many they are. */
static int64_t draw_halves(const td_drawn *d, int64_t at, int64_t count, uint16_t *bits)
{
    uint64_t index;
    count = td_drawn_piece(d, at, td_smaller(count, BLOCK), &index);
    td_random_halves(d->random, index, count, bits);
    return count;
}

#define MASK(T)                                                                              \
    uint32_t below = td_draw_below(p);                                                       \
    T kept = (T)(1 / (1 - p));                                                               \
    uint16_t bits[BLOCK];                                                                    \
    for (int64_t done = 0; done < count;) {                                                  \
        int64_t n = draw_halves(d, at + done, count - done, bits);                           \
        for (int64_t i = 0; i < n; i++)                                                      \
            to[done + i] = bits[i] < below ? 0 : kept;                                       \
        done += n;                                                                           \
    }

void td_mask_f32(const td_drawn *d, double p, int64_t at, int64_t count, float *to)
{
    MASK(float)
}

void td_mask_f64(const td_drawn *d, double p, int64_t at, int64_t count, double *to)
{
    MASK(double)
}

static void write_mask(void *user, int64_t begin, int64_t end)
{
    const draw *d = user;
    const td_arg *y = &d->k->out[0];
    double p = ((const td_draw_attr *)d->k->attr)->p;
    float mask[BLOCK];
    if (y->dtype == TD_F64) {
        td_mask_f64(&d->part, p, begin, end - begin, td_arg_at(y, begin));
        return;
    }
    for (int64_t at = begin; at < end; at += BLOCK) {
        int64_t count = td_smaller(end - at, BLOCK);
        td_mask_f32(&d->part, p, at, count, mask);
        td_store_f32(td_arg_at(y, at), y->dtype, mask, count);
    }
}

static void mask_cpu(const td_kernel *k)
{
    draw_all(k, write_mask);
}

const td_op td_op_dropout_mask = {
    .name       = "dropout_mask",
    .flags      = TD_OP_FREE | TD_OP_RANDOM,
    .attr_bytes = sizeof(td_draw_attr),
    .shape      = draw_shape,
    .gradient   = no_gradient,
    .place      = draw_place,
    .precision  = TD_ANY_DTYPE,
    .cost       = draw_cost,
    .cpu        = mask_cpu,
    .cuda       = TD_CUDA(td_dropout_mask_cuda),
    .print      = mask_print,
};

static void write_uniform(void *user, int64_t begin, int64_t end)
{
    const draw *d = user;
    const td_arg *y = &d->k->out[0];
    double values[BLOCK];
    uint64_t index;
    for (int64_t at = begin, count; at < end; at += count) {
        count = td_drawn_piece(&d->part, at, td_smaller(end - at, BLOCK), &index);
        td_random_uniform(d->part.random, index, count, values);
        td_store_f64(td_arg_at(y, at), y->dtype, values, count);
    }
}

static void uniform_cpu(const td_kernel *k)
{
    draw_all(k, write_uniform);
}

const td_op td_op_uniform = {
    .name       = "uniform",
    .flags      = TD_OP_FREE | TD_OP_RANDOM,
    .attr_bytes = sizeof(td_draw_attr),
    .shape      = draw_shape,
    .gradient   = no_gradient,
    .place      = draw_place,
    .precision  = TD_ANY_DTYPE,
    .cost       = draw_cost,
    .cpu        = uniform_cpu,
    .cuda       = TD_CUDA(td_uniform_cuda),
};

td_tensor td_dropout_mask_at(td_context *td, td_dtype dtype, td_shape shape, double p, uint64_t key, td_here here)
{
    td_draw_attr attr = { .p = p, .key = key, .dtype = dtype, .shape = shape };
    return td_record_sized(td, &td_op_dropout_mask, here, 0, NULL, &attr, sizeof attr);
}

td_tensor td_dropout_at(td_tensor x, double p, td_here here)
{
    if (td_failed(x))
        return x;
    td_context *td = td_tensor_context(x);
    if (!(p >= 0 && p < 1))
        return td_refuse(td, "dropout", here, "p must be at least 0 and below 1, got %g", p);
    if (p == 0 || td_get_mode(td) == TD_EVAL)
        return x;
    td_tensor mask = td_dropout_mask_at(td, td_float(td), td_shape_at(x), p, td_random_key(td), here);
    return td_mul_at(x, td_as(mask, td_dtype_at(x), here), here);
}

td_tensor td_uniform_at(td_context *td, td_shape shape, td_here here)
{
    td_draw_attr attr = { .key = td_random_key(td), .dtype = td_float(td), .shape = shape };
    return td_record_sized(td, &td_op_uniform, here, 0, NULL, &attr, sizeof attr);
}
