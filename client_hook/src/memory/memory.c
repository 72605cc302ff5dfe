/* See memory.h. */
#include "memory/memory.h"

#include "base/base.h"
#include "base/config.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "contexts/context.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "inflight/captures.h"
#include "inflight/marks.h"
#include "inflight/pacing.h"
#include "memory/backend.h"
#include "memory/pools.h"
#include "memory/quota.h"
#include "memory/registry.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

/* --- entries of the registry, with the bytes that they are charged with --- */

void nvs_memory_in_chunks(nvs_allocation *admitted)
{
    admitted->backend.chunked = true;
    atomic_fetch_add_explicit(&nvs_ledgers[admitted->gpu].chunked, admitted->charged_bytes, memory_order_relaxed); /* see memory/quota.h */
}

void nvs_memory_correct(nvs_allocation *admitted, uint64_t bytes)
{
    uint64_t real = nvs_memory_grains(bytes);
    /* Unsigned arithmetic: right in both directions.  Relaxed: see memory/quota.h. */
    atomic_fetch_add_explicit(&nvs_ledgers[admitted->gpu].charged, real - admitted->charged_bytes, memory_order_relaxed);
    admitted->charged_bytes = real;
}

void nvs_memory_keep(nvs_allocation *admitted, uint64_t key, uint64_t length)
{
    admitted->key = key;
    admitted->length = length;
    uint32_t gpu = admitted->gpu; /* after the insertion another thread may free the entry */
    if (admitted->backend.movable)
        atomic_fetch_add_explicit(&nvs_ledgers[gpu].movable, admitted->charged_bytes, memory_order_relaxed); /* see memory/quota.h */
    nvs_memory_drop_all(nvs_allocation_insert(admitted));
    nvs_coordinator.memory_changed(gpu);
}

/* Uncharges and frees an entry that nothing refers to any more. */
static void uncharge_and_free(nvs_allocation *taken, bool kept)
{
    nvs_ledger *of = &nvs_ledgers[taken->gpu];
    /* All relaxed: see memory/quota.h. */
    atomic_fetch_sub_explicit(&of->evicted, (int64_t)taken->evicted_bytes, memory_order_relaxed);
    if (taken->backend.chunked)
        atomic_fetch_sub_explicit(&of->chunked, taken->charged_bytes, memory_order_relaxed);
    else if (kept && taken->backend.movable)
        atomic_fetch_sub_explicit(&of->movable, taken->charged_bytes, memory_order_relaxed);
    nvs_ledger_uncharge(of, taken->charged_bytes);
    nvs_pool_take_back(taken->pool.figures, taken->pool.bytes, true);
    if (taken->charged_bytes != 0)
        nvs_coordinator.memory_changed(taken->gpu);
    free(taken);
}

void nvs_memory_drop(nvs_allocation *taken)
{
    if (taken->kind == NVS_MEMORY_HANDLE && taken->backend.chunked && taken->backend.kept != NULL)
        nvs_memory_chunked->release(taken->gpu, 0, 0, taken->backend.kept);
    uncharge_and_free(taken, taken->node.serial != 0); /* a serial is given when an entry goes into the registry */
}

void nvs_memory_drop_all(nvs_allocation *list)
{
    while (list != NULL) {
        nvs_allocation *next = list->node.next;
        nvs_memory_drop(list);
        list = next;
    }
}

/* --- what the driver holds for graphs --- */

NVS_FORK_STATE _Atomic bool nvs_graphs_allocate;

/* Charged beside the registry's entries.  Relaxed: whoever exchanges a value charges the difference. */
NVS_FORK_STATE static _Atomic uint64_t beyond[NVS_MAX_GPUS];

void nvs_graph_memory_learn(uint32_t gpu)
{
    cuuint64_t reserved = 0;
    if (!nvs_any_graph_allocates() || NVS_REAL(cuDeviceGetGraphMemAttribute)((CUdevice)gpu, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &reserved) != CUDA_SUCCESS)
        reserved = 0;
    const uint64_t needed = reserved != 0 ? nvs_allocation_charged(gpu, NVS_MEMORY_GRAPH) : 0;
    const uint64_t more = reserved > needed ? reserved - needed : 0;
    const uint64_t before = atomic_exchange_explicit(&beyond[gpu], more, memory_order_relaxed); /* see its declaration */
    if (more != before)
        nvs_memory_charge_again(gpu, more - before); /* unsigned arithmetic: right in both directions */
}

/* Makes the driver free memory that no executable needs.  True: the charge is smaller. */
static bool graph_memory_trim(uint32_t gpu)
{
    if (!nvs_any_graph_allocates())
        return false;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* a capture of this thread is not disturbed */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    nvs_graph_memory_learn(gpu);
    const uint64_t before = atomic_load_explicit(&beyond[gpu], memory_order_relaxed); /* see its declaration */
    if (before != 0 && NVS_REAL(cuDeviceGraphMemTrim)((CUdevice)gpu) == CUDA_SUCCESS)
        nvs_graph_memory_learn(gpu);
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    return atomic_load_explicit(&beyond[gpu], memory_order_relaxed) < before; /* as above */
}

/* --- memory that was freed in stream order, and goes back when its stream has reached the free --- */

enum { HOLD_AT_ONCE = 8 };
static const uint64_t REAP_BOUND_NS = UINT64_C(2000000000); /* the stream may wait for a later call of this thread */
static const long REAP_NAP_NS = 100000;

/* Frees the memory by its backend. */
static CUresult memory_give_back(const nvs_allocation *entry)
{
    return nvs_memory_backend(entry->gpu)->release(entry->gpu, entry->key, entry->length, entry->backend.kept);
}

/* Drops an entry whose context is gone.  The driver has freed its memory with it, unless it was in chunks. */
static void memory_forget(nvs_allocation *entry)
{
    if (entry->backend.chunked)
        memory_give_back(entry);
    nvs_memory_drop(entry);
}

/* Frees the memory of a deferred free whose event has completed.  If the driver fails, the memory stays charged. */
static void release_deferred(nvs_allocation *entry)
{
    CUresult result = memory_give_back(entry);
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
        memory_forget(held);
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
        memory_forget(held);
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

/* --- admission --- */

static const uint64_t KEEP_DEFERRED = UINT64_C(64) << 20;
enum { KEEP_DEFERRED_COUNT = 1024 }; /* each has an event, and a record that is searched */

/* A free by the driver waits for the whole GPU.  So memory that was freed in stream order is kept for the next allocation of its size on that stream
 * (nvs_memory_allocate_in_order), until it exceeds the memory in use, or it is in many pieces. */
static bool too_much_deferred(uint32_t gpu)
{
    uint64_t deferred = nvs_registry_deferred_bytes(gpu), charged = atomic_load_explicit(&nvs_ledgers[gpu].charged, memory_order_relaxed); /* see quota.h */
    return (deferred > KEEP_DEFERRED && deferred > charged / 2) || nvs_registry_deferred(gpu) > KEEP_DEFERRED_COUNT;
}

CUresult nvs_memory_charge(uint32_t gpu, uint64_t bytes, uint64_t *charged_bytes)
{
    *charged_bytes = nvs_memory_grains(bytes);
    if (*charged_bytes == UINT64_MAX)
        return CUDA_ERROR_OUT_OF_MEMORY;
    /* Memory in chunks takes no room before a lease, but other programs of the slot may have used its limit (relaxed: see memory/quota.h). */
    const bool ask = !nvs_memory_backend(gpu)->chunked || atomic_load_explicit(&nvs_ledgers[gpu].quota.limit_of_slot, memory_order_relaxed);
    if (too_much_deferred(gpu))
        nvs_memory_reap(gpu, false);
    while (!nvs_quota_charge(gpu, *charged_bytes, ask))
        if (!nvs_memory_reap(gpu, true) && !graph_memory_trim(gpu) && !nvs_pools_trim(gpu)) {
            nvs_memory_log_refused(gpu, *charged_bytes, false);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    return CUDA_SUCCESS;
}

CUresult nvs_memory_admit(nvs_space space, nvs_memory_kind kind, uint32_t gpu, uint64_t bytes, nvs_allocation **out)
{
    nvs_allocation *entry = nvs_allocation_new(space, kind, gpu);
    CUresult result = entry == NULL ? CUDA_ERROR_OUT_OF_MEMORY : nvs_memory_charge(gpu, bytes, &entry->charged_bytes);
    if (result == CUDA_SUCCESS)
        *out = entry;
    else
        free(entry);
    return result;
}

/* --- pinned memory --- */

/* Bytes of unanswered requests.  Relaxed: a count.  It is raised before the figures are read, so memory that is pinned meanwhile may count twice for a
 * moment, but is never missed. */
NVS_FORK_STATE static _Atomic uint64_t under_way[NVS_MAX_GPUS];
/* The same for memory that is charged before the request.  It does not count as pinned until the answer: a report between the two would be taken for
 * memory that was allowed, and a smaller request after a refusal would then be granted. */
NVS_FORK_STATE static _Atomic uint64_t charged_ahead[NVS_MAX_GPUS];

/* `more`: bytes beside those that are pinned. */
static bool may_stay(uint32_t gpu, uint64_t more)
{
    nvs_usage usage;
    nvs_memory_usage(gpu, &usage);
    return nvs_coordinator.reserve_pins(gpu, usage.pinned_bytes + more) != NVS_REFUSED;
}

bool nvs_pins_may(uint32_t gpu, uint64_t bytes)
{
    if (bytes == 0 || gpu >= NVS_MAX_GPUS)
        return true;
    const uint64_t before = atomic_fetch_add_explicit(&under_way[gpu], bytes, memory_order_relaxed); /* see its declaration */
    if (may_stay(gpu, before + bytes))
        return true;
    nvs_pins_counted(gpu, bytes);
    return false;
}

void nvs_pins_counted(uint32_t gpu, uint64_t bytes)
{
    if (bytes != 0 && gpu < NVS_MAX_GPUS)
        atomic_fetch_sub_explicit(&under_way[gpu], bytes, memory_order_relaxed); /* see its declaration */
}

void nvs_pins_log_refused(const char *what)
{
    const char *why = nvs_memory_take_refusal();
    if (why != NULL)
        nvs_log(NVS_LOG_WARNING, "out of memory: %s must stay on the card: %s", what, why);
    else
        NVS_LOG_ONCE(NVS_LOG_WARNING, "out of memory: %s must stay on the card, and what other programs need would not fit beside it; nvshare-ctl "
                     "memory shows who needs what: free some there", what);
}

CUresult nvs_pins_admit(nvs_space space, nvs_memory_kind kind, uint32_t gpu, uint64_t bytes, nvs_allocation **out)
{
    const uint64_t more = nvs_memory_grains(bytes);
    if (gpu >= NVS_MAX_GPUS)
        return nvs_memory_admit(space, kind, gpu, bytes, out);
    const uint64_t before = atomic_fetch_add_explicit(&charged_ahead[gpu], more, memory_order_relaxed); /* as under_way */
    CUresult result = nvs_memory_admit(space, kind, gpu, bytes, out);
    if (result == CUDA_SUCCESS && !may_stay(gpu, before + more + atomic_load_explicit(&under_way[gpu], memory_order_relaxed))) { /* see its declaration */
        nvs_pins_log_refused("memory of the driver's own (an array, a graph's, or a handle that cannot move)");
        nvs_memory_drop(*out);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    atomic_fetch_sub_explicit(&charged_ahead[gpu], more, memory_order_relaxed); /* as under_way */
    return result;
}

NVS_FORK_CODE void nvs_memory_after_fork(void)
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) { /* one thread: any order will do */
        atomic_store_explicit(&under_way[gpu], 0, memory_order_relaxed);
        atomic_store_explicit(&charged_ahead[gpu], 0, memory_order_relaxed);
    }
    atomic_store_explicit(&nvs_graphs_allocate, false, memory_order_relaxed); /* one thread: any order will do */
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        atomic_store_explicit(&beyond[gpu], 0, memory_order_relaxed);
}

/* --- allocation --- */

/* The driver's error for an allocation without a context; another one in a child that was forked after cuInit. */
static CUresult no_context(void)
{
    CUcontext none;
    CUresult result = NVS_REAL(cuCtxGetCurrent)(&none);
    return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_CONTEXT;
}

/* The driver makes physical memory also without a context, and in a dead one; cuMemAlloc fails there. */
static CUresult usable(const nvs_allocation *entry)
{
    if (entry->context == NULL)
        return no_context();
    return nvs_gate_dead(entry->gpu) ? nvs_context_error() : CUDA_SUCCESS;
}

/* The backend has not allocated the entry's bytes. */
static CUresult give_up(nvs_allocation *entry, const nvs_backend *backend, size_t bytes, CUresult failure)
{
    const uint32_t gpu = entry->gpu;
    nvs_memory_drop(entry);
    if (failure == CUDA_ERROR_OUT_OF_MEMORY)
        nvs_memory_log_refused(gpu, bytes, !backend->chunked);
    return failure;
}

CUresult nvs_memory_allocate(uint32_t gpu, CUdeviceptr *out, size_t bytes)
{
    const nvs_backend *backend = nvs_memory_backend(gpu);
    nvs_allocation *entry;
    CUdeviceptr pointer = 0;
    CUresult result = nvs_memory_admit(NVS_SPACE_ADDRESS, backend->kind, gpu, bytes, &entry);
    if (result != CUDA_SUCCESS)
        return result;
    entry->context = nvs_owner_context();
    (void)nvs_context_gpu(entry->context); /* registered: movers and reapers visit it */
    if (backend->chunked)
        nvs_memory_in_chunks(entry);
    entry->backend.movable = backend->movable && !backend->chunked && entry->context != NULL; /* it is moved from within its context */
    if (backend->chunked)
        result = usable(entry);
    if (result != CUDA_SUCCESS) {
        nvs_memory_drop(entry);
        return result;
    }
    do
        result = backend->allocate(gpu, &pointer, bytes, &entry->backend.kept);
    while (result == CUDA_ERROR_OUT_OF_MEMORY && nvs_memory_reap(gpu, true));
    if (result != CUDA_SUCCESS)
        return give_up(entry, backend, bytes, result);
    nvs_memory_keep(entry, pointer, bytes);
    *out = pointer;
    return CUDA_SUCCESS;
}

/* Handles of chunked memory are numbers that no address has and that are never used twice.  So they differ from the driver's handles, and a released
 * one is recognised. */
static const uint64_t NUMBERS = UINT64_C(0x6e76) << 48, NUMBERS_MASK = UINT64_C(0xffff) << 48;

bool nvs_memory_is_number(uint64_t handle)
{
    return (handle & NUMBERS_MASK) == NUMBERS;
}

CUresult nvs_memory_create(uint32_t gpu, size_t bytes, const CUmemAllocationProp *properties, CUmemGenericAllocationHandle *out)
{
    static _Atomic uint64_t last;
    const nvs_backend *backend = nvs_memory_backend(gpu);
    nvs_allocation *entry;
    if (!backend->chunked)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = nvs_memory_admit(NVS_SPACE_HANDLE, NVS_MEMORY_HANDLE, gpu, bytes, &entry);
    if (result != CUDA_SUCCESS)
        return result;
    entry->vmm.references = 1;
    nvs_memory_in_chunks(entry);
    do
        result = backend->create(gpu, bytes, properties, &entry->backend.kept);
    while (result == CUDA_ERROR_OUT_OF_MEMORY && nvs_memory_reap(gpu, true));
    if (result != CUDA_SUCCESS)
        return give_up(entry, backend, bytes, result);
    /* Relaxed: only that no two are the same matters. */
    *out = NUMBERS | (atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1);
    nvs_memory_keep(entry, *out, 1);
    return CUDA_SUCCESS;
}

CUresult nvs_memory_allocate_in_order(uint32_t gpu, CUdeviceptr *out, size_t bytes, uint64_t stream)
{
    nvs_allocation wanted = {.gpu = gpu, .deferred.stream = stream};
    CUevent event;
    uint64_t pointer;
    if (stream != 0 && nvs_registry_deferred(gpu) != 0) {
        wanted.charged_bytes = nvs_memory_grains(bytes);
        wanted.context = nvs_owner_context();
        if (wanted.context != NULL && nvs_allocation_revive(&wanted, bytes, &pointer, &event)) {
            NVS_REAL(cuEventDestroy_v2)(event);
            *out = pointer;
            return CUDA_SUCCESS;
        }
    }
    return nvs_memory_allocate(gpu, out, bytes);
}

/* --- free --- */

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
        result = entry->kind == NVS_MEMORY_REDIRECTED ? memory_give_back(entry) : NVS_REAL(cuMemFree_v2)(pointer);
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
        memory_forget(entry);
    }
    for (uint32_t gpu = 0; nvs_context_possible(gpu); gpu++)
        nvs_graph_memory_learn(gpu);
    nvs_backend_managed.context_gone(context);
    nvs_memory_chunked->context_gone(context);
}

/* --- figures and moves --- */

static uint64_t load(_Atomic uint64_t *value)
{
    return atomic_load_explicit(value, memory_order_relaxed); /* see quota.h */
}

void nvs_memory_usage(uint32_t gpu, nvs_usage *out)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    /* See memory/quota.h.  They are not read at one moment, so each is limited by the others. */
    const uint64_t unanswered = atomic_load_explicit(&of->unanswered, memory_order_acquire); /* before `charged` too: a refusal lowers both */
    uint64_t allocated = atomic_load_explicit(&of->charged, memory_order_seq_cst);
    const uint64_t refusable = load(&of->unanswered) > unanswered ? load(&of->unanswered) : unanswered;
    uint64_t chunked = load(&of->chunked), movable = load(&of->movable);
    int64_t evicted = atomic_load_explicit(&of->evicted, memory_order_relaxed);
    if (nvs_gate_dead(gpu)) { /* page faults of other programs evict managed memory of a dead context */
        allocated -= movable < allocated ? movable : allocated;
        movable = 0;
        evicted = 0;
    }
    const uint64_t later = load(&charged_ahead[gpu]), ahead = later > refusable ? later : refusable; /* they may be of the same memory */
    uint64_t others = allocated > chunked ? allocated - chunked : 0, pinned = others > movable + ahead ? others - movable - ahead : 0;
    uint64_t out_bytes = evicted < 0 ? 0 : (uint64_t)evicted;
    if (nvs_swapping()) { /* counted in chunks, which fill the card and move */
        nvs_chunk_figures chunks;
        nvs_memory_chunked->figures(gpu, &chunks);
        allocated = chunks.committed_bytes + others;
        out_bytes += chunks.committed_bytes - chunks.resident_bytes;
        pinned += chunks.pinned_bytes;
    }
    allocated -= refusable < allocated ? refusable : allocated;
    if (out_bytes > allocated)
        out_bytes = allocated;
    out->allocated_bytes = allocated;
    out->resident_bytes = allocated - out_bytes;
    out->pinned_bytes = pinned < out->resident_bytes ? pinned : out->resident_bytes;
    out->host_bytes = out_bytes;
}

void nvs_memory_virtual_info(uint32_t gpu, uint64_t *free_bytes, uint64_t *total_bytes)
{
    nvs_quota_virtual_info(gpu, nvs_memory_backend(gpu)->movable, free_bytes, total_bytes);
}

uint64_t nvs_memory_resident(uint32_t gpu)
{
    nvs_usage usage;
    nvs_memory_usage(gpu, &usage);
    return usage.resident_bytes;
}

nvs_status nvs_memory_move(uint32_t gpu, bool out, const nvs_watch *watch, uint64_t *moved_bytes)
{
    const nvs_backend *backend = nvs_memory_backend(gpu);
    *moved_bytes = 0;
    if (out) { /* freed memory makes room without a transfer */
        const uint64_t before = nvs_memory_resident(gpu);
        nvs_memory_reap(gpu, false);
        (void)graph_memory_trim(gpu);
        const uint64_t now = nvs_memory_resident(gpu);
        *moved_bytes = now < before ? before - now : 0;
    }
    const nvs_status status = backend->move(gpu, out, watch, moved_bytes);
    if (status != NVS_OK || !backend->chunked || nvs_allocation_extents(gpu, out, NULL, 0) == 0)
        return status;
    return nvs_backend_managed.move(gpu, out, watch, moved_bytes); /* that the application allocated, and is in no chunk */
}

bool nvs_memory_open_gates(uint32_t gpu, uint32_t gpus, uint32_t paced, uint64_t *missing_bytes)
{
    if (nvs_swapping() && nvs_memory_backend(gpu)->chunked)
        return nvs_memory_chunked->open_gates(gpu, gpus, paced, missing_bytes);
    *missing_bytes = 0;
    for (uint32_t each = 0; each < NVS_MAX_GPUS; each++)
        if ((gpus >> each & 1) != 0)
            nvs_gate_open(each, (paced >> each & 1) != 0);
    return gpus != 0;
}
