/* Pinned host memory for what is off the GPU, in grains of 2 MiB.
 *
 * It is anonymous memory in huge pages, touched by several threads and then registered with the driver, because that is an
 * order of magnitude faster than asking the driver for pinned memory.  Room is reserved by counting when device memory is
 * allocated; memory is taken from the system when an eviction needs it, or ahead of that as the coordinator says.
 *
 * Invariants:
 *  - what is reserved stays below NVSHARE_HOST_LIMIT and below this program's share of the node's budget, which the coordinator
 *    is asked for in steps, and leaves a tenth of the machine's (or the container's) memory;
 *  - taking never fails for want of room that was reserved, unless the system itself has none;
 *  - a forked child has nothing of it.
 *
 * Making ready ahead must not slow the program: one thread at the lowest priority does it, in pieces of 16 MiB, and while the
 * program may submit work it rests nine times as long as a piece took.  Unused memory beyond what is to be ready goes back after
 * ten seconds.
 *
 * Helper threads block all signals, and sleep while there is nothing to do.  The lock is never held across a call of the driver.
 *
 * May not go here: what the memory is used for; messages (coord/memory/budget.c).
 */
#ifndef NVS_HOST_POOL_H
#define NVS_HOST_POOL_H

#include "host/system.h"

#define NVS_HOST_STEP (UINT64_C(256) << 20) /* in which a share of the budget is asked for and given back */

bool nvs_host_reserve(uint64_t bytes); /* may wait for the coordinator */
void nvs_host_unreserve(uint64_t bytes);

/* The share of the node's budget: agent thread.  Not known: then only the other limits hold. */
void nvs_host_set_share(bool known, uint64_t bytes);
uint64_t nvs_host_share_in_use(void);    /* what is reserved, in whole steps */
bool nvs_host_spare_share(uint64_t *out); /* there is a whole step to give back; what is to be kept, which holds at once */

/* So many grains are about to be taken: has the helpers make them ready while the first ones are already used. */
void nvs_host_prepare(uint32_t gpu, uint64_t grains);
/* Takes grains, neighbours where there are any; waits for the helpers.  False: the system has no memory. */
bool nvs_host_take(uint32_t gpu, uint32_t grains, void **out);
void nvs_host_give(uint32_t grains, void *const *taken);

/* So much of this GPU's memory will probably be evicted at a time: it is made ready ahead. */
void nvs_host_ahead(uint32_t gpu, uint64_t bytes);

uint64_t nvs_host_taken_bytes(void);
void nvs_host_context_gone(CUcontext context); /* what was registered in it is not any more */
void nvs_host_after_fork(void);

#endif
