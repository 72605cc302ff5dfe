/* Stream capture: which streams take part, what becomes a node, and which calls are forbidden meanwhile. */
#include "graph/graph.h"

#include <stdlib.h>
#include <string.h>

static sim_capture *captures;

static void stop(sim_stream *stream)
{
    free(stream->capture_tail);
    stream->capture = NULL;
    stream->capture_tail = NULL;
    stream->capture_tail_count = 0;
}

/* Every stream of every context: few, and only looked at around captures. */
static void each_stream(void (*visit)(sim_stream *, void *), void *argument)
{
    for (int i = 0; i < nvs_sim_device_count; i++)
        for (sim_context *context = nvs_sim_devices[i].contexts; context != NULL; context = context->next)
            for (sim_stream *stream = context->streams; stream != NULL; stream = stream->next)
                visit(stream, argument);
}

CUresult nvs_sim_capture_unsafe(void)
{
    CUstreamCaptureMode own = nvs_sim_thread.capture_mode;
    CUresult result = CUDA_SUCCESS;
    if (own == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    for (sim_capture *capture = captures; capture != NULL; capture = capture->next) {
        bool ours = capture->thread == nvs_sim_thread_number() && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        bool global = own == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (ours || global) {
            capture->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return result;
}

/* The legacy stream would wait for a blocking stream that is being captured. */
CUresult nvs_sim_capture_implicit(sim_stream *stream)
{
    CUresult result = CUDA_SUCCESS;
    if (captures == NULL || !stream->legacy)
        return CUDA_SUCCESS;
    for (sim_stream *other = stream->context->streams; other != NULL; other = other->next)
        if (other->capture != NULL && (other->flags & CU_STREAM_NON_BLOCKING) == 0) {
            other->capture->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    return result;
}

CUresult nvs_sim_capture_check(sim_stream *stream)
{
    if (captures == NULL)
        return CUDA_SUCCESS;
    if (stream->capture != NULL) {
        CUresult result = stream->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        stream->capture->invalid = true;
        return result;
    }
    return nvs_sim_capture_implicit(stream);
}

bool nvs_sim_capture_context(sim_context *context)
{
    bool found = false;
    for (sim_stream *stream = captures != NULL ? context->streams : NULL; stream != NULL; stream = stream->next)
        if (stream->capture != NULL) {
            stream->capture->invalid = true;
            found = true;
        }
    return found;
}

static CUresult set_tail(sim_stream *stream, sim_node *const *nodes, size_t count)
{
    sim_node **copy = malloc((count + 1) * sizeof *copy);
    if (copy == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (count != 0)
        memcpy(copy, nodes, count * sizeof *copy);
    free(stream->capture_tail);
    stream->capture_tail = copy;
    stream->capture_tail_count = count;
    return CUDA_SUCCESS;
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
    if (stream->capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    CUresult result = nvs_sim_node_new(stream->capture->graph, type, stream->capture_tail, stream->capture_tail_count, out);
    return result == CUDA_SUCCESS ? set_tail(stream, out, 1) : result;
}

CUresult nvs_sim_capture_add(sim_stream *stream, const sim_work *work)
{
    sim_node *node;
    if (work->kind == OP_PREFETCH || work->kind == OP_CALLBACK) { /* there is no node for it */
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    CUresult result = append(stream, type_of(work), &node);
    if (result != CUDA_SUCCESS)
        return result;
    node->work = *work;
    if (work->kind == OP_ALLOCATE)
        node->memory = nvs_sim_graph_memory_at(work->u.pointer);
    if (work->kind == OP_COPY)
        nvs_sim_copy_describe(&work->u.copy, &node->copy);
    if (work->kind == OP_FILL)
        node->fill = (CUDA_MEMSET_NODE_PARAMS){.dst = (CUdeviceptr)(uintptr_t)work->u.fill.target, .pitch = work->u.fill.pitch,
                                               .value = work->u.fill.value, .elementSize = work->u.fill.element,
                                               .width = work->u.fill.width, .height = work->u.fill.height};
    if (work->kind == OP_KERNEL) {
        result = nvs_sim_node_set_kernel(node, &work->u.kernel);
        node->work.u.by = stream->context;
    }
    return result;
}

CUresult nvs_sim_capture_record(sim_stream *stream, sim_event *event, bool external)
{
    sim_node *node;
    if (stream->capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (external) {
        CUresult result = append(stream, CU_GRAPH_NODE_TYPE_EVENT_RECORD, &node);
        if (result == CUDA_SUCCESS) {
            node->work = (sim_work){.kind = OP_RECORD};
            node->event = event;
        }
        return result;
    }
    nvs_sim_event_reset(event);
    event->nodes = malloc((stream->capture_tail_count + 1) * sizeof *event->nodes);
    if (event->nodes == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (stream->capture_tail_count != 0)
        memcpy(event->nodes, stream->capture_tail, stream->capture_tail_count * sizeof *event->nodes);
    event->node_count = stream->capture_tail_count;
    event->capture_id = stream->capture->id;
    return CUDA_SUCCESS;
}

static sim_capture *capture_named(uint64_t id)
{
    sim_capture *capture = captures;
    while (capture != NULL && capture->id != id)
        capture = capture->next;
    return capture;
}

static CUresult join(sim_stream *stream, const sim_event *event)
{
    size_t count = stream->capture_tail_count;
    sim_node **all = malloc((count + event->node_count + 1) * sizeof *all);
    if (all == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (count != 0)
        memcpy(all, stream->capture_tail, count * sizeof *all);
    for (size_t i = 0; i < event->node_count; i++) {
        bool known = false;
        for (size_t k = 0; k < count; k++)
            known = known || all[k] == event->nodes[i];
        if (!known)
            all[count++] = event->nodes[i];
    }
    CUresult result = set_tail(stream, all, count);
    free(all);
    return result;
}

CUresult nvs_sim_capture_wait(sim_stream *stream, sim_event *event, bool external, bool *handled)
{
    sim_capture *source = event->capture_id != 0 ? capture_named(event->capture_id) : NULL;
    sim_node *node;
    *handled = true;
    if (stream->capture != NULL && stream->capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (external && stream->capture != NULL) {
        CUresult result = append(stream, CU_GRAPH_NODE_TYPE_WAIT_EVENT, &node);
        if (result == CUDA_SUCCESS) {
            node->work = (sim_work){.kind = OP_WAIT};
            node->event = event;
        }
        return result;
    }
    if (event->capture_id == 0) { /* work outside of the capture */
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (source == NULL)
        return CUDA_ERROR_CAPTURED_EVENT; /* its capture has ended */
    if (stream->capture != NULL && stream->capture != source) {
        stream->capture->invalid = source->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (stream->legacy) {
        source->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    stream->capture = source;
    return join(stream, event);
}

static CUresult begin(CUstream handle, CUstreamCaptureMode mode, sim_graph *graph, const CUgraphNode *dependencies, size_t count)
{
    sim_stream *stream;
    CUresult result = nvs_sim_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture != NULL)
        return CUDA_ERROR_ILLEGAL_STATE;
    if ((unsigned)mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    sim_capture *capture = calloc(1, sizeof *capture);
    if (capture == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    capture->into_existing = graph != NULL;
    capture->graph = graph != NULL ? graph : nvs_sim_graph_new();
    if (capture->graph == NULL || set_tail(stream, (sim_node *const *)(const void *)dependencies, count) != CUDA_SUCCESS) {
        if (capture->graph != NULL && !capture->into_existing)
            nvs_sim_graph_free(capture->graph);
        free(capture);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    capture->id = nvs_sim_next_id++;
    capture->thread = nvs_sim_thread_number();
    capture->mode = mode;
    capture->origin = stream;
    capture->next = captures;
    captures = capture;
    stream->capture = capture;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuStreamBeginCapture(CUstream hStream)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(begin(hStream, CU_STREAM_CAPTURE_MODE_GLOBAL, NULL, NULL, 0));
}

SIM_EXPORT CUresult CUDAAPI cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(begin(hStream, mode, NULL, NULL, 0));
}

SIM_EXPORT CUresult CUDAAPI cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
                                                        const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                                        CUstreamCaptureMode mode)
{
    sim_graph *graph;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(nvs_sim_graph_find(hGraph, &graph));
    return nvs_sim_return(begin(hStream, mode, graph, dependencies, numDependencies));
}

typedef struct joining {
    sim_capture *capture;
    bool unjoined;
} joining;

static void check_joined(sim_stream *stream, void *argument)
{
    joining *state = argument;
    const sim_stream *origin = state->capture->origin;
    if (stream->capture != state->capture || stream == origin)
        return;
    for (size_t i = 0; i < stream->capture_tail_count; i++) {
        bool reached = false;
        for (size_t k = 0; k < origin->capture_tail_count; k++)
            reached = reached || nvs_sim_node_reaches(origin->capture_tail[k], stream->capture_tail[i]);
        state->unjoined = state->unjoined || !reached;
    }
}

static void stop_if_of(sim_stream *stream, void *argument)
{
    if (stream->capture == argument)
        stop(stream);
}

static void drop(sim_capture *capture, bool keeps_graph)
{
    sim_capture **link = &captures;
    each_stream(stop_if_of, capture);
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    if (!capture->into_existing && !keeps_graph)
        nvs_sim_graph_free(capture->graph);
    free(capture);
}

SIM_EXPORT CUresult CUDAAPI cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
    sim_stream *stream;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(nvs_sim_stream(hStream, &stream));
    sim_capture *capture = stream->capture;
    NVS_SIM_CHECK(capture != NULL, CUDA_ERROR_ILLEGAL_STATE);
    NVS_SIM_CHECK(capture->origin == stream, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    NVS_SIM_CHECK(capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED || capture->thread == nvs_sim_thread_number(),
                  CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    joining state = {.capture = capture};
    if (!capture->invalid)
        each_stream(check_joined, &state);
    CUresult result = capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                      : state.unjoined ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                                       : CUDA_SUCCESS;
    if (phGraph != NULL)
        *phGraph = result == CUDA_SUCCESS ? (CUgraph)(void *)capture->graph : NULL;
    drop(capture, result == CUDA_SUCCESS && phGraph != NULL);
    return nvs_sim_return(result);
}

/* As on a driver 580: a context ends with its captures. */
void nvs_sim_capture_context_gone(sim_context *context)
{
    for (sim_capture *capture = captures, *next; capture != NULL; capture = next) {
        next = capture->next;
        if (capture->origin->context == context)
            drop(capture, false);
    }
    (void)nvs_sim_capture_context(context); /* those of other contexts that had spread to this one */
    for (sim_stream *stream = context->streams; stream != NULL; stream = stream->next)
        stop(stream);
}

static CUstreamCaptureStatus status_of(const sim_stream *stream)
{
    if (stream->capture == NULL)
        return CU_STREAM_CAPTURE_STATUS_NONE;
    return stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

/* The legacy stream while a blocking one captures: an error, but one that does no harm. */
static CUresult implicit_only(const sim_stream *stream)
{
    for (sim_stream *other = stream->context->streams; stream->legacy && other != NULL; other = other->next)
        if (other->capture != NULL && (other->flags & CU_STREAM_NON_BLOCKING) == 0)
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus)
{
    sim_stream *stream;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(captureStatus != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_stream(hStream, &stream));
    NVS_SIM_TRY(implicit_only(stream));
    *captureStatus = status_of(stream);
    return nvs_sim_return(CUDA_SUCCESS);
}

static CUresult info(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                     const CUgraphNode **dependencies, const CUgraphEdgeData **data, size_t *count)
{
    sim_stream *stream;
    if (status == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = nvs_sim_stream(handle, &stream);
    if (result == CUDA_SUCCESS)
        result = implicit_only(stream);
    if (result != CUDA_SUCCESS)
        return result;
    *status = status_of(stream);
    if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return CUDA_SUCCESS;
    if (id != NULL)
        *id = stream->capture->id;
    if (graph != NULL)
        *graph = (CUgraph)(void *)stream->capture->graph;
    if (dependencies != NULL)
        *dependencies = (const CUgraphNode *)(const void *)stream->capture_tail;
    if (data != NULL)
        *data = NULL;
    if (count != NULL)
        *count = stream->capture_tail_count;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(info(hStream, captureStatus_out, id_out, NULL, NULL, NULL, NULL));
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus *captureStatus_out,
                                                      cuuint64_t *id_out, CUgraph *graph_out,
                                                      const CUgraphNode **dependencies_out, size_t *numDependencies_out)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(info(hStream, captureStatus_out, id_out, graph_out, dependencies_out, NULL, numDependencies_out));
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus *captureStatus_out,
                                                      cuuint64_t *id_out, CUgraph *graph_out,
                                                      const CUgraphNode **dependencies_out, const CUgraphEdgeData **edgeData_out,
                                                      size_t *numDependencies_out)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(info(hStream, captureStatus_out, id_out, graph_out, dependencies_out, edgeData_out, numDependencies_out));
}

SIM_EXPORT CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(mode != NULL && (unsigned)*mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    CUstreamCaptureMode before = nvs_sim_thread.capture_mode;
    nvs_sim_thread.capture_mode = *mode;
    *mode = before;
    return nvs_sim_return(CUDA_SUCCESS);
}

static CUresult update(CUstream handle, CUgraphNode *dependencies, size_t count, unsigned flags)
{
    sim_stream *stream;
    CUresult result = nvs_sim_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream->capture == NULL)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (stream->capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    sim_event given = {.nodes = (sim_node **)(void *)dependencies, .node_count = count};
    if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES)
        return set_tail(stream, given.nodes, count);
    return join(stream, &given);
}

SIM_EXPORT CUresult CUDAAPI cuStreamUpdateCaptureDependencies(CUstream hStream, CUgraphNode *dependencies, size_t numDependencies,
                                                              unsigned int flags)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(update(hStream, dependencies, numDependencies, flags));
}

SIM_EXPORT CUresult CUDAAPI cuStreamUpdateCaptureDependencies_v2(CUstream hStream, CUgraphNode *dependencies,
                                                                 const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                                                 unsigned int flags)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(update(hStream, dependencies, numDependencies, flags));
}
