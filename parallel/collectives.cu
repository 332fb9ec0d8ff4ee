/* Collectives and their relatives on CUDA: collectives.c with copies that go to the call's queue. They are the runtime's own, which a graph
 * keeps as nodes: runs of one step are one copy. Floor: the bytes copied, read once and written once.
 */
#include "parallel/collectives.h"

#include <cuda_runtime.h>

enum { MOST_STEP = 0x7FFFFFFF }; /* between rows of one copy, bytes */

static cudaStream_t queue_of(const td_kernel *k) { return (cudaStream_t)k->run->queue; }

static void check(const td_kernel *k, cudaError_t status)
{
    if (status == cudaSuccess) return;
    cudaGetLastError(); /* the next one is asked about afresh */
    td_fail(k->run->td, TD_ERROR_DEVICE, "%s: CUDA did not take its copy: %s", k->op->name, cudaGetErrorString(status));
}

static void copy_run(const td_kernel *k, void *to, const void *from, int64_t bytes)
{
    check(k, cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, queue_of(k)));
}

static void copy(const td_kernel *k, const par_copy *c)
{
    bool adjacent = c->rows == 1 || (c->to_step == c->bytes && c->from_step == c->bytes);
    if (adjacent) copy_run(k, c->to, c->from, c->rows * c->bytes);
    else if (c->to_step <= MOST_STEP && c->from_step <= MOST_STEP)
        check(k, cudaMemcpy2DAsync(c->to, (size_t)c->to_step, c->from, (size_t)c->from_step, (size_t)c->bytes, (size_t)c->rows,
                                   cudaMemcpyDefault, queue_of(k)));
    else
        for (int64_t r = 0; r < c->rows; r++) copy_run(k, c->to + r * c->to_step, c->from + r * c->from_step, c->bytes);
}

static void clear(const td_kernel *k, void *memory, int64_t bytes) { check(k, cudaMemsetAsync(memory, 0, (size_t)bytes, queue_of(k))); }

static const par_copier gpu = { copy, clear };

extern "C" {
void par_all_reduce_cuda(const td_kernel *k) { par_run_all_reduce(k, &gpu); }
void par_reduce_scatter_cuda(const td_kernel *k) { par_run_reduce_scatter(k, &gpu); }
void par_all_gather_cuda(const td_kernel *k) { par_run_all_gather(k, &gpu); }
void par_own_part_cuda(const td_kernel *k) { par_run_own_part(k, &gpu); }
void par_count_once_cuda(const td_kernel *k) { par_run_count_once(k, &gpu); }
void par_own_members_cuda(const td_kernel *k) { par_run_own_members(k, &gpu); }
}
