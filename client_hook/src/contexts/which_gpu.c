/* See which_gpu.h.
 *
 * Limits of driver 580 (measured, docs/decisions/ending-contexts.md).  During a capture a query of the stream's context is allowed; a query of its
 * device invalidates the capture.  A destroyed context can be made current, and then a query of its device, or a pop, crashes.
 */
#include "contexts/which_gpu.h"

#include "contexts/context.h"
#include "contexts/gpu_cache.h"
#include "driver/cuda_api.h"

#define RECHECK_EVERY 64u /* uses of a cached current GPU before the next query of the driver */

static uint32_t gpu_of_device(CUdevice device)
{
    return device >= 0 && (uint32_t)device < NVS_MAX_GPUS ? (uint32_t)device : NVS_NO_GPU;
}

static void remember(const void *handle, uint32_t gpu, uint32_t asked_in)
{
    *nvs_gpu_place(handle) = (nvs_gpu_of){handle, asked_in, gpu};
}

static void is_current(uint32_t gpu, uint32_t asked_in)
{
    nvs_cached_gpu.current_gpu = gpu;
    nvs_cached_gpu.current_generation = asked_in;
    nvs_cached_gpu.uses = RECHECK_EVERY;
}

uint32_t nvs_ask_current_gpu(void)
{
    /* Acquire pairs with the release in nvs_gpus_outdated: a later answer of the driver is newer than the change. */
    const uint32_t now = atomic_load_explicit(&nvs_gpu_generation, memory_order_acquire);
    nvs_context_learn();
    const uint32_t only = nvs_only_gpu();
    if (only != NVS_NO_GPU)
        return only;
    CUcontext context = NULL;
    if (NVS_REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS)
        return NVS_NO_GPU;
    const uint32_t gpu = nvs_context_gpu(context);
    if (gpu == NVS_NO_GPU)
        return gpu;
    remember(context, gpu, now);
    is_current(gpu, now);
    return gpu;
}

void nvs_current_changed(CUcontext context)
{
    const nvs_gpu_of *known = nvs_gpu_place(context);
    nvs_cached_gpu.current_generation = 0;
    if (context != NULL && known->handle == context &&
        known->generation == atomic_load_explicit(&nvs_gpu_generation, memory_order_acquire)) /* as above */
        is_current(known->gpu, known->generation);
}

static bool is_captured(CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return NVS_REAL(cuStreamIsCapturing)(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

static uint32_t gpu_by_driver(CUstream stream)
{
    CUdevice device;
    CUcontext context;
    if (NVS_HAS(cuStreamGetCtx) && NVS_REAL(cuStreamGetCtx)(stream, &context) == CUDA_SUCCESS)
        return nvs_context_gpu(context);
    if (NVS_HAS(cuStreamGetDevice) && !is_captured(stream) && NVS_REAL(cuStreamGetDevice)(stream, &device) == CUDA_SUCCESS)
        return gpu_of_device(device); /* a green context's */
    return NVS_NO_GPU;
}

uint32_t nvs_ask_stream_gpu(CUstream stream)
{
    const uint32_t now = atomic_load_explicit(&nvs_gpu_generation, memory_order_acquire); /* as in nvs_ask_current_gpu */
    nvs_context_learn();
    const uint32_t only = nvs_only_gpu();
    if (only != NVS_NO_GPU)
        return only;
    const uint32_t gpu = gpu_by_driver(stream);
    if (gpu == NVS_NO_GPU)
        return nvs_current_gpu();
    remember(stream, gpu, now);
    return gpu;
}

/* Asks the driver for the GPU of a live context, and registers the context. */
static uint32_t learn(CUcontext context)
{
    CUdevice device;
    CUcontext popped;
    uint32_t gpu = NVS_NO_GPU;
    if (NVS_REAL(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return gpu;
    if (NVS_REAL(cuCtxGetDevice)(&device) == CUDA_SUCCESS)
        gpu = gpu_of_device(device);
    NVS_REAL(cuCtxPopCurrent_v2)(&popped);
    if (gpu != NVS_NO_GPU)
        nvs_context_created(context, gpu);
    return gpu;
}

uint32_t nvs_live_context_gpu(CUcontext context)
{
    const uint32_t gpu = nvs_context_registered_gpu(context);
    return gpu != NVS_NO_GPU && !nvs_context_ends(context) ? gpu : learn(context);
}

uint32_t nvs_context_gpu(CUcontext context)
{
    const uint32_t gpu = context != NULL ? nvs_context_registered_gpu(context) : NVS_NO_GPU;
    if (gpu != NVS_NO_GPU || context == NULL)
        return gpu;
    return nvs_context_lives(context) ? learn(context) : nvs_primary_gpu(context);
}
