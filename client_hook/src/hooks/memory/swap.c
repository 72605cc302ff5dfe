/* Wrappers of queries about memory in chunks (mode `swap`).  The driver knows only the chunks that are on the GPU now.
 *
 * The answers come from the registry, and are those for memory of cuMemAlloc or of the application's own mapping.  Descriptors and handles of its
 * physical memory are refused, because it moves.
 */
#include "base/config.h"
#include "base/log.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "hooks/memory/swap.h"
#include "ipc/ipc.h"
#include "memory/memory.h"
#include "swap/swap.h"

bool nvs_in_chunks(CUdeviceptr pointer, nvs_allocation *copy)
{
    return nvs_config.memory_mode == NVS_MODE_SWAP && nvs_config.enabled &&
           nvs_allocation_find(NVS_SPACE_ADDRESS, pointer, copy) == NVS_FOUND && copy->backend.chunked;
}

bool nvs_between_chunks(CUdeviceptr pointer)
{
    nvs_allocation ignored;
    return nvs_config.memory_mode == NVS_MODE_SWAP && nvs_config.enabled && nvs_swap_owns(pointer) && !nvs_in_chunks(pointer, &ignored);
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

/* The driver's attributes for memory of cuMemAlloc. */
static CUresult answer_plain(void *data, CUpointer_attribute attribute, const nvs_allocation *as, CUdeviceptr pointer)
{
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = as->context; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned int *)data = CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = pointer; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(void **)data = NULL; return CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS: return CUDA_ERROR_NOT_SUPPORTED; /* for RDMA: this memory moves */
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned int *)data = nvs_swap_sync_memops(as->gpu, as->backend.kept); break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)data = as->node.serial; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned int *)data = 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = (int)as->gpu; break;
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

CUresult nvs_pointer_answer(void *data, CUpointer_attribute attribute, const nvs_allocation *as, CUdeviceptr pointer)
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
    NVS_LOG_ONCE(NVS_LOG_WARNING, "memory that moves cannot be exported to other devices (cuMemGetHandleForAddressRange): "
                                  "run this program with --memory device (NVSHARE_MEMORY=device)");
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* Kernels of one GPU may now access memory of another, without naming it. */
static void open_to(uint32_t owner, uint32_t accessor)
{
    nvs_swap_pin_gpu(owner);
    nvs_swap_allow(owner, accessor);
}

/* The driver gives access to its own allocations.  Memory in chunks gets access chunk by chunk, and stays on the card from then on.
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
    if (nvs_config.memory_mode == NVS_MODE_SWAP && nvs_config.enabled && nvs_memory_backend(owner)->chunked)
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
