/* The launcher: starts this program again once a rank, and sees to it that all of them end.
 *
 * A rank is a fork that executes at once, so nothing of this process's threads and libraries lives on in it. The
 * kernel kills it when the launcher dies. Ranks have process groups of their own: a signal from the terminal reaches
 * the launcher only, which passes it on once. Rank 0 writes to the launcher's stdout and stderr; of the others stderr
 * is kept and told only if they fail without having said why to their world.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "parallel/world.h"

enum { TAIL_BYTES = 2048, POLL_MS = 100, OURS = 4 };

static const double GRACE_S = 3; /* from a failure until ranks that have not ended are killed */

typedef struct launched_rank {
    pid_t pid;            /* 0: not started or reaped */
    int stderr_fd;        /* -1: none */
    int status;           /* exit status; 1 for a signal */
    double stopped_since; /* 0: runs */
    size_t tail_bytes;
    char tail[TAIL_BYTES]; /* the end of what it wrote to stderr */
} launched_rank;

typedef struct launcher {
    par_world world;
    char **argv;
    char *path;         /* of this program */
    char **environment; /* of the ranks; begins with `own` */
    char own[OURS][48]; /* the rank's, then what is the same for all */
    int segment_fd, signal_fd, null_fd;
    sigset_t mask; /* the caller's, to be restored */
    struct sigaction on_child;
    pid_t pid;
    launched_rank *rank;
    int first_failed; /* by time; -1: none */
    int interrupted;  /* signal passed on; 0: none */
    double kill_at;   /* 0: not yet */
} launcher;

/* ---- Setting up ------------------------------------------------------------------------------------------ */

static bool is_ours(const char *variable)
{
    static const char *const names[OURS] = { "TANDEM_RANK=", "TANDEM_WORLD=", "TANDEM_FD=", "TANDEM_LAUNCHER=" };
    for (int i = 0; i < OURS; i++)
        if (strncmp(variable, names[i], strlen(names[i])) == 0) return true;
    return false;
}

/* Our four variables and the caller's environment. */
static bool make_environment(launcher *l)
{
    size_t count = 0, kept = 0;
    while (environ[count]) count++;
    l->environment = calloc(count + OURS + 1, sizeof *l->environment);
    if (!l->environment) return false;
    for (int i = 0; i < OURS; i++) l->environment[kept++] = l->own[i];
    for (size_t i = 0; i < count; i++)
        if (!is_ours(environ[i])) l->environment[kept++] = environ[i];
    snprintf(l->own[1], sizeof l->own[1], "TANDEM_WORLD=%d", l->world.ranks);
    snprintf(l->own[2], sizeof l->own[2], "TANDEM_FD=%d", l->segment_fd);
    snprintf(l->own[3], sizeof l->own[3], "TANDEM_LAUNCHER=%ld", (long)l->pid);
    return true;
}

/* The file of this program; its link in /proc where the file has been replaced since. */
static char *own_path(void)
{
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    path[n < 0 ? 0 : n] = 0;
    return strdup(n > 0 && access(path, X_OK) == 0 ? path : "/proc/self/exe");
}

static void restore_signals(const launcher *l)
{
    sigaction(SIGCHLD, &l->on_child, NULL);
    pthread_sigmask(SIG_SETMASK, &l->mask, NULL);
}

static bool watch_signals(launcher *l)
{
    sigset_t watched;
    sigemptyset(&watched);
    static const int signals[] = { SIGINT, SIGTERM, SIGHUP, SIGTSTP, SIGUSR1, SIGCHLD };
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) sigaddset(&watched, signals[i]);
    pthread_sigmask(SIG_BLOCK, &watched, &l->mask);
    sigaction(SIGCHLD, &(struct sigaction){ .sa_handler = SIG_DFL },
              &l->on_child); /* ignored, it would take the statuses */
    l->signal_fd = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
    if (l->signal_fd >= 0) return true;
    restore_signals(l);
    return false;
}

/* ---- Starting -------------------------------------------------------------------------------------------- */

/* In the child, where only system calls are safe. */
static _Noreturn void become_rank(launcher *l, int rank, int stderr_fd)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != l->pid) _exit(1); /* the launcher died before the line above */
    setpgid(0, 0);
    if (rank > 0) {
        dup2(l->null_fd, STDIN_FILENO);
        dup2(l->null_fd, STDOUT_FILENO);
        dup2(stderr_fd, STDERR_FILENO);
    }
    fcntl(l->segment_fd, F_SETFD, 0);
    signal(SIGUSR1, SIG_IGN); /* until the rank has a use for it */
    sigprocmask(SIG_SETMASK, &l->mask, NULL);
    execve(l->path, l->argv, l->environment);
    atomic_store(&l->world.segment->area[rank].start_error, errno);
    _exit(127);
}

static bool start_rank(launcher *l, int rank)
{
    launched_rank *r = &l->rank[rank];
    int ends[2] = { -1, -1 };
    if (rank > 0 && pipe2(ends, O_CLOEXEC) != 0) return false;
    snprintf(l->own[0], sizeof l->own[0], "TANDEM_RANK=%d", rank);
    pid_t pid = fork();
    if (pid == 0) become_rank(l, rank, ends[1]);
    int error = errno;
    if (ends[1] >= 0) close(ends[1]);
    if (pid < 0) {
        if (ends[0] >= 0) close(ends[0]);
        errno = error;
        return false;
    }
    r->pid = pid;
    r->stderr_fd = ends[0];
    if (ends[0] >= 0) fcntl(ends[0], F_SETFL, O_NONBLOCK);
    return true;
}

/* ---- Watching -------------------------------------------------------------------------------------------- */

static void signal_all(const launcher *l, int number)
{
    for (int r = 0; r < l->world.ranks; r++)
        if (l->rank[r].pid > 0) kill(l->rank[r].pid, number);
}

static int running(const launcher *l)
{
    int count = 0;
    for (int r = 0; r < l->world.ranks; r++) count += l->rank[r].pid > 0;
    return count;
}

static void read_stderr(launched_rank *r)
{
    char chunk[512];
    for (;;) {
        ssize_t n = read(r->stderr_fd, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) {
            close(r->stderr_fd);
            r->stderr_fd = -1;
            return;
        }
        size_t excess = r->tail_bytes + (size_t)n > TAIL_BYTES ? r->tail_bytes + (size_t)n - TAIL_BYTES : 0;
        memmove(r->tail, r->tail + excess, r->tail_bytes - excess);
        memcpy(r->tail + r->tail_bytes - excess, chunk, (size_t)n);
        r->tail_bytes += (size_t)n - excess;
    }
}

/* A rank has ended. One that did well is marked, so that who waits for it need not wait out the deadline. */
static void rank_ended(launcher *l, int rank, int status)
{
    launched_rank *r = &l->rank[rank];
    par_area *area = &l->world.segment->area[rank];
    char place[PAR_WHERE_BYTES];
    r->pid = 0;
    atomic_store(&area->busy, 0);
    r->status = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    if (r->stderr_fd >= 0) read_stderr(r);
    if (r->status == 0) {
        par_end(&l->world, rank);
        return;
    }
    if (l->first_failed < 0) l->first_failed = rank;
    int error = atomic_load(&area->start_error);
    if (error) par_break(&l->world, PAR_LAUNCHER, "rank %d could not be started: %s", rank, strerror(error));
    else if (WIFEXITED(status))
        par_break(&l->world, PAR_LAUNCHER, "rank %d exited with status %d %s", rank, r->status, par_where(area, place));
    else if (WTERMSIG(status) == l->interrupted)
        par_break(&l->world, PAR_LAUNCHER, "stopped by signal %d (%s)", l->interrupted, strsignal(l->interrupted));
    else
        par_break(&l->world, PAR_LAUNCHER, "rank %d was killed by signal %d (%s) %s", rank, WTERMSIG(status),
                  strsignal(WTERMSIG(status)), par_where(area, place));
}

static void look_at_ranks(launcher *l)
{
    double now = par_seconds();
    char place[PAR_WHERE_BYTES];
    for (int rank = 0; rank < l->world.ranks; rank++) {
        launched_rank *r = &l->rank[rank];
        if (r->stderr_fd >= 0) read_stderr(r);
        int status;
        while (r->pid > 0 && waitpid(r->pid, &status, WNOHANG | WUNTRACED | WCONTINUED) == r->pid) {
            if (WIFSTOPPED(status)) r->stopped_since = now;
            else if (WIFCONTINUED(status)) r->stopped_since = 0;
            else rank_ended(l, rank, status);
        }
        if (r->pid > 0 && r->stopped_since > 0 && now > r->stopped_since + l->world.segment->timeout_s + 1)
            par_break(&l->world, PAR_LAUNCHER, "rank %d was stopped by a signal %s and not continued", rank,
                      par_where(&l->world.segment->area[rank], place));
    }
}

/* The first signal lets ranks save and end; a second SIGINT, which only a user sends, ends them. Others may come twice for one
 * request, as from Slurm and from srun. */
static void pass_on(launcher *l, int number)
{
    if (number == SIGTSTP) {
        signal_all(l, SIGSTOP);
        raise(SIGSTOP);
        signal_all(l, SIGCONT);
        return;
    }
    if (number == SIGUSR1) { /* a request, which ranks agree on among themselves: of several they would make several */
        if (l->rank[0].pid > 0) kill(l->rank[0].pid, number);
        return;
    }
    if (l->interrupted && number != SIGINT) return;
    if (l->interrupted) {
        par_break(&l->world, PAR_LAUNCHER, "stopped by signal %d (%s)", number, strsignal(number));
        signal_all(l, SIGKILL);
        return;
    }
    l->interrupted = number;
    l->kill_at = par_seconds() + l->world.segment->timeout_s + GRACE_S;
    signal_all(l, number);
}

static void read_signals(launcher *l)
{
    struct signalfd_siginfo info;
    while (read(l->signal_fd, &info, sizeof info) == (ssize_t)sizeof info)
        if (info.ssi_signo != SIGCHLD) pass_on(l, (int)info.ssi_signo);
}

static void wait_for_events(launcher *l)
{
    struct pollfd events[PAR_MAX_RANKS + 1] = { { .fd = l->signal_fd, .events = POLLIN } };
    for (int r = 0; r < l->world.ranks; r++)
        events[r + 1] = (struct pollfd){ .fd = l->rank[r].stderr_fd, .events = POLLIN };
    poll(events, (nfds_t)l->world.ranks + 1, POLL_MS);
}

/* They cannot end when the world has been stopped. */
static void kill_stopped(const launcher *l)
{
    for (int r = 0; r < l->world.ranks; r++)
        if (l->rank[r].pid > 0 && l->rank[r].stopped_since > 0) kill(l->rank[r].pid, SIGKILL);
}

/* Ranks that are to end may do so behind a save: those that were asked to as long as it takes, those of a world that has failed for
 * the time of the deadline. */
static bool may_save(const launcher *l, bool failed, double excused)
{
    if (failed && excused > l->world.segment->timeout_s) return false;
    return l->kill_at > 0 && par_excused(l->world.segment, excused);
}

static void watch(launcher *l)
{
    bool failed = false;
    double before = par_seconds(), excused = 0;
    while (running(l) > 0) {
        wait_for_events(l);
        read_signals(l);
        look_at_ranks(l);
        double now = par_seconds(), slice = now - before;
        before = now;
        if (may_save(l, failed, excused)) l->kill_at += slice, excused += slice;
        if (failed) kill_stopped(l);
        if (!failed && par_broken(&l->world)) {
            failed = true;
            excused = 0;
            if (l->kill_at == 0 || l->kill_at > now + GRACE_S) l->kill_at = now + GRACE_S;
        }
        if (l->kill_at == 0 || now < l->kill_at) continue;
        par_break(&l->world, PAR_LAUNCHER, "ranks did not end within %g s after signal %d",
                  l->world.segment->timeout_s + GRACE_S, l->interrupted);
        signal_all(l, SIGKILL);
    }
}

/* ---- The end --------------------------------------------------------------------------------------------- */

/* The status of the rank that stopped the world, else of the first that failed. */
static int exit_status(const launcher *l)
{
    int who = atomic_load(&l->world.segment->broken) - 1;
    if (who >= 0 && who < l->world.ranks && l->rank[who].status) return l->rank[who].status;
    if (l->first_failed >= 0) return l->rank[l->first_failed].status;
    return who >= 0;
}

static par_cause cause_of(const launcher *l, int status)
{
    int who = atomic_load(&l->world.segment->broken) - 1;
    if (l->interrupted) return PAR_INTERRUPTED;
    if (who < 0) return status ? PAR_DIED : PAR_ENDED;
    if (who == PAR_LAUNCHER) return PAR_DIED;
    int cause = atomic_load(&l->world.segment->area[who].cause);
    return cause ? (par_cause)cause : PAR_DISAGREED;
}

/* The world's text; with what a rank wrote that failed without giving one. */
static void tell(const launcher *l, char *message, size_t room)
{
    const char *text = par_broken(&l->world);
    if (room == 0) return;
    snprintf(message, room, "%s", text ? text : "");
    const launched_rank *r = l->first_failed >= 0 ? &l->rank[l->first_failed] : NULL;
    bool said_nothing = atomic_load(&l->world.segment->broken) == PAR_LAUNCHER + 1;
    if (!r || !said_nothing || r->tail_bytes == 0) return;
    size_t end = r->tail_bytes, length = strlen(message);
    while (end > 0 && r->tail[end - 1] == '\n') end--;
    snprintf(message + length, room - length, "; it wrote:\n%.*s", (int)end, r->tail);
}

static void launcher_close(launcher *l)
{
    for (int r = 0; l->rank && r < l->world.ranks; r++)
        if (l->rank[r].stderr_fd >= 0) close(l->rank[r].stderr_fd);
    if (l->signal_fd >= 0) {
        struct signalfd_siginfo late; /* came after the last rank ended: there is nobody to pass it to */
        while (read(l->signal_fd, &late, sizeof late) > 0) continue;
        close(l->signal_fd);
        restore_signals(l);
    }
    if (l->null_fd >= 0) close(l->null_fd);
    if (l->segment_fd >= 0) close(l->segment_fd);
    free(l->rank);
    free(l->environment);
    free(l->path);
    par_segment_close(&l->world);
}

static bool launcher_open(launcher *l, int ranks, const par_world_options *options)
{
    if (!par_segment_open(&l->world, ranks, options, &l->segment_fd)) return false;
    l->null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    l->path = own_path();
    l->rank = calloc((size_t)ranks, sizeof *l->rank);
    for (int r = 0; l->rank && r < ranks; r++) l->rank[r].stderr_fd = -1;
    return l->null_fd >= 0 && l->path && l->rank && make_environment(l) && watch_signals(l);
}

int par_launch(int ranks, char **argv, const par_world_options *options, char *message, size_t room)
{
    launcher l = {
        .argv = argv, .segment_fd = -1, .signal_fd = -1, .null_fd = -1, .pid = getpid(), .first_failed = -1
    };
    if (!launcher_open(&l, ranks, options)) {
        int error = errno;
        snprintf(message, room, "%d ranks could not be started on this machine: %s", ranks,
                 error == EINVAL ? "it takes 1 to 256 ranks, a timeout and a staging size that are not negative"
                                 : strerror(error));
        launcher_close(&l);
        return 1;
    }
    for (int r = 0; r < ranks && !par_broken(&l.world); r++)
        if (!start_rank(&l, r))
            par_break(&l.world, PAR_LAUNCHER, "rank %d could not be started: %s", r, strerror(errno));
    watch(&l);
    int status = exit_status(&l);
    if (options && options->cause) *options->cause = cause_of(&l, status);
    tell(&l, message, room);
    launcher_close(&l);
    return status;
}
