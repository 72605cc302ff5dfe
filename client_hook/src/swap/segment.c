/* Segments: address space and the physical chunks in it.  See swap.h. */
#include "swap/swap.h"

#include "base/log.h"
#include "base/system.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

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
    /* Relaxed: every thread finds the same value, and nothing else depends on it. */
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

/* Reserves addresses for all segments of a GPU, twice as many as its memory: addresses cost nothing. */
static bool make_space(uint32_t gpu, CUdeviceptr *base, nvs_arena *ranges)
{
    const uint64_t unit = nvs_swap_unit(gpu), most = UINT64_C(1) << 40;
    size_t total = 0;
    if (NVS_REAL(cuDeviceTotalMem_v2)(&total, (CUdevice)gpu) != CUDA_SUCCESS)
        return false;
    const uint64_t bytes = (total < most / 2 ? 2 * total : most) / unit * unit;
    if (!nvs_arena_init(ranges, bytes, (uint32_t)unit))
        return false;
    if (NVS_REAL(cuMemAddressReserve)(base, bytes, 0, 0, 0) == CUDA_SUCCESS)
        return true;
    free(ranges->used);
    return false;
}

/* Locked; unlocks meanwhile: other threads reserve ranges of their own then. */
static void try_space(uint32_t gpu)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    CUdeviceptr base;
    nvs_arena ranges;
    of->space.tried = true;
    nvs_swap_unlock();
    const bool made = make_space(gpu, &base, &ranges);
    nvs_swap_lock();
    if (made) {
        of->space.base = base;
        of->space.ranges = ranges;
    }
}

static CUresult take_addresses(nvs_segment *segment)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[segment->gpu];
    uint64_t offset;
    nvs_swap_lock();
    if (!of->space.tried)
        try_space(segment->gpu);
    const bool taken = of->space.ranges.used != NULL && nvs_arena_take(&of->space.ranges, segment->bytes, &offset);
    if (taken)
        segment->base = of->space.base + offset;
    nvs_swap_unlock();
    if (taken)
        return CUDA_SUCCESS;
    segment->own_range = true;
    return NVS_REAL(cuMemAddressReserve)(&segment->base, segment->bytes, 0, 0, 0);
}

static void give_addresses(const nvs_segment *segment)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[segment->gpu];
    if (segment->own_range) {
        NVS_REAL(cuMemAddressFree)(segment->base, segment->bytes);
        return;
    }
    nvs_swap_lock();
    nvs_arena_give(&of->space.ranges, segment->base - of->space.base, segment->bytes);
    nvs_swap_unlock();
}

/* The size of a segment's next chunk.  The last chunks of a large segment halve in size, so that a choice of chunks sums up to any amount. */
static uint64_t next_chunk(uint64_t bytes, uint64_t left, uint64_t chunk_bytes, uint64_t unit)
{
    enum { LARGE = 8 }; /* chunks */
    if (left > chunk_bytes)
        return chunk_bytes;
    if (bytes < LARGE * chunk_bytes || chunk_bytes == unit)
        return left;
    uint64_t size = chunk_bytes / 2;
    while (size > unit && size > left / 2)
        size /= 2;
    return size < left ? size : left;
}

CUresult nvs_segment_new(uint32_t gpu, uint64_t bytes, uint64_t chunk_bytes, uint32_t block_bytes, nvs_segment **out)
{
    const uint64_t unit = nvs_swap_unit(gpu), most = bytes / chunk_bytes + 16; /* the end is halved six times at most */
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (most > UINT32_MAX / 2)
        return result;
    nvs_segment *segment = calloc(1, sizeof *segment + (size_t)most * sizeof segment->chunks[0]);
    if (segment == NULL)
        return result;
    segment->gpu = gpu;
    segment->bytes = bytes;
    for (uint64_t at = 0, size; at < bytes; at += size) {
        size = next_chunk(bytes, bytes - at, chunk_bytes, unit);
        nvs_chunk *chunk = &segment->chunks[segment->chunk_count++];
        chunk->at = (uint32_t)(at / NVS_HOST_GRAIN);
        chunk->grains = (uint32_t)(size / NVS_HOST_GRAIN);
    }
    if (block_bytes != 0 && !nvs_arena_init(&segment->arena, bytes, block_bytes))
        goto out;
    if (!nvs_host_reserve(bytes)) {
        const char *why = nvs_memory_take_refusal();
        NVS_LOG_ONCE(NVS_LOG_WARNING, "no host memory to evict a new allocation to (%llu MiB): out of memory; %s", (unsigned long long)(bytes >> 20),
                     why != NULL ? why : "NVSHARE_HOST_LIMIT or what the machine has left is too little");
        goto out;
    }
    result = take_addresses(segment);
    if (result == CUDA_SUCCESS) {
        *out = segment;
        return result;
    }
    nvs_host_unreserve(bytes);
out:
    free(segment->arena.used);
    free(segment);
    return result;
}

bool nvs_share_possible(uint32_t gpu)
{
    static _Atomic uint8_t known[NVS_MAX_GPUS];
    return nvs_gpu_supports(gpu, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, known);
}

static CUresult map(const nvs_segment *segment, uint32_t chunk, CUmemGenericAllocationHandle handle)
{
    const uint64_t bytes = nvs_segment_chunk_bytes(segment, chunk);
    const CUdeviceptr address = nvs_segment_chunk_address(segment, chunk);
    CUresult result = NVS_REAL(cuMemMap)(address, bytes, 0, handle, 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = nvs_views_map(segment, chunk, handle);
    if (result != CUDA_SUCCESS)
        (void)nvs_vmm_unmap(address, bytes);
    return result;
}

static CUresult make(const nvs_segment *segment, uint32_t chunk, CUmemGenericAllocationHandle *handle)
{
    const uint64_t bytes = nvs_segment_chunk_bytes(segment, chunk);
    CUmemAllocationProp prop = segment->vmm != NULL ? segment->vmm->properties : on_gpu(segment->gpu);
    if (segment->vmm == NULL && nvs_share_possible(segment->gpu))
        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return NVS_REAL(cuMemCreate)(handle, bytes, &prop, 0);
}

static CUresult create_and_map(nvs_segment *segment, uint32_t chunk)
{
    CUmemGenericAllocationHandle handle;
    CUresult result = make(segment, chunk, &handle);
    if (result != CUDA_SUCCESS)
        return result;
    result = map(segment, chunk, handle);
    nvs_vmm_release(handle); /* the mapping keeps the memory, so that freeing it is one step that can fail, not two */
    return result;
}

static void set_mapped(nvs_segment *segment, uint32_t chunk, bool mapped)
{
    nvs_swap_lock();
    segment->chunks[chunk].mapped = mapped;
    nvs_swap_unlock();
}

CUresult nvs_chunks_allow(uint32_t owner, CUdeviceptr address, uint64_t bytes)
{
    CUmemAccessDesc rights[NVS_MAX_GPUS];
    size_t count = 0;
    nvs_swap_lock();
    const uint32_t accessors = nvs_swap_gpus[owner].peers.accessors;
    nvs_swap_unlock();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if (gpu == owner || ((accessors >> gpu) & 1))
            rights[count++] = (CUmemAccessDesc){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)gpu},
                                             .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return NVS_REAL(cuMemSetAccess)(address, bytes, rights, count);
}

/* The attribute ends with the unmapping. */
static void restore_attributes(const nvs_segment *segment, uint32_t chunk)
{
    unsigned int on = 1;
    nvs_swap_lock();
    bool wanted = segment->sync_memops;
    nvs_swap_unlock();
    if (wanted && NVS_REAL(cuPointerSetAttribute)(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, nvs_segment_chunk_address(segment, chunk)) != CUDA_SUCCESS)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "CU_POINTER_ATTRIBUTE_SYNC_MEMOPS could not be set again on restored memory");
}

bool nvs_chunks_adjoin(const nvs_place *before, const nvs_place *after)
{
    return nvs_segment_chunk_address(before->segment, before->chunk) + before->bytes ==
               nvs_segment_chunk_address(after->segment, after->chunk) &&
           (before->segment == after->segment || (!before->segment->own_range && !after->segment->own_range));
}

/* Within claims. */
static CUresult unmap(nvs_segment *segment, uint32_t chunk)
{
    CUresult result = nvs_views_unmap(segment, chunk);
    if (result != CUDA_SUCCESS)
        return result;
    result = NVS_REAL(cuMemUnmap)(nvs_segment_chunk_address(segment, chunk), nvs_segment_chunk_bytes(segment, chunk));
    if (result != CUDA_SUCCESS)
        nvs_views_map_again(segment, chunk);
    return result;
}

CUresult nvs_chunks_map(const nvs_place *places, size_t count)
{
    const uint32_t gpu = places[0].segment->gpu;
    CUresult result = CUDA_SUCCESS;
    uint64_t bytes = 0;
    size_t mapped = 0;
    for (size_t i = 0; i < count; i++)
        nvs_segment_claim(places[i].segment, false);
    for (; mapped < count && result == CUDA_SUCCESS; mapped += result == CUDA_SUCCESS) {
        result = create_and_map(places[mapped].segment, places[mapped].chunk);
        bytes += places[mapped].bytes;
    }
    if (result == CUDA_SUCCESS)
        result = nvs_chunks_allow(gpu, nvs_segment_chunk_address(places[0].segment, places[0].chunk), bytes);
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++) {
        restore_attributes(places[i].segment, places[i].chunk);
        set_mapped(places[i].segment, places[i].chunk, true);
    }
    for (size_t i = 0; result != CUDA_SUCCESS && i < mapped; i++)
        if (unmap(places[i].segment, places[i].chunk) != CUDA_SUCCESS)
            unmap(places[i].segment, places[i].chunk);
    for (size_t i = 0; i < count; i++)
        nvs_segment_unclaim(places[i].segment);
    return result;
}

CUresult nvs_chunk_unmap(nvs_segment *segment, uint32_t chunk)
{
    nvs_segment_claim(segment, false);
    CUresult result = unmap(segment, chunk);
    if (result == CUDA_SUCCESS)
        set_mapped(segment, chunk, false);
    nvs_segment_unclaim(segment);
    return result;
}

CUresult nvs_segment_back(nvs_segment *segment)
{
    enum { AT_ONCE = 32 };
    nvs_place places[AT_ONCE];
    CUresult result = CUDA_SUCCESS;
    for (uint32_t first = 0, count; first < segment->chunk_count && result == CUDA_SUCCESS; first += count) {
        for (count = 0; count < AT_ONCE && first + count < segment->chunk_count; count++)
            places[count] = (nvs_place){segment, first + count, nvs_segment_chunk_bytes(segment, first + count), 0};
        if (segment->chunks[first].state == NVS_CHUNK_RESIDENT)
            continue; /* by an earlier attempt, which ended at such a boundary */
        result = nvs_chunks_map(places, count);
        for (uint32_t i = first; i < first + count && result == CUDA_SUCCESS; i++)
            segment->chunks[i].state = NVS_CHUNK_RESIDENT;
    }
    return result; /* after a failure the caller destroys the segment, and with it what was mapped */
}

bool nvs_segment_mark_dead(nvs_segment *segment)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[segment->gpu];
    *(segment->node.previous != NULL ? &segment->node.previous->node.next : &of->first) = segment->node.next;
    *(segment->node.next != NULL ? &segment->node.next->node.previous : &of->last) = segment->node.previous;
    segment->node.next = segment->node.previous = NULL;
    segment->node.dead = true;
    of->committed -= segment->part.committed - segment->part.resident;
    segment->part.committed = segment->part.resident;
    return segment->users == 0;
}

void nvs_segment_destroy(nvs_segment *segment)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[segment->gpu];
    uint64_t lost = 0, pinned = 0;
    for (uint32_t i = 0; i < segment->chunk_count; i++) {
        nvs_chunk *chunk = &segment->chunks[i];
        if (nvs_chunk_is_mapped(chunk->state) && nvs_chunk_unmap(segment, i) != CUDA_SUCCESS && nvs_chunk_unmap(segment, i) != CUDA_SUCCESS)
            lost += nvs_segment_chunk_bytes(segment, i);
        if (chunk->state == NVS_CHUNK_EVICTED)
            nvs_host_give(chunk->grains, chunk->host);
        if (chunk->state == NVS_CHUNK_PINNED)
            pinned += nvs_segment_chunk_bytes(segment, i);
    }
    if (lost != 0)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "the driver does not take back %llu MiB; they stay counted until the program ends",
                     (unsigned long long)(lost >> 20));
    else
        give_addresses(segment);
    nvs_vmm_handle_free(segment->vmm);
    nvs_swap_lock();
    of->resident -= segment->part.resident - lost;
    of->pinned -= pinned;
    of->committed -= segment->part.committed - lost;
    nvs_swap_unlock();
    nvs_host_unreserve(segment->bytes);
    free(segment->arena.used);
    free(segment);
}

void nvs_segment_unref(nvs_segment *segment)
{
    nvs_swap_lock();
    bool destroy = --segment->users == 0 && segment->node.dead;
    nvs_swap_unlock();
    if (destroy)
        nvs_segment_destroy(segment);
}

bool nvs_swap_pause(uint64_t *waited_ns)
{
    static const uint64_t LONGEST_NS = 400000000, NAP_NS = 2000000;
    if (*waited_ns >= LONGEST_NS)
        return false;
    const int saved = errno; /* the application's */
    nvs_nap((long)NAP_NS);
    errno = saved;
    *waited_ns += NAP_NS;
    return true;
}
