/* Transport `none`: planning for any number of ranks, of which there is one. Nothing can be sent, so every call fails
 * and says so; what a call would send is the formula that the transports which do send count by.
 */
#include "parallel/world.h"

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t par_bytes_sent(par_collective kind, int ranks, int64_t count, td_dtype dtype)
{
    int64_t bytes = count * td_dtype_size(dtype), others = ranks - 1;
    switch (kind) {
    case PAR_ALL_REDUCE: return divide_up(2 * others * bytes, ranks);
    case PAR_BROADCAST: return divide_up(others * bytes, ranks);
    case PAR_REDUCE_SCATTER:
    case PAR_ALL_GATHER:
    case PAR_ALL_TO_ALL: return others * bytes;
    case PAR_BARRIER:
    case PAR_NO_COLLECTIVE: return 0;
    }
    return 0;
}

const char *par_collective_name(par_collective kind)
{
    switch (kind) {
    case PAR_ALL_REDUCE: return "all_reduce";
    case PAR_REDUCE_SCATTER: return "reduce_scatter";
    case PAR_ALL_GATHER: return "all_gather";
    case PAR_ALL_TO_ALL: return "all_to_all";
    case PAR_BROADCAST: return "broadcast";
    case PAR_BARRIER: return "barrier";
    case PAR_NO_COLLECTIVE: return "no collective";
    }
    return "";
}

static bool refuse(void *self, par_collective kind)
{
    par_local *me = self;
    td_fail(me->td, TD_ERROR_PARALLEL, "%s: this world of %d ranks is for planning only; it cannot run a step",
            par_collective_name(kind), me->world->ranks);
    return false;
}

static bool none_all_reduce(void *self, int axis, void *data, int64_t count, td_dtype dtype)
{
    (void)axis, (void)data, (void)count, (void)dtype;
    return refuse(self, PAR_ALL_REDUCE);
}

static bool none_reduce_scatter(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    (void)axis, (void)in, (void)out, (void)count, (void)dtype;
    return refuse(self, PAR_REDUCE_SCATTER);
}

static bool none_all_gather(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    (void)axis, (void)in, (void)out, (void)count, (void)dtype;
    return refuse(self, PAR_ALL_GATHER);
}

static bool none_all_to_all(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    (void)axis, (void)in, (void)out, (void)count, (void)dtype;
    return refuse(self, PAR_ALL_TO_ALL);
}

static bool none_broadcast(void *self, int axis, int root, void *data, int64_t bytes)
{
    (void)axis, (void)root, (void)data, (void)bytes;
    return refuse(self, PAR_BROADCAST);
}

static bool none_barrier(void *self) { return refuse(self, PAR_BARRIER); }

static int64_t none_sent(void *self, int64_t *calls)
{
    (void)self;
    if (calls) *calls = 0;
    return 0;
}

bool par_transport_none(par_world *world, int rank, td_context *td, td_transport *out)
{
    par_local *me = par_local_at(world, rank);
    if (!me) {
        td_fail(td, TD_ERROR_PARALLEL, "rank %d is not a rank of this process in a world of %d", rank, world->ranks);
        return false;
    }
    me->td = td;
    *out = (td_transport){
        .self = me,
        .name = "none",
        .all_reduce = none_all_reduce,
        .reduce_scatter = none_reduce_scatter,
        .all_gather = none_all_gather,
        .all_to_all = none_all_to_all,
        .broadcast = none_broadcast,
        .barrier = none_barrier,
        .sent = none_sent,
    };
    return true;
}
