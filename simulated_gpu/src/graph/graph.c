/* Graphs as data: nodes, edges, clones, and a topological order. */
#include "graph/graph.h"

#include <stdio.h>
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

static void free_node(sim_node *node)
{
    if (node->child != NULL)
        nvs_sim_graph_free(node->child);
    if (node->memory != NULL)
        node->memory->nodes--;
    free(node->dependencies.all);
    node->magic = 0;
    free(node);
}

void nvs_sim_graph_free(sim_graph *graph)
{
    while (graph->nodes != NULL) {
        sim_node *node = graph->nodes;
        graph->nodes = node->next;
        free_node(node);
    }
    nvs_sim_holds_drop(&graph->holds);
    graph->magic = 0;
    free(graph);
}

NVS_SIM_DEFINE_FIND(nvs_sim_graph, CUgraph, sim_graph, SIM_GRAPH, CUDA_ERROR_INVALID_VALUE)

NVS_SIM_DEFINE_FIND(nvs_sim_node, CUgraphNode, sim_node, SIM_NODE, CUDA_ERROR_INVALID_VALUE)

CUresult nvs_sim_nodes_add(sim_nodes *list, sim_node *const *nodes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        size_t known = 0;
        while (known < list->count && list->all[known] != nodes[i])
            known++;
        if (known < list->count)
            continue;
        sim_node **larger = realloc(list->all, (list->count + 1) * sizeof *larger);
        NVS_SIM_CHECK(larger != NULL, CUDA_ERROR_OUT_OF_MEMORY);
        larger[list->count++] = nodes[i];
        list->all = larger;
    }
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
    if (nvs_sim_nodes_add(&node->dependencies, dependencies, count) != CUDA_SUCCESS) {
        free_node(node);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *graph->last = node;
    graph->last = &node->next;
    graph->count++;
    *out = node;
    return CUDA_SUCCESS;
}

static CUresult clone_node(const sim_node *node, sim_graph *into, sim_node **out)
{
    NVS_SIM_TRY(nvs_sim_node_new(into, node->type, NULL, 0, out));
    sim_node *clone = *out;
    clone->id = node->id;
    clone->work = node->work;
    clone->event = node->event;
    if ((clone->memory = node->memory) != NULL)
        clone->memory->nodes++;
    return node->child != NULL ? nvs_sim_graph_clone(node->child, &clone->child) : CUDA_SUCCESS;
}

CUresult nvs_sim_graph_clone(const sim_graph *graph, sim_graph **out)
{
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    sim_graph *copy = nvs_sim_graph_new();
    sim_node **clones = calloc(graph->count + 1, sizeof *clones);
    size_t index = 0;
    if (copy == NULL || clones == NULL)
        goto out;
    for (sim_node *node = graph->nodes; node != NULL; node = node->next) {
        node->mark = index++;
        result = clone_node(node, copy, &clones[node->mark]);
        if (result != CUDA_SUCCESS)
            goto out;
    }
    result = nvs_sim_holds_copy(graph->holds, &copy->holds);
    for (const sim_node *node = graph->nodes; node != NULL; node = node->next)
        for (size_t i = 0; i < node->dependencies.count && result == CUDA_SUCCESS; i++)
            result = nvs_sim_nodes_add(&clones[node->mark]->dependencies, &clones[node->dependencies.all[i]->mark], 1);
out:
    free(clones);
    if (result == CUDA_SUCCESS)
        *out = copy;
    else if (copy != NULL)
        nvs_sim_graph_free(copy);
    return result;
}

/* Each pass takes, in the order of creation, the nodes whose dependencies are all placed. */
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
            for (size_t i = 0; i < node->dependencies.count; i++)
                ready = ready && node->dependencies.all[i]->mark != 0;
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
    for (size_t i = 0; i < from->dependencies.count; i++)
        if (reaches(from->dependencies.all[i], ancestor))
            return true;
    return false;
}

bool nvs_sim_node_reaches(sim_node *from, const sim_node *ancestor)
{
    for (sim_node *node = from->graph->nodes; node != NULL; node = node->next)
        node->mark = 0;
    return reaches(from, ancestor);
}

static void undepend(sim_nodes *list, const sim_node *dependency)
{
    for (size_t i = 0; i < list->count; i++)
        if (list->all[i] == dependency)
            list->all[i--] = list->all[--list->count];
}

void nvs_sim_node_remove(sim_node *node)
{
    sim_graph *graph = node->graph;
    sim_node **link = &graph->nodes;
    while (*link != node)
        link = &(*link)->next;
    *link = node->next;
    if (graph->last == &node->next)
        graph->last = link;
    graph->count--;
    for (sim_node *other = graph->nodes; other != NULL; other = other->next)
        undepend(&other->dependencies, node);
    free_node(node);
}

bool nvs_sim_graph_allocates(const sim_graph *graph)
{
    bool found = false;
    for (const sim_node *node = graph->nodes; node != NULL; node = node->next)
        found = found || node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || node->type == CU_GRAPH_NODE_TYPE_MEM_FREE;
    return found;
}

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

SIM_EXPORT CUresult CUDAAPI cuGraphRetainUserObject(CUgraph hGraph, CUuserObject object, unsigned int count, unsigned int flags)
{
    NVS_SIM_ENTER_FIND(sim_graph *graph, nvs_sim_graph(hGraph, &graph));
    NVS_SIM_CHECK((flags & ~(unsigned)CU_GRAPH_USER_OBJECT_MOVE) == 0, CUDA_ERROR_INVALID_VALUE);
    return nvs_sim_hold_add(&graph->holds, object, count, flags != 0);
}

SIM_EXPORT CUresult CUDAAPI cuGraphReleaseUserObject(CUgraph hGraph, CUuserObject object, unsigned int count)
{
    NVS_SIM_ENTER_FIND(sim_graph *graph, nvs_sim_graph(hGraph, &graph));
    return nvs_sim_hold_release(&graph->holds, object, count);
}

NVS_SIM_GETTER(cuGraphNodeGetType, (CUgraphNode hNode, CUgraphNodeType *type), sim_node *node, nvs_sim_node(hNode, &node), type, node->type)

static bool any(const sim_node *node, const sim_node *of) { return true; }
static bool is_root(const sim_node *node, const sim_node *of) { return node->dependencies.count == 0; }
static bool depends_on(const sim_node *node, const sim_node *of)
{
    for (size_t i = 0; i < node->dependencies.count; i++)
        if (node->dependencies.all[i] == of)
            return true;
    return false;
}
static bool is_dependency(const sim_node *node, const sim_node *of) { return depends_on(of, node); }

/* As documented, unused entries become NULL; without an array the call only counts. */
static CUresult list(const sim_graph *graph, bool (*wanted)(const sim_node *, const sim_node *), const sim_node *of, CUgraphNode *out,
                     CUgraphEdgeData *edges, size_t *count)
{
    size_t number = 0;
    NVS_SIM_CHECK(count != NULL, CUDA_ERROR_INVALID_VALUE);
    for (sim_node *node = graph->nodes; node != NULL; node = node->next)
        if (wanted(node, of)) {
            if (out != NULL && number < *count)
                out[number] = (CUgraphNode)(void *)node;
            number++;
        }
    for (size_t i = number; out != NULL && i < *count; i++)
        out[i] = NULL;
    if (edges != NULL && out != NULL)
        memset(edges, 0, (*count < number ? *count : number) * sizeof *edges);
    if (out == NULL || *count > number)
        *count = number;
    return CUDA_SUCCESS;
}

static CUresult nodes_of(CUgraph handle, bool (*wanted)(const sim_node *, const sim_node *), CUgraphNode *out, size_t *count)
{
    sim_graph *graph;
    NVS_SIM_TRY(nvs_sim_graph(handle, &graph));
    return list(graph, wanted, NULL, out, NULL, count);
}

static CUresult near(CUgraphNode handle, bool (*wanted)(const sim_node *, const sim_node *), CUgraphNode *out, CUgraphEdgeData *edges,
                     size_t *count)
{
    sim_node *node;
    NVS_SIM_TRY(nvs_sim_node(handle, &node));
    return list(node->graph, wanted, node, out, edges, count);
}

NVS_SIM_ENTRY(cuGraphGetNodes, (CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes), nodes_of(hGraph, any, nodes, numNodes))
NVS_SIM_ENTRY(cuGraphGetRootNodes, (CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes), nodes_of(hGraph, is_root, nodes, numNodes))
NVS_SIM_ENTRY(cuGraphNodeGetDependencies, (CUgraphNode node, CUgraphNode *out, size_t *count), near(node, is_dependency, out, NULL, count))
NVS_SIM_ENTRY(cuGraphNodeGetDependencies_v2, (CUgraphNode node, CUgraphNode *out, CUgraphEdgeData *edges, size_t *count),
              near(node, is_dependency, out, edges, count))
NVS_SIM_ENTRY(cuGraphNodeGetDependentNodes, (CUgraphNode node, CUgraphNode *out, size_t *count), near(node, depends_on, out, NULL, count))
NVS_SIM_ENTRY(cuGraphNodeGetDependentNodes_v2, (CUgraphNode node, CUgraphNode *out, CUgraphEdgeData *edges, size_t *count),
              near(node, depends_on, out, edges, count))

static CUresult edges(CUgraph handle, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count)
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
    if (data != NULL)
        memset(data, 0, (room < number ? room : number) * sizeof *data);
    if (room == 0 || *count > number)
        *count = number;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuGraphGetEdges, (CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count), edges(graph, from, to, NULL, count))
NVS_SIM_ENTRY(cuGraphGetEdges_v2, (CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count),
              edges(graph, from, to, data, count))

/* Adds or removes edges between nodes that exist. */
static CUresult change(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to, size_t count, bool adds)
{
    sim_graph *graph;
    sim_node *before, *after;
    NVS_SIM_TRY(nvs_sim_graph(handle, &graph));
    NVS_SIM_CHECK(count == 0 || (from != NULL && to != NULL), CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        NVS_SIM_TRY(nvs_sim_node(from[i], &before));
        NVS_SIM_TRY(nvs_sim_node(to[i], &after));
        NVS_SIM_CHECK(before->graph == graph && after->graph == graph && before != after, CUDA_ERROR_INVALID_VALUE);
        NVS_SIM_CHECK(depends_on(after, before) != adds, CUDA_ERROR_INVALID_VALUE);
        if (adds)
            NVS_SIM_TRY(nvs_sim_nodes_add(&after->dependencies, &before, 1));
        else
            undepend(&after->dependencies, before);
    }
    return CUDA_SUCCESS;
}

#define CHANGE(name, adds)                                                                                                              \
    NVS_SIM_ENTRY(name, (CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count), change(graph, from, to, count, adds)) \
    NVS_SIM_ENTRY(name##_v2, (CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data, size_t count), \
                  change(graph, from, to, count, adds))

CHANGE(cuGraphAddDependencies, true)
CHANGE(cuGraphRemoveDependencies, false)

static CUresult find_in_clone(CUgraphNode *out, CUgraphNode original, CUgraph clone)
{
    sim_graph *graph;
    sim_node *node;
    NVS_SIM_TRY(nvs_sim_node(original, &node));
    NVS_SIM_TRY(nvs_sim_graph(clone, &graph));
    for (sim_node *one = graph->nodes; out != NULL && one != NULL; one = one->next)
        if (one->id == node->id) {
            *out = (CUgraphNode)(void *)one;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

NVS_SIM_ENTRY(cuGraphNodeFindInClone, (CUgraphNode *phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph),
              find_in_clone(phNode, hOriginalNode, hClonedGraph))

SIM_EXPORT CUresult CUDAAPI cuGraphDebugDotPrint(CUgraph hGraph, const char *path, unsigned int flags)
{
    NVS_SIM_ENTER_FIND(sim_graph *graph, nvs_sim_graph(hGraph, &graph));
    FILE *file = path != NULL ? fopen(path, "w") : NULL;
    NVS_SIM_CHECK(file != NULL, CUDA_ERROR_OPERATING_SYSTEM);
    fprintf(file, "digraph dot {\n");
    for (const sim_node *node = graph->nodes; node != NULL; node = node->next) {
        fprintf(file, "  n%llu [label=\"type %d\"];\n", (unsigned long long)node->id, (int)node->type);
        for (size_t i = 0; i < node->dependencies.count; i++)
            fprintf(file, "  n%llu -> n%llu;\n", (unsigned long long)node->dependencies.all[i]->id, (unsigned long long)node->id);
    }
    fprintf(file, "}\n");
    return fclose(file) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

SIM_EXPORT CUresult CUDAAPI cuGraphDestroyNode(CUgraphNode hNode)
{
    NVS_SIM_ENTER_FIND(sim_node *node, nvs_sim_node(hNode, &node));
    NVS_SIM_CHECK(!nvs_sim_graph_allocates(node->graph), CUDA_ERROR_NOT_SUPPORTED);
    nvs_sim_node_remove(node);
    return CUDA_SUCCESS;
}
