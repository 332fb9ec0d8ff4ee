/* Sums and maxima that chains take along, by the kernel that reads instructions, with the host as the GPU (on_host/include/on_host.h), are the
 * CPU's. test_generated has the source that is made of them.
 *
 * Labels: on_host
 */
#include "tests/row_checks.h"

START_TEST(test_rows_that_chains_reduce_equal_the_cpu)
{
    check_rows(2, 1);
}
END_TEST

TESTS("rows on host", test_rows_that_chains_reduce_equal_the_cpu)
