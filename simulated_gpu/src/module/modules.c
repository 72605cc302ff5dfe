/* Modules and libraries, their functions and global variables.
 *
 * An image is an ELF file for CUDA, a fat binary, or PTX text.  Images are not run.  A function must have a section .text.NAME in a
 * cubin, or an .entry NAME in PTX.  A fat binary may be compressed: it has every name.
 * Global variables are created at the first lookup, in device memory of the current context.
 */
#include "module/module.h"

#include <elf.h>
#include <stdlib.h>
#include <string.h>

enum image_kind { IMAGE_CUBIN, IMAGE_PTX, IMAGE_FATBIN };
typedef struct module_image {
    enum image_kind kind;
    char *bytes; /* NULL for a fat binary: its content is not read */
    size_t size;
} module_image;

typedef struct sim_module {
    uint32_t magic;
    struct sim_module *next; /* of the context */
    sim_context *context;    /* NULL for a library */
    module_image image;
    struct sim_function *functions;
    struct sim_global *globals;
} sim_module;

#define FATBIN_MAGIC 0xba55ed50u
#define FATBIN_WRAPPER_MAGIC 0x466243b1u

static CUresult measure(const void *image, size_t *bytes, enum image_kind *kind)
{
    uint32_t first;
    memcpy(&first, image, sizeof first);
    if (memcmp(image, ELFMAG, SELFMAG) == 0) {
        Elf64_Ehdr header;
        memcpy(&header, image, sizeof header);
        if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != 190 /* CUDA */)
            return CUDA_ERROR_INVALID_IMAGE;
        *kind = IMAGE_CUBIN;
        *bytes = header.e_shoff + (size_t)header.e_shentsize * header.e_shnum;
        size_t segments = header.e_phoff + (size_t)header.e_phentsize * header.e_phnum;
        if (segments > *bytes)
            *bytes = segments;
        return CUDA_SUCCESS;
    }
    if (first == FATBIN_MAGIC) {
        *kind = IMAGE_FATBIN;
        *bytes = 0;
        return CUDA_SUCCESS;
    }
    if (strstr(image, ".version") != NULL && strstr(image, ".target") != NULL) {
        *kind = IMAGE_PTX;
        *bytes = strlen(image) + 1;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_IMAGE;
}

static CUresult copy_image(const void *image, module_image *out)
{
    uint32_t first;
    if (image == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&first, image, sizeof first);
    if (first == FATBIN_WRAPPER_MAGIC) {
        memcpy(&image, (const char *)image + 8, sizeof image);
        if (image == NULL)
            return CUDA_ERROR_INVALID_IMAGE;
    }
    *out = (module_image){0};
    CUresult result = measure(image, &out->size, &out->kind);
    if (result != CUDA_SUCCESS || out->size == 0)
        return result;
    out->bytes = malloc(out->size);
    if (out->bytes == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(out->bytes, image, out->size);
    return CUDA_SUCCESS;
}

static bool same_name(const char *text, size_t length, const char *name)
{
    return strlen(name) == length && memcmp(text, name, length) == 0;
}

static bool ptx_has(const module_image *image, const char *name)
{
    for (const char *at = image->bytes; (at = strstr(at, ".entry")) != NULL;) {
        at += strlen(".entry");
        at += strspn(at, " \t\r\n");
        if (same_name(at, strcspn(at, " \t\r\n({"), name))
            return true;
    }
    return false;
}

static bool cubin_has(const module_image *image, const char *name)
{
    Elf64_Ehdr header;
    Elf64_Shdr names, section;
    memcpy(&header, image->bytes, sizeof header);
    if (header.e_shentsize != sizeof section || header.e_shstrndx >= header.e_shnum)
        return false;
    memcpy(&names, image->bytes + header.e_shoff + header.e_shstrndx * sizeof names, sizeof names);
    if (names.sh_offset + names.sh_size > image->size)
        return false;
    for (unsigned i = 0; i < header.e_shnum; i++) {
        memcpy(&section, image->bytes + header.e_shoff + i * sizeof section, sizeof section);
        const char *text = image->bytes + names.sh_offset + section.sh_name;
        if (section.sh_name < names.sh_size && strncmp(text, ".text.", 6) == 0 && strcmp(text + 6, name) == 0)
            return true;
    }
    return false;
}

static bool image_has(const module_image *image, const char *name)
{
    return image->kind == IMAGE_FATBIN || (image->kind == IMAGE_PTX ? ptx_has(image, name) : cubin_has(image, name));
}

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
    module_image copy;
    NVS_SIM_TRY(copy_image(image, &copy));
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
    NVS_SIM_CHECK(image_has(&module->image, name), CUDA_ERROR_NOT_FOUND);
    char *copy = strdup(name);
    sim_function *made = calloc(1, sizeof *made);
    if (copy == NULL || made == NULL) {
        free(copy);
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made = (sim_function){.magic = SIM_FUNCTION, .context = module->context, .name = copy, .next = module->functions};
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

LOOKUPS(cuModule, _v2, CUmodule, Function, CUfunction)
LOOKUPS(cuLibrary, , CUlibrary, Kernel, CUkernel)

SIM_EXPORT CUresult CUDAAPI cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues,
                                              unsigned int numJitOptions, CUlibraryOption *libraryOptions,
                                              void **libraryOptionValues, unsigned int numLibraryOptions)
{
    sim_module *module;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(library != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(new_module(code, &module));
    *library = (CUlibrary)(void *)module;
    return CUDA_SUCCESS;
}

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
