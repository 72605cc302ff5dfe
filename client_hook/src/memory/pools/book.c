/* See book.h.  A hash of the address gives a bucket of few places; if they are taken, the caller uses the registry.  This file has the functions that
 * walk through all places. */
#define _GNU_SOURCE /* madvise */
#include "memory/pools/book.h"

#include <sys/mman.h>

_Alignas(4096) nvs_pool_bucket nvs_pool_buckets[NVS_POOL_BUCKETS]; /* whole pages: see nvs_pool_book_after_fork */
_Static_assert(NVS_POOL_FREE == 0, "zeroed pages hold free places");
NVS_FORK_STATE static _Atomic uint32_t ever; /* relaxed: a thread that ends a context does so after the context's allocations */

void nvs_pool_book_begin(void)
{
    if (atomic_load_explicit(&ever, memory_order_relaxed) == 0)
        atomic_store_explicit(&ever, 1, memory_order_relaxed);
}

/* With the claim, the context is looked at again: the place may have changed hands. */
static bool take_if_of(nvs_pool_place *at, CUcontext context, nvs_pool_memory *out)
{
    const uint64_t key = atomic_load_explicit(&at->key, memory_order_relaxed);
    if (key <= NVS_POOL_TAKEN || atomic_load_explicit(&at->context, memory_order_relaxed) != context || !nvs_pool_claim(at, key))
        return false;
    *out = nvs_pool_content(at, key);
    const bool found = out->context == context;
    nvs_pool_set(at, found ? NVS_POOL_FREE : key);
    return found;
}

bool nvs_pool_book_take_of(CUcontext context, uint32_t *place, nvs_pool_memory *out)
{
    if (context == NULL || atomic_load_explicit(&ever, memory_order_relaxed) == 0)
        return false;
    while (*place < NVS_POOL_BUCKETS * NVS_POOL_PLACES) {
        const uint32_t i = (*place)++;
        if (take_if_of(&nvs_pool_buckets[i / NVS_POOL_PLACES].places[i % NVS_POOL_PLACES], context, out))
            return true;
    }
    return false;
}

NVS_FORK_CODE void nvs_pool_book_after_fork(void)
{
    if (atomic_load_explicit(&ever, memory_order_relaxed) == 0)
        return;
    /* The pages read as zero again, and the kernel copies none of them.  EINVAL: pages are larger here. */
    const bool zeroed = madvise(nvs_pool_buckets, sizeof nvs_pool_buckets, MADV_DONTNEED) == 0;
    for (unsigned i = 0; !zeroed && i < NVS_POOL_BUCKETS * NVS_POOL_PLACES; i++) /* one thread: any order will do */
        atomic_store_explicit(&nvs_pool_buckets[i / NVS_POOL_PLACES].places[i % NVS_POOL_PLACES].key, NVS_POOL_FREE, memory_order_relaxed);
    atomic_store_explicit(&ever, 0, memory_order_relaxed);
}
