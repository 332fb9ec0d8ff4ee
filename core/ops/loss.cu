/* Cross-entropy on CUDA; see loss.c. The floor is the logits read once, and for the gradient written once: of rows as long as a
 * vocabulary those that are in work at a time fit the L2 cache, where the gradient's second reading finds them. */
#include "core/ops/rows.cuh"

/* A label that is one, else -1. */
static __device__ __forceinline__ int64_t label_of(const int32_t *labels, int64_t row, int64_t rows, int64_t classes)
{
    int64_t label = row < rows ? labels[row] : -1;
    return label >= 0 && label < classes ? label : -1;
}

template <int threads, typename T>
static __global__ void __launch_bounds__(TD_ROW_BLOCK(threads)) rows_kernel(const T *x, const int32_t *labels, float *loss, int64_t rows, int64_t classes)
{
    TD_FOR_ROWS(row, rows, threads) {
        int64_t label = label_of(labels, row, rows, classes);
        td_row_max_sum s = td_row_max_sum_of<threads>(x + row * classes, label < 0 ? 0 : classes);
        if (row < rows && td_group_lane<threads>() == 0)
            loss[row] = label < 0 ? CUDART_NAN_F : logf(s.sum) - (td_wide(x[row * classes + label]) - s.max);
    }
}

static __device__ __forceinline__ float scale_at(const void *d, td_dtype dtype, int64_t row)
{
    return dtype == TD_F32 ? ((const float *)d)[row] : dtype == TD_BF16 ? td_wide(((const __nv_bfloat16 *)d)[row]) : td_wide(((const __half *)d)[row]);
}

/* y may be x: the logit of the label is read by all threads before any of them writes. `loss` may be NULL. */
template <int threads, typename T>
static __global__ void __launch_bounds__(TD_ROW_BLOCK(threads))
gradient_kernel(const T *x, const int32_t *labels, const void *d, td_dtype d_dtype, T *y, float *loss, int64_t rows, int64_t classes)
{
    TD_FOR_ROWS(row, rows, threads) {
        int64_t label = label_of(labels, row, rows, classes), count = row < rows ? classes : 0;
        float scale = label < 0 ? CUDART_NAN_F : scale_at(d, d_dtype, row);
        float chosen = label < 0 ? 0 : td_wide(x[row * classes + label]);
        td_row_max_sum s = td_row_max_sum_of<threads>(x + row * classes, count);
        float factor = scale / s.sum;
        if (loss && row < rows && td_group_lane<threads>() == 0) loss[row] = label < 0 ? CUDART_NAN_F : logf(s.sum) - (chosen - s.max);
        if (threads <= 32) __syncwarp();
        td_group_visit<threads>(x + row * classes, count, [&](int64_t at, auto pack) {
            constexpr int width = sizeof pack / sizeof(T);
            #pragma unroll
            for (int i = 0; i < width; i++) {
                float e = td_row_exp<T>(td_wide(pack.at[i]) - s.max);
                pack.at[i] = td_narrow<T>(e * factor);
            }
            if ((uint64_t)(label - at) < (uint64_t)width) { /* near 1 the difference is all there is: not yet rounded */
                T slope = td_narrow<T>((expf(chosen - s.max) - s.sum) * factor);
                #pragma unroll
                for (int i = 0; i < width; i++)
                    if (label == at + i) pack.at[i] = slope;
            }
            if (((uintptr_t)x - (uintptr_t)y) % 16 == 0) *(decltype(pack) *)(y + row * classes + at) = pack;
            else
                #pragma unroll
                for (int i = 0; i < width; i++) y[row * classes + at + i] = pack.at[i];
        });
    }
}

template <typename T> static void cross_entropy_rows(const td_kernel *k)
{
    const T *x = (const T *)k->in[0].data;
    const int32_t *labels = (const int32_t *)k->in[1].data;
    float *loss = (float *)k->out[0].data;
    int64_t classes = td_arg_last(&k->in[0]), rows = td_arg_elements(&k->out[0]);
    if (rows == 0) return;
    TD_ROW_THREADS(classes, rows_kernel<threads><<<td_row_blocks(rows, threads), TD_ROW_BLOCK(threads), 0, td_stream(k)>>>(
                                x, labels, loss, rows, classes))
    td_cuda_launched(k);
}

template <typename T> static void cross_entropy_gradient(const td_kernel *k)
{
    const T *x = (const T *)k->in[0].data;
    const int32_t *labels = (const int32_t *)k->in[1].data;
    const td_arg *d = &k->in[2];
    T *y = (T *)k->out[0].data;
    float *loss = k->outputs > 1 ? (float *)k->out[1].data : NULL;
    int64_t classes = td_arg_last(&k->in[0]), rows = td_arg_elements(d);
    if (rows == 0) return;
    TD_ROW_THREADS(classes, gradient_kernel<threads><<<td_row_blocks(rows, threads), TD_ROW_BLOCK(threads), 0, td_stream(k)>>>(
                                x, labels, d->data, d->dtype, y, loss, rows, classes))
    td_cuda_launched(k);
}

extern "C" void td_cross_entropy_rows_cuda(const td_kernel *k) { TD_CUDA_FLOATS(k->in[0].dtype, cross_entropy_rows<T>(k)) }
extern "C" void td_cross_entropy_gradient_cuda(const td_kernel *k) { TD_CUDA_FLOATS(k->in[0].dtype, cross_entropy_gradient<T>(k)) }
