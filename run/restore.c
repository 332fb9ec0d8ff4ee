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
    const char *name; /* the manifest's */
    td_safetensors *file;
} restore_file;

struct run_restore {
    char dir[RUN_PATH];
    bool training;      /* what an optimizer keeps, too */
    bool begins;        /* weights alone */
    td_context *reader; /* of the files: what is wrong with them is told with a way on */
    td_json_document *document;
    const td_json *states; /* the manifest's array */
    int64_t folder;        /* N of step-N */
    int64_t step, schedule_steps;
    bool *used; /* one for each of `states` */
    restore_file *files;
    int32_t file_count;
};

static bool restore_fail(run_loop *run, const run_restore *r, const char *format, ...) TD_PRINTF(3, 4);
static bool restore_broken(run_loop *run, const run_restore *r, const char *format, ...) TD_PRINTF(3, 4);

/* The checkpoint does not fit this run. */
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

/* "; remove it and step-8 is taken", where there is an older checkpoint. */
static void way_on(const run_loop *run, const run_restore *r, char *to, size_t room)
{
    int64_t older = run_latest_below(run->out, r->folder);
    if (older >= 0) snprintf(to, room, "; remove %.300s and step-%lld is taken", r->dir, (long long)older);
    else snprintf(to, room, "; there is no older checkpoint: train without --resume to begin anew");
}

/* The checkpoint is damaged. */
static bool restore_broken(run_loop *run, const run_restore *r, const char *format, ...)
{
    char text[512], hint[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    way_on(run, r, hint, sizeof hint);
    td_fail(run->td, TD_ERROR_DATA, "%s: %s%s", r->dir, text, hint);
    return false;
}

/* A file of it cannot be read, as the reader says. */
static bool restore_unread(run_loop *run, const run_restore *r)
{
    char hint[400];
    way_on(run, r, hint, sizeof hint);
    td_fail(run->td, td_error(r->reader), "%s%s", td_error_text(r->reader), hint);
    return false;
}

/* ---- Opening */

static bool check_owner(run_loop *run, const run_restore *r, const td_json *root)
{
    const char *model = td_json_get_string(root, "model");
    if (!model || strcmp(model, run->name))
        return restore_fail(run, r, "is a checkpoint of the model '%.40s', this is '%s': choose another --out",
                            model ? model : "?", run->name);
    const char *optimizer = td_json_get_string(root, "optimizer"), *here = run_flags_text(&run->flags, "optimizer");
    if (r->training && optimizer && here && strcmp(optimizer, here))
        return restore_fail(run, r,
                            "was trained with --optimizer %.40s, not %s: what one keeps is of no use to another",
                            optimizer, here);
    return true;
}

static bool read_manifest(run_loop *run, run_restore *r)
{
    char path[RUN_PATH];
    if (!run_path(run->td, path, "%s/manifest.json", r->dir)) return false;
    r->document = td_json_read(r->reader, path);
    if (!r->document) return restore_unread(run, r);
    const td_json *root = td_json_root(r->document);
    const char *format = td_json_get_string(root, "format");
    if (!format || strcmp(format, "tandem checkpoint 1"))
        return restore_broken(run, r, "manifest.json is not one of a checkpoint this version can read");
    if (!check_owner(run, r, root)) return false;
    r->step = td_json_get_whole(root, "step", -1);
    r->schedule_steps = td_json_get_whole(root, "schedule_steps", -1);
    r->states = td_json_get(root, "states");
    const char *holds = td_json_get_string(root, "holds");
    r->begins = holds && !strcmp(holds, "weights");
    if (!r->states || r->states->kind != TD_JSON_ARRAY || !(r->begins || td_json_get_string(root, "position")))
        return restore_broken(run, r, "manifest.json lacks \"position\" or \"states\"");
    if (r->step != r->folder)
        return restore_broken(run, r, "manifest.json is of step %lld, as \"step\" says", (long long)r->step);
    if (r->schedule_steps < 1 && !r->begins)
        return restore_broken(run, r, "manifest.json: \"schedule_steps\" must be a whole number of at least 1");
    return true;
}

static run_restore *open_step(run_loop *run, bool training, int64_t step)
{
    run_restore *r = calloc(1, sizeof *r);
    if (!r) {
        td_fail(run->td, TD_ERROR_MEMORY, "out of memory while opening a checkpoint");
        return NULL;
    }
    r->training = training;
    r->folder = step;
    r->reader = td_open(&(td_options){ .threads = 1 });
    if (run_path(run->td, r->dir, "%s/checkpoints/step-%lld", run->out, (long long)step) && read_manifest(run, r)) {
        r->used = calloc((size_t)r->states->count + 1, sizeof *r->used);
        r->files = calloc(RESTORE_FILES, sizeof *r->files);
        if (r->used && r->files) return r;
        td_fail(run->td, TD_ERROR_MEMORY, "out of memory while opening a checkpoint");
    }
    run_restore_close(r);
    return NULL;
}

/* The step of the best evaluation, as the checkpoint says; -1: an error. */
static int64_t best_step(run_loop *run, const run_restore *latest)
{
    if (!run_restore_best(run, latest)) return -1;
    int64_t best = run->best.step;
    if (best < 0)
        restore_fail(run, latest, "knows of no evaluation: --best is for a run trained with --eval-every");
    else if (run_latest_below(run->out, best + 1) != best)
        restore_fail(run, latest, "says that step-%lld was the best, which is no longer there: train with --keep-best",
                     (long long)best);
    else return best;
    return -1;
}

run_restore *run_restore_open(run_loop *run, bool training)
{
    int64_t step = run_latest(run->out);
    if (step < 0) {
        td_fail(run->td, TD_ERROR_DATA, "%s/checkpoints holds no complete checkpoint: train with --out %s first",
                run->out, run->out);
        return NULL;
    }
    run_restore *latest = open_step(run, training, step);
    if (!latest || !run_flags_on(&run->flags, "best")) return latest;
    step = best_step(run, latest);
    run_restore_close(latest);
    return step < 0 ? NULL : open_step(run, training, step);
}

void run_restore_close(run_restore *r)
{
    if (!r) return;
    for (int32_t i = 0; i < r->file_count; i++) td_safetensors_close(r->files[i].file);
    td_json_close(r->document);
    td_close(r->reader);
    free(r->files);
    free(r->used);
    free(r);
}

bool run_restore_begins(const run_restore *r) { return r->begins; }
int64_t run_restore_step(const run_restore *r) { return r->step; }
int64_t run_restore_schedule_steps(const run_restore *r) { return r->schedule_steps; }

double run_restore_loss(const run_restore *r, const char *which)
{
    return td_json_get_number(td_json_root(r->document), which, (double)NAN);
}

bool run_restore_best(run_loop *run, const run_restore *r)
{
    const td_json *root = td_json_root(r->document);
    run_best best = {
        .loss = td_json_get_number(root, "best_loss", HUGE_VAL),
        .step = td_json_get_whole(root, "best_step", -1),
        .judged = td_json_get_whole(root, "judged_step", -1),
        .stale = td_json_get_whole(root, "evaluations_since_best", 0),
    };
    if (best.step > r->step || best.judged > r->step || best.stale < 0)
        return restore_broken(run, r, "manifest.json: the best evaluation is not one before step %lld",
                              (long long)r->step);
    run->best = best;
    return true;
}

/* The order of the data is that of the seed, the batch and the samples it was begun with. */
static bool same_order(run_loop *run, const run_restore *r, const data_position *saved)
{
    data_position here = data_tell(run->loader);
    if (saved->batch_rows != here.batch_rows)
        return restore_fail(run, r, "was trained with --batch %lld, not %lld: go on with that",
                            (long long)saved->batch_rows, (long long)here.batch_rows);
    if (saved->seed != here.seed)
        return restore_fail(run, r, "was trained with --seed %llu, not %llu: go on with that",
                            (unsigned long long)saved->seed, (unsigned long long)here.seed);
    if (saved->count != here.count)
        return restore_fail(run, r,
                            "was trained on %lld samples, and %.80s holds %lld: give the --data it was begun with",
                            (long long)saved->count, run->train->name, (long long)here.count);
    const td_json *overfit = td_json_get(td_json_root(r->document), "overfit_batch");
    if (run->overfits != (overfit && overfit->kind == TD_JSON_BOOLEAN && overfit->boolean))
        return restore_fail(run, r, "was trained with%s --overfit-batch: go on so", run->overfits ? "out" : "");
    return true;
}

bool run_restore_position(run_loop *run, const run_restore *r)
{
    data_position saved;
    int64_t given = 0;
    if (r->begins) return true;
    if (!data_position_parse(td_json_get_string(td_json_root(r->document), "position"), &saved))
        return restore_broken(run, r, "manifest.json: \"position\" is no position of a data loader");
    if (!same_order(run, r, &saved)) return false;
    if (run->overfits) return true; /* it stands at the first batch */
    /* A program may pass over batches, but an update takes one. */
    bool counted = !__builtin_mul_overflow(saved.epoch, data_batches(run->loader), &given) &&
                   !__builtin_add_overflow(given, saved.batch, &given);
    if (!counted || given < r->step)
        return restore_broken(run, r, "manifest.json: \"position\" is before step %lld", (long long)r->step);
    return data_seek(run->loader, &saved);
}

/* ---- States */

static td_safetensors *file_named(run_loop *run, run_restore *r, const char *name)
{
    for (int32_t i = 0; i < r->file_count; i++)
        if (!strcmp(r->files[i].name, name)) return r->files[i].file;
    char path[RUN_PATH];
    if (strchr(name, '/') || r->file_count == RESTORE_FILES) {
        restore_broken(run, r, "manifest.json names the file '%.60s', which cannot be", name);
        return NULL;
    }
    if (!run_path(run->td, path, "%s/%s", r->dir, name)) return NULL;
    td_safetensors *file = td_safetensors_open(r->reader, path);
    if (file) r->files[r->file_count++] = (restore_file){ name, file };
    else restore_unread(run, r);
    return file;
}

/* The entry of a piece: elements [begin, begin + count) of s, the whole state under its own shape. */
static bool find_piece(run_loop *run, run_restore *r, td_state s, const td_json *piece, int64_t count,
                       td_safetensors_entry *entry)
{
    const char *name = td_json_get_string(piece, "file"), *key = td_json_get_string(piece, "key");
    if (!name || !key) return restore_broken(run, r, "manifest.json: a piece of '%s' cannot be", td_state_name(s));
    td_safetensors *file = file_named(run, r, name);
    if (!file) return false;
    if (!td_safetensors_find(file, key, entry)) return restore_broken(run, r, "%s does not hold '%s'", name, key);
    td_shape shape = td_state_shape(s);
    if (count != td_shape_elements(shape)) shape = TD_SHAPE(count);
    if (td_shape_equal(entry->shape, shape) && entry->dtype == td_state_dtype(s)) return true;
    return restore_broken(run, r, "%s: '%s' has another shape or dtype than manifest.json says", name, key);
}

/* How the manifest orders the elements of s; the order of the shape: ways 0. */
static bool saved_cut(run_loop *run, const run_restore *r, td_state s, const td_json *saved, td_cut *out)
{
    const td_json *cut = td_json_get(saved, "cut");
    td_shape shape = td_state_shape(s);
    *out = (td_cut){ 0 };
    if (!cut) return true;
    int64_t dim = td_json_get_whole(cut, "dim", -1), ways = td_json_get_whole(cut, "ways", -1);
    if (dim < 0 || dim >= shape.rank || ways < 1 || ways > INT32_MAX || shape.dim[dim] % ways)
        return restore_broken(run, r, "manifest.json: '%s' cannot be cut as it says", td_state_name(s));
    *out = (td_cut){ .ways = (int32_t)ways, .dim = (int8_t)dim };
    return true;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* A state being filled: this rank's elements [from, to) of it in the order they are stored here, `end` of those in the order saved. */
typedef struct filling {
    td_state s;
    td_cut saved, here;
    int64_t from, to, end;
} filling;

/* Writes what piece holds of this rank's elements. It must begin at f->end, which moves behind it. */
static bool copy_piece(run_loop *run, run_restore *r, const td_json *piece, filling *f)
{
    td_shape shape = td_state_shape(f->s);
    int64_t begin = td_json_get_whole(piece, "begin", -1), count = td_json_get_whole(piece, "count", -1);
    int64_t elements = td_shape_elements(shape), size = td_dtype_size(td_state_dtype(f->s)), alike, there, here;
    if (begin != f->end || count < 0 || count > elements - begin)
        return restore_broken(run, r, "manifest.json: a piece of '%s' cannot be", td_state_name(f->s));
    f->end = begin + count;
    td_safetensors_entry entry = { .name = NULL };
    for (int64_t at = begin; at < f->end; at += alike) { /* what is consecutive in both orders */
        int64_t to = td_cut_position(f->here, shape, td_cut_element(f->saved, shape, at, &there), &here);
        alike = least(least(there, here), f->end - at);
        int64_t first = to > f->from ? to : f->from, last = least(to + alike, f->to);
        if (first >= last) continue;
        if (!entry.name && !find_piece(run, r, f->s, piece, count, &entry)) return false;
        if (!td_state_write(f->s, first, last - first, (const char *)entry.data + (at - begin + first - to) * size)) return false;
    }
    return true;
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

/* What the manifest says of the state of that name, and at which index; NULL: nothing. */
static const td_json *saved_as(const run_restore *r, const char *name, int64_t *index)
{
    *index = 0;
    for (const td_json *saved = r->states->first; saved; saved = saved->next, ++*index) {
        const char *here = td_json_get_string(saved, "name");
        if (here && !strcmp(here, name)) return saved;
    }
    return NULL;
}

static bool same_form(run_loop *run, const run_restore *r, td_state s, const td_json *saved)
{
    td_shape shape;
    const char *dtype = td_json_get_string(saved, "dtype"), *here = td_dtype_name(td_state_dtype(s));
    if (!dtype || !shape_of(td_json_get(saved, "shape"), &shape))
        return restore_broken(run, r, "manifest.json: '%s' has no dtype or shape", td_state_name(s));
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
    int64_t index;
    filling f = { .s = s };
    const td_json *saved = saved_as(r, td_state_name(s), &index);
    bool may_begin = r->begins && td_state_kind_of(s) != TD_PARAMETER; /* an optimizer's */
    if (!saved && may_begin) return true;
    if (!saved) return restore_fail(run, r, "does not hold '%s', which this model has", td_state_name(s));
    r->used[index] = true;
    if (!same_form(run, r, s, saved) || !saved_cut(run, r, s, saved, &f.saved) || !td_state_owned(s, &f.from, &f.to)) return false;
    f.here = td_state_cut(s);
    if (f.here.ways == f.saved.ways && f.here.dim == f.saved.dim) f.here = f.saved = (td_cut){ 0 };
    const td_json *pieces = td_json_get(saved, "pieces");
    const td_json *piece = pieces && pieces->kind == TD_JSON_ARRAY ? pieces->first : NULL;
    for (; piece; piece = piece->next)
        if (!copy_piece(run, r, piece, &f)) return false;
    int64_t elements = td_shape_elements(td_state_shape(s));
    if (f.end == elements) return true;
    return restore_broken(run, r, "the pieces of '%s' hold %lld of its %lld elements", td_state_name(s), (long long)f.end,
                          (long long)elements);
}

static bool check_left_over(run_loop *run, const run_restore *r)
{
    int64_t index = 0;
    for (const td_json *saved = r->states->first; saved; saved = saved->next, index++) {
        const char *kind = td_json_get_string(saved, "kind"), *name = td_json_get_string(saved, "name");
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

bool run_restore_declare(run_loop *run, const run_restore *r)
{
    for (const td_json *saved = r->states->first; saved; saved = saved->next) {
        const char *name = td_json_get_string(saved, "name"), *kind = td_json_get_string(saved, "kind");
        char average[512];
        int64_t index;
        td_shape shape;
        if (!kind || strcmp(kind, "parameter")) continue;
        if (!name || !shape_of(td_json_get(saved, "shape"), &shape))
            return restore_broken(run, r, "manifest.json: a parameter has no name or shape");
        td_state s = td_parameter(td_root(run->td), name, shape, td_init_constant(0));
        if (td_error(run->td) != TD_OK) return false;
        snprintf(average, sizeof average, "%.500s.ema", name);
        if (!saved_as(r, average, &index)) td_freeze(s);
    }
    return true;
}
