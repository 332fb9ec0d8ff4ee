/* Transport `staged` (staged.h).
 *
 * Calls of a rank use one piece of page-locked memory, since they follow one another on their queue: what is given lies at its beginning,
 * what comes out behind that. It is made in the first run of a plan that needs more than there is, as large as the plan's largest call;
 * graphs of other plans keep what they were captured with. What a function of the host needs to know of its call is kept with the world:
 * calls that are alike are one record, so it outlives every graph.
 *
 * Calls are counted where they are handed over. What a run of a plan called when it was recorded is kept with the plan, and added for each
 * run that calls nothing, since a graph repeats it.
 */
#include "parallel/staged.h"

#include <stdlib.h>

#include "parallel/group.h"

enum { ALIGN = 256, RUNS = 8 }; /* bytes; runs that the host may be ahead, and more */

typedef struct room {
    struct room *next;
    char *memory;
    int64_t bytes;
} room;

typedef struct record {
    struct record *next;
    struct par_staged *s;
    par_collective kind;
    int axis, root;
    int64_t count;
    td_dtype dtype;
    char *in, *out;               /* page-locked; the same where the call is in place */
} record;

typedef struct begun_run {
    struct par_staged *s;
    par_moment at;
    _Atomic bool to_come;         /* the queue has not come to it */
} begun_run;

typedef struct par_staged {
    par_local *me;                /* of the rank's own thread */
    par_local there;              /* of the driver's, whose context is NULL */
    const par_device *device;
    td_transport inner;           /* its self is `there` */
    int64_t expected;             /* bytes of the largest call */
    td_sent run;                  /* what has been called since the last run was handed over */
    room *rooms;                  /* the largest first */
    record *records;
    begun_run begun[RUNS];        /* in turn */
    int64_t runs;
} par_staged;

/* ---- On the driver's thread ------------------------------------------------------------------------------ */

static void run_record(void *user)
{
    const record *r = user;
    const td_transport *t = &r->s->inner;
    switch (r->kind) {
    case PAR_ALL_REDUCE: t->all_reduce(t->self, r->axis, r->in, r->count, r->dtype); break;
    case PAR_REDUCE_SCATTER: t->reduce_scatter(t->self, r->axis, r->in, r->out, r->count, r->dtype); break;
    case PAR_ALL_GATHER: t->all_gather(t->self, r->axis, r->in, r->out, r->count, r->dtype); break;
    case PAR_ALL_TO_ALL: t->all_to_all(t->self, r->axis, r->in, r->out, r->count, r->dtype); break;
    case PAR_BROADCAST: t->broadcast(t->self, r->axis, r->root, r->in, r->count); break;
    case PAR_BARRIER:
    case PAR_NO_COLLECTIVE: break;
    }
}

static void begin_run(void *user)
{
    begun_run *r = user;
    par_begin_run(&r->s->there, r->at);
    atomic_store(&r->to_come, false);
}

/* ---- On the rank's --------------------------------------------------------------------------------------- */

static int64_t aligned(int64_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }

static bool staged_expect(void *self, int64_t in_bytes, int64_t out_bytes)
{
    par_staged *s = self;
    int64_t bytes = aligned(in_bytes) + aligned(out_bytes);
    if (bytes > s->expected) s->expected = bytes;
    return true;
}

static bool no_memory(par_staged *s, int64_t bytes, const char *what)
{
    td_fail(s->me->td, TD_ERROR_MEMORY, "out of memory: %lld bytes for %s could not be had", (long long)bytes, what);
    return false;
}

static char *ensure_room(par_staged *s, int64_t in_bytes, int64_t out_bytes)
{
    staged_expect(s, in_bytes, out_bytes + 1); /* something, also of a call without elements */
    if (s->rooms && s->rooms->bytes >= aligned(in_bytes) + aligned(out_bytes)) return s->rooms->memory;
    room *r = malloc(sizeof *r);
    if (r) *r = (room){ .next = s->rooms, .bytes = s->expected, .memory = s->device->get_host(s->expected) };
    if (r && r->memory) {
        s->rooms = r;
        return r->memory;
    }
    free(r);
    no_memory(s, s->expected, "collectives, page-locked,");
    return NULL;
}

static record *find_record(par_staged *s, const record *like)
{
    record *r = s->records;
    while (r && (r->kind != like->kind || r->axis != like->axis || r->root != like->root || r->count != like->count ||
                 r->dtype != like->dtype || r->in != like->in || r->out != like->out))
        r = r->next;
    if (r) return r;
    r = malloc(sizeof *r);
    if (!r) {
        no_memory(s, (int64_t)sizeof *r, "a collective");
        return NULL;
    }
    *r = *like;
    r->s = s;
    r->next = s->records;
    return s->records = r;
}

static bool taken(par_staged *s, par_collective kind, bool ok)
{
    if (!ok) td_fail(s->me->td, TD_ERROR_DEVICE, "%s: the GPU did not take a copy or a call of the host", par_collective_name(kind));
    return ok;
}

static void add_sent(par_staged *s, td_sent sent)
{
    par_area *area = &s->me->world->segment->area[s->me->rank];
    atomic_fetch_add(&area->calls, sent.calls);
    atomic_fetch_add(&area->sent, sent.bytes);
}

/* Waits until the queue is dry. */
static bool is_dry(par_staged *s)
{
    bool dry = s->device->wait(td_queue(s->me->td));
    if (!dry) td_fail(s->me->td, TD_ERROR_DEVICE, "rank %d: its GPU has failed", s->me->rank);
    return dry;
}

/* Puts the call of so many ranks on the queue. `in` and `out` are the device's, the same of a call in place. */
static bool stage(par_staged *s, int64_t ranks, record call, const void *in, int64_t in_bytes, void *out, int64_t out_bytes)
{
    const par_device *d = s->device;
    void *queue = td_queue(s->me->td);
    call.in = call.out = ensure_room(s, in_bytes, in == out ? 0 : out_bytes);
    if (!call.in) return false;
    if (in != out) call.out += aligned(in_bytes);
    record *r = find_record(s, &call);
    if (!r) return false;
    td_sent sent = { .bytes = par_bytes_sent(call.kind, ranks, call.count, call.dtype), .calls = 1 };
    add_sent(s, sent);
    s->run.bytes += sent.bytes;
    s->run.calls++;
    return taken(s, call.kind, (!in_bytes || d->to_host(queue, r->in, in, in_bytes)) && d->call(queue, run_record, r) &&
                               (!out_bytes || d->to_device(queue, out, r->out, out_bytes)));
}

/* How many ranks meet; 0 after the context has failed. */
static int begin(const par_staged *s, int axis)
{
    par_group g;
    if (par_broken(s->me->world)) return par_stopped(s->me);
    return par_group_find(s->me, axis, &g) ? g.size : 0;
}

static bool staged_all_reduce(void *self, int axis, void *data, int64_t count, td_dtype dtype)
{
    int64_t bytes = count * td_dtype_size(dtype), ranks = begin(self, axis);
    const record call = { .kind = PAR_ALL_REDUCE, .axis = axis, .count = count, .dtype = dtype };
    return ranks && stage(self, ranks, call, data, bytes, data, bytes);
}

static bool staged_reduce_scatter(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    int64_t part = count * td_dtype_size(dtype), ranks = begin(self, axis);
    const record call = { .kind = PAR_REDUCE_SCATTER, .axis = axis, .count = count, .dtype = dtype };
    return ranks && stage(self, ranks, call, in, ranks * part, out, part);
}

static bool staged_all_gather(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    int64_t part = count * td_dtype_size(dtype), ranks = begin(self, axis);
    const record call = { .kind = PAR_ALL_GATHER, .axis = axis, .count = count, .dtype = dtype };
    return ranks && stage(self, ranks, call, in, part, out, ranks * part);
}

static bool staged_all_to_all(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    int64_t ranks = begin(self, axis), whole = ranks * count * td_dtype_size(dtype);
    const record call = { .kind = PAR_ALL_TO_ALL, .axis = axis, .count = count, .dtype = dtype };
    return ranks && stage(self, ranks, call, in, whole, out, whole);
}

static bool staged_broadcast(void *self, int axis, int root, void *data, int64_t bytes)
{
    int64_t ranks = begin(self, axis);
    const record call = { .kind = PAR_BROADCAST, .axis = axis, .root = root, .count = bytes, .dtype = TD_U8 };
    return ranks && stage(self, ranks, call, data, bytes, data, bytes);
}

/* Of the ranks' threads, when the queue has run dry: one thread of a rank waits for others at a time. */
static bool staged_barrier(void *self)
{
    par_staged *s = self;
    add_sent(s, (td_sent){ .calls = 1 });
    return is_dry(s) && (s->inner.barrier(s->inner.self) || par_stopped(s->me));
}

static int64_t staged_sent(void *self, int64_t *calls)
{
    const par_staged *s = self;
    return par_sent(s->me->world, s->me->rank, calls);
}

static void staged_ran(void *self, td_sent *of_plan)
{
    par_staged *s = self;
    par_group_ran(s->me, &s->run, of_plan);
}

static bool staged_is_sound(void *self)
{
    const par_staged *s = self;
    return !par_broken(s->me->world) || par_stopped(s->me);
}

/* ---- Runs ------------------------------------------------------------------------------------------------ */

bool par_staged_before(par_local *me, par_moment at, bool is_new_plan)
{
    par_staged *s = me->staged;
    if (!is_new_plan) return true;
    if (!is_dry(s)) return false;
    par_begin_run(me, at);
    return true;
}

bool par_staged_begin(par_local *me, par_moment at)
{
    par_staged *s = me->staged;
    begun_run *r = &s->begun[s->runs++ % RUNS];
    if (atomic_load(&r->to_come) && !is_dry(s)) return false; /* the host is never so far ahead */
    r->s = s;
    r->at = at;
    atomic_store(&r->to_come, true);
    return taken(s, PAR_NO_COLLECTIVE, s->device->call(td_queue(me->td), begin_run, r));
}

/* ---- Making ---------------------------------------------------------------------------------------------- */

bool par_transport_staged(par_world *world, int rank, td_context *td, const td_transport *inner, const par_device *device, td_transport *out)
{
    par_local *me = par_local_at(world, rank);
    if (!me->staged) me->staged = calloc(1, sizeof *me->staged);
    par_staged *s = me->staged;
    if (!s) {
        td_fail(td, TD_ERROR_MEMORY, "rank %d: out of memory for its transport", rank);
        return false;
    }
    me->behind = true;
    s->me = me;
    s->there = (par_local){ .world = world, .rank = rank, .mesh = me->mesh, .uncounted = true };
    s->device = device;
    s->inner = *inner;
    s->inner.self = &s->there;
    s->expected = 0;
    s->run = (td_sent){ 0 };
    *out = (td_transport){
        .self = s,
        .name = "staged",
        .on_device = true,
        .expect = staged_expect,
        .all_reduce = staged_all_reduce,
        .reduce_scatter = staged_reduce_scatter,
        .all_gather = staged_all_gather,
        .all_to_all = staged_all_to_all,
        .broadcast = staged_broadcast,
        .barrier = staged_barrier,
        .sent = staged_sent,
        .ran = staged_ran,
        .is_sound = staged_is_sound,
    };
    return true;
}

static void close_staged(par_staged *s)
{
    while (s->rooms) {
        room *next = s->rooms->next;
        s->device->put_host(s->rooms->memory);
        free(s->rooms);
        s->rooms = next;
    }
    while (s->records) {
        record *next = s->records->next;
        free(s->records);
        s->records = next;
    }
    free(s);
}

void par_staged_close(par_world *world)
{
    for (int i = 0; world->local && i < world->here; i++) {
        if (world->local[i].staged) close_staged(world->local[i].staged);
        world->local[i].staged = NULL;
    }
}
