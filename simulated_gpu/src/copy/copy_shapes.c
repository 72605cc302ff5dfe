/* Arrays, and the 2D and 3D copies, which may have one at either end.  An array is kept row by row in host memory and charged
 * as device memory.
 */
#include "graph/graph.h"

#include <stdlib.h>
#include <string.h>

typedef struct sim_array {
    uint32_t magic;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    size_t element, pitch, rows;
    sim_context *context;
    CUdeviceptr memory;
} sim_array;

static size_t format_bytes(CUarray_format format)
{
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8: return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF: return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT: return 4;
    default: return 0;
    }
}

static CUresult create(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    sim_context *context = nvs_sim_current();
    if (context == NULL)
        return nvs_sim_no_context();
    if (out == NULL || shape == NULL || shape->Width == 0 || format_bytes(shape->Format) == 0 ||
        (shape->NumChannels != 1 && shape->NumChannels != 2 && shape->NumChannels != 4) || shape->Width > 131072 ||
        shape->Height > 131072 || shape->Depth > 16384)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = nvs_sim_capture_unsafe();
    if (result != CUDA_SUCCESS)
        return result;
    sim_array *array = calloc(1, sizeof *array);
    if (array == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    array->magic = SIM_ARRAY;
    array->shape = *shape;
    array->context = context;
    array->element = format_bytes(shape->Format) * shape->NumChannels;
    array->pitch = shape->Width * array->element;
    array->rows = shape->Height == 0 ? 1 : shape->Height;
    result = nvs_sim_allocate(context, array->pitch * array->rows * (shape->Depth == 0 ? 1 : shape->Depth), MEM_DEVICE, 0,
                              &array->memory);
    if (result != CUDA_SUCCESS)
        free(array);
    else
        *out = (CUarray)(void *)array;
    return result;
}

static CUresult find(CUarray handle, sim_array **out)
{
    sim_array *array = (sim_array *)(void *)handle;
    if (array == NULL || array->magic != SIM_ARRAY)
        return CUDA_ERROR_INVALID_HANDLE;
    *out = array;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuArrayCreate_v2(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pAllocateArray != NULL, CUDA_ERROR_INVALID_VALUE);
    const CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = pAllocateArray->Width, .Height = pAllocateArray->Height,
                                           .Format = pAllocateArray->Format, .NumChannels = pAllocateArray->NumChannels};
    return nvs_sim_return(create(pHandle, &shape));
}

SIM_EXPORT CUresult CUDAAPI cuArray3DCreate_v2(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(create(pHandle, pAllocateArray));
}

SIM_EXPORT CUresult CUDAAPI cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *pArrayDescriptor, CUarray hArray)
{
    sim_array *array;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pArrayDescriptor != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(hArray, &array));
    *pArrayDescriptor = array->shape;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *pArrayDescriptor, CUarray hArray)
{
    sim_array *array;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pArrayDescriptor != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(hArray, &array));
    *pArrayDescriptor = (CUDA_ARRAY_DESCRIPTOR){.Width = array->shape.Width, .Height = array->shape.Height,
                                                .Format = array->shape.Format, .NumChannels = array->shape.NumChannels};
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuArrayDestroy(CUarray hArray)
{
    sim_array *array;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(find(hArray, &array));
    nvs_sim_device_wait(array->context->device);
    nvs_sim_release((uintptr_t)array->memory);
    array->magic = 0;
    free(array);
    return nvs_sim_return(CUDA_SUCCESS);
}

/* One end of a copy: where it starts, and the steps to the next row and slice. */
static CUresult locate(CUmemorytype type, const void *host, CUdeviceptr device, CUarray array_handle, size_t pitch, size_t height,
                       size_t x, size_t y, size_t z, const CUDA_MEMCPY3D *shape, char **start, size_t *step, size_t *slice)
{
    sim_array *array;
    char *base;
    switch (type) {
    case CU_MEMORYTYPE_HOST:
        base = (char *)(uintptr_t)host;
        break;
    case CU_MEMORYTYPE_DEVICE:
    case CU_MEMORYTYPE_UNIFIED:
        base = (char *)(uintptr_t)device;
        break;
    case CU_MEMORYTYPE_ARRAY:
        if (find(array_handle, &array) != CUDA_SUCCESS)
            return CUDA_ERROR_INVALID_VALUE;
        if (x + shape->WidthInBytes > array->pitch || y + shape->Height > array->rows)
            return CUDA_ERROR_INVALID_VALUE;
        base = (char *)(uintptr_t)array->memory;
        pitch = array->pitch;
        height = array->rows;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (pitch == 0)
        pitch = shape->WidthInBytes;
    if (height == 0)
        height = shape->Height;
    if (base == NULL || (shape->Height > 1 && pitch < shape->WidthInBytes + x))
        return CUDA_ERROR_INVALID_VALUE;
    *step = pitch;
    *slice = pitch * height;
    *start = base + z * *slice + y * pitch + x;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_copy_from_3d(const CUDA_MEMCPY3D *shape, sim_copy *out)
{
    char *source = NULL;
    *out = (sim_copy){.width = shape->WidthInBytes, .height = shape->Height, .depth = shape->Depth};
    CUresult result = locate(shape->srcMemoryType, shape->srcHost, shape->srcDevice, shape->srcArray, shape->srcPitch,
                             shape->srcHeight, shape->srcXInBytes, shape->srcY, shape->srcZ, shape, &source, &out->source_pitch,
                             &out->source_slice);
    out->source = source;
    if (result == CUDA_SUCCESS)
        result = locate(shape->dstMemoryType, shape->dstHost, shape->dstDevice, shape->dstArray, shape->dstPitch, shape->dstHeight,
                        shape->dstXInBytes, shape->dstY, shape->dstZ, shape, &out->target, &out->target_pitch,
                        &out->target_slice);
    return result;
}

static size_t span(size_t width, size_t height, size_t depth, size_t pitch, size_t slice)
{
    return width == 0 || height == 0 || depth == 0 ? 0 : (depth - 1) * slice + (height - 1) * pitch + width;
}

/* A node's addresses are looked at when it is made, as those of a call are. */
CUresult nvs_sim_copy_work(const CUDA_MEMCPY3D *shape, const sim_device *by, sim_work *out)
{
    *out = (sim_work){.kind = OP_COPY};
    sim_copy *copy = &out->u.copy;
    CUresult result = nvs_sim_copy_from_3d(shape, copy);
    out->bytes = shape->WidthInBytes * shape->Height * shape->Depth;
    out->duration_ns = nvs_sim_copy_ns(out->bytes);
    copy->target_by = copy->source_by = by;
    if (result != CUDA_SUCCESS)
        return result;
    const size_t to = span(copy->width, copy->height, copy->depth, copy->target_pitch, copy->target_slice);
    const size_t from = span(copy->width, copy->height, copy->depth, copy->source_pitch, copy->source_slice);
    const bool reached = nvs_sim_copy_reaches(by, (uintptr_t)copy->target, to) && nvs_sim_copy_reaches(by, (uintptr_t)copy->source, from);
    return reached ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult nvs_sim_fill_work(const CUDA_MEMSET_NODE_PARAMS *params, const sim_device *by, sim_work *out)
{
    unsigned size = params->elementSize;
    if ((size != 1 && size != 2 && size != 4) || params->dst == 0 || params->dst % size != 0 || params->width == 0 ||
        params->height == 0 || (params->height > 1 && params->pitch < params->width * size))
        return CUDA_ERROR_INVALID_VALUE;
    *out = (sim_work){.kind = OP_FILL, .bytes = (uint64_t)params->width * params->height * size,
                      .u.fill = {.target = (char *)(uintptr_t)params->dst, .pitch = params->pitch, .width = params->width,
                                 .height = params->height, .value = params->value, .element = size}};
    out->duration_ns = nvs_sim_copy_ns(out->bytes) / 8;
    out->u.fill.by = by;
    return nvs_sim_copy_reaches(by, (uintptr_t)params->dst, span(params->width * size, params->height, 1, params->pitch, 0))
               ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* A captured copy, as cuGraphMemcpyNodeGetParams has to show it. */
void nvs_sim_copy_describe(const sim_copy *copy, CUDA_MEMCPY3D *out)
{
    *out = (CUDA_MEMCPY3D){.srcMemoryType = CU_MEMORYTYPE_UNIFIED, .srcDevice = (CUdeviceptr)(uintptr_t)copy->source,
                           .srcPitch = copy->source_pitch, .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
                           .dstDevice = (CUdeviceptr)(uintptr_t)copy->target, .dstPitch = copy->target_pitch,
                           .WidthInBytes = copy->width, .Height = copy->height, .Depth = copy->depth};
    out->srcHeight = copy->source_pitch != 0 ? copy->source_slice / copy->source_pitch : 0;
    out->dstHeight = copy->target_pitch != 0 ? copy->target_slice / copy->target_pitch : 0;
}

static CUresult copy_3d_by(const CUDA_MEMCPY3D *shape, CUcontext target_context, CUcontext source_context, CUstream handle, bool asynchronous)
{
    sim_context *by;
    sim_stream *stream;
    sim_copy copy;
    if (shape == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = asynchronous ? CUDA_SUCCESS : nvs_sim_capture_unsafe();
    if (result == CUDA_SUCCESS)
        result = nvs_sim_stream(handle, &stream);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_copy_from_3d(shape, &copy);
    if (result == CUDA_SUCCESS && target_context != NULL && (result = nvs_sim_context(target_context, &by)) == CUDA_SUCCESS)
        copy.target_by = by->device;
    if (result == CUDA_SUCCESS && source_context != NULL && (result = nvs_sim_context(source_context, &by)) == CUDA_SUCCESS)
        copy.source_by = by->device;
    bool host = shape->srcMemoryType == CU_MEMORYTYPE_HOST || shape->dstMemoryType == CU_MEMORYTYPE_HOST;
    return result == CUDA_SUCCESS ? nvs_sim_copy_submit(stream, &copy, host, asynchronous) : result;
}

static CUresult copy_3d(const CUDA_MEMCPY3D *shape, CUstream handle, bool asynchronous)
{
    return copy_3d_by(shape, NULL, NULL, handle, asynchronous);
}

static CUresult copy_2d(const CUDA_MEMCPY2D *flat, CUstream handle, bool asynchronous)
{
    if (flat == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    const CUDA_MEMCPY3D shape = {
        .srcXInBytes = flat->srcXInBytes, .srcY = flat->srcY, .srcMemoryType = flat->srcMemoryType, .srcHost = flat->srcHost,
        .srcDevice = flat->srcDevice, .srcArray = flat->srcArray, .srcPitch = flat->srcPitch, .dstXInBytes = flat->dstXInBytes,
        .dstY = flat->dstY, .dstMemoryType = flat->dstMemoryType, .dstHost = flat->dstHost, .dstDevice = flat->dstDevice,
        .dstArray = flat->dstArray, .dstPitch = flat->dstPitch, .WidthInBytes = flat->WidthInBytes, .Height = flat->Height,
        .Depth = 1};
    return copy_3d(&shape, handle, asynchronous);
}

#define SHAPED(name, type, function, parameters, stream, asynchronous)                          \
    SIM_EXPORT CUresult CUDAAPI name parameters                                                 \
    {                                                                                           \
        NVS_SIM_ENTER();                                                                        \
        return nvs_sim_return(function(pCopy, stream, asynchronous));                           \
    }

SHAPED(cuMemcpy2D_v2, CUDA_MEMCPY2D, copy_2d, (const CUDA_MEMCPY2D *pCopy), NULL, false)
SHAPED(cuMemcpy2DUnaligned_v2, CUDA_MEMCPY2D, copy_2d, (const CUDA_MEMCPY2D *pCopy), NULL, false)
SHAPED(cuMemcpy2DAsync_v2, CUDA_MEMCPY2D, copy_2d, (const CUDA_MEMCPY2D *pCopy, CUstream hStream), hStream, true)
SHAPED(cuMemcpy3D_v2, CUDA_MEMCPY3D, copy_3d, (const CUDA_MEMCPY3D *pCopy), NULL, false)
SHAPED(cuMemcpy3DAsync_v2, CUDA_MEMCPY3D, copy_3d, (const CUDA_MEMCPY3D *pCopy, CUstream hStream), hStream, true)

static CUresult copy_peer(const CUDA_MEMCPY3D_PEER *peer, CUstream handle, bool asynchronous)
{
    if (peer == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    const CUDA_MEMCPY3D shape = {
        .srcXInBytes = peer->srcXInBytes, .srcY = peer->srcY, .srcZ = peer->srcZ, .srcMemoryType = peer->srcMemoryType,
        .srcHost = peer->srcHost, .srcDevice = peer->srcDevice, .srcArray = peer->srcArray, .srcPitch = peer->srcPitch,
        .srcHeight = peer->srcHeight, .dstXInBytes = peer->dstXInBytes, .dstY = peer->dstY, .dstZ = peer->dstZ,
        .dstMemoryType = peer->dstMemoryType, .dstHost = peer->dstHost, .dstDevice = peer->dstDevice, .dstArray = peer->dstArray,
        .dstPitch = peer->dstPitch, .dstHeight = peer->dstHeight, .WidthInBytes = peer->WidthInBytes, .Height = peer->Height,
        .Depth = peer->Depth};
    return copy_3d_by(&shape, peer->dstContext, peer->srcContext, handle, asynchronous);
}

SHAPED(cuMemcpy3DPeer, CUDA_MEMCPY3D_PEER, copy_peer, (const CUDA_MEMCPY3D_PEER *pCopy), NULL, false)
SHAPED(cuMemcpy3DPeerAsync, CUDA_MEMCPY3D_PEER, copy_peer, (const CUDA_MEMCPY3D_PEER *pCopy, CUstream hStream), hStream, true)

/* Batches of them, in order.  Lengths are in elements: of an array that takes part, else of one byte. */

static CUresult element_of(const CUDA_MEMCPY3D_BATCH_OP *op, size_t *out)
{
    const CUmemcpy3DOperand *const ends[] = {&op->src, &op->dst};
    *out = 1;
    for (int i = 0; i < 2; i++) {
        sim_array *array;
        if (ends[i]->type != CU_MEMCPY_OPERAND_TYPE_ARRAY)
            continue;
        CUresult result = find(ends[i]->op.array.array, &array);
        if (result != CUDA_SUCCESS)
            return result;
        *out = array->element;
    }
    return CUDA_SUCCESS;
}

static CUresult batch_op(const CUDA_MEMCPY3D_BATCH_OP *op, CUstream stream)
{
    const CUmemcpy3DOperand *from = &op->src, *to = &op->dst;
    size_t element;
    CUresult result = element_of(op, &element);
    if (result != CUDA_SUCCESS || op->extent.width == 0 || op->extent.height == 0 || op->extent.depth == 0)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    CUDA_MEMCPY3D shape = {.WidthInBytes = op->extent.width * element, .Height = op->extent.height, .Depth = op->extent.depth};
    if (from->type == CU_MEMCPY_OPERAND_TYPE_ARRAY) {
        shape.srcMemoryType = CU_MEMORYTYPE_ARRAY;
        shape.srcArray = from->op.array.array;
        shape.srcXInBytes = from->op.array.offset.x * element;
        shape.srcY = from->op.array.offset.y;
        shape.srcZ = from->op.array.offset.z;
    } else {
        shape.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
        shape.srcDevice = from->op.ptr.ptr;
        shape.srcPitch = from->op.ptr.rowLength * element;
        shape.srcHeight = from->op.ptr.layerHeight;
    }
    if (to->type == CU_MEMCPY_OPERAND_TYPE_ARRAY) {
        shape.dstMemoryType = CU_MEMORYTYPE_ARRAY;
        shape.dstArray = to->op.array.array;
        shape.dstXInBytes = to->op.array.offset.x * element;
        shape.dstY = to->op.array.offset.y;
        shape.dstZ = to->op.array.offset.z;
    } else {
        shape.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
        shape.dstDevice = to->op.ptr.ptr;
        shape.dstPitch = to->op.ptr.rowLength * element;
        shape.dstHeight = to->op.ptr.layerHeight;
    }
    return copy_3d(&shape, stream, true);
}

static CUresult batch_3d(size_t count, const CUDA_MEMCPY3D_BATCH_OP *list, unsigned long long flags, CUstream handle)
{
    const bool legacy = handle == CU_STREAM_LEGACY || (handle == NULL && !nvs_sim_thread.call_per_thread);
    CUresult result = list == NULL || count == 0 || flags != 0 || legacy ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = batch_op(&list[i], handle);
    return result;
}

SIM_EXPORT CUresult CUDAAPI cuMemcpy3DBatchAsync(size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, size_t *failIdx,
                                                 unsigned long long flags, CUstream hStream)
{
    NVS_SIM_ENTER();
    if (failIdx != NULL)
        *failIdx = SIZE_MAX;
    return nvs_sim_return(batch_3d(numOps, opList, flags, hStream));
}

SIM_EXPORT CUresult CUDAAPI cuMemcpy3DBatchAsync_v2(size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, unsigned long long flags,
                                                    CUstream hStream)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(batch_3d(numOps, opList, flags, hStream));
}

/* Between arrays and linear memory, by byte offset. */

static CUresult array_copy(CUstream handle, bool asynchronous, CUarray to, size_t to_offset, const void *to_memory, CUarray from,
                           size_t from_offset, const void *from_memory, size_t bytes, bool host)
{
    sim_array *array;
    sim_stream *stream;
    sim_copy copy = {.target = (char *)(uintptr_t)to_memory, .source = from_memory, .width = bytes, .height = 1, .depth = 1};
    CUresult result = asynchronous ? CUDA_SUCCESS : nvs_sim_capture_unsafe();
    if (result == CUDA_SUCCESS)
        result = nvs_sim_stream(handle, &stream);
    if (result == CUDA_SUCCESS && to != NULL && (result = find(to, &array)) == CUDA_SUCCESS)
        copy.target = (char *)(uintptr_t)array->memory + to_offset;
    if (result == CUDA_SUCCESS && from != NULL && (result = find(from, &array)) == CUDA_SUCCESS)
        copy.source = (const char *)(uintptr_t)array->memory + from_offset;
    return result == CUDA_SUCCESS ? nvs_sim_copy_submit(stream, &copy, host, asynchronous) : result;
}

#define ARRAY(name, parameters, ...)                                                            \
    SIM_EXPORT CUresult CUDAAPI name parameters                                                 \
    {                                                                                           \
        NVS_SIM_ENTER();                                                                        \
        return nvs_sim_return(array_copy(__VA_ARGS__));                                         \
    }
#define MEMORY(pointer) ((const void *)(uintptr_t)(pointer))

ARRAY(cuMemcpyHtoA_v2, (CUarray dst, size_t offset, const void *src, size_t bytes), NULL, false, dst, offset, NULL, NULL, 0, src, bytes, true)
ARRAY(cuMemcpyAtoH_v2, (void *dst, CUarray src, size_t offset, size_t bytes), NULL, false, NULL, 0, dst, src, offset, NULL, bytes, true)
ARRAY(cuMemcpyDtoA_v2, (CUarray dst, size_t offset, CUdeviceptr src, size_t bytes), NULL, false, dst, offset, NULL, NULL, 0, MEMORY(src), bytes, false)
ARRAY(cuMemcpyAtoD_v2, (CUdeviceptr dst, CUarray src, size_t offset, size_t bytes), NULL, false, NULL, 0, MEMORY(dst), src, offset, NULL, bytes, false)
ARRAY(cuMemcpyAtoA_v2, (CUarray dst, size_t to, CUarray src, size_t from, size_t bytes), NULL, false, dst, to, NULL, src, from, NULL, bytes, false)
ARRAY(cuMemcpyHtoAAsync_v2, (CUarray dst, size_t offset, const void *src, size_t bytes, CUstream stream), stream, true, dst, offset, NULL, NULL, 0, src, bytes, true)
ARRAY(cuMemcpyAtoHAsync_v2, (void *dst, CUarray src, size_t offset, size_t bytes, CUstream stream), stream, true, NULL, 0, dst, src, offset, NULL, bytes, true)
