/* An NVIDIA GPU as a device: memory, queues, and a plan as a CUDA graph.
 *
 * A plan's first run hands its calls over one by one, so that libraries load what they need; the second captures them in a graph, and
 * later ones launch it: a graph for each set of inputs that steps use in turn (device_exchange.h). The host waits for nothing until a value
 * is read.
 *
 * Computation's queue is a run's first and last: the others begin behind it and it ends behind them. In between they wait for one another
 * where the plan says so (queues.c).
 */
#include "core/device_cuda.h"
#include "core/device_cudnn.h"
#include "core/device_exchange.h"
#include "core/device_nvrtc.h"
#include "core/device_pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct td_cuda {
    int device;
    cudaStream_t stream;                      /* computation's */
    cudaStream_t beside[TD_QUEUES];           /* the other queues; NULL: no plan has needed it */
    td_exchange exchange;
    struct td_cublas *cublas;
    struct td_pools *pools;
};

/* What is kept with a plan. */
typedef struct cuda_plan {
    uint64_t inputs_epoch, arena_epoch;       /* that its graphs were made for */
    bool warm;                                /* has run since */
    cudaGraphExec_t graph[TD_INPUT_SETS];
    cudaGraphExec_t timed[TD_INPUT_SETS];     /* the same, with events between the calls */
    cudaEvent_t *ended;                       /* behind each call that another queue waits for, NULL for others; last, the run's beginning */
    cudaEvent_t *events;                      /* before and behind each call (events_of), and behind the last; NULL: never profiled */
    uint32_t ended_count, event_count;
} cuda_plan;

/* ---- Errors */

bool td_cuda_ok(td_context *td, cudaError_t status, const char *what)
{
    if (status == cudaSuccess) return true;
    cudaGetLastError(); /* the next one is asked about afresh */
    td_fail(td, status == cudaErrorMemoryAllocation ? TD_ERROR_MEMORY : TD_ERROR_DEVICE, "CUDA: %s: %s", what, cudaGetErrorString(status));
    return false;
}

void td_cuda_launched(const td_kernel *k)
{
    cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) td_fail(k->run->td, TD_ERROR_DEVICE, "%s: CUDA did not take its kernel: %s", k->op->name, cudaGetErrorString(status));
}

struct td_cublas **td_cublas_of(td_context *td) { return &td->cuda->cublas; }
struct td_pools **td_pools_of(td_context *td) { return &td->cuda->pools; }

static bool is_current(td_context *td) { return td_cuda_ok(td, cudaSetDevice(td->cuda->device), "choosing the GPU"); }

static bool wait(td_context *td)
{
    td->device_counts.waits++;
    return td_cuda_ok(td, cudaStreamSynchronize(td->cuda->stream), "running the step");
}

/* ---- Memory */

static void *cuda_get(td_context *td, int64_t bytes, const char *kind) { return is_current(td) ? td_cuda_get(td, bytes, kind) : NULL; }

/* A step that still runs may use it. */
static void cuda_put(td_context *td, void *memory, int64_t bytes, const char *kind)
{
    if (!memory) return;
    cudaSetDevice(td->cuda->device);
    cudaStreamSynchronize(td->cuda->stream);
    td_cuda_put(td, memory, bytes, kind);
}

static bool copy(td_context *td, void *to, const void *from, int64_t bytes, enum cudaMemcpyKind kind)
{
    if (!bytes) return true;
    return is_current(td) && td_cuda_ok(td, cudaMemcpyAsync(to, from, (size_t)bytes, kind, td->cuda->stream), "copying") && wait(td);
}

static bool cuda_write(td_context *td, void *to, const void *from, int64_t bytes) { return copy(td, to, from, bytes, cudaMemcpyHostToDevice); }
static bool cuda_read(td_context *td, void *to, const void *from, int64_t bytes) { return copy(td, to, from, bytes, cudaMemcpyDeviceToHost); }

static bool cuda_clear(td_context *td, void *memory, int64_t bytes)
{
    return is_current(td) && td_cuda_ok(td, cudaMemsetAsync(memory, 0, (size_t)bytes, td->cuda->stream), "clearing memory");
}

static bool cuda_initialise(td_context *td, const td_initial *of) { return is_current(td) && td_initial_cuda(td, of, td->cuda->stream); }

/* ---- Running */

static int current_set(const td_context *td) { return (int)(td->runs % TD_INPUT_SETS); }

static void drop_graphs(cuda_plan *p)
{
    for (int s = 0; s < TD_INPUT_SETS; s++) {
        if (p->graph[s]) cudaGraphExecDestroy(p->graph[s]);
        if (p->timed[s]) cudaGraphExecDestroy(p->timed[s]);
        p->graph[s] = p->timed[s] = NULL;
    }
    p->warm = false;
}

/* What the plan has here; graphs made for other places are gone. */
static cuda_plan *on_device(td_context *td, td_planned *plan)
{
    uint64_t epoch = td->cuda->exchange.epoch;
    if (!plan->on_device) {
        plan->on_device = td_alloc(td, sizeof(cuda_plan), "program");
        if (plan->on_device) memset(plan->on_device, 0, sizeof(cuda_plan));
    }
    cuda_plan *p = plan->on_device;
    if (!p || (p->inputs_epoch == epoch && p->arena_epoch == td->arena_epoch)) return p;
    drop_graphs(p);
    p->inputs_epoch = epoch;
    p->arena_epoch = td->arena_epoch;
    return p;
}

/* Operands that are inputs are those of this run's set. */
static void bind_inputs(td_context *td, td_planned *plan)
{
    char *inputs = td->cuda->exchange.set[current_set(td)].inputs;
    td->run.on_device = inputs;
    for (uint32_t i = plan->fixed_count; i < plan->binding_count; i++) {
        const td_binding *b = &plan->bindings[i];
        *b->pointer = inputs + TD_GPU_ALIGN + plan->blocks[b->block].offset + b->offset;
    }
}

static void erase(void *user, void *memory, size_t bytes)
{
    td_context *td = user;
    td_cuda_ok(td, cudaMemsetAsync(memory, 0xFF, bytes, td->cuda->stream), "erasing dead memory");
}

void td_copy_cuda(const td_kernel *k)
{
    if (k->out[0].data == k->in[0].data || !td_arg_bytes(&k->in[0])) return;
    td_cuda_ok(k->run->td, cudaMemcpyAsync(k->out[0].data, k->in[0].data, (size_t)td_arg_bytes(&k->in[0]), cudaMemcpyDeviceToDevice, td_stream(k)),
               "copying a value");
}

/* ---- Queues */

static cudaStream_t queue_of(td_context *td, const td_planned *plan, const td_task *task)
{
    return plan->beside && task->queue != TD_QUEUE_COMPUTE ? td->cuda->beside[task->queue] : td->cuda->stream;
}

/* The last call of a queue; -1: the plan has none there. */
static int32_t last_of(const td_planned *plan, int queue)
{
    int32_t t = (int32_t)plan->task_count - 1;
    while (t >= 0 && plan->tasks[t].queue != queue) t--;
    return t;
}

static void free_events(td_context *td, cudaEvent_t **events, uint32_t *count)
{
    for (uint32_t e = 0; e < *count; e++)
        if ((*events)[e]) cudaEventDestroy((*events)[e]);
    td_free(td, *events, *count * sizeof **events, "host");
    *events = NULL;
    *count = 0;
}

static bool get_events(td_context *td, cudaEvent_t **events, uint32_t *count, uint32_t wanted)
{
    *events = td_alloc(td, wanted * sizeof **events, "host");
    if (!*events) return false;
    memset(*events, 0, wanted * sizeof **events);
    *count = wanted;
    return true;
}

static bool make_event(td_context *td, cudaEvent_t *event, unsigned flags)
{
    return *event || td_cuda_ok(td, cudaEventCreateWithFlags(event, flags), "making an event");
}

/* What goes first where it waits for nothing: all others wait for it. */
static bool open_queue(td_context *td, cudaStream_t *queue)
{
    int least, most;
    return *queue || (td_cuda_ok(td, cudaDeviceGetStreamPriorityRange(&least, &most), "asking the GPU") &&
                      td_cuda_ok(td, cudaStreamCreateWithPriority(queue, cudaStreamNonBlocking, most), "making a queue"));
}

/* Queues and events that the plan needs. */
static bool ensure_queues(td_context *td, const td_planned *plan, cuda_plan *p)
{
    if (!plan->beside || p->ended) return true;
    if (!get_events(td, &p->ended, &p->ended_count, plan->task_count + 1)) return false;
    bool made = make_event(td, &p->ended[plan->task_count], cudaEventDisableTiming);
    for (uint32_t t = 0; t < plan->task_count && made; t++)
        for (int q = 0; q < TD_QUEUES && made; q++)
            if (plan->tasks[t].waits[q] >= 0) made = make_event(td, &p->ended[plan->tasks[t].waits[q]], cudaEventDisableTiming);
    for (int q = TD_QUEUE_COMPUTE + 1; q < TD_QUEUES && made; q++) {
        int32_t last = last_of(plan, q);
        if (last >= 0) made = open_queue(td, &td->cuda->beside[q]) && make_event(td, &p->ended[last], cudaEventDisableTiming);
    }
    if (!made) free_events(td, &p->ended, &p->ended_count);
    return made;
}

static bool follow(td_context *td, cudaStream_t queue, cudaEvent_t event)
{
    return td_cuda_ok(td, cudaStreamWaitEvent(queue, event, 0), "waiting for another queue");
}

static bool fork(td_context *td, const td_planned *plan, const cuda_plan *p)
{
    if (!plan->beside) return true;
    bool ok = td_cuda_ok(td, cudaEventRecord(p->ended[plan->task_count], td->cuda->stream), "recording an event");
    for (int q = TD_QUEUE_COMPUTE + 1; q < TD_QUEUES && ok; q++)
        if (last_of(plan, q) >= 0) ok = follow(td, td->cuda->beside[q], p->ended[plan->task_count]);
    return ok;
}

static bool join(td_context *td, const td_planned *plan, const cuda_plan *p)
{
    bool ok = true;
    for (int q = TD_QUEUE_COMPUTE + 1; q < TD_QUEUES && plan->beside && ok; q++)
        if (last_of(plan, q) >= 0) ok = follow(td, td->cuda->stream, p->ended[last_of(plan, q)]);
    return ok;
}

static bool wait_for_queues(td_context *td, const td_planned *plan, const cuda_plan *p, const td_task *task)
{
    bool ok = true;
    for (int q = 0; q < TD_QUEUES && plan->beside && ok; q++)
        if (task->waits[q] >= 0) ok = follow(td, queue_of(td, plan, task), p->ended[task->waits[q]]);
    return ok;
}

/* Runs task number t on its queue. `events`: before and behind it, where it is timed, each NULL for none. */
static bool call(td_context *td, td_planned *plan, const cuda_plan *p, uint32_t t, const cudaEvent_t *events, unsigned how)
{
    const td_task *task = &plan->tasks[t];
    cudaStream_t queue = queue_of(td, plan, task);
    td->run.queue = queue;
    bool ok = wait_for_queues(td, plan, p, task) &&
              (!events || td_cuda_ok(td, cudaEventRecordWithFlags(events[0], queue, how), "recording an event"));
    if (ok) task->run(&task->kernel);
    td->run.queue = td->cuda->stream;
    return ok && td->error == TD_OK && (!events || !events[1] || td_cuda_ok(td, cudaEventRecordWithFlags(events[1], queue, how), "recording an event")) &&
           (!plan->beside || !p->ended[t] || td_cuda_ok(td, cudaEventRecord(p->ended[t], queue), "recording an event"));
}

/* Hands over the calls; `events`, where there are any, are recorded around each. What was asked for is looked at between them: NaN,
 * erased memory. */
static bool call_all(td_context *td, td_planned *plan, const cuda_plan *p, const cudaEvent_t *events, unsigned how)
{
    cudaStream_t stream = td->cuda->stream;
    bind_inputs(td, plan);
    if (td->options.poison) td_plan_dying(td, plan, -1, erase, td);
    if (!fork(td, plan, p)) return false;
    for (uint32_t t = 0; t < plan->task_count; t++) {
        if (!call(td, plan, p, t, events ? events + 2 * t : NULL, how)) return false;
        if (td->options.eager) td_plan_check_nan(td, plan, &plan->tasks[t]);
        if (td->error != TD_OK) return false;
        if (td->options.poison) td_plan_dying(td, plan, (int32_t)t, erase, td);
    }
    td->device_counts.calls += plan->task_count;
    if (!join(td, plan, p)) return false;
    if (events && !td_cuda_ok(td, cudaEventRecordWithFlags(events[2 * plan->task_count], stream, how), "recording an event")) return false;
    return td_exchange_land(td, &td->cuda->exchange, stream, plan);
}

static bool capture(td_context *td, td_planned *plan, const cuda_plan *p, const cudaEvent_t *events, cudaGraphExec_t *to)
{
    cudaStream_t stream = td->cuda->stream;
    cudaGraph_t graph = NULL;
    if (!td_cuda_ok(td, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a graph")) return false;
    bool called = call_all(td, plan, p, events, cudaEventRecordExternal);
    cudaError_t status = cudaStreamEndCapture(stream, &graph);
    if (called && td_cuda_ok(td, status, "ending a graph")) td_cuda_ok(td, cudaGraphInstantiate(to, graph, 0), "making a graph");
    if (graph) cudaGraphDestroy(graph);
    td->device_counts.graphs += *to != NULL;
    return *to != NULL;
}

static bool run_plan(td_context *td, td_planned *plan, cuda_plan *p, const cudaEvent_t *events)
{
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
static bool ensure_events(td_context *td, const td_planned *plan, cuda_plan *p)
{
    if (p->events) return true;
    if (!get_events(td, &p->events, &p->event_count, 2 * plan->task_count + 1)) return false;
    bool made = make_event(td, &p->events[2 * plan->task_count], cudaEventDefault);
    for (uint32_t t = 0; t < plan->task_count && made; t++) {
        int32_t next = next_of(plan, t);
        bool own = next < 0 || plan->tasks[t].queue != TD_QUEUE_COMPUTE || waits(plan, next);
        made = make_event(td, &p->events[2 * t], cudaEventDefault) && (!own || make_event(td, &p->events[2 * t + 1], cudaEventDefault));
    }
    if (!made) free_events(td, &p->events, &p->event_count);
    return made;
}

/* How long before the last event `event` was, in ns; below 0 and an error. */
static double ns_before_last(td_context *td, const cuda_plan *p, cudaEvent_t event)
{
    float ms = -1;
    td_cuda_ok(td, cudaEventElapsedTime(&ms, event, p->events[p->event_count - 1]), "reading an event");
    return 1e6 * (double)ms;
}

static bool run_profiled(td_context *td, td_planned *plan, cuda_plan *p)
{
    if (!td_profile_plan(td, plan) || !ensure_events(td, plan, p) || !run_plan(td, plan, p, p->events) || !wait(td)) return false;
    int64_t end_ns = td_profile_now();
    for (uint32_t t = 0; t < plan->task_count && td->error == TD_OK; t++) {
        cudaEvent_t end = p->events[2 * t + 1] ? p->events[2 * t + 1] : p->events[2 * next_of(plan, t)];
        td_profile_task_done(td, plan, t, end_ns - (int64_t)ns_before_last(td, p, p->events[2 * t]), end_ns - (int64_t)ns_before_last(td, p, end));
    }
    td_profile_mark(td, "run");
    return td->error == TD_OK;
}

static bool cuda_run(td_context *td, td_planned *plan)
{
    td_exchange *x = &td->cuda->exchange;
    cudaStream_t stream = td->cuda->stream;
    if (!is_current(td) || !td_exchange_ensure(td, x, stream, plan->slot_bytes)) return false;
    cuda_plan *p = on_device(td, plan);
    if (!p || !ensure_queues(td, plan, p) || !td_exchange_send(td, x, stream, plan)) return false;
    bool ran = td->profiling ? run_profiled(td, plan, p) : run_plan(td, plan, p, NULL);
    return td_exchange_done(td, x, stream) && ran;
}

static const uint64_t *cuda_landed(td_context *td, int set)
{
    return is_current(td) ? td_exchange_landed(td, &td->cuda->exchange, set) : NULL;
}

static void cuda_drop(td_context *td, td_planned *plan)
{
    cuda_plan *p = plan->on_device;
    if (!p) return;
    cudaStreamSynchronize(td->cuda->stream); /* it may still run */
    drop_graphs(p);
    free_events(td, &p->ended, &p->ended_count);
    free_events(td, &p->events, &p->event_count);
    td_free(td, p, sizeof *p, "program");
    plan->on_device = NULL;
}

/* ---- What it can do at best */

enum { COPIES = 8 };

static bool time_copies(td_context *td, void *to, const void *from, int64_t bytes, cudaEvent_t begin, cudaEvent_t end, double *best)
{
    cudaStream_t stream = td->cuda->stream;
    for (int i = 0; i < COPIES; i++) {
        float ms = 0;
        if (!td_cuda_ok(td, cudaEventRecord(begin, stream), "recording an event") ||
            !td_cuda_ok(td, cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToDevice, stream), "copying") ||
            !td_cuda_ok(td, cudaEventRecord(end, stream), "recording an event") || !wait(td) ||
            !td_cuda_ok(td, cudaEventElapsedTime(&ms, begin, end), "reading an event"))
            return false;
        double rate = ms > 0 ? 2e3 * (double)bytes / (double)ms : 0;
        if (rate > *best) *best = rate;
    }
    return true;
}

/* The fastest of a few copies from one half of a buffer to the other, each half eight times the cache. */
static bool cuda_measure(td_context *td, td_machine *out)
{
    int64_t half = 8 * td->gpu.l2_bytes;
    cudaEvent_t begin = NULL, end = NULL;
    snprintf(out->name, sizeof out->name, "%s", td->gpu.name);
    out->buffer_bytes = 2 * half;
    char *memory = cuda_get(td, 2 * half, "measuring");
    bool measured = memory && td_cuda_ok(td, cudaMemsetAsync(memory, 1, (size_t)(2 * half), td->cuda->stream), "clearing") &&
                    td_cuda_ok(td, cudaEventCreate(&begin), "making an event") && td_cuda_ok(td, cudaEventCreate(&end), "making an event") &&
                    time_copies(td, memory, memory + half, half, begin, end, &out->bytes);
    if (begin) cudaEventDestroy(begin);
    if (end) cudaEventDestroy(end);
    cuda_put(td, memory, 2 * half, "measuring");
    return measured;
}

/* ---- Opening and closing */

static void cuda_close(td_context *td)
{
    struct td_cuda *cuda = td->cuda;
    if (!cuda) return;
    cudaSetDevice(cuda->device);
    if (cuda->stream) cudaStreamSynchronize(cuda->stream);
    td_cublas_close(td);
    td_cudnn_close(td);
    td_nvrtc_close(td);
    td_exchange_close(td, &cuda->exchange);
    td_pools_close(td);
    for (int q = 0; q < TD_QUEUES; q++)
        if (cuda->beside[q]) cudaStreamDestroy(cuda->beside[q]);
    if (cuda->stream) cudaStreamDestroy(cuda->stream);
    td->cuda = NULL;
    td_free(td, cuda, sizeof *cuda, "host");
}

static const td_device gpu = {
    .is_gpu = true, .get = cuda_get, .put = cuda_put, .write = cuda_write, .read = cuda_read, .clear = cuda_clear,
    .initialise = cuda_initialise, .run = cuda_run, .landed = cuda_landed, .drop = cuda_drop, .measure = cuda_measure, .close = cuda_close,
};

/* "cuda:2" -> 2; "cuda" -> 0; -1: neither. */
static int device_number(const char *name)
{
    if (!name[4]) return 0;
    char *end;
    long number = strtol(name + 5, &end, 10);
    return name[5] < '0' || name[5] > '9' || *end || number > 1023 ? -1 : (int)number;
}

static bool find_device(td_context *td, int *device)
{
    const char *name = td->options.device;
    int count = 0;
    *device = device_number(name);
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice || (status == cudaSuccess && !count))
        td_fail(td, TD_ERROR_DEVICE, "td_open: device '%s' cannot be had: %s", name,
                status == cudaErrorInsufficientDriver ? "there is no driver, or one older than this build's CUDA 13 needs (580)"
                                                      : "the machine shows no NVIDIA GPU (CUDA_VISIBLE_DEVICES may hide it)");
    else if (td_cuda_ok(td, status, "counting GPUs") && (*device < 0 || *device >= count))
        td_fail(td, TD_ERROR_USAGE, "td_open: device '%s' is not one of the machine's, cuda:0 to cuda:%d", name, count - 1);
    return td->error == TD_OK;
}

static bool find_limits(td_context *td, td_gpu *to)
{
    struct cudaDeviceProp properties;
    if (!td_cuda_ok(td, cudaGetDeviceProperties(&properties, td->cuda->device), "asking the GPU")) return false;
    *to = (td_gpu){ .multiprocessors = properties.multiProcessorCount, .l2_bytes = properties.l2CacheSize, .major = properties.major,
                    .minor = properties.minor };
    snprintf(to->name, sizeof to->name, "%.63s", properties.name);
    return true;
}

/* What plans may have where the options do not say: what is free now, less what the library's own code and handles will take. */
static bool find_memory(td_context *td)
{
    size_t free, total;
    int64_t least = 256 << 20, most = 1 << 30;
    if (td->options.memory_bytes) return true;
    if (!td_cuda_ok(td, cudaMemGetInfo(&free, &total), "asking the GPU for its memory")) return false;
    int64_t margin = (int64_t)free / 32;
    if (margin < least) margin = least;
    if (margin > most) margin = most;
    td->options.memory_bytes = (int64_t)free > margin ? (int64_t)free - margin : 1;
    return true;
}

const td_device *td_cuda_open(td_context *td)
{
    int device;
    if (!find_device(td, &device)) return NULL;
    struct td_cuda *cuda = td_alloc(td, sizeof *cuda, "host");
    if (!cuda) return NULL;
    *cuda = (struct td_cuda){ .device = device };
    td->cuda = cuda;
    if (is_current(td) && td_cuda_ok(td, cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking), "making a queue") &&
        find_limits(td, &td->gpu) && td_pools_open(td, device) && td_exchange_open(td, &cuda->exchange) && find_memory(td)) {
        td->run.queue = cuda->stream;
        return &gpu;
    }
    cuda_close(td);
    return NULL;
}
