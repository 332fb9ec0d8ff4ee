/* What matrix products need beside the library: a bias of another dtype than the result's, and the product over nothing. */
#include "core/device_cuda.h"
#include "core/ops/number.cuh"
#include "core/ops/product_cuda.h"

enum { THREADS = 256, EACH = 4 };

template <typename T, typename B>
static __global__ void add_bias(T *c, const B *bias, int64_t count, int64_t columns)
{
    int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        c[i] = td_narrow<T>(td_wide(c[i]) + td_wide(bias[i % columns]));
}

extern "C" void td_product_add_bias(const td_kernel *k, int64_t rows, int64_t columns)
{
    int64_t count = rows * columns;
    if (!count) return;
    unsigned blocks = td_blocks_for(count, THREADS, EACH);
    if (k->in[2].dtype == TD_F32)
        TD_CUDA_FLOATS(k->out[0].dtype, (add_bias<T, float><<<blocks, THREADS, 0, td_stream(k)>>>((T *)k->out[0].data, (const float *)k->in[2].data,
                                                                                                    count, columns)))
    else
        TD_CUDA_FLOATS(k->out[0].dtype, (add_bias<T, T><<<blocks, THREADS, 0, td_stream(k)>>>((T *)k->out[0].data, (const T *)k->in[2].data, count,
                                                                                                columns)))
    td_cuda_launched(k);
}
