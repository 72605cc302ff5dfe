/* cuMemAlloc and cuMemFree, and the amount of device memory. */
#include "memory/memory.h"

SIM_EXPORT CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
    NVS_SIM_ENTER_ALLOCATING();
    NVS_SIM_CHECK(dptr != NULL, CUDA_ERROR_INVALID_VALUE);
    return nvs_sim_allocate(context, bytesize, MEM_DEVICE, dptr);
}

SIM_EXPORT CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
                                               unsigned int ElementSizeBytes)
{
    NVS_SIM_ENTER_ALLOCATING();
    NVS_SIM_CHECK(dptr != NULL && pPitch != NULL && WidthInBytes != 0 && Height != 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(ElementSizeBytes == 4 || ElementSizeBytes == 8 || ElementSizeBytes == 16, CUDA_ERROR_INVALID_VALUE);
    size_t pitch = (WidthInBytes + 511) / 512 * 512;
    NVS_SIM_CHECK(Height <= ((size_t)1 << 46) / pitch, CUDA_ERROR_OUT_OF_MEMORY);
    NVS_SIM_TRY(nvs_sim_allocate(context, pitch * Height, MEM_DEVICE, dptr));
    *pPitch = pitch;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemFree_v2(CUdeviceptr dptr)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(context->error);
    if (dptr == 0)
        return CUDA_SUCCESS;
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    sim_allocation *allocation = nvs_sim_find_base(dptr);
    NVS_SIM_CHECK(allocation != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(allocation->kind == MEM_DEVICE || allocation->kind == MEM_MANAGED || allocation->kind == MEM_POOL ||
                      allocation->kind == MEM_GRAPH,
                  CUDA_ERROR_INVALID_VALUE);
    sim_device *device = allocation->device;
    if (allocation->kind == MEM_GRAPH) {
        const bool allocated = nvs_sim_graph_memory_free(allocation->account.handle);
        nvs_sim_device_wait(device);
        return allocated ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    NVS_SIM_CHECK(!allocation->account.freed, CUDA_ERROR_INVALID_VALUE);
    allocation->account.freed = true; /* in driver 580 the pool goes on counting it */
    nvs_sim_device_wait(device); /* as in the driver, work that uses it ends first */
    return nvs_sim_release((uintptr_t)dptr);
}

SIM_EXPORT CUresult CUDAAPI cuMemGetInfo_v2(size_t *free, size_t *total)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(context->error);
    NVS_SIM_CHECK(free != NULL && total != NULL, CUDA_ERROR_INVALID_VALUE);
    *free = nvs_sim_free(context->device->gpu);
    *total = context->device->capacity_bytes;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
    NVS_SIM_ENTER();
    sim_allocation *allocation = nvs_sim_find((uintptr_t)dptr);
    NVS_SIM_CHECK(allocation != NULL && allocation->kind != MEM_REGISTERED, CUDA_ERROR_NOT_FOUND);
    if (pbase != NULL)
        *pbase = allocation->base;
    if (psize != NULL)
        *psize = allocation->bytes;
    return CUDA_SUCCESS;
}
