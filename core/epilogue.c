/* epilogue: what is done to a result at once is done by whoever makes it, before it goes to memory.
 *
 *   - a norm that is only read in 16 bits is written in them;
 *   - the gradient of a cross-entropy gives the loss, which it computes anyway, where what comes back to it is known by then;
 *   - the gradient of a norm is added to the one that goes past it, and the sum also written in 16 bits where products read it so;
 *   - on a GPU a product is added to what its result is added to (a residual), from f32 sums;
 *   - on a GPU a layer's product of 16 bits takes gelu in its tanh form along, and the product that gives the gradient of gelu's result
 *     goes on through gelu; what gelu was of is kept in 16 bits as it would be without, but gelu itself is of the f32 sums;
 *   - on a GPU the product that gives a weight's gradient, from 16 bits, also gives that of the bias: sums of an operand it reads anyway.
 *
 * The node stands where the product or norm stood, so what is added must be made before it. Norms give the bits of the operations one by
 * one; a product with a bias is spared the rounding to 16 bits between.
 */
#include "core/internal.h"
#include "core/ops/norm.h"
#include "core/ops/reduce.h"

typedef struct epilogues {
    const td_program *in;
    td_program *out;
    td_id *map;                               /* TD_NONE: not made yet */
    uint32_t *reader;                         /* value of in -> as td_only_readers gives it */
    uint32_t *narrowed;                       /* value of in -> the first cast of it to 16 bits, or TD_NONE */
    char *live;
    char *done;                               /* node of in -> its outputs are mapped already */
    void *memory;
    size_t bytes;
} epilogues;

/* The cast of a value to 16 bits that node `index` is, if it is one. */
static void note_cast(epilogues *e, uint32_t index)
{
    const td_node *n = &e->in->nodes[index];
    if (n->op != &td_op_cast || n->after != TD_NONE || !td_is_narrow(e->in->values[n->output].dtype)) return;
    uint32_t *first = &e->narrowed[td_node_inputs(e->in, n)[0]];
    if (*first == TD_NONE) *first = index;
}

static bool open_tables(epilogues *e)
{
    uint32_t nodes = e->in->node_count, values = e->in->value_count;
    e->bytes = values * (sizeof(td_id) + 2 * sizeof(uint32_t)) + nodes;
    e->memory = td_alloc(e->in->td, e->bytes, "program");
    e->live = td_live_nodes(e->in);
    if (!e->memory || !e->live) return false;
    e->map = e->memory;
    e->reader = e->map + values;
    e->narrowed = e->reader + values;
    e->done = (char *)(e->narrowed + values);
    memset(e->memory, 0xFF, e->bytes - nodes);
    memset(e->done, 0, nodes);
    td_only_readers(e->in, e->live, e->reader);
    for (uint32_t n = 0; n < nodes; n++)
        if (e->live[n]) note_cast(e, n);
    return true;
}

/* ---- What follows a value */

static bool alike(const td_program *p, td_id a, td_id b)
{
    const td_value *x = &p->values[a], *y = &p->values[b];
    return x->dtype == y->dtype && td_shape_equal(x->shape, y->shape) && td_placement_equal(x->place, y->place);
}

/* The node that alone reads v, if it is op and waits for nothing else; or NULL. */
static const td_node *only_reader(const epilogues *e, td_id v, const td_op *op)
{
    if (e->reader[v] == TD_NONE || e->reader[v] == TD_MANY) return NULL;
    const td_node *n = &e->in->nodes[e->reader[v]];
    return n->op == op && n->after == TD_NONE ? n : NULL;
}

/* What else the addition adds to v: TD_NONE if v is not only read there, or the other is not made yet. */
static td_id added_to(const epilogues *e, td_id v)
{
    const td_node *n = only_reader(e, v, &td_op_add);
    if (!n) return TD_NONE;
    const td_id *in = td_node_inputs(e->in, n);
    td_id other = in[0] == v ? in[1] : in[0];
    bool fits = other != v && alike(e->in, v, n->output) && alike(e->in, other, n->output) && e->in->values[v].dtype == TD_F32;
    return fits && e->map[other] != TD_NONE ? other : TD_NONE;
}

/* The cast of v to 16 bits, in v's placement; or NULL. */
static const td_node *cast_of(const epilogues *e, td_id v)
{
    const td_node *n = e->narrowed[v] == TD_NONE ? NULL : &e->in->nodes[e->narrowed[v]];
    return n && td_placement_equal(e->in->values[v].place, e->in->values[n->output].place) ? n : NULL;
}

static void finish(epilogues *e, const td_node *n, td_id as)
{
    e->map[n->output] = as;
    e->done[e->in->values[n->output].node] = 1;
}

static td_id emit(epilogues *e, const td_op *op, const td_node *like, const td_id *inputs, int input_count, const void *attr,
                  size_t attr_bytes, const td_value *outputs, int output_count)
{
    td_id after = like->after == TD_NONE ? TD_NONE : e->map[like->after];
    return td_emit(e->out, &(td_emission){ .op = op, .like = like, .inputs = inputs, .input_count = input_count, .attr = attr,
                                           .attr_bytes = attr_bytes, .outputs = outputs, .output_count = output_count, .after = after });
}

/* ---- Norms */

static bool take_norm(epilogues *e, uint32_t index)
{
    td_node n = e->in->nodes[index];
    const td_node *cast = only_reader(e, n.output, &td_op_cast) ? cast_of(e, n.output) : NULL;
    if (!cast || e->in->values[n.output].dtype != TD_F32) return td_copy_node(e->out, e->in, index, e->map);
    td_norm_attr attr = *(const td_norm_attr *)td_node_attr(e->in, &n);
    td_value value = e->in->values[cast->output];
    td_id in[3];
    attr.narrow = value.dtype;
    for (uint32_t i = 0; i < n.inputs; i++) in[i] = e->map[e->in->inputs[n.input + i]];
    finish(e, cast, emit(e, n.op, &n, in, (int)n.inputs, &attr, sizeof attr, &value, 1));
    return e->in->td->error == TD_OK;
}

static bool take_norm_gradient(epilogues *e, uint32_t index)
{
    td_node n = e->in->nodes[index];
    td_norm_attr attr = *(const td_norm_attr *)td_node_attr(e->in, &n);
    td_id in[4], dx = n.output, other = added_to(e, dx);
    td_value out[4];
    const td_node *add = other == TD_NONE ? NULL : only_reader(e, dx, &td_op_add);
    const td_node *cast = e->in->values[dx].dtype == TD_F32 ? cast_of(e, add ? add->output : dx) : NULL;
    if (!add && !cast) return td_copy_node(e->out, e->in, index, e->map);
    for (uint32_t i = 0; i < n.inputs; i++) in[i] = e->map[e->in->inputs[n.input + i]];
    for (uint32_t k = 0; k < n.outputs; k++) out[k] = e->in->values[n.output + k];
    attr.adds = add != NULL;
    if (add) in[n.inputs] = e->map[other];
    if (cast) out[n.outputs] = e->in->values[cast->output];
    if (cast) attr.narrow = out[n.outputs].dtype;
    td_id first = emit(e, n.op, &n, in, (int)n.inputs + attr.adds, &attr, sizeof attr, out, (int)n.outputs + (cast != NULL));
    for (uint32_t k = 0; k < n.outputs; k++) e->map[n.output + k] = first + k;
    if (add) finish(e, add, first);
    if (cast) finish(e, cast, first + n.outputs);
    return e->in->td->error == TD_OK;
}

/* ---- Cross-entropy */

enum { DEEPEST = 8 };                         /* chain of small operations that is made ahead of its place */

static bool is_small(const td_op *op)
{
    return (op->flags & TD_OP_POINTWISE) || op == &td_op_fill || op == &td_op_scalar || op == &td_op_reshape || op == &td_op_broadcast ||
           op == &td_op_sum;
}

/* Whether v can be made where the pass is: from constants, scalars and what is made already. */
static bool can_make(const epilogues *e, td_id v, int depth)
{
    if (e->map[v] != TD_NONE) return true;
    const td_node *n = td_producer(e->in, v);
    bool can = is_small(n->op) && n->after == TD_NONE && depth < DEEPEST;
    for (uint32_t i = 0; can && i < n->inputs; i++) can = can_make(e, e->in->inputs[n->input + i], depth + 1);
    return can;
}

static bool make(epilogues *e, td_id v)
{
    if (e->map[v] != TD_NONE) return true;
    uint32_t index = e->in->values[v].node;
    const td_node *n = &e->in->nodes[index];
    for (uint32_t i = 0; i < n->inputs; i++)
        if (!make(e, e->in->inputs[n->input + i])) return false;
    e->done[index] = 1;
    return td_copy_node(e->out, e->in, index, e->map);
}

/* The gradient of the cross-entropy that node n gives; NULL: none, or it waits for more. */
static const td_node *slope_of(const epilogues *e, uint32_t index)
{
    const td_id *in = td_node_inputs(e->in, &e->in->nodes[index]);
    for (uint32_t s = index + 1; s < e->in->node_count; s++) {
        const td_node *n = &e->in->nodes[s];
        if (n->op != &td_op_cross_entropy_gradient || !e->live[s]) continue;
        const td_id *from = td_node_inputs(e->in, n);
        bool same = from[0] == in[0] && from[1] == in[1] && n->after == TD_NONE;
        if (same && can_make(e, from[2], 0)) return n;
    }
    return NULL;
}

static bool take_cross_entropy(epilogues *e, uint32_t index)
{
    td_node n = e->in->nodes[index];
    const td_node *slope = slope_of(e, index);
    if (!slope) return td_copy_node(e->out, e->in, index, e->map);
    const td_id *from = td_node_inputs(e->in, slope);
    if (!make(e, from[2])) return false;
    td_id in[3] = { e->map[from[0]], e->map[from[1]], e->map[from[2]] };
    td_value out[2] = { e->in->values[slope->output], e->in->values[n.output] };
    td_id first = emit(e, slope->op, &n, in, 3, NULL, 0, out, 2);
    finish(e, slope, first);
    e->map[n.output] = first + 1;
    return e->in->td->error == TD_OK;
}

/* ---- Products */

/* Whether `product` contracts, of an operand in 16 bits, what `sum` is taken over: gradients in f32 of a weight and its bias. */
static bool are_of_one_layer(const epilogues *e, const td_node *product, const td_node *sum)
{
    if (product->op != &td_op_matmul || sum->op != &td_op_sum || product->after != TD_NONE || sum->after != TD_NONE) return false;
    const op_matmul_attr *attr = td_node_attr(e->in, product);
    const td_reduce_attr *summed = td_node_attr(e->in, sum);
    td_id a = td_node_inputs(e->in, product)[0];
    const td_value *value = &e->in->values[a];
    return td_node_inputs(e->in, sum)[0] == a && value->shape.rank == 2 && td_is_narrow(value->dtype) &&
           e->in->values[product->output].dtype == TD_F32 && summed->axes == (attr->transpose_a ? 1u << 0 : 1u << 1) &&
           summed->keep == TD_DROP;
}

/* Node number `index` is the product or the sum: the other of the two, which comes behind it and can be made already; or NULL. */
static const td_node *dbias_with(const epilogues *e, uint32_t index)
{
    const td_node *n = &e->in->nodes[index];
    for (uint32_t s = index + 1; s < e->in->node_count; s++) {
        const td_node *other = &e->in->nodes[s];
        if (!e->live[s] || (other->op != &td_op_sum && other->op != &td_op_matmul) || e->map[other->output] != TD_NONE) continue;
        if (are_of_one_layer(e, n, other)) return other;
        if (are_of_one_layer(e, other, n) && e->map[td_node_inputs(e->in, other)[1]] != TD_NONE) return other;
    }
    return NULL;
}

static bool take_dbias(epilogues *e, uint32_t index)
{
    const td_node *n = &e->in->nodes[index], *other = td_stage_off(e->in->td, TD_STAGE_DBIAS) ? NULL : dbias_with(e, index);
    if (!other) return td_copy_node(e->out, e->in, index, e->map);
    const td_node *product = n->op == &td_op_matmul ? n : other, *sum = product == n ? other : n;
    const td_id *from = td_node_inputs(e->in, product);
    td_id in[2] = { e->map[from[0]], e->map[from[1]] };
    op_matmul_attr attr = *(const op_matmul_attr *)td_node_attr(e->in, product);
    td_value out[2] = { e->in->values[product->output], e->in->values[sum->output] };
    td_id first = emit(e, &td_op_matmul_dbias, product, in, 2, &attr, sizeof attr, out, 2);
    finish(e, product, first);
    finish(e, sum, first + 1);
    return e->in->td->error == TD_OK;
}

/* Whether an operation that runs element by element, and may take others along, reads v. */
static bool is_read_by_elements(const epilogues *e, td_id v)
{
    for (uint32_t s = e->in->values[v].node + 1; s < e->in->node_count; s++) {
        const td_node *n = &e->in->nodes[s];
        for (uint32_t i = 0; e->live[s] && (n->op->flags & TD_OP_POINTWISE) && i < n->inputs; i++)
            if (td_node_inputs(e->in, n)[i] == v) return true;
    }
    return false;
}

/* The gelu of v, which product number `index` gives, if nothing else would take it along; or NULL. */
static const td_node *gelu_of(const epilogues *e, uint32_t index)
{
    td_id v = e->in->nodes[index].output;
    if (td_stage_off(e->in->td, TD_STAGE_GELU) || !td_is_narrow(e->in->values[v].dtype)) return NULL;
    for (uint32_t s = index + 1; s < e->in->node_count; s++) {
        const td_node *n = &e->in->nodes[s];
        if (!e->live[s] || n->op != &td_op_gelu_tanh || td_node_inputs(e->in, n)[0] != v || n->after != TD_NONE) continue;
        return alike(e->in, v, n->output) && !is_read_by_elements(e, n->output) ? n : NULL;
    }
    return NULL;
}

static bool take_gelu(epilogues *e, uint32_t index, const td_node *gelu)
{
    td_node n = e->in->nodes[index];
    const td_id *from = td_node_inputs(e->in, &n);
    td_id in[3] = { e->map[from[0]], e->map[from[1]], e->map[from[2]] };
    td_linear_gelu_attr attr = { .keeps = e->reader[n.output] == TD_MANY };
    td_value out[2] = { e->in->values[gelu->output], e->in->values[n.output] };
    td_id first = emit(e, &td_op_linear_gelu, &n, in, 3, &attr, sizeof attr, out, 1 + (int)attr.keeps);
    if (attr.keeps) e->map[n.output] = first + 1;
    finish(e, gelu, first);
    return e->in->td->error == TD_OK;
}

/* How the gradient that product number `index` gives goes on through gelu; mul NULL: it does not, or others would take it along. */
typedef struct through_gelu {
    const td_node *view, *mul, *slope;        /* view: NULL where the product is used in its own shape */
    td_id x;                                  /* what gelu was of */
} through_gelu;

static through_gelu through_gelu_of(const epilogues *e, uint32_t index)
{
    const td_node *n = &e->in->nodes[index];
    const td_value *value = &e->in->values[n->output];
    through_gelu to = { .view = only_reader(e, n->output, &td_op_reshape) }, none = { NULL, NULL, NULL, TD_NONE };
    if (td_stage_off(e->in->td, TD_STAGE_GELU) || value->shape.rank != 2 || !td_is_narrow(value->dtype)) return none;
    td_id dy = to.view ? to.view->output : n->output;
    to.mul = only_reader(e, dy, &td_op_mul);
    if (!to.mul) return none;
    const td_id *factors = td_node_inputs(e->in, to.mul);
    td_id slope = factors[0] == dy ? factors[1] : factors[0];
    to.slope = td_producer(e->in, slope);
    if (to.slope->op != &td_op_gelu_tanh_slope || to.slope->after != TD_NONE || !only_reader(e, slope, &td_op_mul)) return none;
    to.x = td_node_inputs(e->in, to.slope)[0];
    bool fits = e->map[to.x] != TD_NONE && alike(e->in, dy, to.x) && alike(e->in, dy, slope) && alike(e->in, dy, to.mul->output);
    return fits && !is_read_by_elements(e, to.mul->output) ? to : none;
}

static td_id in_shape_of(epilogues *e, const td_node *like, td_id v, td_value as)
{
    if (td_shape_equal(e->out->values[v].shape, as.shape)) return v;
    td_shape shape = as.shape;
    return emit(e, &td_op_reshape, like, &v, 1, &shape, sizeof shape, &as, 1);
}

static bool take_through_gelu(epilogues *e, uint32_t index, through_gelu to)
{
    td_node n = e->in->nodes[index];
    td_value value = e->in->values[n.output];
    const td_id *from = td_node_inputs(e->in, &n);
    td_id in[3] = { e->map[from[0]], e->map[from[1]], in_shape_of(e, to.slope, e->map[to.x], value) };
    op_matmul_attr attr = *(const op_matmul_attr *)td_node_attr(e->in, &n);
    td_id dx = emit(e, &td_op_matmul_dgelu, &n, in, 3, &attr, sizeof attr, &value, 1);
    if (to.view) e->done[e->in->values[to.view->output].node] = 1;
    e->done[e->in->values[to.slope->output].node] = 1;
    if (dx != TD_NONE) finish(e, to.mul, in_shape_of(e, to.mul, dx, e->in->values[to.mul->output]));
    return e->in->td->error == TD_OK;
}

static bool take_matmul(epilogues *e, uint32_t index)
{
    td_node n = e->in->nodes[index];
    through_gelu gelu = through_gelu_of(e, index);
    if (gelu.mul) return take_through_gelu(e, index, gelu);
    td_id other = added_to(e, n.output);
    if (other == TD_NONE) return take_dbias(e, index);
    const td_node *add = only_reader(e, n.output, &td_op_add);
    td_value value = e->in->values[add->output];
    const td_id *from = td_node_inputs(e->in, &n);
    td_id in[3] = { e->map[from[0]], e->map[from[1]], e->map[other] };
    op_matmul_attr attr = *(const op_matmul_attr *)td_node_attr(e->in, &n);
    finish(e, add, emit(e, &td_op_matmul_add, &n, in, 3, &attr, sizeof attr, &value, 1));
    return e->in->td->error == TD_OK;
}

/* A bias as it was before it was rounded for the product. */
static td_id unrounded(const epilogues *e, td_id bias)
{
    const td_node *n = td_producer(e->out, bias);
    td_id wide = n->op == &td_op_cast ? td_node_inputs(e->out, n)[0] : bias;
    return e->out->values[wide].dtype == TD_F32 ? wide : bias;
}

static bool take_linear(epilogues *e, uint32_t index)
{
    td_node n = e->in->nodes[index];
    const td_node *gelu = gelu_of(e, index);
    if (gelu) return take_gelu(e, index, gelu);
    const td_node *cast = only_reader(e, n.output, &td_op_cast);
    td_id sum = cast ? cast->output : n.output, other = added_to(e, sum);
    if (other == TD_NONE || !td_placement_equal(e->in->values[sum].place, e->in->values[n.output].place))
        return td_copy_node(e->out, e->in, index, e->map);
    const td_node *add = only_reader(e, sum, &td_op_add);
    td_value value = e->in->values[add->output];
    const td_id *from = td_node_inputs(e->in, &n);
    td_id in[4] = { e->map[from[0]], e->map[from[1]], unrounded(e, e->map[from[2]]), e->map[other] };
    finish(e, add, emit(e, &td_op_linear_add, &n, in, 4, NULL, 0, &value, 1));
    if (cast) e->done[e->reader[n.output]] = 1;
    return e->in->td->error == TD_OK;
}

/* ---- The pass */

static bool take(epilogues *e, uint32_t index)
{
    const td_op *op = e->in->nodes[index].op;
    bool is_gpu = e->in->td->device->is_gpu;
    if (op == &td_op_layer_norm || op == &td_op_rms_norm) return take_norm(e, index);
    if (op == &td_op_norm_gradient) return take_norm_gradient(e, index);
    if (op == &td_op_cross_entropy_rows) return take_cross_entropy(e, index);
    if (op == &td_op_matmul && is_gpu) return take_matmul(e, index);
    if (op == &td_op_linear && is_gpu) return take_linear(e, index);
    if (op == &td_op_sum && is_gpu) return take_dbias(e, index);
    return td_copy_node(e->out, e->in, index, e->map);
}

td_program *td_epilogue_pass(const td_program *in)
{
    epilogues e = { .in = in };
    td_program *out = NULL;
    if (open_tables(&e) && (e.out = td_pass_begin(in->td))) {
        for (uint32_t n = 0; n < in->node_count; n++)
            if (e.live[n] && !e.done[n] && !take(&e, n)) break;
        out = td_pass_end(e.out);
    }
    td_free(in->td, e.live, in->node_count, "program");
    td_free(in->td, e.memory, e.bytes, "program");
    return out;
}
