/* Profile: where the time of a step goes, task by task, and what the host does around them; see core.h.
 *
 * The executor and the step note ends as they come to them. Memory for that is taken before a plan runs. What is said of a
 * task is put together once a plan, when it first runs under the profile, and outlives the plan.
 */
#include "core/internal.h"
#include "core/ops/fused.h"

#include <string.h>
#include <time.h>

typedef struct td_profiled_plan {
    struct td_profiled_plan *next;
    uint32_t count;
    td_profile_task task[];
} td_profiled_plan;

typedef struct td_profile {
    td_profile_event *events;
    uint32_t event_count, event_room;
    td_profiled_plan *plans;
    int64_t mark_ns;                          /* the host's last event ended */
    int64_t steps, announced;
} td_profile;

enum { HOST_EVENTS = 8 };                     /* of a step, with some of the caller's */

int64_t td_profile_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- What is said of a task */

/* The first part of a name that is found decides. */
const char *td_profile_kind(const td_op *op)
{
    static const struct { const char *part, *kind; } parts[] = {
        { "attention", "attention" }, { "norm", "norm" },       { "cross_entropy", "loss" },  { "embedding", "embedding" },
        { "update", "update" },       { "squares", "update" },  { "dropout", "random" },      { "uniform", "random" },
        { "rotary", "pointwise" },    { "fused_rows", "reduction" }, { "sum", "reduction" },   { "max", "reduction" },       { "top_k", "reduction" },
        { "transpose", "copy" },      { "slice", "copy" },      { "concat", "copy" },         { "pack", "copy" },
        { "copy", "copy" },           { "broadcast", "copy" },  { "fill", "copy" },           { "iota", "copy" },
        { "gather", "copy" },         { "scatter", "copy" },    { "own_part", "copy" },       { "count_once", "copy" },
        { "reshape", "copy" },        { "own_members", "copy" },  { "merge_rows", "update" },
        { "to_host", "copy" },        { "to_device", "copy" },
    };
    if (op->flags & TD_OP_COLLECTIVE) return "collective";
    if (op->flags & TD_OP_POINTWISE) return "pointwise";
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strstr(op->name, parts[i].part)) return parts[i].kind;
    return op->precision == TD_PRODUCT ? "matmul" : "other";
}

static td_dtype dtype_of(const td_kernel *k)
{
    bool whole = !k->inputs || k->in[0].dtype == TD_I32 || k->in[0].dtype == TD_I64 || k->in[0].dtype == TD_U8;
    return whole && k->outputs ? k->out[0].dtype : k->in[0].dtype;
}

/* The chain's functions, the kernel that was chosen, or the operation's name. */
static const char *parts_of(td_context *td, const td_kernel *k)
{
    char text[TD_FUSED_INSTRUCTIONS * 20];
    if (k->way) return td_copy_text(td, k->way, "program");
    if (k->op != &td_op_fused && k->op != &td_op_fused_rows) return k->op->name;
    td_fused_parts(k->attr, text, sizeof text);
    return td_copy_text(td, text, "program");
}

/* Which nodes are of the update: what sums gradients up or applies them, and what follows from it. */
void td_profile_find_updates(const td_program *p, char *is_update)
{
    for (uint32_t n = 0; n < p->node_count; n++) {
        const td_node *node = &p->nodes[n];
        is_update[n] = node->op == &td_op_update_unit || node->op == &td_op_update_rows || node->op == &td_op_merge_rows ||
                       node->op == &td_op_sum_squares || node->op == &td_op_max_abs;
        for (uint32_t i = 0; i < node->inputs && !is_update[n]; i++) is_update[n] = is_update[p->values[p->inputs[node->input + i]].node];
    }
}

static void find_live_bytes(const td_planned *plan, td_profiled_plan *to)
{
    for (uint32_t b = 0; b < plan->block_count; b++) {
        const td_block *block = &plan->blocks[b];
        if (block->kind != TD_BLOCK_ARENA || block->memory != TD_DEVICE || block->part_of != TD_NONE) continue;
        for (int32_t t = block->first < 0 ? 0 : block->first; t <= block->last && t < (int32_t)to->count; t++)
            to->task[t].live_bytes += block->bytes;
    }
}

td_profile_task td_profile_describe(const td_context *td, const td_planned *plan, uint32_t task, const char *is_update)
{
    const td_task *t = &plan->tasks[task];
    const td_op *op = t->kernel.op;
    const td_node *n = &plan->program->nodes[t->node];
    return (td_profile_task){
        .op = op->name, .parts = op->name, .kind = td_profile_kind(op), .module = td_module_path(td, n->module),
        .phase = is_update[t->node]             ? TD_PROFILE_UPDATE
                 : n->phase & TD_BACKWARD_PHASE ? TD_PROFILE_BACKWARD
                                                : TD_PROFILE_FORWARD,
        .collective = op->flags & TD_OP_COLLECTIVE, .dtype = dtype_of(&t->kernel), .flops = t->cost.flops, .bytes = t->cost.bytes,
        .sent = t->cost.sent, .copied = t->cost.copied,
        .aside = plan->beside && t->queue == TD_QUEUE_ASIDE,
        .on_host = !t->cost.copied && t->kernel.outputs && t->kernel.out[0].place.memory == TD_HOST };
}

static bool describe(td_context *td, const td_planned *plan, td_profiled_plan *to, const char *is_update)
{
    for (uint32_t t = 0; t < plan->task_count; t++) {
        to->task[t] = td_profile_describe(td, plan, t, is_update);
        to->task[t].parts = parts_of(td, &plan->tasks[t].kernel);
        to->count++;
        if (!to->task[t].parts) return false;
    }
    return true;
}

static void forget(td_context *td, td_profiled_plan *plan, uint32_t room)
{
    for (uint32_t t = 0; t < plan->count; t++) {
        const td_profile_task *task = &plan->task[t];
        if (task->parts && task->parts != task->op) td_free(td, (void *)task->parts, strlen(task->parts) + 1, "program");
    }
    td_free(td, plan, sizeof *plan + room * sizeof *plan->task, "program");
}

static td_profiled_plan *describe_plan(td_context *td, const td_planned *plan)
{
    uint32_t nodes = plan->program->node_count;
    td_profiled_plan *to = td_alloc(td, sizeof *to + plan->task_count * sizeof *to->task, "program");
    char *is_update = td_alloc(td, nodes + 1, "program");
    bool done = to && is_update;
    if (to) to->count = 0;
    if (done) {
        td_profile_find_updates(plan->program, is_update);
        done = describe(td, plan, to, is_update);
    }
    td_free(td, is_update, nodes + 1, "program");
    if (done) find_live_bytes(plan, to);
    if (done || !to) return to;
    forget(td, to, plan->task_count);
    return NULL;
}

/* ---- Beginning and end */

static bool reserve(td_context *td, int64_t steps, uint32_t tasks)
{
    td_profile *p = td->profile;
    int64_t most = UINT32_MAX / 2 - (int64_t)p->event_count;
    if (steps >= 0 && steps <= most / (tasks + HOST_EVENTS)) {
        uint32_t needed = p->event_count + (uint32_t)steps * (tasks + HOST_EVENTS);
        return td_room(td, (void **)&p->events, &p->event_room, needed, sizeof *p->events, "host");
    }
    td_fail(td, TD_ERROR_USAGE, "td_profile_begin: %lld steps of %u calls are more than a profile holds: profile fewer",
            (long long)steps, tasks);
    return false;
}

static bool attach(td_context *td, td_planned *plan)
{
    if (plan->profiled) return true;
    plan->profiled = describe_plan(td, plan);
    if (!plan->profiled) return false;
    plan->profiled->next = td->profile->plans;
    td->profile->plans = plan->profiled;
    return true;
}

bool td_profile_begin(td_context *td, int64_t steps)
{
    if (td_error(td) != TD_OK) return false;
    if (!td->profile) {
        td->profile = td_alloc(td, sizeof *td->profile, "host");
        if (!td->profile) return false;
        *td->profile = (td_profile){ 0 };
    }
    td_profile *p = td->profile;
    uint32_t tasks = 0;
    for (uint32_t i = 0; i < td->plan_count; i++) {
        if (!attach(td, td->plans[i])) return false;
        if (td->plans[i]->task_count > tasks) tasks = td->plans[i]->task_count;
    }
    if (p->announced < p->steps + steps) p->announced = p->steps + steps;
    if (!reserve(td, steps, tasks)) return false;
    p->mark_ns = td_profile_now();
    td->profiling = true;
    return true;
}

void td_profile_end(td_context *td)
{
    if (td->profile) td->profiling = false;
}

void td_profile_clear(td_context *td)
{
    td_profile *p = td->profile;
    if (!p) return;
    td->profiling = false;
    td->profile = NULL;
    for (uint32_t i = 0; i < td->plan_count; i++) td->plans[i]->profiled = NULL;
    for (td_profiled_plan *plan = p->plans, *next; plan; plan = next) {
        next = plan->next;
        forget(td, plan, plan->count);
    }
    td_free(td, p->events, p->event_room * sizeof *p->events, "host");
    td_free(td, p, sizeof *p, "host");
}

/* ---- While plans run */

bool td_profile_plan(td_context *td, td_planned *plan)
{
    td_profile *p = td->profile;
    if (!attach(td, plan)) return false;
    if (p->event_room - p->event_count < plan->task_count + HOST_EVENTS) {
        int64_t left = p->announced - p->steps;
        if (!reserve(td, left > 0 ? left : 1, plan->task_count)) return false;
    }
    td_profile_mark(td, "bind");
    return true;
}

static void note(td_context *td, td_profile_event e)
{
    td_profile *p = td->profile;
    if (td_room(td, (void **)&p->events, &p->event_room, p->event_count + 1, sizeof e, "host")) p->events[p->event_count++] = e;
}

void td_profile_mark(td_context *td, const char *name)
{
    if (!td->profiling) return;
    td_profile *p = td->profile;
    int64_t now = td_profile_now();
    note(td, (td_profile_event){ .name = name, .begin_ns = p->mark_ns, .end_ns = now, .step = p->steps });
    p->mark_ns = now;
}

void td_profile_task_done(td_context *td, const td_planned *plan, uint32_t task, int64_t begin_ns, int64_t end_ns)
{
    note(td, (td_profile_event){ .task = &plan->profiled->task[task], .begin_ns = begin_ns, .end_ns = end_ns, .step = td->profile->steps });
}

void td_profile_step_done(td_context *td) { td->profile->steps++; }

/* ---- Reading */

int64_t td_profile_count(const td_context *td) { return td->profile ? td->profile->event_count : 0; }
int64_t td_profile_steps(const td_context *td) { return td->profile ? td->profile->steps : 0; }
td_profile_event td_profile_at(const td_context *td, int64_t index)
{
    bool known = index >= 0 && index < td_profile_count(td);
    return known ? td->profile->events[index] : (td_profile_event){ 0 };
}
