/* Active captures, and the calls that they forbid. */
#include "stream/stream.h"

sim_capture *nvs_sim_captures;

static _Thread_local CUstreamCaptureMode thread_mode;

CUresult nvs_sim_capture_unsafe(void)
{
    CUstreamCaptureMode own = thread_mode;
    CUresult result = CUDA_SUCCESS;
    if (own == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    for (sim_capture *capture = nvs_sim_captures; capture != NULL; capture = capture->next) {
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
    if (nvs_sim_captures == NULL || !nvs_sim_is_legacy(stream))
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
    if (nvs_sim_captures == NULL)
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
    for (sim_stream *stream = nvs_sim_captures != NULL ? context->streams.all : NULL; stream != NULL; stream = stream->next)
        if (stream->capture.of != NULL) {
            stream->capture.of->invalid = true;
            found = true;
        }
    return found;
}

CUresult nvs_sim_capture_status(sim_stream *stream, CUstreamCaptureStatus *out)
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
    return nvs_sim_capture_status(stream, captureStatus);
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
