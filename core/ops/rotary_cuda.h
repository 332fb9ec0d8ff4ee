/* rotary's kernel for GPUs. */
#ifndef TANDEM_CORE_OPS_ROTARY_CUDA_H
#define TANDEM_CORE_OPS_ROTARY_CUDA_H

#include "core/ops/op.h"

enum { TD_ROTARY_PAIRS = 256 };

/* Radians a position of each pair, as a launch takes them. */
typedef struct td_rotary_angles {
    double step[TD_ROTARY_PAIRS];
} td_rotary_angles;

#ifdef __cplusplus
extern "C" {
#endif

/* `prepared` is a td_rotary_angles. */
TD_CUDA_KERNEL(td_rotary_cuda);

#ifdef __cplusplus
}
#endif

#endif
