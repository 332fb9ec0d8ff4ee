/* Which algorithm a matrix product is made with: see device_cublas.h. */
#include "core/device_cublas.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/device_cache.h"

static const int64_t ENOUGH_NS = 5000000000; /* of timing, in a context */
static const float FASTER = 0.97f;           /* a later proposal is faster if it takes less than this of the time: clocks are not exact */

/* ---- What the library proposes */

bool td_choice_is_timed(const td_context *td, const td_kernel *k)
{
    bool copies = false; /* which stay equal if all ranks choose alike */
    for (int a = 0; a < td->mesh.axes; a++) {
        int kind = k->out[0].place.kind[a];
        copies |= td->mesh.size[a] > 1 && kind != TD_SHARDED && kind != TD_PARTIAL;
    }
    return !td->options.deterministic && !copies;
}

static bool state_preferences(td_context *td, cublasLtMatmulPreference_t to, uint32_t alignment, int64_t workspace_bytes)
{
    static const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
    };
    const struct td_cublas *b = *td_cublas_of(td);
    uint64_t bytes = (uint64_t)workspace_bytes;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE; /* or none at all */
    if (!td_cublas_ok(td, b->MatmulPreferenceSetAttribute(to, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes),
                      "stating preferences"))
        return false;
    if (td->options.deterministic &&
        !td_cublas_ok(td, b->MatmulPreferenceSetAttribute(to, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes),
                      "stating preferences"))
        return false;
    for (int i = 0; i < 4; i++)
        if (!td_cublas_ok(td, b->MatmulPreferenceSetAttribute(to, alignments[i], &alignment, sizeof alignment), "stating preferences"))
            return false;
    return true;
}

/* False without an error: the library has no way. */
static bool propose(td_context *td, const td_matmul *m, bool timed, uint32_t alignment, int64_t workspace_bytes, td_choice *to)
{
    const struct td_cublas *b = *td_cublas_of(td);
    cublasLtMatmulPreference_t preference;
    int most = timed ? TD_CUBLAS_CANDIDATES : 1, count = 0;
    if (!td_cublas_ok(td, b->MatmulPreferenceCreate(&preference), "stating preferences")) return false;
    if (state_preferences(td, preference, alignment, workspace_bytes) &&
        b->MatmulAlgoGetHeuristic(b->handle, m->desc, m->layout[TD_FIRST], m->layout[TD_SECOND], m->layout[TD_RESULT], m->layout[TD_RESULT],
                                  preference, most, to->found, &count) != CUBLAS_STATUS_SUCCESS)
        count = 0;
    b->MatmulPreferenceDestroy(preference);
    for (int i = 0; i < count; i++)
        if (to->found[i].state == CUBLAS_STATUS_SUCCESS && to->found[i].workspaceSize <= (size_t)workspace_bytes)
            to->found[to->count++] = to->found[i];
    to->settled = to->count == 1 && !m->has_rival;
    return to->count > 0;
}

/* ---- What an earlier run chose */

static td_cache_key kept_as(const td_choice *c) { return (td_cache_key){ .kind = "product", .data = c->key, .bytes = strlen(c->key) }; }

/* What is kept in an algorithm's place where the rival was faster. */
static const char NONE_IS_FASTER = 0;

/* The library looks whether an algorithm that was kept is one for this product. */
static bool find_kept(td_context *td, const td_matmul *m, int64_t workspace_bytes, td_choice *to)
{
    const struct td_cublas *b = *td_cublas_of(td);
    td_cache_key key = kept_as(to);
    size_t bytes = 0;
    void *algo = td_cache_get(td, &key, &bytes);
    cublasLtMatmulHeuristicResult_t *found = &to->found[0];
    bool fits = algo && bytes == sizeof found->algo;
    if (fits) {
        memcpy(&found->algo, algo, bytes);
        fits = b->MatmulAlgoCheck(b->handle, m->desc, m->layout[TD_FIRST], m->layout[TD_SECOND], m->layout[TD_RESULT], m->layout[TD_RESULT],
                                  &found->algo, found) == CUBLAS_STATUS_SUCCESS &&
               found->workspaceSize <= (size_t)workspace_bytes;
    }
    bool none = algo && bytes == sizeof NONE_IS_FASTER;
    td_free(td, algo, bytes, "host");
    to->count = fits;
    to->settled = fits || none;
    return to->settled;
}

/* ---- Choices */

static char *key_text(td_context *td, const char *product, bool timed, uint32_t alignment, int64_t workspace_bytes)
{
    const struct td_cublas *b = *td_cublas_of(td);
    char text[512];
    snprintf(text, sizeof text, "cublasLt %zu, %s, %d multiprocessors, at %u, workspace %lld%s: %s", b->GetVersion(), td->gpu.name,
             td->gpu.multiprocessors, alignment, (long long)workspace_bytes, timed ? "" : ", first proposal", product);
    return td_copy_text(td, text, "host");
}

static void free_choice(td_context *td, td_choice *c)
{
    if (c->key) td_free(td, c->key, strlen(c->key) + 1, "host");
    td_free(td, c, sizeof *c, "host");
}

td_choice *td_choice_for(td_context *td, const td_matmul *m, const char *product, bool timed, uint32_t alignment, int64_t workspace_bytes)
{
    struct td_cublas *b = *td_cublas_of(td);
    td_choice *made = td_alloc(td, sizeof *made, "host");
    if (!made) return NULL;
    *made = (td_choice){ .key = key_text(td, product, timed, alignment, workspace_bytes) };
    if (made->key) {
        made->hash = td_hash_text(made->key);
        td_choice *known = b->choices;
        while (known && (known->hash != made->hash || strcmp(known->key, made->key))) known = known->next;
        if (!known && ((timed && find_kept(td, m, workspace_bytes, made)) || propose(td, m, timed, alignment, workspace_bytes, made))) {
            made->next = b->choices;
            return b->choices = made;
        }
        free_choice(td, made);
        return known;
    }
    free_choice(td, made);
    return NULL;
}

void td_choices_free(td_context *td)
{
    struct td_cublas *b = *td_cublas_of(td);
    for (td_choice *c = b->choices, *next; c; c = next) {
        next = c->next;
        free_choice(td, c);
    }
    b->choices = NULL;
}

int64_t td_choice_workspace(const td_choice *c)
{
    size_t most = 0;
    for (int i = 0; i < c->count; i++)
        if (c->found[i].workspaceSize > most) most = c->found[i].workspaceSize;
    return (int64_t)most;
}

/* ---- Timing */

static bool ensure_events(td_context *td, struct td_cublas *b)
{
    for (int r = 0; r < TD_CUBLAS_RUNS; r++)
        if ((!b->begin[r] && !td_cuda_ok(td, cudaEventCreate(&b->begin[r]), "making an event")) ||
            (!b->end[r] && !td_cuda_ok(td, cudaEventCreate(&b->end[r]), "making an event")))
            return false;
    return true;
}

/* Writes over what the cache holds; where there is no memory for it the cache stays warm. */
static bool flush(td_context *td, struct td_cublas *b, cudaStream_t stream)
{
    int64_t bytes = td->gpu.l2_bytes;
    if (!b->flush && cudaMalloc(&b->flush, (size_t)bytes) != cudaSuccess) {
        cudaGetLastError();
        b->flush = NULL;
        return true;
    }
    return td_cuda_ok(td, cudaMemsetAsync(b->flush, 0, (size_t)bytes, stream), "clearing the cache");
}

/* An algorithm, or the rival. */
static bool run_one(td_context *td, const td_matmul_call *call, const cublasLtMatmulAlgo_t *algo, const td_rival *rival)
{
    return algo ? td_cublas_matmul(td, call, algo) == CUBLAS_STATUS_SUCCESS : rival->run(rival->user);
}

/* The shortest of a few runs behind one that loads what it needs; infinity where it fails, or after an error. */
static float time_one(td_context *td, const td_matmul_call *call, const cublasLtMatmulAlgo_t *algo, const td_rival *rival)
{
    struct td_cublas *b = *td_cublas_of(td);
    float best = INFINITY, ms;
    if (!run_one(td, call, algo, rival)) return INFINITY;
    for (int r = 0; r < TD_CUBLAS_RUNS; r++)
        if (!flush(td, b, call->stream) || !td_cuda_ok(td, cudaEventRecord(b->begin[r], call->stream), "recording an event") ||
            !run_one(td, call, algo, rival) || !td_cuda_ok(td, cudaEventRecord(b->end[r], call->stream), "recording an event"))
            return INFINITY;
    if (!td_cuda_ok(td, cudaStreamSynchronize(call->stream), "timing a product")) return INFINITY;
    for (int r = 0; r < TD_CUBLAS_RUNS; r++)
        if (td_cuda_ok(td, cudaEventElapsedTime(&ms, b->begin[r], b->end[r]), "reading an event") && ms < best) best = ms;
    return best;
}

static void tell_enough(td_context *td, struct td_cublas *b)
{
    if (b->told) return;
    b->told = true;
    td_message(td, TD_LOG_INFO, "the fastest algorithms of matrix products are not looked for any more: %lld s of it are enough",
               (long long)(ENOUGH_NS / 1000000000));
}

bool td_choice_settle(td_context *td, td_choice *c, const td_matmul_call *call, const td_rival *rival)
{
    struct td_cublas *b = *td_cublas_of(td);
    if (c->settled) return true;
    if (!ensure_events(td, b)) return false;
    int64_t begin_ns = td_profile_now();
    float best = rival ? time_one(td, call, NULL, rival) : INFINITY;
    int chosen = rival ? -1 : 0, timed = 0;
    for (; timed < c->count && td->error == TD_OK && b->timing_ns + td_profile_now() - begin_ns < ENOUGH_NS; timed++) {
        float ms = time_one(td, call, &c->found[timed].algo, NULL);
        if (!(ms < best * FASTER)) continue;
        best = ms;
        chosen = timed;
    }
    b->timing_ns += td_profile_now() - begin_ns;
    if (td->error != TD_OK) return false;
    bool all = timed == c->count;
    if (!all) tell_enough(td, b);
    c->settled = true;
    c->count = chosen >= 0;
    if (c->count) c->found[0] = c->found[chosen];
    td_cache_key key = kept_as(c);
    if (all && c->count && best < INFINITY) td_cache_keep(td, &key, &c->found[0].algo, sizeof c->found[0].algo);
    if (all && !c->count) td_cache_keep(td, &key, &NONE_IS_FASTER, sizeof NONE_IS_FASTER);
    return true;
}
