/* CUDA's runtime on the host: streams do at once what they are given. While a graph is captured it gets all that any stream is given, in
 * that order, which is one that the streams' events allow. */
#include <cuda_runtime_api.h>
#include <on_host.h>
#include <stdlib.h>
#include <string.h>

struct on_host_graph {
    on_host_work *first, **last;
};
struct on_host_stream {
    int unused;
};
struct on_host_event {
    int unused;
};

static cudaError_t last_error;
static struct on_host_graph *captured;        /* NULL: none is */

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
    *to = (struct cudaDeviceProp){ .name = "the host, as a GPU", .multiProcessorCount = 2, .l2CacheSize = 1 << 20, .major = 9 };
    return cudaSetDevice(device);
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

cudaError_t cudaFreeHost(void *memory)
{
    free(memory);
    return cudaSuccess;
}

/* ---- Streams */

void on_host_put(cudaStream_t stream, on_host_work *work)
{
    (void)stream;
    if (captured) {
        *captured->last = work;
        captured->last = &work->next;
        return;
    }
    noted(work->run(work));
    work->drop(work);
}

typedef struct moving {
    on_host_work work;
    void *to;
    const void *from;                         /* NULL: `value` */
    size_t bytes;
    int value;
} moving;

static cudaError_t move(on_host_work *work)
{
    moving *m = (moving *)work;
    if (m->from) memcpy(m->to, m->from, m->bytes);
    else memset(m->to, m->value, m->bytes);
    return cudaSuccess;
}

static void drop_moving(on_host_work *work) { free(work); }

static cudaError_t put_moving(cudaStream_t stream, void *to, const void *from, int value, size_t bytes)
{
    moving *m = malloc(sizeof *m);
    if (!m) return noted(cudaErrorMemoryAllocation);
    *m = (moving){ .work = { .run = move, .drop = drop_moving }, .to = to, .from = from, .value = value, .bytes = bytes };
    on_host_put(stream, &m->work);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    (void)kind;
    return from ? put_moving(stream, to, from, 0, bytes) : noted(cudaErrorInvalidValue);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) { return put_moving(stream, to, NULL, value, bytes); }

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
    on_host_put(stream, &c->work);
    return cudaSuccess;
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
    return *to ? cudaSuccess : noted(cudaErrorMemoryAllocation);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    free(stream);
    return cudaSuccess;
}

/* No graph may wait. */
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return !stream || captured ? noted(cudaErrorInvalidValue) : cudaSuccess; }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    (void)stream, (void)event, (void)flags;
    return cudaSuccess;
}

/* ---- Events: all is done that was recorded */

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
    (void)event, (void)stream, (void)flags;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventQuery(cudaEvent_t event) { return event ? cudaSuccess : noted(cudaErrorInvalidValue); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaEventQuery(event); }

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    (void)begin, (void)end;
    *ms = 0;
    return cudaSuccess;
}

/* ---- Graphs. An instance is the graph itself. */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    (void)stream, (void)mode;
    captured = calloc(1, sizeof *captured);
    if (!captured) return noted(cudaErrorMemoryAllocation);
    captured->last = &captured->first;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *to)
{
    (void)stream;
    *to = captured;
    captured = NULL;
    return *to ? cudaSuccess : noted(cudaErrorInvalidValue);
}

static void free_graph(struct on_host_graph *graph)
{
    while (graph->first) {
        on_host_work *next = graph->first->next;
        graph->first->drop(graph->first);
        graph->first = next;
    }
    free(graph);
}

/* The graph is left empty. */
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *to, cudaGraph_t graph, unsigned long long flags)
{
    (void)flags;
    *to = calloc(1, sizeof **to);
    if (!*to) return noted(cudaErrorMemoryAllocation);
    (*to)->first = graph->first;
    graph->first = NULL;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    free_graph(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaGraphDestroy(graph); }

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream)
{
    (void)stream;
    for (on_host_work *w = graph->first; w; w = w->next)
        if (noted(w->run(w)) != cudaSuccess) return cudaErrorLaunchFailure;
    return cudaSuccess;
}
