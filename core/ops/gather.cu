/* Elements of a row chosen by number, on a GPU: an element a thread; sums of repeated places by one thread a row, in their order. */
#include "core/device_cuda.h"
#include "core/ops/number.cuh"

enum { THREADS = 256 };

template <typename T>
static __global__ void gather(T *y, const T *x, const int32_t *ids, int64_t rows, int64_t columns, int64_t chosen)
{
    int64_t count = rows * chosen;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t id = ids[i];
        y[i] = id >= 0 && id < columns ? x[i / chosen * columns + id] : td_narrow<T>(__int_as_float(0x7FC00000));
    }
}

template <typename T>
static __global__ void scatter_add(float *y, const T *dy, const int32_t *ids, int64_t rows, int64_t columns, int64_t chosen)
{
    for (int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += (int64_t)gridDim.x * blockDim.x)
        for (int64_t i = row * chosen; i < (row + 1) * chosen; i++) {
            int64_t id = ids[i];
            if (id >= 0 && id < columns) y[row * columns + id] += td_wide(dy[i]);
        }
}

static int64_t rows_of(const td_arg *arg) { return td_shape_product(arg->shape, 0, (int)arg->shape.rank - 1); }

extern "C" void td_gather_cuda(const td_kernel *k)
{
    int64_t rows = rows_of(&k->in[1]), columns = td_arg_last(&k->in[0]), chosen = td_arg_last(&k->out[0]);
    if (!rows || !chosen) return;
    TD_CUDA_FLOATS(k->in[0].dtype, (gather<T><<<td_blocks_for(rows * chosen, THREADS, 1), THREADS, 0, td_stream(k)>>>(
                                        (T *)k->out[0].data, (const T *)k->in[0].data, (const int32_t *)k->in[1].data, rows, columns, chosen)));
    td_cuda_launched(k);
}

extern "C" void td_scatter_add_cuda(const td_kernel *k)
{
    int64_t rows = rows_of(&k->in[0]), columns = td_arg_last(&k->out[0]), chosen = td_arg_last(&k->in[1]), bytes = td_arg_bytes(&k->out[0]);
    if (!bytes || !td_clear_bytes_cuda(k->run->td, k->out[0].data, bytes, td_stream(k))) return;
    if (!chosen) return;
    TD_CUDA_FLOATS(k->in[1].dtype, (scatter_add<T><<<td_blocks_for(rows, THREADS, 1), THREADS, 0, td_stream(k)>>>(
                                        (float *)k->out[0].data, (const T *)k->in[1].data, (const int32_t *)k->in[0].data, rows, columns, chosen)));
    td_cuda_launched(k);
}
