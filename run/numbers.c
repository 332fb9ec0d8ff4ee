/* The numbers of updates: read, told from what is no number, and the time that each took.
 *
 * A GPU does not wait for the host to look at what it computed. The numbers of an update that is evaluated or saved, of the first and of
 * the last one are read when it is done, before more is handed over; those of any other when the next one has been, and its line is
 * printed then. What is printed and written is the same. A number that is not finite ends the run with the step that it is of; another
 * update has been done by then, of which nothing is left: what is saved has had all numbers up to its own looked at.
 */
#include <math.h>

#include "run/loop.h"

static void note_time(run_loop *run)
{
    double now = run_now(), seconds = now - run->mark;
    run->mark = now;
    run_profile_pause(run, seconds);
    if (run->timed || run->steps == run->first_step + 1) run->trained_s += seconds, run->trained_steps++;
    run->host_us[run->timed % RUN_TIMED] = td_last_report(run->td).host_us;
    run->step_ms[run->timed++ % RUN_TIMED] = 1000 * seconds;
    run->logged_s += seconds;
    run->logged_steps++;
}

/* That scalers halve their scale for, from 65536 to 1 and a good deal more. */
enum { MOST_SKIPPED = 40 };

/* Counts, one behind the other, those whose update a scaler left out. */
static bool are_finite(run_loop *run)
{
    bool norm_bad = opt_has_norm(run->opt) && !isfinite(run->grad_norm);
    run->skipped = norm_bad ? run->skipped + 1 : 0;
    if (opt_scaler_of(run->opt) && run->skipped <= MOST_SKIPPED) norm_bad = false; /* the update was left out */
    return isfinite(run->loss) && !norm_bad;
}

static bool check_numbers(run_loop *run)
{
    if (are_finite(run)) return true;
    double number = isfinite(run->loss) ? run->grad_norm : run->loss;
    char kept[RUN_PATH + 64] = "";
    if (!run_save_wait(run)) return false;
    if (run->saved_step >= 0)
        snprintf(kept, sizeof kept, "; the last checkpoint saved is %.900s/checkpoints/step-%lld", run->out,
                 (long long)run->saved_step);
    const char *what = isfinite(run->loss) ? "gradient's norm" : "loss", *is = isnan(number) ? "nan" : number < 0 ? "-inf" : "inf";
    char text[2 * RUN_PATH], origin[512] = "";
    if (run->ranks > 1) par_not_finite_text(run->world, origin, sizeof origin);
    snprintf(text, sizeof text, "step %lld: the %s is %s: stopped; %s%sTD_EAGER=1%s names the operation that made it%s",
             (long long)run->read, what, is, origin, *origin ? "; " : "", run->ranks > 1 ? " on one rank" : "", kept);
    if (run->ranks > 1) par_stop_world(run->world, run->rank, text); /* all ranks find the same */
    td_fail(run->td, TD_ERROR_NUMBER, "%s", text);
    return false;
}

static double number_of(td_tensor t, double otherwise) { return td_failed(t) ? otherwise : td_item(t); }

/* False: there is nothing, or only a part of an update. */
static bool take_unread(run_loop *run)
{
    run_unread unread = run->unread;
    run->unread.any = false;
    if (!unread.any) return false;
    run_add_part(run, unread.part);
    if (!unread.update) return false;
    run->loss = run_take_loss(run, !td_failed(unread.part.weight));
    run->grad_norm = number_of(unread.norm, (double)NAN);
    if (number_of(unread.asked.stop, 0) > 0) run->stopping = true;
    if (number_of(unread.asked.save, 0) > 0) run->saving = true;
    run->lr = unread.lr;
    run->epoch = unread.epoch;
    run->read = unread.update;
    note_time(run);
    return true;
}

bool run_read_numbers(run_loop *run)
{
    bool completes = take_unread(run);
    if (run_failed(run) || !completes) return !run_failed(run);
    if (run->read == 1) run->first_loss = run->loss;
    return run_save_check(run) && check_numbers(run);
}

bool run_read_late(run_loop *run)
{
    bool logs = run->unread.any && run->unread.logs, completes = run->unread.any && run->unread.update;
    if (run_failed(run) ? !(take_unread(run) && are_finite(run)) : !run_read_numbers(run)) return false;
    if (completes) run_progress_draw(run, false);
    if (!logs) return true;
    run_say_step(run);
    return run_record_step(run);
}

bool run_can_wait(const run_unread *unread)
{
    const td_tensor others[] = { unread->norm, unread->asked.stop, unread->asked.save };
    bool can = run_part_later(unread->part);
    for (int i = 0; i < 3; i++)
        if (!td_failed(others[i]) && !td_item_later(others[i])) can = false;
    return can;
}
