/* Transport `local`: ranks of one machine, threads or processes alike, through the staging buffers of their world.
 *
 * Ranks exchange data by meeting. Each writes what it gives into its half of its own staging buffer, says that it has
 * come, waits until all have, and reads from the others' halves. Halves alternate: who writes into one again has
 * since seen all others come to the next meeting, so they have done reading. Every collective is made of such
 * exchanges, as many as the buffer's size asks for.
 *
 * Sums are taken in the order of ranks 0 .. N-1, in the dtype of the data; bf16 in f32, rounded to nearest even at
 * the end. Every element is summed in this one way wherever it is summed, so all ranks hold the same bits, and other
 * transports are tested against these. When a call fails, the world has been stopped and the context says why.
 */
#include <string.h>

#include "parallel/group.h"

enum { SMALL_BYTES = 2048 }; /* up to here each rank sums everything: one meeting instead of two */

/* ---- Meeting --------------------------------------------------------------------------------------------- */

/* Where this rank puts what it gives at the next meeting. */
static char *to_give(const par_group *g) { return par_staging(g->me->world, g->me->rank, g->slot, par_group_meetings(g)); }

/* What a member gave at the last meeting. */
static const char *given(const par_group *g, int member)
{
    return par_staging(g->me->world, g->first + member * g->stride, g->slot, par_group_meetings(g) - 1);
}

static int64_t half_bytes(const par_group *g) { return g->me->world->segment->staging_bytes / 2; }

/* Comes to the next meeting and waits for all members. */
static bool meet(const par_group *g)
{
    par_area *mine = par_group_area(g, g->at);
    uint32_t now = par_group_meetings(g);
    mine->meeting[g->slot][now & 1] = g->meeting;
    par_advance(&mine->arrived[g->slot]);
    for (int i = 0; i < g->size; i++) {
        if (i == g->at) continue;
        int other = g->first + i * g->stride;
        if (!par_wait(g->me, other, &par_group_area(g, i)->arrived[g->slot], now + 1) || !par_group_same(g, i)) return false;
    }
    return true;
}

/* Sums what the members gave from `at` bytes on. */
static void sum(const par_group *g, int64_t at, void *out, int64_t count, td_dtype dtype)
{
    const void *from[PAR_MAX_RANKS];
    for (int i = 0; i < g->size; i++) from[i] = given(g, i) + at;
    par_sum(g, from, out, count, dtype);
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- Collectives ----------------------------------------------------------------------------------------- */

static size_t bytes_of(int64_t elements, int64_t size) { return (size_t)(elements * size); }

/* One exchange of `count` elements that fit: each rank sums its share, then all take all shares. */
static bool reduce_shares(const par_group *g, char *data, int64_t count, td_dtype dtype)
{
    int64_t size = td_dtype_size(dtype), share = (count + g->size - 1) / g->size;
    int64_t begin = least(g->at * share, count), end = least(begin + share, count);
    memcpy(to_give(g), data, bytes_of(count, size));
    if (!meet(g)) return false;
    sum(g, begin * size, to_give(g), end - begin, dtype);
    if (!meet(g)) return false;
    for (int i = 0; i < g->size; i++) {
        begin = least(i * share, count), end = least(begin + share, count);
        if (begin < end) memcpy(data + begin * size, given(g, i), bytes_of(end - begin, size));
    }
    return true;
}

static bool local_all_reduce(void *self, int axis, void *data, int64_t count, td_dtype dtype)
{
    par_group g;
    par_meeting meeting = { .kind = PAR_ALL_REDUCE, .count = count, .dtype = (int32_t)dtype };
    if (!par_group_begin(self, axis, meeting, &g) || !par_group_sums(&g)) return false;
    int64_t size = td_dtype_size(dtype), room = half_bytes(&g) / size;
    if (g.size == 1) return par_group_finish(&g);
    if (count * size <= SMALL_BYTES) {
        if (count) memcpy(to_give(&g), data, bytes_of(count, size));
        if (!meet(&g)) return false;
        sum(&g, 0, data, count, dtype);
        return par_group_finish(&g);
    }
    for (int64_t at = 0; at < count; at += room)
        if (!reduce_shares(&g, (char *)data + at * size, least(room, count - at), dtype)) return false;
    return par_group_finish(&g);
}

/* A call without elements still meets, so that ranks stay in step. */
static bool local_reduce_scatter(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    par_group g;
    par_meeting meeting = { .kind = PAR_REDUCE_SCATTER, .count = count, .dtype = (int32_t)dtype };
    if (!par_group_begin(self, axis, meeting, &g) || !par_group_sums(&g)) return false;
    int64_t size = td_dtype_size(dtype), room = half_bytes(&g) / size / g.size;
    int64_t at = 0;
    do {
        int64_t n = least(room, count - at);
        char *give = to_give(&g);
        for (int i = 0; i < g.size && n > 0; i++)
            memcpy(give + i * n * size, (const char *)in + (i * count + at) * size, bytes_of(n, size));
        if (!meet(&g)) return false;
        sum(&g, g.at * n * size, (char *)out + at * size, n, dtype);
        at += n;
    } while (at < count);
    return par_group_finish(&g);
}

static bool local_all_gather(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    par_group g;
    par_meeting meeting = { .kind = PAR_ALL_GATHER, .count = count, .dtype = (int32_t)dtype };
    if (!par_group_begin(self, axis, meeting, &g)) return false;
    int64_t size = td_dtype_size(dtype), room = half_bytes(&g) / size;
    int64_t at = 0;
    do {
        int64_t n = least(room, count - at);
        if (n > 0) memcpy(to_give(&g), (const char *)in + at * size, bytes_of(n, size));
        if (!meet(&g)) return false;
        for (int i = 0; i < g.size && n > 0; i++)
            memcpy((char *)out + (i * count + at) * size, given(&g, i), bytes_of(n, size));
        at += n;
    } while (at < count);
    return par_group_finish(&g);
}

static bool local_all_to_all(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    par_group g;
    par_meeting meeting = { .kind = PAR_ALL_TO_ALL, .count = count, .dtype = (int32_t)dtype };
    if (!par_group_begin(self, axis, meeting, &g)) return false;
    int64_t size = td_dtype_size(dtype), room = half_bytes(&g) / size / g.size;
    int64_t at = 0;
    do {
        int64_t n = least(room, count - at);
        char *give = to_give(&g);
        for (int i = 0; i < g.size && n > 0; i++)
            memcpy(give + i * n * size, (const char *)in + (i * count + at) * size, bytes_of(n, size));
        if (!meet(&g)) return false;
        for (int i = 0; i < g.size && n > 0; i++)
            memcpy((char *)out + (i * count + at) * size, given(&g, i) + g.at * n * size, bytes_of(n, size));
        at += n;
    } while (at < count);
    return par_group_finish(&g);
}

static bool local_broadcast(void *self, int axis, int root, void *data, int64_t bytes)
{
    par_group g;
    par_meeting meeting = { .kind = PAR_BROADCAST, .count = bytes, .dtype = TD_U8, .root = root };
    if (!par_group_begin(self, axis, meeting, &g)) return false;
    if (root < 0 || root >= g.size) {
        par_break(g.me->world, g.me->rank, "rank %d: broadcast from %d on an axis of %d ranks", g.me->rank, root,
                  g.size);
        return par_stopped(g.me);
    }
    int64_t room = half_bytes(&g), at = 0;
    do {
        int64_t n = least(room, bytes - at);
        if (n > 0 && g.at == root) memcpy(to_give(&g), (const char *)data + at, (size_t)n);
        if (!meet(&g)) return false;
        if (n > 0 && g.at != root) memcpy((char *)data + at, given(&g, root), (size_t)n);
        at += n;
    } while (at < bytes);
    return par_group_finish(&g);
}

static bool local_barrier(void *self)
{
    par_group g;
    return par_group_begin(self, 0, (par_meeting){ .kind = PAR_BARRIER }, &g) && meet(&g) && par_group_finish(&g);
}

static int64_t local_sent(void *self, int64_t *calls)
{
    const par_local *me = self;
    return par_sent(me->world, me->rank, calls);
}

/* ---- Making ---------------------------------------------------------------------------------------------- */

bool par_transport_local(par_world *world, int rank, td_context *td, const td_mesh *mesh, td_transport *out)
{
    if (!par_group_mesh(world, rank, td, mesh)) return false;
    *out = (td_transport){
        .self = par_local_at(world, rank),
        .name = "local",
        .all_reduce = local_all_reduce,
        .reduce_scatter = local_reduce_scatter,
        .all_gather = local_all_gather,
        .all_to_all = local_all_to_all,
        .broadcast = local_broadcast,
        .barrier = local_barrier,
        .sent = local_sent,
    };
    return true;
}
