/* Memory that is used from elsewhere: by the program's other GPUs, whose turns are this one's (gate/gate.h), by other processes and by exported handles.
 * The latter two are pinned, because their users have no part in this program's leases.
 *
 * Also the attribute SYNC_MEMOPS, which the application sets for a whole allocation.
 *
 * Non-goals: access rights that the application itself sets (segment.c); the other processes, and how descriptors are sent (ipc/export.c).
 */
#include "swap/swap.h"

#include "base/base.h"
#include "base/log.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "memory/memory.h"

/* --- the program's other GPUs --- */

/* Gives all GPUs that may access this one's memory their rights to a segment's mapped chunks.  A user holds the segment. */
static void allow_segment(const nvs_segment *segment)
{
    for (uint32_t i = 0; i < segment->chunk_count; i++) {
        nvs_swap_lock();
        const bool mapped = nvs_chunk_is_mapped(segment->chunks[i].state);
        nvs_swap_unlock();
        /* A chunk that is evicted meanwhile gets the rights when it is restored. */
        if (mapped && nvs_chunks_allow(segment->gpu, nvs_segment_chunk_address(segment, i), nvs_segment_chunk_bytes(segment, i)) != CUDA_SUCCESS)
            NVS_LOG_ONCE(NVS_LOG_INFO, "peer access to a chunk could not be given now");
    }
}

/* Locked. */
static nvs_segment *ref(nvs_segment *segment)
{
    if (segment != NULL)
        segment->users++;
    return segment;
}

/* cuCtxEnablePeerAccess does not cover chunks, so each chunk gets the access rights, now and at every restoration. */
void nvs_swap_allow(uint32_t gpu, uint32_t accessor)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    nvs_swap_lock();
    of->peers.accessors |= UINT32_C(1) << accessor;
    for (nvs_segment *segment = ref(of->first), *next; segment != NULL; segment = next) {
        nvs_swap_unlock();
        allow_segment(segment);
        nvs_swap_lock();
        /* A dead segment has left the list: the loop starts again, and sets some rights twice. */
        next = ref(segment->node.dead ? of->first : segment->node.next);
        nvs_swap_unlock();
        nvs_segment_unref(segment);
        nvs_swap_lock();
    }
    of->peers.complete |= UINT32_C(1) << accessor;
    nvs_swap_unlock();
}

bool nvs_swap_is_allowed(uint32_t gpu, uint32_t accessor)
{
    nvs_swap_lock();
    const bool allowed = (nvs_swap_gpus[gpu].peers.complete >> accessor & 1) != 0;
    nvs_swap_unlock();
    return allowed;
}

/* --- other processes --- */

/* Locked.  The chunks that hold a range of addresses. */
static void find_chunks(const nvs_segment *segment, CUdeviceptr address, uint64_t bytes, nvs_share *out)
{
    *out = (nvs_share){.first = UINT32_MAX};
    for (uint32_t i = 0; i < segment->chunk_count; i++) {
        const CUdeviceptr begin = nvs_segment_chunk_address(segment, i), end = begin + nvs_segment_chunk_bytes(segment, i);
        if (end <= address || begin >= address + bytes)
            continue;
        if (out->count++ == 0) {
            out->first = i;
            out->offset = address - begin;
        }
        out->bytes += end - begin;
    }
}

/* Locked.  Finds the chunks, checks that they can be shared now, and counts the bytes that would newly be pinned. */
static CUresult find_shareable(uint32_t gpu, nvs_segment *segment, CUdeviceptr address, uint64_t bytes, nvs_share *out, uint64_t *more)
{
    *more = 0;
    if (!nvs_segment_is_listed(gpu, segment) || segment->vmm != NULL)
        return CUDA_ERROR_INVALID_VALUE;
    find_chunks(segment, address, bytes, out);
    out->segment = segment;
    for (uint32_t i = out->first; i < out->first + out->count; i++) {
        const nvs_chunk *chunk = &segment->chunks[i];
        if (!nvs_chunk_is_mapped(chunk->state))
            return CUDA_ERROR_INVALID_VALUE; /* its context is dead */
        if (chunk->state == NVS_CHUNK_RESIDENT)
            *more += nvs_segment_chunk_bytes(segment, i);
    }
    return CUDA_SUCCESS;
}

CUresult nvs_share_begin(uint32_t gpu, nvs_segment *segment, CUdeviceptr address, uint64_t bytes, nvs_share *out)
{
    uint64_t more, ignored;
    nvs_swap_lock();
    CUresult result = find_shareable(gpu, segment, address, bytes, out, &more);
    nvs_swap_unlock();
    if (result != CUDA_SUCCESS)
        return result;
    if (!nvs_pins_may(gpu, more)) {
        nvs_pins_log_refused("memory shared with other processes (cuIpcGetMemHandle)");
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    nvs_swap_lock();
    result = find_shareable(gpu, segment, address, bytes, out, &ignored); /* another thread may have freed or shared it meanwhile */
    for (uint32_t i = out->first; result == CUDA_SUCCESS && i < out->first + out->count; i++) {
        segment->chunks[i].shares++;
        nvs_segment_pin_chunk(segment, i);
    }
    segment->users += result == CUDA_SUCCESS;
    nvs_swap_unlock();
    nvs_pins_counted(gpu, more);
    return result;
}

void nvs_share_end(const nvs_share *share)
{
    nvs_segment *segment = share->segment;
    nvs_swap_lock();
    for (uint32_t i = share->first; i < share->first + share->count; i++) {
        nvs_chunk *chunk = &segment->chunks[i];
        if (--chunk->shares == 0) {
            chunk->state = NVS_CHUNK_RESIDENT;
            nvs_swap_gpus[segment->gpu].pinned -= nvs_segment_chunk_bytes(segment, i);
        }
    }
    nvs_swap_unlock();
    nvs_segment_unref(segment);
}

int nvs_chunk_descriptor(const nvs_segment *segment, uint32_t chunk)
{
    CUmemGenericAllocationHandle handle;
    int descriptor = -1;
    if (NVS_REAL(cuMemRetainAllocationHandle)(&handle, (void *)(uintptr_t)nvs_segment_chunk_address(segment, chunk)) != CUDA_SUCCESS)
        return -1;
    if (NVS_REAL(cuMemExportToShareableHandle)(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS)
        descriptor = -1;
    NVS_REAL(cuMemRelease)(handle);
    return descriptor;
}

/* --- exported handles --- */

/* False: the chunk is not on the GPU. */
static bool pin_chunk(nvs_segment *segment)
{
    nvs_swap_lock();
    nvs_segment_pin_chunk(segment, 0); /* the only one */
    const uint8_t state = segment->chunks[0].state;
    nvs_swap_unlock();
    return state == NVS_CHUNK_PINNED;
}

/* `bytes`: how many are newly pinned. */
static bool may_pin(const nvs_segment *segment, uint64_t *bytes)
{
    nvs_swap_lock();
    const bool stays = segment->chunks[0].state != NVS_CHUNK_RESIDENT;
    nvs_swap_unlock();
    *bytes = stays ? 0 : segment->bytes;
    return nvs_pins_may(segment->gpu, *bytes);
}

CUresult nvs_swap_pin(nvs_segment *segment, CUmemGenericAllocationHandle *out)
{
    const uint32_t gpu = segment->gpu;
    uint64_t more;
    CUmemGenericAllocationHandle got;
    nvs_slot *slot = nvs_gate_enter(gpu);
    CUresult result = may_pin(segment, &more) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        result = nvs_swap_unite(segment, &slot);
        if (result == CUDA_SUCCESS && !pin_chunk(segment))
            result = CUDA_ERROR_INVALID_VALUE; /* its context is dead */
        nvs_pins_counted(gpu, more);
    } else {
        nvs_pins_log_refused("memory whose handle is exported or bound");
    }
    if (result != CUDA_SUCCESS)
        goto out;
    nvs_segment_claim(segment, true);
    if (segment->vmm->driver_handle == 0) {
        result = NVS_REAL(cuMemRetainAllocationHandle)(&got, (void *)(uintptr_t)segment->base);
        if (result == CUDA_SUCCESS)
            segment->vmm->driver_handle = got;
    }
    *out = segment->vmm->driver_handle;
    nvs_segment_unclaim(segment);
    nvs_coordinator.memory_changed(gpu);
out:
    nvs_gate_leave(slot, gpu);
    return result;
}

/* --- the attribute SYNC_MEMOPS --- */

CUresult nvs_swap_set_sync_memops(uint32_t gpu, nvs_segment *segment, unsigned int on)
{
    CUresult result = CUDA_SUCCESS;
    nvs_swap_lock();
    const bool listed = nvs_segment_is_listed(gpu, segment);
    if (listed)
        ref(segment);
    nvs_swap_unlock();
    if (!listed)
        return CUDA_ERROR_INVALID_VALUE;
    nvs_segment_claim(segment, false);
    nvs_swap_lock();
    segment->sync_memops = on != 0;
    nvs_swap_unlock();
    for (uint32_t i = 0; i < segment->chunk_count && result == CUDA_SUCCESS; i++) {
        nvs_swap_lock();
        bool mapped = nvs_chunk_is_mapped(segment->chunks[i].state);
        nvs_swap_unlock();
        if (mapped)
            result = NVS_REAL(cuPointerSetAttribute)(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, nvs_segment_chunk_address(segment, i));
        nvs_swap_lock();
        if (mapped && !nvs_chunk_is_mapped(segment->chunks[i].state))
            result = CUDA_SUCCESS; /* evicted meanwhile: it gets the attribute when it is restored */
        nvs_swap_unlock();
    }
    nvs_segment_unclaim(segment);
    nvs_segment_unref(segment);
    return result;
}

bool nvs_swap_sync_memops(uint32_t gpu, const nvs_segment *segment)
{
    nvs_swap_lock();
    const bool on = nvs_segment_is_listed(gpu, segment) && segment->sync_memops;
    nvs_swap_unlock();
    return on;
}
