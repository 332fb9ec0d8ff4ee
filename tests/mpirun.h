/* What tests of ranks under mpirun share: how they are started, and what is skipped without Open MPI. */
#ifndef TANDEM_TESTS_MPIRUN_H
#define TANDEM_TESTS_MPIRUN_H

#include <unistd.h>

#include "tests/shell.h"

/* Leaks of MPI's are none of ours; as many ranks as are asked for, whoever asks. */
#define MPIRUN_FOR(seconds) \
    "ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout " seconds \
    " mpirun --oversubscribe "
#define MPIRUN MPIRUN_FOR("60")

static inline bool has_mpirun(void) { return system("command -v mpirun >/dev/null 2>&1") == 0; }

#define NEEDS_MPI \
    if (!has_mpirun()) SKIP("there is no mpirun here: install Debian's package openmpi-bin")

/* The file of this program, which starts itself again as a rank. */
static inline const char *own_path(void)
{
    static char path[512];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    return path;
}

#endif
