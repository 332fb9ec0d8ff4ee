/* Inside parallel/: the cores near a GPU (near.c). What the kernel calls a CPU is one here, and a core has one or, with hyper-threads, several
 * of them.
 */
#ifndef TANDEM_PARALLEL_NEAR_H
#define TANDEM_PARALLEL_NEAR_H

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>

#include "parallel/device.h"
#include "parallel/world.h"

/* Of a list as the kernel writes it, "0-15,64-79\n"; "" has none. false: it is no such list, or has a CPU that a cpu_set_t has no room for. */
bool par_cpus_read(const char *list, cpu_set_t *to);
/* The same list, without the end of the line; cut where there is no room. */
void par_cpus_text(const cpu_set_t *cpus, char *text, size_t room);
/* Part `index` of `parts` of whole cores, as many in each, or one more in the first ones; all of them, and false, where that would leave one
 * empty. first: of each CPU, that of its core which comes first in `cpus`. */
bool par_cpus_share(const cpu_set_t *cpus, const int first[CPU_SETSIZE], int index, int parts, cpu_set_t *to);

/* The ranks of a host, in order. */
typedef struct par_near_host {
    const char *sysfs;                        /* "/sys" */
    int ranks;
    char address[PAR_MAX_RANKS][PAR_GPU_ADDRESS]; /* of each one's GPU; "": not known */
} par_near_host;

/* Those of `allowed` that rank `index` is to run on. false: all of them, because they are not all that the host has, so that somebody has
 * chosen; or all are as near to its GPU; or it is not known which are. *own: no other rank that is kept near its GPU gets one
 * of them. */
bool par_near_find(const par_near_host *host, int index, const cpu_set_t *allowed, cpu_set_t *to, bool *own);

/* par_near_gpu for rank `index` of such a host. */
int par_near_stay(par_world *world, int rank, const par_near_host *host, int index, char *message, size_t room);

#endif
