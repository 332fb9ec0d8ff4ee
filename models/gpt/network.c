/* Decoders: GPT-2's (Radford et al. 2019) and Llama's (Touvron et al. 2023; Dubey et al. 2024), one code.
 *
 * Parameters are named as in the published files. Weights start N(0, 0.02), those of the projections back to the residual
 * N(0, 0.02 / sqrt(2 layers)), biases at 0.
 */
#include <math.h>
#include <stdio.h>

#include "models/gpt/gpt.h"

static const double DEVIATION = 0.02;

/* What the published files call the parts of a form. */
typedef struct form_names {
    const char *trunk;           /* the module of all but the head; NULL: the root */
    const char *tokens, *blocks, *norm;
    const char *block[4], *attention[4], *mlp[3];
} form_names;

static const form_names names[] = {
    [GPT_2] = { .tokens = "wte", .blocks = "h", .norm = "ln_f", .block = { "ln_1", "attn", "ln_2", "mlp" },
                .attention = { "c_attn", "c_proj" }, .mlp = { "c_fc", "c_proj" } },
    [GPT_LLAMA] = { .trunk = "model", .tokens = "embed_tokens", .blocks = "layers", .norm = "norm",
                    .block = { "input_layernorm", "self_attn", "post_attention_layernorm", "mlp" },
                    .attention = { "q_proj", "k_proj", "v_proj", "o_proj" }, .mlp = { "up_proj", "down_proj", "gate_proj" } },
};

static nn_block_options block_options(const gpt_size *s, const td_rotary_options *rotary)
{
    bool llama = s->form == GPT_LLAMA, no_bias = llama || !s->has_bias;
    nn_linear_options in = { .no_bias = no_bias, .deviation = DEVIATION };
    nn_linear_options out = { .no_bias = no_bias, .deviation = DEVIATION / sqrt(2.0 * (double)s->layers) };
    return (nn_block_options){
        .rms = llama,
        .norm = { .eps = s->eps, .no_bias = no_bias },
        .dropout = s->dropout,
        .attention = { .kv_heads = s->kv_heads, .packed = !llama, .dropout = s->dropout, .rotary = llama ? rotary : NULL,
                       .in = in, .out = out, .names = names[s->form].attention },
        .mlp = { .activation = llama ? NN_SILU : s->tanh_gelu ? NN_GELU_TANH : NN_GELU, .gated = llama,
                 .in = in, .out = out, .names = names[s->form].mlp },
        .names = names[s->form].block,
    };
}

static nn_norm last_norm(td_module trunk, const gpt_size *s)
{
    nn_norm_options options = { .eps = s->eps, .no_bias = !s->has_bias };
    const char *name = names[s->form].norm;
    return s->form == GPT_LLAMA ? nn_rms_norm_make_with(trunk, name, s->width, &options)
                                : nn_layer_norm_make_with(trunk, name, s->width, &options);
}

void gpt_make(gpt *g, td_module root, gpt_size size)
{
    const form_names *n = &names[size.form];
    nn_embedding_options table = { .deviation = DEVIATION };
    td_rotary_options rotary = { .theta = size.theta, .factor = size.rope_factor, .low = 1, .high = 4, .context = 8192 };
    nn_block_options options = block_options(&size, &rotary);
    td_module trunk = n->trunk ? td_child(root, n->trunk) : root;
    *g = (gpt){ .size = size };
    g->tokens = nn_embedding_make_with(trunk, n->tokens, size.vocabulary, size.width, &table);
    if (size.form == GPT_2) g->positions = nn_embedding_make_with(trunk, "wpe", size.context, size.width, &table);
    g->drop = nn_dropout_make(trunk, "drop", size.dropout);
    td_module blocks = td_child(trunk, n->blocks);
    for (int64_t l = 0; l < size.layers; l++) {
        char name[24];
        snprintf(name, sizeof name, "%lld", (long long)l);
        g->block[l] = nn_block_make_with(blocks, name, size.width, size.heads, size.hidden ? size.hidden : 4 * size.width, &options);
    }
    g->norm = last_norm(trunk, &size);
    if (size.untied)
        g->head = nn_linear_make_with(root, "lm_head", size.width, size.vocabulary, &(nn_linear_options){ .no_bias = true, .deviation = DEVIATION });
}

/* ids (B, T) -> (B, T, C); rows of learned positions are given where they are not the first T. */
static td_tensor embed(const gpt *g, td_tensor ids, td_tensor places)
{
    td_tensor x = nn_embedding_apply(&g->tokens, ids);
    if (g->size.form == GPT_2 && places.td) {
        td_tensor rows = nn_embedding_apply(&g->positions, places); /* (B, T, C) */
        x = td_add(x, rows);
    } else if (g->size.form == GPT_2) {
        td_tensor rows = td_use(g->positions.weight);
        rows = td_slice(rows, 0, 0, td_shape_at(ids).dim[1]); /* (T, C) */
        x = td_add(x, rows);
    }
    return nn_dropout_apply(&g->drop, x);
}

static td_tensor head(const gpt *g, td_tensor x)
{
    x = nn_norm_apply(&g->norm, x);
    return g->size.untied ? nn_linear_apply(&g->head, x) : td_matmul_with(x, td_use(g->tokens.weight), 0, 1);
}

td_tensor gpt_logits(const gpt *g, td_tensor ids)
{
    td_tensor x = embed(g, ids, TD_NO_TENSOR);
    for (int64_t l = 0; l < g->size.layers; l++) {
        if (g->size.recompute) td_recompute_begin(ids.td);
        x = nn_block_apply(&g->block[l], x);
        if (g->size.recompute) td_recompute_end(ids.td);
    }
    return head(g, x);
}

void gpt_caches_make(const gpt *g, gpt_caches *caches, int64_t batch, int64_t length)
{
    for (int64_t l = 0; l < g->size.layers; l++) caches->block[l] = nn_cache_make(&g->block[l].attention, "cache", batch, length);
}

td_tensor gpt_logits_behind(const gpt *g, const gpt_caches *caches, td_tensor ids, td_tensor places, td_tensor positions, td_tensor last)
{
    nn_sequence sequence = { .positions = positions };
    td_tensor x = embed(g, ids, places);
    for (int64_t l = 0; l < g->size.layers; l++) {
        sequence.cache = &caches->block[l];
        x = nn_block_apply_to(&g->block[l], x, &sequence);
    }
    td_shape shape = td_shape_at(x); /* (B, T, C) */
    if (shape.dim[1] > 1) x = td_slice_read(x, 1, last, 1);
    x = td_reshape(x, shape.dim[0], shape.dim[2]);
    return head(g, x);
}
