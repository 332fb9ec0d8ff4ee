/* Products of few rows in vectors of sixteen. */
#include <string.h>

#include "core/ops/few_rows.h"

#define LANES 16
#include "core/ops/few_rows_dots.h"

void td_few_rows_avx512(td_dtype dtype, const float *x, const char *w, int64_t k, int64_t columns, float *y)
{
    row_of_tile(dtype, x, w, k, columns, y);
}
