/* The reverse of a program: from a value, whose gradient is ones, down to sources, each node's gradient rule records into the program
 * what its inputs' gradients are. Gradients of a value that is read several times add up.
 *
 *     td_sweep s;
 *     if (!td_sweep_open(&s, p)) return false;
 *     s.source[x] = true;
 *     if (td_sweep_run(&s, y, here)) ... s.gradient[x] ...
 *     td_sweep_close(&s);
 *
 * What a rule reads of a scope of recomputation is computed again.
 */
#ifndef TANDEM_CORE_REVERSE_H
#define TANDEM_CORE_REVERSE_H

#include "core/internal.h"

typedef struct td_sweep {
    td_program *p;
    uint32_t nodes, values;                   /* of p when the sweep began */
    char *active;                             /* value: its gradient is wanted */
    td_id *gradient;                          /* value -> its gradient, or TD_NONE */
    td_id *again;                             /* value of a scope -> computed again, or TD_NONE */
    bool *source;                             /* value: where the sweep ends */
    void *memory;
    size_t bytes;
} td_sweep;

/* False, and the context's error, without memory. */
bool td_sweep_open(td_sweep *s, td_program *p);
void td_sweep_close(td_sweep *s);
/* `here` is who asked. False, and the context's error, where a node has no gradient or its rule fails. Where y depends on no source,
 * active[y] is false and nothing is recorded. */
bool td_sweep_run(td_sweep *s, td_id y, td_here here);

/* a + b; of a TD_NONE: b. */
td_id td_gradient_sum(td_program *p, td_id a, td_id b, td_here here);

#endif
