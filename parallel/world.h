/* Inside parallel/: the memory that the ranks of one machine share, and how they wait for one another.
 *
 * A world is one mapping: a head, an area a rank, and a staging buffer a rank and slot. Threads share it as it is,
 * processes by a file descriptor that has no name, so nothing is left behind however they end. What another rank reads
 * is published by an atomic store after it (release and acquire), or is read and written as atomic words.
 *
 * A world stops once: whoever finds a failure writes the text into its own area and then claims `broken`. From then on
 * every wait of every rank ends with that text. Every wait has a deadline and can name who it waits for, and where.
 */
#ifndef TANDEM_PARALLEL_WORLD_H
#define TANDEM_PARALLEL_WORLD_H

#include <stdatomic.h>

#include "parallel/parallel.h"

enum {
    PAR_MAX_RANKS = 256,          /* of one machine */
    PAR_SLOTS = TD_MAX_AXES + TD_MAX_AXES * (TD_MAX_AXES - 1) / 2 + 1, /* what ranks meet on: a mesh axis each, several in a row, and
                                                                          last the whole world (barriers) */
    PAR_POSTS = 64,               /* steps of which posts are kept */
    PAR_RECORDINGS = 32,          /* recordings of which the text is kept */
    PAR_LINES = 4096,             /* operations kept of one recording */
    PAR_LINE_BYTES = 104,
    PAR_OPTIONS_BYTES = 1024,
    PAR_MESSAGE_BYTES = 1024,
    PAR_TIMEOUT_S = 60,           /* a collective waits so long unless told otherwise */
    PAR_LAUNCHER = PAR_MAX_RANKS, /* who stops a world when it is no rank */
};

/* ---- Collectives ----------------------------------------------------------------------------------------- */

/* Bytes one rank sends in one call, ring-optimal, q = (ranks - 1) / ranks: all_reduce 2q of its data; reduce_scatter,
 * all_gather and all_to_all q of ranks x count elements; broadcast q of its data; rounded up to a byte. `count` as in
 * td_transport: elements of the data (all_reduce, broadcast), else of one rank's part. */
int64_t par_bytes_sent(par_collective kind, int ranks, int64_t count, td_dtype dtype);

/* ---- What is shared -------------------------------------------------------------------------------------- */

/* A count that only grows, written by one rank and waited for by others. */
typedef struct par_word {
    _Atomic uint32_t value;
    _Atomic uint32_t waiters;
} par_word;

/* What a rank is about to do when it meets others; all must be about to do the same. */
typedef struct par_meeting {
    int64_t count, call, run, step;            /* step: as par_step_text tells it */
    int32_t kind, dtype, root;
} par_meeting;

typedef struct par_post {
    int64_t run, step;
    uint64_t fingerprint;
    double computed_s;                         /* since the rank's last post: without waiting for others and being busy */
    int32_t entry;                             /* its recording */
} par_post;

/* One operation: the hash of the program up to and with it, and how a message shows it. */
typedef struct par_line {
    uint64_t hash;
    char text[PAR_LINE_BYTES];
} par_line;

typedef struct par_recording {
    char options[PAR_OPTIONS_BYTES];
    par_line line[PAR_LINES];                  /* as many as are kept */
} par_recording;

/* Where in the log a recording is. */
typedef struct par_entry {
    uint64_t fingerprint;                      /* 0: none */
    uint32_t begin, end;                       /* bytes of the log */
    uint32_t kept, nodes;                      /* lines, operations recorded */
} par_entry;

/* Where a sum over ranks was first found not to be finite, of runs one after another in which some were not: a rank finds it in
 * what it sums itself. */
typedef struct par_origin {
    _Atomic int64_t last;                      /* + 1: the last of those runs; 0: none yet */
    _Atomic int64_t run, step, call;           /* the first one, and the call */
    _Atomic int32_t kind;
    _Atomic uint64_t ranks[PAR_MAX_RANKS / 64]; /* bits of those whose parts were not finite; none: the sum alone is not */
} par_origin;

/* A rank's area; the rank writes it, all read it. Zero at first. */
typedef struct par_area {
    _Alignas(128) par_word arrived[PAR_SLOTS]; /* meetings come to, a slot */
    par_word posted;                           /* runs posted */
    par_word compared;                         /* runs agreed on: it reads no post and no recording of them any more */
    _Atomic int32_t waits_for;                 /* rank + 1; 0: none; what for: the word at this offset of the segment ... */
    _Atomic int64_t waits_word;
    _Atomic uint32_t waits_target;             /* ... has come to this */
    _Atomic int32_t busy;                      /* it does what takes long (saving): others' deadlines stand still */
    _Atomic int64_t process;                   /* of the rank that is busy, on this machine; 0: not known */
    _Atomic int32_t ended;                     /* it has ended well: it will not come to anything more */
    _Atomic int32_t start_error;               /* errno of a process that could not be started */
    _Atomic int32_t cause;                     /* par_cause, of the text that it stops the world with; 0: PAR_DISAGREED */
    _Atomic int32_t collective;                /* par_collective it is in */
    _Atomic int64_t run;                       /* + 1; 0: none yet */
    _Atomic int64_t step;                      /* that it belongs to */
    _Atomic int64_t call;                      /* collectives called in this run */
    _Atomic int64_t calls, sent;               /* since the world opened */
    _Atomic int64_t waited_ns;                 /* in collectives and for agreement, since the world opened */
    par_origin origin;
    par_meeting meeting[PAR_SLOTS][2];         /* by parity of `arrived` */
    par_post post[PAR_POSTS];
    par_entry entry[PAR_RECORDINGS];
    char message[PAR_MESSAGE_BYTES];
    _Alignas(16) char log[2 * sizeof(par_recording)];
} par_area;

typedef struct par_segment {
    uint64_t magic;
    int64_t bytes;
    int64_t staging_bytes;                     /* of one rank and slot; two halves */
    double timeout_s;
    int32_t ranks;
    _Atomic int32_t broken;                    /* who stopped it, + 1; 0: nobody */
    char launcher_message[PAR_MESSAGE_BYTES];
    par_area area[];
} par_segment;

/* ---- What a process keeps to itself ---------------------------------------------------------------------- */

/* How long ranks compute in a step: each tells its own time, the first rank compares (pace.c). */
typedef struct par_pace {
    double since, waited, busy;                /* seconds, when the last step was agreed on */
    int64_t steps;                             /* compared */
    bool told;                                 /* that some rank is slow */
    struct {
        double all, window;                    /* seconds: of all steps compared, of the last ones */
        int slow;                              /* of the last ones, those in which it was slow */
    } rank[PAR_MAX_RANKS];
} par_pace;

/* One rank that runs here. */
typedef struct par_local {
    par_world *world;
    int rank;
    td_context *td;                            /* where failures go; NULL: they stop the world alone */
    td_mesh mesh;
    int yields;                                /* how long to look before sleeping */
    bool own_cores;                            /* it runs on cores that other ranks do not (near.h) */
    char options[PAR_OPTIONS_BYTES];
    uint64_t options_hash;
    uint32_t cursor;                           /* next free byte of the log */
    uint32_t next_entry;
    double called;                             /* when the collective that it is in began */
    _Atomic int32_t breaks;                    /* one of its threads stops the world: others do not write over the text */
    _Atomic int64_t busy_since_ns, busy_ns;    /* how long it has been busy; 0: it is not */
    par_pace pace;
    bool behind;                               /* its collectives come later than the run they belong to is posted; what carries them says
                                                  where they are */
    bool uncounted;                            /* its collectives are counted by who calls them, or are none of a step's */
    struct par_staged *staged;                 /* what takes its GPU's buffers through the host (staged.h); NULL: nothing */
    struct par_nccl *nccl;                     /* what connects its GPU with others' (nccl.h); NULL: nothing */
} par_local;

struct par_world {
    int ranks;
    int first, here;                           /* ranks [first, first + here) run in this process */
    par_segment *segment;                      /* NULL: planning only */
    struct par_mpi *mpi;                       /* the segment is this process's own, others' areas are copies (mpi.h); NULL: shared */
    struct par_meet *meet;                     /* ranks have met by their variables (meet.h); NULL: otherwise */
    par_rehearsal rehearsal;                   /* .seconds NULL: all ranks are there */
    par_local *local;                          /* `here` of them; NULL: planning only, or the launcher's */
    const char *_Atomic on_device;             /* the transport between GPUs that a context has chosen last; NULL: none */
};

/* Makes the memory of a world; fd NULL: for threads, else a descriptor (close-on-exec) that processes may map. false:
 * errno says why. */
bool par_segment_open(par_world *world, int ranks, const par_world_options *options, int *fd);
void par_segment_close(par_world *world);
/* Maps the memory that another process has made, for one of its ranks. The descriptor stays open. false: errno says why, or it
 * is no such world. */
bool par_segment_enter(par_world *world, int fd, int rank, int ranks);
/* Ranks can share a world where this is the same: Tandem's version and how the world is laid out. */
uint64_t par_layout(void);
/* Ranks [first, first + here) run in this process. */
bool par_open_local(par_world *world, int first, int here);
/* How this process was started, as which rank of how many. PAR_ALONE with a message: not so that it could join a world. */
typedef enum par_start { PAR_ALONE, PAR_BY_LAUNCHER, PAR_BY_VARIABLES } par_start;
par_start par_started(int *rank, int *ranks, char *message, size_t room);
/* A whole number in the environment; -1: none. */
long par_environment_number(const char *name);
par_local *par_local_at(par_world *world, int rank);
void *par_staging(const par_world *world, int rank, int slot, unsigned parity);

/* ---- Stopping and waiting (wait.c) ----------------------------------------------------------------------- */

/* Stops the world with this text unless it has been stopped. `who`: a rank, or PAR_LAUNCHER. */
void par_break(par_world *world, int who, const char *format, ...) TD_PRINTF(3, 4);
/* The text it was stopped with; NULL: it was not. */
const char *par_broken(const par_world *world);
/* Some rank does what takes long, saves a checkpoint, say, and nobody is late who waits; `excused`: seconds that have
 * been let pass for that already. A process that is stopped does nothing. */
bool par_excused(const par_segment *s, double excused);
/* A process of this machine: it has ended, was stopped by a signal, or runs, as does one that cannot be seen. *parent (NULL is
 * allowed): the process that started it, 0 where it is not known. */
typedef enum par_life { PAR_GONE, PAR_STOPPED, PAR_RUNS } par_life;
par_life par_process_life(int64_t process, int64_t *parent);
/* Gives the rank's context the world's text. Returns false. */
bool par_stopped(par_local *me);
/* Adds one and wakes who waits. */
void par_advance(par_word *word);
/* Waits until `word` of rank `other` has come to `target`. false after the context has failed: the world was stopped,
 * the other has ended, or the deadline passed (then the world is stopped). */
bool par_wait(par_local *me, int other, par_word *word, uint32_t target);
/* What is left of a wait's deadline. Begins as { .before = par_seconds() }. */
typedef struct par_patience {
    double waited, excused, before;
    double looked;                             /* when it was last asked whether some rank is busy */
    bool excuses;
} par_patience;
/* Counts the time since the last call, unless some rank excuses it. */
void par_patient(const par_segment *s, par_patience *p);
/* Stops the world for a deadline that passed while this rank waited for `other`, which may itself wait. Returns false. */
bool par_late(par_local *me, int other);
/* Stops the world because `other`, which this rank waited for, has ended. Returns false. */
bool par_ended_before(par_local *me, int other);
/* What this rank waits for, until it has: by that par_late finds who keeps all waiting. */
void par_note_wait(par_local *me, int other, const par_word *word, uint32_t target);
void par_note_waited(par_local *me);
/* Tells others that this rank has ended well. */
void par_end(par_world *world, int rank);
/* A step as its user counts it: the update that is in the making, from 1; an evaluation, those done. Ranks that are in order are in one
 * run, of which a step may have several: micro-batches, values read before their step. */
typedef struct par_moment {
    int64_t run;                               /* of a program; from 0 */
    int64_t step;
    bool evaluates;
} par_moment;
/* The step as one number, and as text: "step 7", "the evaluation of step 7". */
static inline int64_t par_step_of(par_moment at) { return 2 * at.step + at.evaluates; }
enum { PAR_STEP_BYTES = 48 };
const char *par_step_text(int64_t step, char to[PAR_STEP_BYTES]);
/* "all_reduce (call 14 of step 7)", "step 7", "its first step". */
enum { PAR_PLACE_BYTES = 112 };
const char *par_place(const par_area *area, char to[PAR_PLACE_BYTES]);
/* "in all_reduce (call 14 of step 7)", "after call 14 of step 7", "in step 7", "before its first step". */
enum { PAR_WHERE_BYTES = PAR_PLACE_BYTES + 8 };
const char *par_where(const par_area *area, char to[PAR_WHERE_BYTES]);
double par_seconds(void);                      /* monotonic */

static inline bool par_reached(const par_word *word, uint32_t target)
{
    return (int32_t)(atomic_load_explicit(&word->value, memory_order_acquire) - target) >= 0;
}

/* ---- Pace (pace.c) --------------------------------------------------------------------------------------- */

int64_t par_nanoseconds(void);                 /* monotonic */
/* Adds what has passed since `begin` to the time in which the rank waited for others. */
void par_add_waited(par_local *me, double begin);
/* Seconds the rank has computed since the last step was agreed on. */
double par_pace_take(const par_local *me);
/* The step has been agreed on: computing begins. */
void par_pace_begin(par_local *me);
/* Compares what all ranks told in their posts of this number, where all are there: warns once of one that is slow. */
void par_pace_compare(par_local *me, uint32_t index);

/* ---- Transports and the side channel --------------------------------------------------------------------- */

/* Fills `out` for the rank's collectives on the axes of `mesh` (copied; NULL: one axis of all ranks). Failures go to
 * td. The table is valid until the world closes; making it again for another context replaces it. */
bool par_transport_local(par_world *world, int rank, td_context *td, const td_mesh *mesh, td_transport *out);
/* The same between processes that share no memory. */
bool par_transport_mpi(par_world *world, int rank, td_context *td, const td_mesh *mesh, td_transport *out);
/* The table of a world in which nothing can be sent: every call fails. */
bool par_transport_none(par_world *world, int rank, td_context *td, td_transport *out);

/* What must be equal on all ranks, as "strategy=ddp batch=144 ..."; before the first step. What is longer than PAR_OPTIONS_BYTES is
 * compared, but not named. */
void par_agree_options(par_world *world, int rank, const char *options);
/* The rank's collectives belong to this run from now on. */
void par_begin_run(par_local *me, par_moment at);
/* Posts a run before it begins and compares it with what others posted; for a new plan after all have. A run with
 * any difference stops the world with the name of the first differing option or operation. false: the context has
 * failed. */
bool par_agree(par_world *world, int rank, td_context *td, par_moment at, const td_program *recording,
               uint64_t fingerprint, bool is_new_plan);
/* Another rank's post has come after this rank's own of the same number: stops the world where they differ. */
void par_agree_heard(par_world *world, int other, uint32_t index);

#endif
