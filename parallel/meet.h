/* Inside parallel/: how processes that were started with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun starts them, become
 * a world of this machine.
 *
 * Rank 0 makes the world's memory and listens on a socket that is named by the port (abstract, so nothing is left behind); the others
 * come to it, say who they are and are given the memory's descriptor once all have. Rank 0 knows of every mistake and tells it; those
 * it refuses are silent. The connections stay: where one ends the rank has ended, and whoever comes later is told that the world is
 * complete.
 */
#ifndef TANDEM_PARALLEL_MEET_H
#define TANDEM_PARALLEL_MEET_H

#include "parallel/world.h"

typedef struct par_meet par_meet;

/* Joins or makes the world of `ranks` as `rank`, which may be none of them: that is told, too. NULL and a message; "": another rank
 * tells it. */
par_world *par_meet_join(int rank, int ranks, const par_world_options *options, char *message, size_t room);
/* Tells the others that this rank has ended, and stops looking after them. */
void par_meet_close(par_world *world);

/* One of the processes of this machine that fail for the same reason, before they have a world, says so: whether it is this one.
 * Takes a moment. */
bool par_meet_speaks(void);

#endif
