/* How long ranks compute in a step, and which one all wait for.
 *
 * A step ends for all when the slowest rank has come to its last collective, so who is slow is not seen in the time of a step.
 * Each rank posts with a step (agree.c) what it has computed since the last one: the time less collectives, less waiting for
 * agreement, less what it was busy with (files, printing). The first rank compares.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "parallel/mpi.h"

static const double SLOW = 1.5;             /* times the others' median */
static const double LEAST_S = 1e-3;         /* longer than it, a step: less is noise, and nobody's loss */
enum { WINDOW = 20, MOSTLY = 15, FIRST = 2 }; /* steps: looked at together; slow of those; left out, which plan and allocate */

int64_t par_nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static par_area *area_of(const par_local *me) { return &me->world->segment->area[me->rank]; }

void par_add_waited(par_local *me, double begin)
{
    atomic_fetch_add(&area_of(me)->waited_ns, (int64_t)(1e9 * (par_seconds() - begin)));
}

double par_waited_s(const par_world *world, int rank)
{
    bool there = world->segment && rank >= 0 && rank < world->ranks;
    return there ? 1e-9 * (double)atomic_load(&world->segment->area[rank].waited_ns) : 0;
}

static double busy_s(const par_local *me)
{
    int64_t since = atomic_load(&me->busy_since_ns), busy = atomic_load(&me->busy_ns);
    return 1e-9 * (double)(since ? busy + par_nanoseconds() - since : busy);
}

double par_pace_take(const par_local *me)
{
    const par_pace *p = &me->pace;
    if (p->since == 0) return 0; /* the first step */
    double s = par_seconds() - p->since - (par_waited_s(me->world, me->rank) - p->waited) - (busy_s(me) - p->busy);
    return s > 0 ? s : 0;
}

void par_pace_begin(par_local *me)
{
    me->pace.since = par_seconds();
    me->pace.waited = par_waited_s(me->world, me->rank);
    me->pace.busy = busy_s(me);
}

/* ---- Comparing ------------------------------------------------------------------------------------------- */

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void sort(const double *seconds, int ranks, double *sorted)
{
    for (int r = 0; r < ranks; r++) sorted[r] = seconds[r];
    qsort(sorted, (size_t)ranks, sizeof *sorted, by_size);
}

/* Of the sorted numbers but one that is `own`; there are two at least. */
static double median_of_others(const double *sorted, int ranks, double own)
{
    int at = 0, others = ranks - 1, middle = others / 2;
    while (at < ranks && sorted[at] < own) at++;
    double upper = sorted[middle < at ? middle : middle + 1];
    if (others % 2) return upper;
    return (sorted[middle <= at ? middle - 1 : middle] + upper) / 2;
}

static bool is_slow(double seconds, double others, double steps)
{
    return seconds > SLOW * others && seconds > others + steps * LEAST_S;
}

static void find_host(const par_world *world, int rank, char *name, size_t room)
{
    if (world->mpi) snprintf(name, room, "%s", world->mpi->who[rank].host);
    else if (gethostname(name, room) != 0) snprintf(name, room, "this host");
    name[room - 1] = 0;
}

static void tell_slow(par_local *me, int rank, double seconds, double others)
{
    char host[PAR_HOST_BYTES];
    double times = others > 0 ? seconds / others : (double)INFINITY;
    find_host(me->world, rank, host, sizeof host);
    td_message(me->td, TD_LOG_WARNING,
               "rank %d on %s computes %.1f times as long as the others' median, %.3g ms a step and not %.3g, over %d steps: "
               "all wait for it", rank, host, times, 1e3 * seconds / WINDOW, 1e3 * others / WINDOW, WINDOW);
}

/* Whether some rank was slow over the last steps, and in most of them. */
static void judge_window(par_local *me)
{
    par_pace *p = &me->pace;
    double seconds[PAR_MAX_RANKS] = { 0 }, sorted[PAR_MAX_RANKS];
    int ranks = me->world->ranks;
    for (int r = 0; r < ranks; r++) seconds[r] = p->rank[r].window;
    sort(seconds, ranks, sorted);
    for (int r = 0; r < ranks; r++) {
        double others = median_of_others(sorted, ranks, seconds[r]);
        if (!p->told && p->rank[r].slow >= MOSTLY && is_slow(seconds[r], others, WINDOW)) {
            p->told = true;
            tell_slow(me, r, seconds[r], others);
        }
        p->rank[r].window = 0;
        p->rank[r].slow = 0;
    }
}

void par_pace_compare(par_local *me, uint32_t index)
{
    par_pace *p = &me->pace;
    double seconds[PAR_MAX_RANKS] = { 0 }, sorted[PAR_MAX_RANKS];
    int ranks = me->world->ranks;
    if (me->rank != 0 || index < FIRST) return;
    for (int r = 0; r < ranks; r++) {
        const par_area *area = &me->world->segment->area[r];
        if (!par_reached(&area->posted, index + 1)) return;
        seconds[r] = area->post[index % PAR_POSTS].computed_s;
    }
    sort(seconds, ranks, sorted);
    for (int r = 0; r < ranks; r++) {
        p->rank[r].all += seconds[r];
        p->rank[r].window += seconds[r];
        p->rank[r].slow += is_slow(seconds[r], median_of_others(sorted, ranks, seconds[r]), 1);
    }
    if (++p->steps % WINDOW == 0) judge_window(me);
}

double par_computed_s(const par_world *world, int of)
{
    const par_local *me = world->local && world->first == 0 ? &world->local[0] : NULL;
    if (!me || of < 0 || of >= world->ranks || !me->pace.steps) return (double)NAN;
    return me->pace.rank[of].all / (double)me->pace.steps;
}
