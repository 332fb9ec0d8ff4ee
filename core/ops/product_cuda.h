/* Matrix products on a GPU: matmul and linear through cuBLASLt. */
#ifndef TANDEM_CORE_OPS_PRODUCT_CUDA_H
#define TANDEM_CORE_OPS_PRODUCT_CUDA_H

#include "core/ops/product.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The product's algorithm is chosen and its workspace told. */
bool td_cublas_prepare(td_context *td, const td_kernel *k, td_onednn_product p, td_preparation *out);
void td_cublas_run(const td_kernel *k, const td_onednn_product *p);
void td_cublas_release(void *prepared);
/* c (rows, columns), an output, += in[2] (columns). */
void td_product_add_bias(const td_kernel *k, const td_arg *c, int64_t rows, int64_t columns);
/* out[0] = gelu_tanh(x), element by element; x may be out[0]. */
void td_product_gelu(const td_kernel *k, const td_arg *x);
/* out[0] *= gelu_tanh'(x) */
void td_product_dgelu(const td_kernel *k, const td_arg *x);

#ifdef __cplusplus
}
#endif

#endif
