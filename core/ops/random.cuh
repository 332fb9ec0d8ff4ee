/* Random numbers by counter for kernels that are compiled with the library, from the numbers of a run in device memory. */
#ifndef TANDEM_CORE_OPS_RANDOM_CUH
#define TANDEM_CORE_OPS_RANDOM_CUH

#include "core/device_cuda.h"

#define TD_CODE(...) __VA_ARGS__
#define TD_FUNCTION static __device__ __forceinline__
#include "core/ops/random_cuda.h"

static __device__ __forceinline__ td_device_random td_random_on(const td_cuda_run *run, uint64_t key)
{
    return td_random_on(run->seed, key, run->update);
}

#endif
