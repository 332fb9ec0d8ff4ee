/* What attention's descriptors (attention.c) and kernels (attention_cpu.c) share. */
#ifndef TANDEM_CORE_OPS_ATTENTION_H
#define TANDEM_CORE_OPS_ATTENTION_H

#include "core/ops/op.h"

/* Bits of `rows` in the attributes. */
enum { TD_ATTENTION_Q = 1, TD_ATTENTION_K = 2, TD_ATTENTION_V = 4, TD_ATTENTION_O = 8, TD_ATTENTION_PACKED = 16 };

typedef struct td_attention_attr {
    double scale;
    double p;                                 /* of dropout */
    uint64_t key;
    int64_t window;                           /* 0: none */
    int32_t causal;
    int32_t lengths, positions;               /* 1: an input, in this order after the others */
    /* Set by `absorb` (core/absorb.c) alone. An operand with its bit set lies as a product's rows do: (B, T, columns), head h
     * of q, k, v being columns at[i] + h d and on, of o h e and on. Its gradient lies the same way from column 0 on. PACKED:
     * the gradients of q, k and v are the columns of one output, one after the other. */
    int32_t rows;
    int32_t heads, shared, depth, values;     /* H, Hkv, d and e where rows is not 0 */
    int64_t at[3];
} td_attention_attr;

/* q, k, v, then lengths and positions where the attributes say so; outputs o and logsumexp. */
extern const td_op td_op_attention;
/* q, k, v, o, logsumexp, do, then lengths and positions; outputs dq, dk, dv in the wide dtype. Not in the list of
 * operations: its o and logsumexp are functions of q, k and v, so it has no cases of its own and is tested as attention's
 * gradient. */
extern const td_op td_op_attention_gradient;

bool td_attention_prepare(td_context *td, const td_kernel *k, td_preparation *out);
void td_attention_cpu(const td_kernel *k);
void td_attention_gradient_cpu(const td_kernel *k);

#endif
