/* Run-time choice of kernels; see cpu.h. */
#include "core/cpu.h"

bool td_cpu_has_avx512(void)
{
#ifdef __x86_64__
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}
