/* Stream capture: work that is submitted to a capturing stream becomes a node of a graph.
 *
 * While captures are active, calls that would wait for them, or join them by mistake, are errors and invalidate them.
 */
#include "graph/graph.h"

#include <stdlib.h>

typedef struct sim_capture {
    struct sim_capture *next;
    uint64_t id;
    uint64_t thread;
    CUstreamCaptureMode mode;
    sim_graph *graph;
    sim_stream *origin;
    bool into_existing; /* the graph is the caller's and stays after a failed capture */
    bool invalid;
} sim_capture;

static sim_capture *captures; /* all active captures */

#define EACH_STREAM(stream)                                                                                           \
    for (int device = 0; device < nvs_sim_device_count; device++)                                                     \
        for (sim_context *context = nvs_sim_devices[device].contexts; context != NULL; context = context->next)       \
            for (sim_stream *stream = context->streams.all; stream != NULL; stream = stream->next)

static _Thread_local CUstreamCaptureMode thread_mode;

CUresult nvs_sim_capture_unsafe(void)
{
    CUstreamCaptureMode own = thread_mode;
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

/* The legacy stream waits for blocking streams, so it cannot be used while one of them captures. */
static CUresult implicit(sim_stream *stream, bool invalidates)
{
    CUresult result = CUDA_SUCCESS;
    if (captures == NULL || !nvs_sim_is_legacy(stream))
        return CUDA_SUCCESS;
    for (sim_stream *other = stream->context->streams.all; other != NULL; other = other->next)
        if (other->capture.of != NULL && (other->flags & CU_STREAM_NON_BLOCKING) == 0) {
            other->capture.of->invalid = other->capture.of->invalid || invalidates;
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    return result;
}

CUresult nvs_sim_capture_implicit(sim_stream *stream) { return implicit(stream, true); }

CUresult nvs_sim_capture_check(sim_stream *stream)
{
    if (captures == NULL)
        return CUDA_SUCCESS;
    if (stream->capture.of != NULL) {
        CUresult result = stream->capture.of->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        stream->capture.of->invalid = true;
        return result;
    }
    return nvs_sim_capture_implicit(stream);
}

bool nvs_sim_capture_context(sim_context *context)
{
    bool found = false;
    for (sim_stream *stream = captures != NULL ? context->streams.all : NULL; stream != NULL; stream = stream->next)
        if (stream->capture.of != NULL) {
            stream->capture.of->invalid = true;
            found = true;
        }
    return found;
}

static CUresult status_of(sim_stream *stream, CUstreamCaptureStatus *out)
{
    NVS_SIM_TRY(implicit(stream, false));
    const sim_capture *capture = stream->capture.of;
    *out = capture == NULL    ? CU_STREAM_CAPTURE_STATUS_NONE
           : capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                              : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus)
{
    NVS_SIM_ENTER_FIND(sim_stream *stream, nvs_sim_stream(hStream, &stream));
    NVS_SIM_CHECK(captureStatus != NULL, CUDA_ERROR_INVALID_VALUE);
    return status_of(stream, captureStatus);
}

SIM_EXPORT CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(mode != NULL && (unsigned)*mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* Recording. */

static CUresult set_tail(sim_stream *stream, sim_node *const *nodes, size_t count)
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
    case OP_WRITE_VALUE:
    case OP_WAIT_VALUE: return CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
    default: return CU_GRAPH_NODE_TYPE_EMPTY;
    }
}

static CUresult append(sim_stream *stream, CUgraphNodeType type, sim_node **out)
{
    if (stream->capture.of->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    NVS_SIM_TRY(nvs_sim_node_new(stream->capture.of->graph, type, stream->capture.tail.all, stream->capture.tail.count, out));
    return set_tail(stream, out, 1);
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
    sim_capture *capture = captures;
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

/* Begin, end and state of captures. */

static void stop(sim_stream *stream)
{
    free(stream->capture.tail.all);
    stream->capture = (sim_stream_capture){0};
}

static CUresult begin(CUstream handle, CUstreamCaptureMode mode, sim_graph *graph, const CUgraphNode *dependencies, size_t count)
{
    sim_stream *stream;
    NVS_SIM_TRY(nvs_sim_stream(handle, &stream));
    if (nvs_sim_is_legacy(stream))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture.of != NULL)
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
    stream->capture.of = capture;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuStreamBeginCapture_v2, (CUstream hStream, CUstreamCaptureMode mode), begin(hStream, mode, NULL, NULL, 0))

SIM_EXPORT CUresult CUDAAPI cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
                                                        const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                                        CUstreamCaptureMode mode)
{
    NVS_SIM_ENTER_FIND(sim_graph *graph, nvs_sim_graph(hGraph, &graph));
    return begin(hStream, mode, graph, dependencies, numDependencies);
}

/* The origin waits for the last nodes of each other stream. */
static bool all_joined(const sim_capture *capture)
{
    const sim_nodes *ends = &capture->origin->capture.tail;
    EACH_STREAM(stream)
        for (size_t i = 0; stream->capture.of == capture && i < stream->capture.tail.count; i++) {
            bool reached = false;
            for (size_t k = 0; k < ends->count; k++)
                reached = reached || nvs_sim_node_reaches(ends->all[k], stream->capture.tail.all[i]);
            if (!reached)
                return false;
        }
    return true;
}

static void drop(sim_capture *capture, bool keeps_graph)
{
    sim_capture **link = &captures;
    EACH_STREAM(stream)
        if (stream->capture.of == capture)
            stop(stream);
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    if (!capture->into_existing && !keeps_graph)
        nvs_sim_graph_free(capture->graph);
    free(capture);
}

SIM_EXPORT CUresult CUDAAPI cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
    NVS_SIM_ENTER_FIND(sim_stream *stream, nvs_sim_stream(hStream, &stream));
    sim_capture *capture = stream->capture.of;
    NVS_SIM_CHECK(capture != NULL, CUDA_ERROR_ILLEGAL_STATE);
    NVS_SIM_CHECK(capture->origin == stream, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    NVS_SIM_CHECK(capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED || capture->thread == nvs_sim_thread_number(),
                  CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    const CUresult result = capture->invalid       ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                            : !all_joined(capture) ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                                                   : CUDA_SUCCESS;
    if (phGraph != NULL)
        *phGraph = result == CUDA_SUCCESS ? (CUgraph)(void *)capture->graph : NULL;
    drop(capture, result == CUDA_SUCCESS && phGraph != NULL);
    return result;
}

/* As in driver 580, the captures of a context end with it. */
void nvs_sim_capture_end_all(sim_context *context)
{
    for (sim_capture *capture = captures, *next; capture != NULL; capture = next) {
        next = capture->next;
        if (capture->origin->context == context)
            drop(capture, false);
    }
    (void)nvs_sim_capture_context(context); /* captures that began in other contexts and include streams of this one */
    for (sim_stream *stream = context->streams.all; stream != NULL; stream = stream->next)
        stop(stream);
}

static CUresult info(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                     const CUgraphNode **dependencies, const CUgraphEdgeData **data, size_t *count)
{
    sim_stream *stream;
    if (status == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = nvs_sim_stream(handle, &stream);
    if (result == CUDA_SUCCESS)
        result = status_of(stream, status);
    if (result != CUDA_SUCCESS || *status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return result;
    if (id != NULL)
        *id = stream->capture.of->id;
    if (graph != NULL)
        *graph = (CUgraph)(void *)stream->capture.of->graph;
    if (dependencies != NULL)
        *dependencies = (const CUgraphNode *)(const void *)stream->capture.tail.all;
    if (data != NULL)
        *data = NULL;
    if (count != NULL)
        *count = stream->capture.tail.count;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuStreamGetCaptureInfo_v2, (CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out,
                                          CUgraph *graph_out, const CUgraphNode **dependencies_out, size_t *numDependencies_out),
              info(hStream, captureStatus_out, id_out, graph_out, dependencies_out, NULL, numDependencies_out))
NVS_SIM_ENTRY(cuStreamGetCaptureInfo_v3, (CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out,
                                          CUgraph *graph_out, const CUgraphNode **dependencies_out, const CUgraphEdgeData **edgeData_out,
                                          size_t *numDependencies_out),
              info(hStream, captureStatus_out, id_out, graph_out, dependencies_out, edgeData_out, numDependencies_out))

static CUresult update(CUstream handle, CUgraphNode *dependencies, size_t count, unsigned flags)
{
    sim_stream *stream;
    NVS_SIM_TRY(nvs_sim_stream(handle, &stream));
    if (stream->capture.of == NULL)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (stream->capture.of->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    sim_node *const *nodes = (sim_node *const *)(void *)dependencies;
    if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES)
        return set_tail(stream, nodes, count);
    return nvs_sim_nodes_add(&stream->capture.tail, nodes, count);
}

NVS_SIM_ENTRY(cuStreamUpdateCaptureDependencies, (CUstream hStream, CUgraphNode *dependencies, size_t numDependencies, unsigned int flags),
              update(hStream, dependencies, numDependencies, flags))
NVS_SIM_ENTRY(cuStreamUpdateCaptureDependencies_v2, (CUstream hStream, CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData,
                                                     size_t numDependencies, unsigned int flags),
              update(hStream, dependencies, numDependencies, flags))
