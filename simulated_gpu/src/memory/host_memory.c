/* Page-locked host memory: allocated or registered. */
#include "memory/memory.h"

static CUresult host_allocate(void **out, size_t bytes, unsigned flags)
{
    const unsigned known = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    sim_context *context = nvs_sim_current();
    CUdeviceptr pointer;
    NVS_SIM_CHECK(context != NULL, nvs_sim_no_context());
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    NVS_SIM_TRY(context->error);
    NVS_SIM_CHECK(out != NULL && (flags & ~known) == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_allocate(context, bytes, MEM_HOST, &pointer));
    *out = (void *)(uintptr_t)pointer;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuMemAllocHost_v2, (void **pp, size_t bytesize), host_allocate(pp, bytesize, 0))
NVS_SIM_ENTRY(cuMemHostAlloc, (void **pp, size_t bytesize, unsigned int Flags), host_allocate(pp, bytesize, Flags))

SIM_EXPORT CUresult CUDAAPI cuMemFreeHost(void *p)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(context->error);
    sim_allocation *allocation = nvs_sim_find_base((CUdeviceptr)(uintptr_t)p);
    if (p == NULL)
        return CUDA_SUCCESS;
    NVS_SIM_CHECK(allocation != NULL && allocation->kind == MEM_HOST, CUDA_ERROR_INVALID_VALUE);
    nvs_sim_device_wait(allocation->device);
    return nvs_sim_release((uintptr_t)p);
}

SIM_EXPORT CUresult CUDAAPI cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(context->error);
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    NVS_SIM_CHECK(p != NULL && bytesize != 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(!nvs_sim_overlaps((uintptr_t)p, bytesize), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    sim_allocation allocation = {.base = (uintptr_t)p, .bytes = bytesize, .kind = MEM_REGISTERED, .device = context->device,
                                 .context = context};
    return nvs_sim_insert(&allocation);
}

SIM_EXPORT CUresult CUDAAPI cuMemHostUnregister(void *p)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(context->error);
    sim_allocation *allocation = nvs_sim_find_base((CUdeviceptr)(uintptr_t)p);
    NVS_SIM_CHECK(allocation != NULL && allocation->kind == MEM_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    nvs_sim_device_wait(allocation->device);
    return nvs_sim_release((uintptr_t)p);
}

SIM_EXPORT CUresult CUDAAPI cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags)
{
    NVS_SIM_ENTER_CONTEXT();
    sim_allocation *allocation = nvs_sim_find((uintptr_t)p);
    NVS_SIM_CHECK(pdptr != NULL && Flags == 0 && allocation != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(allocation->kind == MEM_HOST || allocation->kind == MEM_REGISTERED, CUDA_ERROR_INVALID_VALUE);
    *pdptr = (CUdeviceptr)(uintptr_t)p;
    return CUDA_SUCCESS;
}
