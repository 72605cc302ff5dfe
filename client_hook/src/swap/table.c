/* The segments of each GPU: the list, its figures, and the lock of mode `swap`.  See swap.h. */
#include "swap/swap.h"

#include "base/system.h"

#include <pthread.h>
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

void nvs_swap_wait(void)
{
    nvs_cond_wait(&changed, &lock, NULL);
}

void nvs_swap_wake(void)
{
    pthread_cond_broadcast(&changed);
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
