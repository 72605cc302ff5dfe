/* Copies between GPUs that cannot reach each other's memory, in mode `swap` (operands.h).
 *
 * cuMemcpyPeer needs no rights but those of each end's own GPU: what it copies goes through the host, as a copy of cuMemAlloc's memory does there.
 */
#include "base/log.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "hooks/memory/operands.h"
#include "memory/records/allocation.h"

static bool first(CUcontext context, void *argument)
{
    *(CUcontext *)argument = context;
    return false;
}

/* One of the GPU that an address is on; NULL: it is on none, or not known. */
static CUcontext context_of(CUdeviceptr pointer)
{
    CUcontext found = NULL;
    CUmemorytype type = CU_MEMORYTYPE_DEVICE;
    nvs_allocation as;
    nvs_ipc_import shared;
    if (nvs_ipc_imported(pointer, &shared))
        return shared.context;
    if (nvs_allocation_find(NVS_SPACE_ADDRESS, pointer, &as) != NVS_ABSENT && as.chunked)
        nvs_each_context(as.gpu, first, &found);
    else if (NVS_REAL(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer) != CUDA_SUCCESS || type != CU_MEMORYTYPE_DEVICE ||
             NVS_REAL(cuPointerGetAttribute)(&found, CU_POINTER_ATTRIBUTE_CONTEXT, pointer) != CUDA_SUCCESS)
        return NULL; /* of the host */
    return found;
}

static bool copy_line(CUdeviceptr to, CUdeviceptr from, size_t bytes, const nvs_peer_copy *what, CUresult *result)
{
    const CUcontext there = context_of(to), here = context_of(from);
    if (there == NULL || here == NULL)
        return false;
    *result = (what->per_thread ? NVS_REAL(cuMemcpyPeerAsync_ptsz) : NVS_REAL(cuMemcpyPeerAsync))(to, there, from, here, bytes, what->stream);
    return true;
}

static bool copy_lines(const nvs_peer_copy *what, CUresult *result)
{
    bool went = what->count != 0;
    *result = CUDA_SUCCESS;
    for (size_t i = 0; went && *result == CUDA_SUCCESS && i < what->count; i++)
        went = what->sizes[i] == 0 || copy_line(what->targets[i], what->sources[i], what->sizes[i], what, result);
    return went;
}

static bool is_device(CUmemorytype type) { return type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED; }

static bool copy_solid(const CUDA_MEMCPY3D *as, const nvs_peer_copy *what, CUresult *result)
{
    CUDA_MEMCPY3D_PEER shape = {
        .srcXInBytes = as->srcXInBytes, .srcY = as->srcY, .srcZ = as->srcZ, .srcLOD = as->srcLOD, .srcMemoryType = as->srcMemoryType,
        .srcDevice = as->srcDevice, .srcPitch = as->srcPitch, .srcHeight = as->srcHeight, .dstXInBytes = as->dstXInBytes, .dstY = as->dstY,
        .dstZ = as->dstZ, .dstLOD = as->dstLOD, .dstMemoryType = as->dstMemoryType, .dstDevice = as->dstDevice, .dstPitch = as->dstPitch,
        .dstHeight = as->dstHeight, .WidthInBytes = as->WidthInBytes, .Height = as->Height, .Depth = as->Depth};
    if (!is_device(as->srcMemoryType) || !is_device(as->dstMemoryType))
        return false;
    shape.srcContext = context_of(as->srcDevice);
    shape.dstContext = context_of(as->dstDevice);
    if (shape.srcContext == NULL || shape.dstContext == NULL)
        return false;
    *result = (what->per_thread ? NVS_REAL(cuMemcpy3DPeerAsync_ptsz) : NVS_REAL(cuMemcpy3DPeerAsync))(&shape, what->stream);
    return true;
}

static bool copy_flat(const CUDA_MEMCPY2D *as, const nvs_peer_copy *what, CUresult *result)
{
    const CUDA_MEMCPY3D shape = {
        .srcXInBytes = as->srcXInBytes, .srcY = as->srcY, .srcMemoryType = as->srcMemoryType, .srcDevice = as->srcDevice,
        .srcPitch = as->srcPitch, .dstXInBytes = as->dstXInBytes, .dstY = as->dstY, .dstMemoryType = as->dstMemoryType,
        .dstDevice = as->dstDevice, .dstPitch = as->dstPitch, .WidthInBytes = as->WidthInBytes, .Height = as->Height, .Depth = 1};
    return copy_solid(&shape, what, result);
}

/* Lengths of pointers are in bytes, and 0 where there is nothing between rows or layers. */
static bool copy_shapes(const nvs_peer_copy *what, CUresult *result)
{
    bool went = what->count != 0;
    *result = CUDA_SUCCESS;
    for (size_t i = 0; went && *result == CUDA_SUCCESS && i < what->count; i++) {
        const CUDA_MEMCPY3D_BATCH_OP *as = &what->shapes[i];
        const size_t width = as->extent.width, height = as->extent.height;
        if (as->src.type != CU_MEMCPY_OPERAND_TYPE_POINTER || as->dst.type != CU_MEMCPY_OPERAND_TYPE_POINTER)
            return false;
        const CUDA_MEMCPY3D shape = {
            .srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = as->src.op.ptr.ptr,
            .srcPitch = as->src.op.ptr.rowLength != 0 ? as->src.op.ptr.rowLength : width,
            .srcHeight = as->src.op.ptr.layerHeight != 0 ? as->src.op.ptr.layerHeight : height,
            .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = as->dst.op.ptr.ptr,
            .dstPitch = as->dst.op.ptr.rowLength != 0 ? as->dst.op.ptr.rowLength : width,
            .dstHeight = as->dst.op.ptr.layerHeight != 0 ? as->dst.op.ptr.layerHeight : height,
            .WidthInBytes = width, .Height = height, .Depth = as->extent.depth};
        went = copy_solid(&shape, what, result);
    }
    return went;
}

/* Where the only device memory is of a call that waits; NULL: there is none, or more. */
static CUcontext only_context(const nvs_peer_copy *what)
{
    CUdeviceptr to = what->to, from = what->from;
    if (what->flat != NULL) {
        to = is_device(what->flat->dstMemoryType) ? what->flat->dstDevice : 0;
        from = is_device(what->flat->srcMemoryType) ? what->flat->srcDevice : 0;
    } else if (what->solid != NULL) {
        to = is_device(what->solid->dstMemoryType) ? what->solid->dstDevice : 0;
        from = is_device(what->solid->srcMemoryType) ? what->solid->srcDevice : 0;
    }
    const CUcontext there = to != 0 ? context_of(to) : NULL, here = from != 0 ? context_of(from) : NULL;
    if (!what->waits || (there != NULL && here != NULL))
        return NULL;
    return there != NULL ? there : here;
}

nvs_peer_copy_outcome nvs_peer_copy_try(const nvs_peer_copy *what, CUresult *result)
{
    bool went = false;
    if (what->to != 0 && what->from != 0)
        went = copy_line(what->to, what->from, what->bytes, what, result);
    else if (what->targets != NULL && what->sources != NULL && what->sizes != NULL)
        went = copy_lines(what, result);
    else if (what->flat != NULL)
        went = copy_flat(what->flat, what, result);
    else if (what->solid != NULL)
        went = copy_solid(what->solid, what, result);
    else if (what->shapes != NULL)
        went = copy_shapes(what, result);
    if (went)
        return NVS_COPY_HANDLED;
    const CUcontext context = only_context(what);
    if (nvs_context_enter(context))
        return NVS_COPY_CONTEXT_PUSHED;
    NVS_LOG_ONCE(NVS_LOG_WARNING, "work of one GPU names memory of another, which it cannot be given access to (cuDeviceCanAccessPeer), "
                                  "in a call that the driver refuses for memory that moves: run this program with --memory device "
                                  "(NVSHARE_MEMORY=device)");
    return NVS_COPY_FALLBACK;
}

void nvs_peer_copy_pop(void)
{
    CUcontext borrowed;
    NVS_REAL(cuCtxPopCurrent_v2)(&borrowed);
}
