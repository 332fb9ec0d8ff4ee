/* kept: on a GPU the copy in 16 bits of a unit of parameters, which products read parts of (members.c), is kept from step to step. Whoever
 * reads it finds it made; the update that changes the parameters writes it along, two bytes more for each element, where a call of its own
 * would read four and write two.
 *
 * The copy is derived state (td_derived_unit). A step that finds none that is current makes one and leaves it; one that assigns parameters
 * otherwise than by such an update leaves it out of date. Units that ranks share, or that are in host memory, have none: their parts are
 * gathered and copied as strategies say.
 */
#include "core/internal.h"

#include <string.h>

typedef struct keeping {
    const td_program *in;
    td_program *out;
    td_id *map;
    td_id *copy;                              /* value of in, of a unit whose copy is kept -> that copy in `out` */
    uint32_t *unit;                           /* the same -> where the copy is kept; TD_NONE for other values */
    char *live;
    void *memory;
    size_t bytes;
} keeping;

static bool is_whole(const td_context *td, const td_value *v)
{
    bool whole = v->place.memory == TD_DEVICE;
    for (int axis = 0; axis < td->mesh.axes; axis++) whole = whole && v->place.kind[axis] == TD_REPLICATED;
    return whole;
}

/* The unit of parameters whose value at the step's beginning node n copies in 16 bits; TD_NONE: it is something else. */
static uint32_t copied_unit(const td_program *p, const td_node *n)
{
    if (n->op != &td_op_cast || n->after != TD_NONE || !td_is_narrow(p->values[n->output].dtype)) return TD_NONE;
    td_id v = td_node_inputs(p, n)[0];
    const td_node *made = td_producer(p, v);
    if (made->op != &td_op_unit || p->values[v].dtype != TD_F32 || !is_whole(p->td, &p->values[v])) return TD_NONE;
    uint32_t unit = ((const td_unit_attr *)td_node_attr(p, made))->unit;
    const td_unit *u = &p->td->units[unit];
    return u->kind == TD_PARAMETER && !u->cut.ways && !u->derived && is_whole(p->td, &p->values[n->output]) ? unit : TD_NONE;
}

/* The update that makes of unit value v the next one, if its rule writes copies along; or NULL. */
static const td_node *update_of(const keeping *k, td_id v)
{
    for (uint32_t i = k->in->values[v].node + 1; i < k->in->node_count; i++) {
        const td_node *n = &k->in->nodes[i];
        if (!k->live[i] || n->op != &td_op_update_unit || td_node_inputs(k->in, n)[0] != v) continue;
        const td_update_attr *attr = td_node_attr(k->in, n);
        return k->in->td->rules[attr->rule]->copies && is_whole(k->in->td, &k->in->values[n->output]) ? n : NULL;
    }
    return NULL;
}

/* Whether updates that write copies along make of v all that the step stores in its unit. */
static bool is_followed(const keeping *k, uint32_t unit, td_id v)
{
    td_id stored = td_stored_value(k->in, unit);
    while (stored != TD_NONE && v != stored) {
        const td_node *n = update_of(k, v);
        if (!n) return false;
        v = n->output;
    }
    return true;
}

static bool open_tables(keeping *k)
{
    uint32_t values = k->in->value_count;
    k->bytes = values * (2 * sizeof(td_id) + sizeof(uint32_t));
    k->memory = td_alloc(k->in->td, k->bytes, "program");
    k->live = td_live_nodes(k->in);
    if (!k->memory || !k->live) return false;
    memset(k->memory, 0xFF, k->bytes);
    k->map = k->memory;
    k->copy = k->map + values;
    k->unit = k->copy + values;
    return true;
}

static bool store(keeping *k, const td_node *like, uint32_t unit, td_id copy)
{
    td_unit_attr attr = { .unit = unit };
    td_emit(k->out, &(td_emission){ .op = &td_op_store, .like = like, .inputs = &copy, .input_count = 1, .attr = &attr,
                                    .attr_bytes = sizeof attr, .after = TD_NONE });
    return k->in->td->error == TD_OK;
}

/* What stands for the cast number `index` of a unit: the copy that is kept, or the cast, which is kept from here on. */
static bool take_copy(keeping *k, uint32_t index, uint32_t of)
{
    td_context *td = k->in->td;
    td_node n = k->in->nodes[index];
    td_value value = k->in->values[n.output];
    td_id v = td_node_inputs(k->in, &n)[0];
    if (!is_followed(k, of, v)) return td_copy_node(k->out, k->in, index, k->map);
    uint32_t unit = td_derived_unit(td, &(td_unit){ .of = of, .slot = "copy", .dtype = (td_dtype)value.dtype,
                                                    .elements = td->units[of].elements, .place = td->units[of].place });
    bool current = unit != TD_NONE && td->units[unit].current;
    td_unit_attr attr = { .unit = unit };
    if (td->error != TD_OK) return false;
    if (!current && !td_copy_node(k->out, k->in, index, k->map)) return false;
    if (current)
        k->map[n.output] = td_emit(k->out, &(td_emission){ .op = &td_op_unit, .like = &n, .attr = &attr, .attr_bytes = sizeof attr,
                                                           .outputs = &value, .output_count = 1, .after = TD_NONE });
    if (unit == TD_NONE) return td->error == TD_OK;
    if (td_stored_value(k->in, of) == TD_NONE) return current || store(k, &n, unit, k->map[n.output]);
    k->copy[v] = k->map[n.output];
    k->unit[v] = unit;
    return td->error == TD_OK;
}

/* The update number `index`, which writes the copy along. */
static bool take_update(keeping *k, uint32_t index)
{
    td_context *td = k->in->td;
    td_node n = k->in->nodes[index];
    td_id v = td_node_inputs(k->in, &n)[0], in[2 + TD_MOMENTS + 5];
    td_value out[2 + TD_MOMENTS];
    uint32_t moments = n.outputs - 1, count = 0;
    td_update_attr *attr = td_alloc(td, n.attr_bytes, "program");
    if (!attr) return false;
    memcpy(attr, td_node_attr(k->in, &n), n.attr_bytes);
    attr->copied = 1;
    for (uint32_t i = 0; i < n.inputs; i++) {
        if (i == 2 + moments) in[count++] = k->copy[v];
        in[count++] = k->map[td_node_inputs(k->in, &n)[i]];
    }
    for (uint32_t o = 0; o < n.outputs; o++) out[o] = k->in->values[n.output + o];
    out[n.outputs] = k->out->values[k->copy[v]];
    td_id first = td_emit(k->out, &(td_emission){ .op = n.op, .like = &n, .inputs = in, .input_count = (int)count, .attr = attr,
                                                  .attr_bytes = n.attr_bytes, .outputs = out, .output_count = (int)n.outputs + 1,
                                                  .after = n.after == TD_NONE ? TD_NONE : k->map[n.after] });
    td_free(td, attr, n.attr_bytes, "program");
    for (uint32_t o = 0; o < n.outputs; o++) k->map[n.output + o] = first + o;
    k->copy[n.output] = first + n.outputs;
    k->unit[n.output] = k->unit[v];
    return td->error == TD_OK;
}

static bool take(keeping *k, uint32_t index)
{
    td_node n = k->in->nodes[index];
    uint32_t of = copied_unit(k->in, &n);
    td_id v = n.inputs ? td_node_inputs(k->in, &n)[0] : TD_NONE;
    if (of != TD_NONE && k->unit[v] == TD_NONE) return take_copy(k, index, of);
    if (n.op == &td_op_update_unit && k->unit[v] != TD_NONE) return take_update(k, index);
    if (!td_copy_node(k->out, k->in, index, k->map)) return false;
    if (n.op != &td_op_store || k->unit[v] == TD_NONE) return true;
    uint32_t to = ((const td_unit_attr *)td_node_attr(k->in, &n))->unit; /* another's may be assigned the same value */
    return k->in->td->units[k->unit[v]].of != to || store(k, &n, k->unit[v], k->copy[v]);
}

td_program *td_kept_pass(const td_program *in)
{
    keeping k = { .in = in };
    td_program *out = NULL;
    if (open_tables(&k) && (k.out = td_pass_begin(in->td))) {
        for (uint32_t n = 0; n < in->node_count; n++)
            if (k.live[n] && !take(&k, n)) break;
        out = td_pass_end(k.out);
    }
    td_free(in->td, k.live, in->node_count, "program");
    td_free(in->td, k.memory, k.bytes, "program");
    return out;
}
