/* fill and iota: values the program knows, made in whatever placement they are read.
 *
 *     fill    a shape of one value
 *     iota    (n) with element i = i
 */
#include "core/ops/convert.h"
#include "core/ops/op.h"

typedef struct td_fill_attr {
    double value;
    int32_t dtype, pad;
    td_shape shape;
} td_fill_attr;

typedef struct td_iota_attr {
    int64_t count;
    int32_t dtype, pad;
} td_iota_attr;

enum { BLOCK = 512, TASK_ELEMENTS = 32 << 10 };

TD_CUDA_KERNEL(td_fill_cuda);
TD_CUDA_KERNEL(td_iota_cuda);

static void no_gradient(const td_gradient_call *g)
{
    (void)g; /* no inputs */
}

static void fill_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    for (int i = 0; i < p->values[n->output].shape.rank; i++)
        rule->out[0][i] = (int8_t)(i + 1);
}

static bool fill_shape(td_call *call)
{
    const td_fill_attr *attr = call->attr;
    call->out[0].shape = attr->shape;
    call->out[0].dtype = (uint8_t)attr->dtype;
    return true;
}

static void fill_range(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const td_fill_attr *attr = k->attr;
    double tile[BLOCK];
    for (int i = 0; i < BLOCK; i++)
        tile[i] = attr->value;
    for (int64_t at = begin; at < end; at += BLOCK)
        td_store_f64(td_arg_at(&k->out[0], at), k->out[0].dtype, tile, td_smaller(BLOCK, end - at));
}

static void fill_cpu(const td_kernel *k)
{
    td_parallel_for(k->run, td_arg_elements(&k->out[0]), TASK_ELEMENTS, fill_range, (void *)k);
}

static void fill_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_fill_attr *attr = td_node_attr(p, n);
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "%g", attr->value);
}

const td_op td_op_fill = {
    .name       = "fill",
    .flags      = TD_OP_FREE,
    .attr_bytes = sizeof(td_fill_attr),
    .shape      = fill_shape,
    .gradient   = no_gradient,
    .place      = fill_place,
    .precision  = TD_ANY_DTYPE,
    .cpu        = fill_cpu,
    .cuda       = TD_CUDA(td_fill_cuda),
    .print      = fill_print,
};

double op_fill_value(const void *attr)
{
    return ((const td_fill_attr *)attr)->value;
}

td_tensor td_fill_at(td_context *td, td_dtype dtype, td_shape shape, double value, td_here here)
{
    td_fill_attr attr = { .value = value, .dtype = (int32_t)dtype, .shape = shape };
    return td_record_sized(td, &td_op_fill, here, 0, NULL, &attr, sizeof attr);
}

/* ---- iota ----------------------------------------------------------------------------------------------- */

static bool iota_shape(td_call *call)
{
    const td_iota_attr *attr = call->attr;
    call->out[0].shape = TD_SHAPE(attr->count);
    call->out[0].dtype = (uint8_t)attr->dtype;
    return true;
}

static void iota_cpu(const td_kernel *k)
{
    int64_t begin = td_arg_extent(k->run->mesh, &k->out[0], 0).begin;
    for (int64_t i = 0; i < k->out[0].shape.dim[0]; i++) {
        double value = (double)(begin + i);
        td_store_f64(td_arg_at(&k->out[0], i), k->out[0].dtype, &value, 1);
    }
}

const td_op td_op_iota = {
    .name       = "iota",
    .flags      = TD_OP_FREE,
    .attr_bytes = sizeof(td_iota_attr),
    .shape      = iota_shape,
    .gradient   = no_gradient,
    .place      = fill_place,
    .precision  = TD_ANY_DTYPE,
    .cpu        = iota_cpu,
    .cuda       = TD_CUDA(td_iota_cuda),
};

td_tensor td_iota_at(td_context *td, td_dtype dtype, int64_t count, td_here here)
{
    td_iota_attr attr = { .count = count, .dtype = (int32_t)dtype };
    return td_record_sized(td, &td_op_iota, here, 0, NULL, &attr, sizeof attr);
}
