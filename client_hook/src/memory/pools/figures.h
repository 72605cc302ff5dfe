/* What cuMemPoolGetAttribute says of memory that the hook serves instead of a pool: as much as the driver would say.
 *
 * The rules are those of a driver 580 (measured, docs/decisions/pool-figures.md):
 *  - used: what was asked for, until the call that frees it.  Memory that cuMemFree frees stays counted.
 *  - reserved: whole pieces of 32 MiB.  A wait for a stream, an event or a context gives free pieces back, if the pool has more than
 *    its release threshold; so does a trim.
 * How fragmented the driver's pool would be is not known: `reserved` is what a pool without gaps needs.
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

/* So many bytes were given out for this pool.  NULL: the host has no memory to count them.  Ended by the next. */
nvs_pool_figures *nvs_pool_give(CUmemoryPool pool, uint64_t bytes);
/* They are free.  NULL is ignored.  `counts`: they are not used any more. */
void nvs_pool_take_back(nvs_pool_figures *figures, uint64_t bytes, bool counts);

/* The driver has done so with the pool itself. */
void nvs_pool_add_figure(CUmemoryPool pool, CUmemPool_attribute attribute, void *value);
void nvs_pool_set_figure(CUmemoryPool pool, CUmemPool_attribute attribute, const void *value);
void nvs_pool_trimmed(CUmemoryPool pool, size_t keep_bytes);
void nvs_pool_destroyed(CUmemoryPool pool);

extern _Atomic bool nvs_pools_may_shrink __attribute__((visibility("hidden"))); /* relaxed: looked at again with the lock */
void nvs_pools_shrink(void);

/* After a call that waited for work of a stream, an event or a context. */
static inline void nvs_pools_synchronized(void)
{
    if (NVS_UNLIKELY(atomic_load_explicit(&nvs_pools_may_shrink, memory_order_relaxed))) /* see its declaration */
        nvs_pools_shrink();
}

void nvs_pool_figures_after_fork(void); /* in the child: none */

#endif
