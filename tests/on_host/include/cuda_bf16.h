/* bf16 of CUDA's, on the host. */
#ifndef TANDEM_TESTS_CUDA_BF16_H
#define TANDEM_TESTS_CUDA_BF16_H

#include <cuda_runtime.h>

ON_HOST_16_BITS(bf16, __nv_bfloat16, __nv_bfloat162, __bfloat162float, __float2bfloat16_rn, __floats2bfloat162_rn)

#endif
