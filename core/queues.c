/* queues: which queue of a GPU each call of a plan goes to, and which calls of other queues it waits for.
 *
 * Computation is one queue, collectives another, copies to the host and from it one each, and what the host computes, of offloaded state;
 * each runs its calls in order, beside the others. Of computation what is small and only the step's end reads, the loss added up and
 * scaled, say, goes aside: to a queue of its own, where it costs no time. So does what is small, of nothing that the step computes, and read
 * much later: a count of updates and one more.
 *
 *   - What is no computation of the device begins when the computation before it in the plan has ended. So the order of the plan says how early a
 *     gather comes, and memory given to it was read last by calls that have ended.
 *   - A call waits for those of another queue before it that write what it reads or writes, or read what it writes.
 *   - What other queues' calls touch stays alive until computation has waited for it. Where that would keep memory which is dead by
 *     the plan's order, computation waits when IN_FLIGHT more such calls have begun: a stage that scatters the gradients of a hundred
 *     units keeps two of them.
 *
 * Known to have ended, when a call runs, is a number for each queue: its last call that has, and so all before it.
 *
 * The CPU makes all calls in turn; what they would wait for is told to those who foretell.
 */
#include "core/internal.h"

#include <string.h>

enum {
    IN_FLIGHT = 2,
    LARGE = 1 << 20,                          /* bytes: less is not worth a wait */
    SMALL = 64 << 10,                         /* of all operands of what may go aside: they live on to the step's end */
    FAR = 4,                                  /* calls to one that is waited for without waiting */
};

/* What a call of a queue beside computation reads or writes. */
typedef struct touch {
    uint32_t next;                            /* an earlier one of the same memory and queue, or TD_NONE */
    int32_t task;
    bool writes;
    int64_t begin, end;                       /* bytes of the block that has memory */
} touch;

typedef struct queues {
    td_planned *plan;
    uint32_t *first_binding;                  /* task, and one past the last */
    touch *touches;
    uint32_t touch_count;
    uint32_t *newest[TD_QUEUES];              /* block: its last touch, or TD_NONE */
    int32_t (*ended)[TD_QUEUES];              /* task: the last calls known to have ended when it has */
    int32_t known[TD_QUEUES][TD_QUEUES];      /* queue: the same for its next call, as far as nothing is waited for */
    int32_t large[TD_QUEUES][IN_FLIGHT];      /* queue: its last calls that keep memory, the earliest first; or -1 */
    int32_t due[TD_QUEUES];                   /* what computation's next call waits for, for the sake of memory; or -1 */
} queues;

static int queue_of(const td_task *task)
{
    const td_op *op = task->kernel.op;
    if (op->flags & TD_OP_COLLECTIVE) return TD_QUEUE_COLLECTIVES;
    if (op->flags & TD_OP_COPY) return op == &td_op_to_host ? TD_QUEUE_TO_HOST : TD_QUEUE_TO_DEVICE;
    return task->kernel.outputs && task->kernel.out[0].place.memory == TD_HOST ? TD_QUEUE_HOST : TD_QUEUE_COMPUTE;
}

/* Operands and workspaces were bound task after task. */
static void find_bindings(queues *q)
{
    const td_planned *plan = q->plan;
    uint32_t at = 0;
    for (uint32_t t = 0; t < plan->task_count; t++) {
        const td_task *task = &plan->tasks[t];
        q->first_binding[t] = at;
        at += (uint32_t)(task->kernel.inputs + task->kernel.outputs);
        at += at < plan->binding_count && plan->bindings[at].pointer == &task->kernel.workspace;
    }
    q->first_binding[plan->task_count] = at;
}

/* Binding b of task t as memory; false: it is an input's or a constant's, which nothing writes. */
static bool find_touch(const queues *q, uint32_t t, uint32_t b, uint32_t *block, touch *to)
{
    const td_planned *plan = q->plan;
    const td_kernel *k = &plan->tasks[t].kernel;
    const td_binding *binding = &plan->bindings[b];
    uint32_t operand = b - q->first_binding[t];
    bool workspace = operand >= (uint32_t)(k->inputs + k->outputs), input = operand < (uint32_t)k->inputs;
    const td_arg *arg = input ? &k->in[operand] : &k->out[operand - (uint32_t)k->inputs];
    *to = (touch){ .next = TD_NONE, .task = (int32_t)t, .writes = !input, .begin = binding->offset };
    const td_block *root = td_block_root(plan, binding->block, &to->begin);
    to->end = to->begin + (workspace ? root->bytes : td_shape_elements(arg->shape) * td_dtype_size(arg->dtype));
    *block = (uint32_t)(root - plan->blocks);
    return root->kind < TD_BLOCK_SLOT && to->end > to->begin;
}

static bool conflict(const touch *a, const touch *b) { return (a->writes || b->writes) && a->begin < b->end && b->begin < a->end; }

static void wait_for(queues *q, int32_t known[TD_QUEUES], td_task *task, int queue, int32_t other)
{
    if (other <= known[queue]) return;
    task->waits[queue] = other;
    for (int i = 0; i < TD_QUEUES; i++)
        if (q->ended[other][i] > known[i]) known[i] = q->ended[other][i];
}

/* The last call of `queue` that is not known to have ended and touches what `mine` does; -1: there is none. */
static int32_t last_conflict(const queues *q, const int32_t known[TD_QUEUES], int queue, uint32_t block, const touch *mine)
{
    for (uint32_t i = q->newest[queue][block]; i != TD_NONE && q->touches[i].task > known[queue]; i = q->touches[i].next)
        if (conflict(&q->touches[i], mine)) return q->touches[i].task;
    return -1;
}

static void find_waits(queues *q, uint32_t t, int32_t known[TD_QUEUES])
{
    td_task *task = &q->plan->tasks[t];
    uint32_t block;
    touch mine;
    if (task->queue != TD_QUEUE_COMPUTE) wait_for(q, known, task, TD_QUEUE_COMPUTE, q->known[TD_QUEUE_COMPUTE][TD_QUEUE_COMPUTE]);
    for (int other = TD_QUEUE_COMPUTE + 1; other < TD_QUEUES; other++) {
        int32_t last = task->queue == TD_QUEUE_COMPUTE ? q->due[other] : -1;
        for (uint32_t b = q->first_binding[t]; b < q->first_binding[t + 1] && other != task->queue; b++) {
            if (!find_touch(q, t, b, &block, &mine)) continue;
            int32_t found = last_conflict(q, known, other, block, &mine);
            if (found > last) last = found;
        }
        wait_for(q, known, task, other, last);
    }
}

/* Notes what a call beside computation touches. Returns the bytes that nothing touches behind it in the plan. */
static int64_t note_touches(queues *q, uint32_t t)
{
    uint32_t block;
    int64_t bytes = 0;
    touch mine;
    for (uint32_t b = q->first_binding[t]; b < q->first_binding[t + 1]; b++) {
        if (!find_touch(q, t, b, &block, &mine)) continue;
        uint32_t *newest = &q->newest[q->plan->tasks[t].queue][block];
        mine.next = *newest;
        *newest = q->touch_count;
        q->touches[q->touch_count++] = mine;
        const td_block *root = &q->plan->blocks[block];
        if (root->kind == TD_BLOCK_ARENA && root->last == (int32_t)t) bytes += root->bytes;
    }
    return bytes;
}

static void begin_large(queues *q, uint32_t t, int queue)
{
    int32_t *large = q->large[queue];
    q->due[queue] = large[0];
    memmove(large, large + 1, (IN_FLIGHT - 1) * sizeof *large);
    large[IN_FLIGHT - 1] = (int32_t)t;
}

/* ---- What goes aside */

/* What it reads and writes; of a block that lives on with it, all. */
static bool is_small(const queues *q, uint32_t t)
{
    int64_t bytes = 0;
    uint32_t block;
    touch mine;
    for (uint32_t b = q->first_binding[t]; b < q->first_binding[t + 1]; b++) {
        (void)find_touch(q, t, b, &block, &mine); /* of inputs and constants, too */
        const td_block *root = &q->plan->blocks[block];
        bytes += root->kind == TD_BLOCK_ARENA ? root->bytes : mine.end - mine.begin;
    }
    return bytes <= SMALL;
}

/* Whether call `reader`, behind call t, touches what t writes. */
static bool touches_result(const queues *q, uint32_t t, uint32_t reader)
{
    uint32_t block, other;
    touch mine, theirs;
    for (uint32_t b = q->first_binding[t]; b < q->first_binding[t + 1]; b++) {
        if (!find_touch(q, t, b, &block, &mine) || !mine.writes) continue;
        for (uint32_t i = q->first_binding[reader]; i < q->first_binding[reader + 1]; i++)
            if (find_touch(q, reader, i, &other, &theirs) && other == block && conflict(&mine, &theirs)) return true;
    }
    return false;
}

/* The first call that is not aside and touches what call t writes; the number of calls: there is none. */
static uint32_t first_reader(const queues *q, uint32_t t)
{
    uint32_t r = t + 1;
    while (r < q->plan->task_count && (q->plan->tasks[r].queue == TD_QUEUE_ASIDE || !touches_result(q, t, r))) r++;
    return r;
}

static bool depends_on_calls(const queues *q, uint32_t t)
{
    bool depends = false;
    for (uint32_t e = 0; e < t && !depends; e++) depends = touches_result(q, e, t);
    return depends;
}

/* Calls of computation that are small and whose results only others aside read; or nothing near, if they depend on no call. */
static void set_aside(queues *q)
{
    td_planned *plan = q->plan;
    for (uint32_t t = plan->task_count; t-- > 0;) {
        bool aside = plan->tasks[t].kernel.outputs && queue_of(&plan->tasks[t]) == TD_QUEUE_COMPUTE && is_small(q, t);
        uint32_t reader = aside ? first_reader(q, t) : t;
        if (aside && (reader == plan->task_count || (reader >= t + FAR && !depends_on_calls(q, t)))) plan->tasks[t].queue = TD_QUEUE_ASIDE;
    }
}

/* The last call that writes what comes to the host with the step; -1: there is none, or one is of no computation, which need not have
 * ended when a later one has. */
static int32_t last_landed(const queues *q)
{
    const td_planned *plan = q->plan;
    uint32_t outputs[TD_LANDED], count = td_plan_landing(plan, outputs), block;
    int32_t last = -1;
    touch mine;
    for (uint32_t t = 0; t < plan->task_count; t++) {
        bool lands = false;
        for (uint32_t b = q->first_binding[t]; b < q->first_binding[t + 1]; b++) {
            bool writes = find_touch(q, t, b, &block, &mine) && mine.writes;
            for (uint32_t o = 0; o < count && writes; o++) {
                int64_t offset = 0;
                lands |= td_block_root(plan, plan->outputs[outputs[o]].block, &offset) == &plan->blocks[block];
            }
        }
        if (lands && queue_of(&plan->tasks[t]) != TD_QUEUE_COMPUTE) return -1;
        if (lands) last = (int32_t)t;
    }
    return last;
}

/* ---- All calls */

static void give_queue(queues *q, uint32_t t)
{
    td_task *task = &q->plan->tasks[t];
    int queue = task->queue == TD_QUEUE_ASIDE ? TD_QUEUE_ASIDE : queue_of(task);
    int32_t *known = q->known[queue];
    task->queue = (uint8_t)queue;
    memset(task->waits, 0xFF, sizeof task->waits);
    find_waits(q, t, known);
    if (queue != TD_QUEUE_COMPUTE && note_touches(q, t) >= LARGE) begin_large(q, t, queue);
    known[queue] = (int32_t)t;
    memcpy(q->ended[t], known, sizeof q->ended[t]);
}

/* Memory that call t touches lives on up to the call before `end`. */
static void extend(queues *q, uint32_t t, int32_t end)
{
    for (uint32_t b = q->first_binding[t]; b < q->first_binding[t + 1]; b++) {
        int64_t offset = 0;
        td_block *root = &q->plan->blocks[td_block_root(q->plan, q->plan->bindings[b].block, &offset) - q->plan->blocks];
        if (root->last < end - 1) root->last = end - 1;
    }
}

/* What calls of `queue` touch lives until a call of computation knows that they have ended, or to the plan's end. */
static void keep_alive(queues *q, int queue)
{
    const td_planned *plan = q->plan;
    uint32_t next = 0;
    for (uint32_t t = 0; t <= plan->task_count; t++) {
        bool at_end = t == plan->task_count;
        if (!at_end && plan->tasks[t].queue != TD_QUEUE_COMPUTE) continue;
        for (int32_t ended = at_end ? (int32_t)t - 1 : q->ended[t][queue]; (int32_t)next <= ended; next++)
            if (plan->tasks[next].queue == queue) extend(q, next, (int32_t)t + at_end);
    }
}

static bool open_queues(queues *q, td_context *td, void **memory, size_t *bytes)
{
    const td_planned *plan = q->plan;
    size_t lists = (TD_QUEUES - 1) * (size_t)plan->block_count;
    *bytes = plan->binding_count * sizeof *q->touches + plan->task_count * sizeof *q->ended + (plan->task_count + 1 + lists) * sizeof(uint32_t);
    *memory = td_alloc(td, *bytes, "program");
    if (!*memory) return false;
    memset(*memory, 0xFF, *bytes);
    q->touches = *memory;
    q->ended = (int32_t(*)[TD_QUEUES])(q->touches + plan->binding_count);
    q->first_binding = (uint32_t *)(q->ended + plan->task_count);
    for (int i = TD_QUEUE_COMPUTE + 1; i < TD_QUEUES; i++)
        q->newest[i] = q->first_binding + plan->task_count + 1 + (size_t)(i - TD_QUEUE_COMPUTE - 1) * plan->block_count;
    return true;
}

bool td_queues_give(td_context *td, td_planned *plan)
{
    queues q = { .plan = plan };
    void *memory;
    size_t bytes;
    if (!open_queues(&q, td, &memory, &bytes)) return false;
    memset(q.known, 0xFF, sizeof q.known);
    memset(q.large, 0xFF, sizeof q.large);
    memset(q.due, 0xFF, sizeof q.due);
    find_bindings(&q);
    if (td->device->is_gpu && !td_stage_off(td, TD_STAGE_ASIDE)) set_aside(&q);
    plan->landable = last_landed(&q);
    for (uint32_t t = 0; t < plan->task_count; t++) {
        give_queue(&q, t);
        plan->beside |= plan->tasks[t].queue != TD_QUEUE_COMPUTE;
    }
    plan->beside &= td->device->is_gpu && !td->options.eager && !td->options.poison; /* what is looked at between calls needs them in turn */
    for (int i = TD_QUEUE_COMPUTE + 1; i < TD_QUEUES && plan->beside; i++) keep_alive(&q, i);
    td_free(td, memory, bytes, "program");
    return true;
}
