/* The registry of contexts and streams (contexts/context.c, hooks/context.c) over a driver made of functions.
 *
 * Prints what is not as it must be, then "done N".
 */
#include "context_driver.h"

/* ---- Visits ---- */

typedef struct tally {
    unsigned seen;
    uintptr_t last;
    CUstream victim; /* destroyed by the "application" during its visit */
} tally;

static bool count_context(CUcontext context, void *argument)
{
    tally *t = argument;
    t->seen++;
    t->last = (uintptr_t)context;
    return true;
}

static bool count_stream(CUstream stream, void *argument)
{
    tally *t = argument;
    t->seen++;
    if (stream == t->victim) {
        CHECK(cuStreamDestroy_v2(stream) == CUDA_SUCCESS, "destroying a stream under visit fails");
        CHECK(streams_destroyed == 0, "a stream is destroyed while somebody looks at it");
    }
    return true;
}

static unsigned contexts_of(uint32_t gpu)
{
    tally t = {0};
    nvs_each_context(gpu, count_context, &t);
    return t.seen;
}

static unsigned streams_of(CUcontext context)
{
    tally t = {0};
    nvs_each_stream(context, count_stream, &t);
    return t.seen;
}

/* First: from then on the driver is initialised. */
static void test_expected(void)
{
    const CUcontext before = made(0);
    CHECK(expected == 0 && !nvs_context_possible(0), "a GPU is expected before the driver is initialised");
    nvs_context_learn();
    const CUcontext after = made(1);
    CHECK(expected == 1 && expected_gpu == 1, "the agent is not told of a GPU before its context is made");
    CHECK(nvs_context_possible(1) && !nvs_context_possible(2) && !nvs_context_possible(UINT32_MAX), "a GPU that does not exist is expected");
    cuCtxDestroy_v2(before);
    cuCtxDestroy_v2(after);
    memory_gone = NULL;
}

static void test_contexts(void)
{
    CUcontext first = made(0), second = made(1), primary = NULL;
    CHECK(contexts_of(0) == 1 && contexts_of(1) == 1, "a created context is not visited on its GPU");
    CHECK(nvs_context_gpu(first) == 0 && nvs_context_gpu(second) == 1, "the GPU of a context is not known");
    CHECK(nvs_current_gpu() == 1, "the new context is not the current one");
    cuDevicePrimaryCtxRetain(&primary, 0);
    cuDevicePrimaryCtxRetain(&primary, 0);
    CHECK(contexts_of(0) == 2, "a primary context retained twice is not visited once");
    cuDevicePrimaryCtxRelease_v2(0);
    CHECK(contexts_of(0) == 2 && memory_gone == NULL, "a primary context ended before its last release");
    cuDevicePrimaryCtxRelease_v2(0);
    CHECK(contexts_of(0) == 1 && memory_gone == primary, "a primary context did not end with its last release");
    CHECK(cuDevicePrimaryCtxRelease_v2(0) == CUDA_ERROR_INVALID_CONTEXT, "the driver's error is not passed on");
    cuDevicePrimaryCtxRetain(&primary, 0);
    cuDevicePrimaryCtxRetain(&primary, 0);
    cuDevicePrimaryCtxReset_v2(0);
    CHECK(contexts_of(0) == 1, "a reset did not end the primary context");
    driver_retain(&primary, 1); /* by a way that no hook sees */
    CHECK(contexts_of(1) == 2 && primary_references[1] == 1, "a primary context that was made unseen is not visited");
    CHECK(cuCtxDestroy_v2(NULL) == CUDA_ERROR_INVALID_CONTEXT, "the driver's error is not passed on");
    CHECK(cuCtxDestroy_v2(first) == CUDA_SUCCESS && contexts_of(0) == 0 && memory_gone == first, "a destroyed context is visited");
    driver_release(1);
    CHECK(cuCtxDetach(second) == CUDA_SUCCESS && memory_gone == first, "a context ended before its last user has left it");
    CHECK(cuCtxDetach(second) == CUDA_SUCCESS && memory_gone == second && contexts_of(1) == 0, "what its last user has left is visited");
    CHECK(cuCtxDestroy_v2(second) == CUDA_SUCCESS && !nvs_context_enter(second) && !pushed_late, "what has ended is made current");
    current_device = 1;
    nvs_live_context_gpu(second); /* as by cuCtxFromGreenCtx */
    nvs_context_is_green(second, (CUcontext)0x101);
    pushed_late = false;
    CHECK(nvs_context_gpu(second) == 1 && nvs_context_enter(second) && pushed_late, "a green context of which a driver does not say so is not visited");
    nvs_context_left(second, true);
    CHECK(!nvs_context_enter(second) && !nvs_context_enter(NULL), "a green context that has ended is made current");
    pushed_late = false;
    detached = NULL;
}

static void test_usual_owner(void)
{
    enum { OFTEN = 200 };
    const CUcontext hidden = (CUcontext)0xabc00;
    unsigned noticed = 0;
    CUcontext first = made(0);
    nvs_slot_register();
    asked = 0;
    for (unsigned i = 0; i < OFTEN; i++)
        CHECK(nvs_usual_owner() == first, "the only context is not the owner");
    CHECK(asked >= 1 && asked < OFTEN / 10, "the driver is asked each time, or never");
    CUcontext second = made(0);
    CHECK(nvs_usual_owner() == second, "with two contexts the current one is not the owner");
    cuCtxSetCurrent(first);
    CHECK(nvs_usual_owner() == first, "a context that was made current is not the owner");
    cuCtxDestroy_v2(first);
    current = second;
    CHECK(nvs_usual_owner() == second && nvs_usual_owner() == second, "the context that is left is not the owner");
    current = hidden; /* by a way that no hook sees */
    for (unsigned i = 0; i < OFTEN; i++)
        noticed += nvs_usual_owner() == hidden;
    CHECK(noticed > OFTEN / 2, "a context that was made unseen is never noticed");
    current = second;
    CHECK(nvs_usual_owner() == second, "the driver's word does not count");
    cuCtxDestroy_v2(second);
    current = NULL;
    CHECK(nvs_usual_owner() == NULL, "a context that is gone owns memory");
}

static void test_streams(void)
{
    enum { MANY = 200 };
    CUstream streams[MANY];
    CUcontext other = made(1), context = made(0);
    for (unsigned i = 0; i < MANY; i++)
        cuStreamCreate(&streams[i], 0);
    CHECK(streams_of(context) == MANY && streams_of(other) == 0, "not each stream of the context is visited once");
    for (unsigned i = 0; i < MANY; i += 2)
        cuStreamDestroy_v2(streams[i]);
    CHECK(streams_of(context) == MANY / 2 && streams_destroyed == MANY / 2, "a destroyed stream is visited");
    CUstream more;
    cuStreamCreate(&more, 0);
    CHECK(streams_of(context) == MANY / 2 + 1, "a stream in a place that was used before is not visited");
    streams_destroyed = 0;
    tally t = {.victim = more};
    nvs_each_stream(context, count_stream, &t);
    CHECK(streams_destroyed == 1 && streams_of(context) == MANY / 2, "a stream destroyed during its visit is never destroyed");
    destroy_stream_result = CUDA_ERROR_INVALID_CONTEXT;
    CHECK(cuStreamDestroy_v2(streams[1]) == CUDA_ERROR_INVALID_CONTEXT, "the driver's error is not passed on");
    CHECK(streams_of(context) == MANY / 2, "a stream whose end failed is not visited any more");
    destroy_stream_result = CUDA_SUCCESS;
    cuCtxDestroy_v2(context);
    CHECK(streams_of(context) == 0, "the streams of a destroyed context are visited");
    cuCtxDestroy_v2(other);
}

static pthread_barrier_t meeting;
static CUcontext under_visit;
static atomic_bool context_destroyed;

static bool linger(CUcontext context, void *argument)
{
    (void)argument;
    if (context == under_visit) {
        pthread_barrier_wait(&meeting); /* the destroyer may start */
        /* Once no new visit sees the context its end has begun, and must wait for us. */
        while (contexts_of(0) != 0 && !atomic_load_explicit(&context_destroyed, memory_order_acquire))
            sched_yield();
        CHECK(!atomic_load_explicit(&context_destroyed, memory_order_acquire), "a context is destroyed while somebody looks at it");
    }
    return true;
}

static void *visitor(void *argument)
{
    nvs_each_context(0, linger, argument);
    return NULL;
}

static CUresult destroy_and_say(CUcontext context)
{
    (void)context;
    atomic_store_explicit(&context_destroyed, true, memory_order_release);
    return CUDA_SUCCESS;
}

static void test_context_under_visit(void)
{
    pthread_t thread;
    pthread_barrier_init(&meeting, NULL, 2);
    under_visit = made(0);
    atomic_store_explicit(&nvs_reals[NVS_ID_cuCtxDestroy_v2], (nvs_function)destroy_and_say, memory_order_release);
    pthread_create(&thread, NULL, visitor, NULL);
    pthread_barrier_wait(&meeting);
    CHECK(cuCtxDestroy_v2(under_visit) == CUDA_SUCCESS, "a context under visit is not destroyed");
    pthread_join(thread, NULL);
    CHECK(atomic_load_explicit(&context_destroyed, memory_order_acquire), "a context under visit is not destroyed after it");
    atomic_store_explicit(&nvs_reals[NVS_ID_cuCtxDestroy_v2], NULL, memory_order_release);
}

static pthread_t successor;
static atomic_bool successor_begins, successor_made;

static void *make_successor(void *argument)
{
    CUcontext context = NULL;
    atomic_store_explicit(&successor_begins, true, memory_order_relaxed);
    (void)cuCtxCreate_v2(&context, 0, 0);
    atomic_store_explicit(&successor_made, true, memory_order_relaxed);
    return context;
}

/* The driver has ended a context and gives its handle to another thread, before the hook has removed all records of the ended one. */
static void give_handle_again(void)
{
    next_handle -= 0x100;
    pthread_create(&successor, NULL, make_successor, NULL);
    for (unsigned looks = 0; looks < 1000 || !atomic_load_explicit(&successor_begins, memory_order_relaxed); looks++)
        sched_yield();
    CHECK(!atomic_load_explicit(&successor_made, memory_order_relaxed), "a context is used whose handle still has another one's records");
}

static void test_handle_given_again(void)
{
    void *again = NULL;
    const CUcontext context = made(0);
    when_gone = give_handle_again;
    cuCtxDestroy_v2(context);
    when_gone = NULL;
    pthread_join(successor, &again);
    CHECK(again == (void *)context && contexts_of(0) == 1, "a new context with the handle of an ended one is not visited");
    cuCtxDestroy_v2(context);
}

int main(void)
{
    test_expected();
    test_contexts();
    test_usual_owner();
    test_streams();
    test_context_under_visit();
    test_handle_given_again();
    printf("done %u\n", checks);
    return 0;
}
