/* Bytes copied and cleared on the GPU by kernels: a graph of kernels alone is launched in a few us, whatever its length; with a memcpy or a
 * memset among its nodes each node costs the host more than half a microsecond. */
#include "core/device_cuda.h"

enum { THREADS = 256, EACH = 4 };

/* Whole words of both, then what is left by bytes. */
template <typename Word> static __global__ void __launch_bounds__(THREADS) copy(char *to, const char *from, int64_t bytes)
{
    int64_t words = bytes / (int64_t)sizeof(Word), step = (int64_t)gridDim.x * THREADS, first = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    for (int64_t i = first; i < words; i += step) ((Word *)to)[i] = ((const Word *)from)[i];
    for (int64_t i = words * (int64_t)sizeof(Word) + first; i < bytes; i += step) to[i] = from[i];
}

template <typename Word> static __global__ void __launch_bounds__(THREADS) clear(char *to, int64_t bytes)
{
    int64_t words = bytes / (int64_t)sizeof(Word), step = (int64_t)gridDim.x * THREADS, first = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    for (int64_t i = first; i < words; i += step) ((Word *)to)[i] = Word{};
    for (int64_t i = words * (int64_t)sizeof(Word) + first; i < bytes; i += step) to[i] = 0;
}

static bool has_words(uintptr_t places) { return places % sizeof(uint4) == 0; }

static unsigned blocks_for(int64_t bytes, int64_t word) { return td_blocks_for((bytes + word - 1) / word, THREADS, EACH); }

extern "C" bool td_copy_bytes_cuda(td_context *td, void *to, const void *from, int64_t bytes, cudaStream_t queue)
{
    if (bytes <= 0 || to == from) return true;
    if (has_words((uintptr_t)to | (uintptr_t)from)) copy<uint4><<<blocks_for(bytes, 16), THREADS, 0, queue>>>((char *)to, (const char *)from, bytes);
    else copy<char><<<blocks_for(bytes, 1), THREADS, 0, queue>>>((char *)to, (const char *)from, bytes);
    return td_cuda_ok(td, cudaGetLastError(), "copying bytes");
}

extern "C" bool td_clear_bytes_cuda(td_context *td, void *to, int64_t bytes, cudaStream_t queue)
{
    if (bytes <= 0) return true;
    if (has_words((uintptr_t)to)) clear<uint4><<<blocks_for(bytes, 16), THREADS, 0, queue>>>((char *)to, bytes);
    else clear<char><<<blocks_for(bytes, 1), THREADS, 0, queue>>>((char *)to, bytes);
    return td_cuda_ok(td, cudaGetLastError(), "clearing bytes");
}

extern "C" cudaError_t td_clear_bytes_node_cuda(cudaGraphNode_t *to, cudaGraph_t graph, void *memory, int64_t bytes)
{
    bool words = has_words((uintptr_t)memory);
    void *arguments[] = { &memory, &bytes };
    cudaKernelNodeParams launch = {};
    launch.func = words ? (void *)clear<uint4> : (void *)clear<char>;
    launch.gridDim = dim3(blocks_for(bytes, words ? 16 : 1));
    launch.blockDim = dim3(THREADS);
    launch.kernelParams = arguments;
    return cudaGraphAddKernelNode(to, graph, NULL, 0, &launch);
}
