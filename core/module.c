/* Modules: the parameter tree as dotted paths, and which of its places is being recorded. */
#include "core/internal.h"

#include <stdio.h>
#include <string.h>

static td_module failed_module(td_context *td) { return (td_module){ .td = td, .id = TD_NONE }; }

td_module td_root(td_context *td) { return td->module_count ? (td_module){ .td = td, .id = 0 } : failed_module(td); }
td_context *td_module_context(td_module m) { return m.td; }
const char *td_module_name(td_module m) { return td_module_path(m.td, m.id); }

td_module td_child(td_module parent, const char *name)
{
    td_context *td = parent.td;
    if (parent.id >= td->module_count) return failed_module(td);
    if (!*name) {
        td_fail(td, TD_ERROR_USAGE, "td_child: a module of '%s' needs a name", td->modules[parent.id].path);
        return failed_module(td);
    }
    const char *above = td->modules[parent.id].path;
    size_t bytes = strlen(above) + strlen(name) + 2;
    char *path = td_alloc(td, bytes, "host");
    if (!path) return failed_module(td);
    snprintf(path, bytes, *above ? "%s.%s" : "%s%s", above, name);
    uint64_t hash = td_hash_text(path);
    for (uint32_t m = 0; m < td->module_count; m++) {
        if (td->modules[m].hash != hash || strcmp(td->modules[m].path, path)) continue;
        td_free(td, path, bytes, "host");
        return (td_module){ .td = td, .id = m };
    }
    char *kept = td_copy_text(td, path, "host"); /* exactly as long as its text */
    td_free(td, path, bytes, "host");
    if (!kept) return failed_module(td);
    if (!td_grow(td, (void **)&td->modules, &td->module_room, td->module_count + 1, sizeof *td->modules, "host")) {
        td_free(td, kept, strlen(kept) + 1, "host");
        return failed_module(td);
    }
    td->modules[td->module_count] = (td_module_entry){ .path = kept, .hash = hash, .parent = parent.id };
    return (td_module){ .td = td, .id = td->module_count++ };
}

void td_enter(td_module m)
{
    td_context *td = m.td;
    if (m.id >= td->module_count) return;
    int deep = (int)(sizeof td->module_stack / sizeof *td->module_stack);
    if (td->module_depth == deep) {
        td_fail(td, TD_ERROR_USAGE, "td_enter: '%s' is more than %d modules deep; is a td_leave missing?", td->modules[m.id].path, deep);
        return;
    }
    td->module_stack[td->module_depth++] = td->module;
    td->module = m.id;
}

void td_leave(td_module m)
{
    td_context *td = m.td;
    if (m.id >= td->module_count || td->error != TD_OK) return;
    if (!td->module_depth || td->module != m.id) {
        td_fail(td, TD_ERROR_USAGE, "td_leave: '%s' was not the module entered last", td->modules[m.id].path);
        return;
    }
    td->module = td->module_stack[--td->module_depth];
}

void td_set_dtype(td_module m, td_dtype dtype)
{
    td_context *td = m.td;
    if (m.id >= td->module_count || td->error != TD_OK) return;
    const char *path = td->modules[m.id].path;
    td_dtype all = td->options.dtype, narrow = all == TD_F16 ? TD_F16 : TD_BF16;
    if (all == TD_F64 || (dtype != TD_F32 && dtype != narrow)) {
        td_fail(td, TD_ERROR_USAGE, "td_set_dtype: '%s' cannot compute in %s: %s%s", path, td_dtype_name(dtype),
                all == TD_F64 ? "the context is f64 and computes in f64 throughout" : "products are in f32 or ",
                all == TD_F64 ? "" : td_dtype_name(narrow));
        return;
    }
    td->modules[m.id].has_dtype = true;
    td->modules[m.id].dtype = dtype;
    td->dtypes_hash = 0;
    for (uint32_t i = 0; i < td->module_count; i++) /* a sum: modules may be made in any order */
        if (td->modules[i].has_dtype) td->dtypes_hash += td_mix(td->modules[i].hash, td->modules[i].dtype + 1);
}

td_dtype td_get_dtype(td_module m)
{
    const td_context *td = m.td;
    if (m.id >= td->module_count) return td->options.dtype;
    uint32_t module = m.id;
    while (module && !td->modules[module].has_dtype) module = td->modules[module].parent;
    return td->modules[module].has_dtype ? td->modules[module].dtype : td->options.dtype;
}

uint64_t td_random_key(td_context *td)
{
    if (td->error != TD_OK) return 0; /* what it would key is not recorded */
    td_module_entry *m = &td->modules[td->module];
    if (m->draws_stamp != td->draws_stamp) {
        m->draws_stamp = td->draws_stamp;
        m->draws = 0;
    }
    return td_mix(m->hash, m->draws++);
}
