/* A plan as a CUDA graph.
 *
 * A plan's first run hands its calls over one by one, so that libraries load what they need; the second captures them in a graph, and
 * later ones launch it: a graph for each set of inputs that steps use in turn (device_exchange.h). The host waits for nothing until a value
 * is read.
 */
#include "core/device_graph.h"

#include <string.h>

static int current_set(const td_context *td) { return (int)(td->runs % TD_INPUT_SETS); }

static void drop_graphs(td_context *td, td_cuda_plan *p)
{
    for (int s = 0; s < TD_INPUT_SETS; s++) {
        td_free(td, p->host_calls[s], p->host_call_bytes, "program");
        p->host_calls[s] = NULL;
        if (p->graph[s]) cudaGraphExecDestroy(p->graph[s]);
        if (p->timed[s]) cudaGraphExecDestroy(p->timed[s]);
        p->graph[s] = p->timed[s] = NULL;
    }
    p->warm = false;
}

/* What the plan has here; graphs made for other places are gone. */
static td_cuda_plan *on_device(td_context *td, td_planned *plan)
{
    uint64_t epoch = td->cuda->exchange.epoch;
    if (!plan->on_device) {
        plan->on_device = td_alloc(td, sizeof(td_cuda_plan), "program");
        if (plan->on_device) memset(plan->on_device, 0, sizeof(td_cuda_plan));
    }
    td_cuda_plan *p = plan->on_device;
    if (!p || (p->inputs_epoch == epoch && p->arena_epoch == td->arena_epoch)) return p;
    drop_graphs(td, p);
    p->inputs_epoch = epoch;
    p->arena_epoch = td->arena_epoch;
    return p;
}

/* Operands that are inputs are those of this run's set. */
static void bind_inputs(td_context *td, td_planned *plan)
{
    const td_exchange_set *set = &td->cuda->exchange.set[current_set(td)];
    td->run.on_device = set->inputs;
    for (uint32_t i = plan->fixed_count; i < plan->binding_count; i++) {
        const td_binding *b = &plan->bindings[i];
        *b->pointer = (b->on_host ? set->pinned : set->inputs) + TD_GPU_ALIGN + plan->blocks[b->block].offset + b->offset;
    }
}

/* ---- Calls on the host */

/* Those of this run's set, made when it is first used. */
static bool ensure_host_calls(td_context *td, const td_planned *plan, td_cuda_plan *p)
{
    td_host_call **calls = &p->host_calls[current_set(td)];
    uint32_t args = 0, count = 0;
    if (!plan->host_tasks || *calls) return true;
    for (uint32_t t = 0; t < plan->task_count; t++)
        if (plan->tasks[t].on_host) args += (uint32_t)(plan->tasks[t].kernel.inputs + plan->tasks[t].kernel.outputs);
    p->host_call_bytes = plan->host_tasks * sizeof **calls + args * sizeof(td_arg);
    *calls = td_alloc(td, p->host_call_bytes, "program");
    if (!*calls) return false;
    td_arg *arg = (td_arg *)(*calls + plan->host_tasks);
    for (uint32_t t = 0; t < plan->task_count; t++) {
        const td_kernel *k = &plan->tasks[t].kernel;
        if (!plan->tasks[t].on_host) continue;
        td_host_call *call = &(*calls)[count++];
        *call = (td_host_call){ plan->tasks[t].run, *k };
        memcpy(arg, k->in, (size_t)(k->inputs + k->outputs) * sizeof *arg); /* outputs follow inputs */
        call->kernel.in = arg;
        call->kernel.out = arg + k->inputs;
        arg += k->inputs + k->outputs;
    }
    return true;
}

static void CUDART_CB run_host_call(void *user)
{
    const td_host_call *call = user;
    call->run(&call->kernel);
}

static void erase(void *user, void *memory, size_t bytes)
{
    td_context *td = user;
    td_cuda_ok(td, cudaMemsetAsync(memory, 0xFF, bytes, td->cuda->stream), "erasing dead memory");
}

void td_copy_cuda(const td_kernel *k) { td_copy_bytes_cuda(k->run->td, k->out[0].data, k->in[0].data, td_arg_bytes(&k->in[0]), td_stream(k)); }

void td_transfer_cuda(const td_kernel *k)
{
    if (!td_arg_bytes(&k->in[0])) return;
    td_cuda_ok(k->run->td, cudaMemcpyAsync(k->out[0].data, k->in[0].data, (size_t)td_arg_bytes(&k->in[0]), cudaMemcpyDefault, td_stream(k)),
               "copying between the device and its host");
}

/* ---- Calls */

/* Runs task number t on its queue, or hands over *host and takes the next. `events`: before and behind it, where it is timed; the latter may
 * be NULL. */
static bool call(td_context *td, td_planned *plan, const td_cuda_plan *p, uint32_t t, td_host_call **host, const cudaEvent_t *events, unsigned how)
{
    const td_task *task = &plan->tasks[t];
    cudaStream_t queue = td_queue_of(td, p, task);
    if (!td_queues_wait(td, p, task) || (events && !td_event_record(td, events[0], queue, how))) return false;
    td->run.queue = queue;
    if (task->on_host) td_cuda_ok(td, cudaLaunchHostFunc(queue, run_host_call, (*host)++), "handing a call to the host");
    else task->run(&task->kernel);
    td->run.queue = td->cuda->stream;
    if (td->error != TD_OK || (events && events[1] && !td_event_record(td, events[1], queue, how))) return false;
    return td_queues_done(td, plan, p, t) && td_queues_land(td, plan, p, t);
}

/* Hands over the calls; `events`, where there are any, are recorded around each. What was asked for is looked at between them: NaN,
 * erased memory. */
static bool call_all(td_context *td, td_planned *plan, td_cuda_plan *p, const cudaEvent_t *events, unsigned how)
{
    cudaStream_t stream = td->cuda->stream;
    bind_inputs(td, plan);
    if (!ensure_host_calls(td, plan, p)) return false;
    td_host_call *host = p->host_calls[current_set(td)];
    if (td->options.poison) td_plan_dying(td, plan, -1, erase, td);
    if (!td_queues_fork(td, plan, p)) return false;
    for (uint32_t t = 0; t < plan->task_count; t++) {
        if (!call(td, plan, p, t, &host, events ? events + 2 * t : NULL, how)) return false;
        if (td->options.eager) td_plan_check_nan(td, plan, &plan->tasks[t]);
        if (td->error != TD_OK) return false;
        if (td->options.poison) td_plan_dying(td, plan, (int32_t)t, erase, td);
    }
    td->device_counts.calls += plan->task_count;
    if (!td_queues_join(td, plan, p)) return false;
    if (events && !td_event_record(td, events[2 * plan->task_count], stream, how)) return false;
    return td_queues_lands(plan, p) || td_exchange_land(td, &td->cuda->exchange, stream, plan);
}

static bool capture(td_context *td, td_planned *plan, td_cuda_plan *p, const cudaEvent_t *events, cudaGraphExec_t *to)
{
    cudaStream_t stream = td->cuda->stream;
    cudaGraph_t graph = NULL;
    if (!td_cuda_ok(td, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a graph")) return false;
    bool called = call_all(td, plan, p, events, cudaEventRecordExternal);
    cudaError_t status = cudaStreamEndCapture(stream, &graph);
    if (!called) cudaGetLastError(); /* of what ends in the middle, no more is to be heard */
    if (called && td_cuda_ok(td, status, "ending a graph") && td_nodes_are_kernels(td, graph))
        td_cuda_ok(td, cudaGraphInstantiate(to, graph, 0), "making a graph");
    if (graph) cudaGraphDestroy(graph);
    td->device_counts.graphs += *to != NULL;
    return *to != NULL;
}

static bool run_plan(td_context *td, td_planned *plan, td_cuda_plan *p, const cudaEvent_t *events)
{
    p->beside = plan->beside && p->warm;
    if (td->options.poison || td->options.eager || !p->warm) {
        p->warm = call_all(td, plan, p, events, cudaEventRecordDefault);
        td_cublas_rest(td);
        return p->warm;
    }
    cudaGraphExec_t *graph = events ? &p->timed[current_set(td)] : &p->graph[current_set(td)];
    if (!*graph && !capture(td, plan, p, events, graph)) return false;
    td->device_counts.replays++;
    return td_cuda_ok(td, cudaGraphLaunch(*graph, td->cuda->stream), "launching a step");
}

/* ---- Under the profile
 *
 * Events lie between the calls, in the graph too, and are read when the step is done, which the host waits for. A call's time is from one
 * event to the next, the passing from call to call and the event itself included, two or three us; where the next call of its queue waits
 * for another queue, to an event of its own. The last event is taken to be when the host hears of it, a few us late. */

/* The next call of task t's queue; -1: there is none. */
static int32_t next_of(const td_planned *plan, uint32_t t)
{
    int queue = plan->beside ? plan->tasks[t].queue : -1;
    for (uint32_t i = t + 1; i < plan->task_count; i++)
        if (queue < 0 || plan->tasks[i].queue == queue) return (int32_t)i;
    return -1;
}

static bool waits(const td_planned *plan, int32_t t)
{
    bool any = false;
    for (int q = 0; q < TD_QUEUES && plan->beside; q++) any |= plan->tasks[t].waits[q] >= 0;
    return any;
}

/* Two for each task, before and behind it; the latter NULL where the next call of the queue begins at once. */
static bool ensure_events(td_context *td, const td_planned *plan, td_cuda_plan *p)
{
    if (p->events) return true;
    if (!td_events_get(td, &p->events, &p->event_count, 2 * plan->task_count + 1)) return false;
    bool made = td_event_make(td, &p->events[2 * plan->task_count], cudaEventDefault);
    for (uint32_t t = 0; t < plan->task_count && made; t++) {
        int32_t next = next_of(plan, t);
        bool own = next < 0 || plan->tasks[t].queue != TD_QUEUE_COMPUTE || waits(plan, next);
        made = td_event_make(td, &p->events[2 * t], cudaEventDefault) &&
               (!own || td_event_make(td, &p->events[2 * t + 1], cudaEventDefault));
    }
    if (!made) td_events_free(td, &p->events, &p->event_count);
    return made;
}

/* How long before the last event `event` was, in ns; below 0 and an error. */
static double ns_before_last(td_context *td, const td_cuda_plan *p, cudaEvent_t event)
{
    float ms = -1;
    td_cuda_ok(td, cudaEventElapsedTime(&ms, event, p->events[p->event_count - 1]), "reading an event");
    return 1e6 * (double)ms;
}

static bool run_profiled(td_context *td, td_planned *plan, td_cuda_plan *p)
{
    if (!td_profile_plan(td, plan) || !ensure_events(td, plan, p) || !run_plan(td, plan, p, p->events) || !td_cuda_wait(td)) return false;
    int64_t end_ns = td_profile_now();
    for (uint32_t t = 0; t < plan->task_count && td->error == TD_OK; t++) {
        cudaEvent_t end = p->events[2 * t + 1] ? p->events[2 * t + 1] : p->events[2 * next_of(plan, t)];
        td_profile_task_done(td, plan, t, end_ns - (int64_t)ns_before_last(td, p, p->events[2 * t]),
                             end_ns - (int64_t)ns_before_last(td, p, end));
    }
    td_profile_mark(td, "run");
    return td->error == TD_OK;
}

/* ---- The whole */

bool td_graph_run(td_context *td, td_planned *plan)
{
    td_exchange *x = &td->cuda->exchange;
    cudaStream_t stream = td->cuda->stream;
    if (!td_cuda_current(td) || !td_exchange_ensure(td, x, stream, plan->slot_bytes)) return false;
    td_cuda_plan *p = on_device(td, plan);
    if (!p || !td_queues_ensure(td, plan, p) || !td_exchange_send(td, x, stream, plan)) return false;
    bool ran = td->profiling ? run_profiled(td, plan, p) : run_plan(td, plan, p, NULL);
    return td_exchange_done(td, x, stream) && ran;
}

void td_graph_drop(td_context *td, td_planned *plan)
{
    td_cuda_plan *p = plan->on_device;
    if (!p) return;
    cudaStreamSynchronize(td->cuda->stream); /* it may still run */
    drop_graphs(td, p);
    td_events_free(td, &p->ended, &p->ended_count);
    td_events_free(td, &p->events, &p->event_count);
    td_free(td, p, sizeof *p, "program");
    plan->on_device = NULL;
}

