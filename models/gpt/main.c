/* gpt: a decoder-only transformer in GPT-2's form, on the characters of a text.
 *
 *     build/bin/gpt train --data text.txt --layers 4 --heads 4 --width 128 --context 64 --dropout 0 --batch 12 --steps 2000 --out OUT
 *     build/bin/gpt plan --size 124m --batch 8 --strategy fsdp --world 8
 */
#include <stdlib.h>
#include <string.h>

#include "models/gpt/gpt.h"

static const gpt_size sizes[] = {
    { .name = "10m", .layers = 6, .heads = 6, .width = 384, .context = 256, .dropout = 0.2 },
    { "124m", 12, 12, 768, 1024, 50304, true, true, 0, false },
    { "355m", 24, 16, 1024, 1024, 50304, true, true, 0, false },
    { "774m", 36, 20, 1280, 1024, 50304, true, true, 0, false },
    { "1558m", 48, 25, 1600, 1024, 50304, true, true, 0, false },
};

bool gpt_size_of(run_loop *run, gpt_size *out)
{
    const char *name = run_flag_text(run, "size");
    size_t i = 0;
    while (i + 1 < sizeof sizes / sizeof *sizes && name && strcmp(sizes[i].name, name)) i++;
    *out = sizes[i];
    int64_t *const numbers[] = { &out->layers, &out->heads, &out->width, &out->context };
    static const char *const flags[] = { "layers", "heads", "width", "context" };
    for (int f = 0; f < 4; f++)
        if (run_flag_text(run, flags[f])) *numbers[f] = run_flag_whole(run, flags[f]);
    if (run_flag_text(run, "dropout")) out->dropout = run_flag_number(run, "dropout");
    out->recompute = run_flag_on(run, "recompute");
    if (out->width % out->heads)
        td_fail(run_context(run), TD_ERROR_USAGE, "--width %lld cannot be divided among --heads %lld", (long long)out->width, (long long)out->heads);
    return td_error(run_context(run)) == TD_OK;
}

static data_set *gpt_data(run_loop *run, const char *split)
{
    return !strcmp(split, "random") ? gpt_random(run) : gpt_text(run, split);
}

static void *make(run_loop *run, td_module root, const data_set *set)
{
    gpt_size size;
    if (!gpt_size_of(run, &size)) return NULL;
    if (!size.vocabulary) size.vocabulary = set->column[0].classes;
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

static const run_flag gpt_flags[] = {
    { .name = "size", .kind = RUN_CHOICE, .choices = "10m|124m|355m|774m|1558m", .standard = "10m", .help = "a named configuration" },
    { .name = "layers", .kind = RUN_COUNT, .most = GPT_LAYERS, .help = "blocks (those of --size)" },
    { .name = "heads", .kind = RUN_COUNT, .most = 1 << 12, .help = "of the attention (those of --size)" },
    { .name = "width", .kind = RUN_COUNT, .most = 1 << 20, .help = "of the residual (that of --size)" },
    { .name = "context", .kind = RUN_COUNT, .most = 1 << 24, .help = "tokens of a window (those of --size)" },
    { .name = "dropout", .kind = RUN_FRACTION, .help = "of embedding, attention and residual (that of --size)" },
    { .name = "recompute", .kind = RUN_SWITCH, .standard = "false", .help = "blocks again in the backward: less memory, more time" },
    { .name = "optimizer", .kind = RUN_CHOICE, .choices = "sgd|adam|adamw", .standard = "adamw", .help = "rule of the update" },
    { .name = "decay", .kind = RUN_AMOUNT, .standard = "0.1", .help = "weight decay" },
    { .name = "decay-dims", .kind = RUN_WHOLE, .standard = "2", .help = "least dimensions of what decays" },
    { .name = "beta2", .kind = RUN_FRACTION, .standard = "0.99", .help = "of adam and adamw" },
    { .name = "momentum", .kind = RUN_FRACTION, .standard = "0.9", .help = "of sgd" },
    { .name = "clip", .kind = RUN_AMOUNT, .standard = "1", .help = "largest norm of the gradient; 0: any" },
    { 0 }
};

static const run_model gpt_model = {
    .about = "gpt: a decoder-only transformer on the characters of a text",
    .defaults = { .name = "gpt", .batch = 64, .epochs = 1, .lr = 1e-3, .schedule = "cosine", .flags = gpt_flags },
    .data = gpt_data,
    .make = make,
    .free = free,
    .loss = gpt_loss,
    .measure = gpt_measure,
};

int main(int argc, char **argv) { return run_main(argc, argv, &gpt_model); }
