/* CUDA's runtime on the host: streams do at once what they are given, or late (late.h). A graph keeps what its streams were given, and what
 * each piece of it waits for: it runs in any order that allows, as a test wants it. */
#include <cuda_runtime_api.h>
#include <on_host.h>
#include <stdlib.h>
#include <string.h>

#include "late.h"

enum { STREAMS = 8 };                          /* that a graph may hold */

/* Work of a graph: stream number `stream`'s, when the others have done so much of theirs. */
typedef struct node {
    on_host_work *work;
    int stream;
    int64_t after[STREAMS];
} node;

struct on_host_graph {
    uint64_t capture;                         /* a number that no other has */
    node *nodes;
    int64_t count, room;
    int streams;                              /* number 0 began the capture */
    int64_t put[STREAMS];                     /* work of each */
    int64_t launches;                         /* that are late */
    bool destroyed;                           /* is freed behind the last of them */
};
struct on_host_stream {
    uint64_t capture;                         /* that it is or was part of, its number there, and what of others it waits for */
    int number;
    int64_t after[STREAMS];
    bool late;
    int64_t place;                            /* in line, up to which it and what it waits for have to come */
};
struct on_host_event {
    uint64_t capture;                         /* 0: none */
    int64_t after[STREAMS];
    int64_t place;                            /* of the stream, where it was recorded outside of captures */
};

static cudaError_t last_error;
static struct on_host_graph *captured;        /* NULL: none is */
static uint64_t captures;                     /* begun */

static cudaError_t noted(cudaError_t status)
{
    if (status != cudaSuccess) last_error = status;
    return status;
}

const char *cudaGetErrorString(cudaError_t status)
{
    switch (status) {
    case cudaErrorLaunchFailure:
    case cudaErrorInvalidConfiguration: return on_host_reason();
    case cudaErrorMemoryAllocation:     return "out of memory";
    default:                            return "an invalid value";
    }
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t status = last_error;
    last_error = cudaSuccess;
    return status;
}

/* ---- The device */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidValue : cudaSuccess; }

/* Few multiprocessors, so that launches which fill them are small. */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *to, int device)
{
    *to = (struct cudaDeviceProp){ .name = "the host, as a GPU", .multiProcessorCount = 2, .l2CacheSize = 1 << 20, .major = 9,
                                    .uuid = "one" };
    return cudaSetDevice(device);
}

/* It is on none. */
cudaError_t cudaDeviceGetPCIBusId(char *to, int room, int device)
{
    (void)to, (void)room, (void)device;
    return noted(cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total)
{
    *free = *total = (size_t)4 << 30;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    return kernel && attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value >= 0 ? cudaSuccess : noted(cudaErrorInvalidValue);
}

/* Of what is compiled while programs run; here nothing is. */
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
    (void)kernel, (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
    return noted(cudaErrorInvalidValue);
}

/* ---- Memory */

cudaError_t cudaHostAlloc(void **to, size_t bytes, unsigned flags)
{
    (void)flags;
    *to = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *to ? cudaSuccess : noted(cudaErrorMemoryAllocation);
}

/* Waits for all that runs. */
cudaError_t cudaFreeHost(void *memory)
{
    cudaError_t status = late_run(late_end());
    free(memory);
    return noted(status);
}

cudaError_t cudaMalloc(void **to, size_t bytes) { return cudaHostAlloc(to, bytes, cudaHostAllocDefault); }
cudaError_t cudaFree(void *memory) { return cudaFreeHost(memory); }

cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    cudaError_t status = late_run(late_end());
    memset(to, value, bytes);
    return noted(status);
}

/* ---- Streams */

/* Whether the stream is part of the capture: it began it, or has waited for one that is. */
static bool is_captured(const struct on_host_stream *stream) { return captured && stream->capture == captured->capture; }

static bool keep(struct on_host_stream *stream, on_host_work *work)
{
    struct on_host_graph *g = captured;
    if (g->count == g->room) {
        int64_t room = 2 * g->room + 64;
        node *nodes = realloc(g->nodes, (size_t)room * sizeof *nodes);
        if (!nodes) return false;
        g->nodes = nodes;
        g->room = room;
    }
    node *n = &g->nodes[g->count++];
    *n = (node){ .work = work, .stream = stream->number };
    memcpy(n->after, stream->after, sizeof n->after);
    stream->after[stream->number] = ++g->put[stream->number];
    return true;
}

/* false: no memory. */
static bool put_late(struct on_host_stream *stream, on_host_work *work)
{
    int64_t place = late_put(work);
    if (place) stream->place = place;
    return place;
}

/* Behind what the stream waits for, which other streams may have late. */
static cudaError_t run_now(const struct on_host_stream *stream, on_host_work *work)
{
    cudaError_t before = stream ? late_run(stream->place) : cudaSuccess, own = work->run(work);
    return before == cudaSuccess ? own : before;
}

static cudaError_t put_on(struct on_host_stream *stream, on_host_work *work)
{
    cudaError_t status;
    if (captured) {
        if (is_captured(stream) && keep(stream, work)) return cudaSuccess;
        status = cudaErrorInvalidValue; /* a graph that it does not belong to is being made */
    } else if (stream && stream->late) {
        if (put_late(stream, work)) return cudaSuccess;
        status = cudaErrorMemoryAllocation;
    } else {
        status = run_now(stream, work);
    }
    work->drop(work);
    return noted(status);
}

void on_host_put(cudaStream_t stream, on_host_work *work) { put_on(stream, work); }

typedef struct moving {
    on_host_work work;
    void *to;
    const void *from;                         /* NULL: `value` */
    size_t bytes;                             /* of a row */
    size_t rows, to_row, from_row;            /* how many, and from one to the next */
    int value;
} moving;

static cudaError_t move(on_host_work *work)
{
    moving *m = (moving *)work;
    for (size_t r = 0; r < m->rows; r++)
        if (m->from) memcpy((char *)m->to + r * m->to_row, (const char *)m->from + r * m->from_row, m->bytes);
        else memset((char *)m->to + r * m->to_row, m->value, m->bytes);
    return cudaSuccess;
}

static void drop_moving(on_host_work *work) { free(work); }

static cudaError_t put_moving(cudaStream_t stream, moving what)
{
    moving *m = malloc(sizeof *m);
    if (!m) return noted(cudaErrorMemoryAllocation);
    *m = what;
    m->work = (on_host_work){ .run = move, .drop = drop_moving };
    return put_on(stream, &m->work);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    (void)kind;
    return from ? put_moving(stream, (moving){ .to = to, .from = from, .bytes = bytes, .rows = 1 }) : noted(cudaErrorInvalidValue);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_row, const void *from, size_t from_row, size_t bytes, size_t rows, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    (void)kind;
    if (!from || bytes > to_row || bytes > from_row) return noted(cudaErrorInvalidValue);
    return put_moving(stream, (moving){ .to = to, .from = from, .bytes = bytes, .rows = rows, .to_row = to_row, .from_row = from_row });
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    return put_moving(stream, (moving){ .to = to, .value = value, .bytes = bytes, .rows = 1 });
}

typedef struct calling {
    on_host_work work;
    cudaHostFn_t function;
    void *user;
} calling;

static cudaError_t call(on_host_work *work)
{
    calling *c = (calling *)work;
    c->function(c->user);
    return cudaSuccess;
}

static void drop_calling(on_host_work *work) { free(work); }

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *user)
{
    calling *c = malloc(sizeof *c);
    if (!c) return noted(cudaErrorMemoryAllocation);
    *c = (calling){ .work = { .run = call, .drop = drop_calling }, .function = function, .user = user };
    return put_on(stream, &c->work);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most)
{
    *least = *most = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *to, unsigned flags, int priority)
{
    (void)priority;
    return cudaStreamCreateWithFlags(to, flags);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *to, unsigned flags)
{
    (void)flags;
    *to = calloc(1, sizeof **to);
    if (!*to) return noted(cudaErrorMemoryAllocation);
    (*to)->late = late_is_asked_for();
    return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device)
{
    *device = 0;
    return stream ? cudaSuccess : noted(cudaErrorInvalidValue);
}

/* What it was given runs all the same. */
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    free(stream);
    return cudaSuccess;
}

/* No graph may wait. NULL: the stream of cudaMemset, which waits for all. */
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return noted(captured ? cudaErrorInvalidValue : late_run(stream ? stream->place : late_end())); }

/* Belongs to the capture from now on; nothing was put on it there. */
static void join(struct on_host_stream *stream, int number)
{
    stream->capture = captured->capture;
    stream->number = number;
    memset(stream->after, 0, sizeof stream->after);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    (void)flags;
    if (!captured || event->capture != captured->capture) { /* it has passed, or will in line */
        if (event->place > stream->place) stream->place = event->place;
        return cudaSuccess;
    }
    if (!is_captured(stream)) {
        if (captured->streams == STREAMS) return noted(cudaErrorInvalidValue);
        join(stream, captured->streams++);
    }
    for (int i = 0; i < STREAMS; i++)
        if (event->after[i] > stream->after[i]) stream->after[i] = event->after[i];
    return cudaSuccess;
}

/* ---- Events: what is not late is done when they are recorded */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *to, unsigned flags)
{
    (void)flags;
    *to = calloc(1, sizeof **to);
    return *to ? cudaSuccess : noted(cudaErrorMemoryAllocation);
}

cudaError_t cudaEventCreate(cudaEvent_t *to) { return cudaEventCreateWithFlags(to, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    (void)flags;
    event->capture = is_captured(stream) ? captured->capture : 0;
    if (!event->capture) event->place = stream->place;
    memcpy(event->after, stream->after, sizeof event->after);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

/* Who asks again and again comes to an end: each time runs a piece of what is late. */
static cudaError_t query(int64_t place)
{
    if (late_has_run(place)) return cudaSuccess;
    cudaError_t status = late_run_one(place);
    return noted(status == cudaSuccess ? cudaErrorNotReady : status);
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return event ? query(event->place) : noted(cudaErrorInvalidValue); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return stream && !captured ? query(stream->place) : noted(cudaErrorInvalidValue); }

cudaError_t cudaEventSynchronize(cudaEvent_t event) { return noted(event ? late_run(event->place) : cudaErrorInvalidValue); }

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    *ms = 0;
    return noted(late_has_run(begin->place) && late_has_run(end->place) ? cudaSuccess : cudaErrorNotReady);
}

/* ---- Graphs. An instance is the graph itself. */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    (void)mode;
    captured = calloc(1, sizeof *captured);
    if (!captured) return noted(cudaErrorMemoryAllocation);
    captured->capture = ++captures;
    captured->streams = 1;
    join(stream, 0);
    return cudaSuccess;
}

/* The stream that began it must have waited for all that others were given. */
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *to)
{
    struct on_host_graph *g = captured;
    bool joined = g && stream->capture == g->capture && stream->number == 0;
    for (int i = 1; i < STREAMS && joined; i++) joined = stream->after[i] == g->put[i];
    captured = NULL;
    *to = g;
    return joined ? cudaSuccess : noted(cudaErrorInvalidValue);
}

static void free_graph(struct on_host_graph *graph)
{
    for (int64_t i = 0; i < graph->count; i++) graph->nodes[i].work->drop(graph->nodes[i].work);
    free(graph->nodes);
    free(graph);
}

/* The graph is left empty. */
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *to, cudaGraph_t graph, unsigned long long flags)
{
    (void)flags;
    *to = calloc(1, sizeof **to);
    if (!*to) return noted(cudaErrorMemoryAllocation);
    **to = *graph;
    *graph = (struct on_host_graph){ 0 };
    return cudaSuccess;
}

/* Graphs are what was captured. */
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *to, cudaGraph_t graph, const cudaGraphNode_t *after, size_t count, const cudaKernelNodeParams *launch)
{
    (void)to, (void)graph, (void)after, (void)count, (void)launch;
    return noted(cudaErrorInvalidValue);
}

/* What was launched of it runs all the same. */
cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    graph->destroyed = true;
    if (!graph->launches) free_graph(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaGraphDestroy(graph); }

static bool may_run(const node *n, const int64_t done[STREAMS])
{
    bool may = true;
    for (int i = 0; i < STREAMS; i++) may &= done[i] >= n->after[i];
    return may;
}

/* Where what waits for what leaves a choice: as it was captured; the stream that began the capture as far as it comes, others when it waits
 * for them; or others before it. */
typedef enum order { AS_CAPTURED, BEGINNER_FIRST, BEGINNER_LAST } order;

static order wanted_order(void)
{
    const char *name = getenv("ON_HOST_GRAPHS");
    return name && !strcmp(name, "beginner-first") ? BEGINNER_FIRST : name && !strcmp(name, "beginner-last") ? BEGINNER_LAST : AS_CAPTURED;
}

/* The node that is next in the order wanted, of those that wait for nothing any more; -1: there is none. */
static int64_t next_node(const struct on_host_graph *g, order wanted, const char *ran, const int64_t done[STREAMS])
{
    int64_t next = -1;
    for (int64_t i = 0; i < g->count; i++) {
        if (ran[i] || !may_run(&g->nodes[i], done)) continue;
        bool better = next < 0 || (wanted == BEGINNER_FIRST && g->nodes[i].stream < g->nodes[next].stream) ||
                      (wanted == BEGINNER_LAST && g->nodes[i].stream > g->nodes[next].stream);
        if (better) next = i;
        if (wanted == AS_CAPTURED && next >= 0) break;
    }
    return next;
}

static cudaError_t run_graph(const struct on_host_graph *graph)
{
    int64_t done[STREAMS] = { 0 };
    char *ran = calloc((size_t)graph->count + 1, 1);
    cudaError_t status = ran ? cudaSuccess : cudaErrorMemoryAllocation;
    order wanted = wanted_order();
    for (int64_t i = 0; i < graph->count && status == cudaSuccess; i++) {
        int64_t next = next_node(graph, wanted, ran, done);
        if (next < 0) status = cudaErrorInvalidValue;
        else status = graph->nodes[next].work->run(graph->nodes[next].work);
        if (next >= 0) ran[next] = 1, done[graph->nodes[next].stream]++;
    }
    free(ran);
    return status;
}

typedef struct launching {
    on_host_work work;
    struct on_host_graph *graph;
} launching;

static cudaError_t launch(on_host_work *work) { return run_graph(((launching *)work)->graph); }

static void drop_launching(on_host_work *work)
{
    struct on_host_graph *graph = ((launching *)work)->graph;
    graph->launches--;
    if (graph->destroyed) cudaGraphDestroy(graph);
    free(work);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream)
{
    launching *l = malloc(sizeof *l);
    if (!l) return noted(cudaErrorMemoryAllocation);
    *l = (launching){ .work = { .run = launch, .drop = drop_launching }, .graph = graph };
    graph->launches++;
    return put_on(stream, &l->work);
}
