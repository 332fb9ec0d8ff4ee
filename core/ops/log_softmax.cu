/* log_softmax and logsumexp on CUDA; see log_softmax.c. The floor is x read once, and for log_softmax y written. */
#include "core/ops/rows.cuh"

template <int threads, typename T> static __device__ bool has_nan(const T *x, int64_t count)
{
    float found = 0;
    td_group_visit<threads>(x, count, [&](int64_t, auto pack) {
        for (int i = 0; i < (int)(sizeof pack / sizeof(T)); i++)
            if (td_wide(pack.at[i]) != td_wide(pack.at[i])) found = 1;
    });
    return td_group_join<threads>(found, td_plus()) > 0;
}

template <int threads, typename T>
static __global__ void __launch_bounds__(TD_ROW_BLOCK(threads)) logsumexp_kernel(const T *x, float *y, int64_t rows, int64_t columns)
{
    TD_FOR_ROWS(row, rows, threads) {
        int64_t count = row < rows ? columns : 0;
        td_row_max_sum s = td_row_max_sum_of<threads>(x + row * columns, count);
        float result = s.max + logf(s.sum);
        bool infinite = s.max == CUDART_INF_F; /* the sum of distances from it is NaN */
        if (threads > 32 ? infinite : __any_sync(0xFFFFFFFF, infinite)) {
            bool nan = has_nan<threads>(x + row * columns, count);
            if (infinite && !nan) result = CUDART_INF_F;
        }
        if (row < rows && td_group_lane<threads>() == 0) y[row] = result;
    }
}

/* x - max first: the difference of two large numbers would lose what log sum adds. */
template <int threads, typename T>
static __global__ void __launch_bounds__(TD_ROW_BLOCK(threads)) log_softmax_kernel(const T *x, T *y, int64_t rows, int64_t columns)
{
    TD_FOR_ROWS(row, rows, threads) {
        int64_t count = row < rows ? columns : 0;
        td_row_max_sum s = td_row_max_sum_of<threads>(x + row * columns, count);
        float rest = logf(s.sum);
        td_row_write<threads>(x + row * columns, y + row * columns, count, [&](float v) { return (v - s.max) - rest; });
    }
}

template <typename T> static void logsumexp(const td_kernel *k)
{
    const T *x = (const T *)k->in[0].data;
    float *y = (float *)k->out[0].data;
    int64_t columns = td_arg_last(&k->in[0]), rows = td_arg_elements(&k->out[0]);
    if (rows == 0) return;
    TD_ROW_THREADS(columns, logsumexp_kernel<threads><<<td_row_blocks(rows, threads), TD_ROW_BLOCK(threads), 0, td_stream(k)>>>(x, y, rows, columns))
    td_cuda_launched(k);
}

template <typename T> static void log_softmax(const td_kernel *k)
{
    const T *x = (const T *)k->in[0].data;
    T *y = (T *)k->out[0].data;
    int64_t columns = td_arg_last(&k->in[0]), elements = td_arg_elements(&k->in[0]);
    if (elements == 0) return;
    int64_t rows = elements / columns;
    TD_ROW_THREADS(columns, log_softmax_kernel<threads><<<td_row_blocks(rows, threads), TD_ROW_BLOCK(threads), 0, td_stream(k)>>>(x, y, rows, columns))
    td_cuda_launched(k);
}

extern "C" void td_logsumexp_cuda(const td_kernel *k) { TD_CUDA_FLOATS(k->in[0].dtype, logsumexp<T>(k)) }
extern "C" void td_log_softmax_cuda(const td_kernel *k) { TD_CUDA_FLOATS(k->in[0].dtype, log_softmax<T>(k)) }
