/* Shapes put together and taken apart by the operations there are: pad, stack, split, tril; and the variance. */
#include "core/ops/op.h"

td_tensor td_pad_at(td_tensor x, int axis, int64_t before, int64_t after, double value, td_here here)
{
    if (td_failed(x))
        return x;
    td_shape shape = td_shape_at(x);
    int at = td_axis_of(shape, axis);
    char text[TD_SHAPE_TEXT];
    if (at < 0)
        return td_refuse(x.td, "pad", here, "there is no dimension %d in shape %s", axis, td_shape_text(shape, text));
    if (before < 0 || after < 0)
        return td_refuse(x.td, "pad", here, "needs at least 0 elements before and after, got %lld and %lld",
                         (long long)before, (long long)after);
    td_tensor parts[3];
    int count = 0;
    shape.dim[at] = before;
    if (before > 0)
        parts[count++] = td_fill_at(x.td, td_dtype_at(x), shape, value, here);
    parts[count++] = x;
    shape.dim[at] = after;
    if (after > 0)
        parts[count++] = td_fill_at(x.td, td_dtype_at(x), shape, value, here);
    return count > 1 ? td_concat_at(parts, count, at, here) : x;
}

td_tensor td_stack_at(const td_tensor *parts, int count, int axis, td_here here)
{
    if (count < 1)
        return td_no_tensor(NULL);
    td_context *td = parts[0].td;
    td_shape shape = td_shape_at(parts[0]);
    if (td_failed(parts[0]))
        return parts[0];
    if (shape.rank == TD_MAX_DIMS)
        return td_refuse(td, "stack", here, "has no room for one more dimension than %d", TD_MAX_DIMS);
    td_shape wide = shape;
    wide.rank++;
    int at = td_axis_of(wide, axis);
    if (at < 0)
        return td_refuse(td, "stack", here, "there is no dimension %d among %lld", axis, (long long)wide.rank);
    for (int i = (int)shape.rank; i > at; i--)
        wide.dim[i] = shape.dim[i - 1];
    wide.dim[at] = 1;
    size_t bytes = (size_t)count * sizeof(td_tensor);
    td_tensor *rows = td_alloc(td, bytes, "program");
    if (!rows)
        return td_no_tensor(td);
    for (int i = 0; i < count; i++)
        rows[i] = td_failed(parts[i]) ? parts[i] : td_reshape_at(parts[i], wide, here);
    td_tensor y = td_concat_at(rows, count, at, here);
    td_free(td, rows, bytes, "program");
    return y;
}

bool td_split_at(td_tensor x, int axis, int count, td_tensor *out, td_here here)
{
    for (int i = 0; i < count; i++)
        out[i] = td_no_tensor(x.td);
    if (td_failed(x))
        return false;
    td_shape shape = td_shape_at(x);
    int at = td_axis_of(shape, axis);
    char text[TD_SHAPE_TEXT];
    if (at < 0 || count < 1 || shape.dim[at] % count != 0) {
        td_refuse(x.td, "split", here, "dimension %d of shape %s cannot be cut into %d equal parts", axis,
                  td_shape_text(shape, text), count);
        return false;
    }
    int64_t size = shape.dim[at] / count;
    for (int i = 0; i < count; i++)
        out[i] = td_slice_at(x, at, i * size, (i + 1) * size, here);
    return !td_failed(out[count - 1]);
}

/* Where column - row <= diagonal. */
td_tensor td_tril_at(td_tensor x, int64_t diagonal, td_here here)
{
    if (td_failed(x))
        return x;
    td_shape shape = td_shape_at(x);
    td_dtype dtype = td_dtype_at(x);
    if (shape.rank < 2)
        return td_refuse(x.td, "tril", here, "needs at least two dimensions");
    int64_t rows = shape.dim[shape.rank - 2], columns = shape.dim[shape.rank - 1];
    td_dtype index = rows > INT32_MAX || columns > INT32_MAX ? TD_I64 : TD_I32;
    td_tensor row = td_reshape_at(td_iota_at(x.td, index, rows, here), TD_SHAPE(rows, 1), here);
    td_tensor distance = td_sub_at(td_iota_at(x.td, index, columns, here), row, here);
    td_tensor kept = td_less_equal_at(distance, td_constant_like(row, (double)diagonal, here), here);
    return td_where_at(td_as(kept, dtype, here), x, td_constant_like(x, 0, here), here);
}

td_tensor td_variance_at(td_tensor x, int axis, int keep, td_here here)
{
    if (td_failed(x))
        return x;
    td_dtype wide = td_wide_dtype(td_dtype_at(x));
    x = td_as(x, wide, here);
    td_tensor mean = td_mean_at(x, axis, TD_KEEP, here);
    return td_mean_at(td_square_at(td_sub_at(x, mean, here), here), axis, keep, here);
}
