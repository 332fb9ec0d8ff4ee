/* A plan's calls as collectives and computation, and what collectives between ranks of this machine take. */
#include "parallel/strategy.h"

#include <string.h>

const char *par_kind_name(par_kind kind)
{
    switch (kind) {
    case PAR_REDUCES: return par_collective_name(PAR_ALL_REDUCE);
    case PAR_SCATTERS: return par_collective_name(PAR_REDUCE_SCATTER);
    case PAR_GATHERS: return par_collective_name(PAR_ALL_GATHER);
    case PAR_COPIES: return "copy";
    case PAR_COMPUTES: case PAR_KINDS: break;
    }
    return "";
}

static par_kind kind_of(const td_op *op)
{
    if (op == &par_op_all_reduce) return PAR_REDUCES;
    if (op == &par_op_reduce_scatter) return PAR_SCATTERS;
    if (op->flags & TD_OP_COPY) return PAR_COPIES;
    return op == &par_op_all_gather ? PAR_GATHERS : PAR_COMPUTES;
}

static par_call call_of(const td_mesh *mesh, const td_planned_call *planned)
{
    par_call call = { .task = planned->task, .queue = planned->queue, .kind = kind_of(planned->op), .ranks = 1, .stride = 1 };
    memcpy(call.waits, planned->waits, sizeof call.waits);
    if (call.kind == PAR_COMPUTES || call.kind == PAR_COPIES) return call;
    const par_collective_attr *attr = planned->attr;
    for (int a = attr->axis; a <= attr->last; a++) call.ranks *= mesh->size[a];
    for (int a = attr->last + 1; a < mesh->axes; a++) call.stride *= mesh->size[a];
    return call;
}

par_call *par_calls(td_context *td, int64_t *count)
{
    int64_t n = td_planned_count(td);
    *count = 0;
    par_call *calls = n ? td_own(td, (size_t)n * sizeof *calls) : NULL;
    td_planned_call *planned = calls ? td_alloc(td, (size_t)n * sizeof *planned, "program") : NULL;
    if (planned && td_planned_calls(td, planned)) {
        for (int64_t i = 0; i < n; i++) calls[i] = call_of(td_context_mesh(td), &planned[i]);
        *count = n;
    }
    td_free(td, planned, (size_t)n * sizeof *planned, "program");
    if (*count) return calls;
    td_disown(td, calls);
    return NULL;
}

/* ---- Measuring */

enum { SMALL_CALLS = 200, LARGE_CALLS = 5, LARGE_BYTES = 8 << 20 };

typedef struct measuring {
    par_link link;                            /* of rank 0 */
    char error[512];
} measuring;

static void quiet(void *user, td_level level, const char *text) { (void)user, (void)level, (void)text; }

/* Seconds of the fastest of `calls` all-reduces of `count` floats, past the first one; 0 after an error. */
static double fastest(const td_transport *t, float *data, int64_t count, int calls)
{
    double best = 0;
    for (int i = 0; i <= calls; i++) {
        double begin = par_seconds();
        if (!t->all_reduce(t->self, 0, data, count, TD_F32)) return 0;
        double took = par_seconds() - begin;
        if (i == 1 || (i > 1 && took < best)) best = took;
    }
    return best;
}

static bool measure_with(td_context *td, par_world *world, int rank, par_link *out)
{
    td_transport t;
    float *data = td_own(td, LARGE_BYTES);
    int64_t count = LARGE_BYTES / (int64_t)sizeof *data;
    if (!data || !par_transport_local(world, rank, td, NULL, &t)) return false;
    out->latency_s = fastest(&t, data, 1, SMALL_CALLS);
    double large = fastest(&t, data, count, LARGE_CALLS), sent = (double)par_bytes_sent(PAR_ALL_REDUCE, world->ranks, count, TD_F32);
    if (large > out->latency_s) out->bytes_per_s = sent / (large - out->latency_s);
    return td_error(td) == TD_OK;
}

static int measure_rank(par_world *world, int rank, void *user)
{
    measuring *m = user;
    par_link link = { 0 };
    td_context *td = td_open(&(td_options){ .threads = 1, .log = quiet });
    bool good = measure_with(td, world, rank, &link);
    if (rank == 0) m->link = link;
    if (rank == 0 && !good) strncpy(m->error, td_error_text(td), sizeof m->error - 1);
    td_close(td);
    return good ? 0 : 1;
}

bool par_measure(td_context *td, int ranks, par_link *out)
{
    measuring m = { 0 };
    int threads = ranks < 2 ? 2 : ranks > 4 ? 4 : ranks;
    int result = par_run_threads(threads, &(par_world_options){ .timeout_s = 30 }, measure_rank, &m);
    if (result) td_fail(td, TD_ERROR_DEVICE, "measuring collectives between %d ranks: %s", threads, *m.error ? m.error : "no threads");
    *out = m.link;
    return !result;
}
