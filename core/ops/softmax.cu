/* softmax on CUDA; see softmax.c. The floor is x read and y written, each once. */
#include "core/ops/rows.cuh"

template <int threads, typename T>
static __global__ void __launch_bounds__(TD_ROW_BLOCK(threads)) softmax_kernel(const T *x, T *y, int64_t rows, int64_t columns)
{
    TD_FOR_ROWS(row, rows, threads) {
        int64_t count = row < rows ? columns : 0;
        td_row_max_sum s = td_row_max_sum_of<threads>(x + row * columns, count);
        float factor = 1 / s.sum;
        td_row_write<threads>(x + row * columns, y + row * columns, count,
                              [&](float v) { return td_row_exp<T>(v - s.max) * factor; });
    }
}

template <typename T> static void softmax(const td_kernel *k)
{
    const T *x = (const T *)k->in[0].data;
    T *y = (T *)k->out[0].data;
    int64_t columns = td_arg_last(&k->in[0]), elements = td_arg_elements(&k->in[0]);
    if (elements == 0) return;
    int64_t rows = elements / columns;
    TD_ROW_THREADS(columns, softmax_kernel<threads><<<td_row_blocks(rows, threads), TD_ROW_BLOCK(threads), 0, td_stream(k)>>>(x, y, rows, columns))
    td_cuda_launched(k);
}

extern "C" void td_softmax_cuda(const td_kernel *k) { TD_CUDA_FLOATS(k->in[0].dtype, softmax<T>(k)) }
