/* Managed memory: how much of it the card holds.
 *
 * An allocation's charged_bytes is what this process believes to be resident.  Their sum is paged_bytes in the shared file, which
 * other processes lower when they need room.  Each use first reconciles the two: the oldest allocations lose what was taken.
 */
#include "memory/memory.h"

static uint64_t believed_resident(uint32_t gpu)
{
    uint64_t believed = 0;
    for (size_t i = 0; i < nvs_sim_allocation_count(); i++) {
        const sim_allocation *one = nvs_sim_allocation_at(i);
        if (one->kind == MEM_MANAGED && one->device->gpu == gpu)
            believed += one->charged_bytes;
    }
    return believed;
}

static void reconcile(uint32_t gpu)
{
    uint64_t believed = believed_resident(gpu), left = nvs_sim_paged(gpu);
    for (size_t i = 0; believed > left && i < nvs_sim_allocation_count(); i++) {
        sim_allocation *one = nvs_sim_allocation_at(i);
        if (one->kind != MEM_MANAGED || one->device->gpu != gpu)
            continue;
        uint64_t taken = believed - left < one->charged_bytes ? believed - left : one->charged_bytes;
        one->charged_bytes -= taken;
        believed -= taken;
    }
}

static void bring_in(sim_allocation *one, size_t bytes)
{
    size_t missing = one->bytes - one->charged_bytes;
    if (bytes > missing)
        bytes = missing;
    if (bytes != 0)
        one->charged_bytes += nvs_sim_page_in(one->device->gpu, bytes);
}

/* A kernel may have touched all of it, so all of it is resident as far as there is room. */
void nvs_sim_managed_touch(sim_device *device)
{
    bool reconciled = false;
    for (size_t i = 0; nvs_sim_managed_count != 0 && i < nvs_sim_allocation_count(); i++) {
        sim_allocation *one = nvs_sim_allocation_at(i);
        if (one->kind != MEM_MANAGED || one->device != device)
            continue;
        if (!reconciled)
            reconcile(device->gpu);
        reconciled = true;
        bring_in(one, one->bytes);
    }
}

void nvs_sim_managed_prefetch(CUdeviceptr pointer, size_t bytes, int32_t gpu)
{
    sim_allocation *one = nvs_sim_find((uintptr_t)pointer);
    if (one == NULL || one->kind != MEM_MANAGED)
        return;
    reconcile(one->device->gpu);
    if (gpu >= 0 && (uint32_t)gpu == one->device->gpu) {
        bring_in(one, bytes);
        return;
    }
    size_t out = bytes < one->charged_bytes ? bytes : one->charged_bytes;
    nvs_sim_page_out(one->device->gpu, out);
    one->charged_bytes -= out;
    if (gpu < 0)
        return;
    sim_device *home = nvs_sim_device_of_gpu((uint32_t)gpu);
    if (home == NULL)
        return;
    nvs_sim_page_out(one->device->gpu, one->charged_bytes);
    one->charged_bytes = 0;
    one->device = home;
    reconcile((uint32_t)gpu);
    bring_in(one, bytes);
}

static void released(const sim_allocation *allocation)
{
    const uint32_t gpu = allocation->device->gpu;
    if (allocation->charged_bytes == 0)
        return;
    const uint64_t believed = allocation->charged_bytes + believed_resident(gpu), left = nvs_sim_paged(gpu);
    const uint64_t taken = believed > left ? believed - left : 0; /* other processes may have taken it from this allocation */
    nvs_sim_page_out(gpu, allocation->charged_bytes > taken ? allocation->charged_bytes - taken : 0);
}

SIM_EXPORT CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
    NVS_SIM_ENTER_ALLOCATING();
    NVS_SIM_CHECK(dptr != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_allocate(context, bytesize, MEM_MANAGED, flags, dptr));
    nvs_sim_find_base(*dptr)->released = released;
    return CUDA_SUCCESS;
}

static const sim_allocation *managed_range(CUdeviceptr pointer, size_t bytes)
{
    const sim_allocation *one = nvs_sim_find((uintptr_t)pointer);
    return one != NULL && one->kind == MEM_MANAGED && bytes != 0 && pointer - one->base + bytes <= one->bytes ? one : NULL;
}

static CUresult prefetch(CUdeviceptr pointer, size_t bytes, int32_t ordinal, CUstream handle)
{
    sim_stream *stream;
    sim_device *device = NULL;
    CUresult result = nvs_sim_stream(handle, &stream);
    if (result == CUDA_SUCCESS && ordinal >= 0)
        result = nvs_sim_device(ordinal, &device);
    if (result != CUDA_SUCCESS)
        return result;
    if (managed_range(pointer, bytes) == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    sim_work work = {.kind = OP_PREFETCH, .bytes = bytes, .duration_ns = nvs_sim_copy_ns(bytes),
                     .u.prefetch = {.pointer = pointer, .bytes = bytes, .gpu = device != NULL ? (int32_t)device->gpu : -1}};
    return nvs_sim_submit(stream, &work);
}

SIM_EXPORT CUresult CUDAAPI cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(dstDevice >= 0 || dstDevice == CU_DEVICE_CPU, CUDA_ERROR_INVALID_DEVICE);
    return prefetch(devPtr, count, dstDevice == CU_DEVICE_CPU ? -1 : dstDevice, hStream);
}

static CUresult location_of(CUmemLocation location, int32_t *ordinal)
{
    switch (location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        *ordinal = location.id < 0 ? (int32_t)NVS_SIM_MAX_GPUS : location.id;
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        *ordinal = -1;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

SIM_EXPORT CUresult CUDAAPI cuMemPrefetchAsync_v2(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags,
                                                  CUstream hStream)
{
    int32_t ordinal;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(flags == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(location_of(location, &ordinal));
    return prefetch(devPtr, count, ordinal, hStream);
}

/* Advice has no effect here; it is checked and forgotten. */
static CUresult advise(CUdeviceptr pointer, size_t bytes, CUmem_advise advice, int32_t ordinal)
{
    if (managed_range(pointer, bytes) == NULL || advice < CU_MEM_ADVISE_SET_READ_MOSTLY || advice > CU_MEM_ADVISE_UNSET_ACCESSED_BY)
        return CUDA_ERROR_INVALID_VALUE;
    return ordinal >= nvs_sim_device_count ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuMemAdvise, (CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device), advise(devPtr, count, advice, device))

SIM_EXPORT CUresult CUDAAPI cuMemAdvise_v2(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location)
{
    int32_t ordinal = -1;
    NVS_SIM_ENTER();
    if (advice != CU_MEM_ADVISE_SET_READ_MOSTLY && advice != CU_MEM_ADVISE_UNSET_READ_MOSTLY &&
        advice != CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION)
        NVS_SIM_TRY(location_of(location, &ordinal));
    return advise(devPtr, count, advice, ordinal);
}

SIM_EXPORT CUresult CUDAAPI cuStreamAttachMemAsync(CUstream hStream, CUdeviceptr dptr, size_t length, unsigned int flags)
{
    NVS_SIM_ENTER_FIND(sim_stream *stream, nvs_sim_stream(hStream, &stream));
    sim_allocation *allocation = nvs_sim_find((uintptr_t)dptr);
    NVS_SIM_CHECK(allocation != NULL && allocation->kind == MEM_MANAGED, CUDA_ERROR_INVALID_VALUE);
    sim_work work = {.kind = OP_EMPTY};
    return nvs_sim_submit(stream, &work);
}
