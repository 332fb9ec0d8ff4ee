/* Layers: parameters with a place in the module tree, and how they are applied.
 *
 *     nn_linear hidden = nn_linear_make(root, "hidden", 784, 1024);      // once
 *     td_tensor h = td_relu(nn_linear_apply(&hidden, x));                // every step
 *
 * A layer is a plain struct of handles: copy it freely, there is nothing to free. Errors are kept by the context and
 * name the line of the caller. Layers that differ between training and evaluation follow td_set_mode. What a layer's products
 * compute in is its module's to say: td_set_dtype(head.at, TD_F32) keeps a head exact under bf16.
 */
#ifndef TANDEM_NN_H
#define TANDEM_NN_H

#include <tandem/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- freezing ----------------------------------------------------------------------------------------------- */

/* Freezes (td_freeze) the parameters under a module whose name below it fits the pattern (td_name_matches): of the root
 * "h.*.ln_*.weight", of h.3 "ln_*". Before an optimizer is made and before the first step. How many fit, those frozen already among
 * them; 0 after an error: none fits, which names some that are there; those of td_freeze. */
#define nn_freeze(under, pattern) nn_freeze_at((under), (pattern), TD_HERE)
TD_API int64_t nn_freeze_at(td_module under, const char *pattern, td_here here);

/* ---- initial values -------------------------------------------------------------------------------------- */

/* For td_parameter. fan_in: elements that a value is summed from, of a matrix (out, in) its columns; fan_out: its rows; of a
 * convolution each times the elements of the kernel. All have mean 0 and, before a nonlinearity, keep the variance of values or gradients:
 *
 *     xavier    deviation sqrt(2 / (fan_in + fan_out)), uniform in +-sqrt(6 / (fan_in + fan_out))
 *               (Glorot and Bengio, AISTATS 2010, equations 12 and 16)
 *     kaiming   deviation gain / sqrt(fan), uniform in +-gain sqrt(3 / fan)     fan: fan_in for values, fan_out for gradients
 *               (He et al., arXiv:1502.01852, equations 10 and 14; gain sqrt(2) for relu, 1 for none, 5 / 3 for tanh)
 *
 * A fan below 1 is an error of the parameter that is given it. */
TD_API td_init nn_init_xavier_uniform(int64_t fan_in, int64_t fan_out);
TD_API td_init nn_init_xavier_normal(int64_t fan_in, int64_t fan_out);
TD_API td_init nn_init_kaiming_uniform(int64_t fan, double gain);
TD_API td_init nn_init_kaiming_normal(int64_t fan, double gain);

/* How a layer's weight starts, by the fans it has. */
typedef enum nn_init_kind {
    NN_INIT_DEFAULT,             /* as the layer says */
    NN_INIT_XAVIER_UNIFORM,
    NN_INIT_XAVIER_NORMAL,
    NN_INIT_KAIMING_UNIFORM,     /* for values, gain sqrt(2) */
    NN_INIT_KAIMING_NORMAL,
    NN_INIT_TRUNCATED_NORMAL,    /* td_init_truncated_normal(deviation) */
    NN_INIT_ZERO,
} nn_init_kind;

/* ---- linear: x (..., in) -> x weight^T + bias (..., out) --------------------------------------------------- */

typedef struct nn_linear {
    td_module at;
    td_state weight;             /* (out, in) */
    td_state bias;               /* (out) */
    bool has_bias;
} nn_linear;

typedef struct nn_linear_options {
    bool no_bias;                /* x weight^T alone */
    double deviation;            /* weight N(0, deviation^2) and bias 0 at first; 0: uniform in +-1/sqrt(in) */
    nn_init_kind init;           /* how the weight starts instead, with bias 0; only the truncated normal has a deviation */
} nn_linear_options;

/* Parameters `weight` and `bias` of parent.name, uniform in +-1/sqrt(in). Errors: a size below 1, a name used twice, a negative
 * deviation, one beside an init that has none or none beside one that has. */
#define nn_linear_make(parent, name, in, out) nn_linear_make_at((parent), (name), (in), (out), NULL, TD_HERE)
/* nn_linear_make_with(root, "head", 64, 10, &(nn_linear_options){ .no_bias = true }) */
#define nn_linear_make_with(parent, name, in, out, ...) \
    nn_linear_make_at((parent), (name), (in), (out), (__VA_ARGS__), TD_HERE)
TD_API nn_linear nn_linear_make_at(td_module parent, const char *name, int64_t in, int64_t out,
                                   const nn_linear_options *options, td_here here);
#define nn_linear_apply(layer, x) nn_linear_apply_at((layer), (x), TD_HERE)
TD_API td_tensor nn_linear_apply_at(const nn_linear *layer, td_tensor x, td_here here);

/* ---- dropout: each element 0 with probability p, else x / (1 - p); x itself in TD_EVAL --------------------- */

typedef struct nn_dropout {
    td_module at;                /* keys its draws */
    double p;
} nn_dropout;

/* p in [0, 1). */
#define nn_dropout_make(parent, name, p) nn_dropout_make_at((parent), (name), (p), TD_HERE)
TD_API nn_dropout nn_dropout_make_at(td_module parent, const char *name, double p, td_here here);
#define nn_dropout_apply(layer, x) nn_dropout_apply_at((layer), (x), TD_HERE)
TD_API td_tensor nn_dropout_apply_at(const nn_dropout *layer, td_tensor x, td_here here);

/* ---- embedding: ids (...) i32 -> rows of weight (..., width) ------------------------------------------------ */

typedef struct nn_embedding {
    td_module at;
    td_state weight;             /* (count, width) */
} nn_embedding;

typedef struct nn_embedding_options {
    double deviation;            /* of the initial N(0, deviation^2); 0: 1 */
    bool sparse;                 /* row-sparse gradients, for large tables: td_sparse_rows says what that asks for */
} nn_embedding_options;

/* An id outside [0, count) gives NaN. Errors: a size below 1, a name used twice, a negative deviation. */
#define nn_embedding_make(parent, name, count, width) nn_embedding_make_at((parent), (name), (count), (width), NULL, TD_HERE)
#define nn_embedding_make_with(parent, name, count, width, ...) \
    nn_embedding_make_at((parent), (name), (count), (width), (__VA_ARGS__), TD_HERE)
TD_API nn_embedding nn_embedding_make_at(td_module parent, const char *name, int64_t count, int64_t width,
                                         const nn_embedding_options *options, td_here here);
#define nn_embedding_apply(layer, ids) nn_embedding_apply_at((layer), (ids), TD_HERE)
TD_API td_tensor nn_embedding_apply_at(const nn_embedding *layer, td_tensor ids, td_here here);

/* ---- norms over the last dimension: x (..., width) -> (..., width) ------------------------------------------- */

typedef struct nn_norm {
    td_module at;
    td_state weight, bias;       /* (width) */
    double eps;
    bool has_bias, rms;
} nn_norm;

typedef struct nn_norm_options {
    double eps;                  /* 0: 1e-5 */
    bool no_bias;                /* layer_norm without bias; rms_norm has none */
} nn_norm_options;

/* Parameters `weight`, ones, and `bias`, zeros. Errors: a size below 1, a name used twice, a negative eps. */
#define nn_layer_norm_make(parent, name, width) nn_layer_norm_make_at((parent), (name), (width), NULL, TD_HERE)
#define nn_layer_norm_make_with(parent, name, width, ...) nn_layer_norm_make_at((parent), (name), (width), (__VA_ARGS__), TD_HERE)
TD_API nn_norm nn_layer_norm_make_at(td_module parent, const char *name, int64_t width, const nn_norm_options *options, td_here here);
#define nn_rms_norm_make(parent, name, width) nn_rms_norm_make_at((parent), (name), (width), NULL, TD_HERE)
#define nn_rms_norm_make_with(parent, name, width, ...) nn_rms_norm_make_at((parent), (name), (width), (__VA_ARGS__), TD_HERE)
TD_API nn_norm nn_rms_norm_make_at(td_module parent, const char *name, int64_t width, const nn_norm_options *options, td_here here);
#define nn_norm_apply(layer, x) nn_norm_apply_at((layer), (x), TD_HERE)
TD_API td_tensor nn_norm_apply_at(const nn_norm *layer, td_tensor x, td_here here);

/* ---- mlp: x (..., width) -> out(f(in x)) (..., width), or gated: out(f(gate x) * in x) ----------------------- */

typedef enum nn_activation { NN_GELU, NN_GELU_TANH, NN_RELU, NN_SILU } nn_activation;

typedef struct nn_mlp {
    td_module at;
    nn_linear in, gate, out;     /* gate where gated */
    nn_activation activation;
    bool gated;
} nn_mlp;

typedef struct nn_mlp_options {
    nn_activation activation;    /* f */
    bool gated;                  /* with NN_SILU: SwiGLU (Shazeer, arXiv:2002.05202) */
    nn_linear_options in, out;   /* of the products; gate is as in */
    const char *const *names;    /* of in, out, gate; NULL: "up_proj", "down_proj", "gate_proj" */
} nn_mlp_options;

/* Errors: a size below 1, a name used twice. */
#define nn_mlp_make(parent, name, width, hidden) nn_mlp_make_at((parent), (name), (width), (hidden), NULL, TD_HERE)
#define nn_mlp_make_with(parent, name, width, hidden, ...) \
    nn_mlp_make_at((parent), (name), (width), (hidden), (__VA_ARGS__), TD_HERE)
TD_API nn_mlp nn_mlp_make_at(td_module parent, const char *name, int64_t width, int64_t hidden, const nn_mlp_options *options,
                             td_here here);
#define nn_mlp_apply(layer, x) nn_mlp_apply_at((layer), (x), TD_HERE)
TD_API td_tensor nn_mlp_apply_at(const nn_mlp *layer, td_tensor x, td_here here);

/* ---- attention: x (B, T, width) -> out(softmax(q k^T / sqrt(d)) v) (B, T, width) of H heads (Vaswani et al. 2017) - */

/* Keys and values of earlier positions, which decoding adds to. */
typedef struct nn_cache {
    td_state keys, values;       /* (B, Hkv, length, d) */
} nn_cache;

typedef struct nn_attention {
    td_module at;                /* keys the dropout of the probabilities */
    nn_linear qkv, q, k, v, out; /* qkv where packed, else q, k and v */
    int64_t heads, kv_heads, head_width;
    bool packed, rotates;
    td_attention_options options;
    td_rotary_options rotary;
} nn_attention;

typedef struct nn_attention_options {
    int64_t kv_heads;            /* heads of keys and values, each shared by consecutive heads; 0: as many as heads */
    int64_t head_width;          /* d; 0: width / heads */
    bool packed;                 /* q, k and v by one product, in this order along its output */
    bool full;                   /* a position sees all; else none after itself */
    int64_t window;              /* it sees only positions at a distance below this; 0: any */
    double dropout;              /* of the probabilities */
    const td_rotary_options *rotary; /* q and k are turned by their positions; copied. NULL: not */
    nn_linear_options in, out;   /* of the products */
    const char *const *names;    /* of q, k, v, out, or of qkv, out; NULL: "q_proj" ... "out_proj", or "qkv_proj", "out_proj" */
} nn_attention_options;

/* Errors: a size below 1, heads that do not divide the width (without head_width) or that kv_heads does not divide, a name used twice. */
#define nn_attention_make(parent, name, width, heads) nn_attention_make_at((parent), (name), (width), (heads), NULL, TD_HERE)
#define nn_attention_make_with(parent, name, width, heads, ...) \
    nn_attention_make_at((parent), (name), (width), (heads), (__VA_ARGS__), TD_HERE)
TD_API nn_attention nn_attention_make_at(td_module parent, const char *name, int64_t width, int64_t heads,
                                         const nn_attention_options *options, td_here here);

/* Where the rows of x stand among all positions. What is left out: at the beginning, no padding, nothing before x. */
typedef struct nn_sequence {
    td_tensor positions;         /* (B) i32: of row 0 of each sequence; row i is at positions[b] + i */
    td_tensor lengths;           /* (B) i32: keys from there on are padding */
    const nn_cache *cache;       /* x's keys and values are written to it at its positions, and all before them are seen; needs positions */
} nn_sequence;

#define nn_attention_apply(layer, x) nn_attention_apply_at((layer), (x), NULL, TD_HERE)
/* nn_attention_apply_to(&layer, x, &(nn_sequence){ .positions = at, .cache = &cache }); the sequence may be NULL. Errors: x is not
 * (B, T, width), a cache without positions. */
#define nn_attention_apply_to(layer, x, ...) nn_attention_apply_at((layer), (x), (__VA_ARGS__), TD_HERE)
TD_API td_tensor nn_attention_apply_at(const nn_attention *layer, td_tensor x, const nn_sequence *sequence, td_here here);
/* States NAME.keys and NAME.values of the layer, of `batch` sequences of at most `length` positions, in the dtype of its products (f32
 * under f16), so that td_set_dtype comes before. What is in them at first is never seen. Positions from `length` on are not kept: the
 * caller ends before. Errors: a size below 0, a name used twice. */
TD_API nn_cache nn_cache_make(const nn_attention *layer, const char *name, int64_t batch, int64_t length);

/* ---- block: attention, then mlp, each added to the residual x (B, T, width) ---------------------------------- */

typedef struct nn_block {
    td_module at;
    nn_norm norm_1, norm_2;
    nn_attention attention;
    nn_mlp mlp;
    nn_dropout drop_1, drop_2;   /* of what is added */
    bool post_norm;
} nn_block;

typedef struct nn_block_options {
    bool post_norm;              /* x = norm(x + f(x)); else x = x + f(norm(x)) */
    bool rms;                    /* RMS norm; else layer norm */
    nn_norm_options norm;
    double dropout;              /* of what is added to the residual */
    nn_attention_options attention;
    nn_mlp_options mlp;
    const char *const *names;    /* of norm_1, attention, norm_2, mlp; NULL: "norm_1", "attention", "norm_2", "mlp" */
} nn_block_options;

/* Errors: as its parts. */
#define nn_block_make(parent, name, width, heads, hidden) \
    nn_block_make_at((parent), (name), (width), (heads), (hidden), NULL, TD_HERE)
#define nn_block_make_with(parent, name, width, heads, hidden, ...) \
    nn_block_make_at((parent), (name), (width), (heads), (hidden), (__VA_ARGS__), TD_HERE)
TD_API nn_block nn_block_make_at(td_module parent, const char *name, int64_t width, int64_t heads, int64_t hidden,
                                 const nn_block_options *options, td_here here);
#define nn_block_apply(layer, x) nn_block_apply_at((layer), (x), NULL, TD_HERE)
#define nn_block_apply_to(layer, x, ...) nn_block_apply_at((layer), (x), (__VA_ARGS__), TD_HERE)
TD_API td_tensor nn_block_apply_at(const nn_block *layer, td_tensor x, const nn_sequence *sequence, td_here here);

#ifdef __cplusplus
}
#endif

#endif
