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

/* One line for each loss, of training or of evaluations. */
static bool put_points(run_loop *run, FILE *from, FILE *to, bool evaluations, int64_t *points)
{
    char *line = NULL;
    size_t room = 0;
    rewind(from);
    for (ssize_t size; (size = getline(&line, &room, from)) > 0;) {
        td_json_document *document = td_json_parse(run->td, line, (size_t)size, "metrics.jsonl");
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
    bool ok = put_points(run, metrics, to, false, &training);
    fputs("EOD\n$eval << EOD\n", to);
    ok = ok && put_points(run, metrics, to, true, &evaluations);
    fputs("EOD\nplot $loss using 1:2 with lines title 'training'", to);
    if (evaluations) fputs(", $eval using 1:2 with linespoints title 'evaluation'", to);
    fputs("\n", to);
    ok = fclose(to) == 0 && ok && run_path(run->td, path, "%s/loss.gnuplot", run->out) &&
         (!training || run_write_file(run->td, path, text, bytes));
    free(text);
    return ok;
}

/* 0: drawn; else what spawning gnuplot said, or EIO for its own failure. */
static int draw(const run_loop *run)
{
    char *const arguments[] = { "gnuplot", "loss.gnuplot", NULL };
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

bool run_plot(run_loop *run)
{
    char path[RUN_PATH];
    if (!*run->out || run->rank != 0 || run_failed(run)) return !run_failed(run);
    if (!run_path(run->td, path, "%s/metrics.jsonl", run->out)) return false;
    FILE *metrics = fopen(path, "r");
    if (!metrics) return true;
    bool ok = write_script(run, metrics);
    fclose(metrics);
    if (!ok) return false;
    int error = draw(run);
    if (!error) run_say(run, "curve: %s/loss.png", run->out);
    else if (error == ENOENT)
        run_say(run, "no loss.png: gnuplot is not installed; with it, cd %s && gnuplot loss.gnuplot", run->out);
    else
        run_say(run, "no loss.png: gnuplot failed (%s); see cd %s && gnuplot loss.gnuplot",
                error == EIO ? "it said no" : strerror(error), run->out);
    return true;
}
