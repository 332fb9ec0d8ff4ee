/* Adagrad with a sum for each element or for each row, on CUDA; see adagrad.c. */
#include "optim/hyper.h"
#include "optim/rows.cuh"

struct adagrad {
    enum { MOMENTS = 1, HYPERS = 3 };
    float grow, decay, eps, rate;

    __device__ void begin(const double *hyper, double rate_now, double scale, double updates)
    {
        grow = (float)scale;
        decay = (float)hyper[ADAGRAD_DECAY];
        eps = (float)hyper[ADAGRAD_EPS];
        rate = (float)(rate_now / (1 + (updates - 1) * hyper[ADAGRAD_RATE_DECAY]));
    }

    __device__ __forceinline__ float gradient(float p, float g) const { return grow * g + decay * p; }

    __device__ __forceinline__ void apply(float &p, float g, float *m) const
    {
        float d = gradient(p, g);
        m[0] += d * d;
        p -= rate * d / (sqrtf(m[0]) + eps);
    }
};

extern "C" void opt_adagrad_cuda(const td_update_range *ranges, int count, const td_update_scalars *scalars)
{
    opt_update<adagrad>(ranges, count, scalars);
}

extern "C" void opt_adagrad_cuda_rows(const td_update_range *range, const int32_t *ids, const td_update_scalars *scalars)
{
    opt_update_rows<adagrad>(range, ids, scalars);
}

/* ---- A sum for each row: its elements are read twice, the second time from the caches. */

/* Over the `threads` of a row, which all get it, in an order that never changes: up to 32 of a warp, or the whole block. */
template <int threads> static __device__ __forceinline__ float sum_over_row(float x)
{
    #pragma unroll
    for (int mask = (threads < 32 ? threads : 32) / 2; mask; mask >>= 1) x += __shfl_xor_sync(0xFFFFFFFF, x, mask);
    if constexpr (threads > 32) {
        __shared__ float warps[threads / 32];
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
        __syncthreads();
        x = 0;
        #pragma unroll
        for (int w = 0; w < threads / 32; w++) x += warps[w];
    }
    return x;
}

template <int threads> static __global__ void __launch_bounds__(OPT_THREADS) row_wise_kernel(const __grid_constant__ opt_rows l)
{
    __shared__ adagrad shared;
    constexpr int rows = OPT_THREADS / threads;
    int64_t first = (int64_t)blockIdx.x * rows;
    if ((l.when && *l.when == 0) || opt_row_id(l, first) < 0) return; /* the whole block */
    if (threadIdx.x == 0) shared.begin(l.hyper, *l.rate, *l.scale, *l.updates);
    __syncthreads();
    const adagrad rule = shared;
    int lane = threadIdx.x % threads;
    int64_t row = first + threadIdx.x / threads, id = opt_row_id(l, row), width = id < 0 ? 0 : l.width; /* all threads take part in sums */
    const float *g = l.gradient + row * l.width;
    float *p = l.parameter + (id < 0 ? 0 : id) * l.width, square = 0, before = lane == 0 && id >= 0 ? l.moment[0][id] : 0;
    for (int64_t c = lane; c < width; c += threads) {
        float d = rule.gradient(p[c], g[c]);
        square += d * d;
    }
    float sum = sum_over_row<threads>(before + square / (float)l.width);
    if (lane == 0 && id >= 0) l.moment[0][id] = sum;
    float factor = rule.rate / (sqrtf(sum) + rule.eps);
    for (int64_t c = lane; c < width; c += threads) p[c] -= factor * rule.gradient(p[c], g[c]);
}

template <int threads> static void launch_row_wise(const opt_rows *l, cudaStream_t stream)
{
    row_wise_kernel<threads><<<opt_row_blocks(l->rows, OPT_THREADS / threads), OPT_THREADS, 0, stream>>>(*l);
}

extern "C" void opt_row_wise_adagrad_cuda_rows(const td_update_range *range, const int32_t *ids, const td_update_scalars *s)
{
    bool packed;
    opt_rows l = opt_rows_of(range, ids, s, 1, adagrad::HYPERS, &packed);
    cudaStream_t stream = (cudaStream_t)s->queue;
    if (l.width <= 16)
        launch_row_wise<4>(&l, stream);
    else if (l.width <= 1024)
        launch_row_wise<32>(&l, stream);
    else
        launch_row_wise<OPT_THREADS>(&l, stream);
}
