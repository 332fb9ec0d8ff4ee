/* Collectives and their relatives as operations (collectives.c): what they do, in bytes, wherever their operands are.
 *
 * What is copied beside what is sent is told to par_copier, of which the CPU has one and a GPU another; so where parts and members lie is
 * computed by the same lines for both. C and C++.
 */
#ifndef TANDEM_PARALLEL_COLLECTIVES_H
#define TANDEM_PARALLEL_COLLECTIVES_H

#include <tandem/rewrite.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct par_collective_attr { int32_t axis, last, dim, pad; } par_collective_attr; /* over axes `axis` to `last` of the mesh */
/* par_op_own_members: ranges of flat sharded inputs, each at an offset of the output. */
typedef struct par_member_range { int64_t input, from, to, elements; } par_member_range;
extern const td_op par_op_all_reduce, par_op_reduce_scatter, par_op_all_gather, par_op_own_part, par_op_count_once, par_op_own_members;

/* `rows` runs of `bytes` bytes, each `to_step` and `from_step` bytes behind the one before. Nothing overlaps. */
typedef struct par_copy {
    char *to;
    const char *from;
    int64_t rows, bytes, to_step, from_step;
} par_copy;

/* In the order of calls, on the kernel's queue where there is one. Failures are the context's. */
typedef struct par_copier {
    void (*copy)(const td_kernel *k, const par_copy *copy);
    void (*clear)(const td_kernel *k, void *memory, int64_t bytes); /* to zeros */
} par_copier;

void par_run_all_reduce(const td_kernel *k, const par_copier *by);
void par_run_reduce_scatter(const td_kernel *k, const par_copier *by);
void par_run_all_gather(const td_kernel *k, const par_copier *by);
void par_run_own_part(const td_kernel *k, const par_copier *by);
void par_run_count_once(const td_kernel *k, const par_copier *by);
void par_run_own_members(const td_kernel *k, const par_copier *by);

#ifdef __cplusplus
}
#endif

#endif
