/* bench: the time of a training step on data that stays where it is. plan: what a step costs, without running it. */
#include <stdlib.h>
#include <string.h>

#include "run/loop.h"

enum { WARM_UP_STEPS = 10, TIMED_STEPS = 100 };

/* One update from the same micro-batch over and over. */
static bool bench_update(run_loop *run, const run_model *model, void *object, const data_batch *b)
{
    double begin = run_now();
    td_tensor part = { 0 };
    run->comm_before = run->world ? par_sent(run->world, run->rank, NULL) : 0;
    for (int64_t micro = 1; micro <= run->accumulate; micro++) {
        part = run_backward(run, model->loss(object, b));
        if (micro == run->accumulate) opt_step(run->opt, run_rate(run, 0));
        if (micro == run->accumulate) opt_ema_update(run->ema);
        if (!td_step(run->td)) return false;
    }
    run->loss = (double)run->accumulate * td_item(part);
    run->step_ms[run->timed++ % RUN_TIMED] = 1000 * (run_now() - begin);
    if (run->world) run->comm_bytes = par_sent(run->world, run->rank, NULL) - run->comm_before;
    return !run_failed(run);
}

/* Updates beside the timed ones. */
static void bench_profile(run_loop *run, const run_model *model, void *object, const data_batch *b)
{
    if (!run->profile.updates || !run_record_prepare(run) || !run_profile_begin(run)) return;
    double begin = run_now();
    while (run->profile.done < run->profile.updates && bench_update(run, model, object, b)) run->profile.done++;
    run->profile.wall_s = run_now() - begin;
    run_profile_report(run);
}

void run_bench(run_loop *run, const run_model *model, void *object)
{
    data_batch b;
    int64_t steps = run->steps ? run->steps : TIMED_STEPS;
    if (!run_average(run) || !run->loader || !data_next(run->loader, &b)) return;
    for (int64_t step = 0; step < WARM_UP_STEPS; step++) {
        if (!bench_update(run, model, object, &b)) return;
        if (step == 0) run->first_loss = run->loss;
    }
    run->timed = 0;
    for (int64_t step = 0; step < steps; step++)
        if (!bench_update(run, model, object, &b)) return;
    int64_t updates;
    double ms = run_median_ms(run, &updates);
    run_say(run, "%s, %s, %s on %d rank%s, batch %lld: %.3f ms a step (median of %lld), %.0f items/s", run->name,
            run_flags_text(&run->flags, "dtype"), run->strategy, run->ranks, run->ranks == 1 ? "" : "s",
            (long long)run->batch, ms, (long long)updates, ms > 0 ? 1000 * (double)run->batch / ms : 0);
    if (run_summary(run, "bench", false)) bench_profile(run, model, object, &b);
}

/* ---- plan */

static void say_plan(run_loop *run, const td_report *r)
{
    double mib = 1.0 / (1 << 20);
    run_say(run, "%s, %s, %s on %d rank%s, batch %lld (%lld rows a rank): one rank", run->name,
            run_flags_text(&run->flags, "dtype"), run->strategy, run->ranks, run->ranks == 1 ? "" : "s",
            (long long)run->batch, (long long)run->batch / run->ranks);
    run_say(run, "  holds     %.1f MiB: %.1f state, %.1f of a step (%.1f live at once)", mib * (double)r->peak_bytes,
            mib * (double)r->state_bytes, mib * (double)r->step_bytes, mib * (double)r->live_bytes);
    run_say(run, "  computes  %.3f GFLOP, moves %.1f MiB, in %lld calls of %lld recorded operations",
            1e-9 * (double)r->flops, mib * (double)r->bytes_moved, (long long)r->calls, (long long)r->nodes);
    run_say(run, "  sends     %lld bytes in %lld collectives", (long long)r->comm_bytes, (long long)r->comm_calls);
}

static void put_plan(const run_loop *run, const td_report *r, td_json_writer *w)
{
    td_json_put_string(w, "model", run->name);
    td_json_put_string(w, "command", "plan");
    td_json_put_string(w, "strategy", run->strategy);
    td_json_put_integer(w, "world", run->ranks);
    td_json_put_string(w, "device", run_flags_text(&run->flags, "device"));
    td_json_put_string(w, "dtype", run_flags_text(&run->flags, "dtype"));
    td_json_put_integer(w, "batch", run->batch);
    td_json_put_integer(w, "accumulate", run->accumulate);
    td_json_put_integer(w, "params", td_parameter_elements(run->td));
    td_json_put_integer(w, "planned_peak_bytes", r->peak_bytes);
    td_json_put_integer(w, "state_bytes", r->state_bytes);
    td_json_put_integer(w, "step_bytes", r->step_bytes);
    td_json_put_integer(w, "live_bytes", r->live_bytes);
    td_json_put_integer(w, "flops", r->flops);
    td_json_put_integer(w, "bytes_moved", r->bytes_moved);
    td_json_put_integer(w, "comm_bytes_per_step", r->comm_bytes);
    td_json_put_integer(w, "comm_calls", r->comm_calls);
    td_json_put_integer(w, "operations", r->nodes);
    td_json_put_integer(w, "calls", r->calls);
    td_json_put_number(w, "plan_ms", r->plan_ms);
}

static void print_plan(run_loop *run, const td_report *r)
{
    if (!run_flags_on(&run->flags, "json")) {
        say_plan(run, r);
        return;
    }
    td_json_writer w = td_json_begin(run->td);
    td_json_open_object(&w, NULL);
    put_plan(run, r, &w);
    td_json_close_object(&w);
    run_print_object(run, &w);
    td_json_end(&w);
}

/* The micro-batches of an update are planned as one step: FLOPs and bytes are the update's, memory is a bound where
 * there are several. */
void run_plan(run_loop *run, const run_model *model, void *object)
{
    data_batch b;
    if (!run_average(run) || !run->loader || !data_next(run->loader, &b)) return;
    for (int64_t micro = 0; micro < run->accumulate; micro++) run_backward(run, model->loss(object, &b));
    opt_step(run->opt, run_rate(run, 0));
    opt_ema_update(run->ema);
    if (!td_plan(run->td)) return;
    td_report report = td_last_report(run->td);
    print_plan(run, &report);
}
