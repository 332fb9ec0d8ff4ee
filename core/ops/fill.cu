/* fill and iota on a GPU. Floor: the bytes of the output. */
#include "core/device_cuda.h"
#include "core/ops/stored.cuh"

extern "C" {
#include "core/ops/convert.h"
}

enum { THREADS = 256, MOST_BLOCKS = 4096 };

/* Sixteen bytes: one element, again and again. */
typedef union pattern {
    uint4 group;
    unsigned char byte[16];
} pattern;

static unsigned blocks_for(int64_t count)
{
    return (unsigned)td_smaller(td_blocks_for(count, THREADS, 1), MOST_BLOCKS);
}

/* `groups` of sixteen bytes, then the others. */
static __global__ void __launch_bounds__(THREADS) fill(unsigned char *to, pattern p, int64_t groups, int64_t bytes)
{
    int64_t first = blockIdx.x * (int64_t)THREADS + threadIdx.x, step = gridDim.x * (int64_t)THREADS;
    for (int64_t i = first; i < groups; i += step) ((uint4 *)to)[i] = p.group;
    for (int64_t i = groups * 16 + first; i < bytes; i += step) to[i] = p.byte[i % 16];
}

extern "C" void td_fill_cuda(const td_kernel *k)
{
    const td_arg *y = &k->out[0];
    int64_t bytes = td_arg_bytes(y), size = td_dtype_size(y->dtype);
    if (!bytes) return;
    double value = op_fill_value(k->attr);
    double element; /* room for any */
    pattern p;
    td_store_f64(&element, y->dtype, &value, 1);
    for (int64_t at = 0; at < 16; at += size) memcpy(p.byte + at, &element, (size_t)size);
    int64_t groups = (uintptr_t)y->data % 16 ? 0 : bytes / 16;
    fill<<<blocks_for(groups ? groups : bytes), THREADS, 0, td_stream(k)>>>((unsigned char *)y->data, p, groups, bytes);
    td_cuda_launched(k);
}

template <typename S> static __global__ void __launch_bounds__(THREADS) iota(S *y, int64_t begin, int64_t count)
{
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count; i += gridDim.x * (int64_t)THREADS) td_put(y[i], (double)(begin + i));
}

extern "C" void td_iota_cuda(const td_kernel *k)
{
    const td_arg *y = &k->out[0];
    int64_t count = td_arg_elements(y), begin = td_arg_extent(k->run->mesh, y, 0).begin;
    if (!count) return;
    TD_STORED(y->dtype, (iota<S><<<blocks_for(count), THREADS, 0, td_stream(k)>>>((S *)y->data, begin, count)));
    td_cuda_launched(k);
}
