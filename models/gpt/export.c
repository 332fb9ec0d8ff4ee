/* gpt export: the last checkpoint of a run as published files, which transformers load.
 *
 *     gpt export --out OUT --to DIR [--dtype bf16]
 *
 * DIR gets model.safetensors and config.json, and the tokenizer's files where the run keeps a byte-level BPE. Weights are of the dtype
 * they were trained in, f32 mostly (with --ema their averages); bf16 where that is asked for. Nothing that is in DIR is written over.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "models/gpt/published.h"

enum { KEY_ROOM = 320 };

typedef struct target {
    run_loop *run;
    td_context *td;
    gpt_form form;
    td_dtype dtype;               /* of the files */
    char dir[GPT_PATH], model[GPT_PATH], config[GPT_PATH];
    td_safetensors_entry *entries;
    char (*keys)[KEY_ROOM];
    td_state *parameters;
    int64_t count, room;
    void *state, *turned, *converted; /* of the largest tensor */
    int64_t bytes;
} target;

static const void *tensor(void *user, int64_t index)
{
    target *t = user;
    td_state s = t->parameters[index];
    td_shape shape = td_state_shape(s);
    td_dtype dtype = td_state_dtype(s);
    const void *data = t->state;
    if (!td_state_read(run_evaluated(s), 0, td_shape_elements(shape), t->state)) return NULL;
    if (gpt_is_turned(t->form, td_state_name(s), shape)) {
        gpt_turn(t->turned, data, shape.dim[0], shape.dim[1], td_dtype_size(dtype));
        data = t->turned;
    }
    if (dtype == t->dtype) return data;
    td_convert(t->dtype, t->converted, dtype, data, td_shape_elements(shape));
    return t->converted;
}

/* GPT-2's keys with the prefix that goes with a head, as transformers write them. */
static void name_entries(target *t)
{
    for (int64_t k = 0; k < t->room; k++) {
        td_state s = td_state_at(t->td, k);
        td_shape shape = td_state_shape(s);
        int64_t i = t->count;
        if (td_state_kind_of(s) != TD_PARAMETER) continue; /* averages, which take their parameters' places */
        t->parameters[t->count++] = s;
        const char *name = td_state_name(s);
        bool prefixed = t->form == GPT_2 && strncmp(name, "lm_head.", 8);
        if (gpt_is_turned(t->form, name, shape)) shape = TD_SHAPE(shape.dim[1], shape.dim[0]);
        snprintf(t->keys[i], KEY_ROOM, "%s%s", prefixed ? "transformer." : "", name);
        t->entries[i] = (td_safetensors_entry){ .name = t->keys[i], .dtype = t->dtype, .shape = shape,
                                                .bytes = td_shape_elements(shape) * td_dtype_size(t->dtype) };
        int64_t bytes = td_shape_elements(shape) * td_dtype_size(td_state_dtype(s));
        if (bytes > t->bytes) t->bytes = bytes;
    }
}

static bool write_model(target *t)
{
    static const char *const metadata[] = { "format", "pt", NULL };
    t->room = td_state_count(t->td);
    t->parameters = td_alloc(t->td, (size_t)t->room * sizeof *t->parameters, "export");
    t->entries = td_alloc(t->td, (size_t)t->room * sizeof *t->entries, "export");
    t->keys = td_alloc(t->td, (size_t)t->room * sizeof *t->keys, "export");
    bool ok = t->parameters && t->entries && t->keys;
    if (ok) name_entries(t);
    t->state = ok ? td_alloc(t->td, (size_t)t->bytes, "export") : NULL;
    t->turned = t->state ? td_alloc(t->td, (size_t)t->bytes, "export") : NULL;
    t->converted = t->turned ? td_alloc(t->td, (size_t)t->bytes, "export") : NULL;
    ok = t->converted && td_safetensors_write_from(t->td, t->model, t->entries, t->count, metadata, tensor, t);
    td_free(t->td, t->state, (size_t)t->bytes, "export");
    td_free(t->td, t->turned, (size_t)t->bytes, "export");
    td_free(t->td, t->converted, (size_t)t->bytes, "export");
    td_free(t->td, t->parameters, (size_t)t->room * sizeof *t->parameters, "export");
    td_free(t->td, t->entries, (size_t)t->room * sizeof *t->entries, "export");
    td_free(t->td, t->keys, (size_t)t->room * sizeof *t->keys, "export");
    return ok;
}

/* DIR, made if it is not there, and none of the files in it. */
static bool prepare(target *t)
{
    static const char *const names[] = { "model.safetensors", "config.json", "model.safetensors.index.json" };
    const char *to = run_flag_text(t->run, "to");
    char path[GPT_PATH];
    if (!to) {
        td_fail(t->td, TD_ERROR_USAGE, "export needs --to DIR: the folder for model.safetensors and config.json");
        return false;
    }
    snprintf(t->dir, sizeof t->dir, "%s", to);
    for (int i = 0; i < 3; i++) {
        if (!gpt_path(t->td, path, to, names[i])) return false;
        if (access(path, F_OK)) continue;
        td_fail(t->td, TD_ERROR_USAGE, "%.400s is there already and stays as it is: choose another --to", path);
        return false;
    }
    if (mkdir(to, 0777) && errno != EEXIST) {
        td_fail(t->td, TD_ERROR_DATA, "cannot make directory %.400s: %s", to, strerror(errno));
        return false;
    }
    return gpt_path(t->td, t->model, to, names[0]) && gpt_path(t->td, t->config, to, names[1]);
}

/* Only what was asked for now is another dtype than the weights': a run in bf16 keeps them in f32. */
static td_dtype dtype_of(run_loop *run, td_context *td)
{
    const char *dtype = run_flag_text(run, "dtype");
    return run_flag_given(run, "dtype") && !strcmp(dtype, "bf16") ? TD_BF16 : td_float(td);
}

void gpt_export(run_loop *run, void *model)
{
    const gpt *g = model;
    target t = { .run = run, .td = run_context(run), .form = g->size.form, .dtype = dtype_of(run, run_context(run)) };
    char kept[GPT_PATH];
    bool ok = prepare(&t) && write_model(&t) && gpt_config_write(run, &g->size, t.dtype, t.config) &&
              gpt_path(t.td, kept, run_flag_text(run, "out"), "model") && gpt_copy_tokenizer(t.td, kept, t.dir);
    if (!ok) return;
    run_say(run, "exported %lld parameters in %s to %s", (long long)td_parameter_elements(t.td), td_dtype_name(t.dtype), t.dir);
    gpt_report(run, "export", t.dtype);
}
