/* Figures of pools: those of cuMemPoolGetAttribute for memory that the hook allocates instead of a pool, and the charge of what the driver's pools keep.
 *
 * The rules are those of a driver 580 (measured, docs/decisions/pool-figures.md):
 *  - used: the requested bytes, until the call that frees them.  Memory that cuMemFree frees stays counted.
 *  - reserved: whole pieces of 32 MiB.  A wait for a stream, an event or a context gives free pieces back, if the pool has more than
 *    its release threshold; so does a trim.
 * The fragmentation of the driver's pool is not known: `reserved` is that of a pool without gaps.
 *
 * A driver's pool with a release threshold keeps freed memory on the card.  As soon as the process has set a threshold, each GPU is charged with what
 * its pools reserve beyond their allocations, by the driver's figures.  An allocation takes over the charge of the memory that it reuses.  Kept
 * memory is trimmed before an allocation is refused.
 *
 * One lock, taken with no other.  It is held during calls that name a pool of the list, so that no thread destroys the pool meanwhile.
 *
 * Non-goals: where memory comes from (hooks/memory/pool.c); the quota.
 */
#ifndef NVS_POOL_FIGURES_H
#define NVS_POOL_FIGURES_H

#include "base/base.h"

#include <stdatomic.h>

typedef struct nvs_pool_figures nvs_pool_figures;

/* Counts an allocation for the pool, until the next function.  NULL: the host has no memory. */
nvs_pool_figures *nvs_pool_give(CUmemoryPool pool, uint64_t bytes);
/* The memory is free.  NULL is ignored.  `counts`: `used` becomes smaller, too. */
void nvs_pool_take_back(nvs_pool_figures *figures, uint64_t bytes, bool counts);

/* After the same call of the driver for its pool; the last before it. */
void nvs_pool_add_figure(CUmemoryPool pool, CUmemPool_attribute attribute, void *value);
void nvs_pool_set_figure(CUmemoryPool pool, CUmemPool_attribute attribute, const void *value);
void nvs_pool_trimmed(CUmemoryPool pool, size_t keep_bytes);
CUresult nvs_pool_destroy(CUmemoryPool pool); /* makes the driver's call */

extern _Atomic bool nvs_pools_keep __attribute__((visibility("hidden"))); /* a threshold was set.  Relaxed: as nvs_hot.pools */
/* The pool got a threshold.  `gpu`: where it probably is, until its next allocation tells. */
void nvs_pool_keeps(CUmemoryPool pool, uint32_t gpu);
/* Takes over up to `bytes` of the charge of what the pool keeps, for an allocation.  Returns how much. */
uint64_t nvs_pool_take_kept(CUmemoryPool pool, uint32_t gpu, uint64_t bytes);
/* So much of the driver's pools was freed and uncharged: they keep it, until a wait tells more. */
void nvs_pools_freed(uint32_t gpu, uint64_t bytes);
/* Updates the charges, by the driver's figures. */
void nvs_pools_learn(void);
/* Makes the driver free what pools keep.  True: the charge is smaller. */
bool nvs_pools_trim(uint32_t gpu);

extern _Atomic bool nvs_pools_may_shrink __attribute__((visibility("hidden"))); /* relaxed: read again under the lock */
void nvs_pools_shrink(void);

/* After a call that waited for work of a stream, an event or a context. */
static inline void nvs_pools_synchronized(void)
{
    if (NVS_UNLIKELY(atomic_load_explicit(&nvs_pools_may_shrink, memory_order_relaxed))) /* see its declaration */
        nvs_pools_shrink();
}

void nvs_pool_figures_after_fork(void); /* in the child: none */

#endif
