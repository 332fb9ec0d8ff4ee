/* What a random draw is: the attributes of dropout_mask and uniform. */
#ifndef TANDEM_CORE_OPS_DRAW_H
#define TANDEM_CORE_OPS_DRAW_H

#include <tandem/core.h>

typedef struct td_draw_attr {
    double p; /* P(0) of a mask */
    uint64_t key;
    int64_t dtype;
    td_shape shape;
} td_draw_attr;

/* What dropout makes 0: elements whose 16 bits (td_random_halves), a whole number, are below this; so p to the nearest 2^-16. */
static inline uint32_t td_draw_below(double p) { return (uint32_t)(p * 0x1p16 + 0.5); }

#endif
