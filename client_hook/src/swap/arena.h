/* A bitmap of blocks: small allocations that share a chunk, and segments that share a reservation.  First fit keeps used blocks together. */
#ifndef NVS_ARENA_H
#define NVS_ARENA_H

#include "base/base.h"

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

#endif
