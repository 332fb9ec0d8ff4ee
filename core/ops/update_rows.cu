/* Updates by rows on CUDA; see update_rows.c.
 *
 * merge_rows sorts the ids of all uses at once, numbers the different ones by a sum over where they begin, and adds the rows of each
 * (add_rows.cuh): each row read once, each sum written once, and beside them 16 bytes an id for each byte of the largest, which the sort
 * moves. How many ids are different is known on the device alone. update_rows leaves the rows to the rule.
 */
#include <cub/device/device_scan.cuh>

#include "core/ops/add_rows.cuh"

enum { THREADS = 256 };

/* ---- merge_rows */

/* Of one use, whose ids begin at place `first` of all. */
static __global__ void note_use(uint32_t *key, uint32_t *place, const float **row, const int32_t *ids, const float *rows, int64_t count,
                                int64_t first, int64_t columns, uint32_t table_rows)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    uint32_t id = (uint32_t)ids[i]; /* of a negative one: past any table */
    key[first + i] = id < table_rows ? id : table_rows;
    place[first + i] = (uint32_t)(first + i);
    row[first + i] = rows + i * columns;
}

/* begins: 1 where an id of the table is the first of its kind. */
static __global__ void mark_first(uint32_t *begins, const uint32_t *key, int64_t count, uint32_t table_rows)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) begins[i] = key[i] < table_rows && (i == 0 || key[i] != key[i - 1]);
}

/* The key of each sorted id becomes the number of its kind, `count` for strangers; the ids that are different, each once, and then -1.
 * kinds: the sum of `begins` up to and with each. number may be begins. */
static __global__ void number_ids(uint32_t *number, int32_t *ids, const uint32_t *begins, const uint32_t *kinds, const uint32_t *key, int64_t count,
                                  uint32_t table_rows)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    if (begins[i]) ids[kinds[i] - 1] = (int32_t)key[i];
    if (i >= kinds[count - 1]) ids[i] = -1;
    number[i] = key[i] < table_rows ? kinds[i] - 1 : (uint32_t)count;
}

/* Zeros behind the sums. */
static __global__ void clear_rest(float *rows, const uint32_t *kinds, int64_t count, int64_t columns)
{
    int64_t end = count * columns;
    for (int64_t i = kinds[count - 1] * columns + (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < end; i += (int64_t)gridDim.x * blockDim.x)
        rows[i] = 0;
}

struct given_row {
    const float *const *row;
    __device__ __forceinline__ const float *operator()(uint32_t place) const { return row[place]; }
};

/* Where the parts of the workspace lie. */
typedef struct room {
    int64_t count, columns, library_bytes;
    uint32_t table_rows;                      /* that an id can name, which is an i32 */
    int bits;
    uint32_t *key[2], *place[2];
    const float **row;                        /* at each place */
    float *partial;
    void *library;
    int64_t bytes;
} room;

static int64_t scan_bytes(int64_t count)
{
    size_t bytes = 0;
    cub::DeviceScan::InclusiveSum(NULL, bytes, (uint32_t *)NULL, (uint32_t *)NULL, count);
    return (int64_t)bytes;
}

static room room_of(const td_kernel *k, void *workspace)
{
    int64_t table_rows = ((const td_merge_rows_attr *)k->attr)->table_rows;
    room r = { .count = td_arg_elements(&k->out[0]), .columns = td_arg_last(&k->out[1]) };
    r.table_rows = table_rows < 0x80000000 ? (uint32_t)table_rows : 0x80000000;
    r.bits = td_key_bits(r.table_rows);
    r.library_bytes = td_sort_bytes(k, r.count, r.bits);
    bool asks = !k->run->td->options.gpu; /* of a described one the sort takes more */
    if (asks && r.library_bytes < scan_bytes(r.count)) r.library_bytes = scan_bytes(r.count);
    for (int i = 0; i < 2; i++) {
        r.key[i] = (uint32_t *)td_take(workspace, &r.bytes, r.count * (int64_t)sizeof(uint32_t));
        r.place[i] = (uint32_t *)td_take(workspace, &r.bytes, r.count * (int64_t)sizeof(uint32_t));
    }
    r.row = (const float **)td_take(workspace, &r.bytes, r.count * (int64_t)sizeof(float *));
    r.partial = (float *)td_take(workspace, &r.bytes, td_chunks_of(r.count) * 2 * r.columns * (int64_t)sizeof(float));
    r.library = td_take(workspace, &r.bytes, r.library_bytes);
    return r;
}

extern "C" bool td_merge_rows_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    if (td_arg_elements(&k->out[0]) > INT32_MAX) {
        td_fail(td, TD_ERROR_UNSUPPORTED, "merge_rows: a table got %lld ids in one step, must be less than 2^31 on a GPU",
                (long long)td_arg_elements(&k->out[0]));
        return false;
    }
    out->workspace_bytes = td_arg_elements(&k->out[0]) ? room_of(k, NULL).bytes : 0;
    return true;
}

static void note_uses(const td_kernel *k, const room *r)
{
    int64_t first = 0;
    for (int i = 0; i < k->inputs; i += 2) {
        int64_t count = td_arg_elements(&k->in[i]);
        if (!count) continue;
        note_use<<<td_blocks_for(count, THREADS, 1), THREADS, 0, td_stream(k)>>>(r->key[0], r->place[0], r->row, (const int32_t *)k->in[i].data,
                                                                                  (const float *)k->in[i + 1].data, count, first, r->columns,
                                                                                  r->table_rows);
        td_cuda_launched(k);
        first += count;
    }
}

extern "C" void td_merge_rows_cuda(const td_kernel *k)
{
    cudaStream_t stream = td_stream(k);
    if (!td_arg_elements(&k->out[0])) return;
    room r = room_of(k, k->workspace);
    unsigned blocks = td_blocks_for(r.count, THREADS, 1);
    note_uses(k, &r);
    if (!td_sort_keys(k, r.library, r.library_bytes, r.key, r.place, r.count, r.bits)) return;
    uint32_t *begins = r.key[0], *kinds = r.place[0]; /* what the sort no longer needs */
    mark_first<<<blocks, THREADS, 0, stream>>>(begins, r.key[1], r.count, r.table_rows);
    td_cuda_launched(k);
    size_t bytes = (size_t)r.library_bytes;
    if (!td_cuda_ok(k->run->td, cub::DeviceScan::InclusiveSum(r.library, bytes, begins, kinds, r.count, stream), "numbering ids")) return;
    number_ids<<<blocks, THREADS, 0, stream>>>(begins, (int32_t *)k->out[0].data, begins, kinds, r.key[1], r.count, r.table_rows);
    td_cuda_launched(k);
    if (!r.columns) return;
    float *sums = (float *)k->out[1].data;
    clear_rest<<<td_blocks_for(r.count * r.columns, THREADS, 16), THREADS, 0, stream>>>(sums, kinds, r.count, r.columns);
    td_cuda_launched(k);
    td_add_rows<float>(k, sums, r.partial, begins, r.place[1], given_row{ r.row }, r.count, r.columns, (uint32_t)r.count);
}

/* ---- update_rows */

extern "C" bool td_update_rows_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)out;
    const td_update_rule *rule = td->rules[((const td_update_rows_attr *)k->attr)->rule];
    if (rule->cuda_rows) return true;
    td_fail(td, TD_ERROR_UNSUPPORTED, "update_rows: the rule '%s' cannot update rows on a GPU; choose another optimizer, or the CPU", rule->name);
    return false;
}

/* The kernels work in place: outputs elsewhere begin as their inputs. */
static bool copy_values(const td_kernel *k)
{
    for (int o = 0; o < k->outputs; o++) {
        const td_arg *from = &k->in[o];
        if (!td_copy_bytes_cuda(k->run->td, k->out[o].data, from->data, td_arg_bytes(from), td_stream(k))) return false;
    }
    return true;
}

extern "C" void td_update_rows_cuda(const td_kernel *k)
{
    const td_update_rows_attr *a = (const td_update_rows_attr *)k->attr;
    const td_update_rule *rule = k->run->td->rules[a->rule];
    const td_arg *scalars = k->in + 1 + rule->moments, *when = scalars + 3, *rows = &k->in[k->inputs - 1], *ids = rows - 1;
    bool named = ids->dtype == TD_I32;
    if (!copy_values(k)) return;
    td_update_range range = { .count = (named ? td_arg_elements(ids) : a->rows) * a->width, .width = a->width, .dtype = k->in[0].dtype };
    if (!range.count) return;
    range.parameter = td_arg_at(&k->out[0], a->begin);
    range.gradient = named ? rows->data : td_arg_at(rows, a->begin);
    for (int m = 0; m < rule->moments; m++) range.moment[m] = td_arg_at(&k->out[1 + m], a->moment[m]);
    memcpy(range.hyper, a->hyper, sizeof a->hyper);
    td_update_scalars s = { scalars[0].data, scalars[1].data, scalars[2].data, when < (named ? ids : rows) ? when->data : NULL, k->run->queue };
    rule->cuda_rows(&range, named ? (const int32_t *)ids->data : NULL, &s);
    td_cuda_launched(k);
}
