/* Every operation that computes. Adding one touches its own file and this list; the tests go through it.
 *
 * Operations about state and passes (input, parameter, assign, update, mark ...) are in state.c and update.c.
 */
#ifndef TANDEM_CORE_OPS_LIST_H
#define TANDEM_CORE_OPS_LIST_H

#include <tandem/rewrite.h>

#define TD_OPERATIONS(X) \
    TD_UNARY(X) TD_BINARY(X) X(where) X(cast) \
    X(gelu_slope) X(gelu_tanh_slope) X(silu_slope) \
    X(fused) X(fused_rows) \
    X(sum) X(max) X(argmax) \
    X(reshape) X(broadcast) X(transpose) X(slice) X(concat) X(fill) X(iota) \
    X(matmul) X(linear) X(matmul_add) X(linear_add) X(matmul_dbias) X(matmul_dgelu) X(linear_gelu) \
    X(softmax) X(cross_entropy_rows) X(cross_entropy_gradient) \
    X(dropout_mask) X(uniform) \
    X(embedding) X(embedding_gradient) X(gather) X(scatter_add) \
    X(layer_norm) X(rms_norm) X(norm_gradient) \
    X(logsumexp) X(log_softmax) X(attention) \
    X(rotary) X(cumsum) X(top_k) \
    X(slice_write) X(slice_read)

#define TD_DECLARE_OPERATION(name) extern const td_op td_op_##name;
TD_OPERATIONS(TD_DECLARE_OPERATION)

#endif
