/* Properties of a GPU: its UUID as NVML writes it, its memory, its attributes.  See gpu_facts.h. */
#include "contexts/gpu_facts.h"

#include "driver/cuda_api.h"

#include <stdio.h>
#include <string.h>

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
    if (!NVS_HAS(cuDeviceGetUuid_v2) || NVS_REAL(cuDeviceGetUuid_v2)(&own, device) != CUDA_SUCCESS) {
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
