/* Internals of memory mode `swap`: segments of address space, and the chunks of physical memory that back them.
 *
 * A segment is a reserved range of addresses.  It consists of chunks, which move: each is one physical allocation.  A large allocation has
 * a segment of its own; small ones share segments of one chunk (arenas).
 *
 * Invariants:
 *  - while the gate is open, every chunk of every listed segment is mapped, unless it is LOST: one lock covers the opening of the gate and an
 *    allocation's decision whether it needs physical memory;
 *  - the only copy of data is kept, unless no context can use it (LOST): a chunk is unmapped after its copy to the host has completed, and its
 *    host memory is freed after its copy to the GPU has;
 *  - a segment that is freed while the mover uses it (`users`) is destroyed by the mover;
 *  - a segment reserves host memory for all its bytes (host/pool.h), so that it can be evicted.
 *
 * A segment may stand for a handle of the application (`vmm`).  Copies use the segment's addresses; each chunk is mapped a second time
 * wherever the application mapped the handle (segment.c).  When the driver's handle is needed, the segment becomes one pinned chunk (unite.c).
 *
 * Threads: the allocating thread writes `state` and `host` of a chunk before the segment is listed.  Afterwards the agent thread and its
 * movers write them, under the lock.  A thread in the open gate may pin a chunk; a share may end at any time (share.c).  The lock is never
 * held during a driver call.
 */
#ifndef NVS_SWAP_H
#define NVS_SWAP_H

#include "base/base.h"
#include "host/pool.h"
#include "memory/memory.h"

/* --- arena.c: a bitmap of blocks, for small allocations that share a chunk and segments that share a reservation --- */

/* The alignment that cuMemAlloc gives in practice; it promises 256 bytes. */
#define NVS_ARENA_BLOCK 512u

typedef struct nvs_arena {
    uint64_t *used; /* NULL: no arena */
    uint32_t block_bytes;
    uint32_t blocks, free_blocks;
    uint32_t longest; /* upper bound for the longest run of free blocks */
} nvs_arena;

bool nvs_arena_init(nvs_arena *arena, uint64_t bytes, uint32_t block_bytes); /* false: no host memory */
/* Under the lock of the arena's owner.  An allocation begins at a block. */
bool nvs_arena_take(nvs_arena *arena, uint64_t bytes, uint64_t *offset);
void nvs_arena_give(nvs_arena *arena, uint64_t offset, uint64_t bytes);

static inline bool nvs_arena_is_empty(const nvs_arena *arena)
{
    return arena->free_blocks == arena->blocks;
}

/* --- segments and chunks --- */

#define NVS_CHUNK_GRAINS 32u /* of NVS_HOST_GRAIN: a chunk has at most 64 MiB */

typedef enum nvs_chunk_state {
    NVS_CHUNK_UNBACKED, /* no memory yet, and no contents */
    NVS_CHUNK_RESIDENT, /* mapped */
    NVS_CHUNK_EVICTED,  /* on the host */
    NVS_CHUNK_PINNED,   /* mapped; does not move */
    NVS_CHUNK_LOST,     /* contents discarded; never backed again */
} nvs_chunk_state;

static inline bool nvs_chunk_is_mapped(uint8_t state)
{
    return state == NVS_CHUNK_RESIDENT || state == NVS_CHUNK_PINNED;
}

static inline bool nvs_chunk_is_missing(uint8_t state) /* work needs it on the GPU first */
{
    return state == NVS_CHUNK_UNBACKED || state == NVS_CHUNK_EVICTED;
}

typedef struct nvs_chunk {
    void *host[NVS_CHUNK_GRAINS]; /* EVICTED: its grains */
    uint64_t restored;            /* the number of its last restoration */
    uint32_t at, grains;          /* offset in the segment, and size; both in grains */
    uint8_t state;
    uint32_t shares; /* PINNED, under the lock: exports to other processes (share.c) */
    bool mapped; /* segments with `vmm`: there is memory at its address.  Changes within a claim. */
} nvs_chunk;

/* A place where the application has mapped a handle. */
typedef struct nvs_view {
    struct nvs_view *next;
    CUdeviceptr address;
    uint32_t access_count;
    CUmemAccessDesc access[NVS_MAX_GPUS]; /* of cuMemSetAccess, restored with the memory */
} nvs_view;

/* A handle of the application.  A change of `views` needs an exclusive claim; mapping and unmapping of chunks a shared one. */
typedef struct nvs_vmm_handle {
    CUmemAllocationProp properties;
    nvs_view *views;
    uint32_t claims; /* under the lock: shared claims, or EXCLUSIVE (segment.c) */
    CUmemGenericAllocationHandle driver_handle; /* 0: not pinned */
    struct {             /* unite.c, under the lock */
        bool wanted;     /* before the gate opens */
        bool under_way;  /* chunks leave the GPU, and their bytes stay counted as resident */
        CUresult result; /* of the last wait for it */
    } unite;
} nvs_vmm_handle;

typedef struct nvs_segment {
    struct {        /* its place in the list of its GPU: segment.c and segment.c */
        struct nvs_segment *next, *previous;
        bool dead;  /* freed; not listed any more */
    } node;
    CUdeviceptr base;
    uint64_t bytes;
    uint32_t gpu;
    uint32_t users; /* moves under way, and shares */
    bool own_range; /* its addresses are a separate reservation */
    bool sync_memops; /* cuPointerSetAttribute: set again when a chunk is mapped */
    struct {        /* its part of the GPU's figures: segment.c, backend.c, move.c, segment.c */
        uint64_t committed; /* of a dead segment only bytes on the GPU count */
        uint64_t resident;
    } part;
    nvs_vmm_handle *vmm; /* NULL: not a handle of the application */
    nvs_arena arena;     /* `used` not NULL: small allocations share it */
    uint32_t chunk_count;
    nvs_chunk chunks[];
} nvs_segment;

typedef struct nvs_place { /* a chunk; the place is a user of its segment if that is listed */
    nvs_segment *segment;
    uint32_t chunk;
    uint64_t bytes, restored;
} nvs_place;

typedef struct nvs_swap_gpu {
    struct {               /* one large reservation, so that segments are adjacent (segment.c) */
        CUdeviceptr base;
        nvs_arena ranges;  /* `used` NULL: the reservation failed, or is being made */
        bool tried;
    } space;
    nvs_segment *first, *last; /* arenas before all others */
    uint64_t committed; /* bytes of all chunks */
    uint64_t resident;  /* of those, on the GPU or about to be mapped */
    uint64_t pinned;    /* of the resident ones */
    uint64_t restorations;
    uint32_t failures;  /* consecutive restorations that failed, though there was room */
    uint32_t failed_evictions; /* consecutive, and of a kind that lasts; of the mover */
    uint64_t uniting;   /* bytes of the segments that are wanted as one chunk (unite.c) */
    struct {                /* share.c changes it */
        uint32_t accessors; /* GPUs, by bit, that were given access to this one's memory */
        uint32_t complete;  /* of the accessors, those that have access to all mapped chunks */
    } peers;
} nvs_swap_gpu;

/* --- backend.c --- */
extern const nvs_backend nvs_backend_swap;
void nvs_swap_after_fork(void);
/* The application has freed the memory at this address: its IPC handle becomes invalid.  init.c */
extern void (*const nvs_swap_freed)(uint32_t gpu, CUdeviceptr address) __attribute__((visibility("hidden")));

/* --- segment.c --- */
extern nvs_swap_gpu nvs_swap_gpus[NVS_MAX_GPUS]; /* under the lock */
void nvs_swap_lock(void);
void nvs_swap_unlock(void);
void nvs_swap_segments_after_fork(void);

/* The granularity of chunks in bytes; 0: this GPU has no usable virtual memory management. */
uint64_t nvs_swap_unit(uint32_t gpu);
uint64_t nvs_segment_chunk_bytes(const nvs_segment *segment, uint32_t chunk);
CUdeviceptr nvs_segment_chunk_address(const nvs_segment *segment, uint32_t chunk);

bool nvs_swap_owns(CUdeviceptr address); /* in the large reservation of a GPU; ranges that are separate are not recognised */
bool nvs_share_possible(uint32_t gpu); /* the driver can export this GPU's memory as a descriptor */

/* An unlisted segment: addresses and host room, no memory.  `bytes` is a multiple of the unit.  `block_bytes` not 0: an
 * arena of such blocks. */
CUresult nvs_segment_new(uint32_t gpu, uint64_t bytes, uint64_t chunk_bytes, uint32_t block_bytes, nvs_segment **out);
/* Maps physical memory at adjacent chunks, with access for all GPUs that have the right; all or nothing. */
CUresult nvs_chunks_map(const nvs_place *places, size_t count);
CUresult nvs_chunks_allow(uint32_t owner, CUdeviceptr address, uint64_t bytes); /* gives the owner and its accessors access */
bool nvs_chunks_adjoin(const nvs_place *before, const nvs_place *after);
CUresult nvs_chunk_unmap(nvs_segment *segment, uint32_t chunk);
CUresult nvs_segment_back(nvs_segment *segment); /* maps all its chunks, before it is listed */

void nvs_segment_list(nvs_segment *segment);                 /* locked */
bool nvs_segment_is_listed(uint32_t gpu, const nvs_segment *segment); /* locked; the pointer may be stale */
void nvs_segment_pin_chunk(nvs_segment *segment, uint32_t chunk);     /* locked: a resident chunk does not move any more */
void nvs_segment_moved(nvs_segment *segment, int64_t bytes); /* locked: counts restored bytes (negative: evicted) */
/* Locked: unlists it.  True: it has no users, and the caller destroys it once unlocked. */
bool nvs_segment_mark_dead(nvs_segment *segment);
void nvs_segment_destroy(nvs_segment *segment); /* frees its memory and corrects the figures; takes the lock */
void nvs_segment_unref(nvs_segment *segment);  /* drops one user; the last one destroys a dead segment */

/* Pauses before a retry after CUDA_ERROR_OUT_OF_MEMORY: the driver frees the memory of an ended process a little later.  `waited_ns` sums up
 * the pauses; false: the sum has reached its limit. */
bool nvs_swap_pause(uint64_t *waited_ns);

/* Views: the places where the application has mapped its handles. */
nvs_vmm_handle *nvs_vmm_handle_new(const CUmemAllocationProp *properties); /* NULL: no memory */
void nvs_vmm_handle_free(nvs_vmm_handle *vmm);
CUresult nvs_vmm_unmap(CUdeviceptr address, uint64_t bytes);      /* tries twice */
/* Without effect for a segment that is not a handle of the application. */
void nvs_segment_claim(const nvs_segment *segment, bool exclusive);
void nvs_segment_unclaim(const nvs_segment *segment);
/* Calls of the application; the caller keeps the segment alive. */
CUresult nvs_view_add(nvs_segment *segment, CUdeviceptr address);
CUresult nvs_view_end(nvs_segment *segment, CUdeviceptr address);
CUresult nvs_view_allow(nvs_segment *segment, CUdeviceptr address, const CUmemAccessDesc *desc, size_t count);
bool nvs_view_access(nvs_segment *segment, CUdeviceptr address, const CUmemLocation *location, unsigned long long *flags);

/* --- share.c: pinned memory, which work outside of this lease uses --- */
/* Gives another GPU access to this one's memory. */
void nvs_swap_allow(uint32_t gpu, uint32_t accessor);
bool nvs_swap_is_allowed(uint32_t gpu, uint32_t accessor);
typedef struct nvs_share { /* the chunks that hold a range of addresses */
    nvs_segment *segment;
    uint32_t first, count;
    uint64_t bytes, offset; /* size of these chunks, and offset of the range in them */
} nvs_share;
/* Pins the chunks, if others leave the room (memory/memory.h), and adds a user to the segment.  The caller is in the open gate; its
 * pointer may be stale.  CUDA_ERROR_OUT_OF_MEMORY: other programs need the room. */
CUresult nvs_share_begin(uint32_t gpu, nvs_segment *segment, CUdeviceptr address, uint64_t bytes, nvs_share *out);
void nvs_share_end(const nvs_share *share); /* takes the lock; may destroy the segment */
/* Pins the memory of a handle, as one chunk, and returns the driver's handle.  Waits for the lease.  The caller keeps the segment alive. */
CUresult nvs_swap_pin(nvs_segment *segment, CUmemGenericAllocationHandle *out);
/* A file descriptor of a mapped chunk's memory, which the caller closes; -1: failed. */
int nvs_chunk_descriptor(const nvs_segment *segment, uint32_t chunk);
/* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS of a whole segment; the pointer may be stale. */
CUresult nvs_swap_set_sync_memops(uint32_t gpu, nvs_segment *segment, unsigned int on);
bool nvs_swap_sync_memops(uint32_t gpu, const nvs_segment *segment);

/* --- move.c: the thread that moves this GPU's memory (coord/mover.h) --- */
/* Discards memory of dead contexts, and memory that cannot be restored after many attempts; then no chunk is missing. */
nvs_status nvs_swap_move(uint32_t gpu, bool out, const nvs_watch *watch, uint64_t *moved_bytes);

/* The same for all chunks of one segment, without a watch. */
nvs_status nvs_swap_move_segment(nvs_segment *segment, bool out, CUresult *failure);

/* --- unite.c: a handle's chunks become one, which is pinned --- */
/* An application's thread in the open gate, which it leaves meanwhile; `slot` is that of nvs_gate_enter. */
CUresult nvs_swap_unite(nvs_segment *segment, nvs_slot **slot);
void nvs_swap_unite_wanted(uint32_t gpu); /* the mover, with all memory on the GPU: unites what threads wait for */
void nvs_swap_unite_refuse(uint32_t gpu, CUresult why); /* ends the wait of those threads */

/* --- pipeline.c: the same thread, and two of its own while it runs --- */
typedef struct nvs_transfer { /* one move; move.c chooses the chunks, and the goal decides how many of them move */
    uint32_t gpu;
    bool out;
    bool discard; /* move.c: contents are discarded, of all chunks if `out`, else of the missing ones */
    const nvs_segment *only; /* move.c: of this segment; NULL: of all */
    bool ran;     /* move.c: in a context that was not dead */
    nvs_place *places;
    size_t count;
    const nvs_watch *watch; /* NULL: all chunks */
    uint64_t moved_bytes; /* by all contexts, and before them */
    nvs_status status;
    CUresult failure;
} nvs_transfer;
/* How far the goal is after so many bytes; see nvs_watch. */
uint64_t nvs_transfer_left(const nvs_transfer *job, uint64_t moved_bytes, uint64_t least_bytes);
/* The context is current.  On return no copy is under way.  A failure (`status`) and the end of the context (nvs_context_ends) stop it early. */
void nvs_swap_transfer(nvs_transfer *job, CUcontext context);
/* Copies evicted chunks to a segment's addresses, and waits.  The context is current.  The host keeps the contents. */
CUresult nvs_swap_fill(const nvs_segment *segment, const nvs_chunk *chunks, uint32_t count, CUcontext context);

void nvs_swap_lane_ahead(uint32_t gpu); /* makes the streams and events of the GPU's moves, before memory fills the card */
void nvs_swap_lanes_context_leaving(CUcontext context); /* no move uses it any more; the driver may still refuse to end it */
void nvs_swap_lanes_context_gone(CUcontext context);
void nvs_swap_lanes_after_fork(void);

#endif
