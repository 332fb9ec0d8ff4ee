/* place: stored units as products read them: cast before they are gathered (narrow.c), gathered from the part that a group kept, or copied
 * once an update (copies.c).
 */
#include "parallel/placer.h"

#include <string.h>

static const td_placement replicated;

static uint32_t unit_number(const par_placer *pl, td_id v) { return ((const td_unit_attr *)td_node_attr(pl->in, td_producer(pl->in, v)))->unit; }

/* The stored unit behind v, which shows a member of it through views, if that is gathered narrow; TD_NONE otherwise. */
static td_id narrow_unit_behind(const par_placer *pl, td_id v)
{
    const td_node *n = td_producer(pl->in, v);
    while (n->inputs == 1 && (par_is_unit_view(n) || n->op == &td_op_part) && n->op != &td_op_cast) {
        v = pl->in->inputs[n->input];
        n = td_producer(pl->in, v);
    }
    return n->op == &td_op_unit && pl->narrow.dtype[unit_number(pl, v)] != TD_DTYPES ? v : TD_NONE;
}

/* A unit gathered again for a backward, from the part that this rank's group kept of it after the forward; TD_NONE: none was kept. */
static td_id gather_kept(par_placer *pl, td_id v, par_form form, td_placement want, const td_node *reader)
{
    int between = pl->a->between_axis;
    bool is_unit = td_producer(pl->in, v)->op == &td_op_unit, backward = reader->phase & TD_BACKWARD_PHASE;
    if (between < 0 || !is_unit || !backward || want.kind[between] != TD_REPLICATED) return TD_NONE;
    td_id forward = par_place_memo(pl, v, form, want, par_phase_key(pl, v, reader->phase - TD_BACKWARD_PHASE))->made;
    td_placement kept = pl->out->values[pl->map[v]].place;
    if (forward == TD_NONE || kept.kind[between] != TD_SHARDED) return TD_NONE;
    kept.kind[between] = TD_REPLICATED, kept.dim[between] = 0;
    kept.memory = want.memory;
    td_id part = par_convert(pl->out, forward, kept, reader);
    return part == TD_NONE ? TD_NONE : par_convert(pl->out, part, want, reader);
}

/* The stored unit v in the dtype of the form, where it is stored. */
static td_id in_form(par_placer *pl, td_id v, par_form form, const td_node *reader)
{
    return form == FORM_STORED ? pl->map[v] : par_place_cast(pl, pl->map[v], pl->narrow.dtype[unit_number(pl, v)], reader);
}

/* The copy that is kept of the stored unit v (copies.c): as an earlier step left it, else gathered, once a program. TD_NONE: none is kept
 * for readers that want it so, or after td_fail. */
static td_id copy_of(par_placer *pl, td_id v, par_form form, td_placement want, const td_node *reader)
{
    if (td_producer(pl->in, v)->op != &td_op_unit || !par_reads_copy(pl->a, td_unit_at(pl->td, unit_number(pl, v)), want)) return TD_NONE;
    td_dtype dtype = form == FORM_STORED ? (td_dtype)pl->in->values[v].dtype : pl->narrow.dtype[unit_number(pl, v)];
    uint32_t copy = par_copy_of(pl->a, unit_number(pl, v), dtype);
    if (copy == TD_NONE) return TD_NONE;
    td_placement place = td_unit_at(pl->td, copy)->place;
    td_id made = par_place_memo(pl, v, form, place, 0)->made;
    if (made != TD_NONE) return made;
    made = par_copied(pl->out, copy, reader);
    if (made == TD_NONE) {
        made = in_form(pl, v, form, reader);
        if (made != TD_NONE) made = par_convert(pl->out, made, place, reader);
        if (made == TD_NONE || !par_leave_copy(pl->out, copy, made, reader)) return TD_NONE;
    }
    return par_place_remember(pl, v, form, place, 0, made) ? made : TD_NONE;
}

/* Value v where it is wanted: a stored unit in the dtype of the form. */
td_id par_fetched(par_placer *pl, td_id v, par_form form, td_placement want, const td_node *reader)
{
    td_id made = copy_of(pl, v, form, want, reader);
    if (made != TD_NONE) return par_convert(pl->out, made, want, reader);
    made = gather_kept(pl, v, form, want, reader);
    if (made != TD_NONE) return made;
    made = in_form(pl, v, form, reader);
    return made == TD_NONE ? TD_NONE : par_convert(pl->out, made, want, reader);
}

/* The stored unit, cast and gathered: replicated, or where it is cut the row of this rank. */
static td_id narrow_unit(par_placer *pl, td_id unit, const td_node *reader)
{
    const td_unit *u = td_unit_at(pl->td, unit_number(pl, unit));
    td_placement gathered = replicated;
    if (u->cut.ways) gathered.kind[u->cut.axis] = TD_SHARDED;
    uint32_t phase = par_phase_key(pl, unit, reader->phase);
    td_id made = par_place_memo(pl, unit, FORM_NARROW, gathered, phase)->made;
    if (made != TD_NONE) return made;
    made = par_fetched(pl, unit, FORM_NARROW, gathered, reader);
    return par_place_remember(pl, unit, FORM_NARROW, gathered, phase, made) ? made : TD_NONE;
}

/* The stored unit that node n of `in` reads, if it is gathered narrow; TD_NONE otherwise. */
static td_id narrow_unit_of(const par_placer *pl, uint32_t n)
{
    td_id v = pl->in->nodes[n].output;
    return pl->in->nodes[n].op == &td_op_unit && pl->narrow.dtype[unit_number(pl, v)] != TD_DTYPES ? v : TD_NONE;
}

static td_id gather_members(par_placer *pl, const td_node *reader)
{
    size_t bytes = td_unit_count(pl->td) * sizeof(td_id);
    td_id *units = td_alloc(pl->td, bytes, "program"), own = TD_NONE;
    if (!units) return TD_NONE;
    memset(units, 0xFF, bytes);
    for (uint32_t n = 0; n < pl->in->node_count; n++) {
        td_id v = narrow_unit_of(pl, n);
        if (v == TD_NONE) continue;
        if (pl->map[v] == TD_NONE && !par_place_source(pl, n)) break; /* sources have no order */
        units[unit_number(pl, v)] = pl->map[v];
    }
    if (td_error(pl->td) == TD_OK) own = par_own_members(pl->out, &pl->narrow, units, reader);
    td_free(pl->td, units, bytes, "program");
    return own == TD_NONE ? TD_NONE : par_convert(pl->out, own, replicated, reader);
}

/* The members of narrow units that are read as they are stored, replicated: made once, for all phases, for they are small, and kept where
 * copies of all these units are. */
static td_id members_beside(par_placer *pl, const td_node *reader)
{
    bool copied = true;
    if (pl->beside != TD_NONE) return pl->beside;
    for (uint32_t n = 0; n < pl->in->node_count; n++) {
        td_id v = narrow_unit_of(pl, n);
        copied = copied && (v == TD_NONE || par_reads_copy(pl->a, td_unit_at(pl->td, unit_number(pl, v)), replicated));
    }
    uint32_t copy = copied ? par_copy_of_members(pl->td, &pl->narrow) : TD_NONE;
    if (copy != TD_NONE) pl->beside = par_copied(pl->out, copy, reader);
    if (pl->beside != TD_NONE || td_error(pl->td) != TD_OK) return pl->beside;
    pl->beside = gather_members(pl, reader);
    if (pl->beside != TD_NONE && copy != TD_NONE) par_leave_copy(pl->out, copy, pl->beside, reader);
    return pl->beside;
}

/* View v of the unit, shown of its narrow form instead, as it is naturally. */
static td_id narrow_view(par_placer *pl, td_id v, td_id unit, const td_node *reader)
{
    if (v == unit) return narrow_unit(pl, unit, reader);
    td_node n = *td_producer(pl->in, v);
    td_id from = narrow_view(pl, pl->in->inputs[n.input], unit, reader);
    if (from == TD_NONE) return TD_NONE;
    td_value value = pl->in->values[v];
    value.place = par_place_naturally(pl, v);
    value.dtype = pl->out->values[from].dtype;
    n.phase = reader->phase;
    return td_emit(pl->out, &(td_emission){ .op = n.op, .like = &n, .inputs = &from, .input_count = 1, .attr = td_node_attr(pl->in, &n),
                                            .attr_bytes = n.attr_bytes, .outputs = &value, .output_count = 1, .after = TD_NONE });
}

/* Member v of a narrow unit in the dtype it is stored in, replicated. */
static td_id stored_member(par_placer *pl, td_id v, const td_node *reader)
{
    td_node like = *td_producer(pl->in, v);
    td_part_attr attr = { .offset = pl->narrow.beside[par_state_of_part(pl->in, v)] };
    td_id from = members_beside(pl, reader);
    if (from == TD_NONE) return TD_NONE;
    td_value value = pl->in->values[v];
    value.place = replicated;
    like.phase = reader->phase;
    return td_emit(pl->out, &(td_emission){ .op = &td_op_part, .like = &like, .inputs = &from, .input_count = 1, .attr = &attr,
                                            .attr_bytes = sizeof attr, .outputs = &value, .output_count = 1, .after = TD_NONE });
}

/* Value v, made on demand, as it is naturally, if a unit that is gathered narrow is behind it; TD_NONE otherwise or after td_fail. */
td_id par_make_of_narrow(par_placer *pl, td_id v, const td_node *reader)
{
    const td_node *n = td_producer(pl->in, v);
    if (n->op != &td_op_cast && n->op != &td_op_part) return TD_NONE;
    td_id in = pl->in->inputs[n->input], unit = narrow_unit_behind(pl, in);
    if (unit == TD_NONE) return TD_NONE;
    if (n->op == &td_op_part) return stored_member(pl, v, reader);
    return pl->in->values[v].dtype == pl->narrow.dtype[unit_number(pl, unit)] ? narrow_view(pl, in, unit, reader) : TD_NONE;
}

