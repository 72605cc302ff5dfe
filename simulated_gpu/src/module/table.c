/* Modules and their functions as objects. */
#include "module/module.h"

#include <stdlib.h>
#include <string.h>

NVS_SIM_DEFINE_FIND(nvs_sim_module, CUmodule, sim_module, SIM_MODULE, CUDA_ERROR_INVALID_HANDLE)

NVS_SIM_DEFINE_FIND(nvs_sim_function, CUfunction, sim_function, SIM_FUNCTION, CUDA_ERROR_INVALID_HANDLE)

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

CUresult nvs_sim_function_named(sim_module *module, const char *name, sim_function **out)
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
    *made = (sim_function){.magic = SIM_FUNCTION, .module = module, .name = copy, .next = module->functions};
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
