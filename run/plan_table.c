/* plan --strategy all: every strategy planned as if it alone had been asked for, side by side.
 *
 * Each has a run of its own, made of the same command line with that strategy in place of the list. Where none fits the machine, the
 * one that needs least is planned again with more micro-batches, with recomputation and on more ranks, until it fits.
 */
#include <stdlib.h>
#include <string.h>

#include "run/plan.h"

enum { ROWS = 32, TRIES = 12 };

typedef struct row {
    run_planned planned;
    char strategy[64];
    char error[256];              /* why it cannot be had; "": it can */
} row;

typedef struct table {
    run_loop *run;                /* of the whole list */
    const run_model *model;
    int argc;
    char **argv;                  /* as given */
    run_machine machine;
    row rows[ROWS];
    int count;
    const row *fastest, *nearest; /* that fits; that needs least memory. NULL: none */
} table;

bool run_plans_several(const run_loop *run)
{
    const char *strategy = run_flags_text(&run->flags, "strategy");
    return run->flags.command == RUN_PLAN && strategy && (!strcmp(strategy, "all") || strchr(strategy, ','));
}

/* ---- One strategy */

static const char *failure_of(const run_loop *child) { return child->refused ? child->refusal : td_error_text(child->td); }

static bool plan_one(const table *t, const run_variant *variant, run_planned *to, char *error, size_t room)
{
    const run_model *model = t->model;
    int argc = t->argc;
    char **argv = malloc(((size_t)argc + 1) * sizeof *argv), **words = argv;
    run_loop *child = NULL;
    if (argv) {
        memcpy(argv, t->argv, ((size_t)argc + 1) * sizeof *argv);
        child = run_open_variant(RUN_PLAN, "plan", &argc, &words, &model->defaults, variant);
    }
    void *object = child ? run_make(child, model, "random") : NULL;
    bool planned = object && run_plan_update(child, model, object, &t->machine, to);
    if (!planned) snprintf(error, room, "%.*s", (int)room - 1, child ? failure_of(child) : "out of memory");
    if (child) child->ended = true; /* what failed is told in the table */
    if (child) run_close(child);
    if (object && model->free) model->free(object);
    free(argv);
    return planned;
}

/* ---- Which strategies: of the list, or all that parallel/ knows */

/* "hsdp:SxR" with the ranks filled in: the largest groups that a host holds. */
static void fill_sizes(const table *t, char *name)
{
    char *sizes = strstr(name, ":SxR");
    int ranks = t->run->ranks, most = t->machine.host_ranks, group = 1;
    if (!sizes) return;
    for (int s = 2; s < ranks && (s <= most || group == 1); s++)
        if (ranks % s == 0) group = s;
    snprintf(sizes, 40, ":%dx%d", group, ranks / group);
}

static bool add_rows(table *t)
{
    const char *list = run_flags_text(&t->run->flags, "strategy");
    if (!strcmp(list, "all")) list = t->run->ranks > 1 ? par_strategy_names_for_ranks() : "single";
    for (const char *at = list; *at;) {
        size_t length = strcspn(at, ",");
        row *r = &t->rows[t->count];
        if (!length || length > sizeof r->strategy - 40 || t->count == ROWS) {
            run_fail_usage(t->run, "--strategy '%.80s' is no list of strategies: write names with commas between them", list);
            return false;
        }
        memcpy(r->strategy, at, length);
        fill_sizes(t, r->strategy);
        t->count++;
        at += length;
        at += strspn(at, ", ");
    }
    return true;
}

static void plan_rows(table *t)
{
    for (int i = 0; i < t->count; i++) {
        row *r = &t->rows[i];
        run_variant variant = { .strategy = r->strategy };
        if (!plan_one(t, &variant, &r->planned, r->error, sizeof r->error)) continue;
        const run_planned *p = &r->planned;
        if (!t->nearest || p->report.peak_bytes < t->nearest->planned.report.peak_bytes) t->nearest = r;
        bool faster = !t->fastest || p->estimate.step_s < t->fastest->planned.estimate.step_s;
        if (*t->machine.name && p->fits && faster) t->fastest = r;
    }
}

/* ---- What would make it fit */

typedef struct remedy {
    char text[96];                /* "--accumulate 4 --recompute" */
    run_planned planned;
} remedy;

/* In the order of trying: more micro-batches, recomputation, the most of both, and then also more ranks with as many rows each. */
static int remedies_of(const table *t, run_variant v[TRIES])
{
    const run_planned *p = &t->nearest->planned;
    const run_flags *f = &t->run->flags;
    int64_t cuts = 1, rows = p->batch / par_batch_parts(p->strategy, p->ranks);
    int count = 0;
    for (int64_t m = 2; m <= 64 && rows % (p->accumulate * m) == 0; m *= 2) cuts = m;
    run_variant most = { .strategy = t->nearest->strategy, .accumulate = p->accumulate * cuts,
                         .recompute = run_flags_text(f, "recompute") && !run_flags_on(f, "recompute") };
    if (cuts > 2) v[count++] = (run_variant){ .strategy = most.strategy, .accumulate = 2 * p->accumulate };
    if (most.recompute) v[count++] = (run_variant){ .strategy = most.strategy, .accumulate = p->accumulate, .recompute = true };
    if (cuts > 1) v[count++] = most;
    if (most.strategy[strcspn(most.strategy, ":+")] == ':') return count; /* its groups are of these ranks */
    for (most.world = 2 * p->ranks; most.world <= 65536 && count < TRIES; most.world *= 2) {
        most.batch = rows * par_batch_parts(most.strategy, (int)most.world);
        v[count++] = most;
    }
    return count;
}

static void tell_variant(const run_variant *v, int64_t accumulate, char *to, size_t room)
{
    int at = v->accumulate != accumulate ? snprintf(to, room, " --accumulate %lld", (long long)v->accumulate) : 0;
    if (v->recompute) at += snprintf(to + at, room - (size_t)at, " --recompute");
    if (v->world) snprintf(to + at, room - (size_t)at, " --world %lld --batch %lld", (long long)v->world, (long long)v->batch);
}

static bool find_remedy(const table *t, remedy *to)
{
    char error[256];
    run_variant v[TRIES];
    int count = remedies_of(t, v);
    for (int i = 0; i < count; i++) {
        if (!plan_one(t, &v[i], &to->planned, error, sizeof error) || !to->planned.fits) continue;
        tell_variant(&v[i], t->nearest->planned.accumulate, to->text, sizeof to->text);
        return true;
    }
    return false;
}

static void tell_that_none_fits(table *t)
{
    remedy found;
    const row *r = t->nearest;
    double gib = 1.0 / (1 << 30), has = gib * (double)t->machine.memory_bytes;
    if (!r || r->planned.fits) return;
    const td_report *report = &r->planned.report;
    if (find_remedy(t, &found))
        td_fail(t->run->td, TD_ERROR_UNSUPPORTED, "no strategy fits the %.2f GiB of a rank of %s: nearest is %s with %.2f GiB; with%s it "
                "would need %.2f GiB", has, t->machine.name, r->strategy, gib * (double)report->peak_bytes, found.text,
                gib * (double)found.planned.report.peak_bytes);
    else
        td_fail(t->run->td, TD_ERROR_UNSUPPORTED, "no strategy fits the %.2f GiB of a rank of %s: nearest is %s with %.2f GiB, of which %.2f are "
                "state; neither more micro-batches nor more ranks make it fit: take a smaller model, or ranks with more memory", has,
                t->machine.name, r->strategy, gib * (double)report->peak_bytes, gib * (double)report->state_bytes);
}

/* ---- Printing */

static void say_row(const table *t, const row *r)
{
    const run_planned *p = &r->planned;
    const td_planned_memory *m = &p->memory;
    double mib = 1.0 / (1 << 20), step = (double)(m->activations + m->transients + m->communication + m->workspace + m->unused);
    if (*r->error) {
        run_say(t->run, "%-12s %s", r->strategy, r->error);
        return;
    }
    char time[80] = "";
    if (*t->machine.name)
        snprintf(time, sizeof time, " %10.2f %10.2f %11.0f  %s", 1e3 * p->estimate.step_s, 1e3 * p->estimate.exposed_s,
                 (double)p->batch / p->estimate.step_s, r == t->fastest ? "fits, fastest" : p->fits ? "fits" : "does not fit");
    run_say(t->run, "%-12s %10.1f %10.1f %10.1f %10.1f %10.1f %10.1f %10.1f%s", r->strategy, mib * (double)p->report.peak_bytes,
            mib * (double)m->parameters, mib * (double)(m->accumulators + m->gradients), mib * (double)m->moments, mib * step,
            1e-6 * (double)(p->report.comm_bytes - p->across), 1e-6 * (double)p->across, time);
}

static void say_table(const table *t)
{
    char text[400];
    run_loop *run = t->run;
    const run_planned *p = t->nearest ? &t->nearest->planned : NULL;
    if (p)
        run_say(run, "%s, %s, %d rank%s, batch %lld (%lld rows a rank), %lld micro-batch%s, %.1f M parameters", run->name,
                run_flags_text(&run->flags, "dtype"), p->ranks, p->ranks == 1 ? "" : "s", (long long)p->batch,
                (long long)p->batch / par_batch_parts(p->strategy, p->ranks), (long long)p->accumulate, p->accumulate == 1 ? "" : "es", 1e-6 * (double)p->params);
    run_say(run, "%-12s %10s %10s %10s %10s %10s %10s %10s%s", "strategy", "MiB a rank", "parameters", "gradients", "moments", "step",
            "MB inside", "MB across", *t->machine.name ? "    ms/step    exposed     items/s" : "");
    for (int i = 0; i < t->count; i++) say_row(t, &t->rows[i]);
    if (run->described) {
        run_plan_assumptions(run, text, sizeof text);
        run_say(run, "for %s", text);
    }
    if (!*t->machine.name) return;
    run_say(run, "on %s (%s), %d rank%s a host, %.1f GiB a rank", t->machine.name, t->machine.source, t->machine.host_ranks,
            t->machine.host_ranks == 1 ? "" : "s", (double)t->machine.memory_bytes / (1 << 30));
    run_estimate_assumptions(&t->machine, text, sizeof text);
    run_say(run, "assumes: %s", text);
}

static void print_table(const table *t)
{
    td_json_writer w = td_json_begin(t->run->td);
    td_json_open_object(&w, NULL);
    td_json_put_string(&w, "model", t->run->name);
    td_json_put_string(&w, "command", "plan");
    td_json_put_integer(&w, "world", t->run->ranks);
    td_json_put_string(&w, "machine", *t->machine.name ? t->machine.name : NULL);
    td_json_put_string(&w, "fastest", t->fastest ? t->fastest->strategy : NULL);
    td_json_open_array(&w, "strategies");
    for (int i = 0; i < t->count; i++) {
        const row *r = &t->rows[i];
        td_json_open_object(&w, NULL);
        if (!*r->error) run_plan_put(t->run, &t->machine, &r->planned, &w);
        if (*r->error) td_json_put_string(&w, "strategy", r->strategy);
        if (*r->error) td_json_put_string(&w, "error", r->error);
        td_json_close_object(&w);
    }
    td_json_close_array(&w);
    td_json_close_object(&w);
    run_print_object(t->run, &w);
    td_json_end(&w);
}

void run_plan_table(run_loop *run, const run_model *model, int argc, char **argv)
{
    if (run_failed(run)) return;
    table *t = calloc(1, sizeof *t);
    if (!t) {
        td_fail(run->td, TD_ERROR_MEMORY, "out of memory for the table of strategies");
        return;
    }
    *t = (table){ .run = run, .model = model, .argc = argc, .argv = argv };
    if (run_machine_of(run, &t->machine) && add_rows(t)) {
        plan_rows(t);
        if (!t->nearest) td_fail(run->td, TD_ERROR_USAGE, "%s: %s", t->rows[0].strategy, t->rows[0].error);
        else if (run_flags_on(&run->flags, "json")) print_table(t);
        else say_table(t);
        if (*t->machine.name) tell_that_none_fits(t);
    }
    free(t);
}
