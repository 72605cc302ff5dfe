/* One process, a thread for each of two linked GPUs: in each round a kernel of each waits for that of the other, as those of a collective do.  See semantics.h. */
#include "semantics.h"

#include <pthread.h>
#include <stdatomic.h>

enum { ROUNDS = 400 };
static const char meeting[] = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nvs_call(.param .u64 function, .param .u64 data) { ret; }\n";

static CUcontext contexts[2];
static _Atomic int arrived[2];

static void meet(void *own)
{
    _Atomic int *mine = own, *other = mine == arrived ? arrived + 1 : arrived;
    const int round = ++*mine;
    while (*other < round)
        usleep(100);
}

static void *rank(void *argument)
{
    const size_t gpu = (size_t)(uintptr_t)argument;
    void (*function)(void *) = meet;
    _Atomic int *data = &arrived[gpu];
    void *parameters[] = {&function, &data};
    CUmodule loaded;
    CUfunction kernel;
    OK(cuCtxSetCurrent(contexts[gpu]));
    OK(cuModuleLoadData(&loaded, meeting));
    OK(cuModuleGetFunction(&kernel, loaded, "nvs_call"));
    const CUstream stream = new_stream();
    for (int round = 0; round < ROUNDS; round++) {
        OK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
        OK(cuStreamSynchronize(stream));
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[2];
    OK(cuInit(0));
    for (int gpu = 0; gpu < 2; gpu++)
        OK(cuDevicePrimaryCtxRetain(&contexts[gpu], gpu));
    OK(cuCtxSetCurrent(contexts[0]));
    OK(cuCtxEnablePeerAccess(contexts[1], 0));
    for (size_t gpu = 0; gpu < 2; gpu++)
        CHECK(pthread_create(&threads[gpu], NULL, rank, (void *)(uintptr_t)gpu) == 0, "no thread");
    for (size_t gpu = 0; gpu < 2; gpu++)
        pthread_join(threads[gpu], NULL);
    CHECK(arrived[0] == ROUNDS && arrived[1] == ROUNDS, "rounds were lost");
    printf("%s\n", complaints == 0 ? "good" : "bad");
    return complaints != 0;
}
