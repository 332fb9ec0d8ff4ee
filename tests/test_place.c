/* Placement: every operation gives on several ranks, its inputs cut among them, what it gives on one.
 *
 * Each case of each operation is run with every choice of inputs that can be cut along their first dimension, and its
 * results and gradients compared with one rank's; four ranks also as a mesh of two axes. Then conversions from any placement on such a
 * mesh to any other, and programs whose sizes tempt.
 *
 * Labels: threads
 * Timeout: 300 s
 */
#include "tests/check.h"

#include "core/ops/list.h"
#include "parallel/strategy.h"

#define NAME_OPERATION(name) &td_op_##name,
static const td_op *const operations[] = { TD_OPERATIONS(NAME_OPERATION) };
enum { OPERATIONS = sizeof operations / sizeof *operations, INPUTS = TD_RULE_INPUTS, MOST = 1 << 17 };

typedef struct job {
    const td_op *op;
    const td_case *c;
    uint32_t cut;                             /* bit i: input i is a batch */
    int ranks;
    const char *strategy;
    double *result[INPUTS + 1];               /* the output, then each input's gradient; NULL: none */
    int64_t count[INPUTS + 1];
    char error[512];
} job;

static double *values[INPUTS];
static int32_t *labels[INPUTS];

static int input_count(const td_case *c)
{
    int n = 0;
    while (n < INPUTS && c->in[n].kind != TD_CASE_NONE) n++;
    return n;
}

static int64_t elements_of(const td_case_input *in)
{
    int64_t n = 1;
    for (int d = 0; d < in->rank; d++) n *= in->dim[d];
    return n;
}

static void fill_inputs(const td_case *c)
{
    uint64_t counter = 1;
    for (int i = 0; i < input_count(c); i++) {
        const td_case_input *in = &c->in[i];
        double scale = in->scale == 0 ? 1 : in->scale;
        for (int64_t e = 0; e < elements_of(in); e++) {
            double x = check_normal(counter++);
            values[i][e] = in->kind == TD_CASE_POSITIVE ? 0.3 + fabs(x) : scale * x;
            labels[i][e] = (int32_t)(counter * 7 % (uint64_t)(in->scale > 0 ? in->scale : 1));
        }
    }
}

static td_tensor record_input(td_context *td, const job *j, int i, int rank)
{
    const td_case_input *in = &j->c->in[i];
    td_shape shape = td_shape_of(in->rank, in->dim);
    bool is_label = in->kind == TD_CASE_LABELS;
    int64_t at = j->cut >> i & 1 ? rank * (elements_of(in) / j->ranks) : 0;
    const void *data = is_label ? (const void *)(labels[i] + at) : (const void *)(values[i] + at);
    td_dtype dtype = is_label ? TD_I32 : TD_F64;
    return j->cut >> i & 1 ? td_batch(td, "x", dtype, shape, data) : td_input(td, "x", dtype, shape, data);
}

static bool is_number(td_tensor t) { return td_dtype_at(t) == TD_F64 || td_dtype_at(t) == TD_F32; }

static void read_result(job *j, int k, td_tensor t)
{
    if (td_failed(t) || !j->result[k]) return;
    td_read(t, j->result[k]);
}

/* sum y^2 + y: its gradient is 2 y + 1. */
static td_tensor scalar_of(td_tensor y)
{
    if (td_dtype_at(y) != TD_F64) y = td_cast(y, TD_F64);
    return td_sum(td_add(td_square(y), y), TD_ALL, TD_DROP);
}

static int run_rank(par_world *world, int rank, void *user)
{
    job *j = user;
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .seed = 5, .threads = 1, .poison = true });
    if (world) par_attach(td, world, rank, &(par_options){ .strategy = j->strategy });
    int n = input_count(j->c);
    td_tensor in[INPUTS], gradient[INPUTS];
    for (int i = 0; i < n; i++) in[i] = record_input(td, j, i, rank);
    td_tensor y = td_record_sized(td, j->op, TD_HERE, n, in, j->c->attr, j->c->attr ? j->op->attr_bytes : 0);
    td_keep(y);
    if (rank == 0) j->count[0] = td_shape_elements(td_shape_at(y)) * td_dtype_size(td_dtype_at(y));
    for (int i = 0; i < n; i++) {
        gradient[i] = (td_tensor){ .td = td, .id = TD_NONE };
        if (!j->op->gradient || !is_number(in[i]) || !(is_number(y) || td_dtype_at(y) == TD_BF16)) continue;
        gradient[i] = td_gradient(scalar_of(y), in[i]);
        td_keep(gradient[i]);
        if (rank == 0) j->count[1 + i] = elements_of(&j->c->in[i]) * 8;
    }
    bool good = td_step(td);
    if (rank == 0) {
        read_result(j, 0, y);
        for (int i = 0; i < n; i++) read_result(j, 1 + i, gradient[i]);
        snprintf(j->error, sizeof j->error, "%s", td_error_text(td));
    }
    td_close(td);
    return good ? 0 : 1;
}

static void run_job(job *j, const td_op *op, const td_case *c, uint32_t cut, int ranks, const char *strategy)
{
    j->op = op, j->c = c, j->cut = cut, j->ranks = ranks, j->strategy = strategy;
    memset(j->count, 0, sizeof j->count);
    int failed = par_run_threads(ranks, &(par_world_options){ .timeout_s = 20 }, run_rank, j);
    ck_assert_msg(!failed, "%s on %d ranks under %s, cut %x: %s", op->name, ranks, strategy, cut, j->error);
}

static void compare(const job *got, const job *want)
{
    for (int k = 0; k <= INPUTS; k++) {
        ck_assert_int_eq(got->count[k], want->count[k]);
        for (int64_t e = 0; e < want->count[k] / 8; e++) {
            double x = got->result[k][e], y = want->result[k][e];
            bool same = !memcmp(&x, &y, sizeof x); /* integers and bf16 are compared as bits */
            ck_assert_msg(same || fabs(x - y) <= 1e-12 * fmax(1, fabs(y)), "%s on %d ranks, cut %x: result %d, element %lld is %.17g, one rank's %.17g",
                          got->op->name, got->ranks, got->cut, k, (long long)e, x, y);
        }
    }
}

static uint32_t can_be_cut(const td_case *c, int ranks)
{
    uint32_t bits = 0;
    for (int i = 0; i < input_count(c); i++)
        if (c->in[i].rank && c->in[i].dim[0] && c->in[i].dim[0] % ranks == 0) bits |= 1u << i;
    return bits;
}

static void make_jobs(job *a, job *b)
{
    for (int k = 0; k <= INPUTS; k++) {
        a->result[k] = check_alloc(MOST * sizeof(double));
        b->result[k] = check_alloc(MOST * sizeof(double));
    }
    for (int i = 0; i < INPUTS; i++) {
        values[i] = check_alloc(MOST * sizeof(double));
        labels[i] = check_alloc(MOST * sizeof(int32_t));
    }
}

START_TEST(test_every_operation_gives_one_ranks_result)
{
    static job one, several;
    make_jobs(&one, &several);
    int cells = 0;
    for (int o = 0; o < OPERATIONS; o++)
        for (const td_case *c = operations[o]->cases; c && c->in[0].kind != TD_CASE_NONE; c++) {
            bool small = true;
            for (int i = 0; i < input_count(c); i++) small = small && elements_of(&c->in[i]) <= MOST / 8;
            if (!small) continue;
            fill_inputs(c);
            run_job(&one, operations[o], c, 0, 1, "single");
            for (int way = 2; way <= 5; way++) {
                int ranks = way < 5 ? way : 4;
                uint32_t bits = can_be_cut(c, ranks);
                for (uint32_t cut = bits; cut; cut = (cut - 1) & bits) {
                    run_job(&several, operations[o], c, cut, ranks, way < 5 ? "ddp" : "hsdp:2x2");
                    compare(&several, &one);
                    cells++;
                }
            }
        }
    ck_assert_int_gt(cells, 100);
}
END_TEST

/* ---- Conversions on a mesh of two axes, 2 x 2 and 2 x 3 */

enum { WALK = 12, WALK_ROWS = 12, WALK_COLUMNS = 12 };

typedef struct walk {
    td_placement at[WALK];                    /* where a value is brought, one after the other */
    int ranks;
    double got[WALK_ROWS * WALK_COLUMNS];
    int64_t sent;
    char error[512];
} walk;

/* Both axes: replicated, sharded along rows, along columns, partial. */
static td_placement placement(int i)
{
    static const int8_t kind[] = { TD_REPLICATED, TD_SHARDED, TD_SHARDED, TD_PARTIAL }, dim[] = { 0, 0, 1, 0 };
    return (td_placement){ .kind = { kind[i / 4], kind[i % 4] }, .dim = { dim[i / 4], dim[i % 4] } };
}

/* The batch, sharded over both axes, goes through all of them, and at the end is read whole. */
static td_program *walk_pass(void *self, const td_program *in)
{
    const walk *w = self;
    td_id map[64];
    td_program *out = td_pass_begin(in->td);
    for (uint32_t n = 0; out && n < in->node_count; n++) {
        td_node node = in->nodes[n];
        td_copy_node(out, in, n, map);
        if (node.op != &td_op_input) continue;
        td_id id = map[node.output];
        out->values[id].place = placement(5);
        for (int i = 0; i < WALK && id != TD_NONE; i++) id = par_convert(out, id, w->at[i], &node);
        if (id != TD_NONE) id = par_convert(out, id, placement(0), &node);
        map[node.output] = id;
        if (id == TD_NONE) break;
    }
    return td_pass_end(out);
}

static double element(int row, int column) { return 1 + row * WALK_COLUMNS + column; }

static int take_walk(par_world *world, int rank, void *user)
{
    walk *w = user;
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1, .poison = true });
    int across = 2, group = w->ranks / 2, rows = WALK_ROWS / w->ranks;
    td_transport transport;
    td_mesh mesh = { .axes = 2, .name = { "across", "group" }, .size = { across, group }, .at = { rank / group, rank % group },
                     .rank = rank, .world = w->ranks };
    td_parallel parallel = { .self = w, .mesh = mesh, .unit_multiple = 1, .place = walk_pass, .transport = &transport };
    bool good = par_transport_local(world, rank, td, &parallel.mesh, &transport) && td_set_parallel(td, &parallel);
    double own[WALK_ROWS * WALK_COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < WALK_COLUMNS; c++) own[r * WALK_COLUMNS + c] = element(rank * rows + r, c);
    td_tensor x = td_batch(td, "x", TD_F64, TD_SHAPE(WALK_ROWS, WALK_COLUMNS), own);
    td_keep(x);
    good = good && td_step(td);
    if (rank == 0 && good) td_read(x, w->got);
    if (rank == 0) snprintf(w->error, sizeof w->error, "%s", td_error_text(td));
    if (rank == 0) w->sent = par_sent(world, 0, NULL);
    td_close(td);
    return !good;
}

static int64_t walked(walk *w)
{
    int failed = par_run_threads(w->ranks, &(par_world_options){ .timeout_s = 20 }, take_walk, w);
    ck_assert_msg(!failed, "%s", w->error);
    for (int r = 0; r < WALK_ROWS; r++)
        for (int c = 0; c < WALK_COLUMNS; c++)
            if (w->got[r * WALK_COLUMNS + c] != element(r, c))
                for (int i = 0; i < WALK; i++)
                    ck_assert_msg(i + 1 < WALK, "(%d, %d) is %g, not %g, after walking to %d %d", r, c, w->got[r * WALK_COLUMNS + c],
                                  element(r, c), w->at[i].kind[0] * 10 + w->at[i].dim[0], w->at[i].kind[1] * 10 + w->at[i].dim[1]);
    return w->sent;
}

/* Every pair of placements is one step of some walk. */
static void walk_all(int ranks, td_memory from_memory, td_memory to_memory)
{
    for (int from = 0; from < 16; from++)
        for (int to = 0; to < 16; to += WALK / 2) {
            walk w = { .ranks = ranks };
            for (int i = 0; i < WALK; i += 2) {
                w.at[i] = placement(from), w.at[i + 1] = placement((to + i / 2) % 16);
                w.at[i].memory = (int8_t)from_memory, w.at[i + 1].memory = (int8_t)to_memory;
            }
            walked(&w);
        }
}

START_TEST(test_any_placement_becomes_any_other)
{
    for (int ranks = 4; ranks <= 6; ranks += 2) walk_all(ranks, TD_DEVICE, TD_DEVICE);
    walk_all(4, TD_HOST, TD_DEVICE);
    walk_all(4, TD_DEVICE, TD_HOST);
    walk_all(4, TD_HOST, TD_HOST);
}
END_TEST

/* What is sent from a value partial on both axes: sums are taken of the least there is. The batch's gather at first: 3 x 288 bytes. */
START_TEST(test_the_least_is_sent)
{
    const int64_t whole = WALK_ROWS * WALK_COLUMNS * 8, begin = 3 * whole / 4;
    static const struct { int to; int64_t bytes; } rows[] = {
        { 3 * 4 + 3, 0 },                     /* stays; then an all-reduce over both axes: 2 x 3/4 of the whole */
        { 0 * 4 + 1, 576 + 576 },         /* to all across, to parts in the group: half is scattered, the half all-reduced */
        { 1 * 4 + 0, 576 + 576 },
    };
    for (int i = 0; i < 3; i++) {
        walk w = { .ranks = 4 };
        for (int k = 0; k < WALK; k++) w.at[k] = placement(k ? rows[i].to : 15);
        int64_t end = i ? whole / 2 : 3 * whole / 2; /* gathered again, or summed */
        ck_assert_int_eq(walked(&w), begin + rows[i].bytes + end);
    }
}
END_TEST

/* ---- Programs whose sizes tempt */

/* A size of 1 that stretches is not a part of anything. */
static int stretch(par_world *world, int rank, void *user)
{
    double *out = user, row[3] = { 1, 2, 3 }, x[2] = { 10.0 * rank, 10.0 * rank + 1 };
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1 });
    par_attach(td, world, rank, NULL);
    int ranks = par_world_size(world);
    td_tensor a = td_batch(td, "x", TD_F64, TD_SHAPE(2 * ranks, 1), x), b = td_input(td, "row", TD_F64, TD_SHAPE(1, 3), row);
    td_tensor y = td_sum(td_mul(a, b), 0, TD_DROP);
    td_keep(y);
    bool good = td_step(td) && (rank || td_read(y, out));
    td_close(td);
    return !good;
}

START_TEST(test_a_stretched_dimension_is_not_cut)
{
    double out[3];
    ck_assert_int_eq(par_run_threads(3, NULL, stretch, out), 0); /* 0 1 10 11 20 21: 63 */
    ck_assert_double_eq(out[0], 63);
    ck_assert_double_eq(out[2], 189);
}
END_TEST

/* A penalty on the weights is the same on all ranks: it counts once, beside the batch's loss, which counts on each. */
static int penalty(par_world *world, int rank, void *user)
{
    double *out = user, x[1] = { rank + 1 };
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1 });
    par_attach(td, world, rank, &(par_options){ .strategy = par_world_size(world) > 1 ? "fsdp" : "single" });
    int ranks = par_world_size(world);
    td_state w = td_parameter(td_child(td_root(td), "a"), "w", TD_SHAPE(5), td_init_constant(3));
    td_tensor batch = td_batch(td, "x", TD_F64, TD_SHAPE(ranks, 1), x);
    td_tensor loss = td_add(td_sum(td_mul(batch, td_use(w)), TD_ALL, TD_DROP), td_sum(td_square(td_use(w)), TD_ALL, TD_DROP));
    td_backward(loss);
    td_tensor norm = td_gradient_norm_at(td_gradients_at(td, &w, 1, TD_HERE), TD_HERE);
    td_keep(norm);
    bool good = td_step(td);
    if (rank == 0) out[0] = td_item(norm), out[1] = td_item(loss);
    td_close(td);
    return !good;
}

START_TEST(test_a_replicated_part_of_the_loss_counts_once)
{
    for (int ranks = 1; ranks <= 4; ranks++) {
        double out[2], sum = ranks * (ranks + 1) / 2.0;
        ck_assert_int_eq(par_run_threads(ranks, NULL, penalty, out), 0);
        ck_assert_double_eq_tol(out[0], (sum + 6) * sqrt(5), 1e-12);
        ck_assert_double_eq_tol(out[1], 15 * sum + 45, 1e-12);
    }
}
END_TEST

static int odd_batch(par_world *world, int rank, void *user)
{
    double x[3] = { 0 };
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1 });
    par_attach(td, world, rank, NULL);
    td_keep(td_sum(td_batch(td, "x", TD_F64, TD_SHAPE(5), x), TD_ALL, TD_DROP));
    bool good = td_step(td);
    if (rank == 0) snprintf(user, 512, "%s", td_error_text(td));
    td_close(td);
    return !good;
}

START_TEST(test_a_batch_that_ranks_do_not_divide_is_refused)
{
    char error[512] = "";
    ck_assert_int_ne(par_run_threads(2, &(par_world_options){ .timeout_s = 5 }, odd_batch, error), 0);
    ck_assert_str_has(error, "input: a batch of 5 rows cannot be divided among 2 ranks (tests/test_place.c:");
}
END_TEST

TESTS("place", test_every_operation_gives_one_ranks_result, test_any_placement_becomes_any_other, test_the_least_is_sent,
      test_a_stretched_dimension_is_not_cut,
      test_a_replicated_part_of_the_loss_counts_once, test_a_batch_that_ranks_do_not_divide_is_refused)
