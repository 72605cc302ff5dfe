/* Wrappers: cuIpc*MemHandle.  The driver shares its own memory; ipc/ipc.h shares memory in chunks.
 *
 * Handles of events are the driver's in every mode.
 *
 * Non-goals: how exporter and importer share memory (ipc/).
 */
#include "base/config.h"
#include "base/log.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "ipc/ipc.h"
#include "memory/memory.h"

#include <errno.h>

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

bool nvs_ipc_pointer_answer(const nvs_ipc_import *as, void *data, CUpointer_attribute attribute)
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

NVS_EXPORT CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
{
    return nvs_ipc_is_ours(&handle) ? open_ours(pdptr, &handle, Flags) : NVS_REAL(cuIpcOpenMemHandle)(pdptr, handle, Flags);
}

NVS_EXPORT CUresult CUDAAPI cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
{
    return nvs_ipc_is_ours(&handle) ? open_ours(pdptr, &handle, Flags) : NVS_REAL(cuIpcOpenMemHandle_v2)(pdptr, handle, Flags);
}

NVS_EXPORT CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr dptr)
{
    CUresult result;
    return nvs_ipc_close(dptr, &result) ? result : NVS_REAL(cuIpcCloseMemHandle)(dptr);
}
