/* The entry points of memory mode `swap` (memory/backend.h): orders of the coordinator, the gate, figures.
 *
 * Memory in chunks has no RDMA access: such a call gets the driver's error and a line in the log.
 */
#include "gate/gate.h"
#include "memory/memory.h"
#include "swap/swap.h"

static nvs_status evict(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    const bool pinned = nvs_swap_gpu_is_pinned(gpu); /* the coordinator knows that from the reports */
    uint64_t freed = nvs_swap_drop_empty(gpu);
    nvs_status status = NVS_OK;
    *moved_bytes = 0;
    if (freed < bytes && !pinned)
        status = nvs_swap_move(gpu, true, bytes - freed, watch, moved_bytes);
    *moved_bytes += freed;
    return status;
}

/* A restoration at a grant that no order asked for: other programs may have the room. */
static bool may_grow(uint32_t gpu, uint64_t bytes)
{
    nvs_swap_lock();
    uint64_t resident = nvs_swap_gpus[gpu].resident;
    nvs_swap_unlock();
    return bytes == 0 || nvs_memory_may_grow(gpu, resident + bytes);
}

/* Locked: bytes that are not on the GPU. */
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
    if (watch != NULL && watch->asks && !may_grow(gpu, bytes < missing ? bytes : missing))
        return NVS_NO_MEMORY;
    return nvs_swap_move(gpu, false, bytes, watch, moved_bytes);
}

static nvs_status move(uint32_t gpu, bool out, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    return out ? evict(gpu, bytes, watch, moved_bytes) : restore(gpu, bytes, watch, moved_bytes);
}

/* Opens the gate if all chunks are on the GPU. */
static bool open_gate(uint32_t gpu, bool paced, uint64_t *missing)
{
    nvs_swap_lock();
    const uint64_t resident = nvs_swap_gpus[gpu].resident;
    const bool closed = nvs_swap_gate_closed(gpu);
    /* If the gate is open already, only `paced` changes: an allocation under way maps its own memory. */
    *missing = closed ? missing_bytes(gpu) : 0;
    if (closed) /* a new lease: other programs may use the room that the last one was granted */
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
    *out = (nvs_chunk_figures){of->committed, of->resident, of->peers.pinned ? of->resident : of->pinned};
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
    .allocate = nvs_swap_allocate,
    .create = nvs_swap_create,
    .release = nvs_swap_release,
    .move = move,
    .context_gone = context_gone,
    .open_gate = open_gate,
    .figures = figures,
};
