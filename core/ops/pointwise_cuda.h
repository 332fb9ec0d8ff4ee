/* What CUDA kernels of pointwise operations are made of beside the table's text: numbers as they are stored, and the table's functions in
 * f32. fused.cu reads it, and kernels that are compiled at run time carry it as text (see pointwise_f64.h, which comes before it).
 *
 *     td_number(s)         the stored number s as one to compute with; exact
 *     td_put(s, x)         s becomes x, as convert.h says: to the nearest, ties to even; integers cut towards zero and clamped, NaN gives 0
 *     td_round<S>(x)       x as what is stored gives it back
 *     td_load<S>(p, i, x)  the i-th group of as many S as x has elements, in one access of up to 16 bytes; td_store<S> the same
 *     td_quotient(n, m, s) n / d for n < 2^31, with multiplier m and shift s of td_divisor_of(d), divisor.h
 *
 * Functions agree with math.h within a few units in the last place. Sums of products are written as fmaf, so that nothing is left to the
 * compiler's choice and a chain gives what its operations give one by one.
 */
TD_CODE(
struct td_bf16 { unsigned short bits; };
struct td_f16 { unsigned short bits; };

TD_FUNCTION float td_number(td_bf16 s) { return __uint_as_float((unsigned)s.bits << 16); }
TD_FUNCTION float td_number(td_f16 s) { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(s.bits)); return x; }
TD_FUNCTION float td_number(float s) { return s; }
TD_FUNCTION double td_number(double s) { return s; }
TD_FUNCTION int td_number(int s) { return s; }
TD_FUNCTION long long td_number(long long s) { return s; }
TD_FUNCTION int td_number(unsigned char s) { return s; }

/* Two at once: converting one alone is four times slower. */
TD_FUNCTION unsigned td_pair(td_bf16, float low, float high)
{
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
TD_FUNCTION unsigned td_pair(td_f16, float low, float high)
{
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

TD_FUNCTION void td_put(td_bf16 &s, float x) { s.bits = (unsigned short)td_pair(s, x, 0); }
TD_FUNCTION void td_put(td_f16 &s, float x) { s.bits = (unsigned short)td_pair(s, x, 0); }
TD_FUNCTION void td_put(float &s, double x) { s = (float)x; }
TD_FUNCTION void td_put(double &s, double x) { s = x; }
TD_FUNCTION void td_put(int &s, double x) { s = x != x ? 0 : __double2int_rz(x); }
TD_FUNCTION void td_put(long long &s, double x) { s = x != x ? 0 : __double2ll_rz(x); }
TD_FUNCTION void td_put(unsigned char &s, double x) { s = (unsigned char)__double2int_rz(fmin(fmax(x, 0.0), 255.0)); }

template <typename S, typename T> TD_FUNCTION T td_round(T x)
{
    S s;
    td_put(s, x);
    return (T)td_number(s);
}

template <typename S, int count> struct __align__(sizeof(S) * count) td_group {
    S at[count];
};

template <typename S, typename T, int count> TD_FUNCTION void td_load(const void *from, unsigned group, T (&x)[count])
{
    const td_group<S, count> loaded = ((const td_group<S, count> *)from)[group];
    for (int v = 0; v < count; v++) x[v] = (T)td_number(loaded.at[v]);
}

template <typename S> struct td_pairs { enum { exist = 0 }; };
template <> struct td_pairs<td_bf16> { enum { exist = 1 }; };
template <> struct td_pairs<td_f16> { enum { exist = 1 }; };

template <typename S, typename T, int count> TD_FUNCTION void td_store(void *to, unsigned group, const T (&x)[count])
{
    if constexpr (td_pairs<S>::exist && count % 2 == 0) {
        td_group<unsigned, count / 2> made;
        for (int v = 0; v < count; v += 2) made.at[v / 2] = td_pair(S(), (float)x[v], (float)x[v + 1]);
        ((td_group<unsigned, count / 2> *)to)[group] = made;
    } else {
        td_group<S, count> made;
        for (int v = 0; v < count; v++) td_put(made.at[v], x[v]);
        ((td_group<S, count> *)to)[group] = made;
    }
}

TD_FUNCTION unsigned td_quotient(unsigned n, unsigned multiplier, unsigned shift) { return (__umulhi(n, multiplier) + n) >> shift; }

/* 1 / y within a unit in the last place, for y from 1 to infinity. */
TD_FUNCTION float td_inverse(float y) { float x; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(y)); return x; }
TD_FUNCTION float sigmoid(float x) { return td_inverse(1 + expf(-x)); }
TD_FUNCTION float softplus(float x) { return (x < 0 ? 0 : x) + log1pf(expf(-fabsf(x))); }

/* (1 + erf(x / sqrt 2)) / 2, with erf by the quotient of math.h: beyond 3.92 sqrt 2 it is 0 or 1. */
TD_FUNCTION float td_normal_below(float x)
{
    float t = x * 0.70710678f;
    float z = t * t;
    float p = fmaf(2.050033098e-6f, z, 2.848751543e-4f);
    p = fmaf(p, z, 3.765515125e-3f);
    p = fmaf(p, z, 5.274840754e-2f);
    p = fmaf(p, z, 1.904048110e-1f);
    p = fmaf(p, z, 1.128379146f);
    float q = fmaf(3.809075320e-5f, z, 1.162500625e-3f);
    q = fmaf(q, z, 1.496902294e-2f);
    q = fmaf(q, z, 1.141083378e-1f);
    q = fmaf(q, z, 5.020746127e-1f);
    q = fmaf(q, z, 1.0f);
    float erf = t * p * td_inverse(q);
    erf = fabsf(t) >= 3.92f ? copysignf(1, t) : erf;
    return fmaf(0.5f, erf, 0.5f);
}
TD_FUNCTION float gelu(float x) { return x * td_normal_below(x); }
TD_FUNCTION float gelu_slope(float x) { return fmaf(x * 0.39894228f, expf(-0.5f * x * x), td_normal_below(x)); }
TD_FUNCTION float gelu_tanh(float x) { return x * sigmoid(1.59576912f * x * fmaf(0.044715f * x, x, 1.0f)); }
TD_FUNCTION float gelu_tanh_slope(float x)
{
    float z = fminf(x * x, 1e4f); /* where s is 0 or 1: 0 times infinity would be NaN */
    float s = sigmoid(1.59576912f * x * fmaf(0.044715f, z, 1.0f));
    return fmaf(x * s * (1 - s) * 1.59576912f, fmaf(0.134145f, z, 1.0f), s);
}
TD_FUNCTION float silu(float x) { return x * sigmoid(x); }
TD_FUNCTION float silu_slope(float x)
{
    float s = sigmoid(x);
    return fmaf(x * s, 1 - s, s);
}
)
