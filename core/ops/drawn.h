/* A rank's part of a random draw, and dropout's mask of any of its elements: for the kernel of a mask and for chains that contain one. */
#ifndef TANDEM_CORE_OPS_DRAWN_H
#define TANDEM_CORE_OPS_DRAWN_H

#include "core/ops/op.h"
#include "core/random.h"

/* The part as runs that are adjacent in the global value, too. */
typedef struct td_drawn {
    td_random random;
    uint64_t base;                  /* index of the global value's first element */
    int rank, split;                /* dimensions before `split` count runs, those from it on are in a run */
    int64_t run;                    /* elements of a run */
    int64_t begin[TD_MAX_DIMS];     /* where this rank's part begins */
    int64_t local[TD_MAX_DIMS], global[TD_MAX_DIMS];
} td_drawn;

/* The draw that `key` names, of a value with y's shapes and place; micro: the micro-batch, from the step's first. */
td_drawn td_drawn_of(const td_run *run, const td_arg *y, uint64_t key, uint64_t micro);

/* How many elements of the part, `count` at most, follow element `at` in the draw, too, itself included; its index in the draw. */
int64_t td_drawn_piece(const td_drawn *d, int64_t at, int64_t count, uint64_t *index);

/* Elements [at, at + count) of the part: 0 with probability p, else 1 / (1 - p). */
void td_mask_f32(const td_drawn *d, double p, int64_t at, int64_t count, float *to);
void td_mask_f64(const td_drawn *d, double p, int64_t at, int64_t count, double *to);

#endif
