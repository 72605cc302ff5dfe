/* cuModule*, and the functions and variables of modules and libraries. */
#include "module/module.h"

static CUresult load(CUmodule *out, const void *image)
{
    sim_context *context = nvs_sim_current();
    sim_module *module;
    NVS_SIM_TRY(context == NULL ? nvs_sim_no_context() : nvs_sim_capture_unsafe());
    NVS_SIM_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(context->error);
    NVS_SIM_TRY(nvs_sim_module_new(image, &module));
    module->context = context;
    module->next = context->modules;
    context->modules = module;
    *out = (CUmodule)(void *)module;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuModuleLoadData, (CUmodule *module, const void *image), load(module, image))
NVS_SIM_ENTRY(cuModuleLoadDataEx, (CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options,
                                   void **optionValues),
              load(module, image))
NVS_SIM_ENTRY(cuModuleLoadFatBinary, (CUmodule *module, const void *fatCubin), load(module, fatCubin))

SIM_EXPORT CUresult CUDAAPI cuModuleUnload(CUmodule hmod)
{
    NVS_SIM_ENTER_FIND(sim_module *module, nvs_sim_module(hmod, &module));
    NVS_SIM_CHECK(module->context != NULL, CUDA_ERROR_INVALID_HANDLE);
    NVS_SIM_TRY(module->context->error);
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    sim_module **link = &module->context->modules;
    while (*link != module)
        link = &(*link)->next;
    *link = module->next;
    nvs_sim_module_free(module);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(mode != NULL, CUDA_ERROR_INVALID_VALUE);
    *mode = CU_MODULE_EAGER_LOADING;
    return CUDA_SUCCESS;
}

#define LOOKUPS(prefix, version, owner, thing, type)                                                                         \
    SIM_EXPORT CUresult CUDAAPI prefix##Get##thing(type *out, owner handle, const char *name)                                \
    {                                                                                                                        \
        NVS_SIM_ENTER_FIND(sim_module *module, nvs_sim_module((CUmodule)handle, &module));                                   \
        return nvs_sim_function_named(module, name, (sim_function **)(void *)out);                                           \
    }                                                                                                                        \
    SIM_EXPORT CUresult CUDAAPI prefix##GetGlobal##version(CUdeviceptr *dptr, size_t *bytes, owner handle, const char *name) \
    {                                                                                                                        \
        sim_module *module;                                                                                                  \
        NVS_SIM_ENTER_CONTEXT();                                                                                             \
        NVS_SIM_TRY(nvs_sim_module((CUmodule)handle, &module));                                                              \
        return nvs_sim_global(context, module, name, dptr, bytes);                                                           \
    }

LOOKUPS(cuModule, _v2, CUmodule, Function, CUfunction)
LOOKUPS(cuLibrary, , CUlibrary, Kernel, CUkernel)
