/* Begin, end and state of captures. */
#include "graph/graph.h"

#include <stdlib.h>

static void stop(sim_stream *stream)
{
    free(stream->capture.tail.all);
    stream->capture = (sim_stream_capture){0};
}

static void each_stream(void (*visit)(sim_stream *, void *), void *argument)
{
    for (int i = 0; i < nvs_sim_device_count; i++)
        for (sim_context *context = nvs_sim_devices[i].contexts; context != NULL; context = context->next)
            for (sim_stream *stream = context->streams.all; stream != NULL; stream = stream->next)
                visit(stream, argument);
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
    if (capture->graph == NULL || nvs_sim_capture_set_tail(stream, (sim_node *const *)(const void *)dependencies, count) != CUDA_SUCCESS) {
        if (capture->graph != NULL && !capture->into_existing)
            nvs_sim_graph_free(capture->graph);
        free(capture);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    capture->id = nvs_sim_next_id++;
    capture->thread = nvs_sim_thread_number();
    capture->mode = mode;
    capture->origin = stream;
    capture->next = nvs_sim_captures;
    nvs_sim_captures = capture;
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

typedef struct joining {
    sim_capture *capture;
    bool unjoined;
} joining;

static void check_joined(sim_stream *stream, void *argument)
{
    joining *state = argument;
    const sim_stream *origin = state->capture->origin;
    if (stream->capture.of != state->capture || stream == origin)
        return;
    for (size_t i = 0; i < stream->capture.tail.count; i++) {
        bool reached = false;
        for (size_t k = 0; k < origin->capture.tail.count; k++)
            reached = reached || nvs_sim_node_reaches(origin->capture.tail.all[k], stream->capture.tail.all[i]);
        state->unjoined = state->unjoined || !reached;
    }
}

static void stop_if_of(sim_stream *stream, void *argument)
{
    if (stream->capture.of == argument)
        stop(stream);
}

static void drop(sim_capture *capture, bool keeps_graph)
{
    sim_capture **link = &nvs_sim_captures;
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
    NVS_SIM_ENTER_FIND(sim_stream *stream, nvs_sim_stream(hStream, &stream));
    sim_capture *capture = stream->capture.of;
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
    return result;
}

/* As in driver 580, the captures of a context end with it. */
void nvs_sim_capture_end_all(sim_context *context)
{
    for (sim_capture *capture = nvs_sim_captures, *next; capture != NULL; capture = next) {
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
        result = nvs_sim_capture_status(stream, status);
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
        return nvs_sim_capture_set_tail(stream, nodes, count);
    return nvs_sim_nodes_add(&stream->capture.tail, nodes, count);
}

NVS_SIM_ENTRY(cuStreamUpdateCaptureDependencies, (CUstream hStream, CUgraphNode *dependencies, size_t numDependencies, unsigned int flags),
              update(hStream, dependencies, numDependencies, flags))
NVS_SIM_ENTRY(cuStreamUpdateCaptureDependencies_v2, (CUstream hStream, CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData,
                                                     size_t numDependencies, unsigned int flags),
              update(hStream, dependencies, numDependencies, flags))
