/* Optimizer updates on CUDA; see update.c. Sums of squares are taken in f64, as on the CPU: a norm has the digits of its dtype whatever
 * the number of parameters. The floors are the flat value read once, and for an update what its rule reads and writes.
 */
#include "core/device_cuda.h"
#include "core/ops/group.cuh"

enum { THREADS = 256, BLOCKS = 1056, BLOCK_ELEMENTS = 4096 }; /* blocks at most, and elements of one at least */

/* A flat value in chunks, one a block, whose results are joined in order by a second kernel. */
typedef struct chunks {
    int64_t elements, count;                  /* of a chunk, and how many chunks */
} chunks;

static chunks chunks_of(int64_t elements, int64_t most)
{
    int64_t count = elements / BLOCK_ELEMENTS;
    count = count < 1 ? 1 : count > most ? most : count;
    int64_t each = ((elements + count - 1) / count + 3) / 4 * 4;
    chunks c = { each ? each : 4, each ? (elements + each - 1) / each : 1 };
    return c;
}

/* ---- sum_squares */

static __global__ void __launch_bounds__(THREADS) squares_kernel(const float *x, double *partial, int64_t elements, int64_t chunk)
{
    int64_t begin = blockIdx.x * chunk;
    double sum = 0;
    td_group_visit<THREADS>(x + begin, begin + chunk < elements ? chunk : elements - begin, [&](int64_t, auto pack) {
        #pragma unroll
        for (int i = 0; i < (int)(sizeof pack / sizeof(float)); i++) sum += (double)pack.at[i] * (double)pack.at[i];
    });
    sum = td_group_join<THREADS>(sum, td_plus());
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

static __global__ void __launch_bounds__(THREADS) add_kernel(const double *partial, int64_t count, float *out)
{
    double sum = 0;
    for (int64_t i = threadIdx.x; i < count; i += THREADS) sum += partial[i];
    sum = td_group_join<THREADS>(sum, td_plus());
    if (threadIdx.x == 0) *out = (float)sum;
}

extern "C" bool td_sum_squares_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)td;
    out->workspace_bytes = chunks_of(td_arg_elements(&k->in[0]), BLOCKS).count * (int64_t)sizeof(double);
    return true;
}

extern "C" void td_sum_squares_cuda(const td_kernel *k)
{
    int64_t elements = td_arg_elements(&k->in[0]);
    chunks c = chunks_of(elements, BLOCKS);
    double *partial = (double *)k->workspace;
    squares_kernel<<<(unsigned)c.count, THREADS, 0, td_stream(k)>>>((const float *)k->in[0].data, partial, elements, c.elements);
    td_cuda_launched(k);
    add_kernel<<<1, THREADS, 0, td_stream(k)>>>(partial, c.count, (float *)k->out[0].data);
    td_cuda_launched(k);
}

/* ---- max_abs. A NaN is the largest. */

struct larger {
    __device__ __forceinline__ float operator()(float a, float b) const { return b > a || b != b ? b : a; }
};

/* Block (part, chunk). */
static __global__ void __launch_bounds__(THREADS)
largest_kernel(const float *x, float *partial, int64_t elements, int64_t part_elements, chunks c)
{
    int64_t part = blockIdx.x / c.count, part_end = (part + 1) * part_elements;
    if (part_end > elements) part_end = elements;
    int64_t begin = part * part_elements + blockIdx.x % c.count * c.elements, count = part_end - begin;
    if (count > c.elements) count = c.elements;
    float most = 0;
    td_group_visit<THREADS>(x + begin, count > 0 ? count : 0, [&](int64_t, auto pack) {
        #pragma unroll
        for (int i = 0; i < (int)(sizeof pack / sizeof(float)); i++) most = larger()(most, fabsf(pack.at[i]));
    });
    most = td_group_join<THREADS>(most, larger());
    if (threadIdx.x == 0) partial[blockIdx.x] = most;
}

/* A warp for each part. */
static __global__ void __launch_bounds__(32) largest_of_kernel(const float *partial, int64_t count, float *out)
{
    float most = 0;
    for (int64_t i = threadIdx.x; i < count; i += 32) most = larger()(most, partial[blockIdx.x * count + i]);
    most = td_group_join<32>(most, larger());
    if (threadIdx.x == 0) out[blockIdx.x] = most;
}

static chunks chunks_of_parts(const td_kernel *k, int64_t *part_elements)
{
    int64_t parts = td_arg_elements(&k->out[0]), elements = td_arg_elements(&k->in[0]);
    *part_elements = parts ? (elements + parts - 1) / parts : 0;
    return chunks_of(*part_elements, parts && parts < BLOCKS ? BLOCKS / parts : 1);
}

extern "C" bool td_max_abs_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)td;
    int64_t part_elements;
    out->workspace_bytes = chunks_of_parts(k, &part_elements).count * td_arg_elements(&k->out[0]) * (int64_t)sizeof(float);
    return true;
}

extern "C" void td_max_abs_cuda(const td_kernel *k)
{
    int64_t parts = td_arg_elements(&k->out[0]), part_elements;
    chunks c = chunks_of_parts(k, &part_elements);
    float *partial = (float *)k->workspace;
    if (parts == 0) return;
    largest_kernel<<<(unsigned)(parts * c.count), THREADS, 0, td_stream(k)>>>((const float *)k->in[0].data, partial, td_arg_elements(&k->in[0]),
                                                                             part_elements, c);
    td_cuda_launched(k);
    largest_of_kernel<<<(unsigned)parts, 32, 0, td_stream(k)>>>(partial, c.count, (float *)k->out[0].data);
    td_cuda_launched(k);
}

/* ---- update_unit */

enum { RANGES = 32 };                         /* that a rule gets at once */

extern "C" bool td_update_unit_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)out;
    const td_update_rule *rule = td->rules[((const td_update_attr *)k->attr)->rule];
    if (rule->cuda) return true;
    td_fail(td, TD_ERROR_UNSUPPORTED, "update_unit: the rule '%s' cannot be run on a GPU; choose another optimizer, or the CPU", rule->name);
    return false;
}

/* The kernels work in place: outputs elsewhere begin as their inputs. */
static bool copy_values(const td_kernel *k)
{
    for (int o = 0; o < k->outputs; o++) {
        const td_arg *from = &k->in[o ? 1 + o : 0];
        if (!td_copy_bytes_cuda(k->run->td, k->out[o].data, from->data, td_arg_bytes(from), td_stream(k))) return false;
    }
    return true;
}

extern "C" void td_update_unit_cuda(const td_kernel *k)
{
    const td_update_attr *a = (const td_update_attr *)k->attr;
    const td_update_segment *segments = (const td_update_segment *)(a + 1);
    const td_update_rule *rule = k->run->td->rules[a->rule];
    const td_arg *scalars = k->in + 2 + a->moments + a->copied, *when = scalars + 3, *copy = a->copied ? &k->out[k->outputs - 1] : NULL;
    td_update_scalars s = { scalars[0].data, scalars[1].data, scalars[2].data, when < k->in + k->inputs ? when->data : NULL, k->run->queue };
    int64_t held = td_arg_elements(&k->in[0]), first = td_arg_extent(k->run->mesh, &k->in[0], (int)k->in[0].shape.rank - 1).begin;
    td_update_range ranges[RANGES];
    int count = 0;
    if (!copy_values(k)) return;
    for (uint32_t i = 0; i < a->count; i++) {
        int64_t begin = segments[i].begin - first, end = segments[i].end - first;
        if (begin < 0) begin = 0;
        if (end > held) end = held;
        if (end <= begin) continue;
        td_update_range *r = &ranges[count++];
        memset(r, 0, sizeof *r);
        r->count = end - begin;
        r->dtype = k->in[0].dtype;
        r->parameter = td_arg_at(&k->out[0], begin);
        r->gradient = td_arg_at(&k->in[1], begin);
        for (int m = 0; m < rule->moments; m++) r->moment[m] = td_arg_at(&k->out[1 + m], begin);
        if (copy) r->copy = td_arg_at(copy, begin), r->copy_dtype = copy->dtype;
        memcpy(r->hyper, segments[i].hyper, sizeof r->hyper);
        if (count < RANGES) continue;
        rule->cuda(ranges, count, &s);
        count = 0;
    }
    if (count) rule->cuda(ranges, count, &s);
    td_cuda_launched(k);
}
