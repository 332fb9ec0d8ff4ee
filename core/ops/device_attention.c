/* Attention on a GPU: which kernel computes a call is chosen when it is planned.
 *
 *     whole heads   the gradient of 16-bit heads of up to 64 columns, 256 queries and 256 keys of their own, on GPUs with the shared memory for it
 *                   (attention_whole.cu); where cuDNN could, too, if there is a head for each multiprocessor
 *     cuDNN         other 16-bit operands without dropout, lengths, positions or window, where it has a plan (attention_graph.h)
 *     tensor cores  other 16-bit heads of up to 128 columns, in eights: dropout, every mask (attention_tensor.cu)
 *     general       everything else, in f32 arithmetic (attention.cu)
 *
 * cuDNN sums dq in no fixed order, so contexts that want the same bits run after run get no gradient from it.
 */
#include "core/device_cuda.h"
#include "core/ops/attention_graph.h"

typedef struct attention_way {
    const td_cudnn_plan *plan;                /* or */
    void (*run)(const td_kernel *k);
} attention_way;

static bool is_gradient(const td_kernel *k) { return k->op == &td_op_attention_gradient; }

static bool is_whole(const td_context *td, const td_kernel *k) { return is_gradient(k) && td_attention_whole_serves(td, k); }

/* A block has a whole head, where cuDNN's share out the keys of one: with few heads it is the faster. */
static bool fills_gpu(const td_context *td, const td_kernel *k)
{
    td_attention_layout at = td_attention_layout_of(k);
    return at.batch * at.heads >= td->gpu.multiprocessors;
}

/* Whether cuDNN may compute it, if it has a plan. */
static bool may_be_graph(const td_context *td, const td_kernel *k)
{
    bool repeatable = !is_gradient(k) || !td->options.deterministic;
    return repeatable && !(is_whole(td, k) && fills_gpu(td, k)) && td_attention_graph_serves(k);
}

/* NULL: there is none, or it may not be used. */
static const td_cudnn_plan *plan_for(td_context *td, const td_kernel *k, int64_t *bytes)
{
    if (!may_be_graph(td, k) || !td_cudnn_load(td)) return NULL;
    td_attention_form form = td_attention_form_of(k);
    const td_cudnn_plan *plan = td_attention_plan(td, &form);
    if (!plan || !plan->plan) return NULL;
    *bytes = td_attention_plan_bytes(&form, plan);
    if (*bytes <= td->options.workspace_bytes) return plan;
    td_message(td, TD_LOG_WARNING,
               "%s: cuDNN wants %lld bytes of workspace, the cap is %lld: Tandem's own kernel computes it; raise workspace_bytes",
               k->op->name, (long long)*bytes, (long long)td->options.workspace_bytes);
    return NULL;
}

static const char *graph_way(const td_kernel *k) { return is_gradient(k) ? "attention_gradient by cuDNN" : "attention by cuDNN"; }

/* The kernels that are not cuDNN's. */
static bool choose_own(td_context *td, const td_kernel *k, attention_way *way, td_preparation *out)
{
    bool backward = is_gradient(k);
    if (is_whole(td, k)) {
        way->run = td_attention_gradient_whole;
        out->way = "attention_gradient of whole heads by tensor cores";
        out->workspace_bytes = 0;
        return true;
    }
    if (td_attention_tensor_serves(k)) {
        way->run = backward ? td_attention_gradient_tensor : td_attention_tensor;
        out->way = backward ? "attention_gradient by tensor cores" : "attention by tensor cores";
    } else {
        way->run = backward ? td_attention_gradient_general : td_attention_general;
        out->way = backward ? "attention_gradient in f32" : "attention in f32";
    }
    return td_attention_general_prepare(td, k, out);
}

/* For a GPU that is described: it is taken to have cuDNN. */
static bool foretell(td_context *td, const td_kernel *k, td_preparation *out)
{
    attention_way own;
    if (may_be_graph(td, k)) {
        td_attention_form form = td_attention_form_of(k);
        out->workspace_bytes = td_attention_foretold_bytes(&form);
        out->way = graph_way(k);
        if (out->workspace_bytes <= td->options.workspace_bytes) return true;
    }
    return choose_own(td, k, &own, out);
}

bool td_attention_cuda_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    if (td->options.gpu) return foretell(td, k, out);
    attention_way *way = td_prepared_new(td, sizeof *way);
    if (!way) return false;
    way->plan = plan_for(td, k, &out->workspace_bytes);
    if (way->plan) out->way = graph_way(k);
    if (td->error == TD_OK && (way->plan || choose_own(td, k, way, out))) {
        out->prepared = way;
        return true;
    }
    td_prepared_free(way);
    return false;
}

void td_attention_cuda(const td_kernel *k)
{
    const attention_way *way = k->prepared;
    if (way->plan)
        td_attention_plan_run(k, way->plan);
    else
        way->run(k);
}
