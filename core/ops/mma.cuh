/* Products of 16 x 16 by 16 x 8 tiles on tensor cores, their operands from shared memory, and copies into it that do not wait.
 *
 * A warp holds a tile of 16 x 8 sums as four numbers a lane: with g = lane / 4 and q = lane % 4, [0] and [1] are row g, columns 2 q and
 * 2 q + 1; [2] and [3] row g + 8. Sums of two tiles side by side, rounded, are a first operand of 16 x 16.
 */
#ifndef TANDEM_CORE_OPS_MMA_CUH
#define TANDEM_CORE_OPS_MMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

static __device__ __forceinline__ uint32_t td_shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* Four 8 x 8 matrices of 16-bit elements: lane l names a row of matrix l / 8. */
static __device__ __forceinline__ void td_load_matrices(uint32_t to[4], uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

static __device__ __forceinline__ void td_load_transposed(uint32_t to[4], uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}

/* sum += a b */
template <typename T> static __device__ __forceinline__ void td_multiply_add(float sum[4], const uint32_t a[4], uint32_t b0, uint32_t b1);
template <> __device__ __forceinline__ void td_multiply_add<__nv_bfloat16>(float sum[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void td_multiply_add<__half>(float sum[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two numbers as 16-bit ones, the first in the lower half. */
template <typename T> static __device__ __forceinline__ uint32_t td_pair(float low, float high);
template <> __device__ __forceinline__ uint32_t td_pair<__nv_bfloat16>(float low, float high)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&pair;
}
template <> __device__ __forceinline__ uint32_t td_pair<__half>(float low, float high)
{
    __half2 pair = __floats2half2_rn(low, high);
    return *(uint32_t *)&pair;
}

/* 16 or 4 bytes to shared memory; zeros where `valid` is not. */
static __device__ __forceinline__ void td_copy_16(uint32_t to, const void *from, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
static __device__ __forceinline__ void td_copy_4(uint32_t to, const void *from, bool valid)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
static __device__ __forceinline__ void td_copies_end(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* All but the last `newer` groups of this thread's copies are done. */
template <int newer> static __device__ __forceinline__ void td_copies_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(newer) : "memory");
}

#endif
