/* Slices at an index that is a value of the program, and caches of keys and values made of them: what is written and what not,
 * a state that is written in place, and attention beside a cache equal to attention over the whole sequence.
 *
 * Labels: valgrind
 */
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/parallel.h>

/* Dead memory is NaN: a cache is not read where it was not written. */
static td_context *open_poisoned(td_dtype dtype)
{
    td_context *td = td_open(&(td_options){ .dtype = dtype, .seed = 1, .threads = 2, .poison = true, .log = check_log_line });
    ck_assert_no_error(td);
    td_set_mode(td, TD_EVAL);
    return td;
}

static td_tensor index_input(td_context *td, int64_t rows, const int32_t *at) { return td_input(td, "at", TD_I32, TD_SHAPE(rows), at); }

/* ---- The operations --------------------------------------------------------------------------------------- */

static void expect_i32(td_tensor t, const int32_t *want, int64_t count)
{
    int32_t got[64];
    ck_assert_int_le(count, 64);
    ck_assert_int_eq(td_shape_elements(td_shape_at(t)), count);
    ck_assert_msg(td_read(t, got), "%s", td_error_text(t.td));
    for (int64_t i = 0; i < count; i++) ck_assert_msg(got[i] == want[i], "element %d is %d, not %d", (int)i, got[i], want[i]);
}

START_TEST(test_what_lies_outside_is_neither_written_nor_read)
{
    static const int32_t x[28] = { 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4 };
    static const int32_t value[14] = { 10, 20, 10, 20, 10, 20, 10, 20, 10, 20, 10, 20, 10, 20 };
    static const int32_t at[7] = { 0, 2, 3, 4, -1, INT32_MIN, INT32_MAX };
    td_context *td = open_poisoned(TD_F32);
    td_tensor t = td_input(td, "x", TD_I32, TD_SHAPE(7, 4), x), i = index_input(td, 7, at);
    td_tensor written = td_slice_write(t, 1, i, td_input(td, "value", TD_I32, TD_SHAPE(7, 2), value));
    expect_i32(written, (int32_t[]){ 10, 20, 3, 4, 1, 2, 10, 20, 1, 2, 3, 10, 1, 2, 3, 4, 20, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4 }, 28);
    expect_i32(td_slice_read(t, -1, i, 2), (int32_t[]){ 1, 2, 3, 4, 4, 0, 0, 0, 0, 1, 0, 0, 0, 0 }, 14);
    td_close(td);
}
END_TEST

START_TEST(test_any_dimension_after_the_first_is_sliced)
{
    static const int32_t x[24] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24 };
    static const int32_t value[8] = { -1, -2, -3, -4, -5, -6, -7, -8 }, at[2] = { 2, 0 };
    td_context *td = open_poisoned(TD_F32);
    td_tensor t = td_input(td, "x", TD_I32, TD_SHAPE(2, 2, 3, 2), x), i = index_input(td, 2, at);
    td_tensor two = td_slice_write(t, 2, i, td_input(td, "value", TD_I32, TD_SHAPE(2, 2, 1, 2), value));
    expect_i32(two, (int32_t[]){ 1, 2, 3, 4, -1, -2, 7, 8, 9, 10, -3, -4, -5, -6, 15, 16, 17, 18, -7, -8, 21, 22, 23, 24 }, 24);
    td_tensor one = td_slice_read(t, 1, i, 1);
    expect_i32(one, (int32_t[]){ 0, 0, 0, 0, 0, 0, 13, 14, 15, 16, 17, 18 }, 12);
    td_close(td);
}
END_TEST

START_TEST(test_bytes_and_halves_are_moved_as_they_are)
{
    static const uint8_t bytes[6] = { 1, 2, 3, 4, 5, 6 }, byte[2] = { 255, 128 };
    static const int32_t at[2] = { 1, 2 };
    float x[6] = { 1, 2, 3, 4, 5, 6 }, v[2] = { 1.00390625f, -3 }, narrow[6];
    td_context *td = open_poisoned(TD_F32);
    td_tensor i = index_input(td, 2, at);
    td_tensor t = td_slice_write(td_input(td, "x", TD_U8, TD_SHAPE(2, 3), bytes), 1, i, td_input(td, "v", TD_U8, TD_SHAPE(2, 1), byte));
    td_tensor wide = td_input(td, "x", TD_F32, TD_SHAPE(2, 3), x), one = td_input(td, "v", TD_F32, TD_SHAPE(2, 1), v);
    td_tensor half = td_cast(td_slice_write(td_cast(wide, TD_BF16), 1, i, td_cast(one, TD_BF16)), TD_F32);
    uint8_t got[6];
    ck_assert(td_read(t, got));
    ck_assert_mem_eq(got, ((uint8_t[]){ 1, 255, 3, 4, 5, 128 }), 6);
    ck_assert(td_read(half, narrow));
    ck_assert_mem_eq(narrow, ((float[]){ 1, 1, 3, 4, 5, -3 }), sizeof narrow); /* 1.00390625 rounds to even */
    td_close(td);
}
END_TEST

START_TEST(test_nothing_is_written_and_read)
{
    static const int32_t at[2] = { 0, 1 };
    td_context *td = open_poisoned(TD_F32);
    td_tensor none = td_fill(td, TD_I32, TD_SHAPE(2, 0), 0), rows = td_fill(td, TD_I32, TD_SHAPE(0, 3), 0);
    td_tensor some = td_fill(td, TD_I32, TD_SHAPE(2, 3), 7), i = index_input(td, 2, at), no_rows = index_input(td, 0, NULL);
    expect_i32(td_slice_write(some, 1, i, none), (int32_t[]){ 7, 7, 7, 7, 7, 7 }, 6);
    expect_i32(td_slice_write(none, 1, i, none), NULL, 0);
    expect_i32(td_slice_read(none, 1, i, 0), NULL, 0);
    expect_i32(td_slice_read(some, 1, i, 0), NULL, 0);
    expect_i32(td_slice_write(rows, 1, no_rows, rows), NULL, 0);
    expect_i32(td_slice_read(rows, 1, no_rows, 2), NULL, 0);
    td_close(td);
}
END_TEST

#define EXPECT_ERROR(call, text)                        \
    do {                                                \
        ck_assert(td_failed(call));                     \
        ck_assert_str_has(td_error_text(td), (text));   \
        td_clear_error(td);                             \
    } while (0)

START_TEST(test_what_does_not_fit_is_refused)
{
    static const int32_t at[3] = { 0 };
    td_context *td = open_cpu(TD_F32);
#define AT(rows) index_input(td, (rows), at)
    EXPECT_ERROR(td_slice_write(ones(td, 2, 3), 0, AT(2), ones(td, 2, 3)),
                 "slice_write: dimension 0 of shape (2, 3) cannot be sliced: it must be one after the first, which counts rows");
    EXPECT_ERROR(td_slice_read(ones(td, 2, 3), 2, AT(2), 1), "slice_read: dimension 2 of shape (2, 3) cannot be sliced");
    EXPECT_ERROR(td_slice_read(ones(td, 2, 3), -2, AT(2), 1), "slice_read: dimension -2 of shape (2, 3) cannot be sliced");
    EXPECT_ERROR(td_slice_write(ones(td, 2, 3), 1, AT(2), ones(td, 2, 4)),
                 "slice_write: value (2, 4) is no slice of x (2, 3) along dimension 1");
    EXPECT_ERROR(td_slice_write(ones(td, 2, 3, 5), 1, AT(2), ones(td, 2, 1, 4)),
                 "slice_write: value (2, 1, 4) is no slice of x (2, 3, 5) along dimension 1");
    EXPECT_ERROR(td_slice_write(ones(td, 2, 3), 1, AT(2), td_fill(td, TD_I32, TD_SHAPE(2, 1), 0)),
                 "slice_write: x is f32 and the value i32; cast the value");
    EXPECT_ERROR(td_slice_write(ones(td, 2, 3), 1, AT(3), ones(td, 2, 1)),
                 "slice_write: the index must be (2) i32, one for each row of x, got (3) i32");
    EXPECT_ERROR(td_slice_read(ones(td, 2, 3), 1, ones(td, 2), 1),
                 "slice_read: the index must be (2) i32, one for each row of x, got (2) f32");
    EXPECT_ERROR(td_slice_read(ones(td, 2, 3), 1, AT(2), 4),
                 "slice_read: 4 of dimension 1 of shape (2, 3) cannot be read: from 0 to 3 can");
    EXPECT_ERROR(td_slice_read(ones(td, 2, 3), 1, AT(2), -1), "slice_read: -1 of dimension 1");
    td_close(td);
}
END_TEST

/* ---- State written in place ------------------------------------------------------------------------------- */

/* Two caches (2, heads, size, depth), written and read for three tokens: what the step costs. */
static td_report cost_of(int64_t heads, int64_t size, int64_t depth, int64_t tokens)
{
    td_context *td = open_poisoned(TD_F32);
    td_shape shape = TD_SHAPE(2, heads, size, depth);
    td_state keys = td_buffer(td_root(td), "keys", TD_F32, shape, td_init_constant(0));
    td_state values = td_buffer(td_root(td), "values", TD_F32, shape, td_init_constant(0));
    for (int32_t step = 0; step < 3; step++) {
        int32_t at[2] = { step, 2 * step };
        td_tensor i = index_input(td, 2, at), k = randn(td, 2, heads, tokens, depth), v = randn(td, 2, heads, tokens, depth), got[2];
        td_assign(keys, td_slice_write(td_use(keys), 2, i, k));
        td_assign(values, td_slice_write(td_use(values), 2, i, v));
        got[0] = td_slice_read(td_use(keys), 2, i, tokens);
        got[1] = td_slice_read(td_use(values), 2, i, tokens);
        td_tensor all[4] = { k, v, got[0], got[1] };
        for (int j = 0; j < 4; j++) td_keep(all[j]);
        ck_assert_msg(td_step(td), "%s", td_error_text(td));
        ck_assert_tensor_near(got[0], k, 0);
        ck_assert_tensor_near(got[1], v, 0);
    }
    td_report r = td_last_report(td);
    td_close(td);
    return r;
}

START_TEST(test_a_write_costs_its_slice_whatever_the_size_of_the_cache)
{
    static const int64_t sizes[] = { 8, 4096 };
    for (int i = 0; i < 2; i++) {
        td_report r = cost_of(2, sizes[i], 8, 1);
        ck_assert_int_eq(r.plans, 1);
        ck_assert_int_eq(r.calls, 6);                           /* two writes, two reads, two inputs kept */
        ck_assert_int_eq(r.bytes_moved, 4 * (2 * 128 + 8) + 2 * 2 * 128);
        ck_assert_int_eq(r.step_bytes, 4 * 128);                /* what is kept */
        r = cost_of(1, sizes[i] + 1, 3, 2);                     /* no multiple of anything; two tokens */
        ck_assert_int_eq(r.bytes_moved, 4 * (2 * 48 + 8) + 2 * 2 * 48);
        ck_assert_int_eq(r.step_bytes, 4 * 64);
        ck_assert_int_eq(r.state_bytes, 2 * 2 * (sizes[i] + 1) * 3 * 4);
    }
}
END_TEST

enum { ROWS = 2, SIZE = 5, ELEMENTS = ROWS * SIZE };

/* Caches (2, 5) f64 and what they should hold. */
typedef struct caches {
    td_context *td;
    td_state a, b;
    double in_a[ELEMENTS], in_b[ELEMENTS];
} caches;

static caches open_caches(void)
{
    caches c = { .td = open_poisoned(TD_F64) };
    c.a = td_buffer(td_root(c.td), "a", TD_F64, TD_SHAPE(ROWS, SIZE), td_init_constant(0));
    c.b = td_buffer(td_root(c.td), "b", TD_F64, TD_SHAPE(ROWS, SIZE), td_init_constant(0));
    for (int i = 0; i < ELEMENTS; i++) {
        c.in_a[i] = i + 1;
        c.in_b[i] = -i - 1;
    }
    ck_assert(td_state_write(c.a, 0, ELEMENTS, c.in_a));
    ck_assert(td_state_write(c.b, 0, ELEMENTS, c.in_b));
    return c;
}

static void expect_caches(const caches *c, const double *a, const double *b)
{
    double got[ELEMENTS];
    ck_assert_no_error(c->td);
    ck_assert(td_state_read(c->a, 0, ELEMENTS, got));
    ck_assert_near(got, a, ELEMENTS, 0);
    ck_assert(td_state_read(c->b, 0, ELEMENTS, got));
    ck_assert_near(got, b, ELEMENTS, 0);
    td_close(c->td);
}

static const int32_t first_at[ROWS] = { 1, 3 }, second_at[ROWS] = { 4, 0 };
static const double first[ROWS] = { 100, 200 }, second[ROWS] = { 300, 400 };
static const double a_first[ELEMENTS] = { 1, 100, 3, 4, 5, 6, 7, 8, 200, 10 };

static td_tensor written(td_tensor x, const int32_t *at, const double *value)
{
    td_tensor v = td_input(x.td, "value", TD_F64, TD_SHAPE(ROWS, 1), value);
    return td_slice_write(x, 1, index_input(x.td, ROWS, at), v);
}

START_TEST(test_the_old_value_read_later_is_the_old_one)
{
    caches c = open_caches();
    td_tensor old = td_use(c.a), was, is;
    td_assign(c.a, written(old, first_at, first));
    is = td_scale(td_use(c.a), 2);
    was = td_add(old, is);
    td_keep(was);
    td_keep(old);
    ck_assert(td_step(c.td));
    double got[ELEMENTS];
    ck_assert(td_read(was, got));
    ck_assert_near(got, ((double[]){ 3, 202, 9, 12, 15, 18, 21, 24, 409, 30 }), ELEMENTS, 0);
    ck_assert(td_read(old, got));
    ck_assert_near(got, c.in_a, ELEMENTS, 0);
    expect_caches(&c, a_first, c.in_b);
}
END_TEST

START_TEST(test_a_cache_read_before_and_after)
{
    caches c = open_caches();
    td_tensor before = td_sum(td_use(c.a), TD_ALL, TD_DROP), after;
    td_keep(before);
    td_assign(c.a, written(td_use(c.a), first_at, first));
    after = td_sum(td_use(c.a), TD_ALL, TD_DROP);
    td_keep(after);
    ck_assert(td_step(c.td));
    ck_assert_int_eq(td_last_report(c.td).step_bytes, 2 * 64); /* the two sums: in place */
    ck_assert_double_eq(td_item(before), 55);
    ck_assert_double_eq(td_item(after), 344);
    expect_caches(&c, a_first, c.in_b);
}
END_TEST

START_TEST(test_two_writes_in_one_step)
{
    caches c = open_caches();
    td_assign(c.a, written(td_use(c.a), first_at, first));
    td_tensor between = td_sum(td_use(c.a), 1, TD_DROP);
    td_keep(between);
    td_assign(c.a, written(td_use(c.a), second_at, second));
    td_tensor after = td_sum(td_use(c.a), 1, TD_DROP);
    td_keep(after);
    ck_assert(td_step(c.td));
    ck_assert_int_eq(td_last_report(c.td).step_bytes, 2 * 64);
    double got[ROWS];
    ck_assert(td_read(between, got));
    ck_assert_near(got, ((double[]){ 113, 231 }), ROWS, 0);
    ck_assert(td_read(after, got));
    ck_assert_near(got, ((double[]){ 408, 625 }), ROWS, 0);
    expect_caches(&c, (double[]){ 1, 100, 3, 4, 300, 400, 7, 8, 200, 10 }, c.in_b);
}
END_TEST

START_TEST(test_two_writes_of_which_the_first_is_read_last)
{
    caches c = open_caches();
    td_tensor one = written(td_use(c.a), first_at, first);
    td_assign(c.a, one);
    td_assign(c.a, written(td_use(c.a), second_at, second));
    td_tensor sum = td_sum(one, 1, TD_DROP);
    td_keep(sum);
    ck_assert(td_step(c.td));
    double got[ROWS];
    ck_assert(td_read(sum, got));
    ck_assert_near(got, ((double[]){ 113, 231 }), ROWS, 0);
    expect_caches(&c, (double[]){ 1, 100, 3, 4, 300, 400, 7, 8, 200, 10 }, c.in_b);
}
END_TEST

START_TEST(test_caches_are_swapped_and_written)
{
    caches c = open_caches();
    td_tensor a = td_use(c.a), b = td_use(c.b);
    td_assign(c.a, written(b, first_at, first));
    td_assign(c.b, written(a, second_at, second));
    ck_assert(td_step(c.td));
    expect_caches(&c, (double[]){ -1, 100, -3, -4, -5, -6, -7, -8, 200, -10 }, (double[]){ 1, 2, 3, 4, 300, 400, 7, 8, 9, 10 });
}
END_TEST

START_TEST(test_one_value_for_two_caches)
{
    caches c = open_caches();
    td_assign(c.b, written(td_use(c.b), first_at, first));
    td_assign(c.a, td_use(c.b));
    ck_assert(td_step(c.td));
    const double want[ELEMENTS] = { -1, 100, -3, -4, -5, -6, -7, -8, 200, -10 };
    expect_caches(&c, want, want);
}
END_TEST

/* What is written lies in the memory that is written to. */
START_TEST(test_a_cache_is_moved_along_itself)
{
    static const int32_t at[ROWS] = { 2, -1 };
    caches c = open_caches();
    td_tensor a = td_use(c.a);
    td_assign(c.a, td_slice_write(a, 1, index_input(c.td, ROWS, at), a));
    ck_assert(td_step(c.td));
    ck_assert_int_eq(td_last_report(c.td).step_bytes, 0);
    expect_caches(&c, (double[]){ 1, 2, 1, 2, 3, 7, 8, 9, 10, 10 }, c.in_b);
}
END_TEST

START_TEST(test_a_value_asked_for_before_the_step_assigns_nothing)
{
    caches c = open_caches();
    td_assign(c.a, written(td_use(c.a), first_at, first));
    ck_assert_double_eq(td_item(td_sum(td_use(c.a), TD_ALL, TD_DROP)), 344);
    double got[ELEMENTS];
    ck_assert(td_state_read(c.a, 0, ELEMENTS, got));
    ck_assert_near(got, c.in_a, ELEMENTS, 0);
    ck_assert(td_step(c.td));
    expect_caches(&c, a_first, c.in_b);
}
END_TEST

/* An index that is state: nothing comes from the host. */
START_TEST(test_a_position_that_counts_itself)
{
    caches c = open_caches();
    td_state at = td_buffer(td_root(c.td), "at", TD_I32, TD_SHAPE(ROWS), td_init_constant(1));
    for (int step = 0; step < 3; step++) {
        td_tensor now = td_use(at), v = td_scale(td_fill(c.td, TD_F64, TD_SHAPE(ROWS, 1), 100), step + 1);
        td_assign(at, td_add(now, td_fill(c.td, TD_I32, TD_SHAPE(ROWS), 1)));
        td_assign(c.a, td_slice_write(td_use(c.a), 1, now, v));
        ck_assert_msg(td_step(c.td), "%s", td_error_text(c.td));
    }
    ck_assert_int_eq(td_last_report(c.td).plans, 1);
    expect_caches(&c, (double[]){ 1, 100, 200, 300, 5, 6, 100, 200, 300, 10 }, c.in_b);
}
END_TEST

START_TEST(test_eager_writes_once)
{
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .eager = true, .log = check_log_line });
    td_state a = td_buffer(td_root(td), "a", TD_F64, TD_SHAPE(ROWS, SIZE), td_init_constant(1));
    td_assign(a, td_add(written(td_use(a), first_at, first), td_use(a)));
    td_assign(a, written(td_use(a), second_at, second));
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    double got[ELEMENTS];
    ck_assert(td_state_read(a, 0, ELEMENTS, got));
    ck_assert_near(got, ((double[]){ 2, 101, 2, 2, 300, 400, 2, 2, 201, 2 }), ELEMENTS, 0);
    td_close(td);
}
END_TEST

START_TEST(test_a_conditional_write)
{
    caches c = open_caches();
    td_assign_if(c.a, written(td_use(c.a), first_at, first), scalar(c.td, 1));
    td_assign_if(c.b, written(td_use(c.b), first_at, first), scalar(c.td, 0));
    ck_assert(td_step(c.td));
    expect_caches(&c, a_first, c.in_b);
}
END_TEST

START_TEST(test_a_gradient_flows_through_a_cache)
{
    caches c = open_caches();
    td_tensor v = td_input(c.td, "value", TD_F64, TD_SHAPE(ROWS, 1), first), b = td_use(c.b);
    td_assign(c.a, td_slice_write(b, 1, index_input(c.td, ROWS, first_at), v));
    td_tensor y = td_sum(td_square(td_use(c.a)), TD_ALL, TD_DROP), dv = td_gradient(y, v), db = td_gradient(y, b);
    td_keep(dv);
    td_keep(db);
    ck_assert(td_step(c.td));
    double got[ELEMENTS];
    ck_assert(td_read(dv, got));
    ck_assert_near(got, ((double[]){ 200, 400 }), ROWS, 0);
    ck_assert(td_read(db, got));
    ck_assert_near(got, ((double[]){ -2, 0, -6, -8, -10, -12, -14, -16, 0, -20 }), ELEMENTS, 0);
    expect_caches(&c, (double[]){ -1, 100, -3, -4, -5, -6, -7, -8, 200, -10 }, c.in_b);
}
END_TEST

/* Each rank has one row of the batch; the cache is the same on all. */
static int write_on_rank(par_world *world, int rank, void *user)
{
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1, .poison = true });
    par_attach(td, world, rank, NULL);
    bool cut = par_world_size(world) == ROWS;
    td_state a = td_buffer(td_root(td), "a", TD_F64, TD_SHAPE(ROWS, SIZE), td_init_constant(3));
    td_tensor at = td_batch(td, "at", TD_I32, TD_SHAPE(ROWS), first_at + (cut ? rank : 0));
    td_tensor v = td_batch(td, "value", TD_F64, TD_SHAPE(ROWS, 1), first + (cut ? rank : 0));
    td_assign(a, td_slice_write(td_use(a), 1, at, v));
    bool good = td_step(td) && (rank != ROWS - 1 || td_state_read(a, 0, ELEMENTS, user));
    td_close(td);
    return !good;
}

START_TEST(test_rows_written_by_several_ranks)
{
    double got[ELEMENTS];
    ck_assert_int_eq(par_run_threads(ROWS, NULL, write_on_rank, got), 0);
    ck_assert_near(got, ((double[]){ 3, 100, 3, 3, 3, 3, 3, 3, 200, 3 }), ELEMENTS, 0);
}
END_TEST

/* ---- Attention beside a cache ----------------------------------------------------------------------------- */

enum { BATCH = 2, LENGTH = 11, WIDTH = 12, HEADS = 4, SHARED = 2, DEPTH = 6, ROOM = 80 }; /* ROOM: more than a block of keys */

typedef struct layer {
    td_context *td;
    td_state q, k, v, o;
    td_state keys, values;                    /* caches */
    td_dtype cached;
} layer;

static layer open_layer(td_dtype dtype, td_dtype cached)
{
    td_context *td = open_poisoned(dtype);
    td_module root = td_root(td);
    td_init init = td_init_normal(0.5);
    td_shape cache = TD_SHAPE(BATCH, SHARED, ROOM, DEPTH);
    return (layer){ .td = td, .cached = cached,
                    .q = td_parameter(root, "q", TD_SHAPE(HEADS * DEPTH, WIDTH), init),
                    .k = td_parameter(root, "k", TD_SHAPE(SHARED * DEPTH, WIDTH), init),
                    .v = td_parameter(root, "v", TD_SHAPE(SHARED * DEPTH, WIDTH), init),
                    .o = td_parameter(root, "o", TD_SHAPE(WIDTH, HEADS * DEPTH), init),
                    .keys = td_buffer(root, "keys", cached, cache, td_init_constant(NAN)), /* what is not seen is not read */
                    .values = td_buffer(root, "values", cached, cache, td_init_constant(NAN)) };
}

/* (B, T, heads * DEPTH) -> (B, heads, T, DEPTH) */
static td_tensor heads_of(td_tensor x, int64_t heads)
{
    td_shape s = td_shape_at(x);
    return td_transpose(td_reshape(x, s.dim[0], s.dim[1], heads, DEPTH), 1, 2);
}

static td_tensor projected(td_tensor x, td_state weight, int64_t heads)
{
    return heads_of(td_matmul_with(x, td_use(weight), 0, 1), heads);
}

/* x (B, T, WIDTH) at positions at[b] on, or with `at` TD_NO_TENSOR the whole sequence without a cache. */
static td_tensor layer_apply(const layer *l, td_tensor x, td_tensor at)
{
    td_rotary_options turn = { .positions = at };
    td_attention_options see = { .causal = true, .positions = at };
    td_tensor q = td_rotary(projected(x, l->q, HEADS), &turn);
    td_tensor k = td_cast(td_rotary(projected(x, l->k, SHARED), &turn), l->cached), v = td_cast(projected(x, l->v, SHARED), l->cached);
    if (!td_failed(at)) {
        td_assign(l->keys, td_slice_write(td_use(l->keys), 2, at, k));
        td_assign(l->values, td_slice_write(td_use(l->values), 2, at, v));
        k = td_use(l->keys);
        v = td_use(l->values);
    }
    td_tensor y = td_cast(td_attention(td_cast(q, l->cached), k, v, &see), td_float(l->td));
    y = td_reshape(td_transpose(y, 1, 2), BATCH, -1, HEADS * DEPTH);
    return td_matmul_with(y, td_use(l->o), 0, 1);
}

/* Token t of row b. */
static double element_of(int b, int t, int c) { return check_normal((uint64_t)((b * LENGTH + t) * WIDTH + c)); }

/* Inputs [from[b], from[b] + count) of each row. */
static td_tensor tokens(const layer *l, const int32_t *from, int count)
{
    td_dtype dtype = td_float(l->td);
    void *x = check_alloc((size_t)(BATCH * count * WIDTH * td_dtype_size(dtype)));
    for (int i = 0; i < BATCH * count * WIDTH; i++) {
        int b = i / WIDTH / count;
        double value = element_of(b, from[b] + i / WIDTH % count, i % WIDTH);
        if (dtype == TD_F64)
            ((double *)x)[i] = value;
        else
            ((float *)x)[i] = (float)value;
    }
    return td_input(l->td, "x", dtype, TD_SHAPE(BATCH, count, WIDTH), x);
}

/* The whole sequence at once: (BATCH, LENGTH, WIDTH). */
static const double *whole(const layer *l)
{
    td_tensor y = layer_apply(l, tokens(l, (int32_t[BATCH]){ 0 }, LENGTH), TD_NO_TENSOR);
    td_keep(y);
    ck_assert_msg(td_step(l->td), "%s", td_error_text(l->td));
    return check_read(y, "y", __FILE__, __LINE__);
}

/* `count` tokens of each row from `at` on, which are `real[b]` of row b's; the others are padding. */
static void decode(const layer *l, const int32_t *at, int count, const int *real, const double *want, double tolerance)
{
    td_tensor y = layer_apply(l, tokens(l, at, count), index_input(l->td, BATCH, at));
    td_keep(y);
    ck_assert_msg(td_step(l->td), "%s", td_error_text(l->td));
    const double *got = check_read(y, "y", __FILE__, __LINE__);
    for (int b = 0; b < BATCH; b++)
        ck_assert_near(got + b * count * WIDTH, want + (b * LENGTH + at[b]) * WIDTH, real[b] * WIDTH, tolerance);
}

static void decode_all(const layer *l, double tolerance)
{
    const double *want = whole(l);
    for (int32_t t = 0; t < LENGTH; t++) decode(l, (int32_t[]){ t, t }, 1, (int[]){ 1, 1 }, want, tolerance);
    ck_assert_int_eq(td_last_report(l->td).plans, 2); /* the whole, and every token */
    td_close(l->td);
}

START_TEST(test_decoding_token_by_token_gives_the_whole_sequence)
{
    layer l = open_layer(TD_F64, TD_F64);
    decode_all(&l, 1e-12);
}
END_TEST

START_TEST(test_rows_at_different_positions)
{
    layer l = open_layer(TD_F64, TD_F64);
    const double *want = whole(&l);
    decode(&l, (int32_t[]){ 0, 0 }, 6, (int[]){ 3, 6 }, want, 1e-12); /* prompts of 3 and 6 tokens, the shorter one padded */
    for (int32_t t = 0; t < LENGTH - 6; t++) decode(&l, (int32_t[]){ 3 + t, 6 + t }, 1, (int[]){ 1, 1 }, want, 1e-12);
    td_close(l.td);
}
END_TEST

START_TEST(test_a_prompt_in_parts)
{
    layer l = open_layer(TD_F64, TD_F64);
    const double *want = whole(&l);
    decode(&l, (int32_t[]){ 0, 0 }, 4, (int[]){ 4, 4 }, want, 1e-12);
    decode(&l, (int32_t[]){ 4, 4 }, 4, (int[]){ 4, 4 }, want, 1e-12);
    decode(&l, (int32_t[]){ 8, 8 }, 3, (int[]){ 3, 3 }, want, 1e-12);
    td_close(l.td);
}
END_TEST

START_TEST(test_a_cache_of_bf16)
{
    layer l = open_layer(TD_F64, TD_BF16);
    decode_all(&l, 1e-12); /* keys and values are rounded alike on both sides */
}
END_TEST

START_TEST(test_a_cache_of_bf16_under_bf16)
{
    if (!has_bf16_products()) SKIP("no bf16 products");
    layer l = open_layer(TD_BF16, TD_BF16);
    decode_all(&l, 0x1p-6); /* products of other sizes may round another way, by 2^-8, one after the other */
}
END_TEST

/* A layer's cache is in the dtype of the layer's products, whatever the context's: keys of an f32 layer are not rounded. */
START_TEST(test_a_layers_cache_has_the_dtype_of_its_products)
{
    td_context *td = open_cpu(TD_BF16);
    nn_attention as_all = nn_attention_make(td_root(td), "as_all", 8, 2), exact = nn_attention_make(td_root(td), "exact", 8, 2);
    td_set_dtype(exact.at, TD_F32);
    ck_assert_int_eq(td_state_dtype(nn_cache_make(&as_all, "cache", 1, 4).keys), TD_BF16);
    ck_assert_int_eq(td_state_dtype(nn_cache_make(&exact, "cache", 1, 4).keys), TD_F32);
    ck_assert_int_eq(td_state_dtype(nn_cache_make(&exact, "another", 1, 4).values), TD_F32);
    td_close(td);
}
END_TEST

START_TEST(test_a_cache_without_positions_is_refused)
{
    char expected[512];
    td_context *td = open_cpu(TD_F32);
    nn_attention a = nn_attention_make(td_root(td), "a", 8, 2);
    nn_cache cache = nn_cache_make(&a, "cache", 1, 4);
    td_tensor x = td_fill(td, TD_F32, TD_SHAPE(1, 1, 8), 1);
    nn_attention_apply_to(&a, x, &(nn_sequence){ .cache = &cache });
    snprintf(expected, sizeof expected, "attention 'a': a cache needs the positions of x, to know where its keys and values go (%s:%d)",
             __FILE__, __LINE__ - 2);
    ck_assert_str_eq(td_error_text(td), expected);
    td_close(td);
}
END_TEST

TESTS("cache", test_what_lies_outside_is_neither_written_nor_read, test_any_dimension_after_the_first_is_sliced,
      test_bytes_and_halves_are_moved_as_they_are, test_nothing_is_written_and_read, test_what_does_not_fit_is_refused,
      test_a_write_costs_its_slice_whatever_the_size_of_the_cache, test_the_old_value_read_later_is_the_old_one,
      test_a_cache_read_before_and_after, test_two_writes_in_one_step, test_two_writes_of_which_the_first_is_read_last,
      test_caches_are_swapped_and_written, test_one_value_for_two_caches, test_a_cache_is_moved_along_itself,
      test_a_value_asked_for_before_the_step_assigns_nothing, test_a_position_that_counts_itself,
      test_eager_writes_once, test_a_conditional_write, test_a_gradient_flows_through_a_cache,
      test_rows_written_by_several_ranks, test_decoding_token_by_token_gives_the_whole_sequence, test_rows_at_different_positions,
      test_a_prompt_in_parts, test_a_cache_of_bf16, test_a_cache_of_bf16_under_bf16,
      test_a_layers_cache_has_the_dtype_of_its_products, test_a_cache_without_positions_is_refused)
