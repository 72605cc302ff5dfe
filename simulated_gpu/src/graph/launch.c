/* Launches of executables.
 *
 * A launch queues the nodes one after the other in the stream: parallel branches do not overlap, which CUDA allows.  The launch takes
 * one place in the launch queue.  A node on another GPU runs on a stream of that GPU, and the stream of the launch waits for it.
 */
#include "graph/graph.h"

#include <stdlib.h>

/* The context of a node that runs on another GPU than the launch's stream; else NULL. */
static sim_context *other_context(const sim_stream *stream, const sim_work *work)
{
    sim_context *by = work->kind == OP_KERNEL ? work->u.kernel.context : NULL;
    if (work->kind == OP_FILL && work->u.fill.rights != NULL)
        by = work->u.fill.rights->contexts;
    return by != NULL && by->magic == SIM_CONTEXT && by->device != stream->context->device ? by : NULL;
}

static CUresult graph_stream(sim_context *context, sim_stream **out)
{
    *out = context->streams.graph;
    if (*out != NULL)
        return CUDA_SUCCESS;
    CUresult result = nvs_sim_stream_create(context, CU_STREAM_NON_BLOCKING, 0, out);
    context->streams.graph = result == CUDA_SUCCESS ? *out : NULL;
    return result;
}

/* Future work of one stream waits for the present work of the other. */
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

static CUresult queue_on_other_gpu(sim_stream *stream, sim_context *by, const sim_work *work)
{
    sim_stream *other;
    NVS_SIM_TRY(graph_stream(by, &other));
    NVS_SIM_TRY(queue_behind(other, stream));
    NVS_SIM_TRY(nvs_sim_enqueue(other, work, false, true));
    return queue_behind(stream, other);
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
    if (work.kind == OP_RECORD) {
        work.u.fence = nvs_sim_fence_new();
        if (work.u.fence == NULL)
            return CUDA_ERROR_OUT_OF_MEMORY;
        nvs_sim_event_reset(node->event);
        node->event->fence = work.u.fence;
        work.u.fence->references++;
    }
    sim_context *by = other_context(stream, &work);
    CUresult result = by != NULL ? queue_on_other_gpu(stream, by, &work) : nvs_sim_enqueue(stream, &work, counts, true);
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
    sim_stream *stream;
    bool first = true;
    NVS_SIM_ENTER_FIND(sim_exec *exec, nvs_sim_exec(hGraphExec, &exec));
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
    NVS_SIM_ENTER_FIND(sim_exec *exec, nvs_sim_exec(hGraphExec, &exec));
    NVS_SIM_TRY(nvs_sim_stream(hStream, &stream));
    NVS_SIM_TRY(nvs_sim_exec_memory_attach(&exec->memory));
    sim_work work = {.kind = OP_EMPTY};
    return nvs_sim_submit(stream, &work);
}
