/* Physical memory: a handle is a memfd, charged to its device while it lives. */
#include "vmm/vmm.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

SIM_EXPORT CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                                          CUmemAllocationGranularity_flags option)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(granularity != NULL && prop != NULL && (unsigned)option <= CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
                  CUDA_ERROR_INVALID_VALUE);
    *granularity = SIM_GRANULARITY;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_physical(CUmemGenericAllocationHandle handle, sim_physical **out)
{
    sim_physical *physical = (sim_physical *)(uintptr_t)handle;
    if (physical == NULL || physical->magic != SIM_PHYSICAL || physical->references == 0)
        return CUDA_ERROR_INVALID_VALUE;
    *out = physical;
    return CUDA_SUCCESS;
}

static CUresult check_properties(const CUmemAllocationProp *properties, sim_device **device)
{
    *device = NULL;
    if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        (properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE &&
         properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        return CUDA_ERROR_INVALID_VALUE;
    switch (properties->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: return nvs_sim_device(properties->location.id, device);
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

SIM_EXPORT CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                                        unsigned long long flags)
{
    sim_device *device;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(handle != NULL && prop != NULL && flags == 0 && size != 0 && size % SIM_GRANULARITY == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(check_properties(prop, &device));
    NVS_SIM_CHECK(device == NULL || nvs_sim_charge(device->gpu, size), CUDA_ERROR_OUT_OF_MEMORY);
    sim_physical *physical = calloc(1, sizeof *physical);
    int file = (int)syscall(SYS_memfd_create, "simulated_gpu_memory", 1u /* MFD_CLOEXEC */);
    if (physical == NULL || file < 0 || ftruncate(file, (off_t)size + SIM_CHARGE_RECORD_BYTES) != 0)
        goto out;
    *physical = (sim_physical){.magic = SIM_PHYSICAL, .references = 1, .bytes = size, .file = file, .device = device,
                               .charged = device != NULL, .properties = *prop};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
out:
    if (file >= 0)
        close(file);
    free(physical);
    if (device != NULL)
        nvs_sim_uncharge(device->gpu, size);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

bool nvs_sim_charge_record_write(int file, size_t bytes, int32_t process, uint32_t gpu)
{
    const sim_charge_record record = {.process = process, .gpu = gpu};
    return pwrite(file, &record, sizeof record, (off_t)bytes) == (ssize_t)sizeof record;
}

void nvs_sim_physical_free_unused(sim_physical *physical)
{
    if (physical->references != 0 || physical->mappings != 0)
        return;
    if (physical->charged) {
        nvs_sim_uncharge(physical->device->gpu, physical->bytes);
        if (physical->imported || physical->properties.requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE)
            (void)nvs_sim_charge_record_write(physical->file, physical->bytes, 0, physical->device->gpu);
    }
    close(physical->file);
    physical->magic = 0;
    free(physical);
}

SIM_EXPORT CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle)
{
    NVS_SIM_ENTER_FIND(sim_physical *physical, nvs_sim_physical(handle, &physical));
    physical->references--;
    nvs_sim_physical_free_unused(physical);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    NVS_SIM_ENTER();
    sim_allocation *one = nvs_sim_find((uintptr_t)addr);
    NVS_SIM_CHECK(handle != NULL && one != NULL && one->kind == MEM_MAPPED, CUDA_ERROR_INVALID_VALUE);
    sim_physical *physical = one->account.handle;
    physical->references++;
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    NVS_SIM_ENTER_FIND(sim_physical *physical, nvs_sim_physical(handle, &physical));
    NVS_SIM_CHECK(prop != NULL, CUDA_ERROR_INVALID_VALUE);
    *prop = physical->properties;
    return CUDA_SUCCESS;
}
