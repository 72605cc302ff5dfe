/* Global variables: created at the first lookup, in device memory of the current context. */
#include "module/module.h"

#include <stdlib.h>
#include <string.h>

#define GLOBAL_BYTES 65536u /* the size of constant memory; not every image has the size of a variable */

typedef struct sim_global {
    struct sim_global *next;
    sim_context *context;
    char *name;
    CUdeviceptr pointer;
} sim_global;

CUresult nvs_sim_global(sim_context *context, sim_module *module, const char *name, CUdeviceptr *pointer, size_t *bytes)
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

void nvs_sim_globals_free(sim_module *module)
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
