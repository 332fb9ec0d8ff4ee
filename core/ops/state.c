/* Operations about state, inputs and outputs: what enters a step and what it leaves.
 *
 * Recorded: input, scalar, parameter, assign, output, backward, gradient. differentiate turns parameter and assign into
 * views of flat units and stores to them:
 *
 *     unit       the stored value of a unit                       -> (elements), or (rows, elements / rows) if it is cut
 *     part       a member of it: a view at an element offset      -> the member's shape
 *     pack       members put side by side, zeros between          -> as a unit
 *     store      the unit's new value
 *     mark       a point where the strategy has a say; `place` dissolves it
 */
#include "core/ops/op.h"

#include <stdio.h>
#include <string.h>

TD_CUDA_KERNEL(td_pack_cuda);

/* ---- Shape rules */

static bool one_like(td_call *call, td_shape shape, td_dtype dtype)
{
    call->out[0].shape = shape;
    call->out[0].dtype = (uint8_t)dtype;
    return true;
}

static bool same_as_input(td_call *call) { return one_like(call, call->in[0]->shape, (td_dtype)call->in[0]->dtype); }

static bool no_output(td_call *call)
{
    call->outputs = 0;
    return true;
}

/* ---- Inputs and scalars */

static bool input_shape(td_call *call)
{
    const td_input_attr *a = call->attr;
    return one_like(call, a->shape, (td_dtype)a->dtype);
}

static void input_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_input_attr *a = td_node_attr(p, n);
    snprintf(to, room, a->rows_local == 2 ? "each rank's %u" : a->rows_local ? "batch %u" : "%u", a->slot);
}

const td_op td_op_input = { .name = "input", .flags = TD_OP_SOURCE, .attr_bytes = sizeof(td_input_attr), .shape = input_shape, .print = input_print };
const td_op td_op_scalar = { .name = "scalar", .flags = TD_OP_SOURCE, .attr_bytes = sizeof(td_input_attr), .shape = input_shape, .print = input_print };

static td_tensor record_slot(td_context *td, const td_op *op, td_input_attr attr, td_slot slot, td_here here)
{
    if (td->error != TD_OK || !td_grow(td, (void **)&td->slots, &td->slot_room, td->slot_count + 1, sizeof *td->slots, "host"))
        return td_no_tensor(td);
    attr.slot = td->slot_count;
    td->slots[td->slot_count++] = slot;
    return td_record_sized(td, op, here, 0, NULL, &attr, sizeof attr);
}

static td_tensor record_input(td_context *td, const char *name, td_dtype dtype, td_shape shape, const void *data, uint32_t rows, td_here here)
{
    char text[TD_SHAPE_TEXT];
    if (td->error != TD_OK) return td_no_tensor(td);
    if (!td_shape_possible(shape, dtype) || (rows && shape.rank < 1)) {
        td_fail(td, TD_ERROR_USAGE, "input '%s': shape %s or its dtype cannot be %s", name, td_shape_text(shape, text),
                td_location(td, td->module, here.file, here.line));
        return td_no_tensor(td);
    }
    if (!data && td_shape_elements(shape)) {
        td_fail(td, TD_ERROR_USAGE, "input '%s': no data given %s", name, td_location(td, td->module, here.file, here.line));
        return td_no_tensor(td);
    }
    static const char none[1];
    return record_slot(td, &td_op_input, (td_input_attr){ .rows_local = rows, .dtype = dtype, .shape = shape },
                       (td_slot){ .data = data ? data : none }, here);
}

td_tensor td_input_at(td_context *td, const char *name, td_dtype dtype, td_shape shape, const void *data, td_here here)
{
    return record_input(td, name, dtype, shape, data, 0, here);
}

td_tensor td_batch_at(td_context *td, const char *name, td_dtype dtype, td_shape shape, const void *data, td_here here)
{
    return record_input(td, name, dtype, shape, data, 1, here);
}

td_tensor td_each_rank_at(td_context *td, const char *name, td_dtype dtype, td_shape shape, const void *data, td_here here)
{
    return record_input(td, name, dtype, shape, data, 2, here);
}

td_tensor td_scalar_at(td_context *td, double value, td_here here)
{
    return record_slot(td, &td_op_scalar, (td_input_attr){ .dtype = td_float(td) }, (td_slot){ .f64 = value, .f32 = (float)value }, here);
}

double td_read_scalar(const td_arg *arg)
{
    return arg->dtype == TD_F64 ? *(const double *)arg->data : *(const float *)arg->data;
}

/* ---- Parameters and assigns, as recorded */

static bool parameter_shape(td_call *call)
{
    const td_state_entry *s = &call->td->states[((const td_parameter_attr *)call->attr)->state];
    return one_like(call, s->shape, s->dtype);
}

static void state_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    snprintf(to, room, "%s", p->td->states[((const td_parameter_attr *)td_node_attr(p, n))->state].name);
}

const td_op td_op_parameter = { .name = "parameter", .flags = TD_OP_SOURCE | TD_OP_VIRTUAL, .attr_bytes = sizeof(td_parameter_attr),
                                .shape = parameter_shape, .print = state_print };

td_tensor td_use_at(td_state s, td_here here)
{
    td_context *td = s.td;
    if (s.id == TD_NONE || td->error != TD_OK) return td_no_tensor(td);
    td_state_entry *e = &td->states[s.id];
    if (e->stand_in != TD_NONE && e->stand_in != s.id) return td_use_at((td_state){ td, e->stand_in }, here);
    if (e->use_generation == td->recording.generation) return td_handle(&td->recording, e->use);
    uint64_t start = td_hash_bytes(e->hash, &e->init.b, sizeof e->init.b); /* ranks that start differently differ */
    start = td_mix(td_hash_bytes(start, &e->init.a, sizeof e->init.a), (uint64_t)e->init.kind | (uint64_t)e->sparse << 8);
    td_parameter_attr attr = { .state = s.id, .name_hash = start };
    td_tensor t = td_record_sized(td, &td_op_parameter, here, 0, NULL, &attr, sizeof attr);
    if (td_failed(t)) return t;
    e->use = t.id;
    if (e->kind != TD_MOMENT) e->use_generation = t.generation; /* an update changes moments it does not name here */
    return t;
}

static bool assign_shape(td_call *call)
{
    char have[TD_SHAPE_TEXT], want[TD_SHAPE_TEXT];
    const td_state_entry *s = &call->td->states[((const td_assign_attr *)call->attr)->state];
    const td_value *v = call->in[0];
    if (!td_shape_equal(v->shape, s->shape) || v->dtype != (uint8_t)s->dtype)
        return td_call_fail(call, "'%s' is %s %s, the value is %s %s", s->name, td_dtype_name(s->dtype), td_shape_text(s->shape, want),
                            td_dtype_name((td_dtype)v->dtype), td_shape_text(v->shape, have));
    const td_value *when = call->inputs == 2 ? call->in[1] : NULL;
    if (when && (td_shape_elements(when->shape) != 1 || when->dtype != v->dtype))
        return td_call_fail(call, "the condition for '%s' is %s %s, must be a scalar of the value's dtype", s->name,
                            td_dtype_name((td_dtype)when->dtype), td_shape_text(when->shape, have));
    return no_output(call);
}

const td_op td_op_assign = { .name = "assign", .inputs = -1, .flags = TD_OP_EFFECT | TD_OP_VIRTUAL, .attr_bytes = sizeof(td_assign_attr),
                             .shape = assign_shape, .print = state_print };

bool td_may_change(td_state s, const char *what, td_here here)
{
    if (!td_has_stand_in(s)) return true;
    td_fail(s.td, TD_ERROR_USAGE, "%s: '%s' cannot change while another state is read in its place; end that first, as opt_ema_end does %s", what,
            td_state_name(s), td_location(s.td, s.td->module, here.file, here.line));
    return false;
}

static void record_assign(td_state s, int n, const td_tensor *in, td_here here)
{
    if (s.id == TD_NONE || s.td->error != TD_OK) return;
    td_state_entry *e = &s.td->states[s.id];
    if (!td_may_change(s, "assign", here)) return;
    td_assign_attr attr = { .state = s.id, .conditional = n == 2, .name_hash = e->hash };
    td_record_sized(s.td, &td_op_assign, here, n, in, &attr, sizeof attr);
    e->use_generation = 0;
}

void td_assign_at(td_state s, td_tensor value, td_here here) { record_assign(s, 1, &value, here); }

void td_assign_if_at(td_state s, td_tensor value, td_tensor when, td_here here)
{
    record_assign(s, 2, (td_tensor[]){ value, when }, here);
}

/* ---- Outputs and gradients, as recorded */

static void linear_rule(const td_program *p, const td_node *n, td_place_rule *rule)
{
    (void)p, (void)n;
    for (int8_t d = 0; d < TD_MAX_DIMS; d++)
        for (int i = 0; i < TD_RULE_INPUTS; i++) rule->in[i][d] = rule->out[i < TD_RULE_OUTPUTS ? i : 0][d] = (int8_t)(d + 1);
    rule->partial = TD_PARTIAL_JOINT;
}

const td_op td_op_output = { .name = "output", .inputs = 1, .flags = TD_OP_EFFECT, .attr_bytes = sizeof(td_output_attr), .shape = no_output };

void td_keep(td_tensor t)
{
    if (!t.td) return;
    td_output_attr attr = { .recorded = t.id };
    td_record(&td_op_output, (td_here){ __FILE__, __LINE__ }, 1, &t, &attr);
}

static bool backward_shape(td_call *call)
{
    char text[TD_SHAPE_TEXT];
    const td_value *loss = call->in[0];
    if (td_shape_elements(loss->shape) != 1 || !td_is_float((td_dtype)loss->dtype))
        return td_call_fail(call, "the loss is %s %s, must be one floating-point number; take td_mean or td_sum first",
                            td_dtype_name((td_dtype)loss->dtype), td_shape_text(loss->shape, text));
    return no_output(call);
}

const td_op td_op_backward = { .name = "backward", .inputs = 1, .flags = TD_OP_EFFECT | TD_OP_VIRTUAL, .shape = backward_shape };

void td_backward_at(td_tensor loss, td_here here)
{
    td_context *td = loss.td;
    if (!td) return;
    td_record_sized(td, &td_op_backward, here, 1, &loss, NULL, 0);
    td_keep(loss);
    if (td->error != TD_OK) return;
    td->backwards++;
    td->phase += 2;
    td->draws_stamp++;
}

static bool gradient_shape(td_call *call)
{
    for (int i = 0; i < 2; i++)
        if (!td_is_float((td_dtype)call->in[i]->dtype)) return td_call_fail(call, "%s is not a floating-point value", i ? "x" : "y");
    return one_like(call, call->in[1]->shape, (td_dtype)call->in[1]->dtype);
}

const td_op td_op_gradient = { .name = "gradient", .inputs = 2, .flags = TD_OP_VIRTUAL, .shape = gradient_shape };

td_tensor td_gradient_at(td_tensor y, td_tensor x, td_here here)
{
    if (!y.td) return y;
    return td_record_sized(y.td, &td_op_gradient, here, 2, (td_tensor[]){ y, x }, NULL, 0);
}

/* ---- Units, as differentiate makes them */

static void unit_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_context *td = p->td;
    uint32_t number = ((const td_unit_attr *)td_node_attr(p, n))->unit;
    const td_unit *u = &td->units[number];
    const td_unit *named = u->member_count || u->of == TD_NONE ? u : &td->units[u->of];
    const char *first = named->member_count ? td->states[named->members[0].state].name : "";
    const char *extra = u->derived ? " copied" : named == u ? "" : " accumulated";
    if (!named->member_count)
        snprintf(to, room, "%u: members copied", number);
    else if (named->member_count > 1)
        snprintf(to, room, "%u: %s .. %s%s", number, first, td->states[named->members[named->member_count - 1].state].name, extra);
    else
        snprintf(to, room, "%u: %s%s", number, first, extra);
}

const td_op td_op_unit = { .name = "unit", .flags = TD_OP_SOURCE, .attr_bytes = sizeof(td_unit_attr), .print = unit_print };
const td_op td_op_store = { .name = "store", .inputs = 1, .flags = TD_OP_EFFECT, .attr_bytes = sizeof(td_unit_attr), .print = unit_print };

static void part_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    snprintf(to, room, "at %lld", (long long)((const td_part_attr *)td_node_attr(p, n))->offset);
}

/* A flat value cannot be cut along ranks and also along members: blocked. Rows of it are blocks of its members. */
static void part_rule(const td_program *p, const td_node *n, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    rule->partial = TD_PARTIAL_JOINT;
    if (p->values[*td_node_inputs(p, n)].shape.rank == 2)
        rule->in[0][0] = rule->out[0][((const td_part_attr *)td_node_attr(p, n))->dim] = 1;
}

static void pack_rule(const td_program *p, const td_node *n, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    rule->partial = TD_PARTIAL_JOINT;
    if (p->values[n->output].shape.rank != 2) return;
    for (int i = 0; i < TD_RULE_INPUTS; i++) rule->in[i][((const td_pack_attr *)td_node_attr(p, n))->dim] = 1;
    rule->out[0][0] = 1;
}

const td_op td_op_part = { .name = "part", .inputs = 1, .flags = TD_OP_VIEW, .attr_bytes = sizeof(td_part_attr), .place = part_rule,
                           .print = part_print };

static void pack_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_pack_attr *a = td_node_attr(p, n);
    if (a->unread) snprintf(to, room, "unit %u but its last %lld", a->unit, (long long)a->unread);
    else snprintf(to, room, "unit %u", a->unit);
}

/* The planner puts members straight into the packed value where it can; then only the gaps are left to do. */
static void pack_cpu(const td_kernel *k)
{
    const td_pack_attr *a = k->attr;
    const int64_t *offset = (const int64_t *)(a + 1);
    int64_t item = td_dtype_size(k->out[0].dtype), end = 0;
    char *out = k->out[0].data;
    for (int i = 0; i < k->inputs; i++) {
        int64_t bytes = td_shape_elements(k->in[i].shape) * item, at = offset[i] * item;
        memset(out + end, 0, (size_t)(at - end));
        if (k->in[i].data != out + at) memcpy(out + at, k->in[i].data, (size_t)bytes);
        end = at + bytes;
    }
    memset(out + end, 0, (size_t)((td_shape_elements(k->out[0].shape) - a->unread) * item - end));
}

const td_op td_op_pack = { .name = "pack", .inputs = -1, .place = pack_rule, .print = pack_print, .cpu = pack_cpu,
                           .cuda = TD_CUDA(td_pack_cuda) };

static void mark_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    static const char *const kinds[] = { "gradient", "optimizer", "accumulator" };
    const td_mark_attr *a = td_node_attr(p, n);
    snprintf(to, room, "%s of unit %u", kinds[a->kind], a->unit);
}

const td_op td_op_mark = { .name = "mark", .inputs = 1, .flags = TD_OP_VIEW, .attr_bytes = sizeof(td_mark_attr), .shape = same_as_input,
                           .place = linear_rule, .print = mark_print };
