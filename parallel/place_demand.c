/* place: values where their readers need them: converted, or made there anew if they are made on demand.
 *
 * What was made is remembered, so that readers of one phase share it.
 */
#include "parallel/placer.h"

#include <string.h>

static const td_placement replicated;

static bool shares(td_placement place, int a, int dim) { return place.kind[a] == TD_SHARDED && place.dim[a] == dim; }

bool par_is_unit_view(const td_node *n)
{
    return (n->op->flags & TD_OP_VIEW) || n->op == &td_op_cast || n->op == &td_op_transpose;
}

static bool input_deferred(const par_placer *pl, const td_node *n, uint32_t i)
{
    return pl->deferred[pl->in->values[pl->in->inputs[n->input + i]].node] != 0;
}

/* Whether a unit's value must be gathered, or fetched from the host, for its members to be whole, or whole blocks, on the device. */
static bool is_gathered(const par_placer *pl, td_id unit)
{
    const td_value *value = &pl->out->values[pl->map[unit]];
    if (value->place.memory == TD_HOST) return true;
    for (int a = 0; a < pl->mesh->axes; a++)
        if (value->place.kind[a] == TD_PARTIAL || shares(value->place, a, (int)value->shape.rank - 1)) return true;
    return false;
}

/* Whether node n, whose inputs are placed, is made where it is read. */
bool par_is_deferred(const par_placer *pl, const td_node *n)
{
    if (n->op == &td_op_mark || n->outputs != 1) return false;
    bool all_deferred = true, all_replicated = true;
    for (uint32_t i = 0; i < n->inputs; i++) {
        td_id v = pl->in->inputs[n->input + i];
        if (input_deferred(pl, n, i)) continue;
        all_deferred = false;
        all_replicated = all_replicated && td_placement_equal(pl->out->values[pl->map[v]].place, replicated);
    }
    if (n->op->flags & TD_OP_FREE) return all_deferred || all_replicated;
    if (n->op == &td_op_part) return input_deferred(pl, n, 0) || is_gathered(pl, pl->in->inputs[n->input]);
    return n->inputs == 1 && all_deferred && par_is_unit_view(n);
}

par_memo *par_place_memo(const par_placer *pl, td_id v, par_form form, td_placement place, uint32_t phase)
{
    uint32_t at = (v * 2654435761u + phase * 40503u + (uint32_t)place.kind[0] * 97u + (uint32_t)form * 13u) & pl->memo_mask;
    for (;; at = (at + 1) & pl->memo_mask) {
        par_memo *m = &pl->memos[at];
        bool same = m->value == v && m->form == form && m->phase == phase && td_placement_equal(m->place, place);
        if (m->made == TD_NONE || same) return m;
    }
}

bool par_place_remember(par_placer *pl, td_id v, par_form form, td_placement place, uint32_t phase, td_id made)
{
    if (made == TD_NONE) return false;
    if (2 * (pl->memo_count + 1) > pl->memo_mask) {
        par_memo *old = pl->memos;
        uint32_t size = pl->memo_mask + 1;
        par_memo *larger = td_alloc(pl->td, 2 * size * sizeof *larger, "program");
        if (!larger) return false;
        memset(larger, 0xFF, 2 * size * sizeof *larger);
        pl->memos = larger;
        pl->memo_mask = 2 * size - 1;
        for (uint32_t i = 0; i < size; i++)
            if (old[i].made != TD_NONE) *par_place_memo(pl, old[i].value, old[i].form, old[i].place, old[i].phase) = old[i];
        td_free(pl->td, old, size * sizeof *old, "program");
    }
    *par_place_memo(pl, v, form, place, phase) = (par_memo){ v, phase, form, place, made };
    pl->memo_count++;
    return true;
}

static bool is_root_unit(const par_placer *pl, td_id v)
{
    const td_node *n = td_producer(pl->in, v);
    return n->op == &td_op_unit && td_unit_at(pl->td, ((const td_unit_attr *)td_node_attr(pl->in, n))->unit)->root;
}

/* What is made for one phase is made again for another, but for units that stay gathered between forward and backward, and for
 * computed values, which are converted once. */
uint32_t par_phase_key(const par_placer *pl, td_id v, uint32_t phase)
{
    const td_node *n = td_producer(pl->in, v);
    if (!pl->deferred[pl->in->values[v].node] && n->op != &td_op_unit) return 0;
    return is_root_unit(pl, v) ? phase & ~1u : phase;
}

void par_rule_of(const td_program *p, const td_node *n, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    if (n->op->place) n->op->place(p, n, rule);
}

/* The dimension of value v that row `labels` gives `label`; -1: none. */
int par_dim_of_label(const td_program *p, td_id v, const int8_t *labels, int8_t label)
{
    for (int d = 0; d < p->values[v].shape.rank; d++)
        if (labels[d] == label) return d;
    return -1;
}

/* What input i must be so that output 0 is `want`. */
static td_placement input_for(const par_placer *pl, const td_node *n, const td_place_rule *rule, uint32_t i, td_placement want)
{
    td_placement place = { .memory = want.memory };
    td_id v = pl->in->inputs[n->input + i];
    for (int a = 0; a < pl->mesh->axes; a++) {
        if (want.kind[a] != TD_SHARDED) continue;
        int8_t label = rule->out[0][(int)want.dim[a]];
        int d = label ? par_dim_of_label(pl->in, v, rule->in[par_rule_row(i, TD_RULE_INPUTS)], label) : -1;
        if (d >= 0) place.kind[a] = TD_SHARDED, place.dim[a] = (int8_t)d;
    }
    return place;
}

/* How many parts `place` makes of dimension dim. */
int64_t par_parts_of(const par_placer *pl, td_placement place, int dim)
{
    int64_t parts = 1;
    for (int a = 0; a < pl->mesh->axes; a++)
        if (shares(place, a, dim)) parts *= pl->mesh->size[a];
    return parts;
}

/* Whether value v, made on demand by n, can be made as `want` at once; else it is made as it is naturally, and converted. */
static bool makes_directly(const par_placer *pl, const td_node *n, const td_place_rule *rule, td_id v, td_placement want)
{
    for (int a = 0; a < pl->mesh->axes; a++) {
        int dim = want.dim[a];
        if (want.kind[a] == TD_PARTIAL) return false;
        if (pl->natural[v].kind[a] == TD_SHARDED && !shares(want, a, pl->natural[v].dim[a])) return false;
        if (want.kind[a] != TD_SHARDED) continue;
        int64_t parts = par_parts_of(pl, want, dim);
        int8_t label = rule->out[0][dim];
        if (pl->in->values[v].shape.dim[dim] % parts || rule->even[label] % parts || (n->inputs && !label)) return false;
    }
    return true;
}

/* Without communication, whole where that leaves a choice. */
td_placement par_place_naturally(const par_placer *pl, td_id v)
{
    td_placement place = pl->natural[v];
    for (int a = 0; a < pl->mesh->axes; a++)
        if (place.kind[a] == TD_FREE) place.kind[a] = TD_REPLICATED;
    return place;
}

static td_id make_deferred(par_placer *pl, td_id v, td_placement want, const td_node *reader)
{
    td_node n = *td_producer(pl->in, v);
    td_place_rule rule;
    td_id made = par_make_of_narrow(pl, v, reader);
    if (made != TD_NONE) return par_convert(pl->out, made, want, reader);
    par_rule_of(pl->in, &n, &rule);
    if (!makes_directly(pl, &n, &rule, v, want)) {
        made = par_need(pl, v, par_place_naturally(pl, v), reader);
        return made == TD_NONE ? TD_NONE : par_convert(pl->out, made, want, reader);
    }
    td_id inputs[PAR_FEW];
    if (n.inputs > PAR_FEW) {
        td_fail(pl->td, TD_ERROR_UNSUPPORTED, "place: %s has %u inputs, at most %d can be made where they are read", n.op->name, n.inputs, PAR_FEW);
        return TD_NONE;
    }
    for (uint32_t i = 0; i < n.inputs; i++) {
        inputs[i] = par_need(pl, pl->in->inputs[n.input + i], input_for(pl, &n, &rule, i, want), reader);
        if (inputs[i] == TD_NONE) return TD_NONE;
    }
    td_value value = pl->in->values[v];
    value.place = want;
    td_node like = n;
    like.phase = reader->phase;
    return td_emit(pl->out, &(td_emission){ .op = n.op, .like = &like, .inputs = inputs, .input_count = (int)n.inputs,
                                            .attr = td_node_attr(pl->in, &n), .attr_bytes = n.attr_bytes, .outputs = &value, .output_count = 1,
                                            .after = TD_NONE });
}

/* A learning rate, say: the caller's scalars are in host memory to begin with. */
static bool is_scalar_for_host(const par_placer *pl, td_id v, td_placement want)
{
    return td_producer(pl->in, v)->op == &td_op_scalar && td_placement_equal(want, (td_placement){ .memory = TD_HOST });
}

td_id par_place_result(par_placer *pl, td_id v, td_placement place)
{
    const td_node *n = td_producer(pl->in, v);
    td_value value = pl->in->values[v];
    value.place = place;
    return td_emit(pl->out, &(td_emission){ .op = n->op, .like = n, .attr = td_node_attr(pl->in, n), .attr_bytes = n->attr_bytes,
                                            .outputs = &value, .output_count = 1, .after = TD_NONE });
}

/* The value of `out` that is v of `in` in placement `want`, for a reader. */
td_id par_need(par_placer *pl, td_id v, td_placement want, const td_node *reader)
{
    bool deferred = pl->deferred[pl->in->values[v].node] != 0;
    if (!deferred && td_placement_equal(pl->out->values[pl->map[v]].place, want)) return pl->map[v];
    uint32_t phase = par_phase_key(pl, v, reader->phase);
    td_id made = par_place_memo(pl, v, FORM_STORED, want, phase)->made;
    if (made != TD_NONE) return made;
    made = deferred                          ? make_deferred(pl, v, want, reader)
           : is_scalar_for_host(pl, v, want) ? par_place_result(pl, v, want)
                                             : par_fetched(pl, v, FORM_STORED, want, reader);
    return par_place_remember(pl, v, FORM_STORED, want, phase, made) ? made : TD_NONE;
}
