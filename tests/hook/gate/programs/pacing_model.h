/* The model of pacing_check.c: a driver, and what the hook's other parts answer.  Only calls move its time. */
#ifndef PACING_MODEL_H
#define PACING_MODEL_H

#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "gate/host_functions.h"
#include "inflight/captures.h"
#include "inflight/pacing.h"

#include "base/base.h"
#include "base/process.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { STREAMS = 4, DEFAULT_STREAM = STREAMS, LAUNCH_NS = 2600, WAKE_NS = 140000 };
/* Times of an H200's driver, with warm caches (bench/results/h200.md). */
enum { CALL_NS = 100, QUERY_NS = 2000, ELAPSED_NS = 2900, RECORD_NS = 1300 };
#define MS 1000000u
#define NEVER UINT64_MAX

typedef struct model_stream {
    uint64_t ends_ns; /* of its last work; NEVER: it waits for something that does not come */
    CUcontext context;
    bool capturing;
} model_stream;

struct CUevent_st {
    uint64_t at_ns;
    CUcontext context;
};

static struct {
    uint64_t now_ns, busy_until_ns, idle_ns, most_pending_ns;
    unsigned calls, records, pushes, naps, asked; /* asked: which context is current */
    _Atomic unsigned events, destroyed;
    CUcontext current;
    model_stream streams[STREAMS + 1];
} model = {.now_ns = 1000u * MS};

static CUcontext const first_context = (CUcontext)(uintptr_t)0x1000, second_context = (CUcontext)(uintptr_t)0x2000;

static void tell(int line, const char *what)
{
    fprintf(stderr, "line %d: %s (pending %.3f ms, idle %.3f ms, %u events, %u calls, %u naps)\n", line, what,
            (double)model.most_pending_ns / 1e6, (double)model.idle_ns / 1e6, model.records, model.calls, model.naps);
}

#define MUST(condition)                                                \
    do {                                                               \
        if (!(condition)) {                                            \
            tell(__LINE__, #condition);                                \
            exit(1);                                                   \
        }                                                              \
    } while (0)

/* ---- What the hook's other parts would say ---- */

_Atomic uint32_t nvs_host_functions_count[NVS_MAX_GPUS];
static CUcontext contexts[2], visited; /* that live; under visit */

bool nvs_each_context(uint32_t gpu, bool (*visit)(CUcontext context, void *argument), void *argument)
{
    MUST(gpu == 0);
    for (unsigned i = 0; i < 2; i++)
        if ((visited = contexts[i]) != NULL)
            visit(visited, argument);
    visited = NULL;
    return true;
}

uint64_t nvs_now_ns(void) { return model.now_ns; }
static void wait_for_lease(uint32_t gpu) { nvs_gate_open(gpu, false); }
const nvs_port nvs_coordinator = {.wait_for_lease = wait_for_lease};

int nanosleep(const struct timespec *length, struct timespec *left)
{
    model.now_ns += (uint64_t)length->tv_sec * 1000000000u + (uint64_t)length->tv_nsec + WAKE_NS;
    model.naps++;
    return 0;
}

/* ---- The driver ---- */

static model_stream *stream_of(CUstream stream)
{
    return &model.streams[stream == CU_STREAM_LEGACY ? DEFAULT_STREAM : (uintptr_t)stream - 0x100];
}

static void took(uint64_t ns)
{
    model.calls++;
    model.now_ns += ns;
}

static void called(void) { took(CALL_NS); }

static CUresult event_create(CUevent *event, unsigned int flags)
{
    called();
    *event = calloc(1, sizeof **event);
    (*event)->context = model.current;
    model.events++;
    return *event == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult event_destroy(CUevent event)
{
    called();
    MUST(event->context == visited || event->context == model.current);
    free(event);
    model.events--;
    model.destroyed++;
    return CUDA_SUCCESS;
}

static CUresult event_record(CUevent event, CUstream stream)
{
    const model_stream *on = stream_of(stream);
    took(RECORD_NS);
    MUST(!on->capturing && !nvs_capturing());
    if (event->context != on->context)
        return CUDA_ERROR_INVALID_HANDLE;
    model.records++;
    event->at_ns = on->ends_ns > model.now_ns ? on->ends_ns : model.now_ns;
    return CUDA_SUCCESS;
}

static CUresult event_query(CUevent event)
{
    took(QUERY_NS);
    return event->at_ns <= model.now_ns ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult event_elapsed(float *milliseconds, CUevent from, CUevent to)
{
    took(ELAPSED_NS);
    *milliseconds = (float)((double)(int64_t)(to->at_ns - from->at_ns) / 1e6);
    return CUDA_SUCCESS;
}

static CUresult is_capturing(CUstream stream, CUstreamCaptureStatus *status)
{
    called();
    *status = stream_of(stream)->capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

static CUresult exchange_mode(CUstreamCaptureMode *mode) { called(); return CUDA_SUCCESS; }
static CUresult stream_context(CUstream stream, CUcontext *context)
{
    called();
    *context = stream_of(stream)->context;
    return CUDA_SUCCESS;
}

static CUresult current_context(CUcontext *context)
{
    model.asked++;
    *context = model.current;
    return CUDA_SUCCESS;
}

static CUcontext before_push;

static CUresult push(CUcontext context)
{
    called();
    model.pushes++;
    before_push = model.current;
    model.current = context;
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *context)
{
    called();
    *context = model.current;
    model.current = before_push;
    return CUDA_SUCCESS;
}

_Atomic(nvs_function) nvs_reals[NVS_ID_COUNT];

nvs_function nvs_real_resolve(nvs_id id)
{
    switch ((int)id) {
    case NVS_ID_cuEventCreate: return (nvs_function)event_create;
    case NVS_ID_cuEventDestroy_v2: return (nvs_function)event_destroy;
    case NVS_ID_cuEventRecord: return (nvs_function)event_record;
    case NVS_ID_cuEventQuery: return (nvs_function)event_query;
    case NVS_ID_cuEventElapsedTime: return (nvs_function)event_elapsed;
    case NVS_ID_cuStreamIsCapturing: return (nvs_function)is_capturing;
    case NVS_ID_cuThreadExchangeStreamCaptureMode: return (nvs_function)exchange_mode;
    case NVS_ID_cuStreamGetCtx: return (nvs_function)stream_context;
    case NVS_ID_cuCtxGetCurrent: return (nvs_function)current_context;
    case NVS_ID_cuCtxPopCurrent_v2: return (nvs_function)pop;
    default: fprintf(stderr, "pacing calls function %d\n", (int)id); exit(1);
    }
}

bool nvs_real_exists(nvs_id id) { return true; }
bool nvs_context_enter(CUcontext context) { return push(context) == CUDA_SUCCESS; }

#endif
