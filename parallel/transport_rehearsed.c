/* Transport `rehearsed`: collectives of a rank that is there alone, in a world of many (par_world_rehearsed).
 *
 * They are counted as those of other transports, write all that a collective writes, and take the time that the rehearsal says: on the CPU in
 * line, on a GPU on their queue and in graphs, beside computation, which has so many multiprocessors less meanwhile.
 */
#include "parallel/rehearsed.h"

#include <string.h>
#include <time.h>

#include "parallel/device.h"
#include "parallel/group.h"

enum { MULTIPROCESSORS = 24 }; /* as many blocks as NCCL has between H100s that a switch connects */

typedef struct rehearsed {
    par_local *me;
    const par_device *device;   /* NULL: the CPU */
    int multiprocessors;
    td_sent run;                /* what has been called since the last run was handed over */
} rehearsed;

/* ---- On the CPU */

static void copy_parts(const par_alone *c)
{
    size_t bytes = (size_t)(c->count * td_dtype_size(c->dtype));
    bool all = c->kind == PAR_ALL_TO_ALL;
    for (int r = 0; r < c->ranks && bytes; r++) {
        const char *from = (const char *)c->in + (all ? (size_t)r * bytes : 0);
        char *to = (char *)c->out + (size_t)r * bytes;
        if (to != from) memcpy(to, from, bytes);
    }
}

static void sum_parts(const par_alone *c, const par_group *g)
{
    const void *from[PAR_MAX_RANKS];
    size_t own = c->kind == PAR_REDUCE_SCATTER ? (size_t)(c->at * c->count * td_dtype_size(c->dtype)) : 0;
    for (int r = 0; r < c->ranks; r++) from[r] = (const char *)c->in + own;
    par_sum(g, from, c->out, c->count, c->dtype);
}

static void wait_until(double end)
{
    for (double left; (left = end - par_seconds()) > 0;) {
        struct timespec rest = { (time_t)left, (long)(1e9 * (left - (double)(time_t)left)) };
        nanosleep(&rest, NULL);
    }
}

static bool on_cpu(const par_alone *c, const par_group *g)
{
    double end = par_seconds() + c->seconds;
    bool sums = c->kind == PAR_ALL_REDUCE || c->kind == PAR_REDUCE_SCATTER;
    if (sums && !par_group_sums(g)) return false;
    if (sums) sum_parts(c, g);
    else copy_parts(c);
    wait_until(end);
    return true;
}

/* ---- Collectives */

static double seconds_of(const rehearsed *t, const par_group *g, int64_t sent)
{
    const par_rehearsal *how = &t->me->world->rehearsal;
    par_call call = { .task.sent = sent, .kind = PAR_GATHERS, .ranks = g->size, .stride = g->stride };
    if (g->meeting.kind == PAR_ALL_REDUCE) call.kind = PAR_REDUCES;
    if (g->meeting.kind == PAR_REDUCE_SCATTER) call.kind = PAR_SCATTERS;
    return g->size > 1 ? how->seconds(how->user, &call) : 0;
}

static bool rehearse(rehearsed *t, int axes, par_meeting meeting, const void *in, void *out)
{
    par_group g;
    if (!par_group_begin(t->me, axes, meeting, &g)) return false;
    td_sent sent = { .bytes = par_bytes_sent((par_collective)meeting.kind, g.size, meeting.count, (td_dtype)meeting.dtype), .calls = 1 };
    const par_alone call = {
        .kind = (par_collective)meeting.kind, .dtype = (td_dtype)meeting.dtype, .ranks = g.size, .at = g.at, .count = meeting.count,
        .in = in, .out = out, .seconds = seconds_of(t, &g, sent.bytes), .multiprocessors = t->multiprocessors,
    };
    t->run.calls += sent.calls;
    t->run.bytes += sent.bytes;
    if (meeting.kind == PAR_BROADCAST || !meeting.count) return par_group_finish(&g);
    if (!t->device) return on_cpu(&call, &g) && par_group_finish(&g);
    if (t->device->alone(td_queue(t->me->td), &call)) return par_group_finish(&g);
    td_fail(t->me->td, TD_ERROR_DEVICE, "%s of %s: the GPU did not take it", par_collective_name(call.kind), td_dtype_name(call.dtype));
    return false;
}

static bool rehearsed_all_reduce(void *self, int axis, void *data, int64_t count, td_dtype dtype)
{
    return rehearse(self, axis, (par_meeting){ .kind = PAR_ALL_REDUCE, .count = count, .dtype = (int32_t)dtype }, data, data);
}

static bool rehearsed_reduce_scatter(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    return rehearse(self, axis, (par_meeting){ .kind = PAR_REDUCE_SCATTER, .count = count, .dtype = (int32_t)dtype }, in, out);
}

static bool rehearsed_all_gather(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    return rehearse(self, axis, (par_meeting){ .kind = PAR_ALL_GATHER, .count = count, .dtype = (int32_t)dtype }, in, out);
}

static bool rehearsed_all_to_all(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    return rehearse(self, axis, (par_meeting){ .kind = PAR_ALL_TO_ALL, .count = count, .dtype = (int32_t)dtype }, in, out);
}

static bool rehearsed_broadcast(void *self, int axis, int root, void *data, int64_t bytes)
{
    return rehearse(self, axis, (par_meeting){ .kind = PAR_BROADCAST, .count = bytes, .dtype = TD_U8, .root = root }, data, data);
}

static bool rehearsed_barrier(void *self)
{
    (void)self;
    return true;
}

static int64_t rehearsed_sent(void *self, int64_t *calls)
{
    const rehearsed *t = self;
    return par_sent(t->me->world, t->me->rank, calls);
}

static void rehearsed_ran(void *self, td_sent *of_plan)
{
    rehearsed *t = self;
    par_group_ran(t->me, &t->run, of_plan);
}

bool par_transport_rehearsed(par_world *world, int rank, td_context *td, const par_device *device, td_transport *out)
{
    rehearsed *t = td_own(td, sizeof *t);
    int multiprocessors = world->rehearsal.multiprocessors ? world->rehearsal.multiprocessors : MULTIPROCESSORS;
    const td_gpu *gpu = td_gpu_of(td);
    if (!t) return false;
    if (gpu && multiprocessors > gpu->multiprocessors) multiprocessors = gpu->multiprocessors;
    *t = (rehearsed){ .me = par_local_at(world, rank), .device = device, .multiprocessors = multiprocessors };
    *out = (td_transport){
        .self = t,
        .name = "rehearsed",
        .on_device = device != NULL,
        .all_reduce = rehearsed_all_reduce,
        .reduce_scatter = rehearsed_reduce_scatter,
        .all_gather = rehearsed_all_gather,
        .all_to_all = rehearsed_all_to_all,
        .broadcast = rehearsed_broadcast,
        .barrier = rehearsed_barrier,
        .sent = rehearsed_sent,
        .ran = rehearsed_ran,
    };
    return true;
}
