/* Matrix products: choosing the library by dtype; see product.h. */
#include "core/ops/product.h"

#include <math.h>

#include "core/ops/convert.h"
#include "core/ops/few_rows.h"
#include "core/ops/gemm.h"
#include "core/ops/op.h"

#define TD_CODE(...) __VA_ARGS__
#define TD_FUNCTION static inline
#include "core/ops/pointwise_f64.h"

enum { ADD_ELEMENTS = 16 << 10 }; /* a task of an addition */

bool td_product_is_empty(const td_onednn_product *p)
{
    return p->batch == 0 || p->m == 0 || p->n == 0 || p->k == 0;
}

td_onednn_product td_product_typed(const td_kernel *k, td_onednn_product p)
{
    p.dtype = k->in[0].dtype;
    p.out_dtype = k->out[0].dtype;
    p.has_bias = k->inputs - p.adds - p.dgelu > 2;
    p.bias_dtype = p.has_bias ? k->in[2].dtype : p.dtype;
    return p;
}

/* ---- f16: few processors multiply it, so it is widened; what is accumulated in f32 is the same. */

/* The operands that the library reads, and C, as f32. */
static int widened_args(const td_kernel *k, const td_onednn_product *p, const td_arg *args[4])
{
    int count = 0;
    for (int i = 0; i < k->inputs - p->adds - p->dgelu; i++)
        args[count++] = &k->in[i];
    args[count++] = &k->out[0];
    return count;
}

static int64_t wide_bytes(const td_arg *arg)
{
    return (td_arg_elements(arg) * (int64_t)sizeof(float) + 63) / 64 * 64;
}

static bool prepare_f16(td_context *td, const td_kernel *k, td_onednn_product p, td_preparation *out)
{
    const td_arg *args[4];
    p.dtype = p.bias_dtype = p.out_dtype = TD_F32;
    if (!td_onednn_prepare(td, &p, out))
        return false;
    for (int i = widened_args(k, &p, args); i-- > 0;)
        out->workspace_bytes += wide_bytes(args[i]);
    return true;
}

static void run_f16(const td_kernel *k, const td_onednn_product *p)
{
    const td_arg *args[4];
    void *wide[4];
    int count = widened_args(k, p, args), c = count - 1;
    char *room = k->workspace;
    for (int i = 0; i < count; room += wide_bytes(args[i]), i++) {
        wide[i] = room;
        if (i < c)
            td_convert(TD_F32, wide[i], args[i]->dtype, args[i]->data, td_arg_elements(args[i]));
    }
    td_kernel inner = *k;
    inner.workspace = room; /* the library's own */
    td_onednn_run(&inner, wide[0], wide[1], c > 2 ? wide[2] : NULL, wide[c]);
    td_convert(args[c]->dtype, args[c]->data, TD_F32, wide[c], td_arg_elements(args[c]));
}

void td_product_sum_of(const td_kernel *k, td_product_sum *to)
{
    const op_matmul_attr *attr = k->attr;
    to->attr = (td_reduce_attr){ .axes = attr->transpose_a ? 1 << 0 : 1 << 1, .keep = TD_DROP };
    to->kernel = *k;
    to->kernel.op = &td_op_sum;
    to->kernel.attr = &to->attr;
    to->kernel.attr_bytes = sizeof to->attr;
    to->kernel.inputs = to->kernel.outputs = 1;
    to->kernel.out = &k->out[1];
    to->kernel.prepared = NULL;
}

static bool prepare_product(td_context *td, const td_kernel *k, const td_onednn_product *product, td_preparation *out)
{
    td_onednn_product p = *product;
    if (td_product_is_empty(&p))
        return true;
    if (p.dtype == TD_F64) {
        out->workspace_bytes = td_gemm_workspace(p.m, p.n, p.k);
        return true;
    }
    if (td_few_rows_fits(&p)) {
        out->workspace_bytes = td_few_rows_workspace(&p);
        return true;
    }
    if (p.dtype == TD_F16)
        return prepare_f16(td, k, p, out);
    return td_onednn_prepare(td, &p, out);
}

/* The workspace serves one after the other. */
bool td_product_prepare(td_context *td, const td_kernel *k, td_onednn_product p, td_preparation *out)
{
    td_product_sum sum;
    td_preparation of_sum = { 0 };
    p = td_product_typed(k, p);
    if (!prepare_product(td, k, &p, out))
        return false;
    if (!p.dbias)
        return true;
    td_product_sum_of(k, &sum);
    bool prepared = td_op_sum.prepare(td, &sum.kernel, &of_sum);
    if (of_sum.workspace_bytes > out->workspace_bytes)
        out->workspace_bytes = of_sum.workspace_bytes;
    return prepared;
}

/* The product over nothing: zeros, or the bias in every row. */
static void run_empty(const td_kernel *k, const td_onednn_product *p)
{
    const td_arg *c = &k->out[0];
    for (int64_t row = 0; row < p->batch * p->m; row++) {
        for (int64_t j = 0; j < p->n; j++) {
            double value = 0;
            if (p->has_bias)
                td_load_f64(&value, k->in[2].dtype, td_arg_at(&k->in[2], j), 1);
            td_store_f64(td_arg_at(c, row * p->n + j), c->dtype, &value, 1);
        }
    }
}

static void run_f64(const td_kernel *k, const td_onednn_product *p)
{
    for (int64_t i = 0; i < p->batch; i++) {
        td_gemm g = {
            .m = p->m, .n = p->n, .k = p->k,
            .a = (const double *)k->in[0].data + i * p->a_batch, .a_row = p->a_row, .a_column = p->a_column,
            .b = (const double *)k->in[1].data + i * p->b_batch, .b_row = p->b_row, .b_column = p->b_column,
            .bias = p->has_bias ? k->in[2].data : NULL,
            .c = (double *)k->out[0].data + i * p->m * p->n, .c_row = p->n,
        };
        td_gemm_f64(k->run, &g, k->workspace);
    }
}

/* out[0] += the last input. */
static void add_rows(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const td_arg *added = &k->in[k->inputs - 1], *c = &k->out[0];
    for (int64_t i = begin; i < end; i++) {
        double sum[2];
        td_load_f64(&sum[0], c->dtype, td_arg_at(c, i), 1);
        td_load_f64(&sum[1], added->dtype, td_arg_at(added, i), 1);
        sum[0] += sum[1];
        td_store_f64(td_arg_at(c, i), c->dtype, sum, 1);
    }
}

/* The parts of a GPU's fused calls as they are written: x as it is stored, then the function. No program for the CPU has them. */
static void apply_gelu(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const td_arg *c = &k->out[0];
    for (int64_t i = begin; i < end; i++) {
        double x;
        td_load_f64(&x, c->dtype, td_arg_at(c, i), 1);
        if (k->outputs > 1)
            td_store_f64(td_arg_at(&k->out[1], i), k->out[1].dtype, &x, 1);
        x = gelu_tanh(x);
        td_store_f64(td_arg_at(c, i), c->dtype, &x, 1);
    }
}

static void apply_dgelu(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    const td_arg *c = &k->out[0], *x = &k->in[k->inputs - 1];
    for (int64_t i = begin; i < end; i++) {
        double both[2];
        td_load_f64(&both[0], c->dtype, td_arg_at(c, i), 1);
        td_load_f64(&both[1], x->dtype, td_arg_at(x, i), 1);
        both[0] *= gelu_tanh_slope(both[1]);
        td_store_f64(td_arg_at(c, i), c->dtype, both, 1);
    }
}

bool td_product_adds(td_call *call, int added)
{
    td_value *c = &call->out[0];
    const td_value *d = call->in[added];
    char text[2][TD_SHAPE_TEXT];
    if (!td_shape_equal(d->shape, c->shape))
        return td_call_fail(call, "adds %s to a product %s", td_shape_text(d->shape, text[0]), td_shape_text(c->shape, text[1]));
    if (d->dtype != c->dtype && d->dtype != td_wide_dtype((td_dtype)call->in[0]->dtype))
        return td_call_fail(call, "adds %s to a product of %s", td_dtype_name((td_dtype)d->dtype),
                            td_dtype_name((td_dtype)call->in[0]->dtype));
    c->dtype = d->dtype;
    return true;
}

void td_product_run(const td_kernel *k, const td_onednn_product *product)
{
    td_onednn_product typed_product = td_product_typed(k, *product), *p = &typed_product;
    if (td_product_is_empty(p))
        run_empty(k, p);
    else if (k->in[0].dtype == TD_F64)
        run_f64(k, p);
    else if (td_few_rows_fits(p))
        td_few_rows(k, p);
    else if (k->in[0].dtype == TD_F16)
        run_f16(k, p);
    else
        td_onednn_run(k, k->in[0].data, k->in[1].data, p->has_bias ? k->in[2].data : NULL, k->out[0].data);
    if (p->adds)
        td_parallel_for(k->run, td_arg_elements(&k->out[0]), ADD_ELEMENTS, add_rows, (void *)k);
    if (p->gelu || p->dgelu)
        td_parallel_for(k->run, td_arg_elements(&k->out[0]), ADD_ELEMENTS, p->gelu ? apply_gelu : apply_dgelu, (void *)k);
    if (p->dbias) {
        td_product_sum sum;
        td_product_sum_of(k, &sum);
        td_op_sum.cpu(&sum.kernel);
    }
}

td_cost td_product_cost(const td_kernel *k, const td_onednn_product *p)
{
    td_cost cost = td_cost_of(k, 0);
    cost.flops = 2 * p->batch * p->m * p->n * p->k;
    return cost;
}
