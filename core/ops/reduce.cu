/* Reductions on CUDA: sum and max of x (outer, n, inner) over n, argmax along the last dimension.
 *
 * The floor is x read once. Rows (inner = 1) belong to groups of threads, columns to single threads and, where there are few, to several
 * that share n. Where even that leaves the device empty n is cut into chunks, whose results go to the workspace and are reduced by the
 * same kernels. All bounds depend on shapes alone: a sum has the same bits run after run.
 *
 * Floats are summed in f32, integers in f64 as on the CPU; a chunk's maximum is exact in the operand's own dtype.
 */
#include "core/device_cuda.h"
#include "core/ops/columns.cuh"
#include "core/ops/reduce.h"

enum {
    THREADS = 256,
    BLOCKS = 2048,        /* of a launch, where chunks can make as many */
    ROW_CHUNK = 8192,     /* elements of a row's chunk, at least */
    COLUMN_CHUNK = 8,     /* elements of n that each thread takes, at least */
};

/* ---- Values and what is made of them ---------------------------------------------------------------------- */

/* A result as its output has it; integers are cut towards zero and clamped. */
static __device__ __forceinline__ void put(float *to, float x) { *to = x; }
static __device__ __forceinline__ void put(__nv_bfloat16 *to, float x) { *to = td_narrow<__nv_bfloat16>(x); }
static __device__ __forceinline__ void put(__half *to, float x) { *to = td_narrow<__half>(x); }
static __device__ __forceinline__ void put(double *to, double x) { *to = x; }
static __device__ __forceinline__ void put(int32_t *to, double x) { *to = (int32_t)x; }
static __device__ __forceinline__ void put(int64_t *to, double x) { *to = (int64_t)x; }
static __device__ __forceinline__ void put(uint8_t *to, double x) { *to = (uint8_t)(x < 0 ? 0 : x > 255 ? 255 : x); }
static __device__ __forceinline__ void put(int32_t *to, int64_t x) { *to = (int32_t)x; }
static __device__ __forceinline__ void put(int64_t *to, int64_t x) { *to = x; }
static __device__ __forceinline__ void put(uint8_t *to, int64_t x) { *to = (uint8_t)x; }

template <typename A> struct sum_of : td_plus {
    typedef A value;
    static __device__ __forceinline__ A start() { return 0; }
};

template <typename A> struct max_of : td_largest {
    typedef A value;
    static __device__ __forceinline__ A start();
};
template <> __device__ __forceinline__ float max_of<float>::start() { return -CUDART_INF_F; }
template <> __device__ __forceinline__ int64_t max_of<int64_t>::start() { return INT64_MIN; }

/* ---- Kernels ---------------------------------------------------------------------------------------------- */

typedef struct layout {
    td_reduced x;
    int64_t chunk, chunks;                    /* elements of n in a chunk, and how many there are */
    int lanes;                                /* of columns: threads side by side */
} layout;

/* Task (outer, chunk), numbered in that order, is one group's. */
template <int threads, typename T, typename O, typename Op>
static __global__ void __launch_bounds__(THREADS) rows_kernel(const T *x, O *out, layout l)
{
    typedef typename Op::value A;
    int64_t tasks = l.x.outer * l.chunks;
    constexpr int groups = THREADS / threads;
    for (int64_t first = (int64_t)blockIdx.x * groups; first < tasks; first += (int64_t)gridDim.x * groups) {
        int64_t task = first + threadIdx.x / threads, row = task / l.chunks, begin = task % l.chunks * l.chunk;
        int64_t count = l.x.valid - begin < l.chunk ? l.x.valid - begin : l.chunk;
        if (task >= tasks || count < 0) count = 0;
        A total = Op::start();
        td_group_visit<threads>(x + row * l.x.n + begin, count, [&](int64_t, auto pack) {
            A part = td_wide_as<A>(pack.at[0]);
            #pragma unroll
            for (int i = 1; i < (int)(sizeof pack / sizeof(T)); i++) part = Op()(part, td_wide_as<A>(pack.at[i]));
            total = Op()(total, part);
        });
        total = td_group_join<threads>(total, Op());
        if (task < tasks && td_group_lane<threads>() == 0) put(out + task, total);
    }
}

/* Items are (outer, chunk, `width` columns): `lanes` of them a block. */
template <int width, typename T, typename O, typename Op>
static __global__ void __launch_bounds__(TD_COLUMN_THREADS) columns_kernel(const T *x, O *out, layout l)
{
    typedef typename Op::value A;
    int64_t packs = l.x.inner / width, items = l.x.outer * l.chunks * packs;
    int64_t item = (int64_t)blockIdx.x * l.lanes + threadIdx.x % l.lanes, begin = 0, end = 0;
    A total[width];
    #pragma unroll
    for (int i = 0; i < width; i++) total[i] = Op::start();
    if (item < items) {
        int64_t outer = item / packs / l.chunks;
        begin = item / packs % l.chunks * l.chunk;
        end = begin + l.chunk < l.x.valid ? begin + l.chunk : l.x.valid;
        x += (outer * l.x.n * packs + item % packs) * width;
    }
    if (td_column_join<width>(x, begin, end, packs, l.lanes, total, Op()) && item < items)
        #pragma unroll
        for (int i = 0; i < width; i++) put(out + item * width + i, total[i]);
}

/* ---- Launches --------------------------------------------------------------------------------------------- */

static int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* How many threads take a row's chunk. */
static int row_threads(int64_t count) { return count <= 64 ? 8 : count <= 2048 ? 32 : THREADS; }

static layout rows_layout(td_reduced x)
{
    layout l = { x, x.n, 1, 0 };
    int64_t most = BLOCKS / x.outer;
    l.chunks = td_smaller(most, x.n / ROW_CHUNK);
    if (l.chunks <= 1) {
        l.chunks = 1;
        return l;
    }
    l.chunk = quotient_up(quotient_up(x.n, l.chunks), 16) * 16; /* a row's alignment is its chunks' */
    l.chunks = quotient_up(x.n, l.chunk);
    return l;
}

static layout columns_layout(td_reduced x, int width)
{
    int groups = 1;
    int64_t items = x.outer * (x.inner / width);
    int most = items < 1024 ? 32 : 8;
    while (groups < most && groups * 4 < x.n && items * groups < 1 << 18) groups *= 2;
    layout l = { x, x.n, 1, TD_COLUMN_THREADS / groups };
    int64_t chunks = td_smaller(BLOCKS / quotient_up(items, l.lanes), x.n / (groups * COLUMN_CHUNK));
    if (chunks > 1) {
        l.chunk = quotient_up(x.n, chunks);
        l.chunks = quotient_up(x.n, l.chunk);
    }
    return l;
}

template <typename T> static layout layout_of(td_reduced x, const void *data, int *width)
{
    int whole = 16 / (int)sizeof(T);
    *width = x.inner % whole == 0 && (uintptr_t)data % 16 == 0 ? whole : 1;
    return x.inner == 1 ? rows_layout(x) : columns_layout(x, *width);
}

template <typename T, typename O, typename Op> static void launch(const td_kernel *k, const layout *l, int width, const void *x, void *out)
{
    const T *from = (const T *)x;
    O *to = (O *)out;
    cudaStream_t stream = td_stream(k);
    if (l->x.inner == 1) {
        int64_t tasks = l->x.outer * l->chunks;
        int threads = row_threads(l->chunk);
        unsigned blocks = td_blocks_for(tasks, THREADS / threads, 1);
        if (threads == 8) rows_kernel<8, T, O, Op><<<blocks, THREADS, 0, stream>>>(from, to, *l);
        else if (threads == 32) rows_kernel<32, T, O, Op><<<blocks, THREADS, 0, stream>>>(from, to, *l);
        else rows_kernel<THREADS, T, O, Op><<<blocks, THREADS, 0, stream>>>(from, to, *l);
    } else {
        unsigned blocks = td_blocks_for(l->x.outer * l->chunks * (l->x.inner / width), l->lanes, 1);
        if (width > 1) columns_kernel<16 / (int)sizeof(T), T, O, Op><<<blocks, TD_COLUMN_THREADS, 0, stream>>>(from, to, *l);
        else columns_kernel<1, T, O, Op><<<blocks, TD_COLUMN_THREADS, 0, stream>>>(from, to, *l);
    }
    td_cuda_launched(k);
}

/* The chunks' results of a reduction, which the same reduction makes one. */
static td_reduced of_chunks(const layout *l)
{
    td_reduced x = { l->x.outer, l->chunks, l->x.inner, l->chunks };
    return x;
}

/* T: the operand's elements; P: those of chunks' results; O: the output's. */
template <typename T, typename P, typename O, typename Op> static void reduce(const td_kernel *k)
{
    td_reduced x = td_reduced_of(k);
    int width, joined_width;
    if (x.outer == 0 || x.inner == 0) return;
    layout l = layout_of<T>(x, k->in[0].data, &width);
    if (l.chunks == 1) {
        launch<T, O, Op>(k, &l, width, k->in[0].data, k->out[0].data);
        return;
    }
    launch<T, P, Op>(k, &l, width, k->in[0].data, k->workspace);
    layout joined = layout_of<P>(of_chunks(&l), k->workspace, &joined_width);
    joined.chunk = l.chunks; /* once */
    joined.chunks = 1;
    launch<P, O, Op>(k, &joined, joined_width, k->workspace, k->out[0].data);
}

/* Room for chunks, of which there are most where columns are taken one by one. */
static bool prepare(const td_kernel *k, int64_t partial_bytes, td_preparation *out)
{
    td_reduced x = td_reduced_of(k);
    if (x.outer == 0 || x.inner == 0) return true;
    int64_t chunks = 1;
    int whole = 16 / (int)td_dtype_size(k->in[0].dtype);
    layout l[2] = { x.inner == 1 ? rows_layout(x) : columns_layout(x, 1),
                    x.inner % whole == 0 ? columns_layout(x, whole) : columns_layout(x, 1) };
    for (int i = 0; i < (x.inner == 1 ? 1 : 2); i++)
        if (l[i].chunks > chunks) chunks = l[i].chunks;
    if (chunks > 1) out->workspace_bytes = x.outer * chunks * x.inner * partial_bytes;
    return true;
}

extern "C" bool td_sum_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)td;
    return prepare(k, td_is_float(k->in[0].dtype) ? 4 : 8, out);
}

extern "C" void td_sum_cuda(const td_kernel *k)
{
    switch (k->in[0].dtype) {
    case TD_F32: reduce<float, float, float, sum_of<float>>(k); break;
    case TD_BF16: reduce<__nv_bfloat16, float, float, sum_of<float>>(k); break;
    case TD_F16: reduce<__half, float, float, sum_of<float>>(k); break;
    case TD_I32: reduce<int32_t, double, int32_t, sum_of<double>>(k); break;
    case TD_I64: reduce<int64_t, double, int64_t, sum_of<double>>(k); break;
    case TD_U8: reduce<uint8_t, double, uint8_t, sum_of<double>>(k); break;
    default: break;
    }
}

extern "C" bool td_max_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)td;
    return prepare(k, td_dtype_size(k->in[0].dtype), out);
}

extern "C" void td_max_cuda(const td_kernel *k)
{
    switch (k->in[0].dtype) {
    case TD_F32: reduce<float, float, float, max_of<float>>(k); break;
    case TD_BF16: reduce<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, max_of<float>>(k); break;
    case TD_F16: reduce<__half, __half, __half, max_of<float>>(k); break;
    case TD_I32: reduce<int32_t, int32_t, int32_t, max_of<int64_t>>(k); break;
    case TD_I64: reduce<int64_t, int64_t, int64_t, max_of<int64_t>>(k); break;
    case TD_U8: reduce<uint8_t, uint8_t, uint8_t, max_of<int64_t>>(k); break;
    default: break;
    }
}

/* ---- argmax ------------------------------------------------------------------------------------------------- */

template <int threads, typename T, typename A>
static __global__ void __launch_bounds__(THREADS) argmax_kernel(const T *x, int32_t *out, int64_t rows, int64_t columns)
{
    constexpr int groups = THREADS / threads;
    for (int64_t first = (int64_t)blockIdx.x * groups; first < rows; first += (int64_t)gridDim.x * groups) {
        int64_t row = first + threadIdx.x / threads;
        td_place<A> best = { 0, -1 };
        td_group_visit<threads>(x + row * columns, row < rows ? columns : 0, [&](int64_t at, auto pack) {
            #pragma unroll
            for (int i = 0; i < (int)(sizeof pack / sizeof(T)); i++) {
                td_place<A> next = { td_wide_as<A>(pack.at[i]), at + i };
                if (td_stands_before(next, best, false)) best = next;
            }
        });
        best = td_group_join<threads>(best, [](td_place<A> a, td_place<A> b) { return td_stands_before(b, a, false) ? b : a; });
        if (row < rows && td_group_lane<threads>() == 0) out[row] = (int32_t)best.index;
    }
}

template <typename T, typename A> static void argmax(const td_kernel *k)
{
    int64_t rows = td_arg_elements(&k->out[0]), columns = td_arg_last(&k->in[0]);
    const T *x = (const T *)k->in[0].data;
    int32_t *out = (int32_t *)k->out[0].data;
    int threads = row_threads(columns);
    if (rows == 0) return;
    unsigned blocks = td_blocks_for(rows, THREADS / threads, 1);
    if (threads == 8) argmax_kernel<8, T, A><<<blocks, THREADS, 0, td_stream(k)>>>(x, out, rows, columns);
    else if (threads == 32) argmax_kernel<32, T, A><<<blocks, THREADS, 0, td_stream(k)>>>(x, out, rows, columns);
    else argmax_kernel<THREADS, T, A><<<blocks, THREADS, 0, td_stream(k)>>>(x, out, rows, columns);
    td_cuda_launched(k);
}

extern "C" void td_argmax_cuda(const td_kernel *k)
{
    switch (k->in[0].dtype) {
    case TD_F32: argmax<float, float>(k); break;
    case TD_BF16: argmax<__nv_bfloat16, float>(k); break;
    case TD_F16: argmax<__half, float>(k); break;
    case TD_I32: argmax<int32_t, int64_t>(k); break;
    case TD_I64: argmax<int64_t, int64_t>(k); break;
    case TD_U8: argmax<uint8_t, int64_t>(k); break;
    default: break;
    }
}
