/* Conversion between dtypes; see convert.h. Loops are plain so that they vectorise. */
#include "core/ops/convert.h"

#include "core/ops/simd.h"

#include <string.h>

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float from_bf16(uint16_t x) { return float_of((uint32_t)x << 16); }

static inline uint16_t to_bf16(float x)
{
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    uint32_t nan = bits >> 16 | 0x40; /* stays a NaN whatever its low bits */
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
}

static inline float from_f16(uint16_t x)
{
    uint32_t magnitude = x & 0x7FFF;
    uint32_t normal = (magnitude << 13) + ((127 - 15) << 23);
    uint32_t special = magnitude << 13 | 0x7F800000;
    float subnormal = (float)magnitude * 0x1p-24f;
    uint32_t bits = magnitude >= 0x7C00 ? special : magnitude >= 0x0400 ? normal : bits_of(subnormal);
    return float_of(bits | (uint32_t)(x & 0x8000) << 16);
}

static inline uint16_t to_f16(float x)
{
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000)
        return (uint16_t)(sign | 0x7E00);
    if (magnitude >= 0x477FF000) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7C00);
    if (magnitude < 0x38800000) /* below 2^-14: adding 0.5 leaves the subnormal's bits, rounded, at the end */
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3F000000));
    return (uint16_t)(sign | (magnitude + 0xFFF + (magnitude >> 13 & 1) - ((127u - 15) << 23)) >> 13);
}

/* A whole number from x, clamped; low and high are exact in double. */
static inline int64_t whole(double x, double low, double high)
{
    if (x != x)
        return 0;
    return (int64_t)(x < low ? low : x > high ? high : x);
}
static inline int32_t to_i32(double x) { return (int32_t)whole(x, INT32_MIN, INT32_MAX); }
static inline uint8_t to_u8(double x) { return (uint8_t)whole(x, 0, UINT8_MAX); }
static inline int64_t to_i64(double x) { return x >= 0x1p63 ? INT64_MAX : whole(x, -0x1p63, 0x1p63); }

#define LOAD(FROM, CONVERT)                        \
    do {                                           \
        const FROM *x = (const FROM *)from;        \
        TD_SIMD                                    \
        for (int64_t i = 0; i < count; i++)        \
            to[i] = CONVERT(x[i]);                 \
    } while (0)

void td_load_f32(float *to, td_dtype dtype, const void *from, int64_t count)
{
    switch (dtype) {
    case TD_F32:  memmove(to, from, (size_t)count * sizeof *to); break;
    case TD_F64:  LOAD(double, (float)); break;
    case TD_BF16: LOAD(uint16_t, from_bf16); break;
    case TD_F16:  LOAD(uint16_t, from_f16); break;
    case TD_I32:  LOAD(int32_t, (float)); break;
    case TD_I64:  LOAD(int64_t, (float)); break;
    case TD_U8:   LOAD(uint8_t, (float)); break;
    case TD_DTYPES: break;
    }
}

void td_load_f64(double *to, td_dtype dtype, const void *from, int64_t count)
{
    switch (dtype) {
    case TD_F64:  memmove(to, from, (size_t)count * sizeof *to); break;
    case TD_F32:  LOAD(float, (double)); break;
    case TD_BF16: LOAD(uint16_t, from_bf16); break;
    case TD_F16:  LOAD(uint16_t, from_f16); break;
    case TD_I32:  LOAD(int32_t, (double)); break;
    case TD_I64:  LOAD(int64_t, (double)); break;
    case TD_U8:   LOAD(uint8_t, (double)); break;
    case TD_DTYPES: break;
    }
}

#define STORE(TO, CONVERT)                         \
    do {                                           \
        TO *y = (TO *)to;                          \
        TD_SIMD                                    \
        for (int64_t i = 0; i < count; i++)        \
            y[i] = (TO)CONVERT(from[i]);           \
    } while (0)

void td_store_f32(void *to, td_dtype dtype, const float *from, int64_t count)
{
    switch (dtype) {
    case TD_F32:  memmove(to, from, (size_t)count * sizeof *from); break;
    case TD_F64:  STORE(double, (double)); break;
    case TD_BF16: STORE(uint16_t, to_bf16); break;
    case TD_F16:  STORE(uint16_t, to_f16); break;
    case TD_I32:  STORE(int32_t, to_i32); break;
    case TD_I64:  STORE(int64_t, to_i64); break;
    case TD_U8:   STORE(uint8_t, to_u8); break;
    case TD_DTYPES: break;
    }
}

/* A double goes to 16 bits by way of f32, as a chain of casts would. */
void td_store_f64(void *to, td_dtype dtype, const double *from, int64_t count)
{
    switch (dtype) {
    case TD_F64:  memmove(to, from, (size_t)count * sizeof *from); break;
    case TD_F32:  STORE(float, (float)); break;
    case TD_BF16: STORE(uint16_t, to_bf16); break;
    case TD_F16:  STORE(uint16_t, to_f16); break;
    case TD_I32:  STORE(int32_t, to_i32); break;
    case TD_I64:  STORE(int64_t, to_i64); break;
    case TD_U8:   STORE(uint8_t, to_u8); break;
    case TD_DTYPES: break;
    }
}

void td_convert(td_dtype to_dtype, void *to, td_dtype from_dtype, const void *from, int64_t count)
{
    enum { TILE = 512 };
    double as_read[TILE], wide[TILE]; /* the first holds elements of any dtype, aligned */
    int64_t from_size = td_dtype_size(from_dtype), to_size = td_dtype_size(to_dtype);
    if (from_dtype == to_dtype) {
        memcpy(to, from, (size_t)(count * to_size));
        return;
    }
    for (int64_t at = 0; at < count; at += TILE) {
        int64_t n = count - at < TILE ? count - at : TILE;
        memcpy(as_read, (const char *)from + at * from_size, (size_t)(n * from_size));
        td_load_f64(wide, from_dtype, as_read, n);
        td_store_f64(as_read, to_dtype, wide, n);
        memcpy((char *)to + at * to_size, as_read, (size_t)(n * to_size));
    }
}

#define ROUND(T, TO, FROM)                         \
    do {                                           \
        TD_SIMD                                    \
        for (int64_t i = 0; i < count; i++)        \
            values[i] = (T)FROM(TO(values[i]));    \
    } while (0)

void td_round_f32(float *values, td_dtype dtype, int64_t count)
{
    switch (dtype) {
    case TD_BF16: ROUND(float, to_bf16, from_bf16); break;
    case TD_F16:  ROUND(float, to_f16, from_f16); break;
    case TD_I32:  ROUND(float, to_i32, (float)); break;
    case TD_I64:  ROUND(float, to_i64, (float)); break;
    case TD_U8:   ROUND(float, to_u8, (float)); break;
    case TD_F32: case TD_F64: case TD_DTYPES: break;
    }
}

void td_round_f64(double *values, td_dtype dtype, int64_t count)
{
    switch (dtype) {
    case TD_F32:  ROUND(double, (float), (double)); break;
    case TD_BF16: ROUND(double, to_bf16, from_bf16); break;
    case TD_F16:  ROUND(double, to_f16, from_f16); break;
    case TD_I32:  ROUND(double, to_i32, (double)); break;
    case TD_I64:  ROUND(double, to_i64, (double)); break;
    case TD_U8:   ROUND(double, to_u8, (double)); break;
    case TD_F64: case TD_DTYPES: break;
    }
}
