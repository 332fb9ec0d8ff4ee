/* f16 of CUDA's, on the host. */
#ifndef TANDEM_TESTS_CUDA_FP16_H
#define TANDEM_TESTS_CUDA_FP16_H

#include <cuda_runtime.h>

ON_HOST_16_BITS(f16, __half, __half2, __half2float, __float2half_rn, __floats2half2_rn)

#endif
