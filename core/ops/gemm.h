/* The f64 matrix product: C = A B (+ bias), operands with any strides, so that transposes need no copies.
 *
 * An element of C is summed in an order that depends on k alone: results do not depend on the number of threads, nor on
 * which rows or columns a rank computes.
 */
#ifndef TANDEM_CORE_OPS_GEMM_H
#define TANDEM_CORE_OPS_GEMM_H

#include <tandem/rewrite.h>

typedef struct td_gemm {
    int64_t m, n, k;
    const double *a;      /* (m, k): element (i, p) at i * a_row + p * a_column */
    int64_t a_row, a_column;
    const double *b;      /* (k, n) */
    int64_t b_row, b_column;
    const double *bias;   /* (n), or NULL */
    double *c;            /* (m, n), rows c_row apart */
    int64_t c_row;
} td_gemm;

int64_t td_gemm_workspace(int64_t m, int64_t n, int64_t k); /* bytes */
void td_gemm_f64(const td_run *run, const td_gemm *g, void *workspace);

#endif
