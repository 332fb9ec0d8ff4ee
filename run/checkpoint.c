/* Checkpoints: OUT/checkpoints/step-N holds one safetensors file a rank and manifest.json, which is written last.
 *
 * All of it is written to .step-N beside, synced, then renamed: a crash at any point leaves the previous checkpoint
 * whole and at most a folder that nobody reads. Every rank writes about as much: of what it owns alone all, of what several
 * ranks hold alike an equal share of the unit. Who writes what follows from the layout alone. An entry of a file is a whole
 * state under its own name and shape, or elements [begin, begin + count) of it as NAME@begin of shape (count). The manifest
 * lists every state with its pieces, so that any world reads what any other wrote. Elements are counted in the order of the
 * shape, or where the manifest says "cut": {"dim", "ways"} in that of storage: blocks along the dimension, one after another
 * (td_cut_element).
 *
 * A run that begins with weights from elsewhere has step-0, whose manifest says "holds": "weights": parameters, and nothing of
 * a training that was not.
 */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "run/checkpoint.h"

/* ---- What is there */

/* "step-N" -> N; -1: another name. */
static int64_t step_of(const char *name)
{
    if (strncmp(name, "step-", 5) || name[5] < '0' || name[5] > '9') return -1;
    char *end;
    errno = 0;
    int64_t step = strtoll(name + 5, &end, 10);
    return *end || errno ? -1 : step;
}

static bool is_complete(const char *out, int64_t step)
{
    char path[RUN_PATH];
    int size = snprintf(path, sizeof path, "%s/checkpoints/step-%lld/manifest.json", out, (long long)step);
    return size < (int)sizeof path && access(path, R_OK) == 0;
}

int64_t run_latest_below(const char *out, int64_t below)
{
    char path[RUN_PATH];
    int size = snprintf(path, sizeof path, "%s/checkpoints", out);
    DIR *dir = size < (int)sizeof path ? opendir(path) : NULL;
    if (!dir) return -1;
    int64_t latest = -1;
    for (struct dirent *entry; (entry = readdir(dir));) {
        int64_t step = step_of(entry->d_name);
        if (step > latest && step < below && is_complete(out, step)) latest = step;
    }
    closedir(dir);
    return latest;
}

int64_t run_latest(const char *out) { return run_latest_below(out, INT64_MAX); }

/* ---- Who writes what */

/* Where states are stored. */
typedef struct layout {
    td_context *td;
    const td_mesh *mesh;
    int64_t states;
    struct { const td_unit *unit; int64_t offset, elements; } *state; /* of each: offset in the unit, or in a row of it, of a block there */
} layout;

static bool layout_open(layout *l, td_context *td)
{
    int64_t begin, end;
    *l = (layout){ .td = td, .mesh = td_context_mesh(td), .states = td_state_count(td) };
    l->state = td_alloc(td, (size_t)l->states * sizeof *l->state, "checkpoint");
    if (!l->state || (l->states && !td_state_owned(td_state_at(td, 0), &begin, &end))) return false; /* which lays out */
    for (uint32_t u = 0; u < td_unit_count(td); u++) {
        const td_unit *unit = td_unit_at(td, u);
        for (int32_t m = 0; m < unit->member_count; m++) {
            const td_unit_member *member = &unit->members[m];
            l->state[member->state].unit = unit;
            l->state[member->state].offset = member->offset;
            l->state[member->state].elements = member->elements;
        }
    }
    return true;
}

static void layout_close(layout *l) { td_free(l->td, l->state, (size_t)l->states * sizeof *l->state, "checkpoint"); }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* The part of a unit that a rank writes: a shard is cut among those that hold it alike, at TD_UNIT_ALIGN, so that small units stay
 * whole. Of a unit that is cut it is a part of a row, whose number is returned; else 0. */
static int part_of_unit(const td_mesh *mesh, const td_unit *unit, int rank, int64_t *begin, int64_t *end)
{
    int64_t at = 0, length = unit->cut.ways ? unit->elements / unit->cut.ways : unit->elements, copies = 1, copy = 0;
    int ranks_along = mesh->world, row = 0;
    for (int a = 0; a < mesh->axes; a++) {
        int size = mesh->size[a];
        ranks_along /= size;
        int index = rank / ranks_along % size;
        if (unit->cut.ways && a == unit->cut.axis) {
            row = index;
        } else if (unit->place.kind[a] == TD_SHARDED) {
            length /= size;
            at += index * length;
        } else {
            copies *= size;
            copy = copy * size + index;
        }
    }
    int64_t share = (length + copies - 1) / copies;
    share = (share + TD_UNIT_ALIGN - 1) / TD_UNIT_ALIGN * TD_UNIT_ALIGN;
    *begin = at + least(copy * share, length);
    *end = at + least((copy + 1) * share, length);
    return row;
}

typedef struct piece {
    int rank;
    int64_t begin, count;         /* elements of the state, as it is stored */
} piece;

/* What a rank writes of state s; false: nothing. One without elements is rank 0's. */
static bool piece_of(const layout *l, int64_t s, int rank, piece *out)
{
    int64_t from, to, offset = l->state[s].offset, elements = l->state[s].elements;
    int row = part_of_unit(l->mesh, l->state[s].unit, rank, &from, &to);
    int64_t begin = most(from - offset, 0), end = least(to - offset, elements);
    *out = (piece){ .rank = rank, .begin = elements ? row * elements + begin : 0, .count = elements ? end - begin : 0 };
    return elements ? begin < end : rank == 0;
}

static bool is_whole(const layout *l, int64_t s, const piece *p)
{
    return p->count == td_shape_elements(td_state_shape(td_state_at(l->td, s)));
}

static void piece_key(const layout *l, int64_t s, const piece *p, char key[RUN_KEY])
{
    const char *name = td_state_name(td_state_at(l->td, s));
    if (is_whole(l, s, p)) snprintf(key, RUN_KEY, "%s", name);
    else snprintf(key, RUN_KEY, "%s@%lld", name, (long long)p->begin);
}

/* ---- The manifest */

static int by_begin(const void *a, const void *b)
{
    const piece *x = a, *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

static void put_pieces(const layout *l, int64_t s, piece *pieces, td_json_writer *w)
{
    int count = 0;
    char text[RUN_KEY];
    for (int rank = 0; rank < l->mesh->world; rank++) count += piece_of(l, s, rank, &pieces[count]);
    qsort(pieces, (size_t)count, sizeof *pieces, by_begin);
    td_json_open_array(w, "pieces");
    for (const piece *p = pieces; p < pieces + count; p++) {
        td_json_open_object(w, NULL);
        snprintf(text, sizeof text, "rank-%d.safetensors", p->rank);
        td_json_put_string(w, "file", text);
        piece_key(l, s, p, text);
        td_json_put_string(w, "key", text);
        td_json_put_integer(w, "begin", p->begin);
        td_json_put_integer(w, "count", p->count);
        td_json_close_object(w);
    }
    td_json_close_array(w);
}

/* Blocks along a dimension that nothing stands before are in the order of the shape. */
static void put_cut(td_json_writer *w, td_cut cut, td_shape shape)
{
    int64_t before = 1;
    for (int d = 0; d < cut.dim; d++) before *= shape.dim[d];
    if (cut.ways < 2 || before == 1) return;
    td_json_open_object(w, "cut");
    td_json_put_integer(w, "dim", cut.dim);
    td_json_put_integer(w, "ways", cut.ways);
    td_json_close_object(w);
}

static void put_state(const layout *l, int64_t index, piece *pieces, td_json_writer *w)
{
    static const char *const kinds[] = { [TD_PARAMETER] = "parameter", [TD_BUFFER] = "buffer", [TD_MOMENT] = "moment" };
    td_state s = td_state_at(l->td, index);
    td_shape shape = td_state_shape(s);
    td_json_open_object(w, NULL);
    td_json_put_string(w, "name", td_state_name(s));
    td_json_put_string(w, "kind", kinds[td_state_kind_of(s)]);
    td_json_put_string(w, "dtype", td_dtype_name(td_state_dtype(s)));
    td_json_open_array(w, "shape");
    for (int64_t d = 0; d < shape.rank; d++) td_json_put_integer(w, NULL, shape.dim[d]);
    td_json_close_array(w);
    put_cut(w, td_state_cut(s), shape);
    put_pieces(l, index, pieces, w);
    td_json_close_object(w);
}

/* How far the training of these weights has come. */
static void put_training(run_loop *run, td_json_writer *w)
{
    char position[DATA_POSITION_BYTES];
    data_position at = data_tell(run->loader);
    data_position_text(&at, position);
    td_json_put_string(w, "optimizer", run_flags_text(&run->flags, "optimizer"));
    td_json_put_integer(w, "schedule_steps", run->schedule_steps);
    td_json_put_number(w, "first_loss", run->first_loss);
    td_json_put_number(w, "final_loss", run->loss);
    td_json_put_number(w, "best_loss", run->best.loss);
    td_json_put_integer(w, "best_step", run->best.step);
    td_json_put_integer(w, "judged_step", run->best.judged);
    td_json_put_integer(w, "evaluations_since_best", run->best.stale);
    td_json_put_unsigned(w, "seed", td_seed(run->td));
    td_json_put_string(w, "position", position);
    td_json_put_boolean(w, "overfit_batch", run->overfits);
    td_json_put_integer(w, "batch", run->batch);
    td_json_put_integer(w, "accumulate", run->accumulate);
}

static void put_header(run_loop *run, td_json_writer *w)
{
    td_json_put_string(w, "format", "tandem checkpoint 1");
    td_json_put_string(w, "model", run->name);
    td_json_put_integer(w, "step", td_updates(run->td));
    td_json_put_integer(w, "world", run->ranks);
    td_json_put_string(w, "strategy", run->strategy);
    if (run->loader) put_training(run, w);
    else td_json_put_string(w, "holds", "weights");
}

static bool put_manifest(run_loop *run, const layout *l, td_json_writer *w)
{
    size_t bytes = (size_t)run->ranks * sizeof(piece);
    piece *pieces = td_alloc(run->td, bytes, "checkpoint");
    if (!pieces) return false;
    td_json_open_object(w, NULL);
    put_header(run, w);
    td_json_open_array(w, "states");
    for (int64_t i = 0; i < l->states; i++) put_state(l, i, pieces, w);
    td_json_close_array(w);
    td_json_close_object(w);
    td_free(run->td, pieces, bytes, "checkpoint");
    return td_json_text(w) != NULL;
}

/* ---- Taking it */

bool run_snapshot_begin(run_loop *run, run_snapshot *s)
{
    layout l;
    int64_t step = td_updates(run->td);
    *s = (run_snapshot){ .td = run->td, .step = step, .rank = run->rank, .ranks = run->ranks, .keep = run->keep,
                         .best = run->keep_best ? run->best.step : -1 };
    snprintf(s->model, sizeof s->model, "%s", run->name);
    snprintf(s->out, sizeof s->out, "%s", run->out);
    if (!run_path(run->td, s->partial, "%s/checkpoints/.step-%lld", run->out, (long long)step) ||
        !run_path(run->td, s->final, "%s/checkpoints/step-%lld", run->out, (long long)step))
        return false;
    if (run->rank != 0) return true;
    s->manifest = td_json_begin(run->td);
    bool ok = layout_open(&l, run->td) && put_manifest(run, &l, &s->manifest);
    layout_close(&l);
    return ok;
}

static int64_t bytes_of(const layout *l, int64_t s, const piece *p)
{
    return p->count * td_dtype_size(td_state_dtype(td_state_at(l->td, s)));
}

static bool copy_piece(const layout *l, int64_t i, const piece *p, run_snapshot *s, char *to)
{
    td_state state = td_state_at(l->td, i);
    piece_key(l, i, p, s->names[s->count]);
    s->entries[s->count] = (td_safetensors_entry){ .name = s->names[s->count],
                                                   .dtype = td_state_dtype(state),
                                                   .data = to,
                                                   .shape = is_whole(l, i, p) ? td_state_shape(state) : TD_SHAPE(p->count),
                                                   .bytes = bytes_of(l, i, p) };
    s->count++;
    return td_state_read(state, p->begin, p->count, to);
}

/* Of all that a rank writes; *pieces: how many there are. */
static int64_t bytes_of_all(const layout *l, int rank, int64_t *pieces)
{
    piece p;
    int64_t bytes = 0;
    *pieces = 0;
    for (int64_t i = 0; i < l->states; i++)
        if (piece_of(l, i, rank, &p)) ++*pieces, bytes += bytes_of(l, i, &p);
    return bytes;
}

int64_t run_checkpoint_bytes(run_loop *run)
{
    layout l;
    int64_t pieces, bytes = layout_open(&l, run->td) ? bytes_of_all(&l, run->rank, &pieces) : 0;
    layout_close(&l);
    return bytes;
}

static bool copy_all(const layout *l, run_snapshot *s)
{
    piece p;
    int64_t at = 0;
    s->bytes = bytes_of_all(l, s->rank, &s->room);
    s->entries = td_alloc(l->td, (size_t)s->room * sizeof *s->entries, "checkpoint");
    s->names = td_alloc(l->td, (size_t)s->room * sizeof *s->names, "checkpoint");
    s->data = td_alloc(l->td, (size_t)s->bytes, "checkpoint");
    if (!s->entries || !s->names || !s->data) return false;
    for (int64_t i = 0; i < l->states; i++) {
        if (!piece_of(l, i, s->rank, &p)) continue;
        if (!copy_piece(l, i, &p, s, s->data + at)) return false;
        at += bytes_of(l, i, &p);
    }
    return true;
}

bool run_snapshot_copy(run_loop *run, run_snapshot *s)
{
    layout l;
    bool ok = layout_open(&l, run->td) && copy_all(&l, s);
    layout_close(&l);
    return ok;
}

void run_snapshot_free(run_snapshot *s)
{
    if (!s->td) return;
    td_free(s->td, s->entries, (size_t)s->room * sizeof *s->entries, "checkpoint");
    td_free(s->td, s->names, (size_t)s->room * sizeof *s->names, "checkpoint");
    td_free(s->td, s->data, (size_t)s->bytes, "checkpoint");
    if (s->manifest.td) td_json_end(&s->manifest);
    *s = (run_snapshot){ 0 };
}

/* ---- Writing it */

bool run_snapshot_file(td_context *td, const run_snapshot *s, int rank, char path[RUN_PATH])
{
    return run_path(td, path, "%s/rank-%d.safetensors", s->partial, rank);
}

bool run_snapshot_write(td_context *td, const run_snapshot *s)
{
    char path[RUN_PATH];
    const char *const metadata[] = { "format", "tandem", "model", s->model, NULL };
    return run_snapshot_file(td, s, s->rank, path) && td_safetensors_write(td, path, s->entries, s->count, metadata);
}

/* A folder left by a crash may hold files of ranks that are no more. */
static bool remove_strangers(td_context *td, const run_snapshot *s)
{
    DIR *entries = opendir(s->partial);
    if (!entries) return true;
    bool ok = true;
    for (struct dirent *entry; ok && (entry = readdir(entries));) {
        int rank, size = 0;
        bool ours = sscanf(entry->d_name, "rank-%d.safetensors%n", &rank, &size) == 1 && !entry->d_name[size] &&
                    rank < s->ranks;
        char path[RUN_PATH];
        if (ours || entry->d_name[0] == '.') continue;
        ok = run_path(td, path, "%s/%s", s->partial, entry->d_name);
        if (ok) unlink(path);
    }
    closedir(entries);
    return ok;
}

bool run_snapshot_manifest(td_context *td, const run_snapshot *s, const char *dir)
{
    char path[RUN_PATH];
    return run_path(td, path, "%s/manifest.json", dir) && run_write_file(td, path, s->manifest.text, s->manifest.bytes);
}

static bool put_in_place(td_context *td, const run_snapshot *s)
{
    char parent[RUN_PATH];
    return run_path(td, parent, "%s/checkpoints", s->out) && run_sync_directory(td, s->partial) &&
           run_remove_tree(td, s->final) && run_rename(td, s->partial, s->final) && run_sync_directory(td, parent);
}

/* Older checkpoints than those that are kept. The newest one's manifest says which is the best. */
static bool prune_old(td_context *td, const run_snapshot *s)
{
    int64_t step = s->step;
    for (int64_t kept = 1; kept < s->keep && step >= 0; kept++) step = run_latest_below(s->out, step);
    while (step >= 0 && (step = run_latest_below(s->out, step)) >= 0) {
        char path[RUN_PATH];
        if (step == s->best) continue;
        if (!run_path(td, path, "%s/checkpoints/step-%lld", s->out, (long long)step)) return false;
        if (!run_remove_tree(td, path)) return false;
    }
    return true;
}

bool run_prune_partial(td_context *td, const char *out)
{
    char path[RUN_PATH];
    if (!run_path(td, path, "%s/checkpoints", out)) return false;
    DIR *entries = opendir(path);
    bool ok = true;
    for (struct dirent *entry; ok && entries && (entry = readdir(entries));) {
        if (entry->d_name[0] != '.' || step_of(entry->d_name + 1) < 0) continue;
        ok = run_path(td, path, "%s/checkpoints/%s", out, entry->d_name) && run_remove_tree(td, path);
    }
    if (entries) closedir(entries);
    return ok;
}

bool run_snapshot_complete(td_context *td, const run_snapshot *s)
{
    return remove_strangers(td, s) && run_snapshot_manifest(td, s, s->partial) && put_in_place(td, s) && prune_old(td, s);
}
