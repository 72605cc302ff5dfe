/* Submission of work that moves or sets bytes: copies in all their forms, arrays, fills, values, prefetches.
 *
 * Each form becomes one sim_copy or sim_fill, checked at submission; its effect (effect.c) checks again.
 */
#include "graph/graph.h"

#include <stdlib.h>
#include <string.h>

typedef struct sim_array { /* kept row by row in host memory, and charged as device memory */
    uint32_t magic;
    size_t element, pitch, rows;
    sim_context *context;
    CUdeviceptr memory;
} sim_array;

enum waiting { NEVER_WAIT, ALWAYS_WAIT, WAIT_AS_ASYNC }; /* the last one waits only for pageable memory */

#define SNAPSHOT_BYTES (64u << 10)

static bool pageable(const void *pointer)
{
    return nvs_sim_find((uintptr_t)pointer) == NULL && !nvs_sim_reserved((uintptr_t)pointer, 1);
}

/* Checks also that a capture allows the call. */
static CUresult stream_of(CUstream handle, bool asynchronous, sim_stream **out)
{
    sim_context *context;
    if (!asynchronous) {
        NVS_SIM_TRY(nvs_sim_need_current(&context));
        NVS_SIM_TRY(nvs_sim_capture_unsafe());
    }
    return nvs_sim_stream(handle, out);
}

/* An asynchronous copy waits for pageable memory, unless a snapshot of a small source can be taken. */
static bool must_wait(sim_copy *copy, size_t bytes)
{
    if (pageable(copy->target.start))
        return true;
    if (!pageable(copy->source.start))
        return false;
    const bool flat = copy->height == 1 && copy->depth == 1;
    if (!flat || bytes > SNAPSHOT_BYTES || (copy->snapshot = malloc(bytes)) == NULL)
        return true;
    memcpy(copy->snapshot, copy->source.start, bytes);
    copy->source.start = copy->snapshot;
    return false;
}

static CUresult submit_copy(sim_stream *stream, sim_copy *copy, enum waiting waiting)
{
    sim_context *context = stream->context;
    const size_t bytes = copy->width * copy->height * copy->depth;
    if (context->error != CUDA_SUCCESS || bytes == 0)
        return context->error;
    if (copy->target.rights == NULL)
        copy->target.rights = context->device;
    if (copy->source.rights == NULL)
        copy->source.rights = context->device;
    if (copy->target.start == NULL || copy->source.start == NULL || !nvs_sim_copy_allowed(copy)) /* as the driver, at submission */
        return CUDA_ERROR_INVALID_VALUE;
    bool wait = waiting == ALWAYS_WAIT;
    if (waiting == WAIT_AS_ASYNC && stream->capture.of == NULL)
        wait = must_wait(copy, bytes);
    sim_work work = {.kind = OP_COPY, .bytes = bytes, .duration_ns = nvs_sim_copy_ns(bytes), .u.copy = *copy};
    NVS_SIM_TRY(nvs_sim_submit(stream, &work));
    if (!wait)
        return CUDA_SUCCESS;
    nvs_sim_stream_wait(stream);
    return context->error;
}

/* Copies of linear memory. */

static CUresult linear_by(CUstream handle, sim_copy_end target, sim_copy_end source, size_t bytes, enum waiting waiting)
{
    sim_stream *stream;
    NVS_SIM_TRY(stream_of(handle, waiting == WAIT_AS_ASYNC, &stream));
    sim_copy copy = {.target = target, .source = source, .width = bytes, .height = 1, .depth = 1};
    return submit_copy(stream, &copy, waiting);
}

static CUresult linear(CUstream handle, void *target, void *source, size_t bytes, enum waiting waiting)
{
    return linear_by(handle, (sim_copy_end){.start = target}, (sim_copy_end){.start = source}, bytes, waiting);
}

/* The host does not wait for a synchronous copy between devices. */
static enum waiting between(CUdeviceptr target, CUdeviceptr source)
{
    const sim_allocation *ends[2] = {nvs_sim_find((uintptr_t)target), nvs_sim_find((uintptr_t)source)};
    for (int i = 0; i < 2; i++)
        if (ends[i] == NULL || ends[i]->kind == MEM_HOST || ends[i]->kind == MEM_REGISTERED)
            return ALWAYS_WAIT;
    return NEVER_WAIT;
}

#define COPY(name, parameters, handle, target, source, waiting)                                 \
    NVS_SIM_ENTRY(name, parameters, linear(handle, SIM_POINTER(target), SIM_POINTER(source), ByteCount, waiting))

COPY(cuMemcpy, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount), NULL, dst, src, between(dst, src))
COPY(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream), hStream, dst, src, WAIT_AS_ASYNC)
COPY(cuMemcpyHtoD_v2, (CUdeviceptr dst, const void *src, size_t ByteCount), NULL, dst, src, ALWAYS_WAIT)
COPY(cuMemcpyDtoH_v2, (void *dst, CUdeviceptr src, size_t ByteCount), NULL, dst, src, ALWAYS_WAIT)
COPY(cuMemcpyDtoD_v2, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount), NULL, dst, src, NEVER_WAIT)
COPY(cuMemcpyHtoDAsync_v2, (CUdeviceptr dst, const void *src, size_t ByteCount, CUstream hStream), hStream, dst, src, WAIT_AS_ASYNC)
COPY(cuMemcpyDtoHAsync_v2, (void *dst, CUdeviceptr src, size_t ByteCount, CUstream hStream), hStream, dst, src, WAIT_AS_ASYNC)
COPY(cuMemcpyDtoDAsync_v2, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream), hStream, dst, src, WAIT_AS_ASYNC)

static CUresult peer(CUstream handle, CUdeviceptr target, CUcontext target_context, CUdeviceptr source, CUcontext source_context,
                     size_t bytes, enum waiting waiting)
{
    sim_context *to, *from;
    NVS_SIM_TRY(nvs_sim_context(target_context, &to));
    NVS_SIM_TRY(nvs_sim_context(source_context, &from));
    const sim_copy_end ends[] = {{.start = SIM_POINTER(target), .rights = to->device}, {.start = SIM_POINTER(source), .rights = from->device}};
    return linear_by(handle, ends[0], ends[1], bytes, waiting);
}

NVS_SIM_ENTRY(cuMemcpyPeer, (CUdeviceptr dst, CUcontext dstContext, CUdeviceptr src, CUcontext srcContext, size_t ByteCount),
              peer(NULL, dst, dstContext, src, srcContext, ByteCount, NEVER_WAIT))
NVS_SIM_ENTRY(cuMemcpyPeerAsync, (CUdeviceptr dst, CUcontext dstContext, CUdeviceptr src, CUcontext srcContext, size_t ByteCount,
                                  CUstream hStream),
              peer(hStream, dst, dstContext, src, srcContext, ByteCount, WAIT_AS_ASYNC))

/* As documented, the legacy stream is an error for a batch. */
static bool is_legacy(CUstream handle) { return handle == CU_STREAM_LEGACY || (handle == NULL && !nvs_sim_thread.per_thread); }

/* The copies run in order, which is one of the allowed orders. */
static CUresult batch(CUstream handle, const CUdeviceptr *targets, const CUdeviceptr *sources, const size_t *sizes, size_t count)
{
    if (targets == NULL || sources == NULL || sizes == NULL || count == 0 || is_legacy(handle))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        NVS_SIM_TRY(linear(handle, SIM_POINTER(targets[i]), SIM_POINTER(sources[i]), sizes[i], WAIT_AS_ASYNC));
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                               CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, size_t *failIdx,
                                               CUstream hStream)
{
    NVS_SIM_ENTER();
    if (failIdx != NULL)
        *failIdx = SIZE_MAX;
    return batch(hStream, dsts, srcs, sizes, count);
}

NVS_SIM_ENTRY(cuMemcpyBatchAsync_v2, (CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
                                      size_t *attrsIdxs, size_t numAttrs, CUstream hStream),
              batch(hStream, dsts, srcs, sizes, count))

/* Arrays. */

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

static CUresult create_array(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    sim_context *context;
    NVS_SIM_TRY(nvs_sim_need_current(&context));
    if (out == NULL || shape == NULL || shape->Width == 0 || format_bytes(shape->Format) == 0 ||
        (shape->NumChannels != 1 && shape->NumChannels != 2 && shape->NumChannels != 4) || shape->Width > 131072 ||
        shape->Height > 131072 || shape->Depth > 16384)
        return CUDA_ERROR_INVALID_VALUE;
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    sim_array *array = calloc(1, sizeof *array);
    if (array == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const size_t element = format_bytes(shape->Format) * shape->NumChannels;
    *array = (sim_array){.magic = SIM_ARRAY, .context = context, .element = element, .pitch = shape->Width * element,
                         .rows = shape->Height == 0 ? 1 : shape->Height};
    CUresult result = nvs_sim_allocate(context, array->pitch * array->rows * (shape->Depth == 0 ? 1 : shape->Depth), MEM_DEVICE,
                                       &array->memory);
    if (result != CUDA_SUCCESS)
        free(array);
    else
        *out = (CUarray)(void *)array;
    return result;
}

static NVS_SIM_DEFINE_FIND(find_array, CUarray, sim_array, SIM_ARRAY, CUDA_ERROR_INVALID_HANDLE)

SIM_EXPORT CUresult CUDAAPI cuArrayCreate_v2(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pAllocateArray != NULL, CUDA_ERROR_INVALID_VALUE);
    const CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = pAllocateArray->Width, .Height = pAllocateArray->Height,
                                           .Format = pAllocateArray->Format, .NumChannels = pAllocateArray->NumChannels};
    return create_array(pHandle, &shape);
}

NVS_SIM_ENTRY(cuArray3DCreate_v2, (CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray), create_array(pHandle, pAllocateArray))

SIM_EXPORT CUresult CUDAAPI cuArrayDestroy(CUarray hArray)
{
    NVS_SIM_ENTER_FIND(sim_array *array, find_array(hArray, &array));
    nvs_sim_device_wait(array->context->device);
    nvs_sim_release((uintptr_t)array->memory);
    array->magic = 0;
    free(array);
    return CUDA_SUCCESS;
}

/* The 2D and 3D copies, which may have an array at either end. */

typedef struct end {
    CUmemorytype type;
    const void *host;
    CUdeviceptr device;
    CUarray array;
    size_t pitch, height, x, y, z;
    CUcontext context; /* names the GPU whose access rights count at this end; NULL: that of the stream */
} end;

typedef struct block {
    end target, source;
    size_t width, height, depth; /* width in bytes */
} block;

static CUresult locate(end at, const block *whole, sim_copy_end *out)
{
    sim_array *array;
    sim_context *context;
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
        if (find_array(at.array, &array) != CUDA_SUCCESS)
            return CUDA_ERROR_INVALID_VALUE;
        if (at.x + whole->width > array->pitch || at.y + whole->height > array->rows)
            return CUDA_ERROR_INVALID_VALUE;
        base = SIM_POINTER(array->memory);
        at.pitch = array->pitch;
        at.height = array->rows;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (at.pitch == 0)
        at.pitch = whole->width;
    if (at.height == 0)
        at.height = whole->height;
    if (base == NULL || (whole->height > 1 && at.pitch < whole->width + at.x))
        return CUDA_ERROR_INVALID_VALUE;
    *out = (sim_copy_end){.start = base + at.z * at.pitch * at.height + at.y * at.pitch + at.x, .pitch = at.pitch,
                          .slice = at.pitch * at.height};
    if (at.context != NULL) {
        NVS_SIM_TRY(nvs_sim_context(at.context, &context));
        out->rights = context->device;
    }
    return CUDA_SUCCESS;
}

static CUresult copy_of(const block *whole, sim_copy *out)
{
    *out = (sim_copy){.width = whole->width, .height = whole->height, .depth = whole->depth};
    NVS_SIM_TRY(locate(whole->source, whole, &out->source));
    return locate(whole->target, whole, &out->target);
}

static CUresult copy_block(CUstream handle, bool asynchronous, const block *whole)
{
    sim_stream *stream;
    sim_copy copy;
    NVS_SIM_TRY(stream_of(handle, asynchronous, &stream));
    NVS_SIM_TRY(copy_of(whole, &copy));
    const bool host = whole->source.type == CU_MEMORYTYPE_HOST || whole->target.type == CU_MEMORYTYPE_HOST;
    return submit_copy(stream, &copy, asynchronous ? WAIT_AS_ASYNC : host ? ALWAYS_WAIT : NEVER_WAIT);
}

#define FLAT_END(side)                                                                          \
    .type = from->side##MemoryType, .host = from->side##Host, .device = from->side##Device,     \
    .array = from->side##Array, .pitch = from->side##Pitch, .x = from->side##XInBytes, .y = from->side##Y
#define DEEP_END(side) FLAT_END(side), .height = from->side##Height, .z = from->side##Z

static block block_2d(const CUDA_MEMCPY2D *from)
{
    return (block){.source = {FLAT_END(src)}, .target = {FLAT_END(dst)}, .width = from->WidthInBytes, .height = from->Height, .depth = 1};
}

static block block_3d(const CUDA_MEMCPY3D *from)
{
    return (block){.source = {DEEP_END(src)}, .target = {DEEP_END(dst)}, .width = from->WidthInBytes, .height = from->Height,
                   .depth = from->Depth};
}

static block block_peer(const CUDA_MEMCPY3D_PEER *from)
{
    return (block){.source = {DEEP_END(src), .context = from->srcContext}, .target = {DEEP_END(dst), .context = from->dstContext},
                   .width = from->WidthInBytes, .height = from->Height, .depth = from->Depth};
}

/* The addresses of a graph node are checked when it is created. */
CUresult nvs_sim_copy_work(const CUDA_MEMCPY3D *shape, const sim_device *rights, sim_work *out)
{
    const uint64_t bytes = shape->WidthInBytes * shape->Height * shape->Depth;
    const block whole = block_3d(shape);
    *out = (sim_work){.kind = OP_COPY, .bytes = bytes, .duration_ns = nvs_sim_copy_ns(bytes)};
    sim_copy *copy = &out->u.copy;
    NVS_SIM_TRY(copy_of(&whole, copy));
    copy->target.rights = copy->source.rights = rights;
    return nvs_sim_copy_allowed(copy) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

#define SHAPED(name, block_of, parameters, stream, asynchronous)                                \
    SIM_EXPORT CUresult CUDAAPI name parameters                                                 \
    {                                                                                           \
        NVS_SIM_ENTER();                                                                        \
        NVS_SIM_CHECK(pCopy != NULL, CUDA_ERROR_INVALID_VALUE);                                 \
        const block whole = block_of(pCopy);                                                    \
        return copy_block(stream, asynchronous, &whole);                                        \
    }

SHAPED(cuMemcpy2D_v2, block_2d, (const CUDA_MEMCPY2D *pCopy), NULL, false)
SHAPED(cuMemcpy2DUnaligned_v2, block_2d, (const CUDA_MEMCPY2D *pCopy), NULL, false)
SHAPED(cuMemcpy2DAsync_v2, block_2d, (const CUDA_MEMCPY2D *pCopy, CUstream hStream), hStream, true)
SHAPED(cuMemcpy3D_v2, block_3d, (const CUDA_MEMCPY3D *pCopy), NULL, false)
SHAPED(cuMemcpy3DAsync_v2, block_3d, (const CUDA_MEMCPY3D *pCopy, CUstream hStream), hStream, true)
SHAPED(cuMemcpy3DPeer, block_peer, (const CUDA_MEMCPY3D_PEER *pCopy), NULL, false)
SHAPED(cuMemcpy3DPeerAsync, block_peer, (const CUDA_MEMCPY3D_PEER *pCopy, CUstream hStream), hStream, true)

/* Batches of 3D copies, in order.  Lengths are in elements: of an array that takes part, else of one byte. */

static CUresult element_of(const CUDA_MEMCPY3D_BATCH_OP *op, size_t *out)
{
    const CUmemcpy3DOperand *const ends[] = {&op->src, &op->dst};
    *out = 1;
    for (int i = 0; i < 2; i++) {
        sim_array *array;
        if (ends[i]->type != CU_MEMCPY_OPERAND_TYPE_ARRAY)
            continue;
        NVS_SIM_TRY(find_array(ends[i]->op.array.array, &array));
        *out = array->element;
    }
    return CUDA_SUCCESS;
}

static end end_of(const CUmemcpy3DOperand *operand, size_t element)
{
    if (operand->type == CU_MEMCPY_OPERAND_TYPE_ARRAY)
        return (end){.type = CU_MEMORYTYPE_ARRAY, .array = operand->op.array.array, .x = operand->op.array.offset.x * element,
                     .y = operand->op.array.offset.y, .z = operand->op.array.offset.z};
    return (end){.type = CU_MEMORYTYPE_UNIFIED, .device = operand->op.ptr.ptr, .pitch = operand->op.ptr.rowLength * element,
                 .height = operand->op.ptr.layerHeight};
}

static CUresult batch_op(const CUDA_MEMCPY3D_BATCH_OP *op, CUstream stream)
{
    size_t element;
    NVS_SIM_TRY(element_of(op, &element));
    NVS_SIM_CHECK(op->extent.width != 0 && op->extent.height != 0 && op->extent.depth != 0, CUDA_ERROR_INVALID_VALUE);
    const block whole = {.source = end_of(&op->src, element), .target = end_of(&op->dst, element), .width = op->extent.width * element,
                         .height = op->extent.height, .depth = op->extent.depth};
    return copy_block(stream, true, &whole);
}

static CUresult batch_3d(size_t count, const CUDA_MEMCPY3D_BATCH_OP *list, unsigned long long flags, CUstream handle)
{
    if (list == NULL || count == 0 || flags != 0 || is_legacy(handle))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        NVS_SIM_TRY(batch_op(&list[i], handle));
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemcpy3DBatchAsync(size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, size_t *failIdx,
                                                 unsigned long long flags, CUstream hStream)
{
    NVS_SIM_ENTER();
    if (failIdx != NULL)
        *failIdx = SIZE_MAX;
    return batch_3d(numOps, opList, flags, hStream);
}

NVS_SIM_ENTRY(cuMemcpy3DBatchAsync_v2, (size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, unsigned long long flags, CUstream hStream),
              batch_3d(numOps, opList, flags, hStream))

/* Fills. */

static bool well_formed(const CUDA_MEMSET_NODE_PARAMS *params)
{
    const unsigned size = params->elementSize;
    return (size == 1 || size == 2 || size == 4) && params->dst != 0 && params->dst % size == 0 &&
           (params->height <= 1 || params->pitch >= params->width * size);
}

static sim_work fill_of(const CUDA_MEMSET_NODE_PARAMS *params, const sim_device *rights)
{
    const uint64_t bytes = (uint64_t)params->width * params->height * params->elementSize;
    return (sim_work){.kind = OP_FILL, .bytes = bytes, .duration_ns = nvs_sim_copy_ns(bytes) / 8,
                      .u.fill = {.target = SIM_POINTER(params->dst), .pitch = params->pitch, .width = params->width,
                                 .height = params->height, .value = params->value, .element = params->elementSize, .rights = rights}};
}

CUresult nvs_sim_fill_work(const CUDA_MEMSET_NODE_PARAMS *params, const sim_device *rights, sim_work *out)
{
    NVS_SIM_CHECK(well_formed(params) && params->width != 0 && params->height != 0, CUDA_ERROR_INVALID_VALUE);
    *out = fill_of(params, rights);
    const bool allowed = nvs_sim_copy_reaches(rights, (uintptr_t)params->dst, nvs_sim_fill_span(&out->u.fill));
    return allowed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult fill(CUstream handle, bool asynchronous, const CUDA_MEMSET_NODE_PARAMS *params)
{
    sim_stream *stream;
    NVS_SIM_TRY(stream_of(handle, asynchronous, &stream));
    NVS_SIM_TRY(stream->context->error);
    if (params->width == 0 || params->height == 0)
        return CUDA_SUCCESS;
    NVS_SIM_CHECK(well_formed(params) && !pageable(SIM_POINTER(params->dst)), CUDA_ERROR_INVALID_VALUE);
    const sim_work work = fill_of(params, stream->context->device);
    const bool allowed = nvs_sim_fill_reaches(stream->context, (uintptr_t)params->dst, nvs_sim_fill_span(&work.u.fill));
    return allowed ? nvs_sim_submit(stream, &work) : CUDA_ERROR_INVALID_VALUE;
}

#define FILL(name, parameters, stream, asynchronous, size, ...)                                 \
    SIM_EXPORT CUresult CUDAAPI name parameters                                                 \
    {                                                                                           \
        const CUDA_MEMSET_NODE_PARAMS params = {.dst = dst, .elementSize = size, __VA_ARGS__};  \
        NVS_SIM_ENTER();                                                                        \
        return fill(stream, asynchronous, &params);                                             \
    }
#define FLAT .width = N, .height = 1
#define SQUARE .pitch = pitch, .width = W, .height = H
#define FILLS(bits, type)                                                                                                \
    FILL(cuMemsetD##bits##_v2, (CUdeviceptr dst, type value, size_t N), NULL, false, bits / 8, .value = value, FLAT)     \
    FILL(cuMemsetD##bits##Async, (CUdeviceptr dst, type value, size_t N, CUstream hStream), hStream, true, bits / 8,     \
         .value = value, FLAT)                                                                                           \
    FILL(cuMemsetD2D##bits##_v2, (CUdeviceptr dst, size_t pitch, type value, size_t W, size_t H), NULL, false, bits / 8, \
         .value = value, SQUARE)                                                                                         \
    FILL(cuMemsetD2D##bits##Async, (CUdeviceptr dst, size_t pitch, type value, size_t W, size_t H, CUstream hStream),    \
         hStream, true, bits / 8, .value = value, SQUARE)

FILLS(8, unsigned char)
FILLS(16, unsigned short)
FILLS(32, unsigned int)

/* Values that a stream writes to memory, or waits for. */

static CUresult value(CUstream handle, enum sim_op_kind kind, CUdeviceptr pointer, uint64_t value, uint32_t bytes, unsigned flags)
{
    sim_stream *stream;
    NVS_SIM_TRY(nvs_sim_stream(handle, &stream));
    if (pointer % bytes != 0 || !nvs_sim_kernel_reaches(stream->context, (uintptr_t)pointer, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    sim_work work = {.kind = kind, .u.value = {.pointer = pointer, .value = value, .bytes = bytes, .compare = flags}};
    return nvs_sim_submit(stream, &work);
}

#define VALUES(name, kind, bits)                                                                                              \
    NVS_SIM_ENTRY(cuStream##name##Value##bits##_v2, (CUstream stream, CUdeviceptr addr, cuuint##bits##_t wanted, unsigned flags), \
                  value(stream, kind, addr, wanted, bits / 8, flags))                                                         \
    NVS_SIM_ENTRY(cuStream##name##Value##bits, (CUstream stream, CUdeviceptr addr, cuuint##bits##_t wanted, unsigned flags),  \
                  value(stream, kind, addr, wanted, bits / 8, flags))

VALUES(Write, OP_WRITE_VALUE, 32)
VALUES(Write, OP_WRITE_VALUE, 64)
VALUES(Wait, OP_WAIT_VALUE, 32)
VALUES(Wait, OP_WAIT_VALUE, 64)

static CUresult submit_values(CUstream stream, unsigned count, const CUstreamBatchMemOpParams *all)
{
    NVS_SIM_CHECK(all != NULL && count != 0 && count <= 256, CUDA_ERROR_INVALID_VALUE);
    for (const CUstreamBatchMemOpParams *each = all; each < all + count; each++) {
        const CUstreamBatchMemOpType type = each->operation;
        const bool wait = type == CU_STREAM_MEM_OP_WAIT_VALUE_32 || type == CU_STREAM_MEM_OP_WAIT_VALUE_64;
        const bool wide = type == CU_STREAM_MEM_OP_WAIT_VALUE_64 || type == CU_STREAM_MEM_OP_WRITE_VALUE_64;
        if (type == CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES || type == CU_STREAM_MEM_OP_BARRIER)
            continue;
        NVS_SIM_CHECK(wait || wide || type == CU_STREAM_MEM_OP_WRITE_VALUE_32, CUDA_ERROR_NOT_SUPPORTED);
        /* Writes and waits have the same members. */
        NVS_SIM_TRY(value(stream, wait ? OP_WAIT_VALUE : OP_WRITE_VALUE, each->waitValue.address,
                          wide ? each->waitValue.value64 : each->waitValue.value, wide ? 8 : 4, each->waitValue.flags));
    }
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuStreamBatchMemOp, (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags),
              submit_values(stream, count, paramArray))
NVS_SIM_ENTRY(cuStreamBatchMemOp_v2, (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags),
              submit_values(stream, count, paramArray))

/* Prefetches of managed memory. */

static bool is_managed(CUdeviceptr pointer, size_t bytes)
{
    const sim_allocation *one = nvs_sim_find((uintptr_t)pointer);
    return one != NULL && one->kind == MEM_MANAGED && bytes != 0 && pointer - one->base + bytes <= one->bytes;
}

static CUresult prefetch(CUdeviceptr pointer, size_t bytes, int32_t ordinal, CUstream handle)
{
    sim_stream *stream;
    sim_device *device = NULL;
    NVS_SIM_TRY(nvs_sim_stream(handle, &stream));
    if (ordinal >= 0)
        NVS_SIM_TRY(nvs_sim_device(ordinal, &device));
    NVS_SIM_CHECK(is_managed(pointer, bytes), CUDA_ERROR_INVALID_VALUE);
    sim_work work = {.kind = OP_PREFETCH, .bytes = bytes, .duration_ns = nvs_sim_copy_ns(bytes),
                     .u.prefetch = {.pointer = pointer, .bytes = bytes, .gpu = device != NULL ? (int32_t)device->gpu : -1}};
    return nvs_sim_submit(stream, &work);
}

/* Advice has no effect. */
static CUresult advise(CUdeviceptr pointer, size_t bytes, CUmem_advise advice)
{
    NVS_SIM_CHECK(is_managed(pointer, bytes), CUDA_ERROR_INVALID_VALUE);
    return (int)advice >= CU_MEM_ADVISE_SET_READ_MOSTLY && advice <= CU_MEM_ADVISE_UNSET_ACCESSED_BY ? CUDA_SUCCESS
                                                                                                 : CUDA_ERROR_INVALID_VALUE;
}

NVS_SIM_ENTRY(cuMemAdvise, (CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device), advise(devPtr, count, advice))
NVS_SIM_ENTRY(cuMemAdvise_v2, (CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location),
              advise(devPtr, count, advice))

SIM_EXPORT CUresult CUDAAPI cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(dstDevice >= 0 || dstDevice == CU_DEVICE_CPU, CUDA_ERROR_INVALID_DEVICE);
    return prefetch(devPtr, count, dstDevice == CU_DEVICE_CPU ? -1 : dstDevice, hStream);
}

SIM_EXPORT CUresult CUDAAPI cuMemPrefetchAsync_v2(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags,
                                                  CUstream hStream)
{
    const bool device = location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    const bool host = location.type == CU_MEM_LOCATION_TYPE_HOST || location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA ||
                      location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(flags == 0 && (device || host), CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(host || location.id >= 0, CUDA_ERROR_INVALID_DEVICE);
    return prefetch(devPtr, count, host ? -1 : location.id, hStream);
}
