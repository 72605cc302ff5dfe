/* The 2D and 3D copies, which may have an array at either end. */
#include "copy/copy.h"

typedef struct end { /* of a copy, as CUDA_MEMCPY3D describes it */
    CUmemorytype type;
    const void *host;
    CUdeviceptr device;
    CUarray array;
    size_t pitch, height, x, y, z;
} end;

/* Where the end starts, and the steps to the next row and slice. */
static CUresult locate(end at, const CUDA_MEMCPY3D *shape, char **start, size_t *pitch, size_t *slice)
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
    *pitch = at.pitch;
    *slice = at.pitch * at.height;
    *start = base + at.z * *slice + at.y * at.pitch + at.x;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_copy_from_3d(const CUDA_MEMCPY3D *shape, sim_copy *out)
{
    const end from = {shape->srcMemoryType, shape->srcHost, shape->srcDevice, shape->srcArray, shape->srcPitch, shape->srcHeight,
                      shape->srcXInBytes, shape->srcY, shape->srcZ};
    const end to = {shape->dstMemoryType, shape->dstHost, shape->dstDevice, shape->dstArray, shape->dstPitch, shape->dstHeight,
                    shape->dstXInBytes, shape->dstY, shape->dstZ};
    char *source = NULL;
    *out = (sim_copy){.width = shape->WidthInBytes, .height = shape->Height, .depth = shape->Depth};
    CUresult result = locate(from, shape, &source, &out->source_pitch, &out->source_slice);
    out->source = source;
    return result == CUDA_SUCCESS ? locate(to, shape, &out->target, &out->target_pitch, &out->target_slice) : result;
}

/* As for a call, the addresses of a node are checked when it is created. */
CUresult nvs_sim_copy_work(const CUDA_MEMCPY3D *shape, const sim_device *by, sim_work *out)
{
    *out = (sim_work){.kind = OP_COPY};
    sim_copy *copy = &out->u.copy;
    CUresult result = nvs_sim_copy_from_3d(shape, copy);
    out->bytes = shape->WidthInBytes * shape->Height * shape->Depth;
    out->duration_ns = nvs_sim_copy_ns(out->bytes);
    copy->target_by = copy->source_by = by;
    return result == CUDA_SUCCESS && !nvs_sim_copy_allowed(copy) ? CUDA_ERROR_INVALID_VALUE : result;
}

void nvs_sim_copy_describe(const sim_copy *copy, CUDA_MEMCPY3D *out)
{
    *out = (CUDA_MEMCPY3D){.srcMemoryType = CU_MEMORYTYPE_UNIFIED, .srcDevice = (CUdeviceptr)(uintptr_t)copy->source,
                           .srcPitch = copy->source_pitch, .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
                           .dstDevice = (CUdeviceptr)(uintptr_t)copy->target, .dstPitch = copy->target_pitch,
                           .WidthInBytes = copy->width, .Height = copy->height, .Depth = copy->depth};
    out->srcHeight = copy->source_pitch != 0 ? copy->source_slice / copy->source_pitch : 0;
    out->dstHeight = copy->target_pitch != 0 ? copy->target_slice / copy->target_pitch : 0;
}

/* A context given for an end names the GPU whose access rights count there. */
static CUresult rights_of(CUcontext handle, const sim_device **by)
{
    sim_context *context;
    CUresult result = handle != NULL ? nvs_sim_context(handle, &context) : CUDA_SUCCESS;
    if (handle != NULL && result == CUDA_SUCCESS)
        *by = context->device;
    return result;
}

static CUresult copy_3d_by(const CUDA_MEMCPY3D *shape, CUcontext target_context, CUcontext source_context, CUstream handle,
                           bool asynchronous)
{
    sim_stream *stream;
    sim_copy copy;
    CUresult result = nvs_sim_copy_stream(handle, asynchronous, &stream);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_copy_from_3d(shape, &copy);
    if (result == CUDA_SUCCESS)
        result = rights_of(target_context, &copy.target_by);
    if (result == CUDA_SUCCESS)
        result = rights_of(source_context, &copy.source_by);
    const bool host = shape->srcMemoryType == CU_MEMORYTYPE_HOST || shape->dstMemoryType == CU_MEMORYTYPE_HOST;
    const enum sim_waiting waiting = asynchronous ? SIM_WAIT_AS_ASYNC : host ? SIM_ALWAYS_WAIT : SIM_NEVER_WAIT;
    return result == CUDA_SUCCESS ? nvs_sim_copy_submit(stream, &copy, waiting) : result;
}

CUresult nvs_sim_copy_3d(const CUDA_MEMCPY3D *shape, CUstream handle, bool asynchronous)
{
    return copy_3d_by(shape, NULL, NULL, handle, asynchronous);
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
    return copy_3d_by(&shape, peer->dstContext, peer->srcContext, handle, asynchronous);
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
