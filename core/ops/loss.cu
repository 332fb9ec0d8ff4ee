/* Cross-entropy on CUDA; see loss.c. The floor is the logits read once, and for the gradient written once: the gradient's second reading
 * finds a row in the caches, and one as long as a vocabulary, in 16 bits, in shared memory. */
#include "core/ops/mma.cuh"
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

/* ---- Rows as long as a vocabulary, in 16 bits --------------------------------------------------------------------------
 *
 * A block to a multiprocessor takes rows in turn. Its threads have each a ring of RING packs in shared memory, of which a pack that is
 * used for the last time makes room for the one that comes RING packs after it, in this row or another: rows are under way while others
 * are computed, and threads meet for a row's sum alone. Of a row of more packs than the ring has, those it begins with have left the ring
 * when they are read again.
 */
enum { RING_THREADS = 1024, RING = 14, RING_BYTES = RING_THREADS * RING * 16 };

typedef struct ring {
    uint4 *room;                              /* this thread's slots, RING_THREADS from each other */
    int slot, own;                            /* the slot that is next to be read; packs of a row that this thread has */
    const uint4 *next;                        /* the pack that is next to be copied: number `pack` of those of `row` */
    int64_t row;
    int pack;
} ring;

static __device__ __forceinline__ void ring_advance(ring *r) { r->slot = r->slot == RING - 1 ? 0 : r->slot + 1; }

/* The next pack, into the slot that was read. One group of copies for each visit to a slot, so that of the last RING groups the oldest is
 * the one that the next visit waits for. */
template <typename T> static __device__ __forceinline__ void ring_copy(ring *r, const T *x, int64_t rows, int64_t classes)
{
    if (r->row < rows) td_copy_16(td_shared_address(r->room + r->slot * RING_THREADS), r->next, true);
    td_copies_end();
    r->next += RING_THREADS;
    if (++r->pack < r->own) return;
    r->pack = 0;
    r->row += gridDim.x;
    r->next = (const uint4 *)(x + r->row * classes) + threadIdx.x;
}

/* y may be x, which only the thread reads that writes there. `loss` may be NULL. Rows lie at multiples of 16 bytes. */
template <typename T>
static __global__ void __launch_bounds__(RING_THREADS, 1)
gradient_ring_kernel(const T *x, const int32_t *labels, const void *d, td_dtype d_dtype, T *y, float *loss, int64_t rows, int64_t classes)
{
    constexpr int width = 16 / sizeof(T);
    typedef td_pack<T, width> pack;
    extern __shared__ __align__(16) char room[];
    int thread = (int)threadIdx.x, own = (int)((classes / width - thread + RING_THREADS - 1) / RING_THREADS);
    int passing = own > RING ? own - RING : 0; /* packs that do not stay from the first reading to the second */
    ring r = { (uint4 *)room + thread, 0, own, (const uint4 *)(x + blockIdx.x * classes) + thread, blockIdx.x, 0 };
    for (int i = 0; i < RING; i++, ring_advance(&r)) ring_copy(&r, x, rows, classes);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const uint4 *from = (const uint4 *)(x + row * classes) + thread;
        uint4 *to = (uint4 *)(y + row * classes) + thread;
        int64_t label = label_of(labels, row, rows, classes);
        float scale = scale_at(d, d_dtype, row);
        td_row_max_sum s = { -CUDART_INF_F, 0 };
        int first = r.slot;
        for (int p = 0; p < own; p++, ring_advance(&r)) {
            td_copies_wait<RING - 1>();
            td_row_add(&s, td_bits_as<pack>(r.room[r.slot * RING_THREADS]));
            if (p < passing) ring_copy(&r, x, rows, classes);
            else td_copies_end();
        }
        s = td_row_join<RING_THREADS, T>(s);
        float factor = (label < 0 ? CUDART_NAN_F : scale) / s.sum;
        int64_t mended = label < 0 ? 0 : label;
        bool mends = mended / width % RING_THREADS == thread;
        float chosen = mends && label >= 0 ? td_wide(x[row * classes + label]) : CUDART_NAN_F;
        auto slope = [&](uint4 bits) {
            pack v = td_bits_as<pack>(bits);
            #pragma unroll
            for (int i = 0; i < width; i++) v.at[i] = td_narrow<T>(td_row_exp<T>(td_wide(v.at[i]) - s.max) * factor);
            return td_bits_as<uint4>(v);
        };
        if (!passing) r.slot = first;
        for (int p = passing; p < own; p++, ring_advance(&r)) {
            to[p * RING_THREADS] = slope(r.room[r.slot * RING_THREADS]);
            ring_copy(&r, x, rows, classes);
        }
        for (int p = 0; p < passing; p++) to[p * RING_THREADS] = slope(from[p * RING_THREADS]);
        if (!mends) continue;
        y[row * classes + mended] = td_narrow<T>((expf(chosen - s.max) - s.sum) * factor); /* see gradient_kernel */
        if (loss) loss[row] = logf(s.sum) - (chosen - s.max);
    }
}

/* False where rows are others, or the GPU has not the shared memory. */
template <typename T>
static bool gradient_by_rings(const td_kernel *k, const T *x, const int32_t *labels, T *y, float *loss, int64_t rows, int64_t classes)
{
    if constexpr (sizeof(T) == 2) {
        auto kernel = gradient_ring_kernel<T>;
        if (classes <= 16384 || classes % 8 || ((uintptr_t)x | (uintptr_t)y) % 16) return false;
        if (cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, RING_BYTES) != cudaSuccess)
            return (void)cudaGetLastError(), false;
        const td_arg *d = &k->in[2];
        int64_t blocks = k->run->td->gpu.multiprocessors;
        if (blocks > rows) blocks = rows;
        kernel<<<(unsigned)blocks, RING_THREADS, RING_BYTES, td_stream(k)>>>(x, labels, d->data, d->dtype, y, loss, rows, classes);
        td_cuda_launched(k);
        return true;
    }
    return false;
}

/* ---- Host functions --------------------------------------------------------------------------------------------------- */

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
    if (gradient_by_rings(k, x, labels, y, loss, rows, classes)) return;
    TD_ROW_THREADS(classes, gradient_kernel<threads><<<td_row_blocks(rows, threads), TD_ROW_BLOCK(threads), 0, td_stream(k)>>>(
                                x, labels, d->data, d->dtype, y, loss, rows, classes))
    td_cuda_launched(k);
}

extern "C" void td_cross_entropy_rows_cuda(const td_kernel *k) { TD_CUDA_FLOATS(k->in[0].dtype, cross_entropy_rows<T>(k)) }
extern "C" void td_cross_entropy_gradient_cuda(const td_kernel *k) { TD_CUDA_FLOATS(k->in[0].dtype, cross_entropy_gradient<T>(k)) }
