/* The ways in which memory ends: freed at once, freed behind a stream, gone with its context.
 *
 * May not go here: the quota's figures (memory.c), which change by nvs_memory_drop alone.
 */
#include "base/clock.h"
#include "base/log.h"
#include "base/process/cancel.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "inflight/captures.h"
#include "inflight/marks.h"
#include "inflight/pacing.h"
#include "memory/graph_memory.h"
#include "memory/memory.h"
#include "memory/records/pool_figures.h"

#include <errno.h>

enum { HOLD_AT_ONCE = 8 };
static const uint64_t REAP_BOUND_NS = UINT64_C(2000000000); /* the stream may wait for something that this very thread does */
static const uint64_t SETTLE_BOUND_NS = UINT64_C(10000000000);
static const long REAP_NAP_NS = 100000;

static CUresult settle_streams(uint32_t gpu)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    const nvs_status status = nvs_drain(gpu, nvs_now_ns() + SETTLE_BOUND_NS);
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    return status == NVS_OK ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* Waits for the work of the current context.  During a capture nothing context-wide may be synchronised: then the driver says
 * by a free of its own whether one is legal now, and streams are waited for one by one.  What graphs do on this GPU that were launched on another's
 * stream is nothing that a context knows of. */
static CUresult settle_current(uint32_t gpu)
{
    CUdeviceptr probe;
    CUresult result;
    if (!nvs_capturing()) {
        result = NVS_REAL(cuCtxSynchronize)();
        if (NVS_LIKELY(nvs_marked_by(gpu) == 0) || result != CUDA_SUCCESS)
            return result;
        return settle_streams(gpu);
    }
    result = NVS_REAL(cuMemAlloc_v2)(&probe, 1);
    if (result == CUDA_SUCCESS)
        result = NVS_REAL(cuMemFree_v2)(probe);
    return result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY ? settle_streams(gpu) : result;
}

/* cuMemFree returns when nothing uses the memory any more.  Where the driver does not see to that, we do. */
CUresult nvs_memory_settle(uint32_t gpu, CUcontext context)
{
    CUcontext current = NULL, ignored;
    if (NVS_REAL(cuCtxGetCurrent)(&current) == CUDA_ERROR_DEINITIALIZED)
        return CUDA_ERROR_DEINITIALIZED; /* exit() has come to the driver before a destructor that frees: nothing can be given back any more */
    if (current == context)
        return settle_current(gpu);
    if (!nvs_context_enter(context))
        return CUDA_SUCCESS; /* it is gone, and its work with it */
    CUresult result = settle_current(gpu);
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return result;
}

static CUresult release_redirected(const nvs_allocation *entry)
{
    return nvs_memory_backend(entry->gpu)->release(entry->gpu, entry->key, entry->length, entry->kept);
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
    CUresult result = entry->chunked ? nvs_memory_settle(entry->gpu, entry->context) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        result = entry->kind == NVS_MEMORY_REDIRECTED ? release_redirected(entry) : NVS_REAL(cuMemFree_v2)(pointer);
    if (result == CUDA_SUCCESS) {
        nvs_pool_take_back(entry->pool, entry->pool_bytes, false);
        entry->pool = NULL;
        nvs_memory_drop(entry);
    } else {
        nvs_memory_drop_all(nvs_allocation_insert(entry));
    }
    return result;
}

/* --- deferred frees --- */

/* Gives the memory behind an ended deferred free back.  What the driver refuses to take back is still there: it stays charged. */
static void release_deferred(nvs_allocation *entry)
{
    CUresult result = release_redirected(entry);
    if (result == CUDA_SUCCESS) {
        nvs_memory_drop(entry);
        return;
    }
    NVS_LOG_ONCE(NVS_LOG_WARNING, "memory freed in stream order could not be given back to the driver (error %d)", (int)result);
    nvs_memory_drop_all(nvs_allocation_insert(entry));
}

/* Drops an entry whose context is gone.  The driver has freed its memory with it, unless it was in chunks. */
static void forget(nvs_allocation *entry)
{
    if (entry->chunked)
        release_redirected(entry);
    nvs_memory_drop(entry);
}

/* True: done with.  Also when the context that the event lived in is gone, and the memory with it. */
static bool reap_one(nvs_allocation *held)
{
    CUcontext ignored;
    CUevent event = held->freed_event;
    /* The agent has no context of its own. */
    bool pushed = nvs_context_enter(held->context);
    bool done = (pushed || held->context == NULL) && NVS_REAL(cuEventQuery)(event) != CUDA_ERROR_NOT_READY;
    if (done && nvs_allocation_end_deferred(held)) {
        NVS_REAL(cuEventDestroy_v2)(event);
        release_deferred(held);
    } else if (done || nvs_allocation_unhold(held)) {
        forget(held);
        done = true;
    }
    if (pushed)
        NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return done;
}

/* One look at the oldest ones. */
static bool reap_some(uint32_t gpu)
{
    bool any = false;
    for (;;) {
        nvs_allocation *held[HOLD_AT_ONCE];
        size_t count = nvs_allocation_hold_deferred(gpu, held, HOLD_AT_ONCE), done = 0;
        for (size_t i = 0; i < count; i++)
            done += reap_one(held[i]);
        any |= done != 0;
        if (done < HOLD_AT_ONCE) /* frees end roughly in order: one that is not done tells about those behind it */
            return any;
    }
}

bool nvs_memory_reap(uint32_t gpu, bool wait)
{
    if (NVS_LIKELY(nvs_allocation_deferred(gpu) == 0))
        return false;
    /* Another stream of this thread may be capturing: nothing here touches that one, so it must not be disturbed. */
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    uint32_t before = nvs_allocation_deferred(gpu);
    bool any = reap_some(gpu);
    if (wait) {
        int saved = errno; /* the application's, whatever a nap does */
        uint64_t deadline = nvs_now_ns() + REAP_BOUND_NS;
        /* Fewer, though this thread freed none: another one did. */
        while (!any && nvs_allocation_deferred(gpu) >= before && nvs_now_ns() < deadline) {
            nvs_nap(REAP_NAP_NS);
            any = reap_some(gpu);
        }
        any |= nvs_allocation_deferred(gpu) < before;
        errno = saved;
    }
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    return any;
}

/* --- contexts --- */

void nvs_memory_context_gone(CUcontext context)
{
    nvs_pool_memory pooled;
    for (uint32_t place = 0; nvs_pool_book_take_of(context, &place, &pooled);)
        nvs_memory_uncharge(pooled.gpu, pooled.charged_bytes);
    for (nvs_allocation *entry = nvs_allocation_take_context(context), *next; entry != NULL; entry = next) {
        next = entry->next;
        forget(entry);
    }
    for (uint32_t gpu = 0; nvs_context_possible(gpu); gpu++)
        nvs_graph_memory_learn(gpu);
    nvs_backend_managed.context_gone(context);
    nvs_memory_chunked->context_gone(context);
}
