/* cuGraph*: creation, nodes and edges. */
#include "graph/graph.h"

SIM_EXPORT CUresult CUDAAPI cuGraphCreate(CUgraph *phGraph, unsigned int flags)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(phGraph != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    sim_graph *graph = nvs_sim_graph_new();
    NVS_SIM_CHECK(graph != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *phGraph = (CUgraph)(void *)graph;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGraphDestroy(CUgraph hGraph)
{
    NVS_SIM_ENTER_FIND(sim_graph *graph, nvs_sim_graph(hGraph, &graph));
    NVS_SIM_CHECK(!graph->owned, CUDA_ERROR_INVALID_VALUE);
    nvs_sim_graph_free(graph);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph)
{
    sim_graph *copy;
    NVS_SIM_ENTER_FIND(sim_graph *graph, nvs_sim_graph(originalGraph, &graph));
    NVS_SIM_CHECK(phGraphClone != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(!nvs_sim_graph_allocates(graph), CUDA_ERROR_NOT_SUPPORTED);
    NVS_SIM_TRY(nvs_sim_graph_clone(graph, &copy));
    *phGraphClone = (CUgraph)(void *)copy;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType *type)
{
    NVS_SIM_ENTER_FIND(sim_node *node, nvs_sim_node(hNode, &node));
    NVS_SIM_CHECK(type != NULL, CUDA_ERROR_INVALID_VALUE);
    *type = node->type;
    return CUDA_SUCCESS;
}

/* As documented, unused entries become NULL; without an array the call only counts. */
static CUresult nodes_of(CUgraph handle, CUgraphNode *out, size_t *count)
{
    sim_graph *graph;
    size_t number = 0;
    NVS_SIM_TRY(nvs_sim_graph(handle, &graph));
    NVS_SIM_CHECK(count != NULL, CUDA_ERROR_INVALID_VALUE);
    for (sim_node *node = graph->nodes; node != NULL; node = node->next, number++)
        if (out != NULL && number < *count)
            out[number] = (CUgraphNode)(void *)node;
    for (size_t i = number; out != NULL && i < *count; i++)
        out[i] = NULL;
    if (out == NULL || *count > number)
        *count = number;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuGraphGetNodes, (CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes), nodes_of(hGraph, nodes, numNodes))

static CUresult edges(CUgraph handle, CUgraphNode *from, CUgraphNode *to, size_t *count)
{
    sim_graph *graph;
    size_t number = 0;
    NVS_SIM_TRY(nvs_sim_graph(handle, &graph));
    NVS_SIM_CHECK(count != NULL, CUDA_ERROR_INVALID_VALUE);
    size_t room = from != NULL && to != NULL ? *count : 0;
    for (sim_node *node = graph->nodes; node != NULL; node = node->next)
        for (size_t i = 0; i < node->dependencies.count; i++, number++)
            if (number < room) {
                from[number] = (CUgraphNode)(void *)node->dependencies.all[i];
                to[number] = (CUgraphNode)(void *)node;
            }
    if (room == 0 || *count > number)
        *count = number;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuGraphGetEdges, (CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count), edges(graph, from, to, count))

SIM_EXPORT CUresult CUDAAPI cuGraphDestroyNode(CUgraphNode hNode)
{
    NVS_SIM_ENTER_FIND(sim_node *node, nvs_sim_node(hNode, &node));
    NVS_SIM_CHECK(!nvs_sim_graph_allocates(node->graph), CUDA_ERROR_NOT_SUPPORTED);
    nvs_sim_node_remove(node);
    return CUDA_SUCCESS;
}
