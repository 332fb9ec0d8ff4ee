/* Philox 4x32-10, sixteen blocks at a time so that the rounds vectorise. */
#include "core/random.h"

#include "core/ops/simd.h"

#include <math.h>
#include <string.h>

enum { BLOCKS = 16, VALUES = 4 * BLOCKS, ROUNDS = 10 };

#define MULTIPLIER_0 0xD2511F53u
#define MULTIPLIER_1 0xCD9E8D57u
#define WEYL_0 0x9E3779B9u
#define WEYL_1 0xBB67AE85u

/* c: the counters of the blocks, word by word; they become the output. High halves are taken apart from low ones
 * because so written they vectorise. */
static void philox_rounds(uint32_t c[4][BLOCKS], uint32_t key_0, uint32_t key_1)
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

void td_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c[4][BLOCKS];
    for (int word = 0; word < 4; word++)
        for (int i = 0; i < BLOCKS; i++)
            c[word][i] = counter[word];
    philox_rounds(c, key[0], key[1]);
    for (int word = 0; word < 4; word++)
        out[word] = c[word][0];
}

/* The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit. */
static uint64_t mixed(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

td_random td_random_of(uint64_t seed, uint64_t key, uint64_t counter)
{
    return (td_random){ .key = mixed(mixed(seed) ^ key), .counter = counter };
}

uint64_t td_random_hash(const char *text, uint64_t number)
{
    uint64_t hash = 0xCBF29CE484222325u; /* FNV-1a */
    for (const unsigned char *c = (const unsigned char *)text; *c; c++)
        hash = (hash ^ *c) * 0x100000001B3u;
    return mixed(hash ^ mixed(number));
}

/* All values of a group of sixteen blocks, in order of their index. */
static void group_values(td_random r, uint64_t group, uint32_t values[4][BLOCKS])
{
    uint64_t first = group * BLOCKS;
    for (int i = 0; i < BLOCKS; i++) { /* the group's blocks differ in the low word alone */
        values[0][i] = (uint32_t)first + (uint32_t)i;
        values[1][i] = (uint32_t)(first >> 32);
        values[2][i] = (uint32_t)r.counter;
        values[3][i] = (uint32_t)(r.counter >> 32);
    }
    philox_rounds(values, (uint32_t)r.key, (uint32_t)(r.key >> 32));
}

void td_random_bits(td_random r, uint64_t index, int64_t count, uint32_t *out)
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

void td_random_uniform(td_random r, uint64_t index, int64_t count, double *out)
{
    uint32_t bits[VALUES];
    for (int64_t done = 0; done < count; done += VALUES) {
        int64_t n = count - done < VALUES ? count - done : VALUES;
        td_random_bits(r, index + (uint64_t)done, n, bits);
        for (int64_t i = 0; i < n; i++)
            out[done + i] = (double)(bits[i] >> 8) * 0x1p-24;
    }
}

/* Box and Muller: words 0 and 1 of a block give a pair of values, words 2 and 3 another. */
void td_random_normal(td_random r, uint64_t index, int64_t count, double *out)
{
    const double two_pi = 6.283185307179586476925;
    uint32_t values[4][BLOCKS];
    for (int64_t done = 0; done < count;) {
        uint64_t at = index + (uint64_t)done;
        group_values(r, at / VALUES, values);
        for (int i = (int)(at % VALUES); i < VALUES && done < count; i++, done++) {
            int word = i / BLOCKS, block = i % BLOCKS;
            double radius = sqrt(-2 * log(((double)values[word & ~1][block] + 1) * 0x1p-32));
            double angle = two_pi * ((double)values[word | 1][block] * 0x1p-32);
            out[done] = radius * (word & 1 ? sin(angle) : cos(angle));
        }
    }
}
