/* Worlds: making the memory that ranks share, entering it, and running ranks as threads.
 *
 * The mapping is sized for every mesh axis a rank may have, since pages that nobody touches cost nothing; so the
 * place of everything in it is fixed, whatever contexts and meshes come and go.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/hash.h"
#include "parallel/meet.h"
#include "parallel/mpi.h"
#include "parallel/nccl.h"
#include "parallel/staged.h"

static const uint64_t MAGIC = 0x74646d2d776f726c;
static const int64_t STAGING_BYTES = 524288, STAGING_LEAST = 4096, PAGE = 4096;

/* ---- The segment ----------------------------------------------------------------------------------------- */

static int64_t whole_pages(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static int64_t staging_begin(int ranks)
{
    return whole_pages((int64_t)sizeof(par_segment) + ranks * (int64_t)sizeof(par_area));
}

void *par_staging(const par_world *world, int rank, int slot, unsigned parity)
{
    const par_segment *s = world->segment;
    int64_t index = (int64_t)rank * (PAR_SLOTS - 1) + slot; /* barriers stage nothing */
    return (char *)world->segment + staging_begin(s->ranks) + index * s->staging_bytes +
           (parity & 1) * (s->staging_bytes / 2);
}

static par_segment *map_segment(int fd, size_t bytes)
{
    int flags = fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

bool par_segment_open(par_world *world, int ranks, const par_world_options *options, int *fd)
{
    int64_t asked = options ? options->staging_bytes : 0;
    double timeout_s = options ? options->timeout_s : 0;
    if (ranks < 1 || ranks > PAR_MAX_RANKS || asked < 0 || asked > INT64_MAX / 4096 || !(timeout_s >= 0)) {
        errno = EINVAL;
        return false;
    }
    int64_t staging = whole_pages(asked == 0 ? STAGING_BYTES : asked < STAGING_LEAST ? STAGING_LEAST : asked);
    int64_t bytes = staging_begin(ranks) + (int64_t)ranks * (PAR_SLOTS - 1) * staging;
    int file = -1;
    if (fd) {
        file = memfd_create("tandem", MFD_CLOEXEC);
        if (file < 0) return false;
        if (ftruncate(file, bytes) != 0) {
            close(file);
            return false;
        }
    }
    par_segment *s = map_segment(file, (size_t)bytes);
    if (!s) {
        if (fd) close(file);
        return false;
    }
    s->magic = MAGIC;
    s->bytes = bytes;
    s->staging_bytes = staging;
    s->timeout_s = timeout_s > 0 ? timeout_s : PAR_TIMEOUT_S;
    s->ranks = ranks;
    world->ranks = ranks;
    world->segment = s;
    if (fd) *fd = file;
    return true;
}

/* ---- Opening and closing --------------------------------------------------------------------------------- */

bool par_open_local(par_world *world, int first, int here)
{
    world->local = calloc((size_t)here, sizeof *world->local);
    if (!world->local) return false;
    world->first = first;
    world->here = here;
    for (int i = 0; i < here; i++) {
        world->local[i].world = world;
        world->local[i].rank = first + i;
    }
    return true;
}

par_world *par_world_threads(int ranks, const par_world_options *options)
{
    par_world *world = calloc(1, sizeof *world);
    if (!world) return NULL;
    if (!par_segment_open(world, ranks, options, NULL) || !par_open_local(world, 0, ranks)) {
        par_world_close(world);
        return NULL;
    }
    return world;
}

long par_environment_number(const char *name)
{
    const char *text = getenv(name);
    if (!text || !*text) return -1;
    char *end;
    long value = strtol(text, &end, 10);
    return *end == 0 && value >= 0 && value <= INT_MAX ? value : -1;
}

/* A rank's own children inherit the environment, but their parent is not the launcher. */
bool par_launched(void) { return getenv("TANDEM_RANK") && par_environment_number("TANDEM_LAUNCHER") == (long)getppid(); }

bool par_segment_enter(par_world *world, int fd, int rank, int ranks)
{
    struct stat file;
    errno = EINVAL;
    if (fstat(fd, &file) != 0 || file.st_size < (off_t)sizeof(par_segment)) return false;
    par_segment *s = map_segment(fd, (size_t)file.st_size);
    if (!s) return false;
    if (s->magic != MAGIC || s->bytes != file.st_size || s->ranks != ranks || !par_open_local(world, rank, 1)) {
        munmap(s, (size_t)file.st_size);
        return false;
    }
    world->segment = s;
    world->ranks = ranks;
    return true;
}

par_world *par_world_join(int *rank)
{
    long at = par_environment_number("TANDEM_RANK"), ranks = par_environment_number("TANDEM_WORLD");
    long fd = par_environment_number("TANDEM_FD");
    if (!par_launched() || at < 0 || at >= ranks || fd < 0) return NULL;
    par_world *world = calloc(1, sizeof *world);
    if (!world) return NULL;
    if (!par_segment_enter(world, (int)fd, (int)at, (int)ranks)) {
        free(world);
        return NULL;
    }
    fcntl((int)fd, F_SETFD, FD_CLOEXEC); /* kept open for the next join, not for this rank's children */
    *rank = (int)at;
    return world;
}

par_world *par_world_none(int ranks, int rank)
{
    if (ranks < 1 || rank < 0 || rank >= ranks) return NULL;
    par_world *world = calloc(1, sizeof *world);
    if (!world) return NULL;
    world->ranks = ranks;
    if (par_open_local(world, rank, 1)) return world;
    free(world);
    return NULL;
}

par_world *par_world_rehearsed(int ranks, const par_rehearsal *how)
{
    par_world *world = calloc(1, sizeof *world);
    if (!world) return NULL;
    world->rehearsal = *how;
    if (par_segment_open(world, ranks, NULL, NULL) && par_open_local(world, 0, 1)) return world;
    par_world_close(world);
    return NULL;
}

uint64_t par_layout(void) { return td_hash_text(TANDEM_VERSION) + sizeof(par_segment) + 0x10000 * sizeof(par_area); }

void par_segment_close(par_world *world)
{
    if (world->segment) munmap(world->segment, (size_t)world->segment->bytes);
    world->segment = NULL;
}

void par_world_close(par_world *world)
{
    if (!world) return;
    par_nccl_close(world);
    par_staged_close(world);
    if (world->mpi) par_mpi_close(world);
    if (world->meet) par_meet_close(world);
    par_segment_close(world);
    free(world->local);
    free(world);
}

/* ---- What a world knows ---------------------------------------------------------------------------------- */

int par_world_size(const par_world *world) { return world->ranks; }

par_local *par_local_at(par_world *world, int rank)
{
    return rank < world->first || rank >= world->first + world->here ? NULL : &world->local[rank - world->first];
}

int64_t par_sent(const par_world *world, int rank, int64_t *calls)
{
    const par_area *area = world->segment && rank >= 0 && rank < world->ranks ? &world->segment->area[rank] : NULL;
    if (calls) *calls = area ? atomic_load(&area->calls) : 0;
    return area ? atomic_load(&area->sent) : 0;
}

const char *par_world_error(const par_world *world)
{
    const char *text = par_broken(world);
    return text ? text : "";
}

void par_fail_world(par_world *world, int rank, const char *text)
{
    char whole[PAR_MESSAGE_BYTES], place[PAR_WHERE_BYTES];
    const par_area *area = world->segment && rank >= 0 && rank < world->ranks ? &world->segment->area[rank] : NULL;
    bool began = area && atomic_load(&area->run) > 0;
    snprintf(whole, sizeof whole, "rank %d%s%s: %s", rank, began ? " " : "", began ? par_where(area, place) : "", text);
    par_stop_world(world, rank, whole);
}

void par_stop_world(par_world *world, int rank, const char *text)
{
    if (world->mpi) par_mpi_listen(world); /* another one may have told the same a while ago, and waits for nobody */
    if (!world->segment || rank < 0 || rank >= world->ranks || par_broken(world)) return;
    atomic_store(&world->segment->area[rank].cause, PAR_FAILED);
    par_break(world, rank, "%s", text);
}

/* ---- Ranks as threads ------------------------------------------------------------------------------------ */

typedef struct thread_rank {
    par_world *world;
    int (*body)(par_world *world, int rank, void *user);
    void *user;
    int rank, result;
    pthread_t thread;
    bool started;
} thread_rank;

static void *run_rank(void *argument)
{
    thread_rank *t = argument;
    t->result = t->body(t->world, t->rank, t->user);
    if (t->result) par_break(t->world, t->rank, "rank %d ended with result %d", t->rank, t->result);
    else par_end(t->world, t->rank);
    return NULL;
}

int par_run_threads(int ranks, const par_world_options *options, int (*body)(par_world *world, int rank, void *user),
                    void *user)
{
    par_world *world = par_world_threads(ranks, options);
    thread_rank *threads = world ? calloc((size_t)ranks, sizeof *threads) : NULL;
    if (!threads) {
        par_world_close(world);
        return -1;
    }
    bool all = true;
    for (int r = 0; r < ranks; r++) {
        threads[r] = (thread_rank){ .world = world, .body = body, .user = user, .rank = r };
        threads[r].started = all && pthread_create(&threads[r].thread, NULL, run_rank, &threads[r]) == 0;
        if (all && !threads[r].started) par_break(world, r, "rank %d: no thread could be started for it", r);
        all = all && threads[r].started;
    }
    int result = 0;
    for (int r = 0; r < ranks; r++) {
        if (threads[r].started) pthread_join(threads[r].thread, NULL);
        if (result == 0) result = threads[r].result;
    }
    free(threads);
    par_world_close(world);
    return result == 0 && !all ? -1 : result;
}
