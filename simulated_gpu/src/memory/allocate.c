/* Allocations: their bytes, and their charge.
 *
 * Device memory is private host memory of this process; the shared file records its size as used on the card.
 * Small allocations come from malloc, so that sanitizers detect an overrun; others come from mmap.
 */
#include "memory/memory.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define ALIGNMENT 512u
#define MAPPED_FROM (1u << 16)

static void *host_bytes(size_t bytes, size_t *mapped)
{
    *mapped = 0;
    if (bytes < MAPPED_FROM) {
        void *memory;
        return posix_memalign(&memory, ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT) == 0 ? memory : NULL;
    }
    size_t rounded = (bytes + 4095) / 4096 * 4096;
    void *memory = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    *mapped = rounded;
    return memory;
}

static void free_bytes(const sim_allocation *allocation)
{
    if (allocation->mapped_bytes != 0)
        munmap((void *)allocation->base, allocation->mapped_bytes);
    else
        free((void *)allocation->base);
}

CUresult nvs_sim_allocate(sim_context *context, size_t bytes, enum sim_memory_kind kind, CUdeviceptr *out)
{
    sim_device *device = context->device;
    bool charged = kind == MEM_DEVICE || kind == MEM_POOL;
    size_t charge = charged ? (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT : 0;
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > (size_t)1 << 46 || (charged && !nvs_sim_charge(device->gpu, charge)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim_allocation allocation = {.bytes = bytes, .charged_bytes = charge, .kind = kind, .device = device,
                                 .context = context->owner != NULL ? context->owner : context};
    void *memory = host_bytes(bytes, &allocation.mapped_bytes);
    allocation.base = (uintptr_t)memory;
    CUresult result = memory == NULL ? CUDA_ERROR_OUT_OF_MEMORY : nvs_sim_insert(&allocation);
    if (result != CUDA_SUCCESS) {
        if (memory != NULL)
            free_bytes(&allocation);
        if (charged)
            nvs_sim_uncharge(device->gpu, charge);
        return result;
    }
    *out = (CUdeviceptr)(uintptr_t)memory;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_release(uintptr_t base)
{
    sim_allocation *found = nvs_sim_find_base(base);
    if (found == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    sim_allocation allocation = *found;
    nvs_sim_remove(found);
    if (allocation.ipc.file != 0)
        close(allocation.ipc.file - 1); /* importers keep their mappings */
    if (allocation.kind != MEM_MANAGED && allocation.charged_bytes != 0)
        nvs_sim_uncharge(allocation.device->gpu, allocation.charged_bytes);
    if (allocation.account.released != NULL)
        allocation.account.released(&allocation);
    if (allocation.kind != MEM_REGISTERED)
        free_bytes(&allocation);
    return CUDA_SUCCESS;
}
