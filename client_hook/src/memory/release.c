/* See release.h. */
#include "memory/release.h"

#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "inflight/captures.h"
#include "inflight/marks.h"
#include "inflight/pacing.h"
#include "memory/backends/backend.h"
#include "memory/pools/figures.h"
#include "memory/quota/deferred.h"
#include "memory/quota/graph_memory.h"
#include "memory/records/entries.h"

#include <errno.h>

static const uint64_t IDLE_BOUND_NS = UINT64_C(10000000000);

static CUresult wait_streams(uint32_t gpu)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    const nvs_status status = nvs_drain(gpu, nvs_now_ns() + IDLE_BOUND_NS);
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    return status == NVS_OK ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* Waits for the work of the current context.  During a capture nothing context-wide may be synchronised: then the driver says
 * by a free of its own whether one is legal now, and streams are waited for one by one.  What graphs do on this GPU that were launched on another's
 * stream is nothing that a context knows of. */
static CUresult wait_current(uint32_t gpu)
{
    CUdeviceptr probe;
    CUresult result;
    if (!nvs_capturing()) {
        result = NVS_REAL(cuCtxSynchronize)();
        if (NVS_LIKELY(nvs_marked_by(gpu) == 0) || result != CUDA_SUCCESS)
            return result;
        return wait_streams(gpu);
    }
    result = NVS_REAL(cuMemAlloc_v2)(&probe, 1);
    if (result == CUDA_SUCCESS)
        result = NVS_REAL(cuMemFree_v2)(probe);
    return result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY ? wait_streams(gpu) : result;
}

/* cuMemFree returns when nothing uses the memory any more.  Where the driver does not see to that, we do. */
CUresult nvs_memory_wait_idle(uint32_t gpu, CUcontext context)
{
    CUcontext current = NULL, ignored;
    if (NVS_REAL(cuCtxGetCurrent)(&current) == CUDA_ERROR_DEINITIALIZED)
        return CUDA_ERROR_DEINITIALIZED; /* exit() has come to the driver before a destructor that frees: nothing can be given back any more */
    if (current == context)
        return wait_current(gpu);
    if (!nvs_context_enter(context))
        return CUDA_SUCCESS; /* it is gone, and its work with it */
    CUresult result = wait_current(gpu);
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return result;
}

CUresult nvs_memory_release(CUdeviceptr pointer)
{
    nvs_allocation *entry;
    nvs_pool_memory pooled;
    nvs_pool_place *claimed = nvs_memory_claim_pooled(pointer, &pooled);
    if (claimed != NULL)
        return nvs_memory_pooled_freed(claimed, &pooled, NVS_REAL(cuMemFree_v2)(pointer));
    switch (nvs_allocation_take(NVS_SPACE_ADDRESS, pointer, &entry)) {
    case NVS_ABSENT:
        return NVS_REAL(cuMemFree_v2)(pointer);
    case NVS_DYING:
        return CUDA_ERROR_INVALID_VALUE; /* freed twice */
    case NVS_FOUND:
        break;
    }
    CUresult result = entry->backend.chunked ? nvs_memory_wait_idle(entry->gpu, entry->context) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        result = entry->kind == NVS_MEMORY_REDIRECTED ? nvs_memory_give_back(entry) : NVS_REAL(cuMemFree_v2)(pointer);
    if (result == CUDA_SUCCESS) {
        nvs_pool_take_back(entry->pool.figures, entry->pool.bytes, false);
        entry->pool.figures = NULL;
        nvs_memory_drop(entry);
    } else {
        nvs_memory_drop_all(nvs_allocation_insert(entry));
    }
    return result;
}

void nvs_memory_context_gone(CUcontext context)
{
    nvs_pool_memory pooled;
    for (uint32_t place = 0; nvs_pool_book_take_of(context, &place, &pooled);)
        nvs_memory_uncharge(pooled.gpu, pooled.charged_bytes);
    for (nvs_allocation *entry = nvs_allocation_take_context(context), *next; entry != NULL; entry = next) {
        next = entry->node.next;
        nvs_memory_forget(entry);
    }
    for (uint32_t gpu = 0; nvs_context_possible(gpu); gpu++)
        nvs_graph_memory_learn(gpu);
    nvs_backend_managed.context_gone(context);
    nvs_memory_chunked->context_gone(context);
}
