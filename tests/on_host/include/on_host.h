/* Kernels on the host: the threads of a block take turns, each until it waits for others or ends, and blocks follow one another.
 *
 * What threads do together is checked: all that a warp's operation names must reach it, and all of a block its barrier; what would hang
 * or be undefined on a GPU ends the launch with an error that names the kernel and the thread. Shared memory begins as NaNs. One launch
 * at a time, by one thread of the process.
 */
#ifndef TANDEM_TESTS_ON_HOST_H
#define TANDEM_TESTS_ON_HOST_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Put on a stream: run at once, or late, or by each launch of the graph that is being captured, until `drop`. Owned by the stream from then
 * on. Errors of what runs late are those of the call that the host waits with. */
typedef struct on_host_work {
    cudaError_t (*run)(struct on_host_work *self);
    void (*drop)(struct on_host_work *self);
} on_host_work;
void on_host_put(cudaStream_t stream, on_host_work *work);

/* A graph's work runs as it was captured, or, where what waits for what leaves a choice, as ON_HOST_GRAPHS in the environment says:
 * "beginner-first": the stream that began the capture as far as it comes, others when it waits for them; "beginner-last": others first.
 *
 * A stream that is made while ON_HOST_LATE is 1 in the environment is late: outside of captures what it is given waits, behind all that others
 * were given before, until the host waits for it, frees memory or asks for an event, which runs one piece. */

/* A kernel with its arguments: `thread` is one thread's work. */
typedef struct on_host_launch {
    const char *kernel;
    dim3 grid, block;
    size_t shared;                            /* bytes of shared memory that the launch asks for */
    void (*thread)(void *arguments);
    void *arguments;
} on_host_launch;
cudaError_t on_host_run(const on_host_launch *launch);
/* Why the last launch failed. */
const char *on_host_reason(void);

/* ---- By threads of a kernel */

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

void *on_host_shared(void);
/* This launch has failed; does not return to the thread. */
void on_host_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

void __syncthreads(void);

/* An operation of the lanes in `mask`, which all come to it with the same `finish`: the last to come calls it with what each of them
 * brought (NULL for lanes that are not in `mask`), then all go on. */
typedef void (*on_host_finish)(void *const lanes[32]);
void on_host_together(const char *name, unsigned mask, on_host_finish finish, void *own);
/* This thread's number in its warp. */
int on_host_lane_number(void);

/* Copies into shared memory that are done when they are waited for, not before. */
void on_host_copy(void *to, const void *from, int bytes, int valid_bytes);
void on_host_copies_end(void);
void on_host_copies_wait(int newer);

#ifdef __cplusplus
}
#endif

#endif
