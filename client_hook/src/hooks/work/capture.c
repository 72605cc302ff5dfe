/* Wrappers of captures: their beginning, their end, and the wait for an event by which they spread to another stream (inflight/captures.h).
 *
 * A capture begins inside the gate.  So a drain that finds no capture can synchronise a context without invalidating one, and a drain that finds one has
 * the marks of all work.
 */
#include "contexts/context.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "hooks/work/graph_gpus.h"
#include "inflight/captures.h"

/* Called often: a jump if no capture is open. */
#define NVS_JOINS(symbol)                                                                           \
    static __attribute__((noinline)) CUresult wait_and_join_##symbol(CUstream stream, CUevent event, unsigned int flags) \
    {                                                                                               \
        const uint32_t gpu = nvs_stream_gpu(stream);                                                \
        nvs_capture_may_join(gpu, stream, NVS_PER_THREAD(#symbol));                                 \
        const CUresult result = NVS_REAL(symbol)(stream, event, flags);                             \
        nvs_graphs_run_on(nvs_capture_joined(gpu, stream, NVS_PER_THREAD(#symbol)));                \
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

#define NVS_BEGIN_CAPTURE(symbol, parameters, arguments)                      \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                             \
    {                                                                         \
        const uint32_t gpu = nvs_stream_gpu(hStream);                         \
        bool stopped = false;                                                 \
        nvs_slot *const slot = nvs_gate_enter_stoppable(gpu, &stopped);       \
        if (NVS_UNLIKELY(stopped))                                            \
            return NVS_STOPPED_RESULT;                                        \
        nvs_capture *const made = nvs_capture_begins(gpu, hStream, NVS_PER_THREAD(#symbol)); \
        const CUresult result = made != NULL ? NVS_REAL(symbol) arguments : CUDA_ERROR_OUT_OF_MEMORY; \
        if (made != NULL)                                                     \
            nvs_capture_began(made, gpu, hStream, NVS_PER_THREAD(#symbol), result); \
        nvs_gate_leave(slot, gpu);                                            \
        return result;                                                        \
    }

NVS_BEGIN_CAPTURE(cuStreamBeginCapture, (CUstream hStream), (hStream))
NVS_BEGIN_CAPTURE(cuStreamBeginCapture_ptsz, (CUstream hStream), (hStream))
NVS_BEGIN_CAPTURE(cuStreamBeginCapture_v2, (CUstream hStream, CUstreamCaptureMode mode), (hStream, mode))
NVS_BEGIN_CAPTURE(cuStreamBeginCapture_v2_ptsz, (CUstream hStream, CUstreamCaptureMode mode), (hStream, mode))
NVS_BEGIN_CAPTURE(cuStreamBeginCaptureToGraph,
                  (CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData,
                   size_t numDependencies, CUstreamCaptureMode mode),
                  (hStream, hGraph, dependencies, dependencyData, numDependencies, mode))
NVS_BEGIN_CAPTURE(cuStreamBeginCaptureToGraph_ptsz,
                  (CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData,
                   size_t numDependencies, CUstreamCaptureMode mode),
                  (hStream, hGraph, dependencies, dependencyData, numDependencies, mode))

/* A failed end also ends the capture, except on the wrong thread: the stream's status shows which. */
static CUresult capture_over(CUresult result, CUstream stream, bool per_thread)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (result != CUDA_SUCCESS) {
        const CUresult asked = per_thread ? NVS_REAL(cuStreamIsCapturing_ptsz)(stream, &status)
                                          : NVS_REAL(cuStreamIsCapturing)(stream, &status);
        if (asked != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE)
            return result;
    }
    nvs_capture_ended(stream, per_thread);
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
    return capture_over(NVS_REAL(cuStreamEndCapture)(hStream, phGraph), hStream, false);
}

NVS_EXPORT CUresult CUDAAPI cuStreamEndCapture_ptsz(CUstream hStream, CUgraph *phGraph)
{
    return capture_over(NVS_REAL(cuStreamEndCapture_ptsz)(hStream, phGraph), hStream, true);
}

#if CUDA_VERSION >= 13020
NVS_BEGIN_CAPTURE(cuStreamBeginCaptureToCig, (CUstream hStream, CUstreamCigCaptureParams *streamCigCaptureParams),
                  (hStream, streamCigCaptureParams))
NVS_BEGIN_CAPTURE(cuStreamBeginCaptureToCig_ptsz, (CUstream hStream, CUstreamCigCaptureParams *streamCigCaptureParams),
                  (hStream, streamCigCaptureParams))

NVS_EXPORT CUresult CUDAAPI cuStreamEndCaptureToCig(CUstream hStream)
{
    return capture_over(NVS_REAL(cuStreamEndCaptureToCig)(hStream), hStream, false);
}

NVS_EXPORT CUresult CUDAAPI cuStreamEndCaptureToCig_ptsz(CUstream hStream)
{
    return capture_over(NVS_REAL(cuStreamEndCaptureToCig_ptsz)(hStream), hStream, true);
}
#endif

#if CUDA_VERSION >= 13030
NVS_BEGIN_CAPTURE(cuStreamBeginRecaptureToGraph,
                  (CUstream hStream, CUstreamCaptureMode mode, CUgraph hGraph, CUgraphRecaptureCallback callbackFunc, void *userData),
                  (hStream, mode, hGraph, callbackFunc, userData))
NVS_BEGIN_CAPTURE(cuStreamBeginRecaptureToGraph_ptsz,
                  (CUstream hStream, CUstreamCaptureMode mode, CUgraph hGraph, CUgraphRecaptureCallback callbackFunc, void *userData),
                  (hStream, mode, hGraph, callbackFunc, userData))
#endif
