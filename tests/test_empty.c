/* Operations of empty operands write all that they give (empty.h).
 * Labels: valgrind
 */
#include "tests/empty.h"

START_TEST(test_operations_of_empty_operands_write_all_they_give)
{
    check_empty_operands("cpu", TD_F64);
    check_empty_operands("cpu", TD_F32);
    check_empty_operands("cpu", TD_BF16);
}
END_TEST

TESTS("empty", test_operations_of_empty_operands_write_all_they_give)
