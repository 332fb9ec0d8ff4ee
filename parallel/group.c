/* Groups of ranks, as every transport that sends has them: who meets, what a call is, and sums in rank order.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "parallel/group.h"

enum {
    BLOCK = 512, /* elements summed at once: the sums stay in L1 */
    WORLD_SLOT = PAR_SLOTS - 1,
};

par_area *par_group_area(const par_group *g, int member)
{
    return &g->me->world->segment->area[g->first + member * g->stride];
}

uint32_t par_group_meetings(const par_group *g)
{
    return atomic_load_explicit(&par_group_area(g, g->at)->arrived[g->slot].value, memory_order_relaxed);
}

static void meeting_text(const par_meeting *m, char *to, size_t room)
{
    int n = snprintf(to, room, "%s of %lld %s", par_collective_name(m->kind), (long long)m->count,
                     td_dtype_name(m->dtype));
    if (m->kind == PAR_BARRIER) n = snprintf(to, room, "barrier");
    if (m->kind == PAR_BROADCAST) n += snprintf(to + n, room - (size_t)n, " from %d", m->root);
    char step[PAR_STEP_BYTES];
    snprintf(to + n, room - (size_t)n, " (call %lld of %s)", (long long)m->call, par_step_text(m->step, step));
}

bool par_group_same(const par_group *g, int member)
{
    unsigned half = (par_group_meetings(g) - 1) & 1;
    const par_meeting *ours = &g->meeting, *theirs = &par_group_area(g, member)->meeting[g->slot][half];
    if (ours->kind == theirs->kind && ours->count == theirs->count && ours->dtype == theirs->dtype &&
        ours->root == theirs->root && ours->call == theirs->call && ours->run == theirs->run && ours->step == theirs->step)
        return true;
    char a[PAR_PLACE_BYTES + 64], b[PAR_PLACE_BYTES + 64], apart[48] = "";
    int rank = g->me->rank, other = g->first + member * g->stride;
    const par_meeting *lower = rank < other ? ours : theirs, *upper = rank < other ? theirs : ours;
    long long runs = upper->run - lower->run;
    meeting_text(lower, a, sizeof a);
    meeting_text(upper, b, sizeof b);
    if (runs && upper->step == lower->step) /* micro-batches */
        snprintf(apart, sizeof apart, ", %lld run%s %s", llabs(runs), llabs(runs) == 1 ? "" : "s", runs > 0 ? "later" : "earlier");
    par_break(g->me->world, rank, "ranks disagree: rank %d calls %s but rank %d calls %s%s", rank < other ? rank : other,
              a, rank < other ? other : rank, b, apart);
    return par_stopped(g->me);
}

/* ---- Calls ----------------------------------------------------------------------------------------------- */

bool par_group_find(par_local *me, int axes, par_group *g)
{
    const td_mesh *mesh = &me->mesh;
    int first = axes & 0xFF, last = first + (axes >> 8);
    if (axes < 0 || last >= mesh->axes) {
        td_fail(me->td, TD_ERROR_PARALLEL, "there is no mesh axis %d: the mesh has %d", axes < 0 ? axes : last, mesh->axes);
        return false;
    }
    *g = (par_group){ .me = me, .slot = last > first ? TD_MAX_AXES + first + last - 1 : first, .size = 1, .stride = 1 };
    for (int a = first; a <= last; a++) {
        g->size *= mesh->size[a];
        g->at = g->at * mesh->size[a] + mesh->at[a];
    }
    for (int a = last + 1; a < mesh->axes; a++) g->stride *= mesh->size[a];
    g->first = me->rank - g->at * g->stride;
    return true;
}

/* Where one axis is the whole world, barriers meet there too: one that pairs with another call is noticed at once. */
bool par_group_begin(void *self, int axes, par_meeting meeting, par_group *g)
{
    par_local *me = self;
    if (meeting.kind == PAR_BARRIER && me->mesh.axes > 1)
        *g = (par_group){ .me = me, .slot = WORLD_SLOT, .size = me->world->ranks, .at = me->rank, .stride = 1 };
    else if (!par_group_find(me, axes, g)) return false;
    par_area *area = par_group_area(g, g->at);
    me->called = par_seconds();
    if (!me->uncounted) atomic_fetch_add(&area->calls, 1);
    meeting.call = atomic_fetch_add(&area->call, 1) + 1;
    meeting.run = atomic_load(&area->run) - 1;
    meeting.step = atomic_load(&area->step);
    g->meeting = meeting;
    atomic_store(&area->collective, meeting.kind);
    if (par_broken(me->world)) return par_stopped(me);
    if (meeting.count >= 0) return true;
    par_break(me->world, me->rank, "rank %d: %s of %lld elements", me->rank, par_collective_name(meeting.kind),
              (long long)meeting.count);
    return par_stopped(me);
}

bool par_group_tell(par_local *me, const td_transport *cpu, int axes, const void *own, void *all, int64_t count)
{
    me->uncounted = true;
    bool told = cpu->all_gather(cpu->self, td_axes(0, axes - 1), own, all, count, TD_I64);
    me->uncounted = false;
    return told;
}

bool par_group_finish(const par_group *g)
{
    par_area *area = par_group_area(g, g->at);
    int64_t sent = par_bytes_sent((par_collective)g->meeting.kind, g->size, g->meeting.count, (td_dtype)g->meeting.dtype);
    if (!g->me->uncounted) atomic_fetch_add(&area->sent, sent);
    atomic_store(&area->collective, PAR_NO_COLLECTIVE);
    par_add_waited(g->me, g->me->called);
    return true;
}

void par_group_ran(par_local *me, td_sent *run, td_sent *of_plan)
{
    par_area *area = &me->world->segment->area[me->rank];
    if (run->calls) {
        *of_plan = *run;
        *run = (td_sent){ 0 };
    } else {
        atomic_fetch_add(&area->calls, of_plan->calls);
        atomic_fetch_add(&area->sent, of_plan->bytes);
    }
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

/* What is looked at is in L1 still. */
#define SUM_BLOCK(T, ACC, WIDEN, NARROW, FINITE)                                                                       \
    for (int64_t begin = 0; begin < count; begin += BLOCK) {                                                           \
        int64_t n = least(count - begin, BLOCK);                                                                       \
        ACC sum[BLOCK];                                                                                                \
        const T *x = (const T *)from[0] + begin;                                                                       \
        for (int64_t i = 0; i < n; i++) sum[i] = WIDEN(x[i]);                                                          \
        for (int m = 1; m < g->size; m++) {                                                                            \
            x = (const T *)from[m] + begin;                                                                            \
            for (int64_t i = 0; i < n; i++) sum[i] += WIDEN(x[i]);                                                     \
        }                                                                                                              \
        if (!FINITE(sum, n)) par_note_not_finite(g, from, begin, n, dtype);                                            \
        T *y = (T *)out + begin;                                                                                       \
        for (int64_t i = 0; i < n; i++) y[i] = NARROW(sum[i]);                                                         \
    }

#define ALWAYS(sum, n) true

void par_sum(const par_group *g, const void *const *from, void *out, int64_t count, td_dtype dtype)
{
    switch (dtype) {
    case TD_F32: SUM_BLOCK(float, float, , , par_finite_f32) break;
    case TD_F64: SUM_BLOCK(double, double, , , par_finite_f64) break;
    case TD_BF16: SUM_BLOCK(uint16_t, float, widen, narrow, par_finite_f32) break;
    case TD_I32: SUM_BLOCK(uint32_t, uint32_t, , , ALWAYS) break;
    case TD_I64: SUM_BLOCK(uint64_t, uint64_t, , , ALWAYS) break;
    default: break; /* par_group_sums has refused */
    }
}

bool par_group_sums(const par_group *g)
{
    td_dtype dtype = (td_dtype)g->meeting.dtype;
    if (dtype == TD_F32 || dtype == TD_F64 || dtype == TD_BF16 || dtype == TD_I32 || dtype == TD_I64) return true;
    par_break(g->me->world, g->me->rank, "rank %d: %s cannot sum %s; it sums f32, f64, bf16, i32 and i64", g->me->rank,
              par_collective_name((par_collective)g->meeting.kind), td_dtype_name(dtype));
    return par_stopped(g->me);
}

/* ---- Meshes ---------------------------------------------------------------------------------------------- */

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

bool par_group_mesh(par_world *world, int rank, td_context *td, const td_mesh *mesh)
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
    me->behind = false;
    return true;
}
