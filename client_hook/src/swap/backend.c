/* Memory mode `swap`: device allocations become reserved addresses, backed by chunks of physical memory that come and go.
 *
 * Without a lease (gate closed) an allocation succeeds without physical memory; it gets it when the lease is granted, in the
 * Restore before the Grant.  With the gate open it is backed at once, after asking the coordinator for room where that wants to be
 * asked; what finds no room is out of memory, as an application expects it.
 *
 * Chunks are up to 64 MiB, and smaller where the capacity is small, so that what moves is close to what must.  Allocations of up to
 * half a chunk share chunks, the small ones (less than 2 MiB) among themselves: what a hand-over costs beside the bytes is a time for
 * each chunk (docs/decisions/swap-chunks.md), and frameworks allocate in pieces of 2 and 20 MiB.
 *
 * Access by RDMA does not exist for this memory: who asks gets the driver's error and a word in the log.  Legacy IPC pins it (ipc/ipc.h).
 */
#include "base/clock.h"
#include "base/log.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "memory/memory.h"
#include "memory/quota/pins.h"
#include "swap/swap.h"

#define LARGEST_CHUNK (NVS_HOST_GRAIN * NVS_CHUNK_GRAINS)

#define CROWD_PATIENCE_NS 2000000000u

/* Threads that make an arena, and how many were made.  Relaxed: hints, to which nothing else belongs. */
static _Atomic uint32_t makers[NVS_MAX_GPUS], arenas_made[NVS_MAX_GPUS];

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

/* Gate of the agent: see swap.h for why it is looked at under the lock.  Acquire pairs with the agent's stores in gate/gate.c. */
static bool gate_is_closed(uint32_t gpu)
{
    return (atomic_load_explicit(&nvs_hot.gates[gpu], memory_order_acquire) & NVS_GATE_CLOSED) != 0;
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
            nvs_segment_mark_dead(at);
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
        nvs_segment_moved(segment, -(int64_t)segment->on_gpu);
        nvs_segment_list(segment);
    }
    nvs_swap_unlock();
    return closed;
}

typedef struct wanted { /* what a new segment is to be */
    uint32_t gpu;
    uint64_t bytes, chunk_bytes;
    uint64_t first_bytes; /* not 0: an arena of blocks of `block_bytes`, in which so much is taken at once */
    uint32_t block_bytes;
    nvs_own *own;         /* NULL: no handle of the application */
} wanted;

/* Backs a new segment with the memory of the GPU that work under the lease needs at once.
 *
 * The memory that was granted may still belong to another program that has just ended: hence the patience. */
static CUresult back(nvs_segment *segment)
{
    const uint32_t gpu = segment->gpu;
    uint64_t waited_ns = 0;
    nvs_swap_lock();
    const uint64_t resident = nvs_swap_gpus[gpu].resident;
    nvs_swap_unlock();
    const bool granted = nvs_memory_may_grow(gpu, resident);
    if (list_if_closed(segment)) /* the lease ended while we asked */
        return CUDA_SUCCESS;
    if (!granted)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result;
    do
        result = nvs_segment_back(segment);
    while (result == CUDA_ERROR_OUT_OF_MEMORY && nvs_swap_patience(&waited_ns));
    if (result != CUDA_SUCCESS)
        return result;
    nvs_swap_lock();
    nvs_segment_list(segment);
    nvs_swap_unlock();
    return CUDA_SUCCESS;
}

/* A new segment, listed and fit for use as things are: see the head of the file. */
static CUresult make_now(const wanted *as, CUdeviceptr *first, nvs_segment **out)
{
    nvs_segment *segment;
    bool closed;
    CUresult result = nvs_segment_new(as->gpu, as->bytes, as->chunk_bytes, as->block_bytes, &segment);
    if (result != CUDA_SUCCESS)
        return result;
    if (as->first_bytes != 0)
        nvs_arena_take(segment, as->first_bytes, first); /* before others can see it */
    else
        *first = segment->base;
    segment->own = as->own;
    bool fits = commit(segment, &closed);
    if (!fits) {
        drop_empty(as->gpu);
        fits = commit(segment, &closed);
    }
    if (!fits)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    else if (!closed)
        result = back(segment);
    if (result != CUDA_SUCCESS) {
        segment->own = NULL; /* still the caller's */
        nvs_segment_destroy(segment);
        return result;
    }
    *out = segment;
    return CUDA_SUCCESS;
}

/* Where other GPUs reach the memory it must be there at once, so that is done under the lease. */
static CUresult make(const wanted *as, CUdeviceptr *first, nvs_segment **out)
{
    if (!nvs_swap_is_reached(as->gpu))
        return make_now(as, first, out);
    nvs_slot *const slot = nvs_gate_enter(as->gpu);
    const bool may = nvs_pins_may(as->gpu, as->bytes);
    const CUresult result = may ? make_now(as, first, out) : CUDA_ERROR_OUT_OF_MEMORY;
    if (may)
        nvs_pins_settled(as->gpu, as->bytes);
    else
        nvs_pins_say_refused("memory that another GPU reaches");
    nvs_gate_leave(slot, as->gpu);
    return result;
}

static nvs_segment *take_in_arena(uint32_t gpu, CUdeviceptr *out, uint64_t bytes, uint32_t block_bytes, uint64_t *arenas_bytes)
{
    nvs_segment *found = NULL;
    *arenas_bytes = 0;
    nvs_swap_lock();
    for (nvs_segment *at = nvs_swap_gpus[gpu].first; at != NULL && at->used != NULL && found == NULL; at = at->next) {
        if (at->block_bytes != block_bytes || at->chunks[0].state == NVS_CHUNK_LOST)
            continue;
        *arenas_bytes += at->bytes;
        if (nvs_arena_take(at, bytes, out))
            found = at;
    }
    nvs_swap_unlock();
    return found;
}

/* In an arena that there is, or in a new one: as much again as there is, so that a program of few allocations stays small. */
static CUresult try_in_arena(const wanted *as, CUdeviceptr *out, nvs_segment **segment)
{
    uint64_t arenas;
    const uint64_t unit = nvs_swap_unit(as->gpu), least = round_up(as->first_bytes, unit);
    *segment = take_in_arena(as->gpu, out, as->first_bytes, as->block_bytes, &arenas);
    if (*segment != NULL)
        return CUDA_SUCCESS;
    wanted new = *as;
    new.bytes = arenas > as->chunk_bytes ? as->chunk_bytes : arenas / unit * unit;
    if (new.bytes < least)
        new.bytes = least;
    new.chunk_bytes = new.bytes;
    atomic_fetch_add_explicit(&makers[as->gpu], 1, memory_order_relaxed); /* see makers */
    CUresult result = make(&new, out, segment);
    if (result == CUDA_ERROR_OUT_OF_MEMORY && new.bytes > least) {
        new.bytes = new.chunk_bytes = least;
        result = make(&new, out, segment);
    }
    if (result == CUDA_SUCCESS)
        atomic_fetch_add_explicit(&arenas_made[as->gpu], 1, memory_order_relaxed); /* see makers */
    atomic_fetch_sub_explicit(&makers[as->gpu], 1, memory_order_relaxed);  /* see makers */
    return result;
}

/* Threads that find no place all at once make an arena each, which may be more than there is, with room for all of them.  So who is
 * refused looks again as long as others make some. */
static CUresult allocate_in_arena(const wanted *as, CUdeviceptr *out, nvs_segment **segment)
{
    const uint64_t until_ns = nvs_now_ns() + CROWD_PATIENCE_NS;
    for (;;) { /* relaxed: see makers */
        uint64_t waited_ns = 0;
        const uint32_t made = atomic_load_explicit(&arenas_made[as->gpu], memory_order_relaxed);
        const CUresult result = try_in_arena(as, out, segment);
        const bool others = atomic_load_explicit(&makers[as->gpu], memory_order_relaxed) != 0 ||
                            atomic_load_explicit(&arenas_made[as->gpu], memory_order_relaxed) != made;
        if (result != CUDA_ERROR_OUT_OF_MEMORY || !others || nvs_now_ns() > until_ns)
            return result;
        (void)nvs_swap_patience(&waited_ns);
    }
}

static CUresult allocate(uint32_t gpu, CUdeviceptr *out, size_t bytes, void **kept)
{
    const uint64_t unit = nvs_swap_unit(gpu);
    nvs_segment *segment;
    CUresult result;
    if (bytes > UINT64_MAX / 2)
        return CUDA_ERROR_OUT_OF_MEMORY;
    wanted as = {.gpu = gpu, .bytes = round_up(bytes, unit), .chunk_bytes = chunk_bytes_for(gpu, unit)};
    const bool small = bytes < unit;
    if (small || bytes <= as.chunk_bytes / 2) {
        as.first_bytes = bytes;
        as.block_bytes = small ? NVS_ARENA_BLOCK : (uint32_t)unit;
        result = allocate_in_arena(&as, out, &segment);
    } else {
        result = make(&as, out, &segment);
    }
    if (result == CUDA_SUCCESS)
        *kept = segment;
    return result;
}

/* One that may have to be handed to the driver as one handle is one chunk. */
static CUresult create(uint32_t gpu, size_t bytes, const CUmemAllocationProp *properties, void **kept)
{
    const uint64_t unit = nvs_swap_unit(gpu);
    const bool whole = properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE;
    nvs_segment *segment;
    CUdeviceptr ignored;
    if (bytes == 0 || bytes % unit != 0 || bytes > UINT64_MAX / 2 || (whole && bytes > LARGEST_CHUNK))
        return CUDA_ERROR_NOT_SUPPORTED;
    nvs_own *own = nvs_own_new(properties);
    if (own == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const wanted as = {.gpu = gpu, .bytes = bytes, .chunk_bytes = whole ? bytes : chunk_bytes_for(gpu, unit), .own = own};
    CUresult result = make(&as, &ignored, &segment);
    if (result == CUDA_SUCCESS)
        *kept = segment;
    else
        nvs_own_free(own);
    return result;
}

/* An arena that holds nothing is kept if it is the only one of small ones: the next small allocation needs it again. */
static bool arena_ends(const nvs_segment *arena)
{
    if (arena->free_blocks != arena->blocks)
        return false;
    for (const nvs_segment *at = nvs_swap_gpus[arena->gpu].first; at != NULL && at->used != NULL; at = at->next)
        if (at != arena && at->block_bytes == NVS_ARENA_BLOCK)
            return true;
    return arena->block_bytes != NVS_ARENA_BLOCK || arena->bytes != nvs_swap_unit(arena->gpu);
}

static CUresult release(uint32_t gpu, CUdeviceptr pointer, size_t bytes, void *kept)
{
    nvs_segment *segment = kept;
    if (segment->own == NULL)
        nvs_swap_freed(gpu, pointer);
    nvs_swap_lock();
    bool ends = true;
    if (segment->used != NULL) {
        nvs_arena_give(segment, pointer, bytes);
        ends = arena_ends(segment);
    }
    bool destroy = ends && nvs_segment_mark_dead(segment);
    nvs_swap_unlock();
    if (destroy)
        nvs_segment_destroy(segment);
    return CUDA_SUCCESS;
}

static nvs_status evict(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    const bool reached = nvs_swap_is_reached(gpu);
    uint64_t freed = drop_empty(gpu);
    nvs_status status = NVS_OK;
    *moved_bytes = 0;
    if (freed < bytes && !reached) /* else the coordinator knows from the reports that it stays, and asking is no error */
        status = nvs_swap_move(gpu, true, bytes - freed, watch, moved_bytes);
    *moved_bytes += freed;
    return status;
}

/* What comes in at a grant by itself: the coordinator may know nothing of it, and others may have the room. */
static bool may_come(uint32_t gpu, uint64_t bytes)
{
    nvs_swap_lock();
    uint64_t resident = nvs_swap_gpus[gpu].resident;
    nvs_swap_unlock();
    return bytes == 0 || nvs_memory_may_grow(gpu, resident + bytes);
}

/* Bytes without memory of the GPU; locked. */
static uint64_t missing_bytes(uint32_t gpu)
{
    const nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    return of->committed > of->resident ? of->committed - of->resident : 0;
}

static nvs_status restore(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    *moved_bytes = 0;
    nvs_swap_lock();
    const uint64_t missing = missing_bytes(gpu);
    nvs_swap_unlock();
    if (watch != NULL && watch->asks && !may_come(gpu, bytes < missing ? bytes : missing))
        return NVS_NO_MEMORY;
    return nvs_swap_move(gpu, false, bytes, watch, moved_bytes);
}

/* Opens the gate if nothing is missing. */
static bool open_gate(uint32_t gpu, bool paced, uint64_t *missing)
{
    nvs_swap_lock();
    const uint64_t resident = nvs_swap_gpus[gpu].resident;
    const bool closed = gate_is_closed(gpu);
    /* Open already, and only told whether to pace: an allocation under way brings its own memory. */
    *missing = closed ? missing_bytes(gpu) : 0;
    if (closed) /* a new lease: whatever room was granted under the last one may be taken */
        nvs_memory_set_reserved(gpu, resident);
    if (*missing == 0)
        nvs_gate_open(gpu, paced);
    nvs_swap_unlock();
    return *missing == 0;
}

static void figures(uint32_t gpu, nvs_chunk_figures *out)
{
    const nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    nvs_swap_lock();
    *out = (nvs_chunk_figures){of->committed, of->resident, of->reached ? of->resident : of->pinned};
    nvs_swap_unlock();
    if (out->committed_bytes < out->resident_bytes)
        out->committed_bytes = out->resident_bytes; /* a segment is being freed */
}

static void context_gone(CUcontext context)
{
    nvs_swap_lanes_context_gone(context);
    nvs_host_context_gone(context);
}

static bool works(uint32_t gpu)
{
    return nvs_swap_unit(gpu) != 0;
}

NVS_FORK_CODE void nvs_swap_after_fork(void)
{
    nvs_swap_segments_after_fork();
    nvs_swap_lanes_after_fork();
    nvs_host_after_fork();
}

const nvs_backend nvs_backend_swap = {
    .name = "swap",
    .kind = NVS_MEMORY_REDIRECTED,
    .movable = true,
    .chunked = true,
    .works = works,
    .allocate = allocate,
    .create = create,
    .release = release,
    .evict = evict,
    .restore = restore,
    .context_gone = context_gone,
    .open_gate = open_gate,
    .figures = figures,
};
