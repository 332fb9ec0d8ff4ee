/* Sums and maxima that chains take along on a GPU are the CPU's.
 *
 * Labels: gpu
 */
#include "tests/row_checks.h"

START_TEST(test_rows_that_chains_reduce_equal_the_cpu)
{
    td_context *td = td_open(&(td_options){ .device = "cuda", .log = check_log_line });
    bool has = td_error(td) == TD_OK;
    td_close(td);
    if (!has) SKIP("no CUDA device");
    check_rows(3, 3);
}
END_TEST

TESTS("rows on a GPU", test_rows_that_chains_reduce_equal_the_cpu)
