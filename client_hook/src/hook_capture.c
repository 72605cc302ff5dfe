/* A capture that spreads from one GPU to another, for mode `swap`: a stream of the second waits for an event of the first.
 *
 * The graph that comes of it is launched on one stream, and so under the lease of one GPU; what it does on the others runs whoever has them.
 * That cannot be noticed at the launch, which names nothing: so their memory stays on the cards from the capture on (swap_rights.c).
 *
 * Kernel nodes that are added by hand for several GPUs are not noticed.
 */
#include "agent.h"
#include "context.h"
#include "cuda_api.h"
#include "log.h"
#include "memory.h"
#include "swap.h"

#include <pthread.h>

enum { REMEMBERED = 64 }; /* captures; the oldest are forgotten, more than that are not under way at once */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "origins of captures" in the lock order of base.h */
static struct {
    uint64_t capture;
    uint32_t gpu;
} origins[REMEMBERED];
static uint32_t next;

static bool several_gpus_swap(void)
{
    return NVS_UNLIKELY(nvs_only_gpu() == NVS_NO_GPU) &&
           nvs_config.enabled && nvs_config.memory_mode == 2;
}

/* The number of the capture that a stream takes part in; 0: none. */
static uint64_t capture_of(CUstream stream, bool per_thread)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuuint64_t id = 0;
    const CUresult result = per_thread ? NVS_REAL(cuStreamGetCaptureInfo_ptsz)(stream, &status, &id)
                                       : NVS_REAL(cuStreamGetCaptureInfo)(stream, &status, &id);
    return result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? id : 0;
}

void nvs_capture_on(uint32_t gpu, CUstream stream, bool per_thread)
{
    const uint64_t capture = several_gpus_swap() ? capture_of(stream, per_thread) : 0;
    if (capture == 0)
        return;
    pthread_mutex_lock(&lock);
    origins[next].capture = capture;
    origins[next].gpu = gpu;
    next = (next + 1) % REMEMBERED;
    pthread_mutex_unlock(&lock);
}

static void keep(uint32_t gpu)
{
    if (gpu < NVS_MAX_GPUS && nvs_memory_backend(gpu)->chunked)
        nvs_swap_reach(gpu);
}

static void joined(CUstream stream, bool per_thread)
{
    const uint64_t capture = capture_of(stream, per_thread);
    const uint32_t gpu = nvs_stream_gpu(stream);
    uint32_t origin = gpu;
    if (capture == 0)
        return;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < REMEMBERED; i++)
        if (origins[i].capture == capture)
            origin = origins[i].gpu;
    pthread_mutex_unlock(&lock);
    if (origin == gpu)
        return;
    nvs_log(NVS_LOG_INFO, "a graph is captured on GPUs %u and %u: it is launched under the lease of one, so the memory of both stays", origin, gpu);
    keep(origin);
    keep(gpu);
}

/* Often called, so that for most programs it is a jump and no more. */
#define NVS_JOINS(symbol)                                                                           \
    static __attribute__((noinline)) CUresult wait_and_join_##symbol(CUstream stream, CUevent event, unsigned int flags) \
    {                                                                                               \
        const CUresult result = NVS_REAL(symbol)(stream, event, flags);                             \
        if (result == CUDA_SUCCESS)                                                                 \
            joined(stream, NVS_PER_THREAD(#symbol));                                                \
        return result;                                                                              \
    }                                                                                               \
    NVS_EXPORT CUresult CUDAAPI symbol(CUstream hStream, CUevent hEvent, unsigned int Flags)        \
    {                                                                                               \
        if (several_gpus_swap() && nvs_capturing())                                                 \
            return wait_and_join_##symbol(hStream, hEvent, Flags);                                  \
        return NVS_REAL(symbol)(hStream, hEvent, Flags);                                            \
    }

NVS_JOINS(cuStreamWaitEvent)
NVS_JOINS(cuStreamWaitEvent_ptsz)
