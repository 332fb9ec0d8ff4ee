/* Tiles of attention's kernels for tensor cores: rows of heads in shared memory as operands of products, what a row sees of a tile, what
 * dropout makes of it, and what the kernels of the backward share.
 *
 * Dropout: a block of random numbers serves eight consecutive keys, which attention_lanes.h gives to one lane, where rows begin at
 * multiples of eight of the draw; else a lane makes two for eight keys.
 */
#ifndef TANDEM_CORE_OPS_ATTENTION_TILES_CUH
#define TANDEM_CORE_OPS_ATTENTION_TILES_CUH

#include "core/ops/attention_flash.cuh"
#include "core/ops/attention_lanes.h"
#include "core/ops/mma.cuh"
#include "core/ops/number.cuh"

enum { TILE = 64 }; /* rows of the largest tile */

/* Rows of shared memory are 16 bytes longer than they must be, so that eight of them lie in different banks. */
template <int D> struct row_of { enum { ELEMENTS = D + 8 }; };

/* 2^x, to the last bit or two; 0 for -infinity. */
static __device__ __forceinline__ float power(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static const float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;

/* ---- Shared memory */

/* Eight columns of a row from `column` on, zeros where the row is not below `limit` or the column not below `columns`; the copy is not
 * waited for. */
template <typename T>
static __device__ __forceinline__ void fetch_part(T *to, const T *from, int64_t stride, int64_t row, int64_t limit, int column, int columns)
{
    bool valid = row < limit && column < columns;
    td_copy_16(td_shared_address(to + column), valid ? from + row * stride + column : from, valid);
}

/* Of 16 rows, `row(r)` being where row r is: the first operand of columns 16 k to 16 k + 15. */
template <typename T, int D> static __device__ __forceinline__ void first_operand(uint32_t a[4], const T *rows, int row, int k)
{
    td_load_matrices(a, td_shared_address(rows + row * row_of<D>::ELEMENTS + 16 * k + (threadIdx.x % 32) / 16 * 8));
}

/* Row that this lane names for first_operand, of rows that lie one after the other from `begin` on. */
static __device__ __forceinline__ int plain_row(int begin) { return begin + threadIdx.x % 16; }

/* sum[g][n] += a[g] times rows 8 n to 8 n + 7 as columns: products of rows with rows. */
template <typename T, int D, int N, int GROUPS = 1>
static __device__ __forceinline__ void by_rows(float (*sum)[N / 8][4], uint32_t (*a)[4], const T *rows, int k)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
        uint32_t b[4];
        td_load_matrices(b,
                         td_shared_address(rows + (16 * n + lane % 8 + lane / 16 * 8) * row_of<D>::ELEMENTS + 16 * k + lane / 8 % 2 * 8));
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            td_multiply_add<T>(sum[g][2 * n], a[g], b[0], b[1]);
            td_multiply_add<T>(sum[g][2 * n + 1], a[g], b[2], b[3]);
        }
    }
}

/* sum[g][n] += a[g], weights of rows 16 k to 16 k + 15, times those rows' columns 8 n to 8 n + 7; a row is ROW elements after the last. */
template <typename T, int D, int GROUPS = 1, int ROW = row_of<D>::ELEMENTS>
static __device__ __forceinline__ void by_columns(float (*sum)[D / 8][4], uint32_t (*a)[4], const T *rows, int k)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        uint32_t b[4];
        td_load_transposed(b, td_shared_address(rows + (16 * k + lane % 16) * ROW + 16 * n + lane / 16 * 8));
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            td_multiply_add<T>(sum[g][2 * n], a[g], b[0], b[1]);
            td_multiply_add<T>(sum[g][2 * n + 1], a[g], b[2], b[3]);
        }
    }
}

/* Sums 2 k and 2 k + 1, rounded, as a first operand. */
template <typename T> static __device__ __forceinline__ void as_operand(uint32_t a[4], float (*x)[4], int k)
{
    a[0] = td_pair<T>(x[2 * k][0], x[2 * k][1]);
    a[1] = td_pair<T>(x[2 * k][2], x[2 * k][3]);
    a[2] = td_pair<T>(x[2 * k + 1][0], x[2 * k + 1][1]);
    a[3] = td_pair<T>(x[2 * k + 1][2], x[2 * k + 1][3]);
}

template <int N> static __device__ __forceinline__ void clear(float (*x)[4])
{
#pragma unroll
    for (int n = 0; n < N; n++) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0;
}

/* ---- Masks: what a row sees of a tile are the columns from `begin` to `end` */

typedef struct span {
    int begin, end;
} span;

static __device__ __forceinline__ int within(int64_t x) { return x < 0 ? 0 : x > TILE ? TILE : (int)x; }

/* Keys of the tile that begins at key `tile` for a query. */
static __device__ __forceinline__ span keys_seen(const flash &f, int64_t position, int64_t tile, int64_t limit, bool exists)
{
    int64_t begin = f.window ? position - f.window + 1 - tile : 0, end = limit - tile;
    if (f.causal && position + 1 - tile < end) end = position + 1 - tile;
    if (f.window && position + f.window - tile < end) end = position + f.window - tile;
    return { within(begin), exists ? within(end) : 0 };
}

/* Queries of the tile that begins at query `tile`, whose position is query + offset, that see a key. */
static __device__ __forceinline__ span queries_that_see(const flash &f, int64_t key, int64_t offset, int64_t tile, bool exists)
{
    int64_t at = key - offset - tile, begin = f.causal ? at : f.window ? at - f.window + 1 : 0, end = f.at.rows - tile;
    if (f.window && at + f.window < end) end = at + f.window;
    return { within(begin), exists ? within(end) : 0 };
}

static __device__ __forceinline__ bool holds(span s, int column) { return column >= s.begin && column < s.end; }
static __device__ __forceinline__ bool is_whole(span s, int columns) { return s.begin == 0 && s.end >= columns; }

/* ---- Dropout */

/* The factor of the low or the high half of a word. */
static __device__ __forceinline__ float kept_low(const flash &f, uint32_t word) { return (word & 0xFFFF) >= f.below ? f.kept : 0; }
static __device__ __forceinline__ float kept_high(const flash &f, uint32_t word) { return word >> 16 >= f.below ? f.kept : 0; }

/* The factors of sums [0 to 7][2 half] and [2 half + 1], columns of a row whose tile begins at element `first` of the draw. */
static __device__ __forceinline__ void keys_kept(const flash &f, td_device_random random, uint64_t first, int half, float (*kept)[4])
{
#pragma unroll
    for (int n = 0; n < TILE / 8; n += 4) {
        uint4 made = td_random_halves(random, first + (uint64_t)td_key_of_column(n, threadIdx.x, 0), 8);
        uint32_t words[4] = { made.x, made.y, made.z, made.w };
#pragma unroll
        for (int m = 0; m < 4; m++) {
            kept[n + m][2 * half] = kept_low(f, words[m]);
            kept[n + m][2 * half + 1] = kept_high(f, words[m]);
        }
    }
}

/* Which of the 16 keys from element e of the draw on are kept: bit j for key j. */
static __device__ __forceinline__ uint32_t sixteen_kept(const flash &f, td_device_random random, uint64_t e)
{
    uint32_t bits = 0;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        uint4 made = td_random_halves(random, e + 8 * part, 8);
        uint32_t words[4] = { made.x, made.y, made.z, made.w };
#pragma unroll
        for (int m = 0; m < 4; m++) {
            bits |= (words[m] & 0xFFFF) >= f.below ? 1u << (8 * part + 2 * m) : 0;
            bits |= words[m] >> 16 >= f.below ? 2u << (8 * part + 2 * m) : 0;
        }
    }
    return bits;
}

/* ---- Backward: scores with a key a row and a query a column */

/* As slopes_of_keys; seen: by each of the two keys, where that is not MASKED all queries. */
template <int N, bool DROPS, bool MASKED>
static __device__ __forceinline__ void slopes_of_seen(const flash &f, float (*s)[4], float (*dp)[4], const float *log_sums, const float *inner,
                                                      const span seen[2], uint32_t drawn)
{
    int lane = threadIdx.x % 32;
    float scale = f.scale * LOG2_E;
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int query = 8 * n + 2 * (lane % 4) + i;
            float log_sum = log_sums[query] * LOG2_E, product = inner[query];
            uint32_t bits = DROPS ? __shfl_sync(0xFFFFFFFF, drawn, td_lane_of_query(n, lane, i)) >> lane / 4 : ~0u;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int j = 2 * half + i;
                bool sees = !MASKED || holds(seen[half], query), kept = bits >> 8 * half & 1;
                float p = sees ? power(s[n][j] * scale - log_sum) : 0;
                float slope = DROPS ? (kept ? dp[n][j] * f.kept : 0) - product : dp[n][j] - product;
                dp[n][j] = sees ? p * slope : 0;
                s[n][j] = DROPS ? (kept ? p * f.kept : 0) : p;
            }
        }
}

/* Of keys `key` and key + 8 and the N queries from `tile` on: scores s become weights of dv, slopes dp of the kept weights those of the
 * scores. `drawn` has the bits of sixteen_kept for the warp's keys, of the query that is this lane's. */
template <int N, bool DROPS>
static __device__ __forceinline__ void slopes_of_keys(const flash &f, float (*s)[4], float (*dp)[4], const float *log_sums, const float *inner,
                                                      int64_t key, int64_t offset, int64_t tile, int64_t limit, uint32_t drawn)
{
    span seen[2];
    bool whole = true;
    for (int half = 0; half < 2; half++) {
        seen[half] = queries_that_see(f, key + 8 * half, offset, tile, key + 8 * half < limit);
        whole = whole && is_whole(seen[half], N);
    }
    if (__all_sync(0xFFFFFFFF, whole))
        slopes_of_seen<N, DROPS, false>(f, s, dp, log_sums, inner, seen, drawn);
    else
        slopes_of_seen<N, DROPS, true>(f, s, dp, log_sums, inner, seen, drawn);
}

/* Sums of one row, times `factor`, to a gradient in f32 or the operands' dtype. */
template <typename T, int D>
static __device__ __forceinline__ void store_row(void *to, bool wide, int64_t at, float (*sum)[4], int half, float factor, int columns)
{
    at += 2 * (threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        float low = sum[n][2 * half] * factor, high = sum[n][2 * half + 1] * factor;
        if (8 * n >= columns) continue;
        if (wide)
            *(float2 *)((float *)to + at + 8 * n) = make_float2(low, high);
        else
            *(uint32_t *)((T *)to + at + 8 * n) = td_pair<T>(low, high);
    }
}

/* sum(do o) of a row, half of which each of two lanes reads at once; zero past the last row. */
template <typename T, int D>
static __device__ __forceinline__ float inner_product(const flash &f, int64_t sequence, int64_t head, int64_t row, int columns)
{
    enum { PARTS = D / 16 };
    const uint4 *o = (const uint4 *)((const T *)f.o + element(f.at.o, sequence, head, row)) + threadIdx.x % 2;
    const uint4 *dy = (const uint4 *)((const T *)f.dy + element(f.at.dy, sequence, head, row)) + threadIdx.x % 2;
    int count = row < f.at.rows ? (columns / 8 + 1 - (int)(threadIdx.x % 2)) / 2 : 0;
    uint4 a[PARTS], b[PARTS];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        a[i] = i < count ? o[2 * i] : make_uint4(0, 0, 0, 0);
        b[i] = i < count ? dy[2 * i] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const T *x = (const T *)&a[i], *y = (const T *)&b[i];
#pragma unroll
        for (int c = 0; c < 8; c++) sum += td_wide(x[c]) * td_wide(y[c]);
    }
    return sum + __shfl_xor_sync(0xFFFFFFFF, sum, 1);
}

/* ---- Launches */

/* The statement with T, D and DROPS as the call has them. */
#define WITH_FORM(k, f, ...)                                                            \
    do {                                                                                \
        if ((k)->in[0].dtype == TD_BF16) { typedef __nv_bfloat16 T; WITH_WIDTH(f, __VA_ARGS__); } \
        else { typedef __half T; WITH_WIDTH(f, __VA_ARGS__); }                          \
    } while (0)
#define WITH_WIDTH(f, ...)                                                              \
    if (f.at.depth <= 32) { constexpr int D = 32; WITH_DROPOUT(f, __VA_ARGS__); }       \
    else if (f.at.depth <= 64) { constexpr int D = 64; WITH_DROPOUT(f, __VA_ARGS__); }  \
    else { constexpr int D = 128; WITH_DROPOUT(f, __VA_ARGS__); }
#define WITH_DROPOUT(f, ...)                                                            \
    if (f.drops) { constexpr bool DROPS = true; __VA_ARGS__; }                          \
    else { constexpr bool DROPS = false; __VA_ARGS__; }

#endif
