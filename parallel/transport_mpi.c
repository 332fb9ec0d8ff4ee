/* Transport `mpi`: ranks that share no memory, on one host or several.
 *
 * Collectives are made of sends and receives that nobody waits for in MPI, tested until they are done, the world is stopped
 * or the deadline has passed: MPI's own collectives sum in an order of their own and cannot be left. An all_reduce sends each
 * member its share, which that one sums in the order of ranks, and then gathers the shares: as many bytes as a ring sends,
 * and the same bits as transport `local`. What is received to be summed lies in the staging buffers of the others, which
 * nobody else writes here.
 *
 * A message's tag is a hash of the call it belongs to, so different calls never take each other's data: they wait, tell what
 * they wait in, and the difference is named.
 */
#include <string.h>

#include "core/hash.h"
#include "parallel/group.h"
#include "parallel/mpi.h"

enum {
    SMALL_BYTES = 2048,          /* up to here each rank sums everything: one exchange instead of two */
    MOST_BYTES = 64 << 20,       /* of one message */
    TAG_BITS = 20,
};

/* The sends and receives of one exchange. */
typedef struct exchange {
    const par_group *g;
    int tag, count;
    mpi_request request[2 * PAR_MAX_RANKS];
    int16_t member[2 * PAR_MAX_RANKS]; /* who it is received from; -1: sent */
    bool ok;
} exchange;

static int tag_of(const par_group *g)
{
    const par_meeting *m = &g->meeting;
    const int64_t words[] = { m->kind, m->count, m->dtype, m->root, m->call, m->run, g->slot };
    return (int)(td_hash_bytes(0, words, sizeof words) >> (64 - TAG_BITS));
}

static int rank_of(const par_group *g, int member) { return g->first + member * g->stride; }

/* Says that this rank has come to the call. */
static void arrive(const par_group *g)
{
    par_area *area = par_group_area(g, g->at);
    area->meeting[g->slot][par_group_meetings(g) & 1] = g->meeting;
    par_advance(&area->arrived[g->slot]);
}

static void send_to(exchange *x, int member, const void *at, int64_t bytes)
{
    if (!x->ok) return;
    x->member[x->count] = -1;
    x->ok = par_mpi_send(x->g->me->world, rank_of(x->g, member), x->tag, at, bytes, &x->request[x->count]);
    x->count += x->ok;
}

static void receive_from(exchange *x, int member, void *at, int64_t bytes)
{
    if (!x->ok) return;
    x->member[x->count] = (int16_t)member;
    x->ok = par_mpi_receive(x->g->me->world, rank_of(x->g, member), x->tag, at, bytes, &x->request[x->count]);
    x->count += x->ok;
}

/* Whether all is done; else *lacks is the member of what is not: one that sends, if any. */
static bool is_done(exchange *x, int *lacks)
{
    int kept = 0;
    *lacks = -1;
    for (int i = 0; i < x->count; i++) {
        if (par_mpi_done(x->g->me->world, &x->request[i])) continue;
        x->request[kept] = x->request[i];
        x->member[kept] = x->member[i];
        if (*lacks < 0) *lacks = x->member[i];
        kept++;
    }
    x->count = kept;
    return kept == 0;
}

/* Those that have told where they wait are in the same call, or the world is stopped. */
static bool same_calls(const par_group *g)
{
    uint32_t now = par_group_meetings(g);
    for (int i = 0; i < g->size; i++)
        if (i != g->at && atomic_load(&par_group_area(g, i)->arrived[g->slot].value) == now && !par_group_same(g, i)) return false;
    return true;
}

/* Where all has been received and not all sent any other one may be late. */
static int awaited(const exchange *x, int lacks) { return rank_of(x->g, lacks < 0 ? (x->g->at + 1) % x->g->size : lacks); }

static bool wait_on(exchange *x, int lacks)
{
    par_local *me = x->g->me;
    par_world *world = me->world;
    par_patience patience = { .before = par_seconds() };
    do {
        int other = awaited(x, lacks);
        const par_area *area = &world->segment->area[other];
        bool ended = atomic_load(&area->ended);
        par_note_wait(me, other, &area->arrived[x->g->slot], par_group_meetings(x->g));
        par_mpi_wait(world, patience.waited + patience.excused);
        if (is_done(x, &lacks)) return true;
        if (par_broken(world)) return par_stopped(me);
        if (!same_calls(x->g)) return false;
        if (ended && lacks >= 0 && rank_of(x->g, lacks) == other) return par_ended_before(me, other);
        par_patient(world->segment, &patience);
    } while (patience.waited < world->segment->timeout_s);
    return par_late(me, awaited(x, lacks));
}

/* Waits until all of the exchange is done. */
static bool complete(exchange *x)
{
    int lacks;
    par_local *me = x->g->me;
    if (!x->ok) return par_stopped(me);
    if (is_done(x, &lacks)) return true;
    bool done = wait_on(x, lacks);
    par_note_waited(me);
    return done;
}

static void begin_exchange(exchange *x, const par_group *g)
{
    x->g = g;
    x->tag = tag_of(g);
    x->count = 0;
    x->ok = true;
}

/* ---- Collectives ----------------------------------------------------------------------------------------- */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Where what a member sends to be summed is received. */
static char *received(const par_group *g, int member) { return par_staging(g->me->world, rank_of(g, member), g->slot, 0); }

static int64_t room_for(const par_group *g, int64_t size) { return g->me->world->segment->staging_bytes / size; }

/* Sums `own` and what has been received, in the order of ranks. */
static void sum(const par_group *g, const void *own, void *out, int64_t count, td_dtype dtype)
{
    const void *from[PAR_MAX_RANKS];
    for (int i = 0; i < g->size; i++) from[i] = i == g->at ? own : received(g, i);
    par_sum(g, from, out, count, dtype);
}

/* Every member sends each other one its part, `bytes` of it at `at` + member * stride, and receives theirs. */
static bool exchange_parts(const par_group *g, const char *at, int64_t stride, int64_t bytes)
{
    exchange x;
    begin_exchange(&x, g);
    for (int i = 0; i < g->size; i++)
        if (i != g->at) receive_from(&x, i, received(g, i), bytes);
    for (int i = 0; i < g->size; i++)
        if (i != g->at) send_to(&x, i, at + i * stride, bytes);
    return complete(&x);
}

/* The share of member i of `count` elements. */
static int64_t share_of(const par_group *g, int i, int64_t count, int64_t *begin)
{
    int64_t share = (count + g->size - 1) / g->size;
    *begin = least(i * share, count);
    return least(*begin + share, count) - *begin;
}

static bool scatter_shares(const par_group *g, const char *data, int64_t count, int64_t size)
{
    exchange x;
    int64_t begin, own = share_of(g, g->at, count, &begin);
    begin_exchange(&x, g);
    for (int i = 0; i < g->size; i++)
        if (i != g->at) receive_from(&x, i, received(g, i), own * size);
    for (int i = 0; i < g->size; i++) {
        int64_t n = share_of(g, i, count, &begin);
        if (i != g->at) send_to(&x, i, data + begin * size, n * size);
    }
    return complete(&x);
}

static bool gather_shares(const par_group *g, char *data, int64_t count, int64_t size)
{
    exchange x;
    int64_t begin, own_begin, own = share_of(g, g->at, count, &own_begin);
    begin_exchange(&x, g);
    for (int i = 0; i < g->size; i++) {
        int64_t n = share_of(g, i, count, &begin);
        if (i != g->at) receive_from(&x, i, data + begin * size, n * size);
    }
    for (int i = 0; i < g->size; i++)
        if (i != g->at) send_to(&x, i, data + own_begin * size, own * size);
    return complete(&x);
}

/* `count` elements of which a share fits. */
static bool reduce_shares(const par_group *g, char *data, int64_t count, td_dtype dtype)
{
    int64_t size = td_dtype_size(dtype), begin, own = share_of(g, g->at, count, &begin);
    if (!scatter_shares(g, data, count, size)) return false;
    sum(g, data + begin * size, data + begin * size, own, dtype);
    return gather_shares(g, data, count, size);
}

static bool mpi_all_reduce(void *self, int axis, void *data, int64_t count, td_dtype dtype)
{
    par_group g;
    par_meeting meeting = { .kind = PAR_ALL_REDUCE, .count = count, .dtype = (int32_t)dtype };
    if (!par_group_begin(self, axis, meeting, &g) || !par_group_sums(&g)) return false;
    if (g.size == 1) return par_group_finish(&g);
    int64_t size = td_dtype_size(dtype), room = room_for(&g, size) * g.size;
    arrive(&g);
    if (count * size <= SMALL_BYTES) {
        if (!exchange_parts(&g, data, 0, count * size)) return false;
        sum(&g, data, data, count, dtype);
        return par_group_finish(&g);
    }
    for (int64_t at = 0; at < count; at += room)
        if (!reduce_shares(&g, (char *)data + at * size, least(room, count - at), dtype)) return false;
    return par_group_finish(&g);
}

/* A call without elements still sends, so that ranks stay in step. */
static bool mpi_reduce_scatter(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    par_group g;
    par_meeting meeting = { .kind = PAR_REDUCE_SCATTER, .count = count, .dtype = (int32_t)dtype };
    if (!par_group_begin(self, axis, meeting, &g) || !par_group_sums(&g)) return false;
    int64_t size = td_dtype_size(dtype), room = room_for(&g, size), at = 0;
    arrive(&g);
    do {
        int64_t n = least(room, count - at);
        const char *from = (const char *)in + at * size;
        if (!exchange_parts(&g, from, count * size, n * size)) return false;
        sum(&g, from + g.at * count * size, (char *)out + at * size, n, dtype);
        at += n;
    } while (at < count);
    return par_group_finish(&g);
}

static bool mpi_all_gather(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    par_group g;
    par_meeting meeting = { .kind = PAR_ALL_GATHER, .count = count, .dtype = (int32_t)dtype };
    if (!par_group_begin(self, axis, meeting, &g)) return false;
    int64_t size = td_dtype_size(dtype), room = MOST_BYTES / size, at = 0;
    arrive(&g);
    do {
        int64_t n = least(room, count - at);
        exchange x;
        begin_exchange(&x, &g);
        for (int i = 0; i < g.size; i++)
            if (i != g.at) receive_from(&x, i, (char *)out + (i * count + at) * size, n * size);
        for (int i = 0; i < g.size; i++)
            if (i != g.at) send_to(&x, i, (const char *)in + at * size, n * size);
        if (!complete(&x)) return false;
        if (n > 0) memmove((char *)out + (g.at * count + at) * size, (const char *)in + at * size, (size_t)(n * size));
        at += n;
    } while (at < count);
    return par_group_finish(&g);
}

static bool mpi_all_to_all(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    par_group g;
    par_meeting meeting = { .kind = PAR_ALL_TO_ALL, .count = count, .dtype = (int32_t)dtype };
    if (!par_group_begin(self, axis, meeting, &g)) return false;
    int64_t size = td_dtype_size(dtype), room = room_for(&g, size), at = 0;
    arrive(&g);
    do {
        int64_t n = least(room, count - at);
        const char *from = (const char *)in + at * size;
        if (!exchange_parts(&g, from, count * size, n * size)) return false;
        for (int i = 0; i < g.size && n > 0; i++)
            memmove((char *)out + (i * count + at) * size, i == g.at ? from + i * count * size : received(&g, i), (size_t)(n * size));
        at += n;
    } while (at < count);
    return par_group_finish(&g);
}

static bool mpi_broadcast(void *self, int axis, int root, void *data, int64_t bytes)
{
    par_group g;
    par_meeting meeting = { .kind = PAR_BROADCAST, .count = bytes, .dtype = TD_U8, .root = root };
    if (!par_group_begin(self, axis, meeting, &g)) return false;
    if (root < 0 || root >= g.size) {
        par_break(g.me->world, g.me->rank, "rank %d: broadcast from %d on an axis of %d ranks", g.me->rank, root, g.size);
        return par_stopped(g.me);
    }
    int64_t at = 0;
    arrive(&g);
    do {
        int64_t n = least(MOST_BYTES, bytes - at);
        exchange x;
        begin_exchange(&x, &g);
        if (g.at != root) receive_from(&x, root, (char *)data + at, n);
        for (int i = 0; i < g.size && g.at == root; i++)
            if (i != root) send_to(&x, i, (const char *)data + at, n);
        if (!complete(&x)) return false;
        at += n;
    } while (at < bytes);
    return par_group_finish(&g);
}

static bool mpi_barrier(void *self)
{
    par_group g;
    if (!par_group_begin(self, 0, (par_meeting){ .kind = PAR_BARRIER }, &g)) return false;
    arrive(&g);
    exchange x;
    begin_exchange(&x, &g);
    for (int i = 0; i < g.size; i++)
        if (i != g.at) receive_from(&x, i, NULL, 0);
    for (int i = 0; i < g.size; i++)
        if (i != g.at) send_to(&x, i, NULL, 0);
    return complete(&x) && par_group_finish(&g);
}

static int64_t mpi_sent(void *self, int64_t *calls)
{
    const par_local *me = self;
    return par_sent(me->world, me->rank, calls);
}

bool par_transport_mpi(par_world *world, int rank, td_context *td, const td_mesh *mesh, td_transport *out)
{
    if (!par_group_mesh(world, rank, td, mesh)) return false;
    *out = (td_transport){
        .self = par_local_at(world, rank),
        .name = "mpi",
        .all_reduce = mpi_all_reduce,
        .reduce_scatter = mpi_reduce_scatter,
        .all_gather = mpi_all_gather,
        .all_to_all = mpi_all_to_all,
        .broadcast = mpi_broadcast,
        .barrier = mpi_barrier,
        .sent = mpi_sent,
    };
    return true;
}
