/* Inside parallel/: a strategy as a row of placements, and what an attached context carries. */
#ifndef TANDEM_PARALLEL_STRATEGY_H
#define TANDEM_PARALLEL_STRATEGY_H

#include "parallel/world.h"

typedef enum par_unit_rule {
    PAR_UNIT_BUCKET,                          /* by size, in the order gradients appear */
    PAR_UNIT_PATTERN,                         /* by name, or a unit for each module that has parameters */
} par_unit_rule;

enum { PAR_AS_IS = -1 };

/* Each entry is a td_place_kind on the data axis; sharded is along dimension 0 of the unit. */
typedef struct par_strategy {
    const char *name;
    int parameter, gradient, optimizer_gradient, moment, accumulator;
    par_unit_rule units;
} par_strategy;

const par_strategy *par_strategy_named(const char *name);
/* "single, ddp, fsdp", and those for several ranks. */
const char *par_strategy_names(void);
const char *par_strategy_names_for_ranks(void);

/* A context attached to a world: td_parallel.self. Freed with the world's local rank. */
typedef struct par_attached {
    td_context *td;
    par_world *world;
    int rank;
    const par_strategy *strategy;
    par_options options;
    td_transport transport;
} par_attached;

/* ---- Units (units.c) */
bool par_choose_units(void *self, td_context *td, const td_state *states, int count, td_unit_choice *out);

/* ---- Placement (place.c, convert.c, schedule.c) */
td_program *par_place_pass(void *self, const td_program *in);
td_program *par_schedule_pass(void *self, const td_program *in);
/* Value `id` of `p`, placed as it is, in placement `to`: emits what brings it there, as part of node `reader`'s work.
 * TD_NONE after td_fail. */
td_id par_convert(td_program *p, td_id id, td_placement to, const td_node *reader);

/* ---- Collectives as operations (collectives.c) */
typedef struct par_collective_attr { int32_t axis, dim; } par_collective_attr;
extern const td_op par_op_all_reduce, par_op_reduce_scatter, par_op_all_gather, par_op_own_part, par_op_count_once;

#endif
