// What generated CUDA source needs to be compiled as C++ for the host and run there, thread after thread: test_generated.c compiles it
// behind this. Results are those of a GPU but for functions like exp, whose last bits differ.
#include <math.h>
#include <string.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint3 { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return { x, y, z, w }; }

static uint3 blockIdx, threadIdx, blockDim, gridDim;

template <typename To, typename From> static inline To bits_as(From from)
{
    static_assert(sizeof(To) == sizeof(From), "one size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
static inline double __longlong_as_double(long long bits) { return bits_as<double>(bits); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }

// To the nearest towards zero, clamped.
static inline int __double2int_rz(double x) { return x >= 2147483647.0 ? 2147483647 : x <= -2147483648.0 ? -2147483647 - 1 : (int)x; }
static inline long long __double2ll_rz(double x)
{
    return x >= 0x1p63 ? 0x7FFFFFFFFFFFFFFFll : x <= -0x1p63 ? -0x7FFFFFFFFFFFFFFFll - 1 : (long long)x;
}

// What the source says in PTX. bf16 and f16 of finite numbers, to the nearest, ties to even.
static inline float host_from_f16(unsigned short bits) { return (float)bits_as<_Float16>(bits); }
static inline unsigned host_f16_pair(float low, float high)
{
    return bits_as<unsigned short>((_Float16)low) | (unsigned)bits_as<unsigned short>((_Float16)high) << 16;
}
static inline unsigned host_bf16(float x)
{
    unsigned bits = bits_as<unsigned>(x);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static inline unsigned host_bf16_pair(float low, float high) { return host_bf16(low) | host_bf16(high) << 16; }

template <typename A> static void host_launch(void (*kernel)(const A), const void *argument, unsigned blocks, unsigned threads)
{
    gridDim = { blocks, 1, 1 };
    blockDim = { threads, 1, 1 };
    for (blockIdx = {}; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx = {}; threadIdx.x < threads; threadIdx.x++) kernel(*(const A *)argument);
}
