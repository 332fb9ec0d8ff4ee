/* What /proc tells of a process of this machine, which may be another rank.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "parallel/world.h"

par_life par_process_life(int64_t process, int64_t *parent)
{
    char path[64], line[512] = "", state = 0;
    long long of = 0;
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)process);
    FILE *from = fopen(path, "re");
    bool read = from && fgets(line, sizeof line, from) != NULL;
    if (from) fclose(from);
    const char *name_end = read ? strrchr(line, ')') : NULL; /* "17 (name) S 3 ..." */
    bool known = name_end && sscanf(name_end + 1, " %c %lld", &state, &of) == 2;
    if (parent) *parent = of;
    if (!known) return kill((pid_t)process, 0) != 0 && errno == ESRCH ? PAR_GONE : PAR_RUNS;
    if (strchr("ZXx", state)) return PAR_GONE;
    return strchr("Tt", state) ? PAR_STOPPED : PAR_RUNS;
}
