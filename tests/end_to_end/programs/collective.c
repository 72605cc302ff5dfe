/* One process, a thread for each of two linked GPUs: in each round a kernel of each waits for that of the other, as those of a collective do. */
#include "cuda_program.h"

#include <pthread.h>
#include <stdatomic.h>

enum { ROUNDS = 400 };

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
    CUmodule loaded;
    CUfunction kernel;
    OK(cuCtxSetCurrent(contexts[gpu]));
    OK(cuModuleLoadData(&loaded, image));
    OK(cuModuleGetFunction(&kernel, loaded, "nvs_call"));
    const CUstream stream = new_stream();
    for (int round = 0; round < ROUNDS; round++) {
        OK(launch_call(kernel, stream, meet, &arrived[gpu]));
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
