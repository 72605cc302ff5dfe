/* Memory mode `swap`: device allocations become reserved addresses, backed by chunks of physical memory that come and go.
 *
 * Without a lease (gate closed) an allocation succeeds without physical memory; it gets it when the lease is granted, in the
 * Restore before the Grant.  With the gate open it is backed at once, after asking the coordinator for room where that wants to be
 * asked; what finds no room is out of memory, as an application expects it.
 *
 * Chunks are up to 64 MiB, and smaller where the capacity is small, so that what moves is close to what must.
 *
 * Access by RDMA and legacy IPC handles do not exist for this memory: who asks gets the driver's error and a word in the log.
 */
#include "cuda_api.h"
#include "gate.h"
#include "log.h"
#include "memory.h"
#include "swap.h"

#define LARGEST_CHUNK (NVS_HOST_GRAIN * NVS_CHUNK_GRAINS)

static uint64_t round_up(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* A 64th of the capacity, if that is known.  Not less where it need not be: each chunk that one program maps waits for what others
 * copy at the time. */
static uint32_t chunk_bytes_for(uint32_t gpu, uint64_t unit)
{
    uint64_t wanted = nvs_memory_capacity(gpu) / 64, bytes = unit;
    if (wanted == 0)
        return (uint32_t)LARGEST_CHUNK;
    while (2 * bytes <= wanted && bytes < LARGEST_CHUNK)
        bytes *= 2;
    return (uint32_t)(bytes < LARGEST_CHUNK ? bytes : LARGEST_CHUNK);
}

/* Gate of the agent: see swap.h for why it is looked at under the lock.  Acquire pairs with the agent's stores in gate.c. */
static bool gate_is_closed(uint32_t gpu)
{
    return (atomic_load_explicit(&nvs_gates[gpu].state, memory_order_acquire) & NVS_GATE_CLOSED) != 0;
}

/* Counts a new segment's bytes, unless all that is there could then never be resident at once. */
static bool commit(nvs_segment *segment, bool *closed)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[segment->gpu];
    const uint64_t ceiling = nvs_memory_ceiling(segment->gpu);
    nvs_swap_lock();
    *closed = gate_is_closed(segment->gpu);
    bool fits = ceiling == 0 || of->committed + segment->bytes <= ceiling;
    if (fits) {
        of->committed += segment->bytes;
        segment->counted = segment->bytes;
        if (*closed)
            nvs_segment_list(segment);
        else
            nvs_segment_moved(segment, (int64_t)segment->bytes);
    } else {
        segment->counted = 0; /* nothing to take back */
    }
    nvs_swap_unlock();
    return fits;
}

/* Arenas in which nothing is: no need to copy them. */
static uint64_t drop_empty(uint32_t gpu)
{
    uint64_t freed = 0;
    for (;;) {
        nvs_swap_lock();
        nvs_segment *at = nvs_swap_gpus[gpu].first;
        while (at != NULL && at->used != NULL && (at->free_blocks != at->blocks || at->users != 0))
            at = at->next;
        at = at != NULL && at->used != NULL ? at : NULL;
        uint64_t on_gpu = at != NULL ? at->on_gpu : 0;
        if (at != NULL)
            nvs_segment_doom(at);
        nvs_swap_unlock();
        if (at == NULL)
            return freed;
        nvs_segment_destroy(at);
        freed += on_gpu;
    }
}

/* A segment that was going to be backed need not be now. */
static bool list_if_closed(nvs_segment *segment)
{
    nvs_swap_lock();
    bool closed = gate_is_closed(segment->gpu);
    if (closed) {
        nvs_segment_moved(segment, -(int64_t)segment->bytes);
        nvs_segment_list(segment);
    }
    nvs_swap_unlock();
    return closed;
}

/* A new segment, listed and fit for use as things are: see the head of the file. */
static CUresult make(uint32_t gpu, uint64_t bytes, uint32_t chunk_bytes, bool arena, CUdeviceptr *first, uint64_t first_bytes,
                     nvs_segment **out)
{
    nvs_segment *segment;
    bool closed;
    CUresult result = nvs_segment_new(gpu, bytes, chunk_bytes, arena, &segment);
    if (result != CUDA_SUCCESS)
        return result;
    if (arena)
        nvs_arena_take(segment, first_bytes, first); /* before others can see it */
    else
        *first = segment->base;
    bool fits = commit(segment, &closed);
    if (!fits) {
        drop_empty(gpu);
        fits = commit(segment, &closed);
    }
    if (!fits) {
        nvs_segment_destroy(segment);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = segment;
    if (closed)
        return CUDA_SUCCESS;
    nvs_swap_lock();
    uint64_t resident = nvs_swap_gpus[gpu].resident;
    nvs_swap_unlock();
    bool granted = nvs_memory_may_grow(gpu, resident);
    if (list_if_closed(segment)) /* the lease ended while we asked */
        return CUDA_SUCCESS;
    result = granted ? nvs_segment_back(segment) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS) {
        nvs_segment_destroy(segment);
        return result;
    }
    nvs_swap_lock();
    nvs_segment_list(segment);
    nvs_swap_unlock();
    return CUDA_SUCCESS;
}

static nvs_segment *take_in_arena(uint32_t gpu, CUdeviceptr *out, uint64_t bytes, uint64_t *arenas_bytes)
{
    nvs_segment *found = NULL;
    *arenas_bytes = 0;
    nvs_swap_lock();
    for (nvs_segment *at = nvs_swap_gpus[gpu].first; at != NULL && at->used != NULL && found == NULL; at = at->next) {
        *arenas_bytes += at->bytes;
        if (nvs_arena_take(at, bytes, out))
            found = at;
    }
    nvs_swap_unlock();
    return found;
}

static CUresult allocate(uint32_t gpu, CUdeviceptr *out, size_t bytes, void **kept)
{
    const uint64_t unit = nvs_swap_unit(gpu);
    const uint32_t chunk_bytes = chunk_bytes_for(gpu, unit);
    nvs_segment *segment;
    uint64_t arenas;
    CUresult result = CUDA_SUCCESS;
    if (bytes > UINT64_MAX / 2)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (bytes >= unit) {
        result = make(gpu, round_up(bytes, unit), chunk_bytes, false, out, 0, &segment);
    } else if ((segment = take_in_arena(gpu, out, bytes, &arenas)) == NULL) {
        uint64_t size = unit; /* as much again as there is, so that a program of few small allocations stays small */
        while (size < arenas && size < chunk_bytes)
            size *= 2;
        result = make(gpu, size, (uint32_t)size, true, out, bytes, &segment);
        if (result == CUDA_ERROR_OUT_OF_MEMORY && size > unit)
            result = make(gpu, unit, (uint32_t)unit, true, out, bytes, &segment);
    }
    if (result == CUDA_SUCCESS)
        *kept = segment;
    return result;
}

/* An arena that holds nothing is kept if it is the only one: the next small allocation needs it again. */
static bool arena_ends(const nvs_segment *arena)
{
    if (arena->free_blocks != arena->blocks)
        return false;
    for (const nvs_segment *at = nvs_swap_gpus[arena->gpu].first; at != NULL && at->used != NULL; at = at->next)
        if (at != arena)
            return true;
    return arena->bytes != nvs_swap_unit(arena->gpu);
}

static CUresult release(uint32_t gpu, CUdeviceptr pointer, size_t bytes, void *kept)
{
    nvs_segment *segment = kept;
    nvs_swap_lock();
    bool ends = true;
    if (segment->used != NULL) {
        nvs_arena_give(segment, pointer, bytes);
        ends = arena_ends(segment);
    }
    bool destroy = ends && nvs_segment_doom(segment);
    nvs_swap_unlock();
    if (destroy)
        nvs_segment_destroy(segment);
    return CUDA_SUCCESS;
}

static nvs_status evict(uint32_t gpu, uint64_t bytes, nvs_progress *progress, void *argument, uint64_t *moved_bytes)
{
    uint64_t freed = drop_empty(gpu);
    nvs_status status = NVS_OK;
    *moved_bytes = 0;
    if (freed < bytes)
        status = nvs_swap_move(gpu, true, bytes - freed, progress, argument, moved_bytes);
    *moved_bytes += freed;
    return status;
}

static nvs_status restore(uint32_t gpu, uint64_t bytes, nvs_progress *progress, void *argument, uint64_t *moved_bytes)
{
    return nvs_swap_move(gpu, false, bytes, progress, argument, moved_bytes);
}

/* Opens the gate if nothing is missing on the GPU. */
static bool open_if_complete(uint32_t gpu, bool paced, uint64_t *missing)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    nvs_swap_lock();
    *missing = of->committed > of->resident ? of->committed - of->resident : 0;
    /* Open already, and only told whether to pace: an allocation under way brings its own memory. */
    if (*missing == 0 || !gate_is_closed(gpu)) {
        if (gate_is_closed(gpu)) /* a new lease: whatever room was granted under the last one may be taken */
            nvs_memory_set_reserved(gpu, of->resident);
        *missing = 0;
        nvs_gate_open(gpu, paced);
    }
    nvs_swap_unlock();
    return *missing == 0;
}

static bool open_gate(uint32_t gpu, bool paced)
{
    enum { TRIES = 3 }; /* others of the program's threads may allocate meanwhile */
    uint64_t missing, moved;
    for (int i = 0; i < TRIES; i++) {
        if (open_if_complete(gpu, paced, &missing))
            return true;
        /* An allocation since the coordinator last heard from us, or a Restore that failed. */
        if (nvs_swap_move(gpu, false, missing, NULL, NULL, &moved) != NVS_OK || moved == 0)
            return false;
    }
    return open_if_complete(gpu, paced, &missing);
}

static void figures(uint32_t gpu, uint64_t *committed, uint64_t *resident)
{
    nvs_swap_lock();
    *committed = nvs_swap_gpus[gpu].committed;
    *resident = nvs_swap_gpus[gpu].resident;
    nvs_swap_unlock();
    if (*committed < *resident)
        *committed = *resident; /* a segment is being freed */
}

static void context_gone(CUcontext context)
{
    nvs_swap_move_context_gone(context);
    nvs_host_context_gone(context);
}

bool nvs_backend_swap_works(uint32_t gpu)
{
    return nvs_swap_unit(gpu) != 0;
}

void nvs_backend_swap_allow(uint32_t gpu, uint32_t accessor)
{
    nvs_swap_allow(gpu, accessor);
}

void nvs_backend_swap_after_fork(void)
{
    nvs_swap_segments_after_fork();
    nvs_swap_move_after_fork();
    nvs_host_after_fork();
}

const nvs_backend nvs_backend_swap = {
    .name = "swap",
    .kind = NVS_MEMORY_REDIRECTED,
    .movable = true,
    .chunked = true,
    .allocate = allocate,
    .release = release,
    .evict = evict,
    .restore = restore,
    .context_gone = context_gone,
    .open_gate = open_gate,
    .figures = figures,
};
