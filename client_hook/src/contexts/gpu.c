/* Limits of driver 580 (measured, docs/decisions/ending-contexts.md).  During a capture a query of the stream's context is allowed; a query of its
 * device invalidates the capture.  A destroyed context can be made current, and then a query of its device, or a pop, crashes.
 */
#include "contexts/gpu.h"

#include "contexts/context.h"
#include "driver/cuda_api.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

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

bool nvs_stream_captures(CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return NVS_REAL(cuStreamIsCapturing)(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

static uint32_t gpu_by_driver(CUstream stream)
{
    CUdevice device;
    CUcontext context;
    if (NVS_REAL(cuStreamGetCtx)(stream, &context) == CUDA_SUCCESS)
        return nvs_context_gpu(context);
    if (!nvs_stream_captures(stream) && NVS_REAL(cuStreamGetDevice)(stream, &device) == CUDA_SUCCESS)
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

/* Properties of a GPU: its UUID as NVML writes it, its memory, its attributes. */

static void format_uuid(char *out, size_t size, const char *prefix, const CUuuid *uuid)
{
    unsigned char b[16];
    memcpy(b, uuid->bytes, sizeof b);
    snprintf(out, size, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", prefix, b[0], b[1], b[2],
             b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

nvs_status nvs_gpu_describe(uint32_t gpu, nvs_gpu_facts *out)
{
    const CUdevice device = (CUdevice)gpu;
    CUuuid own, card;
    size_t total = 0;
    const bool has_card = NVS_REAL(cuDeviceGetUuid)(&card, device) == CUDA_SUCCESS;
    if (NVS_REAL(cuDeviceGetUuid_v2)(&own, device) != CUDA_SUCCESS) {
        int count; /* a child that was forked after cuInit cannot use the driver */
        if (!has_card)
            return NVS_REAL(cuDeviceGetCount)(&count) == CUDA_ERROR_NOT_INITIALIZED ? NVS_UNAVAILABLE : NVS_CUDA_FAILED;
        own = card;
    }
    if (NVS_REAL(cuDeviceTotalMem_v2)(&total, device) != CUDA_SUCCESS)
        return NVS_CUDA_FAILED;
    /* The second version names the MIG instance where the first names its card. */
    const bool instance = has_card && memcmp(&own, &card, sizeof own) != 0;
    format_uuid(out->uuid, sizeof out->uuid, instance ? "MIG" : "GPU", &own);
    out->total_bytes = total;
    return NVS_OK;
}

static CUuuid identities[NVS_MAX_GPUS];
static _Atomic uint32_t identified; /* how many; release, pairs with nvs_gpu_identity */

void nvs_gpus_remember(void)
{
    uint32_t count = 0;
    nvs_gpu_facts facts;
    if (atomic_load_explicit(&identified, memory_order_relaxed) != 0) /* written by the caller's thread, the agent, or before a fork */
        return;
    while (count < NVS_MAX_GPUS && nvs_gpu_describe(count, &facts) == NVS_OK && strncmp(facts.uuid, "GPU", 3) == 0 && /* no MIG instance */
           NVS_REAL(cuDeviceGetUuid)(&identities[count], (CUdevice)count) == CUDA_SUCCESS)
        count++;
    atomic_store_explicit(&identified, count, memory_order_release);
}

bool nvs_gpu_identity(uint32_t gpu, CUuuid *out)
{
    if (NVS_LIKELY(gpu >= atomic_load_explicit(&identified, memory_order_acquire))) /* pairs with nvs_gpus_remember */
        return false;
    *out = identities[gpu];
    return true;
}

bool nvs_gpu_identity_is(uint32_t gpu, const char *uuid)
{
    CUuuid seen;
    char text[96];
    if (!nvs_gpu_identity(gpu, &seen))
        return false;
    format_uuid(text, sizeof text, "GPU", &seen);
    return strcasecmp(text, uuid) == 0;
}

bool nvs_gpu_supports(uint32_t gpu, CUdevice_attribute attribute, _Atomic uint8_t known[NVS_MAX_GPUS])
{
    enum { UNKNOWN, YES, NO };
    /* Relaxed: nothing else depends on the answer, and every thread finds the same one. */
    uint8_t answer = atomic_load_explicit(&known[gpu], memory_order_relaxed);
    int value = 0;
    if (NVS_LIKELY(answer != UNKNOWN))
        return answer == YES;
    if (NVS_REAL(cuDeviceGetAttribute)(&value, attribute, (CUdevice)gpu) != CUDA_SUCCESS)
        return false; /* the driver is not ready */
    atomic_store_explicit(&known[gpu], value != 0 ? YES : NO, memory_order_relaxed);
    return value != 0;
}
