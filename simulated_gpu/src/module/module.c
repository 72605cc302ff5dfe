/* Modules, libraries, kernels and functions.
 *
 * Images are not run.  An image must look like one (ELF for CUDA, a fat binary, PTX text).  Names are checked where the
 * image shows them: section .text.NAME of a cubin, .entry NAME of PTX; a fat binary may be compressed, so any name is found there.
 */
#include "base/sim.h"

#include <elf.h>
#include <stdlib.h>
#include <string.h>

#define FATBIN_MAGIC 0xba55ed50u
#define FATBIN_WRAPPER_MAGIC 0x466243b1u

static CUresult measure(const void *image, size_t *bytes, enum sim_image *kind)
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
        uint64_t rest;
        memcpy(&rest, (const char *)image + 8, sizeof rest);
        *kind = IMAGE_FATBIN;
        *bytes = 0; /* not kept: its content is not looked at */
        return CUDA_SUCCESS;
    }
    if (strstr(image, ".version") != NULL && strstr(image, ".target") != NULL) {
        *kind = IMAGE_PTX;
        *bytes = strlen(image) + 1;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_IMAGE;
}

CUresult nvs_sim_module_from_image(const void *image, sim_module **out)
{
    size_t bytes;
    enum sim_image kind;
    uint32_t first;
    if (image == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&first, image, sizeof first);
    if (first == FATBIN_WRAPPER_MAGIC) {
        memcpy(&image, (const char *)image + 8, sizeof image);
        if (image == NULL)
            return CUDA_ERROR_INVALID_IMAGE;
    }
    CUresult result = measure(image, &bytes, &kind);
    if (result != CUDA_SUCCESS)
        return result;
    sim_module *module = calloc(1, sizeof *module);
    if (module == NULL || (bytes != 0 && (module->image = malloc(bytes)) == NULL)) {
        free(module);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (bytes != 0)
        memcpy(module->image, image, bytes);
    module->bytes = bytes;
    module->kind = kind;
    module->magic = SIM_MODULE;
    *out = module;
    return CUDA_SUCCESS;
}

/* Calls visit with each name that the image shows, until it returns true. */
static bool each_name(const sim_module *module, bool (*visit)(const char *name, size_t length, void *argument), void *argument)
{
    if (module->kind == IMAGE_PTX) {
        const char *at = module->image;
        while ((at = strstr(at, ".entry")) != NULL) {
            at += strlen(".entry");
            at += strspn(at, " \t\r\n");
            size_t length = strcspn(at, " \t\r\n({");
            if (length != 0 && visit(at, length, argument))
                return true;
        }
        return false;
    }
    Elf64_Ehdr header;
    Elf64_Shdr names, section;
    memcpy(&header, module->image, sizeof header);
    if (header.e_shentsize != sizeof section || header.e_shstrndx >= header.e_shnum)
        return false;
    memcpy(&names, module->image + header.e_shoff + header.e_shstrndx * sizeof names, sizeof names);
    if (names.sh_offset + names.sh_size > module->bytes)
        return false;
    for (unsigned i = 0; i < header.e_shnum; i++) {
        memcpy(&section, module->image + header.e_shoff + i * sizeof section, sizeof section);
        if (section.sh_name >= names.sh_size)
            continue;
        const char *name = module->image + names.sh_offset + section.sh_name;
        if (strncmp(name, ".text.", 6) == 0 && visit(name + 6, strlen(name + 6), argument))
            return true;
    }
    return false;
}

static bool same_name(const char *name, size_t length, void *argument)
{
    return strlen(argument) == length && memcmp(name, argument, length) == 0;
}

CUresult nvs_sim_function_named(sim_module *module, const char *name, size_t length, sim_function **out)
{
    for (sim_function *one = module->functions; one != NULL; one = one->next)
        if (strlen(one->name) == length && memcmp(one->name, name, length) == 0) {
            *out = one;
            return CUDA_SUCCESS;
        }
    char *copy = strndup(name, length);
    sim_function *made = calloc(1, sizeof *made);
    if (copy == NULL || made == NULL) {
        free(copy);
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (module->kind != IMAGE_FATBIN && !each_name(module, same_name, copy)) {
        free(copy);
        free(made);
        return CUDA_ERROR_NOT_FOUND;
    }
    *made = (sim_function){.magic = SIM_FUNCTION, .module = module, .name = copy, .next = module->functions};
    made->busy = strcmp(copy, "nvs_busy") == 0;
    made->copies = strcmp(copy, "nvs_copy") == 0;
    made->attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024;
    made->attributes[CU_FUNC_ATTRIBUTE_NUM_REGS] = 32;
    made->attributes[CU_FUNC_ATTRIBUTE_PTX_VERSION] = 90;
    made->attributes[CU_FUNC_ATTRIBUTE_BINARY_VERSION] = 90;
    made->attributes[CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT] = -1;
    module->functions = made;
    *out = made;
    return CUDA_SUCCESS;
}

typedef struct collecting {
    sim_module *module;
    CUresult result;
} collecting;

static bool collect(const char *name, size_t length, void *argument)
{
    collecting *state = argument;
    sim_function *ignored;
    state->result = nvs_sim_function_named(state->module, name, length, &ignored);
    return state->result != CUDA_SUCCESS;
}

/* Makes a function of every name that the image shows; those of a fat binary are not known. */
CUresult nvs_sim_module_list(sim_module *module, size_t *count)
{
    collecting state = {.module = module, .result = CUDA_SUCCESS};
    if (module->kind != IMAGE_FATBIN)
        each_name(module, collect, &state);
    *count = 0;
    for (sim_function *one = module->functions; one != NULL; one = one->next)
        ++*count;
    return state.result;
}

void nvs_sim_module_free(sim_module *module)
{
    while (module->functions != NULL) {
        sim_function *one = module->functions;
        module->functions = one->next;
        one->magic = 0;
        free(one->name);
        free(one);
    }
    nvs_sim_globals_free(module);
    module->magic = 0;
    free(module->image);
    free(module);
}

void nvs_sim_modules_unload(sim_context *context)
{
    while (context->modules != NULL) {
        sim_module *module = context->modules;
        context->modules = module->next;
        nvs_sim_module_free(module);
    }
}

/* The first parameters, each of 8 bytes, of a kernel that is known to have so many; false: none were given. */
static bool read_parameters(const CUDA_KERNEL_NODE_PARAMS *launch, uint64_t *out, size_t count)
{
    for (size_t i = 0; launch->kernelParams != NULL && i < count; i++) {
        if (launch->kernelParams[i] == NULL)
            return false;
        memcpy(&out[i], launch->kernelParams[i], sizeof out[i]);
    }
    bool found = launch->kernelParams != NULL;
    for (size_t i = 0; launch->extra != NULL && launch->extra[i] != CU_LAUNCH_PARAM_END; i += 2)
        if (launch->extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
            memcpy(out, launch->extra[i + 1], count * sizeof *out);
            found = true;
        }
    return found;
}

CUresult nvs_sim_kernel_work(const CUDA_KERNEL_NODE_PARAMS *launch, sim_work *out)
{
    const unsigned grid[3] = {launch->gridDimX, launch->gridDimY, launch->gridDimZ};
    const unsigned block[3] = {launch->blockDimX, launch->blockDimY, launch->blockDimZ};
    CUfunction handle = launch->func != NULL ? launch->func : (CUfunction)launch->kern;
    sim_function *function = (sim_function *)(void *)handle;
    if (function == NULL || function->magic != SIM_FUNCTION)
        return CUDA_ERROR_INVALID_HANDLE;
    for (int i = 0; i < 3; i++)
        if (grid[i] == 0 || block[i] == 0)
            return CUDA_ERROR_INVALID_VALUE;
    if ((uint64_t)block[0] * block[1] * block[2] > 1024 || grid[0] > 2147483647u || grid[1] > 65535 || grid[2] > 65535)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t given[3] = {0};
    *out = (sim_work){.kind = OP_KERNEL, .duration_ns = nvs_sim_settings.kernel_ns, .u.kernel = *launch};
    if (function->busy && read_parameters(launch, given, 1))
        out->duration_ns = given[0];
    if (function->copies && read_parameters(launch, given, 3)) {
        out->u.to = given[0];
        out->u.from = given[1];
        out->u.bytes = 4 * given[2];
    }
    return CUDA_SUCCESS;
}
