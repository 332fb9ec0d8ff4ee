/* linear: y = x W^T + b.
 *
 *     x (..., in)  W (out, in)  b (out)   ->   y (..., out)
 *
 * W and b start uniform in +-1/sqrt(in), as PyTorch's nn.Linear, so that imported recipes behave; or W normal and b 0.
 */
#include <tandem/nn.h>

#include <math.h>

nn_linear nn_linear_make_at(td_module parent, const char *name, int64_t in, int64_t out,
                            const nn_linear_options *options, td_here here)
{
    td_context *td = td_module_context(parent);
    td_module at = td_child(parent, name);
    bool has_bias = !(options && options->no_bias);
    if (in < 1 || out < 1) {
        td_fail(td, TD_ERROR_USAGE, "nn_linear: '%s': sizes are %lld and %lld, must be at least 1 (%s:%d)", name,
                (long long)in, (long long)out, here.file, here.line);
        in = out = 1;
    }
    td_init uniform = td_init_uniform(1 / sqrt((double)in));
    double deviation = options ? options->deviation : 0;
    nn_linear l = { .at = at, .has_bias = has_bias };
    l.weight = td_parameter(at, "weight", TD_SHAPE(out, in), deviation > 0 ? td_init_normal(deviation) : uniform);
    if (has_bias) l.bias = td_parameter(at, "bias", TD_SHAPE(out), deviation > 0 ? td_init_constant(0) : uniform);
    return l;
}

td_tensor nn_linear_apply_at(const nn_linear *l, td_tensor x, td_here here)
{
    td_enter(l->at);
    td_tensor weight = td_use_at(l->weight, here);
    td_tensor y = l->has_bias ? td_linear_at(x, weight, td_use_at(l->bias, here), here)
                              : td_matmul_at(x, weight, 0, 1, here);
    td_leave(l->at);
    return y;
}
