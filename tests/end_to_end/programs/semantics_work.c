/* Contexts, captures, graphs, kinds of launches, while the GPU is shared. */
#include "cuda_program.h"

#include <pthread.h>

#include <poll.h>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* cuCtxDetach, which old programs call */

/* ---- Somebody else on the same GPU, with most of its memory, until its input ends ---- */

static void rival(void)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    size_t unused, bytes;
    begin();
    OK(cuMemGetInfo(&unused, &bytes));
    bytes -= 4 * MIB;
    CUdeviceptr memory = filled(bytes, 0);
    printf("ready\n");
    fflush(stdout);
    for (unsigned round = 1; poll(&input, 1, 0) == 0; round++) {
        OK(cuMemsetD32(memory, round, bytes / 4));
        for (int i = 0; i < 3; i++) {
            OK(launch(NULL, 1000000));
            OK(cuCtxSynchronize());
        }
        CHECK(holds(memory, bytes, round), "the rival's memory has changed");
    }
}

/* ---- Contexts ---- */

static void green_contexts(void)
{
    CUcontext contexts[2], seen;
    CUstream streams[2], plain;
    CUdeviceptr memory[2];
    CUgreenCtx greens[2];
    CUevent event;
    begin();
    CUdeviceptr before = filled(MIB, 7);
    for (unsigned i = 0; i < 2; i++) {
        greens[i] = new_green(4, &contexts[i]);
        OK(cuGreenCtxStreamCreate(&streams[i], greens[i], CU_STREAM_NON_BLOCKING, 0));
        OK(cuCtxSetCurrent(contexts[i]));
        OK(cuCtxGetCurrent(&seen));
        CHECK(seen == contexts[i], "the green context is not current");
        memory[i] = filled(4 * MIB, 100 + i);
        uint64_t calls = gated();
        OK(launch(streams[i], 1000000));
        CHECK(gated() == calls + 1, "a launch on a green context's stream passed the gate %d times", (int)(gated() - calls));
        OK(cuMemsetD32Async(memory[i], 200 + i, MIB, streams[i]));
    }
    OK(cuStreamCreate(&plain, CU_STREAM_NON_BLOCKING)); /* in the second one, which is current */
    OK(launch(plain, 1000));
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    OK(cuGreenCtxRecordEvent(greens[0], event));
    OK(cuGreenCtxWaitEvent(greens[1], event));
    let_others();
    OK(cuStreamSynchronize(streams[0]));
    OK(cuStreamSynchronize(streams[1]));
    OK(cuGreenCtxDestroy(greens[0]));
    CHECK(cuStreamQuery(streams[0]) != CUDA_SUCCESS, "a stream outlives its green context");
    CHECK(cuStreamDestroy(streams[0]) == CUDA_ERROR_CONTEXT_IS_DESTROYED, "a stream outlives its green context");
    let_others();
    OK(cuGreenCtxDestroy(greens[1]));
    CHECK(cuStreamDestroy(streams[1]) == CUDA_ERROR_CONTEXT_IS_DESTROYED, "a stream outlives its green context");
    OK(cuCtxSetCurrent(primary));
    let_others();
    /* What was allocated in a green context is the primary one's. */
    CHECK(holds(memory[0], 4 * MIB, 200), "memory of the first green context has changed");
    CHECK(holds(memory[1], 4 * MIB, 201), "memory of the second green context has changed");
    CHECK(holds(before, MIB, 7), "memory of the primary context has changed");
    size_t free_before, free_after, total;
    OK(cuMemGetInfo(&free_before, &total));
    OK(cuMemFree(memory[0]));
    OK(cuMemFree(memory[1]));
    OK(cuMemGetInfo(&free_after, &total));
    CHECK(free_after >= free_before, "freeing took memory away");
}

static void several_contexts(void)
{
    CUcontext others[2];
    CUdeviceptr memory[2];
    begin();
    CUdeviceptr own = filled(MIB, 1);
    for (unsigned i = 0; i < 2; i++) {
        OK(cuCtxCreate(&others[i], NULL, 0, 0));
        memory[i] = filled(MIB, 10 + i);
    }
    (void)new_stream(); /* ends with its context */
    OK(cuCtxSetCurrent(primary));
    let_others();
    OK(cuCtxPushCurrent(others[0]));
    CHECK(holds(memory[0], MIB, 10), "memory of another context has changed");
    OK(cuCtxPopCurrent(&others[0]));
    OK(cuCtxDestroy(others[1])); /* and its memory and stream */
    let_others();
    OK(cuCtxPushCurrent(others[0]));
    CHECK(holds(memory[0], MIB, 10), "memory of another context has changed after one has ended");
    OK(cuMemFree(memory[0]));
    OK(cuCtxPopCurrent(&others[0]));
    CHECK(holds(own, MIB, 1), "memory of the primary context has changed");
    OK(cuCtxDestroy(others[0]));
    OK(cuMemFree(own));
}

/* The hook asks by cuCtxGetApiVersion whether a context still lives: by nothing that makes it current, which a driver 580 does not survive. */
static void detached_context(void)
{
    CUcontext context, same;
    unsigned int version;
    begin();
    CUdeviceptr own = filled(MIB, 1);
    OK(cuCtxCreate(&context, NULL, 0, 0));
    CUdeviceptr memory = filled(MIB, 10);
    OK(cuCtxAttach(&same, 0));
    CHECK(same == context, "attaching gives another context");
    OK(cuCtxDetach(context));
    OK(cuCtxSetCurrent(primary)); /* in which the kernel of let_others is */
    let_others();
    OK(cuCtxSetCurrent(context));
    CHECK(holds(memory, MIB, 10), "memory of a context that lives on has changed");
    OK(cuCtxDetach(context));
    CHECK(cuCtxGetApiVersion(context, &version) != CUDA_SUCCESS, "a context that is gone has a version");
    CHECK(cuCtxDestroy(context) != CUDA_SUCCESS, "a context that is gone can be destroyed");
    OK(cuCtxSetCurrent(primary));
    let_others();
    CHECK(holds(own, MIB, 1), "memory has changed after another context has ended");
}

static void primary_reset(void)
{
    size_t at_first, total, at_last;
    begin();
    OK(cuMemGetInfo(&at_first, &total));
    for (int round = 0; round < 3; round++) {
        CUdeviceptr memory = filled(8 * MIB, 5);
        CUstream stream = new_stream();
        OK(launch(stream, 3000000));
        OK(cuMemsetD32Async(memory, 6, 2 * MIB, stream));
        OK(cuDevicePrimaryCtxReset(0));
        OK(cuDevicePrimaryCtxRetain(&primary, 0)); /* else what is current stays destroyed, 709 */
        OK(cuCtxSetCurrent(primary));
        load(); /* the module went with the context */
        let_others();
    }
    OK(cuMemGetInfo(&at_last, &total));
    CHECK(at_last == at_first, "after the resets %zu bytes are free, %zu were", at_last, at_first);
}

static void module_unload(void)
{
    begin();
    for (int round = 0; round < 5; round++) {
        OK(launch(NULL, 2000000));
        OK(cuCtxSynchronize());
        OK(cuModuleUnload(module));
        load();
    }
}

/* ---- Captures ---- */

static void into_capture(CUstream stream, CUdeviceptr memory, unsigned value)
{
    OK(launch(stream, 100000));
    OK(cuMemsetD32Async(memory, value, MIB / 4, stream));
    OK(cuMemcpyDtoDAsync(memory + MIB, memory, MIB, stream));
}

static void replay(CUgraph graph, CUstream stream, CUdeviceptr memory, unsigned value)
{
    CUgraphExec executable;
    OK(cuGraphInstantiate(&executable, graph, 0));
    OK(cuGraphUpload(executable, stream));
    for (int i = 0; i < 4; i++) {
        uint64_t calls = gated();
        OK(cuMemsetD32(memory, 0, MIB / 2));
        OK(cuCtxSynchronize()); /* the graph's stream does not wait for the legacy stream */
        OK(cuGraphLaunch(executable, stream));
        CHECK(gated() == calls + 2, "a graph launch passed the gate %d times", (int)(gated() - calls - 1));
        OK(cuStreamSynchronize(stream));
        CHECK(holds(memory, 2 * MIB, value), "a replayed graph left something else in memory");
        let_others();
    }
    OK(cuGraphExecDestroy(executable));
}

static void capture_modes(void)
{
    static const CUstreamCaptureMode modes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                                CU_STREAM_CAPTURE_MODE_RELAXED};
    CUstream stream, other;
    CUgraph graph;
    begin();
    CUdeviceptr memory = filled(2 * MIB, 3), beside = filled(MIB, 4);
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    for (unsigned i = 0; i < 3; i++) {
        OK(cuStreamBeginCapture(stream, modes[i]));
        for (int k = 0; k < 6; k++) { /* hand-overs while it captures */
            OK(launch(other, 2000000));
            OK(cuMemsetD32Async(beside, 40 + i, MIB / 4, other));
        }
        into_capture(stream, memory, 20 + i);
        OK(cuStreamEndCapture(stream, &graph));
        OK(cuStreamSynchronize(other));
        replay(graph, stream, memory, 20 + i);
        OK(cuGraphDestroy(graph));
        CHECK(holds(beside, MIB, 40 + i), "work beside a capture was lost");
    }
    /* What is not allowed during a capture fails, and ends it, as without the hook. */
    OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CHECK(cuStreamSynchronize(stream) != CUDA_SUCCESS, "a capturing stream can be synchronised");
    CHECK(cuStreamEndCapture(stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "an invalid capture ends well");
    let_others();
}

static void capture_to_graph(void)
{
    CUgraph graph, same;
    begin();
    CUdeviceptr memory = filled(2 * MIB, 3);
    CUstream stream = new_stream();
    OK(cuGraphCreate(&graph, 0));
    OK(cuStreamBeginCaptureToGraph(stream, graph, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_RELAXED));
    into_capture(stream, memory, 9);
    OK(cuStreamEndCapture(stream, &same));
    CHECK(same == graph, "the capture made another graph");
    replay(graph, stream, memory, 9);
}

/* ---- Graphs by hand: memory that was away when nodes or parameters were made ---- */

static CUgraph fill_graph(CUdeviceptr memory, unsigned value, CUgraphNode *node)
{
    CUgraph graph;
    const CUDA_MEMSET_NODE_PARAMS what = {.dst = memory, .value = value, .elementSize = 4, .width = MIB / 4, .height = 1};
    OK(cuGraphCreate(&graph, 0));
    OK(cuGraphAddMemsetNode(node, graph, NULL, 0, &what, primary));
    return graph;
}

static void run_once(CUgraphExec executable, CUstream stream)
{
    OK(cuGraphLaunch(executable, stream));
    OK(cuStreamSynchronize(stream));
}

static void graph_edits(void)
{
    CUgraphNode node, ignored;
    CUgraphExec executable;
    begin();
    CUdeviceptr first = filled(MIB, 1), second = filled(MIB, 2);
    CUstream stream = new_stream();
    CUgraph graph = fill_graph(first, 50, &node);
    OK(cuGraphInstantiate(&executable, graph, 0));
    let_others();
    run_once(executable, stream);
    CHECK(holds(first, MIB, 50) && holds(second, MIB, 2), "the graph did not do what it was made for");
    let_others();
    const CUDA_MEMSET_NODE_PARAMS changed = {.dst = second, .value = 51, .elementSize = 4, .width = MIB / 4, .height = 1};
    OK(cuGraphExecMemsetNodeSetParams(executable, node, &changed, primary));
    run_once(executable, stream);
    CHECK(holds(first, MIB, 50) && holds(second, MIB, 51), "changed parameters of a node were not used");
    let_others();
    CUgraph update = fill_graph(first, 52, &ignored);
    CUgraphExecUpdateResultInfo info;
    OK(cuGraphExecUpdate(executable, update, &info));
    run_once(executable, stream);
    CHECK(holds(first, MIB, 52), "an updated graph did not do what it was updated to");
    OK(cuGraphExecDestroy(executable));
}

static void memory_nodes(void)
{
    CUgraph graph;
    CUdeviceptr inside;
    begin();
    CUdeviceptr result = filled(2 * MIB, 3);
    CUstream stream = new_stream();
    OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cuMemAllocAsync(&inside, 2 * MIB, stream));
    OK(cuMemsetD32Async(inside, 77, MIB / 2, stream));
    OK(cuMemcpyDtoDAsync(result, inside, 2 * MIB, stream));
    OK(cuMemFreeAsync(inside, stream));
    OK(cuStreamEndCapture(stream, &graph));
    replay(graph, stream, result, 77);
    OK(cuGraphDestroy(graph));
}

static void ordered_memory(void)
{
    CUmemoryPool pool;
    CUdeviceptr memory;
    const CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    begin();
    CUstream stream = new_stream();
    OK(cuMemPoolCreate(&pool, &properties));
    for (unsigned i = 0; i < 12; i++) {
        OK(i % 2 ? cuMemAllocAsync(&memory, 3 * MIB, stream) : cuMemAllocFromPoolAsync(&memory, 3 * MIB, pool, stream));
        OK(cuMemsetD32Async(memory, i, 3 * MIB / 4, stream));
        OK(launch(stream, 1500000));
        OK(cuStreamSynchronize(stream));
        CHECK(holds(memory, 3 * MIB, i), "stream-ordered memory has changed");
        OK(cuMemFreeAsync(memory, stream));
    }
    OK(cuStreamSynchronize(stream));
    OK(cuMemPoolDestroy(pool));
}

/* ---- Kinds of launches, and the host's part in a stream ---- */

static void launches(void)
{
    uint64_t ns = 500000, calls;
    void *parameters[] = {&ns};
    CUevent event;
    begin();
    CUstream stream = new_stream();
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CUlaunchAttribute attributes[] = {
        {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .value.clusterDim = {2, 1, 1}},
        {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, .value.programmaticStreamSerializationAllowed = 1},
        {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT, .value.programmaticEvent = {.event = event}},
        {.id = CU_LAUNCH_ATTRIBUTE_PRIORITY, .value.priority = 0},
        {.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value.cooperative = 1},
    };
    for (unsigned i = 0; i <= sizeof attributes / sizeof attributes[0]; i++) {
        const CUlaunchConfig config = {.gridDimX = 2, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1,
                                       .hStream = stream, .attrs = i ? &attributes[i - 1] : NULL, .numAttrs = i != 0};
        calls = gated();
        OK(cuLaunchKernelEx(&config, busy, parameters, NULL));
        CHECK(gated() == calls + 1, "launch attribute %u: passed the gate %d times", i, (int)(gated() - calls));
        let_others();
    }
    calls = gated();
    OK(cuLaunchCooperativeKernel(busy, 4, 1, 1, 1, 1, 1, 0, stream, parameters));
    CHECK(gated() == calls + 1, "a cooperative launch passed the gate %d times", (int)(gated() - calls));
    OK(cuStreamSynchronize(stream));
}

static unsigned order[3];

static void note(void *data)
{
    order[*(unsigned *)data]++;
}

static void CUDA_CB note_status(CUstream stream, CUresult status, void *data)
{
    (void)stream;
    order[*(unsigned *)data] += status == CUDA_SUCCESS;
}

static pthread_mutex_t submitting = PTHREAD_MUTEX_INITIALIZER;

static void note_locked(void *data)
{
    pthread_mutex_lock(&submitting);
    note(data);
    pthread_mutex_unlock(&submitting);
}

/* A host function waits for a lock that the thread holds while it submits, as Python's lock is held by extension modules. */
static void host_locks(void)
{
    static unsigned number = 0;
    begin();
    CUstream stream = new_stream();
    for (unsigned i = 0; i < 40; i++) {
        pthread_mutex_lock(&submitting);
        OK(launch(stream, 500000));
        OK(cuLaunchHostFunc(stream, note_locked, &number));
        OK(launch(stream, 500000));
        OK(launch(NULL, 100000));
        pthread_mutex_unlock(&submitting);
    }
    OK(cuStreamSynchronize(stream));
    CHECK(order[0] == 40, "host functions ran %u times, not 40", order[0]);
}

static void host_callbacks(void)
{
    static unsigned numbers[] = {0, 1, 2};
    CUgraph graph;
    CUgraphExec executable;
    begin();
    CUstream stream = new_stream();
    OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cuLaunchHostFunc(stream, note, &numbers[2]));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiate(&executable, graph, 0));
    for (unsigned i = 0; i < 20; i++) {
        OK(launch(stream, 500000));
        OK(cuLaunchHostFunc(stream, note, &numbers[0]));
        OK(cuStreamAddCallback(stream, note_status, &numbers[1], 0));
        OK(cuGraphLaunch(executable, stream));
    }
    OK(cuStreamSynchronize(stream));
    CHECK(order[0] == 20 && order[1] == 20 && order[2] == 20, "host functions ran %u, %u and %u times, not 20", order[0], order[1], order[2]);
}

/* The driver's error, and no word of the hook about another GPU. */
static void absent_gpus(void)
{
    CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemGenericAllocationHandle handle;
    begin();
    for (wanted.location.id = -1; wanted.location.id < 70; wanted.location.id += 10)
        CHECK(cuMemCreate(&handle, 2 * MIB, &wanted, 0) == CUDA_ERROR_INVALID_DEVICE, "there is no GPU %d", wanted.location.id);
}

/* Each call but the first of a kind goes one byte beyond an allocation, or to freed memory. */
static void bounds(void)
{
    unsigned char host[2048] = {0};
    unsigned type;
    size_t bytes;
    CUgraph graph;
    CUgraphNode node;
    begin();
    CUstream stream = new_stream();
    CUdeviceptr before = filled(512, 0x11111111), at = filled(512, 0x22222222), behind = filled(512, 0x33333333), base, reserved;
    CUdeviceptr targets[] = {before, at}, sources[] = {behind, behind};
    CUmemcpyAttributes how = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    CUDA_MEMCPY2D flat = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = host, .srcPitch = 64, .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = at,
                          .dstPitch = 64, .WidthInBytes = 64, .Height = 8};
    CUDA_MEMCPY3D deep = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = host, .srcPitch = 64, .srcHeight = 4, .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                          .dstDevice = at, .dstPitch = 64, .dstHeight = 4, .WidthInBytes = 64, .Height = 4, .Depth = 2};
    CUDA_MEMSET_NODE_PARAMS fill = {.dst = at, .pitch = 64, .elementSize = 4, .width = 16, .height = 8};
    OK(cuGraphCreate(&graph, 0));
    for (size_t more = 0; more < 2; more++) {
        const CUresult wanted = more == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
        size_t sizes[] = {512, 512 + more}, first = 0;
        flat.dstXInBytes = deep.dstXInBytes = more;
        fill.width += more;
        const CUresult said[] = {
            cuMemsetD8(at, 0, 512 + more), cuMemsetD8Async(at, 0, 512 + more, stream), cuMemsetD16(at, 0, 256 + more), cuMemsetD32(at, 0, 128 + more),
            cuMemsetD2D8(at, 64, 0, 64, 8 + more), cuMemsetD2D32(at + 4 * more, 64, 0, 16, 8), cuMemcpyHtoD(at, host, 512 + more),
            cuMemcpyDtoH(host, at, 512 + more), cuMemcpyDtoHAsync(host, at, 512 + more, stream), cuMemcpyDtoD(at, behind, 512 + more),
            cuMemcpy(at, behind, 512 + more), cuMemcpyPeer(at, primary, behind, primary, 512 + more), cuMemcpy2D(&flat), cuMemcpy3D(&deep),
            cuMemcpyBatchAsync(targets, sources, sizes, 2, &how, &first, 1, stream), cuGraphAddMemsetNode(&node, graph, NULL, 0, &fill, primary),
            cuGraphAddMemcpyNode(&node, graph, NULL, 0, &deep, primary),
        };
        for (unsigned i = 0; i < sizeof said / sizeof said[0]; i++)
            CHECK(said[i] == wanted, "call %u with %u bytes beyond says %d", i, (unsigned)more, (int)said[i]);
        OK(cuStreamSynchronize(stream));
        let_others();
    }
    CHECK(cuMemsetD8(at + 512, 0, 0) == CUDA_SUCCESS && cuMemsetD8(at + 1, 0, 511) == CUDA_SUCCESS, "a fill up to the end fails");
    CHECK(holds(behind, 512, 0x33333333), "a neighbour has changed");
    OK(cuMemFree(at));
    CHECK(cuMemsetD8(at, 0, 4) == CUDA_ERROR_INVALID_VALUE, "freed memory can be filled");
    CHECK(cuMemGetAddressRange(&base, &bytes, at) == CUDA_ERROR_NOT_FOUND, "freed memory has a range");
    CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at) == CUDA_ERROR_INVALID_VALUE, "freed memory has a type");
    /* The application's own mappings are one range. */
    const CUmemAllocationProp kind = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    const CUmemAccessDesc rights = {.location = kind.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    OK(cuMemAddressReserve(&reserved, 4 * MIB, 0, 0, 0));
    for (unsigned i = 0; i < 2; i++) {
        CUmemGenericAllocationHandle handle;
        OK(cuMemCreate(&handle, 2 * MIB, &kind, 0));
        OK(cuMemMap(reserved + i * 2 * MIB, 2 * MIB, 0, handle, 0));
    }
    OK(cuMemSetAccess(reserved, 4 * MIB, &rights, 1));
    OK(cuMemsetD8(reserved + 2 * MIB - 8, 1, 16));
    OK(cuMemcpyDtoH(host, reserved + 2 * MIB - 8, 16));
}

int main(int count, char **arguments)
{
    static const named_case cases[] = {
        {"green_contexts", green_contexts}, {"several_contexts", several_contexts}, {"primary_reset", primary_reset},
        {"detached_context", detached_context}, {"module_unload", module_unload}, {"capture_modes", capture_modes},
        {"capture_to_graph", capture_to_graph}, {"graph_edits", graph_edits}, {"memory_nodes", memory_nodes},
        {"ordered_memory", ordered_memory}, {"launches", launches}, {"host_callbacks", host_callbacks}, {"bounds", bounds},
        {"host_locks", host_locks}, {"rival", rival}, {"absent_gpus", absent_gpus}, {NULL, NULL},
    };
    return run_case(cases, count, arguments);
}
