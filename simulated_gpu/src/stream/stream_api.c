/* cuStream*, and host functions. */
#include "stream/stream.h"

static CUresult create(CUstream *out, unsigned flags, int priority)
{
    sim_context *context = nvs_sim_current();
    sim_stream *stream;
    NVS_SIM_CHECK(context != NULL, nvs_sim_no_context());
    NVS_SIM_TRY(context->error);
    NVS_SIM_CHECK(out != NULL && (flags & ~(unsigned)CU_STREAM_NON_BLOCKING) == 0, CUDA_ERROR_INVALID_VALUE);
    priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    if (nvs_sim_settings.context_bytes != 0) { /* the driver's own memory counts: driver 580 makes no stream on a full card */
        NVS_SIM_CHECK(nvs_sim_charge(context->device->gpu, 1), CUDA_ERROR_OUT_OF_MEMORY);
        nvs_sim_uncharge(context->device->gpu, 1);
    }
    NVS_SIM_TRY(nvs_sim_stream_create(context, flags, priority, &stream));
    *out = (CUstream)(void *)stream;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuStreamCreate, (CUstream *phStream, unsigned int Flags), create(phStream, Flags, 0))
NVS_SIM_ENTRY(cuStreamCreateWithPriority, (CUstream *phStream, unsigned int flags, int priority), create(phStream, flags, priority))

static CUresult destroy(CUstream handle)
{
    sim_stream *stream;
    if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = nvs_sim_stream(handle, &stream);
    if (result != CUDA_SUCCESS && result != SIM_STREAM_DETACHED)
        return result;
    if (stream->context->error != CUDA_SUCCESS)
        return stream->context->error;
    if (stream->capture.of != NULL)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    nvs_sim_stream_destroy(stream);
    return result == SIM_STREAM_DETACHED ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS; /* as in driver 580 */
}

NVS_SIM_ENTRY(cuStreamDestroy, (CUstream hStream), destroy(hStream))
NVS_SIM_ENTRY(cuStreamDestroy_v2, (CUstream hStream), destroy(hStream))

#define ENTER_STREAM(handle) NVS_SIM_ENTER_FIND(sim_stream *stream, nvs_sim_stream(handle, &stream))

SIM_EXPORT CUresult CUDAAPI cuStreamSynchronize(CUstream hStream)
{
    ENTER_STREAM(hStream);
    NVS_SIM_TRY(nvs_sim_capture_check(stream));
    sim_context *context = stream->context;
    if (context->error == CUDA_SUCCESS)
        nvs_sim_stream_wait(stream);
    nvs_sim_stream_hooks.synchronized(context->device);
    return context->error;
}

SIM_EXPORT CUresult CUDAAPI cuStreamQuery(CUstream hStream)
{
    ENTER_STREAM(hStream);
    NVS_SIM_TRY(nvs_sim_capture_check(stream));
    NVS_SIM_TRY(stream->context->error);
    bool idle = stream->queue.head == NULL;
    if (nvs_sim_is_legacy(stream)) /* it waits for all blocking streams */
        for (sim_stream *other = stream->context->streams.all; other != NULL; other = other->next)
            idle = idle && ((other->flags & CU_STREAM_NON_BLOCKING) != 0 || other->queue.head == NULL);
    return idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetPriority(CUstream hStream, int *priority)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(priority != NULL, CUDA_ERROR_INVALID_VALUE);
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetFlags(CUstream hStream, unsigned int *flags)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(flags != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

/* In driver 580, only cuStreamGetId and cuStreamGetDevice fail on a stream that captures. */
static CUresult refused_by_capture(sim_stream *stream)
{
    return stream->capture.of != NULL ? nvs_sim_capture_check(stream) : CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetId(CUstream hStream, unsigned long long *streamId)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(streamId != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(refused_by_capture(stream));
    *streamId = stream->id;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetDevice(CUstream hStream, CUdevice *device)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(device != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(refused_by_capture(stream));
    *device = stream->context->device->ordinal;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetCtx(CUstream hStream, CUcontext *pctx)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(pctx != NULL, CUDA_ERROR_INVALID_VALUE);
    *pctx = (CUcontext)(void *)stream->context;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetCtx_v2(CUstream hStream, CUcontext *pCtx, CUgreenCtx *pGreenCtx)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(pCtx != NULL && pGreenCtx != NULL, CUDA_ERROR_INVALID_VALUE);
    *pCtx = (CUcontext)(void *)stream->context;
    *pGreenCtx = NULL;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(callback != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    if (stream->capture.of != NULL)
        return nvs_sim_capture_check(stream); /* callbacks cannot be captured */
    sim_work work = {.kind = OP_CALLBACK, .u.host = {.callback = callback, .stream = hStream, .data = userData}};
    return nvs_sim_submit(stream, &work);
}

SIM_EXPORT CUresult CUDAAPI cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(fn != NULL, CUDA_ERROR_INVALID_VALUE);
    sim_work work = {.kind = OP_HOST, .u.host = {.function = fn, .data = userData}};
    return nvs_sim_submit(stream, &work);
}
