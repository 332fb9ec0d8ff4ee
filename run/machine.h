/* A machine as a plan's time needs to know it: a description by name, from a JSON file, or this one measured.
 *
 * Every number is of one rank, which has a device to itself.
 */
#ifndef TANDEM_RUN_MACHINE_H
#define TANDEM_RUN_MACHINE_H

#include "run/loop.h"

typedef struct run_link {
    double bytes_per_s;           /* that one rank sends and receives at a time */
    double latency_s;             /* of one hop */
} run_link;

typedef struct run_machine {
    char name[64];                /* "": none, nothing can be said of time */
    char source[256];             /* where the numbers come from, as one phrase */
    td_machine peak;              /* FLOP/s by dtype, bytes of memory a second */
    double efficiency, attention; /* the part of peak FLOP/s that calls reach, and that attention does; 0: as others */
    double traffic;               /* the part of bytes a second that calls reach; 0: all */
    double unhidden;              /* of computing and moving bytes the part of the shorter that the longer does not hide: 0 to 1 */
    double call_s, collective_s;  /* what each call takes besides, and each collective besides its ring */
    int collective_multiprocessors; /* that a collective takes of a GPU, in a rehearsal; 0: not known */
    int64_t memory_bytes;         /* that a rank may hold; 0: not known */
    int host_ranks;               /* ranks of one host */
    run_link inside, across;      /* hosts; each rank has its own link out of its host */
    run_link host;                /* between a rank's device and its host; 0: not known, so that nothing can be offloaded */
    double host_bytes_per_s;      /* a rank's part of its host's memory bandwidth: what is computed there takes it */
    bool overlaps;                /* collectives run beside computation */
    td_gpu gpu;                   /* a rank's device; name "": not said */
} run_machine;

/* "h200x8, ..., cpu": what --machine takes besides a file. */
void run_machine_names(char *to, size_t room);
/* The machine of --machine ("" without), for run->ranks ranks; --host-ranks overrides. false after an error: a name that is not known,
 * a file that cannot be read or is wrong, which is told with the line or the member. */
bool run_machine_of(run_loop *run, run_machine *to);

/* The GPU that a plan for --device cuda is for: --machine's, or an H200 where that says none (*said is false). run->td is a context that
 * reads the file. false after an error. */
bool run_machine_gpu(run_loop *run, td_gpu *to, bool *said);

/* Seconds a task takes at best: the larger of FLOPs / peak and bytes / bandwidth. */
double run_floor_s(const td_machine *m, const td_profile_task *task);

/* ---- Time: of the calls of one step, in order.
 *
 * Calls of a queue (td_queue_kind) follow one another; each begins when the one before it has ended and those of other queues that it waits
 * for. Where collectives do not overlap there is one queue. Nothing else costs time: not the host otherwise, not the loading of data. */
typedef struct run_estimate {
    double step_s;
    double compute_s, comm_s;     /* the calls of either kind one after the other */
    double copy_s, host_s;        /* the same of copies between device and host, and of what the host computes */
    double exposed_s;             /* of the last three, where the device computes nothing */
} run_estimate;

/* Ranks of the call's group that are on one host, and how many hosts it spans. */
void run_spread(const run_machine *m, const par_call *call, int *on_host, int *hosts);
/* A ring over the group: 2 (n - 1) hops for an all-reduce, else n - 1, of which hosts - 1 (twice that) leave a host; and bytes sent over
 * the slowest link crossed. Ranks of a group on one host share their links out of it. */
double run_collective_s(const run_machine *m, const par_call *call);
/* Adds the step's time `times` over. false without memory. */
bool run_estimate_add(td_context *td, const run_machine *m, const par_call *calls, int64_t count, int64_t times, run_estimate *to);
/* What the estimate takes for granted, on one line. */
void run_estimate_assumptions(const run_machine *m, char *to, size_t room);

#endif
