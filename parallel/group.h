/* Inside parallel/: the ranks that take part in a collective, for transports that send. Failures go to the rank's context
 * and stop its world.
 */
#ifndef TANDEM_PARALLEL_GROUP_H
#define TANDEM_PARALLEL_GROUP_H

#include "parallel/world.h"

/* The ranks of one mesh axis, or of several in a row, that share this rank's coordinates on all others; or the whole world. */
typedef struct par_group {
    par_local *me;
    int slot;
    int size, at;      /* ranks in it, which of them this is */
    int first, stride; /* member i is rank first + i * stride */
    par_meeting meeting;
} par_group;

par_area *par_group_area(const par_group *g, int member);
uint32_t par_group_meetings(const par_group *g); /* that this rank has come to */

/* The ranks along `axes` (td_axes) of the rank's mesh. Failures go to its context. */
bool par_group_find(par_local *me, int axes, par_group *g);
/* Finds the group and says where this rank is now. `self` is a par_local. */
bool par_group_begin(void *self, int axes, par_meeting meeting, par_group *g);
/* Counts what was sent. Where a call failed stays written, for the launcher to tell. Returns true. */
bool par_group_finish(const par_group *g);
/* td_transport.ran of transports whose calls a graph repeats without making them. `run`: what has been called, and counted, since the last run;
 * cleared. A run without calls counts what its plan's first one called. */
void par_group_ran(par_local *me, td_sent *run, td_sent *of_plan);
/* Whether the member has come to the same as this rank: a pair of different calls would hang or mix up data. */
bool par_group_same(const par_group *g, int member);
/* Numbers of each rank, `count` of its own, behind one another: through a CPU transport that was made for `me`, along all `axes` of its mesh;
 * uncounted, since steps send nothing of it. */
bool par_group_tell(par_local *me, const td_transport *cpu, int axes, const void *own, void *all, int64_t count);
/* Whether the dtype of the meeting can be summed. */
bool par_group_sums(const par_group *g);
/* Whether a mesh (NULL or without axes: a line of all ranks) has the rank where it is; if so it is the rank's from now on. */
bool par_group_mesh(par_world *world, int rank, td_context *td, const td_mesh *mesh);

/* out[i] = from[0][i] + from[1][i] + ..., in this order, of all members; bf16 in f32, rounded to nearest even at the end;
 * integers wrap around. `out` may be one of them. Sums that are not finite are noted with the members they come from. */
void par_sum(const par_group *g, const void *const *from, void *out, int64_t count, td_dtype dtype);

/* ---- Numbers that are not finite (numbers.c) */

bool par_finite_f32(const float *x, int64_t count);
bool par_finite_f64(const double *x, int64_t count);
/* Sums of elements [begin, begin + count) of the members' parts are not finite: notes whose are not. */
void par_note_not_finite(const par_group *g, const void *const *from, int64_t begin, int64_t count, td_dtype dtype);

#endif
