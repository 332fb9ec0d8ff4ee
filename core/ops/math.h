/* Elementary functions in f32 that vectorise: branch-free, within about 2 units in the last place of the true value
 * over the whole range unless another bound is given, exact at infinities, NaN in gives NaN out. Polynomials are those of Cephes (Moshier).
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

/* (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2. */
static inline float td_exp_rest_f32(float r)
{
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p;
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
    float p = td_exp_rest_f32(r);
    p = p * (r * r) + r + 1;
    int32_t whole = (int32_t)(td_bits_f32(shifted) - td_bits_f32(rounder));
    int32_t half = whole >> 1;
    float low = td_from_bits_f32((uint32_t)(half + 127) << 23);
    float high = td_from_bits_f32((uint32_t)(whole - half + 127) << 23);
    return p * low * high;
}

/* e^x where x is at most 88: 0 below -87, so that 2^n is a number of its own and nothing needs a bound first. */
static inline float td_exp_below_f32(float x)
{
    const float rounder = 0x1.8p23f;
    float shifted = x * 1.44269504088896341f + rounder;
    float n = shifted - rounder;
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = td_exp_rest_f32(r);
    p = p * (r * r) + r + 1;
    float y = p * td_from_bits_f32((td_bits_f32(shifted) << 23) + 0x3F800000u);
    return x < -87 ? 0 : y;
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
    float near = (p * z + 1) * x; /* as a product: a zero keeps its sign */
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

/* log(1 + x): log u of the rounded sum u = 1 + x, and what rounding lost. */
static inline float td_log1p_f32(float x)
{
    float u = 1 + x;
    float y = td_log_f32(u) - (u - 1 - x) / u;
    y = x > 3.4028234664e38f ? x : y;                       /* infinity */
    y = x == 0 ? x : y;                                     /* with its sign */
    return x == -1 ? -__builtin_inff() : y;
}

/* Near 0 by the polynomial of td_exp_f32, elsewhere e^x - 1. */
static inline float td_expm1_f32(float x)
{
    float p = td_exp_rest_f32(x);
    float near = (p * x + 1) * x; /* as a product: a zero keeps its sign */
    float far = td_exp_f32(x) - 1;
    return x < 0.34f && x > -0.34f ? near : far;
}

static inline float td_softplus_f32(float x)
{
    float size = x < 0 ? -x : x;
    float above = x < 0 ? 0 : x;
    return above + td_log1p_f32(td_exp_f32(-size));
}

/* Below 1 an odd polynomial, above 1 - e^(-x^2) q(1 / x^2) / x. */
static inline float td_erf_f32(float x)
{
    float size = x < 0 ? -x : x;
    float z = x * x;
    float p = 7.853861353153693e-5f;
    p = p * z - 8.010193625184903e-4f;
    p = p * z + 5.188327685732524e-3f;
    p = p * z - 2.685381193529856e-2f;
    p = p * z + 1.128358514861418e-1f;
    p = p * z - 3.761262582423300e-1f;
    p = p * z + 1.128379165726710f;
    float near = x * p;
    float inverse = 1 / (size < 1 ? 1 : size);
    float w = inverse * inverse;
    float q = 2.326819970068386e-2f;
    q = q * w - 1.387039388740657e-1f;
    q = q * w + 3.687424674597105e-1f;
    q = q * w - 5.824733027278666e-1f;
    q = q * w + 6.210004621745983e-1f;
    q = q * w - 4.944515323274145e-1f;
    q = q * w + 3.404879937665872e-1f;
    q = q * w - 2.741127028184656e-1f;
    q = q * w + 5.638259427386472e-1f;
    float far = 1 - td_exp_f32(-z) * inverse * q;
    far = size > 4 ? 1 : far;
    far = x < 0 ? -far : far;
    return size >= 1 ? far : near;                          /* a NaN takes the polynomial */
}

/* erf(x / sqrt 2) within 4e-7 of the true value, exact from 3.92 sqrt 2 on: a quotient t p(t^2) / q(t^2) whose own error, fitted for the
 * smallest largest one on [0, 3.92], is 2e-8. p / q stays at its value for t = 3.91, where erf is 1 - 3e-8, so that beyond the product
 * passes 1 and is held there. Where the sum with 1 is what counts, as in gelu, no digit is lost to the exponential's way. */
static inline float td_erf_half_f32(float x)
{
    float t = x * 0.70710678f;
    float z = t * t;
    z = z < 15.2881f ? z : 15.2881f;
    float p = 2.050033098e-6f;
    p = p * z + 2.848751543e-4f;
    p = p * z + 3.765515125e-3f;
    p = p * z + 5.274840754e-2f;
    p = p * z + 1.904048110e-1f;
    p = p * z + 1.128379146f;
    float q = 3.809075320e-5f;
    q = q * z + 1.162500625e-3f;
    q = q * z + 1.496902294e-2f;
    q = q * z + 1.141083378e-1f;
    q = q * z + 5.020746127e-1f;
    q = q * z + 1;
    float y = __builtin_fabsf(t) * p / q;
    y = y > 1 ? 1 : y;
    return __builtin_copysignf(y, x);
}

static inline float td_gelu_f32(float x) { return x * 0.5f * (1 + td_erf_half_f32(x)); }

static inline float td_gelu_slope_f32(float x)
{
    return 0.5f * (1 + td_erf_half_f32(x)) + x * 0.39894228f * td_exp_below_f32(-0.5f * x * x);
}

/* gelu_tanh(x) = x sigmoid(w), w = 2 sqrt(2 / pi) (x + 0.044715 x^3). */
static inline float td_gelu_tanh_f32(float x)
{
    return x * td_sigmoid_f32(1.59576912f * x * (1 + 0.044715f * x * x));
}

static inline float td_gelu_tanh_slope_f32(float x)
{
    float z = x * x;
    z = z > 1e4f ? 1e4f : z; /* where s is 0 or 1: 0 times infinity would be NaN */
    float s = td_sigmoid_f32(1.59576912f * x * (1 + 0.044715f * z));
    return s + x * s * (1 - s) * 1.59576912f * (1 + 0.134145f * z);
}

static inline float td_silu_f32(float x) { return x * td_sigmoid_f32(x); }

static inline float td_silu_slope_f32(float x)
{
    float s = td_sigmoid_f32(x);
    return s + x * s * (1 - s);
}

#endif
