/* Green contexts: own streams, the memory of the primary context, and a share of the multiprocessors, which has no effect. */
#include "context/context.h"

#include <stdlib.h>

enum { PROCESSORS = 16, ALIGNMENT = 2 };

typedef struct sim_green {
    uint32_t magic;
    sim_context *context;
    struct sim_green *next;
    unsigned processors;
} sim_green;

static sim_green *greens; /* including destroyed ones, to recognise stale handles */

static CUresult find(CUgreenCtx handle, sim_green **out)
{
    for (sim_green *green = greens; green != NULL; green = green->next)
        if (green == (sim_green *)(void *)handle) {
            *out = green;
            return green->magic == SIM_GREEN && green->context->magic == SIM_CONTEXT ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
        }
    return CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult describe(CUdevResource *resource, CUdevResourceType type, unsigned processors)
{
    if (resource == NULL || type != CU_DEV_RESOURCE_TYPE_SM)
        return resource == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_RESOURCE_TYPE;
    *resource = (CUdevResource){.type = type, .sm = {.smCount = processors}};
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, CUdevResourceType type)
{
    NVS_SIM_ENTER_FIND(sim_device *found, nvs_sim_device(device, &found));
    return describe(resource, type, PROCESSORS);
}

SIM_EXPORT CUresult CUDAAPI cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *nbGroups, const CUdevResource *input,
                                                        CUdevResource *remaining, unsigned int flags, unsigned int minCount)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(nbGroups != NULL && input != NULL && input->type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_VALUE);
    const unsigned size = minCount == 0 ? ALIGNMENT : (minCount + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    unsigned groups = input->sm.smCount / size;
    NVS_SIM_CHECK(groups != 0, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    groups = result != NULL && *nbGroups < groups ? *nbGroups : groups;
    for (unsigned i = 0; result != NULL && i < groups; i++)
        NVS_SIM_TRY(describe(&result[i], CU_DEV_RESOURCE_TYPE_SM, size));
    if (result != NULL && remaining != NULL)
        NVS_SIM_TRY(describe(remaining, CU_DEV_RESOURCE_TYPE_SM, input->sm.smCount - groups * size));
    *nbGroups = groups;
    return CUDA_SUCCESS;
}

/* No function of the interface frees a descriptor. */
SIM_EXPORT CUresult CUDAAPI cuDevResourceGenerateDesc(CUdevResourceDesc *phDesc, CUdevResource *resources, unsigned int nbResources)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(phDesc != NULL && resources != NULL && nbResources == 1 && resources->type == CU_DEV_RESOURCE_TYPE_SM,
                  CUDA_ERROR_INVALID_VALUE);
    CUdevResource *kept = malloc(sizeof *kept);
    NVS_SIM_CHECK(kept != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *kept = resources[0];
    *phDesc = (CUdevResourceDesc)(void *)kept;
    return CUDA_SUCCESS;
}

static CUresult open_green(sim_device *device, sim_context **out)
{
    sim_context *context = nvs_sim_context_new(), *owner;
    if (context == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = nvs_sim_primary_retain(device, &owner);
    if (result == CUDA_SUCCESS) {
        context->owner = owner;
        result = nvs_sim_context_open(context, device, 0);
        owner->references -= result != CUDA_SUCCESS;
    }
    if (result != CUDA_SUCCESS) {
        nvs_sim_context_free(context);
        return result;
    }
    *out = context;
    return CUDA_SUCCESS;
}

/* Its streams remain as handles that can only be destroyed. */
static void close_green(sim_context *context)
{
    sim_context *owner = context->owner;
    nvs_sim_context_wait(context, NULL);
    nvs_sim_capture_end_all(context);
    for (sim_stream **link = &context->streams.all; *link != NULL;) {
        sim_stream *stream = *link;
        if (stream == context->streams.legacy || stream->owner_thread != 0 || stream->closing) {
            link = &stream->next;
            continue;
        }
        *link = stream->next;
        stream->context = owner;
        stream->detached = true;
        stream->next = owner->streams.all;
        owner->streams.all = stream;
    }
    nvs_sim_context_close(context);
    nvs_sim_context_free(context);
    if (owner->references != 0)
        nvs_sim_primary_release(owner->device, false);
}

SIM_EXPORT CUresult CUDAAPI cuGreenCtxCreate(CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev, unsigned int flags)
{
    NVS_SIM_ENTER_FIND(sim_device *device, nvs_sim_device(dev, &device));
    NVS_SIM_CHECK(phCtx != NULL && desc != NULL && flags == CU_GREEN_CTX_DEFAULT_STREAM, CUDA_ERROR_INVALID_VALUE);
    sim_green *green = calloc(1, sizeof *green);
    NVS_SIM_CHECK(green != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    CUresult result = open_green(device, &green->context);
    if (result != CUDA_SUCCESS) {
        free(green);
        return result;
    }
    green->magic = SIM_GREEN;
    green->processors = ((const CUdevResource *)(const void *)desc)->sm.smCount;
    green->next = greens;
    greens = green;
    *phCtx = (CUgreenCtx)(void *)green;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGreenCtxDestroy(CUgreenCtx hCtx)
{
    NVS_SIM_ENTER_FIND(sim_green *green, find(hCtx, &green));
    green->magic = 0;
    close_green(green->context);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxFromGreenCtx(CUcontext *pContext, CUgreenCtx hCtx)
{
    NVS_SIM_ENTER_FIND(sim_green *green, find(hCtx, &green));
    NVS_SIM_CHECK(pContext != NULL, CUDA_ERROR_INVALID_VALUE);
    *pContext = (CUcontext)(void *)green->context;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGreenCtxStreamCreate(CUstream *phStream, CUgreenCtx greenCtx, unsigned int flags, int priority)
{
    sim_stream *stream;
    NVS_SIM_ENTER_FIND(sim_green *green, find(greenCtx, &green));
    NVS_SIM_CHECK(phStream != NULL && flags == CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_stream_create(green->context, flags, priority, &stream));
    *phStream = (CUstream)(void *)stream;
    return CUDA_SUCCESS;
}

/* Each present stream of the context waits. */
SIM_EXPORT CUresult CUDAAPI cuGreenCtxWaitEvent(CUgreenCtx hCtx, CUevent hEvent)
{
    sim_event *event;
    CUresult result = CUDA_SUCCESS;
    NVS_SIM_ENTER_FIND(sim_green *green, find(hCtx, &green));
    NVS_SIM_TRY(nvs_sim_event(hEvent, &event));
    for (sim_stream *stream = green->context->streams.all; stream != NULL && result == CUDA_SUCCESS; stream = stream->next)
        result = nvs_sim_event_wait(event, stream, 0);
    return result;
}

/* Records the event on the default stream of the context, after a wait for each other stream. */
SIM_EXPORT CUresult CUDAAPI cuGreenCtxRecordEvent(CUgreenCtx hCtx, CUevent hEvent)
{
    sim_event *event;
    NVS_SIM_ENTER_FIND(sim_green *green, find(hCtx, &green));
    NVS_SIM_TRY(nvs_sim_event(hEvent, &event));
    sim_stream *last = green->context->streams.legacy;
    for (sim_stream *stream = green->context->streams.all; stream != NULL; stream = stream->next) {
        if (stream == last)
            continue;
        NVS_SIM_TRY(nvs_sim_event_record(event, stream, 0));
        NVS_SIM_TRY(nvs_sim_event_wait(event, last, 0));
    }
    return nvs_sim_event_record(event, last, 0);
}
