/* The parameters of each type of node become its work. */
#include "graph/graph.h"

CUresult nvs_sim_node_set_kernel(sim_node *node, const CUDA_KERNEL_NODE_PARAMS *params)
{
    NVS_SIM_TRY(nvs_sim_kernel_work(params, &node->work));
    node->record.kernel = *params;
    const sim_kernel *kernel = &node->work.u.kernel;
    const bool copies = kernel->bytes != 0;
    const uint64_t values[3] = {copies ? kernel->to : node->work.duration_ns, kernel->from, kernel->bytes / 4};
    for (int i = 0; i < 3; i++) {
        node->record.values[i] = values[i];
        node->record.arguments[i] = &node->record.values[i];
    }
    node->record.kernel.kernelParams = params->kernelParams != NULL ? node->record.arguments : NULL;
    node->record.kernel.extra = NULL;
    node->work.u.kernel.params = node->record.kernel;
    const sim_function *function = (const sim_function *)(const void *)params->func; /* nvs_sim_kernel_work has checked it */
    if (function != NULL && function->module->context != NULL) /* the given context is ignored */
        node->work.u.kernel.by = function->module->context;
    else if (params->ctx == NULL || nvs_sim_context(params->ctx, &node->work.u.kernel.by) != CUDA_SUCCESS)
        node->work.u.kernel.by = nvs_sim_current();
    return CUDA_SUCCESS;
}

/* The GPU of a copy or fill: that of the given context, else the GPU it had, else the current one. */
static CUresult runs_on(CUcontext given, const sim_device *before, const sim_device **out)
{
    sim_context *context;
    *out = before;
    if (given == NULL && before != NULL)
        return CUDA_SUCCESS;
    CUresult result = nvs_sim_context(given, &context);
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
        node->record.copy = *params;
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
        node->record.fill = *params;
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
    NVS_SIM_TRY(nvs_sim_event(handle, &node->event));
    node->work = (sim_work){.kind = node->type == CU_GRAPH_NODE_TYPE_EVENT_RECORD ? OP_RECORD : OP_WAIT};
    return CUDA_SUCCESS;
}

static CUresult set_child(sim_node *node, CUgraph handle)
{
    sim_graph *child, *copy;
    CUresult result = nvs_sim_graph(handle, &child);
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

/* The address is the same each time the node runs. */
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
    uint64_t accessors = UINT64_C(1) << device->ordinal;
    for (size_t i = 0; i < params->accessDescCount; i++)
        accessors |= UINT64_C(1) << params->accessDescs[i].location.id;
    result = nvs_sim_graph_memory_new(context, params->bytesize, accessors, &memory);
    if (result != CUDA_SUCCESS)
        return result;
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

/* Before CUDA 12 the last two members did not exist. */
CUDA_KERNEL_NODE_PARAMS nvs_sim_kernel_params_widen(const CUDA_KERNEL_NODE_PARAMS_v1 *old)
{
    return (CUDA_KERNEL_NODE_PARAMS){.func = old->func, .gridDimX = old->gridDimX, .gridDimY = old->gridDimY, .gridDimZ = old->gridDimZ,
                                     .blockDimX = old->blockDimX, .blockDimY = old->blockDimY, .blockDimZ = old->blockDimZ,
                                     .sharedMemBytes = old->sharedMemBytes, .kernelParams = old->kernelParams, .extra = old->extra};
}

CUresult nvs_sim_params_unpack(const CUgraphNodeParams *from, sim_general_params *out)
{
    switch (from->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
        const CUDA_KERNEL_NODE_PARAMS_v3 *k = &from->kernel;
        out->kernel = (CUDA_KERNEL_NODE_PARAMS){k->func,      k->gridDimX,       k->gridDimY,     k->gridDimZ, k->blockDimX, k->blockDimY,
                                                k->blockDimZ, k->sharedMemBytes, k->kernelParams, k->extra,    k->kern,      k->ctx};
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
