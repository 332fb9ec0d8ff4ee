/* An exponential moving average of parameters (formulas in optim.h).
 *
 * The averages are moments, so that they are stored and sharded as the parameters are, and move unit by unit in place. To evaluate
 * them nothing is copied: between opt_ema_begin and opt_ema_end they are what td_use of their parameters reads.
 */
#include "optim/optimizer.h"

struct opt_ema {
    td_context *td;
    td_module module;            /* where it records */
    td_state updates;            /* scalar, td_float: how many there have been */
    double decay;
    bool warm_up, reading;       /* reading: between begin and end */
    td_tensor latest;            /* the count that the latest update recorded; id TD_NONE: none yet */
    int count;
    td_state *parameters, *averages;
    td_state states[];
};

/* ---- Opening */

static opt_ema *allocate(td_module under, const char *call)
{
    td_context *td = td_module_context(under);
    int count = opt_collect(under, NULL);
    if (!count) td_fail(td, TD_ERROR_USAGE, "%s: no parameter under '%s' trains", call, td_module_name(under));
    opt_ema *ema = count ? td_own(td, sizeof *ema + 2 * sizeof(td_state) * (size_t)count) : NULL;
    if (!ema) return NULL;
    *ema = (opt_ema){ .td = td, .latest = { .td = td, .id = TD_NONE }, .count = count, .parameters = ema->states,
                      .averages = ema->states + count };
    opt_collect(under, ema->parameters);
    return ema;
}

/* A moment of that name that is there already is another's. */
static void make_averages(opt_ema *ema, const char *call, const char *name)
{
    for (int i = 0; i < ema->count && td_error(ema->td) == TD_OK; i++) {
        int64_t before = td_state_count(ema->td);
        ema->averages[i] = td_moment(ema->parameters[i], name);
        if (td_error(ema->td) == TD_OK && td_state_count(ema->td) == before)
            td_fail(ema->td, TD_ERROR_USAGE, "%s: '%s' exists already; give it another name", call, td_state_name(ema->averages[i]));
    }
}

opt_ema *opt_ema_open(td_module under, const opt_ema_options *options)
{
    static const char call[] = "opt_ema_open";
    td_context *td = td_module_context(under);
    opt_ema_options o = options ? *options : (opt_ema_options){ 0 };
    if (o.decay == 0) o.decay = 0.999;
    if (!o.name) o.name = "ema";
    if (td_error(td) != TD_OK || !opt_check(td, call, "decay", o.decay, 0, 1)) return NULL;
    opt_ema *ema = allocate(under, call);
    if (!ema) return NULL;
    ema->decay = o.decay;
    ema->warm_up = o.warm_up;
    ema->module = td_child(td_root(td), o.name);
    make_averages(ema, call, o.name);
    ema->updates = td_buffer(ema->module, "updates", td_float(td), (td_shape){ 0 }, td_init_constant(0));
    if (td_error(td) == TD_OK) return ema;
    opt_ema_close(ema);
    return NULL;
}

void opt_ema_close(opt_ema *ema)
{
    if (ema) td_disown(ema->td, ema);
}

/* ---- Updating */

/* What the averages keep of themselves in the update after n others: nothing in the first. */
static td_tensor keep_after(const opt_ema *ema, td_tensor n, td_here here)
{
    td_tensor decay = opt_constant(ema->td, ema->decay, here);
    if (ema->warm_up) {
        td_tensor above = td_add_at(n, opt_constant(ema->td, 1, here), here);
        td_tensor below = td_add_at(n, opt_constant(ema->td, 10, here), here);
        td_tensor rising = td_div_at(above, below, here);
        decay = td_minimum_at(decay, rising, here);
    }
    td_tensor begun = td_positive_at(n, here);
    return td_mul_at(decay, begun, here);
}

/* Whether averages of any of its parameters are being read, its own or those of another opt_ema. */
static bool is_read(const opt_ema *ema)
{
    int i = 0;
    while (i < ema->count && !td_has_stand_in(ema->parameters[i])) i++;
    return i < ema->count;
}

void opt_ema_update_at(opt_ema *ema, td_here here)
{
    if (!ema || td_error(ema->td) != TD_OK) return;
    if (is_read(ema)) {
        td_fail(ema->td, TD_ERROR_USAGE, "opt_ema_update: the averages are being read; opt_ema_end comes first (%s:%d)", here.file, here.line);
        return;
    }
    td_enter(ema->module);
    td_tensor n = td_use_at(ema->updates, here);
    td_tensor keep = keep_after(ema, n, here);
    td_blend_at(ema->averages, ema->count, keep, here);
    ema->latest = td_add_at(n, opt_constant(ema->td, 1, here), here);
    td_assign_at(ema->updates, ema->latest, here);
    td_leave(ema->module);
}

/* ---- Reading */

/* Whether the averages hold anything: an update has run, or is recorded in this step. */
static bool is_filled(const opt_ema *ema)
{
    double wide = 0;
    float narrow = 0;
    bool f64 = td_float(ema->td) == TD_F64;
    if (!td_state_read(ema->updates, 0, 1, f64 ? (void *)&wide : &narrow)) return false;
    return wide > 0 || narrow > 0 || td_is_pending(ema->latest); /* nothing is recorded: the first step is like those after it */
}

void opt_ema_begin_at(opt_ema *ema, td_here here)
{
    if (!ema || td_error(ema->td) != TD_OK) return;
    if (is_read(ema)) {
        td_fail(ema->td, TD_ERROR_USAGE, "opt_ema_begin: averages of these parameters are being read already; opt_ema_end comes first (%s:%d)",
                here.file, here.line);
        return;
    }
    bool filled = is_filled(ema);
    if (td_error(ema->td) != TD_OK) return;
    for (int i = 0; i < ema->count; i++) td_stand_in(ema->parameters[i], filled ? ema->averages[i] : ema->parameters[i]);
    ema->reading = true;
}

void opt_ema_end_at(opt_ema *ema, td_here here)
{
    if (!ema) return;
    if (!ema->reading) {
        td_fail(ema->td, TD_ERROR_USAGE, "opt_ema_end: no opt_ema_begin came before it (%s:%d)", here.file, here.line);
        return;
    }
    ema->reading = false;
    for (int i = 0; i < ema->count; i++) td_stand_in(ema->parameters[i], (td_state){ .td = ema->td, .id = TD_NONE });
}
