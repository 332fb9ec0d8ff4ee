/* What the files of the profile share: its events gathered into a table. */
#ifndef TANDEM_RUN_PROFILE_H
#define TANDEM_RUN_PROFILE_H

#include "run/loop.h"

enum { RUN_PROFILE_NAME = 96, RUN_PROFILE_HOST = 16 };

/* The tasks of one kind in modules that differ by numbers alone: "h.*.attn". Sums over all updates. */
typedef struct run_profile_row {
    char module[RUN_PROFILE_NAME];
    const char *kind;
    int64_t modules;              /* that it merges */
    int64_t calls, flops, bytes, sent;
    double ns, phase_ns[3];       /* td_profile_phase */
    double floor_ns;              /* of each call the larger of FLOPs / peak and bytes / bandwidth */
} run_profile_row;

typedef struct run_profile_host {
    const char *name;             /* as in td_profile_event; "between tasks" is what is left of "run" */
    double ns;
} run_profile_host;

typedef struct run_profile_table {
    td_context *td;
    run_profile_row *rows;        /* the longest time first */
    int64_t row_count, row_room;
    run_profile_row *kinds;       /* the same by kind alone */
    int64_t kind_count, kind_room;
    struct run_profile_place *places;
    int64_t place_count, place_room;
    run_profile_row all;
    run_profile_host host[RUN_PROFILE_HOST];
    int host_count;
    double host_ns;
    double beside_ns;             /* of collectives and copies, which a GPU makes beside computation */
    double exposed_ns;            /* of that, while nothing is computed */
} run_profile_table;

typedef struct run_span {
    int64_t begin_ns, end_ns;
    bool beside;                  /* a collective or a copy */
} run_span;
/* How long at least one of the spans lasts, of computation alone if asked. Sorts them by their begin. */
double run_spans_ns(run_span *spans, int64_t count, bool computation);

/* Gathers the profile of run->td. Close it also after an error. */
bool run_profile_gather(run_loop *run, run_profile_table *to);
void run_profile_close(run_profile_table *table);
void run_profile_print(run_loop *run, const run_profile_table *table);
/* Members of the open object. */
void run_profile_put(const run_loop *run, const run_profile_table *table, td_json_writer *w);

/* trace.c: OUT/profile.trace.json, all ranks in one file. Every rank calls it. */
bool run_trace_write(run_loop *run);

#endif
