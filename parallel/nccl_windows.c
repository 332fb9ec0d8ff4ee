/* NCCL's windows: the memory in which a context's steps lie, registered with the communicators of its mesh, so that ranks read and write it in
 * one another. From windows NCCL takes its kernels of few messages, and copy engines where NCCL_CTA_POLICY asks for them.
 *
 * NCCL reckons by offsets: what a collective takes and gives must lie at the same one on all its ranks. Plans for the same program do, unless
 * a rank with less memory makes values again that others keep. So before a plan's first run ranks compare; where one differs all do
 * without from then on.
 */
#include "parallel/nccl.h"

/* How steps lie on one rank. */
typedef struct lies {
    int64_t bytes, layout;
} lies;

/* Through the CPU transport, uncounted: steps send nothing of it. */
static bool compare(par_nccl *n, const lies *own, bool *same)
{
    lies all[PAR_MAX_RANKS];
    const td_transport *inner = &n->inner;
    n->me->uncounted = true;
    bool told = inner->all_gather(inner->self, td_axes(0, n->me->mesh.axes - 1), own, all, sizeof *own / sizeof(int64_t), TD_I64);
    n->me->uncounted = false;
    *same = true;
    for (int r = 0; r < n->me->world->ranks && told; r++) *same = *same && all[r].bytes == own->bytes && all[r].layout == own->layout;
    return told;
}

/* Several axes may be the same ranks. */
static bool seen_before(const par_nccl *n, int slot)
{
    int before = 0;
    while (before < slot && n->of_slot[before] != n->of_slot[slot]) before++;
    return before < slot;
}

/* By all ranks in the same order. */
static bool make_windows(par_nccl *n, void *memory, int64_t bytes)
{
    n->registered = true;
    for (int s = 0; s < PAR_SLOTS; s++) {
        par_nccl_group *g = n->of_slot[s];
        if (!g || seen_before(n, s)) continue;
        if (!par_nccl_begin(n)) return false;
        int result = n->lib.comm_window_register(g->comm, memory, (size_t)bytes, &g->window, NCCL_WINDOW_SYMMETRIC);
        if (result == NCCL_SUCCESS) result = NCCL_IN_PROGRESS; /* NCCL says so of a call that has just begun */
        if (!par_nccl_end(n, g->comm, result, "registering the memory of its steps")) return false;
    }
    return true;
}

/* Each rank for itself. Of a world that was stopped they are gone with their communicators. */
static bool drop_windows(par_nccl *n)
{
    n->registered = false;
    if (!n->options.device->wait(td_queue(n->me->td))) return false; /* the context hears of it elsewhere */
    for (int s = 0; s < PAR_SLOTS; s++) {
        par_nccl_group *g = n->of_slot[s];
        if (!g || !g->window) continue;
        if (!par_nccl_begin(n)) return false;
        int result = n->lib.comm_window_deregister(g->comm, g->window);
        g->window = NULL;
        if (!par_nccl_end(n, g->comm, result, "giving up the windows of its steps")) return false;
    }
    return true;
}

bool par_nccl_settle_memory(void *self, void *memory, int64_t bytes, uint64_t layout, bool *changed)
{
    par_nccl *n = self;
    bool had = n->registered, same;
    *changed = false;
    if (n->apart) return true;
    if (memory && !compare(n, &(lies){ bytes, (int64_t)layout }, &same)) return false;
    if (memory && same && had) return true;
    if (had && !drop_windows(n)) return false;
    *changed = had || (memory && same);
    if (!memory) return true;
    n->apart = !same;
    if (same) return make_windows(n, memory, bytes);
    if (n->me->rank == 0)
        td_message(n->me->td, TD_LOG_WARNING, "values of a step lie differently on different ranks, whose GPUs have not the same memory free: "
                   "collectives do without NCCL's windows");
    return true;
}
