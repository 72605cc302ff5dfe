/* Shared by C programs of tests that use CUDA: kernels, memory whose contents are known, complaints.  Include it first.
 *
 * A program prints a line for each thing that is not as it must be; its exit code is 1 then.
 */
#ifndef CUDA_PROGRAM_H
#define CUDA_PROGRAM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* RTLD_DEFAULT */
#endif

#include <cuda.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "nvshare.h"

enum { MIB = 1 << 20 };

static unsigned complaints;

/* A check, and a call that must succeed. */
#define CHECK(condition, ...)      \
    do {                           \
        if (!(condition)) {        \
            printf(__VA_ARGS__);   \
            putchar('\n');         \
            fflush(stdout);        \
            complaints++;          \
        }                          \
    } while (0)
#define OK(call)                                                             \
    do {                                                                     \
        const CUresult said = (call);                                        \
        CHECK(said == CUDA_SUCCESS, "line %d: %s says %d", __LINE__, #call, (int)said); \
    } while (0)

/* For functions that return what the first failing call said. */
#define TRY(call)                                  \
    do {                                           \
        const CUresult failed_ = (call);           \
        if (failed_ != CUDA_SUCCESS)               \
            return failed_;                        \
    } while (0)

static CUcontext primary;
static CUfunction busy, call_host; /* kernels: for so many ns; until a function of the host, which gets `data`, has returned */
static CUmodule module;

/* The simulated GPU is busy for as long as it is told by the name alone; a card is where SPINS is defined. */
#ifdef SPINS
#define BODY                                                                                                                       \
    "{ .reg .u64 %now, %stop, %long; .reg .pred %more; ld.param.u64 %long, [ns]; mov.u64 %now, %globaltimer; add.u64 %stop, %now, %long;\n" \
    "again: mov.u64 %now, %globaltimer; setp.lt.u64 %more, %now, %stop; @%more bra again; ret; }\n"
#else
#define BODY "{ ret; }\n"
#endif
static const char image[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                            ".visible .entry nvs_call(.param .u64 function, .param .u64 data) { ret; }\n"
                            ".visible .entry nvs_busy(.param .u64 ns)" BODY;

static inline uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline CUstream stream_of(unsigned flags)
{
    CUstream stream = NULL;
    OK(cuStreamCreate(&stream, flags));
    return stream;
}

static inline CUstream new_stream(void)
{
    return stream_of(CU_STREAM_NON_BLOCKING);
}

static inline CUstream capturing(unsigned flags)
{
    const CUstream stream = stream_of(flags);
    OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    return stream;
}

static inline CUgreenCtx new_green(unsigned processors, CUcontext *context)
{
    CUdevResource all, part;
    CUdevResourceDesc description;
    CUgreenCtx green = NULL;
    unsigned groups = 1;
    OK(cuDeviceGetDevResource(0, &all, CU_DEV_RESOURCE_TYPE_SM));
    OK(cuDevSmResourceSplitByCount(&part, &groups, &all, NULL, 0, processors));
    OK(cuDevResourceGenerateDesc(&description, &part, 1));
    OK(cuGreenCtxCreate(&green, description, 0, CU_GREEN_CTX_DEFAULT_STREAM));
    OK(cuCtxFromGreenCtx(context, green));
    return green;
}

static inline void load(void)
{
    OK(cuModuleLoadData(&module, image));
    OK(cuModuleGetFunction(&busy, module, "nvs_busy"));
    OK(cuModuleGetFunction(&call_host, module, "nvs_call"));
}

static inline void begin_on(int gpu)
{
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&primary, gpu));
    OK(cuCtxSetCurrent(primary));
    load();
}

static inline void begin(void)
{
    begin_on(0);
}

static inline CUresult launch(CUstream stream, uint64_t ns)
{
    void *parameters[] = {&ns};
    return cuLaunchKernel(busy, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
}

static inline CUresult launch_call(CUfunction kernel, CUstream stream, CUhostFn function, void *data)
{
    void *parameters[] = {&function, &data};
    return cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
}

static inline CUdeviceptr filled(size_t bytes, unsigned value)
{
    CUdeviceptr pointer = 0;
    OK(cuMemAlloc(&pointer, bytes));
    OK(cuMemsetD32(pointer, value, bytes / 4));
    return pointer;
}

static inline bool holds(CUdeviceptr pointer, size_t bytes, unsigned value)
{
    unsigned *words = malloc(bytes);
    CUresult result = words != NULL ? cuMemcpyDtoH(words, pointer, bytes) : CUDA_ERROR_OUT_OF_MEMORY;
    CHECK(result == CUDA_SUCCESS, "reading memory back says %d", (int)result);
    bool same = result == CUDA_SUCCESS;
    for (size_t i = 0; same && i < bytes / 4; i++)
        same = words[i] == value;
    free(words);
    return same;
}

/* What the hook says of GPU 0. */
static inline struct nvshare_gpu of_hook(void)
{
    int (*state)(uint32_t, struct nvshare_gpu *);
    struct nvshare_gpu out = {.size = sizeof out};
    *(void **)&state = dlsym(RTLD_DEFAULT, "nvshare_gpu_state");
    CHECK(state != NULL && state(0, &out) == 0, "the hook is not there");
    return out;
}

/* Calls that it has let through its gate. */
static inline uint64_t gated(void)
{
    return of_hook().calls;
}

/* The lease goes around while this works: so what comes after it meets memory that was away. */
static inline void let_others(void)
{
    for (int i = 0; i < 4; i++) {
        OK(launch(NULL, 2000000));
        OK(cuCtxSynchronize());
    }
}

typedef struct named_case {
    const char *name;
    void (*run)(void);
} named_case;

static inline int run_case(const named_case *cases, int count, char **arguments)
{
    for (const named_case *one = cases; count > 1 && one->name != NULL; one++)
        if (strcmp(one->name, arguments[1]) == 0) {
            one->run();
            printf("%s\n", complaints == 0 ? "good" : "bad");
            return complaints != 0;
        }
    printf("no such case\n");
    return 2;
}

#endif
