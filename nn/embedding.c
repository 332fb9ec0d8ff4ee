/* embedding: rows of a table by number.
 *
 *     ids (...) i32, table (count, width)   ->   (..., width)
 *
 * The table starts as N(0, 1), as PyTorch's nn.Embedding, or as the options say.
 */
#include <tandem/nn.h>

nn_embedding nn_embedding_make_at(td_module parent, const char *name, int64_t count, int64_t width, const nn_embedding_options *options,
                                  td_here here)
{
    td_context *td = td_module_context(parent);
    td_module at = td_child(parent, name);
    if (count < 1 || width < 1) {
        td_fail(td, TD_ERROR_USAGE, "embedding '%s': %lld rows of %lld, must be at least 1 of 1 (%s:%d)", name, (long long)count, (long long)width,
                here.file, here.line);
        return (nn_embedding){ .at = at, .weight = { td, TD_NONE } };
    }
    if (options && !(options->deviation >= 0)) {
        td_fail(td, TD_ERROR_USAGE, "embedding '%s': deviation is %g, must not be negative (%s:%d)", name, options->deviation, here.file,
                here.line);
        return (nn_embedding){ .at = at, .weight = { td, TD_NONE } };
    }
    double deviation = options && options->deviation > 0 ? options->deviation : 1;
    td_state weight = td_parameter(at, "weight", TD_SHAPE(count, width), td_init_normal(deviation));
    if (options && options->sparse) td_sparse_rows(weight);
    return (nn_embedding){ .at = at, .weight = weight };
}

td_tensor nn_embedding_apply_at(const nn_embedding *e, td_tensor ids, td_here here)
{
    td_enter(e->at);
    td_tensor y = td_embedding_at(td_use_at(e->weight, here), ids, here);
    td_leave(e->at);
    return y;
}
