/* One update of several micro-batches: its loss and gradient are those of the whole batch. Where losses count alike each gives its m-th
 * part. Where they are quotients, of sums over what counts by how much that is, sums and weights add up and are divided once, the
 * gradient by the optimizer. With one micro-batch the loss is taken as it is.
 */
#include "run/loop.h"

/* The micro-batches of an update weigh all or none. */
static bool check_weighs(run_loop *run, bool weighs)
{
    if (run->micro == 0) run->weighs = weighs;
    if (run->weighs == weighs) return true;
    td_fail(run->td, TD_ERROR_USAGE, "run_step: the loss of micro-batch %lld is %s mean by weights (td_quotient), those before it in the "
            "update %s: all of one update must be of one kind", (long long)run->micro + 1, weighs ? "a" : "no", weighs ? "are not" : "are");
    return false;
}

/* Of sums and weights the batch's rows are taken out alike: gradients as large as those of means fit 16 bits. */
static run_part part_of(run_loop *run, td_tensor loss)
{
    run_part part = { .sum = loss, .weight = TD_NO_TENSOR };
    if (run->accumulate == 1) return part;
    bool weighs = td_quotient(loss, &part.sum, &part.weight);
    if (!check_weighs(run, weighs)) return part;
    double factor = 1.0 / (double)(weighs ? run->batch : run->accumulate);
    part.sum = td_scale(part.sum, factor);
    if (!weighs) return part;
    part.weight = td_scale(part.weight, factor);
    td_keep(part.weight);
    return part;
}

run_part run_backward(run_loop *run, td_tensor loss)
{
    run_part part = part_of(run, loss);
    opt_scaler *scaler = run->opt ? opt_scaler_of(run->opt) : NULL;
    if (run_scaler(run) && !scaler)
        td_fail(run->td, TD_ERROR_USAGE, "--dtype f16 needs a scaler of losses: give the optimizer .scaler = run_scaler(run), or train "
                "in bf16");
    td_backward(opt_scaler_scale(scaler, part.sum));
    if (scaler) td_keep(part.sum);
    return part;
}

/* What the parts before the last weigh is known by then, and read: of all that a step gives, the host waits for this alone. */
void run_update(run_loop *run, opt_optimizer *opt, run_part last, double rate)
{
    if (run->weighs) {
        td_tensor before = td_scalar(run->td, run->weight_sum);
        opt_step_over(opt, rate, td_add(before, last.weight));
    } else {
        opt_step(opt, rate);
    }
    opt_ema_update(run->ema);
}

void run_add_part(run_loop *run, run_part part)
{
    run->loss_sum += td_item(part.sum);
    if (!td_failed(part.weight)) run->weight_sum += td_item(part.weight);
}

bool run_part_later(run_part part)
{
    bool later = td_item_later(part.sum);
    return td_failed(part.weight) ? later : td_item_later(part.weight) && later;
}

double run_take_loss(run_loop *run, bool weighs)
{
    double loss = weighs ? run->loss_sum / run->weight_sum : run->loss_sum;
    run->loss_sum = run->weight_sum = 0;
    return loss;
}
