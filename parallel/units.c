/* Which parameters share a unit.
 *
 *   buckets    from the last parameter to the first, the order in which gradients appear: the first bucket 1 MiB, then
 *              bucket_bytes each
 *   size       in the order they are made, up to so many elements each; small ones apart from the others, whole on every rank
 *   patterns   a unit for each module that a pattern names ("h.*": h.0, h.1, ...); without patterns for each block, a module that
 *              is numbered, or, in a model that has none, for each module that has parameters. What is in none of these is
 *              the root's, which stays gathered between forward and backward: one unit, and without patterns one for each of its
 *              parameters that is as large as a block's unit (an embedding, whose last reader may come long before the head's)
 *
 * Frozen parameters, where parameters are sharded or cut, have units of their own by the same rules: they have no gradients or moments.
 *
 * With a tensor axis, parameters that tensor_columns names are cut along their first dimension, a linear layer's outputs, and those
 * that tensor_rows names along the second, its inputs; where they would share a unit with others, those cut alike have one of their own.
 */
#include "parallel/strategy.h"

#include <string.h>

enum { DEFAULT_BUCKET = 25 << 20, FIRST_BUCKET = 1 << 20 };
enum { MOST_UNIT = 500000000, UNITS_AT_LEAST = 8, MOST_WHOLE = 100000, WHOLE_PART = 1000 }; /* DeepSpeed's, and for small models */

static void choose_buckets(const par_attached *a, const td_state *states, int count, td_unit_choice *out)
{
    int64_t full = a->options.bucket_bytes ? a->options.bucket_bytes : DEFAULT_BUCKET;
    int64_t room = full < FIRST_BUCKET ? full : FIRST_BUCKET, bytes = 0;
    int unit = 0;
    for (int i = count; i-- > 0;) {
        int64_t own = td_shape_elements(td_state_shape(states[i])) * td_dtype_size(td_state_dtype(states[i]));
        if (bytes && bytes + own > room) {
            unit++;
            bytes = 0;
            room = full;
        }
        bytes += own;
        out[i] = (td_unit_choice){ .unit = unit };
    }
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* By size. Those that stay whole have units of their own, which are sent as ddp's are. */
static void choose_by_size(const par_attached *a, td_context *td, const td_state *states, int count, td_unit_choice *out)
{
    int64_t all = 0, used[2] = { 0 };
    int unit[2] = { 0, 1 };
    for (int64_t s = 0; s < td_state_count(td); s++) {
        td_state other = td_state_at(td, s);
        if (td_state_kind_of(other) == TD_PARAMETER && td_state_trains(other) == td_state_trains(states[0]))
            all += td_shape_elements(td_state_shape(other));
    }
    int64_t room = a->options.unit_elements ? a->options.unit_elements : least(MOST_UNIT, (all + UNITS_AT_LEAST - 1) / UNITS_AT_LEAST);
    int64_t whole = a->options.whole_elements ? a->options.whole_elements : least(MOST_WHOLE, all / WHOLE_PART);
    for (int i = 0; i < count; i++) {
        int64_t own = td_shape_elements(td_state_shape(states[i]));
        bool small = own <= whole;
        if (used[small] && used[small] + own > room) {
            unit[small] += 2;
            used[small] = 0;
        }
        used[small] += own;
        out[i] = (td_unit_choice){ .unit = unit[small], .whole = small };
    }
}

/* How much of `name` the pattern takes as a module's path: whole components, '*' for any part of one. 0: no match. */
static size_t match(const char *pattern, size_t length, const char *name)
{
    if (!length) return 0;
    if (*pattern == '*') {
        for (size_t n = 0;; n++) { /* the shortest that lets the rest match */
            bool ends = length == 1 ? name[n] == '.' || !name[n] : false;
            size_t rest = length > 1 ? match(pattern + 1, length - 1, name + n) : 0;
            if (ends || rest) return n + rest;
            if (!name[n] || name[n] == '.') return 0;
        }
    }
    if (*pattern != *name) return 0;
    if (length == 1) return name[1] == '.' || !name[1] ? 1 : 0;
    size_t rest = match(pattern + 1, length - 1, name + 1);
    return rest ? rest + 1 : 0;
}

static size_t module_length(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? (size_t)(dot - name) : 0;
}

/* The part of `name` up to its first component that is a number, as "h.0" of "h.0.attn.weight"; 0: it has none. */
static size_t block_length(const char *name)
{
    for (const char *at = name; *at;) {
        size_t length = strcspn(at, "."), digits = strspn(at, "0123456789");
        if (at[length] && length && digits == length) return (size_t)(at - name) + length;
        at += length + (at[length] == '.');
    }
    return 0;
}

static bool has_blocks(td_context *td)
{
    bool found = false;
    for (int64_t s = 0; s < td_state_count(td) && !found; s++)
        found = td_state_kind_of(td_state_at(td, s)) == TD_PARAMETER && block_length(td_state_name(td_state_at(td, s))) > 0;
    return found;
}

/* The part of `name` that is its unit's module; 0: the root's. */
static size_t unit_path(const char *patterns, bool blocks, const char *name)
{
    if (!patterns) return blocks ? block_length(name) : module_length(name);
    for (const char *at = patterns; *at;) {
        size_t length = strcspn(at, ","), found = match(at, length, name);
        if (found) return found;
        at += length + (at[length] == ',');
    }
    return 0;
}

/* Whether one of the patterns, with commas between them, names the module or parameter. */
static bool names(const char *patterns, const char *name)
{
    for (const char *at = patterns; at && *at;) {
        size_t length = strcspn(at, ",");
        if (match(at, length, name)) return true;
        at += length + (at[length] == ',');
    }
    return false;
}

/* Every pattern must match a parameter. */
static bool check_patterns(td_context *td, const char *name, const char *what, const char *patterns)
{
    for (const char *at = patterns; at && *at;) {
        size_t length = strcspn(at, ",");
        bool found = false;
        for (int64_t s = 0; s < td_state_count(td) && !found; s++)
            found = td_state_kind_of(td_state_at(td, s)) == TD_PARAMETER && match(at, length, td_state_name(td_state_at(td, s)));
        if (!found) {
            td_fail(td, TD_ERROR_USAGE, "%s: the %s pattern '%.*s' matches no parameter; the first one is called '%s'", name,
                    what, (int)length, at, td_state_name(td_state_at(td, 0)));
            return false;
        }
        at += length + (at[length] == ',');
    }
    return true;
}

static bool is_roots(bool blocks, td_state s) { return !unit_path(NULL, blocks, td_state_name(s)); }

/* Gives the root's large parameters units of their own. */
static void part_root(bool blocks, const td_state *states, int count, int units, td_unit_choice *out)
{
    int64_t largest = 0;
    for (int u = 0; u < units; u++) {
        int64_t elements = 0;
        for (int i = 0; i < count; i++)
            if (out[i].unit == u && !is_roots(blocks, states[i])) elements += td_shape_elements(td_state_shape(states[i]));
        if (elements > largest) largest = elements;
    }
    for (int i = 0; i < count && largest; i++)
        if (is_roots(blocks, states[i]) && td_shape_elements(td_state_shape(states[i])) >= largest) out[i].unit = units++;
}

static bool choose_by_name(const par_attached *a, td_context *td, const td_state *states, int count, td_unit_choice *out)
{
    int units = 0;
    bool blocks = has_blocks(td);
    for (int i = 0; i < count; i++) {
        const char *name = td_state_name(states[i]);
        size_t length = unit_path(a->options.units, blocks, name);
        out[i] = (td_unit_choice){ .unit = -1, .root = !length || a->options.keep_gathered };
        for (int j = 0; j < i && out[i].unit < 0; j++) {
            const char *other = td_state_name(states[j]);
            if (unit_path(a->options.units, blocks, other) == length && !strncmp(name, other, length)) out[i].unit = out[j].unit;
        }
        if (out[i].unit < 0) out[i].unit = units++;
    }
    if (!a->options.units) part_root(blocks, states, count, units, out);
    return check_patterns(td, a->name, "unit", a->options.units);
}

/* ---- Parameters that are cut */

/* How the parameter is cut: dim 0 (columns), 1 (rows); -1: not, as a bias beside rows. */
static int cut_dim(const par_attached *a, td_state s)
{
    if (a->tensor_axis < 0) return -1;
    if (names(a->options.tensor_columns, td_state_name(s))) return 0;
    return td_state_shape(s).rank > 1 && names(a->options.tensor_rows, td_state_name(s)) ? 1 : -1;
}

static bool may_be_cut(const par_attached *a, td_context *td, td_state s, int dim)
{
    td_shape shape = td_state_shape(s);
    int ways = td_context_mesh(td)->size[a->tensor_axis];
    bool both = dim == 0 && names(a->options.tensor_rows, td_state_name(s));
    if (shape.rank > dim && shape.dim[dim] % ways == 0 && !both) return true;
    if (both)
        td_fail(td, TD_ERROR_USAGE, "%s: '%s' is named by columns and by rows; it can be shared by one of them", a->name, td_state_name(s));
    else if (shape.rank <= dim)
        td_fail(td, TD_ERROR_USAGE, "%s: '%s' is a scalar, which has no columns to share", a->name, td_state_name(s));
    else
        td_fail(td, TD_ERROR_USAGE, "%s: '%s' has %lld %s, which %d ranks cannot share evenly", a->name, td_state_name(s),
                (long long)shape.dim[dim], dim ? "inputs" : "outputs", ways);
    return false;
}

/* Units are numbered anew: of each, what is not cut, then what is cut along the first dimension, along the second. */
static bool cut_units(const par_attached *a, td_context *td, const td_state *states, int count, td_unit_choice *out)
{
    for (int i = 0; i < count; i++) {
        int dim = cut_dim(a, states[i]);
        out[i].unit = 3 * out[i].unit + 1 + dim;
        if (dim < 0) continue;
        if (!may_be_cut(a, td, states[i], dim)) return false;
        out[i].cut = (td_cut){ .ways = td_context_mesh(td)->size[a->tensor_axis], .axis = (int8_t)a->tensor_axis, .dim = (int8_t)dim };
    }
    return a->tensor_axis < 0 || (check_patterns(td, a->name, "column", a->options.tensor_columns) &&
                                  check_patterns(td, a->name, "row", a->options.tensor_rows));
}

bool par_choose_units(void *self, td_context *td, const td_state *states, int count, td_unit_choice *out)
{
    const par_attached *a = self;
    if (a->units == PAR_UNITS_SIZE) choose_by_size(a, td, states, count, out);
    else if (a->units == PAR_UNITS_BUCKET) choose_buckets(a, states, count, out);
    else if (!choose_by_name(a, td, states, count, out)) return false;
    return cut_units(a, td, states, count, out);
}
