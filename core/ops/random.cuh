/* Random numbers by counter in kernels: the same as core/random.h's, from the numbers of a run in device memory. */
#ifndef TANDEM_CORE_OPS_RANDOM_CUH
#define TANDEM_CORE_OPS_RANDOM_CUH

#include "core/device_cuda.h"

/* The finaliser of SplitMix64, as in random.c. */
static __device__ __forceinline__ uint64_t td_mixed(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* What td_random_of(run->seed, key, run->update) is on the host. */
typedef struct td_device_random {
    uint64_t key, counter;
} td_device_random;

static __device__ __forceinline__ td_device_random td_random_on(const td_cuda_run *run, uint64_t key)
{
    return { td_mixed(td_mixed(run->seed) ^ key), (uint64_t)run->update };
}

/* The four words of a block, by Philox 4x32-10: elements block / 16 * 64 + block % 16 + 16 word of the draw. */
static __device__ __forceinline__ uint4 td_random_block(td_device_random r, uint64_t block)
{
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = (uint32_t)r.counter, c3 = (uint32_t)(r.counter >> 32);
    uint32_t key_0 = (uint32_t)r.key, key_1 = (uint32_t)(r.key >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint64_t product_0 = (uint64_t)0xD2511F53u * c0, product_1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(product_1 >> 32) ^ c1 ^ key_0;
        c1 = (uint32_t)product_1;
        c2 = (uint32_t)(product_0 >> 32) ^ c3 ^ key_1;
        c3 = (uint32_t)product_0;
        key_0 += 0x9E3779B9u;
        key_1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

/* The word of element `index` of the draw: four times the work of td_random_block, an element. */
static __device__ __forceinline__ uint32_t td_random_word(td_device_random r, uint64_t index)
{
    uint4 words = td_random_block(r, index / 64 * 16 + index % 16);
    uint32_t low = index & 16 ? words.y : words.x, high = index & 16 ? words.w : words.z;
    return index & 32 ? high : low;
}

#endif
