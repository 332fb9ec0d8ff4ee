/* The processes of an MPI world as ranks: joining it, leaving it, and what it knows of itself.
 *
 * Two communicators of our own, duplicates of the world's: one for data (transport_mpi.c), one for messages. Joining and
 * leaving may block in MPI for ever, so they run in a thread of their own that is left behind at the deadline.
 */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "core/hash.h"
#include "core/thread.h"
#include "parallel/meet.h"
#include "parallel/mpi.h"

static const double SPEAK_S = 0.3;    /* how long a rank that failed listens whether another one tells the error */
static const double LEAVE_S = 5;      /* for MPI to end once all ranks have */
static const double LOOK_S = 0.3;     /* what all notice the first of them tells, when the others have seen that it is there */
enum { SLICE_NS = 20000000 };         /* between looks for a signal */
enum { AFTER_RANK_0_S = 4 };          /* what all have noticed rank 0 tells, and mpirun ends the others 3 s later */

/* Where not all have come. */
static const char to_set[] = "see that all were started, and where hosts have several networks name the one between them, as "
                             "OMPI_MCA_btl_tcp_if_include=10.0.0.0/24";

bool par_mpi_same_host(const par_mpi *m, int a, int b) { return !strcmp(m->who[a].host, m->who[b].host); }

/* ---- Joining --------------------------------------------------------------------------------------------- */

/* What may block for ever runs in a thread that is left alone when it does. */
typedef struct blocking {
    par_mpi *mpi;
    void (*call)(par_mpi *mpi, char *message, size_t room);
    bool joins;            /* it is of no use where another rank is gone */
    par_siblings siblings; /* when it was last looked */
    char message[PAR_MESSAGE_BYTES];
} blocking;

static void *run_blocking(void *argument)
{
    blocking *b = argument;
    b->call(b->mpi, b->message, sizeof b->message);
    return NULL;
}

/* false: it did not end in time, or a rank is gone (what it uses must stay), or no thread could be had. mpirun, before it ends
 * all ranks for the death of one, continues them: then is the time to look who it was. */
static bool run_within(blocking *b, double seconds, bool *started)
{
    static const struct timespec at_once;
    pthread_t thread;
    sigset_t continued, before;
    sigemptyset(&continued);
    sigaddset(&continued, SIGCONT);
    pthread_sigmask(SIG_BLOCK, &continued, &before);
    double begin = par_seconds();
    bool done = false;
    *started = td_thread_start(&thread, run_blocking, b) == 0;
    while (*started && !done && !b->siblings.any_gone && par_seconds() < begin + seconds) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += SLICE_NS;
        if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
        done = pthread_timedjoin_np(thread, NULL, &until) == 0;
        if (!done && b->joins && sigtimedwait(&continued, NULL, &at_once) == SIGCONT) b->siblings = par_siblings_look();
    }
    if (*started && !done) pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return done;
}

static void initialise(par_mpi *m, char *message, size_t room)
{
    const mpi_library *lib = &m->lib;
    int begun = 0, over = 0, level = 0;
    bool ok = lib->initialized(&begun) == MPI_OK && lib->finalized(&over) == MPI_OK;
    if (ok && over) {
        snprintf(message, room, "this process has been in a world and left it; it cannot join again");
        return;
    }
    m->ours = ok && !begun;
    ok = ok && (begun || lib->init_thread(NULL, NULL, MPI_SERIALIZED, &level) == MPI_OK);
    ok = ok && lib->comm_dup(lib->world, &m->data) == MPI_OK && lib->comm_dup(lib->world, &m->messages) == MPI_OK;
    ok = ok && lib->comm_set_errhandler(m->data, lib->errors_return) == MPI_OK;
    ok = ok && lib->comm_set_errhandler(m->messages, lib->errors_return) == MPI_OK;
    ok = ok && lib->comm_size(m->data, &m->ranks) == MPI_OK && lib->comm_rank(m->data, &m->rank) == MPI_OK;
    if (!ok) snprintf(message, room, "MPI could not be started");
    else if (!begun && level < MPI_SERIALIZED) snprintf(message, room, "this MPI was built without threads, which are needed");
}

static uint64_t hash_of_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 0;
    return td_hash_bytes(0, &set, sizeof set);
}

/* Of this boot of this machine and its process numbers: hosts may share a name, and numbers. 0: not known. */
static uint64_t hash_of_processes(void)
{
    struct stat numbers;
    char boot[64] = "";
    FILE *from = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (!from) return 0;
    bool read = fgets(boot, sizeof boot, from) != NULL;
    fclose(from);
    if (!read || stat("/proc/self/ns/pid", &numbers) != 0) return 0;
    return td_hash_text(boot) + (uint64_t)numbers.st_ino;
}

/* Tells all who this is, and waits until all have: the first message to each rank also connects to it. */
static bool greet(par_world *world, char *message_text, size_t room)
{
    par_mpi *m = world->mpi;
    par_greeting g = { .cores = hash_of_cores(), .process = (int64_t)getpid() };
    g.processes = hash_of_processes();
    if (gethostname(g.host, sizeof g.host) != 0) snprintf(g.host, sizeof g.host, "unknown");
    g.host[sizeof g.host - 1] = 0;
    if (!par_mpi_greet(world, &g)) {
        snprintf(message_text, room, "%s", par_broken(world));
        return false;
    }
    double begin = par_seconds();
    for (int r = 0; r < m->ranks; r++) {
        while (!m->greeted[r] && !par_broken(world)) {
            double waited = par_seconds() - begin;
            par_mpi_listen(world);
            par_mpi_rest(waited);
            if (waited < world->segment->timeout_s) continue;
            snprintf(message_text, room, "rank %d of %d did not join within %g s: %s", r, m->ranks, world->segment->timeout_s, to_set);
            if (m->rank > 0) sleep(AFTER_RANK_0_S);
            return false;
        }
    }
    return true; /* a world that some rank has stopped already is one: the first step says so */
}

static par_mpi *new_mpi(char *message, size_t room)
{
    par_mpi *m = calloc(1, sizeof *m);
    if (!m) {
        snprintf(message, room, "out of memory for a world");
        return NULL;
    }
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&m->lock, &kind);
    pthread_mutexattr_destroy(&kind);
    if (mpi_library_load("libmpi.so.40", &m->lib, message, room)) return m;
    free(m);
    return NULL;
}

static bool make_room(par_world *world)
{
    par_mpi *m = world->mpi;
    size_t ranks = (size_t)m->ranks;
    m->received = malloc(par_mpi_message_bytes());
    m->greeted = calloc(ranks, sizeof *m->greeted);
    m->who = calloc(ranks, sizeof *m->who);
    return m->received && m->greeted && m->who;
}

static void await_siblings(const par_siblings *s)
{
    if (s->speaks) nanosleep(&(struct timespec){ .tv_nsec = (long)(1e9 * LOOK_S) }, NULL);
    else sleep(AFTER_RANK_0_S);
}

/* The library's part of joining. What MPI may still use is not freed on failure. */
static par_mpi *enter(const par_world_options *options, char *message, size_t room)
{
    par_mpi *m = new_mpi(message, room);
    blocking *b = m ? calloc(1, sizeof *b) : NULL;
    if (m && !b) snprintf(message, room, "out of memory for a world");
    if (!b) return NULL;
    double seconds = options && options->timeout_s > 0 ? options->timeout_s : PAR_TIMEOUT_S;
    bool started;
    *b = (blocking){ .mpi = m, .call = initialise, .joins = true };
    if (!run_within(b, seconds, &started)) {
        bool gone = b->siblings.any_gone;
        par_siblings now = gone ? b->siblings : par_siblings_look();
        await_siblings(&now);
        if (gone) snprintf(message, room, "not all processes came to their world%s", now.text);
        else if (started) snprintf(message, room, "not all processes came to their world within %g s%s: %s", seconds, now.text, to_set);
        else snprintf(message, room, "no thread could be started");
        return NULL;
    }
    snprintf(message, room, "%s", b->message);
    free(b);
    if (!*message) return m;
    free(m);
    return NULL;
}

par_world *par_mpi_join(int expected, int ranks, const par_world_options *options, char *message, size_t room)
{
    if (ranks > PAR_MAX_RANKS) {
        snprintf(message, room, "%d ranks were started, but a world has at most %d", ranks, PAR_MAX_RANKS);
        return NULL;
    }
    par_mpi *m = enter(options, message, room);
    if (!m) return NULL;
    if (m->rank != expected || m->ranks != ranks) {
        snprintf(message, room, "this process was started as rank %d of %d, but MPI has it as rank %d of %d: start it with the mpirun or "
                 "srun (--mpi=pmix) of the Open MPI that is installed", expected, ranks, m->rank, m->ranks);
        free(m);
        return NULL;
    }
    par_world *world = calloc(1, sizeof *world);
    if (world) world->mpi = m;
    if (!world || !par_segment_open(world, ranks, options, NULL) || !par_open_local(world, m->rank, 1) || !make_room(world)) {
        snprintf(message, room, "out of memory for a world");
        return NULL;
    }
    return greet(world, message, room) ? world : NULL;
}

/* ---- Leaving --------------------------------------------------------------------------------------------- */

static void finalise(par_mpi *m, char *message, size_t room)
{
    (void)message, (void)room;
    m->lib.finalize();
}

static bool all_ended(const par_world *world)
{
    for (int r = 0; r < world->ranks; r++)
        if (r != world->first && !atomic_load(&world->segment->area[r].ended)) return false;
    return true;
}

void par_mpi_close(par_world *world)
{
    par_mpi *m = world->mpi;
    double begin = par_seconds();
    par_mpi_tell_ended(world);
    double most = par_broken(world) ? SPEAK_S : world->segment->timeout_s;
    while ((!all_ended(world) || m->sendings) && par_seconds() - begin < most) {
        par_mpi_listen(world);
        if (par_broken(world)) most = SPEAK_S;
        par_mpi_rest(par_seconds() - begin);
    }
    if (!all_ended(world) || par_broken(world)) return; /* MPI ends with the process */
    blocking *b = calloc(1, sizeof *b);
    bool started;
    if (!b) return;
    *b = (blocking){ .mpi = m, .call = finalise };
    if (m->ours && !run_within(b, LEAVE_S, &started)) return;
    free(b);
    par_mpi_free_sendings(m);
    free(m->received);
    free(m->greeted);
    free(m->who);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

/* ---- What such a world knows ----------------------------------------------------------------------------- */

bool par_tells_error(par_world *world, int rank)
{
    char message[256];
    int own, ranks;
    if (!world) return (par_started(&own, &ranks, message, sizeof message) == PAR_ALONE && !*message) || par_meet_speaks();
    if (world->meet) return atomic_load(&world->segment->broken) == rank + 1;
    if (!world->mpi) return true;
    double begin = par_seconds();
    while (par_seconds() - begin < SPEAK_S) {
        par_mpi_listen(world);
        par_mpi_rest(SPEAK_S);
    }
    for (int r = 0; r < world->ranks; r++)
        if (*world->segment->area[r].message) return r == rank;
    return true;
}

int par_neighbours(const par_world *world, int rank, bool same_cores, int *index)
{
    const par_mpi *m = world->mpi;
    int count = 0;
    *index = rank;
    if (world->rehearsal.seconds) return 1;
    if (!m) return world->ranks;
    for (int r = 0; r < world->ranks; r++) {
        if (r == rank) *index = count;
        count += par_mpi_same_host(m, r, rank) && (!same_cores || m->who[r].cores == m->who[rank].cores);
    }
    return count;
}

void par_world_text(const par_world *world, char *text, size_t room)
{
    const par_mpi *m = world->mpi;
    int hosts = m ? 0 : 1;
    size_t used = 0;
    char names[256] = "";
    for (int r = 0; m && r < world->ranks; r++) {
        bool first = true;
        for (int before = 0; before < r && first; before++) first = !par_mpi_same_host(m, before, r);
        if (!first) continue;
        hosts++;
        if (used < sizeof names) used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", hosts == 1 ? " (" : ", ", m->who[r].host);
    }
    if (world->rehearsal.seconds) {
        snprintf(text, room, "rank 0 of %d alone, in a rehearsal", world->ranks);
        return;
    }
    const char *on_device = world->on_device;
    bool staged = on_device && !strcmp(on_device, "staged");
    snprintf(text, room, "%d ranks on %d host%s%s%s, transport %s%s%s", world->ranks, hosts, hosts == 1 ? "" : "s", names, *names ? ")" : "",
             on_device ? on_device : "", staged ? " over " : "", on_device && !staged ? "" : m ? "mpi" : "local");
}
