/* Inside parallel/: transport `nccl`, collectives between ranks that have a GPU each, through NCCL.
 */
#ifndef TANDEM_PARALLEL_TRANSPORT_NCCL_H
#define TANDEM_PARALLEL_TRANSPORT_NCCL_H

#include "parallel/device.h"
#include "parallel/world.h"

/* Fills `out` for the rank's collectives among GPUs, on the axes of the mesh for which `inner`, a CPU transport of the same world, has been
 * made (copied; it carries what communicators begin with, and barriers). td is of a GPU, which `device` reaches and no other
 * rank uses, unless NCCL lets ranks share one.
 * Connects the rank with those of every axis and of all axes that follow one another, which all ranks must be about to do: communicators
 * that a context before made in this world are used again. windows: as par_options.windows. The table is valid until the world closes,
 * which must be after the context.
 * Errors: NCCL is missing or too old, or did not connect within the world's deadline. */
bool par_transport_nccl(par_world *world, int rank, td_context *td, const td_transport *inner, const par_device *device, bool windows,
                        td_transport *out);

/* Before a transport is made for the context: false, and its error, where another one of the rank has windows in this world. */
bool par_nccl_may_join(par_world *world, int rank, td_context *td);

#endif
