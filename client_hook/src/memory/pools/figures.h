/* Figures of cuMemPoolGetAttribute for memory that the hook allocates instead of a pool: those that the driver would have.
 *
 * The rules are those of a driver 580 (measured, docs/decisions/pool-figures.md):
 *  - used: the requested bytes, until the call that frees them.  Memory that cuMemFree frees stays counted.
 *  - reserved: whole pieces of 32 MiB.  A wait for a stream, an event or a context gives free pieces back, if the pool has more than
 *    its release threshold; so does a trim.
 * The fragmentation of the driver's pool is not known: `reserved` is that of a pool without gaps.
 *
 * One lock, taken with no other.
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
void nvs_pool_destroyed(CUmemoryPool pool);

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
