/* The time of a step with row-sparse gradients does not know how many rows the table has: measured against the dense step
 * of the same table, 500,000 x 64, in processor time: what else the machine does is no time of it.
 *
 * Labels: release
 */
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <time.h>

enum { ROWS = 500000, WIDTH = 64, IDS = 4096, STEPS = 6 };

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

/* The fastest step, of which each reads other rows. */
static double step_ms(int64_t rows, bool sparse, bool row_wise)
{
    static int32_t ids[IDS];
    double best = INFINITY;
    td_context *td = td_open(&(td_options){ .threads = 1, .log = check_log_line });
    nn_embedding table = nn_embedding_make_with(td_root(td), "table", rows, WIDTH, &(nn_embedding_options){ .sparse = sparse });
    opt_optimizer *opt = opt_adagrad(td_root(td), &(opt_adagrad_options){ .row_wise = row_wise });
    for (int s = 0; s < STEPS; s++) {
        for (int i = 0; i < IDS; i++) ids[i] = (int32_t)((uint64_t)(s * IDS + i) * 2654435761u % (uint64_t)rows);
        double start = now_ms();
        td_tensor y = nn_embedding_apply(&table, td_input(td, "ids", TD_I32, TD_SHAPE(IDS), ids));
        td_backward(td_sum(td_square(y), TD_ALL, TD_DROP));
        opt_step(opt, 0.1);
        ck_assert_msg(td_step(td), "%s", td_error_text(td));
        double ms = now_ms() - start;
        if (s && ms < best) best = ms;
    }
    td_close(td);
    return best;
}

START_TEST(test_a_step_of_a_large_table_takes_the_time_of_its_ids)
{
    for (int row_wise = 0; row_wise < 2; row_wise++) {
        double small = step_ms(ROWS / 100, true, row_wise), large = step_ms(ROWS, true, row_wise), dense = step_ms(ROWS, false, row_wise);
        printf("%d ids of width %d, %s: %.3f ms from %d rows, %.3f ms from %d, dense %.3f ms\n", IDS, WIDTH,
               row_wise ? "row-wise Adagrad" : "Adagrad", small, ROWS / 100, large, ROWS, dense);
        ck_assert_double_lt(large, dense / 10); /* rows far apart miss the caches, which is all that is left of the table */
    }
}
END_TEST

TESTS("sparse_time", test_a_step_of_a_large_table_takes_the_time_of_its_ids)
