/* --profile: when it begins and ends, and what comes of it.
 *
 * Training profiles the updates behind the first ten; evaluations, checkpoints and printing between them are left out. bench
 * profiles updates of their own, behind those it times. Every rank profiles itself; the table is rank 0's.
 */
#include "run/profile.h"

enum { WARM_UP_UPDATES = 10 };

bool run_profile_check(run_loop *run)
{
    run_profile *p = &run->profile;
    int64_t updates = run->steps - td_updates(run->td);
    if (!p->updates || updates == 0) return true; /* nothing to do is no error */
    if (p->updates > updates) {
        run_fail_usage(run, "--profile %lld is more than the %lld update%s to do: give a smaller one", (long long)p->updates,
                       (long long)updates, updates == 1 ? "" : "s");
        return false;
    }
    p->after = updates - p->updates < WARM_UP_UPDATES ? updates - p->updates : WARM_UP_UPDATES;
    if (p->after > 0) return true;
    return run_profile_begin(run);
}

bool run_profile_begin(run_loop *run)
{
    run_profile *p = &run->profile;
    run_busy(run, true);
    bool measured = td_machine_measure(run->td, run->present, &p->machine);
    run_busy(run, false);
    return measured && td_profile_begin(run->td, p->updates * run->accumulate);
}

void run_profile_pause(run_loop *run, double seconds)
{
    run_profile *p = &run->profile;
    if (!p->updates || td_updates(run->td) - run->first_step <= p->after) return;
    td_profile_end(run->td);
    p->wall_s += seconds;
    p->done++;
}

bool run_profile_go_on(run_loop *run)
{
    run_profile *p = &run->profile;
    if (run_failed(run)) return false;
    if (!p->updates || td_updates(run->td) - run->first_step < p->after) return true;
    if (p->done == p->updates) return run_profile_report(run);
    if (run->stopping) return true;
    return p->done ? td_profile_begin(run->td, 0) : run_profile_begin(run);
}

/* ---- The report */

static void put_machine(const run_loop *run, td_json_writer *w)
{
    const td_machine *m = &run->profile.machine;
    td_json_open_object(w, "machine");
    if (*m->name) td_json_put_string(w, "gpu", m->name);
    td_json_put_integer(w, "threads", td_threads(run->td));
    for (int d = 0; d < TD_DTYPES; d++) {
        char name[32];
        snprintf(name, sizeof name, "%s_gflops", td_dtype_name((td_dtype)d));
        if (m->flops[d] > 0) td_json_put_number(w, name, 1e-9 * m->flops[d]);
    }
    td_json_put_number(w, "gb_per_s", 1e-9 * m->bytes);
    td_json_put_integer(w, "buffer_bytes", m->buffer_bytes);
    td_json_close_object(w);
}

static bool write_table(run_loop *run, const run_profile_table *table)
{
    td_json_writer w = td_json_begin(run->td);
    td_json_open_object(&w, NULL);
    td_json_put_string(&w, "model", run->name);
    td_json_put_string(&w, "strategy", run->strategy);
    td_json_put_integer(&w, "world", run->ranks);
    td_json_put_string(&w, "device", run_flags_text(&run->flags, "device"));
    td_json_put_string(&w, "dtype", run_flags_text(&run->flags, "dtype"));
    td_json_put_integer(&w, "batch", run->batch);
    td_json_put_integer(&w, "accumulate", run->accumulate);
    td_json_put_integer(&w, "updates", run->profile.done);
    td_json_put_number(&w, "step_ms", 1000 * run->profile.wall_s / (double)run->profile.done);
    put_machine(run, &w);
    run_profile_put(run, table, &w);
    td_json_close_object(&w);
    bool ok = run_record_object(run, "profile.json", &w);
    td_json_end(&w);
    return ok;
}

static bool report(run_loop *run)
{
    run_profile_table table = { 0 };
    bool ok = run->rank != 0 || run_profile_gather(run, &table);
    if (ok && run->rank == 0) run_profile_print(run, &table);
    if (ok && run->rank == 0 && *run->out) ok = write_table(run, &table);
    run_profile_close(&table);
    return ok && (!*run->out || run_trace_write(run));
}

bool run_profile_report(run_loop *run)
{
    td_profile_end(run->td);
    if (run_failed(run) || !run->profile.updates || !run->profile.done) return !run_failed(run);
    run_busy(run, true);
    bool ok = report(run);
    run_busy(run, false);
    if (ok && *run->out) run_say(run, "profile: %s/profile.trace.json (open it in Perfetto), %s/profile.json", run->out, run->out);
    td_profile_clear(run->td);
    run->profile.updates = 0; /* one profile a run */
    return ok && !run_failed(run);
}
