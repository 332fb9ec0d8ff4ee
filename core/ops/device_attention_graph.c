/* Attention as graphs of cuDNN's operations, which it compiles into one kernel forward and a few backward: see attention_graph.h.
 *
 * The formulas are attention.c's. Operands are (b, h, s, d) with strides, so rows of q, k and v that are packed are read as they lie.
 * The gradient of q is summed in f32 in the workspace by many blocks at once, in no fixed order.
 */
#include "core/ops/attention_graph.h"

#include "core/device_cuda.h"

#include <math.h>

enum { Q = 1, K, V, O, LOG_SUMS, DO, DQ, DK, DV, INNER, DQ_SUM, SCALE, LOWEST, SHIFT, ONE, IDS };

typedef struct builder {
    td_cudnn_graph graph;
    const td_attention_form *form;
    cudnnDataType_t type;
    int64_t scores[4], column[4], queries[4]; /* (b, h, sq, skv), (b, h, sq, 1), (b, h, sq, d) */
} builder;

#define GRAPH(b) (&(b)->graph)

/* ---- Parts of both */

static td_cudnn_tensor operand(builder *b, int id, const td_heads *x, int64_t heads, int64_t rows, int64_t columns)
{
    const int64_t dim[] = { b->form->at.batch, heads, rows, columns }, stride[] = { x->batch, x->head, x->row, 1 };
    return td_cudnn_stored(GRAPH(b), id, b->type, dim, stride);
}

/* The same memory with its last two dimensions the other way around. */
static td_cudnn_tensor turned_operand(builder *b, int id, const td_heads *x, int64_t heads, int64_t rows, int64_t columns)
{
    const int64_t dim[] = { b->form->at.batch, heads, columns, rows }, stride[] = { x->batch, x->head, 1, x->row };
    return td_cudnn_stored(GRAPH(b), id, b->type, dim, stride);
}

/* Dense f32 in memory. */
static td_cudnn_tensor kept(builder *b, int id, const int64_t dim[4])
{
    const int64_t stride[] = { dim[1] * dim[2] * dim[3], dim[2] * dim[3], dim[3], 1 };
    return td_cudnn_stored(GRAPH(b), id, CUDNN_DATA_FLOAT, dim, stride);
}

/* mode(x, y) in f32, of x's shape, in no memory. */
static td_cudnn_tensor applied(builder *b, cudnnPointwiseMode_t mode, td_cudnn_tensor x, const td_cudnn_tensor *y)
{
    td_cudnn_tensor to = td_cudnn_virtual(GRAPH(b), CUDNN_DATA_FLOAT, x.dim);
    td_cudnn_pointwise(GRAPH(b), mode, CUDNN_DATA_FLOAT, x, y, NULL, to);
    return to;
}

/* Scores, where a query sees the key; the lowest number elsewhere. */
static td_cudnn_tensor masked(builder *b, td_cudnn_tensor scores)
{
    td_cudnn_graph *g = GRAPH(b);
    td_cudnn_tensor row = td_cudnn_virtual(g, CUDNN_DATA_INT32, scores.dim), key = td_cudnn_virtual(g, CUDNN_DATA_INT32, scores.dim);
    td_cudnn_index(g, 2, scores, row);
    if (b->form->at.keys != b->form->at.rows) {
        td_cudnn_tensor shift = td_cudnn_scalar(g, SHIFT, CUDNN_DATA_INT32), position = td_cudnn_virtual(g, CUDNN_DATA_INT32, scores.dim);
        td_cudnn_pointwise(g, CUDNN_POINTWISE_ADD, CUDNN_DATA_INT32, row, &shift, NULL, position);
        row = position;
    }
    td_cudnn_index(g, 3, scores, key);
    td_cudnn_tensor sees = td_cudnn_virtual(g, CUDNN_DATA_BOOLEAN, scores.dim), to = td_cudnn_virtual(g, CUDNN_DATA_FLOAT, scores.dim);
    td_cudnn_pointwise(g, CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN, row, &key, NULL, sees);
    td_cudnn_tensor lowest = td_cudnn_scalar(g, LOWEST, CUDNN_DATA_FLOAT);
    td_cudnn_pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, scores, &lowest, &sees, to);
    return to;
}

static td_cudnn_tensor products(builder *b, td_cudnn_tensor q, td_cudnn_tensor k)
{
    td_cudnn_tensor s = td_cudnn_virtual(GRAPH(b), CUDNN_DATA_FLOAT, b->scores);
    td_cudnn_matmul(GRAPH(b), q, k, s);
    return s;
}

/* ---- Forward */

static void forward(builder *b)
{
    const td_attention_layout *at = &b->form->at;
    td_cudnn_graph *g = GRAPH(b);
    td_cudnn_tensor q = operand(b, Q, &at->q, at->heads, at->rows, at->depth);
    td_cudnn_tensor k = turned_operand(b, K, &at->key, at->shared, at->keys, at->depth);
    td_cudnn_tensor v = operand(b, V, &at->value, at->shared, at->keys, at->values);
    td_cudnn_tensor o = operand(b, O, &at->o, at->heads, at->rows, at->values);
    td_cudnn_tensor log_sums = kept(b, LOG_SUMS, b->column), scale = td_cudnn_scalar(g, SCALE, CUDNN_DATA_FLOAT);

    td_cudnn_tensor s = products(b, q, k);
    s = applied(b, CUDNN_POINTWISE_MUL, s, &scale);
    if (b->form->causal) s = masked(b, s);
    td_cudnn_tensor most = td_cudnn_virtual(g, CUDNN_DATA_FLOAT, b->column), sum = td_cudnn_virtual(g, CUDNN_DATA_FLOAT, b->column);
    td_cudnn_reduce(g, CUDNN_REDUCE_TENSOR_MAX, s, most);
    s = applied(b, CUDNN_POINTWISE_SUB, s, &most);
    td_cudnn_tensor e = applied(b, CUDNN_POINTWISE_EXP, s, NULL);
    td_cudnn_reduce(g, CUDNN_REDUCE_TENSOR_ADD, e, sum);
    td_cudnn_tensor log_sum = applied(b, CUDNN_POINTWISE_LOG, sum, NULL);
    td_cudnn_pointwise(g, CUDNN_POINTWISE_ADD, CUDNN_DATA_FLOAT, most, &log_sum, NULL, log_sums);
    td_cudnn_tensor p = td_cudnn_virtual(g, b->type, b->scores);
    td_cudnn_pointwise(g, CUDNN_POINTWISE_DIV, CUDNN_DATA_FLOAT, e, &sum, NULL, p);
    td_cudnn_matmul(g, p, v, o);
}

/* ---- Backward */

/* `sum` (b, heads, keys, columns) of a product a b over all heads that share the keys'. */
static void sum_over_heads(builder *b, td_cudnn_tensor a, td_cudnn_tensor c, td_cudnn_tensor sum, int64_t columns)
{
    const td_attention_layout *at = &b->form->at;
    const int64_t whole[] = { at->batch, at->heads, at->keys, columns };
    if (at->heads == at->shared) {
        td_cudnn_matmul(GRAPH(b), a, c, sum);
        return;
    }
    td_cudnn_tensor each = td_cudnn_virtual(GRAPH(b), b->type, whole);
    td_cudnn_matmul(GRAPH(b), a, c, each);
    td_cudnn_reduce(GRAPH(b), CUDNN_REDUCE_TENSOR_ADD, each, sum);
}

/* (b, h, sq, skv) as (b, h, skv, sq), in the operands' dtype. */
static td_cudnn_tensor turned(builder *b, td_cudnn_tensor x)
{
    const int64_t dim[] = { x.dim[0], x.dim[1], x.dim[3], x.dim[2] };
    td_cudnn_tensor to = td_cudnn_turned(GRAPH(b), b->type, dim);
    td_cudnn_reshape(GRAPH(b), x, to);
    return to;
}

/* sum(do o) of each query, kept in the workspace. */
static td_cudnn_tensor inner_products(builder *b, td_cudnn_tensor o, td_cudnn_tensor dy)
{
    td_cudnn_graph *g = GRAPH(b);
    td_cudnn_tensor product = applied(b, CUDNN_POINTWISE_MUL, dy, &o), sum = td_cudnn_virtual(g, CUDNN_DATA_FLOAT, b->column);
    td_cudnn_reduce(g, CUDNN_REDUCE_TENSOR_ADD, product, sum);
    td_cudnn_tensor one = td_cudnn_scalar(g, ONE, CUDNN_DATA_FLOAT), inner = kept(b, INNER, b->column);
    td_cudnn_pointwise(g, CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, sum, &one, NULL, inner);
    return inner;
}

/* The probabilities again, from the scores' logsumexp. */
static td_cudnn_tensor probabilities(builder *b, td_cudnn_tensor q, td_cudnn_tensor turned_k, td_cudnn_tensor scale)
{
    td_cudnn_tensor s = products(b, q, turned_k), log_sums = kept(b, LOG_SUMS, b->column);
    s = applied(b, CUDNN_POINTWISE_MUL, s, &scale);
    if (b->form->causal) s = masked(b, s);
    s = applied(b, CUDNN_POINTWISE_SUB, s, &log_sums);
    return applied(b, CUDNN_POINTWISE_EXP, s, NULL);
}

static void backward(builder *b)
{
    const td_attention_layout *at = &b->form->at;
    td_cudnn_graph *g = GRAPH(b);
    td_cudnn_tensor q = operand(b, Q, &at->q, at->heads, at->rows, at->depth), o = operand(b, O, &at->o, at->heads, at->rows, at->values);
    td_cudnn_tensor turned_k = turned_operand(b, K, &at->key, at->shared, at->keys, at->depth);
    td_cudnn_tensor turned_v = turned_operand(b, V, &at->value, at->shared, at->keys, at->values);
    td_cudnn_tensor dy = operand(b, DO, &at->dy, at->heads, at->rows, at->values),
                    dq = operand(b, DQ, &at->dq, at->heads, at->rows, at->depth);
    td_cudnn_tensor dk = operand(b, DK, &at->dk, at->shared, at->keys, at->depth),
                    dv = operand(b, DV, &at->dv, at->shared, at->keys, at->values);
    td_cudnn_tensor dq_sum = kept(b, DQ_SUM, b->queries), scale = td_cudnn_scalar(g, SCALE, CUDNN_DATA_FLOAT);

    td_cudnn_tensor inner = inner_products(b, o, dy), p = probabilities(b, q, turned_k, scale);
    sum_over_heads(b, turned(b, p), dy, dv, at->values);

    td_cudnn_tensor ds = products(b, dy, turned_v);
    ds = applied(b, CUDNN_POINTWISE_SUB, ds, &inner);
    ds = applied(b, CUDNN_POINTWISE_MUL, ds, &p);
    td_cudnn_tensor scaled = td_cudnn_virtual(g, b->type, b->scores);
    td_cudnn_pointwise(g, CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, ds, &scale, NULL, scaled);
    sum_over_heads(b, turned(b, scaled), q, dk, at->depth);

    const int64_t keys[] = { at->batch, at->shared, at->keys, at->depth };
    td_cudnn_tensor k = td_cudnn_virtual(g, b->type, keys);
    td_cudnn_reshape(g, turned_k, k);
    td_cudnn_matmul(g, scaled, k, dq_sum);
    td_cudnn_pointwise(g, CUDNN_POINTWISE_IDENTITY, CUDNN_DATA_FLOAT, dq_sum, NULL, NULL, dq);
}

/* ---- Plans */

bool td_attention_graph_serves(const td_kernel *k)
{
    const td_attention_attr *attr = k->attr;
    bool is_backward = k->op == &td_op_attention_gradient, narrow = td_is_narrow(k->in[0].dtype);
    td_attention_layout at = td_attention_layout_of(k);
    for (int i = 0; is_backward && i < k->outputs; i++) narrow = narrow && k->out[i].dtype == k->in[0].dtype;
    bool sizes = at.batch && at.heads && at.rows > 1 && at.keys >= at.rows && at.depth == at.values && at.depth % 8 == 0 && at.depth &&
                 at.depth <= 128;
    return narrow && td_attention_aligned(k, &at) && sizes && attr->p == 0 && !attr->window && !attr->lengths && !attr->positions;
}

td_attention_form td_attention_form_of(const td_kernel *k)
{
    return (td_attention_form){ .at = td_attention_layout_of(k),
                                .dtype = k->in[0].dtype,
                                .causal = ((const td_attention_attr *)k->attr)->causal,
                                .backward = k->op == &td_op_attention_gradient };
}

static void add_heads(td_text *key, const td_heads *x)
{
    td_text_add(key, " %lld,%lld,%lld", (long long)x->batch, (long long)x->head, (long long)x->row);
}

/* All that a plan depends on. */
static void add_key(td_text *key, const td_attention_form *form)
{
    const td_attention_layout *at = &form->at;
    td_text_add(key, "attention%s%s %s (%lld, %lld, %lld, %lld) of %lld keys, %lld heads", form->backward ? " gradient" : "",
                form->causal ? " causal" : "", td_dtype_name(form->dtype), (long long)at->batch, (long long)at->heads, (long long)at->rows,
                (long long)at->depth, (long long)at->keys, (long long)at->shared);
    const td_heads *heads[] = { &at->q, &at->key, &at->value, &at->o, &at->dy, &at->dq, &at->dk, &at->dv };
    for (int i = 0; i < (form->backward ? 8 : 4); i++) add_heads(key, heads[i]);
}

static const td_cudnn_plan *build(td_context *td, const td_attention_form *form, const char *key)
{
    const td_attention_layout *at = &form->at;
    builder b = { .form = form, .type = form->dtype == TD_BF16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF,
                  .scores = { at->batch, at->heads, at->rows, at->keys }, .column = { at->batch, at->heads, at->rows, 1 },
                  .queries = { at->batch, at->heads, at->rows, at->depth } };
    td_cudnn_begin(td, GRAPH(&b));
    if (form->backward)
        backward(&b);
    else
        forward(&b);
    const td_cudnn_plan *plan = td_cudnn_build(GRAPH(&b), key);
    if (plan && !plan->plan)
        td_message(td, TD_LOG_WARNING, "cuDNN %lld has no plan for %.*s (%s): Tandem's own kernel computes it",
                   (long long)td_cudnn_version(td), (int)strcspn(key, ","), key, b.graph.reason);
    return plan;
}

const td_cudnn_plan *td_attention_plan(td_context *td, const td_attention_form *form)
{
    td_text key = { .td = td };
    add_key(&key, form);
    const td_cudnn_plan *plan = NULL;
    if (td->error == TD_OK) plan = td_cudnn_find(td, key.text);
    if (!plan && td->error == TD_OK) plan = build(td, form, key.text);
    td_free(td, key.text, key.room, "host");
    return plan;
}

/* ---- Running */

/* In the workspace: the plan's own, then sum(do o), then the sums of dq; each at a multiple of 256 bytes. */
typedef struct parts {
    int64_t inner, dq_sum, bytes;
} parts;

static int64_t rounded(int64_t bytes) { return td_round_up(bytes, 256); }

static parts parts_of(const td_attention_form *form, const td_cudnn_plan *plan)
{
    int64_t queries = form->at.batch * form->at.heads * form->at.rows, size = (int64_t)sizeof(float);
    parts p = { .inner = rounded(plan->workspace_bytes) };
    p.dq_sum = p.inner + (form->backward ? rounded(queries * size) : 0);
    p.bytes = p.dq_sum + (form->backward ? queries * form->at.depth * size : 0);
    return p;
}

int64_t td_attention_plan_bytes(const td_attention_form *form, const td_cudnn_plan *plan) { return parts_of(form, plan).bytes; }

int64_t td_attention_foretold_bytes(const td_attention_form *form)
{
    const td_attention_layout *at = &form->at;
    td_cudnn_plan plan = { .workspace_bytes = 256 };
    if (form->backward && at->heads != at->shared)
        plan.workspace_bytes += at->batch * at->heads * at->keys * (at->depth + at->values) * td_dtype_size(form->dtype);
    return parts_of(form, &plan).bytes;
}

static void *head_zero(const td_arg *x, const td_heads *heads) { return td_arg_at(x, heads->at); }

void td_attention_plan_run(const td_kernel *k, const td_cudnn_plan *plan)
{
    const td_attention_attr *attr = k->attr;
    td_attention_form form = td_attention_form_of(k);
    const td_attention_layout *at = &form.at;
    parts p = parts_of(&form, plan);
    bool packed = attr->rows & TD_ATTENTION_PACKED;
    float scale = (float)attr->scale, lowest = -INFINITY, one = 1;
    int32_t shift = (int32_t)(at->keys - at->rows);
    char *room = k->workspace;
    int64_t ids[IDS] = { Q, K, V, SCALE, O, LOG_SUMS };
    void *pointers[IDS] = { head_zero(&k->in[0], &at->q), head_zero(&k->in[1], &at->key), head_zero(&k->in[2], &at->value), &scale };
    pointers[4] = form.backward ? head_zero(&k->in[3], &at->o) : head_zero(&k->out[0], &at->o);
    pointers[5] = form.backward ? k->in[4].data : k->out[1].data;
    int count = 6;
#define GIVE(id, pointer) (ids[count] = (id), pointers[count] = (pointer), count++)
    if (form.causal) GIVE(LOWEST, &lowest);
    if (form.causal && at->keys != at->rows) GIVE(SHIFT, &shift);
    if (form.backward) {
        GIVE(DO, head_zero(&k->in[5], &at->dy));
        GIVE(DQ, head_zero(&k->out[0], &at->dq));
        GIVE(DK, head_zero(&k->out[packed ? 0 : 1], &at->dk));
        GIVE(DV, head_zero(&k->out[packed ? 0 : 2], &at->dv));
        GIVE(INNER, room + p.inner);
        GIVE(DQ_SUM, room + p.dq_sum);
        GIVE(ONE, &one);
        if (!td_clear_bytes_cuda(k->run->td, room + p.dq_sum, p.bytes - p.dq_sum, td_stream(k))) return;
    }
#undef GIVE
    td_cudnn_run(k->run->td, plan, count, ids, pointers, room, td_stream(k));
}
