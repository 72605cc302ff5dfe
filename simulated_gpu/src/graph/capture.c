/* Stream capture: work that is submitted to a capturing stream becomes a node. */
#include "graph/graph.h"

#include <stdlib.h>

CUresult nvs_sim_capture_set_tail(sim_stream *stream, sim_node *const *nodes, size_t count)
{
    sim_nodes tail = {0};
    const CUresult result = nvs_sim_nodes_add(&tail, nodes, count);
    free(result == CUDA_SUCCESS ? stream->capture.tail.all : tail.all);
    if (result == CUDA_SUCCESS)
        stream->capture.tail = tail;
    return result;
}

static CUgraphNodeType type_of(const sim_work *work)
{
    switch (work->kind) {
    case OP_KERNEL: return CU_GRAPH_NODE_TYPE_KERNEL;
    case OP_COPY: return CU_GRAPH_NODE_TYPE_MEMCPY;
    case OP_FILL: return CU_GRAPH_NODE_TYPE_MEMSET;
    case OP_HOST: return CU_GRAPH_NODE_TYPE_HOST;
    case OP_RECORD: return CU_GRAPH_NODE_TYPE_EVENT_RECORD;
    case OP_WAIT: return CU_GRAPH_NODE_TYPE_WAIT_EVENT;
    case OP_ALLOCATE: return CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    case OP_FREE: return CU_GRAPH_NODE_TYPE_MEM_FREE;
    case OP_WRITE_VALUE: return CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
    default: return CU_GRAPH_NODE_TYPE_EMPTY;
    }
}

static CUresult append(sim_stream *stream, CUgraphNodeType type, sim_node **out)
{
    if (stream->capture.of->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    NVS_SIM_TRY(nvs_sim_node_new(stream->capture.of->graph, type, stream->capture.tail.all, stream->capture.tail.count, out));
    return nvs_sim_capture_set_tail(stream, out, 1);
}

CUresult nvs_sim_capture_work(sim_stream *stream, const sim_work *work)
{
    sim_node *node;
    if (work->kind == OP_PREFETCH || work->kind == OP_CALLBACK) { /* there is no such type of node */
        stream->capture.of->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    NVS_SIM_TRY(append(stream, type_of(work), &node));
    node->work = *work;
    if (work->kind == OP_ALLOCATE)
        node->memory = nvs_sim_graph_memory_at(work->u.pointer);
    if (work->kind == OP_KERNEL)
        node->work.u.kernel.context = stream->context;
    return CUDA_SUCCESS;
}

static CUresult append_event(sim_stream *stream, CUgraphNodeType type, enum sim_op_kind kind, sim_event *event)
{
    sim_node *node;
    NVS_SIM_TRY(append(stream, type, &node));
    node->work = (sim_work){.kind = kind};
    node->event = event;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_capture_record(sim_stream *stream, sim_event *event, bool external)
{
    if (stream->capture.of->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (external)
        return append_event(stream, CU_GRAPH_NODE_TYPE_EVENT_RECORD, OP_RECORD, event);
    nvs_sim_event_reset(event);
    NVS_SIM_TRY(nvs_sim_nodes_add(&event->nodes, stream->capture.tail.all, stream->capture.tail.count));
    event->capture_id = stream->capture.of->id;
    return CUDA_SUCCESS;
}

static sim_capture *capture_named(uint64_t id)
{
    sim_capture *capture = nvs_sim_captures;
    while (capture != NULL && capture->id != id)
        capture = capture->next;
    return capture;
}

CUresult nvs_sim_capture_wait(sim_stream *stream, sim_event *event, bool external)
{
    sim_capture *source = event->capture_id != 0 ? capture_named(event->capture_id) : NULL;
    if (stream->capture.of != NULL && stream->capture.of->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (external && stream->capture.of != NULL)
        return append_event(stream, CU_GRAPH_NODE_TYPE_WAIT_EVENT, OP_WAIT, event);
    if (event->capture_id == 0) { /* recorded outside of a capture */
        stream->capture.of->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (source == NULL)
        return CUDA_ERROR_CAPTURED_EVENT; /* its capture has ended */
    if (stream->capture.of != NULL && stream->capture.of != source) {
        stream->capture.of->invalid = source->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (nvs_sim_is_legacy(stream)) {
        source->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    stream->capture.of = source;
    return nvs_sim_nodes_add(&stream->capture.tail, event->nodes.all, event->nodes.count);
}
