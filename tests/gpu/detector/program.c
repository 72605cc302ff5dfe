/* A CUDA program some of whose work does not pass the gate, for the tests of the bypass detector.
 *
 *   gated      100 launches, a copy, a memset, and a graph of 3 kernels twice: all through the functions that it is linked with
 *   raw        the same, and beside the gate: 3 launches, 2 copies, 1 graph of 3 kernels
 *
 * The way around the hook: libc's own dlsym, asked of libc, gives the driver's own functions.
 */
#include "cuda_program.h"

static CUstream stream;
static CUdeviceptr memory;
static char host[4096];

static __typeof__(&cuLaunchKernel) raw_launch;
static __typeof__(&cuMemcpyHtoD) raw_copy;
static __typeof__(&cuGraphLaunch) raw_graph_launch;

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

static void launch_by(__typeof__(&cuLaunchKernel) function, int times)
{
    uint64_t duration_ns = 1000;
    void *arguments[] = {&duration_ns};
    for (int i = 0; i < times; i++)
        OK(function(busy, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL));
}

static CUgraphExec graph(void)
{
    CUgraph made;
    CUgraphExec ready;
    OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    launch_by(cuLaunchKernel, 3);
    OK(cuStreamEndCapture(stream, &made));
    OK(cuGraphInstantiateWithFlags(&ready, made, 0));
    return ready;
}

static void through_the_hook(void)
{
    CUgraphExec three = graph();
    launch_by(cuLaunchKernel, 100);
    OK(cuMemcpyHtoD(memory, host, sizeof host));
    OK(cuMemsetD8(memory, 1, sizeof host));
    OK(cuGraphLaunch(three, stream));
    OK(cuGraphLaunch(three, stream));
    OK(cuCtxSynchronize());
}

static void raw(void)
{
    CUgraphExec three = graph();
    find_raw();
    launch_by(raw_launch, 3);
    OK(raw_copy(memory, host, sizeof host));
    OK(raw_copy(memory, host, sizeof host));
    OK(raw_graph_launch(three, stream));
    OK(cuCtxSynchronize());
}

int main(int count, char **words)
{
    begin();
    stream = new_stream();
    OK(cuMemAlloc(&memory, sizeof host));
    through_the_hook();
    if (count == 2 && strcmp(words[1], "raw") == 0)
        raw();
    return complaints != 0;
}
