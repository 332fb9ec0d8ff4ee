/* Embedding's kernels for GPUs. */
#ifndef TANDEM_CORE_OPS_EMBEDDING_CUDA_H
#define TANDEM_CORE_OPS_EMBEDDING_CUDA_H

#include "core/ops/shard.h"

#ifdef __cplusplus
extern "C" {
#endif

TD_CUDA_KERNEL(td_embedding_cuda);
TD_CUDA_PREPARE(td_embedding_gradient_cuda_prepare);
/* embedding_gradient of the rows that exist. */
void td_embedding_gradient_rows(const td_kernel *k, td_rows held);

#ifdef __cplusplus
}
#endif

#endif
