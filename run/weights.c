/* A run that begins with weights from elsewhere: checkpoint 0, written a tensor at a time. */
#include <string.h>

#include "run/checkpoint.h"

bool run_begin(run_loop *run)
{
    if (!run || run_failed(run)) return false;
    if (!*run->out) run_fail_usage(run, "%s needs --out DIR: the directory for the run", strrchr(run->program, ' ') + 1);
    else if (run_record_stands(run))
        run_fail_usage(run, "%s holds a run, which stays as it is: choose another --out", run->out);
    return !run_failed(run) && run_record_prepare(run);
}

typedef struct weights {
    td_context *td;
    run_weights_get get;
    void *user;
} weights;

static const void *weights_at(void *user, int64_t index)
{
    const weights *w = user;
    return w->get(w->user, td_state_at(w->td, index));
}

/* Whole states, in order. */
static bool write_weights(run_loop *run, const char *dir, run_weights_get get, void *user)
{
    td_context *td = run->td;
    char path[RUN_PATH];
    const char *const metadata[] = { "format", "tandem", "model", run->name, NULL };
    int64_t states = td_state_count(td);
    td_safetensors_entry *entries = td_alloc(td, (size_t)states * sizeof *entries, "checkpoint");
    if (!entries) return false;
    for (int64_t i = 0; i < states; i++) {
        td_state s = td_state_at(td, i);
        td_shape shape = td_state_shape(s);
        entries[i] = (td_safetensors_entry){ .name = td_state_name(s), .dtype = td_state_dtype(s), .shape = shape,
                                             .bytes = td_shape_elements(shape) * td_dtype_size(td_state_dtype(s)) };
    }
    weights w = { td, get, user };
    bool ok = run_path(td, path, "%s/rank-0.safetensors", dir) &&
              td_safetensors_write_from(td, path, entries, states, metadata, weights_at, &w);
    td_free(td, entries, (size_t)states * sizeof *entries, "checkpoint");
    return ok;
}

bool run_save_weights(run_loop *run, run_weights_get get, void *user)
{
    run_snapshot s = { 0 };
    if (!run || run_failed(run)) return false;
    bool named = run_snapshot_begin(run, &s);
    bool ok = named && run_make_directory(run->td, s.partial) && write_weights(run, s.partial, get, user) &&
              run_snapshot_complete(run->td, &s) && run_record_config(run);
    if (named && !ok) {
        run_remove_tree(run->td, s.partial);
        run_remove_tree(run->td, s.final);
    }
    run_snapshot_free(&s);
    return ok;
}
