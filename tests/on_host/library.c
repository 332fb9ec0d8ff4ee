/* What a GPU's device has of libraries and the driver, on the host: matrix products are the CPU's, chains are interpreted, attention is
 * Tandem's own, memory is the host's. Each allocation is its own, so that AddressSanitizer sees what lies beyond. */
#include <on_host.h>
#include <stdlib.h>

#include "core/device_graph.h"
#include "core/device_nvrtc.h"
#include "core/device_pool.h"
#include "core/ops/attention_graph.h"
#include "core/ops/product_cuda.h"

/* ---- Memory */

struct td_pools {
    int unused;
};

bool td_pools_open(td_context *td, int device)
{
    (void)device;
    td->page_bytes = td->gpu.page_bytes = TD_GPU_ALIGN;
    return true;
}

void td_pools_close(td_context *td) { (void)td; }

void *td_cuda_get(td_context *td, int64_t bytes, const char *kind)
{
    (void)kind;
    void *memory = aligned_alloc(TD_GPU_ALIGN, (size_t)td_round_up(bytes ? bytes : 1, TD_GPU_ALIGN));
    if (!memory) {
        td_fail(td, TD_ERROR_MEMORY, "no memory");
        return NULL;
    }
    memset(memory, 0xFF, (size_t)bytes);
    td->device_counts.allocations++;
    td->device_counts.bytes += bytes;
    if (td->device_counts.bytes > td->device_counts.most_bytes) td->device_counts.most_bytes = td->device_counts.bytes;
    return memory;
}

void td_cuda_put(td_context *td, void *memory, int64_t bytes, const char *kind)
{
    (void)kind;
    if (memory) td->device_counts.bytes -= bytes;
    free(memory);
}

/* ---- Graphs: how long a launch takes the host depends on no kind of node */

bool td_nodes_are_kernels(td_context *td, cudaGraph_t graph)
{
    (void)td, (void)graph;
    return true;
}

/* ---- Chains */

cudaKernel_t td_nvrtc_kernel(td_context *td, const char *source, const char *name)
{
    (void)td, (void)source, (void)name;
    return NULL;
}

void td_nvrtc_close(td_context *td) { (void)td; }

/* ---- Attention */

bool td_cudnn_load(td_context *td)
{
    (void)td;
    return false;
}

void td_cudnn_close(td_context *td) { (void)td; }

bool td_attention_graph_serves(const td_kernel *k)
{
    (void)k;
    return false;
}

td_attention_form td_attention_form_of(const td_kernel *k)
{
    (void)k;
    return (td_attention_form){ .backward = false };
}

const td_cudnn_plan *td_attention_plan(td_context *td, const td_attention_form *form)
{
    (void)td, (void)form;
    return NULL;
}

int64_t td_attention_plan_bytes(const td_attention_form *form, const td_cudnn_plan *plan)
{
    (void)form, (void)plan;
    return 0;
}

int64_t td_attention_foretold_bytes(const td_attention_form *form)
{
    (void)form;
    return 0;
}

void td_attention_plan_run(const td_kernel *k, const td_cudnn_plan *plan) { (void)k, (void)plan; }

/* ---- Products: the CPU's, and beside them the kernels that are Tandem's own */

void td_cublas_rest(td_context *td) { (void)td; }
void td_cublas_close(td_context *td) { (void)td; }

/* The workspace serves the product, then the kernel of the sum beside it. */
bool td_cublas_prepare(td_context *td, const td_kernel *k, td_onednn_product p, td_preparation *out)
{
    td_product_sum sum;
    td_preparation of_sum = { 0 };
    if (!td_product_prepare(td, k, p, out)) return false;
    if (!p.dbias) return true;
    td_product_sum_of(k, &sum);
    bool prepared = td_op_sum.cuda.prepare(td, &sum.kernel, &of_sum);
    if (of_sum.workspace_bytes > out->workspace_bytes) out->workspace_bytes = of_sum.workspace_bytes;
    return prepared;
}

void td_cublas_release(void *prepared) { td_onednn_release(prepared); }

enum { OPERANDS = 5, RESULTS = 2 };

typedef struct product_work {
    on_host_work work;
    td_kernel kernel;
    td_onednn_product product;
    td_arg in[OPERANDS], out[RESULTS];
} product_work;

static cudaError_t run_product(on_host_work *work)
{
    product_work *w = (product_work *)work;
    td_product_run(&w->kernel, &w->product);
    return cudaSuccess;
}

static void drop_product(on_host_work *work) { free(work); }

/* Without what kernels of its own make: the result where that finds it. */
static void put_product(const td_kernel *k, td_onednn_product p)
{
    product_work *w = calloc(1, sizeof *w);
    if (!w) {
        td_fail(k->run->td, TD_ERROR_MEMORY, "no memory");
        return;
    }
    w->work = (on_host_work){ .run = run_product, .drop = drop_product };
    w->kernel = *k;
    memcpy(w->in, k->in, (size_t)k->inputs * sizeof *w->in);
    w->out[0] = k->out[p.keeps];
    w->kernel.in = w->in;
    w->kernel.out = w->out;
    w->kernel.outputs = 1;
    w->kernel.inputs -= p.dgelu;
    p.gelu = p.dgelu = p.dbias = p.keeps = 0;
    w->product = p;
    on_host_put(td_stream(k), &w->work);
}

void td_cublas_run(const td_kernel *k, const td_onednn_product *p)
{
    td_product_sum sum;
    put_product(k, *p);
    if (p->gelu) td_product_gelu(k, &k->out[p->keeps]);
    if (p->dgelu) td_product_dgelu(k, &k->in[k->inputs - 1]);
    if (!p->dbias) return;
    td_product_sum_of(k, &sum);
    td_op_sum.cuda.run(&sum.kernel);
}
