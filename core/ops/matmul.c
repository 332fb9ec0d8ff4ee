/* matmul: C = A B, batched; matmul_add: A B + D with D of C's shape, which fuse makes of a product and an addition; matmul_dbias: A B of
 * two matrices and beside it the sums of A over the contracted dimension (m), which fuse makes of a weight's gradient and its bias's;
 * matmul_dgelu: A B gelu_tanh'(X) of matrices, element by element in the last product, which fuse makes of the gradient of gelu's result.
 *
 *     a (..., m, k)  b (..., k, n) or (k, n)   ->   (..., m, n)       flags swap the last two dimensions of a, of b
 *
 * Sums are taken in f32 for 16-bit operands; the result has their dtype, or f32 where the attribute asks for it.
 *     dA = dC B^T,  dB = A^T dC,  each with the flags that keep operands where they lie.
 */
#include "core/ops/derive.h"
#include "core/ops/op.h"
#include "core/ops/product_cuda.h"

static bool matmul_shape(td_call *call)
{
    const op_matmul_attr *attr = call->attr;
    td_shape a = call->in[0]->shape, b = call->in[1]->shape;
    td_dtype dtype = (td_dtype)call->in[0]->dtype;
    char text[2][TD_SHAPE_TEXT];
    if (!td_call_same_dtype(call))
        return false;
    if (!td_is_float(dtype))
        return td_call_fail(call, "needs float operands, got %s", td_dtype_name(dtype));
    if (a.rank < 2 || b.rank < 2)
        return td_call_fail(call, "needs at least two dimensions, got shapes %s and %s", td_shape_text(a, text[0]),
                            td_shape_text(b, text[1]));
    int64_t m = a.dim[a.rank - 2 + attr->transpose_a], k = a.dim[a.rank - 1 - attr->transpose_a];
    int64_t n = b.dim[b.rank - 1 - attr->transpose_b], k_b = b.dim[b.rank - 2 + attr->transpose_b];
    bool batched = b.rank == 2 || b.rank == a.rank;
    for (int i = 0; batched && b.rank > 2 && i < a.rank - 2; i++)
        batched = a.dim[i] == b.dim[i];
    if (k != k_b || !batched)
        return td_call_fail(call, "shapes %s and %s do not multiply%s%s", td_shape_text(a, text[0]),
                            td_shape_text(b, text[1]), attr->transpose_a ? ", a transposed" : "",
                            attr->transpose_b ? ", b transposed" : "");
    a.dim[a.rank - 2] = m;
    a.dim[a.rank - 1] = n;
    call->out[0].shape = a;
    call->out[0].dtype = (uint8_t)(attr->out_dtype >= 0 ? attr->out_dtype : (int32_t)dtype);
    return true;
}

/* ---- Gradient ------------------------------------------------------------------------------------------- */

/* b is (k, n) and serves every batch: its gradient sums over all rows of a, which become one dimension. */
static td_tensor shared_b_gradient(const td_gradient_call *g, td_tensor dy)
{
    const op_matmul_attr *attr = g->attr;
    td_tensor a = attr->transpose_a ? td_transpose_at(g->in[0], -1, -2, g->here) : g->in[0];
    td_tensor rows = td_rows_of(a, g->here), dy_rows = td_rows_of(dy, g->here);
    return attr->transpose_b ? td_matmul_at(dy_rows, rows, 1, 0, g->here) : td_matmul_at(rows, dy_rows, 1, 0, g->here);
}

static void matmul_gradient(const td_gradient_call *g)
{
    const op_matmul_attr *attr = g->attr;
    td_tensor a = g->in[0], b = g->in[1], dy = td_as(g->dout[0], td_dtype_at(a), g->here);
    int ta = attr->transpose_a, tb = attr->transpose_b;
    bool shared = td_shape_at(b).rank < td_shape_at(a).rank;
    if (g->wanted[0]) {
        td_tensor da;
        if (ta && !shared)
            da = td_matmul_at(b, dy, tb, 1, g->here);
        else
            da = td_matmul_at(dy, b, 0, !tb, g->here);
        td_gradient_set(g, 0, ta && shared ? td_transpose_at(da, -1, -2, g->here) : da);
    }
    if (g->wanted[1]) {
        td_tensor db;
        if (shared)
            db = shared_b_gradient(g, dy);
        else
            db = tb ? td_matmul_at(dy, a, 1, ta, g->here) : td_matmul_at(a, dy, !ta, 0, g->here);
        td_gradient_set(g, 1, db);
    }
}

/* ---- Placement: a batch label each, then m, k, n ------------------------------------------------------------ */

static void matmul_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    const op_matmul_attr *attr = td_node_attr(p, n);
    const td_id *inputs = td_node_inputs(p, n);
    int64_t rank = td_value_at(p, inputs[0])->shape.rank, rank_b = td_value_at(p, inputs[1])->shape.rank;
    int8_t m = (int8_t)(rank - 1), k = (int8_t)(m + 1), columns = (int8_t)(m + 2);
    memset(rule, 0, sizeof *rule);
    rule->partial = TD_PARTIAL_EACH;
    for (int i = 0; i < rank - 2; i++) {
        rule->in[0][i] = rule->out[0][i] = (int8_t)(i + 1);
        if (rank_b == rank)
            rule->in[1][i] = (int8_t)(i + 1);
    }
    rule->in[0][rank - 2 + attr->transpose_a] = m;
    rule->in[0][rank - 1 - attr->transpose_a] = k;
    rule->in[1][rank_b - 2 + attr->transpose_b] = k;
    rule->in[1][rank_b - 1 - attr->transpose_b] = columns;
    rule->out[0][rank - 2] = m;
    rule->out[0][rank - 1] = columns;
}

/* Local sizes and strides. Where the contracted dimension is sharded unevenly, only what exists of it counts. */
static td_onednn_product matmul_product(const td_kernel *k)
{
    const op_matmul_attr *attr = k->attr;
    td_shape a = k->in[0].shape, b = k->in[1].shape, c = k->out[0].shape;
    int rank = (int)a.rank, contracted = rank - 1 - attr->transpose_a;
    int64_t depth = a.dim[contracted];
    bool dgelu = k->op == &td_op_matmul_dgelu;
    td_onednn_product p = {
        .adds = k->inputs > 2 && !dgelu, .dbias = k->outputs > 1, .dgelu = dgelu,
        .batch = td_shape_product(a, 0, rank - 2), .m = c.dim[rank - 2], .n = c.dim[rank - 1],
        .k = td_arg_extent(k->run ? k->run->mesh : NULL, &k->in[0], contracted).valid,
        .a_row = attr->transpose_a ? 1 : depth, .a_column = attr->transpose_a ? c.dim[rank - 2] : 1,
        .b_row = attr->transpose_b ? 1 : c.dim[rank - 1], .b_column = attr->transpose_b ? depth : 1,
    };
    p.a_batch = p.m * depth;
    p.b_batch = b.rank > 2 ? depth * p.n : 0;
    if (p.b_batch == 0 && !attr->transpose_a) { /* one product over all rows */
        p.m *= p.batch;
        p.batch = 1;
    }
    return p;
}

/* ---- matmul_add ------------------------------------------------------------------------------------------ */

static bool matmul_add_shape(td_call *call)
{
    td_call product = *call;
    const td_value *operands[2] = { call->in[0], call->in[1] };
    product.inputs = 2;
    product.in = operands;
    return matmul_shape(&product) && td_product_adds(call, 2);
}

static void matmul_add_gradient(const td_gradient_call *g)
{
    matmul_gradient(g);
    if (g->wanted[2])
        td_gradient_set(g, 2, g->dout[0]);
}

static void matmul_add_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    matmul_place(p, n, rule);
    memcpy(rule->in[2], rule->out[0], sizeof rule->in[2]);
    rule->added = 1 << 2;
}

/* ---- matmul_dbias ---------------------------------------------------------------------------------------- */

static bool matmul_dbias_shape(td_call *call)
{
    const op_matmul_attr *attr = call->attr;
    td_shape a = call->in[0]->shape;
    if (!matmul_shape(call))
        return false;
    if (a.rank != 2)
        return td_call_fail(call, "needs two matrices, not batches of them");
    call->outputs = 2;
    call->out[1] = (td_value){ .shape = TD_SHAPE(a.dim[attr->transpose_a]),
                               .dtype = (uint8_t)td_wide_dtype((td_dtype)call->in[0]->dtype) };
    return true;
}

static void matmul_dbias_parts(const td_gradient_call *call, td_tensor *out)
{
    const op_matmul_attr *attr = call->attr;
    td_tensor a = call->in[0];
    out[0] = td_record(&td_op_matmul, call->here, 2, call->in, attr);
    out[1] = td_sum_at(a, attr->transpose_a ? 0 : 1, TD_DROP, call->here);
}

static void matmul_dbias_gradient(const td_gradient_call *g)
{
    td_gradient_by_parts(g, matmul_dbias_parts);
}

/* Columns of b are whole: the sums of a would be partial, or not, along what shares them. */
static void matmul_dbias_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    const op_matmul_attr *attr = td_node_attr(p, n);
    matmul_place(p, n, rule);
    rule->partial = TD_PARTIAL_NONE;
    rule->in[1][1 - attr->transpose_b] = rule->out[0][1] = 0;
    rule->out[1][0] = rule->out[0][0];
}

/* ---- matmul_dgelu ---------------------------------------------------------------------------------------- */

static bool matmul_dgelu_shape(td_call *call)
{
    const td_value *x = call->in[2], *c = &call->out[0];
    td_call product = *call;
    product.inputs = 2;
    if (!matmul_shape(&product))
        return false;
    if (c->shape.rank != 2 || !td_shape_equal(x->shape, c->shape) || x->dtype != c->dtype) {
        char text[2][TD_SHAPE_TEXT];
        return td_call_fail(call, "needs matrices, and x of the product's shape and dtype: %s of %s, got %s of %s",
                            td_shape_text(c->shape, text[0]), td_dtype_name((td_dtype)c->dtype), td_shape_text(x->shape, text[1]),
                            td_dtype_name((td_dtype)x->dtype));
    }
    return true;
}

static void matmul_dgelu_parts(const td_gradient_call *call, td_tensor *out)
{
    td_tensor product = td_record(&td_op_matmul, call->here, 2, call->in, call->attr);
    td_tensor slope = td_record(&td_op_gelu_tanh_slope, call->here, 1, &call->in[2], NULL);
    out[0] = td_mul_at(product, slope, call->here);
}

static void matmul_dgelu_gradient(const td_gradient_call *g)
{
    td_gradient_by_parts(g, matmul_dgelu_parts);
}

static void matmul_dgelu_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    matmul_place(p, n, rule);
    memcpy(rule->in[2], rule->out[0], sizeof rule->in[2]);
    rule->partial = TD_PARTIAL_NONE;
}

/* ---- Kernels --------------------------------------------------------------------------------------------- */

static bool matmul_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    return td_product_prepare(td, k, matmul_product(k), out);
}

static void matmul_cpu(const td_kernel *k)
{
    td_onednn_product p = matmul_product(k);
    td_product_run(k, &p);
}

#ifdef TANDEM_CUDA
static bool matmul_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    return td_cublas_prepare(td, k, matmul_product(k), out);
}

static void matmul_cuda(const td_kernel *k)
{
    td_onednn_product p = matmul_product(k);
    td_cublas_run(k, &p);
}
#endif

static td_cost matmul_cost(const td_kernel *k)
{
    td_onednn_product p = matmul_product(k);
    return td_product_cost(k, &p);
}

static void matmul_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const op_matmul_attr *attr = td_node_attr(p, n);
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "%s x %s", attr->transpose_a ? "a^T" : "a", attr->transpose_b ? "b^T" : "b");
}

#define FLAGS(a_, b_) &(const op_matmul_attr){ .transpose_a = (a_), .transpose_b = (b_), .out_dtype = -1 }

static const td_case matmul_cases[] = {
    { .in = { TD_RANDN(3, 4), TD_RANDN(4, 5) }, .attr = FLAGS(0, 0) },
    { .in = { TD_RANDN(4, 3), TD_RANDN(4, 5) }, .attr = FLAGS(1, 0) },
    { .in = { TD_RANDN(3, 4), TD_RANDN(5, 4) }, .attr = FLAGS(0, 1) },
    { .in = { TD_RANDN(4, 3), TD_RANDN(5, 4) }, .attr = FLAGS(1, 1) },
    { .in = { TD_RANDN(2, 3, 4), TD_RANDN(2, 4, 5) }, .attr = FLAGS(0, 0), .note = "batched" },
    { .in = { TD_RANDN(2, 4, 3), TD_RANDN(2, 4, 5) }, .attr = FLAGS(1, 0) },
    { .in = { TD_RANDN(2, 3, 4), TD_RANDN(2, 5, 4) }, .attr = FLAGS(0, 1) },
    { .in = { TD_RANDN(2, 4, 3), TD_RANDN(2, 5, 4) }, .attr = FLAGS(1, 1) },
    { .in = { TD_RANDN(2, 3, 4), TD_RANDN(4, 5) }, .attr = FLAGS(0, 0), .note = "one b for all" },
    { .in = { TD_RANDN(2, 4, 3), TD_RANDN(4, 5) }, .attr = FLAGS(1, 0) },
    { .in = { TD_RANDN(2, 3, 4), TD_RANDN(5, 4) }, .attr = FLAGS(0, 1) },
    { .in = { TD_RANDN(2, 4, 3), TD_RANDN(5, 4) }, .attr = FLAGS(1, 1) },
    { .in = { TD_RANDN(37, 29), TD_RANDN(29, 23) }, .attr = FLAGS(0, 0), .note = "no multiple of any tile" },
    { .in = { TD_RANDN(2, 34), TD_RANDN(67, 34) }, .attr = FLAGS(0, 1), .note = "few rows" },
    { .in = { TD_RANDN(3, 0), TD_RANDN(0, 5) }, .attr = FLAGS(0, 0), .note = "a sum over nothing" },
    TD_CASES_END
};

const td_op td_op_matmul = {
    .name       = "matmul",
    .inputs     = 2,
    .attr_bytes = sizeof(op_matmul_attr),
    .shape      = matmul_shape,
    .gradient   = matmul_gradient,
    .place      = matmul_place,
    .precision  = TD_PRODUCT,
    .cost       = matmul_cost,
    .prepare    = matmul_prepare,
    .release    = td_onednn_release,
    .cpu        = matmul_cpu,
    .cuda       = TD_CUDA(matmul_cuda, matmul_cuda_prepare, td_cublas_release),
    .print      = matmul_print,
    .cases      = matmul_cases,
};

static const td_case matmul_add_cases[] = {
    { .in = { TD_RANDN(3, 4), TD_RANDN(4, 5), TD_RANDN(3, 5) }, .attr = FLAGS(0, 0) },
    { .in = { TD_RANDN(2, 3, 4), TD_RANDN(5, 4), TD_RANDN(2, 3, 5) }, .attr = FLAGS(0, 1), .note = "one b for all" },
    { .in = { TD_RANDN(2, 4, 3), TD_RANDN(2, 4, 5), TD_RANDN(2, 3, 5) }, .attr = FLAGS(1, 0), .note = "batched" },
    { .in = { TD_RANDN(40, 24), TD_RANDN(24, 16), TD_RANDN(40, 16) }, .attr = FLAGS(0, 0), .note = "whole vectors" },
    { .in = { TD_RANDN(3, 0), TD_RANDN(0, 5), TD_RANDN(3, 5) }, .attr = FLAGS(0, 0), .note = "a sum over nothing" },
    TD_CASES_END
};

const td_op td_op_matmul_add = {
    .name       = "matmul_add",
    .inputs     = 3,
    .attr_bytes = sizeof(op_matmul_attr),
    .shape      = matmul_add_shape,
    .gradient   = matmul_add_gradient,
    .place      = matmul_add_place,
    .precision  = TD_PRODUCT,
    .cost       = matmul_cost,
    .prepare    = matmul_prepare,
    .release    = td_onednn_release,
    .cpu        = matmul_cpu,
    .cuda       = TD_CUDA(matmul_cuda, matmul_cuda_prepare, td_cublas_release),
    .print      = matmul_print,
    .cases      = matmul_add_cases,
};

static const td_case matmul_dbias_cases[] = {
    { .in = { TD_RANDN(4, 3), TD_RANDN(4, 5) }, .attr = FLAGS(1, 0) },
    { .in = { TD_RANDN(3, 4), TD_RANDN(5, 4) }, .attr = FLAGS(0, 1) },
    { .in = { TD_RANDN(40, 24), TD_RANDN(40, 16) }, .attr = FLAGS(1, 0), .note = "whole vectors" },
    { .in = { TD_RANDN(37, 29), TD_RANDN(37, 23) }, .attr = FLAGS(1, 0), .note = "no multiple of any tile" },
    { .in = { TD_RANDN(0, 3), TD_RANDN(0, 5) }, .attr = FLAGS(1, 0), .note = "sums over nothing" },
    { .in = { TD_RANDN(4, 3), TD_RANDN(4, 0) }, .attr = FLAGS(1, 0), .note = "nothing but the sums" },
    TD_CASES_END
};

const td_op td_op_matmul_dbias = {
    .name       = "matmul_dbias",
    .inputs     = 2,
    .attr_bytes = sizeof(op_matmul_attr),
    .shape      = matmul_dbias_shape,
    .gradient   = matmul_dbias_gradient,
    .place      = matmul_dbias_place,
    .precision  = TD_PRODUCT,
    .cost       = matmul_cost,
    .prepare    = matmul_prepare,
    .release    = td_onednn_release,
    .cpu        = matmul_cpu,
    .cuda       = TD_CUDA(matmul_cuda, matmul_cuda_prepare, td_cublas_release),
    .print      = matmul_print,
    .cases      = matmul_dbias_cases,
};

static const td_case matmul_dgelu_cases[] = {
    { .in = { TD_RANDN(3, 4), TD_RANDN(4, 5), TD_RANDN(3, 5) }, .attr = FLAGS(0, 0) },
    { .in = { TD_RANDN(40, 24), TD_RANDN(24, 16), TD_RANDN(40, 16) }, .attr = FLAGS(0, 0), .note = "whole vectors" },
    { .in = { TD_RANDN(4, 3), TD_RANDN(5, 4), TD_RANDN(3, 5) }, .attr = FLAGS(1, 1) },
    { .in = { TD_RANDN(0, 4), TD_RANDN(4, 8), TD_RANDN(0, 8) }, .attr = FLAGS(0, 0), .note = "no rows" },
    { .in = { TD_RANDN(3, 0), TD_RANDN(0, 5), TD_RANDN(3, 5) }, .attr = FLAGS(0, 0), .note = "a sum over nothing" },
    TD_CASES_END
};

const td_op td_op_matmul_dgelu = {
    .name       = "matmul_dgelu",
    .inputs     = 3,
    .attr_bytes = sizeof(op_matmul_attr),
    .shape      = matmul_dgelu_shape,
    .gradient   = matmul_dgelu_gradient,
    .place      = matmul_dgelu_place,
    .precision  = TD_PRODUCT,
    .cost       = matmul_cost,
    .prepare    = matmul_prepare,
    .release    = td_onednn_release,
    .cpu        = matmul_cpu,
    .cuda       = TD_CUDA(matmul_cuda, matmul_cuda_prepare, td_cublas_release),
    .print      = matmul_print,
    .cases      = matmul_dgelu_cases,
};

td_tensor td_matmul_at(td_tensor a, td_tensor b, int transpose_a, int transpose_b, td_here here)
{
    op_matmul_attr attr = { .transpose_a = transpose_a != 0, .transpose_b = transpose_b != 0, .out_dtype = -1 };
    return td_record(&td_op_matmul, here, 2, (td_tensor[]){ a, b }, &attr);
}
