/* One seed, one curve, where ranks are processes that mpirun started: the matrix of tests/curves.h on 2 and 4 ranks. Each job's losses
 * and parameters are those of one rank, to 1e-10 in f64 and 1e-5 in f32, and to the bit those of as many threads: both transports sum
 * in the order of ranks.
 *
 * The program starts itself again (`rank`); all jobs of a number of ranks are done in one world, context after context. By default
 * a few in which every strategy is met; TANDEM_TEST_ALL=1: all.
 *
 * Timeout: 600 s
 */
#define SHELL_FOLDER "mpi_curves"
#include "tests/curves.h"
#include "tests/mpirun.h"

/* ---- What a rank does ------------------------------------------------------------------------------------ */

typedef struct kind {
    td_dtype dtype;
    bool gpt;
    double tolerance;
} kind;

static const kind kinds[] = { { TD_F64, false, 1e-10 }, { TD_F32, true, 1e-5 }, { TD_F64, true, 1e-10 }, { TD_F32, false, 1e-5 } };
enum { KINDS = sizeof kinds / sizeof *kinds };

/* By default a world has one choice of one kind. */
static bool is_chosen(int k, int world, int choice)
{
    return check_all() || (world % (SLOW ? 2 * KINDS : KINDS) == k && choice == 5 * world % CHOICES);
}

static bool by_threads(job j, job *done)
{
    *done = j;
    return par_run_threads(j.ranks, &(par_world_options){ .timeout_s = 60 }, train, &(run_of){ &j, done }) == 0;
}

static bool on_one_rank(job j, job *done)
{
    return by_threads((job){ .dtype = j.dtype, .strategy = "single", .ranks = 1, .accumulate = 1, .gpt = j.gpt, .clip = j.clip }, done);
}

/* Rank 0 compares. */
static bool is_right(const job *got, const job *one, double tolerance)
{
    char text[CURVE_TEXT];
    job threads;
    if (!same_curve(got, one, tolerance, text)) {
        printf("[beside one rank: %s]\n", text);
        return false;
    }
    bool same = by_threads(*got, &threads) && same_curve(got, &threads, 0, text);
    if (!same) printf("[beside threads: %s]\n", *threads.error ? threads.error : text);
    return same;
}

/* All jobs of one kind; adds to *done how many. */
static bool train_kind(par_world *world, int rank, int k, int *count)
{
    job one[3] = { { 0 } }; /* trained when asked for */
    for (int w = 0; w < WORLDS; w++)
        for (int c = 0; c < CHOICES; c++) {
            if (worlds[w].ranks != par_world_size(world) || !is_chosen(k, w, c)) continue;
            job j = job_at(kinds[k].dtype, kinds[k].gpt, w, c), done = j;
            if (train(world, rank, &(run_of){ &j, &done })) return false;
            if (rank == 0 && !one[j.clip].ranks && !on_one_rank(j, &one[j.clip])) return false;
            if (rank == 0 && !is_right(&done, &one[j.clip], kinds[k].tolerance)) return false;
            ++*count;
        }
    return true;
}

static int rank_main(void)
{
    char message[512];
    int rank, count = 0;
    par_world *world = par_world_scheduled(&(par_world_options){ .timeout_s = 60 }, &rank, message, sizeof message);
    if (!world) {
        printf("[%s]\n", message);
        return 97;
    }
    bool ok = true;
    for (int k = 0; k < KINDS && ok; k++) ok = train_kind(world, rank, k, &count);
    if (!ok) par_fail_world(world, rank, "a job failed");
    if (!ok && par_tells_error(world, rank)) printf("[%s]\n", par_world_error(world));
    if (ok && rank == 0) printf("%d jobs\n", count);
    fflush(stdout);
    par_world_close(world);
    return ok ? 0 : 3;
}

/* ---- Tests ----------------------------------------------------------------------------------------------- */

static void check_world(int ranks)
{
    NEEDS_MPI;
    int of_ranks = 0, jobs = 0;
    for (int w = 0; w < WORLDS; w++) of_ranks += worlds[w].ranks == ranks;
    int status = sh(MPIRUN_FOR("5000") "-n %d '%s' rank", ranks, own_path());
    ck_assert_msg(status == 0, "%d ranks: status %d: %.900s%.900s", ranks, status, out_text, err_text);
    ck_assert_int_eq(sscanf(out_text, "%d jobs", &jobs), 1);
    if (check_all()) ck_assert_int_eq(jobs, KINDS * CHOICES * of_ranks);
    else ck_assert_int_ge(jobs, of_ranks / (SLOW ? 2 * KINDS : 1));
}

START_TEST(test_two_ranks_give_the_curves_of_one_and_of_threads) { check_world(2); } END_TEST
START_TEST(test_four_ranks_give_the_curves_of_one_and_of_threads) { check_world(4); } END_TEST

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "rank") == 0) return rank_main();
    const TTest *const tests[] = {
        test_two_ranks_give_the_curves_of_one_and_of_threads,
        test_four_ranks_give_the_curves_of_one_and_of_threads,
    };
    return check_main("mpi_curves", tests, (int)(sizeof tests / sizeof tests[0]));
}
