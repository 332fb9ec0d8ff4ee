/* What a plan is made of, for those who foretell: its calls with what they cost and wait for, its memory by kind, and its largest values.
 *
 * Nothing here changes a plan. Memory is told at the moment at which the largest sum of bytes is alive; what the arena has beyond that sum
 * is `unused`.
 */
#include "core/peak.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int64_t td_planned_count(const td_context *td) { return td->planned ? td->planned->task_count : 0; }

/* ---- Calls */

bool td_planned_calls(td_context *td, td_planned_call *to)
{
    const td_planned *plan = td->planned;
    if (!plan) return true;
    size_t bytes = plan->program->node_count + 1;
    char *is_update = td_alloc(td, bytes, "program");
    if (!is_update) return false;
    td_profile_find_updates(plan->program, is_update);
    for (uint32_t t = 0; t < plan->task_count; t++) {
        const td_task *task = &plan->tasks[t];
        to[t] = (td_planned_call){ .op = task->kernel.op, .attr = task->kernel.attr, .task = td_profile_describe(td, plan, t, is_update),
                                   .queue = (td_queue_kind)task->queue };
        for (int q = 0; q < TD_QUEUES; q++) to[t].waits[q] = task->waits[q];
    }
    td_free(td, is_update, bytes, "program");
    return true;
}

/* ---- Memory */

/* What is known of a block that has memory of its own. */
enum { IS_WORKSPACE = 1, IS_GRADIENT = 2, IS_FORWARD = 4, IS_READ_BACKWARD = 8, IS_COLLECTIVE = 16 };
typedef struct block_use {
    int32_t maker;                            /* the first task that writes it; -1: none yet */
    uint32_t is;
} block_use;

typedef struct census {
    const td_planned *plan;
    block_use *use;                           /* block */
    uint32_t *arg_block;                      /* argument -> the block it lies in, or TD_NONE */
    size_t bytes;                             /* of all of this */
} census;

static uint32_t root_of(const td_planned *plan, uint32_t block)
{
    while (plan->blocks[block].part_of != TD_NONE) block = plan->blocks[block].part_of;
    return block;
}

/* Whether argument i of a task is a gradient of a whole unit. */
static bool is_gradient(const td_kernel *k, int i)
{
    if (k->op == &td_op_pack) return i == k->inputs;
    return (k->op == &td_op_update_unit && i == 1) || (k->op == &td_op_sum_squares && i < k->inputs);
}

static void note_arguments(census *c, uint32_t t)
{
    const td_task *task = &c->plan->tasks[t];
    const td_kernel *k = &task->kernel;
    bool backward = c->plan->program->nodes[task->node].phase & TD_BACKWARD_PHASE;
    for (int i = 0; i < k->inputs + k->outputs; i++) {
        uint32_t block = c->arg_block[&k->in[i] - c->plan->args];
        if (block == TD_NONE) continue;
        block_use *u = &c->use[block];
        if (is_gradient(k, i)) u->is |= IS_GRADIENT;
        if (i < k->inputs && backward) u->is |= IS_READ_BACKWARD;
        if (i < k->inputs || u->maker >= 0) continue;
        u->maker = (int32_t)t;
        u->is |= (backward ? 0u : IS_FORWARD) | (k->op->flags & TD_OP_COLLECTIVE ? IS_COLLECTIVE : 0u);
    }
}

static void note_bindings(census *c)
{
    const td_planned *plan = c->plan;
    const char *args = (const char *)plan->args, *end = (const char *)(plan->args + plan->arg_count);
    for (uint32_t i = 0; i < plan->binding_count; i++) {
        const char *at = (const char *)plan->bindings[i].pointer;
        uint32_t block = root_of(plan, plan->bindings[i].block);
        if (at >= args && at < end) c->arg_block[(at - args) / (ptrdiff_t)sizeof(td_arg)] = block;
        else c->use[block].is |= IS_WORKSPACE;
    }
}

int32_t td_plan_peak(const td_planned *plan, int64_t *bytes)
{
    int32_t peak = 0;
    *bytes = 0;
    for (int32_t t = 0; t < (int32_t)plan->task_count; t++) {
        int64_t sum = 0;
        for (uint32_t b = 0; b < plan->block_count; b++)
            if (td_block_takes_memory(&plan->blocks[b]) && td_block_lives_at(&plan->blocks[b], t)) sum += plan->blocks[b].bytes;
        if (sum > *bytes) *bytes = sum, peak = t;
    }
    return peak;
}

static int64_t *kind_of(td_planned_memory *to, uint32_t is)
{
    if (is & IS_WORKSPACE) return &to->workspace;
    if (is & IS_GRADIENT) return &to->gradients;
    if (is & IS_COLLECTIVE) return &to->communication;
    return (is & IS_FORWARD) && (is & IS_READ_BACKWARD) ? &to->activations : &to->transients;
}

static bool open_census(td_context *td, census *c)
{
    const td_planned *plan = td->planned;
    c->bytes = plan->block_count * sizeof(block_use) + plan->arg_count * sizeof(uint32_t) + 1;
    c->use = td_alloc(td, c->bytes, "program");
    if (!c->use) return false;
    memset(c->use, 0, c->bytes);
    c->plan = plan;
    c->arg_block = (uint32_t *)(c->use + plan->block_count);
    for (uint32_t b = 0; b < plan->block_count; b++) c->use[b].maker = -1;
    for (uint32_t i = 0; i < plan->arg_count; i++) c->arg_block[i] = TD_NONE;
    note_bindings(c);
    for (uint32_t t = 0; t < plan->task_count; t++) note_arguments(c, t);
    return true;
}

static void close_census(td_context *td, census *c) { td_free(td, c->use, c->bytes, "program"); }

static void count_step(census *c, td_planned_memory *to)
{
    const td_planned *plan = c->plan;
    int64_t alive;
    int32_t at = td_plan_peak(plan, &alive);
    for (uint32_t b = 0; b < plan->block_count; b++) {
        const td_block *block = &plan->blocks[b];
        if (td_block_takes_memory(block) && td_block_lives_at(block, at)) *kind_of(to, c->use[b].is) += block->bytes;
    }
    to->unused = plan->arena_bytes - alive;
}

static bool is_accumulator(const td_context *td, uint32_t unit)
{
    for (uint32_t u = 0; u < td->unit_count; u++)
        if (td->units[u].accumulator == unit) return true;
    return false;
}

static void count_state(const td_context *td, td_planned_memory *to)
{
    for (uint32_t u = 0; u < td->unit_count; u++) {
        const td_unit *unit = &td->units[u];
        int64_t begin, end;
        td_unit_range(td, unit, &begin, &end);
        int64_t bytes = (end - begin) * td_dtype_size(unit->dtype);
        if (unit->place.memory == TD_HOST) to->host += bytes;
        else if (is_accumulator(td, u)) to->accumulators += bytes;
        else if (unit->kind == TD_PARAMETER || unit->derived) to->parameters += bytes;
        else if (unit->kind == TD_MOMENT) to->moments += bytes;
        else to->buffers += bytes;
    }
}

bool td_planned_memory_of(td_context *td, td_planned_memory *to)
{
    *to = (td_planned_memory){ 0 };
    count_state(td, to);
    const td_planned *plan = td->planned;
    if (!plan) return true;
    to->host += plan->host_arena_bytes;
    census c;
    if (!open_census(td, &c)) return false;
    count_step(&c, to);
    close_census(td, &c);
    return true;
}

/* ---- The largest values */

static const char *kind_name(uint32_t is)
{
    static const td_planned_memory none;
    td_planned_memory m = none;
    const int64_t *kind = kind_of(&m, is);
    if (kind == &m.workspace) return "workspace";
    if (kind == &m.gradients) return "gradients";
    if (kind == &m.communication) return "communication";
    return kind == &m.activations ? "activations" : "transients";
}

/* A path with * for each part of it that is a number. */
static void write_family(const char *path, char *to, size_t room)
{
    size_t at = 0;
    for (const char *part = path; *part && at + 1 < room;) {
        size_t length = strcspn(part, "."), digits = 0;
        while (digits < length && isdigit((unsigned char)part[digits])) digits++;
        bool number = length && digits == length;
        for (size_t i = 0; i < (number ? 1 : length) && at + 1 < room; i++) to[at++] = number ? '*' : part[i];
        part += length;
        if (*part && at + 1 < room) to[at++] = *part++;
    }
    to[at] = 0;
}

/* What block `b` holds when call `at` runs: the last value written to it, the largest of a call; of a workspace itself. */
static td_planned_value held_in(const td_context *td, const census *c, uint32_t b, int32_t at)
{
    const td_planned *plan = c->plan;
    const td_block *block = &plan->blocks[b];
    int32_t maker = block->first < 0 ? 0 : block->first;
    td_planned_value v = { .kind = kind_name(c->use[b].is), .count = 1, .bytes = block->bytes, .dtype = TD_U8,
                           .shape = TD_SHAPE(block->bytes) };
    for (int32_t t = at; t >= maker; t--) {
        const td_kernel *k = &plan->tasks[t].kernel;
        const td_arg *largest = NULL;
        for (int o = 0; o < k->outputs; o++)
            if (c->arg_block[&k->out[o] - plan->args] == b &&
                (!largest || td_shape_elements(k->out[o].shape) > td_shape_elements(largest->shape)))
                largest = &k->out[o];
        if (!largest) continue;
        v.shape = largest->shape;
        v.dtype = largest->dtype;
        maker = t;
        break;
    }
    v.op = plan->tasks[maker].kernel.op->name;
    write_family(td_module_path(td, plan->program->nodes[plan->tasks[maker].node].module), v.module, sizeof v.module);
    return v;
}

static bool alike(const td_planned_value *a, const td_planned_value *b)
{
    return a->dtype == b->dtype && a->op == b->op && a->kind == b->kind && td_shape_equal(a->shape, b->shape) &&
           !strcmp(a->module, b->module);
}

static int larger_first(const void *a, const void *b)
{
    const td_planned_value *x = a, *y = b;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? 1 : -1;
    int order = strcmp(x->module, y->module);
    return order ? order : strcmp(x->op, y->op);
}

/* What is alive at call `at`, alike values as one, into `all`; how many. */
static int64_t gather_values(const td_context *td, const census *c, int32_t at, td_planned_value *all)
{
    int64_t count = 0;
    for (uint32_t b = 0; b < c->plan->block_count; b++) {
        if (!td_block_takes_memory(&c->plan->blocks[b]) || !td_block_lives_at(&c->plan->blocks[b], at)) continue;
        td_planned_value v = held_in(td, c, b, at);
        int64_t i = 0;
        while (i < count && !alike(&all[i], &v)) i++;
        if (i == count) all[count++] = v;
        else all[i].bytes += v.bytes, all[i].count++;
    }
    qsort(all, (size_t)count, sizeof *all, larger_first);
    return count;
}

int64_t td_planned_largest(td_context *td, td_planned_value *to, int64_t room, td_planned_moment *when)
{
    const td_planned *plan = td->planned;
    census c;
    *when = (td_planned_moment){ .call = -1, .op = "" };
    if (!plan || !plan->task_count) return 0;
    size_t bytes = plan->block_count * sizeof(td_planned_value);
    td_planned_value *all = td_alloc(td, bytes, "program");
    int64_t count = 0;
    if (all && open_census(td, &c)) {
        int64_t alive;
        int32_t at = td_plan_peak(plan, &alive);
        const td_task *task = &plan->tasks[at];
        when->call = at;
        when->op = task->kernel.op->name;
        snprintf(when->module, sizeof when->module, "%s", td_module_path(td, plan->program->nodes[task->node].module));
        count = gather_values(td, &c, at, all);
        if (count > room) count = room;
        memcpy(to, all, (size_t)count * sizeof *to);
        close_census(td, &c);
    }
    td_free(td, all, bytes, "program");
    return count;
}
