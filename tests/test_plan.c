/* plan: what an update costs one rank, against the formulas of communication and memory, for worlds of 2, 8 and 1024 ranks; the time
 * it would take, against machines small enough to be reckoned by hand; the command, its machines and what it refuses.
 *
 * Timeout: 300 s
 */
#include <sys/stat.h>
#include <sys/wait.h>

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

#include "run/machine.h"
#define SHELL_FOLDER "test_plan_files"
#include "tests/printed.h"

/* ---- Time, by hand ---------------------------------------------------------------------------------------- */

/* 1 GFLOP/s of which half is reached, 1 GB/s of memory, 2 ranks a host, 1 MB/s and 10 us a hop inside, 100 KB/s a rank and 1 ms outside. */
static run_machine small_machine(void)
{
    return (run_machine){ .name = "small", .peak = { .flops = { [TD_F32] = 1e9 }, .bytes = 1e9 }, .efficiency = 0.5, .collective_s = 1e-4,
                          .host_ranks = 2, .inside = { 1e6, 1e-5 }, .across = { 1e5, 1e-3 }, .overlaps = true };
}

/* The calls that a call waits for: none. */
#define NONE { -1, -1, -1, -1, -1, -1 }
_Static_assert(TD_QUEUES == 6, "NONE has one for each queue");

static par_call collective(par_kind kind, int ranks, int stride, int64_t sent)
{
    return (par_call){ .kind = kind, .ranks = ranks, .stride = stride, .queue = TD_QUEUE_COLLECTIVES, .waits = NONE,
                       .task = { .kind = "collective", .sent = sent } };
}

/* That takes so many ms on the small machine. */
static par_call computation(int64_t ms)
{
    return (par_call){ .kind = PAR_COMPUTES, .ranks = 1, .stride = 1, .waits = NONE,
                       .task = { .kind = "matmul", .dtype = TD_F32, .flops = 500000 * ms } };
}

/* 5 ms of bytes. */
static par_call copying(td_queue_kind queue)
{
    return (par_call){ .kind = PAR_COPIES, .ranks = 1, .stride = 1, .queue = queue, .waits = NONE,
                       .task = { .kind = "copy", .copied = 5000 } };
}

static par_call after(par_call call, td_queue_kind queue, int64_t other)
{
    call.waits[queue] = other;
    return call;
}

static double seconds_of(const run_machine *m, par_call call) { return run_collective_s(m, &call); }

START_TEST(test_a_ring_inside_a_host_takes_its_hops_and_its_bytes)
{
    run_machine m = small_machine();
    m.host_ranks = 4;
    ck_assert_double_eq_tol(seconds_of(&m, collective(PAR_GATHERS, 4, 1, 3000)), 1e-4 + 3 * 1e-5 + 3000 / 1e6, 1e-15);
    ck_assert_double_eq_tol(seconds_of(&m, collective(PAR_SCATTERS, 2, 1, 3000)), 1e-4 + 1 * 1e-5 + 3000 / 1e6, 1e-15);
    ck_assert_double_eq_tol(seconds_of(&m, collective(PAR_REDUCES, 4, 1, 3000)), 1e-4 + 6 * 1e-5 + 3000 / 1e6, 1e-15);
    ck_assert_double_eq(seconds_of(&m, collective(PAR_REDUCES, 1, 1, 0)), 0);
}
END_TEST

START_TEST(test_a_ring_across_hosts_takes_the_slowest_link)
{
    run_machine m = small_machine();
    int on_host, hosts;
    par_call four = collective(PAR_REDUCES, 4, 1, 3000), strided = collective(PAR_REDUCES, 4, 2, 3000);
    run_spread(&m, &four, &on_host, &hosts);
    ck_assert_int_eq(on_host, 2);
    ck_assert_int_eq(hosts, 2);
    ck_assert_double_eq_tol(seconds_of(&m, four), 1e-4 + 4 * 1e-5 + 2 * 1e-3 + 3000 / 2e5, 1e-15); /* two ranks share their links */
    run_spread(&m, &strided, &on_host, &hosts);
    ck_assert_int_eq(on_host, 1);
    ck_assert_int_eq(hosts, 4);
    ck_assert_double_eq_tol(seconds_of(&m, strided), 1e-4 + 6 * 1e-3 + 3000 / 1e5, 1e-15);
    m.across.bytes_per_s = 9e6;
    ck_assert_double_eq_tol(seconds_of(&m, four), 1e-4 + 4 * 1e-5 + 2 * 1e-3 + 3000 / 1e6, 1e-15);    /* now the inner link is slowest */
    ck_assert_double_eq_tol(seconds_of(&m, strided), 1e-4 + 6 * 1e-3 + 3000 / 9e6, 1e-15);            /* which this ring never takes */
}
END_TEST

START_TEST(test_a_task_takes_the_larger_of_computing_and_moving)
{
    td_machine peak = { .flops = { [TD_F32] = 1e9, [TD_BF16] = 4e9 }, .bytes = 1e9 };
    td_profile_task product = { .kind = "matmul", .dtype = TD_BF16, .flops = 4000, .bytes = 10 };
    ck_assert_double_eq_tol(run_floor_s(&peak, &product), 1e-6, 1e-18);
    product.bytes = 3000;
    ck_assert_double_eq_tol(run_floor_s(&peak, &product), 3e-6, 1e-18);
    td_profile_task sum = { .kind = "reduction", .dtype = TD_BF16, .flops = 4000 };
    ck_assert_double_eq_tol(run_floor_s(&peak, &sum), 4e-6, 1e-18); /* in f32 */
}
END_TEST

static run_estimate estimate(const run_machine *m, const par_call *calls, int64_t count, int64_t times)
{
    td_context *td = open_cpu(TD_F32);
    run_estimate e = { 0 };
    ck_assert(run_estimate_add(td, m, calls, count, times, &e));
    td_close(td);
    return e;
}

START_TEST(test_a_collective_hides_behind_what_does_not_wait_for_it)
{
    run_machine m = small_machine();
    m.collective_s = 0, m.inside.latency_s = 0;
    const par_call calls[] = { computation(2), after(collective(PAR_GATHERS, 2, 1, 10000), TD_QUEUE_COMPUTE, 0), computation(3),
                               after(computation(4), TD_QUEUE_COLLECTIVES, 1) };
    run_estimate e = estimate(&m, calls, 4, 1);
    ck_assert_double_eq_tol(e.step_s, 0.016, 1e-12); /* 0-2, gather 2-12, 2-5, 12-16 */
    ck_assert_double_eq_tol(e.compute_s, 0.009, 1e-12);
    ck_assert_double_eq_tol(e.comm_s, 0.010, 1e-12);
    ck_assert_double_eq_tol(e.exposed_s, 0.007, 1e-12);
    m.overlaps = false;
    e = estimate(&m, calls, 4, 3);
    ck_assert_double_eq_tol(e.step_s, 3 * 0.019, 1e-12);
    ck_assert_double_eq_tol(e.exposed_s, 3 * 0.010, 1e-12);
}
END_TEST

START_TEST(test_what_is_aside_is_computed_beside_and_exposes_nothing)
{
    run_machine m = small_machine();
    par_call aside = after(computation(9), TD_QUEUE_COMPUTE, 0);
    aside.queue = TD_QUEUE_ASIDE;
    const par_call calls[] = { computation(2), aside, computation(3) };
    run_estimate e = estimate(&m, calls, 3, 1);
    ck_assert_double_eq_tol(e.step_s, 0.011, 1e-12);
    ck_assert_double_eq_tol(e.compute_s, 0.005, 1e-12);
    ck_assert_double_eq_tol(e.exposed_s, 0, 1e-12);
    m.overlaps = false; /* in turn */
    e = estimate(&m, calls, 3, 1);
    ck_assert_double_eq_tol(e.step_s, 0.014, 1e-12);
    ck_assert_double_eq_tol(e.compute_s, 0.014, 1e-12);
    ck_assert_double_eq_tol(e.exposed_s, 0, 1e-12);
}
END_TEST

START_TEST(test_collectives_follow_one_another_and_may_end_last)
{
    run_machine m = small_machine();
    m.collective_s = 0, m.inside.latency_s = 0;
    const par_call calls[] = { collective(PAR_GATHERS, 2, 1, 10000), collective(PAR_GATHERS, 2, 1, 5000),
                               after(computation(1), TD_QUEUE_COLLECTIVES, 0), after(collective(PAR_REDUCES, 2, 1, 2000), TD_QUEUE_COMPUTE, 2) };
    run_estimate e = estimate(&m, calls, 4, 1);
    ck_assert_double_eq_tol(e.step_s, 0.017, 1e-12); /* gathers 0-10 and 10-15, computing 10-11, the reduction 15-17 */
    ck_assert_double_eq_tol(e.exposed_s, 0.016, 1e-12);
    m.call_s = 0.003; /* that each computation takes besides */
    ck_assert_double_eq_tol(estimate(&m, calls, 4, 1).compute_s, 0.004, 1e-12);
}
END_TEST

START_TEST(test_what_computing_and_moving_do_not_hide_of_one_another_comes_on_top)
{
    run_machine m = small_machine();
    par_call product = computation(8), sum = product;
    product.task.bytes = 2000000; /* 2 ms */
    sum.task.bytes = 20000000;
    ck_assert_double_eq_tol(estimate(&m, &product, 1, 1).step_s, 0.008, 1e-12);
    m.unhidden = 0.25;
    ck_assert_double_eq_tol(estimate(&m, &product, 1, 1).step_s, 0.0085, 1e-12);
    ck_assert_double_eq_tol(estimate(&m, &sum, 1, 1).step_s, 0.022, 1e-12);
    m.traffic = 0.5; /* of bandwidth */
    ck_assert_double_eq_tol(estimate(&m, &product, 1, 1).step_s, 0.009, 1e-12);
}
END_TEST

/* 1 MB/s to the host and 1 ms before; 2 MB/s of its memory. */
START_TEST(test_copies_have_queues_and_the_host_computes_at_its_own_rate)
{
    run_machine m = small_machine();
    m.collective_s = 0, m.inside.latency_s = 0;
    m.host = (run_link){ 1e6, 1e-3 }, m.host_bytes_per_s = 2e6;
    par_call fetch = after(copying(TD_QUEUE_TO_DEVICE), TD_QUEUE_COMPUTE, 0), gather = collective(PAR_GATHERS, 2, 1, 10000);
    par_call update = after(computation(2), TD_QUEUE_COMPUTE, 3), back = after(copying(TD_QUEUE_TO_HOST), TD_QUEUE_COMPUTE, 5);
    update.queue = TD_QUEUE_HOST, update.task.on_host = true, update.task.bytes = 8000;
    const par_call calls[] = { computation(2), fetch, after(gather, TD_QUEUE_TO_DEVICE, 1), computation(1), after(update, TD_QUEUE_TO_DEVICE, 1),
                               after(computation(1), TD_QUEUE_COLLECTIVES, 2), back, copying(TD_QUEUE_TO_DEVICE) };
    run_estimate e = estimate(&m, calls, 8, 1);
    /* 0-2, copy 2-8, gather 8-18, 2-3, update 8-12, 18-19, copy back 19-25, and beside it all the other way 8-14 */
    ck_assert_double_eq_tol(e.step_s, 0.025, 1e-12);
    ck_assert_double_eq_tol(e.compute_s, 0.004, 1e-12);
    ck_assert_double_eq_tol(e.host_s, 0.004, 1e-12);
    ck_assert_double_eq_tol(e.comm_s, 0.010, 1e-12);
    ck_assert_double_eq_tol(e.copy_s, 0.018, 1e-12);
    ck_assert_double_eq_tol(e.exposed_s, 0.021, 1e-12);
}
END_TEST

/* ---- Bytes and memory, by formula ------------------------------------------------------------------------- */

enum { WIDTH = 64, CLASSES = 16, ROWS_A_RANK = 3 };

typedef struct planned {
    td_context *td;
    par_world *world;
    opt_optimizer *opt;
    td_report report;
    td_planned_memory memory;
    int64_t sent[PAR_KINDS], calls[PAR_KINDS];
    int ranks[PAR_KINDS], stride[PAR_KINDS];  /* of the last of a kind */
    int64_t waited;                           /* gathers that some call waits for */
    int64_t scalars;                          /* all-reduces of a few bytes: of the loss */
    int64_t elements, first, largest;         /* of units of parameters: all, that of the first layer, the largest */
} planned;

static float zeros[1024 * ROWS_A_RANK * WIDTH];
static int32_t labels[1024 * ROWS_A_RANK];

static void count_units(planned *p)
{
    for (uint32_t u = 0; u < td_unit_count(p->td); u++) {
        const td_unit *unit = td_unit_at(p->td, u);
        if (unit->kind != TD_PARAMETER || !unit->trains || unit->of != TD_NONE) continue;
        p->elements += unit->elements;
        if (unit->elements > p->largest) p->largest = unit->elements;
        if (!strcmp(td_state_name(td_state_at(p->td, unit->members[0].state)), "first.weight")) p->first = unit->elements;
    }
}

static void count_calls(planned *p)
{
    int64_t count;
    par_call *calls = par_calls(p->td, &count);
    bool *waited = calloc((size_t)p->report.calls, sizeof *waited);
    ck_assert(calls && waited);
    ck_assert_int_eq(count, p->report.calls);
    for (int64_t i = 0; i < count; i++) {
        bool scalar = calls[i].kind == PAR_REDUCES && calls[i].task.sent <= 8;
        if (scalar) p->scalars += calls[i].task.sent;
        else p->sent[calls[i].kind] += calls[i].task.sent;
        p->calls[calls[i].kind] += !scalar;
        if (!scalar) p->ranks[calls[i].kind] = calls[i].ranks, p->stride[calls[i].kind] = calls[i].stride;
        for (int q = 0; q < TD_QUEUES; q++) {
            if (calls[i].waits[q] < 0) continue;
            ck_assert_int_lt(calls[i].waits[q], i);
            ck_assert_int_eq(calls[calls[i].waits[q]].queue, q);
            waited[calls[i].waits[q]] = true;
        }
    }
    for (int64_t i = 0; i < count; i++) p->waited += waited[i] && calls[i].kind == PAR_GATHERS;
    free(waited);
}

/* A step of an MLP of three layers with AdamW on a world in which nothing runs. */
static planned plan_in(td_dtype dtype, int ranks, const char *strategy)
{
    planned p = { .td = open_cpu(dtype), .world = par_world_none(ranks, 0) };
    ck_assert(par_attach(p.td, p.world, 0, &(par_options){ .strategy = strategy }));
    td_module root = td_root(p.td);
    nn_linear first = nn_linear_make(root, "first", WIDTH, WIDTH), second = nn_linear_make(root, "second", WIDTH, WIDTH),
              out = nn_linear_make(root, "out", WIDTH, CLASSES);
    p.opt = opt_adamw(root, NULL);
    td_tensor x = td_batch(p.td, "x", TD_F32, TD_SHAPE(ranks * ROWS_A_RANK, WIDTH), zeros);
    td_tensor y = td_batch(p.td, "y", TD_I32, TD_SHAPE(ranks * ROWS_A_RANK), labels);
    td_tensor h = td_relu(nn_linear_apply(&first, x));
    h = td_relu(nn_linear_apply(&second, h));
    td_backward(td_cross_entropy(nn_linear_apply(&out, h), y));
    opt_step(p.opt, 0.1);
    ck_assert_msg(td_plan(p.td), "%s: %s", strategy, td_error_text(p.td));
    p.report = td_last_report(p.td);
    ck_assert(td_planned_memory_of(p.td, &p.memory));
    count_units(&p);
    count_calls(&p);
    return p;
}

static planned plan_mlp(int ranks, const char *strategy) { return plan_in(TD_F32, ranks, strategy); }

static void close_planned(planned *p)
{
    opt_close(p->opt);
    td_close(p->td);
    par_world_close(p->world);
}

static const int worlds[] = { 2, 8, 1024 };

START_TEST(test_ddp_sends_twice_its_parameters_and_holds_all_state)
{
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        int64_t n = worlds[i];
        planned p = plan_mlp((int)n, "ddp");
        ck_assert_int_eq(p.sent[PAR_REDUCES], 2 * 4 * p.elements / n * (n - 1)); /* 2 q P r */
        ck_assert_int_eq(p.sent[PAR_GATHERS] + p.sent[PAR_SCATTERS], 0);
        ck_assert_int_eq(p.memory.parameters, 4 * p.elements);
        ck_assert_int_eq(p.memory.moments, 8 * p.elements);
        ck_assert_int_eq(p.memory.gradients, 4 * p.elements); /* in the update all are there, and little else */
        close_planned(&p);
    }
}
END_TEST

START_TEST(test_fsdp_gathers_twice_scatters_once_and_holds_its_share)
{
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        int64_t n = worlds[i];
        planned p = plan_mlp((int)n, "fsdp");
        int64_t backward = p.elements - p.first; /* nothing before the first layer wants a gradient through its weight */
        ck_assert_int_gt(p.first, 0);
        ck_assert_int_eq(p.sent[PAR_GATHERS], 4 * (p.elements + backward) / n * (n - 1));
        ck_assert_int_eq(p.sent[PAR_SCATTERS], 4 * p.elements / n * (n - 1));
        ck_assert_int_eq(p.calls[PAR_GATHERS], 5);
        ck_assert_int_eq(p.waited, 5);
        ck_assert_int_eq(p.calls[PAR_SCATTERS], 3);
        ck_assert_int_eq(p.calls[PAR_REDUCES], 0);
        ck_assert_int_eq(p.memory.parameters, 4 * p.elements / n);
        ck_assert_int_eq(p.memory.moments, 8 * p.elements / n);
        ck_assert_int_le(p.memory.communication, 3 * 4 * p.largest); /* gathered units */
        close_planned(&p);
    }
}
END_TEST

/* An embedding and a head of 1000 x 16 with two blocks of 16 x 16 and 16 between them, in bf16. */
START_TEST(test_a_large_parameter_of_the_root_has_a_unit_of_its_own)
{
    enum { LARGE = 1000 * 16, BLOCK = 320, REST = 1024, N = 4 }; /* weight and bias; the rest: the head's bias; multiples of 16 N */
    for (int patterns = 0; patterns < 2; patterns++) {
        td_context *td = open_cpu(TD_BF16);
        par_world *world = par_world_none(N, 0);
        ck_assert(par_attach(td, world, 0, &(par_options){ .strategy = "fsdp", .units = patterns ? "h.*" : NULL }));
        td_module root = td_root(td);
        nn_embedding tokens = nn_embedding_make(root, "tokens", 1000, 16);
        nn_linear block[2] = { nn_linear_make(td_child(root, "h"), "0", 16, 16), nn_linear_make(td_child(root, "h"), "1", 16, 16) };
        nn_linear head = nn_linear_make(root, "head", 16, 1000);
        opt_optimizer *opt = opt_adamw(root, NULL);
        td_tensor h = nn_embedding_apply(&tokens, td_batch(td, "x", TD_I32, TD_SHAPE(8 * N), labels));
        for (int b = 0; b < 2; b++) h = td_relu(nn_linear_apply(&block[b], h));
        td_backward(td_cross_entropy(nn_linear_apply(&head, h), td_batch(td, "y", TD_I32, TD_SHAPE(8 * N), labels)));
        opt_step(opt, 0.1);
        ck_assert_msg(td_plan(td), "%s", td_error_text(td));
        int64_t units = 0, count, gathered = 0;
        for (uint32_t u = 0; u < td_unit_count(td); u++) units += td_unit_at(td, u)->kind == TD_PARAMETER;
        ck_assert_int_eq(units, patterns ? 3 : 5);
        par_call *calls = par_calls(td, &count);
        for (int64_t i = 0; i < count; i++) gathered += calls[i].kind == PAR_GATHERS ? calls[i].task.sent : 0;
        /* Blocks twice, in bf16. Apart, the embedding goes in f32, as a look-up reads it, the head in bf16; together all in f32. */
        int64_t blocks = 2 * 2 * 2 * BLOCK, apart = 4 * LARGE + 2 * (LARGE + REST), together = 4 * (2 * LARGE + REST);
        ck_assert_int_eq(gathered, (blocks + (patterns ? together : apart)) / N * (N - 1));
        opt_close(opt);
        td_close(td);
        par_world_close(world);
    }
}
END_TEST

START_TEST(test_zero_scatters_gradients_and_gathers_parameters)
{
    static const char *const names[] = { "zero1", "zero2" };
    for (size_t i = 0; i < 2 * sizeof worlds / sizeof *worlds; i++) {
        int64_t n = worlds[i / 2];
        planned p = plan_mlp((int)n, names[i % 2]);
        ck_assert_int_eq(p.sent[PAR_SCATTERS], 4 * p.elements / n * (n - 1)); /* q P (r + p) */
        ck_assert_int_eq(p.sent[PAR_GATHERS], 4 * p.elements / n * (n - 1));
        ck_assert_int_eq(p.sent[PAR_REDUCES], 0);
        ck_assert_int_eq(p.memory.parameters, 4 * p.elements);
        ck_assert_int_eq(p.memory.moments, 8 * p.elements / n);
        close_planned(&p);
    }
}
END_TEST

/* In bf16 a rank stores its part in f32, and a copy of all in bf16 takes half of what it took in f32, to send and to hold. */
START_TEST(test_zero_in_bf16_gathers_and_holds_half)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    for (size_t i = 0; i < 2 * sizeof worlds / sizeof *worlds; i++) {
        int64_t n = worlds[i / 2];
        planned p = plan_in(TD_BF16, (int)n, i % 2 ? "zero2" : "zero1");
        const td_planned_memory *m = &p.memory;
        ck_assert_int_eq(p.sent[PAR_SCATTERS], 4 * p.elements / n * (n - 1)); /* q P (r + p) */
        ck_assert_int_eq(p.sent[PAR_GATHERS], 2 * p.elements / n * (n - 1));
        ck_assert_int_eq(p.sent[PAR_REDUCES], 0);
        ck_assert_int_eq(m->parameters, 2 * p.elements + 4 * p.elements / n);
        ck_assert_int_eq(m->moments, 8 * p.elements / n);
        /* At most: gradients are scattered as they come. */
        ck_assert_int_le(m->parameters + m->moments + m->gradients, 6 * p.elements + 12 * p.elements / n);
        close_planned(&p);
    }
}
END_TEST

START_TEST(test_hsdp_is_fsdp_in_a_group_and_reduces_shards_across)
{
    static const struct { const char *name; int64_t shard, groups; } cases[] = { { "hsdp:4x2", 4, 2 }, { "hsdp:8x128", 8, 128 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t s = cases[i].shard, r = cases[i].groups;
        planned p = plan_mlp((int)(s * r), cases[i].name);
        ck_assert_int_eq(p.sent[PAR_GATHERS], 4 * (2 * p.elements - p.first) / s * (s - 1));
        ck_assert_int_eq(p.sent[PAR_SCATTERS], 4 * p.elements / s * (s - 1));
        ck_assert_int_eq(p.sent[PAR_REDUCES], 2 * 4 * p.elements / s / r * (r - 1)); /* 2 (R - 1) / R P / S r */
        ck_assert_int_eq(p.memory.parameters, 4 * p.elements / s);
        ck_assert_int_eq(p.memory.moments, 8 * p.elements / s);
        ck_assert_int_eq(p.ranks[PAR_GATHERS], s);
        ck_assert_int_eq(p.stride[PAR_GATHERS], 1); /* a group is consecutive ranks */
        ck_assert_int_eq(p.ranks[PAR_REDUCES], r);
        ck_assert_int_eq(p.stride[PAR_REDUCES], s);
        close_planned(&p);
    }
}
END_TEST

START_TEST(test_every_strategy_accounts_for_all_its_memory_and_bytes)
{
    char names[256], *rest;
    snprintf(names, sizeof names, "%s", par_strategy_names_for_ranks());
    int count = 0;
    for (char *name = strtok_r(names, ", ", &rest); name; name = strtok_r(NULL, ", ", &rest), count++) {
        char *sizes = strstr(name, ":SxR"), whole[64];
        if (sizes) *sizes = 0;
        snprintf(whole, sizeof whole, "%s%s", name, sizes ? ":4x2" : "");
        planned p = plan_mlp(8, whole);
        const td_planned_memory *m = &p.memory;
        ck_assert_int_eq(m->parameters + m->moments + m->buffers + m->accumulators, p.report.state_bytes);
        ck_assert_int_eq(m->gradients + m->activations + m->transients + m->communication + m->workspace + m->unused, p.report.step_bytes);
        ck_assert_int_eq(p.sent[PAR_REDUCES] + p.sent[PAR_SCATTERS] + p.sent[PAR_GATHERS] + p.scalars, p.report.comm_bytes);
        ck_assert_int_le(m->parameters + m->moments, 12 * p.elements);
        ck_assert_int_ge(m->activations, 4 * ROWS_A_RANK * WIDTH); /* a hidden layer at the least */
        ck_assert_int_le(p.report.comm_bytes, 3 * 4 * p.elements);
        close_planned(&p);
    }
    ck_assert_int_ge(count, 2);
}
END_TEST

START_TEST(test_an_accumulator_is_planned_as_if_the_step_before_had_run)
{
    td_context *td = open_cpu(TD_F32);
    td_state w = td_parameter(td_root(td), "w", TD_SHAPE(WIDTH), td_init_constant(1));
    opt_optimizer *opt = opt_sgd(td_root(td), NULL);
    td_report r[2];
    for (int micro = 0; micro < 2; micro++) {
        td_backward(td_sum(td_square(td_use(w)), TD_ALL, TD_DROP));
        if (micro) opt_step(opt, 0.1);
        ck_assert(td_plan_step(td));
        r[micro] = td_last_report(td);
    }
    td_planned_memory m;
    ck_assert(td_planned_memory_of(td, &m));
    ck_assert_int_eq(m.accumulators, 4 * WIDTH);
    td_backward(td_sum(td_square(td_use(w)), TD_ALL, TD_DROP)); /* the accumulator is empty again */
    opt_step(opt, 0.1);
    ck_assert(td_plan(td));
    ck_assert_int_lt(td_last_report(td).flops, r[1].flops);
    opt_close(opt);
    td_close(td);
}
END_TEST

START_TEST(test_the_largest_values_at_the_peak_are_told_by_family)
{
    enum { N = 512, D = 64, LAYERS = 6, ALL = 64 };
    static double x[N * D];
    td_context *td = open_cpu(TD_F64);
    td_planned_value v[ALL];
    td_planned_moment when;
    nn_linear layers[LAYERS];
    for (int l = 0; l < LAYERS; l++) {
        char name[32];
        snprintf(name, sizeof name, "h.%d.fc", l);
        layers[l] = nn_linear_make(td_root(td), name, D, D);
    }
    ck_assert_int_eq(td_planned_largest(td, v, ALL, &when), 0);
    ck_assert_int_eq(when.call, -1);
    td_tensor at = td_input(td, "x", TD_F64, TD_SHAPE(N, D), x);
    for (int l = 0; l < LAYERS; l++) at = td_gelu(nn_linear_apply(&layers[l], at));
    td_backward(td_mean(td_square(at), TD_ALL, TD_DROP));
    ck_assert(td_plan(td));
    int64_t count = td_planned_largest(td, v, ALL, &when), sum = 0;
    for (int64_t i = 0; i < count; i++) {
        ck_assert(i == 0 || v[i].bytes <= v[i - 1].bytes);
        sum += v[i].bytes;
    }
    ck_assert_int_eq(sum, td_last_report(td).live_bytes); /* nothing else is alive then */
    static const struct { const char *op, *module; } families[] = { { "gelu", "" }, { "linear", "h.*.fc" } };
    for (int f = 0; f < 2; f++) { /* of all layers but the last, whose backward has begun */
        ck_assert_str_eq(v[f].op, families[f].op);
        ck_assert_str_eq(v[f].module, families[f].module);
        ck_assert_str_eq(v[f].kind, "activations");
        ck_assert_int_eq(v[f].count, LAYERS - 1);
        ck_assert_int_eq(v[f].bytes, (LAYERS - 1) * 8 * N * D);
        ck_assert(td_shape_equal(v[f].shape, TD_SHAPE(N, D)) && v[f].dtype == TD_F64);
    }
    ck_assert_int_eq(td_planned_largest(td, v, 1, &when), 1);
    td_close(td);
}
END_TEST

/* ---- The command ------------------------------------------------------------------------------------------ */

/* Parts of files. */
#define FLOPS "\"flops\": {\"f32\": 1e9}, "
#define MEMORY(bytes) "\"memory_bytes\": " bytes ", \"memory_bytes_per_s\": 1e9, "
#define RANKS(n) "\"host_ranks\": " n ", "
#define FAST_LINKS "\"inside\": {\"bytes_per_s\": 1e18}"

static void write_machine(const char *name, const char *text)
{
    char path[128];
    mkdir("test_plan_files", 0777);
    snprintf(path, sizeof path, "test_plan_files/%s", name);
    FILE *to = fopen(path, "w");
    ck_assert_ptr_nonnull(to);
    fputs(text, to);
    ck_assert_int_eq(fclose(to), 0);
}

START_TEST(test_a_machine_file_gives_the_time_its_numbers_say)
{
    write_machine("flops.json", "{\"flops\": {\"f32\": 2e9}, \"efficiency\": 0.25, \"memory_bytes\": 1e12, \"memory_bytes_per_s\": 1e18,\n"
                                " \"host_ranks\": 4, " FAST_LINKS "}");
    ck_assert_sh(0, "$MLP plan --hidden 16 --batch 24 --machine flops.json --json");
    ck_assert_double_eq_tol(printed("estimate.step_ms"), 1e3 * printed("flops") / 5e8, 1e-9 * printed("estimate.step_ms"));
    ck_assert_double_eq_tol(printed("estimate.items_per_s"), 24e3 / printed("estimate.step_ms"), 1e-6);
    ck_assert_double_eq(printed("estimate.exposed_comm_ms"), 0);
    write_machine("moved.json", "{\"flops\": {\"f32\": 1e18}, \"memory_bytes\": 1e12, \"memory_bytes_per_s\": 1e6, \"host_ranks\": 2,\n"
                                " \"inside\": {\"bytes_per_s\": 1e18}, \"across\": {\"bytes_per_s\": 1e3, \"latency_us\": 5}}");
    ck_assert_sh(0, "$MLP plan --hidden 16 --batch 24 --machine moved.json --json");
    ck_assert_double_eq_tol(printed("estimate.step_ms"), printed("bytes_moved") / 1e3, 1e-6 * printed("estimate.step_ms"));
    ck_assert_sh(0, "$MLP plan --hidden 16 --world 4 --batch 24 --strategy ddp --machine moved.json --json");
    ck_assert_double_eq(printed("inside_host_bytes"), printed("across_hosts_bytes")); /* two of a ring's four hops leave a host */
    ck_assert_double_eq_tol(printed("estimate.comm_ms"), printed("comm_bytes_per_step") / 2 + printed("comm_calls") * 2 * 5e-3,
                            1e-6 * printed("estimate.comm_ms"));
    ck_assert_sh(0, "$MLP plan --hidden 16 --world 4 --batch 24 --strategy ddp --machine moved.json --host-ranks 4 --json");
    ck_assert_double_eq(printed("across_hosts_bytes"), 0);
}
END_TEST

START_TEST(test_what_is_alive_at_the_peak_is_printed)
{
    ck_assert_sh(0, "$MLP plan --hidden 64,64 --batch 2048");
    ck_assert_str_has(out_text, "\n  peak      at call ");
    ck_assert_str_has(out_text, "the largest of what is alive then:\n");
    ck_assert_str_has(out_text, " MiB  1 x f32 (2048, 64) of ");
    ck_assert_sh(0, "$MLP plan --hidden 64,64 --batch 2048 --json");
    ck_assert_str_has(out_text, "\"shape\":[2048,64],");
    ck_assert_double_ge(printed("peak.call"), 0);
}
END_TEST

START_TEST(test_a_build_without_cuda_says_what_planning_for_a_gpu_needs)
{
#ifdef TANDEM_CUDA
    check_skip(__func__, "this build has CUDA");
    return;
#endif
    for (int world = 1; world < 3; world++) {
        ck_assert_sh(1, "$MLP plan --hidden 16 --batch 24 --device cuda --world %d", world);
        ck_assert_str_has(err_text, "this build has no CUDA; configure it with -DTANDEM_CUDA=ON, which needs CUDA's toolkit but no GPU");
    }
}
END_TEST

START_TEST(test_offloaded_state_is_planned_on_the_host)
{
    write_machine("host.json", "{" FLOPS MEMORY("1e12") RANKS("2") FAST_LINKS ", \"host\": {\"bytes_per_s\": 1e6, \"latency_us\": 0, "
                               "\"memory_bytes_per_s\": 1e18}}");
    ck_assert_sh(0, "$MLP plan --hidden 16 --batch 24 --world 2 --strategy fsdp --machine host.json --json");
    double parameters = printed("memory.parameters"), moments = printed("memory.moments"), state = printed("state_bytes");
    ck_assert_double_eq(printed("host_bytes") + printed("host_link_bytes") + printed("host_link_copies"), 0);
    ck_assert_sh(0, "$MLP plan --hidden 16 --batch 24 --world 2 --strategy fsdp --machine host.json --offload all --json");
    ck_assert_double_eq(printed("memory.parameters") + printed("memory.moments"), 0);
    ck_assert_double_eq(printed("state_bytes"), state - parameters - moments);
    ck_assert_double_ge(printed("host_bytes"), parameters + moments);
    ck_assert_double_eq_tol(printed("estimate.host_copy_ms"), printed("host_link_bytes") / 1e3, 1e-6 * printed("host_link_bytes"));
    double planned = printed("planned_peak_bytes"), host = printed("host_bytes");
    ck_assert_sh(0, "$MLP bench --hidden 16 --batch 24 --ranks 2 --strategy fsdp --steps 2 --threads 2 --offload all --json");
    ck_assert_double_eq(printed("planned_peak_bytes"), planned);
    ck_assert_double_eq(printed("planned_host_bytes"), host);
    write_machine("alone.json", "{" FLOPS MEMORY("1e12") RANKS("2") FAST_LINKS "}");
    ck_assert_sh(2, "$MLP plan --hidden 16 --batch 24 --world 2 --strategy fsdp --machine alone.json --offload optimizer");
    ck_assert_str_has(err_text, "--machine alone.json says nothing of a host, and --offload needs one");
}
END_TEST

START_TEST(test_an_update_is_planned_as_it_runs)
{
    ck_assert_sh(0, "$MLP plan --hidden 16 --batch 24 --accumulate 3 --world 2 --strategy ddp --threads 2 --json");
    double peak = printed("planned_peak_bytes"), sent = printed("comm_bytes_per_step"), accumulators = printed("memory.accumulators");
    ck_assert_double_gt(accumulators, 0);
    ck_assert_sh(0, "$MLP bench --hidden 16 --batch 24 --accumulate 3 --ranks 2 --strategy ddp --steps 2 --threads 2 --json");
    ck_assert_double_eq(printed("planned_peak_bytes"), peak);
    ck_assert_double_eq_tol(printed("peak_bytes"), peak, 0.01 * peak);
    ck_assert_double_eq(printed("comm_bytes_per_step"), sent);
}
END_TEST

START_TEST(test_a_gradient_that_waits_to_be_scattered_is_told_as_such)
{
    ck_assert_sh(0, "$MLP plan --hidden 64,64 --batch 8 --world 2 --strategy fsdp --json");
    ck_assert_double_ge(printed("memory.gradients"), 4 * 784 * 64); /* of the first layer, whole */
}
END_TEST

START_TEST(test_all_strategies_are_set_side_by_side)
{
    ck_assert_sh(0, "$MLP plan --hidden 16 --world 4 --strategy all --machine h200x8");
    ck_assert_str_has(out_text, "\nddp ");
    ck_assert_str_has(out_text, "\nfsdp ");
    ck_assert_str_has(out_text, "fits, fastest");
    ck_assert_str_has(out_text, "assumes: ");
    ck_assert_sh(0, "$MLP plan --hidden 16 --world 1024 --strategy fsdp,nonsense,ddp --json"); /* the default batch is made to divide */
    ck_assert_str_has(out_text, "\"batch\":1024");
    ck_assert_str_has(out_text, "\"strategy\":\"nonsense\",\"error\":\"strategy 'nonsense' is not known");
    ck_assert(strstr(out_text, "\"strategy\":\"fsdp\"") < strstr(out_text, "\"strategy\":\"ddp\""));
    ck_assert_sh(2, "$MLP plan --hidden 16 --world 2 --strategy nonsense,more");
    ck_assert_str_has(err_text, "'nonsense' is not known");
}
END_TEST

START_TEST(test_a_world_of_thousands_is_planned)
{
    ck_assert_sh(0, "%s/gpt plan --size 124m --strategy all --world 8192 --machine h200x8 --json", TANDEM_BIN);
    ck_assert_str_has(out_text, "\"batch\":8192");
    ck_assert_msg(!strstr(out_text, "\"error\""), "%.2000s", out_text);
}
END_TEST

START_TEST(test_where_nothing_fits_the_nearest_is_told_and_what_helps)
{
    write_machine("tiny.json", "{" FLOPS MEMORY("1000") RANKS("4") FAST_LINKS "}");
    ck_assert_sh(1, "$MLP plan --hidden 16 --batch 24 --world 2 --strategy all --machine tiny.json");
    ck_assert_str_has(out_text, "does not fit");
    ck_assert_str_has(err_text, "nearest is ");
    ck_assert_str_has(err_text, "take a smaller model");
    write_machine("some.json", "{" FLOPS MEMORY("30e6") RANKS("4") FAST_LINKS "}");
    ck_assert_sh(1, "$MLP plan --hidden 512,512 --batch 32768 --world 4 --strategy all --machine some.json");
    ck_assert_str_has(err_text, "; with --accumulate ");
}
END_TEST

START_TEST(test_mistakes_are_told_in_one_line)
{
    static const struct { int status; const char *machine, *says; } cases[] = {
        { 2, NULL, "'nowhere' is not known: it is one of h200x8, " },
        { 1, "{\"flops\": {\"f32\": 1e9},\n \"memory_bytes\": 1e9 \"host_ranks\": 2}", "line 2" },
        { 1, "[1]", "must be what the file begins with" },
        { 1, "{" FLOPS MEMORY("1e9") FAST_LINKS "}", "\"host_ranks\" is missing" },
        { 1, "{" FLOPS MEMORY("1e9") "\"host_ranks\": 2}", "\"inside\" is missing" },
        { 1, "{\"flops\": {\"f32\": 0}, " MEMORY("1e9") RANKS("2") FAST_LINKS "}",
          "\"f32\" must be a number above 0" },
        { 1, "{\"flops\": {\"bf16\": 1}, " MEMORY("1e9") RANKS("2") FAST_LINKS "}", "needs f32 or f64" },
        { 1, "{\"flops\": {\"f32\": 1}, " MEMORY("1e9") RANKS("1.5") FAST_LINKS "}", "whole number" },
        { 1, "{" FLOPS MEMORY("1e9") RANKS("2") FAST_LINKS ", \"collective_multiprocessors\": 2.5}",
          "\"collective_multiprocessors\" must be a whole number" },
        { 1, "{\"flops\": {\"f32\": 1}, \"memory\": 1e9}", "\"memory\" is not known" },
        { 1, "{\"flops\": 3, " MEMORY("1e9") RANKS("2") FAST_LINKS "}", "\"flops\" must be an object" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (cases[i].machine) write_machine("wrong.json", cases[i].machine);
        ck_assert_sh(cases[i].status, "$MLP plan --hidden 16 --batch 24 --machine %s", cases[i].machine ? "wrong.json" : "nowhere");
        ck_assert_str_has(err_text, cases[i].says);
        ck_assert_msg(strchr(err_text, '\n') == strrchr(err_text, '\n'), "more than a line: %.900s", err_text);
    }
    ck_assert_sh(1, "$MLP plan --hidden 16 --batch 24 --machine ./absent.json");
    ck_assert_str_has(err_text, "absent.json");
}
END_TEST

START_TEST(test_this_machine_is_measured)
{
    ck_assert_sh(0, "OMP_WAIT_POLICY=passive $MLP plan --hidden 16 --batch 24 --world 2 --strategy ddp --machine cpu --json");
    ck_assert_double_gt(printed("estimate.step_ms"), 0);
    ck_assert_double_gt(printed("estimate.comm_ms"), 0);
    ck_assert_double_eq_tol(printed("estimate.exposed_comm_ms"), printed("estimate.comm_ms"), 1e-9); /* ranks compute what they send */
}
END_TEST

TESTS("plan", test_a_ring_inside_a_host_takes_its_hops_and_its_bytes, test_a_ring_across_hosts_takes_the_slowest_link,
      test_a_task_takes_the_larger_of_computing_and_moving, test_a_collective_hides_behind_what_does_not_wait_for_it, test_what_is_aside_is_computed_beside_and_exposes_nothing,
      test_collectives_follow_one_another_and_may_end_last, test_what_computing_and_moving_do_not_hide_of_one_another_comes_on_top,
      test_copies_have_queues_and_the_host_computes_at_its_own_rate, test_offloaded_state_is_planned_on_the_host, test_ddp_sends_twice_its_parameters_and_holds_all_state,
      test_fsdp_gathers_twice_scatters_once_and_holds_its_share, test_a_large_parameter_of_the_root_has_a_unit_of_its_own,
      test_zero_scatters_gradients_and_gathers_parameters,
      test_zero_in_bf16_gathers_and_holds_half,
      test_hsdp_is_fsdp_in_a_group_and_reduces_shards_across, test_every_strategy_accounts_for_all_its_memory_and_bytes,
      test_an_accumulator_is_planned_as_if_the_step_before_had_run, test_the_largest_values_at_the_peak_are_told_by_family,
      test_what_is_alive_at_the_peak_is_printed, test_a_build_without_cuda_says_what_planning_for_a_gpu_needs,
      test_a_machine_file_gives_the_time_its_numbers_say,
      test_an_update_is_planned_as_it_runs, test_a_gradient_that_waits_to_be_scattered_is_told_as_such,
      test_all_strategies_are_set_side_by_side, test_a_world_of_thousands_is_planned,
      test_where_nothing_fits_the_nearest_is_told_and_what_helps, test_mistakes_are_told_in_one_line, test_this_machine_is_measured)
