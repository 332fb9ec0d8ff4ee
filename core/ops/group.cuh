/* What a group of threads does together: a part of a warp, a warp or a whole block, which work on one row.
 *
 * A group has `threads` threads, a power of two: up to 32 share a warp with other groups, more are the block. All threads of a block
 * call these functions together, groups without a row too.
 */
#ifndef TANDEM_CORE_OPS_GROUP_CUH
#define TANDEM_CORE_OPS_GROUP_CUH

#include "core/ops/number.cuh"

#include <math_constants.h>

enum { TD_LOADS = 4 };                        /* that a thread has in flight before it uses the first */

/* The same bits as another type. Packs of 16-bit floats wait for use as uint4: taken apart at once, each would be waited for as it is
 * loaded. */
template <typename B, typename A> static __device__ __forceinline__ B td_bits_as(A x)
{
    static_assert(sizeof(A) == sizeof(B), "as many bits");
    B y;
    memcpy(&y, &x, sizeof y);
    return y;
}

/* This thread's number in its group. */
template <int threads> static __device__ __forceinline__ int td_group_lane() { return (int)threadIdx.x & (threads - 1); }

/* x of the lane whose number differs by `mask`, whatever the type: 4-byte words one by one. */
template <typename A> static __device__ __forceinline__ A td_shuffle_xor(A x, int mask)
{
    enum { WORDS = sizeof(A) / 4 };
    unsigned words[WORDS];
    memcpy(words, &x, sizeof x);
    #pragma unroll
    for (int w = 0; w < WORDS; w++) words[w] = __shfl_xor_sync(0xFFFFFFFF, words[w], mask);
    memcpy(&x, words, sizeof x);
    return x;
}

/* join over the group's x, which all its threads get: the same bits, in an order that never changes. join(a, b) must be join(b, a). */
template <int threads, typename A, typename Join> static __device__ __forceinline__ A td_group_join(A x, Join join)
{
    #pragma unroll
    for (int mask = (threads < 32 ? threads : 32) / 2; mask; mask >>= 1) x = join(x, td_shuffle_xor(x, mask));
    if constexpr (threads > 32) { /* what all warps have found by halves, too: one after the other took longer than a vocabulary's row */
        constexpr int count = threads / 32;
        __shared__ A warps[count];
        __syncthreads(); /* whoever reads them still, from the row before */
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
        __syncthreads();
        x = warps[threadIdx.x % count];
        #pragma unroll
        for (int mask = count / 2; mask; mask >>= 1) x = join(x, td_shuffle_xor(x, mask));
    }
    return x;
}

struct td_plus {
    template <typename A> __device__ __forceinline__ A operator()(A a, A b) const { return a + b; }
};

/* The largest; a NaN is larger than any number. */
struct td_largest {
    template <typename A> __device__ __forceinline__ A operator()(A a, A b) const { return b > a || b != b ? b : a; }
};

/* An element and where it is in its row; index -1: none. */
template <typename A> struct td_place {
    A value;
    int64_t index;
};

/* Whether a stands before b among the largest of a row, or among the smallest: a NaN is the largest, of equal ones the first is first. */
template <typename A> static __device__ __forceinline__ bool td_stands_before(td_place<A> a, td_place<A> b, bool smallest)
{
    if (a.index < 0 || b.index < 0) return a.index >= 0;
    bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan != b_nan) return a_nan != smallest;
    if (a_nan || a.value == b.value) return a.index < b.index;
    return smallest ? a.value < b.value : a.value > b.value;
}

/* Elements before the first that lies at a multiple of 16 bytes. */
template <typename T> static __device__ __forceinline__ int64_t td_elements_before_16(const T *x)
{
    return (int64_t)((0 - (uintptr_t)x) % 16 / sizeof(T));
}

/* Calls visit(at, pack) for all `count` elements of x, shared out among the group: packs of 16 bytes, and of one element before the
 * first 16-byte boundary and after the last. */
template <int threads, typename T, typename Visit>
static __device__ __forceinline__ void td_group_visit(const T *x, int64_t count, Visit visit)
{
    constexpr int width = 16 / sizeof(T);
    typedef td_pack<T, width> wide;
    typedef td_pack<T, 1> one;
    int lane = td_group_lane<threads>();
    int64_t head = td_elements_before_16(x);
    if (head > count) head = count;
    int64_t packs = (count - head) / width, tail = head + packs * width;
    const uint4 *from = (const uint4 *)(x + head);
    #pragma unroll 1
    for (int64_t i = lane; i < head; i += threads) visit(i, *(const one *)(x + i));
    for (int64_t i = lane; i < packs; i += TD_LOADS * threads) {
        uint4 loaded[TD_LOADS];
        #pragma unroll
        for (int l = 0; l < TD_LOADS; l++)
            if (i + l * threads < packs) loaded[l] = from[i + l * threads];
        #pragma unroll
        for (int l = 0; l < TD_LOADS; l++)
            if (i + l * threads < packs) visit(head + (i + l * threads) * width, td_bits_as<wide>(loaded[l]));
    }
    #pragma unroll 1
    for (int64_t i = tail + lane; i < count; i += threads) visit(i, *(const one *)(x + i));
}

#endif
