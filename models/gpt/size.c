/* The sizes that --size names, as data, and the flags that change them. */
#include <string.h>

#include "models/gpt/gpt.h"

#define GPT_2_SIZE(size, l, h, w) \
    { .name = (size), .layers = (l), .heads = (h), .width = (w), .context = 1024, .vocabulary = 50304, .has_bias = true, .tanh_gelu = true }
#define LLAMA_SIZE(size, l, h, kv, w, f, stretch) \
    { .name = (size), .form = GPT_LLAMA, .layers = (l), .heads = (h), .kv_heads = (kv), .width = (w), .hidden = (f), .context = 2048, \
      .vocabulary = 128256, .theta = 500000, .rope_factor = (stretch), .untied = (stretch) == 8 }

/* Llama 3.2's 1B and 3B, 3.1's 8B, which alone has a head of its own. */
static const gpt_size sizes[] = {
    { .name = "10m", .layers = 6, .heads = 6, .width = 384, .context = 256, .dropout = 0.2 },
    GPT_2_SIZE("124m", 12, 12, 768),
    GPT_2_SIZE("355m", 24, 16, 1024),
    GPT_2_SIZE("774m", 36, 20, 1280),
    GPT_2_SIZE("1558m", 48, 25, 1600),
    LLAMA_SIZE("llama1b", 16, 32, 8, 2048, 8192, 32),
    LLAMA_SIZE("llama3b", 28, 24, 8, 3072, 8192, 32),
    LLAMA_SIZE("llama8b", 32, 32, 8, 4096, 14336, 8),
};

static bool is_choice(run_loop *run, const char *flag, const char *choice, bool standard)
{
    const char *text = run_flag_text(run, flag);
    return text ? !strcmp(text, choice) : standard;
}

/* Refuses what the form does not have, and sizes that do not fit one another. */
static bool check_size(run_loop *run, const gpt_size *s)
{
    static const char *const refused[][2] = { [GPT_2] = { "theta", "rope-factor" }, [GPT_LLAMA] = { "bias", "gelu" } };
    td_context *td = run_context(run);
    int64_t kv_heads = s->kv_heads ? s->kv_heads : s->heads;
    for (int i = 0; i < 2; i++)
        if (run_flag_text(run, refused[s->form][i]))
            td_fail(td, TD_ERROR_USAGE, "--%s has no effect on the form %s: leave it out", refused[s->form][i], s->form == GPT_2 ? "gpt2" : "llama");
    if (s->width % s->heads)
        td_fail(td, TD_ERROR_USAGE, "--width %lld cannot be divided among --heads %lld", (long long)s->width, (long long)s->heads);
    else if (s->heads % kv_heads)
        td_fail(td, TD_ERROR_USAGE, "--heads %lld cannot share --kv-heads %lld evenly", (long long)s->heads, (long long)kv_heads);
    else if (s->form == GPT_LLAMA && s->width / s->heads % 2)
        td_fail(td, TD_ERROR_USAGE, "--width %lld over --heads %lld gives heads of an odd width, which rotary positions cannot turn",
                (long long)s->width, (long long)s->heads);
    return td_error(td) == TD_OK;
}

/* The form that --form names; what the size's own form alone has is dropped where it is another. */
static void choose_form(run_loop *run, gpt_size *s)
{
    gpt_form form = is_choice(run, "form", "llama", s->form == GPT_LLAMA) ? GPT_LLAMA : GPT_2;
    if (form == s->form) return;
    s->form = form;
    s->has_bias = s->tanh_gelu = false;
    s->kv_heads = s->hidden = 0;
    s->theta = s->rope_factor = 0;
}

bool gpt_size_of(run_loop *run, gpt_size *out)
{
    const char *name = run_flag_text(run, "size");
    size_t i = 0;
    while (i + 1 < sizeof sizes / sizeof *sizes && name && strcmp(sizes[i].name, name)) i++;
    *out = sizes[i];
    choose_form(run, out);
    const struct { const char *flag; int64_t *to; } wholes[] = {
        { "layers", &out->layers }, { "heads", &out->heads }, { "kv-heads", &out->kv_heads }, { "width", &out->width },
        { "hidden", &out->hidden }, { "context", &out->context }, { "vocabulary", &out->vocabulary },
    };
    const struct { const char *flag; double *to; } numbers[] = {
        { "dropout", &out->dropout }, { "eps", &out->eps }, { "theta", &out->theta }, { "rope-factor", &out->rope_factor },
    };
    for (i = 0; i < sizeof wholes / sizeof *wholes; i++)
        if (run_flag_text(run, wholes[i].flag)) *wholes[i].to = run_flag_whole(run, wholes[i].flag);
    for (i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (run_flag_text(run, numbers[i].flag)) *numbers[i].to = run_flag_number(run, numbers[i].flag);
    out->has_bias = is_choice(run, "bias", "yes", out->has_bias);
    out->tanh_gelu = is_choice(run, "gelu", "tanh", out->tanh_gelu);
    out->untied = is_choice(run, "head", "own", out->untied);
    out->recompute = run_flag_on(run, "recompute");
    return check_size(run, out);
}
