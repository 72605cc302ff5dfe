/* Segments: address space, physical chunks in it, and the figures of each GPU.  See swap.h. */
#include "swap.h"

#include "cuda_api.h"
#include "log.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

nvs_swap_gpu nvs_swap_gpus[NVS_MAX_GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "swap" in the lock order of base.h */

void nvs_swap_lock(void)
{
    pthread_mutex_lock(&lock);
}

void nvs_swap_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

static CUmemAllocationProp on_gpu(uint32_t gpu)
{
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)gpu}};
}

uint64_t nvs_swap_unit(uint32_t gpu)
{
    enum { NONE = 1 };
    static _Atomic uint64_t known[NVS_MAX_GPUS];
    if (gpu >= NVS_MAX_GPUS)
        return 0;
    /* Relaxed: the value stands for itself and every thread would find the same. */
    uint64_t unit = atomic_load_explicit(&known[gpu], memory_order_relaxed);
    if (NVS_LIKELY(unit != 0))
        return unit == NONE ? 0 : unit;
    int supported = 0;
    size_t granularity = 0;
    const CUmemAllocationProp prop = on_gpu(gpu);
    CUresult result = NVS_REAL(cuDeviceGetAttribute)(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, (CUdevice)gpu);
    if (result == CUDA_SUCCESS && supported)
        result = NVS_REAL(cuMemGetAllocationGranularity)(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (result != CUDA_SUCCESS)
        return 0; /* the driver is not ready: asked again next time */
    const uint64_t largest = NVS_HOST_GRAIN * NVS_CHUNK_GRAINS;
    if (granularity != 0 && NVS_HOST_GRAIN % granularity == 0)
        unit = NVS_HOST_GRAIN;
    else if (granularity != 0 && granularity % NVS_HOST_GRAIN == 0 && largest % granularity == 0)
        unit = granularity;
    else
        unit = NONE;
    atomic_store_explicit(&known[gpu], unit, memory_order_relaxed);
    return unit == NONE ? 0 : unit;
}

uint64_t nvs_segment_chunk_bytes(const nvs_segment *segment, uint32_t chunk)
{
    return segment->chunks[chunk].grains * NVS_HOST_GRAIN;
}

CUdeviceptr nvs_segment_chunk_address(const nvs_segment *segment, uint32_t chunk)
{
    return segment->base + (uint64_t)chunk * segment->chunk_bytes;
}

CUresult nvs_segment_new(uint32_t gpu, uint64_t bytes, uint32_t chunk_bytes, bool arena, nvs_segment **out)
{
    const uint64_t count = (bytes + chunk_bytes - 1) / chunk_bytes;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (count > UINT32_MAX / 2)
        return result;
    nvs_segment *segment = calloc(1, sizeof *segment + (size_t)count * sizeof segment->chunks[0]);
    if (segment == NULL)
        return result;
    segment->gpu = gpu;
    segment->bytes = bytes;
    segment->counted = bytes;
    segment->chunk_bytes = chunk_bytes;
    segment->chunk_count = (uint32_t)count;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t left = bytes - (uint64_t)i * chunk_bytes;
        segment->chunks[i].grains = (uint32_t)((left < chunk_bytes ? left : chunk_bytes) / NVS_HOST_GRAIN);
    }
    if (arena) {
        segment->blocks = segment->free_blocks = segment->longest = (uint32_t)(bytes / NVS_ARENA_BLOCK);
        segment->used = calloc((segment->blocks + 63) / 64, sizeof *segment->used);
        if (segment->used == NULL)
            goto out;
    }
    if (!nvs_host_reserve(bytes)) {
        NVS_LOG_ONCE(NVS_LOG_WARNING, "no host memory to evict a new allocation to (%llu MiB): out of memory; NVSHARE_HOST_LIMIT, or "
                     "what the machine has left, is too little", (unsigned long long)(bytes >> 20));
        goto out;
    }
    result = NVS_REAL(cuMemAddressReserve)(&segment->base, bytes, 0, 0, 0);
    if (result == CUDA_SUCCESS) {
        *out = segment;
        return result;
    }
    nvs_host_unreserve(bytes);
out:
    free(segment->used);
    free(segment);
    return result;
}

static CUresult give_access(const nvs_segment *segment, uint32_t chunk, uint32_t accessors)
{
    CUmemAccessDesc who[NVS_MAX_GPUS];
    size_t count = 0;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if (gpu == segment->gpu || ((accessors >> gpu) & 1))
            who[count++] = (CUmemAccessDesc){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)gpu},
                                             .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return NVS_REAL(cuMemSetAccess)(nvs_segment_chunk_address(segment, chunk), nvs_segment_chunk_bytes(segment, chunk), who, count);
}

CUresult nvs_chunk_map(nvs_segment *segment, uint32_t chunk)
{
    const CUmemAllocationProp prop = on_gpu(segment->gpu);
    const uint64_t bytes = nvs_segment_chunk_bytes(segment, chunk);
    const CUdeviceptr address = nvs_segment_chunk_address(segment, chunk);
    CUmemGenericAllocationHandle handle;
    CUresult result = NVS_REAL(cuMemCreate)(&handle, bytes, &prop, 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = NVS_REAL(cuMemMap)(address, bytes, 0, handle, 0);
    /* From here on the mapping keeps the memory, and to unmap it is to give it up: one step that can fail, not two. */
    if (NVS_REAL(cuMemRelease)(handle) != CUDA_SUCCESS && NVS_REAL(cuMemRelease)(handle) != CUDA_SUCCESS)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "the driver does not take back a handle of memory; its memory may be lost until the program ends");
    if (result != CUDA_SUCCESS)
        return result;
    nvs_swap_lock();
    uint32_t accessors = nvs_swap_gpus[segment->gpu].accessors;
    nvs_swap_unlock();
    result = give_access(segment, chunk, accessors);
    if (result != CUDA_SUCCESS)
        NVS_REAL(cuMemUnmap)(address, bytes);
    return result;
}

CUresult nvs_chunk_unmap(nvs_segment *segment, uint32_t chunk)
{
    return NVS_REAL(cuMemUnmap)(nvs_segment_chunk_address(segment, chunk), nvs_segment_chunk_bytes(segment, chunk));
}

CUresult nvs_segment_back(nvs_segment *segment)
{
    CUresult result = CUDA_SUCCESS;
    for (uint32_t i = 0; i < segment->chunk_count && result == CUDA_SUCCESS; i++) {
        result = nvs_chunk_map(segment, i);
        if (result == CUDA_SUCCESS)
            segment->chunks[i].state = NVS_CHUNK_RESIDENT;
    }
    if (result == CUDA_SUCCESS)
        return result;
    for (uint32_t i = 0; i < segment->chunk_count; i++)
        if (segment->chunks[i].state == NVS_CHUNK_RESIDENT && nvs_chunk_unmap(segment, i) == CUDA_SUCCESS)
            segment->chunks[i].state = NVS_CHUNK_UNBACKED;
    return result;
}

void nvs_segment_list(nvs_segment *segment)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[segment->gpu];
    const bool arena = segment->used != NULL;
    segment->next = arena ? of->first : NULL;
    segment->previous = arena ? NULL : of->last;
    *(segment->previous != NULL ? &segment->previous->next : &of->first) = segment;
    *(segment->next != NULL ? &segment->next->previous : &of->last) = segment;
}

void nvs_segment_moved(nvs_segment *segment, int64_t bytes)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[segment->gpu];
    of->resident += (uint64_t)bytes; /* modulo 2^64: right in both directions */
    segment->on_gpu += (uint64_t)bytes;
    if (segment->doomed) {
        of->committed += (uint64_t)bytes;
        segment->counted += (uint64_t)bytes;
    }
}

bool nvs_segment_doom(nvs_segment *segment)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[segment->gpu];
    *(segment->previous != NULL ? &segment->previous->next : &of->first) = segment->next;
    *(segment->next != NULL ? &segment->next->previous : &of->last) = segment->previous;
    segment->next = segment->previous = NULL;
    segment->doomed = true;
    of->committed -= segment->counted - segment->on_gpu;
    segment->counted = segment->on_gpu;
    return segment->users == 0;
}

void nvs_segment_destroy(nvs_segment *segment)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[segment->gpu];
    uint64_t lost = 0;
    for (uint32_t i = 0; i < segment->chunk_count; i++) {
        nvs_chunk *chunk = &segment->chunks[i];
        if (chunk->state == NVS_CHUNK_RESIDENT && nvs_chunk_unmap(segment, i) != CUDA_SUCCESS && nvs_chunk_unmap(segment, i) != CUDA_SUCCESS)
            lost += nvs_segment_chunk_bytes(segment, i);
        if (chunk->state == NVS_CHUNK_EVICTED)
            nvs_host_give(chunk->grains, chunk->host);
    }
    if (lost != 0)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "the driver does not take back %llu MiB; they stay counted until the program ends",
                     (unsigned long long)(lost >> 20));
    else
        NVS_REAL(cuMemAddressFree)(segment->base, segment->bytes);
    nvs_swap_lock();
    of->resident -= segment->on_gpu - lost;
    of->committed -= segment->counted - lost;
    nvs_swap_unlock();
    nvs_host_unreserve(segment->bytes);
    free(segment->used);
    free(segment);
}

/* The driver's cuCtxEnablePeerAccess does not reach this memory, so the rights are given chunk by chunk, now and at every
 * restoration.  A chunk is held by `users` meanwhile; one that moves gets them from who moves it. */
void nvs_swap_allow(uint32_t gpu, uint32_t accessor)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    nvs_swap_lock();
    of->accessors |= UINT32_C(1) << accessor;
    uint32_t accessors = of->accessors;
    for (nvs_segment *segment = of->first; segment != NULL;) {
        segment->users++;
        nvs_swap_unlock();
        for (uint32_t i = 0; i < segment->chunk_count; i++) {
            nvs_swap_lock();
            bool resident = segment->chunks[i].state == NVS_CHUNK_RESIDENT;
            nvs_swap_unlock();
            /* Moved away in this very moment: then it gets the rights when it comes back. */
            if (resident && give_access(segment, i, accessors) != CUDA_SUCCESS)
                NVS_LOG_ONCE(NVS_LOG_INFO, "peer access to a chunk could not be given now");
        }
        nvs_swap_lock();
        nvs_segment *next = segment->next;
        bool destroy = --segment->users == 0 && segment->doomed;
        if (segment->doomed)
            next = of->first; /* its place in the list is gone: once more from the start, which changes nothing */
        if (destroy) {
            nvs_swap_unlock();
            nvs_segment_destroy(segment);
            nvs_swap_lock();
        }
        segment = next;
    }
    nvs_swap_unlock();
}

void nvs_swap_segments_after_fork(void)
{
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        nvs_swap_gpus[gpu] = (nvs_swap_gpu){0};
}
