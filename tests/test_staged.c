/* Ranks that share a device: collectives of its buffers through the host's memory, in the order of a queue and in graphs; what is told when
 * a rank fails behind the host's back; which GPU a rank has and what is refused. The device is one that tests have (staged.h); test_gpu_ranks.c
 * has a GPU.
 *
 * Labels: threads
 */
#define SHELL_FOLDER "test_staged_files"
#include "tests/mpirun.h"
#include "tests/ranks.h"
#include "tests/staged.h"

#include "parallel/gpus.h"

static const par_world_options small = { .timeout_s = 20, .staging_bytes = 4096 };
static const par_world_options hasty = { .timeout_s = 0.4, .staging_bytes = 4096 };

/* A rank of a test. */
typedef struct one {
    td_context *td;
    stream *queue;
    par_local *me;
    td_transport t;
} one;

static one join(par_world *world, int rank, const td_mesh *mesh)
{
    td_transport inner;
    one o = { .td = td_open(&(td_options){ .log = ranks_quiet, .threads = 1 }), .me = par_local_at(world, rank) };
    o.queue = stream_open(o.td, 1);
    if (!ranks_transport(world, rank, o.td, mesh, &inner) || !par_transport_staged(world, rank, o.td, &inner, &stream_device, &o.t)) exit(1);
    return o;
}

static void leave(one *o)
{
    stream_close(o->queue);
    td_close(o->td);
}

static int run(int ranks, const par_world_options *options, int (*body)(par_world *, int, void *), void *user)
{
    return par_run_threads(ranks, options, body, user);
}

/* ---- Results ---------------------------------------------------------------------------------------------- */

/* The same calls, each waited for. */
static bool in_line(const one *o, bool called) { return called && stream_wait(o->queue) && o->t.is_sound(o->t.self); }
static bool line_all_reduce(void *self, int axis, void *data, int64_t count, td_dtype dtype)
{
    const one *o = self;
    return in_line(o, o->t.all_reduce(o->t.self, axis, data, count, dtype));
}
static bool line_reduce_scatter(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    const one *o = self;
    return in_line(o, o->t.reduce_scatter(o->t.self, axis, in, out, count, dtype));
}
static bool line_all_gather(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    const one *o = self;
    return in_line(o, o->t.all_gather(o->t.self, axis, in, out, count, dtype));
}
static bool line_all_to_all(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype)
{
    const one *o = self;
    return in_line(o, o->t.all_to_all(o->t.self, axis, in, out, count, dtype));
}
static bool line_broadcast(void *self, int axis, int root, void *data, int64_t bytes)
{
    const one *o = self;
    return in_line(o, o->t.broadcast(o->t.self, axis, root, data, bytes));
}
static bool line_barrier(void *self)
{
    const one *o = self;
    return o->t.barrier(o->t.self);
}
static int64_t line_sent(void *self, int64_t *calls)
{
    const one *o = self;
    return o->t.sent(o->t.self, calls);
}

static int every_collective(par_world *world, int rank, void *user)
{
    static const td_dtype dtypes[] = { TD_F32, TD_BF16, TD_I64 };
    static const int64_t counts[] = { 0, 1, 300, 3001 };
    (void)user;
    one o = join(world, rank, NULL);
    const td_transport t = { .self = &o, .all_reduce = line_all_reduce, .reduce_scatter = line_reduce_scatter, .all_gather = line_all_gather,
                             .all_to_all = line_all_to_all, .broadcast = line_broadcast, .barrier = line_barrier, .sent = line_sent };
    EXPECT(o.t.on_device && strcmp(o.t.name, "staged") == 0);
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            int failed = ranks_each_collective(&t, par_world_size(world), rank, dtypes[d], counts[c]);
            if (failed) return fprintf(stderr, "%s\n", td_error_text(o.td)), failed;
        }
    leave(&o);
    return 0;
}

START_TEST(test_collectives_equal_plain_sums_to_the_bit_and_are_counted)
{
    for (int ranks = 1; ranks <= 4; ranks++) ck_assert_int_eq(run(ranks, &small, every_collective, NULL), 0);
}
END_TEST

/* x becomes the sum of all, y what each had: forty times, of which the host waits for none. */
enum { COUNT = 700, REPLAYS = 40 };

static int graph(par_world *world, int rank, void *user)
{
    (void)user;
    one o = join(world, rank, NULL);
    stream_graph captured = { 0 };
    int64_t x[COUNT], y[3 * COUNT], got;
    td_sent of_plan = { 0 };
    for (int i = 0; i < COUNT; i++) x[i] = rank + i;
    EXPECT(o.t.expect(o.t.self, 8, 8) && o.t.expect(o.t.self, sizeof x, sizeof y));
    o.t.barrier(o.t.self);
    got = atomic_load(&streams_got);
    EXPECT(o.t.barrier(o.t.self) && o.t.all_reduce(o.t.self, 0, x, COUNT, TD_I64)); /* the first run; it makes room for the largest call */
    EXPECT(o.t.all_gather(o.t.self, 0, x, y, COUNT, TD_I64));
    o.t.ran(o.t.self, &of_plan);
    EXPECT(o.t.barrier(o.t.self) && atomic_load(&streams_got) == got + 3);
    int64_t calls_before, calls, before = o.t.sent(o.t.self, &calls_before);
    o.queue->graph = &captured;
    EXPECT(o.t.all_reduce(o.t.self, 0, x, COUNT, TD_I64) && o.t.all_gather(o.t.self, 0, x, y, COUNT, TD_I64));
    o.queue->graph = NULL;
    EXPECT(captured.count == 6);
    for (int r = 0; r < REPLAYS; r++) {
        for (int w = 0; w < captured.count; w++) stream_give(o.queue, captured.work[w]);
        o.t.ran(o.t.self, &of_plan);
    }
    EXPECT(stream_wait(o.queue) && o.t.is_sound(o.t.self));
    EXPECT(o.t.sent(o.t.self, &calls) - before == REPLAYS * (int64_t)((2 * 2 * sizeof x + 2) / 3 + 2 * sizeof x) && calls - calls_before == 2 * REPLAYS);
    EXPECT(o.t.barrier(o.t.self) && atomic_load(&streams_got) == got + 3);
    uint64_t times = 1;
    for (int r = 0; r < REPLAYS; r++) times *= 3;
    for (int i = 0; i < COUNT; i++) EXPECT((uint64_t)x[i] == (uint64_t)(3 * i + 3) * times && y[2 * COUNT + i] == x[i]);
    leave(&o);
    return 0;
}

START_TEST(test_a_graph_is_replayed_without_the_host_and_without_memory) { ck_assert_int_eq(run(3, &small, graph, NULL), 0); } END_TEST

/* A larger plan makes its own room; what was captured before keeps its. */
static int growth(par_world *world, int rank, void *user)
{
    (void)user;
    one o = join(world, rank, NULL);
    stream_graph captured = { 0 };
    int32_t x[8], larger[3000];
    EXPECT(o.t.all_reduce(o.t.self, 0, x, 8, TD_I32));
    stream_wait(o.queue);
    o.queue->graph = &captured;
    EXPECT(o.t.all_reduce(o.t.self, 0, x, 8, TD_I32));
    o.queue->graph = NULL;
    for (int i = 0; i < 3000; i++) larger[i] = i;
    EXPECT(o.t.expect(o.t.self, sizeof larger, sizeof larger) && o.t.all_reduce(o.t.self, 0, larger, 3000, TD_I32));
    for (int i = 0; i < 8; i++) x[i] = 10 * rank + i;
    for (int w = 0; w < captured.count; w++) stream_give(o.queue, captured.work[w]);
    stream_wait(o.queue);
    for (int i = 0; i < 8; i++) EXPECT(x[i] == 10 + 2 * i);
    EXPECT(larger[2999] == 2 * 2999);
    leave(&o);
    return 0;
}

START_TEST(test_a_graph_keeps_its_room_when_a_larger_plan_comes) { ck_assert_int_eq(run(2, &small, growth, NULL), 0); } END_TEST

/* ---- Operations: the copies beside what is sent ------------------------------------------------------------ */

static void copy_rows(const td_kernel *k, const par_copy *c)
{
    for (int64_t r = 0; r < c->rows; r++)
        stream_copy(td_queue(k->run->td), c->to + r * c->to_step, c->from + r * c->from_step, c->bytes);
}

typedef struct clearing { void *memory; int64_t bytes; } clearing;
static void do_clear(void *user)
{
    clearing *c = user;
    memset(c->memory, 0, (size_t)c->bytes);
    free(c);
}
static void clear(const td_kernel *k, void *memory, int64_t bytes)
{
    clearing *c = malloc(sizeof *c);
    if (!c) exit(1);
    *c = (clearing){ memory, bytes };
    stream_call(td_queue(k->run->td), do_clear, c);
}

static const par_copier on_queue = { copy_rows, clear };

enum { A = 3, B = 4, C = 5 };            /* a value (A, ranks B, C), its dimension 1 in parts */

static int operations(par_world *world, int rank, void *user)
{
    (void)user;
    enum { RANKS = 3 };
    one o = join(world, rank, NULL);
    float whole[A * RANKS * B * C], part[A * B * C], work[A * RANKS * B * C], gathered[A * RANKS * B * C];
    const par_collective_attr attr = { .dim = 1 };
    const td_mesh mesh = { .axes = 1, .size = { RANKS }, .at = { rank } };
    const td_run r = { .td = o.td, .mesh = &mesh, .transport = &o.t };
    const td_arg all = { .data = whole, .shape = TD_SHAPE(A, RANKS * B, C) }, one_part = { .data = part, .shape = TD_SHAPE(A, B, C) };
    const td_arg out = { .data = gathered, .shape = all.shape };
    td_preparation prepared = { 0 };
    td_kernel k = { .op = &par_op_reduce_scatter, .attr = &attr, .run = &r, .in = &all, .out = &one_part, .inputs = 1, .outputs = 1, .workspace = work };
    EXPECT(k.op->prepare(o.td, &k, &prepared) && prepared.workspace_bytes == sizeof whole);
    for (int i = 0; i < A * RANKS * B * C; i++) whole[i] = (float)(1000 * rank + i);
    par_run_reduce_scatter(&k, &on_queue);
    k.in = &one_part, k.out = &out;
    par_run_all_gather(&k, &on_queue);
    stream_wait(o.queue);
    for (int a = 0; a < A; a++)
        for (int b = 0; b < B; b++)
            for (int c = 0; c < C; c++) EXPECT(part[(a * B + b) * C + c] == (float)(3000 + 3 * ((a * RANKS * B + rank * B + b) * C + c)));
    for (int i = 0; i < A * RANKS * B * C; i++) EXPECT(gathered[i] == (float)(3000 + 3 * i));

    k.in = &out, k.out = &one_part; /* what reduce_scatter left, again */
    memset(part, 0, sizeof part);
    par_run_own_part(&k, &on_queue);
    stream_wait(o.queue);
    EXPECT(part[(B + 1) * C] == (float)(3000 + 3 * ((RANKS * B + rank * B + 1) * C)));

    par_run_count_once(&(td_kernel){ .attr = &attr, .run = &r, .in = &out, .out = &all }, &on_queue);
    stream_wait(o.queue);
    EXPECT(whole[7] == (rank == 0 ? 3021.f : 0.f));

    /* Of a flat value of 12 elements, of which a rank has 4: elements 2 to 9, at 1 of ten. */
    const par_member_range range = { .from = 2, .to = 1, .elements = 8 };
    const td_arg flat = { .data = whole, .shape = TD_SHAPE(4), .global = TD_SHAPE(12), .place.kind = { TD_SHARDED } };
    const td_arg ten = { .data = part, .shape = TD_SHAPE(10) };
    for (int i = 0; i < 4; i++) whole[i] = (float)(1 + 4 * rank + i);
    par_run_own_members(&(td_kernel){ .attr = &range, .attr_bytes = sizeof range, .run = &r, .in = &flat, .out = &ten }, &on_queue);
    stream_wait(o.queue);
    for (int i = 0; i < 10; i++) EXPECT(part[i] == (i >= 1 && i <= 8 && (i + 1) / 4 == rank ? (float)(i + 2) : 0.f));
    leave(&o);
    return 0;
}

START_TEST(test_operations_copy_in_the_order_of_the_queue) { ck_assert_int_eq(run(3, &small, operations, NULL), 0); } END_TEST

/* ---- Runs and failures ------------------------------------------------------------------------------------- */

static void sleep_s(double seconds)
{
    nanosleep(&(struct timespec){ .tv_sec = (time_t)seconds, .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds)) }, NULL);
}
static void doze(void *user) { sleep_s(*(double *)user); }

enum { LATE = 1, FAILS, ENDS, AHEAD };

typedef struct seen {
    int mode;
    char text[3][PAR_MESSAGE_BYTES];
} seen;

/* Ten runs of two sums, handed over one behind the other; something happens in step 6. */
static int runs(par_world *world, int rank, void *user)
{
    seen *s = user;
    one o = join(world, rank, NULL);
    ranks_program *p = calloc(1, sizeof *p);
    double x = 0, y = 0, naps[] = { 0.02, 2 };
    bool ok = p != NULL, odd = rank == 1;
    ranks_record(p, 20);
    for (int64_t step = 1; step <= 10 && ok; step++) {
        par_moment at = { .run = step, .step = step };
        if (step == 6 && odd && s->mode == ENDS) break;
        ok = par_staged_before(o.me, at, step == 1) && par_agree(world, rank, o.td, at, &p->program, ranks_fingerprint(p, 0), step == 1) &&
             par_staged_begin(o.me, at);
        if (rank == 2 && s->mode == AHEAD) sleep_s(0.01); /* its host is hardly ahead, those of others by as much as may be */
        if (ok && odd) stream_call(o.queue, doze, &naps[step == 6 && s->mode == LATE]);
        ok = ok && o.t.all_reduce(o.t.self, 0, &x, 1, TD_F64) && o.t.all_reduce(o.t.self, 0, &y, 1, TD_F64);
        if (step == 6 && odd && s->mode == FAILS) {
            stream_wait(o.queue);
            td_fail(o.td, TD_ERROR_DATA, "no such file");
            par_fail_world(world, rank, td_error_text(o.td));
            ok = false;
        }
    }
    stream_wait(o.queue);
    o.t.is_sound(o.t.self);
    snprintf(s->text[rank], sizeof s->text[rank], "%s", td_error_text(o.td));
    free(p);
    leave(&o);
    return 0;
}

START_TEST(test_ranks_whose_hosts_are_ahead_by_different_runs_agree)
{
    seen s = { .mode = AHEAD };
    ck_assert_int_eq(run(3, &small, runs, &s), 0);
    for (int r = 0; r < 3; r++) ck_assert_str_eq(s.text[r], "");
}
END_TEST

START_TEST(test_a_late_rank_is_named_with_the_step_of_its_device)
{
    seen s = { .mode = LATE };
    ck_assert_int_eq(run(3, &hasty, runs, &s), 0);
    for (int r = 0; r < 3; r++) ck_assert_str_eq(s.text[r], "rank 1 did not arrive at all_reduce (call 1 of step 6) within 0.4 s");
}
END_TEST

START_TEST(test_a_rank_that_has_ended_ends_the_queues_of_others)
{
    seen s = { .mode = ENDS };
    ck_assert_int_eq(run(3, &small, runs, &s), 0);
    ck_assert_str_eq(s.text[0], "rank 1 ended before all_reduce (call 1 of step 6)");
    ck_assert_str_eq(s.text[2], s.text[0]);
}
END_TEST

START_TEST(test_a_rank_that_fails_ends_the_queues_of_others)
{
    seen s = { .mode = FAILS };
    ck_assert_int_eq(run(3, &small, runs, &s), 0);
    ck_assert_str_eq(s.text[0], "rank 1 after call 2 of step 6: no such file");
    ck_assert_str_eq(s.text[1], "no such file");
    ck_assert_str_eq(s.text[2], s.text[0]);
}
END_TEST

/* The device's thread stops the world and leaves the context alone; who waits asks, and is told. */
static int unasked(par_world *world, int rank, void *user)
{
    (void)user;
    one o = join(world, rank, NULL);
    float x = 1;
    if (rank == 1) return leave(&o), 0;
    EXPECT(o.t.all_reduce(o.t.self, 0, &x, 1, TD_F32));
    stream_wait(o.queue);
    EXPECT(*par_world_error(world) && td_error(o.td) == TD_OK);
    EXPECT(!o.t.is_sound(o.t.self) && td_error(o.td) == TD_ERROR_PARALLEL);
    EXPECT(!o.t.all_reduce(o.t.self, 0, &x, 1, TD_F32));
    leave(&o);
    return 0;
}

START_TEST(test_a_context_hears_of_failures_by_its_own_thread_alone) { ck_assert_int_eq(run(2, &small, unasked, NULL), 0); } END_TEST

/* ---- Which GPU, and what carries ---------------------------------------------------------------------------- */

START_TEST(test_each_rank_of_a_host_has_a_gpu_of_its_own)
{
    char name[PAR_GPU_NAME], text[512];
    ck_assert(par_gpu_of_rank("cuda", 3, 4, 4, name, text, sizeof text));
    ck_assert_str_eq(name, "cuda:3");
    ck_assert(par_gpu_of_rank("cuda", 1, 2, 8, name, text, sizeof text));
    ck_assert_str_eq(name, "cuda:1");
    ck_assert(par_gpu_of_rank("cuda:0", 1, 2, 8, name, text, sizeof text)); /* named for all */
    ck_assert_str_eq(name, "cuda:0");
    ck_assert(par_gpu_of_rank("cuda", 1, 2, 1, name, text, sizeof text)); /* the only one it may see */
    ck_assert_str_eq(name, "cuda");
    ck_assert(par_gpu_of_rank("cuda", 1, 2, 0, name, text, sizeof text)); /* td_open says why */
    ck_assert(!par_gpu_of_rank("cuda", 0, 4, 2, name, text, sizeof text)); /* those for whom there is one, too */
    ck_assert_str_eq(text, "4 ranks of this host have 2 GPUs, and a rank needs one of its own: start no more than 2, or, to try strategies and "
                           "not for speed, put all ranks on one by its name (--device cuda:0)");
}
END_TEST

START_TEST(test_gpus_are_counted_before_ranks_start)
{
    char text[512];
    ck_assert(par_gpus_suffice("cuda", 4, 4, text, sizeof text));
    ck_assert(par_gpus_suffice("cuda:0", 4, 1, text, sizeof text)); /* named for all */
    ck_assert(par_check_gpus("cpu", 4, text, sizeof text));
    ck_assert_str_eq(text, "");
    ck_assert(!par_gpus_suffice("cuda", 2, 1, text, sizeof text));
    ck_assert_str_eq(text, "2 ranks of this host have 1 GPU, and a rank needs one of its own: start no more than 1, or, to try strategies and "
                           "not for speed, put all ranks on one by its name (--device cuda:0)");
}
END_TEST

START_TEST(test_ranks_share_where_keys_are_the_same)
{
    par_gpu_use u = par_gpu_use_of((uint64_t[]){ 7, 8, 9, 10 }, 4, 2);
    ck_assert(!u.shared && u.gpus == 4 && u.with == 1);
    u = par_gpu_use_of((uint64_t[]){ 7, 8, 7, 8 }, 4, 2);
    ck_assert(u.shared && u.gpus == 2 && u.with == 2);
    u = par_gpu_use_of((uint64_t[]){ 7, 8, 8 }, 3, 0); /* of another rank's matter */
    ck_assert(u.shared && u.gpus == 2 && u.with == 1);
}
END_TEST

typedef struct chosen {
    bool may_share;
    char text[2][512];
} chosen;

static int chooses(par_world *world, int rank, void *user)
{
    chosen *c = user;
    td_context *td = td_open(&(td_options){ .log = ranks_quiet, .threads = 1 });
    stream *queue = stream_open(td, 1);
    par_attached a = { .td = td, .world = world, .rank = rank, .options.share_gpu = c->may_share };
    int64_t calls = -1;
    EXPECT(par_transport_local(world, rank, td, NULL, &a.transport));
    EXPECT(!par_carry_by(&a, &(td_mesh){ .axes = 1 }, &stream_device));
    EXPECT(par_sent(world, rank, &calls) == 0 && calls == 0);
    snprintf(c->text[rank], sizeof c->text[rank], "%s", td_error_text(td));
    stream_close(queue);
    td_close(td);
    return 0;
}

START_TEST(test_a_gpu_is_shared_by_its_name_alone)
{
    chosen c = { .may_share = false };
    ck_assert_int_eq(run(2, &small, chooses, &c), 0);
    ck_assert_str_eq(c.text[0], "2 ranks of this host have 1 GPU, and a rank needs one of its own: start no more than 1, or, to try strategies "
                                "and not for speed, put all ranks on one by its name (--device cuda:0)");
    ck_assert_str_eq(c.text[1], c.text[0]);
    c.may_share = true;
    ck_assert_int_eq(run(2, &small, chooses, &c), 0);
    ck_assert_str_has(c.text[0], "threads of one process cannot share a GPU");
}
END_TEST

/* What a rank that par_launch started does: shares a device with the other, and is told so. */
static void note_message(void *user, td_level level, const char *text)
{
    if (level == TD_LOG_INFO) snprintf(user, 256, "%s", text);
}

static int shares(par_world *world, int rank)
{
    char said[256] = "", text[256];
    td_context *td = td_open(&(td_options){ .log = note_message, .log_user = said, .threads = 1 });
    stream *queue = stream_open(td, 4);
    par_attached a = { .td = td, .world = world, .rank = rank, .options.share_gpu = true };
    int32_t x = rank + 1;
    EXPECT(par_transport_local(world, rank, td, NULL, &a.transport));
    EXPECT(par_carry_by(&a, &(td_mesh){ .axes = 1 }, &stream_device) && a.staged == par_local_at(world, rank));
    EXPECT(a.transport.all_reduce(a.transport.self, 0, &x, 1, TD_I32) && stream_wait(queue) && x == 3);
    EXPECT(strcmp(said, rank ? "" : "2 ranks share cuda:3: collectives go through the host's memory; for trying strategies, not for speed") == 0);
    par_world_text(world, text, sizeof text);
    EXPECT(strcmp(text, "2 ranks on 1 host, transport staged over local") == 0);
    stream_close(queue);
    td_close(td);
    par_world_close(world);
    return 0;
}

/* The same of ranks that share no memory. */
static int rank_of_mpi(void)
{
    char message[512];
    int rank;
    par_world *world = par_world_scheduled(&small, &rank, message, sizeof message);
    if (!world) return fprintf(stderr, "%s\n", message), 97;
    int failed = every_collective(world, rank, NULL);
    if (failed) par_fail_world(world, rank, "a collective failed");
    par_world_close(world);
    return failed != 0;
}

START_TEST(test_what_ranks_send_may_go_by_mpi)
{
    NEEDS_MPI;
    ck_assert_sh(0, MPIRUN "-n 3 '%s' mpi", own_path());
}
END_TEST

START_TEST(test_processes_share_a_gpu)
{
    char message[1024], *argv[] = { "test_staged", NULL };
    int status = par_launch(2, argv, &small, message, sizeof message);
    ck_assert_msg(status == 0, "%d: %s", status, message);
}
END_TEST

int main(int argc, char **argv)
{
    int rank;
    if (argc == 2 && !strcmp(argv[1], "mpi")) return rank_of_mpi();
    if (par_launched()) {
        par_world *world = par_world_join(&rank);
        return world ? shares(world, rank) != 0 : 97;
    }
    const TTest *const tests[] = {
        test_collectives_equal_plain_sums_to_the_bit_and_are_counted,
        test_a_graph_is_replayed_without_the_host_and_without_memory,
        test_a_graph_keeps_its_room_when_a_larger_plan_comes,
        test_operations_copy_in_the_order_of_the_queue,
        test_ranks_whose_hosts_are_ahead_by_different_runs_agree,
        test_a_late_rank_is_named_with_the_step_of_its_device,
        test_a_rank_that_has_ended_ends_the_queues_of_others,
        test_a_rank_that_fails_ends_the_queues_of_others,
        test_a_context_hears_of_failures_by_its_own_thread_alone,
        test_each_rank_of_a_host_has_a_gpu_of_its_own, test_gpus_are_counted_before_ranks_start,
        test_ranks_share_where_keys_are_the_same,
        test_a_gpu_is_shared_by_its_name_alone,
        test_what_ranks_send_may_go_by_mpi,
        test_processes_share_a_gpu,
    };
    return check_main("staged", tests, (int)(sizeof tests / sizeof tests[0]));
}
