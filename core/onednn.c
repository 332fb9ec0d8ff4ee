/* The engine and the matrix products of oneDNN's C API; see onednn.h. */
#include "core/onednn.h"

#include "core/internal.h"
#include "core/ops/op.h"

#include <dnnl.h>
#include <omp.h>
#include <stdlib.h>

struct td_onednn {
    td_context *td;
    dnnl_engine_t engine;
    dnnl_stream_t stream;
};

static const char *status_text(dnnl_status_t status)
{
    switch (status) {
    case dnnl_out_of_memory:     return "out of memory";
    case dnnl_invalid_arguments: return "invalid arguments";
    case dnnl_unimplemented:     return "not supported on this processor";
    case dnnl_runtime_error:     return "runtime error";
    case dnnl_not_required:      return "not required";
    default:                     return "unknown status";
    }
}

static bool checked(td_context *td, dnnl_status_t status, const char *what)
{
    if (status == dnnl_success)
        return true;
    td_code code = status == dnnl_out_of_memory   ? TD_ERROR_MEMORY
                   : status == dnnl_unimplemented ? TD_ERROR_UNSUPPORTED
                                                  : TD_ERROR_DEVICE;
    td_fail(td, code, "oneDNN: %s: %s", what, status_text(status));
    return false;
}

/* oneDNN 2's products on AMX end the process for some shapes, among them bf16 ones with an odd inner size (SIGILL; oneDNN issue 1661, gone in 3):
 * it is to do without, where the user has not said what it is to do with. Not heeded where somebody has used the library before. */
static void leave_out_amx(void)
{
    if (!getenv("DNNL_MAX_CPU_ISA") && !getenv("ONEDNN_MAX_CPU_ISA")) dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx512_core_bf16);
}

struct td_onednn *td_onednn_open(td_context *td)
{
    struct td_onednn *dnn = td_alloc(td, sizeof *dnn, "host");
    if (!dnn)
        return NULL;
    *dnn = (struct td_onednn){ .td = td };
    leave_out_amx();
    if (checked(td, dnnl_engine_create(&dnn->engine, dnnl_cpu, 0), "making its engine") &&
        checked(td, dnnl_stream_create(&dnn->stream, dnn->engine, dnnl_stream_default_flags), "making its stream"))
        return dnn;
    td_onednn_close(dnn);
    return NULL;
}

void td_onednn_close(struct td_onednn *dnn)
{
    if (!dnn)
        return;
    if (dnn->stream)
        dnnl_stream_destroy(dnn->stream);
    if (dnn->engine)
        dnnl_engine_destroy(dnn->engine);
    td_free(dnn->td, dnn, sizeof *dnn, "host");
}

/* ---- Matrix products ------------------------------------------------------------------------------------- */

enum { A, B, BIAS, C, SCRATCH, MEMORIES };
static const int argument_number[MEMORIES] = { DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_BIAS, DNNL_ARG_DST,
                                               DNNL_ARG_SCRATCHPAD };

typedef struct product {
    td_context *td;
    dnnl_stream_t stream;
    int threads;
    dnnl_primitive_t primitive;
    dnnl_memory_t memory[MEMORIES];      /* without data of their own; NULL: not an operand */
} product;

static dnnl_data_type_t data_type(td_dtype dtype)
{
    switch (dtype) {
    case TD_F32:  return dnnl_f32;
    case TD_BF16: return dnnl_bf16;
    default:      return dnnl_data_type_undef;
    }
}

static bool describe(td_context *td, const td_onednn_product *p, dnnl_memory_desc_t *descs)
{
    dnnl_data_type_t type = data_type(p->dtype), out = data_type(p->out_dtype);
    int64_t b_batch = p->b_batch ? p->batch : 1;
    int64_t sizes[4][3] = {
        { p->batch, p->m, p->k }, { b_batch, p->k, p->n }, { 1, 1, p->n }, { p->batch, p->m, p->n }
    };
    int64_t strides[4][3] = { { p->a_batch, p->a_row, p->a_column },
                              { p->b_batch ? p->b_batch : p->k * p->n, p->b_row, p->b_column },
                              { p->n, p->n, 1 },
                              { p->m * p->n, p->n, 1 } };
    dnnl_data_type_t types[4] = { type, type, p->has_bias ? data_type(p->bias_dtype) : type, out };
    int first = p->batch == 1 ? 1 : 0; /* two dimensions are enough without a batch */
    for (int i = 0; i < 4; i++)
        if (!checked(
                td,
                dnnl_memory_desc_init_by_strides(&descs[i], 3 - first, sizes[i] + first, types[i], strides[i] + first),
                "describing a matrix"))
            return false;
    return true;
}

/* The primitive's description, with its scratch given by the caller. */
static dnnl_primitive_desc_t describe_product(td_context *td, struct td_onednn *dnn, const td_onednn_product *p,
                                              const dnnl_memory_desc_t *descs)
{
    dnnl_matmul_desc_t desc;
    dnnl_primitive_attr_t attr = NULL;
    dnnl_primitive_desc_t made = NULL;
    const dnnl_memory_desc_t *bias = p->has_bias ? &descs[BIAS] : NULL;
    if (checked(td, dnnl_matmul_desc_init(&desc, &descs[A], &descs[B], bias, &descs[C]),
                "describing a matrix product") &&
        checked(td, dnnl_primitive_attr_create(&attr), "making attributes") &&
        checked(td, dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user), "setting attributes")) {
        dnnl_status_t status = dnnl_primitive_desc_create(&made, &desc, attr, dnn->engine, NULL);
        if (status == dnnl_unimplemented && p->dtype == TD_BF16)
            td_fail(td, TD_ERROR_UNSUPPORTED, "bf16 matrix products need a processor with AVX-512: train in f32 here");
        else if (!checked(td, status, "choosing a matrix product"))
            made = NULL;
    }
    if (attr)
        dnnl_primitive_attr_destroy(attr);
    return made;
}

static bool make_memories(td_context *td, struct td_onednn *dnn, const td_onednn_product *p,
                          const dnnl_memory_desc_t *descs, dnnl_primitive_desc_t made, product *to,
                          int64_t *workspace_bytes)
{
    for (int i = 0; i < SCRATCH; i++) {
        if (i == BIAS && !p->has_bias)
            continue;
        if (!checked(td, dnnl_memory_create(&to->memory[i], &descs[i], dnn->engine, DNNL_MEMORY_NONE),
                     "making an operand"))
            return false;
    }
    const dnnl_memory_desc_t *scratch = dnnl_primitive_desc_query_md(made, dnnl_query_scratchpad_md, 0);
    *workspace_bytes = scratch ? (int64_t)dnnl_memory_desc_get_size(scratch) : 0;
    return *workspace_bytes == 0 ||
           checked(td, dnnl_memory_create(&to->memory[SCRATCH], scratch, dnn->engine, DNNL_MEMORY_NONE),
                   "making its scratch");
}

/* How many threads the calling thread's parallel regions have. */
typedef struct team {
    int threads, dynamic;
} team;

/* oneDNN counts on as many threads as OpenMP would give the calling thread, both when it makes a primitive and when it runs it. */
static team use_team(team t)
{
    team before = { omp_get_max_threads(), omp_get_dynamic() };
    if (before.threads != t.threads) omp_set_num_threads(t.threads);
    if (before.dynamic != t.dynamic) omp_set_dynamic(t.dynamic);
    return before;
}

bool td_onednn_prepare(td_context *td, const td_onednn_product *p, td_preparation *out)
{
    struct td_onednn *dnn = td_onednn_of(td);
    product *to = dnn ? td_prepared_new(td, sizeof *to) : NULL;
    if (!to)
        return false;
    *to = (product){ .td = td, .stream = dnn->stream, .threads = td_threads(td) };
    dnnl_memory_desc_t descs[4];
    team before = use_team((team){ .threads = to->threads });
    dnnl_primitive_desc_t made = describe(td, p, descs) ? describe_product(td, dnn, p, descs) : NULL;
    bool done = made && checked(td, dnnl_primitive_create(&to->primitive, made), "making a matrix product") &&
                make_memories(td, dnn, p, descs, made, to, &out->workspace_bytes);
    use_team(before);
    if (made)
        dnnl_primitive_desc_destroy(made);
    if (done)
        out->prepared = to;
    else
        td_onednn_release(to);
    return done;
}

void td_onednn_run(const td_kernel *k, void *a, void *b, void *bias, void *c)
{
    const product *p = k->prepared;
    if (p->threads > 1 && omp_get_active_level() >= omp_get_max_active_levels()) {
        td_fail(p->td, TD_ERROR_USAGE, "%s: with %d threads it cannot be run inside a parallel region of OpenMP: open the context with .threads = 1",
                k->op->name, p->threads);
        return;
    }
    void *data[MEMORIES] = { a, b, bias, c, k->workspace };
    dnnl_exec_arg_t arguments[MEMORIES];
    int count = 0;
    for (int i = 0; i < MEMORIES; i++) {
        if (!p->memory[i])
            continue;
        if (!checked(p->td, dnnl_memory_set_data_handle(p->memory[i], data[i]), "setting an operand"))
            return;
        arguments[count++] = (dnnl_exec_arg_t){ argument_number[i], p->memory[i] };
    }
    team before = use_team((team){ .threads = p->threads });
    checked(p->td, dnnl_primitive_execute(p->primitive, p->stream, count, arguments), "running a matrix product");
    use_team(before);
}

void td_onednn_release(void *prepared)
{
    product *p = prepared;
    for (int i = 0; p && i < MEMORIES; i++)
        if (p->memory[i])
            dnnl_memory_destroy(p->memory[i]);
    if (p && p->primitive)
        dnnl_primitive_destroy(p->primitive);
    td_prepared_free(p);
}
