/* What the pointwise table's text calls beyond the C library, in f64. C reads it (loops.c), CUDA reads it (fused.cu), and kernels that
 * are compiled at run time carry it as text: whoever includes this says by TD_CODE which of them it is, and by TD_FUNCTION what a
 * function is to be. So there are no directives between the parentheses.
 */
TD_CODE(
TD_FUNCTION double sigmoid(double x) { return 1 / (1 + exp(-x)); }
TD_FUNCTION double softplus(double x) { return (x > 0 ? x : 0) + log1p(exp(-fabs(x))); }
TD_FUNCTION double gelu(double x) { return x * 0.5 * (1 + erf(x * 0.70710678118654752)); }
TD_FUNCTION double gelu_slope(double x)
{
    return 0.5 * (1 + erf(x * 0.70710678118654752)) + x * 0.3989422804014327 * exp(-0.5 * x * x);
}
TD_FUNCTION double gelu_tanh(double x)
{
    return x * sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x));
}
TD_FUNCTION double gelu_tanh_slope(double x)
{
    double z = fmin(x * x, 1e4); /* where s is 0 or 1: 0 times infinity would be NaN */
    double s = sigmoid(1.5957691216057308 * x * (1 + 0.044715 * z));
    return s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * z);
}
TD_FUNCTION double silu(double x) { return x * sigmoid(x); }
TD_FUNCTION double silu_slope(double x)
{
    double s = sigmoid(x);
    return s + x * s * (1 - s);
}
)
