/* Several threads at everything at once, for the sanitizers: streams, events, copies, kernels, callbacks, graphs, mapped
 * and managed memory, several contexts; and a thread that parks the whole process, each time on the other GPU.  Exits with 0 when every result and every byte was as it has to be.
 */
#include <cuda.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define THREADS 4
#define ROUNDS 60
#define BYTES ((size_t)256 << 10)

#define CHECK(call)                                                                             \
    do {                                                                                        \
        CUresult result = (call);                                                               \
        if (result != CUDA_SUCCESS) {                                                           \
            fprintf(stderr, "%s:%d: %s returned %d\n", __FILE__, __LINE__, #call, (int)result); \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)
#define DEMAND(condition)                                                                       \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #condition);                 \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)

static CUcontext primary;
static CUfunction kernel;

static void CUDA_CB count(void *number) { ++*(int *)number; }

static void copies(CUstream stream, CUstream other, int round)
{
    CUdeviceptr a, b;
    CUevent event;
    char *host = malloc(BYTES), *back = malloc(BYTES);
    unsigned long long busy_ns = 1000;
    void *parameters[] = {&busy_ns};
    int calls = 0;
    DEMAND(host != NULL && back != NULL);
    memset(host, round + 1, BYTES);
    CHECK(cuMemAlloc(&a, BYTES));
    CHECK(cuMemAllocAsync(&b, BYTES, stream));
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK(cuMemcpyHtoDAsync(a, host, BYTES, stream));
    CHECK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
    CHECK(cuLaunchHostFunc(stream, count, &calls));
    CHECK(cuEventRecord(event, stream));
    CHECK(cuStreamWaitEvent(other, event, 0));
    CHECK(cuMemcpyDtoDAsync(b, a, BYTES, other));
    CHECK(cuMemsetD8Async(b, 0xee, 16, other));
    CHECK(cuMemcpyDtoHAsync(back, b, BYTES, other));
    DEMAND(calls == 1);
    DEMAND(back[0] == (char)0xee && back[16] == (char)(round + 1) && back[BYTES - 1] == (char)(round + 1));
    CHECK(cuEventSynchronize(event));
    CHECK(cuMemFreeAsync(b, other));
    CHECK(cuMemFree(a));
    CHECK(cuEventDestroy(event));
    free(host);
    free(back);
}

static void mapped(void)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    CUmemAccessDesc access = {.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    size_t bytes = (size_t)2 << 20;
    unsigned char first;
    properties.location.type = access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CHECK(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    CHECK(cuMemCreate(&handle, bytes, &properties, 0));
    for (int turn = 0; turn < 2; turn++) {
        CHECK(cuMemMap(address, bytes, 0, handle, 0));
        CHECK(cuMemSetAccess(address, bytes, &access, 1));
        if (turn == 0)
            CHECK(cuMemsetD8(address, 0x5a, bytes));
        CHECK(cuMemcpyDtoH(&first, address, 1));
        DEMAND(first == 0x5a);
        CHECK(cuMemUnmap(address, bytes));
    }
    CHECK(cuMemRelease(handle));
    CHECK(cuMemAddressFree(address, bytes));
}

static void graphs(CUstream stream)
{
    CUgraph graph;
    CUgraphExec executable;
    CUdeviceptr p;
    unsigned char bytes[4];
    unsigned long long busy_ns = 1000;
    void *parameters[] = {&busy_ns};
    CHECK(cuMemAlloc(&p, 64));
    CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    CHECK(cuMemsetD8Async(p, 3, 64, stream));
    CHECK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
    CHECK(cuStreamEndCapture(stream, &graph));
    CHECK(cuGraphInstantiate(&executable, graph, 0));
    CHECK(cuGraphLaunch(executable, stream));
    CHECK(cuGraphExecDestroy(executable));
    CHECK(cuGraphDestroy(graph));
    CHECK(cuMemcpyDtoHAsync(bytes, p, sizeof bytes, stream));
    DEMAND(bytes[3] == 3);
    CHECK(cuMemFree(p));
}

static void managed(CUstream stream)
{
    CUdeviceptr p;
    CUmemLocation card = {.type = CU_MEM_LOCATION_TYPE_DEVICE}, host = {.type = CU_MEM_LOCATION_TYPE_HOST};
    CHECK(cuMemAllocManaged(&p, BYTES, CU_MEM_ATTACH_GLOBAL));
    CHECK(cuMemPrefetchAsync(p, BYTES, card, 0, stream));
    CHECK(cuMemPrefetchAsync(p, BYTES, host, 0, stream));
    CHECK(cuMemFree(p));
}

static void *work(void *number)
{
    CUcontext own;
    CUstream stream, other;
    CHECK(cuCtxSetCurrent(primary));
    for (int round = 0; round < ROUNDS; round++) {
        CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
        copies(stream, other, round);
        graphs(stream);
        managed(other);
        CHECK(cuStreamDestroy(stream));
        CHECK(cuStreamDestroy(other));
        if (round % 8 == 0)
            mapped();
        if (round % 16 == *(int *)number) {
            CUdeviceptr p;
            CHECK(cuCtxCreate(&own, NULL, 0, 0));
            CHECK(cuMemAlloc(&p, BYTES));
            CHECK(cuMemsetD8(p, 1, BYTES));
            CHECK(cuCtxDestroy(own));
            CHECK(cuCtxSetCurrent(primary));
        }
    }
    return NULL;
}

static atomic_bool ended;

static void *park(void *unused)
{
    CUcheckpointGpuPair pairs[2];
    CUcheckpointRestoreArgs swapped = {.gpuPairs = pairs, .gpuPairsCount = 2};
    CUprocessState state;
    int parked = 0;
    CHECK(cuDeviceGetUuid(&pairs[0].oldUuid, 0));
    CHECK(cuDeviceGetUuid(&pairs[0].newUuid, 1));
    pairs[1] = (CUcheckpointGpuPair){.oldUuid = pairs[0].newUuid, .newUuid = pairs[0].oldUuid};
    while (!ended || parked == 0) {
        CHECK(cuCheckpointProcessLock(getpid(), NULL));
        const CUresult result = cuCheckpointProcessCheckpoint(getpid(), NULL);
        if (result == CUDA_SUCCESS) {
            parked++;
            CHECK(cuCheckpointProcessRestore(getpid(), &swapped));
        } else {
            DEMAND(result == CUDA_ERROR_NOT_SUPPORTED); /* a thread has managed memory */
        }
        CHECK(cuCheckpointProcessUnlock(getpid(), NULL));
        CHECK(cuCheckpointProcessGetState(getpid(), &state));
        DEMAND(state == CU_PROCESS_STATE_RUNNING);
    }
    return NULL;
}

int main(void)
{
    static const char image[] = ".version 8.0\n.target sm_90\n.visible .entry nvs_busy(.param .u64 n) { ret; }\n";
    pthread_t threads[THREADS], parker;
    int numbers[THREADS];
    CUmodule module;
    size_t unused, total;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&primary, 0));
    CHECK(cuCtxSetCurrent(primary));
    CHECK(cuModuleLoadData(&module, image));
    CHECK(cuModuleGetFunction(&kernel, module, "nvs_busy"));
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        DEMAND(pthread_create(&threads[i], NULL, work, &numbers[i]) == 0);
    }
    DEMAND(pthread_create(&parker, NULL, park, NULL) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    ended = true;
    pthread_join(parker, NULL);
    CHECK(cuCtxSynchronize());
    CHECK(cuMemGetInfo(&unused, &total));
    DEMAND(unused == total);
    CHECK(cuModuleUnload(module));
    CHECK(cuDevicePrimaryCtxRelease(0));
    puts("ok");
    return 0;
}
