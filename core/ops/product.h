/* What matmul and linear share: one matrix product of operands with strides, whatever library makes it.
 * f64 is our own (gemm.c), f32 and bf16 are oneDNN's but for few rows (few_rows.c); f16 is f32's, between copies of all operands. */
#ifndef TANDEM_CORE_OPS_PRODUCT_H
#define TANDEM_CORE_OPS_PRODUCT_H

#include "core/onednn.h"
#include "core/ops/reduce.h"

/* p with what the kernel's operands say: dtype of in[0], out_dtype of out[0], has_bias, and bias_dtype of in[2] if it has. */
td_onednn_product td_product_typed(const td_kernel *k, td_onednn_product p);
/* Nothing to multiply: no library is asked. */
bool td_product_is_empty(const td_onednn_product *p);

/* p as for td_product_typed. */
bool td_product_prepare(td_context *td, const td_kernel *k, td_onednn_product p, td_preparation *out);
/* in[0] times in[1] (plus in[2]) (plus the last input, where p->adds) to out[0]. */
void td_product_run(const td_kernel *k, const td_onednn_product *p);
/* Shape rule of products with an addition, after that of C: input `added` has C's shape, and its dtype or f32, which becomes C's. */
bool td_product_adds(td_call *call, int added);
/* The sum of in[0] over the dimension that matmul_dbias contracts, to out[1]: a call of its own in k's workspace, as long as k and `to`
 * live. */
typedef struct td_product_sum {
    td_kernel kernel;
    td_reduce_attr attr;
} td_product_sum;
void td_product_sum_of(const td_kernel *k, td_product_sum *to);
td_cost td_product_cost(const td_kernel *k, const td_onednn_product *p);

#endif
