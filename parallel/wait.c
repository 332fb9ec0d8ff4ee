/* How ranks wait for one another, and how one of them stops all.
 *
 * A rank sleeps on the word of the one rank it lacks (a futex, which works across processes and needs no lock that a
 * killed rank could hold), in slices short enough to see a stopped world soon. With a core for each rank it looks a few
 * times first. Who waits past the deadline stops the world with the name of the rank that keeps it waiting.
 */
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "parallel/mpi.h"

static const double SLICE_S = 0.05;      /* how soon a sleeping rank sees that the world was stopped */
static const double LONGEST_SLICE_S = 1; /* more has passed: this process itself was stopped, which must not count */
static const double BUSY_MOST_S = 600, BUSY_TIMEOUTS = 10; /* how long a busy rank excuses those that wait */
enum { YIELDS_LEAST = 4, YIELDS_MOST = 256 };

double par_seconds(void) { return 1e-9 * (double)par_nanoseconds(); }

/* ---- Words ----------------------------------------------------------------------------------------------- */

static void futex_wake(par_word *word) { syscall(SYS_futex, &word->value, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

/* Sleeps while the word is `value`; may wake for no reason. */
static void futex_sleep(par_word *word, uint32_t value, double seconds)
{
    struct timespec t = { .tv_sec = (time_t)seconds, .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds)) };
    syscall(SYS_futex, &word->value, FUTEX_WAIT, value, &t, NULL, 0);
}

/* The waiter adds itself before it looks, the writer writes before it looks for waiters: in the one order of
 * sequentially consistent operations at least one of them sees the other. */
void par_advance(par_word *word)
{
    atomic_fetch_add(&word->value, 1);
    if (atomic_load(&word->waiters)) futex_wake(word);
}

static void wake_waiters(par_area *area)
{
    for (int slot = 0; slot < PAR_SLOTS; slot++) futex_wake(&area->arrived[slot]);
    futex_wake(&area->posted);
    futex_wake(&area->compared);
}

/* ---- Stopping -------------------------------------------------------------------------------------------- */

static char *message_of(par_segment *s, int who)
{
    return who == PAR_LAUNCHER ? s->launcher_message : s->area[who].message;
}

const char *par_broken(const par_world *world)
{
    if (!world->segment) return NULL;
    int32_t broken = atomic_load_explicit(&world->segment->broken, memory_order_acquire);
    return broken ? message_of(world->segment, broken - 1) : NULL;
}

void par_break(par_world *world, int who, const char *format, ...)
{
    par_segment *s = world->segment;
    par_local *me = par_local_at(world, who);
    if (!s || par_broken(world)) return;
    if (me && atomic_exchange(&me->breaks, 1)) { /* another thread of the rank is about to */
        while (!par_broken(world)) sched_yield();
        return;
    }
    va_list args;
    va_start(args, format);
    vsnprintf(message_of(s, who), PAR_MESSAGE_BYTES, format, args);
    va_end(args);
    int32_t nobody = 0;
    bool first = atomic_compare_exchange_strong(&s->broken, &nobody, who + 1);
    if (world->mpi && first) par_mpi_tell_broken(world);
    for (int r = 0; r < s->ranks; r++) wake_waiters(&s->area[r]);
}

bool par_stopped(par_local *me)
{
    if (me->td) td_fail(me->td, TD_ERROR_PARALLEL, "%s", par_broken(me->world));
    return false;
}

void par_end(par_world *world, int rank)
{
    par_area *area = &world->segment->area[rank];
    atomic_store(&area->busy, 0); /* it may have been killed amid a save */
    atomic_store(&area->ended, 1);
    wake_waiters(area);
}

const char *par_step_text(int64_t step, char to[PAR_STEP_BYTES])
{
    snprintf(to, PAR_STEP_BYTES, "%sstep %lld", step % 2 ? "the evaluation of " : "", (long long)(step / 2));
    return to;
}

const char *par_place(const par_area *area, char to[PAR_PLACE_BYTES])
{
    bool began = atomic_load(&area->run) > 0;
    long long call = atomic_load(&area->call);
    int collective = atomic_load(&area->collective);
    char step[PAR_STEP_BYTES];
    par_step_text(atomic_load(&area->step), step);
    if (collective && began)
        snprintf(to, PAR_PLACE_BYTES, "%s (call %lld of %s)", par_collective_name(collective), call, step);
    else if (collective)
        snprintf(to, PAR_PLACE_BYTES, "%s (call %lld, before the first step)", par_collective_name(collective), call);
    else snprintf(to, PAR_PLACE_BYTES, "%s", began ? step : "its first step");
    return to;
}

const char *par_where(const par_area *area, char to[PAR_WHERE_BYTES])
{
    char place[PAR_PLACE_BYTES], step[PAR_STEP_BYTES];
    long long call = atomic_load(&area->call);
    bool calls = atomic_load(&area->collective) != PAR_NO_COLLECTIVE, began = atomic_load(&area->run) > 0;
    par_step_text(atomic_load(&area->step), step);
    if (!calls && began && call > 0) snprintf(to, PAR_WHERE_BYTES, "after call %lld of %s", call, step);
    else snprintf(to, PAR_WHERE_BYTES, "%s %s", calls || began ? "in" : "before", par_place(area, place));
    return to;
}

/* ---- Waiting --------------------------------------------------------------------------------------------- */

static bool has_a_core_each(const par_local *me)
{
    cpu_set_t cores;
    return me->own_cores || (sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) >= me->world->ranks);
}

/* Looking pays while it finds something: twice as long after each success, half after a failure. */
static bool look(par_local *me, const par_word *word, uint32_t target)
{
    if (me->yields == 0) me->yields = has_a_core_each(me) ? YIELDS_MOST : -1;
    for (int i = 0; i < me->yields; i++) {
        if (par_reached(word, target)) {
            me->yields = 2 * me->yields < YIELDS_MOST ? 2 * me->yields : YIELDS_MOST;
            return true;
        }
        sched_yield();
    }
    if (me->yields > YIELDS_LEAST) me->yields /= 2;
    return false;
}

/* Whether the rank waits for another one still: what it waited for may have come while the rank was stopped. */
static bool still_waits(const par_segment *s, int rank, int *next)
{
    const par_area *area = &s->area[rank];
    *next = atomic_load(&area->waits_for) - 1;
    if (*next < 0) return false;
    const par_word *word = (const par_word *)((const char *)s + atomic_load(&area->waits_word));
    return !par_reached(word, atomic_load(&area->waits_target));
}

void par_note_wait(par_local *me, int other, const par_word *word, uint32_t target)
{
    par_area *mine = &me->world->segment->area[me->rank];
    atomic_store(&mine->waits_word, (const char *)word - (const char *)me->world->segment);
    atomic_store(&mine->waits_target, target);
    atomic_store(&mine->waits_for, other + 1);
}

void par_note_waited(par_local *me)
{
    atomic_store(&me->world->segment->area[me->rank].waits_for, 0);
    if (me->world->mpi) par_mpi_waited(me->world);
}

bool par_ended_before(par_local *me, int other)
{
    char place[PAR_PLACE_BYTES];
    par_break(me->world, me->rank, "rank %d ended before %s", other, par_place(&me->world->segment->area[me->rank], place));
    return par_stopped(me);
}

/* The deadline has passed: the rank waited for may itself wait, on another axis; follow to the one that does not. */
bool par_late(par_local *me, int other)
{
    par_segment *s = me->world->segment;
    int waiter = me->rank, late = other;
    for (int hops = 0; hops < s->ranks; hops++) {
        int next;
        if (!still_waits(s, late, &next)) break;
        waiter = late;
        late = next;
    }
    char place[PAR_PLACE_BYTES];
    atomic_store(&s->area[me->rank].cause, PAR_LATE);
    par_break(me->world, me->rank, "rank %d did not arrive at %s within %g s", late, par_place(&s->area[waiter], place),
              s->timeout_s);
    return par_stopped(me);
}

/* It may be busy for a while only: where it cannot be seen it could have been stopped. */
bool par_excused(const par_segment *s, double excused)
{
    if (excused > BUSY_MOST_S && excused > BUSY_TIMEOUTS * s->timeout_s) return false;
    for (int r = 0; r < s->ranks; r++) {
        if (!atomic_load(&s->area[r].busy)) continue;
        int64_t process = atomic_load(&s->area[r].process);
        if (!process || par_process_life(process, NULL) == PAR_RUNS) return true;
    }
    return false;
}

/* Threads of a rank may be busy at once: the time is that in which any is. */
static void note_busy(par_local *me, int32_t before, bool busy)
{
    if (me && busy && before == 0) atomic_store(&me->busy_since_ns, par_nanoseconds());
    if (!me || busy || before != 1) return;
    int64_t since = atomic_exchange(&me->busy_since_ns, 0);
    if (since) atomic_fetch_add(&me->busy_ns, par_nanoseconds() - since);
}

void par_busy(par_world *world, int rank, bool busy)
{
    int32_t before = world->segment ? atomic_fetch_add(&world->segment->area[rank].busy, busy ? 1 : -1) : 0;
    if (world->segment && before == 0) atomic_store(&world->segment->area[rank].process, (int64_t)getpid());
    note_busy(par_local_at(world, rank), before, busy);
    if (world->mpi && !par_broken(world)) par_mpi_tell_busy(world, busy);
}

void par_patient(const par_segment *s, par_patience *p)
{
    double now = par_seconds(), slice = now - p->before;
    if (slice > LONGEST_SLICE_S) slice = LONGEST_SLICE_S;
    if (now - p->looked >= SLICE_S) {
        p->looked = now;
        p->excuses = par_excused(s, p->excused);
    }
    *(p->excuses ? &p->excused : &p->waited) += slice;
    p->before = now;
}

static void sleep_slice(par_local *me, par_word *word, uint32_t value, const par_patience *p)
{
    double left = me->world->segment->timeout_s - p->waited;
    if (me->world->mpi) par_mpi_wait(me->world, p->waited + p->excused);
    else futex_sleep(word, value, left < SLICE_S ? left : SLICE_S);
}

static bool sleep_until(par_local *me, int other, par_word *word, uint32_t target)
{
    par_segment *s = me->world->segment;
    par_patience patience = { .before = par_seconds() };
    for (;;) {
        bool ended = atomic_load(&s->area[other].ended); /* read before the word: what it did last still counts */
        uint32_t value = atomic_load(&word->value);
        if (par_reached(word, target)) return true;
        if (par_broken(me->world)) return par_stopped(me);
        if (ended) return par_ended_before(me, other);
        if (patience.waited >= s->timeout_s) return par_late(me, other);
        sleep_slice(me, word, value, &patience);
        par_patient(s, &patience);
    }
}

bool par_wait(par_local *me, int other, par_word *word, uint32_t target)
{
    if (par_reached(word, target) || (!me->world->mpi && look(me, word, target))) return true;
    par_note_wait(me, other, word, target);
    atomic_fetch_add(&word->waiters, 1);
    bool arrived = sleep_until(me, other, word, target);
    atomic_fetch_sub(&word->waiters, 1);
    par_note_waited(me);
    return arrived;
}
