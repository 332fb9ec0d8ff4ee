/* Graphs with branches: see device_branches.h. */
#include "core/device_branches.h"

#include <string.h>

/* Memory that a call reads or writes. */
typedef struct range {
    const char *begin, *end;
    bool writes;
} range;

typedef struct call {
    uint32_t range, ranges;
    uint32_t node, nodes;                     /* what the next call that waits for this one waits for */
} call;

typedef struct branches {
    td_context *td;
    const td_planned *plan;
    call *calls;
    range *ranges;
    uint32_t range_count, range_room;
    cudaGraphNode_t *nodes;                   /* of the graph, and how the stream depends on each */
    cudaGraphEdgeData *edges;
    uint32_t node_count, node_room, edge_room;
    uint64_t *before;                         /* a row of bits a call: the calls that it comes behind */
    uint32_t words;                           /* of a row */
    cudaGraphNode_t *waits;                   /* scratch: of the call in hand */
    cudaGraphEdgeData *how;
    uint32_t wait_count, wait_room, how_room;
} branches;

/* ---- What calls touch */

static bool add_range(branches *b, call *c, const void *data, int64_t bytes, bool writes)
{
    if (!data || !bytes) return true;
    if (!td_room(b->td, (void **)&b->ranges, &b->range_room, b->range_count + 1, sizeof *b->ranges, "host")) return false;
    b->ranges[b->range_count++] = (range){ data, (const char *)data + bytes, writes };
    c->ranges++;
    return true;
}

/* Workspace has the length of its block. */
static int64_t workspace_bytes(const td_planned *plan, const td_task *task)
{
    for (uint32_t i = 0; i < plan->fixed_count && task->kernel.workspace; i++)
        if (plan->bindings[i].pointer == (void **)&task->kernel.workspace) return plan->blocks[plan->bindings[i].block].bytes;
    return 0;
}

static bool note_ranges(branches *b, uint32_t t)
{
    const td_task *task = &b->plan->tasks[t];
    const td_kernel *k = &task->kernel;
    call *c = &b->calls[t];
    *c = (call){ .range = b->range_count };
    for (int i = 0; i < k->inputs; i++)
        if (!add_range(b, c, k->in[i].data, td_arg_bytes(&k->in[i]), false)) return false;
    for (int i = 0; i < k->outputs; i++)
        if (!add_range(b, c, k->out[i].data, td_arg_bytes(&k->out[i]), true)) return false;
    return add_range(b, c, k->workspace, workspace_bytes(b->plan, task), true);
}

static bool collide(const branches *b, const call *x, const call *y)
{
    for (uint32_t i = x->range; i < x->range + x->ranges; i++)
        for (uint32_t j = y->range; j < y->range + y->ranges; j++) {
            const range *r = &b->ranges[i], *s = &b->ranges[j];
            if ((r->writes || s->writes) && r->begin < s->end && s->begin < r->end) return true;
        }
    return false;
}

static bool must_wait(const branches *b, uint32_t t, uint32_t earlier)
{
    bool collectives = b->plan->tasks[t].kernel.op->flags & b->plan->tasks[earlier].kernel.op->flags & TD_OP_COLLECTIVE;
    return collectives || collide(b, &b->calls[t], &b->calls[earlier]);
}

/* ---- The graph */

static bool wait_for(branches *b, uint32_t earlier)
{
    const call *c = &b->calls[earlier];
    uint32_t needed = b->wait_count + c->nodes;
    if (!td_room(b->td, (void **)&b->waits, &b->wait_room, needed, sizeof *b->waits, "host") ||
        !td_room(b->td, (void **)&b->how, &b->how_room, needed, sizeof *b->how, "host"))
        return false;
    for (uint32_t n = 0; n < c->nodes; n++) {
        bool known = false;
        for (uint32_t w = 0; w < b->wait_count && !known; w++) known = b->waits[w] == b->nodes[c->node + n];
        if (known) continue;
        b->waits[b->wait_count] = b->nodes[c->node + n];
        b->how[b->wait_count++] = b->edges[c->node + n];
    }
    return true;
}

/* What is captured next waits for the calls that `t` has to wait for, less those that others of them wait for. t may be the number of
 * calls: it waits for all. */
static bool depend(branches *b, uint32_t t, cudaStream_t stream)
{
    uint64_t *behind = b->before + (size_t)t * b->words;
    b->wait_count = 0;
    for (uint32_t s = t; s-- > 0;) {
        if (behind[s / 64] >> s % 64 & 1) continue;
        if (t < b->plan->task_count && !must_wait(b, t, s)) continue;
        const uint64_t *theirs = b->before + (size_t)s * b->words;
        for (uint32_t w = 0; w < b->words; w++) behind[w] |= theirs[w];
        behind[s / 64] |= (uint64_t)1 << s % 64;
        if (!wait_for(b, s)) return false;
    }
    return td_cuda_ok(b->td, cudaStreamUpdateCaptureDependencies(stream, b->waits, b->how, b->wait_count, cudaStreamSetCaptureDependencies),
                      "ordering a graph");
}

/* The nodes that end call t are those that the stream would go on from. */
static bool note_nodes(branches *b, uint32_t t, cudaStream_t stream)
{
    enum cudaStreamCaptureStatus status;
    const cudaGraphNode_t *nodes = NULL;
    const cudaGraphEdgeData *edges = NULL;
    size_t count = 0;
    if (!td_cuda_ok(b->td, cudaStreamGetCaptureInfo(stream, &status, NULL, NULL, &nodes, &edges, &count), "asking for a graph's nodes"))
        return false;
    uint32_t needed = b->node_count + (uint32_t)count;
    if (!td_room(b->td, (void **)&b->nodes, &b->node_room, needed, sizeof *b->nodes, "host") ||
        !td_room(b->td, (void **)&b->edges, &b->edge_room, needed, sizeof *b->edges, "host"))
        return false;
    b->calls[t].node = b->node_count;
    b->calls[t].nodes = (uint32_t)count;
    for (size_t n = 0; n < count; n++) {
        b->nodes[b->node_count] = nodes[n];
        b->edges[b->node_count++] = edges ? edges[n] : (cudaGraphEdgeData){ 0 };
    }
    return true;
}

static bool capture(branches *b, cudaStream_t stream)
{
    for (uint32_t t = 0; t < b->plan->task_count; t++) {
        const td_task *task = &b->plan->tasks[t];
        if (!note_ranges(b, t) || !depend(b, t, stream)) return false;
        task->run(&task->kernel);
        if (b->td->error != TD_OK || !note_nodes(b, t, stream)) return false;
    }
    return depend(b, b->plan->task_count, stream);
}

bool td_branches_capture(td_context *td, const td_planned *plan, cudaStream_t stream)
{
    uint32_t count = plan->task_count, words = (count + 63) / 64;
    branches b = { .td = td, .plan = plan, .words = words };
    size_t call_bytes = count * sizeof *b.calls, bit_bytes = (size_t)(count + 1) * words * sizeof *b.before;
    b.calls = td_alloc(td, call_bytes, "host");
    b.before = td_alloc(td, bit_bytes, "host");
    if (b.before) memset(b.before, 0, bit_bytes);
    bool captured = b.calls && b.before && capture(&b, stream);
    td_free(td, b.calls, call_bytes, "host");
    td_free(td, b.before, bit_bytes, "host");
    td_free(td, b.ranges, b.range_room * sizeof *b.ranges, "host");
    td_free(td, b.nodes, b.node_room * sizeof *b.nodes, "host");
    td_free(td, b.edges, b.edge_room * sizeof *b.edges, "host");
    td_free(td, b.waits, b.wait_room * sizeof *b.waits, "host");
    td_free(td, b.how, b.how_room * sizeof *b.how, "host");
    return captured;
}
