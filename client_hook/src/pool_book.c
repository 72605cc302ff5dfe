/* See pool_book.h.  Places are found by a hash of the address, among the few of one bucket; where those are taken the caller
 * remembers the memory elsewhere.
 *
 * A place is claimed by exchanging its key for TAKEN, and only who has claimed it reads or writes the rest. */
#include "pool_book.h"

#include <stdatomic.h>

enum { BUCKET_BITS = 13, BUCKETS = 1 << BUCKET_BITS, PLACES = 2 }; /* a bucket is a line */
enum { FREE = 0, TAKEN = 1 }; /* keys that are no addresses */

struct nvs_pool_place {
    _Atomic uint64_t key;       /* FREE, TAKEN, or the address */
    uint64_t charged_bytes;     /* this and the GPU belong to who has claimed it */
    _Atomic(CUcontext) context; /* relaxed: looked at without a claim too, and again with one */
    uint32_t gpu;
};

typedef struct bucket {
    _Alignas(64) nvs_pool_place places[PLACES];
} bucket;
_Static_assert(sizeof(bucket) == 64, "one line");

static bucket buckets[BUCKETS];
static _Atomic uint32_t ever; /* 1 when anything ever stood here: else there is nothing to look through.  Relaxed: a hint for who
                                 has made its calls after those of others */

static bucket *bucket_of(uint64_t address)
{
    return &buckets[address * UINT64_C(0x9e3779b97f4a7c15) >> (64 - BUCKET_BITS)]; /* Fibonacci hashing */
}

static bool claim(nvs_pool_place *at, uint64_t key)
{
    /* Acquire: pairs with the release in set(). */
    return atomic_load_explicit(&at->key, memory_order_relaxed) == key &&
           atomic_compare_exchange_strong_explicit(&at->key, &key, TAKEN, memory_order_acquire, memory_order_relaxed);
}

/* Ends a claim. */
static void set(nvs_pool_place *at, uint64_t key)
{
    atomic_store_explicit(&at->key, key, memory_order_release); /* pairs with claim() */
}

static nvs_pool_memory content(nvs_pool_place *at, uint64_t address)
{
    return (nvs_pool_memory){address, at->charged_bytes, atomic_load_explicit(&at->context, memory_order_relaxed), at->gpu};
}

bool nvs_pool_book_enter(const nvs_pool_memory *memory)
{
    bucket *in = bucket_of(memory->address);
    for (unsigned i = 0; i < PLACES; i++) {
        nvs_pool_place *at = &in->places[i];
        if (!claim(at, FREE))
            continue;
        at->charged_bytes = memory->charged_bytes;
        atomic_store_explicit(&at->context, memory->context, memory_order_relaxed);
        at->gpu = memory->gpu;
        set(at, memory->address);
        if (NVS_UNLIKELY(atomic_load_explicit(&ever, memory_order_relaxed) == 0))
            atomic_store_explicit(&ever, 1, memory_order_relaxed);
        return true;
    }
    return false;
}

nvs_pool_place *nvs_pool_book_claim(uint64_t address, nvs_pool_memory *out)
{
    bucket *in = bucket_of(address);
    for (unsigned i = 0; address > TAKEN && i < PLACES; i++) {
        nvs_pool_place *at = &in->places[i];
        if (!claim(at, address))
            continue;
        *out = content(at, address);
        return at;
    }
    return NULL;
}

void nvs_pool_book_strike(nvs_pool_place *claimed)
{
    set(claimed, FREE);
}

void nvs_pool_book_restore(nvs_pool_place *claimed, uint64_t address)
{
    set(claimed, address);
}

/* With the claim, the context is looked at again: the place may have changed hands. */
static bool take_if_of(nvs_pool_place *at, CUcontext context, nvs_pool_memory *out)
{
    const uint64_t key = atomic_load_explicit(&at->key, memory_order_relaxed);
    if (key <= TAKEN || atomic_load_explicit(&at->context, memory_order_relaxed) != context || !claim(at, key))
        return false;
    *out = content(at, key);
    const bool found = out->context == context;
    set(at, found ? FREE : key);
    return found;
}

bool nvs_pool_book_take_of(CUcontext context, uint32_t *place, nvs_pool_memory *out)
{
    if (context == NULL || atomic_load_explicit(&ever, memory_order_relaxed) == 0)
        return false;
    while (*place < BUCKETS * PLACES) {
        const uint32_t i = (*place)++;
        if (take_if_of(&buckets[i / PLACES].places[i % PLACES], context, out))
            return true;
    }
    return false;
}

void nvs_pool_book_after_fork(void)
{
    if (atomic_load_explicit(&ever, memory_order_relaxed) == 0)
        return;
    for (unsigned i = 0; i < BUCKETS * PLACES; i++) /* one thread: any order will do */
        atomic_store_explicit(&buckets[i / PLACES].places[i % PLACES].key, FREE, memory_order_relaxed);
    atomic_store_explicit(&ever, 0, memory_order_relaxed);
}
