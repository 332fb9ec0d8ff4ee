/* Tiles of attention's kernels for tensor cores: rows of heads in shared memory as operands of products, what a row sees of a tile, and
 * what dropout makes of it.
 *
 * Dropout: a block of random numbers serves eight consecutive keys, which attention_lanes.h gives to one lane, where rows begin at
 * multiples of eight of the draw; else a lane makes two for eight keys.
 */
#ifndef TANDEM_CORE_OPS_ATTENTION_TILES_CUH
#define TANDEM_CORE_OPS_ATTENTION_TILES_CUH

#include "core/ops/attention_flash.cuh"
#include "core/ops/attention_lanes.h"
#include "core/ops/mma.cuh"

enum { WARPS = 4, THREADS = WARPS * 32, BLOCK = 64, TILE = 64, WIDEST = 128 };

/* Rows of shared memory are 16 bytes longer than they must be, so that eight of them lie in different banks. */
template <int D> struct row_of { enum { ELEMENTS = D + 8 }; };

/* ---- Shared memory */

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
        bool valid = first + row < limit && column < columns;
        int place = ORDER == AS_KEYS ? td_row_of_key(row) : row;
        td_copy_16(td_shared_address(to + place * row_of<D>::ELEMENTS + column), valid ? from + (first + row) * stride + column : from,
                   valid);
    }
}

/* Of 16 rows, `row(r)` being where row r is: the first operand of columns 16 k to 16 k + 15. */
template <typename T, int D> static __device__ __forceinline__ void first_operand(uint32_t a[4], const T *rows, int row, int k)
{
    td_load_matrices(a, td_shared_address(rows + row * row_of<D>::ELEMENTS + 16 * k + (threadIdx.x % 32) / 16 * 8));
}

/* Row that this lane names for first_operand, of rows that lie one after the other from `begin` on. */
static __device__ __forceinline__ int plain_row(int begin) { return begin + threadIdx.x % 16; }

/* sum[n] += a times rows 8 n to 8 n + 7 as columns: products of rows with rows. */
template <typename T, int D, int N>
static __device__ __forceinline__ void by_rows(float (*sum)[4], const uint32_t a[4], const T *rows, int k)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
        uint32_t b[4];
        td_load_matrices(b,
                         td_shared_address(rows + (16 * n + lane % 8 + lane / 16 * 8) * row_of<D>::ELEMENTS + 16 * k + lane / 8 % 2 * 8));
        td_multiply_add<T>(sum[2 * n], a, b[0], b[1]);
        td_multiply_add<T>(sum[2 * n + 1], a, b[2], b[3]);
    }
}

/* sum[n] += a, weights of rows 16 k to 16 k + 15, times those rows' columns 8 n to 8 n + 7. */
template <typename T, int D> static __device__ __forceinline__ void by_columns(float (*sum)[4], const uint32_t a[4], const T *rows, int k)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        uint32_t b[4];
        td_load_transposed(b, td_shared_address(rows + (16 * k + lane % 16) * row_of<D>::ELEMENTS + 16 * n + lane / 16 * 8));
        td_multiply_add<T>(sum[2 * n], a, b[0], b[1]);
        td_multiply_add<T>(sum[2 * n + 1], a, b[2], b[3]);
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

#endif
