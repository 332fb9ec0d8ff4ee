/* What kernels say in PTX, as functions that cuda.awk names after the instructions: results come first, as references. */
#ifndef TANDEM_TESTS_PTX_H
#define TANDEM_TESTS_PTX_H

#include <time.h>

/* ---- 16-bit floats: to the nearest, ties to even; NaN is one that a GPU makes */

static inline float on_host_from_bf16(unsigned bits) { return __uint_as_float(bits << 16); }
#if !defined(__clang__) || __clang_major__ >= 15
static inline float on_host_from_f16(unsigned short bits) { return (float)on_host_bits<_Float16>(bits); }
static inline unsigned on_host_f16(float x) { return x != x ? 0x7FFF : on_host_bits<unsigned short>((_Float16)x); }
#else /* has no type for it */
static inline float on_host_from_f16(unsigned short bits)
{
    int exponent = bits >> 10 & 31;
    float x = exponent == 31 ? (bits & 1023 ? NAN : INFINITY) : exponent ? ldexpf(1024 + (bits & 1023), exponent - 25) : ldexpf(bits & 1023, -24);
    return bits >> 15 ? -x : x;
}
static inline unsigned on_host_f16(float x)
{
    unsigned bits = __float_as_uint(fabsf(x)), sign = signbit(x) ? 0x8000 : 0;
    if (x != x) return 0x7FFF;
    if (fabsf(x) >= 65520) return sign | 0x7C00;
    if (fabsf(x) < 0x1p-14f) return sign | (unsigned)nearbyintf(fabsf(x) * 0x1p24f);
    return sign | ((bits + 0xFFF + (bits >> 13 & 1)) >> 13) - (112 << 10);
}
#endif
static inline unsigned on_host_bf16(float x)
{
    unsigned bits = __float_as_uint(x);
    return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

/* A float of 16 bits and a pair of them, with what widens one, rounds to one, and rounds to a pair. */
#define ON_HOST_16_BITS(bits_, one, pair, widen, round, round_both)                    \
    struct one { unsigned short bits; };                                               \
    struct pair { one x, y; } __align__(4);                                            \
    static inline float widen(one x) { return on_host_from_##bits_(x.bits); }          \
    static inline one round(float x) { return { (unsigned short)on_host_##bits_(x) }; } \
    static inline pair round_both(float x, float y) { return { round(x), round(y) }; }

static inline void ptx_cvt_f32_f16(float &x, unsigned short bits) { x = on_host_from_f16(bits); }
static inline void ptx_cvt_rn_bf16x2_f32(unsigned &both, float high, float low) { both = on_host_bf16(low) | on_host_bf16(high) << 16; }
static inline void ptx_cvt_rn_f16x2_f32(unsigned &both, float high, float low) { both = on_host_f16(low) | on_host_f16(high) << 16; }

/* ---- Functions; ftz: what is denormal is 0 */

static inline float on_host_flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
static inline void ptx_rcp_approx_ftz_f32(float &y, float x) { y = on_host_flushed(1 / on_host_flushed(x)); }
static inline void ptx_ex2_approx_ftz_f32(float &y, float x) { y = on_host_flushed(exp2f(on_host_flushed(x))); }

static inline void ptx_prefetch_global_L2(const void *) {}

/* The only register that is read so: %globaltimer. */
static inline void ptx_mov_u64(unsigned long long &ns)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    ns = 1000000000ULL * (unsigned long long)t.tv_sec + (unsigned long long)t.tv_nsec;
}

/* ---- Shared memory. An address of it is a distance from what the launch asked for. */

static inline size_t __cvta_generic_to_shared(const void *p) { return (size_t)((const char *)p - (const char *)on_host_shared()); }

static inline void ptx_cp_async_cg_shared_global(unsigned to, const void *from, int valid) { on_host_copy((char *)on_host_shared() + to, from, 16, valid); }
static inline void ptx_cp_async_ca_shared_global(unsigned to, const void *from, int valid) { on_host_copy((char *)on_host_shared() + to, from, 4, valid); }
static inline void ptx_cp_async_commit_group() { on_host_copies_end(); }
static inline void ptx_cp_async_wait_group(int newer) { on_host_copies_wait(newer); }

/* ---- Tensor cores: lane l has g = l / 4 and q = l % 4 */

struct on_host_matrices {
    const unsigned short *row;                /* of matrix lane / 8, its row lane % 8 */
    unsigned got[4];
};

/* Register m of a lane has of matrix m row g, columns 2 q and 2 q + 1; transposed, column g of rows 2 q and 2 q + 1. */
template <bool transposed> static inline void on_host_load_matrices(unsigned &a, unsigned &b, unsigned &c, unsigned &d, unsigned address)
{
    on_host_matrices own = { (const unsigned short *)((const char *)on_host_shared() + address), {} };
    if (address % 16) on_host_fail("ldmatrix: a row at byte %u of shared memory is not at a multiple of 16", address);
    on_host_together("ldmatrix", 0xFFFFFFFF, [](void *const lanes[32]) {
        for (int lane = 0; lane < 32; lane++)
            for (int m = 0; m < 4; m++) {
                unsigned pair[2];
                for (int i = 0; i < 2; i++) {
                    int row = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
                    pair[i] = ((on_host_matrices *)lanes[8 * m + row])->row[column];
                }
                ((on_host_matrices *)lanes[lane])->got[m] = pair[0] | pair[1] << 16;
            }
    }, &own);
    a = own.got[0], b = own.got[1], c = own.got[2], d = own.got[3];
}
static inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned &a, unsigned &b, unsigned &c, unsigned &d, unsigned address)
{
    on_host_load_matrices<false>(a, b, c, d, address);
}
static inline void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned &a, unsigned &b, unsigned &c, unsigned &d, unsigned address)
{
    on_host_load_matrices<true>(a, b, c, d, address);
}

struct on_host_product {
    unsigned a[4], b[2];
    float sum[4];
};

/* (16, 8) += (16, 16) (16, 8). Of the first, register r has row g + r % 2 * 8, columns 2 q + r / 2 * 8 and the next; of the second, column
 * g, rows 2 q + r * 8 and the next. Sums r / 2 * 8 + g, column 2 q + r % 2. */
template <float wide(unsigned short)> static inline void on_host_multiply(void *const lanes[32])
{
    float a[16][16], b[8][16]; /* b by columns */
    for (int lane = 0; lane < 32; lane++) {
        const on_host_product *own = (const on_host_product *)lanes[lane];
        for (int r = 0; r < 4; r++)
            for (int i = 0; i < 2; i++) a[lane / 4 + r % 2 * 8][lane % 4 * 2 + r / 2 * 8 + i] = wide((unsigned short)(own->a[r] >> 16 * i));
        for (int r = 0; r < 2; r++)
            for (int i = 0; i < 2; i++) b[lane / 4][lane % 4 * 2 + r * 8 + i] = wide((unsigned short)(own->b[r] >> 16 * i));
    }
    for (int lane = 0; lane < 32; lane++)
        for (int r = 0; r < 4; r++) {
            float sum = 0;
            for (int k = 0; k < 16; k++) sum += a[lane / 4 + r / 2 * 8][k] * b[lane % 4 * 2 + r % 2][k];
            ((on_host_product *)lanes[lane])->sum[r] += sum;
        }
}
static inline float on_host_wide_bf16(unsigned short bits) { return on_host_from_bf16(bits); }

template <float wide(unsigned short)>
static inline void on_host_mma(float *sum[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1)
{
    on_host_product own = { { a0, a1, a2, a3 }, { b0, b1 }, { *sum[0], *sum[1], *sum[2], *sum[3] } };
    on_host_together("mma", 0xFFFFFFFF, on_host_multiply<wide>, &own);
    for (int r = 0; r < 4; r++) *sum[r] = own.sum[r];
}
static inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float &c0, float &c1, float &c2, float &c3, unsigned a0, unsigned a1,
                                                                           unsigned a2, unsigned a3, unsigned b0, unsigned b1)
{
    float *sum[4] = { &c0, &c1, &c2, &c3 };
    on_host_mma<on_host_wide_bf16>(sum, a0, a1, a2, a3, b0, b1);
}
static inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float &c0, float &c1, float &c2, float &c3, unsigned a0, unsigned a1,
                                                                         unsigned a2, unsigned a3, unsigned b0, unsigned b1)
{
    float *sum[4] = { &c0, &c1, &c2, &c3 };
    on_host_mma<on_host_from_f16>(sum, a0, a1, a2, a3, b0, b1);
}

#endif
