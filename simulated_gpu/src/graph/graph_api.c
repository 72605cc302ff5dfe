/* cuGraph*: creation, nodes and edges. */
#include "graph/graph.h"

#include <stdlib.h>
#include <string.h>

SIM_EXPORT CUresult CUDAAPI cuGraphCreate(CUgraph *phGraph, unsigned int flags)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(phGraph != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    sim_graph *graph = nvs_sim_graph_new();
    NVS_SIM_CHECK(graph != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *phGraph = (CUgraph)(void *)graph;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuGraphDestroy(CUgraph hGraph)
{
    sim_graph *graph;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(nvs_sim_graph(hGraph, &graph));
    NVS_SIM_CHECK(!graph->owned, CUDA_ERROR_INVALID_VALUE);
    nvs_sim_graph_free(graph);
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph)
{
    sim_graph *graph, *copy;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(phGraphClone != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_graph(originalGraph, &graph));
    NVS_SIM_CHECK(!nvs_sim_graph_allocates(graph), CUDA_ERROR_NOT_SUPPORTED);
    NVS_SIM_TRY(nvs_sim_graph_clone(graph, &copy));
    *phGraphClone = (CUgraph)(void *)copy;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuGraphNodeFindInClone(CUgraphNode *phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph)
{
    sim_node *original;
    sim_graph *clone;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(phNode != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_node(hOriginalNode, &original));
    NVS_SIM_TRY(nvs_sim_graph(hClonedGraph, &clone));
    for (sim_node *node = clone->nodes; node != NULL; node = node->next)
        if (node->id == original->id) {
            *phNode = (CUgraphNode)(void *)node;
            return nvs_sim_return(CUDA_SUCCESS);
        }
    return nvs_sim_return(CUDA_ERROR_INVALID_VALUE);
}

SIM_EXPORT CUresult CUDAAPI cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType *type)
{
    sim_node *node;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(type != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_node(hNode, &node));
    *type = node->type;
    return nvs_sim_return(CUDA_SUCCESS);
}

/* As documented, unused room is filled with NULL, and without an array this only counts. */
static void list(CUgraphNode *out, size_t *count, sim_node *const *found, size_t number)
{
    if (out != NULL)
        for (size_t i = 0; i < *count; i++)
            out[i] = i < number ? (CUgraphNode)(void *)found[i] : NULL;
    if (out == NULL || *count > number)
        *count = number;
}

static CUresult nodes_of(CUgraph handle, CUgraphNode *out, size_t *count, bool roots_only)
{
    sim_graph *graph;
    size_t number = 0;
    CUresult result = nvs_sim_graph(handle, &graph);
    if (result != CUDA_SUCCESS)
        return result;
    if (count == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    sim_node **found = calloc(graph->count + 1, sizeof *found);
    if (found == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (sim_node *node = graph->nodes; node != NULL; node = node->next)
        if (!roots_only || node->dependency_count == 0)
            found[number++] = node;
    list(out, count, found, number);
    free(found);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGraphGetNodes(CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(nodes_of(hGraph, nodes, numNodes, false));
}

SIM_EXPORT CUresult CUDAAPI cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode *rootNodes, size_t *numRootNodes)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(nodes_of(hGraph, rootNodes, numRootNodes, true));
}

static CUresult edges(CUgraph handle, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count)
{
    sim_graph *graph;
    size_t number = 0;
    CUresult result = nvs_sim_graph(handle, &graph);
    if (result != CUDA_SUCCESS || count == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    size_t room = from != NULL && to != NULL ? *count : 0;
    for (sim_node *node = graph->nodes; node != NULL; node = node->next)
        for (size_t i = 0; i < node->dependency_count; i++, number++)
            if (number < room) {
                from[number] = (CUgraphNode)(void *)node->dependencies[i];
                to[number] = (CUgraphNode)(void *)node;
                if (data != NULL)
                    memset(&data[number], 0, sizeof *data);
            }
    if (room == 0 || *count > number)
        *count = number;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGraphGetEdges(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, size_t *numEdges)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(edges(hGraph, from, to, NULL, numEdges));
}

SIM_EXPORT CUresult CUDAAPI cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edgeData,
                                               size_t *numEdges)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(edges(hGraph, from, to, edgeData, numEdges));
}

static CUresult dependencies(CUgraphNode handle, CUgraphNode *out, size_t *count, bool dependents)
{
    sim_node *node;
    size_t number = 0;
    CUresult result = nvs_sim_node(handle, &node);
    if (result != CUDA_SUCCESS || count == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    if (!dependents) {
        list(out, count, node->dependencies, node->dependency_count);
        return CUDA_SUCCESS;
    }
    sim_node **found = calloc(node->graph->count + 1, sizeof *found);
    if (found == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (sim_node *other = node->graph->nodes; other != NULL; other = other->next)
        for (size_t i = 0; i < other->dependency_count; i++)
            if (other->dependencies[i] == node)
                found[number++] = other;
    list(out, count, found, number);
    free(found);
    return CUDA_SUCCESS;
}

#define LISTING(name, dependents)                                                                                           \
    SIM_EXPORT CUresult CUDAAPI name(CUgraphNode hNode, CUgraphNode *nodes, size_t *number)                                 \
    {                                                                                                                       \
        NVS_SIM_ENTER();                                                                                                    \
        return nvs_sim_return(dependencies(hNode, nodes, number, dependents));                                              \
    }                                                                                                                       \
    SIM_EXPORT CUresult CUDAAPI name##_v2(CUgraphNode hNode, CUgraphNode *nodes, CUgraphEdgeData *edgeData, size_t *number) \
    {                                                                                                                       \
        NVS_SIM_ENTER();                                                                                                    \
        if (edgeData != NULL && nodes != NULL && number != NULL)                                                            \
            memset(edgeData, 0, *number * sizeof *edgeData);                                                                \
        return nvs_sim_return(dependencies(hNode, nodes, number, dependents));                                              \
    }

LISTING(cuGraphNodeGetDependencies, false)
LISTING(cuGraphNodeGetDependentNodes, true)

static CUresult change_edges(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to, size_t count, bool add)
{
    sim_graph *graph;
    CUresult result = nvs_sim_graph(handle, &graph);
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        sim_node *source, *target;
        result = nvs_sim_node(from[i], &source);
        if (result == CUDA_SUCCESS)
            result = nvs_sim_node(to[i], &target);
        if (result != CUDA_SUCCESS || source->graph != graph || target->graph != graph || source == target)
            return CUDA_ERROR_INVALID_VALUE;
        if (add)
            result = nvs_sim_node_depend(target, source);
        else
            nvs_sim_node_undepend(target, source);
    }
    return result;
}

#define CHANGING(name, add)                                                                                        \
    SIM_EXPORT CUresult CUDAAPI name(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t count) \
    {                                                                                                              \
        NVS_SIM_ENTER();                                                                                           \
        return nvs_sim_return(change_edges(hGraph, from, to, count, add));                                         \
    }                                                                                                              \
    SIM_EXPORT CUresult CUDAAPI name##_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,          \
                                          const CUgraphEdgeData *edgeData, size_t count)                           \
    {                                                                                                              \
        NVS_SIM_ENTER();                                                                                           \
        return nvs_sim_return(change_edges(hGraph, from, to, count, add));                                         \
    }

CHANGING(cuGraphAddDependencies, true)
CHANGING(cuGraphRemoveDependencies, false)

SIM_EXPORT CUresult CUDAAPI cuGraphDestroyNode(CUgraphNode hNode)
{
    sim_node *node;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(nvs_sim_node(hNode, &node));
    NVS_SIM_CHECK(!nvs_sim_graph_allocates(node->graph), CUDA_ERROR_NOT_SUPPORTED);
    nvs_sim_node_remove(node);
    return nvs_sim_return(CUDA_SUCCESS);
}
