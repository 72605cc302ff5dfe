/* See allocate.h. */
#include "memory/allocate.h"

#include "contexts/context.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "memory/backends/mode.h"
#include "memory/quota/admission.h"
#include "memory/quota/deferred.h"
#include "memory/quota/quota.h"
#include "memory/records/entries.h"
#include "memory/records/registry.h"

#include <stdatomic.h>

/* The driver's error for an allocation without a context; another one in a child that was forked after cuInit. */
static CUresult no_context(void)
{
    CUcontext none;
    CUresult result = NVS_REAL(cuCtxGetCurrent)(&none);
    return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_CONTEXT;
}

/* The driver makes physical memory also without a context, and in a dead one; cuMemAlloc fails there. */
static CUresult usable(const nvs_allocation *entry)
{
    if (entry->context == NULL)
        return no_context();
    return nvs_gate_dead(entry->gpu) ? nvs_context_error() : CUDA_SUCCESS;
}

CUresult nvs_memory_allocate(uint32_t gpu, CUdeviceptr *out, size_t bytes)
{
    const nvs_backend *backend = nvs_memory_backend(gpu);
    nvs_allocation *entry;
    CUdeviceptr pointer = 0;
    CUresult result = nvs_memory_admit(NVS_SPACE_ADDRESS, backend->kind, gpu, bytes, &entry);
    if (result != CUDA_SUCCESS)
        return result;
    entry->context = nvs_owner_context();
    (void)nvs_context_gpu(entry->context); /* registered: movers and reapers visit it */
    if (backend->chunked)
        nvs_memory_in_chunks(entry);
    entry->backend.movable = backend->movable && !backend->chunked && entry->context != NULL; /* it is moved from within its context */
    if (backend->chunked)
        result = usable(entry);
    if (result != CUDA_SUCCESS) {
        nvs_memory_drop(entry);
        return result;
    }
    do
        result = backend->allocate(gpu, &pointer, bytes, &entry->backend.kept);
    while (result == CUDA_ERROR_OUT_OF_MEMORY && nvs_memory_reap(gpu, true));
    if (result != CUDA_SUCCESS) {
        nvs_memory_drop(entry);
        if (result == CUDA_ERROR_OUT_OF_MEMORY)
            nvs_memory_log_refused(gpu, bytes, !backend->chunked);
        return result;
    }
    nvs_memory_keep(entry, pointer, bytes);
    *out = pointer;
    return CUDA_SUCCESS;
}

/* Handles of chunked memory are numbers that no address has and that are never used twice.  So they differ from the driver's handles, and a released
 * one is recognised. */
static const uint64_t NUMBERS = UINT64_C(0x6e76) << 48, NUMBERS_MASK = UINT64_C(0xffff) << 48;

bool nvs_memory_is_number(uint64_t handle)
{
    return (handle & NUMBERS_MASK) == NUMBERS;
}

CUresult nvs_memory_create(uint32_t gpu, size_t bytes, const CUmemAllocationProp *properties, CUmemGenericAllocationHandle *out)
{
    static _Atomic uint64_t last;
    const nvs_backend *backend = nvs_memory_backend(gpu);
    nvs_allocation *entry;
    if (!backend->chunked)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = nvs_memory_admit(NVS_SPACE_HANDLE, NVS_MEMORY_HANDLE, gpu, bytes, &entry);
    if (result != CUDA_SUCCESS)
        return result;
    entry->vmm.references = 1;
    nvs_memory_in_chunks(entry);
    do
        result = backend->create(gpu, bytes, properties, &entry->backend.kept);
    while (result == CUDA_ERROR_OUT_OF_MEMORY && nvs_memory_reap(gpu, true));
    if (result != CUDA_SUCCESS) {
        nvs_memory_drop(entry);
        if (result == CUDA_ERROR_OUT_OF_MEMORY)
            nvs_memory_log_refused(gpu, bytes, !backend->chunked);
        return result;
    }
    /* Relaxed: only that no two are the same matters. */
    *out = NUMBERS | (atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1);
    nvs_memory_keep(entry, *out, 1);
    return CUDA_SUCCESS;
}

CUresult nvs_memory_allocate_in_order(uint32_t gpu, CUdeviceptr *out, size_t bytes, uint64_t stream)
{
    nvs_allocation wanted = {.gpu = gpu, .deferred.stream = stream};
    CUevent event;
    uint64_t pointer;
    if (stream != 0 && nvs_registry_deferred(gpu) != 0) {
        wanted.charged_bytes = nvs_memory_grains(bytes);
        wanted.context = nvs_owner_context();
        if (wanted.context != NULL && nvs_allocation_revive(&wanted, bytes, &pointer, &event)) {
            NVS_REAL(cuEventDestroy_v2)(event);
            *out = pointer;
            return CUDA_SUCCESS;
        }
    }
    return nvs_memory_allocate(gpu, out, bytes);
}
