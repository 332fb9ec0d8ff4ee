/* Elementary functions in f32 that vectorise: branch-free, within about 2 units in the last place of the true value
 * over the whole range, exact at infinities, NaN in gives NaN out. Polynomials are those of Cephes (Moshier).
 */
#ifndef TANDEM_CORE_OPS_MATH_H
#define TANDEM_CORE_OPS_MATH_H

#include <stdint.h>
#include <string.h>

static inline uint32_t td_bits_f32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float td_from_bits_f32(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* e^x = 2^n e^r, |r| <= ln 2 / 2. 2^n is applied in two halves: subnormal results and overflow come out right. */
static inline float td_exp_f32(float x)
{
    const float rounder = 0x1.8p23f; /* adding it leaves the nearest integer in the low bits */
    float clamped = x < -104 ? -104 : x; /* one condition at a time: two in one keep a branch */
    clamped = clamped > 89 ? 89 : clamped;
    float shifted = clamped * 1.44269504088896341f + rounder;
    float n = shifted - rounder;
    float r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1;
    int32_t whole = (int32_t)(td_bits_f32(shifted) - td_bits_f32(rounder));
    int32_t half = whole >> 1;
    float low = td_from_bits_f32((uint32_t)(half + 127) << 23);
    float high = td_from_bits_f32((uint32_t)(whole - half + 127) << 23);
    return p * low * high;
}

static inline float td_sigmoid_f32(float x) { return 1 / (1 + td_exp_f32(-x)); }

/* Near 0 an odd polynomial, elsewhere 1 - 2 / (e^2|x| + 1). */
static inline float td_tanh_f32(float x)
{
    float size = x < 0 ? -x : x;
    float z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    float near = p * z * x + x;
    float far = 1 - 2 / (td_exp_f32(2 * size) + 1);
    far = x < 0 ? -far : far;
    return size < 0.625f ? near : far;
}

/* x = 2^n m, sqrt(1/2) <= m < sqrt(2). Below 0 gives NaN, 0 gives -infinity. */
static inline float td_log_f32(float x)
{
    float scaled = x < 0x1p-126f ? x * 0x1p23f : x; /* subnormals */
    uint32_t bits = td_bits_f32(scaled);
    float n = (float)((int32_t)(bits >> 23 & 0xFF) - 126) - (x < 0x1p-126f ? 23.0f : 0.0f);
    float m = td_from_bits_f32((bits & 0x007FFFFF) | 0x3F000000); /* [1/2, 1) */
    float below = m < 0.707106781186547524f ? 1.0f : 0.0f;
    n = n - below;
    float f = m + m * below - 1;
    float z = f * f;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    float y = p * f * z + n * -2.12194440e-4f - 0.5f * z;
    y = f + y + n * 0.693359375f;
    y = x > 3.4028234664e38f ? x : y;                       /* infinity */
    y = x == 0 ? -__builtin_inff() : y;
    return x >= 0 ? y : __builtin_nanf("");
}

#endif
