/* The network of GPT-2 (Radford et al. 2019): pre-norm blocks of attention and a four times wider MLP, learned positions, tied head.
 *
 * Parameters are named as in the published files: wte, wpe, h.N.ln_1, h.N.attn.c_attn, h.N.attn.c_proj, h.N.ln_2, h.N.mlp.c_fc,
 * h.N.mlp.c_proj, ln_f. Weights start N(0, 0.02), those of the projections back to the residual N(0, 0.02 / sqrt(2 layers)), biases at 0.
 */
#include <math.h>
#include <stdio.h>

#include "models/gpt/gpt.h"

static const double DEVIATION = 0.02;

static nn_linear linear(td_module at, const char *name, int64_t in, int64_t out, double deviation, const gpt_size *s)
{
    return nn_linear_make_with(at, name, in, out, &(nn_linear_options){ .no_bias = !s->has_bias, .deviation = deviation });
}

static gpt_block make_block(td_module parent, int64_t index, const gpt_size *s)
{
    char name[24];
    snprintf(name, sizeof name, "%lld", (long long)index);
    td_module at = td_child(parent, name), attn = td_child(at, "attn"), mlp = td_child(at, "mlp");
    double residual = DEVIATION / sqrt(2.0 * (double)s->layers);
    nn_norm_options norm = { .no_bias = !s->has_bias };
    gpt_block b = { .attn = attn };
    b.ln_1 = nn_layer_norm_make_with(at, "ln_1", s->width, &norm);
    b.c_attn = linear(attn, "c_attn", s->width, 3 * s->width, DEVIATION, s);
    b.c_proj = linear(attn, "c_proj", s->width, s->width, residual, s);
    b.attn_drop = nn_dropout_make(attn, "resid_dropout", s->dropout);
    b.ln_2 = nn_layer_norm_make_with(at, "ln_2", s->width, &norm);
    b.c_fc = linear(mlp, "c_fc", s->width, 4 * s->width, DEVIATION, s);
    b.mlp_proj = linear(mlp, "c_proj", 4 * s->width, s->width, residual, s);
    b.mlp_drop = nn_dropout_make(mlp, "dropout", s->dropout);
    return b;
}

void gpt_make(gpt *g, td_module root, gpt_size size)
{
    nn_embedding_options table = { .deviation = DEVIATION };
    *g = (gpt){ .size = size, .at = root };
    g->wte = nn_embedding_make_with(root, "wte", size.vocabulary, size.width, &table);
    g->wpe = nn_embedding_make_with(root, "wpe", size.context, size.width, &table);
    g->drop = nn_dropout_make(root, "drop", size.dropout);
    td_module blocks = td_child(root, "h");
    for (int64_t l = 0; l < size.layers; l++) g->h[l] = make_block(blocks, l, &size);
    g->ln_f = nn_layer_norm_make_with(root, "ln_f", size.width, &(nn_norm_options){ .no_bias = !size.has_bias });
}

/* Part `which` of (B, T, 3 C) as heads: (B, H, T, C / H) */
static td_tensor heads_of(td_tensor qkv, int64_t which, const gpt_size *s)
{
    td_shape shape = td_shape_at(qkv);
    td_tensor part = td_slice(qkv, TD_LAST, which * s->width, (which + 1) * s->width);
    return td_transpose(td_reshape(part, shape.dim[0], shape.dim[1], s->heads, s->width / s->heads), 1, 2);
}

/* (B, T, C) -> (B, T, C) */
static td_tensor attend(const gpt_block *b, const gpt_size *s, td_tensor x)
{
    td_shape shape = td_shape_at(x);
    td_tensor qkv = nn_linear_apply(&b->c_attn, x); /* (B, T, 3 C) */
    td_tensor q = heads_of(qkv, 0, s), k = heads_of(qkv, 1, s), v = heads_of(qkv, 2, s);
    td_enter(b->attn);
    td_attention_options options = { .causal = true, .dropout = s->dropout, .lengths = TD_NO_TENSOR, .positions = TD_NO_TENSOR };
    td_tensor y = td_attention(q, k, v, &options);
    td_leave(b->attn);
    y = td_reshape(td_transpose(y, 1, 2), shape.dim[0], shape.dim[1], s->width);
    return nn_dropout_apply(&b->attn_drop, nn_linear_apply(&b->c_proj, y));
}

static td_tensor feed_forward(const gpt_block *b, const gpt_size *s, td_tensor x)
{
    td_tensor h = nn_linear_apply(&b->c_fc, x); /* (B, T, 4 C) */
    h = s->tanh_gelu ? td_gelu_tanh(h) : td_gelu(h);
    return nn_dropout_apply(&b->mlp_drop, nn_linear_apply(&b->mlp_proj, h));
}

td_tensor gpt_logits(const gpt *g, td_tensor ids)
{
    td_context *td = td_module_context(g->at);
    td_shape shape = td_shape_at(ids); /* (B, T) */
    td_tensor positions = td_slice(td_use(g->wpe.weight), 0, 0, shape.dim[1]); /* (T, C) */
    td_tensor x = td_add(nn_embedding_apply(&g->wte, ids), positions);
    x = nn_dropout_apply(&g->drop, x);
    for (int64_t l = 0; l < g->size.layers; l++) {
        if (g->size.recompute) td_recompute_begin(td);
        x = td_add(x, attend(&g->h[l], &g->size, nn_norm_apply(&g->h[l].ln_1, x)));
        x = td_add(x, feed_forward(&g->h[l], &g->size, nn_norm_apply(&g->h[l].ln_2, x)));
        if (g->size.recompute) td_recompute_end(td);
    }
    return td_matmul_with(nn_norm_apply(&g->ln_f, x), td_use(g->wte.weight), 0, 1);
}
