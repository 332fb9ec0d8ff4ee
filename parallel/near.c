/* Ranks near their GPUs: on a host of several NUMA nodes a rank runs on cores of the node that its GPU is at, and its memory comes from there,
 * since the kernel takes that of the node whose core touches it first. Ranks whose GPUs are at one node share its cores evenly.
 *
 * Each rank finds this by itself, of what sysfs says of all GPUs of the host, which all of its ranks see. Threads inherit where they may run
 * from the one that starts them, so this comes before any others are there.
 */
#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "parallel/gpus.h"
#include "parallel/near.h"

enum { LIST_BYTES = 8192 }; /* more than a page, which is the most that sysfs gives */

/* ---- Lists ----------------------------------------------------------------------------------------------- */

/* A CPU's number at *at, which is moved behind it; -1: none that a set has room for. */
static int read_cpu(const char **at)
{
    char *end;
    if (!isdigit((unsigned char)**at)) return -1;
    long cpu = strtol(*at, &end, 10);
    *at = end;
    return cpu < CPU_SETSIZE ? (int)cpu : -1;
}

bool par_cpus_read(const char *list, cpu_set_t *to)
{
    const char *at = list;
    CPU_ZERO(to);
    if (!*at || !strcmp(at, "\n")) return true;
    for (;; at++) {
        int first = read_cpu(&at), last = first;
        if (*at == '-') at++, last = read_cpu(&at);
        if (first < 0 || last < first) return false;
        for (int cpu = first; cpu <= last; cpu++) CPU_SET(cpu, to);
        if (*at != ',') return !*at || !strcmp(at, "\n");
    }
}

void par_cpus_text(const cpu_set_t *cpus, char *text, size_t room)
{
    size_t used = 0;
    *text = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE && used < room; cpu++) {
        int last = cpu;
        if (!CPU_ISSET(cpu, cpus)) continue;
        while (last + 1 < CPU_SETSIZE && CPU_ISSET(last + 1, cpus)) last++;
        size_t before = used;
        used += (size_t)snprintf(text + used, room - used, last > cpu ? "%s%d-%d" : "%s%d", used ? "," : "", cpu, last);
        if (used >= room) text[before] = 0; /* no part of a number */
        cpu = last;
    }
}

bool par_cpus_share(const cpu_set_t *cpus, const int first[CPU_SETSIZE], int index, int parts, cpu_set_t *to)
{
    int number[CPU_SETSIZE], cores = 0; /* of each CPU's core among these */
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, cpus)) number[cpu] = first[cpu] == cpu ? cores++ : number[first[cpu]];
    *to = *cpus;
    if (cores < parts) return false;
    int most = cores % parts, each = cores / parts, begin = index * each + (index < most ? index : most), end = begin + each + (index < most);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, cpus) && (number[cpu] < begin || number[cpu] >= end)) CPU_CLR(cpu, to);
    return true;
}

/* ---- What sysfs says ------------------------------------------------------------------------------------- */

/* The list in a file. false: there is none. */
static bool read_list(cpu_set_t *to, const char *format, ...) TD_PRINTF(2, 3);
static bool read_list(cpu_set_t *to, const char *format, ...)
{
    char path[512], list[LIST_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(path, sizeof path, format, arguments);
    va_end(arguments);
    FILE *from = fopen(path, "r");
    if (!from) return false;
    bool read = fgets(list, sizeof list, from) != NULL;
    fclose(from);
    return read && par_cpus_read(list, to);
}

/* Of the allowed ones; CUDA writes addresses in capitals, and some of its tools domains with more zeros. */
static bool read_near(const par_near_host *host, int rank, const cpu_set_t *allowed, cpu_set_t *to)
{
    unsigned domain, bus, device, function;
    if (sscanf(host->address[rank], "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4) return false;
    if (!read_list(to, "%s/bus/pci/devices/%04x:%02x:%02x.%x/local_cpulist", host->sysfs, domain, bus, device, function)) return false;
    CPU_AND(to, to, allowed);
    return CPU_COUNT(to) > 0;
}

/* Where it is not told which CPUs are of one core, each is one. */
static int first_of_core(const par_near_host *host, int cpu, const cpu_set_t *cpus)
{
    cpu_set_t core;
    if (!read_list(&core, "%s/devices/system/cpu/cpu%d/topology/thread_siblings_list", host->sysfs, cpu)) return cpu;
    int first = 0;
    while (first < cpu && !(CPU_ISSET(first, &core) && CPU_ISSET(first, cpus))) first++;
    return first;
}

static bool are_all(const par_near_host *host, const cpu_set_t *allowed)
{
    cpu_set_t online, both;
    if (!read_list(&online, "%s/devices/system/cpu/online", host->sysfs)) return false;
    CPU_AND(&both, &online, allowed);
    return CPU_EQUAL(&both, &online);
}

bool par_near_find(const par_near_host *host, int index, const cpu_set_t *allowed, cpu_set_t *to, bool *own)
{
    cpu_set_t near, others;
    int first[CPU_SETSIZE], parts = 0, part = 0;
    if (!are_all(host, allowed) || !read_near(host, index, allowed, &near) || CPU_EQUAL(&near, allowed)) return false;
    for (int r = 0; r < host->ranks; r++) {
        bool together = read_near(host, r, allowed, &others) && CPU_EQUAL(&near, &others);
        part += together && r < index;
        parts += together;
    }
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) first[cpu] = CPU_ISSET(cpu, &near) ? first_of_core(host, cpu, &near) : cpu;
    *own = par_cpus_share(&near, first, part, parts, to);
    return true;
}

/* ---- Staying there --------------------------------------------------------------------------------------- */

/* By OpenMP's variables, and those of its libraries. */
static bool user_places_threads(void)
{
    static const char *const names[] = { "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value && *value) return true;
    }
    return false;
}

int par_near_stay(par_world *world, int rank, const par_near_host *host, int index, char *message, size_t room)
{
    cpu_set_t allowed, cpus;
    char list[400];
    par_local *me = par_local_at(world, rank);
    *message = 0;
    if (user_places_threads() || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 0;
    if (!par_near_find(host, index, &allowed, &cpus, &me->own_cores)) return 0;
    par_cpus_text(&cpus, list, sizeof list);
    if (sched_setaffinity(0, sizeof cpus, &cpus) != 0) {
        me->own_cores = false;
        snprintf(message, room, "rank %d runs on all cores: it could not be kept on %s, near its GPU: %s", rank, list, strerror(errno));
        return 0;
    }
    snprintf(message, room, "rank %d: on core%s %s, near its GPU", rank, CPU_COUNT(&cpus) == 1 ? "" : "s", list);
    return me->own_cores ? CPU_COUNT(&cpus) : 1;
}

int par_near_gpu(par_world *world, int rank, const char *device, char *message, size_t room)
{
    par_near_host host = { .sysfs = "/sys" };
    int index;
    *message = 0;
    host.ranks = par_neighbours(world, rank, false, &index);
    if (host.ranks < 2 || strcmp(device, "cuda") != 0 || par_gpus() < host.ranks) return 0;
    for (int r = 0; r < host.ranks; r++) par_gpu_address(r, host.address[r]);
    return par_near_stay(world, rank, &host, index, message, room);
}
