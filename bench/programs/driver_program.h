/* What programs of the benchmarks that speak to the driver have in common: a context, a stream, a module.
 *
 * The driver is found as a CUDA runtime finds it: dlopen, dlsym, calls through pointers.
 * Wants _GNU_SOURCE.  Non-goals: what one program does.
 */
#ifndef NVSHARE_BENCH_DRIVER_PROGRAM_H
#define NVSHARE_BENCH_DRIVER_PROGRAM_H

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void *library, *stream, *module;
static int (*cu_launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static int (*cu_stream_synchronize)(void *);
static int (*cu_allocate)(uint64_t *, size_t);

static void check(int result, const char *what)
{
    if (result != 0) {
        fprintf(stderr, "%s: %s: error %d\n", program_invocation_short_name, what, result);
        exit(1);
    }
}

static void *symbol(void *of, const char *name)
{
    void *found = dlsym(of, name);
    if (found == NULL) {
        fprintf(stderr, "%s: there is no %s\n", program_invocation_short_name, name);
        exit(1);
    }
    return found;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The primary context of the first GPU, with a stream and the kernels of a text in PTX. */
static void open_driver(const char *ptx)
{
    enum { NON_BLOCKING = 1 };
    int (*init)(unsigned), (*device_get)(int *, int), (*retain)(void **, int), (*set_current)(void *);
    int (*stream_create)(void **, unsigned), (*load)(void **, const void *);
    int device;
    void *context;
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL) {
        fprintf(stderr, "%s: %s\n", program_invocation_short_name, dlerror());
        exit(1);
    }
    *(void **)&init = symbol(library, "cuInit");
    *(void **)&device_get = symbol(library, "cuDeviceGet");
    *(void **)&retain = symbol(library, "cuDevicePrimaryCtxRetain");
    *(void **)&set_current = symbol(library, "cuCtxSetCurrent");
    *(void **)&stream_create = symbol(library, "cuStreamCreate");
    *(void **)&load = symbol(library, "cuModuleLoadData");
    *(void **)&cu_allocate = symbol(library, "cuMemAlloc_v2");
    *(void **)&cu_launch = symbol(library, "cuLaunchKernel");
    *(void **)&cu_stream_synchronize = symbol(library, "cuStreamSynchronize");
    check(init(0), "cuInit");
    check(device_get(&device, 0), "cuDeviceGet");
    check(retain(&context, device), "cuDevicePrimaryCtxRetain");
    check(set_current(context), "cuCtxSetCurrent");
    check(stream_create(&stream, NON_BLOCKING), "cuStreamCreate");
    check(load(&module, ptx), "cuModuleLoadData");
}

static void *kernel_of_module(const char *name)
{
    int (*get)(void **, void *, const char *);
    void *function;
    *(void **)&get = symbol(library, "cuModuleGetFunction");
    check(get(&function, module, name), "cuModuleGetFunction");
    return function;
}

#endif
