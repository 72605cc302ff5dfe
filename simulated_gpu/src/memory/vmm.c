/* Virtual memory management: reserved ranges, physical handles, mappings.
 *
 * A handle is a memfd, charged to its device while it lives; a mapping is that file mapped over the reserved range.  So
 * unmapping really takes the bytes away, mapping again at the same address really brings them back, and memory without access
 * rights cannot be touched.  Behind the memory the file says which process pays for it: its maker, and once that has let go of it,
 * whoever imports it next.
 */
#include "base/sim.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define GRANULARITY ((size_t)2 << 20)
#define SIM_PHYSICAL 0x50485931u
#define TAIL 4096 /* of the file, behind the memory */

typedef struct bill {
    int32_t payer; /* a process; 0: nobody */
    uint32_t gpu;
} bill;

typedef struct sim_physical {
    uint32_t magic;
    uint32_t references, mappings;
    size_t bytes;
    int file;
    sim_device *device; /* NULL: in host memory */
    bool charged, imported;
    CUmemAllocationProp properties;
} sim_physical;

typedef struct reservation {
    uintptr_t base;
    size_t bytes, raw_bytes;
    void *raw;
} reservation;

static reservation *reservations; /* few: no order */
static size_t reservation_count;

static reservation *reservation_of(uintptr_t address, size_t bytes)
{
    for (size_t i = 0; i < reservation_count; i++)
        if (address >= reservations[i].base && address - reservations[i].base < reservations[i].bytes &&
            bytes <= reservations[i].bytes - (address - reservations[i].base))
            return &reservations[i];
    return NULL;
}

/* Visits the mappings of a range; false when there is a hole or a mapping that sticks out. */
static bool each_mapping(uintptr_t address, size_t bytes, bool whole, bool (*visit)(sim_allocation *, uint64_t), uint64_t argument)
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

bool nvs_sim_vmm_reserved(uintptr_t address, size_t bytes, bool *accessible)
{
    *accessible = false;
    if (reservation_of(address, 1) == NULL)
        return false;
    *accessible = reservation_of(address, bytes) != NULL && each_mapping(address, bytes, false, has_access, 0);
    return true;
}

SIM_EXPORT CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                                          CUmemAllocationGranularity_flags option)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(granularity != NULL && prop != NULL && (unsigned)option <= CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, CUDA_ERROR_INVALID_VALUE);
    *granularity = GRANULARITY;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                                unsigned long long flags)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(ptr != NULL && size != 0 && size % GRANULARITY == 0 && flags == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK((alignment & (alignment - 1)) == 0, CUDA_ERROR_INVALID_VALUE);
    size_t align = alignment > GRANULARITY ? alignment : GRANULARITY;
    reservation *larger = realloc(reservations, (reservation_count + 1) * sizeof *larger);
    NVS_SIM_CHECK(larger != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    reservations = larger;
    size_t raw_bytes = size + align;
    void *wanted = addr % align == 0 ? (void *)(uintptr_t)addr : NULL; /* a wish, as the driver treats it */
    void *raw = MAP_FAILED;
    if (wanted != NULL)
        raw = mmap(wanted, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw != MAP_FAILED && raw != wanted) {
        munmap(raw, size);
        raw = MAP_FAILED;
    }
    if (raw != MAP_FAILED)
        raw_bytes = size;
    else
        raw = mmap(NULL, raw_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    NVS_SIM_CHECK(raw != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    uintptr_t base = ((uintptr_t)raw + align - 1) & ~(uintptr_t)(align - 1);
    reservations[reservation_count++] = (reservation){.base = base, .bytes = size, .raw = raw, .raw_bytes = raw_bytes};
    *ptr = base;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
    NVS_SIM_ENTER();
    reservation *found = reservation_of((uintptr_t)ptr, size);
    NVS_SIM_CHECK(found != NULL && found->base == (uintptr_t)ptr && found->bytes == size, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < nvs_sim_allocation_count(); i++) {
        const sim_allocation *one = nvs_sim_allocation_at(i);
        NVS_SIM_CHECK(one->kind != MEM_MAPPED || one->base < found->base || one->base >= found->base + found->bytes, CUDA_ERROR_INVALID_VALUE);
    }
    munmap(found->raw, found->raw_bytes);
    *found = reservations[--reservation_count];
    return nvs_sim_return(CUDA_SUCCESS);
}

/* Physical memory. */

static CUresult find(CUmemGenericAllocationHandle handle, sim_physical **out)
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
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(handle != NULL && prop != NULL && flags == 0 && size != 0 && size % GRANULARITY == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(check_properties(prop, &device));
    NVS_SIM_CHECK(device == NULL || nvs_sim_charge(device->gpu, size), CUDA_ERROR_OUT_OF_MEMORY);
    sim_physical *physical = calloc(1, sizeof *physical);
    int file = (int)syscall(SYS_memfd_create, "simulated_gpu_memory", 1u /* MFD_CLOEXEC */);
    if (physical == NULL || file < 0 || ftruncate(file, (off_t)size + TAIL) != 0)
        goto out;
    *physical = (sim_physical){.magic = SIM_PHYSICAL, .references = 1, .bytes = size, .file = file, .device = device,
                               .charged = device != NULL, .properties = *prop};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return nvs_sim_return(CUDA_SUCCESS);
out:
    if (file >= 0)
        close(file);
    free(physical);
    if (device != NULL)
        nvs_sim_uncharge(device->gpu, size);
    return nvs_sim_return(result);
}

static bool write_bill(int file, size_t bytes, bill content)
{
    return pwrite(file, &content, sizeof content, (off_t)bytes) == (ssize_t)sizeof content;
}

static void free_if_unused(sim_physical *physical)
{
    if (physical->references != 0 || physical->mappings != 0)
        return;
    if (physical->charged) {
        nvs_sim_uncharge(physical->device->gpu, physical->bytes);
        if (physical->imported || physical->properties.requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE)
            (void)write_bill(physical->file, physical->bytes, (bill){0, physical->device->gpu});
    }
    close(physical->file);
    physical->magic = 0;
    free(physical);
}

SIM_EXPORT CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle)
{
    sim_physical *physical;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(find(handle, &physical));
    physical->references--;
    free_if_unused(physical);
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    NVS_SIM_ENTER();
    sim_allocation *one = nvs_sim_find((uintptr_t)addr);
    NVS_SIM_CHECK(handle != NULL && one != NULL && one->kind == MEM_MAPPED, CUDA_ERROR_INVALID_VALUE);
    sim_physical *physical = one->handle;
    physical->references++;
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    sim_physical *physical;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(prop != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(handle, &physical));
    *prop = physical->properties;
    return nvs_sim_return(CUDA_SUCCESS);
}

/* Mappings. */

SIM_EXPORT CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                                     unsigned long long flags)
{
    sim_physical *physical;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(find(handle, &physical));
    NVS_SIM_CHECK(offset == 0 && flags == 0 && size == physical->bytes && ptr % GRANULARITY == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(reservation_of((uintptr_t)ptr, size) != NULL, CUDA_ERROR_INVALID_VALUE);
    for (uintptr_t at = (uintptr_t)ptr; at < (uintptr_t)ptr + size; at += GRANULARITY)
        NVS_SIM_CHECK(nvs_sim_find(at) == NULL, CUDA_ERROR_INVALID_VALUE);
    sim_device *device = physical->device != NULL ? physical->device : &nvs_sim_devices[0];
    sim_allocation mapping = {.base = (uintptr_t)ptr, .bytes = size, .mapped_bytes = size, .kind = MEM_MAPPED, .device = device,
                              .handle = physical, .last_prefetch = -2, .preferred = -2};
    NVS_SIM_TRY(nvs_sim_insert(&mapping));
    if (mmap((void *)(uintptr_t)ptr, size, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->file, 0) == MAP_FAILED) {
        nvs_sim_remove(nvs_sim_find((uintptr_t)ptr));
        return nvs_sim_return(CUDA_ERROR_OUT_OF_MEMORY);
    }
    physical->mappings++;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(size != 0 && each_mapping((uintptr_t)ptr, size, true, NULL, 0), CUDA_ERROR_INVALID_VALUE);
    while (nvs_sim_effects_unlocked != 0) /* a copy that is at it right now; the next one finds the memory gone */
        pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
    mmap((void *)(uintptr_t)ptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (uintptr_t at = (uintptr_t)ptr; at < (uintptr_t)ptr + size;) {
        sim_allocation *one = nvs_sim_find(at);
        sim_physical *physical = one->handle;
        at += one->bytes;
        nvs_sim_remove(one);
        physical->mappings--;
        free_if_unused(physical);
    }
    return nvs_sim_return(CUDA_SUCCESS);
}

/* accessed_by: bit per device, and bit 63 for the host. */
static uint64_t bit_of(CUmemLocation location)
{
    return location.type == CU_MEM_LOCATION_TYPE_DEVICE ? 1ull << location.id : 1ull << 63;
}

static bool may_be_reached(sim_allocation *one, uint64_t ordinal)
{
    const sim_device *owner = ((const sim_physical *)one->handle)->device, *by = &nvs_sim_devices[ordinal];
    return owner == NULL || owner == by || nvs_sim_peers_possible(by, owner);
}

static bool allow(sim_allocation *one, uint64_t bit)
{
    one->accessed_by |= bit;
    return mprotect((void *)one->base, one->bytes, PROT_READ | PROT_WRITE) == 0;
}

static bool forbid(sim_allocation *one, uint64_t bit)
{
    one->accessed_by &= ~bit;
    return one->accessed_by != 0 || mprotect((void *)one->base, one->bytes, PROT_NONE) == 0;
}

SIM_EXPORT CUresult CUDAAPI cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(desc != NULL && count != 0 && size != 0 && each_mapping((uintptr_t)ptr, size, true, NULL, 0), CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        bool known = desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
                     (desc[i].location.id >= 0 && desc[i].location.id < nvs_sim_device_count);
        NVS_SIM_CHECK(known, CUDA_ERROR_INVALID_DEVICE);
        bool possible = desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
                        each_mapping((uintptr_t)ptr, size, true, may_be_reached, (uint64_t)desc[i].location.id);
        NVS_SIM_CHECK(possible, CUDA_ERROR_INVALID_DEVICE);
    }
    for (size_t i = 0; i < count; i++) {
        bool none = desc[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE;
        NVS_SIM_CHECK(each_mapping((uintptr_t)ptr, size, true, none ? forbid : allow, bit_of(desc[i].location)), CUDA_ERROR_UNKNOWN);
    }
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
    NVS_SIM_ENTER();
    sim_allocation *one = nvs_sim_find((uintptr_t)ptr);
    NVS_SIM_CHECK(flags != NULL && location != NULL && one != NULL && one->kind == MEM_MAPPED, CUDA_ERROR_INVALID_VALUE);
    *flags = (one->accessed_by & bit_of(*location)) != 0 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return nvs_sim_return(CUDA_SUCCESS);
}

/* Sharing with other processes by descriptor. */

SIM_EXPORT CUresult CUDAAPI cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
                                                         CUmemAllocationHandleType handleType, unsigned long long flags)
{
    sim_physical *physical;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(find(handle, &physical));
    NVS_SIM_CHECK(shareableHandle != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    NVS_SIM_CHECK(physical->properties.requestedHandleTypes == handleType, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(!physical->imported, CUDA_ERROR_INVALID_VALUE); /* as a driver of version 580 answers */
    if (physical->charged)
        NVS_SIM_CHECK(write_bill(physical->file, physical->bytes, (bill){(int32_t)getpid(), physical->device->gpu}), CUDA_ERROR_OPERATING_SYSTEM);
    int copy = dup(physical->file);
    NVS_SIM_CHECK(copy >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    memcpy(shareableHandle, &copy, sizeof copy);
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
                                                           CUmemAllocationHandleType shHandleType)
{
    struct stat info;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(handle != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(shHandleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    int file = fcntl((int)(uintptr_t)osHandle, F_DUPFD_CLOEXEC, 0);
    const bool sized = file >= 0 && fstat(file, &info) == 0 && info.st_size > TAIL;
    if (file >= 0 && !sized)
        close(file);
    NVS_SIM_CHECK(sized, CUDA_ERROR_INVALID_VALUE);
    const size_t bytes = (size_t)info.st_size - TAIL;
    bill found = {0};
    sim_device *device = NULL;
    bool charge = false;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    sim_physical *physical = calloc(1, sizeof *physical);
    if (physical == NULL || pread(file, &found, sizeof found, (off_t)bytes) != (ssize_t)sizeof found )
        goto out;
    for (int i = 0; i < nvs_sim_device_count; i++)
        if (nvs_sim_devices[i].gpu == found.gpu)
            device = &nvs_sim_devices[i];
    if (device == NULL)
        goto out;
    result = CUDA_ERROR_OUT_OF_MEMORY;
    charge = found.payer == 0;
    if (charge && !nvs_sim_charge(device->gpu, bytes))
        goto out;
    if (charge)
        (void)write_bill(file, bytes, (bill){(int32_t)getpid(), found.gpu});
    *physical = (sim_physical){.magic = SIM_PHYSICAL, .references = 1, .bytes = bytes, .file = file, .device = device,
                               .charged = charge, .imported = true};
    physical->properties = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = shHandleType,
                                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)(device - nvs_sim_devices)}};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return nvs_sim_return(CUDA_SUCCESS);
out:
    close(file);
    free(physical);
    return nvs_sim_return(result);
}
