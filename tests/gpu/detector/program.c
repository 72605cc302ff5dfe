/* A CUDA program some of whose work does not pass the gate, for the tests of the bypass detector.
 *
 *   gated      100 launches, a copy, a memset, and a graph of 3 kernels twice: all through the functions that it is linked with
 *   raw        the same, and beside the gate: 3 launches, 2 copies, 1 graph of 3 kernels
 *
 * The way around the hook: libc's own dlsym, asked of libc, gives the driver's own functions.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MUST(call)                                                   \
    do {                                                             \
        int failed = (int)(call);                                    \
        if (failed != 0) {                                           \
            fprintf(stderr, "%s: %d\n", #call, failed);              \
            exit(9);                                                 \
        }                                                            \
    } while (0)

static const char image[] = ".version 8.0\n.target sm_75\n.address_size 64\n"
                            ".visible .entry nvs_busy(.param .u64 ns) { ret; }\n";

static CUcontext context;
static CUfunction kernel;
static CUstream stream;
static CUdeviceptr memory;
static char host[4096];

static __typeof__(&cuLaunchKernel) raw_launch;
static __typeof__(&cuMemcpyHtoD) raw_copy;
static __typeof__(&cuGraphLaunch) raw_graph_launch;

static void begin(void)
{
    CUmodule module;
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&context, 0));
    MUST(cuCtxSetCurrent(context));
    MUST(cuModuleLoadData(&module, image));
    MUST(cuModuleGetFunction(&kernel, module, "nvs_busy"));
    MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    MUST(cuMemAlloc(&memory, sizeof host));
}

static void find_raw(void)
{
    void *libc = dlopen("libc.so.6", RTLD_NOLOAD | RTLD_LAZY), *driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
    void *address = libc != NULL ? dlsym(libc, "dlsym") : NULL;
    void *(*find)(void *, const char *);
    memcpy(&find, &address, sizeof find);
    if (find == NULL || driver == NULL)
        exit(9);
    address = find(driver, "cuLaunchKernel");
    memcpy(&raw_launch, &address, sizeof address);
    address = find(driver, "cuMemcpyHtoD_v2");
    memcpy(&raw_copy, &address, sizeof address);
    address = find(driver, "cuGraphLaunch");
    memcpy(&raw_graph_launch, &address, sizeof address);
}

static void launch(__typeof__(&cuLaunchKernel) function, int times)
{
    uint64_t duration_ns = 1000;
    void *arguments[] = {&duration_ns};
    for (int i = 0; i < times; i++)
        MUST(function(kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL));
}

static CUgraphExec graph(void)
{
    CUgraph made;
    CUgraphExec ready;
    MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    launch(cuLaunchKernel, 3);
    MUST(cuStreamEndCapture(stream, &made));
    MUST(cuGraphInstantiateWithFlags(&ready, made, 0));
    return ready;
}

static void gated(void)
{
    CUgraphExec three = graph();
    launch(cuLaunchKernel, 100);
    MUST(cuMemcpyHtoD(memory, host, sizeof host));
    MUST(cuMemsetD8(memory, 1, sizeof host));
    MUST(cuGraphLaunch(three, stream));
    MUST(cuGraphLaunch(three, stream));
    MUST(cuCtxSynchronize());
}

static void raw(void)
{
    CUgraphExec three = graph();
    find_raw();
    launch(raw_launch, 3);
    MUST(raw_copy(memory, host, sizeof host));
    MUST(raw_copy(memory, host, sizeof host));
    MUST(raw_graph_launch(three, stream));
    MUST(cuCtxSynchronize());
}

int main(int count, char **words)
{
    begin();
    gated();
    if (count == 2 && strcmp(words[1], "raw") == 0)
        raw();
    return 0;
}
