/* Streams and events as a program sees them, and host functions. */
#include "graph/graph.h"

#include <stdlib.h>
#include <string.h>

static CUresult create_stream(CUstream *out, unsigned flags, int priority)
{
    sim_context *context;
    sim_stream *stream;
    NVS_SIM_TRY(nvs_sim_need_current(&context));
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

NVS_SIM_ENTRY(cuStreamCreate, (CUstream *phStream, unsigned int Flags), create_stream(phStream, Flags, 0))
NVS_SIM_ENTRY(cuStreamCreateWithPriority, (CUstream *phStream, unsigned int flags, int priority), create_stream(phStream, flags, priority))

static CUresult destroy_stream(CUstream handle)
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

NVS_SIM_ENTRY(cuStreamDestroy, (CUstream hStream), destroy_stream(hStream))
NVS_SIM_ENTRY(cuStreamDestroy_v2, (CUstream hStream), destroy_stream(hStream))

#define ENTER_STREAM(handle) NVS_SIM_ENTER_FIND(sim_stream *stream, nvs_sim_stream(handle, &stream))

SIM_EXPORT CUresult CUDAAPI cuStreamSynchronize(CUstream hStream)
{
    ENTER_STREAM(hStream);
    NVS_SIM_TRY(nvs_sim_capture_check(stream));
    sim_context *context = stream->context;
    if (context->error == CUDA_SUCCESS)
        nvs_sim_stream_wait(stream);
    nvs_sim_pools_synchronized(context->device);
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

NVS_SIM_GETTER(cuStreamGetPriority, (CUstream hStream, int *priority), sim_stream *stream, nvs_sim_stream(hStream, &stream), priority,
               stream->priority)

NVS_SIM_GETTER(cuStreamGetFlags, (CUstream hStream, unsigned int *flags), sim_stream *stream, nvs_sim_stream(hStream, &stream), flags,
               stream->flags)

/* In driver 580, only cuStreamGetId and cuStreamGetDevice fail on a stream that captures. */
static CUresult find_unless_capturing(CUstream handle, sim_stream **out)
{
    NVS_SIM_TRY(nvs_sim_stream(handle, out));
    return (*out)->capture.of != NULL ? nvs_sim_capture_check(*out) : CUDA_SUCCESS;
}

NVS_SIM_GETTER(cuStreamGetId, (CUstream hStream, unsigned long long *streamId), sim_stream *stream,
               find_unless_capturing(hStream, &stream), streamId, stream->id)

NVS_SIM_GETTER(cuStreamGetDevice, (CUstream hStream, CUdevice *device), sim_stream *stream, find_unless_capturing(hStream, &stream),
               device, stream->context->device->ordinal)

NVS_SIM_GETTER(cuStreamGetCtx, (CUstream hStream, CUcontext *pctx), sim_stream *stream, nvs_sim_stream(hStream, &stream), pctx,
               (CUcontext)(void *)stream->context)

SIM_EXPORT CUresult CUDAAPI cuStreamGetCtx_v2(CUstream hStream, CUcontext *pCtx, CUgreenCtx *pGreenCtx)
{
    ENTER_STREAM(hStream);
    NVS_SIM_CHECK(pCtx != NULL && pGreenCtx != NULL, CUDA_ERROR_INVALID_VALUE);
    *pCtx = (CUcontext)(void *)stream->context;
    *pGreenCtx = NULL;
    return CUDA_SUCCESS;
}

/* Attributes: only the priority has a meaning here, and it is fixed. */

static CUresult find_attribute(CUstream handle, CUstreamAttrID id, const void *value, sim_stream **stream)
{
    const unsigned known = 1u << CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW | 1u << CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY |
                           1u << CU_LAUNCH_ATTRIBUTE_PRIORITY | 1u << CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP |
                           1u << CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN;
    NVS_SIM_CHECK(value != NULL && (unsigned)id < 32 && (known >> id & 1) != 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_stream(handle, stream));
    (*stream)->attributes[CU_LAUNCH_ATTRIBUTE_PRIORITY].priority = (*stream)->priority;
    return CUDA_SUCCESS;
}

NVS_SIM_GETTER(cuStreamGetAttribute, (CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue *value), sim_stream *stream,
               find_attribute(hStream, attr, value, &stream), value, stream->attributes[attr])

SIM_EXPORT CUresult CUDAAPI cuStreamSetAttribute(CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue *value)
{
    NVS_SIM_ENTER_FIND(sim_stream *stream, find_attribute(hStream, attr, value, &stream));
    stream->attributes[attr] = *value;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuStreamCopyAttributes(CUstream dst, CUstream src)
{
    sim_stream *from;
    NVS_SIM_ENTER_FIND(sim_stream *stream, nvs_sim_stream(dst, &stream));
    NVS_SIM_TRY(nvs_sim_stream(src, &from));
    memcpy(stream->attributes, from->attributes, sizeof stream->attributes);
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

/* Events.  Each recording has its own fence: a wait keeps the recording that it found. */

static sim_event *spare;

NVS_SIM_DEFINE_FIND(nvs_sim_event, CUevent, sim_event, SIM_EVENT, CUDA_ERROR_INVALID_HANDLE)

SIM_EXPORT CUresult CUDAAPI cuEventCreate(CUevent *phEvent, unsigned int Flags)
{
    const unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(context->error);
    NVS_SIM_CHECK(phEvent != NULL && (Flags & ~known) == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK((Flags & CU_EVENT_INTERPROCESS) == 0 || (Flags & CU_EVENT_DISABLE_TIMING) != 0, CUDA_ERROR_INVALID_VALUE);
    sim_event *event = spare;
    if (event != NULL)
        spare = event->next;
    else
        event = malloc(sizeof *event);
    NVS_SIM_CHECK(event != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *event = (sim_event){.magic = SIM_EVENT, .context = context, .flags = Flags};
    *phEvent = (CUevent)(void *)event;
    return CUDA_SUCCESS;
}

static CUresult destroy_event(CUevent handle)
{
    sim_event *event;
    NVS_SIM_TRY(nvs_sim_event(handle, &event));
    if (event->context->magic == SIM_CONTEXT && event->context->error != CUDA_SUCCESS)
        return event->context->error;
    nvs_sim_event_reset(event);
    event->magic = 0;
    event->next = spare;
    spare = event;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuEventDestroy, (CUevent hEvent), destroy_event(hEvent))
NVS_SIM_ENTRY(cuEventDestroy_v2, (CUevent hEvent), destroy_event(hEvent))

CUresult nvs_sim_event_record(sim_event *event, sim_stream *stream, unsigned flags)
{
    if (event->context->device != stream->context->device)
        return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture.of != NULL)
        return nvs_sim_capture_record(stream, event, (flags & CU_EVENT_RECORD_EXTERNAL) != 0);
    NVS_SIM_TRY(nvs_sim_capture_implicit(stream));
    sim_fence *fence = nvs_sim_event_begin(event);
    NVS_SIM_CHECK(fence != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    const sim_work work = {.kind = OP_RECORD, .u.fence = fence};
    const CUresult result = nvs_sim_enqueue(stream, &work, false, false);
    if (result != CUDA_SUCCESS)
        nvs_sim_event_reset(event);
    return result;
}

static CUresult find_both(CUevent event_handle, CUstream stream_handle, sim_event **event, sim_stream **stream)
{
    NVS_SIM_TRY(nvs_sim_event(event_handle, event));
    return nvs_sim_stream(stream_handle, stream);
}

static CUresult record(CUevent event_handle, CUstream stream_handle, unsigned flags)
{
    sim_event *event;
    sim_stream *stream;
    NVS_SIM_TRY(find_both(event_handle, stream_handle, &event, &stream));
    return nvs_sim_event_record(event, stream, flags);
}

NVS_SIM_ENTRY(cuEventRecord, (CUevent hEvent, CUstream hStream), record(hEvent, hStream, 0))
NVS_SIM_ENTRY(cuEventRecordWithFlags, (CUevent hEvent, CUstream hStream, unsigned int flags), record(hEvent, hStream, flags))

CUresult nvs_sim_event_wait(sim_event *event, sim_stream *stream, unsigned flags)
{
    if (event->capture_id != 0 || stream->capture.of != NULL)
        return nvs_sim_capture_wait(stream, event, (flags & CU_EVENT_WAIT_EXTERNAL) != 0);
    if (event->fence == NULL || event->fence->done)
        return stream->context->error;
    sim_work work = {.kind = OP_WAIT, .u.fence = event->fence};
    event->fence->references++;
    return nvs_sim_submit(stream, &work);
}

SIM_EXPORT CUresult CUDAAPI cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    sim_event *event;
    NVS_SIM_ENTER_FIND(sim_stream *stream, find_both(hEvent, hStream, &event, &stream));
    return nvs_sim_event_wait(event, stream, Flags);
}

SIM_EXPORT CUresult CUDAAPI cuEventQuery(CUevent hEvent)
{
    NVS_SIM_ENTER_FIND(sim_event *event, nvs_sim_event(hEvent, &event));
    NVS_SIM_CHECK(event->capture_id == 0, CUDA_ERROR_CAPTURED_EVENT);
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    NVS_SIM_TRY(event->context->error);
    return event->fence == NULL || event->fence->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

SIM_EXPORT CUresult CUDAAPI cuEventSynchronize(CUevent hEvent)
{
    NVS_SIM_ENTER_FIND(sim_event *event, nvs_sim_event(hEvent, &event));
    NVS_SIM_CHECK(event->capture_id == 0, CUDA_ERROR_CAPTURED_EVENT);
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    sim_fence *fence = event->fence;
    sim_context *context = event->context;
    if (fence != NULL) {
        fence->references++;
        while (!fence->done)
            pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
        nvs_sim_fence_unref(fence);
    }
    nvs_sim_pools_synchronized(context->device);
    return context->error;
}

static CUresult elapsed(float *milliseconds, CUevent start_handle, CUevent end_handle)
{
    sim_event *start, *end;
    NVS_SIM_CHECK(milliseconds != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_event(start_handle, &start));
    NVS_SIM_TRY(nvs_sim_event(end_handle, &end));
    if (((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) != 0 || start->fence == NULL || end->fence == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!start->fence->done || !end->fence->done)
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)((int64_t)end->fence->end_ns - (int64_t)start->fence->end_ns) / 1e6);
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuEventElapsedTime, (float *pMilliseconds, CUevent hStart, CUevent hEnd), elapsed(pMilliseconds, hStart, hEnd))
NVS_SIM_ENTRY(cuEventElapsedTime_v2, (float *pMilliseconds, CUevent hStart, CUevent hEnd), elapsed(pMilliseconds, hStart, hEnd))
