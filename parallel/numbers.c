/* Which rank's number was the first that is not finite.
 *
 * A NaN of one rank is on all ranks after the next sum, so it is looked for where ranks are summed: each block of sums, while it
 * is in L1, and where one is not finite the parts it was made of. A rank finds what is in its own share of a sum; what ranks
 * found is put together when it is asked for. Once there, a NaN stays from step to step, so where bad runs began is
 * kept; a good run in between ends them.
 */
#include <stdio.h>
#include <string.h>

#include "parallel/group.h"
#include "parallel/mpi.h"

/* Of numbers that are finite the exponent has a bit unset; the largest magnitude as an integer tells of all. */
bool par_finite_f32(const float *x, int64_t count)
{
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most < 0x7f800000;
}

bool par_finite_f64(const double *x, int64_t count)
{
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits &= INT64_MAX;
        most = bits > most ? bits : most;
    }
    return most < 0x7ff0000000000000;
}

static bool finite_bf16(const uint16_t *x, int64_t count)
{
    uint16_t most = 0;
    for (int64_t i = 0; i < count; i++) most = (x[i] & 0x7fff) > most ? x[i] & 0x7fff : most;
    return most < 0x7f80;
}

static bool is_finite(const void *x, int64_t begin, int64_t count, td_dtype dtype)
{
    if (dtype == TD_F64) return par_finite_f64((const double *)x + begin, count);
    if (dtype == TD_F32) return par_finite_f32((const float *)x + begin, count);
    return finite_bf16((const uint16_t *)x + begin, count);
}

/* ---- Noting ---------------------------------------------------------------------------------------------- */

static void begin_run(par_origin *o, const par_meeting *m)
{
    atomic_store(&o->run, m->run);
    atomic_store(&o->step, m->step);
    atomic_store(&o->call, m->call);
    atomic_store(&o->kind, m->kind);
    for (size_t i = 0; i < sizeof o->ranks / sizeof *o->ranks; i++) atomic_store(&o->ranks[i], 0);
}

void par_note_not_finite(const par_group *g, const void *const *from, int64_t begin, int64_t count, td_dtype dtype)
{
    par_origin *o = &par_group_area(g, g->at)->origin;
    const par_meeting *m = &g->meeting;
    int64_t last = atomic_load(&o->last) - 1;
    bool is_first = last < 0 || m->run > last + 1;
    if (is_first) begin_run(o, m);
    bool changed = is_first;
    for (int i = 0; i < g->size && atomic_load(&o->run) == m->run && atomic_load(&o->call) == m->call; i++) {
        int rank = g->first + i * g->stride;
        uint64_t bit = 1ull << rank % 64;
        if (atomic_load(&o->ranks[rank / 64]) & bit || is_finite(from[i], begin, count, dtype)) continue;
        atomic_fetch_or(&o->ranks[rank / 64], bit);
        changed = true;
    }
    changed = changed || last != m->run;
    atomic_store(&o->last, m->run + 1);
    if (changed && g->me->world->mpi) par_mpi_tell_origin(g->me->world);
}

/* ---- Telling --------------------------------------------------------------------------------------------- */

static bool is_before(const par_origin *a, const par_origin *b)
{
    int64_t run = atomic_load(&a->run), other = atomic_load(&b->run);
    return run != other ? run < other : atomic_load(&a->call) < atomic_load(&b->call);
}

static bool is_same(const par_origin *a, const par_origin *b) { return !is_before(a, b) && !is_before(b, a); }

/* The earliest that some rank has found of bad runs which have come to the last one of all; NULL: none. */
static const par_origin *find_origin(const par_segment *s)
{
    const par_origin *first = NULL;
    int64_t now = 0;
    for (int r = 0; r < s->ranks; r++)
        if (atomic_load(&s->area[r].run) > now) now = atomic_load(&s->area[r].run);
    for (int r = 0; r < s->ranks; r++) {
        const par_origin *o = &s->area[r].origin;
        int64_t last = atomic_load(&o->last);
        if (last && last + 1 >= now && (!first || is_before(o, first))) first = o;
    }
    return first;
}

/* "ranks 0, 2 and 3"; counts them. */
static int names_of(const uint64_t *ranks, int world, char *to, size_t room)
{
    int count = 0, named = 0;
    size_t used = 0;
    for (int r = 0; r < world; r++) count += ranks[r / 64] >> r % 64 & 1;
    for (int r = 0; r < world && used < room; r++) {
        if (!(ranks[r / 64] >> r % 64 & 1)) continue;
        const char *before = named == 0 ? (count == 1 ? "rank " : "ranks ") : named + 1 == count ? " and " : ", ";
        used += (size_t)snprintf(to + used, room - used, "%s%d", before, r);
        named++;
    }
    return count;
}

void par_not_finite_text(par_world *world, char *text, size_t room)
{
    const par_segment *s = world->segment;
    *text = 0;
    if (s && world->mpi) par_mpi_listen(world);
    const par_origin *o = s ? find_origin(s) : NULL;
    if (!o) return;
    uint64_t ranks[PAR_MAX_RANKS / 64] = { 0 };
    for (int r = 0; r < s->ranks; r++)
        for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++)
            if (atomic_load(&s->area[r].origin.last) && is_same(&s->area[r].origin, o))
                ranks[i] |= atomic_load(&s->area[r].origin.ranks[i]);
    char names[512] = "", step[PAR_STEP_BYTES];
    int count = names_of(ranks, s->ranks, names, sizeof names);
    const char *what = count == 0 ? "the sum of finite parts" : count == 1 ? "'s part" : "' parts";
    const char *call = par_collective_name((par_collective)atomic_load(&o->kind));
    snprintf(text, room, "%s%s %s the first not to be finite, in %s (call %lld of %s)", names, what, count > 1 ? "were" : "was",
             call, (long long)atomic_load(&o->call), par_step_text(atomic_load(&o->step), step));
}
