/* Ranks that share one GPU: with 2 and 4 processes on cuda:0 every strategy gives the curve of one rank there, to 1e-5 of what the loss falls by
 * (bf16: 1e-2), and sends what the CPU's ranks send, whose bytes test_strategies.c holds against formulas; steps are graphs. A rank that is killed or
 * stopped ends the others, which wait inside a graph. Collectives go through the host's memory, then through NCCL: where it lets ranks share a
 * GPU, also with windows and copy engines; to an older one each rank is a host of its own.
 *
 * As test_gpu_ranks_on_host the same runs where there is no GPU, the host being one (tests/on_host): small networks alone, and graphs in orders
 * in which they were not captured, so that a wait too few, or memory given away too early, shows in the curve.
 *
 * The program starts itself again as ranks, each number of which does all its jobs in one world, context after context.
 *
 * Labels: gpu
 * Timeout: 600 s
 */
#define SHELL_FOLDER "test_gpu_ranks_files"
#include <dlfcn.h>
#include <signal.h>
#include <time.h>

#include "core/internal.h"
#include "parallel/nccl.h"
#include "tests/curves.h"
#include "tests/ranks.h"
#include "tests/shell.h"

#ifndef ON_HOST
#define ON_HOST 0                             /* 1: it is the host that is the GPU, some thousand times slower (tests/on_host) */
#endif
#define DEVICE "cuda:0"
static const char JOB[] = "GPU_RANKS_JOB";     /* what ranks do: "curves", "memory", "kill", "stop"; "nccl curves", "nccl kill in windows" ... */

static bool has_gpu(void)
{
    td_context *td = td_open(&(td_options){ .device = DEVICE, .log = check_log_line });
    bool has = td_error(td) == TD_OK;
    td_close(td);
    return has;
}

/* ---- What ranks do ---------------------------------------------------------------------------------------- */

static const struct { const char *strategy; int ranks; td_dtype dtype; } shared[] = {
    { "ddp", 2, TD_F32 }, { "zero1", 2, TD_F32 }, { "zero2", 2, TD_F32 }, { "zero3", 2, TD_F32 }, { "fsdp", 2, TD_F32 }, { "ddp+tp:2", 2, TD_F32 },
    { "ddp", 4, TD_F32 }, { "zero1", 4, TD_F32 }, { "zero2", 4, TD_F32 }, { "zero3", 4, TD_F32 }, { "fsdp", 4, TD_F32 }, { "hsdp:2x2", 4, TD_F32 },
    { "fsdp+tp:2", 4, TD_F32 },
    { "ddp", 2, TD_BF16 }, { "fsdp", 2, TD_BF16 }, { "zero2", 4, TD_BF16 }, { "hsdp:2x2", 4, TD_BF16 },
};
enum { SHARED = sizeof shared / sizeof *shared };

/* Accumulation, clipping, recomputation and offloading by turns. */
static job job_of(int i, bool gpt)
{
    static const int offload[] = { 0, PAR_OFFLOAD_OPTIMIZER, PAR_OFFLOAD_OPTIMIZER | PAR_OFFLOAD_PARAMETERS };
    return (job){ .dtype = shared[i].dtype, .gpt = gpt, .strategy = shared[i].strategy, .ranks = shared[i].ranks, .accumulate = i % 2 ? 3 : 1,
                  .clip = (clip)(i % 3), .recompute = i % 4 == 1, .offload = offload[(i + gpt) / 2 % 3],
                  .device = DEVICE };
}

/* The same on another device, by threads: the CPU, or one rank. */
static bool train_beside(job j, const char *device, const char *strategy, int ranks, job *done)
{
    j.device = device, j.strategy = strategy, j.ranks = ranks;
    if (ranks == 1) j.accumulate = 1, j.recompute = false;
    *done = j;
    return par_run_threads(ranks, &(par_world_options){ .timeout_s = 60 }, train, &(run_of){ &j, done }) == 0;
}

/* Says in `text` what is wrong. */
static bool is_right(const job *got, char *text, size_t room)
{
    job one = *got, cpu = *got;
    if (!train_beside(*got, DEVICE, "single", 1, &one) || !train_beside(*got, NULL, got->strategy, got->ranks, &cpu)) {
        snprintf(text, room, "beside: %.250s%.250s", one.error, cpu.error);
        return false;
    }
    double fall = one.losses[0] - one.losses[STEPS - 1], worst = 0;
    for (int s = 0; s < STEPS; s++) worst = fmax(worst, fabs(got->losses[s] - one.losses[s]));
    bool narrow = got->dtype == TD_BF16;
    bool near = fall > 0 && worst <= (narrow ? 1e-2 : 1e-5) * fall && is_near(got->parameters, one.parameters, narrow ? 1e-2 : 1e-4);
    bool planned = got->sent == got->planned_sent && got->calls == got->planned_calls;
    bool sent = got->sent == cpu.sent && got->calls == cpu.calls && (planned || got->accumulate > 1); /* a plan is of one micro-batch */
    snprintf(text, room, "%s %s, %s, on %d ranks, accumulation %d: the curve is off by %.3g of its fall, the parameters by %.3g; sent %lld bytes in "
             "%lld calls, planned %lld in %lld, on the CPU %lld in %lld", got->gpt ? "gpt" : "mlp", got->strategy, td_dtype_name(got->dtype), got->ranks, got->accumulate,
             worst / fall, got->parameters / one.parameters - 1, (long long)got->sent, (long long)got->calls, (long long)got->planned_sent,
             (long long)got->planned_calls, (long long)cpu.sent, (long long)cpu.calls);
    return near && sent;
}

/* Through NCCL a launch of a graph waits for the others' turns on the GPU, ten seconds a job: of four ranks only what has ranks connected in
 * several ways is done; the rest two ranks do. */
static bool is_known(const job *j) { return j->ranks > 2 && !strchr(j->strategy, ':') && !check_all(); }

static bool train_all(par_world *world, int rank, const char *transport, bool windows)
{
    char text[600];
    bool ok = true;
    for (int i = 0; i < 2 * SHARED && ok; i++) {
        job j = job_of(i / 2, i % 2), done = j;
        const par_nccl *n = par_local_at(world, rank)->nccl;
        int64_t before = n ? atomic_load(&n->windows) : 0;
        j.windows = done.windows = windows || i % 4 == 0;
        if (j.ranks != par_world_size(world) || (ON_HOST && j.gpt && !check_all()) || (!strcmp(transport, "nccl") && is_known(&j))) continue;
        ok = train(world, rank, &(run_of){ &j, &done }) == 0;
        if (!ok && rank > 0) continue;
        if (!ok) snprintf(text, sizeof text, "%s %s: %s", j.gpt ? "gpt" : "mlp", j.strategy, done.error);
        else if (rank == 0) ok = is_right(&done, text, sizeof text);
        n = par_local_at(world, rank)->nccl;
        if (ok && strcmp(world->on_device, transport) != 0) ok = snprintf(text, sizeof text, "collectives went through %s", world->on_device) < 0;
        if (ok && windows && (n->apart || atomic_load(&n->windows) == before)) ok = snprintf(text, sizeof text, "NCCL made no windows") < 0;
        if (rank == 0) fprintf(stderr, "%s\n", text);
        if (!ok) par_fail_world(world, rank, text);
    }
    return ok;
}

/* What the rank's plans may have, which was `asked` for, or 0; before it has joined the others, and behind. */
static bool join_within(par_world *world, int rank, int64_t asked, int64_t limit[2])
{
    td_context *td = td_open(&(td_options){ .device = DEVICE, .threads = 1, .memory_bytes = asked, .log = quiet });
    limit[0] = td->options.memory_bytes;
    bool joined = par_attach(td, world, rank, &(par_options){ .strategy = "ddp", .share_gpu = true });
    limit[1] = td->options.memory_bytes;
    td_close(td);
    return joined;
}

/* A part each; a rank that was told how much has that. */
static bool divide_memory(par_world *world, int rank)
{
    int64_t found[2], given[2];
    char text[160];
    if (!join_within(world, rank, 0, found) || !join_within(world, rank, 1 << 20, given)) return false;
    bool ok = found[1] > found[0] / 4 && found[1] <= found[0] / 2 && given[1] == 1 << 20;
    snprintf(text, sizeof text, "of %lld bytes each of 2 ranks may have %lld, and of %d %lld", (long long)found[0], (long long)found[1], 1 << 20,
             (long long)given[1]);
    if (!ok) par_fail_world(world, rank, text);
    return ok;
}

/* Twenty steps; in the tenth, which is in a graph, rank 1 goes wrong. */
static bool go_wrong(par_world *world, int rank, bool windows, int number)
{
    static float x[64];
    td_context *td = td_open(&(td_options){ .device = DEVICE, .threads = 1, .log = quiet });
    par_attach(td, world, rank, &(par_options){ .strategy = "fsdp", .share_gpu = true, .windows = windows });
    nn_linear layer = nn_linear_make(td_root(td), "layer", 16, 16);
    opt_optimizer *opt = opt_sgd(td_root(td), NULL);
    bool good = true;
    for (int s = 0; s < 20 && good; s++) {
        td_tensor loss = td_mean(td_square(nn_linear_apply(&layer, td_batch(td, "x", TD_F32, TD_SHAPE(8, 16), x))), TD_ALL, TD_DROP);
        td_backward(loss);
        td_keep(loss);
        opt_step(opt, 0.1);
        if (windows && s == 9 && !atomic_load(&par_local_at(world, rank)->nccl->windows)) break; /* nobody is killed */
        if (s == 10 && rank == 1) raise(number);
        good = td_step(td) && isfinite(td_item(loss));
    }
    if (!good) par_fail_world(world, rank, td_error_text(td));
    opt_close(opt);
    td_close(td);
    return good;
}

static int rank_main(void)
{
    int rank;
    const char *what = getenv(JOB);
    par_world *world = par_world_join(&rank);
    if (!world || !what) return 97;
    bool nccl = !strncmp(what, "nccl ", 5);
    if (nccl) ranks_share_by_nccl(rank), what += 5;
    bool ok = !strcmp(what, "curves")    ? train_all(world, rank, nccl ? "nccl" : "staged", false)
              : !strcmp(what, "windows") ? train_all(world, rank, "nccl", true)
              : !strcmp(what, "memory")  ? divide_memory(world, rank)
                                         : go_wrong(world, rank, strstr(what, "in windows"), strstr(what, "kill") ? SIGKILL : SIGSTOP);
    par_world_close(world);
    return ok ? 0 : 3;
}

/* ---- Tests ------------------------------------------------------------------------------------------------ */

static int launch(const char *what, int ranks, double timeout_s, char *message, size_t room)
{
    char *argv[] = { "test_gpu_ranks", NULL };
    setenv(JOB, what, 1);
    return par_launch(ranks, argv, &(par_world_options){ .timeout_s = timeout_s }, message, room);
}

static void check_curves(const char *what, int ranks)
{
    char message[2048];
    int status = launch(what, ranks, 100, message, sizeof message);
    ck_assert_msg(status == 0, "%d ranks: status %d: %s", ranks, status, message);
}

START_TEST(test_two_ranks_on_one_gpu_give_one_ranks_curves)
{
    if (!has_gpu()) SKIP("no CUDA device");
    check_curves("curves", 2);
}
END_TEST

START_TEST(test_four_ranks_on_one_gpu_give_one_ranks_curves)
{
    if (!has_gpu()) SKIP("no CUDA device");
    check_curves("curves", 4);
}
END_TEST

START_TEST(test_ranks_give_one_ranks_curves_through_nccl)
{
    if (ON_HOST || !has_gpu()) SKIP("no CUDA device");
    if (!dlopen("libnccl.so.2", RTLD_NOW)) SKIP("no libnccl.so.2");
    check_curves("nccl curves", 2);
    check_curves("nccl curves", 4);
}
END_TEST

/* With kernels for windows, and with copy engines where NCCL has them. */
START_TEST(test_ranks_that_reach_into_one_another_give_one_ranks_curves)
{
    if (ON_HOST || !has_gpu()) SKIP("no CUDA device");
    if (ranks_nccl_version() < 23000) SKIP("no NCCL 2.30, which lets ranks share a GPU");
    setenv("NCCL_CTA_POLICY", "2", 1);
    check_curves("nccl windows", 2);
    check_curves("nccl windows", 4);
    unsetenv("NCCL_CTA_POLICY");
}
END_TEST

START_TEST(test_ranks_on_one_gpu_divide_its_memory)
{
    char message[2048];
    if (!has_gpu()) SKIP("no CUDA device");
    int status = launch("memory", 2, 100, message, sizeof message);
    ck_assert_msg(status == 0, "status %d: %s", status, message);
    if (ON_HOST || ranks_nccl_version() < 23000) return;
    status = launch("nccl memory", 2, 100, message, sizeof message);
    ck_assert_msg(status == 0, "through NCCL: status %d: %s", status, message);
}
END_TEST

static void check_fault(const char *what, const char *has)
{
    enum { TIMEOUT_S = 10 };
    char message[2048];
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    int status = launch(what, 2, TIMEOUT_S, message, sizeof message);
    clock_gettime(CLOCK_MONOTONIC, &end);
    ck_assert_int_ne(status, 0);
    ck_assert_str_has(message, has);
    ck_assert_int_lt(end.tv_sec - begin.tv_sec, 60 + TIMEOUT_S + 5); /* a minute for both to start on a GPU and compile */
}

START_TEST(test_a_rank_that_goes_wrong_ends_the_others_in_their_graphs)
{
    if (!has_gpu()) SKIP("no CUDA device");
    check_fault("kill", "rank 1 was killed by signal 9 (Killed)");
    check_fault("stop", "rank 1 did not arrive at ");
    if (ON_HOST || !dlopen("libnccl.so.2", RTLD_NOW)) return;
    check_fault("nccl kill", "rank 1 was killed by signal 9 (Killed)");
    check_fault("nccl stop", "rank 1 ");
    if (ranks_nccl_version() < 23000) return;
    setenv("NCCL_CTA_POLICY", "2", 1);
    check_fault("nccl kill in windows", "rank 1 was killed by signal 9 (Killed)");
    check_fault("nccl stop in windows", "rank 1 ");
    unsetenv("NCCL_CTA_POLICY");
}
END_TEST

/* As a user starts them. */
START_TEST(test_ranks_share_a_gpu_by_its_name)
{
    if (ON_HOST) SKIP("the binaries are built for no GPU");
    if (!has_gpu()) SKIP("no CUDA device");
    ck_assert_sh(0, "$MLP bench --device " DEVICE " --ranks 2 --strategy zero2 --hidden 16 --batch 8 --steps 4 --threads 2");
    ck_assert_str_has(out_text, "2 ranks share " DEVICE ": collectives go through the host's memory; for trying strategies, not for speed");
    ck_assert_str_has(out_text, "world: 2 ranks on 1 host, transport staged over local, device " DEVICE ", strategy zero2");
    ck_assert_int_ne(0, sh("$MLP bench --device cuda --ranks 64 --strategy ddp --hidden 16 --batch 64 --steps 4 --threads 2"));
    ck_assert_str_has(err_text, "64 ranks of this host have ");
    ck_assert_str_has(err_text, "put all ranks on one by its name (--device cuda:0)");
}
END_TEST

int main(void)
{
    if (par_launched()) return rank_main();
    const TTest *const tests[] = {
        test_two_ranks_on_one_gpu_give_one_ranks_curves,
        test_four_ranks_on_one_gpu_give_one_ranks_curves,
        test_ranks_give_one_ranks_curves_through_nccl,
        test_ranks_that_reach_into_one_another_give_one_ranks_curves,
        test_ranks_on_one_gpu_divide_its_memory,
        test_a_rank_that_goes_wrong_ends_the_others_in_their_graphs,
        test_ranks_share_a_gpu_by_its_name,
    };
    return check_main("gpu_ranks", tests, (int)(sizeof tests / sizeof tests[0]));
}
