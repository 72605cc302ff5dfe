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
 * Where memory may run from the host (NVSHARE_OVERSUBSCRIBE, or a bound on what may be resident), what has no place on the GPU is
 * hosted instead (swap_hosted.c).  Which: what comes last, by the order of allocation under a lease, and what a restoration finds no
 * room for.
 *
 * Access by RDMA does not exist for this memory: who asks gets the driver's error and a word in the log.  Legacy IPC pins it (ipc/ipc.h).
 */
#include "base/clock.h"
#include "base/log.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "memory/memory.h"
#include "memory/pins.h"
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
        nvs_segment_moved(segment, -(int64_t)segment->on_gpu);
        nvs_segment_list(segment);
    }
    nvs_swap_unlock();
    return closed;
}

/* May what has no place on the GPU run from the host? */
static bool may_host(uint32_t gpu)
{
    return nvs_memory_runs_from_host(gpu) && nvs_hosted_works(gpu);
}

typedef struct wanted { /* what a new segment is to be */
    uint32_t gpu;
    uint64_t bytes, chunk_bytes;
    uint64_t first_bytes; /* not 0: an arena of blocks of `block_bytes`, in which so much is taken at once */
    uint32_t block_bytes;
    nvs_own *own;         /* NULL: no handle of the application */
} wanted;

/* As many of its first chunks as there is room for. */
static uint64_t chunks_within(const nvs_segment *segment, uint64_t room)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < segment->chunk_count; i++) {
        uint64_t here = nvs_segment_chunk_bytes(segment, i);
        if (here > room - bytes)
            break;
        bytes += here;
    }
    return bytes;
}

static void set_on_gpu(nvs_segment *segment, uint64_t bytes)
{
    nvs_swap_lock();
    nvs_segment_moved(segment, (int64_t)(bytes - segment->on_gpu));
    nvs_swap_unlock();
}

static uint64_t bytes_on_gpu(const nvs_segment *segment)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < segment->chunk_count; i++)
        if (segment->chunks[i].state == NVS_CHUNK_RESIDENT)
            bytes += nvs_segment_chunk_bytes(segment, i);
    return bytes;
}

/* What was granted may still be another program's, which has just ended. */
static CUresult back_patiently(nvs_segment *segment, uint64_t bytes)
{
    uint64_t waited_ns = 0;
    CUresult result;
    do
        result = nvs_segment_back(segment, bytes);
    while (result == CUDA_ERROR_OUT_OF_MEMORY && nvs_swap_patience(&waited_ns));
    return result;
}

/* Gives it the physical memory that work under the lease needs at once: of the GPU, or where it may of the host. */
static CUresult back(nvs_segment *segment)
{
    const uint32_t gpu = segment->gpu;
    const bool host = may_host(gpu);
    uint64_t here = segment->bytes;
    nvs_swap_lock();
    uint64_t resident = nvs_swap_gpus[gpu].resident;
    nvs_swap_unlock();
    if (host) {
        here = chunks_within(segment, nvs_memory_resident_room(gpu, resident - segment->on_gpu));
        set_on_gpu(segment, here);
        resident -= segment->bytes - here;
    }
    bool granted = here == 0 || nvs_memory_may_grow(gpu, resident);
    if (list_if_closed(segment)) /* the lease ended while we asked */
        return CUDA_SUCCESS;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (granted)
        result = host ? nvs_segment_back(segment, here) : back_patiently(segment, here);
    if (host && (result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY)) {
        set_on_gpu(segment, bytes_on_gpu(segment));
        result = nvs_hosted_back(segment);
    }
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
    bool destroy = ends && nvs_segment_doom(segment);
    nvs_swap_unlock();
    if (destroy)
        nvs_segment_destroy(segment);
    return CUDA_SUCCESS;
}

/* What is above the bound that the coordinator set. */
static uint64_t excess(uint32_t gpu)
{
    nvs_swap_lock();
    uint64_t resident = nvs_swap_gpus[gpu].resident;
    nvs_swap_unlock();
    return may_host(gpu) ? nvs_memory_resident_excess(gpu, resident) : 0;
}

static nvs_status evict(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    const uint64_t too_much = excess(gpu);
    const bool reached = nvs_swap_is_reached(gpu);
    uint64_t freed = drop_empty(gpu);
    nvs_status status = NVS_OK;
    *moved_bytes = 0;
    if (bytes < too_much)
        bytes = too_much;
    if (freed < bytes && !reached) /* else the coordinator knows from the reports that it stays, and asking is no error */
        status = nvs_swap_move(gpu, true, bytes - freed, watch, moved_bytes);
    *moved_bytes += freed;
    return status;
}

/* What is missing, what of it the GPU has room for, and whether the rest is to be hosted. */
static void look(uint32_t gpu, uint64_t *missing, uint64_t *hosted, uint64_t *room, bool *host_rest)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    nvs_swap_lock();
    uint64_t there = of->resident + of->hosted, resident = of->resident;
    *missing = of->committed > there ? of->committed - there : 0;
    *hosted = of->hosted;
    *host_rest = of->host_rest;
    of->host_rest = false;
    nvs_swap_unlock();
    *room = may_host(gpu) ? nvs_memory_resident_room(gpu, resident) : UINT64_MAX;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* What comes in at a grant by itself: the coordinator may know nothing of it, and others may have the room. */
static bool may_come(uint32_t gpu, uint64_t bytes)
{
    nvs_swap_lock();
    uint64_t resident = nvs_swap_gpus[gpu].resident;
    nvs_swap_unlock();
    return bytes == 0 || nvs_memory_may_grow(gpu, resident + bytes);
}

/* Asked for more than is missing, it brings what is hosted to the GPU too. */
static nvs_status restore(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    uint64_t missing, hosted, room, more = 0, too_much = excess(gpu);
    const bool stays = nvs_swap_is_reached(gpu); /* what is there already; what is missing nobody uses yet */
    bool host_rest;
    *moved_bytes = 0;
    if (too_much != 0 && !stays)
        nvs_swap_move(gpu, true, too_much, NULL, &more);
    look(gpu, &missing, &hosted, &room, &host_rest);
    if (bytes > missing && hosted != 0 && room > missing && !stays)
        nvs_hosted_give(gpu, least(bytes, room) - missing, &more);
    if (watch != NULL && watch->asks && !may_come(gpu, least(least(bytes, missing), room))) {
        if (!host_rest)
            return NVS_NO_MEMORY;
        room = 0;
    }
    nvs_status status = nvs_swap_move(gpu, false, least(bytes, room), watch, moved_bytes);
    if (!host_rest || nvs_gate_dead(gpu) || (status != NVS_OK && status != NVS_NO_MEMORY))
        return status;
    status = nvs_hosted_bring(gpu, &more);
    *moved_bytes += more;
    return status;
}

/* Opens the gate if nothing is missing. */
static bool open_gate(uint32_t gpu, bool paced, uint64_t *missing)
{
    const bool host_rest = may_host(gpu);
    nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    nvs_swap_lock();
    *missing = of->committed > of->resident + of->hosted ? of->committed - of->resident - of->hosted : 0;
    /* Open already, and only told whether to pace: an allocation under way brings its own memory. */
    if (*missing == 0 || !gate_is_closed(gpu)) {
        if (gate_is_closed(gpu)) /* a new lease: whatever room was granted under the last one may be taken */
            nvs_memory_set_reserved(gpu, of->resident);
        *missing = 0;
        nvs_gate_open(gpu, paced);
    } else {
        of->host_rest = host_rest; /* in the restoration that comes now */
        nvs_memory_set_reserved(gpu, of->resident);
    }
    nvs_swap_unlock();
    return *missing == 0;
}

static void figures(uint32_t gpu, nvs_chunk_figures *out)
{
    const nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    nvs_swap_lock();
    *out = (nvs_chunk_figures){of->committed, of->resident, of->hosted, of->reached ? of->resident : of->pinned};
    nvs_swap_unlock();
    if (out->committed_bytes < out->resident_bytes + out->hosted_bytes)
        out->committed_bytes = out->resident_bytes + out->hosted_bytes; /* a segment is being freed */
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
