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
    bool quiet;                   /* another rank than 0, or nobody takes what is printed any more */
    bool terminal;
    bool drawn;                   /* a line stands that must be cleared before anything else is printed */
    double drawn_at;
    int error;                    /* errno of what could not be printed; 0: none */
} run_progress;

typedef struct run_evaluation {
    data_set *set;
    data_loader *loader;          /* of one pass; from the first evaluation on */
    run_measure measure;
    void *model;
    int count;                    /* of the last evaluation; 0: none yet */
    char name[RUN_METRICS][32];
    double value[RUN_METRICS];
    int64_t step;                 /* of the last evaluation; -1: none */
} run_evaluation;

/* What evaluations have said of the run so far, by their first metric; lower is better. Saved with it. */
typedef struct run_best {
    double loss;                  /* the lowest; infinity: none */
    int64_t step;                 /* of it; -1: none */
    int64_t judged;               /* the step of the last evaluation that counted; -1: none */
    int64_t stale;                /* evaluations since the best */
} run_best;

/* --profile N: some updates after the first ones, task by task. */
typedef struct run_profile {
    int64_t updates;              /* wanted; 0: no profile */
    int64_t after;                /* updates of this process before it begins */
    int64_t done;
    double wall_s;                /* of those done, by the run's own clock */
    td_machine machine;
} run_profile;

/* A micro-batch's part in the loss of its update: loss / accumulate, or the sum and the weight of a loss that is their quotient. */
typedef struct run_part {
    td_tensor sum;
    td_tensor weight;             /* kept; id TD_NONE: none */
} run_part;

/* What signals ask of all ranks: kept, each above 0 where it was asked of one. */
typedef struct run_asked {
    td_tensor stop, save;
} run_asked;

/* What the last step that was handed over left to be read. Tensors of id TD_NONE: there is none. */
typedef struct run_unread {
    bool any;
    run_part part;
    int64_t update;               /* that the step completed; 0: none. What follows is of that update */
    td_tensor norm;               /* of the gradient, where the optimizer has it */
    run_asked asked;              /* where there are several ranks */
    double lr;
    int64_t epoch;
    bool logs;                    /* it has a line */
} run_unread;

typedef struct run_saver run_saver;     /* a checkpoint that is being written */
typedef struct run_restore run_restore; /* a checkpoint opened for reading */

struct run_loop {
    run_flags flags;
    char program[128];            /* "mlp train" */
    char name[64];                /* "mlp": the model, in checkpoints and messages */
    char refusal[512];            /* what keeps the run from starting: printed by run_close */
    int refused;                  /* the exit status with it: 2, or 1 where a file is at fault; 0: not refused */
    bool ended;                   /* nothing left to do but to return status */
    int status;

    td_context *td;
    bool described;               /* it plans for a GPU that is described */
    run_memory memory;
    par_world *world;             /* NULL: one rank */
    int rank, ranks;
    bool scheduled;               /* this process is one of those that a launcher of the system started */
    bool rehearses;               /* this process is the first of its ranks, and the others are nowhere */
    int present;                  /* ranks that run: 1 in a rehearsal, else all */
    char strategy[64];
    int64_t comm_before;          /* bytes sent when the update began */
    int64_t comm_bytes;           /* of the last update */
    double waited_before;         /* seconds in collectives, when it began */

    int64_t batch, accumulate;
    int64_t steps;                /* updates wanted; 0: not known yet */
    int64_t schedule_steps;
    int64_t save_every, log_every, eval_every;
    int64_t keep;                 /* checkpoints, the newest */
    bool keep_best;               /* and that of the best evaluation */
    int64_t stop_after;           /* evaluations without a better one; 0: never */
    int64_t eval_batches;         /* at most, of `batch` rows each; 0: all */
    bool overfits;                /* every update takes the first batch, and so do evaluations */
    char out[RUN_PATH];           /* "": nothing is written */

    bool is_variant;              /* run_open_variant: one of several runs of a command line */
    const run_model *model;       /* of a reference binary; NULL: a program of one's own */
    data_set *train;
    data_loader *loader;
    run_evaluation evaluation;
    run_best best;
    opt_optimizer *opt;           /* the run's once it is known */
    opt_ema *ema;                 /* of --ema; NULL: none */
    opt_scaler *scaler;           /* of losses, under --dtype f16; NULL: none */

    bool started;                 /* the first run_next has been */
    bool stopping;                /* a signal came on some rank */
    bool saving;                  /* a signal that asks for a checkpoint came on some rank, and there is none yet */
    bool stopped_early;           /* by --stop-after */
    union { float f32[2]; double f64[2]; } signals; /* this rank's word on stopping and saving, an input of the step */
    int64_t batch_epoch;          /* of the last micro-batch, from 1 */
    int64_t micro;                /* micro-batches of the update in progress that were handed over */
    bool weighs;                  /* its losses are quotients: its micro-batches have weights */
    run_unread unread;            /* of the last of them; in loss_sum and weight_sum are those before */
    double loss_sum;              /* of losses / accumulate, or of the sums that losses are quotients of */
    double weight_sum;
    int skipped;                  /* updates one after the other whose gradients were not finite, under a scaler */
    int64_t saved_step;           /* of the last checkpoint written or read; -1: none */
    run_saver *saver;             /* of the one being written; NULL: none is */
    int64_t checkpoint_bytes;     /* that the last one copied; 0: there was none */
    bool said_waits;              /* that updates wait for the disk */

    double first_ms;              /* bench: the first update, planned, compiled and timed as it may be */
    double loss, first_loss;      /* of update `read`, of the first one; NaN: none */
    double grad_norm, lr;         /* of update `read` */
    int64_t epoch;                /* of update `read` */
    int64_t read;                 /* the last update whose numbers have been: the last one, on a GPU perhaps the one before */
    int64_t first_step;           /* of this process */
    double mark;                  /* time at which the update began, less what is no training: where the one before was read */
    double step_ms[RUN_TIMED];    /* a ring of the last updates */
    double host_us[RUN_TIMED];    /* of each, its last step's td_report.host_us, or that of the step before */
    double comm_ms[RUN_TIMED];    /* of each, in collectives, which nothing overlaps between CPUs; of GPUs nan */
    double exposed_ms;            /* of GPUs: of an update, while collectives or copies run and nothing is computed; nan: not measured */
    int64_t timed;
    double trained_s;             /* without the first update, which plans */
    int64_t trained_steps;
    double logged_s;              /* since the last logged update */
    int64_t logged_steps;
    FILE *metrics, *events;       /* open from the first update on */
    td_json_writer line;
    run_profile profile;
    run_progress progress;
};

double run_now(void);             /* seconds, monotonic */

/* ---- open.c: flags and what they come to */
run_loop *run_open_command(unsigned command, const char *subcommand, int *argc, char ***argv,
                           const run_defaults *defaults, const char *about);
/* The arguments as they are now, NULL behind the last; the caller frees. NULL without memory. */
char **run_copy_arguments(int argc, char **argv);
/* What a run is to have in place of what the command line says; 0, false and NULL: as it says. */
typedef struct run_variant {
    const char *strategy;
    int64_t accumulate, world, batch;
    bool recompute;
} run_variant;
run_loop *run_open_variant(unsigned command, const char *subcommand, int *argc, char ***argv, const run_defaults *defaults,
                           const run_variant *variant);
/* Refuse to start: a wrong command line, or a file or the machine that is at fault. The first text is kept. */
void run_fail_usage(run_loop *run, const char *format, ...) TD_PRINTF(2, 3);
void run_fail_file(run_loop *run, const char *format, ...) TD_PRINTF(2, 3);
bool run_failed(const run_loop *run);
/* A flag that says nothing where `decider` came to what it did, being of `only`: refused, or forgotten where it comes
 * from a weaker source than the decider. */
void run_check_effect(run_loop *run, const char *flag, const char *decider, const char *only);

/* ---- world.c: ranks and the context */
/* True: the run has several ranks and this is the process that was started; it has waited for them and has ended. */
bool run_launch(run_loop *run, char **argv);
/* Whether this process is one of several that were started together; as which rank of how many. */
void run_find_scheduled(run_loop *run);
/* --reshard-after-forward as a number of ranks; 0: yes or no, -1: none of these. */
int run_reshard_group(const run_loop *run);
/* The world of a rank, the context, its strategy. */
void run_enter_world(run_loop *run);
/* CPU threads of all ranks of this machine together. */
int run_threads(const run_loop *run);
/* A context that does nothing, for what a program still calls when the run has ended or was refused. */
void run_open_nothing(run_loop *run);
/* This rank may take longer than others wait for it: files, printing. Calls nest. */
void run_busy(run_loop *run, bool busy);

/* ---- restart.c: --max-restarts */
typedef struct run_restarts {
    char **argv;                  /* to start ranks with */
    par_cause cause;              /* of their end, and what is said of it */
    char message[1024], before[1024]; /* and of the end before */
    int64_t done, most;
    uint64_t checkpoints;         /* what OUT/checkpoints was when the run began; 0: it was not there */
    char **own;                   /* argv and --resume; NULL: not yet */
} run_restarts;
void run_restarts_begin(const run_loop *run, run_restarts *r, char **argv);
/* Whether ranks are to start again; says so, and why. */
bool run_restarts_again(run_loop *run, run_restarts *r);
void run_restarts_end(run_restarts *r);

/* ---- optimizer.c */
/* The learning rate of update `step` (from 0). */
double run_rate(const run_loop *run, int64_t step);
/* Opens the averages that --ema asks for, of all parameters. False after an error. */
bool run_average(run_loop *run);

/* ---- loop.c */
/* In the order of training, from its start. */
data_loader *run_training_loader(run_loop *run, data_set *set);
/* True where any rank's flag is set: a sum over ranks, run as a step of its own. Also a barrier. */
bool run_any(run_loop *run, bool flag);
/* Around an update: what it sends and how long it waits for other ranks. run_comm_end comes before the update is counted as timed. */
void run_comm_begin(run_loop *run);
void run_comm_end(run_loop *run);

/* ---- numbers.c */
/* What the last step left is read: with the last part of an update its numbers, which are looked at, and the update counts as timed.
 * Nothing where that is done. false: the run has failed. */
bool run_read_numbers(run_loop *run);
/* The same, of a step that another one has followed or none will, and the line of its update where it has one. In a run that has failed
 * since, the line. */
bool run_read_late(run_loop *run);
/* Whether all of it can be read behind the next step; if not, it is to be read now. */
bool run_can_wait(const run_unread *unread);

/* ---- update.c */
/* Records the backward of the part that a loss is, which it returns. */
run_part run_backward(run_loop *run, td_tensor loss);
/* Records the update behind the last part, and that of the averages. */
void run_update(run_loop *run, opt_optimizer *opt, run_part last, double rate);
/* After the part's step: adds it to those before it. */
void run_add_part(run_loop *run, run_part part);
/* Whether that can be done later, behind other steps, so that a GPU need not wait for the host; if not, it is to be done now. */
bool run_part_later(run_part part);
/* Of the parts added: the update's loss. The next one added is another update's. */
double run_take_loss(run_loop *run, bool weighs);

/* ---- progress.c */
void run_progress_open(run_loop *run);
void run_progress_draw(run_loop *run, bool now);
/* Leaves the moving line as it stands. run_say puts its line above it; what cannot be printed ends the printing, not the run. */
void run_progress_end(run_loop *run);
/* The object as one line on stdout. */
bool run_print_object(run_loop *run, const td_json_writer *w);
/* Ends what was printed to stdout by a program that does nothing else: 0, or 1 and a line on stderr. */
int run_stdout_status(const char *name);

/* ---- signal.c */
void run_signals_ignore(void);    /* those that make an error of write the end of the process: sizes of files */
void run_signals_catch(void);     /* while training, those that ask for an end; and a reader that goes away */
void run_signals_release(void);
void run_signals_ignore_save(void);
int run_signal(void);             /* the one that came; 0: none */
bool run_signal_save(void);       /* SIGUSR1 has come since it was last asked */

/* ---- record.c: OUT/config.json, metrics.jsonl, previous-N */
/* Makes OUT and sees that it can be written to; changes nothing that is there. */
bool run_record_prepare(run_loop *run);
/* After the first update: moves another run's files aside or, going on, cuts the lines beyond first_step. */
bool run_record_open(run_loop *run);
void run_say_step(run_loop *run);                    /* the line of an update, where there is no terminal */
bool run_record_step(run_loop *run);
void run_record_close(run_loop *run);
/* OUT holds files of a run; other files, and what the model's program keeps, do not count. */
bool run_record_stands(const run_loop *run);
/* OUT/config.json */
bool run_record_config(run_loop *run);
/* Writes the object to OUT/name. */
bool run_record_object(run_loop *run, const char *name, const td_json_writer *w);

/* ---- tensorboard.c: OUT/events.out.tfevents.TIME.HOST */
#define RUN_EVENTS "events.out.tfevents."
bool run_is_events(const char *name);
/* A new file, at whose start readers forget steps beyond first_step. */
bool run_events_open(run_loop *run);
/* The numbers of the last update, and of its evaluation where there was one. */
bool run_events_step(run_loop *run, double items_per_s);
void run_events_close(run_loop *run);

/* ---- summary.c: OUT/summary.json */
/* Writes the file where `writes`, and with --json prints the object. */
bool run_summary(run_loop *run, const char *command, bool writes);
/* The file is there and of this step. */
bool run_summary_stands(run_loop *run, int64_t step);
double run_median_ms(const run_loop *run, int64_t *updates); /* of how many */
double run_median_host_us(const run_loop *run);
/* ms of an update in which there is communication and nothing is computed; nan: not known. */
double run_exposed_ms(const run_loop *run);
void run_put_evaluation(const run_evaluation *e, td_json_writer *w);

/* ---- plot.c */
/* OUT/loss.gnuplot and, where gnuplot is, OUT/loss.png. Without it a sentence says so. */
bool run_plot(run_loop *run);
/* Writes "STEP LOSS", a line each, of the lines of a metrics.jsonl that are whole, and counts them: of training or of
 * evaluations. */
bool run_put_points(run_loop *run, FILE *from, const char *path, FILE *to, bool evaluations, int64_t *points);
/* Draws OUT/name.png from OUT/name.gnuplot. false: why not, in a sentence; no error. */
bool run_draw(run_loop *run, const char *name, char why[RUN_PATH + 128]);

/* ---- compare.c: OUT/compare.png */
void run_compare_check(run_loop *run); /* whether the runs of --plot are there, before anything is trained */
bool run_compare(run_loop *run);       /* nothing without --plot */

/* ---- profile.c: OUT/profile.json, OUT/profile.trace.json and the table */
/* Training: whether there are updates enough, once it is known how many there will be. */
bool run_profile_check(run_loop *run);
/* Training, after an update that took `seconds`: before what is no training, and behind it. The latter begins the profile, or
 * ends and reports it, where due; false after an error. */
void run_profile_pause(run_loop *run, double seconds);
bool run_profile_go_on(run_loop *run);
/* Measures the machine and begins; ends and reports, where there is something to report. */
bool run_profile_begin(run_loop *run);
bool run_profile_report(run_loop *run);

/* ---- file.c */
bool run_make_directory(td_context *td, const char *path);       /* and its parents */
bool run_write_file(td_context *td, const char *path, const char *text, size_t bytes); /* as td_file_replace */
bool run_sync_directory(td_context *td, const char *path);
bool run_rename(td_context *td, const char *from, const char *to);
bool run_remove_tree(td_context *td, const char *path);          /* nothing there is fine */
/* path = format, or an error that it is too long. */
bool run_path(td_context *td, char path[RUN_PATH], const char *format, ...) TD_PRINTF(3, 4);

/* ---- checkpoint.c, save.c, restore.c: OUT/checkpoints/step-N */
/* Begins to save the state as it is, once the save before it stands, and lets training go on. Nothing where it is saved or being
 * saved already, or without OUT. */
bool run_save(run_loop *run);
/* The save in progress: takes note of it if it is done; waits until it is. false: the run has failed, perhaps for it. */
bool run_save_check(run_loop *run);
bool run_save_wait(run_loop *run);
/* What this rank copies for a save, in the host's memory beside what the plan counts. 0 after an error. */
int64_t run_checkpoint_bytes(run_loop *run);
/* A signal asked for the save of this step: says so once it stands. */
void run_say_saved(run_loop *run, int64_t step);
/* By rank 0, before any rank saves: removes what crashes left. */
bool run_prune_partial(td_context *td, const char *out);
/* Where run_save was asked to save this step: writes its manifest again, as what it says has changed since. */
bool run_save_again(run_loop *run);
/* The highest step with a manifest; -1: none. */
int64_t run_latest(const char *out);
int64_t run_latest_below(const char *out, int64_t below);
/* The latest checkpoint of OUT, or with --best that of the best evaluation. NULL: an error. */
run_restore *run_restore_open(run_loop *run, bool training);
int64_t run_restore_step(const run_restore *r);
int64_t run_restore_schedule_steps(const run_restore *r);
double run_restore_loss(const run_restore *r, const char *which); /* "first_loss", "final_loss"; NaN: not known */
bool run_restore_best(run_loop *run, const run_restore *r);      /* run->best */
bool run_restore_position(run_loop *run, const run_restore *r);
/* It holds weights that this program has not trained: there are no moments, no schedule and no position in it. */
bool run_restore_begins(const run_restore *r);
/* Declares in the context what parameters it holds, for a run without a model; those that have no average of --ema do not train. */
bool run_restore_declare(run_loop *run, const run_restore *r);
/* Fills every state; where it begins, an optimizer's keep their initial values. Errors name what is left over on either side. */
bool run_restore_states(run_loop *run, run_restore *r);
void run_restore_close(run_restore *r);

/* ---- evaluate.c */
bool run_evaluate(run_loop *run);
void run_evaluation_close(run_evaluation *e);
/* Counts the last evaluation: whether it is the best, and whether it is time to stop early. */
bool run_judge(run_loop *run);

/* ---- main.c */
/* Data of the split, model and optimizer. NULL after an error. */
void *run_make(run_loop *run, const run_model *model, const char *split);

/* ---- export.c: what `export` of a model without its own does */
void run_export(run_loop *run);

/* ---- bench.c, plan.c */
void run_bench(run_loop *run, const run_model *model, void *object);
void run_plan(run_loop *run, const run_model *model, void *object);

#endif
