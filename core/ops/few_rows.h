/* The product of few rows with a matrix whose rows lie in memory as they are summed: y = x W^T (+ b), as decoding asks for.
 *
 * Each weight is read once and used so seldom that memory is the bound: a library's packing and blocking would cost more than they save.
 * An element is summed in f32 in an order that depends on k alone: results do not depend on the number of threads, nor on which columns a
 * rank computes.
 */
#ifndef TANDEM_CORE_OPS_FEW_ROWS_H
#define TANDEM_CORE_OPS_FEW_ROWS_H

#include "core/onednn.h"

/* Whether the product is of this form: one batch, at most 4 rows, f32 or bf16, A and B^T with rows that are dense. */
bool td_few_rows_fits(const td_onednn_product *p);
int64_t td_few_rows_workspace(const td_onednn_product *p); /* bytes */
/* in[0] (m, k) times in[1] (n, k) transposed, plus in[2] (n) if there is one, to out[0] (m, n). */
void td_few_rows(const td_kernel *k, const td_onednn_product *p);

/* y[j] (columns) = x (k) times row j of w, which is f32 or bf16. */
typedef void td_few_rows_kernel(td_dtype dtype, const float *x, const char *w, int64_t k, int64_t columns, float *y);
td_few_rows_kernel td_few_rows_avx512;

#endif
