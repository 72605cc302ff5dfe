/* Views: the addresses where the application mapped its own handles (cuMemCreate, cuMemMap), and their access rights.
 *
 * A handle of the application stands for a segment.  Its chunks are mapped at the segment's addresses, which copies use, and at each view.
 * A chunk is mapped or unmapped at all views together.  Each such step, and each change of a view, holds a claim on the segment, so that the
 * views of a chunk are all mapped or all unmapped.
 *
 * Non-goals: the registry of handles and mappings (hooks/memory/vmm.c); when chunks move.
 */
#include "swap/swap.h"

#include "base/log.h"
#include "driver/cuda_api.h"

#include <stdlib.h>

#define EXCLUSIVE UINT32_MAX

void nvs_segment_claim(const nvs_segment *segment, bool exclusive)
{
    if (segment->vmm == NULL)
        return;
    nvs_swap_lock();
    while (segment->vmm->claims == EXCLUSIVE || (exclusive && segment->vmm->claims != 0))
        nvs_swap_wait();
    segment->vmm->claims = exclusive ? EXCLUSIVE : segment->vmm->claims + 1;
    nvs_swap_unlock();
}

void nvs_segment_unclaim(const nvs_segment *segment)
{
    if (segment->vmm == NULL)
        return;
    nvs_swap_lock();
    segment->vmm->claims = segment->vmm->claims == EXCLUSIVE ? 0 : segment->vmm->claims - 1;
    nvs_swap_wake();
    nvs_swap_unlock();
}

CUresult nvs_vmm_unmap(CUdeviceptr address, uint64_t bytes)
{
    CUresult result = NVS_REAL(cuMemUnmap)(address, bytes);
    return result == CUDA_SUCCESS ? result : NVS_REAL(cuMemUnmap)(address, bytes);
}

void nvs_vmm_release(CUmemGenericAllocationHandle handle)
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

/* Maps the views before `end`: all or none. */
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

CUresult nvs_views_map(const nvs_segment *segment, uint32_t chunk, CUmemGenericAllocationHandle handle)
{
    return segment->vmm != NULL ? map_until(segment, chunk, handle, NULL) : CUDA_SUCCESS;
}

/* Maps the views before `end` again, after an unmapping that failed halfway. */
static void map_again(const nvs_segment *segment, uint32_t chunk, const nvs_view *end)
{
    CUmemGenericAllocationHandle handle;
    CUresult result = NVS_REAL(cuMemRetainAllocationHandle)(&handle, (void *)(uintptr_t)nvs_segment_chunk_address(segment, chunk));
    if (result == CUDA_SUCCESS) {
        result = map_until(segment, chunk, handle, end);
        nvs_vmm_release(handle);
    }
    if (result != CUDA_SUCCESS)
        NVS_LOG_ONCE(NVS_LOG_ERROR, "the driver neither moves memory of the program nor leaves it where it is (error %d)", (int)result);
}

CUresult nvs_views_unmap(const nvs_segment *segment, uint32_t chunk)
{
    if (segment->vmm == NULL)
        return CUDA_SUCCESS;
    for (const nvs_view *at = segment->vmm->views; at != NULL; at = at->next) {
        CUresult result = nvs_vmm_unmap(address_in(segment, chunk, at), nvs_segment_chunk_bytes(segment, chunk));
        if (result != CUDA_SUCCESS) {
            map_again(segment, chunk, at);
            return result;
        }
    }
    return CUDA_SUCCESS;
}

void nvs_views_map_again(const nvs_segment *segment, uint32_t chunk)
{
    if (segment->vmm != NULL && segment->vmm->views != NULL)
        map_again(segment, chunk, NULL);
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
    nvs_vmm_release(handle);
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
        nvs_vmm_release(vmm->driver_handle);
    for (nvs_view *next; vmm->views != NULL; vmm->views = next) {
        next = vmm->views->next;
        free(vmm->views);
    }
    free(vmm);
}
