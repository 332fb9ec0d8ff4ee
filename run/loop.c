/* The training loop: what happens between two calls of the model. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "run/loop.h"

/* ---- Data and the start */

data_loader *run_training_loader(run_loop *run, data_set *set)
{
    bool plans = run->flags.command == RUN_PLAN, stays = run->flags.command == RUN_BENCH; /* on one batch */
    int part, parts;
    td_mesh_rows(td_context_mesh(run->td), &part, &parts);
    return data_loader_open(run->td, set, &(data_loader_options){
        .batch = run->batch,
        .accumulate = run->accumulate,
        .rank = part,
        .world = parts,
        .seed = td_seed(run->td),
        .shuffle = true,
        .threads = 1,
        .prefetch = stays ? 1 : 0,
        .hold = stays ? 1 : 0,
        .dtype = td_float(run->td),
        .shapes_only = plans,
    });
}

void run_train_on(run_loop *run, data_set *set)
{
    if (!run) {
        data_set_close(set);
        return;
    }
    data_set_close(run->train);
    run->train = set;
    if (run_failed(run) || !set) return;
    if (run->batch > set->count) {
        run_fail_usage(run, "--batch %lld is more than the %lld samples of %s: give a smaller one",
                       (long long)run->batch, (long long)set->count, set->name);
        return;
    }
    run->loader = run_training_loader(run, set);
    if (run->loader && !run->steps) run->steps = run_flags_whole(&run->flags, "epochs") * data_batches(run->loader);
}

/* Takes everything from the last checkpoint. */
static bool resume(run_loop *run)
{
    run_busy(run, true);
    run_restore *r = run_restore_open(run, true);
    bool ok = r && run_restore_states(run, r) && run_restore_position(run, r) && run_restore_best(run, r);
    if (ok) {
        run->saved_step = run_restore_step(r);
        run->first_loss = run_restore_loss(r, "first_loss");
        run->loss = run_restore_loss(r, "final_loss");
        if (!run->schedule_steps && !run_restore_begins(r)) run->schedule_steps = run_restore_schedule_steps(r);
        run->stopped_early = run->stop_after && run->best.stale >= run->stop_after;
        td_set_updates(run->td, run->saved_step);
    }
    if (ok && run_restore_begins(r)) run_say(run, "%s holds weights alone: moments, schedule and data start anew", run->out);
    run_restore_close(r);
    run_busy(run, false);
    return ok;
}

static bool check_schedule(run_loop *run)
{
    int64_t warmup = run_flags_whole(&run->flags, "warmup");
    char longest[32];
    if (!run->schedule_steps) run->schedule_steps = run->steps;
    if (warmup <= run->schedule_steps) return true;
    if (!run_flag_given(run, "warmup")) { /* a default is as long as it can be */
        snprintf(longest, sizeof longest, "%lld", (long long)run->schedule_steps);
        return run_flags_set(&run->flags, "warmup", longest, run_flags_source(&run->flags, "warmup"));
    }
    run_fail_usage(run, "--warmup %lld is more than the %lld updates the schedule spans: give a smaller one, or more "
                        "--schedule-steps", (long long)warmup, (long long)run->schedule_steps);
    return false;
}

static void announce(run_loop *run)
{
    run_say(run, "%s %s: %lld parameters, %s on %d rank%s, batch %lld, steps %lld to %lld%s",
            run_flags_on(&run->flags, "resume") ? "going on" : "training", run->name,
            (long long)td_parameter_elements(run->td), run->strategy, run->ranks, run->ranks == 1 ? "" : "s",
            (long long)run->batch, (long long)run->first_step + 1, (long long)run->steps,
            run->overfits ? ", on the first batch alone (--overfit-batch)" : "");
}

/* All updates that were wanted. */
static bool is_done(const run_loop *run) { return run->stopped_early || td_updates(run->td) >= run->steps; }

static bool start(run_loop *run)
{
    int64_t begin, end;
    if (!run->loader) {
        td_fail(run->td, TD_ERROR_USAGE, "run_next: there is no data to train on: run_train_on comes first");
        return false;
    }
    if ((run->eval_every || run->eval_batches) && !run->evaluation.set) {
        run_fail_usage(run, "--eval-%s has nothing to evaluate on: %s has no data for it; leave it out",
                       run->eval_every ? "every" : "batches", run->name);
        return false;
    }
    /* Lays out the parameters: what is wrong with --units is known before anything is written. */
    if (td_state_count(run->td) && !td_state_owned(td_state_at(run->td, 0), &begin, &end)) return false;
    run->started = true;
    if (!run_average(run)) return false;
    if (run_flags_on(&run->flags, "resume") && !resume(run)) return false;
    if (!check_schedule(run)) return false;
    run->first_step = td_updates(run->td);
    if (!run_profile_check(run)) return false;
    if (!is_done(run)) {
        if (!run_record_prepare(run)) return false;
        announce(run);
    }
    run->mark = run_now();
    return true;
}

bool run_next(run_loop *run, data_batch *b)
{
    if (!run || run_failed(run)) return false;
    if (!run->started && !start(run)) return false;
    bool at_boundary = run->micro == 0;
    if (at_boundary && run->ranks == 1 && run_signal()) run->stopping = true;
    if (at_boundary && (run->stopping || is_done(run))) return false;
    if (at_boundary && run->overfits && !data_seek(run->loader, NULL)) return false;
    if (!data_next(run->loader, b)) return false;
    td_profile_mark(run->td, "data");
    run->batch_epoch = b->epoch + 1;
    return true;
}

/* ---- What ranks must agree on */

/* A row of each rank: of its sum over ranks (2) an element is above 0 where any rank's flag is set. */
static run_asked record_any(run_loop *run, bool stop, bool save)
{
    td_dtype dtype = td_float(run->td);
    bool flags[2] = { stop, save };
    for (int i = 0; i < 2; i++) {
        if (dtype == TD_F64) run->signals.f64[i] = flags[i];
        else run->signals.f32[i] = flags[i];
    }
    td_tensor rows = td_each_rank(run->td, "signals", dtype, TD_SHAPE(run->ranks, 2), &run->signals);
    td_tensor sum = td_sum(rows, 0, TD_DROP);
    run_asked any = { .stop = td_slice(sum, 0, 0, 1) };
    any.save = td_slice(sum, 0, 1, 2);
    td_keep(any.stop);
    td_keep(any.save);
    return any;
}

bool run_any(run_loop *run, bool flag)
{
    if (run->ranks == 1) return flag;
    run_asked any = record_any(run, flag, false);
    return td_step(run->td) && td_item(any.stop) > 0;
}

/* ---- One update */

opt_scaler *run_scaler(run_loop *run)
{
    if (!run || run_failed(run) || strcmp(run_flags_text(&run->flags, "dtype"), "f16")) return NULL;
    if (!run->scaler) run->scaler = opt_scaler_open(run->td, NULL);
    return run->scaler;
}

void run_comm_begin(run_loop *run)
{
    run->comm_before = run->world ? par_sent(run->world, run->rank, NULL) : 0;
    run->waited_before = run->world ? par_waited_s(run->world, run->rank) : 0;
}

void run_comm_end(run_loop *run)
{
    if (!run->world) return;
    run->comm_bytes = par_sent(run->world, run->rank, NULL) - run->comm_before;
    double waited = par_waited_s(run->world, run->rank) - run->waited_before;
    run->comm_ms[run->timed % RUN_TIMED] = td_gpu_of(run->td) ? (double)NAN : 1000 * waited;
}

/* Signals reach ranks at different times: all stop, or save, behind the same update, the first that any of them knew of it; where that is
 * read late, behind the next. */
static bool run_update_step(run_loop *run, opt_optimizer *opt, run_unread *u)
{
    u->lr = run_rate(run, td_updates(run->td));
    u->epoch = run->batch_epoch;
    run_update(run, opt, u->part, u->lr);
    if (run->ranks > 1) u->asked = record_any(run, run_signal() != 0, run_signal_save());
    if (!td_step(run->td)) return false;
    u->update = td_updates(run->td);
    if (opt_has_norm(opt)) u->norm = opt_gradient_norm(opt);
    return true;
}

/* What the last update is looked at for. An evaluation may come to more: a best one to save, an early end. */
typedef struct looks {
    bool first, last, evaluates, logs, saves;
} looks;

static bool is_due(int64_t step, int64_t every) { return every && step % every == 0; }

static looks looks_at(const run_loop *run)
{
    int64_t step = td_updates(run->td);
    looks l = { .first = step == run->first_step + 1, .last = step >= run->steps || run->stopping };
    l.evaluates = run->evaluation.set && (step >= run->steps || is_due(step, run->eval_every));
    l.logs = l.first || l.last || l.evaluates || is_due(step, run->log_every);
    l.saves = l.last || run->saving || is_due(step, run->save_every);
    return l;
}

/* No rank may save before the first one has moved another run's files aside. */
static bool open_record(run_loop *run)
{
    if (!run_record_open(run)) return false;
    if (*run->out && run->ranks > 1) run_any(run, false);
    return !run_failed(run);
}

/* After an update whose numbers have been read: everything that is no training. Its time does not count. */
static void look_after(run_loop *run, looks l)
{
    int64_t step = td_updates(run->td);
    run_progress_draw(run, l.last);
    if (l.last) run_progress_end(run);
    if (l.first && !open_record(run)) return;
    if (l.logs) run_say_step(run);
    if (l.last && l.evaluates && !run_save(run)) return; /* an evaluation that fails takes nothing with it */
    if (l.evaluates && !(run_evaluate(run) && run_judge(run))) return;
    if (l.logs && !run_record_step(run)) return;
    bool best = run->keep_best && run->best.step == step;
    if (l.saves || best || run->stopped_early) run_save(run);
    if (run->saving && !run_failed(run)) run_say_saved(run, step);
}

static void end_update(run_loop *run)
{
    if (run->ranks == 1) run->saving = run_signal_save();
    run_comm_end(run);
    looks l = looks_at(run);
    bool holds = l.first || l.evaluates || l.saves || run->profile.updates; /* until it has been looked after */
    run->unread.logs = l.logs;
    if (!holds && run_can_wait(&run->unread)) return;
    if (!run_read_numbers(run)) return;
    look_after(run, looks_at(run));
    run->saving = false;
    if (!run_profile_go_on(run)) return;
    run->mark = run_now();
}

void run_step(run_loop *run, opt_optimizer *opt, td_tensor loss)
{
    if (!run || run_failed(run)) return;
    if (!run->opt) run->opt = opt;
    if (run->micro == 0) run_comm_begin(run);
    run_unread u = { .any = true, .part = run_backward(run, loss), .norm = TD_NO_TENSOR, .asked = { TD_NO_TENSOR, TD_NO_TENSOR } };
    bool last = run->micro + 1 == run->accumulate;
    if (last && run->weighs && !run_read_late(run)) return; /* what the parts before weigh is of the update */
    if (!(last ? run_update_step(run, opt, &u) : td_step(run->td))) return;
    if (!run_read_late(run)) return;
    run->unread = u;
    run->micro = last ? 0 : run->micro + 1;
    if (last) end_update(run);
    else if (!run_can_wait(&run->unread)) run_read_numbers(run);
}

/* ---- The end */

static void say_stopped(run_loop *run, int64_t step)
{
    if (step == 0)
        run_say(run, "stopped by a signal before the first update: there is nothing to save");
    else if (run->saved_step == step)
        run_say(run, "stopped by a signal after step %lld, saved: --resume --out %s goes on", (long long)step,
                run->out);
    else run_say(run, "stopped by a signal after step %lld; nothing is saved without --out", (long long)step);
}

static void say_stopped_early(run_loop *run, int64_t step)
{
    run_say(run, "stopped early at step %lld: the evaluation was best, %s %.6g, at step %lld; a larger --stop-after goes on",
            (long long)step, run->evaluation.name[0], run->best.loss, (long long)run->best.step);
}

static void finish(run_loop *run)
{
    int64_t step = td_updates(run->td);
    bool stopped = run->stopping && !is_done(run);
    bool trained = step > run->first_step;
    td_profile_end(run->td); /* what follows is no training */
    if (!run_read_late(run)) return;
    if (!run->started || (trained && !run_save(run))) return;
    if (!stopped && run->evaluation.step != step) run_evaluate(run);
    if (!run_save_wait(run)) return;
    if (trained && *run->out && run->ranks > 1) run_any(run, false); /* no rank leaves before the checkpoint stands */
    if (run_failed(run)) return;
    run_record_close(run);
    if (!run_profile_report(run)) return; /* stopped amid one: what there is of it */
    if (stopped) say_stopped(run, step);
    else if (run->stopped_early) say_stopped_early(run, step);
    else if (!trained)
        run_say(run, "nothing to do: step %lld of %lld is done; a larger --steps goes on", (long long)step,
                (long long)run->steps);
    /* The process that made the last checkpoint may have been killed before it came to this. */
    bool reports = trained || (run->saved_step == step && !run_summary_stands(run, step));
    if (reports && !stopped) run_plot(run);
    run_summary(run, "train", reports);
    if (!stopped) run_compare(run);
    if (!run_failed(run) && *run->out && trained)
        run_say(run, "checkpoint: %s/checkpoints/step-%lld", run->out, (long long)step);
}

/* What a memory error is about is the size of the run. */
static void memory_hint(const run_loop *run, char *to, size_t room)
{
    td_report report = td_last_report(run->td);
    double mib = 1.0 / (1 << 20);
    int size = snprintf(to, room, "; a smaller model or --batch, or a larger --accumulate, takes less");
    if (report.state_bytes && size < (int)room)
        snprintf(to + size, room - (size_t)size, " (a rank was to hold %.0f MiB of state and %.0f of a step)",
                 mib * (double)report.state_bytes, mib * (double)report.step_bytes);
}

static void print_error(const run_loop *run)
{
    char text[2048], hint[256] = "";
    if (!run->refused && td_error(run->td) == TD_ERROR_MEMORY) memory_hint(run, hint, sizeof hint);
    snprintf(text, sizeof text, "%.1700s%s", run->refused ? run->refusal : td_error_text(run->td), hint);
    if (run->world && run->ranks > 1) par_fail_world(run->world, run->rank, text);
    if (run->world && par_launched()) return; /* the launcher prints one for all ranks */
    if (!*text || !par_tells_error(run->world, run->rank)) return; /* another rank tells */
    fprintf(stderr, "%s: %s\n", run->name, run->scheduled && run->world ? par_world_error(run->world) : text);
}

static void release(run_loop *run)
{
    data_loader_close(run->loader);
    data_set_close(run->train);
    run_evaluation_close(&run->evaluation);
    opt_close(run->opt);
    opt_ema_close(run->ema);
    td_close(run->td);
    if (run->world) par_world_close(run->world);
    run_flags_free(&run->flags);
    free(run);
}

int run_close(run_loop *run)
{
    if (!run) {
        fprintf(stderr, "out of memory for a run\n");
        return 1;
    }
    bool trains = run->flags.command == RUN_TRAIN;
    if (run_failed(run)) run_read_late(run);
    else if (trains) finish(run);
    if (!run_failed(run) && !trains && run->progress.error) /* what it prints is all it does */
        td_fail(run->td, TD_ERROR_DATA, "cannot write to stdout: %s", strerror(run->progress.error));
    int status = run->status;
    if (run_failed(run) && !run->ended) {
        run_record_close(run);
        run_progress_end(run);
        print_error(run); /* others need not wait for what follows */
        run_save_wait(run);
        bool usage = !run->started && td_error(run->td) == TD_ERROR_USAGE;
        status = run->refused ? run->refused : usage ? 2 : 1;
    }
    release(run);
    run_signals_release();
    return status;
}
