/* A micro-batch as the program's inputs, and a loader's position as text. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "data/internal.h"

/* "image, label, weight" */
static void list_columns(const data_loader *l, char *to, size_t room)
{
    size_t used = 0;
    to[0] = 0;
    for (int c = 0; c < l->columns && used < room; c++) {
        used += (size_t)snprintf(to + used, room - used, "%s%s", c ? ", " : "", l->column[c].name);
    }
}

static const loader_column *find_column(const data_batch *b, const char *name, td_here here)
{
    const data_loader *l = b->loader;
    if (!l) return NULL;
    /* given is this thread's own: only data_next and data_seek write it, on the thread that uses the loader */
    if (b->sequence < l->given - l->options.hold) {
        td_fail(l->td, TD_ERROR_USAGE,
                "data_get: the memory of this batch has been used again: a batch stays valid until "
                "%d data_next calls later (option hold) (%s:%d)",
                l->options.hold, here.file, here.line);
        return NULL;
    }
    for (int c = 0; name && c < l->columns; c++) {
        if (strcmp(l->column[c].name, name) == 0) return &l->column[c];
    }
    char names[512];
    list_columns(l, names, sizeof names);
    td_fail(l->td, TD_ERROR_USAGE, "data_get: no column \"%s\"; there are %s (%s:%d)", name ? name : "", names,
            here.file, here.line);
    return NULL;
}

static const void *column_memory(const data_batch *b, const loader_column *column)
{
    const data_loader *l = b->loader;
    if (l->options.shapes_only) return l; /* an input has an address, though nobody reads there */
    return l->memory + b->sequence % l->slots * l->slot_bytes + column->offset;
}

td_tensor data_get_at(const data_batch *b, const char *name, td_here here)
{
    const loader_column *column = find_column(b, name, here);
    if (!column) return (td_tensor){ .td = b->loader ? b->loader->td : NULL, .id = TD_NONE };
    td_shape shape = { .rank = column->shape.rank + 1, .dim = { b->rows } };
    for (int64_t d = 0; d < column->shape.rank; d++) shape.dim[d + 1] = column->shape.dim[d];
    return td_batch_at(b->loader->td, column->name, column->dtype, shape, column_memory(b, column), here);
}

const void *data_rows_at(const data_batch *b, const char *name, data_column *column, td_here here)
{
    const loader_column *found = find_column(b, name, here);
    if (!found) return NULL;
    if (b->loader->options.shapes_only) {
        td_fail(b->loader->td, TD_ERROR_USAGE,
                "data_rows: the loader was opened for shapes only and has no rows (%s:%d)", here.file, here.line);
        return NULL;
    }
    if (column) *column = (data_column){ found->name, found->dtype, found->shape, found->classes };
    return column_memory(b, found);
}

/* ---- Position ---- */

#define POSITION_FORMAT(integer, natural)                                                                              \
    "epoch %" integer " batch %" integer " micro %" integer " samples %" integer " seed %" natural " count %" integer  \
    " batch_rows %" integer " shuffle %d"

void data_position_text(const data_position *p, char text[DATA_POSITION_BYTES])
{
    snprintf(text, DATA_POSITION_BYTES, POSITION_FORMAT(PRId64, PRIu64), p->epoch, p->batch, p->micro, p->samples,
             p->seed, p->count, p->batch_rows, p->shuffle ? 1 : 0);
}

bool data_position_parse(const char *text, data_position *out)
{
    data_position p = { 0 };
    int shuffle = 0;
    int fields = sscanf(text, POSITION_FORMAT(SCNd64, SCNu64), &p.epoch, &p.batch, &p.micro, &p.samples, &p.seed,
                        &p.count, &p.batch_rows, &shuffle);
    if (fields != 8) return false;
    p.shuffle = shuffle != 0;
    char again[DATA_POSITION_BYTES];
    data_position_text(&p, again);
    if (strcmp(again, text) != 0) return false; /* something between or after the numbers */
    *out = p;
    return true;
}
