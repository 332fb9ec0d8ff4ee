/* Draws of bits in vectors of sixteen. The rounds are spelt out: compilers take the slow product of 64 bits for that of 32. */
#ifdef __AVX512F__
#include <immintrin.h>
#define PHILOX_ROUNDS wide_rounds
#endif
#include "core/random.h"

#ifdef __AVX512F__
static inline void wide_rounds(uint32_t c[4][16], uint32_t key_0, uint32_t key_1);
#endif

#include "core/random_bits.h"

#ifdef __AVX512F__
/* x times m, each lane's 64 bits: low and high halves apart. */
static inline void products(__m512i x, __m512i m, __m512i *low, __m512i *high)
{
    const __m512i lows = _mm512_setr_epi32(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    const __m512i highs = _mm512_setr_epi32(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    __m512i even = _mm512_mul_epu32(x, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);
    *low = _mm512_permutex2var_epi32(even, lows, odd);
    *high = _mm512_permutex2var_epi32(even, highs, odd);
}

static inline void wide_rounds(uint32_t c[4][BLOCKS], uint32_t key_0, uint32_t key_1)
{
    const __m512i m0 = _mm512_set1_epi32((int)MULTIPLIER_0), m1 = _mm512_set1_epi32((int)MULTIPLIER_1);
    __m512i c0 = _mm512_loadu_si512(c[0]), c1 = _mm512_loadu_si512(c[1]), c2 = _mm512_loadu_si512(c[2]), c3 = _mm512_loadu_si512(c[3]);
    for (int round = 0; round < ROUNDS; round++) {
        __m512i low_0, high_0, low_1, high_1;
        products(c0, m0, &low_0, &high_0);
        products(c2, m1, &low_1, &high_1);
        c0 = _mm512_xor_si512(_mm512_xor_si512(high_1, c1), _mm512_set1_epi32((int)key_0));
        c1 = low_1;
        c2 = _mm512_xor_si512(_mm512_xor_si512(high_0, c3), _mm512_set1_epi32((int)key_1));
        c3 = low_0;
        key_0 += WEYL_0;
        key_1 += WEYL_1;
    }
    _mm512_storeu_si512(c[0], c0);
    _mm512_storeu_si512(c[1], c1);
    _mm512_storeu_si512(c[2], c2);
    _mm512_storeu_si512(c[3], c3);
}
#endif

void td_random_bits_avx512(td_random r, uint64_t index, int64_t count, uint32_t *out)
{
    draw_bits(r, index, count, out);
}

void td_random_halves_avx512(td_random r, uint64_t index, int64_t count, uint16_t *out)
{
    draw_halves(r, index, count, out);
}
