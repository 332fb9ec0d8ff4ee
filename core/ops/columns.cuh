/* Columns of rows in memory reduced by threads side by side: for reductions and for what norms sum over rows. */
#ifndef TANDEM_CORE_OPS_COLUMNS_CUH
#define TANDEM_CORE_OPS_COLUMNS_CUH

#include "core/ops/group.cuh"

#include <type_traits>

enum {
    TD_COLUMN_THREADS = 256,                  /* of a block */
    TD_COLUMN_LOADS = 8,                      /* that a thread has in flight */
};

template <typename A, typename T> static __device__ __forceinline__ A td_wide_as(T x) { return (A)x; }
template <> __device__ __forceinline__ float td_wide_as<float>(__nv_bfloat16 x) { return td_wide(x); }
template <> __device__ __forceinline__ float td_wide_as<float>(__half x) { return td_wide(x); }

/* total[i] = join over rows [begin, end) of column i at x, rows being `stride` packs of `width` columns apart. A block has `lanes` threads
 * side by side, each of which has its own x, and in TD_COLUMN_THREADS / lanes groups takes turns with the rows; all of them call this
 * (with begin = end where there is no column) and those of the first group get the total, for which this is true. `total` comes with
 * what join starts from. */
template <int width, typename T, typename A, typename Join>
static __device__ __forceinline__ bool td_column_join(const T *x, int64_t begin, int64_t end, int64_t stride, int lanes, A (&total)[width], Join join)
{
    typedef td_pack<T, width> pack;
    typedef typename std::conditional<sizeof(pack) == 16, uint4, pack>::type bits;
    __shared__ A parts[TD_COLUMN_THREADS * width];
    int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = TD_COLUMN_THREADS / lanes;
    const bits *from = (const bits *)x;
    for (int64_t row = begin + group; row < end; row += TD_COLUMN_LOADS * groups) {
        bits loaded[TD_COLUMN_LOADS];
        #pragma unroll
        for (int j = 0; j < TD_COLUMN_LOADS; j++)
            if (row + j * groups < end) loaded[j] = from[(row + j * groups) * stride];
        #pragma unroll
        for (int j = 0; j < TD_COLUMN_LOADS; j++) {
            if (row + j * groups >= end) break;
            pack p = td_bits_as<pack>(loaded[j]);
            #pragma unroll
            for (int i = 0; i < width; i++) total[i] = join(total[i], td_wide_as<A>(p.at[i]));
        }
    }
    if (groups == 1) return true;
    #pragma unroll
    for (int i = 0; i < width; i++) parts[i * TD_COLUMN_THREADS + threadIdx.x] = total[i];
    __syncthreads();
    if (group > 0) return false;
    for (int g = 1; g < groups; g++)
        #pragma unroll
        for (int i = 0; i < width; i++) total[i] = join(total[i], parts[i * TD_COLUMN_THREADS + g * lanes + lane]);
    return true;
}

#endif
