/* What a training run leaves in OUT as it goes, written by rank 0:
 *
 *     config.json     the flags as they came out
 *     metrics.jsonl   one object a logged update, with "eval" where there was one; flushed line by line
 *     model/          what the model's program puts there
 *     previous-N/     all files of an earlier run that was in OUT
 *
 * and TensorBoard's events (tensorboard.c), with the same numbers.
 *
 * Nothing that is in OUT is touched before the first update has been done.
 */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "run/loop.h"

bool run_record_object(run_loop *run, const char *name, const td_json_writer *w)
{
    char path[RUN_PATH];
    const char *text = td_json_text(w);
    return text && run_path(run->td, path, "%s/%s", run->out, name) &&
           run_write_file(run->td, path, text, strlen(text));
}

bool run_record_config(run_loop *run)
{
    td_json_writer w = td_json_begin(run->td);
    td_json_open_object(&w, NULL);
    run_flags_put(&run->flags, &w);
    td_json_close_object(&w);
    bool ok = run_record_object(run, "config.json", &w);
    td_json_end(&w);
    return ok;
}

/* ---- metrics.jsonl */

/* The "step" of a line; -1: the line is no whole object, as a crash may leave it. */
static int64_t step_of_line(td_context *quiet, const char *line, size_t bytes)
{
    td_json_document *document = td_json_parse(quiet, line, bytes, "metrics.jsonl");
    int64_t value = document ? td_json_get_whole(td_json_root(document), "step", -1) : -1;
    td_json_close(document);
    td_clear_error(quiet);
    return value;
}

/* Copies the lines up to `step` to a new file that takes the old one's place. */
static bool cut_lines(run_loop *run, const char *path, int64_t step)
{
    FILE *from = fopen(path, "r");
    if (!from) return true;
    char *line = NULL, *kept = NULL;
    size_t room = 0, bytes = 0;
    FILE *to = open_memstream(&kept, &bytes);
    td_context *quiet = td_open(&(td_options){ .threads = 1, .log = NULL });
    bool ok = to != NULL;
    for (ssize_t size; ok && (size = getline(&line, &room, from)) > 0;) {
        if (line[size - 1] != '\n') break;
        int64_t at = step_of_line(quiet, line, (size_t)size - 1);
        if (at < 0 || at > step) break;
        ok = fwrite(line, 1, (size_t)size, to) == (size_t)size;
    }
    td_close(quiet);
    if (to && fclose(to)) ok = false;
    if (!ok) td_fail(run->td, TD_ERROR_MEMORY, "out of memory while reading %s", path);
    else ok = run_write_file(run->td, path, kept, bytes);
    free(kept);
    free(line);
    fclose(from);
    return ok;
}

/* ---- An earlier run in OUT */

static const char *const files_of_a_run[] = { "checkpoints", "config.json", "metrics.jsonl", "summary.json",
                                              "loss.png",    "loss.gnuplot", "compare.png", "compare.gnuplot",
                                              "profile.json", "profile.trace.json", "model" };
enum { FILES_OF_A_RUN = sizeof files_of_a_run / sizeof *files_of_a_run };

bool run_record_stands(const run_loop *run)
{
    char path[RUN_PATH];
    for (int i = 0; i < FILES_OF_A_RUN; i++) {
        if (!strcmp(files_of_a_run[i], "checkpoints") || !strcmp(files_of_a_run[i], "model")) continue;
        int size = snprintf(path, sizeof path, "%s/%s", run->out, files_of_a_run[i]);
        if (size < (int)sizeof path && access(path, F_OK) == 0) return true;
    }
    return run_latest(run->out) >= 0;
}

/* Makes OUT/previous-N, N the first number that is free. */
static bool make_previous(run_loop *run, char path[RUN_PATH])
{
    for (int n = 1;; n++) {
        if (!run_path(run->td, path, "%s/previous-%d", run->out, n)) return false;
        if (mkdir(path, 0777) == 0) return true;
        if (errno == EEXIST) continue;
        td_fail(run->td, TD_ERROR_DATA, "cannot make directory %s: %s", path, strerror(errno));
        return false;
    }
}

/* Moves OUT/name to the directory, which is made for the first file there is. */
static bool move_file(run_loop *run, const char *name, char moved[RUN_PATH])
{
    char now[RUN_PATH], before[RUN_PATH];
    if (!run_path(run->td, now, "%s/%s", run->out, name)) return false;
    if (access(now, F_OK)) return true;
    if (!*moved && !make_previous(run, moved)) return false;
    return run_path(run->td, before, "%s/%s", moved, name) && run_rename(run->td, now, before);
}

static bool move_events(run_loop *run, char moved[RUN_PATH])
{
    DIR *dir = opendir(run->out);
    bool ok = true;
    for (struct dirent *entry; ok && dir && (entry = readdir(dir));)
        if (run_is_events(entry->d_name)) ok = move_file(run, entry->d_name, moved);
    if (dir) closedir(dir);
    return ok;
}

/* Another run's files would be taken for this one's, and are not this one's to write over. */
static bool move_aside(run_loop *run)
{
    char moved[RUN_PATH] = "";
    for (int i = 0; i < FILES_OF_A_RUN; i++)
        if (!move_file(run, files_of_a_run[i], moved)) return false;
    if (!move_events(run, moved)) return false;
    if (!*moved) return true;
    run_say(run, "%s held another run: its files are now in %s (--resume would have gone on with it)", run->out, moved);
    return run_sync_directory(run->td, run->out);
}

/* ---- The lines of metrics.jsonl */

bool run_record_prepare(run_loop *run)
{
    if (!*run->out || run->rank != 0) return true;
    if (!run_make_directory(run->td, run->out)) return false;
    if (access(run->out, W_OK | X_OK) == 0) return true;
    td_fail(run->td, TD_ERROR_DATA, "cannot write in %s: %s", run->out, strerror(errno));
    return false;
}

static bool record_model(run_loop *run)
{
    char dir[RUN_PATH];
    if (!run->model || !run->model->record) return true;
    return run_path(run->td, dir, "%s/model", run->out) && run_make_directory(run->td, dir) && run->model->record(run, dir);
}

static bool open_files(run_loop *run)
{
    char path[RUN_PATH];
    bool resumed = run_flags_on(&run->flags, "resume");
    if (!run_path(run->td, path, "%s/metrics.jsonl", run->out)) return false;
    if (resumed ? !cut_lines(run, path, run->first_step) : !move_aside(run)) return false;
    if (!run_prune_partial(run->td, run->out)) return false;
    if (!run_record_config(run) || (!resumed && !record_model(run))) return false;
    run->metrics = fopen(path, "a");
    if (!run->metrics) td_fail(run->td, TD_ERROR_DATA, "cannot write %s: %s", path, strerror(errno));
    run->line = td_json_begin(run->td);
    return run->metrics != NULL && run_events_open(run);
}

bool run_record_open(run_loop *run)
{
    if (!*run->out || run->rank != 0) return true;
    run_busy(run, true);
    bool ok = open_files(run);
    run_busy(run, false);
    return ok;
}

/* The writer keeps its memory from line to line. */
static td_json_writer *begin_line(run_loop *run)
{
    run->line.bytes = 0;
    run->line.follows = false;
    td_json_open_object(&run->line, NULL);
    return &run->line;
}

static bool end_line(run_loop *run)
{
    td_json_close_object(&run->line);
    const char *text = td_json_text(&run->line);
    if (!text) return false;
    run_busy(run, true);
    bool ok = fprintf(run->metrics, "%s\n", text) >= 0 && fflush(run->metrics) == 0;
    run_busy(run, false);
    if (!ok) td_fail(run->td, TD_ERROR_DATA, "cannot write %s/metrics.jsonl: %s", run->out, strerror(errno));
    return ok;
}

/* Items a second since the last logged update. */
static double logged_rate(const run_loop *run)
{
    return run->logged_s > 0 ? (double)(run->batch * run->logged_steps) / run->logged_s : 0;
}

void run_say_step(run_loop *run)
{
    if (run->progress.terminal) return;
    run_say(run, "step %lld/%lld  epoch %lld  loss %.6g  %.0f items/s", (long long)run->read,
            (long long)run->steps, (long long)run->epoch, run->loss, logged_rate(run));
}

bool run_record_step(run_loop *run)
{
    int64_t step = run->read;
    double rate = logged_rate(run);
    run->logged_s = 0;
    run->logged_steps = 0;
    if (!run->metrics) return true;
    td_json_writer *w = begin_line(run);
    td_json_put_integer(w, "step", step);
    td_json_put_integer(w, "epoch", run->epoch);
    td_json_put_number(w, "loss", run->loss);
    td_json_put_number(w, "lr", run->lr);
    td_json_put_number(w, "grad_norm", run->grad_norm);
    td_json_put_number(w, "items_per_s", rate);
    td_json_put_number(w, "exposed_comm_ms", run->comm_ms[(run->timed - 1) % RUN_TIMED]);
    if (run->evaluation.set && run->evaluation.step == step) run_put_evaluation(&run->evaluation, w);
    return end_line(run) && run_events_step(run, rate);
}

void run_record_close(run_loop *run)
{
    if (!run->metrics) return;
    if (fclose(run->metrics))
        td_fail(run->td, TD_ERROR_DATA, "cannot write %s/metrics.jsonl: %s", run->out, strerror(errno));
    run->metrics = NULL;
    td_json_end(&run->line);
    run_events_close(run);
}
