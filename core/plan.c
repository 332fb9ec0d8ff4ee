/* plan: gives every value its place in memory (blocks.c, arena.c) and makes the list of calls that a step is.
 *
 * A store that could not be done in place is a copy at the end; values that are themselves state or input are copied aside before the
 * first such store, so that two states can be swapped and an old value kept.
 */
#include "core/planner.h"

#include <string.h>

/* ---- Tasks */

static bool bind(td_planner *pl, void **pointer, td_storage s, bool on_host)
{
    td_planned *plan = pl->plan;
    if (!td_grow(pl->td, (void **)&plan->bindings, &plan->binding_room, plan->binding_count + 1, sizeof *plan->bindings, "program")) return false;
    plan->bindings[plan->binding_count++] = (td_binding){ pointer, s.block, s.offset, on_host };
    return true;
}

static td_arg arg_of(const td_planner *pl, td_id v)
{
    const td_value *value = &pl->p->values[v];
    return (td_arg){ .shape = td_local_shape(&pl->td->mesh, value->shape, value->place), .global = value->shape, .place = value->place,
                     .dtype = (td_dtype)value->dtype };
}

static bool is_in_place(const td_planner *pl, const td_node *n)
{
    if (!(n->op->flags & TD_OP_INPLACE) || (n->op->flags & TD_OP_POINTWISE) || !n->outputs) return false;
    uint32_t paired = (uint32_t)td_paired_input(n, 0);
    if (paired >= n->inputs) return false;
    td_storage in = td_storage_of(pl, pl->p->inputs[n->input + paired]), out = td_storage_of(pl, n->output);
    return in.block == out.block && in.offset == out.offset;
}

/* What packing moves: members that are not in their place yet are read and written. */
static int64_t packed_bytes(const td_planner *pl, const td_node *n)
{
    const td_pack_attr *a = td_node_attr(pl->p, n);
    const int64_t *offset = (const int64_t *)(a + 1);
    td_storage whole = td_storage_of(pl, n->output);
    int64_t item = td_dtype_size((td_dtype)pl->p->values[n->output].dtype), bytes = 0;
    for (uint32_t i = 0; i < n->inputs; i++) {
        td_id v = pl->p->inputs[n->input + i];
        td_storage s = td_storage_of(pl, v);
        if (s.block != whole.block || s.offset != whole.offset + offset[i] * item) bytes += 2 * td_value_bytes(pl, v);
    }
    return bytes;
}

/* Adds a call of op for node `index`; in and out are values, which are where they were planned, or where `from` and `to` say. */
static bool add_task(td_planner *pl, const td_op *op, uint32_t index, const td_id *in, uint32_t inputs, const td_id *out, uint32_t outputs,
                     td_storage from, td_storage to)
{
    td_planned *plan = pl->plan;
    td_context *td = pl->td;
    const td_node *n = &pl->p->nodes[index];
    td_task *task = &plan->tasks[plan->task_count];
    td_arg *args = plan->args + plan->arg_count;
    bool on_host = outputs && td_is_on_host(pl, op, td_value_memory(pl, out[0]));
    plan->arg_count += inputs + outputs;
    plan->host_tasks += on_host;
    for (uint32_t i = 0; i < inputs + outputs; i++) {
        td_id v = i < inputs ? in[i] : out[i - inputs];
        args[i] = arg_of(pl, v);
        td_storage s = i < inputs ? from : to;
        if (!bind(pl, &args[i].data, s.block != TD_NONE ? s : td_storage_of(pl, v), on_host)) return false;
    }
    bool own = op == n->op;
    td_device_kernel kernel = td_planner_kernel(pl, op, on_host);
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
        uint32_t block = td_block_add(pl, (td_block){ .kind = TD_BLOCK_ARENA, .bytes = td_block_round(pl, prepared.workspace_bytes), .first = at,
                                                      .last = at, .memory = outputs ? td_value_memory(pl, out[0]) : TD_DEVICE });
        if (block == TD_NONE || !bind(pl, &task->kernel.workspace, (td_storage){ block, 0 }, on_host)) return false;
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
static const td_storage nowhere = { TD_NONE, 0 };

static bool add_schedule(td_planner *pl)
{
    for (uint32_t i = 0; i < pl->p->node_count; i++) {
        const td_node *n = &pl->p->nodes[i];
        if (!pl->live[i] || !td_is_task(n)) continue;
        td_id out[TD_CALL_OUTPUTS];
        for (uint32_t k = 0; k < n->outputs; k++) out[k] = n->output + k;
        if (!add_task(pl, n->op, i, td_node_inputs(pl->p, n), n->inputs, out, n->outputs, nowhere, nowhere)) return false;
    }
    return true;
}

static bool is_unit_itself(const td_planner *pl, td_id v, uint32_t unit)
{
    td_storage s = td_storage_of(pl, v);
    return s.block == pl->unit_block[unit] && s.offset == 0;
}

/* Copies value v, which is state or input, to a block of its own that lives until the end, or forever. */
static bool copy_aside(td_planner *pl, uint32_t node, td_id v, int32_t last, td_storage *to)
{
    int32_t at = (int32_t)pl->plan->task_count;
    uint32_t block = td_block_add(pl, (td_block){ .kind = TD_BLOCK_ARENA, .bytes = td_block_round(pl, td_value_bytes(pl, v)),
                                                  .memory = td_value_memory(pl, v), .first = at, .last = last });
    *to = (td_storage){ block, 0 };
    return block != TD_NONE && add_task(pl, &copy_op, node, &v, 1, &v, 1, nowhere, *to);
}

static bool add_output(td_planner *pl, const td_node *n, td_storage at)
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
static bool add_endings(td_planner *pl, td_storage *aside)
{
    for (uint32_t i = 0; i < pl->p->node_count; i++) {
        const td_node *n = &pl->p->nodes[i];
        aside[i] = nowhere;
        if (!pl->live[i] || !(n->op->flags & TD_OP_EFFECT)) continue;
        td_id v = pl->p->inputs[n->input];
        td_storage s = td_storage_of(pl, v);
        bool is_output = n->op == &td_op_output;
        bool theirs = pl->plan->blocks[s.block].kind != TD_BLOCK_ARENA;
        if (!is_output && is_unit_itself(pl, v, ((const td_unit_attr *)td_node_attr(pl->p, n))->unit)) continue;
        if (theirs && !copy_aside(pl, i, v, is_output ? TD_FOREVER : TD_FOREVER - 1, &aside[i])) return false;
        if (is_output && !add_output(pl, n, theirs ? aside[i] : s)) return false;
    }
    for (uint32_t i = 0; i < pl->p->node_count; i++) {
        const td_node *n = &pl->p->nodes[i];
        if (!pl->live[i] || n->op != &td_op_store) continue;
        td_id v = pl->p->inputs[n->input];
        uint32_t unit = ((const td_unit_attr *)td_node_attr(pl->p, n))->unit;
        if (is_unit_itself(pl, v, unit)) continue;
        uint32_t block = td_unit_block(pl, unit, td_value_bytes(pl, v));
        if (block == TD_NONE || !add_task(pl, &copy_op, i, &v, 1, &v, 1, aside[i], (td_storage){ block, 0 })) return false;
        td_storage s = aside[i].block != TD_NONE ? aside[i] : td_storage_of(pl, v);
        td_block *b = &pl->plan->blocks[s.block];
        int32_t at = (int32_t)pl->plan->task_count - 1;
        if (b->last < at || b->last == TD_FOREVER - 1) b->last = at;
    }
    return true;
}

/* ---- The whole */

/* Parts know where they are only once their wholes do; bindings of slots, and of a GPU's constants, go last. */
static void finish_bindings(td_planner *pl)
{
    td_planned *plan = pl->plan;
    uint32_t fixed = 0;
    for (uint32_t i = 0; i < plan->binding_count; i++) {
        if (plan->blocks[plan->bindings[i].block].kind >= TD_BLOCK_SLOT) continue;
        td_binding swap = plan->bindings[fixed];
        plan->bindings[fixed++] = plan->bindings[i];
        plan->bindings[i] = swap;
    }
    plan->fixed_count = fixed;
}

static bool open_planner(td_planner *pl)
{
    const td_program *p = pl->p;
    td_context *td = pl->td;
    pl->live = td_live_nodes(p);
    pl->bytes = p->value_count * sizeof(td_storage) + p->node_count * (sizeof(td_storage) + sizeof(int32_t)) + td->unit_count * sizeof(uint32_t);
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

static bool make(td_planner *pl)
{
    if (!open_planner(pl) || !td_blocks_give(pl) || !add_schedule(pl) || !add_endings(pl, pl->where + pl->p->value_count)) return false;
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
    *plan = (td_planned){ .number = ++td->plans_made, .program = final, .recording = { .td = td } };
    td_planner pl = { .td = td, .plan = plan, .p = final };
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
    td_free(td, plan->given, plan->given_room * sizeof *plan->given, "program");
    td_free(td, plan->bindings, plan->binding_room * sizeof *plan->bindings, "program");
    td_free(td, plan->outputs, plan->output_room * sizeof *plan->outputs, "program");
    td_free(td, plan->left, plan->left_room * sizeof *plan->left, "program");
    td_free(td, plan, sizeof *plan, "program");
}
