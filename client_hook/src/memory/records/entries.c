/* See entries.h. */
#include "memory/records/entries.h"

#include "base/base.h"
#include "memory/backends/backend.h"
#include "memory/pools/figures.h"
#include "memory/quota/quota.h"
#include "memory/records/ledger.h"

#include <stdatomic.h>
#include <stdlib.h>

void nvs_memory_in_chunks(nvs_allocation *admitted)
{
    admitted->backend.chunked = true;
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
    uint32_t gpu = admitted->gpu; /* after the insertion another thread may free the entry */
    if (admitted->backend.movable)
        atomic_fetch_add_explicit(&nvs_ledgers[gpu].movable, admitted->charged_bytes, memory_order_relaxed); /* see memory/records/ledger.h */
    nvs_memory_drop_all(nvs_allocation_insert(admitted));
    nvs_coordinator.memory_changed(gpu);
}

/* Uncharges and frees an entry that nothing refers to any more. */
static void uncharge_and_free(nvs_allocation *taken, bool kept)
{
    nvs_ledger *of = &nvs_ledgers[taken->gpu];
    /* All relaxed: see memory/records/ledger.h. */
    atomic_fetch_sub_explicit(&of->evicted, (int64_t)taken->evicted_bytes, memory_order_relaxed);
    if (taken->backend.chunked)
        atomic_fetch_sub_explicit(&of->chunked, taken->charged_bytes, memory_order_relaxed);
    else if (kept && taken->backend.movable)
        atomic_fetch_sub_explicit(&of->movable, taken->charged_bytes, memory_order_relaxed);
    nvs_ledger_uncharge(of, taken->charged_bytes);
    nvs_pool_take_back(taken->pool.figures, taken->pool.bytes, true);
    if (taken->charged_bytes != 0)
        nvs_coordinator.memory_changed(taken->gpu);
    free(taken);
}

void nvs_memory_drop(nvs_allocation *taken)
{
    if (taken->kind == NVS_MEMORY_HANDLE && taken->backend.chunked && taken->backend.kept != NULL)
        nvs_memory_chunked->release(taken->gpu, 0, 0, taken->backend.kept);
    uncharge_and_free(taken, taken->node.serial != 0); /* a serial is given when an entry goes into the registry */
}

void nvs_memory_drop_all(nvs_allocation *list)
{
    while (list != NULL) {
        nvs_allocation *next = list->node.next;
        nvs_memory_drop(list);
        list = next;
    }
}

void nvs_memory_set_evicted(uint32_t gpu, const nvs_extent *extent, uint64_t evicted_bytes)
{
    int64_t change = nvs_allocation_set_evicted(extent->key, extent->serial, evicted_bytes);
    if (change == 0)
        return;
    atomic_fetch_add_explicit(&nvs_ledgers[gpu].evicted, change, memory_order_relaxed); /* see memory/records/ledger.h */
    nvs_coordinator.memory_changed(gpu);
}
