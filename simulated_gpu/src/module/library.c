/* cuLibrary*, and the functions that only kernel handles have. */
#include "module/module.h"

SIM_EXPORT CUresult CUDAAPI cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues,
                                              unsigned int numJitOptions, CUlibraryOption *libraryOptions,
                                              void **libraryOptionValues, unsigned int numLibraryOptions)
{
    sim_module *module;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(library != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_module_new(code, &module));
    *library = (CUlibrary)(void *)module;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuLibraryUnload(CUlibrary library)
{
    NVS_SIM_ENTER_FIND(sim_module *module, nvs_sim_module((CUmodule)library, &module));
    nvs_sim_module_free(module);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuLibraryGetModule(CUmodule *pMod, CUlibrary library)
{
    sim_module *module;
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(pMod != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_module((CUmodule)library, &module));
    NVS_SIM_TRY(context->error);
    *pMod = (CUmodule)(void *)module;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuKernelGetFunction(CUfunction *pFunc, CUkernel handle)
{
    sim_function *function;
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(pFunc != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_function((CUfunction)handle, &function));
    NVS_SIM_TRY(context->error);
    *pFunc = (CUfunction)(void *)function;
    return CUDA_SUCCESS;
}
