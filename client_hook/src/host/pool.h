/* Pinned host memory for evicted chunks, in grains of 2 MiB.
 *
 * The memory is anonymous, in huge pages, touched by several threads and then registered with the driver: ten times as fast as cuMemHostAlloc.
 * A device allocation reserves room by counting.  Memory is allocated when an eviction needs it, or earlier if the coordinator announces one.
 *
 * Invariants:
 *  - the reserved room stays below NVSHARE_HOST_LIMIT and below this program's share of the node's budget, which grows in steps and is given back
 *    when it is not used, and leaves a tenth of the machine's (or the container's) memory;
 *  - reserved room can be taken, unless the system has no memory;
 *  - a forked child has none of it.
 *
 * One thread prepares for probable evictions.  It first touches all of the memory, in pieces of 64 MiB, and then pins it.  While the program submits
 * work, that thread rests as long as it touched, and a hundred times as long as it pinned, since launches wait for that; unless the program is about to
 * move to another GPU.  An eviction pins what was touched.  Unused memory beyond that is freed after ten seconds.
 *
 * Helper threads block all signals.  The lock is never held during a driver call.
 *
 * Non-goals: the use of the memory; messages (coord/state.c).
 */
#ifndef NVS_POOL_H
#define NVS_POOL_H

#include "host/system.h"

#define NVS_HOST_STEP (UINT64_C(256) << 20) /* a share grows by half, and at most by this beyond what is needed */

bool nvs_host_reserve(uint64_t bytes); /* may wait for the coordinator */
void nvs_host_unreserve(uint64_t bytes);

/* Agent thread: the share of the node's budget.  `known` false: only the other limits hold. */
void nvs_host_set_share(bool known, uint64_t bytes);
uint64_t nvs_host_share_in_use(void);    /* the reserved room */
bool nvs_host_spare_share(uint64_t *keep); /* as nvs_memory_spare */

/* Announces that `grains` will be taken: helpers prepare them while the first ones are already in use. */
void nvs_host_prepare(uint32_t gpu, uint64_t grains);
/* Takes grains, adjacent ones if possible; waits for the helpers.  False: the system has no memory. */
bool nvs_host_take(uint32_t gpu, uint32_t grains, void **out);
void nvs_host_give(uint32_t grains, void *const *taken);

/* Prepares memory for a probable eviction of `bytes` from this GPU.  `now`: without rests, and reports the GPU's memory when it is there. */
void nvs_host_ahead(uint32_t gpu, uint64_t bytes, bool now);
uint64_t nvs_host_ready_bytes(void); /* that an eviction finds pinned */

void nvs_host_context_gone(CUcontext context); /* its registrations have ended with it */
void nvs_host_after_fork(void);

#endif
