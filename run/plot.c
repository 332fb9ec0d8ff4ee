/* The curve of the loss as OUT/loss.png, drawn by gnuplot from OUT/loss.gnuplot, which holds the numbers too. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "run/loop.h"

extern char **environ;

static const char script_head[] =
    "# Draws loss.png: gnuplot loss.gnuplot\n"
    "set terminal pngcairo size 960,540\n"
    "set output 'loss.png'\n"
    "set xlabel 'step'\n"
    "set ylabel 'loss'\n"
    "set grid\n"
    "$loss << EOD\n";

bool run_put_points(run_loop *run, FILE *from, const char *path, FILE *to, bool evaluations, int64_t *points)
{
    char *line = NULL;
    size_t room = 0;
    rewind(from);
    for (ssize_t size; (size = getline(&line, &room, from)) > 0 && line[size - 1] == '\n';) {
        td_json_document *document = td_json_parse(run->td, line, (size_t)size, path);
        if (!document) break;
        const td_json *root = td_json_root(document), *eval = td_json_get(root, "eval");
        double loss = td_json_get_number(evaluations ? eval : root, "loss", HUGE_VAL);
        double step = td_json_get_number(root, "step", 0);
        if (loss < HUGE_VAL) fprintf(to, "%.0f %.9g\n", step, loss), ++*points;
        td_json_close(document);
    }
    free(line);
    return !run_failed(run);
}

static bool write_script(run_loop *run, FILE *metrics)
{
    char path[RUN_PATH], *text = NULL;
    size_t bytes = 0;
    int64_t training = 0, evaluations = 0;
    FILE *to = open_memstream(&text, &bytes);
    if (!to) {
        td_fail(run->td, TD_ERROR_MEMORY, "out of memory while drawing the loss");
        return false;
    }
    fputs(script_head, to);
    bool ok = run_put_points(run, metrics, "metrics.jsonl", to, false, &training);
    fputs("EOD\n$eval << EOD\n", to);
    ok = ok && run_put_points(run, metrics, "metrics.jsonl", to, true, &evaluations);
    fputs("EOD\nplot $loss using 1:2 with lines title 'training'", to);
    if (evaluations) fputs(", $eval using 1:2 with linespoints title 'evaluation'", to);
    fputs("\n", to);
    ok = fclose(to) == 0 && ok && run_path(run->td, path, "%s/loss.gnuplot", run->out) &&
         (!training || run_write_file(run->td, path, text, bytes));
    free(text);
    return ok;
}

/* 0: drawn; else what spawning gnuplot said, or EIO for its own failure. */
static int spawn_gnuplot(const run_loop *run, const char *name)
{
    char script[64];
    snprintf(script, sizeof script, "%s.gnuplot", name);
    char *const arguments[] = { "gnuplot", script, NULL };
    posix_spawn_file_actions_t actions;
    pid_t child;
    int status, error = posix_spawn_file_actions_init(&actions);
    if (error) return error;
    error = posix_spawn_file_actions_addchdir_np(&actions, run->out);
    if (!error) error = posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    if (!error) error = posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
    if (!error) error = posix_spawnp(&child, "gnuplot", &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error) return error;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return errno;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : EIO;
}

bool run_draw(run_loop *run, const char *name, char why[RUN_PATH + 128])
{
    int error = spawn_gnuplot(run, name);
    if (error == ENOENT)
        snprintf(why, RUN_PATH + 128, "no %s.png: gnuplot is not installed; with it, cd %s && gnuplot %s.gnuplot", name,
                 run->out, name);
    else
        snprintf(why, RUN_PATH + 128, "no %s.png: gnuplot failed (%s); see cd %s && gnuplot %s.gnuplot", name,
                 error == EIO ? "it said no" : strerror(error), run->out, name);
    return !error;
}

bool run_plot(run_loop *run)
{
    char path[RUN_PATH], why[RUN_PATH + 128];
    if (!*run->out || run->rank != 0 || run_failed(run)) return !run_failed(run);
    if (!run_path(run->td, path, "%s/metrics.jsonl", run->out)) return false;
    FILE *metrics = fopen(path, "r");
    if (!metrics) return true;
    bool ok = write_script(run, metrics);
    fclose(metrics);
    if (!ok) return false;
    if (run_draw(run, "loss", why)) run_say(run, "curve: %s/loss.png", run->out);
    else run_say(run, "%s", why);
    return true;
}
