/* bench: the time of a training step on data that stays where it is. */
#include <stdlib.h>
#include <string.h>

#include "run/profile.h"

enum { WARM_UP_STEPS = 10, TIMED_STEPS = 100, EXPOSED_STEPS = 3 };

/* One update from the same micro-batch over and over. `before`, if not NULL, is the loss of the update before, whose place this one's takes
 * where it can be read later: so that a GPU does not wait for the host. */
static bool bench_update(run_loop *run, const run_model *model, void *object, const data_batch *b, td_tensor *before)
{
    run_part part = { 0 };
    for (run->micro = 0; run->micro < run->accumulate; run->micro++) {
        part = run_backward(run, model->loss(object, b));
        if (run->micro + 1 == run->accumulate) run_update(run, run->opt, part, run_rate(run, 0));
        if (!td_step(run->td)) return false;
        if (run->weighs) run_add_part(run, part);
    }
    td_tensor read = part.sum;
    if (!run->weighs && before && td_item_later(part.sum)) read = *before, *before = part.sum;
    if (run->weighs) run->loss = run_take_loss(run, true);
    else if (!td_failed(read)) run->loss = (double)run->accumulate * td_item(read);
    return !run_failed(run);
}

static bool timed_update(run_loop *run, const run_model *model, void *object, const data_batch *b, td_tensor *before)
{
    double begin = run_now();
    run_comm_begin(run);
    bool done = bench_update(run, model, object, b, before);
    run_comm_end(run);
    run->host_us[run->timed % RUN_TIMED] = td_last_report(run->td).host_us;
    run->step_ms[run->timed++ % RUN_TIMED] = 1000 * (run_now() - begin);
    return done;
}

/* Of GPUs: how much of the collectives is exposed is seen in a profile of a few more updates. */
static bool measure_exposed(run_loop *run, const run_model *model, void *object, const data_batch *b)
{
    run_profile_table table = { 0 };
    bool done = td_profile_begin(run->td, EXPOSED_STEPS * run->accumulate);
    for (int64_t step = 0; step < EXPOSED_STEPS && done; step++) done = bench_update(run, model, object, b, NULL);
    td_profile_end(run->td);
    done = done && run_profile_gather(run, &table);
    run->exposed_ms = 1e-6 * table.exposed_ns / EXPOSED_STEPS;
    run_profile_close(&table);
    td_profile_clear(run->td);
    return done;
}

/* Updates beside the timed ones. */
static void bench_profile(run_loop *run, const run_model *model, void *object, const data_batch *b)
{
    if (!run->profile.updates || !run_record_prepare(run) || !run_profile_begin(run)) return;
    double begin = run_now();
    while (run->profile.done < run->profile.updates && bench_update(run, model, object, b, NULL)) run->profile.done++;
    run->profile.wall_s = run_now() - begin;
    run_profile_report(run);
}

/* Of a GPU: what was planned and what it was asked for, and the host's part. */
static void say_of_gpu(run_loop *run)
{
    const double gib = 1073741824;
    int64_t most, used = td_device_used_bytes(run->td);
    if (!used) return;
    td_device_bytes(run->td, &most);
    run_say(run, "%.3f GiB planned, %.3f asked of the GPU; %.2f of its memory are in use, with its context, libraries and other programs; the host "
            "hands a step over in %.1f us, the first took %.2f s", (double)td_last_report(run->td).peak_bytes / gib, (double)most / gib,
            (double)used / gib, run_median_host_us(run), 1e-3 * run->first_ms);
}

void run_bench(run_loop *run, const run_model *model, void *object)
{
    data_batch b;
    int64_t steps = run->steps ? run->steps : TIMED_STEPS;
    if (!run_average(run) || !run->loader || !data_next(run->loader, &b)) return;
    double begin = run_now();
    for (int64_t step = 0; step < WARM_UP_STEPS; step++) {
        if (!bench_update(run, model, object, &b, NULL)) return;
        if (step == 0) run->first_loss = run->loss, run->first_ms = 1000 * (run_now() - begin);
    }
    td_tensor last = TD_NO_TENSOR;
    for (int64_t step = 0; step < steps; step++)
        if (!timed_update(run, model, object, &b, &last)) return;
    if (!td_failed(last)) run->loss = (double)run->accumulate * td_item(last);
    int64_t updates;
    double ms = run_median_ms(run, &updates), loss = run->loss;
    if (run->ranks > 1 && td_gpu_of(run->td) && !measure_exposed(run, model, object, &b)) return;
    run->loss = loss; /* of the last that was timed */
    run_say(run, "%s, %s, %s on %d rank%s%s, batch %lld: %.3f ms a step (median of %lld), %.0f items/s", run->name,
            run_flags_text(&run->flags, "dtype"), run->strategy, run->ranks, run->ranks == 1 ? "" : "s",
            run->rehearses ? ", rehearsed by one" : "", (long long)run->batch, ms, (long long)updates, ms > 0 ? 1000 * (double)run->batch / ms : 0);
    say_of_gpu(run);
    if (run_summary(run, "bench", false)) bench_profile(run, model, object, &b);
}
