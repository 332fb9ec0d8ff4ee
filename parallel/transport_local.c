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
#include <stdio.h>
#include <string.h>

#include "parallel/world.h"

enum {
    BLOCK = 512,        /* elements summed at once: the sums stay in L1 */
    SMALL_BYTES = 2048, /* up to here each rank sums everything: one meeting instead of two */
    WORLD_SLOT = TD_MAX_AXES,
};

/* ---- Meeting --------------------------------------------------------------------------------------------- */

/* The ranks of one mesh axis that share this rank's coordinates on all others, or the whole world. */
typedef struct par_group {
    par_local *me;
    int slot;
    int size, at;      /* ranks in it, which of them this is */
    int first, stride; /* member i is rank first + i * stride */
    par_meeting meeting;
} par_group;

static par_area *area_of(const par_group *g, int member)
{
    return &g->me->world->segment->area[g->first + member * g->stride];
}

static uint32_t meetings(const par_group *g)
{
    return atomic_load_explicit(&area_of(g, g->at)->arrived[g->slot].value, memory_order_relaxed);
}

/* Where this rank puts what it gives at the next meeting. */
static char *to_give(const par_group *g) { return par_staging(g->me->world, g->me->rank, g->slot, meetings(g)); }

/* What a member gave at the last meeting. */
static const char *given(const par_group *g, int member)
{
    return par_staging(g->me->world, g->first + member * g->stride, g->slot, meetings(g) - 1);
}

static int64_t half_bytes(const par_group *g) { return g->me->world->segment->staging_bytes / 2; }

static void meeting_text(const par_meeting *m, char *to, size_t room)
{
    int n = snprintf(to, room, "%s of %lld %s", par_collective_name(m->kind), (long long)m->count,
                     td_dtype_name(m->dtype));
    if (m->kind == PAR_BARRIER) n = snprintf(to, room, "barrier");
    if (m->kind == PAR_BROADCAST) n += snprintf(to + n, room - (size_t)n, " from %d", m->root);
    snprintf(to + n, room - (size_t)n, " (call %lld of step %lld)", (long long)m->call, (long long)m->step);
}

/* All must have come to the same thing; a pair of different calls would hang or mix up data. */
static bool same_meeting(const par_group *g, int member)
{
    unsigned half = (meetings(g) - 1) & 1;
    const par_meeting *ours = &g->meeting, *theirs = &area_of(g, member)->meeting[g->slot][half];
    if (ours->kind == theirs->kind && ours->count == theirs->count && ours->dtype == theirs->dtype &&
        ours->root == theirs->root)
        return true;
    char a[PAR_PLACE_BYTES + 64], b[PAR_PLACE_BYTES + 64];
    int rank = g->me->rank, other = g->first + member * g->stride;
    meeting_text(rank < other ? ours : theirs, a, sizeof a);
    meeting_text(rank < other ? theirs : ours, b, sizeof b);
    par_break(g->me->world, rank, "ranks disagree: rank %d calls %s but rank %d calls %s", rank < other ? rank : other,
              a, rank < other ? other : rank, b);
    return par_stopped(g->me);
}

/* Comes to the next meeting and waits for all members. */
static bool meet(const par_group *g)
{
    par_area *mine = area_of(g, g->at);
    uint32_t now = meetings(g);
    mine->meeting[g->slot][now & 1] = g->meeting;
    par_advance(&mine->arrived[g->slot]);
    for (int i = 0; i < g->size; i++) {
        if (i == g->at) continue;
        int other = g->first + i * g->stride;
        if (!par_wait(g->me, other, &area_of(g, i)->arrived[g->slot], now + 1) || !same_meeting(g, i)) return false;
    }
    return true;
}

/* ---- Calls ----------------------------------------------------------------------------------------------- */

static bool find_group(par_local *me, int axis, par_group *g)
{
    const td_mesh *mesh = &me->mesh;
    if (axis < 0 || axis >= mesh->axes) {
        td_fail(me->td, TD_ERROR_PARALLEL, "there is no mesh axis %d: the mesh has %d", axis, mesh->axes);
        return false;
    }
    int stride = 1;
    for (int a = mesh->axes - 1; a > axis; a--) stride *= mesh->size[a];
    *g = (par_group){ .me = me, .slot = axis, .size = mesh->size[axis], .at = mesh->at[axis], .stride = stride };
    g->first = me->rank - g->at * stride;
    return true;
}

/* Finds the group and says where this rank is now. Where one axis is the whole world, barriers meet there too: one
 * that pairs with another call is noticed at once. */
static bool begin(void *self, int axis, par_meeting meeting, par_group *g)
{
    par_local *me = self;
    if (meeting.kind == PAR_BARRIER && me->mesh.axes > 1)
        *g = (par_group){ .me = me, .slot = WORLD_SLOT, .size = me->world->ranks, .at = me->rank, .stride = 1 };
    else if (!find_group(me, axis, g)) return false;
    par_area *area = area_of(g, g->at);
    atomic_fetch_add(&area->calls, 1);
    meeting.call = atomic_fetch_add(&area->call, 1) + 1;
    meeting.step = atomic_load(&area->step) - 1;
    g->meeting = meeting;
    atomic_store(&area->collective, meeting.kind);
    if (par_broken(me->world)) return par_stopped(me);
    if (meeting.count >= 0) return true;
    par_break(me->world, me->rank, "rank %d: %s of %lld elements", me->rank, par_collective_name(meeting.kind),
              (long long)meeting.count);
    return par_stopped(me);
}

/* Where a call failed stays written, for the launcher to tell. */
static bool finish(const par_group *g)
{
    par_area *area = area_of(g, g->at);
    atomic_fetch_add(&area->sent, par_bytes_sent((par_collective)g->meeting.kind, g->size, g->meeting.count,
                                                 (td_dtype)g->meeting.dtype));
    atomic_store(&area->collective, PAR_NO_COLLECTIVE);
    return true;
}

/* ---- Sums in rank order ---------------------------------------------------------------------------------- */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static float widen(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* To nearest, ties to even; a NaN stays one. */
static uint16_t narrow(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Where in each member's half the elements to be summed begin. */
typedef struct sum_source {
    const par_group *g;
    int64_t at; /* bytes */
} sum_source;

#define SUM_BLOCK(T, ACC, WIDEN, NARROW)                                                                               \
    for (int64_t begin = 0; begin < count; begin += BLOCK) {                                                           \
        int64_t n = least(count - begin, BLOCK);                                                                       \
        ACC sum[BLOCK];                                                                                                \
        const T *x = (const T *)(given(source.g, 0) + source.at) + begin;                                              \
        for (int64_t i = 0; i < n; i++) sum[i] = WIDEN(x[i]);                                                          \
        for (int m = 1; m < source.g->size; m++) {                                                                     \
            x = (const T *)(given(source.g, m) + source.at) + begin;                                                   \
            for (int64_t i = 0; i < n; i++) sum[i] += WIDEN(x[i]);                                                     \
        }                                                                                                              \
        T *y = (T *)out + begin;                                                                                       \
        for (int64_t i = 0; i < n; i++) y[i] = NARROW(sum[i]);                                                         \
    }

/* out[i] = sum over members, in order, of what they gave at `source`. Integers wrap around. */
static void sum(sum_source source, void *out, int64_t count, td_dtype dtype)
{
    switch (dtype) {
    case TD_F32: SUM_BLOCK(float, float, , ) break;
    case TD_F64: SUM_BLOCK(double, double, , ) break;
    case TD_BF16: SUM_BLOCK(uint16_t, float, widen, narrow) break;
    case TD_I32: SUM_BLOCK(uint32_t, uint32_t, , ) break;
    case TD_I64: SUM_BLOCK(uint64_t, uint64_t, , ) break;
    default: break; /* can_sum has refused */
    }
}

static bool can_sum(const par_group *g)
{
    td_dtype dtype = (td_dtype)g->meeting.dtype;
    if (dtype == TD_F32 || dtype == TD_F64 || dtype == TD_BF16 || dtype == TD_I32 || dtype == TD_I64) return true;
    par_break(g->me->world, g->me->rank, "rank %d: %s cannot sum %s; it sums f32, f64, bf16, i32 and i64", g->me->rank,
              par_collective_name((par_collective)g->meeting.kind), td_dtype_name(dtype));
    return par_stopped(g->me);
}

/* ---- Collectives ----------------------------------------------------------------------------------------- */

static size_t bytes_of(int64_t elements, int64_t size) { return (size_t)(elements * size); }

/* One exchange of `count` elements that fit: each rank sums its share, then all take all shares. */
static bool reduce_shares(const par_group *g, char *data, int64_t count, td_dtype dtype)
{
    int64_t size = td_dtype_size(dtype), share = (count + g->size - 1) / g->size;
    int64_t begin = least(g->at * share, count), end = least(begin + share, count);
    memcpy(to_give(g), data, bytes_of(count, size));
    if (!meet(g)) return false;
    sum((sum_source){ g, begin * size }, to_give(g), end - begin, dtype);
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
    if (!begin(self, axis, meeting, &g) || !can_sum(&g)) return false;
    int64_t size = td_dtype_size(dtype), room = half_bytes(&g) / size;
    if (g.size == 1) return finish(&g);
    if (count * size <= SMALL_BYTES) {
        if (count) memcpy(to_give(&g), data, bytes_of(count, size));
        if (!meet(&g)) return false;
        sum((sum_source){ &g, 0 }, data, count, dtype);
        return finish(&g);
    }
    for (int64_t at = 0; at < count; at += room)
        if (!reduce_shares(&g, (char *)data + at * size, least(room, count - at), dtype)) return false;
    return finish(&g);
}

/* A call without elements still meets, so that ranks stay in step. */
static bool local_reduce_scatter(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    par_group g;
    par_meeting meeting = { .kind = PAR_REDUCE_SCATTER, .count = count, .dtype = (int32_t)dtype };
    if (!begin(self, axis, meeting, &g) || !can_sum(&g)) return false;
    int64_t size = td_dtype_size(dtype), room = half_bytes(&g) / size / g.size;
    int64_t at = 0;
    do {
        int64_t n = least(room, count - at);
        char *give = to_give(&g);
        for (int i = 0; i < g.size && n > 0; i++)
            memcpy(give + i * n * size, (const char *)in + (i * count + at) * size, bytes_of(n, size));
        if (!meet(&g)) return false;
        sum((sum_source){ &g, g.at * n * size }, (char *)out + at * size, n, dtype);
        at += n;
    } while (at < count);
    return finish(&g);
}

static bool local_all_gather(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    par_group g;
    par_meeting meeting = { .kind = PAR_ALL_GATHER, .count = count, .dtype = (int32_t)dtype };
    if (!begin(self, axis, meeting, &g)) return false;
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
    return finish(&g);
}

static bool local_all_to_all(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    par_group g;
    par_meeting meeting = { .kind = PAR_ALL_TO_ALL, .count = count, .dtype = (int32_t)dtype };
    if (!begin(self, axis, meeting, &g)) return false;
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
    return finish(&g);
}

static bool local_broadcast(void *self, int axis, int root, void *data, int64_t bytes)
{
    par_group g;
    par_meeting meeting = { .kind = PAR_BROADCAST, .count = bytes, .dtype = TD_U8, .root = root };
    if (!begin(self, axis, meeting, &g)) return false;
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
    return finish(&g);
}

static bool local_barrier(void *self)
{
    par_group g;
    return begin(self, 0, (par_meeting){ .kind = PAR_BARRIER }, &g) && meet(&g) && finish(&g);
}

static int64_t local_sent(void *self, int64_t *calls)
{
    const par_local *me = self;
    return par_sent(me->world, me->rank, calls);
}

/* ---- Making ---------------------------------------------------------------------------------------------- */

static bool mesh_fits(const td_mesh *mesh, int ranks, int rank)
{
    if (mesh->axes < 1 || mesh->axes > TD_MAX_AXES) return false;
    int size = 1, index = 0;
    for (int a = 0; a < mesh->axes; a++) {
        if (mesh->at[a] < 0 || mesh->at[a] >= mesh->size[a]) return false;
        size *= mesh->size[a];
        index = index * mesh->size[a] + mesh->at[a];
    }
    return size == ranks && index == rank;
}

bool par_transport_local(par_world *world, int rank, td_context *td, const td_mesh *mesh, td_transport *out)
{
    par_local *me = par_local_at(world, rank);
    td_mesh line = {
        .axes = 1, .name = { "ranks" }, .size = { world->ranks }, .at = { rank }, .rank = rank, .world = world->ranks
    };
    if (!mesh || mesh->axes == 0) mesh = &line;
    if (!me || !world->segment || !mesh_fits(mesh, world->ranks, rank)) {
        td_fail(td, TD_ERROR_PARALLEL, "rank %d with this mesh has no place in a world of %d ranks", rank,
                world->ranks);
        return false;
    }
    me->td = td;
    me->mesh = *mesh;
    *out = (td_transport){
        .self = me,
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
