/* cuLibrary* and cuKernel*: a library is a module that belongs to no context; a kernel handle is a function handle.
 * Global variables of both: made on demand, backed by device memory of the current context.
 */
#include "base/sim.h"

#include <stdlib.h>
#include <string.h>

#define GLOBAL_BYTES 65536u /* as much as constant memory may have: the image does not always say */

typedef struct sim_global {
    struct sim_global *next;
    sim_context *context;
    char *name;
    CUdeviceptr pointer;
} sim_global;

static CUresult find(CUlibrary handle, sim_module **out)
{
    sim_module *module = (sim_module *)(void *)handle;
    if (module == NULL || module->magic != SIM_MODULE)
        return CUDA_ERROR_INVALID_HANDLE;
    *out = module;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues,
                                              unsigned int numJitOptions, CUlibraryOption *libraryOptions,
                                              void **libraryOptionValues, unsigned int numLibraryOptions)
{
    sim_module *module;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(library != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_module_from_image(code, &module));
    *library = (CUlibrary)(void *)module;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *jitOptions,
                                                  void **jitOptionsValues, unsigned int numJitOptions,
                                                  CUlibraryOption *libraryOptions, void **libraryOptionValues,
                                                  unsigned int numLibraryOptions)
{
    sim_module *module;
    char *image;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(library != NULL && fileName != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_read_file(fileName, &image));
    CUresult result = nvs_sim_module_from_image(image, &module);
    free(image);
    if (result == CUDA_SUCCESS)
        *library = (CUlibrary)(void *)module;
    return nvs_sim_return(result);
}

SIM_EXPORT CUresult CUDAAPI cuLibraryUnload(CUlibrary library)
{
    sim_module *module;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(find(library, &module));
    nvs_sim_module_free(module);
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuLibraryGetModule(CUmodule *pMod, CUlibrary library)
{
    sim_module *module;
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(pMod != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(library, &module));
    NVS_SIM_TRY(nvs_sim_context_usable(context));
    *pMod = (CUmodule)(void *)module;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name)
{
    sim_module *module;
    sim_function *function;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pKernel != NULL && name != NULL && *name != '\0', CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(library, &module));
    NVS_SIM_TRY(nvs_sim_function_named(module, name, strlen(name), &function));
    *pKernel = (CUkernel)(void *)function;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuLibraryGetKernelCount(unsigned int *count, CUlibrary lib)
{
    sim_module *module;
    size_t number;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(count != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(lib, &module));
    NVS_SIM_TRY(nvs_sim_module_list(module, &number));
    *count = (unsigned)number;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int numKernels, CUlibrary lib)
{
    sim_module *module;
    size_t number;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(kernels != NULL && numKernels != 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(lib, &module));
    NVS_SIM_TRY(nvs_sim_module_list(module, &number));
    for (sim_function *one = module->functions; one != NULL && numKernels != 0; one = one->next, numKernels--)
        *kernels++ = (CUkernel)(void *)one;
    return nvs_sim_return(CUDA_SUCCESS);
}

static CUresult kernel(CUkernel handle, sim_function **out)
{
    sim_function *function = (sim_function *)(void *)handle;
    if (function == NULL || function->magic != SIM_FUNCTION)
        return CUDA_ERROR_INVALID_HANDLE;
    *out = function;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuKernelGetFunction(CUfunction *pFunc, CUkernel handle)
{
    sim_function *function;
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(pFunc != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(kernel(handle, &function));
    NVS_SIM_TRY(nvs_sim_context_usable(context));
    *pFunc = (CUfunction)(void *)function;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuKernelGetLibrary(CUlibrary *pLib, CUkernel handle)
{
    sim_function *function;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pLib != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(kernel(handle, &function));
    *pLib = (CUlibrary)(void *)function->module;
    return nvs_sim_return(CUDA_SUCCESS);
}

/* Global variables. */

static CUresult global(sim_context *context, sim_module *module, const char *name, CUdeviceptr *pointer, size_t *bytes)
{
    sim_global *one = module->globals;
    if (name == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    while (one != NULL && (one->context != context || strcmp(one->name, name) != 0))
        one = one->next;
    if (one == NULL) {
        one = calloc(1, sizeof *one);
        if (one == NULL || (one->name = strdup(name)) == NULL) {
            free(one);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        CUresult result = nvs_sim_allocate(context, GLOBAL_BYTES, MEM_DEVICE, 0, &one->pointer);
        if (result != CUDA_SUCCESS) {
            free(one->name);
            free(one);
            return result;
        }
        memset((void *)(uintptr_t)one->pointer, 0, GLOBAL_BYTES);
        one->context = context;
        one->next = module->globals;
        module->globals = one;
    }
    if (pointer != NULL)
        *pointer = one->pointer;
    if (bytes != NULL)
        *bytes = GLOBAL_BYTES;
    return CUDA_SUCCESS;
}

void nvs_sim_globals_free(sim_module *module)
{
    while (module->globals != NULL) {
        sim_global *one = module->globals;
        sim_allocation *allocation = nvs_sim_find((uintptr_t)one->pointer);
        module->globals = one->next;
        if (allocation != NULL && allocation->base == (uintptr_t)one->pointer && allocation->context == one->context)
            nvs_sim_release((uintptr_t)one->pointer);
        free(one->name);
        free(one);
    }
}

SIM_EXPORT CUresult CUDAAPI cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod, const char *name)
{
    sim_module *module;
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(find((CUlibrary)hmod, &module));
    return nvs_sim_return(global(context, module, name, dptr, bytes));
}

SIM_EXPORT CUresult CUDAAPI cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
{
    sim_module *module;
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(find(library, &module));
    return nvs_sim_return(global(context, module, name, dptr, bytes));
}
