/* Two processes that share memory by cuIpcGetMemHandle, both ways, and check every byte.
 *
 * `pair ROUNDS OWN-MIB SHARED-MIB`: this process and a child (fork and exec, before CUDA) each allocate memory of their own and memory to share; each opens the
 * other's.  In each round one writes into what the other exported and the other checks it, while their own memory, which does not fit
 * on the card together, comes and goes.  Prints one line of JSON from each end.
 *
 * `errors`: prints what the driver, or the hook, says in the cases where it says no, one name and number a line.
 */
#define _GNU_SOURCE
#include <cuda.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

static void must(CUresult result, const char *what)
{
    if (result == CUDA_SUCCESS)
        return;
    fprintf(stderr, "%s: error %d (process %d)\n", what, (int)result, (int)getpid());
    exit(1);
}
#define MUST(call) must(call, #call)

static CUcontext context;

static void begin(void)
{
    CUdevice device;
    MUST(cuInit(0));
    MUST(cuDeviceGet(&device, 0));
    MUST(cuDevicePrimaryCtxRetain(&context, device));
    MUST(cuCtxSetCurrent(context));
}

static void tell(int link, const void *what, size_t bytes)
{
    if (write(link, what, bytes) != (ssize_t)bytes)
        exit(3);
}

static void hear(int link, void *what, size_t bytes)
{
    if (recv(link, what, bytes, MSG_WAITALL) != (ssize_t)bytes)
        exit(4);
}

static void fill(uint32_t *words, size_t bytes, uint32_t seed)
{
    for (size_t i = 0; i < bytes / 4; i++)
        words[i] = (uint32_t)(i * 2654435761u) ^ (seed * 0x9e3779b9u);
}

static void put(CUdeviceptr to, size_t bytes, uint32_t seed, uint32_t *buffer)
{
    fill(buffer, bytes, seed);
    MUST(cuMemcpyHtoD(to, buffer, bytes));
}

static size_t wrong(CUdeviceptr from, size_t bytes, uint32_t seed, uint32_t *buffer)
{
    size_t count = 0;
    MUST(cuMemcpyDtoH(buffer, from, bytes));
    for (size_t i = 0; i < bytes / 4; i++)
        count += buffer[i] != ((uint32_t)(i * 2654435761u) ^ (seed * 0x9e3779b9u));
    return count;
}

/* One end; `first` writes in even rounds. */
static int run_end(int link, bool first, unsigned rounds, size_t own_bytes, size_t shared_bytes)
{
    uint32_t *buffer = malloc(own_bytes > shared_bytes ? own_bytes : shared_bytes);
    CUdeviceptr own, shared, other;
    CUipcMemHandle handle, theirs;
    size_t mismatches = 0;
    char ready = 1;
    begin();
    MUST(cuMemAlloc(&own, own_bytes));
    MUST(cuMemAlloc(&shared, shared_bytes));
    put(own, own_bytes, 100u + first, buffer);
    MUST(cuIpcGetMemHandle(&handle, shared));
    tell(link, &handle, sizeof handle);
    hear(link, &theirs, sizeof theirs);
    MUST(cuIpcOpenMemHandle(&other, theirs, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    for (unsigned round = 0; round < rounds; round++) {
        const bool mine = (round % 2 == 0) == first;
        if (mine)
            put(other, shared_bytes, round, buffer);
        tell(link, &ready, 1);
        hear(link, &ready, 1);
        mismatches += wrong(mine ? other : shared, shared_bytes, round, buffer);
        mismatches += wrong(own, own_bytes, 100u + first, buffer);
        tell(link, &ready, 1); /* nobody writes what the other still reads */
        hear(link, &ready, 1);
    }
    MUST(cuIpcCloseMemHandle(other));
    tell(link, &ready, 1); /* nobody frees what the other has open */
    hear(link, &ready, 1);
    MUST(cuMemFree(shared));
    MUST(cuMemFree(own));
    MUST(cuDevicePrimaryCtxRelease(0));
    free(buffer);
    printf("{\"mismatches\": %zu, \"rounds\": %u}\n", mismatches, rounds);
    fflush(stdout);
    return mismatches != 0;
}

static int run_pair(char **argv)
{
    int ends[2], status;
    char descriptor[16];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        return 2;
    const pid_t child = fork();
    if (child == 0) {
        snprintf(descriptor, sizeof descriptor, "%d", ends[1]);
        close(ends[0]);
        execl("/proc/self/exe", argv[0], "end", descriptor, argv[2], argv[3], argv[4], (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    const int failed = run_end(ends[0], true, (unsigned)atoi(argv[2]), (size_t)atoi(argv[3]) * MIB, (size_t)atoi(argv[4]) * MIB);
    return waitpid(child, &status, 0) == child && status == 0 ? failed : 5;
}

/* In the child: opens what it hears of, and says what came of it. */
static int run_opener(int link)
{
    CUipcMemHandle handle;
    CUdeviceptr pointer, again;
    begin();
    while (recv(link, &handle, sizeof handle, MSG_WAITALL) == (ssize_t)sizeof handle) {
        CUresult said[4] = {0};
        said[0] = cuIpcOpenMemHandle(&pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        if (said[0] == CUDA_SUCCESS) {
            said[1] = cuIpcOpenMemHandle(&again, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
            if (said[1] == CUDA_SUCCESS && again != pointer)
                said[1] = CUDA_ERROR_UNKNOWN;
            MUST(cuIpcCloseMemHandle(pointer));
            MUST(cuIpcCloseMemHandle(pointer));
            said[2] = cuIpcCloseMemHandle(pointer);
            said[3] = cuIpcOpenMemHandle(&pointer, handle, 0);
        }
        tell(link, said, sizeof said);
    }
    return 0;
}

static int run_errors(char **argv)
{
    int ends[2];
    char descriptor[16];
    CUipcMemHandle handle, same;
    CUresult said[4];
    CUdeviceptr memory, pointer;
    unsigned int capable = 9;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        return 2;
    if (fork() == 0) {
        snprintf(descriptor, sizeof descriptor, "%d", ends[1]);
        close(ends[0]);
        execl("/proc/self/exe", argv[0], "opener", descriptor, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    begin();
    MUST(cuMemAlloc(&memory, 4 * MIB));
    MUST(cuIpcGetMemHandle(&handle, memory));
    MUST(cuIpcGetMemHandle(&same, memory + MIB));
    printf("same_handle %d\n", memcmp(&handle, &same, sizeof handle) == 0);
    MUST(cuPointerGetAttribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, memory));
    printf("capable %u\n", capable);
    printf("own %d\n", (int)cuIpcOpenMemHandle(&pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    printf("get_null %d\n", (int)cuIpcGetMemHandle(NULL, memory));
    printf("get_nothing %d\n", (int)cuIpcGetMemHandle(&same, 4096));
    printf("close_nothing %d\n", (int)cuIpcCloseMemHandle(memory));
    tell(ends[0], &handle, sizeof handle);
    hear(ends[0], said, sizeof said);
    printf("open %d\nopen_again %d\nclose_closed %d\nopen_flags %d\n", (int)said[0], (int)said[1], (int)said[2], (int)said[3]);
    MUST(cuMemFree(memory));
    tell(ends[0], &handle, sizeof handle);
    hear(ends[0], said, sizeof said);
    printf("open_freed %d\n", (int)said[0]);
    memset(&handle, 0x5a, sizeof handle);
    tell(ends[0], &handle, sizeof handle);
    hear(ends[0], said, sizeof said);
    printf("open_garbage %d\n", (int)said[0]);
    close(ends[0]);
    return wait(NULL) < 0;
}

int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[1], "pair") == 0)
        return run_pair(argv);
    if (argc == 6 && strcmp(argv[1], "end") == 0)
        return run_end(atoi(argv[2]), false, (unsigned)atoi(argv[3]), (size_t)atoi(argv[4]) * MIB, (size_t)atoi(argv[5]) * MIB);
    if (argc == 2 && strcmp(argv[1], "errors") == 0)
        return run_errors(argv);
    if (argc == 3 && strcmp(argv[1], "opener") == 0)
        return run_opener(atoi(argv[2]));
    fprintf(stderr, "usage: ipc_program pair ROUNDS OWN-MIB SHARED-MIB | errors\n");
    return 2;
}
