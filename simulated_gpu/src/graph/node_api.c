/* Nodes: adding them, reading and changing their parameters. */
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
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(nodeParams != NULL, CUDA_ERROR_INVALID_VALUE);
    const CUDA_KERNEL_NODE_PARAMS params = nvs_sim_kernel_params_widen(nodeParams);
    const sim_node_params all = {.kernel = &params};
    return add(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_KERNEL, all);
}

static CUresult add_general(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                            CUgraphNodeParams *params)
{
    sim_general_params all = {0};
    CUresult result = params == NULL ? CUDA_ERROR_INVALID_VALUE : nvs_sim_params_unpack(params, &all);
    if (result == CUDA_SUCCESS)
        result = add(out, graph, dependencies, count, params->type, all.params);
    if (result == CUDA_SUCCESS && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        params->alloc.dptr = all.alloc.dptr;
    return result;
}

NVS_SIM_ENTRY(cuGraphAddNode, (CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
                               CUgraphNodeParams *nodeParams),
              add_general(phGraphNode, hGraph, dependencies, numDependencies, nodeParams))
NVS_SIM_ENTRY(cuGraphAddNode_v2, (CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                  const CUgraphEdgeData *dependencyData, size_t numDependencies, CUgraphNodeParams *nodeParams),
              add_general(phGraphNode, hGraph, dependencies, numDependencies, nodeParams))

static CUresult typed(CUgraphNode handle, CUgraphNodeType type, const void *given, sim_node **out)
{
    CUresult result = given == NULL ? CUDA_ERROR_INVALID_VALUE : nvs_sim_node(handle, out);
    return result == CUDA_SUCCESS && (*out)->type != type ? CUDA_ERROR_INVALID_VALUE : result;
}

/* Also declares `node`. */
#define ENTER_NODE(kind, given)                                                                 \
    sim_node *node;                                                                             \
    NVS_SIM_ENTER();                                                                            \
    NVS_SIM_TRY(typed(hNode, CU_GRAPH_NODE_TYPE_##kind, given, &node))

#define ACCESS(prefix, kind, type, read, member)                                                   \
    SIM_EXPORT CUresult CUDAAPI prefix##GetParams##read(CUgraphNode hNode, type *nodeParams)       \
    {                                                                                              \
        ENTER_NODE(kind, nodeParams);                                                              \
        *nodeParams = node->record.member;                                                         \
        return CUDA_SUCCESS;                                                                       \
    }                                                                                              \
    SIM_EXPORT CUresult CUDAAPI prefix##SetParams##read(CUgraphNode hNode, const type *nodeParams) \
    {                                                                                              \
        ENTER_NODE(kind, nodeParams);                                                              \
        return nvs_sim_node_set(node, (sim_node_params){.member = nodeParams});                    \
    }

ACCESS(cuGraphKernelNode, KERNEL, CUDA_KERNEL_NODE_PARAMS, _v2, kernel)
ACCESS(cuGraphMemcpyNode, MEMCPY, CUDA_MEMCPY3D, , copy)
ACCESS(cuGraphMemsetNode, MEMSET, CUDA_MEMSET_NODE_PARAMS, , fill)

SIM_EXPORT CUresult CUDAAPI cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    ENTER_NODE(KERNEL, nodeParams);
    const CUDA_KERNEL_NODE_PARAMS *k = &node->record.kernel;
    *nodeParams = (CUDA_KERNEL_NODE_PARAMS_v1){.func = k->func, .gridDimX = k->gridDimX, .gridDimY = k->gridDimY, .gridDimZ = k->gridDimZ,
                                               .blockDimX = k->blockDimX, .blockDimY = k->blockDimY, .blockDimZ = k->blockDimZ,
                                               .sharedMemBytes = k->sharedMemBytes, .kernelParams = k->kernelParams};
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    ENTER_NODE(KERNEL, nodeParams);
    const CUDA_KERNEL_NODE_PARAMS params = nvs_sim_kernel_params_widen(nodeParams);
    return nvs_sim_node_set(node, (sim_node_params){.kernel = &params});
}

SIM_EXPORT CUresult CUDAAPI cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams)
{
    ENTER_NODE(HOST, nodeParams);
    *nodeParams = (CUDA_HOST_NODE_PARAMS){.fn = node->work.u.host.function, .userData = node->work.u.host.data};
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams)
{
    ENTER_NODE(HOST, nodeParams);
    return nvs_sim_node_set(node, (sim_node_params){.host = nodeParams});
}

SIM_EXPORT CUresult CUDAAPI cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph *phGraph)
{
    ENTER_NODE(GRAPH, phGraph);
    *phGraph = (CUgraph)(void *)node->child;
    return CUDA_SUCCESS;
}

#define EVENT_ACCESS(prefix, kind)                                                              \
    SIM_EXPORT CUresult CUDAAPI prefix##GetEvent(CUgraphNode hNode, CUevent *event_out)         \
    {                                                                                           \
        ENTER_NODE(kind, event_out);                                                            \
        *event_out = (CUevent)(void *)node->event;                                              \
        return CUDA_SUCCESS;                                                                    \
    }                                                                                           \
    SIM_EXPORT CUresult CUDAAPI prefix##SetEvent(CUgraphNode hNode, CUevent event)              \
    {                                                                                           \
        ENTER_NODE(kind, event);                                                                \
        return nvs_sim_node_set(node, (sim_node_params){.event = event});                       \
    }

EVENT_ACCESS(cuGraphEventRecordNode, EVENT_RECORD)
EVENT_ACCESS(cuGraphEventWaitNode, WAIT_EVENT)

SIM_EXPORT CUresult CUDAAPI cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams)
{
    sim_general_params all = {0};
    sim_node *node;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(nodeParams != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(typed(hNode, nodeParams->type, nodeParams, &node));
    NVS_SIM_TRY(nvs_sim_params_unpack(nodeParams, &all));
    return nvs_sim_node_set(node, all.params);
}

SIM_EXPORT CUresult CUDAAPI cuGraphMemAllocNodeGetParams(CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS *params_out)
{
    ENTER_NODE(MEM_ALLOC, params_out);
    const sim_allocation *allocation = nvs_sim_find((uintptr_t)node->work.u.pointer);
    NVS_SIM_CHECK(allocation != NULL, CUDA_ERROR_INVALID_VALUE); /* its context has ended */
    *params_out = (CUDA_MEM_ALLOC_NODE_PARAMS){.bytesize = allocation->bytes, .dptr = allocation->base};
    params_out->poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    params_out->poolProps.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = allocation->device->ordinal};
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGraphMemFreeNodeGetParams(CUgraphNode hNode, CUdeviceptr *dptr_out)
{
    ENTER_NODE(MEM_FREE, dptr_out);
    *dptr_out = node->work.u.pointer;
    return CUDA_SUCCESS;
}

/* Attributes have no effect here; they are checked and forgotten. */
SIM_EXPORT CUresult CUDAAPI cuGraphKernelNodeGetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, CUkernelNodeAttrValue *value_out)
{
    ENTER_NODE(KERNEL, value_out);
    memset(value_out, 0, sizeof *value_out);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGraphKernelNodeSetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue *value)
{
    ENTER_NODE(KERNEL, value);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGraphKernelNodeCopyAttributes(CUgraphNode dst, CUgraphNode src)
{
    sim_node *node;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(typed(src, CU_GRAPH_NODE_TYPE_KERNEL, src, &node));
    return typed(dst, CU_GRAPH_NODE_TYPE_KERNEL, dst, &node);
}
