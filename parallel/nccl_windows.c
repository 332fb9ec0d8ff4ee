/* NCCL's windows: the memory in which a context's steps and state lie, registered with the communicators of its mesh, so that ranks read and
 * write it in one another. From windows NCCL takes its kernels of few messages, and copy engines where NCCL_CTA_POLICY asks for them.
 *
 * NCCL reckons by offsets: what a collective takes and gives must lie at the same one on all its ranks. Plans for the same program do, unless
 * a rank with less memory makes values again that others keep. So before a plan's first run ranks compare; where one differs all do
 * without from then on.
 */
#include "parallel/nccl.h"

/* What must be the same on all ranks. */
typedef struct lies {
    int64_t step_bytes, state_bytes, layout;
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
    for (int r = 0; r < n->me->world->ranks && told; r++)
        *same = *same && all[r].step_bytes == own->step_bytes && all[r].state_bytes == own->state_bytes && all[r].layout == own->layout;
    return told;
}

/* Several axes may be the same ranks. */
static bool seen_before(const par_nccl *n, int slot)
{
    int before = 0;
    while (before < slot && n->of_slot[before] != n->of_slot[slot]) before++;
    return before < slot;
}

static bool make_window(par_nccl *n, par_nccl_group *g, void *memory, int64_t bytes, nccl_window *window)
{
    if (!memory || !bytes) return true;
    if (!par_nccl_begin(n)) return false;
    int result = n->lib.comm_window_register(g->comm, memory, (size_t)bytes, window, NCCL_WINDOW_SYMMETRIC);
    if (result == NCCL_SUCCESS) result = NCCL_IN_PROGRESS; /* NCCL says so of a call that has just begun */
    return par_nccl_end(n, g->comm, result, "registering its memory");
}

/* By all ranks in the same order. */
static bool make_windows(par_nccl *n, const td_settled *where)
{
    n->registered = *where;
    for (int s = 0; s < PAR_SLOTS; s++) {
        par_nccl_group *g = n->of_slot[s];
        if (!g || seen_before(n, s)) continue;
        if (!make_window(n, g, where->steps, where->step_bytes, &g->window[0])) return false;
        if (!make_window(n, g, where->state, where->state_bytes, &g->window[1])) return false;
    }
    return true;
}

static bool drop_window(par_nccl *n, const par_nccl_group *g, nccl_window *window)
{
    nccl_window gone = *window;
    *window = NULL;
    return !gone || (par_nccl_begin(n) && par_nccl_end(n, g->comm, n->lib.comm_window_deregister(g->comm, gone), "giving up its windows"));
}

/* Each rank for itself. Of a world that was stopped they are gone with their communicators. */
static bool drop_windows(par_nccl *n)
{
    n->registered = (td_settled){ 0 };
    if (!n->options.device->wait(td_queue(n->me->td))) return false; /* the context hears of it elsewhere */
    for (int s = 0; s < PAR_SLOTS; s++) {
        par_nccl_group *g = n->of_slot[s];
        if (g && !(drop_window(n, g, &g->window[0]) && drop_window(n, g, &g->window[1]))) return false;
    }
    return true;
}

static bool is_registered(const par_nccl *n, const td_settled *w)
{
    const td_settled *r = &n->registered;
    return r->steps == w->steps && r->state == w->state && r->step_bytes == w->step_bytes && r->state_bytes == w->state_bytes;
}

bool par_nccl_settle_memory(void *self, const td_settled *where, bool *changed)
{
    par_nccl *n = self;
    bool had = n->registered.steps || n->registered.state, same = false;
    *changed = false;
    if (n->apart) return true;
    if (where) {
        const lies own = { where->step_bytes, where->state_bytes, (int64_t)where->layout };
        if (!compare(n, &own, &same)) return false;
        if (same && had && is_registered(n, where)) return true;
        n->apart = !same;
    }
    *changed = had || same;
    if (had && !drop_windows(n)) return false;
    if (same) return make_windows(n, where);
    if (where && n->me->rank == 0)
        td_message(n->me->td, TD_LOG_WARNING, "values of a step lie differently on different ranks, whose GPUs have not the same memory free: "
                   "collectives do without NCCL's windows");
    return true;
}
