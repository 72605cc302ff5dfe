/* The 2D and 3D copies, which may have an array at either end. */
#include "copy/copy.h"

typedef struct end { /* one side of a CUDA_MEMCPY3D */
    CUmemorytype type;
    const void *host;
    CUdeviceptr device;
    CUarray array;
    size_t pitch, height, x, y, z;
} end;

static CUresult locate(end at, const CUDA_MEMCPY3D *shape, sim_copy_end *out)
{
    sim_array *array;
    char *base;
    switch (at.type) {
    case CU_MEMORYTYPE_HOST:
        base = SIM_POINTER(at.host);
        break;
    case CU_MEMORYTYPE_DEVICE:
    case CU_MEMORYTYPE_UNIFIED:
        base = SIM_POINTER(at.device);
        break;
    case CU_MEMORYTYPE_ARRAY:
        if (nvs_sim_array(at.array, &array) != CUDA_SUCCESS)
            return CUDA_ERROR_INVALID_VALUE;
        if (at.x + shape->WidthInBytes > array->pitch || at.y + shape->Height > array->rows)
            return CUDA_ERROR_INVALID_VALUE;
        base = SIM_POINTER(array->memory);
        at.pitch = array->pitch;
        at.height = array->rows;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (at.pitch == 0)
        at.pitch = shape->WidthInBytes;
    if (at.height == 0)
        at.height = shape->Height;
    if (base == NULL || (shape->Height > 1 && at.pitch < shape->WidthInBytes + at.x))
        return CUDA_ERROR_INVALID_VALUE;
    *out = (sim_copy_end){.start = base + at.z * at.pitch * at.height + at.y * at.pitch + at.x, .pitch = at.pitch,
                          .slice = at.pitch * at.height};
    return CUDA_SUCCESS;
}

static CUresult copy_of(const CUDA_MEMCPY3D *shape, sim_copy *out)
{
    const end from = {shape->srcMemoryType, shape->srcHost, shape->srcDevice, shape->srcArray, shape->srcPitch, shape->srcHeight,
                      shape->srcXInBytes, shape->srcY, shape->srcZ};
    const end to = {shape->dstMemoryType, shape->dstHost, shape->dstDevice, shape->dstArray, shape->dstPitch, shape->dstHeight,
                    shape->dstXInBytes, shape->dstY, shape->dstZ};
    *out = (sim_copy){.width = shape->WidthInBytes, .height = shape->Height, .depth = shape->Depth};
    NVS_SIM_TRY(locate(from, shape, &out->source));
    return locate(to, shape, &out->target);
}

/* The addresses of a graph node are checked when it is created. */
CUresult nvs_sim_copy_work(const CUDA_MEMCPY3D *shape, const sim_device *rights, sim_work *out)
{
    const uint64_t bytes = shape->WidthInBytes * shape->Height * shape->Depth;
    *out = (sim_work){.kind = OP_COPY, .bytes = bytes, .duration_ns = nvs_sim_copy_ns(bytes)};
    sim_copy *copy = &out->u.copy;
    NVS_SIM_TRY(copy_of(shape, copy));
    copy->target.rights = copy->source.rights = rights;
    return nvs_sim_copy_allowed(copy) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* A context that is given for an end names the GPU whose access rights count there. */
static CUresult find_rights(CUcontext handle, const sim_device **rights)
{
    sim_context *context;
    if (handle == NULL)
        return CUDA_SUCCESS;
    NVS_SIM_TRY(nvs_sim_context(handle, &context));
    *rights = context->device;
    return CUDA_SUCCESS;
}

static CUresult copy_between(const CUDA_MEMCPY3D *shape, CUcontext target_context, CUcontext source_context, CUstream handle,
                             bool asynchronous)
{
    sim_stream *stream;
    sim_copy copy;
    NVS_SIM_TRY(nvs_sim_copy_stream(handle, asynchronous, &stream));
    NVS_SIM_TRY(copy_of(shape, &copy));
    NVS_SIM_TRY(find_rights(target_context, &copy.target.rights));
    NVS_SIM_TRY(find_rights(source_context, &copy.source.rights));
    const bool host = shape->srcMemoryType == CU_MEMORYTYPE_HOST || shape->dstMemoryType == CU_MEMORYTYPE_HOST;
    const enum sim_waiting waiting = asynchronous ? SIM_WAIT_AS_ASYNC : host ? SIM_ALWAYS_WAIT : SIM_NEVER_WAIT;
    return nvs_sim_copy_submit(stream, &copy, waiting);
}

CUresult nvs_sim_copy_3d(const CUDA_MEMCPY3D *shape, CUstream handle, bool asynchronous)
{
    return copy_between(shape, NULL, NULL, handle, asynchronous);
}

static CUresult copy_2d(const CUDA_MEMCPY2D *flat, CUstream handle, bool asynchronous)
{
    const CUDA_MEMCPY3D shape = {
        .srcXInBytes = flat->srcXInBytes, .srcY = flat->srcY, .srcMemoryType = flat->srcMemoryType, .srcHost = flat->srcHost,
        .srcDevice = flat->srcDevice, .srcArray = flat->srcArray, .srcPitch = flat->srcPitch, .dstXInBytes = flat->dstXInBytes,
        .dstY = flat->dstY, .dstMemoryType = flat->dstMemoryType, .dstHost = flat->dstHost, .dstDevice = flat->dstDevice,
        .dstArray = flat->dstArray, .dstPitch = flat->dstPitch, .WidthInBytes = flat->WidthInBytes, .Height = flat->Height,
        .Depth = 1};
    return nvs_sim_copy_3d(&shape, handle, asynchronous);
}

static CUresult copy_peer(const CUDA_MEMCPY3D_PEER *peer, CUstream handle, bool asynchronous)
{
    const CUDA_MEMCPY3D shape = {
        .srcXInBytes = peer->srcXInBytes, .srcY = peer->srcY, .srcZ = peer->srcZ, .srcMemoryType = peer->srcMemoryType,
        .srcHost = peer->srcHost, .srcDevice = peer->srcDevice, .srcArray = peer->srcArray, .srcPitch = peer->srcPitch,
        .srcHeight = peer->srcHeight, .dstXInBytes = peer->dstXInBytes, .dstY = peer->dstY, .dstZ = peer->dstZ,
        .dstMemoryType = peer->dstMemoryType, .dstHost = peer->dstHost, .dstDevice = peer->dstDevice, .dstArray = peer->dstArray,
        .dstPitch = peer->dstPitch, .dstHeight = peer->dstHeight, .WidthInBytes = peer->WidthInBytes, .Height = peer->Height,
        .Depth = peer->Depth};
    return copy_between(&shape, peer->dstContext, peer->srcContext, handle, asynchronous);
}

#define SHAPED(name, function, parameters, stream, asynchronous)                                \
    SIM_EXPORT CUresult CUDAAPI name parameters                                                 \
    {                                                                                           \
        NVS_SIM_ENTER();                                                                        \
        NVS_SIM_CHECK(pCopy != NULL, CUDA_ERROR_INVALID_VALUE);                                 \
        return function(pCopy, stream, asynchronous);                                           \
    }

SHAPED(cuMemcpy2D_v2, copy_2d, (const CUDA_MEMCPY2D *pCopy), NULL, false)
SHAPED(cuMemcpy2DUnaligned_v2, copy_2d, (const CUDA_MEMCPY2D *pCopy), NULL, false)
SHAPED(cuMemcpy2DAsync_v2, copy_2d, (const CUDA_MEMCPY2D *pCopy, CUstream hStream), hStream, true)
SHAPED(cuMemcpy3D_v2, nvs_sim_copy_3d, (const CUDA_MEMCPY3D *pCopy), NULL, false)
SHAPED(cuMemcpy3DAsync_v2, nvs_sim_copy_3d, (const CUDA_MEMCPY3D *pCopy, CUstream hStream), hStream, true)
SHAPED(cuMemcpy3DPeer, copy_peer, (const CUDA_MEMCPY3D_PEER *pCopy), NULL, false)
SHAPED(cuMemcpy3DPeerAsync, copy_peer, (const CUDA_MEMCPY3D_PEER *pCopy, CUstream hStream), hStream, true)
