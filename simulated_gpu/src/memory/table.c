/* The table of addresses: allocations, sorted by address, and ranges that are reserved for mappings. */
#include "memory/memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct reservation {
    uintptr_t base;
    size_t bytes, raw_bytes; /* raw: including the alignment */
    void *raw;
} reservation;

static reservation *reservations; /* unsorted: there are few */
static size_t reservation_count;

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

sim_allocation *nvs_sim_find_base(CUdeviceptr pointer)
{
    sim_allocation *found = nvs_sim_find((uintptr_t)pointer);
    return found != NULL && found->base == (uintptr_t)pointer ? found : NULL;
}

bool nvs_sim_overlaps(uintptr_t address, size_t bytes)
{
    const size_t index = after(address + bytes - 1);
    return index != 0 && table[index - 1].base + table[index - 1].bytes > address;
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
    for (size_t i = 0; i < count; i++)
        if (table[i].kind == MEM_MAPPED && table[i].base >= found->base && table[i].base < found->base + found->bytes)
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
