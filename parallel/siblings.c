/* Processes that a launcher such as mpirun started beside this one on its host, before they have met in any world.
 *
 * Who waits for the others to come can see in /proc which of them is stopped or gone, and name it.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "parallel/mpi.h"

enum { ENVIRONMENT_BYTES = 1 << 16 };

/* The number of the variable in the process' environment; -1: none, or it may not be read. */
static long number_of(const char *pid, const char *variable)
{
    char path[300], *text = malloc(ENVIRONMENT_BYTES);
    size_t length = strlen(variable);
    long number = -1;
    snprintf(path, sizeof path, "/proc/%s/environ", pid);
    FILE *from = text ? fopen(path, "re") : NULL;
    size_t bytes = from ? fread(text, 1, ENVIRONMENT_BYTES - 1, from) : 0;
    if (from) fclose(from);
    if (text) text[bytes] = 0;
    for (size_t at = 0; at < bytes; at += strlen(text + at) + 1)
        if (!strncmp(text + at, variable, length) && text[at + length] == '=') number = strtol(text + at + length + 1, NULL, 10);
    free(text);
    return number;
}

static void look(const char *variable, par_life state[PAR_MAX_RANKS])
{
    DIR *all = opendir("/proc");
    for (struct dirent *entry; all && (entry = readdir(all));) {
        int64_t parent = 0, process = strtol(entry->d_name, NULL, 10);
        par_life life = process > 0 ? par_process_life(process, &parent) : PAR_GONE;
        long rank = life != PAR_GONE && parent == getppid() ? number_of(entry->d_name, variable) : -1;
        if (rank >= 0 && rank < PAR_MAX_RANKS) state[rank] = life;
    }
    if (all) closedir(all);
}

/* A wrapper that the launcher started, and that started this process, has a rank, too: then others cannot be seen. */
static bool is_child_of_launcher(const char *variable)
{
    char parent[32];
    snprintf(parent, sizeof parent, "%d", (int)getppid());
    return number_of(parent, variable) < 0;
}

static const char *const states[] = { [PAR_GONE] = "is gone", [PAR_STOPPED] = "is stopped" };

par_siblings par_siblings_look(void)
{
    long own = -1, ranks = -1, first = 0;
    const par_launcher *launcher = par_launcher_find(&own, &ranks);
    par_life state[PAR_MAX_RANKS] = { PAR_GONE };
    par_siblings s = { .speaks = own == 0 };
    size_t used = 0, room = sizeof s.text;
    if (!launcher || !is_child_of_launcher(launcher->rank)) return s;
    bool all_here = par_environment_number(launcher->here) == ranks;
    look(launcher->rank, state);
    for (long r = 0; r < ranks && r < PAR_MAX_RANKS && used < room; r++) {
        if (state[r] == PAR_RUNS || (state[r] == PAR_GONE && !all_here)) continue;
        s.any_gone = s.any_gone || state[r] == PAR_GONE;
        used += (size_t)snprintf(s.text + used, room - used, "%srank %ld %s", used ? ", " : " (", r, states[state[r]]);
    }
    if (used && used < room) snprintf(s.text + used, room - used, ")");
    while (first < own && first < PAR_MAX_RANKS && state[first] != PAR_RUNS) first++;
    s.speaks = first == own && (all_here || own == 0); /* a lower one may be on another host */
    return s;
}
