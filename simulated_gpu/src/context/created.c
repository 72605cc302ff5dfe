/* Contexts of cuCtxCreate, and waits for a context. */
#include "context/context.h"

static CUresult create(unsigned flags, CUdevice dev, CUcontext *out)
{
    sim_device *device;
    NVS_SIM_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_device(dev, &device));
    sim_context *context = nvs_sim_context_new();
    if (context == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = nvs_sim_context_open(context, device, flags);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_push(context);
    if (result != CUDA_SUCCESS) {
        context->magic = 0;
        nvs_sim_context_free(context);
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
    nvs_sim_context_close(context);
    nvs_sim_pop_if_current(context);
    context->references = 0;
    nvs_sim_context_free(context);
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
