/* Matrix products through cuBLASLt, which is loaded at run time.
 *
 * The library thinks in columns: a row-major C = A B is its C^T = B^T A^T, so B is its first operand. Products of f32 operands are in
 * f32 throughout, those of 16-bit ones accumulate in f32.
 */
#include "core/device_cublas.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "core/ops/product_cuda.h"

enum { WORKSPACE_BYTES = 32 << 20, ALIGNED = 16 };

bool td_cublas_ok(td_context *td, cublasStatus_t status, const char *what)
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
    TD_CUBLAS_FUNCTIONS(FIND)
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
    if (load(td, b) && td_cublas_ok(td, b->Create(&b->handle), "making its handle")) return b;
    td_cublas_close(td);
    return NULL;
}

void td_cublas_rest(td_context *td)
{
    struct td_cublas *b = *td_cublas_of(td);
    if (b) cudaFree(b->flush);
    if (b) b->flush = NULL;
}

/* The library stays loaded: others of the process may use it. */
void td_cublas_close(td_context *td)
{
    struct td_cublas *b = *td_cublas_of(td);
    if (!b) return;
    td_choices_free(td);
    td_cublas_rest(td);
    for (int r = 0; r < TD_CUBLAS_RUNS; r++) {
        if (b->begin[r]) cudaEventDestroy(b->begin[r]);
        if (b->end[r]) cudaEventDestroy(b->end[r]);
    }
    if (b->handle) b->Destroy(b->handle);
    *td_cublas_of(td) = NULL;
    td_free(td, b, sizeof *b, "host");
}

/* ---- One product */

cublasStatus_t td_cublas_matmul(td_context *td, const td_matmul_call *call, const cublasLtMatmulAlgo_t *algo)
{
    const struct td_cublas *b = *td_cublas_of(td);
    const td_matmul *m = call->matmul;
    const float one = 1, zero = 0, *factor = call->added ? &one : &zero;
    const void *added = call->added ? call->added : call->result;
    return b->Matmul(b->handle, m->desc, &one, call->first, m->layout[TD_FIRST], call->second, m->layout[TD_SECOND], factor, added,
                     m->layout[TD_RESULT], call->result, m->layout[TD_RESULT], algo, call->workspace, call->workspace_bytes, call->stream);
}

typedef struct product {
    td_context *td;
    struct td_cublas *library;
    td_matmul matmul;
    td_choice *choice[2];                     /* for operands at multiples of 16 bytes, and for any */
    td_matmul whole;                          /* with what is asked for beside the product */
    td_choice *whole_choice;                  /* for operands at multiples of 16 bytes; NULL: the library has no way, or is not asked */
    int64_t workspace_bytes;
    bool adds_bias;                           /* the library does */
    bool timed;                               /* algorithms are, and the fastest is taken */
} product;

static cudaDataType_t type_of(td_dtype dtype) { return dtype == TD_BF16 ? CUDA_R_16BF : dtype == TD_F16 ? CUDA_R_16F : CUDA_R_32F; }

static bool set(product *g, const td_matmul *m, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes)
{
    return td_cublas_ok(g->td, g->library->MatmulDescSetAttribute(m->desc, attribute, value, bytes), "describing a product");
}

/* A matrix in the library's terms: rows x columns, each column at a multiple of `lead`. */
static bool lay_out(product *g, cublasLtMatrixLayout_t *to, td_dtype dtype, int64_t rows, int64_t columns, int64_t lead, int64_t batch,
                    int64_t stride)
{
    const struct td_cublas *b = g->library;
    int32_t count = (int32_t)batch;
    return td_cublas_ok(g->td, b->MatrixLayoutCreate(to, type_of(dtype), (uint64_t)rows, (uint64_t)columns, lead), "describing a matrix") &&
           td_cublas_ok(g->td, b->MatrixLayoutSetAttribute(*to, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count), "describing a matrix") &&
           td_cublas_ok(g->td, b->MatrixLayoutSetAttribute(*to, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride),
                        "describing a matrix");
}

/* What gelu was of, written or read by the epilogue. */
static bool has_matrix(cublasLtEpilogue_t epilogue)
{
    return epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS || epilogue == CUBLASLT_EPILOGUE_DGELU;
}

static bool describe(product *g, td_matmul *m, const td_onednn_product *p, cublasLtEpilogue_t epilogue)
{
    cublasOperation_t first = p->b_column == 1 ? CUBLAS_OP_N : CUBLAS_OP_T, second = p->a_column == 1 ? CUBLAS_OP_N : CUBLAS_OP_T;
    if ((p->b_column != 1 && p->b_row != 1) || (p->a_column != 1 && p->a_row != 1) || p->batch > INT32_MAX) {
        td_fail(g->td, TD_ERROR_UNSUPPORTED, "a matrix product on a GPU needs operands with a dense dimension");
        return false;
    }
    if (!td_cublas_ok(g->td, g->library->MatmulDescCreate(&m->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product") ||
        !set(g, m, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first) || !set(g, m, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second))
        return false;
    cudaDataType_t type = type_of(p->dbias ? p->out_dtype : p->bias_dtype);
    bool has_vector = epilogue == CUBLASLT_EPILOGUE_BGRADB || (epilogue & CUBLASLT_EPILOGUE_BIAS);
    if (!set(g, m, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue) ||
        (has_vector && !set(g, m, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type)) ||
        (has_matrix(epilogue) && !set(g, m, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &p->n, sizeof p->n)))
        return false;
    bool b_rows = first == CUBLAS_OP_N, a_rows = second == CUBLAS_OP_N;
    return lay_out(g, &m->layout[TD_FIRST], p->dtype, b_rows ? p->n : p->k, b_rows ? p->k : p->n, b_rows ? p->b_row : p->b_column, p->batch,
                   p->b_batch) &&
           lay_out(g, &m->layout[TD_SECOND], p->dtype, a_rows ? p->k : p->m, a_rows ? p->m : p->k, a_rows ? p->a_row : p->a_column, p->batch,
                   p->a_batch) &&
           lay_out(g, &m->layout[TD_RESULT], p->out_dtype, p->n, p->m, p->n, p->batch, p->m * p->n);
}

/* The choice for operands at multiples of `alignment` bytes; `beside` says what the product does not. NULL without an error: the library
 * has no way. */
static td_choice *choose(product *g, const td_matmul *m, const td_onednn_product *p, const char *beside, uint32_t alignment,
                         int64_t workspace_bytes)
{
    char text[320];
    snprintf(text, sizeof text, "%s x %s%s%s to %s%s%s, %lld of (%lld, %lld) x (%lld, %lld), strides %lld %lld %lld and %lld %lld %lld",
             td_dtype_name(p->dtype), td_dtype_name(p->dtype), g->adds_bias ? " + " : "", g->adds_bias ? td_dtype_name(p->bias_dtype) : "",
             td_dtype_name(p->out_dtype), p->adds ? " added to" : "", beside, (long long)p->batch, (long long)p->m, (long long)p->k,
             (long long)p->k, (long long)p->n,
             (long long)p->a_batch, (long long)p->a_row, (long long)p->a_column, (long long)p->b_batch, (long long)p->b_row, (long long)p->b_column);
    return td_choice_for(g->td, m, text, g->timed, alignment, workspace_bytes);
}

static void undescribe(product *g, td_matmul *m)
{
    for (int i = 0; i < TD_LAYOUTS; i++)
        if (m->layout[i]) g->library->MatrixLayoutDestroy(m->layout[i]);
    if (m->desc) g->library->MatmulDescDestroy(m->desc);
    *m = (td_matmul){ 0 };
}

void td_cublas_release(void *prepared)
{
    product *g = prepared;
    undescribe(g, &g->matmul);
    undescribe(g, &g->whole);
    td_prepared_free(g);
}

static bool choose_plain(product *g, const td_onednn_product *p, int64_t cap)
{
    g->adds_bias = p->has_bias;
    cublasLtEpilogue_t epilogue = g->adds_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    if (!describe(g, &g->matmul, p, epilogue)) return false;
    g->choice[0] = choose(g, &g->matmul, p, "", ALIGNED, cap);
    if (g->choice[0] || g->td->error != TD_OK || !g->adds_bias) return g->choice[0] != NULL;
    undescribe(g, &g->matmul); /* not every pair of dtypes is offered */
    g->adds_bias = false;
    if (!describe(g, &g->matmul, p, CUBLASLT_EPILOGUE_DEFAULT)) return false;
    g->choice[0] = choose(g, &g->matmul, p, "", ALIGNED, cap);
    return g->choice[0] != NULL;
}

/* What the library calls what is asked for beside the product, and the key of its choice. DEFAULT: nothing. Gelu's tanh form is the only
 * one it has. DGELU could give the bias's gradient as well, but in the result's 16 bits. Its relu makes 0 of what is no number, which a run
 * must not lose: relu is a call behind the product. */
static cublasLtEpilogue_t epilogue_of(const td_onednn_product *p, const char **name)
{
    *name = p->dbias ? " and dbias" : p->dgelu ? " and dgelu" : p->keeps ? " and gelu, kept" : " and gelu";
    if (p->dbias) return CUBLASLT_EPILOGUE_BGRADB;
    if (p->dgelu) return CUBLASLT_EPILOGUE_DGELU;
    if (!p->gelu) return CUBLASLT_EPILOGUE_DEFAULT;
    return p->keeps ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_BIAS;
}

static bool point(product *g, const void *vector, const void *matrix)
{
    return (!vector || set(g, &g->whole, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &vector, sizeof vector)) &&
           (!matrix || set(g, &g->whole, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &matrix, sizeof matrix));
}

enum { MATRIX_LEAD = 8 };                     /* the library's: elements that the rows of what gelu was of are a multiple of */

/* In 16 bits only: f32's products have few ways, and what they save is little beside them. False after an error. */
static bool choose_whole(product *g, const td_onednn_product *p, int64_t cap)
{
    const void *somewhere = (const void *)(uintptr_t)256; /* the library reads off pointers how operands will lie */
    const char *name;
    cublasLtEpilogue_t epilogue = epilogue_of(p, &name);
    if (epilogue == CUBLASLT_EPILOGUE_DEFAULT || p->dtype == TD_F32 || !g->timed) return true;
    if (has_matrix(epilogue) && p->n % MATRIX_LEAD) return true;
    if (p->dbias && p->out_dtype != TD_F32) return true; /* the library writes the sums in the result's dtype */
    if (!describe(g, &g->whole, p, epilogue) || !point(g, p->dgelu ? NULL : somewhere, has_matrix(epilogue) ? somewhere : NULL))
        return false;
    g->whole.has_rival = true;
    g->whole_choice = choose(g, &g->whole, p, name, ALIGNED, cap);
    return g->td->error == TD_OK;
}

/* The workspace serves one after the other. */
static bool prepare_sum(td_context *td, const td_kernel *k, td_preparation *out)
{
    td_product_sum sum;
    td_preparation of_sum = { 0 };
    td_product_sum_of(k, &sum);
    bool prepared = td_op_sum.cuda.prepare(td, &sum.kernel, &of_sum);
    if (of_sum.workspace_bytes > out->workspace_bytes) out->workspace_bytes = of_sum.workspace_bytes;
    return prepared;
}

static bool prepare_product(td_context *td, const td_kernel *k, const td_onednn_product *p, td_preparation *out)
{
    int64_t cap = td->options.workspace_bytes < WORKSPACE_BYTES ? td->options.workspace_bytes : WORKSPACE_BYTES;
    if (td->options.gpu) { /* the most that any algorithm is given */
        out->workspace_bytes = cap;
        return true;
    }
    struct td_cublas *library = library_of(td);
    product *g = library ? td_prepared_new(td, sizeof *g) : NULL;
    if (!g) return false;
    g->td = td;
    g->library = library;
    g->timed = td_choice_is_timed(td, k);
    out->prepared = g;
    if (!choose_plain(g, p, cap)) {
        td_fail(td, TD_ERROR_UNSUPPORTED, "%s: cuBLASLt has no way for (%lld, %lld) x (%lld, %lld) of %s", k->op->name, (long long)p->m,
                (long long)p->k, (long long)p->k, (long long)p->n, td_dtype_name(p->dtype));
        return false;
    }
    if (!choose_whole(g, p, cap)) return false;
    int64_t whole_bytes = g->whole_choice ? td_choice_workspace(g->whole_choice) : 0;
    g->workspace_bytes = td_choice_workspace(g->choice[0]);
    if (whole_bytes > g->workspace_bytes) g->workspace_bytes = whole_bytes;
    out->workspace_bytes = td_is_reached(td) ? cap : g->workspace_bytes; /* ranks time for themselves, and values are to lie alike */
    return true;
}

bool td_cublas_prepare(td_context *td, const td_kernel *k, td_onednn_product p, td_preparation *out)
{
    p = td_product_typed(k, p);
    return (td_product_is_empty(&p) || prepare_product(td, k, &p, out)) && (!p.dbias || prepare_sum(td, k, out));
}

/* The product by itself: what gelu is of has a place of its own where it is kept. */
static const td_arg *plain_result(const td_kernel *k, const td_onednn_product *p) { return &k->out[p->keeps]; }

static const td_arg *added(const td_kernel *k, const td_onednn_product *p) { return p->adds ? &k->in[k->inputs - 1] : NULL; }

static bool is_aligned(const td_kernel *k, const td_onednn_product *p)
{
    for (int i = 0; i < 2; i++)
        if ((uintptr_t)k->in[i].data % ALIGNED) return false;
    return (uintptr_t)plain_result(k, p)->data % ALIGNED == 0 && (!p->adds || (uintptr_t)added(k, p)->data % ALIGNED == 0);
}

static bool is_aligned_throughout(const td_kernel *k)
{
    for (int i = 0; i < k->inputs; i++)
        if ((uintptr_t)k->in[i].data % ALIGNED) return false;
    for (int i = 0; i < k->outputs; i++)
        if ((uintptr_t)k->out[i].data % ALIGNED) return false;
    return true;
}

/* What is made beside the product, by kernels of its own. */
static void run_beside(const td_kernel *k, const td_onednn_product *p)
{
    td_product_sum sum;
    if (p->gelu) td_product_gelu(k, plain_result(k, p));
    if (p->dgelu) td_product_dgelu(k, &k->in[k->inputs - 1]);
    if (!p->dbias) return;
    td_product_sum_of(k, &sum);
    td_op_sum.cuda.run(&sum.kernel);
}

/* The product over nothing: what is added to it, or zeros; then the bias. */
static void run_empty(const td_kernel *k, const td_onednn_product *p)
{
    const td_arg *from = added(k, p), *to = plain_result(k, p);
    int64_t bytes = td_arg_bytes(to);
    if (!bytes) return;
    bool done = from ? td_copy_bytes_cuda(k->run->td, to->data, from->data, bytes, td_stream(k))
                     : td_clear_bytes_cuda(k->run->td, to->data, bytes, td_stream(k));
    if (done && p->has_bias) td_product_add_bias(k, to, p->batch * p->m, p->n);
}

static td_matmul_call call_of(const td_kernel *k, const td_onednn_product *p, const td_matmul *m, const td_arg *result)
{
    const product *g = k->prepared;
    return (td_matmul_call){ .matmul = m, .first = k->in[1].data, .second = k->in[0].data, .result = result->data,
                             .added = p->adds ? added(k, p)->data : NULL, .workspace = k->workspace,
                             .workspace_bytes = (size_t)g->workspace_bytes, .stream = td_stream(k) };
}

/* The product, then the rest. */
typedef struct parts {
    const td_kernel *k;
    const td_onednn_product *p;
    td_matmul_call call;
    td_choice *choice;
} parts;

static bool run_parts(void *user)
{
    const parts *s = user;
    td_context *td = s->k->run->td;
    const product *g = s->k->prepared;
    if (!td_cublas_ok(td, td_cublas_matmul(td, &s->call, &s->choice->found[0].algo), s->k->op->name)) return false;
    if (s->p->has_bias && !g->adds_bias) td_product_add_bias(s->k, plain_result(s->k, s->p), s->p->batch * s->p->m, s->p->n);
    run_beside(s->k, s->p);
    return td->error == TD_OK;
}

/* False: run_parts is to be called, or there was an error. */
static bool run_whole(const parts *s)
{
    product *g = s->k->prepared;
    td_context *td = s->k->run->td;
    if (!g->whole_choice || !is_aligned_throughout(s->k)) return false;
    td_rival rival = { .run = run_parts, .user = (void *)s };
    td_matmul_call call = call_of(s->k, s->p, &g->whole, &s->k->out[0]);
    const void *vector = s->p->dbias ? s->k->out[1].data : s->p->gelu ? s->k->in[2].data : NULL;
    const void *matrix = s->p->keeps ? s->k->out[1].data : s->p->dgelu ? s->k->in[2].data : NULL;
    if (!point(g, vector, matrix) || !td_choice_settle(td, g->whole_choice, &call, &rival)) return false;
    return g->whole_choice->count && td_cublas_ok(td, td_cublas_matmul(td, &call, &g->whole_choice->found[0].algo), s->k->op->name);
}

void td_cublas_run(const td_kernel *k, const td_onednn_product *untyped)
{
    td_onednn_product p = td_product_typed(k, *untyped);
    td_context *td = k->run->td;
    product *g = k->prepared;
    if (td_product_is_empty(&p)) {
        run_empty(k, &p);
        run_beside(k, &p);
        return;
    }
    int which = is_aligned(k, &p) ? 0 : 1;
    if (!g->choice[which])
        g->choice[which] = choose(g, &g->matmul, &p, "", (uint32_t)td_dtype_size(p.dtype), g->workspace_bytes);
    if (!g->choice[which]) {
        td_fail(td, TD_ERROR_UNSUPPORTED, "%s: cuBLASLt has no way for operands at odd places", k->op->name);
        return;
    }
    if (g->adds_bias && !set(g, &g->matmul, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &k->in[2].data, sizeof k->in[2].data)) return;
    parts s = { .k = k, .p = &p, .call = call_of(k, &p, &g->matmul, plain_result(k, &p)), .choice = g->choice[which] };
    if (td_choice_settle(td, s.choice, &s.call, NULL) && !run_whole(&s) && td->error == TD_OK) run_parts(&s);
}
