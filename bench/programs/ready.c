/* Initialises CUDA when its standard input ends, has one kernel run, and prints when (CLOCK_MONOTONIC, ns): a program of nvshare.bench.startup.
 *
 * Many of them share one pipe as input, so that they all begin at the same moment.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static const char kernel[] = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing()\n{\n  ret;\n}\n";

static void *library;

static void *symbol(const char *name)
{
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "ready: the driver has no %s\n", name);
        exit(1);
    }
    return found;
}

static void check(int result, const char *what)
{
    if (result != 0) {
        fprintf(stderr, "ready: %s: CUDA error %d\n", what, result);
        exit(1);
    }
}

int main(void)
{
    int (*init)(unsigned), (*device_get)(int *, int), (*retain)(void **, int), (*set_current)(void *), (*synchronize)(void);
    int (*load)(void **, const void *), (*get)(void **, void *, const char *);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    int device;
    char byte;
    void *context, *module, *function;
    struct timespec now;
    puts("waiting");
    fflush(stdout);
    while (read(STDIN_FILENO, &byte, 1) > 0)
        ;
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL) {
        fprintf(stderr, "ready: %s\n", dlerror());
        return 1;
    }
    *(void **)&init = symbol("cuInit");
    *(void **)&device_get = symbol("cuDeviceGet");
    *(void **)&retain = symbol("cuDevicePrimaryCtxRetain");
    *(void **)&set_current = symbol("cuCtxSetCurrent");
    *(void **)&synchronize = symbol("cuCtxSynchronize");
    *(void **)&load = symbol("cuModuleLoadData");
    *(void **)&get = symbol("cuModuleGetFunction");
    *(void **)&launch = symbol("cuLaunchKernel");
    check(init(0), "cuInit");
    check(device_get(&device, 0), "cuDeviceGet");
    check(retain(&context, device), "cuDevicePrimaryCtxRetain");
    check(set_current(context), "cuCtxSetCurrent");
    check(load(&module, kernel), "cuModuleLoadData");
    check(get(&function, module, "nothing"), "cuModuleGetFunction");
    check(launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
    check(synchronize(), "cuCtxSynchronize");
    clock_gettime(CLOCK_MONOTONIC, &now);
    printf("%llu\n", (unsigned long long)now.tv_sec * 1000000000u + (unsigned long long)now.tv_nsec);
    return 0;
}
