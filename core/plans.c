/* Plans of what was recorded: found by its fingerprint and confirmed by comparing the recordings, or made by the rewrites and the planner.
 */
#include "core/internal.h"

#include <string.h>

enum { PLANS_KEPT = 64 };

/* ---- From recording to plan */

typedef td_program *(*pass)(const td_program *in);

/* Replaces *p by what the pass makes of it; logs the result. */
static bool advance(td_program **p, td_program *next, td_stage stage)
{
    td_program_free(*p);
    *p = next;
    if (next) td_program_log(next, stage);
    return next != NULL;
}

static td_program *lower(td_context *td, td_purpose purpose)
{
    td_program *p = NULL;
    td_program_log(&td->recording, TD_STAGE_RECORD);
    bool narrows = td_is_narrow(td->options.dtype) || td->dtypes_hash;
    if (narrows && !advance(&p, td_precision_pass(&td->recording), TD_STAGE_PRECISION)) return NULL;
    if (!advance(&p, td_differentiate_pass(p ? p : &td->recording, purpose), TD_STAGE_GRAD)) return NULL;
    if (!td_stage_off(td, TD_STAGE_SIMPLIFY) && !advance(&p, td_simplify_pass(p), TD_STAGE_SIMPLIFY)) return NULL;
    if (td->has_parallel && td->parallel.place && !advance(&p, td->parallel.place(td->parallel.self, p), TD_STAGE_PLACE)) return NULL;
    if (td->has_parallel && td->parallel.schedule && !td_stage_off(td, TD_STAGE_SCHEDULE) &&
        !advance(&p, td->parallel.schedule(td->parallel.self, p), TD_STAGE_SCHEDULE))
        return NULL;
    if (!td_stage_off(td, TD_STAGE_FUSE) && !td->options.eager && !advance(&p, td_fuse_pass(p), TD_STAGE_FUSE)) return NULL;
    return p;
}

static bool stores(const td_program *p, uint32_t unit) { return td_stored_value(p, unit) != TD_NONE; }

/* Whether the program changes what the derived unit is made of. */
static bool outdates(const td_program *p, const td_unit *derived)
{
    const td_context *td = p->td;
    if (derived->of != TD_NONE) return stores(p, derived->of);
    bool outdated = false;
    for (uint32_t u = 0; u < td->unit_count && !outdated; u++) outdated = td->units[u].kind == TD_PARAMETER && stores(p, u);
    return outdated;
}

/* Whether one node gives the derived unit's value and that of what it is made of: an update that writes a copy along. */
static bool follows(const td_program *p, uint32_t derived)
{
    uint32_t of = p->td->units[derived].of;
    td_id value = of == TD_NONE ? TD_NONE : td_stored_value(p, of), copy = td_stored_value(p, derived);
    return value != TD_NONE && copy != TD_NONE && p->values[value].node == p->values[copy].node;
}

/* Notes how the step leaves units: accumulators taken are empty after it, those stored to are full; derived units whose origins are
 * stored are out of date, unless they are stored along with them; others that are stored are current. */
static bool note_left(td_context *td, td_planned *plan, const td_program *p)
{
    for (uint32_t u = 0; u < td->unit_count; u++) {
        const td_unit *unit = &td->units[u];
        td_left left = { .unit = u, .accumulator_full = unit->accumulator != TD_NONE && stores(p, unit->accumulator) };
        bool outdated = unit->derived && outdates(p, unit) && !follows(p, u), made = unit->derived && !outdated && stores(p, u);
        left.current = made;
        if (!left.accumulator_full && !unit->accumulator_taken && !outdated && !made) continue;
        if (!td_grow(td, (void **)&plan->left, &plan->left_room, plan->left_count + 1, sizeof *plan->left, "program")) return false;
        plan->left[plan->left_count++] = left;
    }
    return true;
}

/* Everything that ranks must have alike beyond what is recorded: how state is laid out, and the collectives in their order. */
static uint64_t agreement_of(td_context *td, const td_program *p)
{
    uint64_t h = 0;
    for (uint32_t u = 0; u < td->unit_count; u++) {
        h = td_mix(h, (uint64_t)td->units[u].elements * TD_DTYPES + td->units[u].dtype);
        for (int32_t m = 0; m < td->units[u].member_count; m++) h = td_mix(h, td->states[td->units[u].members[m].state].hash);
    }
    for (uint32_t n = 0; n < p->node_count; n++) {
        const td_node *node = &p->nodes[n];
        if (!(node->op->flags & TD_OP_COLLECTIVE)) continue;
        const td_value *v = &p->values[node->output];
        h = td_hash_bytes(td_mix(h, td_hash_text(node->op->name)), td_node_attr(p, node), node->attr_bytes);
        h = td_mix(h, (uint64_t)td_shape_elements(v->shape) * TD_DTYPES + v->dtype);
    }
    return h;
}

/* As the context's device is asked for it. */
static int64_t in_pages(const td_context *td, int64_t bytes)
{
    return td->page_bytes ? td_round_up(bytes, td->page_bytes) : bytes;
}

static int64_t step_bytes(const td_context *td, int64_t arena_bytes, int64_t slot_bytes)
{
    int64_t inputs = td->device->is_gpu ? TD_INPUT_SETS * (TD_GPU_ALIGN + slot_bytes) : slot_bytes;
    return in_pages(td, arena_bytes) + in_pages(td, inputs);
}

static int64_t state_of(const td_context *td, td_memory memory, bool missing)
{
    int64_t bytes = 0, align = td->device->is_gpu && memory == TD_DEVICE ? TD_GPU_ALIGN : 1;
    for (uint32_t u = 0; u < td->unit_count; u++) {
        int64_t begin, end;
        td_unit_range(td, &td->units[u], &begin, &end);
        if ((td_memory)td->units[u].place.memory != memory || (missing && td->units[u].memory)) continue;
        bytes += td_round_up((end - begin) * td_dtype_size(td->units[u].dtype), align);
    }
    return bytes;
}

int64_t td_state_bytes(const td_context *td, td_memory memory)
{
    int64_t bytes = state_of(td, memory, false);
    return memory == TD_DEVICE ? in_pages(td, bytes + td->state_skipped) : bytes;
}

int64_t td_state_missing(const td_context *td, td_memory memory) { return state_of(td, memory, true); }

static bool check_memory(td_context *td, const td_planned *plan)
{
    int64_t cap = td->options.memory_bytes, state = td_state_bytes(td, TD_DEVICE), step = step_bytes(td, plan->arena_bytes, plan->slot_bytes);
    if (!cap || state + step <= cap) return true;
    const td_block *largest = NULL;
    for (uint32_t b = 0; b < plan->block_count; b++) {
        const td_block *block = &plan->blocks[b];
        bool of_step = block->kind == TD_BLOCK_ARENA && block->memory == TD_DEVICE && block->part_of == TD_NONE;
        if (of_step && (!largest || block->bytes > largest->bytes)) largest = block;
    }
    const td_node *n = largest && largest->first >= 0 ? &plan->program->nodes[plan->tasks[largest->first].node] : NULL;
    td_fail(td, TD_ERROR_MEMORY, "planning: the step needs %lld bytes (state %lld, step %lld) and may have %lld; the largest value is %lld bytes, of %s %s; "
            "a smaller batch or more ranks that shard would make it fit", (long long)(state + step), (long long)state,
            (long long)step, (long long)cap, (long long)(largest ? largest->bytes : 0), n ? n->op->name : "nothing",
            n ? td_location(td, n->module, n->file, n->line) : "");
    return false;
}

void td_plan_report(td_context *td, const td_planned *plan, double ms)
{
    td_report *r = &td->report;
    r->state_bytes = td_state_bytes(td, TD_DEVICE);
    r->step_bytes = step_bytes(td, plan->arena_bytes, plan->slot_bytes);
    int64_t arena = plan->arena_bytes, slots = plan->slot_bytes, host = plan->host_arena_bytes;
    for (uint32_t i = 0; i < td->plan_count; i++) {
        if (td->plans[i]->arena_bytes > arena) arena = td->plans[i]->arena_bytes;
        if (td->plans[i]->slot_bytes > slots) slots = td->plans[i]->slot_bytes;
        if (td->plans[i]->host_arena_bytes > host) host = td->plans[i]->host_arena_bytes;
    }
    r->peak_bytes = r->state_bytes + step_bytes(td, arena, slots);
    r->live_bytes = plan->live_bytes;
    r->host_bytes = td_state_bytes(td, TD_HOST) + host;
    r->copied_bytes = plan->cost.copied;
    r->flops = plan->cost.flops;
    r->bytes_moved = plan->cost.bytes;
    r->comm_bytes = plan->cost.sent;
    r->comm_calls = plan->comm_calls;
    r->nodes = plan->recording.node_count;
    r->calls = plan->task_count;
    if (ms >= 0) r->plan_ms = ms;
}

/* "(collectives, after 11)": the queue, if it is not computation's, and the calls of other queues that the call waits for. */
static void print_queue(td_text *b, const td_task *task)
{
    static const char *const names[TD_QUEUES] = { [TD_QUEUE_COLLECTIVES] = "collectives", [TD_QUEUE_TO_HOST] = "to host",
                                                  [TD_QUEUE_TO_DEVICE] = "to device", [TD_QUEUE_HOST] = "host",
                                                  [TD_QUEUE_ASIDE] = "aside" };
    bool waits = false;
    for (int i = 0; i < TD_QUEUES; i++) waits |= task->waits[i] >= 0;
    if (!names[task->queue] && !waits) return;
    td_text_add(b, " (%s", names[task->queue] ? names[task->queue] : "");
    const char *between = names[task->queue] ? ", after" : "after";
    for (int i = 0; i < TD_QUEUES; i++) {
        if (task->waits[i] < 0) continue;
        td_text_add(b, "%s %d", between, task->waits[i]);
        between = ",";
    }
    td_text_add(b, ")");
}

static void print_plan(td_context *td, const td_planned *plan)
{
    if (!td_stage_printed(td, TD_STAGE_PLAN)) return;
    td_text b = { .td = td };
    td_text_add(&b, "-- plan: %u calls, arena %lld bytes (live %lld), %lld FLOPs, sends %lld bytes\n", plan->task_count,
                (long long)plan->arena_bytes, (long long)plan->live_bytes, (long long)plan->cost.flops, (long long)plan->cost.sent);
    for (uint32_t t = 0; t < plan->task_count; t++) {
        const td_kernel *k = &plan->tasks[t].kernel;
        td_text_add(&b, "%4u %s", t, k->op->name);
        if (plan->beside) print_queue(&b, &plan->tasks[t]);
        for (int i = 0; i < k->inputs + k->outputs; i++) {
            const td_arg *arg = &k->in[i]; /* outputs follow inputs */
            const td_binding *at = NULL;
            for (uint32_t j = 0; j < plan->binding_count && !at; j++)
                if (plan->bindings[j].pointer == (void **)&arg->data) at = &plan->bindings[j];
            int64_t offset = at->offset;
            const td_block *root = td_block_root(plan, at->block, &offset);
            if (root->kind == TD_BLOCK_ARENA) offset += root->offset;
            static const char *const where[] = { "+", "unit", "slot", "constant" };
            bool host = root->kind == TD_BLOCK_ARENA && root->memory == TD_HOST;
            td_text_add(&b, "%s %s", i == k->inputs ? " ->" : "", host ? "host+" : where[root->kind]);
            if (root->kind != TD_BLOCK_ARENA) td_text_add(&b, "%u+", root->index);
            td_text_add(&b, "%lld", (long long)offset);
        }
        td_text_add(&b, "\n");
    }
    if (b.text) td->options.log(td->options.log_user, TD_LOG_PROGRAM, b.text);
    td_free(td, b.text, b.room, "host");
}

/* What a step may have of memory less what it needs; below 0: it does not fit. */
static int64_t room_left(const td_context *td, const td_planned *plan)
{
    if (!td->options.memory_bytes) return INT64_MAX;
    return td->options.memory_bytes - td_state_bytes(td, TD_DEVICE) - step_bytes(td, plan->arena_bytes, plan->slot_bytes);
}

/* Values are made again for memory: as many as it takes where the step does not fit; and on a GPU, where it is worth most and costs least,
 * as far as they are a small part of what the step moves. */
static td_planned *spare_memory(td_context *td, td_planned *plan)
{
    enum { SMALL_PART = 128, ROUNDS = 16 };
    if (td_stage_off(td, TD_STAGE_FUSE) || td->options.eager) return plan;
    int64_t small = td->device->is_gpu ? plan->cost.bytes / SMALL_PART : 0;
    for (int round = 0; round < ROUNDS && (small || room_left(td, plan) < 0); round++) {
        int64_t lacks = -room_left(td, plan), budget = lacks > 0 ? INT64_MAX : small;
        td_program *p = td_again_pass(plan, lacks > 0 ? lacks : INT64_MAX, &budget);
        td_planned *next = p ? td_plan_make(td, p) : NULL; /* takes p */
        if (!next) break;
        bool less = next->arena_bytes < plan->arena_bytes;
        td_planned *dropped = less ? plan : next;
        plan = less ? next : plan;
        td_plan_free(td, dropped);
        if (!less) break;
        td_program_log(plan->program, TD_STAGE_FUSE);
        small = 0;
    }
    return plan;
}

static td_planned *make_plan(td_context *td, td_purpose purpose)
{
    int64_t begin_ns = td_profile_now();
    td_program *p = lower(td, purpose);
    if (!p) return NULL;
    td_planned *plan = td_plan_make(td, p); /* takes p */
    if (!plan) return NULL;
    plan = spare_memory(td, plan);
    plan->purpose = purpose;
    plan->agreement = agreement_of(td, plan->program);
    bool whole = td->error == TD_OK && td_program_copy(&plan->recording, &td->recording) && note_left(td, plan, plan->program);
    if (!whole || !check_memory(td, plan)) {
        td_plan_free(td, plan);
        return NULL;
    }
    td->report.plans++;
    td_plan_report(td, plan, 1e-6 * (double)(td_profile_now() - begin_ns));
    print_plan(td, plan);
    return plan;
}

/* ---- The cache */

/* What a plan depends on besides the recording: what modules compute in, which accumulators hold something, which derived units are
 * current. */
static uint64_t plan_key(const td_context *td, td_purpose purpose)
{
    uint64_t key = td_mix(td->recording.hash, td->has_parallel ? td->parallel.options_hash : 0);
    if (td->dtypes_hash) key = td_mix(key, td->dtypes_hash);
    for (uint32_t u = 0; u < td->unit_count; u++)
        if (td->units[u].accumulator_full || td->units[u].current) key = td_mix(key, u);
    return td_mix(key, purpose);
}

static td_planned *find_plan(td_context *td, uint64_t key, td_purpose purpose)
{
    for (uint32_t i = 0; i < td->plan_count; i++) {
        td_planned *plan = td->plans[i];
        if (plan->key == key && plan->purpose == purpose && td_program_same(&plan->recording, &td->recording)) return plan;
    }
    return NULL;
}

static void drop_plan(td_context *td, uint32_t index)
{
    if (td->last == td->plans[index]) td->last = NULL;
    if (td->planned == td->plans[index]) td->planned = NULL;
    td_plan_free(td, td->plans[index]);
    td->plans[index] = td->plans[--td->plan_count];
}

static bool keep_plan(td_context *td, td_planned *plan)
{
    if (td->plan_count == PLANS_KEPT) {
        uint32_t oldest = 0;
        for (uint32_t i = 1; i < td->plan_count; i++)
            if (td->plans[i]->used < td->plans[oldest]->used) oldest = i;
        drop_plan(td, oldest);
    }
    if (!td_grow(td, (void **)&td->plans, &td->plan_room, td->plan_count + 1, sizeof *td->plans, "program")) return false;
    td->plans[td->plan_count++] = plan;
    return true;
}

/* The first node at which a recording and an older one part; TD_NONE: one is the beginning of the other. */
static uint32_t parting(const td_program *r, const td_program *old)
{
    uint32_t n = 0;
    while (n < r->node_count && n < old->node_count && r->nodes[n].hash == old->nodes[n].hash) n++;
    return n < r->node_count && n < old->node_count ? n : TD_NONE;
}

/* Told once, when a call site gives a third plan: two older recordings part from this one there, and from each other. */
static void warn_of_many_plans(td_context *td)
{
    const td_program *r = &td->recording;
    uint32_t at = 0, ways = 0;
    uint64_t seen[2];
    for (int pass = 0; pass < 2; pass++) /* first where the latest parting is, then how many ways lead from there */
        for (uint32_t i = 0; i < td->plan_count; i++) {
            const td_program *old = &td->plans[i]->recording;
            uint32_t n = td->plans[i]->purpose == TD_FOR_STEP ? parting(r, old) : TD_NONE;
            if (n == TD_NONE) continue;
            if (pass == 0 && n > at) at = n;
            if (pass == 0 || n != at) continue;
            uint64_t hash = old->nodes[n].hash;
            bool known = (ways > 0 && seen[0] == hash) || (ways > 1 && seen[1] == hash);
            if (!known && ways < 2) seen[ways] = hash;
            ways += !known;
        }
    if (ways != 2) return;
    const td_node *n = &r->nodes[at];
    char shape[TD_SHAPE_TEXT] = "";
    if (n->outputs) td_shape_text(r->values[n->output].shape, shape);
    td_message(td, TD_LOG_WARNING, "a third plan was made because %s %s differs from step to step %s; sizes and attributes that vary are planned "
               "each time: pass what varies as td_scalar or td_input", n->op->name, shape, td_location(td, n->module, n->file, n->line));
}

td_planned *td_plan_for(td_context *td, td_purpose purpose, bool *is_new)
{
    uint64_t key = plan_key(td, purpose);
    td_planned *plan = find_plan(td, key, purpose);
    *is_new = !plan;
    if (plan) return plan;
    plan = make_plan(td, purpose);
    if (!plan) return NULL;
    plan->key = key;
    if (purpose == TD_FOR_STEP) warn_of_many_plans(td);
    if (keep_plan(td, plan)) return plan;
    td_plan_free(td, plan);
    return NULL;
}

void td_plans_close(td_context *td)
{
    while (td->plan_count) drop_plan(td, 0);
    td_free(td, td->plans, td->plan_room * sizeof *td->plans, "program");
}
