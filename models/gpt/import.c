/* gpt import: published weights as a run that has not trained.
 *
 *     gpt import --from DIR|FILE --out OUT
 *
 * DIR has config.json and model.safetensors, or shards and model.safetensors.index.json. A FILE of safetensors alone has the sizes of a
 * config.json beside it, else those of the flags. All keys and shapes are checked before OUT is made; then one tensor after the other
 * goes from the mapped file to the checkpoint, turned and converted where it must be: memory holds two copies of the largest at most.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/json.h"
#include "models/gpt/published.h"

enum { SHARDS = 512, KEY_ROOM = 320 };

typedef struct shard {
    const char *name;             /* the index's; NULL: the only one */
    char path[GPT_PATH];
    td_safetensors *file;
} shard;

typedef struct source {
    run_loop *run;
    td_context *td;
    gpt_form form;
    bool tied;
    char dir[GPT_PATH];           /* of the files */
    td_json_document *index;
    const td_json *map;           /* key -> name of its shard; NULL: there is one */
    shard *shards;                /* SHARDS */
    int count;
    void *converted, *turned;     /* of the largest tensor that needs them */
    int64_t converted_bytes, turned_bytes;
} source;

static bool is_there(const char *path) { return access(path, F_OK) == 0; }

/* ---- Files ------------------------------------------------------------------------------------------------ */

static bool open_shard(source *s, const char *name, const char *path)
{
    if (s->count == SHARDS) {
        td_fail(s->td, TD_ERROR_DATA, "%.400s has more than %d shards", s->dir, SHARDS);
        return false;
    }
    shard *to = &s->shards[s->count];
    *to = (shard){ .name = name, .file = td_safetensors_open(s->td, path) };
    snprintf(to->path, sizeof to->path, "%s", path);
    s->count += to->file != NULL;
    return to->file != NULL;
}

static shard *shard_named(source *s, const char *name)
{
    for (int i = 0; i < s->count; i++)
        if (!strcmp(s->shards[i].name, name)) return &s->shards[i];
    return NULL;
}

/* Every shard that the index names. */
static bool open_shards(source *s, const char *path)
{
    char shard_path[GPT_PATH];
    s->index = td_json_read(s->td, path);
    if (!s->index) return false;
    s->map = td_json_get(td_json_root(s->index), "weight_map");
    bool whole = s->map && s->map->kind == TD_JSON_OBJECT && s->map->first;
    for (const td_json *key = whole ? s->map->first : NULL; whole && key; key = key->next) {
        whole = key->kind == TD_JSON_STRING && !strchr(key->string, '/');
        if (!whole || shard_named(s, key->string)) continue;
        if (!gpt_path(s->td, shard_path, s->dir, key->string) || !open_shard(s, key->string, shard_path)) return false;
    }
    if (!whole) td_fail(s->td, TD_ERROR_DATA, "%.400s: \"weight_map\" must give each key the name of a file beside it", path);
    return whole;
}

static bool open_folder(source *s)
{
    char path[GPT_PATH], index[GPT_PATH];
    if (!gpt_path(s->td, path, s->dir, "model.safetensors")) return false;
    if (!gpt_path(s->td, index, s->dir, "model.safetensors.index.json")) return false;
    if (is_there(path)) return open_shard(s, NULL, path);
    if (is_there(index)) return open_shards(s, index);
    td_fail(s->td, TD_ERROR_DATA, "%.400s has neither model.safetensors nor model.safetensors.index.json: no other kind of weights is read",
            s->dir);
    return false;
}

static bool read_config(source *s, bool needed)
{
    char path[GPT_PATH];
    if (!gpt_path(s->td, path, s->dir, "config.json")) return false;
    return (!needed && !is_there(path)) || gpt_config_read(s->run, path);
}

static bool open_source(source *s)
{
    const char *from = run_flag_text(s->run, "from");
    struct stat status;
    if (!from) {
        td_fail(s->td, TD_ERROR_USAGE, "import needs --from: a folder with config.json and model.safetensors, or a file of safetensors");
        return false;
    }
    if (stat(from, &status)) {
        td_fail(s->td, TD_ERROR_DATA, "cannot read %.400s: %s", from, strerror(errno));
        return false;
    }
    const char *slash = strrchr(from, '/');
    bool folder = S_ISDIR(status.st_mode);
    int bytes = folder ? (int)strlen(from) : slash == from ? 1 : slash ? (int)(slash - from) : 1;
    if (snprintf(s->dir, sizeof s->dir, "%.*s", bytes, folder || slash ? from : ".") >= (int)sizeof s->dir) {
        td_fail(s->td, TD_ERROR_DATA, "%.200s...: too long a path", from);
        return false;
    }
    return read_config(s, folder) && (folder ? open_folder(s) : open_shard(s, NULL, from));
}

/* ---- Keys ------------------------------------------------------------------------------------------------- */

/* A parameter's other key: with or without what transformers put before the trunk's. False: it has none. */
static bool other_key(gpt_form form, const char *name, char key[KEY_ROOM])
{
    static const char trunk[] = "model.";
    if (form == GPT_2) return strncmp(name, "lm_head.", 8) && snprintf(key, KEY_ROOM, "transformer.%s", name) < KEY_ROOM;
    if (strncmp(name, trunk, sizeof trunk - 1)) return false;
    return snprintf(key, KEY_ROOM, "%s", name + sizeof trunk - 1) < KEY_ROOM;
}

static const shard *find_key(source *s, const char *key, td_safetensors_entry *entry)
{
    const shard *in = &s->shards[0];
    if (s->map) {
        const char *name = td_json_get_string(s->map, key);
        in = name ? shard_named(s, name) : NULL;
    }
    if (!in || td_safetensors_find(in->file, key, entry)) return in;
    if (s->map) td_fail(s->td, TD_ERROR_DATA, "%.400s does not hold '%.200s', as the index says", in->path, key);
    return NULL;
}

/* The tensor of a parameter; NULL where there is none, which is no error yet. */
static const shard *find_parameter(source *s, const char *name, td_safetensors_entry *entry)
{
    char other[KEY_ROOM];
    const shard *in = find_key(s, name, entry);
    return in || !other_key(s->form, name, other) ? in : find_key(s, other, entry);
}

static void shape_text(td_shape shape, char *to, size_t room)
{
    size_t at = (size_t)snprintf(to, room, "(");
    for (int64_t d = 0; d < shape.rank && at < room; d++)
        at += (size_t)snprintf(to + at, room - at, d ? ", %lld" : "%lld", (long long)shape.dim[d]);
    if (at < room) snprintf(to + at, room - at, ")");
}

static bool is_float(td_dtype dtype) { return dtype == TD_F32 || dtype == TD_F64 || dtype == TD_BF16 || dtype == TD_F16; }

static td_shape turned(td_shape shape) { return TD_SHAPE(shape.dim[1], shape.dim[0]); }

static bool check_entry(source *s, const shard *in, const td_safetensors_entry *e, td_state state)
{
    td_shape want = td_state_shape(state);
    if (gpt_is_turned(s->form, td_state_name(state), want)) want = turned(want);
    if (!is_float(e->dtype)) {
        td_fail(s->td, TD_ERROR_DATA, "%.400s: '%.200s' is %s, not one of f32, f64, bf16 and f16", in->path, e->name,
                td_dtype_name(e->dtype));
        return false;
    }
    if (td_shape_equal(e->shape, want)) return true;
    char there[160], here[160];
    bool looks_turned = want.rank == 2 && e->shape.rank == 2 && td_shape_equal(turned(e->shape), want);
    shape_text(e->shape, there, sizeof there);
    shape_text(want, here, sizeof here);
    td_fail(s->td, TD_ERROR_DATA, "%.400s: '%.200s' has shape %s, where the sizes say %s%s", in->path, e->name, there, here,
            looks_turned ? ": it looks transposed" : "");
    return false;
}

/* Every parameter has its tensor; finds out what memory the largest takes. */
static bool check_parameters(source *s)
{
    for (int64_t i = 0; i < td_state_count(s->td); i++) {
        td_state state = td_state_at(s->td, i);
        td_safetensors_entry e;
        char other[KEY_ROOM] = "";
        const char *name = td_state_name(state);
        const shard *in = find_parameter(s, name, &e);
        if (!in) {
            bool two = other_key(s->form, name, other);
            td_fail(s->td, TD_ERROR_DATA, "%.400s holds no '%.200s'%s%s%s", s->map ? s->dir : s->shards[0].path, name,
                    two ? " and no '" : "", two ? other : "", two ? "', as which it would do" : "");
            return false;
        }
        if (!check_entry(s, in, &e, state)) return false;
        int64_t bytes = td_shape_elements(e.shape) * td_dtype_size(td_state_dtype(state));
        bool turns = gpt_is_turned(s->form, name, td_state_shape(state)), converts = e.dtype != td_state_dtype(state);
        if ((turns || converts) && bytes > s->converted_bytes) s->converted_bytes = bytes;
        if (turns && bytes > s->turned_bytes) s->turned_bytes = bytes;
    }
    return true;
}

/* ---- What is left over ------------------------------------------------------------------------------------- */

static bool ends_with(const char *text, const char *end)
{
    size_t all = strlen(text), length = strlen(end);
    return all >= length && !strcmp(text + all - length, end);
}

/* Constants that earlier versions kept among the parameters: causal masks, rotary frequencies. */
static bool is_constant(gpt_form form, const char *key)
{
    if (form == GPT_2) return strstr(key, "h.") && (ends_with(key, ".attn.bias") || ends_with(key, ".attn.masked_bias"));
    return ends_with(key, ".self_attn.rotary_emb.inv_freq");
}

/* A tied head is published as a copy of the tokens' table, or not at all. */
static bool check_copy(source *s, const shard *in, const td_safetensors_entry *head)
{
    td_safetensors_entry table;
    if (!find_parameter(s, s->form == GPT_2 ? "wte.weight" : "model.embed_tokens.weight", &table)) return false;
    bool alike = td_shape_equal(head->shape, table.shape) && head->dtype == table.dtype;
    if (alike && !memcmp(head->data, table.data, (size_t)table.bytes)) return true;
    td_fail(s->td, TD_ERROR_DATA, "%.400s: 'lm_head.weight' is not the table of the tokens, though \"tie_word_embeddings\" says so",
            in->path);
    return false;
}

static bool is_parameter(source *s, const td_safetensors_entry *e)
{
    for (int64_t i = 0; i < td_state_count(s->td); i++) {
        td_safetensors_entry found;
        char other[KEY_ROOM];
        const char *name = td_state_name(td_state_at(s->td, i));
        if (strcmp(e->name, name) && !(other_key(s->form, name, other) && !strcmp(e->name, other))) continue;
        return find_parameter(s, name, &found) && found.data == e->data;
    }
    return false;
}

static bool check_left_over(source *s)
{
    for (int f = 0; f < s->count; f++)
        for (int64_t i = 0; i < td_safetensors_count(s->shards[f].file); i++) {
            td_safetensors_entry e = td_safetensors_at(s->shards[f].file, i);
            if (is_parameter(s, &e) || is_constant(s->form, e.name)) continue;
            if (s->tied && !strcmp(e.name, "lm_head.weight")) {
                if (!check_copy(s, &s->shards[f], &e)) return false;
                continue;
            }
            td_fail(s->td, TD_ERROR_DATA, "%.400s holds '%.200s', which a model of these sizes has not", s->shards[f].path, e.name);
            return false;
        }
    return td_error(s->td) == TD_OK;
}

/* ---- Tensors ---------------------------------------------------------------------------------------------- */

static const void *tensor(void *user, td_state state)
{
    source *s = user;
    td_safetensors_entry e;
    td_dtype dtype = td_state_dtype(state);
    td_shape shape = td_state_shape(state);
    if (!find_parameter(s, td_state_name(state), &e)) return NULL;
    bool turns = gpt_is_turned(s->form, td_state_name(state), shape);
    if (!turns && e.dtype == dtype) return e.data;
    td_convert(dtype, s->converted, e.dtype, e.data, td_shape_elements(shape));
    if (!turns) return s->converted;
    gpt_turn(s->turned, s->converted, shape.dim[1], shape.dim[0], td_dtype_size(dtype));
    return s->turned;
}

static bool save(source *s)
{
    char model[GPT_PATH];
    s->converted = td_alloc(s->td, (size_t)s->converted_bytes, "import");
    s->turned = td_alloc(s->td, (size_t)s->turned_bytes, "import");
    bool ok = s->converted && s->turned && run_begin(s->run) && gpt_path(s->td, model, run_flag_text(s->run, "out"), "model") &&
              gpt_copy_tokenizer(s->td, s->dir, model) && run_save_weights(s->run, tensor, s);
    td_free(s->td, s->converted, (size_t)s->converted_bytes, "import");
    td_free(s->td, s->turned, (size_t)s->turned_bytes, "import");
    return ok;
}

/* ---- The command ------------------------------------------------------------------------------------------ */

/* What was trained already wants a rate far below that of a beginning: a tenth. */
static void settle_rate(run_loop *run, const gpt_size *size)
{
    char text[32];
    snprintf(text, sizeof text, "%.4g", 0.0384 / (double)size->width);
    run_flag_default(run, "lr", text);
}

/* Declares the parameters; they get no memory. */
static bool declare(source *s)
{
    gpt_size size;
    if (!gpt_size_of(s->run, &size)) return false;
    if (!size.vocabulary) {
        td_fail(s->td, TD_ERROR_USAGE, "without a config.json beside the file --vocabulary is needed");
        return false;
    }
    s->form = size.form;
    s->tied = !size.untied;
    settle_rate(s->run, &size);
    gpt *g = calloc(1, sizeof *g);
    if (g) gpt_make(g, td_root(s->td), size);
    else td_fail(s->td, TD_ERROR_MEMORY, "out of memory for the model");
    free(g);
    return td_error(s->td) == TD_OK;
}

static void close_source(source *s)
{
    for (int i = 0; i < s->count; i++) td_safetensors_close(s->shards[i].file);
    free(s->shards);
    td_json_close(s->index);
}

void gpt_import(run_loop *run, void *model)
{
    (void)model;
    source s = { .run = run, .td = run_context(run), .shards = calloc(SHARDS, sizeof *s.shards) };
    if (!s.shards) td_fail(s.td, TD_ERROR_MEMORY, "out of memory for an import");
    bool ok = s.shards && open_source(&s) && declare(&s) && check_parameters(&s) && check_left_over(&s) && save(&s);
    if (ok) {
        run_say(run, "imported %lld parameters: sample, eval and train --resume take --out %s", (long long)td_parameter_elements(s.td),
                run_flag_text(run, "out"));
        gpt_report(run, "import", td_float(s.td));
    }
    close_source(&s);
}
