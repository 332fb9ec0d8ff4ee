/* Evaluation: one pass over a data set in TD_EVAL, padding at weight 0; sums over ranks are the program's own.
 * With --ema the averages of the parameters are evaluated. The mean of a metric is the sum of its sums / the sum of its weights over all batches.
 */
#include <string.h>

#include "run/loop.h"

static int record_batch(run_loop *run, const data_batch *b, run_metric metrics[RUN_METRICS])
{
    run_evaluation *e = &run->evaluation;
    int count = e->measure(e->model, b, metrics);
    if (count < 1 || count > RUN_METRICS) {
        td_fail(run->td, TD_ERROR_USAGE, "evaluation: %d metrics, must be 1 to %d", count, RUN_METRICS);
        return 0;
    }
    for (int i = 0; i < count; i++) {
        td_keep(metrics[i].sum);
        td_keep(metrics[i].weight);
    }
    return td_step(run->td) ? count : 0;
}

/* What is read of batches: the sums over them, and the last one's metrics while it can wait for the next one's start. */
typedef struct pass {
    double sum[RUN_METRICS], weight[RUN_METRICS];
    run_metric unread[RUN_METRICS];
    int count;                    /* of `unread` */
} pass;

static void read_metrics(pass *p)
{
    for (int i = 0; i < p->count; i++) {
        p->sum[i] += td_item(p->unread[i].sum);
        p->weight[i] += td_item(p->unread[i].weight);
    }
    p->count = 0;
}

/* Of the batch that was just handed over, when that before it has been read. */
static void add_metrics(pass *p, const run_metric *metrics, int count)
{
    bool later = true;
    read_metrics(p);
    for (int i = 0; i < count; i++) {
        p->unread[i] = metrics[i];
        later &= td_item_later(metrics[i].sum);
        later &= td_item_later(metrics[i].weight);
    }
    p->count = count;
    if (!later) read_metrics(p);
}

static bool evaluate_all(run_loop *run, data_loader *loader)
{
    run_evaluation *e = &run->evaluation;
    run_metric metrics[RUN_METRICS];
    pass p = { 0 };
    int64_t batches = run->overfits ? 1 : run->eval_batches; /* 0: all */
    int64_t left = batches ? batches * run->accumulate : INT64_MAX; /* micro-batches */
    for (data_batch b; left > 0 && data_next(loader, &b); left--) {
        int count = record_batch(run, &b, metrics);
        if (!count) return false;
        add_metrics(&p, metrics, count);
        e->count = count;
    }
    read_metrics(&p);
    for (int i = 0; i < e->count; i++) {
        snprintf(e->name[i], sizeof e->name[i], "%s", metrics[i].name);
        e->value[i] = p.sum[i] / p.weight[i];
    }
    return !run_failed(run);
}

static void say_result(run_loop *run)
{
    const run_evaluation *e = &run->evaluation;
    char text[256];
    size_t at = 0;
    for (int i = 0; i < e->count && at < sizeof text; i++)
        at += (size_t)snprintf(text + at, sizeof text - at, "  %s %.4f", e->name[i], e->value[i]);
    run_say(run, "eval at step %lld%s", (long long)td_updates(run->td), text);
}

static data_loader *open_loader(run_loop *run)
{
    if (run->overfits) return run_training_loader(run, run->train);
    int part, parts;
    td_mesh_rows(td_context_mesh(run->td), &part, &parts);
    return data_loader_open(run->td, run->evaluation.set, &(data_loader_options){
        .batch = run->batch / run->accumulate,
        .rank = part,
        .world = parts,
        .tail = DATA_PAD,
        .epochs = 1,
        .threads = 1,
        .dtype = td_float(run->td),
    });
}

bool run_evaluate(run_loop *run)
{
    run_evaluation *e = &run->evaluation;
    if (!e->set || run_failed(run)) return !run_failed(run);
    if (e->loader ? !data_seek(e->loader, NULL) : !(e->loader = open_loader(run))) return false;
    td_mode before = td_get_mode(run->td);
    td_set_mode(run->td, TD_EVAL);
    opt_ema_begin(run->ema);
    bool ok = evaluate_all(run, e->loader);
    opt_ema_end(run->ema);
    td_set_mode(run->td, before);
    if (!ok) return false;
    e->step = td_updates(run->td);
    say_result(run);
    return true;
}

/* ---- The best so far */

/* Every rank has the same numbers, and so comes to the same. NaN is no better than anything. */
bool run_judge(run_loop *run)
{
    const run_evaluation *e = &run->evaluation;
    run_best *best = &run->best;
    if (!e->count || e->step <= best->judged) return true;
    best->judged = e->step;
    best->stale++;
    if (e->value[0] < best->loss) *best = (run_best){ .loss = e->value[0], .step = e->step, .judged = e->step };
    run->stopped_early = run->stop_after && best->stale >= run->stop_after;
    return run_save_again(run);
}

/* ---- The set */

void run_evaluation_close(run_evaluation *e)
{
    data_loader_close(e->loader);
    data_set_close(e->set);
    *e = (run_evaluation){ .step = -1 };
}

void run_evaluate_on(run_loop *run, data_set *set, run_measure measure, void *model)
{
    if (!run) {
        data_set_close(set);
        return;
    }
    run_evaluation_close(&run->evaluation);
    run->evaluation = (run_evaluation){ .set = set, .measure = measure, .model = model, .step = -1 };
}
