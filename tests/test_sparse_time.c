/* The time of a step with row-sparse gradients does not know how many rows the table has: measured against the dense step
 * of the same table, 500,000 x 64, in processor time.
 *
 * Labels: release
 * Timeout: 600 s
 */
#include "tests/timing.h"

#include <tandem/nn.h>
#include <tandem/optim.h>

enum { ROWS = 500000, WIDTH = 64, IDS = 4096, STEPS = 6 };

static double now_ms(void) { return timing_now_us(CLOCK_PROCESS_CPUTIME_ID) / 1e3; }

static bool row_wise;

/* The fastest step, of which each reads other rows. */
static double step_ms(int64_t rows, bool sparse)
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

/* Of the dense step's time, the part that the sparse step of the large table takes. */
static double part_of_the_dense_step(void)
{
    double small = step_ms(ROWS / 100, true), large = step_ms(ROWS, true), dense = step_ms(ROWS, false);
    printf("%d ids of width %d, %s: %.3f ms from %d rows, %.3f ms from %d, dense %.3f ms\n", IDS, WIDTH,
           row_wise ? "row-wise Adagrad" : "Adagrad", small, ROWS / 100, large, ROWS, dense);
    return large / dense; /* rows far apart miss the caches, which is all that is left of the table */
}

START_TEST(test_a_step_of_a_large_table_takes_the_time_of_its_ids)
{
    for (int i = 0; i < 2; i++) {
        row_wise = i;
        ck_assert_double_lt(timing_least(part_of_the_dense_step, 0.1), 0.1);
    }
}
END_TEST

TESTS("sparse_time", test_a_step_of_a_large_table_takes_the_time_of_its_ids)
