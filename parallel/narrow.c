/* Which units that are sharded, or in host memory, are fetched in the dtype that products compute in.
 *
 * Under bf16 a matrix product reads a cast of its weight. A cast and a gather can change places without changing a bit: where the
 * rank's part is cast first, half as much is sent and held. Members that something reads as they are stored (a norm's weight) come
 * beside, those of all such units together once a step: each rank has its own elements of them and zeros elsewhere, and an all-reduce,
 * exact since every element has one term that is not zero, makes them whole.
 *
 * With P elements in the unit and W in such members, a gather in f32 sends 4 P, the other way 2 P + 2 x 4 W, per rank times (N-1)/N. So a
 * unit goes narrow when W is less than a quarter of P: a block does, an embedding alone does not. What comes beside is alike on all
 * ranks, so a unit that is cut, of whose members each rank of an axis has blocks of its own, goes narrow only if W is 0.
 */
#include "parallel/strategy.h"

#include <string.h>

enum { NOT_READ = -1, READ = 0 };

/* The member of a stored unit that node n shows, as the part that takes it out; TD_NONE: none. `base` has those of n's inputs. */
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

uint32_t par_state_of_part(const td_program *p, td_id part)
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

/* Rows of a unit that is cut stay where they are. */
static bool is_fetched(const td_unit *unit)
{
    bool fetched = unit->place.memory == TD_HOST;
    for (int a = 0; a < TD_MAX_AXES; a++)
        fetched = fetched || (unit->place.kind[a] == TD_SHARDED && unit->place.dim[a] == td_unit_flat_dim(unit));
    return fetched;
}

/* What each node reads of units: through a narrowing cast, or as it is stored. */
static void note_reads(const td_program *p, td_id *base, par_narrow *to)
{
    for (uint32_t i = 0; i < p->node_count; i++) {
        const td_node *n = &p->nodes[i];
        for (uint32_t k = 0; k < n->outputs; k++) base[n->output + k] = TD_NONE;
        if (n->outputs == 1) base[n->output] = base_of(p, n, base);
        bool shows = n->outputs == 1 && base[n->output] != TD_NONE && n->op != &td_op_cast;
        for (uint32_t k = 0; k < n->inputs && !shows; k++) {
            td_id read = base[p->inputs[n->input + k]];
            if (read == TD_NONE) continue;
            td_dtype *unit = &to->dtype[unit_of(p, read)], cast = n->outputs ? (td_dtype)p->values[n->output].dtype : TD_DTYPES;
            bool narrow = narrows(p, n, read);
            if (narrow && *unit == TD_DTYPES) *unit = cast;
            if (narrow && *unit == cast) base[n->output] = TD_NONE;
            else to->beside[par_state_of_part(p, read)] = READ;
        }
    }
}

static int64_t padded(int64_t elements) { return (elements + TD_UNIT_ALIGN - 1) / TD_UNIT_ALIGN * TD_UNIT_ALIGN; }

/* Settles whether the unit goes narrow; then its members that are read as stored have their places among those of all. */
static void settle(const td_unit *unit, td_dtype *dtype, par_narrow *to)
{
    int64_t as_stored = 0;
    for (int32_t m = 0; m < unit->member_count; m++)
        if (to->beside[unit->members[m].state] == READ) as_stored += padded(unit->members[m].elements);
    bool gains = unit->cut.ways ? !as_stored : 4 * as_stored < unit->elements;
    if (!gains || !is_fetched(unit)) *dtype = TD_DTYPES;
    for (int32_t m = 0; m < unit->member_count && *dtype != TD_DTYPES; m++) {
        int64_t *at = &to->beside[unit->members[m].state];
        if (*at == NOT_READ) continue;
        *at = to->elements;
        to->elements += padded(unit->members[m].elements);
        to->layout = (to->layout ^ unit->members[m].state) * 0x100000001b3; /* in the order of places */
    }
}

bool par_narrow_find(const td_program *p, par_narrow *to)
{
    td_context *td = p->td;
    uint32_t units = td_unit_count(td);
    size_t states = (size_t)td_state_count(td), bytes = p->value_count * sizeof(td_id) + 1;
    *to = (par_narrow){ .bytes = states * sizeof *to->beside + units * sizeof *to->dtype };
    to->beside = td_alloc(td, to->bytes, "program");
    td_id *base = td_alloc(td, bytes, "program");
    if (to->beside && base) {
        to->dtype = (td_dtype *)(to->beside + states);
        for (size_t s = 0; s < states; s++) to->beside[s] = NOT_READ;
        for (uint32_t u = 0; u < units; u++) to->dtype[u] = TD_DTYPES;
        note_reads(p, base, to);
        for (uint32_t u = 0; u < units; u++) settle(td_unit_at(td, u), &to->dtype[u], to);
    }
    td_free(td, base, bytes, "program");
    return td_error(td) == TD_OK;
}

void par_narrow_free(td_context *td, par_narrow *n) { td_free(td, n->beside, n->bytes, "program"); }

static uint32_t members_beside(const par_narrow *narrow, const td_unit *u)
{
    uint32_t count = 0;
    for (int32_t m = 0; m < u->member_count; m++) count += narrow->beside[u->members[m].state] != NOT_READ;
    return count;
}

td_id par_own_members(td_program *p, const par_narrow *narrow, const td_id *unit_values, const td_node *reader)
{
    td_context *td = p->td;
    uint32_t units = td_unit_count(td), inputs = 0, count = 0;
    td_value value = { .shape = TD_SHAPE(narrow->elements), .dtype = TD_F32 };
    for (uint32_t u = 0; u < units; u++)
        if (unit_values[u] != TD_NONE) count += members_beside(narrow, td_unit_at(td, u));
    size_t bytes = count * sizeof(par_member_range) + units * sizeof(td_id);
    par_member_range *ranges = td_alloc(td, bytes, "program"), *next = ranges;
    if (!ranges) return TD_NONE;
    td_id *in = (td_id *)(ranges + count);
    for (uint32_t u = 0; u < units; u++) {
        const td_unit *unit = td_unit_at(td, u);
        if (unit_values[u] == TD_NONE || !members_beside(narrow, unit)) continue;
        for (int32_t m = 0; m < unit->member_count; m++) {
            const td_unit_member *member = &unit->members[m];
            int64_t at = narrow->beside[member->state];
            if (at != NOT_READ) *next++ = (par_member_range){ inputs, member->offset, at, member->elements };
        }
        value.dtype = (uint8_t)unit->dtype;
        value.place = unit->place;
        in[inputs++] = unit_values[u];
    }
    for (int a = 0; a < TD_MAX_AXES; a++)
        if (value.place.kind[a] == TD_SHARDED) value.place.kind[a] = TD_PARTIAL;
    td_id made = td_emit(p, &(td_emission){ .op = &par_op_own_members, .like = reader, .inputs = in, .input_count = (int)inputs, .attr = ranges,
                                            .attr_bytes = count * sizeof *ranges, .outputs = &value, .output_count = 1, .after = TD_NONE });
    td_free(td, ranges, bytes, "program");
    return made;
}
