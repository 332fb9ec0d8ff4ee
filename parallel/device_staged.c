/* What transport `staged`, and the choice of a transport, need of CUDA (staged.h). */
#include <cuda_runtime.h>

#include "core/hash.h"
#include "parallel/staged.h"

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

static void *get(int64_t bytes)
{
    void *memory = NULL;
    return ok(cudaHostAlloc(&memory, (size_t)bytes, cudaHostAllocDefault)) ? memory : NULL;
}

static void put(void *memory) { cudaFreeHost(memory); }

static bool to_host(void *queue, void *to, const void *from, int64_t bytes)
{
    return ok(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToHost, queue));
}

static bool to_device(void *queue, void *to, const void *from, int64_t bytes)
{
    return ok(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyHostToDevice, queue));
}

static bool call(void *queue, void (*function)(void *user), void *user) { return ok(cudaLaunchHostFunc(queue, function, user)); }
static bool wait(void *queue) { return ok(cudaStreamSynchronize(queue)); }

const par_device par_cuda_device = {
    .key = key_of, .number = number_of, .get = get, .put = put, .to_host = to_host, .to_device = to_device, .call = call, .wait = wait,
};

int par_cuda_count(void)
{
    int count = 0;
    return ok(cudaGetDeviceCount(&count)) ? count : 0;
}
