/* place: gives every value a placement, and converts where a reader needs another one than a value has.
 *
 * A node's placement follows from its inputs' by its operation's rule (td_place_rule): a sharded label that the output
 * has stays sharded, one it lacks is summed over, so the output is partial. Marks say what the strategy wants; they
 * dissolve here.
 *
 * Some values are not placed where they are recorded but made where they are read, in the placement and phase of the
 * reader: fills, random draws, spreads of replicated values (operations with TD_OP_FREE), and views of sharded units
 * with the casts and transposes of such views. So no rank makes a global mask to take a slice of it, and a unit that is
 * gathered for the forward is gathered again for the backward, unless it is the root or a copy of it is kept (copies.c). Where products
 * read a unit's members in bf16, each rank's part is cast and then gathered (narrow.c).
 *
 * What computes on state in host memory as it is stored, an update or an average, does so there; all else is on the device.
 *
 * A unit may also be kept in part: gathered between groups of ranks for the forward and left sharded within them, so that the backward
 * gathers within a group.
 *
 * Nothing here knows of tensor parallelism: parameters that are cut by a dimension enter sharded along it. A linear layer that
 * is cut by its outputs keeps the label, one that is cut by its inputs contracts it, and its output is partial.
 */
#include "parallel/strategy.h"

#include <string.h>

/* What of a value is made: the value, or of a unit a cast to what its readers compute in. */
typedef enum form { FORM_STORED, FORM_NARROW } form;

typedef struct memo {
    td_id value;                              /* of `in` */
    uint32_t phase;
    form form;
    td_placement place;
    td_id made;                               /* of `out`; TD_NONE: empty */
} memo;

typedef struct placer {
    par_attached *a;
    td_context *td;
    const td_mesh *mesh;
    const td_program *in;
    td_program *out;
    td_id *map;                               /* value of in -> of out, TD_NONE if it is made on demand */
    char *deferred;                           /* node of in */
    td_placement *natural;                    /* value of in, if made on demand: what it is without communication, free otherwise */
    par_narrow narrow;                        /* units that are gathered in a narrower dtype than they are stored in */
    td_id beside;                             /* value of out: the members of such units that are read as stored; TD_NONE: not made */
    memo *memos;
    uint32_t memo_count, memo_mask;
    void *memory;
    size_t bytes;
} placer;

static const td_placement replicated;

/* ---- Values made on demand */

static bool shares(td_placement place, int a, int dim) { return place.kind[a] == TD_SHARDED && place.dim[a] == dim; }

bool par_is_unit_view(const td_node *n)
{
    return (n->op->flags & TD_OP_VIEW) || n->op == &td_op_cast || n->op == &td_op_transpose;
}

static bool input_deferred(const placer *pl, const td_node *n, uint32_t i)
{
    return pl->deferred[pl->in->values[pl->in->inputs[n->input + i]].node] != 0;
}

/* Whether a unit's value must be gathered, or fetched from the host, for its members to be whole, or whole blocks, on the device. */
static bool is_gathered(const placer *pl, td_id unit)
{
    const td_value *value = &pl->out->values[pl->map[unit]];
    if (value->place.memory == TD_HOST) return true;
    for (int a = 0; a < pl->mesh->axes; a++)
        if (value->place.kind[a] == TD_PARTIAL || shares(value->place, a, (int)value->shape.rank - 1)) return true;
    return false;
}

/* Whether node n, whose inputs are placed, is made where it is read. */
static bool is_deferred(const placer *pl, const td_node *n)
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

static td_id need(placer *pl, td_id v, td_placement want, const td_node *reader);

static memo *find_memo(const placer *pl, td_id v, form form, td_placement place, uint32_t phase)
{
    uint32_t at = (v * 2654435761u + phase * 40503u + (uint32_t)place.kind[0] * 97u + (uint32_t)form * 13u) & pl->memo_mask;
    for (;; at = (at + 1) & pl->memo_mask) {
        memo *m = &pl->memos[at];
        bool same = m->value == v && m->form == form && m->phase == phase && td_placement_equal(m->place, place);
        if (m->made == TD_NONE || same) return m;
    }
}

static bool remember(placer *pl, td_id v, form form, td_placement place, uint32_t phase, td_id made)
{
    if (made == TD_NONE) return false;
    if (2 * (pl->memo_count + 1) > pl->memo_mask) {
        memo *old = pl->memos;
        uint32_t size = pl->memo_mask + 1;
        memo *larger = td_alloc(pl->td, 2 * size * sizeof *larger, "program");
        if (!larger) return false;
        memset(larger, 0xFF, 2 * size * sizeof *larger);
        pl->memos = larger;
        pl->memo_mask = 2 * size - 1;
        for (uint32_t i = 0; i < size; i++)
            if (old[i].made != TD_NONE) *find_memo(pl, old[i].value, old[i].form, old[i].place, old[i].phase) = old[i];
        td_free(pl->td, old, size * sizeof *old, "program");
    }
    *find_memo(pl, v, form, place, phase) = (memo){ v, phase, form, place, made };
    pl->memo_count++;
    return true;
}

static bool is_root_unit(const placer *pl, td_id v)
{
    const td_node *n = td_producer(pl->in, v);
    return n->op == &td_op_unit && td_unit_at(pl->td, ((const td_unit_attr *)td_node_attr(pl->in, n))->unit)->root;
}

/* What is made for one phase is made again for another, but for units that stay gathered between forward and backward, and for
 * computed values, which are converted once. */
static uint32_t phase_key(const placer *pl, td_id v, uint32_t phase)
{
    const td_node *n = td_producer(pl->in, v);
    if (!pl->deferred[pl->in->values[v].node] && n->op != &td_op_unit) return 0;
    return is_root_unit(pl, v) ? phase & ~1u : phase;
}

static void rule_of(const td_program *p, const td_node *n, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    if (n->op->place) n->op->place(p, n, rule);
}

static int rule_row(uint32_t i, int rows) { return (int)i < rows ? (int)i : rows - 1; }

/* The dimension of value v that row `labels` gives `label`; -1: none. */
static int dim_of_label(const td_program *p, td_id v, const int8_t *labels, int8_t label)
{
    for (int d = 0; d < p->values[v].shape.rank; d++)
        if (labels[d] == label) return d;
    return -1;
}

/* What input i must be so that output 0 is `want`. */
static td_placement input_for(const placer *pl, const td_node *n, const td_place_rule *rule, uint32_t i, td_placement want)
{
    td_placement place = { .memory = want.memory };
    td_id v = pl->in->inputs[n->input + i];
    for (int a = 0; a < pl->mesh->axes; a++) {
        if (want.kind[a] != TD_SHARDED) continue;
        int8_t label = rule->out[0][(int)want.dim[a]];
        int d = label ? dim_of_label(pl->in, v, rule->in[rule_row(i, TD_RULE_INPUTS)], label) : -1;
        if (d >= 0) place.kind[a] = TD_SHARDED, place.dim[a] = (int8_t)d;
    }
    return place;
}

/* How many parts `place` makes of dimension dim. */
static int64_t parts_of(const placer *pl, td_placement place, int dim)
{
    int64_t parts = 1;
    for (int a = 0; a < pl->mesh->axes; a++)
        if (shares(place, a, dim)) parts *= pl->mesh->size[a];
    return parts;
}

/* Whether value v, made on demand by n, can be made as `want` at once; else it is made as it is naturally, and converted. */
static bool makes_directly(const placer *pl, const td_node *n, const td_place_rule *rule, td_id v, td_placement want)
{
    for (int a = 0; a < pl->mesh->axes; a++) {
        int dim = want.dim[a];
        if (want.kind[a] == TD_PARTIAL) return false;
        if (pl->natural[v].kind[a] == TD_SHARDED && !shares(want, a, pl->natural[v].dim[a])) return false;
        if (want.kind[a] != TD_SHARDED) continue;
        int64_t parts = parts_of(pl, want, dim);
        int8_t label = rule->out[0][dim];
        if (pl->in->values[v].shape.dim[dim] % parts || rule->even[label] % parts || (n->inputs && !label)) return false;
    }
    return true;
}

/* Without communication, whole where that leaves a choice. */
static td_placement naturally(const placer *pl, td_id v)
{
    td_placement place = pl->natural[v];
    for (int a = 0; a < pl->mesh->axes; a++)
        if (place.kind[a] == TD_FREE) place.kind[a] = TD_REPLICATED;
    return place;
}

/* ---- Units that are gathered narrow (narrow.c) */

static uint32_t unit_number(const placer *pl, td_id v) { return ((const td_unit_attr *)td_node_attr(pl->in, td_producer(pl->in, v)))->unit; }

/* The stored unit behind v, which shows a member of it through views, if that is gathered narrow; TD_NONE otherwise. */
static td_id narrow_unit_behind(const placer *pl, td_id v)
{
    const td_node *n = td_producer(pl->in, v);
    while (n->inputs == 1 && (par_is_unit_view(n) || n->op == &td_op_part) && n->op != &td_op_cast) {
        v = pl->in->inputs[n->input];
        n = td_producer(pl->in, v);
    }
    return n->op == &td_op_unit && pl->narrow.dtype[unit_number(pl, v)] != TD_DTYPES ? v : TD_NONE;
}

static td_id cast(placer *pl, td_id id, td_dtype dtype, const td_node *like);

/* A unit gathered again for a backward, from the part that this rank's group kept of it after the forward; TD_NONE: none was kept. */
static td_id gather_kept(placer *pl, td_id v, form form, td_placement want, const td_node *reader)
{
    int between = pl->a->between_axis;
    bool is_unit = td_producer(pl->in, v)->op == &td_op_unit, backward = reader->phase & TD_BACKWARD_PHASE;
    if (between < 0 || !is_unit || !backward || want.kind[between] != TD_REPLICATED) return TD_NONE;
    td_id forward = find_memo(pl, v, form, want, phase_key(pl, v, reader->phase - TD_BACKWARD_PHASE))->made;
    td_placement kept = pl->out->values[pl->map[v]].place;
    if (forward == TD_NONE || kept.kind[between] != TD_SHARDED) return TD_NONE;
    kept.kind[between] = TD_REPLICATED, kept.dim[between] = 0;
    kept.memory = want.memory;
    td_id part = par_convert(pl->out, forward, kept, reader);
    return part == TD_NONE ? TD_NONE : par_convert(pl->out, part, want, reader);
}

/* The stored unit v in the dtype of the form, where it is stored. */
static td_id in_form(placer *pl, td_id v, form form, const td_node *reader)
{
    return form == FORM_STORED ? pl->map[v] : cast(pl, pl->map[v], pl->narrow.dtype[unit_number(pl, v)], reader);
}

/* The copy that is kept of the stored unit v (copies.c): as an earlier step left it, else gathered, once a program. TD_NONE: none is kept
 * for readers that want it so, or after td_fail. */
static td_id copy_of(placer *pl, td_id v, form form, td_placement want, const td_node *reader)
{
    if (td_producer(pl->in, v)->op != &td_op_unit || !par_reads_copy(pl->a, td_unit_at(pl->td, unit_number(pl, v)), want)) return TD_NONE;
    td_dtype dtype = form == FORM_STORED ? (td_dtype)pl->in->values[v].dtype : pl->narrow.dtype[unit_number(pl, v)];
    uint32_t copy = par_copy_of(pl->a, unit_number(pl, v), dtype);
    if (copy == TD_NONE) return TD_NONE;
    td_placement place = td_unit_at(pl->td, copy)->place;
    td_id made = find_memo(pl, v, form, place, 0)->made;
    if (made != TD_NONE) return made;
    made = par_copied(pl->out, copy, reader);
    if (made == TD_NONE) {
        made = in_form(pl, v, form, reader);
        if (made != TD_NONE) made = par_convert(pl->out, made, place, reader);
        if (made == TD_NONE || !par_leave_copy(pl->out, copy, made, reader)) return TD_NONE;
    }
    return remember(pl, v, form, place, 0, made) ? made : TD_NONE;
}

/* Value v where it is wanted: a stored unit in the dtype of the form. */
static td_id fetched(placer *pl, td_id v, form form, td_placement want, const td_node *reader)
{
    td_id made = copy_of(pl, v, form, want, reader);
    if (made != TD_NONE) return par_convert(pl->out, made, want, reader);
    made = gather_kept(pl, v, form, want, reader);
    if (made != TD_NONE) return made;
    made = in_form(pl, v, form, reader);
    return made == TD_NONE ? TD_NONE : par_convert(pl->out, made, want, reader);
}

/* The stored unit, cast and gathered: replicated, or where it is cut the row of this rank. */
static td_id narrow_unit(placer *pl, td_id unit, const td_node *reader)
{
    const td_unit *u = td_unit_at(pl->td, unit_number(pl, unit));
    td_placement gathered = replicated;
    if (u->cut.ways) gathered.kind[u->cut.axis] = TD_SHARDED;
    uint32_t phase = phase_key(pl, unit, reader->phase);
    td_id made = find_memo(pl, unit, FORM_NARROW, gathered, phase)->made;
    if (made != TD_NONE) return made;
    made = fetched(pl, unit, FORM_NARROW, gathered, reader);
    return remember(pl, unit, FORM_NARROW, gathered, phase, made) ? made : TD_NONE;
}

static bool place_source(placer *pl, uint32_t index);

/* The stored unit that node n of `in` reads, if it is gathered narrow; TD_NONE otherwise. */
static td_id narrow_unit_of(const placer *pl, uint32_t n)
{
    td_id v = pl->in->nodes[n].output;
    return pl->in->nodes[n].op == &td_op_unit && pl->narrow.dtype[unit_number(pl, v)] != TD_DTYPES ? v : TD_NONE;
}

static td_id gather_members(placer *pl, const td_node *reader)
{
    size_t bytes = td_unit_count(pl->td) * sizeof(td_id);
    td_id *units = td_alloc(pl->td, bytes, "program"), own = TD_NONE;
    if (!units) return TD_NONE;
    memset(units, 0xFF, bytes);
    for (uint32_t n = 0; n < pl->in->node_count; n++) {
        td_id v = narrow_unit_of(pl, n);
        if (v == TD_NONE) continue;
        if (pl->map[v] == TD_NONE && !place_source(pl, n)) break; /* sources have no order */
        units[unit_number(pl, v)] = pl->map[v];
    }
    if (td_error(pl->td) == TD_OK) own = par_own_members(pl->out, &pl->narrow, units, reader);
    td_free(pl->td, units, bytes, "program");
    return own == TD_NONE ? TD_NONE : par_convert(pl->out, own, replicated, reader);
}

/* The members of narrow units that are read as they are stored, replicated: made once, for all phases, for they are small, and kept where
 * copies of all these units are. */
static td_id members_beside(placer *pl, const td_node *reader)
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
static td_id narrow_view(placer *pl, td_id v, td_id unit, const td_node *reader)
{
    if (v == unit) return narrow_unit(pl, unit, reader);
    td_node n = *td_producer(pl->in, v);
    td_id from = narrow_view(pl, pl->in->inputs[n.input], unit, reader);
    if (from == TD_NONE) return TD_NONE;
    td_value value = pl->in->values[v];
    value.place = naturally(pl, v);
    value.dtype = pl->out->values[from].dtype;
    n.phase = reader->phase;
    return td_emit(pl->out, &(td_emission){ .op = n.op, .like = &n, .inputs = &from, .input_count = 1, .attr = td_node_attr(pl->in, &n),
                                            .attr_bytes = n.attr_bytes, .outputs = &value, .output_count = 1, .after = TD_NONE });
}

/* Member v of a narrow unit in the dtype it is stored in, replicated. */
static td_id stored_member(placer *pl, td_id v, const td_node *reader)
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
static td_id make_of_narrow(placer *pl, td_id v, const td_node *reader)
{
    const td_node *n = td_producer(pl->in, v);
    if (n->op != &td_op_cast && n->op != &td_op_part) return TD_NONE;
    td_id in = pl->in->inputs[n->input], unit = narrow_unit_behind(pl, in);
    if (unit == TD_NONE) return TD_NONE;
    if (n->op == &td_op_part) return stored_member(pl, v, reader);
    return pl->in->values[v].dtype == pl->narrow.dtype[unit_number(pl, unit)] ? narrow_view(pl, in, unit, reader) : TD_NONE;
}

enum { FEW = 16 };

static td_id make_deferred(placer *pl, td_id v, td_placement want, const td_node *reader)
{
    td_node n = *td_producer(pl->in, v);
    td_place_rule rule;
    td_id made = make_of_narrow(pl, v, reader);
    if (made != TD_NONE) return par_convert(pl->out, made, want, reader);
    rule_of(pl->in, &n, &rule);
    if (!makes_directly(pl, &n, &rule, v, want)) {
        made = need(pl, v, naturally(pl, v), reader);
        return made == TD_NONE ? TD_NONE : par_convert(pl->out, made, want, reader);
    }
    td_id inputs[FEW];
    if (n.inputs > FEW) {
        td_fail(pl->td, TD_ERROR_UNSUPPORTED, "place: %s has %u inputs, at most %d can be made where they are read", n.op->name, n.inputs, FEW);
        return TD_NONE;
    }
    for (uint32_t i = 0; i < n.inputs; i++) {
        inputs[i] = need(pl, pl->in->inputs[n.input + i], input_for(pl, &n, &rule, i, want), reader);
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
static bool is_scalar_for_host(const placer *pl, td_id v, td_placement want)
{
    return td_producer(pl->in, v)->op == &td_op_scalar && td_placement_equal(want, (td_placement){ .memory = TD_HOST });
}

static td_id source(placer *pl, td_id v, td_placement place)
{
    const td_node *n = td_producer(pl->in, v);
    td_value value = pl->in->values[v];
    value.place = place;
    return td_emit(pl->out, &(td_emission){ .op = n->op, .like = n, .attr = td_node_attr(pl->in, n), .attr_bytes = n->attr_bytes,
                                            .outputs = &value, .output_count = 1, .after = TD_NONE });
}

/* The value of `out` that is v of `in` in placement `want`, for a reader. */
static td_id need(placer *pl, td_id v, td_placement want, const td_node *reader)
{
    bool deferred = pl->deferred[pl->in->values[v].node] != 0;
    if (!deferred && td_placement_equal(pl->out->values[pl->map[v]].place, want)) return pl->map[v];
    uint32_t phase = phase_key(pl, v, reader->phase);
    td_id made = find_memo(pl, v, FORM_STORED, want, phase)->made;
    if (made != TD_NONE) return made;
    made = deferred                          ? make_deferred(pl, v, want, reader)
           : is_scalar_for_host(pl, v, want) ? source(pl, v, want)
                                             : fetched(pl, v, FORM_STORED, want, reader);
    return remember(pl, v, FORM_STORED, want, phase, made) ? made : TD_NONE;
}

/* ---- Nodes placed where they are recorded */

/* Where v is to be had for nothing. A sum that an earlier reader has taken already is whole: else what it is added to, a residual say,
 * would be partial from there on, and each reader of that would take a sum anew. */
static td_placement have(const placer *pl, td_id v)
{
    if (pl->deferred[pl->in->values[v].node]) return pl->natural[v];
    td_placement place = pl->out->values[pl->map[v]].place, whole = place;
    bool partial = false;
    for (int a = 0; a < pl->mesh->axes; a++) {
        if (place.kind[a] != TD_PARTIAL) continue;
        whole.kind[a] = TD_REPLICATED;
        partial = true;
    }
    return partial && find_memo(pl, v, FORM_STORED, whole, 0)->made != TD_NONE ? whole : place;
}

/* A unit that is cut is packed of parts, whatever its gradients have become. */
static bool packs_parts(const placer *pl, const td_node *n, int a)
{
    if (n->op != &td_op_pack) return false;
    td_cut cut = td_unit_at(pl->td, ((const td_pack_attr *)td_node_attr(pl->in, n))->unit)->cut;
    return cut.ways && cut.axis == a;
}

/* The label that is sharded on axis a, by the first input that has one; 0: none. */
static int8_t sharded_label(const placer *pl, const td_node *n, const td_place_rule *rule, int a)
{
    if (packs_parts(pl, n, a)) return rule->out[0][0];
    for (uint32_t i = 0; i < n->inputs; i++) {
        td_placement place = have(pl, pl->in->inputs[n->input + i]);
        if (place.kind[a] != TD_SHARDED) continue;
        int8_t label = rule->in[rule_row(i, TD_RULE_INPUTS)][(int)place.dim[a]];
        if (label && rule->even[label] % parts_of(pl, place, place.dim[a]) == 0) return label;
    }
    return 0;
}

/* Deferred nodes: where the parts of their inputs lead by the rule. */
static bool defer(placer *pl, uint32_t index)
{
    const td_node *n = &pl->in->nodes[index];
    td_place_rule rule;
    rule_of(pl->in, n, &rule);
    td_placement place = replicated;
    for (int a = 0; a < pl->mesh->axes; a++) {
        int8_t label = n->inputs ? sharded_label(pl, n, &rule, a) : 0;
        int d = label ? dim_of_label(pl->in, n->output, rule.out[0], label) : -1;
        place.kind[a] = d < 0 ? TD_FREE : TD_SHARDED;
        place.dim[a] = (int8_t)(d < 0 ? 0 : d);
    }
    pl->natural[n->output] = place;
    pl->deferred[index] = 1;
    return true;
}

static uint32_t partial_inputs(const placer *pl, const td_node *n, int a)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < n->inputs; i++) count += have(pl, pl->in->inputs[n->input + i]).kind[a] == TD_PARTIAL;
    return count;
}

/* Placement of input i on axis a: the dimension with the sharded label, or what the rule for sums allows. */
static void place_input(const placer *pl, const td_node *n, const td_place_rule *rule, int a, uint32_t i, int8_t label, bool *partial_used,
                        td_placement *to)
{
    td_id v = pl->in->inputs[n->input + i];
    int d = label ? dim_of_label(pl->in, v, rule->in[rule_row(i, TD_RULE_INPUTS)], label) : -1;
    to->kind[a] = TD_REPLICATED;
    to->dim[a] = 0;
    bool summed = label && dim_of_label(pl->in, n->output, rule->out[0], label) < 0;
    if (d >= 0) {
        to->kind[a] = TD_SHARDED;
        to->dim[a] = (int8_t)d;
    } else if (summed && rule->added >> i & 1) {
        to->kind[a] = TD_PARTIAL;
    } else if (!label && rule->partial == TD_PARTIAL_JOINT && partial_inputs(pl, n, a)) {
        to->kind[a] = TD_PARTIAL;
    } else if (!label && rule->partial == TD_PARTIAL_EACH && have(pl, v).kind[a] == TD_PARTIAL && !*partial_used) {
        to->kind[a] = TD_PARTIAL;
        *partial_used = true;
    }
}

static td_placement place_output(const placer *pl, const td_node *n, const td_place_rule *rule, uint32_t k, const int8_t *labels, const bool *partial)
{
    td_placement out = replicated;
    for (int a = 0; a < pl->mesh->axes; a++) {
        int d = labels[a] ? dim_of_label(pl->in, n->output + k, rule->out[rule_row(k, TD_RULE_OUTPUTS)], labels[a]) : -1;
        if (d >= 0) {
            out.kind[a] = TD_SHARDED;
            out.dim[a] = (int8_t)d;
        } else if (labels[a] || partial[a]) {
            out.kind[a] = TD_PARTIAL;
        }
    }
    return out;
}

/* An update is computed where its moments are, without any where the parameter is; what is pointwise, where one of its operands is in
 * host memory, there. Members of units are read on the device. */
static td_memory memory_of(const placer *pl, const td_node *n)
{
    const td_id *in = td_node_inputs(pl->in, n);
    if (n->op == &td_op_update_unit) {
        bool has_moments = ((const td_update_attr *)td_node_attr(pl->in, n))->moments > 0;
        return (td_memory)have(pl, in[has_moments ? 2 : 0]).memory;
    }
    bool host = false;
    for (uint32_t i = 0; i < n->inputs && n->op->flags & TD_OP_POINTWISE; i++) host = host || have(pl, in[i]).memory == TD_HOST;
    return host ? TD_HOST : TD_DEVICE;
}

/* Rows of a table are updated where their gradients are. */
static bool refuse_rows(const placer *pl, const td_node *n)
{
    if (n->op != &td_op_update_rows || !pl->a->options.offload) return false;
    const td_unit *u = td_unit_at(pl->td, ((const td_update_rows_attr *)td_node_attr(pl->in, n))->unit);
    td_fail(pl->td, TD_ERROR_UNSUPPORTED, "offload: '%s' is updated row by row, which is done on the device; leave the offload out, or choose "
            "dense gradients and an optimizer with a moment for each element", td_state_name((td_state){ pl->td, u->members[0].state }));
    return true;
}

static bool place_by_rule(placer *pl, uint32_t index)
{
    td_node n = pl->in->nodes[index];
    td_place_rule rule;
    td_memory memory = memory_of(pl, &n);
    int8_t labels[TD_MAX_AXES] = { 0 };
    bool partial[TD_MAX_AXES] = { false };
    if (!n.op->place && pl->mesh->axes) {
        td_fail(pl->td, TD_ERROR_UNSUPPORTED, "%s: has no placement rule, so it cannot run on several ranks (%s:%d)", n.op->name,
                n.file ? n.file : "?", n.line);
        return false;
    }
    if (refuse_rows(pl, &n)) return false;
    rule_of(pl->in, &n, &rule);
    td_id few[FEW], *inputs = few;
    if (n.inputs > FEW && !(inputs = td_alloc(pl->td, n.inputs * sizeof *inputs, "program"))) return false;
    for (int a = 0; a < pl->mesh->axes; a++) labels[a] = sharded_label(pl, &n, &rule, a);
    bool each_used[TD_MAX_AXES] = { false };
    for (uint32_t i = 0; i < n.inputs; i++) {
        td_placement to = { .memory = (int8_t)memory };
        for (int a = 0; a < pl->mesh->axes; a++) {
            place_input(pl, &n, &rule, a, i, labels[a], &each_used[a], &to);
            partial[a] = partial[a] || to.kind[a] == TD_PARTIAL;
        }
        inputs[i] = need(pl, pl->in->inputs[n.input + i], to, &n);
        if (inputs[i] == TD_NONE) break;
    }
    td_value outputs[TD_CALL_OUTPUTS];
    for (uint32_t k = 0; k < n.outputs; k++) {
        outputs[k] = pl->in->values[n.output + k];
        outputs[k].place = place_output(pl, &n, &rule, k, labels, partial);
        outputs[k].place.memory = (int8_t)memory;
    }
    td_id first = td_error(pl->td) != TD_OK
                      ? TD_NONE
                      : td_emit(pl->out, &(td_emission){ .op = n.op, .like = &n, .inputs = inputs, .input_count = (int)n.inputs,
                                                         .attr = td_node_attr(pl->in, &n), .attr_bytes = n.attr_bytes, .outputs = outputs,
                                                         .output_count = (int)n.outputs,
                                                         .after = n.after == TD_NONE ? TD_NONE : pl->map[n.after] });
    if (inputs != few) td_free(pl->td, inputs, n.inputs * sizeof *inputs, "program");
    for (uint32_t k = 0; k < n.outputs; k++) pl->map[n.output + k] = first == TD_NONE ? TD_NONE : first + k;
    return td_error(pl->td) == TD_OK;
}

/* The rows of a batch are cut along all axes but those whose ranks have the same ones. */
static bool place_rows(const placer *pl, const td_node *n, td_value *value)
{
    uint32_t rows = ((const td_input_attr *)td_node_attr(pl->in, n))->rows_local;
    int part, parts;
    td_mesh_rows(pl->mesh, &part, &parts);
    if (rows == 2) parts = pl->mesh->world;
    if (rows && value->shape.dim[0] % parts) {
        td_fail(pl->td, TD_ERROR_USAGE, "input: a batch of %lld rows cannot be divided among %d ranks (%s:%d)",
                (long long)value->shape.dim[0], parts, n->file ? n->file : "?", n->line);
        return false;
    }
    for (int a = 0; a < pl->mesh->axes; a++)
        if (rows == 2 || (rows && !pl->mesh->same_rows[a])) value->place.kind[a] = TD_SHARDED;
    return true;
}

static bool place_source(placer *pl, uint32_t index)
{
    td_node n = pl->in->nodes[index];
    td_value value = pl->in->values[n.output];
    if (n.op == &td_op_input && !place_rows(pl, &n, &value)) return false;
    pl->map[n.output] = source(pl, n.output, value.place);
    return pl->map[n.output] != TD_NONE;
}

static bool is_summed(const td_mesh *mesh, td_placement from, td_placement to)
{
    bool summed = false;
    for (int a = 0; a < mesh->axes; a++) summed = summed || (from.kind[a] == TD_PARTIAL && to.kind[a] != TD_PARTIAL);
    return summed;
}

static td_id cast(placer *pl, td_id id, td_dtype dtype, const td_node *like)
{
    td_value value = pl->out->values[id];
    value.dtype = (uint8_t)dtype;
    return td_emit(pl->out, &(td_emission){ .op = &td_op_cast, .like = like, .inputs = &id, .input_count = 1, .attr = &(td_cast_attr){ .dtype = (int32_t)dtype },
                                            .attr_bytes = td_op_cast.attr_bytes, .outputs = &value, .output_count = 1, .after = TD_NONE });
}

/* A gradient in another placement: summed in the dtype that the options ask for. */
static td_id reduced(placer *pl, td_id v, td_placement place, const td_node *mark)
{
    td_dtype stored = (td_dtype)pl->in->values[v].dtype, sums = pl->a->options.reduce_dtype == TD_BF16 ? TD_BF16 : stored;
    bool deferred = pl->deferred[pl->in->values[v].node] != 0;
    if (sums == stored || deferred || !is_summed(pl->mesh, have(pl, v), place)) return need(pl, v, place, mark);
    td_id narrow = cast(pl, pl->map[v], sums, mark);
    if (narrow != TD_NONE) narrow = par_convert(pl->out, narrow, place, mark);
    return narrow == TD_NONE ? TD_NONE : cast(pl, narrow, stored, mark);
}

/* A mark becomes its input, placed as the strategy says. */
static bool dissolve_mark(placer *pl, uint32_t index)
{
    td_node n = pl->in->nodes[index];
    const td_mark_attr *m = td_node_attr(pl->in, &n);
    td_id v = pl->in->inputs[n.input];
    td_placement place = have(pl, v);
    const td_unit *u = td_unit_at(pl->td, m->unit);
    for (int a = 0; a < pl->mesh->axes; a++) {
        const par_axis *x = &pl->a->axis[a];
        if (u->cut.ways && a == u->cut.axis) { /* by rows, as it is packed */
            place.kind[a] = TD_SHARDED, place.dim[a] = 0;
            continue;
        }
        int wanted = m->kind == TD_MARK_GRADIENT ? x->gradient : m->kind == TD_MARK_OPTIMIZER ? x->optimizer_gradient : x->accumulator;
        if (wanted != PAR_AS_IS) place.kind[a] = (int8_t)wanted;
        if (place.kind[a] == TD_FREE) place.kind[a] = TD_REPLICATED;
        place.dim[a] = (int8_t)(place.kind[a] == TD_SHARDED ? td_unit_flat_dim(u) : 0);
    }
    pl->map[n.output] = reduced(pl, v, place, &n);
    return pl->map[n.output] != TD_NONE;
}

static bool place_effect(placer *pl, uint32_t index)
{
    td_node n = pl->in->nodes[index];
    td_placement want = replicated;
    if (n.op == &td_op_store) want = td_unit_at(pl->td, ((const td_unit_attr *)td_node_attr(pl->in, &n))->unit)->place;
    td_id in = need(pl, pl->in->inputs[n.input], want, &n);
    if (in == TD_NONE) return false;
    td_emit(pl->out, &(td_emission){ .op = n.op, .like = &n, .inputs = &in, .input_count = 1, .attr = td_node_attr(pl->in, &n),
                                     .attr_bytes = n.attr_bytes, .after = TD_NONE });
    return td_error(pl->td) == TD_OK;
}

static bool place_node(placer *pl, uint32_t index)
{
    const td_node *n = &pl->in->nodes[index];
    if (n->op == &td_op_mark) return dissolve_mark(pl, index);
    if (n->op->flags & TD_OP_SOURCE) return pl->map[n->output] != TD_NONE || place_source(pl, index);
    if (n->op->flags & TD_OP_EFFECT) return place_effect(pl, index);
    if (is_deferred(pl, n)) return defer(pl, index);
    return place_by_rule(pl, index);
}

static bool open_tables(placer *pl)
{
    uint32_t memos = 256;
    while (memos < pl->in->value_count) memos *= 2;
    pl->bytes = pl->in->value_count * (sizeof(td_id) + sizeof(td_placement)) + pl->in->node_count;
    pl->memory = td_alloc(pl->td, pl->bytes, "program");
    pl->memos = td_alloc(pl->td, memos * sizeof *pl->memos, "program");
    pl->memo_mask = memos - 1;
    if (!pl->memory || !pl->memos) return false;
    memset(pl->memos, 0xFF, memos * sizeof *pl->memos);
    memset(pl->memory, 0xFF, pl->bytes);
    pl->map = pl->memory;
    pl->natural = (td_placement *)(pl->map + pl->in->value_count);
    pl->deferred = (char *)(pl->natural + pl->in->value_count);
    memset(pl->deferred, 0, pl->in->node_count);
    pl->beside = TD_NONE;
    return par_narrow_find(pl->in, &pl->narrow);
}

td_program *par_place_pass(void *self, const td_program *in)
{
    par_attached *a = self;
    placer pl = { .a = a, .td = in->td, .mesh = td_context_mesh(in->td), .in = in };
    td_program *out = NULL;
    if (open_tables(&pl) && (pl.out = td_pass_begin(in->td))) {
        for (uint32_t n = 0; n < in->node_count; n++)
            if (!place_node(&pl, n)) break;
        out = td_pass_end(pl.out);
    }
    td_free(in->td, pl.memory, pl.bytes, "program");
    par_narrow_free(in->td, &pl.narrow);
    if (pl.memos) td_free(in->td, pl.memos, (pl.memo_mask + 1) * sizeof *pl.memos, "program");
    return out;
}
