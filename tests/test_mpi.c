/* Ranks that mpirun starts: collectives, training, and what happens when one of them dies, stops, fails or disagrees. The
 * program starts itself again as a rank (`rank MODE`). Without Open MPI the tests are skipped.
 * Timeout: 300 s
 */
#define SHELL_FOLDER "mpi"
#include <signal.h>
#include <stddef.h>
#include <stdint.h>

#include "parallel/mpi.h"
#include "tests/mpirun.h"
#include "tests/ranks.h"

static const double DEADLINE_S = 8, FAR_S = 30; /* to start, too: MPI takes its time where cores are few */

/* ---- What a rank does ------------------------------------------------------------------------------------ */

/* Ranks as a grid of 2 x 2: sums along each axis and barriers of all in turn, data larger than a staging buffer. */
static int grid(par_world *world, int rank)
{
    enum { COUNT = 3000 };
    static double x[COUNT];
    td_context *td = td_open(&(td_options){ .log = ranks_quiet, .threads = 1 });
    td_mesh mesh = { .axes = 2, .size = { 2, 2 }, .at = { rank / 2, rank % 2 }, .rank = rank, .world = 4 };
    td_transport t;
    EXPECT(ranks_transport(world, rank, td, &mesh, &t));
    for (int i = 0; i < 50; i++) {
        for (int k = 0; k < COUNT; k++) x[k] = rank + i;
        EXPECT(t.all_reduce(t.self, i % 2, x, i < 3 ? COUNT : 1, TD_F64));
        double sum = i % 2 == 0 ? 2 * (rank % 2) + 2 : 4 * (rank / 2) + 1; /* of ranks r and r + 2; of 2 r and 2 r + 1 */
        EXPECT(x[0] == sum + 2 * i);
        EXPECT(i >= 3 || x[COUNT - 1] == sum + 2 * i);
        EXPECT(i % 7 != 0 || t.barrier(t.self));
    }
    td_close(td);
    return 0;
}

/* All gives and all takes one buffer. */
static int in_place(par_world *world, int rank)
{
    enum { COUNT = 1500, MOST = 4 };
    static int64_t all[MOST * COUNT];
    int ranks = par_world_size(world);
    td_context *td = td_open(&(td_options){ .log = ranks_quiet, .threads = 1 });
    td_transport t;
    EXPECT(ranks_transport(world, rank, td, NULL, &t));
    for (int64_t i = 0; i < COUNT; i++) all[rank * COUNT + i] = 10000 * rank + i;
    EXPECT(t.all_gather(t.self, 0, all + rank * COUNT, all, COUNT, TD_I64));
    for (int r = 0; r < ranks; r++)
        for (int64_t i = 0; i < COUNT; i++) EXPECT(all[r * COUNT + i] == 10000 * r + i);
    EXPECT(t.reduce_scatter(t.self, 0, all, all + rank * COUNT, COUNT, TD_I64));
    for (int64_t i = 0; i < COUNT; i++) EXPECT(all[rank * COUNT + i] == ranks * (10000 * rank + i));
    td_close(td);
    return 0;
}

/* Begins at step 7; what it does before that is the same for all. */
static void act_at_step_7(const char *mode, int rank)
{
    if (strcmp(mode, "kill") != 0 && strcmp(mode, "stop") != 0) return;
    if (rank == 1 || rank == 2) usleep(300000); /* the others have come to the step */
    if (strcmp(mode, "kill") == 0 && rank == 2) raise(SIGKILL);
    if (strcmp(mode, "stop") == 0 && rank == 1) raise(SIGSTOP);
}

static bool is(const char *mode, const char *name) { return strcmp(mode, name) == 0; }

/* Posts another step than the others without having heard their posts, as when messages cross. */
static bool post_unheard(par_world *world, int rank)
{
    par_area *area = &world->segment->area[rank];
    uint32_t index = atomic_load(&area->posted.value);
    usleep(300000); /* the others have posted */
    area->post[index] = area->post[index - 1];
    area->post[index].run++;
    area->post[index].step = par_step_of((par_moment){ .step = 7 });
    area->post[index].fingerprint++;
    par_advance(&area->posted);
    par_mpi_tell_post(world, index);
    return true;
}

/* Tells the others what a rank of another version would. */
static void speak_as_another(par_world *world, int rank)
{
    static const uint64_t message[64] = { 1 };
    static mpi_request request[8];
    for (int r = 0; r < par_world_size(world); r++)
        if (r != rank) world->mpi->lib.isend(message, sizeof message, world->mpi->lib.byte, r, 0, world->mpi->messages, &request[r]);
}

/* Twenty steps of two sums each. */
static bool run_steps(par_world *world, int rank, const char *mode, td_context *td)
{
    td_transport t;
    static ranks_program p;
    bool ok = ranks_transport(world, rank, td, NULL, &t);
    par_agree_options(world, rank, rank == 1 && is(mode, "option") ? "strategy=fsdp" : "strategy=ddp");
    for (int64_t step = 0; step < 20 && ok; step++) {
        bool odd = step == 7 && rank == 1;
        ranks_record(&p, 20);
        if (step == 7) act_at_step_7(mode, rank);
        if (odd && is(mode, "version")) speak_as_another(world, rank);
        if (odd && is(mode, "end")) return true;
        if (odd && is(mode, "operation")) ranks_differ(&p, 12);
        if (odd && is(mode, "cross")) ok = post_unheard(world, rank);
        else ok = par_agree(world, rank, td, (par_moment){ .run = step, .step = step }, &p.program, ranks_fingerprint(&p, 0), step == 0);
        double x[2] = { rank, rank };
        if (ok && !(odd && is(mode, "skip"))) ok = t.all_reduce(t.self, 0, x, odd && is(mode, "size") ? 2 : 1, TD_F64);
        ok = ok && t.all_reduce(t.self, 0, x, 1, TD_F64);
        if (ok && odd && is(mode, "fail")) {
            td_fail(td, TD_ERROR_DATA, "/x/y: no such file");
            return false;
        }
    }
    return ok;
}

/* What a deadline tells; all else is noticed before any could pass. */
static double deadline_of(const char *mode) { return is(mode, "stop") ? DEADLINE_S : FAR_S; }

static int rank_main(const char *mode)
{
    char message[512];
    int rank;
    par_world_options options = { .timeout_s = deadline_of(mode), .staging_bytes = 4096 };
    par_world *world = par_world_scheduled(&options, &rank, message, sizeof message);
    if (!world) {
        printf("[%s]\n", message);
        return 97;
    }
    if (is(mode, "collectives")) {
        int line = ranks_every_collective(world, rank);
        if (!line) line = in_place(world, rank);
        if (!line && par_world_size(world) == 4) line = grid(world, rank);
        if (!line) par_world_close(world);
        return line != 0;
    }
    td_context *td = td_open(&(td_options){ .log = ranks_quiet, .threads = 1 });
    bool ok = run_steps(world, rank, mode, td);
    if (!ok) par_fail_world(world, rank, td_error_text(td));
    if (!ok && par_tells_error(world, rank)) printf("[%s]\n", par_world_error(world)), fflush(stdout);
    td_close(td);
    par_world_close(world);
    return ok ? 0 : 3;
}

/* ---- Tests ----------------------------------------------------------------------------------------------- */

/* Lines that begin so. */
static int count(const char *text, const char *beginning)
{
    int n = 0;
    for (const char *line = text; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) n += !strncmp(line, beginning, strlen(beginning));
    return n;
}

static int start(int ranks, const char *mode) { return sh(MPIRUN "-n %d '%s' rank %s", ranks, own_path(), mode); }

START_TEST(test_collectives_equal_plain_sums)
{
    NEEDS_MPI;
    for (int ranks = 2; ranks <= 4; ranks++) {
        int status = start(ranks, "collectives");
        ck_assert_msg(status == 0, "%d ranks: status %d: %.900s%.900s", ranks, status, out_text, err_text);
    }
}
END_TEST

/* Before the deadline, or within it and 5 s once all have come, which may take as long: one line says what was wrong, once. */
static void expect_end(int ranks, const char *mode, const char *text)
{
    double begin = par_seconds();
    int status = start(ranks, mode);
    double seconds = par_seconds() - begin;
    ck_assert_msg(status != 0, "%s: status 0: %s", mode, out_text);
    ck_assert_msg(seconds < (is(mode, "stop") ? 2 * DEADLINE_S + 5 : FAR_S), "%s: %g s", mode, seconds);
    const char *at = strchr(out_text, '[');
    ck_assert_msg(at && strstr(at, text) == at, "%s: %.500s, not %s; %.900s", mode, out_text, text, err_text);
    ck_assert_msg(!strchr(at + 1, '['), "%s: told twice: %s", mode, out_text);
}

START_TEST(test_a_rank_that_dies_stops_or_ends_is_named_with_collective_and_step)
{
    NEEDS_MPI;
    expect_end(4, "kill", "[rank 2 has died; rank ");
    ck_assert_str_has(out_text, " waited for others at all_reduce (call 1 of step 7)]");
    expect_end(3, "stop", "[rank 1 did not arrive at all_reduce (call 1 of step 7) within 8 s]");
    expect_end(3, "end", "[rank 1 ended before all_reduce (call 1 of step 7)]");
}
END_TEST

START_TEST(test_one_ranks_error_is_told_once)
{
    NEEDS_MPI;
    expect_end(3, "fail", "[rank 1 after call 2 of step 7: /x/y: no such file]");
}
END_TEST

START_TEST(test_a_disagreement_is_named)
{
    NEEDS_MPI;
    /* Rank 1 is compared with the rank before it or with the one after it. */
    expect_end(3, "option", "[ranks disagree at step 0: option strategy is ");
    ck_assert_str_has(out_text, "fsdp on rank 1");
    ck_assert_str_has(out_text, "ddp on rank ");
    expect_end(2, "operation",
               "[ranks disagree at step 7: operation 12 is mul (64, 10) f32 at model.c:41 on rank 0 but add (64, 10) f32 at model.c:43 on rank 1]");
    expect_end(2, "size", "[ranks disagree: rank 0 calls all_reduce of 1 f64 (call 1 of step 7) but rank 1 calls all_reduce of 2 f64 (call 1 of step 7)]");
}
END_TEST

START_TEST(test_another_version_is_told)
{
    NEEDS_MPI;
    expect_end(2, "version", "[rank 0 and another one run different versions of Tandem: start the same program for all ranks]");
}
END_TEST

/* Either rank has posted before it hears of the other: it compares when it hears. */
START_TEST(test_a_disagreement_is_noticed_where_posts_cross)
{
    NEEDS_MPI;
    expect_end(2, "cross", "[ranks disagree at step 7: ranks 0 and 1 recorded the same operations under other options (fingerprints ");
}
END_TEST

/* It comes to the first sum of the next step where others are at the second one of this. */
START_TEST(test_a_skipped_collective_is_named)
{
    NEEDS_MPI;
    expect_end(2, "skip", "[ranks disagree: rank 0 calls all_reduce of 1 f64 (call 2 of step 7) but rank 1 calls all_reduce of 1 f64 (call 1 of step 8)]");
}
END_TEST

#define SMALL "$MLP train --task regress --hidden 16 --batch 24 --threads 2 --steps 12 --dtype f64 --log-every 1 --json "

START_TEST(test_the_mlp_trains_as_on_one_rank)
{
    NEEDS_MPI;
    static const char *const strategies[] = { "ddp", "zero1", "fsdp", "hsdp:2x2" };
    double one[12], many[12];
    ck_assert_sh(0, "rm -rf one many; " SMALL "--out one");
    ck_assert_int_eq(read_losses("one", one, 12), 12);
    for (size_t s = 0; s < sizeof strategies / sizeof *strategies; s++) {
        int ranks = s == 0 ? 2 : 4;
        ck_assert_sh(0, "rm -rf many; " MPIRUN "-n %d " SMALL "--strategy %s --out many", ranks, strategies[s]);
        ck_assert_int_eq(read_losses("many", many, 12), 12);
        for (int i = 0; i < 12; i++) ck_assert_double_eq_tol(many[i], one[i], 1e-10);
        char world[64];
        snprintf(world, sizeof world, "world: %d ranks on 1 host (", ranks);
        ck_assert_str_has(err_text, world);
    }
}
END_TEST

#define TWO_HOSTS "ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 sh '" TANDEM_SOURCE "/tests/two_hosts.sh' "

START_TEST(test_two_hosts_train_as_one)
{
    NEEDS_MPI;
    double one[12], many[12];
    ck_assert_sh(0, "rm -rf one many; " SMALL "--out one");
    int status = sh(TWO_HOSTS SMALL "--strategy fsdp --out $PWD/many");
    if (status == 77) SKIP("network namespaces cannot be made here: they take root and Debian's package iproute2");
    ck_assert_msg(status == 0, "status %d: %.900s%.900s", status, out_text, err_text);
    ck_assert_int_eq(read_losses("one", one, 12), 12);
    ck_assert_int_eq(read_losses("many", many, 12), 12);
    for (int i = 0; i < 12; i++) ck_assert_double_eq_tol(many[i], one[i], 1e-10);
    ck_assert_str_has(err_text, "world: 2 ranks on 2 hosts (host-td");
}
END_TEST

START_TEST(test_hosts_that_use_different_networks_say_what_to_set)
{
    NEEDS_MPI;
    int status = sh("ASTRAY=1 " TWO_HOSTS SMALL "--timeout 2");
    if (status == 77) SKIP("network namespaces cannot be made here: they take root and Debian's package iproute2");
    ck_assert_msg(status != 0, "%.900s", out_text);
    int said = count(err_text, "mlp: not all processes came to their world within 2 s: see that all were started, and where hosts have several "
                               "networks name the one between them, as OMPI_MCA_btl_tcp_if_include=10.0.0.0/24\n");
    ck_assert(said == 1 || said == 2); /* the other host may have come to its deadline, too, before mpirun ends it */
}
END_TEST

/* Neither host can tell the other; the deadline tells both. */
START_TEST(test_a_cut_wire_ends_both_hosts_at_the_deadline)
{
    NEEDS_MPI;
    int status = sh("rm -rf cut; CUT=cut/metrics.jsonl WITHIN=11 " TWO_HOSTS SMALL "--steps 1000000 --log-every 1000000 --timeout 6 --out $PWD/cut");
    if (status == 77) SKIP("network namespaces cannot be made here: they take root and Debian's package iproute2");
    ck_assert_msg(status == 1, "status %d: %.900s%.900s", status, out_text, err_text); /* 99: a rank is there still */
    ck_assert_str_has(err_text, "mlp: rank 1 did not arrive at ");
    ck_assert_str_has(err_text, " within 6 s\n");
}
END_TEST

START_TEST(test_a_run_is_saved_and_resumed_on_other_ranks)
{
    NEEDS_MPI;
    double one[12], many[12];
    ck_assert_sh(0, "rm -rf one many; " SMALL "--out one");
    ck_assert_sh(0, MPIRUN "-n 2 " SMALL "--out many --steps 6 --schedule-steps 12");
    ck_assert_sh(0, MPIRUN "-n 3 " SMALL "--out many --resume --strategy fsdp");
    ck_assert_sh(0, "grep -c '\"ranks\":3' many/config.json");
    ck_assert_int_eq(read_losses("one", one, 12), 12);
    ck_assert_int_eq(read_losses("many", many, 12), 12);
    for (int i = 0; i < 12; i++) ck_assert_double_eq_tol(many[i], one[i], 1e-10);
    ck_assert_sh(0, MPIRUN "-n 2 $MLP eval --task regress --out many");
}
END_TEST

START_TEST(test_wrong_launches_say_what_to_do)
{
    NEEDS_MPI;
    ck_assert_int_ne(sh(MPIRUN "-n 2 " SMALL "--ranks 3"), 0);
    ck_assert_str_has(err_text, ": --ranks 3, but the launcher started 2 processes: leave --ranks out, or start as many\n");
    ck_assert_int_eq(count(err_text, "mlp: rank "), 1); /* the first that was refused */
    ck_assert_sh(0, MPIRUN "-n 2 " SMALL "--ranks 2");
    ck_assert_int_ne(sh(MPIRUN "-n 3 " SMALL "--batch 2.5"), 0);
    ck_assert_str_has(err_text, "--batch");
    const char *first = strstr(err_text, "mlp: ");
    ck_assert(first && !strstr(first + 1, "mlp: "));
    ck_assert_int_ne(sh(MPIRUN "-n 2 $MLP plan --task regress"), 0);
    ck_assert_str_has(err_text, "mlp plan is for one process, but 2 were started: start it alone, without a launcher\n");
    ck_assert_int_ne(sh(MPIRUN "-x RANK=0 -x WORLD_SIZE=4 -n 2 " SMALL), 0);
    ck_assert_str_has(err_text, "do not fit the launcher, which started this process as rank ");
    ck_assert_sh(2, "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=300 " SMALL "--batch 300");
    ck_assert_str_has(err_text, "mlp: 300 ranks were started, but a world has at most 256\n");
    ck_assert_int_ne(sh(MPIRUN "-n 2 $STRATEGIES --model mlp"), 0);
    ck_assert_str_has(err_text, "strategies: it starts the ranks of each cell itself, but 2 of it were started: start it alone, without a launcher\n");
    ck_assert_int_eq(count(err_text, "strategies: "), 1);
    ck_assert_int_ne(sh(MPIRUN "-n 2 $MLP"), 0);
    ck_assert_int_eq(count(err_text, "mlp: a command comes first"), 1);
}
END_TEST

START_TEST(test_wrong_settings_are_told_by_one_rank)
{
    NEEDS_MPI;
    static const struct { const char *ranks, *flags, *text; } cases[] = {
        { "-n 4", "--strategy hsdp:2x3", ": strategy 'hsdp:2x3' is for 6 ranks (2 that share one copy of the state x 3 such groups), but there are 4\n" },
        { "-n 2", "--strategy ddp+ep:2", ": strategy 'ddp+ep:2': " },
        { "-n 2", "--strategy fsdp --units 'none.*'", ": fsdp: the unit pattern 'none.*' matches no parameter; " },
        { "-n 1", "--steps 6 : -n 1 " SMALL "--steps 8", "mlp: ranks disagree at step 1: option steps is 6 on rank 0 but 8 on rank 1\n" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ck_assert_int_ne(sh(MPIRUN "%s " SMALL "%s", cases[i].ranks, cases[i].flags), 0);
        ck_assert_msg(strstr(err_text, cases[i].text) && count(err_text, "mlp: ") == 1, "%s: %.900s", cases[i].flags, err_text);
    }
}
END_TEST

/* srun sets these. */
#define SLURM_STEP "ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 "

START_TEST(test_a_launcher_that_the_library_does_not_know_is_told)
{
    NEEDS_MPI;
    ck_assert_sh(2, "PMIX_RANK=1 " SLURM_STEP SMALL);
    ck_assert_str_has(err_text, "mlp: this process was started as rank 1 of 2, but MPI has it as rank 0 of 1: start it with the mpirun or "
                                "srun (--mpi=pmix) of the Open MPI that is installed\n");
    ck_assert_sh(0, "SLURM_PROCID=0 SLURM_NTASKS=2 " SMALL); /* a batch script's, beside which nothing was started */
}
END_TEST

/* MPI itself would end the process. */
START_TEST(test_srun_without_pmix_is_told_before_mpi_is_loaded)
{
    ck_assert_sh(2, SLURM_STEP SMALL);
    ck_assert_str_eq(err_text, "mlp: this process was started as rank 1 of 2 by srun without PMIx, through which Open MPI's processes find "
                               "each other: add --mpi=pmix\n");
    ck_assert_sh(2, "PMI_RANK=1 PMI_FD=9 " SLURM_STEP SMALL); /* --mpi=pmi2 */
    ck_assert_str_has(err_text, "add --mpi=pmix\n");
    ck_assert_sh(0, "export " SLURM_STEP "; " SMALL "& " SMALL "& wait");
    ck_assert_int_eq(count(err_text, "mlp: "), 1);
    ck_assert_sh(0, SLURM_STEP "$MLP plan --task regress"); /* needs no others */
}
END_TEST

START_TEST(test_a_missing_library_is_named_with_its_package)
{
    ck_assert_int_ne(sh("mkdir -p none; : >none/libmpi.so.40; " MPIRUN "-x LD_LIBRARY_PATH=$PWD/none -n 4 " SMALL), 0);
    ck_assert_int_eq(count(err_text, "mlp: ranks of several processes need Open MPI, which could not be loaded ("), has_mpirun());
    mpi_library library;
    char message[512];
    ck_assert(!mpi_library_load("libnone.so.40", &library, message, sizeof message));
    ck_assert_str_has(message, "ranks of several processes need Open MPI, which could not be loaded (libnone.so.40: ");
    ck_assert_str_has(message, "install Debian's package libopenmpi3, on every host");
    ck_assert(!mpi_library_load("libm.so.6", &library, message, sizeof message));
    ck_assert_str_eq(message, "libm.so.6 has no MPI_Init_thread: it is another MPI than Open MPI, which is needed (Debian's package libopenmpi3)");
}
END_TEST

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "rank") == 0) return rank_main(argv[2]);
    const TTest *const tests[] = {
        test_collectives_equal_plain_sums,
        test_a_rank_that_dies_stops_or_ends_is_named_with_collective_and_step,
        test_one_ranks_error_is_told_once,
        test_a_disagreement_is_named,
        test_another_version_is_told,
        test_a_disagreement_is_noticed_where_posts_cross,
        test_a_skipped_collective_is_named,
        test_the_mlp_trains_as_on_one_rank,
        test_two_hosts_train_as_one,
        test_hosts_that_use_different_networks_say_what_to_set,
        test_a_cut_wire_ends_both_hosts_at_the_deadline,
        test_a_run_is_saved_and_resumed_on_other_ranks,
        test_wrong_launches_say_what_to_do,
        test_wrong_settings_are_told_by_one_rank,
        test_a_launcher_that_the_library_does_not_know_is_told,
        test_srun_without_pmix_is_told_before_mpi_is_loaded,
        test_a_missing_library_is_named_with_its_package,
    };
    return check_main("mpi", tests, (int)(sizeof tests / sizeof tests[0]));
}
