/* An NVIDIA GPU as a device: its memory, what it can do, opening and closing. device_graph.c runs plans. */
#include "core/device_cudnn.h"
#include "core/device_graph.h"
#include "core/device_nvrtc.h"
#include "core/device_pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

bool td_cuda_current(td_context *td) { return td_cuda_ok(td, cudaSetDevice(td->cuda->device), "choosing the GPU"); }

bool td_cuda_wait(td_context *td)
{
    int64_t begin_ns = td_profile_now();
    td->device_counts.waits++;
    td->device_counts.stalls++;
    bool ran = td_cuda_ok(td, cudaStreamSynchronize(td->cuda->stream), "running the step");
    td->device_counts.waited_ns += td_profile_now() - begin_ns;
    return ran;
}

/* ---- Memory */

static void *cuda_get(td_context *td, int64_t bytes, const char *kind) { return td_cuda_current(td) ? td_cuda_get(td, bytes, kind) : NULL; }

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
    return td_cuda_current(td) && td_cuda_ok(td, cudaMemcpyAsync(to, from, (size_t)bytes, kind, td->cuda->stream), "copying") && td_cuda_wait(td);
}

static bool cuda_write(td_context *td, void *to, const void *from, int64_t bytes) { return copy(td, to, from, bytes, cudaMemcpyHostToDevice); }
static bool cuda_read(td_context *td, void *to, const void *from, int64_t bytes) { return copy(td, to, from, bytes, cudaMemcpyDeviceToHost); }

static bool cuda_clear(td_context *td, void *memory, int64_t bytes)
{
    return td_cuda_current(td) && td_cuda_ok(td, cudaMemsetAsync(memory, 0, (size_t)bytes, td->cuda->stream), "clearing memory");
}

static bool cuda_initialise(td_context *td, const td_initial *of) { return td_cuda_current(td) && td_initial_cuda(td, of, td->cuda->stream); }

/* ---- Memory of the host, pinned */

static void *pinned_get(td_context *td, int64_t bytes, const char *kind)
{
    (void)kind;
    void *memory = NULL;
    if (!td_cuda_current(td) || !td_cuda_ok(td, cudaHostAlloc(&memory, bytes ? (size_t)bytes : 1, cudaHostAllocPortable), "allocating pinned memory"))
        return NULL;
    memset(memory, 0, (size_t)bytes);
    return memory;
}

static void pinned_put(td_context *td, void *memory, int64_t bytes, const char *kind)
{
    (void)bytes, (void)kind;
    if (!memory) return;
    cudaSetDevice(td->cuda->device);
    cudaStreamSynchronize(td->cuda->stream);
    cudaFreeHost(memory);
}

/* Steps that still run may use it. */
static bool pinned_copy(td_context *td, void *to, const void *from, int64_t bytes)
{
    if (!td_cuda_current(td) || !td_cuda_wait(td)) return false;
    memcpy(to, from, (size_t)bytes);
    return true;
}

static const td_device pinned = { .get = pinned_get, .put = pinned_put, .write = pinned_copy, .read = pinned_copy };

/* ---- Values of steps */

static bool cuda_inputs_read(td_context *td, td_span of) { return td_cuda_current(td) && td_exchange_read(td, &td->cuda->exchange, of); }

static const uint64_t *cuda_landed(td_context *td, int set)
{
    return td_cuda_current(td) ? td_exchange_landed(td, &td->cuda->exchange, set) : NULL;
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
            !td_cuda_ok(td, cudaEventRecord(end, stream), "recording an event") || !td_cuda_wait(td) ||
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
    td_queues_close(td);
    if (cuda->stream) cudaStreamDestroy(cuda->stream);
    td->cuda = NULL;
    td_free(td, cuda, sizeof *cuda, "host");
}

static int64_t cuda_used(td_context *td)
{
    size_t free = 0, total = 0;
    return td_cuda_current(td) && td_cuda_ok(td, cudaMemGetInfo(&free, &total), "asking the GPU for its memory") ? (int64_t)(total - free) : 0;
}

static const td_device gpu = {
    .is_gpu = true, .get = cuda_get, .put = cuda_put, .write = cuda_write, .read = cuda_read, .clear = cuda_clear,
    .initialise = cuda_initialise, .run = td_graph_run, .landed = cuda_landed, .inputs_read = cuda_inputs_read, .drop = td_graph_drop, .measure = cuda_measure,
    .used = cuda_used, .close = cuda_close,
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

static bool find_memory(td_context *td)
{
    size_t free, total;
    if (td->options.memory_bytes) return true;
    if (!td_cuda_ok(td, cudaMemGetInfo(&free, &total), "asking the GPU for its memory")) return false;
    td->free_bytes = (int64_t)free;
    td_limit_memory(td, 1);
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
    if (td_cuda_current(td) && td_cuda_ok(td, cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking), "making a queue") &&
        find_limits(td, &td->gpu) && td_pools_open(td, device) && td_exchange_open(td, &cuda->exchange) && find_memory(td)) {
        td->run.queue = cuda->stream;
        td->host = &pinned;
        return &gpu;
    }
    cuda_close(td);
    return NULL;
}
