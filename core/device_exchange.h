/* What passes between the host and a GPU with each step: its inputs, scalars and the numbers of the run one way, kept scalars the other.
 *
 * Steps use sets of memory in turn, by td->runs. The copy to one set runs on a stream of its own while the step before, with the other,
 * computes; the host is ahead by as many steps as there are sets, and waits for none but the one whose value it reads, or whose input it writes
 * again.
 */
#ifndef TANDEM_CORE_DEVICE_EXCHANGE_H
#define TANDEM_CORE_DEVICE_EXCHANGE_H

#include "core/device_cuda.h"
#include "core/internal.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct td_exchange_set {
    char *pinned;                             /* the host's side of `inputs` */
    uint64_t filled_for;                      /* the plan, by number, whose constants it has */
    td_span read;                             /* around all that `copied` reads of the caller's memory; empty: nothing, or it has */
    char *inputs;                             /* on the device: td_cuda_run in TD_GPU_ALIGN bytes, then the slots of a plan */
    uint64_t *outputs;                        /* pinned, TD_LANDED of them; the device writes there */
    cudaEvent_t copied, done;                 /* the inputs; the step */
    bool read_late;                           /* the step's own calls read `pinned`, too: those of the host */
    int64_t used_by;                          /* the last run that used the set, of td->runs */
} td_exchange_set;

typedef struct td_exchange {
    cudaStream_t copies;
    int64_t copied_ns;                        /* when the host's threads last copied an input; of td_profile_now */
    char *memory;                             /* of all inputs */
    int64_t slot_bytes;                       /* that each set has room for; -1: there are none yet */
    uint64_t epoch;                           /* how many there have been */
    int64_t done_by;                          /* the last run that the host knows to be done */
    td_exchange_set set[TD_INPUT_SETS];
} td_exchange;

/* In kernels: `count` values of up to 8 bytes, each from its place to one of `to`. */
typedef struct td_landing {
    int count;
    int bytes[TD_LANDED];
    const void *from[TD_LANDED];
    uint64_t *to;
} td_landing;
void td_land_cuda(const td_landing *landing, cudaStream_t queue);

bool td_exchange_open(td_context *td, td_exchange *x);
/* Room for a plan's slots. Where there was too little all sets are made anew, when what runs is done. */
bool td_exchange_ensure(td_context *td, td_exchange *x, cudaStream_t stream, int64_t slot_bytes);
/* Puts the plan's inputs on their way; what comes next on the stream runs when they are there. */
bool td_exchange_send(td_context *td, td_exchange *x, cudaStream_t stream, const td_planned *plan);
/* Waits until nothing in the span has still to be read. */
bool td_exchange_read(td_context *td, td_exchange *x, td_span of);
/* Behind the calls of a plan: its outputs of one element go to the set, on the stream. May be captured. */
bool td_exchange_land(td_context *td, td_exchange *x, cudaStream_t stream, const td_planned *plan);
/* Behind all of that: the set is free when the stream has come here. */
bool td_exchange_done(td_context *td, td_exchange *x, cudaStream_t stream);
/* The outputs of a set's last step, when it is done; NULL after an error. */
const uint64_t *td_exchange_landed(td_context *td, td_exchange *x, int set);
/* Nothing runs any more. */
void td_exchange_close(td_context *td, td_exchange *x);

#ifdef __cplusplus
}
#endif

#endif
