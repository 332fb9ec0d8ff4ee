/* Random draws: uniform values and dropout's mask, made in whatever placement they are read.
 *
 * An element is a function of (seed, key, update, index): key is the module path and occurrence in the recording,
 * update counts optimizer updates, index is the element's in the global value, micro-batches being consecutive parts of
 * one batch. So a mask is the same on any number of ranks and under any accumulation, and again in the backward.
 */
#include "core/ops/convert.h"
#include "core/ops/draw.h"
#include "core/ops/op.h"
#include "core/random.h"

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

/* ---- This rank's part as runs that are adjacent in the global value, too ------------------------------------- */

typedef struct draw {
    const td_kernel *k;
    td_random random;
    uint64_t base;                  /* index of the global value's first element */
    int split;                      /* dimensions before it count runs, those from it on are in a run */
    int64_t run;                    /* elements of a run */
    int64_t begin[TD_MAX_DIMS];     /* where this rank's part begins */
    void (*write)(const struct draw *d, uint64_t index, int64_t at, int64_t count);
} draw;

static draw draw_of(const td_kernel *k)
{
    const td_draw_attr *attr = k->attr;
    const td_arg *y = &k->out[0];
    uint64_t micro = (uint64_t)k->run->micro + k->phase / 2;
    draw d = { .k = k, .random = td_random_of(k->run->seed, attr->key, (uint64_t)k->run->update),
               .base = micro * (uint64_t)td_shape_elements(y->global) };
    for (int i = 0; i < y->shape.rank; i++) {
        d.begin[i] = td_arg_extent(k->run->mesh, y, i).begin;
        if (y->shape.dim[i] != y->global.dim[i])
            d.split = i;
    }
    d.run = td_shape_product(y->shape, d.split, (int)y->shape.rank);
    return d;
}

/* Where run number `run` begins in the global value. */
static uint64_t run_begin(const draw *d, int64_t run)
{
    const td_arg *y = &d->k->out[0];
    int64_t index = 0, stride = 1;
    for (int i = (int)y->shape.rank - 1; i >= 0; i--) {
        int64_t at = d->begin[i];
        if (i < d->split) {
            at += run % y->shape.dim[i];
            run /= y->shape.dim[i];
        }
        index += at * stride;
        stride *= y->global.dim[i];
    }
    return d->base + (uint64_t)index;
}

static void draw_range(void *user, int64_t begin, int64_t end)
{
    const draw *d = user;
    while (begin < end) {
        int64_t within = begin % d->run, count = td_smaller(td_smaller(d->run - within, BLOCK), end - begin);
        d->write(d, run_begin(d, begin / d->run) + (uint64_t)within, begin, count);
        begin += count;
    }
}

static void draw_all(draw d)
{
    td_parallel_for(d.k->run, td_arg_elements(&d.k->out[0]), TASK_ELEMENTS, draw_range, &d);
}

/* ---- The operations ------------------------------------------------------------------------------------- */

/* 0 where the draw is below td_draw_below(p); else 1 / (1 - p). */
static void write_mask(const draw *d, uint64_t index, int64_t at, int64_t count)
{
    const td_draw_attr *attr = d->k->attr;
    uint32_t below = td_draw_below(attr->p);
    uint16_t bits[BLOCK];
    float mask[BLOCK];
    td_random_halves(d->random, index, count, bits);
    if (d->k->out[0].dtype == TD_F64) {
        double *y = td_arg_at(&d->k->out[0], at);
        for (int64_t i = 0; i < count; i++)
            y[i] = bits[i] < below ? 0 : 1 / (1 - attr->p);
        return;
    }
    float kept = (float)(1 / (1 - attr->p));
    for (int64_t i = 0; i < count; i++)
        mask[i] = bits[i] < below ? 0 : kept;
    td_store_f32(td_arg_at(&d->k->out[0], at), d->k->out[0].dtype, mask, count);
}

static void mask_cpu(const td_kernel *k)
{
    draw d = draw_of(k);
    d.write = write_mask;
    draw_all(d);
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

static void write_uniform(const draw *d, uint64_t index, int64_t at, int64_t count)
{
    double values[BLOCK];
    td_random_uniform(d->random, index, count, values);
    td_store_f64(td_arg_at(&d->k->out[0], at), d->k->out[0].dtype, values, count);
}

static void uniform_cpu(const td_kernel *k)
{
    draw d = draw_of(k);
    d.write = write_uniform;
    draw_all(d);
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
