/* Reading a checkpoint into any world: each rank copies the elements it owns from whichever files hold them.
 *
 * All of it happens before the first step, when model and optimizer have been made. What is left over on either side is
 * an error that names it.
 */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "run/loop.h"

enum { RESTORE_FILES = 4096 };

typedef struct restore_file {
    const char *name;             /* the manifest's */
    td_safetensors *file;
} restore_file;

struct run_restore {
    char dir[RUN_PATH];
    bool training;                /* what an optimizer keeps, too */
    td_json_document *document;
    const td_json *states;        /* the manifest's array */
    int64_t step, schedule_steps;
    bool *used;                   /* one for each of `states` */
    restore_file *files;
    int32_t file_count;
};

static bool restore_fail(run_loop *run, const run_restore *r, const char *format, ...) TD_PRINTF(3, 4);

static bool restore_fail(run_loop *run, const run_restore *r, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    td_fail(run->td, TD_ERROR_DATA, "%s: %s", r->dir, text);
    return false;
}

static const char *json_text_of(const td_json *object, const char *name)
{
    const td_json *member = td_json_get(object, name);
    return member && member->kind == TD_JSON_STRING ? member->string : NULL;
}

/* -1: not there, or no whole number. */
static int64_t json_whole_of(const td_json *object, const char *name)
{
    const td_json *member = td_json_get(object, name);
    return member && member->kind == TD_JSON_NUMBER && member->whole ? member->integer : -1;
}

/* ---- Opening */

static bool read_manifest(run_loop *run, run_restore *r)
{
    char path[RUN_PATH];
    if (!run_path(run->td, path, "%s/manifest.json", r->dir)) return false;
    r->document = td_json_read(run->td, path);
    if (!r->document) return false;
    const td_json *root = td_json_root(r->document);
    const char *format = json_text_of(root, "format"), *model = json_text_of(root, "model");
    if (!format || strcmp(format, "tandem checkpoint 1"))
        return restore_fail(run, r, "manifest.json is not one of a checkpoint this version can read");
    if (!model || strcmp(model, run->name))
        return restore_fail(run, r, "is a checkpoint of the model '%.40s', this is '%s': choose another --out",
                            model ? model : "?", run->name);
    const char *optimizer = json_text_of(root, "optimizer"), *here = run_flags_text(&run->flags, "optimizer");
    if (r->training && optimizer && here && strcmp(optimizer, here))
        return restore_fail(run, r,
                            "was trained with --optimizer %.40s, not %s: what one keeps is of no use to another",
                            optimizer, here);
    r->step = json_whole_of(root, "step");
    r->schedule_steps = json_whole_of(root, "schedule_steps");
    r->states = td_json_get(root, "states");
    if (r->step < 0 || !r->states || r->states->kind != TD_JSON_ARRAY || !json_text_of(root, "position"))
        return restore_fail(run, r, "manifest.json lacks \"step\", \"position\" or \"states\"");
    return true;
}

run_restore *run_restore_open(run_loop *run, bool training)
{
    int64_t step = run_latest(run->out);
    if (step < 0) {
        td_fail(run->td, TD_ERROR_DATA, "%s/checkpoints holds no complete checkpoint: train with --out %s first",
                run->out, run->out);
        return NULL;
    }
    run_restore *r = calloc(1, sizeof *r);
    if (!r) {
        td_fail(run->td, TD_ERROR_MEMORY, "out of memory while opening a checkpoint");
        return NULL;
    }
    r->training = training;
    if (run_path(run->td, r->dir, "%s/checkpoints/step-%lld", run->out, (long long)step) && read_manifest(run, r)) {
        r->used = calloc((size_t)r->states->count + 1, sizeof *r->used);
        r->files = calloc(RESTORE_FILES, sizeof *r->files);
        if (r->used && r->files) return r;
        td_fail(run->td, TD_ERROR_MEMORY, "out of memory while opening a checkpoint");
    }
    run_restore_close(r);
    return NULL;
}

void run_restore_close(run_restore *r)
{
    if (!r) return;
    for (int32_t i = 0; i < r->file_count; i++) td_safetensors_close(r->files[i].file);
    td_json_close(r->document);
    free(r->files);
    free(r->used);
    free(r);
}

int64_t run_restore_step(const run_restore *r) { return r->step; }
int64_t run_restore_schedule_steps(const run_restore *r) { return r->schedule_steps; }

double run_restore_first_loss(const run_restore *r)
{
    const td_json *loss = td_json_get(td_json_root(r->document), "first_loss");
    return loss && loss->kind == TD_JSON_NUMBER ? loss->number : (double)NAN;
}

bool run_restore_position(run_loop *run, const run_restore *r)
{
    data_position position;
    if (!data_position_parse(json_text_of(td_json_root(r->document), "position"), &position))
        return restore_fail(run, r, "manifest.json: \"position\" is no position of a data loader");
    return data_seek(run->loader, &position);
}

/* ---- States */

static td_safetensors *file_named(run_loop *run, run_restore *r, const char *name)
{
    for (int32_t i = 0; i < r->file_count; i++)
        if (!strcmp(r->files[i].name, name)) return r->files[i].file;
    char path[RUN_PATH];
    if (strchr(name, '/') || r->file_count == RESTORE_FILES) {
        restore_fail(run, r, "manifest.json names the file '%.60s', which cannot be", name);
        return NULL;
    }
    if (!run_path(run->td, path, "%s/%s", r->dir, name)) return NULL;
    td_safetensors *file = td_safetensors_open(run->td, path);
    if (file) r->files[r->file_count++] = (restore_file){ name, file };
    return file;
}

/* Writes what piece holds of elements [from, to) of s; adds their count to *copied. */
static bool copy_piece(run_loop *run, run_restore *r, td_state s, const td_json *piece, int64_t from, int64_t to,
                       int64_t *copied)
{
    const char *name = json_text_of(piece, "file"), *key = json_text_of(piece, "key");
    int64_t begin = json_whole_of(piece, "begin"), count = json_whole_of(piece, "count");
    int64_t elements = td_shape_elements(td_state_shape(s)), size = td_dtype_size(td_state_dtype(s));
    if (!name || !key || begin < 0 || count < 0 || begin > elements || count > elements - begin)
        return restore_fail(run, r, "manifest.json: a piece of '%s' cannot be", td_state_name(s));
    int64_t first = begin > from ? begin : from, last = begin + count < to ? begin + count : to;
    if (first >= last) return true;
    td_safetensors *file = file_named(run, r, name);
    if (!file) return false;
    td_safetensors_entry entry;
    if (!td_safetensors_find(file, key, &entry)) return restore_fail(run, r, "%s does not hold '%s'", name, key);
    if (entry.bytes != count * size || entry.dtype != td_state_dtype(s))
        return restore_fail(run, r, "%s: '%s' has another size or dtype than manifest.json says", name, key);
    *copied += last - first;
    return td_state_write(s, first, last - first, (const char *)entry.data + (first - begin) * size);
}

static void shape_text(td_shape shape, char *to, size_t room)
{
    size_t at = (size_t)snprintf(to, room, "(");
    for (int64_t d = 0; d < shape.rank && at < room; d++)
        at += (size_t)snprintf(to + at, room - at, d ? ", %lld" : "%lld", (long long)shape.dim[d]);
    if (at < room) snprintf(to + at, room - at, ")");
}

static bool shape_of(const td_json *array, td_shape *shape)
{
    *shape = (td_shape){ 0 };
    if (!array || array->kind != TD_JSON_ARRAY || array->count > TD_MAX_DIMS) return false;
    for (const td_json *dim = array->first; dim; dim = dim->next) {
        if (dim->kind != TD_JSON_NUMBER || !dim->whole) return false;
        shape->dim[shape->rank++] = dim->integer;
    }
    return true;
}

static bool same_form(run_loop *run, const run_restore *r, td_state s, const td_json *saved)
{
    td_shape shape;
    const char *dtype = json_text_of(saved, "dtype"), *here = td_dtype_name(td_state_dtype(s));
    if (!dtype || !shape_of(td_json_get(saved, "shape"), &shape))
        return restore_fail(run, r, "manifest.json: '%s' has no dtype or shape", td_state_name(s));
    if (strcmp(dtype, here))
        return restore_fail(run, r, "'%s' is %.10s there and %s here: give the --dtype it was trained with",
                            td_state_name(s), dtype, here);
    if (td_shape_equal(shape, td_state_shape(s))) return true;
    char there[160], mine[160];
    shape_text(shape, there, sizeof there);
    shape_text(td_state_shape(s), mine, sizeof mine);
    return restore_fail(run, r, "'%s' has shape %s there and %s here: give the sizes it was trained with",
                        td_state_name(s), there, mine);
}

static bool fill_state(run_loop *run, run_restore *r, td_state s)
{
    int64_t index = 0, from, to, copied = 0;
    const td_json *saved = r->states->first;
    for (; saved; saved = saved->next, index++) {
        const char *name = json_text_of(saved, "name");
        if (name && !strcmp(name, td_state_name(s))) break;
    }
    if (!saved) return restore_fail(run, r, "does not hold '%s', which this model has", td_state_name(s));
    r->used[index] = true;
    if (!same_form(run, r, s, saved) || !td_state_owned(s, &from, &to)) return false;
    const td_json *pieces = td_json_get(saved, "pieces");
    const td_json *piece = pieces && pieces->kind == TD_JSON_ARRAY ? pieces->first : NULL;
    for (; piece; piece = piece->next)
        if (!copy_piece(run, r, s, piece, from, to, &copied)) return false;
    if (copied == to - from) return true;
    return restore_fail(run, r, "the pieces of '%s' hold %lld of the %lld elements needed", td_state_name(s),
                        (long long)copied, (long long)(to - from));
}

static bool check_left_over(run_loop *run, const run_restore *r)
{
    int64_t index = 0;
    for (const td_json *saved = r->states->first; saved; saved = saved->next, index++) {
        const char *kind = json_text_of(saved, "kind"), *name = json_text_of(saved, "name");
        bool expected = r->training || !kind || !strcmp(kind, "parameter"); /* without training there is no optimizer */
        if (r->used[index] || !expected) continue;
        return restore_fail(run, r, "holds '%s', which this model has not: give the flags it was trained with",
                            name ? name : "?");
    }
    return true;
}

bool run_restore_states(run_loop *run, run_restore *r)
{
    for (int64_t i = 0; i < td_state_count(run->td); i++)
        if (!fill_state(run, r, td_state_at(run->td, i))) return false;
    return check_left_over(run, r);
}
