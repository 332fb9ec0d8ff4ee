/* Inside core/: what plan.c and blocks.c share of a plan that is being made. */
#ifndef TANDEM_CORE_PLANNER_H
#define TANDEM_CORE_PLANNER_H

#include "core/internal.h"

/* Of blocks: a vector of the CPU's. */
enum { TD_BLOCK_ALIGN = 64, TD_FOREVER = INT32_MAX };

typedef struct td_storage {
    uint32_t block;                           /* TD_NONE: none */
    int64_t offset;
} td_storage;

typedef struct td_planner {
    td_context *td;
    td_planned *plan;
    const td_program *p;
    char *live;
    td_storage *where;                        /* value -> its first block, before parts are followed */
    int32_t *position;                        /* node -> its task, or -1 */
    uint32_t *unit_block;                     /* unit -> its block, or TD_NONE */
    int32_t tasks;                            /* of the schedule; copies and stores come after */
    void *memory;
    size_t bytes;
} td_planner;

/* Whether the node is one of the calls that a step is. */
static inline bool td_is_task(const td_node *n) { return !(n->op->flags & (TD_OP_SOURCE | TD_OP_VIEW | TD_OP_EFFECT)); }

static inline int64_t td_block_round(const td_planner *pl, int64_t bytes)
{
    return td_round_up(bytes, pl->td->device->is_gpu ? TD_GPU_ALIGN : TD_BLOCK_ALIGN);
}

/* On this rank. */
static inline int64_t td_value_bytes(const td_planner *pl, td_id v)
{
    const td_value *value = &pl->p->values[v];
    return td_shape_elements(td_local_shape(&pl->td->mesh, value->shape, value->place)) * td_dtype_size((td_dtype)value->dtype);
}

static inline td_memory td_value_memory(const td_planner *pl, td_id v) { return (td_memory)pl->p->values[v].place.memory; }

/* Whether a GPU's host computes what op gives in `memory`: state that is offloaded is updated there. */
static inline bool td_is_on_host(const td_planner *pl, const td_op *op, td_memory memory)
{
    return pl->td->device->is_gpu && memory == TD_HOST && !(op->flags & TD_OP_COPY);
}

static inline td_device_kernel td_planner_kernel(const td_planner *pl, const td_op *op, bool on_host)
{
    return on_host ? (td_device_kernel){ op->cpu, op->prepare, op->release } : td_kernel_on(pl->td, op);
}

/* Its number; TD_NONE: out of memory. */
static inline uint32_t td_block_add(td_planner *pl, td_block block)
{
    td_planned *plan = pl->plan;
    if (!td_grow(pl->td, (void **)&plan->blocks, &plan->block_room, plan->block_count + 1, sizeof *plan->blocks, "program")) return TD_NONE;
    block.part_of = TD_NONE;
    plan->blocks[plan->block_count] = block;
    return plan->block_count++;
}

/* Follows parts to the block that has memory. */
static inline td_storage td_storage_resolve(const td_planner *pl, td_storage s)
{
    while (s.block != TD_NONE && pl->plan->blocks[s.block].part_of != TD_NONE) {
        s.offset += pl->plan->blocks[s.block].offset;
        s.block = pl->plan->blocks[s.block].part_of;
    }
    return s;
}

static inline td_storage td_storage_of(const td_planner *pl, td_id v) { return td_storage_resolve(pl, pl->where[v]); }

/* Of the unit's memory. TD_NONE: out of memory. */
static inline uint32_t td_unit_block(td_planner *pl, uint32_t unit, int64_t bytes)
{
    if (pl->unit_block[unit] == TD_NONE)
        pl->unit_block[unit] = td_block_add(pl, (td_block){ .kind = TD_BLOCK_UNIT, .index = unit, .bytes = bytes, .first = -1, .last = -1 });
    return pl->unit_block[unit];
}

/* Of a TD_OP_INPLACE. */
static inline int td_paired_input(const td_node *n, uint32_t output)
{
    int last = TD_RULE_OUTPUTS - 1;
    return (int)output <= last ? n->op->inplace[output] : n->op->inplace[last] + (int)output - last;
}

/* ---- blocks.c */

/* Every value has its storage, and blocks are parts of those that they could become parts of. False: an error. */
bool td_blocks_give(td_planner *pl);

#endif
