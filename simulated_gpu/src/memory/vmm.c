/* Virtual memory management: reserved ranges, and physical memory that is mapped there, in one or several processes.
 *
 * Physical memory is a memfd, charged to its device while a handle or a mapping lives.  A mapping is that file, mapped over the reserved
 * range.  After an unmap the bytes are inaccessible: a program that uses them faults, as on a GPU.  A second mapping at the same address
 * has the same bytes.  Memory without access rights has PROT_NONE.
 * The file of shared memory names the process that is charged: the creator or, after the creator has released the memory, the next
 * importer.
 */
#include "memory/memory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define GRANULARITY ((size_t)2 << 20)
#define CHARGE_RECORD_BYTES 4096 /* reserved in the file for the record */

typedef struct sim_physical { /* a handle of cuMemCreate */
    uint32_t magic;
    uint32_t references, mappings;
    size_t bytes;
    int file;
    sim_device *device; /* NULL: in host memory */
    bool charged, imported, shared;
    CUmemAllocationProp properties;
} sim_physical;

uint32_t nvs_sim_shared_physical;

static void mark_shared(sim_physical *physical)
{
    nvs_sim_shared_physical += !physical->shared;
    physical->shared = true;
}

/* The process that is charged for shared memory.  The file holds this record behind the memory. */
typedef struct charge_record {
    int32_t process; /* 0: none */
    uint32_t gpu;
} charge_record;

SIM_EXPORT CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                                          CUmemAllocationGranularity_flags option)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(granularity != NULL && prop != NULL && (unsigned)option <= CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
                  CUDA_ERROR_INVALID_VALUE);
    *granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

static CUresult find_physical(CUmemGenericAllocationHandle handle, sim_physical **out)
{
    sim_physical *physical = (sim_physical *)(uintptr_t)handle;
    if (physical == NULL || physical->magic != SIM_PHYSICAL || physical->references == 0)
        return CUDA_ERROR_INVALID_VALUE;
    *out = physical;
    return CUDA_SUCCESS;
}

static CUresult check_properties(const CUmemAllocationProp *properties, sim_device **device)
{
    const unsigned types = (unsigned)properties->requestedHandleTypes;
    *device = NULL;
    if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        (types & ~(unsigned)(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC)) != 0)
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
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(handle != NULL && prop != NULL && flags == 0 && size != 0 && size % GRANULARITY == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(check_properties(prop, &device));
    NVS_SIM_CHECK(device == NULL || nvs_sim_charge(device->gpu, size), CUDA_ERROR_OUT_OF_MEMORY);
    sim_physical *physical = calloc(1, sizeof *physical);
    int file = (int)syscall(SYS_memfd_create, "simulated_gpu_memory", 1u /* MFD_CLOEXEC */);
    if (physical == NULL || file < 0 || ftruncate(file, (off_t)size + CHARGE_RECORD_BYTES) != 0)
        goto out;
    *physical = (sim_physical){.magic = SIM_PHYSICAL, .references = 1, .bytes = size, .file = file, .device = device,
                               .charged = device != NULL, .properties = *prop};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
out:
    if (file >= 0)
        close(file);
    free(physical);
    if (device != NULL)
        nvs_sim_uncharge(device->gpu, size);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static bool write_charge_record(int file, size_t bytes, int32_t process, uint32_t gpu)
{
    const charge_record record = {.process = process, .gpu = gpu};
    return pwrite(file, &record, sizeof record, (off_t)bytes) == (ssize_t)sizeof record;
}

/* Frees a handle without references and mappings. */
static void free_unused(sim_physical *physical)
{
    if (physical->references != 0 || physical->mappings != 0)
        return;
    if (physical->charged) {
        nvs_sim_uncharge(physical->device->gpu, physical->bytes);
        if (physical->imported || physical->properties.requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE)
            (void)write_charge_record(physical->file, physical->bytes, 0, physical->device->gpu);
    }
    nvs_sim_shared_physical -= physical->shared;
    close(physical->file);
    physical->magic = 0;
    free(physical);
}

SIM_EXPORT CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle)
{
    NVS_SIM_ENTER_FIND(sim_physical *physical, find_physical(handle, &physical));
    physical->references--;
    free_unused(physical);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    NVS_SIM_ENTER();
    sim_allocation *one = nvs_sim_find((uintptr_t)addr);
    NVS_SIM_CHECK(handle != NULL && one != NULL && one->kind == MEM_MAPPED, CUDA_ERROR_INVALID_VALUE);
    sim_physical *physical = one->account.handle;
    physical->references++;
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
}

NVS_SIM_GETTER(cuMemGetAllocationPropertiesFromHandle, (CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle),
               sim_physical *physical, find_physical(handle, &physical), prop, physical->properties)

/* Mappings. */

SIM_EXPORT CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                                unsigned long long flags)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(ptr != NULL && size != 0 && size % GRANULARITY == 0 && flags == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK((alignment & (alignment - 1)) == 0, CUDA_ERROR_INVALID_VALUE);
    return nvs_sim_reserve(size, alignment > GRANULARITY ? alignment : GRANULARITY, addr, ptr);
}

NVS_SIM_ENTRY(cuMemAddressFree, (CUdeviceptr ptr, size_t size), nvs_sim_unreserve(ptr, size))

SIM_EXPORT CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                                     unsigned long long flags)
{
    NVS_SIM_ENTER_FIND(sim_physical *physical, find_physical(handle, &physical));
    NVS_SIM_CHECK(offset == 0 && flags == 0 && size == physical->bytes && ptr % GRANULARITY == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(nvs_sim_reserved((uintptr_t)ptr, size), CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(!nvs_sim_overlaps((uintptr_t)ptr, size), CUDA_ERROR_INVALID_VALUE);
    sim_device *device = physical->device != NULL ? physical->device : &nvs_sim_devices[0];
    sim_allocation mapping = {.base = (uintptr_t)ptr, .bytes = size, .mapped_bytes = size, .kind = MEM_MAPPED, .device = device,
                              .account = {.handle = physical}};
    NVS_SIM_TRY(nvs_sim_insert(&mapping));
    if (mmap((void *)(uintptr_t)ptr, size, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->file, 0) == MAP_FAILED) {
        nvs_sim_remove(nvs_sim_find((uintptr_t)ptr));
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    physical->mappings++;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(size != 0 && nvs_sim_each_mapping((uintptr_t)ptr, size, true, NULL, 0), CUDA_ERROR_INVALID_VALUE);
    nvs_sim_transfers_wait(); /* later copies check the table again */
    mmap((void *)(uintptr_t)ptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (uintptr_t at = (uintptr_t)ptr; at < (uintptr_t)ptr + size;) {
        sim_allocation *one = nvs_sim_find(at);
        sim_physical *physical = one->account.handle;
        at += one->bytes;
        nvs_sim_remove(one);
        physical->mappings--;
        free_unused(physical);
    }
    return CUDA_SUCCESS;
}

static uint64_t bit_of(CUmemLocation location)
{
    return location.type == CU_MEM_LOCATION_TYPE_DEVICE ? 1ull << location.id : SIM_HOST_BIT;
}

static bool is_reachable(sim_allocation *one, uint64_t ordinal)
{
    const sim_device *owner = ((const sim_physical *)one->account.handle)->device, *by = &nvs_sim_devices[ordinal];
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
    NVS_SIM_CHECK(desc != NULL && count != 0 && size != 0 && nvs_sim_each_mapping((uintptr_t)ptr, size, true, NULL, 0),
                  CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        sim_device *device;
        if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
            continue;
        NVS_SIM_TRY(nvs_sim_device(desc[i].location.id, &device));
        NVS_SIM_CHECK(nvs_sim_each_mapping((uintptr_t)ptr, size, true, is_reachable, (uint64_t)device->ordinal), CUDA_ERROR_INVALID_DEVICE);
    }
    for (size_t i = 0; i < count; i++) {
        bool none = desc[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE;
        NVS_SIM_CHECK(nvs_sim_each_mapping((uintptr_t)ptr, size, true, none ? forbid : allow, bit_of(desc[i].location)),
                      CUDA_ERROR_UNKNOWN);
    }
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
    NVS_SIM_ENTER();
    sim_allocation *one = nvs_sim_find((uintptr_t)ptr);
    NVS_SIM_CHECK(flags != NULL && location != NULL && one != NULL && one->kind == MEM_MAPPED, CUDA_ERROR_INVALID_VALUE);
    *flags = (one->accessed_by & bit_of(*location)) != 0 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}

/* Sharing by descriptor. */

SIM_EXPORT CUresult CUDAAPI cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
                                                         CUmemAllocationHandleType handleType, unsigned long long flags)
{
    NVS_SIM_ENTER_FIND(sim_physical *physical, find_physical(handle, &physical));
    NVS_SIM_CHECK(shareableHandle != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    NVS_SIM_CHECK((physical->properties.requestedHandleTypes & handleType) != 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(!physical->imported, CUDA_ERROR_INVALID_VALUE); /* as in driver 580 */
    if (physical->charged)
        NVS_SIM_CHECK(write_charge_record(physical->file, physical->bytes, (int32_t)getpid(), physical->device->gpu),
                      CUDA_ERROR_OPERATING_SYSTEM);
    int copy = dup(physical->file);
    NVS_SIM_CHECK(copy >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    mark_shared(physical);
    memcpy(shareableHandle, &copy, sizeof copy);
    return CUDA_SUCCESS;
}

/* Makes a file of shared memory physical memory of this process, charged here if no other process is charged. */
static CUresult adopt(int file, size_t bytes, sim_physical *out)
{
    charge_record record;
    if (pread(file, &record, sizeof record, (off_t)bytes) != (ssize_t)sizeof record)
        return CUDA_ERROR_INVALID_VALUE;
    sim_device *device = nvs_sim_device_of_gpu(record.gpu);
    if (device == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    const bool charge = record.process == 0;
    if (charge && !nvs_sim_charge(device->gpu, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (charge)
        (void)write_charge_record(file, bytes, (int32_t)getpid(), record.gpu);
    *out = (sim_physical){.magic = SIM_PHYSICAL, .references = 1, .bytes = bytes, .file = file, .device = device,
                          .charged = charge, .imported = true};
    out->properties = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal}};
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
                                                           CUmemAllocationHandleType shHandleType)
{
    struct stat info;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(handle != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(shHandleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    const int file = fcntl((int)(uintptr_t)osHandle, F_DUPFD_CLOEXEC, 0);
    NVS_SIM_CHECK(file >= 0, CUDA_ERROR_INVALID_VALUE);
    sim_physical *physical = calloc(1, sizeof *physical);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (physical != NULL && fstat(file, &info) == 0 && info.st_size > CHARGE_RECORD_BYTES)
        result = adopt(file, (size_t)info.st_size - CHARGE_RECORD_BYTES, physical);
    if (result != CUDA_SUCCESS) {
        close(file);
        free(physical);
        return result;
    }
    mark_shared(physical);
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
}
