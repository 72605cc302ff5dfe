/* Threads that allocate in stream order, and free what others have allocated: pool_threads usual | special
 *
 * `special`: halfway through, one of them makes a pool that other processes may share, as from which the hook takes its long way
 * (base/hot.h).  Whatever the way, contents stay.  In the end it says what it found and waits for a line, so that what the hook counts
 * then can be looked at.
 */
#include "cuda_program.h"

#include <pthread.h>
#include <stdatomic.h>

enum { THREADS = 4, ROUNDS = 80, HELD = 6, PAGE = 64 << 10 };

typedef struct piece {
    CUdeviceptr memory;
    size_t bytes;
    unsigned value;
} piece;

static _Atomic(piece *) exchange; /* what one thread leaves for the next one that comes by */
static bool special;

static piece *make(CUstream stream, unsigned value)
{
    piece *made = malloc(sizeof *made);
    *made = (piece){.bytes = (size_t)PAGE * (1 + value % 9), .value = value};
    OK(cuMemAllocAsync(&made->memory, made->bytes, stream));
    OK(cuMemsetD32Async(made->memory, value, made->bytes / 4, stream));
    return made;
}

/* The work that fills it is done. */
static void end(piece *one, CUstream stream, bool by_stream)
{
    if (one == NULL)
        return;
    CHECK(holds(one->memory, one->bytes, one->value), "memory of a pool has changed");
    if (by_stream)
        OK(cuMemFreeAsync(one->memory, stream));
    else
        OK(cuMemFree(one->memory));
    free(one);
}

static void make_special_pool(void)
{
    const CUmemPoolProps shared = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                   .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemoryPool pool;
    OK(cuMemPoolCreate(&pool, &shared));
    OK(cuMemPoolDestroy(pool));
}

static void *work(void *number)
{
    const unsigned self = (unsigned)(uintptr_t)number;
    piece *held[HELD] = {NULL};
    CUstream stream;
    OK(cuCtxSetCurrent(primary));
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (unsigned round = 0; round < ROUNDS; round++) {
        piece **place = &held[round % HELD];
        OK(launch(stream, 20000));
        OK(cuStreamSynchronize(stream));
        /* acq_rel: what the piece says was written by who left it */
        piece *other = *place == NULL || round % 5 != 0 ? *place : atomic_exchange_explicit(&exchange, *place, memory_order_acq_rel);
        end(other, stream, round % 7 != 0);
        *place = make(stream, self * ROUNDS + round);
        if (special && self == 0 && round == ROUNDS / 2)
            make_special_pool();
    }
    OK(cuStreamSynchronize(stream));
    for (unsigned i = 0; i < HELD; i++)
        end(held[i], stream, true);
    OK(cuStreamSynchronize(stream));
    OK(cuStreamDestroy(stream));
    return NULL;
}

int main(int count, char **arguments)
{
    pthread_t threads[THREADS];
    special = count > 1 && strcmp(arguments[1], "special") == 0;
    begin();
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0, "no thread");
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    end(atomic_load_explicit(&exchange, memory_order_acquire), NULL, true);
    OK(cuCtxSynchronize());
    size_t unused, total;
    OK(cuMemGetInfo(&unused, &total)); /* what was freed in stream order and is done is given back by whoever asks */
    printf("%s\n", complaints == 0 ? "good" : "bad");
    fflush(stdout);
    (void)getchar();
    return complaints != 0;
}
