/* Attention's backward for heads that fit into a multiprocessor's shared memory whole: 16-bit ones of up to 64 columns, 256 queries and 256
 * keys, which no other head shares. Every mask, and dropout by global index.
 *
 * A block has one head of one sequence, a warp two groups of 16 keys of it, whose dk and dv stay in its registers: one from either end, since
 * under a causal mask the first keys have the most to do and the last the least. Queries come in steps of STEP: each warp makes the scores of
 * its keys once, adds to dk and dv, and leaves the scores' gradient in shared memory, rounded to the operands' dtype; then the warps share out
 * the step's dq among them, whose sums go over the keys in order. So a rerun gives the same bits. Two tiles of scores' gradients take turns,
 * which leaves one barrier a step.
 */
#include "core/ops/attention_tiles.cuh"

enum {
    PART = 32,                                /* queries whose scores a warp has at a time */
    STEP = 2 * PART,                          /* queries between two barriers */
    GROUP = 16,                               /* keys */
    GROUPS = 2,                               /* a warp */
    OWN = GROUP * GROUPS,                     /* keys a warp */
    MOST_WARPS = 8,
    MOST_ROWS = 256,                          /* of queries and of keys */
    WIDEST = 64,
    SLOPE_ROW = STEP + 8,                     /* elements a key of a tile of scores' gradients; eight rows lie in different banks */
};

/* The first key of this warp's group g. */
static __device__ __forceinline__ int first_key(int g)
{
    int warp = threadIdx.x / 32, groups = blockDim.x / 32 * GROUPS;
    return GROUP * (g == 0 ? warp : groups - 1 - warp);
}

static __host__ __device__ __forceinline__ int whole_parts(int64_t rows) { return (int)((rows + PART - 1) / PART) * PART; }

/* ---- Shared memory */

/* Which head of which sequence a block has. */
typedef struct place {
    int64_t sequence, head;
} place;

/* A head in shared memory, in whole parts; what is no row is zeros. A row of q and one of do lie beside each other, keys and v likewise. */
template <typename T, int D> struct whole_head {
    enum { ROW = row_of<2 * D>::ELEMENTS };
    T *q, *dy, *keys, *v, *slopes;            /* slopes: two tiles */
    float *log_sum, *inner;                   /* a number a query */
};

template <typename T, int D> static __host__ __device__ __forceinline__ int64_t shared_bytes(int64_t rows, int64_t keys)
{
    int64_t queries = whole_parts(rows), own = whole_parts(keys);
    return ((queries + own) * whole_head<T, D>::ROW + 2 * own * SLOPE_ROW) * (int64_t)sizeof(T) + 2 * queries * (int64_t)sizeof(float);
}

template <typename T, int D> static __device__ __forceinline__ whole_head<T, D> place_in(char *room, const flash &f)
{
    int queries = whole_parts(f.at.rows), keys = whole_parts(f.at.keys);
    whole_head<T, D> h;
    h.q = (T *)room;
    h.dy = h.q + D;
    h.keys = h.q + queries * h.ROW;
    h.v = h.keys + D;
    h.slopes = h.keys + keys * h.ROW;
    h.log_sum = (float *)(h.slopes + 2 * keys * SLOPE_ROW);
    h.inner = h.log_sum + queries;
    return h;
}

/* Rows [begin, end) of a head, of which there are `limit`; the copies are not waited for. */
template <typename T, int D>
static __device__ __forceinline__ void fetch_rows(T *to, const T *from, int64_t stride, int begin, int end, int64_t limit, int columns)
{
    enum { PARTS = D / 8 };
    for (int i = begin * PARTS + threadIdx.x; i < end * PARTS; i += blockDim.x)
        fetch_part(to + i / PARTS * whole_head<T, D>::ROW, from, stride, i / PARTS, limit, i % PARTS * 8, columns);
}

template <typename T, int D>
static __device__ __forceinline__ void fetch_queries(const whole_head<T, D> &to, const flash &f, place at, int begin, int end)
{
    int columns = (int)f.at.depth;
    const T *q = (const T *)f.q + element(f.at.q, at.sequence, at.head, 0), *dy = (const T *)f.dy + element(f.at.dy, at.sequence, at.head, 0);
    fetch_rows<T, D>(to.q, q, f.at.q.row, begin, end, f.at.rows, columns);
    fetch_rows<T, D>(to.dy, dy, f.at.dy.row, begin, end, f.at.rows, columns);
}

template <typename T, int D>
static __device__ __forceinline__ void fetch_keys(const whole_head<T, D> &to, const flash &f, place at, int begin, int end)
{
    int64_t limit = keys_of(f, at.sequence);
    int columns = (int)f.at.depth;
    const T *keys = (const T *)f.key + element(f.at.key, at.sequence, at.head, 0),
            *v = (const T *)f.value + element(f.at.value, at.sequence, at.head, 0);
    fetch_rows<T, D>(to.keys, keys, f.at.key.row, begin, end, limit, columns);
    fetch_rows<T, D>(to.v, v, f.at.value.row, begin, end, limit, columns);
}

/* The queries' sums, of exponentials and of do o. */
template <typename T, int D> static __device__ __forceinline__ void find_sums(const whole_head<T, D> &to, const flash &f, place at)
{
    int64_t numbers = (at.sequence * f.at.heads + at.head) * f.at.rows;
    int queries = whole_parts(f.at.rows);
    for (int row = threadIdx.x; row < queries; row += blockDim.x) to.log_sum[row] = row < f.at.rows ? f.log_sums[numbers + row] : 0;
    for (int row = threadIdx.x / 2; row < queries; row += blockDim.x / 2) {
        float product = inner_product<T, D>(f, at.sequence, at.head, row, (int)f.at.depth);
        if (threadIdx.x % 2 == 0) to.inner[row] = product;
    }
}

/* ---- Masks */

/* The keys that queries of the part see, and those beside them in their groups, in twos. */
static __device__ __forceinline__ keys_range keys_of_part(const flash &f, int64_t sequence, int64_t part, int64_t limit)
{
    if (part >= f.at.rows) return { 0, 0 };
    keys_range range = range_of<PART, OWN>(f, position_of(f, sequence, part), limit);
    if (range.end <= range.begin) return { 0, 0 };
    return { range.begin, (range.end + OWN - 1) / OWN * OWN };
}

static __device__ __forceinline__ bool is_among(keys_range seen, int key) { return key >= seen.begin && key < seen.end; }

/* ---- Products */

/* Scores of COUNT of this warp's groups of keys, from group FIRST on, and the slopes of the kept weights: a key a row, a query of a part a column. */
template <typename T, int D, int FIRST, int COUNT>
static __device__ __forceinline__ void multiply_part(float (*s)[PART / 8][4], float (*dp)[PART / 8][4], const whole_head<T, D> &h, int part)
{
#pragma unroll
    for (int g = 0; g < COUNT; g++) {
        clear<PART / 8>(s[g]);
        clear<PART / 8>(dp[g]);
    }
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[COUNT][4];
#pragma unroll
        for (int g = 0; g < COUNT; g++) first_operand<T, 2 * D>(a[g], h.keys, plain_row(first_key(FIRST + g)), k);
        by_rows<T, 2 * D, PART, COUNT>(s, a, h.q + part * h.ROW, k);
#pragma unroll
        for (int g = 0; g < COUNT; g++) first_operand<T, 2 * D>(a[g], h.v, plain_row(first_key(FIRST + g)), k);
        by_rows<T, 2 * D, PART, COUNT>(dp, a, h.dy + part * h.ROW, k);
    }
}

/* Queries 16 k to 16 k + 15 of 16 keys' scores' gradient, as a first operand, to the keys' rows of a tile. */
template <typename T> static __device__ __forceinline__ void store_slopes(T *to, const uint32_t a[4], int k)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++)
        *(uint32_t *)(to + (lane / 4 + i % 2 * 8) * SLOPE_ROW + 16 * k + i / 2 * 8 + 2 * (lane % 4)) = a[i];
}

/* What a part of the queries adds to dk and dv of those keys; the scores' gradient goes to `slopes`, at the part's column. */
template <typename T, int D, bool DROPS, int FIRST, int COUNT>
static __device__ __forceinline__ void add_part(float (*sum_k)[D / 8][4], float (*sum_v)[D / 8][4], const whole_head<T, D> &h, T *slopes,
                                                const flash &f, place at, int part, td_device_random random)
{
    int lane = threadIdx.x % 32;
    int64_t offset = position_of(f, at.sequence, 0), limit = keys_of(f, at.sequence);
    uint64_t draw = DROPS ? draw_of(f, at.sequence, at.head, part + td_query_of_lane(lane)) : 0;
    uint32_t drawn[COUNT];
#pragma unroll
    for (int g = 0; g < COUNT; g++) drawn[g] = DROPS ? sixteen_kept(f, random, draw + first_key(FIRST + g)) : 0;
    float s[COUNT][PART / 8][4], dp[COUNT][PART / 8][4];
    multiply_part<T, D, FIRST, COUNT>(s, dp, h, part);
    uint32_t weights[PART / 16][COUNT][4], slope[PART / 16][COUNT][4];
#pragma unroll
    for (int g = 0; g < COUNT; g++) {
        int first = first_key(FIRST + g);
        slopes_of_keys<PART, DROPS>(f, s[g], dp[g], h.log_sum + part, h.inner + part, first + lane / 4, offset, part, limit, drawn[g]);
#pragma unroll
        for (int k = 0; k < PART / 16; k++) {
            as_operand<T>(weights[k][g], s[g], k);
            as_operand<T>(slope[k][g], dp[g], k);
            store_slopes(slopes + first * SLOPE_ROW, slope[k][g], k);
        }
    }
#pragma unroll
    for (int k = 0; k < PART / 16; k++) {
        by_columns<T, D, COUNT, whole_head<T, D>::ROW>(sum_v + FIRST, weights[k], h.dy + part * h.ROW, k);
        by_columns<T, D, COUNT, whole_head<T, D>::ROW>(sum_k + FIRST, slope[k], h.q + part * h.ROW, k);
    }
}

/* sum[r][n] += the slopes of 32 keys, of 16 queries from column 16 r on, times columns 8 n to 8 n + 7 of those keys. */
template <typename T, int D, int COLUMNS>
static __device__ __forceinline__ void add_keys(float (*sum)[COLUMNS / 8][4], const T *slopes, const T *keys)
{
    int lane = threadIdx.x % 32;
    uint32_t a[PART / 16][2][4];
#pragma unroll
    for (int r = 0; r < PART / 16; r++)
#pragma unroll
        for (int k = 0; k < 2; k++)
            td_load_transposed(a[r][k], td_shared_address(slopes + (16 * k + lane / 16 * 8 + lane % 8) * SLOPE_ROW + 16 * r + lane / 8 % 2 * 8));
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) {
        uint32_t b[4];
        td_load_transposed(b, td_shared_address(keys + lane * whole_head<T, D>::ROW + 8 * n));
#pragma unroll
        for (int r = 0; r < PART / 16; r++) {
            td_multiply_add<T>(sum[r][n], a[r][0], b[0], b[1]);
            td_multiply_add<T>(sum[r][n], a[r][1], b[2], b[3]);
        }
    }
}

/* This warp's share of a step's dq: COLUMNS columns of one of its two parts. */
template <typename T, int D, int COLUMNS>
static __device__ __forceinline__ void store_dq(void *dq, bool wide, const whole_head<T, D> &h, const T *slopes, const flash &f, place at, int step)
{
    enum { ACROSS = D / COLUMNS };            /* warps a part */
    int warp = threadIdx.x / 32, half = warp / ACROSS, part = step + half * PART, column = warp % ACROSS * COLUMNS;
    keys_range seen = keys_of_part(f, at.sequence, part, keys_of(f, at.sequence));
    float sum[PART / 16][COLUMNS / 8][4];
#pragma unroll
    for (int r = 0; r < PART / 16; r++) clear<COLUMNS / 8>(sum[r]);
    for (int key = (int)seen.begin; key < (int)seen.end; key += OWN)
        add_keys<T, D, COLUMNS>(sum, slopes + key * SLOPE_ROW + half * PART, h.keys + key * h.ROW + column);
#pragma unroll
    for (int r = 0; r < PART / 8; r++) {
        int64_t row = part + 8 * r + threadIdx.x % 32 / 4;
        if (row < f.at.rows)
            store_row<T, COLUMNS>(dq, wide, element(f.at.dq, at.sequence, at.head, row) + column, sum[r / 2], r % 2, f.scale,
                                  (int)f.at.depth - column);
    }
}

/* dk and dv of this warp's keys. */
template <typename T, int D>
static __device__ __forceinline__ void store_keys(void *dk, void *dv, bool wide, float (*sum_k)[D / 8][4], float (*sum_v)[D / 8][4],
                                                 const flash &f, place at)
{
#pragma unroll
    for (int r = 0; r < 2 * GROUPS; r++) {
        int64_t key = first_key(r / 2) + r % 2 * 8 + threadIdx.x % 32 / 4;
        if (key >= f.at.keys) continue;
        store_row<T, D>(dk, wide, element(f.at.dk, at.sequence, at.head, key), sum_k[r / 2], r % 2, f.scale, (int)f.at.depth);
        store_row<T, D>(dv, wide, element(f.at.dv, at.sequence, at.head, key), sum_v[r / 2], r % 2, 1, (int)f.at.depth);
    }
}

/* ---- The kernel */

/* Rows of shared memory that the first step needs: of queries and of keys. */
static __device__ __forceinline__ int first_queries(const flash &f) { return f.at.rows < STEP ? whole_parts(f.at.rows) : STEP; }

static __device__ __forceinline__ int first_keys(const flash &f, int64_t sequence, int64_t limit)
{
    int end = 0;
    for (int part = 0; part < STEP; part += PART) {
        keys_range seen = keys_of_part(f, sequence, part, limit);
        if (seen.end > end) end = (int)seen.end;
    }
    return end;
}

/* All copies are under way when it returns, in two groups: what the first step needs, and the rest. */
template <typename T, int D> static __device__ __forceinline__ void fetch_head(const whole_head<T, D> &to, const flash &f, place at, int64_t limit)
{
    int queries = first_queries(f), keys = first_keys(f, at.sequence, limit);
    fetch_keys(to, f, at, 0, keys);
    fetch_queries(to, f, at, 0, queries);
    td_copies_end();
    fetch_queries(to, f, at, queries, whole_parts(f.at.rows));
    fetch_keys(to, f, at, keys, whole_parts(f.at.keys));
    td_copies_end();
}

/* For up to WARPS * OWN keys. */
template <typename T, int D, int WARPS, bool DROPS>
static __global__ void __launch_bounds__(WARPS * 32, MOST_WARPS / WARPS)
    backward(const __grid_constant__ flash f, void *dq, void *dk, void *dv, bool wide)
{
    extern __shared__ __align__(16) char room[];
    whole_head<T, D> h = place_in<T, D>(room, f);
    place at = { blockIdx.x / f.at.heads, blockIdx.x % f.at.heads };
    int64_t limit = keys_of(f, at.sequence);
    int tile = whole_parts(f.at.keys) * SLOPE_ROW;
    td_device_random random = {};
    if (DROPS) random = td_random_on(f.run, f.draw);

    fetch_head(h, f, at, limit);
    find_sums(h, f, at);
    float sum_k[GROUPS][D / 8][4], sum_v[GROUPS][D / 8][4];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        clear<D / 8>(sum_k[g]);
        clear<D / 8>(sum_v[g]);
    }
    td_copies_wait<1>();
    __syncthreads();
    for (int step = 0; step < f.at.rows; step += STEP) {
        T *slopes = h.slopes + step / STEP % 2 * tile;
        for (int half = 0; half < 2; half++) {
            int part = step + half * PART;
            keys_range seen = keys_of_part(f, at.sequence, part, limit);
            bool low = is_among(seen, first_key(0)), high = is_among(seen, first_key(1));
            if (low && high) add_part<T, D, DROPS, 0, 2>(sum_k, sum_v, h, slopes + half * PART, f, at, part, random);
            else if (low) add_part<T, D, DROPS, 0, 1>(sum_k, sum_v, h, slopes + half * PART, f, at, part, random);
            else if (high) add_part<T, D, DROPS, 1, 1>(sum_k, sum_v, h, slopes + half * PART, f, at, part, random);
        }
        td_copies_wait<0>(); /* what the steps after the first need */
        __syncthreads();
        store_dq<T, D, D / (WARPS / 2)>(dq, wide, h, slopes, f, at, step);
    }
    td_copies_wait<0>(); /* of what has no queries */
    store_keys<T, D>(dk, dv, wide, sum_k, sum_v, f, at);
}

/* ---- Launches */

extern "C" bool td_attention_whole_serves(const td_context *td, const td_kernel *k)
{
    td_attention_layout at = td_attention_layout_of(k);
    bool has_room = td->gpu.major == 9 || td->gpu.major == 10; /* 227 KiB of shared memory a block, as few others have */
    bool sizes = at.depth <= WIDEST && at.rows <= MOST_ROWS && at.keys <= MOST_ROWS && at.heads == at.shared;
    return has_room && sizes && td_attention_tensor_serves(k);
}

template <typename T, int D, int WARPS, bool DROPS> static void launch_warps(const td_kernel *k, const flash &f)
{
    bool packed = ((const td_attention_attr *)k->attr)->rows & TD_ATTENTION_PACKED, wide = k->out[0].dtype == TD_F32;
    unsigned blocks = (unsigned)(f.at.batch * f.at.heads);
    static_assert(MOST_WARPS * OWN == MOST_ROWS && OWN == PART, "");
    if (blocks)
        LAUNCH((backward<T, D, WARPS, DROPS>), blocks, WARPS * 32, (shared_bytes<T, D>(f.at.rows, f.at.keys)), f, k->out[0].data,
               k->out[packed ? 0 : 1].data, k->out[packed ? 0 : 2].data, wide);
}

template <typename T, int D, bool DROPS> static void launch(const td_kernel *k, const flash &f)
{
    if constexpr (D <= WIDEST) {
        if (f.at.keys <= MOST_WARPS / 2 * OWN) launch_warps<T, D, MOST_WARPS / 2, DROPS>(k, f);
        else launch_warps<T, D, MOST_WARPS, DROPS>(k, f);
    }
}

extern "C" void td_attention_gradient_whole(const td_kernel *k)
{
    flash f = flash_of(k);
    WITH_FORM(k, f, (launch<T, D, DROPS>(k, f)));
    td_cuda_launched(k);
}
