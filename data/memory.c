/* Sets whose samples are in memory: over host arrays, and a range of another set. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "data/internal.h"

typedef struct memory_column {
    const char *data;
    int64_t elements; /* of one sample */
    int64_t bytes;    /* of one sample, as stored */
    double scale;     /* of bytes: given as f32, multiplied by it; 0: given as they are */
} memory_column;

typedef struct memory_set {
    data_set base;
    memory_column column[DATA_MAX_COLUMNS];
    data_owned owned[DATA_MAX_COLUMNS];
} memory_set;

/* In f64: 1 / 255.0 then gives the same f32 as a division by 255. */
static void scale_bytes(const uint8_t *restrict from, float *restrict to, int64_t count, double scale)
{
    for (int64_t i = 0; i < count; i++) to[i] = (float)(from[i] * scale);
}

static bool memory_get(const data_set *set, int64_t i, void *const *out, char *error)
{
    error[0] = 0; /* nothing can go wrong */
    const memory_set *m = set->self;
    for (int c = 0; c < set->columns; c++) {
        const memory_column *column = &m->column[c];
        const char *sample = column->data + i * column->bytes;
        if (column->scale == 0) {
            memcpy(out[c], sample, (size_t)column->bytes);
            continue;
        }
        scale_bytes((const uint8_t *)sample, out[c], column->elements, column->scale);
    }
    return true;
}

static void free_owned(td_context *td, const data_owned *owned, int count)
{
    for (int i = 0; i < count; i++) {
        if (owned[i].memory) td_free(td, owned[i].memory, owned[i].bytes, "data");
    }
}

static void memory_close(data_set *set)
{
    td_context *td = set->td;
    memory_set *m = set->self;
    free_owned(td, m->owned, DATA_MAX_COLUMNS);
    td_free(td, m, sizeof *m, "data");
}

/* 1 + the largest of non-negative values, else 0. */
static int64_t count_classes(const int32_t *values, int64_t count)
{
    int64_t classes = 0;
    for (int64_t i = 0; i < count; i++) {
        if (values[i] < 0) return 0;
        if (values[i] >= classes) classes = (int64_t)values[i] + 1;
    }
    return classes;
}

static bool add_array(memory_set *m, const data_array *a)
{
    data_set *set = &m->base;
    if (!a->name || !a->data || a->shape.rank < 1 || (a->scale != 0 && a->dtype != TD_U8)) {
        td_fail(set->td, TD_ERROR_USAGE,
                "data_memory: array %d (%s) needs a name, data, a shape that begins with the number of "
                "samples, and no scale unless it is u8",
                set->columns, a->name ? a->name : "no name");
        return false;
    }
    if (set->columns == 0) set->count = a->shape.dim[0];
    if (a->shape.dim[0] != set->count) {
        td_fail(set->td, TD_ERROR_USAGE, "data_memory: \"%s\" has %" PRId64 " samples but \"%s\" has %" PRId64, a->name,
                a->shape.dim[0], set->column[0].name, set->count);
        return false;
    }
    data_column *column = &set->column[set->columns];
    *column = (data_column){ .name = a->name, .dtype = a->scale != 0 ? TD_F32 : a->dtype };
    column->shape = td_shape_of((int)a->shape.rank - 1, a->shape.dim + 1);
    int64_t elements = td_shape_elements(column->shape);
    if (a->dtype == TD_I32 && elements == 1) column->classes = count_classes(a->data, set->count);

    memory_column *stored = &m->column[set->columns];
    stored->data = a->data;
    stored->elements = elements;
    stored->bytes = elements * td_dtype_size(a->dtype);
    stored->scale = a->scale;
    set->columns++;
    return true;
}

data_set *data_memory_owning(td_context *td, const char *name, const data_array *arrays, int count,
                             const data_owned *owned)
{
    int owned_count = owned ? count : 0;
    if (count < 1 || count > DATA_MAX_COLUMNS) {
        td_fail(td, TD_ERROR_USAGE, "data_memory: %d arrays given, 1 to %d can be had", count, DATA_MAX_COLUMNS);
        free_owned(td, owned, owned_count);
        return NULL;
    }
    memory_set *m = td_alloc(td, sizeof *m, "data");
    if (!m) {
        free_owned(td, owned, owned_count);
        return NULL;
    }
    memset(m, 0, sizeof *m);
    m->base = (data_set){ .td = td, .self = m, .get = memory_get, .close = memory_close };
    snprintf(m->base.name, sizeof m->base.name, "%s", name);
    for (int i = 0; i < owned_count; i++) m->owned[i] = owned[i];
    for (int i = 0; i < count; i++) {
        if (!add_array(m, &arrays[i])) {
            memory_close(&m->base);
            return NULL;
        }
    }
    return &m->base;
}

data_set *data_memory(td_context *td, const data_array *arrays, int count)
{
    return data_memory_owning(td, "arrays in memory", arrays, count, NULL);
}

/* ---- Subsets ---- */

typedef struct subset {
    data_set base;
    const data_set *whole;
    int64_t begin;
} subset;

static bool subset_get(const data_set *set, int64_t i, void *const *out, char *error)
{
    const subset *s = set->self;
    return s->whole->get(s->whole, s->begin + i, out, error);
}

static void subset_close(data_set *set) { td_free(set->td, set->self, sizeof(subset), "data"); }

data_set *data_subset(td_context *td, const data_set *set, int64_t begin, int64_t count)
{
    if (!set) return NULL;
    if (begin < 0 || count < 1 || begin > set->count - count) {
        td_fail(td, TD_ERROR_USAGE,
                "data_subset: %" PRId64 " samples from %" PRId64 " are not in %s, which has %" PRId64, count, begin,
                set->name, set->count);
        return NULL;
    }
    subset *s = td_alloc(td, sizeof *s, "data");
    if (!s) return NULL;
    *s = (subset){ .base = *set, .whole = set, .begin = begin };
    s->base.td = td;
    s->base.count = count;
    s->base.self = s;
    s->base.get = subset_get;
    s->base.close = subset_close;
    return &s->base;
}

void data_set_close(data_set *set)
{
    if (set && set->close) set->close(set);
}
