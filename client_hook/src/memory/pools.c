/* A hash of the address gives a bucket of few places; if they are taken, the caller uses the registry.  This file has the functions that
 * walk through all places.
 */
#define _GNU_SOURCE /* madvise */
#include "memory/pools.h"

#include "base/hot.h"
#include "driver/cuda_api.h"
#include "memory/quota.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

_Alignas(4096) nvs_pool_bucket nvs_pool_buckets[NVS_POOL_BUCKETS]; /* whole pages: see nvs_pools_after_fork */
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

static const uint64_t PIECE = UINT64_C(32) << 20;

struct nvs_pool_figures {
    nvs_pool_figures *next;
    CUmemoryPool pool; /* NULL: it is destroyed, and out of the list */
    uint64_t used, used_high, reserved, reserved_high;
    uint64_t held;      /* given out and not free */
    uint64_t threshold; /* beyond it, a wait gives back what is reserved */
    uint64_t count;     /* of allocations that are given out */
    uint32_t gpu;       /* of the driver's pool; NVS_NO_GPU: not known yet */
    nvs_pool_kind kind;
};

NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "figures of pools" in the lock order of base/base.h */
NVS_FORK_STATE static nvs_pool_figures *pools;
NVS_FORK_STATE _Atomic bool nvs_pools_may_shrink, nvs_pools_keep;
NVS_FORK_STATE _Atomic uint32_t nvs_pools_special;
NVS_FORK_STATE static uint64_t kept[NVS_MAX_GPUS]; /* charged for what the driver's pools keep */

/* Locked. */
static nvs_pool_figures *find(CUmemoryPool pool)
{
    nvs_pool_figures *at = pools;
    while (at != NULL && at->pool != pool)
        at = at->next;
    return at;
}

/* Not locked: the driver is asked. */
static nvs_pool_figures *make(CUmemoryPool pool)
{
    cuuint64_t threshold = 0;
    nvs_pool_figures *made = calloc(1, sizeof *made);
    if (made == NULL)
        return NULL;
    if (NVS_REAL(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold) != CUDA_SUCCESS)
        threshold = 0;
    made->pool = pool;
    made->threshold = threshold;
    made->gpu = NVS_NO_GPU;
    return made;
}

static uint64_t whole(uint64_t bytes)
{
    return bytes > UINT64_MAX - PIECE ? UINT64_MAX : (bytes + PIECE - 1) / PIECE * PIECE;
}

/* Locked. */
static void shrink(nvs_pool_figures *of, uint64_t keep)
{
    const uint64_t least = whole(of->held > keep ? of->held : keep);
    if (of->reserved > least)
        of->reserved = least;
}

/* Locked. */
static void look(const nvs_pool_figures *of)
{
    if (of->reserved > of->threshold && of->reserved > whole(of->held))
        atomic_store_explicit(&nvs_pools_may_shrink, true, memory_order_relaxed); /* see its declaration */
}

/* Locks.  NULL: the host has no memory. */
static nvs_pool_figures *lock_or_make(CUmemoryPool pool)
{
    nvs_pool_figures *fresh = NULL, *of;
    pthread_mutex_lock(&lock);
    if ((of = find(pool)) == NULL) {
        pthread_mutex_unlock(&lock);
        fresh = make(pool);
        pthread_mutex_lock(&lock);
        if ((of = find(pool)) == NULL && fresh != NULL) {
            fresh->next = pools;
            of = pools = fresh;
            fresh = NULL;
        }
    }
    free(fresh);
    return of;
}

nvs_pool_figures *nvs_pool_give(CUmemoryPool pool, uint64_t bytes)
{
    nvs_pool_figures *const of = lock_or_make(pool);
    if (of != NULL) {
        of->count++;
        of->used += bytes;
        of->held += bytes;
        if (of->used_high < of->used)
            of->used_high = of->used;
        if (of->reserved < whole(of->held))
            of->reserved = whole(of->held);
        if (of->reserved_high < of->reserved)
            of->reserved_high = of->reserved;
    }
    pthread_mutex_unlock(&lock);
    return of;
}

void nvs_pool_take_back(nvs_pool_figures *figures, uint64_t bytes, bool counts)
{
    if (figures == NULL)
        return;
    pthread_mutex_lock(&lock);
    figures->used -= counts ? bytes : 0;
    figures->held -= bytes;
    figures->count--;
    look(figures);
    const bool last = figures->pool == NULL && figures->count == 0;
    pthread_mutex_unlock(&lock);
    if (last)
        free(figures);
}

void nvs_pool_add_figure(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    uint64_t number = 0, more = 0;
    pthread_mutex_lock(&lock);
    const nvs_pool_figures *of = find(pool);
    switch (of != NULL ? (int)attribute : -1) {
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: more = of->reserved; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: more = of->reserved_high; break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: more = of->used; break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: more = of->used_high; break;
    default: break;
    }
    pthread_mutex_unlock(&lock);
    if (more == 0)
        return; /* the value may be an int */
    memcpy(&number, value, sizeof number);
    number += more; /* where both have some, the marks are at most that high */
    memcpy(value, &number, sizeof number);
}

void nvs_pool_set_figure(CUmemoryPool pool, CUmemPool_attribute attribute, const void *value)
{
    pthread_mutex_lock(&lock);
    nvs_pool_figures *of = find(pool);
    if (of != NULL && attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
        of->used_high = of->used;
    if (of != NULL && attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
        of->reserved_high = of->reserved;
    if (of != NULL && attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
        memcpy(&of->threshold, value, sizeof of->threshold);
        look(of);
    }
    pthread_mutex_unlock(&lock);
}

void nvs_pool_trimmed(CUmemoryPool pool, size_t keep_bytes)
{
    pthread_mutex_lock(&lock);
    nvs_pool_figures *of = find(pool);
    if (of != NULL)
        shrink(of, keep_bytes);
    pthread_mutex_unlock(&lock);
    nvs_pools_learn();
}

CUresult nvs_pool_destroy(CUmemoryPool pool)
{
    pthread_mutex_lock(&lock);
    const CUresult result = NVS_REAL(cuMemPoolDestroy)(pool);
    nvs_pool_figures **link = &pools, *of;
    while (*link != NULL && (*link)->pool != pool)
        link = &(*link)->next;
    if ((of = result == CUDA_SUCCESS ? *link : NULL) != NULL) {
        *link = of->next;
        of->pool = NULL;
        atomic_fetch_sub_explicit(&nvs_pools_special, of->kind != NVS_POOL_USUAL, memory_order_relaxed); /* see its declaration */
    }
    const bool last = of != NULL && of->count == 0;
    pthread_mutex_unlock(&lock);
    if (last)
        free(of);
    nvs_pools_learn();
    return result;
}

nvs_pool_kind nvs_pool_kind_of(CUmemoryPool pool)
{
    if (atomic_load_explicit(&nvs_pools_special, memory_order_relaxed) == 0) /* see its declaration */
        return NVS_POOL_USUAL;
    pthread_mutex_lock(&lock);
    const nvs_pool_figures *of = find(pool);
    const nvs_pool_kind kind = of != NULL ? of->kind : NVS_POOL_USUAL;
    pthread_mutex_unlock(&lock);
    return kind;
}

bool nvs_pool_set_special(CUmemoryPool pool, bool on_gpu)
{
    nvs_pool_figures *const of = lock_or_make(pool);
    if (of != NULL) {
        atomic_fetch_add_explicit(&nvs_pools_special, of->kind == NVS_POOL_USUAL, memory_order_relaxed); /* see its declaration */
        of->kind = on_gpu ? NVS_POOL_SPECIAL : NVS_POOL_OF_HOST;
        atomic_store_explicit(&nvs_hot.pools, NVS_POOLS_SLOW, memory_order_relaxed); /* see base/hot.h */
    }
    pthread_mutex_unlock(&lock);
    return of != NULL;
}

void nvs_pools_shrink(void)
{
    pthread_mutex_lock(&lock);
    atomic_store_explicit(&nvs_pools_may_shrink, false, memory_order_relaxed); /* changes under the lock */
    for (nvs_pool_figures *of = pools; of != NULL; of = of->next)
        if (of->reserved > of->threshold)
            shrink(of, of->threshold);
    pthread_mutex_unlock(&lock);
    nvs_pools_learn();
}

/* --- what the driver's pools keep --- */

/* Locked.  By the driver's figures, which are 0 for a pool whose memory the hook allocates. */
static uint64_t spare(const nvs_pool_figures *of)
{
    cuuint64_t reserved = 0, used = 0;
    if (NVS_REAL(cuMemPoolGetAttribute)(of->pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) != CUDA_SUCCESS ||
        NVS_REAL(cuMemPoolGetAttribute)(of->pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used) != CUDA_SUCCESS || used > reserved)
        return 0;
    return (reserved - used) / NVS_CHARGE_GRAIN * NVS_CHARGE_GRAIN;
}

void nvs_pool_keeps(CUmemoryPool pool, uint32_t gpu)
{
    nvs_pool_figures *const of = lock_or_make(pool);
    if (of != NULL && of->gpu == NVS_NO_GPU)
        of->gpu = gpu;
    pthread_mutex_unlock(&lock);
    atomic_store_explicit(&nvs_pools_keep, true, memory_order_relaxed); /* see its declaration */
    atomic_store_explicit(&nvs_hot.pools, NVS_POOLS_SLOW, memory_order_relaxed); /* see base/hot.h */
    nvs_pools_learn();
}

uint64_t nvs_pool_take_kept(CUmemoryPool pool, uint32_t gpu, uint64_t bytes)
{
    uint64_t taken = 0;
    nvs_pool_figures *const of = lock_or_make(pool);
    if (of != NULL) {
        of->gpu = gpu;
        taken = kept[gpu] != 0 ? spare(of) : 0;
        taken = taken < bytes ? taken : bytes;
        taken = taken < kept[gpu] ? taken : kept[gpu];
        kept[gpu] -= taken;
    }
    pthread_mutex_unlock(&lock);
    return taken;
}

void nvs_pools_freed(uint32_t gpu, uint64_t bytes)
{
    if (!atomic_load_explicit(&nvs_pools_keep, memory_order_relaxed)) /* see its declaration */
        return;
    pthread_mutex_lock(&lock);
    kept[gpu] += bytes;
    atomic_store_explicit(&nvs_pools_may_shrink, true, memory_order_relaxed); /* changes under the lock */
    pthread_mutex_unlock(&lock);
    nvs_memory_charge_again(gpu, bytes);
}

void nvs_pools_learn(void)
{
    uint64_t now[NVS_MAX_GPUS] = {0};
    if (NVS_LIKELY(!atomic_load_explicit(&nvs_pools_keep, memory_order_relaxed))) /* see its declaration */
        return;
    pthread_mutex_lock(&lock);
    for (const nvs_pool_figures *of = pools; of != NULL; of = of->next)
        if (of->gpu < NVS_MAX_GPUS)
            now[of->gpu] += spare(of);
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        const uint64_t more = now[gpu] - kept[gpu]; /* unsigned arithmetic: right in both directions */
        kept[gpu] = now[gpu];
        now[gpu] = more;
        if (kept[gpu] != 0)
            atomic_store_explicit(&nvs_pools_may_shrink, true, memory_order_relaxed); /* changes under the lock */
    }
    pthread_mutex_unlock(&lock);
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if (now[gpu] != 0)
            nvs_memory_charge_again(gpu, now[gpu]);
}

bool nvs_pools_trim(uint32_t gpu)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* a capture of this thread is not disturbed */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    pthread_mutex_lock(&lock);
    const uint64_t before = kept[gpu];
    for (const nvs_pool_figures *of = pools; before != 0 && of != NULL; of = of->next)
        if (of->gpu == gpu)
            NVS_REAL(cuMemPoolTrimTo)(of->pool, 0);
    pthread_mutex_unlock(&lock);
    nvs_pools_learn();
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    pthread_mutex_lock(&lock);
    const bool less = kept[gpu] < before;
    pthread_mutex_unlock(&lock);
    return less;
}

NVS_FORK_CODE void nvs_pools_after_fork(void)
{
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    pools = NULL;                    /* CUDA is not usable here */
    atomic_store_explicit(&nvs_pools_may_shrink, false, memory_order_relaxed);
    atomic_store_explicit(&nvs_pools_keep, false, memory_order_relaxed);
    atomic_store_explicit(&nvs_pools_special, 0, memory_order_relaxed);
    memset(kept, 0, sizeof kept);
    if (atomic_load_explicit(&ever, memory_order_relaxed) == 0)
        return;
    /* The pages read as zero again, and the kernel copies none of them.  EINVAL: pages are larger here. */
    const bool zeroed = madvise(nvs_pool_buckets, sizeof nvs_pool_buckets, MADV_DONTNEED) == 0;
    for (unsigned i = 0; !zeroed && i < NVS_POOL_BUCKETS * NVS_POOL_PLACES; i++) /* one thread: any order will do */
        atomic_store_explicit(&nvs_pool_buckets[i / NVS_POOL_PLACES].places[i % NVS_POOL_PLACES].key, NVS_POOL_FREE, memory_order_relaxed);
    atomic_store_explicit(&ever, 0, memory_order_relaxed);
}
