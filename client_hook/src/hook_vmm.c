/* Wrappers: the application's own virtual memory management (JAX, PyTorch's expandable segments).
 *
 * Its physical memory on a GPU is charged to the quota and pinned, from cuMemCreate until the driver really gives it up: when the last
 * reference (create, retain, import here) is released and the last mapping is gone.  Memory in host locations is not charged.
 * What is not seen: other processes that hold an exported handle, and memory imported from them, which is charged there.
 */
#include "cuda_api.h"
#include "memory.h"

#include <stdlib.h>

NVS_EXPORT CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                                        unsigned long long flags)
{
    nvs_allocation *entry;
    if (handle == NULL || prop == NULL || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || prop->location.id < 0 ||
        !nvs_memory_manages((uint32_t)prop->location.id))
        return NVS_REAL(cuMemCreate)(handle, size, prop, flags);
    CUresult result = nvs_memory_admit(NVS_SPACE_HANDLE, NVS_MEMORY_HANDLE, (uint32_t)prop->location.id, size, &entry);
    if (result != CUDA_SUCCESS)
        return result;
    entry->references = 1;
    result = NVS_REAL(cuMemCreate)(handle, size, prop, flags);
    if (result == CUDA_SUCCESS)
        nvs_memory_keep(entry, *handle, 1);
    else
        nvs_memory_drop(entry);
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle)
{
    nvs_allocation *last;
    bool known = nvs_allocation_release_handle(handle, &last);
    CUresult result = NVS_REAL(cuMemRelease)(handle);
    if (result == CUDA_SUCCESS) {
        if (last != NULL)
            nvs_memory_drop(last);
    } else if (last != NULL) {
        last->references = 1;
        nvs_memory_drop_all(nvs_allocation_insert(last));
    } else if (known) {
        nvs_allocation_retain_handle(handle);
    }
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                                     unsigned long long flags)
{
    nvs_allocation *pinned = nvs_allocation_pin_handle(handle), *mapping = NULL;
    if (pinned == NULL)
        return NVS_REAL(cuMemMap)(ptr, size, offset, handle, flags);
    mapping = nvs_allocation_new(NVS_SPACE_ADDRESS, NVS_MEMORY_MAPPING, pinned->gpu);
    CUresult result = mapping != NULL ? NVS_REAL(cuMemMap)(ptr, size, offset, handle, flags) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        mapping->key = ptr;
        mapping->length = size;
        nvs_memory_drop_all(nvs_allocation_map(mapping, pinned));
        return result;
    }
    free(mapping);
    nvs_allocation *last = nvs_allocation_unpin_handle(pinned);
    if (last != NULL)
        nvs_memory_drop(last);
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    nvs_allocation *mappings = nvs_allocation_take_mappings(ptr, size);
    CUresult result = NVS_REAL(cuMemUnmap)(ptr, size);
    nvs_memory_drop_all(nvs_allocation_end_mappings(mappings, result == CUDA_SUCCESS));
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    nvs_allocation as;
    if (nvs_allocation_find(NVS_SPACE_ADDRESS, (CUdeviceptr)(uintptr_t)addr, &as) != NVS_ABSENT && as.chunked)
        return CUDA_ERROR_INVALID_VALUE; /* what the driver says of memory that cuMemAlloc made */
    CUresult result = NVS_REAL(cuMemRetainAllocationHandle)(handle, addr);
    if (result == CUDA_SUCCESS)
        nvs_allocation_retain_handle(*handle);
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
                                                           CUmemAllocationHandleType shHandleType)
{
    CUresult result = NVS_REAL(cuMemImportFromShareableHandle)(handle, osHandle, shHandleType);
    if (result == CUDA_SUCCESS)
        nvs_allocation_retain_handle(*handle); /* one of our own, come back by the same name */
    return result;
}
