/* Draws of bits, a group of sixteen Philox blocks at a time; random.c includes this, and random_avx512.c with rounds of its own. */
#ifndef TANDEM_CORE_RANDOM_BITS_H
#define TANDEM_CORE_RANDOM_BITS_H

#include "core/ops/simd.h"
#include "core/random.h"

#include <string.h>

enum { BLOCKS = 16, VALUES = 4 * BLOCKS, ROUNDS = 10 };

#define MULTIPLIER_0 0xD2511F53u
#define MULTIPLIER_1 0xCD9E8D57u
#define WEYL_0 0x9E3779B9u
#define WEYL_1 0xBB67AE85u

/* c: the counters of the blocks, word by word; they become the output. High halves are taken apart from low ones
 * because so written they vectorise. */
static inline void philox_rounds(uint32_t c[4][BLOCKS], uint32_t key_0, uint32_t key_1)
{
    for (int round = 0; round < ROUNDS; round++) {
        TD_SIMD
        for (int i = 0; i < BLOCKS; i++) {
            uint32_t c0 = c[0][i], c1 = c[1][i], c2 = c[2][i], c3 = c[3][i];
            uint32_t high_0 = (uint32_t)(((uint64_t)MULTIPLIER_0 * c0) >> 32);
            uint32_t high_1 = (uint32_t)(((uint64_t)MULTIPLIER_1 * c2) >> 32);
            c[0][i] = high_1 ^ c1 ^ key_0;
            c[1][i] = MULTIPLIER_1 * c2;
            c[2][i] = high_0 ^ c3 ^ key_1;
            c[3][i] = MULTIPLIER_0 * c0;
        }
        key_0 += WEYL_0;
        key_1 += WEYL_1;
    }
}

#ifndef PHILOX_ROUNDS
#define PHILOX_ROUNDS philox_rounds
#endif

/* All values of a group of sixteen blocks, in order of their index. */
static inline void group_values(td_random r, uint64_t group, uint32_t values[4][BLOCKS])
{
    uint64_t first = group * BLOCKS;
    for (int i = 0; i < BLOCKS; i++) { /* the group's blocks differ in the low word alone */
        values[0][i] = (uint32_t)first + (uint32_t)i;
        values[1][i] = (uint32_t)(first >> 32);
        values[2][i] = (uint32_t)r.counter;
        values[3][i] = (uint32_t)(r.counter >> 32);
    }
    PHILOX_ROUNDS(values, (uint32_t)r.key, (uint32_t)(r.key >> 32));
}

/* Elements [index, index + count) of the draw. */
static inline void draw_bits(td_random r, uint64_t index, int64_t count, uint32_t *out)
{
    uint32_t values[4][BLOCKS];
    while (count > 0) {
        int64_t skip = (int64_t)(index % VALUES);
        int64_t n = VALUES - skip < count ? VALUES - skip : count;
        group_values(r, index / VALUES, values);
        memcpy(out, &values[0][0] + skip, (size_t)n * sizeof *out);
        out += n;
        index += (uint64_t)n;
        count -= n;
    }
}

/* The same of halves: those of a block, then those of the next. Processors have the low half of a word first. */
static inline void draw_halves(td_random r, uint64_t index, int64_t count, uint16_t *out)
{
    uint32_t values[4][BLOCKS], turned[BLOCKS][4];
    while (count > 0) {
        int64_t skip = (int64_t)(index % (2 * VALUES));
        int64_t n = 2 * VALUES - skip < count ? 2 * VALUES - skip : count;
        group_values(r, index / (2 * VALUES), values);
        for (int i = 0; i < BLOCKS; i++)
            for (int word = 0; word < 4; word++)
                turned[i][word] = values[word][i];
        memcpy(out, (const char *)turned + skip * (int64_t)sizeof *out, (size_t)n * sizeof *out);
        out += n;
        index += (uint64_t)n;
        count -= n;
    }
}

/* draw_bits and draw_halves for processors with AVX-512. */
void td_random_bits_avx512(td_random r, uint64_t index, int64_t count, uint32_t *out);
void td_random_halves_avx512(td_random r, uint64_t index, int64_t count, uint16_t *out);

#endif
