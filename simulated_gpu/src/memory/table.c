/* The table of addresses: allocations, sorted by address, and ranges that are reserved for mappings.
 *
 * Device memory is private host memory of this process; the shared file records its size as used on the card.
 * Small allocations come from malloc, so that sanitizers detect an overrun; others come from mmap.
 * A kind with its own accounting (managed, pool, graph) sets account.released, which runs when the allocation has left the table.
 */
#include "memory/memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct reservation {
    uintptr_t base;
    size_t bytes, raw_bytes; /* raw: including the alignment */
    void *raw;
} reservation;

static reservation *reservations; /* unsorted: there are few */
static size_t reservation_count;

sim_allocation *nvs_sim_allocations;
size_t nvs_sim_allocation_count;
static size_t room;
uint64_t nvs_sim_managed_count;

/* Index of the first entry whose base is greater. */
static size_t after(uintptr_t address)
{
    size_t low = 0, high = nvs_sim_allocation_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (nvs_sim_allocations[middle].base <= address)
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
    sim_allocation *candidate = &nvs_sim_allocations[index - 1];
    return address - candidate->base < candidate->bytes ? candidate : NULL;
}

sim_allocation *nvs_sim_find_base(CUdeviceptr pointer)
{
    sim_allocation *found = nvs_sim_find((uintptr_t)pointer);
    return found != NULL && found->base == (uintptr_t)pointer ? found : NULL;
}

bool nvs_sim_overlaps(uintptr_t address, size_t bytes)
{
    const size_t index = after(address + bytes - 1);
    return index != 0 && nvs_sim_allocations[index - 1].base + nvs_sim_allocations[index - 1].bytes > address;
}

CUresult nvs_sim_insert(const sim_allocation *allocation)
{
    if (nvs_sim_allocation_count == room) {
        size_t wanted = room == 0 ? 256 : room * 2;
        sim_allocation *larger = realloc(nvs_sim_allocations, wanted * sizeof *larger);
        if (larger == NULL)
            return CUDA_ERROR_OUT_OF_MEMORY;
        nvs_sim_allocations = larger;
        room = wanted;
    }
    size_t index = after(allocation->base);
    memmove(&nvs_sim_allocations[index + 1], &nvs_sim_allocations[index], (nvs_sim_allocation_count - index) * sizeof *nvs_sim_allocations);
    nvs_sim_allocations[index] = *allocation;
    nvs_sim_allocations[index].id = nvs_sim_next_id++;
    nvs_sim_managed_count += allocation->kind == MEM_MANAGED;
    nvs_sim_allocation_count++;
    return CUDA_SUCCESS;
}

void nvs_sim_remove(sim_allocation *allocation)
{
    size_t index = (size_t)(allocation - nvs_sim_allocations);
    nvs_sim_managed_count -= allocation->kind == MEM_MANAGED;
    nvs_sim_allocation_count--;
    memmove(allocation, allocation + 1, (nvs_sim_allocation_count - index) * sizeof *allocation);
}

/* Reserved ranges. */

static reservation *reservation_of(uintptr_t address, size_t bytes)
{
    for (size_t i = 0; i < reservation_count; i++)
        if (address >= reservations[i].base && address - reservations[i].base < reservations[i].bytes &&
            bytes <= reservations[i].bytes - (address - reservations[i].base))
            return &reservations[i];
    return NULL;
}

bool nvs_sim_reserved(uintptr_t address, size_t bytes) { return reservation_of(address, bytes) != NULL; }

/* Maps at the wanted address if it is free; as in the driver, the address is only a hint. */
static void *map_at(CUdeviceptr wanted, size_t bytes, size_t alignment)
{
    void *place = wanted % alignment == 0 ? (void *)(uintptr_t)wanted : NULL;
    if (place == NULL)
        return MAP_FAILED;
    void *raw = mmap(place, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED || raw == place)
        return raw;
    munmap(raw, bytes);
    return MAP_FAILED;
}

CUresult nvs_sim_reserve(size_t bytes, size_t alignment, CUdeviceptr wanted, CUdeviceptr *out)
{
    reservation *larger = realloc(reservations, (reservation_count + 1) * sizeof *larger);
    if (larger == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    reservations = larger;
    size_t raw_bytes = bytes;
    void *raw = map_at(wanted, bytes, alignment);
    if (raw == MAP_FAILED) {
        raw_bytes = bytes + alignment;
        raw = mmap(NULL, raw_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    if (raw == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const uintptr_t base = ((uintptr_t)raw + alignment - 1) & ~(uintptr_t)(alignment - 1);
    reservations[reservation_count++] = (reservation){.base = base, .bytes = bytes, .raw = raw, .raw_bytes = raw_bytes};
    *out = base;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_unreserve(CUdeviceptr base, size_t bytes)
{
    reservation *found = reservation_of((uintptr_t)base, bytes);
    if (found == NULL || found->base != (uintptr_t)base || found->bytes != bytes)
        return CUDA_ERROR_INVALID_VALUE;
    NVS_SIM_EACH_ALLOCATION(one)
        if (one->kind == MEM_MAPPED && one->base >= found->base && one->base < found->base + found->bytes)
            return CUDA_ERROR_INVALID_VALUE;
    munmap(found->raw, found->raw_bytes);
    *found = reservations[--reservation_count];
    return CUDA_SUCCESS;
}

bool nvs_sim_each_mapping(uintptr_t address, size_t bytes, bool whole, bool (*visit)(sim_allocation *, uint64_t), uint64_t argument)
{
    uintptr_t at = address;
    while (at < address + bytes) {
        sim_allocation *one = nvs_sim_find(at);
        if (one == NULL || one->kind != MEM_MAPPED)
            return false;
        uintptr_t end = one->base + one->bytes;
        if (whole && (one->base != at || end > address + bytes))
            return false;
        if (visit != NULL && !visit(one, argument))
            return false;
        at = end;
    }
    return true;
}

static bool has_access(sim_allocation *one, uint64_t ignored) { return one->accessed_by != 0; }

bool nvs_sim_accessible(uintptr_t address, size_t bytes)
{
    if (bytes == 0)
        return true;
    if (nvs_sim_reserved(address, 1))
        return nvs_sim_reserved(address, bytes) && nvs_sim_each_mapping(address, bytes, false, has_access, 0);
    const sim_allocation *allocation = nvs_sim_find(address);
    return allocation == NULL || address - allocation->base + bytes <= allocation->bytes;
}

/* Allocations: their bytes, and their charge. */

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
    bool charged = kind == MEM_DEVICE || kind == MEM_POOL || (kind == MEM_HOST && nvs_sim_shared_state->gpus[device->gpu].integrated);
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
