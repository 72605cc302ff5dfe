/* Contexts: primary ones, created ones, waiting for everything in one. */
#include "base/sim.h"

#include <stdlib.h>
#include <string.h>

static sim_context *spare; /* destroyed ones, kept readable so that a stale handle is recognised */

static CUresult open_context(sim_context *context, sim_device *device, unsigned flags);

/* A primary context that was reset while somebody retains it comes back with the next use. */
bool nvs_sim_alive(sim_context *context)
{
    if (context->magic == SIM_CONTEXT)
        return true;
    if (context->references == 0)
        return false;
    for (int i = 0; i < nvs_sim_device_count; i++)
        if (context == &nvs_sim_devices[i].primary)
            return open_context(context, &nvs_sim_devices[i], context->flags) == CUDA_SUCCESS;
    return false;
}

CUresult nvs_sim_context(CUcontext handle, sim_context **out)
{
    sim_context *context = handle == NULL ? nvs_sim_current() : (sim_context *)(void *)handle;
    if (context == NULL || !nvs_sim_alive(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    *out = context;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_context_usable(sim_context *context) { return context->error; }

static CUresult open_context(sim_context *context, sim_device *device, unsigned flags)
{
    if (device->error != CUDA_SUCCESS)
        return device->error;
    if (nvs_sim_settings.context_bytes != 0 && context->owner == NULL && !nvs_sim_charge(device->gpu, nvs_sim_settings.context_bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    context->magic = SIM_CONTEXT;
    context->device = device;
    context->flags = flags;
    context->id = nvs_sim_next_id++;
    context->error = CUDA_SUCCESS;
    context->peers = 0;
    context->limits[CU_LIMIT_STACK_SIZE] = 1024;
    context->limits[CU_LIMIT_PRINTF_FIFO_SIZE] = 1048576;
    context->limits[CU_LIMIT_MALLOC_HEAP_SIZE] = 8388608;
    context->limits[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048;
    context->limits[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64;
    CUresult result = nvs_sim_stream_create(context, CU_STREAM_DEFAULT, 0, &context->default_stream);
    if (result != CUDA_SUCCESS)
        return result;
    context->default_stream->legacy = true;
    context->next = device->contexts;
    device->contexts = context;
    nvs_sim_attach(device->gpu, 1);
    return CUDA_SUCCESS;
}

static void close_context(sim_context *context)
{
    sim_device *device = context->device;
    sim_context **link = &device->contexts;
    nvs_sim_context_wait(context);
    while (context->storage != NULL) { /* libcudart drops what it keeps for this context */
        sim_storage *storage = context->storage;
        context->storage = storage->next;
        if (storage->destroy != NULL) {
            nvs_sim_leave();
            storage->destroy((CUcontext)(void *)context, storage->key, storage->value);
            pthread_mutex_lock(&nvs_sim_lock);
        }
        free(storage);
    }
    nvs_sim_context_wait(context);
    for (size_t i = nvs_sim_allocation_count(); i-- > 0;) {
        sim_allocation *allocation = nvs_sim_allocation_at(i);
        if (allocation->context == context && allocation->kind != MEM_REGISTERED && allocation->kind != MEM_MAPPED)
            nvs_sim_release(allocation->base);
    }
    nvs_sim_capture_context_gone(context);
    for (sim_stream *stream = context->streams, *next; stream != NULL; stream = next) {
        next = stream->next;
        nvs_sim_stream_destroy(stream);
    }
    while (context->streams != NULL) /* some are idle, but still on the executor's list */
        pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
    nvs_sim_modules_unload(context);
    while (*link != context)
        link = &(*link)->next;
    *link = context->next;
    nvs_sim_graph_context_gone(device);
    if (nvs_sim_settings.context_bytes != 0 && context->owner == NULL)
        nvs_sim_uncharge(device->gpu, nvs_sim_settings.context_bytes);
    nvs_sim_attach(device->gpu, -1);
    context->magic = 0;
    context->default_stream = context->graph_stream = NULL;
}

static void wait_for_streams(sim_context *context, const sim_stream *except)
{
    uint64_t target = nvs_sim_sequence;
    for (;;) {
        bool done = true;
        if (context->magic == SIM_CONTEXT)
            for (sim_stream *stream = context->streams; stream != NULL; stream = stream->next)
                done = done && (stream == except || stream->head == NULL || stream->head->sequence > target);
        if (done)
            return;
        pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
    }
}

void nvs_sim_context_wait(sim_context *context)
{
    wait_for_streams(context, NULL);
}

void nvs_sim_device_wait(sim_device *device)
{
    for (sim_context *context = device->contexts; context != NULL; context = context->next)
        nvs_sim_context_wait(context);
}

/* Primary contexts. */

CUresult nvs_sim_primary_retain(sim_device *device, sim_context **out)
{
    sim_context *context = &device->primary;
    if (context->magic != SIM_CONTEXT) {
        CUresult result = open_context(context, device, context->flags);
        if (result != CUDA_SUCCESS)
            return result;
        context->primary = true;
    }
    context->references++;
    *out = context;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    sim_device *device;
    sim_context *context;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pctx != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_device(dev, &device));
    NVS_SIM_TRY(nvs_sim_primary_retain(device, &context));
    *pctx = (CUcontext)(void *)context;
    return nvs_sim_return(CUDA_SUCCESS);
}

/* The green contexts of a primary one that ends end with it. */
static void close_green(sim_device *device)
{
    for (sim_context *context = device->contexts, *next; context != NULL; context = next) {
        next = context->next;
        if (context->owner != NULL)
            close_context(context);
    }
}

static CUresult primary_release(CUdevice dev, bool reset)
{
    sim_device *device;
    CUresult result = nvs_sim_device(dev, &device);
    if (result != CUDA_SUCCESS)
        return result;
    sim_context *context = &device->primary;
    uint32_t left = context->references;
    if (!reset && left == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    left -= !reset;
    if (context->magic == SIM_CONTEXT && (reset || left == 0)) {
        close_green(device);
        close_context(context);
    }
    context->references = left;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice dev)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(primary_release(dev, false));
}

SIM_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(primary_release(dev, false));
}

SIM_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxReset(CUdevice dev)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(primary_release(dev, true));
}

SIM_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(primary_release(dev, true));
}

static CUresult primary_flags(CUdevice dev, unsigned flags)
{
    sim_device *device;
    CUresult result = nvs_sim_device(dev, &device);
    if (result == CUDA_SUCCESS)
        device->primary.flags = flags;
    return result;
}

SIM_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(primary_flags(dev, flags));
}

SIM_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(primary_flags(dev, flags));
}

SIM_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
    sim_device *device;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(flags != NULL && active != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_device(dev, &device));
    *flags = device->primary.flags;
    *active = device->primary.magic == SIM_CONTEXT;
    return nvs_sim_return(CUDA_SUCCESS);
}

/* Created contexts. */

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

CUresult nvs_sim_context_create(unsigned flags, CUdevice dev, CUcontext *out)
{
    sim_device *device;
    CUresult result = out == NULL ? CUDA_ERROR_INVALID_VALUE : nvs_sim_device(dev, &device);
    if (result != CUDA_SUCCESS)
        return result;
    sim_context *context = new_context();
    if (context == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = open_context(context, device, flags);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_push(context);
    if (result != CUDA_SUCCESS) {
        context->magic = 0;
        context->next = spare;
        spare = context;
        return result;
    }
    *out = (CUcontext)(void *)context;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(nvs_sim_context_create(flags, dev, pctx));
}

SIM_EXPORT CUresult CUDAAPI cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags,
                                           CUdevice dev)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(numParams == 0, CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
    return nvs_sim_return(nvs_sim_context_create(flags, dev, pctx));
}

SIM_EXPORT CUresult CUDAAPI cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(ctxCreateParams == NULL || ctxCreateParams->numExecAffinityParams == 0, CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
    return nvs_sim_return(nvs_sim_context_create(flags, dev, pctx));
}

/* Green contexts: streams of their own, the primary context's memory.  See green.c. */

CUresult nvs_sim_green_open(sim_device *device, sim_context **out)
{
    sim_context *context = new_context(), *owner;
    if (context == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = nvs_sim_primary_retain(device, &owner);
    if (result == CUDA_SUCCESS) {
        context->owner = owner;
        result = open_context(context, device, 0);
        owner->references -= result != CUDA_SUCCESS;
    }
    if (result != CUDA_SUCCESS) {
        context->next = spare;
        spare = context;
        return result;
    }
    *out = context;
    return CUDA_SUCCESS;
}

/* Its streams stay as handles that nothing but their end can be done with. */
void nvs_sim_green_close(sim_context *context)
{
    sim_context *owner = context->owner;
    nvs_sim_context_wait(context);
    nvs_sim_capture_context_gone(context);
    for (sim_stream **link = &context->streams; *link != NULL;) {
        sim_stream *stream = *link;
        if (stream == context->default_stream || stream->owner_thread != 0 || stream->closing) {
            link = &stream->next;
            continue;
        }
        *link = stream->next;
        stream->context = owner;
        stream->detached = true;
        stream->next = owner->streams;
        owner->streams = stream;
    }
    close_context(context);
    context->next = spare;
    spare = context;
    if (owner->references != 0)
        primary_release(owner->device->ordinal, false);
}

static CUresult destroy(CUcontext handle)
{
    sim_context *context = (sim_context *)(void *)handle;
    if (context == NULL || context->magic != SIM_CONTEXT || context->primary || context->owner != NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    close_context(context);
    if (nvs_sim_thread.depth != 0 && nvs_sim_thread.stack[nvs_sim_thread.depth - 1] == context)
        nvs_sim_thread.depth--;
    context->references = 0;
    context->next = spare;
    spare = context;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxDestroy(CUcontext ctx)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(destroy(ctx));
}

SIM_EXPORT CUresult CUDAAPI cuCtxDestroy_v2(CUcontext ctx)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(destroy(ctx));
}

/* Of before contexts could be pushed and popped: the one that is current counts its users. */
SIM_EXPORT CUresult CUDAAPI cuCtxAttach(CUcontext *pctx, unsigned int flags)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pctx != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    sim_context *context = nvs_sim_current();
    NVS_SIM_CHECK(context != NULL && !context->primary && context->owner == NULL, CUDA_ERROR_INVALID_CONTEXT);
    context->references++;
    *pctx = (CUcontext)(void *)context;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuCtxDetach(CUcontext ctx)
{
    NVS_SIM_ENTER();
    sim_context *context = nvs_sim_current();
    NVS_SIM_CHECK(context != NULL && (CUcontext)(void *)context == ctx && !context->primary, CUDA_ERROR_INVALID_CONTEXT);
    if (context->references == 0)
        return nvs_sim_return(destroy(ctx));
    context->references--;
    return nvs_sim_return(CUDA_SUCCESS);
}

static CUresult synchronize(sim_context *context)
{
    if (nvs_sim_capture_context(context))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (context->error == CUDA_SUCCESS) /* a driver 580 does not count what graphs do here that were launched on another GPU's stream */
        wait_for_streams(context, context->graph_stream);
    for (sim_context *green = context->device->contexts; context->primary && green != NULL; green = green->next)
        if (green->owner == context)
            nvs_sim_context_wait(green);
    nvs_sim_pools_synchronized(context->device);
    return context->error;
}

SIM_EXPORT CUresult CUDAAPI cuCtxSynchronize(void)
{
    NVS_SIM_ENTER_CONTEXT();
    return nvs_sim_return(synchronize(context));
}

SIM_EXPORT CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext ctx)
{
    sim_context *context;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(nvs_sim_context(ctx, &context));
    return nvs_sim_return(synchronize(context));
}
