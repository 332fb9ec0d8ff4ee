/* One kernel for every chain of pointwise operations: it reads the instructions as it goes. See device_fused.h. */
#include "core/ops/device_fused.h"

#include "core/ops/draw.h"
#include "core/ops/group.cuh"
#include "core/ops/random.cuh"
#include "core/ops/stored.cuh"

enum { THREADS = 128 };

typedef struct chain_run {
    td_chain chain;
    td_chain_rows rows;
    int full;                                 /* outputs of the chain's shape, the first ones */
    const void *in[TD_FUSED_INPUTS];
    void *out[TD_FUSED_OUTPUTS];
    const td_cuda_run *numbers;
    uint32_t below[TD_FUSED_DRAWS];
} chain_run;
static_assert(sizeof(chain_run) <= 4096, "a kernel's arguments take at most 4 KiB");

#define APPLY(name, operands, partial, domain, expression, ...) \
    case TD_POINTWISE_##name: return (T)(expression);

template <typename T> static __device__ T apply(int function, T a, T b, T c)
{
    switch (function) {
        TD_POINTWISE(APPLY)
    default: return a; /* cast */
    }
}

template <typename T> static __device__ T read(int dtype, const void *from, int64_t index)
{
    T x = 0;
    TD_STORED(dtype, x = (T)td_number(((const S *)from)[index]));
    return x;
}

template <typename T> static __device__ void write(int dtype, void *to, int64_t index, T x)
{
    TD_STORED(dtype, td_put(((S *)to)[index], x));
}

template <typename T> static __device__ T rounded(int dtype, T x)
{
    TD_STORED(dtype, x = td_round<S>(x));
    return x;
}

/* Where element `index` of the outputs is in input i. */
static __device__ int64_t offset_of(const td_chain *c, int i, int64_t index)
{
    if (c->dense[i]) return index;
    int64_t offset = 0;
    for (int d = 0; d < c->rank; d++) {
        offset += index % c->size[d] * c->stride[i][d];
        index /= c->size[d];
    }
    return offset;
}

/* Element `index` of the outputs in draw n. */
template <typename T> static __device__ T mask_of(const chain_run *run, int n, int64_t index)
{
    const td_chain *c = &run->chain;
    uint64_t at = ((uint64_t)run->numbers->micro + c->draw[n].micro) * c->draw_elements + c->draw_first;
    for (int d = 0; d < c->rank; d++) {
        at += (uint64_t)(index % c->size[d] * c->draw_stride[d]);
        index /= c->size[d];
    }
    return td_random_half(td_random_on(run->numbers, c->draw[n].key), at) < run->below[n] ? (T)0 : (T)(1 / (1 - c->draw[n].p));
}

/* Element `index` of the chain. Registers are in shared memory, where a number may choose among them. No thread reads another's, nor an
 * input's element after it has written that element of an output. */
template <typename T> static __device__ void compute(const chain_run *run, T *registers, int64_t index)
{
    const td_chain *c = &run->chain;
    for (int r = 0; r < c->header.inputs; r++) registers[r * THREADS] = read<T>(c->in_dtype[r], run->in[r], offset_of(c, r, index));
    for (int n = 0; n < c->header.instructions; n++) {
        const td_fused_instruction *op = &c->code[n];
        if (op->function == TD_POINTWISE_dropout_mask) {
            registers[op->to * THREADS] = rounded(op->dtype, mask_of<T>(run, op->from[0], index));
            continue;
        }
        T a = registers[op->from[0] * THREADS], b = registers[op->from[1] * THREADS], d = registers[op->from[2] * THREADS];
        registers[op->to * THREADS] = rounded(op->dtype, apply(op->function, a, b, d));
    }
    for (int o = 0; o < run->full; o++)
        write(c->out_dtype[o], run->out[o], index, registers[c->output[o] * THREADS]);
}

template <typename T> static __global__ void __launch_bounds__(THREADS) interpret(const __grid_constant__ chain_run run)
{
    extern __shared__ double memory[];
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < run.chain.elements; i += gridDim.x * (int64_t)THREADS)
        compute(&run, (T *)memory + threadIdx.x, i);
}

template <typename T> static __device__ T joined(int how, T a, T b) { return how == TD_FUSED_SUM ? td_plus()(a, b) : td_largest()(a, b); }

/* A block has a part of a row at a time. */
template <typename T> static __global__ void __launch_bounds__(THREADS) interpret_rows(const __grid_constant__ chain_run run)
{
    extern __shared__ double memory[];
    T *registers = (T *)memory + threadIdx.x, total[TD_FUSED_OUTPUTS];
    const td_chain *c = &run.chain;
    int full = run.full;
    for (int64_t part = blockIdx.x; part < run.rows.rows * run.rows.chunks; part += gridDim.x) {
        int64_t first = part / run.rows.chunks * c->row, begin = part % run.rows.chunks * run.rows.chunk;
        int64_t end = c->row - begin < run.rows.chunk ? c->row : begin + run.rows.chunk;
        for (int o = 0; o < c->header.reduced; o++) total[o] = c->reduction[o] == TD_FUSED_SUM ? (T)0 : (T)-CUDART_INF_F;
        for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
            compute(&run, registers, first + i);
            for (int o = 0; o < c->header.reduced; o++)
                total[o] = joined(c->reduction[o], total[o], registers[c->output[full + o] * THREADS]);
        }
        for (int o = 0; o < c->header.reduced; o++) {
            int how = c->reduction[o];
            T all = td_group_join<THREADS>(total[o], [how](T a, T b) { return joined(how, a, b); });
            if (threadIdx.x == 0) write(c->out_dtype[full + o], run.out[full + o], part, all);
        }
    }
}

template <typename T> static void launch(const td_kernel *k, const chain_run *run)
{
    const td_chain *c = &run->chain;
    int64_t most = k->run->td->gpu.multiprocessors * (int64_t)16, parts = run->rows.rows * run->rows.chunks;
    size_t shared = (size_t)c->header.registers * THREADS * sizeof(T);
    if (c->row) {
        interpret_rows<T><<<(unsigned)td_smaller(parts, most), THREADS, shared, td_stream(k)>>>(*run);
    } else {
        unsigned blocks = (unsigned)td_smaller(td_blocks_for(c->elements, THREADS, 1), most);
        interpret<T><<<blocks, THREADS, shared, td_stream(k)>>>(*run);
    }
    td_cuda_launched(k);
}

extern "C" void td_chain_interpret(const td_kernel *k, const td_chain *c, const td_chain_rows *rows, void *const *out)
{
    chain_run run = { *c, *rows, td_fused_full_outputs(&c->header) };
    run.numbers = td_device_run(k);
    for (int n = 0; n < c->header.draws; n++) run.below[n] = td_draw_below(c->draw[n].p);
    for (int i = 0; i < k->inputs; i++) run.in[i] = k->in[i].data;
    for (int o = 0; o < k->outputs; o++) run.out[o] = out[o];
    if (!c->elements) return;
    if (c->wide) launch<double>(k, &run);
    else launch<float>(k, &run);
}
