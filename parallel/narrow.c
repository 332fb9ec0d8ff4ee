/* Which sharded units are gathered in the dtype that products compute in.
 *
 * Under bf16 a matrix product reads a cast of its weight. A cast and a gather can change places without changing a bit: where the
 * rank's part is cast first, half as much is sent and held. Members of the unit that something reads as they are stored (a norm's weight)
 * come beside it: each rank has its own elements of them and zeros elsewhere, and an all-reduce, exact since every element has one term
 * that is not zero, makes them whole.
 *
 * With P elements in the unit and W in such members, a gather in f32 sends 4 P, the other way 2 P + 2 x 4 W, per rank times (N-1)/N. So a
 * unit goes narrow when W is less than a quarter of P: a block does, an embedding alone does not.
 */
#include "parallel/strategy.h"

#include <string.h>

/* The member of a stored unit that value v is a view of, as the part that takes it out; TD_NONE: none. `base` has those of v's inputs. */
static td_id base_of(const td_program *p, const td_node *n, const td_id *base)
{
    td_id in = n->inputs == 1 ? p->inputs[n->input] : TD_NONE;
    if (n->op == &td_op_part) return td_producer(p, in)->op == &td_op_unit ? n->output : TD_NONE;
    return in != TD_NONE && par_is_unit_view(n) ? base[in] : TD_NONE;
}

static uint32_t unit_of(const td_program *p, td_id part)
{
    td_id unit = p->inputs[td_producer(p, part)->input];
    return ((const td_unit_attr *)td_node_attr(p, td_producer(p, unit)))->unit;
}

static uint32_t state_of(const td_program *p, td_id part)
{
    const td_unit *u = td_unit_at(p->td, unit_of(p, part));
    int64_t offset = ((const td_part_attr *)td_node_attr(p, td_producer(p, part)))->offset;
    int32_t m = 0;
    while (m < u->member_count - 1 && u->members[m].offset != offset) m++;
    return u->members[m].state;
}

static bool narrows(const td_program *p, const td_node *n, td_id base)
{
    return n->op == &td_op_cast && td_dtype_size((td_dtype)p->values[n->output].dtype) < td_dtype_size((td_dtype)p->values[base].dtype);
}

static bool is_sharded(td_placement place)
{
    bool sharded = false;
    for (int a = 0; a < TD_MAX_AXES; a++) sharded = sharded || place.kind[a] == TD_SHARDED;
    return sharded;
}

/* What each node reads of units: through a narrowing cast, or as it is stored. */
static void note_reads(const td_program *p, td_id *base, td_dtype *dtype, char *as_stored)
{
    for (uint32_t i = 0; i < p->node_count; i++) {
        const td_node *n = &p->nodes[i];
        for (uint32_t k = 0; k < n->outputs; k++) base[n->output + k] = TD_NONE;
        if (n->outputs == 1) base[n->output] = base_of(p, n, base);
        bool view = n->outputs == 1 && base[n->output] != TD_NONE && n->op != &td_op_cast;
        for (uint32_t k = 0; k < n->inputs && !view; k++) {
            td_id read = base[p->inputs[n->input + k]];
            if (read == TD_NONE) continue;
            td_dtype *unit = &dtype[unit_of(p, read)], to = n->outputs ? (td_dtype)p->values[n->output].dtype : TD_DTYPES;
            bool narrow = narrows(p, n, read);
            if (narrow && *unit == TD_DTYPES) *unit = to;
            if (narrow && *unit == to) base[n->output] = TD_NONE;
            else as_stored[state_of(p, read)] = 1;
        }
    }
}

bool par_find_narrow(const td_program *p, td_dtype *dtype, char *as_stored)
{
    td_context *td = p->td;
    td_id *base = td_alloc(td, p->value_count * sizeof *base + 1, "program");
    if (!base) return false;
    for (uint32_t u = 0; u < td_unit_count(td); u++) dtype[u] = TD_DTYPES;
    memset(as_stored, 0, (size_t)td_state_count(td));
    note_reads(p, base, dtype, as_stored);
    td_free(td, base, p->value_count * sizeof *base + 1, "program");
    for (uint32_t u = 0; u < td_unit_count(td); u++) {
        const td_unit *unit = td_unit_at(td, u);
        if (4 * par_members(unit, as_stored, TD_NONE) >= unit->elements || !is_sharded(unit->place)) dtype[u] = TD_DTYPES;
    }
    return true;
}

int64_t par_members(const td_unit *unit, const char *chosen, uint32_t before)
{
    int64_t elements = 0;
    for (int32_t m = 0; m < unit->member_count && unit->members[m].state != before; m++)
        if (chosen[unit->members[m].state])
            elements += (unit->members[m].elements + TD_UNIT_ALIGN - 1) / TD_UNIT_ALIGN * TD_UNIT_ALIGN;
    return elements;
}

td_id par_own_members(td_program *p, td_id id, uint32_t unit, const char *chosen, const td_node *reader)
{
    td_context *td = p->td;
    const td_unit *u = td_unit_at(td, unit);
    size_t room = (size_t)u->member_count * sizeof(par_member_range), count = 0;
    par_member_range *ranges = td_alloc(td, room, "program");
    if (!ranges) return TD_NONE;
    for (int32_t m = 0; m < u->member_count; m++) {
        const td_unit_member *member = &u->members[m];
        if (chosen[member->state])
            ranges[count++] = (par_member_range){ member->offset, par_members(u, chosen, member->state), member->elements };
    }
    td_value value = { .shape = TD_SHAPE(par_members(u, chosen, TD_NONE)), .dtype = (uint8_t)u->dtype, .place = u->place };
    for (int a = 0; a < TD_MAX_AXES; a++)
        if (u->place.kind[a] == TD_SHARDED) value.place.kind[a] = TD_PARTIAL;
    td_id made = td_emit(p, &(td_emission){ .op = &par_op_own_members, .like = reader, .inputs = &id, .input_count = 1, .attr = ranges,
                                            .attr_bytes = count * sizeof *ranges, .outputs = &value, .output_count = 1, .after = TD_NONE });
    td_free(td, ranges, room, "program");
    return made;
}
