/* Elements of any float dtype as f32, in CUDA kernels: sums and functions are taken in f32, storage is the operand's. */
#ifndef TANDEM_CORE_OPS_NUMBER_CUH
#define TANDEM_CORE_OPS_NUMBER_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

static __device__ __forceinline__ float td_wide(float x) { return x; }
static __device__ __forceinline__ float td_wide(__nv_bfloat16 x) { return __bfloat162float(x); }
static __device__ __forceinline__ float td_wide(__half x) { return __half2float(x); }

template <typename T> static __device__ __forceinline__ T td_narrow(float x);
template <> __device__ __forceinline__ float td_narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 td_narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __half td_narrow<__half>(float x) { return __float2half_rn(x); }

/* `count` elements that are loaded and stored at once: 16 bytes where count x sizeof(T) is. */
template <typename T, int count> struct __align__(sizeof(T) * count) td_pack {
    T at[count];
};

/* The statement after `dtype` with T the type of it, one of the three floats kernels know. */
#define TD_CUDA_FLOATS(dtype, ...)                                                                     \
    switch (dtype) {                                                                                   \
    case TD_F32:  { typedef float T; __VA_ARGS__; break; }                                             \
    case TD_BF16: { typedef __nv_bfloat16 T; __VA_ARGS__; break; }                                     \
    case TD_F16:  { typedef __half T; __VA_ARGS__; break; }                                            \
    default: break;                                                                                    \
    }

#endif
