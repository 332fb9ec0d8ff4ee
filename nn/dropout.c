/* dropout: y = x * mask / (1 - p) in training, x in evaluation; Srivastava et al., JMLR 15 (2014).
 *
 *     x any shape   ->   y the same
 *
 * The mask is keyed by the layer's path, so it is the same on any number of ranks.
 */
#include <tandem/nn.h>

nn_dropout nn_dropout_make_at(td_module parent, const char *name, double p, td_here here)
{
    nn_dropout d = { .at = td_child(parent, name), .p = p };
    if (p >= 0 && p < 1) return d;
    td_context *td = td_module_context(parent);
    td_fail(td, TD_ERROR_USAGE, "nn_dropout: '%s': p is %g, must be from 0 to less than 1 (%s:%d)", name, p, here.file,
            here.line);
    return d;
}

td_tensor nn_dropout_apply_at(const nn_dropout *d, td_tensor x, td_here here)
{
    td_enter(d->at);
    td_tensor y = td_dropout_at(x, d->p, here);
    td_leave(d->at);
    return y;
}
