/* Inside parallel/: rehearsals, collectives of which one rank alone is there (transport_rehearsed.c, and rehearsed.cu on a GPU). C and C++. */
#ifndef TANDEM_PARALLEL_REHEARSED_H
#define TANDEM_PARALLEL_REHEARSED_H

#include "parallel/parallel.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One collective. Of the others each sends what this rank would. */
typedef struct par_alone {
    par_collective kind;        /* all_reduce, reduce_scatter, all_gather or all_to_all */
    td_dtype dtype;
    int ranks, at;              /* of the group; which of them this is */
    int64_t count;              /* elements, as td_transport has it */
    const void *in;
    void *out;                  /* all_reduce: the same */
    double seconds;             /* that it takes, once begun */
    int multiprocessors;        /* that it takes of a GPU */
} par_alone;

/* Puts it on a queue of CUDA's. false: it was not taken. */
bool par_cuda_alone(void *queue, const par_alone *call);

struct par_device;
/* After a transport of the CPU's has been made. device NULL: the context has no GPU. */
bool par_transport_rehearsed(par_world *world, int rank, td_context *td, const struct par_device *device, td_transport *out);

#ifdef __cplusplus
}
#endif

#endif
