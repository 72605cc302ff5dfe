/* Instantiated graphs: a private copy of the graph and the order in which its nodes run.
 *
 * A launch queues the nodes one behind the other in the stream: parallel branches do not overlap here, which is one of the
 * orders that CUDA allows.  The launch takes one place in the launch queue.
 */
#include "graph/graph.h"

#include <stdlib.h>
#include <string.h>

typedef struct sim_exec {
    uint32_t magic;
    sim_graph *graph;
    sim_node **order;
    bool *disabled;
    sim_graph_hold hold;
    cuuint64_t flags;
    uint64_t id;
} sim_exec;

static void free_exec(sim_exec *exec)
{
    nvs_sim_graph_release(&exec->hold);
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
    CUresult result = nvs_sim_graph_find(handle, &graph);
    if (result != CUDA_SUCCESS || out == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    sim_exec *exec = calloc(1, sizeof *exec);
    if (exec == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    exec->magic = SIM_EXEC;
    exec->flags = flags;
    exec->id = nvs_sim_next_id++;
    result = nvs_sim_graph_clone(graph, &exec->graph);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_graph_sort(exec->graph, &exec->order);
    if (result == CUDA_SUCCESS && (exec->disabled = calloc(exec->graph->count + 1, sizeof *exec->disabled)) == NULL)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        result = nvs_sim_graph_hold(&exec->hold, graph, exec->order, exec->graph->count);
    if (result != CUDA_SUCCESS)
        free_exec(exec);
    else
        *out = (CUgraphExec)(void *)exec;
    return result;
}

SIM_EXPORT CUresult CUDAAPI cuGraphInstantiate(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer,
                                               size_t bufferSize)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(instantiate(phGraphExec, hGraph, 0));
}

SIM_EXPORT CUresult CUDAAPI cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer,
                                                  size_t bufferSize)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(instantiate(phGraphExec, hGraph, 0));
}

SIM_EXPORT CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(instantiate(phGraphExec, hGraph, flags));
}

SIM_EXPORT CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph,
                                                         CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(instantiateParams != NULL, CUDA_ERROR_INVALID_VALUE);
    CUresult result = instantiate(phGraphExec, hGraph, instantiateParams->flags);
    instantiateParams->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    instantiateParams->hErrNode_out = NULL;
    return nvs_sim_return(result);
}

static CUresult find(CUgraphExec handle, sim_exec **out)
{
    sim_exec *exec = (sim_exec *)(void *)handle;
    if (exec == NULL || exec->magic != SIM_EXEC)
        return CUDA_ERROR_INVALID_VALUE;
    *out = exec;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec hGraphExec)
{
    sim_exec *exec;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(find(hGraphExec, &exec));
    free_exec(exec);
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuGraphExecGetFlags(CUgraphExec hGraphExec, cuuint64_t *flags)
{
    sim_exec *exec;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(flags != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(hGraphExec, &exec));
    *flags = exec->flags;
    return nvs_sim_return(CUDA_SUCCESS);
}

/* --- a node on another GPU than the launch's stream: in between it is that one's turn --- */

static sim_context *away(const sim_stream *stream, const sim_work *work)
{
    sim_context *by = work->kind == OP_KERNEL ? work->u.by : NULL;
    if (work->kind == OP_FILL && work->u.fill.by != NULL)
        by = work->u.fill.by->contexts;
    return by != NULL && by->magic == SIM_CONTEXT && by->device != stream->context->device ? by : NULL;
}

static CUresult graph_stream(sim_context *context, sim_stream **out)
{
    *out = context->graph_stream;
    if (*out != NULL)
        return CUDA_SUCCESS;
    CUresult result = nvs_sim_stream_create(context, CU_STREAM_NON_BLOCKING, 0, out);
    context->graph_stream = result == CUDA_SUCCESS ? *out : NULL;
    return result;
}

/* The one goes on when the other has come so far. */
static CUresult queue_behind(sim_stream *later, sim_stream *earlier)
{
    sim_fence *fence = nvs_sim_fence_new();
    if (fence == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim_work works[2] = {{.kind = OP_RECORD, .u.fence = fence}, {.kind = OP_WAIT, .u.fence = fence}};
    fence->references++;
    CUresult result = nvs_sim_enqueue(earlier, &works[0], false, true);
    if (result != CUDA_SUCCESS) {
        nvs_sim_discard(&works[0]);
        nvs_sim_discard(&works[1]);
        return result;
    }
    result = nvs_sim_enqueue(later, &works[1], false, true);
    if (result != CUDA_SUCCESS)
        nvs_sim_discard(&works[1]);
    return result;
}

static CUresult queue_away(sim_stream *stream, sim_context *by, const sim_work *work)
{
    sim_stream *other;
    CUresult result = graph_stream(by, &other);
    if (result == CUDA_SUCCESS)
        result = queue_behind(other, stream);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_enqueue(other, work, false, true);
    return result == CUDA_SUCCESS ? queue_behind(stream, other) : result;
}

/* A node's work as it is queued: events get a fence of this launch. */
static CUresult queue_node(sim_stream *stream, const sim_node *node, bool counts)
{
    sim_work work = node->work;
    if (work.kind == OP_ALLOCATE || work.kind == OP_FREE)
        work = (sim_work){.kind = OP_EMPTY}; /* the memory of a graph stays where it is from launch to launch */
    if (work.kind == OP_WAIT) {
        if (node->event->fence == NULL)
            return CUDA_SUCCESS;
        work.u.fence = node->event->fence;
        work.u.fence->references++;
    }
    if (work.kind == OP_RECORD) {
        work.u.fence = nvs_sim_fence_new();
        if (work.u.fence == NULL)
            return CUDA_ERROR_OUT_OF_MEMORY;
        nvs_sim_event_reset(node->event);
        node->event->fence = work.u.fence;
        work.u.fence->references++;
    }
    sim_context *by = away(stream, &work);
    CUresult result = by != NULL ? queue_away(stream, by, &work) : nvs_sim_enqueue(stream, &work, counts, true);
    if (result != CUDA_SUCCESS)
        nvs_sim_discard(&work);
    return result;
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
    sim_exec *exec;
    sim_stream *stream;
    bool first = true;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(find(hGraphExec, &exec));
    NVS_SIM_TRY(nvs_sim_stream(hStream, &stream));
    if (stream->capture != NULL)
        return nvs_sim_return(nvs_sim_capture_check(stream)); /* what is ready cannot be captured */
    NVS_SIM_TRY(nvs_sim_capture_implicit(stream));
    NVS_SIM_TRY(nvs_sim_graph_allocate(&exec->hold, (exec->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) != 0));
    return nvs_sim_return(queue_graph(stream, exec->graph, exec->order, exec->disabled, &first));
}

SIM_EXPORT CUresult CUDAAPI cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream)
{
    sim_exec *exec;
    sim_stream *stream;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(find(hGraphExec, &exec));
    NVS_SIM_TRY(nvs_sim_stream(hStream, &stream));
    NVS_SIM_TRY(nvs_sim_graph_attach(&exec->hold));
    sim_work work = {.kind = OP_EMPTY};
    return nvs_sim_return(nvs_sim_submit(stream, &work));
}

/* Changing an exec, by the nodes of the graph that it was made from. */

static CUresult own_node(CUgraphExec exec_handle, CUgraphNode node_handle, sim_exec **exec, size_t *index)
{
    sim_node *node;
    CUresult result = find(exec_handle, exec);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_node_find(node_handle, &node);
    if (result != CUDA_SUCCESS)
        return result;
    for (size_t i = 0; i < (*exec)->graph->count; i++)
        if ((*exec)->order[i]->id == node->id) {
            *index = i;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult set_params(CUgraphExec exec_handle, CUgraphNode node, CUgraphNodeType type, const void *params, CUcontext context)
{
    sim_exec *exec;
    size_t index;
    CUresult result = own_node(exec_handle, node, &exec, &index);
    return result == CUDA_SUCCESS ? nvs_sim_node_set_raw(exec->order[index], type, params, context) : result;
}

#define EXEC_SET(name, kind, parameter, context)                                                \
    SIM_EXPORT CUresult CUDAAPI name(CUgraphExec hGraphExec, CUgraphNode hNode, const parameter) \
    {                                                                                           \
        NVS_SIM_ENTER();                                                                        \
        return nvs_sim_return(set_params(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_##kind, params, context)); \
    }
#define COMMA ,

EXEC_SET(cuGraphExecKernelNodeSetParams_v2, KERNEL, CUDA_KERNEL_NODE_PARAMS *params, NULL)
EXEC_SET(cuGraphExecMemcpyNodeSetParams, MEMCPY, CUDA_MEMCPY3D *params COMMA CUcontext ctx, ctx)
EXEC_SET(cuGraphExecMemsetNodeSetParams, MEMSET, CUDA_MEMSET_NODE_PARAMS *params COMMA CUcontext ctx, ctx)
EXEC_SET(cuGraphExecHostNodeSetParams, HOST, CUDA_HOST_NODE_PARAMS *params, NULL)

SIM_EXPORT CUresult CUDAAPI cuGraphExecEventRecordNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(set_params(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event, NULL));
}

SIM_EXPORT CUresult CUDAAPI cuGraphExecEventWaitNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(set_params(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event, NULL));
}

SIM_EXPORT CUresult CUDAAPI cuGraphExecChildGraphNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(set_params(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_GRAPH, childGraph, NULL));
}

SIM_EXPORT CUresult CUDAAPI cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams)
{
    sim_exec *exec;
    size_t index;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(own_node(hGraphExec, hNode, &exec, &index));
    return nvs_sim_return(nvs_sim_node_set_general(exec->order[index], nodeParams));
}

SIM_EXPORT CUresult CUDAAPI cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled)
{
    sim_exec *exec;
    size_t index;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(own_node(hGraphExec, hNode, &exec, &index));
    exec->disabled[index] = isEnabled == 0;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuGraphNodeGetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int *isEnabled)
{
    sim_exec *exec;
    size_t index;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(isEnabled != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(own_node(hGraphExec, hNode, &exec, &index));
    *isEnabled = !exec->disabled[index];
    return nvs_sim_return(CUDA_SUCCESS);
}

/* The new graph must have the same nodes in the same order, as far as types and edges go. */
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
        if (a->dependency_count != b->dependency_count)
            return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        for (size_t i = 0; i < a->dependency_count; i++)
            if (a->dependencies[i]->mark != b->dependencies[i]->mark)
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
    CUresult result = find(exec_handle, &exec);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_graph_find(graph_handle, &graph);
    if (result != CUDA_SUCCESS)
        return result;
    *why = difference(exec->graph, graph);
    if (*why != CU_GRAPH_EXEC_UPDATE_SUCCESS)
        return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    result = nvs_sim_graph_clone(graph, &copy);
    if (result != CUDA_SUCCESS)
        return result;
    for (sim_node *a = exec->graph->nodes, *b = copy->nodes; a != NULL; a = a->next, b = b->next)
        b->id = a->id; /* the exec is still addressed by the nodes of its first graph */
    result = nvs_sim_graph_sort(copy, &order);
    if (result != CUDA_SUCCESS) {
        nvs_sim_graph_free(copy);
        return result;
    }
    nvs_sim_graph_release(&exec->hold);
    nvs_sim_graph_free(exec->graph);
    free(exec->order);
    exec->graph = copy;
    exec->order = order;
    return nvs_sim_graph_hold(&exec->hold, graph, order, copy->count);
}

SIM_EXPORT CUresult CUDAAPI cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out,
                                              CUgraphExecUpdateResult *updateResult_out)
{
    CUgraphExecUpdateResult why;
    NVS_SIM_ENTER();
    CUresult result = update(hGraphExec, hGraph, &why);
    if (hErrorNode_out != NULL)
        *hErrorNode_out = NULL;
    if (updateResult_out != NULL)
        *updateResult_out = why;
    return nvs_sim_return(result);
}

SIM_EXPORT CUresult CUDAAPI cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo)
{
    CUgraphExecUpdateResult why;
    NVS_SIM_ENTER();
    CUresult result = update(hGraphExec, hGraph, &why);
    if (resultInfo != NULL)
        *resultInfo = (CUgraphExecUpdateResultInfo){.result = why};
    return nvs_sim_return(result);
}
