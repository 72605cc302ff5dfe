/* The quota in front of every allocation.
 *
 * Charging: before the driver call, undone when it fails; what is charged is what was asked for, rounded up to the 512 bytes that the
 * driver hands out.  The driver's own overhead (contexts, code, what pools keep) is not charged.
 *
 * A GPU's figures are plain atomics: `charged` is what the limit is held against, and moves before the driver is asked
 * for memory.  Each registry entry carries the bytes that it was charged with, so that whoever takes the entry out
 * knows exactly what to give back.
 */
#ifndef NVS_QUOTA_H
#define NVS_QUOTA_H

#include "base/port.h"
#include "memory/records/ledger.h"

/* Raises `charged` if the limit allows it, and with `ask` the coordinator. */
bool nvs_quota_charge(uint32_t gpu, uint64_t bytes, bool ask);

/* `charged` did; the agent is told, if it does not know yet.  Where memory comes and goes all the time it does, and an exchange is dear.  Who
 * finds it so has changed `charged` before, and the agent takes its mark back before it reads that; all of it seq_cst. */
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
/* An allocation has found no memory: the reason is logged, each one once.  `full`: the driver has refused it. */
void nvs_memory_say_refused(uint32_t gpu, uint64_t bytes, bool full);
/* Why the coordinator has refused memory: one text is kept until it is taken, and none after that.  NULL: there is none. */
void nvs_memory_set_refusal(const char *text);
const char *nvs_memory_take_refusal(void);

/* What the coordinator set; 0 means none.  A limit below what is in use lets nothing more be allocated.
 * While the coordinator sets no limit, the one of the environment holds. */
void nvs_memory_set_limits(uint32_t gpu, uint64_t limit_bytes, uint64_t capacity_bytes, bool reserve);
void nvs_memory_set_reserved(uint32_t gpu, uint64_t reserved_bytes);
/* More than this could never be on the GPU, beside what others have there that cannot move (0: not known). */
void nvs_memory_set_room(uint32_t gpu, uint64_t bytes);
/* For backends: what all clients together may have resident (0: not known), and whether this one may have so much. */
uint64_t nvs_memory_capacity(uint32_t gpu);
uint64_t nvs_memory_ceiling(uint32_t gpu); /* of what this client may have in all; 0: none */
bool nvs_memory_may_grow(uint32_t gpu, uint64_t resident_bytes);

/* The size of the virtual card, and how much of it is free: in, the real figures.  `movable`: others' memory makes room. */
void nvs_quota_virtual_info(uint32_t gpu, bool movable, uint64_t *free_bytes, uint64_t *total_bytes);

void nvs_quota_after_fork(void);

#endif
