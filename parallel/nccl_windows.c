/* NCCL's windows: the memory in which a context's steps and state lie, registered with the communicators of its mesh, so that ranks read and
 * write it in one another. From windows NCCL takes its kernels of few messages, and copy engines where NCCL_CTA_POLICY asks for them.
 *
 * NCCL reckons by offsets: what a collective takes and gives must lie at the same one on all its ranks. Plans for the same program do, unless
 * a rank with less memory makes values again that others keep. So before a plan's first run ranks compare; where one differs all do
 * without from then on.
 *
 * A rank's memory is free when all have let go of it. So where one grows all drop their windows first, and meet.
 */
#include <string.h>

#include "parallel/nccl.h"

/* What must be the same on all ranks. */
typedef struct layout {
    int64_t bytes[TD_PIECES], places;
} layout;

/* `count` numbers of each rank. */
static bool tell(par_nccl *n, const void *own, void *all, int64_t count)
{
    return par_group_tell(n->me, &n->inner, n->me->mesh.axes, own, all, count);
}

static bool compare(par_nccl *n, const td_settled *where, bool *same)
{
    layout own = { .places = (int64_t)where->layout }, all[PAR_MAX_RANKS];
    for (int i = 0; i < TD_PIECES; i++) own.bytes[i] = where->piece[i].bytes;
    bool told = tell(n, &own, all, sizeof own / sizeof(int64_t));
    *same = true;
    for (int r = 0; r < n->me->world->ranks && told; r++) *same = *same && !memcmp(&all[r], &own, sizeof own);
    return told;
}

/* ---- Windows --------------------------------------------------------------------------------------------- */

/* Several axes may be the same ranks. */
static bool seen_before(const par_nccl *n, int slot)
{
    int before = 0;
    while (before < slot && n->of_slot[before] != n->of_slot[slot]) before++;
    return before < slot;
}

static bool make_window(par_nccl *n, par_nccl_group *g, int piece, const td_settled *where)
{
    size_t bytes = (size_t)where->piece[piece].bytes;
    nccl_window *window = &g->window[piece];
    if (!bytes) return true;
    if (!par_nccl_begin(n)) return false;
    int result = n->lib.comm_window_register(g->comm, where->piece[piece].memory, bytes, window, NCCL_WINDOW_SYMMETRIC);
    if (result == NCCL_SUCCESS) result = NCCL_IN_PROGRESS; /* NCCL says so of a call that has just begun */
    bool made = par_nccl_end(n, g->comm, result, "registering its memory");
    n->windows += made && *window;
    return made;
}

/* By all ranks in the same order. */
static bool make_windows(par_nccl *n, const td_settled *where)
{
    n->registered = *where;
    for (int s = 0; s < PAR_SLOTS; s++)
        for (int i = 0; i < TD_PIECES && n->of_slot[s] && !seen_before(n, s); i++)
            if (!make_window(n, n->of_slot[s], i, where)) return false;
    return true;
}

static bool drop_window(par_nccl *n, const par_nccl_group *g, nccl_window *window)
{
    nccl_window gone = *window;
    *window = NULL;
    return !gone || (par_nccl_begin(n) && par_nccl_end(n, g->comm, n->lib.comm_window_deregister(g->comm, gone), "giving up its windows"));
}

static bool has_windows(const par_nccl *n)
{
    bool has = false;
    for (int i = 0; i < TD_PIECES; i++) has = has || n->registered.piece[i].bytes;
    return has;
}

/* Each rank for itself. Of a world that was stopped they are gone with their communicators. */
static bool drop_windows(par_nccl *n)
{
    if (!has_windows(n)) return true;
    n->registered = (td_settled){ 0 };
    if (!n->options.device->wait(n->reaches)) {
        td_fail(n->me->td, TD_ERROR_DEVICE, "rank %d: its GPU has failed", n->me->rank);
        return false;
    }
    for (int s = 0; s < PAR_SLOTS; s++)
        for (int i = 0; i < TD_PIECES && n->of_slot[s]; i++)
            if (!drop_window(n, n->of_slot[s], &n->of_slot[s]->window[i])) return false;
    return true;
}

/* ---- What core asks for ---------------------------------------------------------------------------------- */

static bool grows(void *self, bool own, bool *any)
{
    par_nccl *n = self;
    int64_t mine = own, all[PAR_MAX_RANKS];
    *any = own;
    if (!tell(n, &mine, all, 1)) return false;
    for (int r = 0; r < n->me->world->ranks; r++) *any = *any || all[r];
    return true;
}

static bool is_registered(const par_nccl *n, const td_settled *where)
{
    bool is = has_windows(n);
    for (int i = 0; i < TD_PIECES; i++)
        is = is && n->registered.piece[i].memory == where->piece[i].memory && n->registered.piece[i].bytes == where->piece[i].bytes;
    return is;
}

static bool settle(void *self, const td_settled *where, bool *changed)
{
    par_nccl *n = self;
    bool same;
    *changed = false;
    if (n->apart) return true;
    if (!compare(n, where, &same)) return false;
    if (same && is_registered(n, where)) return true;
    *changed = same || has_windows(n);
    if (!drop_windows(n)) return false;
    if (same) return make_windows(n, where);
    n->apart = true;
    if (n->me->rank == 0)
        td_message(n->me->td, TD_LOG_WARNING, "values lie differently in the memory of different ranks, whose GPUs have not the same free, say: "
                   "collectives do without NCCL's windows");
    return true;
}

void par_nccl_reaches(par_nccl *n, void *queue)
{
    pthread_mutex_lock(&n->marks_lock);
    n->reaches = queue;
    pthread_mutex_unlock(&n->marks_lock);
}

static bool leave(void *self, bool together)
{
    par_nccl *n = self;
    bool dropped = drop_windows(n);
    if (!together) par_nccl_reaches(n, NULL);
    if (!dropped || !together) return dropped;
    n->me->uncounted = true;
    bool met = n->inner.barrier(n->inner.self);
    n->me->uncounted = false;
    return met;
}

const td_reach par_nccl_reach = { .grows = grows, .settle = settle, .leave = leave };
