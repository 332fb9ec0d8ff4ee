/* Chains of pointwise operations on a GPU: what a kernel needs to know of one, and the two ways to run it.
 *
 * A chain runs as a kernel of its own, source that is generated here and compiled by NVRTC when the plan is made; or, where fusion is left
 * out, in eager mode, and for operands that do not lie on 16-byte boundaries, by one kernel that reads the instructions.
 *
 * Floor: the bytes of the operands, each once. A stretched operand stays in L2. A draw costs ten rounds of Philox for eight elements.
 *
 * Rows that are reduced belong to parts of a warp, to warps or to blocks, by their length; few long ones are cut into chunks, whose results
 * go to the workspace in the output's dtype and are reduced by the operation's own kernel (reduce.cu).
 */
#ifndef TANDEM_CORE_OPS_DEVICE_FUSED_H
#define TANDEM_CORE_OPS_DEVICE_FUSED_H

#include "core/device_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "core/ops/fused.h"

/* The elements of the outputs as dimensions, innermost first, along each of which every input either steps or is stretched: dimensions
 * alike in that are one. There is at least one. */
typedef struct td_chain {
    td_fused_header header;
    td_fused_instruction code[TD_FUSED_INSTRUCTIONS];
    uint16_t output[TD_FUSED_OUTPUTS];        /* registers */
    uint8_t in_dtype[TD_FUSED_INPUTS], out_dtype[TD_FUSED_OUTPUTS];
    uint8_t steps[TD_FUSED_INPUTS];           /* bit d: steps along dimension d; none: one element */
    bool dense[TD_FUSED_INPUTS];              /* steps along all: the outputs' shape */
    bool wide;                                /* computes in f64 */
    int32_t rank;
    int64_t elements;
    int64_t size[TD_MAX_DIMS];
    int64_t stride[TD_FUSED_INPUTS][TD_MAX_DIMS]; /* in elements; 0 where it is stretched */
    td_fused_draw draw[TD_FUSED_DRAWS];
    uint64_t draw_first, draw_elements;       /* of the global value: index of this rank's first element, and how many there are */
    int64_t row;                              /* elements of a row that is reduced; 0: none is */
    uint8_t reduction[TD_FUSED_OUTPUTS];      /* td_fused_reduction of each reduced output */
    int64_t draw_stride[TD_MAX_DIMS];         /* in elements of it; along dimension 0 it is 1 */
    bool draw_dense;                          /* this rank's elements follow one another in it */
} td_chain;

/* The chain of a td_op_fused, a td_op_fused_rows, of a pointwise operation, a cast or a broadcast. */
td_chain td_chain_of(const td_kernel *k);

/* The most elements, 1 to 8, that a thread of the generated kernel takes at once. */
int td_chain_width(const td_chain *c);

/* How rows are shared out, for `width` elements at once: a part is a chunk of a row and `lanes` threads have it, a power of two up to 32 or
 * TD_CHAIN_THREADS. By shapes alone. Without reductions there are no rows, and each thread is by itself. */
typedef struct td_chain_rows {
    int lanes;
    int64_t chunk, chunks;                    /* elements of a chunk, and how many make a row, the last of which may be shorter */
    int64_t rows;
} td_chain_rows;
td_chain_rows td_chain_rows_of(const td_chain *c, int width);

/* The chain's kernel, td_chain_kernel, for `width` elements at once. It serves every chain of the same operations, dtypes and steps, and of as many lanes.
 * Owned by the caller. No text and an error without memory. */
enum { TD_CHAIN_THREADS = 128 };
td_text td_chain_source(td_context *td, const td_chain *c, int width);

/* The kernel's one argument: pointers to the inputs and to the outputs; where it draws, td_device_run, td_chain_draws_of; then numbers. */
enum { TD_CHAIN_NUMBERS = 4 + 3 * TD_MAX_DIMS + (TD_FUSED_INPUTS + 1) * TD_MAX_DIMS, TD_CHAIN_DRAWS = 2 + 4 * TD_FUSED_DRAWS };
/* Words of 64 bits: how many it wrote. */
int td_chain_draws_of(const td_chain *c, uint64_t to[TD_CHAIN_DRAWS]);
typedef struct td_chain_numbers {
    int count;
    uint32_t at[TD_CHAIN_NUMBERS];            /* the first: how many groups of `width` elements there are, or parts of rows */
} td_chain_numbers;
/* False: there are too many elements for 32-bit indices and strides. */
bool td_chain_numbers_of(const td_chain *c, int width, td_chain_numbers *out);

/* Runs the chain as it is written; outputs are in device memory at `out`, those of rows in chunks the chunks' results. */
void td_chain_interpret(const td_kernel *k, const td_chain *c, const td_chain_rows *rows, void *const *out);

#ifdef __cplusplus
}
#endif

#endif
