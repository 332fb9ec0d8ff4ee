/* A checkpoint between memory and disk: what one rank writes of it, copied, and what the manifest says of all. */
#ifndef TANDEM_RUN_CHECKPOINT_H
#define TANDEM_RUN_CHECKPOINT_H

#include "run/loop.h"

enum { RUN_KEY = 288 };           /* bytes of an entry's name */

/* Everything is of the step it was taken after; the run may have gone on. Zeroed: nothing is held. */
typedef struct run_snapshot {
    td_context *td;               /* that gave the memory */
    int64_t step;
    int rank, ranks;
    char model[64];
    char out[RUN_PATH];           /* of the run */
    char partial[RUN_PATH];       /* OUT/checkpoints/.step-N: written here */
    char final[RUN_PATH];         /* and then called step-N */
    int64_t keep;                 /* checkpoints, the newest */
    int64_t best;                 /* and this step; -1: no other */
    td_safetensors_entry *entries; /* of this rank's file: names and elements are below */
    char (*names)[RUN_KEY];
    char *data;
    int64_t count, room, bytes;
    td_json_writer manifest;      /* rank 0's */
} run_snapshot;

/* Step, paths and, on rank 0, the manifest. false after an error; run_snapshot_free in any case. */
bool run_snapshot_begin(run_loop *run, run_snapshot *s);
/* Copies the elements that this rank writes. */
bool run_snapshot_copy(run_loop *run, run_snapshot *s);
void run_snapshot_free(run_snapshot *s);

/* These touch nothing of the run, so that any thread may call them; errors are those of `td`.
 *
 * The path of a rank's file in the folder that is written. */
bool run_snapshot_file(td_context *td, const run_snapshot *s, int rank, char path[RUN_PATH]);
/* This rank's file, in a folder that is there: whole and synced once it has its name. */
bool run_snapshot_write(td_context *td, const run_snapshot *s);
/* Writes the manifest to the folder. */
bool run_snapshot_manifest(td_context *td, const run_snapshot *s, const char *dir);
/* By rank 0, when the files of all ranks are there: the manifest is written, the folder gets its final name, and then older
 * checkpoints than those that are kept go. */
bool run_snapshot_complete(td_context *td, const run_snapshot *s);

#endif
