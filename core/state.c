/* State: what outlives a step, by name, and the flat units that store it (their memory: state_memory.c).
 *
 * A state is declared without memory. Before a program is differentiated every state gets its unit (td_layout):
 *
 *   trainable parameters   together, as the strategy chooses, or up to 25 MiB a unit
 *   a moment               beside its parameter: a unit of the same layout for each name of a moment; one with an element
 *                          a row: the same order, a unit that is not sharded
 *   anything else          a unit of its own
 *
 * A unit whose members are cut (td_cut) is as many rows as there are blocks, of which a rank holds its own: a block of each member.
 */
#include "core/internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { DEFAULT_UNIT_BYTES = 25 << 20 };

static const td_placement replicated;

td_init td_init_constant(double value) { return (td_init){ TD_INIT_CONSTANT, value, 0 }; }
td_init td_init_uniform(double bound) { return (td_init){ TD_INIT_UNIFORM, -bound, bound }; }
td_init td_init_normal(double deviation) { return (td_init){ TD_INIT_NORMAL, 0, deviation }; }
td_init td_init_truncated_normal(double deviation) { return (td_init){ TD_INIT_TRUNCATED_NORMAL, 0, deviation }; }

/* ---- Declaring */

static td_state failed_state(td_context *td) { return (td_state){ .td = td, .id = TD_NONE }; }

td_state td_state_named(td_context *td, const char *name)
{
    uint64_t hash = td_hash_text(name);
    for (uint32_t s = 0; s < td->state_count; s++)
        if (td->states[s].hash == hash && !strcmp(td->states[s].name, name)) return (td_state){ td, s };
    return failed_state(td);
}

static td_state declare(td_context *td, const char *path, const char *name, td_state_entry entry)
{
    char shape[TD_SHAPE_TEXT];
    if (td->error != TD_OK) return failed_state(td);
    if (!name || !*name) {
        td_fail(td, TD_ERROR_USAGE, "a state of '%s' needs a name", path);
        return failed_state(td);
    }
    bool possible = td_shape_possible(entry.shape, entry.dtype) && entry.dtype != TD_F16;
    size_t bytes = strlen(path) + strlen(name) + 2;
    char *full = td_alloc(td, bytes, "host");
    if (!full) return failed_state(td);
    snprintf(full, bytes, *path ? "%s.%s" : "%s%s", path, name);
    if (!*path) full[strlen(name)] = 0;
    entry.name = td_copy_text(td, full, "host");
    td_free(td, full, bytes, "host");
    if (!entry.name) return failed_state(td);
    bool drawn = entry.init.kind != TD_INIT_CONSTANT;
    if (drawn && !(isfinite(entry.init.a) && isfinite(entry.init.b)))
        td_fail(td, TD_ERROR_USAGE, "state '%s': initial values cannot be drawn with a = %g and b = %g", entry.name, entry.init.a, entry.init.b);
    else if (!possible)
        td_fail(td, TD_ERROR_USAGE, "state '%s': %s %s cannot be stored; states are f32, f64, bf16, i32, i64 or u8", entry.name, td_dtype_name(entry.dtype),
                td_shape_text(entry.shape, shape));
    else if (td_state_named(td, entry.name).id != TD_NONE)
        td_fail(td, TD_ERROR_USAGE, "state '%s' exists already; every state of a module needs its own name", entry.name);
    if (td->error != TD_OK || !td_grow(td, (void **)&td->states, &td->state_room, td->state_count + 1, sizeof *td->states, "host")) {
        td_free(td, entry.name, strlen(entry.name) + 1, "host");
        return failed_state(td);
    }
    entry.hash = td_hash_text(entry.name);
    entry.elements = td_shape_elements(entry.shape);
    entry.unit = entry.stand_in = TD_NONE;
    td->states[td->state_count] = entry;
    return (td_state){ td, td->state_count++ };
}

/* A moment's own name, behind its parameter's. */
static const char *moment_name(const td_context *td, uint32_t s)
{
    return td->states[s].name + strlen(td->states[td->states[s].of].name) + 1;
}

td_state td_parameter(td_module at, const char *name, td_shape shape, td_init init)
{
    if (at.id == TD_NONE) return failed_state(at.td);
    return declare(at.td, td_module_path(at.td, at.id), name,
                   (td_state_entry){ .kind = TD_PARAMETER, .dtype = td_float(at.td), .shape = shape, .init = init, .of = TD_NONE });
}

td_state td_buffer(td_module at, const char *name, td_dtype dtype, td_shape shape, td_init init)
{
    if (at.id == TD_NONE) return failed_state(at.td);
    return declare(at.td, td_module_path(at.td, at.id), name,
                   (td_state_entry){ .kind = TD_BUFFER, .dtype = dtype, .shape = shape, .init = init, .of = TD_NONE });
}

static td_state moment(td_state of, const char *name, td_shape shape, bool of_rows)
{
    td_context *td = of.td;
    td_state_entry p = td->states[of.id];
    if (p.kind != TD_PARAMETER) {
        td_fail(td, TD_ERROR_USAGE, "td_moment: '%s' is not a parameter", p.name);
        return failed_state(td);
    }
    for (uint32_t s = of.id; s < td->state_count; s++) {
        if (td->states[s].kind != TD_MOMENT || td->states[s].of != of.id || strcmp(moment_name(td, s), name)) continue;
        if (td->states[s].of_rows == of_rows) return (td_state){ td, s };
        td_fail(td, TD_ERROR_USAGE, "td_moment: '%s' exists already, with %s", td->states[s].name,
                of_rows ? "its parameter's shape" : "one element a row");
        return failed_state(td);
    }
    return declare(td, p.name, name,
                   (td_state_entry){ .kind = TD_MOMENT, .dtype = p.dtype, .shape = shape, .of = of.id, .of_rows = of_rows });
}

td_state td_moment(td_state of, const char *name)
{
    return of.id == TD_NONE ? of : moment(of, name, of.td->states[of.id].shape, false);
}

td_state td_moment_rows(td_state of, const char *name)
{
    if (of.id == TD_NONE) return of;
    td_shape shape = of.td->states[of.id].shape;
    return moment(of, name, shape.rank ? TD_SHAPE(shape.dim[0]) : shape, true);
}

void td_freeze(td_state s)
{
    if (s.id == TD_NONE || s.td->error != TD_OK) return;
    td_state_entry *e = &s.td->states[s.id];
    const char *wrong = e->kind != TD_PARAMETER ? "is no parameter, and does not train anyway"
                        : e->unit != TD_NONE    ? "was in a step already; freeze before the first step"
                        : e->together           ? "has an optimizer already; freeze before it is made"
                                                : NULL;
    if (wrong)
        td_fail(s.td, TD_ERROR_USAGE, "td_freeze: '%s' %s", e->name, wrong);
    else
        e->frozen = true;
}

void td_sparse_rows(td_state s)
{
    if (s.id == TD_NONE || s.td->error != TD_OK) return;
    td_state_entry *e = &s.td->states[s.id];
    const char *wrong = e->kind != TD_PARAMETER || e->shape.rank != 2 ? "is no table: only a parameter (V, D) has row-sparse gradients"
                        : e->unit != TD_NONE                          ? "was in a step already; ask before the first step"
                        : e->together                                 ? "has an optimizer already; ask before it is made"
                                                                      : NULL;
    if (wrong)
        td_fail(s.td, TD_ERROR_USAGE, "td_sparse_rows: '%s' %s", e->name, wrong);
    else
        e->sparse = true;
}

void td_update_together(const td_state *states, int count)
{
    if (!count || states[0].id == TD_NONE) return;
    td_context *td = states[0].td;
    td->together++;
    for (int i = 0; i < count; i++)
        if (states[i].id != TD_NONE) td->states[states[i].id].together = td->together;
}

void td_stand_in(td_state s, td_state other)
{
    if (s.id != TD_NONE) s.td->states[s.id].stand_in = other.id;
}

bool td_has_stand_in(td_state s) { return s.id != TD_NONE && s.td->states[s.id].stand_in != TD_NONE; }

int64_t td_state_count(const td_context *td) { return td->state_count; }

td_state td_state_at(td_context *td, int64_t index)
{
    return index >= 0 && index < td->state_count ? (td_state){ td, (uint32_t)index } : failed_state(td);
}

static const td_state_entry nothing = { .name = "" };
static const td_state_entry *entry_of(td_state s) { return s.id < s.td->state_count ? &s.td->states[s.id] : &nothing; }
const char *td_state_name(td_state s) { return entry_of(s)->name; }
td_shape td_state_shape(td_state s) { return entry_of(s)->shape; }
td_dtype td_state_dtype(td_state s) { return entry_of(s)->dtype; }
td_state_kind td_state_kind_of(td_state s) { return entry_of(s)->kind; }
bool td_state_trains(td_state s) { return s.id != TD_NONE && entry_of(s)->kind == TD_PARAMETER && !entry_of(s)->frozen; }
bool td_state_sparse(td_state s) { return td_state_trains(s) && entry_of(s)->sparse; }

int64_t td_parameter_elements(const td_context *td)
{
    int64_t n = 0;
    for (uint32_t s = 0; s < td->state_count; s++)
        if (td->states[s].kind == TD_PARAMETER) n += td->states[s].elements;
    return n;
}

/* ---- Units */

uint32_t td_unit_count(const td_context *td) { return td->unit_count; }
const td_unit *td_unit_at(const td_context *td, uint32_t unit) { return &td->units[unit]; }

/* Appends an empty unit; TD_NONE: out of memory. */
static uint32_t add_unit(td_context *td, td_unit unit)
{
    if (!td_grow(td, (void **)&td->units, &td->unit_room, td->unit_count + 1, sizeof *td->units, "host")) return TD_NONE;
    unit.accumulator = TD_NONE;
    td->units[td->unit_count] = unit;
    return td->unit_count++;
}

/* Members are few or made at once: the array grows by one copy each time only for units made one by one. */
static bool add_member(td_context *td, uint32_t unit, uint32_t state, int64_t offset)
{
    td_unit *u = &td->units[unit];
    size_t bytes = (size_t)u->member_count * sizeof *u->members;
    td_unit_member *members = td_alloc(td, bytes + sizeof *members, "host");
    if (!members) return false;
    if (bytes) memcpy(members, u->members, bytes);
    td_free(td, u->members, bytes, "host");
    td_state_entry *s = &td->states[state];
    members[u->member_count++] = (td_unit_member){ state, offset, s->elements / td_unit_blocks(u) };
    u->members = members;
    s->unit = unit;
    s->offset = offset;
    return true;
}

static int64_t unit_multiple(const td_context *td)
{
    return (int64_t)TD_UNIT_ALIGN * (td->has_parallel && td->parallel.unit_multiple ? td->parallel.unit_multiple : 1);
}

static bool is_sharded(td_placement place)
{
    bool sharded = false;
    for (int a = 0; a < TD_MAX_AXES; a++) sharded = sharded || place.kind[a] == TD_SHARDED;
    return sharded;
}

static bool append_member(td_context *td, uint32_t unit, uint32_t state)
{
    td_unit *u = &td->units[unit];
    int64_t end = u->member_count ? u->members[u->member_count - 1].offset + u->members[u->member_count - 1].elements : 0;
    if (!add_member(td, unit, state, td_round_up(end, TD_UNIT_ALIGN))) return false;
    const td_unit_member *last = &td->units[unit].members[td->units[unit].member_count - 1];
    end = last->offset + last->elements;
    bool shared = (td->units[unit].trains && !td->units[unit].sparse) || is_sharded(td->units[unit].place);
    td->units[unit].elements = td_unit_blocks(&td->units[unit]) * (shared ? td_round_up(end, unit_multiple(td)) : end); /* what no ranks share needs no gaps */
    return true;
}

/* Where a unit is whose flat value would be at `flat`. */
static td_placement unit_place(td_placement flat, td_cut cut)
{
    if (!cut.ways) return flat;
    for (int a = 0; a < TD_MAX_AXES; a++)
        if (flat.kind[a] == TD_SHARDED) flat.dim[a] = 1;
    flat.kind[cut.axis] = TD_SHARDED;
    flat.dim[cut.axis] = 0;
    return flat;
}

/* Without a strategy: in order, up to a size. */
static void default_choice(td_context *td, const td_state *states, int count, td_unit_choice *out)
{
    int64_t bytes = 0;
    int unit = 0;
    for (int i = 0; i < count; i++) {
        int64_t own = td->states[states[i].id].elements * td_dtype_size(td->states[states[i].id].dtype);
        if (bytes && bytes + own > DEFAULT_UNIT_BYTES) unit++, bytes = 0;
        bytes += own;
        out[i] = (td_unit_choice){ .unit = unit };
    }
}

static bool lay_out_chosen(td_context *td, const td_state *states, int count, const td_unit_choice *choice)
{
    for (int i = 0; i < count; i++) {
        uint32_t unit = TD_NONE;
        for (int j = 0; j < i && unit == TD_NONE; j++)
            if (choice[j].unit == choice[i].unit) unit = td->states[states[j].id].unit;
        if (unit == TD_NONE) {
            td_placement flat = td->has_parallel && !choice[i].whole ? td->parallel.places.parameter : replicated;
            unit = add_unit(td, (td_unit){ .kind = TD_PARAMETER, .dtype = td->states[states[i].id].dtype, .trains = td_state_trains(states[i]),
                                           .root = choice[i].root, .of = TD_NONE, .cut = choice[i].cut,
                                           .place = unit_place(flat, choice[i].cut) });
            if (unit == TD_NONE) return false;
        }
        if (!append_member(td, unit, states[i].id)) return false;
    }
    return true;
}

/* In place of a number, for parameters that are frozen: they share units with one another, and none with those that train. */
enum { FROZEN = -1 };

static bool waits_for_unit(const td_context *td, uint32_t s, int64_t together)
{
    const td_state_entry *e = &td->states[s];
    if (e->unit != TD_NONE || e->kind != TD_PARAMETER) return false;
    return e->frozen ? together == FROZEN : !e->sparse && e->together == together;
}

/* Units for the parameters that train and have this number, or for those that are frozen. */
static bool lay_out_together(td_context *td, int64_t together)
{
    uint32_t count = 0;
    for (uint32_t s = 0; s < td->state_count; s++) count += waits_for_unit(td, s, together);
    if (!count) return true;
    size_t bytes = count * (sizeof(td_state) + sizeof(td_unit_choice));
    td_state *states = td_alloc(td, bytes, "host");
    if (!states) return false;
    td_unit_choice *choice = (td_unit_choice *)(states + count);
    count = 0;
    for (uint32_t s = 0; s < td->state_count; s++)
        if (waits_for_unit(td, s, together)) states[count++] = (td_state){ td, s };
    bool chosen = true;
    if (td->has_parallel && td->parallel.choose_units)
        chosen = td->parallel.choose_units(td->parallel.self, td, states, (int)count, choice);
    else
        default_choice(td, states, (int)count, choice);
    bool done = chosen && lay_out_chosen(td, states, (int)count, choice);
    td_free(td, states, bytes, "host");
    return done;
}

/* Where in the unit of moments of rows of parameter unit `of` those of `state` begin; TD_NONE: how many elements that unit has. */
static int64_t rows_before(const td_context *td, uint32_t of, uint32_t state)
{
    int64_t begin = 0;
    const td_unit *u = &td->units[of];
    for (int32_t m = 0; m < u->member_count && u->members[m].state != state; m++) {
        td_shape shape = td->states[u->members[m].state].shape;
        begin += td_round_up(shape.rank ? shape.dim[0] : 1, TD_UNIT_ALIGN);
    }
    return begin;
}

/* The unit for moments called `slot` of the parameters in unit `of`. */
static uint32_t moment_unit(td_context *td, uint32_t of, const char *slot, bool of_rows)
{
    td_unit like = td->units[of];
    bool sharded = like.trains && !like.sparse && !of_rows && td->has_parallel;
    int64_t elements = of_rows ? rows_before(td, of, TD_NONE) : like.elements;
    for (uint32_t u = 0; u < td->unit_count; u++) {
        const td_unit *have = &td->units[u];
        if (have->kind == TD_MOMENT && have->of == of && have->elements == elements && !strcmp(have->slot, slot)) return u;
    }
    return add_unit(td, (td_unit){ .kind = TD_MOMENT, .dtype = like.dtype, .elements = elements, .of = of, .slot = slot, .cut = like.cut,
                                   .place = unit_place(sharded ? td->parallel.places.moment : replicated, like.cut) });
}

/* Moments of rows are whole on every rank. */
static bool may_have_rows(td_context *td, uint32_t moment)
{
    const td_state_entry *p = &td->states[td->states[moment].of];
    if (!td->units[p->unit].cut.ways) return true;
    td_fail(td, TD_ERROR_UNSUPPORTED, "'%s' has one element a row of '%s', of which each rank holds a part along a dimension; leave '%s' "
            "whole, or choose an optimizer with moments of its parameters' shape", td->states[moment].name, p->name, p->name);
    return false;
}

static bool lay_out_rest(td_context *td)
{
    for (uint32_t s = 0; s < td->state_count; s++) {
        td_state_entry *entry = &td->states[s];
        if (entry->unit != TD_NONE) continue;
        if (entry->kind == TD_MOMENT) {
            const td_state_entry *p = &td->states[entry->of];
            uint32_t unit = moment_unit(td, p->unit, moment_name(td, s), entry->of_rows);
            int64_t offset = entry->of_rows ? rows_before(td, p->unit, entry->of) : p->offset;
            if (entry->of_rows && !may_have_rows(td, s)) return false;
            if (unit == TD_NONE || !add_member(td, unit, s, offset)) return false;
            continue;
        }
        bool table = td_state_sparse((td_state){ td, s });
        uint32_t unit = add_unit(td, (td_unit){ .kind = entry->kind, .dtype = entry->dtype, .trains = table, .sparse = table, .of = TD_NONE });
        if (unit == TD_NONE || !append_member(td, unit, s)) return false;
    }
    return true;
}

bool td_layout(td_context *td)
{
    for (uint32_t together = 0; together <= td->together; together++)
        if (!lay_out_together(td, together)) return false;
    td_placement place = td->parallel.places.parameter;
    /* Else each that is frozen has its own memory, without gaps. */
    bool shares_frozen = td->has_parallel && (is_sharded(place) || place.memory == TD_HOST || td->parallel.cuts);
    return (!shares_frozen || lay_out_together(td, FROZEN)) && lay_out_rest(td);
}

uint32_t td_accumulator_of(td_context *td, uint32_t unit)
{
    if (td->units[unit].accumulator != TD_NONE) return td->units[unit].accumulator;
    td_unit like = td->units[unit];
    td_placement flat = td->has_parallel ? td->parallel.places.accumulator : replicated;
    uint32_t made = add_unit(td, (td_unit){ .kind = TD_BUFFER, .dtype = like.dtype, .elements = like.elements, .of = unit, .slot = "gradient",
                                            .cut = like.cut, .place = unit_place(flat, like.cut) });
    if (made != TD_NONE) td->units[unit].accumulator = made;
    return made;
}

uint32_t td_derived_unit(td_context *td, const td_unit *like)
{
    for (uint32_t u = 0; u < td->unit_count; u++) {
        const td_unit *have = &td->units[u];
        if (!have->derived || have->of != like->of) continue;
        return have->dtype == like->dtype && have->elements == like->elements && have->layout == like->layout ? u : TD_NONE;
    }
    return add_unit(td, (td_unit){ .kind = TD_BUFFER, .dtype = like->dtype, .elements = like->elements, .of = like->of, .slot = like->slot,
                                   .cut = like->cut, .place = like->place, .layout = like->layout, .derived = true });
}

void td_unit_range(const td_context *td, const td_unit *u, int64_t *begin, int64_t *end)
{
    int64_t at = 0, length = u->elements / td_unit_blocks(u);
    for (int a = 0; a < td->mesh.axes; a++) {
        if (u->place.kind[a] != TD_SHARDED || (u->cut.ways && a == u->cut.axis)) continue;
        length /= td->mesh.size[a];
        at += td->mesh.at[a] * length;
    }
    *begin = at;
    *end = at + length;
}
