/* A loop for each row of the pointwise table: LOOP for the type T, into a function named by the row and `suffix`. */
#ifndef TANDEM_CORE_OPS_LOOPS_H
#define TANDEM_CORE_OPS_LOOPS_H

#include "core/ops/pointwise_table.h"
#include "core/ops/simd.h"

#define OPERANDS_1 const T a = pa[i];
#define OPERANDS_2 OPERANDS_1 const T b = pb[i];
#define OPERANDS_3 OPERANDS_2 const T c = pc[i];

#define LOOP(suffix, name, inputs, expression)                                                          \
    static void loop_##name##_##suffix(T *out, const T *pa, const T *pb, const T *pc, int64_t count)    \
    {                                                                                                   \
        (void)pa, (void)pb, (void)pc;                                                                   \
        TD_SIMD                                                                                         \
        for (int64_t i = 0; i < count; i++) {                                                           \
            OPERANDS_##inputs                                                                           \
            out[i] = (T)(expression);                                                                   \
        }                                                                                               \
    }

#endif
