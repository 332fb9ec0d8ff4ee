/* Numbers as they are stored, and the pointwise table's functions, for kernels that are compiled with the library. */
#ifndef TANDEM_CORE_OPS_STORED_CUH
#define TANDEM_CORE_OPS_STORED_CUH

#define TD_CODE(...) __VA_ARGS__
#define TD_FUNCTION static __device__ __forceinline__
#include "core/ops/pointwise_f64.h"
#include "core/ops/pointwise_cuda.h"

/* Calls `what` with S the type that elements of `dtype` are stored as: td_number(s), td_put(s, x). */
#define TD_STORED(dtype, what)                                   \
    switch (dtype) {                                             \
    case TD_F32:  { typedef float S; what; break; }              \
    case TD_F64:  { typedef double S; what; break; }             \
    case TD_BF16: { typedef td_bf16 S; what; break; }            \
    case TD_F16:  { typedef td_f16 S; what; break; }             \
    case TD_I32:  { typedef int S; what; break; }                \
    case TD_I64:  { typedef long long S; what; break; }          \
    case TD_U8:   { typedef unsigned char S; what; break; }      \
    default: break;                                              \
    }

#endif
