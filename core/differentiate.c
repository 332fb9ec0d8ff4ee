/* differentiate: expands what was recorded about gradients, updates and state into plain nodes on units.
 *
 *     parameter s          part of unit's value            the value after the assigns recorded before
 *     backward loss        the reverse of every node loss depends on (reverse.h); then for each unit
 *                              pack (gradients) -> mark gradient -> add to the unit's pending gradient
 *     gradient y x         the reverse from y to x
 *     gradients            mark optimizer of each unit's pending gradient, which is consumed
 *     assign s v           the unit packed again with v in s's place
 *     gradient_norm, update, blend     differentiate_update.c
 *     at the end           store of every changed unit; pending gradients nobody consumed go to the accumulators
 *
 * Gradients of tied uses add up before the mark, so a strategy sees one gradient a parameter and backward.
 *
 * A table with row-sparse gradients has no flat one: the reverse sweep ends in the embedding_gradient of each of its uses, whose ids
 * and rows are kept until `gradients` merges them (merge_rows); of the dense value nothing is left, since nobody reads it.
 */
#include "core/differentiate.h"

#include <string.h>

td_id td_expand_emit(td_expansion *d, const td_op *op, const td_id *in, int n, const void *attr, size_t bytes, td_shape shape,
                     td_dtype dtype)
{
    td_value value = { .shape = shape, .dtype = (uint8_t)dtype };
    td_node like = d->at;
    like.module = d->td->module;
    like.phase = d->td->phase;
    return td_emit(d->out, &(td_emission){ .op = op, .like = &like, .inputs = in, .input_count = n, .attr = attr, .attr_bytes = bytes,
                                           .outputs = &value, .output_count = 1, .after = TD_NONE });
}

static td_id unit_value(td_expansion *d, uint32_t unit)
{
    const td_unit *u = &d->td->units[unit];
    td_unit_attr attr = { .unit = unit };
    td_id id = td_expand_emit(d, &td_op_unit, NULL, 0, &attr, sizeof attr, td_unit_shape(u), u->dtype);
    if (id != TD_NONE) d->out->values[id].place = u->place;
    return id;
}

td_id td_expand_current(td_expansion *d, uint32_t unit)
{
    if (d->current[unit] == TD_NONE) d->current[unit] = unit_value(d, unit);
    return d->current[unit];
}

void td_expand_forget(td_expansion *d, uint32_t unit)
{
    const td_unit *u = &d->td->units[unit];
    for (int32_t m = 0; m < u->member_count; m++) d->part[u->members[m].state] = TD_NONE;
}

static td_id sum_of(td_expansion *d, td_id a, td_id b)
{
    return td_gradient_sum(d->out, a, b, (td_here){ d->at.file, d->at.line });
}

uint32_t td_expand_next_unit(const td_expansion *d, const uint32_t *states, uint32_t count, uint32_t *from)
{
    for (; *from < count; (*from)++) {
        uint32_t unit = d->td->states[states[*from]].unit;
        bool seen = false;
        for (uint32_t i = *from; i-- > 0 && !seen;) seen = d->td->states[states[i]].unit == unit;
        if (!seen) return (*from)++, unit;
    }
    return TD_NONE;
}

static td_id state_part(td_expansion *d, uint32_t state)
{
    if (d->part[state] != TD_NONE) return d->part[state];
    td_state_entry s = d->td->states[state];
    td_id flat = td_expand_current(d, s.unit);
    td_part_attr attr = { .offset = s.offset, .dim = d->td->units[s.unit].cut.dim };
    return d->part[state] = td_expand_emit(d, &td_op_part, &flat, 1, &attr, sizeof attr, s.shape, s.dtype);
}

static td_id mark(td_expansion *d, td_mark_kind kind, uint32_t unit, td_id value)
{
    if (!d->td->has_parallel) return value;
    td_mark_attr attr = { .kind = kind, .unit = unit };
    const td_unit *u = &d->td->units[unit];
    return td_expand_emit(d, &td_op_mark, &value, 1, &attr, sizeof attr, td_unit_shape(u), u->dtype);
}

/* Values at their members' offsets; ids[m] is TD_NONE where member m has none. */
static td_id pack(td_expansion *d, uint32_t unit, const td_id *ids)
{
    td_unit u = d->td->units[unit];
    size_t bytes = sizeof(td_pack_attr) + (size_t)u.member_count * sizeof(int64_t), id_bytes = (size_t)u.member_count * sizeof(td_id);
    td_pack_attr *attr = td_alloc(d->td, bytes + id_bytes, "program");
    if (!attr) return TD_NONE;
    int64_t *offset = (int64_t *)(attr + 1);
    td_id *in = (td_id *)(offset + u.member_count);
    uint32_t n = 0;
    for (int32_t m = 0; m < u.member_count; m++) {
        if (ids[m] == TD_NONE) continue;
        offset[n] = u.members[m].offset;
        in[n++] = ids[m];
    }
    *attr = (td_pack_attr){ .unit = unit, .count = n, .dim = u.cut.dim };
    td_id id = td_expand_emit(d, &td_op_pack, in, (int)n, attr, sizeof *attr + n * sizeof(int64_t), td_unit_shape(&u), u.dtype);
    td_free(d->td, attr, bytes + id_bytes, "program");
    return id;
}

/* ---- What each recorded node becomes */

/* What earlier steps left in the unit's accumulator becomes its pending gradient, once. */
static void take_accumulated(td_expansion *d, uint32_t unit)
{
    td_unit *u = &d->td->units[unit];
    if (!u->accumulator_full || u->accumulator_taken) return;
    u->accumulator_taken = true;
    d->pending[unit] = unit_value(d, u->accumulator);
}

/* Packs the gradients that arrived at unit's members and adds them to its pending gradient. */
static bool collect(td_expansion *d, const td_sweep *s, uint32_t unit)
{
    td_unit u = d->td->units[unit];
    size_t bytes = (size_t)u.member_count * sizeof(td_id);
    td_id *ids = td_alloc(d->td, bytes, "program");
    if (!ids) return false;
    bool any = false;
    for (int32_t m = 0; m < u.member_count; m++) {
        uint32_t state = u.members[m].state;
        td_id part = d->part[state];
        ids[m] = part == TD_NONE || part >= s->values ? TD_NONE : s->gradient[part];
        if (ids[m] == TD_NONE) continue;
        any = d->reached[state] = true;
        if (d->out->values[ids[m]].dtype != (uint8_t)u.dtype)
            ids[m] = td_handle_id(td_cast_at(td_handle(d->out, ids[m]), u.dtype, (td_here){ d->at.file, d->at.line }));
    }
    if (any) {
        td_id flat = mark(d, TD_MARK_GRADIENT, unit, pack(d, unit, ids));
        take_accumulated(d, unit);
        d->pending[unit] = sum_of(d, d->pending[unit], flat);
    }
    td_free(d->td, ids, bytes, "program");
    return d->td->error == TD_OK;
}

/* ---- Row-sparse gradients */

/* Takes apart the gradient of the table `state` into what its uses gave. */
static bool collect_uses(td_expansion *d, uint32_t state, td_id gradient)
{
    td_node n = *td_producer(d->out, gradient);
    if (n.op == &td_op_add) {
        td_id a = d->out->inputs[n.input], b = d->out->inputs[n.input + 1];
        return collect_uses(d, state, a) && collect_uses(d, state, b);
    }
    if (n.op != &td_op_embedding_gradient) {
        td_fail(d->td, TD_ERROR_UNSUPPORTED, "backward: '%s' has row-sparse gradients, but %s gives it a dense one; read it by td_embedding "
                "alone, or let the table be dense %s", d->td->states[state].name, n.op->name, td_location(d->td, n.module, n.file, n.line));
        return false;
    }
    td_row_use use = { d->td->states[state].unit, d->out->inputs[n.input], d->out->inputs[n.input + 1], d->at };
    td_here here = { n.file, n.line };
    use.rows = td_handle_id(td_as(td_handle(d->out, use.rows), d->td->states[state].dtype, here));
    if (!td_room(d->td, (void **)&d->uses, &d->use_room, d->use_count + 1, sizeof *d->uses, "program")) return false;
    d->uses[d->use_count++] = use;
    return d->td->error == TD_OK;
}

static bool collect_rows(td_expansion *d, const td_sweep *s, uint32_t unit)
{
    uint32_t state = d->td->units[unit].members[0].state;
    td_id part = d->part[state];
    if (part == TD_NONE || part >= s->values || s->gradient[part] == TD_NONE) return true;
    d->reached[state] = true;
    return collect_uses(d, state, s->gradient[part]);
}

/* What has been collected for the unit becomes its gradient at the optimizer. */
static bool merge_uses(td_expansion *d, uint32_t unit)
{
    uint32_t state = d->td->units[unit].members[0].state, n = 0;
    td_shape table = d->td->states[state].shape;
    size_t bytes = (2 * (size_t)d->use_count + 1) * sizeof(td_id);
    td_id *in = td_alloc(d->td, bytes, "program");
    if (!in) return false;
    int64_t ids = 0;
    for (uint32_t i = 0; i < d->use_count; i++) {
        td_row_use *use = &d->uses[i];
        if (use->unit != unit) continue;
        ids += td_shape_elements(d->out->values[use->ids].shape);
        in[n++] = use->ids;
        in[n++] = use->rows;
        use->unit = TD_NONE;
    }
    td_merge_rows_attr attr = { .table_rows = table.dim[0], .width = table.dim[1] };
    td_value out[2] = { { .shape = TD_SHAPE(ids), .dtype = TD_I32 },
                        { .shape = TD_SHAPE(ids, table.dim[1]), .dtype = (uint8_t)d->td->states[state].dtype } };
    d->entered[unit] = td_emit(d->out, &(td_emission){ .op = &td_op_merge_rows, .like = &d->at, .inputs = in, .input_count = (int)n,
                                                       .attr = &attr, .attr_bytes = sizeof attr, .outputs = out, .output_count = 2,
                                                       .after = TD_NONE });
    td_free(d->td, in, bytes, "program");
    return d->td->error == TD_OK;
}

/* No accumulator holds rows: how many there are is known within a step only. */
static bool check_consumed(td_expansion *d)
{
    for (uint32_t i = 0; i < d->use_count; i++) {
        const td_row_use *use = &d->uses[i];
        if (use->unit == TD_NONE) continue;
        td_fail(d->td, TD_ERROR_UNSUPPORTED, "backward: '%s' has row-sparse gradients, which no update of this step consumes, and they cannot "
                "outlive the step; record all micro-batches and the update in one step, or let the table be dense %s",
                d->td->states[d->td->units[use->unit].members[0].state].name,
                td_location(d->td, use->backward.module, use->backward.file, use->backward.line));
        return false;
    }
    return true;
}

static bool lower_backward(td_expansion *d)
{
    td_sweep s;
    td_id loss = d->map[d->in->inputs[d->at.input]];
    if (!td_sweep_open(&s, d->out)) return false;
    for (uint32_t i = 0; i < d->td->state_count; i++)
        if (td_state_trains((td_state){ d->td, i }) && d->part[i] != TD_NONE) s.source[d->part[i]] = true;
    bool done = td_sweep_run(&s, loss, (td_here){ d->at.file, d->at.line });
    if (done && !s.active[loss])
        td_fail(d->td, TD_ERROR_USAGE, "backward: the loss depends on no parameter that trains, or was recorded before the update of those it depends on %s",
                td_location(d->td, d->at.module, d->at.file, d->at.line));
    uint32_t units = d->td->unit_count;
    td_scope before = td_scope_of(d->td, &d->at, d->at.phase | TD_BACKWARD_PHASE);
    for (uint32_t u = 0; u < units && d->td->error == TD_OK; u++)
        if (d->td->units[u].trains && !(d->td->units[u].sparse ? collect_rows(d, &s, u) : collect(d, &s, u))) break;
    td_scope_restore(d->td, before);
    td_sweep_close(&s);
    return d->td->error == TD_OK;
}

static bool lower_gradient(td_expansion *d)
{
    td_sweep s;
    const td_id *in = d->in->inputs + d->at.input;
    td_id y = d->map[in[0]], x = d->map[in[1]];
    if (!td_sweep_open(&s, d->out)) return false;
    s.source[x] = true;
    bool done = td_sweep_run(&s, y, (td_here){ d->at.file, d->at.line });
    td_value v = d->out->values[x];
    td_id g = s.gradient[x];
    td_sweep_close(&s);
    if (!done) return false;
    if (g == TD_NONE) g = td_handle_id(td_fill_at(d->td, (td_dtype)v.dtype, v.shape, 0, (td_here){ d->at.file, d->at.line }));
    d->map[d->at.output] = g;
    return d->td->error == TD_OK;
}

/* A unit's members must all be in the set: what one optimizer consumes is the whole unit's gradient. */
static bool covers_unit(td_expansion *d, uint32_t unit, const uint32_t *states, uint32_t count)
{
    const td_unit *u = &d->td->units[unit];
    int32_t found = 0;
    const char *missing = "";
    for (int32_t m = 0; m < u->member_count; m++) {
        uint32_t i = 0;
        while (i < count && states[i] != u->members[m].state) i++;
        if (i < count)
            found++;
        else
            missing = d->td->states[u->members[m].state].name;
    }
    if (found == u->member_count) return true;
    td_fail(d->td, TD_ERROR_UNSUPPORTED, "optimizer: '%s' trains too and shares a unit with '%s', but this optimizer has only one of them; "
            "give both to one optimizer or freeze one", missing, d->td->states[states[0]].name);
    return false;
}

static bool lower_gradients(td_expansion *d)
{
    const td_gradients_attr *a = td_node_attr(d->in, &d->at);
    const uint32_t *states = (const uint32_t *)(a + 1);
    td_here here = { d->at.file, d->at.line };
    for (uint32_t from = 0, unit; (unit = td_expand_next_unit(d, states, a->count, &from)) != TD_NONE;) {
        td_unit u = d->td->units[unit];
        if (!covers_unit(d, unit, states, a->count)) return false;
        if (u.sparse) {
            if (!merge_uses(d, unit)) return false;
        } else {
            take_accumulated(d, unit);
            if (d->pending[unit] == TD_NONE) d->pending[unit] = td_handle_id(td_fill_at(d->td, u.dtype, td_unit_shape(&u), 0, here));
            d->entered[unit] = mark(d, TD_MARK_OPTIMIZER, unit, d->pending[unit]);
            d->pending[unit] = TD_NONE;
        }
        if (u.accumulator_full) continue;
        for (int32_t m = 0; m < u.member_count; m++)
            if (!d->reached[u.members[m].state])
                td_message(d->td, TD_LOG_WARNING, "'%s' got no gradient: no loss of this step depends on it; it is updated with zeros",
                           d->td->states[u.members[m].state].name);
    }
    return d->td->error == TD_OK;
}

/* The unit's value with `value` in place of one member. */
static td_id with_member(td_expansion *d, uint32_t unit, uint32_t state, td_id value)
{
    td_unit u = d->td->units[unit];
    if (u.member_count == 1 && u.elements == u.members[0].elements && !u.cut.ways)
        return td_handle_id(td_reshape_at(td_handle(d->out, value), td_unit_shape(&u), (td_here){ d->at.file, d->at.line }));
    size_t bytes = (size_t)u.member_count * sizeof(td_id);
    td_id *ids = td_alloc(d->td, bytes, "program");
    if (!ids) return TD_NONE;
    for (int32_t m = 0; m < u.member_count; m++) ids[m] = u.members[m].state == state ? value : state_part(d, u.members[m].state);
    td_id packed = pack(d, unit, ids);
    td_free(d->td, ids, bytes, "program");
    return packed;
}

static bool lower_assign(td_expansion *d)
{
    const td_assign_attr *a = td_node_attr(d->in, &d->at);
    uint32_t unit = d->td->states[a->state].unit;
    td_id value = d->map[d->in->inputs[d->at.input]];
    if (a->conditional) {
        td_tensor when = td_handle(d->out, d->map[d->in->inputs[d->at.input + 1]]);
        value = td_handle_id(td_where_at(when, td_handle(d->out, value), td_handle(d->out, state_part(d, a->state)),
                                         (td_here){ d->at.file, d->at.line }));
    }
    d->current[unit] = with_member(d, unit, a->state, value);
    d->changed[unit] = true;
    /* A node of its own: gradients of what reads the state from here on are the state's, not those of what was assigned. */
    td_shape shape = d->td->states[a->state].shape;
    d->part[a->state] = td_handle_id(td_reshape_at(td_handle(d->out, value), shape, (td_here){ d->at.file, d->at.line }));
    return d->td->error == TD_OK;
}

static bool lower(td_expansion *d, uint32_t index, td_purpose purpose)
{
    const td_op *op = d->at.op;
    if (op == &td_op_parameter)
        return (d->map[d->at.output] = state_part(d, ((const td_parameter_attr *)td_node_attr(d->in, &d->at))->state)) != TD_NONE;
    if (op == &td_op_backward) return lower_backward(d);
    if (op == &td_op_gradient) return lower_gradient(d);
    if (op == &td_op_gradients) return lower_gradients(d);
    if (op == &td_op_gradient_norm) return td_expand_norm(d);
    if (op == &td_op_update) return td_expand_update(d);
    if (op == &td_op_assign) return lower_assign(d);
    if (op == &td_op_blend) return td_expand_blend(d);
    if (op == &td_op_output && purpose == TD_FOR_VALUE && index + 1 < d->in->node_count) return true;
    return td_copy_node(d->out, d->in, index, d->map);
}

static bool store(td_expansion *d, uint32_t unit, td_id value)
{
    td_unit_attr attr = { .unit = unit };
    td_node like = { .phase = d->td->phase };
    td_emit(d->out, &(td_emission){ .op = &td_op_store, .like = &like, .inputs = &value, .input_count = 1, .attr = &attr,
                                    .attr_bytes = sizeof attr, .after = TD_NONE });
    return d->td->error == TD_OK;
}

static bool store_changes(td_expansion *d)
{
    uint32_t units = d->td->unit_count;
    d->at = (td_node){ .file = NULL };
    for (uint32_t u = 0; u < units; u++) {
        if (d->changed[u] && !store(d, u, d->current[u])) return false;
        if (d->pending[u] == TD_NONE) continue;
        uint32_t accumulator = td_accumulator_of(d->td, u);
        if (accumulator == TD_NONE || !store(d, accumulator, mark(d, TD_MARK_ACCUMULATOR, u, d->pending[u]))) return false;
    }
    return check_consumed(d);
}

static bool open_tables(td_expansion *d)
{
    uint32_t units = d->td->unit_count, states = d->td->state_count, ids = 3 * units + states + d->in->value_count;
    d->bytes = ids * sizeof(td_id) + units + states;
    d->memory = td_alloc(d->td, d->bytes, "program");
    if (!d->memory) return false;
    memset(d->memory, 0xFF, ids * sizeof(td_id));
    d->map = d->memory;
    d->current = d->map + d->in->value_count;
    d->pending = d->current + units;
    d->entered = d->pending + units;
    d->part = d->entered + units;
    d->changed = (bool *)(d->part + states);
    d->reached = d->changed + units;
    memset(d->changed, 0, units + states);
    for (uint32_t u = 0; u < units; u++) d->td->units[u].accumulator_taken = false;
    return true;
}

td_program *td_differentiate_pass(const td_program *in, td_purpose purpose)
{
    td_expansion d = { .td = in->td, .in = in };
    if (!td_expand_moments(in) || !open_tables(&d)) return NULL;
    d.out = td_pass_begin(in->td);
    if (d.out) {
        td_scope outer = { in->td->module, in->td->phase };
        for (uint32_t n = 0; n < in->node_count && in->td->error == TD_OK; n++) {
            d.at = in->nodes[n];
            td_scope_of(in->td, &d.at, d.at.phase);
            if (!lower(&d, n, purpose)) break;
        }
        if (purpose == TD_FOR_STEP && in->td->error == TD_OK) store_changes(&d);
        td_scope_restore(in->td, outer);
        d.out = td_pass_end(d.out);
    }
    td_free(in->td, d.memory, d.bytes, "program");
    td_free(in->td, d.uses, d.use_room * sizeof *d.uses, "program");
    return d.out;
}
