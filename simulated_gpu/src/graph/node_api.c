/* Nodes: adding them and changing their parameters. */
#include "graph/graph.h"

#include <string.h>

static CUresult add(CUgraphNode *out, CUgraph handle, const CUgraphNode *dependencies, size_t count, CUgraphNodeType type,
                    sim_node_params params)
{
    sim_graph *graph;
    sim_node *node;
    if (out == NULL || (count != 0 && dependencies == NULL))
        return CUDA_ERROR_INVALID_VALUE;
    NVS_SIM_TRY(nvs_sim_graph(handle, &graph));
    NVS_SIM_TRY(nvs_sim_node_new(graph, type, (sim_node *const *)(const void *)dependencies, count, &node));
    const CUresult result = nvs_sim_node_set(node, params);
    if (result != CUDA_SUCCESS)
        nvs_sim_node_remove(node);
    else
        *out = (CUgraphNode)(void *)node;
    return result;
}

#define ADD(name, type, parameter, value)                                                                       \
    SIM_EXPORT CUresult CUDAAPI name(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, \
                                     size_t numDependencies parameter)                                          \
    {                                                                                                           \
        NVS_SIM_ENTER();                                                                                        \
        return add(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_##type, value);       \
    }
#define COMMA ,

ADD(cuGraphAddKernelNode_v2, KERNEL, COMMA const CUDA_KERNEL_NODE_PARAMS *params, (sim_node_params){.kernel = params})
ADD(cuGraphAddMemcpyNode, MEMCPY, COMMA const CUDA_MEMCPY3D *params COMMA CUcontext ctx,
    ((sim_node_params){.context = ctx, .copy = params}))
ADD(cuGraphAddMemsetNode, MEMSET, COMMA const CUDA_MEMSET_NODE_PARAMS *params COMMA CUcontext ctx,
    ((sim_node_params){.context = ctx, .fill = params}))
ADD(cuGraphAddHostNode, HOST, COMMA const CUDA_HOST_NODE_PARAMS *params, (sim_node_params){.host = params})
ADD(cuGraphAddEmptyNode, EMPTY, , (sim_node_params){.event = NULL})
ADD(cuGraphAddChildGraphNode, GRAPH, COMMA CUgraph child, (sim_node_params){.child = child})
ADD(cuGraphAddEventRecordNode, EVENT_RECORD, COMMA CUevent event, (sim_node_params){.event = event})
ADD(cuGraphAddEventWaitNode, WAIT_EVENT, COMMA CUevent event, (sim_node_params){.event = event})
ADD(cuGraphAddMemAllocNode, MEM_ALLOC, COMMA CUDA_MEM_ALLOC_NODE_PARAMS *params, (sim_node_params){.alloc = params})
ADD(cuGraphAddMemFreeNode, MEM_FREE, COMMA CUdeviceptr dptr, (sim_node_params){.free = &dptr})

SIM_EXPORT CUresult CUDAAPI cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                                 size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    CUDA_KERNEL_NODE_PARAMS params = {0};
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(nodeParams != NULL, CUDA_ERROR_INVALID_VALUE);
    memcpy(&params, nodeParams, sizeof *nodeParams); /* version 2 has two more members at its end */
    return add(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_KERNEL, (sim_node_params){.kernel = &params});
}

NVS_SIM_ENTRY(cuGraphAddNode, (CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count, CUgraphNodeParams *params),
              params == NULL ? CUDA_ERROR_INVALID_VALUE : add(out, graph, dependencies, count, params->type, nvs_sim_params_of(params)))
NVS_SIM_ENTRY(cuGraphAddNode_v2, (CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges,
                                  size_t count, CUgraphNodeParams *params),
              params == NULL ? CUDA_ERROR_INVALID_VALUE : add(out, graph, dependencies, count, params->type, nvs_sim_params_of(params)))

static CUresult find(CUgraphNode handle, CUgraphNodeType type, sim_node **out)
{
    NVS_SIM_TRY(nvs_sim_node(handle, out));
    return (*out)->type == type ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult set(CUgraphNode handle, CUgraphNodeType type, sim_node_params params)
{
    sim_node *node;
    NVS_SIM_CHECK(params.any != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(handle, type, &node));
    return nvs_sim_node_set(node, params);
}

#define SET(name, kind, parameter, member)                                                      \
    NVS_SIM_ENTRY(name, (CUgraphNode node, parameter), set(node, CU_GRAPH_NODE_TYPE_##kind, (sim_node_params){.member = params}))

SET(cuGraphKernelNodeSetParams_v2, KERNEL, const CUDA_KERNEL_NODE_PARAMS *params, kernel)
SET(cuGraphMemcpyNodeSetParams, MEMCPY, const CUDA_MEMCPY3D *params, copy)
SET(cuGraphMemsetNodeSetParams, MEMSET, const CUDA_MEMSET_NODE_PARAMS *params, fill)
SET(cuGraphHostNodeSetParams, HOST, const CUDA_HOST_NODE_PARAMS *params, host)
SET(cuGraphEventRecordNodeSetEvent, EVENT_RECORD, CUevent params, event)
SET(cuGraphEventWaitNodeSetEvent, WAIT_EVENT, CUevent params, event)

NVS_SIM_ENTRY(cuGraphNodeSetParams, (CUgraphNode node, CUgraphNodeParams *params),
              params == NULL ? CUDA_ERROR_INVALID_VALUE : set(node, params->type, nvs_sim_params_of(params)))

SIM_EXPORT CUresult CUDAAPI cuGraphMemAllocNodeGetParams(CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS *params_out)
{
    NVS_SIM_ENTER_FIND(sim_node *node, find(hNode, CU_GRAPH_NODE_TYPE_MEM_ALLOC, &node));
    const sim_allocation *allocation = nvs_sim_find((uintptr_t)node->work.u.pointer);
    NVS_SIM_CHECK(params_out != NULL && allocation != NULL, CUDA_ERROR_INVALID_VALUE); /* NULL: its context has ended */
    *params_out = (CUDA_MEM_ALLOC_NODE_PARAMS){.bytesize = allocation->bytes, .dptr = allocation->base};
    params_out->poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    params_out->poolProps.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = allocation->device->ordinal};
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams)
{
    NVS_SIM_ENTER_FIND(sim_node *node, find(hNode, CU_GRAPH_NODE_TYPE_HOST, &node));
    NVS_SIM_CHECK(nodeParams != NULL, CUDA_ERROR_INVALID_VALUE);
    *nodeParams = (CUDA_HOST_NODE_PARAMS){.fn = node->work.u.host.function, .userData = node->work.u.host.data};
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGraphMemFreeNodeGetParams(CUgraphNode hNode, CUdeviceptr *dptr_out)
{
    NVS_SIM_ENTER_FIND(sim_node *node, find(hNode, CU_GRAPH_NODE_TYPE_MEM_FREE, &node));
    NVS_SIM_CHECK(dptr_out != NULL, CUDA_ERROR_INVALID_VALUE);
    *dptr_out = node->work.u.pointer;
    return CUDA_SUCCESS;
}
