/* Inside core/: what differentiate.c and differentiate_update.c share of a program that is being expanded. */
#ifndef TANDEM_CORE_DIFFERENTIATE_H
#define TANDEM_CORE_DIFFERENTIATE_H

#include "core/ops/op.h"
#include "core/reverse.h"

/* The gradient of one use of a table. */
typedef struct td_row_use {
    uint32_t unit;                            /* TD_NONE: consumed */
    td_id ids, rows;
    td_node backward;                         /* that gave it */
} td_row_use;

typedef struct td_expansion {
    td_context *td;
    const td_program *in;
    td_program *out;
    td_id *map;                               /* value of in -> value of out */
    td_id *current;                           /* unit -> its value now, or TD_NONE: not read */
    td_id *pending;                           /* unit -> flat gradient not yet consumed, or TD_NONE */
    td_id *entered;                           /* unit -> its gradient at the optimizer; of a sparse one the ids, the rows follow */
    td_row_use *uses;                         /* of tables with row-sparse gradients, in order */
    uint32_t use_count, use_room;
    td_id *part;                              /* state -> its value now, or TD_NONE */
    bool *changed;                            /* unit: to be stored */
    bool *reached;                            /* state: a backward gave it a gradient */
    td_node at;                               /* the node of `in` being expanded */
    void *memory;
    size_t bytes;
} td_expansion;

/* Of its value: flat, or of one that is cut a row for each block. */
static inline td_shape td_unit_shape(const td_unit *u)
{
    return u->cut.ways ? TD_SHAPE(u->cut.ways, u->elements / u->cut.ways) : TD_SHAPE(u->elements);
}

/* ---- differentiate.c */

/* Appends a node that stands where the expanded one does; its value. */
td_id td_expand_emit(td_expansion *d, const td_op *op, const td_id *in, int n, const void *attr, size_t bytes, td_shape shape,
                     td_dtype dtype);
/* The unit's value now. */
td_id td_expand_current(td_expansion *d, uint32_t unit);
/* The unit has another value: its members are views of that from here on. */
void td_expand_forget(td_expansion *d, uint32_t unit);
/* Calls through the units that hold `states`, each once, in order of first appearance; TD_NONE behind the last. */
uint32_t td_expand_next_unit(const td_expansion *d, const uint32_t *states, uint32_t count, uint32_t *from);

/* ---- differentiate_update.c: false after the context has failed */

/* All members of a unit that a rule updates get its moments, so that these are laid out as the unit is. */
bool td_expand_moments(const td_program *in);
/* What is recorded of gradients' norms, updates and averages. */
bool td_expand_norm(td_expansion *d);
bool td_expand_update(td_expansion *d);
bool td_expand_blend(td_expansion *d);

#endif
