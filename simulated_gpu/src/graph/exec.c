/* Executables: a private copy of a graph, and the order in which its nodes run.
 *
 * A launch queues the nodes one after the other in the stream: parallel branches do not overlap, which CUDA allows.  The launch takes
 * one place in the launch queue.  A node on another GPU runs on a stream of that GPU, and the stream of the launch waits for it.
 * Changes of an executable are addressed by the nodes of its original graph.
 */
#include "graph/graph.h"

#include <stdlib.h>

typedef struct sim_exec {
    uint32_t magic;
    sim_graph *graph;
    sim_node **order;
    bool *disabled;
    sim_exec_memory memory;
    cuuint64_t flags;
} sim_exec;

static void free_exec(sim_exec *exec)
{
    nvs_sim_exec_memory_close(&exec->memory);
    if (exec->graph != NULL)
        nvs_sim_graph_free(exec->graph);
    free(exec->order);
    free(exec->disabled);
    exec->magic = 0;
    free(exec);
}

static CUresult instantiate(CUgraphExec *out, CUgraph handle, cuuint64_t flags)
{
    sim_graph *graph;
    NVS_SIM_TRY(nvs_sim_graph(handle, &graph));
    NVS_SIM_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    sim_exec *exec = calloc(1, sizeof *exec);
    if (exec == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    exec->magic = SIM_EXEC;
    exec->flags = flags;
    CUresult result = nvs_sim_graph_clone(graph, &exec->graph);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_graph_sort(exec->graph, &exec->order);
    if (result == CUDA_SUCCESS && (exec->disabled = calloc(exec->graph->count + 1, sizeof *exec->disabled)) == NULL)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        result = nvs_sim_exec_memory_open(&exec->memory, graph, exec->order, exec->graph->count);
    if (result != CUDA_SUCCESS)
        free_exec(exec);
    else
        *out = (CUgraphExec)(void *)exec;
    return result;
}

/* Programs built with CUDA 11 call this and cuGraphExecUpdate. */
NVS_SIM_ENTRY(cuGraphInstantiate_v2, (CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize),
              instantiate(phGraphExec, hGraph, 0))

NVS_SIM_ENTRY(cuGraphInstantiateWithFlags, (CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags),
              instantiate(phGraphExec, hGraph, flags))

SIM_EXPORT CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph,
                                                         CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(instantiateParams != NULL, CUDA_ERROR_INVALID_VALUE);
    CUresult result = instantiate(phGraphExec, hGraph, instantiateParams->flags);
    instantiateParams->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    instantiateParams->hErrNode_out = NULL;
    return result;
}

static NVS_SIM_DEFINE_FIND(find_exec, CUgraphExec, sim_exec, SIM_EXEC, CUDA_ERROR_INVALID_VALUE)

SIM_EXPORT CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec hGraphExec)
{
    NVS_SIM_ENTER_FIND(sim_exec *exec, find_exec(hGraphExec, &exec));
    free_exec(exec);
    return CUDA_SUCCESS;
}

/* Launches. */

/* The context of a node that runs on another GPU than the launch's stream; else NULL. */
static sim_context *other_context(const sim_stream *stream, const sim_work *work)
{
    sim_context *by = work->kind == OP_KERNEL ? work->u.kernel.context : NULL;
    if (work->kind == OP_FILL && work->u.fill.rights != NULL)
        by = work->u.fill.rights->contexts;
    return by != NULL && by->magic == SIM_CONTEXT && by->device != stream->context->device ? by : NULL;
}

/* Future work of one stream waits for the present work of the other. */
static CUresult queue_behind(sim_stream *later, sim_stream *earlier)
{
    sim_fence *fence = nvs_sim_fence_new();
    if (fence == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim_work works[2] = {{.kind = OP_RECORD, .u.fence = fence}, {.kind = OP_WAIT, .u.fence = fence}};
    fence->references++;
    const CUresult result = nvs_sim_enqueue(earlier, &works[0], false, true);
    if (result == CUDA_SUCCESS)
        return nvs_sim_enqueue(later, &works[1], false, true);
    nvs_sim_discard(&works[1]);
    return result;
}

static CUresult queue_on_other_gpu(sim_stream *stream, sim_context *by, const sim_work *work)
{
    if (by->streams.graph == NULL)
        NVS_SIM_TRY(nvs_sim_stream_create(by, CU_STREAM_NON_BLOCKING, 0, &by->streams.graph));
    NVS_SIM_TRY(queue_behind(by->streams.graph, stream));
    NVS_SIM_TRY(nvs_sim_enqueue(by->streams.graph, work, false, true));
    return queue_behind(stream, by->streams.graph);
}

/* Queues the work of a node; its events get a fence of this launch. */
static CUresult queue_node(sim_stream *stream, const sim_node *node, bool counts)
{
    sim_work work = node->work;
    if (work.kind == OP_ALLOCATE || work.kind == OP_FREE)
        work = (sim_work){.kind = OP_EMPTY}; /* a launch keeps the memory of the graph */
    if (work.kind == OP_WAIT) {
        if (node->event->fence == NULL)
            return CUDA_SUCCESS;
        work.u.fence = node->event->fence;
        work.u.fence->references++;
    }
    if (work.kind == OP_RECORD && (work.u.fence = nvs_sim_event_begin(node->event)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim_context *by = other_context(stream, &work);
    return by != NULL ? queue_on_other_gpu(stream, by, &work) : nvs_sim_enqueue(stream, &work, counts, true);
}

static CUresult queue_graph(sim_stream *stream, sim_graph *graph, sim_node *const *order, const bool *disabled, bool *first)
{
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < graph->count && result == CUDA_SUCCESS; i++) {
        sim_node *node = order[i];
        if (disabled != NULL && disabled[i])
            continue;
        if (node->child != NULL) {
            sim_node **inner;
            result = nvs_sim_graph_sort(node->child, &inner);
            if (result == CUDA_SUCCESS) {
                result = queue_graph(stream, node->child, inner, NULL, first);
                free(inner);
            }
            continue;
        }
        result = queue_node(stream, node, *first);
        *first = false;
    }
    return result;
}

SIM_EXPORT CUresult CUDAAPI cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)
{
    sim_stream *stream;
    bool first = true;
    NVS_SIM_ENTER_FIND(sim_exec *exec, find_exec(hGraphExec, &exec));
    NVS_SIM_TRY(nvs_sim_stream(hStream, &stream));
    if (stream->capture.of != NULL)
        return nvs_sim_capture_check(stream); /* the launch of an executable cannot be captured */
    NVS_SIM_TRY(nvs_sim_capture_implicit(stream));
    NVS_SIM_TRY(nvs_sim_exec_memory_allocate(&exec->memory, (exec->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) != 0));
    return queue_graph(stream, exec->graph, exec->order, exec->disabled, &first);
}

SIM_EXPORT CUresult CUDAAPI cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream)
{
    sim_stream *stream;
    NVS_SIM_ENTER_FIND(sim_exec *exec, find_exec(hGraphExec, &exec));
    NVS_SIM_TRY(nvs_sim_stream(hStream, &stream));
    NVS_SIM_TRY(nvs_sim_exec_memory_attach(&exec->memory));
    sim_work work = {.kind = OP_EMPTY};
    return nvs_sim_submit(stream, &work);
}

/* Changes. */

static CUresult own_node(CUgraphExec exec_handle, CUgraphNode node_handle, sim_exec **exec, size_t *index)
{
    sim_node *node;
    NVS_SIM_TRY(find_exec(exec_handle, exec));
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

NVS_SIM_ENTRY(cuGraphExecNodeSetParams, (CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *params),
              params == NULL ? CUDA_ERROR_INVALID_VALUE : set_params(exec, node, params->type, nvs_sim_params_of(params)))

SIM_EXPORT CUresult CUDAAPI cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled)
{
    sim_exec *exec;
    size_t index;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(own_node(hGraphExec, hNode, &exec, &index));
    exec->disabled[index] = isEnabled == 0;
    return CUDA_SUCCESS;
}

NVS_SIM_GETTER(cuGraphExecGetFlags, (CUgraphExec hGraphExec, cuuint64_t *flags), sim_exec *exec, find_exec(hGraphExec, &exec), flags,
               exec->flags)

SIM_EXPORT CUresult CUDAAPI cuGraphNodeGetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int *isEnabled)
{
    sim_exec *exec;
    size_t index;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(isEnabled != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(own_node(hGraphExec, hNode, &exec, &index));
    *isEnabled = !exec->disabled[index];
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

static CUresult update_exec(CUgraphExec exec_handle, CUgraph graph_handle, CUgraphExecUpdateResult *why)
{
    sim_exec *exec;
    sim_graph *graph, *copy;
    sim_node **order;
    *why = CU_GRAPH_EXEC_UPDATE_ERROR;
    NVS_SIM_TRY(find_exec(exec_handle, &exec));
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
    CUresult result = update_exec(hGraphExec, hGraph, &why);
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
