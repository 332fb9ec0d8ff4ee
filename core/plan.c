/* plan: gives every value its place in memory and makes the list of calls that a step is.
 *
 * Every computed value starts with a block of its own. Blocks then become parts of others, decided in this order:
 *
 *   views      a reshape, a member of a unit: the memory of their input
 *   stores     a unit's new value goes straight into the unit when nobody reads the old one any more
 *   packs      members are computed where the packed value wants them
 *   in place   an elementwise result takes the memory of an input nobody reads afterwards
 *
 * What is left are blocks of the arena with a first and a last task; they are placed so that blocks alive together do
 * not overlap. A store that could not be done in place is a copy at the end; values that are themselves state or input
 * are copied aside before the first such store, so that two states can be swapped and an old value kept.
 */
#include "core/ops/fused.h"

#include <string.h>

/* Of blocks: a vector of the CPU's. */
enum { ALIGN = 64, FOREVER = INT32_MAX };

typedef struct storage {
    uint32_t block;                           /* TD_NONE: none */
    int64_t offset;
} storage;

typedef struct planner {
    td_context *td;
    td_planned *plan;
    const td_program *p;
    char *live;
    storage *where;                           /* value -> its first block, before parts are followed */
    int32_t *position;                        /* node -> its task, or -1 */
    uint32_t *unit_block;                     /* unit -> its block, or TD_NONE */
    int32_t tasks;                            /* of the schedule; copies and stores come after */
    void *memory;
    size_t bytes;
} planner;

static int64_t rounded(const planner *pl, int64_t bytes)
{
    return td_round_up(bytes, pl->td->device->is_gpu ? TD_GPU_ALIGN : ALIGN);
}

static int64_t local_bytes(const planner *pl, td_id v)
{
    const td_value *value = &pl->p->values[v];
    return td_shape_elements(td_local_shape(&pl->td->mesh, value->shape, value->place)) * td_dtype_size((td_dtype)value->dtype);
}

static td_memory memory_of(const planner *pl, td_id v) { return (td_memory)pl->p->values[v].place.memory; }

/* Whether a GPU's host computes what op gives in `memory`: state that is offloaded is updated there. */
static bool is_on_host(const planner *pl, const td_op *op, td_memory memory)
{
    return pl->td->device->is_gpu && memory == TD_HOST && !(op->flags & TD_OP_COPY);
}

static td_device_kernel kernel_of(const planner *pl, const td_op *op, bool on_host)
{
    return on_host ? (td_device_kernel){ op->cpu, op->prepare, op->release } : td_kernel_on(pl->td, op);
}

static uint32_t add_block(planner *pl, td_block block)
{
    td_planned *plan = pl->plan;
    if (!td_grow(pl->td, (void **)&plan->blocks, &plan->block_room, plan->block_count + 1, sizeof *plan->blocks, "program")) return TD_NONE;
    block.part_of = TD_NONE;
    plan->blocks[plan->block_count] = block;
    return plan->block_count++;
}

/* Follows parts to the block that has memory. */
static storage resolve(const planner *pl, storage s)
{
    while (s.block != TD_NONE && pl->plan->blocks[s.block].part_of != TD_NONE) {
        s.offset += pl->plan->blocks[s.block].offset;
        s.block = pl->plan->blocks[s.block].part_of;
    }
    return s;
}

static storage storage_of(const planner *pl, td_id v) { return resolve(pl, pl->where[v]); }

static void make_part(planner *pl, uint32_t part, uint32_t whole, int64_t offset)
{
    td_block *b = &pl->plan->blocks[part], *w = &pl->plan->blocks[whole];
    b->part_of = whole;
    b->offset = offset;
    if (b->first < w->first) w->first = b->first;
    if (b->last > w->last) w->last = b->last;
}

/* ---- Blocks and how long they live */

static bool is_task(const td_node *n) { return !(n->op->flags & (TD_OP_SOURCE | TD_OP_VIEW | TD_OP_EFFECT)); }

static bool give_block(planner *pl, uint32_t index)
{
    const td_node *n = &pl->p->nodes[index];
    if (n->op == &td_op_unit) {
        uint32_t unit = ((const td_unit_attr *)td_node_attr(pl->p, n))->unit;
        if (pl->unit_block[unit] == TD_NONE)
            pl->unit_block[unit] = add_block(pl, (td_block){ .kind = TD_BLOCK_UNIT, .index = unit, .first = -1, .last = -1,
                                                             .bytes = local_bytes(pl, n->output) });
        pl->where[n->output] = (storage){ pl->unit_block[unit], 0 };
        return pl->unit_block[unit] != TD_NONE;
    }
    if (n->op->flags & TD_OP_SOURCE) {
        uint32_t slot = ((const td_input_attr *)td_node_attr(pl->p, n))->slot;
        int64_t bytes = local_bytes(pl, n->output);
        pl->where[n->output].block = add_block(pl, (td_block){ .kind = TD_BLOCK_SLOT, .index = slot, .first = -1, .last = -1, .bytes = bytes,
                                                               .offset = pl->plan->slot_bytes });
        if (pl->td->device->is_gpu) pl->plan->slot_bytes += rounded(pl, bytes);
        return pl->where[n->output].block != TD_NONE;
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
    bool on_host = n->outputs && is_on_host(pl, n->op, memory_of(pl, n->output));
    if (!kernel_of(pl, n->op, on_host).run) {
        td_fail(pl->td, TD_ERROR_UNSUPPORTED, "%s: cannot be run on %s %s", n->op->name, pl->td->device->is_gpu ? "a GPU" : "the CPU",
                td_location(pl->td, n->module, n->file, n->line));
        return false;
    }
    pl->position[index] = pl->tasks;
    for (uint32_t k = 0; k < n->outputs; k++) {
        uint32_t block = add_block(pl, (td_block){ .kind = TD_BLOCK_ARENA, .bytes = rounded(pl, local_bytes(pl, n->output + k)),
                                                   .memory = memory_of(pl, n->output + k), .first = pl->tasks, .last = pl->tasks });
        if (block == TD_NONE) return false;
        pl->where[n->output + k] = (storage){ block, 0 };
    }
    pl->tasks++;
    return true;
}

static void note_reads(planner *pl)
{
    for (uint32_t n = 0; n < pl->p->node_count; n++) {
        const td_node *node = &pl->p->nodes[n];
        if (!pl->live[n] || (node->op->flags & TD_OP_VIEW)) continue;
        int32_t at = node->op == &td_op_output ? FOREVER : node->op->flags & TD_OP_EFFECT ? pl->tasks : pl->position[n];
        for (uint32_t i = 0; i < node->inputs; i++) {
            td_block *b = &pl->plan->blocks[pl->where[pl->p->inputs[node->input + i]].block];
            if (at > b->last) b->last = at;
        }
    }
}

/* ---- In place */

/* The value that v shows through views: itself if it is no view. */
static td_id shown_by(const planner *pl, td_id v)
{
    while (td_producer(pl->p, v)->op->flags & TD_OP_VIEW) v = pl->p->inputs[td_producer(pl->p, v)->input];
    return v;
}

/* Whether value v is the whole of the block it was given. */
static bool fills_block(const planner *pl, td_id v)
{
    storage s = pl->where[v];
    return s.offset == 0 && rounded(pl, local_bytes(pl, v)) == pl->plan->blocks[s.block].bytes;
}

static int paired_input(const td_node *n, uint32_t output)
{
    int last = TD_RULE_OUTPUTS - 1;
    return (int)output <= last ? n->op->inplace[output] : n->op->inplace[last] + (int)output - last;
}

static bool same_part(const planner *pl, td_id a, td_id b)
{
    const td_value *x = &pl->p->values[a], *y = &pl->p->values[b];
    return td_dtype_size((td_dtype)x->dtype) == td_dtype_size((td_dtype)y->dtype) && local_bytes(pl, a) == local_bytes(pl, b) &&
           td_shape_equal(x->shape, y->shape) && x->place.memory == y->place.memory;
}

/* Whether node n may write its output `out` where input i is: each element is read before it is written, and nothing else
 * that n reads lies there differently. */
static bool may_overwrite(const planner *pl, const td_node *n, td_id out, uint32_t i)
{
    td_id in = pl->p->inputs[n->input + i];
    if (!same_part(pl, in, out)) return false;
    storage mine = storage_of(pl, in);
    for (uint32_t j = 0; j < n->inputs; j++) {
        td_id other = pl->p->inputs[n->input + j];
        storage theirs = storage_of(pl, other);
        if (theirs.block == mine.block && (theirs.offset != mine.offset || !same_part(pl, other, in))) return false;
    }
    return true;
}

/* Whether output k of n has each element from the inputs' elements at its index. */
static bool is_pointwise(const planner *pl, const td_node *n, uint32_t k)
{
    if (n->op != &td_op_fused_rows) return n->op->flags & TD_OP_POINTWISE;
    td_fused_header header = td_fused_code_of(td_node_attr(pl->p, n)).header;
    return (int)k < td_fused_full_outputs(&header);
}

/* The input whose memory output k of n may take, tried from input *i on; false: no more. */
static bool next_candidate(const planner *pl, const td_node *n, uint32_t k, uint32_t *i)
{
    bool pointwise = is_pointwise(pl, n, k);
    if (!pointwise && !(n->op->flags & TD_OP_INPLACE)) return false;
    if (pointwise) {
        for (; *i < n->inputs; (*i)++)
            if (may_overwrite(pl, n, n->output + k, *i)) return true;
        return false;
    }
    uint32_t paired = (uint32_t)paired_input(n, k);
    if (*i > paired || paired >= n->inputs) return false;
    *i = paired;
    return may_overwrite(pl, n, n->output + k, paired);
}

/* The computed value behind v, if v is all of it and it has a block of the arena to itself; TD_NONE otherwise. */
static td_id whole_value(const planner *pl, td_id v)
{
    td_id made = shown_by(pl, v);
    storage s = storage_of(pl, v);
    bool whole = pl->plan->blocks[s.block].kind == TD_BLOCK_ARENA && !s.offset && fills_block(pl, made) && fills_block(pl, v) &&
                 s.block == pl->where[made].block;
    return whole ? made : TD_NONE;
}

static uint32_t block_of_unit(planner *pl, uint32_t unit, int64_t bytes)
{
    if (pl->unit_block[unit] == TD_NONE)
        pl->unit_block[unit] = add_block(pl, (td_block){ .kind = TD_BLOCK_UNIT, .index = unit, .bytes = bytes, .first = -1, .last = -1 });
    return pl->unit_block[unit];
}

/* Whether a value made by a node may be written to the unit although the unit's old value, read until task `last`, is there: all reads
 * come before, or the last is by the very node, element by element. */
static bool may_replace(const planner *pl, uint32_t unit_block, int32_t last, td_id made)
{
    const td_node *n = td_producer(pl->p, made);
    int32_t at = pl->position[pl->p->values[made].node];
    if (last < at) return true;
    if (last > at) return false;
    for (uint32_t i = 0; next_candidate(pl, n, made - n->output, &i); i++)
        if (storage_of(pl, pl->p->inputs[n->input + i]).block == unit_block) return true;
    return false;
}

/* The input that the maker of `made` updates in place, if it is computed for that alone: an earlier value of the same unit. */
static td_id earlier_value(const planner *pl, td_id made)
{
    const td_node *n = td_producer(pl->p, made);
    if (!(n->op->flags & TD_OP_INPLACE) || (n->op->flags & TD_OP_POINTWISE)) return TD_NONE;
    td_id before = whole_value(pl, pl->p->inputs[n->input + (uint32_t)paired_input(n, made - n->output)]);
    if (before == TD_NONE || pl->plan->blocks[pl->where[before].block].last != pl->position[pl->p->values[made].node]) return TD_NONE;
    return before;
}

/* A store needs no copy if nobody reads the unit's old value after the node that makes the new one has begun. Where several updates
 * follow one another, all of their values are made there, or none. */
static void store_in_place(planner *pl, uint32_t unit, td_id v)
{
    td_id last = whole_value(pl, v), first = last;
    if (last == TD_NONE) return;
    int64_t bytes = local_bytes(pl, v);
    uint32_t block = block_of_unit(pl, unit, bytes);
    if (block == TD_NONE || rounded(pl, pl->plan->blocks[block].bytes) != rounded(pl, bytes)) return;
    for (td_id before = earlier_value(pl, first); before != TD_NONE; before = earlier_value(pl, first)) first = before;
    if (!may_replace(pl, block, pl->plan->blocks[block].last, first)) return;
    for (td_id at = last, before; at != TD_NONE; at = before) {
        before = at == first ? TD_NONE : earlier_value(pl, at);
        make_part(pl, pl->where[at].block, block, 0);
    }
    pl->plan->blocks[block].last = FOREVER; /* nothing else may be stored there */
}

static void pack_in_place(planner *pl, uint32_t index)
{
    const td_node *n = &pl->p->nodes[index];
    storage whole = storage_of(pl, n->output);
    if (pl->plan->blocks[whole.block].kind != TD_BLOCK_ARENA) return;
    const td_pack_attr *a = td_node_attr(pl->p, n);
    const int64_t *offset = (const int64_t *)(a + 1);
    int64_t item = td_dtype_size((td_dtype)pl->p->values[n->output].dtype);
    for (uint32_t i = 0; i < n->inputs; i++) {
        td_id v = pl->p->inputs[n->input + i];
        storage s = storage_of(pl, v);
        if (s.block != whole.block && whole_value(pl, v) != TD_NONE)
            make_part(pl, s.block, whole.block, whole.offset + offset[i] * item);
    }
}

static void elementwise_in_place(planner *pl, uint32_t index)
{
    const td_node *n = &pl->p->nodes[index];
    for (uint32_t k = 0; k < n->outputs; k++) {
        storage out = storage_of(pl, n->output + k);
        if (pl->plan->blocks[out.block].kind != TD_BLOCK_ARENA || out.block != pl->where[n->output + k].block) continue;
        for (uint32_t i = 0; next_candidate(pl, n, k, &i); i++) {
            td_id v = pl->p->inputs[n->input + i];
            storage in = storage_of(pl, v);
            const td_block *b = &pl->plan->blocks[in.block];
            if (b->kind != TD_BLOCK_ARENA || in.offset || b->last != pl->position[index] || in.block == out.block ||
                b->bytes != pl->plan->blocks[out.block].bytes)
                continue;
            make_part(pl, out.block, in.block, 0);
            break;
        }
    }
}

/* ---- Tasks */

static bool bind(planner *pl, void **pointer, storage s, bool on_host)
{
    td_planned *plan = pl->plan;
    if (!td_grow(pl->td, (void **)&plan->bindings, &plan->binding_room, plan->binding_count + 1, sizeof *plan->bindings, "program")) return false;
    plan->bindings[plan->binding_count++] = (td_binding){ pointer, s.block, s.offset, on_host };
    return true;
}

static td_arg arg_of(const planner *pl, td_id v)
{
    const td_value *value = &pl->p->values[v];
    return (td_arg){ .shape = td_local_shape(&pl->td->mesh, value->shape, value->place), .global = value->shape, .place = value->place,
                     .dtype = (td_dtype)value->dtype };
}

static bool is_in_place(const planner *pl, const td_node *n)
{
    if (!(n->op->flags & TD_OP_INPLACE) || (n->op->flags & TD_OP_POINTWISE) || !n->outputs) return false;
    uint32_t paired = (uint32_t)paired_input(n, 0);
    if (paired >= n->inputs) return false;
    storage in = storage_of(pl, pl->p->inputs[n->input + paired]), out = storage_of(pl, n->output);
    return in.block == out.block && in.offset == out.offset;
}

/* What packing moves: members that are not in their place yet are read and written. */
static int64_t packed_bytes(const planner *pl, const td_node *n)
{
    const td_pack_attr *a = td_node_attr(pl->p, n);
    const int64_t *offset = (const int64_t *)(a + 1);
    storage whole = storage_of(pl, n->output);
    int64_t item = td_dtype_size((td_dtype)pl->p->values[n->output].dtype), bytes = 0;
    for (uint32_t i = 0; i < n->inputs; i++) {
        td_id v = pl->p->inputs[n->input + i];
        storage s = storage_of(pl, v);
        if (s.block != whole.block || s.offset != whole.offset + offset[i] * item) bytes += 2 * local_bytes(pl, v);
    }
    return bytes;
}

/* Adds a call of op for node `index`; in and out are values, which are where they were planned, or where `from` and `to` say. */
static bool add_task(planner *pl, const td_op *op, uint32_t index, const td_id *in, uint32_t inputs, const td_id *out, uint32_t outputs,
                     storage from, storage to)
{
    td_planned *plan = pl->plan;
    td_context *td = pl->td;
    const td_node *n = &pl->p->nodes[index];
    td_task *task = &plan->tasks[plan->task_count];
    td_arg *args = plan->args + plan->arg_count;
    bool on_host = outputs && is_on_host(pl, op, memory_of(pl, out[0]));
    plan->arg_count += inputs + outputs;
    plan->host_tasks += on_host;
    for (uint32_t i = 0; i < inputs + outputs; i++) {
        td_id v = i < inputs ? in[i] : out[i - inputs];
        args[i] = arg_of(pl, v);
        storage s = i < inputs ? from : to;
        if (!bind(pl, &args[i].data, s.block != TD_NONE ? s : storage_of(pl, v), on_host)) return false;
    }
    bool own = op == n->op;
    td_device_kernel kernel = kernel_of(pl, op, on_host);
    *task = (td_task){ .run = kernel.run, .release = kernel.release, .node = index, .on_host = on_host,
                       .kernel = { .op = op, .attr = own ? td_node_attr(pl->p, n) : NULL, .attr_bytes = own ? n->attr_bytes : 0,
                                   .inputs = (int)inputs, .outputs = (int)outputs, .in = args, .out = args + inputs, .run = &td->run,
                                   .phase = n->phase, .in_place = own && is_in_place(pl, n) } };
    td_preparation prepared = { 0 };
    if (kernel.prepare && !kernel.prepare(td, &task->kernel, &prepared)) return false;
    task->kernel.prepared = prepared.prepared;
    task->kernel.way = prepared.way;
    int32_t at = (int32_t)plan->task_count++;
    if (prepared.workspace_bytes > td->options.workspace_bytes) {
        td_fail(td, TD_ERROR_MEMORY, "%s: wants %lld bytes of workspace, the cap is %lld; raise workspace_bytes %s", op->name,
                (long long)prepared.workspace_bytes, (long long)td->options.workspace_bytes, td_location(td, n->module, n->file, n->line));
        return false;
    }
    if (prepared.workspace_bytes) {
        uint32_t block = add_block(pl, (td_block){ .kind = TD_BLOCK_ARENA, .bytes = rounded(pl, prepared.workspace_bytes), .first = at, .last = at,
                                                   .memory = outputs ? memory_of(pl, out[0]) : TD_DEVICE });
        if (block == TD_NONE || !bind(pl, &task->kernel.workspace, (storage){ block, 0 }, on_host)) return false;
    }
    td_cost cost = op->cost ? op->cost(&task->kernel) : (td_cost){ 0 };
    for (uint32_t i = 0; !op->cost && i < inputs + outputs; i++)
        cost.bytes += td_shape_elements(args[i].shape) * td_dtype_size(args[i].dtype);
    if (op == &td_op_pack) cost.bytes = packed_bytes(pl, n);
    task->cost = cost;
    plan->cost.flops += cost.flops;
    plan->cost.bytes += cost.bytes;
    plan->cost.sent += cost.sent;
    plan->cost.copied += cost.copied;
    plan->comm_calls += (op->flags & TD_OP_COLLECTIVE) != 0;
    return true;
}

static void copy_cpu(const td_kernel *k)
{
    int64_t bytes = td_shape_elements(k->in[0].shape) * td_dtype_size(k->in[0].dtype);
    if (k->out[0].data != k->in[0].data) memcpy(k->out[0].data, k->in[0].data, (size_t)bytes);
}

TD_CUDA_KERNEL(td_copy_cuda);
static const td_op copy_op = { .name = "copy", .inputs = 1, .cpu = copy_cpu, .cuda = TD_CUDA(td_copy_cuda) };
static const storage nowhere = { TD_NONE, 0 };

static bool add_schedule(planner *pl)
{
    for (uint32_t i = 0; i < pl->p->node_count; i++) {
        const td_node *n = &pl->p->nodes[i];
        if (!pl->live[i] || !is_task(n)) continue;
        td_id out[TD_CALL_OUTPUTS];
        for (uint32_t k = 0; k < n->outputs; k++) out[k] = n->output + k;
        if (!add_task(pl, n->op, i, td_node_inputs(pl->p, n), n->inputs, out, n->outputs, nowhere, nowhere)) return false;
    }
    return true;
}

static bool is_unit_itself(const planner *pl, td_id v, uint32_t unit)
{
    storage s = storage_of(pl, v);
    return s.block == pl->unit_block[unit] && s.offset == 0;
}

/* Copies value v, which is state or input, to a block of its own that lives until the end, or forever. */
static bool copy_aside(planner *pl, uint32_t node, td_id v, int32_t last, storage *to)
{
    int32_t at = (int32_t)pl->plan->task_count;
    uint32_t block = add_block(pl, (td_block){ .kind = TD_BLOCK_ARENA, .bytes = rounded(pl, local_bytes(pl, v)), .memory = memory_of(pl, v),
                                               .first = at, .last = last });
    *to = (storage){ block, 0 };
    return block != TD_NONE && add_task(pl, &copy_op, node, &v, 1, &v, 1, nowhere, *to);
}

static bool add_output(planner *pl, const td_node *n, storage at)
{
    td_planned *plan = pl->plan;
    td_id v = pl->p->inputs[n->input];
    const td_value *value = &pl->p->values[v];
    if (!td_grow(pl->td, (void **)&plan->outputs, &plan->output_room, plan->output_count + 1, sizeof *plan->outputs, "program")) return false;
    plan->outputs[plan->output_count++] = (td_plan_output){ .recorded = ((const td_output_attr *)td_node_attr(pl->p, n))->recorded, .value = v,
                                                            .dtype = (td_dtype)value->dtype, .shape = value->shape,
                                                            .block = at.block, .offset = at.offset };
    return true;
}

/* Copies aside first, then the stores that are copies. */
static bool add_endings(planner *pl, storage *aside)
{
    for (uint32_t i = 0; i < pl->p->node_count; i++) {
        const td_node *n = &pl->p->nodes[i];
        aside[i] = nowhere;
        if (!pl->live[i] || !(n->op->flags & TD_OP_EFFECT)) continue;
        td_id v = pl->p->inputs[n->input];
        storage s = storage_of(pl, v);
        bool is_output = n->op == &td_op_output;
        bool theirs = pl->plan->blocks[s.block].kind != TD_BLOCK_ARENA;
        if (!is_output && is_unit_itself(pl, v, ((const td_unit_attr *)td_node_attr(pl->p, n))->unit)) continue;
        if (theirs && !copy_aside(pl, i, v, is_output ? FOREVER : FOREVER - 1, &aside[i])) return false;
        if (is_output && !add_output(pl, n, theirs ? aside[i] : s)) return false;
    }
    for (uint32_t i = 0; i < pl->p->node_count; i++) {
        const td_node *n = &pl->p->nodes[i];
        if (!pl->live[i] || n->op != &td_op_store) continue;
        td_id v = pl->p->inputs[n->input];
        uint32_t unit = ((const td_unit_attr *)td_node_attr(pl->p, n))->unit;
        if (is_unit_itself(pl, v, unit)) continue;
        uint32_t block = block_of_unit(pl, unit, local_bytes(pl, v));
        if (block == TD_NONE || !add_task(pl, &copy_op, i, &v, 1, &v, 1, aside[i], (storage){ block, 0 })) return false;
        storage s = aside[i].block != TD_NONE ? aside[i] : storage_of(pl, v);
        td_block *b = &pl->plan->blocks[s.block];
        int32_t at = (int32_t)pl->plan->task_count - 1;
        if (b->last < at || b->last == FOREVER - 1) b->last = at;
    }
    return true;
}

/* ---- The whole */

/* Parts know where they are only once their wholes do; bindings of slots go last. */
static void finish_bindings(planner *pl)
{
    td_planned *plan = pl->plan;
    uint32_t fixed = 0;
    for (uint32_t i = 0; i < plan->binding_count; i++) {
        if (plan->blocks[plan->bindings[i].block].kind == TD_BLOCK_SLOT) continue;
        td_binding swap = plan->bindings[fixed];
        plan->bindings[fixed++] = plan->bindings[i];
        plan->bindings[i] = swap;
    }
    plan->fixed_count = fixed;
}

static bool open_planner(planner *pl)
{
    const td_program *p = pl->p;
    td_context *td = pl->td;
    pl->live = td_live_nodes(p);
    pl->bytes = p->value_count * sizeof(storage) + p->node_count * (sizeof(storage) + sizeof(int32_t)) + td->unit_count * sizeof(uint32_t);
    pl->memory = td_alloc(td, pl->bytes, "program");
    if (!pl->live || !pl->memory) return false;
    memset(pl->memory, 0xFF, pl->bytes);
    pl->where = pl->memory;
    pl->position = (int32_t *)(pl->where + p->value_count + p->node_count);
    pl->unit_block = (uint32_t *)(pl->position + p->node_count);
    for (uint32_t v = 0; v < p->value_count; v++) pl->where[v].offset = 0;
    uint32_t args = 0, tasks = 0;
    for (uint32_t n = 0; n < p->node_count; n++) {
        args += p->nodes[n].inputs + p->nodes[n].outputs + 4;
        tasks += 2;
    }
    td_planned *plan = pl->plan; /* pointers into these are kept: they must not grow */
    return td_grow(td, (void **)&plan->args, &plan->arg_room, args + 1, sizeof *plan->args, "program") &&
           td_grow(td, (void **)&plan->tasks, &plan->task_room, tasks + 1, sizeof *plan->tasks, "program");
}

static bool make(planner *pl)
{
    const td_program *p = pl->p;
    if (!open_planner(pl)) return false;
    for (uint32_t n = 0; n < p->node_count; n++)
        if (pl->live[n] && !give_block(pl, n)) return false;
    note_reads(pl);
    for (uint32_t n = 0; n < p->node_count; n++)
        if (p->nodes[n].op == &td_op_store)
            store_in_place(pl, ((const td_unit_attr *)td_node_attr(p, &p->nodes[n]))->unit, p->inputs[p->nodes[n].input]);
    for (uint32_t n = 0; n < p->node_count; n++)
        if (pl->live[n] && p->nodes[n].op == &td_op_pack) pack_in_place(pl, n);
    for (uint32_t n = 0; n < p->node_count; n++)
        if (pl->live[n] && is_task(&p->nodes[n])) elementwise_in_place(pl, n);
    if (!add_schedule(pl) || !add_endings(pl, pl->where + p->value_count)) return false;
    if (!td_queues_give(pl->td, pl->plan) || !td_arena_arrange(pl->td, pl->plan)) return false;
    finish_bindings(pl);
    return pl->td->error == TD_OK;
}

td_planned *td_plan_make(td_context *td, td_program *final)
{
    td_planned *plan = td_alloc(td, sizeof *plan, "program");
    if (!plan) {
        td_program_free(final);
        return NULL;
    }
    *plan = (td_planned){ .program = final, .recording = { .td = td } };
    planner pl = { .td = td, .plan = plan, .p = final };
    bool made = make(&pl);
    td_free(td, pl.live, final->node_count, "program");
    td_free(td, pl.memory, pl.bytes, "program");
    if (made) return plan;
    td_plan_free(td, plan);
    return NULL;
}

const td_block *td_block_root(const td_planned *plan, uint32_t block, int64_t *offset)
{
    const td_block *b = &plan->blocks[block];
    for (; b->part_of != TD_NONE; b = &plan->blocks[b->part_of]) *offset += b->offset;
    return b;
}

void td_plan_free(td_context *td, td_planned *plan)
{
    if (!plan) return;
    td->device->drop(td, plan);
    for (uint32_t t = 0; t < plan->task_count; t++) {
        const td_task *task = &plan->tasks[t];
        if (task->release && task->kernel.prepared) task->release(task->kernel.prepared);
    }
    td_program_free(plan->program);
    td_program_drop(&plan->recording);
    td_free(td, plan->tasks, plan->task_room * sizeof *plan->tasks, "program");
    td_free(td, plan->args, plan->arg_room * sizeof *plan->args, "program");
    td_free(td, plan->blocks, plan->block_room * sizeof *plan->blocks, "program");
    td_free(td, plan->bindings, plan->binding_room * sizeof *plan->bindings, "program");
    td_free(td, plan->outputs, plan->output_room * sizeof *plan->outputs, "program");
    td_free(td, plan->left, plan->left_room * sizeof *plan->left, "program");
    td_free(td, plan, sizeof *plan, "program");
}
