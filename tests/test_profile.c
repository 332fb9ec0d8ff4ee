/* The profile: what is told of tasks, that events are whole and in order, that profiling changes nothing and costs nothing when it
 * is off; and --profile as a user meets it.
 * Timeout: 300 s
 */
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tandem/nn.h>
#include <tandem/optim.h>

#include "core/internal.h"
#include "core/json.h"
#include "core/ops/list.h"
#include "run/profile.h"
#include "tests/memory.h"
#include "tests/shell.h"

/* ---- A small network -------------------------------------------------------------------------------------- */

enum { ROWS = 6, IN = 5, HIDDEN = 7, OUT = 3 };

typedef struct network {
    td_context *td;
    nn_linear hidden, out;
    opt_optimizer *opt;
    double x[ROWS * IN];
    int32_t labels[ROWS];
} network;

static void make_network(network *n, td_context *td)
{
    td_module root = td_root(td);
    *n = (network){ .td = td };
    n->hidden = nn_linear_make(root, "hidden", IN, HIDDEN);
    n->out = nn_linear_make(root, "out", HIDDEN, OUT);
    n->opt = opt_adamw(root, &(opt_adamw_options){ .max_norm = 1 });
    for (int i = 0; i < ROWS * IN; i++) n->x[i] = check_normal((uint64_t)i);
    for (int i = 0; i < ROWS; i++) n->labels[i] = i % OUT;
}

static double step(network *n)
{
    static float narrow[ROWS * IN];
    for (int i = 0; i < ROWS * IN; i++) narrow[i] = (float)n->x[i];
    const void *data = td_float(n->td) == TD_F64 ? (const void *)n->x : narrow;
    td_tensor x = td_batch(n->td, "x", td_float(n->td), TD_SHAPE(ROWS, IN), data);
    td_tensor labels = td_batch(n->td, "y", TD_I32, TD_SHAPE(ROWS), n->labels);
    td_tensor h = td_relu(nn_linear_apply(&n->hidden, x));
    td_tensor loss = td_cross_entropy(nn_linear_apply(&n->out, h), labels);
    td_backward(loss);
    opt_step(n->opt, 0.01);
    ck_assert_msg(td_step(n->td), "%s", td_error_text(n->td));
    return td_item(loss);
}

static void close_network(network *n)
{
    opt_close(n->opt);
    td_close(n->td);
}

/* FLOPs of the profiled matrix products of a phase in a module. */
static int64_t product_flops(const td_context *td, const char *module, td_profile_phase phase)
{
    int64_t flops = 0;
    for (int64_t i = 0; i < td_profile_count(td); i++) {
        const td_profile_task *t = td_profile_at(td, i).task;
        if (t && t->phase == phase && !strcmp(t->kind, "matmul") && !strcmp(t->module, module)) flops += t->flops;
    }
    return flops;
}

static const td_profile_task *find_task(const td_context *td, const char *op, const char *module)
{
    for (int64_t i = 0; i < td_profile_count(td); i++) {
        const td_profile_task *t = td_profile_at(td, i).task;
        if (t && !strcmp(t->op, op) && !strcmp(t->module, module)) return t;
    }
    ck_abort_msg("no %s in '%s' was profiled", op, module);
    return NULL;
}

/* ---- What is told of tasks -------------------------------------------------------------------------------- */

START_TEST(test_flops_of_a_linear_layer_are_its_products)
{
    network n;
    make_network(&n, open_cpu(TD_F64));
    ck_assert(td_profile_begin(n.td, 1));
    step(&n);
    td_profile_end(n.td);
    /* 2 m n k: forward; in the backward the same for the weight, and for the input where something is before it. */
    ck_assert_int_eq(product_flops(n.td, "hidden", TD_PROFILE_FORWARD), 2 * 6 * 5 * 7);
    ck_assert_int_eq(product_flops(n.td, "hidden", TD_PROFILE_BACKWARD), 2 * 6 * 5 * 7);
    ck_assert_int_eq(product_flops(n.td, "out", TD_PROFILE_FORWARD), 2 * 6 * 7 * 3);
    ck_assert_int_eq(product_flops(n.td, "out", TD_PROFILE_BACKWARD), 2 * (2 * 6 * 7 * 3));
    ck_assert_int_eq(product_flops(n.td, "hidden", TD_PROFILE_UPDATE), 0);
    const td_profile_task *linear = find_task(n.td, "linear", "hidden");
    ck_assert_int_eq(linear->bytes, 8 * (6 * 5 + 5 * 7 + 7 + 6 * 7));
    ck_assert_int_eq(linear->dtype, TD_F64);
    ck_assert(!linear->collective);
    ck_assert_int_eq(find_task(n.td, "update_unit", "optimizer")->phase, TD_PROFILE_UPDATE);
    close_network(&n);
}
END_TEST

/* Rows of a table are merged and updated without a norm that would say that the update has begun. */
START_TEST(test_updates_by_rows_are_of_the_update)
{
    static const int32_t ids[] = { 1, 3, 1 };
    td_context *td = open_cpu(TD_F32);
    nn_embedding table = nn_embedding_make_with(td_root(td), "table", 9, 2, &(nn_embedding_options){ .sparse = true });
    opt_optimizer *opt = opt_adagrad(td_root(td), &(opt_adagrad_options){ .row_wise = true });
    ck_assert(td_profile_begin(td, 1));
    td_backward(td_sum(td_square(nn_embedding_apply(&table, td_input(td, "ids", TD_I32, TD_SHAPE(3), ids))), TD_ALL, TD_DROP));
    opt_step(opt, 1);
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    static const char *const ops[] = { "merge_rows", "update_rows" };
    for (int i = 0; i < 2; i++) {
        const td_profile_task *task = find_task(td, ops[i], "optimizer");
        ck_assert_int_eq(task->phase, TD_PROFILE_UPDATE);
        ck_assert_str_eq(task->kind, "update");
    }
    ck_assert_ptr_null(td_profile_at(td, -1).name);
    ck_assert_int_eq(td_profile_at(td, td_profile_count(td)).end_ns, 0);
    td_close(td);
}
END_TEST

START_TEST(test_tasks_sum_up_to_the_report)
{
    network n;
    make_network(&n, open_cpu(TD_F64));
    step(&n);
    ck_assert(td_profile_begin(n.td, 1));
    step(&n);
    int64_t flops = 0, bytes = 0, tasks = 0, live = 0;
    for (int64_t i = 0; i < td_profile_count(n.td); i++) {
        const td_profile_task *t = td_profile_at(n.td, i).task;
        if (!t) continue;
        tasks++;
        flops += t->flops;
        bytes += t->bytes;
        if (t->live_bytes > live) live = t->live_bytes;
    }
    td_report report = td_last_report(n.td);
    ck_assert_int_eq(tasks, report.calls);
    ck_assert_int_eq(flops, report.flops);
    ck_assert_int_eq(bytes, report.bytes_moved);
    ck_assert_int_eq(live, report.live_bytes);
    close_network(&n);
}
END_TEST

/* Gradients are made where they are packed. */
START_TEST(test_packing_in_place_moves_nothing)
{
    network n;
    make_network(&n, open_cpu(TD_F64));
    ck_assert(td_profile_begin(n.td, 1));
    step(&n);
    ck_assert_int_eq(find_task(n.td, "pack", "")->bytes, 0);
    close_network(&n);
}
END_TEST

START_TEST(test_a_fused_chain_tells_its_functions_and_its_module)
{
    td_context *td = open_cpu(TD_F64);
    td_module inner = td_child(td_child(td_root(td), "block"), "inner");
    td_tensor x = randn(td, 4, 8), w = randn(td, 4, 8), b = randn(td, 8);
    td_enter(inner);
    td_tensor y = td_relu(td_add(td_mul(x, w), b));
    td_keep(y);
    td_leave(inner);
    ck_assert(td_profile_begin(td, 1));
    ck_assert(td_step(td));
    const td_profile_task *fused = find_task(td, "fused", "block.inner");
    ck_assert_str_eq(fused->parts, "mul+add+relu");
    ck_assert_str_eq(fused->kind, "pointwise");
    ck_assert_int_eq(fused->flops, 3 * 4 * 8);
    ck_assert_int_eq(fused->bytes, 8 * (3 * 4 * 8 + 8));
    td_close(td);
}
END_TEST

START_TEST(test_every_operation_has_a_kind)
{
#define EXPECT_KIND(name) ck_assert_msg(strcmp(td_profile_kind(&td_op_##name), "other"), #name " has no kind: see core/profile.c");
    TD_OPERATIONS(EXPECT_KIND)
    ck_assert_str_eq(td_profile_kind(&td_op_linear), "matmul");
    ck_assert_str_eq(td_profile_kind(&td_op_attention), "attention");
    ck_assert_str_eq(td_profile_kind(&td_op_layer_norm), "norm");
    ck_assert_str_eq(td_profile_kind(&td_op_cross_entropy_gradient), "loss");
    ck_assert_str_eq(td_profile_kind(&td_op_embedding), "embedding");
    ck_assert_str_eq(td_profile_kind(&td_op_update_unit), "update");
    ck_assert_str_eq(td_profile_kind(&td_op_transpose), "copy");
    ck_assert_str_eq(td_profile_kind(&td_op_add), "pointwise");
    ck_assert_str_eq(td_profile_kind(&td_op_sum), "reduction");
    ck_assert_str_eq(td_profile_kind(&td_op_dropout_mask), "random");
    ck_assert_str_eq(td_profile_kind(&(td_op){ .name = "user's own" }), "other");
}
END_TEST

/* ---- Events ----------------------------------------------------------------------------------------------- */

START_TEST(test_events_follow_one_another)
{
    static const char *const host[] = { "record", "plan", "bind", "run", "looked after" };
    network n;
    make_network(&n, open_cpu(TD_F64));
    ck_assert(td_profile_begin(n.td, 3));
    for (int s = 0; s < 3; s++) {
        step(&n);
        td_profile_mark(n.td, "looked after");
    }
    td_profile_end(n.td);
    ck_assert_int_eq(td_profile_steps(n.td), 3);
    int64_t host_end = 0, task_end = 0, hosts = 0, first_task = -1;
    for (int64_t i = 0; i < td_profile_count(n.td); i++) {
        td_profile_event e = td_profile_at(n.td, i);
        ck_assert(e.end_ns >= e.begin_ns);
        if (e.task) {
            ck_assert(e.begin_ns >= task_end && e.begin_ns >= host_end);
            task_end = e.end_ns;
            if (first_task < 0) first_task = e.begin_ns;
            continue;
        }
        ck_assert_str_eq(e.name, host[hosts % 5]);
        ck_assert_int_eq(e.step, (hosts + 1) / 5); /* a step ends with its run */
        if (hosts > 0) ck_assert_int_eq(e.begin_ns, host_end);
        if (!strcmp(e.name, "run")) {
            ck_assert(e.begin_ns <= first_task && task_end <= e.end_ns);
            first_task = -1;
        }
        host_end = e.end_ns;
        hosts++;
    }
    ck_assert_int_eq(hosts, 15);
    close_network(&n);
}
END_TEST

/* By a clock of one's own. What a busy machine puts between two readings is not in every one of the tries. */
START_TEST(test_host_events_fill_the_time)
{
    network n;
    make_network(&n, open_cpu(TD_F64));
    double least = 1;
    for (int tries = 0; tries < 20 && least > 0.05; tries++) {
        int64_t told = 0, begin = td_profile_now();
        ck_assert(td_profile_begin(n.td, 20));
        for (int s = 0; s < 20; s++) step(&n);
        int64_t whole = td_profile_now() - begin;
        for (int64_t i = 0; i < td_profile_count(n.td); i++) {
            td_profile_event e = td_profile_at(n.td, i);
            if (!e.task) told += e.end_ns - e.begin_ns;
        }
        ck_assert_int_le(told, whole);
        least = fmin(least, 1 - (double)told / (double)whole);
        td_profile_clear(n.td);
    }
    ck_assert_msg(least <= 0.05, "%.3g of the time is not told", least);
    close_network(&n);
}
END_TEST

START_TEST(test_a_profile_goes_on_and_leaves_out_what_is_between)
{
    network n;
    make_network(&n, open_cpu(TD_F64));
    step(&n);
    ck_assert_int_eq(td_profile_count(n.td), 0);
    ck_assert(td_profile_begin(n.td, 2));
    step(&n);
    td_profile_end(n.td);
    int64_t one = td_profile_count(n.td);
    step(&n);
    td_profile_mark(n.td, "not told");
    ck_assert_int_eq(td_profile_count(n.td), one);
    ck_assert(td_profile_begin(n.td, 0));
    step(&n);
    td_profile_end(n.td);
    ck_assert_int_eq(td_profile_count(n.td), 2 * one);
    ck_assert_int_eq(td_profile_at(n.td, 2 * one - 1).step, 1);
    td_profile_clear(n.td);
    ck_assert_int_eq(td_profile_count(n.td), 0);
    close_network(&n);
}
END_TEST

/* More plans than are kept: the texts of those gone can still be read. */
START_TEST(test_a_profile_outlives_its_plans)
{
    td_context *td = open_cpu(TD_F64);
    ck_assert(td_profile_begin(td, 1));
    for (int64_t size = 1; size <= 80; size++) {
        td_keep(td_square(td_exp(randn(td, 2, size))));
        ck_assert(td_step(td));
    }
    int64_t fused = 0;
    for (int64_t i = 0; i < td_profile_count(td); i++) {
        const td_profile_task *t = td_profile_at(td, i).task;
        if (!t) continue;
        ck_assert_str_eq(t->parts, "exp+square");
        ck_assert_int_eq(t->flops, 4 * ++fused);
    }
    ck_assert_int_eq(fused, 80);
    td_close(td);
}
END_TEST

/* ---- It changes and costs nothing ------------------------------------------------------------------------- */

static char *train(bool profiled, double losses[4], double weights[HIDDEN * IN])
{
    network n;
    make_network(&n, td_open(&(td_options){ .dtype = TD_F64, .seed = 1, .threads = 2, .log = check_log_line, .print = "plan" }));
    size_t before = strlen(log_text());
    if (profiled) ck_assert(td_profile_begin(n.td, 2));
    for (int s = 0; s < 4; s++) losses[s] = step(&n);
    ck_assert(td_state_read(td_state_named(n.td, "hidden.weight"), 0, HIDDEN * IN, weights));
    close_network(&n);
    return strdup(log_text() + before);
}

START_TEST(test_profiling_changes_neither_results_nor_plans)
{
    double losses[2][4], weights[2][HIDDEN * IN];
    char *plain = train(false, losses[0], weights[0]), *profiled = train(true, losses[1], weights[1]);
    ck_assert_mem_eq(losses[0], losses[1], sizeof losses[0]);
    ck_assert_mem_eq(weights[0], weights[1], sizeof weights[0]);
    ck_assert_str_has(plain, "-- plan: ");
    ck_assert_str_eq(plain, profiled);
    free(plain);
    free(profiled);
}
END_TEST

START_TEST(test_announced_steps_allocate_nothing)
{
    memory_test memory = { .refused = -1 };
    network n;
    make_network(&n, open_with(&memory));
    for (int s = 0; s < 2; s++) step(&n);
    memory_refuse(&memory, -1);
    step(&n);
    ck_assert_int_eq(memory.calls, 0); /* not profiled */
    ck_assert(td_profile_begin(n.td, 40));
    ck_assert_int_gt(memory.calls, 0);
    memory_refuse(&memory, -1);
    for (int s = 0; s < 40; s++) {
        step(&n);
        td_profile_mark(n.td, "data");
    }
    ck_assert_int_eq(memory.calls, 0);
    td_profile_clear(n.td);
    close_network(&n);
    ck_assert_int_eq(memory.held, 0);
}
END_TEST

/* Every allocation fails in turn: an error, and nothing is left over. */
START_TEST(test_no_memory_for_a_profile_is_an_error)
{
    for (int refused = 0;; refused++) {
        memory_test memory = { .refused = -1 };
        network n;
        make_network(&n, open_with(&memory));
        step(&n);
        memory_refuse(&memory, refused);
        bool began = td_profile_begin(n.td, 10);
        ck_assert_int_eq(td_error(n.td), began ? TD_OK : TD_ERROR_MEMORY);
        memory_refuse(&memory, -1);
        close_network(&n);
        ck_assert_int_eq(memory.held, 0);
        if (!began) continue;
        ck_assert_int_gt(refused, 3);
        break;
    }
}
END_TEST

START_TEST(test_a_profile_that_cannot_be_held_says_so)
{
    network n;
    make_network(&n, open_cpu(TD_F64));
    step(&n);
    ck_assert(!td_profile_begin(n.td, INT64_MAX));
    ck_assert_str_has(td_error_text(n.td), "are more than a profile holds: profile fewer");
    close_network(&n);
}
END_TEST

START_TEST(test_the_machine_has_a_floor)
{
    td_machine m;
    td_context *td = open_cpu(TD_F32);
    ck_assert(td_machine_measure(td, 1, &m));
    ck_assert(m.flops[TD_F32] > 1e8 && m.flops[TD_F64] == 0 && m.bytes > 1e8);
    ck_assert_int_ge(m.buffer_bytes, 90 << 20);
    td_close(td);
}
END_TEST

/* ---- The command ------------------------------------------------------------------------------------------ */

static void enter(void)
{
    static bool entered;
    if (entered) return;
    mkdir("test_profile_files", 0777);
    ck_assert_int_eq(chdir("test_profile_files"), 0);
    FILE *text = fopen("text.txt", "w");
    ck_assert_ptr_nonnull(text);
    for (int i = 0; i < 200; i++) fprintf(text, "line %d of a text to train on\n", i);
    fclose(text);
    entered = true;
}

#define SMALL "--layers 2 --heads 2 --width 16 --context 8 --batch 4 --dropout 0 --threads 2 "

/* Complete events of a trace on one thread of a rank: they do not overlap. */
typedef struct thread_events {
    int64_t count;
    double end_us;
} thread_events;
enum { RANKS = 2, THREADS = 4, SLACK_NS = 1 };

static td_json_document *read_trace(td_context *td, const char *path, thread_events threads[RANKS][THREADS], int64_t *counters)
{
    td_json_document *document = td_json_read(td, path);
    ck_assert_no_error(td);
    const td_json *list = td_json_get(td_json_root(document), "traceEvents");
    ck_assert(list && list->kind == TD_JSON_ARRAY);
    for (const td_json *e = list->first; e; e = e->next) {
        const char *ph = td_json_get_string(e, "ph");
        int64_t rank = td_json_get_whole(e, "pid", -1), thread = td_json_get_whole(e, "tid", 0);
        ck_assert(ph && rank >= 0 && rank < RANKS && thread >= 0 && thread < THREADS);
        if (!strcmp(ph, "C")) ++*counters;
        if (strcmp(ph, "X")) continue;
        double begin = td_json_get_number(e, "ts", -1), length = td_json_get_number(e, "dur", -1);
        ck_assert(begin > 0 && length >= 0);
        ck_assert(begin >= threads[rank][thread].end_us - 1e-3 * SLACK_NS);
        threads[rank][thread].end_us = begin + length;
        threads[rank][thread].count++;
    }
    return document;
}

/* Events of a name, on a thread of rank 0. */
static int64_t named_events(const td_json_document *trace, const char *name, int64_t thread)
{
    int64_t count = 0;
    for (const td_json *e = td_json_get(td_json_root(trace), "traceEvents")->first; e; e = e->next)
        count += !strcmp(td_json_get_string(e, "ph"), "X") && td_json_get_whole(e, "tid", 0) == thread &&
                 td_json_get_whole(e, "pid", -1) == 0 && !strcmp(td_json_get_string(e, "name"), name);
    return count;
}

START_TEST(test_train_leaves_a_table_and_a_trace)
{
    enter();
    ck_assert_sh(0, "rm -rf a; $GPT train --data text.txt " SMALL "--steps 20 --eval-every 1 --log-every 5 --profile 3 --out a");
    ck_assert_str_has(out_text, "profile of 3 updates: ");
    ck_assert_str_has(out_text, "h.*.attn (2)             attention        4 ");
    ck_assert_str_has(out_text, "h.*.mlp (2)              matmul          12 ");
    ck_assert_str_has(out_text, "all tasks");
    ck_assert_str_has(out_text, "machine: 2 threads, f32 ");
    ck_assert_str_has(out_text, "checkpoint: a/checkpoints/step-20");
    td_context *td = open_cpu(TD_F32);
    thread_events threads[RANKS][THREADS] = { 0 };
    int64_t counters = 0;
    td_json_document *trace = read_trace(td, "a/profile.trace.json", threads, &counters);
    ck_assert_int_eq(named_events(trace, "run", 1), 3); /* no evaluation is among them */
    ck_assert_int_eq(named_events(trace, "data", 1), 3);
    ck_assert_int_eq(named_events(trace, "attention", 2), 3 * 2);
    ck_assert_int_eq(named_events(trace, "attention_gradient", 2), 3 * 2);
    ck_assert_int_gt(counters, 10);
    ck_assert_int_eq(threads[0][3].count, 0);
    td_json_close(trace);
    td_json_document *table = td_json_read(td, "a/profile.json");
    ck_assert_no_error(td);
    const td_json *root = td_json_root(table);
    ck_assert_int_eq(td_json_get_whole(root, "updates", -1), 3);
    ck_assert(td_json_get_number(root, "step_ms", 0) > 0 && td_json_get_number(root, "host_ms", 0) > 0);
    double told = td_json_get_number(root, "task_ms", 0), rows = 0;
    for (const td_json *r = td_json_get(root, "rows")->first; r; r = r->next) rows += td_json_get_number(r, "ms", 0);
    ck_assert(told > 0 && fabs(rows - told) <= 1e-9 * told);
    td_json_close(table);
    td_json_document *config = td_json_read(td, "a/config.json");
    ck_assert(!td_json_get(td_json_root(config), "profile")); /* a resumed run is not profiled again */
    td_json_close(config);
    td_close(td);
}
END_TEST

/* Matrix products, 6 x weights x tokens; attention, causal pairs of one row of 8: 36. */
START_TEST(test_a_model_has_the_flops_of_the_formulas)
{
    enter();
    ck_assert_sh(0, "rm -rf f; $GPT bench " SMALL "--steps 2 --profile 2 --out f && test -s f/profile.trace.json");
    td_context *td = open_cpu(TD_F32);
    td_json_document *table = td_json_read(td, "f/profile.json");
    ck_assert_no_error(td);
    double matmul = 0, attention = 0;
    for (const td_json *k = td_json_get(td_json_root(table), "kinds")->first; k; k = k->next) {
        if (!strcmp(td_json_get_string(k, "kind"), "matmul")) matmul = td_json_get_number(k, "flops", 0);
        if (!strcmp(td_json_get_string(k, "kind"), "attention")) attention = td_json_get_number(k, "flops", 0);
    }
    ck_assert_double_eq(matmul, 6.0 * (2 * 12 * 16 * 16 + 65 * 16) * 4 * 8);
    ck_assert_double_eq(attention, 2.0 * 2 * (4 * 2 * 36) * (2 * 8 + 5 * 8));
    td_json_close(table);
    td_close(td);
}
END_TEST

START_TEST(test_ranks_share_a_trace)
{
    enter();
    ck_assert_sh(0, "rm -rf r; $GPT train --data text.txt " SMALL "--steps 4 --profile 2 --ranks 2 --strategy fsdp --out r");
    ck_assert_str_has(out_text, "collective");
    td_context *td = open_cpu(TD_F32);
    thread_events threads[RANKS][THREADS] = { 0 };
    int64_t counters = 0;
    td_json_close(read_trace(td, "r/profile.trace.json", threads, &counters));
    for (int thread = 1; thread < THREADS; thread++) {
        ck_assert_int_gt(threads[0][thread].count, 0);
        ck_assert_int_eq(threads[0][thread].count, threads[1][thread].count);
    }
    ck_assert_sh(1, "ls r | grep tmp");
    td_json_document *table = td_json_read(td, "r/profile.json");
    double beside = td_json_get_number(td_json_root(table), "beside_ms", 0), exposed = td_json_get_number(td_json_root(table), "exposed_ms", 0);
    ck_assert(beside > 0 && fabs(exposed - beside) <= 1e-9 * beside); /* between CPUs they are in turn with computation */
    td_json_close(table);
    td_close(td);
}
END_TEST

/* Time in ns:   0    10    20    30    40    50    60
 * computes      ------.....------.....................
 * beside        ...------.............------...........   and a copy from 50 to 52 within the other from 49 to 55 */
START_TEST(test_what_is_exposed_has_no_computation_beside_it)
{
    run_span spans[] = { { 20, 30, false }, { 5, 15, true }, { 40, 48, true }, { 0, 10, false }, { 50, 52, true }, { 49, 55, true } };
    int count = sizeof spans / sizeof *spans;
    ck_assert_double_eq(run_spans_ns(spans, count, true), 20);
    ck_assert_double_eq(run_spans_ns(spans, count, false), 15 + 10 + 8 + 6);
    ck_assert_double_eq(run_spans_ns(spans, 0, false), 0);
}
END_TEST

START_TEST(test_a_run_that_is_stopped_tells_what_it_has)
{
    enter();
    ck_assert_sh(0, "rm -rf s log.txt; $GPT train --data text.txt " SMALL
                 "--steps 1000000 --profile 1000 --log-every 1 --out s >log.txt & pid=$!; "
                 "until grep -qs '^step 40/' log.txt || ! kill -0 $pid; do sleep 0.05; done; kill -TERM $pid; wait $pid && cat log.txt");
    ck_assert_str_has(out_text, "profile of ");
    ck_assert_str_has(out_text, "stopped by a signal after step ");
    ck_assert_sh(0, "test -s s/profile.trace.json && test -s s/profile.json");
}
END_TEST

START_TEST(test_what_cannot_be_profiled_is_said)
{
    enter();
    ck_assert_sh(2, "$GPT train --data text.txt " SMALL "--steps 5 --profile 6");
    ck_assert_str_has(err_text, "--profile 6 is more than the 5 updates to do: give a smaller one");
    ck_assert_sh(2, "$GPT bench " SMALL "--steps 2 --out b");
    ck_assert_str_has(err_text, "--out is where bench leaves a profile: give --profile N too, or leave --out out");
    ck_assert_sh(2, "$GPT plan " SMALL "--profile 2");
    ck_assert_str_has(err_text, "--profile is no flag of 'gpt plan'");
    ck_assert_sh(0, "$GPT train --data text.txt " SMALL "--steps 5 --profile 5");
    ck_assert_str_has(out_text, "profile of 5 updates: ");
    ck_assert_sh(0, "$GPT bench " SMALL "--steps 2 --profile 1 --json >bench.json && wc -l <bench.json");
    ck_assert_str_has(out_text, "1\n"); /* the table is on stderr */
    ck_assert_str_has(err_text, "profile of 1 update: ");
}
END_TEST

TESTS("profile", test_flops_of_a_linear_layer_are_its_products, test_updates_by_rows_are_of_the_update, test_tasks_sum_up_to_the_report,
      test_packing_in_place_moves_nothing, test_a_fused_chain_tells_its_functions_and_its_module,
      test_every_operation_has_a_kind, test_events_follow_one_another, test_host_events_fill_the_time,
      test_a_profile_goes_on_and_leaves_out_what_is_between, test_a_profile_outlives_its_plans,
      test_profiling_changes_neither_results_nor_plans, test_announced_steps_allocate_nothing,
      test_no_memory_for_a_profile_is_an_error, test_a_profile_that_cannot_be_held_says_so,
      test_the_machine_has_a_floor, test_train_leaves_a_table_and_a_trace, test_a_model_has_the_flops_of_the_formulas,
      test_ranks_share_a_trace, test_what_is_exposed_has_no_computation_beside_it, test_a_run_that_is_stopped_tells_what_it_has,
      test_what_cannot_be_profiled_is_said)
