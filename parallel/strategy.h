/* Inside parallel/: a strategy as a row of placements, and what an attached context carries. */
#ifndef TANDEM_PARALLEL_STRATEGY_H
#define TANDEM_PARALLEL_STRATEGY_H

#include "parallel/collectives.h"
#include "parallel/world.h"

enum { PAR_MOST_RANKS = 1 << 20 };            /* of one axis */

/* A strategy, how many ranks each of its axes has, how many consecutive ones of the last keep what they gathered for the forward (1: none
 * do), and how many share layers. */
typedef struct par_chosen {
    const par_strategy *strategy;
    int size[PAR_STRATEGY_AXES];
    int group;
    int tensor;
} par_chosen;
extern const par_axis par_tensor_axis;

/* The strategy that `text` names ("fsdp", "hsdp:4x2", "ddp+tp:2") for so many ranks; `own` is found before the built-in ones, NULL: none.
 * false after td_fail: unknown, or not for so many ranks. */
bool par_strategy_read(td_context *td, const char *text, const par_strategy *own, int ranks, par_chosen *out);

/* A context attached to a world: td_parallel.self. Freed with the world's local rank. */
typedef struct par_attached {
    td_context *td;
    par_world *world;
    int rank;
    const char *name;                         /* of the strategy */
    par_unit_rule units;
    par_axis axis[TD_MAX_AXES];               /* of the mesh, which leaves out the strategy's axes of one rank */
    int tensor_axis;                          /* of the mesh; -1: none */
    int between_axis;                         /* between groups that keep what they gathered for the forward; -1: none */
    par_options options;                      /* what 0 stands for filled in */
    td_transport transport;
    struct par_local *staged;                 /* this rank, whose collectives come behind their run (staged.h); NULL: they do not */
    int on_gpu;                               /* ranks on its GPU, where several may be; else 0 */
} par_attached;

/* ---- Units (units.c) */
bool par_choose_units(void *self, td_context *td, const td_state *states, int count, td_unit_choice *out);

/* ---- Placement (place.c, convert.c, schedule.c) */
td_program *par_place_pass(void *self, const td_program *in);
td_program *par_schedule_pass(void *self, const td_program *in);
/* Value `id` of `p`, placed as it is, in placement `to`: emits what brings it there, as part of node `reader`'s work. Sums are
 * taken before parts are gathered, and over the axis that leaves each rank a part before the one that leaves it all.
 * TD_NONE after td_fail. */
td_id par_convert(td_program *p, td_id id, td_placement to, const td_node *reader);
/* Whether a node with one input shows a member of a unit when its input does: a view, a cast, a transpose. */
bool par_is_unit_view(const td_node *n);

/* ---- What is gathered in a narrower dtype than it is stored in (narrow.c) */
typedef struct par_narrow {
    td_dtype *dtype;                          /* of each unit: what it is cast to before it is gathered; TD_DTYPES: nothing */
    int64_t *beside;                          /* of each state in such units: where it is among the members that are read as they are
                                                 stored, which come beside; -1: it is none of them */
    int64_t elements;                         /* of these members together */
    uint64_t layout;                          /* a hash of `beside` */
    size_t bytes;
} par_narrow;
bool par_narrow_find(const td_program *p, par_narrow *to); /* false without memory; to be freed in any case */
void par_narrow_free(td_context *td, par_narrow *n);
/* The state that value `part` of p, a part of a stored unit, is. */
uint32_t par_state_of_part(const td_program *p, td_id part);
/* Emits what this rank has of the members that come beside: one flat value, partial where the units are sharded. unit_values: the stored
 * value of each unit that goes narrow, TD_NONE for others. */
td_id par_own_members(td_program *p, const par_narrow *narrow, const td_id *unit_values, const td_node *reader);

/* ---- Whole copies of what is stored in parts (copies.c) */
/* Whether a reader that wants the stored unit so reads a copy of it. */
bool par_reads_copy(const par_attached *a, const td_unit *u, td_placement want);
/* The unit that keeps a copy of `unit` in this dtype; TD_NONE: one in another dtype is kept, or after td_fail. */
uint32_t par_copy_of(const par_attached *a, uint32_t unit, td_dtype dtype);
/* The same of the members of narrow units that are read as stored. */
uint32_t par_copy_of_members(td_context *td, const par_narrow *narrow);
/* Emits the copy's value, if it is current; TD_NONE: it must be made, and left for the steps that follow. */
td_id par_copied(td_program *p, uint32_t copy, const td_node *reader);
bool par_leave_copy(td_program *p, uint32_t copy, td_id value, const td_node *reader);

#endif
