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

typedef struct sim_image {
    enum sim_image_kind { IMAGE_CUBIN, IMAGE_PTX, IMAGE_FATBIN } kind;
    char *bytes; /* NULL for a fat binary: its content is not read */
    size_t size;
} sim_image;

typedef struct sim_function {
    uint32_t magic;
    struct sim_function *next;
    struct sim_module *module;
    sim_context *context; /* of its module; NULL: of a library */
    char *name;
    enum sim_kernel_model model;
    int attributes[CU_FUNC_ATTRIBUTE_MAX];
} sim_function;

/* images.c */
CUresult nvs_sim_image_copy(const void *image, sim_image *out);
bool nvs_sim_image_has(const sim_image *image, const char *function);
/* Finds the next function.  *at is 0 at first.  False: there is none, or it is a fat binary. */
bool nvs_sim_image_next(const sim_image *image, size_t *at, const char **name, size_t *length);
CUresult nvs_sim_image_parameter(const sim_image *image, const char *function, size_t index, size_t *offset, size_t *bytes);

/* modules.c */
CUresult nvs_sim_function(CUfunction handle, sim_function **out);
void nvs_sim_modules_unload(sim_context *context);

/* kernels.c */
CUresult nvs_sim_kernel_work(const CUDA_KERNEL_NODE_PARAMS *launch, sim_work *out);

#endif
