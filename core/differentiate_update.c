/* differentiate, the optimizer's part: norms of gradients, updates of units or row by row, averages of parameters.
 *
 *     gradient_norm        of each unit's gradient at the optimizer, then over all
 *     update               update_unit for each unit of the group; update_rows for a table with row-sparse gradients, and for each
 *                          parameter of a rule that has moments of rows
 *     blend                arithmetic on units of moments and of their parameters
 */
#include "core/differentiate.h"

#include <string.h>

bool td_expand_moments(const td_program *in)
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

bool td_expand_norm(td_expansion *d)
{
    bool largest = ((const td_gradient_norm_attr *)td_node_attr(d->in, &d->at))->largest;
    const td_node *gradients = td_producer(d->in, d->in->inputs[d->at.input]);
    const td_gradients_attr *a = td_node_attr(d->in, gradients);
    const uint32_t *states = (const uint32_t *)(a + 1);
    td_here here = { d->at.file, d->at.line };
    int64_t parts = d->td->has_parallel && d->td->parallel.unit_multiple ? d->td->parallel.unit_multiple : 1;
    td_id total = TD_NONE;
    for (uint32_t from = 0, unit; (unit = td_expand_next_unit(d, states, a->count, &from)) != TD_NONE;) {
        td_id gradient = d->entered[unit] + d->td->units[unit].sparse;
        int64_t rows = d->td->units[unit].cut.ways;
        td_shape shape = !largest ? (td_shape){ 0 } : rows ? TD_SHAPE(rows, parts) : TD_SHAPE(parts);
        td_id own = td_expand_emit(d, largest ? &td_op_max_abs : &td_op_sum_squares, &gradient, 1, NULL, 0, shape, td_float(d->td));
        if (own == TD_NONE) return false;
        if (!largest) total = td_gradient_sum(d->out, total, own, here);
        else total = total == TD_NONE ? own : td_handle_id(td_maximum_at(td_handle(d->out, total), td_handle(d->out, own), here));
    }
    td_tensor all = td_handle(d->out, total);
    d->map[d->at.output] = td_handle_id(largest ? td_max_at(all, TD_ALL, TD_DROP, here) : td_sqrt_at(all, here));
    return d->td->error == TD_OK;
}

/* The members of `unit` that are in the group, as ranges; members side by side join (the gap between them is zero and stays so). */
static uint32_t segments_of(const td_expansion *d, uint32_t unit, const td_group_attr *a, td_update_segment *out)
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

static bool has_entered(td_expansion *d, uint32_t unit, const td_update_rule *rule)
{
    if (d->entered[unit] != TD_NONE) return true;
    td_fail(d->td, TD_ERROR_USAGE, "%s: the gradients given do not hold that of '%s' %s", rule->name,
            d->td->states[d->td->units[unit].members[0].state].name, td_location(d->td, d->at.module, d->at.file, d->at.line));
    return false;
}

/* The values of `units` are from here on those that an update gave, `first` and what follows it. */
static void take_updated(td_expansion *d, const uint32_t *units, int count, td_id first)
{
    for (int k = 0; k < count; k++) {
        d->current[units[k]] = first + (td_id)k;
        d->changed[units[k]] = true;
        td_expand_forget(d, units[k]);
    }
}

static bool lower_update_unit(td_expansion *d, uint32_t unit, const td_group_attr *a)
{
    const td_update_rule *rule = d->td->rules[a->rule];
    td_unit u = d->td->units[unit];
    if (!has_entered(d, unit, rule)) return false;
    td_id in[2 + TD_MOMENTS + 4] = { td_expand_current(d, unit), d->entered[unit] };
    uint32_t units[1 + TD_MOMENTS] = { unit };
    int n = 2;
    for (int m = 0; m < rule->moments; m++) {
        td_state moment = td_update_moment(rule, (td_state){ d->td, u.members[0].state }, m);
        if (moment.id == TD_NONE) return false;
        units[1 + m] = d->td->states[moment.id].unit;
        in[n++] = td_expand_current(d, units[1 + m]);
    }
    for (uint32_t i = 1; i < d->at.inputs; i++) in[n++] = d->map[d->in->inputs[d->at.input + i]];
    size_t bytes = sizeof(td_update_attr) + (size_t)u.member_count * sizeof(td_update_segment);
    td_update_attr *attr = td_alloc(d->td, bytes, "program");
    if (!attr) return false;
    uint32_t count = segments_of(d, unit, a, (td_update_segment *)(attr + 1));
    *attr = (td_update_attr){ .rule = a->rule, .unit = unit, .moments = (uint32_t)rule->moments, .count = count };
    td_value value = { .shape = td_unit_shape(&u), .dtype = (uint8_t)u.dtype };
    td_value outputs[1 + TD_MOMENTS] = { value, value, value, value, value };
    td_id first = td_emit(d->out, &(td_emission){ .op = &td_op_update_unit, .like = &d->at, .inputs = in, .input_count = n, .attr = attr,
                                                  .attr_bytes = sizeof *attr + count * sizeof(td_update_segment), .outputs = outputs,
                                                  .output_count = 1 + rule->moments, .after = TD_NONE });
    td_free(d->td, attr, bytes, "program");
    take_updated(d, units, 1 + rule->moments, first);
    return d->td->error == TD_OK;
}

/* The update of one parameter row by row. */
static bool lower_update_rows(td_expansion *d, uint32_t state, const td_group_attr *a)
{
    const td_update_rule *rule = d->td->rules[a->rule];
    td_state_entry s = d->td->states[state];
    bool sparse = d->td->units[s.unit].sparse;
    if (!has_entered(d, s.unit, rule)) return false;
    int64_t rows = s.shape.rank ? s.shape.dim[0] : 1;
    td_update_rows_attr attr = { .rule = a->rule, .unit = s.unit, .begin = s.offset, .rows = rows, .width = rows ? s.elements / rows : 0 };
    memcpy(attr.hyper, a->hyper, sizeof attr.hyper);
    td_id in[1 + TD_MOMENTS + 4 + 2] = { td_expand_current(d, s.unit) };
    uint32_t units[1 + TD_MOMENTS] = { s.unit };
    int n = 1;
    for (int m = 0; m < rule->moments; m++) {
        td_state moment = td_update_moment(rule, (td_state){ d->td, state }, m);
        if (moment.id == TD_NONE) return false;
        units[1 + m] = d->td->states[moment.id].unit;
        attr.moment[m] = d->td->states[moment.id].offset;
        in[n++] = td_expand_current(d, units[1 + m]);
    }
    for (uint32_t i = 1; i < d->at.inputs; i++) in[n++] = d->map[d->in->inputs[d->at.input + i]];
    in[n++] = d->entered[s.unit];
    if (sparse) in[n++] = d->entered[s.unit] + 1;
    td_value outputs[1 + TD_MOMENTS];
    for (int k = 0; k < 1 + rule->moments; k++)
        outputs[k] = (td_value){ .shape = td_unit_shape(&d->td->units[units[k]]), .dtype = (uint8_t)s.dtype };
    td_id first = td_emit(d->out, &(td_emission){ .op = &td_op_update_rows, .like = &d->at, .inputs = in, .input_count = n, .attr = &attr,
                                                  .attr_bytes = sizeof attr, .outputs = outputs, .output_count = 1 + rule->moments,
                                                  .after = TD_NONE });
    take_updated(d, units, 1 + rule->moments, first);
    return d->td->error == TD_OK;
}

bool td_expand_update(td_expansion *d)
{
    const td_group_attr *a = td_node_attr(d->in, &d->at);
    const uint32_t *states = (const uint32_t *)(a + 1);
    bool row_moments = td_rule_has_row_moments(d->td->rules[a->rule]);
    for (uint32_t i = 0; i < a->count; i++) {
        bool by_rows = row_moments || d->td->units[d->td->states[states[i]].unit].sparse;
        if (by_rows && !lower_update_rows(d, states[i], a)) return false;
    }
    for (uint32_t from = 0, unit; !row_moments && (unit = td_expand_next_unit(d, states, a->count, &from)) != TD_NONE;)
        if (!d->td->units[unit].sparse && !lower_update_unit(d, unit, a)) return false;
    return true;
}

bool td_expand_blend(td_expansion *d)
{
    const td_gradients_attr *a = td_node_attr(d->in, &d->at);
    const uint32_t *states = (const uint32_t *)(a + 1);
    td_here here = { d->at.file, d->at.line };
    td_tensor keep = td_handle(d->out, d->map[d->in->inputs[d->at.input]]);
    td_tensor one = td_fill_at(d->td, td_float(d->td), (td_shape){ 0 }, 1, here);
    td_tensor rest = td_sub_at(one, keep, here);
    for (uint32_t from = 0, unit; (unit = td_expand_next_unit(d, states, a->count, &from)) != TD_NONE;) {
        td_id moment = td_expand_current(d, unit), parameter = td_expand_current(d, d->td->units[unit].of);
        td_tensor kept = td_mul_at(td_handle(d->out, moment), keep, here);
        td_tensor moved = td_mul_at(td_handle(d->out, parameter), rest, here);
        d->current[unit] = td_handle_id(td_add_at(kept, moved, here));
        d->changed[unit] = true;
        td_expand_forget(d, unit);
    }
    return d->td->error == TD_OK;
}
