/* Rules over flat ranges on CUDA, for the .cu files beside: one launch for many ranges of a unit.
 *
 * The floor is 4 bytes an element for each value that is read or written: 28 for Adam; 2 more for a copy in 16 bits. Numbers that change from step to step (rate,
 * scale, count of updates) are in device memory; each block makes its constants of them once, in f64 as the CPU does, while its first
 * values are on their way.
 *
 * A rule is a struct of such constants, in f32, with
 *
 *     enum { MOMENTS, HYPERS };
 *     void begin(const double *hyper, double rate, double scale, double updates);      on the device, by one thread
 *     void apply(float &p, float g, float *m) const;                                   one element; m has MOMENTS
 */
#ifndef TANDEM_OPTIM_UPDATE_CUH
#define TANDEM_OPTIM_UPDATE_CUH

#include <cuda_runtime.h>
#include <tandem/rewrite.h>

enum { OPT_THREADS = 256, OPT_BLOCKS = 1056, OPT_BLOCK_ELEMENTS = 2048, OPT_LOADS = 2, OPT_RANGES = 32 };
enum { OPT_MOMENTS = 2, OPT_HYPERS = 4 };     /* at most */

typedef struct opt_range {
    float *parameter;
    const float *gradient;
    float *moment[OPT_MOMENTS];
    uint16_t *copy;                           /* NULL: there is none */
    double hyper[OPT_HYPERS];
    int64_t count;
    int first;                                /* the number of its first block */
    bool packed;                              /* all at multiples of 16 bytes, the copy of 8 */
    bool f16;                                 /* the copy's dtype; else bf16 */
} opt_range;

/* A kernel's parameters, of which it may have 4 KB. */
typedef struct opt_launch {
    opt_range range[OPT_RANGES];
    const float *rate, *scale, *updates, *when;
    int64_t chunk;                            /* elements of a block, a multiple of 4 */
    int count;
} opt_launch;
static_assert(sizeof(opt_launch) <= 4096, "parameters of a kernel");

/* Two elements in the copy's dtype, the first in the low bits. */
static __device__ __forceinline__ uint32_t opt_narrow(float first, float second, bool f16)
{
    uint32_t both;
    if (f16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}

/* OPT_LOADS packs of 4 elements, OPT_THREADS packs apart, of which those before `end` exist: parameter, gradient, moments. */
template <typename Rule> struct opt_packs {
    float4 at[OPT_LOADS][2 + Rule::MOMENTS];
};

template <typename Rule> static __device__ __forceinline__ void opt_load(opt_packs<Rule> &v, const opt_range &r, int64_t at, int64_t end)
{
    #pragma unroll
    for (int l = 0; l < OPT_LOADS; l++) {
        int64_t i = at + l * OPT_THREADS;
        if (i >= end) break;
        v.at[l][0] = ((const float4 *)r.parameter)[i];
        v.at[l][1] = ((const float4 *)r.gradient)[i];
        #pragma unroll
        for (int m = 0; m < Rule::MOMENTS; m++) v.at[l][2 + m] = ((const float4 *)r.moment[m])[i];
    }
}

template <typename Rule>
static __device__ __forceinline__ void opt_apply(const Rule &rule, opt_packs<Rule> &v, const opt_range &r, int64_t at, int64_t end)
{
    #pragma unroll
    for (int l = 0; l < OPT_LOADS; l++) {
        int64_t i = at + l * OPT_THREADS;
        if (i >= end) break;
        #pragma unroll
        for (int e = 0; e < 4; e++) {
            float moment[OPT_MOMENTS];
            #pragma unroll
            for (int m = 0; m < Rule::MOMENTS; m++) moment[m] = (&v.at[l][2 + m].x)[e];
            rule.apply((&v.at[l][0].x)[e], (&v.at[l][1].x)[e], moment);
            #pragma unroll
            for (int m = 0; m < Rule::MOMENTS; m++) (&v.at[l][2 + m].x)[e] = moment[m];
        }
        const float4 p = v.at[l][0];
        ((float4 *)r.parameter)[i] = p;
        if (r.copy) ((uint2 *)r.copy)[i] = make_uint2(opt_narrow(p.x, p.y, r.f16), opt_narrow(p.z, p.w, r.f16));
        #pragma unroll
        for (int m = 0; m < Rule::MOMENTS; m++) ((float4 *)r.moment[m])[i] = v.at[l][2 + m];
    }
}

template <typename Rule> static __global__ void __launch_bounds__(OPT_THREADS) opt_kernel(const __grid_constant__ opt_launch l)
{
    __shared__ Rule shared;
    if (l.when && *l.when == 0) return;
    int n = 0;
    while (n + 1 < l.count && (int)blockIdx.x >= l.range[n + 1].first) n++;
    const opt_range &r = l.range[n];
    int64_t begin = (blockIdx.x - r.first) * l.chunk, end = begin + l.chunk < r.count ? begin + l.chunk : r.count;
    int64_t at = begin / 4 + threadIdx.x, packs = r.packed ? end / 4 : 0;
    opt_packs<Rule> v;
    opt_load(v, r, at, packs);
    if (threadIdx.x == 0) shared.begin(r.hyper, *l.rate, *l.scale, *l.updates);
    __syncthreads();
    const Rule rule = shared;
    while (at < packs) {
        opt_apply(rule, v, r, at, packs);
        at += OPT_LOADS * OPT_THREADS;
        opt_load(v, r, at, packs);
    }
    if (r.packed) begin = packs * 4;
    for (int64_t i = begin + threadIdx.x; i < end; i += OPT_THREADS) {
        float moment[OPT_MOMENTS], p = r.parameter[i];
        #pragma unroll
        for (int m = 0; m < Rule::MOMENTS; m++) moment[m] = r.moment[m][i];
        rule.apply(p, r.gradient[i], moment);
        r.parameter[i] = p;
        if (r.copy) r.copy[i] = (uint16_t)opt_narrow(p, 0, r.f16);
        #pragma unroll
        for (int m = 0; m < Rule::MOMENTS; m++) r.moment[m][i] = moment[m];
    }
}

/* Up to OPT_RANGES of them. */
template <typename Rule> static void opt_launch_ranges(const td_update_range *ranges, int count, const td_update_scalars *s)
{
    opt_launch l;
    int64_t elements = 0, blocks = 0;
    for (int i = 0; i < count; i++) elements += ranges[i].count;
    l.rate = (const float *)s->rate;
    l.scale = (const float *)s->gradient_scale;
    l.updates = (const float *)s->updates;
    l.when = (const float *)s->when;
    l.chunk = (elements / OPT_BLOCKS / OPT_BLOCK_ELEMENTS + 1) * OPT_BLOCK_ELEMENTS;
    l.count = count;
    for (int i = 0; i < count; i++) {
        opt_range *r = &l.range[i];
        r->parameter = (float *)ranges[i].parameter;
        r->gradient = (const float *)ranges[i].gradient;
        r->copy = (uint16_t *)ranges[i].copy;
        r->f16 = ranges[i].copy_dtype == TD_F16;
        uintptr_t address = (uintptr_t)r->parameter | (uintptr_t)r->gradient | (uintptr_t)r->copy << 1;
        for (int m = 0; m < Rule::MOMENTS; m++) {
            r->moment[m] = (float *)ranges[i].moment[m];
            address |= (uintptr_t)r->moment[m];
        }
        for (int h = 0; h < Rule::HYPERS; h++) r->hyper[h] = ranges[i].hyper[h];
        r->count = ranges[i].count;
        r->first = (int)blocks;
        r->packed = address % 16 == 0;
        blocks += (r->count + l.chunk - 1) / l.chunk;
    }
    opt_kernel<Rule><<<(unsigned)blocks, OPT_THREADS, 0, (cudaStream_t)s->queue>>>(l);
}

/* What a td_update_rule.cuda does. */
template <typename Rule> static void opt_update(const td_update_range *ranges, int count, const td_update_scalars *scalars)
{
    for (; count > 0; ranges += OPT_RANGES, count -= OPT_RANGES) opt_launch_ranges<Rule>(ranges, count < OPT_RANGES ? count : OPT_RANGES, scalars);
}

#endif
