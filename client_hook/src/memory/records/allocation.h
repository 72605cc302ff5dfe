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
 * May not go here: CUDA calls, limits, what an eviction means.
 */
#ifndef NVS_ALLOCATION_H
#define NVS_ALLOCATION_H

#include "base/base.h"

typedef enum nvs_space {
    NVS_SPACE_ADDRESS, /* device pointers */
    NVS_SPACE_HANDLE,  /* CUmemGenericAllocationHandle */
    NVS_SPACE_ARRAY,   /* CUarray and CUmipmappedArray */
    NVS_SPACE_POOL,    /* memory pools that must stay the driver's */
    NVS_SPACE_EXECUTABLE, /* CUgraphExec, and a GPU (memory/graph_memory.h) */
    NVS_SPACE_RANGE,   /* addresses that the application reserved, in mode `swap` */
    NVS_SPACES,
} nvs_space;

typedef enum nvs_memory_kind {
    NVS_MEMORY_REAL,        /* the driver's own cuMemAlloc memory */
    NVS_MEMORY_REDIRECTED,  /* the application asked for device memory and got the backend's */
    NVS_MEMORY_APP_MANAGED, /* cuMemAllocManaged by the application itself */
    NVS_MEMORY_POOL,        /* from a stream-ordered pool of the driver */
    NVS_MEMORY_GRAPH,       /* what an executable graph may allocate (memory/graph_memory.h) */
    NVS_MEMORY_HANDLE,      /* physical memory of the application's own VMM */
    NVS_MEMORY_MAPPING,     /* where such memory is mapped; costs nothing itself */
    NVS_MEMORY_ARRAY,
    NVS_MEMORY_MARK,        /* remembers something by its key only */
} nvs_memory_kind;

typedef struct nvs_allocation {
    uint64_t key;           /* address, or handle */
    uint64_t length;        /* bytes that the application asked for; the interval for lookups */
    uint64_t charged_bytes; /* what the quota was charged with */
    uint64_t evicted_bytes; /* estimate: the first so many bytes are off the GPU */
    uint64_t serial;        /* never reused, so that a key may be */
    CUcontext context;      /* whose end is this allocation's end; NULL: none */
    CUevent freed_event;    /* a deferred free: the memory is free when this is done */
    uint64_t freed_on;      /* and for its own stream it is free already: which one that is; 0: not known */
    uint32_t gpu;
    uint32_t references;    /* of a handle */
    uint32_t mappings;      /* of a handle */
    uint8_t space;          /* nvs_space */
    uint8_t kind;           /* nvs_memory_kind */
    bool movable;           /* may be evicted by extents; else it counts as pinned */
    bool chunked;           /* the backend counts and moves it in chunks of its own */
    bool dying;             /* freed by the application, memory still in use by queued work */
    bool held;              /* a reaper looks at it */
    bool orphaned;          /* its context ended while it was held */
    bool linked;            /* reachable by key */
    uint32_t priority;      /* of the treap */
    void *kept;                          /* the backend's own word about it */
    struct nvs_pool_figures *pool;       /* that counts it (pool_figures.h), as so many bytes; NULL: none */
    uint64_t pool_bytes;
    struct nvs_allocation *backing;      /* of a mapping: its handle */
    struct nvs_allocation *left, *right; /* tree */
    struct nvs_allocation *next, *previous;             /* all of one GPU */
    struct nvs_allocation *later_free, *earlier_free;   /* deferred frees of one GPU, oldest first */
} nvs_allocation;

/* A copy that outlives the entry: who moves memory works with these, never with entries. */
typedef struct nvs_extent {
    uint64_t key, length, charged_bytes, evicted_bytes, serial;
    CUcontext context;
} nvs_extent;

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
/* How many there are, held ones included.  Lock-free: asked before every allocation. */
uint32_t nvs_allocation_deferred(uint32_t gpu);
uint64_t nvs_allocation_deferred_bytes(uint32_t gpu);

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

/* --- several steps under one lock; never call the driver in between --- */
void nvs_registry_lock(void);
void nvs_registry_unlock(void);
nvs_allocation *nvs_registry_find(nvs_space space, uint64_t key);      /* containing */
nvs_allocation *nvs_registry_next(nvs_space space, uint64_t key);      /* first that begins at or after */
nvs_allocation *nvs_registry_insert(nvs_allocation *allocation);       /* as nvs_allocation_insert */
void nvs_registry_remove(nvs_allocation *allocation);
/* A mapping is no more: adds it, and its handle if that was the last thing that kept it, to a list. */
void nvs_registry_end_mapping(nvs_allocation *mapping, nvs_allocation **list);

void nvs_allocation_after_fork(void); /* in the child: CUDA is not usable there, nothing is held */

#endif
