/* Whether a launcher of the system, mpirun or srun, has started this process as one of several. Its variables say so before
 * any library is loaded; RANK and WORLD_SIZE, which other frameworks go by, must say the same.
 */
#include <stdio.h>
#include <stdlib.h>

#include "parallel/world.h"

static const struct {
    const char *rank, *ranks;
    const char *within; /* set besides: a batch script has Slurm's numbers too, but is no step that srun started; NULL: none */
} launchers[] = {
    { "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", NULL },
    { "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID" },
};

static bool find_launcher(long *rank, long *ranks)
{
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++) {
        if (launchers[i].within && !getenv(launchers[i].within)) continue;
        *rank = par_environment_number(launchers[i].rank);
        *ranks = par_environment_number(launchers[i].ranks);
        if (*ranks > 1 && *rank >= 0 && *rank < *ranks) return true;
    }
    return false;
}

/* RANK and WORLD_SIZE without a launcher, or against it. */
static bool wrong_variables(bool launched, long rank, long ranks, char *message, size_t room)
{
    static const char how[] = "start it with 'mpirun -n RANKS' or srun, or leave the variables out and give --ranks";
    const char *rank_text = getenv("RANK"), *ranks_text = getenv("WORLD_SIZE");
    long given_rank = par_environment_number("RANK"), given_ranks = par_environment_number("WORLD_SIZE");
    *message = 0;
    if (!ranks_text || (given_ranks == 1 && !launched)) return false;
    if (given_ranks < 1)
        snprintf(message, room, "WORLD_SIZE=%.40s is no number of processes: %s", ranks_text, how);
    else if (!rank_text)
        snprintf(message, room, "WORLD_SIZE=%ld is set, but RANK, which of them this process is, is not: %s", given_ranks, how);
    else if (given_rank < 0 || given_rank >= given_ranks)
        snprintf(message, room, "RANK=%.40s is none of 0 to %ld, which WORLD_SIZE=%ld asks for: %s", rank_text, given_ranks - 1, given_ranks, how);
    else if (launched && (given_rank != rank || given_ranks != ranks))
        snprintf(message, room, "RANK=%ld and WORLD_SIZE=%ld do not fit the launcher, which started this process as rank %ld of %ld: leave them out",
                 given_rank, given_ranks, rank, ranks);
    else if (!launched)
        snprintf(message, room, "RANK=%ld and WORLD_SIZE=%ld are set, but processes find each other through MPI alone, and no mpirun or srun has "
                 "started this one: %s", given_rank, given_ranks, how);
    return *message != 0;
}

bool par_scheduled(int *rank, int *ranks, char *message, size_t room)
{
    long at = -1, count = -1;
    *message = 0;
    if (par_launched()) return false;
    bool launched = find_launcher(&at, &count);
    if (wrong_variables(launched, at, count, message, room) || !launched) return false;
    *rank = (int)at;
    *ranks = (int)count;
    return true;
}
