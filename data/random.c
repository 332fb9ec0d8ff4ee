/* Made-up samples: element e of column c of sample i is a hash of (seed, c, i, e), so get needs no state and any thread
 * computes the same. */
#include <inttypes.h>
#include <string.h>

#include "data/internal.h"

typedef struct random_set {
    data_set base;
    uint64_t seed;
} random_set;

static void fill(const data_column *column, uint64_t key, void *to)
{
    int64_t elements = td_shape_elements(column->shape);
    uint64_t classes = (uint64_t)column->classes;
    for (int64_t e = 0; e < elements; e++) {
        uint64_t bits = data_mix(key + (uint64_t)e * DATA_GOLDEN);
        switch (column->dtype) {
        case TD_F64: ((double *)to)[e] = (double)(bits >> 11) * 0x1p-53; break;
        case TD_F32: ((float *)to)[e] = (float)(bits >> 40) * 0x1p-24f; break;
        case TD_I64: ((int64_t *)to)[e] = classes ? (int64_t)(bits % classes) : 0; break;
        case TD_I32: ((int32_t *)to)[e] = classes ? (int32_t)(bits % classes) : 0; break;
        default: ((uint8_t *)to)[e] = classes ? (uint8_t)(bits % classes) : 0; break; /* TD_U8 */
        }
    }
}

static bool random_get(const data_set *set, int64_t i, void *const *out, char *error)
{
    error[0] = 0; /* nothing can go wrong */
    const random_set *r = set->self;
    for (int c = 0; c < set->columns; c++) {
        uint64_t key = data_mix(data_mix(r->seed + DATA_GOLDEN * (uint64_t)(c + 1)) ^ (uint64_t)i);
        fill(&set->column[c], key, out[c]);
    }
    return true;
}

static void random_close(data_set *set) { td_free(set->td, set->self, sizeof(random_set), "data"); }

static bool can_be_made(const data_column *column)
{
    switch (column->dtype) {
    case TD_F32:
    case TD_F64: return true;
    case TD_I64: return column->classes >= 0;
    case TD_I32: return column->classes >= 0 && column->classes <= (int64_t)INT32_MAX + 1;
    case TD_U8: return column->classes >= 0 && column->classes <= UINT8_MAX + 1;
    default: return false;
    }
}

data_set *data_random(td_context *td, const data_column *columns, int column_count, int64_t count, uint64_t seed)
{
    if (column_count < 1 || column_count > DATA_MAX_COLUMNS || count < 1) {
        td_fail(td, TD_ERROR_USAGE,
                "data_random: %d columns and %" PRId64 " samples asked for; 1 to %d columns and at least 1 "
                "sample can be had",
                column_count, count, DATA_MAX_COLUMNS);
        return NULL;
    }
    for (int c = 0; c < column_count; c++) {
        if (can_be_made(&columns[c])) continue;
        td_fail(td, TD_ERROR_USAGE,
                "data_random: column \"%s\" of dtype %s with %" PRId64 " classes cannot be made; f32, f64, i32, "
                "i64 and u8 can, with classes that fit",
                columns[c].name, td_dtype_name(columns[c].dtype), columns[c].classes);
        return NULL;
    }
    random_set *r = td_alloc(td, sizeof *r, "data");
    if (!r) return NULL;
    *r = (random_set){ .seed = seed };
    r->base = (data_set){ .td = td,
                          .name = "random samples",
                          .count = count,
                          .columns = column_count,
                          .self = r,
                          .get = random_get,
                          .close = random_close };
    memcpy(r->base.column, columns, (size_t)column_count * sizeof *columns);
    return &r->base;
}
