/* What the files of `strategies` share: of a model a matrix of cells, a strategy on a number of ranks each, and what is known of every cell.
 *
 * A cell is measured by the model's own binary as a child process, and foretold by its `plan`. A cell that fails keeps the child's
 * one-line error; the others go on.
 */
#ifndef TANDEM_BENCH_STRATEGIES_H
#define TANDEM_BENCH_STRATEGIES_H

#include <math.h>
#include <stdio.h>

#include <tandem/parallel.h>

#include "core/json.h"

enum { CELLS = 128, PATH_ROOM = 4096, WORDS = 128, ERROR_ROOM = 300 };

/* Of one update; NaN: not known. */
typedef struct figures {
    double items_per_s, step_ms, peak_bytes, comm_bytes, exposed_ms;
    double own_plan_bytes;        /* of the run that was measured: with the memory that its own libraries asked for */
} figures;

/* A model by name: a binary's, and how. */
enum { SHAPE_WORDS = 8, SHAPE_NAMES = 128 };
typedef struct shape {
    const char *name, *binary;
    const char *words[SHAPE_WORDS]; /* flags for the binary */
    const char *strategies;       /* where none are asked for */
    int rows;                     /* of a batch, for each rank */
    int tokens;                   /* of a row */
} shape;

typedef struct cell {
    char strategy[64];
    int ranks;
    bool done;                    /* it was tried */
    char error[ERROR_ROOM];       /* "": it went well */
    figures measured, planned;
    double efficiency;            /* items/s over those of one rank x ranks; NaN: not known */
    double difference;            /* --check: the largest of a loss from that of one rank */
    int difference_step;
} cell;

typedef struct bench {
    td_context *td;
    char binary[PATH_ROOM];       /* of the model */
    char model[64], out[PATH_ROOM / 16 + 80]; /* out "": nothing is written */
    const char *device, *machine, *dtype; /* dtype NULL: the binary's own */
    const shape *shape;           /* NULL: the model is a binary, and as its flags say */
    bool checks;
    bool rehearses;               /* the first rank of each cell is there alone */
    FILE *table;                  /* where figures go as text */
    bool prints_json;             /* and what is in results.json to stdout */
    int steps;                    /* 0: the binary's own */
    int rank_threads;
    int rank_rows;                /* of a batch, for each rank; 0: the batch is what the flags say, on any ranks */
    const char *words[WORDS];     /* passed on to the model */
    int word_count;
    cell cells[CELLS];
    int cell_count;
    bool stopped;                 /* by a signal */
} bench;

/* ---- shapes.c: models by name */
const shape *shape_named(const char *name);   /* NULL: there is none */
const char *shape_names(char to[SHAPE_NAMES]); /* all of them, with commas between */

/* ---- child.c: processes */
/* Signals that ask for an end are noted, and passed on to the child that runs. */
void child_catch_signals(void);
bool child_stopped(void);
/* Runs argv (NULL behind the last) in `directory` (NULL: here) and waits. Its stdout goes to *out (the caller frees; NULL: dropped), the
 * last line of its stderr to `error`. Returns its exit status; 127 where it could not be started, 128 + the signal that ended it. */
int child_run(const char *directory, char *const *argv, char **out, char error[ERROR_ROOM]);

/* ---- cells.c: what each cell comes to */
/* The matrix of the lists of strategies and ranks. false: a message was printed. */
bool cells_make(bench *b, const char *strategies, const char *ranks);
void cell_measure(bench *b, cell *c);
/* Trains; keeps the losses of each update, at most `room`. Returns how many; 0 after an error, which the cell keeps. */
int cell_train(bench *b, cell *c, double *losses, int room);
const cell *cells_baseline(const bench *b);   /* one rank; NULL: there is none that went well */

/* ---- report.c: the table, OUT/results.json and the plots */
void report_begin(const bench *b);
void report_cell(const bench *b, const cell *c);
bool report_write(const bench *b);            /* to OUT, or stdout, or both. false: a message was printed */
bool report_plot(const bench *b);

#endif
