/* cuStream*, and work on a stream that is neither a launch nor a copy. */
#include "base/sim.h"

static CUresult create(CUstream *out, unsigned flags, int priority)
{
    sim_context *context = nvs_sim_current();
    sim_stream *stream;
    if (context == NULL)
        return nvs_sim_no_context();
    if (context->error != CUDA_SUCCESS)
        return context->error;
    if (out == NULL || (flags & ~(unsigned)CU_STREAM_NON_BLOCKING) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    CUresult result = nvs_sim_stream_create(context, flags, priority, &stream);
    if (result == CUDA_SUCCESS)
        *out = (CUstream)(void *)stream;
    return result;
}

SIM_EXPORT CUresult CUDAAPI cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(create(phStream, Flags, 0));
}

SIM_EXPORT CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(create(phStream, flags, priority));
}

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
    if (stream->capture != NULL)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    nvs_sim_stream_destroy(stream);
    return result == SIM_STREAM_DETACHED ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS; /* as a driver of version 580 answers */
}

SIM_EXPORT CUresult CUDAAPI cuStreamDestroy(CUstream hStream)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(destroy(hStream));
}

SIM_EXPORT CUresult CUDAAPI cuStreamDestroy_v2(CUstream hStream)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(destroy(hStream));
}

/* Also declares `stream`. */
#define ENTER_STREAM(handle)                                                                    \
    sim_stream *stream;                                                                         \
    NVS_SIM_ENTER();                                                                            \
    NVS_SIM_TRY(nvs_sim_stream(handle, &stream))

SIM_EXPORT CUresult CUDAAPI cuStreamSynchronize(CUstream hStream)
{
    ENTER_STREAM(hStream);
    NVS_SIM_TRY(nvs_sim_capture_check(stream));
    sim_context *context = stream->context;
    if (context->error == CUDA_SUCCESS)
        nvs_sim_stream_wait(stream);
    nvs_sim_pools_synchronized(context->device);
    return nvs_sim_return(context->error);
}

SIM_EXPORT CUresult CUDAAPI cuStreamQuery(CUstream hStream)
{
    ENTER_STREAM(hStream);
    NVS_SIM_TRY(nvs_sim_capture_check(stream));
    NVS_SIM_TRY(stream->context->error);
    bool idle = nvs_sim_stream_idle(stream);
    if (stream->legacy) /* it is behind all blocking streams */
        for (sim_stream *other = stream->context->streams; other != NULL; other = other->next)
            idle = idle && ((other->flags & CU_STREAM_NON_BLOCKING) != 0 || nvs_sim_stream_idle(other));
    return nvs_sim_return(idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetPriority(CUstream hStream, int *priority)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(priority != NULL, CUDA_ERROR_INVALID_VALUE);
    *priority = stream->priority;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetFlags(CUstream hStream, unsigned int *flags)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(flags != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = stream->flags;
    return nvs_sim_return(CUDA_SUCCESS);
}

/* As a driver 580 does, though only cuStreamGetId and cuStreamGetDevice of what asks about a stream. */
static CUresult refused_by_capture(sim_stream *stream)
{
    return stream->capture != NULL ? nvs_sim_capture_check(stream) : CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetId(CUstream hStream, unsigned long long *streamId)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(streamId != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(refused_by_capture(stream));
    *streamId = stream->id;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetDevice(CUstream hStream, CUdevice *device)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(device != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(refused_by_capture(stream));
    *device = stream->context->device->ordinal;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetCtx(CUstream hStream, CUcontext *pctx)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(pctx != NULL, CUDA_ERROR_INVALID_VALUE);
    *pctx = (CUcontext)(void *)stream->context;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetCtx_v2(CUstream hStream, CUcontext *pCtx, CUgreenCtx *pGreenCtx)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(pCtx != NULL && pGreenCtx != NULL, CUDA_ERROR_INVALID_VALUE);
    *pCtx = (CUcontext)(void *)stream->context;
    *pGreenCtx = NULL;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(callback != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    if (stream->capture != NULL)
        return nvs_sim_return(nvs_sim_capture_check(stream)); /* callbacks cannot be captured */
    sim_work work = {.kind = OP_CALLBACK, .u.host = {.callback = callback, .stream = hStream, .data = userData}};
    return nvs_sim_return(nvs_sim_submit(stream, &work));
}

SIM_EXPORT CUresult CUDAAPI cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(fn != NULL, CUDA_ERROR_INVALID_VALUE);
    sim_work work = {.kind = OP_HOST, .u.host = {.function = fn, .data = userData}};
    return nvs_sim_return(nvs_sim_submit(stream, &work));
}

SIM_EXPORT CUresult CUDAAPI cuStreamAttachMemAsync(CUstream hStream, CUdeviceptr dptr, size_t length, unsigned int flags)
{
    ENTER_STREAM(hStream);
    sim_allocation *allocation = nvs_sim_find((uintptr_t)dptr);
    NVS_SIM_CHECK(allocation != NULL && allocation->kind == MEM_MANAGED, CUDA_ERROR_INVALID_VALUE);
    sim_work work = {.kind = OP_EMPTY};
    return nvs_sim_return(nvs_sim_submit(stream, &work));
}

static CUresult write_value(CUstream handle, CUdeviceptr pointer, uint64_t value, uint32_t bytes)
{
    sim_stream *stream;
    CUresult result = nvs_sim_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (pointer % bytes != 0 || !nvs_sim_kernel_reaches(stream->context, (uintptr_t)pointer, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    sim_work work = {.kind = OP_WRITE_VALUE, .u.write = {.pointer = pointer, .value = value, .bytes = bytes}};
    return nvs_sim_submit(stream, &work);
}

SIM_EXPORT CUresult CUDAAPI cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(write_value(stream, addr, value, 4));
}

SIM_EXPORT CUresult CUDAAPI cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(write_value(stream, addr, value, 8));
}
