/* The memory modes `managed` and `device`, and the choice of a GPU's mode.
 *
 * Memory mode `managed`: device allocations become managed memory, which may exceed the card; a switch moves it in bulk.
 *
 * The front part [0, evicted_bytes) of each allocation is off the GPU.  That is an estimate: page faults bring evicted pages in, and the driver
 * does not report them.  It is exact again after the next move.
 *
 * A move runs on the GPU's mover thread, on a stream of the hook's, in pieces, a few of them in flight.  The application may free an allocation
 * meanwhile; the driver refuses its next piece then, and the mover skips it.  A context is held while pieces move in it: a thread that ends the
 * context waits for those in flight, and the mover skips its other allocations.
 */
#include "memory/backend.h"

#include "base/base.h"
#include "base/config.h"
#include "base/log.h"
#include "contexts/context.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "memory/registry.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

static const uint64_t PIECE_BYTES = UINT64_C(64) << 20, PAGE_BYTES = UINT64_C(2) << 20;
enum { IN_FLIGHT = 4, MAX_STREAMS = 64 };

/* Kept from one move to the next, because the driver makes no stream on a full card.  Under the registry's lock. */
static struct {
    CUcontext context;
    CUstream stream;
} streams[MAX_STREAMS];

/* --- allocation --- */

static CUresult allocate(uint32_t gpu, CUdeviceptr *out, size_t bytes, void **kept)
{
    return NVS_REAL(cuMemAllocManaged)(out, bytes, CU_MEM_ATTACH_GLOBAL);
}

/* Of both modes. */
static CUresult release(uint32_t gpu, CUdeviceptr pointer, size_t bytes, void *kept)
{
    return NVS_REAL(cuMemFree_v2)(pointer);
}

/* Whether the hook can move managed memory of this GPU. */
static bool backend_managed_works(uint32_t gpu)
{
    static _Atomic uint8_t known[NVS_MAX_GPUS];
    return gpu < NVS_MAX_GPUS && nvs_gpu_supports(gpu, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, known);
}

/* --- streams --- */

static CUresult stream_of(CUcontext context, CUstream *out)
{
    *out = NULL;
    nvs_registry_lock();
    for (size_t i = 0; i < MAX_STREAMS && *out == NULL; i++)
        if (streams[i].context == context)
            *out = streams[i].stream;
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
    return CUDA_SUCCESS; /* with a full table each move makes a stream, which ends with its context */
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

typedef struct piece {
    CUevent done;
    uint64_t bytes;
    const nvs_extent *of;
    uint64_t evicted; /* of that extent, once the piece has moved */
} piece;

typedef struct mover {
    uint32_t gpu;
    bool out;
    uint64_t submitted, moved; /* bytes */
    const nvs_watch *watch;
    struct {               /* the pushed context: enter_context, leave_context */
        CUcontext context; /* NULL: none */
        size_t visit;
        CUstream stream;
    } in;
    struct {               /* submitted pieces, a ring */
        piece pieces[IN_FLIGHT];
        unsigned first, count;
        bool lost;         /* a wait failed: no later piece is known to have moved */
    } flight;
    bool ended;       /* the goal is reached */
    CUresult failure; /* the last error, unless the allocation had been freed */
} mover;

static CUresult prefetch(mover *m, CUdeviceptr pointer, uint64_t bytes)
{
    CUmemLocation where = {.type = m->out ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE,
                           .id = m->out ? 0 : (int)m->gpu};
    if (NVS_HAS(cuMemPrefetchAsync_v2))
        return NVS_REAL(cuMemPrefetchAsync_v2)(pointer, bytes, where, 0, m->in.stream);
    return NVS_REAL(cuMemPrefetchAsync)(pointer, bytes, m->out ? CU_DEVICE_CPU : (CUdevice)m->gpu, m->in.stream); /* before CUDA 12.2 */
}

static void wait_for_oldest(mover *m)
{
    const piece *oldest = &m->flight.pieces[m->flight.first];
    CUresult result = NVS_REAL(cuEventSynchronize)(oldest->done);
    m->flight.first = (m->flight.first + 1) % IN_FLIGHT;
    m->flight.count--;
    if (result != CUDA_SUCCESS) {
        m->failure = result;
        m->flight.lost = true;
    }
    if (m->flight.lost)
        return;
    if (m->out)
        nvs_memory_set_evicted(m->gpu, oldest->of, oldest->evicted);
    m->moved += oldest->bytes;
    m->watch->moved(m->watch->argument, m->moved);
}

static void leave_context(mover *m)
{
    CUcontext ignored;
    if (m->in.context == NULL)
        return;
    while (m->flight.count != 0)
        wait_for_oldest(m);
    for (unsigned i = 0; i < IN_FLIGHT; i++) {
        if (m->flight.pieces[i].done != NULL)
            NVS_REAL(cuEventDestroy_v2)(m->flight.pieces[i].done);
        m->flight.pieces[i].done = NULL;
    }
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    nvs_context_unhold(m->in.visit);
    m->in.context = NULL;
}

static bool enter_context(mover *m, CUcontext context)
{
    if (m->in.context == context)
        return true;
    leave_context(m);
    if ((m->in.visit = nvs_context_hold(context)) == 0)
        return false; /* it is being destroyed, and its memory with it */
    if (!nvs_context_enter(context)) {
        nvs_context_unhold(m->in.visit);
        return false;
    }
    m->in.context = context;
    CUresult result = stream_of(context, &m->in.stream);
    for (unsigned i = 0; result == CUDA_SUCCESS && i < IN_FLIGHT; i++)
        result = NVS_REAL(cuEventCreate)(&m->flight.pieces[i].done, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    if (result == CUDA_SUCCESS)
        return true;
    m->failure = result;
    leave_context(m);
    return false;
}

/* The size of the next piece; `most` is left of its extent.  Out, in whole pages beyond the goal; in, up to it.  0: the pass ends.  Before a wait for the
 * goal all pieces in flight complete and are reported. */
static uint64_t next_piece(mover *m, uint64_t most)
{
    const nvs_watch *watch = m->watch;
    uint64_t bytes = most < PIECE_BYTES ? most : PIECE_BYTES, left = watch->left(watch->argument, m->submitted, 0);
    const uint64_t least = bytes < PAGE_BYTES ? bytes : PAGE_BYTES;
    if (m->out)
        left = left < bytes ? (left + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES : left;
    else if (left < least) {
        while (m->flight.count != 0)
            wait_for_oldest(m);
        left = watch->left(watch->argument, m->submitted, least);
    }
    if (!m->out && left < bytes && left > PAGE_BYTES)
        left -= left % PAGE_BYTES;
    return left < bytes ? left : bytes;
}

/* Moves one piece of an allocation; `evicted` is the size of its evicted part, before and after. */
static CUresult move_piece(mover *m, const nvs_extent *extent, uint64_t *evicted)
{
    if (m->flight.count == IN_FLIGHT)
        wait_for_oldest(m);
    const uint64_t bytes = next_piece(m, m->out ? extent->charged_bytes - *evicted : *evicted);
    m->ended = bytes == 0;
    if (m->ended)
        return CUDA_SUCCESS;
    const uint64_t from = m->out ? *evicted : *evicted - bytes;
    const uint64_t to = from + bytes < extent->length ? from + bytes : extent->length;
    if (!m->out) /* before its pages come in: a State never counts too little */
        nvs_memory_set_evicted(m->gpu, extent, from);
    CUresult result = to > from ? prefetch(m, extent->key + from, to - from) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS && !m->out)
        nvs_memory_set_evicted(m->gpu, extent, *evicted);
    if (result != CUDA_SUCCESS)
        return result;
    piece *next = &m->flight.pieces[(m->flight.first + m->flight.count) % IN_FLIGHT];
    result = NVS_REAL(cuEventRecord)(next->done, m->in.stream);
    if (result != CUDA_SUCCESS)
        return result;
    *evicted = m->out ? *evicted + bytes : *evicted - bytes;
    *next = (piece){next->done, bytes, extent, *evicted};
    m->flight.count++;
    m->submitted += bytes;
    return CUDA_SUCCESS;
}

static void move_extent(mover *m, const nvs_extent *extent)
{
    uint64_t evicted = extent->evicted_bytes;
    CUresult result = CUDA_SUCCESS;
    if (!enter_context(m, extent->context))
        return;
    while (result == CUDA_SUCCESS && !m->ended && !nvs_context_ends(m->in.context) && evicted != (m->out ? extent->charged_bytes : 0))
        result = move_piece(m, extent, &evicted);
    nvs_allocation now;
    if (result != CUDA_SUCCESS && nvs_allocation_find(NVS_SPACE_ADDRESS, extent->key, &now) == NVS_FOUND &&
        now.node.serial == extent->serial)
        m->failure = result; /* else the application has freed it meanwhile */
}

/* Largest first: the fewest calls for the most bytes.  Among equals, allocations of one context stay together. */
static int larger_first(const void *a, const void *b)
{
    const nvs_extent *left = a, *right = b;
    if (left->charged_bytes != right->charged_bytes)
        return left->charged_bytes < right->charged_bytes ? 1 : -1;
    if (left->context != right->context)
        return (uintptr_t)left->context < (uintptr_t)right->context ? -1 : 1;
    return left->serial < right->serial ? -1 : left->serial > right->serial;
}

static nvs_status move(uint32_t gpu, bool out, const nvs_watch *watch, uint64_t *moved_bytes)
{
    mover m = {.gpu = gpu, .out = out, .submitted = *moved_bytes, .moved = *moved_bytes, .watch = watch};
    size_t room = nvs_allocation_extents(gpu, out, NULL, 0);
    if (room == 0 || nvs_gate_dead(gpu))
        return NVS_OK;
    nvs_extent *extents = malloc(room * sizeof *extents);
    if (extents == NULL)
        return NVS_NO_MEMORY;
    size_t count = nvs_allocation_extents(gpu, out, extents, room);
    if (count > room)
        count = room; /* the next pass finds allocations that are newer */
    qsort(extents, count, sizeof *extents, larger_first);

    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* the application's captures are not disturbed */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    for (size_t i = 0; i < count && !m.ended && m.failure == CUDA_SUCCESS; i++)
        move_extent(&m, &extents[i]);
    leave_context(&m);
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    free(extents);
    *moved_bytes = m.moved;
    if (m.failure != CUDA_SUCCESS && nvs_gpu_check_dead(gpu))
        return NVS_OK; /* from now on only page faults of other programs move it */
    if (m.failure != CUDA_SUCCESS)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "moving managed memory %s failed (error %d); page faults will move it instead",
                     out ? "off the GPU" : "to the GPU", (int)m.failure);
    return m.failure == CUDA_SUCCESS ? NVS_OK : NVS_CUDA_FAILED;
}

const nvs_backend nvs_backend_managed = {
    .kind = NVS_MEMORY_REDIRECTED,
    .movable = true,
    .allocate = allocate,
    .release = release,
    .move = move,
    .context_gone = context_gone,
};

/* --- mode `device`: memory of the driver, which is only charged and does not move --- */

static CUresult device_allocate(uint32_t gpu, CUdeviceptr *out, size_t bytes, void **kept)
{
    return NVS_REAL(cuMemAlloc_v2)(out, bytes);
}

static nvs_status move_nothing(uint32_t gpu, bool out, const nvs_watch *watch, uint64_t *moved_bytes)
{
    return NVS_OK; /* all of it is pinned, as the coordinator knows from the reports */
}

const nvs_backend nvs_backend_device = {
    .kind = NVS_MEMORY_REAL,
    .movable = false,
    .allocate = device_allocate,
    .release = release,
    .move = move_nothing,
};

/* --- the mode of the process, and of a GPU --- */

static _Atomic bool chosen;

/* Only attributes are asked: there may be no context yet.  A driver that knows no GPU makes any mode right. */
static void choose_mode(void)
{
    static _Atomic uint8_t known[NVS_MAX_GPUS], integrated[NVS_MAX_GPUS];
    static const char *const reasons[] = {
        [NVS_MODE_SWAP] = "swap, as every GPU of this program has virtual memory management",
        [NVS_MODE_MANAGED] = "managed, as not every GPU of this program has virtual memory management",
        [NVS_MODE_DEVICE] = "device, as not every GPU of this program has virtual memory management, and none moves managed memory while it is in use",
    };
    bool chunked = true, managed = false, of_host = false;
    for (uint32_t gpu = 0; nvs_context_possible(gpu); gpu++) {
        chunked = chunked && nvs_gpu_supports(gpu, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, known);
        managed = managed || backend_managed_works(gpu);
        of_host = of_host || nvs_gpu_supports(gpu, CU_DEVICE_ATTRIBUTE_INTEGRATED, integrated);
    }
    if (of_host) {
        nvs_log(nvs_config.memory_auto ? NVS_LOG_DEBUG : NVS_LOG_WARNING,
                "memory mode device, as a GPU of this program has no memory but the host's, within which swap would move nothing");
        nvs_config.memory_mode = NVS_MODE_DEVICE;
    } else if (nvs_config.memory_auto) {
        nvs_config.memory_mode = chunked ? NVS_MODE_SWAP : managed ? NVS_MODE_MANAGED : NVS_MODE_DEVICE;
        nvs_log(NVS_LOG_DEBUG, "memory mode %s", reasons[nvs_config.memory_mode]);
    }
    atomic_store_explicit(&chosen, true, memory_order_release); /* pairs with nvs_memory_mode_chosen */
}

void nvs_memory_choose_mode(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (nvs_config.memory_late)
        pthread_once(&once, choose_mode);
}

bool nvs_memory_mode_chosen(void)
{
    return !nvs_config.memory_late || atomic_load_explicit(&chosen, memory_order_acquire);
}

const nvs_backend *nvs_memory_backend(uint32_t gpu)
{
    if (nvs_config.memory_mode == NVS_MODE_DEVICE)
        return &nvs_backend_device;
    if (nvs_config.memory_mode == NVS_MODE_SWAP) {
        if (nvs_memory_chunked->works(gpu))
            return nvs_memory_chunked;
        NVS_LOG_ONCE(NVS_LOG_WARNING, "this GPU has no virtual memory management, which --memory swap needs: using managed");
    }
    if (backend_managed_works(gpu))
        return &nvs_backend_managed;
    NVS_LOG_ONCE(NVS_LOG_WARNING,
                 "this GPU cannot move managed memory while it is in use: allocations stay on the device, as with --memory device");
    return &nvs_backend_device;
}

bool nvs_memory_manages(uint32_t gpu)
{
    if (!nvs_config.enabled)
        return false;
    nvs_context_learn();
    if (!nvs_context_possible(gpu))
        return false; /* the driver refuses the call */
    nvs_coordinator.attach(gpu);
    return true;
}
