/* Inside parallel/: transport `staged`, for ranks whose GPUs cannot reach one another, above all for several that share one.
 *
 * What is in the device's memory goes to the host, is exchanged there by a transport of the CPU, and comes back: three pieces of work on
 * the call's queue, in that order, of which the middle one is a function of the host's that the device's driver calls. So a call returns
 * at once, and may be captured in a graph. It is for trying strategies; every byte goes through the host twice.
 *
 * The driver's thread has a par_local of its own, which has no context: what fails there stops the world, and the rank hears of it when it
 * next waits for the device (is_sound) or begins a run. Behind a failure, functions return at once, so the queue runs dry. Collectives of a
 * rank are on one queue at a time, in an order that is the same on all ranks; the driver may call one function at a time.
 */
#ifndef TANDEM_PARALLEL_STAGED_H
#define TANDEM_PARALLEL_STAGED_H

#include "parallel/device.h"
#include "parallel/world.h"

/* Fills `out` for the rank's collectives on `device`, through `inner`, a CPU transport of the same world that has been made for td's mesh
 * (copied). Kept with the world; making it again for another context, when that before has closed, goes on with its memory. */
bool par_transport_staged(par_world *world, int rank, td_context *td, const td_transport *inner, const par_device *device, td_transport *out);
/* Of all ranks of this process. Their contexts are closed. */
void par_staged_close(par_world *world);

/* Around a run: before it is posted to the others, where its plan is new, the queue runs dry, since two threads of a rank cannot well wait
 * for others at once; behind that, a function on the queue says where its collectives belong. false after the context has failed. */
bool par_staged_before(par_local *me, par_moment at, bool is_new_plan);
bool par_staged_begin(par_local *me, par_moment at);

#endif
