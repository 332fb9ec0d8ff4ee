/* What the files of run/ share: the run and the parts it is made of. */
#ifndef TANDEM_RUN_LOOP_H
#define TANDEM_RUN_LOOP_H

#include <stdatomic.h>
#include <stdio.h>

#include <tandem/parallel.h>
#include <tandem/run.h>

#include "core/json.h"
#include "run/flags.h"

enum { RUN_PATH = 4096, RUN_TIMED = 4096 };

/* Bytes asked of the allocator: what plans promise, measured where memory is given. */
typedef struct run_memory {
    _Atomic int64_t now, peak;    /* state and step memory */
} run_memory;

/* The line that shows how far a run is. */
typedef struct run_progress {
    FILE *to;                     /* stdout, or stderr where stdout belongs to --json */
    bool quiet;                   /* another rank than 0 */
    bool terminal;
    bool drawn;                   /* a line stands that must be cleared before anything else is printed */
    double drawn_at;
} run_progress;

typedef struct run_evaluation {
    data_set *set;
    run_measure measure;
    void *model;
    int count;                    /* of the last evaluation; 0: none yet */
    char name[RUN_METRICS][32];
    double value[RUN_METRICS];
    int64_t step;                 /* of the last evaluation; -1: none */
} run_evaluation;

typedef struct run_restore run_restore; /* a checkpoint opened for reading */

struct run_loop {
    run_flags flags;
    char program[128];            /* "mlp train" */
    char name[64];                /* "mlp": the model, in checkpoints and messages */
    char usage[512];              /* wrong command line: printed by run_close */
    bool ended;                   /* nothing left to do but to return status */
    int status;

    td_context *td;
    run_memory memory;
    par_world *world;             /* NULL: one rank */
    int rank, ranks;
    char strategy[64];
    int64_t comm_before;          /* bytes sent when the update began */
    int64_t comm_bytes;           /* of the last update */

    int64_t batch, accumulate;
    int64_t steps;                /* updates wanted; 0: not known yet */
    int64_t schedule_steps;
    int64_t save_every, log_every, eval_every;
    char out[RUN_PATH];           /* "": nothing is written */

    data_set *train;
    data_loader *loader;
    run_evaluation evaluation;
    opt_optimizer *opt;           /* the run's once it is known */

    bool started;                 /* the first run_next has been */
    bool stopping;                /* a signal came on some rank */
    union { float f32; double f64; } stop_flag; /* this rank's word on that, an input of the step */
    int64_t epoch;                /* of the last micro-batch, from 1 */
    int64_t micro;                /* micro-batches of the update in progress */
    double loss_sum;              /* over them, of losses / accumulate */
    int64_t saved_step;           /* of the last checkpoint written or read; -1: none */

    double loss, first_loss;      /* of the last update, of the first one */
    double grad_norm, lr;
    int64_t first_step;           /* of this process */
    double mark;                  /* time at which the update began, less what is no training */
    double step_ms[RUN_TIMED];    /* a ring of the last updates */
    int64_t timed;
    double trained_s;             /* without the first update, which plans */
    int64_t trained_steps;
    double logged_s;              /* since the last logged update */
    int64_t logged_steps;
    FILE *metrics;
    td_json_writer line;
    run_progress progress;
};

double run_now(void);             /* seconds, monotonic */

/* ---- open.c: settings, ranks, context */
run_loop *run_open_command(unsigned command, const char *subcommand, int *argc, char ***argv,
                           const run_defaults *defaults, const char *about);
void run_fail_usage(run_loop *run, const char *format, ...) TD_PRINTF(2, 3);
bool run_failed(const run_loop *run);
/* Makes the context a rank of a world that only plans. */
bool run_attach_none(run_loop *run, int world);

/* ---- optimizer.c */
/* The learning rate of update `step` (from 0). */
double run_rate(const run_loop *run, int64_t step);

/* ---- loop.c */
/* True where any rank's flag is set: a sum over ranks, run as a step of its own. Also a barrier. */
bool run_any(run_loop *run, bool flag);

/* ---- progress.c */
void run_progress_open(run_loop *run);
void run_progress_draw(run_loop *run, bool now);
/* Leaves the moving line as it stands. */
void run_progress_end(run_loop *run);
/* One line that stays, above the moving one. */
void run_say(run_loop *run, const char *format, ...) TD_PRINTF(2, 3);

/* ---- signal.c */
void run_signals_catch(void);
void run_signals_release(void);
int run_signal(void);             /* the one that came; 0: none */

/* ---- record.c: OUT/config.json, metrics.jsonl, summary.json */
bool run_record_open(run_loop *run, int64_t step);   /* lines of metrics.jsonl beyond `step` are cut */
bool run_record_step(run_loop *run);
void run_record_close(run_loop *run);
/* OUT/summary.json where `writes`, and with --json the object on stdout. */
bool run_record_summary(run_loop *run, const char *command, bool writes);
double run_median_ms(const run_loop *run);

/* ---- plot.c */
/* OUT/loss.gnuplot and, where gnuplot is, OUT/loss.png. Without it a sentence says so. */
bool run_plot(run_loop *run);

/* ---- file.c */
bool run_make_directory(td_context *td, const char *path);       /* and its parents */
/* Writes to a temporary name beside path, syncs, renames. */
bool run_write_file(td_context *td, const char *path, const char *text, size_t bytes);
bool run_sync_directory(td_context *td, const char *path);
bool run_remove_tree(td_context *td, const char *path);          /* nothing there is fine */
/* path = format, or an error that it is too long. */
bool run_path(td_context *td, char path[RUN_PATH], const char *format, ...) TD_PRINTF(3, 4);

/* ---- checkpoint.c, restore.c: OUT/checkpoints/step-N */
bool run_save(run_loop *run);
/* The highest step with a manifest; -1: none. */
int64_t run_latest(const char *out);
run_restore *run_restore_open(run_loop *run, bool training);     /* the latest checkpoint of OUT; NULL: an error */
int64_t run_restore_step(const run_restore *r);
int64_t run_restore_schedule_steps(const run_restore *r);
double run_restore_first_loss(const run_restore *r);
bool run_restore_position(run_loop *run, const run_restore *r);
/* Fills every state. Errors name what is left over on either side. */
bool run_restore_states(run_loop *run, run_restore *r);
void run_restore_close(run_restore *r);

/* ---- evaluate.c */
bool run_evaluate(run_loop *run);

/* ---- bench.c */
void run_bench(run_loop *run, const run_model *model, void *object);
void run_plan(run_loop *run, const run_model *model, void *object);

#endif
