/* What the kernels of attention for GPUs share: a call's operands and masks, as they see them. */
#ifndef TANDEM_CORE_OPS_ATTENTION_FLASH_CUH
#define TANDEM_CORE_OPS_ATTENTION_FLASH_CUH

#include "core/device_cuda.h"
#include "core/ops/attention_cuda.h"
#include "core/ops/draw.h"
#include "core/ops/random.cuh"

typedef struct flash {
    td_attention_layout at;
    const void *q, *key, *value, *o, *dy;
    float *log_sums;                          /* (batch, heads, rows) */
    float *inner;                             /* the same: sum(do o) */
    const td_cuda_run *run;
    float scale, kept;                        /* kept: 1 / (1 - p) */
    int causal;
    int64_t window;
    uint32_t below;                           /* td_draw_below(p) */
    bool drops;
    uint64_t draw, micro;                     /* key of the draw; micro-batches of this step before this one */
} flash;

static __device__ __forceinline__ int64_t element(const td_heads &x, int64_t sequence, int64_t head, int64_t row)
{
    return x.at + sequence * x.batch + head * x.head + row * x.row;
}

static __device__ __forceinline__ int64_t position_of(const flash &f, int64_t sequence, int64_t row)
{
    return (f.at.positions ? f.at.positions[sequence] : f.at.keys - f.at.rows) + row;
}

static __device__ __forceinline__ bool sees(const flash &f, int64_t position, int64_t key, int64_t keys)
{
    int64_t distance = position - key;
    return key < keys && (!f.causal || distance >= 0) && (!f.window || (distance < f.window && -distance < f.window));
}

static __device__ __forceinline__ int64_t keys_of(const flash &f, int64_t sequence)
{
    int64_t keys = f.at.lengths ? f.at.lengths[sequence] : f.at.keys;
    return keys < 0 ? 0 : keys > f.at.keys ? f.at.keys : keys;
}

/* Keys that any of `rows` queries from position `at` on sees, from a multiple of `tile` on. */
typedef struct keys_range {
    int64_t begin, end;
} keys_range;

template <int rows, int tile> static __device__ __forceinline__ keys_range range_of(const flash &f, int64_t at, int64_t limit)
{
    keys_range r = { 0, limit };
    int64_t last = at + rows - 1;
    if (f.causal && last + 1 < r.end) r.end = last + 1;
    if (f.window && last + f.window < r.end) r.end = last + f.window;
    if (f.window && at - f.window + 1 > 0) r.begin = (at - f.window + 1) / tile * tile;
    return r;
}

/* Where the draw of a query's keys begins: dropout is keyed by the index in the global (B, H, T, S). */
static __device__ __forceinline__ uint64_t draw_of(const flash &f, int64_t sequence, int64_t head, int64_t row)
{
    uint64_t whole = (uint64_t)f.at.rows * (uint64_t)f.at.keys * (uint64_t)f.at.global_heads;
    uint64_t at = ((uint64_t)(f.at.first_sequence + sequence) * (uint64_t)f.at.global_heads + (uint64_t)(f.at.first_head + head)) *
                      (uint64_t)f.at.rows + (uint64_t)row;
    return ((uint64_t)f.run->micro + f.micro) * whole * (uint64_t)f.at.global_batch + at * (uint64_t)f.at.keys;
}

/* What dropout makes of a probability: 0, or 1 / (1 - p). */
static __device__ __forceinline__ float kept_of(const flash &f, int64_t sequence, int64_t head, int64_t row, int64_t key)
{
    if (!f.drops) return 1;
    return td_random_half(td_random_on(f.run, f.draw), draw_of(f, sequence, head, row) + (uint64_t)key) >= f.below ? f.kept : 0;
}

/* ---- Host */

static inline flash flash_of(const td_kernel *k)
{
    const td_attention_attr *attr = (const td_attention_attr *)k->attr;
    bool is_forward = k->op == &td_op_attention;
    flash f = { .at = td_attention_layout_of(k), .q = k->in[0].data, .key = k->in[1].data, .value = k->in[2].data };
    f.log_sums = (float *)(is_forward ? k->out[1].data : k->in[4].data);
    if (!is_forward) {
        f.o = k->in[3].data;
        f.dy = k->in[5].data;
        f.inner = (float *)k->workspace;
    }
    f.run = td_device_run(k);
    f.scale = (float)attr->scale;
    f.causal = attr->causal;
    f.window = attr->window;
    f.drops = attr->p > 0;
    f.kept = (float)(1 / (1 - attr->p));
    f.below = td_draw_below(attr->p);
    f.draw = attr->key;
    f.micro = k->phase / 2;
    return f;
}

/* Shared memory beyond what a kernel may have unasked. */
static inline bool allow_shared_memory(const td_kernel *k, const void *kernel, size_t bytes)
{
    return bytes <= 48 << 10 ||
           td_cuda_ok(k->run->td, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
                      "asking for shared memory");
}

/* Blocks of the kernel, of so many threads and with so many bytes of shared memory, for call k. */
#define LAUNCH(kernel, blocks, threads, bytes, ...)                                                                                 \
    do {                                                                                                                            \
        auto launched = kernel;                                                                                                     \
        if (allow_shared_memory(k, (const void *)launched, bytes)) launched<<<blocks, threads, bytes, td_stream(k)>>>(__VA_ARGS__); \
    } while (0)

#endif
