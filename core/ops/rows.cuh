/* Rows along the last dimension as softmax and the losses read them on CUDA: what rows.h is for the CPU.
 *
 * One group of threads a row. A row is read for its maximum and its sum of exponentials at once; where it is read again to be written,
 * it comes from the caches.
 */
#ifndef TANDEM_CORE_OPS_ROWS_CUH
#define TANDEM_CORE_OPS_ROWS_CUH

#include "core/device_cuda.h"
#include "core/ops/group.cuh"

typedef struct td_row_max_sum {
    float max, sum; /* of x, of exp(x - max); a max of -inf: of exp(x) */
} td_row_max_sum;

/* e^x: exact to 2 units in the last place for f32; for 16-bit rows, whose loads would not wait for it, to what they can tell: two
 * instructions, and 0 where the result would be denormal. */
template <typename T> static __device__ __forceinline__ float td_row_exp(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504088896341f));
    return y;
}
template <> __device__ __forceinline__ float td_row_exp<float>(float x) { return expf(x); }

/* What exponentials are taken beside: -infinities have no distance from their max, and are 0 beside any number. */
static __device__ __forceinline__ float td_row_pivot(float max) { return max > -CUDART_INF_F ? max : 0; }

struct td_row_largest {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/* s, of a part of a row, with the part in `pack`. A NaN is passed over by the maximum: it makes the sum NaN. */
template <typename T, int width> static __device__ __forceinline__ void td_row_add(td_row_max_sum *s, td_pack<T, width> pack)
{
    float max = s->max;
    #pragma unroll
    for (int i = 0; i < width; i++) max = fmaxf(max, td_wide(pack.at[i]));
    float pivot = td_row_pivot(max), sum = 0;
    #pragma unroll
    for (int i = 0; i < width; i++) sum += td_row_exp<T>(td_wide(pack.at[i]) - pivot);
    s->sum = (max == s->max ? s->sum : s->sum * td_row_exp<T>(s->max - pivot)) + sum;
    s->max = max;
}

/* Of the row whose parts the group's threads have. Products are rounded before they are added: all threads get the same bits. */
template <int threads, typename T> static __device__ __forceinline__ td_row_max_sum td_row_join(td_row_max_sum s)
{
    float max = td_group_join<threads>(s.max, td_row_largest());
    return { max, td_group_join<threads>(__fmul_rn(s.sum, td_row_exp<T>(s.max - td_row_pivot(max))), td_plus()) };
}

/* Of a row, which the group reads once. */
template <int threads, typename T> static __device__ __forceinline__ td_row_max_sum td_row_max_sum_of(const T *x, int64_t count)
{
    td_row_max_sum s = { -CUDART_INF_F, 0 };
    td_group_visit<threads>(x, count, [&](int64_t, auto pack) { td_row_add(&s, pack); });
    return td_row_join<threads, T>(s);
}

/* y[i] = of(x[i]) in f32, by the same thread: y may be x. */
template <int threads, typename T, typename Of>
static __device__ __forceinline__ void td_row_write(const T *x, T *y, int64_t count, Of of)
{
    bool together = ((uintptr_t)x - (uintptr_t)y) % 16 == 0;
    td_group_visit<threads>(x, count, [&](int64_t at, auto pack) {
        #pragma unroll
        for (int i = 0; i < (int)(sizeof pack / sizeof(T)); i++) pack.at[i] = td_narrow<T>(of(td_wide(pack.at[i])));
        if (together) *(decltype(pack) *)(y + at) = pack;
        else
            #pragma unroll
            for (int i = 0; i < (int)(sizeof pack / sizeof(T)); i++) y[at + i] = pack.at[i];
    });
}

/* Threads of a block whose groups have `threads`. */
#define TD_ROW_BLOCK(threads) ((threads) > 128 ? (threads) : 128)

/* Runs a statement with `threads` the constant number of those that take one row of so many columns. */
#define TD_ROW_THREADS(columns, ...)                                                                   \
    if ((columns) <= 64) { constexpr int threads = 8; __VA_ARGS__; }                                   \
    else if ((columns) <= 1024) { constexpr int threads = 32; __VA_ARGS__; }                           \
    else if ((columns) <= 16384) { constexpr int threads = 256; __VA_ARGS__; }                         \
    else { constexpr int threads = 1024; __VA_ARGS__; }

static inline unsigned td_row_blocks(int64_t rows, int threads) { return td_blocks_for(rows, TD_ROW_BLOCK(threads) / threads, 1); }

/* The rows of this thread's group, one after the other; past the last row a group goes along with those of its block, and `row < rows`
 * does not hold. */
#define TD_FOR_ROWS(row, rows, threads)                                                                \
    for (int64_t first_ = (int64_t)blockIdx.x * (blockDim.x / (threads)), row = first_ + threadIdx.x / (threads); first_ < (rows); \
         first_ += (int64_t)gridDim.x * (blockDim.x / (threads)), row = first_ + threadIdx.x / (threads))

#endif
