/* The watcher of a rank's GPU: sees that another rank has failed, that NCCL has, or that the GPU does not get on, and ends what waits.
 *
 * The rank's own thread may be waiting for the GPU, in which a collective waits for a rank that will not come. The watcher stops the world
 * with the reason, if it is not stopped already, and gives the communicators up: kernels end, the host's waits return, and the rank hears
 * from its transport that what was computed is to be thrown away. Giving up comes back once the graphs are gone that use communicators.
 *
 * Where windows have been made that may not be so: NCCL's kernels for them (before 2.29.7), and copy engines, do not look whether they are given
 * up. A GPU that then gets on with nothing for some seconds is taken to wait there, as does the thread that waits for it: the process ends. What
 * is not seen is a thread that cannot hand over more, because the GPU has taken as many calls as it can.
 *
 * How far the GPU has come is known by marks behind each run. Where it has not come to the next one, nor the host to its next call, for
 * as long as ranks wait for one another, and no rank is busy, somebody is late.
 */
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/thread.h"
#include "parallel/mpi.h"
#include "parallel/nccl.h"

static const double LOOK_S = 0.02;       /* between looks */
static const double SECONDS_IN_NCCL = 2; /* a call that has not returned by then does not */
static const double ENDED_S = 5;         /* what another rank had to give before it ended has come by then */
static const double OUT_S = 2.5;         /* a GPU whose communicators are given up has come out by then; less than a launcher's patience */
static const double DOUBT_S = 2;         /* who does not know whom its GPU waits for leaves so long to others, to say what they know */

/* What the rank had come to when the watcher last looked. */
typedef struct progress {
    int64_t passed, run, call, asked;
    bool on_device, on_host;             /* a run waits there to be done */
    bool in_call;                        /* the rank's own thread is in one of NCCL's, which has a deadline once it has returned */
    par_nccl_mark at;                    /* the oldest such run */
    par_patience patience;
} progress;

static par_area *own_area(const par_nccl *n) { return &n->me->world->segment->area[n->me->rank]; }

/* ---- Runs ------------------------------------------------------------------------------------------------ */

/* Where all marks are waited for the last one moves on. */
void par_nccl_mark_run(par_nccl *n)
{
    const par_area *area = own_area(n);
    pthread_mutex_lock(&n->marks_lock);
    if (n->marked - n->passed < PAR_NCCL_MARKS) n->marked++;
    par_nccl_mark *m = &n->mark[(n->marked - 1) % PAR_NCCL_MARKS];
    m->step = atomic_load(&area->step);
    m->posted = atomic_load(&area->posted.value);
    n->handed_run = atomic_load(&area->run);
    if (!n->options.device->put_mark(m->mark, td_queue(n->me->td))) n->passed = n->marked; /* the GPU has failed, and is heard of */
    pthread_mutex_unlock(&n->marks_lock);
}

/* Finds the oldest run that has not been passed. */
static void look_at_runs(par_nccl *n, progress *p)
{
    const par_area *area = own_area(n);
    pthread_mutex_lock(&n->marks_lock);
    while (n->passed < n->marked && n->options.device->has_passed(n->mark[n->passed % PAR_NCCL_MARKS].mark)) n->passed++;
    p->on_device = n->passed < n->marked;
    p->on_host = atomic_load(&area->run) != n->handed_run;
    p->at = (par_nccl_mark){ .step = atomic_load(&area->step), .posted = atomic_load(&area->posted.value) };
    if (p->on_device) p->at = n->mark[n->passed % PAR_NCCL_MARKS];
    p->passed = n->passed;
    p->run = atomic_load(&area->run);
    p->call = atomic_load(&area->call);
    p->asked = atomic_load(&n->asked);
    pthread_mutex_unlock(&n->marks_lock);
}

/* Another rank that has ended, or that has not come to the run; -1: none. */
static int ended_rank(const par_nccl *n)
{
    const par_segment *s = n->me->world->segment;
    for (int r = 0; r < s->ranks; r++)
        if (r != n->me->rank && atomic_load(&s->area[r].ended)) return r;
    return -1;
}

static int rank_behind(const par_nccl *n, uint32_t posted)
{
    const par_segment *s = n->me->world->segment;
    for (int r = 0; r < s->ranks; r++)
        if (r != n->me->rank && !par_reached(&s->area[r].posted, posted)) return r;
    return -1;
}

/* Whoever is late is named, if that is known. */
static void stop_late(const par_nccl *n, const progress *p, int ended, int behind)
{
    par_world *world = n->me->world;
    char step[PAR_STEP_BYTES] = "its first step";
    int rank = n->me->rank;
    double timeout_s = world->segment->timeout_s;
    if (p->run > 0) par_step_text(p->at.step, step);
    atomic_store(&own_area(n)->cause, PAR_LATE);
    if (ended >= 0) par_break(world, rank, "rank %d ended before %s", ended, step);
    else if (behind >= 0) par_break(world, rank, "rank %d did not arrive at %s within %g s", behind, step, timeout_s);
    else
        par_break(world, rank, "rank %d%s has not come through %s within %g s, though all ranks have begun it; NCCL_DEBUG=INFO in the environment "
                  "makes NCCL tell more, and a longer timeout allows for longer steps", rank, p->on_device ? "'s GPU" : "", step, timeout_s);
}

/* A wait of the host for another rank has a deadline of its own. */
static void look_at_progress(par_nccl *n, bool in_call, progress *p)
{
    progress now = { .in_call = in_call, .patience.before = par_seconds() };
    look_at_runs(n, &now);
    bool under_way = now.on_device || now.on_host || in_call;
    bool moved = now.passed != p->passed || now.run != p->run || now.call != p->call || now.asked != p->asked;
    if (moved || !under_way || atomic_load(&own_area(n)->waits_for)) {
        *p = now;
        return;
    }
    now.patience = p->patience;
    *p = now;
    par_patient(n->me->world->segment, &p->patience);
    int ended = ended_rank(n), behind = rank_behind(n, p->at.posted);
    bool certain = !in_call && (ended >= 0 || behind >= 0 || !p->on_device);
    double most = n->me->world->segment->timeout_s + (certain ? 0 : par_nccl_grace(n, DOUBT_S));
    if (p->patience.waited >= (ended >= 0 && !in_call && ENDED_S < most ? ENDED_S : most)) stop_late(n, p, ended, behind);
}

/* ---- Communicators --------------------------------------------------------------------------------------- */

/* false: the rank's own thread is in a call, and looks itself. */
static bool look_at_communicators(par_nccl *n)
{
    char where[PAR_WHERE_BYTES];
    int result = NCCL_SUCCESS;
    if (pthread_mutex_trylock(&n->lock) != 0) return false;
    for (const par_nccl_group *g = n->groups; g && (result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS); g = g->next)
        if (g->comm && n->lib.comm_get_async_error(g->comm, &result) != NCCL_SUCCESS) result = NCCL_SUCCESS;
    pthread_mutex_unlock(&n->lock);
    if (result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS) par_nccl_stop(n, result, par_where(own_area(n), where));
    return true;
}

static bool lock_within(pthread_mutex_t *lock, double seconds)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    int64_t ns = until.tv_nsec + (int64_t)(1e9 * seconds);
    until.tv_sec += ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
    return pthread_mutex_timedlock(lock, &until) == 0;
}

/* Whether the context's GPU has work to do; a context that has closed has none. */
static bool is_at_work(par_nccl *n, progress *p)
{
    look_at_runs(n, p);
    pthread_mutex_lock(&n->marks_lock);
    bool at_work = n->reaches && !n->options.device->is_idle(n->reaches);
    pthread_mutex_unlock(&n->marks_lock);
    return at_work;
}

/* Until the world closes: the rank's own thread may still launch what it was about to. */
static void *end_process(void *argument)
{
    par_nccl *n = argument;
    par_world *world = n->me->world;
    progress p = { 0 };
    n->options.device->use(n->device);
    for (double since = par_seconds(); par_seconds() - since < par_nccl_grace(n, OUT_S);) {
        int64_t passed = p.passed;
        nanosleep(&(struct timespec){ .tv_nsec = (long)(1e9 * LOOK_S) }, NULL);
        if (atomic_load(&n->closing)) return NULL;
        if (!is_at_work(n, &p) || p.passed != passed) since = par_seconds();
    }
    if (!par_launched() && par_tells_error(world, n->me->rank)) /* else the launcher speaks */
        fprintf(stderr, "%s\nrank %d ends without its GPU, which waits in a window for a rank that does not come\n", par_broken(world), n->me->rank);
    _exit(1);
}

/* All at once: to give one up is done when kernels that may wait for another's have ended. */
static void give_up(par_nccl *n)
{
    pthread_t ending;
    atomic_store(&n->given_up, true);
    bool may_wait = par_broken(n->me->world) && atomic_load(&n->windows) > 0 && td_thread_start(&ending, end_process, n) == 0;
    bool locked = lock_within(&n->lock, par_nccl_grace(n, SECONDS_IN_NCCL));
    n->lib.group_start();
    for (par_nccl_group *g = n->groups; g; g = g->next)
        if (g->comm) n->lib.comm_abort(g->comm);
    n->lib.group_end();
    if (locked) pthread_mutex_unlock(&n->lock);
    if (may_wait) pthread_join(ending, NULL);
}

static bool has_let_go(const par_nccl *n, const par_nccl_group *g, double until)
{
    int result = NCCL_IN_PROGRESS;
    while (result == NCCL_IN_PROGRESS && !par_broken(n->me->world) && par_seconds() < until) {
        par_mpi_rest(LOOK_S);
        if (n->lib.comm_get_async_error(g->comm, &result) != NCCL_SUCCESS) return false;
    }
    return result == NCCL_SUCCESS;
}

/* Nobody else calls NCCL any more. The world stays for as long as the deadline, and a little longer: par_nccl_close. */
static void give_back(par_nccl *n)
{
    double until = par_seconds() + n->me->world->segment->timeout_s;
    bool all = true;
    for (par_nccl_group *g = n->groups; g; g = g->next) n->lib.comm_finalize(g->comm);
    for (par_nccl_group *g = n->groups; g && all; g = g->next) all = has_let_go(n, g, until);
    if (!all) {
        give_up(n);
        return;
    }
    for (par_nccl_group *g = n->groups; g; g = g->next) n->lib.comm_destroy(g->comm);
}

/* ---- The thread ------------------------------------------------------------------------------------------ */

static void *watch(void *argument)
{
    par_nccl *n = argument;
    par_world *world = n->me->world;
    progress p = { .patience.before = par_seconds() };
    n->options.device->use(n->device);
    while (!atomic_load(&n->closing) && !par_broken(world)) {
        if (world->mpi) par_mpi_look(world);
        bool in_call = !look_at_communicators(n);
        look_at_progress(n, in_call, &p);
        nanosleep(&(struct timespec){ .tv_nsec = (long)(1e9 * LOOK_S) }, NULL);
    }
    if (par_broken(world)) give_up(n);
    else give_back(n);
    atomic_store(&n->gone, true);
    return NULL;
}

bool par_nccl_watch(par_nccl *n)
{
    n->handed_run = atomic_load(&own_area(n)->run);
    int error = td_thread_start(&n->watcher, watch, n);
    n->watched = error == 0;
    if (error) td_fail(n->me->td, TD_ERROR_PARALLEL, "no thread could be started: %s", strerror(error));
    return n->watched;
}
