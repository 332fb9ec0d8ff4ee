/* Transport `nccl`: collectives of NCCL, on the GPU's queue.
 *
 * Calls are counted as those of other transports, by the same formulas. A graph repeats collectives without calling them: what a run of
 * a plan called when it was recorded is kept with the plan, and added for each run that calls nothing. Ranks are shown to run the same
 * plans by agree.c; a call is not compared with others'.
 *
 * A rank that is alone on an axis copies, if that.
 */
#include "parallel/transport_nccl.h"

#include <string.h>

#include "parallel/nccl.h"

const int par_nccl_dtype[TD_DTYPES] = {
    [TD_F32] = NCCL_F32, [TD_F64] = NCCL_F64, [TD_BF16] = NCCL_BF16, [TD_F16] = NCCL_F16,
    [TD_I32] = NCCL_I32, [TD_I64] = NCCL_I64, [TD_U8] = NCCL_U8,
};

/* A collective that is being called. */
typedef struct call {
    par_nccl *n;
    par_group g;
    const par_nccl_group *with; /* NULL: nobody */
    nccl_comm comm;
    void *queue;
    int dtype;
} call;

static bool begin(void *self, int axes, par_meeting meeting, call *c)
{
    par_nccl *n = self;
    if (!par_group_begin(n->me, axes, meeting, &c->g)) return false;
    c->n = n;
    c->with = n->of_slot[c->g.slot];
    c->comm = c->with ? c->with->comm : NULL;
    c->queue = td_queue(n->me->td);
    c->dtype = par_nccl_dtype[meeting.dtype];
    return true;
}

static bool finish(const call *c)
{
    const par_meeting *m = &c->g.meeting;
    c->n->run.calls++;
    c->n->run.bytes += par_bytes_sent((par_collective)m->kind, c->g.size, m->count, (td_dtype)m->dtype);
    return par_group_finish(&c->g);
}

/* The call has given `result`. */
static bool end(const call *c, int result)
{
    char where[PAR_WHERE_BYTES];
    return par_nccl_end(c->n, c->comm, result, par_where(par_group_area(&c->g, c->g.at), where)) && finish(c);
}

/* Of a rank that is alone, and of calls without elements, which need nobody. */
static bool copy(const call *c, const void *in, void *out)
{
    int64_t bytes = c->g.meeting.count * td_dtype_size((td_dtype)c->g.meeting.dtype);
    if (bytes && in != out && !c->n->options.device->copy(c->queue, out, in, bytes)) {
        td_fail(c->n->me->td, TD_ERROR_DEVICE, "%s: the GPU did not take a copy", par_collective_name((par_collective)c->g.meeting.kind));
        return false;
    }
    return finish(c);
}

static bool needs_nobody(const call *c) { return !c->with || c->g.meeting.count == 0; }

/* ---- Collectives ----------------------------------------------------------------------------------------- */

static bool nccl_all_reduce(void *self, int axis, void *data, int64_t count, td_dtype dtype)
{
    call c;
    if (!begin(self, axis, (par_meeting){ .kind = PAR_ALL_REDUCE, .count = count, .dtype = (int32_t)dtype }, &c)) return false;
    if (needs_nobody(&c)) return finish(&c);
    return par_nccl_begin(c.n) && end(&c, c.n->lib.all_reduce(data, data, (size_t)count, c.dtype, NCCL_SUM, c.comm, c.queue));
}

static bool nccl_reduce_scatter(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    call c;
    if (!begin(self, axis, (par_meeting){ .kind = PAR_REDUCE_SCATTER, .count = count, .dtype = (int32_t)dtype }, &c)) return false;
    if (needs_nobody(&c)) return copy(&c, in, out);
    return par_nccl_begin(c.n) && end(&c, c.n->lib.reduce_scatter(in, out, (size_t)count, c.dtype, NCCL_SUM, c.comm, c.queue));
}

static bool nccl_all_gather(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    call c;
    if (!begin(self, axis, (par_meeting){ .kind = PAR_ALL_GATHER, .count = count, .dtype = (int32_t)dtype }, &c)) return false;
    if (needs_nobody(&c)) return copy(&c, in, out);
    return par_nccl_begin(c.n) && end(&c, c.n->lib.all_gather(in, out, (size_t)count, c.dtype, c.comm, c.queue));
}

/* What is put in a group begins when it ends. */
int par_nccl_exchange(const nccl_library *lib, nccl_comm comm, int ranks, const void *in, void *out, int64_t count, td_dtype dtype, void *queue)
{
    int64_t part = count * td_dtype_size(dtype);
    size_t elements = (size_t)count;
    int of = par_nccl_dtype[dtype];
    if (lib->all_to_all) return lib->all_to_all(in, out, elements, of, comm, queue);
    int result = lib->group_start();
    for (int i = 0; i < ranks && result == NCCL_SUCCESS; i++) {
        result = lib->send((const char *)in + i * part, elements, of, i, comm, queue);
        if (result == NCCL_SUCCESS) result = lib->receive((char *)out + i * part, elements, of, i, comm, queue);
    }
    int ended = lib->group_end();
    return result == NCCL_SUCCESS ? ended : result;
}

static bool nccl_all_to_all(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    call c;
    if (!begin(self, axis, (par_meeting){ .kind = PAR_ALL_TO_ALL, .count = count, .dtype = (int32_t)dtype }, &c)) return false;
    if (needs_nobody(&c)) return copy(&c, in, out);
    return par_nccl_begin(c.n) && end(&c, par_nccl_exchange(&c.n->lib, c.comm, c.g.size, in, out, count, dtype, c.queue));
}

static bool nccl_broadcast(void *self, int axis, int root, void *data, int64_t bytes)
{
    call c;
    if (!begin(self, axis, (par_meeting){ .kind = PAR_BROADCAST, .count = bytes, .dtype = TD_U8, .root = root }, &c)) return false;
    if (root < 0 || root >= c.g.size) {
        par_break(c.n->me->world, c.n->me->rank, "rank %d: broadcast from %d on an axis of %d ranks", c.n->me->rank, root, c.g.size);
        return par_stopped(c.n->me);
    }
    if (needs_nobody(&c)) return finish(&c);
    return par_nccl_begin(c.n) && end(&c, c.n->lib.broadcast(data, data, (size_t)bytes, c.dtype, root, c.comm, c.queue));
}

/* ---- Beside them ----------------------------------------------------------------------------------------- */

static bool nccl_barrier(void *self)
{
    const par_nccl *n = self;
    return n->inner.barrier(n->inner.self);
}

static int64_t nccl_sent(void *self, int64_t *calls)
{
    const par_nccl *n = self;
    return par_sent(n->me->world, n->me->rank, calls);
}

static void nccl_ran(void *self, td_sent *of_plan)
{
    par_nccl *n = self;
    par_group_ran(n->me, &n->run, of_plan);
    if (n->watched) par_nccl_mark_run(n);
}

static bool nccl_is_sound(void *self)
{
    const par_nccl *n = self;
    return !par_broken(n->me->world) || par_stopped(n->me);
}

void par_nccl_fill(par_nccl *n, td_transport *out)
{
    *out = (td_transport){
        .self = n,
        .name = "nccl",
        .on_device = true,
        .all_reduce = nccl_all_reduce,
        .reduce_scatter = nccl_reduce_scatter,
        .all_gather = nccl_all_gather,
        .all_to_all = nccl_all_to_all,
        .broadcast = nccl_broadcast,
        .barrier = nccl_barrier,
        .sent = nccl_sent,
        .reach = n->options.windows && n->lib.comm_window_register ? &par_nccl_reach : NULL,
        .ran = nccl_ran,
        .is_sound = nccl_is_sound,
    };
}
