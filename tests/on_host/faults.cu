/* Kernels with faults that the host finds (on_host.h), for test_kernels_on_host. A GPU would hang, or do what nobody knows. */
#include "tests/on_host/faults.h"

#include "core/ops/mma.cuh"

static __global__ void shuffles_with_ended_lanes(float *out)
{
    if (threadIdx.x >= 24) return;
    out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFF, (float)threadIdx.x, 1);
}

static __global__ void shuffles_beside_a_barrier(float *out)
{
    float x = (float)threadIdx.x;
    if (threadIdx.x < 16) x = __shfl_xor_sync(0xFFFFFFFF, x, 1);
    else __syncthreads();
    out[threadIdx.x] = x;
}

static __global__ void votes_in_the_wrong_mask(float *out) { out[threadIdx.x] = __any_sync(0xFFFF, threadIdx.x == 3); }

static __global__ void meets_few_at_a_barrier(float *out)
{
    if (threadIdx.x < 32) return;
    __syncthreads();
    out[threadIdx.x] = 1;
}

/* out: what each thread finds where it copied 1 to, once it has waited or before. */
static __global__ void copies(float *out, const float *ones, bool waits)
{
    extern __shared__ float room[];
    td_copy_4(td_shared_address(room + threadIdx.x), ones + threadIdx.x, true);
    td_copies_end();
    if (waits) td_copies_wait<0>();
    out[threadIdx.x] = room[threadIdx.x];
}

/* Right: the sum of all threads' numbers. */
static __global__ void sums(float *out)
{
    __shared__ float parts[2];
    float x = (float)threadIdx.x;
    for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(0xFFFFFFFF, x, mask);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    out[threadIdx.x] = parts[0] + parts[1];
}

extern "C" void fault_launch(fault which, float *out, const float *ones, cudaStream_t stream)
{
    enum { THREADS = FAULT_THREADS, BYTES = THREADS * sizeof(float) };
    switch (which) {
    case FAULT_NONE:            sums<<<1, THREADS, 0, stream>>>(out); break;
    case FAULT_ENDED:           shuffles_with_ended_lanes<<<1, THREADS, 0, stream>>>(out); break;
    case FAULT_ELSEWHERE:       shuffles_beside_a_barrier<<<1, THREADS, 0, stream>>>(out); break;
    case FAULT_MASK:            votes_in_the_wrong_mask<<<1, THREADS, 0, stream>>>(out); break;
    case FAULT_BARRIER:         meets_few_at_a_barrier<<<1, THREADS, 0, stream>>>(out); break;
    case FAULT_THREADS_TOO_MANY: sums<<<1, 2048, 0, stream>>>(out); break;
    case FAULT_SHARED:          copies<<<1, THREADS, 300 << 10, stream>>>(out, ones, true); break;
    case FAULT_COPY:            copies<<<1, THREADS, BYTES, stream>>>(out, ones, false); break;
    case FAULT_COPY_NONE:       copies<<<1, THREADS, BYTES, stream>>>(out, ones, true); break;
    }
}
