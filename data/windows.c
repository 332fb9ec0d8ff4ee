/* Windows of a sequence of ids as a data set: random crops, or one after the other. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "data/tokenizer.h"

enum { ENDLESS_BITS = 40 };

typedef struct windows_set {
    data_set base;
    const data_ids *ids;
    data_windows_options options;
    int64_t begin;  /* of the part */
    int64_t places; /* where a crop may begin */
} windows_set;

static int64_t window_begin(const windows_set *w, int64_t i)
{
    if (w->options.consecutive) return w->begin + i * w->options.context;
    uint64_t bits = data_mix(data_mix(w->options.seed + DATA_GOLDEN) ^ (uint64_t)i);
    return w->begin + (int64_t)(bits % (uint64_t)w->places);
}

static bool windows_get(const data_set *set, int64_t i, void *const *out, char *error)
{
    const windows_set *w = set->self;
    const data_ids *ids = w->ids;
    int64_t begin = window_begin(w, i), context = w->options.context;
    int32_t *x = out[0], *y = out[1];
    for (int64_t k = 0; k <= context; k++) {
        int64_t at = begin + k;
        int64_t id = ids->bits == 16 ? ((const uint16_t *)ids->data)[at] : ((const uint32_t *)ids->data)[at];
        if (id >= ids->vocabulary) {
            snprintf(error, DATA_ERROR_BYTES,
                     "id %" PRId64 " at place %" PRId64 " of the file is outside the vocabulary of %" PRId64, id, at,
                     ids->vocabulary);
            return false;
        }
        if (k < context) x[k] = (int32_t)id;
        if (k > 0) y[k - 1] = (int32_t)id;
    }
    return true;
}

static void windows_close(data_set *set) { td_free(set->td, set->self, sizeof(windows_set), "data"); }

static bool options_fit(td_context *td, const data_windows_options *o)
{
    bool part = o->part == DATA_ALL || o->part == DATA_TRAIN || o->part == DATA_VALIDATION;
    if (part && o->context >= 1 && o->fraction > 0 && o->fraction < 1 && o->count >= 0) return true;
    td_fail(td, TD_ERROR_USAGE,
            "data_windows: context %" PRId64 ", fraction %g, count %" PRId64 ", part %d: a context of at least 1, a "
            "fraction between 0 and 1, a count of at least 0 and a part of data_part can be had",
            o->context, o->fraction, o->count, (int)o->part);
    return false;
}

data_set *data_windows(td_context *td, const data_ids *ids, const data_windows_options *options)
{
    if (!ids) return NULL;
    data_windows_options o = options ? *options : (data_windows_options){ 0 };
    if (o.fraction == 0) o.fraction = 0.9;
    if (!options_fit(td, &o)) return NULL;
    static const char *const part_name[] = { "text", "training part", "validation part" };
    int64_t train = (int64_t)floor(o.fraction * (double)ids->count);
    int64_t begin = o.part == DATA_VALIDATION ? train : 0;
    int64_t count = (o.part == DATA_TRAIN ? train : ids->count) - begin;
    if (count <= o.context) {
        td_fail(td, TD_ERROR_DATA,
                "%s: the %s has %" PRId64 " ids, but a window of context %" PRId64
                " takes one more than its context: use a smaller context or more text",
                ids->name, part_name[o.part], count, o.context);
        return NULL;
    }
    windows_set *w = td_alloc(td, sizeof *w, "data");
    if (!w) return NULL;
    *w = (windows_set){ .ids = ids, .options = o, .begin = begin, .places = count - o.context };
    int64_t crops = o.count ? o.count : (int64_t)1 << ENDLESS_BITS;
    data_column x = { .name = "x", .dtype = TD_I32, .shape = TD_SHAPE(o.context), .classes = ids->vocabulary }, y = x;
    y.name = "y";
    w->base = (data_set){ .td = td,
                          .count = o.consecutive ? (count - 1) / o.context : crops,
                          .columns = 2,
                          .column = { x, y },
                          .self = w,
                          .get = windows_get,
                          .close = windows_close };
    snprintf(w->base.name, sizeof w->base.name, "%s", ids->name);
    return &w->base;
}
