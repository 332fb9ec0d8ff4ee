/* A collective of which one rank alone is there (rehearsed.h), on CUDA.
 *
 * As many blocks as it takes multiprocessors: each asks for more shared memory than is left beside a product's. They go through what is to be
 * written at an even pace, of the time that the collective takes, so that memory is as busy as by the parts that come and go; what is summed and goes
 * to others is only fetched. Floor: the time, or the bytes read and written.
 */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "parallel/rehearsed.h"

enum { THREADS = 512, AT_ONCE = 4, SHARED_BYTES = 96 << 10, VECTOR_BYTES = 16 };

struct alone {
    const void *in;
    void *out;
    int64_t count;              /* vectors of a part */
    unsigned long long ns;
    int ranks, at;
};

template <typename T, int N> struct __align__(sizeof(T) * N) vector { T at[N]; };

template <typename T> __device__ inline T times(T x, int n) { return x * (T)n; }
template <> __device__ inline __half times(__half x, int n) { return __float2half_rn(__half2float(x) * (float)n); }
template <> __device__ inline __nv_bfloat16 times(__nv_bfloat16 x, int n) { return __float2bfloat16_rn(__bfloat162float(x) * (float)n); }

template <typename V> __device__ inline V times_all(V v, int n)
{
    for (size_t i = 0; i < sizeof v.at / sizeof v.at[0]; i++) v.at[i] = times(v.at[i], n);
    return v;
}

__device__ inline unsigned long long now()
{
    unsigned long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

/* One vector of a collective, each of them by its number among all that are read or written. */
struct gather {
    template <typename V> static __device__ void move(const alone &a, int64_t i)
    {
        ((V *)a.out)[i] = ((const V *)a.in)[i % a.count];
    }
};

struct exchange {
    template <typename V> static __device__ void move(const alone &a, int64_t i)
    {
        ((V *)a.out)[i] = ((const V *)a.in)[i];
    }
};

struct scatter {
    template <typename V> static __device__ void move(const alone &a, int64_t i)
    {
        const V *from = (const V *)a.in + i;
        if (i / a.count != a.at) asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
        else ((V *)a.out)[i % a.count] = times_all(*from, a.ranks);
    }
};

struct reduce {
    template <typename V> static __device__ void move(const alone &a, int64_t i)
    {
        V *at = (V *)a.out + i;
        *at = times_all(*at, a.ranks);
    }
};

template <typename V, typename C> __global__ void __launch_bounds__(THREADS, 1) pass(alone a, int64_t vectors)
{
    const int64_t round = (int64_t)THREADS * AT_ONCE, rounds = (vectors + round - 1) / round;
    unsigned long long begin = now();
    for (int64_t r = blockIdx.x; r < rounds; r += gridDim.x) {
        int64_t first = r * round + threadIdx.x;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (first + k * THREADS < vectors) C::template move<V>(a, first + k * THREADS);
        int64_t done = r + gridDim.x < rounds ? r + 1 : rounds;
        unsigned long long until = begin + (unsigned long long)((double)a.ns * (double)done / (double)rounds);
        while (threadIdx.x == 0 && now() < until) __nanosleep(100);
        __syncthreads();
    }
    while (threadIdx.x == 0 && now() < begin + a.ns) __nanosleep(100);
}

template <typename V, typename C> static bool launch(cudaStream_t queue, const par_alone *call, alone a)
{
    auto kernel = pass<V, C>;
    int64_t vectors = call->kind == PAR_ALL_REDUCE ? a.count : a.count * a.ranks;
    if (cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES) != cudaSuccess) return false;
    kernel<<<call->multiprocessors, THREADS, SHARED_BYTES, queue>>>(a, vectors);
    return cudaGetLastError() == cudaSuccess;
}

template <typename T, typename C> static bool take(cudaStream_t queue, const par_alone *call)
{
    const int n = VECTOR_BYTES / sizeof(T);
    bool whole = ((uintptr_t)call->in | (uintptr_t)call->out) % VECTOR_BYTES == 0 && call->count % n == 0;
    alone a = { call->in, call->out, whole ? call->count / n : call->count, (unsigned long long)(1e9 * call->seconds), call->ranks, call->at };
    return whole ? launch<vector<T, n>, C>(queue, call, a) : launch<vector<T, 1>, C>(queue, call, a);
}

template <typename C> static bool take_sum(cudaStream_t queue, const par_alone *call)
{
    switch (call->dtype) {
    case TD_F32: return take<float, C>(queue, call);
    case TD_F64: return take<double, C>(queue, call);
    case TD_BF16: return take<__nv_bfloat16, C>(queue, call);
    case TD_F16: return take<__half, C>(queue, call);
    case TD_I32: return take<int32_t, C>(queue, call);
    case TD_I64: return take<int64_t, C>(queue, call);
    default: return false;
    }
}

template <typename C> static bool take_copy(cudaStream_t queue, const par_alone *call)
{
    par_alone bytes = *call;
    bytes.count *= td_dtype_size(call->dtype);
    return take<uint8_t, C>(queue, &bytes);
}

bool par_cuda_alone(void *queue, const par_alone *call)
{
    switch (call->kind) {
    case PAR_ALL_REDUCE: return take_sum<reduce>((cudaStream_t)queue, call);
    case PAR_REDUCE_SCATTER: return take_sum<scatter>((cudaStream_t)queue, call);
    case PAR_ALL_GATHER: return take_copy<gather>((cudaStream_t)queue, call);
    case PAR_ALL_TO_ALL: return take_copy<exchange>((cudaStream_t)queue, call);
    default: return false;
    }
}
