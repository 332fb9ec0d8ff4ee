/* Queues of a GPU: streams beside computation's, and events by which calls of one wait for calls of another, as the plan says (queues.c).
 *
 * Computation's queue is a run's first and last: the others begin behind it and it ends behind them, so that a capture that begins on it
 * takes all of them, and waiting for it is waiting for all.
 */
#include "core/device_graph.h"

#include <string.h>

cudaStream_t td_queue_of(td_context *td, const td_cuda_plan *p, const td_task *task)
{
    return p->beside && task->queue != TD_QUEUE_COMPUTE ? td->cuda->beside[task->queue] : td->cuda->stream;
}

/* The last call of a queue; -1: the plan has none there. */
static int32_t last_of(const td_planned *plan, int queue)
{
    int32_t t = (int32_t)plan->task_count - 1;
    while (t >= 0 && plan->tasks[t].queue != queue) t--;
    return t;
}

void td_events_free(td_context *td, cudaEvent_t **events, uint32_t *count)
{
    for (uint32_t e = 0; e < *count; e++)
        if ((*events)[e]) cudaEventDestroy((*events)[e]);
    td_free(td, *events, *count * sizeof **events, "host");
    *events = NULL;
    *count = 0;
}

bool td_events_get(td_context *td, cudaEvent_t **events, uint32_t *count, uint32_t wanted)
{
    *events = td_alloc(td, wanted * sizeof **events, "host");
    if (!*events) return false;
    memset(*events, 0, wanted * sizeof **events);
    *count = wanted;
    return true;
}

bool td_event_make(td_context *td, cudaEvent_t *event, unsigned flags)
{
    return *event || td_cuda_ok(td, cudaEventCreateWithFlags(event, flags), "making an event");
}

bool td_event_record(td_context *td, cudaEvent_t event, cudaStream_t queue, unsigned how)
{
    return td_cuda_ok(td, cudaEventRecordWithFlags(event, queue, how), "recording an event");
}

/* What goes first where it waits for nothing, since all others wait for it; aside goes last. */
static bool open_queue(td_context *td, int which)
{
    int least, most;
    cudaStream_t *queue = &td->cuda->beside[which];
    return *queue || (td_cuda_ok(td, cudaDeviceGetStreamPriorityRange(&least, &most), "asking the GPU") &&
                      td_cuda_ok(td, cudaStreamCreateWithPriority(queue, cudaStreamNonBlocking, which == TD_QUEUE_ASIDE ? least : most), "making a queue"));
}

/* Queues and events that the plan needs. */
bool td_queues_ensure(td_context *td, const td_planned *plan, td_cuda_plan *p)
{
    if (!plan->beside || p->ended) return true;
    if (!td_events_get(td, &p->ended, &p->ended_count, plan->task_count + 2)) return false;
    bool made = td_event_make(td, &p->ended[plan->task_count], cudaEventDisableTiming);
    for (uint32_t t = 0; t < plan->task_count && made; t++)
        for (int q = 0; q < TD_QUEUES && made; q++)
            if (plan->tasks[t].waits[q] >= 0) made = td_event_make(td, &p->ended[plan->tasks[t].waits[q]], cudaEventDisableTiming);
    for (int q = TD_QUEUE_COMPUTE + 1; q < TD_QUEUES && made; q++) {
        int32_t last = last_of(plan, q);
        if (last >= 0) made = open_queue(td, q) && td_event_make(td, &p->ended[last], cudaEventDisableTiming);
    }
    made = made && td_event_make(td, &p->ended[plan->task_count + 1], cudaEventDisableTiming);
    if (!made) td_events_free(td, &p->ended, &p->ended_count);
    return made;
}

static bool follow(td_context *td, cudaStream_t queue, cudaEvent_t event)
{
    return td_cuda_ok(td, cudaStreamWaitEvent(queue, event, 0), "waiting for another queue");
}

bool td_queues_fork(td_context *td, const td_planned *plan, const td_cuda_plan *p)
{
    if (!p->beside) return true;
    bool ok = td_event_record(td, p->ended[plan->task_count], td->cuda->stream, cudaEventRecordDefault);
    for (int q = TD_QUEUE_COMPUTE + 1; q < TD_QUEUES && ok; q++)
        if (last_of(plan, q) >= 0) ok = follow(td, td->cuda->beside[q], p->ended[plan->task_count]);
    return ok;
}

bool td_queues_join(td_context *td, const td_planned *plan, const td_cuda_plan *p)
{
    bool ok = true;
    for (int q = TD_QUEUE_COMPUTE + 1; q < TD_QUEUES && p->beside && ok; q++)
        if (last_of(plan, q) >= 0) ok = follow(td, td->cuda->stream, p->ended[last_of(plan, q)]);
    if (td_queues_lands(plan, p)) ok = ok && follow(td, td->cuda->stream, p->ended[plan->task_count + 1]);
    return ok;
}

bool td_queues_wait(td_context *td, const td_cuda_plan *p, const td_task *task)
{
    bool ok = true;
    for (int q = 0; q < TD_QUEUES && p->beside && ok; q++)
        if (task->waits[q] >= 0) ok = follow(td, td_queue_of(td, p, task), p->ended[task->waits[q]]);
    return ok;
}

bool td_queues_done(td_context *td, const td_planned *plan, const td_cuda_plan *p, uint32_t task)
{
    bool awaited = p->beside && p->ended[task];
    return !awaited || td_event_record(td, p->ended[task], td_queue_of(td, p, &plan->tasks[task]), cudaEventRecordDefault);
}

bool td_queues_lands(const td_planned *plan, const td_cuda_plan *p)
{
    return p->beside && plan->landable >= 0 && last_of(plan, TD_QUEUE_ASIDE) >= 0;
}

/* What is aside already comes before it there; for other queues' calls up to this one an event is waited for. */
bool td_queues_land(td_context *td, const td_planned *plan, const td_cuda_plan *p, uint32_t task)
{
    if (!td_queues_lands(plan, p) || (int32_t)task != plan->landable) return true;
    cudaStream_t aside = td->cuda->beside[TD_QUEUE_ASIDE], queue = td_queue_of(td, p, &plan->tasks[task]);
    cudaEvent_t event = p->ended[plan->task_count + 1];
    bool ok = queue == aside || (td_event_record(td, event, queue, cudaEventRecordDefault) && follow(td, aside, event));
    return ok && td_exchange_land(td, &td->cuda->exchange, aside, plan) && td_event_record(td, event, aside, cudaEventRecordDefault);
}

void td_queues_close(td_context *td)
{
    for (int q = 0; q < TD_QUEUES; q++)
        if (td->cuda->beside[q]) cudaStreamDestroy(td->cuda->beside[q]);
    memset(td->cuda->beside, 0, sizeof td->cuda->beside);
}
