/* OUT/summary.json: the run in one object, the same that --json prints. By rank 0. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "run/loop.h"

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of the updates that a ring holds. */
static double median(const double *ring, int64_t n)
{
    double sorted[RUN_TIMED];
    if (!n) return 0;
    memcpy(sorted, ring, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, by_size);
    return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

static int64_t timed(const run_loop *run) { return run->timed < RUN_TIMED ? run->timed : RUN_TIMED; }

double run_median_ms(const run_loop *run, int64_t *updates)
{
    *updates = timed(run);
    return median(run->step_ms, *updates);
}

double run_median_host_us(const run_loop *run) { return median(run->host_us, timed(run)); }

double run_exposed_ms(const run_loop *run)
{
    if (run->ranks == 1) return 0;
    if (td_gpu_of(run->td)) return run->exposed_ms;
    return run->timed ? median(run->comm_ms, timed(run)) : (double)NAN;
}

static void put_run(const run_loop *run, const char *command, td_json_writer *w)
{
    td_json_put_string(w, "model", run->name);
    td_json_put_string(w, "command", command);
    td_json_put_string(w, "strategy", run->strategy);
    td_json_put_integer(w, "world", run->ranks);
    if (run->rehearses) td_json_put_string(w, "rehearsed", run_flags_text(&run->flags, "machine"));
    td_json_put_string(w, "device", run_flags_text(&run->flags, "device"));
    td_json_put_string(w, "dtype", run_flags_text(&run->flags, "dtype"));
    td_json_put_integer(w, "batch", run->batch);
    td_json_put_integer(w, "accumulate", run->accumulate);
    td_json_put_unsigned(w, "seed", td_seed(run->td));
    td_json_put_integer(w, "params", td_parameter_elements(run->td));
}

static void put_training(const run_loop *run, td_json_writer *w)
{
    td_json_put_integer(w, "steps", run->flags.command == RUN_BENCH ? run->timed : td_updates(run->td));
    td_json_put_number(w, "first_loss", run->first_loss);
    td_json_put_number(w, "final_loss", run->loss);
    if (run->flags.command == RUN_TRAIN) td_json_put_boolean(w, "stopped_early", run->stopped_early);
}

void run_put_evaluation(const run_evaluation *e, td_json_writer *w)
{
    td_json_open_object(w, "eval");
    for (int i = 0; i < e->count; i++) td_json_put_number(w, e->name[i], e->value[i]);
    td_json_close_object(w);
}

/* What each rank computes a step, on average: the slowest is whom the others wait for in exposed_comm_ms. */
static void put_compute(const run_loop *run, td_json_writer *w)
{
    td_json_open_array(w, "compute_ms");
    for (int rank = 0; rank < run->present; rank++) td_json_put_number(w, NULL, 1000 * par_computed_s(run->world, rank));
    td_json_close_array(w);
}

static void put_cost(const run_loop *run, td_json_writer *w)
{
    td_report report = td_last_report(run->td);
    int64_t updates;
    double ms = run_median_ms(run, &updates);
    double seconds = run->trained_steps ? run->trained_s / (double)run->trained_steps : ms / 1000;
    td_json_put_number(w, "items_per_s", seconds > 0 ? (double)run->batch / seconds : (double)NAN);
    td_json_put_number(w, "step_ms", run->timed ? ms : (double)NAN);
    if (run->first_ms > 0) td_json_put_number(w, "first_step_ms", run->first_ms);
    int64_t most, used = td_device_used_bytes(run->td);
    td_device_bytes(run->td, &most);
    if (used) td_json_put_number(w, "host_us", run_median_host_us(run));
    if (used) td_json_put_integer(w, "device_used_bytes", used);
    td_json_put_integer(w, "peak_bytes", most ? most : atomic_load(&run->memory.peak));
    td_json_put_integer(w, "planned_peak_bytes", report.peak_bytes);
    td_json_put_integer(w, "planned_host_bytes", report.host_bytes);
    td_json_put_integer(w, "checkpoint_bytes", run->checkpoint_bytes);
    td_json_put_integer(w, "comm_bytes_per_step", run->comm_bytes);
    td_json_put_number(w, "exposed_comm_ms", run_exposed_ms(run));
    if (run->present > 1) put_compute(run, w);
    td_json_put_integer(w, "plans", report.plans);
}

bool run_summary(run_loop *run, const char *command, bool writes)
{
    if (run->rank != 0) return true;
    td_json_writer w = td_json_begin(run->td);
    td_json_open_object(&w, NULL);
    put_run(run, command, &w);
    put_training(run, &w);
    run_put_evaluation(&run->evaluation, &w);
    put_cost(run, &w);
    td_json_close_object(&w);
    bool ok = !writes || !*run->out || run_record_object(run, "summary.json", &w);
    if (ok && run_flags_on(&run->flags, "json")) ok = run_print_object(run, &w);
    td_json_end(&w);
    return ok;
}

bool run_summary_stands(run_loop *run, int64_t step)
{
    char path[RUN_PATH];
    if (!run_path(run->td, path, "%s/summary.json", run->out)) return false;
    td_context *quiet = td_open(&(td_options){ .threads = 1 });
    td_json_document *document = td_json_read(quiet, path);
    bool stands = document && td_json_get_whole(td_json_root(document), "steps", -1) == step;
    td_json_close(document);
    td_close(quiet);
    return stands;
}
