/* Ranks as threads: what collectives give, count and refuse; that they meet in step; how disagreements are named.
 * Labels: threads
 */
#include <time.h>

#include "tests/check.h"
#include "tests/ranks.h"

static const par_world_options small = { .timeout_s = 20, .staging_bytes = 4096 };
static const par_world_options hasty = { .timeout_s = 0.3, .staging_bytes = 4096 };

static void sleep_s(double seconds)
{
    nanosleep(
        &(struct timespec){ .tv_sec = (time_t)seconds, .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds)) },
        NULL);
}

/* What each rank of a test saw. */
typedef struct seen {
    char text[PAR_MAX_RANKS][PAR_MESSAGE_BYTES];
    td_code code[PAR_MAX_RANKS];
    double seconds; /* from the first rank's start to its end */
    int mode;
} seen;

/* A rank of a test: its context and transport. */
typedef struct one {
    td_context *td;
    td_transport t;
} one;

static one join(par_world *world, int rank)
{
    one o = { .td = td_open(&(td_options){ .log = ranks_quiet, .threads = 1 }) };
    par_transport_local(world, rank, o.td, NULL, &o.t);
    return o;
}

static int leave(one *o, int rank, seen *s)
{
    s->code[rank] = td_error(o->td);
    snprintf(s->text[rank], sizeof s->text[rank], "%s", td_error_text(o->td));
    td_close(o->td);
    return 0;
}

static seen *run(int ranks, const par_world_options *options, int mode, int (*body)(par_world *, int, void *))
{
    seen *s = check_alloc(sizeof *s);
    s->mode = mode;
    double begin = par_seconds();
    ck_assert_int_eq(par_run_threads(ranks, options, body, s), 0);
    s->seconds = par_seconds() - begin;
    return s;
}

static void assert_all_failed(const seen *s, int ranks, const char *text)
{
    for (int r = 0; r < ranks; r++) {
        ck_assert_str_eq(s->text[r], text);
        ck_assert_int_eq(s->code[r], TD_ERROR_PARALLEL);
    }
}

/* ---- Results --------------------------------------------------------------------------------------------- */

static int every_collective(par_world *world, int rank, void *user)
{
    (void)user;
    return ranks_every_collective(world, rank);
}

START_TEST(test_collectives_equal_plain_sums_in_rank_order_to_the_bit)
{
    for (int ranks = 1; ranks <= 5; ranks++)
        ck_assert_int_eq(par_run_threads(ranks, &small, every_collective, NULL), 0);
}
END_TEST

START_TEST(test_collectives_work_through_a_staging_buffer_of_the_usual_size)
{
    ck_assert_int_eq(par_run_threads(3, NULL, every_collective, NULL), 0);
}
END_TEST

/* bf16: 256 + 1 is a tie and goes to the even 256; summed in f32 first, 256 + 1 + 1 is 258. */
static int bf16_rounding(par_world *world, int rank, void *user)
{
    one o = join(world, rank);
    uint16_t x[2] = { rank == 0 ? 0x4380 : 0x3f80, rank == 1 ? 0x7fc0 : 0x3f80 };
    EXPECT(o.t.all_reduce(o.t.self, 0, x, 2, TD_BF16));
    EXPECT(x[0] == (par_world_size(world) == 2 ? 0x4380 : 0x4381)); /* 256, 258 */
    EXPECT((x[1] & 0x7fc0) == 0x7fc0);                              /* NaN stays NaN */
    return leave(&o, rank, user);
}

START_TEST(test_bf16_is_summed_in_f32_and_rounded_once_to_even)
{
    run(2, &small, 0, bf16_rounding);
    run(3, &small, 0, bf16_rounding);
}
END_TEST

static int in_place(par_world *world, int rank, void *user)
{
    const int64_t count = 1500, ranks = 3;
    one o = join(world, rank);
    int64_t all[3 * 1500], want[3 * 1500], *part = all + rank * count;
    for (int64_t i = 0; i < count; i++) ranks_put(TD_I64, part, i, rank, i);
    for (int r = 0; r < ranks; r++)
        for (int64_t i = 0; i < count; i++) ranks_put(TD_I64, want, r * count + i, r, i);
    EXPECT(o.t.all_gather(o.t.self, 0, part, all, count, TD_I64));
    EXPECT(memcmp(all, want, sizeof all) == 0);

    for (int64_t i = 0; i < ranks * count; i++) ranks_put(TD_I64, all, i, rank, i);
    for (int64_t i = 0; i < count; i++) ranks_put_sum(TD_I64, want, i, (int)ranks, rank * count + i);
    EXPECT(o.t.reduce_scatter(o.t.self, 0, all, part, count, TD_I64));
    EXPECT(memcmp(part, want, (size_t)count * sizeof *want) == 0);
    return leave(&o, rank, user);
}

START_TEST(test_gather_and_scatter_may_use_a_part_of_the_whole)
{
    run(3, &small, 0, in_place);
}
END_TEST

/* Six ranks as a grid of 2 x 3: sums along each axis, in turn and often, of which each group has its own. */
static int grid(par_world *world, int rank, void *user)
{
    one o = join(world, rank);
    td_mesh mesh = { .axes = 2, .size = { 2, 3 }, .at = { rank / 3, rank % 3 }, .rank = rank, .world = 6 };
    EXPECT(par_transport_local(world, rank, o.td, &mesh, &o.t));
    for (int i = 0; i < 200; i++) {
        int32_t x = rank, y = rank, z[3];
        EXPECT(o.t.all_reduce(o.t.self, 0, &x, 1, TD_I32));
        EXPECT(x == 2 * (rank % 3) + 3);
        EXPECT(o.t.all_reduce(o.t.self, 1, &y, 1, TD_I32));
        EXPECT(y == (rank < 3 ? 0 + 1 + 2 : 3 + 4 + 5));
        EXPECT(o.t.all_gather(o.t.self, 1, &rank, z, 1, TD_I32));
        EXPECT(z[0] == rank / 3 * 3 && z[1] == z[0] + 1 && z[2] == z[0] + 2);
        EXPECT(o.t.barrier(o.t.self));
    }
    int64_t calls, sent = o.t.sent(o.t.self, &calls);
    EXPECT(calls == 800);
    EXPECT(sent == 200 * (int64_t)(4 + 6 + 8)); /* 2/2 of 4 bytes; 4/3 of 4 bytes, rounded up; two others x 4 bytes */
    return leave(&o, rank, user);
}

START_TEST(test_groups_of_a_grid_are_independent)
{
    run(6, &small, 0, grid);
}
END_TEST

/* ---- Counting -------------------------------------------------------------------------------------------- */

START_TEST(test_bytes_sent_are_ring_optimal)
{
    ck_assert_int_eq(par_bytes_sent(PAR_ALL_REDUCE, 4, 1000, TD_F32), 6000);    /* 2 x 3/4 x 4000 */
    ck_assert_int_eq(par_bytes_sent(PAR_ALL_REDUCE, 4, 1, TD_F32), 6);          /* a scalar, as for the norm */
    ck_assert_int_eq(par_bytes_sent(PAR_ALL_REDUCE, 3, 1, TD_F32), 6);          /* 5.33, rounded up */
    ck_assert_int_eq(par_bytes_sent(PAR_REDUCE_SCATTER, 4, 250, TD_F32), 3000); /* 3/4 x 4000 */
    ck_assert_int_eq(par_bytes_sent(PAR_ALL_GATHER, 4, 250, TD_BF16), 1500);
    ck_assert_int_eq(par_bytes_sent(PAR_ALL_TO_ALL, 2, 10, TD_I64), 80);
    ck_assert_int_eq(par_bytes_sent(PAR_BROADCAST, 4, 1000, TD_U8), 750);
    ck_assert_int_eq(par_bytes_sent(PAR_BARRIER, 4, 0, TD_U8), 0);
    ck_assert_int_eq(par_bytes_sent(PAR_ALL_REDUCE, 1, 1000, TD_F64), 0);
    ck_assert_int_eq(par_bytes_sent(PAR_ALL_GATHER, 1024, 1 << 30, TD_F32), (int64_t)1023 << 32);
}
END_TEST

START_TEST(test_a_planning_world_has_any_size_and_sends_nothing)
{
    td_context *td = open_cpu(TD_F32);
    par_world *world = par_world_none(1024, 1000);
    td_transport t;
    float x = 1;
    int64_t calls = -1;
    ck_assert_int_eq(par_world_size(world), 1024);
    ck_assert(par_transport_none(world, 1000, td, &t));
    ck_assert(!t.all_reduce(t.self, 0, &x, 1, TD_F32));
    ck_assert_str_eq(td_error_text(td),
                     "all_reduce: this world of 1024 ranks is for planning only; it cannot run a step");
    ck_assert_int_eq(t.sent(t.self, &calls), 0);
    ck_assert_int_eq(calls, 0);
    ck_assert_ptr_null(par_world_none(4, 4));
    par_world_close(world);
    td_close(td);
}
END_TEST

START_TEST(test_worlds_that_cannot_be_are_refused)
{
    ck_assert_ptr_null(par_world_threads(0, NULL));
    ck_assert_ptr_null(par_world_threads(PAR_MAX_RANKS + 1, NULL));
    ck_assert_ptr_null(par_world_threads(2, &(par_world_options){ .timeout_s = -1 }));
    ck_assert_ptr_null(par_world_threads(2, &(par_world_options){ .staging_bytes = -1 }));
    int rank;
    ck_assert_ptr_null(par_world_join(&rank));
    ck_assert(!par_launched());
}
END_TEST

/* ---- What stops a world ---------------------------------------------------------------------------------- */

enum { LATE, ENDS, OTHER_CALL, OTHER_COUNT, OTHER_ORDER, OTHER_DTYPE, NO_SUM, FAILS, NO_AXIS };

static int misbehaves(par_world *world, int rank, void *user)
{
    seen *s = user;
    one o = join(world, rank);
    double x[8] = { 0 };
    o.t.barrier(o.t.self);
    bool odd = rank == 2;
    if (odd && s->mode == LATE)
        for (int i = 0; i < 40 && !*par_world_error(world); i++) sleep_s(0.05);
    if (odd && s->mode == ENDS) return leave(&o, rank, s);
    if (odd && s->mode == FAILS) par_fail_world(world, rank, "data: no such file");
    if (odd && (s->mode == OTHER_CALL || s->mode == OTHER_ORDER)) o.t.barrier(o.t.self);
    o.t.all_reduce(o.t.self, s->mode == NO_AXIS, x, odd && s->mode == OTHER_COUNT ? 8 : 4,
                   s->mode == NO_SUM               ? TD_U8
                   : odd && s->mode == OTHER_DTYPE ? TD_F32
                                                   : TD_F64);
    if (!odd && s->mode == OTHER_ORDER) o.t.barrier(o.t.self);
    return leave(&o, rank, s);
}

START_TEST(test_a_late_rank_is_named_with_the_call_that_waits_for_it)
{
    seen *s = run(4, &hasty, LATE, misbehaves);
    assert_all_failed(s, 4, "rank 2 did not arrive at all_reduce (call 2, before the first step) within 0.3 s");
    ck_assert(s->seconds >= 0.3 && s->seconds < 1.5);
}
END_TEST

START_TEST(test_a_rank_that_has_ended_is_not_waited_for)
{
    seen *s = run(4, &small, ENDS, misbehaves);
    for (int r = 0; r < 4; r++)
        ck_assert_str_eq(s->text[r], r == 2 ? "" : "rank 2 ended before all_reduce (call 2, before the first step)");
    ck_assert(s->seconds < 1);
}
END_TEST

START_TEST(test_calls_that_do_not_belong_together_are_refused)
{
    static const struct {
        int mode;
        const char *odd;
    } modes[] = { { OTHER_COUNT, "all_reduce of 8 f64" }, { OTHER_DTYPE, "all_reduce of 4 f32" } };
    for (size_t i = 0; i < 2; i++) {
        seen *s = run(4, &small, modes[i].mode, misbehaves);
        for (int r = 0; r < 4; r++) {
            ck_assert_str_eq(s->text[r], s->text[0]);
            ck_assert_str_has(s->text[r], "ranks disagree: rank ");
            ck_assert_str_has(s->text[r], modes[i].odd);
            ck_assert_str_has(s->text[r], "all_reduce of 4 f64");
        }
        ck_assert(s->seconds < 1);
    }
}
END_TEST

START_TEST(test_calls_in_another_order_are_refused)
{
    seen *s = run(4, &small, OTHER_ORDER, misbehaves);
    for (int r = 0; r < 4; r++) {
        ck_assert_str_eq(s->text[r], s->text[0]);
        ck_assert_str_has(s->text[r], "calls all_reduce of 4 f64 (call 2");
        ck_assert_str_has(s->text[r], "calls barrier (call 2");
    }
    ck_assert(s->seconds < 1);
}
END_TEST

/* On a grid, rank 0 waits for rank 1 on one axis, rank 1 for rank 3 on the other: it is rank 3 that is late. */
static int late_on_a_grid(par_world *world, int rank, void *user)
{
    one o = join(world, rank);
    td_mesh mesh = { .axes = 2, .size = { 2, 2 }, .at = { rank / 2, rank % 2 }, .rank = rank, .world = 4 };
    float x = 0;
    EXPECT(par_transport_local(world, rank, o.td, &mesh, &o.t));
    if (rank == 1) o.t.all_reduce(o.t.self, 0, &x, 1, TD_F32);
    if (rank == 0 || rank == 2) {
        o.t.all_reduce(o.t.self, 0, &x, 1, TD_F32);
        o.t.all_reduce(o.t.self, 1, &x, 1, TD_F32);
    }
    for (int i = 0; rank == 3 && i < 40 && !*par_world_error(world); i++) sleep_s(0.05);
    if (rank == 3) o.t.all_reduce(o.t.self, 0, &x, 1, TD_F32);
    return leave(&o, rank, user);
}

START_TEST(test_the_late_rank_is_named_though_another_is_waited_for)
{
    seen *s = run(4, &hasty, 0, late_on_a_grid);
    for (int r = 0; r < 4; r++) ck_assert_str_has(s->text[r], "rank 3 did not arrive at all_reduce (call ");
}
END_TEST

START_TEST(test_one_ranks_error_stops_all_with_its_text)
{
    seen *s = run(4, &small, FAILS, misbehaves);
    assert_all_failed(s, 4, "rank 2: data: no such file");
    ck_assert(s->seconds < 1);
}
END_TEST

START_TEST(test_what_cannot_be_called_is_named)
{
    seen *s = run(2, &small, NO_SUM, misbehaves);
    ck_assert_str_has(s->text[0], "all_reduce cannot sum u8; it sums f32, f64, bf16, i32 and i64");
    s = run(2, &small, NO_AXIS, misbehaves);
    ck_assert_str_eq(s->text[1], "there is no mesh axis 1: the mesh has 1");
}
END_TEST

static int gives_its_rank(par_world *world, int rank, void *user)
{
    seen *s = user;
    one o = join(world, rank);
    float x = 0;
    if (rank > 0) return leave(&o, rank, s) + rank;
    o.t.all_reduce(o.t.self, 0, &x, 1, TD_F32);
    return leave(&o, rank, s);
}

START_TEST(test_a_result_that_is_not_zero_stops_the_others)
{
    seen *s = check_alloc(sizeof *s);
    ck_assert_int_eq(par_run_threads(2, &small, gives_its_rank, s), 1);
    ck_assert_str_eq(s->text[0], "rank 1 ended with result 1");
}
END_TEST

/* ---- Agreeing on steps ----------------------------------------------------------------------------------- */

enum {
    AGREE,
    OTHER_OPERATION,
    OTHER_OPTION,
    MORE_OPTIONS,
    ORDER,
    FEWER,
    ATTRIBUTE,
    STEP,
    REPLAY,
    NEW_AGAINST_REPLAY,
    BEYOND,
    MISSES_POST
};

/* Runs ten steps of 20 operations, each with one sum; from the second on with the plan of the first. At step 7 rank 1
 * does something else. */
static int steps(par_world *world, int rank, void *user)
{
    seen *s = user;
    bool odd = rank == 1, many = s->mode == BEYOND;
    one o = join(world, rank);
    ranks_program *p = malloc(sizeof *p);
    EXPECT(p);
    par_agree_options(world, rank,
                      odd && s->mode == OTHER_OPTION   ? "strategy=ddp batch=72 seed=1"
                      : odd && s->mode == MORE_OPTIONS ? "strategy=ddp batch=144 seed=1 clip"
                                                       : "strategy=ddp batch=144 seed=1");
    bool ok = true;
    for (int64_t step = 0; step < 10 && ok; step++) {
        bool now = odd && step == 7;
        ranks_record(p, many ? RANKS_OPERATIONS : 20 - (now && s->mode == FEWER ? 5u : 0));
        if (now && (s->mode == OTHER_OPERATION || s->mode == REPLAY || s->mode == NEW_AGAINST_REPLAY))
            ranks_differ(p, 12);
        if (s->mode == REPLAY && step == 0) ranks_differ(p, 12); /* so that the other plan is not new at step 7 */
        if (now && s->mode == ORDER) ranks_swap(p, 12, 13);
        if (now && many) ranks_differ(p, 4500);
        uint64_t print = ranks_fingerprint(p, now && s->mode == ATTRIBUTE);
        bool is_new = step == 0 || (step == 7 && s->mode != REPLAY && !(s->mode == NEW_AGAINST_REPLAY && !odd));
        if (now && s->mode == MISSES_POST) continue;
        int64_t begun = now && s->mode == STEP ? step + 1 : step;
        ok = par_agree(world, rank, o.td, (par_moment){ .run = begun, .step = begun }, &p->program, print, is_new);
        float x = 1;
        ok = ok && o.t.all_reduce(o.t.self, 0, &x, 1, TD_F32) && x == (float)par_world_size(world);
    }
    free(p);
    return leave(&o, rank, s);
}

START_TEST(test_ranks_that_agree_go_on)
{
    for (int ranks = 1; ranks <= 4; ranks++) {
        seen *s = run(ranks, &small, AGREE, steps);
        for (int r = 0; r < ranks; r++) ck_assert_str_eq(s->text[r], "");
    }
}
END_TEST

static void assert_disagreement(int mode, const char *text)
{
    seen *s = run(2, &small, mode, steps);
    assert_all_failed(s, 2, text);
    ck_assert_msg(s->seconds < 2, "took %g s", s->seconds);
}

START_TEST(test_another_operation_is_named)
{
    assert_disagreement(OTHER_OPERATION,
                        "ranks disagree at step 7: operation 12 is mul (64, 10) f32 at model.c:41 on rank 0 "
                        "but add (64, 10) f32 at model.c:43 on rank 1");
}
END_TEST

START_TEST(test_an_old_plan_against_another_old_plan_is_named)
{
    assert_disagreement(REPLAY, "ranks disagree at step 7: operation 12 is mul (64, 10) f32 at model.c:41 on rank 0 "
                                "but add (64, 10) f32 at model.c:43 on rank 1");
}
END_TEST

START_TEST(test_a_new_plan_against_an_old_one_is_named)
{
    assert_disagreement(NEW_AGAINST_REPLAY,
                        "ranks disagree at step 7: operation 12 is mul (64, 10) f32 at model.c:41 on rank 0 "
                        "but add (64, 10) f32 at model.c:43 on rank 1");
}
END_TEST

START_TEST(test_another_order_is_named)
{
    assert_disagreement(ORDER, "ranks disagree at step 7: operation 12 is mul (64, 10) f32 at model.c:41 on rank 0 "
                               "but mul (64, 10) f32 at model.c:42 on rank 1");
}
END_TEST

START_TEST(test_another_option_is_named)
{
    assert_disagreement(OTHER_OPTION, "ranks disagree at step 0: option batch is 144 on rank 0 but 72 on rank 1");
    assert_disagreement(MORE_OPTIONS, "ranks disagree at step 0: option clip is absent on rank 0 but set on rank 1");
}
END_TEST

START_TEST(test_a_shorter_recording_is_named)
{
    assert_disagreement(FEWER, "ranks disagree at step 7: operation 15 is mul (64, 10) f32 at model.c:44 on rank 0 "
                               "but rank 1 records only 15 operations");
}
END_TEST

START_TEST(test_attributes_that_are_not_shown_still_differ)
{
    assert_disagreement(ATTRIBUTE, "ranks disagree at step 7: operation 0, mul (64, 10) f32 at model.c:29, "
                                   "has other inputs or attributes on rank 0 than on rank 1");
}
END_TEST

START_TEST(test_another_step_is_named)
{
    seen *s = run(2, &small, STEP, steps);
    ck_assert_str_has(s->text[0], ": rank 0 begins step 7 but rank 1 step 8");
    ck_assert_str_eq(s->text[0], s->text[1]);
}
END_TEST

START_TEST(test_a_step_that_one_rank_leaves_out_is_named)
{
    seen *s = run(2, &small, MISSES_POST, steps);
    ck_assert_str_has(s->text[0], ": rank 0 begins step 7 but rank 1 step 8");
    ck_assert(s->seconds < 2);
}
END_TEST

START_TEST(test_a_long_recording_says_how_much_of_it_is_kept)
{
    assert_disagreement(
        BEYOND, "ranks disagree at step 7: the first 4096 operations, of which texts are kept, are the same on ranks 0 "
                "and 1; a later one differs (5000 and 5000 recorded)");
}
END_TEST

enum { PLANS_MANY = 100, PLANS_ONE = 1 };

/* Ranks with nothing to sum may run apart, but never out of sight: 500 steps, of more plans (mode) than texts are
 * kept, or of one plan and more steps than posts are kept. Rank 0 sleeps at first. At step 400 rank 2 runs another
 * program. */
static int runs_ahead(par_world *world, int rank, void *user)
{
    seen *s = user;
    one o = join(world, rank);
    ranks_program *p = malloc(sizeof *p);
    EXPECT(p);
    bool ok = true;
    for (int64_t step = 0; step < 500 && ok; step++) {
        ranks_record(p, 20 + (uint32_t)(step % s->mode));
        if (rank == 2 && step == 400) ranks_differ(p, 3);
        if (rank == 0 && step == 1) sleep_s(0.2);
        ok = par_agree(world, rank, o.td, (par_moment){ .run = step, .step = step }, &p->program, ranks_fingerprint(p, 0), false);
    }
    EXPECT(!o.t.barrier(o.t.self));
    free(p);
    return leave(&o, rank, s);
}

START_TEST(test_ranks_that_run_apart_are_still_compared)
{
    static const int plans[] = { PLANS_MANY, PLANS_ONE };
    for (size_t i = 0; i < 2; i++) {
        seen *s = run(3, &small, plans[i], runs_ahead);
        for (int r = 0; r < 3; r++) {
            ck_assert_str_has(s->text[r], "ranks disagree at step 400: operation 3 is ");
            ck_assert_str_eq(s->text[r], s->text[0]);
        }
    }
}
END_TEST

/* Five micro-batches of one step, of one plan and with one sum each; rank 1 leaves out the third one's. */
static int micro_batches(par_world *world, int rank, void *user)
{
    one o = join(world, rank);
    ranks_program *p = malloc(sizeof *p);
    EXPECT(p);
    ranks_record(p, 20);
    uint64_t print = ranks_fingerprint(p, 0);
    bool ok = true;
    for (int64_t run = 0; run < 5 && ok; run++) {
        float x = 1;
        ok = par_agree(world, rank, o.td, (par_moment){ .run = run, .step = 8 }, &p->program, print, run == 0);
        ok = ok && ((rank == 1 && run == 2) || o.t.all_reduce(o.t.self, 0, &x, 1, TD_F32));
    }
    free(p);
    return leave(&o, rank, user);
}

START_TEST(test_a_sum_that_one_rank_leaves_out_of_a_micro_batch_is_noticed)
{
    seen *s = run(2, &small, AGREE, micro_batches);
    assert_all_failed(s, 2, "ranks disagree: rank 0 calls all_reduce of 1 f32 (call 1 of step 8) but rank 1 calls all_reduce of 1 f32 "
                            "(call 1 of step 8), 1 run later");
}
END_TEST

TESTS("transport", test_collectives_equal_plain_sums_in_rank_order_to_the_bit,
      test_collectives_work_through_a_staging_buffer_of_the_usual_size,
      test_bf16_is_summed_in_f32_and_rounded_once_to_even, test_gather_and_scatter_may_use_a_part_of_the_whole,
      test_groups_of_a_grid_are_independent, test_bytes_sent_are_ring_optimal,
      test_a_planning_world_has_any_size_and_sends_nothing, test_worlds_that_cannot_be_are_refused,
      test_a_late_rank_is_named_with_the_call_that_waits_for_it, test_a_rank_that_has_ended_is_not_waited_for,
      test_calls_that_do_not_belong_together_are_refused, test_calls_in_another_order_are_refused,
      test_the_late_rank_is_named_though_another_is_waited_for, test_one_ranks_error_stops_all_with_its_text,
      test_what_cannot_be_called_is_named, test_a_result_that_is_not_zero_stops_the_others, test_ranks_that_agree_go_on,
      test_another_operation_is_named, test_an_old_plan_against_another_old_plan_is_named,
      test_a_new_plan_against_an_old_one_is_named, test_another_order_is_named, test_another_option_is_named,
      test_a_shorter_recording_is_named, test_attributes_that_are_not_shown_still_differ, test_another_step_is_named,
      test_a_step_that_one_rank_leaves_out_is_named, test_a_long_recording_says_how_much_of_it_is_kept,
      test_ranks_that_run_apart_are_still_compared,
      test_a_sum_that_one_rank_leaves_out_of_a_micro_batch_is_noticed)
