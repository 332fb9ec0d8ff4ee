/* Draws on a GPU: bit-equal to those of random.c. A thread makes a block of Philox and writes those of its elements that this rank has.
 * Floor: the bytes of the output; ten rounds of Philox for four uniform numbers come close to it where these have two bytes. */
#include "core/ops/number.cuh"
#include "core/ops/random.cuh"

extern "C" {
#include "core/ops/draw.h"
}

enum { THREADS = 256 };

/* This rank's part as runs that are adjacent in the global value, too: dimensions before `split` count them. */
typedef struct draw {
    const td_cuda_run *run;
    uint64_t key;
    int64_t micro;                  /* of this node, from the step's first */
    int64_t elements;               /* of the global value */
    int64_t runs, run_elements;
    int64_t run_blocks;             /* of Philox that a run may touch */
    int split, rank;
    int64_t begin[TD_MAX_DIMS];     /* where this rank's part begins */
    int64_t local[TD_MAX_DIMS], global[TD_MAX_DIMS];
} draw;

/* Where run number `run` begins in the global value. */
static __device__ int64_t run_begin(const draw *d, int64_t run)
{
    int64_t index = 0, stride = 1;
    for (int i = d->rank - 1; i >= 0; i--) {
        int64_t at = d->begin[i];
        if (i < d->split) {
            at += run % d->local[i];
            run /= d->local[i];
        }
        index += at * stride;
        stride *= d->global[i];
    }
    return index;
}

/* The kinds of draws: what a block's element `i` is, where it is in the draw, and which blocks are looked through from an index on. */

/* 0 where the 16 bits are below `below`, else 1 / (1 - p). */
typedef struct mask_value {
    enum { EACH = 8 };
    uint32_t below;
    float kept;
    static int64_t blocks_for(int64_t elements) { return (elements + 6) / 8 + 1; } /* wherever in its block the first is */
    static __device__ uint64_t first_block(uint64_t index) { return index / 8; }
    static __device__ uint64_t index_of(uint64_t block, int i) { return block * 8 + i; }
    __device__ float at(const uint32_t words[4], int i) const { return (words[i / 2] >> i % 2 * 16 & 0xFFFF) < below ? 0 : kept; }
} mask_value;

/* [0, 1), of 24 bits. */
typedef struct uniform_value {
    enum { EACH = 4 };
    static int64_t blocks_for(int64_t elements) { return (elements + 62) / 64 * 16 + 16; } /* wherever in sixteen blocks the first is */
    static __device__ uint64_t first_block(uint64_t index) { return index / 64 * 16; }
    static __device__ uint64_t index_of(uint64_t block, int i) { return block / 16 * 64 + block % 16 + 16 * i; }
    __device__ float at(const uint32_t words[4], int i) const { return (float)(words[i] >> 8) * 0x1p-24f; }
} uniform_value;

template <typename T, typename V> static __global__ void __launch_bounds__(THREADS) make_draw(const __grid_constant__ draw d, V value, T *y)
{
    td_device_random random = td_random_on(d.run, d.key);
    uint64_t base = (uint64_t)(d.run->micro + d.micro) * (uint64_t)d.elements;
    for (int64_t t = blockIdx.x * (int64_t)THREADS + threadIdx.x; t < d.runs * d.run_blocks; t += gridDim.x * (int64_t)THREADS) {
        int64_t run = d.runs == 1 ? 0 : t / d.run_blocks;
        uint64_t first = base + (uint64_t)run_begin(&d, run);
        uint64_t block = V::first_block(first) + (uint64_t)(t - run * d.run_blocks);
        uint4 made = td_random_block(random, block);
        uint32_t words[4] = { made.x, made.y, made.z, made.w };
#pragma unroll
        for (int i = 0; i < V::EACH; i++) {
            int64_t within = (int64_t)(V::index_of(block, i) - first); /* below 0: before the run */
            if (within >= 0 && within < d.run_elements) y[run * d.run_elements + within] = td_narrow<T>(value.at(words, i));
        }
    }
}

template <typename V> static draw draw_of(const td_kernel *k)
{
    const td_draw_attr *attr = (const td_draw_attr *)k->attr;
    const td_arg *y = &k->out[0];
    draw d = {};
    d.run = td_device_run(k);
    d.key = attr->key;
    d.micro = k->phase / 2;
    d.elements = td_shape_elements(y->global);
    d.rank = (int)y->shape.rank;
    for (int i = 0; i < d.rank; i++) {
        d.begin[i] = td_arg_extent(k->run->mesh, y, i).begin;
        d.local[i] = y->shape.dim[i];
        d.global[i] = y->global.dim[i];
        if (d.local[i] != d.global[i]) d.split = i;
    }
    d.runs = td_shape_product(y->shape, 0, d.split);
    d.run_elements = td_shape_product(y->shape, d.split, d.rank);
    d.run_blocks = V::blocks_for(d.run_elements);
    return d;
}

template <typename V> static void launch(const td_kernel *k, V value)
{
    draw d = draw_of<V>(k);
    if (!td_arg_elements(&k->out[0])) return;
    void *y = k->out[0].data;
    unsigned blocks = td_blocks_for(d.runs * d.run_blocks, THREADS, 1);
    TD_CUDA_FLOATS(k->out[0].dtype, (make_draw<T, V><<<blocks, THREADS, 0, td_stream(k)>>>(d, value, (T *)y)));
    td_cuda_launched(k);
}

extern "C" void td_dropout_mask_cuda(const td_kernel *k)
{
    double p = ((const td_draw_attr *)k->attr)->p;
    mask_value value = { td_draw_below(p), (float)(1 / (1 - p)) };
    launch(k, value);
}

extern "C" void td_uniform_cuda(const td_kernel *k)
{
    launch(k, uniform_value());
}
