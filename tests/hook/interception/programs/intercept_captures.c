/* The registry of captures (inflight/captures.c) and what is marked for them, over a driver made of functions.
 *
 * Prints what is not as it must be, then "done N".
 */
#include "context_driver.h"

static bool count(CUcontext context, void *argument)
{
    ++*(unsigned *)argument;
    return true;
}

static unsigned contexts_of(uint32_t gpu)
{
    unsigned found = 0;
    nvs_each_context(gpu, count, &found);
    return found;
}

static void *capture_on_default_stream(void *argument)
{
    (void)argument;
    cuStreamBeginCapture_v2_ptsz(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL);
    return NULL;
}

static void test_captures(void)
{
    CUgraph graph;
    CUstream a = (CUstream)0x5000, b = (CUstream)0x6000;
    made(0);
    CHECK(!nvs_capturing(), "a capture before there is one");
    cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_GLOBAL);
    CHECK(inside_begin, "a capture does not begin inside the gate");
    CHECK(nvs_capturing(), "a capture is not seen");
    cuStreamBeginCapture_v2(b, CU_STREAM_CAPTURE_MODE_RELAXED);
    cuStreamEndCapture(a, &graph);
    CHECK(nvs_capturing(), "the end of one capture ends another");
    end_result = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    capture_status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    cuStreamEndCapture(b, &graph);
    CHECK(nvs_capturing(), "a capture that another thread began was ended by this one");
    end_result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    capture_status = CU_STREAM_CAPTURE_STATUS_NONE;
    CHECK(cuStreamEndCapture(b, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "the driver's error is not passed on");
    CHECK(!nvs_capturing(), "an invalidated capture goes on for ever");
    end_result = CUDA_SUCCESS;
    begin_result = CUDA_ERROR_ILLEGAL_STATE;
    cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_GLOBAL);
    CHECK(!nvs_capturing(), "a capture that did not begin is counted");
    begin_result = CUDA_SUCCESS;
    cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_GLOBAL);
    cuStreamDestroy_v2(a);
    CHECK(!nvs_capturing(), "a capture outlives its stream");

    const CUcontext here = current;
    cuStreamBeginCapture_v2(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_GLOBAL);
    const CUcontext other = made(0);
    cuStreamBeginCapture_v2(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_GLOBAL);
    cuStreamEndCapture_ptsz(NULL, &graph);
    CHECK(nvs_capturing(), "one thread's default streams of two contexts are taken for one");
    current = here;
    cuStreamEndCapture_ptsz(NULL, &graph);
    CHECK(!nvs_capturing(), "a capture on a per-thread stream goes on for ever");
    cuCtxDestroy_v2(other);

    pthread_t thread;
    cuStreamBeginCapture_v2(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_GLOBAL);
    pthread_create(&thread, NULL, capture_on_default_stream, NULL);
    pthread_join(thread, NULL);
    cuStreamEndCapture_ptsz(NULL, &graph);
    CHECK(nvs_capturing(), "two threads' default streams are taken for one");
    cuCtxDestroy_v2(here);
    CHECK(!nvs_capturing(), "a capture on a per-thread stream outlives the stream's context");
}

/* What a drain cannot ask about while a capture is open is marked. */
static void test_marks_of_captures(void)
{
    CUgraph graph;
    CUstream a = (CUstream)0x5000, b = (CUstream)0x6000;
    const CUcontext context = made(0);
    const unsigned contexts = contexts_of(0) + contexts_of(1);
    marked_contexts = marked_streams = open_captures = 0;
    marked_late = false;
    nvs_capture_submitted(0, CU_STREAM_LEGACY, CUDA_SUCCESS);
    CHECK(marked_streams == 0, "a submission is marked with no capture open");
    cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED);
    CHECK(marked_contexts == contexts, "a context is not marked before the first capture");
    stream_has = CUDA_ERROR_NOT_READY;
    cuStreamBeginCapture_v2(b, CU_STREAM_CAPTURE_MODE_RELAXED);
    CHECK(marked_contexts == contexts && !marked_late, "a context is marked while a capture is open");
    CHECK(marked_streams == 1, "what a stream still has is not marked before it is captured");
    stream_has = CUDA_SUCCESS;
    nvs_capture_submitted(0, CU_STREAM_LEGACY, CUDA_SUCCESS);
    nvs_capture_submitted(0, CU_STREAM_PER_THREAD, CUDA_SUCCESS);
    CHECK(marked_streams == 3, "a submission to a default stream is not marked");
    nvs_capture_submitted(0, b, CUDA_SUCCESS);
    nvs_capture_submitted(0, CU_STREAM_LEGACY, CUDA_ERROR_INVALID_VALUE);
    capture_status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    nvs_capture_submitted(0, CU_STREAM_PER_THREAD, CUDA_SUCCESS);
    capture_status = CU_STREAM_CAPTURE_STATUS_NONE;
    CHECK(marked_streams == 3, "more is marked than submissions to default streams");
    cuStreamEndCapture(a, &graph);
    cuStreamEndCapture(b, &graph);
    cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED);
    CHECK(marked_contexts == 2 * contexts && !marked_late, "a later capture relies on the marks of an earlier one");
    cuStreamEndCapture(a, &graph);
    cuCtxDestroy_v2(context);
}

static void *capture_again_and_again(void *stream)
{
    static _Thread_local nvs_slot own_slot;
    CUgraph graph;
    nvs_self = &own_slot;
    for (int i = 0; i < 200; i++) {
        cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
        cuStreamEndCapture(stream, &graph);
    }
    return NULL;
}

/* The event of a whole context would spoil a capture that another thread has begun meanwhile. */
static void test_captures_at_once(void)
{
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    const CUcontext context = made(0);
    marked_contexts = open_captures = 0;
    marked_late = false;
    yields = 1000;
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, capture_again_and_again, (void *)(0x7000 + 0x100 * i));
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    yields = 0;
    CHECK(marked_contexts > 0 && !marked_late, "a context is marked while another thread's capture is open");
    CHECK(!nvs_capturing() && open_captures == 0, "captures of several threads are not counted");
    cuCtxDestroy_v2(context);
}

/* Every way in which a context ends, with a capture open on a stream of it, and one of another context. */
static void test_captures_of_contexts_that_end(void)
{
    CUgraph graph;
    CUcontext context;
    CUstream elsewhere, here;
    const CUcontext other = made(0);
    cuStreamCreate(&elsewhere, 0);
    for (int way = 0; way < 5; way++) {
        context = way < 2 ? made(0) : NULL;
        if (way >= 2) {
            CHECK(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS, "no primary context");
            current = context;
        }
        if (way == 4) {
            CHECK(cuCtxFromGreenCtx(&context, NULL) == CUDA_SUCCESS, "no green context");
            current = context;
        }
        cuStreamCreate(&here, 0);
        cuStreamBeginCapture_v2(here, CU_STREAM_CAPTURE_MODE_RELAXED);
        cuStreamBeginCapture_v2(elsewhere, CU_STREAM_CAPTURE_MODE_RELAXED);
        users = 1;
        switch (way) {
        case 0: cuCtxDestroy_v2(context); break;
        case 1: cuCtxDetach(context); break;
        case 2: cuDevicePrimaryCtxRelease_v2(0); break;
        case 3: cuDevicePrimaryCtxReset_v2(0); break;
        default: cuGreenCtxDestroy(NULL); break;
        }
        CHECK(nvs_capturing(), "a capture ends with another context than its stream's");
        cuStreamEndCapture(elsewhere, &graph);
        CHECK(!nvs_capturing(), "a capture outlives its context");
    }
    cuDevicePrimaryCtxRelease_v2(0);
    cuCtxDestroy_v2(other);
}

int main(void)
{
    nvs_context_learn();
    test_captures();
    test_marks_of_captures();
    test_captures_at_once();
    test_captures_of_contexts_that_end();
    printf("done %u\n", checks);
    return 0;
}
