/* The quota in front of every allocation, and the way from wrappers and agent to the backend.
 *
 * A GPU's figures are plain atomics: `charged` is what the limit is held against, and moves before the driver is asked
 * for memory.  Each registry entry carries the bytes that it was charged with, so that whoever takes the entry out
 * knows exactly what to give back.
 */
#include "memory/memory.h"

#include "base/config.h"
#include "base/log.h"
#include "base/port.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "host/pool.h"
#include "memory/graph_memory.h"
#include "memory/pins.h"
#include "memory/records/pool_figures.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const uint64_t RESERVE_STEP = UINT64_C(64) << 20;
static const uint64_t KEEP_DEFERRED = UINT64_C(64) << 20;

NVS_FORK_STATE nvs_ledger nvs_ledgers[NVS_MAX_GPUS];

static uint64_t load(_Atomic uint64_t *value)
{
    return atomic_load_explicit(value, memory_order_relaxed); /* see memory/records/ledger.h */
}

static uint64_t smaller_set(uint64_t a, uint64_t b) /* 0 means not set */
{
    return a == 0 || (b != 0 && b < a) ? b : a;
}

static uint64_t limit_of(nvs_ledger *of)
{
    uint64_t limit = load(&of->limit);
    return limit != 0 ? limit : nvs_config.memory_limit;
}

/* The size of the virtual card, 0 when it is the real one. */
static uint64_t card_of(nvs_ledger *of)
{
    return smaller_set(limit_of(of), load(&of->capacity));
}

/* What may be allocated; 0: as much as there is.  One process may not fill more than the capacity, less what others have there that
 * cannot move: what lies beyond could never be resident at once. */
static uint64_t ceiling_of(nvs_ledger *of)
{
    return smaller_set(card_of(of), load(&of->room));
}

/* --- backends --- */

const nvs_backend *nvs_memory_backend(uint32_t gpu)
{
    if (nvs_config.memory_mode == NVS_MODE_DEVICE)
        return &nvs_backend_device;
    if (nvs_config.memory_mode == NVS_MODE_SWAP) {
        if (nvs_memory_chunked->works(gpu))
            return nvs_memory_chunked;
        NVS_LOG_ONCE(NVS_LOG_WARNING, "this GPU has no virtual memory management, which --memory swap needs: using managed");
    }
    if (nvs_backend_managed_works(gpu))
        return &nvs_backend_managed;
    NVS_LOG_ONCE(NVS_LOG_WARNING,
                 "this GPU cannot move managed memory while it is in use: allocations stay on the device, as with --memory device");
    return &nvs_backend_device;
}

bool nvs_memory_manages(uint32_t gpu)
{
    if (!nvs_config.enabled || gpu >= NVS_MAX_GPUS)
        return false;
    nvs_coordinator.attach(gpu);
    return true;
}

/* --- quota --- */

/* Raises `charged` if the limit allows it.  The new total comes out. */
static bool charge(uint32_t gpu, uint64_t bytes, uint64_t *total)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    uint64_t limit = ceiling_of(of);
    uint64_t now = load(&of->charged);
    do {
        if (bytes > UINT64_MAX - now || (limit != 0 && now + bytes > limit))
            return false;
        /* See memory/records/ledger.h. */
    } while (!atomic_compare_exchange_weak_explicit(&of->charged, &now, now + bytes, memory_order_seq_cst,
                                                    memory_order_relaxed));
    *total = now + bytes;
    return true;
}

/* What `freely` follows from has changed.  The agent's threads alone do that where anybody goes by it. */
static void learn_freely(nvs_ledger *of)
{
    /* Relaxed: see memory/records/ledger.h. */
    uint64_t most = ceiling_of(of);
    if (atomic_load_explicit(&of->reserve, memory_order_relaxed) && (most == 0 || load(&of->reserved) < most))
        most = load(&of->reserved);
    else if (most == 0)
        most = UINT64_MAX / 2;
    atomic_store_explicit(&of->freely, most, memory_order_relaxed);
}

uint64_t nvs_memory_capacity(uint32_t gpu)
{
    return load(&nvs_ledgers[gpu].capacity);
}

uint64_t nvs_memory_ceiling(uint32_t gpu)
{
    return ceiling_of(&nvs_ledgers[gpu]);
}

/* A reservation takes room from other programs, also where it is unused: a step is at most a 64th of the GPU. */
static uint64_t reserve_step(nvs_ledger *of)
{
    uint64_t step = RESERVE_STEP, capacity = load(&of->capacity);
    while (capacity != 0 && step > NVS_CHARGE_GRAIN && step > capacity / 64)
        step /= 2;
    return step;
}

/* Growth beyond the reservation, where the coordinator wants to be asked: in steps, so that it is asked rarely. */
static bool reserved_up_to(uint32_t gpu, uint64_t total)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    /* Relaxed: see memory/records/ledger.h. */
    if (!atomic_load_explicit(&of->reserve, memory_order_relaxed) || total <= load(&of->reserved))
        return true;
    uint64_t limit = ceiling_of(of);
    uint64_t grain = reserve_step(of);
    uint64_t step = total > UINT64_MAX - grain ? total : (total + grain - 1) / grain * grain;
    if (limit != 0 && step > limit)
        step = limit;
    nvs_status answer = nvs_coordinator.reserve(gpu, step > total ? step : total);
    if (answer == NVS_REFUSED && step > total)
        answer = nvs_coordinator.reserve(gpu, total); /* the last bytes below the capacity */
    return answer != NVS_REFUSED;
}

/* What a chunked backend has on the GPU comes beside everything else that is charged. */
bool nvs_memory_may_grow(uint32_t gpu, uint64_t resident_bytes)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    uint64_t charged = load(&of->charged), chunked = load(&of->chunked);
    return reserved_up_to(gpu, resident_bytes + (charged > chunked ? charged - chunked : 0));
}

static bool charge_and_reserve(uint32_t gpu, uint64_t bytes)
{
    uint64_t total;
    if (!charge(gpu, bytes, &total))
        return false;
    if (nvs_memory_backend(gpu)->chunked || reserved_up_to(gpu, total))
        return true;
    nvs_ledger_uncharge(&nvs_ledgers[gpu], bytes);
    return false;
}

/* To give memory back, the driver waits for the whole GPU.  So what was freed in stream order is kept for the next
 * allocation of its size on that stream (nvs_memory_allocate_in_order), until it outweighs what is in use. */
static bool too_much_deferred(uint32_t gpu)
{
    uint64_t deferred = nvs_allocation_deferred_bytes(gpu), charged = load(&nvs_ledgers[gpu].charged);
    return deferred > KEEP_DEFERRED && deferred > charged / 2;
}

CUresult nvs_memory_charge(uint32_t gpu, uint64_t bytes, uint64_t *charged_bytes)
{
    *charged_bytes = nvs_memory_grains(bytes);
    if (*charged_bytes == UINT64_MAX)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (too_much_deferred(gpu))
        nvs_memory_reap(gpu, false);
    while (!charge_and_reserve(gpu, *charged_bytes))
        if (!nvs_memory_reap(gpu, true) && !nvs_graph_memory_trim(gpu)) {
            nvs_memory_say_limited(gpu, *charged_bytes);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    return CUDA_SUCCESS;
}

void nvs_memory_charge_again(uint32_t gpu, uint64_t charged_bytes)
{
    atomic_fetch_add_explicit(&nvs_ledgers[gpu].charged, charged_bytes, memory_order_seq_cst); /* see memory/records/ledger.h */
    nvs_memory_changed(gpu);
}

CUresult nvs_memory_admit(nvs_space space, nvs_memory_kind kind, uint32_t gpu, uint64_t bytes, nvs_allocation **out)
{
    nvs_allocation *entry = nvs_allocation_new(space, kind, gpu);
    CUresult result = entry == NULL ? CUDA_ERROR_OUT_OF_MEMORY : nvs_memory_charge(gpu, bytes, &entry->charged_bytes);
    if (result == CUDA_SUCCESS)
        *out = entry;
    else
        free(entry);
    return result;
}

void nvs_memory_in_chunks(nvs_allocation *admitted)
{
    admitted->chunked = true;
    atomic_fetch_add_explicit(&nvs_ledgers[admitted->gpu].chunked, admitted->charged_bytes, memory_order_relaxed); /* see memory/records/ledger.h */
}

void nvs_memory_correct(nvs_allocation *admitted, uint64_t bytes)
{
    uint64_t real = nvs_memory_grains(bytes);
    /* Unsigned arithmetic: right in both directions.  Relaxed: see memory/records/ledger.h. */
    atomic_fetch_add_explicit(&nvs_ledgers[admitted->gpu].charged, real - admitted->charged_bytes, memory_order_relaxed);
    admitted->charged_bytes = real;
}

void nvs_memory_keep(nvs_allocation *admitted, uint64_t key, uint64_t length)
{
    admitted->key = key;
    admitted->length = length;
    uint32_t gpu = admitted->gpu; /* once inserted, the entry may be freed by another thread at any moment */
    if (admitted->movable)
        atomic_fetch_add_explicit(&nvs_ledgers[gpu].movable, admitted->charged_bytes, memory_order_relaxed); /* see memory/records/ledger.h */
    nvs_memory_drop_all(nvs_allocation_insert(admitted));
    nvs_coordinator.memory_changed(gpu);
}

/* Gives back what an entry that is in nobody's hands any more was charged with. */
static void settle(nvs_allocation *taken, bool kept)
{
    nvs_ledger *of = &nvs_ledgers[taken->gpu];
    /* All relaxed: see memory/records/ledger.h. */
    atomic_fetch_sub_explicit(&of->evicted, (int64_t)taken->evicted_bytes, memory_order_relaxed);
    if (taken->chunked)
        atomic_fetch_sub_explicit(&of->chunked, taken->charged_bytes, memory_order_relaxed);
    else if (kept && taken->movable)
        atomic_fetch_sub_explicit(&of->movable, taken->charged_bytes, memory_order_relaxed);
    nvs_ledger_uncharge(of, taken->charged_bytes);
    nvs_pool_take_back(taken->pool, taken->pool_bytes, true);
    if (taken->charged_bytes != 0)
        nvs_coordinator.memory_changed(taken->gpu);
    free(taken);
}

void nvs_memory_drop(nvs_allocation *taken)
{
    if (taken->kind == NVS_MEMORY_HANDLE && taken->chunked && taken->kept != NULL)
        nvs_memory_chunked->release(taken->gpu, 0, 0, taken->kept);
    settle(taken, taken->serial != 0); /* a serial is given when an entry goes into the registry */
}

void nvs_memory_drop_all(nvs_allocation *list)
{
    while (list != NULL) {
        nvs_allocation *next = list->next;
        nvs_memory_drop(list);
        list = next;
    }
}

/* --- what the agent asks and says --- */

void nvs_memory_usage(uint32_t gpu, nvs_usage *out)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    /* See memory/records/ledger.h.  These are read one after the other, so they are bounded by one another here. */
    uint64_t allocated = atomic_load_explicit(&of->charged, memory_order_seq_cst);
    uint64_t chunked = load(&of->chunked), movable = load(&of->movable);
    int64_t evicted = atomic_load_explicit(&of->evicted, memory_order_relaxed);
    if (nvs_gate_dead(gpu)) { /* managed memory that nobody can use any more gives way by itself, and need not come back */
        allocated -= movable < allocated ? movable : allocated;
        movable = 0;
        evicted = 0;
    }
    uint64_t others = allocated > chunked ? allocated - chunked : 0, pinned = others > movable ? others - movable : 0;
    uint64_t out_bytes = evicted < 0 ? 0 : (uint64_t)evicted;
    if (nvs_config.memory_mode == NVS_MODE_SWAP) { /* told in chunks: that is what fills the card and moves.  Asks the driver nothing. */
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

void nvs_memory_set_limits(uint32_t gpu, uint64_t limit_bytes, uint64_t capacity_bytes, bool reserve)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    /* Relaxed: see memory/records/ledger.h. */
    atomic_store_explicit(&of->limit, limit_bytes, memory_order_relaxed);
    atomic_store_explicit(&of->capacity, capacity_bytes, memory_order_relaxed);
    atomic_store_explicit(&of->reserve, reserve, memory_order_relaxed);
    learn_freely(of);
}

void nvs_memory_set_room(uint32_t gpu, uint64_t bytes)
{
    atomic_store_explicit(&nvs_ledgers[gpu].room, bytes, memory_order_relaxed); /* see memory/records/ledger.h */
    learn_freely(&nvs_ledgers[gpu]);
}

void nvs_memory_set_reserved(uint32_t gpu, uint64_t reserved_bytes)
{
    atomic_store_explicit(&nvs_ledgers[gpu].reserved, reserved_bytes, memory_order_relaxed); /* see memory/records/ledger.h */
    learn_freely(&nvs_ledgers[gpu]);
}

void nvs_memory_virtual_info(uint32_t gpu, uint64_t *free_bytes, uint64_t *total_bytes)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    uint64_t card = card_of(of);
    if (card == 0)
        return;
    uint64_t total = smaller_set(card, *total_bytes), charged = load(&of->charged);
    uint64_t most = smaller_set(total, load(&of->room));
    uint64_t left = charged < most ? most - charged : 0;
    /* Managed memory of others makes room when it must; memory that stays on the device does not. */
    if (!nvs_memory_backend(gpu)->movable && *free_bytes < left)
        left = *free_bytes;
    *free_bytes = left;
    *total_bytes = total;
}

static uint64_t resident_bytes(uint32_t gpu)
{
    nvs_usage usage;
    nvs_memory_usage(gpu, &usage);
    return usage.resident_bytes;
}

nvs_status nvs_memory_evict(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    const nvs_backend *backend = nvs_memory_backend(gpu);
    uint64_t before = resident_bytes(gpu), more = 0;
    nvs_memory_reap(gpu, false); /* what nobody uses any more makes room too, and costs no transfer */
    (void)nvs_graph_memory_trim(gpu);
    uint64_t now = resident_bytes(gpu), freed = now < before ? before - now : 0;
    nvs_status status = NVS_OK;
    *moved_bytes = 0;
    if (freed < bytes)
        status = backend->evict(gpu, bytes - freed, watch, moved_bytes);
    *moved_bytes += freed;
    /* The application's own managed memory, which is in no chunk. */
    if (backend->chunked && status == NVS_OK && *moved_bytes < bytes && nvs_allocation_extents(gpu, true, NULL, 0) != 0)
        status = nvs_backend_managed.evict(gpu, bytes - *moved_bytes, NULL, &more);
    *moved_bytes += more;
    return status;
}

nvs_status nvs_memory_restore(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    const nvs_backend *backend = nvs_memory_backend(gpu);
    uint64_t more = 0;
    nvs_status status = backend->restore(gpu, bytes, watch, moved_bytes);
    if (backend->chunked && status == NVS_OK && *moved_bytes < bytes && nvs_allocation_extents(gpu, false, NULL, 0) != 0)
        status = nvs_backend_managed.restore(gpu, bytes - *moved_bytes, NULL, &more);
    *moved_bytes += more;
    return status;
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

void nvs_memory_set_evicted(uint32_t gpu, const nvs_extent *extent, uint64_t evicted_bytes)
{
    int64_t change = nvs_allocation_set_evicted(extent->key, extent->serial, evicted_bytes);
    if (change == 0)
        return;
    atomic_fetch_add_explicit(&nvs_ledgers[gpu].evicted, change, memory_order_relaxed); /* see memory/records/ledger.h */
    nvs_coordinator.memory_changed(gpu);
}

NVS_FORK_CODE void nvs_memory_after_fork(void)
{
    static const nvs_ledger none;
    nvs_allocation_after_fork();
    nvs_pins_after_fork();
    nvs_graph_memory_after_fork();
    nvs_pool_figures_after_fork();
    nvs_pool_book_after_fork();
    nvs_pools_go(NVS_POOLS_SHORT, NVS_POOLS_UNKNOWN);
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) { /* one thread: any order will do */
        if (memcmp(&nvs_ledgers[gpu], &none, sizeof none) == 0)
            continue;
        atomic_store_explicit(&nvs_ledgers[gpu].charged, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_ledgers[gpu].freely, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_ledgers[gpu].to_report, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_ledgers[gpu].movable, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_ledgers[gpu].chunked, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_ledgers[gpu].evicted, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_ledgers[gpu].reserved, 0, memory_order_relaxed);
    }
}
