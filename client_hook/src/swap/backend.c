/* Memory mode `swap` as a backend (memory/backend.h): allocations, moves, the gate, figures.
 *
 * While the gate is closed an allocation succeeds without physical memory; the mover maps it before the gate opens.  While the gate is open
 * the allocation is backed at once, after the coordinator has granted the room; without room the call returns out-of-memory.
 *
 * A chunk has up to 64 MiB, and less where the capacity is small, so that a move has little surplus.  Allocations of up to half a chunk share
 * chunks, those below 2 MiB among themselves: frameworks allocate in pieces of 2 and 20 MiB, and a move costs a time for each chunk
 * (docs/decisions/swap-chunks.md).
 *
 * Memory in chunks has no RDMA access: such a call gets the driver's error and a line in the log.
 */
#include "base/process.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "memory/memory.h"
#include "swap/swap.h"

#define LARGEST_CHUNK (NVS_HOST_GRAIN * NVS_CHUNK_GRAINS)

#define RETRY_NS 2000000000u

/* Threads that are making an arena, and arenas made so far.  Relaxed: hints, which order nothing else. */
static _Atomic uint32_t makers[NVS_MAX_GPUS], arenas_made[NVS_MAX_GPUS];

static uint64_t round_up(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* A 64th of the capacity, if that is known.  Larger chunks are faster: each mapping of a chunk waits for other programs' copies. */
static uint32_t chunk_bytes_for(uint32_t gpu, uint64_t unit)
{
    uint64_t wanted = nvs_memory_capacity(gpu) / 64, bytes = unit;
    if (wanted == 0)
        return (uint32_t)LARGEST_CHUNK;
    while (2 * bytes <= wanted && bytes < LARGEST_CHUNK)
        bytes *= 2;
    return (uint32_t)(bytes < LARGEST_CHUNK ? bytes : LARGEST_CHUNK);
}

/* Whether no work of the program can reach the GPU's memory: its gate and those of linked GPUs are closed.  Acquire pairs with the agent's stores in
 * gate/gate.c. */
static bool swap_gate_closed(uint32_t gpu)
{
    const uint32_t gpus = nvs_gate_linked_with(gpu);
    bool closed = true;
    for (uint32_t each = 0; each < NVS_MAX_GPUS && closed; each++)
        closed = (gpus >> each & 1) == 0 || (atomic_load_explicit(&nvs_hot.gates[each], memory_order_acquire) & NVS_GATE_CLOSED) != 0;
    return closed;
}

/* Counts a new segment's bytes.  False: all segments together could never be resident at once. */
static bool commit(nvs_segment *segment, bool *closed)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[segment->gpu];
    const uint64_t ceiling = nvs_memory_ceiling(segment->gpu);
    nvs_swap_lock();
    *closed = swap_gate_closed(segment->gpu);
    bool fits = ceiling == 0 || of->committed + segment->bytes <= ceiling;
    if (fits) {
        of->committed += segment->bytes;
        segment->part.committed = segment->bytes;
        if (*closed)
            nvs_segment_list(segment);
        else
            nvs_segment_moved(segment, (int64_t)segment->bytes);
    } else {
        segment->part.committed = 0; /* nothing to subtract when it is destroyed */
    }
    nvs_swap_unlock();
    return fits;
}

/* Empty arenas need no copy. */
static uint64_t swap_drop_empty(uint32_t gpu)
{
    uint64_t freed = 0;
    for (;;) {
        nvs_swap_lock();
        nvs_segment *at = nvs_swap_gpus[gpu].first;
        while (at != NULL && at->arena.used != NULL && (!nvs_arena_is_empty(&at->arena) || at->users != 0))
            at = at->node.next;
        at = at != NULL && at->arena.used != NULL ? at : NULL;
        uint64_t resident = at != NULL ? at->part.resident : 0;
        if (at != NULL)
            nvs_segment_mark_dead(at);
        nvs_swap_unlock();
        if (at == NULL)
            return freed;
        nvs_segment_destroy(at);
        freed += resident;
    }
}

/* True: the gate has closed, so the segment needs no memory yet. */
static bool list_if_closed(nvs_segment *segment)
{
    nvs_swap_lock();
    bool closed = swap_gate_closed(segment->gpu);
    if (closed) {
        nvs_segment_moved(segment, -(int64_t)segment->part.resident);
        nvs_segment_list(segment);
    }
    nvs_swap_unlock();
    return closed;
}

typedef struct wanted { /* a new segment */
    uint32_t gpu;
    uint64_t bytes, chunk_bytes;
    uint64_t first_bytes; /* not 0: an arena of blocks of `block_bytes`, and the size of its first allocation */
    uint32_t block_bytes;
    nvs_vmm_handle *vmm;  /* NULL: not a handle of the application */
} wanted;

/* Gives a new segment physical memory, under the lease.  A program that has just ended may still have the memory that was granted: hence
 * the retries. */
static CUresult back(nvs_segment *segment)
{
    const uint32_t gpu = segment->gpu;
    uint64_t waited_ns = 0;
    nvs_swap_lock();
    const uint64_t resident = nvs_swap_gpus[gpu].resident;
    nvs_swap_unlock();
    const bool granted = nvs_memory_may_grow(gpu, resident);
    if (list_if_closed(segment)) /* the lease ended during the request */
        return CUDA_SUCCESS;
    if (!granted)
        return CUDA_ERROR_OUT_OF_MEMORY;
    enum { MOST_TIMES = 16 }; /* room is found each time, and something that the coordinator does not see has the memory */
    CUresult result;
    for (uint32_t times = 0;;) {
        result = nvs_segment_back(segment);
        if (result != CUDA_ERROR_OUT_OF_MEMORY)
            break;
        if (nvs_swap_pause(&waited_ns))
            continue;
        if (times++ == MOST_TIMES || !nvs_memory_make_room(gpu, segment->bytes))
            break;
        if (list_if_closed(segment)) /* as above */
            return CUDA_SUCCESS;
    }
    if (result != CUDA_SUCCESS)
        return result;
    nvs_swap_lock();
    nvs_segment_list(segment);
    nvs_swap_unlock();
    return CUDA_SUCCESS;
}

/* A new segment, listed, with physical memory if the gate is open. */
static CUresult make_segment(const wanted *as, CUdeviceptr *first, nvs_segment **out)
{
    nvs_segment *segment;
    bool closed;
    CUresult result = nvs_segment_new(as->gpu, as->bytes, as->chunk_bytes, as->block_bytes, &segment);
    if (result != CUDA_SUCCESS)
        return result;
    nvs_swap_lane_ahead(as->gpu);
    if (as->first_bytes != 0) /* the first block, before other threads can see the arena */
        nvs_arena_take(&segment->arena, as->first_bytes, &(uint64_t){0});
    *first = segment->base;
    segment->vmm = as->vmm;
    bool fits = commit(segment, &closed);
    if (!fits) {
        swap_drop_empty(as->gpu);
        fits = commit(segment, &closed);
    }
    if (!fits)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    else if (!closed)
        result = back(segment);
    if (result != CUDA_SUCCESS) {
        segment->vmm = NULL; /* the caller keeps it */
        nvs_segment_destroy(segment);
        return result;
    }
    *out = segment;
    return CUDA_SUCCESS;
}

static nvs_segment *take_in_arena(uint32_t gpu, CUdeviceptr *out, uint64_t bytes, uint32_t block_bytes, uint64_t *arenas_bytes)
{
    nvs_segment *found = NULL;
    uint64_t offset;
    *arenas_bytes = 0;
    nvs_swap_lock();
    for (nvs_segment *at = nvs_swap_gpus[gpu].first; at != NULL && at->arena.used != NULL && found == NULL; at = at->node.next) {
        if (at->arena.block_bytes != block_bytes || at->chunks[0].state == NVS_CHUNK_LOST)
            continue;
        *arenas_bytes += at->bytes;
        if (nvs_arena_take(&at->arena, bytes, &offset))
            found = at;
    }
    if (found != NULL)
        *out = found->base + offset;
    nvs_swap_unlock();
    return found;
}

/* In an existing arena, or in a new one that doubles their total size: a program with few allocations stays small. */
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
    CUresult result = make_segment(&new, out, segment);
    if (result == CUDA_ERROR_OUT_OF_MEMORY && new.bytes > least) {
        new.bytes = new.chunk_bytes = least;
        result = make_segment(&new, out, segment);
    }
    if (result == CUDA_SUCCESS)
        atomic_fetch_add_explicit(&arenas_made[as->gpu], 1, memory_order_relaxed); /* see makers */
    atomic_fetch_sub_explicit(&makers[as->gpu], 1, memory_order_relaxed);  /* see makers */
    return result;
}

/* Several threads that find no room make an arena each, and together these may exceed the room, though each arena has space for all threads.
 * So a refused thread tries again while other threads make arenas. */
static CUresult allocate_in_arena(const wanted *as, CUdeviceptr *out, nvs_segment **segment)
{
    const uint64_t until_ns = nvs_now_ns() + RETRY_NS;
    for (;;) { /* relaxed: see makers */
        uint64_t waited_ns = 0;
        const uint32_t made = atomic_load_explicit(&arenas_made[as->gpu], memory_order_relaxed);
        const CUresult result = try_in_arena(as, out, segment);
        const bool others = atomic_load_explicit(&makers[as->gpu], memory_order_relaxed) != 0 ||
                            atomic_load_explicit(&arenas_made[as->gpu], memory_order_relaxed) != made;
        if (result != CUDA_ERROR_OUT_OF_MEMORY || !others || nvs_now_ns() > until_ns)
            return result;
        (void)nvs_swap_pause(&waited_ns);
    }
}

static CUresult swap_allocate(uint32_t gpu, CUdeviceptr *out, size_t bytes, void **kept)
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
        result = make_segment(&as, out, &segment);
    }
    if (result == CUDA_SUCCESS)
        *kept = segment;
    return result;
}

/* A handle that the program may export is in chunks like any other (unite.c). */
static CUresult swap_create(uint32_t gpu, size_t bytes, const CUmemAllocationProp *properties, void **kept)
{
    const uint64_t unit = nvs_swap_unit(gpu);
    nvs_segment *segment;
    CUdeviceptr ignored;
    if (bytes == 0 || bytes % unit != 0 || bytes > UINT64_MAX / 2)
        return CUDA_ERROR_NOT_SUPPORTED;
    nvs_vmm_handle *vmm = nvs_vmm_handle_new(properties);
    if (vmm == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const wanted as = {.gpu = gpu, .bytes = bytes, .chunk_bytes = chunk_bytes_for(gpu, unit), .vmm = vmm};
    CUresult result = make_segment(&as, &ignored, &segment);
    if (result == CUDA_SUCCESS)
        *kept = segment;
    else
        nvs_vmm_handle_free(vmm);
    return result;
}

/* True: the arena is empty, and not the last small one, which the next small allocation needs. */
static bool is_surplus(const nvs_segment *segment)
{
    if (!nvs_arena_is_empty(&segment->arena))
        return false;
    if (segment->arena.block_bytes != NVS_ARENA_BLOCK || segment->bytes != nvs_swap_unit(segment->gpu))
        return true;
    for (const nvs_segment *at = nvs_swap_gpus[segment->gpu].first; at != NULL && at->arena.used != NULL; at = at->node.next)
        if (at != segment && at->arena.block_bytes == NVS_ARENA_BLOCK)
            return true;
    return false;
}

static CUresult swap_release(uint32_t gpu, CUdeviceptr pointer, size_t bytes, void *kept)
{
    nvs_segment *segment = kept;
    if (segment->vmm == NULL)
        nvs_swap_freed(gpu, pointer);
    nvs_swap_lock();
    bool ends = true;
    if (segment->arena.used != NULL) {
        nvs_arena_give(&segment->arena, pointer - segment->base, bytes);
        ends = is_surplus(segment);
    }
    bool destroy = ends && nvs_segment_mark_dead(segment);
    nvs_swap_unlock();
    if (destroy)
        nvs_segment_destroy(segment);
    return CUDA_SUCCESS;
}

/* --- moves, the gate, figures --- */

/* Locked: bytes that are not on the GPU. */
static uint64_t missing_bytes(uint32_t gpu)
{
    const nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    return of->committed > of->resident ? of->committed - of->resident : 0;
}

/* No promise covers the memory that a grant restores: other programs may have the room. */
static bool may_restore(uint32_t gpu, uint64_t most)
{
    nvs_swap_lock();
    const uint64_t resident = nvs_swap_gpus[gpu].resident, missing = missing_bytes(gpu), bytes = missing < most ? missing : most;
    nvs_swap_unlock();
    return bytes == 0 || nvs_memory_may_grow(gpu, resident + bytes);
}

static nvs_status move(uint32_t gpu, bool out, const nvs_watch *watch, uint64_t *moved_bytes)
{
    if (out)
        *moved_bytes += swap_drop_empty(gpu);
    else if (watch->asks && !may_restore(gpu, watch->left(watch->argument, 0, 0)))
        return NVS_NO_MEMORY;
    const nvs_status status = nvs_swap_move(gpu, out, watch, moved_bytes);
    if (status == NVS_OK && !out)
        nvs_swap_unite_wanted(gpu);
    return status;
}

/* Under one lock for all GPUs, so that no allocation comes between. */
static bool open_gates(uint32_t gpu, uint32_t gpus, uint32_t paced, uint64_t *missing)
{
    bool all = true;
    nvs_swap_lock();
    /* If the gates are open already, only `paced` changes: an allocation under way maps its own memory. */
    const bool closed = swap_gate_closed(gpu);
    *missing = closed ? missing_bytes(gpu) + nvs_swap_gpus[gpu].uniting : 0;
    if (closed) /* a new lease: other programs may use the room that the last one was granted */
        nvs_memory_set_reserved(gpu, nvs_swap_gpus[gpu].resident);
    for (uint32_t each = 0; each < NVS_MAX_GPUS && closed; each++)
        if ((gpus >> each & 1) != 0)
            all = all && missing_bytes(each) + nvs_swap_gpus[each].uniting == 0;
    all = all && *missing == 0;
    for (uint32_t each = 0; each < NVS_MAX_GPUS && all; each++)
        if ((gpus >> each & 1) != 0)
            nvs_gate_open(each, (paced >> each & 1) != 0);
    nvs_swap_unlock();
    return all && gpus != 0;
}

static void figures(uint32_t gpu, nvs_chunk_figures *out)
{
    const nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    nvs_swap_lock();
    *out = (nvs_chunk_figures){of->committed, of->resident, of->pinned};
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
    .kind = NVS_MEMORY_REDIRECTED,
    .movable = true,
    .chunked = true,
    .works = works,
    .allocate = swap_allocate,
    .create = swap_create,
    .release = swap_release,
    .move = move,
    .context_gone = context_gone,
    .open_gates = open_gates,
    .figures = figures,
};
