/* Inside parallel/: what carries collectives between the GPUs of a world (gpus.c).
 */
#ifndef TANDEM_PARALLEL_GPUS_H
#define TANDEM_PARALLEL_GPUS_H

#include "parallel/mpi.h"
#include "parallel/staged.h"
#include "parallel/strategy.h"

/* What `ranks` ranks have, by the keys of their GPUs. */
typedef struct par_gpu_use {
    int gpus;                                 /* that differ */
    int with;                                 /* ranks on `rank`'s, itself one of them */
    bool shared;                              /* some GPU has several */
} par_gpu_use;
par_gpu_use par_gpu_use_of(const uint64_t *keys, int ranks, int rank);

/* par_cuda_address; "" in builds without CUDA. */
void par_gpu_address(int number, char address[PAR_GPU_ADDRESS]);

/* par_check_gpus where so many are seen, one at least. */
bool par_gpus_suffice(const char *device, int ranks, int gpus, char *message, size_t room);

/* Where the context is on a GPU and the mesh has axes: replaces a->transport, a CPU transport made for the mesh, by one on the device that
 * carries what it did. Waits for all ranks, which must be about to do the same. Errors: ranks share a GPU and options.share_gpu does not
 * say that they may, or they are threads of one process. */
bool par_carry(par_attached *a, const td_mesh *mesh);
/* The same on this device. */
bool par_carry_by(par_attached *a, const td_mesh *mesh, const par_device *device);

#endif
