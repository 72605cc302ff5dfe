/* Stream-ordered allocation.
 *
 * Memory is there from the call on, which is earlier than the order of the stream demands, and goes when the stream reaches the
 * free.  Nothing is kept for reuse: a pool is an account.  Its figures are those of a driver 580 (measured):
 *  - used: what was asked for, until the call that frees it.  What cuMemFree frees is counted for ever.
 *  - reserved: whole pieces of 32 MiB.  A wait for a stream, an event or a context gives back what is free, if that is more than the
 *    threshold; so does a trim.  A real pool is also fragmented, and the card holds what it reserves; this one is charged by use.
 */
#include "base/sim.h"

#include <stdlib.h>
#include <string.h>

#define PIECE (UINT64_C(32) << 20)

typedef struct sim_pool {
    uint32_t magic;
    struct sim_pool *next; /* of the device */
    sim_device *device;
    bool built_in;
    uint64_t used, used_high, reserved, reserved_high, threshold;
    uint64_t held; /* what no stream has reached the free of */
    uint64_t accessors; /* devices, by bit */
    int reuse[4]; /* the switches; remembered only */
} sim_pool;

static CUresult make_pool(sim_device *device, bool built_in, sim_pool **out)
{
    sim_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *pool = (sim_pool){.magic = SIM_POOL, .device = device, .built_in = built_in, .accessors = 1ull << device->ordinal, .reuse = {1, 1, 1, 1}};
    pool->next = device->pools;
    device->pools = pool;
    *out = pool;
    return CUDA_SUCCESS;
}

static uint64_t pieces(uint64_t bytes) { return bytes > UINT64_MAX - PIECE ? UINT64_MAX : (bytes + PIECE - 1) / PIECE * PIECE; }

static void allocated(sim_pool *pool, uint64_t bytes)
{
    pool->used += bytes;
    pool->held += bytes;
    if (pool->reserved < pieces(pool->held))
        pool->reserved = pieces(pool->held);
    if (pool->used_high < pool->used)
        pool->used_high = pool->used;
    if (pool->reserved_high < pool->reserved)
        pool->reserved_high = pool->reserved;
}

static void shrink(sim_pool *pool, uint64_t keep)
{
    const uint64_t least = pieces(pool->held > keep ? pool->held : keep);
    if (pool->reserved > least)
        pool->reserved = least;
}

void nvs_sim_pools_synchronized(sim_device *device)
{
    for (sim_pool *pool = device->pools; pool != NULL; pool = pool->next)
        if (pool->reserved > pool->threshold)
            shrink(pool, pool->threshold);
}

static CUresult pool_of(sim_device *device, sim_pool **out)
{
    CUresult result = CUDA_SUCCESS;
    if (device->default_pool == NULL)
        result = make_pool(device, true, &device->default_pool);
    if (result == CUDA_SUCCESS && device->current_pool == NULL)
        device->current_pool = device->default_pool;
    *out = device->current_pool;
    return result;
}

static CUresult find(CUmemoryPool handle, sim_pool **out)
{
    sim_pool *pool = (sim_pool *)(void *)handle;
    if (pool == NULL || pool->magic != SIM_POOL)
        return CUDA_ERROR_INVALID_VALUE;
    *out = pool;
    return CUDA_SUCCESS;
}

void nvs_sim_pool_freed(const sim_allocation *allocation)
{
    sim_pool *pool = allocation->handle;
    if (pool != NULL && pool->magic == SIM_POOL)
        pool->held -= allocation->bytes;
    if (pool != NULL && pool->magic == SIM_POOL && !allocation->freed)
        pool->used -= allocation->bytes;
}

/* The graph's, from no pool. */
static CUresult capture(CUdeviceptr *out, size_t bytes, sim_context *context, uint64_t accessors, sim_stream *stream)
{
    sim_graph_memory *memory;
    CUresult result = nvs_sim_graph_memory_new(context, bytes, &memory);
    if (result != CUDA_SUCCESS)
        return result;
    const CUdeviceptr pointer = nvs_sim_graph_memory_pointer(memory);
    nvs_sim_find((uintptr_t)pointer)->accessed_by = accessors;
    result = nvs_sim_capture_add(stream, &(sim_work){.kind = OP_ALLOCATE, .u.pointer = pointer});
    if (result == CUDA_SUCCESS)
        *out = pointer;
    else
        nvs_sim_graph_memory_unref(memory);
    return result;
}

static CUresult allocate(CUdeviceptr *out, size_t bytes, sim_pool *pool, CUstream handle)
{
    sim_stream *stream;
    CUresult result = out == NULL || bytes == 0 ? CUDA_ERROR_INVALID_VALUE : nvs_sim_stream(handle, &stream);
    if (result == CUDA_SUCCESS && pool == NULL)
        result = pool_of(stream->context->device, &pool);
    if (result == CUDA_SUCCESS)
        result = stream->context->error;
    if (result != CUDA_SUCCESS)
        return result;
    sim_context *context = pool->device == stream->context->device ? stream->context : &pool->device->primary;
    if (stream->capture != NULL)
        return capture(out, bytes, context, pool->accessors, stream);
    result = nvs_sim_allocate(context, bytes, MEM_POOL, 0, out);
    if (result != CUDA_SUCCESS)
        return result;
    sim_allocation *allocation = nvs_sim_find((uintptr_t)*out);
    allocation->handle = pool;
    allocation->accessed_by = pool->accessors;
    allocated(pool, bytes);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(allocate(dptr, bytesize, NULL, hStream));
}

SIM_EXPORT CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream)
{
    sim_pool *found;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(find(pool, &found));
    NVS_SIM_CHECK(found->device->primary.magic == SIM_CONTEXT || nvs_sim_current() != NULL, CUDA_ERROR_INVALID_CONTEXT);
    return nvs_sim_return(allocate(dptr, bytesize, found, hStream));
}

SIM_EXPORT CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)
{
    sim_stream *stream;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(nvs_sim_stream(hStream, &stream));
    if (dptr == 0)
        return nvs_sim_return(CUDA_SUCCESS);
    sim_allocation *allocation = nvs_sim_find((uintptr_t)dptr);
    NVS_SIM_CHECK(allocation != NULL && allocation->base == (uintptr_t)dptr, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(allocation->kind != MEM_MANAGED, CUDA_ERROR_NOT_SUPPORTED); /* as driver 580 answers */
    NVS_SIM_CHECK(allocation->kind == MEM_POOL || allocation->kind == MEM_DEVICE || allocation->kind == MEM_GRAPH, CUDA_ERROR_INVALID_VALUE);
    sim_pool *pool = allocation->kind == MEM_POOL ? allocation->handle : NULL;
    NVS_SIM_CHECK(!allocation->freed, CUDA_ERROR_INVALID_VALUE);
    if (allocation->kind == MEM_GRAPH && stream->capture == NULL)
        NVS_SIM_CHECK(nvs_sim_graph_memory_free(allocation->handle), CUDA_ERROR_INVALID_VALUE);
    const bool counts = pool != NULL && stream->capture == NULL;
    const size_t bytes = allocation->bytes;
    sim_work work = {.kind = OP_FREE, .u.pointer = dptr};
    allocation->freed = counts;
    const CUresult result = nvs_sim_submit(stream, &work);
    if (counts && result == CUDA_SUCCESS)
        pool->used -= bytes;
    else if (counts)
        nvs_sim_find((uintptr_t)dptr)->freed = false;
    return nvs_sim_return(result);
}

/* Pools. */

SIM_EXPORT CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
    sim_device *device;
    sim_pool *made;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pool != NULL && poolProps != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(poolProps->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED);
    NVS_SIM_TRY(nvs_sim_device(poolProps->location.id, &device));
    NVS_SIM_TRY(make_pool(device, false, &made));
    *pool = (CUmemoryPool)(void *)made;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool pool)
{
    sim_pool *found;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(find(pool, &found));
    NVS_SIM_CHECK(!found->built_in, CUDA_ERROR_INVALID_VALUE);
    if (found->device->current_pool == found)
        found->device->current_pool = found->device->default_pool;
    for (size_t i = 0; i < nvs_sim_allocation_count(); i++) /* what is still allocated lives on, without a pool */
        if (nvs_sim_allocation_at(i)->handle == found && nvs_sim_allocation_at(i)->kind == MEM_POOL)
            nvs_sim_allocation_at(i)->handle = NULL;
    sim_pool **link = &found->device->pools;
    while (*link != found)
        link = &(*link)->next;
    *link = found->next;
    found->magic = 0;
    free(found);
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
    sim_pool *found;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(find(pool, &found));
    shrink(found, minBytesToKeep);
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
    sim_pool *found;
    uint64_t number;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(value != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(pool, &found));
    switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        memcpy(value, &found->reuse[attr], sizeof found->reuse[attr]);
        return nvs_sim_return(CUDA_SUCCESS);
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: number = found->threshold; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: number = found->reserved; break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: number = found->used; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: number = found->reserved_high; break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: number = found->used_high; break;
    default: return nvs_sim_return(CUDA_ERROR_INVALID_VALUE);
    }
    memcpy(value, &number, sizeof number);
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
    sim_pool *found;
    uint64_t number;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(value != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(pool, &found));
    switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: memcpy(&found->reuse[attr], value, sizeof found->reuse[attr]); break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: memcpy(&found->threshold, value, sizeof found->threshold); break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: /* only 0 may be set: start again */
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        memcpy(&number, value, sizeof number);
        NVS_SIM_CHECK(number == 0, CUDA_ERROR_INVALID_VALUE);
        if (attr == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
            found->used_high = found->used;
        else
            found->reserved_high = found->reserved;
        break;
    default: return nvs_sim_return(CUDA_ERROR_INVALID_VALUE);
    }
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
    sim_pool *found;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(map != NULL || count == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(pool, &found));
    uint64_t accessors = found->accessors;
    for (size_t i = 0; i < count; i++) {
        sim_device *device;
        NVS_SIM_CHECK(map[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
        NVS_SIM_TRY(nvs_sim_device(map[i].location.id, &device));
        const bool none = map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE;
        NVS_SIM_CHECK(device != found->device || !none, CUDA_ERROR_INVALID_DEVICE); /* its own cannot be taken away */
        NVS_SIM_CHECK(device == found->device || nvs_sim_peers_possible(device, found->device), CUDA_ERROR_INVALID_DEVICE);
        const uint64_t bit = 1ull << device->ordinal;
        accessors = none ? accessors & ~bit : accessors | bit;
    }
    found->accessors = accessors;
    for (size_t i = 0; i < nvs_sim_allocation_count(); i++) /* also what was allocated before */
        if (nvs_sim_allocation_at(i)->handle == found && nvs_sim_allocation_at(i)->kind == MEM_POOL)
            nvs_sim_allocation_at(i)->accessed_by = accessors;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool memPool, CUmemLocation *location)
{
    sim_pool *found;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(flags != NULL && location != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(find(memPool, &found));
    NVS_SIM_CHECK(location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id >= 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(location->id < nvs_sim_device_count, CUDA_ERROR_INVALID_VALUE);
    *flags = (found->accessors >> location->id & 1) != 0 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)
{
    sim_device *device;
    sim_pool *pool;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pool_out != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_device(dev, &device));
    NVS_SIM_TRY(pool_of(device, &pool));
    *pool_out = (CUmemoryPool)(void *)device->default_pool;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
    sim_device *device;
    sim_pool *found;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pool != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_device(dev, &device));
    NVS_SIM_TRY(pool_of(device, &found));
    *pool = (CUmemoryPool)(void *)found;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)
{
    sim_device *device;
    sim_pool *found, *current;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(nvs_sim_device(dev, &device));
    NVS_SIM_TRY(find(pool, &found));
    NVS_SIM_TRY(pool_of(device, &current));
    NVS_SIM_CHECK(found->device == device, CUDA_ERROR_INVALID_VALUE);
    device->current_pool = found;
    return nvs_sim_return(CUDA_SUCCESS);
}
