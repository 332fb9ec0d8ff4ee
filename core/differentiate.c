/* differentiate: expands what was recorded about gradients, updates and state into plain nodes on units.
 *
 *     parameter s          part of unit's value            the value after the assigns recorded before
 *     backward loss        the reverse of every node loss depends on (reverse.h); then for each unit
 *                              pack (gradients) -> mark gradient -> add to the unit's pending gradient
 *     gradient y x         the reverse from y to x
 *     gradients            mark optimizer of each unit's pending gradient, which is consumed
 *     update               update_unit for each unit of the group; update_rows for a table with row-sparse gradients, and for each
 *                          parameter of a rule that has moments of rows
 *     assign s v           the unit packed again with v in s's place
 *     blend                arithmetic on units of moments and of their parameters
 *     at the end           store of every changed unit; pending gradients nobody consumed go to the accumulators
 *
 * Gradients of tied uses add up before the mark, so a strategy sees one gradient a parameter and backward.
 *
 * A table with row-sparse gradients has no flat one: the reverse sweep ends in the embedding_gradient of each of its uses, whose ids
 * and rows are kept until `gradients` merges them (merge_rows); of the dense value nothing is left, since nobody reads it.
 */
#include "core/ops/op.h"
#include "core/reverse.h"

#include <string.h>

/* The gradient of one use of a table. */
typedef struct row_use {
    uint32_t unit;                            /* TD_NONE: consumed */
    td_id ids, rows;
    td_node backward;                         /* that gave it */
} row_use;

typedef struct differentiation {
    td_context *td;
    const td_program *in;
    td_program *out;
    td_id *map;                               /* value of in -> value of out */
    td_id *current;                           /* unit -> its value now, or TD_NONE: not read */
    td_id *pending;                           /* unit -> flat gradient not yet consumed, or TD_NONE */
    td_id *entered;                           /* unit -> its gradient at the optimizer; of a sparse one the ids, the rows follow */
    row_use *uses;                            /* of tables with row-sparse gradients, in order */
    uint32_t use_count, use_room;
    td_id *part;                              /* state -> its value now, or TD_NONE */
    bool *changed;                            /* unit: to be stored */
    bool *reached;                            /* state: a backward gave it a gradient */
    td_node at;                               /* the node of `in` being expanded */
    void *memory;
    size_t bytes;
} differentiation;

static const td_placement replicated;

static td_id emit1(differentiation *d, const td_op *op, const td_id *in, int n, const void *attr, size_t bytes, td_shape shape, td_dtype dtype)
{
    td_value value = { .shape = shape, .dtype = (uint8_t)dtype, .place = replicated };
    td_node like = d->at;
    like.module = d->td->module;
    like.phase = d->td->phase;
    return td_emit(d->out, &(td_emission){ .op = op, .like = &like, .inputs = in, .input_count = n, .attr = attr, .attr_bytes = bytes,
                                           .outputs = &value, .output_count = 1, .after = TD_NONE });
}

static td_shape flat_shape(const td_unit *u)
{
    return u->cut.ways ? TD_SHAPE(u->cut.ways, u->elements / u->cut.ways) : TD_SHAPE(u->elements);
}

static td_id unit_value(differentiation *d, uint32_t unit)
{
    const td_unit *u = &d->td->units[unit];
    td_unit_attr attr = { .unit = unit };
    td_id id = emit1(d, &td_op_unit, NULL, 0, &attr, sizeof attr, flat_shape(u), u->dtype);
    if (id != TD_NONE) d->out->values[id].place = u->place;
    return id;
}

static td_id current_value(differentiation *d, uint32_t unit)
{
    if (d->current[unit] == TD_NONE) d->current[unit] = unit_value(d, unit);
    return d->current[unit];
}

static td_id state_part(differentiation *d, uint32_t state)
{
    if (d->part[state] != TD_NONE) return d->part[state];
    td_state_entry s = d->td->states[state];
    td_id flat = current_value(d, s.unit);
    td_part_attr attr = { .offset = s.offset, .dim = d->td->units[s.unit].cut.dim };
    return d->part[state] = emit1(d, &td_op_part, &flat, 1, &attr, sizeof attr, s.shape, s.dtype);
}

static void forget_parts(differentiation *d, uint32_t unit)
{
    const td_unit *u = &d->td->units[unit];
    for (int32_t m = 0; m < u->member_count; m++) d->part[u->members[m].state] = TD_NONE;
}

static td_id mark(differentiation *d, td_mark_kind kind, uint32_t unit, td_id value)
{
    if (!d->td->has_parallel) return value;
    td_mark_attr attr = { .kind = kind, .unit = unit };
    const td_unit *u = &d->td->units[unit];
    return emit1(d, &td_op_mark, &value, 1, &attr, sizeof attr, flat_shape(u), u->dtype);
}

static td_id sum_of(differentiation *d, td_id a, td_id b)
{
    return td_gradient_sum(d->out, a, b, (td_here){ d->at.file, d->at.line });
}

/* Values at their members' offsets; ids[m] is TD_NONE where member m has none. */
static td_id pack(differentiation *d, uint32_t unit, const td_id *ids)
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
    td_id id = emit1(d, &td_op_pack, in, (int)n, attr, sizeof *attr + n * sizeof(int64_t), flat_shape(&u), u.dtype);
    td_free(d->td, attr, bytes + id_bytes, "program");
    return id;
}

/* ---- What each recorded node becomes */

/* What earlier steps left in the unit's accumulator becomes its pending gradient, once. */
static void take_accumulated(differentiation *d, uint32_t unit)
{
    td_unit *u = &d->td->units[unit];
    if (!u->accumulator_full || u->accumulator_taken) return;
    u->accumulator_taken = true;
    d->pending[unit] = unit_value(d, u->accumulator);
}

/* Packs the gradients that arrived at unit's members and adds them to its pending gradient. */
static bool collect(differentiation *d, const td_sweep *s, uint32_t unit)
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
static bool collect_uses(differentiation *d, uint32_t state, td_id gradient)
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
    row_use use = { d->td->states[state].unit, d->out->inputs[n.input], d->out->inputs[n.input + 1], d->at };
    td_here here = { n.file, n.line };
    use.rows = td_handle_id(td_as(td_handle(d->out, use.rows), d->td->states[state].dtype, here));
    if (!td_room(d->td, (void **)&d->uses, &d->use_room, d->use_count + 1, sizeof *d->uses, "program")) return false;
    d->uses[d->use_count++] = use;
    return d->td->error == TD_OK;
}

static bool collect_rows(differentiation *d, const td_sweep *s, uint32_t unit)
{
    uint32_t state = d->td->units[unit].members[0].state;
    td_id part = d->part[state];
    if (part == TD_NONE || part >= s->values || s->gradient[part] == TD_NONE) return true;
    d->reached[state] = true;
    return collect_uses(d, state, s->gradient[part]);
}

/* What has been collected for the unit becomes its gradient at the optimizer. */
static bool merge_uses(differentiation *d, uint32_t unit)
{
    uint32_t state = d->td->units[unit].members[0].state, n = 0;
    td_shape table = d->td->states[state].shape;
    size_t bytes = (2 * (size_t)d->use_count + 1) * sizeof(td_id);
    td_id *in = td_alloc(d->td, bytes, "program");
    if (!in) return false;
    int64_t ids = 0;
    for (uint32_t i = 0; i < d->use_count; i++) {
        row_use *use = &d->uses[i];
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
static bool check_consumed(differentiation *d)
{
    for (uint32_t i = 0; i < d->use_count; i++) {
        const row_use *use = &d->uses[i];
        if (use->unit == TD_NONE) continue;
        td_fail(d->td, TD_ERROR_UNSUPPORTED, "backward: '%s' has row-sparse gradients, which no update of this step consumes, and they cannot "
                "outlive the step; record all micro-batches and the update in one step, or let the table be dense %s",
                d->td->states[d->td->units[use->unit].members[0].state].name,
                td_location(d->td, use->backward.module, use->backward.file, use->backward.line));
        return false;
    }
    return true;
}

static bool lower_backward(differentiation *d)
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

static bool lower_gradient(differentiation *d)
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

/* Calls through the units that hold `states`, each once, in order of first appearance. */
static uint32_t next_unit(const differentiation *d, const uint32_t *states, uint32_t count, uint32_t *from)
{
    for (; *from < count; (*from)++) {
        uint32_t unit = d->td->states[states[*from]].unit;
        bool seen = false;
        for (uint32_t i = *from; i-- > 0 && !seen;) seen = d->td->states[states[i]].unit == unit;
        if (!seen) return (*from)++, unit;
    }
    return TD_NONE;
}

/* A unit's members must all be in the set: what one optimizer consumes is the whole unit's gradient. */
static bool covers_unit(differentiation *d, uint32_t unit, const uint32_t *states, uint32_t count)
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

static bool lower_gradients(differentiation *d)
{
    const td_gradients_attr *a = td_node_attr(d->in, &d->at);
    const uint32_t *states = (const uint32_t *)(a + 1);
    td_here here = { d->at.file, d->at.line };
    for (uint32_t from = 0, unit; (unit = next_unit(d, states, a->count, &from)) != TD_NONE;) {
        td_unit u = d->td->units[unit];
        if (!covers_unit(d, unit, states, a->count)) return false;
        if (u.sparse) {
            if (!merge_uses(d, unit)) return false;
        } else {
            take_accumulated(d, unit);
            if (d->pending[unit] == TD_NONE) d->pending[unit] = td_handle_id(td_fill_at(d->td, u.dtype, flat_shape(&u), 0, here));
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

static bool lower_norm(differentiation *d)
{
    bool largest = ((const td_gradient_norm_attr *)td_node_attr(d->in, &d->at))->largest;
    const td_node *gradients = td_producer(d->in, d->in->inputs[d->at.input]);
    const td_gradients_attr *a = td_node_attr(d->in, gradients);
    const uint32_t *states = (const uint32_t *)(a + 1);
    td_here here = { d->at.file, d->at.line };
    int64_t parts = d->td->has_parallel && d->td->parallel.unit_multiple ? d->td->parallel.unit_multiple : 1;
    td_id total = TD_NONE;
    for (uint32_t from = 0, unit; (unit = next_unit(d, states, a->count, &from)) != TD_NONE;) {
        td_id gradient = d->entered[unit] + d->td->units[unit].sparse;
        int64_t rows = d->td->units[unit].cut.ways;
        td_shape shape = !largest ? (td_shape){ 0 } : rows ? TD_SHAPE(rows, parts) : TD_SHAPE(parts);
        td_id own = emit1(d, largest ? &td_op_max_abs : &td_op_sum_squares, &gradient, 1, NULL, 0, shape, td_float(d->td));
        if (own == TD_NONE) return false;
        if (!largest) total = sum_of(d, total, own);
        else total = total == TD_NONE ? own : td_handle_id(td_maximum_at(td_handle(d->out, total), td_handle(d->out, own), here));
    }
    td_tensor all = td_handle(d->out, total);
    d->map[d->at.output] = td_handle_id(largest ? td_max_at(all, TD_ALL, TD_DROP, here) : td_sqrt_at(all, here));
    return d->td->error == TD_OK;
}

/* The members of `unit` that are in the group, as ranges; members side by side join (the gap between them is zero and stays so). */
static uint32_t segments_of(const differentiation *d, uint32_t unit, const td_group_attr *a, td_update_segment *out)
{
    const uint32_t *states = (const uint32_t *)(a + 1);
    const td_unit *u = &d->td->units[unit];
    uint32_t n = 0;
    bool open = false;
    for (int32_t m = 0; m < u->member_count; m++) {
        uint32_t i = 0;
        while (i < a->count && states[i] != u->members[m].state) i++;
        if (i == a->count) {
            open = false;
            continue;
        }
        if (!open) out[n++] = (td_update_segment){ .begin = u->members[m].offset };
        open = true;
        out[n - 1].end = u->members[m].offset + u->members[m].elements;
        memcpy(out[n - 1].hyper, a->hyper, sizeof a->hyper);
    }
    return n;
}

static bool has_entered(differentiation *d, uint32_t unit, const td_update_rule *rule)
{
    if (d->entered[unit] != TD_NONE) return true;
    td_fail(d->td, TD_ERROR_USAGE, "%s: the gradients given do not hold that of '%s' %s", rule->name,
            d->td->states[d->td->units[unit].members[0].state].name, td_location(d->td, d->at.module, d->at.file, d->at.line));
    return false;
}

/* The values of `units` are from here on those that an update gave, `first` and what follows it. */
static void take_updated(differentiation *d, const uint32_t *units, int count, td_id first)
{
    for (int k = 0; k < count; k++) {
        d->current[units[k]] = first + (td_id)k;
        d->changed[units[k]] = true;
        forget_parts(d, units[k]);
    }
}

static bool lower_update_unit(differentiation *d, uint32_t unit, const td_group_attr *a)
{
    const td_update_rule *rule = d->td->rules[a->rule];
    td_unit u = d->td->units[unit];
    if (!has_entered(d, unit, rule)) return false;
    td_id in[2 + TD_MOMENTS + 4] = { current_value(d, unit), d->entered[unit] };
    uint32_t units[1 + TD_MOMENTS] = { unit };
    int n = 2;
    for (int m = 0; m < rule->moments; m++) {
        td_state moment = td_update_moment(rule, (td_state){ d->td, u.members[0].state }, m);
        if (moment.id == TD_NONE) return false;
        units[1 + m] = d->td->states[moment.id].unit;
        in[n++] = current_value(d, units[1 + m]);
    }
    for (uint32_t i = 1; i < d->at.inputs; i++) in[n++] = d->map[d->in->inputs[d->at.input + i]];
    size_t bytes = sizeof(td_update_attr) + (size_t)u.member_count * sizeof(td_update_segment);
    td_update_attr *attr = td_alloc(d->td, bytes, "program");
    if (!attr) return false;
    uint32_t count = segments_of(d, unit, a, (td_update_segment *)(attr + 1));
    *attr = (td_update_attr){ .rule = a->rule, .unit = unit, .moments = (uint32_t)rule->moments, .count = count };
    td_value value = { .shape = flat_shape(&u), .dtype = (uint8_t)u.dtype, .place = replicated };
    td_value outputs[1 + TD_MOMENTS] = { value, value, value, value, value };
    td_id first = td_emit(d->out, &(td_emission){ .op = &td_op_update_unit, .like = &d->at, .inputs = in, .input_count = n, .attr = attr,
                                                  .attr_bytes = sizeof *attr + count * sizeof(td_update_segment), .outputs = outputs,
                                                  .output_count = 1 + rule->moments, .after = TD_NONE });
    td_free(d->td, attr, bytes, "program");
    take_updated(d, units, 1 + rule->moments, first);
    return d->td->error == TD_OK;
}

/* The update of one parameter row by row. */
static bool lower_update_rows(differentiation *d, uint32_t state, const td_group_attr *a)
{
    const td_update_rule *rule = d->td->rules[a->rule];
    td_state_entry s = d->td->states[state];
    bool sparse = d->td->units[s.unit].sparse;
    if (!has_entered(d, s.unit, rule)) return false;
    int64_t rows = s.shape.rank ? s.shape.dim[0] : 1;
    td_update_rows_attr attr = { .rule = a->rule, .unit = s.unit, .begin = s.offset, .rows = rows, .width = rows ? s.elements / rows : 0 };
    memcpy(attr.hyper, a->hyper, sizeof attr.hyper);
    td_id in[1 + TD_MOMENTS + 4 + 2] = { current_value(d, s.unit) };
    uint32_t units[1 + TD_MOMENTS] = { s.unit };
    int n = 1;
    for (int m = 0; m < rule->moments; m++) {
        td_state moment = td_update_moment(rule, (td_state){ d->td, state }, m);
        if (moment.id == TD_NONE) return false;
        units[1 + m] = d->td->states[moment.id].unit;
        attr.moment[m] = d->td->states[moment.id].offset;
        in[n++] = current_value(d, units[1 + m]);
    }
    for (uint32_t i = 1; i < d->at.inputs; i++) in[n++] = d->map[d->in->inputs[d->at.input + i]];
    in[n++] = d->entered[s.unit];
    if (sparse) in[n++] = d->entered[s.unit] + 1;
    td_value outputs[1 + TD_MOMENTS];
    for (int k = 0; k < 1 + rule->moments; k++)
        outputs[k] = (td_value){ .shape = flat_shape(&d->td->units[units[k]]), .dtype = (uint8_t)s.dtype, .place = replicated };
    td_id first = td_emit(d->out, &(td_emission){ .op = &td_op_update_rows, .like = &d->at, .inputs = in, .input_count = n, .attr = &attr,
                                                  .attr_bytes = sizeof attr, .outputs = outputs, .output_count = 1 + rule->moments,
                                                  .after = TD_NONE });
    take_updated(d, units, 1 + rule->moments, first);
    return d->td->error == TD_OK;
}

static bool lower_update(differentiation *d)
{
    const td_group_attr *a = td_node_attr(d->in, &d->at);
    const uint32_t *states = (const uint32_t *)(a + 1);
    bool row_moments = td_rule_has_row_moments(d->td->rules[a->rule]);
    for (uint32_t i = 0; i < a->count; i++) {
        bool by_rows = row_moments || d->td->units[d->td->states[states[i]].unit].sparse;
        if (by_rows && !lower_update_rows(d, states[i], a)) return false;
    }
    for (uint32_t from = 0, unit; !row_moments && (unit = next_unit(d, states, a->count, &from)) != TD_NONE;)
        if (!d->td->units[unit].sparse && !lower_update_unit(d, unit, a)) return false;
    return true;
}

/* The unit's value with `value` in place of one member. */
static td_id with_member(differentiation *d, uint32_t unit, uint32_t state, td_id value)
{
    td_unit u = d->td->units[unit];
    if (u.member_count == 1 && u.elements == u.members[0].elements && !u.cut.ways)
        return td_handle_id(td_reshape_at(td_handle(d->out, value), flat_shape(&u), (td_here){ d->at.file, d->at.line }));
    size_t bytes = (size_t)u.member_count * sizeof(td_id);
    td_id *ids = td_alloc(d->td, bytes, "program");
    if (!ids) return TD_NONE;
    for (int32_t m = 0; m < u.member_count; m++) ids[m] = u.members[m].state == state ? value : state_part(d, u.members[m].state);
    td_id packed = pack(d, unit, ids);
    td_free(d->td, ids, bytes, "program");
    return packed;
}

static bool lower_assign(differentiation *d)
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

static bool lower_blend(differentiation *d)
{
    const td_gradients_attr *a = td_node_attr(d->in, &d->at);
    const uint32_t *states = (const uint32_t *)(a + 1);
    td_here here = { d->at.file, d->at.line };
    td_tensor keep = td_handle(d->out, d->map[d->in->inputs[d->at.input]]);
    td_tensor one = td_fill_at(d->td, td_float(d->td), (td_shape){ 0 }, 1, here);
    td_tensor rest = td_sub_at(one, keep, here);
    for (uint32_t from = 0, unit; (unit = next_unit(d, states, a->count, &from)) != TD_NONE;) {
        td_id moment = current_value(d, unit), parameter = current_value(d, d->td->units[unit].of);
        td_tensor kept = td_mul_at(td_handle(d->out, moment), keep, here);
        td_tensor moved = td_mul_at(td_handle(d->out, parameter), rest, here);
        d->current[unit] = td_handle_id(td_add_at(kept, moved, here));
        d->changed[unit] = true;
        forget_parts(d, unit);
    }
    return d->td->error == TD_OK;
}

static bool lower(differentiation *d, uint32_t index, td_purpose purpose)
{
    const td_op *op = d->at.op;
    if (op == &td_op_parameter)
        return (d->map[d->at.output] = state_part(d, ((const td_parameter_attr *)td_node_attr(d->in, &d->at))->state)) != TD_NONE;
    if (op == &td_op_backward) return lower_backward(d);
    if (op == &td_op_gradient) return lower_gradient(d);
    if (op == &td_op_gradients) return lower_gradients(d);
    if (op == &td_op_gradient_norm) return lower_norm(d);
    if (op == &td_op_update) return lower_update(d);
    if (op == &td_op_assign) return lower_assign(d);
    if (op == &td_op_blend) return lower_blend(d);
    if (op == &td_op_output && purpose == TD_FOR_VALUE && index + 1 < d->in->node_count) return true;
    return td_copy_node(d->out, d->in, index, d->map);
}

static bool store(differentiation *d, uint32_t unit, td_id value)
{
    td_unit_attr attr = { .unit = unit };
    td_node like = { .phase = d->td->phase };
    td_emit(d->out, &(td_emission){ .op = &td_op_store, .like = &like, .inputs = &value, .input_count = 1, .attr = &attr,
                                    .attr_bytes = sizeof attr, .after = TD_NONE });
    return d->td->error == TD_OK;
}

static bool store_changes(differentiation *d)
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

/* All members of a unit that a rule updates have its moments, so that these are laid out as the unit is. */
static bool make_moments(const td_program *in)
{
    td_context *td = in->td;
    if (!td_layout(td)) return false;
    for (uint32_t n = 0; n < in->node_count; n++) {
        if (in->nodes[n].op != &td_op_update) continue;
        const td_group_attr *a = td_node_attr(in, &in->nodes[n]);
        const td_update_rule *rule = td->rules[a->rule];
        for (uint32_t i = 0; i < a->count; i++) {
            uint32_t unit = td->states[((const uint32_t *)(a + 1))[i]].unit;
            for (int32_t k = 0; k < td->units[unit].member_count; k++)
                for (int m = 0; m < rule->moments; m++)
                    if (td_update_moment(rule, (td_state){ td, td->units[unit].members[k].state }, m).id == TD_NONE) return false;
        }
    }
    return td_layout(td);
}

static bool open_tables(differentiation *d)
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
    differentiation d = { .td = in->td, .in = in };
    if (!make_moments(in) || !open_tables(&d)) return NULL;
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
