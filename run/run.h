/* What every binary shares: flags, the training loop, progress, files, checkpoints, evaluation, several ranks.
 *
 * A program of one's own opens a run, makes a model in its context, and loops:
 *
 *     run_loop *run = run_open(&argc, &argv, &(run_defaults){ .batch = 144, .epochs = 3, .lr = 1e-3 });
 *     ... make the model and the optimizer in run_context(run) ...
 *     run_train_on(run, data_idx(run_context(run), run_data(run), "train"));
 *     for (data_batch b; run_next(run, &b);) run_step(run, opt, loss of b);
 *     return run_close(run);
 *
 * A reference binary gives run_main one run_model and gets `train eval bench plan plot export` from it.
 *
 * With --ranks N the program is started again N times; the first process waits for the others inside run_open and then
 * has an ended run, whose functions do nothing and whose run_close returns the exit status.
 *
 * Errors are those of the context (td_error): the first one ends the loop, run_close prints it and returns 1, or 2
 * where the command line was wrong. Here, and only here, texts are printed: results to stdout, the rest to stderr.
 */
#ifndef TANDEM_RUN_H
#define TANDEM_RUN_H

#include <tandem/core.h>
#include <tandem/data.h>
#include <tandem/optim.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Flags ---------------------------------------------------------------------------------------------- */

typedef enum run_flag_kind {
    RUN_SWITCH,                   /* --name */
    RUN_TEXT,
    RUN_CHOICE,                   /* one of `choices` */
    RUN_COUNT,                    /* a whole number >= 1 */
    RUN_COUNTS,                   /* several, with commas between them */
    RUN_WHOLE,                    /* a whole number >= 0 */
    RUN_SEED,                     /* the same up to 2^64 - 1; run_flag_whole gives its 64 bits */
    RUN_POSITIVE,                 /* a number > 0 */
    RUN_AMOUNT,                   /* a number >= 0 */
    RUN_FRACTION,                 /* a number in [0, 1) */
} run_flag_kind;

/* RUN_RESTORED: export, and those commands of a model's own that start from a checkpoint of --out. The i-th of its own is RUN_OWN << i. */
enum { RUN_TRAIN = 1, RUN_EVAL = 2, RUN_BENCH = 4, RUN_PLAN = 8, RUN_PLOT = 16, RUN_EXPORT = 32, RUN_RESTORED = 128, RUN_OWN = 256, RUN_OWN_COMMANDS = 16 };

/* One flag; a table of them ends with a NULL name. */
typedef struct run_flag {
    const char *name;             /* without the dashes */
    run_flag_kind kind;
    const char *standard;         /* the default as text; NULL: none */
    const char *help;
    const char *choices;          /* "cpu|cuda" */
    double most;                  /* the largest number allowed; 0: any */
    unsigned commands;            /* RUN_TRAIN | ...; 0: all that make a model */
} run_flag;

/* ---- The loop ------------------------------------------------------------------------------------------- */

typedef struct run_loop run_loop;

/* What holds where no flag says otherwise. 0 and NULL: the framework's own. */
typedef struct run_defaults {
    const char *name;             /* of the program and its checkpoints; NULL: that of the file started */
    int64_t batch;                /* global, of one update; 128 */
    int64_t epochs;               /* 1 */
    double lr;                    /* 1e-3 */
    const char *schedule;         /* "constant" */
    int64_t warmup;               /* updates in which the rate rises, at most those the schedule spans; 0 */
    const char *data;             /* directory or file */
    const run_flag *flags;        /* of the program's own, beside the common ones */
} run_defaults;

/* Reads the flags in argv (--help lists them), starts the ranks, opens the context. Flags are taken out of argv; any
 * other word is wrong usage. Never NULL, except when there is no memory at all; every function here takes that NULL. */
TD_API run_loop *run_open(int *argc, char ***argv, const run_defaults *defaults);
TD_API td_context *run_context(run_loop *run);
TD_API const char *run_data(run_loop *run);               /* --data; "" and wrong usage without one */

/* Values of flags, the program's own included. Valid until run_close. */
TD_API const char *run_flag_text(run_loop *run, const char *flag);   /* NULL: no value */
TD_API int64_t run_flag_whole(run_loop *run, const char *flag);      /* 0: no value */
TD_API double run_flag_number(run_loop *run, const char *flag);      /* 0: no value */
TD_API bool run_flag_on(run_loop *run, const char *flag);
/* The numbers of a RUN_COUNTS flag, at most `room`; returns how many there are. */
TD_API int run_flag_counts(run_loop *run, const char *flag, int64_t *out, int room);

/* For a value that follows from others: sets it unless one was given, be it in a file. false after an error. */
TD_API bool run_flag_default(run_loop *run, const char *flag, const char *text);

/* It was given now, on the command line or in --config. */
TD_API bool run_flag_given(run_loop *run, const char *flag);
/* The run starts from what is in --out: eval, --resume, commands that restore. */
TD_API bool run_restores(run_loop *run);

/* Trains on `set`, which the run owns from now on (NULL after an error of its constructor). */
TD_API void run_train_on(run_loop *run, data_set *set);
/* The next micro-batch. False at the end of the data or of --steps, after a signal (SIGINT, SIGTERM: the update in
 * progress is finished and saved), an early stop (--stop-after) and after the first error. SIGUSR1 saves, too, and goes
 * on. */
TD_API bool run_next(run_loop *run, data_batch *b);
/* The backward of `loss`, the mean over the micro-batch; after the last one of the update the optimizer's step, and log, evaluation and
 * checkpoint where due. The update's loss and gradient are those of its whole batch: where td_quotient takes `loss` apart (a loss with
 * weights or ignored labels, or td_div(sum, weight) of several together) sum over weight, with sum and weight over all micro-batches;
 * any other loss counts alike in each. Ends the step: its handles are gone. What it gave is read when it is due, or with the next call, so
 * that a GPU does not wait for the host; a number that is not finite ends the run then. The run closes the optimizer at its own end. Errors: an
 * update with losses of both kinds; under --dtype f16 an optimizer without a scaler, by which losses are scaled. */
TD_API void run_step(run_loop *run, opt_optimizer *opt, td_tensor loss);
/* The scaler of losses for optimizers under --dtype f16, one for all; NULL: losses stay as they are, or an error. */
TD_API opt_scaler *run_scaler(run_loop *run);
/* Waits, saves, reports, frees the context and the data. The exit status: 0 done, 1 failed, 2 wrong usage. */
TD_API int run_close(run_loop *run);

/* ---- Evaluation ----------------------------------------------------------------------------------------- */

/* One number of an evaluation: the sum of `sum` over all batches / the sum of `weight`. Scalars. */
typedef struct run_metric {
    const char *name;             /* "accuracy" */
    td_tensor sum, weight;
} run_metric;
enum { RUN_METRICS = 8 };
/* Records the metrics of one batch (padding has weight 0) and returns how many, the same each time; "loss" first. */
typedef int (*run_measure)(void *model, const data_batch *b, run_metric out[RUN_METRICS]);
/* Evaluates on `set` (owned by the run; NULL: not) every --eval-every updates and at the end. */
TD_API void run_evaluate_on(run_loop *run, data_set *set, run_measure measure, void *model);

/* ---- Optimizers by flags -------------------------------------------------------------------------------- */

/* For a model's table of flags. `standard` is the default of --optimizer. */
#define RUN_OPTIMIZER_FLAGS(standard_optimizer)                                                                        \
    { .name = "optimizer", .kind = RUN_CHOICE, .choices = "sgd|adam|adamw|adagrad|lion",                                \
      .standard = (standard_optimizer),                                                                                \
      .help = "rule of the update" },                                                                                  \
    { .name = "decay", .kind = RUN_AMOUNT, .standard = "0.01", .help = "weight decay" },                               \
    { .name = "momentum", .kind = RUN_FRACTION, .standard = "0.9", .help = "of sgd" },                                 \
    { .name = "clip", .kind = RUN_AMOUNT, .standard = "0", .help = "largest norm of the gradient; 0: any" },           \
    { .name = "clip-norm", .kind = RUN_CHOICE, .choices = "2|inf", .standard = "2",                                    \
      .help = "which norm that is, and grad_norm in metrics: of squares, or the largest" },                            \
    { .name = "freeze", .kind = RUN_TEXT, .help = "patterns of parameters' names that stay as they are: wte.*,h.0.*" }
/* The optimizer that those flags describe, for what trains under `root` once --freeze is done; the run's, and the same at each call. NULL
 * after an error. */
TD_API opt_optimizer *run_optimizer(run_loop *run, td_module root);

/* ---- Weights from elsewhere ------------------------------------------------------------------------------- */

/* The elements of s in its dtype, read before the next call; NULL after td_fail. */
typedef const void *(*run_weights_get)(void *user, td_state s);
/* Makes the directory --out for a run that begins. false and wrong usage without --out, or where it holds a run. */
TD_API bool run_begin(run_loop *run);
/* Makes --out a run that has weights and has not trained: checkpoint 0 of what `get` gives for each state of the context, asked for
 * one after the other, and the flags as they are. Commands that restore take it as any run; `train --resume` begins with it, at the
 * start of schedule and data, moments at 0, and seed and batch are free. The context's own state is neither read nor given memory.
 * run_begin comes first. false after an error, which leaves no checkpoint. */
TD_API bool run_save_weights(run_loop *run, run_weights_get get, void *user);
/* What is evaluated in place of a parameter, and so is what others want of a run: its average where --ema keeps one, else itself. */
TD_API td_state run_evaluated(td_state parameter);
/* One line on stdout that tells what a command came to; with --json on stderr. */
TD_API void run_say(run_loop *run, const char *format, ...) TD_PRINTF(2, 3);

/* ---- Reference binaries ---------------------------------------------------------------------------------- */

/* A subcommand of the model's own, beside those that all have, or in place of one of them. */
typedef struct run_command {
    const char *name;
    const char *help;             /* one line */
    bool restores;                /* flags come from --out as for eval, and the model is made (of no data set) and filled from the last checkpoint */
    void (*go)(run_loop *run, void *model); /* model: NULL unless it restores. Errors are the context's */
} run_command;

typedef struct run_model {
    const char *about;            /* one line for --help */
    run_defaults defaults;
    /* The data of a split: "train", "test", or "random" (made up, of the same form, without files). NULL without an
     * error: there is no such split. The run owns it. */
    data_set *(*data)(run_loop *run, const char *split);
    /* Makes the model for data of this form. NULL after an error. */
    void *(*make)(run_loop *run, td_module root, const data_set *set); /* set: NULL for a command of the model's own */
    void (*free)(void *model);    /* NULL is never passed */
    td_tensor (*loss)(void *model, const data_batch *b);
    run_measure measure;
    void (*settle)(run_loop *run); /* gives flags that follow from others their values (run_flag_default); NULL: none do */
    /* Puts what else belongs to a run of this model into `dir`, a folder made for it in --out, before the first checkpoint; rank 0. NULL:
     * nothing does. false after an error. */
    bool (*record)(run_loop *run, const char *dir);
    const run_command *commands;  /* ends with a NULL name; NULL: none */
} run_model;

/* The whole program: subcommands train, eval, bench, plan, plot, export and the model's own. Returns the exit status. */
TD_API int run_main(int argc, char **argv, const run_model *model);

#ifdef __cplusplus
}
#endif

#endif
