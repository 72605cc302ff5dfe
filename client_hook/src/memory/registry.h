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
#ifndef NVS_REGISTRY_H
#define NVS_REGISTRY_H

#include "base/base.h"

typedef enum nvs_space {
    NVS_SPACE_ADDRESS, /* device pointers */
    NVS_SPACE_HANDLE,  /* CUmemGenericAllocationHandle */
    NVS_SPACE_ARRAY,   /* CUarray and CUmipmappedArray */
    NVS_SPACE_EXECUTABLE, /* CUgraphExec, and a GPU (memory/memory.h) */
    NVS_SPACE_RANGE,   /* addresses that the application reserved, in mode `swap` */
    NVS_SPACES,
} nvs_space;

typedef enum nvs_memory_kind {
    NVS_MEMORY_REAL,        /* the driver's own cuMemAlloc memory */
    NVS_MEMORY_REDIRECTED,  /* device memory for the application, made by the backend */
    NVS_MEMORY_APP_MANAGED, /* cuMemAllocManaged by the application itself */
    NVS_MEMORY_POOL,        /* from a stream-ordered pool of the driver */
    NVS_MEMORY_GRAPH,       /* memory that an executable graph may allocate (memory/memory.h) */
    NVS_MEMORY_HANDLE,      /* physical memory of the application's own VMM */
    NVS_MEMORY_MAPPING,     /* a mapping of such memory; not charged */
    NVS_MEMORY_ARRAY,
    NVS_MEMORY_MARK,        /* a key without memory */
} nvs_memory_kind;

/* Under the registry's lock while it is reachable by key or held. */
typedef struct nvs_allocation {
    uint64_t key;           /* address, or handle */
    uint64_t length;        /* bytes that the application asked for; the interval for lookups */
    uint64_t charged_bytes; /* what the quota was charged with */
    uint64_t evicted_bytes; /* estimate: size of the front part that is off the GPU */
    CUcontext context;      /* the allocation ends with it; NULL: none */
    uint32_t gpu;
    uint8_t kind;           /* nvs_memory_kind */
    struct {                /* set before it is reachable: memory/memory.c, memory.c, hooks/memory */
        void *kept;         /* the backend's data */
        bool movable;       /* may be evicted by extents; else it counts as pinned */
        bool chunked;       /* the backend counts and moves it in chunks of its own */
    } backend;
    struct {                /* the application's virtual memory management: registry.c */
        struct nvs_allocation *handle; /* of a mapping */
        uint32_t references; /* to a handle, which ends with its last reference and mapping */
        uint32_t mappings;
    } vmm;
    struct {                /* a deferred free: registry.c */
        CUevent event;      /* the memory is free when this is done */
        CUcontext context;  /* the event's; NULL: it has ended, when the event was done */
        uint64_t stream;    /* of the free, for which the memory is free at once; 0: not known */
        struct nvs_allocation *later, *earlier; /* of one GPU, oldest first */
        bool dying;         /* freed by the application, memory still in use by queued work */
        bool held;          /* a reaper has it */
        bool orphaned;      /* its context ended while it was held; `context` is NULL */
    } deferred;
    struct {                /* the pool that counts it: pools.h */
        struct nvs_pool_figures *figures; /* NULL: none */
        uint64_t bytes;
    } pool;
    struct {                /* the registry's data: registry.c */
        struct nvs_allocation *left, *right; /* in the treap of its space */
        struct nvs_allocation *next, *previous; /* all of one GPU; `next` also links entries that were taken out */
        uint64_t serial;    /* never reused, so that a key may be; 0: it was never in the registry */
        uint32_t priority;  /* in the treap */
        uint8_t space;      /* nvs_space */
        bool linked;        /* reachable by key */
    } node;
} nvs_allocation;

/* A copy for moves, which may outlive the entry. */
typedef struct nvs_extent {
    uint64_t key, length, charged_bytes, evicted_bytes, serial;
    CUcontext context;
} nvs_extent;

/* --- one step each, under the lock --- */

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

/* For backends: sets how much of an extent is off the GPU. */
void nvs_memory_set_evicted(uint32_t gpu, const nvs_extent *extent, uint64_t evicted_bytes);

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

void nvs_registry_lock(void);
void nvs_registry_unlock(void);

void nvs_registry_after_fork(void); /* in the child: empty */

uint32_t nvs_registry_deferred(uint32_t gpu);                           /* with held ones; without the lock, a hint, as the next */
uint64_t nvs_registry_deferred_bytes(uint32_t gpu);

#endif
