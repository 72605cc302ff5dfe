/* A capture that spreads to another stream, which waits for an event of the first: the work that the stream still has is marked (inflight/captures.h).
 * Where it is a stream of another GPU, what comes of it is noted as a graph on both (graph_gpus.h); in mode `swap` the memory of both stays on the
 * cards from here on.
 *
 * Drivers before 11.3 do not tell which graph a stream is captured into; there a launch has the lease of its own GPU alone.
 */
#include "base/config.h"
#include "contexts/context.h"
#include "contexts/which_gpu.h"
#include "driver/cuda_api.h"
#include "hooks/work/graph_gpus.h"
#include "inflight/captures.h"

static bool several_gpus(void)
{
    return NVS_UNLIKELY(nvs_only_gpu() == NVS_NO_GPU) && nvs_config.enabled;
}

/* What a stream is captured into; NULL: nothing. */
static CUgraph captured_into(CUstream stream, bool per_thread)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUgraph graph = NULL;
    const CUresult result = per_thread ? NVS_REAL(cuStreamGetCaptureInfo_v2_ptsz)(stream, &status, NULL, &graph, NULL, NULL)
                                       : NVS_REAL(cuStreamGetCaptureInfo_v2)(stream, &status, NULL, &graph, NULL, NULL);
    return result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? graph : NULL;
}

void nvs_capture_on(uint32_t gpu, CUstream stream, bool per_thread, bool into_new)
{
    const CUgraph graph = several_gpus() ? captured_into(stream, per_thread) : NULL;
    if (graph == NULL || gpu >= NVS_MAX_GPUS)
        return;
    if (into_new)
        nvs_graph_gone(graph); /* of a capture that failed: the driver freed it, and gave the handle to this one */
    nvs_graph_runs_on(graph, 1u << gpu);
}

static void joined(CUstream stream, bool per_thread)
{
    const CUgraph graph = captured_into(stream, per_thread);
    const uint32_t gpu = nvs_stream_gpu(stream);
    if (graph == NULL || gpu >= NVS_MAX_GPUS)
        return;
    nvs_graph_runs_on(graph, 1u << gpu);
    const uint32_t gpus = nvs_graph_gpus(graph);
    if ((gpus & (gpus - 1)) != 0)
        nvs_graph_keep_memory(gpus);
}

/* Often called, so that for most programs it is a jump and no more. */
#define NVS_JOINS(symbol)                                                                           \
    static __attribute__((noinline)) CUresult wait_and_join_##symbol(CUstream stream, CUevent event, unsigned int flags) \
    {                                                                                               \
        nvs_capture_may_join(nvs_stream_gpu(stream), stream, NVS_PER_THREAD(#symbol));              \
        const CUresult result = NVS_REAL(symbol)(stream, event, flags);                             \
        if (result == CUDA_SUCCESS && several_gpus())                                               \
            joined(stream, NVS_PER_THREAD(#symbol));                                                \
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
