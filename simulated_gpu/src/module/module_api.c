/* cuModule*, and the functions and variables of modules and libraries. */
#include "module/module.h"

#include <stdlib.h>

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

SIM_EXPORT CUresult CUDAAPI cuModuleLoad(CUmodule *module, const char *fname)
{
    char *image;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(fname != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_image_from_file(fname, &image));
    CUresult result = load(module, image);
    free(image);
    return result;
}

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

/* Functions that modules and libraries have in common. */
#define LISTING(prefix, version, owner, thing, things, type)                                                                 \
    SIM_EXPORT CUresult CUDAAPI prefix##Get##thing(type *out, owner handle, const char *name)                                \
    {                                                                                                                        \
        sim_module *module;                                                                                                  \
        sim_function *function;                                                                                              \
        NVS_SIM_ENTER();                                                                                                     \
        NVS_SIM_CHECK(out != NULL && name != NULL && *name != '\0', CUDA_ERROR_INVALID_VALUE);                               \
        NVS_SIM_TRY(nvs_sim_module((CUmodule)handle, &module));                                                              \
        NVS_SIM_TRY(nvs_sim_function_named(module, name, &function));                                                        \
        *out = (type)(void *)function;                                                                                       \
        return CUDA_SUCCESS;                                                                                                 \
    }                                                                                                                        \
    SIM_EXPORT CUresult CUDAAPI prefix##Get##thing##Count(unsigned int *count, owner handle)                                 \
    {                                                                                                                        \
        sim_module *module;                                                                                                  \
        NVS_SIM_ENTER();                                                                                                     \
        NVS_SIM_CHECK(count != NULL, CUDA_ERROR_INVALID_VALUE);                                                              \
        NVS_SIM_TRY(nvs_sim_module((CUmodule)handle, &module));                                                              \
        return nvs_sim_module_count(module, count);                                                                          \
    }                                                                                                                        \
    SIM_EXPORT CUresult CUDAAPI prefix##Enumerate##things(type *list, unsigned int room, owner handle)                       \
    {                                                                                                                        \
        sim_module *module;                                                                                                  \
        NVS_SIM_ENTER();                                                                                                     \
        NVS_SIM_CHECK(list != NULL && room != 0, CUDA_ERROR_INVALID_VALUE);                                                  \
        NVS_SIM_TRY(nvs_sim_module((CUmodule)handle, &module));                                                              \
        return nvs_sim_module_list(module, (sim_function **)(void *)list, room);                                             \
    }                                                                                                                        \
    SIM_EXPORT CUresult CUDAAPI prefix##GetGlobal##version(CUdeviceptr *dptr, size_t *bytes, owner handle, const char *name) \
    {                                                                                                                        \
        sim_module *module;                                                                                                  \
        NVS_SIM_ENTER_CONTEXT();                                                                                             \
        NVS_SIM_TRY(nvs_sim_module((CUmodule)handle, &module));                                                              \
        return nvs_sim_global(context, module, name, dptr, bytes);                                                           \
    }

LISTING(cuModule, _v2, CUmodule, Function, Functions, CUfunction)
LISTING(cuLibrary, , CUlibrary, Kernel, Kernels, CUkernel)
