/* One kernel for every chain of pointwise operations: it reads the instructions as it goes. See device_fused.h. */
#include "core/ops/device_fused.h"

#include "core/ops/draw.h"
#include "core/ops/random.cuh"
#include "core/ops/stored.cuh"

enum { THREADS = 128 };

typedef struct chain_run {
    td_chain chain;
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

/* Registers are in shared memory, where a number may choose among them. No thread reads another's, nor an input's element after it has
 * written that element of an output. */
template <typename T> static __global__ void __launch_bounds__(THREADS) interpret(const __grid_constant__ chain_run run)
{
    extern __shared__ double memory[];
    T *registers = (T *)memory + threadIdx.x;
    const td_chain *c = &run.chain;
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < c->elements; i += gridDim.x * (int64_t)THREADS) {
        for (int r = 0; r < c->header.inputs; r++) registers[r * THREADS] = read<T>(c->in_dtype[r], run.in[r], offset_of(c, r, i));
        for (int n = 0; n < c->header.instructions; n++) {
            const td_fused_instruction *op = &c->code[n];
            if (op->function == TD_POINTWISE_dropout_mask) {
                registers[op->to * THREADS] = rounded(op->dtype, mask_of<T>(&run, op->from[0], i));
                continue;
            }
            T a = registers[op->from[0] * THREADS], b = registers[op->from[1] * THREADS], d = registers[op->from[2] * THREADS];
            registers[op->to * THREADS] = rounded(op->dtype, apply(op->function, a, b, d));
        }
        for (int o = 0; o < c->header.outputs; o++) write(c->out_dtype[o], run.out[o], i, registers[c->output[o] * THREADS]);
    }
}

extern "C" void td_chain_interpret(const td_kernel *k, const td_chain *c)
{
    chain_run run = { *c };
    run.numbers = td_device_run(k);
    for (int n = 0; n < c->header.draws; n++) run.below[n] = td_draw_below(c->draw[n].p);
    for (int i = 0; i < k->inputs; i++) run.in[i] = k->in[i].data;
    for (int o = 0; o < k->outputs; o++) run.out[o] = k->out[o].data;
    if (!c->elements) return;
    int64_t most = k->run->td->gpu.multiprocessors * (int64_t)16;
    unsigned blocks = (unsigned)td_smaller(td_blocks_for(c->elements, THREADS, 1), most);
    size_t shared = (size_t)c->header.registers * THREADS * (c->wide ? sizeof(double) : sizeof(float));
    if (c->wide)
        interpret<double><<<blocks, THREADS, shared, td_stream(k)>>>(run);
    else
        interpret<float><<<blocks, THREADS, shared, td_stream(k)>>>(run);
    td_cuda_launched(k);
}
