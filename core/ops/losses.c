/* Losses that are made of other operations: means over rows whose denominators are those of the global batch.
 *
 *     cross_entropy_with  ignored labels, smoothed labels, weights
 *     bce                 -t log sigmoid(x) - (1 - t) log(1 - sigmoid(x))
 *     l1, huber           |y - t|;   e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2)
 */
#include "core/ops/op.h"

static bool same_shape(td_tensor y, td_tensor target, const char *name, td_here here)
{
    char text[2][TD_SHAPE_TEXT];
    if (td_failed(y) || td_failed(target))
        return false;
    if (td_shape_equal(td_shape_at(y), td_shape_at(target)))
        return true; /* a broadcast would hide a mistake */
    td_refuse(y.td, name, here, "shapes %s and %s differ", td_shape_text(td_shape_at(y), text[0]),
              td_shape_text(td_shape_at(target), text[1]));
    return false;
}

/* The mean of all elements; with weights (rows) each row's mean counts by its weight. */
static td_tensor mean_of(td_tensor errors, td_tensor weights, const char *name, td_here here)
{
    if (!weights.td || td_failed(errors))
        return td_mean_at(errors, TD_ALL, TD_DROP, here);
    td_shape shape = td_shape_at(errors);
    if (shape.rank == 0)
        return td_refuse(errors.td, name, here, "weights need rows, got a scalar");
    td_tensor rows = td_reshape_at(errors, TD_SHAPE(shape.dim[0], -1), here);
    return td_weighted_mean(td_mean_at(rows, TD_LAST, TD_DROP, here), weights, name, here);
}

/* -log softmax(logits)[label], mixed with the mean over classes of -log softmax(logits). */
static td_tensor smoothed_rows(td_tensor logits, td_tensor labels, double smoothing, td_here here)
{
    td_tensor rows = td_record(&td_op_cross_entropy_rows, here, 2, (td_tensor[]){ logits, labels }, NULL);
    if (smoothing == 0 || td_failed(rows))
        return rows;
    td_tensor mean = td_as(td_mean_at(logits, TD_LAST, TD_DROP, here), td_dtype_at(rows), here);
    td_tensor uniform = td_sub_at(td_logsumexp_at(logits, here), mean, here);
    return td_add_at(td_mul_at(rows, td_constant_like(rows, 1 - smoothing, here), here),
                     td_mul_at(uniform, td_constant_like(rows, smoothing, here), here), here);
}

td_tensor td_cross_entropy_with_at(td_tensor logits, td_tensor labels, const td_cross_entropy_options *options,
                                   td_here here)
{
    static const td_cross_entropy_options defaults;
    const td_cross_entropy_options *o = options ? options : &defaults;
    if (td_failed(logits) || td_failed(labels))
        return td_failed(logits) ? logits : labels;
    if (!(o->smoothing >= 0 && o->smoothing <= 1))
        return td_refuse(logits.td, "cross_entropy", here, "smoothing must be within [0, 1], got %g", o->smoothing);
    if (!o->ignores)
        return mean_of(smoothed_rows(logits, labels, o->smoothing, here), o->weights, "cross_entropy", here);
    td_dtype dtype = td_wide_dtype(td_dtype_at(logits));
    td_tensor ignored = td_equal_at(labels, td_constant_like(labels, o->ignored, here), here);
    td_tensor safe = td_where_at(ignored, td_constant_like(labels, 0, here), labels, here);
    td_tensor kept = td_as(ignored, dtype, here);
    kept = td_sub_at(td_constant_like(kept, 1, here), kept, here);
    if (o->weights.td)
        kept = td_mul_at(kept, td_as(o->weights, dtype, here), here);
    return td_weighted_mean(smoothed_rows(logits, safe, o->smoothing, here), kept, "cross_entropy", here);
}

td_tensor td_bce_at(td_tensor logits, td_tensor target, td_tensor weights, td_here here)
{
    if (!same_shape(logits, target, "bce", here))
        return td_no_tensor(logits.td);
    td_tensor one = td_constant_like(target, 1, here);
    td_tensor hit = td_mul_at(target, td_softplus_at(td_neg_at(logits, here), here), here);
    td_tensor miss = td_mul_at(td_sub_at(one, target, here), td_softplus_at(logits, here), here);
    return mean_of(td_add_at(hit, miss, here), weights, "bce", here);
}

td_tensor td_l1_at(td_tensor y, td_tensor target, td_tensor weights, td_here here)
{
    if (!same_shape(y, target, "l1", here))
        return td_no_tensor(y.td);
    return mean_of(td_abs_at(td_sub_at(y, target, here), here), weights, "l1", here);
}

/* With a = |e| and c = min(a, delta): c (a - c / 2). */
td_tensor td_huber_at(td_tensor y, td_tensor target, double delta, td_tensor weights, td_here here)
{
    if (!same_shape(y, target, "huber", here))
        return td_no_tensor(y.td);
    if (!(delta > 0))
        return td_refuse(y.td, "huber", here, "delta must be above 0, got %g", delta);
    td_tensor a = td_abs_at(td_sub_at(y, target, here), here);
    td_tensor c = td_minimum_at(a, td_constant_like(a, delta, here), here);
    td_tensor rest = td_sub_at(a, td_mul_at(c, td_constant_like(c, 0.5, here), here), here);
    return mean_of(td_mul_at(c, rest, here), weights, "huber", here);
}
