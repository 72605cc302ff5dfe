/* cuModule*, cuFunc*, and the launches. */
#include "base/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static CUresult load(CUmodule *out, const void *image)
{
    sim_context *context = nvs_sim_current();
    sim_module *module;
    CUresult result = context == NULL ? nvs_sim_no_context() : nvs_sim_capture_unsafe();
    if (result == CUDA_SUCCESS)
        result = out == NULL ? CUDA_ERROR_INVALID_VALUE : context->error;
    if (result == CUDA_SUCCESS)
        result = nvs_sim_module_from_image(image, &module);
    if (result != CUDA_SUCCESS)
        return result;
    module->context = context;
    module->next = context->modules;
    context->modules = module;
    *out = (CUmodule)(void *)module;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(load(module, image));
}

SIM_EXPORT CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options,
                                               void **optionValues)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(load(module, image));
}

SIM_EXPORT CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(load(module, fatCubin));
}

CUresult nvs_sim_read_file(const char *path, char **out)
{
    FILE *file = fopen(path, "rb");
    char *bytes = NULL;
    size_t used = 0, room = 0;
    if (file == NULL)
        return CUDA_ERROR_FILE_NOT_FOUND;
    for (;;) {
        if (room - used < 4096) {
            room = room == 0 ? 65536 : room * 2;
            char *larger = realloc(bytes, room);
            if (larger == NULL) {
                free(bytes);
                fclose(file);
                return CUDA_ERROR_OUT_OF_MEMORY;
            }
            bytes = larger;
        }
        size_t got = fread(bytes + used, 1, room - used - 64, file); /* some zeros stay behind it */
        if (got == 0)
            break;
        used += got;
    }
    memset(bytes + used, 0, 64);
    fclose(file);
    *out = bytes;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuModuleLoad(CUmodule *module, const char *fname)
{
    char *image;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(fname != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_read_file(fname, &image));
    CUresult result = load(module, image);
    free(image);
    return nvs_sim_return(result);
}

static CUresult find(CUmodule handle, sim_module **out)
{
    sim_module *module = (sim_module *)(void *)handle;
    if (module == NULL || module->magic != SIM_MODULE)
        return CUDA_ERROR_INVALID_HANDLE;
    *out = module;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuModuleUnload(CUmodule hmod)
{
    sim_module *module;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(find(hmod, &module));
    NVS_SIM_CHECK(module->context != NULL, CUDA_ERROR_INVALID_HANDLE);
    NVS_SIM_TRY(nvs_sim_context_usable(module->context));
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    sim_module **link = &module->context->modules;
    while (*link != module)
        link = &(*link)->next;
    *link = module->next;
    nvs_sim_module_free(module);
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(mode != NULL, CUDA_ERROR_INVALID_VALUE);
    *mode = CU_MODULE_EAGER_LOADING;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)
{
    sim_module *module;
    sim_function *function;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(hfunc != NULL && name != NULL && *name != '\0', CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(hmod, &module));
    NVS_SIM_TRY(nvs_sim_function_named(module, name, strlen(name), &function));
    *hfunc = (CUfunction)(void *)function;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuModuleGetFunctionCount(unsigned int *count, CUmodule mod)
{
    sim_module *module;
    size_t number;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(count != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(mod, &module));
    NVS_SIM_TRY(nvs_sim_module_list(module, &number));
    *count = (unsigned)number;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuModuleEnumerateFunctions(CUfunction *functions, unsigned int numFunctions, CUmodule mod)
{
    sim_module *module;
    size_t number;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(functions != NULL && numFunctions != 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(mod, &module));
    NVS_SIM_TRY(nvs_sim_module_list(module, &number));
    for (sim_function *one = module->functions; one != NULL && numFunctions != 0; one = one->next, numFunctions--)
        *functions++ = (CUfunction)(void *)one;
    return nvs_sim_return(CUDA_SUCCESS);
}

/* Functions. */

static CUresult function_of(CUfunction handle, sim_function **out)
{
    sim_function *function = (sim_function *)(void *)handle;
    if (function == NULL || function->magic != SIM_FUNCTION)
        return CUDA_ERROR_INVALID_HANDLE;
    *out = function;
    return CUDA_SUCCESS;
}

static CUresult get_attribute(int *value, CUfunction_attribute attribute, CUfunction handle)
{
    sim_function *function;
    if (value == NULL || (unsigned)attribute >= CU_FUNC_ATTRIBUTE_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = function_of(handle, &function);
    if (result == CUDA_SUCCESS)
        *value = function->attributes[attribute];
    return result;
}

static CUresult set_attribute(CUfunction handle, CUfunction_attribute attribute, int value)
{
    sim_function *function;
    CUresult result = function_of(handle, &function);
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
    return nvs_sim_return(function_of(hfunc, &function));
}

SIM_EXPORT CUresult CUDAAPI cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice dev)
{
    sim_function *function;
    NVS_SIM_ENTER();
    return nvs_sim_return(function_of((CUfunction)kernel, &function));
}

SIM_EXPORT CUresult CUDAAPI cuFuncSetSharedMemConfig(CUfunction hfunc, CUsharedconfig config)
{
    sim_function *function;
    NVS_SIM_ENTER();
    return nvs_sim_return(function_of(hfunc, &function));
}

SIM_EXPORT CUresult CUDAAPI cuFuncGetModule(CUmodule *hmod, CUfunction hfunc)
{
    sim_function *function;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(hmod != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(function_of(hfunc, &function));
    *hmod = (CUmodule)(void *)function->module;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuFuncGetName(const char **name, CUfunction hfunc)
{
    sim_function *function;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(name != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(function_of(hfunc, &function));
    *name = function->name;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuKernelGetName(const char **name, CUkernel hfunc)
{
    sim_function *function;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(name != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(function_of((CUfunction)hfunc, &function));
    *name = function->name;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function)
{
    sim_function *found;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(state != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(function_of(function, &found));
    *state = CU_FUNCTION_LOADING_STATE_LOADED;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuFuncLoad(CUfunction function)
{
    sim_function *found;
    NVS_SIM_ENTER();
    return nvs_sim_return(function_of(function, &found));
}

/* Launches. */

static CUresult launch(CUstream handle, const CUDA_KERNEL_NODE_PARAMS *params)
{
    sim_stream *stream;
    sim_work work;
    CUresult result = nvs_sim_stream(handle, &stream);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_kernel_work(params, &work);
    return result == CUDA_SUCCESS ? nvs_sim_submit(stream, &work) : result;
}

SIM_EXPORT CUresult CUDAAPI cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                                           unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                                           unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra)
{
    const CUDA_KERNEL_NODE_PARAMS params = {.func = f, .gridDimX = gridDimX, .gridDimY = gridDimY, .gridDimZ = gridDimZ,
                                            .blockDimX = blockDimX, .blockDimY = blockDimY, .blockDimZ = blockDimZ,
                                            .sharedMemBytes = sharedMemBytes, .kernelParams = kernelParams, .extra = extra};
    NVS_SIM_ENTER();
    return nvs_sim_return(launch(hStream, &params));
}

SIM_EXPORT CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(config != NULL, CUDA_ERROR_INVALID_VALUE);
    const CUDA_KERNEL_NODE_PARAMS params = {
        .func = f, .gridDimX = config->gridDimX, .gridDimY = config->gridDimY, .gridDimZ = config->gridDimZ,
        .blockDimX = config->blockDimX, .blockDimY = config->blockDimY, .blockDimZ = config->blockDimZ,
        .sharedMemBytes = config->sharedMemBytes, .kernelParams = kernelParams, .extra = extra};
    return nvs_sim_return(launch(config->hStream, &params));
}

SIM_EXPORT CUresult CUDAAPI cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
                                                      unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
                                                      unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
                                                      void **kernelParams)
{
    const CUDA_KERNEL_NODE_PARAMS params = {.func = f, .gridDimX = gridDimX, .gridDimY = gridDimY, .gridDimZ = gridDimZ,
                                            .blockDimX = blockDimX, .blockDimY = blockDimY, .blockDimZ = blockDimZ,
                                            .sharedMemBytes = sharedMemBytes, .kernelParams = kernelParams};
    NVS_SIM_ENTER();
    NVS_SIM_CHECK((uint64_t)gridDimX * gridDimY * gridDimZ <= 16 * 32, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    return nvs_sim_return(launch(hStream, &params));
}

/* The launches of CUDA 3, without parameters of their own. */

static CUresult launch_grid(CUfunction f, int width, int height, CUstream stream)
{
    const CUDA_KERNEL_NODE_PARAMS params = {.func = f, .gridDimX = (unsigned)width, .gridDimY = (unsigned)height, .gridDimZ = 1,
                                            .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1};
    return launch(stream, &params);
}

SIM_EXPORT CUresult CUDAAPI cuLaunch(CUfunction f)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(launch_grid(f, 1, 1, NULL));
}

SIM_EXPORT CUresult CUDAAPI cuLaunchGrid(CUfunction f, int grid_width, int grid_height)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(launch_grid(f, grid_width, grid_height, NULL));
}

SIM_EXPORT CUresult CUDAAPI cuLaunchGridAsync(CUfunction f, int grid_width, int grid_height, CUstream hStream)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(launch_grid(f, grid_width, grid_height, hStream));
}
