/* What matrix products need beside the library: a bias of another dtype than the result's, and where its epilogues are not the faster way
 * gelu in its tanh form, and gradients through it. Their floor is each operand read and written once. */
#include "core/device_cuda.h"
#include "core/ops/number.cuh"
#include "core/ops/product_cuda.h"
#include "core/ops/stored.cuh"

enum { THREADS = 256, EACH = 4 };

template <typename T, typename B>
static __global__ void add_bias(T *c, const B *bias, int64_t count, int64_t columns)
{
    int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        c[i] = td_narrow<T>(td_wide(c[i]) + td_wide(bias[i % columns]));
}

extern "C" void td_product_add_bias(const td_kernel *k, const td_arg *c, int64_t rows, int64_t columns)
{
    int64_t count = rows * columns;
    if (!count) return;
    unsigned blocks = td_blocks_for(count, THREADS, EACH);
    if (k->in[2].dtype == TD_F32)
        TD_CUDA_FLOATS(c->dtype, (add_bias<T, float><<<blocks, THREADS, 0, td_stream(k)>>>((T *)c->data, (const float *)k->in[2].data, count,
                                                                                          columns)))
    else
        TD_CUDA_FLOATS(c->dtype, (add_bias<T, T><<<blocks, THREADS, 0, td_stream(k)>>>((T *)c->data, (const T *)k->in[2].data, count,
                                                                                      columns)))
    td_cuda_launched(k);
}

/* A thread's pack is `width` elements; count is a multiple of it. */
template <int width, bool gradient, typename T>
static __global__ void __launch_bounds__(THREADS) apply_gelu(const T *x, T *c, int64_t count)
{
    typedef td_pack<T, width> pack;
    int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count / width; i += stride) {
        pack from = ((const pack *)x)[i], to = gradient ? ((const pack *)c)[i] : from;
        #pragma unroll
        for (int j = 0; j < width; j++) {
            float y = td_wide(from.at[j]);
            to.at[j] = td_narrow<T>(gradient ? td_wide(to.at[j]) * gelu_tanh_slope(y) : gelu_tanh(y));
        }
        ((pack *)c)[i] = to;
    }
}

template <bool gradient, typename T> static void launch_gelu(const td_kernel *k, const td_arg *from)
{
    constexpr int whole = 16 / (int)sizeof(T);
    int64_t count = td_arg_elements(&k->out[0]);
    const T *x = (const T *)from->data;
    T *c = (T *)k->out[0].data;
    bool packs = count % whole == 0 && (uintptr_t)x % 16 == 0 && (uintptr_t)c % 16 == 0;
    if (!count) return;
    unsigned blocks = td_blocks_for(packs ? count / whole : count, THREADS, 1);
    if (packs) apply_gelu<whole, gradient, T><<<blocks, THREADS, 0, td_stream(k)>>>(x, c, count);
    else apply_gelu<1, gradient, T><<<blocks, THREADS, 0, td_stream(k)>>>(x, c, count);
    td_cuda_launched(k);
}

extern "C" void td_product_gelu(const td_kernel *k, const td_arg *x) { TD_CUDA_FLOATS(x->dtype, (launch_gelu<false, T>(k, x))) }

extern "C" void td_product_dgelu(const td_kernel *k, const td_arg *x) { TD_CUDA_FLOATS(x->dtype, (launch_gelu<true, T>(k, x))) }
