/* The double's side of CUPTI: an observer of calls and of ended work, and the library that the driver loads for a tool. */
#include "base/sim.h"

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

/* A name that outlives the module that it is from: work may, and so may a tool's record of it. */
static const char *kept(const char *name)
{
    static struct name {
        struct name *next;
        char text[];
    } *all;
    for (struct name *one = all; one != NULL; one = one->next)
        if (strcmp(one->text, name) == 0)
            return one->text;
    struct name *made = malloc(sizeof *made + strlen(name) + 1);
    if (made == NULL)
        return "";
    memcpy(made->text, name, strlen(name) + 1);
    made->next = all;
    all = made;
    return made->text;
}

void nvs_sim_mark(sim_op *op)
{
    const CUDA_KERNEL_NODE_PARAMS *launch = &op->work.u.kernel;
    op->call = nvs_sim_thread.call;
    op->symbol = "";
    if (op->work.kind == OP_KERNEL) {
        const sim_function *function = (const sim_function *)(void *)(launch->func != NULL ? launch->func : (CUfunction)launch->kern);
        if (function != NULL && function->magic == SIM_FUNCTION)
            op->symbol = kept(function->name);
    }
}

/* As CUPTI has it: a prefetch of managed memory is no copy, and an event no work. */
void nvs_sim_tell_ran(const nvs_sim_observer *watcher, const sim_op *op)
{
    switch (op->work.kind) {
    case OP_KERNEL: watcher->ran(NVS_SIM_KERNEL, op->symbol, op->call, 0); break;
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
