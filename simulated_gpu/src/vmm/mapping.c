/* Virtual memory management: reserved ranges, and physical memory that is mapped there.
 *
 * A mapping is the file of the physical memory, mapped over the reserved range.  After an unmap the bytes are inaccessible; a second
 * mapping at the same address has the same bytes.  Memory without access rights has PROT_NONE.
 */
#include "vmm/vmm.h"

#include <sys/mman.h>

SIM_EXPORT CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                                unsigned long long flags)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(ptr != NULL && size != 0 && size % SIM_GRANULARITY == 0 && flags == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK((alignment & (alignment - 1)) == 0, CUDA_ERROR_INVALID_VALUE);
    return nvs_sim_reserve(size, alignment > SIM_GRANULARITY ? alignment : SIM_GRANULARITY, addr, ptr);
}

NVS_SIM_ENTRY(cuMemAddressFree, (CUdeviceptr ptr, size_t size), nvs_sim_unreserve(ptr, size))

SIM_EXPORT CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                                     unsigned long long flags)
{
    NVS_SIM_ENTER_FIND(sim_physical *physical, nvs_sim_physical(handle, &physical));
    NVS_SIM_CHECK(offset == 0 && flags == 0 && size == physical->bytes && ptr % SIM_GRANULARITY == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(nvs_sim_reserved((uintptr_t)ptr, size), CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(!nvs_sim_overlaps((uintptr_t)ptr, size), CUDA_ERROR_INVALID_VALUE);
    sim_device *device = physical->device != NULL ? physical->device : &nvs_sim_devices[0];
    sim_allocation mapping = {.base = (uintptr_t)ptr, .bytes = size, .mapped_bytes = size, .kind = MEM_MAPPED, .device = device,
                              .account = {.handle = physical}};
    NVS_SIM_TRY(nvs_sim_insert(&mapping));
    if (mmap((void *)(uintptr_t)ptr, size, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->file, 0) == MAP_FAILED) {
        nvs_sim_remove(nvs_sim_find((uintptr_t)ptr));
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    physical->mappings++;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(size != 0 && nvs_sim_each_mapping((uintptr_t)ptr, size, true, NULL, 0), CUDA_ERROR_INVALID_VALUE);
    nvs_sim_transfers_wait(); /* later copies check the table again */
    mmap((void *)(uintptr_t)ptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (uintptr_t at = (uintptr_t)ptr; at < (uintptr_t)ptr + size;) {
        sim_allocation *one = nvs_sim_find(at);
        sim_physical *physical = one->account.handle;
        at += one->bytes;
        nvs_sim_remove(one);
        physical->mappings--;
        nvs_sim_physical_free_unused(physical);
    }
    return CUDA_SUCCESS;
}

static uint64_t bit_of(CUmemLocation location)
{
    return location.type == CU_MEM_LOCATION_TYPE_DEVICE ? 1ull << location.id : SIM_HOST_BIT;
}

static bool is_reachable(sim_allocation *one, uint64_t ordinal)
{
    const sim_device *owner = ((const sim_physical *)one->account.handle)->device, *by = &nvs_sim_devices[ordinal];
    return owner == NULL || owner == by || nvs_sim_peers_possible(by, owner);
}

static bool allow(sim_allocation *one, uint64_t bit)
{
    one->accessed_by |= bit;
    return mprotect((void *)one->base, one->bytes, PROT_READ | PROT_WRITE) == 0;
}

static bool forbid(sim_allocation *one, uint64_t bit)
{
    one->accessed_by &= ~bit;
    return one->accessed_by != 0 || mprotect((void *)one->base, one->bytes, PROT_NONE) == 0;
}

SIM_EXPORT CUresult CUDAAPI cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(desc != NULL && count != 0 && size != 0 && nvs_sim_each_mapping((uintptr_t)ptr, size, true, NULL, 0),
                  CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        sim_device *device;
        if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
            continue;
        NVS_SIM_TRY(nvs_sim_device(desc[i].location.id, &device));
        NVS_SIM_CHECK(nvs_sim_each_mapping((uintptr_t)ptr, size, true, is_reachable, (uint64_t)device->ordinal), CUDA_ERROR_INVALID_DEVICE);
    }
    for (size_t i = 0; i < count; i++) {
        bool none = desc[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE;
        NVS_SIM_CHECK(nvs_sim_each_mapping((uintptr_t)ptr, size, true, none ? forbid : allow, bit_of(desc[i].location)),
                      CUDA_ERROR_UNKNOWN);
    }
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
    NVS_SIM_ENTER();
    sim_allocation *one = nvs_sim_find((uintptr_t)ptr);
    NVS_SIM_CHECK(flags != NULL && location != NULL && one != NULL && one->kind == MEM_MAPPED, CUDA_ERROR_INVALID_VALUE);
    *flags = (one->accessed_by & bit_of(*location)) != 0 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}
