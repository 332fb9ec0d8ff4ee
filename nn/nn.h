/* Layers: parameters with a place in the module tree, and how they are applied.
 *
 *     nn_linear hidden = nn_linear_make(root, "hidden", 784, 1024);      // once
 *     td_tensor h = td_relu(nn_linear_apply(&hidden, x));                // every step
 *
 * A layer is a plain struct of handles: copy it freely, there is nothing to free. Errors are kept by the context and
 * name the line of the caller. Layers that differ between training and evaluation follow td_set_mode.
 */
#ifndef TANDEM_NN_H
#define TANDEM_NN_H

#include <tandem/core.h>

#ifdef __cplusplus
extern "C" {
#endif

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
} nn_linear_options;

/* Parameters `weight` and `bias` of parent.name, uniform in +-1/sqrt(in). Errors: a size below 1, a name used twice. */
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
} nn_embedding_options;

/* An id outside [0, count) gives NaN. Errors: a size below 1, a name used twice. */
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

#define nn_layer_norm_make(parent, name, width) nn_layer_norm_make_at((parent), (name), (width), NULL, TD_HERE)
#define nn_layer_norm_make_with(parent, name, width, ...) nn_layer_norm_make_at((parent), (name), (width), (__VA_ARGS__), TD_HERE)
TD_API nn_norm nn_layer_norm_make_at(td_module parent, const char *name, int64_t width, const nn_norm_options *options, td_here here);
#define nn_rms_norm_make(parent, name, width) nn_rms_norm_make_at((parent), (name), (width), NULL, TD_HERE)
#define nn_rms_norm_make_with(parent, name, width, ...) nn_rms_norm_make_at((parent), (name), (width), (__VA_ARGS__), TD_HERE)
TD_API nn_norm nn_rms_norm_make_at(td_module parent, const char *name, int64_t width, const nn_norm_options *options, td_here here);
#define nn_norm_apply(layer, x) nn_norm_apply_at((layer), (x), TD_HERE)
TD_API td_tensor nn_norm_apply_at(const nn_norm *layer, td_tensor x, td_here here);

#ifdef __cplusplus
}
#endif

#endif
