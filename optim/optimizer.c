/* An optimizer: a rule, the parameters it updates in groups, and what one update records.
 *
 *     gradients = td_gradients(all)      norm, scale      td_update(group) for each      updates = updates + 1
 *
 * With a scaler of losses (scaler.c) all of it depends on the norm being finite.
 *
 * It is one block of memory, which the context owns. Its state (moments, the counter of updates) is the context's too.
 */
#include "optim/optimizer.h"

#include <math.h>
#include <string.h>

typedef struct made_group {
    int first, count;            /* range of opt->grouped */
    double rate_scale;
    double hyper[TD_HYPERS];
} made_group;

struct opt_optimizer {
    td_context *td;
    td_module module;            /* where it records */
    const td_update_rule *rule;
    td_state updates;            /* scalar, td_float: updates done */
    double max_norm;
    bool clip_inf;               /* by the inf-norm, not the 2-norm */
    bool has_norm;
    opt_scaler *scaler;          /* NULL: none */
    td_tensor norm;              /* of the latest update */
    td_state *states;            /* what it trains, in order of creation */
    td_state *grouped;           /* the same, group after group */
    int count, group_count;
    made_group groups[];
};

bool opt_check(td_context *td, const char *call, const char *option, double value, double low, double high)
{
    if (value >= low && value < high) return true;
    if (high == INFINITY)
        td_fail(td, TD_ERROR_USAGE, "%s: %s is %g, must be a finite number from %g", call, option, value, low);
    else
        td_fail(td, TD_ERROR_USAGE, "%s: %s is %g, must be from %g to less than %g", call, option, value, low, high);
    return false;
}

/* ---- Making --------------------------------------------------------------------------------------------- */

int opt_collect(td_module under, td_state *states)
{
    td_context *td = under.td;
    const char *path = td_module_name(under);
    size_t length = strlen(path);
    int count = 0;
    for (int64_t i = 0; i < td_state_count(td); i++) {
        td_state s = td_state_at(td, i);
        const char *name = td_state_name(s);
        bool is_under = length == 0 || (strncmp(name, path, length) == 0 && name[length] == '.');
        if (!is_under || !td_state_trains(s)) continue;
        if (states) states[count] = s;
        count++;
    }
    return count;
}

static bool fits(const opt_group *g, td_state s)
{
    if (td_state_shape(s).rank < g->min_rank) return false;
    return !g->pattern || td_name_matches(g->pattern, td_state_name(s));
}

/* The group of s; m->group_count for none. */
static int group_of(const opt_making *m, td_state s)
{
    int g = 0;
    while (g < m->group_count && !fits(&m->groups[g], s)) g++;
    return g;
}

static bool check_groups(td_context *td, const opt_making *m)
{
    for (int i = 0; i < m->group_count; i++) {
        const opt_group *g = &m->groups[i];
        if (!opt_check(td, m->call, "a group's decay", g->decay, 0, INFINITY)) return false;
        if (!opt_check(td, m->call, "a group's rate_scale", g->rate_scale, 0, INFINITY)) return false;
    }
    return true;
}

/* Fills the groups that were asked for, then the one of all others, which may be empty. */
static bool fill_groups(opt_optimizer *opt, const opt_making *m)
{
    int next = 0;
    for (int g = 0; g <= m->group_count; g++) {
        made_group *made = &opt->groups[opt->group_count];
        *made = (made_group){ .first = next, .rate_scale = 1 };
        memcpy(made->hyper, m->hyper, sizeof made->hyper);
        if (g < m->group_count) made->hyper[m->decay] = m->groups[g].decay;
        if (g < m->group_count && m->groups[g].rate_scale > 0) made->rate_scale = m->groups[g].rate_scale;
        for (int i = 0; i < opt->count; i++) {
            if (group_of(m, opt->states[i]) == g) opt->grouped[next++] = opt->states[i];
        }
        made->count = next - made->first;
        if (made->count > 0) opt->group_count++;
        if (made->count > 0 || g == m->group_count) continue;
        const opt_group *asked = &m->groups[g];
        td_fail(opt->td, TD_ERROR_USAGE, "%s: group %d (pattern '%s', min_rank %d) fits no parameter", m->call, g,
                asked->pattern ? asked->pattern : "*", asked->min_rank);
        return false;
    }
    return true;
}

/* A decay moves rows that have no gradient. */
static bool check_sparse(const opt_optimizer *opt, const opt_making *m)
{
    for (int g = 0; g < opt->group_count; g++) {
        const made_group *group = &opt->groups[g];
        for (int i = group->first; i < group->first + group->count; i++) {
            if (group->hyper[m->decay] == 0 || !td_state_sparse(opt->grouped[i])) continue;
            td_fail(opt->td, TD_ERROR_UNSUPPORTED, "%s: '%s' has row-sparse gradients, which allow no decay (here %g); put it in a "
                    "group with decay 0, or let the table be dense", m->call, td_state_name(opt->grouped[i]), group->hyper[m->decay]);
            return false;
        }
    }
    return true;
}

opt_optimizer *opt_make(td_module under, const opt_making *m)
{
    td_context *td = under.td;
    if (td_error(td) != TD_OK || !check_groups(td, m)) return NULL;
    if (!opt_check(td, m->call, "max_norm", m->max_norm, 0, INFINITY)) return NULL;
    int count = opt_collect(under, NULL);
    if (count == 0) {
        td_fail(td, TD_ERROR_USAGE, "%s: no parameter under '%s' trains", m->call, td_module_name(under));
        return NULL;
    }
    size_t groups_bytes = sizeof(made_group) * (size_t)(m->group_count + 1);
    size_t bytes = sizeof(opt_optimizer) + groups_bytes + 2 * sizeof(td_state) * (size_t)count;
    opt_optimizer *opt = td_own(td, bytes);
    if (!opt) return NULL;
    *opt = (opt_optimizer){
        .td = td, .rule = m->rule, .count = count,
        .max_norm = m->max_norm, .clip_inf = m->clip_inf, .has_norm = m->max_norm > 0 || m->track_norm || m->scaler, .scaler = m->scaler,
        .norm = { .td = td, .id = TD_NONE },
        .states = (td_state *)((char *)opt->groups + groups_bytes),
    };
    opt->grouped = opt->states + count;
    opt_collect(under, opt->states);
    td_update_allows(m->rule, opt->states, count);
    opt->module = td_child(td_root(td), m->name ? m->name : "optimizer");
    td_init zero = td_init_constant(0);
    for (int i = 0; i < count; i++)
        for (int k = 0; k < m->rule->moments; k++) td_update_moment(m->rule, opt->states[i], k);
    if (fill_groups(opt, m) && check_sparse(opt, m)) opt->updates = td_buffer(opt->module, "updates", td_float(td), (td_shape){ 0 }, zero);
    if (td_error(td) == TD_OK) {
        td_update_together(opt->states, count); /* last: without an optimizer they may still be frozen */
        return opt;
    }
    opt_close(opt);
    return NULL;
}

void opt_close(opt_optimizer *opt)
{
    if (opt) td_disown(opt->td, opt);
}

/* ---- Stepping ------------------------------------------------------------------------------------------- */

td_tensor opt_constant(td_context *td, double value, td_here here)
{
    return td_fill_at(td, td_float(td), (td_shape){ 0 }, value, here);
}

/* What gradients are multiplied by: 1, or less when their norm is over the limit. */
static td_tensor clipping(const opt_optimizer *opt, td_here here)
{
    td_tensor one = opt_constant(opt->td, 1, here);
    if (opt->max_norm == 0) return one;
    td_tensor norm = td_add_at(opt->norm, opt_constant(opt->td, 1e-6, here), here);
    return td_minimum_at(one, td_div_at(opt_constant(opt->td, opt->max_norm, here), norm, here), here);
}

/* divisor: of the gradients; id TD_NONE: they are as they are. */
static void record_update(opt_optimizer *opt, double rate, td_tensor divisor, td_here here)
{
    td_context *td = opt->td;
    td_tensor inverse = td_failed(divisor) ? divisor : td_reciprocal_at(divisor, here);
    td_tensor gradients = td_gradients_at(td, opt->states, opt->count, here);
    if (opt->has_norm) opt->norm = opt->clip_inf ? td_gradient_max_at(gradients, here) : td_gradient_norm_at(gradients, here);
    opt_unscaling u = { .when = TD_NO_TENSOR };
    if (opt->scaler) u = opt_scaler_update(opt->scaler, opt->norm, here);
    if (opt->scaler) inverse = td_failed(divisor) ? u.inverse : td_mul_at(inverse, u.inverse, here);
    bool divides = !td_failed(inverse);
    if (opt->has_norm && divides) opt->norm = td_mul_at(opt->norm, inverse, here);
    if (opt->has_norm) td_keep(opt->norm);
    td_tensor scale = clipping(opt, here);
    if (divides) scale = td_mul_at(scale, inverse, here);
    td_tensor one = opt_constant(opt->td, 1, here); /* a call a line: the order of arguments is the compiler's, programs are not */
    td_tensor updates = td_add_at(td_use_at(opt->updates, here), one, here);
    for (int g = 0; g < opt->group_count; g++) {
        const made_group *group = &opt->groups[g];
        td_update_call call = {
            .rule = opt->rule, .gradients = gradients, .states = opt->grouped + group->first, .count = group->count,
            .rate = td_scalar_at(td, rate * group->rate_scale, here), .scale = scale, .updates = updates, .when = u.when,
        };
        memcpy(call.hyper, group->hyper, sizeof call.hyper);
        td_update_at(&call, here);
    }
    if (opt->scaler) td_assign_if_at(opt->updates, updates, u.when, here);
    else td_assign_at(opt->updates, updates, here);
}

static void step(opt_optimizer *opt, double rate, td_tensor divisor, td_here here)
{
    if (!isfinite(rate) || rate < 0) {
        td_fail(opt->td, TD_ERROR_USAGE, "opt_step: the rate is %g, must be a finite number from 0 (%s:%d)", rate,
                here.file, here.line);
        return;
    }
    td_enter(opt->module);
    record_update(opt, rate, divisor, here);
    td_leave(opt->module);
}

void opt_step_at(opt_optimizer *opt, double rate, td_here here)
{
    if (opt && td_error(opt->td) == TD_OK) step(opt, rate, TD_NO_TENSOR, here);
}

void opt_step_over_at(opt_optimizer *opt, double rate, td_tensor weight, td_here here)
{
    if (!opt || td_error(opt->td) != TD_OK) return;
    if (!td_failed(weight) && td_shape_at(weight).rank == 0 && td_dtype_at(weight) == td_float(opt->td)) {
        step(opt, rate, weight, here);
        return;
    }
    td_fail(opt->td, TD_ERROR_USAGE, "opt_step_over: the weight must be a scalar of %s (%s:%d)", td_dtype_name(td_float(opt->td)), here.file,
            here.line);
}

bool opt_has_norm(const opt_optimizer *opt) { return opt->has_norm; }
opt_scaler *opt_scaler_of(const opt_optimizer *opt) { return opt->scaler; }

td_tensor opt_gradient_norm(const opt_optimizer *opt)
{
    if (opt->norm.id != TD_NONE) return opt->norm;
    td_fail(opt->td, TD_ERROR_USAGE, "opt_gradient_norm: %s",
            opt->has_norm ? "no opt_step was recorded yet" : "the optimizer has neither max_norm, track_norm nor scaler");
    return opt->norm;
}
