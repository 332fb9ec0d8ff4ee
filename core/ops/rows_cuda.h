/* What generated kernels reduce rows with: carried as text (see pointwise_f64.h), behind `T`, which they compute in.
 *
 *     td_sum, td_max             start() and of(a, b); a NaN is larger than any number
 *     td_range_of(...)           the groups of elements of part number `part`; none from `parts` on. A row has `row` groups, cut into
 *                                `chunks` parts of `chunk` groups, the last of which may have fewer
 *     td_lanes_join<R, lanes>(x) x becomes R of x of all `lanes` threads of a part, a power of two up to 32 or the whole block, in an order
 *                                that never changes. All threads of the block call it together
 */
TD_CODE(
struct td_sum {
    static __device__ __forceinline__ T start() { return 0; }
    static __device__ __forceinline__ T of(T a, T b) { return a + b; }
};
struct td_max {
    static __device__ __forceinline__ T start() { return (T)__uint_as_float(0xFF800000u); }
    static __device__ __forceinline__ T of(T a, T b) { return b > a || b != b ? b : a; }
};

struct td_range { unsigned begin, end; };

TD_FUNCTION td_range td_range_of(unsigned part, unsigned parts, unsigned row, unsigned chunk, unsigned chunks)
{
    if (part >= parts) return { 0, 0 };
    const unsigned first = part / chunks * row, begin = part % chunks * chunk;
    return { first + begin, first + (row - begin < chunk ? row : begin + chunk) };
}

template <typename R, int lanes> TD_FUNCTION void td_lanes_join(T &x)
{
    for (int mask = (lanes < 32 ? lanes : 32) / 2; mask; mask /= 2) x = R::of(x, __shfl_xor_sync(0xFFFFFFFFu, x, mask));
    if constexpr (lanes > 32) {
        __shared__ T warps[lanes / 32];
        __syncthreads(); /* whoever reads them still, from the part before */
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
        __syncthreads();
        x = warps[threadIdx.x % (lanes / 32)];
        for (int mask = lanes / 64; mask; mask /= 2) x = R::of(x, __shfl_xor_sync(0xFFFFFFFFu, x, mask));
    }
}
)
