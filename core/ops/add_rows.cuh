/* Sums of rows that share a key, on CUDA: keys are sorted, keeping the order of equal ones, the sorted list is cut into chunks, and each
 * chunk adds its runs of equal keys. A run that crosses chunks leaves one partial sum a chunk, which a second pass adds in their order. So
 * sums have one order, and no two threads add to one place.
 *
 * The floor is each row read once and each sum written once.
 */
#ifndef TANDEM_CORE_OPS_ADD_ROWS_CUH
#define TANDEM_CORE_OPS_ADD_ROWS_CUH

#include <cub/device/device_radix_sort.cuh>

#include "core/device_cuda.h"
#include "core/ops/number.cuh"

enum { TD_CHUNK = 64, TD_CHUNK_COLUMNS = 128 }; /* of the sorted list and of the rows, that a block takes */

/* One chunk of the sorted list and TD_CHUNK_COLUMNS columns a block, a column a thread. out: row `key` is the sum of the rows with that key;
 * rows with the key `none`, which sorts behind all others, go nowhere. row_at(place) gives a row. partial (chunks, 2, columns): sums of the
 * chunk's first and of its last run, where they go on in another chunk. */
template <typename T, typename RowAt>
static __global__ void td_add_runs(float *out, float *partial, const uint32_t *key, const uint32_t *place, RowAt row_at, int64_t count,
                                   int64_t columns, uint32_t none)
{
    __shared__ uint32_t keys[TD_CHUNK + 2];
    __shared__ const T *rows[TD_CHUNK];
    int64_t begin = (int64_t)blockIdx.x * TD_CHUNK, column = (int64_t)blockIdx.y * TD_CHUNK_COLUMNS + threadIdx.x;
    int size = (int)(count - begin < TD_CHUNK ? count - begin : TD_CHUNK);
    for (int i = threadIdx.x; i < size + 2; i += TD_CHUNK_COLUMNS) {
        int64_t at = begin - 1 + i;
        keys[i] = at >= 0 && at < count ? key[at] : none;
        if (i >= 1 && i <= size) rows[i - 1] = row_at(place[at]);
    }
    __syncthreads();
    if (column >= columns) return;
    float sum = 0;
    int first = 0; /* of the run */
    for (int i = 0; i < size; i++) {
        uint32_t id = keys[i + 1];
        if (id == none) break;
        sum += td_wide(rows[i][column]);
        if (i + 1 < size && keys[i + 2] == id) continue;
        bool from_before = first == 0 && begin > 0 && keys[0] == id, goes_on = i + 1 == size && begin + size < count && keys[size + 1] == id;
        if (from_before || goes_on)
            partial[((int64_t)blockIdx.x * 2 + (first != 0)) * columns + column] = sum;
        else
            out[(int64_t)id * columns + column] = sum;
        sum = 0;
        first = i + 1;
    }
}

/* Each chunk whose last run begins in it and goes on adds what the chunks after it hold of it. */
static __global__ void td_add_partials(float *out, const float *partial, const uint32_t *key, int64_t count, int64_t columns, uint32_t none)
{
    int64_t chunk = blockIdx.x, begin = chunk * TD_CHUNK, end = begin + TD_CHUNK, column = (int64_t)blockIdx.y * TD_CHUNK_COLUMNS + threadIdx.x;
    if (end >= count || column >= columns) return;
    uint32_t id = key[end - 1];
    bool whole = key[begin] == id; /* one run fills the chunk */
    if (id == none || key[end] != id || (whole && begin > 0 && key[begin - 1] == id)) return;
    float sum = partial[(chunk * 2 + !whole) * columns + column];
    for (int64_t next = chunk + 1; next * TD_CHUNK < count && key[next * TD_CHUNK] == id; next++) {
        sum += partial[next * 2 * columns + column];
        int64_t last = (next + 1) * TD_CHUNK < count ? (next + 1) * TD_CHUNK - 1 : count - 1;
        if (key[last] != id) break;
    }
    out[(int64_t)id * columns + column] = sum;
}

static inline int64_t td_chunks_of(int64_t count) { return (count + TD_CHUNK - 1) / TD_CHUNK; }

/* Both passes, over `count` sorted keys of at least one row of at least one column. */
template <typename T, typename RowAt>
static void td_add_rows(const td_kernel *k, float *out, float *partial, const uint32_t *key, const uint32_t *place, RowAt row_at, int64_t count,
                        int64_t columns, uint32_t none)
{
    dim3 blocks((unsigned)td_chunks_of(count), (unsigned)((columns + TD_CHUNK_COLUMNS - 1) / TD_CHUNK_COLUMNS));
    td_add_runs<T><<<blocks, TD_CHUNK_COLUMNS, 0, td_stream(k)>>>(out, partial, key, place, row_at, count, columns, none);
    td_cuda_launched(k);
    td_add_partials<<<blocks, TD_CHUNK_COLUMNS, 0, td_stream(k)>>>(out, partial, key, count, columns, none);
    td_cuda_launched(k);
}

/* ---- Keys */

/* Bits that keys up to `largest` have. */
static inline int td_key_bits(int64_t largest)
{
    int bits = 1;
    while (bits < 32 && largest >> bits) bits++;
    return bits;
}

/* CUB asks the device. Of one that is only described it is the other copy of keys and places, and for the passes' counters more than they
 * are. */
static inline int64_t td_sort_bytes(const td_kernel *k, int64_t count, int bits)
{
    size_t bytes = 0;
    if (k->run->td->options.gpu) return 2 * count * (int64_t)sizeof(uint32_t) + (count / 4096 + 32) * 1024;
    cub::DeviceRadixSort::SortPairs(NULL, bytes, (uint32_t *)NULL, (uint32_t *)NULL, (uint32_t *)NULL, (uint32_t *)NULL, count, 0, bits);
    return (int64_t)bytes;
}

/* key[1] and place[1] become those of [0] in the order of their keys; equal ones keep theirs. */
static inline bool td_sort_keys(const td_kernel *k, void *room, int64_t room_bytes, uint32_t *const key[2], uint32_t *const place[2], int64_t count,
                                int bits)
{
    size_t bytes = (size_t)room_bytes;
    cudaError_t status = cub::DeviceRadixSort::SortPairs(room, bytes, key[0], key[1], place[0], place[1], count, 0, bits, td_stream(k));
    return td_cuda_ok(k->run->td, status, "sorting ids");
}

/* The next `bytes` of a workspace, of which *used are gone. */
static inline void *td_take(void *workspace, int64_t *used, int64_t bytes)
{
    uintptr_t at = (uintptr_t)workspace + (uintptr_t)*used; /* NULL while it is measured */
    *used += (bytes + 255) / 256 * 256;
    return (void *)at;
}

#endif
