/* plan: what an update costs one rank, without running it. */
#include <math.h>
#include <string.h>

#include "run/plan.h"

/* ---- Planning an update */

static bool add_step(run_loop *run, const run_machine *m, int64_t times, run_planned *to)
{
    td_report r = td_last_report(run->td);
    td_planned_memory memory;
    int64_t count;
    par_call *calls = par_calls(run->td, &count);
    if (!calls || !td_planned_memory_of(run->td, &memory)) return false;
    if (r.step_bytes > to->report.step_bytes) {
        to->memory = memory;
        to->largest_count = td_planned_largest(run->td, to->largest, RUN_LARGEST, &to->peak);
        to->report.step_bytes = r.step_bytes;
        to->report.live_bytes = r.live_bytes;
    }
    to->memory.parameters = memory.parameters, to->memory.moments = memory.moments; /* of state there is what the last step left */
    to->memory.buffers = memory.buffers, to->memory.accumulators = memory.accumulators;
    to->memory.host = to->report.host_bytes = r.host_bytes;
    to->report.state_bytes = r.state_bytes;
    to->report.peak_bytes = r.state_bytes + to->report.step_bytes;
    to->report.flops += times * r.flops;
    to->report.bytes_moved += times * r.bytes_moved;
    to->report.comm_bytes += times * r.comm_bytes;
    to->report.comm_calls += times * r.comm_calls;
    to->report.copied_bytes += times * r.copied_bytes;
    to->report.nodes += times * r.nodes;
    to->report.calls += times * r.calls;
    to->report.plan_ms += r.plan_ms;
    for (int64_t i = 0; i < count; i++) {
        int on_host, hosts;
        run_spread(m, &calls[i], &on_host, &hosts);
        to->calls[calls[i].kind] += times;
        to->sent[calls[i].kind] += times * calls[i].task.sent;
        if (hosts > 1) to->across += times * (int64_t)((double)calls[i].task.sent * hosts / calls[i].ranks);
    }
    if (*m->name && r.copied_bytes && m->host.bytes_per_s <= 0)
        run_fail_usage(run, "--machine %.200s says nothing of a host, and --offload needs one: \"host\": { \"bytes_per_s\": ..., "
                       "\"memory_bytes_per_s\": ... }", m->name);
    bool added = !run_failed(run) && (!*m->name || run_estimate_add(run->td, m, calls, count, times, &to->estimate));
    td_disown(run->td, calls);
    return added;
}

static bool plan_micro(run_loop *run, const run_model *model, void *object, const data_batch *b, bool last)
{
    run_part part = run_backward(run, model->loss(object, b));
    if (last) run_update(run, run->opt, part, run_rate(run, 0));
    return td_plan_step(run->td);
}

bool run_plan_update(run_loop *run, const run_model *model, void *object, const run_machine *m, run_planned *to)
{
    data_batch b;
    *to = (run_planned){ .ranks = run->ranks, .batch = run->batch, .accumulate = run->accumulate };
    snprintf(to->strategy, sizeof to->strategy, "%s", run->strategy);
    if (!run_average(run) || !run->loader || !data_next(run->loader, &b)) return false;
    const int64_t times[] = { run->accumulate > 1, run->accumulate > 2 ? run->accumulate - 2 : 0, 1 };
    for (int i = 0; i < 2 * 3; i++) { /* the first update leaves what later ones find: copies that are kept */
        if (!times[i % 3]) continue;
        if (!plan_micro(run, model, object, &b, i % 3 == 2) || (i >= 3 && !add_step(run, m, times[i % 3], to))) return false;
    }
    to->params = td_parameter_elements(run->td);
    to->checkpoint_bytes = run_checkpoint_bytes(run);
    to->fits = !m->memory_bytes || to->report.peak_bytes <= m->memory_bytes;
    return true;
}

/* ---- Text */

void run_plan_assumptions(const run_loop *run, char *to, size_t room)
{
    const td_gpu *gpu = td_gpu_of(run->td);
    snprintf(to, room, "%s, described and not asked: each matrix product has as much workspace as cuBLASLt is ever given, attention what "
             "cuDNN's graphs take; a GPU may take less%s", gpu ? gpu->name : "no GPU",
             run->ranks > 1 ? "; collectives have no memory beside their operands" : "");
}

static void say_memory(run_loop *run, const run_planned *p)
{
    const td_planned_memory *m = &p->memory;
    const td_report *r = &p->report;
    const struct { const char *name; int64_t bytes; } kinds[] = {
        { "parameters", m->parameters }, { "moments", m->moments }, { "buffers", m->buffers }, { "accumulators", m->accumulators },
        { "gradients", m->gradients }, { "activations", m->activations }, { "transients", m->transients },
        { "communication", m->communication }, { "workspace", m->workspace }, { "unused", m->unused },
    };
    double mib = 1.0 / (1 << 20);
    char text[512];
    size_t at = 0;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i].bytes)
            at += (size_t)snprintf(text + at, sizeof text - at, "%s%s %.1f", at ? ", " : "", kinds[i].name, mib * (double)kinds[i].bytes);
    run_say(run, "  holds     %.1f MiB: %.1f state, %.1f of a step (%.1f live at once)", mib * (double)r->peak_bytes,
            mib * (double)r->state_bytes, mib * (double)r->step_bytes, mib * (double)r->live_bytes);
    run_say(run, "            %s", text);
    if (r->host_bytes) run_say(run, "            and on the host %.1f", mib * (double)r->host_bytes);
    run_say(run, "            and %.1f of the host while a checkpoint is written", mib * (double)p->checkpoint_bytes);
}

static void say_largest(run_loop *run, const run_planned *p)
{
    if (!p->largest_count) return;
    run_say(run, "  peak      at call %lld, %s%s%s; the largest of what is alive then:", (long long)p->peak.call, p->peak.op,
            *p->peak.module ? " in " : "", p->peak.module);
    for (int64_t i = 0; i < p->largest_count; i++) {
        const td_planned_value *v = &p->largest[i];
        char shape[200] = "";
        size_t at = 0;
        for (int d = 0; d < v->shape.rank; d++)
            at += (size_t)snprintf(shape + at, sizeof shape - at, "%s%lld", d ? ", " : "", (long long)v->shape.dim[d]);
        run_say(run, "  %12.1f MiB  %lld x %s (%s) of %s%s%s: %s", (double)v->bytes / (1 << 20), (long long)v->count, td_dtype_name(v->dtype),
                shape, v->op, *v->module ? " in " : "", v->module, v->kind);
    }
}

static void say_sent(run_loop *run, const run_planned *p)
{
    const td_report *r = &p->report;
    run_say(run, "  sends     %lld bytes in %lld collectives", (long long)r->comm_bytes, (long long)r->comm_calls);
    for (int k = PAR_COMPUTES + 1; k < PAR_COPIES; k++)
        if (p->calls[k])
            run_say(run, "            %s: %lld bytes in %lld", par_kind_name((par_kind)k), (long long)p->sent[k], (long long)p->calls[k]);
    if (p->across)
        run_say(run, "            inside a host %lld, to other hosts %lld", (long long)(r->comm_bytes - p->across), (long long)p->across);
    if (r->copied_bytes)
        run_say(run, "  copies    %lld bytes between device and host in %lld", (long long)r->copied_bytes, (long long)p->calls[PAR_COPIES]);
}

static void say_estimate(run_loop *run, const run_machine *m, const run_planned *p)
{
    char text[400];
    const run_estimate *e = &p->estimate;
    if (!*m->name) return;
    char copies[112] = "";
    if (e->copy_s > 0)
        snprintf(copies, sizeof copies, ", %.3f in copies to and from the host, %.3f computing there", 1e3 * e->copy_s, 1e3 * e->host_s);
    run_say(run, "  takes     about %.3f ms a step, %.0f items/s: %.3f computing, %.3f in collectives%s, of which %.3f exposed",
            1e3 * e->step_s, (double)p->batch / e->step_s, 1e3 * e->compute_s, 1e3 * e->comm_s, copies, 1e3 * e->exposed_s);
    run_say(run, "  on        %s (%s), %d rank%s a host; %.1f GiB a rank: %s", m->name, m->source, m->host_ranks,
            m->host_ranks == 1 ? "" : "s", (double)m->memory_bytes / (1 << 30), p->fits ? "it fits" : "it does not fit");
    run_estimate_assumptions(m, text, sizeof text);
    run_say(run, "  assumes   %s", text);
}

static void say_gpu(run_loop *run)
{
    char text[400];
    if (!run->described) return;
    run_plan_assumptions(run, text, sizeof text);
    run_say(run, "  for       %s", text);
}

static void say_plan(run_loop *run, const run_machine *m, const run_planned *p)
{
    run_say(run, "%s, %s, %s on %d rank%s, batch %lld (%lld rows a rank): one rank", run->name,
            run_flags_text(&run->flags, "dtype"), p->strategy, p->ranks, p->ranks == 1 ? "" : "s", (long long)p->batch,
            (long long)p->batch / par_batch_parts(p->strategy, p->ranks));
    say_gpu(run);
    say_memory(run, p);
    say_largest(run, p);
    run_say(run, "  computes  %.3f GFLOP, moves %.1f MiB, in %lld calls of %lld recorded operations", 1e-9 * (double)p->report.flops,
            (double)p->report.bytes_moved / (1 << 20), (long long)p->report.calls, (long long)p->report.nodes);
    say_sent(run, p);
    say_estimate(run, m, p);
}

/* ---- JSON */

static void put_memory(const td_planned_memory *m, td_json_writer *w)
{
    td_json_open_object(w, "memory");
    td_json_put_integer(w, "parameters", m->parameters);
    td_json_put_integer(w, "moments", m->moments);
    td_json_put_integer(w, "buffers", m->buffers);
    td_json_put_integer(w, "accumulators", m->accumulators);
    td_json_put_integer(w, "gradients", m->gradients);
    td_json_put_integer(w, "activations", m->activations);
    td_json_put_integer(w, "transients", m->transients);
    td_json_put_integer(w, "communication", m->communication);
    td_json_put_integer(w, "workspace", m->workspace);
    td_json_put_integer(w, "unused", m->unused);
    td_json_put_integer(w, "host", m->host);
    td_json_close_object(w);
}

static void put_largest(const run_planned *p, td_json_writer *w)
{
    td_json_open_object(w, "peak");
    td_json_put_integer(w, "call", p->peak.call);
    td_json_put_string(w, "op", p->peak.op);
    td_json_put_string(w, "module", p->peak.module);
    td_json_open_array(w, "largest");
    for (int64_t i = 0; i < p->largest_count; i++) {
        const td_planned_value *v = &p->largest[i];
        td_json_open_object(w, NULL);
        td_json_put_string(w, "op", v->op);
        td_json_put_string(w, "module", v->module);
        td_json_put_string(w, "kind", v->kind);
        td_json_put_string(w, "dtype", td_dtype_name(v->dtype));
        td_json_open_array(w, "shape");
        for (int d = 0; d < v->shape.rank; d++) td_json_put_integer(w, NULL, v->shape.dim[d]);
        td_json_close_array(w);
        td_json_put_integer(w, "count", v->count);
        td_json_put_integer(w, "bytes", v->bytes);
        td_json_close_object(w);
    }
    td_json_close_array(w);
    td_json_close_object(w);
}

static void put_gpu(const run_loop *run, td_json_writer *w)
{
    char text[400];
    const td_gpu *gpu = td_gpu_of(run->td);
    if (!gpu) return;
    run_plan_assumptions(run, text, sizeof text);
    td_json_open_object(w, "gpu");
    td_json_put_string(w, "name", gpu->name);
    td_json_put_boolean(w, "described", run->described);
    td_json_put_string(w, "assumes", run->described ? text : NULL);
    td_json_close_object(w);
}

static void put_sent(const run_planned *p, td_json_writer *w)
{
    td_json_open_object(w, "collectives");
    for (int k = PAR_COMPUTES + 1; k < PAR_COPIES; k++) {
        td_json_open_object(w, par_kind_name((par_kind)k));
        td_json_put_integer(w, "calls", p->calls[k]);
        td_json_put_integer(w, "bytes", p->sent[k]);
        td_json_close_object(w);
    }
    td_json_close_object(w);
    td_json_put_integer(w, "inside_host_bytes", p->report.comm_bytes - p->across);
    td_json_put_integer(w, "across_hosts_bytes", p->across);
    td_json_put_integer(w, "host_link_bytes", p->report.copied_bytes);
    td_json_put_integer(w, "host_link_copies", p->calls[PAR_COPIES]);
}

static void put_estimate(const run_machine *m, const run_planned *p, td_json_writer *w)
{
    const run_estimate *e = &p->estimate;
    char text[400];
    if (!*m->name) {
        td_json_put_null(w, "estimate");
        return;
    }
    run_estimate_assumptions(m, text, sizeof text);
    td_json_open_object(w, "estimate");
    td_json_put_string(w, "machine", m->name);
    td_json_put_string(w, "source", m->source);
    td_json_put_integer(w, "host_ranks", m->host_ranks);
    td_json_put_integer(w, "memory_bytes", m->memory_bytes);
    td_json_put_boolean(w, "fits", p->fits);
    td_json_put_number(w, "step_ms", 1e3 * e->step_s);
    td_json_put_number(w, "items_per_s", e->step_s > 0 ? (double)p->batch / e->step_s : (double)NAN);
    td_json_put_number(w, "compute_ms", 1e3 * e->compute_s);
    td_json_put_number(w, "comm_ms", 1e3 * e->comm_s);
    td_json_put_number(w, "host_copy_ms", 1e3 * e->copy_s);
    td_json_put_number(w, "host_compute_ms", 1e3 * e->host_s);
    td_json_put_number(w, "exposed_comm_ms", 1e3 * e->exposed_s);
    td_json_put_string(w, "assumes", text);
    td_json_close_object(w);
}

void run_plan_put(const run_loop *run, const run_machine *m, const run_planned *p, td_json_writer *w)
{
    const td_report *r = &p->report;
    td_json_put_string(w, "model", run->name);
    td_json_put_string(w, "command", "plan");
    td_json_put_string(w, "strategy", p->strategy);
    td_json_put_integer(w, "world", p->ranks);
    td_json_put_string(w, "device", run_flags_text(&run->flags, "device"));
    put_gpu(run, w);
    td_json_put_string(w, "dtype", run_flags_text(&run->flags, "dtype"));
    td_json_put_integer(w, "batch", p->batch);
    td_json_put_integer(w, "accumulate", p->accumulate);
    td_json_put_integer(w, "params", p->params);
    td_json_put_integer(w, "planned_peak_bytes", r->peak_bytes);
    td_json_put_integer(w, "state_bytes", r->state_bytes);
    td_json_put_integer(w, "step_bytes", r->step_bytes);
    td_json_put_integer(w, "live_bytes", r->live_bytes);
    td_json_put_integer(w, "host_bytes", r->host_bytes);
    put_memory(&p->memory, w);
    put_largest(p, w);
    td_json_put_integer(w, "checkpoint_bytes", p->checkpoint_bytes);
    td_json_put_integer(w, "flops", r->flops);
    td_json_put_integer(w, "bytes_moved", r->bytes_moved);
    td_json_put_integer(w, "comm_bytes_per_step", r->comm_bytes);
    td_json_put_integer(w, "comm_calls", r->comm_calls);
    put_sent(p, w);
    td_json_put_integer(w, "operations", r->nodes);
    td_json_put_integer(w, "calls", r->calls);
    td_json_put_number(w, "plan_ms", r->plan_ms);
    put_estimate(m, p, w);
}

void run_plan(run_loop *run, const run_model *model, void *object)
{
    run_machine machine;
    run_planned planned;
    if (!run_machine_of(run, &machine) || !run_plan_update(run, model, object, &machine, &planned)) return;
    if (!run_flags_on(&run->flags, "json")) {
        say_plan(run, &machine, &planned);
        return;
    }
    td_json_writer w = td_json_begin(run->td);
    td_json_open_object(&w, NULL);
    run_plan_put(run, &machine, &planned, &w);
    td_json_close_object(&w);
    run_print_object(run, &w);
    td_json_end(&w);
}
