/* Contexts, and what belongs to them, that begin and end in one thread beside calls of others: ending_contexts CASE [PERCENT of the rounds]
 *
 * The threads share nothing, but the driver gives each of them the handles that another one has just given back.
 */
#include "cuda_program.h"

#include <pthread.h>
#include <stdatomic.h>

enum { THREADS = 4, PIECES = 6, PAGE = 64 << 10 };

static _Atomic unsigned running;
static unsigned percent = 100;

typedef struct side { /* a thread */
    pthread_t thread;
    void (*round)(unsigned number, unsigned round);
    unsigned number, rounds;
} side;

static void *go_round(void *argument)
{
    const side *self = argument;
    for (unsigned i = 0; i < self->rounds && complaints == 0; i++)
        self->round(self->number, i);
    atomic_fetch_sub(&running, 1);
    return NULL;
}

/* Runs rounds in several threads, and `beside` in this one until they have ended. */
static void in_threads(unsigned threads, void (*round)(unsigned number, unsigned round), unsigned rounds, void (*beside)(void))
{
    side sides[THREADS];
    atomic_store(&running, threads);
    for (unsigned i = 0; i < threads; i++) {
        sides[i] = (side){.round = round, .number = i, .rounds = rounds * percent / 100};
        CHECK(pthread_create(&sides[i].thread, NULL, go_round, &sides[i]) == 0, "no thread");
    }
    while (beside != NULL && atomic_load(&running) != 0)
        beside();
    for (unsigned i = 0; i < threads; i++)
        pthread_join(sides[i].thread, NULL);
}

static void nothing_is_left(void)
{
    size_t unused, total;
    OK(cuMemGetInfo(&unused, &total)); /* gives back what was freed in stream order */
    const uint64_t left = of_hook().allocated_bytes;
    CHECK(left <= 2 * MIB, "%llu bytes are still charged", (unsigned long long)left); /* mode `swap` keeps a chunk for the next small allocation */
}

/* Memory in the current context: contents stay until it is freed, or ends with the context. */
static void use_memory(unsigned seed, CUstream stream, bool in_order, bool free_all)
{
    CUdeviceptr pieces[PIECES];
    for (unsigned i = 0; i < PIECES; i++) {
        if (in_order)
            OK(cuMemAllocAsync(&pieces[i], PAGE, stream));
        else
            OK(cuMemAlloc(&pieces[i], PAGE));
        OK(cuMemsetD32Async(pieces[i], seed + i, PAGE / 4, stream));
    }
    OK(cuStreamSynchronize(stream));
    for (unsigned i = 0; i < PIECES; i++)
        CHECK(holds(pieces[i], PAGE, seed + i), "memory %u of %u has changed", i, seed);
    for (unsigned i = 0; i < PIECES; i += free_all ? 1 : 2) {
        if (in_order)
            OK(cuMemFreeAsync(pieces[i], stream));
        else
            OK(cuMemFree(pieces[i]));
    }
}

/* ---- Cases ---- */

static void make_and_end(unsigned number, unsigned round)
{
    CUcontext context = NULL;
    OK(cuCtxCreate(&context, NULL, 0, 0));
    use_memory(number << 24 | round << 8, new_stream(), number % 2 != 0, false);
    OK(cuCtxDestroy(context));
}

static void contexts(void)
{
    begin();
    in_threads(THREADS, make_and_end, 100, NULL);
    nothing_is_left();
}

static void free_and_end(unsigned number, unsigned round)
{
    CUcontext context = NULL;
    OK(cuCtxCreate(&context, NULL, 0, 0));
    CUstream stream = new_stream();
    for (int i = 0; i < PIECES; i++) {
        CUdeviceptr memory = 0;
        OK(cuMemAllocAsync(&memory, (size_t)(i + 1) * PAGE, stream));
        OK(cuMemsetD8Async(memory, (unsigned char)(number + round), PAGE, stream));
        OK(cuMemFreeAsync(memory, stream));
    }
    OK(cuStreamSynchronize(stream));
    OK(cuCtxDestroy(context));
}

static void give_back(void)
{
    size_t left, total;
    OK(cuMemGetInfo(&left, &total));
    OK(cuMemFree(filled(PAGE, 3)));
}

static void frees(void)
{
    begin();
    in_threads(THREADS, free_and_end, 150, give_back);
    nothing_is_left();
}

/* Its last user ends it, and the next one opens it again, with the same handle. */
static void retain_and_release(unsigned number, unsigned round)
{
    CUcontext context = NULL;
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    use_memory(number << 24 | round << 8, new_stream(), number % 2 != 0, round % 2 != 0);
    OK(cuCtxSetCurrent(NULL));
    OK(cuDevicePrimaryCtxRelease(0));
}

static void primaries(void)
{
    OK(cuInit(0));
    in_threads(2, retain_and_release, 200, NULL);
    begin();
    nothing_is_left();
}

static void make_green(unsigned number, unsigned round)
{
    CUcontext context = NULL;
    CUstream stream = NULL;
    const CUgreenCtx green = new_green(2, &context);
    OK(cuCtxSetCurrent(context));
    OK(cuGreenCtxStreamCreate(&stream, green, CU_STREAM_NON_BLOCKING, 0));
    use_memory(number << 24 | round << 8, stream, true, true);
    OK(cuStreamDestroy(stream));
    OK(cuCtxSetCurrent(NULL));
    OK(cuGreenCtxDestroy(green));
}

static void greens(void)
{
    begin();
    in_threads(THREADS, make_green, 60, give_back);
    nothing_is_left();
}

static void capture(unsigned number, unsigned round)
{
    (void)number, (void)round;
    CUgraph graph = NULL;
    OK(cuCtxSetCurrent(primary));
    CUstream stream = new_stream();
    OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(launch(stream, 1000));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphDestroy(graph));
    OK(cuStreamDestroy(stream));
}

static void launch_beside(void)
{
    OK(launch(CU_STREAM_LEGACY, 50000));
    OK(cuStreamSynchronize(CU_STREAM_LEGACY));
}

static void streams(void)
{
    begin();
    in_threads(THREADS, capture, 300, launch_beside);
    let_others();
}

static void make_pool(unsigned number, unsigned round)
{
    const CUmemPoolProps plain = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemoryPool pool = NULL;
    CUdeviceptr memory = 0;
    uint64_t used = 0;
    OK(cuCtxSetCurrent(primary));
    CUstream stream = new_stream();
    OK(cuMemPoolCreate(&pool, &plain));
    OK(cuMemAllocFromPoolAsync(&memory, PAGE, pool, stream));
    OK(cuMemsetD32Async(memory, number << 24 | round, PAGE / 4, stream));
    OK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
    CHECK(used == PAGE, "%llu bytes of a pool are in use", (unsigned long long)used);
    OK(cuStreamSynchronize(stream));
    CHECK(holds(memory, PAGE, number << 24 | round), "memory of a pool has changed");
    OK(cuMemFreeAsync(memory, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuMemPoolDestroy(pool));
    OK(cuStreamDestroy(stream));
}

static void pools(void)
{
    begin();
    in_threads(THREADS, make_pool, 150, NULL);
    nothing_is_left();
}

/* The context of the stream on which memory is freed ends before the hook has given the memory back. */
static void freed_elsewhere(void)
{
    begin();
    CUdeviceptr kept = filled(MIB, 2);
    for (unsigned round = 0; round < 8; round++) {
        CUcontext other = NULL;
        CUdeviceptr memory = 0;
        OK(cuMemAllocAsync(&memory, MIB, NULL));
        OK(cuStreamSynchronize(NULL));
        OK(cuCtxCreate(&other, NULL, 0, 0));
        OK(cuMemFreeAsync(memory, new_stream()));
        OK(cuCtxDestroy(other));
        OK(cuCtxSetCurrent(primary));
    }
    CHECK(holds(kept, MIB, 2), "memory has changed");
    OK(cuMemFree(kept));
    nothing_is_left();
}

int main(int count, char **arguments)
{
    static const named_case cases[] = {
        {"contexts", contexts}, {"frees", frees}, {"primaries", primaries},
        {"greens", greens},     {"streams", streams}, {"pools", pools},
        {"freed_elsewhere", freed_elsewhere},
        {NULL, NULL},
    };
    if (count > 2)
        percent = (unsigned)atoi(arguments[2]);
    return run_case(cases, count, arguments);
}
