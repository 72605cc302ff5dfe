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

/* cuCtxEnablePeerAccess does not cover chunks, so each chunk gets the access rights, now and at every restoration.  `users` holds the segment
 * meanwhile; a chunk that moves gets the rights from the mover. */
void nvs_swap_allow(uint32_t gpu, uint32_t accessor)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    nvs_swap_lock();
    of->accessors |= UINT32_C(1) << accessor;
    for (nvs_segment *segment = of->first; segment != NULL;) {
        segment->users++;
        nvs_swap_unlock();
        for (uint32_t i = 0; i < segment->chunk_count; i++) {
            nvs_swap_lock();
            bool mapped = nvs_chunk_is_mapped(segment->chunks[i].state);
            nvs_swap_unlock();
            /* A chunk that is evicted meanwhile gets the rights when it is restored. */
            if (mapped && nvs_chunks_allow(gpu, nvs_segment_chunk_address(segment, i), nvs_segment_chunk_bytes(segment, i)) != CUDA_SUCCESS)
                NVS_LOG_ONCE(NVS_LOG_INFO, "peer access to a chunk could not be given now");
        }
        nvs_swap_lock();
        nvs_segment *next = segment->next;
        bool destroy = --segment->users == 0 && segment->dead;
        if (segment->dead)
            next = of->first; /* it has left the list: start again; rights that are set twice do no harm */
        if (destroy) {
            nvs_swap_unlock();
            nvs_segment_destroy(segment);
            nvs_swap_lock();
        }
        segment = next;
    }
    of->granted |= UINT32_C(1) << accessor;
    nvs_swap_unlock();
}

bool nvs_swap_is_allowed(uint32_t gpu, uint32_t accessor)
{
    nvs_swap_lock();
    const bool allowed = (nvs_swap_gpus[gpu].granted >> accessor & 1) != 0;
    nvs_swap_unlock();
    return allowed;
}

/* A lease and a drain cover one GPU: a move does not wait for work of other GPUs on this memory, and their work does not wait for a
 * restoration.  So memory that another GPU reaches does not move.  In the gate all chunks are on the card and none moves; later allocations
 * are backed at once (allocate.c). */
void nvs_swap_reach(uint32_t gpu)
{
    if (gpu >= NVS_MAX_GPUS || nvs_swap_is_reached(gpu))
        return;
    nvs_usage usage;
    nvs_slot *const slot = nvs_gate_enter(gpu);
    nvs_memory_usage(gpu, &usage);
    const uint64_t more = usage.resident_bytes - usage.pinned_bytes;
    const bool may = nvs_pins_may(gpu, more);
    nvs_swap_lock();
    nvs_swap_gpus[gpu].reached = true;
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

bool nvs_swap_is_reached(uint32_t gpu)
{
    nvs_swap_lock();
    const bool reached = nvs_swap_gpus[gpu].reached;
    nvs_swap_unlock();
    return reached;
}

/* Adds a user if the segment is still listed; the caller's pointer may be stale. */
static bool hold_listed(uint32_t gpu, const nvs_segment *segment)
{
    nvs_swap_lock();
    nvs_segment *at = nvs_swap_gpus[gpu].first;
    while (at != NULL && at != segment)
        at = at->next;
    if (at != NULL)
        at->users++;
    nvs_swap_unlock();
    return at != NULL;
}

CUresult nvs_swap_set_sync_memops(uint32_t gpu, nvs_segment *segment, unsigned int on)
{
    CUresult result = CUDA_SUCCESS;
    if (!hold_listed(gpu, segment))
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
    const nvs_segment *at = nvs_swap_gpus[gpu].first;
    while (at != NULL && at != segment)
        at = at->next;
    bool on = at != NULL && at->sync_memops;
    nvs_swap_unlock();
    return on;
}
