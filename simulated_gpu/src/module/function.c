/* Attributes of functions and kernels. */
#include "module/module.h"

static CUresult get_attribute(int *value, CUfunction_attribute attribute, CUfunction handle)
{
    sim_function *function;
    NVS_SIM_CHECK(value != NULL && (unsigned)attribute < CU_FUNC_ATTRIBUTE_MAX, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_function(handle, &function));
    *value = function->attributes[attribute];
    return CUDA_SUCCESS;
}

static CUresult set_attribute(CUfunction handle, CUfunction_attribute attribute, int value)
{
    sim_function *function;
    NVS_SIM_TRY(nvs_sim_function(handle, &function));
    if ((unsigned)attribute >= CU_FUNC_ATTRIBUTE_MAX || (unsigned)attribute < CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && (value < 0 || value > 232448))
        return CUDA_ERROR_INVALID_VALUE;
    function->attributes[attribute] = value;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuFuncGetAttribute, (int *pi, CUfunction_attribute attrib, CUfunction hfunc), get_attribute(pi, attrib, hfunc))
NVS_SIM_ENTRY(cuFuncSetAttribute, (CUfunction hfunc, CUfunction_attribute attrib, int value), set_attribute(hfunc, attrib, value))
NVS_SIM_ENTRY(cuKernelGetAttribute, (int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev),
              get_attribute(pi, attrib, (CUfunction)kernel))
NVS_SIM_ENTRY(cuKernelSetAttribute, (CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev),
              set_attribute((CUfunction)kernel, attrib, val))

/* The remaining settings have no effect. */
static CUresult check(CUfunction handle)
{
    sim_function *function;
    return nvs_sim_function(handle, &function);
}

NVS_SIM_ENTRY(cuFuncSetCacheConfig, (CUfunction function, CUfunc_cache config), check(function))
NVS_SIM_ENTRY(cuKernelSetCacheConfig, (CUkernel kernel, CUfunc_cache config, CUdevice device), check((CUfunction)kernel))
NVS_SIM_ENTRY(cuFuncSetSharedMemConfig, (CUfunction function, CUsharedconfig config), check(function))
NVS_SIM_ENTRY(cuFuncLoad, (CUfunction function), check(function))
