/* What transport `nccl` needs of CUDA (nccl.h). */
#include <cuda_runtime.h>

#include "parallel/nccl.h"

static int device_of(void *queue)
{
    int device = -1;
    return cudaStreamGetDevice(queue, &device) == cudaSuccess ? device : -1;
}

static void use(int device) { cudaSetDevice(device); }

static bool copy(void *queue, void *to, const void *from, int64_t bytes)
{
    return cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToDevice, queue) == cudaSuccess;
}

static void *make_mark(void)
{
    cudaEvent_t event;
    return cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess ? event : NULL;
}

static bool put_mark(void *mark, void *queue) { return cudaEventRecord(mark, queue) == cudaSuccess; }

/* What CUDA remembers of the answer is no error of the thread's. */
static bool has_passed(void *mark)
{
    bool passed = cudaEventQuery(mark) != cudaErrorNotReady;
    if (!passed) cudaGetLastError();
    return passed;
}

static void free_mark(void *mark) { cudaEventDestroy(mark); }

const par_queue par_cuda_queue = {
    .device = device_of, .use = use, .copy = copy, .make_mark = make_mark, .put_mark = put_mark, .has_passed = has_passed, .free_mark = free_mark,
};
