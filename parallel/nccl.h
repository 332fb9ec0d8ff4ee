/* Inside parallel/: what transport `nccl` is made of.
 *
 *     transport_nccl.c  the collectives
 *     nccl.c            communicators: made, called and given back
 *     nccl_windows.c    memory that ranks reach in one another
 *     nccl_watch.c      the thread that sees failures, and gives communicators up
 *     nccl_bare.c       calls that nothing is around, to compare with
 *     nccl_library.c    NCCL, loaded
 *
 * Two threads call NCCL: the rank's own, which makes communicators and puts collectives on the queue, and the watcher, which looks for
 * errors and alone gives communicators up or back. Communicators do not block: a call that is in progress is asked after until it is not,
 * by the thread that made it, which holds `lock` and leaves when the world stops. So the watcher, which stops the world before it takes
 * the lock, finds nobody inside. One call that does not return all the same, it waits for two seconds and then does what ends it.
 */
#ifndef TANDEM_PARALLEL_NCCL_H
#define TANDEM_PARALLEL_NCCL_H

#include <pthread.h>

#include "parallel/device.h"
#include "parallel/group.h"
#include "parallel/nccl_library.h"

typedef struct par_nccl_options {
    const char *library;                                /* its file */
    const par_device *device;                           /* use, copy, number, marks, for windows wait and, for calls made bare, memory are
                                                           asked for */
    bool windows;                                       /* as par_options.windows */
    bool alone;                                         /* tests: ranks that are alone on an axis have a communicator, too */
} par_nccl_options;

/* Ranks first, first + stride ..., and what connects them. */
typedef struct par_nccl_group {
    struct par_nccl_group *next;
    int first, stride, size;
    nccl_comm comm;                                     /* NULL: could not be made */
    nccl_window window[TD_PIECES];                      /* NULL: none, also of ranks that NCCL does not connect by their memory */
} par_nccl_group;

/* Behind a run that has been handed over. The host is ahead of a GPU by fewer runs than there are marks. */
enum { PAR_NCCL_MARKS = 8 };
typedef struct par_nccl_mark {
    void *mark;
    int64_t step;                                       /* as par_step_text tells it */
    uint32_t posted;                                    /* runs that this rank had posted */
} par_nccl_mark;

typedef struct par_nccl {
    par_local *me;
    par_nccl_options options;
    nccl_library lib;
    td_transport inner;
    td_sent run;                                        /* what has been called since the last run was handed over */
    int device;                                         /* -1: not known yet */
    bool apart;                                         /* ranks' values lie differently: they have no windows any more */
    td_settled registered;                              /* with each communicator of the mesh; of zeros: nothing */
    void *reaches;                                      /* the queue of the context that has windows, or may make some; NULL: none. Set and
                                                           cleared under marks_lock */
    _Atomic int64_t windows;                            /* that NCCL has made, in all */

    pthread_mutex_t lock;                               /* of a thread that calls NCCL */
    par_nccl_group *groups;                             /* in the order of making, the last first */
    par_nccl_group *of_slot[PAR_SLOTS];                 /* of the mesh; NULL: the rank is alone there */
    _Atomic int64_t asked;                              /* times that a call in progress was asked after */
    _Atomic bool given_up;                              /* communicators are to be touched no more */

    pthread_mutex_t marks_lock;
    par_nccl_mark mark[PAR_NCCL_MARKS];
    int64_t marked, passed;                             /* marks put; known to have been passed */
    int64_t handed_run;                                 /* area->run when the last one was handed over */

    pthread_t watcher;
    bool watched;                                       /* it has been started */
    _Atomic bool closing, gone;                         /* it is to end; it has ended */
} par_nccl;

/* ---- nccl.c ---------------------------------------------------------------------------------------------- */

/* par_transport_nccl with another library. */
bool par_nccl_open(par_world *world, int rank, td_context *td, const td_transport *inner, const par_nccl_options *options, td_transport *out);
/* Gives the communicators of this process's ranks back, within the world's deadline; of a stopped world they have been given up. Contexts
 * are closed: a graph keeps the communicators that it uses. */
void par_nccl_close(par_world *world);
/* Around a call of NCCL by the rank's own thread. false: the world has been stopped, and the context knows. The end waits for what the call's
 * `result` leaves in progress, and stops the world where it is an error: "rank 1 <doing>: ...". */
bool par_nccl_begin(par_nccl *n);
bool par_nccl_end(par_nccl *n, nccl_comm comm, int result, const char *doing);
/* Waits while the communicator is in progress, at most as long as others wait for a rank. Returns what came out: NCCL_IN_PROGRESS: it took
 * too long, or the world was stopped. */
int par_nccl_settle(par_nccl *n, nccl_comm comm, int result);
/* Stops the world for an error of NCCL's, unless those who know better why do so first: who started a rank hears that it was killed. */
void par_nccl_stop(const par_nccl *n, int result, const char *doing);

/* So many seconds of waiting for somebody to know better; in a world of a shorter deadline no more than that. */
static inline double par_nccl_grace(const par_nccl *n, double seconds)
{
    double timeout_s = n->me->world->segment->timeout_s;
    return seconds < timeout_s ? seconds : timeout_s;
}

/* ---- nccl_windows.c --------------------------------------------------------------------------------- */

extern const td_reach par_nccl_reach;
/* The context of that queue, and no other, may have windows now; NULL: any. */
void par_nccl_reaches(par_nccl *n, void *queue);

/* ---- nccl_watch.c ---------------------------------------------------------------------------------------- */

/* Starts the watcher; false after the context has failed. */
bool par_nccl_watch(par_nccl *n);
/* A run has been handed over: marks the queue behind it. */
void par_nccl_mark_run(par_nccl *n);

/* ---- transport_nccl.c ------------------------------------------------------------------------------------ */

void par_nccl_fill(par_nccl *n, td_transport *out);
extern const int par_nccl_dtype[TD_DTYPES];
/* all_to_all among so many ranks, which NCCL before 2.28 has in parts. count: elements of a part; what it gives is NCCL's. */
int par_nccl_exchange(const nccl_library *lib, nccl_comm comm, int ranks, const void *in, void *out, int64_t count, td_dtype dtype, void *queue);

#endif
