/* Stream-ordered pools: the book of their memory, and their figures.
 *
 * The book has the memory of the driver's pools: a flat table beside the registry (registry.h).
 *
 * Why: programs allocate and free in stream order tens of thousands of times a second.  An allocation and its free touch one line of the table, and
 * take no lock and no host memory.
 *
 * Invariant: an address is in one place at most, and the thread that claims the place owns it.
 *
 * Figures of pools: those of cuMemPoolGetAttribute for memory that the hook allocates instead of a pool, and the charge of what the driver's pools keep.
 *
 * The rules are those of a driver 580 (measured, docs/decisions/pool-figures.md):
 *  - used: the requested bytes, until the call that frees them.  Memory that cuMemFree frees stays counted.
 *  - reserved: whole pieces of 32 MiB.  A wait for a stream, an event or a context gives free pieces back, if the pool has more than
 *    its release threshold; so does a trim.
 * The fragmentation of the driver's pool is not known: `reserved` is that of a pool without gaps.
 *
 * A driver's pool with a release threshold keeps freed memory on the card, and each pool of the program's own has pieces of its own.  As soon as the
 * process has set a threshold or made a pool, each GPU is charged with what its pools reserve beyond their allocations, by the driver's figures.  An allocation takes over the charge of the memory that it reuses.  Kept
 * memory is trimmed before an allocation is refused.
 *
 * One lock, taken with no other.  It is held during calls that name a pool of the list, so that no thread destroys the pool meanwhile.
 *
 * Non-goals: where memory comes from (hooks/pool.c); the quota; memory that moves.
 */
#ifndef NVS_POOLS_H
#define NVS_POOLS_H

#include "base/base.h"

#include <stdatomic.h>

enum { NVS_POOL_BUCKET_BITS = 13, NVS_POOL_BUCKETS = 1 << NVS_POOL_BUCKET_BITS, NVS_POOL_PLACES = 2 }; /* a bucket is a line */
enum { NVS_POOL_FREE = 0, NVS_POOL_TAKEN = 1 }; /* keys that are no addresses */

typedef struct nvs_pool_memory {
    uint64_t address;
    uint64_t charged_bytes;
    CUcontext context; /* the memory ends with it; NULL: none */
    uint32_t gpu;
} nvs_pool_memory;

/* A thread claims a place by exchanging its key for TAKEN.  Only that thread reads or writes the rest. */
typedef struct nvs_pool_place {
    _Atomic uint64_t key;       /* FREE, TAKEN, or the address */
    uint64_t charged_bytes;     /* this and the GPU belong to the claim */
    _Atomic(CUcontext) context; /* relaxed: also read without a claim, and then again with one */
    uint32_t gpu;
} nvs_pool_place;

typedef struct nvs_pool_bucket {
    _Alignas(64) nvs_pool_place places[NVS_POOL_PLACES];
} nvs_pool_bucket;
_Static_assert(sizeof(nvs_pool_bucket) == 64, "one line");

extern nvs_pool_bucket nvs_pool_buckets[NVS_POOL_BUCKETS] __attribute__((visibility("hidden")));

static inline nvs_pool_bucket *nvs_pool_bucket_of(uint64_t address)
{
    return &nvs_pool_buckets[address * UINT64_C(0x9e3779b97f4a7c15) >> (64 - NVS_POOL_BUCKET_BITS)]; /* Fibonacci hashing */
}

static inline bool nvs_pool_claim(nvs_pool_place *at, uint64_t key)
{
    /* Acquire: pairs with the release in nvs_pool_set(). */
    return atomic_load_explicit(&at->key, memory_order_relaxed) == key &&
           atomic_compare_exchange_strong_explicit(&at->key, &key, NVS_POOL_TAKEN, memory_order_acquire, memory_order_relaxed);
}

/* Ends a claim. */
static inline void nvs_pool_set(nvs_pool_place *at, uint64_t key)
{
    atomic_store_explicit(&at->key, key, memory_order_release); /* pairs with nvs_pool_claim() */
}

static inline nvs_pool_memory nvs_pool_content(nvs_pool_place *at, uint64_t address)
{
    return (nvs_pool_memory){address, at->charged_bytes, atomic_load_explicit(&at->context, memory_order_relaxed), at->gpu};
}

/* Before the first nvs_pool_book_enter: the table may have entries from now on. */
void nvs_pool_book_begin(void);

/* False: no place is free. */
static inline bool nvs_pool_book_enter(const nvs_pool_memory *memory)
{
    nvs_pool_bucket *in = nvs_pool_bucket_of(memory->address);
    for (unsigned i = 0; i < NVS_POOL_PLACES; i++) {
        nvs_pool_place *at = &in->places[i];
        if (!nvs_pool_claim(at, NVS_POOL_FREE))
            continue;
        at->charged_bytes = memory->charged_bytes;
        atomic_store_explicit(&at->context, memory->context, memory_order_relaxed);
        at->gpu = memory->gpu;
        nvs_pool_set(at, memory->address);
        return true;
    }
    return false;
}

/* Whether memory begins at this address; another thread may claim it meanwhile. */
static inline bool nvs_pool_book_has(uint64_t address)
{
    const nvs_pool_bucket *in = nvs_pool_bucket_of(address);
    bool has = false;
    for (unsigned i = 0; i < NVS_POOL_PLACES; i++)
        has |= atomic_load_explicit(&in->places[i].key, memory_order_relaxed) == address;
    return has;
}

/* Claims the memory that begins at this address; NULL: there is none.  Exactly one of the next two ends the claim. */
static inline nvs_pool_place *nvs_pool_book_claim(uint64_t address, nvs_pool_memory *out)
{
    nvs_pool_bucket *in = nvs_pool_bucket_of(address);
    for (unsigned i = 0; address > NVS_POOL_TAKEN && i < NVS_POOL_PLACES; i++) {
        nvs_pool_place *at = &in->places[i];
        if (!nvs_pool_claim(at, address))
            continue;
        *out = nvs_pool_content(at, address);
        return at;
    }
    return NULL;
}

/* The memory is free. */
static inline void nvs_pool_book_remove(nvs_pool_place *claimed)
{
    nvs_pool_set(claimed, NVS_POOL_FREE);
}

/* The driver did not free it. */
static inline void nvs_pool_book_restore(nvs_pool_place *claimed, uint64_t address)
{
    nvs_pool_set(claimed, address);
}

/* Takes the next memory of a context, from `*place` on, which begins at 0; false: there is no more. */
bool nvs_pool_book_take_of(CUcontext context, uint32_t *place, nvs_pool_memory *out);

/* --- figures and charges of pools --- */

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

/* A special pool must stay the driver's: it is shared with other processes or GPUs, or its memory is the host's. */
typedef enum nvs_pool_kind { NVS_POOL_USUAL, NVS_POOL_SPECIAL, NVS_POOL_OF_HOST } nvs_pool_kind;
extern _Atomic uint32_t nvs_pools_special __attribute__((visibility("hidden"))); /* how many.  Relaxed: a thread gets a pool from the call that counted it */
nvs_pool_kind nvs_pool_kind_of(CUmemoryPool pool);
bool nvs_pool_set_special(CUmemoryPool pool, bool on_gpu); /* false: the host has no memory */

extern _Atomic bool nvs_pools_keep __attribute__((visibility("hidden"))); /* a threshold was set, or a pool made.  Relaxed: as nvs_hot.pools */
/* The pool was made, or got a threshold.  `gpu`: where it probably is, until its next allocation tells. */
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

void nvs_pools_after_fork(void); /* in the child: none */

#endif
