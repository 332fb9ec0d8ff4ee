/* What CUDA's side of the core shares: the device files and the kernels in .cu files of core/ops.
 *
 * A kernel's host function gets a td_kernel as on the CPU, with pointers into device memory, and launches on td_stream(k). It is called
 * while a graph is being captured: it allocates nothing, waits for nothing and reads on the host only what the plan fixes (shapes,
 * attributes, what `prepare` made). What changes from run to run is in device memory: operands, and td_device_run(k).
 */
#ifndef TANDEM_CORE_DEVICE_CUDA_H
#define TANDEM_CORE_DEVICE_CUDA_H

#include <cuda_runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "core/ops/op.h"

/* The numbers of a run, in device memory: what td_run has on the host. */
typedef struct td_cuda_run {
    uint64_t seed;
    int64_t update;                           /* optimizer updates done: counter of random draws */
    int64_t micro;                            /* micro-batches run since the last update, before this step */
} td_cuda_run;

static inline cudaStream_t td_stream(const td_kernel *k) { return (cudaStream_t)k->run->queue; }
static inline const td_cuda_run *td_device_run(const td_kernel *k) { return (const td_cuda_run *)k->run->on_device; }

/* False, and the context's error, which names `what` and CUDA's reason: status is no success. */
bool td_cuda_ok(td_context *td, cudaError_t status, const char *what);
/* After a launch: its error, if it has one, becomes the context's, in the operation's name. */
void td_cuda_launched(const td_kernel *k);

/* Kernels that copy bytes within the device's memory, not onto themselves in part, and set them to 0 (core/ops/bytes.cu). */
bool td_copy_bytes_cuda(td_context *td, void *to, const void *from, int64_t bytes, cudaStream_t queue);
bool td_clear_bytes_cuda(td_context *td, void *to, int64_t bytes, cudaStream_t queue);
cudaError_t td_clear_bytes_node_cuda(cudaGraphNode_t *to, cudaGraph_t graph, void *memory, int64_t bytes); /* the same as a node that waits for nothing yet */
/* Draws it, on the queue (core/ops/initial.cu). */
bool td_initial_cuda(td_context *td, const td_initial *of, cudaStream_t queue);

/* cuBLASLt, loaded when the first product is planned. */
struct td_cublas;
struct td_cublas **td_cublas_of(td_context *td);          /* where the context keeps it */
void td_cublas_rest(td_context *td);                      /* behind a plan's first run: gives back what choosing algorithms took */
void td_cublas_close(td_context *td);

/* Numbers of a launch over `count` elements, each thread taking `each` of them in turn. */
static inline unsigned td_blocks_for(int64_t count, int threads, int each)
{
    int64_t blocks = (count + (int64_t)threads * each - 1) / ((int64_t)threads * each);
    return (unsigned)(blocks < 1 ? 1 : blocks > 0x7FFFFFFF ? 0x7FFFFFFF : blocks);
}

#ifdef __cplusplus
}
#endif

#endif
