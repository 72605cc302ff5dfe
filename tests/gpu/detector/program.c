/* A CUDA program some of whose work does not pass the gate, for the tests of the bypass detector.
 *
 *   gated      100 launches, a copy, a memset, and a graph of 3 kernels twice: all through the functions that it is linked with
 *   raw        the same, and beside the gate: 3 launches, 2 copies, 1 graph of 3 kernels
 *   raw-fails  1 launch beside the gate, then exit code 7
 *   threads    4 threads of 50 launches; beside each, 1 raw launch in a fifth thread
 *   quick      1 launch, then _exit(0)
 *   killed     1 launch, then dies by SIGTERM, so that no report is complete
 *   nothing    no CUDA at all
 *   two        a child, forked before CUDA is used, does `gated`, and so does the parent
 *
 * The way around the hook: libc's own dlsym, asked of libc, gives the driver's own functions.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

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

static void *launch_in_thread(void *function)
{
    MUST(cuCtxSetCurrent(context));
    __typeof__(&cuLaunchKernel) called;
    memcpy(&called, &function, sizeof called);
    launch(called, called == raw_launch ? 4 : 50);
    return NULL;
}

static void threads(void)
{
    pthread_t running[5];
    __typeof__(&cuLaunchKernel) ours = cuLaunchKernel;
    void *functions[2];
    find_raw();
    memcpy(&functions[0], &ours, sizeof ours);
    memcpy(&functions[1], &raw_launch, sizeof raw_launch);
    for (int i = 0; i < 5; i++)
        MUST(pthread_create(&running[i], NULL, launch_in_thread, functions[i == 4]));
    for (int i = 0; i < 5; i++)
        MUST(pthread_join(running[i], NULL));
    MUST(cuCtxSynchronize());
}

int main(int count, char **words)
{
    const char *mode = count == 2 ? words[1] : "";
    int status = 0;
    pid_t child = -1;
    if (strcmp(mode, "nothing") == 0)
        return 0;
    if (strcmp(mode, "two") == 0)
        child = fork();
    begin();
    if (strcmp(mode, "threads") == 0) {
        threads();
    } else if (strcmp(mode, "raw-fails") == 0) {
        find_raw();
        launch(raw_launch, 1);
        MUST(cuCtxSynchronize());
        return 7;
    } else if (strcmp(mode, "quick") == 0 || strcmp(mode, "killed") == 0) {
        launch(cuLaunchKernel, 1);
        MUST(cuCtxSynchronize());
        if (mode[0] == 'q')
            _exit(0);
        raise(SIGTERM);
    } else {
        gated();
        if (strcmp(mode, "raw") == 0)
            raw();
    }
    if (child > 0 && (waitpid(child, &status, 0) != child || status != 0))
        return 9;
    return 0;
}
