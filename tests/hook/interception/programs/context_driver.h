/* What the registries of contexts, streams and captures are linked with in intercept_context.c and intercept_captures.c: a driver made of the functions
 * below, and stand-ins for the rest of the hook.
 */
#ifndef CONTEXT_DRIVER_H
#define CONTEXT_DRIVER_H

#include "base/base.h"
#include "base/config.h"
#include "base/log.h"
#include "base/process.h"
#include "contexts/context.h"
#include "contexts/gpu.h"
#include "coord/agent.h"
#include "coord/mover.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "hooks/graph.h"
#include "inflight/captures.h"
#include "inflight/marks.h"
#include "inflight/pacing.h"
#include "ipc/ipc.h"
#include "memory/memory.h"

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

void nvs_start(void) {}
void nvs_fork_prepare(void) {}
uint64_t nvs_now_ns(void) { return 1; }
void nvs_log(int level, const char *format, ...) { (void)level, (void)format; }
static unsigned expected; /* contexts that the agent was told of before they were made */
static uint32_t expected_gpu;
void nvs_mover_hurry(uint32_t gpu) {}
void nvs_gate_set_dead(uint32_t gpu, bool dead) {}
void nvs_agent_expect(uint32_t gpu) { expected++, expected_gpu = gpu; }
nvs_slot *nvs_gate_enter_nowait(uint32_t gpu) { return NULL; }
void nvs_swap_lanes_context_leaving(CUcontext context) {}
void nvs_gate_leave_nowait(nvs_slot *slot) {}
void nvs_agent_begin(void) {}
void nvs_agent_driver_begun(bool ready) { (void)ready; }
static void (*when_gone)(void); /* what happens while the memory side is told */
void nvs_memory_context_gone(CUcontext context)
{
    memory_gone = context;
    if (when_gone != NULL)
        when_gone();
}
void nvs_ipc_context_gone(CUcontext context) {}
_Atomic uint32_t nvs_graph_gpus;
void nvs_graphs_run_on(uint32_t gpus) {}
void nvs_pacing_context_gone(CUcontext context) {}
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
void nvs_mark_stream(uint32_t gpus, uint32_t gpu_of_stream, CUstream stream) { marked_streams++; }
nvs_slot *nvs_slot_register(void) { return nvs_self = &only_slot; }
void nvs_gate_enter_slow(nvs_slot *slot, uint32_t gpu) { (void)slot, (void)gpu; }
bool nvs_gate_enter_stoppable_slow(nvs_slot *slot, uint32_t gpu) { return (void)slot, (void)gpu, true; }
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

static CUcontext made(CUdevice device)
{
    CUcontext context = NULL;
    CHECK(cuCtxCreate_v2(&context, 0, device) == CUDA_SUCCESS, "cuCtxCreate fails");
    return context;
}

#endif
