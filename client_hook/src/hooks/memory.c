/* Wrappers: allocation, free, memory figures, pointer queries, arrays, legacy IPC (cuIpc*MemHandle).  Stream-ordered memory is in pool.c, the
 * application's own VMM in vmm.c.
 *
 * These calls submit no work, and pass no gate.  Bad arguments go to the driver, which returns its error.
 *
 * The driver knows only the chunks of mode `swap` that are on the GPU now.  So answers about memory in chunks come from the registry, and are those for
 * memory of cuMemAlloc or of the application's own mapping.  Descriptors and handles of its physical memory are refused, because it moves.  The driver
 * shares its own memory with other processes, in every mode also its events; ipc/ipc.h shares memory in chunks.
 */
#include "base/config.h"
#include "base/log.h"
#include "contexts/context.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "hooks/hooks.h"
#include "ipc/ipc.h"
#include "memory/memory.h"
#include "swap/swap.h"

#include <errno.h>
#include <stdatomic.h>

/* --- queries about memory in chunks --- */

bool nvs_in_chunks(CUdeviceptr pointer, nvs_allocation *copy)
{
    return nvs_swapping() &&
           nvs_allocation_find(NVS_SPACE_ADDRESS, pointer, copy) == NVS_FOUND && copy->backend.chunked;
}

bool nvs_between_chunks(CUdeviceptr pointer)
{
    nvs_allocation ignored;
    return nvs_swapping() && nvs_swap_owns(pointer) && !nvs_in_chunks(pointer, &ignored);
}

/* The attributes that differ for memory that the application mapped itself. */
static CUresult answer_mapped(void *data, CUpointer_attribute attribute, const nvs_allocation *handle, CUdeviceptr address)
{
    const CUmemAllocationProp *prop = &((const nvs_segment *)handle->backend.kept)->vmm->properties;
    const CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)nvs_current_gpu()};
    unsigned long long access;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = NULL; break; /* this memory has no context */
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: *(unsigned long long *)data = handle->node.serial; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)data = prop->requestedHandleTypes; break;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(unsigned int *)data = prop->allocFlags.gpuDirectRDMACapable; break;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        nvs_view_access(handle->backend.kept, address, &here, &access);
        *(unsigned int *)data = (unsigned int)access; /* the two kinds of flags have the same values */
        break;
    default: break;
    }
    return CUDA_SUCCESS;
}

/* The attributes of memory of cuMemAlloc.  For managed memory in its place the driver answers all but a few. */
static CUresult answer_plain(void *data, CUpointer_attribute attribute, const nvs_allocation *as, CUdeviceptr pointer)
{
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = as->context; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned int *)data = CU_MEMORYTYPE_DEVICE; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(void **)data = NULL; return CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = (int)as->gpu; return CUDA_SUCCESS;
    default: break;
    }
    if (!as->backend.chunked) {
        const CUresult result = NVS_REAL(cuPointerGetAttribute)(data, attribute, pointer);
        if (result == CUDA_SUCCESS && attribute == CU_POINTER_ATTRIBUTE_IS_MANAGED)
            *(unsigned char *)data = 0; /* it was 1: clearing the low byte works for every width */
        return result;
    }
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned int *)data = 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = pointer; break;
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS: return CUDA_ERROR_NOT_SUPPORTED; /* for RDMA: this memory moves */
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned int *)data = nvs_swap_sync_memops(as->gpu, as->backend.kept); break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)data = as->node.serial; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned int *)data = as->kind == NVS_MEMORY_REDIRECTED && nvs_share_possible(as->gpu);
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = as->key; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = as->length; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned int *)data = 1; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)data = 0; break;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(unsigned int *)data = 0; break;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: *(unsigned int *)data = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE; break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)data = NULL; break;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: *(size_t *)data = as->length; break;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: *(CUdeviceptr *)data = as->key; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: *(unsigned long long *)data = as->node.serial; break;
    default: return NVS_REAL(cuPointerGetAttribute)(data, attribute, pointer); /* newer than this list */
    }
    return CUDA_SUCCESS;
}

/* cuPointerGetAttribute of memory that looks like memory of cuMemAlloc, or in chunks. */
static CUresult pointer_answer(void *data, CUpointer_attribute attribute, const nvs_allocation *as, CUdeviceptr pointer)
{
    nvs_allocation at, *handle;
    if (as->kind != NVS_MEMORY_MAPPING)
        return answer_plain(data, attribute, as, pointer);
    if ((handle = nvs_allocation_pin_mapping(pointer, 1, &at)) == NULL)
        return CUDA_ERROR_INVALID_VALUE; /* unmapped meanwhile */
    at.backend.kept = handle->backend.kept;
    CUresult result = answer_plain(data, attribute, &at, pointer);
    if (result == CUDA_SUCCESS)
        result = answer_mapped(data, attribute, handle, at.key);
    nvs_memory_drop_all(nvs_allocation_unpin_handle(handle));
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    nvs_allocation as, at, *handle;
    if (value == NULL || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || !nvs_in_chunks(ptr, &as))
        return nvs_between_chunks(ptr) ? CUDA_ERROR_INVALID_VALUE : NVS_REAL(cuPointerSetAttribute)(value, attribute, ptr);
    if (as.kind != NVS_MEMORY_MAPPING)
        return nvs_swap_set_sync_memops(as.gpu, as.backend.kept, *(const unsigned int *)value);
    if ((handle = nvs_allocation_pin_mapping(ptr, 1, &at)) == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = nvs_swap_set_sync_memops(handle->gpu, handle->backend.kept, *(const unsigned int *)value);
    nvs_memory_drop_all(nvs_allocation_unpin_handle(handle));
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
    nvs_allocation as;
    nvs_ipc_import shared;
    if (nvs_ipc_imported(dptr, &shared))
        as = (nvs_allocation){.key = shared.address, .length = shared.length};
    else if (!nvs_in_chunks(dptr, &as))
        return nvs_between_chunks(dptr) ? CUDA_ERROR_NOT_FOUND : NVS_REAL(cuMemGetAddressRange_v2)(pbase, psize, dptr);
    if (pbase != NULL)
        *pbase = as.key;
    if (psize != NULL)
        *psize = as.length;
    return CUDA_SUCCESS;
}

NVS_EXPORT CUresult CUDAAPI cuMemGetHandleForAddressRange(void *handle, CUdeviceptr dptr, size_t size, CUmemRangeHandleType handleType,
                                                          unsigned long long flags)
{
    nvs_allocation as;
    if (!nvs_in_chunks(dptr, &as))
        return nvs_between_chunks(dptr) ? CUDA_ERROR_INVALID_VALUE : NVS_REAL(cuMemGetHandleForAddressRange)(handle, dptr, size, handleType, flags);
    static _Atomic uint8_t known[NVS_MAX_GPUS];
    if (as.kind == NVS_MEMORY_MAPPING && nvs_gpu_supports(as.gpu, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, known)) {
        const CUresult pinned = nvs_pin_address(dptr, size);
        return pinned == CUDA_SUCCESS ? NVS_REAL(cuMemGetHandleForAddressRange)(handle, dptr, size, handleType, flags) : pinned;
    }
    NVS_LOG_ONCE(NVS_LOG_WARNING, "memory that moves cannot be exported to other devices (cuMemGetHandleForAddressRange): "
                                  "run this program with --memory device (NVSHARE_MEMORY=device)");
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* Kernels of one GPU may now access memory of another, without naming it. */
static void open_to(uint32_t owner, uint32_t accessor)
{
    nvs_coordinator.link(1u << owner | 1u << accessor);
    nvs_swap_allow(owner, accessor);
}

/* The driver gives access to its own allocations.  Memory in chunks gets access chunk by chunk.
 * cuCtxDisablePeerAccess does not revoke it: an access that should fail then succeeds. */
NVS_EXPORT CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags)
{
    CUresult result = NVS_REAL(cuCtxEnablePeerAccess)(peerContext, Flags);
    if (result != CUDA_SUCCESS)
        return result;
    uint32_t owner = nvs_context_gpu(peerContext), accessor = nvs_current_gpu();
    if (owner >= NVS_MAX_GPUS || accessor >= NVS_MAX_GPUS)
        return result;
    nvs_ipc_enable_peer(owner, accessor);
    if (nvs_swapping() && nvs_memory_backend(owner)->chunked)
        open_to(owner, accessor);
    return result;
}

/* The GPU of a default or current pool; NVS_NO_GPU: another pool. */
static uint32_t owner_of(CUmemoryPool pool)
{
    CUmemoryPool known;
    for (CUdevice gpu = 0; gpu < (CUdevice)NVS_MAX_GPUS; gpu++)
        if ((NVS_REAL(cuDeviceGetDefaultMemPool)(&known, gpu) == CUDA_SUCCESS && known == pool) ||
            (NVS_REAL(cuDeviceGetMemPool)(&known, gpu) == CUDA_SUCCESS && known == pool))
            return (uint32_t)gpu;
    return NVS_NO_GPU;
}

void nvs_swap_pool_opened(CUmemoryPool pool, uint32_t accessor, uint32_t gave)
{
    const uint32_t owner = gave != 0 ? owner_of(pool) : NVS_NO_GPU;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if ((gave >> gpu & 1) != 0 && gpu != accessor && (owner == gpu || owner == NVS_NO_GPU))
            open_to(gpu, accessor);
}

/* --- legacy IPC --- */

NVS_EXPORT CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
{
    nvs_allocation as;
    const nvs_lookup found = nvs_config.enabled ? nvs_allocation_find(NVS_SPACE_ADDRESS, dptr, &as) : NVS_ABSENT;
    const bool ours = found != NVS_ABSENT && (as.kind == NVS_MEMORY_REDIRECTED || as.backend.chunked);
    CUipcMemHandle handle;
    if (!ours || !as.backend.chunked) {
        const CUresult result = NVS_REAL(cuIpcGetMemHandle)(pHandle, dptr);
        if (result != CUDA_SUCCESS && ours)
            NVS_LOG_ONCE(NVS_LOG_WARNING,
                         "managed memory cannot be shared with other processes (cuIpcGetMemHandle failed, error %d): "
                         "run this program with --memory swap or --memory device (NVSHARE_MEMORY)", (int)result);
        return result;
    }
    if (pHandle == NULL || as.kind == NVS_MEMORY_MAPPING || found == NVS_DYING)
        return CUDA_ERROR_INVALID_VALUE; /* the driver's error for memory of cuMemMap, and for no memory */
    if (nvs_owner_context() == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    const int saved = errno;
    const CUresult result = nvs_ipc_export(&as, &handle);
    errno = saved;
    if (result == CUDA_SUCCESS)
        *pHandle = handle;
    return result;
}

/* The attribute of the import as one allocation; false: the driver's own answer is right. */
static bool ipc_pointer_answer(const nvs_ipc_import *as, void *data, CUpointer_attribute attribute)
{
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = as->context; return true;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned int *)data = 0; return true; /* only the exporter can export it */
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)data = 0; return true;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: *(unsigned long long *)data = as->serial; return true;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: *(CUdeviceptr *)data = as->address; return true;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: *(size_t *)data = as->length; return true;
    default: return false;
    }
}

static CUresult open_ours(CUdeviceptr *pdptr, const CUipcMemHandle *from, unsigned int flags)
{
    CUdeviceptr address;
    if (pdptr == NULL || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    const CUresult result = nvs_ipc_open(from, &address);
    if (result == CUDA_SUCCESS)
        *pdptr = address;
    return result;
}

NVS_WRAP(cuIpcOpenMemHandle, (CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags),
         nvs_ipc_is_ours(&handle) ? open_ours(pdptr, &handle, Flags) : real(pdptr, handle, Flags))
NVS_WRAP(cuIpcOpenMemHandle_v2, (CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags),
         nvs_ipc_is_ours(&handle) ? open_ours(pdptr, &handle, Flags) : real(pdptr, handle, Flags))

NVS_EXPORT CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr dptr)
{
    CUresult result;
    return nvs_ipc_close(dptr, &result) ? result : NVS_REAL(cuIpcCloseMemHandle)(dptr);
}

/* --- allocation --- */

NVS_EXPORT CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
    uint32_t gpu = nvs_current_gpu();
    if (dptr == NULL || bytesize == 0 || !nvs_memory_manages(gpu))
        return NVS_REAL(cuMemAlloc_v2)(dptr, bytesize);
    return nvs_memory_allocate(gpu, dptr, bytesize);
}

/* Memory of the driver; `bytes` is the expected size. */
static CUresult pitch_in_place(uint32_t gpu, uint64_t bytes, CUdeviceptr *dptr, size_t *pitch, size_t width, size_t height,
                               unsigned int element)
{
    nvs_allocation *entry;
    CUresult result = nvs_pins_admit(NVS_SPACE_ADDRESS, NVS_MEMORY_REAL, gpu, bytes, &entry);
    if (result != CUDA_SUCCESS)
        return result;
    entry->context = nvs_owner_context();
    result = NVS_REAL(cuMemAllocPitch_v2)(dptr, pitch, width, height, element);
    if (result != CUDA_SUCCESS) {
        nvs_memory_drop(entry);
        return result;
    }
    nvs_memory_correct(entry, *pitch * height);
    nvs_memory_keep(entry, *dptr, *pitch * height);
    return result;
}

/* The driver's alignment of rows, found once per GPU: the pitch of a one-byte row.  0: the driver fails. */
static size_t pitch_alignment(uint32_t gpu)
{
    static _Atomic size_t known[NVS_MAX_GPUS];
    /* Relaxed: publishes no other data; every thread finds the same value. */
    size_t pitch = atomic_load_explicit(&known[gpu], memory_order_relaxed);
    CUdeviceptr probe;
    if (pitch != 0)
        return pitch;
    if (pitch_in_place(gpu, 512, &probe, &pitch, 1, 1, 4) != CUDA_SUCCESS)
        return 0;
    nvs_memory_release(probe);
    atomic_store_explicit(&known[gpu], pitch, memory_order_relaxed);
    return pitch;
}

NVS_EXPORT CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
                                               unsigned int ElementSizeBytes)
{
    uint32_t gpu = nvs_current_gpu();
    bool sound = dptr != NULL && pPitch != NULL && WidthInBytes != 0 && Height != 0 &&
                 (ElementSizeBytes == 4 || ElementSizeBytes == 8 || ElementSizeBytes == 16);
    if (!sound || WidthInBytes > (SIZE_MAX >> 1) / Height || !nvs_memory_manages(gpu))
        return NVS_REAL(cuMemAllocPitch_v2)(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
    size_t align = pitch_alignment(gpu);
    size_t pitch = align != 0 ? (WidthInBytes + align - 1) / align * align : WidthInBytes;
    if (pitch > SIZE_MAX / Height)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (align == 0 || !nvs_memory_backend(gpu)->movable) /* the driver fails, or memory does not move */
        return pitch_in_place(gpu, pitch * Height, dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
    CUresult result = nvs_memory_allocate(gpu, dptr, pitch * Height);
    if (result == CUDA_SUCCESS)
        *pPitch = pitch;
    return result;
}

/* Managed memory that the application allocates is charged and moved as other memory. */
NVS_EXPORT CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
    uint32_t gpu = nvs_current_gpu();
    nvs_allocation *entry;
    if (dptr == NULL || bytesize == 0 || !nvs_memory_manages(gpu))
        return NVS_REAL(cuMemAllocManaged)(dptr, bytesize, flags);
    CUresult result = nvs_memory_admit(NVS_SPACE_ADDRESS, NVS_MEMORY_APP_MANAGED, gpu, bytesize, &entry);
    if (result != CUDA_SUCCESS)
        return result;
    entry->context = nvs_owner_context();
    (void)nvs_context_gpu(entry->context); /* registered: movers visit it */
    entry->backend.movable = nvs_memory_backend(gpu)->movable && entry->context != NULL;
    result = NVS_REAL(cuMemAllocManaged)(dptr, bytesize, flags);
    if (result == CUDA_SUCCESS)
        nvs_memory_keep(entry, *dptr, bytesize);
    else
        nvs_memory_drop(entry);
    return result;
}

/* --- free --- */

NVS_EXPORT CUresult CUDAAPI cuMemFree_v2(CUdeviceptr dptr)
{
    return nvs_memory_release(dptr);
}

/* --- the virtual card --- */

NVS_EXPORT CUresult CUDAAPI cuMemGetInfo_v2(size_t *free, size_t *total)
{
    uint32_t gpu = nvs_current_gpu();
    nvs_slot *const slot = nvs_query_enter();
    size_t real_free = 0, real_total = 0;
    CUresult result = NVS_REAL(cuMemGetInfo_v2)(free == NULL ? NULL : &real_free, total == NULL ? NULL : &real_total);
    nvs_gate_awaited(slot);
    if (result == CUDA_SUCCESS && (free == NULL || total == NULL || !nvs_memory_manages(gpu))) {
        if (free != NULL)
            *free = real_free;
        if (total != NULL)
            *total = real_total;
        return result;
    }
    if (result != CUDA_SUCCESS)
        return result;
    nvs_memory_reap(gpu, false);
    uint64_t free_bytes = real_free, total_bytes = real_total;
    nvs_memory_virtual_info(gpu, &free_bytes, &total_bytes);
    *free = free_bytes;
    *total = total_bytes;
    return CUDA_SUCCESS;
}

NVS_EXPORT CUresult CUDAAPI cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
    CUresult result = NVS_REAL(cuDeviceTotalMem_v2)(bytes, dev);
    if (result != CUDA_SUCCESS || bytes == NULL || dev < 0 || !nvs_memory_manages((uint32_t)dev))
        return result;
    uint64_t free_bytes = 0, total_bytes = *bytes;
    nvs_memory_virtual_info((uint32_t)dev, &free_bytes, &total_bytes);
    *bytes = total_bytes;
    return CUDA_SUCCESS;
}

/* --- pointer queries: redirected memory looks like memory of cuMemAlloc --- */

/* True if the driver owns all memory.  Fast: frameworks query every pointer that they pass to a kernel. */
static inline bool as_the_driver_says(void)
{
    return NVS_LIKELY(nvs_config.memory_mode == NVS_MODE_DEVICE) &&
           NVS_LIKELY(atomic_load_explicit(&nvs_hot.imports, memory_order_relaxed) == 0); /* see base/hot.h */
}

static bool redirected(CUdeviceptr pointer, nvs_allocation *copy)
{
    return nvs_config.enabled && nvs_config.memory_mode != NVS_MODE_DEVICE && nvs_allocation_find(NVS_SPACE_ADDRESS, pointer, copy) == NVS_FOUND &&
           (copy->kind == NVS_MEMORY_REDIRECTED || copy->backend.chunked);
}

static __attribute__((noinline)) CUresult ask_about(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    nvs_allocation as;
    nvs_ipc_import shared;
    if (data != NULL && nvs_ipc_imported(ptr, &shared) && ipc_pointer_answer(&shared, data, attribute))
        return CUDA_SUCCESS;
    /* The most frequent query has the same answer for managed memory, and needs no lock. */
    const bool same = nvs_config.memory_mode == NVS_MODE_MANAGED && attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER;
    if (data == NULL || same || !redirected(ptr, &as))
        return nvs_between_chunks(ptr) ? CUDA_ERROR_INVALID_VALUE : NVS_REAL(cuPointerGetAttribute)(data, attribute, ptr);
    return pointer_answer(data, attribute, &as, ptr);
}

NVS_EXPORT CUresult CUDAAPI cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    return as_the_driver_says() ? NVS_REAL(cuPointerGetAttribute)(data, attribute, ptr) : ask_about(data, attribute, ptr);
}

NVS_EXPORT CUresult CUDAAPI cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data,
                                                   CUdeviceptr ptr)
{
    nvs_allocation as;
    nvs_ipc_import shared;
    if (as_the_driver_says())
        return NVS_REAL(cuPointerGetAttributes)(numAttributes, attributes, data, ptr);
    if (numAttributes != 0 && attributes != NULL && data != NULL && redirected(ptr, &as) && as.backend.chunked) {
        for (unsigned int i = 0; i < numAttributes; i++)
            pointer_answer(data[i], attributes[i], &as, ptr); /* ignored: this function clears an attribute that does not apply */
        return CUDA_SUCCESS;
    }
    if (nvs_between_chunks(ptr))
        ptr = 1; /* of no memory: the driver clears the values */
    CUresult result = NVS_REAL(cuPointerGetAttributes)(numAttributes, attributes, data, ptr);
    if (result == CUDA_SUCCESS && nvs_ipc_imported(ptr, &shared))
        for (unsigned int i = 0; i < numAttributes; i++)
            (void)ipc_pointer_answer(&shared, data[i], attributes[i]);
    if (result == CUDA_SUCCESS && redirected(ptr, &as))
        for (unsigned int i = 0; i < numAttributes; i++)
            pointer_answer(data[i], attributes[i], &as, ptr);
    return result;
}

/* --- arrays do not move; they are charged by the size of their texels --- */

/* Bits of one texel, all channels. */
static uint64_t texel_bits(CUarray_format format, unsigned int channels)
{
    switch ((int)format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return UINT64_C(8) * channels;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return UINT64_C(16) * channels;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return UINT64_C(32) * channels;
    case CU_AD_FORMAT_BC1_UNORM: /* block-compressed: 4 by 4 texels in 8 or 16 bytes */
    case CU_AD_FORMAT_BC1_UNORM_SRGB:
    case CU_AD_FORMAT_BC4_UNORM:
    case CU_AD_FORMAT_BC4_SNORM:
        return 4;
    case CU_AD_FORMAT_BC2_UNORM:
    case CU_AD_FORMAT_BC2_UNORM_SRGB:
    case CU_AD_FORMAT_BC3_UNORM:
    case CU_AD_FORMAT_BC3_UNORM_SRGB:
    case CU_AD_FORMAT_BC5_UNORM:
    case CU_AD_FORMAT_BC5_SNORM:
    case CU_AD_FORMAT_BC6H_UF16:
    case CU_AD_FORMAT_BC6H_SF16:
    case CU_AD_FORMAT_BC7_UNORM:
    case CU_AD_FORMAT_BC7_UNORM_SRGB:
    case CU_AD_FORMAT_UNORM_INT8X1:
    case CU_AD_FORMAT_SNORM_INT8X1:
        return 8;
    case CU_AD_FORMAT_NV12:
        return 12;
    case CU_AD_FORMAT_UNORM_INT8X2:
    case CU_AD_FORMAT_SNORM_INT8X2:
    case CU_AD_FORMAT_UNORM_INT16X1:
    case CU_AD_FORMAT_SNORM_INT16X1:
        return 16;
    case CU_AD_FORMAT_UNORM_INT16X4:
    case CU_AD_FORMAT_SNORM_INT16X4:
        return 64;
    default:
        return 32; /* packed and planar video formats need at most about this */
    }
}

static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *of, unsigned int levels)
{
    uint64_t total = 0, width = of->Width, height = of->Height, depth = of->Depth;
    bool layered = (of->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
    if (of->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return 0; /* backed by handles, which are charged themselves */
    for (unsigned int level = 0; level < levels && level < 64; level++) {
        uint64_t texels = (width ? width : 1) * (height ? height : 1) * (depth ? depth : 1);
        total += (texels * texel_bits(of->Format, of->NumChannels) + 7) / 8;
        if ((width | height | (layered ? 0 : depth)) <= 1)
            break;
        width >>= 1;
        height >>= 1;
        depth = layered ? depth : depth >> 1;
    }
    return total;
}

static CUresult admit_array(const CUDA_ARRAY3D_DESCRIPTOR *of, unsigned int levels, nvs_allocation **out)
{
    uint32_t gpu = nvs_current_gpu();
    *out = NULL;
    if (!nvs_memory_manages(gpu))
        return CUDA_SUCCESS;
    CUresult result = nvs_pins_admit(NVS_SPACE_ARRAY, NVS_MEMORY_ARRAY, gpu, array_bytes(of, levels), out);
    if (result == CUDA_SUCCESS)
        (*out)->context = nvs_owner_context();
    return result;
}

/* `handle` points to the handle that the driver has filled in. */
static CUresult keep_array(CUresult result, nvs_allocation *entry, const void *handle)
{
    if (entry != NULL && result == CUDA_SUCCESS)
        nvs_memory_keep(entry, (uint64_t) * (const uintptr_t *)handle, 1);
    else if (entry != NULL)
        nvs_memory_drop(entry);
    return result;
}

static CUDA_ARRAY3D_DESCRIPTOR flat(size_t width, size_t height, CUarray_format format, unsigned int channels)
{
    return (CUDA_ARRAY3D_DESCRIPTOR){.Width = width, .Height = height, .Format = format, .NumChannels = channels};
}

#define NVS_ARRAY_CREATE(symbol, descriptor, as_3d)                                                            \
    NVS_EXPORT CUresult CUDAAPI symbol(CUarray *pHandle, const descriptor *pAllocateArray)                     \
    {                                                                                                          \
        nvs_allocation *entry;                                                                                 \
        if (pHandle == NULL || pAllocateArray == NULL)                                                         \
            return NVS_REAL(symbol)(pHandle, pAllocateArray);                                                  \
        CUDA_ARRAY3D_DESCRIPTOR wanted = as_3d;                                                                \
        CUresult result = admit_array(&wanted, 1, &entry);                                                     \
        if (result != CUDA_SUCCESS)                                                                            \
            return result;                                                                                     \
        result = NVS_REAL(symbol)(pHandle, pAllocateArray);                                                    \
        return keep_array(result, entry, pHandle);                                                             \
    }

NVS_ARRAY_CREATE(cuArrayCreate_v2, CUDA_ARRAY_DESCRIPTOR,
                 flat(pAllocateArray->Width, pAllocateArray->Height, pAllocateArray->Format, pAllocateArray->NumChannels))
NVS_ARRAY_CREATE(cuArray3DCreate_v2, CUDA_ARRAY3D_DESCRIPTOR, *pAllocateArray)

NVS_EXPORT CUresult CUDAAPI cuMipmappedArrayCreate(CUmipmappedArray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc,
                                                   unsigned int numMipmapLevels)
{
    nvs_allocation *entry;
    if (pHandle == NULL || pMipmappedArrayDesc == NULL)
        return NVS_REAL(cuMipmappedArrayCreate)(pHandle, pMipmappedArrayDesc, numMipmapLevels);
    CUresult result = admit_array(pMipmappedArrayDesc, numMipmapLevels, &entry);
    if (result != CUDA_SUCCESS)
        return result;
    result = NVS_REAL(cuMipmappedArrayCreate)(pHandle, pMipmappedArrayDesc, numMipmapLevels);
    return keep_array(result, entry, pHandle);
}

/* Removes the entry before the driver may reuse the handle; end_array puts it back if the driver fails. */
static nvs_allocation *take_array(const void *handle)
{
    nvs_allocation *entry = NULL;
    nvs_allocation_take(NVS_SPACE_ARRAY, (uint64_t)(uintptr_t)handle, &entry);
    return entry;
}

static CUresult end_array(CUresult result, nvs_allocation *entry)
{
    if (entry != NULL && result == CUDA_SUCCESS)
        nvs_memory_drop(entry);
    else if (entry != NULL)
        nvs_memory_drop_all(nvs_allocation_insert(entry));
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuArrayDestroy(CUarray hArray)
{
    nvs_allocation *entry = take_array(hArray);
    return end_array(NVS_REAL(cuArrayDestroy)(hArray), entry);
}

NVS_EXPORT CUresult CUDAAPI cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray)
{
    nvs_allocation *entry = take_array(hMipmappedArray);
    return end_array(NVS_REAL(cuMipmappedArrayDestroy)(hMipmappedArray), entry);
}
