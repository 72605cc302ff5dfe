/* Allocations: one sorted table of everything that CUDA knows about, and where its bytes are kept.
 *
 * Device memory is private host memory of this process; what the card would hold of it is charged in the shared file.
 * Small allocations come from malloc, so that the sanitizers see an overrun; others from mmap.
 */
#include "base/sim.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ALIGNMENT 512u
#define MAPPED_FROM (1u << 16)

static sim_allocation *table; /* sorted by base, without overlaps */
static size_t count, room;
uint64_t nvs_sim_managed_count;

size_t nvs_sim_allocation_count(void) { return count; }
sim_allocation *nvs_sim_allocation_at(size_t index) { return &table[index]; }

/* Index of the first entry whose base is greater. */
static size_t after(uintptr_t address)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (table[middle].base <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

sim_allocation *nvs_sim_find(uintptr_t address)
{
    size_t index = after(address);
    if (index == 0)
        return NULL;
    sim_allocation *candidate = &table[index - 1];
    return address - candidate->base < candidate->bytes ? candidate : NULL;
}

CUresult nvs_sim_insert(const sim_allocation *allocation)
{
    if (count == room) {
        size_t wanted = room == 0 ? 256 : room * 2;
        sim_allocation *larger = realloc(table, wanted * sizeof *table);
        if (larger == NULL)
            return CUDA_ERROR_OUT_OF_MEMORY;
        table = larger;
        room = wanted;
    }
    size_t index = after(allocation->base);
    memmove(&table[index + 1], &table[index], (count - index) * sizeof *table);
    table[index] = *allocation;
    table[index].id = nvs_sim_next_id++;
    nvs_sim_managed_count += allocation->kind == MEM_MANAGED;
    count++;
    return CUDA_SUCCESS;
}

void nvs_sim_remove(sim_allocation *allocation)
{
    size_t index = (size_t)(allocation - table);
    nvs_sim_managed_count -= allocation->kind == MEM_MANAGED;
    memmove(&table[index], &table[index + 1], (count - index - 1) * sizeof *table);
    count--;
}

bool nvs_sim_accessible(uintptr_t address, size_t bytes)
{
    bool accessible;
    if (bytes == 0 || nvs_sim_vmm_reserved(address, bytes, &accessible))
        return bytes == 0 || accessible;
    sim_allocation *allocation = nvs_sim_find(address);
    return allocation == NULL || address - allocation->base + bytes <= allocation->bytes;
}

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

CUresult nvs_sim_allocate(sim_context *context, size_t bytes, enum sim_memory_kind kind, unsigned flags, CUdeviceptr *out)
{
    sim_device *device = context->device;
    bool charged = kind == MEM_DEVICE || kind == MEM_POOL;
    size_t charge = charged ? (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT : 0;
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > (size_t)1 << 46 || (charged && !nvs_sim_charge(device->gpu, charge)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim_allocation allocation = {.bytes = bytes, .charged_bytes = charge, .kind = kind, .device = device,
                                 .context = context->owner != NULL ? context->owner : context,
                                 .flags = flags, .last_prefetch = -2, .preferred = -2};
    void *memory = host_bytes(bytes, &allocation.mapped_bytes);
    allocation.base = (uintptr_t)memory;
    CUresult result = memory == NULL ? CUDA_ERROR_OUT_OF_MEMORY : nvs_sim_insert(&allocation);
    if (result != CUDA_SUCCESS) {
        if (allocation.mapped_bytes != 0)
            munmap(memory, allocation.mapped_bytes);
        else
            free(memory);
        if (charged)
            nvs_sim_uncharge(device->gpu, charge);
        return result;
    }
    *out = (CUdeviceptr)(uintptr_t)memory;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_release(uintptr_t base)
{
    sim_allocation *found = nvs_sim_find(base);
    if (found == NULL || found->base != base)
        return CUDA_ERROR_INVALID_VALUE;
    sim_allocation allocation = *found;
    nvs_sim_remove(found);
    if (allocation.shared_file != 0)
        close(allocation.shared_file - 1); /* importers keep what they have mapped */
    if (allocation.kind == MEM_MANAGED && allocation.charged_bytes != 0)
        nvs_sim_managed_forget(&allocation);
    else if (allocation.charged_bytes != 0)
        nvs_sim_uncharge(allocation.device->gpu, allocation.charged_bytes);
    if (allocation.kind == MEM_POOL)
        nvs_sim_pool_freed(&allocation);
    if (allocation.kind == MEM_GRAPH)
        nvs_sim_graph_memory_gone(&allocation);
    if (allocation.kind == MEM_REGISTERED)
        return CUDA_SUCCESS;
    if (allocation.mapped_bytes != 0)
        munmap((void *)allocation.base, allocation.mapped_bytes);
    else
        free((void *)allocation.base);
    return CUDA_SUCCESS;
}

/* Also declares `context`; the call is not allowed during a capture. */
#define ENTER_ALLOCATING()                                                                      \
    NVS_SIM_ENTER_CONTEXT();                                                                    \
    NVS_SIM_TRY(nvs_sim_capture_unsafe());                                                      \
    NVS_SIM_TRY(nvs_sim_context_usable(context))

SIM_EXPORT CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
    ENTER_ALLOCATING();
    NVS_SIM_CHECK(dptr != NULL, CUDA_ERROR_INVALID_VALUE);
    return nvs_sim_return(nvs_sim_allocate(context, bytesize, MEM_DEVICE, 0, dptr));
}

SIM_EXPORT CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
                                               unsigned int ElementSizeBytes)
{
    ENTER_ALLOCATING();
    NVS_SIM_CHECK(dptr != NULL && pPitch != NULL && WidthInBytes != 0 && Height != 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(ElementSizeBytes == 4 || ElementSizeBytes == 8 || ElementSizeBytes == 16, CUDA_ERROR_INVALID_VALUE);
    size_t pitch = (WidthInBytes + 511) / 512 * 512;
    NVS_SIM_CHECK(Height <= ((size_t)1 << 46) / pitch, CUDA_ERROR_OUT_OF_MEMORY);
    NVS_SIM_TRY(nvs_sim_allocate(context, pitch * Height, MEM_DEVICE, 0, dptr));
    *pPitch = pitch;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
    ENTER_ALLOCATING();
    NVS_SIM_CHECK(dptr != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST, CUDA_ERROR_INVALID_VALUE);
    return nvs_sim_return(nvs_sim_allocate(context, bytesize, MEM_MANAGED, flags, dptr));
}

SIM_EXPORT CUresult CUDAAPI cuMemFree_v2(CUdeviceptr dptr)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(nvs_sim_context_usable(context));
    if (dptr == 0)
        return nvs_sim_return(CUDA_SUCCESS);
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    sim_allocation *allocation = nvs_sim_find((uintptr_t)dptr);
    NVS_SIM_CHECK(allocation != NULL && allocation->base == (uintptr_t)dptr, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(allocation->kind == MEM_DEVICE || allocation->kind == MEM_MANAGED || allocation->kind == MEM_POOL ||
                      allocation->kind == MEM_GRAPH,
                  CUDA_ERROR_INVALID_VALUE);
    sim_device *device = allocation->device;
    if (allocation->kind == MEM_GRAPH) {
        const bool allocated = nvs_sim_graph_memory_free(allocation->handle);
        nvs_sim_device_wait(device);
        return nvs_sim_return(allocated ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
    }
    NVS_SIM_CHECK(!allocation->freed, CUDA_ERROR_INVALID_VALUE);
    allocation->freed = true; /* a driver 580 goes on counting it as the pool's */
    nvs_sim_device_wait(device); /* what uses it has ended, as the driver sees to it */
    return nvs_sim_return(nvs_sim_release((uintptr_t)dptr));
}

SIM_EXPORT CUresult CUDAAPI cuMemGetInfo_v2(size_t *free, size_t *total)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(nvs_sim_context_usable(context));
    NVS_SIM_CHECK(free != NULL && total != NULL, CUDA_ERROR_INVALID_VALUE);
    *free = nvs_sim_free(context->device->gpu);
    *total = context->device->capacity_bytes;
    return nvs_sim_return(CUDA_SUCCESS);
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
    return nvs_sim_return(CUDA_SUCCESS);
}

/* Host memory. */

static CUresult host_allocate(void **out, size_t bytes, unsigned flags)
{
    const unsigned known = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    sim_context *context = nvs_sim_current();
    CUdeviceptr pointer;
    CUresult result = context == NULL ? nvs_sim_no_context() : nvs_sim_capture_unsafe();
    if (result == CUDA_SUCCESS)
        result = context->error;
    if (result == CUDA_SUCCESS && (out == NULL || (flags & ~known) != 0))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = nvs_sim_allocate(context, bytes, MEM_HOST, flags, &pointer);
    if (result == CUDA_SUCCESS)
        *out = (void *)(uintptr_t)pointer;
    return result;
}

SIM_EXPORT CUresult CUDAAPI cuMemAllocHost_v2(void **pp, size_t bytesize)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(host_allocate(pp, bytesize, 0));
}

SIM_EXPORT CUresult CUDAAPI cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(host_allocate(pp, bytesize, Flags));
}

SIM_EXPORT CUresult CUDAAPI cuMemFreeHost(void *p)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(nvs_sim_context_usable(context));
    sim_allocation *allocation = nvs_sim_find((uintptr_t)p);
    if (p == NULL)
        return nvs_sim_return(CUDA_SUCCESS);
    NVS_SIM_CHECK(allocation != NULL && allocation->kind == MEM_HOST && allocation->base == (uintptr_t)p, CUDA_ERROR_INVALID_VALUE);
    nvs_sim_device_wait(allocation->device);
    return nvs_sim_return(nvs_sim_release((uintptr_t)p));
}

SIM_EXPORT CUresult CUDAAPI cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(nvs_sim_context_usable(context));
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    NVS_SIM_CHECK(p != NULL && bytesize != 0, CUDA_ERROR_INVALID_VALUE);
    size_t index = after((uintptr_t)p + bytesize - 1);
    NVS_SIM_CHECK(index == 0 || table[index - 1].base + table[index - 1].bytes <= (uintptr_t)p,
                  CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    sim_allocation allocation = {.base = (uintptr_t)p, .bytes = bytesize, .kind = MEM_REGISTERED, .device = context->device,
                                 .context = context, .flags = Flags, .last_prefetch = -2, .preferred = -2};
    return nvs_sim_return(nvs_sim_insert(&allocation));
}

SIM_EXPORT CUresult CUDAAPI cuMemHostUnregister(void *p)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(nvs_sim_context_usable(context));
    sim_allocation *allocation = nvs_sim_find((uintptr_t)p);
    NVS_SIM_CHECK(allocation != NULL && allocation->kind == MEM_REGISTERED && allocation->base == (uintptr_t)p,
                  CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    nvs_sim_device_wait(allocation->device);
    return nvs_sim_return(nvs_sim_release((uintptr_t)p));
}

SIM_EXPORT CUresult CUDAAPI cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags)
{
    NVS_SIM_ENTER_CONTEXT();
    sim_allocation *allocation = nvs_sim_find((uintptr_t)p);
    NVS_SIM_CHECK(pdptr != NULL && Flags == 0 && allocation != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(allocation->kind == MEM_HOST || allocation->kind == MEM_REGISTERED, CUDA_ERROR_INVALID_VALUE);
    *pdptr = (CUdeviceptr)(uintptr_t)p;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemHostGetFlags(unsigned int *pFlags, void *p)
{
    NVS_SIM_ENTER_CONTEXT();
    sim_allocation *allocation = nvs_sim_find((uintptr_t)p);
    NVS_SIM_CHECK(pFlags != NULL && allocation != NULL && allocation->kind == MEM_HOST, CUDA_ERROR_INVALID_VALUE);
    *pFlags = allocation->flags | CU_MEMHOSTALLOC_DEVICEMAP;
    return nvs_sim_return(CUDA_SUCCESS);
}
