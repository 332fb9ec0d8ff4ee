/* Inside parallel/: what transports between GPUs need of a device, as a table of functions: CUDA's (device_cuda.c), or those of a device that
 * tests have.
 *
 * Work goes to `queue`, a cudaStream_t, in the order of calls; false says that it was not taken. Any thread may call them.
 */
#ifndef TANDEM_PARALLEL_DEVICE_H
#define TANDEM_PARALLEL_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "parallel/rehearsed.h"

enum { PAR_GPU_ADDRESS = 32 };

typedef struct par_device {
    uint64_t (*key)(void *queue);                       /* of the device, that no other has; 0: not known */
    int (*number)(void *queue);                         /* of the device in this process; -1: not known */
    void (*use)(int number);                            /* this thread's device from now on */
    void *(*get_host)(int64_t bytes);                   /* of the host's memory, page-locked; NULL: there is none */
    void (*put_host)(void *memory);
    void *(*get)(int64_t bytes);                        /* zeros in the memory of this thread's device; NULL: there is none */
    void (*put)(void *memory);
    bool (*to_host)(void *queue, void *to, const void *from, int64_t bytes);
    bool (*to_device)(void *queue, void *to, const void *from, int64_t bytes);
    bool (*copy)(void *queue, void *to, const void *from, int64_t bytes); /* within the device's memory */
    bool (*alone)(void *queue, const par_alone *call);  /* a collective of which this rank alone is there */
    bool (*call)(void *queue, void (*function)(void *user), void *user); /* by a thread of its driver's */
    bool (*wait)(void *queue);                          /* until all before it is done */
    bool (*is_idle)(void *queue);                       /* all before it is done; true too where the device has failed */
    void *(*make_mark)(void);                           /* NULL: none can be had */
    bool (*put_mark)(void *mark, void *queue);          /* it has been passed when all before it is done */
    bool (*has_passed)(void *mark);                     /* true too where the device has failed, which its user hears of */
    void (*free_mark)(void *mark);
} par_device;

extern const par_device par_cuda_device;                /* in builds with CUDA, as the next */
int par_cuda_count(void);                               /* GPUs that this process sees; 0 without a driver */
/* Of the GPU of that number on PCI, as "0000:3B:00.0"; "": not known. */
void par_cuda_address(int number, char address[PAR_GPU_ADDRESS]);

#endif
