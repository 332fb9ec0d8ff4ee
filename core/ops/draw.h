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

#endif
