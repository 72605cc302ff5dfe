/* The registries of contexts, streams and captures (context.c, captures.c, hook_context.c) over a driver made of the functions below.
 *
 * Prints what is not as it must be, then "done N".
 */
#include "agent.h"
#include "captures.h"
#include "context.h"
#include "cuda_api.h"
#include "gate.h"
#include "log.h"
#include "marks.h"
#include "memory.h"
#include "pacing.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

static unsigned checks;

#define CHECK(condition, text)  \
    do {                        \
        checks++;               \
        if (!(condition))       \
            puts(text);         \
    } while (0)

/* ---- What the code under test is linked with otherwise ---- */

int nvs_log_level;
nvs_settings nvs_config = {.enabled = true};
nvs_hot_page nvs_hot = {.only_gpu = NVS_NO_GPU};
_Thread_local nvs_slot *nvs_self;
_Atomic(nvs_function) nvs_reals[NVS_ID_COUNT];
static nvs_slot only_slot;
static CUcontext memory_gone; /* the last context that the memory side was told about */

void nvs_init(void) {}
uint64_t nvs_now_ns(void) { return 1; }
void nvs_log(int level, const char *format, ...) { (void)level, (void)format; }
static unsigned expected; /* contexts that the agent was told of before they were made */
static uint32_t expected_gpu;
void nvs_agent_hurry_moves(uint32_t gpu) {}
void nvs_agent_expect(uint32_t gpu) { expected++, expected_gpu = gpu; }
nvs_slot *nvs_gate_occupy(uint32_t gpu) { return NULL; }
void nvs_swap_lanes_context_leaving(CUcontext context) {}
void nvs_gate_vacate(nvs_slot *slot) {}
void nvs_agent_begin(void) {}
void nvs_memory_context_gone(CUcontext context) { memory_gone = context; }
void nvs_capture_on(uint32_t gpu, CUstream stream, bool per_thread, bool into_new) {}
void nvs_pacing_context_gone(void) {}
void nvs_marks_context_gone(CUcontext context) {}
static _Atomic unsigned marked_contexts, marked_streams, open_captures;
static int yields;
static _Atomic bool marked_late; /* a whole context, when a capture was open */
void nvs_mark_context(uint32_t gpu, CUcontext context) 
{
    marked_contexts++;
    for (int i = 0; i < yields && open_captures == 0; i++) /* so that others begin meanwhile, if they can */
        sched_yield();
    if (open_captures != 0 || nvs_capturing())
        marked_late = true;
}
void nvs_mark_stream(uint32_t gpus, uint32_t gpu_of_stream, CUstream stream, bool per_thread) { marked_streams++; }
nvs_slot *nvs_slot_register(void) { return nvs_self = &only_slot; }
void nvs_gate_enter_slow(nvs_slot *slot, uint32_t gpu) { (void)slot, (void)gpu; }
bool nvs_gate_leave_slow(nvs_slot *slot, uint32_t gpu) { (void)gpu; return false; }
bool nvs_real_exists(nvs_id id) { return id != NVS_ID_cuStreamGetDevice; }

/* ---- The driver ---- */

static int gpus = 2;
static CUdevice current_device;
static CUcontext current;
static _Atomic unsigned asked; /* for the current context */
static CUresult begin_result, end_result;
static CUstreamCaptureStatus capture_status;
static int primary_references[2];
static _Atomic bool inside_begin; /* the gate's slot was announced during a begin */
static unsigned streams_destroyed;
static CUresult destroy_stream_result;
static uintptr_t next_handle = 0x10000;

static CUresult driver_count(int *count) { *count = gpus; return CUDA_SUCCESS; }
static CUresult driver_device(CUdevice *device) { *device = current_device; return CUDA_SUCCESS; }
static CUresult driver_get_current(CUcontext *context) { *context = current; asked++; return CUDA_SUCCESS; }
static CUresult driver_set_current(CUcontext context) { current = context; return CUDA_SUCCESS; }
static CUcontext detached; /* as often as it was attached: it is gone */
static bool pushed_late; /* what a real driver takes, and does not survive */
static CUresult driver_push(CUcontext context) { pushed_late |= context == detached; return driver_set_current(context); }
static CUresult driver_version(CUcontext context, unsigned int *version) { return context == detached ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS; }
static unsigned users = 2; /* of the context that is detached */
static CUresult driver_detach(CUcontext context) { detached = --users == 0 ? context : NULL; return CUDA_SUCCESS; }
static CUresult driver_pop(CUcontext *context) { *context = current; return CUDA_SUCCESS; }
static CUresult driver_destroy_context(CUcontext context) { return context == NULL ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS; }

static CUresult driver_create(CUcontext *context, unsigned int flags, CUdevice device)
{
    (void)flags;
    current = *context = (CUcontext)(next_handle += 0x100);
    current_device = device;
    return CUDA_SUCCESS;
}

static CUresult driver_retain(CUcontext *context, CUdevice device)
{
    primary_references[device]++;
    *context = (CUcontext)(uintptr_t)(0x100 + device);
    return CUDA_SUCCESS;
}

static CUresult driver_release(CUdevice device)
{
    if (primary_references[device] == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    primary_references[device]--;
    return CUDA_SUCCESS;
}

static CUresult driver_reset(CUdevice device)
{
    primary_references[device] = 0;
    return CUDA_SUCCESS;
}

static CUresult driver_state(CUdevice device, unsigned int *flags, int *active)
{
    *flags = 0;
    *active = primary_references[device] > 0;
    return CUDA_SUCCESS;
}

static CUresult driver_stream(CUstream *stream, unsigned int flags)
{
    (void)flags;
    *stream = (CUstream)(next_handle += 0x100);
    return CUDA_SUCCESS;
}

static CUresult driver_destroy_stream(CUstream stream)
{
    (void)stream;
    streams_destroyed += destroy_stream_result == CUDA_SUCCESS;
    return destroy_stream_result;
}

static CUresult driver_begin(CUstream stream, CUstreamCaptureMode mode)
{
    (void)stream, (void)mode;
    inside_begin = nvs_self->active != 0;
    open_captures += begin_result == CUDA_SUCCESS;
    return begin_result;
}

static CUresult driver_end(CUstream stream, CUgraph *graph)
{
    (void)stream, (void)graph;
    open_captures -= open_captures != 0 && end_result == CUDA_SUCCESS;
    return end_result;
}

static CUresult stream_has = CUDA_SUCCESS; /* what a query says */
static CUresult driver_query(CUstream stream) { return stream_has; }
static CUcontext green = (CUcontext)0x800;
static CUresult driver_from_green(CUcontext *context, CUgreenCtx from) { *context = green; return CUDA_SUCCESS; }
static CUresult driver_end_green(CUgreenCtx which) { return CUDA_SUCCESS; }

static CUresult driver_is_capturing(CUstream stream, CUstreamCaptureStatus *status)
{
    (void)stream;
    *status = capture_status;
    return CUDA_SUCCESS;
}

static CUresult driver_lacks_it(void) { return CUDA_ERROR_NOT_SUPPORTED; }

nvs_function nvs_real_resolve(nvs_id id)
{
    switch ((int)id) {
    case NVS_ID_cuDeviceGetCount: return (nvs_function)driver_count;
    case NVS_ID_cuCtxGetDevice: return (nvs_function)driver_device;
    case NVS_ID_cuCtxGetCurrent: return (nvs_function)driver_get_current;
    case NVS_ID_cuCtxSetCurrent: return (nvs_function)driver_set_current;
    case NVS_ID_cuCtxPushCurrent_v2: return (nvs_function)driver_push;
    case NVS_ID_cuCtxGetApiVersion: return (nvs_function)driver_version;
    case NVS_ID_cuCtxDetach: return (nvs_function)driver_detach;
    case NVS_ID_cuCtxPopCurrent_v2: return (nvs_function)driver_pop;
    case NVS_ID_cuCtxCreate_v2: return (nvs_function)driver_create;
    case NVS_ID_cuCtxDestroy_v2: return (nvs_function)driver_destroy_context;
    case NVS_ID_cuDevicePrimaryCtxRetain: return (nvs_function)driver_retain;
    case NVS_ID_cuDevicePrimaryCtxRelease_v2: return (nvs_function)driver_release;
    case NVS_ID_cuDevicePrimaryCtxReset_v2: return (nvs_function)driver_reset;
    case NVS_ID_cuDevicePrimaryCtxGetState: return (nvs_function)driver_state;
    case NVS_ID_cuStreamCreate: return (nvs_function)driver_stream;
    case NVS_ID_cuStreamDestroy_v2: return (nvs_function)driver_destroy_stream;
    case NVS_ID_cuStreamQuery: return (nvs_function)driver_query;
    case NVS_ID_cuCtxFromGreenCtx: return (nvs_function)driver_from_green;
    case NVS_ID_cuGreenCtxDestroy: return (nvs_function)driver_end_green;
    case NVS_ID_cuStreamBeginCapture_v2:
    case NVS_ID_cuStreamBeginCapture_v2_ptsz: return (nvs_function)driver_begin;
    case NVS_ID_cuStreamEndCapture:
    case NVS_ID_cuStreamEndCapture_ptsz: return (nvs_function)driver_end;
    case NVS_ID_cuStreamIsCapturing:
    case NVS_ID_cuStreamIsCapturing_ptsz: return (nvs_function)driver_is_capturing;
    default: return (nvs_function)driver_lacks_it;
    }
}

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

static CUcontext made(CUdevice device)
{
    CUcontext context = NULL;
    CHECK(cuCtxCreate_v2(&context, 0, device) == CUDA_SUCCESS, "cuCtxCreate fails");
    return context;
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
    nvs_context_told(second); /* as by cuCtxFromGreenCtx */
    nvs_context_is_green(second, (CUcontext)0x101);
    pushed_late = false;
    CHECK(nvs_context_gpu(second) == 1 && nvs_context_enter(second) && pushed_late, "a green context of which a driver does not say so is not visited");
    nvs_context_gone(second);
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
    nvs_capture_submitted(0, CU_STREAM_LEGACY, false, CUDA_SUCCESS);
    CHECK(marked_streams == 0, "a submission is marked with no capture open");
    cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED);
    CHECK(marked_contexts == contexts, "a context is not marked before the first capture");
    stream_has = CUDA_ERROR_NOT_READY;
    cuStreamBeginCapture_v2(b, CU_STREAM_CAPTURE_MODE_RELAXED);
    CHECK(marked_contexts == contexts && !marked_late, "a context is marked while a capture is open");
    CHECK(marked_streams == 1, "what a stream still has is not marked before it is captured");
    stream_has = CUDA_SUCCESS;
    nvs_capture_submitted(0, NULL, false, CUDA_SUCCESS);
    nvs_capture_submitted(0, NULL, true, CUDA_SUCCESS);
    nvs_capture_submitted(0, CU_STREAM_PER_THREAD, false, CUDA_SUCCESS);
    CHECK(marked_streams == 4, "a submission to a default stream is not marked");
    nvs_capture_submitted(0, b, false, CUDA_SUCCESS);
    nvs_capture_submitted(0, NULL, false, CUDA_ERROR_INVALID_VALUE);
    capture_status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    nvs_capture_submitted(0, CU_STREAM_PER_THREAD, false, CUDA_SUCCESS);
    capture_status = CU_STREAM_CAPTURE_STATUS_NONE;
    CHECK(marked_streams == 4, "more is marked than submissions to default streams");
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
    test_expected();
    test_contexts();
    test_usual_owner();
    test_streams();
    test_context_under_visit();
    test_captures();
    test_marks_of_captures();
    test_captures_at_once();
    test_captures_of_contexts_that_end();
    printf("done %u\n", checks);
    return 0;
}
