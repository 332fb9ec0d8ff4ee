/* Checkpoints: OUT/checkpoints/step-N holds one safetensors file a rank and manifest.json, which is written last.
 *
 * All of it is written to .step-N beside, synced, then renamed: a crash at any point leaves the previous checkpoint
 * whole and at most a folder that nobody reads. A rank writes the elements it owns; replicated state is written by the
 * first of the ranks that hold it. An entry of a file is a whole state under its own name and shape, or elements
 * [begin, begin + count) of it as NAME@begin of shape (count). The manifest lists every state with its pieces, so that
 * any world reads what any other wrote.
 *
 * A run that begins with weights from elsewhere has step-0, whose manifest says "holds": "weights": parameters, and nothing of
 * a training that was not.
 */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "run/loop.h"

enum { KEY_ROOM = 288 };

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

/* ---- This rank's file */

/* The lowest rank of those that hold the same elements of s. */
static bool writes(const run_loop *run, td_state s)
{
    const td_mesh *mesh = td_context_mesh(run->td);
    for (uint32_t u = 0; u < td_unit_count(run->td); u++) {
        const td_unit *unit = td_unit_at(run->td, u);
        for (int32_t m = 0; m < unit->member_count; m++) {
            if (unit->members[m].state != s.id) continue;
            for (int axis = 0; axis < mesh->axes; axis++)
                if (unit->place.kind[axis] != TD_SHARDED && mesh->at[axis] != 0) return false;
            return true;
        }
    }
    return false;
}

/* What a rank writes: entries, their names, and a copy of the elements. */
typedef struct part {
    td_safetensors_entry *entries;
    char (*names)[KEY_ROOM];
    char *data;
    int64_t count, room, bytes;
} part;

static void part_free(td_context *td, part *p)
{
    td_free(td, p->entries, (size_t)p->room * sizeof *p->entries, "checkpoint");
    td_free(td, p->names, (size_t)p->room * sizeof *p->names, "checkpoint");
    td_free(td, p->data, (size_t)p->bytes, "checkpoint");
}

/* Calls for state i: the elements this rank writes; false and an error on failure. */
static bool range_to_write(run_loop *run, int64_t i, int64_t *begin, int64_t *end)
{
    td_state s = td_state_at(run->td, i);
    if (!td_state_owned(s, begin, end)) return false;
    if (!writes(run, s)) *end = *begin;
    return true;
}

static bool part_copy(run_loop *run, part *p)
{
    td_context *td = run->td;
    int64_t states = td_state_count(td), begin, end, at = 0;
    for (int64_t i = 0; i < states; i++) {
        if (!range_to_write(run, i, &begin, &end)) return false;
        p->bytes += (end - begin) * td_dtype_size(td_state_dtype(td_state_at(td, i)));
    }
    p->room = states;
    p->entries = td_alloc(td, (size_t)states * sizeof *p->entries, "checkpoint");
    p->names = td_alloc(td, (size_t)states * sizeof *p->names, "checkpoint");
    p->data = td_alloc(td, (size_t)p->bytes, "checkpoint");
    if (!p->entries || !p->names || !p->data) return false;
    for (int64_t i = 0; i < states; i++) {
        td_state s = td_state_at(td, i);
        td_shape shape = td_state_shape(s);
        int64_t elements = td_shape_elements(shape);
        if (!range_to_write(run, i, &begin, &end)) return false;
        if (begin == end && (elements || !writes(run, s))) continue;
        bool whole = end - begin == elements;
        char *name = p->names[p->count];
        if (whole) snprintf(name, KEY_ROOM, "%s", td_state_name(s));
        else snprintf(name, KEY_ROOM, "%s@%lld", td_state_name(s), (long long)begin);
        int64_t bytes = (end - begin) * td_dtype_size(td_state_dtype(s));
        if (!td_state_read(s, begin, end - begin, p->data + at)) return false;
        p->entries[p->count++] = (td_safetensors_entry){ .name = name,
                                                         .dtype = td_state_dtype(s),
                                                         .data = p->data + at,
                                                         .shape = whole ? shape : TD_SHAPE(end - begin),
                                                         .bytes = bytes };
        at += bytes;
    }
    return true;
}

static bool write_part(run_loop *run, const char *dir)
{
    char path[RUN_PATH];
    part p = { 0 };
    const char *const metadata[] = { "format", "tandem", "model", run->name, NULL };
    bool ok = run_path(run->td, path, "%s/rank-%d.safetensors", dir, run->rank) && part_copy(run, &p) &&
              td_safetensors_write(run->td, path, p.entries, p.count, metadata);
    part_free(run->td, &p);
    return ok;
}

/* ---- The manifest, by rank 0 when all files are there */

static void put_piece(td_json_writer *w, int rank, const char *key, int64_t begin, int64_t count)
{
    char file[64];
    snprintf(file, sizeof file, "rank-%d.safetensors", rank);
    td_json_open_object(w, NULL);
    td_json_put_string(w, "file", file);
    td_json_put_string(w, "key", key);
    td_json_put_integer(w, "begin", begin);
    td_json_put_integer(w, "count", count);
    td_json_close_object(w);
}

/* The piece of s that `file` holds, if any: begin and count; false: none. */
static bool piece_in(const td_safetensors *file, td_state s, char key[KEY_ROOM], int64_t *begin, int64_t *count)
{
    td_safetensors_entry entry;
    const char *name = td_state_name(s);
    size_t length = strlen(name);
    snprintf(key, KEY_ROOM, "%s", name);
    *begin = 0;
    if (td_safetensors_find(file, name, &entry)) {
        *count = td_shape_elements(entry.shape);
        return true;
    }
    for (int64_t i = 0; i < td_safetensors_count(file); i++) {
        entry = td_safetensors_at(file, i);
        if (strncmp(entry.name, name, length) || entry.name[length] != '@') continue;
        snprintf(key, KEY_ROOM, "%s", entry.name);
        *begin = strtoll(entry.name + length + 1, NULL, 10);
        *count = td_shape_elements(entry.shape);
        return true;
    }
    return false;
}

static bool put_state(run_loop *run, td_json_writer *w, td_state s, td_safetensors *const *files)
{
    static const char *const kinds[] = { [TD_PARAMETER] = "parameter", [TD_BUFFER] = "buffer", [TD_MOMENT] = "moment" };
    td_shape shape = td_state_shape(s);
    int64_t held = 0, begin, count;
    char key[KEY_ROOM];
    td_json_open_object(w, NULL);
    td_json_put_string(w, "name", td_state_name(s));
    td_json_put_string(w, "kind", kinds[td_state_kind_of(s)]);
    td_json_put_string(w, "dtype", td_dtype_name(td_state_dtype(s)));
    td_json_open_array(w, "shape");
    for (int64_t d = 0; d < shape.rank; d++) td_json_put_integer(w, NULL, shape.dim[d]);
    td_json_close_array(w);
    td_json_open_array(w, "pieces");
    for (int rank = 0; rank < run->ranks; rank++) {
        if (!piece_in(files[rank], s, key, &begin, &count)) continue;
        put_piece(w, rank, key, begin, count);
        held += count;
    }
    td_json_close_array(w);
    td_json_close_object(w);
    if (held == td_shape_elements(shape)) return true;
    td_fail(run->td, TD_ERROR_DATA, "checkpoint: the ranks wrote %lld of the %lld elements of '%s'", (long long)held,
            (long long)td_shape_elements(shape), td_state_name(s));
    return false;
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

static bool put_manifest(run_loop *run, const char *dir, td_safetensors **files)
{
    char path[RUN_PATH];
    for (int rank = 0; rank < run->ranks; rank++) {
        if (!run_path(run->td, path, "%s/rank-%d.safetensors", dir, rank)) return false;
        files[rank] = td_safetensors_open(run->td, path);
        if (!files[rank]) return false;
    }
    td_json_writer w = td_json_begin(run->td);
    td_json_open_object(&w, NULL);
    put_header(run, &w);
    td_json_open_array(&w, "states");
    bool ok = true;
    for (int64_t i = 0; ok && i < td_state_count(run->td); i++) ok = put_state(run, &w, td_state_at(run->td, i), files);
    td_json_close_array(&w);
    td_json_close_object(&w);
    const char *text = td_json_text(&w);
    ok = ok && text && run_path(run->td, path, "%s/manifest.json", dir) &&
         run_write_file(run->td, path, text, strlen(text));
    td_json_end(&w);
    return ok;
}

static bool write_manifest(run_loop *run, const char *dir)
{
    size_t bytes = (size_t)run->ranks * sizeof(td_safetensors *);
    td_safetensors **files = td_alloc(run->td, bytes, "checkpoint");
    if (!files) return false;
    memset(files, 0, bytes);
    bool ok = put_manifest(run, dir, files);
    for (int rank = 0; rank < run->ranks; rank++)
        if (files[rank]) td_safetensors_close(files[rank]);
    td_free(run->td, files, bytes, "checkpoint");
    return ok;
}

/* ---- Putting it in place */

/* A folder left by a crash may hold files of ranks that are no more. */
static bool remove_strangers(run_loop *run, const char *dir)
{
    DIR *entries = opendir(dir);
    if (!entries) return true;
    bool ok = true;
    for (struct dirent *entry; ok && (entry = readdir(entries));) {
        int rank, size = 0;
        bool ours = sscanf(entry->d_name, "rank-%d.safetensors%n", &rank, &size) == 1 && !entry->d_name[size] &&
                    rank < run->ranks;
        char path[RUN_PATH];
        if (ours || entry->d_name[0] == '.') continue;
        ok = run_path(run->td, path, "%s/%s", dir, entry->d_name);
        if (ok) unlink(path);
    }
    closedir(entries);
    return ok;
}

static bool put_in_place(run_loop *run, const char *partial, const char *final)
{
    char parent[RUN_PATH];
    return run_path(run->td, parent, "%s/checkpoints", run->out) && run_sync_directory(run->td, partial) &&
           run_remove_tree(run->td, final) && run_rename(run->td, partial, final) &&
           run_sync_directory(run->td, parent);
}

/* Older checkpoints than those that are kept. The newest one's manifest says which is the best. */
static bool prune_old(run_loop *run, int64_t newest)
{
    int64_t step = newest;
    for (int64_t kept = 1; kept < run->keep && step >= 0; kept++) step = run_latest_below(run->out, step);
    while (step >= 0 && (step = run_latest_below(run->out, step)) >= 0) {
        char path[RUN_PATH];
        if (run->keep_best && step == run->best.step) continue;
        if (!run_path(run->td, path, "%s/checkpoints/step-%lld", run->out, (long long)step)) return false;
        if (!run_remove_tree(run->td, path)) return false;
    }
    return true;
}

/* What crashes left: no rank writes a checkpoint now. */
static bool prune_partial(run_loop *run)
{
    char path[RUN_PATH];
    if (!run_path(run->td, path, "%s/checkpoints", run->out)) return false;
    DIR *entries = opendir(path);
    bool ok = true;
    for (struct dirent *entry; ok && entries && (entry = readdir(entries));) {
        if (entry->d_name[0] != '.' || step_of(entry->d_name + 1) < 0) continue;
        ok = run_path(run->td, path, "%s/checkpoints/%s", run->out, entry->d_name) && run_remove_tree(run->td, path);
    }
    if (entries) closedir(entries);
    return ok;
}

/* By rank 0, when all files are there. */
bool run_complete(run_loop *run, int64_t step, const char *partial, const char *final)
{
    run_busy(run, true);
    bool ok = remove_strangers(run, partial) && write_manifest(run, partial) && put_in_place(run, partial, final) &&
              prune_old(run, step) && prune_partial(run);
    run_busy(run, false);
    return ok;
}

bool run_save(run_loop *run)
{
    int64_t step = td_updates(run->td);
    if (!*run->out || run_failed(run)) return !run_failed(run);
    if (run->saved_step == step) return true;
    char partial[RUN_PATH], final[RUN_PATH];
    run_busy(run, true);
    bool ok = run_path(run->td, partial, "%s/checkpoints/.step-%lld", run->out, (long long)step) &&
              run_path(run->td, final, "%s/checkpoints/step-%lld", run->out, (long long)step) &&
              run_make_directory(run->td, partial) && write_part(run, partial);
    run_busy(run, false);
    if (ok && run->ranks > 1) {
        run_any(run, false); /* all files are there */
        ok = !run_failed(run);
    }
    if (ok && run->rank == 0) ok = run_complete(run, step, partial, final);
    if (!ok) {
        if (run->ranks == 1) run_remove_tree(run->td, partial); /* others may be writing in it still: the next save removes it */
        return false;
    }
    run->saved_step = step;
    return true;
}

bool run_save_again(run_loop *run)
{
    char final[RUN_PATH];
    bool there = *run->out && run->saved_step == td_updates(run->td);
    if (run_failed(run) || !there || run->rank != 0) return !run_failed(run);
    run_busy(run, true);
    bool ok = run_path(run->td, final, "%s/checkpoints/step-%lld", run->out, (long long)run->saved_step) &&
              write_manifest(run, final);
    run_busy(run, false);
    return ok;
}
