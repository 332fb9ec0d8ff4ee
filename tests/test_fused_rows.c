/* Chains that end in sums and maxima over trailing dimensions: what becomes one call and what does not, and that on the CPU every bit is
 * that of the chain and the reduction apart. Under valgrind, which has no AVX-512, the plain loops run.
 */
#include "core/internal.h"
#include "core/ops/fused.h"
#include "tests/row_forms.h"

#include <tandem/parallel.h>

static void expect_bits(const form *f, const outcome *got, const outcome *want, const char *what)
{
    ck_assert_int_eq(got->count, want->count);
    for (int64_t i = 0; i < want->count; i++)
        ck_assert_msg(!memcmp(&got->values[i], &want->values[i], sizeof(double)), "%s, %s: element %lld of %lld is %.17g, apart %.17g", f->note, what,
                      (long long)i, (long long)want->count, got->values[i], want->values[i]);
}

START_TEST(test_bits_are_those_of_the_reduction_apart)
{
    static const td_dtype dtypes[] = { TD_F32, TD_F64, TD_BF16, TD_F16 };
    const td_shape shapes[] = { TD_SHAPE(5, 16), TD_SHAPE(3, 2, 37), TD_SHAPE(33, 33), TD_SHAPE(7, 511), TD_SHAPE(4, 513), TD_SHAPE(3, 1025),
                                TD_SHAPE(2, 3, 2049), TD_SHAPE(101, 64) };
    for (int f = 0; f < FORMS; f++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int d = 0; d < 4; d++) {
                outcome apart = run(&forms[f], dtypes[d], shapes[s], (run_options){ .passes = s % 2 ? "-rows" : "-fuse" });
                outcome got = run(&forms[f], dtypes[d], shapes[s], (run_options){ 0 });
                ck_assert_msg(got.calls == forms[f].calls && !apart.calls, "%s: %d calls", forms[f].note, got.calls);
                expect_bits(&forms[f], &got, &apart, td_dtype_name(dtypes[d]));
            }
}
END_TEST

/* Rows of several chunks, and more tiles than one thread takes. */
START_TEST(test_long_rows_are_shared_among_threads)
{
    const td_shape shapes[] = { TD_SHAPE(1, 200003), TD_SHAPE(3, 70001), TD_SHAPE(1700, 40) };
    const int long_ones[] = { 1, 2, 4, 6, 7 };
    for (int i = 0; i < 5; i++)
        for (int s = 0; s < 3; s++) {
            const form *f = &forms[long_ones[i]];
            outcome apart = run(f, TD_F32, shapes[s], (run_options){ .passes = "-fuse" });
            for (int threads = 1; threads <= 3; threads++) {
                outcome got = run(f, TD_F32, shapes[s], (run_options){ .threads = threads });
                ck_assert_int_eq(got.calls, f->calls);
                expect_bits(f, &got, &apart, "several threads");
            }
        }
}
END_TEST

START_TEST(test_results_are_right)
{
    enum { R = 3, N = 700 };
    static float x[R * N], w[N];
    double want[R] = { 0 }, most[R];
    for (int i = 0; i < R * N; i++) x[i] = (float)check_normal((uint64_t)i);
    for (int i = 0; i < N; i++) w[i] = (float)check_normal((uint64_t)(5000 + i));
    for (int r = 0; r < R; r++) {
        most[r] = -INFINITY;
        for (int i = 0; i < N; i++) {
            double p = (double)x[r * N + i] * w[i];
            want[r] += p * p;
            most[r] = fmax(most[r], (double)(x[r * N + i] * w[i]));
        }
    }
    td_context *td = open_cpu(TD_F32);
    td_tensor p = td_mul(td_input(td, "x", TD_F32, TD_SHAPE(R, N), x), td_input(td, "w", TD_F32, TD_SHAPE(N), w));
    td_tensor sum = td_sum(td_square(p), TD_LAST, TD_DROP), max = td_max(p, TD_LAST, TD_DROP);
    td_keep(sum), td_keep(max);
    ck_assert(td_step(td));
    float got[R];
    ck_assert(td_read(sum, got));
    for (int r = 0; r < R; r++) /* 512 terms in f32, one after the other where nothing is vectorised */
        ck_assert_double_eq_tol(got[r], want[r], 2e-6 * want[r]);
    ck_assert(td_read(max, got));
    for (int r = 0; r < R; r++) ck_assert(got[r] == most[r]);
    td_close(td);
}
END_TEST

START_TEST(test_a_nan_is_the_largest)
{
    float x[4][40], got[4];
    for (int i = 0; i < 40; i++) x[0][i] = x[1][i] = x[3][i] = -(float)i, x[2][i] = -INFINITY;
    x[1][33] = x[3][5] = NAN;
    td_context *td = open_cpu(TD_F32);
    td_tensor most = td_max(td_scale(td_input(td, "x", TD_F32, TD_SHAPE(4, 40), x), 2), TD_LAST, TD_DROP);
    ck_assert(td_read(most, got));
    ck_assert(got[0] == 0 && isnan(got[1]) && got[2] == -INFINITY && isnan(got[3]));
    td_close(td);
}
END_TEST

/* ---- What is one call */

static runner said;

static td_context *open_saying(const char *stages)
{
    return td_open(&(td_options){ .dtype = TD_F32, .threads = 1, .print = stages, .log = keep_program, .log_user = &said });
}

static td_tensor filled(td_context *td, int64_t rows, int64_t columns) { return check_randn(td, TD_SHAPE(rows, columns)); }

static void expect_program(td_context *td, const char *text)
{
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    ck_assert_str_eq(said.program, text);
    td_close(td);
}

START_TEST(test_the_chain_and_its_sum_are_one_call)
{
    td_context *td = open_saying("fuse");
    td_tensor a = filled(td, 4, 32), b = filled(td, 4, 32);
    td_keep(td_sum(td_square(td_sub(a, b)), TD_LAST, TD_DROP));
    expect_program(td, "-- fuse: 4 nodes\n"
                       "%0 = input[0]  f32 (4, 32)\n"
                       "%1 = input[1]  f32 (4, 32)\n"
                       "%2 = fused_rows[r2 = sub(r0, r1) f32, r2 = square(r2) f32; rows of 32: sum(r2)] %0 %1  f32 (4)\n"
                       "output %2\n");
}
END_TEST

/* What another reads is an output before the reduced ones; what reads a reduced value is a chain of its own. */
START_TEST(test_values_that_are_read_are_outputs)
{
    td_context *td = open_saying("fuse");
    td_tensor x = td_exp(filled(td, 4, 32)), most = td_max(x, TD_LAST, TD_KEEP), sum = td_sum(td_square(x), TD_LAST, TD_KEEP);
    td_keep(td_mul(td_div(x, sum), most));
    expect_program(td, "-- fuse: 4 nodes\n"
                       "%0 = input[0]  f32 (4, 32)\n"
                       "%1, %2, %3 = fused_rows[r1 = exp(r0) f32, r2 = square(r1) f32; rows of 32: max(r1), sum(r2)] %0  f32 (4, 32), "
                       "f32 (4, 1), f32 (4, 1)\n"
                       "%4 = fused[r3 = div(r0, r1) f32, r3 = mul(r3, r2) f32] %1 %3 %2  f32 (4, 32)\n"
                       "output %4\n");
}
END_TEST

/* The sum's gradient is read last: were the group open until then, so would be what it is made of. */
START_TEST(test_a_sum_is_taken_when_nobody_else_may_join)
{
    td_context *td = open_saying("fuse");
    td_tensor a = filled(td, 4, 32), b = filled(td, 4, 32), sum = td_sum(td_mul(a, b), TD_LAST, TD_DROP);
    td_tensor other = td_transpose(td_exp(a), 0, 1);
    td_keep(other), td_keep(sum);
    ck_assert(td_step(td));
    const char *rows = strstr(said.program, "fused_rows["), *copy = strstr(said.program, "transpose");
    ck_assert_msg(rows && copy && rows < copy, "%s", said.program);
    td_close(td);
}
END_TEST

static td_tensor square_of(td_context *td, td_shape shape) { return td_square(check_randn(td, shape)); }

typedef struct apart_case {
    const char *note;
    td_tensor (*record)(td_context *td);
} apart_case;

static td_tensor short_rows(td_context *td) { return td_sum(square_of(td, TD_SHAPE(50, 15)), TD_LAST, TD_DROP); }
static td_tensor leading(td_context *td) { return td_sum(square_of(td, TD_SHAPE(32, 50)), 0, TD_DROP); }
static td_tensor middle(td_context *td) { return td_sum(square_of(td, TD_SHAPE(3, 32, 50)), 1, TD_DROP); }
static td_tensor whole_numbers(td_context *td) { return td_sum(td_square(labels_of(td, TD_SHAPE(4, 32), 1)), TD_LAST, TD_DROP); }
static td_tensor nothing_computed(td_context *td) { return td_sum(check_randn(td, TD_SHAPE(4, 32)), TD_LAST, TD_DROP); }
static td_tensor no_rows_left(td_context *td) { return td_sum(square_of(td, TD_SHAPE(4, 0)), TD_LAST, TD_DROP); }
static td_tensor position(td_context *td) { return td_argmax(square_of(td, TD_SHAPE(4, 32))); }

START_TEST(test_what_stays_apart)
{
    static const apart_case cases[] = {
        { "short rows", short_rows },       { "leading dimensions", leading }, { "dimensions between", middle },
        { "whole numbers", whole_numbers }, { "no chain", nothing_computed },  { "empty rows", no_rows_left },
        { "another reduction", position },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_context *td = open_saying("fuse");
        td_keep(cases[i].record(td));
        ck_assert_msg(td_step(td), "%s: %s", cases[i].note, td_error_text(td));
        ck_assert_msg(!strstr(said.program, "fused_rows["), "%s: %s", cases[i].note, said.program);
        td_close(td);
    }
}
END_TEST

/* Sums of sums, and of other dimensions, do not share a call; a third reduction of the same rows does. */
START_TEST(test_reductions_of_a_call_are_over_the_same_dimensions)
{
    td_context *td = open_saying("fuse");
    td_tensor x = td_square(check_randn(td, TD_SHAPE(20, 32))), rows = td_sum(x, TD_LAST, TD_DROP), all = td_sum(x, TD_ALL, TD_DROP);
    td_keep(rows), td_keep(all), td_keep(td_sum(rows, TD_ALL, TD_DROP));
    expect_program(td, "-- fuse: 7 nodes\n"
                       "%0 = input[0]  f32 (20, 32)\n"
                       "%1, %2 = fused_rows[r1 = square(r0) f32; rows of 32: sum(r1)] %0  f32 (20, 32), f32 (20)\n"
                       "%3 = sum[axes 0 1] %1  f32 ()\n"
                       "output %2\n"
                       "output %3\n"
                       "%4 = sum[axes 0] %2  f32 ()\n"
                       "output %4\n");
}
END_TEST

/* The full output of a chain lies where its input did, and a reduced one elsewhere. */
START_TEST(test_full_outputs_are_made_in_place)
{
    td_context *td = open_saying("plan");
    td_tensor a = filled(td, 32, 32), b = filled(td, 32, 32), e = td_exp(td_matmul(a, b));
    td_keep(td_div(e, td_sum(e, TD_LAST, TD_KEEP)));
    ck_assert(td_step(td));
    ck_assert_str_has(said.program, "   0 matmul slot0+0 slot1+0 -> +0\n"
                                    "   1 fused_rows +0 -> +0 +4096\n"
                                    "   2 div +0 +4096 -> +0\n");
    td_close(td);
}
END_TEST

START_TEST(test_profiles_name_its_functions)
{
    td_context *td = open_cpu(TD_F32);
    ck_assert(td_profile_begin(td, 1));
    td_keep(td_sum(td_square(td_sub(filled(td, 4, 32), filled(td, 4, 32))), TD_LAST, TD_DROP));
    ck_assert(td_step(td));
    td_profile_end(td);
    const td_profile_task *task = NULL;
    for (int64_t i = 0; i < td_profile_count(td); i++)
        if (td_profile_at(td, i).task) task = td_profile_at(td, i).task;
    ck_assert_ptr_nonnull(task);
    ck_assert_str_eq(task->op, "fused_rows");
    ck_assert_str_eq(task->parts, "sub+square+sum");
    ck_assert_str_eq(task->kind, "reduction");
    ck_assert_int_eq(task->flops, 3 * 4 * 32);
    ck_assert_int_eq(task->bytes, (2 * 4 * 32 + 4) * 4);
    td_close(td);
}
END_TEST

/* ---- Ranks */

typedef struct shared_batch {
    int ranks, calls;
    double sum;
    char error[256];
} shared_batch;

enum { BATCH = 60 };

static int sum_of_a_batch(par_world *world, int rank, void *user)
{
    shared_batch *b = user;
    runner o = { .td = NULL };
    double x[BATCH * 32];
    int own = BATCH / b->ranks;
    for (int i = 0; i < own * 32; i++) x[i] = check_normal((uint64_t)(rank * own * 32 + i));
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1, .poison = true, .print = "fuse", .log = keep_program, .log_user = &o });
    if (world) par_attach(td, world, rank, NULL);
    td_tensor sum = td_mean(td_square(td_batch(td, "x", TD_F64, TD_SHAPE(BATCH, 32), x)), TD_ALL, TD_DROP);
    td_keep(sum);
    bool good = td_step(td);
    if (!rank) {
        b->sum = td_item(sum);
        b->calls = count_of(o.program, "fused_rows[");
        snprintf(b->error, sizeof b->error, "%s", td_error_text(td));
    }
    td_close(td);
    return !good;
}

/* A sum over a batch that ranks share is partial: each sums its rows, and what they have is added up. */
START_TEST(test_sums_over_a_shared_dimension_are_partial)
{
    shared_batch alone = { .ranks = 1 }, shared = { .ranks = 3 };
    ck_assert_int_eq(sum_of_a_batch(NULL, 0, &alone), 0);
    ck_assert_msg(!par_run_threads(3, &(par_world_options){ .timeout_s = 20 }, sum_of_a_batch, &shared), "%s", shared.error);
    ck_assert_int_eq(alone.calls, 1);
    ck_assert_int_eq(shared.calls, 1);
    ck_assert_double_eq_tol(shared.sum, alone.sum, 1e-15);
}
END_TEST

typedef struct sharing {
    td_context *td;
    int dim;                                  /* that the ranks share; -1: none */
    int calls;                                /* of fused_rows */
} sharing;

/* In the place of a strategy: fuses the program with its values shared, looks at what comes of it, and goes on without. */
static td_program *fuse_shared(void *self, const td_program *in)
{
    sharing *s = self;
    td_program *plain = td_pass_begin(s->td);
    td_id *map = check_alloc(in->value_count * sizeof *map);
    for (uint32_t n = 0; n < in->node_count; n++) ck_assert(td_copy_node(plain, in, n, map));
    ck_assert(td_pass_end(plain) != NULL);
    td_mesh mesh = s->td->mesh;
    for (uint32_t v = 0; s->dim >= 0 && v < plain->value_count; v++)
        if (plain->values[v].shape.rank == 2) plain->values[v].place = (td_placement){ .kind = { TD_SHARDED }, .dim = { (int8_t)s->dim } };
    s->td->mesh = (td_mesh){ .axes = 1, .size = { 4 }, .world = 4 };
    td_program *fused = td_fuse_pass(plain);
    s->td->mesh = mesh;
    for (uint32_t n = 0; n < fused->node_count; n++) s->calls += fused->nodes[n].op == &td_op_fused_rows;
    for (uint32_t v = 0; v < plain->value_count; v++) plain->values[v].place = in->values[v].place;
    td_program_free(fused);
    return plain;
}

static int calls_shared(int64_t rows, int64_t columns, int dim, int axis)
{
    sharing s = { .td = open_cpu(TD_F32), .dim = dim };
    td_parallel parallel = { .self = &s, .mesh = { .world = 1 }, .place = fuse_shared };
    ck_assert(td_set_parallel(s.td, &parallel));
    td_keep(td_sum(td_square(filled(s.td, rows, columns)), axis, TD_DROP));
    ck_assert_msg(td_step(s.td), "%s", td_error_text(s.td));
    td_close(s.td);
    return s.calls;
}

/* Of 70 columns, 18 a rank, the last rank has 16: what it holds beside them is none of the sum's. */
START_TEST(test_a_dimension_shared_unevenly_stays_apart)
{
    ck_assert_int_eq(calls_shared(5, 72, 1, 1), 1);
    ck_assert_int_eq(calls_shared(5, 70, 1, 1), 0);
    ck_assert_int_eq(calls_shared(9, 3, 0, TD_ALL), 0); /* 4 parts of 3 rows: the last is empty */
    ck_assert_int_eq(calls_shared(8, 16, 0, TD_ALL), 1);
    ck_assert_int_eq(calls_shared(5, 72, 0, 1), 1);     /* rows: what is none of the value's is nobody's sum */
    ck_assert_int_eq(calls_shared(5, 60, 1, 1), 0);     /* 15 columns a rank */
}
END_TEST

TESTS("fused rows", test_bits_are_those_of_the_reduction_apart, test_long_rows_are_shared_among_threads, test_results_are_right,
      test_a_nan_is_the_largest, test_the_chain_and_its_sum_are_one_call, test_values_that_are_read_are_outputs,
      test_a_sum_is_taken_when_nobody_else_may_join, test_what_stays_apart, test_reductions_of_a_call_are_over_the_same_dimensions,
      test_full_outputs_are_made_in_place, test_profiles_name_its_functions, test_sums_over_a_shared_dimension_are_partial,
      test_a_dimension_shared_unevenly_stays_apart)
