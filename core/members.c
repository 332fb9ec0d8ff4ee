/* members: on a GPU the copies in 16 bits of a unit's members are parts of one copy of the unit, made by one kernel where there would be
 * one a parameter. Where most of a unit is not read so, they stay their own.
 *
 * Behind its last member a gradient that only updates read is not cleared: members that are computed in their places leave the packing
 * nothing to do, unless there are gaps between them.
 */
#include "core/internal.h"

#include <string.h>

typedef struct member_casts {
    const td_program *in;
    td_program *out;
    td_id *map;
    td_id *copy;                              /* rank-1 value of in -> its copy in `out`, or TD_NONE */
    int64_t *cast_elements;                   /* of it: read as copies in 16 bits */
    uint32_t *casts;                          /* how many members */
    uint8_t *dtype;                           /* theirs; f32: of both kinds */
    char *live;
    void *memory;
    size_t bytes;
} member_casts;

/* The flat value of whose member node n is the copy in 16 bits; TD_NONE: it is something else. */
static td_id copied_from(const td_program *p, const td_node *n)
{
    if (n->op != &td_op_cast || n->after != TD_NONE || !td_is_narrow(p->values[n->output].dtype)) return TD_NONE;
    const td_node *part = td_producer(p, td_node_inputs(p, n)[0]);
    if (part->op != &td_op_part || part->after != TD_NONE) return TD_NONE;
    td_id flat = td_node_inputs(p, part)[0];
    bool alike = td_placement_equal(p->values[part->output].place, p->values[n->output].place);
    return alike && p->values[flat].dtype == TD_F32 ? flat : TD_NONE;
}

static bool open_tables(member_casts *m)
{
    uint32_t values = m->in->value_count;
    m->bytes = values * (sizeof(int64_t) + 2 * sizeof(td_id) + sizeof(uint32_t) + 1);
    m->memory = td_alloc(m->in->td, m->bytes, "program");
    m->live = td_live_nodes(m->in);
    if (!m->memory || !m->live) return false;
    memset(m->memory, 0, m->bytes);
    m->cast_elements = m->memory;
    m->map = (td_id *)(m->cast_elements + values);
    m->copy = m->map + values;
    m->casts = m->copy + values;
    m->dtype = (uint8_t *)(m->casts + values);
    memset(m->copy, 0xFF, values * sizeof *m->copy);
    for (uint32_t n = 0; n < m->in->node_count; n++) {
        const td_node *node = &m->in->nodes[n];
        td_id flat = m->live[n] ? copied_from(m->in, node) : TD_NONE;
        if (flat == TD_NONE) continue;
        const td_value *value = &m->in->values[node->output];
        bool first = !m->casts[flat]++;
        m->cast_elements[flat] += td_shape_elements(value->shape);
        if (first) m->dtype[flat] = value->dtype;
        if (m->dtype[flat] != value->dtype) m->dtype[flat] = TD_F32;
    }
    return true;
}

static bool is_worth_it(const member_casts *m, td_id flat)
{
    int64_t elements = td_shape_elements(m->in->values[flat].shape);
    return m->casts[flat] > 1 && td_is_narrow(m->dtype[flat]) && m->cast_elements[flat] >= elements - elements / 4;
}

static td_id copy_of(member_casts *m, const td_node *like, td_id flat)
{
    if (m->copy[flat] != TD_NONE) return m->copy[flat];
    td_value value = m->in->values[flat];
    td_cast_attr attr = { .dtype = m->dtype[flat] };
    value.dtype = m->dtype[flat];
    td_emission copy = { .op = &td_op_cast, .like = like, .inputs = &m->map[flat], .input_count = 1, .attr = &attr,
                         .attr_bytes = sizeof attr, .outputs = &value, .output_count = 1, .after = TD_NONE };
    return m->copy[flat] = td_emit(m->out, &copy);
}

/* Whether nothing but updates read value v, as their gradient and none of it from element `end` on. */
static bool is_updates_alone(const member_casts *m, td_id v, int64_t end)
{
    for (uint32_t i = m->in->values[v].node + 1; i < m->in->node_count; i++) {
        const td_node *n = &m->in->nodes[i];
        bool reads = n->after == v;
        for (uint32_t k = 0; k < n->inputs; k++) reads |= td_node_inputs(m->in, n)[k] == v;
        if (!reads || !m->live[i]) continue;
        const td_update_attr *attr = td_node_attr(m->in, n);
        if (n->op != &td_op_update_unit || td_node_inputs(m->in, n)[1] != v || td_node_inputs(m->in, n)[0] == v) return false;
        const td_update_segment *segments = (const td_update_segment *)(attr + 1);
        for (uint32_t s = 0; s < attr->count; s++)
            if (segments[s].end > end) return false;
    }
    return true;
}

static bool take_pack(member_casts *m, uint32_t index)
{
    td_node n = m->in->nodes[index];
    const td_pack_attr *attr = td_node_attr(m->in, &n);
    const td_value *value = &m->in->values[n.output];
    uint32_t last = n.inputs - 1;
    if (!td_copy_node(m->out, m->in, index, m->map)) return false;
    if (!n.inputs || value->shape.rank != 1 || !td_shape_equal(td_local_shape(&m->in->td->mesh, value->shape, value->place), value->shape))
        return true;
    int64_t end = ((const int64_t *)(attr + 1))[last] + td_shape_elements(m->in->values[td_node_inputs(m->in, &n)[last]].shape);
    td_pack_attr *made = (td_pack_attr *)(m->out->attrs + m->out->nodes[m->out->node_count - 1].attr);
    if (is_updates_alone(m, n.output, end)) made->unread = td_shape_elements(value->shape) - end;
    return true;
}

static bool take(member_casts *m, uint32_t index)
{
    td_node n = m->in->nodes[index];
    if (n.op == &td_op_pack) return take_pack(m, index);
    td_id flat = copied_from(m->in, &n);
    if (flat == TD_NONE || !is_worth_it(m, flat)) return td_copy_node(m->out, m->in, index, m->map);
    td_node part = *td_producer(m->in, td_node_inputs(m->in, &n)[0]);
    td_id copy = copy_of(m, &n, flat);
    if (copy == TD_NONE) return false;
    m->map[n.output] = td_emit(m->out, &(td_emission){ .op = &td_op_part, .like = &n, .inputs = &copy, .input_count = 1,
                                                       .attr = td_node_attr(m->in, &part), .attr_bytes = part.attr_bytes,
                                                       .outputs = &m->in->values[n.output], .output_count = 1, .after = TD_NONE });
    return m->in->td->error == TD_OK;
}

td_program *td_members_pass(const td_program *in)
{
    member_casts m = { .in = in };
    td_program *out = NULL;
    if (open_tables(&m) && (m.out = td_pass_begin(in->td))) {
        for (uint32_t n = 0; n < in->node_count; n++)
            if (m.live[n] && !take(&m, n)) break;
        out = td_pass_end(m.out);
    }
    td_free(in->td, m.live, in->node_count, "program");
    td_free(in->td, m.memory, m.bytes, "program");
    return out;
}
