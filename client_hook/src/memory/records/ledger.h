/* The charges of this process on each GPU, for the quota and the fast paths of the driver's pools.
 *
 * The order of these counters is relaxed, because they publish nothing else; changes of `charged` are seq_cst for nvs_memory_changed.
 *
 * Non-goals: what the limits mean.
 */
#ifndef NVS_LEDGER_H
#define NVS_LEDGER_H

#include "base/base.h"

#include <stdatomic.h>

typedef struct nvs_ledger {
    /* Each allocation touches this line only. */
    _Alignas(64) _Atomic uint64_t charged;
    _Atomic uint64_t freely;   /* `charged` may grow up to here without a request: below the limit, and reserved */
    _Atomic uint32_t to_report; /* 1: the agent will report */
    _Alignas(64) _Atomic uint64_t movable; /* the part of `charged` in movable entries; these and chunks are not pinned */
    _Atomic uint64_t chunked; /* the part of `charged` in chunks */
    struct {                  /* by the coordinator: quota/quota.c and coord/messages.c */
        _Atomic uint64_t limit, capacity, reserved, room;
        _Atomic bool reserve, limit_of_slot; /* settings */
        _Atomic bool limited; /* its last answer to a reservation: the limit refused it */
    } quota;
    _Atomic int64_t evicted; /* below zero for a moment when a free overtakes a mover */
} nvs_ledger;

extern nvs_ledger nvs_ledgers[NVS_MAX_GPUS] __attribute__((visibility("hidden")));

enum { NVS_CHARGE_GRAIN = 512 };

/* What so many bytes are charged with; UINT64_MAX: too many. */
static inline uint64_t nvs_memory_grains(uint64_t bytes)
{
    return bytes > UINT64_MAX - NVS_CHARGE_GRAIN ? UINT64_MAX : (bytes + NVS_CHARGE_GRAIN - 1) / NVS_CHARGE_GRAIN * NVS_CHARGE_GRAIN;
}

/* Raises `charged` if that needs no request.  False: no change. */
static inline bool nvs_ledger_charge(nvs_ledger *of, uint64_t bytes)
{
    const uint64_t most = atomic_load_explicit(&of->freely, memory_order_relaxed);
    uint64_t now = atomic_load_explicit(&of->charged, memory_order_relaxed);
    do
        if (NVS_UNLIKELY(now > most || bytes > most - now))
            return false;
    while (!atomic_compare_exchange_weak_explicit(&of->charged, &now, now + bytes, memory_order_seq_cst, memory_order_relaxed));
    return true;
}

static inline void nvs_ledger_uncharge(nvs_ledger *of, uint64_t bytes)
{
    atomic_fetch_sub_explicit(&of->charged, bytes, memory_order_seq_cst);
}

#endif
