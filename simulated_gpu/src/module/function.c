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
    CUresult result = nvs_sim_function(handle, &function);
    if (result != CUDA_SUCCESS)
        return result;
    if ((unsigned)attribute >= CU_FUNC_ATTRIBUTE_MAX || (unsigned)attribute < CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && (value < 0 || value > 232448))
        return CUDA_ERROR_INVALID_VALUE;
    function->attributes[attribute] = value;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuFuncGetAttribute(int *pi, CUfunction_attribute attrib, CUfunction hfunc)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(get_attribute(pi, attrib, hfunc));
}

SIM_EXPORT CUresult CUDAAPI cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(set_attribute(hfunc, attrib, value));
}

SIM_EXPORT CUresult CUDAAPI cuKernelGetAttribute(int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(get_attribute(pi, attrib, (CUfunction)kernel));
}

SIM_EXPORT CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(set_attribute((CUfunction)kernel, attrib, val));
}

SIM_EXPORT CUresult CUDAAPI cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config)
{
    sim_function *function;
    NVS_SIM_ENTER();
    return nvs_sim_return(nvs_sim_function(hfunc, &function));
}

SIM_EXPORT CUresult CUDAAPI cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice dev)
{
    sim_function *function;
    NVS_SIM_ENTER();
    return nvs_sim_return(nvs_sim_function((CUfunction)kernel, &function));
}

SIM_EXPORT CUresult CUDAAPI cuFuncSetSharedMemConfig(CUfunction hfunc, CUsharedconfig config)
{
    sim_function *function;
    NVS_SIM_ENTER();
    return nvs_sim_return(nvs_sim_function(hfunc, &function));
}

SIM_EXPORT CUresult CUDAAPI cuFuncGetModule(CUmodule *hmod, CUfunction hfunc)
{
    sim_function *function;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(hmod != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_function(hfunc, &function));
    *hmod = (CUmodule)(void *)function->module;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuFuncGetName(const char **name, CUfunction hfunc)
{
    sim_function *function;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(name != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_function(hfunc, &function));
    *name = function->name;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuKernelGetName(const char **name, CUkernel hfunc)
{
    sim_function *function;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(name != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_function((CUfunction)hfunc, &function));
    *name = function->name;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function)
{
    sim_function *found;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(state != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_function(function, &found));
    *state = CU_FUNCTION_LOADING_STATE_LOADED;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuFuncLoad(CUfunction function)
{
    sim_function *found;
    NVS_SIM_ENTER();
    return nvs_sim_return(nvs_sim_function(function, &found));
}
