/* Slices at an index: what slice_at.c and its kernels for GPUs share. */
#ifndef TANDEM_CORE_OPS_SLICE_AT_H
#define TANDEM_CORE_OPS_SLICE_AT_H

#include "core/ops/op.h"

/* (B, middle, size, inner) beside (B, middle, count, inner): the whole rows and the slices. */
typedef struct td_slices {
    const int32_t *at;
    const char *x;                            /* whole rows, read */
    char *y;                                  /* written: whole rows, or slices */
    const char *value;                        /* slices, read */
    int64_t rows, middle, size, count, bytes; /* rows: B * middle; bytes of one index of the dimension */
} td_slices;

#ifdef __cplusplus
extern "C" {
#endif

/* y is x with value in its place; where y is x itself, the slice alone is written. `room`: the workspace, or NULL where the value cannot
 * lie in x. */
void td_slice_write_on_gpu(const td_kernel *k, td_slices s, void *room);
void td_slice_read_on_gpu(const td_kernel *k, td_slices s);

#ifdef __cplusplus
}
#endif

#endif
