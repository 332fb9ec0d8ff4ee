/* Rules over rows of a table on CUDA, for the .cu files beside: those that a step's ids name, or all.
 *
 * The floor is that of update.cuh, for the rows that are updated.
 */
#ifndef TANDEM_OPTIM_ROWS_CUH
#define TANDEM_OPTIM_ROWS_CUH

#include "optim/update.cuh"

/* A kernel's parameters. */
typedef struct opt_rows {
    float *parameter;
    const float *gradient;                    /* (rows, width) */
    float *moment[OPT_MOMENTS];
    const int32_t *ids;                       /* (rows): rising up to the first that is -1; NULL: 0, 1, 2 .. */
    const float *rate, *scale, *updates, *when;
    double hyper[OPT_HYPERS];
    int64_t rows, width;
} opt_rows;

/* -1: there is none. */
static __device__ __forceinline__ int64_t opt_row_id(const opt_rows &l, int64_t row)
{
    if (row >= l.rows) return -1;
    return l.ids ? l.ids[row] : row;
}

template <int count> struct __align__(4 * count) opt_pack {
    float at[count];
};

/* Threads (across a row, rows); `pack` elements at once. */
template <typename Rule, int pack> static __global__ void __launch_bounds__(OPT_THREADS) opt_rows_kernel(const __grid_constant__ opt_rows l)
{
    __shared__ Rule shared;
    typedef opt_pack<pack> packed;
    int64_t first = (int64_t)blockIdx.x * blockDim.y;
    if ((l.when && *l.when == 0) || opt_row_id(l, first) < 0) return; /* the whole block */
    if (threadIdx.x == 0 && threadIdx.y == 0) shared.begin(l.hyper, *l.rate, *l.scale, *l.updates);
    __syncthreads();
    const Rule rule = shared;
    int64_t row = first + threadIdx.y, id = opt_row_id(l, row);
    if (id < 0) return;
    const packed *gradient = (const packed *)(l.gradient + row * l.width);
    packed *parameter = (packed *)(l.parameter + id * l.width);
    for (int64_t c = threadIdx.x; c < l.width / pack; c += blockDim.x) {
        packed p = parameter[c], g = gradient[c], m[OPT_MOMENTS];
        #pragma unroll
        for (int i = 0; i < Rule::MOMENTS; i++) m[i] = ((const packed *)(l.moment[i] + id * l.width))[c];
        #pragma unroll
        for (int e = 0; e < pack; e++) {
            float moment[OPT_MOMENTS];
            #pragma unroll
            for (int i = 0; i < Rule::MOMENTS; i++) moment[i] = m[i].at[e];
            rule.apply(p.at[e], g.at[e], moment);
            #pragma unroll
            for (int i = 0; i < Rule::MOMENTS; i++) m[i].at[e] = moment[i];
        }
        parameter[c] = p;
        #pragma unroll
        for (int i = 0; i < Rule::MOMENTS; i++) ((packed *)(l.moment[i] + id * l.width))[c] = m[i];
    }
}

/* `moments` and `hypers` of the rule's; *packed: rows and their parts lie at multiples of 16 bytes, but for moments of rows. */
static inline opt_rows opt_rows_of(const td_update_range *range, const int32_t *ids, const td_update_scalars *s, int moments, int hypers,
                                   bool *packed)
{
    opt_rows l = { .parameter = (float *)range->parameter, .gradient = (const float *)range->gradient };
    uintptr_t address = (uintptr_t)l.parameter | (uintptr_t)l.gradient | (uintptr_t)(range->width * (int64_t)sizeof(float));
    for (int m = 0; m < moments; m++) {
        l.moment[m] = (float *)range->moment[m];
        address |= (uintptr_t)l.moment[m];
    }
    l.ids = ids;
    l.rate = (const float *)s->rate;
    l.scale = (const float *)s->gradient_scale;
    l.updates = (const float *)s->updates;
    l.when = (const float *)s->when;
    for (int h = 0; h < hypers; h++) l.hyper[h] = range->hyper[h];
    l.rows = range->count / range->width;
    l.width = range->width;
    *packed = address % 16 == 0;
    return l;
}

static inline unsigned opt_row_blocks(int64_t rows, int rows_a_block) { return (unsigned)((rows + rows_a_block - 1) / rows_a_block); }

/* What a td_update_rule.cuda_rows does, of a rule that has no moments of rows. */
template <typename Rule> static void opt_update_rows(const td_update_range *range, const int32_t *ids, const td_update_scalars *s)
{
    bool packed;
    opt_rows l = opt_rows_of(range, ids, s, Rule::MOMENTS, Rule::HYPERS, &packed);
    int64_t packs = packed ? l.width / 4 : l.width;
    int across = packs > 32 ? 64 : packs > 8 ? 16 : 4;
    dim3 threads(across, OPT_THREADS / across);
    unsigned blocks = opt_row_blocks(l.rows, OPT_THREADS / across);
    if (packed)
        opt_rows_kernel<Rule, 4><<<blocks, threads, 0, (cudaStream_t)s->queue>>>(l);
    else
        opt_rows_kernel<Rule, 1><<<blocks, threads, 0, (cudaStream_t)s->queue>>>(l);
}

#endif
