/* Copies of linear memory. */
#include "copy/copy.h"

static CUresult linear_by(CUstream handle, sim_copy_end target, sim_copy_end source, size_t bytes, enum sim_waiting waiting)
{
    sim_stream *stream;
    NVS_SIM_TRY(nvs_sim_copy_stream(handle, waiting == SIM_WAIT_AS_ASYNC, &stream));
    sim_copy copy = {.target = target, .source = source, .width = bytes, .height = 1, .depth = 1};
    return nvs_sim_copy_submit(stream, &copy, waiting);
}

static CUresult linear(CUstream handle, void *target, void *source, size_t bytes, enum sim_waiting waiting)
{
    return linear_by(handle, (sim_copy_end){.start = target}, (sim_copy_end){.start = source}, bytes, waiting);
}

/* The host does not wait for a synchronous copy between devices. */
static enum sim_waiting between(CUdeviceptr target, CUdeviceptr source)
{
    const sim_allocation *ends[2] = {nvs_sim_find((uintptr_t)target), nvs_sim_find((uintptr_t)source)};
    for (int i = 0; i < 2; i++)
        if (ends[i] == NULL || ends[i]->kind == MEM_HOST || ends[i]->kind == MEM_REGISTERED)
            return SIM_ALWAYS_WAIT;
    return SIM_NEVER_WAIT;
}

#define COPY(name, parameters, handle, target, source, waiting)                                 \
    NVS_SIM_ENTRY(name, parameters, linear(handle, SIM_POINTER(target), SIM_POINTER(source), ByteCount, waiting))

COPY(cuMemcpy, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount), NULL, dst, src, between(dst, src))
COPY(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream), hStream, dst, src, SIM_WAIT_AS_ASYNC)
COPY(cuMemcpyHtoD_v2, (CUdeviceptr dst, const void *src, size_t ByteCount), NULL, dst, src, SIM_ALWAYS_WAIT)
COPY(cuMemcpyDtoH_v2, (void *dst, CUdeviceptr src, size_t ByteCount), NULL, dst, src, SIM_ALWAYS_WAIT)
COPY(cuMemcpyDtoD_v2, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount), NULL, dst, src, SIM_NEVER_WAIT)
COPY(cuMemcpyHtoDAsync_v2, (CUdeviceptr dst, const void *src, size_t ByteCount, CUstream hStream), hStream, dst, src, SIM_WAIT_AS_ASYNC)
COPY(cuMemcpyDtoHAsync_v2, (void *dst, CUdeviceptr src, size_t ByteCount, CUstream hStream), hStream, dst, src, SIM_WAIT_AS_ASYNC)
COPY(cuMemcpyDtoDAsync_v2, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream), hStream, dst, src, SIM_WAIT_AS_ASYNC)

static CUresult peer(CUstream handle, CUdeviceptr target, CUcontext target_context, CUdeviceptr source, CUcontext source_context,
                     size_t bytes, enum sim_waiting waiting)
{
    sim_context *to, *from;
    NVS_SIM_TRY(nvs_sim_context(target_context, &to));
    NVS_SIM_TRY(nvs_sim_context(source_context, &from));
    const sim_copy_end ends[] = {{.start = SIM_POINTER(target), .rights = to->device}, {.start = SIM_POINTER(source), .rights = from->device}};
    return linear_by(handle, ends[0], ends[1], bytes, waiting);
}

NVS_SIM_ENTRY(cuMemcpyPeer, (CUdeviceptr dst, CUcontext dstContext, CUdeviceptr src, CUcontext srcContext, size_t ByteCount),
              peer(NULL, dst, dstContext, src, srcContext, ByteCount, SIM_NEVER_WAIT))
NVS_SIM_ENTRY(cuMemcpyPeerAsync, (CUdeviceptr dst, CUcontext dstContext, CUdeviceptr src, CUcontext srcContext, size_t ByteCount,
                                  CUstream hStream),
              peer(hStream, dst, dstContext, src, srcContext, ByteCount, SIM_WAIT_AS_ASYNC))

/* The copies run in order, which is one of the allowed orders.  As documented, the legacy stream is an error. */
static CUresult batch(CUstream handle, const CUdeviceptr *targets, const CUdeviceptr *sources, const size_t *sizes, size_t count)
{
    if (targets == NULL || sources == NULL || sizes == NULL || count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (handle == CU_STREAM_LEGACY || (handle == NULL && !nvs_sim_thread.per_thread))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = linear(handle, SIM_POINTER(targets[i]), SIM_POINTER(sources[i]), sizes[i], SIM_WAIT_AS_ASYNC);
    return result;
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
