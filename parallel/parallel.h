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

/* A strategy is a table of placements (td_place_kind), one row a mesh axis: where parameters, gradients, optimizer state and
 * accumulators are, flat unit by flat unit; sharded is along the unit. A batch is sharded over all axes, so a gradient begins
 * partial on each. What must be sent follows from that: nothing else tells strategies apart.
 * Under bf16, parameters that are whole and have sharded moments (zero1, zero2) are stored in f32 where the moments are; whole is a copy of
 * them, in bf16 but for what is read in f32. It is gathered once an update, by the first step that reads it, and kept up to the next. */
enum { PAR_STRATEGY_AXES = 2, PAR_AS_IS = -1 };
/* To any strategy "+tp:T" adds an axis of T consecutive ranks that hold the same rows of a batch and share linear layers: each has so
 * many outputs of some (their columns) and so many inputs of others (their rows), as patterns in the options say. */

typedef struct par_axis {
    const char *name;           /* NULL: no such axis */
    int parameter;
    int gradient;               /* after each backward; PAR_AS_IS: as the backward leaves it */
    int optimizer_gradient;
    int moment;
    int accumulator;            /* of gradients between steps that do not update */
} par_axis;

typedef enum par_unit_rule {
    PAR_UNITS_BUCKET,           /* by bytes, in the order gradients appear */
    PAR_UNITS_SIZE,             /* by elements; small parameters stay whole on every rank */
    PAR_UNITS_PATTERN,          /* by name */
} par_unit_rule;

typedef struct par_strategy {
    const char *name;
    par_unit_rule units;
    par_axis axis[PAR_STRATEGY_AXES]; /* rank = index along the first x size of the second + index along the second */
} par_strategy;

/* What is kept in the memory of the device's host. An update whose moments are there is computed there, by the host's cores. */
enum { PAR_OFFLOAD_OPTIMIZER = 1, PAR_OFFLOAD_PARAMETERS = 2 };

typedef struct par_options {
    const char *strategy;       /* "single" (default on one rank), "ddp" (default on several), "zero1", "zero2", "zero3", "fsdp",
                                   "hsdp:SxR": S consecutive ranks share one copy of the state, R such groups; each also with "+tp:T" */
    const par_strategy *own;    /* a strategy of the program's own, which `strategy` may name; it outlives the context. NULL: none */
    int64_t bucket_bytes;       /* ddp, zero1, zero2: size of a unit; 0: 25 MiB, the first one 1 MiB */
    int64_t unit_elements;      /* zero3: size of a unit; 0: an eighth of what trains, 5e8 at most */
    int64_t whole_elements;     /* zero3: a parameter of up to so many stays whole on every rank, but for its moments; -1: none;
                                   0: a thousandth of what trains, 1e5 at most */
    const char *units;          /* fsdp, hsdp: name patterns, comma-separated, each match of '*' or name prefix one unit, as "h.*,out";
                                   NULL: one unit for each numbered module (h.0), where there is none for each that has parameters.
                                   What is in none is the root's, which stays gathered from the forward to the backward; with NULL its
                                   parameters that are as large as the largest unit have one each. */
    const char *tensor_columns; /* +tp: name patterns as in `units`, of linear layers whose outputs are shared: weight (out, in) and bias */
    const char *tensor_rows;    /* +tp: of those whose inputs are shared: weight (out, in); NULL: none */
    bool keep_gathered;         /* fsdp, hsdp: units stay gathered from the forward to the backward */
    int keep_group;             /* fsdp, hsdp: from the forward to the backward units are shared by so many consecutive ranks, which divide
                                   those that share the state: the backward gathers among them alone; 1: as keep_gathered; 0: not kept */
    int prefetch;               /* zero3, fsdp, hsdp: units gathered ahead of use; 0: 1 */
    int offload;                /* PAR_OFFLOAD_OPTIMIZER: moments; | PAR_OFFLOAD_PARAMETERS: parameters, but for those that stay whole,
                                   as they are stored, without copies; 0: nothing. Row-sparse tables cannot be updated then. */
    const char *agreed;         /* what else must be the same on all ranks, as "batch=144 lr=0.1"; what differs is named. NULL: nothing */
    bool share_gpu;             /* ranks may share a GPU, for trying strategies and not for speed: collectives between all of them go through
                                   their hosts' memory then, or through NCCL (2.30) where NCCL_MULTI_RANK_GPU_ENABLE=1 is set. Only ranks
                                   that are processes. Else each rank has one of its own. */
    bool windows;               /* ranks that NCCL connects (2.27 and newer): the memory of their steps and state is registered with it as
                                   windows, for which it has kernels of its own and, where NCCL_CTA_POLICY=2 is set, copy engines. Where
                                   another rank dies the process may end without returning, with all ranks in it. One such context of a
                                   rank at a time. */
    td_dtype reduce_dtype;      /* gradients are summed over ranks in it: TD_BF16; 0 (TD_F32): as parameters are stored */
} par_options;

/* How many parts a batch is cut into: of so many ranks, those that share layers under `strategy` have one together. */
TD_API int par_batch_parts(const char *strategy, int ranks);
/* Those for several ranks: "ddp, fsdp, hsdp:SxR ...", where S and R are for the caller to fill in, S x R = the ranks. */
TD_API const char *par_strategy_names_for_ranks(void);

/* ---- Worlds --------------------------------------------------------------------------------------------- */

/* Ranks that can talk: threads of this process, or processes of this machine that share memory. A world stops once,
 * with one text: when a rank fails, ends early, dies, is late or disagrees, every rank's next collective or step
 * fails with it. */
typedef struct par_world par_world;

/* What ended the ranks that par_launch started. */
typedef enum par_cause {
    PAR_ENDED,                  /* all well */
    PAR_DIED,                   /* a rank was killed, stopped or not started, or exited without a word */
    PAR_LATE,                   /* a rank did not arrive in time */
    PAR_FAILED,                 /* par_fail_world, par_stop_world: an error of a rank's */
    PAR_DISAGREED,              /* ranks were about to do different things */
    PAR_INTERRUPTED,            /* a signal to the launcher */
} par_cause;

typedef struct par_world_options {
    double timeout_s;           /* how long a collective waits for another rank; 0: 60 */
    par_cause *cause;           /* of par_launch: set when it returns; NULL: nobody asks */
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

/* Whether this process was started as one of several, which can join their world, and as which: by mpirun or srun, or with
 * RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them. false with a message: these are set, but not so that a world
 * could be joined. false and "": it was started alone. */
TD_API bool par_scheduled(int *rank, int *ranks, char *message, size_t room);
/* Joins that world, at most once in a process. Under mpirun and srun it may be of several hosts: through Open MPI, which is loaded now.
 * By variables it is of this machine. NULL and a message: the library is missing, not all ranks came in time, two are the
 * same, it is out of memory; "": another rank has the message. Ranks print their own errors: see par_tells_error. par_world_close
 * waits until all ranks have ended, unless the world was stopped or shares memory. */
TD_API par_world *par_world_scheduled(const par_world_options *options, int *rank, char *message, size_t room);
/* After par_fail_world: whether this rank is the one that prints the world's error, of several that have the same. Without a world
 * (NULL): whether this process is the one that prints, of those of this machine that failed to join. Always true for a process that was
 * started alone, and where a launcher of ours prints. */
TD_API bool par_tells_error(par_world *world, int rank);
/* How many ranks run on the rank's host (and may use the same cores); *index: which of them it is. */
TD_API int par_neighbours(const par_world *world, int rank, bool same_cores, int *index);
/* GPUs that this process sees; 0: none, or a build without CUDA. */
TD_API int par_gpus(void);
/* The GPU that rank number `index` of the `ranks` on its host opens where `device` is asked for and `gpus` are seen: of "cuda" the one of
 * its number; a device that is named by its number is that of all. false and a message: they are too few. */
enum { PAR_GPU_NAME = 32 };
TD_API bool par_gpu_of_rank(const char *device, int index, int ranks, int gpus, char name[PAR_GPU_NAME], char *message, size_t room);
/* Keeps the calling thread, and those it starts from now on, on cores near the GPU that par_gpu_of_rank gives this rank of its host, where
 * cores are not all as near: an even part of those that ranks whose GPUs are at the same NUMA node share. The number of threads that it has
 * cores for then, with a message where they are: "rank 1: on cores 24-47, near its GPU". 0 and "": all is as it was, because ranks share a
 * GPU by its name or see one each, there is one node, or where threads run has been said already: by fewer CPUs than the host has, or OpenMP's
 * variables. 0 with a message: the kernel refused. */
TD_API int par_near_gpu(par_world *world, int rank, const char *device, char *message, size_t room);
/* Whether there are GPUs enough for `ranks` ranks that par_launch is to start here, which will see those that this process does: one for each
 * where `device` is "cuda", one where it is named by its number. false and a message: how many there are, or why there is none. */
TD_API bool par_check_gpus(const char *device, int ranks, char *message, size_t room);
/* "4 ranks on 2 hosts (a, b), transport mpi"; of GPUs what a context has joined it with: "transport staged over local". */
TD_API void par_world_text(const par_world *world, char *text, size_t room);

/* Stops the world: every rank fails with "rank R: <text>", from its first step on "rank R after call 14 of step 7: <text>". The
 * first text is kept. */
TD_API void par_fail_world(par_world *world, int rank, const char *text);
/* The same for what every rank finds alike: with the text as it is. */
TD_API void par_stop_world(par_world *world, int rank, const char *text);
/* What the world was stopped with; "": it was not. */
TD_API const char *par_world_error(const par_world *world);

/* Joins the context to the world as `rank` under a strategy. Options that a strategy has no use for are passed over. Errors
 * (in the context): an unknown strategy, a rank or world size that cannot be, a pattern that matches nothing. */
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
 * after timeout + 3 s in which no rank was busy (par_busy), or when a SIGINT comes behind one of these, they are killed. SIGUSR1 is passed
 * on to rank 0 alone, and ignored by ranks that have no handler of it. The calling thread must stay until it returns. */
TD_API int par_launch(int ranks, char **argv, const par_world_options *options, char *message, size_t room);
TD_API bool par_launched(void);   /* this process is a rank that par_launch started */

/* Between busy true and false the rank does what may take longer than a collective waits (saving, printing): while a rank is busy the
 * others' deadlines stand still, for ten minutes or ten timeouts at most. Calls nest. */
TD_API void par_busy(par_world *world, int rank, bool busy);

/* Bytes the rank has sent (ring-optimal, as td_transport counts) and collectives it has called since the world opened;
 * calls may be NULL. */
TD_API int64_t par_sent(const par_world *world, int rank, int64_t *calls);

/* Seconds the rank has spent in collectives and waiting for others to agree since the world opened: what nothing overlaps,
 * since collectives between CPU ranks are called in line. Of ranks that share a GPU: in what the host does of collectives, whatever is
 * computed beside it. Of a rank of this process. */
TD_API double par_waited_s(const par_world *world, int rank);
/* Seconds a step that rank `of` computes, on average since the third step: without collectives, waiting and what it was busy
 * with. As rank 0 has heard it; NaN: not known. A rank that takes 1.5 times as long as the others' median, for 20 steps, is
 * named in one warning of rank 0. */
TD_API double par_computed_s(const par_world *world, int of);
/* After a number that should be finite came out otherwise: "rank 2's part was the first not to be finite, in all_reduce (call 3
 * of step 6)", of what ranks have summed in an unbroken run of such steps up to now; "": not known. */
TD_API void par_not_finite_text(par_world *world, char *text, size_t room);

/* ---- Plans ---------------------------------------------------------------------------------------------- */

typedef enum par_kind { PAR_COMPUTES, PAR_REDUCES, PAR_SCATTERS, PAR_GATHERS, PAR_COPIES, PAR_KINDS } par_kind;
/* "all_reduce", "reduce_scatter", "all_gather"; "copy" between device and host; "" for PAR_COMPUTES. */
TD_API const char *par_kind_name(par_kind kind);

/* One call of a plan as far as its time is concerned. */
typedef struct par_call {
    td_profile_task task;       /* flops, bytes and bytes sent by this rank */
    td_queue_kind queue;
    int64_t waits[TD_QUEUES];   /* the call of each other queue that must have ended, as td_planned_call has it */
    par_kind kind;
    int ranks;                  /* that take part: rank r, r + stride, r + 2 stride ... */
    int stride;
} par_call;
/* The calls of the plan that td_plan made last, in order; owned by the context until td_disown. NULL and *count 0: there is no
 * plan, or an error. */
TD_API par_call *par_calls(td_context *td, int64_t *count);

/* ---- What collectives take ------------------------------------------------------------------------------- */

typedef enum par_collective {
    PAR_NO_COLLECTIVE,
    PAR_ALL_REDUCE,
    PAR_REDUCE_SCATTER,
    PAR_ALL_GATHER,
    PAR_ALL_TO_ALL,
    PAR_BROADCAST,
    PAR_BARRIER,
} par_collective;

/* "all_reduce" */
TD_API const char *par_collective_name(par_collective kind);

/* A world of which rank 0 alone is there, to see on one device what its steps take and hold among `ranks`. What others would send is its own:
 * values mean nothing, and nothing is compared. A collective takes the time that `seconds` says, of a GPU on `multiprocessors` of its own.
 * NULL: out of memory, or not 1 to 256 ranks. */
typedef struct par_rehearsal {
    double (*seconds)(const void *user, const par_call *call); /* of which kind, ranks, stride and task.sent are set */
    const void *user;           /* outlives the world */
    int multiprocessors;        /* 0: 24 */
} par_rehearsal;
TD_API par_world *par_world_rehearsed(int ranks, const par_rehearsal *how);

/* Seconds that one of `calls` calls takes which follow one another on the same buffers, of the library that connects ranks with a GPU each,
 * called bare: without plan, graph or count, on td's queue, which is waited for before and behind. All ranks, which td has been attached as one
 * of, call it alike. kind: all_reduce, reduce_scatter, all_gather or all_to_all; count: elements as td_transport has it. NaN and true where
 * nothing such carries collectives: ranks on the CPU, ranks that share a GPU. false and an error of td. */
TD_API bool par_measure_bare(td_context *td, par_world *world, int rank, par_collective kind, int64_t count, td_dtype dtype, int calls, double *seconds);

/* What collectives between ranks of this machine take, measured with so many threads (2 to 4): seconds of the smallest one, and
 * bytes a second, sent by one rank, of a large one. About 0.1 s. false and an error. */
typedef struct par_link {
    double latency_s, bytes_per_s;
} par_link;
TD_API bool par_measure(td_context *td, int ranks, par_link *out);

#ifdef __cplusplus
}
#endif

#endif
