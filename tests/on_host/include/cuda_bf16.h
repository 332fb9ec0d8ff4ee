/* bf16 of CUDA's, on the host. */
#ifndef TANDEM_TESTS_CUDA_BF16_H
#define TANDEM_TESTS_CUDA_BF16_H

#include <cuda_runtime.h>

struct __nv_bfloat16 { unsigned short bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; } __align__(4);

static inline float __bfloat162float(__nv_bfloat16 x) { return on_host_from_bf16(x.bits); }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return { (unsigned short)on_host_bf16(x) }; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return { __float2bfloat16_rn(x), __float2bfloat16_rn(y) }; }

#endif
