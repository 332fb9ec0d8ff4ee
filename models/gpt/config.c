/* config.json of published GPTs, as transformers know GPT2Config and LlamaConfig: read to flags, and written.
 *
 * What changes the function and is not known here is an error; what only others' training or sampling looks at is passed over.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/file.h"
#include "core/json.h"
#include "models/gpt/published.h"

/* Llama 3.1's stretch, which is the only one there is here (network.c). */
enum { LOW = 1, HIGH = 4, TRAINED_CONTEXT = 8192 };

enum { GPT2_VOCABULARY = 50257 }; /* its last token ends a text */

typedef struct config {
    run_loop *run;
    td_context *td;
    const char *path;
    const td_json *root;
} config;

static bool config_fail(const config *c, const char *format, ...) TD_PRINTF(2, 3);
static bool config_fail(const config *c, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    td_fail(c->td, TD_ERROR_DATA, "%.400s: %s", c->path, text);
    return false;
}

/* ---- Members ---------------------------------------------------------------------------------------------- */

/* NULL: absent, or null, which says the same. */
static const td_json *member(const td_json *object, const char *key)
{
    const td_json *value = td_json_get(object, key);
    return value && value->kind != TD_JSON_NULL ? value : NULL;
}

static bool set_text(const config *c, const char *flag, const char *text) { return run_flag_default(c->run, flag, text); }

static bool set_number(const config *c, const char *flag, double x)
{
    char text[40];
    snprintf(text, sizeof text, "%.17g", x);
    return set_text(c, flag, text);
}

typedef struct count_member {
    const char *key, *flag;
    int64_t most;
    const char *otherwise;        /* the flag whose value it has where it is left out; NULL: it may not be */
    int64_t times;                /* that value */
} count_member;

static bool read_count(const config *c, const count_member *m)
{
    const td_json *value = member(c->root, m->key);
    int64_t count = value && value->kind == TD_JSON_NUMBER && value->whole ? value->integer : 0;
    char text[32];
    if (!value && m->otherwise) count = m->times * run_flag_whole(c->run, m->otherwise);
    else if (!value) return config_fail(c, "lacks \"%s\"", m->key);
    if (count < 1 || count > m->most) return config_fail(c, "\"%s\" must be a whole number from 1 to %lld", m->key, (long long)m->most);
    snprintf(text, sizeof text, "%lld", (long long)count);
    return set_text(c, m->flag, text);
}

static bool read_number(const config *c, const td_json *object, const char *key, double otherwise, double *to)
{
    const td_json *value = member(object, key);
    *to = value && value->kind == TD_JSON_NUMBER ? value->number : otherwise;
    bool fits = !value || (value->kind == TD_JSON_NUMBER && value->number >= 0);
    return fits || config_fail(c, "\"%s\" must be a number of at least 0", key);
}

static bool read_truth(const config *c, const char *key, bool otherwise, bool *to)
{
    const td_json *value = member(c->root, key);
    *to = value && value->kind == TD_JSON_BOOLEAN ? value->boolean : otherwise;
    return !value || value->kind == TD_JSON_BOOLEAN || config_fail(c, "\"%s\" must be true or false", key);
}

/* What would make another function of the model. */
static bool must_be(const config *c, const char *key, bool wanted)
{
    bool value;
    if (!read_truth(c, key, wanted, &value)) return false;
    return value == wanted || config_fail(c, "\"%s\" is %s, which this model has not", key, value ? "true" : "false");
}

static bool read_eps(const config *c, const char *key, double otherwise)
{
    double eps;
    if (!read_number(c, c->root, key, otherwise, &eps)) return false;
    return eps > 0 ? set_number(c, "eps", eps) : config_fail(c, "\"%s\" must be above 0", key);
}

/* There is one dropout here: that of the residual, or of the attention where a form has no other. */
static bool read_dropout(const config *c, const char *key, double otherwise)
{
    double dropout;
    if (!read_number(c, c->root, key, otherwise, &dropout)) return false;
    return dropout < 1 ? set_number(c, "dropout", dropout) : config_fail(c, "\"%s\" must be below 1", key);
}

static bool read_head(const config *c, bool otherwise)
{
    bool tied;
    return read_truth(c, "tie_word_embeddings", otherwise, &tied) && set_text(c, "head", tied ? "tied" : "own");
}

/* ---- Forms ------------------------------------------------------------------------------------------------ */

static bool read_activation(const config *c, const char *key, const char *otherwise, const char *const (*known)[2])
{
    const td_json *value = member(c->root, key);
    const char *name = !value ? otherwise : value->kind == TD_JSON_STRING ? value->string : "?";
    for (; (*known)[0]; known++) {
        if (strcmp(name, (*known)[0])) continue;
        return !(*known)[1] || set_text(c, "gelu", (*known)[1]);
    }
    return config_fail(c, "\"%s\" is '%.60s', a function that this form of the model has not", key, name);
}

static bool read_gpt2(const config *c)
{
    static const count_member counts[] = {
        { "n_layer", "layers", GPT_LAYERS, NULL, 0 },    { "n_head", "heads", 1 << 12, NULL, 0 },
        { "n_embd", "width", 1 << 20, NULL, 0 },         { "n_inner", "hidden", 1 << 24, "width", 4 },
        { "n_positions", "context", 1 << 24, NULL, 0 },  { "vocab_size", "vocabulary", 1 << 24, NULL, 0 },
    };
    static const char *const activations[][2] = {
        { "gelu_new", "tanh" }, { "gelu_pytorch_tanh", "tanh" }, { "gelu", "erf" }, { NULL, NULL },
    };
    bool bias;
    if (!set_text(c, "form", "gpt2")) return false;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (!read_count(c, &counts[i])) return false;
    return must_be(c, "scale_attn_weights", true) && must_be(c, "scale_attn_by_inverse_layer_idx", false) &&
           must_be(c, "add_cross_attention", false) && read_activation(c, "activation_function", "gelu_new", activations) &&
           read_eps(c, "layer_norm_epsilon", 1e-5) && read_dropout(c, "resid_pdrop", 0.1) && read_head(c, true) &&
           read_truth(c, "bias", true, &bias) && set_text(c, "bias", bias ? "yes" : "no");
}

/* In earlier files rope_theta beside rope_scaling, in later ones both in rope_parameters. */
static bool read_rotary(const config *c)
{
    const td_json *both = member(c->root, "rope_parameters"), *stretch = both ? both : member(c->root, "rope_scaling");
    const char *key = both ? "rope_parameters" : "rope_scaling";
    double theta, factor = 0, low = LOW, high = HIGH, context = TRAINED_CONTEXT;
    if (stretch && stretch->kind != TD_JSON_OBJECT) return config_fail(c, "\"%s\" must be an object", key);
    if (!read_number(c, member(both, "rope_theta") ? both : c->root, "rope_theta", 10000, &theta)) return false;
    if (!(theta > 0)) return config_fail(c, "\"rope_theta\" must be above 0");
    const char *type = td_json_get_string(stretch, "rope_type");
    if (!type) type = td_json_get_string(stretch, "type");
    if (!type) type = stretch && !both ? "?" : "default";
    if (!strcmp(type, "llama3")) {
        if (!read_number(c, stretch, "factor", 0, &factor) || !read_number(c, stretch, "low_freq_factor", 0, &low) ||
            !read_number(c, stretch, "high_freq_factor", 0, &high) ||
            !read_number(c, stretch, "original_max_position_embeddings", 0, &context))
            return false;
        if (!(factor >= 1)) return config_fail(c, "\"%s\": \"factor\" must be at least 1", key);
    } else if (strcmp(type, "default")) {
        return config_fail(c, "\"%s\" is of the kind '%.60s': llama3 is known, or none", key, type);
    }
    if (low != LOW || high != HIGH || context != TRAINED_CONTEXT)
        return config_fail(c, "\"%s\" has factors %g and %g and a context of %g: only 1, 4 and 8192 are known", key, low, high, context);
    return set_number(c, "theta", theta) && set_number(c, "rope-factor", factor);
}

static bool read_head_width(const config *c)
{
    const td_json *value = member(c->root, "head_dim");
    int64_t width = run_flag_whole(c->run, "width"), heads = run_flag_whole(c->run, "heads");
    if (!value || (value->kind == TD_JSON_NUMBER && value->number * (double)heads == (double)width)) return true;
    return config_fail(c, "\"head_dim\" is not hidden_size / num_attention_heads, which is all that is known");
}

static bool read_llama(const config *c)
{
    static const count_member counts[] = {
        { "num_hidden_layers", "layers", GPT_LAYERS, NULL, 0 },
        { "num_attention_heads", "heads", 1 << 12, NULL, 0 },
        { "num_key_value_heads", "kv-heads", 1 << 12, "heads", 1 },
        { "hidden_size", "width", 1 << 20, NULL, 0 },
        { "intermediate_size", "hidden", 1 << 24, NULL, 0 },
        { "max_position_embeddings", "context", 1 << 24, NULL, 0 },
        { "vocab_size", "vocabulary", 1 << 24, NULL, 0 },
    };
    static const char *const activations[][2] = { { "silu", NULL }, { "swish", NULL }, { NULL, NULL } };
    if (!set_text(c, "form", "llama")) return false;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (!read_count(c, &counts[i])) return false;
    return read_head_width(c) && must_be(c, "attention_bias", false) && must_be(c, "mlp_bias", false) &&
           read_activation(c, "hidden_act", "silu", activations) && read_eps(c, "rms_norm_eps", 1e-6) &&
           read_dropout(c, "attention_dropout", 0) && read_rotary(c) && read_head(c, false);
}

bool gpt_config_read(run_loop *run, const char *path)
{
    config c = { .run = run, .td = run_context(run), .path = path };
    td_json_document *document = td_json_read(c.td, path);
    if (!document) return false;
    c.root = td_json_root(document);
    const char *type = td_json_get_string(c.root, "model_type");
    bool ok = type != NULL;
    if (!type) config_fail(&c, "lacks \"model_type\"");
    else if (!strcmp(type, "gpt2")) ok = read_gpt2(&c);
    else if (!strcmp(type, "llama")) ok = read_llama(&c);
    else ok = config_fail(&c, "\"model_type\" is '%.60s': gpt2 and llama are known", type);
    td_json_close(document);
    return ok;
}

/* ---- Writing ---------------------------------------------------------------------------------------------- */

static void put_gpt2(td_json_writer *w, const gpt_size *s)
{
    td_json_put_integer(w, "n_layer", s->layers);
    td_json_put_integer(w, "n_head", s->heads);
    td_json_put_integer(w, "n_embd", s->width);
    td_json_put_integer(w, "n_inner", s->hidden ? s->hidden : 4 * s->width);
    td_json_put_integer(w, "n_positions", s->context);
    td_json_put_integer(w, "n_ctx", s->context);
    td_json_put_string(w, "activation_function", s->tanh_gelu ? "gelu_new" : "gelu");
    td_json_put_number(w, "layer_norm_epsilon", s->eps > 0 ? s->eps : 1e-5);
    td_json_put_number(w, "resid_pdrop", s->dropout);
    td_json_put_number(w, "embd_pdrop", s->dropout);
    td_json_put_number(w, "attn_pdrop", s->dropout);
    /* GPT2Config knows no such key, and its model then begins biases at 0: the same function. */
    if (!s->has_bias) td_json_put_boolean(w, "bias", false);
}

static void put_llama(td_json_writer *w, const gpt_size *s)
{
    td_json_put_integer(w, "num_hidden_layers", s->layers);
    td_json_put_integer(w, "num_attention_heads", s->heads);
    td_json_put_integer(w, "num_key_value_heads", s->kv_heads ? s->kv_heads : s->heads);
    td_json_put_integer(w, "hidden_size", s->width);
    td_json_put_integer(w, "intermediate_size", s->hidden ? s->hidden : 4 * s->width);
    td_json_put_integer(w, "max_position_embeddings", s->context);
    td_json_put_string(w, "hidden_act", "silu");
    td_json_put_number(w, "rms_norm_eps", s->eps > 0 ? s->eps : 1e-5);
    td_json_put_number(w, "attention_dropout", s->dropout);
    td_json_put_boolean(w, "attention_bias", false);
    td_json_put_boolean(w, "mlp_bias", false);
    td_json_put_number(w, "rope_theta", s->theta > 0 ? s->theta : 10000);
    if (!(s->rope_factor > 0)) return;
    td_json_open_object(w, "rope_scaling");
    td_json_put_string(w, "rope_type", "llama3");
    td_json_put_number(w, "factor", s->rope_factor);
    td_json_put_number(w, "low_freq_factor", LOW);
    td_json_put_number(w, "high_freq_factor", HIGH);
    td_json_put_integer(w, "original_max_position_embeddings", TRAINED_CONTEXT);
    td_json_close_object(w);
}

/* What ends a text is the tokenizer's to say; the configs' own defaults would be wrong, or beyond the vocabulary. */
static void put_no_ends(td_json_writer *w)
{
    td_json_put_null(w, "bos_token_id");
    td_json_put_null(w, "eos_token_id");
}

static bool put_text(int fd, const void *text) { return td_file_put(fd, text, (int64_t)strlen(text)) && td_file_put(fd, "\n", 1); }

bool gpt_config_write(run_loop *run, const gpt_size *s, td_dtype dtype, const char *path)
{
    bool llama = s->form == GPT_LLAMA;
    td_json_writer w = td_json_begin(run_context(run));
    td_json_open_object(&w, NULL);
    td_json_put_string(&w, "model_type", llama ? "llama" : "gpt2");
    td_json_open_array(&w, "architectures");
    td_json_put_string(&w, NULL, llama ? "LlamaForCausalLM" : "GPT2LMHeadModel");
    td_json_close_array(&w);
    td_json_put_integer(&w, "vocab_size", s->vocabulary);
    if (llama || s->vocabulary < GPT2_VOCABULARY) put_no_ends(&w);
    if (llama) put_llama(&w, s);
    else put_gpt2(&w, s);
    td_json_put_boolean(&w, "tie_word_embeddings", !s->untied);
    td_json_put_string(&w, "torch_dtype", dtype == TD_BF16 ? "bfloat16" : dtype == TD_F64 ? "float64" : "float32");
    td_json_close_object(&w);
    const char *text = td_json_text(&w);
    bool ok = text && td_file_replace(run_context(run), path, put_text, text);
    td_json_end(&w);
    return ok;
}
