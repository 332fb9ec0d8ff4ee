/* Graphs of operations that cuDNN compiles into a kernel or a few, through its backend's descriptors.
 *
 * A graph is described step by step; after the first step that fails the others do nothing, and `td_cudnn_build` says why. What is built is
 * a plan: the context keeps it under its key, so that layers share it, and keeps it on disk (device_cache.h) by key, device and version.
 * A form that has no plan is remembered too. Nothing here fails the context but a want of memory: who asks has another way, and says so.
 *
 * cuDNN is loaded when the first plan is asked for.
 */
#ifndef TANDEM_CORE_DEVICE_CUDNN_H
#define TANDEM_CORE_DEVICE_CUDNN_H

#include <cuda_runtime_api.h>
#include <cudnn_graph.h>

#include "core/internal.h"

enum { TD_CUDNN_DIMS = 4, TD_CUDNN_DESCRIPTORS = 160, TD_CUDNN_OPERATIONS = 40, TD_CUDNN_REASON = 256 };

typedef struct td_cudnn_tensor {
    cudnnBackendDescriptor_t descriptor;
    cudnnDataType_t type;
    int64_t dim[TD_CUDNN_DIMS];
} td_cudnn_tensor;

typedef struct td_cudnn_graph {
    td_context *td;
    struct td_cudnn *library;
    cudnnBackendDescriptor_t made[TD_CUDNN_DESCRIPTORS], operation[TD_CUDNN_OPERATIONS];
    int made_count, operation_count;
    int64_t virtuals;
    bool failed;
    char reason[TD_CUDNN_REASON];             /* of the first step that failed */
} td_cudnn_graph;

/* How a plan runs: made once, kept in the context. */
typedef struct td_cudnn_plan {
    cudnnBackendDescriptor_t plan;            /* NULL: the form has none */
    int64_t workspace_bytes;
} td_cudnn_plan;

/* False: cuDNN cannot be had; the first time a message says why. */
bool td_cudnn_load(td_context *td);
/* Plans are for the device that cuDNN's JSON describes, not for the context's: that cuDNN proposes a way makes one, it is not
 * built and cannot be run. Needs no GPU, but a libcuda that can be loaded. False and a reason. */
bool td_cudnn_describe_device(td_context *td, const char *json, char reason[TD_CUDNN_REASON]);
/* Version of the library that is loaded: 91900 is 9.19.0. */
int64_t td_cudnn_version(const td_context *td);

/* The plan kept under `key`; NULL: there is none yet. */
const td_cudnn_plan *td_cudnn_find(td_context *td, const char *key);

/* ---- A graph */

/* After td_cudnn_load. Ends with td_cudnn_build. */
void td_cudnn_begin(td_context *td, td_cudnn_graph *g);
/* A tensor in memory: elements `stride` apart, the pointer given when the plan runs under `id`, at a multiple of 16 bytes. */
td_cudnn_tensor td_cudnn_stored(td_cudnn_graph *g, int64_t id, cudnnDataType_t type, const int64_t dim[TD_CUDNN_DIMS],
                                const int64_t stride[TD_CUDNN_DIMS]);
/* One number, whose host pointer is given when the plan runs. */
td_cudnn_tensor td_cudnn_scalar(td_cudnn_graph *g, int64_t id, cudnnDataType_t type);
/* A tensor that is in no memory, dense in the order of its dimensions. */
td_cudnn_tensor td_cudnn_virtual(td_cudnn_graph *g, cudnnDataType_t type, const int64_t dim[TD_CUDNN_DIMS]);
/* The same, its last two dimensions laid out the other way around. */
td_cudnn_tensor td_cudnn_turned(td_cudnn_graph *g, cudnnDataType_t type, const int64_t dim[TD_CUDNN_DIMS]);

/* y = mode(x, b, t), in `compute`; b and t may be NULL. */
void td_cudnn_pointwise(td_cudnn_graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t compute, td_cudnn_tensor x, const td_cudnn_tensor *b,
                        const td_cudnn_tensor *t, td_cudnn_tensor y);
/* y, i32: the index of each element along `axis` of x. */
void td_cudnn_index(td_cudnn_graph *g, int64_t axis, td_cudnn_tensor x, td_cudnn_tensor y);
/* c = a b over the last two dimensions, in f32. */
void td_cudnn_matmul(td_cudnn_graph *g, td_cudnn_tensor a, td_cudnn_tensor b, td_cudnn_tensor c);
/* x to y's shape, in f32: what y has 1 of is reduced. */
void td_cudnn_reduce(td_cudnn_graph *g, cudnnReduceTensorOp_t mode, td_cudnn_tensor x, td_cudnn_tensor y);
void td_cudnn_reshape(td_cudnn_graph *g, td_cudnn_tensor x, td_cudnn_tensor y);

/* The plan of the graph, kept under `key`; its `plan` is NULL where cuDNN has none, and `g->reason` says why. NULL: no memory, and the
 * context's error. The graph is gone. */
const td_cudnn_plan *td_cudnn_build(td_cudnn_graph *g, const char *key);

/* ---- Running */

/* Puts the plan on the stream. Memory: `count` ids and their pointers. False, and the context's error. */
bool td_cudnn_run(td_context *td, const td_cudnn_plan *plan, int count, const int64_t *ids, void *const *pointers, void *workspace,
                  cudaStream_t stream);

/* Destroys every plan. Nothing that runs them may be left. */
void td_cudnn_close(td_context *td);

#endif
