/* Registry of the application's memory on its GPUs: device allocations, VMM handles and mappings, arrays, pools.
 *
 * An ordered tree for each key space, so that a pointer into an allocation finds it.  One mutex guards all trees: its critical sections take some hundred
 * nanoseconds, and the calls of the driver around them microseconds.
 *
 * Invariants:
 *  - no lock is held during calls of the driver: an entry is taken out before the driver frees its memory, since the address may be reused at once, and
 *    put back if the driver fails;
 *  - entries of one space never overlap; a new one displaces the stale ones that it covers, whose memory has ended;
 *  - a reachable entry belongs to the registry, one that was taken out to its taker.
 *
 * Non-goals: CUDA calls, limits, what an eviction means.
 */
#ifndef NVS_ALLOCATION_H
#define NVS_ALLOCATION_H

#include "memory/records/allocation_types.h"

/* A zeroed entry outside the registry, or NULL.  Made before the call of the driver, so that nothing can fail afterwards. */
nvs_allocation *nvs_allocation_new(nvs_space space, nvs_memory_kind kind, uint32_t gpu);

/* Inserts an entry.  Returns the stale entries that it displaced, linked by `node.next`, to the caller. */
nvs_allocation *nvs_allocation_insert(nvs_allocation *allocation);

typedef enum nvs_lookup { NVS_ABSENT, NVS_FOUND, NVS_DYING } nvs_lookup;

/* Takes out the entry that begins at `key`.  NVS_DYING: it is freed already, and stays. */
nvs_lookup nvs_allocation_take(nvs_space space, uint64_t key, nvs_allocation **out);

/* Copies the entry that contains `key`. */
nvs_lookup nvs_allocation_find(nvs_space space, uint64_t key, nvs_allocation *copy);

/* Takes out all entries of a context that die with it, linked by `node.next`; its events end, too. */
nvs_allocation *nvs_allocation_take_context(CUcontext context);

/* Assigns the entry that begins at `key` to a pool's figures.  False: there is no entry. */
bool nvs_allocation_set_pool(uint64_t key, struct nvs_pool_figures *pool, uint64_t bytes);
/* Ends that; returns the pool's figures, NULL: none. */
struct nvs_pool_figures *nvs_allocation_take_pool(uint64_t key, uint64_t *bytes);

/* The charges of all entries of a kind on a GPU. */
uint64_t nvs_allocation_charged(uint32_t gpu, nvs_memory_kind kind);

/* Copies up to `room` movable entries of a GPU that have bytes on it (resident) or off it.  Returns how many there are. */
size_t nvs_allocation_extents(uint32_t gpu, bool resident, nvs_extent *out, size_t room);

/* Records that the evicted part of an entry is now `evicted_bytes`.  Returns the change; 0 if the entry has ended. */
int64_t nvs_allocation_set_evicted(uint64_t key, uint64_t serial, uint64_t evicted_bytes);

/* --- deferred frees: an entry stays until the queued work that uses it is done --- */

/* Marks the redirected entry at `key` as freed, and adds it at the end of the list.  Only NVS_FOUND has an effect. */
nvs_lookup nvs_allocation_defer(uint64_t key, CUevent event, CUcontext context, uint64_t freed_on);
/* Reuses a deferred free for an allocation on the same stream: same context, same charge, at least `bytes` long.  The event goes to the caller. */
bool nvs_allocation_revive(const nvs_allocation *wanted, size_t bytes, uint64_t *key, CUevent *event);
/* Lends the oldest deferred entries to the caller, which ends or returns each. */
size_t nvs_allocation_hold_deferred(uint32_t gpu, nvs_allocation **out, size_t room);
/* The contexts of a held entry's memory and of its event.  NULL: none, or it has ended. */
void nvs_allocation_contexts(const nvs_allocation *held, CUcontext *memory, CUcontext *event);
/* Returns an entry; true: it is orphaned, and belongs to the caller. */
bool nvs_allocation_unhold(nvs_allocation *held);
/* Takes a held entry out, for the caller.  False: it is orphaned, and has no memory of the driver. */
bool nvs_allocation_end_deferred(nvs_allocation *held);

/* --- VMM of the application: physical memory exists while its handle is held or mapped --- */

/* Keeps a handle as a mapping does, until one of the next two; NULL: the handle is not charged. */
nvs_allocation *nvs_allocation_pin_handle(uint64_t handle);
nvs_allocation *nvs_allocation_map(nvs_allocation *mapping, nvs_allocation *pinned); /* returns the displaced */
nvs_allocation *nvs_allocation_unpin_handle(nvs_allocation *pinned);                /* returns it if that was the last use */
/* Before an unmap: takes out the mappings that begin in a range, linked by `node.next`.  After it: ends them or puts them back, and
 * returns what the caller must drop. */
nvs_allocation *nvs_allocation_take_mappings(uint64_t address, uint64_t length);
nvs_allocation *nvs_allocation_end_mappings(nvs_allocation *taken, bool unmapped);
/* The first mapping of a chunked handle that overlaps a range: copies it, and pins its handle. */
nvs_allocation *nvs_allocation_pin_mapping(uint64_t address, uint64_t length, nvs_allocation *copy);
/* Whether an entry overlaps a range. */
bool nvs_allocation_overlaps(nvs_space space, uint64_t address, uint64_t length);
/* Drops a reference; false: the handle is not charged.  `last`: taken out, for the caller. */
bool nvs_allocation_release_handle(uint64_t handle, nvs_allocation **last);
/* Adds a reference, if the handle is charged. */
void nvs_allocation_retain_handle(uint64_t handle);

#endif
