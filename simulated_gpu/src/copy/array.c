/* Arrays. */
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
    NVS_SIM_CHECK(context != NULL, nvs_sim_no_context());
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

NVS_SIM_DEFINE_FIND(nvs_sim_array, CUarray, sim_array, SIM_ARRAY, CUDA_ERROR_INVALID_HANDLE)

SIM_EXPORT CUresult CUDAAPI cuArrayCreate_v2(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pAllocateArray != NULL, CUDA_ERROR_INVALID_VALUE);
    const CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = pAllocateArray->Width, .Height = pAllocateArray->Height,
                                           .Format = pAllocateArray->Format, .NumChannels = pAllocateArray->NumChannels};
    return create(pHandle, &shape);
}

NVS_SIM_ENTRY(cuArray3DCreate_v2, (CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray), create(pHandle, pAllocateArray))

SIM_EXPORT CUresult CUDAAPI cuArrayDestroy(CUarray hArray)
{
    NVS_SIM_ENTER_FIND(sim_array *array, nvs_sim_array(hArray, &array));
    nvs_sim_device_wait(array->context->device);
    nvs_sim_release((uintptr_t)array->memory);
    array->magic = 0;
    free(array);
    return CUDA_SUCCESS;
}
