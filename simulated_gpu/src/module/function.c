/* Attributes and names of functions and kernels. */
#include "module/module.h"

static CUresult get_attribute(int *value, CUfunction_attribute attribute, CUfunction handle)
{
    sim_function *function;
    if (value == NULL || (unsigned)attribute >= CU_FUNC_ATTRIBUTE_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = nvs_sim_function(handle, &function);
    if (result == CUDA_SUCCESS)
        *value = function->attributes[attribute];
    return result;
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

SIM_EXPORT CUresult CUDAAPI cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config)
{
    sim_function *function;
    NVS_SIM_ENTER();
    return nvs_sim_function(hfunc, &function);
}

SIM_EXPORT CUresult CUDAAPI cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice dev)
{
    sim_function *function;
    NVS_SIM_ENTER();
    return nvs_sim_function((CUfunction)kernel, &function);
}

SIM_EXPORT CUresult CUDAAPI cuFuncSetSharedMemConfig(CUfunction hfunc, CUsharedconfig config)
{
    sim_function *function;
    NVS_SIM_ENTER();
    return nvs_sim_function(hfunc, &function);
}

SIM_EXPORT CUresult CUDAAPI cuFuncGetModule(CUmodule *hmod, CUfunction hfunc)
{
    NVS_SIM_ENTER_FIND(sim_function *function, nvs_sim_function(hfunc, &function));
    NVS_SIM_CHECK(hmod != NULL, CUDA_ERROR_INVALID_VALUE);
    *hmod = (CUmodule)(void *)function->module;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuFuncGetName(const char **name, CUfunction hfunc)
{
    NVS_SIM_ENTER_FIND(sim_function *function, nvs_sim_function(hfunc, &function));
    NVS_SIM_CHECK(name != NULL, CUDA_ERROR_INVALID_VALUE);
    *name = function->name;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuKernelGetName(const char **name, CUkernel hfunc)
{
    NVS_SIM_ENTER_FIND(sim_function *function, nvs_sim_function((CUfunction)hfunc, &function));
    NVS_SIM_CHECK(name != NULL, CUDA_ERROR_INVALID_VALUE);
    *name = function->name;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function)
{
    NVS_SIM_ENTER_FIND(sim_function *found, nvs_sim_function(function, &found));
    NVS_SIM_CHECK(state != NULL, CUDA_ERROR_INVALID_VALUE);
    *state = CU_FUNCTION_LOADING_STATE_LOADED;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuFuncLoad(CUfunction function)
{
    sim_function *found;
    NVS_SIM_ENTER();
    return nvs_sim_function(function, &found);
}
