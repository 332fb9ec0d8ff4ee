/* cumsum on CUDA; see cumsum.c. Summed in f64 as there; the floor is x read and y written, each once. A group takes a row tile by tile:
 * each thread sums its few elements, then adds what lies before them in the tile and before the tile. */
#include "core/ops/rows.cuh"

enum { EACH = 4 };                            /* elements of a thread in a tile */

/* The sum of the group's x before this thread's; *total: of all. */
template <int threads> static __device__ __forceinline__ double sum_before(double x, double *total)
{
    constexpr int width = threads < 32 ? threads : 32;
    int lane = threadIdx.x % width;
    double through = x;
    #pragma unroll
    for (int distance = 1; distance < width; distance *= 2) {
        double other = __shfl_up_sync(0xFFFFFFFF, through, distance, width);
        if (lane >= distance) through += other;
    }
    *total = __shfl_sync(0xFFFFFFFF, through, width - 1, width);
    double before = through - x;
    if constexpr (threads > 32) {
        __shared__ double warps[threads / 32];
        __syncthreads(); /* whoever reads them still, from the tile before */
        if (lane == 0) warps[threadIdx.x / 32] = *total;
        __syncthreads();
        double sum = 0;
        for (int w = 0; w < threads / 32; w++) {
            if (w == (int)threadIdx.x / 32) before += sum;
            sum += warps[w];
        }
        *total = sum;
    }
    return before;
}

/* y may be x: a tile is read before it is written. */
template <int threads, typename T>
static __global__ void __launch_bounds__(TD_ROW_BLOCK(threads)) cumsum_kernel(const T *x, T *y, int64_t rows, int64_t columns, bool reverse)
{
    TD_FOR_ROWS(row, rows, threads) {
        double carry = 0;
        for (int64_t tile = 0; tile < columns; tile += threads * EACH) {
            int64_t begin = tile + td_group_lane<threads>() * EACH, end = row < rows ? columns : 0;
            double sum = 0, through[EACH], total;
            #pragma unroll
            for (int i = 0; i < EACH; i++) {
                int64_t at = reverse ? columns - 1 - begin - i : begin + i;
                if (begin + i < end) sum += td_wide(x[row * columns + at]);
                through[i] = sum;
            }
            double before = carry + sum_before<threads>(sum, &total);
            #pragma unroll
            for (int i = 0; i < EACH; i++) {
                int64_t at = reverse ? columns - 1 - begin - i : begin + i;
                if (begin + i < end) y[row * columns + at] = td_narrow<T>((float)(before + through[i]));
            }
            carry += total;
        }
    }
}

template <typename T> static void cumsum(const td_kernel *k)
{
    const T *x = (const T *)k->in[0].data;
    T *y = (T *)k->out[0].data;
    bool reverse = ((const td_cumsum_attr *)k->attr)->reverse;
    int64_t columns = td_arg_last(&k->in[0]), elements = td_arg_elements(&k->in[0]);
    if (elements == 0) return;
    int64_t rows = elements / columns;
    TD_ROW_THREADS(columns, cumsum_kernel<threads><<<td_row_blocks(rows, threads), TD_ROW_BLOCK(threads), 0, td_stream(k)>>>(
                                x, y, rows, columns, reverse))
    td_cuda_launched(k);
}

extern "C" void td_cumsum_cuda(const td_kernel *k) { TD_CUDA_FLOATS(k->in[0].dtype, cumsum<T>(k)) }
