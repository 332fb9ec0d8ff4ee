/* What a training run leaves in OUT, written by rank 0:
 *
 *     config.json     the flags as they came out
 *     metrics.jsonl   one object a logged update, with "eval" where there was one; flushed line by line
 *     summary.json    the run in one object, the same that --json prints
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "run/loop.h"

static bool write_object(run_loop *run, const char *name, const td_json_writer *w)
{
    char path[RUN_PATH];
    const char *text = td_json_text(w);
    return text && run_path(run->td, path, "%s/%s", run->out, name) &&
           run_write_file(run->td, path, text, strlen(text));
}

static bool write_config(run_loop *run)
{
    td_json_writer w = td_json_begin(run->td);
    td_json_open_object(&w, NULL);
    run_flags_put(&run->flags, &w);
    td_json_close_object(&w);
    bool ok = write_object(run, "config.json", &w);
    td_json_end(&w);
    return ok;
}

/* ---- metrics.jsonl */

/* The "step" of a line; -1: the line is no whole object, as a crash may leave it. */
static int64_t step_of_line(td_context *quiet, const char *line, size_t bytes)
{
    td_json_document *document = td_json_parse(quiet, line, bytes, "metrics.jsonl");
    const td_json *step = document ? td_json_get(td_json_root(document), "step") : NULL;
    int64_t value = step && step->kind == TD_JSON_NUMBER && step->whole ? step->integer : -1;
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

/* Another run's checkpoints would be taken for this one's: they are moved aside, once. */
static bool move_aside(run_loop *run)
{
    char now[RUN_PATH], before[RUN_PATH];
    if (run_latest(run->out) < 0) return true;
    if (!run_path(run->td, now, "%s/checkpoints", run->out) ||
        !run_path(run->td, before, "%s/checkpoints.previous", run->out))
        return false;
    if (!run_remove_tree(run->td, before)) return false;
    if (rename(now, before)) {
        td_fail(run->td, TD_ERROR_DATA, "cannot rename %s to %s: %s", now, before, strerror(errno));
        return false;
    }
    run_say(run, "%s held another run: its checkpoints are now in %s (--resume would have gone on with it)", run->out,
            before);
    return true;
}

bool run_record_open(run_loop *run, int64_t step)
{
    char path[RUN_PATH];
    bool resumed = run_flags_on(&run->flags, "resume");
    if (!*run->out || run->rank != 0) return true;
    if (!run_make_directory(run->td, run->out) || !run_path(run->td, path, "%s/metrics.jsonl", run->out)) return false;
    if (resumed ? !cut_lines(run, path, step) : !move_aside(run)) return false;
    if (!write_config(run)) return false;
    run->metrics = fopen(path, resumed ? "a" : "w");
    if (!run->metrics) td_fail(run->td, TD_ERROR_DATA, "cannot write %s: %s", path, strerror(errno));
    run->line = td_json_begin(run->td);
    return run->metrics != NULL;
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
    if (fprintf(run->metrics, "%s\n", text) >= 0 && fflush(run->metrics) == 0) return true;
    td_fail(run->td, TD_ERROR_DATA, "cannot write %s/metrics.jsonl: %s", run->out, strerror(errno));
    return false;
}

static void put_evaluation(const run_evaluation *e, td_json_writer *w)
{
    td_json_open_object(w, "eval");
    for (int i = 0; i < e->count; i++) td_json_put_number(w, e->name[i], e->value[i]);
    td_json_close_object(w);
}

bool run_record_step(run_loop *run)
{
    int64_t step = td_updates(run->td);
    double rate = run->logged_s > 0 ? (double)(run->batch * run->logged_steps) / run->logged_s : 0;
    run->logged_s = 0;
    run->logged_steps = 0;
    if (!run->progress.terminal)
        run_say(run, "step %lld/%lld  epoch %lld  loss %.6g  %.0f items/s", (long long)step, (long long)run->steps,
                (long long)run->epoch, run->loss, rate);
    if (!run->metrics) return true;
    td_json_writer *w = begin_line(run);
    td_json_put_integer(w, "step", step);
    td_json_put_integer(w, "epoch", run->epoch);
    td_json_put_number(w, "loss", run->loss);
    td_json_put_number(w, "lr", run->lr);
    td_json_put_number(w, "grad_norm", run->grad_norm);
    td_json_put_number(w, "items_per_s", rate);
    if (run->evaluation.set && run->evaluation.step == step) put_evaluation(&run->evaluation, w);
    return end_line(run);
}

void run_record_close(run_loop *run)
{
    if (!run->metrics) return;
    if (fclose(run->metrics))
        td_fail(run->td, TD_ERROR_DATA, "cannot write %s/metrics.jsonl: %s", run->out, strerror(errno));
    run->metrics = NULL;
    td_json_end(&run->line);
}

/* ---- summary.json */

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double run_median_ms(const run_loop *run)
{
    double sorted[RUN_TIMED];
    int64_t n = run->timed < RUN_TIMED ? run->timed : RUN_TIMED;
    if (!n) return 0;
    memcpy(sorted, run->step_ms, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, by_size);
    return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

static void put_run(const run_loop *run, const char *command, td_json_writer *w)
{
    td_json_put_string(w, "model", run->name);
    td_json_put_string(w, "command", command);
    td_json_put_string(w, "strategy", run->strategy);
    td_json_put_integer(w, "world", run->ranks);
    td_json_put_string(w, "device", run_flags_text(&run->flags, "device"));
    td_json_put_string(w, "dtype", run_flags_text(&run->flags, "dtype"));
    td_json_put_integer(w, "batch", run->batch);
    td_json_put_integer(w, "accumulate", run->accumulate);
    td_json_put_integer(w, "seed", (int64_t)td_seed(run->td));
    td_json_put_integer(w, "params", td_parameter_elements(run->td));
}

static void put_training(const run_loop *run, td_json_writer *w)
{
    bool trained = run->timed > 0;
    td_json_put_integer(w, "steps", td_updates(run->td));
    td_json_put_number(w, "first_loss", trained ? run->first_loss : (double)NAN);
    td_json_put_number(w, "final_loss", trained ? run->loss : (double)NAN);
}

static void put_cost(const run_loop *run, td_json_writer *w)
{
    td_report report = td_last_report(run->td);
    double ms = run_median_ms(run);
    double seconds = run->trained_steps ? run->trained_s / (double)run->trained_steps : ms / 1000;
    td_json_put_number(w, "items_per_s", seconds > 0 ? (double)run->batch / seconds : (double)NAN);
    td_json_put_number(w, "step_ms", run->timed ? ms : (double)NAN);
    td_json_put_integer(w, "peak_bytes", atomic_load(&run->memory.peak));
    td_json_put_integer(w, "planned_peak_bytes", report.peak_bytes);
    td_json_put_integer(w, "comm_bytes_per_step", run->comm_bytes);
    /* Collectives of one rank cost nothing; what others cost behind computation is not measured. */
    td_json_put_number(w, "exposed_comm_ms", run->ranks == 1 ? 0 : (double)NAN);
    td_json_put_integer(w, "plans", report.plans);
}

bool run_record_summary(run_loop *run, const char *command, bool writes)
{
    bool json = run_flags_on(&run->flags, "json");
    if (run->rank != 0) return true;
    td_json_writer w = td_json_begin(run->td);
    td_json_open_object(&w, NULL);
    put_run(run, command, &w);
    put_training(run, &w);
    put_evaluation(&run->evaluation, &w);
    put_cost(run, &w);
    td_json_close_object(&w);
    const char *text = td_json_text(&w);
    bool ok = text != NULL;
    if (ok && writes && *run->out) ok = write_object(run, "summary.json", &w);
    if (ok && json && (printf("%s\n", text) < 0 || fflush(stdout))) {
        td_fail(run->td, TD_ERROR_DATA, "cannot write to stdout: %s", strerror(errno));
        ok = false;
    }
    td_json_end(&w);
    return ok;
}
