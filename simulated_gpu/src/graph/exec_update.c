/* Changes of an executable, addressed by the nodes of its original graph. */
#include "graph/graph.h"

#include <stdlib.h>

static CUresult own_node(CUgraphExec exec_handle, CUgraphNode node_handle, sim_exec **exec, size_t *index)
{
    sim_node *node;
    NVS_SIM_TRY(nvs_sim_exec(exec_handle, exec));
    NVS_SIM_TRY(nvs_sim_node(node_handle, &node));
    for (size_t i = 0; i < (*exec)->graph->count; i++)
        if ((*exec)->order[i]->id == node->id) {
            *index = i;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult set_params(CUgraphExec exec_handle, CUgraphNode node, CUgraphNodeType type, sim_node_params params)
{
    sim_exec *exec;
    size_t index;
    NVS_SIM_TRY(own_node(exec_handle, node, &exec, &index));
    if (params.any == NULL || exec->order[index]->type != type)
        return CUDA_ERROR_INVALID_VALUE;
    return nvs_sim_node_set(exec->order[index], params);
}

#define EXEC_SET(name, kind, parameter, ...)                                                             \
    SIM_EXPORT CUresult CUDAAPI name(CUgraphExec hGraphExec, CUgraphNode hNode, parameter)               \
    {                                                                                                    \
        NVS_SIM_ENTER();                                                                                 \
        return set_params(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_##kind, (sim_node_params){__VA_ARGS__}); \
    }
#define COMMA ,

EXEC_SET(cuGraphExecKernelNodeSetParams_v2, KERNEL, const CUDA_KERNEL_NODE_PARAMS *params, .kernel = params)
EXEC_SET(cuGraphExecMemcpyNodeSetParams, MEMCPY, const CUDA_MEMCPY3D *params COMMA CUcontext ctx, .context = ctx, .copy = params)
EXEC_SET(cuGraphExecMemsetNodeSetParams, MEMSET, const CUDA_MEMSET_NODE_PARAMS *params COMMA CUcontext ctx, .context = ctx, .fill = params)
EXEC_SET(cuGraphExecHostNodeSetParams, HOST, const CUDA_HOST_NODE_PARAMS *params, .host = params)
EXEC_SET(cuGraphExecEventRecordNodeSetEvent, EVENT_RECORD, CUevent event, .event = event)
EXEC_SET(cuGraphExecEventWaitNodeSetEvent, WAIT_EVENT, CUevent event, .event = event)
EXEC_SET(cuGraphExecChildGraphNodeSetParams, GRAPH, CUgraph child, .child = child)

SIM_EXPORT CUresult CUDAAPI cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams)
{
    sim_exec *exec;
    size_t index;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(own_node(hGraphExec, hNode, &exec, &index));
    NVS_SIM_CHECK(nodeParams != NULL && nodeParams->type == exec->order[index]->type, CUDA_ERROR_INVALID_VALUE);
    return nvs_sim_node_set(exec->order[index], nvs_sim_params_of(nodeParams));
}

SIM_EXPORT CUresult CUDAAPI cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled)
{
    sim_exec *exec;
    size_t index;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(own_node(hGraphExec, hNode, &exec, &index));
    exec->disabled[index] = isEnabled == 0;
    return CUDA_SUCCESS;
}

/* The new graph must have nodes of the same types, in the same order, with the same edges. */
static CUgraphExecUpdateResult difference(sim_graph *old, sim_graph *new)
{
    size_t index = 0;
    if (old->count != new->count)
        return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    for (sim_node *a = old->nodes, *b = new->nodes; a != NULL; a = a->next, b = b->next, index++)
        a->mark = b->mark = index;
    for (sim_node *a = old->nodes, *b = new->nodes; a != NULL; a = a->next, b = b->next) {
        if (a->type != b->type)
            return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
        if (a->dependencies.count != b->dependencies.count)
            return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        for (size_t i = 0; i < a->dependencies.count; i++)
            if (a->dependencies.all[i]->mark != b->dependencies.all[i]->mark)
                return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    }
    return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

static CUresult update(CUgraphExec exec_handle, CUgraph graph_handle, CUgraphExecUpdateResult *why)
{
    sim_exec *exec;
    sim_graph *graph, *copy;
    sim_node **order;
    *why = CU_GRAPH_EXEC_UPDATE_ERROR;
    NVS_SIM_TRY(nvs_sim_exec(exec_handle, &exec));
    NVS_SIM_TRY(nvs_sim_graph(graph_handle, &graph));
    *why = difference(exec->graph, graph);
    if (*why != CU_GRAPH_EXEC_UPDATE_SUCCESS)
        return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    NVS_SIM_TRY(nvs_sim_graph_clone(graph, &copy));
    for (sim_node *a = exec->graph->nodes, *b = copy->nodes; a != NULL; a = a->next, b = b->next)
        b->id = a->id; /* the nodes of the original graph still address the executable */
    const CUresult result = nvs_sim_graph_sort(copy, &order);
    if (result != CUDA_SUCCESS) {
        nvs_sim_graph_free(copy);
        return result;
    }
    nvs_sim_exec_memory_close(&exec->memory);
    nvs_sim_graph_free(exec->graph);
    free(exec->order);
    exec->graph = copy;
    exec->order = order;
    return nvs_sim_exec_memory_open(&exec->memory, graph, order, copy->count);
}

SIM_EXPORT CUresult CUDAAPI cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo)
{
    CUgraphExecUpdateResult why;
    NVS_SIM_ENTER();
    CUresult result = update(hGraphExec, hGraph, &why);
    if (resultInfo != NULL)
        *resultInfo = (CUgraphExecUpdateResultInfo){.result = why};
    return result;
}

SIM_EXPORT CUresult CUDAAPI cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out,
                                              CUgraphExecUpdateResult *updateResult_out)
{
    CUgraphExecUpdateResultInfo info;
    CUresult result = cuGraphExecUpdate_v2(hGraphExec, hGraph, &info);
    if (hErrorNode_out != NULL)
        *hErrorNode_out = NULL;
    if (updateResult_out != NULL)
        *updateResult_out = info.result;
    return result;
}
