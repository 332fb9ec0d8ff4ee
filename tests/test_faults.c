/* The fault matrix: one rank of three is killed, stopped, fails, skips a collective or calls it with another size, each while it
 * starts, in the forward, in a reduction, while it saves and while it loads a checkpoint; as processes of this machine and under
 * mpirun. In every cell all ranks have ended within the deadline and 5 s, with a status that is not 0 and one message that names
 * the rank and where it was; no process and no shared memory is left.
 *
 * By default each fault and each phase is met on either side; TANDEM_TEST_ALL=1: all cells.
 * Timeout: 300 s
 */
#define SMALL_FOLDER "faults"
#define SHELL_FOLDER "faults"
#include <dirent.h>

#include "tests/fault_run.h"

enum { FAULTS = 5 };
enum { START, FORWARD, REDUCE, SAVE, LOAD, PHASES };
static const char *const faults[FAULTS] = { "kill", "stop", "error", "skip", "size" };
static const char *const phases[PHASES] = { "start", "forward", "reduce", "save", "load" };

typedef enum side { LOCAL, MPI, SIDES } side;
static const char *const side_names[SIDES] = { "local", "mpi" };
static const double deadlines_s[SIDES] = { 2, 8 }; /* to start, too: MPI takes its time where cores are few */

/* What is said, with * for what timing or the format of a file decides. */
#define KILLED "rank 1 was killed by signal 9 (Killed) "
#define DIED "rank 1 has died; rank * waited for others at "
#define DISAGREE "ranks disagree: rank * calls * of step "
static const char *const messages[SIDES][FAULTS][PHASES] = {
    [LOCAL] = {
        { KILLED "before its first step", KILLED "after call 1 of step 4", KILLED "in all_reduce (call 2 of step 4)",
          KILLED "* step *", KILLED "before its first step" },
        { "rank 1 did not arrive at step 1 within * s",
          "rank 1 did not arrive at all_reduce (call 2 of step 4) within * s",
          "rank 1 did not arrive at reduce_scatter (call 3 of step 4) within * s",
          "rank 1 did not arrive at * step * within * s",
          "rank 1 did not arrive at step 5 within * s" },
        { "rank 1: /x/y: no such file", "rank 1 after call 1 of step 4: /x/y: no such file",
          "rank 1 after call 1 of step 4: the wire is cut",
          "rank 1 * step *: out/checkpoints/*rank-1.safetensors: cannot be written: Input/output error",
          "rank 1: out/checkpoints/step-4/rank-1.safetensors: Input/output error; there is no older checkpoint: train without --resume to begin anew" },
        { DISAGREE "1) but *", DISAGREE "4) but *", DISAGREE "4) but *", DISAGREE "*) but *", DISAGREE "5) but *" },
        { DISAGREE "1) but *", DISAGREE "4) but *", DISAGREE "4) but *", DISAGREE "*) but *", DISAGREE "5) but *" },
    },
    [MPI] = {
        { "not all processes came to their world (rank 1 is gone)", DIED "all_reduce (call 2 of step 4)", DIED "* of step 4)",
          DIED "* step *", DIED "step 5" },
        { "not all processes came to their world within * s (rank 1 is stopped)*" },
    },
};
/* Where ranks start slowly it is the launcher that is out of patience. */
static const char stopped_by_signal[] = "rank 1 was stopped by a signal * and not continued";

/* Ranks of either side say the same of what they notice themselves. */
static const char *message_of(side where, int f, int p)
{
    const char *own = messages[where][f][p];
    return own ? own : messages[LOCAL][f][p];
}

/* ---- What is left ------------------------------------------------------------------------------------------ */

/* Whether the process has this in its environment, as everything has that was started with it. */
static bool carries(const char *pid, const char *token)
{
    char path[288], text[65536];
    snprintf(path, sizeof path, "/proc/%s/environ", pid);
    FILE *from = fopen(path, "r");
    if (!from) return false;
    size_t bytes = fread(text, 1, sizeof text, from);
    fclose(from);
    return memmem(text, bytes, token, strlen(token)) != NULL;
}

static int count_processes(const char *token)
{
    int count = 0;
    DIR *all = opendir("/proc");
    ck_assert_ptr_nonnull(all);
    for (struct dirent *entry; (entry = readdir(all));)
        count += entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && carries(entry->d_name, token);
    closedir(all);
    return count;
}

static bool anything_in(const char *folder, const char *of)
{
    DIR *all = opendir(folder);
    bool any = false;
    for (struct dirent *entry; all && (entry = readdir(all));) any = any || (entry->d_name[0] != '.' && strstr(entry->d_name, of));
    if (all) closedir(all);
    return any;
}

/* ---- One cell ---------------------------------------------------------------------------------------------- */

static int start(side where, const char *wanted, const char *token, const char *flags)
{
    return sh(FAULT_ENVIRONMENT "export %s FAULT='%s'; timeout 30 %s '%s' --threads 1 --out out --strategy fsdp --save-every 4 "
              "--timeout %g %s", token, wanted, where == MPI ? FAULT_MPIRUN "-n 3 " : "", own_path(), deadlines_s[where], flags);
}

/* Of the lines that the program printed as errors; *count of them. */
static const char *error_line(int *count)
{
    const char *first = "";
    *count = 0;
    for (char *line = strtok(err_text, "\n"); line; line = strtok(NULL, "\n")) {
        if (strncmp(line, "small: ", 7)) continue;
        if ((*count)++ == 0) first = line + 7;
    }
    return first;
}

static bool is_said(side where, int f, int p, const char *line)
{
    bool stops = !strcmp(faults[f], "stop") && where == LOCAL;
    return !fnmatch(message_of(where, f, p), line, 0) || (stops && !fnmatch(stopped_by_signal, line, 0));
}

/* Some rank has ended as if nothing had been; those that were killed have left no status. */
static bool any_ended_well(void)
{
    bool any = false;
    for (int r = 0; r < 3; r++) {
        char path[64];
        int status = -1;
        snprintf(path, sizeof path, SHELL_FOLDER "/ended-%d", r);
        FILE *from = fopen(path, "r");
        any = any || (from && fscanf(from, "%d", &status) == 1 && status == 0);
        if (from) fclose(from);
    }
    return any;
}

static void run_cell(side where, int f, int p)
{
    static int cells;
    char name[64], token[64], text[40], flags[96];
    bool loads = !strcmp(phases[p], "load");
    snprintf(name, sizeof name, "%s: %s, %s", side_names[where], faults[f], phases[p]);
    snprintf(token, sizeof token, "FAULT_CELL=%d-%d", (int)getpid(), cells++);
    snprintf(text, sizeof text, "%s %s", faults[f], phases[p]);
    snprintf(flags, sizeof flags, "--steps 8 %s %s", where == MPI ? "" : "--ranks 3", loads ? "--resume" : "");
    ck_assert_sh(0, "rm -rf out ended-*");
    if (loads) ck_assert_int_eq(start(LOCAL, "none none", token, "--steps 4 --ranks 3"), 0);
    ck_assert_sh(0, "rm -f ended-*");
    double begin = run_now();
    int status = start(where, text, token, flags), lines;
    double most = 2 * deadlines_s[where] + 5; /* to come may take the deadline, too */
    while (count_processes(token) && run_now() - begin < most) fault_sleep(0.05);
    double seconds = run_now() - begin;
    const char *line = error_line(&lines);
    if (check_all()) printf("%-22s %5.2f s  %s\n", name, seconds, line);
    ck_assert_msg(status != 0 && !any_ended_well(), "%s: status 0", name);
    ck_assert_msg(seconds < most, "%s: %g s", name, seconds);
    ck_assert_msg(count_processes(token) == 0, "%s: %d processes are left", name, count_processes(token));
    ck_assert_msg(!anything_in(SHELL_FOLDER "/left", "") && !anything_in("/dev/shm", "tandem"), "%s: shared memory is left", name);
    ck_assert_msg(is_said(where, f, p, line), "%s: %s, not %s", name, line, message_of(where, f, p));
    ck_assert_msg(lines == 1, "%s: told %d times", name, lines);
    if (strstr(line, "disagree")) ck_assert_msg(strstr(line, "rank 1 calls ") != NULL, "%s: %s", name, line);
}

/* Each fault in one phase; or all. */
static void run_side(side where, const int phase_of[FAULTS])
{
    for (int f = 0; f < FAULTS; f++)
        for (int p = 0; p < PHASES; p++)
            if (check_all() || p == phase_of[f]) run_cell(where, f, p);
}

START_TEST(test_ranks_of_this_machine_end_as_said)
{
    static const int phase_of[FAULTS] = { REDUCE, LOAD, SAVE, FORWARD, START };
    run_side(LOCAL, phase_of);
}
END_TEST

START_TEST(test_ranks_under_mpirun_end_as_said)
{
    NEEDS_MPI;
    static const int phase_of[FAULTS] = { LOAD, SAVE, FORWARD, REDUCE, START };
    run_side(MPI, phase_of);
}
END_TEST

int main(int argc, char **argv)
{
    if (fault_wanted()) return fault_program(argc, argv);
    const TTest *const tests[] = { test_ranks_of_this_machine_end_as_said, test_ranks_under_mpirun_end_as_said };
    return check_main("faults", tests, (int)(sizeof tests / sizeof tests[0]));
}
