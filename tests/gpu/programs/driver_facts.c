/* What the hook, the coordinator and the simulated GPU take for granted of the driver though its documentation does not promise it
 * (docs/reference/driver-facts.md).  A new driver is checked by running these cases on a card, without the hook.
 *
 * driver_facts CASE runs one case and prints a line for each thing that is otherwise; "absent" where this machine cannot show it.
 * No case has more than 128 MiB of the card, but `full_card`.
 */
#define SPINS
#include "cuda_program.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define LONG_NS 200000000u /* a kernel that surely still runs when the next call looks */

static bool absent;

#define IS(wanted, call)                                                                                  \
    do {                                                                                                  \
        const CUresult got = (call);                                                                      \
        CHECK(got == (wanted), "line %d: %s says %d, not %d", __LINE__, #call, (int)got, (int)(wanted)); \
    } while (0)

static void relaxed(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    OK(cuThreadExchangeStreamCaptureMode(&mode));
}

static bool still_captures(CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    OK(cuStreamIsCapturing(stream, &status));
    return status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

/* --- contexts --- */

static void destroyed_context(void)
{
    CUcontext context;
    unsigned version;
    begin();
    OK(cuCtxCreate(&context, NULL, 0, 0));
    OK(cuCtxDestroy(context));
    CHECK(cuCtxGetApiVersion(context, &version) != CUDA_SUCCESS, "a destroyed context has a version");
}

static void primary_handle(void)
{
    CUcontext again;
    begin();
    OK(cuDevicePrimaryCtxReset(0));
    OK(cuDevicePrimaryCtxRelease(0));
    OK(cuDevicePrimaryCtxRetain(&again, 0));
    CHECK(again == primary, "a primary context has another handle after a reset");
}

static CUmemGenericAllocationHandle chunk(CUdeviceptr *address, size_t *bytes)
{
    const CUmemAllocationProp kind = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemGenericAllocationHandle handle = 0;
    OK(cuMemGetAllocationGranularity(bytes, &kind, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    OK(cuMemCreate(&handle, *bytes, &kind, 0));
    OK(cuMemAddressReserve(address, *bytes, 0, 0, 0));
    OK(cuMemMap(*address, *bytes, 0, handle, 0));
    return handle;
}

static void give_access(CUdeviceptr address, size_t bytes)
{
    const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    OK(cuMemSetAccess(address, bytes, &access, 1));
}

static const char copying[] = ".version 8.0\n.target sm_90\n.address_size 64\n"
                              ".visible .entry nvs_copy(.param .u64 to, .param .u64 source, .param .u64 words)\n"
                              "{ .reg .u64 %to, %from; .reg .u32 %word; ld.param.u64 %to, [to]; ld.param.u64 %from, [source];\n"
                              "ld.global.u32 %word, [%from]; st.global.u32 [%to], %word; ret; }\n";

static void sticky_error(void)
{
    CUdeviceptr memory, address;
    CUcontext other;
    CUmodule copies;
    CUfunction copy;
    size_t bytes, nowhere = 16, one = 1;
    void *parameters[] = {&nowhere, &nowhere, &one};
    begin();
    const CUmemGenericAllocationHandle handle = chunk(&address, &bytes);
    give_access(address, bytes);
    OK(cuModuleLoadData(&copies, copying));
    OK(cuModuleGetFunction(&copy, copies, "nvs_copy"));
    OK(cuLaunchKernel(copy, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
    IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
    IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemAlloc(&memory, MIB));
    IS(CUDA_ERROR_ILLEGAL_ADDRESS, launch(NULL, 0));
    IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamQuery(NULL));
    CHECK(cuCtxCreate(&other, NULL, 0, 0) != CUDA_SUCCESS, "the process opens another context on the GPU");
    OK(cuMemUnmap(address, bytes));
    OK(cuMemRelease(handle));
}

/* --- captures --- */

static void capture_queries(void)
{
    CUcontext context;
    CUdevice device;
    begin();
    CUstream stream = capturing(CU_STREAM_NON_BLOCKING);
    OK(cuStreamGetCtx(stream, &context));
    CHECK(still_captures(stream), "a query of the stream's context invalidates its capture");
    CHECK(cuStreamGetDevice(stream, &device) != CUDA_SUCCESS && !still_captures(stream), "a query of the stream's device leaves its capture valid");
}

static void capture_of_context(void)
{
    CUevent event;
    begin();
    relaxed();
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CUstream stream = capturing(CU_STREAM_NON_BLOCKING);
    CHECK(cuCtxRecordEvent(primary, event) != CUDA_SUCCESS && !still_captures(stream), "an event of the context leaves a capture valid");
    stream = capturing(CU_STREAM_NON_BLOCKING);
    CHECK(cuCtxSynchronize() != CUDA_SUCCESS && !still_captures(stream), "a wait for the context leaves a capture valid");
}

extern CUresult CUDAAPI cuStreamGetId_ptsz(CUstream stream, unsigned long long *id);

static void default_handles(void)
{
    unsigned long long plain, legacy, threads_own, per_thread;
    begin();
    OK(cuStreamGetId(NULL, &plain));
    OK(cuStreamGetId(CU_STREAM_LEGACY, &legacy));
    OK(cuStreamGetId_ptsz(NULL, &threads_own));
    OK(cuStreamGetId(CU_STREAM_PER_THREAD, &per_thread));
    CHECK(plain == legacy && threads_own == per_thread && legacy != per_thread, "a handle is of another stream than NULL is");
}

static void *query_per_thread(void *result)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    (void)cuCtxSetCurrent(primary);
    (void)cuThreadExchangeStreamCaptureMode(&mode);
    *(CUresult *)result = cuStreamQuery(CU_STREAM_PER_THREAD);
    return NULL;
}

static void capture_and_defaults(void)
{
    pthread_t thread;
    CUresult elsewhere = CUDA_SUCCESS;
    begin();
    relaxed();
    const CUstream mine = new_stream();
    OK(launch(mine, LONG_NS));
    OK(launch(CU_STREAM_PER_THREAD, LONG_NS));
    const CUstream stream = capturing(CU_STREAM_DEFAULT);
    IS(CUDA_ERROR_NOT_READY, cuStreamQuery(mine));
    CHECK(cuStreamQuery(CU_STREAM_LEGACY) != CUDA_SUCCESS, "the legacy stream can be queried beside the capture of a blocking stream");
    CHECK(pthread_create(&thread, NULL, query_per_thread, &elsewhere) == 0 && pthread_join(thread, NULL) == 0, "no thread");
    CHECK(elsewhere == CUDA_SUCCESS, "another thread's per-thread stream says %d: it is not a stream of its own", (int)elsewhere);
    (void)stream;
}

static void captured_memory(void)
{
    CUdeviceptr memory;
    CUgraph graph;
    CUgraphExec executable;
    cuuint64_t before, after;
    begin();
    const CUstream stream = new_stream();
    OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuMemAllocAsync(&memory, 32 * MIB, stream));
    OK(cuMemFreeAsync(memory, stream));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiate(&executable, graph, 0));
    OK(cuDeviceGetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &before));
    CHECK(memory != 0 && before == 0, "a captured allocation takes %llu bytes before its first launch", (unsigned long long)before);
    OK(cuGraphLaunch(executable, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuGraphExecDestroy(executable));
    OK(cuGraphDestroy(graph));
    OK(cuDeviceGetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &after));
    CHECK(after >= 32 * MIB, "the memory of a destroyed executable is free at once");
    OK(cuDeviceGraphMemTrim(0));
    OK(cuDeviceGetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &after));
    CHECK(after == 0, "a trim leaves %llu bytes", (unsigned long long)after);
}

/* --- memory --- */

static cuuint64_t of_pool(CUmemoryPool pool, CUmemPool_attribute what)
{
    cuuint64_t value = 0;
    OK(cuMemPoolGetAttribute(pool, what, &value));
    return value;
}

static void pool_pieces(void)
{
    const CUmemPoolProps kind = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemoryPool pool;
    CUdeviceptr memory, other;
    begin();
    const CUstream stream = new_stream();
    OK(cuMemPoolCreate(&pool, &kind));
    OK(cuMemAllocFromPoolAsync(&memory, 1000, pool, stream));
    OK(cuMemAllocFromPoolAsync(&other, 1000, pool, stream));
    CHECK(of_pool(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 2000, "used is rounded");
    CHECK(of_pool(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 32 * MIB, "reserved is %llu, not one piece of 32 MiB",
          (unsigned long long)of_pool(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
    OK(cuMemFreeAsync(memory, stream));
    CHECK(of_pool(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 1000, "used falls later than the call that frees");
    OK(cuMemFree(other));
    CHECK(of_pool(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 1000, "used falls with cuMemFree");
    OK(cuMemPoolDestroy(pool));
}

static void pool_waits(void)
{
    const CUmemPoolProps kind = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemoryPool pool;
    CUdeviceptr memory;
    begin();
    const CUstream stream = new_stream();
    OK(cuMemPoolCreate(&pool, &kind));
    OK(cuMemAllocFromPoolAsync(&memory, 1000, pool, stream));
    OK(cuMemFreeAsync(memory, stream));
    OK(cuStreamSynchronize(stream));
    CHECK(of_pool(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 0, "a wait for the stream gives nothing back");
    OK(cuMemPoolDestroy(pool));
}

static void bounds(void)
{
    CUdeviceptr memory;
    begin();
    const CUstream stream = new_stream();
    OK(cuMemAlloc(&memory, 4 * MIB));
    IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoD(memory, memory + 2 * MIB, 2 * MIB + 1));
    IS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8Async(memory, 0, 4 * MIB + 1, stream));
    OK(cuMemsetD8Async(memory, 0, 4 * MIB, stream));
    OK(cuStreamSynchronize(stream));
}

static void mappings(void)
{
    CUdeviceptr address, other;
    size_t bytes;
    begin();
    const CUmemGenericAllocationHandle handle = chunk(&address, &bytes);
    CHECK(cuMemsetD8(address, 0, bytes) != CUDA_SUCCESS, "a new mapping can be used without rights");
    give_access(address, bytes);
    OK(cuMemsetD8(address, 0, bytes));
    OK(cuMemUnmap(address, bytes));
    OK(cuMemMap(address, bytes, 0, handle, 0));
    CHECK(cuMemsetD8(address, 0, bytes) != CUDA_SUCCESS, "rights outlive an unmapping");
    OK(cuMemAddressReserve(&other, bytes, 0, 0, 0));
    CHECK(cuMemMap(other, bytes / 2, bytes / 2, handle, 0) != CUDA_SUCCESS, "a part of a handle can be mapped");
    CHECK(cuMemUnmap(address, bytes / 2) != CUDA_SUCCESS, "a part of a mapping can be unmapped");
    OK(cuMemUnmap(address, bytes));
    OK(cuMemRelease(handle));
}

static void no_legacy_ipc(void)
{
    CUdeviceptr address, managed;
    CUipcMemHandle named;
    size_t bytes;
    begin();
    (void)chunk(&address, &bytes);
    give_access(address, bytes);
    OK(cuMemAllocManaged(&managed, MIB, CU_MEM_ATTACH_GLOBAL));
    CHECK(cuIpcGetMemHandle(&named, address) != CUDA_SUCCESS, "mapped memory has a legacy handle");
    CHECK(cuIpcGetMemHandle(&named, managed) != CUDA_SUCCESS, "managed memory has a legacy handle");
}

static void full_card(void)
{
    CUdeviceptr memory;
    CUstream stream;
    size_t free = 0, total = 0;
    begin();
    OK(cuMemGetInfo(&free, &total));
    for (size_t bytes = free; bytes >= 4096; bytes /= 2)
        while (cuMemAlloc(&memory, bytes) == CUDA_SUCCESS)
            ;
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; i < 4096 && result == CUDA_SUCCESS; i++)
        result = cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    CHECK(result == CUDA_ERROR_OUT_OF_MEMORY, "streams can be made on a full card (%d)", (int)result);
}

/* --- work --- */

static pthread_mutex_t held = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int entered;
static pthread_t ran[2];

static void CUDA_CB waits(void *place)
{
    ran[(size_t)place] = pthread_self();
    entered++;
    pthread_mutex_lock(&held);
    pthread_mutex_unlock(&held);
}

static void host_functions(void)
{
    CUdeviceptr address;
    size_t bytes;
    begin();
    const CUstream one = new_stream(), two = new_stream(), three = new_stream();
    pthread_mutex_lock(&held);
    OK(cuLaunchHostFunc(one, waits, (void *)0));
    OK(cuLaunchHostFunc(two, waits, (void *)1));
    OK(launch(three, 1000));
    OK(cuStreamSynchronize(three));
    const CUmemGenericAllocationHandle handle = chunk(&address, &bytes);
    give_access(address, bytes);
    OK(cuMemsetD8Async(address, 0, bytes, three));
    OK(cuStreamSynchronize(three));
    OK(cuMemUnmap(address, bytes));
    OK(cuMemRelease(handle));
    CHECK(entered <= 1, "two host functions run at once");
    pthread_mutex_unlock(&held);
    OK(cuCtxSynchronize());
    CHECK(entered == 2 && pthread_equal(ran[0], ran[1]), "host functions have more than one thread");
}

static void pending_event(void)
{
    CUevent event;
    begin();
    const CUstream stream = new_stream();
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    OK(launch(stream, LONG_NS));
    OK(cuEventRecord(event, stream));
    OK(cuEventDestroy(event));
    IS(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
    OK(cuStreamSynchronize(stream));
}

static void graph_elsewhere(void)
{
    int count = 0;
    CUcontext other;
    CUmodule there;
    CUfunction kernel;
    CUgraph graph;
    CUgraphNode node;
    CUgraphExec executable;
    uint64_t ns = LONG_NS;
    void *parameters[] = {&ns};
    begin();
    OK(cuDeviceGetCount(&count));
    if ((absent = count < 2))
        return;
    OK(cuDevicePrimaryCtxRetain(&other, 1));
    OK(cuCtxSetCurrent(other));
    OK(cuModuleLoadData(&there, image));
    OK(cuModuleGetFunction(&kernel, there, "nvs_busy"));
    OK(cuCtxSetCurrent(primary));
    const CUDA_KERNEL_NODE_PARAMS work = {.func = kernel, .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1,
                                          .blockDimZ = 1, .kernelParams = parameters, .ctx = other};
    OK(cuGraphCreate(&graph, 0));
    OK(cuGraphAddKernelNode(&node, graph, NULL, 0, &work));
    OK(cuGraphInstantiate(&executable, graph, 0));
    const CUstream stream = new_stream();
    OK(cuGraphLaunch(executable, stream));
    OK(cuCtxSetCurrent(other));
    OK(cuCtxSynchronize());
    IS(CUDA_ERROR_NOT_READY, cuStreamQuery(stream)); /* the other GPU's context does not know of it */
    OK(cuCtxSetCurrent(primary));
    OK(cuStreamSynchronize(stream));
}

/* --- processes --- */

static CUresult at_exit[2] = {CUDA_SUCCESS, CUDA_SUCCESS};

static void earlier(void)
{
    size_t free, total;
    at_exit[0] = cuMemGetInfo(&free, &total);
    const bool right = at_exit[0] == CUDA_ERROR_DEINITIALIZED && at_exit[1] == CUDA_SUCCESS && complaints == 0;
    if (!right)
        printf("handlers of before and after cuInit get %d and %d\n", (int)at_exit[0], (int)at_exit[1]);
    printf("%s\n", right ? "good" : "bad");
    fflush(stdout);
    _exit(!right);
}

static void later(void)
{
    size_t free, total;
    at_exit[1] = cuMemGetInfo(&free, &total);
}

static void exit_handlers(void)
{
    atexit(earlier);
    begin();
    atexit(later);
    exit(0);
}

/* The other process of a case: it has a context and a stream with work on it, and says so. */
typedef struct shared_page {
    _Atomic int state; /* 1: ready, 2: asks, 3: submits */
    _Atomic int asked, submitted;
} shared_page;

static void other_process(shared_page *page, bool managed)
{
    CUdeviceptr memory;
    CUevent event;
    begin();
    relaxed();
    OK(managed ? cuMemAllocManaged(&memory, MIB, CU_MEM_ATTACH_GLOBAL) : cuMemAlloc(&memory, 64 * MIB));
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    page->state = complaints == 0 ? 1 : -1;
    while (page->state != 0) {
        if (page->state == 2 && cuEventQuery(event) == CUDA_SUCCESS)
            page->asked++;
        if (page->state == 3 && cuEventRecord(event, NULL) == CUDA_SUCCESS)
            page->submitted++;
        usleep(1000);
    }
    _exit(0);
}

static pid_t with_other(shared_page **page, bool managed)
{
    *page = mmap(NULL, sizeof **page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    const pid_t child = fork();
    if (child == 0)
        other_process(*page, managed);
    for (int i = 0; i < 20000 && (*page)->state == 0; i++)
        usleep(1000);
    CHECK((*page)->state == 1, "the other process has no context");
    begin();
    return child;
}

static void end_other(pid_t child)
{
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

/* Whether a counter of the other process goes on within a time that it surely needs. */
static bool goes_on(const _Atomic int *counter, unsigned least_ms)
{
    const int before = *counter;
    for (unsigned i = 0; i < least_ms && *counter < before + 3; i++)
        usleep(1000);
    return *counter >= before + 3;
}

static void checkpoint_lock(void)
{
    shared_page *page;
    CUcheckpointLockArgs lock = {.timeoutMs = 5000};
    CUcheckpointUnlockArgs unlock = {0};
    CUprocessState state;
    const pid_t child = with_other(&page, false);
    OK(cuCheckpointProcessLock(child, &lock));
    OK(cuCheckpointProcessGetState(child, &state));
    CHECK(state == CU_PROCESS_STATE_LOCKED, "the state is %d", (int)state);
    page->state = 2;
    CHECK(goes_on(&page->asked, 5000), "queries of events wait while the process is locked");
    page->state = 3;
    CHECK(!goes_on(&page->submitted, 300), "submissions go on while the process is locked");
    OK(cuCheckpointProcessUnlock(child, &unlock));
    CHECK(goes_on(&page->submitted, 5000), "submissions do not go on after the unlock");
    end_other(child);
}

static void checkpoint_memory(void)
{
    shared_page *page;
    CUcheckpointLockArgs lock = {.timeoutMs = 5000};
    CUcheckpointCheckpointArgs save = {0};
    CUcheckpointRestoreArgs back = {0};
    CUcheckpointUnlockArgs unlock = {0};
    size_t before, during, total;
    const pid_t child = with_other(&page, false);
    OK(cuMemGetInfo(&before, &total));
    OK(cuCheckpointProcessLock(child, &lock));
    OK(cuCheckpointProcessCheckpoint(child, &save));
    OK(cuMemGetInfo(&during, &total));
    CHECK(during >= before + 64 * MIB, "the checkpoint frees %lld bytes", (long long)(during - before));
    OK(cuCheckpointProcessRestore(child, &back));
    OK(cuCheckpointProcessUnlock(child, &unlock));
    page->state = 3;
    CHECK(goes_on(&page->submitted, 5000), "the process does not go on after the restoration");
    end_other(child);
}

static void checkpoint_managed(void)
{
    shared_page *page;
    CUcheckpointLockArgs lock = {.timeoutMs = 5000};
    CUcheckpointCheckpointArgs save = {0};
    CUcheckpointUnlockArgs unlock = {0};
    const pid_t child = with_other(&page, true);
    OK(cuCheckpointProcessLock(child, &lock));
    IS(CUDA_ERROR_NOT_SUPPORTED, cuCheckpointProcessCheckpoint(child, &save));
    OK(cuCheckpointProcessUnlock(child, &unlock));
    page->state = 3;
    CHECK(goes_on(&page->submitted, 5000), "the process does not go on after the refusal");
    end_other(child);
}

static void ended_process(void)
{
    shared_page *page;
    size_t before, after, total;
    const pid_t child = with_other(&page, false);
    const int watched = (int)syscall(SYS_pidfd_open, child, 0);
    struct pollfd ended = {.fd = watched, .events = POLLIN};
    OK(cuMemGetInfo(&before, &total));
    kill(child, SIGKILL);
    CHECK(poll(&ended, 1, 30000) == 1, "the process does not end");
    after = 0;
    for (unsigned i = 0; i < 100 && after < before + 64 * MIB; i++) { /* up to some milliseconds later */
        OK(cuMemGetInfo(&after, &total));
        usleep(1000);
    }
    CHECK(after >= before + 64 * MIB, "memory of an ended process is not free when its pidfd is readable");
    waitpid(child, NULL, 0);
}

/* --- resolution --- */

static void resolved_addresses(void)
{
    static const char *const names[] = {"cuLaunchKernel", "cuMemAlloc", "cuMemcpyDtoDAsync", "cuStreamSynchronize", "cuGraphLaunch"};
    static const char *const variants[] = {"", "_v2", "_ptsz", "_ptds", "_v2_ptsz", "_v2_ptds"};
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    begin();
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (cuuint64_t flags = 0; flags <= CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM; flags += CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) {
            void *resolved = NULL;
            bool exported = false;
            OK(cuGetProcAddress(names[i], &resolved, 12000, flags, NULL));
            for (size_t j = 0; j < sizeof variants / sizeof *variants; j++) {
                char name[64];
                (void)snprintf(name, sizeof name, "%s%s", names[i], variants[j]);
                exported = exported || (resolved != NULL && dlsym(library, name) == resolved);
            }
            CHECK(exported, "%s with flags %d is no address of an exported function", names[i], (int)flags);
        }
}

int main(int count, char **arguments)
{
    static const named_case cases[] = {
        {"destroyed_context", destroyed_context},
        {"primary_handle", primary_handle},
        {"sticky_error", sticky_error},
        {"capture_queries", capture_queries},
        {"capture_of_context", capture_of_context},
        {"capture_and_defaults", capture_and_defaults},
        {"default_handles", default_handles},
        {"captured_memory", captured_memory},
        {"pool_pieces", pool_pieces},
        {"pool_waits", pool_waits},
        {"bounds", bounds},
        {"mappings", mappings},
        {"no_legacy_ipc", no_legacy_ipc},
        {"full_card", full_card},
        {"host_functions", host_functions},
        {"pending_event", pending_event},
        {"graph_elsewhere", graph_elsewhere},
        {"exit_handlers", exit_handlers},
        {"checkpoint_lock", checkpoint_lock},
        {"checkpoint_memory", checkpoint_memory},
        {"checkpoint_managed", checkpoint_managed},
        {"ended_process", ended_process},
        {"resolved_addresses", resolved_addresses},
        {NULL, NULL},
    };
    const int wrong = run_case(cases, count, arguments);
    return absent ? 77 : wrong;
}
