/* The memory of state: a unit gets it, and its members their initial values, when a plan that reads it first runs; programs read and write
 * a state's elements, those that this rank has.
 */
#include "core/internal.h"
#include "core/ops/convert.h"
#include "core/random.h"

#include <math.h>
#include <string.h>

/* ---- Memory and initial values */

/* Calls for the part of member m that lies in [begin, end) of the unit: first element of the member, and how many. */
static int64_t overlap(const td_unit_member *m, int64_t begin, int64_t end, int64_t *first)
{
    int64_t from = m->offset > begin ? m->offset : begin;
    int64_t to = m->offset + m->elements < end ? m->offset + m->elements : end;
    *first = from - m->offset;
    return to > from ? to - from : 0;
}

enum { DRAWN_AT_ONCE = 256 };

/* Values of N(0, 1) that are not within +-2 are drawn again, each from further draws of the same name at its own index, so that they
 * depend on nothing else. One in 22 is, and of those again. */
static void redraw_tails(const td_context *td, uint64_t key, uint64_t index, int64_t count, double *values)
{
    for (int64_t i = 0; i < count; i++)
        for (uint64_t again = 1; !(fabs(values[i]) < 2); again++)
            td_random_normal(td_random_of(td->options.seed, key, again), index + (uint64_t)i, 1, &values[i]);
}

/* Elements [first, first + count) of state s into memory, from element `at` on. */
static void initialise_range(const td_context *td, const td_state_entry *s, int64_t first, int64_t count, void *memory, int64_t at)
{
    double drawn[DRAWN_AT_ONCE];
    td_random r = td_random_of(td->options.seed, s->hash, 0);
    for (int64_t done = 0; done < count; done += DRAWN_AT_ONCE) {
        int64_t n = count - done < DRAWN_AT_ONCE ? count - done : DRAWN_AT_ONCE;
        if (s->init.kind == TD_INIT_UNIFORM) td_random_uniform(r, (uint64_t)(first + done), n, drawn);
        bool is_normal = s->init.kind == TD_INIT_NORMAL || s->init.kind == TD_INIT_TRUNCATED_NORMAL;
        if (is_normal) td_random_normal(r, (uint64_t)(first + done), n, drawn);
        if (s->init.kind == TD_INIT_TRUNCATED_NORMAL) redraw_tails(td, s->hash, (uint64_t)(first + done), n, drawn);
        for (int64_t i = 0; i < n; i++) {
            drawn[i] = s->init.kind == TD_INIT_CONSTANT  ? s->init.a
                       : s->init.kind == TD_INIT_UNIFORM ? s->init.a + (s->init.b - s->init.a) * drawn[i]
                                                         : s->init.a + s->init.b * drawn[i];
        }
        td_store_f64((char *)memory + (at + done) * td_dtype_size(s->dtype), s->dtype, drawn, n);
    }
}

/* Elements of this rank's blocks of members are stored behind so many blocks of other ranks. */
static int64_t blocks_before(const td_context *td, const td_unit *u) { return u->cut.ways ? td->mesh.at[u->cut.axis] : 0; }

/* From element `at` of this rank's block of the member on, and at most up to `end`: how many are consecutive in the state, and there from
 * which one on. */
static int64_t run_of_member(const td_context *td, const td_unit *u, const td_unit_member *m, int64_t at, int64_t end, int64_t *element)
{
    int64_t run;
    *element = td_cut_element(u->cut, td->states[m->state].shape, blocks_before(td, u) * m->elements + at, &run);
    return run < end - at ? run : end - at;
}

/* This rank's part of the unit as it begins, at `to`. */
static void initialise(const td_context *td, const td_unit *u, void *to)
{
    int64_t begin, end, first, run;
    td_unit_range(td, u, &begin, &end);
    memset(to, 0, (size_t)((end - begin) * td_dtype_size(u->dtype)));
    for (int32_t i = 0; i < u->member_count; i++) {
        const td_unit_member *m = &u->members[i];
        const td_state_entry *s = &td->states[m->state];
        int64_t count = overlap(m, begin, end, &first), element;
        for (int64_t at = first; at < first + count; at += run) {
            run = run_of_member(td, u, m, at, first + count, &element);
            initialise_range(td, s, element, run, to, m->offset + at - begin);
        }
    }
}

/* The same in a GPU's memory: drawn there, or copied where it has no such dtype. */
static bool initialise_on_gpu(td_context *td, const td_device *device, const td_unit *u)
{
    int64_t begin, end, item = td_dtype_size(u->dtype);
    if (u->dtype != TD_F32 && u->dtype != TD_BF16) {
        void *values = td_alloc(td, (size_t)u->local_bytes, "host");
        if (!values) return false;
        initialise(td, u, values);
        bool written = device->write(td, u->memory, values, u->local_bytes);
        td_free(td, values, (size_t)u->local_bytes, "host");
        return written;
    }
    td_unit_range(td, u, &begin, &end);
    if (!device->clear(td, u->memory, u->local_bytes)) return false;
    for (int32_t i = 0; i < u->member_count; i++) {
        const td_unit_member *m = &u->members[i];
        const td_state_entry *s = &td->states[m->state];
        td_initial part = { .init = s->init, .key = td_random_of(td->options.seed, s->hash, 0).key, .dtype = u->dtype };
        int64_t first, count = overlap(m, begin, end, &first);
        bool zeros = s->init.kind == TD_INIT_CONSTANT && s->init.a == 0;
        for (int64_t at = first; at < first + count && !zeros; at += part.count) {
            part.count = run_of_member(td, u, m, at, first + count, &part.first);
            part.to = (char *)u->memory + (m->offset + at - begin) * item;
            if (!device->initialise(td, &part)) return false;
        }
    }
    return true;
}

static const char *kind_of_memory(const td_unit *u) { return u->place.memory == TD_HOST ? "pinned" : "state"; }

static bool allocate(td_context *td, td_unit *u)
{
    if (u->memory) return true;
    int64_t begin, end;
    td_unit_range(td, u, &begin, &end);
    int64_t bytes = (end - begin) * td_dtype_size(u->dtype);
    const td_device *device = td_device_of(td, (td_memory)u->place.memory);
    u->memory = device->get(td, bytes, kind_of_memory(u));
    if (!u->memory) return false;
    u->local_bytes = bytes;
    if (device->is_gpu) return initialise_on_gpu(td, device, u);
    initialise(td, u, u->memory);
    return true;
}

/* Where ranks reach into one another's state all that is laid out has memory at once, in order, so that it lies alike on all. */
bool td_unit_allocate(td_context *td, uint32_t unit)
{
    if (td->units[unit].memory) return true;
    for (uint32_t u = 0; u < td->unit_count && td_is_reached(td); u++)
        if (!allocate(td, &td->units[u])) return false;
    return allocate(td, &td->units[unit]);
}

/* ---- Reading and writing from outside */

/* s as a member of its unit. */
static td_unit_member member_of(const td_state_entry *e, const td_unit *u, uint32_t s)
{
    return (td_unit_member){ s, e->offset, e->elements / td_unit_blocks(u) };
}

bool td_state_owned(td_state s, int64_t *begin, int64_t *end)
{
    *begin = *end = 0;
    if (s.id == TD_NONE || s.td->error != TD_OK || !td_layout(s.td)) return false;
    const td_state_entry *e = &s.td->states[s.id];
    const td_unit *u = &s.td->units[e->unit];
    int64_t from, to, first;
    td_unit_range(s.td, u, &from, &to);
    td_unit_member m = member_of(e, u, s.id);
    int64_t count = overlap(&m, from, to, &first);
    *begin = count ? blocks_before(s.td, u) * m.elements + first : 0;
    *end = *begin + count;
    return true;
}

/* The address of element `begin` of s, or NULL after an error. */
static char *elements_at(td_state s, int64_t begin, int64_t count, const char *verb)
{
    int64_t from, to;
    if (!td_state_owned(s, &from, &to)) return NULL;
    td_context *td = s.td;
    const td_state_entry *e = &td->states[s.id];
    if (count < 0 || begin < 0 || count > e->elements || begin > e->elements - count) {
        td_fail(td, TD_ERROR_USAGE, "%s: elements %lld to %lld of '%s' do not exist: it has %lld", verb, (long long)begin,
                (long long)((uint64_t)begin + (uint64_t)count), e->name, (long long)e->elements);
        return NULL;
    }
    if (count && (begin < from || begin + count > to)) {
        td_fail(td, TD_ERROR_USAGE, "%s: elements %lld to %lld of '%s' are not all on this rank, which holds %lld to %lld", verb,
                (long long)begin, (long long)(begin + count), e->name, (long long)from, (long long)to);
        return NULL;
    }
    if (!td_unit_allocate(td, e->unit)) return NULL;
    const td_unit *u = &td->units[e->unit];
    td_unit_range(td, u, &from, &to);
    int64_t within = begin - blocks_before(td, u) * member_of(e, u, s.id).elements;
    return (char *)u->memory + (count ? (e->offset + within - from) * td_dtype_size(u->dtype) : 0);
}

static const td_device *device_with(td_state s)
{
    return td_device_of(s.td, (td_memory)s.td->units[s.td->states[s.id].unit].place.memory);
}

bool td_state_read(td_state s, int64_t begin, int64_t count, void *to)
{
    const char *from = elements_at(s, begin, count, "td_state_read");
    return from && device_with(s)->read(s.td, to, from, count * td_dtype_size(td_state_dtype(s))) && td_is_sound(s.td);
}

bool td_state_write(td_state s, int64_t begin, int64_t count, const void *from)
{
    char *to = elements_at(s, begin, count, "td_state_write");
    for (uint32_t u = 0; to && u < s.td->unit_count; u++) s.td->units[u].current = false; /* of all: the ranks that write may differ */
    return to && device_with(s)->write(s.td, to, from, count * td_dtype_size(td_state_dtype(s)));
}

void td_state_close(td_context *td)
{
    for (uint32_t u = 0; u < td->unit_count; u++) {
        td_unit *unit = &td->units[u];
        td_device_of(td, (td_memory)unit->place.memory)->put(td, unit->memory, unit->local_bytes, kind_of_memory(unit));
        td_free(td, unit->members, (size_t)unit->member_count * sizeof *unit->members, "host");
    }
    for (uint32_t s = 0; s < td->state_count; s++) td_free(td, td->states[s].name, strlen(td->states[s].name) + 1, "host");
    td_free(td, td->units, td->unit_room * sizeof *td->units, "host");
    td_free(td, td->states, td->state_room * sizeof *td->states, "host");
}
