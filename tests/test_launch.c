/* Ranks as processes: the launcher, what it does when a rank dies, stops, ends, fails or disagrees, and that nothing
 * is left. The program starts itself again: as ranks, and (`launch MODE RANKS TIMEOUT`) as a launcher that can be
 * signalled.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/check.h"
#include "tests/ranks.h"

static void sleep_s(double seconds)
{
    nanosleep(
        &(struct timespec){ .tv_sec = (time_t)seconds, .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds)) },
        NULL);
}

/* ---- What a rank does ------------------------------------------------------------------------------------ */

static volatile sig_atomic_t asked_to_end;

static void on_signal(int number)
{
    (void)number;
    asked_to_end++;
}

static void stop_here(int number)
{
    (void)number;
    raise(SIGSTOP);
}

/* Rank 1 is stopped while it waits for rank 0, which comes later. */
static void stop_while_waiting(int rank)
{
    if (rank == 0) sleep_s(0.4);
    if (rank != 1) return;
    signal(SIGALRM, stop_here);
    setitimer(ITIMER_REAL, &(struct itimerval){ .it_value.tv_usec = 200000 }, NULL);
}

static void be_busy(par_world *world, int rank)
{
    if (rank != 1) return;
    par_busy(world, rank, true);
    sleep_s(1);
    par_busy(world, rank, false);
}

/* Begins at step 7; what it does before that is the same for all. */
static void act_at_step_7(par_world *world, const char *mode, int rank)
{
    if (strcmp(mode, "stop waiting") == 0) stop_while_waiting(rank);
    if (strcmp(mode, "busy") == 0) be_busy(world, rank);
    if (strcmp(mode, "kill") == 0 && rank == 2) raise(SIGKILL);
    if (strcmp(mode, "stop") == 0 && rank == 1) raise(SIGSTOP);
    if (strcmp(mode, "stop0") == 0 && rank == 0) raise(SIGSTOP);
    if (strcmp(mode, "end") == 0 && rank == 1) exit(0);
    if (strcmp(mode, "abort") == 0 && rank == 0) signal(SIGABRT, SIG_DFL), raise(SIGABRT);
    if (strcmp(mode, "exit") == 0 && rank == 1) {
        fprintf(stderr, "out of patience\n");
        exit(3);
    }
}

/* Twenty steps of two sums each; returns the exit status. The world is left to tell why. */
static int run_steps(par_world *world, int rank, const char *mode)
{
    td_context *td = td_open(&(td_options){ .log = ranks_quiet, .threads = 1 });
    td_transport t;
    static ranks_program p;
    bool ok = par_transport_local(world, rank, td, NULL, &t);
    par_agree_options(world, rank, rank == 1 && strcmp(mode, "option") == 0 ? "strategy=fsdp" : "strategy=ddp");
    for (int64_t step = 0; step < 20 && ok; step++) {
        ranks_record(&p, 20);
        if (step == 7) act_at_step_7(world, mode, rank);
        if (step == 7 && rank == 1 && strcmp(mode, "operation") == 0) ranks_differ(&p, 12);
        if (step == 7 && rank == 1 && strcmp(mode, "order") == 0) ranks_swap(&p, 12, 13);
        bool is_new = step == 0 || (step == 7 && rank == 1); /* the one that differs; the others replay */
        ok = par_agree(world, rank, td, (par_moment){ .run = step, .step = step }, &p.program, ranks_fingerprint(&p, 0), is_new);
        if (ok && step == 7 && strcmp(mode, "between") == 0 && rank == 2) raise(SIGKILL);
        double x = rank, y = 1;
        ok = ok && t.all_reduce(t.self, 0, &x, 1, TD_F64) && t.all_reduce(t.self, 0, &y, 1, TD_F64);
        if (step == 7 && strcmp(mode, "fail") == 0 && rank == 1)
            ok = (td_fail(td, TD_ERROR_DATA, "/x/y: no such file"), false);
    }
    if (!ok) par_fail_world(world, rank, td_error_text(td));
    td_close(td);
    return ok ? 0 : 1;
}

static void write_pid(int rank)
{
    const char *folder = getenv("TEST_LAUNCH_PIDS");
    if (!folder) return;
    char path[256];
    snprintf(path, sizeof path, "%s/%d", folder, rank);
    FILE *f = fopen(path, "w");
    if (!f) return;
    fprintf(f, "%d", (int)getpid());
    fclose(f);
}

/* Waits for a signal, then ends well; `stubborn` ends only when killed, `plain` has no handler, `saves long` is busy. */
static int wait_for_signal(par_world *world, int rank, const char *mode)
{
    if (strcmp(mode, "plain") != 0) signal(SIGTERM, on_signal), signal(SIGINT, on_signal);
    write_pid(rank);
    while (!asked_to_end || strcmp(mode, "stubborn") == 0) sleep_s(0.02);
    if (strcmp(mode, "saves long") == 0) {
        par_busy(world, rank, true);
        sleep_s(4);
        par_busy(world, rank, false);
    }
    sleep_s(0.2);                                              /* a second, doubled signal would come by now */
    return asked_to_end == 1 && getpgrp() == getpid() ? 0 : 9; /* else the terminal would signal it too */
}

static int rank_main(const char *mode)
{
    int rank = -1;
    par_world *world = par_world_join(&rank);
    if (!world) return 99;
    int status = 0;
    if (strcmp(mode, "collectives") == 0) status = ranks_every_collective(world, rank) ? 1 : 0;
    else if (strncmp(mode, "saves", 5) == 0 || strcmp(mode, "stubborn") == 0 || strcmp(mode, "plain") == 0)
        status = wait_for_signal(world, rank, mode);
    else if (strcmp(mode, "usage") == 0) {
        par_fail_world(world, rank, "unknown flag --foo");
        status = 2;
    } else if (strcmp(mode, "speaks") == 0)
        printf("hello from %d, stdin %s\n", rank, getchar() == EOF ? "empty" : "given"),
            fprintf(stderr, "note from %d\n", rank);
    else if (strcmp(mode, "floods") == 0)
        for (int i = 0; i < 20000; i++) rank == 0 ? 0 : fprintf(stderr, "line %d of a long report, %d\n", i, rank);
    else {
        if (strcmp(mode, "pauses") == 0) write_pid(rank);
        for (int i = 0; i < (strcmp(mode, "pauses") == 0 ? 20 : 1) && status == 0; i++) {
            if (i && rank == 0) sleep_s(0.1); /* meanwhile the others wait for it */
            status = run_steps(world, rank, mode);
        }
    }
    par_world_close(world);
    return status;
}

/* ---- Launching from here --------------------------------------------------------------------------------- */

typedef struct outcome {
    int status;
    double seconds;
    char message[4096];
} outcome;

static outcome launch(const char *mode, int ranks, double timeout_s)
{
    outcome o = { .status = -1 };
    char *argv[] = { "test_launch", (char *)mode, NULL };
    double begin = par_seconds();
    o.status = par_launch(ranks, argv, &(par_world_options){ .timeout_s = timeout_s, .staging_bytes = 4096 }, o.message,
                          sizeof o.message);
    o.seconds = par_seconds() - begin;
    ck_assert_int_eq(waitpid(-1, NULL, WNOHANG), -1); /* no child is left, dead or alive */
    return o;
}

static outcome launch_that_fails(const char *mode, int ranks, double timeout_s, const char *message)
{
    outcome o = launch(mode, ranks, timeout_s);
    ck_assert_str_eq(o.message, message);
    ck_assert_int_ne(o.status, 0);
    return o;
}

START_TEST(test_collectives_equal_plain_sums_between_processes)
{
    for (int ranks = 1; ranks <= 5; ranks++) {
        outcome o = launch("collectives", ranks, 20);
        ck_assert_msg(o.status == 0, "%d ranks: %s", ranks, o.message);
        ck_assert_str_eq(o.message, "");
    }
}
END_TEST

START_TEST(test_a_killed_rank_ends_all_and_is_named)
{
    outcome o = launch_that_fails("kill", 4, 2, "rank 2 was killed by signal 9 (Killed) after call 2 of step 6");
    ck_assert_int_eq(o.status, 1);
    ck_assert_msg(o.seconds < 2 + 5, "took %g s", o.seconds);
    launch_that_fails("between", 4, 2, "rank 2 was killed by signal 9 (Killed) in step 7");
    launch_that_fails("abort", 2, 2, "rank 0 was killed by signal 6 (Aborted) after call 2 of step 6");
}
END_TEST

START_TEST(test_a_stopped_rank_ends_all_at_the_deadline)
{
    outcome o = launch_that_fails("stop", 3, 1, "rank 1 did not arrive at all_reduce (call 1 of step 7) within 1 s");
    ck_assert_msg(o.seconds >= 1 && o.seconds < 1 + 5, "took %g s", o.seconds);
    launch_that_fails("stop0", 1, 0.5, "rank 0 was stopped by a signal after call 2 of step 6 and not continued");
}
END_TEST

START_TEST(test_a_rank_stopped_while_it_waits_is_the_one_named)
{
    for (int i = 0; i < 3; i++)
        launch_that_fails("stop waiting", 3, 1, "rank 1 did not arrive at all_reduce (call 1 of step 7) within 1 s");
}
END_TEST

START_TEST(test_a_busy_rank_is_not_late)
{
    outcome o = launch("busy", 3, 0.5);
    ck_assert_str_eq(o.message, "");
    ck_assert_int_eq(o.status, 0);
}
END_TEST

START_TEST(test_a_rank_that_ends_early_is_named)
{
    outcome o = launch_that_fails("end", 3, 20, "rank 1 ended before all_reduce (call 1 of step 7)");
    ck_assert_msg(o.seconds < 5, "took %g s", o.seconds);
    o = launch_that_fails("exit", 3, 20,
                          "rank 1 exited with status 3 after call 2 of step 6; it wrote:\nout of patience");
    ck_assert_int_eq(o.status, 3);
    ck_assert_msg(o.seconds < 5, "took %g s", o.seconds);
}
END_TEST

START_TEST(test_a_disagreement_ends_all_within_two_seconds)
{
    static const struct {
        const char *mode, *message;
    } cases[] = {
        { "operation",
          "ranks disagree at step 7: operation 12 is mul (64, 10) f32 at model.c:41 on rank 0 but add (64, 10) f32 at "
          "model.c:43 on rank 1" },
        { "order",
          "ranks disagree at step 7: operation 12 is mul (64, 10) f32 at model.c:41 on rank 0 but mul (64, 10) f32 at "
          "model.c:42 on rank 1" },
        { "option", "ranks disagree at step 0: option strategy is ddp on rank 0 but fsdp on rank 1" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        outcome o = launch_that_fails(cases[i].mode, 2, 20, cases[i].message);
        ck_assert_int_eq(o.status, 1);
        ck_assert_msg(o.seconds < 2, "%s took %g s", cases[i].mode, o.seconds);
    }
}
END_TEST

START_TEST(test_one_ranks_error_is_told_once_with_its_status)
{
    outcome o = launch_that_fails("fail", 3, 20, "rank 1 after call 2 of step 7: /x/y: no such file");
    ck_assert_int_eq(o.status, 1);
    ck_assert_msg(o.seconds < 5, "took %g s", o.seconds);
    o = launch("usage", 1, 20);
    ck_assert_int_eq(o.status, 2);
    ck_assert_str_eq(o.message, "rank 0: unknown flag --foo");
}
END_TEST

START_TEST(test_what_cannot_be_launched_says_why)
{
    char message[256];
    char *argv[] = { "test_launch", "usage", NULL };
    ck_assert_int_eq(par_launch(0, argv, NULL, message, sizeof message), 1);
    ck_assert_str_has(message, "1 to 256 ranks");
}
END_TEST

START_TEST(test_a_rank_that_reports_at_length_is_not_held_up)
{
    outcome o = launch("floods", 3, 20);
    ck_assert_int_eq(o.status, 0);
    ck_assert_str_eq(o.message, "");
}
END_TEST

/* ---- A launcher of its own ------------------------------------------------------------------------------- */

/* Writes the message to stdout, after what rank 0 wrote. */
static int launcher_main(char **argv)
{
    char message[4096];
    char *rank_argv[] = { argv[0], argv[2], NULL };
    int status = par_launch(atoi(argv[3]), rank_argv, &(par_world_options){ .timeout_s = atof(argv[4]) }, message,
                            sizeof message);
    printf("[%s]\n", message);
    return status;
}

typedef struct launcher_process {
    pid_t pid;
    int out;         /* its stdout and stderr */
    char folder[64]; /* where ranks write their process ids */
} launcher_process;

static launcher_process start_launcher(const char *mode, const char *ranks, const char *timeout_s)
{
    launcher_process l = { .folder = "test_launch.XXXXXX" };
    int ends[2];
    char self[4096] = "";
    ck_assert_int_gt(readlink("/proc/self/exe", self, sizeof self - 1), 0);
    ck_assert_ptr_nonnull(mkdtemp(l.folder));
    ck_assert_int_eq(pipe2(ends, O_CLOEXEC), 0);
    l.pid = fork();
    if (l.pid == 0) {
        setpgid(0, 0);
        setenv("TEST_LAUNCH_PIDS", l.folder, 1);
        dup2(ends[1], STDOUT_FILENO);
        dup2(ends[1], STDERR_FILENO);
        execl(self, "test_launch", "launch", mode, ranks, timeout_s, (char *)NULL);
        _exit(127);
    }
    ck_assert_int_gt(l.pid, 0);
    close(ends[1]);
    l.out = ends[0];
    return l;
}

static pid_t rank_pid(const launcher_process *l, int rank)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%d", l->folder, rank);
    for (int i = 0; i < 500; i++, sleep_s(0.02)) {
        int pid = 0;
        FILE *f = fopen(path, "r");
        if (!f) continue;
        int fields = fscanf(f, "%d", &pid);
        fclose(f);
        if (fields == 1) return pid;
    }
    ck_abort_msg("rank %d did not start", rank);
    return 0;
}

static const char *end_launcher(launcher_process *l, int *status)
{
    char *text = check_alloc(65536);
    size_t used = 0;
    for (ssize_t n; (n = read(l->out, text + used, 65535 - used)) > 0;) used += (size_t)n;
    close(l->out);
    ck_assert_int_eq(waitpid(l->pid, status, 0), l->pid);
    for (int r = 0; r < 8; r++) {
        char path[128];
        snprintf(path, sizeof path, "%s/%d", l->folder, r);
        unlink(path);
    }
    rmdir(l->folder);
    return text;
}

START_TEST(test_only_rank_0_speaks)
{
    int status;
    launcher_process l = start_launcher("speaks", "3", "20");
    const char *text = end_launcher(&l, &status);
    ck_assert_int_eq(status, 0);
    ck_assert_str_has(text, "hello from 0");
    ck_assert_str_has(text, "note from 0");
    ck_assert_str_has(text, "[]");
    ck_assert_ptr_null(strstr(text, "from 1"));
    ck_assert_ptr_null(strstr(text, "from 2"));
}
END_TEST

/* A terminal signals the whole process group. */
START_TEST(test_signals_are_passed_on_once_so_that_ranks_can_save)
{
    static const int signals[] = { SIGTERM, SIGINT };
    for (size_t i = 0; i < 2; i++) {
        int status;
        launcher_process l = start_launcher("saves", "3", "20");
        for (int r = 0; r < 3; r++) rank_pid(&l, r);
        kill(-l.pid, SIGUSR1); /* of no use to these */
        sleep_s(0.1);
        kill(-l.pid, signals[i]);
        const char *text = end_launcher(&l, &status);
        ck_assert_str_eq(text, "[]\n");
        ck_assert_int_eq(status, 0);
    }
}
END_TEST

START_TEST(test_a_rank_that_saves_may_take_its_time_to_end)
{
    int status;
    launcher_process l = start_launcher("saves long", "2", "0.1");
    rank_pid(&l, 0);
    rank_pid(&l, 1);
    kill(l.pid, SIGTERM);
    ck_assert_str_eq(end_launcher(&l, &status), "[]\n"); /* 4 s, and others are given 3.1 */
    ck_assert_int_eq(status, 0);
}
END_TEST

START_TEST(test_ranks_that_do_not_end_when_asked_are_killed)
{
    int status;
    launcher_process l = start_launcher("stubborn", "2", "0.1");
    rank_pid(&l, 0);
    rank_pid(&l, 1);
    double begin = par_seconds();
    kill(l.pid, SIGTERM);
    ck_assert_str_eq(end_launcher(&l, &status), "[ranks did not end within 3.1 s after signal 15]\n");
    ck_assert_int_eq(status, W_EXITCODE(1, 0));
    ck_assert(par_seconds() - begin < 5.1);
}
END_TEST

START_TEST(test_a_process_runs_is_stopped_or_is_gone_before_it_is_waited_for)
{
    int64_t parent;
    int status;
    ck_assert_int_eq(par_process_life(getpid(), &parent), PAR_RUNS);
    ck_assert_int_eq(parent, getppid());
    pid_t child = fork();
    if (child == 0) {
        raise(SIGSTOP);
        _exit(0);
    }
    ck_assert_int_eq(waitpid(child, &status, WUNTRACED), child);
    ck_assert_int_eq(par_process_life(child, &parent), PAR_STOPPED);
    ck_assert_int_eq(parent, getpid());
    kill(child, SIGKILL);
    ck_assert_int_eq(waitid(P_PID, (id_t)child, &(siginfo_t){ 0 }, WEXITED | WNOWAIT), 0);
    ck_assert_int_eq(par_process_life(child, NULL), PAR_GONE);
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_int_eq(par_process_life(child, NULL), PAR_GONE);
}
END_TEST

/* So that ranks save, one request of a scheduler may come twice. */
START_TEST(test_a_second_termination_is_the_same_request)
{
    int status;
    launcher_process l = start_launcher("saves", "2", "20");
    rank_pid(&l, 0);
    rank_pid(&l, 1);
    kill(l.pid, SIGTERM);
    sleep_s(0.05);
    kill(l.pid, SIGTERM);
    ck_assert_str_eq(end_launcher(&l, &status), "[]\n");
    ck_assert_int_eq(status, 0);
}
END_TEST

START_TEST(test_a_second_interrupt_kills_at_once)
{
    int status;
    launcher_process l = start_launcher("stubborn", "2", "20");
    rank_pid(&l, 0);
    rank_pid(&l, 1);
    double begin = par_seconds();
    kill(l.pid, SIGINT);
    sleep_s(0.3);
    kill(l.pid, SIGINT);
    ck_assert_str_eq(end_launcher(&l, &status), "[stopped by signal 2 (Interrupt)]\n");
    ck_assert_int_eq(status, W_EXITCODE(1, 0));
    ck_assert(par_seconds() - begin < 3);
}
END_TEST

START_TEST(test_ranks_without_a_handler_end_by_the_signal)
{
    int status;
    launcher_process l = start_launcher("plain", "2", "20");
    rank_pid(&l, 0);
    rank_pid(&l, 1);
    kill(l.pid, SIGTERM);
    ck_assert_str_eq(end_launcher(&l, &status), "[stopped by signal 15 (Terminated)]\n");
    ck_assert_int_eq(status, W_EXITCODE(1, 0));
}
END_TEST

/* As Ctrl-Z does: all stop and go on, and the time between does not count. */
START_TEST(test_a_suspended_run_goes_on)
{
    int status;
    launcher_process l = start_launcher("pauses", "3", "1.5");
    for (int r = 0; r < 3; r++) rank_pid(&l, r);
    sleep_s(0.2);
    kill(l.pid, SIGTSTP);
    ck_assert_int_eq(waitpid(l.pid, &status, WUNTRACED), l.pid);
    ck_assert(WIFSTOPPED(status));
    sleep_s(3);
    kill(l.pid, SIGCONT);
    ck_assert_str_eq(end_launcher(&l, &status), "[]\n");
    ck_assert_int_eq(status, 0);
}
END_TEST

/* Orphans of the launcher come to this process, which can then see how they ended. */
START_TEST(test_no_rank_outlives_a_killed_launcher)
{
    int status;
    pid_t pid[3];
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    launcher_process l = start_launcher("stubborn", "3", "20");
    for (int r = 0; r < 3; r++) pid[r] = rank_pid(&l, r);
    kill(l.pid, SIGKILL);
    double begin = par_seconds();
    end_launcher(&l, &status);
    for (int r = 0; r < 3; r++) {
        ck_assert_int_eq(waitpid(pid[r], &status, 0), pid[r]);
        ck_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    }
    ck_assert(par_seconds() - begin < 2);
    prctl(PR_SET_CHILD_SUBREAPER, 0);
}
END_TEST

int main(int argc, char **argv)
{
    if (par_launched()) return argc > 1 ? rank_main(argv[1]) : 98;
    if (argc == 5 && strcmp(argv[1], "launch") == 0) return launcher_main(argv);
    const TTest *const tests[] = {
        test_collectives_equal_plain_sums_between_processes,
        test_a_killed_rank_ends_all_and_is_named,
        test_a_stopped_rank_ends_all_at_the_deadline, test_a_rank_stopped_while_it_waits_is_the_one_named, test_a_busy_rank_is_not_late,
        test_a_rank_that_ends_early_is_named,
        test_a_disagreement_ends_all_within_two_seconds,
        test_one_ranks_error_is_told_once_with_its_status,
        test_what_cannot_be_launched_says_why,
        test_a_rank_that_reports_at_length_is_not_held_up,
        test_only_rank_0_speaks,
        test_signals_are_passed_on_once_so_that_ranks_can_save,
        test_a_rank_that_saves_may_take_its_time_to_end,
        test_ranks_that_do_not_end_when_asked_are_killed,
        test_a_process_runs_is_stopped_or_is_gone_before_it_is_waited_for,
        test_a_second_termination_is_the_same_request,
        test_a_second_interrupt_kills_at_once,
        test_ranks_without_a_handler_end_by_the_signal,
        test_a_suspended_run_goes_on,
        test_no_rank_outlives_a_killed_launcher,
    };
    return check_main("launch", tests, (int)(sizeof tests / sizeof tests[0]));
}
