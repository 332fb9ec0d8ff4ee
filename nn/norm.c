/* layer_norm and rms_norm over the last dimension (formulas: core/core.h). Scales start at 1, the bias at 0.
 *
 *     x (..., width)   ->   (..., width)
 */
#include <tandem/nn.h>

static nn_norm make(td_module parent, const char *name, int64_t width, const nn_norm_options *options, bool has_bias, td_here here)
{
    td_context *td = td_module_context(parent);
    td_module at = td_child(parent, name);
    nn_norm n = { .at = at, .eps = options && options->eps > 0 ? options->eps : 1e-5, .has_bias = has_bias, .weight = { td, TD_NONE }, .bias = { td, TD_NONE } };
    if (options && !(options->eps >= 0)) {
        td_fail(td, TD_ERROR_USAGE, "norm '%s': eps is %g, must not be negative (%s:%d)", name, options->eps, here.file, here.line);
        return n;
    }
    if (width < 1) {
        td_fail(td, TD_ERROR_USAGE, "norm '%s': width is %lld, must be at least 1 (%s:%d)", name, (long long)width, here.file, here.line);
        return n;
    }
    n.weight = td_parameter(at, "weight", TD_SHAPE(width), td_init_constant(1));
    if (has_bias) n.bias = td_parameter(at, "bias", TD_SHAPE(width), td_init_constant(0));
    return n;
}

nn_norm nn_layer_norm_make_at(td_module parent, const char *name, int64_t width, const nn_norm_options *options, td_here here)
{
    return make(parent, name, width, options, !(options && options->no_bias), here);
}

nn_norm nn_rms_norm_make_at(td_module parent, const char *name, int64_t width, const nn_norm_options *options, td_here here)
{
    nn_norm n = make(parent, name, width, options, false, here);
    n.rms = true;
    return n;
}

td_tensor nn_norm_apply_at(const nn_norm *n, td_tensor x, td_here here)
{
    td_enter(n->at);
    td_tensor weight = td_use_at(n->weight, here), y;
    if (n->rms)
        y = td_rms_norm_at(x, weight, n->eps, here);
    else
        y = td_layer_norm_at(x, weight, n->has_bias ? td_use_at(n->bias, here) : TD_NO_TENSOR, n->eps, here);
    td_leave(n->at);
    return y;
}
