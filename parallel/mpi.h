/* Inside parallel/: worlds of processes that a launcher such as mpirun or srun started, on one host or several.
 *
 * Such ranks share no memory. Each has a segment of its own (world.h), in which its area is the truth and the others'
 * areas are copies, kept by messages: what a rank posts, where it waits, that it is busy, stopped the world or ended. So
 * agreeing and waiting are the same as between ranks of one machine. Messages are taken in while a rank waits and when it
 * posts or calls; every wait has the world's deadline.
 */
#ifndef TANDEM_PARALLEL_MPI_H
#define TANDEM_PARALLEL_MPI_H

#include "parallel/mpi_library.h"
#include "parallel/world.h"

enum { PAR_HOST_BYTES = 64 };

typedef struct par_mpi par_mpi;

/* Takes in what others have told. Errors stop the world. */
void par_mpi_listen(par_world *world);
/* One slice of a wait that has lasted `waited` seconds: listens, then sleeps a little. A long wait is told to others, once. */
void par_mpi_wait(par_world *world, double waited);
/* After a wait: what was told of it is over. */
void par_mpi_waited(par_world *world);

void par_mpi_tell_recording(par_world *world, int entry);
void par_mpi_tell_post(par_world *world, uint32_t index);
void par_mpi_tell_compared(par_world *world);
void par_mpi_tell_busy(par_world *world, bool busy);
void par_mpi_tell_broken(par_world *world);
/* Waits until all have ended well, and leaves MPI; a stopped world is left as it is. */
void par_mpi_close(par_world *world);

/* Data between two ranks; false: the world was stopped. Requests are finished by par_mpi_done. */
bool par_mpi_send(par_world *world, int to, int tag, const void *at, int64_t bytes, mpi_request *out);
bool par_mpi_receive(par_world *world, int from, int tag, void *at, int64_t bytes, mpi_request *out);
bool par_mpi_done(par_world *world, mpi_request *request); /* whether it is; the world may have been stopped */

#endif
