/* TD_SIMD before a loop: its iterations are independent, though an output may be an input's memory exactly. */
#ifndef TANDEM_CORE_OPS_SIMD_H
#define TANDEM_CORE_OPS_SIMD_H

#ifdef __clang__
#pragma clang diagnostic ignored "-Wpass-failed" /* a loop that calls the C library does not vectorise, and need not */
#endif

#ifdef _OPENMP
#define TD_SIMD _Pragma("omp simd")
#define TD_SIMD_SUM(total) TD_SIMD_TEXT(omp simd reduction(+ : total))
#define TD_SIMD_OR(bits) TD_SIMD_TEXT(omp simd reduction(| : bits))
#define TD_SIMD_TEXT(text) _Pragma(#text)
#else
#define TD_SIMD
#define TD_SIMD_SUM(total)
#define TD_SIMD_OR(bits)
#endif

#endif
