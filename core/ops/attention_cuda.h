/* A call of attention as its kernels for GPUs see it. */
#ifndef TANDEM_CORE_OPS_ATTENTION_CUDA_H
#define TANDEM_CORE_OPS_ATTENTION_CUDA_H

#include "core/ops/attention.h"

/* Element (b, h, i, c) of an operand is at `at` + b batch + h head + i row + c of it. */
typedef struct td_heads {
    int64_t at, batch, head, row;
} td_heads;

/* Local sizes: queries (batch, heads, rows, depth), keys (batch, shared, keys, depth), values (batch, shared, keys, values). */
typedef struct td_attention_layout {
    int64_t batch, heads, rows, depth, shared, keys, values;
    td_heads q, key, value, o, dy, dq, dk, dv; /* dy and those after it: of the backward */
    int64_t first_sequence, first_head, global_heads, global_batch; /* of this rank's part, for dropout's draw */
    const int32_t *lengths, *positions;       /* or NULL */
} td_attention_layout;

#ifdef __cplusplus
extern "C" {
#endif

/* attention_cpu.c, which both devices share. */
td_attention_layout td_attention_layout_of(const td_kernel *k);
/* Every row of the call's operands and results lies at a multiple of 8 elements: 16 bytes, where they are of 16 bits. */
bool td_attention_aligned(const td_kernel *k, const td_attention_layout *at);

/* device_attention.c: the operations, which choose among the ways below. */
TD_CUDA_KERNEL(td_attention_cuda);
TD_CUDA_PREPARE(td_attention_cuda_prepare);

/* attention_tensor.cu: 16-bit heads whose columns come in eights, up to 128 of them. Workspace as the general kernel's. */
TD_CUDA_KERNEL(td_attention_tensor);
TD_CUDA_KERNEL(td_attention_gradient_tensor);
bool td_attention_tensor_serves(const td_kernel *k);

/* attention_whole.cu: the gradient of what those serve, of heads that fit into shared memory whole. Needs no workspace. */
TD_CUDA_KERNEL(td_attention_gradient_whole);
bool td_attention_whole_serves(const td_context *td, const td_kernel *k);

/* attention.cu: every form, in f32 arithmetic. */
TD_CUDA_KERNEL(td_attention_general);
TD_CUDA_KERNEL(td_attention_gradient_general);
TD_CUDA_PREPARE(td_attention_general_prepare);

#ifdef __cplusplus
}
#endif

#endif
