/* The inside of memory mode `swap`: segments of address space, and the chunks of physical memory that back them.
 *
 * A segment is a reserved range whose addresses never change while it lives.  It is cut into chunks, the units that move: each is
 * one physical allocation, mapped whole.  A large allocation has a segment of its own; small ones share segments of one chunk
 * (arenas).
 *
 * Invariants:
 *  - while the gate is open, every chunk of every listed segment is on the GPU: the gate is opened, and an allocation decides
 *    whether it needs physical memory, under one lock;
 *  - the only copy of data is never given up: a chunk leaves the GPU when its copy is known to have arrived, and host memory is
 *    given back when the copy the other way has;
 *  - a segment that is freed while the mover uses it (`users`) is destroyed by the mover;
 *  - host room for every byte is reserved with it (host_pool.h): what was admitted can be evicted.
 *
 * Threads: `state` and `host` of a chunk are written by who allocates it before it is listed, and afterwards only by the agent
 * thread, under the lock.  The lock is never held across a call of the driver.
 *
 * May not go here: quotas, the registry of allocations, what the coordinator wants.
 */
#ifndef NVS_SWAP_H
#define NVS_SWAP_H

#include "base.h"
#include "host_pool.h"

#define NVS_CHUNK_GRAINS 32u /* of NVS_HOST_GRAIN: a chunk has at most 64 MiB */

typedef enum nvs_chunk_state {
    NVS_CHUNK_UNBACKED, /* never had anything in it: no memory anywhere */
    NVS_CHUNK_RESIDENT, /* mapped */
    NVS_CHUNK_EVICTED,  /* on the host */
} nvs_chunk_state;

typedef struct nvs_chunk {
    void *host[NVS_CHUNK_GRAINS]; /* EVICTED: where its grains are */
    uint64_t restored;            /* when it came to the GPU last, in restorations */
    uint32_t at, grains;          /* where in the segment, and its size */
    uint8_t state;
} nvs_chunk;

typedef struct nvs_segment {
    struct nvs_segment *next, *previous; /* all of one GPU */
    CUdeviceptr base;
    uint64_t bytes;
    uint32_t gpu;
    uint32_t users; /* moves under way */
    bool doomed;    /* freed; not listed any more */
    uint64_t counted; /* its part of `committed`; once it is doomed only what is on the GPU counts */
    uint64_t on_gpu;  /* its part of `resident` */
    bool own_range; /* its addresses are a reservation of its own */
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
    uint64_t moved_out, moved_in, out_ns, in_ns; /* ever */
    uint64_t restorations;
    uint32_t accessors; /* GPUs, by bit, that were given access to this one's memory */
} nvs_swap_gpu;

/* --- swap_segment.c --- */
extern nvs_swap_gpu nvs_swap_gpus[NVS_MAX_GPUS]; /* under the lock */
void nvs_swap_lock(void);
void nvs_swap_unlock(void);
void nvs_swap_segments_after_fork(void);

/* The bytes that chunks are multiples of; 0: this GPU has no virtual memory management that is of use. */
uint64_t nvs_swap_unit(uint32_t gpu);
uint64_t nvs_segment_chunk_bytes(const nvs_segment *segment, uint32_t chunk);
CUdeviceptr nvs_segment_chunk_address(const nvs_segment *segment, uint32_t chunk);

/* A segment that nobody knows yet: addresses and host room, no memory.  `bytes` is a multiple of the unit. */
CUresult nvs_segment_new(uint32_t gpu, uint64_t bytes, uint32_t chunk_bytes, bool arena, nvs_segment **out);
/* Physical memory at the addresses of neighbouring chunks, with access for all who may; all or nothing.  */
CUresult nvs_chunks_map(const nvs_place *places, size_t count);
bool nvs_chunks_adjoin(const nvs_place *before, const nvs_place *after);
CUresult nvs_chunk_unmap(nvs_segment *segment, uint32_t chunk);
CUresult nvs_segment_back(nvs_segment *segment); /* all of it, before it is listed */

void nvs_segment_list(nvs_segment *segment);                 /* locked */
void nvs_segment_moved(nvs_segment *segment, int64_t bytes); /* locked: so much more of it is on the GPU */
/* Locked: takes it off the list.  True: nobody uses it and the caller must destroy it, once unlocked. */
bool nvs_segment_doom(nvs_segment *segment);
void nvs_segment_destroy(nvs_segment *segment); /* gives everything back and settles the figures; takes the lock itself */

/* Another GPU may now reach this one's memory. */
void nvs_swap_allow(uint32_t gpu, uint32_t accessor);

/* --- swap_arena.c: blocks of 512 bytes, or of whole grains in a space; all locked --- */
#define NVS_ARENA_BLOCK 512u
bool nvs_arena_take(nvs_segment *arena, uint64_t bytes, CUdeviceptr *out);
void nvs_arena_give(nvs_segment *arena, CUdeviceptr pointer, uint64_t bytes);

/* --- swap_move.c: agent thread --- */
nvs_status nvs_swap_move(uint32_t gpu, bool out, uint64_t bytes, void (*progress)(void *, uint64_t), void *argument, uint64_t *moved_bytes);
void nvs_swap_move_context_gone(CUcontext context);
void nvs_swap_move_after_fork(void);

#endif
