/* Wrappers: the application's own virtual memory management (JAX, PyTorch's expandable segments).
 *
 * Physical memory on a GPU is charged from cuMemCreate until the driver frees it: when its last reference (create, retain, import) is released and its
 * last mapping has ended.  Memory in host locations, and memory imported from other processes, is not charged here.
 *
 * In mode `swap` a handle is a number that stands for a segment (swap/swap.h), so that its memory can move.  Memory that must be the driver's stays on
 * the card: see stays_real().
 *
 * Another process, another device, a multicast object or a sparse array refers to the physical memory of a handle.  So that memory becomes one
 * allocation (swap/unite.c) and stays on the GPU from then on, and such a call waits for the lease as a launch does.
 */
#include "base/base.h"
#include "base/config.h"
#include "base/log.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "hooks/hooks.h"
#include "inflight/pacing.h"
#include "memory/memory.h"
#include "swap/swap.h"

#include <dirent.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FABRIC = 8, MOVABLE_TYPES = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | FABRIC }; /* CU_MEM_HANDLE_TYPE_FABRIC, since CUDA 12.4 */

/* --- creation --- */

static bool find_rdma(void)
{
    const int saved = errno;
    bool found = access("/dev/nvidia-fs0", F_OK) == 0;
    DIR *devices = opendir("/dev/infiniband");
    if (devices != NULL) {
        for (const struct dirent *at; !found && (at = readdir(devices)) != NULL;)
            found = strncmp(at->d_name, "uverbs", 6) == 0;
        closedir(devices);
    }
    errno = saved;
    return found;
}

/* Whether other devices may access this process's memory directly.  Frameworks request that wherever the GPU can do it. */
static bool rdma_possible(void)
{
    enum { UNKNOWN, YES, NO };
    static _Atomic uint8_t known;
    /* Relaxed: publishes no other data; every thread finds the same answer. */
    uint8_t answer = atomic_load_explicit(&known, memory_order_relaxed);
    if (answer == UNKNOWN) {
        answer = find_rdma() ? YES : NO;
        atomic_store_explicit(&known, answer, memory_order_relaxed);
    }
    return answer == YES;
}

/* Memory that other devices may access physically, or of an unknown kind.  Memory that may be exported moves until it is (swap/unite.c). */
static bool stays_real(const CUmemAllocationProp *prop, unsigned long long flags)
{
    static const unsigned char nothing[sizeof prop->allocFlags.reserved];
    const bool plain = prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && prop->win32HandleMetaData == NULL && flags == 0 &&
                       prop->allocFlags.compressionType == 0 && prop->allocFlags.usage == 0 &&
                       memcmp(prop->allocFlags.reserved, nothing, sizeof nothing) == 0;
    return !plain || ((unsigned)prop->requestedHandleTypes & ~MOVABLE_TYPES) != 0 || (prop->allocFlags.gpuDirectRDMACapable && rdma_possible());
}

/* The driver's answer to memory of these properties, which the hook may not ask it for before the memory is exported: fabric handles need a fabric
 * manager.  A full card is no answer. */
static CUresult permitted(const CUmemAllocationProp *prop)
{
    static _Atomic uint8_t known[NVS_MAX_GPUS]; /* by bit: the driver makes memory of such types.  Relaxed: nothing else depends on it */
    const unsigned types = (unsigned)prop->requestedHandleTypes, gpu = (unsigned)prop->location.id;
    const unsigned kind = ((types & FABRIC) != 0 ? 2u : 0u) + ((types & ~FABRIC) != 0 ? 1u : 0u) + (prop->allocFlags.gpuDirectRDMACapable ? 4u : 0u);
    CUmemGenericAllocationHandle handle;
    size_t bytes = 0;
    if (kind == 0 || (atomic_load_explicit(&known[gpu], memory_order_relaxed) >> kind & 1) != 0) /* see its declaration */
        return CUDA_SUCCESS;
    CUresult result = NVS_REAL(cuMemGetAllocationGranularity)(&bytes, prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (result == CUDA_SUCCESS)
        result = NVS_REAL(cuMemCreate)(&handle, bytes, prop, 0);
    if (result != CUDA_SUCCESS)
        return result == CUDA_ERROR_OUT_OF_MEMORY ? CUDA_SUCCESS : result;
    (void)NVS_REAL(cuMemRelease)(handle);
    atomic_fetch_or_explicit(&known[gpu], (uint8_t)(1u << kind), memory_order_relaxed); /* see its declaration */
    return CUDA_SUCCESS;
}

NVS_EXPORT CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                                        unsigned long long flags)
{
    nvs_allocation *entry;
    if (handle == NULL || prop == NULL || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || prop->location.id < 0 ||
        !nvs_memory_manages((uint32_t)prop->location.id))
        return NVS_REAL(cuMemCreate)(handle, size, prop, flags);
    if (nvs_swapping() && !stays_real(prop, flags)) {
        CUresult made = permitted(prop);
        if (made != CUDA_SUCCESS)
            return made;
        made = nvs_memory_create((uint32_t)prop->location.id, size, prop, handle);
        if (made != CUDA_ERROR_NOT_SUPPORTED)
            return made;
    }
    CUresult result = nvs_pins_admit(NVS_SPACE_HANDLE, NVS_MEMORY_HANDLE, (uint32_t)prop->location.id, size, &entry);
    if (result != CUDA_SUCCESS)
        return result;
    entry->vmm.references = 1;
    result = NVS_REAL(cuMemCreate)(handle, size, prop, flags);
    if (result == CUDA_SUCCESS)
        nvs_memory_keep(entry, *handle, 1);
    else
        nvs_memory_drop(entry);
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle)
{
    nvs_allocation *last;
    bool known = nvs_allocation_release_handle(handle, &last);
    CUresult result = known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (!nvs_memory_is_number(handle))
        result = NVS_REAL(cuMemRelease)(handle);
    if (result == CUDA_SUCCESS) {
        if (last != NULL)
            nvs_memory_drop(last);
    } else if (last != NULL) {
        last->vmm.references = 1;
        nvs_memory_drop_all(nvs_allocation_insert(last));
    } else if (known) {
        nvs_allocation_retain_handle(handle);
    }
    return result;
}

/* --- address ranges, recorded so that mappings of numbers can be checked --- */

NVS_EXPORT CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                                unsigned long long flags)
{
    nvs_allocation *range = nvs_swapping() ? nvs_allocation_new(NVS_SPACE_RANGE, NVS_MEMORY_MARK, 0) : NULL;
    if (range == NULL && nvs_swapping())
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = NVS_REAL(cuMemAddressReserve)(ptr, size, alignment, addr, flags);
    if (range == NULL)
        return result;
    if (result != CUDA_SUCCESS) {
        free(range);
        return result;
    }
    range->key = *ptr;
    range->length = size;
    nvs_memory_drop_all(nvs_allocation_insert(range));
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
    nvs_allocation *range = NULL, ignored, *handle;
    if (nvs_swapping() && (handle = nvs_allocation_pin_mapping(ptr, size, &ignored)) != NULL) {
        nvs_memory_drop_all(nvs_allocation_unpin_handle(handle));
        return CUDA_ERROR_INVALID_VALUE; /* as the driver for a range with a mapping */
    }
    if (nvs_swapping() && nvs_allocation_take(NVS_SPACE_RANGE, ptr, &range) != NVS_FOUND)
        range = NULL;
    CUresult result = NVS_REAL(cuMemAddressFree)(ptr, size);
    if (range != NULL && result != CUDA_SUCCESS)
        nvs_memory_drop_all(nvs_allocation_insert(range));
    else if (range != NULL)
        nvs_memory_drop(range);
    return result;
}

static bool is_reserved(CUdeviceptr ptr, size_t size)
{
    nvs_allocation range;
    return nvs_allocation_find(NVS_SPACE_RANGE, ptr, &range) != NVS_ABSENT && size <= range.length && ptr - range.key <= range.length - size;
}

/* --- mappings --- */

/* Maps a number: checked here, because its memory may not be on the GPU. */
static CUresult map_number(nvs_allocation *handle, CUdeviceptr ptr, size_t size, size_t offset, unsigned long long flags)
{
    nvs_segment *segment = handle->backend.kept;
    const uint64_t unit = nvs_swap_unit(handle->gpu);
    if (size != segment->bytes || offset != 0 || flags != 0 || ptr % unit != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_reserved(ptr, size) || nvs_allocation_overlaps(NVS_SPACE_ADDRESS, ptr, size))
        return CUDA_ERROR_INVALID_VALUE;
    return nvs_view_add(segment, ptr);
}

/* Maps an uncharged handle (imported, host memory), and records the range as used. */
static CUresult map_unknown(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    CUresult result = NVS_REAL(cuMemMap)(ptr, size, offset, handle, flags);
    nvs_allocation *mapping = NULL;
    if (result == CUDA_SUCCESS && nvs_swapping())
        mapping = nvs_allocation_new(NVS_SPACE_ADDRESS, NVS_MEMORY_MAPPING, 0);
    if (mapping == NULL)
        return result;
    mapping->key = ptr;
    mapping->length = size;
    nvs_memory_drop_all(nvs_allocation_insert(mapping));
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                                     unsigned long long flags)
{
    nvs_allocation *pinned = nvs_allocation_pin_handle(handle), *mapping = NULL;
    if (pinned == NULL)
        return nvs_memory_is_number(handle) ? CUDA_ERROR_INVALID_VALUE : map_unknown(ptr, size, offset, handle, flags);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    mapping = nvs_allocation_new(NVS_SPACE_ADDRESS, NVS_MEMORY_MAPPING, pinned->gpu);
    if (mapping != NULL)
        result = pinned->backend.chunked ? map_number(pinned, ptr, size, offset, flags) : NVS_REAL(cuMemMap)(ptr, size, offset, handle, flags);
    if (result == CUDA_SUCCESS) {
        mapping->key = ptr;
        mapping->length = size;
        mapping->backend.chunked = pinned->backend.chunked;
        nvs_memory_drop_all(nvs_allocation_map(mapping, pinned));
        return result;
    }
    free(mapping);
    nvs_memory_drop_all(nvs_allocation_unpin_handle(pinned));
    return result;
}

/* A call for each part of a range: mappings of numbers, and the driver's memory between them. */
typedef struct parts {
    CUresult (*of_number)(nvs_segment *segment, CUdeviceptr address, size_t size, void *argument);
    CUresult (*of_driver)(CUdeviceptr address, size_t size, void *argument);
    void *argument;
} parts;

/* False: the range has only a part of a mapping. */
static bool parts_are_whole(CUdeviceptr ptr, size_t size)
{
    nvs_allocation at, *handle;
    bool whole = true;
    const CUdeviceptr ends[2] = {ptr, ptr + size - 1};
    for (int i = 0; i < 2; i++) {
        if ((handle = nvs_allocation_pin_mapping(ends[i], 1, &at)) == NULL)
            continue;
        whole = whole && at.key >= ptr && at.key + at.length <= ptr + size;
        nvs_memory_drop_all(nvs_allocation_unpin_handle(handle));
    }
    return whole;
}

static CUresult each_part(CUdeviceptr ptr, size_t size, const parts *of)
{
    CUresult result = CUDA_SUCCESS;
    const CUdeviceptr end = ptr + size;
    if (size == 0 || end < ptr || !nvs_swapping())
        return of->of_driver(ptr, size, of->argument);
    if (!parts_are_whole(ptr, size))
        return CUDA_ERROR_INVALID_VALUE;
    while (ptr < end && result == CUDA_SUCCESS) {
        nvs_allocation at, *handle = nvs_allocation_pin_mapping(ptr, end - ptr, &at);
        CUdeviceptr here = handle != NULL ? at.key : end;
        if (here > ptr)
            result = of->of_driver(ptr, here - ptr, of->argument);
        if (handle == NULL)
            return result;
        if (result == CUDA_SUCCESS)
            result = of->of_number(handle->backend.kept, at.key, at.length, of->argument);
        nvs_memory_drop_all(nvs_allocation_unpin_handle(handle));
        ptr = at.key + at.length;
    }
    return result;
}

static CUresult unmap_number(nvs_segment *segment, CUdeviceptr address, size_t size, void *ignored)
{
    nvs_allocation *mapping = nvs_allocation_take_mappings(address, 1);
    CUresult result = nvs_view_end(segment, address);
    nvs_memory_drop_all(nvs_allocation_end_mappings(mapping, result == CUDA_SUCCESS));
    return result;
}

static CUresult unmap_driver(CUdeviceptr address, size_t size, void *ignored)
{
    nvs_allocation *mappings = nvs_allocation_take_mappings(address, size);
    CUresult result = NVS_REAL(cuMemUnmap)(address, size);
    nvs_memory_drop_all(nvs_allocation_end_mappings(mappings, result == CUDA_SUCCESS));
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    return each_part(ptr, size, &(parts){unmap_number, unmap_driver, NULL});
}

typedef struct rights {
    const CUmemAccessDesc *desc;
    size_t count;
} rights;

static CUresult allow_number(nvs_segment *segment, CUdeviceptr address, size_t size, void *argument)
{
    const rights *given = argument;
    if (given->desc == NULL || given->count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    const CUresult result = nvs_view_allow(segment, address, given->desc, given->count);
    for (size_t i = 0; result == CUDA_SUCCESS && i < given->count; i++)
        if (given->desc[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && (uint32_t)given->desc[i].location.id != segment->gpu &&
            given->desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE)
            nvs_coordinator.link(1u << segment->gpu | 1u << (uint32_t)given->desc[i].location.id);
    return result;
}

static CUresult allow_driver(CUdeviceptr address, size_t size, void *argument)
{
    const rights *given = argument;
    return NVS_REAL(cuMemSetAccess)(address, size, given->desc, given->count);
}

NVS_EXPORT CUresult CUDAAPI cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    return each_part(ptr, size, &(parts){allow_number, allow_driver, &(rights){desc, count}});
}

NVS_EXPORT CUresult CUDAAPI cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
    nvs_allocation at, *handle = NULL;
    if (flags != NULL && location != NULL && nvs_swapping())
        handle = nvs_allocation_pin_mapping(ptr, 1, &at);
    if (handle == NULL)
        return NVS_REAL(cuMemGetAccess)(flags, location, ptr);
    bool there = nvs_view_access(handle->backend.kept, at.key, location, flags);
    nvs_memory_drop_all(nvs_allocation_unpin_handle(handle));
    return there ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* --- exports and queries of handles --- */

/* Pins the memory of an entry, which the caller holds. */
static CUresult pin(const nvs_allocation *handle, CUmemGenericAllocationHandle *real)
{
    const CUresult result = nvs_swap_pin(handle->backend.kept, real);
    if (result == CUDA_ERROR_NOT_SUPPORTED)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "memory of one cuMemCreate that another GPU of this program reaches can no longer be shared, bound, or mapped "
                                      "into an array: run this program with --memory device (NVSHARE_MEMORY=device)");
    return result;
}

/* The driver's handle for the application's: the same one, or that of a number's memory. */
static CUresult real_handle(CUmemGenericAllocationHandle handle, CUmemGenericAllocationHandle *real)
{
    *real = handle;
    if (!nvs_memory_is_number(handle))
        return CUDA_SUCCESS;
    nvs_allocation *entry = nvs_allocation_pin_handle(handle);
    if (entry == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = pin(entry, real);
    nvs_memory_drop_all(nvs_allocation_unpin_handle(entry));
    return result;
}

CUresult nvs_pin_address(CUdeviceptr ptr, size_t size)
{
    nvs_allocation at;
    CUmemGenericAllocationHandle ignored;
    nvs_allocation *entry = nvs_allocation_pin_mapping(ptr, size, &at);
    if (entry == NULL)
        return nvs_allocation_find(NVS_SPACE_ADDRESS, ptr, &at) != NVS_ABSENT && at.backend.chunked ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
    CUresult result = ptr >= at.key && size <= at.length && ptr - at.key <= at.length - size ? pin(entry, &ignored) : CUDA_ERROR_NOT_SUPPORTED;
    nvs_memory_drop_all(nvs_allocation_unpin_handle(entry));
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    const CUdeviceptr pointer = (CUdeviceptr)(uintptr_t)addr;
    nvs_allocation as, *entry = handle != NULL ? nvs_allocation_pin_mapping(pointer, 1, &as) : NULL;
    if (entry != NULL) {
        nvs_allocation_retain_handle(entry->key);
        *handle = entry->key;
        nvs_memory_drop_all(nvs_allocation_unpin_handle(entry));
        return CUDA_SUCCESS;
    }
    if (nvs_allocation_find(NVS_SPACE_ADDRESS, pointer, &as) != NVS_ABSENT && as.backend.chunked)
        return CUDA_ERROR_INVALID_VALUE; /* as the driver for memory of cuMemAlloc */
    CUresult result = NVS_REAL(cuMemRetainAllocationHandle)(handle, addr);
    if (result == CUDA_SUCCESS)
        nvs_allocation_retain_handle(*handle);
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    if (!nvs_memory_is_number(handle))
        return NVS_REAL(cuMemGetAllocationPropertiesFromHandle)(prop, handle);
    nvs_allocation *entry = prop != NULL ? nvs_allocation_pin_handle(handle) : NULL;
    if (entry == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *prop = ((const nvs_segment *)entry->backend.kept)->vmm->properties;
    nvs_memory_drop_all(nvs_allocation_unpin_handle(entry));
    return CUDA_SUCCESS;
}

NVS_EXPORT CUresult CUDAAPI cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
                                                         CUmemAllocationHandleType handleType, unsigned long long flags)
{
    CUmemAllocationProp prop;
    CUmemGenericAllocationHandle real;
    if (nvs_memory_is_number(handle)) {
        CUresult known = cuMemGetAllocationPropertiesFromHandle(&prop, handle);
        if (known != CUDA_SUCCESS || shareableHandle == NULL || flags != 0 || handleType == CU_MEM_HANDLE_TYPE_NONE ||
            (prop.requestedHandleTypes & handleType) == 0)
            return CUDA_ERROR_INVALID_VALUE; /* and pins nothing */
    }
    CUresult result = real_handle(handle, &real);
    return result == CUDA_SUCCESS ? NVS_REAL(cuMemExportToShareableHandle)(shareableHandle, real, handleType, flags) : result;
}

NVS_EXPORT CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
                                                           CUmemAllocationHandleType shHandleType)
{
    CUresult result = NVS_REAL(cuMemImportFromShareableHandle)(handle, osHandle, shHandleType);
    if (result == CUDA_SUCCESS)
        nvs_allocation_retain_handle(*handle); /* a handle that this process has exported */
    return result;
}

/* --- multicast objects --- */

#define NVS_BINDS(symbol, parameters, arguments, prepared)                          \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                                   \
    {                                                                               \
        const CUresult result = prepared;                                           \
        return result == CUDA_SUCCESS ? NVS_REAL(symbol) arguments : result;        \
    }

NVS_BINDS(cuMulticastBindMem,
          (CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size,
           unsigned long long flags),
          (mcHandle, mcOffset, memHandle, memOffset, size, flags), real_handle(memHandle, &memHandle))
NVS_BINDS(cuMulticastBindAddr,
          (CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUdeviceptr memptr, size_t size, unsigned long long flags),
          (mcHandle, mcOffset, memptr, size, flags), nvs_pin_address(memptr, size))
#if CUDA_VERSION >= 13010
NVS_BINDS(cuMulticastBindMem_v2,
          (CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, CUmemGenericAllocationHandle memHandle, size_t memOffset,
           size_t size, unsigned long long flags),
          (mcHandle, dev, mcOffset, memHandle, memOffset, size, flags), real_handle(memHandle, &memHandle))
NVS_BINDS(cuMulticastBindAddr_v2,
          (CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, CUdeviceptr memptr, size_t size, unsigned long long flags),
          (mcHandle, dev, mcOffset, memptr, size, flags), nvs_pin_address(memptr, size))
#endif
#if CUDA_VERSION >= 13030
NVS_BINDS(cuLogicalEndpointBindMem,
          (CUlogicalEndpointId leId, CUdevice dev, cuuint64_t offset, CUmemGenericAllocationHandle memHandle, cuuint64_t memOffset,
           cuuint64_t size, unsigned long long flags),
          (leId, dev, offset, memHandle, memOffset, size, flags), real_handle(memHandle, &memHandle))
NVS_BINDS(cuLogicalEndpointBindAddr,
          (CUlogicalEndpointId leId, CUdevice dev, cuuint64_t offset, void *ptr, cuuint64_t size, unsigned long long flags),
          (leId, dev, offset, ptr, size, flags), nvs_pin_address((CUdeviceptr)(uintptr_t)ptr, size))
#endif

/* --- sparse arrays --- */

static bool maps_number(const CUarrayMapInfo *info)
{
    return info->memOperationType == CU_MEM_OPERATION_TYPE_MAP && info->memHandleType == CU_MEM_HANDLE_TYPE_GENERIC &&
           nvs_memory_is_number(info->memHandle.memHandle);
}

/* A copy of the list with the driver's handles; NULL: nothing had to change. */
static CUresult real_list(const CUarrayMapInfo *list, unsigned int count, CUarrayMapInfo **out)
{
    unsigned int first = 0;
    *out = NULL;
    while (first < count && !maps_number(&list[first]))
        first++;
    if (list == NULL || first == count)
        return CUDA_SUCCESS;
    CUarrayMapInfo *copy = malloc(count * sizeof *copy);
    if (copy == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(copy, list, count * sizeof *copy);
    CUresult result = CUDA_SUCCESS;
    for (; first < count && result == CUDA_SUCCESS; first++)
        if (maps_number(&copy[first]))
            result = real_handle(copy[first].memHandle.memHandle, &copy[first].memHandle.memHandle);
    if (result == CUDA_SUCCESS)
        *out = copy;
    else
        free(copy);
    return result;
}

#define NVS_MAP_ARRAYS(symbol)                                                                                  \
    NVS_EXPORT CUresult CUDAAPI symbol(CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream)        \
    {                                                                                                           \
        CUarrayMapInfo *list;                                                                                   \
        const uint32_t gpu = nvs_stream_gpu(hStream);                                                           \
        CUresult result = real_list(mapInfoList, mapInfoList != NULL ? count : 0, &list); /* may wait outside of the gate */ \
        nvs_slot *const slot = nvs_gate_enter(gpu);                                                             \
        if (result == CUDA_SUCCESS)                                                                             \
            result = NVS_REAL(symbol)(list != NULL ? list : mapInfoList, count, hStream);                       \
        if (nvs_gate_leave(slot, gpu))                                                                          \
            nvs_pace_after(gpu, NVS_HANDLE(symbol, hStream), nvs_pace_what(NVS_ID_##symbol, NULL, count));      \
        free(list);                                                                                             \
        return result;                                                                                          \
    }

NVS_MAP_ARRAYS(cuMemMapArrayAsync)
NVS_MAP_ARRAYS(cuMemMapArrayAsync_ptsz)
