/* Nodes of each type: adding them, reading and changing what they do. */
#include "graph/graph.h"

#include <string.h>

CUresult nvs_sim_node_set_kernel(sim_node *node, const CUDA_KERNEL_NODE_PARAMS *params)
{
    CUresult result = nvs_sim_kernel_work(params, &node->work);
    if (result != CUDA_SUCCESS)
        return result;
    node->kernel = *params;
    const bool copies = node->work.u.bytes != 0;
    const uint64_t values[3] = {copies ? node->work.u.to : node->work.duration_ns, node->work.u.from, node->work.u.bytes / 4};
    for (int i = 0; i < 3; i++) {
        node->values[i] = values[i];
        node->arguments[i] = &node->values[i];
    }
    node->kernel.kernelParams = params->kernelParams != NULL ? node->arguments : NULL;
    node->kernel.extra = NULL;
    node->work.u.kernel = node->kernel;
    const sim_function *function = (const sim_function *)(const void *)params->func; /* nvs_sim_kernel_work has looked at it */
    if (function != NULL && function->module->context != NULL) /* then the context beside it counts for nothing */
        node->work.u.by = function->module->context;
    else if (params->ctx == NULL || nvs_sim_context(params->ctx, &node->work.u.by) != CUDA_SUCCESS)
        node->work.u.by = nvs_sim_current();
    return CUDA_SUCCESS;
}

/* The GPU that a copy or fill runs on: that of the context it is told, else the one it had, else the current one. */
static CUresult runs_on(CUcontext told, const sim_device *before, const sim_device **out)
{
    sim_context *context;
    *out = before;
    if (told == NULL && before != NULL)
        return CUDA_SUCCESS;
    CUresult result = nvs_sim_context(told, &context);
    if (result == CUDA_SUCCESS)
        *out = context->device;
    return result;
}

static CUresult set_copy(sim_node *node, const CUDA_MEMCPY3D *params, CUcontext context)
{
    sim_work work;
    const sim_device *by;
    CUresult result = runs_on(context, node->work.kind == OP_COPY ? node->work.u.copy.target_by : NULL, &by);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_copy_work(params, by, &work);
    if (result == CUDA_SUCCESS) {
        node->work = work;
        node->copy = *params;
    }
    return result;
}

static CUresult set_fill(sim_node *node, const CUDA_MEMSET_NODE_PARAMS *params, CUcontext context)
{
    sim_work work;
    const sim_device *by;
    CUresult result = runs_on(context, node->work.kind == OP_FILL ? node->work.u.fill.by : NULL, &by);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_fill_work(params, by, &work);
    if (result == CUDA_SUCCESS) {
        node->work = work;
        node->fill = *params;
    }
    return result;
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
    sim_event *event = (sim_event *)(void *)handle;
    if (event == NULL || event->magic != SIM_EVENT)
        return CUDA_ERROR_INVALID_HANDLE;
    node->event = event;
    node->work = (sim_work){.kind = node->type == CU_GRAPH_NODE_TYPE_EVENT_RECORD ? OP_RECORD : OP_WAIT};
    return CUDA_SUCCESS;
}

static CUresult set_child(sim_node *node, CUgraph handle)
{
    sim_graph *child, *copy;
    CUresult result = nvs_sim_graph_find(handle, &child);
    if (result == CUDA_SUCCESS && nvs_sim_graph_allocates(child))
        result = CUDA_ERROR_NOT_SUPPORTED;
    if (result == CUDA_SUCCESS)
        result = nvs_sim_graph_clone(child, &copy);
    if (result != CUDA_SUCCESS)
        return result;
    if (node->child != NULL)
        nvs_sim_graph_free(node->child);
    copy->owned = true;
    node->child = copy;
    return CUDA_SUCCESS;
}

/* The address that is told is the same each time it runs. */
static CUresult set_alloc(sim_node *node, CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
    sim_context *context = nvs_sim_current();
    sim_device *device;
    sim_graph_memory *memory;
    if (params->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE || params->poolProps.handleTypes != CU_MEM_HANDLE_TYPE_NONE)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = nvs_sim_device(params->poolProps.location.id, &device);
    if (result != CUDA_SUCCESS || node->memory != NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_SUPPORTED;
    if (context == NULL || context->device != device)
        context = &device->primary;
    result = nvs_sim_graph_memory_new(context, params->bytesize, &memory);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t accessors = UINT64_C(1) << device->ordinal;
    for (size_t i = 0; i < params->accessDescCount; i++)
        accessors |= UINT64_C(1) << params->accessDescs[i].location.id;
    node->memory = memory;
    params->dptr = nvs_sim_graph_memory_pointer(memory);
    nvs_sim_find((uintptr_t)params->dptr)->accessed_by = accessors;
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

/* What a node of this type is told; which member counts is the type's business. */
typedef struct told {
    CUcontext context; /* of copies and fills; NULL: not told */
    union {
        const CUDA_KERNEL_NODE_PARAMS *kernel;
        const CUDA_MEMCPY3D *copy;
        const CUDA_MEMSET_NODE_PARAMS *fill;
        const CUDA_HOST_NODE_PARAMS *host;
        CUevent event;
        CUgraph child;
        CUDA_MEM_ALLOC_NODE_PARAMS *alloc; /* dptr: told to the caller */
        const CUdeviceptr *free;
    };
} told;

static CUresult set(sim_node *node, told params)
{
    switch (node->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: return nvs_sim_node_set_kernel(node, params.kernel);
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

static CUresult add(CUgraphNode *out, CUgraph handle, const CUgraphNode *dependencies, size_t count, CUgraphNodeType type,
                    told params)
{
    sim_graph *graph;
    sim_node *node;
    if (out == NULL || (count != 0 && dependencies == NULL))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = nvs_sim_graph_find(handle, &graph);
    if (result == CUDA_SUCCESS) {
        sim_node **last = graph->last;
        result = nvs_sim_node_new(graph, type, (sim_node *const *)(const void *)dependencies, count, &node);
        if (result == CUDA_SUCCESS && (result = set(node, params)) != CUDA_SUCCESS) {
            *last = NULL;
            graph->last = last;
            graph->count--;
            nvs_sim_node_free(node);
        }
    }
    if (result == CUDA_SUCCESS)
        *out = (CUgraphNode)(void *)node;
    return result;
}

#define ADD(name, type, parameter, value)                                                                                \
    SIM_EXPORT CUresult CUDAAPI name(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,          \
                                     size_t numDependencies parameter)                                                   \
    {                                                                                                                    \
        NVS_SIM_ENTER();                                                                                                 \
        return nvs_sim_return(add(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_##type, value)); \
    }
#define COMMA ,

ADD(cuGraphAddKernelNode_v2, KERNEL, COMMA const CUDA_KERNEL_NODE_PARAMS *params, (told){.kernel = params})
ADD(cuGraphAddMemcpyNode, MEMCPY, COMMA const CUDA_MEMCPY3D *params COMMA CUcontext ctx, ((told){.context = ctx, .copy = params}))
ADD(cuGraphAddMemsetNode, MEMSET, COMMA const CUDA_MEMSET_NODE_PARAMS *params COMMA CUcontext ctx, ((told){.context = ctx, .fill = params}))
ADD(cuGraphAddHostNode, HOST, COMMA const CUDA_HOST_NODE_PARAMS *params, (told){.host = params})
ADD(cuGraphAddEmptyNode, EMPTY, , (told){.event = NULL})
ADD(cuGraphAddChildGraphNode, GRAPH, COMMA CUgraph child, (told){.child = child})
ADD(cuGraphAddEventRecordNode, EVENT_RECORD, COMMA CUevent event, (told){.event = event})
ADD(cuGraphAddEventWaitNode, WAIT_EVENT, COMMA CUevent event, (told){.event = event})
ADD(cuGraphAddMemAllocNode, MEM_ALLOC, COMMA CUDA_MEM_ALLOC_NODE_PARAMS *params, (told){.alloc = params})
ADD(cuGraphAddMemFreeNode, MEM_FREE, COMMA CUdeviceptr dptr, (told){.free = &dptr})

/* cuda.h before 12 knew no CUkernel: the same without the two last members. */
static CUDA_KERNEL_NODE_PARAMS widen(const CUDA_KERNEL_NODE_PARAMS_v1 *old)
{
    return (CUDA_KERNEL_NODE_PARAMS){.func = old->func, .gridDimX = old->gridDimX, .gridDimY = old->gridDimY, .gridDimZ = old->gridDimZ,
                                     .blockDimX = old->blockDimX, .blockDimY = old->blockDimY, .blockDimZ = old->blockDimZ,
                                     .sharedMemBytes = old->sharedMemBytes, .kernelParams = old->kernelParams, .extra = old->extra};
}

SIM_EXPORT CUresult CUDAAPI cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                                 size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(nodeParams != NULL, CUDA_ERROR_INVALID_VALUE);
    const CUDA_KERNEL_NODE_PARAMS params = widen(nodeParams);
    return nvs_sim_return(add(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_KERNEL, (told){.kernel = &params}));
}

/* The general form, which carries any of them. */
typedef struct general {
    CUDA_KERNEL_NODE_PARAMS kernel;
    CUDA_MEMCPY3D copy;
    CUDA_MEMSET_NODE_PARAMS fill;
    CUDA_HOST_NODE_PARAMS host;
    CUDA_MEM_ALLOC_NODE_PARAMS alloc;
    told params;
} general;

static CUresult unpack(const CUgraphNodeParams *from, general *out)
{
    switch (from->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
        const CUDA_KERNEL_NODE_PARAMS_v3 *k = &from->kernel;
        out->kernel = (CUDA_KERNEL_NODE_PARAMS){.func = k->func, .gridDimX = k->gridDimX, .gridDimY = k->gridDimY, .gridDimZ = k->gridDimZ,
                                                .blockDimX = k->blockDimX, .blockDimY = k->blockDimY, .blockDimZ = k->blockDimZ,
                                                .sharedMemBytes = k->sharedMemBytes, .kernelParams = k->kernelParams,
                                                .extra = k->extra, .kern = k->kern, .ctx = k->ctx};
        out->params.kernel = &out->kernel;
        return CUDA_SUCCESS;
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        out->copy = from->memcpy.copyParams;
        out->params.copy = &out->copy;
        out->params.context = from->memcpy.copyCtx;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEMSET:
        out->fill = (CUDA_MEMSET_NODE_PARAMS){.dst = from->memset.dst, .pitch = from->memset.pitch, .value = from->memset.value,
                                              .elementSize = from->memset.elementSize, .width = from->memset.width,
                                              .height = from->memset.height};
        out->params.fill = &out->fill;
        out->params.context = from->memset.ctx;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_HOST:
        out->host = (CUDA_HOST_NODE_PARAMS){.fn = from->host.fn, .userData = from->host.userData};
        out->params.host = &out->host;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_GRAPH: out->params.child = from->graph.graph; return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: out->params.event = from->eventRecord.event; return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: out->params.event = from->eventWait.event; return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        out->alloc = (CUDA_MEM_ALLOC_NODE_PARAMS){.poolProps = from->alloc.poolProps, .accessDescs = from->alloc.accessDescs,
                                                  .accessDescCount = from->alloc.accessDescCount, .bytesize = from->alloc.bytesize};
        out->params.alloc = &out->alloc;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEM_FREE: out->params.free = &from->free.dptr; return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_EMPTY: return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

static CUresult add_general(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                            CUgraphNodeParams *params)
{
    general all = {0};
    CUresult result = params == NULL ? CUDA_ERROR_INVALID_VALUE : unpack(params, &all);
    if (result == CUDA_SUCCESS)
        result = add(out, graph, dependencies, count, params->type, all.params);
    if (result == CUDA_SUCCESS && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        params->alloc.dptr = all.alloc.dptr;
    return result;
}

SIM_EXPORT CUresult CUDAAPI cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                           size_t numDependencies, CUgraphNodeParams *nodeParams)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(add_general(phGraphNode, hGraph, dependencies, numDependencies, nodeParams));
}

SIM_EXPORT CUresult CUDAAPI cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                              const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                              CUgraphNodeParams *nodeParams)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(add_general(phGraphNode, hGraph, dependencies, numDependencies, nodeParams));
}

/* Reading and changing. */

static CUresult typed(CUgraphNode handle, CUgraphNodeType type, const void *given, sim_node **out)
{
    CUresult result = given == NULL ? CUDA_ERROR_INVALID_VALUE : nvs_sim_node_find(handle, out);
    return result == CUDA_SUCCESS && (*out)->type != type ? CUDA_ERROR_INVALID_VALUE : result;
}

/* Also declares `node`. */
#define ENTER_NODE(kind, given)                                                                 \
    sim_node *node;                                                                             \
    NVS_SIM_ENTER();                                                                            \
    NVS_SIM_TRY(typed(hNode, CU_GRAPH_NODE_TYPE_##kind, given, &node))

#define ACCESS(prefix, kind, type, read, member)                                                \
    SIM_EXPORT CUresult CUDAAPI prefix##GetParams##read(CUgraphNode hNode, type *nodeParams)    \
    {                                                                                           \
        ENTER_NODE(kind, nodeParams);                                                           \
        *nodeParams = node->member;                                                             \
        return nvs_sim_return(CUDA_SUCCESS);                                                    \
    }                                                                                           \
    SIM_EXPORT CUresult CUDAAPI prefix##SetParams##read(CUgraphNode hNode, const type *nodeParams) \
    {                                                                                           \
        ENTER_NODE(kind, nodeParams);                                                           \
        return nvs_sim_return(set(node, (told){.member = nodeParams}));                         \
    }

ACCESS(cuGraphKernelNode, KERNEL, CUDA_KERNEL_NODE_PARAMS, _v2, kernel)
ACCESS(cuGraphMemcpyNode, MEMCPY, CUDA_MEMCPY3D, , copy)
ACCESS(cuGraphMemsetNode, MEMSET, CUDA_MEMSET_NODE_PARAMS, , fill)

SIM_EXPORT CUresult CUDAAPI cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    ENTER_NODE(KERNEL, nodeParams);
    const CUDA_KERNEL_NODE_PARAMS *k = &node->kernel;
    *nodeParams = (CUDA_KERNEL_NODE_PARAMS_v1){.func = k->func, .gridDimX = k->gridDimX, .gridDimY = k->gridDimY, .gridDimZ = k->gridDimZ,
                                               .blockDimX = k->blockDimX, .blockDimY = k->blockDimY, .blockDimZ = k->blockDimZ,
                                               .sharedMemBytes = k->sharedMemBytes, .kernelParams = k->kernelParams};
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    ENTER_NODE(KERNEL, nodeParams);
    const CUDA_KERNEL_NODE_PARAMS params = widen(nodeParams);
    return nvs_sim_return(set(node, (told){.kernel = &params}));
}

SIM_EXPORT CUresult CUDAAPI cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams)
{
    ENTER_NODE(HOST, nodeParams);
    *nodeParams = (CUDA_HOST_NODE_PARAMS){.fn = node->work.u.host.function, .userData = node->work.u.host.data};
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams)
{
    ENTER_NODE(HOST, nodeParams);
    return nvs_sim_return(set(node, (told){.host = nodeParams}));
}

SIM_EXPORT CUresult CUDAAPI cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph *phGraph)
{
    ENTER_NODE(GRAPH, phGraph);
    *phGraph = (CUgraph)(void *)node->child;
    return nvs_sim_return(CUDA_SUCCESS);
}

#define EVENT_ACCESS(prefix, kind)                                                              \
    SIM_EXPORT CUresult CUDAAPI prefix##GetEvent(CUgraphNode hNode, CUevent *event_out)         \
    {                                                                                           \
        ENTER_NODE(kind, event_out);                                                            \
        *event_out = (CUevent)(void *)node->event;                                              \
        return nvs_sim_return(CUDA_SUCCESS);                                                    \
    }                                                                                           \
    SIM_EXPORT CUresult CUDAAPI prefix##SetEvent(CUgraphNode hNode, CUevent event)              \
    {                                                                                           \
        ENTER_NODE(kind, event);                                                                \
        return nvs_sim_return(set_event(node, event));                                          \
    }

EVENT_ACCESS(cuGraphEventRecordNode, EVENT_RECORD)
EVENT_ACCESS(cuGraphEventWaitNode, WAIT_EVENT)

SIM_EXPORT CUresult CUDAAPI cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams)
{
    general all = {0};
    sim_node *node;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(nodeParams != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(typed(hNode, nodeParams->type, nodeParams, &node));
    NVS_SIM_TRY(unpack(nodeParams, &all));
    return nvs_sim_return(set(node, all.params));
}

SIM_EXPORT CUresult CUDAAPI cuGraphMemAllocNodeGetParams(CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS *params_out)
{
    ENTER_NODE(MEM_ALLOC, params_out);
    const sim_allocation *allocation = nvs_sim_find((uintptr_t)node->work.u.pointer);
    NVS_SIM_CHECK(allocation != NULL, CUDA_ERROR_INVALID_VALUE); /* its context has ended */
    *params_out = (CUDA_MEM_ALLOC_NODE_PARAMS){.bytesize = allocation->bytes, .dptr = allocation->base};
    params_out->poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    params_out->poolProps.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = allocation->device->ordinal};
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuGraphMemFreeNodeGetParams(CUgraphNode hNode, CUdeviceptr *dptr_out)
{
    ENTER_NODE(MEM_FREE, dptr_out);
    *dptr_out = node->work.u.pointer;
    return nvs_sim_return(CUDA_SUCCESS);
}

/* The same for the copy of a node in an exec, which graph_api.c finds. */
CUresult nvs_sim_node_set_general(sim_node *node, const CUgraphNodeParams *params)
{
    general all = {0};
    if (params == NULL || params->type != node->type)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = unpack(params, &all);
    return result == CUDA_SUCCESS ? set(node, all.params) : result;
}

CUresult nvs_sim_node_set_raw(sim_node *node, CUgraphNodeType type, const void *params, CUcontext context)
{
    if (params == NULL || node->type != type)
        return CUDA_ERROR_INVALID_VALUE;
    switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: return set(node, (told){.kernel = params});
    case CU_GRAPH_NODE_TYPE_MEMCPY: return set(node, (told){.context = context, .copy = params});
    case CU_GRAPH_NODE_TYPE_MEMSET: return set(node, (told){.context = context, .fill = params});
    case CU_GRAPH_NODE_TYPE_HOST: return set(node, (told){.host = params});
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return set(node, (told){.event = (CUevent)(uintptr_t)params});
    case CU_GRAPH_NODE_TYPE_GRAPH: return set(node, (told){.child = (CUgraph)(uintptr_t)params});
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}
