/* The inside of memory mode `swap`: segments of address space, and the chunks of physical memory that back them.
 *
 * A segment is a reserved range whose addresses never change while it lives.  It is cut into chunks, the units that move: each is
 * one physical allocation, mapped whole.  A large allocation has a segment of its own; small ones share segments of one chunk
 * (arenas).
 *
 * Invariants:
 *  - while the gate is open, every chunk of every listed segment that is not LOST is mapped: the gate is opened, and an allocation
 *    decides whether it needs physical memory, under one lock;
 *  - the only copy of data is never given up, unless no context can use it (LOST): a chunk leaves the GPU when its copy is known to have arrived,
 *    and host memory is given back when the copy the other way has;
 *  - a segment that is freed while the mover uses it (`users`) is destroyed by the mover;
 *  - host room for every byte is reserved with it (host/pool.h): what was admitted can be evicted.
 *
 * A segment may stand for a handle of the application's own virtual memory management (`own`).  Then its addresses are where its
 * chunks are copied from and to, and each is mapped a second time wherever the application mapped the handle (view.c).
 *
 * Threads: `state` and `host` of a chunk are written by who allocates it before it is listed, and afterwards only by the agent
 * thread and its movers, under the lock; an application's thread that stands in the open gate may pin, and who
 * shared a chunk (share.c) ends that at any time.  The lock is never held
 * across a call of the driver.
 *
 * May not go here: quotas, the registry of allocations, what the coordinator wants.
 */
#ifndef NVS_SWAP_H
#define NVS_SWAP_H

#include "base/base.h"
#include "host/pool.h"
#include "memory/memory.h"

#define NVS_CHUNK_GRAINS 32u /* of NVS_HOST_GRAIN: a chunk has at most 64 MiB */

typedef enum nvs_chunk_state {
    NVS_CHUNK_UNBACKED, /* never had anything in it: no memory anywhere */
    NVS_CHUNK_RESIDENT, /* mapped */
    NVS_CHUNK_EVICTED,  /* on the host */
    NVS_CHUNK_PINNED,   /* mapped, and not moved: others know of it */
    NVS_CHUNK_LOST,     /* its contents are given up: it has no memory, and gets none */
} nvs_chunk_state;

static inline bool nvs_chunk_is_mapped(uint8_t state)
{
    return state == NVS_CHUNK_RESIDENT || state == NVS_CHUNK_PINNED;
}

static inline bool nvs_chunk_is_missing(uint8_t state) /* work cannot run without it being brought in */
{
    return state == NVS_CHUNK_UNBACKED || state == NVS_CHUNK_EVICTED;
}

typedef struct nvs_chunk {
    void *host[NVS_CHUNK_GRAINS]; /* EVICTED: where its grains are */
    uint64_t restored;            /* when it came to the GPU last, in restorations */
    uint32_t at, grains;          /* where in the segment, and its size */
    uint8_t state;
    uint32_t shares; /* under the lock: of a PINNED one, how many exports to other processes keep it (share.c) */
    bool mapped; /* of a segment with `own`: there is memory at its address.  Changes within a claim. */
} nvs_chunk;

/* A place where the application has mapped a handle. */
typedef struct nvs_view {
    struct nvs_view *next;
    CUdeviceptr address;
    uint32_t access_count;
    CUmemAccessDesc access[NVS_MAX_GPUS]; /* what cuMemSetAccess gave it, to be given again */
} nvs_view;

/* What a segment is when it stands for a handle of the application.  Who changes `views`, and who maps and unmaps chunks, has a claim
 * meanwhile: the first alone, the others side by side. */
typedef struct nvs_own {
    CUmemAllocationProp properties;
    nvs_view *views;
    uint32_t claims; /* under the lock; alone: ALONE (view.c) */
    CUmemGenericAllocationHandle real; /* once pinned: the driver's, which we hold */
} nvs_own;

typedef struct nvs_segment {
    struct nvs_segment *next, *previous; /* all of one GPU */
    CUdeviceptr base;
    uint64_t bytes;
    uint32_t gpu;
    uint32_t users; /* moves under way */
    bool dead;    /* freed; not listed any more */
    uint64_t counted; /* its part of `committed`; once it is dead only what is on the GPU counts */
    uint64_t on_gpu;  /* its part of `resident` */
    nvs_own *own;     /* NULL: it is no handle of the application */
    bool own_range; /* its addresses are a reservation of its own */
    bool sync_memops; /* cuPointerSetAttribute: given again to what is mapped */
    /* An arena: which of its blocks are in use. */
    uint64_t *used; /* NULL: not an arena */
    uint32_t block_bytes;
    uint32_t blocks, free_blocks;
    uint32_t longest; /* no run of free blocks is longer; an estimate from above */
    uint32_t chunk_count;
    nvs_chunk chunks[];
} nvs_segment;

typedef struct nvs_place { /* a chunk; who has one holds its segment by `users`, or nobody else knows of it yet */
    nvs_segment *segment;
    uint32_t chunk;
    uint64_t bytes, restored;
} nvs_place;

typedef struct nvs_swap_gpu {
    nvs_segment *space; /* one large reservation, cut up as an arena is, so that segments are neighbours; without chunks */
    bool no_space;      /* it could not be had */
    nvs_segment *first, *last; /* arenas before all others */
    uint64_t committed; /* bytes of all chunks */
    uint64_t resident;  /* of those, on the GPU or about to be */
    uint64_t pinned;    /* of the resident ones */
    uint64_t moved_out, moved_in, out_ns, in_ns; /* ever */
    uint64_t restorations;
    uint32_t failures;  /* restorations in a row that brought nothing, other than for want of room */
    uint32_t accessors; /* GPUs, by bit, that were given access to this one's memory */
    uint32_t granted; /* of the accessors, those that have their rights to all that is mapped */
    bool reached; /* another GPU of this process works on its memory, whatever lease there is: it stays.  peers.c */
} nvs_swap_gpu;

/* --- backend.c --- */
extern const nvs_backend nvs_backend_swap;
void nvs_swap_after_fork(void);
/* The application has freed the memory that began at this address: nobody else may open it any more.  init.c */
extern void (*const nvs_swap_freed)(uint32_t gpu, CUdeviceptr address) __attribute__((visibility("hidden")));

/* --- table.c, segment.c --- */
extern nvs_swap_gpu nvs_swap_gpus[NVS_MAX_GPUS]; /* under the lock */
void nvs_swap_lock(void);
void nvs_swap_unlock(void);
void nvs_swap_wait(void); /* locked: until somebody wakes; may return early */
void nvs_swap_wake(void);
void nvs_swap_segments_after_fork(void);

/* The bytes that chunks are multiples of; 0: this GPU has no virtual memory management that is of use. */
uint64_t nvs_swap_unit(uint32_t gpu);
uint64_t nvs_segment_chunk_bytes(const nvs_segment *segment, uint32_t chunk);
CUdeviceptr nvs_segment_chunk_address(const nvs_segment *segment, uint32_t chunk);

bool nvs_share_possible(uint32_t gpu); /* the driver can export this GPU's memory as a descriptor */

/* A segment that nobody knows yet: addresses and host room, no memory.  `bytes` is a multiple of the unit.  `block_bytes` not 0: an
 * arena of such blocks. */
CUresult nvs_segment_new(uint32_t gpu, uint64_t bytes, uint64_t chunk_bytes, uint32_t block_bytes, nvs_segment **out);
/* Physical memory at the addresses of neighbouring chunks, with access for all who may; all or nothing.  */
CUresult nvs_chunks_map(const nvs_place *places, size_t count);
bool nvs_chunks_adjoin(const nvs_place *before, const nvs_place *after);
CUresult nvs_chunk_unmap(nvs_segment *segment, uint32_t chunk);
CUresult nvs_segment_back(nvs_segment *segment); /* gives all its chunks memory, before it is listed */

void nvs_segment_list(nvs_segment *segment);                 /* locked */
void nvs_segment_moved(nvs_segment *segment, int64_t bytes); /* locked: so much more of it is on the GPU */
/* Locked: takes it off the list.  True: nobody uses it and the caller must destroy it, once unlocked. */
bool nvs_segment_mark_dead(nvs_segment *segment);
void nvs_segment_destroy(nvs_segment *segment); /* gives everything back and settles the figures; takes the lock itself */
void nvs_segment_unref(nvs_segment *segment);  /* one user less; destroys it if it was the last and it is dead */

/* After the driver has said that there is no memory though there should be room: whose process has just ended gives it back a little
 * later.  Waits a moment; false: it has waited long enough in all, which `waited_ns` counts. */
bool nvs_swap_patience(uint64_t *waited_ns);

/* --- rights.c --- */
CUresult nvs_rights_of_access(uint32_t owner, CUdeviceptr address, uint64_t bytes); /* for all who may reach the owner's memory */
void nvs_rights_of_attributes(const nvs_segment *segment, uint32_t chunk);

/* --- peers.c --- */
/* Another GPU may now reach this one's memory. */
void nvs_swap_allow(uint32_t gpu, uint32_t accessor);
bool nvs_swap_is_allowed(uint32_t gpu, uint32_t accessor);
/* Another GPU of this process works on this one's memory from now on: all of it stays on the card.  Waits for the lease, once. */
void nvs_swap_reach(uint32_t gpu);
bool nvs_swap_is_reached(uint32_t gpu);
/* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS of all that a segment holds; the segment may be gone. */
CUresult nvs_swap_set_sync_memops(uint32_t gpu, nvs_segment *segment, unsigned int on);
bool nvs_swap_sync_memops(uint32_t gpu, const nvs_segment *segment);

/* --- view.c --- */
nvs_own *nvs_own_new(const CUmemAllocationProp *properties); /* NULL: no memory */
void nvs_own_free(nvs_own *own);
/* No claim is needed, and none is taken, for a segment that is no handle of the application. */
void nvs_segment_claim(const nvs_segment *segment, bool alone);
void nvs_segment_unclaim(const nvs_segment *segment);
/* Within a claim: a chunk's memory at all views, or at none. */
CUresult nvs_views_map(const nvs_segment *segment, uint32_t chunk, CUmemGenericAllocationHandle handle);
CUresult nvs_views_unmap(const nvs_segment *segment, uint32_t chunk);
void nvs_views_map_again(const nvs_segment *segment, uint32_t chunk); /* it is still at its own address */
/* What the application does to a view; the caller keeps the segment alive. */
CUresult nvs_view_add(nvs_segment *segment, CUdeviceptr address);
CUresult nvs_view_end(nvs_segment *segment, CUdeviceptr address);
CUresult nvs_view_allow(nvs_segment *segment, CUdeviceptr address, const CUmemAccessDesc *desc, size_t count);
bool nvs_view_access(nvs_segment *segment, CUdeviceptr address, const CUmemLocation *location, unsigned long long *flags);
/* The driver's handle of a segment of one chunk, which does not move from now on.  The caller stands in the open gate. */
CUresult nvs_swap_pin(nvs_segment *segment, CUmemGenericAllocationHandle *real);

/* --- share.c: chunks that other processes map too --- */
typedef struct nvs_share { /* the chunks that hold a range of addresses */
    nvs_segment *segment;
    uint32_t first, count;
    uint64_t bytes, offset; /* of these chunks together, and where in them the range begins */
} nvs_share;
/* Pins them, if they may be (memory/quota/pins.h); the segment has one user more.  The caller stands in the open gate.  The segment may be gone.
 * CUDA_ERROR_OUT_OF_MEMORY: other programs need the room. */
CUresult nvs_share_begin(uint32_t gpu, nvs_segment *segment, CUdeviceptr address, uint64_t bytes, nvs_share *out);
void nvs_share_end(const nvs_share *share); /* takes the lock itself; may destroy the segment */
/* A descriptor of a mapped chunk's memory, the caller's to close; -1: there is none. */
int nvs_chunk_descriptor(const nvs_segment *segment, uint32_t chunk);

/* --- arena.c: blocks of 512 bytes, or of whole grains in an arena of large ones and in a space; all locked --- */
#define NVS_ARENA_BLOCK 512u
bool nvs_arena_take(nvs_segment *arena, uint64_t bytes, CUdeviceptr *out);
void nvs_arena_give(nvs_segment *arena, CUdeviceptr pointer, uint64_t bytes);

/* --- move.c: the thread that moves this GPU's memory (coord/memory/moves.h) --- */
/* Memory of dead contexts, and what cannot be restored after many attempts, is given up instead: nothing is missing any more. */
nvs_status nvs_swap_move(uint32_t gpu, bool out, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes);

/* --- pipeline.c: the same thread, and two of its own while it runs --- */
typedef struct nvs_transfer { /* chunks on their way */
    uint32_t gpu;
    bool out;
    const nvs_place *places;
    size_t count;
    const nvs_watch *watch; /* or NULL */
    uint64_t moved_bytes; /* in: by earlier contexts for the same order */
    nvs_status status;
    CUresult failure;
} nvs_transfer;
/* In the context, which is current.  Afterwards nothing of it is under way; `status` says why it stopped early, if it failed.  The end of the context
 * (nvs_context_ends) stops it early too. */
void nvs_swap_transfer(nvs_transfer *job, CUcontext context);

/* --- lane.c --- */
enum { NVS_LANE_STREAMS = 2, NVS_LANE_EVENTS = 6 };
typedef struct nvs_lane { /* what a GPU's memory is moved with */
    CUcontext context; /* NULL: nothing is there */
    CUstream streams[NVS_LANE_STREAMS];
    CUevent events[NVS_LANE_EVENTS];
} nvs_lane;
/* Mover thread, in the context, which is current. */
CUresult nvs_swap_lane(uint32_t gpu, CUcontext context, nvs_lane **out);
void nvs_swap_lanes_context_leaving(CUcontext context); /* nobody moves anything in it any more; it may live on */
void nvs_swap_lanes_context_gone(CUcontext context);
void nvs_swap_lanes_after_fork(void);

#endif
