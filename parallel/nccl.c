/* NCCL's communicators: one for each group of ranks that collectives are made among.
 *
 * A rank connects with the others of a group when its transport is made, in the same order on all ranks: the group's first rank makes an
 * id, which the CPU transport carries. Communicators stay with the world: a context that comes later finds those that it needs.
 */
#include "parallel/nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "parallel/mpi.h"

#define TELLS_MORE "NCCL_DEBUG=INFO in the environment makes NCCL tell more"

static const double HEAR_S = 1;          /* an error of NCCL's waits so long for a better word */
static const double LEAVE_S = 2;         /* more than the watcher needs to give communicators back, or up */

/* ---- Calls ----------------------------------------------------------------------------------------------- */

int par_nccl_settle(par_nccl *n, nccl_comm comm, int result)
{
    const par_world *world = n->me->world;
    par_patience patience = { .before = par_seconds() };
    while (result == NCCL_IN_PROGRESS && !par_broken(world) && patience.waited < world->segment->timeout_s) {
        par_mpi_rest(patience.waited + patience.excused);
        int asked = n->lib.comm_get_async_error(comm, &result);
        if (asked != NCCL_SUCCESS) result = asked;
        atomic_fetch_add(&n->asked, 1);
        par_patient(world->segment, &patience);
    }
    return result;
}

void par_nccl_stop(const par_nccl *n, int result, const char *doing)
{
    par_world *world = n->me->world;
    char more[300];
    snprintf(more, sizeof more, "%s", n->lib.get_last_error(NULL));
    more[strcspn(more, "\n")] = 0;
    for (double begin = par_seconds(), most = par_nccl_grace(n, HEAR_S); !par_broken(world) && par_seconds() - begin < most;) {
        if (world->mpi) par_mpi_look(world);
        par_mpi_rest(HEAR_S);
    }
    if (par_broken(world)) return;
    atomic_store(&world->segment->area[n->me->rank].cause, PAR_FAILED);
    par_break(world, n->me->rank, "rank %d %s: NCCL: %s%s%s%s; " TELLS_MORE, n->me->rank, doing, n->lib.get_error_string(result),
              *more ? " (" : "", more, *more ? ")" : "");
}

bool par_nccl_begin(par_nccl *n)
{
    if (atomic_load(&n->given_up)) return par_stopped(n->me);
    pthread_mutex_lock(&n->lock);
    if (!par_broken(n->me->world)) return true;
    pthread_mutex_unlock(&n->lock);
    return par_stopped(n->me);
}

bool par_nccl_end(par_nccl *n, nccl_comm comm, int result, const char *doing)
{
    par_world *world = n->me->world;
    result = par_nccl_settle(n, comm, result);
    if (result == NCCL_IN_PROGRESS) {
        atomic_store(&world->segment->area[n->me->rank].cause, PAR_LATE);
        par_break(world, n->me->rank, "rank %d %s: NCCL is not done within %g s; " TELLS_MORE, n->me->rank, doing, world->segment->timeout_s);
    } else if (result != NCCL_SUCCESS) {
        par_nccl_stop(n, result, doing);
    }
    pthread_mutex_unlock(&n->lock);
    return result == NCCL_SUCCESS || par_stopped(n->me);
}

/* ---- Connecting ------------------------------------------------------------------------------------------ */

/* What the first rank of a group tells the others. */
typedef struct invitation {
    nccl_unique_id id;
    int32_t rank, version;
} invitation;

/* "connecting the 4 ranks along replicate, shard" */
static void describe(const par_nccl *n, int axes, const par_group *g, char *to, size_t room)
{
    int first = axes & 0xFF, last = first + (axes >> 8);
    size_t used = (size_t)snprintf(to, room, "connecting the %d ranks along", g->size);
    for (int a = first; a <= last && used < room; a++)
        used += (size_t)snprintf(to + used, room - used, "%s %s", a > first ? "," : "", n->me->mesh.name[a]);
}

static bool invite(par_nccl *n, int axes, const par_group *g, const char *doing, invitation *said)
{
    char own[NCCL_VERSION_BYTES], theirs[NCCL_VERSION_BYTES];
    memset(said, 0, sizeof *said);
    if (g->at == 0) {
        if (!par_nccl_begin(n)) return false;
        *said = (invitation){ .rank = n->me->rank, .version = n->lib.version };
        if (!par_nccl_end(n, NULL, n->lib.get_unique_id(&said->id), doing)) return false;
    }
    if (!n->inner.broadcast(n->inner.self, axes, 0, said, sizeof *said)) return false;
    if (said->version == n->lib.version) return true;
    par_break(n->me->world, n->me->rank, "rank %d has NCCL %s and rank %d %s: let LD_LIBRARY_PATH name the same on all hosts", n->me->rank,
              nccl_version_text(n->lib.version, own), said->rank, nccl_version_text(said->version, theirs));
    return par_stopped(n->me);
}

/* The watcher finds the group from before there is a communicator: one that is being made is given up, too. */
static par_nccl_group *connect_group(par_nccl *n, td_context *td, int axes, const par_group *g)
{
    char doing[160];
    invitation said;
    nccl_config config = NCCL_CONFIG; /* .blocking is 0 */
    describe(n, axes, g, doing, sizeof doing);
    if (!invite(n, axes, g, doing, &said)) return NULL;
    par_nccl_group *group = calloc(1, sizeof *group);
    if (!group) {
        td_fail(td, TD_ERROR_MEMORY, "out of memory for a communicator");
        return NULL;
    }
    *group = (par_nccl_group){ .first = g->first, .stride = g->stride, .size = g->size };
    if (!par_nccl_begin(n)) {
        free(group);
        return NULL;
    }
    group->next = n->groups;
    n->groups = group;
    int result = n->lib.comm_init_rank_config(&group->comm, g->size, said.id, g->at, &config);
    return par_nccl_end(n, group->comm, result, doing) ? group : NULL;
}

static par_nccl_group *find_group(const par_nccl *n, const par_group *g)
{
    par_nccl_group *found = n->groups;
    while (found && (found->first != g->first || found->stride != g->stride || found->size != g->size)) found = found->next;
    return found;
}

/* NCCL, and the watcher: when first needed. */
static bool ensure_library(par_nccl *n, td_context *td)
{
    char message[600];
    if (n->watched) return true;
    if (!nccl_library_load(n->options.library, &n->lib, message, sizeof message)) {
        td_fail(td, TD_ERROR_UNSUPPORTED, "%s", message);
        return false;
    }
    return par_nccl_watch(n);
}

static bool connect_axes(par_nccl *n, td_context *td, int axes)
{
    par_group g;
    if (!par_group_find(n->me, axes, &g)) return false;
    if (g.size == 1 && !n->options.alone) return true;
    if (!ensure_library(n, td)) return false;
    par_nccl_group *group = find_group(n, &g);
    if (!group) group = connect_group(n, td, axes, &g);
    n->of_slot[g.slot] = group;
    return group != NULL;
}

/* What the CPU transport carries for it is uncounted: steps send nothing of it. */
static bool connect_all(par_nccl *n, td_context *td)
{
    bool connected = true;
    memset(n->of_slot, 0, sizeof n->of_slot);
    n->me->uncounted = true;
    for (int first = 0; first < n->me->mesh.axes; first++)
        for (int last = first; last < n->me->mesh.axes; last++) connected = connected && connect_axes(n, td, td_axes(first, last));
    n->me->uncounted = false;
    return connected;
}

/* ---- Opening and closing --------------------------------------------------------------------------------- */

static void free_nccl(par_nccl *n)
{
    for (int i = 0; i < PAR_NCCL_MARKS; i++)
        if (n->mark[i].mark) n->options.device->free_mark(n->mark[i].mark);
    while (n->groups) {
        par_nccl_group *next = n->groups->next;
        free(n->groups);
        n->groups = next;
    }
    pthread_mutex_destroy(&n->lock);
    pthread_mutex_destroy(&n->marks_lock);
    free(n);
}

static par_nccl *new_nccl(par_local *me, const par_nccl_options *options)
{
    par_nccl *n = calloc(1, sizeof *n);
    bool whole = n != NULL;
    if (!n) return NULL;
    *n = (par_nccl){ .me = me, .options = *options, .device = options->device->number(td_queue(me->td)) };
    pthread_mutex_init(&n->lock, NULL);
    pthread_mutex_init(&n->marks_lock, NULL);
    for (int i = 0; i < PAR_NCCL_MARKS && whole; i++) whole = (n->mark[i].mark = options->device->make_mark()) != NULL;
    if (whole) return n;
    free_nccl(n);
    return NULL;
}

bool par_nccl_open(par_world *world, int rank, td_context *td, const td_transport *inner, const par_nccl_options *options, td_transport *out)
{
    char version[NCCL_VERSION_BYTES];
    par_local *me = par_local_at(world, rank);
    options->device->use(options->device->number(td_queue(td)));
    if (!me->nccl) me->nccl = new_nccl(me, options);
    par_nccl *n = me->nccl;
    if (!n) {
        td_fail(td, TD_ERROR_MEMORY, "rank %d: memory or CUDA's events for what connects its GPU with others' cannot be had", rank);
        return false;
    }
    if (n->device != options->device->number(td_queue(td))) {
        td_fail(td, TD_ERROR_USAGE, "rank %d is on another GPU than before in the same world: open a world for each", rank);
        return false;
    }
    n->inner = *inner;
    n->run = (td_sent){ 0 };
    n->options.windows = options->windows;
    n->apart = false;
    if (!connect_all(n, td)) return false;
    if (n->watched && options->windows && !n->lib.comm_window_register && rank == 0)
        td_message(td, TD_LOG_WARNING, "NCCL %s has no windows, which came with 2.27: collectives do without",
                   nccl_version_text(n->lib.version, version));
    par_nccl_fill(n, out);
    if (out->reach) par_nccl_reaches(n, td_queue(td));
    return true;
}

bool par_nccl_may_join(par_world *world, int rank, td_context *td)
{
    const par_local *me = world->segment ? par_local_at(world, rank) : NULL;
    if (!me || !me->nccl || !me->nccl->reaches) return true;
    td_fail(td, TD_ERROR_USAGE, "rank %d has a context with windows in this world: close it first", rank);
    return false;
}

/* The watcher has had its time. One that does not come back is in a call of NCCL's, after which it looks at nothing but `n`: that is left. */
static void close_nccl(par_nccl *n, double until)
{
    while (n->watched && !atomic_load(&n->gone) && par_seconds() < until) par_mpi_rest(LEAVE_S);
    if (n->watched && !atomic_load(&n->gone)) {
        pthread_detach(n->watcher);
        return;
    }
    if (n->watched) pthread_join(n->watcher, NULL);
    free_nccl(n);
}

void par_nccl_close(par_world *world)
{
    int here = world->local && world->segment ? world->here : 0;
    double until = par_seconds() + LEAVE_S + (here && !par_broken(world) ? world->segment->timeout_s : 0);
    for (int i = 0; i < here; i++)
        if (world->local[i].nccl) atomic_store(&world->local[i].nccl->closing, true);
    for (int i = 0; i < here; i++) {
        if (world->local[i].nccl) close_nccl(world->local[i].nccl, until);
        world->local[i].nccl = NULL;
    }
}

bool par_transport_nccl(par_world *world, int rank, td_context *td, const td_transport *inner, const par_device *device, bool windows,
                        td_transport *out)
{
    const par_nccl_options options = { .library = "libnccl.so.2", .device = device, .windows = windows };
    return par_nccl_open(world, rank, td, inner, &options, out);
}
