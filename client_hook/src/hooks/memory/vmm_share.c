/* Wrappers: exports and queries of handles of the application's own virtual memory management.
 *
 * Another process, a multicast object or a sparse array refers to the physical memory of a handle.  So that memory stays on the GPU from then on, and
 * such a call waits for the lease as a launch does.
 */
#include "base/base.h"
#include "base/log.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "inflight/pacing.h"
#include "memory/memory.h"
#include "swap/swap.h"

#include <stdlib.h>
#include <string.h>

/* Pins the memory of an entry, which the caller holds. */
static CUresult pin(const nvs_allocation *handle, CUmemGenericAllocationHandle *real)
{
    const uint32_t gpu = handle->gpu;
    nvs_slot *const slot = nvs_gate_enter(gpu);
    CUresult result = nvs_swap_pin(handle->backend.kept, real);
    nvs_gate_leave(slot, gpu);
    nvs_coordinator.memory_changed(gpu);
    if (result == CUDA_ERROR_NOT_SUPPORTED)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "memory of one cuMemCreate that moves in parts cannot be shared, bound, or mapped into an array: "
                                      "run this program with --memory device (NVSHARE_MEMORY=device)");
    return result;
}

/* The driver's handle for the application's: the same one, or that of a number's memory. */
static CUresult real_handle(CUmemGenericAllocationHandle handle, CUmemGenericAllocationHandle *real)
{
    *real = handle;
    if (!nvs_memory_is_number(handle))
        return CUDA_SUCCESS;
    nvs_allocation *entry = nvs_allocation_pin_handle(handle);
    if (entry == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = pin(entry, real);
    nvs_memory_drop_all(nvs_allocation_unpin_handle(entry));
    return result;
}

/* Pins memory by its address; the driver's memory needs nothing. */
static CUresult pin_address(CUdeviceptr ptr, size_t size)
{
    nvs_allocation at;
    CUmemGenericAllocationHandle ignored;
    nvs_allocation *entry = nvs_allocation_pin_mapping(ptr, size, &at);
    if (entry == NULL)
        return nvs_allocation_find(NVS_SPACE_ADDRESS, ptr, &at) != NVS_ABSENT && at.backend.chunked ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
    CUresult result = ptr >= at.key && size <= at.length && ptr - at.key <= at.length - size ? pin(entry, &ignored) : CUDA_ERROR_NOT_SUPPORTED;
    nvs_memory_drop_all(nvs_allocation_unpin_handle(entry));
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    const CUdeviceptr pointer = (CUdeviceptr)(uintptr_t)addr;
    nvs_allocation as, *entry = handle != NULL ? nvs_allocation_pin_mapping(pointer, 1, &as) : NULL;
    if (entry != NULL) {
        nvs_allocation_retain_handle(entry->key);
        *handle = entry->key;
        nvs_memory_drop_all(nvs_allocation_unpin_handle(entry));
        return CUDA_SUCCESS;
    }
    if (nvs_allocation_find(NVS_SPACE_ADDRESS, pointer, &as) != NVS_ABSENT && as.backend.chunked)
        return CUDA_ERROR_INVALID_VALUE; /* as the driver for memory of cuMemAlloc */
    CUresult result = NVS_REAL(cuMemRetainAllocationHandle)(handle, addr);
    if (result == CUDA_SUCCESS)
        nvs_allocation_retain_handle(*handle);
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    if (!nvs_memory_is_number(handle))
        return NVS_REAL(cuMemGetAllocationPropertiesFromHandle)(prop, handle);
    nvs_allocation *entry = prop != NULL ? nvs_allocation_pin_handle(handle) : NULL;
    if (entry == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *prop = ((const nvs_segment *)entry->backend.kept)->vmm->properties;
    nvs_memory_drop_all(nvs_allocation_unpin_handle(entry));
    return CUDA_SUCCESS;
}

NVS_EXPORT CUresult CUDAAPI cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
                                                         CUmemAllocationHandleType handleType, unsigned long long flags)
{
    CUmemAllocationProp prop;
    CUmemGenericAllocationHandle real;
    if (nvs_memory_is_number(handle)) {
        CUresult known = cuMemGetAllocationPropertiesFromHandle(&prop, handle);
        if (known != CUDA_SUCCESS || shareableHandle == NULL || flags != 0 || handleType == CU_MEM_HANDLE_TYPE_NONE ||
            (prop.requestedHandleTypes & handleType) == 0)
            return CUDA_ERROR_INVALID_VALUE; /* and pins nothing */
    }
    CUresult result = real_handle(handle, &real);
    return result == CUDA_SUCCESS ? NVS_REAL(cuMemExportToShareableHandle)(shareableHandle, real, handleType, flags) : result;
}

NVS_EXPORT CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
                                                           CUmemAllocationHandleType shHandleType)
{
    CUresult result = NVS_REAL(cuMemImportFromShareableHandle)(handle, osHandle, shHandleType);
    if (result == CUDA_SUCCESS)
        nvs_allocation_retain_handle(*handle); /* a handle that this process has exported */
    return result;
}

/* --- multicast objects --- */

NVS_EXPORT CUresult CUDAAPI cuMulticastBindMem(CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUmemGenericAllocationHandle memHandle,
                                               size_t memOffset, size_t size, unsigned long long flags)
{
    CUmemGenericAllocationHandle real;
    CUresult result = real_handle(memHandle, &real);
    return result == CUDA_SUCCESS ? NVS_REAL(cuMulticastBindMem)(mcHandle, mcOffset, real, memOffset, size, flags) : result;
}

NVS_EXPORT CUresult CUDAAPI cuMulticastBindAddr(CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUdeviceptr memptr, size_t size,
                                                unsigned long long flags)
{
    CUresult result = pin_address(memptr, size);
    return result == CUDA_SUCCESS ? NVS_REAL(cuMulticastBindAddr)(mcHandle, mcOffset, memptr, size, flags) : result;
}

#if CUDA_VERSION >= 13010
NVS_EXPORT CUresult CUDAAPI cuMulticastBindMem_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset,
                                                  CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size,
                                                  unsigned long long flags)
{
    CUmemGenericAllocationHandle real;
    CUresult result = real_handle(memHandle, &real);
    return result == CUDA_SUCCESS ? NVS_REAL(cuMulticastBindMem_v2)(mcHandle, dev, mcOffset, real, memOffset, size, flags) : result;
}

NVS_EXPORT CUresult CUDAAPI cuMulticastBindAddr_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, CUdeviceptr memptr,
                                                   size_t size, unsigned long long flags)
{
    CUresult result = pin_address(memptr, size);
    return result == CUDA_SUCCESS ? NVS_REAL(cuMulticastBindAddr_v2)(mcHandle, dev, mcOffset, memptr, size, flags) : result;
}
#endif

#if CUDA_VERSION >= 13030
NVS_EXPORT CUresult CUDAAPI cuLogicalEndpointBindMem(CUlogicalEndpointId leId, CUdevice dev, cuuint64_t offset,
                                                     CUmemGenericAllocationHandle memHandle, cuuint64_t memOffset, cuuint64_t size,
                                                     unsigned long long flags)
{
    CUmemGenericAllocationHandle real;
    CUresult result = real_handle(memHandle, &real);
    return result == CUDA_SUCCESS ? NVS_REAL(cuLogicalEndpointBindMem)(leId, dev, offset, real, memOffset, size, flags) : result;
}

NVS_EXPORT CUresult CUDAAPI cuLogicalEndpointBindAddr(CUlogicalEndpointId leId, CUdevice dev, cuuint64_t offset, void *ptr,
                                                      cuuint64_t size, unsigned long long flags)
{
    CUresult result = pin_address((CUdeviceptr)(uintptr_t)ptr, size);
    return result == CUDA_SUCCESS ? NVS_REAL(cuLogicalEndpointBindAddr)(leId, dev, offset, ptr, size, flags) : result;
}
#endif

/* --- sparse arrays --- */

static bool maps_number(const CUarrayMapInfo *info)
{
    return info->memOperationType == CU_MEM_OPERATION_TYPE_MAP && info->memHandleType == CU_MEM_HANDLE_TYPE_GENERIC &&
           nvs_memory_is_number(info->memHandle.memHandle);
}

/* A copy of the list with the driver's handles; NULL: nothing had to change. */
static CUresult real_list(const CUarrayMapInfo *list, unsigned int count, CUarrayMapInfo **out)
{
    unsigned int first = 0;
    *out = NULL;
    while (first < count && !maps_number(&list[first]))
        first++;
    if (list == NULL || first == count)
        return CUDA_SUCCESS;
    CUarrayMapInfo *copy = malloc(count * sizeof *copy);
    if (copy == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(copy, list, count * sizeof *copy);
    CUresult result = CUDA_SUCCESS;
    for (; first < count && result == CUDA_SUCCESS; first++)
        if (maps_number(&copy[first]))
            result = real_handle(copy[first].memHandle.memHandle, &copy[first].memHandle.memHandle);
    if (result == CUDA_SUCCESS)
        *out = copy;
    else
        free(copy);
    return result;
}

#define NVS_MAP_ARRAYS(symbol)                                                                                  \
    NVS_EXPORT CUresult CUDAAPI symbol(CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream)        \
    {                                                                                                           \
        CUarrayMapInfo *list;                                                                                   \
        const uint32_t gpu = nvs_stream_gpu(hStream);                                                           \
        nvs_slot *const slot = nvs_gate_enter(gpu);                                                             \
        CUresult result = real_list(mapInfoList, mapInfoList != NULL ? count : 0, &list);                       \
        if (result == CUDA_SUCCESS)                                                                             \
            result = NVS_REAL(symbol)(list != NULL ? list : mapInfoList, count, hStream);                       \
        if (nvs_gate_leave(slot, gpu))                                                                          \
            nvs_pace_after(gpu, hStream, NVS_PER_THREAD(#symbol), nvs_pace_what(NVS_ID_##symbol, NULL, count));  \
        free(list);                                                                                             \
        return result;                                                                                          \
    }

NVS_MAP_ARRAYS(cuMemMapArrayAsync)
NVS_MAP_ARRAYS(cuMemMapArrayAsync_ptsz)
