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
#include "parallel/placer.h"

#include <string.h>

static const td_placement replicated;

/* Where v is to be had for nothing. A sum that an earlier reader has taken already is whole: else what it is added to, a residual say,
 * would be partial from there on, and each reader of that would take a sum anew. */
static td_placement have(const par_placer *pl, td_id v)
{
    if (pl->deferred[pl->in->values[v].node]) return pl->natural[v];
    td_placement place = pl->out->values[pl->map[v]].place, whole = place;
    bool partial = false;
    for (int a = 0; a < pl->mesh->axes; a++) {
        if (place.kind[a] != TD_PARTIAL) continue;
        whole.kind[a] = TD_REPLICATED;
        partial = true;
    }
    return partial && par_place_memo(pl, v, FORM_STORED, whole, 0)->made != TD_NONE ? whole : place;
}

/* A unit that is cut is packed of parts, whatever its gradients have become. */
static bool packs_parts(const par_placer *pl, const td_node *n, int a)
{
    if (n->op != &td_op_pack) return false;
    td_cut cut = td_unit_at(pl->td, ((const td_pack_attr *)td_node_attr(pl->in, n))->unit)->cut;
    return cut.ways && cut.axis == a;
}

/* The label that is sharded on axis a, by the first input that has one; 0: none. */
static int8_t sharded_label(const par_placer *pl, const td_node *n, const td_place_rule *rule, int a)
{
    if (packs_parts(pl, n, a)) return rule->out[0][0];
    for (uint32_t i = 0; i < n->inputs; i++) {
        td_placement place = have(pl, pl->in->inputs[n->input + i]);
        if (place.kind[a] != TD_SHARDED) continue;
        int8_t label = rule->in[par_rule_row(i, TD_RULE_INPUTS)][(int)place.dim[a]];
        if (label && rule->even[label] % par_parts_of(pl, place, place.dim[a]) == 0) return label;
    }
    return 0;
}

/* Deferred nodes: where the parts of their inputs lead by the rule. */
static bool defer(par_placer *pl, uint32_t index)
{
    const td_node *n = &pl->in->nodes[index];
    td_place_rule rule;
    par_rule_of(pl->in, n, &rule);
    td_placement place = replicated;
    for (int a = 0; a < pl->mesh->axes; a++) {
        int8_t label = n->inputs ? sharded_label(pl, n, &rule, a) : 0;
        int d = label ? par_dim_of_label(pl->in, n->output, rule.out[0], label) : -1;
        place.kind[a] = d < 0 ? TD_FREE : TD_SHARDED;
        place.dim[a] = (int8_t)(d < 0 ? 0 : d);
    }
    pl->natural[n->output] = place;
    pl->deferred[index] = 1;
    return true;
}

static uint32_t partial_inputs(const par_placer *pl, const td_node *n, int a)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < n->inputs; i++) count += have(pl, pl->in->inputs[n->input + i]).kind[a] == TD_PARTIAL;
    return count;
}

/* Placement of input i on axis a: the dimension with the sharded label, or what the rule for sums allows. */
static void place_input(const par_placer *pl, const td_node *n, const td_place_rule *rule, int a, uint32_t i, int8_t label, bool *partial_used,
                        td_placement *to)
{
    td_id v = pl->in->inputs[n->input + i];
    int d = label ? par_dim_of_label(pl->in, v, rule->in[par_rule_row(i, TD_RULE_INPUTS)], label) : -1;
    to->kind[a] = TD_REPLICATED;
    to->dim[a] = 0;
    bool summed = label && par_dim_of_label(pl->in, n->output, rule->out[0], label) < 0;
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

static td_placement place_output(const par_placer *pl, const td_node *n, const td_place_rule *rule, uint32_t k, const int8_t *labels, const bool *partial)
{
    td_placement out = replicated;
    for (int a = 0; a < pl->mesh->axes; a++) {
        int d = labels[a] ? par_dim_of_label(pl->in, n->output + k, rule->out[par_rule_row(k, TD_RULE_OUTPUTS)], labels[a]) : -1;
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
static td_memory memory_of(const par_placer *pl, const td_node *n)
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
static bool refuse_rows(const par_placer *pl, const td_node *n)
{
    if (n->op != &td_op_update_rows || !pl->a->options.offload) return false;
    const td_unit *u = td_unit_at(pl->td, ((const td_update_rows_attr *)td_node_attr(pl->in, n))->unit);
    td_fail(pl->td, TD_ERROR_UNSUPPORTED, "offload: '%s' is updated row by row, which is done on the device; leave the offload out, or choose "
            "dense gradients and an optimizer with a moment for each element", td_state_name((td_state){ pl->td, u->members[0].state }));
    return true;
}

static bool place_by_rule(par_placer *pl, uint32_t index)
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
    par_rule_of(pl->in, &n, &rule);
    td_id few[PAR_FEW], *inputs = few;
    if (n.inputs > PAR_FEW && !(inputs = td_alloc(pl->td, n.inputs * sizeof *inputs, "program"))) return false;
    for (int a = 0; a < pl->mesh->axes; a++) labels[a] = sharded_label(pl, &n, &rule, a);
    bool each_used[TD_MAX_AXES] = { false };
    for (uint32_t i = 0; i < n.inputs; i++) {
        td_placement to = { .memory = (int8_t)memory };
        for (int a = 0; a < pl->mesh->axes; a++) {
            place_input(pl, &n, &rule, a, i, labels[a], &each_used[a], &to);
            partial[a] = partial[a] || to.kind[a] == TD_PARTIAL;
        }
        inputs[i] = par_need(pl, pl->in->inputs[n.input + i], to, &n);
        if (inputs[i] == TD_NONE) break;
    }
    td_value outputs[TD_CALL_OUTPUTS];
    for (uint32_t k = 0; k < n.outputs && k < TD_CALL_OUTPUTS; k++) { /* no call has more, which compilers cannot know */
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
static bool place_rows(const par_placer *pl, const td_node *n, td_value *value)
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

bool par_place_source(par_placer *pl, uint32_t index)
{
    td_node n = pl->in->nodes[index];
    td_value value = pl->in->values[n.output];
    if (n.op == &td_op_input && !place_rows(pl, &n, &value)) return false;
    pl->map[n.output] = par_place_result(pl, n.output, value.place);
    return pl->map[n.output] != TD_NONE;
}

static bool is_summed(const td_mesh *mesh, td_placement from, td_placement to)
{
    bool summed = false;
    for (int a = 0; a < mesh->axes; a++) summed = summed || (from.kind[a] == TD_PARTIAL && to.kind[a] != TD_PARTIAL);
    return summed;
}

td_id par_place_cast(par_placer *pl, td_id id, td_dtype dtype, const td_node *like)
{
    td_value value = pl->out->values[id];
    value.dtype = (uint8_t)dtype;
    return td_emit(pl->out, &(td_emission){ .op = &td_op_cast, .like = like, .inputs = &id, .input_count = 1, .attr = &(td_cast_attr){ .dtype = (int32_t)dtype },
                                            .attr_bytes = td_op_cast.attr_bytes, .outputs = &value, .output_count = 1, .after = TD_NONE });
}

/* A gradient in another placement: summed in the dtype that the options ask for. */
static td_id reduced(par_placer *pl, td_id v, td_placement place, const td_node *mark)
{
    td_dtype stored = (td_dtype)pl->in->values[v].dtype, sums = pl->a->options.reduce_dtype == TD_BF16 ? TD_BF16 : stored;
    bool deferred = pl->deferred[pl->in->values[v].node] != 0;
    if (sums == stored || deferred || !is_summed(pl->mesh, have(pl, v), place)) return par_need(pl, v, place, mark);
    td_id narrow = par_place_cast(pl, pl->map[v], sums, mark);
    if (narrow != TD_NONE) narrow = par_convert(pl->out, narrow, place, mark);
    return narrow == TD_NONE ? TD_NONE : par_place_cast(pl, narrow, stored, mark);
}

/* A mark becomes its input, placed as the strategy says. */
static bool dissolve_mark(par_placer *pl, uint32_t index)
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

static bool place_effect(par_placer *pl, uint32_t index)
{
    td_node n = pl->in->nodes[index];
    td_placement want = replicated;
    if (n.op == &td_op_store) want = td_unit_at(pl->td, ((const td_unit_attr *)td_node_attr(pl->in, &n))->unit)->place;
    td_id in = par_need(pl, pl->in->inputs[n.input], want, &n);
    if (in == TD_NONE) return false;
    td_emit(pl->out, &(td_emission){ .op = n.op, .like = &n, .inputs = &in, .input_count = 1, .attr = td_node_attr(pl->in, &n),
                                     .attr_bytes = n.attr_bytes, .after = TD_NONE });
    return td_error(pl->td) == TD_OK;
}

static bool place_node(par_placer *pl, uint32_t index)
{
    const td_node *n = &pl->in->nodes[index];
    if (n->op == &td_op_mark) return dissolve_mark(pl, index);
    if (n->op->flags & TD_OP_SOURCE) return pl->map[n->output] != TD_NONE || par_place_source(pl, index);
    if (n->op->flags & TD_OP_EFFECT) return place_effect(pl, index);
    if (par_is_deferred(pl, n)) return defer(pl, index);
    return place_by_rule(pl, index);
}

static bool open_tables(par_placer *pl)
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
    par_placer pl = { .a = a, .td = in->td, .mesh = td_context_mesh(in->td), .in = in };
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
