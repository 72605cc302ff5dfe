/* Fills. */
#include "copy/copy.h"

static bool well_formed(const CUDA_MEMSET_NODE_PARAMS *params)
{
    const unsigned size = params->elementSize;
    return (size == 1 || size == 2 || size == 4) && params->dst != 0 && params->dst % size == 0 &&
           (params->height <= 1 || params->pitch >= params->width * size);
}

static sim_work work_of(const CUDA_MEMSET_NODE_PARAMS *params, const sim_device *rights)
{
    const uint64_t bytes = (uint64_t)params->width * params->height * params->elementSize;
    return (sim_work){.kind = OP_FILL, .bytes = bytes, .duration_ns = nvs_sim_copy_ns(bytes) / 8,
                      .u.fill = {.target = SIM_POINTER(params->dst), .pitch = params->pitch, .width = params->width,
                                 .height = params->height, .value = params->value, .element = params->elementSize, .rights = rights}};
}

CUresult nvs_sim_fill_work(const CUDA_MEMSET_NODE_PARAMS *params, const sim_device *rights, sim_work *out)
{
    NVS_SIM_CHECK(well_formed(params) && params->width != 0 && params->height != 0, CUDA_ERROR_INVALID_VALUE);
    *out = work_of(params, rights);
    const bool allowed = nvs_sim_copy_reaches(rights, (uintptr_t)params->dst, nvs_sim_fill_span(&out->u.fill));
    return allowed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult fill(CUstream handle, bool asynchronous, const CUDA_MEMSET_NODE_PARAMS *params)
{
    sim_stream *stream;
    NVS_SIM_TRY(nvs_sim_copy_stream(handle, asynchronous, &stream));
    NVS_SIM_TRY(stream->context->error);
    if (params->width == 0 || params->height == 0)
        return CUDA_SUCCESS;
    NVS_SIM_CHECK(well_formed(params) && !nvs_sim_pageable(SIM_POINTER(params->dst)), CUDA_ERROR_INVALID_VALUE);
    const sim_work work = work_of(params, stream->context->device);
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
