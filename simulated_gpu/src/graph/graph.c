/* Graphs as data: nodes, edges, copies, an order to run them in. */
#include "graph/graph.h"

#include <stdlib.h>
#include <string.h>

sim_graph *nvs_sim_graph_new(void)
{
    sim_graph *graph = calloc(1, sizeof *graph);
    if (graph != NULL) {
        graph->magic = SIM_GRAPH;
        graph->last = &graph->nodes;
        graph->id = nvs_sim_next_id++;
    }
    return graph;
}

void nvs_sim_node_free(sim_node *node)
{
    if (node->child != NULL)
        nvs_sim_graph_free(node->child);
    if (node->memory != NULL)
        nvs_sim_graph_memory_unref(node->memory);
    free(node->dependencies);
    node->magic = 0;
    free(node);
}

void nvs_sim_graph_free(sim_graph *graph)
{
    while (graph->nodes != NULL) {
        sim_node *node = graph->nodes;
        graph->nodes = node->next;
        nvs_sim_node_free(node);
    }
    graph->magic = 0;
    free(graph);
}

CUresult nvs_sim_graph_find(CUgraph handle, sim_graph **out)
{
    sim_graph *graph = (sim_graph *)(void *)handle;
    if (graph == NULL || graph->magic != SIM_GRAPH)
        return CUDA_ERROR_INVALID_VALUE;
    *out = graph;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_node_find(CUgraphNode handle, sim_node **out)
{
    sim_node *node = (sim_node *)(void *)handle;
    if (node == NULL || node->magic != SIM_NODE)
        return CUDA_ERROR_INVALID_VALUE;
    *out = node;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_node_depend(sim_node *node, sim_node *dependency)
{
    for (size_t i = 0; i < node->dependency_count; i++)
        if (node->dependencies[i] == dependency)
            return CUDA_SUCCESS;
    sim_node **larger = realloc(node->dependencies, (node->dependency_count + 1) * sizeof *larger);
    if (larger == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    larger[node->dependency_count++] = dependency;
    node->dependencies = larger;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_node_new(sim_graph *graph, CUgraphNodeType type, sim_node *const *dependencies, size_t count, sim_node **out)
{
    for (size_t i = 0; i < count; i++)
        if (dependencies[i] == NULL || dependencies[i]->magic != SIM_NODE || dependencies[i]->graph != graph)
            return CUDA_ERROR_INVALID_VALUE;
    sim_node *node = calloc(1, sizeof *node);
    if (node == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    node->magic = SIM_NODE;
    node->graph = graph;
    node->type = type;
    node->id = nvs_sim_next_id++;
    for (size_t i = 0; i < count; i++)
        if (nvs_sim_node_depend(node, dependencies[i]) != CUDA_SUCCESS) {
            nvs_sim_node_free(node);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    *graph->last = node;
    graph->last = &node->next;
    graph->count++;
    *out = node;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_graph_clone(const sim_graph *graph, sim_graph **out)
{
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    sim_graph *copy = nvs_sim_graph_new();
    sim_node **made = calloc(graph->count + 1, sizeof *made);
    size_t index = 0;
    if (copy == NULL || made == NULL)
        goto out;
    for (sim_node *node = graph->nodes; node != NULL; node = node->next)
        node->mark = index++;
    for (const sim_node *node = graph->nodes; node != NULL; node = node->next) {
        sim_node *twin;
        result = nvs_sim_node_new(copy, node->type, NULL, 0, &twin);
        if (result != CUDA_SUCCESS)
            goto out;
        made[node->mark] = twin;
        twin->id = node->id;
        twin->work = node->work;
        twin->event = node->event;
        if ((twin->memory = node->memory) != NULL)
            nvs_sim_graph_memory_ref(twin->memory);
        for (int i = 0; i < 3; i++) {
            twin->values[i] = node->values[i];
            twin->arguments[i] = &twin->values[i];
        }
        twin->kernel = node->kernel;
        if (twin->kernel.kernelParams != NULL)
            twin->kernel.kernelParams = twin->arguments;
        twin->copy = node->copy;
        twin->fill = node->fill;
        if (node->child != NULL && (result = nvs_sim_graph_clone(node->child, &twin->child)) != CUDA_SUCCESS)
            goto out;
    }
    result = CUDA_SUCCESS;
    for (const sim_node *node = graph->nodes; node != NULL && result == CUDA_SUCCESS; node = node->next)
        for (size_t i = 0; i < node->dependency_count && result == CUDA_SUCCESS; i++)
            result = nvs_sim_node_depend(made[node->mark], made[node->dependencies[i]->mark]);
out:
    free(made);
    if (result == CUDA_SUCCESS)
        *out = copy;
    else if (copy != NULL)
        nvs_sim_graph_free(copy);
    return result;
}

/* Repeatedly takes, in the order of creation, what depends on nothing that is still missing. */
CUresult nvs_sim_graph_sort(sim_graph *graph, sim_node ***out)
{
    sim_node **order = calloc(graph->count + 1, sizeof *order);
    size_t placed = 0, before;
    if (order == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (sim_node *node = graph->nodes; node != NULL; node = node->next)
        node->mark = 0;
    do {
        before = placed;
        for (sim_node *node = graph->nodes; node != NULL; node = node->next) {
            bool ready = node->mark == 0;
            for (size_t i = 0; i < node->dependency_count; i++)
                ready = ready && node->dependencies[i]->mark != 0;
            if (ready) {
                node->mark = 1;
                order[placed++] = node;
            }
        }
    } while (placed != before);
    if (placed != graph->count) {
        free(order);
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = order;
    return CUDA_SUCCESS;
}

static bool reaches(sim_node *from, const sim_node *ancestor)
{
    if (from == ancestor)
        return true;
    if (from->mark != 0)
        return false;
    from->mark = 1;
    for (size_t i = 0; i < from->dependency_count; i++)
        if (reaches(from->dependencies[i], ancestor))
            return true;
    return false;
}

bool nvs_sim_node_reaches(sim_node *from, const sim_node *ancestor)
{
    for (sim_node *node = from->graph->nodes; node != NULL; node = node->next)
        node->mark = 0;
    return reaches(from, ancestor);
}

/* Creating, destroying, asking. */

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
    NVS_SIM_TRY(nvs_sim_graph_find(hGraph, &graph));
    NVS_SIM_CHECK(!graph->owned, CUDA_ERROR_INVALID_VALUE);
    nvs_sim_graph_free(graph);
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph)
{
    sim_graph *graph, *copy;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(phGraphClone != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_graph_find(originalGraph, &graph));
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
    NVS_SIM_TRY(nvs_sim_node_find(hOriginalNode, &original));
    NVS_SIM_TRY(nvs_sim_graph_find(hClonedGraph, &clone));
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
    NVS_SIM_TRY(nvs_sim_node_find(hNode, &node));
    *type = node->type;
    return nvs_sim_return(CUDA_SUCCESS);
}

/* Fills as many as there is room for, as documented: the rest with NULL; without an array it only counts. */
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
    CUresult result = nvs_sim_graph_find(handle, &graph);
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
    CUresult result = nvs_sim_graph_find(handle, &graph);
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
    CUresult result = nvs_sim_node_find(handle, &node);
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

#define LISTING(name, dependents)                                                                                     \
    SIM_EXPORT CUresult CUDAAPI name(CUgraphNode hNode, CUgraphNode *nodes, size_t *number)                           \
    {                                                                                                                 \
        NVS_SIM_ENTER();                                                                                              \
        return nvs_sim_return(dependencies(hNode, nodes, number, dependents));                                        \
    }                                                                                                                 \
    SIM_EXPORT CUresult CUDAAPI name##_v2(CUgraphNode hNode, CUgraphNode *nodes, CUgraphEdgeData *edgeData, size_t *number) \
    {                                                                                                                 \
        NVS_SIM_ENTER();                                                                                              \
        if (edgeData != NULL && nodes != NULL && number != NULL)                                                      \
            memset(edgeData, 0, *number * sizeof *edgeData);                                                          \
        return nvs_sim_return(dependencies(hNode, nodes, number, dependents));                                        \
    }

LISTING(cuGraphNodeGetDependencies, false)
LISTING(cuGraphNodeGetDependentNodes, true)

static void undepend(sim_node *node, const sim_node *dependency)
{
    for (size_t i = 0; i < node->dependency_count; i++)
        if (node->dependencies[i] == dependency)
            node->dependencies[i--] = node->dependencies[--node->dependency_count];
}

static CUresult change_edges(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to, size_t count, bool add)
{
    sim_graph *graph;
    CUresult result = nvs_sim_graph_find(handle, &graph);
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        sim_node *source, *target;
        result = nvs_sim_node_find(from[i], &source);
        if (result == CUDA_SUCCESS)
            result = nvs_sim_node_find(to[i], &target);
        if (result != CUDA_SUCCESS || source->graph != graph || target->graph != graph || source == target)
            return CUDA_ERROR_INVALID_VALUE;
        if (add)
            result = nvs_sim_node_depend(target, source);
        else
            undepend(target, source);
    }
    return result;
}

#define CHANGING(name, add)                                                                                           \
    SIM_EXPORT CUresult CUDAAPI name(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t count)    \
    {                                                                                                                 \
        NVS_SIM_ENTER();                                                                                              \
        return nvs_sim_return(change_edges(hGraph, from, to, count, add));                                            \
    }                                                                                                                 \
    SIM_EXPORT CUresult CUDAAPI name##_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,             \
                                          const CUgraphEdgeData *edgeData, size_t count)                              \
    {                                                                                                                 \
        NVS_SIM_ENTER();                                                                                              \
        return nvs_sim_return(change_edges(hGraph, from, to, count, add));                                            \
    }

CHANGING(cuGraphAddDependencies, true)
CHANGING(cuGraphRemoveDependencies, false)

SIM_EXPORT CUresult CUDAAPI cuGraphDestroyNode(CUgraphNode hNode)
{
    sim_node *node;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(nvs_sim_node_find(hNode, &node));
    sim_graph *graph = node->graph;
    NVS_SIM_CHECK(!nvs_sim_graph_allocates(graph), CUDA_ERROR_NOT_SUPPORTED);
    sim_node **link = &graph->nodes;
    while (*link != node)
        link = &(*link)->next;
    *link = node->next;
    if (graph->last == &node->next)
        graph->last = link;
    graph->count--;
    for (sim_node *other = graph->nodes; other != NULL; other = other->next)
        undepend(other, node);
    nvs_sim_node_free(node);
    return nvs_sim_return(CUDA_SUCCESS);
}
