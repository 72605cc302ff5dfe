/* Wrappers of contexts, streams and captures: they call the real function and report to the registries.  None waits for a lease, but the begin of a
 * capture.
 *
 * A capture begins inside the gate.  So a drain that finds no capture can synchronise a context without invalidating one, and a drain that finds one has
 * the marks of all work.
 */
#include "base/config.h"
#include "base/log.h"
#include "contexts/context.h"
#include "contexts/gpu.h"
#include "coord/agent.h"
#include "coord/mover.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "hooks/graph.h"
#include "hooks/hooks.h"
#include "inflight/captures.h"
#include "inflight/marks.h"
#include "inflight/pacing.h"
#include "ipc/ipc.h"
#include "memory/memory.h"
#include "swap/swap.h"

NVS_EXPORT CUresult CUDAAPI cuInit(unsigned int Flags)
{
    static _Atomic bool done; /* true in a fork's child too, where the driver cannot be used; relaxed: a hint */
    nvs_start();               /* another library's constructor may call this before the hook's */
    if (nvs_config.stripped)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "NVSHARE_SOCKET is not set, so this program takes no turns and has no memory limit; its environment was emptied (sudo, "
                     "su, env -i): put nvshare-run behind that command, or set NVSHARE_DISABLE=1 to run alone without this line");
    if (!atomic_load_explicit(&done, memory_order_relaxed))
        nvs_agent_begin(); /* connects during cuInit, which takes a tenth of a second */
    const CUresult result = NVS_REAL(cuInit)(Flags);
    nvs_context_learn();
    nvs_agent_driver_begun(result == CUDA_SUCCESS);
    if (result != CUDA_SUCCESS)
        return result;
    atomic_store_explicit(&done, true, memory_order_relaxed);
    if (nvs_only_gpu() != NVS_NO_GPU)
        nvs_agent_expect(nvs_only_gpu()); /* a runtime's next call queries the memory size */
    return result;
}

/* For a MIG instance the versions differ; it has no other identity. */
#define NVS_IDENTIFIES(symbol)                                     \
    NVS_EXPORT CUresult CUDAAPI symbol(CUuuid *uuid, CUdevice dev)  \
    {                                                              \
        const CUresult result = NVS_REAL(symbol)(uuid, dev);       \
        if (result == CUDA_SUCCESS)                                \
            (void)nvs_gpu_identity((uint32_t)dev, uuid);           \
        return result;                                             \
    }

NVS_IDENTIFIES(cuDeviceGetUuid)
NVS_IDENTIFIES(cuDeviceGetUuid_v2)

/* ---- Contexts ---- */

/* Starts the attachment early: the driver takes a tenth of a second for the first context. */
static CUdevice expected(CUdevice device)
{
    if (nvs_context_possible((uint32_t)device))
        nvs_agent_expect((uint32_t)device);
    return device;
}

static CUresult context_made(CUresult result, CUcontext *context, CUdevice device)
{
    if (result == CUDA_SUCCESS) {
        nvs_context_created(*context, (uint32_t)device);
        nvs_current_changed(NULL);
    }
    return result;
}

NVS_WRAP(cuCtxCreate, (CUcontext *pctx, unsigned int flags, CUdevice dev), context_made(real(pctx, flags, expected(dev)), pctx, dev))
NVS_WRAP(cuCtxCreate_v2, (CUcontext *pctx, unsigned int flags, CUdevice dev), context_made(real(pctx, flags, expected(dev)), pctx, dev))
NVS_WRAP(cuCtxCreate_v3, (CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags, CUdevice dev),
         context_made(real(pctx, paramsArray, numParams, flags, expected(dev)), pctx, dev))
NVS_WRAP(cuCtxCreate_v4, (CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev),
         context_made(real(pctx, ctxCreateParams, flags, expected(dev)), pctx, dev))

/* Before the driver ends a context, inside its GPU's gate.  From now on no thread visits the context or uses its events, though its work may run
 * (inflight/drain.c).  True: the context was known. */
static bool withdraw(CUcontext context, uint32_t gpu)
{
    nvs_pacing_context_gone(context);
    const bool known = nvs_context_leaving(context, nvs_self);
    nvs_mover_hurry(gpu); /* a pass that waits for its goal visits the context */
    nvs_context_await_visitors(context);
    nvs_swap_lanes_context_leaving(context);
    return known;
}

/* The driver has ended the context.  The registry's entry goes last: a new context with this handle waits for that (contexts/context.c). */
static void ended(CUcontext context, nvs_slot *held)
{
    nvs_pacing_context_gone(context); /* again: other threads may have made events meanwhile */
    nvs_streams_context_gone(context);
    nvs_marks_context_gone(context);
    nvs_captures_context_gone(context);
    nvs_gate_leave_nowait(held);
    nvs_memory_context_gone(context);
    nvs_ipc_context_gone(context);
    nvs_context_left(context, true);
}

static void survived(CUcontext context, bool withdrawn, nvs_slot *held)
{
    if (withdrawn)
        nvs_context_left(context, false);
    nvs_gate_leave_nowait(held);
}

/* `counts`: the driver ends the context only at the last reference; the hook does not know which one that is. */
static CUresult destroy_context(CUresult (*real)(CUcontext), CUcontext context, bool counts)
{
    const uint32_t gpu = nvs_context_gpu(context);
    nvs_slot *const held = nvs_gate_enter_nowait(gpu);
    const bool known = withdraw(context, gpu);
    const CUresult result = real(context);
    if (result == CUDA_SUCCESS && !(counts && nvs_context_lives(context)))
        ended(context, held);
    else
        survived(context, known, held);
    nvs_current_changed(NULL);
    return result;
}

NVS_WRAP(cuCtxDestroy, (CUcontext ctx), destroy_context(real, ctx, false))
NVS_WRAP(cuCtxDestroy_v2, (CUcontext ctx), destroy_context(real, ctx, false))
NVS_WRAP(cuCtxDetach, (CUcontext ctx), destroy_context(real, ctx, true))

/* Frameworks call these often.  With one GPU they are a jump, since every context is on it. */
#define NVS_SWITCHES(symbol, parameters, arguments, to)                            \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                                  \
    {                                                                              \
        if (NVS_LIKELY(nvs_only_gpu() != NVS_NO_GPU))                              \
            return NVS_REAL(symbol) arguments;                                     \
        const CUresult result = NVS_REAL(symbol) arguments;                        \
        nvs_current_changed(result == CUDA_SUCCESS ? (to) : NULL);                 \
        return result;                                                             \
    }

NVS_SWITCHES(cuCtxSetCurrent, (CUcontext ctx), (ctx), ctx)
NVS_SWITCHES(cuCtxPushCurrent, (CUcontext ctx), (ctx), ctx)
NVS_SWITCHES(cuCtxPushCurrent_v2, (CUcontext ctx), (ctx), ctx)
NVS_SWITCHES(cuCtxPopCurrent, (CUcontext *pctx), (pctx), NULL)
NVS_SWITCHES(cuCtxPopCurrent_v2, (CUcontext *pctx), (pctx), NULL)

NVS_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    const uint32_t gpu = (uint32_t)expected(dev);
    const int cancel = nvs_primary_begin(gpu);
    const CUresult result = NVS_REAL(cuDevicePrimaryCtxRetain)(pctx, dev);
    if (result == CUDA_SUCCESS) {
        nvs_context_created(*pctx, gpu);
        nvs_primary_retained(gpu, *pctx);
    }
    nvs_primary_end(gpu, cancel);
    return result;
}

static bool is_active(CUdevice device)
{
    unsigned int flags;
    int active = 0;
    return NVS_REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS && active;
}

/* The handle of a primary context that no wrapper has seen: retained by another path, or reopened after a reset. */
static CUcontext hidden_primary(CUdevice device)
{
    CUcontext context = NULL;
    if (!is_active(device) || NVS_REAL(cuDevicePrimaryCtxRetain)(&context, device) != CUDA_SUCCESS)
        return NULL;
    NVS_REAL(cuDevicePrimaryCtxRelease_v2)(device);
    return context;
}

/* A release ends the primary context at the last reference, a reset at once; the state afterwards shows it.  Only a context that is likely to end is
 * withdrawn before, so that a drain does not miss one that lives on. */
static CUresult end_primary(CUresult (*real)(CUdevice), CUdevice device, bool reset)
{
    bool last;
    const uint32_t gpu = (uint32_t)device;
    const int cancel = nvs_primary_begin(gpu);
    CUcontext context = nvs_primary_released(gpu, &last);
    if (context == NULL)
        context = hidden_primary(device);
    nvs_slot *const held = nvs_gate_enter_nowait(gpu);
    const bool withdrawn = context != NULL && (last || reset) && withdraw(context, gpu);
    const CUresult result = real(device);
    const bool lives = is_active(device);
    if (context != NULL && !lives)
        ended(context, held);
    else
        survived(context, withdrawn, held);
    if (result != CUDA_SUCCESS && context != NULL && lives)
        nvs_primary_retained(gpu, context);
    nvs_primary_end(gpu, cancel);
    nvs_current_changed(NULL);
    return result;
}

NVS_WRAP(cuDevicePrimaryCtxRelease, (CUdevice dev), end_primary(real, dev, false))
NVS_WRAP(cuDevicePrimaryCtxRelease_v2, (CUdevice dev), end_primary(real, dev, false))
NVS_WRAP(cuDevicePrimaryCtxReset, (CUdevice dev), end_primary(real, dev, true))
NVS_WRAP(cuDevicePrimaryCtxReset_v2, (CUdevice dev), end_primary(real, dev, true))

/* ---- Green contexts: their streams have their context handle, and memory that is allocated in them belongs to the primary context ---- */

static void register_green(CUcontext context)
{
    CUcontext primary = NULL;
    const uint32_t gpu = nvs_live_context_gpu(context);
    if (gpu == NVS_NO_GPU || NVS_REAL(cuDevicePrimaryCtxRetain)(&primary, (CUdevice)gpu) != CUDA_SUCCESS)
        return;
    nvs_context_is_green(context, primary);
    NVS_REAL(cuDevicePrimaryCtxRelease_v2)((CUdevice)gpu); /* the green context holds a reference */
}

NVS_EXPORT CUresult CUDAAPI cuCtxFromGreenCtx(CUcontext *pContext, CUgreenCtx hCtx)
{
    const CUresult result = NVS_REAL(cuCtxFromGreenCtx)(pContext, hCtx);
    if (result == CUDA_SUCCESS)
        register_green(*pContext);
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuGreenCtxDestroy(CUgreenCtx hCtx)
{
    CUcontext context = NULL;
    if (NVS_REAL(cuCtxFromGreenCtx)(&context, hCtx) != CUDA_SUCCESS)
        context = NULL;
    const uint32_t gpu = nvs_context_gpu(context);
    nvs_slot *const held = nvs_gate_enter_nowait(gpu);
    const bool known = context != NULL && withdraw(context, gpu);
    const CUresult result = NVS_REAL(cuGreenCtxDestroy)(hCtx);
    if (result == CUDA_SUCCESS && context != NULL)
        ended(context, held);
    else
        survived(context, known, held);
    nvs_current_changed(NULL);
    return result;
}

/* ---- Streams ---- */

static CUresult stream_made(CUresult result, CUstream *stream)
{
    CUcontext context = NULL;
    if (result == CUDA_SUCCESS && NVS_REAL(cuCtxGetCurrent)(&context) == CUDA_SUCCESS && context != NULL) {
        nvs_context_gpu(context);
        nvs_stream_created(*stream, context);
    }
    return result;
}

NVS_WRAP(cuStreamCreate, (CUstream *phStream, unsigned int Flags), stream_made(real(phStream, Flags), phStream))
NVS_WRAP(cuStreamCreateWithPriority, (CUstream *phStream, unsigned int flags, int priority), stream_made(real(phStream, flags, priority), phStream))

NVS_EXPORT CUresult CUDAAPI cuGreenCtxStreamCreate(CUstream *phStream, CUgreenCtx greenCtx, unsigned int flags, int priority)
{
    const CUresult result = NVS_REAL(cuGreenCtxStreamCreate)(phStream, greenCtx, flags, priority);
    CUcontext context = NULL;
    if (result == CUDA_SUCCESS && NVS_REAL(cuCtxFromGreenCtx)(&context, greenCtx) == CUDA_SUCCESS) {
        register_green(context);
        nvs_stream_created(*phStream, context);
    }
    return result;
}

static CUresult destroy_stream(CUresult (*real)(CUstream), CUstream stream)
{
    CUcontext context;
    if (NVS_UNLIKELY(atomic_load_explicit(&nvs_hot.capturing, memory_order_relaxed) != 0) && nvs_stream_context(stream) != NULL) /* as in nvs_capture_submitted */
        nvs_capture_may_join(nvs_stream_gpu(stream), stream); /* no drain queries the stream afterwards */
    nvs_capture_lost(stream); /* now: another stream may have this handle when the driver returns */
    const CUresult result = nvs_stream_leaving(stream, &context) ? real(stream) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS && context != NULL)
        nvs_stream_created(stream, context); /* it still exists */
    return result;
}

NVS_WRAP(cuStreamDestroy, (CUstream hStream), destroy_stream(real, hStream))
NVS_WRAP(cuStreamDestroy_v2, (CUstream hStream), destroy_stream(real, hStream))

/* --- captures: their beginning, their end, and the wait for an event by which they spread to another stream (inflight/captures.h) --- */

/* Called often: a jump if no capture is open. */
#define NVS_JOINS(symbol)                                                                           \
    static __attribute__((noinline)) CUresult wait_and_join_##symbol(CUstream stream, CUevent event, unsigned int flags) \
    {                                                                                               \
        const uint32_t gpu = nvs_stream_gpu(stream);                                                \
        nvs_capture_may_join(gpu, NVS_HANDLE(symbol, stream));                                      \
        const CUresult result = NVS_REAL(symbol)(stream, event, flags);                             \
        nvs_graphs_run_on(nvs_capture_joined(gpu, NVS_HANDLE(symbol, stream)));                     \
        return result;                                                                              \
    }                                                                                               \
    NVS_EXPORT CUresult CUDAAPI symbol(CUstream hStream, CUevent hEvent, unsigned int Flags)        \
    {                                                                                               \
        if (NVS_UNLIKELY(nvs_capturing()))                                                          \
            return wait_and_join_##symbol(hStream, hEvent, Flags);                                  \
        return NVS_REAL(symbol)(hStream, hEvent, Flags);                                            \
    }

NVS_JOINS(cuStreamWaitEvent)
NVS_JOINS(cuStreamWaitEvent_ptsz)

#define NVS_BEGINS(symbol, parameters, arguments)                             \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                             \
    {                                                                         \
        const uint32_t gpu = nvs_stream_gpu(hStream);                         \
        bool stopped = false;                                                 \
        nvs_slot *const slot = nvs_gate_enter_stoppable(gpu, &stopped);       \
        if (NVS_UNLIKELY(stopped))                                            \
            return NVS_STOPPED_RESULT;                                        \
        nvs_capture *const made = nvs_capture_begins(gpu, NVS_HANDLE(symbol, hStream)); \
        const CUresult result = made != NULL ? NVS_REAL(symbol) arguments : CUDA_ERROR_OUT_OF_MEMORY; \
        if (made != NULL)                                                     \
            nvs_capture_began(made, gpu, NVS_HANDLE(symbol, hStream), result); \
        nvs_gate_leave(slot, gpu);                                            \
        return result;                                                        \
    }
#define NVS_BEGIN_CAPTURE(symbol, parameters, arguments) NVS_BEGINS(symbol, parameters, arguments) NVS_BEGINS(symbol##_ptsz, parameters, arguments)

/* A failed end also ends the capture, except on the wrong thread: the stream's status shows which. */
static CUresult capture_over(CUresult result, CUstream stream)
{
    if (result == CUDA_SUCCESS || !nvs_stream_captures(stream))
        nvs_capture_ended(stream);
    return result;
}

#define NVS_ENDS(symbol, parameters, arguments)                                             \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                                           \
    {                                                                                       \
        return capture_over(NVS_REAL(symbol) arguments, NVS_HANDLE(symbol, hStream));       \
    }
#define NVS_END_CAPTURE(symbol, parameters, arguments) NVS_ENDS(symbol, parameters, arguments) NVS_ENDS(symbol##_ptsz, parameters, arguments)

NVS_BEGIN_CAPTURE(cuStreamBeginCapture, (CUstream hStream), (hStream))
NVS_BEGIN_CAPTURE(cuStreamBeginCapture_v2, (CUstream hStream, CUstreamCaptureMode mode), (hStream, mode))
NVS_BEGIN_CAPTURE(cuStreamBeginCaptureToGraph,
                  (CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData,
                   size_t numDependencies, CUstreamCaptureMode mode),
                  (hStream, hGraph, dependencies, dependencyData, numDependencies, mode))
NVS_END_CAPTURE(cuStreamEndCapture, (CUstream hStream, CUgraph *phGraph), (hStream, phGraph))
#if CUDA_VERSION >= 13020
NVS_BEGIN_CAPTURE(cuStreamBeginCaptureToCig, (CUstream hStream, CUstreamCigCaptureParams *streamCigCaptureParams),
                  (hStream, streamCigCaptureParams))
NVS_END_CAPTURE(cuStreamEndCaptureToCig, (CUstream hStream), (hStream))
#endif
#if CUDA_VERSION >= 13030
NVS_BEGIN_CAPTURE(cuStreamBeginRecaptureToGraph,
                  (CUstream hStream, CUstreamCaptureMode mode, CUgraph hGraph, CUgraphRecaptureCallback callbackFunc, void *userData),
                  (hStream, mode, hGraph, callbackFunc, userData))
#endif
