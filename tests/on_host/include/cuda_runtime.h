/* CUDA C++ as C++, behind tests/on_host/cuda.awk: what kernels are written with. Results are those of a GPU but for functions like exp,
 * whose last bits differ. */
#ifndef TANDEM_TESTS_CUDA_RUNTIME_H
#define TANDEM_TESTS_CUDA_RUNTIME_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus

#include <math.h>
#include <on_host.h>

#include <initializer_list> /* which core.h asks for in C's linkage */
#include <tuple>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
/* A section of their own: every launch finds NaNs there. */
#define __shared__ static __attribute__((section("on_host_static")))

/* ---- Launches */

template <typename Call, typename... Given> struct on_host_closure {
    on_host_work work;
    on_host_launch launch;
    Call call;
    std::tuple<Given...> given;

    static void thread(void *self) { std::apply(((on_host_closure *)self)->call, ((on_host_closure *)self)->given); }
    static cudaError_t run(on_host_work *self)
    {
        on_host_closure *c = (on_host_closure *)self;
        c->launch.arguments = c;
        return on_host_run(&c->launch);
    }
    static void drop(on_host_work *self) { delete (on_host_closure *)self; }
};

template <typename Call> struct on_host_caller {
    Call call;
    on_host_launch launch;
    cudaStream_t stream;

    on_host_caller &on(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t queue = nullptr)
    {
        launch.grid = grid;
        launch.block = block;
        launch.shared = shared;
        stream = queue;
        return *this;
    }
    template <typename... Given> void with(Given... given)
    {
        typedef on_host_closure<Call, Given...> closure;
        launch.thread = closure::thread;
        on_host_put(stream, &(new closure{ { closure::run, closure::drop }, launch, call, std::tuple<Given...>(given...) })->work);
    }
};

template <typename Call> static inline on_host_caller<Call> on_host_kernel(const char *name, Call call)
{
    return { call, { name, {}, {}, 0, nullptr, nullptr }, nullptr };
}

static inline void __nanosleep(unsigned) {}

/* ---- Warps */

template <typename T> struct on_host_shuffled {
    T x, got;
    int from;                                 /* lane */
};
template <typename T> static inline T on_host_shuffle(const char *name, unsigned mask, T x, int from)
{
    on_host_shuffled<T> own = { x, x, from };
    on_host_together(name, mask, [](void *const lanes[32]) {
        for (int lane = 0; lane < 32; lane++) {
            on_host_shuffled<T> *own = (on_host_shuffled<T> *)lanes[lane], *other = own ? (on_host_shuffled<T> *)lanes[own->from] : nullptr;
            if (other) own->got = other->x;
            else if (own) on_host_fail("a shuffle of lane %d asks for lane %d, which is not in its mask", lane, own->from);
        }
    }, &own);
    return own.got;
}
/* Lanes take part in groups of `width`; one outside of the group gets its own. */
template <typename T> static inline T __shfl_sync(unsigned mask, T x, int from, int width = 32)
{
    int lane = on_host_lane_number();
    return on_host_shuffle("__shfl_sync", mask, x, lane / width * width + (from & (width - 1)));
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T x, int with, int width = 32)
{
    int lane = on_host_lane_number(), from = lane ^ with;
    return on_host_shuffle("__shfl_xor_sync", mask, x, from / width > lane / width ? lane : from);
}
template <typename T> static inline T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32)
{
    int lane = on_host_lane_number(), from = lane - (int)by;
    return on_host_shuffle("__shfl_up_sync", mask, x, from < lane / width * width ? lane : from);
}
template <typename T> static inline T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32)
{
    int lane = on_host_lane_number(), from = lane + (int)by;
    return on_host_shuffle("__shfl_down_sync", mask, x, from / width != lane / width ? lane : from);
}

struct on_host_vote {
    bool own;
    unsigned all;
};
static inline unsigned __ballot_sync(unsigned mask, int own)
{
    on_host_vote vote = { own != 0, 0 };
    on_host_together("a vote", mask, [](void *const lanes[32]) {
        unsigned all = 0;
        for (int lane = 0; lane < 32; lane++) all |= lanes[lane] && ((on_host_vote *)lanes[lane])->own ? 1u << lane : 0;
        for (int lane = 0; lane < 32; lane++)
            if (lanes[lane]) ((on_host_vote *)lanes[lane])->all = all;
    }, &vote);
    return vote.all;
}
static inline int __any_sync(unsigned mask, int own) { return __ballot_sync(mask, own) != 0; }
static inline int __all_sync(unsigned mask, int own) { return __ballot_sync(mask, own) == mask; }
static inline void __syncwarp(unsigned mask = 0xFFFFFFFF)
{
    on_host_together("__syncwarp", mask, [](void *const[32]) {}, nullptr);
}

/* Threads take turns: nothing comes between. */
template <typename T> static inline T atomicAdd(T *at, T x) { T old = *at; *at = old + x; return old; }
template <typename T> static inline T atomicMax(T *at, T x) { T old = *at; if (x > old) *at = x; return old; }
template <typename T> static inline T __ldg(const T *at) { return *at; }

/* ---- Numbers */

template <typename To, typename From> static inline To on_host_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From), "one size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __uint_as_float(unsigned bits) { return on_host_bits<float>(bits); }
static inline float __int_as_float(int bits) { return on_host_bits<float>(bits); }
static inline unsigned __float_as_uint(float x) { return on_host_bits<unsigned>(x); }
static inline double __longlong_as_double(long long bits) { return on_host_bits<double>(bits); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
#define __expf(x) expf(x) /* the C library has one of its own */
/* In a register that the compiler does not see through: a sum is no fused one. */
static inline float __fadd_rn(float a, float b) { volatile float sum = a + b; return sum; }
static inline float __fmul_rn(float a, float b) { volatile float product = a * b; return product; }

/* To the nearest towards zero, clamped. */
static inline int __double2int_rz(double x) { return x >= 2147483647.0 ? 2147483647 : x <= -2147483648.0 ? -2147483647 - 1 : (int)x; }
static inline long long __double2ll_rz(double x)
{
    return x >= 0x1p63 ? 0x7FFFFFFFFFFFFFFFll : x <= -0x1p63 ? -0x7FFFFFFFFFFFFFFFll - 1 : (long long)x;
}

static inline uint2 make_uint2(unsigned x, unsigned y) { return { x, y }; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return { x, y, z, w }; }
static inline float2 make_float2(float x, float y) { return { x, y }; }
static inline float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }

#include <ptx.h>

#endif

#endif
