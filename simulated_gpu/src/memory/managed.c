/* Managed memory: how much of it the card holds.
 *
 * An allocation's charged_bytes is what this process believes to be resident; the sum stands as paged_bytes in the
 * shared file, where others may lower it when they need room.  Before each use the two are reconciled: what was taken
 * is taken from the oldest allocations.
 */
#include "base/sim.h"

void nvs_sim_managed_reconcile(uint32_t gpu)
{
    uint64_t believed = 0, left = nvs_sim_paged(gpu);
    for (size_t i = 0; i < nvs_sim_allocation_count(); i++) {
        sim_allocation *one = nvs_sim_allocation_at(i);
        if (one->kind == MEM_MANAGED && one->device->gpu == gpu)
            believed += one->charged_bytes;
    }
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

/* A kernel has run: it may have touched anything, so all of it is there as far as there is room. */
void nvs_sim_managed_touch(sim_device *device)
{
    bool reconciled = false;
    for (size_t i = 0; nvs_sim_managed_count != 0 && i < nvs_sim_allocation_count(); i++) {
        sim_allocation *one = nvs_sim_allocation_at(i);
        if (one->kind != MEM_MANAGED || one->device != device)
            continue;
        if (!reconciled)
            nvs_sim_managed_reconcile(device->gpu);
        reconciled = true;
        bring_in(one, one->bytes);
    }
}

void nvs_sim_managed_prefetch(CUdeviceptr pointer, size_t bytes, int32_t gpu)
{
    sim_allocation *one = nvs_sim_find((uintptr_t)pointer);
    if (one == NULL || one->kind != MEM_MANAGED)
        return;
    nvs_sim_managed_reconcile(one->device->gpu);
    one->last_prefetch = gpu;
    if (gpu >= 0 && (uint32_t)gpu == one->device->gpu) {
        bring_in(one, bytes);
        return;
    }
    size_t out = bytes < one->charged_bytes ? bytes : one->charged_bytes;
    nvs_sim_page_out(one->device->gpu, out);
    one->charged_bytes -= out;
    if (gpu < 0)
        return;
    for (int i = 0; i < nvs_sim_device_count; i++) /* it lives on another card from now on */
        if (nvs_sim_devices[i].gpu == (uint32_t)gpu) {
            nvs_sim_page_out(one->device->gpu, one->charged_bytes);
            one->charged_bytes = 0;
            one->device = &nvs_sim_devices[i];
            nvs_sim_managed_reconcile((uint32_t)gpu);
            bring_in(one, bytes);
            return;
        }
}

void nvs_sim_managed_forget(sim_allocation *allocation)
{
    uint32_t gpu = allocation->device->gpu;
    uint64_t believed = allocation->charged_bytes, left = nvs_sim_paged(gpu);
    for (size_t i = 0; i < nvs_sim_allocation_count(); i++) {
        sim_allocation *one = nvs_sim_allocation_at(i);
        if (one->kind == MEM_MANAGED && one->device->gpu == gpu)
            believed += one->charged_bytes;
    }
    uint64_t taken = believed > left ? believed - left : 0; /* what others took may have been of this one */
    nvs_sim_page_out(gpu, allocation->charged_bytes > taken ? allocation->charged_bytes - taken : 0);
}

/* The interface. */

static CUresult prefetch(CUdeviceptr pointer, size_t bytes, int32_t ordinal, CUstream handle)
{
    sim_stream *stream;
    sim_device *device = NULL;
    CUresult result = nvs_sim_stream(handle, &stream);
    if (result == CUDA_SUCCESS && ordinal >= 0)
        result = nvs_sim_device(ordinal, &device);
    if (result != CUDA_SUCCESS)
        return result;
    sim_allocation *one = nvs_sim_find((uintptr_t)pointer);
    if (one == NULL || one->kind != MEM_MANAGED || bytes == 0 || pointer - one->base + bytes > one->bytes)
        return CUDA_ERROR_INVALID_VALUE;
    sim_work work = {.kind = OP_PREFETCH, .bytes = bytes, .duration_ns = nvs_sim_copy_ns(bytes),
                     .u.prefetch = {.pointer = pointer, .bytes = bytes, .gpu = device != NULL ? (int32_t)device->gpu : -1}};
    return nvs_sim_submit(stream, &work);
}

SIM_EXPORT CUresult CUDAAPI cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(dstDevice >= 0 || dstDevice == CU_DEVICE_CPU, CUDA_ERROR_INVALID_DEVICE);
    return nvs_sim_return(prefetch(devPtr, count, dstDevice == CU_DEVICE_CPU ? -1 : dstDevice, hStream));
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
    return nvs_sim_return(prefetch(devPtr, count, ordinal, hStream));
}

static CUresult advise(CUdeviceptr pointer, size_t bytes, CUmem_advise advice, int32_t ordinal)
{
    sim_allocation *one = nvs_sim_find((uintptr_t)pointer);
    if (one == NULL || one->kind != MEM_MANAGED || bytes == 0 || pointer - one->base + bytes > one->bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (ordinal >= nvs_sim_device_count)
        return CUDA_ERROR_INVALID_DEVICE;
    switch (advice) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY: one->read_mostly = true; break;
    case CU_MEM_ADVISE_UNSET_READ_MOSTLY: one->read_mostly = false; break;
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION: one->preferred = ordinal; break;
    case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: one->preferred = -2; break;
    case CU_MEM_ADVISE_SET_ACCESSED_BY: one->accessed_by |= ordinal >= 0 ? 1ull << ordinal : 1ull << 63; break;
    case CU_MEM_ADVISE_UNSET_ACCESSED_BY: one->accessed_by &= ~(ordinal >= 0 ? 1ull << ordinal : 1ull << 63); break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemAdvise(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(advise(devPtr, count, advice, device));
}

SIM_EXPORT CUresult CUDAAPI cuMemAdvise_v2(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location)
{
    int32_t ordinal = -1;
    NVS_SIM_ENTER();
    if (advice != CU_MEM_ADVISE_SET_READ_MOSTLY && advice != CU_MEM_ADVISE_UNSET_READ_MOSTLY &&
        advice != CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION)
        NVS_SIM_TRY(location_of(location, &ordinal));
    return nvs_sim_return(advise(devPtr, count, advice, ordinal));
}
