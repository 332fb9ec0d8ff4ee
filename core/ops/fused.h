/* Chains of pointwise operations that run as one kernel, tile by tile, so that values between them stay in cache.
 *
 * A fused node (td_op_fused) has an attribute of variable size:
 *
 *     td_fused_header | td_fused_instruction x instructions | uint16_t register x outputs | zeros to a multiple of 8 |
 *     td_fused_draw x draws | td_fused_rows, where it has reductions
 *
 * Registers 0 .. inputs-1 hold the node's inputs and are never written; the others are written by instructions. All
 * outputs have the same shape, which inputs broadcast against. An instruction computes in f32, or in f64 where any
 * value of the chain is f64, i32 or i64, and its result is rounded to its dtype: so a chain gives what its operations
 * give one by one.
 *
 * An instruction TD_POINTWISE_dropout_mask makes dropout's mask of the outputs' global shape where it is read: so a mask is no value in
 * memory. Its from[0] numbers the draw.
 *
 * The kernel may be given an output in the memory of any input of the same size, each output its own.
 *
 * A node td_op_fused_rows is a chain whose last outputs, one or more, are sums or maxima of values of the chain over its trailing
 * dimensions, which are the same for all of them: what is summed is not written unless it is an output, too. The outputs before those
 * have the full shape, as a chain's have, and may lie in an input's memory. A sum has the bits, on the CPU, that td_op_sum gives of the
 * value: f32 in blocks, f64 across them; in a chain computed in f64 it is f64 throughout. On a GPU it is taken in f32 (f64). Either
 * order depends on shapes alone. A maximum is exact; a NaN is the largest.
 *
 * How the fuse pass makes one:
 *
 *     td_fused_builder b = { 0 };
 *     int x = td_fused_input(&b), w = td_fused_input(&b);         input 0, input 1 of the node
 *     int y = td_fused_apply(&b, &td_op_mul, TD_F32, (int[]){ x, w });
 *     int z = td_fused_apply(&b, &td_op_cast, TD_BF16, &y);       the dtype is the result's
 *     td_fused_output(&b, z);                                     output 0
 *     char attr[TD_FUSED_BYTES];
 *     size_t bytes = td_fused_finish(&b, attr);                   0: needs more registers than there are
 *
 * then td_emit with op = &td_op_fused, inputs in the order of td_fused_input and one td_value an output. The functions
 * give -1 (false) when the chain is full; it is then as it was before, and can still be finished.
 *
 * With b.rows set and
 *
 *     td_fused_reduce(&b, TD_FUSED_SUM, y);
 *
 * it is td_op_fused_rows; reductions are the outputs after all others.
 */
#ifndef TANDEM_CORE_OPS_FUSED_H
#define TANDEM_CORE_OPS_FUSED_H

#include "core/ops/op.h"
#include "core/ops/pointwise_table.h"

enum {
    TD_FUSED_INPUTS = 16,
    TD_FUSED_OUTPUTS = TD_CALL_OUTPUTS,
    TD_FUSED_INSTRUCTIONS = 64,
    TD_FUSED_DRAWS = 4,
    TD_FUSED_REGISTERS = 32, /* inputs and values alive at once */
};

typedef struct td_fused_header {
    int32_t inputs, outputs, instructions, registers, draws;
    int32_t reduced; /* of the outputs, the last ones: reductions */
} td_fused_header;

typedef struct td_fused_instruction {
    uint16_t function; /* TD_POINTWISE_... */
    uint16_t to;       /* register */
    uint16_t from[3];
    uint16_t dtype;    /* of the result */
} td_fused_instruction;

/* A draw of random.c: of the micro-batch `micro`, from the step's first. */
typedef struct td_fused_draw {
    double p;
    uint64_t key, micro;
} td_fused_draw;

typedef enum td_fused_reduction { TD_FUSED_SUM, TD_FUSED_MAX } td_fused_reduction;

/* What is reduced. No output need have the chain's shape, so it is here. */
typedef struct td_fused_rows {
    td_shape shape; /* global */
    td_placement place;
    int32_t dims;   /* trailing dimensions that are reduced */
    uint8_t reduction[TD_FUSED_OUTPUTS]; /* td_fused_reduction of each reduced output */
} td_fused_rows;

enum {
    TD_FUSED_BYTES = sizeof(td_fused_header) + TD_FUSED_INSTRUCTIONS * sizeof(td_fused_instruction) + 2 * TD_FUSED_OUTPUTS + 8 +
                     TD_FUSED_DRAWS * sizeof(td_fused_draw) + sizeof(td_fused_rows),
};

/* Where the parts of an attribute are. */
typedef struct td_fused_code {
    td_fused_header header;
    const td_fused_instruction *instructions;
    const uint16_t *outputs;
    const td_fused_draw *draws;
    const td_fused_rows *rows; /* NULL: nothing is reduced */
} td_fused_code;
td_fused_code td_fused_code_of(const void *attr);

/* How many outputs have the chain's shape: those before the reduced ones. */
static inline int td_fused_full_outputs(const td_fused_header *h) { return h->outputs - h->reduced; }
/* The elements that the chain runs over, as an operand without memory. rows: of its attribute; NULL: they are output 0's. */
td_arg td_fused_whole(const td_kernel *k, const td_fused_rows *rows);
/* How many of them make one element of a reduced output. */
int64_t td_fused_row_elements(const td_arg *whole, const td_fused_rows *rows);

/* A chain being made. Values are numbered: inputs from 0, results of instructions from TD_FUSED_INPUTS. */
typedef struct td_fused_builder {
    int inputs, instructions, outputs, draws, reduced; /* outputs: with those that are reduced */
    td_fused_instruction code[TD_FUSED_INSTRUCTIONS]; /* `to` and `from` are values */
    uint16_t output[TD_FUSED_OUTPUTS];
    td_fused_rows rows;                               /* its shape, place and dims are the caller's to set, where anything is reduced */
    td_fused_draw draw[TD_FUSED_DRAWS];
} td_fused_builder;

int td_fused_input(td_fused_builder *b);
/* op: TD_OP_POINTWISE with its number of values in `from`; broadcast counts as one with its input as operand. */
int td_fused_apply(td_fused_builder *b, const td_op *op, td_dtype dtype, const int *from);
/* The mask of td_op_dropout_mask. */
int td_fused_mask(td_fused_builder *b, td_dtype dtype, td_fused_draw draw);
/* Before all of td_fused_reduce. */
bool td_fused_output(td_fused_builder *b, int value);
bool td_fused_reduce(td_fused_builder *b, td_fused_reduction reduction, int value);
/* Gives values registers; writes the attribute to `attr` (8-byte aligned, TD_FUSED_BYTES of room), returns its size. */
size_t td_fused_finish(const td_fused_builder *b, void *attr);

/* The functions of a chain in their order: "mul+add+gelu", "square+sum". */
void td_fused_parts(const void *attr, char *to, size_t room);

/* The kernels, also of a single pointwise node: a chain of one instruction. */
bool td_pointwise_prepare(td_context *td, const td_kernel *k, td_preparation *out);
bool td_fused_prepare(td_context *td, const td_kernel *k, td_preparation *out);
void td_fused_cpu(const td_kernel *k);
void td_fused_rows_cpu(const td_kernel *k);
TD_CUDA_KERNEL(td_fused_cuda);
TD_CUDA_PREPARE(td_fused_cuda_prepare);

#endif
