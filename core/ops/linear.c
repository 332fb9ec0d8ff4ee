/* linear: y = x W^T + b; linear_add: x W^T + b + d with d of y's shape, which fuse makes of a layer and an addition; linear_gelu:
 * gelu_tanh(y), and y where it is read again, which fuse makes of a layer and its function.
 *
 *     x (..., in)  W (out, in)  b (out)   ->   y (..., out)
 *
 * Sums are taken in f32 for 16-bit operands; b may be f32 beside them. With rows = all dimensions of x but the last:
 *     dx = dy W,  dW = dy^T x over the rows,  db = the sum of dy over the rows.
 */
#include "core/ops/derive.h"
#include "core/ops/op.h"
#include "core/ops/product_cuda.h"

static bool linear_shape(td_call *call)
{
    td_shape x = call->in[0]->shape, w = call->in[1]->shape, b = call->in[2]->shape;
    td_dtype dtype = (td_dtype)call->in[0]->dtype, bias = (td_dtype)call->in[2]->dtype;
    if (call->in[1]->dtype != dtype || (bias != dtype && bias != td_wide_dtype(dtype)))
        return td_call_fail(call, "x has dtype %s, the weight %s, the bias %s", td_dtype_name(dtype),
                            td_dtype_name((td_dtype)call->in[1]->dtype), td_dtype_name(bias));
    if (!td_is_float(dtype))
        return td_call_fail(call, "needs float operands, got %s", td_dtype_name(dtype));
    if (x.rank < 1 || w.rank != 2 || b.rank != 1 || x.dim[x.rank - 1] != w.dim[1] || w.dim[0] != b.dim[0]) {
        char text[3][TD_SHAPE_TEXT];
        return td_call_fail(call, "x %s, weight %s and bias %s do not fit (..., in), (out, in), (out)",
                            td_shape_text(x, text[0]), td_shape_text(w, text[1]), td_shape_text(b, text[2]));
    }
    x.dim[x.rank - 1] = w.dim[0];
    call->out[0].shape = x;
    call->out[0].dtype = (uint8_t)dtype;
    return true;
}

static void linear_gradient(const td_gradient_call *g)
{
    td_tensor x = g->in[0], w = g->in[1], dy = td_rows_of(td_as(g->dout[0], td_dtype_at(x), g->here), g->here);
    if (g->wanted[0])
        td_gradient_set(g, 0, td_reshape_as(td_matmul_at(dy, w, 0, 0, g->here), x, g->here));
    if (g->wanted[1])
        td_gradient_set(g, 1, td_matmul_at(dy, td_rows_of(x, g->here), 1, 0, g->here));
    if (g->wanted[2])
        td_gradient_set(g, 2, td_as(td_sum_at(dy, 0, TD_DROP, g->here), td_dtype_at(g->in[2]), g->here));
}

static td_tensor linear_decomposed(const td_gradient_call *call)
{
    td_shape shape = td_shape_at(call->in[0]);
    shape.dim[shape.rank - 1] = td_shape_at(call->in[1]).dim[0];
    td_tensor y = td_matmul_at(td_rows_of(call->in[0], call->here), call->in[1], 0, 1, call->here);
    y = td_add_at(y, td_as(call->in[2], td_dtype_at(y), call->here), call->here);
    return td_reshape_at(y, shape, call->here);
}

/* Where ranks share the contracted dimension each has a sum to add to the others', and the bias is in one of them. */
static void linear_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    int64_t rows = p->values[n->output].shape.rank - 1;
    for (int i = 0; i < rows; i++)
        rule->in[0][i] = rule->out[0][i] = (int8_t)(i + 1);
    rule->in[1][0] = rule->in[2][0] = rule->out[0][rows] = (int8_t)(rows + 1);
    rule->in[0][rows] = rule->in[1][1] = (int8_t)(rows + 2);
    rule->added = 1 << 2;
}

static bool linear_add_shape(td_call *call) { return linear_shape(call) && td_product_adds(call, 3); }

static void linear_add_gradient(const td_gradient_call *g)
{
    linear_gradient(g);
    if (g->wanted[3])
        td_gradient_set(g, 3, g->dout[0]);
}

static td_tensor linear_add_decomposed(const td_gradient_call *call)
{
    td_tensor y = linear_decomposed(call), d = call->in[3];
    return td_add_at(td_as(y, td_dtype_at(d), call->here), d, call->here);
}

static void linear_add_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    linear_place(p, n, rule);
    memcpy(rule->in[3], rule->out[0], sizeof rule->in[3]);
    rule->added |= 1 << 3;
}

static bool linear_gelu_shape(td_call *call)
{
    const td_linear_gelu_attr *attr = call->attr;
    if (!linear_shape(call))
        return false;
    call->outputs = 1 + (attr->keeps != 0);
    if (attr->keeps)
        call->out[1] = (td_value){ .shape = call->out[0].shape, .dtype = call->out[0].dtype };
    return true;
}

static void linear_gelu_parts(const td_gradient_call *call, td_tensor *out)
{
    const td_linear_gelu_attr *attr = call->attr;
    td_tensor y = td_linear_at(call->in[0], call->in[1], call->in[2], call->here);
    out[0] = td_gelu_tanh_at(y, call->here);
    if (attr->keeps)
        out[1] = y;
}

static void linear_gelu_gradient(const td_gradient_call *g)
{
    td_gradient_by_parts(g, linear_gelu_parts);
}

/* The function needs whole sums. */
static void linear_gelu_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    linear_place(p, n, rule);
    int64_t rows = p->values[n->output].shape.rank - 1;
    rule->in[0][rows] = rule->in[1][1] = 0;
    rule->added = 0;
    memcpy(rule->out[1], rule->out[0], sizeof rule->out[1]);
}

static void linear_gelu_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_linear_gelu_attr *attr = td_node_attr(p, n);
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "%s", attr->keeps ? "kept" : "");
}

/* Of a contracted dimension that ranks share unevenly, what exists here counts. */
static td_onednn_product linear_product(const td_kernel *k)
{
    int64_t in = td_arg_last(&k->in[0]), out = td_arg_last(&k->out[0]);
    td_shape y = k->out[0].shape;
    return (td_onednn_product){
        .batch = 1, .m = td_shape_product(y, 0, (int)y.rank - 1), .n = out,
        .k = td_arg_extent(k->run ? k->run->mesh : NULL, &k->in[0], (int)y.rank - 1).valid,
        .a_row = in, .a_column = 1, .b_row = 1, .b_column = in, .adds = k->inputs > 3,
        .gelu = k->op == &td_op_linear_gelu, .keeps = k->outputs > 1,
    };
}

static bool linear_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    return td_product_prepare(td, k, linear_product(k), out);
}

static void linear_cpu(const td_kernel *k)
{
    td_onednn_product p = linear_product(k);
    td_product_run(k, &p);
}

#ifdef TANDEM_CUDA
static bool linear_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    return td_cublas_prepare(td, k, linear_product(k), out);
}

static void linear_cuda(const td_kernel *k)
{
    td_onednn_product p = linear_product(k);
    td_cublas_run(k, &p);
}
#endif

static td_cost linear_cost(const td_kernel *k)
{
    td_onednn_product p = linear_product(k);
    return td_product_cost(k, &p);
}

static const td_case linear_cases[] = {
    { .in = { TD_RANDN(4, 3), TD_RANDN(5, 3), TD_RANDN(5) } },
    { .in = { TD_RANDN(2, 3, 7), TD_RANDN(4, 7), TD_RANDN(4) }, .note = "two dimensions of rows" },
    { .in = { TD_RANDN(3), TD_RANDN(2, 3), TD_RANDN(2) }, .note = "one row" },
    { .in = { TD_RANDN(33, 65), TD_RANDN(17, 65), TD_RANDN(17) }, .note = "no multiple of any tile" },
    { .in = { TD_RANDN(1, 83), TD_RANDN(135, 83), TD_RANDN(135) }, .note = "few rows, several tiles of columns" },
    { .in = { TD_RANDN(3, 48), TD_RANDN(70, 48), TD_RANDN(70) } },
    { .in = { TD_RANDN(0, 3), TD_RANDN(5, 3), TD_RANDN(5) }, .note = "no rows" },
    TD_CASES_END
};

const td_op td_op_linear = {
    .name      = "linear",
    .inputs    = 3,
    .shape     = linear_shape,
    .gradient  = linear_gradient,
    .decompose = linear_decomposed,
    .place     = linear_place,
    .precision = TD_PRODUCT,
    .cost      = linear_cost,
    .prepare   = linear_prepare,
    .release   = td_onednn_release,
    .cpu       = linear_cpu,
    .cuda      = TD_CUDA(linear_cuda, linear_cuda_prepare, td_cublas_release),
    .cases     = linear_cases,
};

static const td_case linear_add_cases[] = {
    { .in = { TD_RANDN(4, 3), TD_RANDN(5, 3), TD_RANDN(5), TD_RANDN(4, 5) } },
    { .in = { TD_RANDN(2, 3, 7), TD_RANDN(4, 7), TD_RANDN(4), TD_RANDN(2, 3, 4) }, .note = "two dimensions of rows" },
    { .in = { TD_RANDN(40, 24), TD_RANDN(16, 24), TD_RANDN(16), TD_RANDN(40, 16) }, .note = "whole vectors" },
    { .in = { TD_RANDN(0, 3), TD_RANDN(5, 3), TD_RANDN(5), TD_RANDN(0, 5) }, .note = "no rows" },
    TD_CASES_END
};

const td_op td_op_linear_add = {
    .name      = "linear_add",
    .inputs    = 4,
    .shape     = linear_add_shape,
    .gradient  = linear_add_gradient,
    .decompose = linear_add_decomposed,
    .place     = linear_add_place,
    .precision = TD_PRODUCT,
    .cost      = linear_cost,
    .prepare   = linear_prepare,
    .release   = td_onednn_release,
    .cpu       = linear_cpu,
    .cuda      = TD_CUDA(linear_cuda, linear_cuda_prepare, td_cublas_release),
    .cases     = linear_add_cases,
};

#define KEEPS(keeps_) &(const td_linear_gelu_attr){ .keeps = (keeps_) }

static const td_case linear_gelu_cases[] = {
    { .in = { TD_RANDN(4, 3), TD_RANDN(5, 3), TD_RANDN(5) }, .attr = KEEPS(0) },
    { .in = { TD_RANDN(2, 3, 7), TD_RANDN(4, 7), TD_RANDN(4) }, .attr = KEEPS(1), .note = "two dimensions of rows" },
    { .in = { TD_RANDN(40, 24), TD_RANDN(16, 24), TD_RANDN(16) }, .attr = KEEPS(1), .note = "whole vectors" },
    { .in = { TD_RANDN(0, 3), TD_RANDN(5, 3), TD_RANDN(5) }, .attr = KEEPS(1), .note = "no rows" },
    { .in = { TD_RANDN(3, 0), TD_RANDN(8, 0), TD_RANDN(8) }, .attr = KEEPS(1), .note = "the bias alone" },
    TD_CASES_END
};

const td_op td_op_linear_gelu = {
    .name       = "linear_gelu",
    .inputs     = 3,
    .attr_bytes = sizeof(td_linear_gelu_attr),
    .shape      = linear_gelu_shape,
    .gradient   = linear_gelu_gradient,
    .place      = linear_gelu_place,
    .precision  = TD_PRODUCT,
    .cost       = linear_cost,
    .prepare    = linear_prepare,
    .release    = td_onednn_release,
    .cpu        = linear_cpu,
    .cuda       = TD_CUDA(linear_cuda, linear_cuda_prepare, td_cublas_release),
    .print      = linear_gelu_print,
    .cases      = linear_gelu_cases,
};

td_tensor td_linear_at(td_tensor x, td_tensor weight, td_tensor bias, td_here here)
{
    return td_record(&td_op_linear, here, 3, (td_tensor[]){ x, weight, bias }, NULL);
}
