/* Queues of a GPU: whatever the strategy, two calls that touch the same memory, one of them writing, never run at once. What a plan says
 * of waits is read here as a happens-before relation and held against the addresses that its calls were given; nothing runs.
 *
 * Labels: cuda
 */
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

#include "core/internal.h"

static const td_gpu h200 = { .name = "NVIDIA H200", .major = 9, .multiprocessors = 132, .l2_bytes = 60 << 20 };

enum { BLOCKS = 6, WIDTH = 512, RANKS = 8, ROWS = 64 * RANKS };

typedef struct planned {
    td_context *td;
    par_world *world;
    opt_optimizer *opt;
    const td_planned *plan;
    int32_t (*ended)[TD_QUEUES]; /* task: the last call of each queue that has ended when it begins, or is itself */
} planned;

/* A residual MLP of blocks h.0 ... with 2 MiB of f32 each, `micro` micro-batches, with clipping: a norm of all gradients. */
static void record(td_context *td, opt_optimizer **opt, int micro)
{
    td_module root = td_root(td);
    nn_linear in[BLOCKS], out[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) {
        char name[16];
        snprintf(name, sizeof name, "h.%d", b);
        td_module block = td_child(root, name);
        in[b] = nn_linear_make(block, "in", WIDTH, WIDTH);
        out[b] = nn_linear_make(block, "out", WIDTH, WIDTH);
    }
    nn_linear head = nn_linear_make(root, "head", WIDTH, 10);
    *opt = opt_adamw(root, &(opt_adamw_options){ .max_norm = 1 });
    static float x[ROWS * WIDTH];
    static int32_t y[ROWS];
    for (int m = 0; m < micro; m++) {
        td_tensor h = td_batch(td, "x", TD_F32, TD_SHAPE(ROWS, WIDTH), x);
        for (int b = 0; b < BLOCKS; b++) h = td_add(h, nn_linear_apply(&out[b], td_gelu(nn_linear_apply(&in[b], h))));
        td_backward(td_cross_entropy(nn_linear_apply(&head, h), td_batch(td, "y", TD_I32, TD_SHAPE(ROWS), y)));
    }
    opt_step(*opt, 1e-3);
}

static void find_ended(planned *p)
{
    int32_t last[TD_QUEUES];
    p->ended = check_alloc(p->plan->task_count * sizeof *p->ended);
    memset(last, 0xFF, sizeof last);
    for (int32_t t = 0; t < (int32_t)p->plan->task_count; t++) {
        const td_task *task = &p->plan->tasks[t];
        for (int q = 0; q < TD_QUEUES; q++) p->ended[t][q] = last[task->queue] < 0 ? -1 : p->ended[last[task->queue]][q];
        for (int w = 0; w < TD_QUEUES; w++) {
            if (task->waits[w] < 0) continue;
            ck_assert_int_lt(task->waits[w], t);
            ck_assert_int_eq(p->plan->tasks[task->waits[w]].queue, w);
            for (int q = 0; q < TD_QUEUES; q++)
                if (p->ended[task->waits[w]][q] > p->ended[t][q]) p->ended[t][q] = p->ended[task->waits[w]][q];
        }
        p->ended[t][task->queue] = last[task->queue] = t;
    }
}

/* `in_turn`: with one queue, as where memory is poisoned behind each call. */
static planned plan_with(const par_options *options, td_dtype dtype, int micro, bool in_turn)
{
    planned p = { .world = par_world_none(RANKS, 3) };
    p.td = td_open(&(td_options){ .device = "cuda", .gpu = &h200, .dtype = dtype, .threads = 1, .poison = in_turn, .log = check_log_line });
    ck_assert_msg(par_attach(p.td, p.world, 3, options), "%s", td_error_text(p.td));
    record(p.td, &p.opt, micro);
    ck_assert_msg(td_plan(p.td), "%s: %s", options->strategy, td_error_text(p.td));
    p.plan = p.td->planned;
    ck_assert_int_eq(p.plan->beside, !in_turn);
    find_ended(&p);
    return p;
}

static void close_planned(planned *p)
{
    opt_close(p->opt);
    td_close(p->td);
    par_world_close(p->world);
}

/* ---- Addresses */

typedef struct touched {
    uint32_t task;
    bool writes;
    int where;                                /* -1: the arena; a unit's number */
    int64_t begin, end;
} touched;

static const td_binding *binding_of(const td_planned *plan, const void *pointer)
{
    for (uint32_t b = 0; b < plan->binding_count; b++)
        if (plan->bindings[b].pointer == pointer) return &plan->bindings[b];
    return NULL;
}

static void touch(const td_planned *plan, touched *to, int *count, uint32_t task, const void *pointer, int64_t bytes, bool writes)
{
    const td_binding *at = binding_of(plan, pointer);
    if (!at) return;
    int64_t offset = at->offset;
    const td_block *root = td_block_root(plan, at->block, &offset);
    if (root->kind == TD_BLOCK_SLOT || !(bytes = bytes < 0 ? root->bytes : bytes)) return;
    bool arena = root->kind == TD_BLOCK_ARENA;
    if (arena) offset += root->offset;
    to[(*count)++] = (touched){ task, writes, arena ? -1 - (int)root->memory : (int)root->index, offset, offset + bytes };
}

static touched *find_touches(const td_planned *plan, int *count)
{
    touched *to = check_alloc((plan->arg_count + plan->task_count) * sizeof *to);
    *count = 0;
    for (uint32_t t = 0; t < plan->task_count; t++) {
        const td_kernel *k = &plan->tasks[t].kernel;
        for (int i = 0; i < k->inputs + k->outputs; i++) {
            const td_arg *arg = &k->in[i]; /* outputs follow inputs */
            touch(plan, to, count, t, &arg->data, td_shape_elements(arg->shape) * td_dtype_size(arg->dtype), i >= k->inputs);
        }
        touch(plan, to, count, t, &k->workspace, -1, true);
    }
    return to;
}

/* Every two calls of different queues that would spoil one another's memory are in order. Returns how many such pairs there are. */
static int check_order(const planned *p, const char *name)
{
    int count, pairs = 0;
    const touched *all = find_touches(p->plan, &count);
    for (int i = 0; i < count; i++)
        for (int j = 0; j < i; j++) {
            const touched *late = &all[i], *early = &all[j];
            const td_task *tasks = p->plan->tasks;
            if (tasks[early->task].queue == tasks[late->task].queue || !(early->writes || late->writes) || early->where != late->where ||
                early->begin >= late->end || late->begin >= early->end)
                continue;
            pairs++;
            ck_assert_msg(p->ended[late->task][tasks[early->task].queue] >= (int32_t)early->task,
                          "%s: call %u (%s) may run beside call %u (%s), which touches the same memory", name, late->task,
                          tasks[late->task].kernel.op->name, early->task, tasks[early->task].kernel.op->name);
        }
    return pairs;
}

static bool is_product(const td_planned *plan, uint32_t t) { return !strcmp(td_profile_kind(plan->tasks[t].kernel.op), "matmul"); }

static bool is_large_collective(const td_planned *plan, uint32_t t)
{
    return plan->tasks[t].queue == TD_QUEUE_COLLECTIVES && plan->tasks[t].cost.sent > 8;
}

/* Products that run while a collective of more than a scalar may. */
static int products_beside_collectives(const planned *p)
{
    int products = 0;
    for (uint32_t t = 0; t < p->plan->task_count; t++) {
        if (!is_product(p->plan, t)) continue;
        bool beside = false;
        for (uint32_t s = 0; s < t && !beside; s++)
            beside = is_large_collective(p->plan, s) && p->ended[t][TD_QUEUE_COLLECTIVES] < (int32_t)s;
        products += beside;
    }
    return products;
}

/* Waits of computation, with products still to come, for a collective that began when the last product had ended. */
static int stalls(const planned *p)
{
    int count = 0;
    int32_t last = -1;
    for (uint32_t t = 0; t < p->plan->task_count; t++) last = is_product(p->plan, t) ? (int32_t)t : last;
    for (int32_t t = 0; t < last; t++) {
        const td_task *task = &p->plan->tasks[t];
        int32_t s = task->queue == TD_QUEUE_COMPUTE ? task->waits[TD_QUEUE_COLLECTIVES] : -1;
        if (s < 0 || !is_large_collective(p->plan, (uint32_t)s)) continue;
        bool covered = false;
        for (int32_t i = s; i < t && !covered; i++) covered = is_product(p->plan, (uint32_t)i);
        count += !covered;
    }
    return count;
}

/* ---- Tests */

enum { OFFLOAD_ALL = PAR_OFFLOAD_OPTIMIZER | PAR_OFFLOAD_PARAMETERS };

static const struct {
    const char *name;
    par_options options;
    td_dtype dtype;
    int micro;
} cases[] = {
    { "ddp", { .strategy = "ddp", .bucket_bytes = 2 << 20 }, TD_F32, 1 },
    { "ddp, bf16", { .strategy = "ddp", .bucket_bytes = 2 << 20 }, TD_BF16, 2 },
    { "ddp, sums in bf16", { .strategy = "ddp", .bucket_bytes = 2 << 20, .reduce_dtype = TD_BF16 }, TD_BF16, 1 },
    { "zero1", { .strategy = "zero1", .bucket_bytes = 2 << 20 }, TD_F32, 1 },
    { "zero1, bf16", { .strategy = "zero1", .bucket_bytes = 2 << 20 }, TD_BF16, 2 },
    { "zero2", { .strategy = "zero2", .bucket_bytes = 2 << 20 }, TD_F32, 1 },
    { "zero2, bf16", { .strategy = "zero2", .bucket_bytes = 2 << 20 }, TD_BF16, 2 },
    { "zero3", { .strategy = "zero3" }, TD_F32, 1 },
    { "zero3, bf16", { .strategy = "zero3", .prefetch = 3 }, TD_BF16, 2 },
    { "fsdp", { .strategy = "fsdp" }, TD_F32, 1 },
    { "fsdp, bf16", { .strategy = "fsdp" }, TD_BF16, 2 },
    { "fsdp, prefetch 3", { .strategy = "fsdp", .prefetch = 3 }, TD_BF16, 1 },
    { "fsdp, kept", { .strategy = "fsdp", .keep_gathered = true }, TD_BF16, 1 },
    { "fsdp, kept in pairs", { .strategy = "fsdp", .keep_group = 2 }, TD_BF16, 1 },
    { "hsdp", { .strategy = "hsdp:4x2" }, TD_F32, 1 },
    { "hsdp, bf16", { .strategy = "hsdp:2x4" }, TD_BF16, 2 },
    { "ddp, moments offloaded", { .strategy = "ddp", .bucket_bytes = 2 << 20, .offload = PAR_OFFLOAD_OPTIMIZER }, TD_F32, 1 },
    { "zero1, all offloaded", { .strategy = "zero1", .bucket_bytes = 2 << 20, .offload = OFFLOAD_ALL }, TD_BF16, 2 },
    { "zero2, moments offloaded", { .strategy = "zero2", .bucket_bytes = 2 << 20, .offload = PAR_OFFLOAD_OPTIMIZER }, TD_BF16, 2 },
    { "zero3, all offloaded", { .strategy = "zero3", .offload = OFFLOAD_ALL }, TD_BF16, 1 },
    { "fsdp, parameters offloaded", { .strategy = "fsdp", .offload = PAR_OFFLOAD_PARAMETERS }, TD_F32, 2 },
    { "fsdp, all offloaded", { .strategy = "fsdp", .offload = OFFLOAD_ALL }, TD_BF16, 1 },
    { "fsdp+tp", { .strategy = "fsdp+tp:2", .tensor_columns = "h.*.in", .tensor_rows = "h.*.out" }, TD_F32, 1 },
};
enum { CASES = sizeof cases / sizeof *cases };

START_TEST(test_calls_that_touch_the_same_memory_are_in_order)
{
    for (int i = 0; i < CASES; i++) {
        planned p = plan_with(&cases[i].options, cases[i].dtype, cases[i].micro, false);
        ck_assert_int_gt(check_order(&p, cases[i].name), 20);
        close_planned(&p);
    }
}
END_TEST

/* The first gather has nothing before it. Tensor parallelism sums activations, which the next product reads. */
START_TEST(test_collectives_lie_under_products)
{
    for (int i = 0; i < CASES; i++) {
        planned p = plan_with(&cases[i].options, cases[i].dtype, cases[i].micro, false);
        int products = products_beside_collectives(&p), stopped = stalls(&p);
        ck_assert_msg(products >= 3 * BLOCKS, "%s: %d products may run beside a collective", cases[i].name, products);
        ck_assert_msg(stopped <= 1 || cases[i].options.tensor_columns, "%s: computation stands still %d times", cases[i].name, stopped);
        close_planned(&p);
    }
}
END_TEST

/* Beside what one queue would need: a unit's gradient that is still being scattered, and units that are gathered ahead. */
START_TEST(test_what_is_in_flight_is_bounded)
{
    const int64_t unit = 2 * (WIDTH * WIDTH + WIDTH) * 4;
    for (int i = 0; i < CASES; i++) {
        planned beside = plan_with(&cases[i].options, cases[i].dtype, cases[i].micro, false);
        planned in_turn = plan_with(&cases[i].options, cases[i].dtype, cases[i].micro, true);
        int64_t more = beside.plan->live_bytes - in_turn.plan->live_bytes, ahead = cases[i].options.prefetch ? cases[i].options.prefetch : 1;
        ck_assert_msg(more <= (1 + ahead) * unit, "%s: %lld bytes more", cases[i].name, (long long)more);
        close_planned(&beside);
        close_planned(&in_turn);
    }
}
END_TEST

TESTS("queues", test_calls_that_touch_the_same_memory_are_in_order, test_collectives_lie_under_products, test_what_is_in_flight_is_bounded)
