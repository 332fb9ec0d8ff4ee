/* The GPT's parts: its sizes, its network, its data. */
#ifndef TANDEM_MODELS_GPT_H
#define TANDEM_MODELS_GPT_H

#include <tandem/nn.h>
#include <tandem/run.h>

enum { GPT_LAYERS = 128 };

/* How blocks are made and parameters named:
 *     GPT_2      layer norm, learned positions, one product for q, k and v, a GELU in the mlp; names of the published GPT-2 files
 *     GPT_LLAMA  RMS norm, rotary positions, heads that share keys, SwiGLU, no biases; names of the published Llama files */
typedef enum gpt_form { GPT_2, GPT_LLAMA } gpt_form;

/* A decoder. */
typedef struct gpt_size {
    const char *name;
    gpt_form form;
    int64_t layers, heads, width, context;
    int64_t kv_heads;             /* 0: heads */
    int64_t hidden;               /* of the mlp; 0: 4 width */
    int64_t vocabulary;           /* 0: the data's */
    bool has_bias, tanh_gelu;     /* of GPT_2 */
    bool untied;                  /* the head has weights of its own, not those of the tokens */
    double eps;                   /* of norms; 0: 1e-5 */
    double theta, rope_factor;    /* of rotary positions: base; stretch of long wavelengths as in Llama 3.1, 0: none */
    double dropout;
    bool recompute;               /* blocks are computed again in the backward, which takes less memory */
} gpt_size;

/* The size that --size names, with what other flags change; false after an error. */
bool gpt_size_of(run_loop *run, gpt_size *out);

typedef struct gpt {
    gpt_size size;
    nn_embedding tokens, positions; /* positions of GPT_2 only */
    nn_dropout drop;
    nn_block block[GPT_LAYERS];
    nn_norm norm;
    nn_linear head;               /* where untied */
} gpt;

/* Errors: as the layers'. */
void gpt_make(gpt *g, td_module root, gpt_size size);
/* ids (B, T) i32, T at most the context -> logits (B, T, vocabulary) */
td_tensor gpt_logits(const gpt *g, td_tensor ids);

/* Decoding: keys and values of `batch` sequences of at most `length` positions, one cache a block. */
typedef struct gpt_caches {
    nn_cache block[GPT_LAYERS];
} gpt_caches;
/* States, in the context until it closes. */
void gpt_caches_make(const gpt *g, gpt_caches *caches, int64_t batch, int64_t length);
/* The rows of ids (B, T) i32 are at places (B, T) i32, consecutive from positions (B) i32 on, behind what the caches hold; they
 * are added to them. -> the logits of row `last` (B) i32 of each sequence (B, vocabulary): those behind it are padding. */
td_tensor gpt_logits_behind(const gpt *g, const gpt_caches *caches, td_tensor ids, td_tensor places, td_tensor positions, td_tensor last);

/* The products of `g` read bf16 copies of their weights from now on, which do not follow them: for a model under bf16 that no longer
 * trains, once, on one rank. The copies are states, in the context until it closes. false after an error. (narrow.c) */
bool gpt_narrow(gpt *g);

/* ---- Tokens (tokens.c): text to ids. --tokenizer says which; a run keeps its own in OUT/model, from where it is taken again */

/* NULL after an error: what is in OUT and what --tokenizer names differ, say. The caller closes it. */
data_tokenizer *gpt_tokenizer(run_loop *run);
/* Writes it to dir, as run_model.record. */
bool gpt_record(run_loop *run, const char *dir);
/* How many tokens the model is to know: --vocabulary, the size's, or the tokenizer's; -1 and an error: fewer than the tokenizer has. */
int64_t gpt_vocabulary(run_loop *run, int64_t tokens);

/* ---- Data (data.c) */

/* The tokens of a text file, or of a file of them (*.bin): windows of the size's context, the last tenth kept for testing. NULL after an
 * error. */
data_set *gpt_text(run_loop *run, const char *split);
/* The same form, made up. */
data_set *gpt_random(run_loop *run);

/* ---- Commands of its own, in this order */
enum { GPT_SAMPLE = RUN_OWN, GPT_IMPORT = RUN_OWN << 1, GPT_EXPORT = RUN_OWN << 2 };
void gpt_sample(run_loop *run, void *model);     /* sample.c */
void gpt_import(run_loop *run, void *model);     /* import.c */
void gpt_export(run_loop *run, void *model);     /* export.c */

#endif
