/* Contexts that end while their work runs, each way to end one.
 *
 * Says "ready".  In: a line, out: the CUresult.  "begin WAY": makes such a context current; "block": work that ends at "unblock"; "end": ends
 * the context, in a thread of its own: answered when it has; "state": the lease's, as nvshare.h has it.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "nvshare.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* cuCtxDetach, which old programs call */

#define TRY(call)                                  \
    do {                                           \
        const CUresult failed_ = (call);           \
        if (failed_ != CUDA_SUCCESS)               \
            return failed_;                        \
    } while (0)

static char way[16];
static CUcontext context;
static CUgreenCtx green;
static CUstream stream;
static sem_t unblocked;

static CUresult begin_green(void)
{
    CUdevResource part;
    CUdevResourceDesc described;
    TRY(cuDeviceGetDevResource(0, &part, CU_DEV_RESOURCE_TYPE_SM));
    TRY(cuDevResourceGenerateDesc(&described, &part, 1));
    TRY(cuGreenCtxCreate(&green, described, 0, CU_GREEN_CTX_DEFAULT_STREAM));
    return cuGreenCtxStreamCreate(&stream, green, CU_STREAM_NON_BLOCKING, 0);
}

static CUresult begin(void)
{
    TRY(cuInit(0));
    if (strcmp(way, "green") == 0)
        return begin_green();
    if (strcmp(way, "destroy") == 0 || strcmp(way, "detach") == 0) {
        TRY(cuCtxCreate(&context, NULL, 0, 0));
    } else {
        TRY(cuDevicePrimaryCtxRetain(&context, 0));
        TRY(cuCtxSetCurrent(context));
    }
    return cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
}

static CUresult end(void)
{
    if (strcmp(way, "green") == 0)
        return cuGreenCtxDestroy(green);
    if (strcmp(way, "destroy") == 0)
        return cuCtxDestroy(context);
    if (strcmp(way, "detach") == 0)
        return cuCtxSetCurrent(context) == CUDA_SUCCESS ? cuCtxDetach(context) : CUDA_ERROR_UNKNOWN;
    return strcmp(way, "reset") == 0 ? cuDevicePrimaryCtxReset(0) : cuDevicePrimaryCtxRelease(0);
}

static void *in_thread(void *nothing)
{
    printf("%d\n", (int)end());
    return NULL;
}

static void wait_for_unblock(void *nothing)
{
    while (sem_wait(&unblocked) != 0) {
    }
}

static unsigned lease_state(void)
{
    struct nvshare_gpu state = {.size = sizeof state};
    int (*ask)(uint32_t, struct nvshare_gpu *);
    *(void **)&ask = dlsym(RTLD_DEFAULT, "nvshare_gpu_state");
    return ask != NULL && ask(0, &state) == 0 ? state.lease : UINT32_MAX;
}

int main(void)
{
    char line[64];
    pthread_t thread;
    bool ending = false;
    setvbuf(stdout, NULL, _IOLBF, 0);
    sem_init(&unblocked, 0, 0);
    puts("ready");
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (sscanf(line, "begin %15s", way) == 1)
            printf("%d\n", (int)begin());
        else if (strcmp(line, "block") == 0)
            printf("%d\n", (int)cuLaunchHostFunc(stream, wait_for_unblock, NULL));
        else if (strcmp(line, "unblock") == 0)
            printf("%d\n", sem_post(&unblocked));
        else if (strcmp(line, "state") == 0)
            printf("%u\n", lease_state());
        else if (!(ending = pthread_create(&thread, NULL, in_thread, NULL) == 0))
            puts("no thread");
    }
    return ending ? pthread_join(thread, NULL) : 0;
}
