/* Child processes: what they print goes to files without names, so that no pipe can fill. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/strategies/strategies.h"

extern char **environ;

static volatile sig_atomic_t stop_signal; /* a handler has no other place to write to */

static void note_signal(int signal) { stop_signal = signal; }

void child_catch_signals(void)
{
    struct sigaction action = { .sa_handler = note_signal }; /* waits are interrupted */
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool child_stopped(void) { return stop_signal != 0; }

/* The file's text; NULL without memory. */
static char *text_of(FILE *file)
{
    long size = fseek(file, 0, SEEK_END) == 0 ? ftell(file) : 0;
    char *text = malloc((size_t)(size > 0 ? size : 0) + 1);
    rewind(file);
    if (text) text[fread(text, 1, (size_t)(size > 0 ? size : 0), file)] = 0;
    return text;
}

static void keep_last_line(FILE *file, char error[ERROR_ROOM])
{
    char *text = text_of(file), *last = text;
    if (!text) return;
    for (size_t n = strlen(text); n && text[n - 1] == '\n'; n--) text[n - 1] = 0;
    for (char *at = text; (at = strchr(at, '\n')); last = ++at) {}
    snprintf(error, ERROR_ROOM, "%.*s", ERROR_ROOM - 1, last);
    free(text);
}

static int start(const char *directory, char *const *argv, FILE *out, FILE *err, pid_t *child)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t defaults;
    int error = posix_spawn_file_actions_init(&actions);
    if (error) return error;
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGINT);
    sigaddset(&defaults, SIGTERM);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
    if (directory) error = posix_spawn_file_actions_addchdir_np(&actions, directory);
    if (!error) error = posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    if (!error) error = posix_spawn_file_actions_adddup2(&actions, fileno(out), 1);
    if (!error) error = posix_spawn_file_actions_adddup2(&actions, fileno(err), 2);
    if (!error) error = posix_spawnp(child, argv[0], &actions, &attributes, argv, environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    return error;
}

static int wait_for(pid_t child)
{
    int status, passed = 0;
    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR) return 127;
        if (stop_signal && !passed++) kill(child, SIGTERM); /* a terminal's Ctrl-C has reached it already */
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int child_run(const char *directory, char *const *argv, char **out, char error[ERROR_ROOM])
{
    FILE *to = tmpfile(), *err = tmpfile();
    pid_t child;
    int status = 127, failed = to && err ? start(directory, argv, to, err, &child) : errno;
    error[0] = 0;
    if (failed) snprintf(error, ERROR_ROOM, "%.200s cannot be started: %s", argv[0], strerror(failed));
    else status = wait_for(child);
    if (!failed) keep_last_line(err, error);
    if (!failed && status && !*error) snprintf(error, ERROR_ROOM, "%.200s ended with status %d", argv[0], status);
    if (out) *out = to && !failed ? text_of(to) : NULL;
    if (to) fclose(to);
    if (err) fclose(err);
    return status;
}
