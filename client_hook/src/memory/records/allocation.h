/* Registry of what the application holds on its GPUs: device allocations, VMM handles and mappings, arrays, pools.
 *
 * One ordered tree per key space, so that a pointer into the middle of an allocation finds it too, and one mutex over
 * all of them: its critical sections are a tree descent, some hundred nanoseconds beside driver calls of microseconds.
 *
 * Invariants:
 *  - no lock is held while the driver is called: an entry is taken out before the driver frees what it stands for (so
 *    that the address may be handed out again at once) and put back if the driver refuses;
 *  - entries of one space never overlap; a new one throws out the stale ones that it covers, because the driver has
 *    just said that their memory is gone;
 *  - an entry that is reachable belongs to the registry, one that was taken out belongs to who took it.
 *
 * Non-goals: CUDA calls, limits, what an eviction means.
 */
#ifndef NVS_ALLOCATION_H
#define NVS_ALLOCATION_H

#include "memory/records/allocation_types.h"

/* A zeroed entry outside the registry, or NULL.  Made before the driver is called, so that nothing can fail after. */
nvs_allocation *nvs_allocation_new(nvs_space space, nvs_memory_kind kind, uint32_t gpu);

/* Puts an entry in.  Returns the stale entries that it displaced, linked by `next`; they are the caller's. */
nvs_allocation *nvs_allocation_insert(nvs_allocation *allocation);

typedef enum nvs_lookup { NVS_ABSENT, NVS_FOUND, NVS_DYING } nvs_lookup;

/* Takes out the entry that begins exactly at `key`.  NVS_DYING: it is freed already, and stays. */
nvs_lookup nvs_allocation_take(nvs_space space, uint64_t key, nvs_allocation **out);

/* Copies the entry that contains `key`. */
nvs_lookup nvs_allocation_find(nvs_space space, uint64_t key, nvs_allocation *copy);

/* Takes out all entries of a context that die with it, linked by `next`. */
nvs_allocation *nvs_allocation_take_context(CUcontext context);

/* Has the entry that begins at `key` counted by a pool.  False: there is none. */
bool nvs_allocation_set_pool(uint64_t key, struct nvs_pool_figures *pool, uint64_t bytes);
/* The pool that counts it, which ceases to; NULL: none. */
struct nvs_pool_figures *nvs_allocation_take_pool(uint64_t key, uint64_t *bytes);

/* What all entries of a kind were charged with, on one GPU. */
uint64_t nvs_allocation_charged(uint32_t gpu, nvs_memory_kind kind);

/* Copies up to `room` movable entries of a GPU that have bytes on it (resident) or off it.  Returns how many there are. */
size_t nvs_allocation_extents(uint32_t gpu, bool resident, nvs_extent *out, size_t room);

/* Records that the evicted part of an entry is now `evicted_bytes`.  Returns the change; 0 when it is gone meanwhile. */
int64_t nvs_allocation_set_evicted(uint64_t key, uint64_t serial, uint64_t evicted_bytes);

/* --- deferred frees: an entry keeps its place under its key until the queued work that uses it is done --- */

/* Marks the redirected entry at `key` as freed and puts it last.  Anything but NVS_FOUND: nothing was done. */
nvs_lookup nvs_allocation_defer(uint64_t key, CUevent event, uint64_t freed_on);
/* Takes a deferred free back for an allocation on the same stream, for which it is in order already: same context, same charge,
 * at least `bytes` long.  The event is the caller's. */
bool nvs_allocation_revive(const nvs_allocation *wanted, size_t bytes, uint64_t *key, CUevent *event);
/* Lends the oldest deferred entries to the caller, who then ends or returns each. */
size_t nvs_allocation_hold_deferred(uint32_t gpu, nvs_allocation **out, size_t room);
/* Returns them in the order that they had; an orphaned one is unlinked instead and stays the caller's (true). */
bool nvs_allocation_unhold(nvs_allocation *held);
/* Takes a held entry out for good; it is the caller's.  False: it was orphaned, so there is nothing left to free in the driver. */
bool nvs_allocation_end_deferred(nvs_allocation *held);

/* --- VMM of the application: physical memory lives while its handle is held or it is mapped somewhere --- */

/* Keeps a handle alive as a mapping does, or NULL when it is not one that is counted.  Ended by one of the next two. */
nvs_allocation *nvs_allocation_pin_handle(uint64_t handle);
nvs_allocation *nvs_allocation_map(nvs_allocation *mapping, nvs_allocation *pinned); /* returns the displaced */
nvs_allocation *nvs_allocation_unpin_handle(nvs_allocation *pinned);                /* returns it if that was the last use */
/* Before an unmap: takes out the mappings that begin in a range, linked by `next`.  After it: ends them or puts them back, and
 * returns what the caller must drop. */
nvs_allocation *nvs_allocation_take_mappings(uint64_t address, uint64_t length);
nvs_allocation *nvs_allocation_end_mappings(nvs_allocation *taken, bool unmapped);
/* The first mapping in a range, or one that reaches into it, of a handle that is not the driver's: a copy, and its handle pinned. */
nvs_allocation *nvs_allocation_pin_mapping(uint64_t address, uint64_t length, nvs_allocation *copy);
/* Is there anything in a range? */
bool nvs_allocation_overlaps(nvs_space space, uint64_t address, uint64_t length);
/* One reference less; false when the handle is not counted.  `last`: out of the registry, and the caller's. */
bool nvs_allocation_release_handle(uint64_t handle, nvs_allocation **last);
/* One reference more, if the handle is counted. */
void nvs_allocation_retain_handle(uint64_t handle);

#endif
