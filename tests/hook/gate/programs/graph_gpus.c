/* Graphs whose work is on two GPUs, each way to make one; they are launched on a stream of GPU 1.
 *
 * Says "ready".  In: a line, out: the CUresult.  "begin": prepares both GPUs and works on both; "last NS": so long the kernels
 * take that are built from now on; "build KIND"; "launch": answered once the call has returned;
 * "wait": once the work is done; "loop COUNT": both, again and again; "capture", "end capture": of the stream, nothing;
 * "reset": GPU 1's context; "free": GPU 0's memory.  The current context is GPU 1's, but where a node for GPU 0 is made that names none.
 */
#define SPINS
#include "cuda_program.h"

static CUcontext contexts[2];
static CUfunction kernels[2];
static CUkernel kernel;
static CUdeviceptr memory; /* of GPU 0 */
static CUstream stream, other;
static CUevent begun, done;
static CUgraph graph;
static CUgraphExec ready;
static uint64_t duration = 100000;
static void *arguments[] = {&duration};

static CUresult begin_both(void)
{
    CUlibrary library;
    TRY(cuInit(0));
    for (int gpu = 0; gpu < 2; gpu++) {
        TRY(cuDevicePrimaryCtxRetain(&contexts[gpu], gpu));
        TRY(cuCtxSetCurrent(contexts[gpu]));
        TRY(cuModuleLoadData(&module, image));
        TRY(cuModuleGetFunction(&kernels[gpu], module, "nvs_busy"));
        TRY(cuStreamCreate(gpu == 0 ? &other : &stream, CU_STREAM_NON_BLOCKING));
        TRY(cuEventCreate(gpu == 0 ? &done : &begun, CU_EVENT_DISABLE_TIMING));
        if (gpu == 0)
            TRY(cuMemAlloc(&memory, 4096));
    }
    TRY(cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0));
    TRY(cuLibraryGetKernel(&kernel, library, "nvs_busy"));
    for (int gpu = 0; gpu < 2; gpu++)
        TRY(cuLaunchKernel(kernels[gpu], 1, 1, 1, 1, 1, 1, 0, gpu == 0 ? other : stream, arguments, NULL));
    return cuStreamSynchronize(other) != CUDA_SUCCESS ? CUDA_ERROR_UNKNOWN : cuStreamSynchronize(stream);
}

static CUDA_KERNEL_NODE_PARAMS work(CUfunction function)
{
    return (CUDA_KERNEL_NODE_PARAMS){.func = function, .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1,
                                     .blockDimZ = 1, .kernelParams = arguments};
}

/* As a runtime does it: the node's GPU is the current one.  The context beside a function is nobody's. */
static CUresult add_kernel(CUgraph to, int gpu)
{
    CUgraphNode node;
    CUDA_KERNEL_NODE_PARAMS params = work(kernels[gpu]);
    params.ctx = contexts[1 - gpu];
    TRY(cuCtxSetCurrent(contexts[gpu]));
    TRY(cuGraphAddKernelNode(&node, to, NULL, 0, &params));
    return cuCtxSetCurrent(contexts[1]);
}

static CUresult add_old_kernel(CUgraph to)
{
    CUgraphNode node;
    const CUDA_KERNEL_NODE_PARAMS_v1 params = {.func = kernels[0], .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1,
                                               .blockDimY = 1, .blockDimZ = 1, .kernelParams = arguments};
    extern CUresult add_v1(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const CUDA_KERNEL_NODE_PARAMS_v1 *) __asm__("cuGraphAddKernelNode");
    TRY(cuCtxSetCurrent(contexts[0]));
    TRY(add_v1(&node, to, NULL, 0, &params));
    return cuCtxSetCurrent(contexts[1]);
}

static CUresult add_kernel_by_context(CUgraph to)
{
    CUgraphNode node;
    CUDA_KERNEL_NODE_PARAMS params = work(NULL);
    params.kern = kernel;
    params.ctx = contexts[0];
    return cuGraphAddKernelNode(&node, to, NULL, 0, &params);
}

static CUresult add_fill(CUgraph to)
{
    CUgraphNode node;
    const CUDA_MEMSET_NODE_PARAMS params = {.dst = memory, .value = 7, .elementSize = 1, .width = 4096, .height = 1};
    return cuGraphAddMemsetNode(&node, to, NULL, 0, &params, contexts[0]);
}

static CUresult add_general(CUgraph to)
{
    CUgraphNode node;
    CUgraphNodeParams params = {.type = CU_GRAPH_NODE_TYPE_MEMSET};
    params.memset = (CUDA_MEMSET_NODE_PARAMS_v2){.dst = memory, .value = 7, .elementSize = 1, .width = 4096, .height = 1, .ctx = contexts[0]};
    return cuGraphAddNode(&node, to, NULL, NULL, 0, &params);
}

static CUresult capture(void)
{
    TRY(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    TRY(cuLaunchKernel(kernels[1], 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL));
    TRY(cuEventRecord(begun, stream));
    TRY(cuStreamWaitEvent(other, begun, 0));
    TRY(cuLaunchKernel(kernels[0], 1, 1, 1, 1, 1, 1, 0, other, arguments, NULL));
    TRY(cuEventRecord(done, other));
    TRY(cuStreamWaitEvent(stream, done, 0));
    return cuStreamEndCapture(stream, &graph);
}

/* A graph of GPU 0, and then one of GPU 1. */
static CUresult capture_each(void)
{
    for (int gpu = 0; gpu < 2; gpu++) {
        const CUstream on = gpu == 0 ? other : stream;
        TRY(cuStreamBeginCapture(on, CU_STREAM_CAPTURE_MODE_RELAXED));
        TRY(cuLaunchKernel(kernels[gpu], 1, 1, 1, 1, 1, 1, 0, on, arguments, NULL));
        TRY(cuStreamEndCapture(on, &graph));
        if (gpu == 0)
            TRY(cuGraphDestroy(graph));
    }
    return CUDA_SUCCESS;
}

static CUresult add_what(const char *kind)
{
    if (strcmp(kind, "one") == 0)
        return CUDA_SUCCESS;
    if (strcmp(kind, "kernel") == 0)
        return add_kernel(graph, 0);
    if (strcmp(kind, "old_kernel") == 0)
        return add_old_kernel(graph);
    if (strcmp(kind, "context") == 0)
        return add_kernel_by_context(graph);
    return strcmp(kind, "fill") == 0 ? add_fill(graph) : add_general(graph);
}

/* The graph itself is destroyed: what is ready runs without it.  So is what was ready before. */
static CUresult build(const char *kind)
{
    if (ready != NULL)
        TRY(cuGraphExecDestroy(ready));
    if (strcmp(kind, "captured") == 0) {
        TRY(capture());
    } else if (strcmp(kind, "one_captured") == 0) {
        TRY(capture_each());
    } else {
        TRY(cuGraphCreate(&graph, 0));
        if (strcmp(kind, "elsewhere") == 0)
            kind = "kernel"; /* and no work where it is launched */
        else
            TRY(add_kernel(graph, 1));
        TRY(add_what(kind));
    }
    TRY(cuGraphInstantiate(&ready, graph, 0));
    return cuGraphDestroy(graph);
}

static CUresult obey(const char *line)
{
    if (strcmp(line, "begin") == 0)
        return begin_both();
    if (strcmp(line, "launch") == 0)
        return cuGraphLaunch(ready, stream);
    if (strncmp(line, "last ", 5) == 0) {
        duration = strtoull(line + 5, NULL, 10);
        return CUDA_SUCCESS;
    }
    if (strcmp(line, "capture") == 0)
        return cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    if (strcmp(line, "end capture") == 0) {
        TRY(cuStreamEndCapture(stream, &graph));
        return cuGraphDestroy(graph);
    }
    if (strcmp(line, "free") == 0)
        return cuMemFree(memory);
    if (strcmp(line, "reset") == 0)
        return cuDevicePrimaryCtxReset(1);
    if (strncmp(line, "loop ", 5) == 0) {
        for (int left = atoi(line + 5); left > 0; left--) {
            TRY(cuGraphLaunch(ready, stream));
            TRY(cuStreamSynchronize(stream));
        }
        return CUDA_SUCCESS;
    }
    return strcmp(line, "wait") == 0 ? cuStreamSynchronize(stream) : build(line + strlen("build "));
}

int main(void)
{
    char line[64];
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("ready");
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\n")] = 0;
        printf("%d\n", (int)obey(line));
    }
    return 0;
}
