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

/* A process that has the same parent and has not ended. */
static bool is_sibling(const char *pid)
{
    char path[300], line[512] = "", state = 0;
    int parent = 0;
    snprintf(path, sizeof path, "/proc/%s/stat", pid);
    FILE *from = fopen(path, "re");
    if (!from) return false;
    bool read = fgets(line, sizeof line, from) != NULL;
    fclose(from);
    const char *name_end = read ? strrchr(line, ')') : NULL; /* "17 (name) S 3 ..." */
    return name_end && sscanf(name_end + 1, " %c %d", &state, &parent) == 2 && parent == getppid() && state != 'Z';
}

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

typedef enum sibling { GONE, RUNS, STOPPED } sibling;

static void look(const char *variable, sibling state[PAR_MAX_RANKS])
{
    DIR *all = opendir("/proc");
    for (struct dirent *entry; all && (entry = readdir(all));) {
        long process = strtol(entry->d_name, NULL, 10);
        long rank = process > 0 && is_sibling(entry->d_name) ? number_of(entry->d_name, variable) : -1;
        if (rank >= 0 && rank < PAR_MAX_RANKS) state[rank] = par_is_stopped(process) ? STOPPED : RUNS;
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

static const char *const states[] = { [GONE] = "is gone", [STOPPED] = "is stopped" };

par_siblings par_siblings_look(void)
{
    long own = -1, ranks = -1, first = 0;
    const par_launcher *launcher = par_launcher_find(&own, &ranks);
    sibling state[PAR_MAX_RANKS] = { GONE };
    par_siblings s = { .speaks = own == 0 };
    size_t used = 0, room = sizeof s.text;
    if (!launcher || !is_child_of_launcher(launcher->rank)) return s;
    bool all_here = par_environment_number(launcher->here) == ranks;
    look(launcher->rank, state);
    for (long r = 0; r < ranks && r < PAR_MAX_RANKS && used < room; r++) {
        if (state[r] == RUNS || (state[r] == GONE && !all_here)) continue;
        s.any_gone = s.any_gone || state[r] == GONE;
        used += (size_t)snprintf(s.text + used, room - used, "%srank %ld %s", used ? ", " : " (", r, states[state[r]]);
    }
    if (used && used < room) snprintf(s.text + used, room - used, ")");
    while (first < own && first < PAR_MAX_RANKS && state[first] != RUNS) first++;
    s.speaks = first == own && (all_here || own == 0); /* a lower one may be on another host */
    return s;
}
