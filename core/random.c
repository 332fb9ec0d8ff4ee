/* Philox 4x32-10, sixteen blocks at a time so that the rounds vectorise. */
#include "core/random.h"

#include "core/cpu.h"
#include "core/random_bits.h"

#include <math.h>

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

void td_random_bits(td_random r, uint64_t index, int64_t count, uint32_t *out)
{
    if (td_cpu_has_avx512())
        td_random_bits_avx512(r, index, count, out);
    else
        draw_bits(r, index, count, out);
}

void td_random_halves(td_random r, uint64_t index, int64_t count, uint16_t *out)
{
    if (td_cpu_has_avx512())
        td_random_halves_avx512(r, index, count, out);
    else
        draw_halves(r, index, count, out);
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
