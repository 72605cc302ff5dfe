/* Contexts: primary, created and green ones, from their opening to their end.
 *
 * The contents of a context end in a fixed order: work, storage of the runtime, memory, captures, streams, modules.
 * A green context has its own streams, the memory of the primary context, and a share of the multiprocessors, which has no effect.
 */
#include "graph/graph.h"

#include <stdlib.h>
#include <string.h>

static sim_context *spare; /* destroyed contexts; readable, to recognise stale handles */

static sim_context *new_context(void)
{
    sim_context *context = spare;
    if (context != NULL)
        spare = context->next;
    else
        context = malloc(sizeof *context);
    if (context != NULL)
        memset(context, 0, sizeof *context);
    return context;
}

/* Its memory stays readable. */
static void free_context(sim_context *context)
{
    context->next = spare;
    spare = context;
}

/* Calls the destructors of the storage that libcudart has attached. */
static void free_storage(sim_context *context)
{
    while (context->storage != NULL) {
        sim_storage *storage = context->storage;
        context->storage = storage->next;
        if (storage->destroy != NULL) {
            pthread_mutex_unlock(&nvs_sim_lock);
            storage->destroy((CUcontext)(void *)context, storage->key, storage->value);
            pthread_mutex_lock(&nvs_sim_lock);
        }
        free(storage);
    }
}

static void release_memory(sim_context *context)
{
    for (size_t i = nvs_sim_allocation_count; i-- > 0;) {
        const sim_allocation *allocation = &nvs_sim_allocations[i];
        if (allocation->context == context && allocation->kind != MEM_REGISTERED && allocation->kind != MEM_MAPPED)
            nvs_sim_release(allocation->base);
    }
}

static void destroy_streams(sim_context *context)
{
    for (sim_stream *stream = context->streams.all, *next; stream != NULL; stream = next) {
        next = stream->next;
        nvs_sim_stream_destroy(stream);
    }
    while (context->streams.all != NULL) /* an idle stream may still be in the executor's list */
        pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
}

static void close_context(sim_context *context)
{
    sim_device *device = context->device;
    sim_context **link = &device->contexts;
    nvs_sim_context_wait(context, NULL);
    free_storage(context);
    nvs_sim_context_wait(context, NULL);
    release_memory(context);
    nvs_sim_capture_end_all(context);
    destroy_streams(context);
    nvs_sim_modules_unload(context);
    while (*link != context)
        link = &(*link)->next;
    *link = context->next;
    nvs_sim_graph_memory_trim(device);
    if (nvs_sim_settings.context_bytes != 0 && context->owner == NULL)
        nvs_sim_uncharge(device->gpu, nvs_sim_settings.context_bytes);
    nvs_sim_attach(device->gpu, -1);
    context->magic = 0;
    context->streams.legacy = context->streams.graph = NULL;
}

/* Primary contexts. */

static CUresult retain(sim_device *device, sim_context **out)
{
    sim_context *context = &device->primary;
    if (context->magic != SIM_CONTEXT) {
        NVS_SIM_TRY(nvs_sim_context_open(context, device, context->settings.flags));
    }
    context->references++;
    *out = context;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    sim_context *context;
    NVS_SIM_ENTER_FIND(sim_device *device, nvs_sim_device(dev, &device));
    NVS_SIM_CHECK(pctx != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(retain(device, &context));
    *pctx = (CUcontext)(void *)context;
    return CUDA_SUCCESS;
}

/* The green contexts of a primary context end with it. */
static void close_greens(sim_device *device)
{
    for (sim_context *context = device->contexts, *next; context != NULL; context = next) {
        next = context->next;
        if (context->owner != NULL)
            close_context(context);
    }
}

static CUresult release(sim_device *device, bool reset)
{
    sim_context *context = &device->primary;
    uint32_t left = context->references;
    if (!reset && left == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    left -= !reset;
    if (context->magic == SIM_CONTEXT && (reset || left == 0)) {
        close_greens(device);
        close_context(context);
    }
    context->references = left;
    return CUDA_SUCCESS;
}

static CUresult release_of(CUdevice dev, bool reset)
{
    sim_device *device;
    NVS_SIM_TRY(nvs_sim_device(dev, &device));
    return release(device, reset);
}

NVS_SIM_ENTRY(cuDevicePrimaryCtxRelease, (CUdevice dev), release_of(dev, false))
NVS_SIM_ENTRY(cuDevicePrimaryCtxRelease_v2, (CUdevice dev), release_of(dev, false))
NVS_SIM_ENTRY(cuDevicePrimaryCtxReset, (CUdevice dev), release_of(dev, true))
NVS_SIM_ENTRY(cuDevicePrimaryCtxReset_v2, (CUdevice dev), release_of(dev, true))

SIM_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
    NVS_SIM_ENTER_FIND(sim_device *device, nvs_sim_device(dev, &device));
    device->primary.settings.flags = flags;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
    NVS_SIM_ENTER_FIND(sim_device *device, nvs_sim_device(dev, &device));
    NVS_SIM_CHECK(flags != NULL && active != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = device->primary.settings.flags;
    *active = device->primary.magic == SIM_CONTEXT;
    return CUDA_SUCCESS;
}

/* Contexts of cuCtxCreate, and waits for a context. */

static CUresult create(unsigned flags, CUdevice dev, CUcontext *out)
{
    sim_device *device;
    NVS_SIM_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_device(dev, &device));
    sim_context *context = new_context();
    if (context == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = nvs_sim_context_open(context, device, flags);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_push(context);
    if (result != CUDA_SUCCESS) {
        context->magic = 0;
        free_context(context);
        return result;
    }
    *out = (CUcontext)(void *)context;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuCtxCreate_v2, (CUcontext *pctx, unsigned int flags, CUdevice dev), create(flags, dev, pctx))

SIM_EXPORT CUresult CUDAAPI cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(ctxCreateParams == NULL || ctxCreateParams->numExecAffinityParams == 0, CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
    return create(flags, dev, pctx);
}

static CUresult destroy(CUcontext handle)
{
    sim_context *context = (sim_context *)(void *)handle;
    if (context == NULL || context->magic != SIM_CONTEXT || nvs_sim_is_primary(context) || context->owner != NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    close_context(context);
    nvs_sim_pop_if_current(context);
    context->references = 0;
    free_context(context);
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuCtxDestroy, (CUcontext ctx), destroy(ctx))
NVS_SIM_ENTRY(cuCtxDestroy_v2, (CUcontext ctx), destroy(ctx))

/* The interface of CUDA 2: the current context counts its users. */
SIM_EXPORT CUresult CUDAAPI cuCtxAttach(CUcontext *pctx, unsigned int flags)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pctx != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    sim_context *context = nvs_sim_current();
    NVS_SIM_CHECK(context != NULL && !nvs_sim_is_primary(context) && context->owner == NULL, CUDA_ERROR_INVALID_CONTEXT);
    context->references++;
    *pctx = (CUcontext)(void *)context;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxDetach(CUcontext ctx)
{
    NVS_SIM_ENTER();
    sim_context *context = nvs_sim_current();
    NVS_SIM_CHECK(context != NULL && (CUcontext)(void *)context == ctx && !nvs_sim_is_primary(context), CUDA_ERROR_INVALID_CONTEXT);
    if (context->references == 0)
        return destroy(ctx);
    context->references--;
    return CUDA_SUCCESS;
}

static CUresult synchronize(sim_context *context)
{
    if (nvs_sim_capture_context(context))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (context->error == CUDA_SUCCESS) /* driver 580 does not wait for the graph nodes of launches on another GPU */
        nvs_sim_context_wait(context, context->streams.graph);
    for (sim_context *green = context->device->contexts; nvs_sim_is_primary(context) && green != NULL; green = green->next)
        if (green->owner == context)
            nvs_sim_context_wait(green, NULL);
    nvs_sim_pools_synchronized(context->device);
    return context->error;
}

SIM_EXPORT CUresult CUDAAPI cuCtxSynchronize(void)
{
    NVS_SIM_ENTER_CONTEXT();
    return synchronize(context);
}

SIM_EXPORT CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext ctx)
{
    NVS_SIM_ENTER_FIND(sim_context *context, nvs_sim_context(ctx, &context));
    return synchronize(context);
}

/* Flags and limits of a context, and calls without effect. */

NVS_SIM_GETTER(cuCtxGetFlags, (unsigned int *flags), sim_context *context, nvs_sim_need_current(&context), flags, context->settings.flags)

SIM_EXPORT CUresult CUDAAPI cuCtxSetFlags(unsigned int flags)
{
    NVS_SIM_ENTER_CONTEXT();
    context->settings.flags = flags;
    return CUDA_SUCCESS;
}

NVS_SIM_GETTER(cuCtxGetId, (CUcontext ctx, unsigned long long *ctxId), sim_context *context, nvs_sim_context(ctx, &context), ctxId,
               context->id)

NVS_SIM_GETTER(cuCtxGetApiVersion, (CUcontext ctx, unsigned int *version), sim_context *context, nvs_sim_context(ctx, &context), version,
               3020)

SIM_EXPORT CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK((unsigned)limit < CU_LIMIT_MAX, CUDA_ERROR_UNSUPPORTED_LIMIT);
    context->settings.limits[limit] = value;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetLimit(size_t *pvalue, CUlimit limit)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(pvalue != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK((unsigned)limit < CU_LIMIT_MAX, CUDA_ERROR_UNSUPPORTED_LIMIT);
    *pvalue = context->settings.limits[limit];
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *leastPriority, int *greatestPriority)
{
    NVS_SIM_ENTER_CONTEXT();
    if (leastPriority != NULL)
        *leastPriority = 0;
    if (greatestPriority != NULL)
        *greatestPriority = -5;
    return CUDA_SUCCESS;
}

/* cudaProfiler.h, which declares these two, is not in every wheel. */
SIM_EXPORT CUresult CUDAAPI cuProfilerStart(void);
SIM_EXPORT CUresult CUDAAPI cuProfilerStop(void);

#define NO_EFFECT(name, parameters)                                                             \
    SIM_EXPORT CUresult CUDAAPI name parameters                                                 \
    {                                                                                           \
        NVS_SIM_ENTER_CONTEXT();                                                                \
        return context->error;                                                                  \
    }

NO_EFFECT(cuCtxSetCacheConfig, (CUfunc_cache config))
NO_EFFECT(cuCtxSetSharedMemConfig, (CUsharedconfig config))
NO_EFFECT(cuCtxResetPersistingL2Cache, (void))
NVS_SIM_GETTER(cuCtxGetCacheConfig, (CUfunc_cache *config), sim_context *context, nvs_sim_need_current(&context), config,
               CU_FUNC_CACHE_PREFER_NONE)
NVS_SIM_GETTER(cuCtxGetSharedMemConfig, (CUsharedconfig *config), sim_context *context, nvs_sim_need_current(&context), config,
               CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE)
NO_EFFECT(cuProfilerStart, (void))
NO_EFFECT(cuProfilerStop, (void))

/* Green contexts. */

enum { PROCESSORS = 16, ALIGNMENT = 2 };

typedef struct sim_green {
    uint32_t magic;
    sim_context *context;
    struct sim_green *next;
} sim_green;

static sim_green *greens; /* including destroyed ones, to recognise stale handles */

static CUresult find_green(CUgreenCtx handle, sim_green **out)
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
    sim_context *context = new_context(), *owner;
    if (context == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = retain(device, &owner);
    if (result == CUDA_SUCCESS) {
        context->owner = owner;
        result = nvs_sim_context_open(context, device, 0);
        owner->references -= result != CUDA_SUCCESS;
    }
    if (result != CUDA_SUCCESS) {
        free_context(context);
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
    close_context(context);
    free_context(context);
    if (owner->references != 0)
        release(owner->device, false);
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
    green->next = greens;
    greens = green;
    *phCtx = (CUgreenCtx)(void *)green;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuGreenCtxDestroy(CUgreenCtx hCtx)
{
    NVS_SIM_ENTER_FIND(sim_green *green, find_green(hCtx, &green));
    green->magic = 0;
    close_green(green->context);
    return CUDA_SUCCESS;
}

NVS_SIM_GETTER(cuCtxFromGreenCtx, (CUcontext *pContext, CUgreenCtx hCtx), sim_green *green, find_green(hCtx, &green), pContext,
               (CUcontext)(void *)green->context)

SIM_EXPORT CUresult CUDAAPI cuGreenCtxStreamCreate(CUstream *phStream, CUgreenCtx greenCtx, unsigned int flags, int priority)
{
    sim_stream *stream;
    NVS_SIM_ENTER_FIND(sim_green *green, find_green(greenCtx, &green));
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
    NVS_SIM_ENTER_FIND(sim_green *green, find_green(hCtx, &green));
    NVS_SIM_TRY(nvs_sim_event(hEvent, &event));
    for (sim_stream *stream = green->context->streams.all; stream != NULL && result == CUDA_SUCCESS; stream = stream->next)
        result = nvs_sim_event_wait(event, stream, 0);
    return result;
}

/* Records the event on the default stream of the context, after a wait for each other stream. */
SIM_EXPORT CUresult CUDAAPI cuGreenCtxRecordEvent(CUgreenCtx hCtx, CUevent hEvent)
{
    sim_event *event;
    NVS_SIM_ENTER_FIND(sim_green *green, find_green(hCtx, &green));
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
