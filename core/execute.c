/* run: binds a plan's operands to memory and makes its calls, in order; the CPU as a device. */
#include "core/internal.h"

#include <math.h>
#include <omp.h>
#include <string.h>

typedef struct range_work {
    td_range_function body;
    void *user;
} range_work;

int td_threads_given(int asked)
{
    int limit = omp_get_active_level() < omp_get_max_active_levels() ? omp_get_thread_limit() : 1;
    return asked < limit ? asked : limit;
}

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

bool td_is_reached(const td_context *td) { return td->run.transport && td->run.transport->reach && td->page_bytes; }

static const char *kind_of_arena(td_memory memory) { return memory == TD_HOST ? "pinned" : "step"; }

static void drop_arena(td_context *td, td_memory memory)
{
    void **arena = memory == TD_HOST ? &td->host_arena : &td->arena;
    int64_t *have = memory == TD_HOST ? &td->host_arena_bytes : &td->arena_bytes;
    td_device_of(td, memory)->put(td, *arena, *have, kind_of_arena(memory));
    *arena = NULL;
    *have = 0;
    td->last = NULL;
}

void td_arenas_drop(td_context *td)
{
    if (td_is_reached(td)) td->run.transport->reach->leave(td->run.transport->self, false);
    drop_arena(td, TD_DEVICE);
    drop_arena(td, TD_HOST);
}

static bool ensure_arena(td_context *td, td_memory memory, int64_t bytes)
{
    void **arena = memory == TD_HOST ? &td->host_arena : &td->arena;
    int64_t *have = memory == TD_HOST ? &td->host_arena_bytes : &td->arena_bytes;
    if (bytes <= *have && (*arena || memory == TD_HOST)) return true;
    const void *before = *arena;
    drop_arena(td, memory); /* first: so that the peak is the larger one, not both */
    *arena = td_device_of(td, memory)->get(td, bytes, kind_of_arena(memory));
    *have = *arena ? bytes : 0;
    td->arena_epoch += *arena != before;
    return *arena != NULL;
}

static char *arena_at(const td_context *td, const td_block *b) { return (char *)(b->memory == TD_HOST ? td->host_arena : td->arena) + b->offset; }

static char *block_base(const td_context *td, const td_planned *plan, uint32_t block)
{
    int64_t offset = 0;
    const td_block *b = td_block_root(plan, block, &offset);
    switch (b->kind) {
    case TD_BLOCK_ARENA: return arena_at(td, b) + offset;
    case TD_BLOCK_UNIT:  return (char *)td->units[b->index].memory + offset;
    case TD_BLOCK_SLOT:
    case TD_BLOCK_CONSTANT: break;
    }
    return NULL;
}

bool td_plan_settle(td_context *td, td_planned *plan)
{
    if (!ensure_arena(td, TD_DEVICE, plan->arena_bytes) || !ensure_arena(td, TD_HOST, plan->host_arena_bytes)) return false;
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

/* In which piece, and how far into it; -1: in none that is told. */
static int64_t place_in(const td_settled *where, uintptr_t at)
{
    for (int i = 0; i < TD_PIECES; i++) {
        uintptr_t offset = at - (uintptr_t)where->piece[i].memory;
        if (where->piece[i].memory && offset < (uintptr_t)where->piece[i].bytes) return (int64_t)offset * TD_PIECES + i;
    }
    return -1;
}

static uint64_t layout_of(const td_context *td, const td_planned *plan, const td_settled *where)
{
    uint64_t layout = 0;
    for (uint32_t t = 0; t < plan->task_count; t++) {
        const td_kernel *k = &plan->tasks[t].kernel;
        uintptr_t begin = (uintptr_t)k->in, end = (uintptr_t)(k->in + k->inputs + k->outputs); /* outputs follow inputs */
        for (uint32_t i = 0; i < plan->fixed_count && k->op->flags & TD_OP_COLLECTIVE; i++) {
            const td_binding *b = &plan->bindings[i];
            uintptr_t pointer = (uintptr_t)b->pointer;
            if ((pointer < begin || pointer >= end) && b->pointer != &k->workspace) continue;
            uintptr_t at = (uintptr_t)block_base(td, plan, b->block) + (uintptr_t)b->offset;
            layout = td_mix(layout, td_mix(t, (uint64_t)place_in(where, at)));
        }
    }
    return layout;
}

/* No graph may be left that reads or writes memory of a rank that takes another piece. */
static bool make_room(td_context *td, const td_planned *plan)
{
    const td_transport *t = td->run.transport;
    bool any;
    if (!t->reach->grows(t->self, !td->arena || plan->arena_bytes > td->arena_bytes, &any)) return false;
    for (uint32_t p = 0; p < td->plan_count && any; p++) td->device->drop(td, td->plans[p]);
    td->arena_epoch += any;
    return !any || t->reach->leave(t->self, true);
}

static bool tell_where(td_context *td, const td_planned *plan)
{
    const td_transport *t = td->run.transport;
    td_settled where = td->settled;
    bool changed = false;
    where.piece[0].memory = td->arena;
    where.piece[0].bytes = td->arena_bytes;
    where.layout = layout_of(td, plan, &where);
    bool told = t->reach->settle(t->self, &where, &changed);
    td->arena_epoch += changed;
    return told;
}

bool td_plan_settle_first(td_context *td, td_planned *plan)
{
    return !td_is_reached(td) || (make_room(td, plan) && td_plan_settle(td, plan) && tell_where(td, plan));
}

const void *td_plan_output_at(const td_context *td, const td_planned *plan, const td_plan_output *o)
{
    return block_base(td, plan, o->block) + o->offset;
}

uint32_t td_plan_landing(const td_planned *plan, uint32_t to[TD_LANDED])
{
    uint32_t count = 0;
    for (uint32_t o = 0; o < plan->output_count && count < TD_LANDED; o++)
        if (td_shape_elements(plan->outputs[o].shape) == 1) to[count++] = o;
    return count;
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

void td_plan_dying(td_context *td, const td_planned *plan, int32_t task, void (*erase)(void *user, void *memory, size_t bytes), void *user)
{
    for (uint32_t b = 0; b < plan->block_count; b++) {
        const td_block *block = &plan->blocks[b];
        bool dies = task < 0 ? block->last < INT32_MAX : block->last == task;
        if (block->kind == TD_BLOCK_ARENA && block->part_of == TD_NONE && dies)
            erase(user, arena_at(td, block), (size_t)block->bytes);
    }
}

static bool has_nan(const void *data, td_dtype dtype, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if ((dtype == TD_F64 && isnan(((const double *)data)[i])) || (dtype == TD_F32 && isnan(((const float *)data)[i])) ||
            (dtype == TD_BF16 && (((const uint16_t *)data)[i] & 0x7FFF) > 0x7F80) ||
            (dtype == TD_F16 && (((const uint16_t *)data)[i] & 0x7FFF) > 0x7C00))
            return true;
    return false;
}

void td_plan_check_nan(td_context *td, const td_planned *plan, const td_task *task)
{
    for (int k = 0; k < task->kernel.outputs && td->error == TD_OK; k++) {
        const td_arg *arg = &task->kernel.out[k];
        int64_t count = td_shape_elements(arg->shape), bytes = count * td_dtype_size(arg->dtype);
        void *copy = td->device->is_gpu ? td_alloc(td, (size_t)bytes, "host") : NULL;
        if (td->device->is_gpu && (!copy || !td_device_of(td, (td_memory)arg->place.memory)->read(td, copy, arg->data, bytes))) return;
        const td_node *n = &plan->program->nodes[task->node];
        if (has_nan(copy ? copy : arg->data, arg->dtype, count))
            td_fail(td, TD_ERROR_NUMBER, "%s%s: gave NaN %s", task->kernel.op->name, n->phase & TD_BACKWARD_PHASE ? " (in the backward)" : "",
                    td_location(td, n->module, n->file, n->line));
        td_free(td, copy, (size_t)bytes, "host");
    }
}

td_device_kernel td_kernel_on(const td_context *td, const td_op *op)
{
    return td->device->is_gpu ? op->cuda : (td_device_kernel){ op->cpu, op->prepare, op->release };
}

/* ---- The CPU */

static void *cpu_get(td_context *td, int64_t bytes, const char *kind) { return td_alloc(td, (size_t)bytes, kind); }
static void cpu_put(td_context *td, void *memory, int64_t bytes, const char *kind) { td_free(td, memory, (size_t)bytes, kind); }

static bool cpu_copy(td_context *td, void *to, const void *from, int64_t bytes)
{
    (void)td;
    memcpy(to, from, (size_t)bytes);
    return true;
}

static void erase(void *user, void *memory, size_t bytes)
{
    (void)user;
    memset(memory, 0xFF, bytes);
}

static bool cpu_run(td_context *td, td_planned *plan)
{
    bind_slots(td, plan);
    if (td->profiling && !td_profile_plan(td, plan)) return false;
    if (td->options.poison) td_plan_dying(td, plan, -1, erase, NULL);
    for (uint32_t t = 0; t < plan->task_count; t++) {
        const td_task *task = &plan->tasks[t];
        int64_t begin_ns = td->profiling ? td_profile_now() : 0;
        task->run(&task->kernel);
        if (td->profiling) td_profile_task_done(td, plan, t, begin_ns, td_profile_now());
        if (td->options.eager && td->error == TD_OK) td_plan_check_nan(td, plan, task);
        if (td->error != TD_OK) return false;
        if (td->options.poison) td_plan_dying(td, plan, (int32_t)t, erase, NULL);
    }
    td_profile_mark(td, "run");
    return true;
}

static void cpu_drop(td_context *td, td_planned *plan) { (void)td, (void)plan; }
static void cpu_close(td_context *td) { (void)td; }

const td_device td_cpu = {
    .get = cpu_get, .put = cpu_put, .write = cpu_copy, .read = cpu_copy, .run = cpu_run, .drop = cpu_drop, .close = cpu_close,
};

bool td_plan_run(td_context *td, td_planned *plan) { return td_plan_settle(td, plan) && td->device->run(td, plan); }
