/* Initial values on a GPU: those of state.c, keyed alike. Uniform and constant ones are equal to the bit. Normal ones are computed in f64
 * as there, by functions whose last bits may differ, and rounded then: of 10^8 f32 values about one is the neighbour of the host's.
 * A thread makes a block of Philox and writes those of its four elements that are in the range. */
#include "core/ops/number.cuh"
#include "core/ops/random.cuh"

enum { THREADS = 256 };

/* One of the pair of normal values that two words give: Box and Muller, as in random.c. */
static __device__ double normal_value(uint32_t radius_word, uint32_t angle_word, bool second)
{
    double radius = sqrt(-2 * log(((double)radius_word + 1) * 0x1p-32));
    double angle = 6.283185307179586476925 * ((double)angle_word * 0x1p-32);
    return radius * (second ? sin(angle) : cos(angle));
}

static __device__ double normal_of(const uint32_t words[4], int word)
{
    return normal_value(word & 2 ? words[2] : words[0], word & 2 ? words[3] : words[1], word & 1);
}

/* Drawn again, with further counters, until it is within +-2. */
static __device__ double truncated_of(double value, uint64_t key, uint64_t block, int word)
{
    for (uint64_t again = 1; !(fabs(value) < 2); again++) {
        uint4 made = td_random_block({ key, again }, block);
        uint32_t words[4] = { made.x, made.y, made.z, made.w };
        value = normal_of(words, word);
    }
    return value;
}

/* The host contracts a + b x. */
static __device__ double value_of(const td_initial *part, const uint32_t words[4], uint64_t block, int word)
{
    const td_init *init = &part->init;
    double drawn;
    switch (init->kind) {
    case td_init::TD_INIT_CONSTANT: return init->a;
    case td_init::TD_INIT_UNIFORM:  return fma(init->b - init->a, (double)(words[word] >> 8) * 0x1p-24, init->a);
    case td_init::TD_INIT_NORMAL:   return fma(init->b, normal_of(words, word), init->a);
    case td_init::TD_INIT_TRUNCATED_NORMAL: break;
    }
    drawn = truncated_of(normal_of(words, word), part->key, block, word);
    return fma(init->b, drawn, init->a);
}

template <typename T> static __global__ void __launch_bounds__(THREADS) initialise(const __grid_constant__ td_initial part, int64_t blocks)
{
    uint64_t first_block = (uint64_t)part.first / 64 * 16;
    T *to = (T *)part.to;
    for (int64_t t = blockIdx.x * (int64_t)THREADS + threadIdx.x; t < blocks; t += gridDim.x * (int64_t)THREADS) {
        uint64_t block = first_block + (uint64_t)t, index = block / 16 * 64 + block % 16;
        uint4 made = td_random_block({ part.key, 0 }, block);
        uint32_t words[4] = { made.x, made.y, made.z, made.w };
#pragma unroll
        for (int w = 0; w < 4; w++) {
            int64_t within = (int64_t)(index + 16 * w) - part.first;
            if (within >= 0 && within < part.count) to[within] = td_narrow<T>((float)value_of(&part, words, block, w));
        }
    }
}

extern "C" bool td_initial_cuda(td_context *td, const td_initial *part, cudaStream_t queue)
{
    if (!part->count) return true;
    int64_t blocks = (part->first % 64 + part->count + 63) / 64 * 16; /* from the beginning of a group of sixteen */
    unsigned grid = td_blocks_for(blocks, THREADS, 1);
    TD_CUDA_FLOATS(part->dtype, (initialise<T><<<grid, THREADS, 0, queue>>>(*part, blocks)));
    return td_cuda_ok(td, cudaGetLastError(), "drawing initial values");
}
