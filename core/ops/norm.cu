/* Norms on CUDA; see norm.c. The floor is x, and for the gradient dy and r, read once and y or dx, and its narrow copy, written once.
 *
 * A row is held in registers by the group of threads that has it, up to 8192 columns: its mean, then its squared distances from it, then
 * its results. The gradient's groups take rows in turn and keep the sums of the weights' gradients in registers too; each block's go to
 * the workspace and are summed, in order, by a second kernel. Rows that are longer, or that do not lie at multiples of 16 bytes, are read
 * once for each of these; their weights' gradients are sums over columns.
 */
#include "core/device_cuda.h"
#include "core/ops/columns.cuh"
#include "core/ops/norm.h"

#define TD_ROW_FUNCTION static __device__ __forceinline__
#include "core/ops/shard.h"

typedef struct norm_sizes {
    int64_t rows, columns;
    float eps;
    int centered;
} norm_sizes;

static norm_sizes sizes_of(const td_kernel *k)
{
    const td_norm_attr *attr = (const td_norm_attr *)k->attr;
    td_shape shape = k->in[0].shape;
    norm_sizes s = { td_shape_product(shape, 0, (int)shape.rank - 1), td_arg_last(&k->in[0]), (float)attr->eps, attr->centered };
    return s;
}

static bool at_16_bytes(const void *data) { return (uintptr_t)data % 16 == 0; }

/* ---- Elements in registers: `packs` packs of 16 bytes of T and the f32 beside them ---------------------------------- */

/* Pack p of a row that a group of `threads` holds begins at this column. */
template <int threads, int width> static __device__ __forceinline__ int pack_column(int p)
{
    return (td_group_lane<threads>() + p * threads) * width;
}

/* Zeros past `columns`. */
template <int threads, int packs, typename T>
static __device__ __forceinline__ void load_row(const T *x, int columns, float (&v)[packs * (16 / sizeof(T))])
{
    constexpr int width = 16 / sizeof(T);
    uint4 loaded[packs];
    #pragma unroll
    for (int p = 0; p < packs; p++) {
        int column = pack_column<threads, width>(p);
        loaded[p] = column < columns ? *(const uint4 *)(x + column) : make_uint4(0, 0, 0, 0);
    }
    #pragma unroll
    for (int p = 0; p < packs; p++) {
        td_pack<T, width> pack = td_bits_as<td_pack<T, width>>(loaded[p]);
        #pragma unroll
        for (int i = 0; i < width; i++) v[p * width + i] = td_wide(pack.at[i]);
    }
}

/* `width` f32 at x. */
template <int width> static __device__ __forceinline__ void load_floats(const float *x, float *v)
{
    #pragma unroll
    for (int i = 0; i < width; i += 4) {
        float4 four = *(const float4 *)(x + i);
        v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
    }
}

template <int width> static __device__ __forceinline__ void store_floats(float *x, const float *v)
{
    #pragma unroll
    for (int i = 0; i < width; i += 4) *(float4 *)(x + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
}

/* `width` numbers in Y's dtype. */
template <int width, typename Y> static __device__ __forceinline__ void store_as(Y *y, const float *v)
{
    if constexpr (sizeof(Y) == sizeof(float)) {
        store_floats<width>(y, v);
    } else {
        td_pack<Y, width> out;
        #pragma unroll
        for (int i = 0; i < width; i++) out.at[i] = td_narrow<Y>(v[i]);
        *(td_pack<Y, width> *)y = out;
    }
}

/* v becomes v - mean, where there is a column; gives the mean square. */
template <int threads, int packs, int width>
static __device__ __forceinline__ float center_row(float (&v)[packs * width], int columns, int centered)
{
    float sum = 0, square = 0;
    #pragma unroll
    for (int i = 0; i < packs * width; i++) sum += v[i];
    float mean = centered ? td_group_join<threads>(sum, td_plus()) / columns : 0;
    #pragma unroll
    for (int p = 0; p < packs; p++)
        #pragma unroll
        for (int i = 0; i < width; i++) {
            float &c = v[p * width + i];
            c = pack_column<threads, width>(p) < columns ? c - mean : 0;
            square += c * c;
        }
    return square;
}

/* ---- layer_norm and rms_norm ---------------------------------------------------------------------------------- */

template <int threads, int block, typename T, typename Y>
static __global__ void __launch_bounds__(block)
forward_kernel(const T *__restrict__ x, const float *__restrict__ weight, const float *__restrict__ bias, Y *__restrict__ y, norm_sizes s)
{
    constexpr int width = 16 / sizeof(T), packs = 32 / width;
    int columns = (int)s.columns;
    int64_t first = (int64_t)blockIdx.x * (block / threads), row = first + threadIdx.x / threads;
    float v[32];
    load_row<threads, packs>(x + row * columns, row < s.rows ? columns : 0, v);
    float square = td_group_join<threads>(center_row<threads, packs, width>(v, columns, s.centered), td_plus());
    float scale = 1 / sqrtf(square / columns + s.eps);
    if (row >= s.rows) return;
    #pragma unroll
    for (int p = 0; p < packs; p++) {
        int column = pack_column<threads, width>(p);
        if (column >= columns) break;
        float w[width], b[width], *c = v + p * width;
        load_floats<width>(weight + column, w);
        if (bias) load_floats<width>(bias + column, b);
        #pragma unroll
        for (int i = 0; i < width; i++) c[i] = bias ? c[i] * scale * w[i] + b[i] : c[i] * scale * w[i];
        store_as<width>(y + row * columns + column, c);
    }
}

typedef struct row_moments {
    float mean, scale;
} row_moments;

/* Of a row that is read, twice. */
template <int threads, typename T> static __device__ row_moments moments_of(const T *x, norm_sizes s)
{
    float sum = 0, square = 0;
    row_moments m = { 0, 0 };
    if (s.centered) {
        for (int64_t i = threadIdx.x; i < s.columns; i += threads) sum += td_wide(x[i]);
        m.mean = td_group_join<threads>(sum, td_plus()) / s.columns;
    }
    for (int64_t i = threadIdx.x; i < s.columns; i += threads) square += (td_wide(x[i]) - m.mean) * (td_wide(x[i]) - m.mean);
    m.scale = 1 / sqrtf(td_group_join<threads>(square, td_plus()) / s.columns + s.eps);
    return m;
}

enum { ANY_THREADS = 256 };                   /* a block, which takes a row of any length */

template <typename T, typename Y>
static __global__ void __launch_bounds__(ANY_THREADS)
forward_any_kernel(const T *x, const float *weight, const float *bias, Y *y, norm_sizes s)
{
    for (int64_t row = blockIdx.x; row < s.rows; row += gridDim.x) {
        const T *from = x + row * s.columns;
        row_moments m = moments_of<ANY_THREADS>(from, s);
        for (int64_t i = threadIdx.x; i < s.columns; i += ANY_THREADS) {
            float value = (td_wide(from[i]) - m.mean) * m.scale * weight[i];
            y[row * s.columns + i] = td_narrow<Y>(bias ? value + bias[i] : value);
        }
    }
}

template <typename T, typename Y> static void forward_to(const td_kernel *k)
{
    norm_sizes s = sizes_of(k);
    const T *x = (const T *)k->in[0].data;
    const float *weight = (const float *)k->in[1].data, *bias = k->inputs > 2 ? (const float *)k->in[2].data : NULL;
    Y *y = (Y *)k->out[0].data;
    cudaStream_t stream = td_stream(k);
    if (s.rows == 0 || s.columns == 0) return;
    bool packed = s.columns % (16 / sizeof(T)) == 0 && at_16_bytes(x) && at_16_bytes(weight) && at_16_bytes(bias) && at_16_bytes(y);
    if (!packed || s.columns > 8192) forward_any_kernel<T, Y><<<td_blocks_for(s.rows, 1, 1), ANY_THREADS, 0, stream>>>(x, weight, bias, y, s);
    else if (s.columns <= 1024) forward_kernel<32, 128, T, Y><<<td_blocks_for(s.rows, 4, 1), 128, 0, stream>>>(x, weight, bias, y, s);
    else if (s.columns <= 4096) forward_kernel<128, 128, T, Y><<<td_blocks_for(s.rows, 1, 1), 128, 0, stream>>>(x, weight, bias, y, s);
    else forward_kernel<256, 256, T, Y><<<td_blocks_for(s.rows, 1, 1), 256, 0, stream>>>(x, weight, bias, y, s);
    td_cuda_launched(k);
}

template <typename X> static void forward(const td_kernel *k) { TD_CUDA_FLOATS(k->out[0].dtype, (forward_to<X, T>(k))) }

extern "C" void td_norm_cuda(const td_kernel *k) { TD_CUDA_FLOATS(k->in[0].dtype, forward<T>(k)) }

/* ---- norm_gradient: n = (x - mean) scale, g = dy weight;  dx = scale (g - mean g - n mean(g n)) ------------------------- */

typedef struct gradient_args {
    norm_sizes s;
    td_rows held;                             /* rows that exist: others get dx = 0 and add nothing */
    const float *weight, *dy;
    const float *added;                       /* (rows, D), which dx is added to; NULL: none */
    void *narrow;                             /* (rows, D): dx in 16 bits, too; NULL: not */
    int bf16;                                 /* of which kind */
    float *partial;                           /* (parts, sums, D): what each block found of dweight[, dbias] */
    row_moments *moments;                     /* (rows), where weights' gradients are summed on their own */
    int sums;
} gradient_args;

static __device__ __forceinline__ bool exists(const td_rows *r, int64_t row)
{
    return row < r->count && td_row_exists(r, row);
}

typedef struct three {
    float square, g, along;
} three;

/* dx[at ..] from v as it goes to memory: what v is added to, and the copy in 16 bits. Both are of f32. */
template <int width, typename T> static __device__ __forceinline__ void write_dx(const gradient_args *a, T *dx, int64_t at, float *v)
{
    if constexpr (sizeof(T) == sizeof(float)) {
        if (a->added) {
            float r[width];
            if constexpr (width == 1) r[0] = a->added[at];
            else load_floats<width>(a->added + at, r);
            #pragma unroll
            for (int i = 0; i < width; i++) v[i] = r[i] + v[i];
        }
        if (a->narrow && a->bf16) store_as<width>((__nv_bfloat16 *)a->narrow + at, v);
        else if (a->narrow) store_as<width>((__half *)a->narrow + at, v);
    }
    td_pack<T, width> out;
    #pragma unroll
    for (int i = 0; i < width; i++) out.at[i] = td_narrow<T>(v[i]);
    *(td_pack<T, width> *)(dx + at) = out;
}

/* What a pack of `added` waits for in memory it need not wait for later. */
static __device__ __forceinline__ void fetch_to_l2(const float *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

struct add_three {
    __device__ __forceinline__ three operator()(three a, three b) const { return { a.square + b.square, a.g + b.g, a.along + b.along }; }
};

/* The groups of a block add what they have of dweight and dbias, one after the other, and write the block's part of `partial`. */
template <int threads, int packs, int width, int block>
static __device__ __forceinline__ void write_partial(const gradient_args *a, const float *dweight, const float *dbias)
{
    __shared__ float together[threads < block ? 2 * threads * packs * width : 1];
    int columns = (int)a->s.columns;
    float *to = a->partial + (int64_t)blockIdx.x * a->sums * columns;
    #pragma unroll /* registers have no numbers to be chosen by */
    for (int sum = 0; sum < 2; sum++, to += columns) {
        if (sum == a->sums) break;
        const float *own = sum ? dbias : dweight;
        float *shared = together + (threads < block ? sum * threads * packs * width : 0);
        for (int group = 0; group < block / threads; group++) {
            bool first = group == 0, last = group == block / threads - 1;
            if ((int)threadIdx.x / threads == group)
                #pragma unroll
                for (int p = 0; p < packs; p++) {
                    int column = pack_column<threads, width>(p);
                    float v[width];
                    #pragma unroll
                    for (int i = 0; i < width; i++) v[i] = first ? own[p * width + i] : shared[column + i] + own[p * width + i];
                    if (!last)
                        #pragma unroll
                        for (int i = 0; i < width; i++) shared[column + i] = v[i];
                    else if (column < columns) store_floats<width>(to + column, v);
                }
            if (threads < block) __syncthreads();
        }
    }
}

/* Blocks of a multiprocessor at once, as `backward` counts them: where a thread has 32 columns, registers are what there is least of. */
template <int threads, int packs, int block, typename T>
static __global__ void __launch_bounds__(block, packs * 16 / sizeof(T) > 16 ? 3 : 1)
backward_kernel(const T *__restrict__ x, T *__restrict__ dx, gradient_args a)
{
    constexpr int width = 16 / sizeof(T), each = packs * width, groups = block / threads;
    int columns = (int)a.s.columns;
    float dweight[each], dbias[each];
    #pragma unroll
    for (int i = 0; i < each; i++) dweight[i] = dbias[i] = 0;
    for (int64_t first = (int64_t)blockIdx.x * groups; first < a.s.rows; first += (int64_t)gridDim.x * groups) {
        int64_t row = first + threadIdx.x / threads;
        int here = exists(&a.held, row) ? columns : 0;
        float c[each], dy[each];
        load_row<threads, packs>(x + row * columns, here, c);
        #pragma unroll
        for (int p = 0; p < packs; p++) {
            int column = pack_column<threads, width>(p);
            #pragma unroll
            for (int i = 0; i < width; i++) dy[p * width + i] = 0;
            if (column < here) load_floats<width>(a.dy + row * columns + column, dy + p * width);
            if (column < here && a.added) fetch_to_l2(a.added + row * columns + column);
        }
        three sum = { center_row<threads, packs, width>(c, columns, a.s.centered), 0, 0 };
        #pragma unroll
        for (int p = 0; p < packs; p++) {
            int column = pack_column<threads, width>(p);
            if (column >= columns) break;
            float w[width];
            load_floats<width>(a.weight + column, w);
            #pragma unroll
            for (int i = 0; i < width; i++) {
                float g = dy[p * width + i] * w[i];
                sum.g += g;
                sum.along += g * c[p * width + i];
            }
        }
        sum = td_group_join<threads>(sum, add_three());
        float scale = here ? 1 / sqrtf(sum.square / columns + a.s.eps) : 0; /* a row that does not exist adds no 0 times infinity */
        float g_mean = a.s.centered ? sum.g / columns : 0, along = sum.along / columns * scale * scale;
        if (row >= a.s.rows) continue;
        #pragma unroll
        for (int p = 0; p < packs; p++) {
            int column = pack_column<threads, width>(p);
            if (column >= columns) break;
            float w[width], out[width];
            load_floats<width>(a.weight + column, w);
            #pragma unroll
            for (int i = 0; i < width; i++) {
                int at = p * width + i;
                out[i] = scale * (dy[at] * w[i] - g_mean - c[at] * along);
                dweight[at] += dy[at] * (c[at] * scale);
                dbias[at] += dy[at];
            }
            write_dx<width>(&a, dx, row * columns + column, out);
        }
    }
    write_partial<threads, packs, width, block>(&a, dweight, dbias);
}

/* dx of rows of any length, and the rows' moments. */
template <typename T> static __global__ void __launch_bounds__(ANY_THREADS) backward_any_kernel(const T *x, T *dx, gradient_args a)
{
    norm_sizes s = a.s;
    for (int64_t row = blockIdx.x; row < s.rows; row += gridDim.x) {
        const T *from = x + row * s.columns;
        const float *dy = a.dy + row * s.columns;
        if (!exists(&a.held, row)) {
            for (int64_t i = threadIdx.x; i < s.columns; i += ANY_THREADS) {
                float none = 0;
                write_dx<1>(&a, dx, row * s.columns + i, &none);
            }
            continue;
        }
        row_moments m = moments_of<ANY_THREADS>(from, s);
        three sum = { 0, 0, 0 };
        for (int64_t i = threadIdx.x; i < s.columns; i += ANY_THREADS) {
            float g = dy[i] * a.weight[i];
            sum.g += g;
            sum.along += g * (td_wide(from[i]) - m.mean);
        }
        sum = td_group_join<ANY_THREADS>(sum, add_three());
        float g_mean = s.centered ? sum.g / s.columns : 0, along = sum.along / s.columns * m.scale * m.scale;
        for (int64_t i = threadIdx.x; i < s.columns; i += ANY_THREADS) {
            float out = m.scale * (dy[i] * a.weight[i] - g_mean - (td_wide(from[i]) - m.mean) * along);
            write_dx<1>(&a, dx, row * s.columns + i, &out);
        }
        if (threadIdx.x == 0) a.moments[row] = m;
    }
}

enum { LANES = 32, COLUMN_GROUPS = TD_COLUMN_THREADS / LANES };

/* Block (column block, part): LANES columns of the weights' gradients over every parts-th lot of COLUMN_GROUPS rows. */
template <typename T> static __global__ void __launch_bounds__(TD_COLUMN_THREADS) weights_kernel(const T *x, gradient_args a, int parts)
{
    __shared__ float shared[2][COLUMN_GROUPS][LANES];
    int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, part = blockIdx.x % parts;
    int64_t columns = a.s.columns, column = (int64_t)(blockIdx.x / parts) * LANES + lane;
    float dweight = 0, dbias = 0;
    for (int64_t row = (int64_t)part * COLUMN_GROUPS + group; row < a.s.rows; row += (int64_t)parts * COLUMN_GROUPS) {
        if (column >= columns || !exists(&a.held, row)) continue;
        row_moments m = a.moments[row];
        float dy = a.dy[row * columns + column];
        dweight += dy * ((td_wide(x[row * columns + column]) - m.mean) * m.scale);
        dbias += dy;
    }
    shared[0][group][lane] = dweight;
    shared[1][group][lane] = dbias;
    __syncthreads();
    if (group >= a.sums || column >= columns) return;
    float total = 0;
    for (int g = 0; g < COLUMN_GROUPS; g++) total += shared[group][g][lane];
    a.partial[((int64_t)part * a.sums + group) * columns + column] = total;
}

/* dweight and dbias: `partial` summed over the parts. */
template <int width>
static __global__ void __launch_bounds__(TD_COLUMN_THREADS) join_kernel(gradient_args a, int64_t parts, int lanes, float *dweight, float *dbias)
{
    int64_t packs = a.s.columns / width, item = (int64_t)blockIdx.x * lanes + threadIdx.x % lanes;
    bool some = item < a.sums * packs;
    float total[width] = { 0 };
    if (!td_column_join<width>(a.partial + (some ? item : 0) * width, 0, some ? parts : 0, a.sums * packs, lanes, total, td_plus()) || !some)
        return;
    float *to = item < packs ? dweight + item * width : dbias + (item - packs) * width;
    #pragma unroll
    for (int i = 0; i < width; i++) to[i] = total[i];
}

enum { ANY_PARTS = 64, MOST_PARTS = 528 };

/* Blocks that take the rows in turn: each of their groups at least four, and no more than run at a time. */
static int64_t parts_of(int64_t rows, int groups, int most)
{
    int64_t parts = rows / (4 * groups);
    return parts < 1 ? 1 : parts > most ? most : parts;
}

template <int threads, int packs, int block, typename T> static int64_t launch_backward(const td_kernel *k, const gradient_args *a, int most)
{
    int64_t parts = parts_of(a->s.rows, block / threads, most);
    backward_kernel<threads, packs, block, T><<<(unsigned)parts, block, 0, td_stream(k)>>>((const T *)k->in[0].data, (T *)k->out[0].data, *a);
    return parts;
}

/* Gives the number of parts. */
template <typename T> static int64_t launch_backward_any(const td_kernel *k, const gradient_args *a)
{
    const T *x = (const T *)k->in[0].data;
    backward_any_kernel<T><<<td_blocks_for(a->s.rows, 1, 1), ANY_THREADS, 0, td_stream(k)>>>(x, (T *)k->out[0].data, *a);
    td_cuda_launched(k);
    int64_t parts = parts_of(a->s.rows, COLUMN_GROUPS, ANY_PARTS), blocks = (a->s.columns + LANES - 1) / LANES * parts;
    weights_kernel<T><<<(unsigned)blocks, TD_COLUMN_THREADS, 0, td_stream(k)>>>(x, *a, (int)parts);
    return parts;
}

template <typename T> static void backward(const td_kernel *k)
{
    norm_sizes s = sizes_of(k);
    constexpr int width = 16 / (int)sizeof(T);
    const td_norm_attr *attr = (const td_norm_attr *)k->attr;
    float *dweight = (float *)k->out[1].data, *dbias = attr->bias ? (float *)k->out[2].data : NULL;
    if (s.columns == 0) return;
    gradient_args a = {};
    a.s = s;
    a.held = td_rows_held(k, &k->out[0], (int)k->out[0].shape.rank - 1);
    a.weight = (const float *)k->in[1].data, a.dy = (const float *)k->in[2].data;
    a.added = attr->adds ? (const float *)k->in[3].data : NULL;
    a.narrow = attr->narrow ? k->out[k->outputs - 1].data : NULL;
    a.bf16 = attr->narrow == TD_BF16;
    a.sums = 1 + attr->bias;
    a.moments = (row_moments *)k->workspace;
    a.partial = (float *)(a.moments + (s.rows + 1) / 2 * 2);
    bool packed = s.columns % width == 0 && at_16_bytes(k->in[0].data) && at_16_bytes(a.weight) && at_16_bytes(a.dy) &&
                  at_16_bytes(k->out[0].data) && at_16_bytes(a.added) && at_16_bytes(a.narrow);
    int64_t parts = 0;
    if (s.rows == 0) parts = 0;
    else if (!packed || s.columns > 8192) parts = launch_backward_any<T>(k, &a);
    else if (s.columns <= 512) parts = launch_backward<32, 16 / width, 256, T>(k, &a, MOST_PARTS / 2);
    else if (s.columns <= 1024) parts = launch_backward<32, 32 / width, 128, T>(k, &a, MOST_PARTS * 3 / 4);
    else if (s.columns <= 2048) parts = launch_backward<128, 16 / width, 128, T>(k, &a, MOST_PARTS);
    else if (s.columns <= 4096) parts = launch_backward<256, 16 / width, 256, T>(k, &a, MOST_PARTS / 2);
    else parts = launch_backward<512, 16 / width, 512, T>(k, &a, MOST_PARTS / 4);
    td_cuda_launched(k);
    bool fours = s.columns % 4 == 0;
    int64_t items = a.sums * s.columns / (fours ? 4 : 1);
    int lanes = items < 4096 ? 8 : 32;
    unsigned blocks = td_blocks_for(items, lanes, 1);
    if (fours) join_kernel<4><<<blocks, TD_COLUMN_THREADS, 0, td_stream(k)>>>(a, parts, lanes, dweight, dbias);
    else join_kernel<1><<<blocks, TD_COLUMN_THREADS, 0, td_stream(k)>>>(a, parts, lanes, dweight, dbias);
    td_cuda_launched(k);
}

extern "C" bool td_norm_gradient_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)td;
    norm_sizes s = sizes_of(k);
    int64_t parts = parts_of(s.rows, 1, MOST_PARTS); /* groups of one: the most there are */
    int64_t sums = 1 + ((const td_norm_attr *)k->attr)->bias;
    out->workspace_bytes = (s.rows + 1) / 2 * 2 * (int64_t)sizeof(row_moments) + parts * sums * s.columns * (int64_t)sizeof(float);
    return true;
}

extern "C" void td_norm_gradient_cuda(const td_kernel *k) { TD_CUDA_FLOATS(k->in[0].dtype, backward<T>(k)) }
