/* Rows of a sharded operand: which of them exist, for kernels that sum over rows.
 *
 * Local sizes are ceil-chunks, equal on all ranks; past an uneven end a rank holds rows that are not of the value, and
 * whose memory may hold anything. A sum over ranks must leave them out.
 */
#ifndef TANDEM_CORE_OPS_SHARD_H
#define TANDEM_CORE_OPS_SHARD_H

#include "core/ops/op.h"

/* Kernels for GPUs define it for their side before they include this. */
#ifndef TD_ROW_FUNCTION
#define TD_ROW_FUNCTION static inline
#endif

typedef struct td_rows {
    int64_t count;                            /* local */
    bool all;                                 /* every one exists */
    int dims;                                 /* leading dimensions that count rows */
    int64_t size[TD_MAX_DIMS], valid[TD_MAX_DIMS];
} td_rows;

/* Of the leading `dims` dimensions of arg on this rank. */
static inline td_rows td_rows_held(const td_kernel *k, const td_arg *arg, int dims)
{
    td_rows r = { .count = td_shape_product(arg->shape, 0, dims), .all = true, .dims = dims };
    for (int i = 0; i < dims; i++) {
        r.size[i] = arg->shape.dim[i];
        r.valid[i] = td_arg_extent(k->run ? k->run->mesh : NULL, arg, i).valid;
        r.all = r.all && r.valid[i] >= r.size[i];
    }
    return r;
}

TD_ROW_FUNCTION bool td_row_exists(const td_rows *r, int64_t row)
{
    if (r->all)
        return true;
    for (int i = r->dims - 1; i >= 0; i--) {
        if (row % r->size[i] >= r->valid[i])
            return false;
        row /= r->size[i];
    }
    return true;
}

#endif
