/* Primary contexts. */
#include "context/context.h"

bool nvs_sim_primary_reopen(sim_device *device)
{
    return nvs_sim_context_open(&device->primary, device, device->primary.settings.flags) == CUDA_SUCCESS;
}

CUresult nvs_sim_primary_retain(sim_device *device, sim_context **out)
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
    NVS_SIM_TRY(nvs_sim_primary_retain(device, &context));
    *pctx = (CUcontext)(void *)context;
    return CUDA_SUCCESS;
}

/* The green contexts of a primary context end with it. */
static void close_green(sim_device *device)
{
    for (sim_context *context = device->contexts, *next; context != NULL; context = next) {
        next = context->next;
        if (context->owner != NULL)
            nvs_sim_context_close(context);
    }
}

CUresult nvs_sim_primary_release(sim_device *device, bool reset)
{
    sim_context *context = &device->primary;
    uint32_t left = context->references;
    if (!reset && left == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    left -= !reset;
    if (context->magic == SIM_CONTEXT && (reset || left == 0)) {
        close_green(device);
        nvs_sim_context_close(context);
    }
    context->references = left;
    return CUDA_SUCCESS;
}

static CUresult set_flags(sim_device *device, unsigned flags)
{
    device->primary.settings.flags = flags;
    return CUDA_SUCCESS;
}

#define PRIMARY(name, parameters, ...)                                                          \
    SIM_EXPORT CUresult CUDAAPI name parameters                                                 \
    {                                                                                           \
        sim_device *device;                                                                     \
        NVS_SIM_ENTER();                                                                        \
        NVS_SIM_TRY(nvs_sim_device(dev, &device));                                              \
        return __VA_ARGS__;                                                                     \
    }

PRIMARY(cuDevicePrimaryCtxRelease, (CUdevice dev), nvs_sim_primary_release(device, false))
PRIMARY(cuDevicePrimaryCtxRelease_v2, (CUdevice dev), nvs_sim_primary_release(device, false))
PRIMARY(cuDevicePrimaryCtxReset, (CUdevice dev), nvs_sim_primary_release(device, true))
PRIMARY(cuDevicePrimaryCtxReset_v2, (CUdevice dev), nvs_sim_primary_release(device, true))
PRIMARY(cuDevicePrimaryCtxSetFlags_v2, (CUdevice dev, unsigned int flags), set_flags(device, flags))

SIM_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
    NVS_SIM_ENTER_FIND(sim_device *device, nvs_sim_device(dev, &device));
    NVS_SIM_CHECK(flags != NULL && active != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = device->primary.settings.flags;
    *active = device->primary.magic == SIM_CONTEXT;
    return CUDA_SUCCESS;
}
