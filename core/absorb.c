/* absorb: attention reads and writes heads where the products left them.
 *
 * A layer cuts rows (B, T, H d), or the columns of q, k and v in one value, into heads and turns them to (B, H, T, d): a slice and a
 * transpose that copy. Here attention takes the rows themselves (td_attention_attr.rows); o and the gradients come out as rows, and the
 * transposes back cancel. Gradients of q, k and v that are joined at once are written into the joined value, and on a GPU, whose kernels
 * sum elsewhere than in their outputs, in the dtype that they are cast to.
 *
 * Heads are cut alike on all ranks only if no rank holds a part of them: values sharded along another dimension than the sequences' stay
 * as they are.
 */
#include "core/internal.h"
#include "core/ops/attention.h"
#include "core/ops/list.h"

#include <string.h>

typedef struct absorption {
    const td_program *in;
    td_program *out;
    td_id *map;
    uint32_t *reader;                         /* value of in -> as td_only_readers gives it */
    char *live;
    char *done;                               /* node of in -> its outputs are mapped already */
    void *memory;
    size_t bytes;
} absorption;

static bool open_tables(absorption *a)
{
    uint32_t nodes = a->in->node_count, values = a->in->value_count;
    a->bytes = values * (sizeof(td_id) + sizeof(uint32_t)) + nodes;
    a->memory = td_alloc(a->in->td, a->bytes, "program");
    a->live = td_live_nodes(a->in);
    if (!a->memory || !a->live) return false;
    a->map = a->memory;
    a->reader = a->map + values;
    a->done = (char *)(a->reader + values);
    memset(a->done, 0, nodes);
    td_only_readers(a->in, a->live, a->reader);
    return true;
}

/* ---- Patterns */

/* A node that swaps positions and heads. */
static bool turns_heads(const td_program *p, const td_node *n)
{
    if (n->op != &td_op_transpose) return false;
    const td_transpose_attr *attr = td_node_attr(p, n);
    return p->values[n->output].shape.rank == 4 && attr->a + attr->b == 3 && attr->a * attr->b == 2;
}

static bool sequences_only(const td_program *p, td_id id)
{
    const td_placement *place = &p->values[id].place;
    for (int axis = 0; axis < TD_MAX_AXES; axis++)
        if (place->kind[axis] != TD_REPLICATED && (place->kind[axis] != TD_SHARDED || place->dim[axis] != 0)) return false;
    return true;
}

typedef struct row_source {
    td_id id;                                 /* (B, T, columns) */
    int64_t at;                               /* first column */
} row_source;

/* The rows that heads (B, H, T, d) were cut from; id TD_NONE: they were made another way. */
static row_source rows_of(const td_program *p, td_id heads)
{
    row_source none = { .id = TD_NONE };
    const td_node *turn = td_producer(p, heads);
    if (!turns_heads(p, turn)) return none;
    const td_node *cut = td_producer(p, td_node_inputs(p, turn)[0]);
    if (cut->op != &td_op_reshape) return none;
    td_id rows = td_node_inputs(p, cut)[0];
    td_shape from = p->values[rows].shape, to = p->values[cut->output].shape;
    if (from.rank != 3 || from.dim[0] != to.dim[0] || from.dim[1] != to.dim[1]) return none;
    row_source source = { .id = rows };
    const td_node *slice = td_producer(p, rows);
    if (slice->op == &td_op_slice && ((const td_slice_attr *)td_node_attr(p, slice))->axis == 2) {
        source.id = td_node_inputs(p, slice)[0];
        source.at = ((const td_slice_attr *)td_node_attr(p, slice))->begin;
    }
    bool alike = td_placement_equal(p->values[source.id].place, p->values[heads].place);
    return alike && sequences_only(p, heads) ? source : none;
}

/* ---- Attention on rows */

static td_id emit_one(td_program *to, const td_op *op, const td_node *like, td_id x, const void *attr, size_t bytes, td_value value)
{
    return td_emit(to, &(td_emission){ .op = op, .like = like, .inputs = &x, .input_count = 1, .attr = attr, .attr_bytes = bytes,
                                       .outputs = &value, .output_count = 1, .after = TD_NONE });
}

/* Heads again, for whoever reads them as they were: dropped where nobody does. */
static td_id heads_from(absorption *a, const td_node *like, td_id rows, td_value heads)
{
    td_value cut = heads;
    cut.shape = TD_SHAPE(heads.shape.dim[0], heads.shape.dim[2], heads.shape.dim[1], heads.shape.dim[3]);
    td_id four = emit_one(a->out, &td_op_reshape, like, rows, &cut.shape, sizeof cut.shape, cut);
    return emit_one(a->out, &td_op_transpose, like, four, &(td_transpose_attr){ 1, 2 }, sizeof(td_transpose_attr), heads);
}

static td_value as_rows(td_value heads)
{
    heads.shape = TD_SHAPE(heads.shape.dim[0], heads.shape.dim[2], heads.shape.dim[1] * heads.shape.dim[3]);
    return heads;
}

typedef struct rewriting {
    td_node n;
    td_attention_attr attr;
    td_id inputs[8];
} rewriting;

static rewriting as_it_is(const absorption *a, uint32_t index)
{
    rewriting r = { .n = a->in->nodes[index] };
    r.attr = *(const td_attention_attr *)td_node_attr(a->in, &r.n);
    for (uint32_t i = 0; i < r.n.inputs; i++) r.inputs[i] = a->map[td_node_inputs(a->in, &r.n)[i]];
    return r;
}

/* q, k and v, which are inputs 0 to 2, as rows where they can be had. */
static rewriting rewriting_of(const absorption *a, uint32_t index)
{
    rewriting r = as_it_is(a, index);
    const td_id *from = td_node_inputs(a->in, &r.n);
    td_shape q = a->in->values[from[0]].shape, k = a->in->values[from[1]].shape, v = a->in->values[from[2]].shape;
    for (int i = 0; i < 3; i++) {
        row_source source = rows_of(a->out, r.inputs[i]);
        if (source.id == TD_NONE) continue;
        r.inputs[i] = source.id;
        r.attr.at[i] = source.at;
        r.attr.rows |= TD_ATTENTION_Q << i;
    }
    r.attr.heads = (int32_t)q.dim[1], r.attr.depth = (int32_t)q.dim[3];
    r.attr.shared = (int32_t)k.dim[1], r.attr.values = (int32_t)v.dim[3];
    return r;
}

static td_id emit_attention(absorption *a, const rewriting *r, const td_value *outputs, int count)
{
    td_id after = r->n.after == TD_NONE ? TD_NONE : a->map[r->n.after];
    return td_emit(a->out, &(td_emission){ .op = r->n.op, .like = &r->n, .inputs = r->inputs, .input_count = (int)r->n.inputs,
                                           .attr = &r->attr, .attr_bytes = sizeof r->attr, .outputs = outputs, .output_count = count, .after = after });
}

static bool take_forward(absorption *a, uint32_t index)
{
    rewriting r = rewriting_of(a, index);
    if (!r.attr.rows || !sequences_only(a->in, r.n.output)) return td_copy_node(a->out, a->in, index, a->map);
    const td_value *was = &a->in->values[r.n.output];
    r.attr.rows |= TD_ATTENTION_O;
    td_id first = emit_attention(a, &r, (td_value[]){ as_rows(was[0]), was[1] }, 2);
    a->map[r.n.output] = heads_from(a, &r.n, first, was[0]);
    a->map[r.n.output + 1] = first + 1;
    return a->in->td->error == TD_OK;
}

/* ---- Its gradient */

/* The way of one gradient to where all three are joined: the nodes that alone read one another. */
typedef struct way {
    uint32_t node[4];
    int count;
    td_dtype dtype;                           /* after a cast on the way, or as it was */
} way;

static way way_to_join(const absorption *a, td_id gradient)
{
    way w = { .dtype = (td_dtype)a->in->values[gradient].dtype };
    bool turned = false, flat = false;
    for (td_id at = gradient; w.count < 4;) {
        uint32_t reader = a->reader[at];
        if (reader == TD_NONE || reader == TD_MANY) break;
        const td_node *n = &a->in->nodes[reader];
        bool joins = n->op == &td_op_concat && turned && flat;
        bool turns = n->op == &td_op_cast || turns_heads(a->in, n), flattens = n->op == &td_op_reshape;
        bool passes = turned ? flattens && !flat : turns;
        if (!passes && !joins) break;
        w.node[w.count++] = reader;
        if (joins) return w;
        turned = turned || n->op == &td_op_transpose;
        flat = flat || n->op == &td_op_reshape;
        at = n->output;
        w.dtype = (td_dtype)a->in->values[at].dtype;
    }
    return (way){ 0 };
}

/* A GPU's kernels write gradients in the operands' dtype as well as in the wide one. */
static bool writes(const absorption *a, const rewriting *r, uint8_t dtype)
{
    return a->in->td->device->is_gpu && dtype == a->in->values[td_node_inputs(a->in, &r->n)[0]].dtype;
}

/* Each gradient is read by nothing but a cast to a dtype that can be written, or not at all. */
static bool takes_casts(const absorption *a, const rewriting *r)
{
    int casts = 0;
    for (td_id i = 0; i < 3; i++) {
        uint32_t reader = a->reader[r->n.output + i];
        if (reader == TD_NONE) continue;
        const td_node *n = reader == TD_MANY ? NULL : &a->in->nodes[reader];
        if (!n || n->op != &td_op_cast || !writes(a, r, a->in->values[n->output].dtype)) return false;
        casts++;
    }
    return casts > 0;
}

/* dq, dk, dv become the columns of one value, if that is all they are read for. */
static bool take_packed_gradient(absorption *a, rewriting *r, bool *taken)
{
    const td_id first = r->n.output;
    way w[3];
    for (td_id i = 0; i < 3; i++) w[i] = way_to_join(a, first + i);
    *taken = w[0].count && w[1].count && w[2].count;
    if (!*taken) return true;
    uint32_t join = w[0].node[w[0].count - 1];
    const td_node *n = &a->in->nodes[join];
    const td_id *joined = td_node_inputs(a->in, n);
    td_value value = a->in->values[n->output];
    *taken = n->inputs == 3 && value.shape.rank == 3 && ((const td_concat_attr *)td_node_attr(a->in, n))->axis == 2 &&
             td_placement_equal(value.place, a->in->values[first].place);
    for (int i = 0; *taken && i < 3; i++) {
        const td_node *last = &a->in->nodes[w[i].node[w[i].count - 2]];
        *taken = w[i].node[w[i].count - 1] == join && joined[i] == last->output && td_shape_equal(a->in->values[last->output].shape,
                     as_rows(a->in->values[first + (td_id)i]).shape);
    }
    if (!*taken) return true;
    td_value written = value;
    if (!writes(a, r, value.dtype)) written.dtype = a->in->values[first].dtype;
    r->attr.rows |= TD_ATTENTION_PACKED;
    td_id packed = emit_attention(a, r, &written, 1);
    if (value.dtype != written.dtype)
        packed = emit_one(a->out, &td_op_cast, n, packed, &(td_cast_attr){ .dtype = value.dtype }, sizeof(td_cast_attr), value);
    a->map[n->output] = packed;
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < w[i].count; k++) a->done[w[i].node[k]] = 1;
    return a->in->td->error == TD_OK;
}

static bool is_whole(const absorption *a, row_source rows, int64_t columns)
{
    return rows.id != TD_NONE && rows.at == 0 && a->out->values[rows.id].shape.dim[2] == columns;
}

/* o and do as rows too, where they can be had. */
static void take_outputs(const absorption *a, rewriting *r)
{
    enum { O = 3, DO = 5 };
    row_source o = rows_of(a->out, r->inputs[O]), dy = rows_of(a->out, r->inputs[DO]);
    int64_t columns = r->attr.heads * r->attr.values;
    if (!is_whole(a, o, columns) || !is_whole(a, dy, columns)) return;
    r->inputs[O] = o.id;
    r->inputs[DO] = dy.id;
    r->attr.rows |= TD_ATTENTION_O;
}

/* dq, dk and dv as values of their own, by rows where q, k and v are; narrow: what their casts would give. */
static bool emit_gradients(absorption *a, const rewriting *r, bool narrow)
{
    td_value was[3], now[3];
    for (int i = 0; i < 3; i++) {
        was[i] = a->in->values[r->n.output + (td_id)i];
        if (narrow) was[i].dtype = a->in->values[td_node_inputs(a->in, &r->n)[i]].dtype;
        now[i] = r->attr.rows & (TD_ATTENTION_Q << i) ? as_rows(was[i]) : was[i];
    }
    td_id first = emit_attention(a, r, now, 3);
    for (td_id i = 0; i < 3; i++) {
        bool rows = r->attr.rows & (TD_ATTENTION_Q << i);
        td_id given = rows ? heads_from(a, &r->n, first + i, was[i]) : first + i;
        uint32_t reader = a->reader[r->n.output + i];
        a->map[r->n.output + i] = given;
        if (!narrow || reader == TD_NONE) continue;
        a->map[a->in->nodes[reader].output] = given;
        a->done[reader] = 1;
    }
    return a->in->td->error == TD_OK;
}

static bool take_gradient(absorption *a, uint32_t index)
{
    rewriting r = rewriting_of(a, index);
    bool by_rows = r.attr.rows && sequences_only(a->in, r.n.output), narrow = takes_casts(a, &r), taken = false;
    if (!by_rows && !narrow) return td_copy_node(a->out, a->in, index, a->map);
    if (!by_rows) {
        r = as_it_is(a, index);
        return emit_gradients(a, &r, narrow);
    }
    take_outputs(a, &r);
    const int32_t qkv = TD_ATTENTION_Q | TD_ATTENTION_K | TD_ATTENTION_V;
    if ((r.attr.rows & qkv) == qkv && !take_packed_gradient(a, &r, &taken)) return false;
    return taken || emit_gradients(a, &r, narrow);
}

/* ---- The pass */

static bool take(absorption *a, uint32_t index)
{
    const td_node *n = &a->in->nodes[index];
    if (n->op == &td_op_attention) return take_forward(a, index);
    if (n->op == &td_op_attention_gradient) return take_gradient(a, index);
    if (turns_heads(a->in, n)) {
        const td_node *inner = td_producer(a->out, a->map[a->in->inputs[n->input]]);
        if (turns_heads(a->out, inner)) {
            a->map[n->output] = td_node_inputs(a->out, inner)[0];
            return true;
        }
    }
    return td_copy_node(a->out, a->in, index, a->map);
}

td_program *td_absorb_pass(const td_program *in)
{
    absorption a = { .in = in };
    td_program *out = NULL;
    if (open_tables(&a) && (a.out = td_pass_begin(in->td))) {
        for (uint32_t n = 0; n < in->node_count; n++)
            if (a.live[n] && !a.done[n] && !take(&a, n)) break;
        out = td_pass_end(a.out);
    }
    td_free(in->td, a.live, in->node_count, "program");
    td_free(in->td, a.memory, a.bytes, "program");
    return out;
}
