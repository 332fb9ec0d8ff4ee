/* simplify: what need not be computed, or not twice.
 *
 *   - nodes nobody needs are dropped;
 *   - nodes with equal operation, attributes and inputs become one (not random draws, not collectives);
 *   - a cast to the dtype a value has vanishes, and so does a widening followed by the way back;
 *   - the product with a constant 1 vanishes;
 *   - a gradient rule of one's own has had its say: the node that names it is its input 0;
 *   - the sum of parts that zeros pad is the parts joined: so the gradients of a value's slices come together;
 *   - a product of 16-bit operands whose only reader widens it gives f32 itself: it was accumulated in f32;
 *   - so does a sum over 16-bit rows, the gradient of a bias, that is narrowed only to be widened.
 */
#include "core/internal.h"
#include "core/ops/op.h"

#include <string.h>

typedef struct simplification {
    td_context *td;
    const td_program *in;
    td_program *out;
    td_id *map;
    char *live;
    uint32_t *reader;                         /* value of in -> td_only_readers */
    uint32_t *table;                          /* hash -> node of out + 1 */
    uint32_t table_mask;
    void *memory;
    size_t bytes;
} simplification;

static bool open_tables(simplification *s)
{
    uint32_t slots = 64;
    while (slots < 2 * s->in->node_count) slots *= 2;
    s->bytes = s->in->value_count * (sizeof(td_id) + sizeof(uint32_t)) + slots * sizeof(uint32_t);
    s->memory = td_alloc(s->td, s->bytes, "program");
    if (!s->memory) return false;
    s->map = s->memory;
    s->reader = s->map + s->in->value_count;
    s->table = s->reader + s->in->value_count;
    s->table_mask = slots - 1;
    memset(s->table, 0, slots * sizeof(uint32_t));
    s->live = td_live_nodes(s->in);
    if (s->live) td_only_readers(s->in, s->live, s->reader);
    return s->live;
}

/* ---- Equal nodes */

static bool may_merge(const td_node *n)
{
    return !(n->op->flags & (TD_OP_EFFECT | TD_OP_RANDOM | TD_OP_COLLECTIVE)) && n->after == TD_NONE && n->outputs == 1;
}

static uint64_t node_key(const td_program *p, const td_node *n)
{
    uint64_t h = td_mix((uint64_t)(uintptr_t)n->op, n->inputs);
    h = td_hash_bytes(h, td_node_inputs(p, n), n->inputs * sizeof(td_id));
    h = td_hash_bytes(h, td_node_attr(p, n), n->attr_bytes);
    return td_mix(h, p->values[n->output].dtype);
}

static bool equal_nodes(const td_program *p, const td_node *a, const td_node *b)
{
    const td_value *va = &p->values[a->output], *vb = &p->values[b->output];
    return a->op == b->op && a->inputs == b->inputs && a->attr_bytes == b->attr_bytes && va->dtype == vb->dtype &&
           td_shape_equal(va->shape, vb->shape) && td_placement_equal(va->place, vb->place) &&
           (!a->inputs || !memcmp(td_node_inputs(p, a), td_node_inputs(p, b), a->inputs * sizeof(td_id))) &&
           (!a->attr_bytes || !memcmp(td_node_attr(p, a), td_node_attr(p, b), a->attr_bytes));
}

/* The last node of out was just copied: gives the value of an earlier equal node and takes the copy back, or its own. */
static td_id merge_last(simplification *s)
{
    td_program *p = s->out;
    uint32_t index = p->node_count - 1;
    const td_node *n = &p->nodes[index];
    if (!may_merge(n)) return n->output;
    for (uint32_t at = (uint32_t)node_key(p, n) & s->table_mask;; at = (at + 1) & s->table_mask) {
        if (!s->table[at]) {
            s->table[at] = index + 1;
            return n->output;
        }
        const td_node *earlier = &p->nodes[s->table[at] - 1];
        if (!equal_nodes(p, earlier, n)) continue;
        p->input_count = n->input, p->value_count = n->output, p->attr_count = n->attr, p->node_count = index;
        return earlier->output;
    }
}

/* ---- Rules: each gives the value of out that node n may be replaced by, or TD_NONE */

static td_id input_of(const simplification *s, const td_node *n, uint32_t i) { return s->map[s->in->inputs[n->input + i]]; }

static bool is_one(const td_program *p, td_id id)
{
    const td_node *n = td_producer(p, id);
    while (n->op == &td_op_broadcast || n->op == &td_op_reshape) n = td_producer(p, p->inputs[n->input]);
    return n->op == &td_op_fill && op_fill_value(td_node_attr(p, n)) == 1;
}

static td_id without_cast(const simplification *s, const td_node *n)
{
    if (n->op != &td_op_cast) return TD_NONE;
    td_id x = input_of(s, n, 0);
    uint8_t to = s->in->values[n->output].dtype;
    if (s->out->values[x].dtype == to) return x;
    const td_node *inner = td_producer(s->out, x);
    if (inner->op != &td_op_cast) return TD_NONE;
    td_id start = s->out->inputs[inner->input];
    bool widened = td_is_narrow(s->out->values[start].dtype) && s->out->values[x].dtype == TD_F32;
    return widened && s->out->values[start].dtype == to ? start : TD_NONE;
}

static td_id without_product(const simplification *s, const td_node *n)
{
    if (n->op != &td_op_mul) return TD_NONE;
    const td_value *v = &s->in->values[n->output];
    for (uint32_t i = 0; i < 2; i++) {
        td_id x = input_of(s, n, i), factor = input_of(s, n, 1 - i);
        const td_value *kept = &s->out->values[x];
        if (td_shape_equal(kept->shape, v->shape) && kept->dtype == v->dtype && is_one(s->out, factor)) return x;
    }
    return TD_NONE;
}

/* The only node that reads `v`; NULL: there is none, or several do. */
static const td_node *only_reader(const simplification *s, td_id v)
{
    return s->reader[v] < TD_MANY ? &s->in->nodes[s->reader[v]] : NULL;
}

/* Whether node n gives 16 bits which a cast alone reads, also as another shape, to make f32 of them. */
static bool is_widened(const simplification *s, const td_node *n)
{
    const td_node *reader = td_is_narrow(s->in->values[n->output].dtype) ? only_reader(s, n->output) : NULL;
    if (reader && reader->op == &td_op_reshape) reader = only_reader(s, reader->output);
    return reader && reader->op == &td_op_cast && s->in->values[reader->output].dtype == TD_F32;
}

/* Product of 16 bits -> 16 bits, widened later: the product with an f32 result, here, where its operands are needed no longer. Its
 * reshape has it so; the cast is one of f32 to f32. */
static td_id widened_product(simplification *s, const td_node *n)
{
    bool reshape = n->op == &td_op_reshape && s->out->values[input_of(s, n, 0)].dtype != s->in->values[s->in->inputs[n->input]].dtype;
    if (!reshape && (n->op != &td_op_matmul || !is_widened(s, n))) return TD_NONE;
    op_matmul_attr wide;
    td_value value = s->in->values[n->output];
    value.dtype = TD_F32;
    if (!reshape) {
        wide = *(const op_matmul_attr *)td_node_attr(s->in, n);
        wide.out_dtype = TD_F32;
    }
    td_id in[2] = { input_of(s, n, 0), n->inputs > 1 ? input_of(s, n, 1) : TD_NONE };
    return td_emit(s->out, &(td_emission){ .op = n->op, .like = n, .inputs = in, .input_count = (int)n->inputs, .attr = reshape ? td_node_attr(s->in, n) : &wide,
                                           .attr_bytes = n->attr_bytes, .outputs = &value, .output_count = 1, .after = TD_NONE });
}

/* cast f32 (cast to 16 bits (sum)), the sum being f32: the sum. */
static td_id widened_sum(const simplification *s, const td_node *n)
{
    if (n->op != &td_op_cast || s->in->values[n->output].dtype != TD_F32) return TD_NONE;
    td_id narrow = s->in->inputs[n->input];
    const td_node *cast = td_producer(s->in, narrow);
    if (cast->op != &td_op_cast || !only_reader(s, narrow)) return TD_NONE;
    td_id sum = s->in->inputs[cast->input];
    bool wide = td_producer(s->in, sum)->op == &td_op_sum && s->in->values[sum].dtype == TD_F32 && td_is_narrow(s->in->values[narrow].dtype);
    return wide ? input_of(s, cast, 0) : TD_NONE;
}

/* The inputs of a concatenation, walked from the front: what of the one at hand is left. */
typedef struct pieces {
    const td_id *id;
    uint32_t count;
    int64_t axis, left;
} pieces;

enum { MOST_PIECES = 16 };

static int64_t piece_size(const td_program *p, const pieces *c) { return c->count ? p->values[*c->id].shape.dim[c->axis] : 0; }

static bool pieces_of(const td_program *p, td_id x, pieces *c)
{
    const td_node *n = td_producer(p, x);
    if (n->op != &td_op_concat) return false;
    *c = (pieces){ .id = td_node_inputs(p, n), .count = n->inputs, .axis = ((const td_concat_attr *)td_node_attr(p, n))->axis };
    c->left = piece_size(p, c);
    return true;
}

static void take_piece(const td_program *p, pieces *c, int64_t size)
{
    c->left -= size;
    if (c->left > 0) return;
    c->id++, c->count--;
    c->left = piece_size(p, c);
}

static bool is_zero(const td_program *p, td_id id)
{
    const td_node *n = td_producer(p, id);
    return n->op == &td_op_fill && op_fill_value(td_node_attr(p, n)) == 0;
}

/* The next piece of the sum of a and b: the one that is not zero, or the shorter zeros. It must be whole, the other as long. */
static td_id next_piece(const td_program *p, pieces *a, pieces *b)
{
    bool zero = is_zero(p, *b->id) && (!is_zero(p, *a->id) || a->left <= b->left);
    pieces *kept = zero ? a : b, *other = zero ? b : a;
    td_id id = *kept->id;
    int64_t size = kept->left;
    if (!is_zero(p, *other->id) || size != piece_size(p, kept) || size > other->left) return TD_NONE;
    take_piece(p, kept, size);
    take_piece(p, other, size);
    return id;
}

static td_id joined_parts(simplification *s, const td_node *n)
{
    pieces a, b;
    td_id joined[MOST_PIECES];
    int count = 0;
    if (n->op != &td_op_add || !pieces_of(s->out, input_of(s, n, 0), &a) || !pieces_of(s->out, input_of(s, n, 1), &b)) return TD_NONE;
    td_value value = s->in->values[n->output];
    bool alike = a.axis == b.axis && td_shape_equal(s->out->values[input_of(s, n, 0)].shape, value.shape) &&
                 td_shape_equal(s->out->values[input_of(s, n, 1)].shape, value.shape);
    while (alike && a.count && b.count) {
        if (count == MOST_PIECES || (joined[count++] = next_piece(s->out, &a, &b)) == TD_NONE) return TD_NONE;
    }
    if (!alike || a.count || b.count) return TD_NONE;
    td_concat_attr attr = { .axis = a.axis };
    return td_emit(s->out, &(td_emission){ .op = &td_op_concat, .like = n, .inputs = joined, .input_count = count, .attr = &attr,
                                           .attr_bytes = sizeof attr, .outputs = &value, .output_count = 1, .after = TD_NONE });
}

static bool simplify_node(simplification *s, uint32_t index)
{
    td_node n = s->in->nodes[index];
    td_id instead = without_cast(s, &n);
    if (instead == TD_NONE) instead = without_product(s, &n);
    if (n.op == &td_op_with_gradient) instead = input_of(s, &n, 0);
    if (instead == TD_NONE) instead = widened_product(s, &n);
    if (instead == TD_NONE) instead = widened_sum(s, &n);
    if (instead == TD_NONE) instead = joined_parts(s, &n);
    if (instead != TD_NONE) {
        s->map[n.output] = instead;
        return s->td->error == TD_OK;
    }
    if (!td_copy_node(s->out, s->in, index, s->map)) return false;
    if (n.outputs == 1) s->map[n.output] = merge_last(s);
    return true;
}

static td_program *once(const td_program *in)
{
    simplification s = { .td = in->td, .in = in };
    td_program *out = NULL;
    if (open_tables(&s) && (s.out = td_pass_begin(in->td))) {
        for (uint32_t n = 0; n < in->node_count; n++)
            if (s.live[n] && !simplify_node(&s, n)) break;
        out = td_pass_end(s.out);
    }
    td_free(in->td, s.live, in->node_count, "program");
    td_free(in->td, s.memory, s.bytes, "program");
    return out;
}

/* Twice: the second round drops what the first one's rules left without readers, and finds what they made equal. */
td_program *td_simplify_pass(const td_program *in)
{
    td_program *first = once(in);
    if (!first) return NULL;
    td_program *second = once(first);
    td_program_free(first);
    return second;
}
