/* However many threads OpenMP is told to give, a step is computed whole: a context counts on no more than it has.
 *
 * Labels: threads
 */
#define SHELL_FOLDER "threads"

#include <omp.h>

#include "tests/check.h"
#include "tests/shell.h"

enum { STEPS = 5 };

#define TRAIN "$MLP train --task regress --hidden 512,512 --batch 24 --steps 5 --log-every 1 --threads 2 --out run"

START_TEST(test_a_step_is_whole_with_any_team)
{
    static const struct { const char *says, *given; } environments[] = {
        { "OMP_THREAD_LIMIT=1", "of 2 threads OpenMP gives 1: OMP_THREAD_LIMIT" },
        { "OMP_MAX_ACTIVE_LEVELS=0", "of 2 threads OpenMP gives 1: OMP_THREAD_LIMIT" },
        { "OMP_DYNAMIC=true", NULL },
        { "OMP_NUM_THREADS=1", NULL },
    };
    double whole[STEPS], got[STEPS];
    ck_assert_sh(0, "rm -rf run && " TRAIN);
    ck_assert_int_eq(read_losses("run", whole, STEPS), STEPS);
    for (size_t i = 0; i < sizeof environments / sizeof *environments; i++) {
        ck_assert_sh(0, "rm -rf run && %s " TRAIN, environments[i].says);
        if (environments[i].given) ck_assert_str_has(err_text, environments[i].given);
        ck_assert_int_eq(read_losses("run", got, STEPS), STEPS);
        for (int k = 0; k < STEPS; k++)
            ck_assert_msg(fabs(got[k] - whole[k]) <= 1e-5 * whole[k], "%s: step %d: %.9g, not %.9g", environments[i].says, k + 1, got[k], whole[k]);
    }
}
END_TEST

/* The product of two matrices in f32, long enough inside for threads to add parts of it. */
static double product(td_context *td)
{
    static float a[2048 * 8], b[2048 * 8];
    for (int i = 0; i < 2048 * 8; i++) a[i] = (float)(i % 7), b[i] = (float)(i % 5);
    td_tensor x = td_input(td, "a", TD_F32, TD_SHAPE(2048, 8), a), y = td_input(td, "b", TD_F32, TD_SHAPE(2048, 8), b);
    return td_item(td_sum(td_matmul_with(x, y, 1, 0), TD_ALL, TD_DROP));
}

START_TEST(test_inside_a_parallel_region)
{
    td_context *outside = open_cpu(TD_F32), *inside = NULL;
    double whole = product(outside), got = 0;
    ck_assert(td_step(outside));
#pragma omp parallel num_threads(2)
#pragma omp master
    {
        inside = open_cpu(TD_F32);
        got = product(inside);
        product(outside);
    }
    ck_assert_int_eq(td_threads(inside), omp_get_thread_limit() > 1 ? 1 : td_threads(outside));
    ck_assert_near(&got, &whole, 1, 1e-6);
    if (td_threads(outside) > 1) ck_assert_str_has(td_error_text(outside), "cannot be run inside a parallel region of OpenMP");
    td_close(inside);
    td_close(outside);
}
END_TEST

TESTS("threads", test_a_step_is_whole_with_any_team, test_inside_a_parallel_region)
