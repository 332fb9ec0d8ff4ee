/* Transport `nccl` without a GPU, against a library that notes what it is asked: which communicators are made, what collectives call and
 * count, that nothing is waited for without end, and that communicators are given up where a rank, NCCL or the GPU fails.
 * Labels: threads
 */
#include <dlfcn.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/internal.h"
#include "nn/nn.h"
#include "optim/optim.h"
#include "parallel/nccl.h"
#include "tests/check.h"
#include "tests/fake_nccl.h"
#include "tests/reach.h"

enum { WORLD = 4, GPU = 5, QUEUE = 77, ANOTHER_QUEUE = 78, STEP = 14 }; /* STEP: par_step_text of step 7 */

static const par_world_options patient = { .timeout_s = 60 }, hasty = { .timeout_s = 0.3 };

static void quiet(void *user, td_level level, const char *text) { (void)user, (void)level, (void)text; }
static void sleep_s(double seconds) { nanosleep(&(struct timespec){ .tv_nsec = (long)(1e9 * seconds) }, NULL); }

/* ---- A GPU: marks are passed unless it is stuck */

static _Atomic int stuck, copies, marks_put;

static int number_of(void *queue) { return queue ? GPU : -1; }
static void use(int number) { (void)number; }
static void *make_mark(void) { return malloc(1); }

static bool copy(void *queue, void *to, const void *from, int64_t bytes)
{
    copies++;
    memmove(to, from, (size_t)bytes);
    return queue != NULL;
}

static bool put_mark(void *mark, void *queue)
{
    marks_put++;
    return mark && queue;
}

static bool has_passed(void *mark) { return mark && !stuck; }
static bool wait_for(void *queue) { return queue && !stuck; }
static bool is_idle(void *queue) { return queue && !stuck; }
static void *get(int64_t bytes) { return calloc(1, (size_t)bytes); }
static void put(void *memory) { free(memory); }
static const par_device host_gpu = { .number = number_of, .use = use, .get = get, .put = put, .copy = copy, .wait = wait_for, .is_idle = is_idle,
                                     .make_mark = make_mark, .put_mark = put_mark, .has_passed = has_passed, .free_mark = free };
static const par_nccl_options options = { .library = FAKE_NCCL, .device = &host_gpu };
static const par_nccl_options with_windows = { .library = FAKE_NCCL, .device = &host_gpu, .windows = true };

/* ---- A rank, with a CPU transport between whose ranks nothing is sent */

typedef struct one {
    par_world *world;
    int rank;
    td_context *td;
    td_transport inner, t;
    par_area *area;
} one;

static fake_nccl *fake;
static char invited[256];         /* axes that were invited to, and by whom */
static int barriers;

/* The first rank gives an id of 9 to those that it invites. */
static bool broadcast(void *self, int axes, int root, void *data, int64_t bytes)
{
    par_group g;
    size_t used = strlen(invited);
    if (!par_group_find(self, axes, &g)) return false;
    snprintf(invited + used, sizeof invited - used, "%x from %d of %d%s\n", (unsigned)axes, root, g.size, g.at ? "" : ", this one");
    if (g.at == 0) return true;
    struct { nccl_unique_id id; int32_t rank, version; } said = { .id = { { 9 } }, .rank = g.first, .version = 22809 };
    ck_assert_int_eq(bytes, sizeof said);
    memcpy(data, &said, sizeof said);
    return true;
}

/* Of the ranks the last one's steps lie elsewhere, if that is wanted. */
static bool differs;
static int gathered;

static bool all_gather(void *self, int axes, const void *in, void *out, int64_t count, td_dtype dtype)
{
    par_group g;
    int64_t part = count * td_dtype_size(dtype);
    gathered++;
    if (!par_group_find(self, axes, &g)) return false;
    for (int r = 0; r < g.size; r++) memcpy((char *)out + r * part, in, (size_t)part);
    if (differs) ((char *)out)[g.size * part - 1] ^= 1;
    return true;
}

static bool barrier(void *self)
{
    barriers++;
    return self != NULL;
}

static void begin_fake(void)
{
    void *library = dlopen(FAKE_NCCL, RTLD_NOW);
    ck_assert_msg(library != NULL, "%s", dlerror());
    fake = dlsym(library, "fake_nccl_state");
    ck_assert_ptr_nonnull(fake);
    fake->reset();
    *invited = 0;
    barriers = gathered = 0;
    differs = false;
    stuck = copies = marks_put = 0;
}

static td_mesh grid(int rank, int rows, int columns)
{
    return (td_mesh){ .axes = 2, .name = { "replicate", "shard" }, .size = { rows, columns }, .at = { rank / columns, rank % columns },
                      .rank = rank, .world = rows * columns };
}

static td_mesh line(int rank, int ranks) { return (td_mesh){ .axes = 1, .name = { "data" }, .size = { ranks }, .at = { rank }, .rank = rank, .world = ranks }; }

static bool open_transport(one *o, td_mesh mesh, const par_nccl_options *with)
{
    o->td = open_cpu(TD_F32);
    o->td->run.queue = (void *)QUEUE;
    ck_assert(par_transport_local(o->world, o->rank, o->td, &mesh, &o->inner));
    o->inner.broadcast = broadcast;
    o->inner.barrier = barrier;
    o->inner.all_gather = all_gather;
    return par_nccl_open(o->world, o->rank, o->td, &o->inner, with, &o->t);
}

static one open_rank(td_mesh mesh, const par_world_options *world, const par_nccl_options *with)
{
    begin_fake();
    one o = { .world = par_world_threads(mesh.world, world), .rank = mesh.rank };
    ck_assert_ptr_nonnull(o.world);
    o.area = &o.world->segment->area[o.rank];
    ck_assert_msg(open_transport(&o, mesh, with), "%s", td_error_text(o.td));
    return o;
}

static void close_rank(one *o)
{
    td_close(o->td);
    par_world_close(o->world);
    ck_assert_int_eq(fake->alive, 0);
}

static const char *nccl_log(void)
{
    char *text = check_alloc(FAKE_NCCL_LOG);
    fake->copy_log(text);
    return text;
}

/* Until the watcher has stopped the world; a minute is for ever. */
static const char *stopped_text(const one *o)
{
    for (int i = 0; i < 6000 && !par_broken(o->world); i++) sleep_s(0.01);
    return par_world_error(o->world);
}

static void await_given_up(void)
{
    for (int i = 0; i < 6000 && fake->alive; i++) sleep_s(0.01);
    ck_assert_int_eq(fake->alive, 0);
}

/* The rank's own thread hears of it, too. */
static void assert_stopped(one *o, const char *text)
{
    float x = 0;
    ck_assert_str_eq(stopped_text(o), text);
    ck_assert(!o->t.is_sound(o->t.self));
    ck_assert(!o->t.all_reduce(o->t.self, 0, &x, 1, TD_F32));
    ck_assert_int_eq(td_error(o->td), TD_ERROR_PARALLEL);
    ck_assert_str_eq(td_error_text(o->td), text);
    await_given_up();
}

/* As agree.c does before a run, and step.c behind it. Between them the rank seems to wait for another one, so that however long this takes
 * nobody is late. */
static void begin_run(one *o, int64_t run)
{
    atomic_store(&o->area->waits_for, 1);
    atomic_store(&o->area->step, STEP);
    atomic_store(&o->area->run, run + 1);
    atomic_store(&o->area->call, 0);
    par_advance(&o->area->posted);
}

static void end_run(one *o)
{
    td_sent sent = { 0 };
    o->t.ran(o->t.self, &sent);
    atomic_store(&o->area->waits_for, 0);
}

static void post_all(const one *o)
{
    for (int r = 0; r < o->world->ranks; r++)
        if (r != o->rank) par_advance(&o->world->segment->area[r].posted);
}

/* ---- The library ------------------------------------------------------------------------------------------ */

static void assert_no_library(const char *file, const char *text)
{
    one o = { .world = par_world_threads(2, &patient), .rank = 0 };
    ck_assert(!open_transport(&o, line(0, 2), &(par_nccl_options){ .library = file, .device = &host_gpu }));
    ck_assert_int_eq(td_error(o.td), TD_ERROR_UNSUPPORTED);
    ck_assert_str_has(td_error_text(o.td), text);
    ck_assert_str_has(td_error_text(o.td), "install NCCL 2.23 or newer");
    close_rank(&o);
}

START_TEST(test_a_library_that_cannot_be_used_is_said)
{
    begin_fake();
    assert_no_library("libno-nccl.so.2", "ranks on several GPUs need NCCL, which could not be loaded (libno-nccl.so.2: ");
    assert_no_library("libm.so.6", "libm.so.6 has no ncclGetUniqueId");
    fake->version = 22205;
    assert_no_library(FAKE_NCCL, "is NCCL 2.22.5, which is too old");
}
END_TEST

START_TEST(test_versions_are_told_as_they_are_numbered)
{
    char text[NCCL_VERSION_BYTES];
    ck_assert_str_eq(nccl_version_text(22809, text), "2.28.9");
    ck_assert_str_eq(nccl_version_text(2708, text), "2.7.8");
}
END_TEST

/* ---- Communicators ---------------------------------------------------------------------------------------- */

/* Rank 2 of 2 x 2 is the second of {0, 2}, the third of all and the first of {2, 3}. */
START_TEST(test_every_axis_and_those_that_follow_one_another_have_a_communicator)
{
    one o = open_rank(grid(2, 2, 2), &patient, &options);
    ck_assert_str_eq(invited, "0 from 0 of 2\n100 from 0 of 4\n1 from 0 of 2, this one\n");
    ck_assert_str_eq(nccl_log(), "init c0 2 ranks as 1 blocking 0 id 9\n"
                                 "init c1 4 ranks as 2 blocking 0 id 9\n"
                                 "id 1\n"
                                 "init c2 2 ranks as 0 blocking 0 id 1\n");
    close_rank(&o);
}
END_TEST

START_TEST(test_three_axes_have_six)
{
    one o = open_rank((td_mesh){ .axes = 3, .name = { "a", "b", "c" }, .size = { 2, 3, 2 }, .at = { 1, 0, 1 }, .rank = 7, .world = 12 }, &patient,
                      &options);
    ck_assert_str_eq(nccl_log(), "init c0 2 ranks as 1 blocking 0 id 9\n"   /* a */
                                 "init c1 6 ranks as 3 blocking 0 id 9\n"   /* a, b */
                                 "init c2 12 ranks as 7 blocking 0 id 9\n"  /* all */
                                 "id 1\n"
                                 "init c3 3 ranks as 0 blocking 0 id 1\n"   /* b */
                                 "init c4 6 ranks as 1 blocking 0 id 9\n"   /* b, c */
                                 "init c5 2 ranks as 1 blocking 0 id 9\n"); /* c */
    close_rank(&o);
}
END_TEST

START_TEST(test_an_axis_of_one_rank_has_none_and_the_same_ranks_have_one)
{
    one o = open_rank(grid(1, 4, 1), &patient, &options);
    ck_assert_str_eq(nccl_log(), "init c0 4 ranks as 1 blocking 0 id 9\n");
    float x[2] = { 3, 4 }, y[2];
    ck_assert(o.t.all_gather(o.t.self, 1, x, y, 2, TD_F32));
    ck_assert_int_eq(copies, 1);
    ck_assert(o.t.all_gather(o.t.self, td_axes(0, 1), x, y, 2, TD_F32));
    ck_assert_str_has(nccl_log(), "all_gather c0 2 x 7 on 77\n");
    close_rank(&o);
}
END_TEST

START_TEST(test_a_rank_alone_in_its_world_needs_no_nccl)
{
    one o = open_rank(line(0, 1), &patient, &(par_nccl_options){ .library = "libno-nccl.so.2", .device = &host_gpu });
    float x[3] = { 1, 2, 3 }, y[3];
    ck_assert(o.t.all_reduce(o.t.self, 0, x, 3, TD_F32));
    ck_assert(o.t.broadcast(o.t.self, 0, 0, x, 12));
    ck_assert_int_eq(copies, 0);
    ck_assert(o.t.reduce_scatter(o.t.self, 0, x, y, 3, TD_F32));
    ck_assert(o.t.all_gather(o.t.self, 0, x, y, 3, TD_F32));
    ck_assert(o.t.all_gather(o.t.self, 0, x, x, 3, TD_F32)); /* in place */
    ck_assert(o.t.all_to_all(o.t.self, 0, x, y, 3, TD_F32));
    ck_assert_int_eq(copies, 3);
    ck_assert_mem_eq(x, y, sizeof x);
    close_rank(&o);
}
END_TEST

START_TEST(test_a_context_that_comes_later_finds_communicators)
{
    one o = open_rank(grid(2, 2, 2), &patient, &options);
    td_close(o.td);
    ck_assert(open_transport(&o, line(2, 4), &options));
    ck_assert_int_eq(fake->alive, 3);
    float x = 1;
    ck_assert(o.t.all_reduce(o.t.self, 0, &x, 1, TD_F32));
    ck_assert_str_has(nccl_log(), "all_reduce c1 1 x 7 by 0 in place on 77\n");
    close_rank(&o);
}
END_TEST

START_TEST(test_communicators_are_given_back_when_the_world_closes)
{
    one o = open_rank(grid(2, 2, 2), &patient, &options);
    fake->in_progress = 3;
    close_rank(&o);
    ck_assert_str_has(nccl_log(), "finalize c2\nfinalize c1\nfinalize c0\ndestroy c2\ndestroy c1\ndestroy c0\n");
    ck_assert_int_eq(count_of(nccl_log(), "abort"), 0);
}
END_TEST

START_TEST(test_those_that_do_not_let_go_are_given_up)
{
    one o = open_rank(grid(2, 2, 2), &hasty, &options);
    fake->in_progress = -1;
    close_rank(&o);
    ck_assert_str_has(nccl_log(), "group\nabort c2\nabort c1\nabort c0\ngroup end\n");
    ck_assert_int_eq(count_of(nccl_log(), "destroy"), 0);
}
END_TEST

static int connect_thread(par_world *world, int rank, void *user)
{
    td_mesh mesh = grid(rank, 2, 2);
    td_transport inner, t;
    td_context *td = td_open(&(td_options){ .threads = 1, .log = quiet });
    (void)user;
    td->run.queue = (void *)QUEUE;
    int64_t calls;
    bool open = par_transport_local(world, rank, td, &mesh, &inner) && par_nccl_open(world, rank, td, &inner, &options, &t);
    bool uncounted = open && t.sent(t.self, &calls) == 0 && calls == 0;
    td_close(td);
    return !open || !uncounted;
}

/* Four ranks at once: two groups along each axis and one of all, with an id each. */
START_TEST(test_ids_come_to_all_of_a_group_through_the_cpu_transport)
{
    begin_fake();
    ck_assert_int_eq(par_run_threads(4, &patient, connect_thread, NULL), 0);
    int of_two = 0, of_four = 0;
    for (int id = 1; id <= 5; id++) {
        char two[64], four[64], all[64];
        snprintf(all, sizeof all, "blocking 0 id %d\n", id);
        for (int at = 0; at < 4; at++) {
            snprintf(two, sizeof two, "2 ranks as %d blocking 0 id %d\n", at, id);
            snprintf(four, sizeof four, "4 ranks as %d blocking 0 id %d\n", at, id);
            of_two += count_of(nccl_log(), two);
            of_four += count_of(nccl_log(), four);
        }
        int members = count_of(nccl_log(), all);
        ck_assert_msg(members == 2 || members == 4, "id %d: %d", id, members);
    }
    ck_assert_int_eq(of_two, 8);
    ck_assert_int_eq(of_four, 4);
    ck_assert_int_eq(fake->alive, 0);
    ck_assert_int_eq(count_of(nccl_log(), "destroy"), 12);
}
END_TEST

START_TEST(test_ranks_with_different_versions_are_told)
{
    begin_fake();
    fake->version = 23007;
    one o = { .world = par_world_threads(2, &patient), .rank = 1 };
    ck_assert(!open_transport(&o, line(1, 2), &options));
    ck_assert_str_eq(td_error_text(o.td), "rank 1 has NCCL 2.30.7 and rank 0 2.28.9: let LD_LIBRARY_PATH name the same on all hosts");
    close_rank(&o);
}
END_TEST

/* ---- Collectives ------------------------------------------------------------------------------------------ */

START_TEST(test_collectives_go_to_nccl_on_the_queue_of_the_call)
{
    static const struct { td_dtype dtype; int nccl; } dtypes[] = {
        { TD_F32, 7 }, { TD_F64, 8 }, { TD_BF16, 9 }, { TD_F16, 6 }, { TD_I32, 2 }, { TD_I64, 4 }, { TD_U8, 1 },
    };
    one o = open_rank(line(1, 4), &patient, &options);
    double x[40] = { 0 }, y[40];
    char want[128];
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        ck_assert(o.t.all_reduce(o.t.self, 0, x, 10, dtypes[d].dtype));
        snprintf(want, sizeof want, "all_reduce c0 10 x %d by 0 in place on 77\n", dtypes[d].nccl);
        ck_assert_str_has(nccl_log(), want);
    }
    o.td->run.queue = (void *)ANOTHER_QUEUE;
    ck_assert(o.t.reduce_scatter(o.t.self, 0, x, y, 10, TD_BF16));
    ck_assert(o.t.all_gather(o.t.self, 0, x, y, 10, TD_I64));
    ck_assert(o.t.all_to_all(o.t.self, 0, x, y, 10, TD_F64));
    ck_assert(o.t.broadcast(o.t.self, 0, 3, x, 80));
    ck_assert_str_has(nccl_log(), "reduce_scatter c0 10 x 9 by 0 on 78\n"
                                  "all_gather c0 10 x 4 on 78\n"
                                  "all_to_all c0 10 x 8 on 78\n"
                                  "broadcast c0 80 x 1 from 3 in place on 78\n");
    ck_assert(o.t.on_device);
    ck_assert(o.t.barrier(o.t.self));
    ck_assert_int_eq(barriers, 1);
    close_rank(&o);
}
END_TEST

START_TEST(test_collectives_called_bare_are_nothing_else)
{
    one o = open_rank(line(1, 4), &patient, &options);
    double seconds;
    int64_t calls;
    ck_assert(par_measure_bare(o.td, o.world, 1, PAR_ALL_REDUCE, 10, TD_F32, 2, &seconds));
    ck_assert(seconds > 0 && seconds < 60);
    ck_assert_int_eq(count_of(nccl_log(), "all_reduce c0 10 x 7 by 0 in place on 77\n"), 7); /* 5 before */
    ck_assert_int_eq(barriers, 1);
    ck_assert(par_measure_bare(o.td, o.world, 1, PAR_REDUCE_SCATTER, 10, TD_BF16, 1, &seconds));
    ck_assert(par_measure_bare(o.td, o.world, 1, PAR_ALL_GATHER, 10, TD_BF16, 1, &seconds));
    ck_assert(par_measure_bare(o.td, o.world, 1, PAR_ALL_TO_ALL, 10, TD_BF16, 1, &seconds));
    ck_assert_str_has(nccl_log(), "reduce_scatter c0 10 x 9 by 0 on 77\nall_gather c0 10 x 9 on 77\n");
    ck_assert_int_eq(count_of(nccl_log(), "all_to_all c0 10 x 9 on 77\n"), 6);
    ck_assert_int_eq(o.t.sent(o.t.self, &calls), 0);
    ck_assert_int_eq(calls, 0);
    close_rank(&o);
}
END_TEST

START_TEST(test_a_bare_collective_that_is_not_done_has_a_deadline)
{
    one o = open_rank(line(1, 4), &hasty, &options);
    double seconds;
    stuck = 1;
    ck_assert(!par_measure_bare(o.td, o.world, 1, PAR_ALL_REDUCE, 10, TD_F32, 2, &seconds));
    ck_assert_str_eq(td_error_text(o.td), "rank 1: all_reduce, called bare, is not done within 0.3 s");
    await_given_up();
    close_rank(&o);
}
END_TEST

START_TEST(test_where_nothing_connects_gpus_nothing_is_called_bare)
{
    par_world *world = par_world_threads(1, &patient);
    td_context *td = open_cpu(TD_F32);
    double seconds = 0;
    ck_assert(par_attach(td, world, 0, NULL));
    ck_assert(par_measure_bare(td, world, 0, PAR_ALL_REDUCE, 10, TD_F32, 2, &seconds));
    ck_assert(isnan(seconds));
    td_close(td);
    par_world_close(world);
}
END_TEST

START_TEST(test_an_older_nccl_sends_parts_one_by_one)
{
    one o = open_rank(line(1, 2), &patient, &options);
    uint8_t x[6] = { 10, 11, 12, 20, 21, 22 }, y[6] = { 30, 31, 32, 40, 41, 42 };
    ((par_nccl *)o.t.self)->lib.all_to_all = NULL;
    ck_assert(o.t.all_to_all(o.t.self, 0, x, y, 3, TD_U8));
    ck_assert_str_has(nccl_log(), "group\n"
                                  "send c0 3 x 1 to 0 at 10 on 77\nreceive c0 3 x 1 from 0 at 30 on 77\n"
                                  "send c0 3 x 1 to 1 at 20 on 77\nreceive c0 3 x 1 from 1 at 40 on 77\n"
                                  "group end\n");
    close_rank(&o);
}
END_TEST

START_TEST(test_calls_are_counted_as_those_of_other_transports)
{
    one o = open_rank(line(1, 4), &patient, &options);
    float x[40] = { 0 }, y[40];
    int64_t calls_before, calls, before = o.t.sent(o.t.self, &calls_before);
    o.t.all_reduce(o.t.self, 0, x, 7, TD_F32);        /* 2 x 3/4 of 28 bytes */
    o.t.reduce_scatter(o.t.self, 0, x, y, 7, TD_F32); /* 3 x 28, as the next two */
    o.t.all_gather(o.t.self, 0, x, y, 7, TD_F32);
    o.t.all_to_all(o.t.self, 0, x, y, 7, TD_F32);
    o.t.broadcast(o.t.self, 0, 0, x, 28);             /* 3/4 of 28 */
    ck_assert_int_eq(o.t.sent(o.t.self, &calls) - before, 42 + 3 * 84 + 21);
    ck_assert_int_eq(calls - calls_before, 5);
    close_rank(&o);
}
END_TEST

START_TEST(test_calls_without_elements_are_counted_and_not_made)
{
    one o = open_rank(line(1, 4), &patient, &options);
    int64_t calls_before, calls, before = o.t.sent(o.t.self, &calls_before);
    ck_assert(o.t.all_reduce(o.t.self, 0, NULL, 0, TD_F32));
    ck_assert(o.t.reduce_scatter(o.t.self, 0, NULL, NULL, 0, TD_F32));
    ck_assert(o.t.all_gather(o.t.self, 0, NULL, NULL, 0, TD_F32));
    ck_assert(o.t.all_to_all(o.t.self, 0, NULL, NULL, 0, TD_F32));
    ck_assert(o.t.broadcast(o.t.self, 0, 0, NULL, 0));
    ck_assert_int_eq(o.t.sent(o.t.self, &calls), before);
    ck_assert_int_eq(calls - calls_before, 5);
    ck_assert_int_eq(fake->entered, 0);
    close_rank(&o);
}
END_TEST

/* A graph repeats what a plan called when it was recorded; another plan has calls of its own. */
START_TEST(test_runs_that_call_nothing_are_counted_as_what_they_repeat)
{
    one o = open_rank(line(1, 4), &patient, &options);
    float x[8] = { 0 };
    td_sent first = { 0 }, second = { 0 };
    int64_t calls_before, calls, before = o.t.sent(o.t.self, &calls_before);
    for (int i = 0; i < 2; i++) o.t.all_reduce(o.t.self, 0, x, 8, TD_F32); /* 48 bytes each */
    o.t.ran(o.t.self, &first);
    o.t.barrier(o.t.self);
    o.t.all_reduce(o.t.self, 0, x, 4, TD_F32); /* 24 */
    o.t.ran(o.t.self, &second);
    ck_assert_int_eq(o.t.sent(o.t.self, &calls) - before, 120);
    ck_assert_int_eq(calls - calls_before, 3);
    for (int i = 0; i < 3; i++) o.t.ran(o.t.self, &first);
    o.t.ran(o.t.self, &second);
    ck_assert_int_eq(o.t.sent(o.t.self, &calls) - before, 120 + 3 * 96 + 24);
    ck_assert_int_eq(calls - calls_before, 3 + 3 * 2 + 1);
    ck_assert_int_eq(marks_put, 6);
    close_rank(&o);
}
END_TEST

START_TEST(test_a_call_in_progress_is_asked_after_until_it_is_not)
{
    one o = open_rank(line(1, 4), &patient, &options);
    float x = 1;
    fake->in_progress = 50;
    int before = fake->asked;
    ck_assert(o.t.all_reduce(o.t.self, 0, &x, 1, TD_F32));
    ck_assert_int_ge(fake->asked - before, 51);
    close_rank(&o);
}
END_TEST

#define TELLS_MORE "; NCCL_DEBUG=INFO in the environment makes NCCL tell more"

/* ---- Windows ---------------------------------------------------------------------------------------------- */

static unsigned char steps[100] = { 21 }, state[50] = { 22 };

/* So many bytes of each. */
static void settle(const one *o, int64_t of_steps, int64_t of_state, uint64_t layout, bool changes)
{
    const td_settled where = { .piece = { { steps, of_steps }, { state, of_state } }, .layout = layout };
    bool changed = !changes;
    ck_assert_msg(o->t.reach->settle(o->t.self, &where, &changed), "%s", td_error_text(o->td));
    ck_assert_int_eq(changed, changes);
}

static bool grows(const one *o, bool own)
{
    bool any;
    ck_assert_msg(o->t.reach->grows(o->t.self, own, &any), "%s", td_error_text(o->td));
    return any;
}

/* What a rank is alone on has none, and axes of the same ranks have one. */
START_TEST(test_the_memory_of_steps_is_registered_with_each_communicator)
{
    one o = open_rank((td_mesh){ .axes = 3, .name = { "a", "b", "c" }, .size = { 2, 2, 1 }, .at = { 1, 0, 0 }, .rank = 2, .world = 4 }, &patient,
                      &with_windows);
    size_t before = strlen(nccl_log());
    int64_t calls_before, calls, sent = o.t.sent(o.t.self, &calls_before);
    settle(&o, 100, 0, 7, true);
    ck_assert_str_eq(nccl_log() + before, "window c0 100 bytes from 21, flags 1\n"
                                          "window c2 100 bytes from 21, flags 1\n"
                                          "window c1 100 bytes from 21, flags 1\n");
    settle(&o, 100, 0, 8, false); /* another plan */
    ck_assert(o.t.reach->leave(o.t.self, true));
    ck_assert_int_eq(barriers, 1);
    ck_assert(o.t.reach->leave(o.t.self, false));
    ck_assert_int_eq(barriers, 1);
    ck_assert_str_has(nccl_log(), "no window c0\nno window c2\nno window c1\n");
    fake->in_progress = 50;
    int asked = fake->asked;
    settle(&o, 60, 50, 8, true);
    ck_assert_int_ge(fake->asked - asked, 6 * 51);
    fake->in_progress = 0;
    ck_assert_str_has(nccl_log(), "window c1 60 bytes from 21, flags 1\nwindow c1 50 bytes from 22, flags 1\n");
    ck_assert_int_eq(count_of(nccl_log(), "window c"), 12);
    ck_assert_int_eq(gathered, 3);
    ck_assert_int_eq(o.t.sent(o.t.self, &calls), sent);
    ck_assert_int_eq(calls, calls_before);
    close_rank(&o);
}
END_TEST

START_TEST(test_where_steps_lie_differently_there_are_no_windows)
{
    one o = open_rank(line(1, 2), &patient, &with_windows);
    settle(&o, 100, 50, 7, true);
    differs = true;
    settle(&o, 100, 50, 8, true);
    ck_assert_str_has(nccl_log(), "window c0 50 bytes from 22, flags 1\nno window c0\nno window c0\n");
    differs = false;
    settle(&o, 100, 50, 7, false);
    ck_assert_int_eq(count_of(nccl_log(), "window c0"), 4);
    ck_assert_int_eq(gathered, 2);
    td_close(o.td);
    ck_assert(open_transport(&o, line(1, 2), &with_windows)); /* another context may have them */
    settle(&o, 100, 50, 7, true);
    close_rank(&o);
}
END_TEST

START_TEST(test_all_know_whether_one_grows)
{
    one o = open_rank(line(1, 2), &patient, &with_windows);
    ck_assert(grows(&o, true));
    ck_assert(!grows(&o, false));
    differs = true; /* the other does */
    ck_assert(grows(&o, false));
    close_rank(&o);
}
END_TEST

START_TEST(test_a_second_context_waits_for_the_first_ones_windows)
{
    one o = open_rank(line(1, 2), &patient, &with_windows);
    td_context *second = open_cpu(TD_F32);
    ck_assert(!par_attach(second, o.world, 1, &(par_options){ .strategy = "ddp" }));
    ck_assert_str_eq(td_error_text(second), "rank 1 has a context with windows in this world: close it first");
    td_clear_error(second);
    ck_assert_ptr_eq(par_local_at(o.world, 1)->td, o.td); /* whom it has left alone */
    settle(&o, 100, 50, 7, true);
    ck_assert(o.t.reach->leave(o.t.self, false));
    ck_assert(par_attach(second, o.world, 1, &(par_options){ .strategy = "ddp" }));
    td_close(second);
    close_rank(&o);
}
END_TEST

/* In a child: the world stops while the GPU waits, with a run that has been marked, or before. */
static void wait_in_a_window(int to, bool marked)
{
    static const par_world_options options_of_2_s = { .timeout_s = 2 };
    dup2(to, STDERR_FILENO);
    one o = open_rank(line(1, 2), &options_of_2_s, &with_windows);
    settle(&o, 100, 50, 7, true);
    stuck = 1;
    begin_run(&o, 0);
    if (marked) end_run(&o);
    par_fail_world(o.world, 0, "/x/y: no such file");
    for (int i = 0; i < 20; i++) sleep_s(0.9);
    _exit(0);
}

START_TEST(test_a_process_whose_gpu_waits_in_a_window_ends)
{
    for (int marked = 0; marked < 2; marked++) {
        char text[512] = "";
        int ends[2], status;
        size_t used = 0;
        ck_assert_int_eq(pipe(ends), 0);
        pid_t child = fork();
        if (child == 0) wait_in_a_window(ends[1], marked);
        close(ends[1]);
        for (ssize_t got = 1; got > 0 && used < sizeof text - 1; used += got > 0 ? (size_t)got : 0)
            got = read(ends[0], text + used, sizeof text - 1 - used);
        close(ends[0]);
        ck_assert_int_eq(waitpid(child, &status, 0), child);
        ck_assert_int_eq(WEXITSTATUS(status), 1);
        ck_assert_str_has(text, "rank 0: /x/y: no such file\nrank 1 ends without its GPU, which waits in a window");
    }
}
END_TEST

/* It comes out, as of kernels that look: nobody ends it. */
START_TEST(test_a_process_whose_gpu_comes_out_goes_on)
{
    one o = open_rank(line(1, 2), &hasty, &with_windows);
    settle(&o, 100, 50, 7, true);
    par_fail_world(o.world, 0, "/x/y: no such file");
    sleep_s(0.9);
    assert_stopped(&o, "rank 0: /x/y: no such file");
    close_rank(&o);
}
END_TEST

START_TEST(test_windows_are_made_where_they_are_asked_for_and_nccl_has_them)
{
    one o = open_rank(line(0, 2), &patient, &options);
    ck_assert_ptr_null(o.t.reach);
    ((par_nccl *)o.t.self)->lib.comm_window_register = NULL; /* before 2.27 */
    td_close(o.td);
    ck_assert(open_transport(&o, line(0, 2), &with_windows));
    ck_assert_ptr_null(o.t.reach);
    ck_assert_str_has(log_text(), "NCCL 2.28.9 has no windows, which came with 2.27");
    close_rank(&o);
}
END_TEST

START_TEST(test_windows_that_cannot_be_made_stop_the_world)
{
    one o = open_rank(line(1, 2), &hasty, &with_windows);
    const td_settled where = { .piece[0] = { steps, 100 } };
    bool changed;
    fake->fails = 3;
    ck_assert(!o.t.reach->settle(o.t.self, &where, &changed));
    assert_stopped(&o, "rank 1 registering its memory: NCCL: internal error (a wire)" TELLS_MORE);
    o.t.reach->leave(o.t.self, false);
    ck_assert_int_eq(count_of(nccl_log(), "no window"), 0); /* they went with the communicator */
    close_rank(&o);
}
END_TEST

/* ---- Failures --------------------------------------------------------------------------------------------- */

START_TEST(test_ranks_that_do_not_connect_are_given_up_in_time)
{
    begin_fake();
    fake->in_progress = -1;
    one o = { .world = par_world_threads(4, &hasty), .rank = 2 };
    ck_assert(!open_transport(&o, grid(2, 2, 2), &options));
    ck_assert_str_eq(td_error_text(o.td), "rank 2 connecting the 2 ranks along replicate: NCCL is not done within 0.3 s" TELLS_MORE);
    await_given_up();
    ck_assert_str_has(nccl_log(), "group\nabort c0\ngroup end\n");
    close_rank(&o);
}
END_TEST

START_TEST(test_a_call_that_fails_or_stays_in_progress_ends_in_time)
{
    static const struct { int in_progress, fails; const char *text; } cases[] = {
        { -1, 0, "rank 2 in all_reduce (call 1 of step 7): NCCL is not done within 0.3 s" TELLS_MORE },
        { 0, 3, "rank 2 in all_reduce (call 1 of step 7): NCCL: internal error (a wire)" TELLS_MORE },
    };
    for (int i = 0; i < 2; i++) {
        one o = open_rank(grid(2, 2, 2), &hasty, &options);
        float x = 1;
        begin_run(&o, 0);
        fake->in_progress = cases[i].in_progress;
        fake->fails = cases[i].fails;
        ck_assert(!o.t.all_reduce(o.t.self, 0, &x, 1, TD_F32));
        assert_stopped(&o, cases[i].text);
        ck_assert_str_has(nccl_log(), "abort c2\nabort c1\nabort c0\n");
        close_rank(&o);
    }
}
END_TEST

START_TEST(test_an_error_behind_a_call_stops_the_world)
{
    one o = open_rank(grid(2, 2, 2), &hasty, &options);
    begin_run(&o, 0);
    end_run(&o);
    fake->async_error = 6;
    assert_stopped(&o, "rank 2 in step 7: NCCL: remote process exited (a wire)" TELLS_MORE);
    ck_assert_str_has(nccl_log(), "group\nabort c2\nabort c1\nabort c0\ngroup end\n");
    close_rank(&o);
}
END_TEST

static par_world *launched;

static void tell_as_launcher(void) { par_break(launched, PAR_LAUNCHER, "rank 3 was killed by signal 9 (Killed) in step 7"); }

/* NCCL only sees that a rank is gone; the launcher speaks a little later. */
START_TEST(test_who_knows_better_why_is_heard_first)
{
    one o = open_rank(line(1, 4), &patient, &options);
    launched = o.world;
    fake->on_error = tell_as_launcher;
    fake->async_error = 6;
    assert_stopped(&o, "rank 3 was killed by signal 9 (Killed) in step 7");
    close_rank(&o);
}
END_TEST

START_TEST(test_communicators_are_given_up_when_another_rank_fails)
{
    one o = open_rank(grid(2, 2, 2), &patient, &options);
    par_fail_world(o.world, 3, "/x/y: no such file");
    assert_stopped(&o, "rank 3: /x/y: no such file");
    close_rank(&o);
}
END_TEST

static void *fail_soon(void *argument)
{
    while (!fake->entered) sleep_s(0.01);
    par_fail_world(argument, 3, "/x/y: no such file");
    return NULL;
}

/* Giving up is what ends a call that hangs: it comes although the call has not returned. */
START_TEST(test_a_call_ends_when_another_rank_fails)
{
    for (int hangs = 0; hangs < 2; hangs++) {
        one o = open_rank(line(1, 4), &patient, &options);
        pthread_t thread;
        float x = 1;
        fake->in_progress = hangs ? 0 : -1;
        fake->hangs = hangs;
        ck_assert_int_eq(pthread_create(&thread, NULL, fail_soon, o.world), 0);
        ck_assert(!o.t.all_reduce(o.t.self, 0, &x, 1, TD_F32));
        pthread_join(thread, NULL);
        assert_stopped(&o, "rank 3: /x/y: no such file");
        close_rank(&o);
    }
}
END_TEST

START_TEST(test_a_call_that_does_not_return_is_ended_in_time)
{
    one o = open_rank(line(1, 4), &hasty, &options);
    float x = 1;
    fake->hangs = 1;
    ck_assert(!o.t.all_reduce(o.t.self, 0, &x, 1, TD_F32));
    assert_stopped(&o, "rank 1 has not come through its first step within 0.3 s, though all ranks have begun it" TELLS_MORE
                       ", and a longer timeout allows for longer steps");
    close_rank(&o);
}
END_TEST

/* ---- A GPU that does not get on ---------------------------------------------------------------------------- */

static void does_nothing(const one *o) { (void)o; }
static void rank_0_ends(const one *o) { par_end(o->world, 0); }

START_TEST(test_a_gpu_that_is_stuck_is_told_by_what_other_ranks_did)
{
    static const struct { void (*other)(const one *o); const char *text; } cases[] = {
        { does_nothing, "rank 0 did not arrive at step 7 within 0.3 s" },
        { rank_0_ends, "rank 0 ended before step 7" },
        { post_all, "rank 1's GPU has not come through step 7 within 0.3 s, though all ranks have begun it" TELLS_MORE
                    ", and a longer timeout allows for longer steps" },
    };
    for (int i = 0; i < 3; i++) {
        one o = open_rank(line(1, 2), &hasty, &options);
        stuck = 1;
        begin_run(&o, 0);
        cases[i].other(&o);
        end_run(&o);
        assert_stopped(&o, cases[i].text);
        close_rank(&o);
    }
}
END_TEST

/* A GPU is seldom so far behind. */
START_TEST(test_of_many_runs_the_oldest_is_named)
{
    one o = open_rank(line(1, 2), &hasty, &options);
    stuck = 1;
    for (int i = 0; i < PAR_NCCL_MARKS + 3; i++) {
        td_sent sent = { 0 };
        begin_run(&o, i);
        atomic_store(&o.area->step, STEP + 2 * i);
        o.t.ran(o.t.self, &sent);
    }
    end_run(&o);
    assert_stopped(&o, "rank 0 did not arrive at step 7 within 0.3 s");
    close_rank(&o);
}
END_TEST

/* In a run's first calls, say, of which a GPU takes so many and no more. */
START_TEST(test_a_host_that_does_not_come_through_a_run_is_seen)
{
    one o = open_rank(line(1, 2), &hasty, &options);
    begin_run(&o, 0);
    post_all(&o);
    atomic_store(&o.area->waits_for, 0);
    assert_stopped(&o, "rank 1 has not come through step 7 within 0.3 s, though all ranks have begun it" TELLS_MORE
                       ", and a longer timeout allows for longer steps");
    close_rank(&o);
}
END_TEST

START_TEST(test_a_gpu_that_gets_on_is_let_be)
{
    one o = open_rank(line(1, 2), &patient, &options);
    par_nccl *n = o.t.self;
    int64_t marked = 0, passed = 0;
    for (int i = 0; i < 30; i++) { /* more marks than there are */
        begin_run(&o, i);
        end_run(&o);
    }
    for (int i = 0; i < 6000 && (i == 0 || passed < marked); i++) {
        pthread_mutex_lock(&n->marks_lock);
        marked = n->marked;
        passed = n->passed;
        pthread_mutex_unlock(&n->marks_lock);
        sleep_s(0.01);
    }
    ck_assert_int_ge(marked, PAR_NCCL_MARKS);
    ck_assert_int_eq(passed, marked);
    ck_assert_str_eq(par_world_error(o.world), "");
    ck_assert(o.t.is_sound(o.t.self));
    close_rank(&o);
    ck_assert_int_eq(count_of(nccl_log(), "abort"), 0);
}
END_TEST

START_TEST(test_a_busy_rank_excuses_those_that_wait)
{
    one o = open_rank(line(1, 2), &hasty, &options);
    stuck = 1;
    par_busy(o.world, 0, true);
    begin_run(&o, 0);
    end_run(&o);
    sleep_s(0.9);
    ck_assert_str_eq(par_world_error(o.world), "");
    par_busy(o.world, 0, false);
    assert_stopped(&o, "rank 0 did not arrive at step 7 within 0.3 s");
    close_rank(&o);
}
END_TEST

/* ---- Steps ------------------------------------------------------------------------------------------------ */

static td_sent *plan_of_run[8];
static int runs;
static bool sound;

static void note_run(void *self, td_sent *of_plan)
{
    (void)self;
    plan_of_run[runs++] = of_plan;
}

static bool tell_sound(void *self)
{
    if (!sound) td_fail(self, TD_ERROR_PARALLEL, "it was given up");
    return sound;
}

/* A value of the step that is read later. */
static td_tensor twice(td_context *td, int64_t count)
{
    td_tensor x = td_scale(ones(td, count), 2);
    td_keep(x);
    return x;
}

START_TEST(test_a_transport_is_told_of_each_run_of_a_plan)
{
    td_context *td = open_cpu(TD_F32);
    td_transport own = { .self = td, .ran = note_run, .is_sound = tell_sound };
    td->run.transport = &own;
    runs = 0;
    sound = true;
    for (int i = 0; i < 4; i++) {
        twice(td, i == 2 ? 3 : 1);
        ck_assert(td_step(td));
    }
    ck_assert_int_eq(runs, 4);
    ck_assert_ptr_eq(plan_of_run[1], plan_of_run[0]);
    ck_assert_ptr_ne(plan_of_run[2], plan_of_run[0]);
    ck_assert_ptr_eq(plan_of_run[3], plan_of_run[0]);
    td_close(td);
}
END_TEST

/* A step of `count` elements: by how much the number of the arena's places went up, at which graphs are made again. */
static int step_of(td_context *td, int64_t count)
{
    uint64_t before = td->arena_epoch;
    twice(td, count);
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    return (int)(td->arena_epoch - before);
}

START_TEST(test_a_transport_is_told_where_steps_lie)
{
    td_context *td = open_cpu(TD_F32);
    td_transport own = { .self = td, .reach = &reach_noted };
    td->run.transport = &own;
    td->page_bytes = 1; /* memory is mapped */
    reach_now = (reach_notes){ 0 };
    ck_assert_int_gt(step_of(td, 10), 0);
    ck_assert_int_eq(reach_now.settled, 1);
    ck_assert_int_eq(reach_now.left, 1);
    ck_assert_int_ge(reach_now.last.piece[0].bytes, 40);
    ck_assert_int_eq(step_of(td, 10), 0);
    ck_assert_int_gt(step_of(td, 3000), 0); /* it grows, which is elsewhere even at the same address */
    ck_assert_int_eq(reach_now.settled, 2);
    ck_assert_int_eq(reach_now.left, 2);
    ck_assert_ptr_eq(reach_now.last.piece[0].memory, td->arena);
    ck_assert_int_eq(reach_now.last.piece[0].bytes, td->arena_bytes);
    ck_assert_int_eq(step_of(td, 10), 0); /* has run before */
    ck_assert_int_eq(step_of(td, 11), 0); /* has room */
    ck_assert_int_eq(reach_now.settled, 3);
    ck_assert_int_eq(reach_now.left, 2);
    reach_now.says_changed = true;
    ck_assert_int_eq(step_of(td, 12), 1);
    reach_now.says_changed = false;
    reach_now.others_grow = true;
    ck_assert_int_eq(step_of(td, 13), 1);
    ck_assert_int_eq(reach_now.left, 3);
    ck_assert_int_eq(reach_now.left_alone, 0);
    td_close(td);
    ck_assert_int_eq(reach_now.left_alone, 1);
}
END_TEST

/* Planned before, a plan runs for the first time all the same. */
START_TEST(test_a_plan_that_was_made_before_is_settled_when_it_first_runs)
{
    td_context *td = open_cpu(TD_F32);
    td_transport own = { .self = td, .reach = &reach_noted };
    td->run.transport = &own;
    td->page_bytes = 1;
    reach_now = (reach_notes){ 0 };
    twice(td, 10);
    ck_assert(td_plan(td));
    ck_assert_int_eq(reach_now.settled, 0);
    step_of(td, 10);
    ck_assert_int_eq(reach_now.settled, 1);
    td_close(td);
}
END_TEST

static uint64_t layouts[2][2];

/* Two plans; the second has more between its collectives. */
static int train_told(par_world *world, int rank, void *user)
{
    td_context *td = open_cpu(TD_F32);
    static const float x[64];
    (void)user;
    par_attach(td, world, rank, &(par_options){ .strategy = "fsdp", .units = "a,b" });
    ((td_transport *)td->run.transport)->reach = &reach_noted;
    td->page_bytes = 1;
    nn_linear a = nn_linear_make(td_root(td), "a", 8, 8), b = nn_linear_make(td_root(td), "b", 8, 8);
    opt_optimizer *opt = opt_sgd(td_root(td), NULL);
    reach_now = (reach_notes){ 0 };
    for (int s = 0; s < 2; s++) {
        td_tensor h = nn_linear_apply(&a, td_batch(td, "x", TD_F32, TD_SHAPE(4 + 4 * s, 8), x));
        td_backward(td_mean(td_square(nn_linear_apply(&b, h)), TD_ALL, TD_DROP));
        opt_step(opt, 0.1);
        if (!td_step(td)) return 1;
        layouts[rank][s] = reach_now.last.layout;
    }
    opt_close(opt);
    td_close(td);
    return 0;
}

START_TEST(test_where_collectives_find_their_values_is_told_alike_on_all_ranks)
{
    ck_assert_int_eq(par_run_threads(2, &patient, train_told, NULL), 0);
    for (int s = 0; s < 2; s++) ck_assert_uint_eq(layouts[0][s], layouts[1][s]);
    ck_assert_uint_ne(layouts[0][0], 0);
    ck_assert_uint_ne(layouts[0][0], layouts[0][1]);
}
END_TEST

START_TEST(test_what_was_given_up_is_not_read)
{
    for (int way = 0; way < 3; way++) {
        td_context *td = open_cpu(TD_F32);
        td_transport own = { .self = td, .is_sound = tell_sound };
        td_state state = td_parameter(td_root(td), "w", TD_SHAPE(1), td_init_constant(3));
        td_tensor x = twice(td, 1);
        float to[1];
        td->run.transport = &own;
        ck_assert(td_step(td));
        sound = true;
        ck_assert(td_item(x) == 2);
        sound = false;
        if (way == 0) ck_assert(isnan(td_item(x)));
        else ck_assert(way == 1 ? !td_read(x, to) : !td_state_read(state, 0, 1, to));
        ck_assert_str_eq(td_error_text(td), "it was given up");
        td_close(td);
    }
}
END_TEST

TESTS("nccl_calls", test_a_library_that_cannot_be_used_is_said, test_versions_are_told_as_they_are_numbered,
      test_every_axis_and_those_that_follow_one_another_have_a_communicator, test_three_axes_have_six,
      test_an_axis_of_one_rank_has_none_and_the_same_ranks_have_one, test_a_rank_alone_in_its_world_needs_no_nccl,
      test_a_context_that_comes_later_finds_communicators, test_communicators_are_given_back_when_the_world_closes,
      test_those_that_do_not_let_go_are_given_up, test_ids_come_to_all_of_a_group_through_the_cpu_transport,
      test_ranks_with_different_versions_are_told,
      test_collectives_go_to_nccl_on_the_queue_of_the_call, test_collectives_called_bare_are_nothing_else,
      test_a_bare_collective_that_is_not_done_has_a_deadline, test_where_nothing_connects_gpus_nothing_is_called_bare, test_an_older_nccl_sends_parts_one_by_one,
      test_calls_are_counted_as_those_of_other_transports, test_calls_without_elements_are_counted_and_not_made,
      test_runs_that_call_nothing_are_counted_as_what_they_repeat, test_a_call_in_progress_is_asked_after_until_it_is_not,
      test_the_memory_of_steps_is_registered_with_each_communicator, test_where_steps_lie_differently_there_are_no_windows,
      test_all_know_whether_one_grows, test_a_second_context_waits_for_the_first_ones_windows,
      test_a_process_whose_gpu_waits_in_a_window_ends, test_a_process_whose_gpu_comes_out_goes_on, test_windows_are_made_where_they_are_asked_for_and_nccl_has_them, test_windows_that_cannot_be_made_stop_the_world,
      test_ranks_that_do_not_connect_are_given_up_in_time, test_a_call_that_fails_or_stays_in_progress_ends_in_time,
      test_an_error_behind_a_call_stops_the_world, test_who_knows_better_why_is_heard_first,
      test_communicators_are_given_up_when_another_rank_fails, test_a_call_ends_when_another_rank_fails,
      test_a_call_that_does_not_return_is_ended_in_time,
      test_a_gpu_that_is_stuck_is_told_by_what_other_ranks_did, test_of_many_runs_the_oldest_is_named,
      test_a_host_that_does_not_come_through_a_run_is_seen, test_a_gpu_that_gets_on_is_let_be, test_a_busy_rank_excuses_those_that_wait,
      test_a_transport_is_told_of_each_run_of_a_plan, test_a_transport_is_told_where_steps_lie,
      test_a_plan_that_was_made_before_is_settled_when_it_first_runs,
      test_where_collectives_find_their_values_is_told_alike_on_all_ranks, test_what_was_given_up_is_not_read)
