/* OUT/profile.trace.json: the profile in Chrome's trace event format, which Perfetto opens. A process is a rank; its threads are the
 * host, the executor, communication, copies to and from the host, and what is small and aside; a counter follows the memory that is live.
 *
 * "Trace Event Format", Google, 2016: complete events (X) with ts and dur in microseconds, metadata (M), counters (C).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "run/profile.h"

enum { HOST = 1, EXECUTOR, COMMUNICATION, COPIES, ASIDE, THREADS };

static double us(int64_t ns) { return (double)ns / 1000; }

/* ---- Events */

static void put_name(td_json_writer *w, int rank, int thread, const char *what, const char *name)
{
    td_json_open_object(w, NULL);
    td_json_put_string(w, "ph", "M");
    td_json_put_integer(w, "pid", rank);
    td_json_put_integer(w, "tid", thread);
    td_json_put_string(w, "name", what);
    td_json_open_object(w, "args");
    td_json_put_string(w, "name", name);
    td_json_close_object(w);
    td_json_close_object(w);
}

static int thread_of(const td_profile_event *e)
{
    if (!e->task) return HOST;
    return e->task->collective ? COMMUNICATION : e->task->copied ? COPIES : e->task->aside ? ASIDE : EXECUTOR;
}

static void put_names(const run_loop *run, td_json_writer *w)
{
    static const char *const names[THREADS] = { [HOST] = "host", [EXECUTOR] = "executor", [COMMUNICATION] = "communication", [COPIES] = "copies",
                                                [ASIDE] = "aside" };
    char rank[32];
    bool some[THREADS] = { [HOST] = true, [EXECUTOR] = true, [COMMUNICATION] = run->ranks > 1 };
    snprintf(rank, sizeof rank, "rank %d", run->rank);
    put_name(w, run->rank, 0, "process_name", rank);
    for (int64_t i = 0; i < td_profile_count(run->td); i++) {
        td_profile_event e = td_profile_at(run->td, i);
        some[thread_of(&e)] = true;
    }
    for (int t = HOST; t < THREADS; t++)
        if (some[t]) put_name(w, run->rank, t, "thread_name", names[t]);
}

static void put_task_arguments(const td_profile_task *task, td_json_writer *w)
{
    static const char *const phases[] = { "forward", "backward", "update" };
    td_json_put_string(w, "op", task->op);
    td_json_put_string(w, "module", task->module);
    td_json_put_string(w, "phase", phases[task->phase]);
    td_json_put_string(w, "dtype", td_dtype_name(task->dtype));
    td_json_put_integer(w, "flops", task->flops);
    td_json_put_integer(w, "bytes", task->bytes);
    if (task->collective) td_json_put_integer(w, "sent", task->sent);
}

static void put_event(const run_loop *run, const td_profile_event *e, td_json_writer *w)
{
    td_json_open_object(w, NULL);
    td_json_put_string(w, "ph", "X");
    td_json_put_integer(w, "pid", run->rank);
    td_json_put_integer(w, "tid", thread_of(e));
    td_json_put_string(w, "name", e->task ? e->task->parts : e->name);
    td_json_put_string(w, "cat", e->task ? e->task->kind : "host");
    td_json_put_number(w, "ts", us(e->begin_ns));
    td_json_put_number(w, "dur", us(e->end_ns - e->begin_ns));
    td_json_open_object(w, "args");
    td_json_put_integer(w, "step", e->step);
    if (e->task) put_task_arguments(e->task, w);
    td_json_close_object(w);
    td_json_close_object(w);
}

static void put_memory(const run_loop *run, int64_t at_ns, int64_t state, int64_t step, td_json_writer *w)
{
    td_json_open_object(w, NULL);
    td_json_put_string(w, "ph", "C");
    td_json_put_integer(w, "pid", run->rank);
    td_json_put_string(w, "name", "memory");
    td_json_put_number(w, "ts", us(at_ns));
    td_json_open_object(w, "args");
    td_json_put_integer(w, "state", state);
    td_json_put_integer(w, "step", step);
    td_json_close_object(w);
    td_json_close_object(w);
}

static void put_events(const run_loop *run, td_json_writer *w)
{
    int64_t state = td_last_report(run->td).state_bytes, live = -1;
    put_names(run, w);
    for (int64_t i = 0; i < td_profile_count(run->td); i++) {
        td_profile_event e = td_profile_at(run->td, i);
        if (e.task && e.task->live_bytes != live) put_memory(run, e.begin_ns, state, live = e.task->live_bytes, w);
        put_event(run, &e, w);
    }
}

/* ---- Files */

static bool rank_path(run_loop *run, int rank, char path[RUN_PATH])
{
    return run_path(run->td, path, "%s/profile.rank-%d.tmp", run->out, rank);
}

/* The list of another rank's events, without its brackets; its file is gone then. */
static bool append_rank(run_loop *run, int rank, FILE *to)
{
    char path[RUN_PATH], buffer[1 << 14];
    if (!rank_path(run, rank, path)) return false;
    FILE *from = fopen(path, "r");
    bool ok = from && fputc(',', to) != EOF;
    for (size_t size; ok && (size = fread(buffer, 1, sizeof buffer, from)) > 0;) ok = fwrite(buffer, 1, size, to) == size;
    if (!ok || ferror(from)) td_fail(run->td, TD_ERROR_DATA, "cannot read %s: %s", path, strerror(errno));
    if (from) fclose(from);
    unlink(path);
    return td_error(run->td) == TD_OK;
}

static bool write_whole(run_loop *run, const char *events, size_t bytes)
{
    char path[RUN_PATH], *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    bool ok = to && fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[", to) >= 0 && fwrite(events, 1, bytes, to) == bytes;
    for (int rank = 1; rank < run->present && ok && td_error(run->td) == TD_OK; rank++) ok = append_rank(run, rank, to);
    ok = ok && fputs("]}\n", to) >= 0;
    if (to && fclose(to)) ok = false;
    if (!ok) td_fail(run->td, TD_ERROR_MEMORY, "out of memory for the trace of the profile: profile fewer updates");
    ok = ok && run_path(run->td, path, "%s/profile.trace.json", run->out) && run_write_file(run->td, path, text, size);
    free(text);
    return ok;
}

bool run_trace_write(run_loop *run)
{
    char path[RUN_PATH];
    td_json_writer w = td_json_begin(run->td);
    td_json_open_array(&w, NULL);
    put_events(run, &w);
    td_json_close_array(&w);
    const char *list = td_json_text(&w), *events = list ? list + 1 : NULL;
    size_t bytes = list ? strlen(list) - 2 : 0; /* without brackets */
    bool ok = list != NULL;
    if (ok && run->rank > 0) ok = rank_path(run, run->rank, path) && run_write_file(run->td, path, events, bytes);
    if (ok) run_any(run, false); /* all lists are there */
    if (ok && run->rank == 0) ok = write_whole(run, events, bytes);
    td_json_end(&w);
    return ok && td_error(run->td) == TD_OK;
}
