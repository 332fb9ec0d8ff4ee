/* Numbers in text: one sample a line, cells between separators, plain or gzip. Read once, front to back; every
 * complaint names the line and the column, both from 1. Numbers are read as in the C locale, whatever the program's. */
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/internal.h"

enum { TEXT_BYTES = 64 << 10, CELL_BYTES = 64, FIRST_ROOM = 4096 };

/* Memory that grows by doubling. */
typedef struct growing {
    void *data;
    size_t used, room; /* bytes */
} growing;

typedef enum cell_end { CELL_NEXT, CELL_LINE, CELL_FILE, CELL_FAILED } cell_end;

typedef struct csv_reader {
    td_context *td;
    data_csv_options options;
    data_file file;
    char *text; /* TEXT_BYTES of the file, [at, end) not yet seen */
    int64_t at, end;
    int64_t line, column;  /* of the current cell */
    char cell[CELL_BYTES]; /* its text, cut to fit */
    int cell_length;       /* of the whole text, without blanks around it */
    growing row;           /* double: the line's cells */
    growing features, target;
    int64_t width, count; /* cells of a line (0: none read yet), lines */
} csv_reader;

static void *grow(td_context *td, growing *g, size_t bytes)
{
    if (g->room - g->used < bytes) {
        size_t room = g->room ? 2 * g->room : FIRST_ROOM;
        void *larger = td_alloc(td, room, "data");
        if (!larger) return NULL;
        if (g->data) {
            memcpy(larger, g->data, g->used);
            td_free(td, g->data, g->room, "data");
        }
        g->data = larger;
        g->room = room;
    }
    void *added = (char *)g->data + g->used;
    g->used += bytes;
    return added;
}

static void release(td_context *td, growing *g)
{
    if (g->data) td_free(td, g->data, g->room, "data");
    *g = (growing){ 0 };
}

static bool cell_wrong(csv_reader *r, const char *hint)
{
    int shown = r->cell_length < CELL_BYTES ? r->cell_length : CELL_BYTES - 1;
    for (int i = 0; i < shown; i++) {
        if ((unsigned char)r->cell[i] < ' ') r->cell[i] = '?';
    }
    if (shown == 0) {
        td_fail(r->td, TD_ERROR_DATA, "%s: line %" PRId64 ", column %" PRId64 ": the cell is empty%s", r->file.path,
                r->line, r->column, hint);
    } else {
        td_fail(r->td, TD_ERROR_DATA, "%s: line %" PRId64 ", column %" PRId64 ": \"%s\" is not a finite number%s",
                r->file.path, r->line, r->column, r->cell, hint);
    }
    return false;
}

static bool value_wrong(csv_reader *r, double value, const char *what)
{
    td_fail(r->td, TD_ERROR_DATA, "%s: line %" PRId64 ", column %" PRId64 ": %.17g %s", r->file.path, r->line,
            r->column, value, what);
    return false;
}

/* ---- Cells ---- */

/* The next byte, -1 at the end of the file, -2 after an error. */
static int next_byte(csv_reader *r)
{
    if (r->at == r->end) {
        r->at = 0;
        r->end = data_file_read(&r->file, r->text, TEXT_BYTES);
        if (r->end < 0) {
            r->end = 0;
            return -2;
        }
        if (r->end == 0) return -1;
    }
    return (unsigned char)r->text[r->at++];
}

static bool is_blank(int byte, char separator)
{
    return (byte == ' ' || byte == '\t' || byte == '\r') && byte != (unsigned char)separator;
}

/* Reads one cell into r->cell and says what ended it. */
static cell_end next_cell(csv_reader *r)
{
    int length = 0, kept = 0; /* kept: up to the last byte that is not blank */
    for (;;) {
        int byte = next_byte(r);
        bool ends = byte < 0 || byte == '\n' || byte == (unsigned char)r->options.separator;
        if (ends) {
            r->cell_length = kept;
            r->cell[kept < CELL_BYTES ? kept : CELL_BYTES - 1] = 0;
            if (byte == -2) return CELL_FAILED;
            return byte == -1 ? CELL_FILE : byte == '\n' ? CELL_LINE : CELL_NEXT;
        }
        bool blank = is_blank(byte, r->options.separator);
        if (blank && length == 0) continue;
        if (length < CELL_BYTES - 1) r->cell[length] = (char)byte;
        if (length < INT32_MAX) length++;
        if (!blank) kept = length;
    }
}

/* Whether the cell is a finite number, which goes to *value. */
static bool parse_number(const csv_reader *r, double *value)
{
    if (r->cell_length == 0 || r->cell_length >= CELL_BYTES) return false;
    char *end;
    *value = strtod(r->cell, &end);
    return end == r->cell + r->cell_length && isfinite(*value);
}

/* ---- Lines ---- */

/* Whether the cell that r->cell holds may stand where it does; words: those of the line so far, this one included. A
 * line of words alone may be a header, one of both is an error unless the user calls it a header. */
static bool cell_fits(csv_reader *r, bool may_be_header, bool number, int64_t words)
{
    if (may_be_header && r->options.header == DATA_HEADER_YES) return true;
    if (number && words == 0) return true;
    if (!may_be_header) return number || cell_wrong(r, "");
    if (words == 0 || words == r->column) return true;
    if (!number) return cell_wrong(r, "; if the line is a header, say so (option header)");
    td_fail(r->td, TD_ERROR_DATA,
            "%s: line %" PRId64 ", column 1 is not a finite number, though column %" PRId64 " is; if the line is a "
            "header, say so (option header)",
            r->file.path, r->line, r->column);
    return false;
}

/* Reads a line into r->row. *words: how many of its cells are no numbers. */
static cell_end read_line(csv_reader *r, bool may_be_header, int64_t *cells, int64_t *words)
{
    r->line++;
    r->row.used = 0;
    *cells = *words = 0;
    for (;;) {
        r->column = *cells + 1;
        cell_end end = next_cell(r);
        if (end == CELL_FAILED) return end;
        if (end != CELL_NEXT && *cells == 0 && r->cell_length == 0) return end; /* a blank line */
        double *value = grow(r->td, &r->row, sizeof *value);
        if (!value) return CELL_FAILED;
        bool number = parse_number(r, value);
        *words += !number;
        if (!cell_fits(r, may_be_header, number, *words)) return CELL_FAILED;
        ++*cells;
        if (end != CELL_NEXT) return end;
    }
}

static bool add_label(csv_reader *r, double value)
{
    if (value != floor(value) || value < 0 || value > INT32_MAX) {
        return value_wrong(r, value, "is not a class: classes are integers from 0");
    }
    if (r->options.classes && value >= (double)r->options.classes) {
        td_fail(r->td, TD_ERROR_DATA,
                "%s: line %" PRId64 ", column %" PRId64 ": label %g is not below the %" PRId64 " classes asked for",
                r->file.path, r->line, r->column, value, r->options.classes);
        return false;
    }
    int32_t *label = grow(r->td, &r->target, sizeof *label);
    if (label) *label = (int32_t)value;
    return label;
}

static bool add_value(csv_reader *r, growing *to, double value)
{
    if (r->options.dtype == TD_F64) {
        double *added = grow(r->td, to, sizeof *added);
        if (added) *added = value;
        return added;
    }
    if (!isfinite((float)value)) return value_wrong(r, value, "is too large for f32");
    float *added = grow(r->td, to, sizeof *added);
    if (added) *added = (float)value;
    return added;
}

/* The first line of data fixes the width and the target's column. */
static bool fix_width(csv_reader *r, int64_t cells)
{
    int64_t target = r->options.target_column;
    if (cells < 2) {
        td_fail(r->td, TD_ERROR_DATA,
                "%s: line %" PRId64 " has one cell; features and a target are needed, separated by '%c'", r->file.path,
                r->line, r->options.separator);
        return false;
    }
    if (target > cells) {
        td_fail(r->td, TD_ERROR_USAGE,
                "%s: target column %" PRId64 " asked for, but line %" PRId64 " has %" PRId64 " columns", r->file.path,
                target, r->line, cells);
        return false;
    }
    r->width = cells;
    if (target == 0) r->options.target_column = cells;
    return true;
}

static bool add_line(csv_reader *r, int64_t cells)
{
    if (r->width == 0 && !fix_width(r, cells)) return false;
    if (cells != r->width) {
        td_fail(r->td, TD_ERROR_DATA, "%s: line %" PRId64 " has %" PRId64 " columns, the lines before have %" PRId64,
                r->file.path, r->line, cells, r->width);
        return false;
    }
    const double *row = r->row.data;
    for (int64_t c = 0; c < cells; c++) {
        bool is_target = c + 1 == r->options.target_column, added;
        r->column = c + 1;
        if (is_target && r->options.target == DATA_LABEL) added = add_label(r, row[c]);
        else if (is_target) added = add_value(r, &r->target, row[c]);
        else added = add_value(r, &r->features, row[c] * r->options.scale);
        if (!added) return false;
    }
    r->count++;
    return true;
}

static bool read_lines(csv_reader *r)
{
    bool first = true;
    for (cell_end end = CELL_LINE; end == CELL_LINE;) {
        int64_t cells, words;
        bool may_be_header = first && r->options.header != DATA_HEADER_NO;
        end = read_line(r, may_be_header, &cells, &words);
        if (end == CELL_FAILED) return false;
        if (cells == 0) continue;
        first = false;
        bool header = may_be_header && (words > 0 || r->options.header == DATA_HEADER_YES);
        if (!header && !add_line(r, cells)) return false;
    }
    if (r->count > 0) return true;
    td_fail(r->td, TD_ERROR_DATA, "%s: holds no line of numbers", r->file.path);
    return false;
}

/* ---- The set ---- */

static data_set *make_set(csv_reader *r)
{
    bool label = r->options.target == DATA_LABEL;
    data_array arrays[] = {
        { .name = "x", .dtype = r->options.dtype, .shape = TD_SHAPE(r->count, r->width - 1), .data = r->features.data },
        { .name = label ? "label" : "y",
          .dtype = label ? TD_I32 : r->options.dtype,
          .shape = label ? TD_SHAPE(r->count) : TD_SHAPE(r->count, 1),
          .data = r->target.data },
    };
    data_owned owned[] = { { r->features.data, r->features.room }, { r->target.data, r->target.room } };
    r->features = r->target = (growing){ 0 };
    return data_memory_owning(r->td, r->file.path, arrays, 2, owned);
}

static bool options_fit(td_context *td, const data_csv_options *o)
{
    const char *wrong = NULL;
    if (o->dtype != TD_F32 && o->dtype != TD_F64) wrong = "dtype must be f32 or f64";
    else if (o->target_column < 0) wrong = "target_column counts from 1; 0 is the last";
    else if (o->classes < 0) wrong = "classes must not be negative";
    else if (!isfinite(o->scale)) wrong = "scale must be finite";
    else if (strchr("\n\r+-.0123456789", o->separator))
        wrong = "the separator cannot be part of a number or end a line";
    if (wrong) td_fail(td, TD_ERROR_USAGE, "data_csv: %s", wrong);
    return !wrong;
}

data_set *data_csv(td_context *td, const char *path, const data_csv_options *options)
{
    csv_reader r = { .td = td };
    if (options) r.options = *options;
    if (!r.options.separator) r.options.separator = ',';
    if (r.options.scale == 0) r.options.scale = 1;
    if (!options_fit(td, &r.options) || !data_file_open(&r.file, td, path)) return NULL;

    data_set *set = NULL;
    locale_t c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (c_locale) {
        locale_t before = uselocale(c_locale);
        r.text = td_alloc(td, TEXT_BYTES, "data");
        if (r.text && read_lines(&r)) set = make_set(&r);
        uselocale(before);
        freelocale(c_locale);
    } else {
        td_fail(td, TD_ERROR_MEMORY, "%s: out of memory while reading", path);
    }

    release(td, &r.row);
    release(td, &r.features);
    release(td, &r.target);
    if (r.text) td_free(td, r.text, TEXT_BYTES, "data");
    data_file_close(&r.file);
    return set;
}
