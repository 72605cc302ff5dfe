/* Contexts that end while their work runs, each way to end one.
 *
 * Says "ready".  In: a line, out: the CUresult.  "begin WAY": makes such a context current; "block": work that ends at "unblock"; "end": a thread
 * says "ends", ends the context, and answers when it has; "call": that thread meanwhile fills memory of another context, in a signal's
 * handler; "state": the lease's, as nvshare.h has it; "gone": uses a context after its end.
 */
#include "cuda_program.h"

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* cuCtxDetach, which old programs call */

static char way[16];
static CUcontext context;
static CUgreenCtx green;
static CUstream stream;
static CUdeviceptr other_memory;
static CUstream other_stream;
static sem_t unblocked;
static atomic_bool over;

static void wait_for_unblock(void *nothing)
{
    while (sem_wait(&unblocked) != 0) {
    }
}

static bool is(const char *name)
{
    return strcmp(way, name) == 0;
}

/* A kernel that ends when a function on the host has returned. */
static CUresult block(void)
{
    CUlibrary library;
    CUkernel kernel;
    TRY(cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0));
    TRY(cuLibraryGetKernel(&kernel, library, "nvs_call"));
    return launch_call((CUfunction)kernel, stream, wait_for_unblock, NULL);
}

static CUresult make_green(void)
{
    CUdevResource part;
    CUdevResourceDesc described;
    TRY(cuDeviceGetDevResource(0, &part, CU_DEV_RESOURCE_TYPE_SM));
    TRY(cuDevResourceGenerateDesc(&described, &part, 1));
    return cuGreenCtxCreate(&green, described, 0, CU_GREEN_CTX_DEFAULT_STREAM);
}

/* Its context has to be another one than what ends. */
static CUresult make_other(void)
{
    CUcontext other;
    TRY(cuCtxCreate(&other, NULL, 0, 0));
    TRY(cuMemAlloc(&other_memory, 4096));
    TRY(cuStreamCreate(&other_stream, CU_STREAM_NON_BLOCKING));
    return cuCtxPopCurrent(&other);
}

static CUresult begin_way(void)
{
    TRY(cuInit(0));
    if (is("green")) {
        TRY(make_green());
        return cuGreenCtxStreamCreate(&stream, green, CU_STREAM_NON_BLOCKING, 0);
    }
    TRY(make_other());
    if (is("lives"))
        TRY(make_green()); /* which retains the primary context, past every hook */
    if (is("destroy") || is("detach")) {
        TRY(cuCtxCreate(&context, NULL, 0, 0));
    } else {
        TRY(cuDevicePrimaryCtxRetain(&context, 0));
        TRY(cuCtxSetCurrent(context));
    }
    return cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
}

/* What seems to be the last release, until the work is over: the context lives on. */
static CUresult release_in_vain(void)
{
    while (!atomic_load_explicit(&over, memory_order_relaxed)) {
        TRY(cuDevicePrimaryCtxRelease(0));
        TRY(cuDevicePrimaryCtxRetain(&context, 0));
    }
    return CUDA_SUCCESS;
}

static CUresult end(void)
{
    if (is("green"))
        return cuGreenCtxDestroy(green);
    if (is("destroy"))
        return cuCtxDestroy(context);
    if (is("detach"))
        return cuCtxSetCurrent(context) == CUDA_SUCCESS ? cuCtxDetach(context) : CUDA_ERROR_UNKNOWN;
    if (is("lives"))
        return release_in_vain();
    return is("reset") ? cuDevicePrimaryCtxReset(0) : cuDevicePrimaryCtxRelease(0);
}

static void *in_thread(void *nothing)
{
    puts("ends");
    printf("%d\n", (int)end());
    return NULL;
}

static void call(int number)
{
    printf("%d\n", (int)cuMemsetD8Async(other_memory, 1, 16, other_stream));
}

/* A program that goes on with a context that it has destroyed hears so from each call. */
static CUresult use_what_is_gone(void)
{
    CUdeviceptr memory;
    TRY(cuInit(0));
    TRY(make_other());
    TRY(cuCtxCreate(&context, NULL, 0, 0));
    TRY(cuCtxDestroy(context));
    if (cuCtxDestroy(context) != CUDA_ERROR_INVALID_CONTEXT || cuCtxDetach(context) != CUDA_ERROR_INVALID_CONTEXT)
        return CUDA_ERROR_UNKNOWN;
    TRY(cuCtxSetCurrent(context));
    (void)cuMemsetD8Async(other_memory, 1, 16, NULL); /* drivers say one thing or another */
    return cuMemAlloc(&memory, 4096) == CUDA_ERROR_CONTEXT_IS_DESTROYED ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

static int unblock(void)
{
    atomic_store_explicit(&over, true, memory_order_relaxed);
    return sem_post(&unblocked);
}

int main(void)
{
    char line[64];
    pthread_t thread;
    bool ending = false;
    setvbuf(stdout, NULL, _IOLBF, 0);
    sem_init(&unblocked, 0, 0);
    signal(SIGUSR1, call);
    puts("ready");
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (sscanf(line, "begin %15s", way) == 1)
            printf("%d\n", (int)begin_way());
        else if (strcmp(line, "block") == 0)
            printf("%d\n", (int)block());
        else if (strcmp(line, "unblock") == 0)
            printf("%d\n", unblock());
        else if (strcmp(line, "gone") == 0)
            printf("%d\n", (int)use_what_is_gone());
        else if (strcmp(line, "state") == 0)
            printf("%u\n", of_hook().lease);
        else if (strcmp(line, "call") == 0)
            pthread_kill(thread, SIGUSR1);
        else if (!(ending = pthread_create(&thread, NULL, in_thread, NULL) == 0))
            puts("no thread");
    }
    return ending ? pthread_join(thread, NULL) : 0;
}
