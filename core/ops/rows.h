/* Rows along the last dimension as softmax and the losses read them, whatever their dtype: f64 for f64, else f32. */
#ifndef TANDEM_CORE_OPS_ROWS_H
#define TANDEM_CORE_OPS_ROWS_H

#include "core/ops/op.h"

typedef struct td_row_sum {
    double max, sum; /* of x, of exp(x - max); a max of -inf: of exp(x) */
} td_row_sum;

/* Over elements [at, at + count) of x, read once. */
td_row_sum td_row_sum_exp(const td_arg *x, int64_t at, int64_t count);
/* y[at ...] = exp(x[at ...] - s.max) / s.sum * scale. y may be x's memory. */
void td_row_softmax(const td_arg *x, const td_arg *y, int64_t at, int64_t count, td_row_sum s, double scale);

/* Calls body((void *)k, begin, end) over the rows of input 0, on the run's threads. */
void td_for_each_row(const td_kernel *k, td_range_function body);
/* The max, an exponential and a sum an element of input 0. */
td_cost td_row_sum_cost(const td_kernel *k);

#endif
