/* run: binds a plan's operands to memory and makes its calls, in order. */
#include "core/internal.h"

#include <math.h>
#include <string.h>

typedef struct range_work {
    td_range_function body;
    void *user;
} range_work;

void td_parallel_for(const td_run *run, int64_t count, int64_t grain, td_range_function body, void *user)
{
    if (count <= 0) return;
    int64_t parts = grain > 0 ? (count + grain - 1) / grain : count;
    if (parts > run->threads) parts = run->threads;
    if (parts <= 1) {
        body(user, 0, count);
        return;
    }
    range_work work = { body, user };
#pragma omp parallel for schedule(static, 1) num_threads((int)parts)
    for (int64_t p = 0; p < parts; p++) work.body(work.user, count * p / parts, count * (p + 1) / parts);
}

/* ---- Memory */

static bool ensure_arena(td_context *td, int64_t bytes)
{
    if (bytes <= td->arena_bytes && td->arena) return true;
    td_free(td, td->arena, (size_t)td->arena_bytes, "step"); /* first: so that the peak is the larger one, not both */
    td->arena = td_alloc(td, (size_t)bytes, "step");
    td->arena_bytes = td->arena ? bytes : 0;
    td->last = NULL;
    td->arena_epoch++;
    return td->arena != NULL;
}

static char *block_base(td_context *td, const td_planned *plan, uint32_t block)
{
    int64_t offset = 0;
    const td_block *b = td_block_root(plan, block, &offset);
    switch (b->kind) {
    case TD_BLOCK_ARENA: return (char *)td->arena + b->offset + offset;
    case TD_BLOCK_UNIT:  return (char *)td->units[b->index].memory + offset;
    case TD_BLOCK_SLOT:  break;
    }
    return NULL;
}

static bool bind_fixed(td_context *td, td_planned *plan)
{
    if (plan->bound == td->arena_epoch) return true;
    for (uint32_t b = 0; b < plan->block_count; b++)
        if (plan->blocks[b].kind == TD_BLOCK_UNIT && plan->blocks[b].part_of == TD_NONE && !td_unit_allocate(td, plan->blocks[b].index))
            return false;
    for (uint32_t i = 0; i < plan->fixed_count; i++) {
        const td_binding *b = &plan->bindings[i];
        *b->pointer = block_base(td, plan, b->block) + b->offset;
    }
    plan->bound = td->arena_epoch;
    return true;
}

/* Scalars are held in the slot in both widths: the operand's dtype says which one is read. */
static void bind_slots(td_context *td, td_planned *plan)
{
    for (uint32_t i = plan->fixed_count; i < plan->binding_count; i++) {
        const td_binding *b = &plan->bindings[i];
        td_slot *slot = &td->slots[plan->blocks[b->block].index];
        const void *data = slot->data ? slot->data : td_float(td) == TD_F64 ? (const void *)&slot->f64 : (const void *)&slot->f32;
        *b->pointer = (char *)data + b->offset;
    }
}

/* ---- Debugging: NaN in dead memory, and looking for NaN */

static void poison(td_context *td, const td_planned *plan, int32_t task)
{
    for (uint32_t b = 0; b < plan->block_count; b++) {
        const td_block *block = &plan->blocks[b];
        bool dies = task < 0 ? block->last < INT32_MAX : block->last == task;
        if (block->kind == TD_BLOCK_ARENA && block->part_of == TD_NONE && dies)
            memset((char *)td->arena + block->offset, 0xFF, (size_t)block->bytes);
    }
}

static bool has_nan(const td_arg *arg)
{
    int64_t n = td_shape_elements(arg->shape);
    if (arg->dtype == TD_F64)
        for (int64_t i = 0; i < n; i++)
            if (isnan(((const double *)arg->data)[i])) return true;
    if (arg->dtype == TD_F32)
        for (int64_t i = 0; i < n; i++)
            if (isnan(((const float *)arg->data)[i])) return true;
    if (arg->dtype == TD_BF16)
        for (int64_t i = 0; i < n; i++)
            if ((((const uint16_t *)arg->data)[i] & 0x7FFF) > 0x7F80) return true;
    return false;
}

static void check_nan(td_context *td, const td_planned *plan, const td_task *task)
{
    for (int k = 0; k < task->kernel.outputs; k++) {
        if (!has_nan(&task->kernel.out[k])) continue;
        const td_node *n = &plan->program->nodes[task->node];
        td_fail(td, TD_ERROR_NUMBER, "%s%s: gave NaN %s", task->kernel.op->name, n->phase & TD_BACKWARD_PHASE ? " (in the backward)" : "",
                td_location(td, n->module, n->file, n->line));
        return;
    }
}

bool td_plan_run(td_context *td, td_planned *plan)
{
    if (!ensure_arena(td, plan->arena_bytes) || !bind_fixed(td, plan)) return false;
    bind_slots(td, plan);
    if (td->profiling && !td_profile_plan(td, plan)) return false;
    if (td->options.poison) poison(td, plan, -1);
    for (uint32_t t = 0; t < plan->task_count; t++) {
        const td_task *task = &plan->tasks[t];
        int64_t begin_ns = td->profiling ? td_profile_now() : 0;
        task->run(&task->kernel);
        if (td->profiling) td_profile_task_done(td, plan, t, begin_ns);
        if (td->options.eager && td->error == TD_OK) check_nan(td, plan, task);
        if (td->error != TD_OK) return false;
        if (td->options.poison) poison(td, plan, (int32_t)t);
    }
    td_profile_mark(td, "run");
    return true;
}
