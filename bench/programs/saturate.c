/* Keeps a GPU busy with short kernels and notes every launch that had to wait: one of the programs of nvshare.bench.handover.
 *
 * usage: saturate SECONDS KERNEL_NS DEPTH
 * Never more than DEPTH kernels in flight, by events of its own, so that a launch blocks for the lease and for nothing else.
 * SIGTERM ends it before its time, in order.  Prints one JSON object: the process, its launches, and [called_ns, returned_ns] (CLOCK_MONOTONIC) of each launch
 * that took longer than 50 us.
 */
#define _GNU_SOURCE
#include "busy_kernel.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { MAX_DEPTH = 8192, MAX_STAMPS = 65536, BLOCKED_NS = 50000 };

static const char kernel[] = PTX_HEAD PTX_BUSY;

static int (*cu_init)(unsigned);
static int (*cu_device_get)(int *, int);
static int (*cu_retain)(void **, int);
static int (*cu_set_current)(void *);
static int (*cu_stream_create)(void **, unsigned);
static int (*cu_synchronize)(void);
static int (*cu_module_load)(void **, const void *);
static int (*cu_get_function)(void **, void *, const char *);
static int (*cu_launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static int (*cu_event_create)(void **, unsigned);
static int (*cu_event_record)(void *, void *);
static int (*cu_event_wait)(void *);

static uint64_t stamps[MAX_STAMPS][2];
static volatile sig_atomic_t stopped;

static void stop(int number)
{
    (void)number;
    stopped = 1;
}

static void *symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "saturate: the driver has no %s\n", name);
        exit(1);
    }
    return found;
}

static void check(int result, const char *what)
{
    if (result != 0) {
        fprintf(stderr, "saturate: %s: CUDA error %d\n", what, result);
        exit(1);
    }
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void find_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL) {
        fprintf(stderr, "saturate: %s\n", dlerror());
        exit(1);
    }
    *(void **)&cu_init = symbol(library, "cuInit");
    *(void **)&cu_device_get = symbol(library, "cuDeviceGet");
    *(void **)&cu_retain = symbol(library, "cuDevicePrimaryCtxRetain");
    *(void **)&cu_set_current = symbol(library, "cuCtxSetCurrent");
    *(void **)&cu_stream_create = symbol(library, "cuStreamCreate");
    *(void **)&cu_synchronize = symbol(library, "cuCtxSynchronize");
    *(void **)&cu_module_load = symbol(library, "cuModuleLoadData");
    *(void **)&cu_get_function = symbol(library, "cuModuleGetFunction");
    *(void **)&cu_launch = symbol(library, "cuLaunchKernel");
    *(void **)&cu_event_create = symbol(library, "cuEventCreate");
    *(void **)&cu_event_record = symbol(library, "cuEventRecord");
    *(void **)&cu_event_wait = symbol(library, "cuEventSynchronize");
}

int main(int argc, char **argv)
{
    double seconds = argc == 4 ? atof(argv[1]) : 0;
    uint64_t duration = argc == 4 ? strtoull(argv[2], NULL, 10) : 0, launches = 0, end;
    int depth = argc == 4 ? atoi(argv[3]) : 0, device;
    size_t count = 0;
    void *context, *stream, *module, *function, *events[MAX_DEPTH], *arguments[] = {&duration};
    if (seconds <= 0 || duration == 0 || depth < 1 || depth > MAX_DEPTH) {
        fprintf(stderr, "usage: saturate SECONDS KERNEL_NS DEPTH (at most %d)\n", MAX_DEPTH);
        return 2;
    }
    signal(SIGTERM, stop);
    find_driver();
    check(cu_init(0), "cuInit");
    check(cu_device_get(&device, 0), "cuDeviceGet");
    check(cu_retain(&context, device), "cuDevicePrimaryCtxRetain");
    check(cu_set_current(context), "cuCtxSetCurrent");
    check(cu_stream_create(&stream, 1), "cuStreamCreate");
    check(cu_module_load(&module, kernel), "cuModuleLoadData");
    check(cu_get_function(&function, module, "nvs_busy"), "cuModuleGetFunction");
    for (int i = 0; i < depth; i++)
        check(cu_event_create(&events[i], 2 /* no timing */), "cuEventCreate");
    end = now_ns() + (uint64_t)(seconds * 1e9);
    for (;;) {
        void *event = events[launches % (uint64_t)depth];
        uint64_t called, returned;
        if (launches >= (uint64_t)depth)
            check(cu_event_wait(event), "cuEventSynchronize");
        called = now_ns();
        if (called >= end || stopped)
            break;
        check(cu_launch(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL), "cuLaunchKernel");
        returned = now_ns();
        if (returned - called > BLOCKED_NS && count < MAX_STAMPS) {
            stamps[count][0] = called;
            stamps[count++][1] = returned;
        }
        check(cu_event_record(event, stream), "cuEventRecord");
        launches++;
    }
    check(cu_synchronize(), "cuCtxSynchronize");
    printf("{\"process_id\": %d, \"launches\": %llu, \"blocked\": [", (int)getpid(), (unsigned long long)launches);
    for (size_t i = 0; i < count; i++)
        printf("%s[%llu, %llu]", i ? ", " : "", (unsigned long long)stamps[i][0], (unsigned long long)stamps[i][1]);
    printf("]}\n");
    return 0;
}
