/* Flags: one table says name, kind, default and help; parsing, --help, config files and config.json follow from it.
 *
 * A value has a source; a stronger source wins: command line > --config FILE > OUT/config.json > the table.
 * Every value is checked when it is set, so reading one cannot fail.
 */
#ifndef TANDEM_RUN_FLAGS_H
#define TANDEM_RUN_FLAGS_H

#include <tandem/run.h>

#include <stdio.h>

#include "core/json.h"

enum { RUN_MAX_FLAGS = 128 };
enum { RUN_ALONE = ((1 << RUN_OWN_COMMANDS) - 1) * RUN_OWN | RUN_EXPORT }; /* commands of one process */

typedef enum run_source { RUN_DEFAULT, RUN_SAVED, RUN_CONFIG, RUN_GIVEN } run_source;

typedef struct run_value {
    const run_flag *flag;
    char *text;                   /* owned; NULL: no value */
    run_source source;
} run_value;

typedef struct run_flags {
    const char *program;          /* "mlp train", for messages */
    unsigned command;             /* RUN_TRAIN ...; flags of other commands are refused */
    run_value values[RUN_MAX_FLAGS];
    int count;
    char error[512];              /* one line: what is wrong and how to mend it */
} run_flags;

/* Adds a table (it ends with a NULL name; NULL is an empty table). A later row of the same name replaces the default
 * and help of an earlier one. false and flags->error: too many, or memory. */
bool run_flags_add(run_flags *flags, const run_flag *table);
/* What every binary takes (common_flags.c). */
extern const run_flag run_common_flags[];
void run_flags_free(run_flags *flags);

/* Sets one value; the text is copied. A weaker source than the present one changes nothing. false and flags->error:
 * unknown name, a flag of another command, or a value of the wrong form. */
bool run_flags_set(run_flags *flags, const char *name, const char *text, run_source source);
/* Leaves the flag without a value. */
void run_flags_unset(run_flags *flags, const char *name);
/* Reads "--name value", "--name=value" and switches from argv[1..]; what is no flag stays, *argc is adjusted. */
bool run_flags_parse(run_flags *flags, int *argc, char **argv);
/* Reads a JSON file of the same names. Names of other commands are passed over. false and flags->error. */
bool run_flags_load(run_flags *flags, const char *path, run_source source);

const char *run_flags_text(const run_flags *flags, const char *name);     /* NULL: no value */
int64_t run_flags_whole(const run_flags *flags, const char *name);        /* 0: no value; the bits of a RUN_SEED */
double run_flags_number(const run_flags *flags, const char *name);        /* 0: no value */
bool run_flags_on(const run_flags *flags, const char *name);
const char *run_flags_standard(const run_flags *flags, const char *name); /* the default; NULL: none */
run_source run_flags_source(const run_flags *flags, const char *name);

/* The text of --help. */
void run_flags_help(const run_flags *flags, FILE *to);
/* Writes the resolved values as members of the open object, without those that only say where and whether to go on. */
void run_flags_put(const run_flags *flags, td_json_writer *to);

#endif
