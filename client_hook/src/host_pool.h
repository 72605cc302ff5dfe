/* Pinned host memory for what is off the GPU, in grains of 2 MiB.
 *
 * It is anonymous memory in huge pages, touched by several threads and then registered with the driver, because that is an
 * order of magnitude faster than asking the driver for pinned memory.  Room is reserved by counting when device memory is
 * allocated; memory is taken from the system when an eviction needs it, or ahead of that while one is likely.
 *
 * Invariants:
 *  - what is reserved stays below NVSHARE_HOST_LIMIT, and leaves a tenth of the machine's (or the container's) memory;
 *  - taking never fails for want of room that was reserved, unless the system itself has none;
 *  - a forked child has nothing of it.
 *
 * Helper threads block all signals, and sleep while there is nothing to do.  The lock is never held across a call of the driver.
 *
 * May not go here: what the memory is used for.
 */
#ifndef NVS_HOST_POOL_H
#define NVS_HOST_POOL_H

#include "base.h"

#define NVS_HOST_GRAIN (UINT64_C(2) << 20)

bool nvs_host_reserve(uint64_t bytes);
void nvs_host_unreserve(uint64_t bytes);

/* So many grains are about to be taken: has the helper make them ready while the first ones are already used. */
void nvs_host_prepare(uint32_t gpu, uint64_t grains);
/* Takes grains, neighbours where there are any; waits for the helper.  False: the system has no memory. */
bool nvs_host_take(uint32_t gpu, uint32_t grains, void **out);
void nvs_host_give(uint32_t grains, void *const *taken);

/* An eviction is likely, or not any more: whether memory is held ready for all that is reserved. */
void nvs_host_expect(uint32_t gpu, bool likely);

uint64_t nvs_host_taken_bytes(void);
void nvs_host_context_gone(CUcontext context); /* what was registered in it is not any more */
void nvs_host_after_fork(void);

#endif
