/* Nodes: adding them and changing their parameters, which become the work of the node. */
#include "graph/graph.h"

#include <string.h>

static CUresult set_kernel(sim_node *node, const CUDA_KERNEL_NODE_PARAMS *params)
{
    NVS_SIM_TRY(nvs_sim_kernel_work(params, &node->work));
    NVS_SIM_CHECK(node->work.kind == OP_KERNEL, CUDA_ERROR_NOT_SUPPORTED);
    const sim_function *function = (const sim_function *)(const void *)params->func; /* nvs_sim_kernel_work has checked it */
    sim_context **context = &node->work.u.kernel.context;
    if (function != NULL && function->context != NULL) /* the given context is ignored */
        *context = function->context;
    else if (params->ctx == NULL || nvs_sim_context(params->ctx, context) != CUDA_SUCCESS)
        *context = nvs_sim_current();
    return CUDA_SUCCESS;
}

/* The GPU of a copy or fill: that of the given context, else the GPU it had, else the current one. */
static CUresult find_gpu(CUcontext given, const sim_device *before, const sim_device **out)
{
    sim_context *context;
    *out = before;
    if (given == NULL && before != NULL)
        return CUDA_SUCCESS;
    NVS_SIM_TRY(nvs_sim_context(given, &context));
    *out = context->device;
    return CUDA_SUCCESS;
}

static CUresult set_copy(sim_node *node, const CUDA_MEMCPY3D *params, CUcontext context)
{
    sim_work work;
    const sim_device *gpu;
    NVS_SIM_TRY(find_gpu(context, node->work.kind == OP_COPY ? node->work.u.copy.target.rights : NULL, &gpu));
    NVS_SIM_TRY(nvs_sim_copy_work(params, gpu, &work));
    node->work = work;
    return CUDA_SUCCESS;
}

static CUresult set_fill(sim_node *node, const CUDA_MEMSET_NODE_PARAMS *params, CUcontext context)
{
    sim_work work;
    const sim_device *gpu;
    NVS_SIM_TRY(find_gpu(context, node->work.kind == OP_FILL ? node->work.u.fill.rights : NULL, &gpu));
    NVS_SIM_TRY(nvs_sim_fill_work(params, gpu, &work));
    node->work = work;
    return CUDA_SUCCESS;
}

static CUresult set_host(sim_node *node, const CUDA_HOST_NODE_PARAMS *params)
{
    if (params->fn == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    node->work = (sim_work){.kind = OP_HOST, .u.host = {.function = params->fn, .data = params->userData}};
    return CUDA_SUCCESS;
}

static CUresult set_event(sim_node *node, CUevent handle)
{
    NVS_SIM_TRY(nvs_sim_event(handle, &node->event));
    node->work = (sim_work){.kind = node->type == CU_GRAPH_NODE_TYPE_EVENT_RECORD ? OP_RECORD : OP_WAIT};
    return CUDA_SUCCESS;
}

static CUresult set_child(sim_node *node, CUgraph handle)
{
    sim_graph *child, *copy;
    NVS_SIM_TRY(nvs_sim_graph(handle, &child));
    NVS_SIM_CHECK(!nvs_sim_graph_allocates(child), CUDA_ERROR_NOT_SUPPORTED);
    NVS_SIM_TRY(nvs_sim_graph_clone(child, &copy));
    if (node->child != NULL)
        nvs_sim_graph_free(node->child);
    copy->owned = true;
    node->child = copy;
    return CUDA_SUCCESS;
}

/* The address is the same each time the node runs. */
static CUresult set_alloc(sim_node *node, CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
    sim_context *context = nvs_sim_current();
    sim_device *device;
    sim_graph_memory *memory;
    if (params->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE || params->poolProps.handleTypes != CU_MEM_HANDLE_TYPE_NONE)
        return CUDA_ERROR_INVALID_VALUE;
    NVS_SIM_TRY(nvs_sim_device(params->poolProps.location.id, &device));
    NVS_SIM_CHECK(node->memory == NULL, CUDA_ERROR_NOT_SUPPORTED);
    if (context == NULL || context->device != device)
        context = &device->primary;
    uint64_t accessors = UINT64_C(1) << device->ordinal;
    for (size_t i = 0; i < params->accessDescCount; i++)
        accessors |= UINT64_C(1) << params->accessDescs[i].location.id;
    NVS_SIM_TRY(nvs_sim_graph_memory_new(context, params->bytesize, accessors, &memory));
    node->memory = memory;
    params->dptr = memory->pointer;
    node->work = (sim_work){.kind = OP_ALLOCATE, .u.pointer = params->dptr};
    return CUDA_SUCCESS;
}

static CUresult set_free(sim_node *node, const CUdeviceptr *pointer)
{
    if (nvs_sim_graph_memory_at(*pointer) == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    node->work = (sim_work){.kind = OP_FREE, .u.pointer = *pointer};
    return CUDA_SUCCESS;
}

CUresult nvs_sim_node_set(sim_node *node, sim_node_params params)
{
    switch (node->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: return set_kernel(node, params.kernel);
    case CU_GRAPH_NODE_TYPE_MEMCPY: return set_copy(node, params.copy, params.context);
    case CU_GRAPH_NODE_TYPE_MEMSET: return set_fill(node, params.fill, params.context);
    case CU_GRAPH_NODE_TYPE_HOST: return set_host(node, params.host);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return set_event(node, params.event);
    case CU_GRAPH_NODE_TYPE_GRAPH: return set_child(node, params.child);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: return params.alloc != NULL ? set_alloc(node, params.alloc) : CUDA_ERROR_INVALID_VALUE;
    case CU_GRAPH_NODE_TYPE_MEM_FREE: return set_free(node, params.free);
    case CU_GRAPH_NODE_TYPE_EMPTY: return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

/* The members of CUgraphNodeParams begin with the parameters of their own type. */
sim_node_params nvs_sim_params_of(CUgraphNodeParams *from)
{
    switch (from->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: return (sim_node_params){.any = &from->kernel};
    case CU_GRAPH_NODE_TYPE_MEMCPY: return (sim_node_params){.copy = &from->memcpy.copyParams, .context = from->memcpy.copyCtx};
    case CU_GRAPH_NODE_TYPE_MEMSET: return (sim_node_params){.any = &from->memset, .context = from->memset.ctx};
    case CU_GRAPH_NODE_TYPE_HOST: return (sim_node_params){.any = &from->host};
    case CU_GRAPH_NODE_TYPE_GRAPH: return (sim_node_params){.child = from->graph.graph};
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return (sim_node_params){.event = from->eventRecord.event};
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return (sim_node_params){.event = from->eventWait.event};
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: return (sim_node_params){.any = &from->alloc};
    case CU_GRAPH_NODE_TYPE_MEM_FREE: return (sim_node_params){.free = &from->free.dptr};
    default: return (sim_node_params){0};
    }
}

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

/* One row of a fill has no pitch here. */
NVS_SIM_GETTER(cuGraphMemsetNodeGetParams, (CUgraphNode hNode, CUDA_MEMSET_NODE_PARAMS *nodeParams), sim_node *node,
               find(hNode, CU_GRAPH_NODE_TYPE_MEMSET, &node), nodeParams,
               ((CUDA_MEMSET_NODE_PARAMS){.dst = (CUdeviceptr)(uintptr_t)node->work.u.fill.target, .pitch = node->work.u.fill.pitch,
                                          .value = node->work.u.fill.value, .elementSize = (unsigned)node->work.u.fill.element,
                                          .width = node->work.u.fill.width, .height = node->work.u.fill.height}))
NVS_SIM_GETTER(cuGraphEventRecordNodeGetEvent, (CUgraphNode hNode, CUevent *event_out), sim_node *node,
               find(hNode, CU_GRAPH_NODE_TYPE_EVENT_RECORD, &node), event_out, (CUevent)(void *)node->event)
NVS_SIM_GETTER(cuGraphEventWaitNodeGetEvent, (CUgraphNode hNode, CUevent *event_out), sim_node *node,
               find(hNode, CU_GRAPH_NODE_TYPE_WAIT_EVENT, &node), event_out, (CUevent)(void *)node->event)
NVS_SIM_GETTER(cuGraphChildGraphNodeGetGraph, (CUgraphNode hNode, CUgraph *phGraph), sim_node *node,
               find(hNode, CU_GRAPH_NODE_TYPE_GRAPH, &node), phGraph, (CUgraph)(void *)node->child)
NVS_SIM_GETTER(cuGraphHostNodeGetParams, (CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams), sim_node *node,
               find(hNode, CU_GRAPH_NODE_TYPE_HOST, &node), nodeParams,
               ((CUDA_HOST_NODE_PARAMS){.fn = node->work.u.host.function, .userData = node->work.u.host.data}))

NVS_SIM_GETTER(cuGraphMemFreeNodeGetParams, (CUgraphNode hNode, CUdeviceptr *dptr_out), sim_node *node,
               find(hNode, CU_GRAPH_NODE_TYPE_MEM_FREE, &node), dptr_out, node->work.u.pointer)
