/* Linear copies between GPUs that cannot reach each other's memory, in mode `swap` (operands.h).
 *
 * cuMemcpyPeerAsync needs only the rights of each end's own GPU: the driver copies through the host, as it does for memory of cuMemAlloc.
 *
 * Non-goals: 2D, 3D and batch copies (docs/decisions/what-swap-does-without.md).
 */
#include "base/log.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "hooks/memory/operands.h"
#include "memory/registry.h"

/* A context of the GPU that holds an address; NULL: host memory, or unknown. */
static CUcontext context_of(CUdeviceptr pointer)
{
    CUcontext found = NULL;
    CUmemorytype type = CU_MEMORYTYPE_DEVICE;
    nvs_allocation allocation;
    nvs_ipc_import imported;
    if (nvs_ipc_imported(pointer, &imported))
        return imported.context;
    if (nvs_allocation_find(NVS_SPACE_ADDRESS, pointer, &allocation) != NVS_ABSENT && allocation.backend.chunked)
        found = nvs_any_context(allocation.gpu);
    else if (NVS_REAL(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer) != CUDA_SUCCESS || type != CU_MEMORYTYPE_DEVICE ||
             NVS_REAL(cuPointerGetAttribute)(&found, CU_POINTER_ATTRIBUTE_CONTEXT, pointer) != CUDA_SUCCESS)
        return NULL;
    return found;
}

/* The context of the only device memory that a call names; NULL: the call names none, or two. */
static CUcontext only_context(const nvs_peer_copy *what)
{
    const CUcontext to = what->to != 0 ? context_of(what->to) : NULL, from = what->from != 0 ? context_of(what->from) : NULL;
    if (to != NULL && from != NULL)
        return NULL;
    return to != NULL ? to : from;
}

nvs_peer_copy_outcome nvs_peer_copy_try(const nvs_peer_copy *what, CUresult *result)
{
    if (what->to != 0 && what->from != 0) {
        const CUcontext to = context_of(what->to), from = context_of(what->from);
        if (to != NULL && from != NULL) {
            *result = (what->per_thread ? NVS_REAL(cuMemcpyPeerAsync_ptsz) : NVS_REAL(cuMemcpyPeerAsync))(what->to, to, what->from, from,
                                                                                                      what->bytes, what->stream);
            return NVS_COPY_HANDLED;
        }
    }
    if (what->waits && nvs_context_enter(only_context(what)))
        return NVS_COPY_CONTEXT_PUSHED;
    NVS_LOG_ONCE(NVS_LOG_WARNING, "a GPU cannot access the memory of another one (cuDeviceCanAccessPeer), and the driver rejects this call for "
                                  "memory that moves: run this program with --memory device (NVSHARE_MEMORY=device)");
    return NVS_COPY_DRIVER_ANSWERS;
}

void nvs_peer_copy_pop(void)
{
    CUcontext popped;
    NVS_REAL(cuCtxPopCurrent_v2)(&popped);
}
