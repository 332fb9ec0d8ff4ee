/* --max-restarts N: ranks that this program started begin again from the last complete checkpoint when one of them died, stopped
 * or was late, and when one failed: the disk may have room again. Not after wrong usage, a disagreement of programs, a signal
 * to the launcher, or the same error as the last time.
 *
 * They are started with the same arguments and --resume, which goes on with the curves too. Before the run has a checkpoint they
 * are started as they were, from the beginning. Checkpoints of an earlier run in OUT, which the first update moves aside, are
 * none of the run's.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "run/loop.h"

static uint64_t identity_of_checkpoints(const run_loop *run)
{
    char path[RUN_PATH];
    struct stat folder;
    int size = snprintf(path, sizeof path, "%s/checkpoints", run->out);
    return size < (int)sizeof path && stat(path, &folder) == 0 ? (uint64_t)folder.st_ino : 0;
}

void run_restarts_begin(const run_loop *run, run_restarts *r, char **argv)
{
    *r = (run_restarts){ .argv = argv, .most = run_flags_whole(&run->flags, "max-restarts") };
    r->checkpoints = identity_of_checkpoints(run);
}

static bool can_mend(const run_loop *run, const run_restarts *r)
{
    switch (r->cause) {
    case PAR_DIED: case PAR_LATE: return true;
    case PAR_FAILED: return run->status != 2 && strcmp(r->message, r->before) != 0;
    case PAR_ENDED: case PAR_DISAGREED: case PAR_INTERRUPTED: break;
    }
    return false;
}

/* From now on with --resume; false: no memory. */
static bool resume_from_now_on(run_restarts *r)
{
    int count = 0;
    while (r->argv[count]) count++;
    r->own = run_copy_arguments(count + 1, r->argv);
    if (!r->own) return false;
    r->own[count] = "--resume";
    r->argv = r->own;
    return true;
}

bool run_restarts_again(run_loop *run, run_restarts *r)
{
    if (r->done == r->most || !can_mend(run, r)) return false;
    bool resumes = run_flags_on(&run->flags, "resume"), ours = resumes || identity_of_checkpoints(run) != r->checkpoints;
    int64_t step = ours ? run_latest(run->out) : -1;
    char from[64] = "the beginning";
    if (step >= 0) snprintf(from, sizeof from, "step %lld", (long long)step);
    if (step >= 0 && !resumes && !r->own && !resume_from_now_on(r)) return false;
    r->done++;
    fprintf(stderr, "%s: %s: restart %lld of %lld, from %s\n", run->name, r->message, (long long)r->done, (long long)r->most, from);
    memcpy(r->before, r->message, sizeof r->before);
    fflush(NULL);
    return true;
}

void run_restarts_end(run_restarts *r) { free(r->own); }
