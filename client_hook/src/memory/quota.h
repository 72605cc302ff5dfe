/* The quota in front of every allocation.
 *
 * An allocation is charged before the call of the driver, and uncharged if that fails.  The charge is the requested size, rounded up to the driver's 512
 * bytes.  The driver's overhead (contexts, code) is not charged.  The limit applies to `charged`.  Each registry entry has its own
 * charge, which is subtracted at its end.
 *
 * The ledger has the charges of this process on each GPU, also for the fast paths of the driver's pools.
 *
 * The order of these counters is relaxed, because they publish nothing else; changes of `charged` are seq_cst for nvs_memory_changed.
 */
#ifndef NVS_QUOTA_H
#define NVS_QUOTA_H

#include "base/base.h"

#include <stdatomic.h>

typedef struct nvs_ledger {
    /* Each allocation touches this line only. */
    _Alignas(64) _Atomic uint64_t charged;
    _Atomic uint64_t freely;   /* `charged` may grow up to here without a request: below the limit, and reserved */
    _Atomic uint32_t to_report; /* 1: the agent will report */
    _Alignas(64) _Atomic uint64_t movable; /* the part of `charged` in movable entries; these and chunks are not pinned */
    _Atomic uint64_t chunked; /* the part of `charged` in chunks */
    /* The part of `charged` that the coordinator may refuse yet.  No report has it: it would be taken for memory that was allowed, and a smaller request
     * after a refusal would then be granted.  Raised before `charged`, and read after it. */
    _Atomic uint64_t unanswered;
    struct {                  /* by the coordinator: quota.c and coord/ */
        _Atomic uint64_t limit, capacity, reserved, room;
        _Atomic uint64_t slot; /* of `limit`, what the slot's other programs have; for figures only */
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

/* Raises `charged` if the limit allows it, and with `ask` the coordinator. */
bool nvs_quota_charge(uint32_t gpu, uint64_t bytes, bool ask);

/* After a change of `charged`: marks it for a report.  Usually the mark is set already, and an exchange would be slow.  A thread that finds it set has
 * changed `charged` before, and the agent clears the mark before it reads `charged`; all seq_cst. */
static inline void nvs_memory_changed(uint32_t gpu)
{
    if (NVS_UNLIKELY(atomic_load_explicit(&nvs_ledgers[gpu].to_report, memory_order_seq_cst) == 0))
        nvs_coordinator.memory_changed(gpu);
}

static inline void nvs_memory_uncharge(uint32_t gpu, uint64_t charged_bytes)
{
    nvs_ledger_uncharge(&nvs_ledgers[gpu], charged_bytes);
    nvs_memory_changed(gpu);
}
void nvs_memory_charge_again(uint32_t gpu, uint64_t charged_bytes);
/* Logs why an allocation is out of memory, each reason once.  `full`: the driver has refused it. */
void nvs_memory_log_refused(uint32_t gpu, uint64_t bytes, bool full);
/* The coordinator's reason for a refusal: the first text is kept until it is taken, and no later one.  NULL: none. */
void nvs_memory_set_refusal(const char *text);
const char *nvs_memory_take_refusal(void);

/* Limits of the coordinator; 0: none.  Below a limit that is already exceeded no allocation succeeds.  Without the coordinator's limit that of the
 * environment applies.  `room_bytes`: the most that can be on the GPU beside memory that other programs have pinned. */
void nvs_memory_set_limits(uint32_t gpu, uint64_t limit_bytes, uint64_t capacity_bytes, uint64_t room_bytes, bool reserve);
void nvs_memory_set_reserved(uint32_t gpu, uint64_t reserved_bytes);
/* For backends: the memory that all clients together may have resident (0: not known), and whether this one may have so much. */
uint64_t nvs_memory_capacity(uint32_t gpu);
uint64_t nvs_memory_ceiling(uint32_t gpu); /* the most that this client may have in all; 0: no limit */
bool nvs_memory_may_grow(uint32_t gpu, uint64_t resident_bytes);
/* Agent thread, a few times a second: lowers the reservation to what is used, and a step more if that has changed since the last call.  `less`: the
 * coordinator is to know.  True: call again.  A thread that has read `freely` before may charge more; reports say so. */
bool nvs_memory_spare(uint32_t gpu, uint64_t resident_bytes, bool *less);
/* The driver lacks memory that was granted: contexts of other programs have it.  Waits until the coordinator has made room; false: it cannot. */
bool nvs_memory_make_room(uint32_t gpu, uint64_t lacking_bytes);

/* The size of the virtual card, and how much of it is free: in, the real figures.  `movable`: memory of other programs can be evicted. */
void nvs_quota_virtual_info(uint32_t gpu, bool movable, uint64_t *free_bytes, uint64_t *total_bytes);

void nvs_quota_after_fork(void);

#endif
