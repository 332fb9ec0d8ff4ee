/* The calls of a plan in a graph: each waits for the earlier ones that touch the same memory, where it or they write there, and for nothing
 * else. What no memory orders may run side by side: the gradients of a layer's input, weight and bias, say. Collectives keep their order.
 */
#ifndef TANDEM_CORE_DEVICE_BRANCHES_H
#define TANDEM_CORE_DEVICE_BRANCHES_H

#include "core/device_cuda.h"

/* Makes the calls on `stream`, which is being captured; what is captured next waits for all of them. False and an error. */
bool td_branches_capture(td_context *td, const td_planned *plan, cudaStream_t stream);

#endif
