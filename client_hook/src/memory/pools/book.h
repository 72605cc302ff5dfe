/* Memory of the driver's stream-ordered pools: a flat table beside the registry (allocation.h).
 *
 * Why: programs allocate and free in stream order tens of thousands of times a second.  An allocation and its free touch one line of the table, and
 * take no lock and no host memory.
 *
 * Invariant: an address is in one place at most, and the thread that claims the place owns it.
 * Non-goals: figures, limits; memory that moves.
 */
#ifndef NVS_POOL_BOOK_H
#define NVS_POOL_BOOK_H

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

void nvs_pool_book_after_fork(void); /* in the child: empty */

#endif
