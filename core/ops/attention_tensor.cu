/* Attention of 16-bit heads of up to 128 columns on tensor cores, every mask and dropout by global index (Dao: "FlashAttention-2", 2023).
 *
 * Four warps have BLOCK rows, 16 each, and pass over tiles of the other side in order: keys for o and dq, queries for dk and dv. So sums
 * have one order and a rerun gives the same bits; the price is that the backward makes the scores twice. Scores are in f32; probabilities
 * and what is multiplied again are rounded to the operands' dtype. Heads are padded with zeros to 32, 64 or 128 columns in shared memory.
 */
#include "core/ops/attention_tiles.cuh"

enum { WARPS = 4, THREADS = WARPS * 32, BLOCK = 64, WIDEST = 128 };

/* The order of rows in shared memory: their own, or that of a tile of keys, attention_lanes.h. */
enum order { IN_ORDER, AS_KEYS };

/* ROWS rows of `columns` from row `first` on, zeros from row `limit` and from `columns` to D; the copies are not waited for. */
template <typename T, int D, int ROWS, order ORDER = IN_ORDER>
static __device__ __forceinline__ void fetch(T *to, const T *from, int64_t stride, int64_t first, int64_t limit, int columns)
{
    enum { PARTS = D / 8 };
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * PARTS; i += THREADS) {
        int row = i / PARTS, column = i % PARTS * 8;
        int place = ORDER == AS_KEYS ? td_row_of_key(row) : row;
        fetch_part(to + place * row_of<D>::ELEMENTS, from, stride, first + row, limit, column, columns);
    }
}

/* ---- Forward */

static __device__ __forceinline__ float over_quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}

static __device__ __forceinline__ float over_quad_sum(float x)
{
    x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}

/* Which BLOCK rows of which head a block has; those with most to do under a causal mask come first. */
typedef struct place {
    int64_t sequence, head, first;
} place;

static __device__ __forceinline__ place place_of(int64_t rows, int64_t heads, bool last_first)
{
    int64_t blocks = (rows + BLOCK - 1) / BLOCK, block = blockIdx.x % blocks, head = blockIdx.x / blocks;
    return { head / heads, head % heads, (last_first ? blocks - 1 - block : block) * BLOCK };
}

/* Scores of one row, times `scale`, become powers of 2 over the largest so far; what was summed before shrinks to that. */
template <int D>
static __device__ __forceinline__ void soften(float (*s)[4], int half, span seen, float scale, float *most, float *total, float (*sum)[4])
{
    bool whole = is_whole(seen, TILE);
    float here = -INFINITY, part = 0;
#pragma unroll
    for (int n = 0; n < TILE / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float &x = s[n][2 * half + i];
            x = whole || holds(seen, td_key_of_column(n, threadIdx.x, i)) ? x * scale : -INFINITY;
            here = fmaxf(here, x);
        }
    float largest = fmaxf(*most, over_quad_max(here)), base = largest == -INFINITY ? 0 : largest, shrink = power(*most - base);
#pragma unroll
    for (int n = 0; n < TILE / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) part += s[n][2 * half + i] = power(s[n][2 * half + i] - base);
    *most = largest;
    *total = *total * shrink + part;
#pragma unroll
    for (int n = 0; n < D / 8; n++) sum[n][2 * half] *= shrink, sum[n][2 * half + 1] *= shrink;
}

template <typename T, int D, bool DROPS>
static __global__ void __launch_bounds__(THREADS, (D <= 64 ? 3 : 2)) forward(const __grid_constant__ flash f, T *out)
{
    enum { ROW = row_of<D>::ELEMENTS, STAGE = TILE * ROW };
    extern __shared__ __align__(16) char room[];
    T *q = (T *)room, *keys = q + BLOCK * ROW, *v = keys + 2 * BLOCK * ROW; /* keys and v: two stages */
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, columns = (int)f.at.depth;
    place at = place_of(f.at.rows, f.at.heads, true);
    int64_t shared = at.head / (f.at.heads / f.at.shared), limit = keys_of(f, at.sequence),
            position = position_of(f, at.sequence, at.first);
    keys_range range = range_of<BLOCK, TILE>(f, position, limit);
    const T *key_rows = (const T *)f.key + element(f.at.key, at.sequence, shared, 0),
            *value_rows = (const T *)f.value + element(f.at.value, at.sequence, shared, 0);
    const T *query_rows = (const T *)f.q + element(f.at.q, at.sequence, at.head, 0);
    td_device_random random = {};
    if (DROPS) random = td_random_on(f.run, f.draw);

    fetch<T, D, BLOCK>(q, query_rows, f.at.q.row, at.first, f.at.rows, columns);
    if (range.begin < range.end) {
        fetch<T, D, TILE, AS_KEYS>(keys, key_rows, f.at.key.row, range.begin, limit, columns);
        fetch<T, D, TILE, AS_KEYS>(v, value_rows, f.at.value.row, range.begin, limit, columns);
    }
    td_copies_end();
    float sum[D / 8][4], most[2] = { -INFINITY, -INFINITY }, total[2] = { 0, 0 }, scale = f.scale * LOG2_E;
    int64_t row[2] = { at.first + 16 * warp + lane / 4, at.first + 16 * warp + lane / 4 + 8 };
    uint64_t draw[2] = { 0, 0 };
    for (int half = 0; DROPS && half < 2; half++) draw[half] = draw_of(f, at.sequence, at.head, row[half]);
    clear<D / 8>(sum);
    int stage = 0;
    for (int64_t tile = range.begin; tile < range.end; tile += TILE, stage = STAGE - stage) {
        if (tile + TILE < range.end) {
            fetch<T, D, TILE, AS_KEYS>(keys + (STAGE - stage), key_rows, f.at.key.row, tile + TILE, limit, columns);
            fetch<T, D, TILE, AS_KEYS>(v + (STAGE - stage), value_rows, f.at.value.row, tile + TILE, limit, columns);
        }
        td_copies_end();
        td_copies_wait<1>();
        __syncthreads();
        float s[TILE / 8][4];
        clear<TILE / 8>(s);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t a[4];
            first_operand<T, D>(a, q, plain_row(16 * warp), k);
            by_rows<T, D, TILE>(&s, &a, keys + stage, k);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            span seen = keys_seen(f, position + row[half] - at.first, tile, limit, row[half] < f.at.rows);
            soften<D>(s, half, seen, scale, &most[half], &total[half], sum);
        }
        if (DROPS) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float kept[TILE / 8][4];
                keys_kept(f, random, draw[half] + (uint64_t)tile, half, kept);
#pragma unroll
                for (int n = 0; n < TILE / 8; n++) s[n][2 * half] *= kept[n][2 * half], s[n][2 * half + 1] *= kept[n][2 * half + 1];
            }
        }
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            uint32_t a[4];
            as_operand<T>(a, s, k);
            by_columns<T, D>(&sum, &a, v + stage, k);
        }
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float all = over_quad_sum(total[half]), factor = all > 0 || all != all ? 1 / all : 0;
        if (row[half] >= f.at.rows) continue;
        T *to = out + element(f.at.o, at.sequence, at.head, row[half]);
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            if (8 * n < columns)
                *(uint32_t *)(to + 8 * n + 2 * (lane % 4)) = td_pair<T>(sum[n][2 * half] * factor, sum[n][2 * half + 1] * factor);
        if (lane % 4 == 0)
            f.log_sums[(at.sequence * f.at.heads + at.head) * f.at.rows + row[half]] = factor != 0 ? (most[half] + log2f(all)) * LN_2 : 0;
    }
}

/* ---- Backward */

/* dq, and sum(do o) for the other half of the backward. */
template <typename T, int D, bool DROPS>
static __global__ void __launch_bounds__(THREADS, (D <= 64 ? 3 : 2)) backward_queries(const __grid_constant__ flash f, void *dq, bool wide)
{
    enum { ROW = row_of<D>::ELEMENTS, STAGE = TILE * ROW };
    extern __shared__ __align__(16) char room[];
    T *q = (T *)room, *dy = q + BLOCK * ROW, *keys = dy + BLOCK * ROW, *v = keys + 2 * BLOCK * ROW; /* keys and v: two stages */
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, columns = (int)f.at.depth;
    place at = place_of(f.at.rows, f.at.heads, true);
    int64_t shared = at.head / (f.at.heads / f.at.shared), limit = keys_of(f, at.sequence),
            position = position_of(f, at.sequence, at.first);
    keys_range range = range_of<BLOCK, TILE>(f, position, limit);
    const T *key_rows = (const T *)f.key + element(f.at.key, at.sequence, shared, 0),
            *value_rows = (const T *)f.value + element(f.at.value, at.sequence, shared, 0);
    td_device_random random = {};
    if (DROPS) random = td_random_on(f.run, f.draw);

    fetch<T, D, BLOCK>(q, (const T *)f.q + element(f.at.q, at.sequence, at.head, 0), f.at.q.row, at.first, f.at.rows, columns);
    fetch<T, D, BLOCK>(dy, (const T *)f.dy + element(f.at.dy, at.sequence, at.head, 0), f.at.dy.row, at.first, f.at.rows, columns);
    if (range.begin < range.end) {
        fetch<T, D, TILE, AS_KEYS>(keys, key_rows, f.at.key.row, range.begin, limit, columns);
        fetch<T, D, TILE, AS_KEYS>(v, value_rows, f.at.value.row, range.begin, limit, columns);
    }
    td_copies_end();
    int64_t numbers = (at.sequence * f.at.heads + at.head) * f.at.rows, own = at.first + 16 * warp + lane / 2;
    float product = inner_product<T, D>(f, at.sequence, at.head, own, columns);
    if (lane % 2 == 0 && own < f.at.rows) f.inner[numbers + own] = product;
    float inner[2] = { __shfl_sync(0xFFFFFFFF, product, lane / 4 * 2), __shfl_sync(0xFFFFFFFF, product, lane / 4 * 2 + 16) }, log_sum[2];
    int64_t row[2] = { at.first + 16 * warp + lane / 4, at.first + 16 * warp + lane / 4 + 8 };
    uint64_t draw[2] = { 0, 0 };
    for (int half = 0; DROPS && half < 2; half++) draw[half] = draw_of(f, at.sequence, at.head, row[half]);
    for (int half = 0; half < 2; half++) log_sum[half] = row[half] < f.at.rows ? f.log_sums[numbers + row[half]] * LOG2_E : 0;
    float sum[D / 8][4], scale = f.scale * LOG2_E;
    clear<D / 8>(sum);
    int stage = 0;
    for (int64_t tile = range.begin; tile < range.end; tile += TILE, stage = STAGE - stage) {
        if (tile + TILE < range.end) {
            fetch<T, D, TILE, AS_KEYS>(keys + (STAGE - stage), key_rows, f.at.key.row, tile + TILE, limit, columns);
            fetch<T, D, TILE, AS_KEYS>(v + (STAGE - stage), value_rows, f.at.value.row, tile + TILE, limit, columns);
        }
        td_copies_end();
        td_copies_wait<1>();
        __syncthreads();
        float s[TILE / 8][4], dp[TILE / 8][4];
        clear<TILE / 8>(s);
        clear<TILE / 8>(dp);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t a[4];
            first_operand<T, D>(a, q, plain_row(16 * warp), k);
            by_rows<T, D, TILE>(&s, &a, keys + stage, k);
            first_operand<T, D>(a, dy, plain_row(16 * warp), k);
            by_rows<T, D, TILE>(&dp, &a, v + stage, k);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            span seen = keys_seen(f, position + row[half] - at.first, tile, limit, row[half] < f.at.rows);
            bool whole = is_whole(seen, TILE);
            float kept[TILE / 8][4];
            if (DROPS) keys_kept(f, random, draw[half] + (uint64_t)tile, half, kept);
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int j = 2 * half + i;
                    float p = power(s[n][j] * scale - log_sum[half]), slope = DROPS ? dp[n][j] * kept[n][j] : dp[n][j];
                    s[n][j] = whole || holds(seen, td_key_of_column(n, lane, i)) ? p * (slope - inner[half]) : 0;
                }
        }
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            uint32_t a[4];
            as_operand<T>(a, s, k);
            by_columns<T, D>(&sum, &a, keys + stage, k);
        }
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (row[half] < f.at.rows)
            store_row<T, D>(dq, wide, element(f.at.dq, at.sequence, at.head, row[half]), sum, half, f.scale, columns);
}

/* The queries that see some of BLOCK keys, tile after tile, of all heads that share the keys. */
typedef struct walk {
    int64_t begin, tiles;                     /* of one head */
} walk;

template <int N> static __device__ __forceinline__ walk walk_of(const flash &f, int64_t first, int64_t offset, int64_t limit)
{
    int64_t begin = 0, end = f.at.rows;
    if (f.causal && first - offset > 0) begin = (first - offset) / N * N;
    if (f.window && !f.causal && first - f.window + 1 - offset > 0) begin = (first - f.window + 1 - offset) / N * N;
    if (f.window && first + BLOCK - 1 + f.window - offset < end) end = first + BLOCK - 1 + f.window - offset;
    if (first >= limit || end <= begin) return { begin, 0 };
    return { begin, (end - begin + N - 1) / N };
}

/* A tile of N queries: their rows, those of do, and their numbers. */
template <typename T, int D, int N> struct queries_tile {
    T q[N * row_of<D>::ELEMENTS], dy[N * row_of<D>::ELEMENTS];
    float log_sum[N], inner[N];
};

template <typename T, int D, int N>
static __device__ __forceinline__ void fetch_queries(queries_tile<T, D, N> *to, const flash &f, place at, int64_t first_head, walk w,
                                                     int64_t step)
{
    int64_t head = first_head + step / w.tiles, first = w.begin + step % w.tiles * N,
            numbers = (at.sequence * f.at.heads + head) * f.at.rows;
    fetch<T, D, N>(to->q, (const T *)f.q + element(f.at.q, at.sequence, head, 0), f.at.q.row, first, f.at.rows, (int)f.at.depth);
    fetch<T, D, N>(to->dy, (const T *)f.dy + element(f.at.dy, at.sequence, head, 0), f.at.dy.row, first, f.at.rows, (int)f.at.depth);
    int i = threadIdx.x % N;
    bool valid = first + i < f.at.rows;
    if (threadIdx.x < N)
        td_copy_4(td_shared_address(&to->log_sum[i]), valid ? f.log_sums + numbers + first + i : f.log_sums, valid);
    else if (threadIdx.x < 2 * N)
        td_copy_4(td_shared_address(&to->inner[i]), valid ? f.inner + numbers + first + i : f.inner, valid);
}

/* dk and dv of BLOCK keys: scores have a key a row and a query a column. */
template <typename T, int D, int N, bool DROPS>
static __global__ void __launch_bounds__(THREADS, (D <= 64 ? 3 : 2))
    backward_keys(const __grid_constant__ flash f, void *dk, void *dv, bool wide)
{
    enum { ROW = row_of<D>::ELEMENTS };
    static_assert(N == 32, "a lane draws for one of eight columns");
    extern __shared__ __align__(16) char room[];
    T *keys = (T *)room, *v = keys + BLOCK * ROW;
    queries_tile<T, D, N> *tiles = (queries_tile<T, D, N> *)(v + BLOCK * ROW);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, columns = (int)f.at.depth;
    place at = place_of(f.at.keys, f.at.shared, false);
    int64_t group = f.at.heads / f.at.shared, first_head = at.head * group, limit = keys_of(f, at.sequence),
            offset = position_of(f, at.sequence, 0);
    walk w = walk_of<N>(f, at.first, offset, limit);
    td_device_random random = {};
    if (DROPS) random = td_random_on(f.run, f.draw);

    fetch<T, D, BLOCK>(keys, (const T *)f.key + element(f.at.key, at.sequence, at.head, 0), f.at.key.row, at.first, limit, columns);
    fetch<T, D, BLOCK>(v, (const T *)f.value + element(f.at.value, at.sequence, at.head, 0), f.at.value.row, at.first, limit, columns);
    if (w.tiles) fetch_queries<T, D, N>(&tiles[0], f, at, first_head, w, 0);
    td_copies_end();
    float sum_k[D / 8][4], sum_v[D / 8][4];
    clear<D / 8>(sum_k);
    clear<D / 8>(sum_v);
    int low = 16 * warp + lane / 4; /* and the one 8 after it */
    for (int64_t step = 0; step < w.tiles * group; step++) {
        const queries_tile<T, D, N> *here = &tiles[step % 2];
        if (step + 1 < w.tiles * group) fetch_queries<T, D, N>(&tiles[(step + 1) % 2], f, at, first_head, w, step + 1);
        td_copies_end();
        td_copies_wait<1>();
        __syncthreads();
        float s[N / 8][4], dp[N / 8][4];
        clear<N / 8>(s);
        clear<N / 8>(dp);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t a[4];
            first_operand<T, D>(a, keys, plain_row(16 * warp), k);
            by_rows<T, D, N>(&s, &a, here->q, k);
            first_operand<T, D>(a, v, plain_row(16 * warp), k);
            by_rows<T, D, N>(&dp, &a, here->dy, k);
        }
        int64_t head = first_head + step / w.tiles, tile = w.begin + step % w.tiles * N;
        uint32_t drawn = 0; /* of one query; seven other lanes have it for the others */
        if (DROPS) {
            uint64_t row = draw_of(f, at.sequence, head, tile + td_query_of_lane(lane));
            drawn = sixteen_kept(f, random, row + (uint64_t)(at.first + 16 * warp));
        }
        slopes_of_keys<N, DROPS>(f, s, dp, here->log_sum, here->inner, at.first + low, offset, tile, limit, drawn);
#pragma unroll
        for (int k = 0; k < N / 16; k++) {
            uint32_t a[4];
            as_operand<T>(a, s, k);
            by_columns<T, D>(&sum_v, &a, here->dy, k);
            as_operand<T>(a, dp, k);
            by_columns<T, D>(&sum_k, &a, here->q, k);
        }
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t key = at.first + low + 8 * half;
        if (key >= f.at.keys) continue;
        store_row<T, D>(dk, wide, element(f.at.dk, at.sequence, at.head, key), sum_k, half, f.scale, columns);
        store_row<T, D>(dv, wide, element(f.at.dv, at.sequence, at.head, key), sum_v, half, 1, columns);
    }
}

/* ---- Launches */

extern "C" bool td_attention_tensor_serves(const td_kernel *k)
{
    td_attention_layout at = td_attention_layout_of(k);
    bool sizes = at.depth == at.values && at.depth > 0 && at.depth % 8 == 0 && at.depth <= WIDEST;
    return td_is_narrow(k->in[0].dtype) && td_attention_aligned(k, &at) && sizes;
}

static bool blocks_for(int64_t rows, int64_t heads, unsigned *blocks)
{
    int64_t count = (rows + BLOCK - 1) / BLOCK * heads;
    *blocks = (unsigned)count;
    return count > 0;
}

template <typename T, int D, bool DROPS> static void launch_forward(const td_kernel *k, const flash &f)
{
    unsigned blocks;
    if (blocks_for(f.at.rows, f.at.batch * f.at.heads, &blocks))
        LAUNCH((forward<T, D, DROPS>), blocks, THREADS, 5 * BLOCK * row_of<D>::ELEMENTS * sizeof(T), f, (T *)k->out[0].data);
}

template <typename T, int D, bool DROPS> static void launch_backward(const td_kernel *k, const flash &f)
{
    enum { N = 32 }; /* queries a tile: what registers hold beside the sums */
    bool packed = ((const td_attention_attr *)k->attr)->rows & TD_ATTENTION_PACKED, wide = k->out[0].dtype == TD_F32;
    unsigned blocks;
    if (blocks_for(f.at.rows, f.at.batch * f.at.heads, &blocks))
        LAUNCH((backward_queries<T, D, DROPS>), blocks, THREADS, 6 * BLOCK * row_of<D>::ELEMENTS * sizeof(T), f, k->out[0].data, wide);
    if (blocks_for(f.at.keys, f.at.batch * f.at.shared, &blocks))
        LAUNCH((backward_keys<T, D, N, DROPS>), blocks, THREADS, 2 * BLOCK * row_of<D>::ELEMENTS * sizeof(T) + 2 * sizeof(queries_tile<T, D, N>), f,
               k->out[packed ? 0 : 1].data, k->out[packed ? 0 : 2].data, wide);
}

extern "C" void td_attention_tensor(const td_kernel *k)
{
    flash f = flash_of(k);
    WITH_FORM(k, f, (launch_forward<T, D, DROPS>(k, f)));
    td_cuda_launched(k);
}

extern "C" void td_attention_gradient_tensor(const td_kernel *k)
{
    flash f = flash_of(k);
    WITH_FORM(k, f, (launch_backward<T, D, DROPS>(k, f)));
    td_cuda_launched(k);
}
