/* linear: y = x W^T + b.
 *
 *     x (..., in)  W (out, in)  b (out)   ->   y (..., out)
 *
 * W and b start uniform in +-1/sqrt(in), as PyTorch's nn.Linear, so that imported recipes behave; or W as asked and b 0.
 */
#include <tandem/nn.h>

#include <math.h>

static const nn_linear_options defaults;

/* What the options ask for; else what is wrong with them. */
static const char *weight_init(const nn_linear_options *o, int64_t in, int64_t out, td_init *init)
{
    switch (o->init) {
    case NN_INIT_DEFAULT:
        *init = o->deviation > 0 ? td_init_normal(o->deviation) : td_init_uniform(1 / sqrt((double)in));
        return o->deviation >= 0 ? NULL : "must not be negative";
    case NN_INIT_TRUNCATED_NORMAL:
        *init = td_init_truncated_normal(o->deviation);
        return o->deviation > 0 ? NULL : "a truncated normal needs one above 0";
    case NN_INIT_XAVIER_UNIFORM: *init = nn_init_xavier_uniform(in, out); break;
    case NN_INIT_XAVIER_NORMAL: *init = nn_init_xavier_normal(in, out); break;
    case NN_INIT_KAIMING_UNIFORM: *init = nn_init_kaiming_uniform(in, sqrt(2)); break;
    case NN_INIT_KAIMING_NORMAL: *init = nn_init_kaiming_normal(in, sqrt(2)); break;
    case NN_INIT_ZERO: *init = td_init_constant(0); break;
    }
    return o->deviation == 0 ? NULL : "which the init asked for has not";
}

nn_linear nn_linear_make_at(td_module parent, const char *name, int64_t in, int64_t out,
                            const nn_linear_options *options, td_here here)
{
    td_context *td = td_module_context(parent);
    td_module at = td_child(parent, name);
    const nn_linear_options *o = options ? options : &defaults;
    if (in < 1 || out < 1) {
        td_fail(td, TD_ERROR_USAGE, "nn_linear: '%s': sizes are %lld and %lld, must be at least 1 (%s:%d)", name,
                (long long)in, (long long)out, here.file, here.line);
        in = out = 1;
    }
    td_init init = td_init_constant(0);
    const char *wrong = weight_init(o, in, out, &init);
    if (wrong) td_fail(td, TD_ERROR_USAGE, "nn_linear: '%s': deviation is %g, %s (%s:%d)", name, o->deviation, wrong, here.file, here.line);
    bool is_default = o->init == NN_INIT_DEFAULT && !(o->deviation > 0);
    nn_linear l = { .at = at, .has_bias = !o->no_bias };
    l.weight = td_parameter(at, "weight", TD_SHAPE(out, in), init);
    if (l.has_bias) l.bias = td_parameter(at, "bias", TD_SHAPE(out), is_default ? init : td_init_constant(0));
    return l;
}

td_tensor nn_linear_apply_at(const nn_linear *l, td_tensor x, td_here here)
{
    td_enter(l->at);
    td_tensor weight = td_use_at(l->weight, here);
    if (td_state_dtype(l->weight) == TD_BF16) weight = td_cast_at(weight, td_dtype_at(x), here); /* kept narrow; a bf16 product reads it as it is */
    td_tensor y = l->has_bias ? td_linear_at(x, weight, td_use_at(l->bias, here), here)
                              : td_matmul_at(x, weight, 0, 1, here);
    td_leave(l->at);
    return y;
}
