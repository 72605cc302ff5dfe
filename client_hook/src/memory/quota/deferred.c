/* See deferred.h. */
#include "memory/quota/deferred.h"

#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "memory/backends/mode.h"
#include "memory/records/entries.h"
#include "memory/records/registry.h"

#include <errno.h>

enum { HOLD_AT_ONCE = 8 };
static const uint64_t REAP_BOUND_NS = UINT64_C(2000000000); /* the stream may wait for a later call of this thread */
static const long REAP_NAP_NS = 100000;

CUresult nvs_memory_give_back(const nvs_allocation *entry)
{
    return nvs_memory_backend(entry->gpu)->release(entry->gpu, entry->key, entry->length, entry->backend.kept);
}

/* Drops an entry whose context is gone.  The driver has freed its memory with it, unless it was in chunks. */
void nvs_memory_forget(nvs_allocation *entry)
{
    if (entry->backend.chunked)
        nvs_memory_give_back(entry);
    nvs_memory_drop(entry);
}

/* Frees the memory of a deferred free whose event has completed.  If the driver fails, the memory stays charged. */
static void release_deferred(nvs_allocation *entry)
{
    CUresult result = nvs_memory_give_back(entry);
    if (result == CUDA_SUCCESS) {
        nvs_memory_drop(entry);
        return;
    }
    NVS_LOG_ONCE(NVS_LOG_WARNING, "memory freed in stream order could not be given back to the driver (error %d)", (int)result);
    nvs_memory_drop_all(nvs_allocation_insert(entry));
}

/* Inside visits to the contexts of the memory and of the event; `event_in` NULL: the event is done. */
static bool reap_visited(nvs_allocation *held, CUcontext memory_in, CUcontext event_in)
{
    CUcontext ignored;
    /* The agent's thread has no current context. */
    const bool pushed = nvs_context_enter(memory_in);
    bool done = pushed || memory_in == NULL;
    done = done && (event_in == NULL || NVS_REAL(cuEventQuery)(held->deferred.event) != CUDA_ERROR_NOT_READY);
    if (done && event_in != NULL)
        NVS_REAL(cuEventDestroy_v2)(held->deferred.event);
    if (done && nvs_allocation_end_deferred(held))
        release_deferred(held);
    else if (done)
        nvs_memory_forget(held);
    if (pushed)
        NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return done;
}

/* True: the entry has ended, also if its context has ended, and the memory with it. */
static bool reap_one(nvs_allocation *held)
{
    CUcontext memory_in, event_in, memory_now, event_now;
    nvs_allocation_contexts(held, &memory_in, &event_in);
    const size_t memory_visit = nvs_context_hold(memory_in), event_visit = nvs_context_hold(event_in);
    nvs_allocation_contexts(held, &memory_now, &event_now); /* a visit that began after the end is one to another context */
    const bool visited = memory_now == memory_in && event_now == event_in && (memory_visit != 0 || memory_in == NULL) &&
                         (event_visit != 0 || event_in == NULL);
    bool done = visited && reap_visited(held, memory_in, event_in);
    if (!done && nvs_allocation_unhold(held)) {
        nvs_memory_forget(held);
        done = true;
    }
    nvs_context_unhold(memory_visit);
    nvs_context_unhold(event_visit);
    return done;
}

/* Queries the oldest deferred frees once. */
static bool reap_some(uint32_t gpu)
{
    bool any = false;
    for (;;) {
        nvs_allocation *held[HOLD_AT_ONCE];
        size_t count = nvs_allocation_hold_deferred(gpu, held, HOLD_AT_ONCE), done = 0;
        for (size_t i = 0; i < count; i++)
            done += reap_one(held[i]);
        any |= done != 0;
        if (done < HOLD_AT_ONCE) /* frees end roughly in order: after a pending one most are pending */
            return any;
    }
}

bool nvs_memory_reap(uint32_t gpu, bool wait)
{
    if (NVS_LIKELY(nvs_registry_deferred(gpu) == 0))
        return false;
    /* This thread may capture another stream, which these calls must not invalidate. */
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    uint32_t before = nvs_registry_deferred(gpu);
    bool any = reap_some(gpu);
    if (wait) {
        int saved = errno; /* the application's */
        uint64_t deadline = nvs_now_ns() + REAP_BOUND_NS;
        /* Fewer deferred frees: another thread has freed some. */
        while (!any && nvs_registry_deferred(gpu) >= before && nvs_now_ns() < deadline) {
            nvs_nap(REAP_NAP_NS);
            any = reap_some(gpu);
        }
        any |= nvs_registry_deferred(gpu) < before;
        errno = saved;
    }
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    return any;
}
