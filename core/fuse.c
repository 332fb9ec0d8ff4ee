/* fuse: attention absorbs the copies around it (absorb.c), products, norms and losses what follows them (epilogue.c), on a GPU the
 * copies of parameters become one (members.c), which is kept from step to step (kept.c), and chains of pointwise operations become single nodes
 * that run tile by tile. A mask of dropout is drawn in the chain that reads it, and sums and maxima over trailing dimensions are taken in the
 * chain whose value they read. Small fills that are left become constants on a GPU (constants.c).
 *
 * Nodes are taken in order. A pointwise node joins the open groups whose values it reads, if its shape and placement are
 * theirs, and unites them; a group closes, and is emitted, when a node that cannot join reads one of its values. So
 * everything a group reads is made before it, and everything that reads it comes after.
 *
 * A sum or maximum joins the open group whose pointwise value it reads, if its dimensions are those of the group's other reductions. What
 * reads a reduced value cannot join, for all of a row comes before it. The group stays open for others that read its pointwise values
 * (a second sum, the next function of the chain), and closes at once where no such reader is left: gradients that are read at the
 * step's end do not keep what they are made of until then.
 *
 * Left apart are rows shorter than LEAST_ROW, where there is little to do for each; integers, whose sums are exact; and a dimension that
 * ranks share unevenly, of which only a part exists on some.
 */
#include "core/internal.h"
#include "core/ops/draw.h"
#include "core/ops/fused.h"
#include "core/ops/reduce.h"

#include <string.h>

typedef struct group {
    uint32_t first, last;                     /* members as a list through next[] */
    uint32_t count;
    td_id like;                               /* a value of `in` with the group's shape and placement */
    int dims;                                 /* trailing ones that its reductions are over; 0: it has none */
    bool open;
} group;

typedef struct fusion {
    td_context *td;
    const td_program *in;
    td_program *out;
    td_id *map;
    char *live;
    uint32_t *group_of;                       /* node -> group, or TD_NONE */
    uint32_t *next;                           /* node -> next member, or TD_NONE */
    uint32_t *reads;                          /* value -> live reads */
    int *number;                              /* value -> its number in the chain being built */
    group *groups;
    uint32_t group_count;
    void *memory;
    size_t bytes;
} fusion;

static bool open_tables(fusion *f)
{
    uint32_t n = f->in->node_count, v = f->in->value_count;
    f->bytes = n * (sizeof(group) + 2 * sizeof(uint32_t)) + v * (sizeof(td_id) + sizeof(uint32_t) + sizeof(int));
    f->memory = td_alloc(f->td, f->bytes, "program");
    f->live = td_live_nodes(f->in);
    if (!f->memory || !f->live) return false;
    f->groups = f->memory;
    f->group_of = (uint32_t *)(f->groups + n);
    f->next = f->group_of + n;
    f->map = f->next + n;
    f->reads = f->map + v;
    f->number = (int *)(f->reads + v);
    memset(f->group_of, 0xFF, 2 * n * sizeof(uint32_t));
    memset(f->reads, 0, v * sizeof(uint32_t));
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; f->live[i] && k < f->in->nodes[i].inputs; k++) f->reads[f->in->inputs[f->in->nodes[i].input + k]]++;
    return true;
}

static bool is_reduction(const td_op *op) { return op == &td_op_sum || op == &td_op_max; }

/* Whether v is what a reduction of a group gives. */
static bool is_reduced(const fusion *f, td_id v) { return is_reduction(td_producer(f->in, v)->op); }

/* ---- Emitting a group */

static bool emit_singly(fusion *f, const group *g)
{
    for (uint32_t n = g->first; n != TD_NONE; n = f->next[n])
        if (!td_copy_node(f->out, f->in, n, f->map)) return false;
    return true;
}

static uint32_t reads_inside(const fusion *f, const group *g, td_id v)
{
    uint32_t reads = 0;
    for (uint32_t n = g->first; n != TD_NONE; n = f->next[n])
        for (uint32_t i = 0; i < f->in->nodes[n].inputs; i++) reads += f->in->inputs[f->in->nodes[n].input + i] == v;
    return reads;
}

typedef struct chain {
    td_fused_builder builder;
    td_id inputs[TD_FUSED_INPUTS];            /* values of `in` */
    td_id outputs[TD_FUSED_OUTPUTS];          /* in the builder's order */
    int output_count;
} chain;

static int outside_input(fusion *f, chain *c, td_id v)
{
    for (int i = 0; i < c->builder.inputs; i++)
        if (c->inputs[i] == v) return i;
    int number = td_fused_input(&c->builder);
    if (number >= 0) c->inputs[number] = v;
    return f->number[v] = number;
}

static td_fused_draw draw_of(const td_program *p, const td_node *n)
{
    const td_draw_attr *attr = td_node_attr(p, n);
    return (td_fused_draw){ .p = attr->p, .key = attr->key, .micro = n->phase / 2 };
}

static bool add_output(chain *c, td_id v, bool added)
{
    if (added) c->outputs[c->output_count++] = v;
    return added;
}

/* The group's reductions, behind its other outputs. */
static bool reduce_chain(fusion *f, const group *g, chain *c)
{
    const td_value *like = &f->in->values[g->like];
    c->builder.rows.shape = like->shape;
    c->builder.rows.place = like->place;
    c->builder.rows.dims = g->dims;
    for (uint32_t n = g->first; n != TD_NONE; n = f->next[n]) {
        const td_node *node = &f->in->nodes[n];
        if (!is_reduction(node->op)) continue;
        td_fused_reduction how = node->op == &td_op_sum ? TD_FUSED_SUM : TD_FUSED_MAX;
        if (!add_output(c, node->output, td_fused_reduce(&c->builder, how, f->number[td_node_inputs(f->in, node)[0]]))) return false;
    }
    return true;
}

static bool build_chain(fusion *f, uint32_t index, chain *c)
{
    const group *g = &f->groups[index];
    for (uint32_t n = g->first; n != TD_NONE; n = f->next[n]) {
        const td_node *node = &f->in->nodes[n];
        int from[3] = { 0 };
        if (is_reduction(node->op)) continue;
        for (uint32_t i = 0; i < node->inputs; i++) {
            td_id v = f->in->inputs[node->input + i];
            from[i] = f->group_of[f->in->values[v].node] == index ? f->number[v] : outside_input(f, c, v);
            if (from[i] < 0) return false;
        }
        td_id v = node->output;
        td_dtype dtype = (td_dtype)f->in->values[v].dtype;
        f->number[v] = node->op == &td_op_dropout_mask ? td_fused_mask(&c->builder, dtype, draw_of(f->in, node))
                                                       : td_fused_apply(&c->builder, node->op, dtype, from);
        if (f->number[v] < 0) return false;
        if (f->reads[v] == reads_inside(f, g, v)) continue;
        if (!add_output(c, v, td_fused_output(&c->builder, f->number[v]))) return false;
    }
    return reduce_chain(f, g, c);
}

static bool emit_group(fusion *f, uint32_t index)
{
    group *g = &f->groups[index];
    chain c = { .output_count = 0 };
    _Alignas(8) char attr[TD_FUSED_BYTES + 8];
    td_id inputs[TD_FUSED_INPUTS];
    td_value outputs[TD_FUSED_OUTPUTS];
    g->open = false;
    size_t bytes = g->count > 1 && build_chain(f, index, &c) ? td_fused_finish(&c.builder, attr) : 0;
    if (!bytes) return emit_singly(f, g);
    for (int i = 0; i < c.builder.inputs; i++) inputs[i] = f->map[c.inputs[i]];
    for (int k = 0; k < c.output_count; k++) outputs[k] = f->in->values[c.outputs[k]];
    td_id first = td_emit(f->out, &(td_emission){ .op = g->dims ? &td_op_fused_rows : &td_op_fused, .like = &f->in->nodes[g->last],
                                                  .inputs = inputs, .input_count = c.builder.inputs, .attr = attr, .attr_bytes = bytes,
                                                  .outputs = outputs, .output_count = c.output_count, .after = TD_NONE });
    for (int k = 0; k < c.output_count; k++) f->map[c.outputs[k]] = first + (td_id)k;
    return f->td->error == TD_OK;
}

/* ---- Grouping */

/* A whole unit's gradient, as it was packed or came from other ranks. */
static bool is_unit_gradient(const td_program *p, td_id v)
{
    const td_node *n = td_producer(p, v);
    if (n->op == &td_op_cast) n = td_producer(p, p->inputs[n->input]);
    return p->values[v].shape.rank == 1 && (n->op == &td_op_pack || (n->op->flags & TD_OP_COLLECTIVE));
}

/* Adding a micro-batch's gradients to those of earlier ones waits for no later addition: each would keep its terms until then. */
static bool adds_unit_gradient(const td_program *p, const td_node *n)
{
    return n->op == &td_op_add && (is_unit_gradient(p, p->inputs[n->input]) || is_unit_gradient(p, p->inputs[n->input + 1]));
}

static bool may_fuse(const td_program *p, const td_node *n)
{
    bool computes = (n->op->flags & TD_OP_POINTWISE) && n->outputs == 1 && n->inputs >= 1 && n->inputs <= 3;
    bool fits = (computes || n->op == &td_op_dropout_mask) && n->after == TD_NONE;
    return fits && !adds_unit_gradient(p, n);
}

static bool same_iteration(const fusion *f, td_id a, td_id b)
{
    const td_value *x = &f->in->values[a], *y = &f->in->values[b];
    return td_shape_equal(x->shape, y->shape) && td_placement_equal(x->place, y->place);
}

static uint32_t open_group_of(const fusion *f, td_id v)
{
    uint32_t g = f->group_of[f->in->values[v].node];
    return g != TD_NONE && f->groups[g].open ? g : TD_NONE;
}

static void append_member(fusion *f, uint32_t g, uint32_t n)
{
    f->next[f->groups[g].last] = n;
    f->groups[g].last = n;
    f->groups[g].count++;
    f->group_of[n] = g;
}

/* Moves the members of b into a, keeping program order. */
static void unite(fusion *f, uint32_t a, uint32_t b)
{
    uint32_t x = f->groups[a].first, y = f->groups[b].first, *tail = &f->groups[a].first, last = TD_NONE;
    while (x != TD_NONE || y != TD_NONE) {
        uint32_t *from = y == TD_NONE || (x != TD_NONE && x < y) ? &x : &y;
        last = *tail = *from;
        f->group_of[last] = a;
        *from = f->next[last];
        tail = &f->next[last];
    }
    *tail = TD_NONE;
    f->groups[a].last = last;
    f->groups[a].count += f->groups[b].count;
    if (!f->groups[a].dims) f->groups[a].dims = f->groups[b].dims;
    f->groups[b].open = false;
    f->groups[b].count = 0;
}

enum {
    MOST_MEMBERS = 24,
    LEAST_ROW = 16,                           /* elements: at 8 it is not faster than apart */
};

/* Emits a group with reductions unless someone may join it yet: who reads one of its pointwise values. */
static bool close_if_last(fusion *f, uint32_t index)
{
    const group *g = &f->groups[index];
    bool awaited = !g->dims;
    for (uint32_t n = g->first; !awaited && n != TD_NONE; n = f->next[n]) {
        td_id v = f->in->nodes[n].output;
        awaited = !is_reduced(f, v) && f->reads[v] > reads_inside(f, g, v);
    }
    return awaited || emit_group(f, index);
}

/* Whether groups a and b may become one; a may be TD_NONE. */
static bool may_unite(const fusion *f, uint32_t a, uint32_t b)
{
    if (a == TD_NONE) return f->groups[b].count < MOST_MEMBERS;
    const group *x = &f->groups[a], *y = &f->groups[b];
    return x->count + y->count < MOST_MEMBERS && (!x->dims || !y->dims || x->dims == y->dims);
}

static bool close_groups_whose_rows(fusion *f, const td_node *n)
{
    for (uint32_t i = 0; i < n->inputs; i++) {
        td_id v = f->in->inputs[n->input + i];
        uint32_t g = is_reduced(f, v) ? open_group_of(f, v) : TD_NONE;
        if (g != TD_NONE && !emit_group(f, g)) return false;
    }
    return true;
}

static bool take_pointwise(fusion *f, uint32_t index)
{
    const td_node *n = &f->in->nodes[index];
    uint32_t joined = TD_NONE;
    if (!close_groups_whose_rows(f, n)) return false;
    for (uint32_t i = 0; i < n->inputs; i++) {
        uint32_t g = open_group_of(f, f->in->inputs[n->input + i]);
        if (g == TD_NONE || g == joined) continue;
        if (!same_iteration(f, f->groups[g].like, n->output) || !may_unite(f, joined, g)) {
            if (!emit_group(f, g)) return false;
        } else if (joined == TD_NONE) {
            joined = g;
        } else {
            unite(f, joined, g);
        }
    }
    if (joined != TD_NONE) {
        append_member(f, joined, index);
        return close_if_last(f, joined);
    }
    f->groups[f->group_count] = (group){ .first = index, .last = index, .count = 1, .like = n->output, .open = true };
    f->group_of[index] = f->group_count++;
    return true;
}

/* How many ranks share dimension d of v. */
static int64_t parts_along(const fusion *f, const td_value *v, int d)
{
    const td_mesh *mesh = &f->in->td->mesh;
    int64_t parts = 1;
    for (int axis = 0; axis < mesh->axes; axis++)
        if (v->place.kind[axis] == TD_SHARDED && v->place.dim[axis] == d) parts *= mesh->size[axis];
    return parts;
}

/* How many trailing dimensions n reduces, if a chain can; else 0. */
static int reduced_dims(const fusion *f, const td_node *n)
{
    if (!is_reduction(n->op) || n->after != TD_NONE || td_stage_off(f->in->td, TD_STAGE_ROWS)) return 0;
    const td_value *x = &f->in->values[td_node_inputs(f->in, n)[0]];
    const td_reduce_attr *attr = td_node_attr(f->in, n);
    td_shape local = td_local_shape(&f->in->td->mesh, x->shape, x->place);
    int rank = (int)x->shape.rank, first = rank;
    bool even = true;
    while (first > 0 && (attr->axes >> (first - 1) & 1)) first--;
    for (int d = first; d < rank; d++) even = even && local.dim[d] * parts_along(f, x, d) == x->shape.dim[d];
    bool trailing = attr->axes >> first == (1u << (rank - first)) - 1 && !(attr->axes & ((1u << first) - 1));
    bool fits = trailing && even && td_is_float((td_dtype)x->dtype) && td_shape_product(local, first, rank) >= LEAST_ROW;
    return fits && f->in->values[n->output].place.memory == x->place.memory ? rank - first : 0;
}

/* The group that the reduction n joins; TD_NONE: it is left apart. */
static uint32_t group_to_reduce(const fusion *f, const td_node *n)
{
    int dims = reduced_dims(f, n);
    td_id v = dims ? td_node_inputs(f->in, n)[0] : TD_NONE;
    uint32_t g = dims && !is_reduced(f, v) ? open_group_of(f, v) : TD_NONE;
    bool fits = g != TD_NONE && may_unite(f, TD_NONE, g) && (!f->groups[g].dims || f->groups[g].dims == dims);
    return fits ? g : TD_NONE;
}

static bool take_reduction(fusion *f, uint32_t index, uint32_t g)
{
    const td_node *n = &f->in->nodes[index];
    f->groups[g].dims = reduced_dims(f, n);
    append_member(f, g, index);
    return close_if_last(f, g);
}

static bool close_groups_read_by(fusion *f, const td_node *n)
{
    for (uint32_t i = 0; i < n->inputs; i++) {
        uint32_t g = open_group_of(f, f->in->inputs[n->input + i]);
        if (g != TD_NONE && !emit_group(f, g)) return false;
    }
    uint32_t g = n->after == TD_NONE ? TD_NONE : open_group_of(f, n->after);
    return g == TD_NONE || emit_group(f, g);
}

static bool take(fusion *f, uint32_t index)
{
    const td_node *n = &f->in->nodes[index];
    if (may_fuse(f->in, n)) return take_pointwise(f, index);
    uint32_t g = group_to_reduce(f, n);
    if (g != TD_NONE) return take_reduction(f, index, g);
    return close_groups_read_by(f, n) && td_copy_node(f->out, f->in, index, f->map);
}

static bool fuse_all(fusion *f)
{
    for (uint32_t n = 0; n < f->in->node_count; n++)
        if (f->live[n] && !take(f, n)) return false;
    for (uint32_t g = 0; g < f->group_count; g++)
        if (f->groups[g].open && !emit_group(f, g)) return false;
    return true;
}

static td_program *fused(const td_program *in)
{
    fusion f = { .td = in->td, .in = in };
    td_program *out = NULL;
    if (open_tables(&f) && (f.out = td_pass_begin(in->td))) {
        fuse_all(&f);
        out = td_pass_end(f.out);
    }
    td_free(in->td, f.live, in->node_count, "program");
    td_free(in->td, f.memory, f.bytes, "program");
    return out;
}

td_program *td_fuse_pass(const td_program *in)
{
    bool is_gpu = in->td->device->is_gpu;
    td_program *(*const members)(const td_program *) = is_gpu ? td_members_pass : NULL;
    td_program *(*const kept)(const td_program *) = is_gpu && !td_stage_off(in->td, TD_STAGE_KEPT) ? td_kept_pass : NULL;
    td_program *(*const constants)(const td_program *) = is_gpu && !td_stage_off(in->td, TD_STAGE_CONSTANTS) ? td_constants_pass : NULL;
    td_program *(*const passes[])(const td_program *) = { td_absorb_pass, td_epilogue_pass, members, kept, fused, constants };
    td_program *p = NULL;
    for (size_t i = 0; i < sizeof passes / sizeof *passes; i++) {
        if (!passes[i]) continue;
        td_program *next = passes[i](p ? p : in);
        td_program_free(p);
        p = next;
        if (!p) return NULL;
    }
    return p;
}
