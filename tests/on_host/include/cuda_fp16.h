/* f16 of CUDA's, on the host. */
#ifndef TANDEM_TESTS_CUDA_FP16_H
#define TANDEM_TESTS_CUDA_FP16_H

#include <cuda_runtime.h>

struct __half { unsigned short bits; };
struct __half2 { __half x, y; } __align__(4);

static inline float __half2float(__half x) { return on_host_from_f16(x.bits); }
static inline __half __float2half_rn(float x) { return { (unsigned short)on_host_f16(x) }; }
static inline __half2 __floats2half2_rn(float x, float y) { return { __float2half_rn(x), __float2half_rn(y) }; }

#endif
