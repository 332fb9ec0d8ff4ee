/* The step: runs the plan of what was recorded (plans.c), reads what it gave, and begins the next recording.
 *
 * td_item on a pending value runs a plan of the recording so far that assigns nothing but derived state: nodes are pure, so the step later gives the same.
 */
#include "core/internal.h"
#include "core/onednn.h"

/* ---- Running */

static bool run_recording(td_context *td, td_purpose purpose)
{
    bool is_new;
    td_profile_mark(td, "record");
    td_planned *plan = td_plan_for(td, purpose, &is_new);
    if (!plan) return false;
    td_profile_mark(td, "plan");
    plan->used = (uint64_t)td->steps;
    if (td->has_parallel && td->parallel.agree &&
        !td->parallel.agree(td->parallel.self, td->runs, &td->recording, td_mix(plan->key, plan->agreement), is_new))
        return false;
    if (td->has_parallel) td_profile_mark(td, "agree");
    if (!td_landed_empty(td, (int)((td->runs + 1) % TD_INPUT_SETS))) return false;
    td->runs++;
    td->last = NULL;
    if (!plan->bound && !td_plan_settle_first(td, plan)) return false;
    if (!td_plan_run(td, plan)) return false;
    const td_transport *t = td->run.transport;
    if (t && t->ran) t->ran(t->self, &plan->sent);
    if (purpose == TD_FOR_STEP) td_landed_note(td, plan);
    td->last = plan;
    td->last_generation = td->recording.generation;
    if (!is_new) td_plan_report(td, plan, -1);
    return true;
}

static void begin_recording(td_context *td)
{
    td_program_reset(&td->recording, ++td->generation);
    td->slot_count = 0;
    td->phase = 0;
    td->scope = td->scopes = td->scope_depth = 0;
    td->backwards = 0;
    td->gradients_recorded = td->updates_recorded = false;
    td->draws_stamp++;
}

/* As the plan leaves them when it has run. */
static void leave(td_context *td, const td_planned *plan)
{
    for (uint32_t i = 0; i < plan->left_count; i++) {
        td_unit *u = &td->units[plan->left[i].unit];
        u->accumulator_full = plan->left[i].accumulator_full;
        u->current = plan->left[i].current;
    }
}

bool td_step(td_context *td)
{
    int64_t begin_ns = td_profile_now(), waited_ns = td->device_counts.waited_ns;
    if (td->error != TD_OK) return false;
    if (td->recording.node_count && !run_recording(td, TD_FOR_STEP)) return false;
    if (td->cuda) td->report.host_us = 1e-3 * (double)(td_profile_now() - begin_ns - (td->device_counts.waited_ns - waited_ns));
    if (td->recording.node_count) leave(td, td->last);
    if (td->updates_recorded) {
        td->run.update++;
        td->run.micro = 0;
    } else {
        td->run.micro += td->backwards;
    }
    td->steps++;
    if (td->profiling) td_profile_step_done(td);
    begin_recording(td);
    return true;
}

bool td_plan(td_context *td)
{
    bool is_new;
    if (td->error != TD_OK) return false; /* a context that has failed to open cannot be written to */
    td->planned = NULL;
    if (!td->recording.node_count) td_fail(td, TD_ERROR_USAGE, "td_plan: nothing is recorded");
    if (td->error != TD_OK) return false;
    td->planned = td_plan_for(td, TD_FOR_STEP, &is_new);
    if (!td->planned) return false;
    if (!is_new) td_plan_report(td, td->planned, -1);
    begin_recording(td);
    return true;
}

bool td_plan_step(td_context *td)
{
    if (!td_plan(td)) return false;
    leave(td, td->planned);
    return true;
}

void td_clear_error(td_context *td)
{
    if (!td->module_count) return; /* failed to open: nothing can be tried again */
    td->error = TD_OK;
    td->error_text[0] = 0;
    for (uint32_t s = 0; s < td->state_count; s++) td->states[s].stand_in = TD_NONE;
    td->program = &td->recording;
    td->module = 0;
    td->module_depth = 0;
    td->last = NULL;
    begin_recording(td);
}

/* ---- Reading values */

static const td_plan_output *find_output(const td_planned *plan, td_id recorded)
{
    for (uint32_t i = 0; i < plan->output_count; i++)
        if (plan->outputs[i].recorded == recorded) return &plan->outputs[i];
    return NULL;
}

const td_plan_output *td_kept_output(td_tensor t)
{
    return t.td && t.td->last && t.generation == t.td->last_generation ? find_output(t.td->last, t.id) : NULL;
}

/* Runs the recording up to here for the value of t, without assigning anything. */
static const td_plan_output *compute_pending(td_context *td, td_tensor t)
{
    td_program *r = &td->recording;
    td_program before = *r;
    td_keep(t);
    const td_plan_output *o = td->error == TD_OK && run_recording(td, TD_FOR_VALUE) ? find_output(td->last, t.id) : NULL;
    r->node_count = before.node_count, r->value_count = before.value_count;
    r->input_count = before.input_count, r->attr_count = before.attr_count;
    r->hash = before.hash;
    return o;
}

/* A plan of everything up to t is made for it, so a step of n operations takes time as n^2: this is for finding faults. */
void td_compute_now(td_tensor t) { compute_pending(t.td, t); }

static const td_plan_output *output_of(td_tensor t)
{
    td_context *td = t.td;
    if (!td || td->error != TD_OK) return NULL;
    if (td_failed(t)) {
        td_fail(td, TD_ERROR_USAGE, "td_item: the value failed in a step whose error was cleared");
        return NULL;
    }
    if (t.generation == td->recording.generation && t.id < td->recording.value_count) {
        const td_node *n = td_producer(&td->recording, t.id);
        if (n->op != &td_op_gradients) return compute_pending(td, t);
        td_fail(td, TD_ERROR_USAGE, "td_item: gradients have no value of their own; use td_gradient %s", td_location(td, n->module, n->file, n->line));
        return NULL;
    }
    const td_plan_output *o = td_kept_output(t);
    if (o) return o;
    if (t.generation == td->last_generation && td->last)
        td_fail(td, TD_ERROR_USAGE, "td_item: value %u of the last step was not kept; call td_keep on it before td_step", t.id);
    else
        td_fail(td, TD_ERROR_USAGE, "td_item: value %u is of an earlier step, whose results are gone; read it before the next step runs", t.id);
    return NULL;
}

bool td_is_sound(td_context *td)
{
    const td_transport *t = td->run.transport;
    return !t || !t->is_sound || t->is_sound(t->self);
}

bool td_read(td_tensor t, void *to)
{
    const td_plan_output *o = output_of(t);
    return o && t.td->device->read(t.td, to, td_plan_output_at(t.td, t.td->last, o), td_shape_elements(o->shape) * td_dtype_size(o->dtype)) &&
           td_is_sound(t.td);
}

typedef union item {
    double f64;
    float f32;
    int32_t i32;
    int64_t i64;
    uint8_t u8;
    uint16_t bits;
} item;

static double item_value(td_context *td, item value, td_dtype dtype)
{
    switch (dtype) {
    case TD_F64: return value.f64;
    case TD_F32: return (double)value.f32;
    case TD_I32: return value.i32;
    case TD_I64: return (double)value.i64;
    case TD_U8:  return value.u8;
    case TD_BF16: return (double)td_widened(value.bits);
    case TD_F16: {
        float wide;
        td_convert(TD_F32, &wide, TD_F16, &value.bits, 1);
        return (double)wide;
    }
    case TD_DTYPES: break;
    }
    td_fail(td, TD_ERROR_UNSUPPORTED, "td_item: cannot read %s", td_dtype_name(dtype));
    return (double)__builtin_nanf("");
}

double td_item(td_tensor t)
{
    char text[TD_SHAPE_TEXT];
    td_dtype dtype;
    item value = { 0 };
    if (td_landed_read(t, &value, &dtype)) return item_value(t.td, value, dtype);
    const td_plan_output *o = output_of(t);
    if (!o) return (double)__builtin_nanf("");
    if (td_shape_elements(o->shape) != 1) {
        td_fail(t.td, TD_ERROR_USAGE, "td_item: the value has shape %s, not one element; use td_read", td_shape_text(o->shape, text));
        return (double)__builtin_nanf("");
    }
    bool read = t.td->device->read(t.td, &value, td_plan_output_at(t.td, t.td->last, o), td_dtype_size(o->dtype)) && td_is_sound(t.td);
    return read ? item_value(t.td, value, o->dtype) : (double)__builtin_nanf("");
}

void td_step_close(td_context *td)
{
    td_plans_close(td);
    td_free(td, td->aside, td->aside_room * sizeof *td->aside, "host");
    td_arenas_drop(td);
    td_onednn_close(td->onednn);
}
