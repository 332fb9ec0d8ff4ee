/* Nodes that name states: gradients, updates and blends. */
#ifndef TANDEM_CORE_OPS_UPDATE_H
#define TANDEM_CORE_OPS_UPDATE_H

#include "core/ops/op.h"

enum { TD_STATES_HEAD_BYTES = 96 };           /* at most, of what stands before the states' numbers */

/* Records op of n inputs, with `head` as its attributes and behind it the number (uint32_t) of each state. Allocates nothing for
 * up to 512 states. */
td_tensor td_record_states(td_context *td, const td_op *op, td_here here, int n, const td_tensor *in, const void *head, size_t head_bytes,
                           const td_state *states, int count);

#endif
