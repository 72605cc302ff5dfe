/* Modules and libraries, their functions and global variables.
 *
 * A fat binary has every function that is looked up, and lists those; before a lookup, one of an invented name.
 * Global variables are created at the first lookup, in device memory of the current context.
 */
#include "module/module.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct sim_module {
    uint32_t magic;
    struct sim_module *next; /* of the context */
    sim_context *context;    /* NULL for a library */
    sim_image image;
    struct sim_function *functions;
    struct sim_global *globals;
} sim_module;

/* Global variables. */

#define GLOBAL_BYTES 65536u /* the size of constant memory; not every image has the size of a variable */

typedef struct sim_global {
    struct sim_global *next;
    sim_context *context;
    char *name;
    CUdeviceptr pointer;
} sim_global;

static CUresult global_of(sim_context *context, sim_module *module, const char *name, CUdeviceptr *pointer, size_t *bytes)
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
        CUresult result = nvs_sim_allocate(context, GLOBAL_BYTES, MEM_DEVICE, &one->pointer);
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

static void free_globals(sim_module *module)
{
    while (module->globals != NULL) {
        sim_global *one = module->globals;
        const sim_allocation *allocation = nvs_sim_find_base(one->pointer);
        module->globals = one->next;
        if (allocation != NULL && allocation->context == one->context)
            nvs_sim_release((uintptr_t)one->pointer);
        free(one->name);
        free(one);
    }
}

/* Modules and their functions as objects. */

static NVS_SIM_DEFINE_FIND(find_module, CUmodule, sim_module, SIM_MODULE, CUDA_ERROR_INVALID_HANDLE)

NVS_SIM_DEFINE_FIND(nvs_sim_function, CUfunction, sim_function, SIM_FUNCTION, CUDA_ERROR_INVALID_HANDLE)

static CUresult new_module(const void *image, sim_module **out)
{
    sim_image copy;
    NVS_SIM_TRY(nvs_sim_image_copy(image, &copy));
    sim_module *module = calloc(1, sizeof *module);
    if (module == NULL) {
        free(copy.bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    module->magic = SIM_MODULE;
    module->image = copy;
    *out = module;
    return CUDA_SUCCESS;
}

static CUresult function_named(sim_module *module, const char *name, sim_function **out)
{
    static const struct {
        const char *name;
        enum sim_kernel_model model;
    } known[] = {{"nvs_busy", KERNEL_BUSY}, {"nvs_part", KERNEL_PART}, {"nvs_copy", KERNEL_COPY}, {"nvs_call", KERNEL_CALL}};
    NVS_SIM_CHECK(out != NULL && name != NULL && *name != '\0', CUDA_ERROR_INVALID_VALUE);
    for (sim_function *one = module->functions; one != NULL; one = one->next)
        if (strcmp(one->name, name) == 0) {
            *out = one;
            return CUDA_SUCCESS;
        }
    NVS_SIM_CHECK(nvs_sim_image_has(&module->image, name), CUDA_ERROR_NOT_FOUND);
    char *copy = strdup(name);
    sim_function *made = calloc(1, sizeof *made);
    if (copy == NULL || made == NULL) {
        free(copy);
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made = (sim_function){.magic = SIM_FUNCTION, .module = module, .context = module->context, .name = copy, .next = module->functions};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(name, known[i].name) == 0)
            made->model = known[i].model;
    made->attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024;
    made->attributes[CU_FUNC_ATTRIBUTE_NUM_REGS] = 32;
    made->attributes[CU_FUNC_ATTRIBUTE_PTX_VERSION] = 90;
    made->attributes[CU_FUNC_ATTRIBUTE_BINARY_VERSION] = 90;
    made->attributes[CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT] = -1;
    module->functions = made;
    *out = made;
    return CUDA_SUCCESS;
}

/* All functions of the module exist from then on. */
static CUresult find_all(sim_module *module, unsigned *count)
{
    const char *name;
    size_t at = 0, length;
    sim_function *one;
    *count = 0;
    while (nvs_sim_image_next(&module->image, &at, &name, &length)) {
        char *copy = strndup(name, length);
        NVS_SIM_CHECK(copy != NULL, CUDA_ERROR_OUT_OF_MEMORY);
        const CUresult result = function_named(module, copy, &one);
        free(copy);
        NVS_SIM_TRY(result);
    }
    if (module->image.kind == IMAGE_FATBIN && module->functions == NULL)
        NVS_SIM_TRY(function_named(module, "unknown", &one)); /* cuFFT takes the only function of a module, whatever its name */
    for (one = module->functions; one != NULL; one = one->next)
        ++*count;
    return CUDA_SUCCESS;
}

static void free_module(sim_module *module)
{
    while (module->functions != NULL) {
        sim_function *one = module->functions;
        module->functions = one->next;
        one->magic = 0;
        free(one->name);
        free(one);
    }
    free_globals(module);
    module->magic = 0;
    free(module->image.bytes);
    free(module);
}

void nvs_sim_modules_unload(sim_context *context)
{
    while (context->modules != NULL) {
        sim_module *module = context->modules;
        context->modules = module->next;
        free_module(module);
    }
}

/* cuModule* and cuLibrary*. */

static CUresult load(CUmodule *out, const void *image)
{
    sim_context *context;
    sim_module *module;
    NVS_SIM_TRY(nvs_sim_need_current(&context));
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    NVS_SIM_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(context->error);
    NVS_SIM_TRY(new_module(image, &module));
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

/* The image in a file, followed by zeroes; to be freed. */
static CUresult read_file(const char *path, char **image)
{
    struct stat about;
    NVS_SIM_CHECK(path != NULL, CUDA_ERROR_INVALID_VALUE);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    NVS_SIM_CHECK(file >= 0, CUDA_ERROR_FILE_NOT_FOUND);
    CUresult result = fstat(file, &about) == 0 && about.st_size >= 8 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
    *image = result == CUDA_SUCCESS ? calloc(1, (size_t)about.st_size + 64) : NULL;
    if (result == CUDA_SUCCESS && *image == NULL)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS && read(file, *image, (size_t)about.st_size) != about.st_size)
        result = CUDA_ERROR_INVALID_IMAGE;
    (void)close(file);
    if (result != CUDA_SUCCESS)
        free(*image);
    return result;
}

static CUresult load_from(CUmodule *out, const char *path)
{
    char *image;
    NVS_SIM_TRY(read_file(path, &image));
    const CUresult result = load(out, image);
    free(image);
    return result;
}

NVS_SIM_ENTRY(cuModuleLoad, (CUmodule *module, const char *fname), load_from(module, fname))

SIM_EXPORT CUresult CUDAAPI cuModuleUnload(CUmodule hmod)
{
    NVS_SIM_ENTER_FIND(sim_module *module, find_module(hmod, &module));
    NVS_SIM_CHECK(module->context != NULL, CUDA_ERROR_INVALID_HANDLE);
    NVS_SIM_TRY(module->context->error);
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    sim_module **link = &module->context->modules;
    while (*link != module)
        link = &(*link)->next;
    *link = module->next;
    free_module(module);
    return CUDA_SUCCESS;
}

NVS_SIM_GETTER(cuModuleGetLoadingMode, (CUmoduleLoadingMode *mode), , CUDA_SUCCESS, mode, CU_MODULE_EAGER_LOADING)

#define LOOKUPS(prefix, version, owner, thing, type)                                                                         \
    SIM_EXPORT CUresult CUDAAPI prefix##Get##thing(type *out, owner handle, const char *name)                                \
    {                                                                                                                        \
        NVS_SIM_ENTER_FIND(sim_module *module, find_module((CUmodule)handle, &module));                                   \
        return function_named(module, name, (sim_function **)(void *)out);                                           \
    }                                                                                                                        \
    SIM_EXPORT CUresult CUDAAPI prefix##GetGlobal##version(CUdeviceptr *dptr, size_t *bytes, owner handle, const char *name) \
    {                                                                                                                        \
        sim_module *module;                                                                                                  \
        NVS_SIM_ENTER_CONTEXT();                                                                                             \
        NVS_SIM_TRY(find_module((CUmodule)handle, &module));                                                              \
        return global_of(context, module, name, dptr, bytes);                                                           \
    }

/* Questions about all functions, and about one. */

static CUresult enumerate(sim_function **out, unsigned room, CUmodule handle)
{
    sim_module *module;
    unsigned count;
    NVS_SIM_TRY(find_module(handle, &module));
    NVS_SIM_CHECK(out != NULL || room == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find_all(module, &count));
    for (sim_function *one = module->functions; one != NULL && room-- != 0; one = one->next)
        *out++ = one;
    return CUDA_SUCCESS;
}

static CUresult count_all(unsigned *count, CUmodule handle)
{
    sim_module *module;
    NVS_SIM_TRY(find_module(handle, &module));
    return count != NULL ? find_all(module, count) : CUDA_ERROR_INVALID_VALUE;
}

NVS_SIM_ENTRY(cuModuleGetFunctionCount, (unsigned int *count, CUmodule mod), count_all(count, mod))
NVS_SIM_ENTRY(cuLibraryGetKernelCount, (unsigned int *count, CUlibrary lib), count_all(count, (CUmodule)lib))
NVS_SIM_ENTRY(cuModuleEnumerateFunctions, (CUfunction *functions, unsigned int numFunctions, CUmodule mod),
              enumerate((sim_function **)(void *)functions, numFunctions, mod))
NVS_SIM_ENTRY(cuLibraryEnumerateKernels, (CUkernel *kernels, unsigned int numKernels, CUlibrary lib),
              enumerate((sim_function **)(void *)kernels, numKernels, (CUmodule)lib))

static CUresult parameter(CUfunction handle, size_t index, size_t *offset, size_t *bytes)
{
    sim_function *function;
    size_t unused;
    NVS_SIM_TRY(nvs_sim_function(handle, &function));
    NVS_SIM_CHECK(offset != NULL, CUDA_ERROR_INVALID_VALUE);
    return nvs_sim_image_parameter(&function->module->image, function->name, index, offset, bytes != NULL ? bytes : &unused);
}

static CUresult count_parameters(CUfunction handle, size_t *count)
{
    size_t unused;
    CUresult result;
    NVS_SIM_CHECK(count != NULL, CUDA_ERROR_INVALID_VALUE);
    for (*count = 0; (result = parameter(handle, *count, &unused, NULL)) == CUDA_SUCCESS; ++*count)
        ;
    return result == CUDA_ERROR_INVALID_VALUE ? CUDA_SUCCESS : result;
}

#define ABOUT(prefix, type, owner, Owner)                                                                                    \
    NVS_SIM_GETTER(prefix##GetName, (const char **name, type handle), sim_function *function,                                \
                   nvs_sim_function((CUfunction)handle, &function), name, function->name)                                    \
    NVS_SIM_GETTER(prefix##Get##Owner, (owner *out, type handle), sim_function *function,                                    \
                   nvs_sim_function((CUfunction)handle, &function), out, (owner)(void *)function->module)                    \
    NVS_SIM_ENTRY(prefix##GetParamInfo, (type handle, size_t paramIndex, size_t *paramOffset, size_t *paramSize),            \
                  parameter((CUfunction)handle, paramIndex, paramOffset, paramSize))                                         \
    NVS_SIM_ENTRY(prefix##GetParamCount, (type handle, size_t *paramCount), count_parameters((CUfunction)handle, paramCount))

ABOUT(cuFunc, CUfunction, CUmodule, Module)
ABOUT(cuKernel, CUkernel, CUlibrary, Library)

LOOKUPS(cuModule, _v2, CUmodule, Function, CUfunction)
LOOKUPS(cuLibrary, , CUlibrary, Kernel, CUkernel)

static CUresult load_library(CUlibrary *out, const void *image)
{
    sim_module *module;
    NVS_SIM_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(new_module(image, &module));
    *out = (CUlibrary)(void *)module;
    return CUDA_SUCCESS;
}

static CUresult load_library_from(CUlibrary *out, const char *path)
{
    char *image;
    NVS_SIM_TRY(read_file(path, &image));
    const CUresult result = load_library(out, image);
    free(image);
    return result;
}

NVS_SIM_ENTRY(cuLibraryLoadData, (CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues,
                                  unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues,
                                  unsigned int numLibraryOptions),
              load_library(library, code))
NVS_SIM_ENTRY(cuLibraryLoadFromFile, (CUlibrary *library, const char *fileName, CUjit_option *jitOptions, void **jitOptionsValues,
                                      unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues,
                                      unsigned int numLibraryOptions),
              load_library_from(library, fileName))

SIM_EXPORT CUresult CUDAAPI cuLibraryUnload(CUlibrary library)
{
    NVS_SIM_ENTER_FIND(sim_module *module, find_module((CUmodule)library, &module));
    free_module(module);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuLibraryGetModule(CUmodule *pMod, CUlibrary library)
{
    sim_module *module;
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(pMod != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find_module((CUmodule)library, &module));
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
