/* Segments: their list on each GPU, its figures and lock; the views of the application; address space, and the physical chunks in it.  See swap.h.
 *
 * Views: the addresses where the application mapped its own handles (cuMemCreate, cuMemMap), and their access rights.
 *
 * A handle of the application stands for a segment.  Its chunks are mapped at the segment's addresses, which copies use, and at each view.
 * A chunk is mapped or unmapped at all views together.  Each such step, and each change of a view, holds a claim on the segment, so that the
 * views of a chunk are all mapped or all unmapped.
 *
 * Non-goals: the registry of handles and mappings (hooks/vmm.c); when chunks move.
 */
#include "base/log.h"
#include "base/system.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "swap/swap.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

nvs_swap_gpu nvs_swap_gpus[NVS_MAX_GPUS];
NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "swap" in the lock order of base/base.h */
NVS_FORK_STATE static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* a claim has ended */

void nvs_swap_lock(void)
{
    pthread_mutex_lock(&lock);
}

void nvs_swap_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

uint64_t nvs_segment_chunk_bytes(const nvs_segment *segment, uint32_t chunk)
{
    return segment->chunks[chunk].grains * NVS_HOST_GRAIN;
}

CUdeviceptr nvs_segment_chunk_address(const nvs_segment *segment, uint32_t chunk)
{
    return segment->base + segment->chunks[chunk].at * NVS_HOST_GRAIN;
}

bool nvs_swap_owns(CUdeviceptr address)
{
    bool owns = false;
    nvs_swap_lock();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS && !owns; gpu++) {
        const nvs_arena *ranges = &nvs_swap_gpus[gpu].space.ranges;
        owns = ranges->used != NULL && address - nvs_swap_gpus[gpu].space.base < (uint64_t)ranges->blocks * ranges->block_bytes;
    }
    nvs_swap_unlock();
    return owns;
}

void nvs_segment_list(nvs_segment *segment)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[segment->gpu];
    const bool arena = segment->arena.used != NULL;
    segment->node.next = arena ? of->first : NULL;
    segment->node.previous = arena ? NULL : of->last;
    *(segment->node.previous != NULL ? &segment->node.previous->node.next : &of->first) = segment;
    *(segment->node.next != NULL ? &segment->node.next->node.previous : &of->last) = segment;
}

bool nvs_segment_is_listed(uint32_t gpu, const nvs_segment *segment)
{
    const nvs_segment *at = nvs_swap_gpus[gpu].first;
    while (at != NULL && at != segment)
        at = at->node.next;
    return at != NULL;
}

void nvs_segment_pin_chunk(nvs_segment *segment, uint32_t chunk)
{
    if (segment->chunks[chunk].state != NVS_CHUNK_RESIDENT)
        return;
    segment->chunks[chunk].state = NVS_CHUNK_PINNED;
    nvs_swap_gpus[segment->gpu].pinned += nvs_segment_chunk_bytes(segment, chunk);
}

void nvs_segment_moved(nvs_segment *segment, int64_t bytes)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[segment->gpu];
    if (segment->vmm != NULL && segment->vmm->unite.under_way)
        return; /* its room is used again at once */
    of->resident += (uint64_t)bytes; /* modulo 2^64: right in both directions */
    segment->part.resident += (uint64_t)bytes;
    if (segment->node.dead) {
        of->committed += (uint64_t)bytes;
        segment->part.committed += (uint64_t)bytes;
    }
}

NVS_FORK_CODE void nvs_swap_segments_after_fork(void)
{
    static const nvs_swap_gpu none;
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    pthread_cond_init(&changed, NULL);
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if (memcmp(&nvs_swap_gpus[gpu], &none, sizeof none) != 0)
            nvs_swap_gpus[gpu] = none;
}

/* --- views --- */

#define EXCLUSIVE UINT32_MAX

void nvs_segment_claim(const nvs_segment *segment, bool exclusive)
{
    if (segment->vmm == NULL)
        return;
    nvs_swap_lock();
    while (segment->vmm->claims == EXCLUSIVE || (exclusive && segment->vmm->claims != 0))
        nvs_cond_wait(&changed, &lock, NULL);
    segment->vmm->claims = exclusive ? EXCLUSIVE : segment->vmm->claims + 1;
    nvs_swap_unlock();
}

void nvs_segment_unclaim(const nvs_segment *segment)
{
    if (segment->vmm == NULL)
        return;
    nvs_swap_lock();
    segment->vmm->claims = segment->vmm->claims == EXCLUSIVE ? 0 : segment->vmm->claims - 1;
    pthread_cond_broadcast(&changed);
    nvs_swap_unlock();
}

CUresult nvs_vmm_unmap(CUdeviceptr address, uint64_t bytes)
{
    CUresult result = NVS_REAL(cuMemUnmap)(address, bytes);
    return result == CUDA_SUCCESS ? result : NVS_REAL(cuMemUnmap)(address, bytes);
}

/* Tries twice; logs a failure. */
static void vmm_release(CUmemGenericAllocationHandle handle)
{
    if (NVS_REAL(cuMemRelease)(handle) != CUDA_SUCCESS && NVS_REAL(cuMemRelease)(handle) != CUDA_SUCCESS)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "the driver does not release a handle of memory; its memory may stay allocated until the program ends");
}

/* --- one chunk, all views; the caller has a claim --- */

static CUdeviceptr address_in(const nvs_segment *segment, uint32_t chunk, const nvs_view *view)
{
    return view->address + (nvs_segment_chunk_address(segment, chunk) - segment->base);
}

static CUresult map_one(const nvs_segment *segment, uint32_t chunk, const nvs_view *view, CUmemGenericAllocationHandle handle)
{
    const uint64_t bytes = nvs_segment_chunk_bytes(segment, chunk);
    const CUdeviceptr address = address_in(segment, chunk, view);
    CUresult result = NVS_REAL(cuMemMap)(address, bytes, 0, handle, 0);
    if (result != CUDA_SUCCESS || view->access_count == 0)
        return result;
    result = NVS_REAL(cuMemSetAccess)(address, bytes, view->access, view->access_count);
    if (result != CUDA_SUCCESS)
        (void)nvs_vmm_unmap(address, bytes);
    return result;
}

/* Maps the views before `end`, NULL: all of them.  All or none. */
static CUresult map_until(const nvs_segment *segment, uint32_t chunk, CUmemGenericAllocationHandle handle, const nvs_view *end)
{
    CUresult result = CUDA_SUCCESS;
    const nvs_view *at = segment->vmm->views;
    for (; at != end && result == CUDA_SUCCESS; at = result == CUDA_SUCCESS ? at->next : at)
        result = map_one(segment, chunk, at, handle);
    for (const nvs_view *done = segment->vmm->views; result != CUDA_SUCCESS && done != at; done = done->next)
        (void)nvs_vmm_unmap(address_in(segment, chunk, done), nvs_segment_chunk_bytes(segment, chunk));
    return result;
}

/* Maps the views before `end` again, after an unmapping that failed halfway. */
static void map_again(const nvs_segment *segment, uint32_t chunk, const nvs_view *end)
{
    CUmemGenericAllocationHandle handle;
    CUresult result = NVS_REAL(cuMemRetainAllocationHandle)(&handle, (void *)(uintptr_t)nvs_segment_chunk_address(segment, chunk));
    if (result == CUDA_SUCCESS) {
        result = map_until(segment, chunk, handle, end);
        vmm_release(handle);
    }
    if (result != CUDA_SUCCESS)
        NVS_LOG_ONCE(NVS_LOG_ERROR, "the driver neither moves memory of the program nor leaves it where it is (error %d)", (int)result);
}

/* At all views, or at none. */
static CUresult views_unmap(const nvs_segment *segment, uint32_t chunk)
{
    for (const nvs_view *at = segment->vmm != NULL ? segment->vmm->views : NULL; at != NULL; at = at->next) {
        CUresult result = nvs_vmm_unmap(address_in(segment, chunk, at), nvs_segment_chunk_bytes(segment, chunk));
        if (result != CUDA_SUCCESS) {
            map_again(segment, chunk, at);
            return result;
        }
    }
    return CUDA_SUCCESS;
}

/* --- one view, all chunks; an application's thread, which keeps the segment alive --- */

static nvs_view *find(const nvs_segment *segment, CUdeviceptr address)
{
    nvs_view *at = segment->vmm->views;
    while (at != NULL && at->address != address)
        at = at->next;
    return at;
}

/* The first run of mapped chunks at or after `from`; `count` is 0 when there is none. */
static uint32_t mapped_run(const nvs_segment *segment, uint32_t from, uint32_t *count, uint64_t *bytes)
{
    while (from < segment->chunk_count && !segment->chunks[from].mapped)
        from++;
    *count = 0;
    *bytes = 0;
    while (from + *count < segment->chunk_count && segment->chunks[from + *count].mapped)
        *bytes += nvs_segment_chunk_bytes(segment, from + (*count)++);
    return from;
}

static CUresult map_chunk(const nvs_segment *segment, uint32_t chunk, const nvs_view *view)
{
    CUmemGenericAllocationHandle handle;
    CUresult result = NVS_REAL(cuMemRetainAllocationHandle)(&handle, (void *)(uintptr_t)nvs_segment_chunk_address(segment, chunk));
    if (result != CUDA_SUCCESS)
        return result;
    result = map_one(segment, chunk, view, handle);
    vmm_release(handle);
    return result;
}

/* Maps the chunks before `end` that have memory: all or none. */
static CUresult map_chunks(const nvs_segment *segment, const nvs_view *view, uint32_t end)
{
    CUresult result = CUDA_SUCCESS;
    uint32_t chunk = 0;
    for (; chunk < end && result == CUDA_SUCCESS; chunk += result == CUDA_SUCCESS)
        if (segment->chunks[chunk].mapped)
            result = map_chunk(segment, chunk, view);
    for (uint32_t done = 0; result != CUDA_SUCCESS && done < chunk; done++)
        if (segment->chunks[done].mapped)
            (void)nvs_vmm_unmap(address_in(segment, done, view), nvs_segment_chunk_bytes(segment, done));
    return result;
}

CUresult nvs_view_add(nvs_segment *segment, CUdeviceptr address)
{
    nvs_view *view = calloc(1, sizeof *view);
    if (view == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    view->address = address;
    nvs_segment_claim(segment, true);
    CUresult result = map_chunks(segment, view, segment->chunk_count);
    if (result == CUDA_SUCCESS) {
        view->next = segment->vmm->views;
        segment->vmm->views = view;
    }
    nvs_segment_unclaim(segment);
    if (result != CUDA_SUCCESS)
        free(view);
    return result;
}

static CUresult unmap_chunks(const nvs_segment *segment, const nvs_view *view)
{
    uint64_t bytes;
    for (uint32_t first = 0, count = 0;; first += count) {
        first = mapped_run(segment, first, &count, &bytes);
        if (count == 0)
            return CUDA_SUCCESS;
        CUresult result = NVS_REAL(cuMemUnmap)(address_in(segment, first, view), bytes);
        if (result == CUDA_SUCCESS)
            continue;
        if (map_chunks(segment, view, first) != CUDA_SUCCESS)
            NVS_LOG_ONCE(NVS_LOG_ERROR, "the driver neither unmaps memory of the program nor leaves it where it is (error %d)", (int)result);
        return result;
    }
}

CUresult nvs_view_end(nvs_segment *segment, CUdeviceptr address)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    nvs_segment_claim(segment, true);
    nvs_view *view = find(segment, address);
    if (view != NULL)
        result = unmap_chunks(segment, view);
    if (view != NULL && result == CUDA_SUCCESS) {
        nvs_view **link = &segment->vmm->views;
        while (*link != view)
            link = &(*link)->next;
        *link = view->next;
        free(view);
    }
    nvs_segment_unclaim(segment);
    return result;
}

/* Checks access rights as the driver does, for a handle without mapped chunks. */
static CUresult check_access(uint32_t owner, const CUmemAccessDesc *desc)
{
    int devices = 0, possible = 1;
    if (desc->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return CUDA_ERROR_INVALID_VALUE;
    if (desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = NVS_REAL(cuDeviceGetCount)(&devices);
    if (result != CUDA_SUCCESS)
        return result;
    if (desc->location.id < 0 || desc->location.id >= devices)
        return CUDA_ERROR_INVALID_DEVICE;
    if ((uint32_t)desc->location.id != owner)
        result = NVS_REAL(cuDeviceCanAccessPeer)(&possible, desc->location.id, (CUdevice)owner);
    return result == CUDA_SUCCESS && !possible ? CUDA_ERROR_INVALID_DEVICE : result;
}

static bool same_location(const CUmemLocation *a, const CUmemLocation *b)
{
    return a->type == b->type && a->id == b->id;
}

/* Keeps the rights for later mappings.  False: too many locations. */
static bool store_access(nvs_view *view, const CUmemAccessDesc *desc)
{
    uint32_t at = 0;
    while (at < view->access_count && !same_location(&view->access[at].location, &desc->location))
        at++;
    if (desc->flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) {
        if (at < view->access_count)
            view->access[at] = view->access[--view->access_count];
        return true;
    }
    if (at == NVS_MAX_GPUS)
        return false;
    view->access[at] = *desc;
    view->access_count += at == view->access_count;
    return true;
}

static CUresult allow(const nvs_segment *segment, const nvs_view *view, const CUmemAccessDesc *desc, size_t count)
{
    CUresult result = CUDA_SUCCESS;
    uint64_t bytes;
    uint32_t run, first = mapped_run(segment, 0, &run, &bytes);
    for (size_t i = 0; run == 0 && i < count && result == CUDA_SUCCESS; i++)
        result = check_access(segment->gpu, &desc[i]);
    for (; run != 0 && result == CUDA_SUCCESS; first = mapped_run(segment, first + run, &run, &bytes))
        result = NVS_REAL(cuMemSetAccess)(address_in(segment, first, view), bytes, desc, count);
    return result;
}

CUresult nvs_view_allow(nvs_segment *segment, CUdeviceptr address, const CUmemAccessDesc *desc, size_t count)
{
    nvs_segment_claim(segment, true);
    nvs_view *view = find(segment, address);
    CUresult result = view != NULL ? allow(segment, view, desc, count) : CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++)
        if (!store_access(view, &desc[i]))
            result = CUDA_ERROR_OUT_OF_MEMORY;
    nvs_segment_unclaim(segment);
    return result;
}

bool nvs_view_access(nvs_segment *segment, CUdeviceptr address, const CUmemLocation *location, unsigned long long *flags)
{
    *flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    nvs_segment_claim(segment, false);
    const nvs_view *view = find(segment, address);
    for (uint32_t i = 0; view != NULL && i < view->access_count; i++)
        if (same_location(&view->access[i].location, location))
            *flags = view->access[i].flags;
    nvs_segment_unclaim(segment);
    return view != NULL;
}

/* --- handles --- */

nvs_vmm_handle *nvs_vmm_handle_new(const CUmemAllocationProp *properties)
{
    nvs_vmm_handle *vmm = calloc(1, sizeof *vmm);
    if (vmm != NULL)
        vmm->properties = *properties;
    return vmm;
}

void nvs_vmm_handle_free(nvs_vmm_handle *vmm)
{
    if (vmm == NULL)
        return;
    if (vmm->driver_handle != 0)
        vmm_release(vmm->driver_handle);
    for (nvs_view *next; vmm->views != NULL; vmm->views = next) {
        next = vmm->views->next;
        free(vmm->views);
    }
    free(vmm);
}

/* --- address space and chunks --- */

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
    if (segment->vmm != NULL)
        result = map_until(segment, chunk, handle, NULL);
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
    else if (segment->chunk_count != 1) /* the driver exports whole handles (unite.c) */
        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    return NVS_REAL(cuMemCreate)(handle, bytes, &prop, 0);
}

static CUresult create_and_map(nvs_segment *segment, uint32_t chunk)
{
    CUmemGenericAllocationHandle handle;
    CUresult result = make(segment, chunk, &handle);
    if (result != CUDA_SUCCESS)
        return result;
    result = map(segment, chunk, handle);
    vmm_release(handle); /* the mapping keeps the memory, so that freeing it is one step that can fail, not two */
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
    CUresult result = views_unmap(segment, chunk);
    if (result != CUDA_SUCCESS)
        return result;
    result = NVS_REAL(cuMemUnmap)(nvs_segment_chunk_address(segment, chunk), nvs_segment_chunk_bytes(segment, chunk));
    if (result != CUDA_SUCCESS && segment->vmm != NULL && segment->vmm->views != NULL)
        map_again(segment, chunk, NULL);
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
