/* gpt: a decoder-only transformer in the form of GPT-2 or of Llama, on a text.
 *
 *     build/bin/gpt train --data text.txt --layers 4 --heads 4 --width 128 --context 64 --dropout 0 --batch 12 --steps 2000 --out OUT
 *     build/bin/gpt import --from FOLDER --out OUT        and export --out OUT --to FOLDER: published weights
 *     build/bin/gpt plan --size 124m --batch 8 --strategy fsdp --world 8
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/gpt/published.h"

static data_set *gpt_data(run_loop *run, const char *split)
{
    return !strcmp(split, "random") ? gpt_random(run) : gpt_text(run, split);
}

/* How many there are in the data, or, without any, in the tokenizer, or, where none is kept, in the sizes; -1 after an error. */
static int64_t tokens_of(run_loop *run, const data_set *set, const gpt_size *size)
{
    if (set) return set->column[0].classes;
    if (size->vocabulary && !gpt_has_tokenizer(run)) return size->vocabulary;
    data_tokenizer *tokenizer = gpt_tokenizer(run);
    int64_t tokens = tokenizer ? data_tokenizer_vocabulary(tokenizer) : -1;
    data_tokenizer_close(tokenizer);
    return tokens;
}

static void *make(run_loop *run, td_module root, const data_set *set)
{
    gpt_size size;
    if (!gpt_size_of(run, &size)) return NULL;
    int64_t tokens = tokens_of(run, set, &size);
    if (tokens < 0) return NULL;
    size.vocabulary = gpt_vocabulary(run, tokens);
    if (size.vocabulary < 0) return NULL;
    gpt *g = calloc(1, sizeof *g);
    if (g)
        gpt_make(g, root, size);
    else
        td_fail(run_context(run), TD_ERROR_MEMORY, "out of memory for the model");
    return g;
}

static td_tensor gpt_loss(void *model, const data_batch *b)
{
    td_tensor logits = gpt_logits(model, data_get(b, "x"));
    return td_cross_entropy(logits, data_get(b, "y"));
}

/* Every token of a window counts as the window does. */
static int gpt_measure(void *model, const data_batch *b, run_metric out[RUN_METRICS])
{
    td_tensor logits = gpt_logits(model, data_get(b, "x")), y = data_get(b, "y");
    td_tensor weights = td_broadcast(td_reshape(data_get(b, "weight"), -1, 1), td_shape_at(y)); /* (B, T) */
    td_tensor total = td_sum(weights, TD_ALL, TD_DROP);
    out[0] = (run_metric){ "loss", td_mul(td_cross_entropy_weighted(logits, y, weights), total), total };
    return 1;
}

/* The best rate falls as the width grows; that of the sizes that others trained is near this too. */
static void settle(run_loop *run)
{
    gpt_size size;
    char text[32];
    if (!gpt_size_of(run, &size)) return;
    snprintf(text, sizeof text, "%.4g", 0.384 / (double)size.width);
    run_flag_default(run, "lr", text);
}

static const run_flag gpt_flags[] = {
    { .name = "size", .kind = RUN_CHOICE, .choices = "10m|124m|355m|774m|1558m|llama1b|llama3b|llama8b", .standard = "10m",
      .help = "a named configuration" },
    { .name = "form", .kind = RUN_CHOICE, .choices = "gpt2|llama", .help = "of the blocks (that of --size)" },
    { .name = "layers", .kind = RUN_COUNT, .most = GPT_LAYERS, .help = "blocks (those of --size)" },
    { .name = "heads", .kind = RUN_COUNT, .most = 1 << 12, .help = "of the attention (those of --size)" },
    { .name = "kv-heads", .kind = RUN_COUNT, .most = 1 << 12, .help = "llama: heads of keys and values (those of --size, or --heads)" },
    { .name = "width", .kind = RUN_COUNT, .most = 1 << 20, .help = "of the residual (that of --size)" },
    { .name = "hidden", .kind = RUN_COUNT, .most = 1 << 24, .help = "width of the mlp (that of --size, or 4 --width)" },
    { .name = "vocabulary", .kind = RUN_COUNT, .most = 1 << 24, .help = "tokens the model knows (that of --size, or the data's)" },
    { .name = "bias", .kind = RUN_CHOICE, .choices = "yes|no", .help = "gpt2: linear layers and norms have one (as --size)" },
    { .name = "gelu", .kind = RUN_CHOICE, .choices = "erf|tanh", .help = "gpt2: form of the mlp's function (that of --size)" },
    { .name = "head", .kind = RUN_CHOICE, .choices = "tied|own", .help = "weights of the head: the tokens', or its own (as --size)" },
    { .name = "eps", .kind = RUN_POSITIVE, .help = "of norms (1e-5)" },
    { .name = "theta", .kind = RUN_POSITIVE, .help = "llama: base of rotary positions (that of --size, or 10000)" },
    { .name = "rope-factor", .kind = RUN_AMOUNT, .help = "llama: stretch of long wavelengths; 0: none (that of --size)" },
    { .name = "tokenizer", .kind = RUN_TEXT, .standard = "characters", .help = "characters, bytes, or folder or tokenizer.json of a byte-level BPE" },
    { .name = "context", .kind = RUN_COUNT, .most = 1 << 24, .help = "tokens of a window (those of --size)" },
    { .name = "dropout", .kind = RUN_FRACTION, .help = "of embedding, attention and residual (that of --size)" },
    { .name = "recompute", .kind = RUN_SWITCH, .standard = "false", .help = "blocks again in the backward: less memory, more time" },
    { .name = "lr", .kind = RUN_POSITIVE, .commands = RUN_TRAIN | RUN_BENCH | RUN_PLAN, .help = "learning rate (0.384 / width)" },
    RUN_OPTIMIZER_FLAGS("adamw"),
    { .name = "decay", .kind = RUN_AMOUNT, .standard = "0.1", .help = "weight decay" },
    { .name = "decay-dims", .kind = RUN_WHOLE, .standard = "2", .help = "least dimensions of what decays" },
    { .name = "beta2", .kind = RUN_FRACTION, .standard = "0.99", .help = "of adam, adamw and lion" },
    { .name = "clip", .kind = RUN_AMOUNT, .standard = "1", .help = "largest norm of the gradient; 0: any" },
    { .name = "prompt", .kind = RUN_TEXT, .commands = GPT_SAMPLE, .help = "what the text begins with" },
    { .name = "prompt-file", .kind = RUN_TEXT, .commands = GPT_SAMPLE, .help = "the same from a file" },
    { .name = "tokens", .kind = RUN_COUNT, .standard = "200", .most = 1e9, .commands = GPT_SAMPLE, .help = "to add to the prompt" },
    { .name = "temperature", .kind = RUN_AMOUNT, .standard = "1", .most = 1e3, .commands = GPT_SAMPLE,
      .help = "logits are divided by it; 0: always the likeliest token" },
    { .name = "top-k", .kind = RUN_COUNT, .commands = GPT_SAMPLE, .help = "choose among the likeliest so many (all)" },
    { .name = "top-p", .kind = RUN_POSITIVE, .standard = "1", .most = 1, .commands = GPT_SAMPLE,
      .help = "choose among the likeliest whose probabilities sum to it" },
    { .name = "no-cache", .kind = RUN_SWITCH, .standard = "false", .commands = GPT_SAMPLE, .help = "read the whole text again for each token" },
    { .name = "from", .kind = RUN_TEXT, .commands = GPT_IMPORT, .help = "folder with config.json and model.safetensors, or such a file" },
    { .name = "to", .kind = RUN_TEXT, .commands = GPT_EXPORT, .help = "folder for config.json and model.safetensors" },
    { 0 }
};

static const run_command commands[] = {
    { "sample", "write on from a prompt", true, gpt_sample },
    { "import", "begin a run with published weights", false, gpt_import },
    { "export", "publish the weights of a run", true, gpt_export },
    { 0 }
};

static const run_model gpt_model = {
    .about = "gpt: a decoder-only transformer on a text",
    .defaults = { .name = "gpt", .batch = 64, .epochs = 1, .warmup = 100, .schedule = "cosine", .flags = gpt_flags },
    .data = gpt_data,
    .make = make,
    .free = free,
    .loss = gpt_loss,
    .measure = gpt_measure,
    .settle = settle,
    .record = gpt_record,
    .commands = commands,
};

int main(int argc, char **argv) { return run_main(argc, argv, &gpt_model); }
