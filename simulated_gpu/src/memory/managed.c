/* Managed memory: the bytes that are resident on the card.
 *
 * charged_bytes of an allocation is its resident part as this process last knew it.  The sum is paged_bytes in the shared file, which
 * other processes lower when they need room.  Each use first reconciles the two: the first allocations of the table lose the bytes.
 */
#include "memory/memory.h"

static uint64_t known_resident(uint32_t gpu)
{
    uint64_t known = 0;
    NVS_SIM_EACH_ALLOCATION(one)
        if (one->kind == MEM_MANAGED && one->device->gpu == gpu)
            known += one->charged_bytes;
    return known;
}

static void reconcile(uint32_t gpu)
{
    uint64_t known = known_resident(gpu), left = nvs_sim_paged(gpu);
    NVS_SIM_EACH_ALLOCATION(one) {
        if (known <= left)
            break;
        if (one->kind != MEM_MANAGED || one->device->gpu != gpu)
            continue;
        uint64_t taken = known - left < one->charged_bytes ? known - left : one->charged_bytes;
        one->charged_bytes -= taken;
        known -= taken;
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

/* A kernel may touch every byte: all managed memory of the device becomes resident, as far as there is room. */
void nvs_sim_managed_touch(sim_device *device)
{
    bool reconciled = false;
    if (nvs_sim_managed_count == 0)
        return;
    NVS_SIM_EACH_ALLOCATION(one) {
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
    const uint64_t known = allocation->charged_bytes + known_resident(gpu), left = nvs_sim_paged(gpu);
    const uint64_t taken = known > left ? known - left : 0; /* paged out by other processes, perhaps from this allocation */
    nvs_sim_page_out(gpu, allocation->charged_bytes > taken ? allocation->charged_bytes - taken : 0);
}

SIM_EXPORT CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
    NVS_SIM_ENTER_ALLOCATING();
    NVS_SIM_CHECK(dptr != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_allocate(context, bytesize, MEM_MANAGED, dptr));
    nvs_sim_find_base(*dptr)->account.released = released;
    return CUDA_SUCCESS;
}
