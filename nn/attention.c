/* attention: queries, keys and values by linear layers, heads, an output layer; with a cache of keys and values for decoding.
 *
 *     x (B, T, width)   q (H d, width)  k, v (Hkv d, width)  out (width, H d)   ->   (B, T, width)
 *
 * The output layer reads heads in order. With a cache, x's keys and values are written behind those of earlier calls and its
 * queries see both.
 */
#include <tandem/nn.h>

static bool sizes_fit(td_context *td, const char *name, int64_t width, const nn_attention *a, td_here here)
{
    if (width < 1 || a->heads < 1 || a->kv_heads < 1 || a->head_width < 0) {
        td_fail(td, TD_ERROR_USAGE, "attention '%s': width %lld, %lld heads and %lld of keys must be at least 1 (%s:%d)", name, (long long)width,
                (long long)a->heads, (long long)a->kv_heads, here.file, here.line);
        return false;
    }
    if (!a->head_width && width % a->heads) {
        td_fail(td, TD_ERROR_USAGE, "attention '%s': a width of %lld cannot be divided among %lld heads (%s:%d)", name, (long long)width,
                (long long)a->heads, here.file, here.line);
        return false;
    }
    if (a->heads % a->kv_heads) {
        td_fail(td, TD_ERROR_USAGE, "attention '%s': %lld heads cannot share %lld heads of keys evenly (%s:%d)", name, (long long)a->heads,
                (long long)a->kv_heads, here.file, here.line);
        return false;
    }
    return true;
}

nn_attention nn_attention_make_at(td_module parent, const char *name, int64_t width, int64_t heads, const nn_attention_options *options,
                                  td_here here)
{
    static const nn_attention_options defaults;
    static const char *const apart[] = { "q_proj", "k_proj", "v_proj", "out_proj" }, *const packed[] = { "qkv_proj", "out_proj" };
    const nn_attention_options *o = options ? options : &defaults;
    const char *const *names = o->names ? o->names : o->packed ? packed : apart;
    nn_attention a = {
        .at = td_child(parent, name), .heads = heads, .kv_heads = o->kv_heads ? o->kv_heads : heads, .head_width = o->head_width,
        .packed = o->packed, .rotates = o->rotary != NULL,
        .options = { .causal = !o->full, .window = o->window, .dropout = o->dropout },
    };
    if (!sizes_fit(td_module_context(parent), name, width, &a, here)) width = a.heads = a.kv_heads = a.head_width = 1;
    if (!a.head_width) a.head_width = width / a.heads;
    if (o->rotary) a.rotary = *o->rotary;
    int64_t queries = a.heads * a.head_width, keys = a.kv_heads * a.head_width;
    if (o->packed) {
        a.qkv = nn_linear_make_at(a.at, names[0], width, queries + 2 * keys, &o->in, here);
    } else {
        a.q = nn_linear_make_at(a.at, names[0], width, queries, &o->in, here);
        a.k = nn_linear_make_at(a.at, names[1], width, keys, &o->in, here);
        a.v = nn_linear_make_at(a.at, names[2], width, keys, &o->in, here);
    }
    a.out = nn_linear_make_at(a.at, names[o->packed ? 1 : 3], queries, width, &o->out, here);
    return a;
}

nn_cache nn_cache_make(const nn_attention *a, const char *name, int64_t batch, int64_t length)
{
    td_module at = td_child(a->at, name);
    td_dtype dtype = td_get_dtype(a->at); /* what attention reads: nothing is converted again at each step */
    if (dtype == TD_F16) dtype = TD_F32; /* which no state can be */
    td_shape shape = TD_SHAPE(batch, a->kv_heads, length, a->head_width);
    nn_cache c;
    c.keys = td_buffer(at, "keys", dtype, shape, td_init_constant(0));
    c.values = td_buffer(at, "values", dtype, shape, td_init_constant(0));
    return c;
}

/* Columns [begin, begin + heads d) of (B, T, ...) as heads: (B, heads, T, d) */
static td_tensor heads_of(td_tensor x, int64_t begin, int64_t heads, int64_t width, td_here here)
{
    td_shape shape = td_shape_at(x);
    if (shape.dim[2] != heads * width) x = td_slice_at(x, TD_LAST, begin, begin + heads * width, here);
    x = td_reshape_at(x, TD_SHAPE(shape.dim[0], shape.dim[1], heads, width), here);
    return td_transpose_at(x, 1, 2, here);
}

typedef struct triple {
    td_tensor q, k, v;           /* (B, H, T, d), (B, Hkv, T, d) twice */
} triple;

static triple project(const nn_attention *a, td_tensor x, td_here here)
{
    int64_t d = a->head_width, queries = a->heads * d, keys = a->kv_heads * d;
    td_tensor q, k, v;
    if (a->packed) {
        q = k = v = nn_linear_apply_at(&a->qkv, x, here); /* (B, T, queries + 2 keys) */
    } else {
        q = nn_linear_apply_at(&a->q, x, here);
        k = nn_linear_apply_at(&a->k, x, here);
        v = nn_linear_apply_at(&a->v, x, here);
    }
    triple t;
    t.q = heads_of(q, 0, a->heads, d, here);
    t.k = heads_of(k, queries, a->kv_heads, d, here);
    t.v = heads_of(v, queries + keys, a->kv_heads, d, here);
    return t;
}

static void rotate(const nn_attention *a, triple *t, const nn_sequence *s, td_here here)
{
    td_rotary_options rotary = a->rotary;
    rotary.positions = s->positions;
    t->q = td_rotary_at(t->q, &rotary, here);
    t->k = td_rotary_at(t->k, &rotary, here);
}

/* x (B, Hkv, T, d) behind what is in the state at its positions; gives all of it: (B, Hkv, length, d) */
static td_tensor remember(td_state state, td_tensor x, td_tensor positions, td_here here)
{
    td_tensor all = td_use_at(state, here);
    x = td_cast_at(x, td_state_dtype(state), here);
    all = td_slice_write_at(all, 2, positions, x, here);
    td_assign_at(state, all, here);
    return td_use_at(state, here);
}

td_tensor nn_attention_apply_at(const nn_attention *a, td_tensor x, const nn_sequence *sequence, td_here here)
{
    static const nn_sequence from_the_start;
    const nn_sequence *s = sequence ? sequence : &from_the_start;
    td_shape shape = td_shape_at(x); /* (B, T, width) */
    if (td_failed(x)) return x;
    if (shape.rank != 3) {
        td_fail(x.td, TD_ERROR_USAGE, "attention '%s': needs (batch, positions, width), got %lld dimensions (%s:%d)", td_module_name(a->at),
                (long long)shape.rank, here.file, here.line);
        return (td_tensor){ .td = x.td, .id = TD_NONE };
    }
    if (s->cache && (!s->positions.td || td_failed(s->positions))) {
        td_fail(x.td, TD_ERROR_USAGE, "attention '%s': a cache needs the positions of x, to know where its keys and values go (%s:%d)",
                td_module_name(a->at), here.file, here.line);
        return (td_tensor){ .td = x.td, .id = TD_NONE };
    }
    td_enter(a->at);
    triple t = project(a, x, here);
    if (a->rotates) rotate(a, &t, s, here);
    td_attention_options options = a->options;
    options.lengths = s->lengths;
    if (s->cache) {
        options.positions = s->positions;
        t.k = remember(s->cache->keys, t.k, s->positions, here);
        t.v = remember(s->cache->values, t.v, s->positions, here);
        t.q = td_cast_at(t.q, td_dtype_at(t.k), here);
    }
    td_tensor y = td_attention_at(t.q, t.k, t.v, &options, here);
    if (s->cache) y = td_cast_at(y, td_dtype_at(x), here);
    y = td_transpose_at(y, 1, 2, here);
    y = td_reshape_at(y, TD_SHAPE(shape.dim[0], shape.dim[1], a->heads * a->head_width), here);
    y = nn_linear_apply_at(&a->out, y, here);
    td_leave(a->at);
    return y;
}
