/* Blocks: every computed value of a plan starts with one of its own. Blocks then become parts of others, decided in this order:
 *
 *   views      a reshape, a member of a unit: the memory of their input
 *   stores     a unit's new value goes straight into the unit when nobody reads the old one any more
 *   packs      members are computed where the packed value wants them
 *   in place   an elementwise result takes the memory of an input nobody reads afterwards
 *
 * What is left are blocks of the arena with a first and a last task; they are placed so that blocks alive together do not overlap
 * (arena.c).
 */
#include "core/ops/fused.h"
#include "core/planner.h"

#include <string.h>

/* ---- How long they live */

static bool give(td_planner *pl, uint32_t block)
{
    td_planned *plan = pl->plan;
    if (!td_grow(pl->td, (void **)&plan->given, &plan->given_room, plan->given_count + 1, sizeof *plan->given, "program")) return false;
    plan->given[plan->given_count++] = block;
    return true;
}

static bool is_input(const td_planner *pl, const td_block *b) { return b->kind == TD_BLOCK_SLOT && pl->td->slots[b->index].data; }

/* Inputs come last, which the GPU may read from where the caller has them, in the order that they were recorded in. */
static void inputs_last(td_planner *pl)
{
    td_planned *plan = pl->plan;
    uint32_t others = 0;
    for (uint32_t i = 0; i < plan->given_count; i++) {
        uint32_t block = plan->given[i];
        if (is_input(pl, &plan->blocks[block])) continue;
        memmove(plan->given + others + 1, plan->given + others, (i - others) * sizeof *plan->given);
        plan->given[others++] = block;
    }
}

/* Where what the host gives a GPU lies. */
static void lay_out_given(td_planner *pl)
{
    td_planned *plan = pl->plan;
    inputs_last(pl);
    for (uint32_t i = 0; i < plan->given_count; i++) {
        td_block *b = &plan->blocks[plan->given[i]];
        b->offset = plan->slot_bytes;
        plan->slot_bytes += td_block_round(pl, b->bytes);
        if (!is_input(pl, b)) plan->scalar_bytes = plan->slot_bytes;
    }
}

static bool give_block(td_planner *pl, uint32_t index)
{
    const td_node *n = &pl->p->nodes[index];
    if (n->op == &td_op_unit) {
        uint32_t unit = ((const td_unit_attr *)td_node_attr(pl->p, n))->unit;
        uint32_t block = td_unit_block(pl, unit, td_value_bytes(pl, n->output));
        pl->where[n->output] = (td_storage){ block, 0 };
        return block != TD_NONE;
    }
    if (n->op->flags & TD_OP_SOURCE) {
        bool constant = n->op == &td_op_constant;
        uint32_t slot = constant ? index : ((const td_input_attr *)td_node_attr(pl->p, n))->slot;
        int64_t bytes = td_value_bytes(pl, n->output);
        pl->where[n->output].block = td_block_add(pl, (td_block){ .kind = constant ? TD_BLOCK_CONSTANT : TD_BLOCK_SLOT, .index = slot,
                                                                  .first = -1, .last = -1, .bytes = bytes });
        return pl->where[n->output].block != TD_NONE && (!pl->td->device->is_gpu || give(pl, pl->where[n->output].block));
    }
    if (n->op->flags & TD_OP_VIEW) {
        td_id in = pl->p->inputs[n->input];
        pl->where[n->output] = pl->where[in];
        if (n->op == &td_op_part)
            pl->where[n->output].offset +=
                ((const td_part_attr *)td_node_attr(pl->p, n))->offset * td_dtype_size((td_dtype)pl->p->values[n->output].dtype);
        return true;
    }
    if (n->op->flags & TD_OP_EFFECT) return true;
    bool on_host = n->outputs && td_is_on_host(pl, n->op, td_value_memory(pl, n->output));
    if (!td_planner_kernel(pl, n->op, on_host).run) {
        bool on_gpu = pl->td->device->is_gpu && !on_host;
        td_fail(pl->td, TD_ERROR_UNSUPPORTED, "%s: cannot be run on %s: its td_op names no kernel for it, as .%s %s", n->op->name,
                on_gpu ? "a GPU" : "the CPU", on_gpu ? "cuda" : "cpu", td_location(pl->td, n->module, n->file, n->line));
        return false;
    }
    pl->position[index] = pl->tasks;
    for (uint32_t k = 0; k < n->outputs; k++) {
        uint32_t block = td_block_add(pl, (td_block){ .kind = TD_BLOCK_ARENA, .bytes = td_block_round(pl, td_value_bytes(pl, n->output + k)),
                                                      .memory = td_value_memory(pl, n->output + k), .first = pl->tasks, .last = pl->tasks });
        if (block == TD_NONE) return false;
        pl->where[n->output + k] = (td_storage){ block, 0 };
    }
    pl->tasks++;
    return true;
}

static void note_reads(td_planner *pl)
{
    for (uint32_t n = 0; n < pl->p->node_count; n++) {
        const td_node *node = &pl->p->nodes[n];
        if (!pl->live[n] || (node->op->flags & TD_OP_VIEW)) continue;
        int32_t at = node->op == &td_op_output ? TD_FOREVER : node->op->flags & TD_OP_EFFECT ? pl->tasks : pl->position[n];
        for (uint32_t i = 0; i < node->inputs; i++) {
            td_block *b = &pl->plan->blocks[pl->where[pl->p->inputs[node->input + i]].block];
            if (at > b->last) b->last = at;
        }
    }
}

/* ---- Which become parts of others */

static void make_part(td_planner *pl, uint32_t part, uint32_t whole, int64_t offset)
{
    td_block *b = &pl->plan->blocks[part], *w = &pl->plan->blocks[whole];
    b->part_of = whole;
    b->offset = offset;
    if (b->first < w->first) w->first = b->first;
    if (b->last > w->last) w->last = b->last;
}

/* The value that v shows through views: itself if it is no view. */
static td_id shown_by(const td_planner *pl, td_id v)
{
    while (td_producer(pl->p, v)->op->flags & TD_OP_VIEW) v = pl->p->inputs[td_producer(pl->p, v)->input];
    return v;
}

/* Whether value v is the whole of the block it was given. */
static bool fills_block(const td_planner *pl, td_id v)
{
    td_storage s = pl->where[v];
    return s.offset == 0 && td_block_round(pl, td_value_bytes(pl, v)) == pl->plan->blocks[s.block].bytes;
}

static bool same_part(const td_planner *pl, td_id a, td_id b)
{
    const td_value *x = &pl->p->values[a], *y = &pl->p->values[b];
    return td_dtype_size((td_dtype)x->dtype) == td_dtype_size((td_dtype)y->dtype) && td_value_bytes(pl, a) == td_value_bytes(pl, b) &&
           td_shape_equal(x->shape, y->shape) && x->place.memory == y->place.memory;
}

/* Whether node n may write its output `out` where input i is: each element is read before it is written, and nothing else
 * that n reads lies there differently. */
static bool may_overwrite(const td_planner *pl, const td_node *n, td_id out, uint32_t i)
{
    td_id in = pl->p->inputs[n->input + i];
    if (!same_part(pl, in, out)) return false;
    td_storage mine = td_storage_of(pl, in);
    for (uint32_t j = 0; j < n->inputs; j++) {
        td_id other = pl->p->inputs[n->input + j];
        td_storage theirs = td_storage_of(pl, other);
        if (theirs.block == mine.block && (theirs.offset != mine.offset || !same_part(pl, other, in))) return false;
    }
    return true;
}

/* Whether output k of n has each element from the inputs' elements at its index. */
static bool is_pointwise(const td_planner *pl, const td_node *n, uint32_t k)
{
    if (n->op != &td_op_fused_rows) return n->op->flags & TD_OP_POINTWISE;
    td_fused_header header = td_fused_code_of(td_node_attr(pl->p, n)).header;
    return (int)k < td_fused_full_outputs(&header);
}

/* The input whose memory output k of n may take, tried from input *i on; false: no more. */
static bool next_candidate(const td_planner *pl, const td_node *n, uint32_t k, uint32_t *i)
{
    bool pointwise = is_pointwise(pl, n, k);
    if (!pointwise && !(n->op->flags & TD_OP_INPLACE)) return false;
    if (pointwise) {
        for (; *i < n->inputs; (*i)++)
            if (may_overwrite(pl, n, n->output + k, *i)) return true;
        return false;
    }
    uint32_t paired = (uint32_t)td_paired_input(n, k);
    if (*i > paired || paired >= n->inputs) return false;
    *i = paired;
    return may_overwrite(pl, n, n->output + k, paired);
}

/* The computed value behind v, if v is all of it and it has a block of the arena to itself; TD_NONE otherwise. */
static td_id whole_value(const td_planner *pl, td_id v)
{
    td_id made = shown_by(pl, v);
    td_storage s = td_storage_of(pl, v);
    bool whole = pl->plan->blocks[s.block].kind == TD_BLOCK_ARENA && !s.offset && fills_block(pl, made) && fills_block(pl, v) &&
                 s.block == pl->where[made].block;
    return whole ? made : TD_NONE;
}

/* Whether a value made by a node may be written to the unit although the unit's old value, read until task `last`, is there: all reads
 * come before, or the last is by the very node, element by element. */
static bool may_replace(const td_planner *pl, uint32_t unit_block, int32_t last, td_id made)
{
    const td_node *n = td_producer(pl->p, made);
    int32_t at = pl->position[pl->p->values[made].node];
    if (last < at) return true;
    if (last > at) return false;
    for (uint32_t i = 0; next_candidate(pl, n, made - n->output, &i); i++)
        if (td_storage_of(pl, pl->p->inputs[n->input + i]).block == unit_block) return true;
    return false;
}

/* The input that the maker of `made` updates in place, if it is computed for that alone: an earlier value of the same unit. */
static td_id earlier_value(const td_planner *pl, td_id made)
{
    const td_node *n = td_producer(pl->p, made);
    if (!(n->op->flags & TD_OP_INPLACE) || (n->op->flags & TD_OP_POINTWISE)) return TD_NONE;
    td_id before = whole_value(pl, pl->p->inputs[n->input + (uint32_t)td_paired_input(n, made - n->output)]);
    if (before == TD_NONE || pl->plan->blocks[pl->where[before].block].last != pl->position[pl->p->values[made].node]) return TD_NONE;
    return before;
}

/* A store needs no copy if nobody reads the unit's old value after the node that makes the new one has begun. Where several updates
 * follow one another, all of their values are made there, or none. */
static void store_in_place(td_planner *pl, uint32_t unit, td_id v)
{
    td_id last = whole_value(pl, v), first = last;
    if (last == TD_NONE) return;
    int64_t bytes = td_value_bytes(pl, v);
    uint32_t block = td_unit_block(pl, unit, bytes);
    if (block == TD_NONE || td_block_round(pl, pl->plan->blocks[block].bytes) != td_block_round(pl, bytes)) return;
    for (td_id before = earlier_value(pl, first); before != TD_NONE; before = earlier_value(pl, first)) first = before;
    if (!may_replace(pl, block, pl->plan->blocks[block].last, first)) return;
    for (td_id at = last, before; at != TD_NONE; at = before) {
        before = at == first ? TD_NONE : earlier_value(pl, at);
        make_part(pl, pl->where[at].block, block, 0);
    }
    pl->plan->blocks[block].last = TD_FOREVER; /* nothing else may be stored there */
}

static void pack_in_place(td_planner *pl, uint32_t index)
{
    const td_node *n = &pl->p->nodes[index];
    td_storage whole = td_storage_of(pl, n->output);
    if (pl->plan->blocks[whole.block].kind != TD_BLOCK_ARENA) return;
    const td_pack_attr *a = td_node_attr(pl->p, n);
    const int64_t *offset = (const int64_t *)(a + 1);
    int64_t item = td_dtype_size((td_dtype)pl->p->values[n->output].dtype);
    for (uint32_t i = 0; i < n->inputs; i++) {
        td_id v = pl->p->inputs[n->input + i];
        td_storage s = td_storage_of(pl, v);
        if (s.block != whole.block && whole_value(pl, v) != TD_NONE)
            make_part(pl, s.block, whole.block, whole.offset + offset[i] * item);
    }
}

static void elementwise_in_place(td_planner *pl, uint32_t index)
{
    const td_node *n = &pl->p->nodes[index];
    for (uint32_t k = 0; k < n->outputs; k++) {
        td_storage out = td_storage_of(pl, n->output + k);
        if (pl->plan->blocks[out.block].kind != TD_BLOCK_ARENA || out.block != pl->where[n->output + k].block) continue;
        for (uint32_t i = 0; next_candidate(pl, n, k, &i); i++) {
            td_id v = pl->p->inputs[n->input + i];
            td_storage in = td_storage_of(pl, v);
            const td_block *b = &pl->plan->blocks[in.block];
            if (b->kind != TD_BLOCK_ARENA || in.offset || b->last != pl->position[index] || in.block == out.block ||
                b->bytes != pl->plan->blocks[out.block].bytes)
                continue;
            make_part(pl, out.block, in.block, 0);
            break;
        }
    }
}

/* ---- The whole */

bool td_blocks_give(td_planner *pl)
{
    const td_program *p = pl->p;
    for (uint32_t n = 0; n < p->node_count; n++)
        if (pl->live[n] && !give_block(pl, n)) return false;
    lay_out_given(pl);
    note_reads(pl);
    for (uint32_t n = 0; n < p->node_count; n++)
        if (p->nodes[n].op == &td_op_store)
            store_in_place(pl, ((const td_unit_attr *)td_node_attr(p, &p->nodes[n]))->unit, p->inputs[p->nodes[n].input]);
    for (uint32_t n = 0; n < p->node_count; n++)
        if (pl->live[n] && p->nodes[n].op == &td_op_pack) pack_in_place(pl, n);
    for (uint32_t n = 0; n < p->node_count; n++)
        if (pl->live[n] && td_is_task(&p->nodes[n])) elementwise_in_place(pl, n);
    return true;
}
