/* What the files of operations share: rules that many have in common, and a kernel's view of its operands.
 *
 * Shapes in kernels are local: what this rank holds. Labels of placement rules: core/rewrite.h.
 */
#ifndef TANDEM_CORE_OPS_OP_H
#define TANDEM_CORE_OPS_OP_H

#include "core/internal.h"
#include "core/ops/list.h"

#include <string.h>

/* ---- Recording ------------------------------------------------------------------------------------------ */

/* Fails as a call of the operation `name` would (text, module path, caller) and returns a failed tensor: for what is
 * wrong before there is a node. */
td_tensor td_refuse(td_context *td, const char *name, td_here here, const char *format, ...) TD_PRINTF(4, 5);

/* axis as a user gives it (TD_LAST, negative from the end) to 0 .. rank-1; -1: there is none. */
int td_axis_of(td_shape shape, int axis);

/* x in `dtype`: x itself where it already is. */
td_tensor td_as(td_tensor x, td_dtype dtype, td_here here);
/* The scalar `value` in x's dtype, known to the program. */
td_tensor td_constant_like(td_tensor x, double value, td_here here);
/* dx, of a shape that x's broadcast to, summed back to x's shape and in x's dtype: the gradient of a stretched x. */
td_tensor td_sum_to_as(td_tensor dx, td_tensor x, td_here here);
/* (count): 0, 1, 2 ... */
td_tensor td_iota_at(td_context *td, td_dtype dtype, int64_t count, td_here here);
/* sum w x / sum w over rows and weights of one shape; `name` is the loss's, for errors. */
td_tensor td_weighted_mean(td_tensor rows, td_tensor weights, const char *name, td_here here);
/* 0 with probability p, else 1 / (1 - p): the draw that `key` names. */
td_tensor td_dropout_mask_at(td_context *td, td_dtype dtype, td_shape shape, double p, uint64_t key, td_here here);
/* x in the shape of `like`, which has as many elements. */
td_tensor td_reshape_as(td_tensor x, td_tensor like, td_here here);
/* x (B, ..., D) -> (B * ..., D): all dimensions but the last as one. */
td_tensor td_rows_of(td_tensor x, td_here here);

/* Attributes that passes read or make. */
typedef struct td_gradient_norm_attr {
    int64_t largest; /* 1: the largest magnitude, else the 2-norm */
} td_gradient_norm_attr;
typedef struct op_matmul_attr {
    int32_t transpose_a, transpose_b;
    int32_t out_dtype; /* of the product of 16-bit operands, accumulated in f32: TD_F32, or -1 for theirs */
    int32_t pad;
} op_matmul_attr;
typedef struct td_linear_gelu_attr {
    int64_t keeps; /* 1: what gelu was of is a second output */
} td_linear_gelu_attr;
typedef struct td_transpose_attr {
    int32_t a, b;
} td_transpose_attr;
typedef struct td_slice_attr {
    int64_t axis, begin, end;
} td_slice_attr;
typedef struct td_concat_attr {
    int64_t axis;
} td_concat_attr;
typedef struct td_cumsum_attr {
    int64_t reverse;
} td_cumsum_attr;
typedef struct td_top_k_attr {
    int64_t k;
    int64_t smallest;
} td_top_k_attr;
/* The value of a td_op_fill. */
double op_fill_value(const void *attr);

bool td_is_float(td_dtype dtype);
/* The dtype of sums over values of `dtype`: f32 for the 16-bit floats. */
td_dtype td_wide_dtype(td_dtype dtype);

/* Attributes as text, cut where the room ends. */
typedef struct td_print {
    char *to;
    size_t room;
} td_print;
void td_print_add(td_print *line, const char *format, ...) TD_PRINTF(2, 3);

/* ---- Shape rules ---------------------------------------------------------------------------------------- */

/* Shape and dtype of the output are those of input `i`. */
bool td_call_like(const td_call *call, int i);
/* Input 0 is of floats and has a last dimension, or an error. */
bool td_call_float_rows(const td_call *call);
/* Inputs have one dtype, or an error that names two that differ. */
bool td_call_same_dtype(const td_call *call);
/* The shape that all inputs broadcast to, or an error that names theirs. */
bool td_call_broadcast(const td_call *call, td_shape *out);
/* What b against a gives; false: they do not go together. */
bool td_shape_broadcast(const td_shape *a, const td_shape *b, td_shape *out);

/* ---- Placement rules ------------------------------------------------------------------------------------ */

/* Dimension i of the output has label i + 1, and so have the input dimensions aligned with it at the last one. An input
 * dimension of size 1 that stretches has label 0: it has one part, which every rank needs. */
void td_rule_broadcast(const td_program *p, const td_node *n, td_place_rule *rule, td_partial_rule partial);
/* Dimensions of inputs and outputs are aligned at the first one, label i + 1; the last of input 0 is blocked. */
void td_rule_rows(const td_program *p, const td_node *n, td_place_rule *rule);

/* Ends an array of cases. */
#define TD_CASES_END { .in = { { .kind = TD_CASE_NONE } } }

/* ---- Kernels -------------------------------------------------------------------------------------------- */

static inline int64_t td_arg_elements(const td_arg *arg) { return td_shape_elements(arg->shape); }
static inline int64_t td_arg_bytes(const td_arg *arg) { return td_arg_elements(arg) * td_dtype_size(arg->dtype); }
/* The element `index` of an operand. */
static inline void *td_arg_at(const td_arg *arg, int64_t index)
{
    return (char *)arg->data + index * td_dtype_size(arg->dtype);
}
/* The last size; 1 of a scalar. */
static inline int64_t td_arg_last(const td_arg *arg)
{
    return arg->shape.rank ? arg->shape.dim[arg->shape.rank - 1] : 1;
}
/* Product of sizes [from, to). */
int64_t td_shape_product(td_shape shape, int from, int to);

/* Where this rank's part of dimension `dim` begins in the global value, and how many of its rows exist: fewer than its
 * local size on ranks past an uneven end. */
typedef struct td_extent {
    int64_t begin, valid;
} td_extent;
td_extent td_arg_extent(const td_mesh *mesh, const td_arg *arg, int dim);

/* FLOPs for an element of output 0; every operand once. */
td_cost td_cost_of(const td_kernel *k, int64_t flops);

/* Memory of `bytes` zero bytes for td_preparation.prepared; NULL and an error when there is none. td_prepared_free is a
 * `release`. */
void *td_prepared_new(td_context *td, size_t bytes);
void td_prepared_free(void *prepared);

static inline int64_t td_smaller(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
