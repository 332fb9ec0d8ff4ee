/* Rows of a table chosen by number, on a GPU.
 *
 * embedding copies rows, 16 bytes at a time: 2 x (rows x D) bytes. Its gradient sorts (id, row) pairs, keeping the order of equal ids,
 * cuts the sorted list into chunks and adds each chunk's runs; a run that crosses chunks leaves one partial sum a chunk, which a second
 * pass adds in their order. So sums have one order, and no two threads add to one place.
 */
#include <cub/device/device_radix_sort.cuh>

#include "core/device_cuda.h"
#include "core/ops/embedding_cuda.h"
#include "core/ops/number.cuh"

enum { THREADS = 256, CHUNK = 64, COLUMNS = 128 };

/* ---- embedding */

template <typename U>
static __global__ void copy_rows(U *y, const U *table, const int32_t *ids, int64_t rows, int64_t columns, int64_t table_rows, U nan)
{
    for (int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += (int64_t)gridDim.x * blockDim.y) {
        int64_t id = ids[row];
        bool exists = id >= 0 && id < table_rows;
        for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) y[row * columns + c] = exists ? table[id * columns + c] : nan;
    }
}

template <typename U>
static void launch_copy(const td_kernel *k, int64_t columns, U nan)
{
    int64_t rows = td_arg_elements(&k->in[1]);
    int across = columns >= 64 ? 64 : columns >= 16 ? 16 : 4;
    dim3 threads(across, THREADS / across);
    copy_rows<U><<<td_blocks_for(rows, (int)threads.y, 1), threads, 0, td_stream(k)>>>((U *)k->out[0].data, (const U *)k->in[0].data,
                                                                                    (const int32_t *)k->in[1].data, rows, columns, k->in[0].shape.dim[0], nan);
}

extern "C" void td_embedding_cuda(const td_kernel *k)
{
    int64_t columns = td_arg_last(&k->in[0]), bytes = columns * td_dtype_size(k->in[0].dtype);
    if (!td_arg_elements(&k->out[0])) return;
    unsigned word = k->in[0].dtype == TD_F32 ? 0x7FC00000u : k->in[0].dtype == TD_BF16 ? 0x7FC07FC0u : 0x7E007E00u;
    if (bytes % 16 == 0 && ((uintptr_t)k->in[0].data | (uintptr_t)k->out[0].data) % 16 == 0)
        launch_copy<uint4>(k, bytes / 16, make_uint4(word, word, word, word));
    else if (k->in[0].dtype == TD_F32)
        launch_copy<uint32_t>(k, columns, word);
    else
        launch_copy<uint16_t>(k, columns, (uint16_t)word);
    td_cuda_launched(k);
}

/* ---- embedding_gradient */

/* Rows whose id is none, or that are not of the value, sort behind all others. */
static __global__ void make_keys(uint32_t *key, uint32_t *row_of, const int32_t *ids, int64_t count, uint32_t table_rows, td_rows held)
{
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= count) return;
    bool exists = true;
    int64_t rest = row;
    for (int i = held.dims - 1; i >= 0 && !held.all; i--) {
        exists = exists && rest % held.size[i] < held.valid[i];
        rest /= held.size[i];
    }
    uint32_t id = (uint32_t)ids[row];
    key[row] = exists && id < table_rows ? id : table_rows;
    row_of[row] = (uint32_t)row;
}

/* One chunk of the sorted list and COLUMNS columns a block, a column a thread. partial (chunks, 2, columns): sums of the chunk's first and
 * of its last run, where they go on in another chunk. */
template <typename T>
static __global__ void add_runs(float *out, float *partial, const uint32_t *key, const uint32_t *row_of, const T *dy, int64_t count, int64_t columns,
                                uint32_t table_rows)
{
    __shared__ uint32_t keys[CHUNK + 2], rows[CHUNK];
    int64_t begin = (int64_t)blockIdx.x * CHUNK, column = (int64_t)blockIdx.y * COLUMNS + threadIdx.x;
    int size = (int)(count - begin < CHUNK ? count - begin : CHUNK);
    for (int i = threadIdx.x; i < size + 2; i += COLUMNS) {
        int64_t at = begin - 1 + i;
        keys[i] = at >= 0 && at < count ? key[at] : table_rows;
        if (i >= 1 && i <= size) rows[i - 1] = row_of[at];
    }
    __syncthreads();
    if (column >= columns) return;
    float sum = 0;
    int first = 0; /* of the run */
    for (int i = 0; i < size; i++) {
        uint32_t id = keys[i + 1];
        if (id == table_rows) break;
        sum += td_wide(dy[(int64_t)rows[i] * columns + column]);
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
static __global__ void add_partials(float *out, const float *partial, const uint32_t *key, int64_t count, int64_t columns, uint32_t table_rows)
{
    int64_t chunk = blockIdx.x, begin = chunk * CHUNK, end = begin + CHUNK, column = (int64_t)blockIdx.y * COLUMNS + threadIdx.x;
    if (end >= count || column >= columns) return;
    uint32_t id = key[end - 1];
    bool whole = key[begin] == id; /* one run fills the chunk */
    if (id == table_rows || key[end] != id || (whole && begin > 0 && key[begin - 1] == id)) return;
    float sum = partial[(chunk * 2 + !whole) * columns + column];
    for (int64_t next = chunk + 1; next * CHUNK < count && key[next * CHUNK] == id; next++) {
        sum += partial[next * 2 * columns + column];
        int64_t last = (next + 1) * CHUNK < count ? (next + 1) * CHUNK - 1 : count - 1;
        if (key[last] != id) break;
    }
    out[(int64_t)id * columns + column] = sum;
}

/* Where the parts of the workspace lie. */
typedef struct room {
    int64_t count, chunks, columns, sort_bytes;
    uint32_t *key[2], *row[2];
    float *partial;
    void *sort;
    int64_t bytes;
} room;

static char *take(room *r, char *base, int64_t bytes)
{
    char *at = base + r->bytes;
    r->bytes += (bytes + 255) / 256 * 256;
    return at;
}

static int bits_of(int64_t table_rows)
{
    int bits = 1;
    while (bits < 32 && table_rows >> bits) bits++;
    return bits;
}

static room room_of(const td_kernel *k, void *workspace)
{
    char *base = (char *)workspace;
    room r = { .count = td_arg_elements(&k->in[0]), .columns = td_arg_last(&k->out[0]) };
    r.chunks = (r.count + CHUNK - 1) / CHUNK;
    size_t sort_bytes = 0;
    cub::DeviceRadixSort::SortPairs(NULL, sort_bytes, (uint32_t *)NULL, (uint32_t *)NULL, (uint32_t *)NULL, (uint32_t *)NULL, r.count, 0,
                                    bits_of(k->out[0].shape.dim[0]));
    r.sort_bytes = (int64_t)sort_bytes;
    for (int i = 0; i < 2; i++) {
        r.key[i] = (uint32_t *)take(&r, base, r.count * (int64_t)sizeof(uint32_t));
        r.row[i] = (uint32_t *)take(&r, base, r.count * (int64_t)sizeof(uint32_t));
    }
    r.partial = (float *)take(&r, base, r.chunks * 2 * r.columns * (int64_t)sizeof(float));
    r.sort = take(&r, base, r.sort_bytes);
    return r;
}

extern "C" bool td_embedding_gradient_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    if (td_arg_elements(&k->in[0]) > INT32_MAX || k->out[0].shape.dim[0] > INT32_MAX) {
        td_fail(td, TD_ERROR_UNSUPPORTED, "embedding: more than 2^31 ids or rows on one GPU");
        return false;
    }
    out->workspace_bytes = td_arg_elements(&k->in[0]) ? room_of(k, NULL).bytes : 0;
    return true;
}

extern "C" void td_embedding_gradient_rows(const td_kernel *k, td_rows held)
{
    cudaStream_t stream = td_stream(k);
    int64_t bytes = td_arg_bytes(&k->out[0]);
    if (!bytes || !td_cuda_ok(k->run->td, cudaMemsetAsync(k->out[0].data, 0, (size_t)bytes, stream), "clearing a gradient")) return;
    if (!td_arg_elements(&k->in[0])) return;
    room r = room_of(k, k->workspace);
    uint32_t table_rows = (uint32_t)k->out[0].shape.dim[0];
    make_keys<<<td_blocks_for(r.count, THREADS, 1), THREADS, 0, stream>>>(r.key[0], r.row[0], (const int32_t *)k->in[0].data, r.count, table_rows, held);
    td_cuda_launched(k);
    size_t sort_bytes = (size_t)r.sort_bytes;
    if (!td_cuda_ok(k->run->td,
                    cub::DeviceRadixSort::SortPairs(r.sort, sort_bytes, r.key[0], r.key[1], r.row[0], r.row[1], r.count, 0, bits_of(table_rows), stream),
                    "sorting ids"))
        return;
    dim3 blocks((unsigned)r.chunks, (unsigned)((r.columns + COLUMNS - 1) / COLUMNS));
    TD_CUDA_FLOATS(k->in[1].dtype, (add_runs<T><<<blocks, COLUMNS, 0, stream>>>((float *)k->out[0].data, r.partial, r.key[1], r.row[1],
                                                                                 (const T *)k->in[1].data, r.count, r.columns, table_rows)));
    add_partials<<<blocks, COLUMNS, 0, stream>>>((float *)k->out[0].data, r.partial, r.key[1], r.count, r.columns, table_rows);
    td_cuda_launched(k);
}
