/* The double's side of CUPTI: an observer of calls and of ended work, and the library that the driver loads for a tool. */
#include "sim.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

const nvs_sim_observer *_Atomic nvs_sim_watcher;

static _Atomic uint32_t calls; /* a number for each; orders nothing */

SIM_EXPORT void nvs_sim_observe(const nvs_sim_observer *observer)
{
    atomic_store_explicit(&nvs_sim_watcher, observer, memory_order_release); /* pairs with the acquire in nvs_sim_enter */
}

void nvs_sim_tell_call(const nvs_sim_observer *watcher, const char *function)
{
    nvs_sim_thread.call = atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed) + 1;
    watcher->call(function, nvs_sim_thread.call);
}

static const char *kernel_name(const sim_op *op)
{
    const CUDA_KERNEL_NODE_PARAMS *launch = &op->work.u.kernel;
    const sim_function *function = (const sim_function *)(void *)(launch->func != NULL ? launch->func : (CUfunction)launch->kern);
    return function != NULL && function->magic == SIM_FUNCTION ? function->name : "";
}

/* As CUPTI has it: a prefetch of managed memory is no copy, and an event no work. */
void nvs_sim_tell_ran(const nvs_sim_observer *watcher, const sim_op *op)
{
    switch (op->work.kind) {
    case OP_KERNEL: watcher->ran(NVS_SIM_KERNEL, kernel_name(op), op->call, 0); break;
    case OP_COPY: watcher->ran(NVS_SIM_COPY, "", op->call, op->work.bytes); break;
    case OP_FILL: watcher->ran(NVS_SIM_MEMSET, "", op->call, op->work.bytes); break;
    default: break;
    }
}

/* A tool that cannot be loaded does not stop the program. */
void nvs_sim_inject(void)
{
    const char *path = getenv("CUDA_INJECTION64_PATH");
    void *library = path != NULL && *path != '\0' ? dlopen(path, RTLD_NOW) : NULL;
    void *address = library != NULL ? dlsym(library, "InitializeInjection") : NULL;
    int (*begin)(void);
    memcpy(&begin, &address, sizeof begin);
    if (begin != NULL)
        (void)begin();
    else if (path != NULL && *path != '\0')
        nvs_sim_say("CUDA_INJECTION64_PATH=%s: %s", path, library == NULL ? dlerror() : "no InitializeInjection");
}
