/* Modules and their functions as objects. */
#include "module/module.h"

#include <stdlib.h>
#include <string.h>

CUresult nvs_sim_module(CUmodule handle, sim_module **out)
{
    sim_module *module = (sim_module *)(void *)handle;
    if (module == NULL || module->magic != SIM_MODULE)
        return CUDA_ERROR_INVALID_HANDLE;
    *out = module;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_function(CUfunction handle, sim_function **out)
{
    sim_function *function = (sim_function *)(void *)handle;
    if (function == NULL || function->magic != SIM_FUNCTION)
        return CUDA_ERROR_INVALID_HANDLE;
    *out = function;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_module_new(const void *image, sim_module **out)
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

static bool same_name(const char *name, size_t length, void *argument)
{
    return strlen(argument) == length && memcmp(name, argument, length) == 0;
}

static CUresult function_named(sim_module *module, const char *name, size_t length, sim_function **out)
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
    if (module->image.kind != IMAGE_FATBIN && !nvs_sim_image_names(&module->image, same_name, copy)) {
        free(copy);
        free(made);
        return CUDA_ERROR_NOT_FOUND;
    }
    *made = (sim_function){.magic = SIM_FUNCTION, .module = module, .name = copy, .next = module->functions};
    made->busy = strcmp(copy, "nvs_busy") == 0;
    made->part = strcmp(copy, "nvs_part") == 0;
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

CUresult nvs_sim_function_named(sim_module *module, const char *name, sim_function **out)
{
    if (name == NULL || *name == '\0')
        return CUDA_ERROR_INVALID_VALUE;
    return function_named(module, name, strlen(name), out);
}

typedef struct collecting {
    sim_module *module;
    CUresult result;
} collecting;

static bool collect(const char *name, size_t length, void *argument)
{
    collecting *state = argument;
    sim_function *ignored;
    state->result = function_named(state->module, name, length, &ignored);
    return state->result != CUDA_SUCCESS;
}

CUresult nvs_sim_module_count(sim_module *module, unsigned *out)
{
    collecting state = {.module = module, .result = CUDA_SUCCESS};
    nvs_sim_image_names(&module->image, collect, &state);
    *out = 0;
    for (sim_function *one = module->functions; one != NULL; one = one->next)
        ++*out;
    return state.result;
}

CUresult nvs_sim_module_list(sim_module *module, sim_function **out, unsigned room)
{
    unsigned count;
    CUresult result = nvs_sim_module_count(module, &count);
    for (sim_function *one = module->functions; result == CUDA_SUCCESS && one != NULL && room != 0; one = one->next, room--)
        *out++ = one;
    return result;
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
    free(module->image.bytes);
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
