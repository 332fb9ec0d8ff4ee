/* oneDNN as the CPU's engine for f32 and bf16: one engine and stream a context, matrix products as primitives made when
 * a plan is made. Its own scratch comes from the plan's workspace. Every status is checked and told in words.
 */
#ifndef TANDEM_CORE_ONEDNN_H
#define TANDEM_CORE_ONEDNN_H

#include <tandem/rewrite.h>

struct td_onednn;
/* NULL and an error when the library gives no engine. Closing NULL is allowed. */
struct td_onednn *td_onednn_open(td_context *td);
void td_onednn_close(struct td_onednn *dnn);

/* C = A B (+ bias), `batch` times: A (m, k), B (k, n), C (m, n) row-major with C dense. Strides in elements. */
typedef struct td_onednn_product {
    int64_t batch, m, n, k;
    int64_t a_batch, a_row, a_column;
    int64_t b_batch, b_row, b_column;    /* b_batch 0: one B for all */
    td_dtype dtype, bias_dtype, out_dtype;
    bool has_bias;
    bool adds;                           /* to C, by the caller: the kernel's last input, of C's shape */
    bool dbias;                          /* beside C, by the caller: the kernel's second output, the sums of A over k (m) in f32 or f64 */
    bool gelu, keeps;                    /* C becomes gelu_tanh(C), by the caller; and what it was is kept: the kernel's second output */
    bool dgelu;                          /* C becomes C gelu_tanh'(x), by the caller; x: the kernel's last input, of C's shape */
} td_onednn_product;

/* Makes the primitive: fills out->prepared and out->workspace_bytes. False and an error when the library cannot. */
bool td_onednn_prepare(td_context *td, const td_onednn_product *p, td_preparation *out);
/* Runs it; the kernel's `prepared` and `workspace` are those of `prepare`. Failures go to td_fail. */
void td_onednn_run(const td_kernel *k, void *a, void *b, void *bias, void *c);
void td_onednn_release(void *prepared);

#endif
