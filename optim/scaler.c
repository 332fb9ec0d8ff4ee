/* Dynamic loss scaling (rules in optim.h, after PyTorch's torch.amp.GradScaler). All of it is recorded: the host reads nothing,
 * and a step that is skipped has the plan of any other.
 *
 * Within a step every reader sees the scale as it was before the step. Each update of the step assigns the scale anew from that
 * and from all updates so far, so that what the last one leaves is what they come to together.
 */
#include "optim/optimizer.h"

#include <float.h>
#include <math.h>

struct opt_scaler {
    td_context *td;
    td_module module;            /* where it records */
    td_state scale, good;        /* scalars, td_float: the scale; updates since it last changed or one was skipped */
    double growth, backoff, interval;
    td_tensor scale_before, good_before; /* of the step being recorded */
    td_tensor finite;            /* 1 where the gradients of all its updates so far are; id TD_NONE: none yet */
};

/* Whole numbers up to it are exact in f32. */
static const double most_interval = 0x1p24;

opt_scaler *opt_scaler_open(td_context *td, const opt_scaler_options *options)
{
    static const char call[] = "opt_scaler_open";
    opt_scaler_options o = options ? *options : (opt_scaler_options){ 0 };
    if (o.initial == 0) o.initial = 65536;
    if (o.growth == 0) o.growth = 2;
    if (o.backoff == 0) o.backoff = 0.5;
    if (o.interval == 0) o.interval = 2000;
    if (td_error(td) != TD_OK) return NULL;
    if (!opt_check(td, call, "initial", o.initial, 1, 0x1p127)) return NULL;
    if (!opt_check(td, call, "growth", o.growth, 1, INFINITY)) return NULL;
    if (!opt_check(td, call, "backoff", o.backoff, 0, 1)) return NULL;
    if (!opt_check(td, call, "interval", (double)o.interval, 1, most_interval)) return NULL;
    opt_scaler *s = td_own(td, sizeof *s);
    if (!s) return NULL;
    td_tensor none = { .td = td, .id = TD_NONE };
    *s = (opt_scaler){ .td = td, .growth = o.growth, .backoff = o.backoff, .interval = (double)o.interval,
                       .scale_before = none, .good_before = none, .finite = none };
    s->module = td_child(td_root(td), o.name ? o.name : "scaler");
    s->scale = td_buffer(s->module, "scale", td_float(td), (td_shape){ 0 }, td_init_constant(o.initial));
    s->good = td_buffer(s->module, "good_steps", td_float(td), (td_shape){ 0 }, td_init_constant(0));
    if (td_error(td) == TD_OK) return s;
    opt_scaler_close(s);
    return NULL;
}

void opt_scaler_close(opt_scaler *scaler)
{
    if (scaler) td_disown(scaler->td, scaler);
}

/* The scale of the step being recorded; a step that is new begins here. */
static td_tensor scale_of_step(opt_scaler *s, td_here here)
{
    if (td_is_pending(s->scale_before)) return s->scale_before;
    s->scale_before = td_use_at(s->scale, here);
    s->good_before = td_use_at(s->good, here);
    s->finite = (td_tensor){ .td = s->td, .id = TD_NONE };
    return s->scale_before;
}

td_tensor opt_scaler_scale_at(opt_scaler *scaler, td_tensor loss, td_here here)
{
    if (!scaler || td_error(scaler->td) != TD_OK) return loss;
    td_enter(scaler->module);
    td_tensor scale = scale_of_step(scaler, here);
    td_tensor scaled = td_mul_at(loss, scale, here);
    td_leave(scaler->module);
    return scaled;
}

/* 1 where x is a finite number, else 0. x is not negative. */
static td_tensor is_finite(const opt_scaler *s, td_tensor x, td_here here)
{
    double most = td_float(s->td) == TD_F64 ? DBL_MAX : (double)FLT_MAX;
    return td_less_equal_at(x, opt_constant(s->td, most, here), here); /* NaN is not */
}

/* The scale after the updates so far: s->finite says whether all gradients were finite. */
static void assign_scale(opt_scaler *s, td_here here)
{
    td_tensor zero = opt_constant(s->td, 0, here);
    td_tensor one = opt_constant(s->td, 1, here);
    td_tensor good = td_add_at(s->good_before, one, here);
    td_tensor due = td_less_equal_at(opt_constant(s->td, s->interval, here), good, here);
    td_tensor grown = td_mul_at(s->scale_before, opt_constant(s->td, s->growth, here), here);
    td_tensor fits = is_finite(s, grown, here);
    td_tensor grows = td_mul_at(due, fits, here);
    td_tensor after_good = td_where_at(grows, grown, s->scale_before, here);
    td_tensor shrunk = td_mul_at(s->scale_before, opt_constant(s->td, s->backoff, here), here);
    td_tensor after_bad = td_maximum_at(shrunk, one, here);
    td_tensor scale = td_where_at(s->finite, after_good, after_bad, here);
    td_tensor counted = td_where_at(due, zero, good, here);
    td_tensor count = td_where_at(s->finite, counted, zero, here);
    td_assign_at(s->scale, scale, here);
    td_assign_at(s->good, count, here);
}

opt_unscaling opt_scaler_update(opt_scaler *s, td_tensor norm, td_here here)
{
    td_enter(s->module);
    td_tensor scale = scale_of_step(s, here);
    opt_unscaling u;
    u.inverse = td_reciprocal_at(scale, here);
    u.when = is_finite(s, norm, here);
    s->finite = td_failed(s->finite) ? u.when : td_mul_at(s->finite, u.when, here);
    assign_scale(s, here);
    td_leave(s->module);
    return u;
}
