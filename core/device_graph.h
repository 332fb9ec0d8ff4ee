/* Running plans on a GPU, in the device's own files: device_graph.c makes a plan's calls and graphs of them, device_queues.c has the queues
 * and the events by which they wait for one another.
 */
#ifndef TANDEM_CORE_DEVICE_GRAPH_H
#define TANDEM_CORE_DEVICE_GRAPH_H

#include "core/device_exchange.h"

struct td_cuda {
    int device;
    cudaStream_t stream;                      /* computation's */
    cudaStream_t beside[TD_QUEUES];           /* the other queues; NULL: no plan has needed it */
    td_exchange exchange;
    struct td_cublas *cublas;
    struct td_pools *pools;
};

/* A call that the host makes, with what it is bound to in one set of inputs: it is made long after others were bound. */
typedef struct td_host_call {
    void (*run)(const td_kernel *k);
    td_kernel kernel;
} td_host_call;

/* What a GPU keeps with a plan. */
typedef struct td_cuda_plan {
    uint64_t inputs_epoch, arena_epoch;       /* that its graphs were made for */
    bool warm;                                /* has run since */
    bool beside;                              /* the calls made now go to queues of their own; a first run's, which is timed, in turn */
    cudaGraphExec_t graph[TD_INPUT_SETS];
    cudaGraphExec_t timed[TD_INPUT_SETS];     /* the same, with events between the calls */
    cudaEvent_t *ended;                       /* behind each call that another queue waits for, NULL for others; then the run's beginning, and what lands */
    cudaEvent_t *events;                      /* two for each call, before and behind it, and behind the last; NULL: never profiled */
    uint32_t ended_count, event_count;
    td_host_call *host_calls[TD_INPUT_SETS];  /* of tasks on the host, in their order; behind them their operands */
    size_t host_call_bytes;
} td_cuda_plan;

bool td_cuda_current(td_context *td);                     /* makes the context's GPU the thread's */
bool td_cuda_wait(td_context *td);                        /* until computation's queue is done, and so all others */

/* device_nodes.c: has kernels do what else libraries left in a graph, and counts what is left besides. False after an error. */
bool td_nodes_are_kernels(td_context *td, cudaGraph_t graph);

bool td_graph_run(td_context *td, td_planned *plan);
void td_graph_drop(td_context *td, td_planned *plan);

/* ---- Queues (device_queues.c): each returns false after an error. Where p->beside is false they do nothing. */
bool td_queues_ensure(td_context *td, const td_planned *plan, td_cuda_plan *p); /* those the plan needs, and events */
cudaStream_t td_queue_of(td_context *td, const td_cuda_plan *p, const td_task *task);
bool td_queues_fork(td_context *td, const td_planned *plan, const td_cuda_plan *p);
bool td_queues_join(td_context *td, const td_planned *plan, const td_cuda_plan *p);
bool td_queues_wait(td_context *td, const td_cuda_plan *p, const td_task *task);  /* before the task's call */
bool td_queues_done(td_context *td, const td_planned *plan, const td_cuda_plan *p, uint32_t task);        /* behind it */
/* Whether what lands is sent aside, and behind task `task`, if that is when, sends it there. */
bool td_queues_lands(const td_planned *plan, const td_cuda_plan *p);
bool td_queues_land(td_context *td, const td_planned *plan, const td_cuda_plan *p, uint32_t task);
void td_queues_close(td_context *td);

/* ---- Events of a plan */
bool td_events_get(td_context *td, cudaEvent_t **events, uint32_t *count, uint32_t wanted);   /* room for them, all NULL */
bool td_event_make(td_context *td, cudaEvent_t *event, unsigned flags);                       /* unless it is there */
bool td_event_record(td_context *td, cudaEvent_t event, cudaStream_t queue, unsigned how);
void td_events_free(td_context *td, cudaEvent_t **events, uint32_t *count);

#endif
