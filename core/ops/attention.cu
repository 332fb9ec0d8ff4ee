/* Attention on a GPU, in f32 whatever the operands' dtype, for every form: blocks of queries against tiles of keys, so that no row of
 * scores is ever whole (Dao, Fu, Ermon, Rudra, Re: "FlashAttention", 2022).
 *
 * A warp has ROWS queries and a tile of 32 keys, one a lane; it passes over the tiles in order, so sums have one order. The backward goes
 * over queries for dq, and over keys, with tiles of queries, for dk and dv.
 */
#include "core/ops/attention_flash.cuh"
#include "core/ops/group.cuh"

enum { WARPS = 4, ROWS = 4, BLOCK = WARPS * ROWS, TILE = 32, THREADS = WARPS * 32, WIDEST = 256 };

/* Of BLOCK rows each. */
static __host__ __device__ __forceinline__ int64_t blocks_of(int64_t rows) { return (rows + BLOCK - 1) / BLOCK; }

/* `count` rows of `columns` to shared memory, `stride` apart, from row `first` on; rows from `limit` on are zeros: what no query may see
 * may hold anything. */
template <typename T>
static __device__ void load_rows(float *to, const void *from, const td_heads &x, int64_t sequence, int64_t head, int64_t first, int count, int64_t limit,
                                 int columns, int stride)
{
    for (int i = threadIdx.x; i < count * columns; i += THREADS) {
        int row = i / columns, column = i % columns;
        to[row * stride + column] = first + row < limit ? td_wide(((const T *)from)[element(x, sequence, head, first + row) + column]) : 0;
    }
}

static __device__ __forceinline__ float dot(const float *a, const float *b, int count)
{
    float sum = 0;
    for (int i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

/* ---- Forward: a block is BLOCK queries of one head */

template <typename T, int PARTS>
static __global__ void __launch_bounds__(THREADS) forward(const __grid_constant__ flash f, T *out)
{
    extern __shared__ float room[];
    int depth = (int)f.at.depth, values = (int)f.at.values, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *q = room, *keys = q + BLOCK * depth, *v = keys + TILE * (depth + 1);
    int64_t blocks = blocks_of(f.at.rows), at_head = blockIdx.x / blocks, first = blockIdx.x % blocks * BLOCK;
    int64_t head = at_head % f.at.heads, sequence = at_head / f.at.heads;
    int64_t shared = head / (f.at.heads / f.at.shared), limit = keys_of(f, sequence), position = position_of(f, sequence, first);
    keys_range range = range_of<BLOCK, TILE>(f, position, limit);
    load_rows<T>(q, f.q, f.at.q, sequence, head, first, BLOCK, f.at.rows, depth, depth);
    float most[ROWS], total[ROWS], sum[ROWS][PARTS];
    for (int r = 0; r < ROWS; r++) {
        most[r] = -INFINITY;
        total[r] = 0;
        for (int c = 0; c < PARTS; c++) sum[r][c] = 0;
    }
    for (int64_t tile = range.begin; tile < range.end; tile += TILE) {
        __syncthreads();
        load_rows<T>(keys, f.key, f.at.key, sequence, shared, tile, TILE, limit, depth, depth + 1);
        load_rows<T>(v, f.value, f.at.value, sequence, shared, tile, TILE, limit, values, values);
        __syncthreads();
        for (int r = 0; r < ROWS; r++) {
            int64_t row = first + warp * ROWS + r;
            bool seen = row < f.at.rows && sees(f, position + warp * ROWS + r, tile + lane, limit);
            float s = f.scale * dot(q + (warp * ROWS + r) * depth, keys + lane * (depth + 1), depth);
            float here = td_group_join<32>(seen ? s : -INFINITY, td_largest()), largest = td_largest()(most[r], here);
            if (largest == -INFINITY) continue; /* the whole warp: none is seen yet */
            float p = seen ? expf(s - largest) : 0, shrink = expf(most[r] - largest);
            most[r] = largest;
            total[r] = total[r] * shrink + td_group_join<32>(p, td_plus());
            p *= kept_of(f, sequence, head, row, tile + lane);
            for (int c = 0; c < PARTS; c++) sum[r][c] *= shrink;
            for (int j = 0; j < TILE; j++) {
                float weight = __shfl_sync(0xFFFFFFFF, p, j);
                for (int c = 0; c < PARTS; c++)
                    if (lane + 32 * c < values) sum[r][c] += weight * v[j * values + lane + 32 * c];
            }
        }
    }
    for (int r = 0; r < ROWS; r++) {
        int64_t row = first + warp * ROWS + r;
        if (row >= f.at.rows) continue;
        for (int c = 0; c < PARTS; c++)
            if (lane + 32 * c < values)
                out[element(f.at.o, sequence, head, row) + lane + 32 * c] = td_narrow<T>(total[r] > 0 ? sum[r][c] / total[r] : sum[r][c]);
        if (lane == 0) f.log_sums[(sequence * f.at.heads + head) * f.at.rows + row] = most[r] + logf(total[r]);
    }
}

/* ---- Backward */

/* sum(do o), a warp a query. */
template <typename T>
static __global__ void inner_products(const __grid_constant__ flash f)
{
    int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (at >= f.at.batch * f.at.heads * f.at.rows) return;
    int64_t row = at % f.at.rows, head = at / f.at.rows % f.at.heads, sequence = at / f.at.rows / f.at.heads;
    const T *o = (const T *)f.o + element(f.at.o, sequence, head, row), *dy = (const T *)f.dy + element(f.at.dy, sequence, head, row);
    float sum = 0;
    for (int64_t c = lane; c < f.at.values; c += 32) sum += td_wide(o[c]) * td_wide(dy[c]);
    sum = td_group_join<32>(sum, td_plus());
    if (lane == 0) f.inner[at] = sum;
}

template <typename T, typename U, int PARTS>
static __global__ void __launch_bounds__(THREADS) backward_queries(const __grid_constant__ flash f, U *dq)
{
    extern __shared__ float room[];
    int depth = (int)f.at.depth, values = (int)f.at.values, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *q = room, *dy = q + BLOCK * depth, *keys = dy + BLOCK * values, *v = keys + TILE * (depth + 1);
    int64_t blocks = blocks_of(f.at.rows), at_head = blockIdx.x / blocks, first = blockIdx.x % blocks * BLOCK;
    int64_t head = at_head % f.at.heads, sequence = at_head / f.at.heads;
    int64_t shared = head / (f.at.heads / f.at.shared), limit = keys_of(f, sequence), position = position_of(f, sequence, first);
    keys_range range = range_of<BLOCK, TILE>(f, position, limit);
    load_rows<T>(q, f.q, f.at.q, sequence, head, first, BLOCK, f.at.rows, depth, depth);
    load_rows<T>(dy, f.dy, f.at.dy, sequence, head, first, BLOCK, f.at.rows, values, values);
    float sum[ROWS][PARTS];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < PARTS; c++) sum[r][c] = 0;
    for (int64_t tile = range.begin; tile < range.end; tile += TILE) {
        __syncthreads();
        load_rows<T>(keys, f.key, f.at.key, sequence, shared, tile, TILE, limit, depth, depth + 1);
        load_rows<T>(v, f.value, f.at.value, sequence, shared, tile, TILE, limit, values, values + 1);
        __syncthreads();
        for (int r = 0; r < ROWS; r++) {
            int within = warp * ROWS + r;
            int64_t row = first + within, at = (sequence * f.at.heads + head) * f.at.rows + row;
            bool seen = row < f.at.rows && sees(f, position + within, tile + lane, limit);
            float ds = 0;
            if (seen) {
                float p = expf(f.scale * dot(q + within * depth, keys + lane * (depth + 1), depth) - f.log_sums[at]);
                float dp = dot(dy + within * values, v + lane * (values + 1), values) * kept_of(f, sequence, head, row, tile + lane);
                ds = f.scale * p * (dp - f.inner[at]);
            }
            for (int j = 0; j < TILE; j++) {
                float weight = __shfl_sync(0xFFFFFFFF, ds, j);
                for (int c = 0; c < PARTS; c++)
                    if (lane + 32 * c < depth) sum[r][c] += weight * keys[j * (depth + 1) + lane + 32 * c];
            }
        }
    }
    for (int r = 0; r < ROWS; r++) {
        int64_t row = first + warp * ROWS + r;
        for (int c = 0; c < PARTS; c++)
            if (row < f.at.rows && lane + 32 * c < depth) dq[element(f.at.dq, sequence, head, row) + lane + 32 * c] = td_narrow<U>(sum[r][c]);
    }
}

/* A block is BLOCK keys of one head of keys; the queries of all heads that share it follow one another. */
template <typename T, typename U, int PARTS>
static __global__ void __launch_bounds__(THREADS) backward_keys(const __grid_constant__ flash f, U *dk, U *dv)
{
    extern __shared__ float room[];
    int depth = (int)f.at.depth, values = (int)f.at.values, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *keys = room, *v = keys + BLOCK * depth, *q = v + BLOCK * values, *dy = q + TILE * (depth + 1);
    int64_t blocks = blocks_of(f.at.keys), at_head = blockIdx.x / blocks, first = blockIdx.x % blocks * BLOCK;
    int64_t shared = at_head % f.at.shared, sequence = at_head / f.at.shared;
    int64_t group = f.at.heads / f.at.shared, limit = keys_of(f, sequence), offset = position_of(f, sequence, 0);
    int64_t begin = 0, end = f.at.rows; /* of queries */
    if (f.causal && first - offset > 0) begin = (first - offset) / TILE * TILE;
    if (f.window && first + BLOCK - 1 + f.window - offset < end) end = first + BLOCK - 1 + f.window - offset;
    if (first >= limit) end = 0;
    load_rows<T>(keys, f.key, f.at.key, sequence, shared, first, BLOCK, f.at.keys, depth, depth);
    load_rows<T>(v, f.value, f.at.value, sequence, shared, first, BLOCK, f.at.keys, values, values);
    float sum_k[ROWS][PARTS], sum_v[ROWS][PARTS];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < PARTS; c++) sum_k[r][c] = sum_v[r][c] = 0;
    for (int64_t head = shared * group; head < (shared + 1) * group; head++)
        for (int64_t tile = begin; tile < end; tile += TILE) {
            __syncthreads();
            load_rows<T>(q, f.q, f.at.q, sequence, head, tile, TILE, f.at.rows, depth, depth + 1);
            load_rows<T>(dy, f.dy, f.at.dy, sequence, head, tile, TILE, f.at.rows, values, values + 1);
            __syncthreads();
            int64_t row = tile + lane, at = (sequence * f.at.heads + head) * f.at.rows + row;
            for (int r = 0; r < ROWS; r++) {
                int within = warp * ROWS + r;
                bool seen = row < f.at.rows && sees(f, offset + row, first + within, limit);
                float ds = 0, p = 0;
                if (seen) {
                    p = expf(f.scale * dot(keys + within * depth, q + lane * (depth + 1), depth) - f.log_sums[at]);
                    float kept = kept_of(f, sequence, head, row, first + within);
                    float dp = dot(v + within * values, dy + lane * (values + 1), values) * kept;
                    ds = f.scale * p * (dp - f.inner[at]);
                    p *= kept;
                }
                for (int j = 0; j < TILE; j++) {
                    float weight_k = __shfl_sync(0xFFFFFFFF, ds, j), weight_v = __shfl_sync(0xFFFFFFFF, p, j);
                    for (int c = 0; c < PARTS; c++) {
                        if (lane + 32 * c < depth) sum_k[r][c] += weight_k * q[j * (depth + 1) + lane + 32 * c];
                        if (lane + 32 * c < values) sum_v[r][c] += weight_v * dy[j * (values + 1) + lane + 32 * c];
                    }
                }
            }
        }
    for (int r = 0; r < ROWS; r++) {
        int64_t row = first + warp * ROWS + r;
        for (int c = 0; c < PARTS && row < f.at.keys; c++) {
            if (lane + 32 * c < depth) dk[element(f.at.dk, sequence, shared, row) + lane + 32 * c] = td_narrow<U>(sum_k[r][c]);
            if (lane + 32 * c < values) dv[element(f.at.dv, sequence, shared, row) + lane + 32 * c] = td_narrow<U>(sum_v[r][c]);
        }
    }
}

/* ---- Launches */

extern "C" bool td_attention_general_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    td_attention_layout at = td_attention_layout_of(k);
    if (at.depth > WIDEST || at.values > WIDEST) {
        td_fail(td, TD_ERROR_UNSUPPORTED, "%s: heads of %lld and %lld columns are too wide for a GPU: %d at most", k->op->name, (long long)at.depth,
                (long long)at.values, WIDEST);
        return false;
    }
    out->workspace_bytes = k->op == &td_op_attention ? 0 : at.batch * at.heads * at.rows * (int64_t)sizeof(float);
    return true;
}

/* `launch` with PARTS the number of columns a lane has. */
#define WITH_PARTS(f, ...)                                                                                     \
    do {                                                                                                       \
        int64_t widest = f.at.depth > f.at.values ? f.at.depth : f.at.values;                                  \
        if (widest <= 32) { constexpr int PARTS = 1; __VA_ARGS__; }                                            \
        else if (widest <= 64) { constexpr int PARTS = 2; __VA_ARGS__; }                                       \
        else if (widest <= 128) { constexpr int PARTS = 4; __VA_ARGS__; }                                      \
        else { constexpr int PARTS = 8; __VA_ARGS__; }                                                         \
    } while (0)

/* Head after head in one dimension, which a grid has most room in. */
static unsigned blocks_over(int64_t rows, int64_t heads) { return (unsigned)(blocks_of(rows) * heads); }

extern "C" void td_attention_general(const td_kernel *k)
{
    flash f = flash_of(k);
    if (!f.at.batch || !f.at.heads || !f.at.rows) return;
    size_t bytes = (size_t)(BLOCK * f.at.depth + TILE * (f.at.depth + 1 + f.at.values)) * sizeof(float);
    TD_CUDA_FLOATS(k->in[0].dtype, WITH_PARTS(f, LAUNCH((forward<T, PARTS>), blocks_over(f.at.rows, f.at.batch * f.at.heads), THREADS, bytes, f, (T *)k->out[0].data)));
    td_cuda_launched(k);
}

template <typename T, typename U>
static void launch_backward(const td_kernel *k, const flash &f)
{
    bool packed = ((const td_attention_attr *)k->attr)->rows & TD_ATTENTION_PACKED;
    U *dq = (U *)k->out[0].data, *dk = (U *)k->out[packed ? 0 : 1].data, *dv = (U *)k->out[packed ? 0 : 2].data;
    size_t bytes = (size_t)(BLOCK * (f.at.depth + f.at.values) + TILE * (f.at.depth + 1 + f.at.values + 1)) * sizeof(float);
    int64_t queries = f.at.batch * f.at.heads * f.at.rows;
    if (queries) {
        inner_products<T><<<td_blocks_for(queries * 32, THREADS, 1), THREADS, 0, td_stream(k)>>>(f);
        WITH_PARTS(f, LAUNCH((backward_queries<T, U, PARTS>), blocks_over(f.at.rows, f.at.batch * f.at.heads), THREADS, bytes, f, dq));
    }
    if (f.at.batch && f.at.shared && f.at.keys)
        WITH_PARTS(f, LAUNCH((backward_keys<T, U, PARTS>), blocks_over(f.at.keys, f.at.batch * f.at.shared), THREADS, bytes, f, dk, dv));
}

extern "C" void td_attention_gradient_general(const td_kernel *k)
{
    flash f = flash_of(k);
    if (k->out[0].dtype == TD_F32) {
        TD_CUDA_FLOATS(k->in[0].dtype, (launch_backward<T, float>(k, f)));
    } else {
        TD_CUDA_FLOATS(k->in[0].dtype, (launch_backward<T, T>(k, f)));
    }
    td_cuda_launched(k);
}
