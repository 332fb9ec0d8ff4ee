/* What the files of `plan` share: what an update would cost one rank. */
#ifndef TANDEM_RUN_PLAN_H
#define TANDEM_RUN_PLAN_H

#include "run/machine.h"

enum { RUN_LARGEST = 8 };         /* values that are told of */

typedef struct run_planned {
    char strategy[64];
    int ranks;
    int64_t batch, accumulate, params;
    td_report report;             /* sums over the steps of an update; the peak is its largest step's */
    td_planned_memory memory;     /* at that peak */
    int64_t checkpoint_bytes;     /* beside that, while a checkpoint is written: its copy in the host's memory */
    int64_t calls[PAR_KINDS];     /* of computation, and of collectives by kind */
    int64_t sent[PAR_KINDS];      /* bytes */
    int64_t across;               /* of the bytes sent, those that leave the host: the mean over the ranks of a ring */
    run_estimate estimate;        /* zeros without a machine */
    bool fits;                    /* the machine's memory, where it is known */
    td_planned_value largest[RUN_LARGEST]; /* of the peak's step */
    int64_t largest_count;
    td_planned_moment peak;
} run_planned;

/* Plans one update: its first micro-batch, one between and the last, as they would run. false after an error. */
bool run_plan_update(run_loop *run, const run_model *model, void *object, const run_machine *m, run_planned *to);
/* What the plan takes for granted of a GPU that is described, on one line. */
void run_plan_assumptions(const run_loop *run, char *to, size_t room);
/* Members of the open object. */
void run_plan_put(const run_loop *run, const run_machine *m, const run_planned *p, td_json_writer *w);

/* plan_table.c: several strategies side by side. */
/* The command line asks for several: `--strategy all`, or names with commas between. */
bool run_plans_several(const run_loop *run);
/* Opens the run's model anew under each strategy and prints the table. */
void run_plan_table(run_loop *run, const run_model *model, int argc, char **argv);

#endif
