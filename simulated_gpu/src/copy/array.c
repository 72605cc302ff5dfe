/* Arrays, and their copies by byte offset. */
#include "copy/copy.h"

#include <stdlib.h>

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
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    sim_array *array = calloc(1, sizeof *array);
    if (array == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    array->magic = SIM_ARRAY;
    array->shape = *shape;
    array->context = context;
    array->element = format_bytes(shape->Format) * shape->NumChannels;
    array->pitch = shape->Width * array->element;
    array->rows = shape->Height == 0 ? 1 : shape->Height;
    CUresult result = nvs_sim_allocate(context, array->pitch * array->rows * (shape->Depth == 0 ? 1 : shape->Depth), MEM_DEVICE, 0,
                              &array->memory);
    if (result != CUDA_SUCCESS)
        free(array);
    else
        *out = (CUarray)(void *)array;
    return result;
}

CUresult nvs_sim_array(CUarray handle, sim_array **out)
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
    return create(pHandle, &shape);
}

NVS_SIM_ENTRY(cuArray3DCreate_v2, (CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray), create(pHandle, pAllocateArray))

SIM_EXPORT CUresult CUDAAPI cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *pArrayDescriptor, CUarray hArray)
{
    NVS_SIM_ENTER_FIND(sim_array *array, nvs_sim_array(hArray, &array));
    NVS_SIM_CHECK(pArrayDescriptor != NULL, CUDA_ERROR_INVALID_VALUE);
    *pArrayDescriptor = array->shape;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *pArrayDescriptor, CUarray hArray)
{
    NVS_SIM_ENTER_FIND(sim_array *array, nvs_sim_array(hArray, &array));
    NVS_SIM_CHECK(pArrayDescriptor != NULL, CUDA_ERROR_INVALID_VALUE);
    *pArrayDescriptor = (CUDA_ARRAY_DESCRIPTOR){.Width = array->shape.Width, .Height = array->shape.Height,
                                                .Format = array->shape.Format, .NumChannels = array->shape.NumChannels};
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuArrayDestroy(CUarray hArray)
{
    NVS_SIM_ENTER_FIND(sim_array *array, nvs_sim_array(hArray, &array));
    nvs_sim_device_wait(array->context->device);
    nvs_sim_release((uintptr_t)array->memory);
    array->magic = 0;
    free(array);
    return CUDA_SUCCESS;
}

/* Copies between arrays and linear memory, by byte offset. */

typedef struct end { /* of a copy: an array and an offset, or memory */
    CUarray array;
    size_t offset;
    const void *memory;
} end;

static CUresult locate(end at, const char **out)
{
    sim_array *array;
    *out = at.memory;
    if (at.array == NULL)
        return CUDA_SUCCESS;
    CUresult result = nvs_sim_array(at.array, &array);
    if (result == CUDA_SUCCESS)
        *out = (const char *)SIM_POINTER(array->memory) + at.offset;
    return result;
}

static CUresult array_copy(CUstream handle, enum sim_waiting waiting, end to, end from, size_t bytes)
{
    sim_stream *stream;
    const char *target;
    sim_copy copy = {.width = bytes, .height = 1, .depth = 1};
    NVS_SIM_TRY(nvs_sim_copy_stream(handle, waiting == SIM_WAIT_AS_ASYNC, &stream));
    NVS_SIM_TRY(locate(to, &target));
    NVS_SIM_TRY(locate(from, &copy.source));
    copy.target = SIM_POINTER(target);
    return nvs_sim_copy_submit(stream, &copy, waiting);
}

#define ARRAY_COPY(name, parameters, stream, waiting, to, from)                                 \
    SIM_EXPORT CUresult CUDAAPI name parameters                                                 \
    {                                                                                           \
        NVS_SIM_ENTER();                                                                        \
        return array_copy(stream, waiting, to, from, bytes);                                    \
    }
#define ARRAY(handle, at) ((end){.array = handle, .offset = at})
#define MEMORY(pointer) ((end){.memory = SIM_POINTER(pointer)})

ARRAY_COPY(cuMemcpyHtoA_v2, (CUarray dst, size_t offset, const void *src, size_t bytes),
           NULL, SIM_ALWAYS_WAIT, ARRAY(dst, offset), MEMORY(src))
ARRAY_COPY(cuMemcpyAtoH_v2, (void *dst, CUarray src, size_t offset, size_t bytes),
           NULL, SIM_ALWAYS_WAIT, MEMORY(dst), ARRAY(src, offset))
ARRAY_COPY(cuMemcpyDtoA_v2, (CUarray dst, size_t offset, CUdeviceptr src, size_t bytes),
           NULL, SIM_NEVER_WAIT, ARRAY(dst, offset), MEMORY(src))
ARRAY_COPY(cuMemcpyAtoD_v2, (CUdeviceptr dst, CUarray src, size_t offset, size_t bytes),
           NULL, SIM_NEVER_WAIT, MEMORY(dst), ARRAY(src, offset))
ARRAY_COPY(cuMemcpyAtoA_v2, (CUarray dst, size_t to, CUarray src, size_t from, size_t bytes),
           NULL, SIM_NEVER_WAIT, ARRAY(dst, to), ARRAY(src, from))
ARRAY_COPY(cuMemcpyHtoAAsync_v2, (CUarray dst, size_t offset, const void *src, size_t bytes, CUstream stream),
           stream, SIM_WAIT_AS_ASYNC, ARRAY(dst, offset), MEMORY(src))
ARRAY_COPY(cuMemcpyAtoHAsync_v2, (void *dst, CUarray src, size_t offset, size_t bytes, CUstream stream),
           stream, SIM_WAIT_AS_ASYNC, MEMORY(dst), ARRAY(src, offset))
