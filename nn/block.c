/* block: the transformer's attention and mlp around a residual.
 *
 *     x (B, T, width)   ->   (B, T, width)
 *     pre-norm  (GPT-2, Llama)              x = x + drop(attention(norm_1(x))),  x = x + drop(mlp(norm_2(x)))
 *     post-norm (Vaswani et al. 2017)       x = norm_1(x + drop(attention(x))),  x = norm_2(x + drop(mlp(x)))
 */
#include <tandem/nn.h>

static nn_norm norm(td_module at, const char *name, int64_t width, const nn_block_options *o, td_here here)
{
    return o->rms ? nn_rms_norm_make_at(at, name, width, &o->norm, here) : nn_layer_norm_make_at(at, name, width, &o->norm, here);
}

nn_block nn_block_make_at(td_module parent, const char *name, int64_t width, int64_t heads, int64_t hidden, const nn_block_options *options,
                          td_here here)
{
    static const nn_block_options defaults;
    static const char *const standard[] = { "norm_1", "attention", "norm_2", "mlp" };
    const nn_block_options *o = options ? options : &defaults;
    const char *const *names = o->names ? o->names : standard;
    td_module at = td_child(parent, name);
    nn_block b = { .at = at, .post_norm = o->post_norm };
    b.norm_1 = norm(at, names[0], width, o, here);
    b.attention = nn_attention_make_at(at, names[1], width, heads, &o->attention, here);
    b.drop_1 = nn_dropout_make_at(b.attention.at, "dropout", o->dropout, here);
    b.norm_2 = norm(at, names[2], width, o, here);
    b.mlp = nn_mlp_make_at(at, names[3], width, hidden, &o->mlp, here);
    b.drop_2 = nn_dropout_make_at(td_child(at, names[3]), "dropout", o->dropout, here);
    return b;
}

td_tensor nn_block_apply_at(const nn_block *b, td_tensor x, const nn_sequence *sequence, td_here here)
{
    td_enter(b->at);
    td_tensor y = b->post_norm ? x : nn_norm_apply_at(&b->norm_1, x, here);
    y = nn_attention_apply_at(&b->attention, y, sequence, here);
    y = nn_dropout_apply_at(&b->drop_1, y, here);
    x = td_add_at(x, y, here);
    if (b->post_norm) x = nn_norm_apply_at(&b->norm_1, x, here);
    y = b->post_norm ? x : nn_norm_apply_at(&b->norm_2, x, here);
    y = nn_mlp_apply_at(&b->mlp, y, here);
    y = nn_dropout_apply_at(&b->drop_2, y, here);
    x = td_add_at(x, y, here);
    if (b->post_norm) x = nn_norm_apply_at(&b->norm_2, x, here);
    td_leave(b->at);
    return x;
}
