/* Copies and fills: from the many shapes of the interface to one description, and when the host has to wait. */
#include "base/sim.h"

#include <stdlib.h>
#include <string.h>

#define SNAPSHOT_BYTES (64u << 10)
#define COPY_LATENCY_NS 5000u

enum waiting { NEVER, ALWAYS, AS_ASYNC }; /* AS_ASYNC: only where pageable memory leaves no choice */

uint64_t nvs_sim_copy_ns(uint64_t bytes)
{
    double rate = nvs_sim_settings.copy_bytes_per_ns;
    return rate == 0 ? 0 : COPY_LATENCY_NS + (uint64_t)((double)bytes / rate);
}

static bool pageable(const void *pointer)
{
    bool accessible;
    return nvs_sim_find((uintptr_t)pointer) == NULL && !nvs_sim_vmm_reserved((uintptr_t)pointer, 1, &accessible);
}

/* Submission checks both ends, as the driver does for addresses that it knows, and who may touch them. */
static CUresult submit(sim_stream *stream, sim_copy *copy, enum waiting waiting)
{
    size_t bytes = copy->width * copy->height * copy->depth;
    if (stream->context->error != CUDA_SUCCESS)
        return stream->context->error; /* before any address is looked at */
    if (bytes == 0)
        return CUDA_SUCCESS;
    if (copy->target == NULL || copy->source == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    size_t to = (copy->depth - 1) * copy->target_slice + (copy->height - 1) * copy->target_pitch + copy->width;
    size_t from = (copy->depth - 1) * copy->source_slice + (copy->height - 1) * copy->source_pitch + copy->width;
    if (copy->target_by == NULL)
        copy->target_by = stream->context->device;
    if (copy->source_by == NULL)
        copy->source_by = stream->context->device;
    if (!nvs_sim_copy_reaches(copy->target_by, (uintptr_t)copy->target, to) ||
        !nvs_sim_copy_reaches(copy->source_by, (uintptr_t)copy->source, from))
        return CUDA_ERROR_INVALID_VALUE;
    bool wait = waiting == ALWAYS;
    if (waiting == AS_ASYNC && stream->capture == NULL) {
        wait = pageable(copy->target);
        if (!wait && pageable(copy->source)) {
            bool flat = copy->height == 1 && copy->depth == 1;
            if (flat && bytes <= SNAPSHOT_BYTES && (copy->snapshot = malloc(bytes)) != NULL) {
                memcpy(copy->snapshot, copy->source, bytes);
                copy->source = copy->snapshot;
            } else {
                wait = true;
            }
        }
    }
    sim_work work = {.kind = OP_COPY, .bytes = bytes, .duration_ns = nvs_sim_copy_ns(bytes), .u.copy = *copy};
    sim_context *context = stream->context;
    CUresult result = nvs_sim_submit(stream, &work);
    if (result != CUDA_SUCCESS) {
        free(copy->snapshot);
        return result;
    }
    if (wait) {
        nvs_sim_stream_wait(stream);
        result = context->error;
    }
    return result;
}

CUresult nvs_sim_copy_submit(sim_stream *stream, sim_copy *copy, bool host_waits, bool asynchronous)
{
    return submit(stream, copy, asynchronous ? AS_ASYNC : host_waits ? ALWAYS : NEVER);
}

static CUresult linear_by(CUstream handle, const void *target, const sim_device *target_by, const void *source,
                          const sim_device *source_by, size_t bytes, enum waiting waiting)
{
    sim_stream *stream;
    if (waiting != AS_ASYNC) {
        if (nvs_sim_current() == NULL)
            return nvs_sim_no_context();
        CUresult unsafe = nvs_sim_capture_unsafe();
        if (unsafe != CUDA_SUCCESS)
            return unsafe;
    }
    CUresult result = nvs_sim_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    sim_copy copy = {.target = (char *)(uintptr_t)target, .source = source, .width = bytes, .height = 1, .depth = 1,
                     .target_by = target_by, .source_by = source_by};
    return submit(stream, &copy, waiting);
}

static CUresult linear(CUstream handle, const void *target, const void *source, size_t bytes, enum waiting waiting)
{
    return linear_by(handle, target, NULL, source, NULL, bytes, waiting);
}

#define HOST(pointer) ((const void *)(uintptr_t)(pointer))

/* Between devices alone the host never waits, though the call's name says synchronous. */
static enum waiting between(CUdeviceptr target, CUdeviceptr source)
{
    const sim_allocation *to = nvs_sim_find((uintptr_t)target), *from = nvs_sim_find((uintptr_t)source);
    bool device = to != NULL && from != NULL && to->kind != MEM_HOST && to->kind != MEM_REGISTERED &&
                  from->kind != MEM_HOST && from->kind != MEM_REGISTERED;
    return device ? NEVER : ALWAYS;
}

#define COPY(name, parameters, handle, target, source, waiting)                                 \
    SIM_EXPORT CUresult CUDAAPI name parameters                                                 \
    {                                                                                           \
        NVS_SIM_ENTER();                                                                        \
        return nvs_sim_return(linear(handle, HOST(target), HOST(source), ByteCount, waiting));  \
    }

COPY(cuMemcpy, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount), NULL, dst, src, between(dst, src))
COPY(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream), hStream, dst, src, AS_ASYNC)
COPY(cuMemcpyHtoD_v2, (CUdeviceptr dst, const void *src, size_t ByteCount), NULL, dst, src, ALWAYS)
COPY(cuMemcpyDtoH_v2, (void *dst, CUdeviceptr src, size_t ByteCount), NULL, dst, src, ALWAYS)
COPY(cuMemcpyDtoD_v2, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount), NULL, dst, src, NEVER)
COPY(cuMemcpyHtoDAsync_v2, (CUdeviceptr dst, const void *src, size_t ByteCount, CUstream hStream), hStream, dst, src, AS_ASYNC)
COPY(cuMemcpyDtoHAsync_v2, (void *dst, CUdeviceptr src, size_t ByteCount, CUstream hStream), hStream, dst, src, AS_ASYNC)
COPY(cuMemcpyDtoDAsync_v2, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream), hStream, dst, src, AS_ASYNC)

static CUresult peer(CUstream handle, CUdeviceptr target, CUcontext target_context, CUdeviceptr source, CUcontext source_context,
                     size_t bytes, enum waiting waiting)
{
    sim_context *to, *from;
    CUresult result = nvs_sim_context(target_context, &to);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_context(source_context, &from);
    return result == CUDA_SUCCESS ? linear_by(handle, HOST(target), to->device, HOST(source), from->device, bytes, waiting) : result;
}

SIM_EXPORT CUresult CUDAAPI cuMemcpyPeer(CUdeviceptr dst, CUcontext dstContext, CUdeviceptr src, CUcontext srcContext, size_t ByteCount)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(peer(NULL, dst, dstContext, src, srcContext, ByteCount, NEVER));
}

SIM_EXPORT CUresult CUDAAPI cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dstContext, CUdeviceptr src, CUcontext srcContext,
                                              size_t ByteCount, CUstream hStream)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(peer(hStream, dst, dstContext, src, srcContext, ByteCount, AS_ASYNC));
}

/* Many copies in one call: in order, which is one of the orders that it allows.  The legacy stream is refused, as documented. */
static CUresult batch(CUstream handle, const CUdeviceptr *targets, const CUdeviceptr *sources, const size_t *sizes, size_t count)
{
    if (targets == NULL || sources == NULL || sizes == NULL || count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (handle == CU_STREAM_LEGACY || (handle == NULL && !nvs_sim_thread.call_per_thread))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = linear(handle, HOST(targets[i]), HOST(sources[i]), sizes[i], AS_ASYNC);
    return result;
}

SIM_EXPORT CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                               CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, size_t *failIdx,
                                               CUstream hStream)
{
    NVS_SIM_ENTER();
    if (failIdx != NULL)
        *failIdx = SIZE_MAX;
    return nvs_sim_return(batch(hStream, dsts, srcs, sizes, count));
}

SIM_EXPORT CUresult CUDAAPI cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                                  CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, CUstream hStream)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(batch(hStream, dsts, srcs, sizes, count));
}

/* Fills. */

static CUresult fill(CUstream handle, bool sync, CUdeviceptr target, size_t pitch, size_t width, size_t height, uint32_t value,
                     uint32_t element)
{
    sim_stream *stream;
    if (sync) {
        if (nvs_sim_current() == NULL)
            return nvs_sim_no_context();
        CUresult unsafe = nvs_sim_capture_unsafe();
        if (unsafe != CUDA_SUCCESS)
            return unsafe;
    }
    CUresult result = nvs_sim_stream(handle, &stream);
    if (result == CUDA_SUCCESS)
        result = stream->context->error;
    if (result != CUDA_SUCCESS)
        return result;
    if (width == 0 || height == 0)
        return CUDA_SUCCESS;
    if (target == 0 || target % element != 0 || (height > 1 && pitch < width * element) || pageable(HOST(target)) ||
        !nvs_sim_fill_reaches(stream->context, (uintptr_t)target, (height - 1) * pitch + width * element))
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t bytes = (uint64_t)width * height * element;
    sim_work work = {.kind = OP_FILL, .bytes = bytes, .duration_ns = nvs_sim_copy_ns(bytes) / 8,
                     .u.fill = {.target = (char *)(uintptr_t)target, .pitch = pitch, .width = width, .height = height,
                                .value = value, .element = element, .by = stream->context->device}};
    return nvs_sim_submit(stream, &work);
}

#define FILL(bits, type, value)                                                                                         \
    SIM_EXPORT CUresult CUDAAPI cuMemsetD##bits##_v2(CUdeviceptr dst, type value, size_t N)                             \
    {                                                                                                                   \
        NVS_SIM_ENTER();                                                                                                \
        return nvs_sim_return(fill(NULL, true, dst, 0, N, 1, value, bits / 8));                                         \
    }                                                                                                                   \
    SIM_EXPORT CUresult CUDAAPI cuMemsetD##bits##Async(CUdeviceptr dst, type value, size_t N, CUstream hStream)         \
    {                                                                                                                   \
        NVS_SIM_ENTER();                                                                                                \
        return nvs_sim_return(fill(hStream, false, dst, 0, N, 1, value, bits / 8));                                     \
    }                                                                                                                   \
    SIM_EXPORT CUresult CUDAAPI cuMemsetD2D##bits##_v2(CUdeviceptr dst, size_t pitch, type value, size_t W, size_t H)   \
    {                                                                                                                   \
        NVS_SIM_ENTER();                                                                                                \
        return nvs_sim_return(fill(NULL, true, dst, pitch, W, H, value, bits / 8));                                     \
    }                                                                                                                   \
    SIM_EXPORT CUresult CUDAAPI cuMemsetD2D##bits##Async(CUdeviceptr dst, size_t pitch, type value, size_t W, size_t H, \
                                                         CUstream hStream)                                              \
    {                                                                                                                   \
        NVS_SIM_ENTER();                                                                                                \
        return nvs_sim_return(fill(hStream, false, dst, pitch, W, H, value, bits / 8));                                 \
    }

FILL(8, unsigned char, uc)
FILL(16, unsigned short, us)
FILL(32, unsigned int, ui)
