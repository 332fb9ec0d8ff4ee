/* The nodes of a graph. One of kernels alone is launched in a few us, whatever its length; libraries put memsets between theirs, of a counter of
 * four bytes before a product, and with those the launch takes the host a microsecond a node. Kernels clear the same bytes instead.
 */
#include "core/device_graph.h"

enum { WAYS = 2 };                            /* what a node waits for, and what waits for it */

typedef struct neighbours {
    cudaGraphNode_t *node[WAYS];
    cudaGraphEdgeData *edge[WAYS];
    size_t count[WAYS], most;                 /* room for `most` each way */
} neighbours;

static bool nodes_ok(td_context *td, cudaError_t status) { return td_cuda_ok(td, status, "changing a graph"); }

static size_t bytes_for(size_t most) { return WAYS * most * (sizeof(cudaGraphNode_t) + sizeof(cudaGraphEdgeData)); }

/* Room for as many as the graph has nodes. */
static bool open_neighbours(td_context *td, neighbours *n, size_t most)
{
    char *room = td_alloc(td, bytes_for(most), "program");
    *n = (neighbours){ .most = most };
    for (int w = 0; w < WAYS && room; w++) {
        n->node[w] = (cudaGraphNode_t *)room + (size_t)w * most;
        n->edge[w] = (cudaGraphEdgeData *)((cudaGraphNode_t *)room + WAYS * most) + (size_t)w * most;
    }
    return room != NULL;
}

static void close_neighbours(td_context *td, neighbours *n) { td_free(td, n->node[0], bytes_for(n->most), "program"); }

static bool read_neighbours(td_context *td, neighbours *n, cudaGraphNode_t of)
{
    n->count[0] = n->count[1] = n->most;
    return nodes_ok(td, cudaGraphNodeGetDependencies(of, n->node[0], n->edge[0], &n->count[0])) &&
           nodes_ok(td, cudaGraphNodeGetDependentNodes(of, n->node[1], n->edge[1], &n->count[1]));
}

/* `by` waits for what `node` waits for, and what waits for `node` for `by`. */
static bool take_place(td_context *td, cudaGraph_t graph, cudaGraphNode_t node, cudaGraphNode_t by, neighbours *n)
{
    if (!read_neighbours(td, n, node)) return false;
    for (size_t i = 0; i < n->count[0]; i++)
        if (!nodes_ok(td, cudaGraphAddDependencies(graph, &n->node[0][i], &by, &n->edge[0][i], 1))) return false;
    for (size_t i = 0; i < n->count[1]; i++)
        if (!nodes_ok(td, cudaGraphAddDependencies(graph, &by, &n->node[1][i], &n->edge[1][i], 1))) return false;
    return nodes_ok(td, cudaGraphDestroyNode(node));
}

/* Clears by a kernel what the node clears. *is_kernel: it does now. */
static bool clear_by_kernel(td_context *td, cudaGraph_t graph, cudaGraphNode_t node, neighbours *n, bool *is_kernel)
{
    struct cudaMemsetParams m;
    cudaGraphNode_t by;
    if (!nodes_ok(td, cudaGraphMemsetNodeGetParams(node, &m))) return false;
    *is_kernel = m.height == 1 && m.value == 0;
    return !*is_kernel || (nodes_ok(td, td_clear_bytes_node_cuda(&by, graph, m.dst, (int64_t)(m.width * m.elementSize))) &&
                           take_place(td, graph, node, by, n));
}

/* Of nodes that only the driver makes, waits for a value in memory, say, the runtime tells no type: they stay as they are. */
static bool type_of(td_context *td, cudaGraphNode_t node, enum cudaGraphNodeType *type)
{
    cudaError_t status = cudaGraphNodeGetType(node, type);
    if (status != cudaErrorUnknown) return nodes_ok(td, status);
    cudaGetLastError();
    *type = cudaGraphNodeTypeCount;
    return true;
}

static bool visit(td_context *td, cudaGraph_t graph, cudaGraphNode_t node, neighbours *n)
{
    enum cudaGraphNodeType type;
    if (!type_of(td, node, &type)) return false;
    bool is_kernel = type == cudaGraphNodeTypeKernel;
    if (type == cudaGraphNodeTypeMemset && !clear_by_kernel(td, graph, node, n, &is_kernel)) return false;
    td->device_counts.others += !is_kernel;
    return true;
}

bool td_nodes_are_kernels(td_context *td, cudaGraph_t graph)
{
    neighbours n;
    size_t count = 0;
    if (!nodes_ok(td, cudaGraphGetNodes(graph, NULL, &count))) return false;
    if (!count) return true; /* of a step without values: there is nothing to be read, and it may not be asked for */
    cudaGraphNode_t *nodes = td_alloc(td, (count + 1) * sizeof *nodes, "program");
    bool opened = nodes && open_neighbours(td, &n, count + 1), good = opened && nodes_ok(td, cudaGraphGetNodes(graph, nodes, &count));
    for (size_t i = 0; i < count && good; i++) good = visit(td, graph, nodes[i], &n);
    if (opened) close_neighbours(td, &n);
    td_free(td, nodes, (count + 1) * sizeof *nodes, "program");
    return good;
}
