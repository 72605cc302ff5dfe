/* Memory mode `managed`: device allocations become managed memory, which may exceed the card; a switch moves it in bulk.
 *
 * What has been moved out is the front part [0, evicted_bytes) of each allocation.  That is an estimate: a GPU that touches evicted
 * pages brings them in by faults, and nobody tells.  It is exact again after the next move.
 *
 * Moves run on the GPU's mover thread, on streams of our own, in pieces, a few of them in flight.  An application may free an
 * allocation meanwhile; then the driver refuses the piece and the allocation is left alone.  A context is held while pieces move in it: a thread that ends
 * the context waits for those in flight, and its other allocations are left alone, too.
 */
#include "base/log.h"
#include "contexts/context.h"
#include "contexts/dead.h"
#include "contexts/which_gpu.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "memory/backends/backend.h"
#include "memory/records/entries.h"
#include "memory/records/registry.h"

#include <stdatomic.h>
#include <stdlib.h>

static const uint64_t PIECE_BYTES = UINT64_C(64) << 20, PAGE_BYTES = UINT64_C(2) << 20;
enum { IN_FLIGHT = 4, MAX_STREAMS = 64 };

/* Only movers move memory, but any thread may report that a context is gone: under the registry's lock. */
static struct {
    CUcontext context;
    CUstream stream;
} streams[MAX_STREAMS];

/* --- allocation --- */

static CUresult allocate(uint32_t gpu, CUdeviceptr *out, size_t bytes, void **kept)
{
    return NVS_REAL(cuMemAllocManaged)(out, bytes, CU_MEM_ATTACH_GLOBAL);
}

static CUresult release(uint32_t gpu, CUdeviceptr pointer, size_t bytes, void *kept)
{
    return NVS_REAL(cuMemFree_v2)(pointer);
}

bool nvs_backend_managed_works(uint32_t gpu)
{
    enum { UNKNOWN, YES, NO };
    static _Atomic uint8_t known[NVS_MAX_GPUS];
    if (gpu >= NVS_MAX_GPUS)
        return false;
    /* Relaxed: the answer stands for itself and every thread would find the same. */
    uint8_t answer = atomic_load_explicit(&known[gpu], memory_order_relaxed);
    if (NVS_UNLIKELY(answer == UNKNOWN)) {
        int concurrent = 0;
        CUresult result = NVS_REAL(cuDeviceGetAttribute)(&concurrent, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, (CUdevice)gpu);
        answer = result == CUDA_SUCCESS && concurrent ? YES : NO;
        if (result == CUDA_SUCCESS) /* else the driver is not ready: ask again next time */
            atomic_store_explicit(&known[gpu], answer, memory_order_relaxed);
    }
    return answer == YES;
}

/* --- streams of our own --- */

static CUresult stream_of(CUcontext context, CUstream *out)
{
    *out = NULL;
    nvs_registry_lock();
    for (size_t i = 0; i < MAX_STREAMS && *out == NULL; i++) {
        if (streams[i].context == context)
            *out = streams[i].stream;
    }
    nvs_registry_unlock();
    if (*out != NULL)
        return CUDA_SUCCESS;
    CUresult result = NVS_REAL(cuStreamCreate)(out, CU_STREAM_NON_BLOCKING);
    if (result != CUDA_SUCCESS)
        return result;
    nvs_registry_lock();
    for (size_t i = 0; i < MAX_STREAMS; i++) {
        if (streams[i].context == NULL) {
            streams[i].context = context;
            streams[i].stream = *out;
            break;
        }
    }
    nvs_registry_unlock();
    return CUDA_SUCCESS; /* with the table full it is made anew each time, and ends with its context */
}

static void context_gone(CUcontext context)
{
    nvs_registry_lock();
    for (size_t i = 0; i < MAX_STREAMS; i++) {
        if (streams[i].context == context) {
            streams[i].context = NULL;
            streams[i].stream = NULL;
        }
    }
    nvs_registry_unlock();
}

/* --- moving --- */

typedef struct mover {
    uint32_t gpu;
    bool out;
    uint64_t wanted, moved, submitted;
    const nvs_watch *watch;
    CUcontext context; /* pushed at the moment */
    size_t visit;      /* to it */
    CUstream stream;
    struct {
        CUevent done;
        uint64_t bytes;
        const nvs_extent *of;
        uint64_t evicted; /* of that extent, once it is done */
    } flight[IN_FLIGHT];
    unsigned first, count;
    bool lost;        /* waiting failed */
    bool ended;       /* no more is to move */
    CUresult failure; /* the last refusal that was not about one allocation that has gone */
} mover;

static CUresult prefetch(mover *m, CUdeviceptr pointer, uint64_t bytes)
{
    CUmemLocation where = {.type = m->out ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE,
                           .id = m->out ? 0 : (int)m->gpu};
    if (NVS_HAS(cuMemPrefetchAsync_v2))
        return NVS_REAL(cuMemPrefetchAsync_v2)(pointer, bytes, where, 0, m->stream);
    /* Before CUDA 12.2 there was only the first, which takes a device where the other takes a location. */
    return NVS_REAL(cuMemPrefetchAsync)(pointer, bytes, m->out ? CU_DEVICE_CPU : (CUdevice)m->gpu, m->stream);
}

static void wait_for_oldest(mover *m)
{
    CUresult result = NVS_REAL(cuEventSynchronize)(m->flight[m->first].done);
    unsigned slot = m->first;
    m->first = (m->first + 1) % IN_FLIGHT;
    m->count--;
    if (result != CUDA_SUCCESS) {
        m->failure = result;
        m->lost = true;
    }
    if (m->lost)
        return; /* nor is what came behind it known to have moved */
    nvs_memory_set_evicted(m->gpu, m->flight[slot].of, m->flight[slot].evicted);
    m->moved += m->flight[slot].bytes;
    if (m->watch != NULL)
        m->watch->moved(m->watch->argument, m->moved);
}

static void leave_context(mover *m)
{
    CUcontext ignored;
    if (m->context == NULL)
        return;
    while (m->count != 0)
        wait_for_oldest(m);
    for (unsigned i = 0; i < IN_FLIGHT; i++) {
        if (m->flight[i].done != NULL)
            NVS_REAL(cuEventDestroy_v2)(m->flight[i].done);
        m->flight[i].done = NULL;
    }
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    nvs_context_unhold(m->visit);
    m->context = NULL;
}

static bool enter_context(mover *m, CUcontext context)
{
    if (m->context == context)
        return true;
    leave_context(m);
    if (nvs_context_gpu(context) == NVS_NO_GPU || (m->visit = nvs_context_hold(context)) == 0)
        return false; /* it is being destroyed, and its memory with it */
    if (!nvs_context_enter(context)) {
        nvs_context_unhold(m->visit);
        return false;
    }
    m->context = context;
    CUresult result = stream_of(context, &m->stream);
    for (unsigned i = 0; result == CUDA_SUCCESS && i < IN_FLIGHT; i++)
        result = NVS_REAL(cuEventCreate)(&m->flight[i].done, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    if (result == CUDA_SUCCESS)
        return true;
    m->failure = result;
    leave_context(m);
    return false;
}

/* How much of a piece may move now; 0: no more is to.  What is under way arrives, and is told, before it waits. */
static uint64_t allowed(mover *m, uint64_t bytes)
{
    const nvs_watch *watch = m->watch;
    uint64_t fits = bytes;
    if (watch == NULL)
        return bytes;
    for (;;) {
        while (fits > PAGE_BYTES && !watch->room(watch->argument, m->submitted + fits, false))
            fits = fits / 2 > PAGE_BYTES ? fits / 2 / PAGE_BYTES * PAGE_BYTES : PAGE_BYTES;
        if (watch->room(watch->argument, m->submitted + fits, false))
            return fits;
        while (m->count != 0)
            wait_for_oldest(m);
        if (!watch->room(watch->argument, m->submitted + fits, true)) {
            m->ended = true;
            return 0;
        }
        fits = bytes; /* there may be room for more by now */
    }
}

/* Moves one piece of an allocation; `evicted` is how much of its front is out, before and after. */
static CUresult move_piece(mover *m, const nvs_extent *extent, uint64_t *evicted)
{
    uint64_t left = m->out ? extent->charged_bytes - *evicted : *evicted;
    uint64_t want = m->wanted - m->submitted;
    uint64_t bytes = left < PIECE_BYTES ? left : PIECE_BYTES;
    if (want < bytes && m->out) { /* at least what is wanted, in whole pages */
        uint64_t rounded = (want + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
        bytes = rounded < bytes ? rounded : bytes;
    } else if (want < bytes) {
        bytes = want; /* at most that */
    }
    if (m->count == IN_FLIGHT)
        wait_for_oldest(m);
    bytes = allowed(m, bytes);
    if (bytes == 0)
        return CUDA_SUCCESS; /* `ended` says so */
    uint64_t from = m->out ? *evicted : *evicted - bytes;
    uint64_t to = from + bytes < extent->length ? from + bytes : extent->length;
    CUresult result = to > from ? prefetch(m, extent->key + from, to - from) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS)
        return result;
    unsigned slot = (m->first + m->count) % IN_FLIGHT;
    result = NVS_REAL(cuEventRecord)(m->flight[slot].done, m->stream);
    if (result != CUDA_SUCCESS)
        return result;
    *evicted = m->out ? *evicted + bytes : *evicted - bytes;
    m->flight[slot].bytes = bytes;
    m->flight[slot].of = extent;
    m->flight[slot].evicted = *evicted;
    m->count++;
    m->submitted += bytes;
    return CUDA_SUCCESS;
}

static void move_extent(mover *m, const nvs_extent *extent)
{
    uint64_t evicted = extent->evicted_bytes;
    CUresult result = CUDA_SUCCESS;
    if (!enter_context(m, extent->context))
        return;
    while (result == CUDA_SUCCESS && !m->ended && !nvs_context_ends(m->context) && m->submitted < m->wanted && evicted != (m->out ? extent->charged_bytes : 0))
        result = move_piece(m, extent, &evicted);
    nvs_allocation now;
    if (result != CUDA_SUCCESS && nvs_allocation_find(NVS_SPACE_ADDRESS, extent->key, &now) == NVS_FOUND &&
        now.serial == extent->serial)
        m->failure = result; /* else it was freed meanwhile: no wonder */
}

/* Largest first: the fewest calls for the most bytes.  Neighbours of one context stay together among equals. */
static int larger_first(const void *a, const void *b)
{
    const nvs_extent *left = a, *right = b;
    if (left->charged_bytes != right->charged_bytes)
        return left->charged_bytes < right->charged_bytes ? 1 : -1;
    if (left->context != right->context)
        return (uintptr_t)left->context < (uintptr_t)right->context ? -1 : 1;
    return left->serial < right->serial ? -1 : left->serial > right->serial;
}

static nvs_status move(uint32_t gpu, bool out, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    mover m = {.gpu = gpu, .out = out, .wanted = bytes, .watch = watch};
    *moved_bytes = 0;
    size_t room = nvs_allocation_extents(gpu, out, NULL, 0);
    if (room == 0 || bytes == 0 || nvs_gate_dead(gpu))
        return NVS_OK;
    nvs_extent *extents = malloc(room * sizeof *extents);
    if (extents == NULL)
        return NVS_NO_MEMORY;
    size_t count = nvs_allocation_extents(gpu, out, extents, room);
    if (count > room)
        count = room; /* others came meanwhile: the next order finds them */
    qsort(extents, count, sizeof *extents, larger_first);

    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* captures of the application must not notice us */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    for (size_t i = 0; i < count && m.submitted < m.wanted && !m.ended && m.failure == CUDA_SUCCESS; i++)
        move_extent(&m, &extents[i]);
    leave_context(&m);
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    free(extents);
    *moved_bytes = m.moved;
    if (m.failure != CUDA_SUCCESS && nvs_gpu_look_dead(gpu))
        return NVS_OK; /* faults of other programs alone move it from now on */
    if (m.failure != CUDA_SUCCESS)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "moving managed memory %s failed (error %d); page faults will move it instead",
                     out ? "off the GPU" : "to the GPU", (int)m.failure);
    return m.failure == CUDA_SUCCESS ? NVS_OK : NVS_CUDA_FAILED;
}

static nvs_status evict(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    return move(gpu, true, bytes, watch, moved_bytes);
}

static nvs_status restore(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    return move(gpu, false, bytes, watch, moved_bytes);
}

const nvs_backend nvs_backend_managed = {
    .kind = NVS_MEMORY_REDIRECTED,
    .movable = true,
    .allocate = allocate,
    .release = release,
    .evict = evict,
    .restore = restore,
    .context_gone = context_gone,
};
