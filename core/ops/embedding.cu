/* Rows of a table chosen by number, on a GPU.
 *
 * embedding copies rows, 16 bytes at a time: 2 x (rows x D) bytes. Its gradient sorts (id, row) pairs and adds the rows of each id
 * (add_rows.cuh).
 */
#include "core/ops/add_rows.cuh"

#define TD_ROW_FUNCTION static __device__ __forceinline__
#include "core/ops/embedding_cuda.h"

enum { THREADS = 256 };

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
    uint32_t id = (uint32_t)ids[row];
    key[row] = id < table_rows && td_row_exists(&held, row) ? id : table_rows;
    row_of[row] = (uint32_t)row;
}

template <typename T> struct gradient_row {
    const T *dy;
    int64_t columns;
    __device__ __forceinline__ const T *operator()(uint32_t row) const { return dy + (int64_t)row * columns; }
};

/* Where the parts of the workspace lie. */
typedef struct room {
    int64_t count, columns, sort_bytes;
    int bits;
    uint32_t *key[2], *row[2];
    float *partial;
    void *sort;
    int64_t bytes;
} room;

static room room_of(const td_kernel *k, void *workspace)
{
    room r = { .count = td_arg_elements(&k->in[0]), .columns = td_arg_last(&k->out[0]) };
    r.bits = td_key_bits(k->out[0].shape.dim[0]);
    r.sort_bytes = td_sort_bytes(k, r.count, r.bits);
    for (int i = 0; i < 2; i++) {
        r.key[i] = (uint32_t *)td_take(workspace, &r.bytes, r.count * (int64_t)sizeof(uint32_t));
        r.row[i] = (uint32_t *)td_take(workspace, &r.bytes, r.count * (int64_t)sizeof(uint32_t));
    }
    r.partial = (float *)td_take(workspace, &r.bytes, td_chunks_of(r.count) * 2 * r.columns * (int64_t)sizeof(float));
    r.sort = td_take(workspace, &r.bytes, r.sort_bytes);
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
    if (!bytes || !td_clear_bytes_cuda(k->run->td, k->out[0].data, bytes, stream)) return;
    if (!td_arg_elements(&k->in[0])) return;
    room r = room_of(k, k->workspace);
    uint32_t table_rows = (uint32_t)k->out[0].shape.dim[0];
    make_keys<<<td_blocks_for(r.count, THREADS, 1), THREADS, 0, stream>>>(r.key[0], r.row[0], (const int32_t *)k->in[0].data, r.count, table_rows, held);
    td_cuda_launched(k);
    if (!td_sort_keys(k, r.sort, r.sort_bytes, r.key, r.row, r.count, r.bits)) return;
    TD_CUDA_FLOATS(k->in[1].dtype, gradient_row<T> rows = { (const T *)k->in[1].data, r.columns };
                   td_add_rows<T>(k, (float *)k->out[0].data, r.partial, r.key[1], r.row[1], rows, r.count, r.columns, table_rows));
}
