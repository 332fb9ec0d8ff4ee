/* Whether this process is one of several that were started together: by a launcher of the system, mpirun or srun, or with RANK,
 * WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them. Variables say so before any library is loaded; a launcher's own go
 * first, and RANK and WORLD_SIZE must then say the same.
 */
#include <stdio.h>
#include <stdlib.h>

#include "parallel/meet.h"
#include "parallel/mpi.h"

static const par_launcher launchers[] = {
    { .rank = "OMPI_COMM_WORLD_RANK", .ranks = "OMPI_COMM_WORLD_SIZE", .here = "OMPI_COMM_WORLD_LOCAL_SIZE" },
    /* A batch script has Slurm's numbers, too, but is no step that srun started. */
    { .rank = "SLURM_PROCID", .ranks = "SLURM_STEP_NUM_TASKS", .here = "SLURM_STEP_TASKS_PER_NODE", .within = "SLURM_STEP_ID",
      .needs = "PMIX_RANK", .without = "srun without PMIx, through which Open MPI's processes find each other: add --mpi=pmix" },
};

const par_launcher *par_launcher_find(long *rank, long *ranks)
{
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++) {
        const par_launcher *l = &launchers[i];
        if (l->within && !getenv(l->within)) continue;
        *rank = par_environment_number(l->rank);
        *ranks = par_environment_number(l->ranks);
        if (*ranks > 1 && *rank >= 0 && *rank < *ranks) return l;
    }
    return NULL;
}

/* Open MPI would end the process with a page on how it is built. */
static void check_needs(const par_launcher *l, long rank, long ranks, char *message, size_t room)
{
    if (!l->needs || getenv(l->needs)) return;
    snprintf(message, room, "this process was started as rank %ld of %ld by %s", rank, ranks, l->without);
}

/* What is wrong with RANK and WORLD_SIZE beside a launcher that has said who this is. */
static void check_beside(long rank, long ranks, char *message, size_t room)
{
    long given_rank = par_environment_number("RANK"), given_ranks = par_environment_number("WORLD_SIZE");
    if (!getenv("WORLD_SIZE") || (given_rank == rank && given_ranks == ranks)) return;
    snprintf(message, room, "RANK=%.20s and WORLD_SIZE=%.20s do not fit the launcher, which started this process as rank %ld of %ld: leave "
             "them out", getenv("RANK") ? getenv("RANK") : "", getenv("WORLD_SIZE"), rank, ranks);
}

/* Whether RANK and WORLD_SIZE make this one of several; a message: they do not, but were to. Whether the rank is one of them
 * is told where they meet. */
static bool find_variables(long *rank, long *ranks, char *message, size_t room)
{
    static const char alone[] = "; leave the variables out where this process is alone";
    const char *size = getenv("WORLD_SIZE");
    long within = par_environment_number("LOCAL_WORLD_SIZE"), port = par_environment_number("MASTER_PORT");
    *rank = par_environment_number("RANK");
    *ranks = par_environment_number("WORLD_SIZE");
    if (!size || *ranks == 1) return false;
    if (*ranks < 1) snprintf(message, room, "WORLD_SIZE=%.20s is no number of processes%s", size, alone);
    else if (*rank < 0)
        snprintf(message, room, "WORLD_SIZE=%ld is set, but RANK is no number: set it to which of them this process is, from 0%s", *ranks,
                 alone);
    else if (!getenv("MASTER_ADDR") || port < 1 || port > 65535)
        snprintf(message, room, "RANK=%ld and WORLD_SIZE=%ld are set, but MASTER_ADDR and MASTER_PORT, by which processes find each other, "
                 "are not: set them to localhost and a number from 1 to 65535, the same for all%s", *rank, *ranks, alone);
    else if (within >= 0 && within != *ranks)
        snprintf(message, room, "LOCAL_WORLD_SIZE=%ld of WORLD_SIZE=%ld ranks are on this host, and ranks on several hosts are started by "
                 "mpirun or srun: 'mpirun --hostfile HOSTS -n %ld ...', without these variables", within, *ranks, *ranks);
    return !*message;
}

par_start par_started(int *rank, int *ranks, char *message, size_t room)
{
    long at = -1, count = -1;
    par_start start = PAR_ALONE;
    *message = 0;
    if (par_launched()) return PAR_ALONE;
    const par_launcher *launcher = par_launcher_find(&at, &count);
    if (launcher) {
        start = PAR_BY_LAUNCHER;
        check_needs(launcher, at, count, message, room);
        if (!*message) check_beside(at, count, message, room);
    } else if (find_variables(&at, &count, message, room)) start = PAR_BY_VARIABLES;
    if (start == PAR_ALONE || *message) return PAR_ALONE;
    *rank = (int)at;
    *ranks = (int)count;
    return start;
}

bool par_scheduled(int *rank, int *ranks, char *message, size_t room) { return par_started(rank, ranks, message, room) != PAR_ALONE; }

par_world *par_world_scheduled(const par_world_options *options, int *rank, char *message, size_t room)
{
    int ranks;
    switch (par_started(rank, &ranks, message, room)) {
    case PAR_BY_LAUNCHER: return par_mpi_join(*rank, ranks, options, message, room);
    case PAR_BY_VARIABLES: return par_meet_join(*rank, ranks, options, message, room);
    case PAR_ALONE: break;
    }
    return NULL;
}
