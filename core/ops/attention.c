/* attention: o = dropout(softmax(scale q k^T over the visible keys)) v.
 *
 *     q (B, H, T, d)  k (B, Hkv, S, d)  v (B, Hkv, S, e)   ->   o (B, H, T, e), logsumexp of the scores (B, H, T) wide
 *
 * H is a multiple of Hkv: H / Hkv consecutive heads share keys and values. Query i of a sequence is at position
 * p = S - T + i, or positions[b] + i; it sees key j if j < lengths[b], if j <= p where causal, and if |p - j| < window.
 * A query that sees no key gives zeros. Element (b, h, i, j) of the dropout mask is keyed by its index in the global (B, H, T, S).
 *
 * Computed in f32 from 16-bit operands, in f64 for f64. Only o and the logsumexp are kept for the backward (Dao, Fu,
 * Ermon, Rudra, Re: "FlashAttention", 2022): with P the probabilities and M the scaled mask,
 *     dv = (P M)^T do,   dP = M (do v^T),   dS = P (dP - sum(do o)),   dq = scale dS k,   dk = scale dS^T q.
 */
#include "core/ops/attention_cuda.h"

#include "core/ops/derive.h"

#include <math.h>

/* ---- Shapes --------------------------------------------------------------------------------------------- */

static bool same_prefix(td_shape a, td_shape b, int dims)
{
    bool same = true;
    for (int i = 0; i < dims; i++)
        same = same && a.dim[i] == b.dim[i];
    return same;
}

/* q, k, v are inputs 0 to 2, what the attributes add begins at `extra`. */
static bool attention_fits(const td_call *call, int extra)
{
    const td_attention_attr *attr = call->attr;
    td_shape q = call->in[0]->shape, k = call->in[1]->shape, v = call->in[2]->shape;
    td_dtype dtype = (td_dtype)call->in[0]->dtype;
    char text[3][TD_SHAPE_TEXT];
    bool fits = q.rank == 4 && k.rank == 4 && v.rank == 4 && q.dim[0] == k.dim[0] && same_prefix(k, v, 3) &&
                q.dim[3] == k.dim[3] && k.dim[1] > 0 && q.dim[1] % k.dim[1] == 0;
    if (!fits)
        return td_call_fail(call, "q %s, k %s and v %s do not fit (B, H, T, d), (B, Hkv, S, d), (B, Hkv, S, e) with H a "
                            "multiple of Hkv",
                            td_shape_text(q, text[0]), td_shape_text(k, text[1]), td_shape_text(v, text[2]));
    if (!td_is_float(dtype) || call->in[1]->dtype != dtype || call->in[2]->dtype != dtype)
        return td_call_fail(call, "needs q, k and v of one float dtype, got %s, %s and %s", td_dtype_name(dtype),
                            td_dtype_name((td_dtype)call->in[1]->dtype), td_dtype_name((td_dtype)call->in[2]->dtype));
    for (int i = extra; i < extra + attr->lengths + attr->positions; i++)
        if (call->in[i]->dtype != TD_I32 || !td_shape_equal(call->in[i]->shape, TD_SHAPE(q.dim[0])))
            return td_call_fail(call, "%s must be (%lld) i32, got %s %s",
                                i == extra && attr->lengths ? "lengths" : "positions", (long long)q.dim[0],
                                td_shape_text(call->in[i]->shape, text[0]),
                                td_dtype_name((td_dtype)call->in[i]->dtype));
    return true;
}

static bool attention_shape(td_call *call)
{
    if (!attention_fits(call, 3))
        return false;
    td_shape q = call->in[0]->shape;
    td_dtype dtype = (td_dtype)call->in[0]->dtype;
    call->outputs = 2;
    call->out[0].shape = TD_SHAPE(q.dim[0], q.dim[1], q.dim[2], call->in[2]->shape.dim[3]);
    call->out[0].dtype = (uint8_t)dtype;
    call->out[1] = (td_value){ .shape = TD_SHAPE(q.dim[0], q.dim[1], q.dim[2]),
                               .dtype = (uint8_t)td_wide_dtype(dtype) };
    return true;
}

static bool gradient_shape(td_call *call)
{
    if (!attention_fits(call, 6))
        return false;
    call->outputs = 3;
    for (int k = 0; k < 3; k++)
        call->out[k] = (td_value){ .shape = call->in[k]->shape,
                                   .dtype = (uint8_t)td_wide_dtype((td_dtype)call->in[0]->dtype) };
    return true;
}

/* Sequences and heads are kept; heads that share keys only if the ranks divide the keys' heads. */
static void attention_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    const td_id *inputs = td_node_inputs(p, n);
    int64_t heads = td_value_at(p, inputs[0])->shape.dim[1], shared = td_value_at(p, inputs[1])->shape.dim[1];
    memset(rule, 0, sizeof *rule);
    if (heads != shared)
        rule->even[2] = shared;
    for (int i = 0; i < TD_RULE_INPUTS; i++) { /* lengths and positions have the first dimension only */
        rule->in[i][0] = 1;
        rule->in[i][1] = 2;
    }
    memcpy(rule->out, rule->in, sizeof rule->out);
}

static void attention_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_attention_attr *attr = td_node_attr(p, n);
    td_print line = { .to = to, .room = room };
    td_print_add(&line, "%sscale %g", attr->causal ? "causal " : "", attr->scale);
    if (attr->window)
        td_print_add(&line, " window %lld", (long long)attr->window);
    if (attr->p > 0)
        td_print_add(&line, " dropout %g", attr->p);
    if (attr->rows)
        td_print_add(&line, " rows%s%s%s%s%s", attr->rows & TD_ATTENTION_Q ? " q" : "", attr->rows & TD_ATTENTION_K ? " k" : "",
                     attr->rows & TD_ATTENTION_V ? " v" : "", attr->rows & TD_ATTENTION_O ? " o" : "",
                     attr->rows & TD_ATTENTION_PACKED ? " packed" : "");
}

/* Pairs of a query and a key it sees, as far as the shapes tell. */
static int64_t pairs_of(const td_attention_attr *attr, int64_t queries, int64_t keys)
{
    int64_t pairs = 0;
    for (int64_t i = 0; i < queries; i++) {
        int64_t at = attr->positions ? i : keys - queries + i;
        int64_t begin = attr->window && at >= attr->window ? at - attr->window + 1 : 0, end = keys;
        if (attr->causal && at + 1 < end)
            end = at + 1;
        if (attr->window && at + attr->window < end)
            end = at + attr->window;
        pairs += end > begin ? end - begin : 0;
    }
    return pairs;
}

/* Two products of the forward; the backward makes one of them again, and four others. */
static td_cost attention_cost(const td_kernel *k)
{
    const td_attention_attr *attr = k->attr;
    td_shape q = k->in[0].shape, keys = k->in[1].shape, v = k->in[2].shape;
    int64_t heads = attr->rows ? attr->heads : q.dim[1], depth = attr->rows ? attr->depth : q.dim[3];
    int64_t values = attr->rows ? attr->values : v.dim[3];
    int64_t pairs = q.dim[0] * heads * pairs_of(attr, q.dim[attr->rows & TD_ATTENTION_Q ? 1 : 2],
                                                keys.dim[attr->rows & TD_ATTENTION_K ? 1 : 2]);
    td_cost cost = td_cost_of(k, 0);
    cost.flops = 2 * pairs * (k->op == &td_op_attention ? depth + values : 3 * depth + 2 * values);
    const int64_t columns[3] = { heads * depth, attr->shared * depth, attr->shared * values };
    for (int i = 0; i < 3; i++) /* of rows that hold more, its own columns are read */
        if (attr->rows & TD_ATTENTION_Q << i)
            cost.bytes -= td_shape_product(k->in[i].shape, 0, 2) * (td_arg_last(&k->in[i]) - columns[i]) * td_dtype_size(k->in[i].dtype);
    return cost;
}

/* ---- As primitives ---------------------------------------------------------------------------------------- */

typedef struct parts {
    td_tensor q, k, v;                        /* wide; q (B, Hkv, G T, d), so that heads that share keys are rows */
    td_tensor p, mask;                        /* probabilities and dropout, (B, Hkv, G T, S); mask id TD_NONE: none */
} parts;

/* i32 (B) as numbers (B, 1, 1, 1). */
static td_tensor per_sequence(td_tensor t, td_dtype dtype, td_here here)
{
    return td_reshape_at(td_cast_at(t, dtype, here), TD_SHAPE(-1, 1, 1, 1), here);
}

/* 1 where a query sees a key, (B or 1, 1, T, S); id TD_NONE: everywhere. */
static td_tensor visible(const td_gradient_call *call, int extra, int64_t queries, int64_t keys, td_dtype dtype)
{
    const td_attention_attr *attr = call->attr;
    td_here here = call->here;
    td_tensor none = td_no_tensor(call->td), lengths = none, positions = none;
    if (attr->lengths)
        lengths = per_sequence(call->in[extra++], dtype, here);
    if (attr->positions)
        positions = per_sequence(call->in[extra], dtype, here);
    td_tensor at = td_reshape_at(td_iota_at(call->td, dtype, queries, here), TD_SHAPE(1, 1, queries, 1), here);
    td_tensor key = td_reshape_at(td_iota_at(call->td, dtype, keys, here), TD_SHAPE(1, 1, 1, keys), here);
    at = td_add_at(at, attr->positions ? positions : td_constant_like(at, (double)(keys - queries), here), here);
    td_tensor distance = td_sub_at(at, key, here), seen[3];
    int count = 0;
    if (attr->causal)
        seen[count++] = td_less_equal_at(td_constant_like(key, 0, here), distance, here);
    if (attr->window)
        seen[count++] = td_less_at(td_abs_at(distance, here), td_constant_like(key, (double)attr->window, here), here);
    if (attr->lengths)
        seen[count++] = td_less_at(key, lengths, here);
    for (int i = 1; i < count; i++)
        seen[0] = td_mul_at(seen[0], seen[i], here);
    return count ? seen[0] : none;
}

/* exp(s - max) over the keys seen, over its sum; 0 in a row that sees none. */
static td_tensor masked_softmax(td_tensor s, td_tensor seen, td_here here)
{
    if (td_failed(seen))
        return td_softmax_at(s, here);
    if (td_shape_elements(td_shape_at(s)) == 0)
        return s; /* nothing to take a maximum of */
    s = td_where_at(seen, s, td_constant_like(s, -1e30, here), here);
    td_tensor max = td_detach_at(td_max_at(s, TD_LAST, TD_KEEP, here), here);
    td_tensor e = td_mul_at(td_exp_at(td_sub_at(s, max, here), here), seen, here);
    td_tensor total = td_sum_at(e, TD_LAST, TD_KEEP, here);
    total = td_add_at(total, td_equal_at(total, td_constant_like(total, 0, here), here), here);
    return td_div_at(e, total, here);
}

static parts parts_of(const td_gradient_call *call, int extra)
{
    const td_attention_attr *attr = call->attr;
    td_here here = call->here;
    td_dtype dtype = td_wide_dtype(td_dtype_at(call->in[0]));
    td_shape q = td_shape_at(call->in[0]), k = td_shape_at(call->in[1]);
    td_shape whole = TD_SHAPE(q.dim[0], q.dim[1], q.dim[2], k.dim[2]);
    int64_t rows = q.dim[1] / k.dim[1] * q.dim[2];
    td_shape grouped = TD_SHAPE(k.dim[0], k.dim[1], rows, k.dim[2]);
    parts a = { .mask = td_no_tensor(call->td) };
    a.k = td_as(call->in[1], dtype, here);
    a.v = td_as(call->in[2], dtype, here);
    a.q = td_reshape_at(td_as(call->in[0], dtype, here), TD_SHAPE(k.dim[0], k.dim[1], rows, q.dim[3]), here);
    td_tensor s = td_matmul_at(a.q, a.k, 0, 1, here);
    s = td_reshape_at(td_mul_at(s, td_constant_like(s, attr->scale, here), here), whole, here);
    a.p = td_reshape_at(masked_softmax(s, visible(call, extra, q.dim[2], k.dim[2], dtype), here), grouped, here);
    if (attr->p > 0)
        a.mask = td_reshape_at(td_dropout_mask_at(call->td, dtype, whole, attr->p, attr->key, here), grouped, here);
    return a;
}

static td_tensor dropped(const parts *a, td_tensor x, td_here here)
{
    return td_failed(a->mask) ? x : td_mul_at(x, a->mask, here);
}

static td_tensor attention_decomposed(const td_gradient_call *call)
{
    td_shape out = td_shape_at(call->in[0]);
    out.dim[3] = td_shape_at(call->in[2]).dim[3];
    parts a = parts_of(call, 3);
    td_tensor o = td_matmul_at(dropped(&a, a.p, call->here), a.v, 0, 0, call->here);
    return td_as(td_reshape_at(o, out, call->here), td_dtype_at(call->in[0]), call->here);
}

/* dq, dk, dv of q, k, v and do; o and the logsumexp are functions of them. */
static void gradient_parts(const td_gradient_call *call, td_tensor *out)
{
    const td_attention_attr *attr = call->attr;
    td_here here = call->here;
    parts a = parts_of(call, 6);
    td_shape rows = td_shape_at(a.q);
    rows.dim[3] = td_shape_at(a.v).dim[3];
    td_tensor dy = td_reshape_at(td_as(call->in[5], td_dtype_at(a.q), here), rows, here);
    td_tensor dp = dropped(&a, td_matmul_at(dy, a.v, 0, 1, here), here);
    td_tensor mean = td_sum_at(td_mul_at(dp, a.p, here), TD_LAST, TD_KEEP, here);
    td_tensor ds = td_mul_at(a.p, td_sub_at(dp, mean, here), here);
    ds = td_mul_at(ds, td_constant_like(ds, attr->scale, here), here);
    out[0] = td_reshape_at(td_matmul_at(ds, a.k, 0, 0, here), td_shape_at(call->in[0]), here);
    out[1] = td_matmul_at(ds, a.q, 1, 0, here);
    out[2] = td_matmul_at(dropped(&a, a.p, here), dy, 1, 0, here);
}

/* ---- Gradients ------------------------------------------------------------------------------------------ */

static void attention_gradient(const td_gradient_call *g)
{
    td_tensor in[8] = { g->in[0], g->in[1], g->in[2], g->out[0], g->out[1], g->dout[0] };
    if (td_failed(g->dout[0]))
        return;
    int n = 6;
    for (int i = 3; i < g->inputs; i++)
        in[n++] = g->in[i];
    td_tensor first = td_record(&td_op_attention_gradient, g->here, n, in, g->attr);
    for (int i = 0; i < 3; i++)
        if (g->wanted[i])
            td_gradient_set(g, i, td_as(td_output(first, i), td_dtype_at(g->in[i]), g->here));
}

static void gradient_gradient(const td_gradient_call *g)
{
    td_gradient_by_parts(g, gradient_parts);
}

/* ---- Descriptors ---------------------------------------------------------------------------------------- */

enum { FARTHEST = 1 << 30 }; /* keys: any window beyond it is the same */

#define ATTENTION(...) &(const td_attention_attr){ .scale = 0.5, __VA_ARGS__ }

static const td_case attention_cases[] = {
    { .in = { TD_RANDN(2, 2, 5, 4), TD_RANDN(2, 2, 5, 4), TD_RANDN(2, 2, 5, 4) }, .attr = ATTENTION(.p = 0) },
    { .in = { TD_RANDN(12, 1, 7, 3), TD_RANDN(12, 1, 7, 3), TD_RANDN(12, 1, 7, 5) }, .attr = ATTENTION(.causal = 1) },
    { .in = { TD_RANDN(2, 4, 3, 4), TD_RANDN(2, 2, 6, 4), TD_RANDN(2, 2, 6, 4) }, .attr = ATTENTION(.causal = 1),
      .note = "heads share keys, more keys than queries" },
    { .in = { TD_RANDN(4, 2, 5, 4), TD_RANDN(4, 1, 5, 4), TD_RANDN(4, 1, 5, 4), TD_LABELS(6, 4) },
      .attr = ATTENTION(.lengths = 1), .note = "lengths" },
    { .in = { TD_RANDN(4, 2, 3, 4), TD_RANDN(4, 2, 9, 4), TD_RANDN(4, 2, 9, 4), TD_LABELS(7, 4) },
      .attr = ATTENTION(.causal = 1, .positions = 1), .note = "positions" },
    { .in = { TD_RANDN(2, 2, 9, 4), TD_RANDN(2, 2, 9, 4), TD_RANDN(2, 2, 9, 4) },
      .attr = ATTENTION(.causal = 1, .window = 3), .note = "a causal window" },
    { .in = { TD_RANDN(2, 2, 9, 4), TD_RANDN(2, 2, 9, 4), TD_RANDN(2, 2, 9, 4) }, .attr = ATTENTION(.window = 2),
      .note = "a window to both sides" },
    { .in = { TD_RANDN(4, 2, 9, 4), TD_RANDN(4, 2, 9, 4), TD_RANDN(4, 2, 9, 4) },
      .attr = ATTENTION(.causal = 1, .p = 0.25, .key = 77), .note = "dropout" },
    { .in = { TD_RANDN(2, 4, 70, 17), TD_RANDN(2, 2, 150, 17), TD_RANDN(2, 2, 150, 9) },
      .attr = ATTENTION(.causal = 1, .p = 0.1, .key = 5, .window = 90), .note = "several blocks" },
    { .in = { TD_SCALED(30, 2, 1, 40, 8), TD_SCALED(30, 2, 1, 70, 8), TD_RANDN(2, 1, 70, 16) },
      .attr = ATTENTION(.p = 0), .note = "would overflow without the max", .no_gradient_check = true },
    { .in = { TD_RANDN(4, 4, 1, 17), TD_RANDN(4, 2, 150, 17), TD_RANDN(4, 2, 150, 9), TD_LABELS(151, 4) },
      .attr = ATTENTION(.causal = 1, .positions = 1), .note = "one query" },
    { .in = { TD_RANDN(4, 2, 1, 8), TD_RANDN(4, 2, 90, 8), TD_RANDN(4, 2, 90, 8), TD_LABELS(91, 4) },
      .attr = ATTENTION(.lengths = 1, .window = 70), .note = "one query, a window" },
    { .in = { TD_SCALED(30, 2, 1, 1, 8), TD_SCALED(30, 2, 1, 70, 8), TD_RANDN(2, 1, 70, 16) },
      .attr = ATTENTION(.p = 0), .note = "one query, would overflow without the max", .no_gradient_check = true },
    { .in = { TD_RANDN(2, 1, 3, 4), TD_RANDN(2, 1, 0, 4), TD_RANDN(2, 1, 0, 4) }, .attr = ATTENTION(.causal = 1),
      .note = "no keys: zeros", .no_gradient_check = true },
    TD_CASES_END
};

const td_op td_op_attention = {
    .name       = "attention",
    .inputs     = -1,
    .attr_bytes = sizeof(td_attention_attr),
    .shape      = attention_shape,
    .gradient   = attention_gradient,
    .decompose  = attention_decomposed,
    .place      = attention_place,
    .precision  = TD_PRODUCT,
    .cost       = attention_cost,
    .prepare    = td_attention_prepare,
    .cpu        = td_attention_cpu,
    .cuda       = TD_CUDA(td_attention_cuda, td_attention_cuda_prepare, td_prepared_free),
    .print      = attention_print,
    .cases      = attention_cases,
};

const td_op td_op_attention_gradient = {
    .name       = "attention_gradient",
    .inputs     = -1,
    .attr_bytes = sizeof(td_attention_attr),
    .shape      = gradient_shape,
    .gradient   = gradient_gradient,
    .place      = attention_place,
    .precision  = TD_PRODUCT,
    .cost       = attention_cost,
    .prepare    = td_attention_prepare,
    .cpu        = td_attention_gradient_cpu,
    .cuda       = TD_CUDA(td_attention_cuda, td_attention_cuda_prepare, td_prepared_free),
    .print      = attention_print,
};

td_tensor td_attention_at(td_tensor q, td_tensor k, td_tensor v, const td_attention_options *options, td_here here)
{
    static const td_attention_options defaults;
    const td_attention_options *o = options ? options : &defaults;
    if (td_failed(q) || td_failed(k) || td_failed(v))
        return td_failed(q) ? q : td_failed(k) ? k : v;
    if (!(o->dropout >= 0 && o->dropout < 1))
        return td_refuse(q.td, "attention", here, "dropout must be at least 0 and below 1, got %g", o->dropout);
    if (o->window < 0)
        return td_refuse(q.td, "attention", here, "the window must be at least 1, or 0 for none, got %lld",
                         (long long)o->window);
    td_shape shape = td_shape_at(q);
    td_attention_attr attr = { .scale = o->scale, .window = td_smaller(o->window, FARTHEST), .causal = o->causal,
                               .lengths = o->lengths.td != NULL, .positions = o->positions.td != NULL };
    if (o->scale == 0 && shape.rank == 4 && shape.dim[3] > 0)
        attr.scale = 1 / sqrt((double)shape.dim[3]);
    if (o->dropout > 0 && td_get_mode(q.td) == TD_TRAIN) {
        attr.p = o->dropout;
        attr.key = td_random_key(q.td);
    }
    td_tensor in[5] = { q, k, v };
    int n = 3;
    if (attr.lengths)
        in[n++] = o->lengths;
    if (attr.positions)
        in[n++] = o->positions;
    return td_record(&td_op_attention, here, n, in, &attr);
}
