/* See moving.h. */
#include "memory/moving.h"

#include "base/config.h"
#include "gate/gate.h"
#include "host/pool.h"
#include "memory/backends/mode.h"
#include "memory/quota/deferred.h"
#include "memory/quota/graph_memory.h"
#include "memory/quota/quota.h"
#include "memory/records/allocation.h"
#include "memory/records/ledger.h"

#include <stdatomic.h>

static uint64_t load(_Atomic uint64_t *value)
{
    return atomic_load_explicit(value, memory_order_relaxed); /* see records/ledger.h */
}

void nvs_memory_usage(uint32_t gpu, nvs_usage *out)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    /* See memory/records/ledger.h.  They are not read at one moment, so each is limited by the others. */
    uint64_t allocated = atomic_load_explicit(&of->charged, memory_order_seq_cst);
    uint64_t chunked = load(&of->chunked), movable = load(&of->movable);
    int64_t evicted = atomic_load_explicit(&of->evicted, memory_order_relaxed);
    if (nvs_gate_dead(gpu)) { /* page faults of other programs evict managed memory of a dead context */
        allocated -= movable < allocated ? movable : allocated;
        movable = 0;
        evicted = 0;
    }
    uint64_t others = allocated > chunked ? allocated - chunked : 0, pinned = others > movable ? others - movable : 0;
    uint64_t out_bytes = evicted < 0 ? 0 : (uint64_t)evicted;
    if (nvs_config.memory_mode == NVS_MODE_SWAP) { /* counted in chunks, which fill the card and move */
        nvs_chunk_figures chunks;
        nvs_memory_chunked->figures(gpu, &chunks);
        allocated = chunks.committed_bytes + others;
        out_bytes += chunks.committed_bytes - chunks.resident_bytes;
        pinned += chunks.pinned_bytes;
    }
    if (out_bytes > allocated)
        out_bytes = allocated;
    out->allocated_bytes = allocated;
    out->resident_bytes = allocated - out_bytes;
    out->pinned_bytes = pinned < out->resident_bytes ? pinned : out->resident_bytes;
    out->host_bytes = out_bytes;
}

void nvs_memory_virtual_info(uint32_t gpu, uint64_t *free_bytes, uint64_t *total_bytes)
{
    nvs_quota_virtual_info(gpu, nvs_memory_backend(gpu)->movable, free_bytes, total_bytes);
}

static uint64_t resident_bytes(uint32_t gpu)
{
    nvs_usage usage;
    nvs_memory_usage(gpu, &usage);
    return usage.resident_bytes;
}

/* Moves the rest of an order in managed memory that the application allocated, which is in no chunk. */
static nvs_status move_managed(uint32_t gpu, bool out, uint64_t bytes, uint64_t *moved_bytes)
{
    uint64_t more = 0;
    if (!nvs_memory_backend(gpu)->chunked || *moved_bytes >= bytes || nvs_allocation_extents(gpu, out, NULL, 0) == 0)
        return NVS_OK;
    const nvs_status status = nvs_backend_managed.move(gpu, out, bytes - *moved_bytes, NULL, &more);
    *moved_bytes += more;
    return status;
}

nvs_status nvs_memory_evict(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    uint64_t before = resident_bytes(gpu);
    nvs_memory_reap(gpu, false); /* freed memory makes room without a transfer */
    (void)nvs_graph_memory_trim(gpu);
    uint64_t now = resident_bytes(gpu), freed = now < before ? before - now : 0;
    nvs_status status = NVS_OK;
    *moved_bytes = 0;
    if (freed < bytes)
        status = nvs_memory_backend(gpu)->move(gpu, true, bytes - freed, watch, moved_bytes);
    *moved_bytes += freed;
    return status == NVS_OK ? move_managed(gpu, true, bytes, moved_bytes) : status;
}

nvs_status nvs_memory_restore(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    const nvs_status status = nvs_memory_backend(gpu)->move(gpu, false, bytes, watch, moved_bytes);
    return status == NVS_OK ? move_managed(gpu, false, bytes, moved_bytes) : status;
}

bool nvs_memory_open_gate(uint32_t gpu, bool paced, uint64_t *missing_bytes)
{
    if (nvs_config.memory_mode == NVS_MODE_SWAP && nvs_memory_backend(gpu)->chunked)
        return nvs_memory_chunked->open_gate(gpu, paced, missing_bytes);
    *missing_bytes = 0;
    nvs_gate_open(gpu, paced);
    return true;
}

void nvs_memory_prepare_host(uint32_t gpu, uint64_t bytes)
{
    if (nvs_config.memory_mode == NVS_MODE_SWAP)
        nvs_host_ahead(gpu, bytes);
}
