/* Where most of a plan's step is alive. */
#ifndef TANDEM_CORE_PEAK_H
#define TANDEM_CORE_PEAK_H

#include "core/internal.h"

/* Whether a block takes memory of the device's arena itself. */
static inline bool td_block_takes_memory(const td_block *b)
{
    return b->kind == TD_BLOCK_ARENA && b->memory == TD_DEVICE && b->part_of == TD_NONE && b->bytes;
}

static inline bool td_block_lives_at(const td_block *b, int32_t task) { return b->first <= task && task <= b->last; }

/* The first task at which the largest sum of bytes is alive, and that sum; 0 and 0 of a plan without tasks. */
int32_t td_plan_peak(const td_planned *plan, int64_t *bytes);

#endif
