/* What device.h asks for, of CUDA. */
#include <cuda_runtime.h>

#include "core/hash.h"
#include "parallel/device.h"

/* Behind a call that failed the next one is asked about afresh. */
static bool ok(cudaError_t status)
{
    if (status == cudaSuccess) return true;
    cudaGetLastError();
    return false;
}

static int number_of(void *queue)
{
    int device = -1;
    return ok(cudaStreamGetDevice(queue, &device)) ? device : -1;
}

/* Of a part of a GPU (MIG) its own. */
static uint64_t key_of(void *queue)
{
    struct cudaDeviceProp properties;
    int device = number_of(queue);
    return device >= 0 && ok(cudaGetDeviceProperties(&properties, device)) ? td_hash_bytes(0, &properties.uuid, sizeof properties.uuid) : 0;
}

static void use(int number) { cudaSetDevice(number); }

static void *get_host(int64_t bytes)
{
    void *memory = NULL;
    return ok(cudaHostAlloc(&memory, (size_t)bytes, cudaHostAllocDefault)) ? memory : NULL;
}

static void put_host(void *memory) { cudaFreeHost(memory); }

/* The memset goes to a stream of its own, which the contexts' do not wait for. */
static void *get(int64_t bytes)
{
    void *memory = NULL;
    if (ok(cudaMalloc(&memory, (size_t)bytes)) && ok(cudaMemset(memory, 0, (size_t)bytes)) && ok(cudaStreamSynchronize(NULL))) return memory;
    cudaFree(memory);
    return NULL;
}

static void put(void *memory) { cudaFree(memory); }

static bool to_host(void *queue, void *to, const void *from, int64_t bytes)
{
    return ok(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToHost, queue));
}

static bool to_device(void *queue, void *to, const void *from, int64_t bytes)
{
    return ok(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyHostToDevice, queue));
}

static bool copy(void *queue, void *to, const void *from, int64_t bytes)
{
    return ok(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToDevice, queue));
}

static bool call(void *queue, void (*function)(void *user), void *user) { return ok(cudaLaunchHostFunc(queue, function, user)); }
static bool wait(void *queue) { return ok(cudaStreamSynchronize(queue)); }

static bool is_idle(void *queue)
{
    cudaError_t status = cudaStreamQuery(queue);
    return ok(status) || status != cudaErrorNotReady;
}

static void *make_mark(void)
{
    cudaEvent_t event;
    return ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)) ? event : NULL;
}

static bool put_mark(void *mark, void *queue) { return ok(cudaEventRecord(mark, queue)); }

static bool has_passed(void *mark)
{
    cudaError_t status = cudaEventQuery(mark);
    return ok(status) || status != cudaErrorNotReady;
}

static void free_mark(void *mark) { cudaEventDestroy(mark); }

const par_device par_cuda_device = {
    .key = key_of, .number = number_of, .use = use, .get_host = get_host, .put_host = put_host, .get = get, .put = put, .to_host = to_host,
    .to_device = to_device, .copy = copy, .alone = par_cuda_alone, .call = call, .wait = wait, .is_idle = is_idle, .make_mark = make_mark, .put_mark = put_mark,
    .has_passed = has_passed, .free_mark = free_mark,
};

int par_cuda_count(void)
{
    int count = 0;
    return ok(cudaGetDeviceCount(&count)) ? count : 0;
}

void par_cuda_address(int number, char address[PAR_GPU_ADDRESS])
{
    if (!ok(cudaDeviceGetPCIBusId(address, PAR_GPU_ADDRESS, number))) *address = 0;
}
