/* Access of a program's other GPUs to one GPU's chunks, and the attribute SYNC_MEMOPS of chunks.
 *
 * Non-goals: the access rights that the application itself sets (view.c).
 */
#include "base/log.h"
#include "base/port.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "memory/quota/pins.h"
#include "swap/swap.h"

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
        next = ref(segment->dead ? of->first : segment->next);
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

/* A lease and a drain cover one GPU: a move does not wait for work of other GPUs on this memory, and their work does not wait for a
 * restoration.  So memory that another GPU accesses does not move.  In the gate all chunks are on the card and none moves; later allocations
 * are backed at once (allocate.c). */
void nvs_swap_pin_gpu(uint32_t gpu)
{
    if (gpu >= NVS_MAX_GPUS || nvs_swap_gpu_is_pinned(gpu))
        return;
    nvs_usage usage;
    nvs_slot *const slot = nvs_gate_enter(gpu);
    nvs_memory_usage(gpu, &usage);
    const uint64_t more = usage.resident_bytes - usage.pinned_bytes;
    const bool may = nvs_pins_may(gpu, more);
    nvs_swap_lock();
    nvs_swap_gpus[gpu].peers.pinned = true;
    nvs_swap_unlock();
    if (may)
        nvs_pins_counted(gpu, more);
    nvs_gate_leave(slot, gpu);
    if (!may) /* a copy between GPUs has no fitting error code */
        NVS_LOG_ONCE(NVS_LOG_WARNING, "another GPU works on the memory of GPU %u, so it stays on the card, though other programs need more than it "
                                      "leaves: they wait (nvshare-ctl memory)", gpu);
    nvs_coordinator.memory_changed(gpu);
    nvs_log(NVS_LOG_INFO, "another GPU works on the memory of GPU %u: from now on it stays on the card", gpu);
}

bool nvs_swap_gpu_is_pinned(uint32_t gpu)
{
    nvs_swap_lock();
    const bool pinned = nvs_swap_gpus[gpu].peers.pinned;
    nvs_swap_unlock();
    return pinned;
}

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
