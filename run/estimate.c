/* The time a plan would take on a machine: see machine.h for what is assumed. */
#include <string.h>

#include "run/machine.h"

static double larger(double a, double b) { return a > b ? a : b; }
static double smaller(double a, double b) { return a < b ? a : b; }

/* Sums of 16-bit floats that are no product are taken in f32. */
static double compute_s(const td_machine *m, const td_profile_task *task)
{
    double peak = m->flops[task->dtype];
    bool product = !strcmp(task->kind, "matmul") || !strcmp(task->kind, "attention");
    bool narrow = task->dtype == TD_BF16 || task->dtype == TD_F16;
    if (peak <= 0 || (narrow && !product)) peak = m->flops[TD_F32] > 0 ? m->flops[TD_F32] : m->flops[TD_F64];
    return peak > 0 ? (double)task->flops / peak : 0;
}

static double memory_s(const td_machine *m, const td_profile_task *task) { return m->bytes > 0 ? (double)task->bytes / m->bytes : 0; }

double run_floor_s(const td_machine *m, const td_profile_task *task) { return larger(compute_s(m, task), memory_s(m, task)); }

void run_spread(const run_machine *m, const par_call *call, int *on_host, int *hosts)
{
    int n = m->host_ranks / call->stride;
    *on_host = n < 1 ? 1 : n > call->ranks ? call->ranks : n;
    *hosts = (call->ranks + *on_host - 1) / *on_host;
}

double run_collective_s(const run_machine *m, const par_call *call)
{
    int on_host, hosts, rounds = call->kind == PAR_REDUCES ? 2 : 1;
    if (call->ranks == 1) return 0;
    run_spread(m, call, &on_host, &hosts);
    double inside = rounds * (call->ranks - hosts), across = rounds * (hosts - 1);
    double rate = m->inside.bytes_per_s, out = m->across.bytes_per_s * on_host;
    if (on_host == 1 || (hosts > 1 && out < rate)) rate = out;
    return m->collective_s + inside * m->inside.latency_s + across * m->across.latency_s + (double)call->task.sent / rate;
}

static double call_s(const run_machine *m, const par_call *call)
{
    const td_profile_task *task = &call->task;
    if (task->on_host) return m->call_s + (double)task->bytes / m->host_bytes_per_s;
    double part = m->attention > 0 && !strcmp(task->kind, "attention") ? m->attention : m->efficiency;
    double compute = compute_s(&m->peak, task) / part, memory = memory_s(&m->peak, task) / (m->traffic > 0 ? m->traffic : 1);
    return m->call_s + larger(compute, memory) + m->unhidden * smaller(compute, memory);
}

static double copy_s(const run_machine *m, const par_call *call) { return m->host.latency_s + (double)call->task.copied / m->host.bytes_per_s; }

static double seconds_of(const run_machine *m, const par_call *call)
{
    if (call->kind == PAR_COMPUTES) return call_s(m, call);
    return call->kind == PAR_COPIES ? copy_s(m, call) : run_collective_s(m, call);
}

/* What a call's time adds to; one aside computes. */
static double *sum_of(run_estimate *e, const par_call *call)
{
    if (call->queue == TD_QUEUE_COMPUTE || call->queue == TD_QUEUE_ASIDE) return &e->compute_s;
    return call->queue == TD_QUEUE_HOST ? &e->host_s : call->kind == PAR_COPIES ? &e->copy_s : &e->comm_s;
}

/* Of all queues but the one aside, whose calls are computation beside computation. */
static double last_end(const double free[TD_QUEUES])
{
    double end = 0;
    for (int q = 0; q < TD_QUEUES; q++)
        if (q != TD_QUEUE_ASIDE) end = larger(end, free[q]);
    return end;
}

/* `ended` is room for the end of each call. */
static run_estimate step_of(const run_machine *m, const par_call *calls, int64_t count, double *ended)
{
    run_estimate e = { 0 };
    double free[TD_QUEUES] = { 0 }, aside_s = 0; /* when each queue is */
    for (int64_t i = 0; i < count; i++) {
        const par_call *call = &calls[i];
        double *queue = &free[m->overlaps ? call->queue : TD_QUEUE_COMPUTE], s = seconds_of(m, call);
        for (int q = 0; q < TD_QUEUES; q++)
            if (call->waits[q] >= 0) *queue = larger(*queue, ended[call->waits[q]]);
        ended[i] = *queue += s;
        e.step_s = larger(e.step_s, ended[i]);
        *(call->queue == TD_QUEUE_ASIDE && m->overlaps ? &aside_s : sum_of(&e, call)) += s;
    }
    e.exposed_s = last_end(free) - e.compute_s;
    return e;
}

bool run_estimate_add(td_context *td, const run_machine *m, const par_call *calls, int64_t count, int64_t times, run_estimate *to)
{
    size_t bytes = (size_t)count * sizeof(double) + 1;
    double *ended = td_alloc(td, bytes, "host"), n = (double)times;
    if (!ended) return false;
    run_estimate e = step_of(m, calls, count, ended);
    to->step_s += n * e.step_s;
    to->compute_s += n * e.compute_s;
    to->comm_s += n * e.comm_s;
    to->copy_s += n * e.copy_s;
    to->host_s += n * e.host_s;
    to->exposed_s += n * e.exposed_s;
    td_free(td, ended, bytes, "host");
    return true;
}

void run_estimate_assumptions(const run_machine *m, char *to, size_t room)
{
    char attention[40] = "", both[80] = "";
    if (m->attention > 0) snprintf(attention, sizeof attention, ", attention's %.0f %%", 100 * m->attention);
    if (m->unhidden > 0) snprintf(both, sizeof both, " + %.0f %% of the smaller", 100 * m->unhidden);
    snprintf(to, room, "each call takes %.3g us + the larger of FLOPs / (%.0f %% of peak%s) and bytes / (%.0f %% of bandwidth)%s; collectives are "
             "rings over the slowest link crossed, %s; what the host computes takes its memory's bandwidth, and data cost nothing",
             1e6 * m->call_s, 100 * m->efficiency, attention, m->traffic > 0 ? 100 * m->traffic : 100, both,
             m->overlaps ? "beside computation, as are copies to the host, from it, and what is computed there" : "in turn with computation");
}
