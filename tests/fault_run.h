/* A training run that goes wrong on purpose, on one of its ranks: what tests of faults start, alone or under mpirun.
 *
 * It is the test's own program, started again with FAULT="WHAT PHASE" in the environment: main calls fault_program where
 * fault_wanted(). All it does beside training comes from the outside: an operation of its own in the model, a transport put
 * before the run's, a signal, and system calls of its own in place of the C library's.
 */
#ifndef TANDEM_TESTS_FAULT_RUN_H
#define TANDEM_TESTS_FAULT_RUN_H

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>

#include <tandem/rewrite.h>

#include "core/internal.h"
#include "tests/mpirun.h"
#include "tests/small_run.h"

enum { FAULT_RANK = 1, FAULT_UPDATE = 3 }; /* who, and after how many updates */

static struct {
    char what[16], phase[16]; /* "kill" "forward" */
    int rank;                 /* of this process; -1: the launcher */
    run_loop *run;
    const td_transport *real;
    td_transport wrapped;
    bool armed;               /* the next collective goes wrong */
    bool done;
} fault;

static inline bool fault_wanted(void) { return getenv("FAULT") != NULL; }

static inline bool fault_is(const char *what) { return !strcmp(fault.what, what); }

/* It is this rank's turn, in this phase. */
static inline bool fault_in(const char *phase) { return !fault.done && fault.rank == FAULT_RANK && !strcmp(fault.phase, phase); }

static inline int64_t fault_updates(void) { return fault.run && fault.run->td ? td_updates(fault.run->td) : -1; }

static inline void fault_sleep(double seconds)
{
    nanosleep(&(struct timespec){ .tv_sec = (time_t)seconds, .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds)) }, NULL);
}

static inline void fault_by_signal(int number)
{
    (void)number;
    raise(fault_is("kill") ? SIGKILL : SIGSTOP);
}

/* Ends or stops here where that is what is wanted; true: an error is. A collective that is wrong comes next otherwise. */
static inline bool fault_here(void)
{
    if (fault_is("kill") || fault_is("stop")) fault_by_signal(0);
    fault.done = fault_is("error");
    fault.armed = fault_is("skip") || fault_is("size");
    return fault.done;
}

/* ---- System calls: of rank files, when they are written and read ------------------------------------------- */

int fsync(int fd)
{
    char link[64], path[512] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (fault_in("save") && readlink(link, path, sizeof path - 1) > 0 && strstr(path, "/rank-") && fault_here()) return errno = EIO, -1;
    return (int)syscall(SYS_fsync, fd);
}

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    va_end(rest);
    bool reads = (flags & O_ACCMODE) == O_RDONLY;
    if (fault_in("load") && reads && fault_updates() == 0 && strstr(path, "/rank-") && fault_here()) return errno = EIO, -1;
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

/* ---- Collectives ------------------------------------------------------------------------------------------- */

static inline bool fault_due(bool gathers)
{
    if (fault.armed) return true;
    if (fault_is("skip") || fault_is("size")) {
        if (fault_in("start")) return true;
        if (fault_in("forward") && gathers) return fault_updates() == FAULT_UPDATE;
    }
    return fault_in("reduce") && !gathers && fault_updates() == FAULT_UPDATE;
}

/* What a call does in place of itself. */
typedef enum fault_call { FAULT_AS_IT_IS, FAULT_SKIPS, FAULT_FAILS, FAULT_OTHER_SIZE } fault_call;

static inline fault_call fault_next(bool gathers)
{
    bool others = fault.rank == 0 && !fault.done && !strcmp(fault.phase, "reduce") && !gathers && fault_updates() == FAULT_UPDATE;
    if (others) fault.done = true, fault_sleep(0.4); /* whom the rank waits for, in the call */
    if (!fault_due(gathers)) return FAULT_AS_IT_IS;
    fault.armed = false;
    fault.done = true;
    if (fault_is("skip")) return FAULT_SKIPS;
    if (fault_is("size")) return FAULT_OTHER_SIZE;
    if (fault_is("error")) {
        td_fail(fault.run->td, TD_ERROR_DEVICE, "the wire is cut");
        return FAULT_FAILS;
    }
    signal(SIGALRM, fault_by_signal);
    setitimer(ITIMER_REAL, &(struct itimerval){ .it_value.tv_usec = 200000 }, NULL);
    return FAULT_AS_IT_IS;
}

#define FAULT_CALL(gathers, count, call)                                                                               \
    fault_call next = fault_next(gathers);                                                                             \
    if (next == FAULT_SKIPS || next == FAULT_FAILS) return next == FAULT_SKIPS;                                        \
    if (next == FAULT_OTHER_SIZE) count--;                                                                             \
    return call

static inline bool fault_all_reduce(void *self, int axis, void *data, int64_t count, td_dtype dtype)
{
    FAULT_CALL(false, count, fault.real->all_reduce(self, axis, data, count, dtype));
}

static inline bool fault_reduce_scatter(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    FAULT_CALL(false, count, fault.real->reduce_scatter(self, axis, in, out, count, dtype));
}

static inline bool fault_all_gather(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    FAULT_CALL(true, count, fault.real->all_gather(self, axis, in, out, count, dtype));
}

static inline void fault_wrap(run_loop *run)
{
    fault.real = run->td->run.transport;
    if (!fault.real) return;
    fault.wrapped = *fault.real;
    fault.wrapped.all_reduce = fault_all_reduce;
    fault.wrapped.reduce_scatter = fault_reduce_scatter;
    fault.wrapped.all_gather = fault_all_gather;
    run->td->run.transport = &fault.wrapped;
}

/* ---- The operation: its input as it is ---------------------------------------------------------------------- */

typedef struct meddle_attr { int32_t backward; } meddle_attr;
static inline td_tensor meddle(td_tensor x, int32_t backward);

static inline bool meddle_shape(td_call *call)
{
    call->out[0].shape = call->in[0]->shape;
    call->out[0].dtype = call->in[0]->dtype;
    return true;
}

static inline void meddle_gradient(const td_gradient_call *g) { td_gradient_set(g, 0, meddle(g->dout[0], 1)); }

static inline void meddle_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    (void)p, (void)n;
    for (int8_t d = 0; d < TD_MAX_DIMS; d++) rule->in[0][d] = rule->out[0][d] = (int8_t)(d + 1);
}

/* Until the newest checkpoint that is due after so many updates has its name, 10 s at most: so it is known from which one a restart goes on. */
static inline void await_save(int64_t updates)
{
    int64_t every = run_flags_whole(&fault.run->flags, "save-every");
    char path[512];
    struct stat found;
    if (!every || updates < every) return;
    snprintf(path, sizeof path, "%s/checkpoints/step-%lld", run_flags_text(&fault.run->flags, "out"), (long long)(updates / every * every));
    for (int tries = 0; tries < 1000 && stat(path, &found) != 0; tries++) fault_sleep(0.01);
}

static inline void meddle_cpu(const td_kernel *k)
{
    bool backward = ((const meddle_attr *)k->attr)->backward, due = k->run->update >= FAULT_UPDATE;
    int64_t count = td_shape_elements(k->out[0].shape);
    memcpy(k->out[0].data, k->in[0].data, (size_t)(count * td_dtype_size(k->out[0].dtype)));
    if (due && fault_in("forward") && !backward && !fault_is("skip") && !fault_is("size") && fault_here())
        td_fail(k->run->td, TD_ERROR_DATA, "/x/y: no such file");
    if (due && fault_is("nan") && fault_in("backward") && backward) memset(k->out[0].data, 0xff, (size_t)td_dtype_size(k->out[0].dtype));
    if (fault_is("slow") && fault_in("forward") && !backward) fault_sleep(0.01);
    if (fault_is("die") && fault_in("forward") && (k->run->update == 5 || k->run->update == 9)) {
        char marker[32];
        snprintf(marker, sizeof marker, "died-at-%d", (int)k->run->update);
        if (mkdir(marker, 0777) != 0) return;
        await_save(k->run->update);
        raise(SIGKILL);
    }
}

static const td_op meddle_op = {
    .name = "meddle", .inputs = 1, .attr_bytes = sizeof(meddle_attr), .shape = meddle_shape, .gradient = meddle_gradient,
    .place = meddle_place, .cpu = meddle_cpu,
};

static inline td_tensor meddle(td_tensor x, int32_t backward) { return td_record(&meddle_op, TD_HERE, 1, &x, &(meddle_attr){ backward }); }

/* ---- Starting it ------------------------------------------------------------------------------------------- */

/* MPI leaves its files in a folder of ours, and leaks. */
#define FAULT_ENVIRONMENT "mkdir -p left; export ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 OMPI_ALLOW_RUN_AS_ROOT=1 " \
                          "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; "
#define FAULT_MPIRUN "mpirun --oversubscribe --mca orte_tmpdir_base \"$PWD/left\" --mca btl_vader_backing_directory \"$PWD/left\" "

/* Lines of stderr that a pattern fits. */
static inline int count_errors(const char *pattern)
{
    char text[sizeof err_text];
    int count = 0;
    memcpy(text, err_text, sizeof text);
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) count += !fnmatch(pattern, line, 0);
    return count;
}

/* ---- The program ------------------------------------------------------------------------------------------- */

static inline int fault_rank_of_environment(void)
{
    const char *rank = getenv("TANDEM_RANK"), *mpi = getenv("OMPI_COMM_WORLD_RANK");
    return rank ? atoi(rank) : mpi ? atoi(mpi) : -1;
}

/* Leaves a rank's exit status in a file, ended-RANK. Returns it. */
static inline int fault_end(int status)
{
    char path[32];
    snprintf(path, sizeof path, "ended-%d", fault.rank);
    FILE *to = fault.rank >= 0 ? fopen(path, "w") : NULL;
    if (!to) return status;
    fprintf(to, "%d", status);
    fclose(to);
    return status;
}

static inline int fault_program(int argc, char **argv)
{
    sscanf(getenv("FAULT"), "%15s %15s", fault.what, fault.phase);
    fault.rank = fault_rank_of_environment();
    if (fault_in("start") && (fault_is("kill") || fault_is("stop"))) {
        fault_sleep(0.5); /* the others have come to where they meet */
        fault_here();
    }
    run_loop *run = fault.run = run_open(&argc, &argv, &(run_defaults){ .name = "small", .batch = 12, .lr = 0.05 });
    td_context *td = run_context(run);
    if (!run_failed(run)) fault_wrap(run);
    if (fault_in("start") && fault_is("error")) td_fail(td, TD_ERROR_DATA, "/x/y: no such file");
    small_model m = make_small(td, 64);
    opt_optimizer *opt = adamw(td_root(td));
    data_set *set = small_set(td);
    if (fault_in("data")) /* it is given by reference, and these are this rank's own */
        for (int i = 0; i < SAMPLES; i++) features[i][0] = NAN;
    run_train_on(run, set);
    bool stepped = false;
    for (data_batch b; run_next(run, &b); stepped = true) {
        td_tensor h = meddle(td_relu(td_matmul_with(data_get(&b, "x"), td_use(m.hidden), 0, 1)), 0);
        run_step(run, opt, td_cross_entropy(td_matmul_with(h, td_use(m.out), 0, 1), data_get(&b, "label")));
    }
    if (!stepped) opt_close(opt); /* the run never met it */
    return fault_end(run_close(run));
}

#endif
