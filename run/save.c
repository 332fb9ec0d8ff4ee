/* Saving while training goes on.
 *
 * A save copies what this rank writes and starts a thread that writes it. That thread is on its own: it has a context for its
 * errors, calls no collective and nothing of the run, so that no rank's training waits for another's disk. Beside its file a
 * rank has a lock, made before the file gets its name and gone when the rank has no more to do in the folder; the first rank's
 * thread waits until all files are there without their locks and then completes the checkpoint.
 *
 * Of two saves the second waits for the first. What the thread could not write becomes the run's error behind the next update,
 * and so that of all ranks. A run that ends, well or not, ends behind its last save. Where it has failed, other ranks may be no
 * more: the system takes the lock from the dead and from those that could not write, and a file whose writer has not been seen is
 * waited for RUN_GRACE_S.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "core/thread.h"
#include "run/checkpoint.h"

static const double RUN_GRACE_S = 2, WORTH_SAYING_S = 1;
static const double LEFT_S = 0.2; /* a lock is made, and a moment later taken */

struct run_saver {
    run_snapshot snapshot;
    td_context *td;               /* the thread's */
    pthread_t thread;
    bool watched;                 /* by the launcher, which ends ranks that hold a lock for ever */
    atomic_bool alone;            /* the run has failed: files of other ranks may never come */
    atomic_bool done;
    bool whole;                   /* once it is done: without an error */
    bool asked;                   /* by a signal */
};

static void rest(void) { nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL); }

/* ---- The thread */

static bool lock_of(run_saver *w, int rank, char path[RUN_PATH])
{
    char file[RUN_PATH];
    return run_snapshot_file(w->td, &w->snapshot, rank, file) && run_path(w->td, path, "%s.lock", file);
}

typedef enum writer { NOT_SEEN, WRITES, LEFT } writer;

static writer writer_of(const char *lock)
{
    int fd = open(lock, O_RDWR | O_CLOEXEC);
    if (fd < 0) return NOT_SEEN;
    writer seen = flock(fd, LOCK_EX | LOCK_NB) == 0 ? LEFT : errno == EWOULDBLOCK ? WRITES : NOT_SEEN;
    close(fd);
    return seen;
}

static bool await_file(run_saver *w, int rank)
{
    char path[RUN_PATH], lock[RUN_PATH];
    double alone_at = 0;
    if (!run_snapshot_file(w->td, &w->snapshot, rank, path) || !lock_of(w, rank, lock)) return false;
    while (access(path, F_OK) || !access(lock, F_OK)) {
        if (!alone_at && atomic_load(&w->alone)) alone_at = run_now();
        writer seen = alone_at > 0 ? writer_of(lock) : NOT_SEEN;
        if (seen == WRITES && w->watched) alone_at = run_now();
        if (alone_at > 0 && run_now() > alone_at + (seen == LEFT ? LEFT_S : RUN_GRACE_S)) {
            td_fail(w->td, TD_ERROR_DATA, "%s did not come: the checkpoint is not complete", path);
            return false;
        }
        rest();
    }
    return true;
}

static bool lock_fail(run_saver *w, const char *lock)
{
    td_fail(w->td, TD_ERROR_DATA, "%s: cannot be written: %s", lock, strerror(errno));
    return false;
}

static bool write_locked(run_saver *w)
{
    char lock[RUN_PATH];
    if (!lock_of(w, w->snapshot.rank, lock)) return false;
    int fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) return lock_fail(w, lock);
    flock(fd, LOCK_EX); /* where a file system has none, a rank that writes passes for dead, once the run has failed */
    bool ok = run_snapshot_write(w->td, &w->snapshot);
    if (ok && unlink(lock)) ok = lock_fail(w, lock);
    close(fd);
    return ok;
}

static bool write_all(run_saver *w)
{
    const run_snapshot *s = &w->snapshot;
    if (!run_make_directory(w->td, s->partial) || !write_locked(w)) return false;
    if (s->rank != 0) return true;
    for (int rank = 1; rank < s->ranks; rank++)
        if (!await_file(w, rank)) return false;
    return run_snapshot_complete(w->td, s);
}

static void *write_out(void *argument)
{
    run_saver *w = argument;
    w->whole = write_all(w);
    if (!w->whole && w->snapshot.rank == 0) run_remove_tree(w->td, w->snapshot.partial);
    atomic_store(&w->done, true);
    return NULL;
}

/* ---- The run's side */

static void saver_free(run_loop *run)
{
    run_saver *w = run->saver;
    run->saver = NULL;
    run_snapshot_free(&w->snapshot);
    td_close(w->td);
    td_free(run->td, w, sizeof *w, "checkpoint");
}

static bool saver_start(run_loop *run)
{
    run_saver *w = td_alloc(run->td, sizeof *w, "checkpoint");
    if (!w) return false;
    *w = (run_saver){ .td = td_open(&(td_options){ .threads = 1 }), .watched = par_launched() };
    run->saver = w;
    bool ok = run_snapshot_begin(run, &w->snapshot) && run_snapshot_copy(run, &w->snapshot);
    int status = ok ? td_thread_start(&w->thread, write_out, w) : 0;
    if (status) td_fail(run->td, TD_ERROR_MEMORY, "no thread could be started to write a checkpoint: %s", strerror(status));
    run->checkpoint_bytes = w->snapshot.bytes;
    if (ok && !status) return true;
    saver_free(run);
    return false;
}

void run_say_saved(run_loop *run, int64_t step)
{
    if (run->saver && run->saver->snapshot.step == step) run->saver->asked = true; /* said when it stands */
    else if (*run->out) run_say(run, "saved on a signal: %s/checkpoints/step-%lld", run->out, (long long)step);
    else run_say(run, "a signal asked for a checkpoint, but nothing is saved without --out");
}

/* The thread is done. */
static void collect(run_loop *run)
{
    run_saver *w = run->saver;
    int64_t step = w->snapshot.step;
    bool asked = w->asked;
    pthread_join(w->thread, NULL);
    if (w->whole) run->saved_step = step;
    else td_fail(run->td, td_error(w->td), "%s", td_error_text(w->td));
    bool whole = w->whole;
    saver_free(run);
    if (whole && asked) run_say_saved(run, step);
}

bool run_save_check(run_loop *run)
{
    if (run->saver && atomic_load(&run->saver->done)) collect(run);
    return !run_failed(run);
}

bool run_save_wait(run_loop *run)
{
    if (!run->saver) return !run_failed(run);
    run_busy(run, true);
    while (!atomic_load(&run->saver->done)) {
        if (run_failed(run) || (run->world && *par_world_error(run->world))) atomic_store(&run->saver->alone, true);
        rest();
    }
    run_busy(run, false);
    collect(run);
    return !run_failed(run);
}

/* The one before must stand first. */
static bool wait_for_last(run_loop *run)
{
    if (!run_save_check(run) || !run->saver) return !run_failed(run);
    int64_t step = run->saver->snapshot.step;
    double begin = run_now();
    if (!run_save_wait(run)) return false;
    double waited = run_now() - begin;
    if (waited < WORTH_SAYING_S || run->said_waits) return true;
    run->said_waits = true;
    run_say(run, "waited %.1f s until the checkpoint of step %lld was written: a larger --save-every gives the disk more time", waited,
            (long long)step);
    return true;
}

bool run_save(run_loop *run)
{
    int64_t step = td_updates(run->td);
    if (!*run->out || run_failed(run)) return !run_failed(run);
    bool there = run->saved_step == step || (run->saver && run->saver->snapshot.step == step);
    if (there) return true;
    if (!wait_for_last(run)) return false;
    run_busy(run, true);
    bool ok = saver_start(run);
    run_busy(run, false);
    return ok;
}

bool run_save_again(run_loop *run)
{
    run_snapshot s = { 0 };
    if (run->rank != 0 || !*run->out) return !run_failed(run);
    if (!run_save_wait(run)) return false;
    if (run->saved_step != td_updates(run->td)) return true;
    run_busy(run, true);
    bool ok = run_snapshot_begin(run, &s) && run_snapshot_manifest(run->td, &s, s.final);
    run_snapshot_free(&s);
    run_busy(run, false);
    return ok;
}
