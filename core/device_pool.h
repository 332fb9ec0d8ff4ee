/* A GPU's memory in pools: ranges of addresses, each as long as the GPU's memory, that are reserved when a context opens and given memory
 * as far as it is needed. What grows never moves, so graphs stay valid; it grows by whole pages, which the planned bytes count.
 *
 * Kinds "state", "step" and "inputs" have a pool each, from which memory is handed out in turn; when all of a pool has been given back, it
 * is handed out from the beginning again. Where ranks reach into it (td_reach) "step" is one piece, of which a larger one takes the place, and
 * "state" has a piece for all that is laid out at once. Anything else, and everything where the driver cannot map memory, is allocated by
 * itself.
 */
#ifndef TANDEM_CORE_DEVICE_POOL_H
#define TANDEM_CORE_DEVICE_POOL_H

#include "core/device_cuda.h"

struct td_pools;
struct td_pools **td_pools_of(td_context *td);            /* where the context keeps them; NULL there: no memory is mapped */

/* Reserves the pools and sets td->page_bytes. False and an error; a driver that cannot map memory is none, and told. */
bool td_pools_open(td_context *td, int device);
void td_pools_close(td_context *td);

/* As td_device's, for the context's current device. */
void *td_cuda_get(td_context *td, int64_t bytes, const char *kind);
void td_cuda_put(td_context *td, void *memory, int64_t bytes, const char *kind);

#endif
