/* Modules, libraries, functions and kernels.  A library is a module without a context; a kernel handle is a function handle. */
#ifndef SIM_MODULE_H
#define SIM_MODULE_H

#include "memory/memory.h"

enum sim_kernel_model {
    KERNEL_OPAQUE, /* the default duration and demand */
    KERNEL_BUSY,   /* nvs_busy(duration) */
    KERNEL_PART,   /* nvs_part(duration, demand in millionths of the multiprocessors) */
    KERNEL_CALL,   /* nvs_call(function, data): ends when this function on the host has returned */
    KERNEL_COPY,   /* nvs_copy(target, source, count): copies words of 4 bytes */
};

typedef struct sim_function {
    uint32_t magic;
    struct sim_function *next;
    sim_context *context; /* of its module; NULL: of a library */
    char *name;
    enum sim_kernel_model model;
    int attributes[CU_FUNC_ATTRIBUTE_MAX];
} sim_function;

/* modules.c */
CUresult nvs_sim_function(CUfunction handle, sim_function **out);
void nvs_sim_modules_unload(sim_context *context);

/* kernels.c */
CUresult nvs_sim_kernel_work(const CUDA_KERNEL_NODE_PARAMS *launch, sim_work *out);

#endif
