/* Dtypes, shapes and text. */
#include "core/internal.h"

#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    int size;
} dtypes[TD_DTYPES] = {
    [TD_F32] = { "f32", 4 }, [TD_F64] = { "f64", 8 }, [TD_BF16] = { "bf16", 2 }, [TD_F16] = { "f16", 2 },
    [TD_I32] = { "i32", 4 }, [TD_I64] = { "i64", 8 }, [TD_U8] = { "u8", 1 },
};

int64_t td_dtype_size(td_dtype dtype) { return (unsigned)dtype < TD_DTYPES ? dtypes[dtype].size : 0; }
const char *td_dtype_name(td_dtype dtype) { return (unsigned)dtype < TD_DTYPES ? dtypes[dtype].name : "?"; }

bool td_dtype_named(const char *name, td_dtype *out)
{
    for (int d = 0; d < TD_DTYPES; d++)
        if (!strcmp(dtypes[d].name, name)) return *out = (td_dtype)d, true;
    return false;
}

bool td_name_matches(const char *pattern, const char *name) { return fnmatch(pattern, name, 0) == 0; }

/* A rank that cannot be gives a shape no operation accepts. */
td_shape td_shape_of(int rank, const int64_t *dims)
{
    td_shape shape = { .rank = rank };
    if (rank < 0 || rank > TD_MAX_DIMS) return (td_shape){ .rank = -1 };
    for (int i = 0; i < rank; i++) shape.dim[i] = dims[i];
    return shape;
}

int64_t td_shape_elements(td_shape shape)
{
    int64_t n = 1;
    bool fits = true, none = false;
    for (int64_t i = 0; i < shape.rank; i++) {
        fits &= !__builtin_mul_overflow(n, shape.dim[i], &n);
        none |= shape.dim[i] == 0;
    }
    return none ? 0 : fits ? n : INT64_MAX;
}

bool td_shape_possible(td_shape shape, td_dtype dtype)
{
    int64_t bytes = td_dtype_size(dtype);
    bool possible = shape.rank >= 0 && shape.rank <= TD_MAX_DIMS && bytes;
    for (int64_t i = 0; i < shape.rank && possible; i++) /* without a size of 0 too, so that products of some sizes fit */
        possible = shape.dim[i] >= 0 && !__builtin_mul_overflow(bytes, shape.dim[i] ? shape.dim[i] : 1, &bytes);
    return possible;
}

bool td_shape_equal(td_shape a, td_shape b)
{
    if (a.rank != b.rank) return false;
    for (int64_t i = 0; i < a.rank; i++)
        if (a.dim[i] != b.dim[i]) return false;
    return true;
}

char *td_shape_text(td_shape shape, char to[TD_SHAPE_TEXT])
{
    int at = snprintf(to, TD_SHAPE_TEXT, "(");
    for (int64_t i = 0; i < shape.rank; i++)
        at += snprintf(to + at, TD_SHAPE_TEXT - at, i ? ", %lld" : "%lld", (long long)shape.dim[i]);
    snprintf(to + at, TD_SHAPE_TEXT - at, ")");
    return to;
}

td_shape td_local_shape(const td_mesh *mesh, td_shape shape, td_placement place)
{
    for (int a = 0; a < mesh->axes; a++) {
        if (place.kind[a] != TD_SHARDED) continue;
        int64_t *dim = &shape.dim[place.dim[a]];
        *dim = (*dim + mesh->size[a] - 1) / mesh->size[a];
    }
    return shape;
}

void td_mesh_rows(const td_mesh *mesh, int *part, int *parts)
{
    *part = 0;
    *parts = 1;
    for (int a = 0; a < mesh->axes; a++) {
        if (mesh->same_rows[a]) continue;
        *part = *part * mesh->size[a] + mesh->at[a];
        *parts *= mesh->size[a];
    }
}

bool td_placement_equal(td_placement a, td_placement b)
{
    if (a.memory != b.memory) return false;
    for (int i = 0; i < TD_MAX_AXES; i++) {
        if (a.kind[i] != b.kind[i]) return false;
        if (a.kind[i] == TD_SHARDED && a.dim[i] != b.dim[i]) return false;
    }
    return true;
}

void td_text_add(td_text *b, const char *format, ...)
{
    if (b->td->error != TD_OK && !b->text) return;
    for (;;) {
        va_list args;
        va_start(args, format);
        size_t left = b->room - b->length;
        int n = vsnprintf(b->text ? b->text + b->length : NULL, b->text ? left : 0, format, args);
        va_end(args);
        if (b->text && (size_t)n < left) {
            b->length += (uint32_t)n;
            return;
        }
        if (!td_grow(b->td, (void **)&b->text, &b->room, b->length + (uint32_t)n + 256, 1, "host")) return;
    }
}

const char *td_module_path(const td_context *td, uint32_t module)
{
    return module < td->module_count ? td->modules[module].path : "";
}

const char *td_location(td_context *td, uint32_t module, const char *file, int line)
{
    const char *path = td_module_path(td, module);
    if (*path)
        snprintf(td->location, sizeof td->location, "(%s) (%s:%d)", path, file ? file : "?", line);
    else
        snprintf(td->location, sizeof td->location, "(%s:%d)", file ? file : "?", line);
    return td->location;
}
