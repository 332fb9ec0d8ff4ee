/* Parallel training as placement: strategies, the ranks of one machine, and what holds them together.
 *
 * A model never sees this header. A program that brings its own loop opens a context, attaches it to a world with a
 * strategy, and records as on one rank:
 *
 *     par_world *world = par_world_threads(4, &(par_world_options){ .timeout_s = 10 });
 *     ... in thread r:  td_context *td = td_open(NULL);  par_attach(td, world, r, &(par_options){ .strategy = "fsdp" });
 */
#ifndef TANDEM_PARALLEL_H
#define TANDEM_PARALLEL_H

#include <tandem/core.h>
#include <tandem/rewrite.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Strategies ----------------------------------------------------------------------------------------- */

typedef struct par_options {
    const char *strategy;       /* "single" (default on one rank), "ddp", "fsdp" */
    int64_t bucket_bytes;       /* ddp: size of a unit; 0: 25 MiB, the first one 1 MiB */
    const char *units;          /* fsdp: name patterns, comma-separated, each match of '*' or name prefix one unit, as "h.*,out";
                                   NULL: one unit for each module that has parameters. What matches none is the root's. */
    int prefetch;               /* fsdp: units gathered ahead of use; 0: 1 */
} par_options;

/* ---- Worlds --------------------------------------------------------------------------------------------- */

/* Ranks that can talk: threads of this process, or processes of this machine that share memory. A world stops once,
 * with one text: when a rank fails, ends early, dies, is late or disagrees, every rank's next collective or step
 * fails with it. */
typedef struct par_world par_world;

typedef struct par_world_options {
    double timeout_s;           /* how long a collective waits for another rank; 0: 60 */
    int64_t staging_bytes;      /* shared memory of a rank; 0: 512 KiB. Larger data goes through it in parts. */
} par_world_options;

/* A world of 1 to 256 threads. NULL: out of memory, or options that cannot be. Close it after all ranks have ended. */
TD_API par_world *par_world_threads(int ranks, const par_world_options *options);
/* The world this process was launched into by par_launch; *rank is its rank. NULL when it was not launched, or (with
 * par_launched() true) when memory cannot be had. */
TD_API par_world *par_world_join(int *rank);
/* A world of any size in which nothing can be sent: for planning. NULL: out of memory, or no such rank. */
TD_API par_world *par_world_none(int ranks, int rank);
TD_API void par_world_close(par_world *world); /* NULL is allowed */
TD_API int par_world_size(const par_world *world);

/* Stops the world: every rank fails with "rank R: <text>". The first text is kept. */
TD_API void par_fail_world(par_world *world, int rank, const char *text);
/* What the world was stopped with; "": it was not. */
TD_API const char *par_world_error(const par_world *world);

/* Joins the context to the world as `rank` under a strategy. Errors (in the context): an unknown strategy, a rank or
 * world size that cannot be, a pattern that matches nothing. */
TD_API bool par_attach(td_context *td, par_world *world, int rank, const par_options *options);

/* Runs body in `ranks` threads with a world between them; returns the first non-zero result, by rank. A non-zero result
 * stops the world. -1 when no world or thread can be had. */
TD_API int par_run_threads(int ranks, const par_world_options *options,
                           int (*body)(par_world *world, int rank, void *user), void *user);

/* Starts this program again `ranks` times with the same arguments, each in its rank of one world, and waits for all.
 * Rank 0 has this process's streams; of the others only stderr is kept, for the message. Returns the exit status the
 * program should end with: 0 when all ranks ended with 0, else that of the first that failed (1 for a signal); then
 * `message` (room bytes, "" on success) says why, once for all. So a rank does not print its failure: it gives it to
 * par_fail_world. When a rank dies, stops answering or fails, all others are ended within timeout + 5 s; none is left
 * behind, even when this process is killed. SIGINT, SIGTERM and SIGHUP are passed on, so that ranks can save and end;
 * after timeout + 3 s in which no rank was busy (par_busy), or at a second signal, they are killed. SIGUSR1 is passed
 * on to rank 0 alone, and ignored by ranks that have no handler of it. The calling thread must stay until it returns. */
TD_API int par_launch(int ranks, char **argv, const par_world_options *options, char *message, size_t room);
TD_API bool par_launched(void);   /* this process is a rank that par_launch started */

/* Between busy true and false the rank does what may take longer than a collective waits (saving, printing): while a rank is busy the
 * others' deadlines stand still, for ten minutes or ten timeouts at most. Calls nest. */
TD_API void par_busy(par_world *world, int rank, bool busy);

/* Bytes the rank has sent (ring-optimal, as td_transport counts) and collectives it has called since the world opened;
 * calls may be NULL. */
TD_API int64_t par_sent(const par_world *world, int rank, int64_t *calls);

#ifdef __cplusplus
}
#endif

#endif
