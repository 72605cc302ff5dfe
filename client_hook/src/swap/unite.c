/* A handle of the application whose chunks become one: it is exported, bound, or mapped into an array, and another process or object then refers to
 * the driver's handle.
 *
 * The application's thread asks the coordinator whether the memory may be pinned, marks the segment, and has the agent close the gate and open it again.
 * The gate opens when no marked segment is left.  Before that the mover, with the program's work drained, moves the segment's chunks to the host, makes
 * one allocation of the types that the application asked for, maps it wherever the chunks were, with their rights, and copies the contents back.
 *
 * The way over the host needs no room on the card, and the segment's host room is reserved.  A failure before the end puts the chunks back: the host
 * keeps the contents until all of them are in the new allocation.
 *
 * Non-goals: segments that another GPU of the program reaches, whose work no drain of this GPU covers; a way back.
 */
#include "swap/swap.h"

#include "base/log.h"
#include "base/system.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"

#include <stdlib.h>
#include <string.h>

/* --- the application's thread --- */

/* `result`: of the wait, if this ends it. */
static void set_wanted(nvs_segment *segment, bool wanted, CUresult result)
{
    nvs_swap_lock();
    if (segment->vmm->unite.wanted != wanted) {
        nvs_swap_gpus[segment->gpu].uniting += wanted ? segment->bytes : -segment->bytes;
        segment->vmm->unite.result = result;
    }
    segment->vmm->unite.wanted = wanted;
    nvs_swap_unlock();
}

static bool is_wanted(const nvs_segment *segment)
{
    nvs_swap_lock();
    const bool wanted = segment->vmm->unite.wanted;
    nvs_swap_unlock();
    return wanted;
}

static bool is_one(const nvs_segment *segment)
{
    nvs_swap_lock();
    const bool one = segment->chunk_count == 1;
    nvs_swap_unlock();
    return one;
}

CUresult nvs_swap_unite(nvs_segment *segment, nvs_slot **slot)
{
    enum { LOOK_NS = 200000 }; /* the agent closes the gate sooner */
    const uint32_t gpu = segment->gpu;
    nvs_status agent = NVS_OK;
    if (is_one(segment))
        return CUDA_SUCCESS;
    if (*slot == NULL)
        return CUDA_ERROR_NOT_SUPPORTED;
    set_wanted(segment, true, CUDA_ERROR_NOT_SUPPORTED);
    while (is_wanted(segment) && agent == NVS_OK && !nvs_gate_dead(gpu) && *slot != NULL) {
        nvs_gate_leave(*slot, gpu);
        agent = nvs_coordinator.reopen(gpu);
        nvs_nap(LOOK_NS);
        *slot = nvs_gate_enter(gpu); /* waits for the lease, also after the gate was closed for another reason */
    }
    set_wanted(segment, false, nvs_gate_dead(gpu) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_SUPPORTED); /* its context is dead; or there is no agent */
    nvs_swap_lock();
    const CUresult result = segment->chunk_count == 1 ? CUDA_SUCCESS : segment->vmm->unite.result;
    nvs_swap_unlock();
    return result;
}

/* --- the mover --- */

/* Puts a layout of chunks in the place of the present one. */
static void set_layout(nvs_segment *segment, const nvs_chunk *chunks, uint32_t count)
{
    nvs_segment_claim(segment, true);
    nvs_swap_lock();
    memcpy(segment->chunks, chunks, count * sizeof *chunks);
    segment->chunk_count = count;
    nvs_swap_unlock();
    nvs_segment_unclaim(segment);
}

typedef struct filling {
    const nvs_segment *segment;
    const nvs_chunk *parts;
    uint32_t count;
    CUresult result;
} filling;

static bool fill_in(CUcontext context, void *argument)
{
    filling *f = argument;
    CUcontext ignored;
    if (!nvs_context_enter(context))
        return true;
    f->result = nvs_swap_fill(f->segment, f->parts, f->count, context);
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return f->result != CUDA_SUCCESS; /* another context may serve */
}

/* One allocation with the contents of the parts, which are on the host.  After a failure there is none. */
static CUresult make_one(nvs_segment *segment, const nvs_chunk *parts, uint32_t count)
{
    const nvs_place place = {segment, 0, segment->bytes, 0};
    filling f = {segment, parts, count, CUDA_ERROR_INVALID_CONTEXT};
    uint64_t waited_ns = 0;
    CUresult result;
    do
        result = nvs_chunks_map(&place, 1);
    while (result == CUDA_ERROR_OUT_OF_MEMORY && nvs_swap_pause(&waited_ns));
    if (result != CUDA_SUCCESS)
        return result;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* the application's captures are not disturbed */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    nvs_each_context(segment->gpu, fill_in, &f);
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    if (f.result != CUDA_SUCCESS && nvs_chunk_unmap(segment, 0) != CUDA_SUCCESS)
        (void)nvs_chunk_unmap(segment, 0);
    return f.result;
}

static void set_under_way(nvs_segment *segment, bool under_way)
{
    nvs_swap_lock();
    segment->vmm->unite.under_way = under_way;
    for (uint32_t i = 0; !under_way && i < segment->chunk_count; i++)
        if (segment->chunks[i].state == NVS_CHUNK_EVICTED) /* after two failures: the next restoration brings it back */
            nvs_segment_moved(segment, -(int64_t)nvs_segment_chunk_bytes(segment, i));
    nvs_swap_unlock();
}

/* Locked. */
static bool all_are(const nvs_segment *segment, nvs_chunk_state state)
{
    uint32_t i = 0;
    while (i < segment->chunk_count && segment->chunks[i].state == state)
        i++;
    return i == segment->chunk_count;
}

/* All chunks are on the GPU. */
static CUresult unite(nvs_segment *segment)
{
    const nvs_chunk one = {.grains = (uint32_t)(segment->bytes / NVS_HOST_GRAIN)};
    const uint32_t count = segment->chunk_count;
    CUresult result, ignored;
    nvs_chunk *parts = malloc(count * sizeof *parts);
    if (parts == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    set_under_way(segment, true);
    if (nvs_swap_move_segment(segment, true, &result) != NVS_OK)
        result = result != CUDA_SUCCESS ? result : CUDA_ERROR_OUT_OF_MEMORY;
    nvs_swap_lock();
    if (result == CUDA_SUCCESS && !all_are(segment, NVS_CHUNK_EVICTED))
        result = CUDA_ERROR_NOT_SUPPORTED; /* its context ends */
    nvs_swap_unlock();
    if (result == CUDA_SUCCESS) {
        memcpy(parts, segment->chunks, count * sizeof *parts); /* only this thread writes `host` */
        set_layout(segment, &one, 1);
        result = make_one(segment, parts, count);
        if (result != CUDA_SUCCESS)
            set_layout(segment, parts, count);
    }
    if (result == CUDA_SUCCESS) {
        nvs_swap_lock();
        segment->chunks[0].state = NVS_CHUNK_RESIDENT;
        nvs_segment_pin_chunk(segment, 0); /* at once: a chunk of this size cannot move */
        nvs_swap_unlock();
        for (uint32_t i = 0; i < count; i++)
            nvs_host_give(parts[i].grains, parts[i].host);
    } else {
        (void)nvs_swap_move_segment(segment, false, &ignored);
    }
    set_under_way(segment, false);
    free(parts);
    return result;
}

/* A wanted segment, with a user; NULL: none. */
static nvs_segment *next_wanted(uint32_t gpu)
{
    nvs_swap_lock();
    nvs_segment *at = nvs_swap_gpus[gpu].uniting != 0 ? nvs_swap_gpus[gpu].first : NULL;
    while (at != NULL && (at->vmm == NULL || !at->vmm->unite.wanted))
        at = at->node.next;
    if (at != NULL)
        at->users++;
    nvs_swap_unlock();
    return at;
}

void nvs_swap_unite_wanted(uint32_t gpu)
{
    for (nvs_segment *at; (at = next_wanted(gpu)) != NULL; nvs_segment_unref(at)) {
        nvs_swap_lock();
        const bool there = all_are(at, NVS_CHUNK_RESIDENT), one = at->chunk_count == 1;
        const bool missing = nvs_swap_gpus[gpu].committed > nvs_swap_gpus[gpu].resident;
        nvs_swap_unlock();
        if (!one && !there && missing) { /* the next restoration goes on */
            nvs_segment_unref(at);
            return;
        }
        const CUresult result = one ? CUDA_SUCCESS : !there ? CUDA_ERROR_NOT_SUPPORTED : unite(at);
        if (result != CUDA_SUCCESS)
            nvs_log(NVS_LOG_WARNING, "memory of one cuMemCreate (%llu MiB) could not become one allocation to be exported or bound (error %d); it stays "
                                     "as it is", (unsigned long long)(at->bytes >> 20), (int)result);
        set_wanted(at, false, result);
    }
}

void nvs_swap_unite_refuse(uint32_t gpu, CUresult why)
{
    for (nvs_segment *at; (at = next_wanted(gpu)) != NULL; nvs_segment_unref(at))
        set_wanted(at, false, why);
}
