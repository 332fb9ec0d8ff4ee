/* Gradients of composites whose rule would only repeat their decomposition: the second derivative of a norm, of
 * attention. The decomposition is recorded where the gradient is wanted, and its primitives are differentiated one by
 * one.
 */
#ifndef TANDEM_CORE_OPS_DERIVE_H
#define TANDEM_CORE_OPS_DERIVE_H

#include <tandem/rewrite.h>

/* Records what call->in gives as primitives: out[k] for each output that `call` has; one left with id TD_NONE has no
 * gradient. */
typedef void (*td_decomposition)(const td_gradient_call *call, td_tensor *out);

/* As a gradient rule: sets the gradient of every input that is wanted and that the outputs depend on. */
void td_gradient_by_parts(const td_gradient_call *g, td_decomposition parts);

#endif
