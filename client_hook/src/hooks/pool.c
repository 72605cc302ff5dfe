/* Wrappers: stream-ordered memory.
 *
 * In a mode that moves memory, the backend makes an allocation outside a capture at once, and its free waits for the work queued before it
 * (an event; nvs_memory_reap).  An allocation of the same size on the same stream may take the memory earlier.  Inside a capture the memory belongs
 * to the graph and is the driver's (memory/memory.h).  A program is charged for its allocations, and for the free memory that a driver's
 * pool keeps (memory/pools.h).
 */
#include "base/config.h"
#include "base/log.h"
#include "contexts/context.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "hooks/hooks.h"
#include "inflight/captures.h"
#include "inflight/marks.h"
#include "ipc/ipc.h"
#include "memory/memory.h"
#include "memory/pools.h"

#include <stdatomic.h>

/* GPUs, by bit, where a backend has allocated for a pool.  Relaxed: a thread gets that memory from the call that set the bit. */
static _Atomic uint32_t backend_gpus;

static bool is_special(CUmemoryPool pool)
{
    return nvs_pool_kind_of(pool) != NVS_POOL_USUAL;
}

static bool is_on_gpu(CUmemoryPool pool)
{
    return nvs_pool_kind_of(pool) != NVS_POOL_OF_HOST;
}

static bool keep(void)
{
    return atomic_load_explicit(&nvs_pools_keep, memory_order_relaxed); /* see its declaration */
}

static bool captures(CUstream stream)
{
    return nvs_capturing() && nvs_stream_captures(stream);
}

/* The driver's id of a stream plus 1; never reused, unlike a handle; 0: not known. */
static uint64_t identity(CUstream stream)
{
    unsigned long long id = 0;
    return NVS_REAL(cuStreamGetId)(stream, &id) == CUDA_SUCCESS ? id + 1 : 0;
}

/* The arguments of an allocation, and the driver's function for it. */
typedef struct request {
    size_t bytes;
    CUmemoryPool pool; /* NULL: the device's current one, unless the call names it */
    CUstream stream;   /* by NVS_HANDLE, as in all functions below */
    bool names_pool;
} request;

static CUresult ask_driver(CUdeviceptr *dptr, const request *r)
{
    return r->names_pool ? NVS_REAL(cuMemAllocFromPoolAsync)(dptr, r->bytes, r->pool, r->stream)
                         : NVS_REAL(cuMemAllocAsync)(dptr, r->bytes, r->stream);
}

/* For a full table of pools (memory/pools.h). */
static bool keep_in_registry(const nvs_pool_memory *memory, size_t bytes)
{
    nvs_allocation *entry = nvs_allocation_new(NVS_SPACE_ADDRESS, NVS_MEMORY_POOL, memory->gpu);
    if (entry == NULL)
        return false;
    entry->charged_bytes = memory->charged_bytes;
    entry->context = memory->context;
    nvs_memory_keep(entry, memory->address, bytes);
    return true;
}

/* Records an allocation of the driver. */
static __attribute__((noinline)) CUresult note(nvs_pool_memory *memory, CUdeviceptr address, const request *r)
{
    nvs_pool_memory stale;
    nvs_pool_place *place;
    memory->address = address;
    while (NVS_UNLIKELY((place = nvs_memory_claim_pooled(address, &stale)) != NULL))
        nvs_memory_pooled_freed(place, &stale, CUDA_SUCCESS); /* it was freed without the hook: the driver has allocated it again */
    nvs_pool_book_begin();
    if (NVS_LIKELY(nvs_pool_book_enter(memory))) {
        nvs_memory_changed(memory->gpu);
    } else if (!keep_in_registry(memory, r->bytes)) {
        NVS_REAL(cuMemFreeAsync)(address, r->stream);
        nvs_memory_uncharge(memory->gpu, memory->charged_bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    /* From now on such allocations can take the fast path. */
    if (memory->gpu == 0 && nvs_only_gpu() == 0 && nvs_config.memory_mode == NVS_MODE_DEVICE &&
        atomic_load_explicit(&nvs_pools_special, memory_order_relaxed) == 0) /* see its declaration */
        nvs_pools_go(NVS_POOLS_UNKNOWN, NVS_POOLS_FAST);
    return CUDA_SUCCESS;
}

/* Memory of the driver's pools is only counted. */
static CUresult allocate_in_pool(uint32_t gpu, CUdeviceptr *dptr, const request *r, CUmemoryPool pool)
{
    nvs_pool_memory memory = {.gpu = gpu};
    const uint64_t kept = keep() && pool != NULL ? nvs_pool_take_kept(pool, gpu, nvs_memory_grains(r->bytes)) : 0;
    CUresult result = kept < r->bytes ? nvs_memory_charge(gpu, r->bytes - kept, &memory.charged_bytes) : CUDA_SUCCESS;
    memory.charged_bytes = result == CUDA_SUCCESS ? memory.charged_bytes + kept : kept;
    memory.context = nvs_usual_owner();
    if (result == CUDA_SUCCESS && (result = ask_driver(dptr, r)) == CUDA_SUCCESS)
        result = note(&memory, *dptr, r);
    else
        nvs_memory_uncharge(gpu, memory.charged_bytes);
    if (keep() && (kept < r->bytes || result != CUDA_SUCCESS)) /* the pool may have grown */
        nvs_pools_learn();
    return result;
}

/* Counts memory of a backend in its pool's figures. */
static void count_in(CUmemoryPool pool, CUdeviceptr memory, size_t bytes)
{
    nvs_pool_figures *figures = pool != NULL ? nvs_pool_give(pool, bytes) : NULL;
    if (figures != NULL && !nvs_allocation_set_pool(memory, figures, bytes))
        nvs_pool_take_back(figures, bytes, true);
}

static CUresult allocate_async(CUdeviceptr *dptr, const request *r)
{
    uint32_t gpu = nvs_stream_gpu(r->stream);
    if (dptr == NULL || r->bytes == 0 || (r->names_pool && r->pool == NULL) || !nvs_memory_manages(gpu))
        return ask_driver(dptr, r);
    if (captures(r->stream)) {
        nvs_graph_allocates();
        return ask_driver(dptr, r);
    }
    CUmemoryPool pool = r->pool;
    const bool moves = nvs_memory_backend(gpu)->movable;
    if (pool == NULL && (moves || keep() || atomic_load_explicit(&nvs_pools_special, memory_order_relaxed) != 0)) /* see its declaration */
        NVS_REAL(cuDeviceGetMemPool)(&pool, (CUdevice)gpu);
    if (pool != NULL && !is_on_gpu(pool))
        return ask_driver(dptr, r); /* host memory, which has no quota */
    if (!moves || (pool != NULL && is_special(pool)) || nvs_current_gpu() != gpu)
        return allocate_in_pool(gpu, dptr, r, pool);
    /* The application's call is legal while this thread captures another stream, so the calls that replace it must be legal too. */
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    CUresult result = nvs_memory_allocate_in_order(gpu, dptr, r->bytes, identity(r->stream));
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    if (result == CUDA_SUCCESS)
        count_in(pool, *dptr, r->bytes);
    if (result == CUDA_ERROR_INVALID_CONTEXT) /* this thread has no context; the driver's pools need only the stream */
        return allocate_in_pool(gpu, dptr, r, pool);
    if (result == CUDA_SUCCESS && (atomic_load_explicit(&backend_gpus, memory_order_relaxed) >> gpu & 1) == 0) /* see its declaration */
        atomic_fetch_or_explicit(&backend_gpus, UINT32_C(1) << gpu, memory_order_relaxed);
    return result;
}

/* --- the fast path, which touches few cache lines: one GPU, memory mode `device`, no capture, and room that was granted before --- */

/* False: nothing was changed, and allocate_async is needed. */
static inline bool admit_fast(nvs_pool_memory *memory, const CUdeviceptr *dptr, size_t bytes)
{
    nvs_slot *slot = nvs_self_fast();
    /* All relaxed: see base/hot.h. */
    if (NVS_UNLIKELY(atomic_load_explicit(&nvs_hot.pools, memory_order_relaxed) != NVS_POOLS_FAST) || NVS_UNLIKELY(dptr == NULL || bytes == 0) ||
        NVS_UNLIKELY(nvs_capturing()) || NVS_UNLIKELY(slot == NULL) || NVS_UNLIKELY(slot->owner_uses == 0))
        return false;
    memory->gpu = 0;
    memory->context = atomic_load_explicit(&nvs_hot.only_context, memory_order_relaxed);
    memory->charged_bytes = nvs_memory_grains(bytes);
    if (NVS_UNLIKELY(memory->context == NULL) || !nvs_ledger_charge(&nvs_ledgers[0], memory->charged_bytes))
        return false;
    slot->owner_uses--;
    return true;
}

static inline __attribute__((always_inline)) CUresult note_fast(nvs_pool_memory *memory, CUresult result, const CUdeviceptr *dptr, const request *r)
{
    if (NVS_UNLIKELY(result != CUDA_SUCCESS)) {
        nvs_memory_uncharge(0, memory->charged_bytes);
        return result;
    }
    const CUdeviceptr address = memory->address = *dptr;
    if (NVS_UNLIKELY(nvs_pool_book_has(address)) || NVS_UNLIKELY(!nvs_pool_book_enter(memory)))
        return note(memory, address, r);
    nvs_memory_changed(0);
    return CUDA_SUCCESS;
}

#define NVS_FROM_POOL(symbol, parameters, arguments, from, names_pool)                                                \
    NVS_EXPORT __attribute__((aligned(64))) CUresult CUDAAPI symbol parameters                                        \
    {                                                                                                                 \
        const request asked = {bytesize, from, NVS_HANDLE(symbol, hStream), names_pool};                        \
        nvs_pool_memory memory;                                                                                       \
        if (NVS_UNLIKELY(!admit_fast(&memory, dptr, bytesize)))                                                    \
            return allocate_async(dptr, &asked);                                                                      \
        const CUresult result = NVS_REAL(symbol) arguments;                                                           \
        return note_fast(&memory, result, dptr, &asked);                                                           \
    }

NVS_FROM_POOL(cuMemAllocAsync, (CUdeviceptr *dptr, size_t bytesize, CUstream hStream), (dptr, bytesize, hStream), NULL, false)
NVS_FROM_POOL(cuMemAllocAsync_ptsz, (CUdeviceptr *dptr, size_t bytesize, CUstream hStream), (dptr, bytesize, hStream), NULL, false)
NVS_FROM_POOL(cuMemAllocFromPoolAsync, (CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream),
              (dptr, bytesize, pool, hStream), pool, true)
NVS_FROM_POOL(cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream),
              (dptr, bytesize, pool, hStream), pool, true)

/* --- free --- */

static CUresult free_later(uint32_t gpu, CUdeviceptr dptr, CUstream stream)
{
    CUevent event;
    CUcontext context;
    uint64_t bytes = 0;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* as in allocate_async */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    CUresult result = nvs_event_behind(stream, &event, &context);
    if (result == CUDA_SUCCESS)
        (void)nvs_context_gpu(context); /* registered: reapers visit it */
    nvs_pool_figures *pool = result == CUDA_SUCCESS ? nvs_allocation_take_pool(dptr, &bytes) : NULL;
    nvs_pool_take_back(pool, bytes, true); /* at the call, as the driver does */
    if (result == CUDA_SUCCESS && nvs_allocation_defer(dptr, event, context, identity(stream)) != NVS_FOUND) {
        NVS_REAL(cuEventDestroy_v2)(event);
        result = CUDA_ERROR_INVALID_VALUE; /* freed twice, by two threads at once */
    }
    if (result == CUDA_SUCCESS)
        nvs_ipc_withdraw(gpu, dptr); /* before the memory is reused (nvs_allocation_revive) */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    return result;
}

/* Frees memory that is not in the table of pools. */
static __attribute__((noinline)) CUresult free_other(CUdeviceptr dptr, CUstream stream)
{
    nvs_allocation known, *entry;
    nvs_lookup found = nvs_allocation_find(NVS_SPACE_ADDRESS, dptr, &known);
    if (found == NVS_ABSENT || known.key != dptr)
        return NVS_REAL(cuMemFreeAsync)(dptr, stream);
    if (found == NVS_DYING)
        return CUDA_ERROR_INVALID_VALUE; /* freed twice */
    if (known.kind == NVS_MEMORY_REDIRECTED)
        return captures(stream) ? NVS_REAL(cuMemFreeAsync)(dptr, stream) : free_later(known.gpu, dptr, stream);
    if (nvs_allocation_take(NVS_SPACE_ADDRESS, dptr, &entry) != NVS_FOUND)
        return CUDA_ERROR_INVALID_VALUE; /* freed twice, by two threads at once */
    CUresult result = NVS_REAL(cuMemFreeAsync)(dptr, stream);
    if (result == CUDA_SUCCESS)
        nvs_memory_drop(entry);
    else
        nvs_memory_drop_all(nvs_allocation_insert(entry));
    nvs_pools_learn();
    return result;
}

#define NVS_FREES(symbol)                                                                         \
    NVS_EXPORT __attribute__((aligned(64))) CUresult CUDAAPI symbol(CUdeviceptr dptr, CUstream hStream) \
    {                                                                                             \
        nvs_pool_memory memory;                                                                   \
        nvs_pool_place *const claimed = nvs_memory_claim_pooled(dptr, &memory);                   \
        if (NVS_UNLIKELY(claimed == NULL))                                                        \
            return free_other(dptr, NVS_HANDLE(symbol, hStream));                                  \
        return nvs_memory_pooled_freed(claimed, &memory, NVS_REAL(symbol)(dptr, hStream));        \
    }

NVS_FREES(cuMemFreeAsync)
NVS_FREES(cuMemFreeAsync_ptsz)

/* --- pools --- */

NVS_EXPORT CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
    CUresult result = NVS_REAL(cuMemPoolCreate)(pool, poolProps);
    if (result != CUDA_SUCCESS)
        return result;
    bool on_gpu = poolProps->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (on_gpu && nvs_config.enabled)
        nvs_pool_keeps(*pool, (uint32_t)poolProps->location.id);
    if (on_gpu && poolProps->allocType == CU_MEM_ALLOCATION_TYPE_PINNED && poolProps->handleTypes == CU_MEM_HANDLE_TYPE_NONE)
        return result;
    if (nvs_pool_set_special(*pool, on_gpu))
        return result;
    NVS_REAL(cuMemPoolDestroy)(*pool);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Chunks do not follow the access rights of a pool.  So in mode `swap` a pool that other GPUs may access stays the driver's, and these GPUs get access
 * to its earlier memory. */
NVS_EXPORT CUresult CUDAAPI cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
    const CUresult result = NVS_REAL(cuMemPoolSetAccess)(pool, map, count);
    bool given = false;
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++)
        given = given || map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    if (given && nvs_swapping() && !is_special(pool) && !nvs_pool_set_special(pool, true))
        NVS_LOG_ONCE(NVS_LOG_WARNING, "no host memory to record that other GPUs may access a pool: they may have no access to its later memory");
    for (size_t i = 0; given && i < count && nvs_swapping(); i++)
        if (map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && map[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE)
            nvs_swap_pool_opened(pool, (uint32_t)map[i].location.id, atomic_load_explicit(&backend_gpus, memory_order_relaxed)); /* see its declaration */
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool pool)
{
    return nvs_pool_destroy(pool);
}

NVS_EXPORT CUresult CUDAAPI cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
    const CUresult result = NVS_REAL(cuMemPoolGetAttribute)(pool, attr, value);
    if (result == CUDA_SUCCESS)
        nvs_pool_add_figure(pool, attr, value);
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
    const CUresult result = NVS_REAL(cuMemPoolSetAttribute)(pool, attr, value);
    if (result == CUDA_SUCCESS)
        nvs_pool_set_figure(pool, attr, value);
    if (result == CUDA_SUCCESS && attr == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD && *(const cuuint64_t *)value != 0 && nvs_config.enabled && is_on_gpu(pool))
        nvs_pool_keeps(pool, nvs_current_gpu());
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
    const CUresult result = NVS_REAL(cuMemPoolTrimTo)(pool, minBytesToKeep);
    if (result == CUDA_SUCCESS)
        nvs_pool_trimmed(pool, minBytesToKeep);
    return result;
}

/* These calls may return a pool of host or managed memory that the driver made. */
static CUresult pool_found(CUresult result, const CUmemoryPool *pool, const CUmemLocation *location, CUmemAllocationType type)
{
    if (result != CUDA_SUCCESS)
        return result;
    bool on_gpu = location->type == CU_MEM_LOCATION_TYPE_DEVICE;
    if ((on_gpu && type == CU_MEM_ALLOCATION_TYPE_PINNED) || nvs_pool_set_special(*pool, on_gpu))
        return result;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

NVS_WRAP(cuMemGetDefaultMemPool, (CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type),
         pool_found(real(pool, location, type), pool, location, type))
NVS_WRAP(cuMemGetMemPool, (CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type),
         pool_found(real(pool, location, type), pool, location, type))
