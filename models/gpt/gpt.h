/* The GPT's parts: its sizes, its network, its data. */
#ifndef TANDEM_MODELS_GPT_H
#define TANDEM_MODELS_GPT_H

#include <tandem/nn.h>
#include <tandem/run.h>

enum { GPT_LAYERS = 64 };

/* A decoder in GPT-2's form. */
typedef struct gpt_size {
    const char *name;
    int64_t layers, heads, width, context;
    int64_t vocabulary;           /* 0: the data's */
    bool has_bias, tanh_gelu;
    double dropout;
    bool recompute;               /* blocks are computed again in the backward, which takes less memory */
} gpt_size;

/* The size that --size names, with what --layers --heads --width --context --dropout --recompute change; false after an error. */
bool gpt_size_of(run_loop *run, gpt_size *out);

typedef struct gpt_block {
    nn_norm ln_1, ln_2;
    nn_linear c_attn, c_proj, c_fc, mlp_proj;
    td_module attn;               /* keys the dropout of the attention */
    nn_dropout attn_drop, mlp_drop;
} gpt_block;

typedef struct gpt {
    gpt_size size;
    td_module at;
    nn_embedding wte, wpe;        /* the head is wte again */
    nn_dropout drop;
    gpt_block h[GPT_LAYERS];
    nn_norm ln_f;
} gpt;

void gpt_make(gpt *g, td_module root, gpt_size size);
/* ids (B, T) i32, T at most the context -> logits (B, T, vocabulary) */
td_tensor gpt_logits(const gpt *g, td_tensor ids);

/* Characters of a text file: windows of the size's context, the last tenth kept for testing. NULL after an error. */
data_set *gpt_text(run_loop *run, const char *split);
/* The same form, made up. */
data_set *gpt_random(run_loop *run);

#endif
