/* Threads that all allocate at the same moment: crowd_allocates THREADS BYTES.  Prints how many were refused, as JSON. */
#include "cuda_program.h"

#include <pthread.h>
#include <stdatomic.h>

static pthread_barrier_t barrier;
static size_t bytes;
static _Atomic int refused;

static void *allocate(void *argument)
{
    CUdeviceptr pointer;
    (void)argument;
    cuCtxSetCurrent(primary);
    pthread_barrier_wait(&barrier);
    if (cuMemAlloc(&pointer, bytes) != CUDA_SUCCESS)
        atomic_fetch_add(&refused, 1);
    return NULL;
}

int main(int argc, char **argv)
{
    const int count = argc == 3 ? atoi(argv[1]) : 0;
    pthread_t *threads = calloc((size_t)count + 1, sizeof *threads);
    bytes = argc == 3 ? strtoull(argv[2], NULL, 10) : 0;
    if (count == 0 || threads == NULL || pthread_barrier_init(&barrier, NULL, (unsigned)count) != 0)
        return 2;
    begin();
    (void)filled(512, 1);
    OK(cuCtxSynchronize());
    for (int i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, allocate, NULL) != 0)
            return 4;
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    printf("{\"refused\": %d}\n", atomic_load(&refused));
    return complaints != 0;
}
