/* Transport `nccl` on GPUs: what collectives give on one GPU, where a rank alone has communicators of its own, and between ranks, the
 * same as between ranks on the CPU; in a graph that is launched again and again; and that ranks end when one of them does not get on.
 * Where there is one GPU ranks share it, each a host of its own to NCCL. The program starts itself again as ranks. Without a GPU: that
 * the NCCL of this machine is one.
 *
 * Labels: cuda gpu
 * Timeout: 600 s
 */
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "core/internal.h"
#include "parallel/nccl.h"
#include "parallel/transport_nccl.h"
#include "tests/check.h"
#include "tests/ranks.h"

static const td_dtype dtypes[] = { TD_F32, TD_F64, TD_BF16, TD_F16, TD_I32, TD_I64, TD_U8 };
static const int64_t counts[] = { 0, 1, 7, 1000, 300001 };
enum { DTYPES = sizeof dtypes / sizeof *dtypes, COUNTS = sizeof counts / sizeof *counts, MOST = 300001, TIMEOUT_S = 10 };

static void sleep_s(double seconds)
{
    nanosleep(&(struct timespec){ .tv_sec = (time_t)seconds, .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds)) }, NULL);
}

static int gpus(void)
{
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

static bool has_nccl(void)
{
    nccl_library lib;
    char message[600];
    return nccl_library_load("libnccl.so.2", &lib, message, sizeof message);
}

/* ---- A rank with a GPU */

typedef struct one {
    par_world *world;
    int rank, ranks;
    td_context *td;
    td_transport inner, t;
    cudaStream_t queue;
    char *in, *out;               /* device memory for MOST elements of 8 bytes from each rank */
    char *host_in, *host_out;
} one;

static int failed(const one *o, const char *what)
{
    fprintf(stderr, "rank %d: %s: %s (%s)\n", o->rank, what, td_error_text(o->td), cudaGetErrorString(cudaGetLastError()));
    return 1;
}

static int open_rank(one *o, const td_mesh *mesh, bool alone)
{
    char device[24];
    size_t bytes = (size_t)o->ranks * MOST * 8;
    snprintf(device, sizeof device, "cuda:%d", o->rank % gpus());
    o->td = td_open(&(td_options){ .device = device, .threads = 1, .log = ranks_quiet });
    if (td_error(o->td) != TD_OK || !par_transport_local(o->world, o->rank, o->td, mesh, &o->inner)) return failed(o, "opening");
    bool open = alone ? par_nccl_open(o->world, o->rank, o->td, &o->inner,
                                      &(par_nccl_options){ .library = "libnccl.so.2", .device = &par_cuda_device, .alone = true }, &o->t)
                      : par_transport_nccl(o->world, o->rank, o->td, &o->inner, &par_cuda_device, false, &o->t);
    o->queue = td_queue(o->td);
    o->host_in = malloc(bytes);
    o->host_out = malloc(bytes);
    bool memory = o->host_in && o->host_out && cudaMalloc((void **)&o->in, bytes) == cudaSuccess && cudaMalloc((void **)&o->out, bytes) == cudaSuccess;
    return open && memory ? 0 : failed(o, "connecting");
}

static int close_rank(one *o)
{
    cudaFree(o->in);
    cudaFree(o->out);
    free(o->host_in);
    free(o->host_out);
    td_close(o->td);
    return 0;
}

static bool to_device(const one *o, const void *from, int64_t bytes)
{
    return cudaMemcpyAsync(o->in, from, (size_t)bytes, cudaMemcpyHostToDevice, o->queue) == cudaSuccess;
}

static bool to_host(const one *o, const void *from, int64_t bytes)
{
    return cudaMemcpyAsync(o->host_out, from, (size_t)bytes, cudaMemcpyDeviceToHost, o->queue) == cudaSuccess &&
           cudaStreamSynchronize(o->queue) == cudaSuccess;
}

/* Whole numbers from -8 to 8 (of u8: from 0), whose sums every dtype holds exactly, in whatever order they are taken. */
static double number(td_dtype dtype, int rank, int64_t i) { return (double)((7 * rank + 3 * i) % 17) - (dtype == TD_U8 ? 0 : 8); }

static void put(td_dtype dtype, void *to, int64_t at, double x)
{
    float wide = (float)x;
    char *place = (char *)to + at * td_dtype_size(dtype);
    switch (dtype) {
    case TD_F64: memcpy(place, &x, sizeof x); break;
    case TD_I32: memcpy(place, &(int32_t){ (int32_t)x }, 4); break;
    case TD_I64: memcpy(place, &(int64_t){ (int64_t)x }, 8); break;
    case TD_U8: *(uint8_t *)place = (uint8_t)x; break;
    default: td_convert(dtype, place, TD_F32, &wide, 1);
    }
}

static double sum_of(td_dtype dtype, int ranks, int64_t i)
{
    double sum = 0;
    for (int r = 0; r < ranks; r++) sum += number(dtype, r, i);
    return sum;
}

/* ---- Every collective, `count` elements a part, against what it is to give */

typedef enum kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST, KINDS } kind;

static bool call(const one *o, kind k, int64_t count, td_dtype dtype)
{
    const td_transport *t = &o->t;
    switch (k) {
    case ALL_REDUCE: return t->all_reduce(t->self, 0, o->in, count, dtype);
    case REDUCE_SCATTER: return t->reduce_scatter(t->self, 0, o->in, o->out, count, dtype);
    case ALL_GATHER: return t->all_gather(t->self, 0, o->in, o->out, count, dtype);
    case ALL_TO_ALL: return t->all_to_all(t->self, 0, o->in, o->out, count, dtype);
    case BROADCAST: return t->broadcast(t->self, 0, o->ranks - 1, o->in, count * td_dtype_size(dtype));
    case KINDS: break;
    }
    return false;
}

/* Elements that it gives: where to, and what. */
static int64_t wanted(const one *o, kind k, int64_t count, td_dtype dtype, void *to)
{
    bool whole = k == ALL_GATHER || k == ALL_TO_ALL;
    int64_t all = whole ? o->ranks * count : count;
    for (int64_t i = 0; i < all; i++) {
        double x = 0;
        switch (k) {
        case ALL_REDUCE: x = sum_of(dtype, o->ranks, i); break;
        case REDUCE_SCATTER: x = sum_of(dtype, o->ranks, o->rank * count + i); break;
        case ALL_GATHER: x = number(dtype, (int)(i / count), i % count); break;
        case ALL_TO_ALL: x = number(dtype, (int)(i / count), o->rank * count + i % count); break;
        case BROADCAST: x = number(dtype, o->ranks - 1, i); break;
        case KINDS: break;
        }
        put(dtype, to, i, x);
    }
    return all;
}

static bool is_in_place(kind k) { return k == ALL_REDUCE || k == BROADCAST; }

/* The rank's numbers are on the device; 0xFF is where what comes is to be. */
static bool give(const one *o, td_dtype dtype, int64_t count)
{
    int64_t all = o->ranks * count, bytes = all * td_dtype_size(dtype);
    for (int64_t i = 0; i < all; i++) put(dtype, o->host_in, i, number(dtype, o->rank, i));
    return to_device(o, o->host_in, bytes) && cudaMemsetAsync(o->out, 0xFF, (size_t)bytes, o->queue) == cudaSuccess;
}

static bool is_right(const one *o, kind k, int64_t count, td_dtype dtype)
{
    int64_t bytes = wanted(o, k, count, dtype, o->host_in) * td_dtype_size(dtype);
    bool right = to_host(o, is_in_place(k) ? o->in : o->out, bytes) && (!bytes || memcmp(o->host_out, o->host_in, (size_t)bytes) == 0);
    if (!right) fprintf(stderr, "rank %d of %d: collective %d of %lld %s is wrong\n", o->rank, o->ranks, k, (long long)count, td_dtype_name(dtype));
    return right;
}

static int every_collective(one *o)
{
    for (int d = 0; d < DTYPES; d++)
        for (int c = 0; c < COUNTS; c++)
            for (kind k = 0; k < KINDS; k++)
                if (!give(o, dtypes[d], counts[c]) || !call(o, k, counts[c], dtypes[d]) || !is_right(o, k, counts[c], dtypes[d]))
                    return failed(o, "a collective");
    return 0;
}

/* What ranks on the CPU give for the same numbers, to the bit, of dtypes that they sum. */
static int same_as_local(one *o)
{
    static const td_dtype summed[] = { TD_F32, TD_F64, TD_BF16, TD_I32, TD_I64 };
    for (int d = 0; d < 5; d++) {
        int64_t count = 1000, bytes = count * td_dtype_size(summed[d]);
        if (!give(o, summed[d], count) || !call(o, ALL_REDUCE, count, summed[d]) || !to_host(o, o->in, bytes)) return failed(o, "all_reduce");
        if (!o->inner.all_reduce(o->inner.self, 0, o->host_in, count, summed[d])) return failed(o, "all_reduce on the CPU");
        if (memcmp(o->host_in, o->host_out, (size_t)bytes)) return failed(o, "all_reduce differs from the CPU's");
    }
    return 0;
}

/* ---- In a graph: a gather and a sum of what was gathered, each launch with other numbers */

static bool record(const one *o, int64_t count, cudaGraphExec_t *to)
{
    cudaGraph_t graph = NULL;
    if (cudaStreamBeginCapture(o->queue, cudaStreamCaptureModeThreadLocal) != cudaSuccess) return false;
    bool called = o->t.all_gather(o->t.self, 0, o->in, o->out, count, TD_F32) &&
                  o->t.all_reduce(o->t.self, 0, o->out, o->ranks * count, TD_F32);
    bool made = cudaStreamEndCapture(o->queue, &graph) == cudaSuccess && called && cudaGraphInstantiate(to, graph, 0) == cudaSuccess;
    if (graph) cudaGraphDestroy(graph);
    return made;
}

static int replays(one *o, int64_t count)
{
    cudaGraphExec_t graph;
    int64_t all = o->ranks * count, calls_before, calls;
    td_sent first = { 0 }, of_plan = { 0 };
    if (!give(o, TD_F32, count) || !call(o, ALL_GATHER, count, TD_F32)) return failed(o, "a gather before the graph");
    o->t.ran(o->t.self, &first);
    if (!record(o, count, &graph)) return failed(o, "recording");
    o->t.ran(o->t.self, &of_plan);
    int64_t before = o->t.sent(o->t.self, &calls_before);
    for (int launch = 0; launch < 5; launch++) {
        for (int64_t i = 0; i < count; i++) put(TD_F32, o->host_in, i, number(TD_F32, o->rank, i + launch));
        if (!to_device(o, o->host_in, count * 4) || cudaGraphLaunch(graph, o->queue) != cudaSuccess) return failed(o, "launching");
        o->t.ran(o->t.self, &of_plan);
        for (int64_t i = 0; i < all; i++) put(TD_F32, o->host_in, i, o->ranks * number(TD_F32, (int)(i / count), i % count + launch));
        if (!to_host(o, o->out, all * 4) || memcmp(o->host_out, o->host_in, (size_t)all * 4)) return failed(o, "a launched graph is wrong");
    }
    cudaGraphExecDestroy(graph);
    int64_t sent = o->t.sent(o->t.self, &calls) - before, others = o->ranks - 1;
    int64_t each = others * count * 4 + (2 * others * all * 4 + o->ranks - 1) / o->ranks;
    if (sent != 5 * each || calls - calls_before != 5 * 2) return failed(o, "launches are not counted");
    return 0;
}

/* Of a buffer of 4 MB each takes some time, and no second. */
static int called_bare(one *o)
{
    for (par_collective kind = PAR_ALL_REDUCE; kind <= PAR_ALL_TO_ALL; kind++) {
        double seconds = -1;
        bool measured = par_measure_bare(o->td, o->world, o->rank, kind, (1 << 20) / o->ranks, TD_F32, 20, &seconds);
        if (!measured || !(seconds > 0 && seconds < 1)) return failed(o, "a collective called bare");
    }
    return 0;
}

/* ---- One GPU */

START_TEST(test_nccl_of_this_machine_has_what_is_needed)
{
    nccl_library lib;
    char message[600];
    if (!dlopen("libnccl.so.2", RTLD_NOW)) SKIP("no libnccl.so.2");
    ck_assert_msg(nccl_library_load("libnccl.so.2", &lib, message, sizeof message), "%s", message);
    ck_assert_int_ge(lib.version, NCCL_LEAST_VERSION);
    ck_assert_str_eq(lib.get_error_string(NCCL_SUCCESS), "no error");
}
END_TEST

static int alone(par_world *world, int rank, void *user)
{
    (void)user;
    one o = { .world = world, .rank = rank, .ranks = 1 };
    return open_rank(&o, NULL, true) || every_collective(&o) || replays(&o, 1000) || called_bare(&o) || close_rank(&o);
}

START_TEST(test_a_rank_alone_copies_through_communicators_of_its_own)
{
    if (!gpus()) SKIP("no CUDA device");
    if (!has_nccl()) SKIP("no libnccl.so.2");
    ck_assert_int_eq(par_run_threads(1, NULL, alone, NULL), 0);
}
END_TEST

/* ---- Several ranks: what they do, by the program's argument */

static int agree(one *o, int64_t run)
{
    static ranks_program p;
    ranks_record(&p, 3);
    par_moment at = { .run = run, .step = run + 1 };
    return par_agree(o->world, o->rank, o->td, at, &p.program, ranks_fingerprint(&p, 0), run == 0) ? 0 : failed(o, "agreeing");
}

/* Steps of one graph; rank 1 does not come through the third. */
static int stumble(one *o, const char *how)
{
    cudaGraphExec_t graph = NULL;
    td_sent of_plan = { 0 };
    bool replayed = strstr(how, "replayed") != NULL;
    for (int64_t run = 0; run < 6; run++) {
        if (agree(o, run)) return 1;
        if (run == 3 && o->rank == 1) {
            sleep_s(0.5); /* the others' GPUs wait */
            if (strstr(how, "killed")) raise(SIGKILL);
            if (strstr(how, "stopped")) raise(SIGSTOP);
            if (strstr(how, "fails")) td_fail(o->td, TD_ERROR_DATA, "/x/y: no such file");
            if (strstr(how, "fails")) par_fail_world(o->world, o->rank, td_error_text(o->td));
            if (strstr(how, "late")) sleep_s(30);
            return 1;
        }
        if (run == 1 && replayed && !record(o, 1000, &graph)) return failed(o, "recording");
        bool ran = graph ? cudaGraphLaunch(graph, o->queue) == cudaSuccess : call(o, ALL_REDUCE, 1000, TD_F32);
        if (!ran) return failed(o, "a step");
        o->t.ran(o->t.self, &of_plan);
        cudaStreamSynchronize(o->queue); /* as who reads a loss */
        if (!o->t.is_sound(o->t.self)) break;
    }
    if (graph) cudaGraphExecDestroy(graph);
    fprintf(stderr, "rank %d has come out of the step: %s\n", o->rank, td_error_text(o->td));
    return td_error(o->td) != TD_OK;
}

/* Two contexts in one world, one after the other, of which the second has other axes. */
static int grid(one *o)
{
    td_mesh mesh = { .axes = 2, .name = { "replicate", "shard" }, .size = { 2, o->ranks / 2 }, .at = { o->rank / (o->ranks / 2), o->rank % (o->ranks / 2) },
                     .rank = o->rank, .world = o->ranks };
    if (o->ranks % 2 || o->ranks < 4) return 0;
    if (open_rank(o, &mesh, false)) return 1;
    for (int axes = 0; axes < 3; axes++) {
        int first = mesh.at[0] * mesh.size[1], size = axes == 0 ? 2 : axes == 1 ? mesh.size[1] : o->ranks;
        float x = (float)o->rank, want = 0, got;
        for (int i = 0; i < size; i++) want += (float)(axes == 0 ? mesh.at[1] + i * mesh.size[1] : axes == 1 ? first + i : i);
        if (!to_device(o, &x, 4) || !o->t.all_reduce(o->t.self, axes == 2 ? td_axes(0, 1) : axes, o->in, 1, TD_F32) || !to_host(o, o->in, 4))
            return failed(o, "a sum along an axis");
        memcpy(&got, o->host_out, 4);
        if (got != want) return failed(o, "a sum along an axis is wrong");
    }
    return close_rank(o);
}

static int be_rank(const char *what)
{
    one o = { .rank = -1 };
    o.world = par_world_join(&o.rank);
    if (!o.world) return 1;
    o.ranks = par_world_size(o.world);
    if (gpus() < o.ranks) ranks_share_by_nccl(o.rank);
    bool values = !strcmp(what, "values");
    int status = open_rank(&o, NULL, false);
    if (!status && values) status = every_collective(&o) || same_as_local(&o) || replays(&o, 1000) || replays(&o, 100000) || called_bare(&o);
    else if (!status) status = stumble(&o, what);
    if (status && td_error(o.td) != TD_OK) par_fail_world(o.world, o.rank, td_error_text(o.td));
    close_rank(&o);
    if (!status && values) status = grid(&o);
    par_world_close(o.world);
    return status;
}

/* Starts ranks that do it; how long they took. */
static double launch(const char *what, int ranks, int *status, char message[PAR_MESSAGE_BYTES])
{
    char argument[32], *argv[] = { "test_nccl", argument, NULL };
    snprintf(argument, sizeof argument, "%s", what);
    double begin = par_seconds();
    *status = par_launch(ranks, argv, &(par_world_options){ .timeout_s = TIMEOUT_S }, message, PAR_MESSAGE_BYTES);
    return par_seconds() - begin;
}

#define NEEDS_GPU()                             \
    if (!gpus()) SKIP("no CUDA device");        \
    if (!has_nccl()) SKIP("no libnccl.so.2")

START_TEST(test_ranks_on_gpus_give_what_ranks_on_the_cpu_give)
{
    char message[PAR_MESSAGE_BYTES];
    int status;
    NEEDS_GPU();
    for (int ranks = 2; ranks <= (gpus() < 4 ? 4 : gpus()) && ranks <= 8; ranks *= 2) {
        launch("values", ranks, &status, message);
        ck_assert_msg(status == 0, "%d ranks: %s", ranks, message);
    }
}
END_TEST

/* From the third step on at most the deadline and 5 s; connecting takes some, too. */
static void assert_ends(const char *what, const char *text)
{
    char message[PAR_MESSAGE_BYTES];
    int status;
    double seconds = launch(what, 2, &status, message);
    ck_assert_int_ne(status, 0);
    ck_assert_str_has(message, text);
    ck_assert_msg(seconds < 2 * TIMEOUT_S + 5, "%s: it took %g s", what, seconds);
}

START_TEST(test_ranks_end_when_one_is_killed)
{
    NEEDS_GPU();
    assert_ends("killed", "rank 1 was killed by signal 9");
    assert_ends("killed, replayed", "rank 1 was killed by signal 9");
}
END_TEST

START_TEST(test_ranks_end_when_one_is_stopped)
{
    NEEDS_GPU();
    assert_ends("stopped, replayed", "rank 1 ");
}
END_TEST

START_TEST(test_ranks_end_when_one_fails)
{
    NEEDS_GPU();
    assert_ends("fails", "/x/y: no such file");
    assert_ends("fails, replayed", "/x/y: no such file");
}
END_TEST

/* All have agreed on the run: who keeps it waiting cannot be told. */
START_TEST(test_ranks_end_when_one_does_not_come)
{
    NEEDS_GPU();
    assert_ends("late, replayed", "step 4");
}
END_TEST

int main(int argc, char **argv)
{
    setenv("NCCL_NVLS_ENABLE", "0", 0); /* where GPUs are shared; who sets it is heeded */
    if (par_launched()) return argc > 1 ? be_rank(argv[1]) : 98;
    const TTest *const tests[] = {
        test_nccl_of_this_machine_has_what_is_needed,
        test_a_rank_alone_copies_through_communicators_of_its_own,
        test_ranks_on_gpus_give_what_ranks_on_the_cpu_give,
        test_ranks_end_when_one_is_killed,
        test_ranks_end_when_one_is_stopped,
        test_ranks_end_when_one_fails,
        test_ranks_end_when_one_does_not_come,
    };
    return check_main("nccl", tests, (int)(sizeof tests / sizeof tests[0]));
}
