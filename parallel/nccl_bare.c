/* NCCL called bare: collectives one after another on buffers of their own, timed by the host. Transport `nccl` is measured beside it.
 */
#include <math.h>
#include <sched.h>

#include "parallel/mpi.h"
#include "parallel/nccl.h"

enum { WARM_CALLS = 5 };

typedef struct bare {
    par_nccl *n;
    nccl_comm comm;
    int ranks;
    par_collective kind;
    int64_t count;
    td_dtype dtype;
    void *in, *out, *mark;
} bare;

static int call(const bare *b)
{
    const nccl_library *lib = &b->n->lib;
    void *queue = td_queue(b->n->me->td);
    size_t count = (size_t)b->count;
    int dtype = par_nccl_dtype[b->dtype];
    switch (b->kind) {
    case PAR_ALL_REDUCE: return lib->all_reduce(b->out, b->out, count, dtype, NCCL_SUM, b->comm, queue);
    case PAR_REDUCE_SCATTER: return lib->reduce_scatter(b->in, b->out, count, dtype, NCCL_SUM, b->comm, queue);
    case PAR_ALL_GATHER: return lib->all_gather(b->in, b->out, count, dtype, b->comm, queue);
    default: return par_nccl_exchange(lib, b->comm, b->ranks, b->in, b->out, b->count, b->dtype, queue);
    }
}

/* Until the queue has come to here; the host looks all the time, so that it hears of it at once. */
static bool await_queue(const bare *b)
{
    const par_device *device = b->n->options.device;
    par_local *me = b->n->me;
    par_patience patience = { .before = par_seconds() };
    if (!device->put_mark(b->mark, td_queue(me->td))) {
        td_fail(me->td, TD_ERROR_DEVICE, "rank %d: its GPU has failed", me->rank);
        return false;
    }
    while (!device->has_passed(b->mark) && !par_broken(me->world) && patience.waited < me->world->segment->timeout_s) {
        sched_yield();
        par_patient(me->world->segment, &patience);
    }
    if (patience.waited >= me->world->segment->timeout_s)
        par_break(me->world, me->rank, "rank %d: %s, called bare, is not done within %g s", me->rank, par_collective_name(b->kind),
                  me->world->segment->timeout_s);
    return !par_broken(me->world) || par_stopped(me);
}

static bool call_all(const bare *b, int calls)
{
    int result = NCCL_SUCCESS;
    if (!par_nccl_begin(b->n)) return false;
    for (int i = 0; i < calls && result == NCCL_SUCCESS; i++) result = par_nccl_settle(b->n, b->comm, call(b));
    return par_nccl_end(b->n, b->comm, result, "calling NCCL bare") && await_queue(b);
}

static bool measure(const bare *b, int calls, double *seconds)
{
    const td_transport *inner = &b->n->inner;
    if (!call_all(b, WARM_CALLS) || !inner->barrier(inner->self)) return false;
    double begin = par_seconds();
    bool called = call_all(b, calls);
    *seconds = (par_seconds() - begin) / calls;
    return called;
}

bool par_measure_bare(td_context *td, par_world *world, int rank, par_collective kind, int64_t count, td_dtype dtype, int calls, double *seconds)
{
    par_local *me = par_local_at(world, rank);
    par_nccl *n = me ? me->nccl : NULL;
    par_group g;
    *seconds = (double)NAN;
    if (!n) return true;
    if (!par_group_find(me, td_axes(0, me->mesh.axes - 1), &g)) return false;
    const par_nccl_group *with = n->of_slot[g.slot];
    if (!with) return true;
    const par_device *device = n->options.device;
    int64_t bytes = td_dtype_size(dtype) * count * (kind == PAR_ALL_REDUCE ? 1 : g.size); /* of the larger of its two buffers */
    bare b = { .n = n, .comm = with->comm, .ranks = g.size, .kind = kind, .count = count, .dtype = dtype, .in = device->get(bytes),
               .out = device->get(bytes), .mark = device->make_mark() };
    if (!b.in || !b.out || !b.mark)
        td_fail(td, TD_ERROR_MEMORY, "out of memory: twice %lld bytes for a collective could not be had", (long long)bytes);
    bool measured = td_error(td) == TD_OK && measure(&b, calls, seconds);
    if (b.in) device->put(b.in);
    if (b.out) device->put(b.out);
    if (b.mark) device->free_mark(b.mark);
    return measured;
}
