/* Matrix products through cuBLASLt, which is loaded at run time.
 *
 * The library thinks in columns: a row-major C = A B is its C^T = B^T A^T, so B is its first operand. Products of f32 operands are in
 * f32 throughout, those of 16-bit ones accumulate in f32.
 */
#include <cublasLt.h>
#include <dlfcn.h>
#include <string.h>

#include "core/device_cuda.h"
#include "core/ops/product_cuda.h"

enum { WORKSPACE_BYTES = 32 << 20, ALIGNED = 16 };

#define FUNCTIONS(X) \
    X(Create) X(Destroy) X(Matmul) X(MatmulAlgoGetHeuristic) X(MatmulDescCreate) X(MatmulDescDestroy) X(MatmulDescSetAttribute) \
    X(MatrixLayoutCreate) X(MatrixLayoutDestroy) X(MatrixLayoutSetAttribute) X(MatmulPreferenceCreate) X(MatmulPreferenceDestroy) \
    X(MatmulPreferenceSetAttribute) X(GetStatusString)

struct td_cublas {
    void *library;
    cublasLtHandle_t handle;
#define MEMBER(name) __typeof__(&cublasLt##name) name;
    FUNCTIONS(MEMBER)
};

static bool is_ok(td_context *td, cublasStatus_t status, const char *what)
{
    if (status == CUBLAS_STATUS_SUCCESS) return true;
    td_fail(td, status == CUBLAS_STATUS_ALLOC_FAILED ? TD_ERROR_MEMORY : TD_ERROR_DEVICE, "cuBLASLt: %s: %s", what,
            (*td_cublas_of(td))->GetStatusString(status));
    return false;
}

static bool load(td_context *td, struct td_cublas *b)
{
    b->library = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    if (!b->library) {
        td_fail(td, TD_ERROR_DEVICE, "matrix products on a GPU need cuBLASLt 13, which could not be loaded: %s; install the CUDA Toolkit's libcublas, or "
                "name its folder in LD_LIBRARY_PATH", dlerror());
        return false;
    }
#define FIND(name) \
    if (!(*(void **)&b->name = dlsym(b->library, "cublasLt" #name))) { \
        td_fail(td, TD_ERROR_DEVICE, "cuBLASLt lacks cublasLt" #name ": another version than this build's"); \
        return false; \
    }
    FUNCTIONS(FIND)
    return true;
}

static struct td_cublas *library_of(td_context *td)
{
    struct td_cublas **kept = td_cublas_of(td);
    if (*kept) return *kept;
    struct td_cublas *b = td_alloc(td, sizeof *b, "host");
    if (!b) return NULL;
    memset(b, 0, sizeof *b);
    *kept = b;
    if (load(td, b) && is_ok(td, b->Create(&b->handle), "making its handle")) return b;
    td_cublas_close(td);
    return NULL;
}

/* The library stays loaded: others of the process may use it. */
void td_cublas_close(td_context *td)
{
    struct td_cublas *b = *td_cublas_of(td);
    if (!b) return;
    if (b->handle) b->Destroy(b->handle);
    *td_cublas_of(td) = NULL;
    td_free(td, b, sizeof *b, "host");
}

/* ---- One product */

enum { FIRST, SECOND, RESULT, LAYOUTS };

typedef struct product {
    td_context *td;
    struct td_cublas *library;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t layout[LAYOUTS];
    cublasLtMatmulAlgo_t algo[2];             /* for operands at multiples of 16 bytes, and for any */
    bool has_algo[2];
    size_t workspace_bytes;
    bool adds_bias;                           /* the library does */
} product;

static cudaDataType_t type_of(td_dtype dtype) { return dtype == TD_BF16 ? CUDA_R_16BF : dtype == TD_F16 ? CUDA_R_16F : CUDA_R_32F; }

static bool set(product *g, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes)
{
    return is_ok(g->td, g->library->MatmulDescSetAttribute(g->desc, attribute, value, bytes), "describing a product");
}

/* A matrix in the library's terms: rows x columns, each column at a multiple of `lead`. */
static bool lay_out(product *g, int which, td_dtype dtype, int64_t rows, int64_t columns, int64_t lead, int64_t batch, int64_t stride)
{
    const struct td_cublas *b = g->library;
    int32_t count = (int32_t)batch;
    return is_ok(g->td, b->MatrixLayoutCreate(&g->layout[which], type_of(dtype), (uint64_t)rows, (uint64_t)columns, lead), "describing a matrix") &&
           is_ok(g->td, b->MatrixLayoutSetAttribute(g->layout[which], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count), "describing a matrix") &&
           is_ok(g->td, b->MatrixLayoutSetAttribute(g->layout[which], CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride),
                 "describing a matrix");
}

static bool describe(product *g, const td_onednn_product *p)
{
    cublasOperation_t first = p->b_column == 1 ? CUBLAS_OP_N : CUBLAS_OP_T, second = p->a_column == 1 ? CUBLAS_OP_N : CUBLAS_OP_T;
    if ((p->b_column != 1 && p->b_row != 1) || (p->a_column != 1 && p->a_row != 1) || p->batch > INT32_MAX) {
        td_fail(g->td, TD_ERROR_UNSUPPORTED, "a matrix product on a GPU needs operands with a dense dimension");
        return false;
    }
    if (!is_ok(g->td, g->library->MatmulDescCreate(&g->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product") ||
        !set(g, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first) || !set(g, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second))
        return false;
    if (g->adds_bias) {
        cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        cudaDataType_t type = type_of(p->bias_dtype);
        if (!set(g, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue) || !set(g, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type))
            return false;
    }
    bool b_rows = first == CUBLAS_OP_N, a_rows = second == CUBLAS_OP_N;
    return lay_out(g, FIRST, p->dtype, b_rows ? p->n : p->k, b_rows ? p->k : p->n, b_rows ? p->b_row : p->b_column, p->batch, p->b_batch) &&
           lay_out(g, SECOND, p->dtype, a_rows ? p->k : p->m, a_rows ? p->m : p->k, a_rows ? p->a_row : p->a_column, p->batch, p->a_batch) &&
           lay_out(g, RESULT, p->out_dtype, p->n, p->m, p->n, p->batch, p->m * p->n);
}

/* Chooses the algorithm for operands at multiples of `alignment` bytes. */
static bool choose(product *g, int which, uint32_t alignment, size_t workspace_bytes)
{
    const struct td_cublas *b = g->library;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    static const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
    };
    if (!is_ok(g->td, b->MatmulPreferenceCreate(&preference), "stating preferences")) return false;
    bool stated = is_ok(g->td, b->MatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof workspace_bytes),
                        "stating preferences");
    for (int i = 0; i < 4 && stated; i++)
        stated = is_ok(g->td, b->MatmulPreferenceSetAttribute(preference, alignments[i], &alignment, sizeof alignment), "stating preferences");
    cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (stated)
        status = b->MatmulAlgoGetHeuristic(b->handle, g->desc, g->layout[FIRST], g->layout[SECOND], g->layout[RESULT], g->layout[RESULT], preference, 1,
                                           &found, &count);
    b->MatmulPreferenceDestroy(preference);
    g->has_algo[which] = status == CUBLAS_STATUS_SUCCESS && count == 1;
    if (!g->has_algo[which]) return false;
    g->algo[which] = found.algo;
    if (found.workspaceSize > g->workspace_bytes) g->workspace_bytes = found.workspaceSize;
    return true;
}

static void undescribe(product *g)
{
    for (int i = 0; i < LAYOUTS; i++)
        if (g->layout[i]) g->library->MatrixLayoutDestroy(g->layout[i]);
    if (g->desc) g->library->MatmulDescDestroy(g->desc);
    memset(g->layout, 0, sizeof g->layout);
    g->desc = NULL;
}

void td_cublas_release(void *prepared)
{
    undescribe(prepared);
    td_prepared_free(prepared);
}

static bool is_empty(const td_onednn_product *p) { return !p->batch || !p->m || !p->n || !p->k; }

static td_onednn_product typed(const td_kernel *k, td_onednn_product p)
{
    p.dtype = k->in[0].dtype;
    p.out_dtype = k->out[0].dtype;
    p.has_bias = k->inputs > 2;
    p.bias_dtype = p.has_bias ? k->in[2].dtype : p.dtype;
    return p;
}

bool td_cublas_prepare(td_context *td, const td_kernel *k, td_onednn_product p, td_preparation *out)
{
    p = typed(k, p);
    if (is_empty(&p)) return true;
    struct td_cublas *library = library_of(td);
    product *g = library ? td_prepared_new(td, sizeof *g) : NULL;
    if (!g) return false;
    g->td = td;
    g->library = library;
    g->adds_bias = p.has_bias;
    out->prepared = g;
    int64_t cap = td->options.workspace_bytes < WORKSPACE_BYTES ? td->options.workspace_bytes : WORKSPACE_BYTES;
    bool chosen = describe(g, &p) && choose(g, 0, ALIGNED, (size_t)cap);
    if (!chosen && td->error == TD_OK && g->adds_bias) { /* not every pair of dtypes is offered */
        undescribe(g);
        g->adds_bias = false;
        chosen = describe(g, &p) && choose(g, 0, ALIGNED, (size_t)cap);
    }
    if (!chosen)
        td_fail(td, TD_ERROR_UNSUPPORTED, "%s: cuBLASLt has no way for (%lld, %lld) x (%lld, %lld) of %s", k->op->name, (long long)p.m, (long long)p.k,
                (long long)p.k, (long long)p.n, td_dtype_name(p.dtype));
    out->workspace_bytes = (int64_t)g->workspace_bytes;
    return chosen;
}

static bool is_aligned(const td_kernel *k)
{
    for (int i = 0; i < 2; i++)
        if ((uintptr_t)k->in[i].data % ALIGNED) return false;
    return (uintptr_t)k->out[0].data % ALIGNED == 0;
}

void td_cublas_run(const td_kernel *k, const td_onednn_product *untyped)
{
    td_onednn_product p = typed(k, *untyped);
    td_context *td = k->run->td;
    product *g = k->prepared;
    if (is_empty(&p)) {
        if (td_arg_bytes(&k->out[0]) &&
            td_cuda_ok(td, cudaMemsetAsync(k->out[0].data, 0, (size_t)td_arg_bytes(&k->out[0]), td_stream(k)), "clearing a product over nothing") && p.has_bias)
            td_product_add_bias(k, p.batch * p.m, p.n);
        return;
    }
    int which = is_aligned(k) ? 0 : 1;
    size_t workspace_bytes = g->workspace_bytes;
    if (!g->has_algo[which] && !choose(g, which, (uint32_t)td_dtype_size(p.dtype), workspace_bytes)) {
        td_fail(td, TD_ERROR_UNSUPPORTED, "%s: cuBLASLt has no way for operands at odd places", k->op->name);
        return;
    }
    if (g->adds_bias && !set(g, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &k->in[2].data, sizeof k->in[2].data)) return;
    const float one = 1, zero = 0;
    if (is_ok(td, g->library->Matmul(g->library->handle, g->desc, &one, k->in[1].data, g->layout[FIRST], k->in[0].data, g->layout[SECOND], &zero, k->out[0].data,
                                     g->layout[RESULT], k->out[0].data, g->layout[RESULT], &g->algo[which], k->workspace, workspace_bytes, td_stream(k)),
              k->op->name) &&
        p.has_bias && !g->adds_bias)
        td_product_add_bias(k, p.batch * p.m, p.n);
}
