/* Attention on a GPU: which kernel computes a call is chosen when it is planned.
 *
 *     cuDNN         16-bit operands without dropout, lengths, positions or window, where it has a plan (attention_graph.h)
 *     general       everything else, in f32 arithmetic (attention.cu)
 *
 * cuDNN sums dq in no fixed order, so contexts that want the same bits take the gradient elsewhere.
 */
#include "core/device_cuda.h"
#include "core/ops/attention_graph.h"

typedef enum choice { GENERAL, CUDNN } choice;

typedef struct attention_way {
    choice by;
    const td_cudnn_plan *plan;                /* CUDNN */
} attention_way;

static bool is_gradient(const td_kernel *k) { return k->op == &td_op_attention_gradient; }

/* NULL: there is none, or it may not be used. */
static const td_cudnn_plan *plan_for(td_context *td, const td_kernel *k, int64_t *bytes)
{
    bool repeatable = !is_gradient(k) || !td->options.deterministic;
    if (!repeatable || !td_attention_graph_serves(k) || !td_cudnn_load(td)) return NULL;
    td_attention_form form = td_attention_form_of(k);
    const td_cudnn_plan *plan = td_attention_plan(td, &form);
    if (!plan || !plan->plan) return NULL;
    *bytes = td_attention_plan_bytes(&form, plan);
    if (*bytes <= td->options.workspace_bytes) return plan;
    td_message(td, TD_LOG_WARNING, "%s: cuDNN wants %lld bytes of workspace, the cap is %lld: Tandem's own kernel computes it, slower; raise workspace_bytes",
               k->op->name, (long long)*bytes, (long long)td->options.workspace_bytes);
    return NULL;
}

bool td_attention_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    attention_way *way = td_prepared_new(td, sizeof *way);
    if (!way) return false;
    way->plan = plan_for(td, k, &out->workspace_bytes);
    bool done = td->error == TD_OK;
    if (way->plan) {
        way->by = CUDNN;
        out->way = is_gradient(k) ? "attention_gradient by cuDNN" : "attention by cuDNN";
    } else if (done) {
        way->by = GENERAL;
        out->way = is_gradient(k) ? "attention_gradient in f32" : "attention in f32";
        done = td_attention_general_prepare(td, k, out);
    }
    if (done)
        out->prepared = way;
    else
        td_prepared_free(way);
    return done;
}

void td_attention_cuda(const td_kernel *k)
{
    const attention_way *way = k->prepared;
    if (way->by == CUDNN)
        td_attention_plan_run(k, way->plan);
    else
        td_attention_general(k);
}

void td_attention_gradient_cuda(const td_kernel *k)
{
    const attention_way *way = k->prepared;
    if (way->by == CUDNN)
        td_attention_plan_run(k, way->plan);
    else
        td_attention_gradient_general(k);
}
