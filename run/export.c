/* export: the parameters of a run's last checkpoint, or of its best, as one safetensors file.
 *
 *     mlp export --out OUT --to FILE
 *
 * Names, shapes and layouts are the parameters' own, which follow PyTorch's (net.0.weight of (out, in)), so that the file is a
 * state_dict of the module of that form. With --ema it is the averages, as those are what is evaluated. Everything comes from the
 * checkpoint, whatever world wrote it: neither data nor model are needed. A model whose published form is another has an export of
 * its own (run_command). A FILE that is there stays as it is.
 */
#include <unistd.h>

#include "run/loop.h"

typedef struct exported {
    td_context *td;
    td_state *states;             /* whose elements are written */
    td_safetensors_entry *entries;
    int64_t count, room;
    void *elements;               /* of the largest */
    int64_t bytes;
} exported;

static const void *elements_of(void *user, int64_t index)
{
    exported *e = user;
    td_state s = e->states[index];
    return td_state_read(s, 0, td_shape_elements(td_state_shape(s)), e->elements) ? e->elements : NULL;
}

td_state run_evaluated(td_state parameter)
{
    char name[512];
    snprintf(name, sizeof name, "%.500s.ema", td_state_name(parameter));
    td_state average = td_state_named(parameter.td, name);
    return *td_state_name(average) ? average : parameter;
}

static bool collect(exported *e)
{
    e->room = td_state_count(e->td);
    e->states = td_alloc(e->td, (size_t)e->room * sizeof *e->states, "export");
    e->entries = td_alloc(e->td, (size_t)e->room * sizeof *e->entries, "export");
    if (!e->states || !e->entries) return false;
    for (int64_t i = 0; i < e->room; i++) {
        td_state s = td_state_at(e->td, i);
        if (td_state_kind_of(s) != TD_PARAMETER) continue;
        int64_t bytes = td_shape_elements(td_state_shape(s)) * td_dtype_size(td_state_dtype(s));
        e->states[e->count] = run_evaluated(s);
        e->entries[e->count++] = (td_safetensors_entry){ .name = td_state_name(s), .dtype = td_state_dtype(s), .shape = td_state_shape(s),
                                                         .bytes = bytes };
        if (bytes > e->bytes) e->bytes = bytes;
    }
    e->elements = td_alloc(e->td, (size_t)e->bytes, "export");
    return e->elements != NULL;
}

static bool write_parameters(td_context *td, const char *path)
{
    static const char *const metadata[] = { "format", "pt", NULL };
    exported e = { .td = td };
    bool ok = collect(&e) && td_safetensors_write_from(td, path, e.entries, e.count, metadata, elements_of, &e);
    td_free(td, e.elements, (size_t)e.bytes, "export");
    td_free(td, e.states, (size_t)e.room * sizeof *e.states, "export");
    td_free(td, e.entries, (size_t)e.room * sizeof *e.entries, "export");
    return ok;
}

static bool restore(run_loop *run)
{
    run_restore *from = run_restore_open(run, false);
    bool ok = from && run_restore_declare(run, from) && run_average(run) && run_restore_states(run, from);
    if (ok) td_set_updates(run->td, run_restore_step(from));
    run_restore_close(from);
    return ok;
}

void run_export(run_loop *run)
{
    const char *to = run_flags_text(&run->flags, "to");
    if (run_failed(run)) return;
    if (!to) {
        run_fail_usage(run, "export needs --to FILE: the safetensors file to write");
        return;
    }
    if (access(to, F_OK) == 0) {
        run_fail_usage(run, "%.400s is there already and stays as it is: choose another --to", to);
        return;
    }
    if (!restore(run) || !write_parameters(run->td, to)) return;
    run_say(run, "exported %lld parameters in %s of step %lld to %s", (long long)td_parameter_elements(run->td),
            td_dtype_name(td_float(run->td)), (long long)td_updates(run->td), to);
    run_summary(run, "export", false);
}
