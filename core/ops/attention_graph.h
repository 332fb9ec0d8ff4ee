/* Attention as graphs of cuDNN (device_attention_graph.c), for what its kernels are fast at: 16-bit operands, no dropout, every key
 * there is. */
#ifndef TANDEM_CORE_OPS_ATTENTION_GRAPH_H
#define TANDEM_CORE_OPS_ATTENTION_GRAPH_H

#include "core/device_cudnn.h"
#include "core/ops/attention_cuda.h"

/* A call as far as a plan depends on it. */
typedef struct td_attention_form {
    td_attention_layout at;
    td_dtype dtype;                           /* of all operands, and of the gradients */
    bool causal, backward;
} td_attention_form;

/* True: the form is one that cuDNN ought to have a plan for. */
bool td_attention_graph_serves(const td_kernel *k);
td_attention_form td_attention_form_of(const td_kernel *k);

/* The form's plan, made or found; its `plan` is NULL where there is none. Says so once where that is not as it should be. NULL: the context's
 * error. After td_cudnn_load or td_cudnn_describe_device. */
const td_cudnn_plan *td_attention_plan(td_context *td, const td_attention_form *form);
/* What a call needs beside the operands: the plan's own workspace and what the graph keeps in it. */
int64_t td_attention_plan_bytes(const td_attention_form *form, const td_cudnn_plan *plan);
/* The same of a plan that cuDNN is taken to have: 256 bytes for itself, and where heads share keys a copy of every head's dk and dv. */
int64_t td_attention_foretold_bytes(const td_attention_form *form);
/* Runs the plan for a call. */
void td_attention_plan_run(const td_kernel *k, const td_cudnn_plan *plan);

#endif
