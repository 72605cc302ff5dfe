/* The registry's record of an allocation. */
#ifndef NVS_ALLOCATION_TYPES_H
#define NVS_ALLOCATION_TYPES_H

#include "base/base.h"

typedef enum nvs_space {
    NVS_SPACE_ADDRESS, /* device pointers */
    NVS_SPACE_HANDLE,  /* CUmemGenericAllocationHandle */
    NVS_SPACE_ARRAY,   /* CUarray and CUmipmappedArray */
    NVS_SPACE_POOL,    /* memory pools that must stay the driver's */
    NVS_SPACE_EXECUTABLE, /* CUgraphExec, and a GPU (memory/quota/graph_executables.h) */
    NVS_SPACE_RANGE,   /* addresses that the application reserved, in mode `swap` */
    NVS_SPACES,
} nvs_space;

typedef enum nvs_memory_kind {
    NVS_MEMORY_REAL,        /* the driver's own cuMemAlloc memory */
    NVS_MEMORY_REDIRECTED,  /* device memory for the application, made by the backend */
    NVS_MEMORY_APP_MANAGED, /* cuMemAllocManaged by the application itself */
    NVS_MEMORY_POOL,        /* from a stream-ordered pool of the driver */
    NVS_MEMORY_GRAPH,       /* memory that an executable graph may allocate (memory/quota/graph_memory.h) */
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
    struct {                /* set before it is reachable: memory/allocate.c, records/entries.c, hooks/memory */
        void *kept;         /* the backend's data */
        bool movable;       /* may be evicted by extents; else it counts as pinned */
        bool chunked;       /* the backend counts and moves it in chunks of its own */
    } backend;
    struct {                /* the application's virtual memory management: records/allocation_vmm.c */
        struct nvs_allocation *handle; /* of a mapping */
        uint32_t references; /* to a handle, which ends with its last reference and mapping; of a pool: 1 if it is on a GPU */
        uint32_t mappings;
    } vmm;
    struct {                /* a deferred free: records/allocation.c */
        CUevent event;      /* the memory is free when this is done */
        CUcontext context;  /* the event's; NULL: it has ended, when the event was done */
        uint64_t stream;    /* of the free, for which the memory is free at once; 0: not known */
        struct nvs_allocation *later, *earlier; /* of one GPU, oldest first */
        bool dying;         /* freed by the application, memory still in use by queued work */
        bool held;          /* a reaper has it */
        bool orphaned;      /* its context ended while it was held; `context` is NULL */
    } deferred;
    struct {                /* the pool that counts it: pools/figures.h */
        struct nvs_pool_figures *figures; /* NULL: none */
        uint64_t bytes;
    } pool;
    struct {                /* the registry's data: records/registry.c */
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

#endif
