/* Stream-ordered allocation.
 *
 * Memory exists from the allocating call, which may be too early, until the stream reaches the free.
 * A pool keeps no memory for reuse and charges the card by use; a real pool reserves memory of the card, and is fragmented.
 * The figures of a pool are those of driver 580 (measured):
 *  - used: the requested bytes, until the call that frees them.  Bytes that cuMemFree frees stay counted.
 *  - reserved: whole pieces of 32 MiB.  A trim gives back free bytes; so does a wait for a stream, an event or a context, above the
 *    threshold.
 */
#include "memory/memory.h"

#include <stdlib.h>
#include <string.h>

#define PIECE (UINT64_C(32) << 20)

typedef struct sim_pool {
    uint32_t magic;
    struct sim_pool *next; /* of the device */
    sim_device *device;
    bool built_in;
    sim_figures figures;
    uint64_t threshold;
    uint64_t held;      /* allocated bytes whose free no stream has reached */
    uint64_t accessors; /* one bit per device */
    int reuse[4];       /* attributes without effect */
} sim_pool;

static CUresult make_pool(sim_device *device, bool built_in, sim_pool **out)
{
    sim_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *pool = (sim_pool){.magic = SIM_POOL, .device = device, .built_in = built_in, .accessors = 1ull << device->ordinal,
                       .reuse = {1, 1, 1, 1}};
    pool->next = device->pools.all;
    device->pools.all = pool;
    *out = pool;
    return CUDA_SUCCESS;
}

static uint64_t pieces(uint64_t bytes) { return bytes > UINT64_MAX - PIECE ? UINT64_MAX : (bytes + PIECE - 1) / PIECE * PIECE; }

static uint64_t used(const sim_pool *pool) { return pool->figures.values[SIM_USED]; }
static uint64_t reserved(const sim_pool *pool) { return pool->figures.values[SIM_RESERVED]; }

static void allocated(sim_pool *pool, uint64_t bytes)
{
    pool->held += bytes;
    const uint64_t least = pieces(pool->held);
    nvs_sim_figures_set(&pool->figures, used(pool) + bytes, reserved(pool) < least ? least : reserved(pool));
}

static void shrink(sim_pool *pool, uint64_t keep)
{
    const uint64_t least = pieces(pool->held > keep ? pool->held : keep);
    if (reserved(pool) > least)
        nvs_sim_figures_set(&pool->figures, used(pool), least);
}

void nvs_sim_pools_synchronized(sim_device *device)
{
    for (sim_pool *pool = device->pools.all; pool != NULL; pool = pool->next)
        if (reserved(pool) > pool->threshold)
            shrink(pool, pool->threshold);
}

static CUresult pool_of(sim_device *device, sim_pool **out)
{
    if (device->pools.built_in == NULL)
        NVS_SIM_TRY(make_pool(device, true, &device->pools.built_in));
    if (device->pools.current == NULL)
        device->pools.current = device->pools.built_in;
    *out = device->pools.current;
    return CUDA_SUCCESS;
}

static NVS_SIM_DEFINE_FIND(find, CUmemoryPool, sim_pool, SIM_POOL, CUDA_ERROR_INVALID_VALUE)

static void released(const sim_allocation *allocation)
{
    sim_pool *pool = allocation->account.handle;
    if (pool == NULL || pool->magic != SIM_POOL)
        return;
    pool->held -= allocation->bytes;
    if (!allocation->account.freed)
        pool->figures.values[SIM_USED] -= allocation->bytes;
}

/* A capture allocates from the graph's memory, not from a pool. */
static CUresult capture(CUdeviceptr *out, size_t bytes, sim_context *context, uint64_t accessors, sim_stream *stream)
{
    sim_graph_memory *memory;
    NVS_SIM_TRY(nvs_sim_graph_memory_new(context, bytes, accessors, &memory));
    const CUresult result = nvs_sim_submit(stream, &(sim_work){.kind = OP_ALLOCATE, .u.pointer = memory->pointer});
    if (result == CUDA_SUCCESS)
        *out = memory->pointer;
    else
        memory->nodes--;
    return result;
}

static CUresult allocate(CUdeviceptr *out, size_t bytes, sim_pool *pool, CUstream handle)
{
    sim_stream *stream;
    NVS_SIM_CHECK(out != NULL && bytes != 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_stream(handle, &stream));
    if (pool == NULL)
        NVS_SIM_TRY(pool_of(stream->context->device, &pool));
    NVS_SIM_TRY(stream->context->error);
    sim_context *context = pool->device == stream->context->device ? stream->context : &pool->device->primary;
    if (stream->capture.of != NULL)
        return capture(out, bytes, context, pool->accessors, stream);
    NVS_SIM_TRY(nvs_sim_allocate(context, bytes, MEM_POOL, out));
    sim_allocation *allocation = nvs_sim_find_base(*out);
    allocation->account = (sim_account){.handle = pool, .released = released};
    allocation->accessed_by = pool->accessors;
    allocated(pool, bytes);
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuMemAllocAsync, (CUdeviceptr *dptr, size_t bytesize, CUstream hStream), allocate(dptr, bytesize, NULL, hStream))

SIM_EXPORT CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream)
{
    NVS_SIM_ENTER_FIND(sim_pool *found, find(pool, &found));
    NVS_SIM_CHECK(found->device->primary.magic == SIM_CONTEXT || nvs_sim_current() != NULL, CUDA_ERROR_INVALID_CONTEXT);
    return allocate(dptr, bytesize, found, hStream);
}

SIM_EXPORT CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)
{
    NVS_SIM_ENTER_FIND(sim_stream *stream, nvs_sim_stream(hStream, &stream));
    if (dptr == 0)
        return CUDA_SUCCESS;
    sim_allocation *allocation = nvs_sim_find_base(dptr);
    NVS_SIM_CHECK(allocation != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(allocation->kind != MEM_MANAGED, CUDA_ERROR_NOT_SUPPORTED); /* as in driver 580 */
    NVS_SIM_CHECK(allocation->kind == MEM_POOL || allocation->kind == MEM_DEVICE || allocation->kind == MEM_GRAPH,
                  CUDA_ERROR_INVALID_VALUE);
    sim_pool *pool = allocation->kind == MEM_POOL ? allocation->account.handle : NULL;
    NVS_SIM_CHECK(!allocation->account.freed, CUDA_ERROR_INVALID_VALUE);
    if (allocation->kind == MEM_GRAPH && stream->capture.of == NULL)
        NVS_SIM_CHECK(nvs_sim_graph_memory_free(allocation->account.handle), CUDA_ERROR_INVALID_VALUE);
    const bool counts = pool != NULL && stream->capture.of == NULL;
    const size_t bytes = allocation->bytes;
    sim_work work = {.kind = OP_FREE, .u.pointer = dptr};
    allocation->account.freed = counts;
    const CUresult result = nvs_sim_submit(stream, &work);
    if (counts && result == CUDA_SUCCESS)
        pool->figures.values[SIM_USED] -= bytes;
    else if (counts)
        nvs_sim_find_base(dptr)->account.freed = false;
    return result;
}

SIM_EXPORT CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
    sim_pool *made;
    sim_device *device;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pool != NULL && poolProps != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(poolProps->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED);
    NVS_SIM_TRY(nvs_sim_device(poolProps->location.id, &device));
    NVS_SIM_TRY(make_pool(device, false, &made));
    *pool = (CUmemoryPool)(void *)made;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool pool)
{
    NVS_SIM_ENTER_FIND(sim_pool *found, find(pool, &found));
    NVS_SIM_CHECK(!found->built_in, CUDA_ERROR_INVALID_VALUE);
    if (found->device->pools.current == found)
        found->device->pools.current = found->device->pools.built_in;
    NVS_SIM_EACH_ALLOCATION(one) /* its allocations stay valid, without a pool */
        if (one->account.handle == found && one->kind == MEM_POOL)
            one->account.handle = NULL;
    sim_pool **link = &found->device->pools.all;
    while (*link != found)
        link = &(*link)->next;
    *link = found->next;
    found->magic = 0;
    free(found);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
    NVS_SIM_ENTER_FIND(sim_pool *found, find(pool, &found));
    shrink(found, minBytesToKeep);
    return CUDA_SUCCESS;
}

static const enum sim_figure figure_of[] = {
    [CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT] = SIM_RESERVED,
    [CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH] = SIM_RESERVED_HIGH,
    [CU_MEMPOOL_ATTR_USED_MEM_CURRENT] = SIM_USED,
    [CU_MEMPOOL_ATTR_USED_MEM_HIGH] = SIM_USED_HIGH,
};

/* The place of an attribute's value, and its size; NULL: there is no such attribute. */
static void *attribute_of(sim_pool *pool, CUmemPool_attribute attribute, size_t *bytes)
{
    *bytes = sizeof(uint64_t);
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: *bytes = sizeof pool->reuse[attribute]; return &pool->reuse[attribute];
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: return &pool->threshold;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: return &pool->figures.values[figure_of[attribute]];
    default: return NULL;
    }
}

SIM_EXPORT CUresult CUDAAPI cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
    size_t bytes;
    NVS_SIM_ENTER_FIND(sim_pool *found, find(pool, &found));
    NVS_SIM_CHECK(value != NULL, CUDA_ERROR_INVALID_VALUE);
    const void *kept = attribute_of(found, attr, &bytes);
    NVS_SIM_CHECK(kept != NULL, CUDA_ERROR_INVALID_VALUE);
    memcpy(value, kept, bytes);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
    size_t bytes;
    NVS_SIM_ENTER_FIND(sim_pool *found, find(pool, &found));
    NVS_SIM_CHECK(value != NULL, CUDA_ERROR_INVALID_VALUE);
    void *kept = attribute_of(found, attr, &bytes);
    NVS_SIM_CHECK(kept != NULL, CUDA_ERROR_INVALID_VALUE);
    if (attr > CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        return nvs_sim_figures_reset(&found->figures, figure_of[attr], value);
    memcpy(kept, value, bytes);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
    NVS_SIM_ENTER_FIND(sim_pool *found, find(pool, &found));
    NVS_SIM_CHECK(map != NULL || count == 0, CUDA_ERROR_INVALID_VALUE);
    uint64_t accessors = found->accessors;
    for (size_t i = 0; i < count; i++) {
        sim_device *device;
        NVS_SIM_CHECK(map[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
        NVS_SIM_TRY(nvs_sim_device(map[i].location.id, &device));
        const bool none = map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE;
        NVS_SIM_CHECK(device != found->device || !none, CUDA_ERROR_INVALID_DEVICE); /* the access of its own device cannot be removed */
        NVS_SIM_CHECK(device == found->device || nvs_sim_peers_possible(device, found->device), CUDA_ERROR_INVALID_DEVICE);
        const uint64_t bit = 1ull << device->ordinal;
        accessors = none ? accessors & ~bit : accessors | bit;
    }
    found->accessors = accessors;
    NVS_SIM_EACH_ALLOCATION(one) /* earlier allocations, too */
        if (one->account.handle == found && one->kind == MEM_POOL)
            one->accessed_by = accessors;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool memPool, CUmemLocation *location)
{
    NVS_SIM_ENTER_FIND(sim_pool *found, find(memPool, &found));
    NVS_SIM_CHECK(flags != NULL && location != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id >= 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(location->id < nvs_sim_device_count, CUDA_ERROR_INVALID_VALUE);
    *flags = (found->accessors >> location->id & 1) != 0 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)
{
    sim_pool *pool;
    NVS_SIM_ENTER_FIND(sim_device *device, nvs_sim_device(dev, &device));
    NVS_SIM_CHECK(pool_out != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(pool_of(device, &pool));
    *pool_out = (CUmemoryPool)(void *)device->pools.built_in;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
    sim_pool *found;
    NVS_SIM_ENTER_FIND(sim_device *device, nvs_sim_device(dev, &device));
    NVS_SIM_CHECK(pool != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(pool_of(device, &found));
    *pool = (CUmemoryPool)(void *)found;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)
{
    sim_pool *found, *current;
    NVS_SIM_ENTER_FIND(sim_device *device, nvs_sim_device(dev, &device));
    NVS_SIM_TRY(find(pool, &found));
    NVS_SIM_TRY(pool_of(device, &current));
    NVS_SIM_CHECK(found->device == device, CUDA_ERROR_INVALID_VALUE);
    device->pools.current = found;
    return CUDA_SUCCESS;
}
